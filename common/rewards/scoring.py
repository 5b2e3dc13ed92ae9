"""What responses earn: sources of rewards by label, combined.

    load                --reward, --reward_recipe -> RewardMix
    RewardMix.score     responses of a batch -> rewards, components, judgements
    prompts_with_spread the prompts whose samples can be compared

Only the response is scored: a prompt that shows an answer as an example must not earn anything.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed, losses
from common.buffers import Batch
from common.data.processor import Processor
from common.data.rows import Prompt
from common.distributed import Call, UserError, Workers, describe
from common.flags import RewardArgs
from common.rewards.functions import Samples, Source, load_function, load_source, score_samples
from common.rewards.transcripts import messages, turn_texts, whole_texts

# --------------------------------------------------------------------------------------------------
# Sources and recipes
# --------------------------------------------------------------------------------------------------


def load(args: RewardArgs) -> "RewardMix":
    """The sources of --reward or --reward_recipe and how they are combined. Raises UserError."""
    if args.reward_recipe and args.reward_combiner:
        raise UserError("--reward_combiner and --reward_recipe: choose one of them")
    recipe = {"*": dict.fromkeys(split_specs(args.reward), 1.0)}
    if args.reward_recipe:
        recipe = read_recipe(args.reward_recipe)
    specs = list(dict.fromkeys(spec for weights in recipe.values() for spec in weights))
    if not specs:
        raise UserError("--reward is empty: no source of rewards")
    if len(specs) > 1 and not args.reward_recipe and not args.reward_combiner:
        raise UserError(
            f"--reward {args.reward}: {len(specs)} sources need a --reward_recipe with their"
            " weights, or a --reward_combiner"
        )
    sources = [load_source(spec, args) for spec in specs]
    name_apart(sources)
    combiner = None
    if args.reward_combiner:
        combiner = load_function("--reward_combiner", args.reward_combiner, "rewards")
    return RewardMix(sources, recipe, args, combiner)


def name_apart(sources: list[Source]) -> None:
    """Number sources of the same name: two judges become grm and grm2."""
    names: set[str] = set()
    for source in sources:
        wanted, count = source.name, 1
        while source.name in names:
            count += 1
            source.name = f"{wanted}{count}"
        names.add(source.name)


def split_specs(text: str) -> list[str]:
    return [spec.strip() for spec in text.split(",") if spec.strip()]


def read_recipe(text: str) -> dict[str, dict[str, float]]:
    """label -> source -> weight, from JSON {label: [[source, weight], ...]} or a file of it. Raises
    UserError."""
    recipe = {}
    try:
        content = json.loads(Path(text).read_text("utf-8") if os.path.isfile(text) else text)
        for label, parts in content.items():
            weights = {spec: float(weight) for spec, weight in parts}
            if not 0 < len(weights) == len(parts) or not math.isfinite(sum(weights.values())):
                raise ValueError(f"{label!r} has the sources {parts}")
            recipe[label] = weights
        if not recipe:
            raise ValueError("no label")
    except (ValueError, TypeError, AttributeError) as error:
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

    def pays(self, label: str | None) -> bool:
        """Whether rows of that label can earn something; others are only measured."""
        return self.combiner is not None or any(self.weights(label).values())

    def check_rows(self, rows: list[Prompt]) -> None:
        """Raises UserError: rows that cannot be scored, with their lines."""
        kinds = ("rule", "grm") if self.args.grm_question == "answers" else ("rule",)
        comparing = [source for source in self.sources if source.kind in kinds]
        bad = []
        for row in rows:
            if row.label not in self.recipe and "*" not in self.recipe:
                known = ", ".join(self.recipe)
                bad.append(f"{row.source}: label {row.label!r} is not in --reward_recipe: {known}")
            elif row.reference is None:
                weights = self.weights(row.label)
                names = [source.name for source in comparing if source.spec in weights]
                if names:
                    bad.append(f"{row.source}: no reference answer, which {names[0]} compares with")
        if bad:
            problem = f"{len(bad)} of {len(rows)} rows cannot be scored"
            raise UserError("\n  ".join([problem, *bad[:5]]))

    def weights_of(self, batch: Batch) -> list[dict[str, float]]:
        """(S,) the weights of each sample."""
        indices = batch.prompt_index.tolist()
        return [self.weights(batch.prompts[index].label) for index in indices]

    def begin(self, batch: Batch, processor: Processor) -> Call:
        """Start what functions, rules and servers compute for this rank's samples, in a thread;
        `score` waits for it."""
        weights, rank = self.weights_of(batch), dist.get_rank()
        owners = [batch.owners[index] for index in batch.prompt_index.tolist()]
        waiting = []  # (source, places among the samples that it scores, samples)
        for source in self.sources:
            used = [i for i, chosen in enumerate(weights) if source.spec in chosen]
            places = [k for k, i in enumerate(used) if owners[i] == rank]
            if source.function is not None and places:  # a rank may have no samples
                samples = read_samples(batch, [used[k] for k in places], processor)
                waiting.append((source, places, samples))
        worker = Workers(1)
        call = worker.submit(self.call_functions, waiting)
        worker.close()
        return call

    def call_functions(self, waiting: list[tuple[Source, list[int], Samples]]) -> dict[str, tuple]:
        """By source, the places of samples and their columns."""
        return {
            source.name: (places, score_samples(source, samples, self.args))
            for source, places, samples in waiting
        }

    def gather_functions(
        self, batch: Batch, processor: Processor, begun: Call | None
    ) -> list[dict[str, tuple]]:
        """What `call_functions` returned, by rank. Raises UserError on every rank what one has
        raised."""
        call = begun or self.begin(batch, processor)
        with distributed.raise_on_all_ranks():
            own_columns = call.result()
        return distributed.gather_objects(own_columns)

    def score(self, batch: Batch, processor: Processor, begun: Call | None = None) -> None:
        """Fill rewards, turn_rewards (with environments), components (NaN where a source does not
        score a sample) and judgements of all samples, alike on every rank. With several sources, a
        component of one is named SOURCE/COMPONENT, and its reward is the component SOURCE.

        Args:
            begun: what `begin` returned, if it was called before.

        Raises:
            UserError: on every rank, when a source fails on any; the sample is in the message.
        """
        size = len(batch)
        weights = self.weights_of(batch)
        by_rank = self.gather_functions(batch, processor, begun)
        total = torch.zeros(size, dtype=torch.float64)  # (S,)
        by_source = {source.name: unscored(size) for source in self.sources}
        components: dict[str, Tensor] = {}
        judgements = [""] * size
        for source in self.sources:
            shares = [chosen.get(source.spec, 0.0) for chosen in weights]
            share = torch.tensor(shares, dtype=torch.float64)  # (S,)
            # a function that combines rewards does not say which part of them belongs to a turn
            if source.kind == "env" and self.combiner is None:
                batch.turn_rewards = share.repeat_interleave(batch.lengths) * rewards_at_turns(batch)
            used = [i for i, chosen in enumerate(weights) if source.spec in chosen]  # n samples
            if not used:
                continue
            columns, notes = self.ask(source, batch, processor, used, by_rank)
            by_source[source.name][used] = columns["reward"]  # (n,)
            total[used] += share[used] * columns.pop("reward")
            for name, values in columns.items():
                full = f"{source.name}/{name}" if len(self.sources) > 1 else name
                components[full] = unscored(size)
                components[full][used] = values
            for i, note in zip(used, notes):
                judgements[i] += f"{source.name}: {note}\n"
        if self.combiner is not None:
            total = self.combine(by_source)
        if len(self.sources) > 1:
            components |= by_source
        batch.rewards = check_finite(total.float(), by_source)
        batch.components = {name: values.float() for name, values in components.items()}
        batch.judgements = [text.strip() for text in judgements]

    def ask(
        self, source: Source, batch: Batch, processor: Processor, used: list[int], by_rank: list[dict]
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Columns (n,) float64 of the n samples ``used``: "reward" and components; and what a judge
        says of each. Models see whole conversations, functions the last turn as the response; what
        these said is in ``by_rank``."""
        if source.function is not None:
            parts = [part[source.name] for part in by_rank if source.name in part]
            return join_columns(parts, len(used)), []
        if source.ask is not None:
            return source.ask(batch, used, whole_texts(batch, used, processor))
        rewards = batch.per_sample_sum(rewards_at_turns(batch))[used]  # (n,)
        return {"reward": rewards, "accuracy": env_accuracy(batch, rewards, used)}, []

    def combine(self, rewards: dict[str, Tensor]) -> Tensor:
        """(S,) what --reward_combiner makes of the sources' rewards; rank 0 computes. Raises
        UserError on every rank."""
        values, count = None, len(next(iter(rewards.values())))
        with distributed.raise_on_all_ranks(f"--reward_combiner {self.args.reward_combiner}: "):
            if distributed.is_main():
                lists = {name: column.tolist() for name, column in rewards.items()}
                try:
                    values = [float(value) for value in self.combiner(lists)]
                except (Exception, SystemExit) as error:  # the user's own code
                    raise ValueError(describe(error)) from error
                if len(values) != count:
                    raise ValueError(f"{len(values)} values for {count} samples")
        return torch.tensor(distributed.from_main(values), dtype=torch.float64)


