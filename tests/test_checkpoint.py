"""Checkpoints: killed at any instant, on any rank, a run goes on as if nothing had happened.

Real processes get real SIGKILLs; what else a life may suffer is patched into it before it begins.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common import checkpoint, distributed, logging
from common.ground import files, process
from common.memory.memory import resident_bytes
from common.model import fsdp
from conftest import (
    read_json,
    read_rows,
    same_tensors,
    save_weights,
    start,
    user_error,
    words,
)
from helpers import assert_close_weights, change_weight, cut_back, tensors, weights_of
from lives import (
    ALGORITHMS,
    assert_bitwise,
    assert_close_records,
    die_at,
    flip,
    live,
    rank,
    records,
    refused,
    shard_file,
    small_task,
    steps,
    stop_at,
    time_saves,
    wait_until_met,
)


# ----------------------------------------------------------------------------- what a life may suffer
def fill(disk: Path) -> None:
    """A file, ballast, of all the space that is left."""
    free = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize))


def die_before(owner: str, method: str, step: int) -> None:
    """SIGKILL before a step is recorded, saved or evaluated: at its call of a method of RunLogger
    or Checkpoints."""
    owner = {"RunLogger": logging.RunLogger, "Checkpoints": checkpoint.Checkpoints}[owner]
    original = getattr(owner, method)

    def killed(self, at, *more):
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, at, *more)

    setattr(owner, method, killed)


def change_writes(
    only: int, failing: list[int], seconds: float = 0.0, disk: str = "", log: str = ""
) -> None:
    """The writer of one rank (-1: all) fails at the given saves (1-based), is slow at the first, or
    finds its disk full."""
    original, calls = checkpoint.HuggingFaceStorageWriter.write_data, []

    def write(*arguments):
        calls.append(arguments)
        chosen = only in (-1, rank())
        if chosen and len(calls) in failing and disk:
            fill(Path(disk))
        elif chosen and len(calls) in failing:
            raise OSError(5, "Input/output error")
        started = time.time()
        time.sleep(seconds if chosen and len(calls) == 1 else 0)
        result = original(*arguments)
        if log:
            with open(log, "a") as file:
                file.write(json.dumps([rank(), started, time.time()]) + "\n")
        return result

    checkpoint.HuggingFaceStorageWriter.write_data = write


def wait_before_record(at: int, seconds: float) -> None:
    """Every rank takes longer for a step."""
    original = logging.RunLogger.step

    def record(self, step, *more):
        time.sleep(seconds if step == at else 0)
        original(self, step, *more)

    logging.RunLogger.step = record


def name_hosts() -> None:
    """Every rank is on a host of its own."""
    socket.gethostname = lambda: f"node-{os.environ['RANK']}"


def fill_disk(disk: str, first: int) -> None:
    """The disk is full when a step is recorded."""
    original = logging.RunLogger.step

    def record(self, step, *more):
        if distributed.is_main() and step == first:
            fill(Path(disk))
        original(self, step, *more)

    logging.RunLogger.step = record


def tell_shards() -> None:
    """Print how the weights of each model lie over the ranks, and the bytes of weights, gradients'
    and Adam's shards."""
    original = fsdp.create_state

    def told(optimizer):
        original(optimizer)
        rank, weights = (
            os.environ["RANK"],
            [p for group in optimizer.param_groups for p in group["params"]],
        )
        shares = {
            (str(p.placements), p.shape[0] / p.to_local().shape[0])
            for p in weights
            if p.shape[0] % 4 == 0
        }
        parts = (
            f"shards of rank {rank}:",
            sorted(shares),
            sum(p.to_local().nbytes for p in weights),
            sum(
                x.to_local().nbytes
                for state in optimizer.state.values()
                for x in state.values()
                if x.dim()
            ),
        )
        # at once: four ranks write to one file
        os.write(1, (" ".join(map(str, parts)) + "\n").encode())

    fsdp.create_state = told


# ----------------------------------------------------------------------------- set-up
def assert_equal_tensors(ours: Path, theirs: Path) -> None:
    """The same safetensors files with the same tensors; the order of their headers may differ."""
    files = sorted(ours.glob("*.safetensors"))
    assert files
    assert len(files) == len(list(theirs.glob("*.safetensors")))
    for file in files:
        assert same_tensors(load_file(file), load_file(theirs / file.name))


