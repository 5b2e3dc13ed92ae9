"""Judges that are compared and trained by RL: votes, both orders of a pair, rubrics.

The references are plain loops over texts, and Hugging Face's own model that is asked one question at a time.
"""

import json
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_ppo_vl as ppo
from common.data.processor import Processor
from common.reports import accuracy
from common.rewards import judgements, sources
from common.rewards.judgements import JudgeSettings, load_judgements
from conftest import (
    ROUNDING,
    read_rows,
    start,
    table,
    take,
    user_error,
    words,
    write_judge,
    write_rows,
)
from judging import (
    PAIRS,
    VERDICTS,
    answered,
    ask,
    chances,
    judge_by_a_policy,
    score,
    whole_judgements,
)


# ------------------------------------------------------------------------------------------------ votes
@pytest.mark.parametrize(
    "letters, right, expected",
    table("""
A    | A   | 1
B    | A   | 0
-    | A   | 0
     | A   | 0
A-AB | A   | 1
AB   | A   | 0.5
ABt  | tie | 0.5
Bt   | A   | 0
--A  | A   | 1
ABB  | A   | 0
"""),
)
def test_a_vote_by_hand(letters, right, expected):
    assert accuracy.vote([VERDICTS[letter] for letter in letters], right) == float(expected)


def plain_votes(records: list[dict], k: int) -> float:
    """votes@k by sorting: the first k samples of each question."""
    total, questions = 0.0, sorted({record["index"] for record in records})
    for index in questions:
        first = sorted(
            (record for record in records if record["index"] == index),
            key=lambda record: record["sample"],
        )[:k]
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
    records = [
        {
            "index": index,
            "sample": sample,
            "reference": "AB"[index % 2],
            "verdict": draw.choice(["A", "B", "tie", None]),
        }
        for index in range(40)
        for sample in range(6)
    ]
    rates = accuracy.vote_rates(
        records
        + [{"index": 99, "reference": None, "verdict": "A"}, {"index": 100, "reference": "A"}]
    )
    assert list(rates) == [1, 3, 5]
    assert rates == {k: pytest.approx(plain_votes(records, k)) for k in rates}
    assert len(set(rates.values())) == 3


