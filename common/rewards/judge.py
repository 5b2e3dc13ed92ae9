"""Judgement rows: questions, targets and verdicts.

    row      -> question, images, text, verdict; pairs in one order or both     read_judgement
    question -> prompt under the judge's system instruction                     judge_prompt
    answer   -> label tokens, as generation would see them                      encode_target
    text     -> verdict                                                         parse_verdict

judge.json holds what is needed to ask a judge in the words it was trained on.
"""

import os
import re
from dataclasses import replace
from typing import Any, Iterable, NamedTuple

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

# kind: (template, verdicts, what a template must hold). The verdicts of scores are those of the
# training rows.
JUDGEMENTS = {
    "pictures": (
        "Request: {prompt}\nPicture A: <image>\nPicture B: <image>\n"
        "Which picture fits the request better? "
        "End with <answer>A</answer>, <answer>B</answer> or <answer>tie</answer>.",
        ["A", "B", "tie"],
        ["{prompt}"],
    ),
    "answers": (
        "Question: {prompt}\nAnswer A: {response_a}\nAnswer B: {response_b}\n"
        "Which answer is better? "
        "End with <answer>A</answer>, <answer>B</answer> or <answer>tie</answer>.",
        ["A", "B", "tie"],
        ["{prompt}", "{response_a}", "{response_b}"],
    ),
    "correct": (
        "Question: {prompt}\nAnswer: {response}\n"
        "Is the answer correct? End with <answer>yes</answer> or <answer>no</answer>.",
        ["yes", "no"],
        ["{prompt}", "{response}"],
    ),
    "score": (
        "Question: {prompt}\nAnswer: {response}\n"
        "How good is the answer? End with <answer>its score</answer>.",
        [],
        ["{prompt}", "{response}"],
    ),
}
PAIRS = ("pictures", "answers")
VERDICT_FRAME = "<answer>{verdict}</answer>"


SWAPPED = {"A": "B", "B": "A"}
MAX_SCORES = 32  # different scores in the training rows, each a verdict


