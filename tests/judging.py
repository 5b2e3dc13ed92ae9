"""A policy with a judge as its reward."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

import train_ppo_vl as ppo
from common.buffers import Batch
from common.data.processor import Processor
from common.data.rows import Prompt
from common.model import vlm
from common.rewards import judgements, sources
from conftest import build_rewards, read_rows, start, take, token_logprobs, words
from conftest import records as records_of


def build(env, reward: sources.RewardMix, rows: list[Prompt] = []) -> None:
    """Load the models of a reward that shall score ``rows``."""
    build_rewards(
        env.args, reward, replace(env.rows, train_sets=[rows], held_out=[]), env.actor, env.ranks
    )


def score(env, reward: sources.RewardMix, batch: Batch) -> Batch:
    """A copy of the batch with its scores."""
    batch = replace(batch)
    reward.score(batch, env.processor, 0)
    return batch


def answered(model: Path, rows: Path | str, responses: list[list[str]], *flags: str):
    """An actor, its reward, and one step of the first prompts with these responses. How the actor
    samples is nothing to its judge."""
    env = start(model, rows, "--advantage grpo --temperature 0.5 --min_new_tokens 3", *flags)
    reward = sources.load_rewards(env.args)
    build(env, reward, env.prompts)
    batch = take(env, len(responses))
    vlm.compute_features(env.actor.model, batch)
    batch = batch.with_responses(
        (k, tokens_of(env, text)) for k, texts in enumerate(responses) for text in texts
    )
    batch.truncated = torch.zeros(len(batch), dtype=torch.bool)
    return env, reward, batch


def tokens_of(env, text: str) -> torch.Tensor:
    """Of a response and what ends it."""
    end = judgements.answer_frame(env.processor).end
    return torch.tensor([*env.processor.tokenizer.encode(text, add_special_tokens=False), end])


PICTURE = "<|cut|>"  # in a question: the place of a picture that its prompt does not show


def alone(
    folder: Path,
    prompt: Prompt,
    question: str,
    answer: str | None,
    pictures: list = [],
    judge: str | None = None,
):
    """The judge's model and the inputs of one question, rendered by its own tokenizer, with the
    prompt's pictures and further ones; with an answer, its log-prob. ``judge``: its system message; ""
    for none."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForImageTextToText.from_pretrained(folder),
    )
    before, *behind = question.split(PICTURE)
    parts = [{"type": "image"}] * len(prompt.images) + [{"type": "text", "text": before}]
    for piece in behind:
        parts += [{"type": "image"}, {"type": "text", "text": piece}]
    chat = [{"role": "user", "content": parts}]
    if judge is None:
        judge = "Judge: " + judgements.user_text(prompt.messages)
    if judge:
        chat.insert(0, {"role": "system", "content": judge})
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    pictures = [Image.open(path).convert("RGB") for path in prompt.images] + pictures
    cut = [Processor(folder).family.patches(picture) for picture in pictures]
    for _, (t, h, w) in cut:
        text = text.replace("<|image_pad|>", "<|hole|>" * (t * h * w // 4), 1)
    ids = tokenizer.encode(text.replace("<|hole|>", "<|image_pad|>"), add_special_tokens=False)
    target = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False) if answer else []
    whole = torch.tensor([ids + target])
    image_id = model.config.image_token_id
    inputs = {"input_ids": whole, "mm_token_type_ids": (whole == image_id).int()}
    if cut:
        patches, grids = zip(*cut)
        inputs |= {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    if answer is None:
        return model, inputs, tokenizer
    with torch.no_grad():
        logits = model(**inputs).logits[0, len(ids) - 1 : -1]
    return float(token_logprobs(logits, torch.tensor(target)).sum())


def ask(prompt: Prompt, kind: str, **answers: str) -> str:
    """The question of a kind about a prompt; what a response says of images is text."""
    answers = {name: text.replace("<image>", " ") for name, text in answers.items()}
    columns = {"prompt": judgements.user_text(prompt.messages)} | answers
    return judgements.fill_in(judgements.KINDS[kind].template, columns)


def chances(
    folder: Path,
    prompt: Prompt,
    question: str,
    words: list[str],
    pictures: list = [],
    judge: str | None = None,
) -> list[float]:
    logs = [
        alone(folder, prompt, question, f"<answer>{word}</answer>", pictures, judge)
        for word in words
    ]
    return torch.tensor(logs, dtype=torch.float64).softmax(0).tolist()


def levelled(values: list[float], answers: list[tuple], bound: float) -> list[float]:
    """The rewards of answers (prompt, text), in which those of a prompt are their mean if they differ by
    less than the bound; the mean of all, if all do."""
    distinct = dict(zip(answers, values))

    def level(part: dict) -> dict:
        if max(part.values()) - min(part.values()) < bound:
            return dict.fromkeys(part, statistics.fmean(part.values()))
        return part

    distinct = level(distinct)
    for prompt, _ in answers:
        distinct |= level({key: value for key, value in distinct.items() if key[0] == prompt})
    return [distinct[answer] for answer in answers]


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
            "--",
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
                    "verdict": VERDICTS[letter],
                    "reference": reference,
                    "row": {},
                }
                record |= dict(*further)
                for name in ("pair", "responses"):
                    if name in record:
                        record["row"] = record["row"] | {name: record.pop(name)}
                records.append(record)
    (folder / "samples").mkdir(parents=True)
    lines = map(json.dumps, records)
    (folder / "samples" / "eval-000000.jsonl").write_text('{"prompt": "of an older evaluation"}\n')
    (folder / "samples" / "eval-000040.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
