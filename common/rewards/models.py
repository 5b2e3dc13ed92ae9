"""Models as sources of rewards: a generative judge, or a scalar reward model.

    build        the models that --reward names, on meta, and how they are asked
    JudgeModel   what a judge says of responses
    ScalarModel  what a value head says at their end

Every rank has all responses, and all ranks together ask a model about them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from common import distributed
from common.buffers import Batch, Conversation
from common.data.coordinates import restate
from common.data.loader import join_pixels, load_pixels
from common.data.processor import Processor, answer_frame
from common.data.rows import (
    MEDIA_MARKS,
    Prompt,
    check_media,
    kind_of,
    make_prompt,
    measure,
    user_text,
)
from common.data.transcripts import IMAGE_MARK, finished_text, image_sizes
from common.model.build import build_reader
from common.model.fsdp import onloaded
from common.model.policy import Critic, Policy, logprobs_of, values_of
from common.model.vlm import Modules, compute_features, tower_parameters
from common.ppo_flags import RewardArgs
from common.process import UserError
from common.rewards.functions import Scored
from common.rewards.judge import (
    ORDERS,
    JudgeSettings,
    doubtful_accuracy,
    encode_verdicts,
    framed_answer,
    judge_prompt,
    read_rubric,
)
from common.rewards.rules import parse_verdict
from common.rewards.scoring import RewardMix

Write = Callable[[Policy, Batch], Batch]  # the likeliest response to every question


def build(
    reward: RewardMix,
    rows: list[Prompt],
    actor: Policy,
    write: Write,
    offload: str,
    shares_features: bool,
) -> Modules:
    """The judges (grm:FOLDER) and scalar reward models (rm:FOLDER) among the sources of rewards by
    name, frozen and on meta; the sources learn how to ask them.

    Args:
        write: makes a judge write its critiques.
        offload: of --offload.
        shares_features: the actor's image features serve models that have its vision tower.

    Raises:
        UserError: on every rank alike: no such folder, no judge.json, a question the judge was not
            trained on, rows with images or videos that its family cannot see.
    """
    modules = {}
    # a judge is asked with the template_options of its judge.json
    own_template = replace(actor.processor.args, template_options="")
    for source in reward.sources:
        is_judge = source.kind == "grm"
        if not is_judge and source.kind != "rm":
            continue
        with distributed.raise_on_all_ranks(f"--reward {source.spec}: "):
            model, processor = build_reader(
                source.folder, actor.model, actor.processor, own_template, is_judge, shares_features
            )
            scored = [row for row in rows if source.spec in reward.weights(row.label)]
            has_rubrics = is_judge and reward.args.grm_question == "rubric"
            check_scored_rows(scored, processor, has_rubrics)
            module = Policy(model, processor) if is_judge else Critic(model)
            kind: Any = JudgeModel if is_judge else ScalarModel
            source.ask = kind(
                spec=source.spec,
                module=module.requires_grad_(False),
                processor=processor,
                shares_tower=not tower_parameters(model),
                args=reward.args,
                offload=offload,
                write=write,
            )
        modules[source.name] = module
    return modules


def check_scored_rows(rows: list[Prompt], processor: Processor, has_rubrics: bool) -> None:
    """Raises ValueError: a row whose images the processor's family cannot see, or without a rubric."""
    for row in rows:
        try:
            check_media(processor, row.images)
            if has_rubrics:
                read_rubric(row.row)
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error


WORTH = {"yes": 1.0, "no": 0.0, "A": 1.0, "B": 0.0, "tie": 0.5}  # of a verdict; a score is its own

# Where the images of a question come from: a prompt of the batch and, if its text has marks of
# images from an environment, a sample that saw these.
ImagesOf = tuple[int, int | None]


class Answer(NamedTuple):
    """What a reward model is asked about."""

    prompt_index: int
    sample: int | None  # the sample whose images from an environment the text has marks of
    text: str


