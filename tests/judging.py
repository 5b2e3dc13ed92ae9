"""A policy with a judge as its reward."""

import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

import train_ppo_vl as ppo
from common.buffers import Batch
from common.data.loader import load_pixels
from common.data.processor import Processor
from common.data.rows import Prompt
from common.rewards import judge as judgements
from common.rewards import scoring
from conftest import build_rewards, read_rows, words
from conftest import records as records_of


def build(env, reward: scoring.RewardMix, rows: list[Prompt] = []) -> None:
    """Load the models of a reward that shall score ``rows``."""
    build_rewards(
        env.args, reward, replace(env.rows, train_sets=[rows], held_out=[]), env.actor, env.ranks
    )


def score(env, reward: scoring.RewardMix, batch: Batch) -> Batch:
    """A copy of the batch with its scores."""
    batch = replace(batch)
    reward.score(batch, env.processor, 0)
    return batch


def alone(
    folder: Path, prompt: Prompt, question: str, answer: str | None, with_system: bool = True
):
    """The judge's model and the inputs of one question, rendered by its own tokenizer; with an
    answer, its log-prob."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForImageTextToText.from_pretrained(folder),
    )
    chat = [
        {"role": "system", "content": "Judge: " + judgements.user_text(prompt.messages)}
    ] * with_system
    parts = [{"type": "image"}] * len(prompt.images) + [{"type": "text", "text": question}]
    text = tokenizer.apply_chat_template(
        [*chat, {"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    processor, image_id = Processor(folder), model.config.image_token_id
    pixels = load_pixels(prompt, processor)
    counts = [t * h * w // 4 for t, h, w in prompt.grids]
    for count in counts:
        text = text.replace("<|image_pad|>", "<|hole|>" * count, 1)
    ids = tokenizer.encode(text.replace("<|hole|>", "<|image_pad|>"), add_special_tokens=False)
    target = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False) if answer else []
    whole = torch.tensor([ids + target])
    inputs = {"input_ids": whole, "mm_token_type_ids": (whole == image_id).int()}
    inputs |= dict(zip(("pixel_values", "image_grid_thw"), pixels)) if pixels else {}
    if answer is None:
        return model, inputs, tokenizer
    with torch.no_grad():
        logp = model(**inputs).logits[0].log_softmax(dim=-1)
    rows = range(len(ids) - 1, len(ids) + len(target) - 1)
    return sum(float(logp[row, token]) for row, token in zip(rows, target))


def ask(prompt: Prompt, kind: str, **answers: str) -> str:
    """The question of a kind about a prompt; what a response says of images is text."""
    answers = {name: text.replace("<image>", " ") for name, text in answers.items()}
    return judgements.format_template(
        judgements.JUDGEMENTS[kind][0], prompt=judgements.user_text(prompt.messages), **answers
    )


def chances(folder: Path, prompt: Prompt, question: str, words: list[str]) -> list[float]:
    logs = [alone(folder, prompt, question, f"<answer>{word}</answer>") for word in words]
    total = sum(math.exp(x - max(logs)) for x in logs)
    return [math.exp(x - max(logs)) / total for x in logs]


PAIRS = [
    {
        "prompt": "which?",
        "responses": ["a cat", "a black dog"],
        "preferred": "B",
        "source": "animals",
        "pair": 7,
    },
    {"prompt": "and <image>?", "images": ["0.png"], "responses": ["yes", "no"], "preferred": "tie"},
    {
        "prompt": "red",
        "images": ["0.png", "1.png"],
        "preferred": "A",
        "source": "pictures",
        "pair": "x",
    },
]


def judge_by_a_policy(model: Path, rows: Path, out: Path, *flags: str) -> tuple[list[dict], dict]:
    """Records and metrics of an evaluation that only judges."""
    ppo.main(
        words(
            "--model",
            model,
            "--data",
            rows,
            "--eval_data",
            rows,
            "--out",
            out,
            "--eval_only --advantage grpo",
            "--row_kind judgements --reward verdict --max_new_tokens 12 --max_prompt_tokens 256",
            *flags,
        )
    )
    out /= "evaluation-step-0"
    return read_rows(out / "samples" / "eval-000000.jsonl"), records_of(out)[-1]


def whole_judgements(monkeypatch, texts: list[list[str]]) -> None:
    """Let records have these texts, none of which was cut off."""

    def turn_texts(batch, *_):
        batch.truncated[:] = False
        return texts

    monkeypatch.setattr("common.reports.records.turn_texts", turn_texts)


VERDICTS = {"A": "A", "B": "B", "t": "tie", "-": None}
MIRRORED = {"A": "B", "B": "A", "tie": "tie"}


def judged(folder, rows: list[tuple]) -> Path:
    """A run that judged rows (group, right, verdicts in the order given, swapped, further fields),
    a letter for a sample."""
    records = []
    for number, (group, right, first, second, *further) in enumerate(rows):
        orders = (("given", right, first), ("swapped", MIRRORED[right], second))
        for place, (order, reference, letters) in enumerate(orders):
            for sample, letter in enumerate(letters):
                record = {
                    "index": 2 * number + place,
                    "sample": sample,
                    "order": order,
                    "group": group,
                    "pair": None,
                    "verdict": VERDICTS[letter],
                    "reference": reference,
                    "lengths": None,
                    "row": {},
                }
                records.append(record | dict(*further))
    (folder / "samples").mkdir(parents=True)
    lines = map(json.dumps, records)
    (folder / "samples" / "eval-000000.jsonl").write_text('{"prompt": "of an older evaluation"}\n')
    (folder / "samples" / "eval-000040.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
