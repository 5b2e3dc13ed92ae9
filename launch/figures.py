"""Draw curves of a run into its folder, RUN/curve.png, and print the path.

    python launch/figures.py RUN                                             rewards and accuracies
    python launch/figures.py RUN train/kl train/entropy                      these metrics
"""

import math
import sys
from pathlib import Path

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.rewards.cards import GREY, INK, PAPER, font
from common.logging import read_records

SERIES = ("#2563eb", "#e8710a", "#138a5b", "#b3266e", "#7048c6", "#8a6d00", "#0e7c9b", "#c0392b")


def _ticks(low: float, high: float, most: int) -> list[float]:  # in steps of 1, 2 or 5
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= most)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def plot_curves(metrics_jsonl: Path, names: list[str], path: Path, title: str = "") -> None:
    """Draws those metrics that a run has, over steps, as a PNG of 800 x 440 pixels. ValueError if it has none of them."""
    records = [record for record in read_records(metrics_jsonl) if "step" in record]
    curves = {name: sorted((r["step"], r[name]) for r in records if name in r) for name in names}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        raise ValueError(f"{metrics_jsonl} has no values of {names}; it has {sorted(set().union(*records) - {'step'})}")
    xs, ys = zip(*(point for points in curves.values() for point in points))
    x0, x1, y0, y1 = min(xs), max(max(xs), min(xs) + 1), min(ys), max(ys)
    if 0 <= y0 and y1 <= 1:  # a share keeps its full scale, so that curves of two runs compare by eye
        y0, y1 = 0.0, 1.0
    elif y0 == y1:
        y0, y1 = y0 - max(1.0, abs(y0) / 10), y1 + max(1.0, abs(y1) / 10)
    k = 3  # drawn three times as large and scaled down: Pillow's lines have no anti-aliasing
    left, right, top, bottom = 64 * k, 776 * k, 72 * k, 388 * k
    image = Image.new("RGB", (800 * k, 440 * k), PAPER)
    draw = ImageDraw.Draw(image)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - x0) / (x1 - x0) * (right - left), bottom - (y - y0) / (y1 - y0) * (bottom - top)

    for tick in _ticks(y0, y1, most=6):
        y = place(x0, tick)[1]
        draw.line((left, y, right, y), fill="#e9edf2", width=k)
        draw.text((left - 8 * k, y), f"{tick:.6g}", font=font(12 * k), fill=GREY, anchor="rm")
    for tick in _ticks(x0, x1, most=8):
        x = place(tick, y0)[0]
        draw.line((x, bottom, x, bottom + 5 * k), fill=GREY, width=k)
        draw.text((x, bottom + 9 * k), f"{tick:.6g}", font=font(12 * k), fill=GREY, anchor="mt")
    draw.line((left, bottom, right, bottom), fill=GREY, width=k)
    draw.text(((left + right) / 2, 430 * k), "step", font=font(12 * k), fill=GREY, anchor="mb")
    draw.text((left, 12 * k), title, font=font(16 * k), fill=INK)
    x = left
    for colour, (name, points) in zip(SERIES * len(curves), curves.items()):
        spots = [place(*point) for point in points]
        draw.line(spots, fill=colour, width=2 * k, joint="curve")
        for spot in spots if len(spots) <= 30 else []:  # few values, such as evaluations, show where they were taken
            draw.circle(spot, 4 * k, fill=colour, outline=PAPER, width=k)
        draw.line((x, 48 * k, x + 18 * k, 48 * k), fill=colour, width=3 * k)
        draw.text((x + 24 * k, 48 * k), name, font=font(13 * k), fill=INK, anchor="lm")
        x += 44 * k + font(13 * k).getlength(name)
    image.resize((800, 440), Image.Resampling.LANCZOS).save(path)


def main(argv: list[str]) -> None:
    if not argv:
        sys.exit(__doc__)
    run = Path(argv[0])
    names = argv[1:] or reward_names(run / "metrics.jsonl")
    plot_curves(run / "metrics.jsonl", names, run / "curve.png", run.name)
    print(run / "curve.png")


def reward_names(metrics_jsonl: Path) -> list[str]:
    """The metrics on the scale of rewards: of the samples, of held-out answers."""
    known = {name for record in read_records(metrics_jsonl) for name in record}
    accuracies = sorted(name for name in known if name.endswith(("accuracy_reward", "accuracy_reward_mean")))
    return ["rollout/reward", "eval/reward_mean", *accuracies]


if __name__ == "__main__":
    main(sys.argv[1:])
