"""Programs of the user's: rewards and environments, which a flag names as ``path.py:name``."""

import builtins
import functools
import importlib.util
import inspect
import sys
import threading
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from common.process import UserError
from common.threads import describe

# modules that a user's program gets by these names, whatever lies beside it
KEPT_NAMES = sys.stdlib_module_names | {"common"}
IMPORTING = threading.RLock()  # rewards and environments run in threads, and may import there


def load_object(flag_name: str, spec: str, expected: str) -> Any:
    """What a program of the user's calls by the name in ``path.py:name``. Raises UserError: says
    what is ``expected``, or what the program raised."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"{flag_name} {spec}: expected {expected}")
    file = Path(path).resolve()
    try:
        return getattr(run_program(file), name)
    except (Exception, SystemExit) as error:
        problem = describe(error)
        raise UserError(f"{flag_name} {spec}: {path} raised {problem}") from error


def refuse_async(flag_name: str, spec: str, function: Any) -> None:
    """Raises UserError: calls of the function return before they have begun."""
    for called in (function, getattr(function, "__call__", None)):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            problem = "is async, and nothing awaits it: use def, and asyncio.run inside"
            raise UserError(f"{flag_name} {spec}: {called.__name__} {problem}")


class Program(SourceFileLoader):
    """Runs a file of the user's, or one of a package beside it, whose imports are first looked for in
    the folder of the user's file."""

    def exec_module(self, module: ModuleType) -> None:
        file = Path(self.name.partition(".")[0].replace(":", "."))  # see `module_name`
        importing = functools.partial(import_beside, file.parents[file.name == "__init__.py"])
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": importing}
        if Path(self.path).is_file():  # a package may have no __init__.py
            super().exec_module(module)


class Inside:
    """How Python finds the modules of a package that is a `Program`: they are programs, too."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name.startswith("/") else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Program(name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Inside)


def run_program(file: Path) -> ModuleType:
    """Run a file of the user's: see `Program`."""
    name = module_name(file)
    spec: Any = importlib.util.spec_from_loader(name, Program(name, str(file)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there, and so do files that import each other
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # it is incomplete
        raise
    return module


def module_name(file: Path) -> str:
    """In sys.modules: of no installed module, nor of a file of this name in another folder."""
    return str(file).replace(".", ":")  # a dot would stand between a package and its module


def import_beside(folder, name, globals=None, locals=None, fromlist=(), level=0) -> ModuleType:
    """`import` in a user's file: what lies in its ``folder`` comes before what is installed, but not
    before Python's own modules and ours. (On sys.path the folder would come before those for everybody
    who imports, and the first of two folders for both.)"""
    first = name.partition(".")[0]
    file = find_beside(folder, first) if level == 0 and first not in KEPT_NAMES else None
    is_itself = str(file) == (globals or {}).get("__file__")  # named after the package it uses
    if file and not is_itself:
        with IMPORTING:
            if module_name(file) not in sys.modules:
                run_program(file)
        name = module_name(file) + name.removeprefix(first)
    return builtins.__import__(name, globals, locals, fromlist, level)


def find_beside(folder: Path, first: str) -> Path | None:
    """The file of a module or package in a folder, if there is one. A package without __init__.py comes
    after what is installed, as in Python: a folder may well be called datasets."""
    package = folder / first / "__init__.py"
    for file in (package, folder / f"{first}.py"):
        if file.is_file():
            return file
    is_bare = package.parent.is_dir() and importlib.util.find_spec(first) is None
    return package if is_bare else None
