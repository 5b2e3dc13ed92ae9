"""common/memory/budget.py: whether a run fits, how updates then work, and what a start says on a GPU.

A GPU is what torch reports: here its reports are replaced, so that all of it runs on a CPU.
"""

import json
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common import distributed
from common.data.processor import Processor
from common.memory import budget, memory
from common.model import build, vlm
from common.model.vlm import UpdateSetting
from common.rollout import RolloutEngine
from conftest import read_json, read_rows, start, take, user_error, words, write_json
from helpers import planned

GIB = 2**30
GRAPHICS = SimpleNamespace(device=torch.device("cuda"), world=8)


class Stairs:
    """A run whose needs are plain numbers: four layers, of which one that is recomputed keeps a tenth of
    its activations, with attention two tenths, with products six."""

    def __init__(self, flag: str, group: int, adapter: dict | None = None):
        decoder = torch.nn.Module()
        decoder.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(4))
        setup = SimpleNamespace(adapter=adapter)
        model = SimpleNamespace(get_decoder=lambda: decoder, setup=setup)
        self.models, self.trained = {"actor": SimpleNamespace(model=model)}, ["actor"]
        self.group = group
        self.args = SimpleNamespace(
            gradient_checkpointing=flag, max_tokens_per_pack=16384, train_vision=False
        )

    def update_phases(self, setting: UpdateSetting) -> dict[str, budget.Parts]:
        tenths = 10 * (4 - setting.recomputed) + setting.recomputed
        tenths += setting.keep_attention * setting.recomputed + 4 * setting.keep_products
        return {
            "update": {"resident": 4 * GIB, "activations": setting.tokens * tenths / 16384 * GIB}
        }


# In packs of 16,384 tokens 4 + 40 GiB with nothing recomputed, 4 + 8 with everything but attention.
@pytest.mark.parametrize(
    "flag, group, peak, setting",
    [
        ("off", 0, 4, (16384, 0)),
        ("on", 0, 100, (16384, 4)),
        ("auto", 20000, 44, (16384, 0)),
        # half a pack holds the group, and needs 20
        ("auto", 8192, 24, (8192, 0)),
        # a group of 8,193 tokens wants a pack of 8,448, which needs 20.6
        ("auto", 8193, 24.63, (8448, 0)),
        ("auto", 8193, 24, (16384, 3, True, 1)),
        ("auto", 20000, 43.99, (16384, 1, True, 1)),
        ("auto", 20000, 35.99, (16384, 2, True, 1)),
        ("auto", 20000, 31.99, (16384, 2, True, 0)),
        ("auto", 20000, 19.99, (16384, 4, True, 1)),
        ("auto", 20000, 12, (16384, 4, True, 0)),
        # without attention they need 4 + 4
        ("auto", 20000, 11.99, (16384, 4, False, 0)),
    ],
)
def test_updates_recompute_no_more_than_memory_requires(flag, group, peak, setting):
    """By hand; a share of 8 % stays free. The activations of a tower are in no plan."""
    gib = (peak + 1e-6) / 0.92
    assert budget.choose(Stairs(flag, group), gib) == UpdateSetting(*setting)
    adapted = budget.choose(Stairs(flag, group, adapter={"r": 4}), gib)
    assert adapted == UpdateSetting(*setting)._replace(keep_products=0)
    with_tower = Stairs(flag, group)
    with_tower.args.train_vision = True
    assert budget.choose(with_tower, gib) == UpdateSetting(16384, 0 if flag == "off" else 4)


def reported(monkeypatch, gib: float) -> list[int]:
    """A machine with so much free memory; returns the sizes of the collectives that warm NCCL up."""
    sizes = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(gib * GIB), 80 * GIB))
    monkeypatch.setattr(distributed, "warm_up", lambda ranks, size: sizes.append(size))
    return sizes


LINE = "--kl_coef 0.01 --dtype bfloat16"


def fit(dry, checkpointing: str) -> None:
    dry.needed.args = replace(dry.args, gradient_checkpointing=checkpointing)
    budget.fit(dry.needed, GRAPHICS)


