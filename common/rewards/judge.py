"""Judgement rows: questions, targets and verdicts.

    row      -> question, images, text, verdict; pairs in one order or both     read_judgement
    question -> prompt under the judge's system instruction                     judge_prompt
    answer   -> label tokens, as generation would see them                      encode_target
    text     -> verdict                                                         parse_verdict

judge.json holds what is needed to ask a judge in the words it was trained on.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
from common.flags import NUMBER, DataArgs
from common.rewards.rules import opens_thought, parse_verdict

# --------------------------------------------------------------------------------------------------
# judge.json
# --------------------------------------------------------------------------------------------------

# kind: (template, verdicts). The verdicts of scores are those of the training rows.
JUDGEMENTS = {
    "pictures": (
        "Request: {prompt}\nPicture A: <image>\nPicture B: <image>\n"
        "Which picture fits the request better? "
        "End with <answer>A</answer>, <answer>B</answer> or <answer>tie</answer>.",
        ["A", "B", "tie"],
    ),
    "answers": (
        "Question: {prompt}\nAnswer A: {response_a}\nAnswer B: {response_b}\n"
        "Which answer is better? "
        "End with <answer>A</answer>, <answer>B</answer> or <answer>tie</answer>.",
        ["A", "B", "tie"],
    ),
    "correct": (
        "Question: {prompt}\nAnswer: {response}\n"
        "Is the answer correct? End with <answer>yes</answer> or <answer>no</answer>.",
        ["yes", "no"],
    ),
    "rubric": (
        "Question: {prompt}\nAnswer: {response}\nCriterion: {criterion}\n"
        "Does the answer meet the criterion? "
        "End with <answer>yes</answer> or <answer>no</answer>.",
        ["yes", "no"],
    ),
    "score": (
        "Question: {prompt}\nAnswer: {response}\n"
        "How good is the answer? End with <answer>its score</answer>.",
        [],
    ),
}
# Of judge.json, besides what `JudgeSettings.of` checks.
JUDGE_FORM = {
    "system_instruction?": str,
    "kinds?": {str: {"template?": str, "verdicts?": [str]}},
    "trained_on?": [str],
    "held_out?": {
        "step": int,
        "kinds": {str: {"accuracy": int | float, "chance": int | float, "count": range(1, 2**63)}},
    },
}
PAIRS = ("pictures", "answers")
SWAPPED = {"A": "B", "B": "A"}
MAX_SCORES = 32  # different scores in the training rows, each a verdict
PLACEHOLDER = re.compile(r"\{\w+\}")


def format_template(template: str, **values: str) -> str:
    """Replace {name} in one pass: a value that holds braces stays as it is."""
    return PLACEHOLDER.sub(lambda match: values.get(match[0][1:-1], match[0]), template)


def check_template(kind: str, template: str) -> None:
    """Raises ValueError: a template that lacks what its kind needs, which the built-in one has."""
    if kind not in JUDGEMENTS:
        raise ValueError(f"judge.json: no kind of judgement is called {kind!r:.80}")
    default, _ = JUDGEMENTS[kind]
    needed, images = PLACEHOLDER.findall(default), default.count("<image>")
    if set(needed) - set(PLACEHOLDER.findall(template)) or template.count("<image>") != images:
        raise ValueError(
            f"judge.json or --{kind}_template must hold {', '.join(needed)} and {images} <image>: "
            f"{template!r:.200}"
        )


def check_verdicts(kind: str, verdicts: list[str]) -> None:
    """Raises ValueError: other verdicts than a judge of this kind can learn."""
    known = JUDGEMENTS[kind][1]
    numbers = kind == "score" and all(re.fullmatch(NUMBER, verdict) for verdict in verdicts)
    if len(set(verdicts)) < len(verdicts) or not numbers and set(verdicts) != set(known):
        raise ValueError(
            f"judge.json: {kind} has the verdicts {verdicts}, expected {known or 'numbers'}"
        )


@dataclass
class JudgeSettings:
    """What judge.json holds: how a judge is asked, what it answers, and how well it did."""

    system_instruction: str = ""
    # kind -> its "template" and its "verdicts"
    kinds: dict[str, dict] = field(default_factory=dict)
    trained_on: list[str] = field(default_factory=list)  # kinds
    template_options: dict = field(default_factory=dict)  # variables of the chat template
    # Of the newest evaluation: its "step", and for each of its "kinds" accuracy, chance and count.
    held_out: dict | None = None

    @staticmethod
    def of(processor: Processor) -> "JudgeSettings":
        """Those of a checkpoint. Raises ValueError: judge.json holds what no judge can have."""
        saved = processor.files["judge"]
        check_form(saved, JUDGE_FORM, "judge.json")
        unknown = saved.keys() - JudgeSettings.__annotations__
        if unknown:
            raise ValueError(f"judge.json is of another version: {', '.join(sorted(unknown))}")
        settings = JudgeSettings(
            **{name: value for name, value in saved.items() if value is not None}
        )
        for kind, entry in settings.kinds.items():
            if "template" in entry:  # what it lacks, a judge that is trained further has built in
                check_template(kind, entry["template"])
            if "verdicts" in entry:
                check_verdicts(kind, entry["verdicts"])
        for kind in settings.trained_on:
            if not settings.kinds.get(kind, {}).keys() >= {"template", "verdicts"}:
                raise ValueError(
                    f"judge.json: trained_on {kind!r:.80}, which its kinds do not describe"
                )
        return settings

    @staticmethod
    def to_train(
        processor: Processor,
        templates: dict[str, str] = {},
        system_instruction: str = "",
    ) -> "JudgeSettings":
        """Those of a judge that is to be trained: what is given, else what the judge.json of its
        checkpoint says, else built in. Exports will hold this object.

        Raises ValueError: a template that lacks what its kind needs.
        """
        saved = JudgeSettings.of(processor)
        instruction = system_instruction or saved.system_instruction
        settings = replace(saved, system_instruction=instruction, kinds={}, held_out=None)
        for kind, (template, verdicts) in JUDGEMENTS.items():
            merged = {"template": template, "verdicts": verdicts} | saved.kinds.get(kind, {})
            if templates.get(kind):
                merged["template"] = templates[kind]
            check_template(kind, merged["template"])
            settings.kinds[kind] = merged
        processor.files["judge"] = vars(settings)
        return settings

    def note_training(self, rows: Iterable[Prompt]) -> None:
        """Note what the judge is trained on: kinds and verdicts of these rows, besides what it learned
        before. Raises ValueError: too many different scores."""
        trained = {(row.label, row.reference or "") for row in rows if row.label in JUDGEMENTS}
        self.trained_on = sorted({*self.trained_on, *(kind for kind, _ in trained)})
        scores = sorted({verdict for kind, verdict in trained if kind == "score"}, key=float)
        if len(scores) > MAX_SCORES:
            raise ValueError(
                f"--data: {len(scores)} different scores; round them to at most {MAX_SCORES}"
            )
        if scores:
            self.kinds["score"]["verdicts"] = scores

    def ask(
        self,
        kind: str,
        prompt: str,
        responses: list[str],
        images: list,
        order: str = "given",
        criterion: str = "",
    ) -> dict:
        """A question of a kind about one response, or about two sides in this order: kind, order,
        prompt (for the system instruction), question and images. An <answer> in a response becomes
        [answer], as a judge that quotes it would give a verdict."""
        responses = [re.sub("<(/?answer)>", r"[\1]", response) for response in responses]
        if order == "swapped":
            responses = responses[::-1]
            images = images[::-1] if kind == "pictures" else images
        question = format_template(
            self.kinds[kind]["template"],
            prompt=prompt,
            response=responses[0],
            response_a=responses[0],
            response_b=responses[-1],
            criterion=criterion,
        )
        ask = {"kind": kind, "order": order, "prompt": prompt}
        return ask | {"question": question, "images": images}

    def verdicts(self, kind: str | None) -> list[str]:
        """The verdicts that a judge knows on questions of a kind; none on a response."""
        return self.kinds[kind]["verdicts"] if kind in self.kinds else []

    def read_verdict(self, text: str, row: Prompt) -> str | None:
        """What a judgement says of a row; None if it cannot be read."""
        # Also the right verdict: a judge that was not trained on scores knows none of them.
        known = [*self.verdicts(row.label), row.reference or ""]
        verdict = parse_verdict(text, known, row.text)
        if not verdict and row.label == "response":  # any text may be its verdict
            verdict = parse_verdict(text, None, row.text)
        return verdict

    def question_to_ask(self, wanted: str) -> str:
        """The kind of question to ask: the wanted one or, for auto, the pointwise one that the
        judge was trained on. Raises ValueError: the judge was not trained on it."""
        kind = wanted
        if wanted == "auto":
            kind = "correct" if "correct" in self.trained_on else "score"
        if kind not in self.trained_on:
            raise ValueError(
                f"the judge was not trained on questions of the kind {kind} (--grm_question);"
                f" judge.json names {', '.join(self.trained_on) or 'none'}"
            )
        return kind


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------


class RowKind(NamedTuple):
    """A kind of rows."""

    name: str
    beside: set[str]  # fields of ROW_KINDS, and critique, that may be there too
    needs: str  # for messages


# By the field that tells a row's kind: the first that is there.
ROW_KINDS = {
    "criterion": RowKind(
        "rubric",
        {"response", "correct", "critique"},
        "one prompt, a response and a criterion, all texts, and true or false as correct",
    ),
    "score": RowKind(
        "score",
        {"response", "critique"},
        "one prompt and a response, both texts, and a finite number as score",
    ),
    "correct": RowKind(
        "correct",
        {"response", "critique"},
        "one prompt and a response, both texts, and true or false as correct",
    ),
    "responses": RowKind(
        "answers",
        {"preferred", "critique"},
        "a text as prompt, two texts as responses, and A, B or tie as preferred",
    ),
    "preferred": RowKind(
        "pictures",
        {"critique"},
        "a text as prompt, two images or two responses, and A, B or tie as preferred",
    ),
    "response": RowKind("response", set(), "one prompt, and a text that is not empty as response"),
}
PROMPT_FIELDS = ("prompt", "question", "messages")
JUDGEMENT_COLUMNS = {
    *PROMPT_FIELDS,
    *ROW_KINDS,
    *"critique images videos source pair regions".split(),
}
ORDERS = ("given", "swapped")
# Names of the two sides in a critique that is shown in both orders.
FIXED_NAMES = re.compile(r"\b(?i:pictures?|images?|answers?|responses?|options?) [AB]\b")


def read_judgement(row: dict, settings: JudgeSettings, orders: str) -> list[dict]:
    """The questions of a row, one per order, each with its right answer: the fields of
    `JudgeSettings.ask`, text and verdict. Responses may be numbers in the file.

    Args:
        orders: both shows pairs as given and swapped; given does not.
    Raises:
        ValueError: a row that is not a judgement.
    """
    kind, prompt, responses, images, target = _read_columns(row)
    if kind == "response" or isinstance(prompt, list):  # only a response may be to messages
        ask = {"kind": kind, "order": "given", "prompt": prompt, "images": images}
        return [ask | {"question": prompt, "text": target, "verdict": parse_verdict(target)}]
    if kind not in settings.kinds:
        raise ValueError(f"a judgement row ({kind}), expected prompt and response")
    # What is judged has no images, whatever it says.
    responses = [re.sub("|".join(MEDIA_MARKS), " ", text) for text in responses]
    # Where the marks do not fit the images, `make_prompt` says what is wrong.
    if kind != "pictures" and sum(map(prompt.count, MEDIA_MARKS)) == len(images):
        prompt = user_text(message_turns(prompt), len(images))
    asks, both = [], kind in PAIRS and orders == "both"
    for order in ORDERS[: 1 + both]:
        verdict = in_order(target, order)
        ask = settings.ask(kind, prompt, responses, images, order, row.get("criterion", ""))
        text = judgement_text(row.get("critique") or "", verdict, ask, both)
        asks.append(ask | {"text": text, "verdict": verdict})
    return asks


def _read_columns(row: dict) -> tuple[str, str | list, list[str], list, str]:
    """Kind, prompt, responses and images of a row, and what is to be learned: the right verdict on
    it as given, or the response. Raises ValueError: a row that is not a judgement."""
    mark = find_mark(row)
    kind, _, needs = ROW_KINDS[mark]
    prompts = [row[field] for field in PROMPT_FIELDS if field in row]
    listed = row.get("responses", [row.get("response", "" if kind in PAIRS else None)])
    if not isinstance(listed, list):
        listed = [None]
    responses = [number_as_text(response) for response in listed]
    images = media_list(row)
    texts = [*responses, row.get("critique") or "", row.get("source") or ""]
    if mark == "criterion":
        texts.append(row["criterion"])
    if kind != "response":
        texts += prompts  # of which a response may have messages
    are_texts = all(isinstance(text, str) for text in texts)
    target = _target(row, kind, responses, images) if are_texts else None
    if len(prompts) != 1 or target is None:
        raise ValueError(f"a row with {mark!r} needs {needs}; {columns_of(row)}")
    return kind, prompts[0], responses, images, target


def in_order(verdict: str, order: str) -> str:
    """A verdict on a pair as given, when it is shown in this order; and the other way round."""
    return SWAPPED.get(verdict, verdict) if order == "swapped" else verdict


def judgement_text(critique: str, verdict: str, ask: dict, both: bool) -> str:
    """A critique, in which {A} and {B} name the sides of a pair, and how a judgement ends. Raises
    ValueError: it has a verdict of its own, ends inside a thought, or is for ``both`` orders and names the
    sides as only one of them does."""
    if not critique:
        return with_verdict(verdict)
    kind, order = ask["kind"], ask["order"]
    if kind in PAIRS:
        if both and FIXED_NAMES.search(critique):
            raise ValueError(
                "write {A} and {B} for the names, which change in the other order: "
                f"{critique!r:.120}"
            )
        names = {side: in_order(side, order) for side in SWAPPED}
        critique = format_template(critique, **names)
    text = f"{critique}\n{with_verdict(verdict)}"
    if "<answer>" in critique or parse_verdict(text) is None:
        raise ValueError(
            "a critique ends its thought, and has no <answer>, which is added to it: "
            f"{critique!r:.120}"
        )
    return text


def with_verdict(verdict: str) -> str:
    """How a judgement ends."""
    return f"<answer>{verdict}</answer>"


def find_mark(row: dict) -> str:
    """The field that tells a row's kind. Raises ValueError: none, or fields of different kinds."""
    mark = next((field for field in ROW_KINDS if field in row), None)
    if mark is None:
        raise ValueError(
            "a row needs a target: one of the fields response, preferred, correct and score "
            f"(launch/convert.py reads rows of other systems); {columns_of(row)}"
        )
    misplaced = row.keys() & {*ROW_KINDS, "critique"} - ROW_KINDS[mark].beside - {mark}
    if misplaced:
        raise ValueError(f"field {', '.join(sorted(misplaced))} beside {mark}: one kind per row")
    return mark


