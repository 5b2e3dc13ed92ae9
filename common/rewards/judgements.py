"""Judgement rows: questions, targets and verdicts.

    row      -> its kind, question, images, text, verdict; pairs in one order or both    read_judgement
    text     -> verdict                                                                  parse_verdict

A judge is its templates, which make questions of rows, and its verdicts. judge.json holds them, so that
a judge is asked in the words that it was trained on. A model without judge.json is asked in built-in words.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from common.buffers import EMPTY
from common.data.conversations import ends_with_answer, join_conversations, pop_wish, read_answers
from common.data.coordinates import write_marks
from common.data.processor import AnswerFrame, Processor, answer_frame
from common.data.responses import (
    PROMPT_COLUMNS,
    bounded_target,
    encode_target,
    framed_answer,
    prompt_column,
    response_of,
)
from common.data.rows import (
    MEDIA_MARKS,
    Example,
    Prompt,
    columns_of,
    make_prompt,
    media_list,
    message_turns,
    parse_lines,
    read_messages,
    read_rows,
    tell_numbered_images,
    tell_unread,
    text_column,
    user_text,
    with_regions,
)
from common.flags import FLOAT_TEXT, DataArgs
from common.ground.files import UserError, check_form
from common.rewards.rules import parse_verdict, without_thoughts

# --------------------------------------------------------------------------------------------------
# Kinds of judgements
# --------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of judgement."""

    form: dict  # the columns that make a row one of this kind, besides its prompt
    template: str  # the question; braces are columns
    verdicts: list[str]  # empty: those of the training rows


YES_NO = ["yes", "no"]
WINNERS = ["A", "B", "tie"]
SAY_YES_OR_NO = "End with <answer>yes</answer> or <answer>no</answer>."
SAY_WHO_WINS = "End with <answer>A</answer>, <answer>B</answer> or <answer>tie</answer>."
TEXT = str | int | float
KINDS = {
    "correct": Kind(
        {"response": TEXT, "correct": bool},
        f"Question: {{prompt}}\nAnswer: {{response}}\nIs the answer correct? {SAY_YES_OR_NO}",
        YES_NO,
    ),
    "score": Kind(
        {"response": TEXT, "score": int | float},
        "Question: {prompt}\nAnswer: {response}\n"
        "How good is the answer? End with <answer>its score</answer>.",
        [],
    ),
    "rubric": Kind(
        {"response": TEXT, "criterion": str, "correct": bool},
        "Question: {prompt}\nAnswer: {response}\nCriterion: {criterion}\n"
        f"Does the answer meet the criterion? {SAY_YES_OR_NO}",
        YES_NO,
    ),
    "answers": Kind(
        {"responses": [TEXT], "preferred": tuple(WINNERS)},
        "Question: {prompt}\nAnswer A: {response_a}\nAnswer B: {response_b}\n"
        f"Which answer is better? {SAY_WHO_WINS}",
        WINNERS,
    ),
    "pictures": Kind(  # the two images of the row
        {"preferred": tuple(WINNERS)},
        "Request: {prompt}\nPicture A: <image>\nPicture B: <image>\n"
        f"Which picture fits the request better? {SAY_WHO_WINS}",
        WINNERS,
    ),
    "videos": Kind(  # the two clips of the row
        {"preferred": tuple(WINNERS)},
        "Request: {prompt}\nVideo A: <video>\nVideo B: <video>\n"
        f"Which video fits the request better? {SAY_WHO_WINS}",
        WINNERS,
    ),
}
RESPONSE = "response"  # the label of a row that is no judgement, but a response to imitate
MEDIA_PAIRS = ("pictures", "videos")  # what the policy did not write: the media of the row
PAIRS = ("answers", *MEDIA_PAIRS)
# What a judge can be asked about a response of a policy; --grm_question auto is the first of them that
# it was trained on.
ABOUT_RESPONSES = ("correct", "score", "answers", "rubric")
SWAPPED = {"A": "B", "B": "A"}
MAX_SCORES = 32  # different scores in the training rows, each a verdict
PLACEHOLDER = re.compile(r"\{(\w+)\}")


def columns_of_template(template: str) -> set[str]:
    return set(PLACEHOLDER.findall(template))


def fill_in(template: str, columns: dict[str, str]) -> str:
    """Replace {name} in one pass: a value that holds braces stays as it is."""
    return PLACEHOLDER.sub(lambda match: columns.get(match[1], match[0]), template)