def recorded(out: Path) -> list[int]:
    """The steps of which there are records."""
    return [record["step"] for record in records(out)]


def pointer(out: Path) -> str:
    return os.readlink(out / "checkpoints" / "latest")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def train(argv: list[str]) -> dict[str, float]:
    """A whole run in this process."""
    return ppo.main(argv)


# ----------------------------------------------------------------------------- bitwise resume
def test_four_steps_are_two_and_two(flags, out, undisturbed):
    """2 steps, SIGKILL of all ranks in step 3, resume, 2 steps: all bits equal those of an
    undisturbed run."""
    argv = flags(out, ALGORITHMS["gae"] + " --save_every 2")
    live(
        [*argv, "--save_blocking"],
        2,
        [(stop_at, "update_actor", 3, -1, signal.SIGKILL)],
        codes=[-signal.SIGKILL] * 2,
    )
    assert steps(out) == [2]
    assert records(out)[-1]["step"] == 2
    assert "resuming from" in live(argv, 2)
    assert_bitwise(out, undisturbed("gae", 2))
    last = records(out)[-1]
    assert last["rollout/dropped_prompts"] > 1
    # counters and KL weight are state
    assert last["train/kl_coef"] != 0.1


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(2, 1), (2, 3)])
def test_resume_on_another_number_of_ranks(flags, out, undisturbed, before, after):
    """--resume PATH, into another folder, resharded."""
    reference = undisturbed("gae", before)
    live(flags(out, ALGORITHMS["gae"] + f" --resume {reference}/checkpoints/step-2"), after)
    assert recorded(out) == [2, 3, 4]  # the evaluation of step 2 is this folder's first record
    assert_close_records(records(out)[1:], records(reference)[-2:])


@pytest.mark.slow
def test_two_copies_of_two_shards(flags, undisturbed, tmp_path, qwen25, life_task):
    """--hsdp 2 on four ranks: halves of everything, the steps of one rank, and a checkpoint that
    goes on on one."""
    reference, out = undisturbed("gae", 1), tmp_path / "four"
    told = live(flags(out, ALGORITHMS["gae"] + " --hsdp 2 --steps 2"), 4, [(tell_shards,)])
    # actor and critic
    assert told.count("[('(Replicate(), Shard(dim=0))', 2.0)]") == 8
    plan = start(qwen25, life_task / "rows.jsonl")
    # first and last shard of each copy
    for rank in range(4):
        shards = re.findall(rf"shards of rank {rank}: .*?] (\d+) (\d+)", told)
        for (weights, moments), module in zip(shards, (plan.actor, plan.critic), strict=True):
            planned = resident_bytes(module, 2)
            assert int(moments) == 2 * int(weights)
            assert int(moments) <= planned["Adam"]
            assert int(moments) == planned["Adam"] or rank % 2
    live(flags(tmp_path / "one", ALGORITHMS["gae"] + f" --resume {out}/checkpoints/step-2"))
    assert_close_records(records(out), records(reference)[:3])
    assert_close_records(records(tmp_path / "one")[-2:], records(reference)[-2:])
    assert_close_weights(*(run / "export" / "step-4" for run in (reference, tmp_path / "one")))


@pytest.mark.slow
def test_a_slow_background_save_holds_the_state_of_its_step(flags, out, undisturbed, tmp_path):
    """Training goes on while the writer sleeps for four seconds; what it then writes is what it was given."""
    hooks = [(change_writes, 0, [], 4), (time_saves, str(tmp_path / "waited"))]
    live(flags(out, ALGORITHMS["gae"] + " --save_every 2"), 1, hooks)
    waited = read_rows(tmp_path / "waited")
    # until the next save begins
    assert 0 < sum(seconds for step, seconds in waited if step == 2) < 3
    ours, theirs = (folder / "checkpoints" / "step-2" for folder in (out, undisturbed("gae", 1)))
    assert_equal_tensors(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "owner, method, at, saved, recorded",
    [
        ("RunLogger", "step", 3, 2, 2),
        ("Checkpoints", "save", 3, 2, 3),
        ("RunLogger", "evaluation", 4, 4, 4),
    ],
)
def test_killed_between_record_save_and_evaluation(
    flags, out, undisturbed, owner, method, at, saved, recorded
):
    """What a step still owes is made up for, once: its record, its checkpoint, its evaluation."""
    argv = flags(out, ALGORITHMS["gae"])
    live([*argv, "--save_blocking"], 1, [(die_before, owner, method, at)], codes=[-signal.SIGKILL])
    assert steps(out)[0] == saved
    assert records(out)[-1]["step"] == recorded
    evaluated = [record["step"] for record in records(out) if "eval/num_samples" in record]
    assert evaluated == [0, 2]
    live(argv)
    assert_bitwise(out, undisturbed("gae", 1))


