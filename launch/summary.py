"""A run on one screen: its metrics at the start and the end, three held-out answers, and where the
rest is. TensorBoard draws the curves.

python launch/summary.py RUN                           rewards and accuracies
python launch/summary.py RUN train/kl train/entropy    these metrics
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder


from common.ground.files import check_form, read_records, say
from launch import tool

SAMPLE = {  # the form of what is read of a record
    "question": str,
    "response": str,
    "reward": int | float,
    "reference?": str,
}


def read_metrics(run: Path, names: list[str]) -> dict[str, list[float]]:
    """The values of those metrics that a run has; without ``names``, of all on the scale of rewards.
    Raises ValueError: it has none of them, or a value is not a number."""
    records = read_records(run / "metrics.jsonl")
    known = sorted({name for record in records for name in record})
    accuracies = [
        name for name in known if name.endswith(("accuracy_reward", "accuracy_reward_mean"))
    ]
    metrics = {}
    for name in names or ["rollout/reward", "eval/reward_mean", *accuracies]:
        values = [record[name] for record in records if name in record]
        check_form(values, [int | float], f"metric {name}")
        if values:
            metrics[name] = values
    if not metrics:
        raise ValueError(f"the run has none of these metrics; it has {' '.join(known)}")
    return metrics


@tool.one_message()
def main(argv: list[str]) -> None:
    parser = tool.parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("metrics", nargs="*", metavar="metric")
    args = parser.parse_args(argv)
    run = args.run
    for name, values in read_metrics(run, args.metrics).items():
        say(f"{name:34}{values[0]:.3f} -> {values[-1]:.3f}")
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
    print()
    say(f"samples               {run}/samples")
    say(f"every number          {run}/metrics.jsonl")
    say(f"TensorBoard           tensorboard --logdir {run}/tensorboard")


if __name__ == "__main__":
    main(sys.argv[1:])
