"""Rewards: what functions, rules, servers, models and environments say of samples, and the sums of it.

    load_rewards        --reward, --reward_recipe, --reward_combiner -> RewardMix, of Sources
    RewardMix.begin     this rank's samples -> calls of functions, rules and servers, each in a thread
      read_samples        their arguments
      call_source         what they return, checked
    RewardMix.score     calls of all ranks, models, environments -> batch.rewards and its components
    prompts_with_spread the prompts whose samples can be compared

Only the response is scored: a prompt that shows an answer as an example must not earn anything.
"""

import copy
import functools
import math
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed, losses
from common.buffers import Batch
from common.child import problems_of
from common.data.processor import Processor
from common.data.rows import Prompt, report_bad
from common.data.transcripts import finished_text, messages, turn_texts
from common.flags import LONGEST_WAIT, flag
from common.ground.files import UserError, check_form, parse_json, read_bytes
from common.rewards import regions
from common.rewards.remote import Server
from common.rewards.rules import RULES, check_reference, rule_reward
from common.user_code import Function, RaisedError, in_thread, load_function

ColumnTensors = dict[str, Tensor]  # "reward" and its components: (n,) float64 each
# Of each sample: where a span ends, in characters, and what it earns.
Spans = list[list[tuple[int, float]]]


# --------------------------------------------------------------------------------------------------
# Sources and recipes
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardArgs:
    """reward"""

    reward: str = flag(
        "boxed",
        "source of rewards, or several separated by commas: a rule (exact, boxed, answer, box, boxes, "
        "point, verdict), env (the rewards of --env), "
        "file.py:function, grm:FOLDER (generative judge), "
        "rm:FOLDER (scalar reward model), a server: http://host:port/path; none: only a teacher",
        paths=True,
        several=True,
    )
    reward_recipe: str = flag(
        "",
        'JSON, or a .json file, in place of --reward: {label: [[source, weight], ...]}, "*" for '
        "every other label; weight 0: only measured",
        paths=True,
    )
    reward_combiner: str = flag(
        "",
        "file.py:function of {source: rewards} to rewards, for several sources without a recipe",
        paths=True,
    )
    grm_question: str = flag(
        "auto",
        "what a judge is asked; answers: whether the response or the reference answer is better; rubric: "
        "whether the response meets each criterion of the row's rubric; auto: the first of correct, score, "
        "answers and rubric that it was trained on",
        choices=("auto", "correct", "score", "answers", "rubric"),
    )
    grm_opponents: int = flag(
        0,
        "above 0: a judge of pairs compares a response with this many others to the same prompt, in both "
        "orders, not with the reference answer; the reward is the expected share of wins (Pref-GRPO)",
    )
    grm_mode: str = flag(
        "probability",
        "what a judge's reward is: its expected verdict (by probability), or the verdict of a critique "
        "that it writes",
        choices=("probability", "critique"),
    )
    grm_max_new_tokens: int = flag(512, "longest critique of a judge, tokens", low=1)
    reward_timeout: float = flag(
        60.0,
        "longest time for all rewards of functions and servers together, including retries, seconds",
        low=1e-6,
        high=LONGEST_WAIT,
    )


class Scores(NamedTuple):
    """What a source says of n samples."""

    picks: list[int]  # the samples by their numbers in the batch
    columns: ColumnTensors
    # a part of the rewards: sample, token of the batch, what it earns there
    at_tokens: list[tuple[int, int, float]] = []
    notes: list[str] = []  # of a judge, on each sample


@dataclass
class Source:
    """One source of rewards: a function of texts, which each rank calls about its own samples; or a
    model or environment, which all ranks ask together."""

    spec: str  # as given: boxed, file.py:function, grm:FOLDER, rm:FOLDER, http://...
    name: str  # in metrics and records
    kind: str  # none, rule, regions, function, remote, env, grm or rm
    # A function of a program is called in its process; any other, of a fork say, in a thread of the trainer,
    # whose models and process group it sees.
    function: Callable | None = None
    keywords: list[str] = field(default_factory=list)  # what it gets by name, of OFFERED
    # Of no function: scores these samples of the batch. `reward_models.build` sets that of a model.
    score: Callable[[Batch, list[int], Processor], Scores] | None = None
    # Why nothing can match each of these reference answers, None of a row without one, of rows with these
    # `row`, `regions` and `places`; "" if something can. None: any may be right.
    check: Callable[[list, dict[str, list]], list[str]] | None = None


