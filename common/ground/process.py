"""How a process ends: by what its program raises, and by signals.

run_main         what a script's main raises becomes one message and an exit code
catch_signals    from now on, a signal ends the run after the step in progress
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.ground.files import as_message, say, show_anything
from common.threads import GIVEN_UP

EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
CAUGHT = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
# Signals that arrived; all ranks look at them together between two steps.
STOP_SIGNALS: list[int] = []


class UserError(ValueError):
    """A mistake of the user: rank 0 prints it once, without a traceback; all ranks exit with code
    2."""


class Exit(SystemExit):
    """An end that this program chose. Any other SystemExit comes from user code and is an error."""

    code: int


def die_with_torchrun() -> None:
    """On Linux, let the kernel end this worker when its torchrun ends, even by SIGKILL.

    SIGKILL and not SIGTERM, which would ask for a save after the step: a step may take minutes, and
    the save may wait for torchrun's store, which is gone. Committed checkpoints survive a kill at
    any moment. A process that torchrun did not start is left alone: it may outlive its shell.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def default_interrupt() -> None:
    """Let Ctrl-C end this process at once, without a traceback; where it is ignored, it stays
    ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def tell_now(message: str) -> None:
    """Print a line once for this machine, in the middle of whatever is printed."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(BrokenPipeError):  # of a `| tee log` that the same Ctrl-C has ended
            os.write(2, f"{message}\n".encode())  # a print could interrupt another print


def catch_signals() -> None:
    """From now on, the signals of `handle_signals` ask for a stop after the step in progress; a
    second Ctrl-C ends the process at once."""
    handle_signals(request_stop)


def leave(code: int) -> None:
    """End this process without an ordinary exit, which may wait for other ranks, and with it the processes
    that user code has started, which would keep its output open."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def end_now(_number: int, _frame: Any) -> None:
    """Signal handler, until `catch_signals`: end this process, which has nothing to save."""
    tell_now("stopped by a signal with nothing to save; the same command starts again")
    leave(EXIT_PREEMPTED)


def handle_signals(handler: Callable) -> None:
    """For SIGTERM (a cancelled job), SIGHUP (a closed terminal), SIGUSR1 (SLURM's warning) and
    Ctrl-C. What is ignored stays ignored, but for SIGUSR1, which launch/train.slurm hides from
    torchrun."""
    for number in CAUGHT:
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGUSR1:
            signal.signal(number, handler)


def request_stop(number: int, _frame: Any) -> None:
    """Signal handler: remember the signal for the end of the step."""
    STOP_SIGNALS.append(number)
    if number != signal.SIGINT:
        return
    # The kernel itself acts on the second Ctrl-C, which torchrun turns into SIGTERM: Python runs no
    # handler while the process waits inside a collective.
    default_interrupt()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tell_now(
        "\nCtrl-C: saving after the step in progress; a second Ctrl-C stops at once without saving"
    )


def forget_signals() -> None:
    """In a process that user code has forked: SIGTERM ends it, as `multiprocessing.Pool` ends its workers.
    The other signals of a stop are not for it: the step in progress may need it."""
    for number in CAUGHT:
        if signal.getsignal(number) in (end_now, request_stop):
            end = number == signal.SIGTERM
            signal.signal(number, signal.SIG_DFL if end else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)


# A signal that comes meanwhile waits: Python would forget it in the child.
os.register_at_fork(
    before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT),
    after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT),
    after_in_child=forget_signals,
)


class Output:
    """A stream whose reader may die, as `| tee log` does of the Ctrl-C that the run survives: what
    can no longer be written is dropped."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)

    def flush(self) -> None:
        """Nothing is left to be flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


OUT_OF_MEMORY = (
    "the GPU is out of memory: lower --max_tokens_per_pack or --slots, or pass "
    "--gradient_checkpointing on or --offload optimizer"
)
TIMED_OUT = (
    "a rank waited longer than --timeout for the others: raise --timeout if rewards, environments or "
    "files are that slow; else the output of the other ranks says what held them up"
)


def tell_torchrun(message: str) -> None:
    """Leave a message, without a traceback, for the summary that torchrun prints last."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {
            "message": as_message(message),
            "extraInfo": {"timestamp": str(int(time.time()))},
        }
        Path(path).write_text(json.dumps({"message": details}))


def run_main(program: Callable[[], Any]) -> None:
    """Run a script's main; what it raises becomes one message and an exit code, and is told to
    torchrun, whose summary comes last."""
    die_with_torchrun()
    show_anything()
    handle_signals(end_now)
    code = 0
    with redirect_stdout(Output(sys.stdout)), redirect_stderr(Output(sys.stderr)):
        try:
            program()
        except UserError as error:
            tell_torchrun(f"error: {error}")
            if (os.environ.get("RANK") or "0") == "0":  # all ranks raise it
                say(f"error: {error}", file=sys.stderr)
            code = EXIT_USER_ERROR
        except Exit as end:
            code = end.code
        except (Exception, SystemExit) as error:  # a SystemExit of user code is an error, too
            get_error_handler().record_exception(error)
            say(traceback.format_exc().rstrip(), file=sys.stderr)
            if isinstance(error, torch.OutOfMemoryError):
                say(OUT_OF_MEMORY, file=sys.stderr)
            elif isinstance(error, RuntimeError) and "timed out" in str(error).lower():
                say(TIMED_OUT, file=sys.stderr)
            leave(1)
    if dist.is_initialized() and not code:
        dist.destroy_process_group()
    # An ordinary exit would abort the process if one of the threads that were given up is inside
    # C++; and NCCL might wait in it for ranks that do not leave the group.
    if GIVEN_UP or (code == EXIT_USER_ERROR and dist.is_initialized()):
        leave(code)
    if code:
        raise Exit(code)
