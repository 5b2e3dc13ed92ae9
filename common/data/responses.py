"""Responses to imitate.

row    -> its prompt and its response                   prompt_column, response_of
text   -> label tokens, as generation would see them    encode_target
"""

import torch
from torch import Tensor

from common.data.processor import AnswerFrame, Processor
from common.data.rows import Prompt, columns_of, text_column
from common.flags import DataArgs
from common.ground.files import UserError

PROMPT_COLUMNS = ("prompt", "question", "messages")
THOUGHT = "<think>"  # opens a thought in templates that close it with </think>


def prompt_column(row: dict) -> str | list:
    """The text or messages of a row. Raises UserError: none, or several."""
    prompts = [row[name] for name in PROMPT_COLUMNS if row.get(name) is not None]
    if len(prompts) != 1:
        raise UserError(f"a row has one of {', '.join(PROMPT_COLUMNS)}; {columns_of(row)}")
    return prompts[0]


def response_of(row: dict) -> str:
    """The response that a row holds. Raises UserError: none."""
    text = text_column(row, "response") or ""
    if not text.strip():
        raise UserError("a response to imitate must not be empty")
    return text


def encode_target(processor: Processor, frame: AnswerFrame, text: str) -> Tensor:
    """(n,) label tokens of an answer: its own, as generation would see them, and the end token.
    Raises UserError: a special token in the text."""
    return encode_framed(processor, frame, framed_answer(processor, frame, text))


def encode_framed(processor: Processor, frame: AnswerFrame, framed: str) -> Tensor:
    """(n,) label tokens of an answer after what the template writes before it."""
    ids = processor.ids_behind(frame.head, framed)
    return torch.cat([ids, torch.tensor([frame.end])])


def bounded_target(
    processor: Processor, frame: AnswerFrame, framed: str, prompt: Prompt, args: DataArgs
) -> Tensor:
    """`encode_framed` of at most `--max_prompt_tokens` together with the prompt. Raises UserError."""
    processor.check_length("example", framed, args)
    target = encode_framed(processor, frame, framed)
    size = len(prompt.input_ids) + len(target)
    if size > args.max_prompt_tokens:
        raise UserError(
            f"example too long: {size} tokens, {len(target)} of them target; the limit is "
            f"{args.max_prompt_tokens} ({args.limit_flag})"
        )
    return target


def framed_answer(processor: Processor, frame: AnswerFrame, text: str) -> str:
    """An answer after what the template writes before it. Raises UserError: a special token in the
    text."""
    typed = [token for token in processor.reserved_tokens if token in text]
    if typed:
        raise UserError(f"special token {typed[0]} in the target")
    before = frame.before
    if "</think>" in text:  # in place of the template's empty thought
        before = "" if "</think>" in before else before
        if frame.head.rstrip().endswith(THOUGHT):
            text = text.removeprefix(THOUGHT).lstrip("\n")
    # the template of R1's distills opens a thought: close it, as there is none to imitate
    elif (frame.head + before).rstrip().endswith(THOUGHT):
        before += "\n</think>\n\n"
    return before + text
