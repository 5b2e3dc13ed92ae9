"""Judgement rows: questions, targets and verdicts.

    row      -> question, images, text, verdict; pairs in one order or both     read_judgement
    question -> prompt under the judge's system instruction                     judge_prompt
    answer   -> label tokens, as generation would see them                      encode_target
    text     -> verdict                                                         parse_verdict

judge.json holds what is needed to ask a judge in the words it was trained on.
"""

import os
import re
from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Iterator, NamedTuple

import torch
from torch import Tensor

from common.data.processor import Processor
from common.data.rows import (
    PLACES,
    Prompt,
    columns_of,
    make_prompt,
    media_list,
    message_parts,
    message_turns,
    number_as_text,
    question_text,
    read_rows,
    user_text,
)
from common.flags import DataArgs, parse_datasets
from common.rewards.rules import parse_verdict

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
    "score": (
        "Question: {prompt}\nAnswer: {response}\n"
        "How good is the answer? End with <answer>its score</answer>.",
        [],
    ),
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
    default, _ = JUDGEMENTS[kind]
    needed, images = PLACEHOLDER.findall(default), default.count("<image>")
    if set(needed) - set(PLACEHOLDER.findall(template)) or template.count("<image>") != images:
        raise ValueError(
            f"--{kind}_template must hold {', '.join(needed)} and {images} <image>: {template!r:.200}"
        )


@dataclass
class JudgeSettings:
    """What judge.json holds: how a judge is asked, what it answers, and how well it did."""

    system_instruction: str = ""
    which_answer: str = "last"  # the <answer> of a judgement that is its verdict: first or last
    # kind -> its "template" and its "verdicts"
    kinds: dict[str, dict] = field(default_factory=dict)
    trained_on: list[str] = field(default_factory=list)  # kinds
    # Of the newest evaluation: its "step", and for each of its "kinds" accuracy, chance and count.
    held_out: dict | None = None

    @staticmethod
    def to_train(
        processor: Processor,
        templates: dict[str, str] = {},
        system_instruction: str = "",
        which: str = "auto",
    ) -> "JudgeSettings":
        """Those of a judge that is to be trained: what is given, else what the judge.json of its
        checkpoint says, else built in. Exports will hold this object.

        Args:
            which: the <answer> that is the verdict, first or last; auto: as saved, or last.
        Raises:
            ValueError: a template that lacks what its kind needs.
        """
        saved = JudgeSettings(**processor.files["judge"])
        settings = JudgeSettings(
            system_instruction or saved.system_instruction,
            saved.which_answer if which == "auto" else which,
        )
        for kind, (template, verdicts) in JUDGEMENTS.items():
            merged = {"template": template, "verdicts": verdicts} | saved.kinds.get(kind, {})
            if templates.get(kind):
                merged["template"] = templates[kind]
            check_template(kind, merged["template"])
            settings.kinds[kind] = merged
        processor.files["judge"] = vars(settings)
        return settings

    def note_training(self, verdicts: Iterable[tuple[str, str]]) -> None:
        """Note what the judge is trained on: (kind, verdict) of its rows. Raises ValueError: too
        many different scores."""
        trained = {(kind, verdict) for kind, verdict in verdicts if kind in JUDGEMENTS}
        self.trained_on = sorted({kind for kind, _ in trained})
        scores = sorted({verdict for kind, verdict in trained if kind == "score"}, key=float)
        if len(scores) > MAX_SCORES:
            raise ValueError(
                f"--data: {len(scores)} different scores; round them to at most {MAX_SCORES}"
            )
        if scores:
            self.kinds["score"]["verdicts"] = scores

    def question(self, kind: str, prompt: str, responses: list[str]) -> str:
        """The question of a kind about one response, or about two in this order."""
        return format_template(
            self.kinds[kind]["template"],
            prompt=prompt,
            response=responses[0],
            response_a=responses[0],
            response_b=responses[-1],
        )

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


def with_verdict(verdict: str) -> str:
    """How a judgement ends."""
    return f"<answer>{verdict}</answer>"


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------

