"""Benchmarks of judges as rows, the table of a judge, and the filter between judging and training.

Forms, groups and formulas are those of published files and scripts, written down by hand:
VL-RewardBench (vl-rewardbench/VL_RewardBench cal.py), MM-RLHF-RewardBench (yfzhang114/r1_reward inference/MM-RLHF-Reward),
Multimodal RewardBench (facebookresearch/multimodal_rewardbench scripts/), RewardBench 2 (allenai/reward-bench) and
GenAI-Bench (TIGER-AI-Lab/GenAI-Bench inference.py).
"""

import json
from collections import Counter

import benchmarks
import convert
import pytest
from conftest import judge_settings, read_rows, words
from test_convert import base64_of, encode, noise

from common.data.processor import Processor
from common.flags import DataArgs
from common.rewards.judge import load_judgements

# ---- Benchmarks

# Of the 1,250 rows, an id for each beginning, and how many begin so.
VL_IDS = {"hallucination_pair-1003": 448, "RLAIF-V-14": 233, "RLHF-V-31": 68, "mathverse_1294": 167,
          "mmmu_pro_test_Diagnostics_and_Laboratory_Medicine_161": 100, "mmmu_pro_validation_Physics_9": 51,
          "wildvision-battle-13": 173, "jailbreak-typo-Illegal_Activitiy-62": 7, "politics-Gov_Decision-124": 1,
          "svit-complex_reasoning-876": 1, "LRVInstruction-000000007746": 1}


@pytest.mark.parametrize("script, sizes", [("", (183, 749, 318)), ("R1-Reward", (484, 448, 318)),
                                           ("UnifiedReward", (631, 301, 318))])
def test_groups_of_vl_rewardbench(script, sizes):
    """The same 1,250 ids make three tables."""
    counts = Counter()
    for name, count in VL_IDS.items():
        counts[benchmarks.vl_group(name, script)] += count
    assert tuple(counts[group] for group in ("general", "hallucination", "reasoning")) == sizes


def ranked(name: str, better: int) -> dict:
    """A row of VL-RewardBench; the better answer begins with "good"."""
    answers = [f"good {name}", f"bad {name}"] if better == 0 else [f"bad {name}", f"good {name}"]
    return {"id": name, "query": "<image>\nwhat?", "response": answers, "image": base64_of(noise(1)),
            "human_ranking": [better, 1 - better], "models": ["a", "b"], "judge": "human", "rationale": "r",
            "query_source": "COCO", "ground_truth": None}


def chosen(name, **further) -> dict:
    """A row of MM-RLHF-RewardBench, or of R1-Reward's copy of VL-RewardBench."""
    return {"id": name, "prompt": "what?", "chosen": f"good {name}", "rejected": f"bad {name}", "chosen_reason": "",
            "rejected_reason": ""} | further


def named(name: str, category: str, better: str = "Output1", **further) -> dict:
    """A row of Multimodal RewardBench."""
    good, bad = (f"good {name}", f"bad {name}")[::1 if better == "Output1" else -1]
    return {"ID": name, "Text": "what?", "Image": "a.png", "Output1": good, "Output2": bad, "Better": better,
            "Category": category} | further


def best_of_4(name: str, subset: str = "Math") -> dict:
    """A row of RewardBench 2."""
    answers = {"chosen": [f"good {name}"], "rejected": [f"bad {name} {k}" for k in range(3)]}
    return {"id": name, "prompt": "1 + 1?", "num_correct": 1, "models": ["m"] * 4, "subset": subset,
            "additional_metadata": {"label": "x"}} | answers


def voted(vote: str) -> dict:
    return {"prompt": "a cat", "left_image": base64_of(noise(2)), "right_image": base64_of(noise(3)), "vote_type": vote}


