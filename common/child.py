"""What runs in the process of a user's program: it loads the file, and answers requests of the trainer one by
one.

    serve            the life of the process
    load, find       the file's module, and what it calls by a name
    call, check_references
                     a function's result; what the function's check says of reference answers
    fork_object, make
                     a process for an object of a class; the object
    guard            the life of the guardian, which ends all these processes when the rank has ended

The process is forked from the trainer before the trainer touches a GPU or starts a thread: what both import
is in memory once, and the program may use the GPU.
"""

import ast
import copy
import ctypes
import importlib.util
import inspect
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from types import ModuleType
from typing import Any

from common import answers
from common.ground.files import UserError, show_anything
from common.ground.signals import CAUGHT

DEBUGGING = b"a debugger reads from the terminal"  # sent while a request is answered
CUDA_NOT_INITIALIZED = 3  # of <cuda.h>
MOST_TEXT = 2000  # characters of an error
TIME_TO_END = 1.0  # seconds for a process to end once it has closed its connection
NEEDS_SHARED = (
    "CUDA is initialised in the program's process, and the process of a sample cannot use it: say "
    "shared = True in the class (its objects then live in the program's process, one call after the "
    "other), or load the model in reset"
)

module: ModuleType  # the program
path = ""  # of its file, as the flag has it
tables: list[list[dict]] = []  # sent once, for many calls
objects: dict[int, Any] = {}  # of classes: in a process of its own, 0 is the only one
answering: Connection  # where the request has come from


def describe_error(error: BaseException) -> str:
    """What user code raised, and its lines that led there, the innermost first, each once; then the first of
    what a group holds."""
    try:
        text = str(error)
    except Exception as problem:  # of the user's own class
        text = f"<its str() raises {type(problem).__name__}>"
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = dict.fromkeys(
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in frames
        if not frame.filename.startswith(("<", os.path.dirname(__file__)))
    )
    where = f" ({' < '.join(lines)})" if lines else ""
    described = f"{type(error).__name__}: {text:.{MOST_TEXT}}{where}"
    if isinstance(error, BaseExceptionGroup):  # whose text names none of them
        described += f": {describe_error(error.exceptions[0])}"
    return described


# --------------------------------------------------------------------------------------------------
# The process
# --------------------------------------------------------------------------------------------------


def serve(connection: Connection, has_terminal: bool) -> None:
    """The life of a process that the trainer has forked. With ``has_terminal``, it tells the trainer that
    a debugger has begun, for which there is no limit of time."""
    global answering
    # What it spawns would import the trainer's script.
    sys.modules["__main__"] = ModuleType("__main__")
    # A signal that comes meanwhile waits: Python would forget it in the child.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT),
        after_in_child=forget_signals,
    )
    begin()
    show_anything()  # of a new interpreter
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(write_through=True)  # the end of this process comes unannounced
    if has_terminal:
        sys.addaudithook(tell_of_debugger)
    answering = connection
    while (request := receive()) is not None:
        answer(*request)
    os._exit(0)


def serve_alone(handle: int, has_terminal: bool) -> None:
    """The same in a new interpreter, whose connection has this number."""
    serve(Connection(handle), has_terminal)


def begin() -> None:
    """Make this process, which was just forked, the leader of what it will start. Ctrl-C, and what
    torchrun sends to the processes of a rank, are not for it."""
    for number in CAUGHT:
        signal.signal(number, ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
    os.setsid()


def ignore(_number: int, _frame: Any) -> None:
    """Signal handler: SLURM tells every process to end, and the step in progress may need this one. What
    the program executes has no handler of Python's, and ends as usual."""


def forget_signals() -> None:
    """In a process that the program has forked: SIGTERM ends it, as `multiprocessing.Pool` ends its
    workers."""
    for number in CAUGHT:
        if signal.getsignal(number) is ignore:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)


def tell_of_debugger(event: str, _arguments: tuple) -> None:
    if event in ("sys.settrace", "builtins.breakpoint"):
        answering.send_bytes(DEBUGGING)


def receive() -> tuple[str, tuple] | None:
    """The next request; None: the trainer has gone."""
    try:
        return pickle.loads(answering.recv_bytes())
    except (EOFError, OSError):
        return None


def answer(request: str, arguments: tuple) -> None:
    """Answer a request with its "result", or what was "refused" or "raised"."""
    if request == "fork_object":
        fork_object(*arguments)
        return
    process = os.getpid()
    try:
        content = answers.encode({"result": REQUESTS[request](*arguments)})
    except UserError as error:
        content = answers.encode({"refused": str(error)})
    except BaseException as error:  # also what would end Python, and time limits of func_timeout
        content = answers.encode({"raised": describe_error(error)})
    if os.getpid() != process:
        os._exit(0)  # the program has forked, and both have returned
    with suppress(OSError):  # the trainer has gone, or the program has closed the connection
        answering.send_bytes(content)


