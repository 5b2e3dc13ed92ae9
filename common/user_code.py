"""Programs of the user, such as rewards and environments, which a flag names as ``path.py:name``."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from common import distributed
from common.process import UserError
from common.threads import describe_error


def load_object(flag_name: str, spec: str, expected: str) -> Any:
    """The object that ``path.py:name`` names in a program of the user. Raises UserError: there is no
    such file, and what was ``expected``; or what the program raised."""
    path, _, name = spec.rpartition(":")
    file = Path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{flag_name} {spec}: expected {expected}")
    try:
        return getattr(run_program(file), name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag_name} {spec}: {path} raised {describe_error(error)}") from error


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
    names among those ``offered`` that it has parameters for. Raises UserError: there is no such
    function, and what was ``expected``; or it has other parameters."""
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
    """Call a function that runs code of the user on rank 0 only, and return its result on every rank: it
    may depend on chance or on a clock. Raises UserError on every rank: what it raised."""
    returned = None
    with distributed.raise_on_all_ranks(f"{flag}: "):
        if distributed.is_main():
            try:
                returned = function(*inputs)
            except (Exception, SystemExit) as error:
                raise ValueError(describe_error(error)) from error
    return distributed.from_main(returned)


def run_program(file: Path) -> ModuleType:
    """Run a file of the user, which can import what lies beside it, after everything that is installed."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    # In sys.modules, a name that no installed module has, nor a file called the same in another folder.
    # A dot would mark it as a module of a package.
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
