"""How processes start and end: --help, signals, exit codes, workers whose launcher is killed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import ranks
from common import distributed
from common.ground import process
from conftest import ROOT, user_error
from ranks import heed_interrupts, python

SCRIPTS = ("train_ppo_vl.py", "train_grm_vl.py")


# -------------------------------------------------------------------------------- start
@pytest.mark.slow
@pytest.mark.parametrize(
    "script, flags, code, message",
    [(SCRIPTS[0], "--help", 0, ""), (SCRIPTS[1], "--config none.json", 2, "No such file")],
)
def test_help_and_refusals(script, flags, code, message):
    result = python(
        f"import runpy, sys\nsys.argv = {[script, *flags.split()]}\n"
        f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
    )
    assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == bool(message)
    assert ("usage:" in result.stdout) == (code == 0)


# -------------------------------------------------------------------------------- exit codes
@pytest.mark.parametrize(
    "program, code, message",
    [
        ("pass", 0, ""),
        ("raise process.UserError('no such row')", 2, "error: no such row\n"),
        ("raise process.Exit(process.EXIT_PREEMPTED)", 75, ""),
        ("sys.exit(0)", 1, "SystemExit: 0"),  # of user code
        ("raise ValueError('a bug')", 1, "Traceback"),
        (
            "import torch; raise torch.OutOfMemoryError('CUDA')",
            1,
            "lower --max_tokens_per_pack or --slots",
        ),
        (
            "raise RuntimeError('Timed out waiting 4000ms for recv operation to complete')",
            1,
            "longer than --timeout",
        ),
        (
            r"raise ValueError('\x1b[2J\nerror: all is well')",
            1,
            "  ValueError: \\x1b[2J\n  error: all is well\n",
        ),
    ],
)
def test_exit_code_0_means_done(program, code, message):
    imports = "import os, signal, sys\nfrom common.ground import process"
    result = python(f"{imports}\ndef main():\n    {program}\nprocess.run_main(main)")
    assert result.returncode == code
    assert message in result.stderr
    assert bool(message) == bool(result.stderr)
    assert ("Traceback" in result.stderr) == (code == 1)


TYPO = """
import time
import torch.distributed as dist
from common.ground import process
def main():
    dist.is_initialized = lambda: True
    dist.destroy_process_group = lambda: time.sleep(99)  # as with NCCL, for the other ranks
    raise process.UserError("a typo")
process.run_main(main)
"""


AFRESH = "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('launch')]; "


AT_THE_END = """
import atexit, time
import torch.distributed as dist
from common.ground import process
def main():
    dist.is_initialized = lambda: True
    process.is_first = lambda: True
    process.EXIT_SECONDS = 0.2
    atexit.register(time.sleep, 99 * {hangs})
    atexit.register(print, "uploaded", flush=True)
    raise {error}
process.run_main(main)
"""


@pytest.mark.parametrize("hangs", [0, 1])
@pytest.mark.parametrize(
    "error, code", [("process.UserError('a typo')", 2), ("ValueError('a bug')", 1)]
)
def test_an_error_lets_others_end_their_work(error, code, hangs):
    """What is registered with atexit, as by W&B, which may hang for want of a network."""
    result = python(AT_THE_END.format(error=error, hangs=hangs))
    assert (result.returncode, result.stdout) == (code, "uploaded\n")


CLOSED = """
import os, sys
{way}
from common.ground import process
def main():
    for line in range(9):
        print(line)
    print("went on", file=sys.stderr)
{start}
"""
WAYS = {
    "| head": "reader, writer = os.pipe(); os.close(reader); sys.stdout = os.fdopen(writer, 'w')",
    ">&-": "os.close(1); sys.stdout = None",
}
AS_TOOL = f"{AFRESH}from launch import tool\nwith tool.one_message(): main()"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("start", ["process.run_main(main)", AS_TOOL], ids=["script", "tool"])
def test_a_closed_output_ends_nothing(way, start):
    result = python(CLOSED.format(way=WAYS[way], start=start))
    assert (result.returncode, result.stderr) == (0, "went on\n")


@pytest.mark.parametrize("first", ["process.run_main(say)", f"{AFRESH}import launch.toy; say()"])
def test_what_a_terminal_cannot_show_ends_nothing(first):
    """A script's lines on an ASCII terminal, and a tool's: the toy's path, say."""
    ended = python(
        "import sys\n"
        "from common.ground import process\n"
        "sys.stdout.reconfigure(encoding='ascii', errors='strict')\n"
        "def say():\n    print('\u4e2d \ufffd')\n" + first
    )
    assert (ended.returncode, ended.stdout) == (0, "\\u4e2d \\ufffd\n"), ended.stderr


