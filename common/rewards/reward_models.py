"""Models as sources of rewards: a generative judge, or a scalar reward model.

    build        the models that --reward names, on meta, and how they are asked
    JudgeModel   what a judge says of responses
    ScalarModel  what a value head says at the end of responses

Every rank has all responses, and all ranks together ask a model about them.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed, losses
from common.buffers import Batch
from common.data.loader import load_pixels
from common.data.processor import Processor, answer_frame
from common.data.responses import framed_answer
from common.data.rows import MEDIA_MARKS, Prompt, check_media, make_prompt, measure, user_text
from common.data.transcripts import as_text, finished_text, turn_texts
from common.ground.files import UserError
from common.model.build import build_reader
from common.model.fsdp import on_device
from common.model.policy import Critic, Policy, logprobs_of, values_of
from common.model.vlm import Modules, compute_features, tower_parameters
from common.rewards.judgements import JudgeSettings, encode_verdicts, read_rubric
from common.rewards.rules import parse_verdict, with_opened_thought, without_thoughts
from common.rewards.sources import RewardArgs, RewardMix, Scores

Write = Callable[[Policy, Batch], Batch]  # the likeliest response to every question


def build(
    reward: RewardMix,
    rows: list[Prompt],
    actor: Policy,
    write: Write,
    offload: str,
) -> Modules:
    """The judges (grm:FOLDER) and scalar reward models (rm:FOLDER) among the sources of rewards by
    name, frozen and on meta; the sources learn how to ask them.

    Args:
        write: makes a judge write its critiques.
        offload: of --offload.

    Raises:
        UserError: on every rank alike: no such folder, a question that a judge cannot be asked, rows
            that it cannot be asked about.
    """
    modules = {}
    # a judge is asked with the template_options of its judge.json
    own_template = replace(actor.processor.args, template_options="")
    for source in reward.sources:
        if source.kind not in ("grm", "rm"):
            continue
        is_judge, folder = source.kind == "grm", source.spec.partition(":")[2]
        with distributed.raise_on_all_ranks(f"--reward {source.spec}: "):
            model, processor = build_reader(
                folder, actor.model, actor.processor, own_template, is_judge
            )
            if is_judge:
                judge = Policy(model, processor)
                scorer = JudgeModel(source.spec, judge, processor, offload, reward.args, write)
            else:
                scorer = ScalarModel(source.spec, Critic(model), processor, offload)
            scorer.module.requires_grad_(False)
            scorer.check_rows(reward.rows_of(source, rows))
        source.score, modules[source.name] = scorer, scorer.module
    opponents, judges = reward.args.grm_opponents, [source.score for source in reward.sources]
    if opponents and not any(isinstance(each, JudgeModel) and each.opponents for each in judges):
        raise UserError(
            f"--grm_opponents {opponents} needs a judge of pairs: a grm:FOLDER among the rewards, whose "
            'judge.json has the verdicts of "answers", or any with --grm_question answers'
        )
    return modules


WORTH = {"yes": 1.0, "no": 0.0, "A": 1.0, "B": 0.0, "tie": 0.5}  # of a verdict; a score is its own

# How far a model's logits are off, as a share of their size. For float32 this is more than its rounding: a
# judge that tells two answers apart by a thousandth of a nat has no opinion.
LOGIT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2**-8}
VERDICT_LOGIT = 10.0  # the usual size of a verdict's logit
CONSISTENT = 0.2  # share of pairs; verdicts that are drawn at random agree in a third of them

Answer = tuple[int, str]  # a prompt of the batch, and what is said of it


class Opinions(NamedTuple):
    """What a model says of K answers."""

    columns: dict[str, Tensor]  # (K,) each: "reward" and components
    noise: dict[str, Tensor]  # (K,) by column: smaller differences are rounding of the model
    notes: list[str] = []  # of a judge, on each answer


@dataclass
class RewardModel:
    """A frozen model, which all ranks ask together about responses."""

    spec: str  # as in --reward
    module: Policy | Critic
    processor: Processor
    offload: str

    def __post_init__(self):
        """Raises UserError: a judge.json that cannot be used."""
        self.settings = JudgeSettings.of(self.processor)

    @property
    def logit_error(self) -> float:
        """How far the model's logits are off, as a share of their size."""
        return LOGIT_ERROR[self.module.model.setup.dtype]

    def check_rows(self, rows: list[Prompt]) -> None:
        """Raises UserError: rows about which the model cannot be asked."""
        for row in rows:
            try:
                self.check_row(row)
            except UserError as error:
                raise UserError(f"{row.source}: {error}") from error

    def check_row(self, row: Prompt) -> None:
        """Raises UserError: images or clips that the model's family does not take."""
        check_media(self.processor, row.images)

    def __call__(self, batch: Batch, used: list[int], policy: Processor) -> Scores:
        """What the model says of the samples ``used``, whole conversations. Equal answers share a result:
        asked separately, they would differ by rounding. Answers whose rewards differ by rounding alone
        get their mean: an estimator that divides by a spread would make advantages of the noise."""
        texts = self.whole_texts(batch, used, policy)
        answers = list(zip(batch.prompt_index[used].tolist(), texts))
        index_of = {answer: k for k, answer in enumerate(dict.fromkeys(answers))}  # K answers
        with on_device(self.offload, self.module):
            opinions = self.ask(batch, list(index_of))
        prompt = torch.tensor([index for index, _ in index_of])  # (K,)
        picks = [index_of[answer] for answer in answers]
        columns = {}
        for name, column in opinions.columns.items():
            if name in opinions.noise:
                # all that were asked about are compared, too: cpgd divides by their spread
                for compared in (torch.zeros_like(prompt), prompt):
                    column = losses.level(column, compared, opinions.noise[name])
            columns[name] = column[picks]
        return Scores(used, columns, notes=[opinions.notes[k] for k in picks if opinions.notes])

    def whole_texts(self, batch: Batch, used: list[int], policy: Processor) -> list[str]:
        """The responses of the samples ``used`` as one text each; conversations include the replies of
        environments."""
        turns = turn_texts(batch, used, policy)
        if not self.settings.reads_thoughts:
            prompts = [batch.prompts[index].text for index in batch.prompt_index[used].tolist()]
            turns = [
                [without_thoughts(with_opened_thought(prompt, text)) for text in texts]
                for prompt, texts in zip(prompts, turns)
            ]
        if not batch.conversations:
            return [texts[-1] for texts in turns]
        return [as_text(batch.conversations[i], texts) for i, texts in zip(used, turns)]

    def ask(self, batch: Batch, answers: list[Answer]) -> Opinions:
        """The model's opinions of answers, which are in the order of their prompts."""
        raise NotImplementedError

    def with_their_images(self, batch: Batch, about: list[int], prompts: list[Prompt]) -> Batch:
        """Questions about prompts of the batch, with the images of those. The images of a prompt are read
        and encoded once, by the rank that has them."""
        owners = [batch.owners[index] for index in about]
        questions = Batch(prompts=prompts, draws=list(range(len(prompts))), owners=owners)
        first = {index: about.index(index) for index in dict.fromkeys(about)}
        # with the actor, whose features serve
        shares_tower = not tower_parameters(self.module.model)
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            for index, k in first.items():
                if shares_tower and index in batch.features:
                    questions.features[k] = batch.features[index]
                elif not shares_tower and owners[k] == dist.get_rank():
                    pixels = load_pixels(prompts[k], self.processor)
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


