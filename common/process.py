"""How a process of a run starts and ends: the launcher's death, signals, exit codes.

    UserError        a mistake of the user: one message, exit code 2
    run_main         runs a script's main and turns what it raises into messages and exit codes
    catch_signals    SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C ask for a stop after the step in progress

Exit codes: 0 done, 2 a user error, 75 stopped by a signal with everything saved, 1 anything else. A
process that a signal ended at once has the code of the signal.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Callable, TextIO

import torch.distributed as dist

from common.files import printable

EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

# Signals that arrived; all ranks look at them together between two steps.
STOP_SIGNALS: list[int] = []


class UserError(ValueError):
    """A mistake of the user: rank 0 prints it once, without a traceback; all ranks exit with code
    2."""


class Exit(SystemExit):
    """An end that this program chose. Any other SystemExit comes from user code and is an error."""


# -------------------------------------------------------------------------------------------------
# Start and signals
# -------------------------------------------------------------------------------------------------


def die_with_torchrun() -> None:
    """On Linux, let the kernel end this worker when its torchrun ends, even by SIGKILL.

    SIGKILL and not SIGTERM, which would ask for a save after the step: a step may take minutes, and
    the save may wait for torchrun's store, which is gone. Committed checkpoints survive a kill at
    any moment. A process that torchrun did not start is left alone: it may outlive its shell.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        problem = os.strerror(ctypes.get_errno())
        print(
            f"warning: prctl: {problem}; this worker would survive a SIGKILL of its torchrun",
            flush=True,
        )
    if os.getppid() != parent:  # torchrun died before the kernel knew: no signal will come
        os.kill(os.getpid(), signal.SIGKILL)


def default_interrupt() -> None:
    """Let Ctrl-C end this process at once, without a traceback; where it is ignored, it stays
    ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def catch_signals() -> None:
    """SIGTERM (a cancelled job), SIGHUP (a closed terminal), SIGUSR1 (SLURM's warning) and Ctrl-C
    ask for a stop after the step in progress; a second Ctrl-C ends the process at once."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGUSR1:
            signal.signal(number, request_stop)


def request_stop(number: int, _frame: Any) -> None:
    """Signal handler: remember the signal for the end of the step."""
    STOP_SIGNALS.append(number)
    if number != signal.SIGINT:
        return
    # The kernel itself acts on the second Ctrl-C, which torchrun turns into SIGTERM: Python runs no
    # handler while the process waits inside a collective.
    default_interrupt()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        message = (
            "Ctrl-C: saving after the step in progress; a second Ctrl-C stops at once without "
            "saving"
        )
        with suppress(BrokenPipeError):  # of a `| tee log` that the same Ctrl-C has ended
            os.write(2, f"\n{message}\n".encode())  # a print could interrupt another print


class Output:
    """A stream whose reader may die, as `| tee log` does of the Ctrl-C that the run survives: what
    can no longer be written is dropped."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        with self.without_reader():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self.without_reader():
            self.stream.flush()

    @contextmanager
    def without_reader(self):
        try:
            yield
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# -------------------------------------------------------------------------------------------------
# End
# -------------------------------------------------------------------------------------------------


def run_main(program: Callable[[], Any]) -> None:
    """Run a script's main; what it raises becomes one message and an exit code."""
    die_with_torchrun()
    default_interrupt()
    with redirect_stdout(Output(sys.stdout)), redirect_stderr(Output(sys.stderr)):
        try:
            program()
        except UserError as error:
            # torchrun ends the others as soon as one has exited
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # Lines after the first are indented: what a file or a server said must not pass for a
            # message of its own.
            message = "error: " + printable(str(error), keep="\n\t").replace("\n", "\n  ")
            if int(os.environ.get("RANK", 0)) == 0:
                print(message, file=sys.stderr, flush=True)
            tell_torchrun(message)
            leave_group()
            raise Exit(EXIT_USER_ERROR) from None
        except Exit:
            raise
        except (Exception, SystemExit):  # a SystemExit of user code, whatever its code, is an error
            traceback.print_exc()
            tell_torchrun(traceback.format_exc())
            os._exit(1)  # no destructor may wait for the other ranks
    leave_group()


def tell_torchrun(message: str) -> None:
    """Leave a message for the summary that torchrun prints last."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": details}))


def leave_group() -> None:
    """Leave the process group if this process has joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def describe(error: BaseException) -> str:
    """What user code raised, and its lines that led there, the innermost first."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in frames
        if not frame.filename.startswith(("<", os.path.dirname(__file__)))
    ]
    once = dict.fromkeys(lines)  # an error that is raised again at its own line has it twice
    where = f" ({' < '.join(once)})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"
