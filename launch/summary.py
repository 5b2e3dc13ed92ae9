"""What a run has reached: a curve, three held-out answers, and where the rest is.

python launch/summary.py RUN                           draws rewards and accuracies into RUN/curve.png
python launch/summary.py RUN train/kl train/entropy    draws these metrics
"""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.cards import INK, PAPER
from common.files import read_records, say
from tool import one_message

GREY = "#7b8794"  # of the axes
COLOURS = ("#2563eb", "#e8710a", "#138a5b", "#b3266e", "#7048c6", "#8a6d00", "#0e7c9b", "#c0392b")
WIDTH, HEIGHT = 800, 440  # pixels of a figure
# it is drawn so many times as large and scaled down: Pillow's lines have no anti-aliasing
SCALE = 3
LEFT, RIGHT, TOP, BOTTOM = 192, 2328, 216, 1164  # of its axes, as it is drawn

# What is read of records.
METRICS = {"step?": range(2**53)}
SAMPLE = {
    "question": str,
    "response": str,
    "reward": int | float,
    "reference?": str,
    "label?": str,
    "components?": dict,
    "regions?": {"true": [{"label": str, "score": float}]},
}
MOST_LABELS = 20  # the most frequent

Curves = dict[str, list[tuple[int, float]]]  # metric -> (step, value)


def read_curves(records: list[dict], names: list[str]) -> Curves:
    """Of those metrics that a run has; without ``names`` of all on the scale of rewards. Raises
    ValueError: it has none, or a value is no number."""
    known = {name for record in records for name in record}
    accuracies = sorted(
        name for name in known if name.endswith(("accuracy_reward", "accuracy_reward_mean"))
    )
    curves = defaultdict(list)
    for name in names or ["rollout/reward", "eval/reward_mean", *accuracies]:
        for record in records:
            step, value = record.get("step") or 0, record.get(name, 0)
            if not (isinstance(value, int | float) and abs(value) < 1e300):
                raise ValueError(
                    f"metric {name} at step {step} must be a finite number, not {value!r:.80}"
                )
            if name in record:
                curves[name].append((step, float(value)))
    if not curves:
        raise ValueError(f"the run has none of these metrics; it has {' '.join(sorted(known))}")
    return curves


def draw_curves(curves: Curves, path: Path, title: str) -> None:
    """Write a PNG."""
    steps, values = zip(*(point for points in curves.values() for point in points))
    last = max(*steps, 1)
    # a share has its full scale, so that runs compare by eye
    low, high = min(0.0, *values), max(1.0, *values)
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
    draw = ImageDraw.Draw(image)
    small, medium, large = (ImageFont.load_default(size) for size in (36, 39, 48))

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + step / last * (RIGHT - LEFT)
        y = BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)
        return x, y

    for step, value in zip(np.linspace(0, last, 5), np.linspace(low, high, 5)):
        x, y = place(step, value)
        draw.line((LEFT, y, RIGHT, y), fill="#e9edf2", width=3)
        draw.text((LEFT - 24, y), f"{value:.3g}", GREY, small, "rm")
        draw.text((x, BOTTOM + 27), f"{step:.4g}", GREY, small, "mt")
    draw.text((1200, 1290), "step", GREY, small, "mb")
    draw.text((LEFT, 36), title, INK, large, "la")
    x = LEFT
    for colour, (name, points) in zip(COLOURS * len(curves), curves.items()):
        draw.line([place(*point) for point in points], fill=colour, width=6, joint="curve")
        for point in points if len(points) <= 30 else []:  # few values, such as evaluations
            draw.circle(place(*point), 12, fill=colour)
        draw.text((x, 144), name, colour, medium, "lm")
        x += 60 + medium.getlength(name)
    image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(path)


def iou_by_label(records: list[dict]) -> list[str]:
    """Where boxes were rewarded: the mean IoU of the true ones with their partners in the answers, by their
    label or that of the row."""
    values = defaultdict(list)
    for record in records:
        if any(name.endswith("box_iou") for name in record.get("components", ())):
            for one in record["regions"]["true"]:
                values[one["label"] or record.get("label") or "(no label)"].append(one["score"])
    frequent = sorted(values, key=lambda label: -len(values[label]))[:MOST_LABELS]
    return [
        f"  {label:34.34}{fmean(values[label]):.3f}   {len(values[label])}" for label in frequent
    ]


@one_message()
def main(argv: list[str]) -> None:
    if not argv:
        sys.exit(__doc__)
    run, names = Path(argv[0]), argv[1:]
    curves = read_curves(read_records(run / "metrics.jsonl", METRICS), names)
    for name, points in curves.items():
        say(f"{name:34}" + " -> ".join(f"{value:.3f}" for _, value in (points[0], points[-1])))
    answers = max(run.glob("samples/eval-*.jsonl"), default=None)
    if answers:
        print("\nheld-out answers of the last evaluation:")
        records = read_records(answers, SAMPLE)
        for record in records[:3]:
            say(f"  {record['question'].strip()[-90:]}")
            answer = record["response"].strip()[:90]
            print(
                f"    {answer!r}   reward {record['reward']:.2f}, right: {record.get('reference')!r}"
            )
        lines = iou_by_label(records)
        if lines:
            print("\nIoU by label, and how many true boxes have it:")
        for line in lines:
            say(line)
    draw_curves(curves, run / "curve.png", run.name)
    cards = max(run.glob("samples/*.png"), default="none were written")
    print()
    say(f"curve                 {run}/curve.png")
    say(f"samples as pictures   {cards}")
    say(f"every number          {run}/metrics.jsonl")
    say(f"TensorBoard           tensorboard --logdir {run}/tensorboard")


if __name__ == "__main__":
    main(sys.argv[1:])
