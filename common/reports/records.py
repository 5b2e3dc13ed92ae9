"""Samples as records: JSON objects, pictures of them, and metrics of many."""

import itertools
import math
from collections.abc import Iterable, Sequence
from statistics import fmean

import torch
from PIL import Image
from torch import Tensor

from common import distributed
from common.buffers import ENDINGS, Batch, Conversation
from common.data.images import read_frames
from common.data.processor import Processor
from common.data.rows import Prompt, user_text
from common.data.transcripts import (
    finished_text,
    message_text,
    messages,
    token_texts,
    turn_texts,
)
from common.ground.cards import draw_regions, sample_card
from common.reports.accuracy import vote_rates
from common.rewards.judgements import JudgeSettings, group_of
from common.rewards.regions import region_record


def sample_records(
    batch: Batch, processor: Processor, settings: JudgeSettings | None
) -> list[dict]:
    """One JSON-ready record per sample; ``settings`` read those that are judgements, if there are some."""
    records = []
    for i, turns in enumerate(turn_texts(batch, range(len(batch)), processor)):
        row = batch.prompts[batch.prompt_index[i]]
        text = finished_text(batch, i, turns[-1])
        judgement = judgement_record(row, text, settings) if settings and row.order else {}
        regions = region_record(row, text)
        records.append(sample_record(batch, i, row, turns) | judgement | regions)
    return records


def judgement_record(row: Prompt, text: str, settings: JudgeSettings) -> dict:
    """The further fields of a judgement's record: its verdict, the row, and the question, so that a right
    judgement can be imitated and a wrong one tried again."""
    question = [message for message in row.messages if message["role"] != "system"]
    verdict = settings.read_verdict(text, row)
    judged = {"order": row.order, "group": group_of(row), "verdict": verdict}
    return judged | {"row": row.row, "messages": question}


def sample_record(batch: Batch, i: int, row: Prompt, turns: list[str]) -> dict:
    """The record of sample i of a row, with the texts of the policy's ``turns``."""
    record = {
        "index": row.index,
        "source": row.source,
        "sample": int(batch.sample_number[i]),
        "prompt": row.text,
        "question": user_text(row.messages),
        "images": list(row.images),
        "response": turns[-1],
        "reference": row.reference,
        "label": row.label,
        "response_length": int(batch.own_lengths[i]),
        "truncated": bool(batch.truncated[i]),
    }
    if row.task:
        record["task"] = row.task
    if len(batch.rewards):
        record |= {"reward": float(batch.rewards[i]), "components": {}}
    for name, values in batch.components.items():
        value = float(values[i])
        if not math.isnan(value):  # the sample has this component
            record["components"][name] = value
    if batch.conversations:
        conversation = batch.conversations[i]
        record["conversation"] = messages(conversation, turns)
        if conversation.ended:  # with an environment
            record |= {"ended": conversation.ended, "turn_rewards": conversation.rewards}
        if conversation.error:
            record["env_error"] = conversation.error
    if any(batch.judgements):
        record["judgement"] = batch.judgements[i]
    if len(batch.advantages):
        start, end = batch.offsets[i : i + 2].tolist()
        record["advantage"] = float(batch.advantages[start:end].mean())
    return record


# What a step may compute of each token; see `Batch`.
PER_TOKEN = ("advantages", "values", "logprobs", "entropy", "kl")


def add_tokens(
    batch: Batch, records: list[dict], picks: Sequence[int], processor: Processor
) -> None:
    """Write the tokens of the samples ``picks`` into their records, as "per_token"."""
    turns = batch.turns
    for i in picks:
        records[i]["per_token"] = token_record(batch, i, turns[i], processor)


