"""Does a critic see a mistake when it is made? Of the toy's descriptions, whose parts earn shares of 1
that are paid at the last token.

    python tests/benchmarks/critic.py [--seeds 3] [--steps 30] [--only NAME ...]
    python tests/benchmarks/critic.py --read RUN ... [--first 20]       any other runs of the toy

Each run is `python train_ppo_vl.py --config toy_describe/args.json` with the flags of its line, one
process, one thread, 256 samples a step. From the records of steps 15, 20, 25 and 30 (`per_token`):

    change      of the critic's value at the first wrong word, less that at right words, with a 95 %
                interval (bootstrap over these steps of all runs)
    to see      the same of a critic that knows what samples earn on average: the mean reward of those
                with a first mistake at this word, less that of those which are right up to here
    wrong       how many samples have a first wrong word before their last token
    ev          explained variance of the rewards, over tokens, mean of these steps: of the critic's
                values; of the mean reward of pictures with as many objects; of the mean of the prompt's
                other samples, which needs no critic
    reward      held-out, mean of the evaluations after step 0; accuracy: of the held-out answers after
                the last step; means of the seeds, and their range
"""

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
from pathlib import Path
from statistics import fmean

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]

import numpy as np

import train_ppo_vl as ppo

STEPS = (15, 20, 25, 30)
SETTINGS = {
    "the toy's: critic_lr 1e-3, one epoch": "",
    "critic_lr 3e-3": "--critic_lr 3e-3",
    "4 epochs, critic_lr 3e-3": "--critic_epochs 4 --critic_lr 3e-3",
    "grpo": "--advantage grpo",
    "critic_lr 1e-2": "--critic_lr 1e-2",
    "4 epochs": "--critic_epochs 4",
    "4 epochs, critic_lr 3e-3, no value clip": "--critic_epochs 4 --critic_lr 3e-3 --value_clip 0",
}
END = "<|im_end|>"


def first_wrong(texts: list[str], reference: str) -> int:
    """The index of the first token that leaves the reference answer; their number if none does."""
    answer = ""
    for i, text in enumerate(texts):
        answer += text
        if not (reference + END).startswith(answer):
            return i
    return len(texts)


def is_word(text: str) -> bool:
    return text.strip().isalnum()


def values_of(record: dict) -> list[float]:
    """A value for each token; one that is the same for all was written once."""
    values = record["per_token"]["values"]
    return values if isinstance(values, list) else [values] * len(record["per_token"]["text"])


def changes(record: dict) -> tuple[list[float], list[float]]:
    """The changes of the value at a sample's right words, and at its first wrong one if it has one
    before its last token."""
    texts, values = record["per_token"]["text"], values_of(record)
    change = np.diff(values)  # of the last token there is none: it meets the reward
    wrong = first_wrong(texts, record["reference"])
    right = [float(change[i]) for i in range(min(wrong, len(change))) if is_word(texts[i])]
    return right, [float(change[wrong])] if wrong < len(change) else []


def seen(steps: list[list[list[dict]]]) -> tuple[float, float, float, int]:
    """By how much more the value rises at a mistake, and the bounds of its interval; the number of
    mistakes. ``steps``: the samples of each prompt of each step of each run. What is drawn for the interval
    are steps: a critic changes from one to another by more than prompts differ."""
    sums = []
    for groups in steps:
        pairs = [changes(record) for group in groups for record in group]
        right = [value for values, _ in pairs for value in values]
        wrong = [value for _, values in pairs for value in values]
        sums.append((sum(wrong), len(wrong), sum(right), len(right)))
    table = np.array(sums)  # (steps, 4)
    draws = np.random.default_rng(0).integers(0, len(table), (4000, len(table)))
    drawn = table[draws].sum(1)
    differences = drawn[:, 0] / np.maximum(drawn[:, 1], 1) - drawn[:, 2] / drawn[:, 3]
    whole = table.sum(0)
    low, high = np.quantile(differences, (0.025, 0.975))
    return whole[0] / max(whole[1], 1) - whole[2] / whole[3], low, high, int(whole[1])


def costs_of(records: list[dict]) -> list[float]:
    """What the mistakes of a step cost on average, by the place of the first wrong word: the reward of
    samples that make it less that of those that are right up to there."""
    places = [first_wrong(one["per_token"]["text"], one["reference"]) for one in records]
    rewards = np.array([one["reward"] for one in records])
    last = np.array([len(one["per_token"]["text"]) - 1 for one in records])
    place = np.array(places)
    costs = []
    for at in sorted({int(p) for p, end in zip(place, last) if p < end}):
        made, later = (place == at) & (at < last), place > at
        if later.any():
            costs += [float(rewards[made].mean() - rewards[later].mean())] * int(made.sum())
    return costs


