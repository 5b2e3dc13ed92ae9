"""Conversations whose answers are learned.

    row       -> its messages; for each answer an example, with the turns before    read_answers
    examples  -> those that continue each other, as one example                     join_conversations

An answer stands behind exactly the prompt that the model reads before it answers, as the chat template
renders this prompt. Where the prompt begins with all of the example before, token by token, the two are
one example with a stream, in which each token stands once. Some templates change earlier turns (Qwen3's
leaves out their thoughts): there a conversation stays several examples.

Shapes: n label tokens of an answer, R tokens of a stream.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from common.buffers import EMPTY
from common.data.coordinates import Regions, write_marks
from common.data.processor import AnswerFrame, Processor, called_function
from common.data.responses import (
    PROMPT_COLUMNS,
    bounded_target,
    framed_answer,
    prompt_column,
)
from common.data.rows import (
    Example,
    Prompt,
    Stream,
    make_prompt,
    media_list,
    media_parts,
    place_media,
    read_messages,
    with_regions,
)
from common.flags import DataArgs
from common.ground.files import UserError

THOUGHT_KEY = "reasoning_content"


def ends_with_answer(row: dict) -> bool:
    """Whether the messages of a row end with the assistant's."""
    if not any(row.get(name) is not None for name in PROMPT_COLUMNS):
        return False
    messages = read_messages(prompt_column(row))
    return bool(messages) and messages[-1]["role"] == "assistant"


def read_answers(
    row: dict,
    fields: dict,
    processor: Processor,
    args: DataArgs,
    frame: AnswerFrame | None,
    instruct: Callable[[list], str],
) -> list[Example]:
    """An example for each answer of a row that is to be learned, in their order.

    Args:
        fields: the further ones of the prompts.
        frame: None: no answer is learned, so the last one's prompt is all.
        instruct: messages before an answer -> system message, or "".
    Raises:
        UserError: no such answer, or one that cannot be written.
    """
    messages = read_messages(prompt_column(row))
    learned = answers_to_learn(messages)
    media = place_media(messages, media_list(row))

    def prompt_before(k: int) -> Prompt:
        chat = messages[:k]
        files = media[: len(media_parts(chat))]
        return make_prompt(processor, chat, files, args, instruct(chat), **fields)

    regions = None
    if row.get("regions") is not None:  # of an image that may be a later turn's
        regions = with_regions(prompt_before(learned[-1])).regions
    write_regions(messages, regions)
    examples = []
    for k in learned if frame else learned[-1:]:
        prompt = replace(prompt_before(k), regions=regions)
        text, target = learned_text(messages[k]), EMPTY
        if frame:
            framed = framed_turn(processor, frame, prompt, messages[k])
            text = framed.strip() if has_more(messages[k]) else text
            target = bounded_target(processor, frame, framed, prompt, args)
        examples.append(Example(prompt, target, text))
    return examples


def answers_to_learn(messages: list[dict]) -> list[int]:
    """Which messages are to be learned: the assistant's, but for those that say otherwise. Raises
    UserError: none."""
    learned = []
    for k, message in enumerate(messages):
        wish = pop_wish(message)
        if message["role"] == "assistant" and wish is not False:
            learned.append(k)
    if not learned:
        raise UserError('the row has no answer to learn: each says "loss": false, or "weight": 0')
    return learned


def pop_wish(message: dict) -> bool | None:
    """Take out of a message whether it is to be learned, as ms-swift ("loss") or OpenAI ("weight") say it;
    None: it does not say. Raises UserError: not true or false, 1 or 0."""
    values = [message.pop("loss", None), message.pop("weight", None)]
    wishes = [value for value in values if value is not None]
    if any(wish not in (0, 1) or wish != wishes[0] for wish in wishes):
        raise UserError(f"loss and weight of a message are true or false, 1 or 0, not {values}")
    if any(wishes) and message["role"] != "assistant":
        raise UserError(f"only answers can be learned, not what the {message['role']} says")
    return bool(wishes[0]) if wishes else None


