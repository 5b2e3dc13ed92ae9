"""Models as sources of rewards: a generative judge, or a scalar reward model.

Every rank has all responses, and all ranks together ask a model about them. The script builds the
models, and hands over how they score and write.
"""

import functools
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from PIL import Image
from torch import Tensor

from common import distributed
from common.buffers import Batch, Conversation
from common.data.loader import PromptLoader, join_pixels, load_pixels
from common.data.processor import Processor
from common.data.rows import (
    PLACES,
    Prompt,
    check_media,
    kind_of,
    make_prompt,
    media_grid,
    question_text,
)
from common.distributed import UserError
from common.flags import DataArgs, RewardArgs
from common.model.forward import compute_features
from common.model.fsdp import onloaded
from common.rewards.accuracy import doubtful_accuracy
from common.rewards.judge import (
    answer_frame,
    encode_target,
    encode_verdicts,
    format_template,
    judge_prompt,
    judge_question,
)
from common.rewards.rules import parse_verdict
from common.rewards.transcripts import PICTURE, picture_sizes


def without_markup(text: str, processor: Processor) -> str:
    """Text of a policy or its prompt, for a question: nothing in it may pass for a special token or
    an image place."""
    for token in (*processor.reserved_tokens, *PLACES):
        text = text.replace(token, " ")
    return text


@dataclass
class RewardModel:
    """A frozen model that is asked about responses by all ranks together."""

    spec: str  # as in --reward
    module: nn.Module
    processor: Processor
    shares_tower: bool  # with the actor, whose image features serve
    offload: str  # --offload
    data: DataArgs

    @contextmanager
    def about(self, row: Prompt):
        """A ValueError about a row becomes a UserError that names the model and the row. Every rank
        raises it alike."""
        try:
            yield
        except ValueError as error:
            raise UserError(f"--reward {self.spec}: {row.source}: {error}") from error

    def with_pictures(self, batch: Batch, indices: list[int], asked: list[Prompt]) -> Batch:
        """Questions ``asked`` about the pictures of the prompts ``indices``. The features of a
        picture are computed once, however many questions there are about it."""
        owners, features = dict(enumerate(batch.owners)), batch.features
        if not self.shares_tower:
            one_of = dict(zip(indices, asked))  # all questions about a prompt have its pictures
            with PromptLoader(self.processor, replace(self.data, on_bad_row="error")) as loader:
                pictures = loader.collect(*loader.submit(list(one_of.values()), list(one_of)))
            compute_features(self.module.model, pictures)
            owners = dict(zip(one_of, pictures.owners))
            found = pictures.features
            features = {index: found[k] for k, index in enumerate(one_of) if k in found}
        return Batch(
            prompts=asked,
            prompt_ids=list(range(len(asked))),
            owners=[owners[index] for index in indices],
            features={k: features[index] for k, index in enumerate(indices) if index in features},
        )

    def with_replies(self, batch: Batch, keys: list["Question"], asked: list[Prompt]) -> Batch:
        """Questions ``asked`` about pictures of the batch's prompts and of environments. Each has
        features of its own, on the rank of its sample."""
        owners = [batch.owners[key.prompt_index] for key in keys]
        questions = Batch(prompts=asked, prompt_ids=list(range(len(asked))), owners=owners)
        with distributed.raise_on_all_ranks(f"--reward {self.spec}: "):
            for k, (index, _, _, shown) in enumerate(keys):
                if owners[k] != dist.get_rank():
                    continue
                said = batch.conversations[shown] if shown is not None else Conversation()
                if self.shares_tower:
                    parts = [batch.features.get(index), said.features]
                    parts = [part for part in parts if part is not None]
                    if parts:
                        questions.features[k] = torch.cat(parts, dim=1)
                    continue
                pixels = self.pixels_of(batch.prompts[index], said.pictures)
                if pixels is not None:
                    questions.patches[k] = pixels
        compute_features(self.module.model, questions)
        return questions

    def pixels_of(self, row: Prompt, shown: list[Image.Image]) -> tuple[Tensor, Tensor] | None:
        """Patches and grids of a row's pictures and then of others, as this model sees them; None
        without any."""
        family = self.processor.family
        grids = tuple(media_grid(family, item) for item in row.images)
        pixels = load_pixels(replace(row, grids=grids), self.processor)
        found = [pixels] if pixels is not None else []
        for picture in shown:
            patches, grid = family.patches(picture)
            found.append((patches, torch.tensor([grid])))
        return join_pixels(found) if found else None


