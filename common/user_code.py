"""Programs of the user, such as rewards and environments, which a flag names as ``path.py:name``.

Each file runs in a process of its own, beside every rank; `common/child.py` is what runs there. A request is
the name of a function of that file with its arguments, an answer is plain data or a text.

    load_function    a function of a program, to call it
    load_class       a class of a program, to make objects of it
    in_thread        a call of a function of ours, beside other work

A program dies alone, with a message. When a rank ends, in whatever way, its guardian ends the programs.
"""

import atexit
import itertools
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any
from weakref import WeakSet

from common import answers, child
from common.ground.files import UserError, say
from common.ground.signals import CAUGHT

programs: dict[Path, "Program"] = {}  # all that were loaded
remotes: "WeakSet[Remote]" = WeakSet()  # their processes, and those of objects


class RaisedError(UserError):
    """What a user's code raised, and where."""


class LateError(UserError):
    """A call took too long: its process is ended."""


# --------------------------------------------------------------------------------------------------
# Processes
# --------------------------------------------------------------------------------------------------


class Guardian:
    """A process that ends those of user code when this one has ended, even by SIGKILL: see `child.guard`."""

    def __init__(self):
        self.owner = os.getpid()
        theirs, self.pipe = os.pipe()
        fork(lambda: child.guard(theirs))
        os.close(theirs)
        atexit.register(end_processes, self.owner)

    def tell(self, number: int) -> None:
        """A group of processes has begun, or has ended."""
        with suppress(BrokenPipeError):  # someone has ended the guardian
            os.write(self.pipe, f"{number}\n".encode())


# the last one is that of this process, or of the one that has forked it
guardians: list[Guardian] = []


def guardian() -> Guardian:
    """That of this process."""
    if not guardians or guardians[-1].owner != os.getpid():
        guardians.append(Guardian())
    return guardians[-1]


def fork(life: Callable[[], None]) -> int:
    """A process like this one with a ``life`` of its own. Returns its number. There, signals wait until
    `child.begin`."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both processes would write what waits
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
    number = os.fork()
    if number:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return number
    try:
        life()
    except BaseException:
        say(traceback.format_exc(), file=sys.stderr)
    os._exit(1)


def end_processes(owner: int) -> None:
    """End all that belong to the process ``owner``, if this is it."""
    if os.getpid() == owner:
        for remote in list(remotes):
            remote.end()


class Remote:
    """A process of the user's code, which answers one request after another."""

    def __init__(self, connection: Connection, number: int):
        self.connection, self.number = connection, number
        self.lock, self.lock_of_end = threading.Lock(), threading.Lock()
        self.ended = ""  # how
        self.is_debugged = False  # at a terminal
        guardian().tell(number)
        remotes.add(self)

    def ask(self, *request: Any, limit: float | None = None) -> Any:
        """What the process answers. Raises UserError: it refuses, or has ended; RaisedError: its code
        has raised; LateError: it took longer than ``limit`` seconds."""
        content = pickle.dumps((request[0], request[1:]))
        with self.lock:
            self.refuse_if_ended()
            try:
                self.connection.send_bytes(content)
                content = self.receive(limit)
            except (EOFError, OSError) as error:
                self.note_end()
                raise UserError(f"its process {self.ended}") from error
        answer = answers.decode(content)
        if "refused" in answer:
            raise UserError(answer["refused"])
        if "raised" in answer:
            raise RaisedError(answer["raised"])
        return answer["result"]

    def receive(self, limit: float | None) -> bytes:
        while self.connection.poll(limit):
            content = self.connection.recv_bytes()
            if content != child.DEBUGGING:
                return content
            self.is_debugged, limit = True, None
        self.end(f"was ended, as a call took longer than {limit:g} s")
        raise LateError(f"took longer than {limit:g} s")

    def refuse_if_ended(self) -> None:
        """Raises UserError: how."""
        if self.ended:
            raise UserError(f"its process {self.ended}")

    def note_end(self) -> None:
        """The process has ended by itself: remember how, and end what it has started."""
        if not self.ended:
            self.end(self.find_end())

    def find_end(self) -> str:
        return child.end_of(self.number)

    def end(self, how: str = "was ended") -> None:
        """End the process, and what it has started."""
        with self.lock_of_end:
            if not self.ended:
                self.ended = how
                child.end_group(self.number)
                self.reap()
                guardian().tell(self.number)

    def reap(self) -> None:
        os.waitpid(self.number, 0)


