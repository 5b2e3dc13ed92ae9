"""What responses earn: sources of rewards by label, combined.

    load_rewards        --reward, --reward_recipe -> RewardMix
    RewardMix.score     responses of a batch -> rewards, components, judgements
    prompts_with_spread the prompts whose samples can be compared

Only the response is scored: a prompt that shows an answer as an example must not earn anything.
"""

import copy
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed, losses
from common.buffers import Batch
from common.data.processor import Processor
from common.data.rows import Prompt, report_bad
from common.data.transcripts import finished_text, messages, turn_texts, whole_texts
from common.files import check_form, parse_json, read_bytes
from common.ppo_flags import RewardArgs
from common.process import UserError
from common.rewards import regions
from common.rewards.functions import (
    CALLED,
    Samples,
    Source,
    call_source,
    failure,
    load_source,
)
from common.threads import RAISED, Call, Workers, describe_error
from common.user_code import load_function, run_on_main

MEASURED = "parsed"  # a component that is no part of a reward
Calls = dict[str, tuple[Samples, list[int], Call]]  # by source: samples that it scores, by number

# --------------------------------------------------------------------------------------------------
# Sources and recipes
# --------------------------------------------------------------------------------------------------


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
            f"--reward {args.reward}: {len(specs)} sources need a --reward_recipe with their"
            " weights, or a --reward_combiner"
        )
    sources = [load_source(spec, args) for spec in specs]
    name_apart(sources)
    combiner = None
    if args.reward_combiner:
        combiner, _ = load_function("--reward_combiner", args.reward_combiner, "rewards")
    return RewardMix(sources, recipe, args, combiner)


def lack_of(source: Source, row: Prompt) -> str:
    """What a row lacks for a source that compares, or what is wrong with its reference answer; "" if
    nothing. Raises UserError: a function's own check fails."""
    if source.spec in regions.RULES:
        return regions.problem_of(source.spec, row.regions)
    if row.reference is None:  # a function may read another column
        return "" if source.kind == "function" else "no reference answer"
    try:
        if source.check:
            source.check(row.reference)
    except ValueError as error:
        return str(error)
    except RAISED as error:
        problem = (
            f"--reward {source.spec}: its check of {row.source} raised {describe_error(error)}"
        )
        raise UserError(problem) from error
    return ""


