"""launch/summary.py: the screen at the end of the quickstart."""

import pytest

from conftest import write_rows
from launch import summary

METRICS = """\
{"type": "header"}
{"step": 0, "eval/reward_mean": 0.1, "eval/accuracy_reward_mean": 0.25}
{"step": 1, "rollout/reward": 0.5, "train/explained_variance": -9.0}
{"step": 1, "eval/reward_mean": 0.7, "eval/accuracy_reward_mean": 0.75}
"""


def test_a_run_on_one_screen(tmp_path, capsys):
    """Of the last evaluation: three answers, their rewards, and where everything is."""
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    (tmp_path / "samples").mkdir()
    for step in (0, 1):
        answers = [
            dict(
                question=f"question {i} at {step}",
                response=f"said {i}",
                reward=i / 4,
                reference="r",
            )
            for i in range(5)
        ]
        write_rows(tmp_path / "samples" / f"eval-{step:06d}.jsonl", answers)
    summary.main([str(tmp_path)])
    text = capsys.readouterr().out
    assert "eval/accuracy_reward_mean         0.250 -> 0.750\n" in text
    assert "explained" not in text
    assert "question 2 at 1" in text
    assert "'said 2'   reward 0.50, right: 'r'" in text
    assert "question 3" not in text
    assert "at 0" not in text
    assert f"tensorboard --logdir {tmp_path}" in text
    summary.main([str(tmp_path), "train/explained_variance"])
    assert "train/explained_variance          -9.000 -> -9.000\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        summary.main([str(tmp_path), "train/unknown"])
    assert "it has eval/accuracy_reward_mean" in capsys.readouterr().err