# ----------------------------------------------------------------------------- killed while saving
@pytest.mark.slow
@pytest.mark.parametrize(
    "point, world, survives",
    [
        ("before-write", 2, 1),
        ("before-rename", 1, 1),
        ("before-pointer", 1, 2),
        ("before-rotation", 1, 2),
    ],
)
def test_killed_at_a_marked_point(flags, out, undisturbed, point, world, survives):
    """Another rank ends too; earlier checkpoints are as they were; the next life takes the newest
    complete one. From the rename on rank 0 is alone."""
    killed = 1 if point == "before-write" else 0
    cut_back(undisturbed("grpo", world), out, 1)
    files.write_link(out / "checkpoints" / "latest", "step-1")
    before = contents(out / "checkpoints" / "step-1")
    argv = flags(out, ALGORITHMS["grpo"] + " --save_every 2 --keep_last 2")
    life = ranks.start(ppo.main, argv, world=world, patches=[(die_at, point, killed)])
    codes = life.wait()
    assert codes.pop(killed) == -signal.SIGKILL
    assert not {0, -signal.SIGKILL} & set(codes)
    assert steps(out)[0] == survives
    assert contents(out / "checkpoints" / "step-1") == before
    assert pointer(out) == ("step-2" if point == "before-rotation" else "step-1")
    output = live(argv, world)
    assert f"resuming from {out}/checkpoints/step-{survives}" in output
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "latest",
        "step-2",
        "step-4",
    ]
    assert_bitwise(out, undisturbed("grpo", world))


@pytest.mark.slow
def test_killed_at_random_instants(flags, out, undisturbed):
    """Two random SIGKILLs, of one rank or of both; benchmarks/kill_test.py does thirty."""
    rng, reached = np.random.default_rng(int(time.time())), 0
    argv = flags(out, ALGORITHMS["gae"])
    for _ in range(2):
        life = ranks.start(ppo.main, argv, world=2)
        wait_until_met(life)
        time.sleep(rng.uniform(0, 3.5))
        for pid in rng.permutation(life.pids)[: rng.integers(1, 3)]:
            # it has ended, of itself or with its peer
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        life.wait()
        newest = max(steps(out), default=0)
        assert newest >= reached
        reached = newest
        for file in (out / "checkpoints" / f"step-{newest}").glob("*.safetensors"):
            assert load_file(file)
    live(argv, 2)
    assert_bitwise(out, undisturbed("gae", 2))


# ----------------------------------------------------------------------------- failed saves
@pytest.mark.slow
def test_write_errors_on_one_rank(flags, out):
    """Reported, counted, and training goes on; a save that succeeds starts the count anew; a third
    in a row ends the run, which says from which step it can go on."""
    hooks = [(change_writes, 1, [2, 4, 5, 6]), (name_hosts,)]
    output = live(flags(out, "--steps 7 --save_blocking"), 2, hooks, codes=[2, 2])
    failed = re.findall(
        r"the checkpoint of step (\d) was not saved: rank 1 on node-1: \[Errno 5\]", output
    )
    assert failed == ["2", "4", "5", "6", "6"]  # the last of them ends the run, too
    assert "step 3 is saved: " in output
    assert output.splitlines()[-1].startswith("error: 3 saves in a row have failed; ")
    assert "Traceback" not in output
    assert steps(out) == [3, 1]
    assert pointer(out) == "step-3"
    # before its save
    assert [record.get("perf/failed_saves") for record in records(out)] == [0, 0, 1, 0, 1, 2]
    assert not list((out / "checkpoints").glob(".tmp-*"))


@pytest.mark.slow
def test_a_save_that_outlasts_the_timeout(flags, out):
    """Fails, and is the only one that does."""
    output = live(
        flags(out, "--timeout 4 --reward_timeout 3 --save_blocking"), 2, [(change_writes, 1, [], 6)]
    )
    assert re.findall(r"the checkpoint of step (\d) was not saved", output) == ["1"]
    assert "was not saved: rank 1 on " in output and "not written within 3.2 s" in output
    assert steps(out) == [2]


