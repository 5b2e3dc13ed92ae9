"""Models as sources of rewards: a generative judge, or a scalar reward model.

    build        the models that --reward names, on meta, and how they are asked
    JudgeModel   what a judge says of responses
    ScalarModel  what a value head says at their end tokens

Every rank has all responses, and all ranks together ask a model about them.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from common import distributed
from common.buffers import Batch, Conversation
from common.data.loader import join_pixels, load_pixels
from common.data.processor import Processor
from common.data.rows import (
    PLACES,
    Prompt,
    check_media,
    kind_of,
    make_prompt,
    media_grid,
    user_text,
)
from common.distributed import UserError
from common.model import weights
from common.model.forward import compute_features, tower_parameters
from common.model.fsdp import onloaded
from common.rewards.accuracy import doubtful_accuracy
from common.rewards.functions import Source
from common.rewards.judge import (
    JudgeSettings,
    ORDERS,
    answer_frame,
    encode_target,
    encode_verdicts,
    judge_prompt,
)
from common.rewards.rules import parse_verdict
from common.rewards.scoring import RewardMix
from common.rewards.transcripts import IMAGE_MARK, image_sizes


@dataclass
class Script:
    """What the script lends to reward models: its modules, and how it computes with them."""

    actor: nn.Module
    args: Any  # its arguments
    policy: Callable  # (model, processor) -> a module that gives log-probs
    critic: Callable  # model -> a module with a value head
    logprobs: Callable  # (policy, batch) -> (N,) of all samples
    values: Callable  # (critic, batch) -> (N,) at the rows that predict the tokens
    write: Callable  # (policy, batch, args) -> the likeliest response to every prompt


def build(reward: RewardMix, rows: list[Prompt], script: Script) -> dict[str, nn.Module]:
    """The judges (grm:FOLDER) and scalar reward models (rm:FOLDER) among the sources of rewards by
    name, frozen and on meta; the sources learn how to ask them.

    Raises:
        UserError: on every rank alike: no such folder, no judge.json, a question the judge was not
            trained on, rows with images or videos that its family cannot see.
    """
    modules = {}
    for source in reward.sources:
        if source.kind in ("grm", "rm"):
            with distributed.raise_on_all_ranks(f"--reward {source.spec}: "):
                scored = [row for row in rows if source.spec in reward.weights(row.label)]
                source.ask = build_source(source, scored, script)
            modules[source.name] = source.ask.module
    return modules


def build_source(source: Source, rows: list[Prompt], script: Script) -> "RewardModel":
    """The model of a source that scores these rows."""
    args, is_judge = script.args, source.kind == "grm"
    whole = not args.teacher.student_images  # or the features of the actor are of damaged images
    model, processor = weights.build_reader(
        source.folder, script.actor, args.data, head=is_judge, shares=whole
    )
    for row in rows:
        try:
            check_media(processor, row.images)
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error
    module = script.policy(model, processor) if is_judge else script.critic(model)
    module.requires_grad_(False)
    kind = JudgeModel if is_judge else ScalarModel
    return kind(source.spec, module, processor, not tower_parameters(model), script)


class Answer(NamedTuple):
    """What a reward model is asked about."""

    prompt_index: int
    sample: int | None  # the sample whose images from an environment the text has marks of
    text: str


@dataclass
class RewardModel:
    """A frozen model that all ranks together ask about responses."""

    spec: str  # as in --reward
    module: nn.Module
    processor: Processor
    shares_tower: bool  # with the actor, whose image features serve
    script: Script

    def __call__(
        self, batch: Batch, used: list[int], texts: list[str]
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Columns (n,) of the n samples ``used`` with these ``texts``, and what a judge says of each.
        Each distinct answer to a prompt is asked about once: rounding, which differs by row, would
        give equal answers a spread."""
        keys = []
        for index, i, text in zip(batch.prompt_index[used].tolist(), used, texts):
            keys.append(Answer(index, i if IMAGE_MARK in text else None, text))
        place_of = {key: k for k, key in enumerate(dict.fromkeys(keys))}  # K answers
        with onloaded(self.module, self.script.args.update.offload):
            columns, notes = self.ask(batch, list(place_of))
        places = [place_of[key] for key in keys]
        columns = {name: column[places] for name, column in columns.items()}
        return columns, [notes[k] for k in places if notes]

    def ask(self, batch: Batch, answers: list[Answer]) -> tuple[dict[str, Tensor], list[str]]:
        """Columns (K,) of answers in the order of their prompts, and what a judge says of each."""
        raise NotImplementedError

    def with_images(
        self, batch: Batch, about: list[tuple[int, int | None]], asked: list[Prompt]
    ) -> Batch:
        """Questions ``asked``, each about (a prompt of the batch, the sample whose images from an
        environment it holds too, or None). The same images are read and encoded once, by the rank
        that has them."""
        owners = [batch.owners[index] for index, _ in about]
        questions = Batch(prompts=asked, prompt_ids=list(range(len(asked))), owners=owners)
        first = {}  # the first question with the same images
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            for k, images in enumerate(about):
                if first.setdefault(images, k) == k and owners[k] == dist.get_rank():
                    self.fill_images(questions, k, batch, *images)
        compute_features(self.module.model, questions)
        for k, images in enumerate(about):
            if first[images] in questions.features:
                questions.features[k] = questions.features[first[images]]
        return questions

    def fill_images(
        self, questions: Batch, k: int, batch: Batch, index: int, sample: int | None
    ) -> None:
        """Fill the features of question ``k``, or the patches if this model has a tower of its
        own."""
        episode = Conversation() if sample is None else batch.conversations[sample]
        if self.shares_tower:
            parts = [batch.features.get(index), episode.features]
            parts = [part for part in parts if part is not None]
            if parts:
                questions.features[k] = torch.cat(parts, dim=1)
            return
        row = batch.prompts[index]
        grids = questions.prompts[k].grids[: len(row.images)]  # as this model sees them
        pixels = load_pixels(replace(row, grids=grids), self.processor)
        parts = [] if pixels is None else [pixels]
        for image in episode.images:
            patches, grid = self.processor.family.patches(image)
            parts.append((patches, torch.tensor([grid])))
        if parts:
            questions.patches[k] = join_pixels(parts)

    def without_markup(self, text: str) -> str:
        """Text of a policy or its prompt, in which nothing may pass for a special token or an image
        place."""
        for token in (*self.processor.reserved_tokens, *PLACES):
            text = text.replace(token, " ")
        return text


