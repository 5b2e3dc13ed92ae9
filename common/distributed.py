"""Processes and ranks: how a process ends, threads with deadlines, joining the process group,
gathering, failing and stopping together.

    run_main                       what a script's main raises becomes one message and an exit code
    catch_signals                  from now on, a signal ends the run after the step in progress
    Workers                        a user's programs side by side in threads, each with a time limit
    start                          join the process group -> Ranks: where this process stands in it
    to_device                      a tensor goes to the GPU while the host goes on
    gather_objects                 what every rank has, on every rank
    raise_on_all_ranks             one message from rank 0, raised on all ranks
    stop_requested                 a signal to one rank stops all of them after the step in progress

CPU tensors travel over gloo, GPU tensors over NCCL. Every rank calls, with whatever it has.
"""

import ctypes
import json
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Iterable, TextIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.files import as_message, say

EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

# Signals that arrived; all ranks look at them together between two steps.
STOP_SIGNALS: list[int] = []
GIVEN_UP: list["Call"] = []  # calls whose threads may be running still


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
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(BrokenPipeError):
            os.write(2, b"stopped by a signal with nothing to save; the same command starts again\n")
    os._exit(EXIT_PREEMPTED)


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
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# -------------------------------------------------------------------------------------------------
# End
# -------------------------------------------------------------------------------------------------


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
            # torchrun ends the others as soon as one has exited
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            message = f"error: {error}"
            if int(os.environ.get("RANK", 0)) == 0:
                say(message, file=sys.stderr)
            tell_torchrun(message)
            code = EXIT_USER_ERROR
        except Exit as end:
            code = end.code
        except (Exception, SystemExit) as error:  # a SystemExit of user code is an error, too
            message = traceback.format_exc().rstrip()
            say(message, file=sys.stderr)
            advice = ""
            if isinstance(error, torch.OutOfMemoryError):
                advice = OUT_OF_MEMORY
            elif isinstance(error, RuntimeError) and "timed out" in str(error).lower():
                advice = TIMED_OUT
            if advice:
                message = advice
                say(advice, file=sys.stderr)
            tell_torchrun(message)
            os._exit(1)  # no destructor may wait for the other ranks
    leave_group()
    if GIVEN_UP:
        # An ordinary exit would abort the process if one of their threads is inside C++.
        os._exit(code)
    if code:
        raise Exit(code)


def tell_torchrun(message: str) -> None:
    """Leave a message for the summary that torchrun prints last."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"message": as_message(message), "extraInfo": {"timestamp": str(int(time.time()))}}
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
    where = f" ({' < '.join(lines)})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


class LateError(TimeoutError):
    """A call was given up, and may be running still."""


class Call(Future):
    """A call in a thread: its result, or what it raised."""

    seconds: float = 0.0  # that it took


@dataclass
class Workers:
    """Threads that run calls in the order of submission.

    A call that outlasts ``limit`` seconds ends with a LateError that names the flag ``limit_name``.
    Its thread goes on for itself, what it returns is ignored, and another takes its place.
    """

    threads: int
    limit: float = math.inf
    limit_name: str = ""

    def __post_init__(self):
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        self.running: dict[Call, float] = {}  # when they began; who takes one out says how it ended
        for _ in range(self.threads):
            self.add_thread()

    def submit(self, function: Callable, *args: Any) -> Call:
        call = Call()
        self.waiting.put((call, function, args))
        return call

    def add_thread(self) -> None:
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        """In a thread: run calls until `close`."""
        while (submitted := self.waiting.get()) is not None:
            call, function, args = submitted
            self.running[call] = time.monotonic()
            result = error = None
            try:
                result = function(*args)
            except BaseException as problem:  # who waits raises it; a SystemExit would vanish here
                error = problem
            if not self.take(call):
                return  # it was given up, and another thread has taken this one's place
            call.set_exception(error) if error else call.set_result(result)

    def take(self, call: Call) -> bool:
        """Take a call out of the running ones; False: it is not among them any more."""
        began = self.running.pop(call, None)
        if began is not None:
            call.seconds = time.monotonic() - began
        return began is not None

    def give_up_late(self) -> None:
        """End the calls that have outlasted the limit."""
        for call, began in list(self.running.items()):
            if time.monotonic() - began > self.limit and self.take(call):
                problem = f"took longer than {self.limit:g} s ({self.limit_name})"
                call.set_exception(LateError(problem))
                GIVEN_UP.append(call)
                self.add_thread()

    def wait_for_any(self, calls: Iterable[Call]) -> None:
        """Until one of the calls has ended. Late ones are given up, whoever submitted them: they
        would keep their threads from the calls that wait here."""
        while not wait(calls, 0.1, FIRST_COMPLETED).done:
            self.give_up_late()

    def close(self) -> None:
        """Let the threads end once they are done."""
        for _ in range(self.threads):
            self.waiting.put(None)


ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among all of them."""

    world: int
    device: torch.device
    mesh: DeviceMesh