@pytest.mark.slow
def test_a_step_that_outlasts_the_timeout_of_a_save(flags, out):
    """The rank that has written has then been left by the one that has not, which is named."""
    hooks = [(change_writes, 1, [], 12), (wait_before_record, 2, 6)]
    output = live(flags(out, "--timeout 4 --reward_timeout 3"), 2, hooks)
    assert re.findall(r"the checkpoint of step (\d) was not saved", output) == ["1"]
    assert "was not saved: rank 1 on " in output
    assert "Traceback" not in output
    assert steps(out) == [2]


@pytest.mark.slow
def test_weights_that_cannot_be_exported(flags, out, capfd):
    """On the way a warning; at the end an error of every rank, beside a checkpoint from which the
    next life exports."""
    out.mkdir()
    (out / "export").write_text("in the way")
    output = live(flags(out, "--export_every 1"), 2, codes=[2, 2])
    assert f"warning: the weights were not exported to {out}/export/step-1: " in output
    assert "done:" not in output
    assert output.count(f"error: the weights were not exported to {out}/export/step-2: ") == 1
    assert steps(out) == [2, 1]
    (out / "export").unlink()
    train(flags(out, "--export_every 1"))
    output = capfd.readouterr().out
    assert f"resuming from {out}/checkpoints/step-2" in output
    assert "done: all results" in output
    assert os.readlink(out / "export" / "latest") == "step-2"
    assert load_file(out / "export" / "step-2" / "model.safetensors")


def test_a_metric_that_is_not_finite_costs_no_checkpoint(flags, out, monkeypatch):
    """The save that is on its way when the evaluation of its step turns out so is committed."""
    values = iter((1.0, float("nan")))
    monkeypatch.setattr(ppo, "evaluate", lambda *_: ({"eval/reward_mean": next(values)}, []))
    refused(flags(out, "--eval_every 2"), "metric eval/reward_mean is nan at step 2")
    assert steps(out) == [2, 1]
    assert recorded(out) == [0, 1, 2]


# ----------------------------------------------------------------------------- full disks
@pytest.fixture
def mount(tmp_path):
    """mount(folder, size): makes it a small file system, until the test ends."""
    folders = []

    def mount(folder: Path, size: str) -> None:
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
        folders.append(folder)

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path, mount):
    """A file system of 14 MiB at <run>/checkpoints: three or four checkpoints."""
    mount(tmp_path / "run" / "checkpoints", "14m")
    return tmp_path / "run"


@pytest.mark.slow
def test_full_disk(flags, small_disk):
    """Full in the middle of a write, then before a write: the earlier checkpoint is intact."""
    argv = flags(small_disk, "--steps 4 --save_blocking")
    ballast = small_disk / "checkpoints" / "ballast"
    output = live(argv, 2, [(change_writes, 1, [2], 0, str(ballast.parent))], codes=[2, 2])
    assert "No space left on device" in output
    assert steps(small_disk) == [1]
    assert pointer(small_disk) == "step-1"
    ballast.unlink()
    assert "step-1" in live([*argv, "--keep_last", "1"], 2)
    assert steps(small_disk) == [4]


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_last_save_is_named_last(flags, small_disk):
    hooks = [(change_writes, 0, [1], 0, str(small_disk / "checkpoints"))]
    output = live(flags(small_disk, "--steps 1 --export_every 0"), 1, hooks, codes=[2])
    last = output.splitlines()[-1]
    assert last.startswith("error: the checkpoint of step 1 was not saved: ")
    assert "No space left on device" in last


@pytest.mark.slow
def test_a_full_disk_ends_the_run(flags, out, mount):
    """With one message, on every rank alike; the same command goes on once there is space."""
    ballast = out / "ballast"
    mount(out, "2m")
    argv = flags(out, "--steps 3 --save_every 0 --export_every 0 --log_samples 1")
    output = live(argv, 2, [(fill_disk, str(out), 2)], codes=[2, 2])
    assert output.count("error: --out") == 1
    assert (
        "cannot be written (on a full disk, free space and start again from the newest checkpoint)"
        in output
    )
    assert "No space left on device" in output
    ballast.unlink()
    live(argv, 2)
    assert recorded(out) == [1, 2, 3]


