"""Pairs of answers to the toy's questions, for a judge that compares the responses of a policy.

    python tests/benchmarks/answer_pairs.py TOY       TOY: a folder of launch/toy.py

TOY/pairs_train.jsonl and TOY/pairs_eval.jsonl hold a pair for each picture: its right answer beside a wrong
one or, for every fourth picture, two wrong ones, which are a tie."""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch import toy


def answer_pairs(source: Path, split: str) -> list[dict]:
    """The pairs of a split's judgements, in which a wrong answer follows the right one."""
    rng = random.Random(split)
    lines = (source / f"judge_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    judged = [row for row in map(json.loads, lines) if "response" in row]
    pairs = []
    for number, (right, wrong) in enumerate(zip(judged[::2], judged[1::2])):
        preferred, first = "A", right["response"]
        if number % 4 == 3:
            values = next(each for each in toy.ANSWERS.values() if first in each)
            others = [value for value in values if value not in (first, wrong["response"])]
            preferred, first = "tie", rng.choice(others)
        sides = [first, wrong["response"]]
        if preferred == "A" and rng.random() < 0.5:
            preferred, sides = "B", sides[::-1]
        pair = {"prompt": right["question"], "images": right["images"], "responses": sides}
        pairs.append(pair | {"preferred": preferred})
    return pairs


def main(source: str) -> None:
    for split in ("train", "eval"):
        toy.write_lines(Path(source, f"pairs_{split}.jsonl"), answer_pairs(Path(source), split))


if __name__ == "__main__":
    main(*sys.argv[1:])