def load_rewards(args: RewardArgs) -> "RewardMix":
    """The sources of --reward or --reward_recipe and how they are combined. Raises UserError."""
    listed = [spec.strip() for spec in args.reward.split(",") if spec.strip()]
    recipe = {"*": dict.fromkeys(listed, 1.0)}
    if args.reward_recipe:
        recipe = read_recipe(args.reward_recipe)
    specs = list(dict.fromkeys(spec for weights in recipe.values() for spec in weights))
    if not specs:
        raise UserError("--reward or --reward_recipe is empty: no source of rewards")
    if len(specs) > 1 and not args.reward_recipe and not args.reward_combiner:
        raise UserError(
            f"--reward {args.reward}: a comma separates sources, and {len(specs)} sources need a "
            "--reward_recipe with their weights, or a --reward_combiner; a path with a comma needs a "
            'recipe, too: {"*": [[source, 1]]}'
        )
    sources = [load_source(spec, args) for spec in specs]
    name_apart(sources)
    combiner = None
    if args.reward_combiner:
        combiner, *_ = load_function("--reward_combiner", args.reward_combiner, "rewards")
    return RewardMix(sources, recipe, args, combiner)


def read_recipe(text: str) -> dict[str, dict[str, float]]:
    """label -> source -> weight, from JSON {label: [[source, weight], ...]} or a file of it. Raises
    UserError."""
    recipe = {}
    try:
        content = parse_json(read_bytes(text) if os.path.isfile(text) else text, "the recipe")
        check_form(content, {str: [list]}, "the recipe")
        for label, parts in content.items():
            recipe[label] = {str(spec): float(weight) for spec, weight in parts}
            if not 0 < len(recipe[label]) == len(parts):
                raise ValueError(f"{label!r} has the sources {parts}")
    except (ValueError, TypeError) as error:
        raise UserError(
            f"--reward_recipe {text}: expected {{label: [[source, weight], ...]}} as JSON or a file"
            ' of it, each source once for a label; "*" for all other labels; weight 0: only'
            f" measured ({error})"
        ) from error
    return recipe


def load_source(spec: str, args: RewardArgs = RewardArgs()) -> Source:
    """A source by its spec. Raises UserError.

    A function `f(prompts, responses, references, labels, images)` gets lists of equal length, in
    which the samples of a prompt stand together, and returns a list of floats or a dict of such
    lists: its "reward" is the reward, or else the sum of all; the others are logged as components.
    "spans" holds a list of (end, reward) for each sample: what the text up to that character earns
    besides, at the token that ends there. `images` holds absolute paths, in the order of their places
    in the prompt (of a clip a tuple); the policy sees them as `read_image` gives them. Parameters of
    the names in `OFFERED` get what these say. It may change all of them. An attribute `check` of the
    function is called with every reference answer before the first step, None of a row without one, and
    raises ValueError for a bad one; parameters `row`, `regions` and `places` of it get those of the row.
    A component is None or NaN where it does not apply to a sample.
    """
    kind, _, rest = spec.partition(":")
    if spec == "none":
        return Source(spec, spec, "none", lambda prompts, *_: [0.0] * len(prompts))
    if spec == "env":
        return Source(spec, spec, "env", score=score_turns)
    if spec in RULES:
        rule, check = functools.partial(rule_reward, spec), functools.partial(check_reference, spec)
        return Source(spec, spec, "rule", rule, check=functools.partial(problems_of, check))
    if spec in regions.REGION_RULES:
        rule = functools.partial(regions.region_reward, spec)
        check = functools.partial(problems_of, functools.partial(regions.check_regions, spec))
        return Source(spec, spec, "regions", rule, ["regions"], check=check)
    if kind in ("grm", "rm") and rest:
        return Source(spec, kind, kind)
    if kind in ("http", "https"):
        # less than the step waits, so that the message is about the server
        server = Server(spec, 0.9 * args.reward_timeout)
        return Source(spec, "remote", "remote", server, ["groups", "places"])
    function, keywords, has_check = load_function(
        "--reward",
        spec,
        "prompts, responses, references, labels, images",
        OFFERED,
        f"one of {', '.join((*RULES, *regions.REGION_RULES))}, env, grm:FOLDER, rm:FOLDER, "
        "http://host:port/path, or an existing path.py:function",
    )
    check = function.check if has_check else None
    return Source(spec, function.name, "function", function, keywords, check=check)