class Question(NamedTuple):
    """What a judge is asked about a response; ``shown``: the sample whose pictures it holds."""

    prompt_index: int
    text: str
    order: str
    shown: int | None


def place_replies(ask: dict, row: Prompt, count: int) -> dict:
    """A question with places for the pictures of the row, and for the ``count`` that an environment
    has shown. Raises ValueError: a template that puts the response before the prompt's pictures."""
    text, own = ask["question"], ""
    if not any(place in text for place in PLACES):  # as in a row that does not say where
        own = "".join(f"<{kind_of(item)}>" for item in row.images)
    if max(map(text.rfind, PLACES)) > text.find(PICTURE):
        raise ValueError("the judge's template puts the response before the prompt's pictures")
    files = [f"(picture {k + 1} of a reply)" for k in range(count)]
    images = ask["images"] + files  # their grids are known: no file is read
    return ask | {"question": own + text.replace(PICTURE, PLACES[0]), "images": images}


@dataclass
class Judge(RewardModel):
    """A generative judge (train_grm_vl.py). It looks at each distinct response once; next to the
    reference answer in both orders.

    Its verdicts are worth: no 0, yes 1; a score itself; a lost pair 0, a tie 1/2, a won pair 1. A
    critique without a verdict is worth the lowest of them.
    """

    args: RewardArgs
    likelihoods: Callable[[Batch], Tensor]  # (N,) log-probs of all samples
    write: Callable[[Batch], Batch]  # the likeliest response to every prompt

    def __post_init__(self):
        """Raises ValueError: the judge was not trained on what it shall be asked."""
        self.settings = self.processor.files["judge"]
        self.kind = judge_question(self.settings, self.args.grm_question)
        learned = self.settings["kinds"][self.kind]
        self.template, self.verdicts = learned["template"], learned["verdicts"]
        worth = {"correct": [1.0, 0.0], "answers": [1.0, 0.0, 0.5]}.get(self.kind)
        given = torch.tensor(
            worth or [float(score) for score in self.verdicts], dtype=torch.float64
        )
        self.worth = {"given": given}  # of the verdicts, by order
        if self.kind == "answers":
            self.worth["swapped"] = 1 - given  # the response stands in place B
        doubt = doubtful_accuracy(self.settings, self.kind)
        if doubt and distributed.is_main():
            print(f"warning: --reward {self.spec}: {doubt}; its rewards may mean nothing", flush=True)

    def __call__(
        self, batch: Batch, texts: list[str], used: list[int]
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Columns (n,) of the n samples ``used``, and what the judge said of each; ``texts`` are
        all responses."""
        question_of: dict[Question, int] = {}
        asked_of: list[list[int]] = []  # questions of each sample
        for i in used:
            shown = i if PICTURE in texts[i] else None
            index = int(batch.prompt_index[i])
            keys = [Question(index, texts[i], order, shown) for order in self.worth]
            asked_of.append([question_of.setdefault(key, len(question_of)) for key in keys])
        prompts = self.questions(batch, list(question_of))
        with onloaded(self.module, self.offload):
            if any(key.shown is not None for key in question_of):
                questions = self.with_replies(batch, list(question_of), prompts)
            else:
                indices = [key.prompt_index for key in question_of]
                questions = self.with_pictures(batch, indices, prompts)
            if self.args.grm_mode == "critique":
                chances, notes = self.read_critiques(questions)
            else:
                chances, notes = self.weigh_verdicts(questions)
        # (questions, verdicts)
        values = torch.stack([self.worth[key.order] for key in question_of])
        parsed = chances.sum(dim=1)  # (questions,)
        points = (chances * values).sum(dim=1) + (1 - parsed) * values.min(dim=1).values
        places = torch.tensor(asked_of)  # (n, orders)
        columns = {"reward": points[places].mean(dim=1)}
        if self.args.grm_mode == "critique":
            columns["parsed"] = parsed[places].mean(dim=1)
        return columns, [" | ".join(notes[q] for q in own) for own in asked_of]

    def questions(self, batch: Batch, keys: list["Question"]) -> list[Prompt]:
        """The prompts of questions."""
        prompts: list[Prompt] = []
        grids: dict[int, tuple] = {}  # of the rows' media; headers are read once per prompt
        for index, text, order, shown in keys:
            row = batch.prompts[index]
            with self.about(row):
                if index not in grids:
                    check_media(self.processor, row.images)
                    family = self.processor.family
                    grids[index] = tuple(media_grid(family, item) for item in row.images)
                ask, more = self.question(row, text, order), ()
                if shown is not None:
                    sizes = picture_sizes(batch.conversations[shown])
                    ask = place_replies(ask, row, len(sizes))
                    more = tuple(self.processor.family.grid(*size) for size in sizes)
                prompts.append(
                    judge_prompt(
                        self.processor, ask, row.index, row.source, grids=grids[index] + more
                    )
                )
        return prompts

    def question(self, row: Prompt, response: str, order: str) -> dict:
        """Prompt, question and images, as in an entry of `read_judgement`."""
        plain = functools.partial(without_markup, processor=self.processor)
        prompt = question_text(row.messages, len(row.images), plain)
        pair = [plain(response), plain(row.reference or "")]
        if order == "swapped":
            pair.reverse()
        question = format_template(
            self.template,
            prompt=prompt,
            response=plain(response),
            response_a=pair[0],
            response_b=pair[1],
        )
        return {"prompt": prompt, "question": question, "images": list(row.images)}

    def read_critiques(self, questions: Batch) -> tuple[Tensor, list[str]]:
        """(questions, verdicts) 1 where a critique ends in the verdict, and the critiques."""
        written = self.write(questions)
        self.check_finite(written.logprobs)
        notes = self.processor.decode(written.split(written.tokens))
        rows = []
        for note in notes:
            said = parse_verdict(note, self.settings["which_answer"], self.verdicts)
            rows.append([float(verdict == said) for verdict in self.verdicts])
        return torch.tensor(rows, dtype=torch.float64), notes

    def weigh_verdicts(self, questions: Batch) -> tuple[Tensor, list[str]]:
        """(questions, verdicts) probabilities, or 1 for the likeliest verdict; and a note on the
        probabilities."""
        targets = encode_verdicts(self.processor, self.verdicts)
        candidates = questions.with_targets([targets] * len(questions.prompts))
        logprobs = self.likelihoods(candidates)
        self.check_finite(logprobs)
        totals = candidates.per_sample_sum(logprobs.double())
        chances = totals.view(-1, len(self.verdicts)).softmax(dim=1)
        notes = []
        for row in chances.tolist():
            said = [f"{verdict} {chance:.3f}" for verdict, chance in zip(self.verdicts, row)]
            notes.append("  ".join(said))
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

    values: Callable[[Batch], Tensor]  # (N,) of all samples, at the rows that predict their tokens

    def __call__(
        self, batch: Batch, texts: list[str], used: list[int]
    ) -> tuple[dict[str, Tensor], list[str]]:
        """The reward (n,) of the n samples ``used``; ``texts`` are all responses. Each distinct
        response is asked about once: rounding, which differs by row, would give equal responses a
        spread."""
        keys = [(int(batch.prompt_index[i]), texts[i]) for i in used]  # in the order of prompts
        place_of = {key: k for k, key in enumerate(dict.fromkeys(keys))}
        frame = answer_frame(self.processor)
        answers: dict[int, list[Tensor]] = {}  # by prompt
        for index, text in place_of:
            answer = encode_target(self.processor, frame, without_markup(text, self.processor))
            # Values stand at the rows that predict a token: one more, for the row of the end token.
            answers.setdefault(index, []).append(torch.cat([answer, answer[-1:]]))
        asked = []
        for index in answers:
            row = batch.prompts[index]
            with self.about(row):
                fields = {"index": row.index, "source": row.source}
                asked.append(make_prompt(self.processor, row.messages, row.images, **fields))
        with onloaded(self.module, self.offload):
            questions = self.with_pictures(batch, list(answers), asked)
            candidates = questions.with_targets(list(answers.values()))
            values = self.values(candidates)
        ends = values[candidates.offsets[1:] - 1].double()
        return {"reward": ends[[place_of[key] for key in keys]]}, []
