"""Benchmarks of judges as rows, the table of a judge, and the filter between judging and training.

Forms, groups and formulas are those of published files and scripts, written down by hand:
VL-RewardBench (vl-rewardbench/VL_RewardBench cal.py), MM-RLHF-RewardBench (yfzhang114/r1_reward
inference/MM-RLHF-Reward), Multimodal RewardBench (facebookresearch/multimodal_rewardbench
scripts/), RewardBench 2 (allenai/reward-bench) and GenAI-Bench (TIGER-AI-Lab/GenAI-Bench
inference.py)."""

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from itertools import permutations
from statistics import fmean

import pytest

from common.data.processor import Processor
from common.flags import DataArgs
from common.rewards.judgements import answer_frame, encode_target, load_judgements, with_verdict
from conftest import ROOT, judge_settings, read_rows, table, words, write_rows
from helpers import base64_of, encode, noise
from judging import MIRRORED, PAIRS, judge_by_a_policy, judged, whole_judgements
from launch.data import benchmarks, convert
from launch.judges import judge_filter, judge_table

# ---- Benchmarks

# Of the 1,250 rows, an id for each beginning, and how many begin so.
VL_IDS = {
    "hallucination_pair-1003": 448,
    "RLAIF-V-14": 233,
    "RLHF-V-31": 68,
    "mathverse_1294": 167,
    "mmmu_pro_test_Diagnostics_and_Laboratory_Medicine_161": 100,
    "mmmu_pro_validation_Physics_9": 51,
    "wildvision-battle-13": 173,
    "jailbreak-typo-Illegal_Activitiy-62": 7,
    "politics-Gov_Decision-124": 1,
    "svit-complex_reasoning-876": 1,
    "LRVInstruction-000000007746": 1,
}


@pytest.mark.parametrize(
    "script, sizes",
    [("", (183, 749, 318)), ("R1-Reward", (484, 448, 318)), ("UnifiedReward", (631, 301, 318))],
)
def test_groups_of_vl_rewardbench(script, sizes):
    """The same 1,250 ids make three tables."""
    counts = Counter()
    for name, count in VL_IDS.items():
        counts[benchmarks.vl_group(name, script)] += count
    assert tuple(counts[group] for group in ("general", "hallucination", "reasoning")) == sizes


def ranked(name: str, better: int) -> dict:
    """A row of VL-RewardBench; the better answer begins with "good"."""
    answers = [f"good {name}", f"bad {name}"] if better == 0 else [f"bad {name}", f"good {name}"]
    return {
        "id": name,
        "query": "<image>\nwhat?",
        "response": answers,
        "image": base64_of(noise(1)),
        "human_ranking": [better, 1 - better],
        "models": ["a", "b"],
        "judge": "human",
        "rationale": "r",
        "query_source": "COCO",
        "ground_truth": None,
    }


def chosen(name, **further) -> dict:
    """A row of MM-RLHF-RewardBench, or of R1-Reward's copy of VL-RewardBench."""
    return {
        "id": name,
        "prompt": "what?",
        "chosen": f"good {name}",
        "rejected": f"bad {name}",
        "chosen_reason": "",
        "rejected_reason": "",
    } | further


def named(name: str, category: str, better: str = "Output1", **further) -> dict:
    """A row of Multimodal RewardBench."""
    good, bad = (f"good {name}", f"bad {name}")[:: 1 if better == "Output1" else -1]
    return {
        "ID": name,
        "Text": "what?",
        "Image": "a.png",
        "Output1": good,
        "Output2": bad,
        "Better": better,
        "Category": category,
    } | further


def best_of_4(name: str, subset: str = "Math") -> dict:
    """A row of RewardBench 2."""
    answers = {"chosen": [f"good {name}"], "rejected": [f"bad {name} {k}" for k in range(3)]}
    return {
        "id": name,
        "prompt": "1 + 1?",
        "num_correct": 1,
        "models": ["m"] * 4,
        "subset": subset,
        "additional_metadata": {"label": "x"},
    } | answers