def test_records_are_on_disk_before_a_commit(flags, out, monkeypatch):
    """fsync of metrics.jsonl, with the record of the step and those before, comes before the rename
    that commits."""
    events, fsync, rename = [], os.fsync, Path.rename

    def synced(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == "metrics.jsonl":
            events.append(["fsync", *(record["step"] for record in records(out))])
        fsync(handle)

    def renamed(self, target):
        if target.name.startswith("step-") and target.parent.name == "checkpoints":
            events.append([target.name])
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    train(flags(out, "--save_blocking --export_every 0"))
    assert events == [["fsync", 1], ["step-1"], ["fsync", 1, 2], ["step-2"]]


# ----------------------------------------------------------------------------- a model that is lost
@pytest.mark.slow
def test_a_lost_policy_stops_the_run(flags, out):
    """The first update, finite, is the ruin: after three more steps without an update the run
    stops. A resumed run counts anew."""
    argv = flags(
        out, "--advantage rloo --actor_lr 1e20 --keep_last 1 --export_every 0 --save_blocking"
    )
    train([*argv, "--steps", "3"])
    assert [record.get("train/actor_skipped") for record in records(out)] == [0, 1, 1]
    assert steps(out) == [3]
    refused(
        [*argv, "--steps", "9"],
        "step 6: the gradient of the actor was not finite",
        "skipped, 3 steps in a row;",
    )
    assert recorded(out) == [1, 2, 3, 4, 5, 6]


# ----------------------------------------------------------------------------- damaged checkpoints
def test_the_commit_holds_the_sha256_of_every_file(undisturbed):
    folder = undisturbed("grpo", 2) / "checkpoints" / "step-4"
    files = {name: data for name, data in contents(folder).items() if name != "COMMITTED.json"}
    commit = read_json(folder / "COMMITTED.json")
    assert commit["sha256"] == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items()
    }
    assert len(files) == 3


def test_a_rotten_checkpoint_is_not_resumed_from(flags, finished, copy, capfd):
    """It is told why, and the next older one is taken, whatever the pointer says; the result is as
    if the rotten one had never been."""
    flip(shard_file(copy / "checkpoints" / "step-2"), -1)
    files.write_link(copy / "checkpoints" / "latest", "step-7")
    train(flags(copy))
    output = capfd.readouterr().out
    assert re.search(
        f"warning: not resumed from: {copy}/checkpoints/step-2: .* its sha256 is another", output
    )
    assert f"resuming from {copy}/checkpoints/step-1" in output
    assert steps(copy) == [2, 1]
    assert pointer(copy) == "step-2"
    assert_bitwise(copy, finished, step=2)


@pytest.mark.slow
def test_all_ranks_look_for_rot(flags, out, undisturbed):
    """The newest is damaged in the first rank's file, the next in the second's; the third is taken."""
    out = Path(shutil.copytree(undisturbed("grpo", 2), out, symlinks=True))
    for step, number in ((4, 1), (3, 2)):
        flip(next((out / "checkpoints" / f"step-{step}").glob(f"shard-0000{number}*")), -1)
    output = live(flags(out, ALGORITHMS["grpo"]), 2)
    told = re.findall(
        r"not resumed from: \S*/(step-\d): shard-0000(\d)\S* is not what was written", output
    )
    assert told == [("step-4", "1"), ("step-3", "2")]
    assert f"resuming from {out}/checkpoints/step-2" in output
    assert_bitwise(out, undisturbed("grpo", 2))


# ----------------------------------------------------------------------------- weights of another run
def test_weights_alone_start_a_critic(flags, qwen25, tmp_path, picture_rows):
    """--critic_model takes an actor's folder, or a critic's with its value head; nothing else is
    loaded from it."""
    critic = Path(shutil.copytree(qwen25, tmp_path / "critic"))
    head = torch.randn(1, read_json(qwen25 / "config.json")["text_config"]["hidden_size"])
    changed = change_weight(critic, lambda weight: weight.add_(1))
    save_weights(critic, tensors(critic) | {"value_head.weight": head})
    env = start(qwen25, picture_rows, "--critic_model", critic)
    of_critic, of_actor = map(weights_of, (env.critic, env.actor))
    name = next(name for name in of_actor if name.endswith("layers.0.mlp.up_proj.weight"))
    assert torch.equal(of_critic["value_head.weight"], head)
    assert torch.equal(of_critic[name], changed)
    assert torch.allclose(of_actor[name], changed - 1, atol=1e-6)
    # its features would not be the actor's
    change_weight(critic, lambda weight: weight.add_(1), "patch_embed.proj.weight")
    with user_error("its vision tower differs from that of"):
        start(qwen25, picture_rows, "--critic_model", critic)


