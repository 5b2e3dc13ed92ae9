"""Responses and conversations as text, for rewards and reports.

turn_texts           what the policy said, turn by turn
token_texts          ... token by token
finished_text        ... in a last turn, unless it was cut off
messages             a conversation as chat messages
as_text              ... as one text, with words in the place of each image
"""

from collections.abc import Sequence

from common.buffers import Batch, Conversation
from common.data.processor import Processor


def turn_texts(batch: Batch, picks: Sequence[int], processor: Processor) -> list[list[str]]:
    """What the policy said in the samples ``picks``: one text for each turn."""
    turns = batch.turns
    return [processor.decode(turns[i]) for i in picks]


def token_texts(ids: list[int], processor: Processor) -> list[str]:
    """A text for each token, special ones too; joined, they are the decoded text. A character of
    several tokens stands at its last one."""

    def decode(some: list[int]) -> str:
        return processor.tokenizer.decode(some, clean_up_tokenization_spaces=False)

    whole, texts = decode(ids), []
    covered = 0  # characters of the whole that are in `texts`
    # tokens from `before` on are decoded again: a first token may lose its space
    before, first = 0, 0
    for last in range(len(ids)):
        text = decode(ids[before : last + 1]).removeprefix(decode(ids[before:first]))
        if whole.startswith(text, covered):
            before, first = first, last + 1
        else:  # the first bytes of a character
            text = ""
        texts.append(text)
        covered += len(text)
    if ids:
        texts[-1] += whole[covered:]
    return texts


def finished_text(batch: Batch, i: int, text: str) -> str:
    """The ``text`` of the last turn of sample i; "" if the turn was cut off, as an answer that it merely
    quotes could be taken for its own."""
    is_whole = not batch.truncated[i]
    if batch.conversations and not is_whole:  # a limit may also end it after a complete turn
        conversation = batch.conversations[i]
        is_whole = batch.own_lengths[i] in conversation.ends and not conversation.is_cut
    return text if is_whole else ""


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
    """A conversation as one text; a single turn unchanged."""
    if len(turns) == 1 and not conversation.opening:
        return turns[0]
    chat = messages(conversation, turns)
    return "\n".join(f"{one['role']}: {message_text(one)}" for one in chat)


def message_text(message: dict) -> str:
    """The content of a message, with words in the place of each image."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", " (an image) ") for part in content)
