"""Models as sources of rewards: a generative judge, or a scalar reward model.

    build        the models that --reward names, on meta, and how they are asked
    JudgeModel   what a judge says of responses
    ScalarModel  what a value head says at their end

Every rank has all responses, and all ranks together ask a model about them.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed
from common.buffers import Batch
from common.data.loader import load_pixels
from common.data.processor import Processor, answer_frame
from common.data.rows import MEDIA_MARKS, Prompt, check_media, make_prompt, measure, user_text
from common.data.transcripts import finished_text
from common.model.build import build_reader
from common.model.fsdp import onloaded
from common.model.policy import Critic, Policy, logprobs_of, values_of
from common.model.vlm import Modules, compute_features, tower_parameters
from common.ppo_flags import RewardArgs
from common.process import UserError
from common.rewards.functions import Scored
from common.rewards.judge import JudgeSettings, encode_verdicts, framed_answer, read_rubric
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


WORTH = {"yes": 1.0, "no": 0.0}  # of a verdict; a score is its own
POINTWISE = ("correct", "score", "rubric")  # questions about one response

Answer = tuple[int, str]  # a prompt of the batch, and what is said of it


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
        answers = list(zip(batch.prompt_index[used].tolist(), texts))
        index_of = {answer: k for k, answer in enumerate(dict.fromkeys(answers))}  # K answers
        with onloaded(self.offload, self.module):
            columns, notes = self.ask(batch, list(index_of))
        picks = [index_of[answer] for answer in answers]
        columns = {name: column[picks] for name, column in columns.items()}
        return columns, [notes[k] for k in picks if notes]

    def ask(self, batch: Batch, answers: list[Answer]) -> Scored:
        """Columns (K,) of answers in the order of their prompts, and what a judge says of each."""
        raise NotImplementedError

    def with_their_images(self, batch: Batch, about: list[int], asked: list[Prompt]) -> Batch:
        """Questions ``asked`` about prompts, with their images. Those of a prompt are read and encoded once,
        by the rank that has them."""
        owners = [batch.owners[index] for index in about]
        questions = Batch(prompts=asked, prompt_ids=list(range(len(asked))), owners=owners)
        first = {index: about.index(index) for index in about}
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            for index, k in first.items():
                if self.shares_tower and index in batch.features:
                    questions.features[k] = batch.features[index]
                elif not self.shares_tower and owners[k] == dist.get_rank():
                    row = replace(
                        batch.prompts[index], grids=asked[k].grids
                    )  # as this model sees them
                    pixels = load_pixels(row, self.processor)
                    if pixels is not None:
                        questions.patches[k] = pixels
        compute_features(self.module.model, questions)
        for k, index in enumerate(about):
            if first[index] in questions.features:
                questions.features[k] = questions.features[first[index]]
        return questions

    def without_markup(self, text: str) -> str:
        """Text of a policy or its prompt, in which nothing may pass for a special token or the
        mark of an image."""
        for token in (*self.processor.reserved_tokens, *MEDIA_MARKS):
            text = text.replace(token, " ")
        return text


@dataclass
class JudgeModel(RewardModel):
    """A generative judge (train_grm_vl.py). It is asked about each distinct response once, with a
    rubric once for each criterion.

    Its verdicts are worth: no 0, yes 1; a score itself. A critique without a verdict is worth the lowest
    of them.
    """

    module: Policy

    def __post_init__(self):
        """Raises ValueError: the judge was not trained on the questions it is to be asked."""
        # headers are read once
        self.measure = functools.cache(functools.partial(measure, self.processor))
        self.settings = JudgeSettings.of(self.processor)
        self.kind = self.args.grm_question
        if self.kind == "auto":  # the first pointwise one that it learned
            self.kind = next(filter(self.settings.verdicts.__contains__, POINTWISE), "correct")
        self.verdicts = self.settings.verdicts.get(self.kind)
        if self.verdicts is None:
            raise ValueError(
                f"the judge was not trained on questions of the kind {self.kind} (--grm_question);"
                f" judge.json names {', '.join(self.settings.verdicts) or 'none'}"
            )
        values = [WORTH[v] if v in WORTH else float(v) for v in self.verdicts]
        self.worth = torch.tensor(values, dtype=torch.float64)  # (V,)

    def ask(self, batch: Batch, answers: list[Answer]) -> Scored:
        asked, weights, index = [], [], []  # Q questions, their weights and answers
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            for k, (i, text) in enumerate(answers):
                criteria = [("", 1.0)]
                if self.kind == "rubric":
                    criteria = read_rubric(batch.prompts[i].row)
                for criterion, weight in criteria:
                    asked.append(self.question(batch.prompts[i], text, criterion))
                    weights.append(weight)
                    index.append(k)
        chances, notes = self.judge(batch, [answers[k][0] for k in index], asked)
        parsed = chances.sum(dim=1)  # (Q,)
        values = chances @ self.worth + (1 - parsed) * self.worth.min()
        of, weight = torch.tensor(index), torch.tensor(weights, dtype=torch.float64)
        columns = {"reward": of.bincount(weight * values) / of.bincount(weight)}
        if self.args.grm_mode == "critique":
            columns["parsed"] = of.bincount(parsed) / of.bincount()
        remarks = [[] for _ in answers]
        for k, note, value in zip(index, notes, values):
            remarks[k].append(note)
            if self.kind == "rubric":
                nothing = torch.full_like(columns["reward"], math.nan)
                columns.setdefault(f"criterion_{len(remarks[k])}", nothing)[k] = value
        return columns, list(map(" | ".join, remarks))

    def question(self, row: Prompt, text: str, criterion: str = "") -> Prompt:
        """A question about a response to a row."""
        grids = tuple(self.measure(item, len(row.images))[0] for item in row.images)
        prompt = user_text(row.messages, len(row.images), self.without_markup)
        question = self.settings.question(
            self.kind,
            [self.without_markup(text)],
            prompt=prompt,
            criterion=self.without_markup(criterion),
        )
        return make_prompt(
            self.processor,
            question,
            row.images,
            system_prompt=self.settings.instruction(prompt),
            grids=grids,
            index=row.index,
            source=row.source,
        )

    def judge(
        self, batch: Batch, about: list[int], prompts: list[Prompt]
    ) -> tuple[Tensor, list[str]]:
        """(Q, V) the probability of each verdict on each question, or 1 for the one that a critique
        gives; and a note on it."""
        questions = self.with_their_images(batch, about, prompts)
        if self.args.grm_mode == "critique":
            return self.read_critiques(questions)
        chances = self.verdict_logprobs(questions).softmax(dim=1)
        notes = []
        for row in chances.tolist():
            parts = [f"{verdict} {chance:.3f}" for verdict, chance in zip(self.verdicts, row)]
            notes.append("  ".join(parts))
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
            for index in dict.fromkeys(index for index, _ in answers):
                row = batch.prompts[index]
                prompts[index] = make_prompt(self.processor, row.messages, row.images)
        for index, text in answers:
            rest = framed_answer(self.processor, frame, self.without_markup(text)) + frame.after
            target = self.processor.ids_behind(frame.head, rest).tolist()
            while target and target[-1] == padding:
                target.pop()
            # A value is read where a token is predicted: with one token more, at the last one, too.
            targets.setdefault(index, []).append(torch.tensor([*target, frame.end]))
        questions = self.with_their_images(batch, list(prompts), list(prompts.values()))
        candidates = questions.with_targets(list(targets.values()))
        values = values_of(self.module, candidates)
        return {"reward": values[candidates.offsets[1:] - 1].double()}, []  # (K,)