@pytest.mark.slow
@pytest.mark.parametrize("more, later", [("", True), ("--train_vision", False)])
def test_an_exported_critic_starts_another_run(flags, out, qwen25, picture_rows, more, later):
    """Bit by bit, with its value head; a run may also be asked for it once it has ended."""
    train(flags(out, f"--critic_lr 1e-2 {more} {'' if later else '--export_critic'}"))
    if later:
        assert not (out / "export_critic").exists()
        train(flags(out, "--critic_lr 1e-2 --export_critic"))
    saved = load_file(shard_file(out / "checkpoints" / "step-2"))
    env = start(
        qwen25, picture_rows, "--critic_model", out / "export_critic" / "latest", *more.split()
    )
    weights = {f"critic.model.{name}": value for name, value in weights_of(env.critic).items()}
    trained = {name: value for name, value in saved.items() if name.startswith("critic.model.")}
    assert trained["critic.model.value_head.weight"].any()
    assert same_tensors(trained, {name: weights[name] for name in trained})


# ----------------------------------------------------------------------------- what is kept, how it is written
@pytest.mark.slow
def test_intervals(flags, out, finished, tmp_path, monkeypatch):
    assert steps(finished) == [2, 1]
    # -1: the last step
    assert sorted(path.name for path in (finished / "export").iterdir()) == ["latest", "step-2"]
    save, waiting = checkpoint.Checkpoints.save, []
    monkeypatch.setattr(
        checkpoint.Checkpoints,
        "save",
        lambda self, *more: (save(self, *more), waiting.append(self.pending is None)),
    )
    train(flags(out, "--save_every 0 --export_every 1"))
    assert steps(out) == []
    assert sorted(path.name for path in (out / "export").iterdir()) == [
        "latest",
        "step-1",
        "step-2",
    ]
    train(flags(tmp_path / "last", "--save_every -1 --export_every 0"))
    assert steps(tmp_path / "last") == [2]
    assert not (tmp_path / "last" / "export").exists()
    train(flags(tmp_path / "blocking", "--steps 1 --export_every 0 --save_blocking"))
    # one in the background, one waited for
    assert waiting == [False, True]


def test_exported_weights_are_a_model(flags, out, finished):
    name = os.readlink(finished / "export" / "latest")
    assert name == "step-2"
    assert AutoConfig.from_pretrained(finished / "export" / "latest").model_type == "qwen2_5_vl"
    # others may read the weights
    assert len({path.stat().st_mode for path in (finished / "export" / name).iterdir()}) == 1
    argv = flags(out, "--eval_only") + words("--model", finished / "export" / name)
    assert train(argv)["eval/num_samples"] == 3


@pytest.mark.parametrize(
    "keep_last, keep_gb, remaining",
    [(2, 0, [4, 3]), (9, 2.5e-9, [4, 3]), (9, 0.5e-9, [4]), (9, 0, [4, 3, 2, 1])],
)
def test_keep_last(tmp_path, keep_last, keep_gb, remaining):
    """As many of the newest as fit, in --keep_gb as well, and the newest even if it alone does not;
    those of a later life are left alone."""
    for step in range(1, 6):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "COMMITTED.json").write_text("1")
    owner = SimpleNamespace(
        folder=tmp_path / "checkpoints",
        args=SimpleNamespace(keep_last=keep_last, keep_gb=keep_gb),
        damaged=set(),
    )
    checkpoint.Checkpoints.delete_old(owner, 4)
    assert steps(tmp_path) == [5, *remaining]


@pytest.mark.slow
def test_save_strategies(flags, tmp_path):
    """Who writes at the same time; what is written does not depend on it."""
    for strategy in ("unrestricted", "single_node", "single_process", "single_thread"):
        log = tmp_path / f"{strategy}.jsonl"
        hooks = [(change_writes, -1, [], 1.5, "", str(log))]
        live(
            flags(tmp_path / strategy, f"--advantage grpo --steps 1 --save_strategy {strategy}"),
            2,
            hooks,
        )
        assert_equal_tensors(
            *(tmp_path / name / "checkpoints" / "step-1" for name in (strategy, "unrestricted"))
        )
        (_, _, end), (_, start, _) = sorted(
            map(json.loads, log.read_text().splitlines()), key=lambda line: line[1]
        )
        assert (start < end) == (strategy in ("unrestricted", "single_node")), strategy
    train(flags(tmp_path / "single_process", "--advantage grpo --save_strategy single_process"))
    assert recorded(tmp_path / "single_process") == [1, 2]