# --------------------------------------------------------------------------------------------------
# judge.json
# --------------------------------------------------------------------------------------------------

JUDGE_FORM = {
    "system_instruction?": str,
    "templates?": {str: str},
    "verdicts?": {str: [str]},
    "thoughts?": bool,
    "position_consistency?": int | float,
}


@dataclass
class JudgeSettings:
    """What judge.json holds: how a judge is asked, and what it answers."""

    system_instruction: str = ""
    templates: dict[str, str] = field(default_factory=dict)  # by kind
    verdicts: dict[str, list[str]] = field(default_factory=dict)  # by kind that it was trained on
    thoughts: bool | None = None  # whether it reads those of responses; None: not said
    position_consistency: float | None = None  # in its last evaluation

    @staticmethod
    def of(processor: Processor) -> "JudgeSettings":
        """Those of a checkpoint. Raises UserError: judge.json holds what no judge can have."""
        saved = dict(processor.files["judge"])
        saved.pop("template_options", None)  # the processor's
        unknown = saved.keys() - JudgeSettings.__annotations__
        if unknown:
            raise UserError(
                f"judge.json is of another version, with {', '.join(sorted(unknown))}: train the judge "
                'again, or write its "templates" {kind: text} and "verdicts" {kind: [text]} into it'
            )
        check_form(saved, JUDGE_FORM, "judge.json")
        settings = JudgeSettings(
            **{key: value for key, value in saved.items() if value is not None}
        )
        built_in = {name: kind.template for name, kind in KINDS.items()}
        settings.templates = built_in | settings.templates
        settings.check("judge.json")
        return settings

    @staticmethod
    def to_train(
        processor: Processor, templates: dict[str, str] = {}, system_instruction: str = ""
    ) -> "JudgeSettings":
        """Those of a judge that is to be trained: what is given, else what the judge.json of its
        checkpoint says, else built in. Raises UserError: see `check`."""
        check_form(templates, {str: str}, "--templates")
        settings = JudgeSettings.of(processor)
        settings.templates |= templates
        settings.system_instruction = system_instruction or settings.system_instruction
        settings.position_consistency = None
        settings.check("--templates")
        return settings

    def check(self, where: str) -> None:
        """Raises UserError, which begins with ``where``: an unknown kind, a template that lacks a column
        of the built-in one, or other verdicts than a judge of a kind can learn."""
        for kind in {**self.templates, **self.verdicts}:
            if kind not in KINDS:
                raise UserError(
                    f"{where}: {kind!r:.80} is no kind of judgement: {', '.join(KINDS)}"
                )
            template = self.templates.get(kind, "")
            needed = columns_of_template(KINDS[kind].template)
            if not needed <= columns_of_template(template):
                columns = ", ".join(f"{{{name}}}" for name in sorted(needed))
                raise UserError(f"{where}: {kind} must hold {columns}: {template!r:.200}")
            known = KINDS[kind].verdicts
            verdicts = self.verdicts.get(kind, known)
            fits = sorted(verdicts) == sorted(known)
            if not known:
                fits = all(re.fullmatch(FLOAT_TEXT, verdict) for verdict in verdicts)
            if not fits:
                expected = known or "numbers"
                raise UserError(f"{where}: {kind} has the verdicts {verdicts}, expected {expected}")

    @property
    def reads_thoughts(self) -> bool:
        """Whether the judge is shown the thoughts of responses, as it was in training by versions that did
        not say so."""
        return bool(self.verdicts) if self.thoughts is None else self.thoughts

    def note_training(self, rows: Iterable[Prompt]) -> None:
        """Note what the judge is trained on: kinds and verdicts of these rows, and whether their responses
        have thoughts, besides what it learned before. Raises UserError: too many different scores."""
        rows = [row for row in rows if row.label in KINDS]
        if rows and self.thoughts is None:
            self.thoughts = self.reads_thoughts or any(map(has_thoughts, rows))
        trained = {(row.label or "", row.reference or "") for row in rows}
        scores = sorted({verdict for kind, verdict in trained if kind == "score"}, key=float)
        if len(scores) > MAX_SCORES:
            raise UserError(
                f"--data: {len(scores)} different scores; round them to at most {MAX_SCORES}"
            )
        kinds = sorted({kind for kind, _ in trained})
        self.verdicts = self.verdicts | {kind: KINDS[kind].verdicts or scores for kind in kinds}

    def question(self, kind: str, prompt: str, responses: Sequence[str], criterion: str) -> str:
        """A question about one response, or about two. An <answer> in a response becomes [answer], as a
        judge that quotes it would give a verdict."""
        columns = {"prompt": prompt, "criterion": criterion}
        names = ["response"] if len(responses) == 1 else ["response_a", "response_b"]
        for name, response in zip(names, responses):
            if self.thoughts is False:
                response = without_thoughts(response)
            columns[name] = re.sub("<(/?answer)>", r"[\1]", response)
        return fill_in(self.templates[kind], columns)

    def instruction(self, prompt: str | list) -> str:
        """The judge's system message, which may quote the prompt; "" if it has none."""
        if "{prompt}" not in self.system_instruction:
            return self.system_instruction
        return fill_in(self.system_instruction, {"prompt": user_text(message_turns(prompt))})

    def known_verdicts(self, kind: str | None) -> list[str]:
        """The verdicts that a judge knows on questions of a kind; none on a response."""
        if kind not in KINDS:
            return []
        return self.verdicts.get(kind, KINDS[kind].verdicts)

    def read_verdict(self, text: str, row: Prompt) -> str | None:
        """What a judgement says of a row; None if it cannot be read."""
        # Also the right verdict: a judge that was not trained on scores knows none of them.
        known = [*self.known_verdicts(row.label), row.reference or ""]
        verdict = parse_verdict(text, known, row.text)
        if not verdict and row.label == RESPONSE:  # any text may be its verdict
            verdict = parse_verdict(text, None, row.text)
        return verdict

    def kind_to_ask(self, wanted: str) -> str:
        """The kind of question to ask about responses: the ``wanted`` one, or for auto the first that the
        judge was trained on. A model that was trained on none can be asked any. Raises UserError: it was not
        trained on it, or its verdicts are not known."""
        trained = [kind for kind in ABOUT_RESPONSES if kind in self.verdicts]
        questions = ", ".join(ABOUT_RESPONSES)
        kind = trained[0] if wanted == "auto" and trained else wanted
        if self.verdicts and kind not in trained:
            raise UserError(
                f"--grm_question {wanted}: the judge was trained on {', '.join(self.verdicts)}, says "
                f"judge.json; {questions} can be asked about a response"
            )
        if kind == "auto":
            raise UserError(
                "the model has no judge.json with verdicts: it was not trained to judge. Choose what it is "
                f"asked by --grm_question: {questions}"
            )
        if not self.known_verdicts(kind):
            raise UserError(
                f"--grm_question {kind}: its verdicts are missing; write them into judge.json beside the "
                f'weights: {{"verdicts": {{"{kind}": ["1", "2", "3", "4", "5"]}}}}'
            )
        return kind


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------

