"""Responses to imitate.

row    -> prompt, and response as label tokens          load_responses
text   -> label tokens, as generation would see them    encode_target
"""

from dataclasses import replace

import torch
from torch import Tensor

from common.data.coordinates import write_marks
from common.data.processor import AnswerFrame, Processor, answer_frame
from common.data.rows import (
    Example,
    Prompt,
    columns_of,
    make_prompt,
    media_list,
    read_rows,
    tell_numbered_images,
    text_column,
)
from common.flags import DataArgs

PROMPT_COLUMNS = ("prompt", "question", "messages")
RESPONSE_COLUMNS = {*PROMPT_COLUMNS, *"response images videos source regions".split()}
# Columns that make a row a judgement of its response, which may be a bad one.
JUDGING_COLUMNS = "responses preferred correct score criterion critique".split()
THOUGHT = "<think>"  # opens a thought in templates that close it with </think>


def load_responses(path: str, processor: Processor, args: DataArgs, limit: int) -> list[Example]:
    """Rows of a prompt and its response, of at most ``limit`` tokens together. Raises ValueError: see
    `load_prompts`."""
    args, frame = replace(args, max_prompt_tokens=limit), answer_frame(processor)

    def build(row: dict, fields: dict) -> Example:
        judging = [name for name in JUDGING_COLUMNS if row.get(name) is not None]
        if judging:
            raise ValueError(f"{', '.join(judging)}: a judgement, not a response to imitate")
        text = response_of(row)
        prompt = make_prompt(processor, prompt_of(row), media_list(row), args, **fields)
        text = write_marks(text, prompt.regions)
        return Example(prompt, bounded_target(processor, frame, text, prompt, limit), text)

    examples = read_rows(path, build, args, RESPONSE_COLUMNS)
    tell_numbered_images(path, [example.prompt for example in examples])
    return examples


def prompt_of(row: dict) -> str | list:
    """The text or messages of a row. Raises ValueError: none, or several."""
    prompts = [row[name] for name in PROMPT_COLUMNS if row.get(name) is not None]
    if len(prompts) != 1:
        raise ValueError(f"a row has one of {', '.join(PROMPT_COLUMNS)}; {columns_of(row)}")
    return prompts[0]


def response_of(row: dict) -> str:
    """The response that a row holds. Raises ValueError: none."""
    text = text_column(row, "response") or ""
    if not text.strip():
        raise ValueError("a response to imitate must not be empty")
    return text


def encode_target(processor: Processor, frame: AnswerFrame, text: str) -> Tensor:
    """(n,) label tokens of an answer: its own, as generation would see them, and the end token.
    Raises ValueError: a special token in the text."""
    ids = processor.ids_behind(frame.head, framed_answer(processor, frame, text))
    return torch.cat([ids, torch.tensor([frame.end])])


def bounded_target(
    processor: Processor, frame: AnswerFrame, text: str, prompt: Prompt, limit: int
) -> Tensor:
    """`encode_target` of a text of at most ``limit`` tokens together with its prompt. Raises ValueError."""
    processor.check_length("example", text, limit)
    target = encode_target(processor, frame, text)
    size = len(prompt.input_ids) + len(target)
    if size > limit:
        raise ValueError(
            f"example too long: {size} tokens, {len(target)} of them target; the limit is {limit}"
        )
    return target


def framed_answer(processor: Processor, frame: AnswerFrame, text: str) -> str:
    """An answer after what the template writes before it. Raises ValueError: a special token in the
    text."""
    typed = [token for token in processor.reserved_tokens if token in text]
    if typed:
        raise ValueError(f"special token {typed[0]} in the target")
    before = frame.before
    if "</think>" in text:  # in place of the template's empty thought
        before = "" if "</think>" in before else before
        if frame.head.rstrip().endswith(THOUGHT):
            text = text.removeprefix(THOUGHT).lstrip("\n")
    # the template of R1's distills opens a thought: close it, as there is none to imitate
    elif (frame.head + before).rstrip().endswith(THOUGHT):
        before += "\n</think>\n\n"
    return before + text