def explained(samples: list[list[dict]]) -> list[float]:
    """Of the groups of a step: the variance of the rewards that is explained by the critic's values, by
    the number of objects, and by the mean of the prompt's other samples."""
    records = [record for group in samples for record in group]
    rewards = np.array([record["reward"] for record in records])
    objects = np.array([record["reference"].count(",") for record in records])
    by_objects = np.array([rewards[objects == count].mean() for count in objects])
    others = []
    for group in samples:
        total = sum(record["reward"] for record in group)
        others += [(total - record["reward"]) / max(1, len(group) - 1) for record in group]
    lengths = [len(record["per_token"]["text"]) for record in records]
    earned = np.repeat(rewards, lengths)
    columns = [np.repeat(by_objects, lengths), np.repeat(others, lengths)]
    if "values" in records[0]["per_token"]:
        columns.insert(0, np.concatenate([values_of(record) for record in records]))
    return [float(1 - np.var(earned - column) / np.var(earned)) for column in columns]


def run_quietly(argv: list[str], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    ppo.main(argv)


def train(flags: str, seed: int, out: Path, args: argparse.Namespace) -> Path:
    """The folder of a run, which is made unless it is there."""
    if (out / "done").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    argv = ["--config", str(args.toy / "args.json"), "--seed", str(seed), "--out", str(out)]
    argv += ["--steps", str(args.steps), "--log_samples", "32", "--save_every", "0"]
    argv += ["--export_every", "0", *shlex.split(flags)]
    # imported once for all
    context = multiprocessing.get_context("fork")
    child = context.Process(target=run_quietly, args=(argv, out / "printed"))
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(
            f"{flags}: exit code {child.exitcode}\n{(out / 'printed').read_text()[-4000:]}"
        )
    (out / "done").touch()
    return out


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def groups_of(path: Path) -> list[list[dict]]:
    """The samples of a step, by prompt."""
    by_prompt: dict[int, list[dict]] = {}
    for record in read(path):
        by_prompt.setdefault(record["index"], []).append(record)
    return list(by_prompt.values())


def print_steps(folder: Path, first: int) -> None:
    """What the critic of any run sees from step ``first`` on: at each logged step, and in all of them."""
    steps = []
    for path in sorted((folder / "samples").glob("step-*.jsonl")):
        if int(path.stem.removeprefix("step-")) >= first:
            groups = groups_of(path)
            steps.append(groups)
            variances = " | ".join(f"{share:.2f}" for share in explained(groups))
            print(f"| {path.stem} | {seen([groups])[0]:+.4f} | {variances} |")
    difference, low, high, count = seen(steps)
    means = [f"{fmean(column):.2f}" for column in zip(*map(explained, steps))]
    costs = fmean(
        cost for groups in steps for cost in costs_of([each for g in groups for each in g])
    )
    print(
        f"{folder.name}: {difference:+.4f} ({low:+.4f} to {high:+.4f}), {costs:+.3f}, {count}, {means}"
    )


def figures(folders: list[Path]) -> str:
    """A line of the table: of the runs of all seeds."""
    rewards, accuracies, variances, costs, steps = [], [], [], [], []
    for folder in folders:
        held_out = [line for line in read(folder / "metrics.jsonl") if "eval/reward_mean" in line]
        rewards.append(fmean(line["eval/reward_mean"] for line in held_out if line["step"]))
        accuracies.append(held_out[-1]["eval/accuracy_reward_mean"])
        for step in STEPS:
            groups = groups_of(folder / f"samples/step-{step:06d}.jsonl")
            variances.append(explained(groups))
            costs += costs_of([record for group in groups for record in group])
            steps.append(groups)
    means = " | ".join(f"{fmean(column):.2f}" for column in zip(*variances))
    outcome = f"{with_range(rewards)} | {with_range(accuracies)} |"
    if "values" not in steps[0][0][0]["per_token"]:
        return f"| | {fmean(costs):+.3f} | | | {means} | {outcome}"
    difference, low, high, count = seen(steps)
    change = f"{difference:+.4f} ({low:+.4f} to {high:+.4f})"
    return f"| {change} | {fmean(costs):+.3f} | {count} | {means} | {outcome}"


def with_range(values: list[float]) -> str:
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", type=Path, default=ROOT / "toy_describe")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "critic")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--read", nargs="+", type=Path, default=[], metavar="RUN")
    parser.add_argument("--first", type=int, default=20, help="step of --read")
    args = parser.parse_args()
    for folder in args.read:
        print_steps(folder, args.first)
    if args.read:
        return
    # all settings of a seed first: a table of fewer seeds is one, too
    for seed in range(args.seeds):
        for name in args.only:
            flags, started = SETTINGS[name], time.time()
            train(flags, seed, folder_of(name, seed, args), args)
            print(
                f"{name}, seed {seed}: {time.time() - started:.0f} s", file=sys.stderr, flush=True
            )
    print("| run | change | to see | wrong | ev | ev, objects | ev, others | reward | accuracy |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.only:
        print(f"| {name} {figures([folder_of(name, seed, args) for seed in range(args.seeds)])}")


def folder_of(name: str, seed: int, args: argparse.Namespace) -> Path:
    return args.out / f"{name}-{seed}".replace(" ", "_")


if __name__ == "__main__":
    main()
