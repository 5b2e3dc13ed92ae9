"""Samples as records: JSON objects, pictures of them, and what a set of them amounts to."""

import math

from PIL import Image

from common.buffers import Batch
from common.cards import GREEN, Section, conversation_card, panel, sample_card
from common.transcripts import messages, turn_texts
from common.vlm.data import Processor, user_text
from common.vlm.images import read_frames


def sample_records(batch: Batch, processor: Processor) -> list[dict]:
    """One JSON-ready record per sample."""
    turns = turn_texts(batch, list(range(len(batch))), processor)
    records = []
    for i, index in enumerate(batch.prompt_index.tolist()):
        row = batch.prompts[index]
        record = {
            "index": row.index,
            "source": row.source,
            "sample": int(batch.number[i]),
            "prompt": row.text,
            "question": user_text(row.messages),
            "images": list(row.images),
            "response": turns[i][-1],
            "reference": row.reference,
            "label": row.label,
            "reward": float(batch.rewards[i]),
            "response_length": int(batch.lengths[i]),
            "truncated": bool(batch.truncated[i]),
        }
        components = {name: float(values[i]) for name, values in batch.components.items()}
        record["components"] = {
            name: value for name, value in components.items() if not math.isnan(value)
        }
        if batch.conversations:
            said = batch.conversations[i]
            record |= {"turns": len(turns[i]), "ended": said.ended, "turn_rewards": said.rewards}
            record["conversation"] = messages(said, turns[i])
            if said.error:
                record["env_error"] = said.error
        if any(batch.judgements):
            record["judgement"] = batch.judgements[i]
        records.append(record)
    if batch.advantages is not None:
        for record, advantages in zip(records, batch.split(batch.advantages)):
            record["advantage"] = float(advantages.mean())
    return records


def sample_pictures(records: list[dict], shown: list[list[Image.Image]]) -> list[Image.Image]:
    """Pictures of samples: the images, frames of the videos, what was asked, what was answered,
    what it earned; of conversations the turns side by side, with the pictures that environments
    have ``shown``."""
    pictures = []
    for k, record in enumerate(records):
        caption = f"reward {record['reward']:.2f}   "
        if "advantage" in record:
            caption += f"advantage {record['advantage']:+.2f}   "
        caption += f"reference: {record['reference']}\n{record.get('judgement', '')}"
        frames = read_frames(record["images"], 6)
        if "conversation" in record:
            panels = conversation_panels(record, frames, list(shown[k]))
            pictures.append(conversation_card(panels, caption.strip()))
            continue
        pictures.append(
            sample_card(frames, record["question"], record["response"], caption.strip())
        )
    return pictures


def conversation_panels(
    record: dict, frames: list[Image.Image], shown: list[Image.Image]
) -> list[Image.Image]:
    """One panel for the prompt, with a first observation, and one for each turn with the reply to
    it; ``shown`` are the pictures of all replies, in order."""
    panels, pictures = [], frames
    sections = [Section("PROMPT", record["question"], 10)]
    for message in record["conversation"]:
        if message["role"] == "assistant":
            panels.append(panel(pictures, sections))
            turn = Section(f"TURN {len(panels)}", message["content"], 14)
            pictures, sections = [], [turn]
            continue
        texts = [part["text"] for part in message["content"] if part["type"] == "text"]
        label = message["role"].upper()
        sections.append(Section(label, "\n".join(texts) or "(a picture)", 10, GREEN))
        count = len(message["content"]) - len(texts)
        pictures = pictures + shown[:count]
        shown = shown[count:]
    ended = record.get("env_error") or record["ended"].replace("_", " ")
    sections.append(Section("ENDED", ended, 4, GREEN))
    return [*panels, panel(pictures, sections)]


def summarise(records: list[dict], count: int) -> dict[str, float]:
    """Means over all samples, and of accuracy the share of prompts that one of ``count`` samples
    solves. Every rank has all records, so nothing is reduced."""
    columns: dict[str, list[float]] = {}
    for record in records:
        for name in ("reward", "response_length", "truncated"):
            columns.setdefault(f"eval/{name}_mean", []).append(float(record[name]))
        for name, value in record["components"].items():
            columns.setdefault(f"eval/{name}_reward_mean", []).append(value)
    metrics = {name: sum(values) / len(values) for name, values in sorted(columns.items())}
    names = {name for record in records for name in record["components"]}
    for name in sorted(names) if count > 1 else ():
        if name.split("/")[-1] == "accuracy":
            graded = [record for record in records if name in record["components"]]
            solved = {record["index"] for record in graded if record["components"][name] >= 1}
            share = len(solved) / len({record["index"] for record in graded})
            metrics[f"eval/{name.removesuffix('accuracy')}pass@{count}"] = share
    return metrics