def _target(row: dict, kind: str, responses: list[str], images: list) -> str | None:
    """The right verdict on a row as given, or the response to learn; None: the row has none."""
    if kind == "response":
        return responses[0] if responses[0].strip() else None
    if kind in ("correct", "rubric"):
        words = {True: "yes", False: "no"}
        return words[row["correct"]] if isinstance(row.get("correct"), bool) else None
    if kind == "score":
        score = row["score"]
        if type(score) not in (int, float) or not abs(score) < 1e300:  # an int may be beyond floats
            return None
        return str(int(score)) if score == int(score) else f"{score:g}"
    sides = images if kind == "pictures" else responses
    preferred = row.get("preferred")
    return preferred if len(sides) == 2 and preferred in ("A", "B", "tie") else None


def judge_prompt(
    processor: Processor,
    settings: JudgeSettings,
    ask: dict,
    args: DataArgs | None = None,
    **further: Any,
) -> Prompt:
    """The prompt of one entry of `read_judgement`, under the judge's system instruction.

    Args:
        args: bounds of the prompt; None: none.
        further: grids, and fields of `rows.Prompt`.
    """
    system = settings.system_instruction
    if "{prompt}" in system:
        system = format_template(system, prompt=user_text(message_turns(ask["prompt"])))
    return make_prompt(processor, ask["question"], ask["images"], args, system, **further)


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
        for k, ask in enumerate(read_judgement(row, settings, orders)):
            further = {"reference": ask["verdict"], "label": ask["kind"], "order": ask["order"]}
            further |= fields | {"index": 2 * fields["index"] + k}
            prompt = judge_prompt(processor, settings, ask, args, **further)
            text = write_marks(ask["text"], prompt.regions, processor.config.model_type)
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
    return load_judgements(path, processor, JudgeSettings(), args, "given", frame)


