"""common/budget.py: whether a run fits, what is decided when it does not, and what a start says on a GPU.

A GPU is what torch reports: here its reports are replaced, so that all of it runs on a CPU.
"""

import json
import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, start, take
from test_plan import planned, seven_b  # noqa: F401  (a fixture)

import train_grm_vl as grm
import train_ppo_vl as ppo
from common import distributed
from common.model import budget, memory
from common.model import attention

GIB = 2**30
GRAPHICS = SimpleNamespace(device=torch.device("cuda"), world=8)


class Stairs:
    """A run whose needs are plain numbers: tokens, three times as many without checkpointing, and what lies on the GPU."""

    offload, offloads = "none", ("optimizer", "all")
    modules = ()

    def __init__(self, per_token: float = 1e6, resident: float = 4 * GIB, least_pack: int = 1000):
        self.per_token, self.held, self.least_pack = per_token, resident, least_pack

    def phases(self, choice: budget.Choice, room: float) -> budget.Phases:
        resident = self.held * {"none": 1, "optimizer": 0.5, "all": 0.25}[choice.offload]
        activations = choice.tokens * self.per_token * (1 if choice.checkpointing else 3)
        return {"rollout": {"a": GIB}, "update": {"resident": resident, "activations": activations}}


def settings(checkpointing: str, tokens: int = 16384) -> SimpleNamespace:
    return SimpleNamespace(gradient_checkpointing=checkpointing, max_tokens_per_pack=tokens)


def decide(checkpointing: str, gib: float, plan=None) -> budget.Fit:
    return budget.decide(plan or Stairs(), settings(checkpointing), gib)


def peak(choice: budget.Choice) -> float:
    """By hand."""
    return 4 + choice.tokens * 1e6 * (1 if choice.checkpointing else 3) / GIB + budget.RESERVED_GIB


def test_auto_recomputes_only_where_it_must():
    roomy, tight = decide("auto", 60.0), decide("auto", 30.0)
    assert not roomy.choice.checkpointing and tight.choice.checkpointing and not roomy.problem + tight.problem
    assert roomy.peak == pytest.approx(peak(roomy.choice)) and tight.peak == pytest.approx(peak(tight.choice))
    assert roomy.lines == [f"peak: {roomy.peak:.1f} of 60 GiB, in update: fits, {60 - roomy.peak:.1f} GiB to spare",
                           f"gradient checkpointing: off; with it the peak is {tight.peak:.1f} GiB"]
    assert not decide("off", 60.0).choice.checkpointing and decide("on", 60.0).choice.checkpointing


def test_the_pack_that_fits_without_is_the_largest():
    """Of all multiples of 256 tokens, tried one by one."""
    said = decide("auto", 30.0).lines[1]
    pack = int(re.search(r"on; without it the peak is [\d.]+ GiB; with --max_tokens_per_pack (\d+) it would fit without", said)[1])
    fitting = [n for n in range(1024, 16385, 256) if peak(budget.Choice(False, n)) <= 30.0]
    assert pack == max(fitting) and decide("auto", 30.0, plan=Stairs(least_pack=pack + 1)).lines[1].endswith("GiB")


@pytest.mark.parametrize("checkpointing, gib, held, advice", [
    ("off", 22.0, 4, r"what would help: --gradient_checkpointing on$"),
    ("on", 20.0, 4, r"what would help: --gradient_checkpointing on --max_tokens_per_pack 14848$"),
    ("on", 39.0, 40, r"what would help: --gradient_checkpointing on --offload optimizer$"),
    ("on", 30.0, 40, r"what would help: --gradient_checkpointing on --max_tokens_per_pack 8448 --offload optimizer$"),
    ("on", 16.0, 40, r"what would help: --gradient_checkpointing on --max_tokens_per_pack 4096 --offload all$"),
    ("on", 5.0, 40, r"no pack is small enough: it needs more or larger GPUs, or adapters \(--lora_rank\)$")])
def test_advice_is_what_would_fit(checkpointing, gib, held, advice):
    problem = decide(checkpointing, gib, plan=Stairs(resident=held * GIB)).problem
    assert re.match(rf"peak: [\d.]+ of {gib:.4g} GiB, in update: does not fit by [\d.]+ GiB; ", problem)
    assert re.search(advice, problem), problem


def reported(monkeypatch, gib: float, host: float = 1000.0) -> list[int]:
    """A machine with so much free memory; returns the sizes of the collectives that warm NCCL up."""
    sizes = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(gib * GIB), 80 * GIB))
    monkeypatch.setattr(memory, "free_on_host", lambda: host * GIB)
    monkeypatch.setattr(distributed, "warm_up", lambda ranks, size: sizes.append(size))
    return sizes


LINE = ("--kl_coef", "0.01", "--dtype", "bfloat16")


def check(dry, *changes: str) -> bool:
    args = replace(dry.args.model, **dict(change.split("=") for change in changes))
    return budget.check(dry.needed, args, GRAPHICS)


