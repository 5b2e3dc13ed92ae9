"""Reward functions: where they come from, and what they return.

load_source      the spec of a source: a rule, file.py:function, a server, a model
call_source      what it returns of samples, checked
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from common.ppo_flags import RewardArgs
from common.process import UserError
from common.rewards import regions
from common.rewards.remote import Server
from common.rewards.rules import RULES, Columns, check_reference, rule_reward
from common.threads import RAISED, describe_error
from common.user_code import guarded, load_function

# Columns (n,) of n samples, "reward" and its components, and what a judge says of each, if anything.
Scored = tuple[dict[str, Tensor], list[str]]
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
    asks: list[str] = field(default_factory=list)  # what it gets by keyword: names of OFFERED
    ask: Callable | None = None  # of a model; `models.build` sets it
    # Raises ValueError: nothing can match a reference answer. None: any may be right.
    check: Callable[[str], None] | None = None


def load_source(spec: str, args: RewardArgs = RewardArgs()) -> Source:
    """A source by its spec. Raises UserError.

    A function `f(prompts, responses, references, labels, images)` gets lists of equal length, in
    which the samples of a prompt stand together, and returns a list of floats or a dict of such
    lists: its "reward" is the reward, or else the sum of all; the others are logged as components.
    `images` holds absolute paths, in the order of their places
    in the prompt (of a clip a tuple); the policy sees them as `read_image` gives them. Parameters of
    the names in `OFFERED` get what these say. All are copies. An attribute `check` of the function is
    called with every reference answer before the first step, and raises ValueError for a bad one.
    """
    kind, _, rest = spec.partition(":")
    if spec in RULES:
        rule = functools.partial(rule_reward, spec)
        return Source(
            spec, spec, "rule", function=rule, check=functools.partial(check_reference, spec)
        )
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
    name, check = spec.rpartition(":")[2], getattr(function, "check", None)
    if check is not None:
        check = guarded(spec, check)
    return Source(spec, name, "function", function=function, asks=asks, check=check)


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


def call_source(source: Source, samples: Samples) -> Columns:
    """Columns of finite numbers, as the function returns them, also of numpy or torch; the reward among
    them. Raises UserError."""
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
    count, floats = len(samples.responses), {}
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
    return {"reward": [sum(values) for values in zip(*floats.values())]} | floats


def failure(source: Source, samples: Samples, problem: str, i: int = 0) -> UserError:
    """An error of a source, with the texts of sample ``i``."""
    names = ("prompt", "response", "reference", "label")
    texts = [f"\n  {name}: {str(column[i])[-500:]!r}" for name, column in zip(names, samples[:4])]
    return UserError(
        f"--reward {source.spec}: {problem}; a sample (the last 500 characters of each):"
        + "".join(texts)
    )
