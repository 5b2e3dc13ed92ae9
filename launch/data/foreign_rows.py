"""One row of another system as rows of ours.

row -> further columns        before_reading          Vero's extra_info, ms-swift's pairs, texts of FineVision
    -> regions                foreign_boxes
    -> prompt and target      convert_prompt, or foreign_pairs
    -> answer and choices     foreign_answers
    -> what is left           account_for
"""

import re
from typing import Any

from common.ground.files import UserError
from launch.data import foreign_pairs
from launch.data.accounts import Account, Row, read_side
from launch.data.foreign_answers import final_answers, take_answer, take_choices
from launch.data.foreign_boxes import check_marks, fill_marks, read_regions, take_regions
from launch.data.foreign_messages import (
    Options,
    Reading,
    as_list,
    as_messages,
    as_one_text,
    as_text,
    read_json_text,
    read_messages,
    take_media,
    take_prompt,
    target_text,
    write_messages,
)
from launch.data.pictures import Images

LABELS = ("label", "source", "data_source", "query_source")
EXTRA = {"label": "reward_type", "tolerance": "tolerance"}  # of Vero's extra_info
# Columns of ours that trainers and rewards read: they stay as they are.
OURS = ("regions", "rubric", "tolerance", "pair", "benchmark")
# ... if --columns names them: under these names other systems mean something else.
JUDGED = ("correct", "score", "critique", "criterion")
# Names under which a column would change how a trainer or a reward reads the row.
TAKEN = {"prompt", "question", "messages", "images", "image", "videos", "video", "answer", "label"}
TAKEN |= {"answers", "response", "responses", "preferred", "regions", "rubric", *JUDGED}
# A list or object as Python prints it.
PYTHON = r"(?s)\s*(<answer>)?\s*[\[{(].*'.*[\]})]\s*(</answer>)?\s*"


def convert(
    row: dict, images: Images, how: Options, account: Account, split: str = "rows"
) -> list[dict]:
    """The rows of the trainers that a row of another system becomes: one, or a pair for each rejected
    response.

    Raises UserError, FileNotFoundError with a message for the user; KeyError, TypeError and the like:
    the row has no form that is read.
    """
    rest = without(row, how.drop)
    refuse_texts(rest, how)
    rest, known = before_reading(rest)
    parts = foreign_pairs.split_pairs(rest)
    rows = [convert_one(Reading(part, images, how, account, split, dict(known))) for part in parts]
    account.rows[split] += len(rows)
    return rows


def without(row: dict, drop: Any) -> dict:
    """The columns of a row that are not null, without those that are dropped (a or a.b)."""
    rest = {name: value for name, value in row.items() if value is not None and name not in drop}
    for name in drop:
        column, _, key = name.partition(".")
        if key and isinstance(rest.get(column), dict):
            rest[column] = without(rest[column], [key])
    return rest


def refuse_texts(rest: dict, how: Options) -> None:
    """Raises UserError, with a function to paste: a column holds an object of JSON, or what Python prints,
    as text."""
    for name, value in rest.items():
        if not isinstance(value, str) or name in how.keep or not value.lstrip(" <answer>")[:1]:
            continue
        if isinstance(read_json_text(value), dict) and name in ("text", "prompt"):
            reading = f'json.loads(row.pop("{name}")) | row'
            raise UserError(advice_to_map(f"{name} is an object of JSON", "json", reading))
        if re.fullmatch(PYTHON, value) and read_json_text(value) is None:
            text = f'row["{name}"]'
            if "<answer>" in value:
                text = f'{text}.removeprefix("<answer>").removesuffix("</answer>")'
            reading = f'row | {{"{name}": ast.literal_eval({text})}}'
            raise UserError(
                advice_to_map(f"{name} is a list or object as Python prints it", "ast", reading)
                + f"\n(--keep {name} if it is meant as a text)"
            )


def advice_to_map(problem: str, module: str, result: str) -> str:
    """What to write into a file of one's own."""
    return (
        f"{problem}. Write my_rows.py, and add --map my_rows.py:row\n"
        f"  import {module}\n  def row(row):\n      return {result}"
    )


def before_reading(rest: dict) -> tuple[dict, dict]:
    """The columns of a row to read, and those that stay in it although they are read: forms that are
    others under another name."""
    known = {}
    extra = rest.get("extra_info")
    if isinstance(extra, dict):
        known["extra_info"], extra = extra, dict(extra)
        for ours, theirs in EXTRA.items():
            if ours not in rest and extra.get(theirs) not in (None, ""):
                rest[ours] = extra.pop(theirs)
        rest["extra_info"] = extra
    for column in {"rejected_response", "rejected_messages"} & rest.keys():  # ms-swift
        chosen = next((name for name in ("response", "messages") if name in rest), None)
        if chosen:
            rest |= {"rejected": rest.pop(column), "chosen": rest.pop(chosen)}
    texts = rest.get("texts")
    if isinstance(texts, list) and all(isinstance(turn, dict) and "user" in turn for turn in texts):
        rest["messages"] = messages_of_texts(rest.pop("texts"), len(as_list(rest.get("images"))))
        sources = {turn.get("source") for turn in texts}
        if len(sources) == 1:
            rest.setdefault("source", sources.pop())
    return rest, known


def messages_of_texts(texts: list[dict], images: int) -> list[dict]:
    """The messages of FineVision's and The Cauldron's questions and answers about the same images."""
    messages = []
    for turn in texts:
        further = {
            key: value for key, value in turn.items() if key not in ("user", "assistant", "source")
        }
        marks = "" if messages or "<image>" in turn["user"] else "<image>" * images
        messages.append({"role": "user", "content": marks + turn["user"]})
        messages.append({"role": "assistant", "content": turn["assistant"]} | further)
    return messages