def place_replies(ask: dict, row: Prompt, count: int) -> dict:
    """A question with places for the images of the row, and for the ``count`` that an environment
    has shown. Raises ValueError: a template that puts the response before the prompt's images."""
    text, in_front = ask["question"], ""
    if not any(place in text for place in PLACES):  # as in a row that does not say where
        in_front = "".join(f"<{kind_of(item)}>" for item in row.images)
    if max(map(text.rfind, PLACES)) > text.find(IMAGE_MARK):
        raise ValueError("the judge's template puts the response before the prompt's images")
    files = [f"(image {k + 1} of a reply)" for k in range(count)]
    images = ask["images"] + files  # their grids are known: no file is read
    return ask | {"question": in_front + text.replace(IMAGE_MARK, PLACES[0]), "images": images}


@dataclass
class JudgeModel(RewardModel):
    """A generative judge (train_grm_vl.py). It looks at each distinct response once; next to the
    reference answer in both orders.

    Its verdicts are worth: no 0, yes 1; a score itself; a lost pair 0, a tie 1/2, a won pair 1. A
    critique without a verdict is worth the lowest of them.
    """

    def __post_init__(self):
        """Raises ValueError: the judge was not trained on what it shall be asked."""
        self.args = self.script.args.reward
        # headers are read once
        self.read_grid = functools.cache(functools.partial(media_grid, self.processor.family))
        self.settings = JudgeSettings.of(self.processor)
        self.kind = self.settings.question_to_ask(self.args.grm_question)
        self.verdicts = self.settings.kinds[self.kind]["verdicts"]
        values = {"correct": [1.0, 0.0], "answers": [1.0, 0.0, 0.5]}.get(self.kind)
        worth = torch.tensor([values or list(map(float, self.verdicts))], dtype=torch.float64)
        # (orders, verdicts); where the orders are swapped the response stands in place B
        self.worth = torch.cat([worth, 1 - worth]) if self.kind == "answers" else worth
        doubt = doubtful_accuracy(self.settings, self.kind)
        if doubt and distributed.is_main():
            print(f"warning: --reward {self.spec}: {doubt}; its rewards may mean nothing", flush=True)

    def ask(self, batch: Batch, answers: list[Answer]) -> tuple[dict[str, Tensor], list[str]]:
        prompts, about = [], []
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            for answer in answers:
                prompts += self.prompts_about(batch, answer)
                about += [answer[:2]] * len(self.worth)
        questions = self.with_images(batch, about, prompts)
        if self.args.grm_mode == "critique":
            chances, notes = self.read_critiques(questions)
        else:
            chances, notes = self.weigh_verdicts(questions)
        orders, verdicts = self.worth.shape
        chances = chances.view(-1, orders, verdicts)
        parsed = chances.sum(dim=2)  # (K, orders)
        rewards = (chances * self.worth).sum(dim=2) + (1 - parsed) * self.worth.min(dim=1).values
        columns = {"reward": rewards.mean(dim=1)}
        if self.args.grm_mode == "critique":
            columns["parsed"] = parsed.mean(dim=1)
        parts = [notes[k : k + orders] for k in range(0, len(notes), orders)]
        return columns, list(map(" | ".join, parts))

    def prompts_about(self, batch: Batch, answer: Answer) -> list[Prompt]:
        """The questions about an answer, one in each order."""
        row, sizes = batch.prompts[answer.prompt_index], []
        if answer.sample is not None:
            sizes = image_sizes(batch.conversations[answer.sample])
        grids = list(map(self.read_grid, row.images))
        grids += [self.processor.family.grid(*size) for size in sizes]
        prompt = user_text(row.messages, len(row.images), self.without_markup)
        responses = [self.without_markup(answer.text)]
        if self.kind == "answers":
            responses.append(self.without_markup(row.reference))
        prompts = []
        for order in ORDERS[: len(self.worth)]:
            ask = self.settings.ask(self.kind, prompt, responses, list(row.images), order)
            if sizes:
                ask = place_replies(ask, row, len(sizes))
            options = {"grids": tuple(grids), "index": row.index, "source": row.source}
            prompts.append(judge_prompt(self.processor, self.settings, ask, **options))
        return prompts

    def read_critiques(self, questions: Batch) -> tuple[Tensor, list[str]]:
        """(questions, verdicts) 1 where a critique ends in the verdict, and the critiques."""
        written = self.script.write(self.module, questions, self.script.args)
        self.check_finite(written.logprobs)
        critiques = self.processor.decode(written.split(written.tokens))
        chances = []
        for text in critiques:
            verdict = parse_verdict(text, self.verdicts)
            chances.append([float(verdict == other) for other in self.verdicts])
        return torch.tensor(chances, dtype=torch.float64), critiques

    def weigh_verdicts(self, questions: Batch) -> tuple[Tensor, list[str]]:
        """(questions, verdicts) probabilities, or 1 for the likeliest verdict; and a note on the
        probabilities."""
        targets = encode_verdicts(self.processor, self.verdicts)
        candidates = questions.with_targets([targets] * len(questions.prompts))
        logprobs = self.script.logprobs(self.module, candidates)
        self.check_finite(logprobs)
        totals = candidates.per_sample_sum(logprobs.double())
        chances = totals.view(-1, len(self.verdicts)).softmax(dim=1)
        notes = []
        for row in chances.tolist():
            parts = [f"{verdict} {chance:.3f}" for verdict, chance in zip(self.verdicts, row)]
            notes.append("  ".join(parts))
        if self.args.grm_mode == "verdict":
            likeliest = chances.argmax(dim=1)
            chances = nn.functional.one_hot(likeliest, len(self.verdicts)).double()
        return chances, notes

    def check_finite(self, logprobs: Tensor) -> None:
        """Raises UserError. The likeliest of NaN would be the first verdict."""
        if not logprobs.isfinite().all():
            raise UserError(
                f"--reward {self.spec}: the judge's log-probs are not finite; check its weights for"
                " NaN or infinity"
            )


@dataclass
class ScalarModel(RewardModel):
    """A scalar reward model: what its head says at the end token of a response."""

    def ask(self, batch: Batch, answers: list[Answer]) -> tuple[dict[str, Tensor], list[str]]:
        frame = answer_frame(self.processor)
        targets: dict[int, list[Tensor]] = {}  # by prompt
        for index, _, text in answers:
            target = encode_target(self.processor, frame, self.without_markup(text))
            # Values stand at the rows that predict a token: one more, for the row of the end token.
            targets.setdefault(index, []).append(torch.cat([target, target[-1:]]))
        prompts, about = [], [(index, None) for index in targets]
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            for index in targets:
                row = batch.prompts[index]
                prompts.append(make_prompt(self.processor, row.messages, row.images))
        questions = self.with_images(batch, about, prompts)
        candidates = questions.with_targets(list(targets.values()))
        values = self.script.values(self.module, candidates)
        ends = values[candidates.offsets[1:] - 1].double()  # (K,)
        return {"reward": ends}, []