def test_judgements_are_recorded_with_what_a_table_needs(qwen25, pairs, tmp_path, monkeypatch):
    """Three judgements of each pair in each order, said as a coin decides."""
    draw = random.Random(5)
    texts = [[draw.choice(["<answer>A</answer>", "so <answer>b</answer>", "?"])] for _ in range(18)]
    whole_judgements(monkeypatch, texts)
    records, metrics = judge_by_a_policy(qwen25, pairs, tmp_path / "run", "--eval_samples 3")
    assert [(record["index"], record["sample"]) for record in records] == [
        (i, k) for i in range(6) for k in range(3)
    ]
    for record in records:
        row, swapped = PAIRS[record["index"] // 2], record["index"] % 2
        text = record["response"]
        assert record["source"] == f"pairs.jsonl:{record['index'] // 2 + 1}"
        assert record["row"] == row
        assert record["order"] == ("swapped" if swapped else "given")
        assert record["group"] == row.get("source", "pairs.jsonl")
        assert record["verdict"] == ("A" if ">A<" in text else "B" if ">b<" in text else None)
        assert record["reference"] == (
            {"A": "B", "B": "A"}.get(row["preferred"], "tie") if swapped else row["preferred"]
        )
    assert {name: metrics[name] for name in metrics if "votes" in name} == {
        f"eval/votes@{k}": pytest.approx(plain_votes(records, k)) for k in (1, 3)
    }


def test_a_recorded_question_is_a_row_to_learn_from(qwen25, pairs, tmp_path):
    """As launch/judges/judge_filter.py writes it: the prompt is that of the judgement."""
    judge = tmp_path / "judge"
    shutil.copytree(qwen25, judge)
    write_judge(judge, ("answers", "A"), system_instruction="Judge.")
    records, _ = judge_by_a_policy(judge, pairs, tmp_path / "run")
    rows = [
        {
            "messages": record["messages"],
            "images": record["images"],
            "response": "<answer>A</answer>",
        }
        for record in records
    ]
    args = ppo.parse_args(words("--model", judge, "--data", pairs, "--max_prompt_tokens 256"))
    processor = Processor(judge, args)
    settings = JudgeSettings.to_train(processor)
    path = write_rows(tmp_path / "sft.jsonl", rows)
    again = [prompt for prompt, *_ in load_judgements(path, processor, settings, args)]
    assert [prompt.images for prompt in again] == [tuple(record["images"]) for record in records]
    assert [prompt.text for prompt in again] == [record["prompt"] for record in records]
    assert list(settings.verdicts) == ["answers"]


# ------------------------------------------------------------------------------------------------ what is read
@pytest.mark.parametrize(
    "rule, text, gains",
    [
        ("boxed", r"<think>x</think>\boxed{1}", 0),
        ("answer", "<think>x</think><answer>1</answer>", 0),
        ("verdict", "<answer>1</answer>", 0),
        ("exact", "1", 1),
    ],
)
def test_a_response_that_was_cut_off_earns_no_answer(qwen25, picture_rows, rule, text, gains):
    """Only `exact` looks at all of the response."""
    env = start(qwen25, picture_rows, "--advantage grpo --reward", rule)
    tokens = torch.tensor(env.processor.tokenizer.encode(text, add_special_tokens=False))
    batch = take(env, 1).with_responses([(0, tokens), (0, tokens)])
    batch.truncated = torch.tensor([False, True])
    sources.load_rewards(env.args).score(batch, env.processor, 0)
    assert batch.rewards.tolist() == [1, gains]


def test_a_thought_that_a_template_opens_hides_a_verdict():
    """One that is closed does not."""
    texts = ["not <answer>A</answer>", "so</think><answer>B</answer>"]
    rows = [
        SimpleNamespace(text="so: <think>\n", label="answers", reference=verdict)
        for verdict in "AB"
    ]
    assert [JudgeSettings().read_verdict(text, row) for text, row in zip(texts, rows)] == [
        None,
        "B",
    ]


# of three prompts; one twice for its prompt
SAID = [["3", "a circle", "3", "a red circle <image>"], ["no idea", "3"], ["alone"]]


# ------------------------------------------------------------------------------------------------ rubrics
RUBRICS = [
    ["names a number", {"text": "is <image> short", "weight": 3}],
    [{"text": "is short"}],
    ["is one word", "is short", "x"],
]


@pytest.fixture(scope="module")
def rubric_rows(picture_rows) -> str:
    rows = read_rows(Path(picture_rows))[:3]
    rows = [row | {"rubric": rubric} for row, rubric in zip(rows, RUBRICS)]
    return write_rows(Path(picture_rows).with_name("rubrics.jsonl"), rows)


def test_a_rubric_is_the_weighted_mean_of_its_criteria(qwen25, rubric_rows, judges):
    env, reward, batch = answered(
        qwen25, rubric_rows, SAID, "--reward", f"grm:{judges['near']}", "--grm_question rubric"
    )
    scored, k = score(env, reward, batch), 0
    for prompt, texts, rubric in zip(env.prompts, SAID, RUBRICS):
        for text in texts:
            total = weights = 0
            for m, item in enumerate(rubric, 1):
                criterion, weight = (
                    (item, 1) if isinstance(item, str) else (item["text"], item.get("weight", 1))
                )
                question = ask(prompt, "rubric", response=text, criterion=criterion)
                yes, _ = chances(judges["near"], prompt, question, ["yes", "no"])
                assert float(scored.components[f"criterion_{m}"][k]) == pytest.approx(
                    yes, abs=ROUNDING
                )
                total, weights = total + weight * yes, weights + weight
            assert float(scored.rewards[k]) == pytest.approx(total / weights, abs=ROUNDING)
            assert len(scored.judgements[k].split(" | ")) == len(rubric)
            k += 1
    assert scored.components["criterion_2"].isnan().tolist() == [False] * 4 + [True] * 2 + [False]
    assert set(scored.components) == {"criterion_1", "criterion_2", "criterion_3"}


@pytest.mark.parametrize(
    "rubric, message",
    table("""
null                         | rows.jsonl:1: the judge needs a column "rubric"
[]                           | the judge needs a column "rubric"
[{"text": 3}]                | rubric: text must be str, not 3
[{"text": "a", "weight": 0}] | a weight above 0
[{"text": "a", "weight": "2"}] | rows.jsonl:1:
[{"weight": 1}]              | rows.jsonl:1: rubric: text must be str
["a", 5]                     | rows.jsonl:1:
"""),
)
def test_a_row_without_a_rubric_is_refused(qwen25, judges, tmp_path, rubric, message):
    row = {"prompt": "a", "rubric": json.loads(rubric)}
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    with user_error(re.escape(message)):
        answered(qwen25, rows, SAID, "--reward", f"grm:{judges['near']}", "--grm_question rubric")


def test_a_judge_learns_criteria(qwen25, tmp_path):
    """Rows with a criterion are of a kind of their own, with a template of its own."""
    settings = judgements.JudgeSettings.to_train(
        SimpleNamespace(files={"judge": {}}), {"rubric": "{prompt}|{response}|{criterion}"}
    )
    row = {
        "question": "what?",
        "response": "a cat",
        "criterion": "names <answer>",
        "correct": False,
        "critique": "It does not.",
    }
    (asked,) = judgements.read_judgement(row, settings, "both")
    assert (asked.kind, asked.question, asked.verdict) == (
        "rubric",
        "what?|a cat|names <answer>",
        "no",
    )
    assert asked.text == "It does not.\n<answer>no</answer>"
    for bad, message in (
        ({"criterion": 3}, "a row of the kind rubric: criterion must be str"),
        ({"correct": "no"}, "a row of the kind rubric: correct must be bool"),
        ({"correct": None}, "a row needs the columns of one kind, besides its prompt: .*rubric"),
    ):
        with pytest.raises(ValueError, match=message):
            judgements.read_judgement(row | bad, settings, "both")
    settings.note_training([SimpleNamespace(label="rubric", reference="no", row=row)])
    assert settings.verdicts == {"rubric": ["yes", "no"]}


def test_what_a_judge_learns_changes_no_file_that_was_read():
    saved = {"templates": {"score": "{prompt} {response}"}, "verdicts": {"score": ["1", "2"]}}
    processor = SimpleNamespace(files={"judge": saved})
    settings = judgements.JudgeSettings.to_train(processor)
    settings.note_training([SimpleNamespace(label="correct", reference="no", row={})])
    assert settings.verdicts == {"score": ["1", "2"], "correct": ["yes", "no"]}
    assert processor.files["judge"]["verdicts"] == {"score": ["1", "2"]}
    assert settings.templates["score"] == "{prompt} {response}"