def start(timeout: float, hsdp: int) -> Ranks:
    """Join the process group; without torchrun this process is the only rank.

    Args:
        timeout: longest wait of a rank for the others, seconds.
        hsdp: ranks that share one copy of weights and optimizer; 0: all of them.
    Raises:
        UserError: more processes on this machine than GPUs, or ranks that hsdp does not divide.
    """
    for name, value in ONE_PROCESS.items():
        os.environ.setdefault(name, value)
    world = int(os.environ["WORLD_SIZE"])
    device = choose_device()
    shape, names = (world,), ("shards",)
    if hsdp:
        if world % hsdp:
            raise UserError(f"--hsdp {hsdp} must divide the number of ranks, {world}")
        shape, names = (world // hsdp, hsdp), ("copies", "shards")
    if not dist.is_initialized():
        gpu = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            timeout=timedelta(seconds=timeout),
            # NCCL connects now. Not with two dimensions: torch would then make their groups by
            # splitting the communicators of both back-ends, which not every version can.
            device_id=device if gpu and not hsdp else None,
        )
    return Ranks(world, device, init_device_mesh(device.type, shape, mesh_dim_names=names))


def choose_device() -> torch.device:
    """This process's GPU, or the CPU of a machine without GPUs. Raises UserError: torch cannot use
    the GPUs, or there are too few."""
    if not torch.cuda.is_available():
        refuse_idle_gpus()
        # busy ranks on the same cores slow each other tenfold
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        return torch.device("cpu")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if processes > gpus:
        raise UserError(
            f"{processes} processes were started on this machine, but torch sees {gpus} GPUs: use "
            f"--nproc_per_node {gpus}, or set CUDA_VISIBLE_DEVICES= (empty) to run on CPUs"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on ``device``. The host does not wait for a GPU, which fetches pinned memory by
    itself; of other memory it would wait for what has more than 64 KiB."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def refuse_idle_gpus() -> None:
    """Raises UserError: the machine has GPUs that torch cannot use, and nobody has hidden them."""
    present = torch.cuda.device_count() > 0 or Path("/dev/nvidia0").exists()
    if not present or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    raise UserError(
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use this machine's "
        "GPUs: install a newer driver, or a build of torch for an older CUDA, as pytorch.org lists "
        "them; CUDA_VISIBLE_DEVICES= (empty) runs on CPUs"
    )


def warm_up(ranks: Ranks, size: int) -> None:
    """Run every collective of FSDP2 once on ``size`` bytes, in each group of ranks.

    NCCL connects and allocates its buffers at the first call of each kind. Left to the first
    update, that would be beside a cache that torch has filled.
    """
    for group in ranks.mesh.get_all_groups():
        members = dist.get_world_size(group)
        count = -(-size // 4 // members)
        shard = torch.zeros(count, device=ranks.device)
        whole = torch.zeros(count * members, device=ranks.device)
        dist.all_gather_into_tensor(whole, shard, group=group)
        dist.reduce_scatter_tensor(shard, whole, group=group)
        dist.all_reduce(shard, group=group)


def world_size() -> int:
    """The number of ranks; 1 before the process group is joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is rank 0, which prints and writes what all ranks know."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_objects(value: Any) -> list:
    """Gather one value from every rank: numbers, text, tensors on the CPU."""
    if world_size() == 1:
        return [value]
    gathered = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def from_main(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    return gather_objects(value)[0]


@contextmanager
def raise_on_all_ranks(prefix: str = ""):
    """A ValueError or OSError inside, on any rank, becomes a UserError on every rank, with
    ``prefix`` before its message: one rank raising alone would leave the others waiting."""
    problem = None
    try:
        yield
    except (OSError, ValueError) as error:
        problem = f"{prefix}{error}"
    problems = dict.fromkeys(gather_objects(problem))
    problems.pop(None, None)
    if problems:
        raise UserError("\n".join(problems))


def check_same_flags(flags: dict) -> None:
    """Raises UserError on every rank if two ranks were started with different flags, as by hand on
    several nodes."""
    first, *others = gather_objects(flags)
    for other in others:
        for name, value in first.items():
            if value != other[name]:
                raise UserError(
                    f"the ranks were started with different flags: --{name} {value!r} and "
                    f"{other[name]!r}"
                )


def stop_requested() -> bool:
    """Whether any rank was asked to stop: the same answer on all of them."""
    return any(gather_objects(bool(STOP_SIGNALS)))
