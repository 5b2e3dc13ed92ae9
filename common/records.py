"""Samples as records: JSON objects, pictures of them, and what a set of them amounts to."""

import math

from PIL import Image

from common.buffers import Batch
from common.cards import sample_card
from common.vlm.data import Processor, user_text
from common.vlm.images import read_frames


def sample_records(batch: Batch, processor: Processor) -> list[dict]:
    """One JSON-ready record per sample."""
    responses = processor.decode(batch.split(batch.tokens))
    records = []
    for i, (group, response) in enumerate(zip(batch.group.tolist(), responses)):
        row = batch.prompts[group]
        record = {
            "index": row.index,
            "source": row.source,
            "sample": int(batch.number[i]),
            "prompt": row.text,
            "question": user_text(row.messages),
            "images": list(row.images),
            "response": response,
            "reference": row.reference,
            "label": row.label,
            "reward": float(batch.scores[i]),
            "response_length": int(batch.lengths[i]),
            "truncated": bool(batch.truncated[i]),
        }
        components = {name: float(values[i]) for name, values in batch.components.items()}
        record["components"] = {
            name: value for name, value in components.items() if not math.isnan(value)
        }
        if any(batch.judgements):
            record["judgement"] = batch.judgements[i]
        records.append(record)
    if batch.advantages is not None:
        for record, advantages in zip(records, batch.split(batch.advantages)):
            record["advantage"] = float(advantages.mean())
    return records


def sample_pictures(records: list[dict]) -> list[Image.Image]:
    """Pictures of samples: the images, frames of the videos, what was asked, what was answered,
    what it earned."""
    pictures = []
    for record in records:
        caption = f"reward {record['reward']:.2f}   "
        if "advantage" in record:
            caption += f"advantage {record['advantage']:+.2f}   "
        caption += f"reference: {record['reference']}\n{record.get('judgement', '')}"
        frames = read_frames(record["images"], 6)
        pictures.append(
            sample_card(frames, record["question"], record["response"], caption.strip())
        )
    return pictures


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
    graded = [record for record in records if "accuracy" in record["components"]]
    if count > 1 and graded:
        solved = {record["index"] for record in graded if record["components"]["accuracy"] >= 1}
        metrics[f"eval/pass@{count}"] = len(solved) / len({record["index"] for record in graded})
    return metrics
