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
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed, losses
from common.buffers import Batch
from common.data.processor import Processor
from common.data.rows import Prompt, check_media
from common.distributed import UserError, describe
from common.flags import RewardArgs, absolute
from common.model.weights import absolute_model
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
    names = {source.spec: source.name for source in sources}
    named = {}
    for label, weights in recipe.items():
        named[label] = {names[spec]: weight for spec, weight in weights.items()}
    combiner = None
    if args.reward_combiner:
        combiner = load_function("--reward_combiner", args.reward_combiner, "rewards")
    return RewardMix(sources, named, args, combiner)


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
    try:
        recipe = json.loads(Path(text).read_text("utf-8") if os.path.isfile(text) else text)
    except ValueError as error:
        raise UserError(f"--reward_recipe {text}: not a file, nor valid JSON: {error}") from error
    if not isinstance(recipe, dict) or not recipe or not all(map(_are_weights, recipe.values())):
        raise UserError(
            f"--reward_recipe {text}: expected {{label: [[source, weight], ...]}}, each source once"
            ' for a label; "*" for all other labels; weight 0: only measured'
        )
    return {label: dict(parts) for label, parts in recipe.items()}


def _are_weights(parts: Any) -> bool:
    """Whether this is a list of [source, weight], each source once."""
    try:
        weights = {source: weight for source, weight in parts}
    except (TypeError, ValueError):
        return False
    numbers = [
        type(weight) in (int, float) and math.isfinite(weight) for weight in weights.values()
    ]
    names = [isinstance(source, str) and source != "" for source in weights]
    return bool(weights) and len(weights) == len(parts) and all(numbers + names)


def absolute_sources(args: RewardArgs) -> dict[str, str]:
    """The flags that name sources, as they can be read from any folder."""
    listed = {
        "reward": ",".join(map(absolute_source, split_specs(args.reward))),
        "reward_combiner": absolute_source(args.reward_combiner),
        "reward_recipe": "",
    }
    if args.reward_recipe:
        recipe = {}
        for label, weights in read_recipe(args.reward_recipe).items():
            recipe[label] = [[absolute_source(spec), weight] for spec, weight in weights.items()]
        listed |= {"reward": "", "reward_recipe": json.dumps(recipe)}
    return listed


def absolute_source(spec: str) -> str:
    kind, colon, folder = spec.partition(":")
    if kind in ("grm", "rm"):
        return f"{kind}:{absolute_model(folder)}"
    program, _, function = spec.rpartition(":")
    return f"{absolute(program)}:{function}" if colon else spec


# --------------------------------------------------------------------------------------------------
# Rewards of a batch
# --------------------------------------------------------------------------------------------------


