"""launch/plan.py: what it adds up is what models, optimizers, caches and updates take, and it needs
no weights.

Shards on two ranks are measured in test_checkpoint.py, beside the run of four.
"""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

import families
from common import distributed
from common.data.processor import Processor
from common.flags import DataArgs
from common.ground import process
from common.memory import budget, memory
from common.memory.recompute import recompute
from common.model import attention, fsdp, layers, vlm
from common.model.vlm import UpdateSetting
from conftest import published, start, take, user_error, words, write_checkpoint, write_json
from helpers import NormOfAGPU, peak_of_an_update, planned, planned_peak, trainable
from launch import plan

ROLES = ("actor", "critic", "reference")
GIB = 2**30


def local_bytes(tensors) -> int:
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors if x.dim())


def test_bytes_of_shards_and_optimizer(qwen25, picture_rows):
    flags = "--kl_coef 0.1 --dtype float32"
    real, dry = (make(qwen25, picture_rows, flags) for make in (start, planned))
    for role in ROLES:
        module = getattr(real, role)
        resident = memory.resident_bytes(dry.models[role], 1)
        tower = {id(p) for p in vlm.tower_parameters(module.model)}
        assert bool(tower) == (role == "actor")
        assert resident["weights"] == local_bytes(module.parameters())
        assert (resident["Adam"] > 0) == (role != "reference")
        if role != "reference":
            optimizer = trainable(module, real.args, 1e-3).optimizer
            assert resident["Adam"] == local_bytes(
                x for state in optimizer.state.values() for x in state.values()
            )
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            assert resident["Adam"] / 2 == local_bytes(
                p.grad for p in module.parameters() if p.grad is not None
            )
        root, largest, layers = memory.gathered_bytes(dry.models[role], 1)
        frozen = vlm.whole_parameters(module, 1)
        assert frozen == {p for p in module.parameters() if not p.requires_grad}
        layer = set(vlm.decoder(module.model).layers[0].parameters())
        with fsdp.unsharded(module):
            assert root + layers == local_bytes(set(module.parameters()) - frozen)
            assert largest == local_bytes(layer - frozen)
        # frozen weights are sharded, and gathered, where ranks share them
        gathered = sum(p.numel() for p in module.parameters() if id(p) not in tower) * 4
        root, _, layers = memory.gathered_bytes(dry.models[role], 2)
        assert root + layers == gathered


def test_what_is_offloaded_is_planned_where_it_is_needed(qwen25, picture_rows):
    always = {"actor weights", "critic weights"}
    needed = {
        "rollout": set(),
        "reference scores": {"reference weights"},
        "update critic": {"critic Adam"},
        "update actor": {"actor Adam", "actor average"},
    }
    for offload in ("none", "all"):
        dry = planned(qwen25, picture_rows, "--kl_coef 0.1 --ema_beta 0.9 --offload", offload)
        phases = dry.needed.phases(UpdateSetting(16384, 0))
        held = {
            phase: {part for part in parts if part.split()[0] in ROLES}
            for phase, parts in phases.items()
        }
        everything = always.union(*needed.values())
        assert held == {
            phase: always | parts if offload == "all" else everything
            for phase, parts in needed.items()
        }


def test_bytes_of_what_adapters_freeze(qwen25, picture_rows):
    """It is kept in the compute type; float32 are the adapters and the critic's head."""
    flags = "--lora_rank 4 --dtype bfloat16"
    real, dry = (make(qwen25, picture_rows, flags) for make in (start, planned))
    for role in ("actor", "critic"):
        module, resident = getattr(real, role), memory.resident_bytes(dry.models[role], 1)
        kinds = {(p.dtype, p.requires_grad) for p in module.parameters()}
        assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
        assert resident["weights"] == local_bytes(module.parameters())
        assert resident["Adam"] == 2 * local_bytes(
            p for p in module.parameters() if p.requires_grad
        )


def test_copies_must_fit():
    with user_error("--hsdp 3 must divide the number of ranks, 1"):
        distributed.start(60.0, 3)