@dataclass
class RewardModel:
    """A frozen model, which all ranks ask together about responses."""

    spec: str  # as in --reward
    module: Policy | Critic
    processor: Processor
    shares_tower: bool  # with the actor, whose image features serve
    args: RewardArgs
    offload: str
    write: Write

    def __call__(self, batch: Batch, used: list[int], texts: list[str]) -> Scored:
        """Columns (n,) for the n samples ``used`` with these ``texts``, and what a judge says of each.
        Equal answers share a result: asked separately, they would differ by rounding."""
        answers = []
        for index, i, text in zip(batch.prompt_index[used].tolist(), used, texts):
            answers.append(Answer(index, i if IMAGE_MARK in text else None, text))
        index_of = {answer: k for k, answer in enumerate(dict.fromkeys(answers))}  # K answers
        with onloaded(self.offload, self.module):
            columns, notes = self.ask(batch, list(index_of))
        picks = [index_of[answer] for answer in answers]
        columns = {name: column[picks] for name, column in columns.items()}
        return columns, [notes[k] for k in picks if notes]

    def ask(self, batch: Batch, answers: list[Answer]) -> Scored:
        """Columns (K,) of answers in the order of their prompts, and what a judge says of each."""
        raise NotImplementedError

    def with_their_images(self, batch: Batch, about: list[ImagesOf], asked: list[Prompt]) -> Batch:
        """Questions ``asked`` with their images. The same images are read and encoded once, by the rank
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
        grids = questions.prompts[k].grids  # as this model sees them
        pixels = load_pixels(replace(batch.prompts[index], grids=grids), self.processor)
        parts = [] if pixels is None else [pixels]
        family = self.processor.family.among(len(grids))
        for image in episode.images:
            patches, grid = family.patches(image)
            parts.append((patches, torch.tensor([grid])))
        if parts:
            questions.patches[k] = join_pixels(parts)

    def without_markup(self, text: str) -> str:
        """Text of a policy or its prompt, in which nothing may pass for a special token or the
        mark of an image."""
        for token in (*self.processor.reserved_tokens, *MEDIA_MARKS):
            text = text.replace(token, " ")
        return text

    def in_own_coordinates(self, text: str, row: Prompt, places: Sequence) -> str:
        """A response without markup and, where the row has regions, with boxes and points in this model's
        coordinates. ``places``: the `Place` of each image, as this model sees it."""
        if row.regions is not None:
            text = restate(text, row.regions.place, places[row.regions.image])
        return self.without_markup(text)


def show_replies(ask: dict, row: Prompt, count: int) -> dict:
    """A question with marks for the images of the row, and for the ``count`` that an environment has
    shown. Raises ValueError: a template that puts the response before the prompt's images."""
    text, in_front = ask["question"], ""
    if not any(mark in text for mark in MEDIA_MARKS):  # then they come first, as in a row
        in_front = "".join(f"<{kind_of(item)}>" for item in row.images)
    if max(map(text.rfind, MEDIA_MARKS)) > text.find(IMAGE_MARK):
        raise ValueError("the judge's template puts the response before the prompt's images")
    files = [f"(image {k + 1} of a reply)" for k in range(count)]
    images = ask["images"] + files  # their grids are known: no file is read
    return ask | {
        "question": in_front + text.replace(IMAGE_MARK, MEDIA_MARKS[0]),
        "images": images,
    }


class Asked(NamedTuple):
    """A question about one of several answers."""

    answer: int  # its index
    prompt: Prompt
    weight: float  # among the questions about that answer
    worth: Tensor  # (V,) of each verdict


