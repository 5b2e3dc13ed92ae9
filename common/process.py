"""How a process ends: by what its program raises, and by signals.

run_main         what a script's main raises becomes one message and an exit code
catch_signals    from now on, a signal ends the run after the step in progress
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from common.files import as_message, say
from common.threads import GIVEN_UP

EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
PATIENCE = 20  # seconds that the ranks of a machine leave its first one to tell torchrun an error
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


def end_at_signals() -> None:
    """Let the signals of `handle_signals` end this process at once, with one line, until
    `catch_signals`: there is nothing to save.

    A thread does it. A handler would wait until the main thread is back in the interpreter, from a
    collective, or from waiting for the other machines.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)  # gets a byte whenever a signal comes that has a handler
    threading.Thread(target=end_when_told, args=[reader], daemon=True).start()
    handle_signals(lambda *_: None)


def end_when_told(reader: int) -> None:
    """In a thread: wait for a byte, and end the process."""
    os.read(reader, 1)
    tell_now("stopped by a signal with nothing to save; the same command starts again")
    os._exit(EXIT_PREEMPTED)


def tell_now(message: str) -> None:
    """Print a line once for this machine, in the middle of whatever is printed."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(BrokenPipeError):  # of a `| tee log` that the same Ctrl-C has ended
            os.write(2, f"{message}\n".encode())  # a print could interrupt another print


def catch_signals() -> None:
    """From now on, the signals of `handle_signals` ask for a stop after the step in progress; a
    second Ctrl-C ends the process at once."""
    signal.set_wakeup_fd(-1)
    handle_signals(request_stop)


def handle_signals(handler: Callable) -> None:
    """For SIGTERM (a cancelled job), SIGHUP (a closed terminal), SIGUSR1 (SLURM's warning) and
    Ctrl-C. What is ignored stays ignored, but for SIGUSR1, which launch/train.slurm hides from
    torchrun."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
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


def run_main(program: Callable[[], Any]) -> None:
    """Run a script's main; what it raises becomes one message and an exit code."""
    die_with_torchrun()
    end_at_signals()
    code = 0
    with redirect_stdout(Output(sys.stdout)), redirect_stderr(Output(sys.stderr)):
        try:
            program()
        except UserError as error:
            tell_once(f"error: {error}")
            code = EXIT_USER_ERROR
        except Exit as end:
            code = end.code
        except (Exception, SystemExit) as error:  # a SystemExit of user code is an error, too
            messages = [traceback.format_exc().rstrip()]
            if isinstance(error, torch.OutOfMemoryError):
                messages.append(OUT_OF_MEMORY)
            elif isinstance(error, RuntimeError) and "timed out" in str(error).lower():
                messages.append(TIMED_OUT)
            for message in messages:
                say(message, file=sys.stderr)
            tell_torchrun(messages[-1])
            os._exit(1)  # no destructor may wait for the other ranks
    told_alone = dist.is_initialized() and code == EXIT_USER_ERROR  # see `tell_once`
    if dist.is_initialized() and not told_alone:
        dist.destroy_process_group()
    # An ordinary exit would abort the process if one of the threads that were given up is inside
    # C++; and NCCL might wait in it for ranks that do not leave the group.
    if GIVEN_UP or told_alone:
        os._exit(code)
    if code:
        raise Exit(code)


def tell_once(message: str) -> None:
    """Print what all ranks would print: torchrun does so, last of all, unless it starts them again."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")  # so far; None without torchrun
    if restarts and os.environ["LOCAL_RANK"] != "0":
        # until torchrun ends this process, because the first one of this machine has told it why
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first one tells it, whichever ends first
    tell_torchrun(message)
    is_told = restarts and restarts == os.environ["TORCHELASTIC_MAX_RESTARTS"]
    if not is_told and os.environ.get("RANK", "0") == "0":
        say(message, file=sys.stderr)


def tell_torchrun(message: str) -> None:
    """Leave a message for the summary that torchrun prints last."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {
            "message": as_message(message),
            "extraInfo": {"timestamp": str(int(time.time()))},
        }
        Path(path).write_text(json.dumps({"message": details}))