def name_apart(sources: list[Source]) -> None:
    """Number sources of the same name, by numbers that make no name of another source: two judges become
    grm and grm2."""
    taken = set()
    for source in sources:
        name, number = source.name, 1
        while source.name in taken:
            number += 1
            source.name = f"{name}{number}"
        taken.add(source.name)


# --------------------------------------------------------------------------------------------------
# A call of a function, a rule or a server
# --------------------------------------------------------------------------------------------------


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
    lines: list[str]  # file and line of the rows, for messages


OFFERED = Samples._fields[5:-1]


class CallOfSource(NamedTuple):
    """A call about a rank's samples, in a thread."""

    source: Source
    picks: list[int]  # the samples by their numbers in the batch
    samples: Samples
    result: Future  # of `call_source`


def read_samples(
    source: Source, batch: Batch, picks: list[int], processor: Processor, step: int
) -> Samples:
    """What the function of a source gets of the samples ``picks``: the last turn as the response, and
    the whole conversation in the row. Rules but `exact` get no response that was cut off."""
    turns = turn_texts(batch, picks, processor)
    responses = [texts[-1] for texts in turns]
    if source.kind in ("rule", "regions") and source.spec != "exact":
        responses = [finished_text(batch, i, text) for i, text in zip(picks, responses)]
    prompts = [batch.prompts[index] for index in batch.prompt_index[picks].tolist()]
    return Samples(
        prompts=[prompt.text for prompt in prompts],
        responses=responses,
        references=[prompt.reference for prompt in prompts],
        labels=[prompt.label for prompt in prompts],
        images=[list(prompt.images) for prompt in prompts],
        rows=copy_rows(batch, picks, turns),
        lengths=batch.own_lengths[picks].tolist(),
        truncated=batch.truncated[picks].tolist(),
        groups=batch.prompt_index[picks].tolist(),
        places=[list(prompt.places) for prompt in prompts],
        regions=[prompt.regions for prompt in prompts],
        step=step,
        lines=[prompt.source for prompt in prompts],
    )


def copy_rows(batch: Batch, picks: list[int], turns: list[list[str]]) -> list[dict]:
    """The row of each sample, with the conversation if there is one: a copy, which a function may change."""
    rows = []
    for i, texts in zip(picks, turns):
        row = batch.prompts[int(batch.prompt_index[i])].row
        if batch.conversations:
            row = row | {"conversation": messages(batch.conversations[i], texts)}
        rows.append(copy.deepcopy(row))
    return rows


def call_source(source: Source, samples: Samples) -> tuple[ColumnTensors, Spans]:
    """What the function of a source says of the samples. Raises UserError: a user's function raises, or
    returns other than finite numbers. What one of ours, or of a fork, raises gets the sample as a note."""
    by_name = {name: getattr(samples, name) for name in source.keywords}
    assert source.function is not None
    # a row without an answer is what most functions cannot take
    i = samples.references.index(None) if None in samples.references else 0
    try:
        returned = source.function(*samples[:5], **by_name)
    except UserError as error:
        problem = f"it raised {error}" if isinstance(error, RaisedError) else f"{error}"
        raise failure(source, samples, problem, i) from error
    except Exception as error:
        error.add_note(f"{failure(source, samples, 'it raised this', i)}")
        raise
    return read_returned(source, samples, returned)