TARGET_COLUMNS = {RESPONSE, *itertools.chain(*(kind.form for kind in KINDS.values()))}
JUDGEMENT_COLUMNS = {
    *PROMPT_COLUMNS,
    *TARGET_COLUMNS,
    *"critique images videos source pair regions".split(),
}
ORDERS = ("given", "swapped")
# Names of the two sides in a critique that is shown in both orders.
FIXED_NAMES = re.compile(
    r"\b(?i:pictures?|images?|videos?|clips?|answers?|responses?|options?) [AB]\b"
)


class Judgement(NamedTuple):
    """A question and its right answer."""

    kind: str  # or RESPONSE
    order: str  # of the sides of a pair: given or swapped
    instruction: str  # system message; "": none
    question: str | list  # text or messages
    images: list
    text: str  # to learn
    verdict: str | None


def read_judgement(row: dict, settings: JudgeSettings, orders: str) -> list[Judgement]:
    """The questions of a row, one per order, each with its right answer.

    Args:
        orders: both shows pairs as given and swapped; given does not.
    Raises:
        UserError: a row that is not a judgement.
    """
    kind, images, prompt = kind_of_row(row), media_list(row), prompt_column(row)
    form = {} if kind == RESPONSE else KINDS[kind].form
    check_form(row, {"critique?": str, "source?": str} | form, f"a row of the kind {kind}")
    if kind == RESPONSE:
        return [read_response(row, prompt, images, settings)]
    if not isinstance(prompt, str):
        raise UserError(f"a row of the kind {kind} has a text as prompt, not {prompt!r:.80}")
    # Where the marks do not fit the images, `make_prompt` says what is wrong.
    if kind not in MEDIA_PAIRS and sum(map(prompt.count, MEDIA_MARKS)) == len(images):
        prompt = user_text(message_turns(prompt), len(images))
    both = kind in PAIRS and orders == "both"
    if both and FIXED_NAMES.search(row.get("critique") or ""):
        raise UserError(
            "write {A} and {B} for the names, which change in the other order: "
            f"{row['critique']!r:.120}"
        )
    return [judgement_in(order, kind, row, prompt, settings) for order in ORDERS[: 1 + both]]


