"""How a process ends: by what its program raises, and by signals.

run_main         what a script's main raises becomes a message or a traceback, and an exit code
keep_errors      from now on, tracebacks are also written to <out>/errors
watch_signals    from now on, a signal ends this process even while it waits for other ranks
end_with_others  from now on, a bug on another rank ends this process
catch_signals    from now on, a signal ends the run after the step in progress
"""

import atexit
import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.ground.files import UserError, as_message, say, show_anything, write_durably
from common.ground.signals import CAUGHT

EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on
LAST_SECONDS = 5.0  # of a rank after the bug of another one, which it may meet, too
EXIT_SECONDS = 30.0  # of what is registered with atexit, after an error
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
# The folder of tracebacks, once the run has one.
ERRORS: list[Path] = []
# The script's main has returned or raised.
DONE = threading.Event()
# Signals that arrived; all ranks look at them together between two steps.
STOP_SIGNALS: list[int] = []
GIVEN_UP: list[Future] = []  # what is ours, in threads that may still be running


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
    pipe = signal.set_wakeup_fd(-1)
    if pipe != -1:
        os.close(pipe)  # which ends the thread of `watch_signals`


def watch_signals() -> None:
    """From now on, until `catch_signals`, a signal ends this process at once even while its main thread
    waits for other ranks. Python runs no handler there, inside C++, but a thread reads which signals came.
    Only under `run_main`: a thread may not exist before the user's programs are forked."""
    if signal.getsignal(signal.SIGUSR1) is not end_now:
        return
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs)
    threading.Thread(target=end_at_signal, args=(ours,), daemon=True).start()
    handle_signals(lambda *_: None)  # or both threads would act


def end_at_signal(pipe: int) -> None:
    """In a thread: see `watch_signals`."""
    while numbers := os.read(pipe, 1):
        if numbers[0] in CAUGHT:
            end_now(numbers[0], None)
    os.close(pipe)


def leave(code: int) -> None:
    """End this process without an ordinary exit, which may wait for other ranks. What is registered with
    atexit has EXIT_SECONDS, such as W&B for its last records; the guardian ends the programs of the user
    (`common.user_code`)."""
    limit = threading.Timer(EXIT_SECONDS, os._exit, [code])
    limit.daemon = True
    limit.start()
    atexit._run_exitfuncs()
    os._exit(code)


def end_now(_number: int, _frame: Any) -> None:
    """Signal handler, until `catch_signals`: end this process, which has nothing to save."""
    tell_now("stopped by a signal with nothing to save; the same command starts again")
    os._exit(EXIT_PREEMPTED)


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


OUT_OF_MEMORY = (
    "the GPU is out of memory: lower --max_tokens_per_pack or --slots, or pass "
    "--gradient_checkpointing on or --offload optimizer"
)
# gloo's words, and NCCL's
LOST_CONNECTION = re.compile(
    r"(?s)gloo/transport.*(Connection (?:closed|reset) by peer|Broken pipe)|(remote process exited)"
)
TIMED_OUT = (
    "a rank waited longer than --timeout for the others: raise --timeout if rewards, environments or "
    "files are that slow; else the output of the other ranks says what held them up"
)


def keep_errors(out: Path) -> None:
    """From now on, tracebacks are also written to <out>/errors/rank-N.txt."""
    ERRORS[:] = [out / "errors"]


def this_rank() -> str:
    return os.environ.get("RANK") or "0"


def counter() -> str:
    """The name in the store of torch of how many ranks have met a bug since torchrun has (re)started them."""
    return f"bugs-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def is_first() -> bool:
    """Whether no other rank has met a bug before: the first one shows it, as what the others meet is
    mostly the same, or follows from it."""
    if not dist.is_initialized():
        return True
    try:
        return _get_default_store().add(counter(), 1) == 1
    except RuntimeError:  # rank 0, which kept the store, has ended
        return False


