"""Errors have an owner: a user's is one message and exit code 2; ours, or that of a fork, a traceback on
the rank where it happened first, the same in <out>/errors, and exit code 1."""

import inspect
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ranks
import train_ppo_vl as ppo
from common import distributed
from common.data.families import Qwen
from common.ground import process
from common.ground.files import UserError
from conftest import ROOT, write_image
from lives import refused


def broken(*_arguments, **_named):
    """The mistake of somebody who has added a family, an estimator or a loss."""
    return np.zeros(2) + np.zeros(3)


LINE = inspect.getsourcelines(broken)[1] + 2  # of the mistake
HERE = f'File "{__file__}", line {LINE}, in broken'


def plant(place: str) -> None:
    """Put the mistake there."""
    if place == "estimator":
        ppo.ESTIMATORS["grpo"] = ppo.Estimator(broken, compares=True)
    elif place == "loss":
        ppo.POLICY_LOSSES["ppo"] = ppo.PolicyLoss(broken, clip=(0.2, 0.2))
    else:
        setattr(Qwen, place, broken)


PLACES = ["loss", *(pytest.param(p, marks=pytest.mark.slow) for p in ("estimator", "expand"))]


@pytest.mark.parametrize("place", [*PLACES, "grid", "patches"])
def test_a_mistake_in_a_fork_shows_its_line(place, flags, life_task, out):
    """Of a family before there is a run's folder, and with the row; of an estimator or a loss also in it."""
    write_image(life_task / "3.png", (56, 56), np.random.default_rng(0))
    told = ranks.run(ppo.main, flags(out, "--advantage grpo"), patches=[(plant, place)], codes=[1])
    assert told.count(HERE) == 1
    assert "ValueError: operands could not be broadcast" in told
    assert not re.search("(?m)^error: ", told)
    if place in ("estimator", "loss"):
        assert HERE in (out / "errors" / "rank-0.txt").read_text()
    else:
        assert not out.exists()
    assert ("in rows.jsonl:2" in told) == (place == "expand")


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    """The variables of ranks that meet in a store of torchrun's, which outlives them."""
    port = ranks.free_port()
    hosted = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    yield {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    del hosted


def fail_on(rank: int, kind: str, folder: Path) -> None:
    """On one rank, an error in a block that all of them pass; the others wait for it there."""
    distributed.start(60.0, 0)
    process.keep_errors(folder)
    with distributed.raise_on_all_ranks("in the block: "):
        if dist.get_rank() == rank:
            raise {"input": UserError, "file": FileNotFoundError, "bug": ValueError}[kind]("no row")


@pytest.mark.parametrize("kind, code", [("input", 2), ("file", 2), ("bug", 1)])
def test_one_ranks_error_ends_all_with_one_message(tmp_path, store, kind, code):
    told = ranks.run(fail_on, 1, kind, tmp_path, world=2, codes=[code, code], **store)
    errors = tmp_path / "errors"
    if code == 2:
        assert re.fullmatch("error: in the block: no row\n", told)
        assert not errors.exists()
        return
    assert told.count("Traceback (most recent call last)") == 1
    assert re.search(r"(?m)^ *ValueError: no row$", told)
    line = rf"(?m)^rank 0 ends after another one[:,] .*; its traceback is in {errors}/rank-0.txt$"
    assert re.search(line, told)
    assert "ValueError: no row" in (errors / "rank-1.txt").read_text()


def fail_before_the_ranks_meet(rank: int, kind: str) -> None:
    """On one rank, a program that does not compile there, or a driver that is too old."""
    problem = None
    if os.environ["RANK"] == str(rank):
        problem = UserError("my.py: no such module") if kind == "program" else None
        torch.cuda.device_count = lambda: 8 * (kind == "driver")
    distributed.start(60.0, 0, problem=problem)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("program", "my.py: no such module"),
        ("driver", "torch .* cannot use this machine's GPUs: .*"),
    ],
)
def test_a_mistake_of_one_machine_ends_all(monkeypatch, kind, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = ranks.run(fail_before_the_ranks_meet, 1, kind, world=2, codes=[2, 2])
    assert re.fullmatch(f"error: {message}\n", told)


def lose(rank: int, how: str, folder: Path) -> None:
    """A rank dies while another one waits for it; or a signal ends that which waits."""
    distributed.start(60.0, 0)
    process.keep_errors(folder)
    if dist.get_rank() == rank:
        number = getattr(signal, how)
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    if (dist.get_rank() == rank) == (how == "SIGKILL"):
        time.sleep(1)
    distributed.gather_objects("here")


@pytest.mark.parametrize("how, code", [("SIGKILL", -9), ("SIGTERM", 75)])
@pytest.mark.parametrize("hosted", [False, True])
def test_a_lost_rank_is_one_line(tmp_path, store, how, code, hosted):
    variables = store if hosted else {}
    told = ranks.run(lose, 1, how, tmp_path, world=2, codes=[1, code], **variables)
    file = tmp_path / "errors" / "rank-0.txt"
    how = r"which it has lost \(Connection (closed|reset) by peer\)"
    line = rf"rank 0 ends after another one, {how}; its traceback is in {file}\n"
    assert re.fullmatch(line, told)
    assert "Traceback" in file.read_text()


def fail_while_others_compute(rank: int) -> None:
    distributed.start(200.0, 0)
    if dist.get_rank() == rank:
        raise ValueError("no row")
    time.sleep(60)  # or waits in a collective of NCCL, which does not notice


def test_no_rank_goes_on_after_a_bug(store):
    told = ranks.run(fail_while_others_compute, 1, world=2, codes=[1, 1], **store)
    assert told.count("Traceback (most recent call last)") == 1


def fail_of(kind: str, folder: Path) -> None:
    process.keep_errors(folder)
    cause = {"file": OSError, "library": KeyError}[kind]("size")
    try:
        raise cause
    except type(cause) as error:
        raise UserError(f"config.json cannot be used: {error!r}") from error


@pytest.mark.parametrize("kind, is_kept", [("file", False), ("library", True)])
def test_what_lies_behind_a_message_is_in_the_file(tmp_path, kind, is_kept):
    """A library's error, of which the message has only the text."""
    told = ranks.run(fail_of, kind, tmp_path, codes=[2])
    assert re.fullmatch(r"error: config.json cannot be used: (OS|Key)Error\('size'\)\n", told)
    file = tmp_path / "errors" / "rank-0.txt"
    assert file.exists() == is_kept
    if is_kept:
        assert "in fail_of" in file.read_text()
        assert "KeyError: 'size'" in file.read_text()


def run_out_of_memory(folder: Path, space: bool) -> None:
    """As on a GPU, which is not there: stubs of torch tell what they are asked."""
    process.keep_errors(folder)
    torch.cuda.is_initialized = lambda: True

    def dump(path: str) -> None:
        if not space:
            raise OSError(28, "No space left on device")
        Path(path).write_text("the blocks")

    torch.cuda.memory._dump_snapshot = dump
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("space", [True, False])
def test_a_snapshot_of_memory_lies_beside_the_traceback(tmp_path, space):
    told = ranks.run(run_out_of_memory, tmp_path, space, codes=[1], RANK="3")
    file = tmp_path / "errors" / "memory-rank-3.pickle"
    assert "the GPU is out of memory: lower --max_tokens_per_pack" in told
    assert f"{file} has the blocks of its memory" in told if space else "No space left" in told
    assert file.exists() == space
    assert (file.parent / "rank-3.txt").exists()


def test_the_next_start_removes_old_tracebacks(flags, copy):
    (copy / "errors").mkdir()
    for name in ("rank-3.txt", "memory-rank-3.pickle", "notes.txt"):
        (copy / "errors" / name).write_text("of a bug that is mended")
    refused(flags(copy, "--resume never"), "already holds a run")
    assert [path.name for path in (copy / "errors").iterdir()] == ["notes.txt"]  # of the user


# What torchrun's summary has of each rank.
OF_A_RANK = "  exitcode  : {} (pid: 7)\n  error_file: /tmp/error.json\n"


@pytest.mark.parametrize(
    "codes, again",
    [((75, 75), True), ((75, -9), True), ((1, 75), False), ((75, 2), False), ((1, 1), False)],
)
def test_a_job_is_requeued_after_a_signal_alone(tmp_path, codes, again):
    """A rank that has nothing to save ends with 75 also when torchrun ends it because of another one."""
    summary = "".join(map(OF_A_RANK.format, codes))
    programs = {
        "srun": f'while [ "$1" != --output ]; do shift; done\nprintf %s "{summary}" > "$2"\nexit 1',
        "scontrol": f'echo "$*" >> {tmp_path}/asked; echo node',
        "sleep": "",
    }
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": "node",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "8",
    }
    for name in ("script.py", "asked"):
        (tmp_path / name).touch()
    command = ["bash", ROOT / "launch" / "train.slurm", "script.py", "--out", "run"]
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, timeout=60)
    assert ended.returncode == 1
    assert ("requeue 7" in (tmp_path / "asked").read_text()) == again
