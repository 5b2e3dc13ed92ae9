"""Reward functions: where they come from, and how they are called in threads.

load_source      the spec of a source: a rule, file.py:function, a server, a model
score_samples    calls side by side, with a time limit; what they return is checked
"""

import functools
import importlib.util
import inspect
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, NamedTuple

from common.process import UserError, describe
from common.remote import RewardError, Server
from common.rules import RULES, rule_reward
from common.settings import RewardArgs


@dataclass
class Source:
    """One source of rewards: a function of texts, called by the rank of the sample, or a model that
    all ranks ask together."""

    spec: str  # as given: boxed, file.py:function, grm:FOLDER, rm:FOLDER, http://...
    name: str  # in metrics and records
    kind: str  # rule, env, function, remote, grm or rm
    folder: str = ""  # of a model
    function: Callable | None = None
    batch: int = 0  # most samples per call of the function; 0: any number
    takes_rows: bool = False  # the function has a parameter ``rows``
    ask: Callable | None = None  # of a model, see `reward_models`; the script sets it


TAKES = "prompts, responses, references, labels, images"


def load_source(spec: str, args: RewardArgs = RewardArgs()) -> Source:
    """A source by its spec. Raises UserError.

    A function `f(prompts, responses, references, labels, images)` gets lists of equal length and
    returns a list of floats or a dict of such lists: its "reward" is the reward, or else the sum of
    all; the others are logged as components. A parameter `rows`, if there is one, gets the rows of
    the samples: dicts of all columns, as in the file.
    """
    kind, _, rest = spec.partition(":")
    if spec in RULES:
        return Source(spec, spec, "rule", function=functools.partial(rule_reward, spec))
    if spec == "env":
        return Source(spec, "env", "env")
    if kind in ("grm", "rm") and rest:
        return Source(spec, kind, kind, folder=rest)
    if kind in ("http", "https"):
        server = Server(spec, args)
        return Source(spec, "remote", "remote", function=server, batch=args.remote_batch)
    function = load_function("--reward", spec, TAKES, may_take="rows")
    takes_rows = accepts(function, TAKES.split(", "), "rows")
    name = spec.rpartition(":")[2]
    return Source(spec, name, "function", function=function, takes_rows=takes_rows)


def load_function(flag_name: str, spec: str, takes: str, may_take: str = "") -> Callable:
    """The function of ``path.py:function``, which is called with what it ``takes`` and, by keyword,
    with what it ``may_take`` if it has a parameter of that name. Raises UserError."""
    rules = ", ".join(RULES)
    expected = (
        f"one of {rules}, env, grm:FOLDER, rm:FOLDER, http://host:port/path, or an existing "
        "path.py:function"
    )
    function = load_object(flag_name, spec, expected)
    if not callable(function):
        raise UserError(f"{flag_name} {spec}: {spec.rpartition(':')[2]!r} is no function")
    given = takes.split(", ")
    try:
        by_name = {may_take: None} if may_take and accepts(function, given, may_take) else {}
        inspect.signature(function).bind(*given, **by_name)
    except (TypeError, ValueError) as error:  # ValueError: a builtin
        more = f"; it may take {may_take} besides" if may_take else ""
        raise UserError(f"{flag_name} {spec}: must take ({takes}): {error}{more}") from error
    return function


