"""launch/summary.py: the screen at the end of the quickstart."""

import json
import subprocess
import sys

import summary
from conftest import ROOT


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_curve_has_every_point_in_its_place():
    sampled = [(step, step / 40) for step in range(0, 41, 2)]
    lines = summary.text_curve(sampled, [(0, 0.0), (40, 1.0)])
    assert len(lines) == summary.HEIGHT + 2 and lines[-1].endswith("40")
    place = lines[0].index("|") + 1
    assert lines[0][place + summary.WIDTH] == "o" and lines[summary.HEIGHT][place] == "o"       # the corners
    rows = [line[place:] for line in lines[:-1]]
    dots = [(row.index("."), number) for number, row in enumerate(rows) if "." in row]
    assert dots == sorted(dots, reverse=True) and sum(row.count(".") for row in rows) == len(sampled) - 2
    assert lines[0].startswith(" 1.00 |") and lines[summary.HEIGHT // 2].startswith(" 0.50 |")


def test_rewards_beyond_one_and_below_zero_have_a_scale_of_their_own():
    lines = summary.text_curve([(1, -2.0), (2, 6.0)], [])
    assert lines[0].startswith(" 6.00 |") and lines[summary.HEIGHT].startswith("-2.00 |")
    assert "." in lines[0] and "." in lines[summary.HEIGHT]


def test_a_run_on_one_screen(tmp_path):
    """Of the last evaluation: three answers, their rewards, and where everything is."""
    write(tmp_path / "metrics.jsonl", [
        {"type": "header"}, {"step": 0, "eval/reward_mean": 0.1, "eval/accuracy_reward_mean": 0.25},
        {"step": 1, "rollout/reward": 0.5, "rollout/accuracy_reward": 0.5},
        {"step": 1, "eval/reward_mean": 0.7, "eval/accuracy_reward_mean": 0.75}])
    for step in (0, 1):
        answers = [{"question": f"question {i} at {step}", "response": f"said {i}", "reward": i / 4, "reference": "r"} for i in range(5)]
        write(tmp_path / "samples" / f"eval-{step:06d}.jsonl", answers)
    program = [sys.executable, str(ROOT / "launch" / "summary.py"), str(tmp_path)]
    text = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert "accuracy by step" in text and text.count("o\n") == 2 and len(text.splitlines()) <= 24
    assert "question 2 at 1" in text and "'said 2'   reward 0.50, right: 'r'" in text
    assert "question 3" not in text and "at 0" not in text and f"tensorboard --logdir {tmp_path}" in text


def test_a_line_ends_where_it_was_ended(tmp_path):
    """U+2028 stands within a string; half a line is what a kill leaves."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"said": "a\u2028b"}\n{"said": "c', encoding="utf-8")
    assert summary.read_lines(path) == [{"said": "a\u2028b"}]


def test_the_critic_has_a_curve_of_its_own(tmp_path):
    """Of samples and of held-out answers; what is below -1 stands at -1."""
    write(tmp_path / "metrics.jsonl", [
        {"step": 1, "rollout/reward": 0.5, "train/explained_variance": 0.0},
        {"step": 2, "rollout/reward": 0.5, "train/explained_variance": 0.5},
        {"step": 2, "eval/reward_mean": 0.7, "eval/explained_variance": -30.0}])
    lines = summary.summary_of(tmp_path)
    title = next(i for i, line in enumerate(lines) if line.startswith("explained variance"))
    curve = lines[title + 1:title + summary.HEIGHT + 3]
    assert curve == summary.text_curve([(1, 0.0), (2, 0.5)], [(2, -1.0)])
    assert curve[summary.HEIGHT].startswith("-1.00 |") and curve[summary.HEIGHT].endswith("o")
    write(tmp_path / "metrics.jsonl", [{"step": 1, "rollout/reward": 0.5}])
    assert not any(line.startswith("explained") for line in summary.summary_of(tmp_path))