def rivals(siblings: list[str], text: str, count: int) -> list[str]:
    """The ``count`` answers to a prompt that follow the answer ``text``, in a circle."""
    start = siblings.index(text) + 1
    return (siblings[start:] + siblings[: start - 1])[:count]


def same_in_both_orders(chances: Tensor, worth: Tensor) -> float:
    """How often the likeliest verdict, of chances (Q, V), is worth as much in both orders of a pair, whose
    questions follow each other; a pair of which one was not read is not the same."""
    best = chances.argmax(dim=1, keepdim=True)
    values = worth.gather(1, best).where(chances.gather(1, best) > 0, torch.nan)  # (Q, 1)
    first, second = values.view(-1, 2).unbind(1)
    return float((first == second).double().mean())


class Subject(NamedTuple):
    """What a question is about."""

    index: int  # of a prompt of the batch
    responses: tuple[str, ...]  # one, or the two of a pair
    criterion: str = ""


class Question(NamedTuple):
    """A question about one of several answers. Two rivals share theirs, which are asked once."""

    answer: int  # its number
    subject: Subject
    weight: float  # among the questions about that answer
    worth: Tensor  # (V,) of each verdict


@dataclass
class JudgeModel(RewardModel):
    """A generative judge: an export of train_grm_vl.py, or any model. It is asked about each distinct
    response once; with a rubric once for each criterion, and about a response beside the reference answer,
    or beside each of its --grm_opponents, in both orders.

    Its verdicts are worth: no 0, yes 1; a score itself; a lost pair 0, a tie 1/2, a won pair 1. A
    critique without a verdict is worth the lowest of them.
    """

    module: Policy
    args: RewardArgs
    write: Write

    def __post_init__(self):
        """Raises UserError: the judge was not trained on the questions it is to be asked."""
        super().__post_init__()
        # headers are read once
        self.measure = functools.cache(functools.partial(measure, self.processor))
        wanted = self.args.grm_question
        if self.args.grm_opponents and wanted == "auto" and "answers" in self.settings.verdicts:
            wanted = "answers"
        self.kind = self.settings.kind_to_ask(wanted)
        self.opponents = self.args.grm_opponents if self.kind == "answers" else 0
        self.was_asked = False
        self.tell_position(self.settings.position_consistency, "in its last evaluation")
        self.verdicts = self.settings.known_verdicts(self.kind)
        values = [WORTH[v] if v in WORTH else float(v) for v in self.verdicts]
        self.worth = torch.tensor(values, dtype=torch.float64)  # (V,)

    def tell_position(self, share: float | None, when: str) -> None:
        """Warn of a judge of pairs that goes by their order: its verdicts in both orders cancel out."""
        if self.kind == "answers" and share is not None and share < CONSISTENT:
            distributed.say_once(
                f"warning: --reward {self.spec}: {when} the judge had the same verdict in both orders for "
                f"{share:.0%} of the pairs; it goes by position, and its rewards are noise"
            )

    def check_row(self, row: Prompt) -> None:
        """Raises UserError: it also lacks the rubric, or the reference answer, of its questions."""
        super().check_row(row)
        if self.kind == "rubric":
            read_rubric(row.row)
        if self.kind == "answers" and row.reference is None and not self.opponents:
            raise UserError(
                "no reference answer to compare a response with (--grm_opponents compares it with other "
                "responses instead)"
            )

    def ask(self, batch: Batch, answers: list[Answer]) -> Opinions:
        questions = self.questions(batch, answers)  # Q of them
        if not questions:  # no answer has a rival
            half = torch.full((len(answers),), 0.5, dtype=torch.float64)
            return Opinions({"reward": half}, noise={})
        chances, notes = self.judge_once(batch, questions)
        parsed = chances.sum(dim=1)  # (Q,)
        worth = torch.stack([question.worth for question in questions])  # (Q, V)
        if self.kind == "answers" and not self.was_asked:
            self.was_asked = True
            self.tell_position(same_in_both_orders(chances, worth), "in the first rollout")
        values = (chances * worth).sum(dim=1) + (1 - parsed) * self.worth.min()
        about = torch.tensor([question.answer for question in questions])
        weight = torch.tensor([question.weight for question in questions], dtype=torch.float64)

        def sums(values: Tensor) -> Tensor:  # (Q,) -> (K,)
            return about.bincount(values, minlength=len(answers))

        # an answer without a rival, which nothing is asked about, earns a half
        columns = {"reward": (sums(weight * values) / sums(weight)).nan_to_num(0.5)}
        if self.args.grm_mode == "critique":
            columns["parsed"] = sums(parsed) / sums(torch.ones_like(weight))
        remarks = [[] for _ in answers]
        for question, note, value in zip(questions, notes, values):
            remarks[question.answer].append(note)
            if self.kind == "rubric":
                name = f"criterion_{len(remarks[question.answer])}"
                nothing = torch.full_like(columns["reward"], math.nan)
                columns.setdefault(name, nothing)[question.answer] = value
        share = (sums(weight.square()).sqrt() / sums(weight)).nan_to_num(0.0)
        noise = self.noise_of(columns, share)
        return Opinions(columns, noise, list(map(" | ".join, remarks)))

    def noise_of(self, columns: dict[str, Tensor], share: Tensor) -> dict[str, Tensor]:
        """(K,) of the columns of expected verdicts, how far they may differ by rounding. Where log-probs
        are off by e, a probability is by e / 4, and a difference of two by twice that; the errors of an
        answer's questions leave the ``share`` (K,) of that in their mean. A verdict that is written has
        no rounding."""
        if self.args.grm_mode == "critique":
            return {}
        reach = float(self.worth.max() - self.worth.min())
        single = 2 * reach * VERDICT_LOGIT * self.logit_error / 4
        noise = {name: torch.full_like(share, single) for name in columns}
        return noise | {"reward": single * share}

    def questions(self, batch: Batch, answers: list[Answer]) -> list[Question]:
        """The questions about all answers, those about one side by side."""
        siblings = {}  # the answers to a prompt
        for index, text in answers:
            siblings.setdefault(index, []).append(text)
        questions = []
        for k, (index, text) in enumerate(answers):
            row, response = batch.prompts[index], self.without_markup(text)
            if self.kind == "answers":
                others = [row.reference or ""]
                if self.opponents:
                    others = rivals(siblings[index], text, self.opponents)
                for other in map(self.without_markup, others):
                    left, right = (
                        Subject(index, (response, other)),
                        Subject(index, (other, response)),
                    )
                    questions.append(Question(k, left, 1.0, self.worth))
                    questions.append(Question(k, right, 1.0, 1 - self.worth))
            elif self.kind == "rubric":
                for criterion, weight in read_rubric(row.row):
                    subject = Subject(index, (response,), self.without_markup(criterion))
                    questions.append(Question(k, subject, weight, self.worth))
            else:
                questions.append(Question(k, Subject(index, (response,)), 1.0, self.worth))
        return questions

    def judge_once(self, batch: Batch, questions: list[Question]) -> tuple[Tensor, list[str]]:
        """`judge` of all questions, equal ones asked once."""
        distinct = dict.fromkeys(question.subject for question in questions)
        number_of = {subject: number for number, subject in enumerate(distinct)}
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            prompts = [self.question(batch.prompts[one.index], one) for one in distinct]
        chances, notes = self.judge(batch, [one.index for one in distinct], prompts)
        numbers = [number_of[question.subject] for question in questions]
        return chances[numbers], [notes[number] for number in numbers]

    def question(self, row: Prompt, subject: Subject) -> Prompt:
        """A question about responses to a row."""
        grids = tuple(self.measure(item, len(row.images))[0] for item in row.images)
        prompt = user_text(row.messages, len(row.images), self.without_markup)
        return make_prompt(
            self.processor,
            self.settings.question(self.kind, prompt, subject.responses, subject.criterion),
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
        numbers = range(len(questions.prompts))
        candidates = questions.with_responses(itertools.product(numbers, verdicts))
        logprobs = logprobs_of(self.module, candidates)
        self.check_logprobs(logprobs)
        sums = losses.sum_per_sample(logprobs.double(), candidates.own_lengths)
        return sums.view(-1, len(verdicts))

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

    def ask(self, batch: Batch, answers: list[Answer]) -> Opinions:
        frame = answer_frame(self.processor)
        padding = self.processor.config.get_text_config().pad_token_id
        prompts, endings = {}, []
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            for index in dict.fromkeys(index for index, _ in answers):
                row = batch.prompts[index]
                prompts[index] = make_prompt(self.processor, row.messages, row.images)
        number = {index: k for k, index in enumerate(prompts)}  # of a chat
        for index, text in answers:
            rest = framed_answer(self.processor, frame, self.without_markup(text)) + frame.after
            ending = self.processor.ids_behind(frame.head, rest).tolist()
            while ending and ending[-1] == padding:
                ending.pop()
            # A value is read where a token is predicted: with one token more, at the last one, too.
            endings.append((number[index], torch.tensor([*ending, frame.end])))
        questions = self.with_their_images(batch, list(prompts), list(prompts.values()))
        candidates = questions.with_responses(endings)
        values = values_of(self.module, candidates)[candidates.offsets[1:] - 1].double()  # (K,)
        return Opinions({"reward": values}, {"reward": 2 * self.logit_error * values.abs()})
