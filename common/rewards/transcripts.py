"""Conversations as people, judges and metrics read them.

turn_texts           what the policy said, turn by turn
messages             a conversation as chat messages
as_text              ... as one text, with a mark in the place of each picture
conversation_metrics turns, seconds, errors, and how samples ended
gather_pictures      the pictures of some samples, from the ranks that have them
"""

import torch.distributed as dist
from PIL import Image

from common import distributed
from common.buffers import Batch, Conversation, ENDINGS
from common.data.processor import Processor

PICTURE = "\x02picture\x03"  # in `as_text`


def turn_texts(batch: Batch, picks: list[int], processor: Processor) -> list[list[str]]:
    """What the policy said in the samples ``picks``: one text for each turn."""
    tokens, turns = batch.split(batch.tokens), []
    for i in picks:
        if batch.conversations:
            turns.append(batch.conversations[i].turn_tokens(tokens[i]))
        else:
            turns.append([tokens[i]])
    texts = iter(processor.decode([turn for own in turns for turn in own]))
    return [[next(texts) for _ in own] for own in turns]


def messages(said: Conversation, turns: list[str]) -> list[dict]:
    """A conversation after its prompt, as chat messages; pictures with their size."""
    found = [{"role": said.role, "content": said.opening}] if said.opening else []
    for k, turn in enumerate(turns):
        found.append({"role": "assistant", "content": turn})
        if k < len(said.replies):
            found.append({"role": said.role, "content": said.replies[k]})
    return found


def as_text(said: Conversation, turns: list[str]) -> str:
    """A conversation as one text; one turn alone as it is."""
    if len(turns) == 1 and not said.opening:
        return turns[0]
    lines = []
    for message in messages(said, turns):
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", PICTURE) for part in content)
        lines.append(f"{message['role']}: {content}")
    return "\n".join(lines)


def whole_texts(batch: Batch, turns: list[list[str]]) -> list[str]:
    """(S,) responses as one text each; of conversations with what environments said."""
    if batch.conversations:
        return list(map(as_text, batch.conversations, turns))
    return [own[-1] for own in turns]


def picture_sizes(said: Conversation) -> list[tuple[int, int]]:
    """(width, height) of what an environment has shown, in order."""
    parts = [part for reply in (said.opening, *said.replies) for part in reply]
    return [(part["width"], part["height"]) for part in parts if part["type"] == "image"]


def conversation_metrics(
    conversations: list[Conversation], labels: list[str | None], section: str
) -> dict[str, float]:
    """Means over samples, as ``section/``...; of several labels also one by one."""
    if not conversations:
        return {}
    parts: dict[str, list[Conversation]] = {}
    for said, label in zip(conversations, labels):
        if label is not None:
            parts.setdefault(f"/{label}", []).append(said)
    if len(parts) < 2:
        parts = {}
    metrics = {}
    for label, own in {"": conversations, **parts}.items():
        columns = {
            "turns": [len(said.tokens_before) + 1 for said in own],
            "env_seconds": [said.seconds for said in own],
        }
        for ending in ENDINGS:
            columns[f"ended_{ending}"] = [said.ended == ending for said in own]
        for name, values in columns.items():
            metrics[f"{section}/{name}{label}"] = sum(values) / len(values)
        failed = sum(said.error != "" for said in own)
        metrics[f"{section}/env_errors{label}"] = float(failed)
    return metrics


def gather_pictures(batch: Batch, picks: list[int]) -> list[list[Image.Image]]:
    """What environments have shown in each of the samples ``picks``; every rank calls."""
    if not batch.conversations:
        return [[] for _ in picks]
    own = {}
    for i in picks:
        if batch.owners[int(batch.prompt_index[i])] == dist.get_rank():
            own[i] = batch.conversations[i].pictures
    by_sample: dict[int, list[Image.Image]] = {}
    for part in distributed.gather_objects(own):
        by_sample |= part
    return [by_sample[i] for i in picks]
