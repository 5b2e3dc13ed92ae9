"""Draw the README's pictures from a finished run: `python launch/figures.py runs/quickstart-... launch/images`."""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.logging import plot_curves

run, folder = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
plot_curves(run / "metrics.jsonl", ["rollout/accuracy_reward", "eval/accuracy_reward_mean"], folder / "learning_curve.png",
            "Quickstart: PPO with a critic, 2 CPU cores")
shutil.copy(sorted((run / "samples").glob("step-*.png"))[-1], folder / "samples.png")