def read_rubric(row: dict) -> list[tuple[str, float]]:
    """The criteria of a row and their weights. Raises ValueError."""
    criteria, listed = [], row.get("rubric")
    if not isinstance(listed, list):
        listed = []
    for item in listed:
        entry = item if isinstance(item, dict) else {"text": item}
        text, weight = entry.get("text"), entry.get("weight", 1)
        is_weight = type(weight) in (int, float) and 0 < weight < math.inf
        if not (isinstance(text, str) and is_weight):
            raise ValueError(f"rubric: expected a text and a weight above 0, not {item!r:.120}")
        criteria.append((text, float(weight)))
    if not criteria:
        raise ValueError(
            'no "rubric": ["a criterion", {"text": "another", "weight": 2}] (--grm_question rubric)'
        )
    return criteria


def order_agreement(rows: list[Prompt], indices: list[int], texts: list[str]) -> list[float]:
    """For each judgement on a pair, the share of the judgements on the other order that say the same of
    the two answers; 0 if it cannot be read.

    Args:
        rows: both orders of each pair, one after the other.
        indices: the row of each judgement.
    """
    verdicts, by_row = [], [Counter() for _ in rows]
    for index, text in zip(indices, texts):
        row = rows[index]
        verdict = parse_verdict(text, JUDGEMENTS[row.label or ""][1], row.text)
        verdicts.append(verdict)
        by_row[index][verdict] += 1
    shares = []
    for index, verdict in zip(indices, verdicts):
        partner = by_row[index + 1 if index % 2 == 0 else index - 1]  # the pair's other order
        alike = 0 if verdict is None else partner[in_order(verdict, "swapped")]
        shares.append(alike / partner.total())
    return shares