def load_object(flag_name: str, spec: str, expected: str) -> Any:
    """What a program of the user's calls by the name in ``path.py:name``. Raises UserError: says
    what is ``expected``, or what the program raised."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"{flag_name} {spec}: expected {expected}")
    module_spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        problem = describe(error, __file__)
        raise UserError(f"{flag_name} {spec}: {path} raised {problem}") from error
    if not hasattr(module, name):
        raise UserError(f"{flag_name} {spec}: {path} has no function {name!r}")
    return getattr(module, name)


def accepts(function: Callable, given: list[str], name: str) -> bool:
    """Whether a function that gets the positional arguments ``given`` has a parameter ``name``
    besides."""
    signature = inspect.signature(function)
    try:
        signature.bind(*given, **{name: None})
    except TypeError:
        return False
    return name in signature.parameters


class Samples(NamedTuple):
    """What a reward function gets of n samples."""

    prompts: list[str]
    responses: list[str]
    references: list[str | None]
    labels: list[str | None]
    images: list[list]
    rows: list[dict]


def score_samples(source: Source, samples: Samples, args: RewardArgs) -> dict[str, list[float]]:
    """Score n samples by --reward_workers calls side by side, of at most `source.batch` samples
    each: n rewards under "reward", and n values of each component.

    Raises:
        RewardError: the function raises, all of it is later than --reward_timeout, or a call
            returns other than finite numbers.
    """
    count = len(samples.responses)
    size = min(-(-count // args.reward_workers), source.batch or count) or 1
    parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
    results = call_side_by_side(source, samples, parts, args)
    columns: dict[str, list[float]] = {}
    for part in parts:
        result = results[part]
        if not isinstance(result, BaseException) and columns and result.keys() != columns.keys():
            result = RewardError(f"components {sorted(result)}, expected {sorted(columns)}")
        if isinstance(result, BaseException):
            raise failure(source, samples, part, result) from result
        for name, values in result.items():
            columns.setdefault(name, []).extend(values)
    if "reward" not in columns:
        columns["reward"] = [sum(values) for values in zip(*columns.values())]
    return columns


def call_side_by_side(
    source: Source, samples: Samples, parts: list[range], args: RewardArgs
) -> dict[range, Any]:
    """What the function says of each part, or what it raises; a TimeoutError of parts that are
    not done after --reward_timeout."""
    results: dict[range, Any] = {}

    def work(own: list[range]) -> None:
        for part in own:
            try:
                results[part] = call(source, samples, part)
            except BaseException as error:  # the caller raises it; a SystemExit would vanish here
                results[part] = error
                return

    # Daemon threads, not a ThreadPoolExecutor, which would wait at exit for a function that hangs.
    threads = []
    for k in range(min(args.reward_workers, len(parts))):
        own = parts[k :: args.reward_workers]
        threads.append(threading.Thread(target=work, args=(own,), daemon=True))
    deadline = time.monotonic() + args.reward_timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = TimeoutError(f"took longer than {args.reward_timeout:g} s (--reward_timeout)")
    return {part: results.get(part, late) for part in parts}


def call(source: Source, samples: Samples, part: range) -> dict[str, list[float]]:
    """What the function says of some samples. Raises what it raises, or RewardError: not lists of
    finite numbers."""
    *given, rows = (column[part.start : part.stop] for column in samples)
    result = source.function(*given, rows=rows) if source.takes_rows else source.function(*given)
    if not isinstance(result, dict):
        result = {"reward": result}
    if not result:
        raise RewardError("no components, expected at least one")
    return {name: read_numbers(name, values, part) for name, values in result.items()}


def read_numbers(name: str, values: Any, part: range) -> list[float]:
    """A list of n finite numbers, also of numpy or torch, as floats. Raises RewardError."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != len(part):
        raise RewardError(f"{name} must be a list of {len(part)} numbers, got {values!r:.200}")
    numbers = []
    for i, value in zip(part, values):
        value = value.tolist() if hasattr(value, "tolist") else value
        # NaN is not at most anything.
        if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise RewardError(f"{name} is {value!r}, not a finite number", sample=i)
        numbers.append(float(value))
    return numbers


def failure(source: Source, samples: Samples, part: range, error: BaseException) -> RewardError:
    """What went wrong with a part of the samples, with the text of the first that is known."""
    i, problem = part.start, f"{len(part)} samples raised {describe(error, __file__)}"
    if isinstance(error, RewardError):
        i, problem = error.sample or i, str(error)
    names = ("prompt", "response", "reference", "label")
    shown = [f"\n  {name}: {str(column[i])[-500:]!r}" for name, column in zip(names, samples)]
    return RewardError(
        f"--reward {source.spec}: {problem}; sample {i} of {len(samples.responses)} (the last 500"
        f" characters of each):{''.join(shown)}"
    )