def test_ranks_that_do_not_come_are_named():
    """One process that believes in two, without the other: no traceback, nothing of slow rewards."""
    ended = python(
        "from common import distributed\nfrom common.ground import process\n"
        "distributed.PATIENCE = 0.1\n"
        "process.run_main(lambda: distributed.start(2.0, 0))",
        WORLD_SIZE="2",
        RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(ranks.free_port()),
    )
    place = r"127\.0\.0\.1:\d+ \(WORLD_SIZE=2, 1 here\)"
    assert ended.returncode == 2
    assert re.fullmatch(rf"waiting for 2 ranks at {place}\n", ended.stdout)
    assert re.fullmatch(
        rf"error: not all of 2 ranks at {place} came within 2 s .* torchrun, or unset WORLD_SIZE .*\n",
        ended.stderr,
    )


@pytest.mark.parametrize("rank, world", [("1", ""), ("2", "2"), ("0", "0"), ("0", "-1")])
def test_a_rank_that_cannot_be_is_told(monkeypatch, capsys, rank, world):
    """Whichever it believes to be, as no other may be there to say it."""
    monkeypatch.setattr(os, "environ", {"RANK": rank, "WORLD_SIZE": world})
    with pytest.raises(process.Exit, match="2"):
        distributed.expected_ranks()
    line = f"error: RANK={rank} is none of the ranks of WORLD_SIZE={world or 1}: start all of them with "
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize(
    "variables, address",
    [
        (dict(MASTER_PORT="29500", MASTER_ADDR="node7", WORLD_SIZE="1"), "127.0.0.1:0"),
        (dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), ""), "127.0.0.1:0"),
        (dict(MASTER_PORT="29500", MASTER_ADDR="node7", WORLD_SIZE="2"), "node7:29500"),
        (dict(MASTER_PORT="29500", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="x"), "127.0.0.1:29500"),
    ],
)
def test_one_process_meets_nobody(monkeypatch, variables, address):
    """Though a job script exports addresses, or empty ones, as it does outside of SLURM."""
    world = int(variables["WORLD_SIZE"] or 1)
    monkeypatch.setattr(os, "environ", variables)
    assert distributed.expected_ranks() == world
    assert address == f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    assert os.environ["RANK"] == "0"


