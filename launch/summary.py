"""What a run has reached, on one screen of text: python launch/summary.py RUN

The curve of its accuracy (of its reward, where no component has that name) and of its critic's
explained variance, three held-out answers with what they earned, and where the rest is.
"""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT = 60, 8  # characters of a curve

Points = list[tuple[int, float]]


def read_lines(path: Path) -> list[dict]:
    """Of JSONL, without the half line that a kill may leave at its end."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # a string may hold U+2028
    return [json.loads(line) for line in lines]


def curves_of(records: list[dict]) -> tuple[str, Points, Points]:
    """The name of what is shown, its values of the samples by step, and of the held-out answers."""
    keys = {key for record in records for key in record}
    names = [key.split("/", 1)[1].split("_reward")[0] for key in sorted(keys) if "accuracy_reward" in key]
    sampled, held_out = "rollout/reward", "eval/reward_mean"
    if names:  # of several sources: of the first
        sampled, held_out = f"rollout/{names[0]}_reward", f"eval/{names[0]}_reward_mean"
    curves = []
    for key in (sampled, held_out):
        curves.append([(record["step"], record[key]) for record in records if key in record])
    if not any(curves):
        raise SystemExit("error: the run has no records of rewards")
    return names[0] if names else "reward", *curves


def explained_of(records: list[dict]) -> tuple[Points, Points]:
    """What the critic explains of the returns of the samples by step, and of the held-out answers;
    values below -1, which say no more, as -1."""
    found = []
    for key in ("train/explained_variance", "eval/explained_variance"):
        shown = [record for record in records if key in record]
        found.append([(record["step"], max(-1.0, record[key])) for record in shown])
    return tuple(found)


def text_curve(sampled: Points, held_out: Points) -> list[str]:
    """Lines of a diagram over the steps: a dot for samples, an o for held-out answers."""
    points = sampled + held_out
    last = max(max(step for step, _ in points), 1)
    low, high = min(0.0, *(v for _, v in points)), max(1.0, *(v for _, v in points))
    grid = [[" "] * (WIDTH + 1) for _ in range(HEIGHT + 1)]
    for mark, curve in ((".", sampled), ("o", held_out)):
        for step, value in curve:
            row = round((high - value) / (high - low) * HEIGHT)
            grid[row][round(step / last * WIDTH)] = mark
    lines = []
    for number, row in enumerate(grid):
        value = high - (high - low) * number / HEIGHT
        label = f"{value:5.2f}" if number % (HEIGHT // 2) == 0 else " " * 5
        lines.append(f"{label} |{''.join(row).rstrip()}")
    lines.append(f"      0{'steps':^{WIDTH - 1}}{last}")
    return lines


def newest(folder: Path, pattern: str) -> Path | None:
    return max(folder.glob(pattern), default=None)


def summary_of(run: Path) -> list[str]:
    """The lines of the screen."""
    records = read_lines(run / "metrics.jsonl")
    name, sampled, held_out = curves_of(records)
    lines = [f"{name} by step: . of the samples, o of held-out answers", *text_curve(sampled, held_out)]
    explained = explained_of(records)
    if any(explained):
        title = "explained variance of the critic (1: it knows what an answer will earn, 0: no more than the mean)"
        lines += ["", title, *text_curve(*explained)]
    answers = newest(run / "samples", "eval-*.jsonl")
    if answers:
        lines += ["", "held-out answers of the last evaluation:"]
        for record in read_lines(answers)[:3]:
            lines.append(f"  {record['question'].strip()[-90:]}")
            said, reward = record["response"].strip()[:90], record["reward"]
            lines.append(f"    {said!r}   reward {reward:.2f}, right: {record['reference']!r}")
    picture = newest(run / "samples", "*.png")
    lines += ["", f"pictures of samples   {picture}" if picture else ""]
    lines.append(f"every number          {run}/metrics.jsonl")
    lines.append(f"TensorBoard           tensorboard --logdir {run}/tensorboard")
    return lines


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print("\n".join(summary_of(Path(sys.argv[1]))))
