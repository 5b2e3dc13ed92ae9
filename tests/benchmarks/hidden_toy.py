"""The rows of a toy without their pictures, and its model, taught to say "look" now and then.

    python tests/benchmarks/hidden_toy.py TOY OUT       TOY: a folder of launch/toy.py

It says "look" in 3 of 10 answers to a question without a picture, and guesses blindly in the others
and after the picture: to look, and to use what it then sees, is left to reinforcement learning.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch import toy


def hide(source: Path, target: Path) -> None:
    """Write the rows of both splits with their pictures in the column "hidden"."""
    for split in ("train", "eval"):
        with open(target / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for line in (source / f"{split}.jsonl").read_text("utf-8").splitlines():
                row = json.loads(line)
                row["hidden"] = os.path.relpath(source / row.pop("images")[0], target)
                file.write(json.dumps(row) + "\n")


def example(rng: random.Random, row: dict) -> list[str]:
    """Prompts and responses by turns."""
    blind = rng.choice(toy.ANSWERS[row["label"]]) + "<|im_end|>"
    if rng.random() < 0.3:  # keep what it sees: the toy's own descriptions
        caption = "\n".join(rng.sample(row["sights"], 3))
        return [toy.ASK.format(toy.PICTURE + toy.CAPTION_PROMPT), caption + "<|im_end|>"]
    question = toy.ASK.format(row["prompt"])
    if rng.random() >= 0.3:
        return [question, blind]
    return [question, "look<|im_end|>", "\n" + toy.ASK.format(toy.PICTURE + row["prompt"]), blind]


def teach(
    model, tokenizer, rows: list[dict], pixels: torch.Tensor, rng: random.Random, steps: int
) -> None:
    """Train by next-token prediction; pixels (rows, 16, C)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        chosen = rng.sample(range(len(rows)), 32)
        dialogues = [example(rng, rows[i]) for i in chosen]
        looked = [i for i, texts in zip(chosen, dialogues) if toy.PICTURE in "".join(texts)]
        toy.next_token_loss(model, tokenizer, dialogues, pixels[looked]).backward()
        optimizer.step()
        optimizer.zero_grad()


def main(source: str, target: str, steps: int = 160) -> None:
    folder, rng = Path(target), random.Random("look")
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    hide(Path(source), folder)
    tokenizer = AutoTokenizer.from_pretrained(Path(source, "model"))
    model = AutoModelForImageTextToText.from_pretrained(Path(source, "model"), dtype=torch.float32)
    processor = toy.make_image_processor("qwen2_5_vl")
    rows = toy.random_rows(rng, 512, 28, set())
    teach(model.train(), tokenizer, rows, toy.board_pixels(processor, rows), rng, steps)
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(*sys.argv[1:3])
