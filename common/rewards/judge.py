"""Judgement rows: questions, targets and verdicts.

    row      -> its kind, question, images, text, verdict; pairs in one order or both    read_judgement
    answer   -> label tokens, as generation would see them                               encode_target
    text     -> verdict                                                                  parse_verdict

A judgement is a question, which a template makes of a row, and a verdict. judge.json holds what is
needed to ask a judge in the words it was trained on.
"""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from common.buffers import EMPTY
from common.data.coordinates import write_marks
from common.data.processor import AnswerFrame, Processor, answer_frame
from common.data.rows import (
    MEDIA_MARKS,
    Example,
    Prompt,
    columns_of,
    make_prompt,
    media_list,
    message_turns,
    read_rows,
    user_text,
)
from common.files import check_form, number_as_text
from common.flags import DataArgs
from common.rewards.rules import opens_thought, parse_verdict

# --------------------------------------------------------------------------------------------------
# Kinds of judgements, judge.json
# --------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of judgement: which rows ask it, how, and what a judge may say."""

    form: dict  # of a row, besides its prompt; the first entry tells the kind
    template: str  # in which braces hold columns of the row
    verdicts: list[str] = []  # of scores those of the training rows


TEXT = str | int | float
WON = ["A", "B", "tie"]
YES_NO = "End with <answer>yes</answer> or <answer>no</answer>."
WHO_WON = "End with <answer>A</answer>, <answer>B</answer> or <answer>tie</answer>."
KINDS = {
    "rubric": Kind(
        {"criterion": str, "response": TEXT, "correct": bool},
        "Question: {prompt}\nAnswer: {response}\nCriterion: {criterion}\n"
        f"Does the answer meet the criterion? {YES_NO}",
        ["yes", "no"],
    ),
    "score": Kind(
        {"score": int | float, "response": TEXT},
        "Question: {prompt}\nAnswer: {response}\n"
        "How good is the answer? End with <answer>its score</answer>.",
    ),
    "correct": Kind(
        {"correct": bool, "response": TEXT},
        f"Question: {{prompt}}\nAnswer: {{response}}\nIs the answer correct? {YES_NO}",
        ["yes", "no"],
    ),
    "answers": Kind(
        {"responses": [TEXT], "preferred": tuple(WON)},
        "Question: {prompt}\nAnswer A: {response_a}\nAnswer B: {response_b}\n"
        f"Which answer is better? {WHO_WON}",
        WON,
    ),
    "pictures": Kind(
        {"preferred": tuple(WON)},
        "Request: {prompt}\nPicture A: <image>\nPicture B: <image>\n"
        f"Which picture fits the request better? {WHO_WON}",
        WON,
    ),
    "response": Kind({"response": TEXT}, "{prompt}"),  # any text may be its verdict
}
BUILT_IN = {name: kind.template for name, kind in KINDS.items()}
JUDGE_FORM = {
    "system_instruction?": str,
    "templates?": {str: str},
    "verdicts?": {str: [str]},
}
PAIRS = ("pictures", "answers")
SWAPPED = {"A": "B", "B": "A"}
MAX_SCORES = 32  # different scores in the training rows, each a verdict
SIDES = re.compile(r"\{[AB]\}")  # in a critique that is shown in both orders
PLACEHOLDER = re.compile(r"\{\w+\}|<image>")


def check_templates(templates: dict[str, str]) -> None:
    """Raises ValueError: a template that lacks what its kind needs, which the built-in one has."""
    for kind, template in templates.items():
        needed = PLACEHOLDER.findall(BUILT_IN.get(kind, "{an unknown kind}"))
        if not {*needed} <= {*PLACEHOLDER.findall(template)}:
            raise ValueError(
                f"the template of {kind!r:.80} must hold {', '.join(needed)}: {template!r:.200}"
            )