def token_record(batch: Batch, i: int, turns: list[Tensor], processor: Processor) -> dict:
    """What the tokens of sample i are, and the numbers that the step has computed of them: a list for
    each, or one number where all are equal."""
    start, end = batch.offsets[i : i + 2].tolist()
    texts = [token_texts(turn.tolist(), processor) for turn in turns]
    columns: dict = {"text": list(itertools.chain(*texts))}
    for name in PER_TOKEN:
        flat = getattr(batch, name)
        if len(flat):
            values = [three_digits(value) for value in flat[start:end].tolist()]
            columns[name] = values[0] if len(set(values)) == 1 else values
    if batch.conversations:
        columns["turns"] = [len(turn) for turn in turns]
    return columns


def three_digits(value: float) -> float | None:
    """None: not finite, which JSON cannot hold."""
    return float(f"{value:.3g}") if math.isfinite(value) else None


def first_samples(batch: Batch, prompts: int) -> list[int]:
    """The indices of all samples of the first so many prompts that have samples."""
    first = batch.prompt_index.unique()[:prompts]
    return torch.isin(batch.prompt_index, first).nonzero()[:, 0].tolist()


def show_images(batch: Batch, records: list[dict], picks: Sequence[int]) -> None:
    """Put the images that environments have shown in the samples ``picks`` into the conversations of
    their records, each as "file" of its part. All ranks must call it; only rank 0 needs the records."""
    for i, images in zip(picks, gather_images(batch, picks)):
        if records and images:
            records[i]["conversation"] = with_images(records[i]["conversation"], images)


def with_images(conversation: list[dict], images: list[Image.Image]) -> list[dict]:
    """A copy of a conversation with its ``images``, in the order in which they were shown."""
    left, chat = iter(images), []
    for message in conversation:
        content = message["content"]
        if isinstance(content, list):
            content = [
                part | {"file": next(left)} if part["type"] == "image" else part for part in content
            ]
        chat.append(message | {"content": content})
    return chat


def images_of(conversation: list[dict]) -> list[Image.Image]:
    """The images that `with_images` has put into a conversation."""
    contents = [message["content"] for message in conversation]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["file"] for part in parts if "file" in part]


def sample_cards(records: list[dict]) -> list[Image.Image]:
    """Pictures of records, on rank 0: images, frames of videos and images that environments have
    shown, question and answer turn by turn, and the reward. Raises UserError on every rank: a file cannot
    be read."""
    cards = []
    with distributed.raise_on_all_ranks():
        if distributed.is_main():
            cards = [record_card(record) for record in records]
    return cards


def record_card(record: dict) -> Image.Image:
    frames = picture(record["images"], record.get("regions"))
    caption = ""
    for name in ("reward", "advantage"):
        if name in record:
            caption += f"{name} {record[name]:.2f}   "
    if "verdict" in record and record["reference"]:  # a verdict of None could not be read
        caption += f"verdict: {record['verdict']}   "
    reference = record["reference"] or record.get("target")
    if reference:  # a response to imitate has none: it is what the card shows
        caption += f"reference: {reference}"
    if "judgement" in record:
        caption += f"\n{record['judgement']}"
    frames += images_of(record.get("conversation", []))
    return sample_card(frames, spoken_text(record), caption.rstrip())


def picture(items: list, regions: dict | None) -> list[Image.Image]:
    """The images of a record and frames of its clips; one shows the regions of `region_record`."""
    frames = [read_frames(item, 6) for item in items]
    if regions:
        of_image = frames[regions["image"]]
        of_image[0] = draw_regions(of_image[0], regions["true"], regions["answered"])
    return list(itertools.chain(*frames))


def spoken_text(record: dict) -> str:
    """Question and answer, or all turns of a conversation, as one text."""
    answer = {"role": "assistant", "content": record["response"]}
    parts = [f"PROMPT\n{record['question']}"]
    for message in record.get("conversation", [answer]):
        content = message_text(message).strip()
        parts.append(f"{message['role'].upper()}\n{content or '(empty)'}")
    if "env_error" in record:
        parts.append(f"ERROR\n{record['env_error']}")
    return "\n\n".join(parts)