@pytest.mark.slow
def test_a_start_says_what_it_chose_before_it_reads_weights(
    seven_b, picture_rows, monkeypatch, capsys
):
    """7B on eight GPUs: into 79 GiB it fits with some layers recomputed, which these layers then are; into
    30 not at all. Less than 8 % to spare is warned of."""
    dry = planned(seven_b, picture_rows, *words(LINE))
    sizes = reported(monkeypatch, 79.0)
    fit(dry, "auto")
    assert sizes == [memory.gathered_bytes(dry.models["actor"], 8)[1]]
    match = re.fullmatch(
        r"memory per GPU: (\d\d\.\d) of 79.0 GiB, in update actor; packs of ([\d,]+) tokens, (.*)\n",
        capsys.readouterr().out,
    )
    peak, tokens, layers = match.groups()
    assert 0.85 < float(peak) / 79 <= 0.92
    for role in ("actor", "critic"):
        setting = dry.models[role].model.setup.updates
        assert tokens == f"{setting.tokens:,}"
        assert str(setting).endswith(layers)
        recomputed = [
            layer.gradient_checkpointing for layer in vlm.decoder(dry.models[role].model).layers
        ]
        assert recomputed == [k < setting.recomputed for k in range(28)]
    advice = "--gradient_checkpointing auto, smaller packs"
    with user_error(
        f"packs of 16,384 tokens, nothing recomputed: does not fit; what helps: {advice}"
    ):
        fit(dry, "off")
    setting = UpdateSetting(dry.args.max_tokens_per_pack, 28)
    peak, _ = budget.peak_of(dry.needed.phases(setting))
    for share, warned in ((0.91, False), (0.93, True), (1.19, True)):
        reported(monkeypatch, peak / share)
        fit(dry, "on")
        assert capsys.readouterr().out.startswith("warning: memory per GPU") == warned
    reported(monkeypatch, peak / 1.21)
    with user_error("does not fit; what helps: smaller packs"):
        fit(dry, "on")
    reported(monkeypatch, 30.0)
    with user_error("layers recomputed: does not fit; what helps: "):
        fit(dry, "auto")


def test_on_a_cpu_nothing_is_checked(qwen25, picture_rows, monkeypatch):
    sizes = reported(monkeypatch, 0.0)
    dry = planned(qwen25, picture_rows)
    budget.fit(dry.needed, SimpleNamespace(device=torch.device("cpu"), world=1))
    assert not sizes


@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "llama3"])
def test_a_start_names_positions_that_no_model_has_seen(
    qwen25, picture_rows, tmp_path, capsys, rope
):
    """In one line, whatever the rotary positions, of the rows' own lengths; and not where they just fit."""
    prompt = max(len(row.input_ids) for row in planned(qwen25, picture_rows).prompts)
    config = read_json(qwen25 / "config.json")
    config["text_config"]["rope_parameters"] |= dict(
        rope_type=rope,
        factor=2.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8,
    )
    shutil.copytree(qwen25, tmp_path / "short")
    for limit in (prompt + 11, prompt + 12):
        config["text_config"]["max_position_embeddings"] = limit
        write_json(tmp_path / "short" / "config.json", config)
        dry = planned(tmp_path / "short", picture_rows)
        capsys.readouterr()
        budget.fit(dry.needed, SimpleNamespace(device=torch.device("cpu"), world=1))
        line = (
            f"warning: sequences may have {prompt + 12} tokens, more than the max_position_embeddings {limit} of the "
            "actor: it was not trained on the positions beyond\n"
        )
        assert capsys.readouterr().out == (line if limit < prompt + 12 else "")


@pytest.mark.slow
def test_rows_to_learn_may_be_longer_than_what_is_written(qwen25, picture_rows, tmp_path, capsys):
    """Of --ptx_data and of train_grm_vl.py, whose judgements are bounded by a flag only where there
    are held-out rows."""
    row = {"prompt": "say it", "response": "a b " * 100}
    (tmp_path / "long.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps({"prompt": "say it", "response": "a"})
    )
    config = read_json(qwen25 / "config.json")
    config["text_config"]["max_position_embeddings"] = 150
    shutil.copytree(qwen25, tmp_path / "short")
    write_json(tmp_path / "short" / "config.json", config)
    capsys.readouterr()
    grm.main(
        words(
            "--model",
            tmp_path / "short",
            "--data",
            tmp_path / "long.jsonl",
            "--out",
            tmp_path / "out",
            "--steps 1 --save_every 0 --export_every 0",
        )
    )
    told = [
        line for line in capsys.readouterr().out.splitlines() if "max_position_embeddings" in line
    ]
    dry = planned(
        tmp_path / "short", picture_rows, *words("--ptx_coef 1 --ptx_data", tmp_path / "long.jsonl")
    )
    told.append(budget.new_positions(dry.needed))
    rows = ppo.load_ptx(dry.args, Processor(qwen25)).rows
    length = max(len(example.prompt.input_ids) + len(example.target) for example in rows)
    assert 150 < length < 1000
    for line, role in zip(told, ("judge", "actor"), strict=True):
        assert (
            f"sequences may have {length} tokens, more than the max_position_embeddings 150 of the {role}:"
            in line
        )