def fill_in(template: str, columns: dict[str, str]) -> str:
    """A template with {name} replaced, in one pass: a value that holds braces stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda mark: columns.get(mark[1], mark[0]), template)


@dataclass
class JudgeSettings:
    """What judge.json holds: how a judge is asked, and what it answers."""

    system_instruction: str = ""
    templates: dict[str, str] = field(default_factory=dict)  # by kind
    verdicts: dict[str, list[str]] = field(default_factory=dict)  # of the kinds it was trained on
    template_options: dict = field(default_factory=dict)  # variables of the chat template

    @staticmethod
    def of(processor: Processor) -> "JudgeSettings":
        """Those of a checkpoint. Raises ValueError: judge.json holds what no judge can have."""
        saved = processor.files["judge"]
        check_form(saved, JUDGE_FORM, "judge.json")
        if saved.keys() - JudgeSettings.__annotations__:
            raise ValueError(f"judge.json is of another version: {', '.join(sorted(saved))}")
        check_templates(saved.get("templates") or {})
        return JudgeSettings(**saved)

    @staticmethod
    def to_train(
        processor: Processor, templates: dict[str, str] = {}, system_instruction: str = ""
    ) -> "JudgeSettings":
        """Those of a judge that is to be trained: what is given, else what the judge.json of its
        checkpoint says, else built in. Exports will hold this object.

        Raises ValueError: a template that lacks what its kind needs.
        """
        check_templates(templates)
        settings = JudgeSettings.of(processor)
        settings.system_instruction = system_instruction or settings.system_instruction
        settings.templates = BUILT_IN | settings.templates | templates
        processor.files["judge"] = vars(settings)
        return settings

    def note_training(self, rows: Iterable[Prompt]) -> None:
        """Note what the judge is trained on: kinds and verdicts of these rows, besides what it learned
        before. Raises ValueError: too many different scores."""
        trained = {(row.label, row.reference) for row in rows if row.label != "response"}
        for kind, _ in sorted(trained):
            scores = {verdict for other, verdict in trained if other == "score"}
            self.verdicts[kind] = KINDS[kind].verdicts or sorted(scores, key=float)
        if len(self.verdicts.get("score", [])) > MAX_SCORES:
            raise ValueError(f"--data: more different scores than {MAX_SCORES}; round them")

    def question(self, kind: str, responses: list[str], **columns: str) -> str:
        """A question about one response, or about two. An <answer> in a response becomes [answer], as a
        judge that quotes it would give a verdict."""
        told = [re.sub("<(/?answer)>", r"[\1]", response) for response in responses]
        columns |= {"response": told[0], "response_a": told[0], "response_b": told[-1]}
        return fill_in(self.templates[kind], columns)

    def instruction(self, prompt: str | list) -> str:
        """The judge's system message, which may quote the prompt."""
        return fill_in(self.system_instruction, {"prompt": user_text(message_turns(prompt))})

    def known_verdicts(self, kind: str | None) -> list[str]:
        """The verdicts that a judge knows on questions of a kind; none on a response."""
        return self.verdicts.get(kind or "", KINDS[kind].verdicts if kind in KINDS else [])

    def read_verdict(self, text: str, row: Prompt) -> str | None:
        """What a judgement says of a row; None if it cannot be read."""
        # Also the right verdict: a judge that was not trained on scores knows none of them.
        known = [*self.known_verdicts(row.label), row.reference or ""]
        verdict = parse_verdict(text, known, row.text)
        if not verdict and row.label == "response":
            verdict = parse_verdict(text, None, row.text)
        return verdict


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------

PROMPT_FIELDS = ("prompt", "question", "messages")
JUDGEMENT_COLUMNS = {
    *PROMPT_FIELDS,
    *itertools.chain(*(kind.form for kind in KINDS.values())),
    *"critique images videos source pair regions".split(),
}


class Judgement(NamedTuple):
    """A question and its right answer."""

    kind: str
    order: str  # of a pair: given or swapped
    instruction: str  # system message; empty: none
    question: str | list
    images: list
    text: str  # to learn
    verdict: str | None