def judgement_in(
    order: str, kind: str, row: dict, prompt: str, settings: JudgeSettings
) -> Judgement:
    """The judgement of a row with its sides in this order. Raises UserError: see `read_judgement`."""
    images, responses = media_list(row), judged_responses(row)
    critique, verdict = row.get("critique") or "", in_order(right_verdict(row), order)
    if kind in PAIRS:
        check_sides(kind, images if kind in MEDIA_PAIRS else responses)
        critique = fill_in(critique, {side: in_order(side, order) for side in SWAPPED})
    if order == "swapped":
        responses = responses[::-1]
        images = images[::-1] if kind in MEDIA_PAIRS else images
    question = settings.question(kind, prompt, responses, row.get("criterion") or "")
    text = judgement_text(critique, verdict)
    return Judgement(kind, order, settings.instruction(prompt), question, images, text, verdict)


def kind_of_row(row: dict) -> str:
    """The kind that a row's columns make it. Raises UserError: those of none."""
    targets = {name for name in TARGET_COLUMNS if row.get(name) is not None}
    kinds = {RESPONSE: {RESPONSE}} | {name: set(kind.form) for name, kind in KINDS.items()}
    if targets == kinds["pictures"] and (row.get("videos") or row.get("video")):
        return "videos"
    for kind, columns in kinds.items():
        if targets == columns:
            return kind
    known = "; ".join(f"{', '.join(sorted(columns))} ({kind})" for kind, columns in kinds.items())
    raise UserError(
        f"a row needs the columns of one kind, besides its prompt: {known}; or messages that end with an "
        f"answer (launch/data/convert.py reads rows of other systems); {columns_of(row)}"
    )


def read_response(
    row: dict, prompt: str | list, images: list, settings: JudgeSettings
) -> Judgement:
    """A response to imitate, whose verdict is its <answer>, if it has one. Raises UserError."""
    text = response_of(row)
    if any(pop_wish(message) for message in read_messages(prompt)):
        raise UserError(
            "only the response of this row is learned: write it as the last message to learn the other "
            "answers, too"
        )
    if row.get("critique"):
        raise UserError(
            "a row with a response to imitate has no critique: write it into the response"
        )
    instruction = settings.instruction(prompt)
    return Judgement(RESPONSE, "given", instruction, prompt, images, text, parse_verdict(text))


def judged_responses(row: dict) -> list[str]:
    """The texts that are judged, which have no images, whatever they say; they may be numbers in the
    file."""
    listed = row.get("responses") or [row.get("response")]
    texts = [text_column({"response": response}, "response") or "" for response in listed]
    return [re.sub("|".join(MEDIA_MARKS), " ", text) for text in texts]


def has_thoughts(row: Prompt) -> bool:
    """Whether responses that a row judges have thoughts."""
    return any(without_thoughts(text) != text for text in judged_responses(row.row))


def check_sides(kind: str, sides: list) -> None:
    """Raises UserError: not two, or equal ones, which would be asked about alike in both orders."""
    if len(sides) != 2:
        raise UserError(f"a row of the kind {kind} compares two {kind}, not {len(sides)}")
    if sides[0] == sides[1]:
        raise UserError(f"the two {kind} of the row are equal: neither can be preferred")


def right_verdict(row: dict) -> str:
    """The right verdict on a row as given. Raises UserError: a score that is no finite number."""
    if row.get("preferred"):
        return row["preferred"]
    if row.get("correct") is not None:
        return "yes" if row["correct"] else "no"
    score = row["score"]
    if isinstance(score, bool) or not abs(score) < 1e300:  # an integer may be beyond floats
        raise UserError(f"score must be a finite number, not {score!r:.80}")
    return str(int(score)) if score == int(score) else f"{score:g}"