# The field that tells a row's kind (the first that is there), the kind, and the kind's further
# fields.
JUDGEMENT_FIELDS = {
    "score": ("score", {"question", "response", "critique"}),
    "correct": ("correct", {"question", "response", "critique"}),
    "responses": ("answers", {"preferred", "critique"}),
    "preferred": ("pictures", {"critique"}),
    "response": ("response", {"messages"}),
}
COMMON_FIELDS = {"prompt", "images", "videos", "source"}
JUDGEMENT_COLUMNS = {"question", "messages", "critique", *COMMON_FIELDS, *JUDGEMENT_FIELDS}
PROMPT_FIELDS = ("prompt", "question", "messages")
# Names of the two sides in a critique that is shown in both orders.
FIXED_NAMES = re.compile(r"\b(?i:pictures?|images?|answers?|responses?|options?) [AB]\b")


def check_judgement(row: dict) -> str:
    """The kind of a row. Raises ValueError: missing or wrong fields, or fields of different
    kinds."""
    mark = next((field for field in JUDGEMENT_FIELDS if field in row), None)
    if mark is None:
        raise ValueError(
            "a row needs a target: one of the fields response, preferred, correct and score; "
            + columns_of(row)
        )
    kind, further = JUDGEMENT_FIELDS[mark]
    known = {mark} | COMMON_FIELDS | further
    misplaced = sorted(row.keys() & JUDGEMENT_COLUMNS - known)
    if misplaced:
        raise ValueError(
            f"field {', '.join(map(repr, misplaced))} beside {mark!r}, which goes with "
            f"{', '.join(sorted(known - {mark}))}"
        )
    needs = list(_unmet_needs(row, kind))
    if needs:
        raise ValueError(f"a row with {mark!r} needs {'; '.join(needs)}; {columns_of(row)}")
    return kind


def _unmet_needs(row: dict, kind: str) -> Iterator[str]:
    """What a row of this kind needs and does not have."""
    prompts = [row[field] for field in PROMPT_FIELDS if field in row]
    types = (str, list) if kind == "response" else str
    if len(prompts) != 1 or not isinstance(prompts[0], types):
        yield "one prompt"
    response = row.get("response", "" if kind in PAIRS else None)
    texts = [row.get("critique", ""), row.get("source", "")]
    if not isinstance(response, str) or not all(isinstance(text, str | None) for text in texts):
        yield "texts as response, critique and source"
    elif kind == "response" and not response.strip():
        yield "a response that is not empty"
    images = media_list(row)
    score = row.get("score", 0)
    targets = {
        "answers": ("two texts as responses", _are_two_texts(row.get("responses"))),
        "pictures": ("two images or two responses", _are_two_texts(images)),
        "correct": ("true or false as correct", isinstance(row.get("correct"), bool)),
        # an int may be beyond floats
        "score": ("a finite number as score", type(score) in (int, float) and abs(score) < 1e300),
    }
    if kind in PAIRS and row.get("preferred") not in ("A", "B", "tie"):
        yield "A, B or tie as preferred"
    need, is_met = targets.get(kind, ("", True))
    if not is_met:
        yield need


def _are_two_texts(values: Any) -> bool:
    return isinstance(values, list) and [type(value) for value in values] == [str, str]