def read_judgement(row: dict, settings: JudgeSettings, orders: str) -> list[Judgement]:
    """The questions of a row, one per order. Responses may be numbers in the file.

    Args:
        orders: both shows pairs as given and swapped, but not those whose critique does not write {A} and {B}
            for the names; given does not.
    Raises:
        ValueError: a row that is not a judgement.
    """
    kind = next((kind for kind in KINDS if next(iter(KINDS[kind].form)) in row), None)
    prompts = [row[field] for field in PROMPT_FIELDS if field in row]
    if kind is None or len(prompts) != 1:
        raise ValueError(
            "a row needs one prompt and a target: response, preferred, correct or score "
            f"(launch/convert.py reads rows of other systems); {columns_of(row)}"
        )
    prompt, images = prompts[0], media_list(row)
    check_form(row, KINDS[kind].form | {"critique?": str, "source?": str}, f"a row of {kind}")
    instruction = settings.instruction(prompt)
    responses = row.get("responses", [row.get("response", "")])
    responses = list(map(number_as_text, responses))
    if kind == "response":
        if not responses[0].strip() or "critique" in row:
            raise ValueError("a response alone is a text that is not empty, without a critique")
        verdict = parse_verdict(responses[0])
        return [Judgement(kind, "given", instruction, prompt, images, responses[0], verdict)]
    if not isinstance(prompt, str):
        raise ValueError(f"prompt must be a text in a row of {kind}")
    if kind in PAIRS and len(images if kind == "pictures" else responses) != 2:
        raise ValueError(f"a row of {kind} needs two of them; {columns_of(row)}")
    # What is judged has no images, whatever it says.
    responses = [re.sub("|".join(MEDIA_MARKS), " ", text) for text in responses]
    # Where the marks do not fit the images, `make_prompt` says what is wrong.
    if kind != "pictures" and sum(map(prompt.count, MEDIA_MARKS)) == len(images):
        prompt = user_text(message_turns(prompt), len(images))
    critique, right = row.get("critique") or "", verdict_of(row)
    # one that does not say {A} and {B} is of the order given
    both = kind in PAIRS and orders == "both" and (not critique or bool(SIDES.search(critique)))
    judgements = []
    for order in ("given", "swapped")[: 1 + both]:
        question = settings.question(
            kind, responses, prompt=prompt, criterion=row.get("criterion", "")
        )
        verdict = in_order(right, order)
        told = fill_in(critique, {side: in_order(side, order) for side in SWAPPED})
        text = f"{told}\n{with_verdict(verdict)}".lstrip()
        if "<answer>" in critique or parse_verdict(text) is None:
            raise ValueError(
                "a critique ends its thought, and has no <answer>, which is added to it: "
                f"{critique!r:.120}"
            )
        judgements.append(Judgement(kind, order, instruction, question, images, text, verdict))
        responses, images = responses[::-1], images[::-1] if kind == "pictures" else images
    return judgements


def verdict_of(row: dict) -> str:
    """The right verdict on a row as given. Raises ValueError: a score that is no finite number."""
    if "score" in row:
        score = row["score"]
        if not abs(score) < 1e300:  # an integer may be beyond floats
            raise ValueError(f"score must be a finite number, not {score}")
        return str(int(score)) if score == int(score) else f"{score:g}"
    return ("yes" if row["correct"] else "no") if "correct" in row else row["preferred"]


def in_order(verdict: str, order: str) -> str:
    """A verdict on a pair as given, when it is shown in this order; and the other way round."""
    return SWAPPED.get(verdict, verdict) if order == "swapped" else verdict


def with_verdict(verdict: str) -> str:
    """How a judgement ends."""
    return f"<answer>{verdict}</answer>"


