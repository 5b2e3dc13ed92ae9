"""How a process of a run starts and ends: the launcher's death, signals, exit codes.

Imports no torch: --help and refused flags need none.

    UserError        a mistake of the user: one message, exit code 2
    run_main         runs a script's main and turns what it raises into messages and exit codes
    catch_signals    SIGTERM, SIGUSR1 and Ctrl-C ask for a stop after the step in progress

Exit codes: 0 done, 2 a user error, 75 stopped by a signal with everything saved, 1 anything else. A
process that a signal ended at once has the code of the signal.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable

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
    """SIGTERM (a cancelled job), SIGUSR1 (SLURM's warning) and Ctrl-C ask for a stop after the step
    in progress; a second Ctrl-C ends the process at once."""
    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGUSR1, request_stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, request_stop)


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
        os.write(1, f"\n{message}\n".encode())  # a print could interrupt another print


# -------------------------------------------------------------------------------------------------
# End
# -------------------------------------------------------------------------------------------------


def run_main(program: Callable[[], Any]) -> None:
    """Run a script's main; what it raises becomes one message and an exit code."""
    die_with_torchrun()
    default_interrupt()
    try:
        program()
    except UserError as error:
        # torchrun ends the others as soon as one has exited
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if int(os.environ.get("RANK", 0)) == 0:
            # Lines after the first are indented: what a file or a server said must not pass for a
            # message of its own.
            message = printable(str(error), keep="\n\t").replace("\n", "\n  ")
            print(f"error: {message}", file=sys.stderr, flush=True)
        leave_group()
        let_rank_0_speak()
        raise Exit(EXIT_USER_ERROR) from None
    except Exit:
        raise
    except SystemExit as error:
        rank = os.environ.get("RANK", 0)
        print(
            f"error: rank {rank}: {describe(error)}: user code must not end the process",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_USER_ERROR)  # this rank alone: no destructor may wait for the others
    except RuntimeError as error:
        if not is_lost_contact(error):
            raise
        # The failed ranks have printed their own reasons; this one only lost contact with them. In
        # NCCL's message the reason is the last line.
        rank = os.environ.get("RANK", 0)
        reason = " ".join(str(error).partition("Exception raised from")[0].split())
        print(
            f"error: rank {rank} lost contact with another rank, which died or did not answer "
            f"within --timeout, or could not reach it: {reason}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # no destructor may wait for the lost rank
    leave_group()


def leave_group() -> None:
    """Leave the process group if this process has joined one."""
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_initialized():
        dist.destroy_process_group()


def is_lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed, rather than this rank itself."""
    dist = sys.modules.get("torch.distributed")
    of_torch = dist is not None and isinstance(error, dist.DistError)
    return of_torch or "gloo" in str(error)


def let_rank_0_speak() -> None:
    """Outlive rank 0 if it runs on this machine: torchrun ends all workers of a machine as soon as
    one has exited, and a slower rank 0 may not have printed the message yet. The signal that
    torchrun then sends ends the wait."""
    of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if not of_torchrun or os.environ["RANK"] == "0" or os.environ["GROUP_RANK"] != "0":
        return

    def leave(_number: int, _frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Exit(EXIT_USER_ERROR)

    signal.signal(signal.SIGTERM, leave)
    time.sleep(60)


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