ROWS = {
    "vl_rewardbench": [ranked(name, k % 2) for k, name in enumerate(VL_IDS)] + [ranked("RLHF-V-1", 0) | {"image": None}],
    "mm_rlhf": [chosen("1_2", image="mcq/a.png"), chosen("1_2", image="mcq/a.png"), chosen("3", image="/data/safety/a.png"),
                chosen("v", video="video/clip"), chosen("4", image="long/none.png")],
    "multimodal_rewardbench": [
        named("nocaps_13062", "open_generation/correctness_task", "Output2"), named("PAIRS_1", "safety"),
        named("hateful_1", "safety", Image="none.png"), named("toxic_1", "safety"), named("mathvista_1", "reasoning"),
        named("EMMA-Coding_2", "reasoning"), named("MMBench_1", "vqa")],
    "rewardbench2": [best_of_4("7"), best_of_4("8", "Factuality"), best_of_4("9", "Ties")],
    "genai_bench": [voted("leftvote"), voted("rightvote"), voted("tievote"), voted("bothbad_vote"),
                    {"prompt": "a", "left_video": "http://a.mp4", "right_video": "http://b.mp4", "vote_type": "leftvote"},
                    {"source_prompt": "a", "target_prompt": "b", "instruct_prompt": "c", "source_image": "", "vote_type": "leftvote",
                     "left_output_image": "", "right_output_image": ""}],
}
GROUPS = {
    "vl_rewardbench": ["hallucination"] * 3 + ["reasoning"] * 3 + ["general"] * 5,
    "mm_rlhf": ["mcq", "mcq", "safety", "video"],
    "multimodal_rewardbench": ["open_generation/correctness_task", "safety/bias", "safety/toxicity", "reasoning/math",
                               "reasoning/coding", "vqa"],
    "rewardbench2": ["Math"] * 3 + ["Factuality"] * 3,
    "genai_bench": ["image_generation"] * 4,
}
LEFT_OUT = {
    "vl_rewardbench": "left out: 1 rows, image missing: RLHF-V-1\n",
    "mm_rlhf": "left out: 1 rows, image missing: 4\n",
    "multimodal_rewardbench": "left out: 1 rows, image missing: hateful_1\n",
    "rewardbench2": "left out: 1 rows, subset Ties: 9\n",
    "genai_bench": "left out: 1 rows, two videos: row 5\nleft out: 1 rows, an image beside those of both sides: row 6\n",
}


@pytest.fixture
def published(tmp_path):
    """published(benchmark, rows): a file as the benchmark has it, with the images that `ROWS` names beside it."""
    def published(benchmark: str, rows: list[dict]):
        for name in ("a.png", "mcq/a.png", "data/safety/a.png", "video/clip/frame-10.png", "video/clip/frame-9.png"):
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
    convert.main(words(published(benchmark, ROWS[benchmark]), "--benchmark", benchmark, "--out", tmp_path / "out"))
    assert capsys.readouterr().out.partition("\n")[2] == LEFT_OUT[benchmark]
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

    loaded = load_judgements(str(tmp_path / "out" / "rows.jsonl"), Processor(str(qwen25)), judge_settings(), DataArgs())
    assert [ask["order"] for *_, ask in loaded] == ["given", "swapped"] * len(rows)
    assert [prompt.row["source"] for prompt, *_ in loaded[::2]] == GROUPS[benchmark]


def test_the_copy_of_vl_rewardbench(tmp_path, published):
    rows = [chosen(name, image="a.png") for name in VL_IDS]
    convert.main(words(published("", rows), "--benchmark vl_rewardbench --out", tmp_path / "out"))
    assert [row["source"] for row in read_rows(tmp_path / "out" / "rows.jsonl")] == GROUPS["vl_rewardbench"]


@pytest.mark.parametrize("benchmark, row, message", [
    ("vl_rewardbench", chosen("073712_6205145", image="mcq/a.png"), "no id of VL-RewardBench begins as '073712_6205145'"),
    ("vl_rewardbench", ranked("RLHF-V-1", 0) | {"human_ranking": None}, "no human_ranking"),
    ("mm_rlhf", chosen("RLHF-V-1", image="a.png"), "a.png is in none of the folders"),
    ("mm_rlhf", ranked("RLHF-V-1", 0), "no prompt, chosen, rejected in a row with id, query"),
    ("mm_rlhf", chosen("1", image="mcq/a.png") | {"chosen": None}, "no chosen in a row with id, prompt, chosen"),
    ("multimodal_rewardbench", named("PAIRS_1", "safety", Better=None), "no Better in a row with ID, Text"),
    ("multimodal_rewardbench", named("PAIRS_1", "safety", Text=""), "no Text in a row with ID, Text"),
    ("rewardbench2", {"id": 1, "prompt": "a", "chosen": "b", "rejected": "c", "subset": "math-prm"},
     "one answer as chosen: the first RewardBench?"),
    ("rewardbench2", best_of_4("9", "Ties"), "no row is left"),
    ("genai_bench", chosen("1", image="mcq/a.png"), "no vote_type in a row with id, prompt"),
    ("genai_bench", voted("best"), "KeyError: 'best'"),
])
def test_a_file_of_another_benchmark(tmp_path, published, capsys, benchmark, row, message):
    with pytest.raises(SystemExit) as stop:
        convert.main(words(published(benchmark, [row]), "--benchmark", benchmark, "--out", tmp_path / "out"))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