def join_columns(parts: list[tuple[list[int], dict]], size: int) -> dict[str, Tensor]:
    """Columns (size,) of what each rank's samples got, with their places; NaN elsewhere."""
    joined: dict[str, Tensor] = {}
    for places, columns in parts:
        for name, values in columns.items():
            column = joined.setdefault(name, unscored(size))
            column[places] = torch.tensor(values, dtype=torch.float64)
    return joined


def read_samples(batch: Batch, picks: list[int], processor: Processor) -> Samples:
    """What reward functions get of the samples ``picks``: the last turn as the response, and the
    whole conversation in the row."""
    turns = turn_texts(batch, picks, processor)
    prompts = [batch.prompts[int(batch.prompt_index[i])] for i in picks]
    rows = [dict(prompt.row) for prompt in prompts]
    if batch.conversations:
        for i, row, texts in zip(picks, rows, turns):
            row["conversation"] = messages(batch.conversations[i], texts)
    return Samples(
        prompts=[prompt.text for prompt in prompts],
        responses=[texts[-1] for texts in turns],
        references=[prompt.reference for prompt in prompts],
        labels=[prompt.label for prompt in prompts],
        images=[list(prompt.images) for prompt in prompts],
        rows=rows,
    )


def unscored(size: int) -> Tensor:
    """(S,) no reward for any sample."""
    return torch.full((size,), math.nan, dtype=torch.float64)


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


def check_finite(rewards: Tensor, by_source: dict[str, Tensor]) -> Tensor:
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
