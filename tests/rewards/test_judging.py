"""Judges that are compared and trained by RL: votes, both orders of a pair, rubrics.

The references are plain loops over texts, and Hugging Face's own model that is asked one question at a time.
"""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ranks
import train_ppo_vl as ppo
from common import distributed
from common.data.processor import Processor
from common.reports import accuracy
from common.rewards import judge as judgements
from common.rewards import rules, scoring
from common.rewards.judge import JudgeSettings, load_judgements
from conftest import (
    ROUNDING,
    read_rows,
    start,
    table,
    take,
    user_error,
    with_flags,
    words,
    write_json,
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
        assert record["pair"] == row.get("pair")
        assert record["verdict"] == ("A" if ">A<" in text else "B" if ">b<" in text else None)
        lengths = [len(answer) for answer in row["responses"]] if "responses" in row else None
        assert record["lengths"] == (lengths[::-1] if lengths and swapped else lengths)
        assert record["reference"] == (
            {"A": "B", "B": "A"}.get(row["preferred"], "tie") if swapped else row["preferred"]
        )
    assert {name: metrics[name] for name in metrics if "votes" in name} == {
        f"eval/votes@{k}": pytest.approx(plain_votes(records, k)) for k in (1, 3)
    }


def test_a_recorded_question_is_a_row_to_learn_from(qwen25, pairs, tmp_path):
    """As launch/judge_filter.py writes it: the prompt is that of the judgement."""
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
    args = ppo.parse_args(words("--model", judge, "--data", pairs, "--max_prompt_tokens 256")).data
    processor = Processor(judge, args)
    settings = JudgeSettings.to_train(processor)
    path = write_rows(tmp_path / "sft.jsonl", rows)
    again = [prompt for prompt, *_ in load_judgements(path, processor, settings, args)]
    assert [prompt.images for prompt in again] == [tuple(record["images"]) for record in records]
    assert [prompt.text for prompt in again] == [record["prompt"] for record in records]
    assert settings.trained_on == ["answers"]


# ------------------------------------------------------------------------------------------------
# both orders of a pair
@pytest.mark.parametrize(
    "text, right, formed",
    table("""
so <answer>A</answer>                 | 1 | 1
<answer> a </answer>                  | 1 | 1
<answer>B</answer>                    | 0 | 1
<answer>A</answer>.                   | 1 | 0
<answer>B</answer> <answer>A</answer> | 1 | 0
<answer></answer>                     | 0 | 0
A                                     | 0 | 0
                                      | 0 | 0
<answer>hm <answer>A</answer>         | 1 | 0
<think>x</think><answer>C</answer>    | 0 | 1
"""),
)
def test_the_rule_of_judgements(text, right, formed):
    assert rules.rule_scores("judgement", text, "A") == {
        "reward": pytest.approx(0.9 * int(right) + 0.1 * int(formed)),
        "accuracy": int(right),
        "format": int(formed),
    }


def test_consistency_is_that_of_a_plain_loop():
    """Rows 0 and 1, 2 and 3, ... are both orders of a pair, with three judgements each."""
    draw = random.Random(1)
    rows = [SimpleNamespace(label=("answers", "pictures")[k // 2 % 2], text="") for k in range(10)]
    indices = [k for k in range(10) for _ in range(3)]
    texts = [
        draw.choice(
            [
                "<answer>A</answer>",
                "<answer>b</answer>",
                "<answer>tie</answer>",
                "<answer>C</answer>",
                "A",
            ]
        )
        for _ in indices
    ]

    def verdict(k: int) -> str:
        return {">A<": "A", ">b<": "B", ">ti": "tie"}.get(texts[k][7:10], "")

    expected = []
    for k in range(len(texts)):
        other = indices[k] + 1 if indices[k] % 2 == 0 else indices[k] - 1
        mirrored = {"A": "B", "B": "A", "tie": "tie", "": None}[verdict(k)]
        expected.append(
            sum(verdict(j) == mirrored for j in range(len(texts)) if indices[j] == other) / 3
        )
    assert judgements.order_agreement(rows, indices, texts) == pytest.approx(expected)
    assert {0, 1 / 3, 2 / 3} <= set(expected)


FLAGS = (
    "--row_kind judgements --reward judgement --advantage grpo --max_new_tokens 12 --max_prompt_tokens 256 "
    "--samples_per_prompt 2 --prompts_per_step 4 --actor_lr 1e-3"
)


def test_both_orders_of_a_pair_are_drawn_together(qwen25, pairs):
    """In both passes over the data, of several files, and as a resumed run draws them."""
    args = ppo.parse_args(
        words("--model", qwen25, "--data", f"{pairs}:0.3,{pairs}:0.7", FLAGS, "--steps 5")
    )
    distributed.start(args.timeout, args.hsdp)
    rows = ppo.load_rows(args)
    state = ppo.TrainState(0.0)
    with ppo.open_loader(args, rows, state) as loader:
        batches = [loader.take() for _ in range(5)]
    with ppo.open_loader(args, rows, replace(state, rows_drawn=12)) as loader:
        assert loader.take().prompts == batches[3].prompts
    with ppo.open_loader(
        with_flags(args, prompts_per_step=2), rows, replace(state, rows_drawn=12)
    ) as loader:
        halves = [loader.take() for _ in range(4)]
        assert [row for half in halves for row in half.prompts] == batches[3].prompts + batches[
            4
        ].prompts
        assert [draw for half in halves for draw in half.prompt_ids] == list(range(12, 20))
    for batch in batches:
        for one, other in zip(batch.prompts[::2], batch.prompts[1::2], strict=True):
            assert one.source == other.source
            assert (one.order, other.order) == ("given", "swapped")
    assert sorted(id(row) for batch in batches[:1] for row in batch.prompts) != sorted(
        map(id, batches[1].prompts)
    )
    loader.world = 3
    assert loader.owners(8) == [0, 0, 1, 1, 2, 2, 0, 0]


def judge_by_coin(seed: int) -> None:
    """In every rank: responses say what the hash of their prompt and number decides, and a quarter
    of them is cut off."""
    import common.data.transcripts as transcripts
    import common.reports.records as of_records
    import common.rewards.scoring as scoring

    verdicts = ("<answer>A</answer>", "<answer>B</answer>", "<answer>tie</answer>", "none")

    def turn_texts(batch, picks, processor):
        coins = []
        for index, number in zip(batch.prompt_index.tolist(), batch.sample_number.tolist()):
            coins.append(
                random.Random(f"{seed} {(batch.prompts[index].index, number)}").randrange(16)
            )
        batch.truncated = torch.tensor(coins) >= 12
        return [[verdicts[coins[i] % 4]] for i in picks]

    for module in (scoring, of_records, transcripts):
        module.turn_texts = turn_texts


def plain_consistency(record: dict, records: list[dict]) -> float:
    """The share of the samples of the same row in the other order that say the same of it."""
    mirrored = {"A": "B", "B": "A", "tie": "tie"}.get(record["verdict"])
    others = [
        other
        for other in records
        if other["source"] == record["source"] and other["order"] != record["order"]
    ]
    return sum(mirrored is not None and other["verdict"] == mirrored for other in others) / len(
        others
    )


@pytest.mark.parametrize("world", [1, 2])
def test_a_consistent_right_judge_earns_more(qwen25, pairs, tmp_path, world):
    """Rewards of a step and of evaluations, on both numbers of ranks, by a plain loop over their records."""
    line = words(
        "--model",
        qwen25,
        "--data",
        pairs,
        "--eval_data",
        pairs,
        "--out",
        tmp_path / "run",
        FLAGS,
        "--consistency_coef 0.5 --steps 2 --eval_samples 3 --log_samples 4 --prompts_per_step 6",
    )
    ranks.run(ppo.main, line, world=world, patches=[(judge_by_coin, 11)])
    for name in ("step-000001", "eval-000002"):
        records, gains = read_rows(tmp_path / "run" / "samples" / f"{name}.jsonl"), set()
        assert len(records) == 6 * (2 if "step" in name else 3)
        for record in records:
            word = re.sub("<.?answer>", "", record["response"])
            assert record["verdict"] == (None if record["truncated"] or word == "none" else word)
            right, alike = (
                record["verdict"] == record["reference"],
                plain_consistency(record, records),
            )
            formed = record["verdict"] is not None
            assert record["reward"] == pytest.approx(0.9 * right * (1 + 0.5 * alike) + 0.1 * formed)
            assert record["components"]["consistency"] == pytest.approx(alike)
            gains.add((right, alike > 0))
        assert gains == {(True, True), (True, False), (False, True), (False, False)}


ONE_ORDER = table("""
--prompts_per_step 3                       | --prompts_per_step 3 must be a multiple of 2
--prompts_per_step 4 --rollouts_per_step 4 | must be a multiple of 2 x --rollouts_per_step
--row_kind prompts                         | --reward judgement needs --row_kind judgements
--dynamic_sampling 2                       | --reward judgement excludes --dynamic_sampling: both orders
""")


@pytest.mark.parametrize("line, message", ONE_ORDER)
def test_flags_that_tear_pairs_apart_are_refused(line, message):
    with user_error(message):
        ppo.parse_args(words("--model m --data d", FLAGS, line))


def test_what_has_no_other_order_is_refused(qwen25, tmp_path):
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"question": "2 + 2?", "response": "4", "correct": True}]
    )
    args = ppo.parse_args(words("--model", qwen25, "--data", rows, FLAGS))
    for recipe, coefficient in (
        ('{"*": [["verdict", 1]]}', 0.5),
        ('{"*": [["judgement", 1], ["verdict", 0]]}', 0.0),
    ):
        changes = dict(reward_recipe=recipe, reward="", consistency_coef=coefficient)
        with user_error(
            "--consistency_coef needs the reward judgement, and judgement beside others needs"
        ):
            scoring.load_rewards(replace(args, **changes))
    distributed.start(args.timeout, args.hsdp)
    with user_error("rows.jsonl:1: correct has no other order"):
        scoring.load_rewards(args).check_rows(ppo.load_rows(args).train)


def test_an_evaluation_keeps_both_orders_together(qwen25, pairs):
    for slots, samples, expected in ((3, 1, 2), (1, 1, 2), (4, 8, 2), (9, 2, 4)):
        args = ppo.parse_args(words("--model", qwen25, "--data", pairs, FLAGS, "--slots", slots))
        assert ppo.prompts_together(args, samples) == expected


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
    batch = take(env, 1).with_targets(
        [[torch.tensor(env.processor.tokenizer.encode(text, add_special_tokens=False))] * 2]
    )
    batch.truncated = torch.tensor([False, True])
    scoring.load_rewards(env.args).score(batch, env.processor, 0)
    assert batch.rewards.tolist() == [1, gains]


def test_a_thought_that_a_template_opens_hides_a_verdict():
    """In agreement of orders and in records; one that is closed does not."""
    texts = ["not <answer>A</answer>", "so</think><answer>B</answer>"]
    rows = [
        SimpleNamespace(text="so: <think>\n", label="answers", reference=verdict)
        for verdict in "AB"
    ]
    assert judgements.order_agreement(rows, [0, 1], texts) == [0, 0]
    assert judgements.order_agreement(rows, [0, 1], ["x</think><answer>A</answer>", texts[1]]) == [
        1,
        1,
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


@pytest.mark.parametrize("which", ["near", "far"])
def test_a_rubric_is_the_weighted_mean_of_its_criteria(qwen25, rubric_rows, judges, which):
    env, reward, batch = answered(
        qwen25, rubric_rows, SAID, "--reward", f"grm:{judges[which]}", "--grm_question rubric"
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
                yes, _ = chances(judges[which], prompt, question, ["yes", "no"])
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
null                         | rows.jsonl:1: no "rubric"
[]                           | no "rubric"
[{"text": 3}]                | a text and a weight above 0
[{"text": "a", "weight": 0}] | a weight above 0
[{"text": "a", "weight": "2"}] | rows.jsonl:1:
[{"weight": 1}]              | rows.jsonl:1: rubric: expected a text and
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
    assert (asked["kind"], asked["question"], asked["verdict"]) == (
        "rubric",
        "what?|a cat|names <answer>",
        "no",
    )
    assert asked["text"] == "It does not.\n<answer>no</answer>"
    for bad in (
        row | {"criterion": 3},
        row | {"correct": "no"},
        {key: row[key] for key in row if key != "correct"},
    ):
        with pytest.raises(
            ValueError, match="a row with 'criterion' needs one prompt, a response and a criterion"
        ):
            judgements.read_judgement(bad, settings, "both")
    settings.note_training([SimpleNamespace(label="rubric", reference="no")])
    assert settings.question_to_ask("rubric") == "rubric"
    with pytest.raises(ValueError, match="not trained on questions of the kind answers"):
        settings.question_to_ask("answers")


# ------------------------------------------------------------------------------------------------ both
def save_rewards(qwen25: str, rows: str, out: str, *flags: str) -> None:
    """In every rank: what the responses earn."""
    env, reward, batch = answered(qwen25, rows, SAID, *flags)
    scored = score(env, reward, batch)
    if distributed.is_main():
        columns = {"reward": scored.rewards.tolist()}
        columns |= {
            name: values.nan_to_num(-1).tolist() for name, values in scored.components.items()
        }
        write_json(Path(out), columns)


def test_two_ranks_judge_as_one(qwen25, rubric_rows, judges, tmp_path):
    flags = ("--reward", f"grm:{judges['far']}", "--grm_question rubric")
    save_rewards(qwen25, rubric_rows, str(tmp_path / "one"), *flags)
    ranks.run(
        save_rewards, str(qwen25), rubric_rows, str(tmp_path / "two"), *map(str, flags), world=2
    )
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, values in one.items():
        assert two[name] == pytest.approx(values, abs=ROUNDING)
