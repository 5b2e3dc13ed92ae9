"""Samples as records: JSON objects, pictures of them, and what a set of them amounts to."""

import math

from PIL import Image

from common.buffers import Batch
from common.data.images import read_frames
from common.data.processor import Processor
from common.data.rows import user_text
from common.rewards.cards import sample_card
from common.rewards.transcripts import messages, turn_texts


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


def sample_cards(records: list[dict], shown: list[list[Image.Image]]) -> list[Image.Image]:
    """Pictures of samples: the images, frames of the videos and what environments have ``shown``,
    what was asked and answered, turn by turn, and what it earned."""
    cards = []
    for record, pictures in zip(records, shown):
        caption = f"reward {record['reward']:.2f}   "
        if "advantage" in record:
            caption += f"advantage {record['advantage']:+.2f}   "
        caption += f"reference: {record['reference']}\n{record.get('judgement', '')}"
        images = read_frames(record["images"], 6) + list(pictures)
        cards.append(sample_card(images, spoken_text(record), caption.strip()))
    return cards


def spoken_text(record: dict) -> str:
    """Question and answer, or all turns of a conversation, as one text."""
    turns = record.get("conversation") or [{"role": "assistant", "content": record["response"]}]
    parts = [f"PROMPT\n{record['question']}"]
    for turn in turns:
        content = turn["content"]
        if not isinstance(content, str):
            content = " ".join(part.get("text", "(a picture)") for part in content)
        parts.append(f"{turn['role'].upper()}\n{content.strip() or '(empty)'}")
    if record.get("env_error"):
        parts.append(f"ERROR\n{record['env_error']}")
    return "\n\n".join(parts)


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
    return metrics | (solved_shares(records, count) if count > 1 else {})


def solved_shares(records: list[dict], count: int) -> dict[str, float]:
    """pass@count, for each component named accuracy."""
    names = {name for record in records for name in record["components"]}
    shares = {}
    for name in sorted(names):
        if name.split("/")[-1] != "accuracy":
            continue
        graded = [record for record in records if name in record["components"]]
        prompts = {record["index"] for record in graded}
        solved = {record["index"] for record in graded if record["components"][name] >= 1}
        shares[f"eval/{name.removesuffix('accuracy')}pass@{count}"] = len(solved) / len(prompts)
    return shares