class Program(Remote):
    """The process that has loaded a file."""

    files: set[Path]  # which a resumed run needs unchanged

    def __init__(self):
        ours, theirs = Pipe()
        has_terminal = os.environ.get("WORLD_SIZE") in (None, "", "1") and os.isatty(0)
        pipe = guardian().pipe

        def life() -> None:
            # What is the trainer's, or another program's, would outlive it here.
            os.close(pipe)
            ours.close()
            for remote in remotes:
                remote.connection.close()
            atexit.unregister(end_processes)
            os.environ.update(own_gpu())
            child.serve(theirs, has_terminal)

        if child.uses_cuda():
            say(
                "CUDA is initialised here, so a program of yours starts in a new interpreter, slowly"
            )
            number = start_interpreter(theirs, has_terminal)
        else:
            number = fork(life)
        theirs.close()
        super().__init__(ours, number)
        self.forgotten: list[int] = []  # processes of objects that have ended

    def fork(self) -> "Object":
        """A process like this one, for one object. Raises UserError: there can be none."""
        ours, theirs = Pipe()
        with self.lock:
            self.refuse_if_ended()
            forgotten, self.forgotten = self.forgotten, []
            try:
                self.connection.send_bytes(pickle.dumps(("fork_object", (forgotten,))))
                send_handle(self.connection, theirs.fileno(), self.number)
                theirs.close()
                answer = answers.decode(ours.recv_bytes())
            except (EOFError, OSError) as error:
                self.note_end()
                raise UserError(f"its process {self.ended}") from error
        if "refused" in answer:
            raise UserError(answer["refused"])
        return Object(ours, answer["result"], self)


class Object(Remote):
    """The process of an object, forked by that of its program."""

    def __init__(self, connection: Connection, number: int, program: Program):
        super().__init__(connection, number)
        self.program = program

    def find_end(self) -> str:
        try:
            return self.program.ask("end_of", self.number)
        except UserError:
            return "ended with that of its program"

    def reap(self) -> None:
        self.program.forgotten.append(self.number)
        self.connection.close()


def start_interpreter(connection: Connection, has_terminal: bool) -> int:
    """A process that answers by the connection, though this one cannot be forked. Returns its number."""
    os.set_inheritable(connection.fileno(), True)
    run = f"child.serve_alone({connection.fileno()}, {has_terminal})"
    code = f"import sys; sys.path[:] = {sys.path!r}; from common import child; {run}"
    variables = {**os.environ, **own_gpu()}
    return os.posix_spawn(
        sys.executable, [sys.executable, "-c", code], variables, setsigmask=CAUGHT
    )