def voted(vote: str) -> dict:
    return {
        "prompt": "a cat",
        "left_image": base64_of(noise(2)),
        "right_image": base64_of(noise(3)),
        "vote_type": vote,
    }


ROWS = {
    "vl_rewardbench": [ranked(name, k % 2) for k, name in enumerate(VL_IDS)]
    + [
        ranked("RLHF-V-1", 0) | {"image": None},
        ranked("RLHF-V-2", 0) | {"image": {"bytes": None, "path": None}},
    ],
    "mm_rlhf": [
        chosen("1_2", image="mcq/a.png"),
        chosen("1_2", image="mcq/a.png"),
        chosen("3", image="/data/safety/a.png"),
        chosen("v", video="video/clip"),
        chosen("4", image="long/none.png"),
    ],
    "multimodal_rewardbench": [
        named("nocaps_13062", "open_generation/correctness_task", "Output2"),
        named("PAIRS_1", "safety"),
        named("hateful_1", "safety", Image="none.png"),
        named("toxic_1", "safety"),
        named("mathvista_1", "reasoning"),
        named("EMMA-Coding_2", "reasoning"),
        named("MMBench_1", "vqa"),
    ],
    "rewardbench2": [best_of_4("7"), best_of_4("8", "Factuality"), best_of_4("9", "Ties")],
    "genai_bench": [
        voted("leftvote"),
        voted("rightvote"),
        voted("tievote"),
        voted("bothbad_vote"),
        {
            "prompt": "a",
            "left_video": "http://a.mp4",
            "right_video": "http://b.mp4",
            "vote_type": "leftvote",
        },
        {
            "source_prompt": "a",
            "target_prompt": "b",
            "instruct_prompt": "c",
            "source_image": "",
            "vote_type": "leftvote",
            "left_output_image": "",
            "right_output_image": "",
        },
    ],
}
GROUPS = {
    "vl_rewardbench": ["hallucination"] * 3 + ["reasoning"] * 3 + ["general"] * 5,
    "mm_rlhf": ["mcq", "mcq", "safety", "video"],
    "multimodal_rewardbench": [
        "open_generation/correctness_task",
        "safety/bias",
        "safety/toxicity",
        "reasoning/math",
        "reasoning/coding",
        "vqa",
    ],
    "rewardbench2": ["Math"] * 3 + ["Factuality"] * 3,
    "genai_bench": ["image_generation"] * 4,
}
LEFT_OUT = {
    "vl_rewardbench": "left out: 2 rows, image missing\n",
    "mm_rlhf": "left out: 1 rows, image missing\n",
    "multimodal_rewardbench": "left out: 1 rows, image missing\n",
    "rewardbench2": "left out: 1 rows, subset Ties\n",
    "genai_bench": "left out: 1 rows, two videos\nleft out: 1 rows, an image beside those of both sides\n",
}