@pytest.mark.parametrize(
    "flag, device, recomputed",
    [("auto", "cpu", False), ("on", "cpu", True), ("auto", "cuda", True), ("off", "cuda", False)],
)
def test_gpus_recompute_layers_unless_they_are_told_not_to(flag, device, recomputed, qwen25):
    args = ppo.parse_args(
        words("--model", qwen25, "--data d.jsonl --attention sdpa --gradient_checkpointing", flag)
    )
    builder = build.Builder(args, torch.device(device), 100)
    for model in (builder.actor(), builder.role("", head=False)):
        assert model.model.language_model.layers[0].gradient_checkpointing == recomputed


def test_slots_of_a_plan_are_those_of_the_engine(seven_b, picture_rows, monkeypatch):
    """With so little memory that it decides."""
    many = "--samples_per_prompt 64 --prompts_per_step 64 --advantage grpo --max_new_tokens 2048"
    dry = planned(seven_b, picture_rows, *words(many))
    actor = dry.models["actor"]
    parts = dry.needed.fixed["rollout"]()
    capacity = dry.needed.longest
    assert parts["KV cache"] == capacity * 28 * 2 * 4 * 128 * 2
    taken = sum(size for part, size in parts.items() if part not in ("KV cache", "forward"))
    free = int(60.0 * GIB - taken)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 80 * GIB))
    engine = SimpleNamespace(
        policy=actor,
        sampling=SimpleNamespace(slots=0),
        setup=SimpleNamespace(device=torch.device("cuda"), team=distributed.ALONE),
    )
    slots = RolloutEngine.slot_count(engine, capacity, 512)
    assert dry.needed.slots(60.0) == slots < 256
    assert dry.needed.slots(40.0) < slots


def test_a_rollout_leaves_no_cache_behind(qwen25, picture_rows, monkeypatch):
    """Slots and graphs are freed first, then torch's cache is emptied."""
    env, seen = start(qwen25, picture_rows), []

    class Engine(RolloutEngine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            seen.append(weakref.ref(self.cache))

    monkeypatch.setattr("common.rollout.RolloutEngine", Engine)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(seen[0]() is None))
    ppo.rollout(env.actor, take(env), env.sampling, 2)
    assert seen[1:] == [True]


def test_the_flag_of_old():
    """Bare it still means on."""
    for line, value in (
        (["--gradient_checkpointing"], "on"),
        (["--gradient_checkpointing", "off"], "off"),
        ([], "auto"),
    ):
        args = ppo.parse_args(words("--model m --data d.jsonl", *line, "--out x"))
        assert (args.gradient_checkpointing, args.out) == (value, Path("x").absolute())
    with user_error("did you mean --gradient_checkpointing"):
        ppo.parse_args(words("--model m --data d.jsonl", "--no-gradient_checkpointing"))


def tell_warm_ups(told: Path) -> None:
    """Write which collectives a start calls, of which group and of how many numbers."""
    for hsdp, shards in ((0, 1), (1, 1), (0, 2)):
        joined, called = distributed.start(60.0, hsdp, shards), []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
                place = (
                    distributed if name in ("all_gather", "reduce_scatter") else distributed.dist
                )

                def call(*tensors, name=name, real=getattr(place, name), **more):
                    called.append((name, more["group"].size(), max(x.numel() for x in tensors)))
                    return real(*tensors, **more)

                patch.setattr(place, name, call)
            distributed.warm_up(joined, 4000)
        if distributed.dist.get_rank() == 1:
            with open(told, "a") as file:
                file.write(json.dumps([hsdp, called]) + "\n")


@pytest.mark.slow
def test_every_group_is_warmed_up_by_every_collective(tmp_path):
    """Two ranks, as one group, as copies of one shard each, and as a team."""
    ranks.run(tell_warm_ups, tmp_path / "calls", world=2)
    (_, one), (_, two), (_, team) = read_rows(tmp_path / "calls")
    of = lambda size: [
        ["all_gather", size, 1000],
        ["reduce_scatter", size, 1000],  # noqa: E731
        ["all_reduce", size, 1000 // size],
    ]
    assert one == of(2)
    assert all(call in two for call in of(2))
    assert all(call in two for call in of(1))
    # of a layer, and of one number
    for count in (1000, 1):
        assert ["all_reduce", 2, count] in team[3:]
        assert ["broadcast", 2, count] in team[3:]