def read_returned(source: Source, samples: Samples, returned: Any) -> tuple[ColumnTensors, Spans]:
    """The reward of n samples under "reward", and components; and the spans, if there are some: then
    their sums are the component "spans"."""
    has_columns = isinstance(returned, dict) and returned
    columns = returned if has_columns else {"reward": returned}
    columns = {str(name): values for name, values in columns.items()}
    spans = []
    if "spans" in columns:
        spans = read_spans(source, samples, columns["spans"])
        columns["spans"] = [sum((earned for _, earned in ends), 0.0) for ends in spans]
    columns = {name: read_column(source, samples, name, columns[name]) for name in columns}
    parts = ["reward", "spans"] if "reward" in columns else columns
    earned = torch.stack([columns[name] for name in parts if name in columns])  # (parts, n)
    lacking = earned.isnan().all(dim=0).nonzero()
    if len(lacking):
        problem = "no component applies, so there is no reward"
        raise failure(source, samples, problem, int(lacking[0]))
    # part by part: `Tensor.sum` adds in an order that depends on their number
    rewards = sum(earned.nan_to_num(0.0), torch.zeros(()))
    return columns | {"reward": rewards}, spans


def read_column(source: Source, samples: Samples, name: str, values: Any) -> Tensor:
    """(n,) float64 the numbers of a column, also of numpy or torch; NaN where a component does not apply to
    a sample. Raises UserError: there are more or fewer than samples, some are infinite, or a reward is
    none."""
    count, may_lack = len(samples.responses), name not in ("reward", "spans")
    if may_lack and isinstance(values, list):
        values = [math.nan if value is None else value for value in values]
    try:
        numbers = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    except OverflowError as error:  # an integer
        raise failure(source, samples, f"{name} holds too large a number: {error}") from error
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(())
    if numbers.shape != (count,):
        problem = f"{name} must be a list of {count} numbers, got {describe_shape(values)}"
        raise failure(source, samples, problem)
    wrong = (numbers.isinf() if may_lack else ~numbers.isfinite()).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise failure(source, samples, f"{name} is {numbers[i]:g}, not a finite number", i)
    return numbers


def describe_shape(values: Any) -> str:
    """What a function returned in place of a list of numbers, in a few words."""
    name = type(values).__name__
    if hasattr(values, "shape") and len(values.shape) != 1:
        return f"{name} of shape {tuple(values.shape)}"
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, list | tuple):
        types = sorted({type(value).__name__ for value in values})
        return f"{name} of {len(values)} ({', '.join(types)})"
    return name


def read_spans(source: Source, samples: Samples, spans: Iterable) -> Spans:
    """The spans as a function returns them. Raises UserError."""
    try:
        return [
            # `index` refuses an end that is not in the text
            [(range(1, len(text) + 1).index(end) + 1, float(earned)) for end, earned in ends]
            for text, ends in zip(samples.responses, spans, strict=True)
        ]
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"spans must be lists of (end, reward), with ends in the response: {error}"
        raise failure(source, samples, problem) from error


def failure(source: Source, samples: Samples, problem: str, i: int = 0) -> UserError:
    """An error of a source, with the texts of sample ``i``."""
    lines = [
        f"--reward {source.spec}: {problem}; a sample (the last 500 characters of each):",
        f"row: {samples.lines[i]}",
    ]
    for name, column in zip(("prompt", "response", "reference", "label"), samples[:4]):
        lines.append(f"{name}: {str(column[i])[-500:]!r}")
    return UserError("\n  ".join(lines))


# --------------------------------------------------------------------------------------------------
# Rewards of a batch
# --------------------------------------------------------------------------------------------------


