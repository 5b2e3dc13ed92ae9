"""Pairs for launch/judges/judge_loop.sh: which of two pictures of the toy shows more? Noise makes it hard
to see.

    python tests/benchmarks/judge_toy.py TOY OUT       TOY: a folder of launch/toy.py

OUT/train.jsonl and OUT/eval.jsonl hold pairs and verdicts, OUT/cold.jsonl 64 of the training pairs,
in both orders, with a written judgement: how many objects A shows, and how many B."""

import json
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch import toy

NOISE = 400  # standard deviation, where white is 255


def draw_pairs(source: Path, out: Path, split: str) -> list[dict]:
    """Judgements, each followed by that of the other order."""
    rng, noise = random.Random(split), np.random.default_rng(len(split))
    rows = map(json.loads, open(source / f"{split}.jsonl", encoding="utf-8"))
    answers = {row["images"][0]: row["answer"] for row in rows if row["label"] == "count"}
    for name in answers:
        pixels = np.asarray(Image.open(source / name))
        noisy = np.clip(pixels + noise.normal(0, NOISE, pixels.shape), 0, 255)
        Image.fromarray(noisy.astype(np.uint8)).save(out / name)
    judgements = []
    for _ in range(2000):
        images = rng.sample(list(answers), 2)
        for pair in (images, images[::-1]):
            a, b = (answers[name] for name in pair)
            row = {"prompt": "how many?", "images": pair, "preferred": "A" if a > b else "B"}
            judgements += [row | {"critique": f"{{A}} {a}\n{{B}} {b}"}] if a != b else []
    return judgements


def main(source: str, target: str) -> None:
    out = Path(target)
    (out / "images").mkdir(parents=True)
    for split, count in (("train", 1024), ("eval", 256)):
        judgements = draw_pairs(Path(source), out, split)
        if split == "train":
            toy.write_lines(out / "cold.jsonl", judgements[:128])
        for row in judgements:
            del row["critique"]
        toy.write_lines(out / f"{split}.jsonl", judgements[: 2 * count : 2])


if __name__ == "__main__":
    main(*sys.argv[1:])
