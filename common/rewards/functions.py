"""Reward functions: where they come from, and how they are called in threads.

load_source      the spec of a source: a rule, file.py:function, a server, a model
begin_scoring    calls side by side
end_scoring      ... what they return in time, checked
"""

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from common.buffers import fill_packs
from common.ppo_flags import RewardArgs
from common.process import UserError
from common.rewards import regions
from common.rewards.remote import Server
from common.rewards.rules import RULES, Columns, rule_reward
from common.threads import RAISED, Workers, describe_error
from common.user_code import load_function

# Columns (n,) of n samples, "reward" and its components, and what a judge says of each, if anything.
Scored = tuple[dict[str, Tensor], list[str]]
# Of each sample: where a span ends, in characters, and what it earns.
Spans = list[list[tuple[int, float]]]
CALLED = ("rule", "function", "remote")  # kinds of sources: functions of texts


def no_reward(prompts, responses, references, labels, images) -> list[float]:
    return [0.0] * len(responses)


@dataclass
class Source:
    """One source of rewards: a function of texts, called by the rank of the sample, or a model that
    all ranks ask together."""

    spec: str  # as given: boxed, file.py:function, grm:FOLDER, rm:FOLDER, http://...
    name: str  # in metrics and records
    kind: str  # rule, env, function, remote, grm or rm
    folder: str = ""  # of a model
    function: Callable = no_reward  # of a kind in CALLED
    batch: int = 0  # most samples per call of the function, if a prompt has no more; 0: any number
    asks: list[str] = field(default_factory=list)  # what it gets by keyword: names of OFFERED
    ask: Callable | None = None  # of a model; `models.build` sets it


def load_source(spec: str, args: RewardArgs = RewardArgs()) -> Source:
    """A source by its spec. Raises UserError.

    A function `f(prompts, responses, references, labels, images)` gets lists of equal length, in
    which the samples of a prompt stand together, and returns a list of floats or a dict of such
    lists: its "reward" is the reward, or else the sum of all; the others are logged as components.
    "spans" holds a list of (end, reward) for each sample: what the text up to that character earns
    besides, at the token that ends there. `images` holds absolute paths, in the order of their places
    in the prompt (of a clip a tuple); the policy sees them as `read_image` gives them. Parameters of
    the names in `OFFERED` get what these say. All are copies.
    """
    kind, _, rest = spec.partition(":")
    if spec in RULES:
        return Source(spec, spec, "rule", function=functools.partial(rule_reward, spec))
    if spec in regions.RULES:
        rule = functools.partial(regions.region_reward, spec)
        return Source(spec, spec, "rule", function=rule, asks=["regions"])
    if spec == "none":
        return Source(spec, spec, "function", function=no_reward)
    if spec == "env":
        return Source(spec, "env", "env")
    if kind in ("grm", "rm") and rest:
        return Source(spec, kind, kind, folder=rest)
    if kind in ("http", "https"):
        server = Server(spec, args)
        return Source(
            spec,
            "remote",
            "remote",
            function=server,
            batch=args.remote_batch,
            asks=["groups", "places"],
        )
    function, asks = load_function(
        "--reward",
        spec,
        "prompts, responses, references, labels, images",
        OFFERED,
        f"one of {', '.join((*RULES, *regions.RULES))}, env, grm:FOLDER, rm:FOLDER, "
        "http://host:port/path, or an existing path.py:function",
    )
    return Source(spec, spec.rpartition(":")[2], "function", function=function, asks=asks)


class Samples(NamedTuple):
    """What a reward function gets of n samples, those of a prompt side by side; after the images by the
    names of its parameters only."""

    prompts: list[str]
    responses: list[str]
    references: list[str | None]
    labels: list[str | None]
    images: list[list]
    rows: list[dict]  # all columns, as in the file, and the conversation if there is one
    lengths: list[int]  # response tokens, a sampled end included
    truncated: list[bool]
    groups: list[int]  # the same number for all samples of a prompt
    places: list[list]  # `coordinates.Place` of each image of the prompt, None of a clip
    regions: list  # `coordinates.Regions` of the row, or None
    step: int  # steps of the run that are done


OFFERED = Samples._fields[5:]


class Scoring(NamedTuple):
    """Calls of a source in threads, each about a part of n samples."""

    source: Source
    parts: list[Samples]
    calls: list[Future]