@pytest.mark.slow
def test_a_start_says_the_peak_before_it_reads_weights(seven_b, picture_rows, monkeypatch, capsys):  # noqa: F811
    """7B on eight GPUs: with 141 GB as it is, with 79 GiB recomputed, with 30 not at all."""
    dry = planned(seven_b, picture_rows, *LINE)
    sizes = reported(monkeypatch, 140.0)
    assert check(dry) is False and sizes == [memory.gathered_bytes(dry.models["actor"])[1]]
    said = capsys.readouterr().out
    assert re.search(r"memory per GPU, peak: \d+\.\d of 140 GiB, in update actor: fits, [\d.]+ GiB to spare; gradient "
                     r"checkpointing: off; with it the peak is \d\d\.\d GiB\n", said), said
    reported(monkeypatch, 79.0)
    assert check(dry) is True
    assert "gradient checkpointing: on; without it the peak is" in capsys.readouterr().out
    assert check(dry, "gradient_checkpointing=on") is True
    with pytest.raises(distributed.UserError, match=r"memory of the GPUs: peak: .* does not fit by .* --gradient_checkpointing on"):
        check(dry, "gradient_checkpointing=off")
    reported(monkeypatch, 30.0)
    with pytest.raises(distributed.UserError, match="does not fit by"):
        check(dry)


@pytest.mark.slow
def test_a_save_must_fit_into_the_host(seven_b, picture_rows, monkeypatch):  # noqa: F811
    """A copy of weights and moments in float32, for every rank of the machine; what is offloaded comes to it."""
    dry = planned(seven_b, picture_rows, *LINE)
    trained = {role: memory.count_trained(dry.models[role].parameters()) for role in ("actor", "critic")}
    assert dry.needed.host_bytes() * 8 == pytest.approx(12 * sum(trained.values()), rel=1e-3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    needed = dry.needed.host_bytes() * 8 / GIB
    reported(monkeypatch, 140.0, host=needed + 1)
    assert check(dry) is False
    reported(monkeypatch, 140.0, host=needed - 1)
    with pytest.raises(distributed.UserError, match=rf"need {needed:.1f} GiB of host memory for the 8 ranks .* --save_every 0"):
        check(dry)
    for more, times in (("--save_every", "0"), 0), (("--offload", "optimizer"), 20 / 12), (("--ema_beta", "0.9"), None):
        other = planned(seven_b, picture_rows, *LINE, *more).needed.host_bytes() * 8
        expected = 12 * sum(trained.values()) * times if times is not None else 12 * sum(trained.values()) + 4 * trained["actor"]
        assert other == pytest.approx(expected, rel=1e-3), more


def test_on_a_cpu_nothing_is_checked_and_nothing_recomputed(qwen25, picture_rows):
    dry = planned(qwen25, picture_rows)
    ranks = SimpleNamespace(device=torch.device("cpu"), world=1)
    assert budget.check(dry.needed, dry.args.model, ranks) is False
    env = start(qwen25, picture_rows)
    assert not env.actor.model.model.language_model.is_gradient_checkpointing


@pytest.mark.parametrize("script, roles", [(ppo, ("actor", "critic")), (grm, ())])
def test_what_is_decided_reaches_the_layers(script, roles, qwen25, picture_rows, tmp_path, monkeypatch):
    """Of both trained models, before a weight is read; an export needs no check."""
    monkeypatch.setattr(budget, "check", lambda *_: True)
    if script is ppo:
        env = start(qwen25, picture_rows)
        models = {"actor": env.actor, "critic": env.critic}
        for only in (False, True):
            args = replace(env.args, run=replace(env.args.run, export_only=only))
            for module in models.values():
                module.model.model.language_model.gradient_checkpointing_disable()
            ppo.fit_memory(args, models, env.rows, env.ranks)
            assert {module.model.model.language_model.is_gradient_checkpointing for module in models.values()} == {not only}
    else:
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"question": "how many?", "response": "3", "correct": true}\n')
        args = grm.parse_args(["--model", str(qwen25), "--data", str(rows), "--max_prompt_tokens", "512"])
        judge = grm.build_judge(args, grm.load_rows(args), distributed.start(60.0, 0))
        assert judge.model.model.language_model.is_gradient_checkpointing


def test_free_memory_of_a_container(tmp_path):
    """Of the machine without a limit; with one, what the limit leaves, files that can be dropped among it."""
    group = tmp_path / "sys/fs/cgroup"
    for folder in (tmp_path / "proc", group):
        folder.mkdir(parents=True)
    assert memory.free_on_host(tmp_path) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal:       2000 kB\nMemAvailable:       1000 kB\n")
    assert memory.free_on_host(tmp_path) == 1000 * 1024
    (group / "memory.max").write_text("max\n")
    assert memory.free_on_host(tmp_path) == 1000 * 1024
    for name, text in (("max", "500000\n"), ("current", "300000\n"), ("stat", "anon 200000\nfile 90000\n")):
        (group / f"memory.{name}").write_text(text)
    assert memory.free_on_host(tmp_path) == 500000 - 300000 + 90000
    assert memory.free_on_host() > 0  # of this machine