def format_template(template: str, **values: str) -> str:
    """Replace {name} in one pass: a value that holds braces stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def judge_settings(
    saved: dict, templates: dict[str, str] = {}, system_instruction: str = "", which: str = "auto"
) -> dict:
    """Content of judge.json: what is given, else what the ``saved`` one of the checkpoint says,
    else built in.

    Args:
        which: the <answer> that is the verdict, first or last; auto: as saved, or last.
    Raises:
        ValueError: a template that lacks what its kind needs.
    """
    kinds = {}
    for kind, (default, verdicts, needed) in JUDGEMENTS.items():
        old = saved.get("kinds", {}).get(kind, {})
        template = templates.get(kind) or old.get("template") or default
        pictures = 2 if kind == "pictures" else 0
        if not all(part in template for part in needed) or template.count("<image>") != pictures:
            raise ValueError(
                f"--{kind}_template must hold {', '.join(needed)} and {pictures} <image>:"
                f" {template!r:.200}"
            )
        kinds[kind] = {"template": template, "verdicts": old.get("verdicts") or verdicts}
    return {
        "system_instruction": system_instruction or saved.get("system_instruction", ""),
        "answer": VERDICT_FRAME,
        "which_answer": which if which != "auto" else saved.get("which_answer", "last"),
        "kinds": kinds,
        "trained_on": [],
    }


def note_training(judge: dict, verdicts: Iterable[tuple[str, str]]) -> None:
    """Note in judge.json's content what the judge is trained on: (kind, verdict) of its rows.

    Raises ValueError: too many different scores.
    """
    trained = {(kind, verdict) for kind, verdict in verdicts if kind in JUDGEMENTS}
    judge["trained_on"] = sorted({kind for kind, _ in trained})
    scores = sorted({verdict for kind, verdict in trained if kind == "score"}, key=float)
    if len(scores) > MAX_SCORES:
        raise ValueError(
            f"--data: {len(scores)} different scores; round them to at most {MAX_SCORES}"
        )
    judge["kinds"]["score"]["verdicts"] = scores or judge["kinds"]["score"]["verdicts"]


def judge_question(judge: dict, wanted: str) -> str:
    """The kind of question to ask: the wanted one or, for auto, the pointwise one that the judge
    was trained on.

    Raises ValueError: the judge was not trained on it.
    """
    trained = judge.get("trained_on", [])
    kind = wanted if wanted != "auto" else "correct" if "correct" in trained else "score"
    if kind not in trained:
        raise ValueError(
            f"the judge was not trained on questions of the kind {kind} (--grm_question); judge.json"
            f" names {', '.join(trained) or 'none'}"
        )
    return kind


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
    wrong = _broken_rules(_with_texts(row), kind)
    if wrong:
        raise ValueError(f"a row with {mark!r} needs {'; '.join(wrong)}; {columns_of(row)}")
    return kind


def _broken_rules(row: dict, kind: str) -> list[str]:
    """What a row of this kind needs and does not have."""
    prompts = [row[field] for field in PROMPT_FIELDS if field in row]
    texts = [row.get(field) for field in ("response", "critique", "source")]
    response = row.get("response", "" if kind in PAIRS else None)
    pair, score = row.get("responses", ["", ""]), row.get("score", 0)
    holds = {
        "one prompt": (
            len(prompts) == 1 and isinstance(prompts[0], (str, list) if kind == "response" else str)
        ),
        "texts as response, critique and source": (
            response is not None and all(isinstance(text, str | None) for text in texts)
        ),
        "a response that is not empty": kind != "response" or bool(str(response).strip()),
        "two texts as responses": _two_texts(pair),
        "two images or two responses": (
            kind != "pictures" or _two_texts(media_list(row))
        ),
        "A, B or tie as preferred": kind not in PAIRS or row.get("preferred") in ("A", "B", "tie"),
        "true or false as correct": isinstance(row.get("correct", True), bool),
        # An int may be beyond floats.
        "a finite number as score": type(score) in (int, float) and abs(score) < 1e300,
    }
    return [need for need, held in holds.items() if not held]


def _two_texts(values: Any) -> bool:
    return isinstance(values, list) and [type(value) for value in values] == [str, str]


def _with_texts(row: dict) -> dict:
    """A judgement row whose responses are text where the file has numbers."""
    texts = {}
    if "response" in row:
        texts["response"] = number_as_text(row["response"])
    if isinstance(row.get("responses"), list):
        texts["responses"] = [number_as_text(response) for response in row["responses"]]
    return row | texts


def read_judgement(row: dict, judge: dict, orders: str) -> list[dict]:
    """What a row asks and wants to hear, once per order: kind, order, prompt (for the system
    instruction), question, images, text, verdict.

    Args:
        judge: content of judge.json.
        orders: both shows pairs as given and swapped; given does not.
    Raises:
        ValueError: a row that is not a judgement.
    """
    kind = check_judgement(row)
    row = _with_texts(row)
    prompt = next(row[field] for field in PROMPT_FIELDS if field in row)
    images = media_list(row)
    ask = {"kind": kind, "order": "given", "prompt": prompt, "question": prompt, "images": images}
    if kind == "response":
        verdict = parse_verdict(row["response"], judge["which_answer"], None)
        return [ask | {"text": row["response"], "verdict": verdict}]

    # Where the places do not fit the images, `make_prompt` says what is wrong.
    if kind != "pictures" and sum(map(prompt.count, PLACES)) == len(images):
        prompt = question_text(message_turns(prompt), len(images))
    shown = [ask | _question_in_order(row, kind, prompt, judge, "given")]
    if kind in PAIRS and orders == "both":
        critique = row.get("critique") or ""
        if FIXED_NAMES.search(critique):
            raise ValueError(
                "write {A} and {B} for the names, which change in the other order:"
                f" {critique!r:.120}"
            )
        swapped = ask | _question_in_order(row, kind, prompt, judge, "swapped")
        if kind == "pictures":
            swapped["images"] = images[::-1]
        shown.append(swapped)
    return shown


def _question_in_order(row: dict, kind: str, prompt: str, judge: dict, order: str) -> dict:
    """Order, question, text and verdict of a row that is shown in this order. Raises ValueError."""
    critique = row.get("critique") or ""
    responses = [_without_places(text) for text in row.get("responses", ["", ""])]
    verdict = _verdict(row, kind, judge)
    names = {"A": "A", "B": "B"}
    if order == "swapped":
        names = SWAPPED
        responses.reverse()
        verdict = SWAPPED.get(verdict, verdict)
    question = format_template(
        judge["kinds"][kind]["template"],
        prompt=prompt,
        response=_without_places(row.get("response", "")),
        response_a=responses[0],
        response_b=responses[1],
    )
    said = format_template(critique, **names) if kind in PAIRS else critique
    text = format_template(judge["answer"], verdict=verdict)
    if said:
        text = f"{said}\n{text}"
    if parse_verdict(text, judge["which_answer"], [verdict]) is None:
        raise ValueError(
            f"the critique has an <answer> of its own, and the {judge['which_answer']} of a"
            f" judgement is its verdict (--verdict): {critique!r:.120}"
        )
    return {"order": order, "question": question, "text": text, "verdict": verdict}


def _verdict(row: dict, kind: str, judge: dict) -> str:
    """The right verdict on a row, in the order given."""
    if kind == "score":
        return f"{row['score']:g}"
    if kind == "correct":
        return judge["kinds"][kind]["verdicts"][0 if row["correct"] else 1]
    return row["preferred"]


def _without_places(text: str) -> str:
    """What is judged has no pictures, whatever it says."""
    return re.sub("|".join(PLACES), " ", text)


def judge_prompt(
    processor: Processor,
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
    system = processor.files["judge"]["system_instruction"]
    if "{prompt}" in system:
        system = format_template(system, prompt=user_text(message_turns(ask["prompt"])))
    fields = {"index": index, "source": source} | further
    return make_prompt(processor, ask["question"], ask["images"], args, system, **fields)


def load_judgements(path: str, processor: Processor, args: DataArgs) -> list[Prompt]:
    """Rows of judgements as prompts, pairs in both orders: the reference is the verdict, the label
    the row's kind. A response without <answer> has no reference, which some rewards need.

    Raises ValueError: see `load_prompts`.
    """
    folder = os.path.dirname(os.path.abspath(path))

    def build(index: int, source: str, row: dict) -> list[Prompt]:
        shown = read_judgement(row, processor.files["judge"], "both")
        prompts = []
        for k, ask in enumerate(shown):
            texts = {"reference": ask["verdict"], "label": ask["kind"]}
            number = 2 * index + k
            prompts.append(
                judge_prompt(processor, ask, number, source, args, folder=folder, row=row, **texts)
            )
        return prompts

    loaded = read_rows(path, build, args, JUDGEMENT_COLUMNS)
    return [prompt for prompts in loaded for prompt in prompts]


def load_rl_rows(processor: Processor, args: DataArgs) -> tuple[list[list[Prompt]], list[Prompt]]:
    """Judgement rows for RL of a judge: training sets and held-out rows. The processor's judge.json
    becomes that of the judge which is trained. Raises ValueError: bad rows."""
    judge = judge_settings(processor.files["judge"], which="last")
    processor.files["judge"] = judge
    train_sets = []
    for path, _ in parse_datasets(args.data):
        train_sets.append(load_judgements(path, processor, args))
    held_out = []
    for path, _ in parse_datasets(args.eval_data):
        held_out += load_judgements(path, processor, args)
    rows = [row for rows in train_sets for row in rows]
    note_training(judge, [(row.label, row.reference) for row in rows])
    return train_sets, held_out


def load_responses(
    path: str, processor: Processor, args: DataArgs, limit: int
) -> list[tuple[Prompt, Tensor]]:
    """Rows of a prompt and its response: prompts, and the tokens of the responses, of at most
    ``limit`` tokens together.

    Raises ValueError: see `load_prompts`.
    """
    frame = answer_frame(processor)
    folder = os.path.dirname(os.path.abspath(path))
    args = replace(args, max_prompt_tokens=limit)

    def build(index: int, source: str, row: dict) -> tuple[Prompt, Tensor]:
        if check_judgement(row) != "response":
            raise ValueError("a judgement row; --ptx_data needs rows with prompt and response")
        (ask,) = read_judgement(row, {"which_answer": "last"}, "given")
        fields = {"index": index, "source": source, "folder": folder, "row": row}
        prompt = make_prompt(processor, ask["question"], ask["images"], args, **fields)
        target = encode_target(processor, frame, ask["text"])
        size = len(prompt.input_ids) + len(target)
        if size > limit:
            raise ValueError(f"row too long: {size} tokens; --max_tokens_per_pack is {limit}")
        return prompt, target

    return read_rows(path, build, args, JUDGEMENT_COLUMNS)


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
        content = message_parts(text) if processor.family.has_images else text
        chat.append({"role": role, "content": content})
    head = processor.render(chat[:1], add_generation_prompt=True)
    before, found, tail = processor.render(chat).partition(answer)
    if not found:
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
    """Label tokens of each verdict, given bare, as judge.json has answers given."""
    frame, template = answer_frame(processor), processor.files["judge"]["answer"]
    texts = [format_template(template, verdict=verdict) for verdict in verdicts]
    return [encode_target(processor, frame, text) for text in texts]