def own_gpu() -> dict[str, str]:
    """Variables with which a process sees this rank's GPU alone, as the first one."""
    local = int(os.environ.get("LOCAL_RANK") or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = visible.split(",") if visible is not None else [*map(str, range(local + 1))]
    return {"CUDA_VISIBLE_DEVICES": "".join(listed[local : local + 1]), "LOCAL_RANK": "0"}


# --------------------------------------------------------------------------------------------------
# Functions and classes
# --------------------------------------------------------------------------------------------------


class Function:
    """A function of a program. A call that raised is made once more."""

    def __init__(self, spec: str, program: Program, name: str):
        self.spec, self.program, self.name = spec, program, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.ask("call", self.name, arguments, named)

    def each(self, values: list) -> list:
        """Its results for these values, by one request."""
        return self.ask("call_each", self.name, values)

    def check(self, references: list[str | None], offered: dict[str, list]) -> list[str]:
        """What its check says of each reference answer, None of a row without one; "" if nothing."""
        return self.program.ask("check_references", self.name, references, offered)

    def ask(self, *request: Any) -> Any:
        try:
            return self.program.ask(*request)
        except RaisedError as error:
            say(f"warning: {self.spec} raised {error}; it is called once more")
            return self.program.ask(*request)


def with_table(function: Callable, rows: list[dict]) -> Callable:
    """The function with these rows before its other arguments. It may change what it gets. A program gets
    them once, at the first call."""
    numbers: list[int] = []

    def call(*arguments: Any) -> Any:
        if not isinstance(function, Function):
            return function([dict(row) for row in rows], *arguments)
        if not numbers:
            numbers.append(function.program.ask("keep_rows", rows))
        return function.ask("call_with", function.name, numbers[0], arguments)

    return call


class Class:
    """A class of a program: an object of it is a process of its own, or one of several in the program's if
    the class says ``shared = True``."""

    def __init__(self, program: Program, name: str, says: dict[str, Any]):
        self.program, self.name, self.says = program, name, says
        self.numbers = itertools.count(1)

    def make(self) -> "UserObject":
        """Raises UserError: there can be none."""
        if self.says["shared"]:
            return UserObject(self, self.program, next(self.numbers))
        return UserObject(self, self.program.fork(), 0)


class UserObject:
    """An object of a class of the user, once `reset` has made it."""

    def __init__(self, of: Class, process: Remote, number: int):
        self.of, self.process, self.number = of, process, number

    def reset(self, row: dict, limit: float) -> Any:
        request = "make", self.number, self.of.name, row, not self.number
        return self.process.ask(*request, limit=limit)

    def step(self, text: str, limit: float) -> Any:
        return self.process.ask("step", self.number, text, limit=limit)

    def close(self, limit: float) -> None:
        """Close it, unless its process has ended, and end that."""
        try:
            if not self.process.ended:
                self.process.ask("close", self.number, limit=limit)
        finally:
            if isinstance(self.process, Object):
                self.process.end()


def load_program(flag_name: str, spec: str, expected: str) -> tuple[Program, str]:
    """The process of the file that ``path.py:name`` names, one however many flags name it, and the name.
    Raises UserError: there is no such file, and what was ``expected``; or what the program raised."""
    path, _, name = spec.rpartition(":")
    file = Path(path).resolve()
    if file.suffix == ".py" and not file.exists():
        raise UserError(f"{flag_name} {spec}: the file {file} is missing")
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{flag_name} {spec}: expected {expected}")
    if file not in programs:
        program = programs[file] = Program()
        try:
            program.files = set(
                map(Path, ask_for(flag_name, spec, program, "load", str(file), path))
            )
        except UserError:
            programs.pop(file).end()
            raise
    return programs[file], name


def ask_for(flag_name: str, spec: str, program: Program, *request: Any) -> Any:
    """What a program answers at the start. Raises UserError, which names the flag."""
    try:
        return program.ask(*request)
    except UserError as error:
        raise UserError(f"{flag_name} {spec}: {error}") from error


def load_function(
    flag_name: str,
    spec: str,
    takes: str,
    offered: Iterable[str] = (),
    expected: str = "an existing path.py:function",
) -> tuple[Function, list[str], bool]:
    """The function that ``path.py:function`` names, which is called with what it ``takes``; the names
    among those ``offered`` that it has parameters for; and whether it has a check. Raises UserError: there
    is no such function, and what was ``expected``; or it has other parameters."""
    program, name = load_program(flag_name, spec, expected)
    request = "of_function", name, takes, tuple(offered)
    keywords, has_check = ask_for(flag_name, spec, program, *request)
    return Function(spec, program, name), keywords, has_check


def load_class(flag_name: str, spec: str) -> Class:
    """The class that ``path.py:Class`` names. Raises UserError: there is none, or it cannot serve as an
    environment."""
    program, name = load_program(flag_name, spec, "an existing path.py:Class")
    return Class(program, name, ask_for(flag_name, spec, program, "of_class", name))


def files_of(file: Path) -> set[Path]:
    """The file; of a program that was loaded, also those that it imports from its folder."""
    return programs[file].files if file in programs else {file}


def in_thread(function: Callable, *arguments: Any) -> Future:
    """Call a function of ours beside other work. The end of the process waits for no such thread."""
    call: Future = Future()

    def run() -> None:
        try:
            call.set_result(function(*arguments))
        except BaseException as error:  # raised by whoever waits
            call.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return call
