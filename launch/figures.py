"""Draw the README's pictures from finished runs.

    python launch/figures.py runs/quickstart-... launch/images             learning curve and samples of quickstart.sh
    python launch/figures.py runs/judged-... launch/images --judged        the same of quickstart_grm.sh
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.logging import plot_curves

run, folder = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
if sys.argv[3:] == ["--judged"]:
    plot_curves(run / "metrics.jsonl", ["eval/grm_reward_mean", "eval/exact_reward_mean"], folder / "judged_curve.png",
                "Rewarded by a judge alone: what it says, and the truth")
    shutil.copy(sorted((run / "samples").glob("step-*.png"))[-1], folder / "judged_samples.png")
else:
    plot_curves(run / "metrics.jsonl", ["rollout/accuracy_reward", "eval/accuracy_reward_mean"],
                folder / "learning_curve.png", "Quickstart: PPO with a critic, 2 CPU cores")
    shutil.copy(sorted((run / "samples").glob("step-*.png"))[-1], folder / "samples.png")
