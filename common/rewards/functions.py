"""Reward functions: where they come from, and how they are called in threads.

load_source      the spec of a source: a rule, file.py:function, a server, a model
score_samples    calls side by side, with a time limit; what they return is checked
"""

import functools
import inspect
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import torch

from common.distributed import Call, UserError, Workers, describe
from common.flags import RewardArgs, load_object
from common.rewards.remote import RewardError, Server
from common.rewards.rules import RULES, rule_reward


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
    function = load_function("--reward", spec, TAKES)
    name = spec.rpartition(":")[2]
    return Source(
        spec, name, "function", function=function, takes_rows=takes_rows(function, TAKES)
    )


def load_function(flag_name: str, spec: str, takes: str) -> Callable:
    """The function of ``path.py:function``, which is called with what it ``takes``, and by keyword
    with ``rows`` if it has such a parameter. Raises UserError."""
    expected = (
        f"one of {', '.join(RULES)}, env, grm:FOLDER, rm:FOLDER, http://host:port/path, or an "
        "existing path.py:function"
    )
    function = load_object(flag_name, spec, expected)
    if not callable(function):
        raise UserError(f"{flag_name} {spec}: {spec.rpartition(':')[2]!r} is no function")
    try:
        by_name = {"rows": None} if takes_rows(function, takes) else {}
        inspect.signature(function).bind(*takes.split(", "), **by_name)
    except (TypeError, ValueError) as error:  # ValueError: a builtin
        raise UserError(f"{flag_name} {spec}: must take ({takes}): {error}") from error
    return function


def takes_rows(function: Callable, takes: str) -> bool:
    """Whether a function has a parameter ``rows`` beside those it ``takes`` by position."""
    signature = inspect.signature(function)
    try:
        signature.bind(*takes.split(", "), rows=None)
    except TypeError:
        return False
    return "rows" in signature.parameters


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
    workers = Workers(min(args.reward_workers, len(parts)))
    calls = [workers.submit(call_source, source, samples, part) for part in parts]
    wait(calls, args.reward_timeout, FIRST_EXCEPTION)
    workers.close()
    check_calls(source, samples, parts, calls, args.reward_timeout)
    names = calls[0].result().keys() if calls else ["reward"]
    columns = {name: [] for name in names}
    for part, call in zip(parts, calls):
        if call.result().keys() != names:
            problem = f"components {sorted(call.result())}, expected {sorted(names)}"
            raise failure(source, samples, part, RewardError(problem))
        for name, values in call.result().items():
            columns[name] += values
    if "reward" not in columns:
        columns["reward"] = [sum(values) for values in zip(*columns.values())]
    return columns


def check_calls(
    source: Source, samples: Samples, parts: list[range], calls: list[Call], limit: float
) -> None:
    """Raises RewardError: a call has raised, or was not done in time."""
    for part, call in zip(parts, calls):
        if call.done() and call.exception():
            raise failure(source, samples, part, call.exception()) from call.exception()
    for part, call in zip(parts, calls):
        if not call.done():
            late = TimeoutError(f"took longer than {limit:g} s (--reward_timeout)")
            raise failure(source, samples, part, late)


def call_source(source: Source, samples: Samples, part: range) -> dict[str, list[float]]:
    """What the function says of some samples. Raises what it raises, or RewardError: not lists of
    finite numbers."""
    *inputs, rows = (column[part.start : part.stop] for column in samples)
    result = source.function(*inputs, rows=rows) if source.takes_rows else source.function(*inputs)
    columns = result if isinstance(result, dict) else {"reward": result}
    if not columns:
        raise RewardError("no components, expected at least one")
    return {name: read_numbers(name, values, part) for name, values in columns.items()}


def read_numbers(name: str, values: Any, part: range) -> list[float]:
    """A list of n finite numbers, also of numpy or torch, as floats. Raises RewardError."""
    try:
        numbers = torch.as_tensor(values, dtype=torch.float64)
        problem = "" if numbers.shape == (len(part),) else f"got {values!r:.200}"
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        problem = f"got {values!r:.200} ({error})"
    if problem:
        raise RewardError(f"{name} must be a list of {len(part)} numbers, {problem}")
    bad = (~numbers.isfinite()).nonzero()
    if len(bad):
        i = int(bad[0])
        raise RewardError(f"{name} is {float(numbers[i])}, not a finite number", sample=part[i])
    return numbers.tolist()


def failure(source: Source, samples: Samples, part: range, error: BaseException) -> RewardError:
    """What went wrong with a part of the samples, with the text of the first that is known."""
    i, problem = part.start, f"{len(part)} samples raised {describe(error)}"
    if isinstance(error, RewardError):
        i, problem = error.sample or i, str(error)
    names = ("prompt", "response", "reference", "label")
    texts = [f"\n  {name}: {str(column[i])[-500:]!r}" for name, column in zip(names, samples)]
    return RewardError(
        f"--reward {source.spec}: {problem}; sample {i} of {len(samples.responses)} (the last 500"
        f" characters of each):{''.join(texts)}"
    )