@pytest.mark.parametrize(
    "variables, refused",
    [
        (dict(SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="0"), True),
        (dict(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1"), True),
        (dict(PMI_SIZE="8", RANK=""), True),
        (dict(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0", RANK="3", WORLD_SIZE="8"), False),
        (dict(SLURM_NTASKS="16", SLURM_STEP_NUM_TASKS="1"), False),  # in a shell of salloc
    ],
)
def test_processes_of_srun_without_torchrun_are_refused(monkeypatch, capsys, variables, refused):
    """Each of them would be a run of one rank. The first one says it."""
    monkeypatch.setattr(os, "environ", variables)
    if not refused:
        assert distributed.expected_ranks() == int(os.environ["WORLD_SIZE"])
        return
    with pytest.raises(process.Exit, match="2"):
        distributed.expected_ranks()
    error = capsys.readouterr().err
    is_first = "1" not in (variables.get("OMPI_COMM_WORLD_RANK"), variables.get("SLURM_PROCID"))
    assert ("without torchrun, and each would be a run of one rank" in error) == is_first


@pytest.mark.parametrize("variables", [{}, {"RANK": ""}])  # as a job script leaves it
def test_an_error_waits_for_no_other_rank(variables):
    result = python(TYPO, **variables)
    assert (result.returncode, result.stderr) == (2, "error: a typo\n")


def test_a_mistake_of_another_rank_than_the_first_is_told():
    """Before the ranks have met, and without torchrun, whose summary would have it."""
    result = python(TYPO.replace("lambda: True", "lambda: False"), RANK="1", WORLD_SIZE="2")
    assert (result.returncode, result.stderr) == (2, "error: rank 1: a typo\n")


# Python itself must end, which no rank of tests/ranks.py does: one that imports, and forks.
LATE = """
import os, torch
from common import user_code
from common.ground import process
ENDS = [
    "pass",
    "raise process.UserError('a disk')",
    "raise process.Exit(process.EXIT_PREEMPTED)",
]
matrix = torch.ones(300, 300)
def compute():
    while True:
        matrix @ matrix
def main():
    process.GIVEN_UP.append(user_code.in_thread(compute))
    exec(end)
codes = []
for end in ENDS:
    if not os.fork():
        process.run_main(main)
        break
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    print(codes)
"""


@pytest.mark.slow
def test_a_call_that_was_given_up_does_not_end_the_process():
    """Its thread is inside of C++, which Python ends by an abort."""
    result = subprocess.run(
        [sys.executable, "-c", LATE], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "error: a disk\n")
    assert result.stdout == "[0, 2, 75]\n"


# -------------------------------------------------------------------------------- signals
STOPPED = "stopped by a signal with nothing to save; the same command starts again\n"
BEFORE_THE_LOOP = """
import ctypes, os, signal, threading, time
from common.ground import process
def main():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.{name})).start()
    {wait}
    print("too late")
process.run_main(main)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT"])
def test_a_signal_before_the_loop_ends_with_one_line(name):
    """One process of each machine says it."""
    for local_rank, message in (("0", STOPPED), ("1", "")):
        program = BEFORE_THE_LOOP.format(name=name, wait="time.sleep(20)")
        result = python(program, LOCAL_RANK=local_rank)
        assert (result.returncode, result.stdout, result.stderr) == (75, "", message)


WAITING = """
import os, signal, threading
from common import distributed
from common.ground import process
threading.Timer(0.5, os.kill, (os.getpid(), signal.{name})).start()
process.run_main(lambda: distributed.start(100.0, 0))
"""


@pytest.mark.parametrize("name, rank", [("SIGTERM", "0"), ("SIGINT", "1"), ("SIGUSR1", "1")])
def test_a_signal_ends_a_rank_that_waits_for_others_to_come(name, rank):
    """It hosts the store, or looks for it; inside C++, where Python runs no handler."""
    port = str(ranks.free_port())
    place = dict(WORLD_SIZE="2", RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ended = python(WAITING.format(name=name), **place)
    assert (ended.returncode, ended.stdout) == (75, "")
    assert ended.stderr.count(STOPPED) == 1  # torch may add that a connection was interrupted
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name, code", [("SIGHUP", 0), ("SIGUSR1", 75)])
def test_what_is_ignored_stays_ignored(name, code):
    """By nohup, say; but launch/train.slurm has torchrun ignore SIGUSR1, and not its workers."""
    program = BEFORE_THE_LOOP.format(name=name, wait="time.sleep(1)")
    program = program.replace(
        "process.run_main", f"signal.signal(signal.{name}, signal.SIG_IGN)\nprocess.run_main"
    )
    assert python(program).returncode == code


LOOP = """
import os, signal, time
from common.ground import process
def main():
    process.catch_signals()
    for step in range(3):
        print("step", step, process.STOP_SIGNALS, flush=True)
        for number in {signals}:
            os.kill(os.getpid(), number)
process.run_main(main)
"""


def test_ctrl_c_asks_for_a_stop_with_one_line():
    """It is remembered for the end of the step, by one process of each machine with one line."""
    for local_rank, lines in (("0", 1), ("1", 0)):
        result = python(LOOP.format(signals="[signal.SIGINT] * (step == 1)"), LOCAL_RANK=local_rank)
        assert result.returncode == 0
        told = "Ctrl-C: saving after the step in progress; a second Ctrl-C stops at once"
        assert result.stderr.count(told) == lines
        assert f"step 2 [{int(signal.SIGINT)}]" in result.stdout


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_ctrl_c_ends_the_process_at_once(second):
    """torchrun forwards the first one, and sends SIGTERM at the second."""
    result = python(LOOP.format(signals=f"(signal.SIGINT, signal.{second})"))
    assert result.returncode == -getattr(signal, second)
    assert result.stderr.count("\n") == 2  # the answer to the first one
    assert "step 0" in result.stdout
    assert "step 1" not in result.stdout


def test_a_second_ctrl_c_ends_a_process_that_waits_for_another():
    """In a collective, say: no signal handler of Python runs there, the kernel's own action does."""
    waiting = """
import ctypes, os, signal, threading
from common.ground import process
process.catch_signals()
os.kill(os.getpid(), signal.SIGINT)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
lock = ctypes.create_string_buffer(64)                  # a semaphore of value 0
ctypes.CDLL(None).sem_init(lock, 0, 0)
while True:
    ctypes.CDLL(None).sem_wait(lock)                    # outside of the interpreter
"""
    assert python(waiting).returncode == -signal.SIGINT


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_request_to_stop_waits_for_the_end_of_the_step(number):
    result = python(LOOP.format(signals=f"[signal.{number}] * (step == 1)"))
    assert result.returncode == 0
    assert f"step 2 [{int(getattr(signal, number))}]" in result.stdout


@pytest.mark.slow
def test_a_dead_reader_costs_nothing():
    """As of `| tee log`, which dies of the Ctrl-C that the run survives."""
    program = (
        LOOP.format(signals="[signal.SIGINT] * (step == 1)")
        .replace(
            'print("step"',
            'time.sleep(0.5 * step)\n        print("end" * 9999, file=sys.stderr)\n        print("step"',
        )
        .replace("import os,", "import os, sys,")
        + "\nos.mkdir(sys.argv[1])"
    )
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-c", program, f"{folder}/done"]
        run = subprocess.Popen(
            line,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=heed_interrupts,
        )
        run.stdout.close()
        assert run.wait(60) == 0
        assert Path(folder, "done").is_dir()


@pytest.mark.parametrize(
    "visible, refused", [(None, True), ("0,1", True), ("", False), ("-1", False)]
)
def test_gpus_that_torch_cannot_use_are_not_left_idle(monkeypatch, visible, refused):
    """A driver older than the CUDA that torch was built for: not available, but counted."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not refused:
        assert distributed.choose_device().type == "cpu"
        return
    with user_error(r"torch .*, built for CUDA .*GPUs: install a newer driver"):
        distributed.choose_device()


# -------------------------------------------------------------------------------- the launcher's death
LAUNCHER = """
import json, os, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
worker.wait()
"""
WORKER = """
import os, time
from common.ground import process
process.run_main(lambda: (print(os.getpid(), flush=True), time.sleep(20)))
"""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's"
)
@pytest.mark.parametrize(
    "environment, dies", [({"TORCHELASTIC_RUN_ID": "none"}, True), ({}, False)]
)
def test_a_worker_ends_when_its_torchrun_is_killed(environment, dies):
    """As torchrun starts it: in a session of its own. What no torchrun started may outlive its shell."""
    inherited = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    command = [sys.executable, "-c", LAUNCHER, WORKER]
    launcher = subprocess.Popen(
        command, cwd=ROOT, env=inherited | environment, text=True, stdout=subprocess.PIPE
    )
    worker = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    deadline = time.time() + (10 if dies else 0.5)
    while is_running(worker) and time.time() < deadline:
        time.sleep(0.02)
    alive = is_running(worker)
    if alive:
        os.kill(worker, signal.SIGKILL)
    launcher.stdout.close()
    assert alive == (not dies)
