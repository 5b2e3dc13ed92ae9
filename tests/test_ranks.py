"""Ranks of tests are as new processes: their own session, output, variables and handlers; and they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranks
from common.ground import process
from conftest import ROOT


def end(how: str) -> None:
    if how == "refusal":
        raise process.UserError("no such row")
    if how == "bug":
        raise ZeroDivisionError
    if how == "sleep":
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


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
