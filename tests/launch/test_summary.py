"""launch/summary.py: the screen at the end of the quickstart."""

import pytest

import summary
from conftest import write_rows

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


def test_iou_by_label(tmp_path, capsys):
    """Of a region, or else of its row, where boxes were rewarded."""

    def answer(label, *regions, **components):
        true = [{"region": [0, 0, 1, 1], "label": name, "score": score} for name, score in regions]
        return dict(
            question="q",
            response="r",
            reward=0,
            label=label,
            components=components,
            regions={"true": true},
        )

    (tmp_path / "metrics.jsonl").write_text(METRICS)
    (tmp_path / "samples").mkdir()
    rows = [
        answer(None, ("cup", 0.5), ("", 0.25), box_iou=0),
        answer("dogs", ("", 1.0), ("cup", 0.75), **{"boxes/box_iou": 0}),
        answer("clicks", ("", 0.0), accuracy=1),
        dict(question="q", response="r", reward=0),
        dict(question="q", response="r", reward=0, components={"box_iou": 0}),
        dict(question="q", response="r", reward=0, components=None, regions={"true": []}),
    ]
    write_rows(tmp_path / "samples" / "eval-000001.jsonl", rows)
    summary.main([str(tmp_path)])
    table = capsys.readouterr().out.partition("IoU by label")[2].splitlines()[1:4]
    assert [line.split() for line in table] == [
        ["cup", "0.625", "2"],
        ["(no", "label)", "0.250", "1"],
        ["dogs", "1.000", "1"],
    ]