def group_of(row: Prompt) -> str:
    """What evaluations report a row under: its "source", or else its file."""
    return row.row.get("source") or row.source.rpartition(":")[0]


def row_record(row: Prompt) -> dict:
    """What records say of a judged row: the order of its sides, its group, its pair, and how many
    characters each of two answers has, in that order."""
    columns = row.row
    lengths = [len(str(response)) for response in columns.get("responses", ())]
    if row.order == "swapped":
        lengths.reverse()
    return {
        "order": row.order,
        "group": group_of(row),
        "pair": columns.get("pair"),
        "lengths": lengths or None,
    }


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


def doubtful_accuracy(settings: JudgeSettings, kind: str) -> str:
    """Describe a recorded held-out accuracy on questions of this kind that is not above chance by
    more than two standard errors, or return ""."""
    held_out = settings.held_out or {"kinds": {}}
    if kind not in held_out["kinds"]:
        return ""
    record = held_out["kinds"][kind]
    accuracy, chance, count = record["accuracy"], record["chance"], record["count"]
    if accuracy > chance + 2 * math.sqrt(chance * (1 - chance) / count):
        return ""
    return (
        f"the judge's held-out accuracy on {kind} ({accuracy:.3f} of {count}, step"
        f" {held_out['step']}) is not above chance ({chance:.3f})"
    )