@dataclass
class RewardMix:
    """What a sample earns: a weighted sum of sources, chosen by the label of its row."""

    sources: list[Source]
    recipe: dict[str, dict[str, float]]  # label -> spec of a source -> weight; "*": other labels
    args: RewardArgs
    combiner: Callable | None = None  # {name: rewards} -> rewards, in place of the sum

    def weights(self, label: str | None) -> dict[str, float]:
        """Spec of a source -> weight. Raises KeyError: a label that the recipe does not have."""
        return self.recipe[label if label in self.recipe else "*"]

    def rows_of(self, source: Source, rows: list[Prompt]) -> list[Prompt]:
        """The rows whose samples a source scores."""
        return [row for row in rows if source.spec in self.weights(row.label)]

    def check_rows(self, rows: list[Prompt]) -> None:
        """Raises UserError: rows that cannot be scored, with their lines."""
        bad, labels = [], ", ".join(self.recipe)
        for row in rows:
            if row.label not in self.recipe and "*" not in self.recipe:
                bad.append(f"{row.source}: label {row.label!r} is not in --reward_recipe: {labels}")
        report_bad("--reward", bad, len(rows), is_error=True)
        for source in self.sources:
            scored = self.rows_of(source, rows)
            for row, lack in zip(scored, lacks_of(source, scored)):
                if lack:
                    bad.append(f"{row.source}: {lack}, which {source.name} compares with")
            count = sum(row.reference is None for row in scored)
            if count and source.kind == "function":
                distributed.say_once(
                    f"--reward {source.name}: {count} of {len(scored)} rows have no answer; the function "
                    "gets None as their reference"
                )
        report_bad("--reward", bad, len(rows), is_error=True)

    def report_constant_answers(self, rows: list[Prompt]) -> None:
        """Print which answer is right most often: a policy that is right no more often than that has
        learned nothing."""
        for source in self.sources:
            scored = self.rows_of(source, rows)
            counts = Counter(row.reference for row in scored if row.reference is not None)
            if source.kind in ("rule", "function", "remote") and counts:
                answer, count = counts.most_common(1)[0]
                share = f"{count / len(scored):.3f} of its rows"
                distributed.say_once(
                    f"--reward {source.spec}: always answering {answer!r:.80} is right in {share}"
                )

    def weights_of(self, batch: Batch) -> Tensor:
        """(S, K) float64, the weights of the K sources in each sample; NaN where one does not score it."""
        table = []
        for prompt in batch.prompts:
            weights = self.weights(prompt.label)
            table.append([weights.get(source.spec, math.nan) for source in self.sources])
        weights = torch.tensor(table, dtype=torch.float64).view(-1, len(self.sources))
        return weights[batch.prompt_index]

    def begin(self, batch: Batch, processor: Processor, step: int) -> list[CallOfSource]:
        """The calls of functions, rules and servers about this rank's samples, each in a thread of its
        own; `score` waits for them."""
        is_own = torch.tensor(batch.owners)[batch.prompt_index] == dist.get_rank()  # (S,)
        calls = []
        for source, weights in zip(self.sources, self.weights_of(batch).unbind(1)):
            picks = (is_own & ~weights.isnan()).nonzero()[:, 0].tolist()
            if source.function and picks:  # a rank may have no samples
                samples = read_samples(source, batch, picks, processor, step)
                result = in_thread(call_source, source, samples)
                calls.append(CallOfSource(source, picks, samples, result))
        return calls

    def score(
        self,
        batch: Batch,
        processor: Processor,
        step: int,
        calls: list[CallOfSource] | None = None,
    ) -> None:
        """Fill rewards, turn_rewards (of environments and spans), components (NaN where a source does not
        score a sample) and judgements of all samples, alike on every rank. With several sources, a
        component of one is named SOURCE/COMPONENT, and its reward SOURCE. `compared` and
        the sources' weights are filled too.

        Args:
            step: steps of the run that are done.
            calls: what `begin` returned, if it was called before.

        Raises:
            UserError: on every rank, when a source fails on any; the sample is in the message.
        """
        calls = self.begin(batch, processor, step) if calls is None else calls
        by_rank = distributed.gather_objects(self.finish(calls, batch, processor))
        batch.weights = self.weights_of(batch)  # (S, K)
        batch.turn_rewards = torch.zeros(len(batch.tokens), dtype=torch.float64)
        total = torch.zeros(len(batch), dtype=torch.float64)  # (S,)
        by_source, components = {}, {}  # (S,) each
        notes = [""] * len(batch)
        for source, weights in zip(self.sources, batch.weights.unbind(1)):
            used = (~weights.isnan()).nonzero()[:, 0].tolist()
            parts = [scores[source.name] for scores in by_rank if source.name in scores]
            if source.score and used:
                parts = [source.score(batch, used, processor)]
            columns = join_columns(parts, len(batch))
            by_source[source.name] = columns.pop("reward")
            total[used] += (weights * by_source[source.name])[used]
            for name, values in columns.items():
                components[f"{source.name}/{name}" if len(self.sources) > 1 else name] = values
            for part in parts:
                for i, token, earned in part.at_tokens:
                    batch.turn_rewards[token] += weights[i] * earned
                for i, note in zip(part.picks, part.notes):
                    notes[i] += f"{source.name}: {note}\n"
        if len(self.sources) > 1:
            components = by_source | components
        if self.combiner is not None:
            total = self.combine(self.combiner, by_source)
            batch.turn_rewards.zero_()  # a combined reward belongs to no token
        batch.rewards = finite_rewards(total.float(), by_source)
        batch.components = {name: values.float() for name, values in components.items()}
        batch.compared = self.compared(components)
        batch.judgements = [text.strip() for text in notes]

    def finish(
        self, calls: list[CallOfSource], batch: Batch, processor: Processor
    ) -> dict[str, Scores]:
        """By source, what the calls return, all of them within --reward_timeout. Raises UserError on every
        rank: what one has raised, or else that one is late."""
        scores, limit = {}, self.args.reward_timeout
        with distributed.raise_on_all_ranks():
            results = [call.result for call in calls]
            _, late = wait(results, limit, FIRST_EXCEPTION)
            functions = [call.source.function for call in calls]
            programs = [each.program for each in functions if isinstance(each, Function)]
            if any(program.is_debugged for program in programs):
                _, late = wait(results, None, FIRST_EXCEPTION)
            for call in calls:
                if call.result not in late:  # first of all, what one has raised
                    columns, spans = call.result.result()
                    at_tokens = place_spans(call.picks, spans, batch, processor) if spans else []
                    scores[call.source.name] = Scores(call.picks, columns, at_tokens)
            late_calls = [call for call in calls if call.result in late]
            if late_calls:
                for program in programs:
                    program.end("was ended, as a call took too long")
                problem = f"took longer than {limit:g} s (--reward_timeout)"
                raise failure(late_calls[0].source, late_calls[0].samples, problem)
        return scores

    def compared(self, components: Iterable[str]) -> list[str]:
        """The components that gdpo compares: the rewards of several sources, or the parts of the reward
        of one. It has no parts if an environment gave it, or if a rule for regions measures it in several
        ways."""
        if len(self.sources) > 1:
            return [source.name for source in self.sources]
        if self.sources[0].kind in ("env", "regions"):
            return []
        names = [name for name in components if name != "parsed"]  # which is no part of a reward
        return names if names != ["spans"] else []  # beside the reward alone, they are parts of it

    def combine(self, combiner: Callable, rewards: dict[str, Tensor]) -> Tensor:
        """(S,) what --reward_combiner makes of the sources' rewards. Raises UserError on every rank."""
        lists = {name: column.tolist() for name, column in rewards.items()}
        flag = f"--reward_combiner {self.args.reward_combiner}"
        values = distributed.run_on_main(flag, lambda: read_floats(combiner(lists)))
        count = len(next(iter(rewards.values())))
        if len(values) != count:
            raise UserError(f"{flag}: {len(values)} values for {count} samples")
        return torch.tensor(values, dtype=torch.float64)