@dataclass
class RewardMix:
    """What a sample earns: a weighted sum of sources, chosen by the label of its row."""

    sources: list[Source]
    recipe: dict[str, dict[str, float]]  # label -> name of a source -> weight; "*": other labels
    args: RewardArgs
    combiner: Callable | None = None  # {name: rewards} -> rewards, in place of the sum

    def model_sources(self) -> list[Source]:
        """Those that the script has to load."""
        return [source for source in self.sources if source.kind in ("grm", "rm")]

    def weights(self, label: str | None) -> dict[str, float]:
        """Name of a source -> weight. Raises KeyError: a label that the recipe does not have."""
        return self.recipe[label if label in self.recipe else "*"]

    def pays(self, label: str | None) -> bool:
        """Whether rows of that label can earn something; others are only measured."""
        return self.combiner is not None or any(self.weights(label).values())

    def asks(self, kind: str, label: str | None) -> bool:
        """Whether a source of that kind scores rows of that label."""
        chosen = self.weights(label)
        return any(source.kind == kind and source.name in chosen for source in self.sources)

    def check_rows(self, rows: list[Prompt]) -> None:
        """Raises UserError: rows that cannot be scored, with their lines."""
        compare = set()
        for source in self.sources:
            asks_pairs = source.kind == "grm" and self.args.grm_question == "answers"
            if source.kind == "rule" or asks_pairs:
                compare.add(source.name)
        bad = []
        for row in rows:
            if row.label not in self.recipe and "*" not in self.recipe:
                known = ", ".join(self.recipe)
                bad.append(f"{row.source}: label {row.label!r} is not in --reward_recipe: {known}")
                continue
            names = [name for name in self.weights(row.label) if name in compare]
            if row.reference is None and names:
                bad.append(f"{row.source}: no reference answer, which {names[0]} compares with")
        if bad:
            problem = f"{len(bad)} of {len(rows)} rows cannot be scored"
            raise UserError("\n  ".join([problem, *bad[:5]]))

    def check_media(self, source: Source, processor: Processor, rows: list[Prompt]) -> None:
        """Raises ValueError: a row whose images or videos the source's model cannot see."""
        for row in rows:
            if row.images and source.name in self.weights(row.label):
                try:
                    check_media(processor, row.images)
                except ValueError as error:
                    raise ValueError(f"{row.source}: {error}") from error

    def score(self, batch: Batch, processor: Processor) -> None:
        """Fill rewards, turn_rewards, components (NaN where a source does not score a sample) and
        judgements of all samples, alike on every rank. With several sources, a component of one is
        named SOURCE/COMPONENT, and its reward is the component SOURCE.

        Raises:
            UserError: on every rank, when a source fails on any; the sample is in the message.
        """
        size, texts = len(batch), self.read_texts(batch, processor)
        indices = batch.prompt_index.tolist()
        weights = [self.weights(batch.prompts[index].label) for index in indices]
        by_source = {source.name: unscored(size) for source in self.sources}
        total = torch.zeros(size, dtype=torch.float64)  # (S,)
        components: dict[str, Tensor] = {}
        judgements = [""] * size
        for source in self.sources:
            used = [i for i, chosen in enumerate(weights) if source.name in chosen]  # n samples
            if not used:
                continue
            columns, notes = self.ask(source, batch, texts, used)
            shares = torch.tensor([weights[i][source.name] for i in used], dtype=torch.float64)
            by_source[source.name][used] = columns["reward"]  # (n,)
            total[used] += shares * columns.pop("reward")
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
        batch.turn_rewards = self.turn_rewards(batch, weights)
        batch.components = {name: values.float() for name, values in components.items()}
        batch.judgements = [text.strip() for text in judgements]

    def turn_rewards(self, batch: Batch, weights: list[dict[str, float]]) -> Tensor | None:
        """(N,) the part of the rewards that environments gave at the end of each turn. None without
        environments, and with a function that combines rewards: it does not say which part of its
        result belongs to a turn."""
        names = [source.name for source in self.sources if source.kind == "env"]
        if not names or self.combiner is not None:
            return None
        shares = [sum(chosen.get(name, 0.0) for name in names) for chosen in weights]  # (S,)
        shares = torch.tensor(shares, dtype=torch.float64).repeat_interleave(batch.lengths)
        return shares * given_at_turns(batch)

    def read_texts(self, batch: Batch, processor: Processor) -> list[list[str]]:
        """The response of every sample, turn by turn; [""] for those that this rank does not
        score."""
        texts = [[""] for _ in range(len(batch))]
        everything, rank = bool(self.model_sources()), dist.get_rank()
        indices = enumerate(batch.prompt_index.tolist())
        read = [i for i, index in indices if everything or batch.owners[index] == rank]
        for i, turns in zip(read, turn_texts(batch, read, processor)):
            texts[i] = turns
        return texts

    def ask(
        self, source: Source, batch: Batch, texts: list[list[str]], used: list[int]
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Columns (n,) float64 of the n samples ``used``: "reward" and components; and what a judge
        said of each. Models see whole conversations, functions the last turn as the response."""
        if source.ask is not None:
            return source.ask(batch, whole_texts(batch, texts), used)
        if source.kind == "env":
            rewards = batch.per_sample_sum(given_at_turns(batch))[used]  # (n,)
            return {"reward": rewards, "accuracy": env_accuracy(batch, rewards, used)}, []
        return self.call_function(source, batch, texts, used), []

    def call_function(
        self, source: Source, batch: Batch, texts: list[list[str]], used: list[int]
    ) -> dict[str, Tensor]:
        """Columns (n,) of a function, a rule or a server; each rank calls it for its samples."""
        indices, rank = batch.prompt_index[used].tolist(), dist.get_rank()
        mine = [k for k, index in enumerate(indices) if batch.owners[index] == rank]
        columns: dict[str, list[float]] = {}
        with distributed.raise_on_all_ranks():
            if mine:  # a rank may have no samples
                samples = read_samples(batch, texts, [used[k] for k in mine])
                columns = score_samples(source, samples, self.args)
        parts = [(k, part) for k, part in distributed.gather_objects([mine, columns]) if k]
        names = [sorted(part) for _, part in parts]
        if any(part != names[0] for part in names):
            raise UserError(f"--reward {source.spec}: components differ between calls: {names}")
        joined = {name: torch.zeros(len(used), dtype=torch.float64) for name in names[0]}
        for k, part in parts:
            for name, values in part.items():
                joined[name][k] = torch.tensor(values, dtype=torch.float64)
        return joined

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


def read_samples(batch: Batch, texts: list[list[str]], picks: list[int]) -> Samples:
    """What reward functions get of the samples ``picks``, of whose responses ``texts`` are the
    turns: the last one, and the whole conversation in their rows."""
    rows = [batch.prompts[int(batch.prompt_index[i])] for i in picks]
    columns = [dict(row.row) for row in rows]
    if batch.conversations:
        for i, row in zip(picks, columns):
            row["conversation"] = messages(batch.conversations[i], texts[i])
    return Samples(
        prompts=[row.text for row in rows],
        responses=[texts[i][-1] for i in picks],
        references=[row.reference for row in rows],
        labels=[row.label for row in rows],
        images=[list(row.images) for row in rows],
        rows=columns,
    )


def unscored(size: int) -> Tensor:
    """(S,) no reward for any sample."""
    return torch.full((size,), math.nan, dtype=torch.float64)


def given_at_turns(batch: Batch) -> Tensor:
    """(N,) float64, what environments gave, at the last own token of each turn."""
    rewards = torch.zeros(len(batch.tokens), dtype=torch.float64)
    for start, conversation in zip(batch.offsets.tolist(), batch.conversations):
        for end, reward in zip(conversation.ends, conversation.rewards):
            rewards[start + end - 1] = reward
    return rewards


def env_accuracy(batch: Batch, rewards: Tensor, used: list[int]) -> Tensor:
    """(n,) accuracies as the environment said them, 0 for samples that ended before it did. If it
    said none at all: 1 where it gave 1 or more."""
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