@dataclass
class JudgeModel(RewardModel):
    """A generative judge (train_grm_vl.py). It is asked about each distinct response once, with a
    rubric once for each criterion, and about a pair in both orders.

    Its verdicts are worth: no 0, yes 1; a score itself; a lost pair 0, a tie 1/2, a won pair 1. A
    critique without a verdict is worth the lowest of them.
    """

    module: Policy

    def __post_init__(self):
        """Raises ValueError: the judge was not trained on the questions it is to be asked."""
        # headers are read once
        self.measure = functools.cache(functools.partial(measure, self.processor))
        self.settings = JudgeSettings.of(self.processor)
        self.kind = self.settings.question_to_ask(self.args.grm_question)
        self.verdicts = self.settings.verdicts(self.kind)
        values = [WORTH[v] if v in WORTH else float(v) for v in self.verdicts]
        worth = torch.tensor([values], dtype=torch.float64)
        # (orders, verdicts); in the swapped order the response is B
        self.worth = torch.cat([worth, 1 - worth]) if self.kind == "answers" else worth
        self.unread = float(worth.min())
        doubt = doubtful_accuracy(self.settings, self.kind)
        if doubt:
            distributed.say_once(
                f"warning: --reward {self.spec}: {doubt}; its rewards may mean nothing"
            )

    def ask(self, batch: Batch, answers: list[Answer]) -> Scored:
        asked = []  # Q questions
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            for k, answer in enumerate(answers):
                asked += self.questions_about(batch, k, answer)
        about = [answers[one.answer][:2] for one in asked]
        chances, notes = self.judge(batch, about, [one.prompt for one in asked])
        parsed = chances.sum(dim=1)  # (Q,)
        worth = torch.stack([one.worth for one in asked])  # (Q, V)
        values = (chances * worth).sum(dim=1) + (1 - parsed) * self.unread
        index = torch.tensor([one.answer for one in asked])
        weight = torch.tensor([one.weight for one in asked], dtype=torch.float64)
        columns = {"reward": index.bincount(weight * values) / index.bincount(weight)}
        if self.args.grm_mode == "critique":
            columns["parsed"] = index.bincount(parsed) / index.bincount()
        remarks = [[] for _ in answers]
        for (k, *_), note, value in zip(asked, notes, values):
            remarks[k].append(note)
            if self.kind == "rubric":
                nothing = torch.full_like(columns["reward"], math.nan)
                columns.setdefault(f"criterion_{len(remarks[k])}", nothing)[k] = value
        return columns, list(map(" | ".join, remarks))

    def questions_about(self, batch: Batch, number: int, answer: Answer) -> list["Asked"]:
        """The questions about an answer: one for each criterion or, of a pair, each order."""
        if self.kind == "rubric":
            questions = []
            for text, weight in read_rubric(batch.prompts[answer.prompt_index].row):
                prompt = self.question(batch, answer, criterion=self.without_markup(text))
                questions.append(Asked(number, prompt, weight, self.worth[0]))
            return questions
        return [
            Asked(number, self.question(batch, answer, order=order), 1.0, worth)
            for order, worth in zip(ORDERS, self.worth)
        ]

    def question(self, batch: Batch, answer: Answer, **further: str) -> Prompt:
        """A question about an answer and, for a pair, about the reference."""
        row, sizes = batch.prompts[answer.prompt_index], []
        if answer.sample is not None:
            sizes = image_sizes(batch.conversations[answer.sample])
        count = len(row.images) + len(sizes)
        family = self.processor.family.among(count)
        measured = [self.measure(item, count) for item in row.images]
        grids = [grid for grid, _ in measured] + [family.grid(*size) for size in sizes]
        prompt = user_text(row.messages, len(row.images), self.without_markup)
        responses = [self.in_own_coordinates(answer.text, row, [place for _, place in measured])]
        if self.kind == "answers":
            responses.append(self.without_markup(row.reference))
        ask = self.settings.ask(self.kind, prompt, responses, list(row.images), **further)
        if sizes:
            ask = show_replies(ask, row, len(sizes))
        options = {"grids": tuple(grids), "index": row.index, "source": row.source}
        return judge_prompt(self.processor, self.settings, ask, **options)

    def judge(
        self, batch: Batch, about: list[ImagesOf], prompts: list[Prompt]
    ) -> tuple[Tensor, list[str]]:
        """(Q, V) the probability of each verdict on each question, or 1 for the one that the mode
        picks; and a note on it."""
        questions = self.with_their_images(batch, about, prompts)
        if self.args.grm_mode == "critique":
            return self.read_critiques(questions)
        chances = self.verdict_logprobs(questions).softmax(dim=1)
        notes = []
        for row in chances.tolist():
            parts = [f"{verdict} {chance:.3f}" for verdict, chance in zip(self.verdicts, row)]
            notes.append("  ".join(parts))
        if self.args.grm_mode == "verdict":
            likeliest = chances.argmax(dim=1)
            chances = nn.functional.one_hot(likeliest, len(self.verdicts)).double()
        return chances, notes

    def read_critiques(self, questions: Batch) -> tuple[Tensor, list[str]]:
        """(Q, V) 1 where a critique that was not cut off ends in the verdict, and the critiques."""
        written = self.write(self.module, questions)
        self.check_logprobs(written.logprobs)
        critiques = self.processor.decode(written.split(written.tokens))
        chances = []
        for k, text in enumerate(critiques):
            text = finished_text(written, k, text)
            verdict = parse_verdict(text, self.verdicts, questions.prompts[k].text)
            chances.append([float(verdict == other) for other in self.verdicts])
        return torch.tensor(chances, dtype=torch.float64), critiques

    def verdict_logprobs(self, questions: Batch) -> Tensor:
        """(Q, V) log-prob of each verdict after each question."""
        verdicts = encode_verdicts(self.processor, self.verdicts)
        candidates = questions.with_targets([verdicts] * len(questions.prompts))
        logprobs = logprobs_of(self.module, candidates)
        self.check_logprobs(logprobs)
        return candidates.per_sample_sum(logprobs.double()).view(-1, len(verdicts))

    def check_logprobs(self, logprobs: Tensor) -> None:
        """Raises UserError. The likeliest of NaN would be the first verdict."""
        if not logprobs.isfinite().all():
            raise UserError(
                f"--reward {self.spec}: the judge's log-probs are not finite; check its weights for"
                " NaN or infinity"
            )


@dataclass
class ScalarModel(RewardModel):
    """A scalar reward model. Its reward is read where AutoModelForSequenceClassification reads it: at the
    last token of the chat, as the template writes it, that is not padding."""

    module: Critic

    def ask(self, batch: Batch, answers: list[Answer]) -> Scored:
        frame = answer_frame(self.processor)
        padding = self.processor.config.get_text_config().pad_token_id
        prompts, targets = {}, {}  # by their number
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            for index in dict.fromkeys(answer.prompt_index for answer in answers):
                row = batch.prompts[index]
                prompts[index] = make_prompt(self.processor, row.messages, row.images)
        for index, _, text in answers:
            text = self.in_own_coordinates(text, batch.prompts[index], prompts[index].places)
            rest = framed_answer(self.processor, frame, text) + frame.after
            target = self.processor.ids_behind(frame.head, rest).tolist()
            while target and target[-1] == padding:
                target.pop()
            # A value is read where a token is predicted: with one token more, at the last one, too.
            targets.setdefault(index, []).append(torch.tensor([*target, frame.end]))
        about: list[ImagesOf] = [(index, None) for index in prompts]
        questions = self.with_their_images(batch, about, list(prompts.values()))
        candidates = questions.with_targets(list(targets.values()))
        values = values_of(self.module, candidates)
        return {"reward": values[candidates.offsets[1:] - 1].double()}, []  # (K,)