def summarise_samples(records: list[dict], count: int) -> dict[str, float]:
    """Means over all samples and, as eval/TASK/..., over those of each task; with several samples per
    prompt (``count``) also the votes of judgements. Every rank has all records, so nothing is
    reduced."""
    metrics = {f"eval/{name}": value for name, value in sample_means(records, count).items()}
    for task in sorted({record.get("task", "") for record in records} - {""}):
        part = [record for record in records if record.get("task") == task]
        for name, value in sample_means(part, count).items():
            metrics[f"eval/{task}/{name}"] = value
    if count == 1:
        return metrics
    if not any("pass@" in name for name in metrics):
        distributed.say_once(
            f"no pass@{count}, as it is not known which answers are right: let the reward function return "
            '{"reward": [...], "accuracy": [...]}, with an accuracy of 1 for a right one'
        )
    return metrics | {f"eval/votes@{k}": rate for k, rate in vote_rates(records).items()}


def sample_means(records: list[dict], count: int) -> dict[str, float]:
    """Means of rewards, their components, lengths and truncations; with several samples per prompt
    (``count``) also the share of prompts that one of them solves, by components named accuracy."""
    columns = {}
    for record in records:
        for name in ("reward", "response_length", "truncated"):
            columns.setdefault(f"{name}_mean", []).append(float(record[name]))
        for name, value in record["components"].items():
            columns.setdefault(component_metric(name, "_reward_mean"), []).append(value)
    means = {name: sum(column) / len(column) for name, column in sorted(columns.items())}
    components = {name for record in records for name in record["components"]}
    for name in sorted(components):
        if count > 1 and name.rpartition("/")[2] == "accuracy":
            source = name.removesuffix("accuracy")
            means[f"{source}pass@{count}"] = solved_share(records, name)
    return means


def task_metrics(batch: Batch, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """rollout/TASK/NAME: the mean of each column, (S,), over the samples of each task; NaN is no value."""
    tasks = [batch.prompts[k].task for k in batch.prompt_index]
    metrics = {}
    for task in sorted({*tasks} - {""}):
        of_task = torch.tensor([other == task for other in tasks])  # (S,)
        for name, values in columns.items():
            if not values[of_task].isnan().all():
                metrics[f"rollout/{task}/{name}"] = values[of_task].nanmean()
    return metrics


def component_metric(name: str, ending: str) -> str:
    """The name of a component's metric. A function may call its components anything, so they get an ending
    that no other metric has; `box_iou` keeps its usual name."""
    return name if name.endswith("box_iou") else name + ending


def accuracy_columns(metrics: dict[str, float], drawn: Iterable[Prompt] = ()) -> dict[str, str]:
    """word -> metric, for each reward component named accuracy; the word is "source/accuracy" if
    there are several sources, and begins with the task in metrics of a task. Those of the tasks of
    rows that were ``drawn`` are left out: the line of a step has no room for all of them."""
    columns = {}
    for name in metrics:
        if name.endswith(("accuracy_reward", "accuracy_reward_mean")):
            word = name.partition("/")[2].rpartition("_reward")[0]
            columns[word] = name
    of_tasks = tuple({f"{row.task}/" for row in drawn if row.task})
    return {word: name for word, name in columns.items() if not word.startswith(of_tasks)}


def solved_share(records: list[dict], component: str) -> float:
    """The share of prompts that one of their samples solves."""
    best = {}  # by prompt
    for record in records:
        if component in record["components"]:
            earned = record["components"][component]
            best[record["index"]] = max(earned, best.get(record["index"], earned))
    return fmean(value >= 1 for value in best.values())


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


def gather_images(batch: Batch, picks: Sequence[int]) -> list[list[Image.Image]]:
    """The images that environments have shown in each of the samples ``picks``; all ranks must call it."""
    if not batch.conversations:
        return [[] for _ in picks]
    # Only one rank has the images of a sample.
    by_rank = distributed.gather_objects([batch.conversations[i].images for i in picks])
    return [list(itertools.chain(*parts)) for parts in zip(*by_rank)]