def name_apart(sources: list[Source]) -> None:
    """Number sources of the same name: two judges become grm and grm2."""
    names = [source.name for source in sources]
    for k, source in enumerate(sources):
        earlier = names[:k].count(source.name)
        if earlier:
            source.name += str(earlier + 1)


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

    def can_earn(self, label: str | None) -> bool:
        """Whether rows of that label can earn something; others are only measured."""
        return self.combiner is not None or any(self.weights(label).values())

    def check_rows(self, rows: list[Prompt]) -> None:
        """Raises UserError: rows that cannot be scored, with their lines."""
        comparing = [source for source in self.sources if source.kind == "rule" or source.check]
        bad = []
        for row in rows:
            if row.label not in self.recipe and "*" not in self.recipe:
                bad.append(
                    f"{row.source}: label {row.label!r} is not in --reward_recipe: "
                    + ", ".join(self.recipe)
                )
                continue
            for source in comparing:
                lack = lack_of(source, row)
                if lack and source.spec in self.weights(row.label):
                    bad.append(f"{row.source}: {lack}, which {source.name} compares with")
        report_bad("--reward", bad, len(rows), is_error=True)

    def report_constant_answers(self, rows: list[Prompt]) -> None:
        """Print which answer is right most often: a policy that is right no more often than that has
        learned nothing."""
        for source in self.sources:
            scored = [row for row in rows if source.spec in self.weights(row.label)]
            counts = Counter(row.reference for row in scored if row.reference is not None)
            if source.kind in CALLED and source.spec not in ("none", *regions.RULES) and counts:
                answer, count = counts.most_common(1)[0]
                share = f"{count / len(scored):.3f} of its rows"
                distributed.say_once(
                    f"--reward {source.spec}: always to answer {answer!r:.80} is right in {share}"
                )

    def share_of(self, source: Source, batch: Batch) -> Tensor:
        """(S,) float64, the weight of a source in each sample; NaN where it does not score it."""
        shares = [self.weights(prompt.label).get(source.spec, math.nan) for prompt in batch.prompts]
        return torch.tensor(shares, dtype=torch.float64)[batch.prompt_index]

    def samples_of(self, source: Source, batch: Batch) -> list[int]:
        """The samples that a source scores."""
        return (~self.share_of(source, batch).isnan()).nonzero()[:, 0].tolist()

    def begin(self, batch: Batch, processor: Processor, step: int) -> Calls:
        """Start what functions, rules and servers compute for this rank's samples, each in a thread of its
        own; `score` waits for them."""
        rank, calls, workers = dist.get_rank(), {}, Workers(len(self.sources))
        for source in self.sources:
            used = self.samples_of(source, batch)
            mine = [i for i in used if batch.owners[batch.prompt_index[i]] == rank]
            if source.kind in CALLED and mine:  # a rank may have no samples
                samples = read_samples(batch, mine, processor, step)
                if source.kind == "rule" and source.spec != "exact":
                    pairs = zip(mine, samples.responses)
                    finished = [finished_text(batch, i, text) for i, text in pairs]
                    samples = samples._replace(responses=finished)
                call = workers.submit(call_source, source, samples)
                calls[source.name] = samples, mine, call
        workers.close()
        return calls

    def score(
        self, batch: Batch, processor: Processor, step: int, calls: Calls | None = None
    ) -> None:
        """Fill rewards, turn_rewards (with environments), components (NaN where a source does not score a
        sample) and judgements of all samples, alike on every rank. With several sources, a component of
        one is named SOURCE/COMPONENT, and its reward SOURCE. `compared` and the sources' weights are
        filled too.

        Args:
            step: steps of the run that are done.
            calls: what `begin` returned, if it was called before.

        Raises:
            UserError: on every rank, when a source fails on any; the sample is in the message.
        """
        by_rank = distributed.gather_objects(
            self.finish(calls or self.begin(batch, processor, step))
        )
        total = torch.zeros(len(batch), dtype=torch.float64)  # (S,)
        batch.turn_rewards = torch.zeros(len(batch.tokens), dtype=torch.float64)
        by_source, components = {}, {}  # (S,) each
        weights = []  # (S,) each, by source
        judgements = [""] * len(batch)
        for source in self.sources:
            share, used = self.share_of(source, batch), self.samples_of(source, batch)
            weights.append(share)
            columns, notes = self.ask(source, batch, processor, used, by_rank)
            if source.kind == "env" and self.combiner is None:  # a combined reward is of no turn
                shares = share.nan_to_num().repeat_interleave(batch.own_lengths)
                batch.turn_rewards += shares * rewards_at_turns(batch)
            by_source[source.name] = columns.pop("reward")
            total[used] += (share * by_source[source.name])[used]
            for name, values in columns.items():
                components[f"{source.name}/{name}" if len(self.sources) > 1 else name] = values
            for i, note in zip(used, notes):
                judgements[i] += f"{source.name}: {note}\n"
        if self.combiner is not None:
            total = self.combine(self.combiner, by_source)
        if len(self.sources) > 1:
            components = by_source | components
        batch.compared, batch.weights = self.compared(components), torch.stack(weights, dim=1)
        batch.rewards = finite_rewards(total.float(), by_source)
        batch.components = {name: values.float() for name, values in components.items()}
        batch.judgements = [text.strip() for text in judgements]

    def finish(self, calls: Calls) -> dict[str, tuple[list[int], dict]]:
        """What the calls return in time, with the samples that they score. Raises UserError on every
        rank."""
        scored = {}
        with distributed.raise_on_all_ranks():
            wait([call for *_, call in calls.values()], self.args.reward_timeout, FIRST_EXCEPTION)
            for source in self.sources:
                samples, mine, call = calls.get(source.name, (None, [], None))
                if call and not call.done():
                    limit = f"{self.args.reward_timeout:g} s (--reward_timeout)"
                    raise failure(source, samples, f"took longer than {limit}")
                if call:
                    scored[source.name] = mine, call.result()  # or raises what the call has raised
        return scored

    def compared(self, components: Iterable[str]) -> list[str]:
        """The components that gdpo compares: the rewards of several sources, or the parts of the reward
        of one. It has no parts if an environment gave it, or if a rule for regions measures it in several
        ways."""
        if len(self.sources) > 1:
            return [source.name for source in self.sources]
        alone = self.sources[0]
        if alone.kind == "env" or alone.spec in regions.RULES:
            return []
        return [name for name in components if name != MEASURED]

    def ask(
        self,
        source: Source,
        batch: Batch,
        processor: Processor,
        used: list[int],
        by_rank: list[dict],
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Columns (S,) float64, "reward" and components, NaN for all but the n samples ``used``; and what a
        judge says of each of the n. Models see whole conversations, functions the last turn as the
        response. What functions have returned is in ``by_rank``."""
        parts, notes = [part[source.name] for part in by_rank if source.name in part], []
        if source.ask is not None and used:
            columns, notes = source.ask(batch, used, whole_texts(batch, used, processor))
            parts = [(used, columns)]
        elif source.kind == "env":
            rewards = batch.per_sample_sum(rewards_at_turns(batch))[used]  # (n,)
            parts = [(used, {"reward": rewards, "accuracy": env_accuracy(batch, rewards, used)})]
        return join_columns(parts, len(batch)), notes

    def combine(self, combiner: Callable, rewards: dict[str, Tensor]) -> Tensor:
        """(S,) what --reward_combiner makes of the sources' rewards. Raises UserError on every rank."""
        lists = {name: column.tolist() for name, column in rewards.items()}
        count = len(next(iter(lists.values())))
        flag = f"--reward_combiner {self.args.reward_combiner}"
        values = run_on_main(flag, lambda: [float(value) for value in combiner(lists)])
        if len(values) != count:
            raise UserError(f"{flag}: {len(values)} values for {count} samples")
        return torch.tensor(values, dtype=torch.float64)


def join_columns(parts: list[tuple[list[int], dict]], size: int) -> dict[str, Tensor]:
    """Columns (S,) from parts, each of some samples; NaN where no part has a sample."""
    nothing = torch.full((size,), math.nan, dtype=torch.float64)
    joined = {"reward": nothing.clone()}
    for used, columns in parts:
        for name, values in columns.items():
            column = joined.setdefault(name, nothing.clone())
            column[used] = torch.as_tensor(values, dtype=torch.float64)
    return joined


def read_samples(batch: Batch, picks: list[int], processor: Processor, step: int) -> Samples:
    """What reward functions get of the samples ``picks``: the last turn as the response, and the
    whole conversation in the row."""
    turns = turn_texts(batch, picks, processor)
    prompts = [batch.prompts[int(batch.prompt_index[i])] for i in picks]
    rows = [copy.deepcopy(prompt.row) for prompt in prompts]  # one each: a function may change it
    if batch.conversations:
        for i, row, texts in zip(picks, rows, turns):
            row["conversation"] = copy.deepcopy(messages(batch.conversations[i], texts))
    return Samples(
        prompts=[prompt.text for prompt in prompts],
        responses=[texts[-1] for texts in turns],
        references=[prompt.reference for prompt in prompts],
        labels=[prompt.label for prompt in prompts],
        images=[list(prompt.images) for prompt in prompts],
        rows=rows,
        lengths=batch.own_lengths[picks].tolist(),
        truncated=batch.truncated[picks].tolist(),
        groups=batch.prompt_index[picks].tolist(),
        places=[list(prompt.places) for prompt in prompts],
        regions=[prompt.regions for prompt in prompts],
        step=step,
    )


def rewards_at_turns(batch: Batch) -> Tensor:
    """(N,) float64, what environments gave, at the last own token of each turn."""
    rewards = torch.zeros(len(batch.tokens), dtype=torch.float64)
    for start, conversation in zip(batch.offsets.tolist(), batch.conversations):
        for end, reward in zip(conversation.ends, conversation.rewards):
            rewards[start + end - 1] = reward
    return rewards


def env_accuracy(batch: Batch, rewards: Tensor, used: list[int]) -> Tensor:
    """(n,) accuracies as the environment gave them, 0 for samples that ended before it did. If it
    gave none at all: 1 where the reward is 1 or more."""
    accuracies = [batch.conversations[i].accuracy for i in used]
    if all(accuracy is None for accuracy in accuracies):
        return (rewards >= 1).double()
    return torch.tensor([accuracy or 0.0 for accuracy in accuracies], dtype=torch.float64)


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
