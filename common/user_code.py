"""Programs of the user's: rewards and environments, which a flag names as ``path.py:name``."""

import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from common.process import UserError
from common.threads import describe_error

FOLDERS: list[str] = []  # in which the programs lie
NEIGHBOURS: set[str] = set()  # modules that somebody has looked for, and that lie there


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
        problem = describe_error(error)
        raise UserError(f"{flag_name} {spec}: {path} raised {problem}") from error


def refuse_async(flag_name: str, spec: str, function: Any) -> None:
    """Raises UserError: calls of the function return before they have begun."""
    for called in (function, getattr(function, "__call__", None)):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            raise UserError(
                f"{flag_name} {spec} is async, and nothing awaits it: use def, and asyncio.run inside"
            )


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