def read_floats(values: Any) -> list[float]:
    """Raises UserError: these are no numbers."""
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{type(error).__name__}: {error}") from error


def lacks_of(source: Source, rows: list[Prompt]) -> list[str]:
    """What each row lacks for a source that compares, or what is wrong with its reference answer; "" if
    nothing. Raises UserError: the process of the check has ended."""
    if not source.check:
        return [""] * len(rows)
    offered = {
        "row": [row.row for row in rows],
        "regions": [row.regions for row in rows],
        "places": [list(row.places) for row in rows],
    }
    try:
        return source.check([row.reference for row in rows], offered)
    except UserError as error:
        raise UserError(f"--reward {source.spec}: its check: {error}") from error


def score_turns(batch: Batch, used: list[int], processor: Processor) -> Scores:
    """What environments gave the samples ``used``, at the last own token of each turn. Accuracies are
    theirs, 0 for samples that ended before they gave one; if they gave none at all, 1 where the reward is
    1 or more."""
    starts = batch.offsets.tolist()
    rewards, accuracies, at_tokens = [], [], []
    for i in used:
        conversation = batch.conversations[i]
        rewards.append(float(sum(conversation.rewards)))
        accuracies.append(conversation.accuracy)
        for end, reward in zip(conversation.ends, conversation.rewards):
            at_tokens.append((i, starts[i] + end - 1, reward))
    if all(accuracy is None for accuracy in accuracies):
        accuracies = [float(reward >= 1) for reward in rewards]
    columns = {"reward": rewards, "accuracy": [accuracy or 0.0 for accuracy in accuracies]}
    tensors = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    return Scores(used, tensors, at_tokens)


