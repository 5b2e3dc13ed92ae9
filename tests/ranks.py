"""Ranks for tests, forked from one process that has imported everything: 0.3 s instead of the 8 s
of a torchrun.

    told = ranks.run(ppo.main, argv, world=2)                      # a whole life: what all ranks printed
    ranks.run(ppo.main, argv, world=2, codes=[-9, 1], patches=[(stop_at, "update_actor", 4, 0, signal.SIGKILL)])

    life = ranks.start(ppo.main, argv, world=2, SCORES="1 2")      # keywords in capitals: variables of the environment
    os.kill(life.pids[1], signal.SIGSTOP)
    codes = life.wait(30)                                          # exit codes, negative for signals
    assert "..." in life.told()

The function is one that can be imported by name: the main of a script, or a function of a test file
that may use torch.distributed (`distributed.start(60.0, 0)` joins the group). It runs under
`process.run_main`, as scripts do, in a session of its own, with torchrun's variables, the test's
environment and working directory, and the signal handlers of a new process. `patches` are functions
of test files with their arguments, called in every rank before it. No rank outlives the test
process, nor LIMIT seconds.

torchrun itself is started only by tests of what only torchrun does: exit codes, signals,
rendezvous, restarts."""

import ctypes
import faulthandler
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

LIMIT = 300
TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

# Imported by the server, which computes nothing: a thread of torch's would not survive a fork.
IMPORTS = [
    "conftest",
    "looked_up",
    "train_ppo_vl",
    "train_grm_vl",
    "torch.utils.tensorboard",
    "torch._dynamo",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
]
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(IMPORTS)
OUTPUTS = tempfile.TemporaryDirectory(prefix="ranks-")


@dataclass
class Life:
    """Ranks that run, or have ended, and the file in which all of them print."""

    ranks: list[BaseProcess]
    output: Path

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    def told(self) -> str:
        return self.output.read_text()

    def wait(self, seconds: float = 200) -> list[int]:
        """The exit codes. A rank still alive then is killed, and the test fails."""
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        alive = [number for number, rank in enumerate(self.ranks) if rank.is_alive()]
        for number in alive:
            self.ranks[number].kill()
        assert not alive, f"ranks {alive} are still alive after {seconds} s: {self.told()[-3000:]}"
        return [rank.exitcode for rank in self.ranks]


def run(function: Callable, *arguments: Any, codes: list[int] | None = None, **how: Any) -> str:
    """A whole life; what its ranks printed. The exit codes must be ``codes``, by default all 0."""
    life = start(function, *arguments, **how)
    ended = life.wait()
    crash = life.told().partition("Fatal Python error")[2][:4000]
    assert ended == (codes or [0] * len(ended)), (
        f"exit codes {ended}: {crash or life.told()[-6000:]}"
    )
    return life.told()


def in_turn(*runs: tuple) -> None:
    """Functions with their arguments, one after the other in one process group, as
    ``ranks.run(ranks.in_turn, (ppo.main, argv), (grm.main, other), world=2)``."""
    for function, *arguments in runs:
        function(*arguments)


def python(code: str, **environment: str) -> SimpleNamespace:
    """A program that may import the project, in a process of its own: its exit code, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        (code,) = start(execute, code, outputs, **environment).wait(60)
        return SimpleNamespace(returncode=code, **{path.name: path.read_text() for path in outputs})


def execute(code: str, outputs: list[Path]) -> None:
    heed_interrupts()
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    exec(code, {"__name__": "__main__"})


def heed_interrupts() -> None:
    """A test suite in the background of a shell ignores Ctrl-C or SIGHUP, and so would its children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def as_program(path: Path, flags: list[str]) -> None:
    """In a process of its own: as Python starts a script, from another folder."""
    os.chdir("/")
    sys.path[0], sys.argv = str(path.parent), [str(path), *flags]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:  # of --help
        if end.code:
            raise


def clean_environment(**more: str) -> dict[str, str]:
    """Without the traces of this process's own process group."""
    return {name: value for name, value in os.environ.items() if name not in TORCHRUN} | more


def start(
    function: Callable,
    *arguments: Any,
    world: int = 1,
    patches: list[tuple] = (),
    **environment: str,
) -> Life:
    """Start ``world`` ranks of a function."""
    handle, output = tempfile.mkstemp(dir=OUTPUTS.name, suffix=".log")
    os.close(handle)
    port = free_port()
    ensure_server()
    ranks = []
    for rank in range(world):
        place = (rank, 0, world, world, "127.0.0.1", port)
        variables = clean_environment(**dict(zip(TORCHRUN, map(str, (rank, *place)))))
        variables |= {"GLOO_SOCKET_IFNAME": "lo"} | environment
        call = (function, arguments, patches, variables, os.getcwd(), output)
        ranks.append(FORKED.Process(target=live, args=call, daemon=True))
        ranks[-1].start()
    return Life(ranks, Path(output))


def ensure_server() -> None:
    """Start the server of this test process, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def live(
    function: Callable,
    arguments: tuple,
    patches: list[tuple],
    variables: dict,
    folder: str,
    output: str,
) -> None:
    """The life of one rank, in its own process."""
    import torch

    from common.ground import process

    end_with_the_tests()
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(file=2)  # a crash names its line, in every thread
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for seed in (random.seed, np.random.seed, torch.seed):  # anew, as in every process
        seed()
    for patch, *values in patches:
        patch(*values)
    process.run_main(lambda: function(*arguments))


def end_with_the_tests() -> None:
    """Die with the server, which ends with the test process once no rank holds its pipe; and after
    LIMIT seconds."""
    os.setsid()
    os.close(forkserver._forkserver._forkserver_alive_fd)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.alarm(LIMIT)