def convert_one(reading: Reading) -> dict:
    """One row of ours."""
    rest, how = reading.rest, reading.how
    read = OURS + tuple(name for name in JUDGED if name in how.columns)
    reading.known |= {name: rest.pop(name) for name in read if name in rest}
    regions, names = take_regions(reading)
    has_objects = regions is not None
    is_pair = foreign_pairs.is_pair(rest)
    converted = foreign_pairs.convert_pair(reading) if is_pair else convert_prompt(reading)
    add_choices(reading, converted)
    regions = regions or read_regions(converted.get("answer"), how)
    if regions:
        if "messages" in converted:
            raise UserError(
                "--turns all: boxes in answers are written for each model in a response alone"
            )
        converted["regions"] = regions
        fill_marks(converted, names or regions.get("labels", []))
    if has_objects:
        check_marks(converted, names)
    take_label(reading, converted, "source" if is_pair else "label")
    return account_for(reading, converted)


def convert_prompt(reading: Reading) -> dict:
    """The prompt, images, videos, answer and response of a row; on --turns all, messages in place of prompt
    and response."""
    prompt = take_prompt(reading)
    response: Any = read_messages(
        reading.take("completion", "output", "response"), reading.how.drop
    )
    ends = isinstance(prompt, list) and prompt[-1]["role"] == "assistant"
    if response is not None and ends:
        raise UserError("the prompt ends with the assistant, and there is a response, too")
    if isinstance(response, list):
        response = write_messages(reading, response)
    elif response is not None:
        response = [{"role": "assistant", "content": as_text(response)}]
    elif ends:
        prompt, response = prompt[:-1], prompt[-1:]
    converted: dict = {"prompt": prompt}
    if response:
        converted = with_target(reading, prompt, response)
    converted |= take_media(reading)
    answer = take_answer(reading)
    if answer is None and "response" in converted:
        answer = answer_of_response(reading, converted["response"])
    return converted if answer is None else converted | {"answer": answer}


def with_target(reading: Reading, prompt: str | list, response: list[dict]) -> dict:
    """A prompt and the messages behind it, of which the last is to be imitated; on --turns all, each of
    the assistant's."""
    if not prompt:
        raise UserError("a conversation without a prompt")
    if reading.how.turns == "all":
        return {"messages": [*as_messages(prompt), *response]}
    if len(response) > 1:
        prompt = [*as_messages(prompt), *response[:-1]]
    turns = prompt if isinstance(prompt, list) else []
    context = sum(message["role"] == "assistant" for message in turns)
    if context:
        reading.account.notes["answers are context alone: --turns all has them learned"] += context
    return {"prompt": prompt, "response": target_text(response[-1])}


def answer_of_response(reading: Reading, response: str) -> str | None:
    """The final answer of a response to imitate, or else the response."""
    answers = final_answers(response)
    if len(answers) > 1:
        reading.account.notes["responses mark several final answers: these rows get no answer"] += 1
        return None
    return answers[0] if answers else response


def add_choices(reading: Reading, converted: dict) -> None:
    """Append the choices to a prompt that does not show them, and write the letter of an answer that is a
    number, by --choices."""
    column = "messages" if "messages" in converted else "prompt"
    text = as_one_text(without_keys(converted[column]))
    lines, answer = take_choices(reading, text, converted.get("answer"))
    if answer is not None:
        converted["answer"] = answer
    if not lines:
        return
    if column == "messages":
        raise UserError("--choices and --turns all: write the choices into the messages by --map")
    if isinstance(converted["prompt"], str):
        converted["prompt"] = "\n".join([converted["prompt"], *lines])
    else:
        *before, last = converted["prompt"]
        converted["prompt"] = [*before, with_lines(last, lines)]


def without_keys(prompt: str | list) -> str | list:
    """A prompt whose messages have role and content alone."""
    if isinstance(prompt, str):
        return prompt
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def with_lines(message: dict, lines: list[str]) -> dict:
    """A message with lines at the end of its text."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": "\n".join([content, *lines])}
    return message | {"content": [*content, {"type": "text", "text": "\n".join(["", *lines])}]}


def take_label(reading: Reading, converted: dict, name: str) -> None:
    """The label of a row. What names a side, and what is neither text nor number, is no label."""
    found_in = next((column for column in LABELS if column in reading.rest), "")
    value = reading.rest.get(found_in)
    is_label = isinstance(value, str) and not read_side(value)
    is_label |= isinstance(value, int | float) and not isinstance(value, bool)
    label = as_text(reading.rest.pop(found_in)) if is_label else reading.how.label
    if label:
        converted[name] = label


def account_for(reading: Reading, converted: dict) -> dict:
    """The row with the columns that stay in it. Those that nothing reads are entered in the account."""
    prompt = converted.get("prompt", converted.get("messages", ""))
    texts = [as_one_text(without_keys(prompt)), converted.get("response"), converted.get("answer")]
    texts = [text for text in (*texts, reading.known.get("solution")) if isinstance(text, str)]
    replaced = [f"original_{name}" for name in reading.how.columns]
    if {"image", "images"} & reading.how.columns.keys():
        replaced += ["original_image", "original_images"]
    where = Row(reading.split, texts, "preferred" in converted, replaced)
    row = converted | reading.known
    for column, value in reading.rest.items():
        reading.account.enter(column, value, where)
        if column in reading.known:
            continue
        is_taken = column in TAKEN or column in row
        row[f"original_{column}" if is_taken else column] = value
    return row
