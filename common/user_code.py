"""Programs of the user's, such as rewards and environments, which a flag names as ``path.py:name``."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from common import distributed
from common.process import UserError
from common.threads import describe_error

FOLDERS: list[str] = []  # in which the programs lie
NEIGHBOURS: set[str] = set()  # modules that somebody has looked for, and that lie there


def load_object(flag_name: str, spec: str, expected: str) -> Any:
    """What a program of the user's calls by the name in ``path.py:name``. Raises UserError: says
    what is ``expected``, or what the program raised."""
    path, _, name = spec.rpartition(":")
    file = Path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{flag_name} {spec}: expected {expected}")
    try:
        return getattr(run_program(file), name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag_name} {spec}: {path} raised {describe_error(error)}") from error


def refuse_async(flag_name: str, spec: str, function: Any) -> None:
    """Raises UserError: calls of the function return before they have begun."""
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
    """The function of ``path.py:function``, which is called with what it ``takes``, and those names
    of ``offered`` that its parameters ask for. Raises UserError: says what is ``expected``, or which
    parameters."""
    function = load_object(flag_name, spec, expected)
    refuse_async(flag_name, spec, function)
    try:
        signature = inspect.signature(function)
        asks = [name for name in offered if name in signature.parameters]
        signature.bind(*takes.split(", "), **dict.fromkeys(asks))
    except (TypeError, ValueError) as error:  # no function, or a builtin
        may_ask = f", and may ask for {', '.join(offered)}" if offered else ""
        raise UserError(f"{flag_name} {spec}: must take ({takes}){may_ask}: {error}") from error
    return function, asks


def run_on_main(flag: str, function: Callable, *inputs: Any) -> Any:
    """What a function with code of the user's inside returns on rank 0, on every rank: it may draw by
    chance, or look at a clock. Raises UserError on every rank: what it raised."""
    returned = None
    with distributed.raise_on_all_ranks(f"{flag}: "):
        if distributed.is_main():
            try:
                returned = function(*inputs)
            except (Exception, SystemExit) as error:
                raise ValueError(describe_error(error)) from error
    return distributed.from_main(returned)


class Beside:
    """How Python finds what a program imports from beside it: after all that is installed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Raises ImportError: it lies beside two programs, which Python would take for one module."""
        specs = {folder: PathFinder.find_spec(name, [folder]) for folder in FOLDERS}
        folders = [folder for folder, spec in specs.items() if spec]
        if path is not None or not folders:  # a part of a package, which Python itself finds
            return None
        if len(folders) > 1:
            raise ImportError(f"{name} is in {' and in '.join(folders)}: rename one of them")
        NEIGHBOURS.add(name)
        return specs[folders[0]]


sys.meta_path.append(Beside)


def run_program(file: Path) -> ModuleType:
    """Run a file of the user's, which can import what lies beside it."""
    if str(file.parent) not in FOLDERS:
        FOLDERS.append(str(file.parent))
    for name in NEIGHBOURS & sys.modules.keys():
        Beside.find_spec(name)  # if this folder has one, too, the program would get the other
    # In sys.modules, a name of no installed module, nor of a file of this name in another folder; a
    # dot would stand between a package and its module.
    name = str(file).replace(".", ":")
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # it is incomplete
        raise
    return module