def test_bytes_of_the_cache(checkpoint):
    text = Processor(checkpoint, DataArgs()).config.get_text_config()
    for dtype in (torch.float32, torch.bfloat16):
        cache = attention.SlotCache(text, 3, 50, dtype, torch.device("cpu"), "sdpa")
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        layers = len(kinds) - kinds.count("linear_attention")
        numbers = 2 * layers * text.num_key_value_heads * attention.head_dim(text)
        stored = 3 * 50 * numbers * dtype.itemsize
        if cache.linear is not None:
            stored += cache.linear.inputs.nbytes + cache.linear.states.nbytes
        assert cache.nbytes == stored


# The peak in a layer, and at the head, whose products are float32 on a CPU. Layers in float32 are in
# test_recompute.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, checkpointing, vocabulary, chunk, responses",
    [
        ("bfloat16", True, 300, 64, 1),
        ("float32", True, 20000, 256, 1),
        ("float32", False, 300, 64, 20),
    ],
)
def test_peak_of_an_update(
    qwen25, tmp_path, monkeypatch, dtype, checkpointing, vocabulary, chunk, responses
):
    """Gathered weights, activations and backward of one row against what is alive while actor and
    critic learn from it: a short prompt with a long response, or a long one with many, each of which
    gathers its keys."""
    rows = tmp_path / "rows.jsonl"
    write_json(rows, {"prompt": "a b " * (120 if responses > 1 else 5)})
    config = AutoConfig.from_pretrained(qwen25)
    sizes = dict(
        hidden_size=128,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2 if responses == 1 else 4,
        vocab_size=max(vocabulary, config.text_config.vocab_size),
        layer_types=["full_attention"] * 4,
    )
    for name, size in sizes.items():
        setattr(config.text_config, name, size)
    config.text_config.rope_parameters = {
        **config.text_config.rope_parameters,
        "mrope_section": [4, 6, 6],
    }
    config.vision_config.out_hidden_size = 128
    shutil.copytree(qwen25, tmp_path, dirs_exist_ok=True)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    recompute = ["--gradient_checkpointing"] * checkpointing
    env = start(tmp_path, rows, "--dtype", dtype, *recompute)
    monkeypatch.setattr(layers.F, "rms_norm", NormOfAGPU.apply)
    env.actor.model.setup = replace(env.actor.model.setup, head_chunk=chunk)
    drawn = list(torch.randint(4, 200, (responses, 1000 // responses)))
    batch = take(env, 1).with_responses((0, tokens) for tokens in drawn)
    # a CPU is slow in bfloat16
    modules = (env.actor,) if dtype == "bfloat16" else (env.actor, env.critic)
    for module in modules:
        peak, row = peak_of_an_update(env, module, batch)
        segments = row.attention.segments  # (start, end, and those of the prefix)
        keys = sum(end - start + last - first for start, end, first, last, *_ in segments)
        tokens = row.input_ids.shape[1]
        assert (keys > 5 * tokens) == (responses > 1)
        setting = UpdateSetting(tokens, 4 * checkpointing)
        least = 0.95 if responses == 1 else 0.9  # sdpa on a CPU keeps masks, too
        assert least < planned_peak(module, setting, keys / tokens) / peak < 1.05, peak


@pytest.mark.slow
def test_inputs_per_layer_are_in_the_peak_of_an_update(tmp_path, monkeypatch):
    """Gemma 4 E2B's, in layers that differ: they pass a gate in each, and all have a gradient at once."""
    kind, rows = "gemma4_e2b", tmp_path / "rows.jsonl"
    write_json(rows, {"prompt": "a b " * 5})
    sizes = {"hidden_size": 128, "intermediate_size": 640, "num_hidden_layers": 4}
    monkeypatch.setattr(families, "TEXT", families.TEXT | sizes)
    monkeypatch.setattr(layers.F, "rms_norm", NormOfAGPU.apply)
    tokenizer = families.make_tokenizer(kind)
    config = families.make_config(kind, tokenizer)
    config.text_config.hidden_size_per_layer_input = 192
    config.text_config.final_logit_softcapping = None  # one tensor more at the head
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    families.save_processor(kind, tmp_path, tokenizer)
    env = start(tmp_path, rows, "--dtype float32 --gradient_checkpointing")
    env.actor.model.setup = replace(env.actor.model.setup, head_chunk=64)
    batch = take(env, 1).with_responses([(0, torch.randint(4, 200, (1000,)))])
    for module in (env.actor, env.critic):
        peak, row = peak_of_an_update(env, module, batch)
        setting = UpdateSetting(row.input_ids.shape[1], 4)
        assert 0.95 < planned_peak(module, setting) / peak < 1.05, peak


@pytest.mark.slow
def test_what_experts_keep_is_in_the_peak_of_an_update(tmp_path, monkeypatch):
    """With numbers of a token that outweigh the indices of its experts."""
    kind, rows = "qwen3_vl_moe", tmp_path / "rows.jsonl"
    write_json(rows, {"prompt": "a b " * 5})
    sizes = {"hidden_size": 128, "num_hidden_layers": 4}
    monkeypatch.setattr(families, "TEXT", families.TEXT | sizes)
    monkeypatch.setitem(families.EXPERTS, "moe_intermediate_size", 96)
    monkeypatch.setattr(layers.F, "rms_norm", NormOfAGPU.apply)
    tokenizer = families.make_tokenizer(kind)
    AutoModelForImageTextToText.from_config(families.make_config(kind, tokenizer)).save_pretrained(
        tmp_path
    )
    families.save_processor(kind, tmp_path, tokenizer)
    env = start(tmp_path, rows, "--dtype float32")
    env.actor.model.setup = replace(env.actor.model.setup, head_chunk=64)
    batch = take(env, 1).with_responses([(0, torch.randint(4, 90, (1000,)))])
    for recomputed in (0, 2, 4):
        setting = UpdateSetting(2000, recomputed)
        recompute(env.actor.model, setting)
        peak, row = peak_of_an_update(env, env.actor, batch)
        setting = setting._replace(tokens=row.input_ids.shape[1])
        share = planned_peak(env.actor, setting) / peak
        print(f"{setting}: {peak} bytes, planned {share:.3f}")
        assert 0.95 < share < 1.05, setting


@pytest.mark.parametrize("samples", [1, 4])
def test_keys_of_an_update_are_counted_per_response(qwen25, picture_rows, samples):
    """A prompt with one response is one segment; one with several is read by each."""
    line = words("--advantage gae --dtype float32 --samples_per_prompt", samples)
    dry = planned(qwen25, picture_rows, *line)
    prompt = max(len(row.input_ids) for row in dry.prompts)
    keys = prompt + 12 if samples == 1 else prompt + samples * (prompt + 12)
    text, tokens = dry.models["actor"].model.config.get_text_config(), 1000
    # in float32, keys and values of each layer
    further = tokens * (keys / (prompt + samples * 12) - 1)
    size = 2 * 4 * text.num_hidden_layers * text.num_key_value_heads * attention.head_dim(text)
    setting = UpdateSetting(tokens, 0)
    activations = dry.needed.phases(setting)["update actor"]["activations"]
    bare = memory.backward_bytes(dry.models["actor"], setting)["activations"]
    assert activations - bare == pytest.approx(further * size)


def cells(text: str) -> dict[str, list[float]]:
    """Rows of the printed table."""
    rows = [
        re.fullmatch(r"([A-Za-z ]+?)((?: +\d+\.\d\d)+)", line.rstrip())
        for line in text.splitlines()
    ]
    return {row[1]: [float(x) for x in row[2].split()] for row in rows if row}


@pytest.mark.slow
def test_seven_billion_on_eight_gpus(seven_b, picture_rows, tmp_path, capsys):
    """Numbers by hand, in GiB on each of eight GPUs; what the plan prints fits with all
    layers recomputed, and not with none."""
    line = f"--model {seven_b} --data {picture_rows} --kl_coef 0.01 --prompts_per_step 4 --reward exact"
    line += f" --attention flash_attn --out {tmp_path / 'out'}"

    def table_of(gpus: int, more: str) -> dict[str, list[float]]:
        plan.main(words("ppo", "--gpus", gpus, "--", line, *more.split()))
        return cells(capsys.readouterr().out)

    plan.main(words("ppo", "--", line, "--gradient_checkpointing"))
    text = capsys.readouterr().out
    language = 8292166656 - 676550144
    table = cells(text)
    weights = 4 * language / 8 + 2 * 676550144  # a frozen tower is whole, in bfloat16
    assert table["actor weights"] == pytest.approx([weights / GIB] * 4, abs=0.006)
    assert table["critic Adam"] == pytest.approx(
        [8 * (language - 152064 * 3584 + 3584) / 8 / GIB] * 4, abs=0.006
    )
    rows = planned(seven_b, picture_rows, "--advantage grpo").prompts
    longest = max(len(row.input_ids) for row in rows)
    cache = 2 * 28 * 512 * 2 * (longest + 512)  # of one sample
    assert table["KV cache"] == pytest.approx([cache / GIB], abs=0.006)
    peak = max(table["total"])
    assert table["total"][2] == peak
    assert 35 < peak < 60
    setting = "packs of 16,384 tokens, the first 28 layers recomputed"
    assert text.startswith(f"8 GPUs, 8 shards; {setting}:\n")
    assert f"memory per GPU: {peak:.1f} of 80.0 GiB, in update actor; {setting}\n" in text
    assert "room for 256 samples that decode together\n" in text
    assert not (tmp_path / "out").exists()
    with user_error("nothing recomputed: does not fit; what helps: --gradient_checkpointing auto"):
        table_of(8, "--gradient_checkpointing off")
    copies = table_of(16, "--gradient_checkpointing on --hsdp 8")
    assert max(copies["total"]) == pytest.approx(peak)
    assert peak < max(table_of(8, "")["total"]) <= 0.92 * 80  # auto uses what is there


TOWER_3 = dict(
    depth=27,
    hidden_size=1152,
    intermediate_size=4304,
    num_heads=16,
    patch_size=16,
    spatial_merge_size=2,
    num_position_embeddings=2304,
    deepstack_visual_indexes=[8, 16, 24],
)
TOWER_25 = dict(
    depth=32,
    hidden_size=1280,
    intermediate_size=3456,
    num_heads=16,
    patch_size=14,
    spatial_merge_size=2,
    window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31],
)
# of Qwen3-VL-30B-A3B-Instruct, Qwen3-VL-32B-Instruct and Qwen2.5-VL-72B-Instruct
LARGE = {
    "30b_a3b": dict(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "32b": dict(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "72b": dict(
        vocab_size=152064,
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}


def write_large(name: str, qwen25, tmp_path):
    text = LARGE[name]
    if name == "72b":
        kind, source, tower = Qwen2_5_VLConfig, qwen25, TOWER_25
        rope = {"mrope_section": [16, 24, 24]}
    else:
        kind = Qwen3VLMoeConfig if name == "30b_a3b" else Qwen3VLConfig
        source, tower = write_checkpoint(tmp_path / "qwen3", "qwen3_vl"), TOWER_3
        rope = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = text | {"rope_parameters": rope | {"rope_type": "default", "rope_theta": 1e6}}
    tower = tower | {"out_hidden_size": text["hidden_size"]}
    return published(source, tmp_path / "model", kind, text, tower)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, gpus, flags, team, alone, rollout, update",
    [
        ("30b_a3b", 8, "", 4, 139.1, 71.5, 72.3),
        ("32b", 8, "--lora_rank 64", 4, 170.5, 55.2, 26.1),
        ("32b", 8, "", 8, 206.9, 72.9, 81.4),  # which does not fit
        ("32b", 16, "", 4, 184.0, 69.3, 50.8),
        ("72b", 8, "--lora_rank 64", 8, 279.5, 60.8, 42.0),
    ],
)
def test_teams_of_large_models(
    name, gpus, flags, team, alone, rollout, update, qwen25, tmp_path, capsys
):
    """launch/README.md has these figures: GiB on each GPU, with packs of 4,096 tokens and 128 samples
    of 3,072."""
    folder, rows = write_large(name, qwen25, tmp_path), tmp_path / "rows.jsonl"
    write_json(rows, {"prompt": "how many?", "answer": "1"})
    (row,) = planned(qwen25, rows, "--prompts_per_step 1").prompts
    line = f"-- --model {folder} --data {rows} --advantage grpo --reward exact {flags}"
    line += f" --max_new_tokens {3072 - len(row.input_ids)} --slots 128 --max_tokens_per_pack 4096"
    line += " --prompts_per_step 1 --max_prompt_tokens 512 --attention flash_attn"
    line += " --gradient_checkpointing on --rollout_shards"
    for size in (1, team) if name == "30b_a3b" else (team,):
        argv = words("ppo", "--gpus", gpus, *line.split(), size)
        if size == team and max(rollout, update) < 80:
            plan.main(argv)
        else:
            with user_error("does not fit; what helps: "):
                plan.main(argv)
        text = capsys.readouterr().out
        peaks = alone if size == 1 else rollout, update
        assert cells(text)["total"] == pytest.approx(peaks, abs=0.06)
        sizes, gib = re.search(r"--rollout_shards +([ \d]+)\nGiB +([ .\d]+)\n", text).groups()
        by_size = dict(zip(map(int, sizes.split()), map(float, gib.split()), strict=True))
        assert by_size[1] == pytest.approx(alone, abs=0.06)
        assert by_size[team] == pytest.approx(rollout, abs=0.06)
        assert min(n for n in by_size if by_size[n] < 0.92 * 80) == team
    heads = -(-LARGE[name]["num_key_value_heads"] // team)
    cache = 2 * LARGE[name]["num_hidden_layers"] * heads * 128 * 2 * 3072 * 128
    parts = cells(text)["KV cache"]
    assert sum(parts) == pytest.approx(cache / GIB, abs=0.011)


EIGHT_B = dict(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
TWENTY_SEVEN_B = dict(  # of Qwen3.5, 3.6 and 3.8
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, text, rollout, update",
    [(Qwen3VLConfig, EIGHT_B, 21.6, 29.1), (Qwen3_5Config, TWENTY_SEVEN_B, 60.8, 74.0)],
)
def test_one_gpu_holds_frozen_weights_once(kind, text, rollout, update, tmp_path):
    """launch/README.md has these figures: adapters on one GPU, whose weights nothing gathers; with a KL, as
    the reference is the model without them."""
    tower = dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16)
    tower["out_hidden_size"] = text["hidden_size"]
    tied = {"tie_word_embeddings": False}
    kind(text_config=text | tied, vision_config=tower, **tied).save_pretrained(tmp_path)
    line = f"--model {tmp_path / 'config.json'} --advantage grpo --lora_rank 64 --kl_coef 0.01 "
    line += "--max_prompt_tokens 2048 --max_new_tokens 1024 --max_tokens_per_pack 4096"
    needed = plan.plan_ppo(plan.with_data(words(line, "--gradient_checkpointing on")), 1)
    phases = needed.phases(UpdateSetting(4096, text["num_hidden_layers"]))
    assert budget.total(phases["rollout"]) / GIB == pytest.approx(rollout, abs=0.06)
    assert budget.total(phases["update actor"]) / GIB == pytest.approx(update, abs=0.06)
    numbers = sum(p.numel() for p in needed.models["actor"].parameters() if not p.requires_grad)
    # in bfloat16, and the adapters with their gathered copy
    held = phases["rollout"]["actor weights"] + phases["rollout"]["gathered weights"]
    adapters = sum(p.numel() for p in needed.models["actor"].parameters() if p.requires_grad)
    assert held == pytest.approx(2 * numbers + 6 * adapters, rel=1e-3)


def test_a_plan_has_logits_of_no_more_tokens_than_a_pack(qwen25, picture_rows):
    """In packs smaller than the chunks of 4,096 whose logits exist together: what the head needs, by hand."""
    dry = planned(qwen25, picture_rows, "--max_tokens_per_pack 600 --dtype float32")
    text = dry.models["actor"].model.config.get_text_config()
    weight = text.vocab_size * text.hidden_size
    needed = memory.backward_bytes(dry.models["actor"], UpdateSetting(600, 0))["backward"]
    assert needed == 4 * (3 * 600 * text.vocab_size + weight + 4 * 600 * text.hidden_size)


def test_teams_of_a_plan_do_not_depend_on_the_shards(qwen25, picture_rows, capsys):
    """Four query heads are for one, two or four ranks, however many of them share the weights in training."""
    for more in ("", "--hsdp 1", "--hsdp 2"):
        line = f"ppo --gpus 4 -- --model {qwen25} --data {picture_rows} --prompts_per_step 4 {more}"
        plan.main(line.split())
        assert re.search(r"--rollout_shards +1 +2 +4\n", capsys.readouterr().out), more


def test_a_plan_compares_no_towers(qwen25, picture_rows, tmp_path):
    """Of a hub name no weights are there to compare with those of the critic's own checkpoint."""
    bare = shutil.copytree(
        qwen25, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")
    )
    assert "critic" in planned(bare, picture_rows, "--critic_model", qwen25).models
    assert "critic" in planned(qwen25, picture_rows, "--critic_model", bare).models


def test_a_config_alone_is_planned(seven_b, tmp_path, capsys):
    """No rows, no tokenizer, no chat template: prompts have --max_prompt_tokens."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(seven_b / "config.json", bare)
    config = bare / "config.json"
    line = words("--model", config, "--max_prompt_tokens 1000 --max_new_tokens 500")
    plan.main(["ppo", "--gib", "800", "--", *line, "--kl_coef", "0.01"])
    table, language = cells(capsys.readouterr().out), 8292166656 - 676550144
    cache = 2 * 28 * 512 * 2 * 1500  # of one sample
    assert table["KV cache"] == pytest.approx([cache / GIB], abs=0.006)
    weights = 4 * language / 8 + 2 * 676550144
    assert table["actor weights"] == pytest.approx([weights / GIB] * 4, abs=0.006)
    plan.main(["grm", "--gib", "800", "--", *line[:4]])
    assert cells(capsys.readouterr().out)["judge Adam"][0] == pytest.approx(
        language / GIB, abs=0.006
    )
    for flag, judge in (("--reward", "grm:judge"), ("--reward_recipe", '{"*": [["rm:model", 1]]}')):
        with user_error("need --data in a plan"):
            plan.main(["ppo", "--", *line, flag, judge])


def test_the_judges_plan(seven_b, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "how many?", "response": "3", "correct": true}\n')
    line = words("grm", "-- --model", seven_b, "--data", rows, "--out", tmp_path / "out")
    plan.main(words(*line, "--eval_data", rows))
    table, language = cells(capsys.readouterr().out), 8292166656 - 676550144
    assert table["judge Adam"] == pytest.approx([language / GIB] * 2, abs=0.006)
    assert not (tmp_path / "out").exists()
    with user_error("nothing recomputed: does not fit; what helps: "):
        plan.main([*line, "--gradient_checkpointing", "off"])
    capsys.readouterr()
    plan.main(line)  # without held-out rows there is no evaluation
    assert "evaluate" not in capsys.readouterr().out


def test_the_total_is_the_sum_of_a_column():
    lines = plan.memory_table({"one": {"a": GIB, "b": GIB / 2}, "two": {"b": 4 * GIB}})
    assert cells("\n".join(lines)) == {"a": [1.0], "b": [0.5, 4.0], "total": [1.5, 4.0]}


def test_flags_of_the_plan_and_of_the_run():
    with user_error("unrecognized arguments: --model m\nusage: plan.py .*-- FLAGS"):
        plan.main(["ppo", "--model", "m"])
    with pytest.raises(process.Exit) as ended:
        plan.main(["--help"])
    assert ended.value.code == 0
