"""Programs of the user, such as rewards and environments, which a flag names as ``path.py:name``.

load_object      the object that the flag names
load_function    a function, whose calls are guarded
guard            around every call: puts back what a program changes in the process
run_on_main      a call on rank 0, for all ranks
"""

import ast
import functools
import importlib.util
import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from common import distributed
from common.ground.process import UserError
from common.threads import describe_error

# What a program shares with all threads of the trainer: how it is read and put back.
SHARED: dict[str, tuple[Callable, Callable]] = {
    "sys.stdout": (lambda: sys.stdout, lambda stream: setattr(sys, "stdout", stream)),
    "sys.stderr": (lambda: sys.stderr, lambda stream: setattr(sys, "stderr", stream)),
    "the working folder": (os.getcwd, os.chdir),
    "torch's default type": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's float32 precision": (
        lambda: torch.backends.cuda.matmul.fp32_precision == "tf32",
        lambda is_low: torch.set_float32_matmul_precision("high" if is_low else "highest"),
    ),
    "torch's deterministic mode": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "the default time limit of sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
}
# What torchrun and CUDA have told this process, which it reads after the programs are loaded.
OF_START = (
    "CUDA_VISIBLE_DEVICES",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
OVERLAP = "is changed while another call runs"
lock = threading.Lock()
running: list[str] = []  # the programs that are being called
before: dict[str, Any] = {}  # the values of SHARED when no program was running
programs: set[Path] = set()  # all that were loaded


@functools.wraps(signal.signal)
def set_handler(number: int, handler: Any, in_main: Callable = signal.signal) -> Any:
    """`signal.signal`, which raises in a thread. A program may catch that and take the answer for wrong,
    as rewards around math-verify do."""
    if running and threading.current_thread() is not threading.main_thread():
        tell_of_signals(", ".join(sorted(set(running))))
    return in_main(number, handler)


@functools.cache
def tell_of_signals(program: str) -> None:
    """Print once that time limits of a program fail."""
    distributed.say_once(
        f"warning: {program}: signals, by which math-verify limits time, fail in calls, which run in "
        "threads: pass parsing_timeout=None and timeout_seconds=None to math-verify, or grade in a "
        "subprocess, as launch/reward_math.py does"
    )


signal.signal = set_handler


@contextmanager
def guard(program: str) -> Iterator[None]:
    """Around a call of a user's program: afterwards, what it changed of the process is as before.

    Raises UserError: calls overlap while one of them has changed what both share.
    """
    with lock:
        if running:
            refuse_overlap(program)
        else:
            before.update({name: read() for name, (read, _) in SHARED.items()})
        running.append(program)
    has_gradients = torch.is_grad_enabled()
    casts = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    if torch.cuda.is_initialized():  # in a new thread, "cuda" is the first GPU, for all ranks
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    try:
        yield
    finally:
        # each thread has its own; the trainer sets no default device
        torch.set_grad_enabled(has_gradients)
        torch.set_default_device(None)
        for kind, is_on in casts.items():
            torch.set_autocast_enabled(kind, is_on)
        with lock:
            running.remove(program)
            if running:
                refuse_overlap(program)
            else:
                for name, (_, write) in SHARED.items():
                    write(before[name])


def refuse_overlap(program: str) -> None:
    """Raises UserError: something of SHARED is not what it was before the calls that run now."""
    for name, (read, _) in SHARED.items():
        if read() != before[name]:
            raise UserError(
                f"{program}: {name} {OVERLAP} ({', '.join(sorted({program, *running}))}), and they share it; "
                "change it at the top of the file (as where a model is loaded) or in a subprocess, or run an "
                "environment with --env_workers 0"
            )


def guarded(program: str, function: Callable) -> Callable:
    """The function, with `guard` around each call."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with guard(program):
            return function(*args, **named)

    return call


def load_object(flag_name: str, spec: str, expected: str) -> Any:
    """The object that ``path.py:name`` names in a program of the user. Raises UserError: there is no
    such file, and what was ``expected``; or what the program raised; or it has no such name, or hides
    GPUs from the trainer."""
    path, _, name = spec.rpartition(":")
    file = Path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{flag_name} {spec}: expected {expected}")
    told = [*map(os.environ.get, OF_START)]
    try:
        with guard(spec):
            module = run_program(file)
    except UserError:
        raise
    except BaseException as error:
        raise UserError(f"{flag_name} {spec}: {path} raised {describe_error(error)}") from error
    changed = [name for name, value in zip(OF_START, told) if os.environ.get(name) != value]
    if changed:
        raise UserError(
            f"{flag_name} {spec}: {path} sets {', '.join(changed)}, by which the trainer finds its GPU and "
            "ranks: set it in a subprocess, or before the trainer starts"
        )
    if not hasattr(module, name):
        # not what it imports
        defined = [
            key
            for key, value in vars(module).items()
            if callable(value) and value.__module__ == module.__name__
        ]
        has = f"it has {', '.join(defined)}" if defined else "it defines no function or class"
        raise UserError(f"{flag_name} {spec}: {path} has no {name!r}; {has}")
    return getattr(module, name)


def refuse_async(flag_name: str, spec: str, function: Any) -> None:
    """Raises UserError: the function is async, so calls of it would return before they have begun."""
    for called in (function, getattr(function, "__call__", None)):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            raise UserError(
                f"{flag_name} {spec} is async, and nothing awaits it: use def, and asyncio.run inside"
            )


def load_function(
    flag_name: str,
    spec: str,
    takes: str,
    offered: Iterable[str] = (),
    expected: str = "an existing path.py:function",
) -> tuple[Callable, list[str]]:
    """The function that ``path.py:function`` names, which is called with what it ``takes``, and the
    names among those ``offered`` that it has parameters for. Its calls are guarded. Raises UserError:
    there is no such function, and what was ``expected``; or it has other parameters."""
    function = load_object(flag_name, spec, expected)
    refuse_async(flag_name, spec, function)
    try:
        signature = inspect.signature(function)
        keywords = [name for name in offered if name in signature.parameters]
        names = takes.split(", ")
        gets = signature.bind(*names, **dict.fromkeys(keywords)).arguments
        for name in names:  # they are passed by position
            if gets.get(name, name) != name:
                raise ValueError(f"in this order, {name} would get {gets[name]}")
    except (TypeError, ValueError) as error:  # no function, or a builtin
        may_ask = f", and may ask for {', '.join(offered)}" if offered else ""
        raise UserError(f"{flag_name} {spec}: must take ({takes}){may_ask}: {error}") from error
    return guarded(spec, function), keywords


def run_on_main(flag: str, function: Callable, *inputs: Any) -> Any:
    """Call a function that runs code of the user on rank 0 only, and return its result on every rank: it
    may depend on chance or on a clock. Raises UserError on every rank: what it raised."""
    returned = None
    with distributed.raise_on_all_ranks(f"{flag}: "):
        if distributed.is_main():
            try:
                returned = function(*inputs)
            except BaseException as error:
                raise UserError(describe_error(error)) from error
    return distributed.from_main(returned)


def run_program(file: Path) -> ModuleType:
    """Import a file of the user as the module of its name, once, however many flags name it: so processes
    that it spawns can import it, too. It can import what lies beside it, after everything that is
    installed. Raises UserError: what it imports lies beside another program."""
    programs.add(file)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name = file.stem
    spec: Any = None if "." in name or name == "__main__" else importlib.util.find_spec(name)
    if spec is None or spec.origin != str(file):
        # No process that it spawns can import this; what Python says of that is what to do.
        name = f"{name} (another module is called so: rename {file})".replace(".", ":")
        spec = importlib.util.spec_from_file_location(name, file)
    if name not in sys.modules:
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]  # it is incomplete
            raise
    refuse_taken_neighbours(file)
    return sys.modules[name]


def refuse_taken_neighbours(program: Path) -> None:
    """Raises UserError: a program, or what it has imported from its folder, imports something that lies
    there, now or in a call, and gets what lies beside another program: Python has only one module of a
    name."""
    folder = program.parent
    others = {file.parent for file in programs} - {folder}
    for name in {name for file in files_of(program) for name in imported_names(file)}:
        place = place_of(name)
        if place in others and PathFinder.find_spec(name, [str(folder)]):
            raise UserError(f"{name} is in {place} and in {folder}: rename one of them")


def files_of(program: Path) -> set[Path]:
    """The file of a program that was loaded, and those that it imports from its folder, one by another;
    of a package, those that were loaded."""
    files, waiting = set(), {program}
    while waiting:
        files |= waiting
        names = {name for file in waiting for name in imported_names(file)} - {"common"}
        beside = {name for name in names if place_of(name) == program.parent}
        modules = [sys.modules[key] for key in list(sys.modules) if key.split(".")[0] in beside]
        waiting = {Path(getattr(module, "__file__", None) or "") for module in modules}
        for name in beside:  # also what only a call imports
            spec = PathFinder.find_spec(name, [str(program.parent)])
            waiting.add(Path(spec and spec.origin or ""))
        waiting -= files | {Path()}
    return files


def imported_names(file: Path) -> Iterator[str]:
    """The first words of what a file of Python imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_bytes() if file.suffix == ".py" else "")):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def place_of(name: str) -> Path | None:
    """The folder where a module of one word, or the folder of a package, lies or would be found."""
    spec = getattr(sys.modules.get(name), "__spec__", None) or PathFinder.find_spec(name)
    if spec is None:
        return None
    return Path(next(iter(spec.submodule_search_locations or [spec.origin or ""]))).parent
