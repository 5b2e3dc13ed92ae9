"""Judges that are compared and trained by RL: votes, both orders of a pair, judges inside a group, rubrics.

The references are plain loops over texts, and Hugging Face's own model that is asked one question at a time.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import read_rows, records as records_of, words, write_image, write_judge, write_rows

import train_ppo_vl as ppo
from common.data.processor import Processor
from common.rewards import accuracy
from common.rewards.judge import JudgeSettings, load_judgements

PAIRS = [
    {"prompt": "which?", "responses": ["a cat", "a black dog"], "preferred": "B", "source": "animals", "pair": 7},
    {"prompt": "and <image>?", "images": ["0.png"], "responses": ["yes", "no"], "preferred": "tie"},
    {"prompt": "red", "images": ["0.png", "1.png"], "preferred": "A", "source": "pictures", "pair": "x"},
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """A file of pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    for k in range(2):
        write_image(folder / f"{k}.png", (56, 56), np.random.default_rng(k))
    return Path(write_rows(folder / "pairs.jsonl", PAIRS))


# ------------------------------------------------------------------------------------------------ votes
@pytest.mark.parametrize("verdicts, right, expected", [
    (["A"], "A", 1), (["B"], "A", 0), ([None], "A", 0), ([], "A", 0),
    (["A", None, "A", "B"], "A", 1), (["A", "B"], "A", 1 / 2), (["A", "B", "tie"], "tie", 1 / 2), (["B", "tie"], "A", 0),
    ([None, None, "A"], "A", 1), (["A", "B", "B"], "A", 0)])
def test_a_vote_by_hand(verdicts, right, expected):
    assert accuracy.vote(verdicts, right) == expected


def plain_votes(records: list[dict], k: int) -> float:
    """votes@k by sorting: the first k samples of each question."""
    total, questions = 0.0, sorted({record["index"] for record in records})
    for index in questions:
        first = sorted((record for record in records if record["index"] == index), key=lambda record: record["sample"])[:k]
        tally = {}
        for record in first:
            if record["verdict"] is not None:
                tally[record["verdict"]] = tally.get(record["verdict"], 0) + 1
        winners = [verdict for verdict in tally if tally[verdict] == max(tally.values())]
        if first[0]["reference"] in winners:
            total += 1 if len(winners) == 1 else 0.5
    return total / len(questions)


def test_votes_are_those_of_a_plain_count():
    draw = random.Random(3)
    records = [{"index": index, "sample": sample, "reference": "AB"[index % 2],
                "verdict": draw.choice(["A", "B", "tie", None])} for index in range(40) for sample in range(6)]
    rates = accuracy.vote_rates(records + [{"index": 99, "reference": None, "verdict": "A"}, {"index": 100, "reference": "A"}])
    assert list(rates) == [1, 3, 5]
    assert rates == {k: pytest.approx(plain_votes(records, k)) for k in rates}
    assert len(set(rates.values())) == 3


def judge_by_a_policy(model: Path, rows: Path, out: Path, *flags: str) -> tuple[list[dict], dict]:
    """Records and metrics of an evaluation that only judges."""
    ppo.main(words("--model", model, "--data", rows, "--eval_data", rows, "--out", out, "--eval_only --advantage grpo",
                   "--row_kind judgements --reward verdict --max_new_tokens 12 --max_prompt_tokens 256", *flags))
    out /= "evaluation-step-0"
    return read_rows(out / "samples" / "eval-000000.jsonl"), records_of(out)[-1]


def test_judgements_are_recorded_with_what_a_table_needs(qwen25, pairs, tmp_path, monkeypatch):
    """Three judgements of each pair in each order, said as a coin decides."""
    draw = random.Random(5)
    said = [[draw.choice(["<answer>A</answer>", "so <answer>b</answer>", "?"])] for _ in range(18)]
    monkeypatch.setattr("common.rewards.records.turn_texts", lambda *_: said)
    records, metrics = judge_by_a_policy(qwen25, pairs, tmp_path / "run", "--eval_samples 3")
    assert [(record["index"], record["sample"]) for record in records] == [(i, k) for i in range(6) for k in range(3)]
    for record in records:
        row, swapped = PAIRS[record["index"] // 2], record["index"] % 2
        text = record["response"]
        assert record["source"] == f"pairs.jsonl:{record['index'] // 2 + 1}"
        assert record["row"] == row
        assert record["order"] == ("swapped" if swapped else "given")
        assert record["group"] == row.get("source", "pairs.jsonl")
        assert record["pair"] == row.get("pair")
        assert record["verdict"] == ("A" if ">A<" in text else "B" if ">b<" in text else None)
        lengths = [len(answer) for answer in row["responses"]] if "responses" in row else None
        assert record["lengths"] == (lengths[::-1] if lengths and swapped else lengths)
        assert record["reference"] == ({"A": "B", "B": "A"}.get(row["preferred"], "tie") if swapped else row["preferred"])
    assert {name: metrics[name] for name in metrics if "votes" in name} == {
        f"eval/votes@{k}": pytest.approx(plain_votes(records, k)) for k in (1, 3)}


def test_a_recorded_question_is_a_row_to_learn_from(qwen25, pairs, tmp_path):
    """As launch/judge_filter.py writes it: the prompt is that of the judgement."""
    judge = tmp_path / "judge"
    shutil.copytree(qwen25, judge)
    write_judge(judge, ("answers", "A"), system_instruction="Judge.")
    records, _ = judge_by_a_policy(judge, pairs, tmp_path / "run")
    rows = [{"messages": record["messages"], "images": record["images"], "response": "<answer>A</answer>"} for record in records]
    args = ppo.parse_args(words("--model", judge, "--data", pairs, "--max_prompt_tokens 256")).data
    processor = Processor(judge, args)
    settings = JudgeSettings.to_train(processor)
    path = write_rows(tmp_path / "sft.jsonl", rows)
    again = [prompt for prompt, *_ in load_judgements(path, processor, settings, args)]
    assert [prompt.images for prompt in again] == [tuple(record["images"]) for record in records]
    assert [prompt.text for prompt in again] == [record["prompt"] for record in records]
    assert settings.trained_on == ["answers"]
