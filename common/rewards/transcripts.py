"""Conversations as people, judges and metrics read them.

turn_texts           what the policy said, turn by turn
finished_text        ... in a last turn, unless it was cut off
messages             a conversation as chat messages
as_text              ... as one text, with a mark in the place of each image
conversation_metrics turns, seconds, errors, and how samples ended
gather_images        the images of some samples, from the ranks that have them
"""

import itertools
from statistics import fmean
from typing import Sequence

from PIL import Image

from common import distributed
from common.buffers import Batch, Conversation, ENDINGS
from common.data.processor import Processor

IMAGE_MARK = "\x02image\x03"  # in `as_text`


def turn_texts(batch: Batch, picks: Sequence[int], processor: Processor) -> list[list[str]]:
    """What the policy said in the samples ``picks``: one text for each turn."""
    tokens, texts = batch.split(batch.tokens), []
    for i in picks:
        turns = [tokens[i]]
        if batch.conversations:
            turns = batch.conversations[i].turn_tokens(tokens[i])
        texts.append(processor.decode(turns))
    return texts


def finished_text(batch: Batch, i: int, text: str) -> str:
    """The ``text`` of the last turn of sample i; "" if the turn was cut off, in which an answer that it
    quotes would pass for its own."""
    # A limit may also end a conversation after a turn that is whole.
    is_whole = batch.conversations and batch.lengths[i] in batch.conversations[i].ends
    return "" if batch.truncated[i] and not is_whole else text


def messages(conversation: Conversation, turns: list[str]) -> list[dict]:
    """A conversation after its prompt, as chat messages; images with their size."""
    role, chat = conversation.role, []
    if conversation.opening:
        chat.append({"role": role, "content": conversation.opening})
    for k, turn in enumerate(turns):
        chat.append({"role": "assistant", "content": turn})
        if k < len(conversation.replies):
            chat.append({"role": role, "content": conversation.replies[k]})
    return chat


def as_text(conversation: Conversation, turns: list[str]) -> str:
    """A conversation as one text; one turn alone as it is."""
    if len(turns) == 1 and not conversation.opening:
        return turns[0]
    chat = messages(conversation, turns)
    return "\n".join(f"{one['role']}: {plain_text(one, IMAGE_MARK)}" for one in chat)


def plain_text(message: dict, mark: str) -> str:
    """The content of a message, with ``mark`` in the place of each image."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", mark) for part in content)


def whole_texts(batch: Batch, picks: list[int], processor: Processor) -> list[str]:
    """The responses of the samples ``picks`` as one text each; of conversations with what
    environments said."""
    turns = turn_texts(batch, picks, processor)
    if not batch.conversations:
        return [texts[-1] for texts in turns]
    return [as_text(batch.conversations[i], texts) for i, texts in zip(picks, turns)]


def image_sizes(conversation: Conversation) -> list[tuple[int, int]]:
    """(width, height) of what an environment has shown, in order."""
    parts = [*conversation.opening, *itertools.chain(*conversation.replies)]
    return [(part["width"], part["height"]) for part in parts if part["type"] == "image"]


def conversation_metrics(conversations: list[Conversation], section: str) -> dict[str, float]:
    """Means over samples, as ``section/...``, and the number of samples whose environment failed."""
    if not conversations:
        return {}
    columns = {
        "turns": [len(one.tokens_before) + 1 for one in conversations],
        "env_seconds": [one.seconds for one in conversations],
    }
    for ending in ENDINGS:
        columns[f"ended_{ending}"] = [one.ended == ending for one in conversations]
    metrics = {f"{section}/{name}": fmean(values) for name, values in columns.items()}
    metrics[f"{section}/env_errors"] = float(sum(one.error != "" for one in conversations))
    return metrics


def gather_images(batch: Batch, picks: list[int]) -> list[list[Image.Image]]:
    """What environments have shown in each of the samples ``picks``; every rank calls."""
    if not batch.conversations:
        return [[] for _ in picks]
    # One rank has those of a sample, and the others none.
    by_rank = distributed.gather_objects([batch.conversations[i].images for i in picks])
    return [list(itertools.chain(*parts)) for parts in zip(*by_rank)]