def begin_scoring(source: Source, samples: Samples, workers: Workers) -> Scoring:
    """Let the workers score n samples, at least one, by calls of at most `source.batch` samples each. A
    call holds all samples of its prompts, of one prompt even if they are more."""
    parts = split(samples, workers.threads, source.batch)
    return Scoring(source, parts, [workers.submit(call_source, source, part) for part in parts])


def end_scoring(scoring: Scoring, timeout: float) -> tuple[Columns, Spans]:
    """n rewards under "reward", n values of each component, and n lists of spans if the function gives
    them: then their sums are the component "spans".

    Raises:
        UserError: the function raises, its calls have not ended after ``timeout`` seconds
            (--reward_timeout), or one returns other than finite numbers.
    """
    source, parts, calls = scoring
    ended, late = wait(calls, timeout, FIRST_EXCEPTION)
    columns, spans = {}, []
    for call in sorted(ended, key=calls.index):
        numbers, ends = call.result()  # or raises what the call has raised
        spans += ends
        for name, values in numbers.items():
            columns.setdefault(name, []).extend(values)
    if late:
        part = parts[min(map(calls.index, late))]
        raise failure(source, part, f"took longer than {timeout:g} s (--reward_timeout)")
    count = sum(len(part.responses) for part in parts)
    if any(len(values) != count for values in columns.values()):
        raise failure(source, parts[0], f"not all calls return the components {sorted(columns)}")
    earning = ["reward", "spans"] if "reward" in columns else list(columns)
    earned = [columns[name] for name in earning if name in columns]
    columns["reward"] = [sum(values) for values in zip(*earned)]
    return columns, spans


def split(samples: Samples, workers: int, most: int) -> list[Samples]:
    """Parts of whole prompts for the workers, of at most ``most`` samples (0: any number) if no prompt
    has more."""
    *columns, step = samples
    sizes = list(Counter(samples.groups).values())  # of each prompt, in order
    count = sum(sizes)
    parts = fill_packs(sizes, sizes, min(-(-count // workers), most or count))
    bounds = itertools.pairwise([0, *itertools.accumulate(map(sum, parts))])
    return [
        Samples._make([*(column[start:end] for column in columns), step]) for start, end in bounds
    ]


def call_source(source: Source, samples: Samples) -> tuple[Columns, Spans]:
    """Columns of finite numbers, as the function returns them, also of numpy or torch, and its spans.
    Raises UserError."""
    inputs = [list(column) for column in samples[:5]]  # the function may empty its lists
    by_name = {name: copy.copy(getattr(samples, name)) for name in source.asks}
    try:
        result = source.function(*inputs, **by_name)
    except UserError as error:  # of a server
        raise failure(source, samples, str(error)) from error
    except RAISED as error:
        raise failure(source, samples, f"it raised {describe_error(error)}") from error
    columns = dict(result) if isinstance(result, dict) else {"reward": result}
    if not columns:
        raise failure(source, samples, "no components, expected at least one")
    count, floats, spans = len(samples.responses), {}, []
    if "spans" in columns:
        spans = read_spans(source, samples, columns["spans"])
        columns["spans"] = [sum(earned for _, earned in ends) for ends in spans]
    for name, values in columns.items():
        try:
            numbers = torch.as_tensor(values, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            numbers = torch.empty(())
        if numbers.shape != (count,):
            problem = f"{name} must be a list of {count} numbers, got {values!r:.200}"
            raise failure(source, samples, problem)
        finite = numbers.isfinite()
        if not finite.all():
            i = int(finite.int().argmin())
            raise failure(source, samples, f"{name} is {numbers[i]:g}, not a finite number", i)
        floats[name] = numbers.tolist()
    return floats, spans


def read_spans(source: Source, samples: Samples, spans: Iterable) -> Spans:
    """The spans as a function returns them. Raises UserError."""
    try:
        return [
            # `index` refuses an end that is not in the text
            [(range(1, len(text) + 1).index(end) + 1, float(earned)) for end, earned in ends]
            for text, ends in zip(samples.responses, spans, strict=True)
        ]
    except (TypeError, ValueError) as error:
        problem = f"spans must be lists of (end, reward), with ends in the response: {error}"
        raise failure(source, samples, problem) from error


def failure(source: Source, samples: Samples, problem: str, i: int = 0) -> UserError:
    """An error of a source, with the texts of sample ``i``."""
    names = ("prompt", "response", "reference", "label")
    texts = [f"\n  {name}: {str(column[i])[-500:]!r}" for name, column in zip(names, samples[:4])]
    return UserError(
        f"--reward {source.spec}: {problem}; a sample (the last 500 characters of each):"
        + "".join(texts)
    )