def in_order(verdict: str, order: str) -> str:
    """A verdict on a pair as given, when it is shown in this order; and the other way round."""
    return SWAPPED.get(verdict, verdict) if order == "swapped" else verdict


def judgement_text(critique: str, verdict: str) -> str:
    """A critique, and how a judgement ends. Raises UserError: it has a verdict of its own, or ends inside
    a thought."""
    if not critique:
        return with_verdict(verdict)
    text = f"{critique}\n{with_verdict(verdict)}"
    if "<answer>" in critique or parse_verdict(text) is None:
        raise UserError(
            "a critique must end its thought, and have no <answer>, which is added to it: "
            f"{critique!r:.120}"
        )
    return text


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
        UserError: see `load_prompts`.
    """

    def build(row: dict, fields: dict) -> list[Example]:
        if is_conversation(row):
            fields |= {"index": 2 * fields["index"], "label": RESPONSE, "order": ORDERS[0]}
            answers = read_answers(row, fields, processor, args, frame, settings.instruction)
            return join_conversations(
                list(map(with_verdict_of, answers)), processor.family.replies_show_images
            )
        examples = []
        for k, one in enumerate(read_judgement(row, settings, orders)):
            index = 2 * fields["index"] + k
            prompt = prompt_to_judge(one, processor, args, fields | {"index": index})
            (text,) = write_marks([one.text], prompt.regions)
            target = EMPTY
            if frame is not None:
                framed = framed_answer(processor, frame, text)
                target = bounded_target(processor, frame, framed, prompt, args)
            examples.append(Example(prompt, target, text))
        return examples

    lines = parse_lines(path)
    examples = list(itertools.chain(*read_rows(path, lines, build, args)))
    tell_unread(path, lines, JUDGEMENT_COLUMNS)
    tell_numbered_images(path, [example.prompt for example in examples])
    return examples


def prompt_to_judge(
    judgement: Judgement, processor: Processor, args: DataArgs, fields: dict
) -> Prompt:
    """The question of a judgement, with the further ``fields`` of its prompt. Raises UserError."""
    prompt = make_prompt(
        processor,
        judgement.question,
        judgement.images,
        args,
        judgement.instruction,
        reference=judgement.verdict,
        label=judgement.kind,
        order=judgement.order,
        **fields,
    )
    return with_regions(prompt)


def is_conversation(row: dict) -> bool:
    """Whether a row's answers stand in its messages, the last of them at their end. Raises UserError: it
    has a critique, too."""
    if any(row.get(name) is not None for name in TARGET_COLUMNS) or not ends_with_answer(row):
        return False
    check_form(row, {"source?": str}, "a row of messages")
    if row.get("critique"):
        raise UserError("a row with answers to imitate has no critique: write it into the answers")
    return True


def with_verdict_of(example: Example) -> Example:
    """An answer whose reference is its <answer>, if it has one."""
    reference = parse_verdict(example.text)
    return example._replace(prompt=dataclasses.replace(example.prompt, reference=reference))


def read_rubric(row: dict) -> list[tuple[str, float]]:
    """The criteria of a row and their weights. Raises UserError."""
    criteria, listed = [], row.get("rubric")
    if not listed or not isinstance(listed, list):
        raise UserError(
            'the judge needs a column "rubric": ["a criterion", {"text": "another", "weight": 2}]'
        )
    for item in listed:
        entry = {"weight": 1} | (item if isinstance(item, dict) else {"text": item})
        check_form(entry, {"text": str, "weight": int | float}, "rubric")
        if not 0 < entry["weight"] < 1e300:
            raise UserError(f"rubric: expected a weight above 0, not {item!r:.120}")
        criteria.append((entry["text"], float(entry["weight"])))
    return criteria


def group_of(row: Prompt) -> str:
    """What evaluations report a row under: its "source", or else its file."""
    return row.row.get("source") or row.source.rpartition(":")[0]


def encode_verdicts(processor: Processor, verdicts: list[str]) -> list[Tensor]:
    """Label tokens of each verdict, given bare."""
    frame = answer_frame(processor)
    return [encode_target(processor, frame, with_verdict(verdict)) for verdict in verdicts]