def load_judgements(
    path: str,
    processor: Processor,
    settings: JudgeSettings,
    args: DataArgs,
    orders: str = "both",
    frame: AnswerFrame | None = None,
) -> list[Example]:
    """Rows of judgements. A response without <answer> has no reference, which some rewards need.

    Args:
        frame: of rows to imitate, which get the tokens of their targets; prompt and target have at
            most `--max_prompt_tokens` together.
    Raises:
        ValueError: see `load_prompts`.
    """
    limit = args.max_prompt_tokens

    def build(row: dict, fields: dict) -> list[Example]:
        examples = []
        for k, one in enumerate(read_judgement(row, settings, orders)):
            further = {"reference": one.verdict, "label": one.kind, "order": one.order}
            further |= fields | {"index": 2 * fields["index"] + k}
            prompt = make_prompt(
                processor, one.question, one.images, args, one.instruction, **further
            )
            text = write_marks(one.text, prompt.regions)
            target = EMPTY
            if frame is not None:
                processor.check_length("example", text, limit)
                target = encode_target(processor, frame, text)
                size = len(prompt.input_ids) + len(target)
                if size > limit:
                    raise ValueError(
                        f"example too long: {size} tokens, {len(target)} of them target; the limit"
                        f" is {limit}"
                    )
            examples.append(Example(prompt, target, text))
        return examples

    return list(itertools.chain(*read_rows(path, build, args, JUDGEMENT_COLUMNS)))


def load_responses(path: str, processor: Processor, args: DataArgs, limit: int) -> list[Example]:
    """Rows of a prompt and its response, of at most ``limit`` tokens together.

    Raises ValueError: see `load_prompts`.
    """
    args, frame = replace(args, max_prompt_tokens=limit), answer_frame(processor)
    return load_judgements(path, processor, JudgeSettings("", BUILT_IN), args, "given", frame)


def read_rubric(row: dict) -> list[tuple[str, float]]:
    """The criteria of a row and their weights. Raises ValueError."""
    listed = row.get("rubric") or []
    check_form(listed, [str | dict], "rubric")
    criteria = [item if isinstance(item, dict) else {"text": item} for item in listed]
    check_form(criteria, [{"text": str, "weight?": int | float}], "rubric")
    weighted = [(item["text"], float(item.get("weight", 1))) for item in criteria]
    if not weighted or not all(0 < weight < math.inf for _, weight in weighted):
        raise ValueError(
            '"rubric" must be ["a criterion", {"text": "another", "weight": 2}] with weights above 0, not '
            f"{listed!r:.120}"
        )
    return weighted


def group_of(row: Prompt) -> str:
    """What evaluations report a row under: its "source", or else its file."""
    return row.row.get("source") or row.source.rpartition(":")[0]


# --------------------------------------------------------------------------------------------------
# Targets
# --------------------------------------------------------------------------------------------------


def encode_target(processor: Processor, frame: AnswerFrame, text: str) -> Tensor:
    """(n,) label tokens of an answer: its own, as generation would see them, and the end token.
    Raises ValueError: a special token in the text."""
    ids = processor.ids_behind(frame.head, framed_answer(processor, frame, text))
    return torch.cat([ids, torch.tensor([frame.end])])


def framed_answer(processor: Processor, frame: AnswerFrame, text: str) -> str:
    """An answer, and what the template writes before it. Raises ValueError: a special token in the
    text."""
    typed = [token for token in processor.reserved_tokens if token in text]
    if typed:
        raise ValueError(f"special token {typed[0]} in the target")
    before = frame.before
    if "</think>" in text:  # in place of the template's empty thought
        before = "" if "</think>" in before else before
        if opens_thought(frame.head):
            text = text.removeprefix("<think>").lstrip("\n")
    elif opens_thought(frame.head + before):  # R1's distills: there is no thought to learn
        before += "\n</think>\n\n"
    return before + text


def encode_verdicts(processor: Processor, verdicts: list[str]) -> list[Tensor]:
    """Label tokens of each verdict, given bare."""
    frame = answer_frame(processor)
    return [encode_target(processor, frame, with_verdict(verdict)) for verdict in verdicts]