def uses_cuda() -> bool:
    """Whether this process has initialised CUDA, which then fails in what it forks: asked of the driver,
    as not only torch may have done it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):  # it is not loaded; no Linux
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_NOT_INITIALIZED


# --------------------------------------------------------------------------------------------------
# Functions
# --------------------------------------------------------------------------------------------------


def load(file: str, named: str) -> list[str]:
    """Import the program, which a flag has ``named`` so. Returns the files that a resumed run needs
    unchanged."""
    global module, path
    path = named
    try:
        module = run_program(Path(file))
    except BaseException as error:
        raise UserError(f"{path} raised {describe_error(error)}") from error
    return list(map(str, imported_files(Path(file))))


def find(name: str) -> Any:
    """What the program calls so. Raises UserError: nothing, and what it has."""
    if not hasattr(module, name):
        # not what it imports
        defined = [
            key
            for key, value in vars(module).items()
            if callable(value) and value.__module__ == module.__name__
        ]
        has = f"it has {', '.join(defined)}" if defined else "it defines no function or class"
        raise UserError(f"{path} has no {name!r}; {has}")
    return getattr(module, name)


def refuse_async(function: Any, name: str) -> None:
    """Raises UserError: the function is async, so calls of it would return before they have begun."""
    for called in (function, getattr(function, "__call__", None)):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            raise UserError(
                f"{name} is async, and nothing awaits it: use def, and asyncio.run inside"
            )


def of_function(name: str, takes: str, offered: tuple[str, ...]) -> tuple[list[str], bool]:
    """The names among those ``offered`` that a function has parameters for, and whether it has a check.
    Raises UserError: it cannot be called with what it ``takes``."""
    function = find(name)
    refuse_async(function, name)
    refuse_async(getattr(function, "check", None), f"{name}.check")
    try:
        signature = inspect.signature(function)
        keywords = [each for each in offered if each in signature.parameters]
        names = takes.split(", ")
        gets = signature.bind(*names, **dict.fromkeys(keywords)).arguments
        for each in names:  # they are passed by position
            if gets.get(each, each) != each:
                raise UserError(f"in this order, {each} would get {gets[each]}")
    except (TypeError, ValueError) as error:  # no function, or a builtin
        may_ask = f", and may ask for {', '.join(offered)}" if offered else ""
        hint = wrapper_of(function, name) if "responses" in takes else ""
        raise UserError(f"must take ({takes}){may_ask}: {error}{hint}") from error
    return keywords, hasattr(function, "check")


def wrapper_of(function: Any, name: str) -> str:
    """How to call a reward function that was written for TRL or verl, by its parameters; "" of any other."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""
    for system, parameter, body in (
        ("TRL", "completions", CALL_OF_TRL),
        ("verl", "solution_str", CALL_OF_VERL),
    ):
        if parameter in parameters:
            lines = "\n".join((f"def {name}_here(*samples, rows):", *body)).replace("NAME", name)
            return f"\nIt is written for {system}; in {path}, add and name\n{lines}"
    return ""


CALL_OF_TRL = (
    "    columns = {key: [row.get(key) for row in rows] for key in rows[0]}",
    "    return NAME(**columns | dict(prompts=samples[0], completions=samples[1]))",
)
CALL_OF_VERL = (
    "    _, responses, references, labels, _ = samples",
    "    return list(map(NAME, labels, responses, references, rows))",
)


def call(name: str, arguments: tuple, named: dict[str, Any]) -> Any:
    return getattr(module, name)(*arguments, **named)


def call_each(name: str, values: list) -> list:
    """The results of a function of one argument."""
    return list(map(getattr(module, name), values))


def keep_rows(rows: list[dict]) -> int:
    """Keep a table for `call_with`. Returns its number."""
    tables.append(rows)
    return len(tables) - 1


def call_with(name: str, table: int, arguments: tuple) -> Any:
    """Call a function with the rows of a table, which it may change, before the other arguments."""
    return getattr(module, name)([dict(row) for row in tables[table]], *arguments)


def check_references(
    name: str, references: list[str | None], offered: dict[str, list]
) -> list[str]:
    """What the check of a function says of each reference answer; "" if nothing."""
    return problems_of(getattr(module, name).check, references, offered)