def test_slots_leave_a_margin():
    """A tenth, at least 2 GiB; a plan and the engine count alike."""
    assert memory.without_margin(10 * GIB) == 8 * GIB and memory.without_margin(50 * GIB) == 45 * GIB


def test_slots_of_a_plan_are_those_of_the_engine(seven_b, picture_rows, monkeypatch):  # noqa: F811
    """With so little memory that it decides."""
    many = ("--samples_per_prompt", "64", "--prompts_per_step", "64", "--advantage", "grpo", "--max_new_tokens", "2048")
    dry = planned(seven_b, picture_rows, *many)
    actor = dry.models["actor"]
    parts = dry.needed.phases(budget.Choice(True, 16384), 60.0 * GIB)["rollout"]
    capacity = dry.needed.longest + 2048
    slots = parts["KV cache"] / (capacity * attention.cache_bytes(actor.model.config.get_text_config(), 2))
    taken = sum(size for part, size in parts.items() if part not in ("KV cache", "forward"))
    free = int((60.0 - budget.RESERVED_GIB) * GIB - taken)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 80 * GIB))
    engine = SimpleNamespace(actor=actor, sampling=SimpleNamespace(slots=0),
                             compute=SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16))
    assert ppo.RolloutEngine.slot_count(engine, capacity, 512) == slots < 256


@pytest.mark.parametrize("hsdp, bound", [(0, torch.device("cuda", 0)), (1, None)])
def test_nccl_connects_at_the_start(monkeypatch, hsdp, bound):
    """By the device of the group; with a mesh of two dimensions torch would split the groups, so it connects later."""
    given = {}
    monkeypatch.setattr(distributed, "choose_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda **options: given.update(options))
    monkeypatch.setattr(distributed, "init_device_mesh", lambda kind, shape, mesh_dim_names: shape)
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "1")
    assert distributed.start(60.0, hsdp).mesh == ((1, 1) if hsdp else (1,))
    assert given["backend"] == "cpu:gloo,cuda:nccl" and given["device_id"] == bound


def test_a_rollout_leaves_no_cache_behind(qwen25, picture_rows, monkeypatch):
    """Slots and graphs are freed first, then torch's cache is emptied."""
    env, seen = start(qwen25, picture_rows), []

    class Engine(ppo.RolloutEngine):
        def __init__(self, *given):
            super().__init__(*given)
            seen.append(weakref.ref(self.cache))

    monkeypatch.setattr(ppo, "RolloutEngine", Engine)
    monkeypatch.setattr(memory, "release", lambda: seen.append(seen[0]() is None))
    ppo.rollout(env.actor, take(env), env.sampling, 2)
    assert seen[1:] == [True]


def test_the_flag_of_old():
    """Bare it still means on; a run's old args.json has true or false."""
    for line, value in ((["--gradient_checkpointing"], "on"), (["--gradient_checkpointing", "off"], "off"), ([], "auto")):
        args = ppo.parse_args(["--model", "m", "--data", "d.jsonl", *line, "--out", "x"])
        assert (args.model.gradient_checkpointing, str(args.run.out)) == (value, "x")
    with pytest.raises(distributed.UserError, match="did you mean --gradient_checkpointing"):
        ppo.parse_args(["--model", "m", "--data", "d.jsonl", "--no-gradient_checkpointing"])


@pytest.mark.parametrize("old, value", [("true", "on"), ("false", "off")])
def test_the_args_json_of_old(tmp_path, old, value):
    (tmp_path / "args.json").write_text(f'{{"model": "m", "data": "d.jsonl", "gradient_checkpointing": {old}}}')
    args = ppo.parse_args(["--config", str(tmp_path / "args.json")])
    assert args.model.gradient_checkpointing == value


COLLECTIVES = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from common import distributed
for hsdp in (0, 1):
    ranks = distributed.start(60.0, hsdp)
    called = []
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        def call(*given, name=name, real=getattr(distributed.dist, name), **more):
            called.append((name, more["group"].size(), max(x.numel() for x in given)))
            return real(*given, **more)
        setattr(distributed.dist, name, call)
    distributed.warm_up(ranks, 4000)
    if distributed.dist.get_rank() == 1:
        with open(sys.argv[2], "a") as file:
            file.write(json.dumps([hsdp, called]) + "\\n")
distributed.dist.barrier()
os._exit(0)  # at an ordinary exit a thread of gloo may end the process with SIGABRT
"""


@pytest.mark.slow
def test_every_group_is_warmed_up_by_every_collective(tmp_path):
    """Two ranks, as one group, and as copies of one shard each."""
    (tmp_path / "program.py").write_text(COLLECTIVES)
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                           str(tmp_path / "program.py"), str(ROOT), str(tmp_path / "calls")], env=clean, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (_, one), (_, two) = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    of = lambda size: [["all_gather_into_tensor", size, 1000], ["reduce_scatter_tensor", size, 1000],  # noqa: E731
                       ["all_reduce", size, 1000 // size]]
    assert one == of(2) and all(call in two for call in of(2)) and all(call in two for call in of(1))