def read_judgement(row: dict, settings: JudgeSettings, orders: str) -> list[dict]:
    """What a row asks and wants to hear, once per order: kind, order, prompt (for the system
    instruction), question, images, text, verdict. Responses may be numbers in the file.

    Args:
        orders: both shows pairs as given and swapped; given does not.
    Raises:
        ValueError: a row that is not a judgement.
    """
    row = dict(row)
    if "response" in row:
        row["response"] = number_as_text(row["response"])
    if isinstance(row.get("responses"), list):
        row["responses"] = [number_as_text(response) for response in row["responses"]]
    kind = check_judgement(row)
    prompt = next(row[field] for field in PROMPT_FIELDS if field in row)
    images = media_list(row)
    ask = {"kind": kind, "order": "given", "prompt": prompt, "question": prompt, "images": images}
    if kind == "response":
        verdict = parse_verdict(row["response"], settings.which_answer, None)
        return [ask | {"text": row["response"], "verdict": verdict}]
    if kind not in settings.kinds:
        raise ValueError(f"a judgement row ({kind}), expected prompt and response")

    # Where the places do not fit the images, `make_prompt` says what is wrong.
    if kind != "pictures" and sum(map(prompt.count, PLACES)) == len(images):
        prompt = question_text(message_turns(prompt), len(images))
    in_order = ask | _question_in_order(row, kind, prompt, settings, "given")
    if kind not in PAIRS or orders != "both":
        return [in_order]
    critique = row.get("critique") or ""
    if FIXED_NAMES.search(critique):
        raise ValueError(
            f"write {{A}} and {{B}} for the names, which change in the other order: {critique!r:.120}"
        )
    swapped = ask | _question_in_order(row, kind, prompt, settings, "swapped")
    if kind == "pictures":
        swapped["images"] = images[::-1]
    return [in_order, swapped]


def _question_in_order(
    row: dict, kind: str, prompt: str, settings: JudgeSettings, order: str
) -> dict:
    """Order, question, text and verdict of a row that is shown in this order. Raises ValueError."""
    critique = row.get("critique") or ""
    # What is judged has no images, whatever it says.
    texts = row.get("responses", [row.get("response", "")])
    responses = [re.sub("|".join(PLACES), " ", text) for text in texts]
    verdict = _verdict(row, kind, settings)
    names = {"A": "A", "B": "B"}
    if order == "swapped":
        names = SWAPPED
        responses.reverse()
        verdict = SWAPPED.get(verdict, verdict)
    text = with_verdict(verdict)
    if critique:
        named = format_template(critique, **names) if kind in PAIRS else critique
        text = f"{named}\n{text}"
    if parse_verdict(text, settings.which_answer, [verdict]) is None:
        raise ValueError(
            f"the critique has an <answer> of its own, and the {settings.which_answer} of a"
            f" judgement is its verdict (--verdict): {critique!r:.120}"
        )
    question = settings.question(kind, prompt, responses)
    return {"order": order, "question": question, "text": text, "verdict": verdict}


def _verdict(row: dict, kind: str, settings: JudgeSettings) -> str:
    """The right verdict on a row, in the order given."""
    if kind == "score":
        return f"{row['score']:g}"
    if kind == "correct":
        return settings.kinds[kind]["verdicts"][0 if row["correct"] else 1]
    return row["preferred"]