@pytest.fixture
def published(tmp_path):
    """published(benchmark, rows): a file as the benchmark has it, with the images that `ROWS` names
    beside it."""

    def published(benchmark: str, rows: list[dict]):
        for name in (
            "a.png",
            "mcq/a.png",
            "data/safety/a.png",
            "video/clip/frame-10.png",
            "video/clip/frame-9.png",
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(encode(noise(4)))
        rows = json.loads(json.dumps(rows).replace("/data/safety", f"{tmp_path}/data/safety"))
        if benchmark == "multimodal_rewardbench":
            (tmp_path / "rows.json").write_text(json.dumps(rows, indent=2))
            return tmp_path / "rows.json"
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / "rows.jsonl"

    return published


@pytest.mark.parametrize("benchmark", ROWS)
def test_a_benchmark_becomes_judgements(tmp_path, published, qwen25, capsys, benchmark):
    convert.main(
        words(
            published(benchmark, ROWS[benchmark]),
            "--benchmark",
            benchmark,
            "--out",
            tmp_path / "out",
        )
    )
    told = capsys.readouterr().out.partition("\n")[2]
    assert told.partition("not read, and kept")[0] == LEFT_OUT[benchmark]
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert [row["source"] for row in rows] == GROUPS[benchmark]
    assert {row["benchmark"] for row in rows} == {benchmark}
    for row in rows:
        if benchmark != "genai_bench":
            sides = dict(zip("AB", row["responses"]))
            assert sides[row["preferred"]].startswith("good")
            assert sides["BA"["AB".index(row["preferred"])]].startswith("bad")
    if benchmark == "genai_bench":
        assert [row["preferred"] for row in rows] == ["A", "B", "tie", "tie"]
        assert (tmp_path / "out" / rows[0]["images"][1]).read_bytes() == encode(noise(3))
    pairs = {"mm_rlhf": ["1_2", "1_2", "3", "v"], "rewardbench2": ["7"] * 3 + ["8"] * 3}
    assert [row.get("pair") for row in rows] == pairs.get(benchmark, [None] * len(rows))
    if benchmark == "mm_rlhf":  # frames in the order of their numbers
        assert len(rows[3]["videos"][0]) == 2

    loaded = load_judgements(
        str(tmp_path / "out" / "rows.jsonl"), Processor(str(qwen25)), judge_settings(), DataArgs()
    )
    assert [prompt.order for prompt, *_ in loaded] == ["given", "swapped"] * len(rows)
    assert [prompt.row["source"] for prompt, *_ in loaded[::2]] == GROUPS[benchmark]


def test_folders_on_the_way_are_no_group_of_mm_rlhf():
    """Of several that name one, the last counts; and what is no film is not in the group of films."""
    for first, second in permutations(("mcq", "long", "short", "safety", "video"), 2):
        (row,) = benchmarks.rows_of("mm_rlhf", chosen("1", image=f"/{first}/data/{second}/a.png"))
        assert row["source"] == (first if second == "video" else second)
        (row,) = benchmarks.rows_of("mm_rlhf", chosen("1", video=f"/{first}/data/{second}/a.mp4"))
        assert row["source"] == "video"


def test_pairs_of_films_are_told_as_such():
    """GenAI-Bench-Video has several spellings of its columns."""
    for left in ("left_video", "video_left", "left_video_path", "video1"):
        right = left.replace("left", "right").replace("1", "2")
        row = {"prompt": "a", left: "a.mp4", right: "b.mp4", "vote_type": "leftvote"}
        with pytest.raises(benchmarks.LeftOut, match="two videos"):
            benchmarks.rows_of("genai_bench", row)


def test_the_copy_of_vl_rewardbench(tmp_path, published):
    rows = [chosen(name, image="a.png") for name in VL_IDS]
    convert.main(words(published("", rows), "--benchmark vl_rewardbench --out", tmp_path / "out"))
    assert [row["source"] for row in read_rows(tmp_path / "out" / "rows.jsonl")] == GROUPS[
        "vl_rewardbench"
    ]


ROWS_OF = {
    "ranked": ranked("RLHF-V-1", 0),
    "chosen": chosen("RLHF-V-1", image="mcq/a.png"),
    "named": named("PAIRS_1", "safety"),
    "best": best_of_4("7"),
    "voted": voted("leftvote"),
    "-": {},
}
OTHER_FILES = table("""
vl_rewardbench | chosen | {"id": "073712_6205145"}        | no id of VL-RewardBench begins as '073712_6205145'
vl_rewardbench | -
    | {"id": "RLHF-V-1", "query": "a", "response": ["b", "c"]}
    | no human_ranking in a row with id, query, resp
vl_rewardbench | ranked | {"human_ranking": null}         | no human_ranking
vl_rewardbench | ranked | {"human_ranking": [null, null]} | no human_ranking
vl_rewardbench | ranked | {"response": ["good", null]}    | no response
vl_rewardbench | ranked | {"response": ["good"]}          | a pair has two responses
vl_rewardbench | ranked | {"response": ["good", "bad", "bad"]} | a pair has two responses
vl_rewardbench | -
    | {"id": "RLHF-V-1", "prompt": "a", "chosen": "b"}
    | no rejected in a row with id, prompt, chosen
vl_rewardbench | chosen | {"chosen": null}                | no chosen
mm_rlhf        | chosen | {"image": "a.png"}              | a.png is in none of the folders
mm_rlhf        | ranked | {}                              | no prompt in a row with id, query
mm_rlhf        | chosen | {"chosen": null}                | no chosen in a row with id, prompt, chosen
multimodal_rewardbench | named | {"Better": null}         | no Better in a row with ID, Text
multimodal_rewardbench | named | {"Text": ""}             | no Text in a row with ID, Text
rewardbench2 | -
    | {"id": 1, "prompt": "a", "chosen": "b", "rejected": "c", "subset": "math-prm"}
    | one answer as chosen: the first RewardBench?
rewardbench2   | best   | {"chosen": [null]}              | no chosen in a row with id, prompt
rewardbench2   | best   | {"rejected": []}                | no rejected in a row with id, prompt
rewardbench2   | best   | {"subset": "Ties"}              | no row is left
genai_bench    | chosen | {}                              | no vote_type in a row with id, prompt
genai_bench    | voted  | {"vote_type": "best"}           | no row as in the tables of --help
""")


@pytest.mark.parametrize("benchmark, base, changes, message", OTHER_FILES)
def test_a_file_of_another_benchmark(
    tmp_path, published, capsys, benchmark, base, changes, message
):
    rows = published(benchmark, [ROWS_OF[base] | json.loads(changes)])
    with pytest.raises(SystemExit) as stop:
        convert.main(words(rows, "--benchmark", benchmark, "--out", tmp_path / "out"))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


# ---- The table


def table_of(folder, rows: list[tuple]) -> dict[str, dict[str, str]]:
    return judge_table.make_table(judge_table.read_units(judged(folder, rows)))


def vl_row(name: str, *judgements, **further) -> tuple:
    row = {"benchmark": "vl_rewardbench", "id": name}
    return benchmarks.vl_group(name), *judgements, {"row": row} | further


# A judge at random. The swapped order is as it was shown: there the right answer is the other one.
AT_RANDOM = [
    vl_row("RLAIF-V-1", "A", "AAB", "BAB", responses=["x" * 10, "x" * 5]),
    vl_row("hallucination_pair-2", "B", "B-B", "AB-", responses=["x" * 3, "x" * 3]),
    vl_row("mathverse_3", "A", "BBB", "BBA", responses=["x" * 1, "x" * 9]),
    vl_row("mmmu_pro_test_Art_4", "B", "BAB", "AAB"),
    vl_row("wildvision-battle-5", "A", "---", "BBB"),
    vl_row("svit-complex_reasoning-6", "B", "AAA", "BAB"),
]


def test_a_judge_at_random(tmp_path):
    """Counted by hand: 36 judgements, of which 17 are right and 5 could not be read."""
    table = table_of(tmp_path, AT_RANDOM)
    overall = dict(table["overall"])
    overall.pop(judge_table.INTERVAL)
    assert overall == {
        "rows": "6",
        "accuracy, unread is wrong": "0.472",  # 17 / 36
        "accuracy, unread left out": "0.548",  # 17 / 31
        "accuracy, unread is one half": "0.542",  # 19.5 / 36
        "could not be read": "0.139",
        "both orders right": "0.167",  # 3 of 18: the first samples of rows 1, 2 and 4
        "both orders alike": "0.333",  # 6 of 18: these, one of row 3 and two of row 6
        "says A": "0.387",  # 12 of 31
        "says the longer answer": "0.667",  # of rows 1 and 3 4 each, of 6
        "the longer answer is right": "0.500",
        "votes@1": "0.667",  # 8 of 12 questions
        "votes@3": "0.625",  # 7 and a tie, of row 2 swapped
        "votes@3 of both orders": "0.667",  # rows 1, 2, 4 and 5
    }
    accuracies = {name: cells["accuracy, unread is wrong"] for name, cells in table.items()}
    assert accuracies == {
        "general": "0.333",
        "hallucination": "0.583",
        "reasoning": "0.500",
        "overall": "0.472",
        "macro": "0.472",
        "macro of R1-Reward": "0.481",  # general 8 of 18, hallucination 3 of 6, reasoning 6 of 12
        # general 7 of 18, hallucination 4 of 6, reasoning 6 of 12
        "macro of UnifiedReward": "0.519",
    }
    assert table["macro of R1-Reward"]["rows"] == "3/1/2"
    assert table["macro"]["accuracy, unread left out"] == "0.548"  # of 4/9, 7/10 and 6/12


def cal_py(rows: list[tuple]) -> tuple[float, float]:
    """VL-RewardBench's own overall and macro accuracy of rows without ties. A question counts if
    one answer has more than half of all its verdicts, among them those that could not be read."""
    agree, decided = Counter(), Counter()
    for group, right, *orders, _ in rows:
        for letters, hit in zip(orders, (right, MIRRORED[right])):
            half = len(letters) / 2
            agree[group] += letters.count(hit) > half
            decided[group] += max(letters.count("A"), letters.count("B")) > half
    return agree.total() / decided.total(), fmean(
        agree[group] / decided[group] for group in decided
    )


SINGLE = [(*row[:2], row[2][0], row[3][0], row[4]) for row in AT_RANDOM]
READABLE = [
    (*row[:2], row[2].replace("-", "A"), row[3].replace("-", "A"), row[4]) for row in AT_RANDOM
]


@pytest.mark.parametrize(
    "rows, line, published, expected",
    [
        # 8/11; 1/3, 4/4, 3/4
        (SINGLE, "accuracy, unread left out", ("0.727", "0.694"), ("0.727", "0.694")),
        (READABLE, "votes@3", ("0.750", "0.750"), ("0.750", "0.750")),
        (AT_RANDOM, "votes@3", ("0.700", "0.694"), ("0.625", "0.625")),  # 7/10; 1/3, 3/3, 3/4
    ],
)
def test_as_vl_rewardbench_counts(tmp_path, rows, line, published, expected):
    """One verdict a question, or three that can be read: as its script has it. It differs where
    some cannot be read."""
    table = table_of(tmp_path, rows)
    assert tuple(f"{value:.3f}" for value in cal_py(rows)) == published
    assert (table["overall"][line], table["macro"][line]) == expected


def test_rows_that_count_together(tmp_path):
    """ACC and ACC+ of MM-RLHF-RewardBench: of three ids one has all its pairs right, of eight pairs
    five; by folder."""
    rights = {("mcq", "x"): [1, 1, 0], ("mcq", "y"): [1, 1], ("long", "z"): [1, 0, 0]}
    rows = []
    for (group, name), pairs in rights.items():
        for is_right in pairs:
            letters = ("A", "B") if is_right else ("B", "A")
            rows.append((group, "A", *letters, {"pair": name}))
    table = table_of(tmp_path, rows)
    line = "all that count together right"
    accuracies = {
        name: (cells["accuracy, unread is wrong"], cells[line]) for name, cells in table.items()
    }
    assert accuracies == {
        "long": ("0.333", "0.000"),
        "mcq": ("0.800", "0.500"),
        "overall": ("0.625", "0.333"),
        "macro": ("0.567", "0.250"),
    }
    assert table["overall"]["rows"] == "8"


def test_a_mean_over_groups_needs_all_of_them(tmp_path):
    """Of group h nothing could be read, so that two means over g and h would be of g alone."""
    table = table_of(tmp_path, [("g", "A", "A", "B"), ("h", "A", "-", "-")])
    line = "accuracy, unread left out"
    assert table["overall"][line] == table["g"][line] == "1.000"
    assert line not in table["h"]
    assert line not in table["macro"]
    assert table["macro"]["accuracy, unread is wrong"] == "0.500"


def test_ties_of_genai_bench(tmp_path):
    """Accuracy with ties, as its own script, and without the rows that are ties, as most papers."""
    rows = [
        ("image_generation", *letters)
        for letters in (("A", "A", "B"), ("B", "t", "t"), ("tie", "t", "t"), ("tie", "A", "t"))
    ]
    table = table_of(tmp_path, rows)
    assert table["overall"]["accuracy, unread is wrong"] == "0.625"  # 2 + 0 + 2 + 1 of 8
    assert table["without ties"]["accuracy, unread is wrong"] == "0.500"
    assert table["without ties"]["rows"] == "2"


def test_ties_of_vl_rewardbench(tmp_path):
    """No row is one: the table has how many verdicts say so, and the accuracy without them, as its
    own script; also beside a benchmark that has ties."""
    ties, left_out = "says a tie, where none is right", "accuracy, unread and ties left out"
    rows = [
        vl_row("RLAIF-V-1", "A", "A", "B"),
        vl_row("hallucination_pair-2", "B", "B", "A"),
        vl_row("mathverse_3", "A", "t", "B"),
        vl_row("mmmu_pro_test_Art_4", "B", "B", "A"),
        vl_row("wildvision-battle-5", "A", "t", "B"),
        vl_row("svit-complex_reasoning-6", "B", "A", "-"),
    ]
    published = [f"{value:.3f}" for value in cal_py(rows)]
    assert published == ["0.889", "0.833"]  # 8 of 9; 1/2, 4/4, 3/3
    table = table_of(tmp_path / "alone", rows)
    assert [table[name][left_out] for name in ("overall", "macro")] == published
    assert [table[name][ties] for name in ("overall", "general", "hallucination")] == [
        "0.167",
        "0.250",
        "0.000",
    ]
    assert table["overall"]["accuracy, unread is wrong"] == "0.667"  # 8 of 12
    other = ("image_generation", "tie", "t", "A", {"row": {"benchmark": "genai_bench"}})
    table = table_of(tmp_path / "together", [*rows, other])
    assert (table["overall"][ties], table["overall"][left_out]) == ("0.167", "0.889")
    assert not table["image_generation"].keys() & {ties, left_out}


@pytest.mark.parametrize(
    "row", [{"benchmark": "mm_rlhf", "id": "0737_6"}, {"benchmark": "genai_bench"}]
)
def test_two_benchmarks_in_one_table(tmp_path, row):
    """Groups of other scripts are those of VL-RewardBench alone, whichever comes first."""
    rows = [vl_row("RLAIF-V-1", "A", "A", "B"), ("mcq", "A", "A", "B", {"row": row})]
    for name in "ab":
        assert set(table_of(tmp_path / name, rows)) == {"overall", "hallucination", "mcq", "macro"}
        rows.reverse()


def test_interval(tmp_path):
    """Of 400 pairs half of which are right in both orders: that of 400 coins, or of 100 where four
    count together."""
    for name, size, width in (
        ("alone", 1, 2 * 1.96 * 0.5 / 400**0.5),
        ("together", 4, 2 * 1.96 * 0.5 / 100**0.5),
    ):
        rows = []
        for k in range(400):
            letters = ("A", "B") if k // size % 2 else ("B", "A")
            rows.append(("g", "A", *letters, {"pair": f"p{k // size}"}))
        low, high = table_of(tmp_path / name, rows)["overall"][judge_table.INTERVAL].split("-")
        assert float(high) - float(low) == pytest.approx(width, rel=0.08)
        assert (float(low) + float(high)) / 2 == pytest.approx(0.5, abs=0.01)


def test_the_table_is_printed(tmp_path, capsys):
    """In Markdown, with columns of equal width."""
    judge_table.main([str(judged(tmp_path, AT_RANDOM))])
    lines = capsys.readouterr().out.splitlines()
    assert len(set(map(len, lines))) == 1
    assert set(lines[1]) == {"|", "-", " "}
    assert lines[3].startswith("| accuracy, unread is wrong ")


def test_two_judges_are_compared_on_the_same_pairs(tmp_path, capsys):
    """Their difference is surer than either accuracy: 400 pairs, of which both judges are wrong in the same
    half, and the second in 40 more."""
    rows = {"first": [], "second": []}
    for k in range(400):
        for name in rows:
            is_right = k % 2 and (name == "first" or k % 10 != 1)
            letters = ("A", "B") if is_right else ("B", "A")
            rows[name].append(("ab"[k % 4 > 1], "A", *letters, {"row": {"id": k}}))
    runs = [str(judged(tmp_path / name, each)) for name, each in rows.items()]
    judge_table.main(runs)
    cells = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("|"):
            name, *values = (cell.strip() for cell in line.strip("|").split("|"))
            cells[name] = values
    assert cells[""] == ["overall", "a", "b", "macro"]
    assert cells["rows"] == ["400", "200", "200", "200/200"]
    assert [cells[run][0] for run in runs] == ["0.500", "0.400"]
    assert cells["difference"] == ["+0.100"] * 4
    low, _, high = cells["95 % of the difference"][0].split()
    width = 2 * 1.96 * (0.1 * 0.9 / 400) ** 0.5  # of 400 coins that fall once in ten times
    assert float(high) - float(low) == pytest.approx(width, rel=0.1)
    other = str(judged(tmp_path / "other", rows["second"][::-1]))
    with pytest.raises(SystemExit):
        judge_table.main([runs[0], other])
    assert f"{runs[0]} and {other} judged different rows" in capsys.readouterr().err


def test_a_run_without_judgements(tmp_path, capsys):
    empty, prompts = tmp_path / "empty", tmp_path / "prompts"
    (prompts / "samples").mkdir(parents=True)
    (prompts / "samples" / "eval-000001.jsonl").write_text('{"sample": 0, "response": "red"}\n')
    files = words("--right", tmp_path / "a", "--wrong", tmp_path / "b")
    for program, more in ((judge_table.main, []), (judge_filter.main, files)):
        for run in (empty, prompts):
            with pytest.raises(SystemExit) as stop:
                program([str(run), *more])
            assert stop.value.code == 2
            error = capsys.readouterr().err.splitlines()[-1]
            assert error.startswith(
                f"error: {run} has no judgements: make them by train_ppo_vl.py --eval_only"
            )


def test_what_the_table_read_and_left_out(tmp_path, capsys):
    """The file, of which a folder may have several, and the rows without another order; of a file
    that is cut only its name."""
    judged(tmp_path, [("g", "A", "A", "B"), ("g", "A", "A", "")])
    file = tmp_path / "samples" / "eval-000040.jsonl"
    judge_table.main([str(tmp_path)])
    assert capsys.readouterr().err == f"{file}\n1 of 2 rows were judged in two orders and count\n"
    file.write_text('{"verdict":')
    with pytest.raises(SystemExit):
        judge_table.main([str(tmp_path)])
    assert capsys.readouterr().err.startswith(f"{file}\nerror: ")


def test_the_table_needs_no_torch():
    code = "import sys; from launch.judges import judge_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# ---- The filter


def test_right_judgements_are_imitated_and_wrong_rows_go_to_rl(tmp_path, qwen25, capsys):
    """What is imitated are the tokens of the judgement, behind the question as it was asked."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.png").write_bytes(encode(noise(ord(name))))
    lines = """{"prompt": "a cat", "images": ["a.png", "b.png"], "preferred": "A", "source": "g", "pair": 7}
{"prompt": "<image>what?", "images": ["c.png"], "responses": ["x", "y"], "preferred": "B"}
{"question": "what?", "images": ["c.png"], "videos": [["a.png", "b.png"]], "response": "x", \
"correct": true}"""
    (folder / "train.jsonl").write_text(lines)
    rows = read_rows(folder / "train.jsonl")
    processor = Processor(str(qwen25))
    frame = answer_frame(processor)
    questions = load_judgements(
        str(folder / "train.jsonl"), processor, judge_settings(), DataArgs(), "both", frame
    )

    # The answer is "It is so." and a verdict, by sample: right is r, quoted by a truncated
    # judgement c, wrong w, unreadable -.
    records, texts = [], {}
    for (prompt, *_), letters in zip(questions, ("wr", "rr", "cr", "cc", "-w")):
        for sample, letter in enumerate(letters):
            verdict = {"r": prompt.reference, "c": None, "w": "tie", "-": None}[letter]
            written = prompt.reference if letter == "c" else verdict
            response = f"It is {sample}. {with_verdict(written) if written else ''}"
            texts.setdefault((prompt.index, letter), response)
            records.append(
                {
                    "index": prompt.index,
                    "group": "g",
                    "sample": sample,
                    "order": prompt.order,
                    "verdict": verdict,
                    "reference": prompt.reference,
                    "response": response,
                    "truncated": letter == "c",
                    "images": list(prompt.images),
                    "row": prompt.row,
                    "messages": prompt.messages,
                }
            )
    (tmp_path / "run" / "samples").mkdir(parents=True)
    write_rows(tmp_path / "run" / "samples" / "eval-000000.jsonl", records)
    right, wrong = tmp_path / "elsewhere" / "sft.jsonl", tmp_path / "elsewhere" / "rl.jsonl"
    right.parent.mkdir()
    capsys.readouterr()
    judge_filter.main(words(tmp_path / "run", "--right", right, "--wrong", wrong))
    assert capsys.readouterr().out == "3 right judgements, 3 rows with a wrong one\n"

    again = load_judgements(str(right), processor, judge_settings(), DataArgs(), "both", frame)
    assert len(again) == 3
    for (prompt, *_), (copy, label, *_) in zip(questions, again):
        assert copy.input_ids.tolist() == prompt.input_ids.tolist()
        assert copy.images == prompt.images
        assert label.tolist() == encode_target(processor, frame, texts[prompt.index, "r"]).tolist()
        assert copy.label == "response"
    images = [str(folder / f"{name}.png") for name in "abc"]
    assert read_rows(wrong) == [
        rows[0] | {"images": images[:2]},
        rows[1] | {"images": images[2:]},
        rows[2] | {"images": images[2:], "videos": [images[:2]]},
    ]
    asked = load_judgements(str(wrong), processor, judge_settings(), DataArgs())
    assert [prompt.input_ids.tolist() for prompt, *_ in asked] == [
        prompt.input_ids.tolist() for prompt, *_ in questions
    ]


def test_a_run_of_the_trainer_is_read(tmp_path, qwen25, pairs, monkeypatch, capsys):
    """Votes are those of its metrics, and rows for RL those of its data: of two files of one name."""
    draw = random.Random(5)
    texts = [[draw.choice(["<answer>A</answer>", "so <answer>b</answer>", "?"])] for _ in range(36)]
    whole_judgements(monkeypatch, texts)
    shutil.copytree(pairs.parent, tmp_path / "other")
    files = f"{pairs},{tmp_path / 'other' / pairs.name}"
    _, metrics = judge_by_a_policy(qwen25, files, tmp_path / "run", "--eval_samples 3")
    table = judge_table.make_table(judge_table.read_units(tmp_path / "run"))
    assert table["overall"]["rows"] == "6"
    for k in (1, 3):
        assert table["overall"][f"votes@{k}"] == f"{metrics[f'eval/votes@{k}']:.3f}"
    assert set(table) == {"overall", "without ties", "animals", "pairs.jsonl", "pictures", "macro"}
    rl = tmp_path / "rl.jsonl"
    judge_filter.main(words(tmp_path / "run", "--right", tmp_path / "sft.jsonl", "--wrong", rl))
    assert [row | {"images": len(row.get("images", []))} for row in read_rows(rl)] == [
        row | {"images": len(row.get("images", []))} for row in PAIRS * 2
    ]


@pytest.mark.parametrize(
    "letters, counts", [("AA", "2 right judgements, 0 rows"), ("BB", "0 right judgements, 1 rows")]
)
def test_a_filter_that_leaves_nothing(tmp_path, capsys, letters, counts):
    further = {"truncated": False, "images": [], "messages": [], "response": "x"}
    run = judged(
        tmp_path / "run", [("g", "A", letters, letters.translate({65: 66, 66: 65}), further)]
    )
    with pytest.raises(SystemExit) as stop:
        judge_filter.main(words(run, "--right", tmp_path / "a", "--wrong", tmp_path / "b"))
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out.startswith(counts)
    assert printed.err.splitlines()[-1] == "error: one of the two files would be empty"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