def problems_of(
    check: Callable[..., None], references: list[str | None], offered: dict[str, list]
) -> list[str]:
    """What a check says of each reference answer; "" if nothing. It gets what is ``offered`` of a row by
    the names of its parameters."""
    asked = [name for name in offered if name in inspect.signature(check).parameters]
    problems = []
    for k, reference in enumerate(references):
        try:
            check(reference, **{name: copy.deepcopy(offered[name][k]) for name in asked})
            problems.append("")
        except ValueError as error:
            problems.append(str(error))
        except BaseException as error:
            what = (
                "no reference answer: None"
                if reference is None
                else f"the answer {reference!r:.80}"
            )
            problems.append(f"{what} raises {describe_error(error)}")
    return problems


# --------------------------------------------------------------------------------------------------
# Objects of classes
# --------------------------------------------------------------------------------------------------


def of_class(name: str) -> dict[str, Any]:
    """What a class says of its objects. Raises UserError: it cannot serve as an environment."""
    made = find(name)
    for method in ("reset", "step", "close"):
        function = getattr(made, method, None)
        if not callable(function) and method != "close":
            raise UserError(f"{name} has no method {method!r}; see launch/README.md")
        refuse_async(function, f"{name}.{method}")
    says = {"role": "user", "pictures": True, "cut_turns": False, "shared": False}
    return {key: getattr(made, key, default) for key, default in says.items()}


def fork_object(ended: list[int]) -> None:
    """Another process like this one, in which one object of a class will live: it answers what comes by the
    connection that follows the request, at first with its number. The ``ended`` ones are forgotten."""
    global answering
    handle = recv_handle(answering)
    for number in ended:
        with suppress(ChildProcessError):  # the program has waited for it
            os.waitpid(number, 0)
    if uses_cuda():
        Connection(handle).send_bytes(answers.encode({"refused": NEEDS_SHARED}))
        return
    if os.fork():
        os.close(handle)
        return
    begin()
    answering.close()
    answering = Connection(handle)
    answering.send_bytes(answers.encode({"result": os.getpid()}))


def make(number: int, name: str, row: dict, is_alone: bool) -> Any:
    """Make an object and reset it. One that ``is_alone`` in its process draws from noise of its own."""
    if is_alone:
        seed_noise(f"{row['seed']} {row['number']}")
    objects[number] = getattr(module, name)()
    return objects[number].reset(row)


def seed_noise(seed: str) -> None:
    """Forked processes would all draw the same, or what no later run repeats."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(random.getrandbits(32))


def step(number: int, text: str) -> Any:
    return objects[number].step(text)


def close(number: int) -> None:
    """Close an object, if it was made and can be."""
    function = getattr(objects.pop(number, None), "close", None)
    if callable(function):
        function()


REQUESTS: dict[str, Callable] = {
    function.__name__: function
    for function in (load, of_function, call, call_each, keep_rows, call_with, check_references)
    + (of_class, make, step, close)
}


# --------------------------------------------------------------------------------------------------
# Ends
# --------------------------------------------------------------------------------------------------


def end_of(number: int) -> str:
    """How a process that this one has started ended. It stays a zombie, so that its number is that of
    nothing else."""
    deadline = time.monotonic() + TIME_TO_END
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):  # the program has waited for it
        while time.monotonic() < deadline:
            ended = os.waitid(os.P_PID, number, how)
            if ended and ended.si_code == os.CLD_EXITED:
                return f"ended with code {ended.si_status}"
            if ended:
                return f"ended by {signal.Signals(ended.si_status).name}"
            time.sleep(0.01)
    return "closed its connection"


REQUESTS["end_of"] = end_of


def guard(pipe: int) -> None:
    """The life of the guardian: it reads the numbers of groups of processes, of each once when it begins
    and once when it has ended. When the rank ends, however it does, the pipe does, too."""
    begin()
    os.closerange(0, pipe)
    os.closerange(pipe + 1, 1 << 16)
    groups: set[int] = set()
    with open(pipe) as told:
        for line in told:
            groups ^= {int(line)}
    for number in groups:
        end_group(number)
    os._exit(0)


def end_group(number: int) -> None:
    """End a process and what it has started, but for what has left its group."""
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def run_program(file: Path) -> ModuleType:
    """Import a file of the user as the module of its name: so processes that it spawns can import it, too.
    It can import what lies beside it, after everything that is installed."""
    sys.path.append(str(file.parent))
    name = file.stem
    spec: Any = None if "." in name or name == "__main__" else importlib.util.find_spec(name)
    if spec is None or spec.origin != str(file):
        # No process that it spawns can import this; what Python says of that is what to do.
        name = f"{name} (another module is called so: rename {file})".replace(".", ":")
        spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def imported_files(program: Path) -> set[Path]:
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
    """The first words of what a file of Python imports, anywhere in it; of one that Python cannot read,
    nothing."""
    try:
        tree = ast.parse(file.read_bytes() if file.suffix == ".py" else "")
    except (SyntaxError, ValueError):  # also NUL bytes
        return
    for node in ast.walk(tree):
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