def judge_prompt(
    processor: Processor,
    settings: JudgeSettings,
    ask: dict,
    index: int,
    source: str,
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
    further |= {"index": index, "source": source}
    return make_prompt(processor, ask["question"], ask["images"], args, system, **further)


def load_judgements(
    path: str, processor: Processor, settings: JudgeSettings, args: DataArgs
) -> list[Prompt]:
    """Rows of judgements as prompts, pairs in both orders: the reference is the verdict, the label
    the row's kind. A response without <answer> has no reference, which some rewards need.

    Raises ValueError: see `load_prompts`.
    """
    folder = os.path.dirname(os.path.abspath(path))

    def build(index: int, source: str, row: dict) -> list[Prompt]:
        prompts = []
        for k, ask in enumerate(read_judgement(row, settings, "both")):
            further = {"reference": ask["verdict"], "label": ask["kind"], "folder": folder, "row": row}
            number = 2 * index + k
            prompts.append(judge_prompt(processor, settings, ask, number, source, args, **further))
        return prompts

    loaded = read_rows(path, build, args, JUDGEMENT_COLUMNS)
    return [prompt for prompts in loaded for prompt in prompts]


def load_rl_rows(processor: Processor, args: DataArgs) -> tuple[list[list[Prompt]], list[Prompt]]:
    """Judgement rows for RL of a judge: training sets and held-out rows. Raises ValueError: bad
    rows."""
    settings = JudgeSettings.to_train(processor, which="last")
    train_sets, held_out = [
        [load_judgements(path, processor, settings, args) for path, _ in parse_datasets(listed)]
        for listed in (args.data, args.eval_data)
    ]
    settings.note_training((row.label, row.reference) for rows in train_sets for row in rows)
    return train_sets, [row for rows in held_out for row in rows]


def load_examples(
    path: str, processor: Processor, settings: JudgeSettings, args: DataArgs, orders: str
) -> list[tuple[Prompt, Tensor, dict]]:
    """Rows to imitate: prompts, the tokens of their targets, and the entries of `read_judgement`;
    prompt and target have at most `--max_prompt_tokens` together.

    Raises ValueError: see `load_prompts`.
    """
    frame = answer_frame(processor)
    folder, limit = os.path.dirname(os.path.abspath(path)), args.max_prompt_tokens

    def build(index: int, source: str, row: dict) -> list[tuple[Prompt, Tensor, dict]]:
        examples = []
        for ask in read_judgement(row, settings, orders):
            further = {"folder": folder, "row": row}
            prompt = judge_prompt(processor, settings, ask, index, source, args, **further)
            target = encode_target(processor, frame, ask["text"])
            size = len(prompt.input_ids) + len(target)
            if size > limit:
                raise ValueError(
                    f"example too long: {size} tokens, {len(target)} of them target; the limit is "
                    f"{limit}"
                )
            examples.append((prompt, target, ask))
        return examples

    loaded = read_rows(path, build, args, JUDGEMENT_COLUMNS)
    return [example for examples in loaded for example in examples]


def load_responses(
    path: str, processor: Processor, args: DataArgs, limit: int
) -> list[tuple[Prompt, Tensor]]:
    """Rows of a prompt and its response: prompts, and the tokens of the responses, of at most
    ``limit`` tokens together.

    Raises ValueError: see `load_prompts`.
    """
    args = replace(args, max_prompt_tokens=limit)
    examples = load_examples(path, processor, JudgeSettings(), args, "given")
    return [(prompt, target) for prompt, target, _ in examples]


# --------------------------------------------------------------------------------------------------
# Targets
# --------------------------------------------------------------------------------------------------


class AnswerFrame(NamedTuple):
    """What the chat template writes around an answer."""

    head: str  # a question, up to where generation begins
    before: str  # between there and the answer (LLaVA: a space)
    end: int  # the end token after it


def answer_frame(processor: Processor) -> AnswerFrame:
    """Raises ValueError: the template leaves out what the assistant says."""
    answer = "(the answer)"
    chat = []
    for role, text in (("user", "(a question)"), ("assistant", answer)):
        content = message_parts(text) if processor.family.media else text
        chat.append({"role": role, "content": content})
    head = processor.render(chat[:1], add_generation_prompt=True)
    before, match, tail = processor.render(chat).partition(answer)
    if not match:
        raise ValueError("the chat template leaves out what the assistant says")
    tokenizer = processor.tokenizer
    after = tokenizer.encode(tail, add_special_tokens=False)
    ends = [token for token in after if token in processor.stop_ids] + [tokenizer.eos_token_id]
    before = before.removeprefix(head) if before.startswith(head) else ""
    return AnswerFrame(head, before, ends[0])


def encode_target(processor: Processor, frame: AnswerFrame, text: str) -> Tensor:
    """(n,) label tokens of an answer: its own, as generation would see them, and the end token.
    Raises ValueError: a special token in the text."""
    typed = [token for token in processor.reserved_tokens if token in text]
    if typed:
        raise ValueError(f"special token {typed[0]} in the target")
    ids = processor.ids_behind(frame.head, frame.before + text)
    return torch.cat([ids, torch.tensor([frame.end])])


def encode_verdicts(processor: Processor, verdicts: list[str]) -> list[Tensor]:
    """Label tokens of each verdict, given bare."""
    frame = answer_frame(processor)
    return [encode_target(processor, frame, with_verdict(verdict)) for verdict in verdicts]
