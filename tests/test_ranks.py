"""Ranks of tests are as new processes: their own session, output, variables and handlers; and they end."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from common import distributed, process
from conftest import ROOT


def look_around(folder: str) -> None:
    """What a rank finds when it starts, and a sum over all ranks."""
    server = Path(f"/proc/{os.getppid()}")
    assert len(list((server / "task").iterdir())) == 1
    assert "forkserver" in (server / "cmdline").read_text()
    assert threading.active_count() == 2  # one waits for signals
    assert torch.get_num_threads() == 1
    assert {
        "train_ppo_vl",
        "train_grm_vl",
        "transformers.models.qwen3_vl.modeling_qwen3_vl",
    } <= sys.modules.keys()
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL  # the server has one of its own
    assert os.getsid(0) == os.getpid()
    assert os.getcwd() == folder
    distributed.start(60.0, 0)
    total = torch.tensor(2 ** dist.get_rank())
    dist.all_reduce(total)
    line = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {total}, {os.environ['COLOUR']} {torch.initial_seed()}\n"
    # at once: the ranks write to one file
    os.write(1, line.encode())


def seen(note: str) -> None:
    print(f"patched: {note}", flush=True)


def end(how: str) -> None:
    if how == "refusal":
        raise process.UserError("no such row")
    if how == "bug":
        raise ZeroDivisionError
    if how == "sleep":
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_is_as_a_new_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = ranks.run(look_around, str(tmp_path), world=2, patches=[(seen, "here")], COLOUR="red")
    seeds = [re.search(f"rank {rank} of 2: 3, red (.*)", told)[1] for rank in (0, 1)]
    assert seeds[0] != seeds[1]
    assert told.count("patched: here") == 2


@pytest.mark.parametrize(
    "how, code, message",
    [
        ("refusal", 2, "error: no such row\n"),
        ("bug", 1, "ZeroDivisionError"),
        ("kill", -signal.SIGKILL, ""),
    ],
)
def test_exit_codes(how, code, message):
    assert message in ranks.run(end, how, codes=[code])


def test_a_rank_that_does_not_end_is_killed():
    life = ranks.start(end, "sleep")
    with pytest.raises(AssertionError, match=r"ranks \[0\] are still alive"):
        life.wait(0.1)
    assert life.ranks[0].join(10) is None
    assert life.ranks[0].exitcode == -signal.SIGKILL


PROGRAM = """
import os, time, ranks
ranks.FORKED.set_forkserver_preload(["torch"])
print(ranks.start(time.sleep, 60).pids[0], flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_no_rank_outlives_the_tests():
    path = os.pathsep.join(str(ROOT / name) for name in ("", "launch", "tests"))
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    rank, deadline = Path(f"/proc/{int(program.stdout)}"), time.time() + 20
    while rank.exists() and time.time() < deadline:
        time.sleep(0.05)
    assert not rank.exists()