def write_regions(messages: list[dict], regions: Regions | None) -> None:
    """Replace <box> and <point> in answers by the row's regions. Raises UserError: see `write_marks`."""
    answers = [message for message in messages if message["role"] == "assistant"]
    parts = [part for answer in answers for part in answer["content"] if part["type"] == "text"]
    texts = write_marks([part["text"] for part in parts], regions)
    for part, text in zip(parts, texts):
        part["text"] = text


def learned_text(message: dict) -> str:
    """The text of an answer; it may be empty if it has a thought or calls tools. Raises UserError: an
    image, or no text."""
    if media_parts([message]):
        raise UserError("an answer to learn must be text: the tokens of an image cannot be learned")
    text = "".join(part["text"] for part in message["content"])
    if not text.strip() and not has_more(message):
        raise UserError("an answer to learn must not be empty")
    return text


def has_more(message: dict) -> bool:
    """Whether an answer has a thought or calls beside its text."""
    return bool(message.get(THOUGHT_KEY) or message.get("tool_calls"))


def framed_turn(processor: Processor, frame: AnswerFrame, prompt: Prompt, message: dict) -> str:
    """An answer after what the template writes before it. A thought and calls of tools are written by the
    template. Raises UserError: it cannot write them, or a special token in the text."""
    if not has_more(message):
        return framed_answer(processor, frame, learned_text(message))
    whole = processor.render([*prompt.messages, message])
    end = processor.tokenizer.convert_ids_to_tokens(frame.end)
    written, is_ended, _ = whole.removeprefix(prompt.text).partition(end)
    calls = message.get("tool_calls") or []
    expected = [(message.get(THOUGHT_KEY) or "").strip()]
    expected += [called_function(call)["name"] for call in calls]
    if not (whole.startswith(prompt.text) and is_ended and all(x in written for x in expected)):
        raise UserError(
            f"the chat template does not write the {THOUGHT_KEY} or the tool_calls at the start of "
            f"an answer; write a thought into the text, as <think>...</think>: {message!r:.120}"
        )
    return written


def join_conversations(examples: list[Example], shows_images: bool) -> list[Example]:
    """The examples of a conversation, where each that continues the one before is part of it.

    Args:
        shows_images: whether images may stand behind an answer.
    """
    joined: list[Example] = []
    for example in examples:
        if joined and continues(joined[-1], example, shows_images):
            joined[-1] = extended(joined[-1], example)
        else:
            joined.append(example)
    return joined


def stream_of(example: Example) -> Stream:
    is_own = torch.ones_like(example.target, dtype=torch.bool)
    return example.stream or Stream(example.target, is_own, [], example)


def continues(first: Example, then: Example, shows_images: bool) -> bool:
    """Whether the prompt of one example begins with all that another one teaches, token by token."""
    old, new = first.prompt, then.prompt
    read = torch.cat([old.input_ids, stream_of(first).input_ids])
    if not torch.equal(new.input_ids[: len(read)], read):
        return False
    same_images = new.grids[: len(old.grids)] == old.grids
    return same_images and (shows_images or len(new.grids) == len(old.grids))


def extended(first: Example, then: Example) -> Example:
    """Two examples, of which one continues the other, as one."""
    stream, old, new = stream_of(first), first.prompt, then.prompt
    between = new.input_ids[first.length :]  # (n,)
    is_own = [stream.is_own, torch.zeros(len(between)).bool(), torch.ones(len(then.target)).bool()]
    answered = len(stream.last.prompt.messages) + 1
    images = {name: getattr(new, name) for name in ("images", "grids", "image_tokens", "places")}
    return Example(
        prompt=replace(old, reference=new.reference, **images),
        target=torch.cat([first.target, then.target]),
        text=then.text,
        stream=Stream(
            input_ids=torch.cat([stream.input_ids, between, then.target]),
            is_own=torch.cat(is_own),
            messages=[*stream.messages, new.messages[answered:]],
            last=then,
        ),
    )