# ----------------------------------------------------------------------------- one run per folder, signals
@pytest.mark.slow
def test_one_live_run_per_folder(flags, copy):
    """A second run is refused; the lock of a dead one is no obstacle."""
    argv, lock = flags(copy, "--steps 3"), copy / ".lock"
    of_dead = lock.read_text()
    life = ranks.start(ppo.main, argv, patches=[(stop_at, "update_actor", 1, 0, signal.SIGSTOP)])
    while lock.read_text() in ("", of_dead):
        time.sleep(0.05)
    before = (copy / "metrics.jsonl").read_bytes()
    refused(argv, "in use by a live run")
    os.kill(life.pids[0], signal.SIGKILL)
    assert life.wait() == [-signal.SIGKILL]
    assert (copy / "metrics.jsonl").read_bytes().startswith(before)
    live(argv)
    assert steps(copy)[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("number, world", [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_preemption(flags, out, undisturbed, number, world):
    """A signal to the last rank: all finish the step, save and exit with the documented code; the
    next life goes on."""
    argv = flags(out, ALGORITHMS["grpo"] + " --save_every -1")
    signalled = stop_at, "rollout", 2, world - 1, int(number)
    output = live(argv, world, [signalled], codes=[process.EXIT_PREEMPTED] * world)
    assert "stopped by a signal after step 2" in output
    assert "Traceback" not in output
    assert output.count("Ctrl-C: saving after the step") == (number == signal.SIGINT)
    assert steps(out) == [2]  # its evaluation is the next life's
    live(argv, world)
    assert_bitwise(out, undisturbed("grpo", world))


@pytest.mark.parametrize(
    "name, during",
    [("ppo", "export_if_due"), ("grm", "evaluate")],
)
def test_a_signal_between_two_steps_lets_no_step_begin(qwen25, tmp_path, monkeypatch, name, during):
    """During the evaluation or the export after step 2: that ends, step 2 is saved, once, and the
    next life goes on."""
    script, out = {"ppo": ppo, "grm": grm}[name], tmp_path / name
    argv = words(
        *small_task(tmp_path, qwen25, name),
        "--steps 4 --eval_every 2 --save_every 3 --export_every 2",
    )
    owner = script if during == "evaluate" else checkpoint.Checkpoints
    original, saves, commit = getattr(owner, during), [], checkpoint.Checkpoints.commit

    def signalled(*arguments, **named):
        if (out / "metrics.jsonl").exists() and recorded(out)[-1:] == [2]:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **named)

    process.STOP_SIGNALS.clear()
    monkeypatch.setattr(
        checkpoint.Checkpoints,
        "commit",
        lambda self, *more: saves.append(more[0]) or commit(self, *more),
    )
    with monkeypatch.context() as patched:
        patched.setattr(owner, during, signalled)
        with pytest.raises(process.Exit) as end:
            script.main(argv)
    assert end.value.code == process.EXIT_PREEMPTED
    assert recorded(out)[-1] == 2
    assert [record["step"] for record in records(out) if "eval/seconds" in record] == [0, 2]
    assert (out / "export" / "step-2").is_dir()
    assert saves == [2]
    process.STOP_SIGNALS.clear()
    script.main(argv)
    assert recorded(out)[-1] == 4
    assert saves == [2, 3, 4]


@pytest.mark.slow
def test_a_silent_rank_ends_the_job_within_the_timeout(flags, out):
    started = time.time()
    # as when its node is lost without a word
    silent = stop_at, "update_actor", 2, 1, signal.SIGSTOP
    life = ranks.start(
        ppo.main, flags(out, "--timeout 5 --reward_timeout 4"), world=2, patches=[silent]
    )
    life.ranks[0].join(30)
    assert life.ranks[0].exitcode == 1
    assert time.time() - started < 25
    life.ranks[1].kill()
    assert re.search("(?i)timed? ?out", life.told())