def place_spans(
    picks: list[int], spans: Spans, batch: Batch, processor: Processor
) -> list[tuple[int, int, float]]:
    """(sample, index of the token that ends a span, what it earns), for the spans of the last turns of
    the samples ``picks``."""
    turns, placed = batch.turns, []
    for i, ends in zip(picks, spans):
        turn = turns[i][-1]
        start = int(batch.offsets[i + 1]) - len(turn)
        for end, earned in ends:
            placed.append((i, start + token_that_ends(processor, turn, end), earned))
    return placed


def token_that_ends(processor: Processor, tokens: Tensor, end: int) -> int:
    """The token that completes the first ``end`` characters."""
    places = [k for k, token in enumerate(tokens.tolist()) if token not in processor.silent_ids]
    tokens = tokens[places]
    (text,) = processor.decode([tokens])

    def are_whole(count: int) -> bool:
        """Whether ``count`` tokens show them, and the next token adds to none of them."""
        start, longer = processor.decode([tokens[:count], tokens[: count + 1]])
        # a character of several tokens is a replacement mark or more until its last one is there, and
        # what is no character stays one
        is_mark = start[end - 1 : end] == "\ufffd"
        return start[:end] == text[:end] and not (is_mark and len(longer) == end)

    return places[bisect_left(range(1, len(tokens)), True, key=are_whole)]


def join_columns(scores: list[Scores], count: int) -> ColumnTensors:
    """The columns of all ``count`` samples; NaN where nothing is said of a sample."""
    nothing = torch.full((count,), math.nan, dtype=torch.float64)
    joined = {"reward": nothing.clone()}
    for part in scores:
        for name, values in part.columns.items():
            column = joined.setdefault(name, nothing.clone())
            column[part.picks] = values
    return joined


def finite_rewards(rewards: Tensor, by_source: dict[str, Tensor]) -> Tensor:
    """The rewards (S,). Raises UserError: some are NaN or too large for float32."""
    bad = (~rewards.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        first = {name: float(values[bad[0]]) for name, values in by_source.items()}
        raise UserError(
            f"rewards must be finite float32 numbers: {len(bad)} of {len(rewards)} are not; for"
            f" the first of them the sources say {first}"
        )
    return rewards


# --------------------------------------------------------------------------------------------------
# Spread
# --------------------------------------------------------------------------------------------------


def prompts_with_spread(batch: Batch) -> list[int]:
    """The prompts whose samples do not all earn the same. Prompts with one sample each are compared
    with one another: all of them, or none."""
    compared = batch.prompt_index
    if len(compared.unique()) == len(batch):
        compared = torch.zeros_like(compared)
    return batch.prompt_index[losses.has_spread(batch.rewards, compared)].unique().tolist()