def end_with_others() -> None:
    """From now on, end this process soon after another rank has met a bug. By itself it would notice at
    the next collective, and on a GPU not even there. Only where torchrun keeps the store, as torch
    complains at length when that of rank 0 is gone."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        threading.Thread(target=watch_others, args=(_get_default_store(),), daemon=True).start()


def watch_others(store: dist.Store) -> None:
    """In a thread: see `end_with_others`."""
    while not store.check([counter()]):
        if DONE.wait(1):
            return
    if not DONE.wait(LAST_SECONDS):
        tell_later(f"rank {this_rank()} ends after another one")
        leave(EXIT_BUG)


def lost_connection(error: BaseException) -> str:
    """How the connection to another rank has broken, if that is what the error says: that rank was
    killed, say. "" otherwise."""
    match = LOST_CONNECTION.search(str(error))
    return match[match.lastindex or 0] if match else ""


def tell_later(line: str) -> None:
    """Say that this rank ends because of another one; torchrun must not call it the root cause."""
    tell_torchrun(line, later=1)
    say(line, file=sys.stderr)


def tell_torchrun(message: str, later: int = 0) -> None:
    """Leave a message, without a traceback, for the summary that torchrun prints last. It calls the
    earliest one the root cause; this one came so many seconds ``later``."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {
            "message": as_message(message),
            "extraInfo": {"timestamp": str(int(time.time()) + later)},
        }
        Path(path).write_text(json.dumps({"message": details}))


def write_traceback(error: BaseException) -> Path | None:
    """Write a traceback to <out>/errors/rank-N.txt, if the run has its folder; the file."""
    if not ERRORS:
        return None
    path = ERRORS[0] / f"rank-{this_rank()}.txt"
    text = "".join(traceback.format_exception(error))
    try:
        write_durably(path, as_message(f"{time.ctime()}\n{text}"))
    except OSError as problem:  # the disk may be full, which may be the error itself
        say(f"warning: no traceback in {path}: {problem}", file=sys.stderr)
        return None
    return path


def write_memory_snapshot(path: Path) -> None:
    """Write the blocks of the GPU's memory, for the viewer of torch. Nothing here reads the file, as a pickle
    may run code."""
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as problem:
        say(f"warning: no snapshot of the memory in {path}: {problem}", file=sys.stderr)
        return
    say(
        f"{path} has the blocks of its memory, which https://pytorch.org/memory_viz shows; with "
        "--profile_steps, also which lines allocated them",
        file=sys.stderr,
    )


def report_input(error: UserError) -> None:
    """Say what a user can mend: once, not by all ranks. What lies behind it, such as a library's error,
    is in the file of tracebacks."""
    tell_torchrun(f"error: {error}")
    is_told = dist.is_initialized() or "TORCHELASTIC_ERROR_FILE" in os.environ
    if this_rank() == "0":
        say(f"error: {error}", file=sys.stderr)
    elif not is_told:  # rank 0 may not have met it
        say(f"error: rank {this_rank()}: {error}", file=sys.stderr)
    cause = error.__cause__
    while isinstance(cause, UserError | OSError):
        cause = cause.__cause__
    if cause is not None:
        write_traceback(error)


def report_bug(error: BaseException) -> None:
    """Show the traceback of an error, or one line if another rank has met one before, or is lost."""
    path, first, lost = write_traceback(error), is_first(), lost_connection(error)
    if lost or not first:
        line, *_ = f"{type(error).__name__}: {error}".splitlines()
        how = f", which it has lost ({lost})" if lost else f": {line:.300}"
        where = f"; its traceback is in {path}" if path else ""
        tell_later(f"rank {this_rank()} ends after another one{how}{where}")
        return
    get_error_handler().record_exception(error)
    say("".join(traceback.format_exception(error)).rstrip(), file=sys.stderr)
    if isinstance(error, torch.OutOfMemoryError):
        say(OUT_OF_MEMORY, file=sys.stderr)
        if path and torch.cuda.is_initialized():
            write_memory_snapshot(path.with_name(f"memory-rank-{this_rank()}.pickle"))
    elif isinstance(error, RuntimeError) and "timed out" in str(error).lower():
        say(TIMED_OUT, file=sys.stderr)


def run_main(program: Callable[[], Any]) -> None:
    """Run a script's main. A UserError becomes one message and exit code 2; any other exception keeps its
    traceback, and ends this process at once, with 1. Torchrun, whose summary comes last, is told."""
    die_with_torchrun()
    show_anything()
    handle_signals(end_now)
    code = 0
    try:
        program()
    except UserError as error:
        report_input(error)
        code = EXIT_USER_ERROR
    except Exit as end:
        code = end.code
    except (Exception, SystemExit) as error:  # a SystemExit of user code is an error, too
        report_bug(error)
        leave(EXIT_BUG)
    DONE.set()
    if dist.is_initialized() and not code:
        dist.destroy_process_group()
    # An ordinary exit would abort the process if one of the threads that were given up is inside
    # C++; and NCCL might wait in it for ranks that do not leave the group.
    if GIVEN_UP or (code == EXIT_USER_ERROR and dist.is_initialized()):
        leave(code)
    if code:
        raise Exit(code)
