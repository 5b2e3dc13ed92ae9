"""Does it learn: the embedded toy, once with every estimator, every loss and what else changes the
update.

    # all of RUNS below, 6 to 10 minutes on one core
    python tests/benchmarks/learning.py [--steps 40] [--seeds 1]
    # some of them, with other flags
    python tests/benchmarks/learning.py --only "loss gspo" --flags "--actor_lr 3e-5"
    # CRITIC_RUNS: is a critic worth its cost?
    python tests/benchmarks/learning.py --task describe --seeds 3
    # LOOKING_RUNS: do PAPO and VPPO help to look?
    python tests/benchmarks/learning.py --task looking --seeds 3
    # TEACHER_RUNS: does a larger model teach faster than rewards?
    python tests/benchmarks/learning.py --task teacher --seeds 3
    # JUDGE_RUNS: a judge's learning rate and tower
    python tests/benchmarks/learning.py --task judge --seeds 3

Each run is `python train_ppo_vl.py --config toy/args.json` (256 samples in 4 updates a step,
actor_lr 3e-4) with the flags of its line, one process, one thread. Printed, as means over the
seeds: greedy held-out accuracy along the run (a blind guess scores 0.219); accuracy of the samples
and KL to the reference per token, over the last quarter of the steps; KL(old, new) per token and
share of clipped tokens, over all steps and the last quarter; samples drawn; CPU seconds of the
process, evaluations included, imports not. Below, least and most of the seeds.

With --task describe, whose answers have 9 to 15 tokens and earn a share of 1 for each part that is
right: held-out reward along the run and its mean over all evaluations but the first, which says how
fast; last accuracy (all parts right).

With --task looking the same descriptions, of which nothing can be guessed; beside the held-out
reward the vision gap, what an answer's log-prob loses with blank images (nats), and the KL to the
policy's own log-probs with masked ones.

With --task teacher the same descriptions; the teacher is twice as large as the policy, and was
trained as the quickstart trains: by PPO with a critic, but for 120 steps. What that took is no part
of the CPU seconds, and is printed first.

With --task judge, `python train_grm_vl.py --config toy/grm_args.json`, 1,500 steps: accuracy of all
held-out judgements along the run, its mean over them; of single answers and of pairs at the end.
"""

import argparse
import functools
import json
import math
import multiprocessing
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # CPU seconds hold on one thread only

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import train_grm_vl as grm
import train_ppo_vl as ppo
from launch import toy
from machine import machine

GRPO = "--advantage grpo"
KL_LOSS = "--advantage rloo --kl_coef 0.5 --kl_in loss --kl_estimator"
SEQUENCES = " --loss_aggregation seq-mean-token-mean"
# name: flags over the toy's own; what compares losses or adds a term does so with grpo, which has
# no critic to help
RUNS = {
    "gae": "",
    "reinforce": "--advantage reinforce",
    "reinforce++": "--advantage reinforce++",
    "reinforce_baseline": "--advantage reinforce_baseline",
    "grpo": GRPO,
    "dr_grpo": "--advantage dr_grpo --loss_aggregation seq-mean-token-sum-norm",
    "rloo": "--advantage rloo",
    "remax": "--advantage remax",
    "opo": "--advantage opo",
    "gpg": "--advantage gpg",
    "cpgd": "--advantage cpgd",
    "loss cpgd": f"{GRPO} --policy_loss cpgd",
    "loss gspo": f"{GRPO} --policy_loss gspo{SEQUENCES}",
    "loss gmpo": f"{GRPO} --policy_loss gmpo{SEQUENCES}",
    "loss cispo": f"{GRPO} --policy_loss cispo",
    "loss sapo": f"{GRPO} --policy_loss sapo{SEQUENCES}",
    "sum per sequence": f"{GRPO} --loss_aggregation seq-mean-token-sum",
    "KL k1 in reward, gae": "--kl_coef 0.5",
    "KL k1 in reward, rloo": "--advantage rloo --kl_coef 0.5",
    "KL full in reward, gae": "--kl_coef 0.5 --kl_estimator full",
    "KL k2 in loss": f"{KL_LOSS} k2",
    "KL k3 in loss": f"{KL_LOSS} k3",
    "KL k3+ in loss": f"{KL_LOSS} k3+",
    "KL full in loss": f"{KL_LOSS} full",
    "KL k1 in loss": f"{KL_LOSS} k1",
    "LoRA 16, gae": "--lora_rank 16",
    "LoRA 16, grpo": f"{GRPO} --lora_rank 16",
    "train_vision, gae": "--train_vision",
    "train_vision, grpo": f"{GRPO} --train_vision",
    "dynamic_sampling 4": f"{GRPO} --dynamic_sampling 4",
    "importance_cap 2": f"{GRPO} --importance_cap 2",
    "high_entropy 0.2": f"{GRPO} --high_entropy_ratio 0.2",
    "entropy_coef 0.01": f"{GRPO} --entropy_coef 0.01",
    "2 epochs, gae": "--epochs 2",
    "2 epochs x 8, grpo": f"{GRPO} --epochs 2 --minibatches 8",
    "1 update, grpo": f"{GRPO} --minibatches 1",
}

SMALL, SINGLE = "--prompts_per_step 8", "--prompts_per_step 256 --samples_per_prompt 1"
# what the critic is compared with and what it depends on, at equal samples: 256 a step in 4
# updates, or SMALL, 64 a step
CRITIC_RUNS = {
    "gae": "",
    "rloo": "--advantage rloo",
    "grpo": "--advantage grpo",
    "reinforce": "--advantage reinforce",
    "reinforce++": "--advantage reinforce++",  # whitened, as gae is
    "gae, lambda 0.95": "--gae_lambda 0.95",
    "gae, lambda 0.8": "--gae_lambda 0.8",
    "gae, lambda 0.5": "--gae_lambda 0.5",
    "gae, lambda 1, of advantages 0.95": "--gae_lambda_policy 0.95",
    "gae, lambda 1, of advantages 0.8": "--gae_lambda_policy 0.8",
    "gae, lambda 1, of advantages 0.5": "--gae_lambda_policy 0.5",
    "gae, critic_lr 3e-4": "--critic_lr 3e-4",
    "gae, critic_lr 3e-3": "--critic_lr 3e-3",
    "gae, critic_epochs 4": "--critic_epochs 4",
    "gae, critic_epochs 4, lambda 0.95": "--critic_epochs 4 --gae_lambda 0.95",
    "gae, 5 steps of warm-up": "--critic_warmup_steps 5",
    "gae, no value clip": "--value_clip 0",
    "gae, reward_norm": "--reward_norm",
    "gae, not whitened": "--advantages_norm off",
    "gae, 256 x 1": SINGLE,
    "reinforce++, 256 x 1": f"--advantage reinforce++ {SINGLE}",
    "small, gae, critic_epochs 4": f"{SMALL} --critic_epochs 4",
    "small, gae, critic_epochs 4, lambda 0.95": f"{SMALL} --critic_epochs 4 --gae_lambda 0.95",
    "small, gae": SMALL,
    "small, rloo": f"{SMALL} --advantage rloo",
    "small, grpo": f"{SMALL} --advantage grpo",
    "small, reinforce": f"{SMALL} --advantage reinforce",
    "small, reinforce++": f"{SMALL} --advantage reinforce++",
}
# with the papers' coefficients; the penalty is that of the entropy
VPPO = f"{GRPO} --perception_mask 0.5 --perception_ratio 0.4 --perception_scale 0.9"
LOOKING_RUNS = {
    "grpo": GRPO,
    "PAPO 0.01": f"{GRPO} --perception_coef 0.01",
    "PAPO 0.02, penalty 0.03": f"{GRPO} --perception_coef 0.02 --entropy_coef -0.03",
    "VPPO": VPPO,
    "VPPO, penalty 0.06": f"{VPPO} --entropy_coef -0.06",
    "VPPO, all tokens": f"{VPPO} --perception_ratio 1",
    "penalty 0.06": f"{GRPO} --entropy_coef -0.06",
}
TEACHER = "runs/toy_teacher/export/latest"  # of the project's folder; made before the first run
DISTILLED = f"--advantage none --teacher_model {ROOT / TEACHER}"
TEACHER_RUNS = {
    "gae": "",
    "grpo": GRPO,
    "teacher in the advantage": DISTILLED,
    "teacher in the loss": f"{DISTILLED} --teacher_in loss",
    "teacher in the loss, grpo": f"{DISTILLED} --teacher_in loss {GRPO}",
}
# of the toy's judge; each with its vision tower as it is, and trained
TOWERS = {"": "", ", tower trained": "--train_vision"}
JUDGE_RUNS = {
    f"lr {lr}{name}": f"--lr {lr} {tower}"
    for lr in ("3e-4", "1e-3", "3e-3", "1e-2")
    for name, tower in TOWERS.items()
}


@dataclass
class Task:
    folder: str  # that launch/toy.py has made
    config: str  # in that folder
    script: Callable[[list[str]], object]
    runs: dict[str, str]
    figures: Callable[[list[dict]], dict[str, float]]
    steps: int
    evaluations: int  # after that of step 0


def run_quietly(script: Callable, argv: list[str], log: Path) -> None:
    """A script's `main` in a process of its own, what it prints in a file."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    script(argv)


def train(flags: list[str], work: Path, task: Task) -> dict[str, float]:
    """One run's figures; what it printed is shown if it fails."""
    argv = ["--config", str(ROOT / task.folder / task.config), *flags, "--log_samples", "0"]
    argv += ["--save_every", "0", "--export_every", "0", "--out", str(work / "run")]
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    # imported once for all
    child = multiprocessing.get_context("fork").Process(
        target=run_quietly, args=(task.script, argv, work / "printed")
    )
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(
            f"{shlex.join(flags)}: exit code {child.exitcode}\n{(work / 'printed').read_text()[-4000:]}"
        )
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    return task.figures(lines) | {"CPU s": seconds}


def reward_figures(lines: list[dict]) -> dict[str, float]:
    """Of --task describe, from the records of a run."""
    held_out = [line for line in lines if "eval/reward_mean" in line]
    summary = {f"at {line['step']}": line["eval/reward_mean"] for line in held_out}
    later = held_out[1:]
    summary["mean"] = sum(line["eval/reward_mean"] for line in later) / len(later)
    summary["accuracy"] = later[-1]["eval/accuracy_reward_mean"]
    return summary


def looking_figures(lines: list[dict]) -> dict[str, float]:
    """Of --task looking, from the records of a run."""
    summary = reward_figures(lines)
    for line in lines:
        if "eval/vision_gap_logprob" in line:
            summary[f"gap at {line['step']}"] = line["eval/vision_gap_logprob"]
    last = [line for line in lines if "train/actor_updates" in line][-1]
    return summary | {"KL(masked)": last.get("train/perception_kl", math.nan)}


def teacher_figures(lines: list[dict]) -> dict[str, float]:
    """Of --task teacher, from the records of a run."""
    summary = reward_figures(lines)
    steps = [line["train/teacher_kl"] for line in lines if "train/teacher_kl" in line] or [math.nan]
    return summary | {"KL(teacher), first": steps[0], "last": steps[-1]}


def make_teacher() -> None:
    """A toy of 96 dimensions and 4 layers in place of 64 and 3, trained by the toy's own flags."""
    out, made = ROOT / TEACHER, ROOT / "runs" / "toy_teacher_start"
    if out.exists():
        return
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    for script, argv in (
        (write_larger_toy, ["--task", "describe", "--out", str(made)]),
        (
            ppo.main,
            [
                "--config",
                str(made / "args.json"),
                "--steps",
                "120",
                "--save_every",
                "0",
                "--out",
                str(out.parents[1]),
            ],
        ),
    ):
        if script is ppo.main or not made.exists():
            child = multiprocessing.get_context("fork").Process(target=script, args=(argv,))
            child.start()
            child.join()
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
    print(f"the teacher: {seconds:.0f} CPU seconds")


def write_larger_toy(argv: list[str]) -> None:
    toy.make_model = functools.partial(toy.make_model, hidden_size=96, layers=4)
    toy.main(argv)


def figures(lines: list[dict]) -> dict[str, float]:
    """Of --task questions, from the records of a run."""
    summary = {
        f"at {line['step']}": line["eval/accuracy_reward_mean"]
        for line in lines
        if "eval/accuracy_reward_mean" in line
    }
    steps = [line for line in lines if "train/approx_kl" in line]
    mean = lambda part, *names: (
        sum(line.get(name, math.nan) for line in part for name in names) / len(part)
    )  # noqa: E731
    last = steps[-max(1, len(steps) // 4) :]
    summary |= {"sampled": mean(last, "rollout/accuracy_reward"), "KL(ref)": mean(last, "train/kl")}
    for span, part in (("", steps), (", last", last)):
        summary["KL(old, new)" + span] = mean(part, "train/approx_kl")
        summary["clipped" + span] = mean(
            part, *(f"train/clipped_{side}" for side in ("high", "low", "dual"))
        )
    # A rollout repeated by --dynamic_sampling draws as many samples again, kept or not; a sample is
    # a response to learn from.
    summary["samples"] = sum(line["rollout/rollouts"] for line in steps) * 256
    return summary


def judge_figures(lines: list[dict]) -> dict[str, float]:
    """Of --task judge, from the records of a run."""
    held_out = [line for line in lines if "eval/accuracy" in line]
    summary = {f"at {line['step']}": line["eval/accuracy"] for line in held_out}
    summary["mean"] = sum(line["eval/accuracy"] for line in held_out[1:]) / len(held_out[1:])
    return summary | {
        "single": held_out[-1]["eval/kind/correct"],
        "pairs": held_out[-1]["eval/kind/pictures"],
    }


TASKS = {
    "questions": Task("toy", "args.json", ppo.main, RUNS, figures, steps=40, evaluations=4),
    "describe": Task(
        "toy_describe", "args.json", ppo.main, CRITIC_RUNS, reward_figures, steps=40, evaluations=4
    ),
    "looking": Task(
        "toy_describe",
        "args.json",
        ppo.main,
        LOOKING_RUNS,
        looking_figures,
        steps=40,
        evaluations=4,
    ),
    "teacher": Task(
        "toy_describe",
        "args.json",
        ppo.main,
        TEACHER_RUNS,
        teacher_figures,
        steps=40,
        evaluations=4,
    ),
    "judge": Task(
        "toy", "grm_args.json", grm.main, JUDGE_RUNS, judge_figures, steps=1500, evaluations=5
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="questions",
        help="what is learned from launch/toy.py's data",
    )
    parser.add_argument("--steps", type=int, help="of each run; default: 40, of a judge 1500")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, seeds 0, 1, ...")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help=", ".join(RUNS | CRITIC_RUNS | LOOKING_RUNS | TEACHER_RUNS | JUDGE_RUNS),
    )
    parser.add_argument(
        "--flags", type=shlex.split, default=[], help="further flags of every run, in one argument"
    )
    flags = parser.parse_args()
    task = TASKS[flags.task]
    unknown = sorted(set(flags.only or ()) - task.runs.keys())
    if unknown:
        parser.error(f"--only {', '.join(unknown)}: --task {flags.task} has {', '.join(task.runs)}")
    steps = flags.steps or task.steps
    if steps % task.evaluations:
        parser.error(
            f"--steps {steps} is not a multiple of {task.evaluations}, the number of evaluations"
        )
    if not (ROOT / task.folder / task.config).exists():
        kind = "describe" if task.folder == "toy_describe" else "questions"
        program = [sys.executable, str(ROOT / "launch" / "toy.py"), "--task", kind]
        subprocess.run([*program, "--out", str(ROOT / task.folder)], check=True)
    print(machine() + "\n")
    if flags.task == "teacher":
        make_teacher()
    ranges = {}
    for name in flags.only or task.runs:
        runs = []
        for seed in range(flags.seeds):
            with tempfile.TemporaryDirectory() as work:
                schedule = [
                    "--steps",
                    str(steps),
                    "--eval_every",
                    str(steps // task.evaluations),
                    "--seed",
                    str(seed),
                ]
                runs.append(
                    train(schedule + shlex.split(task.runs[name]) + flags.flags, Path(work), task)
                )
        columns = list(runs[0])
        if not ranges:
            print("| run | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
        means = {column: sum(run[column] for run in runs) / len(runs) for column in columns}
        cells = [
            f"{value:.0f}"
            if column in ("samples", "CPU s")
            else f"{value:.1e}"
            if "old" in column
            else ""
            if math.isnan(value)
            else f"{value:.3f}"
            for column, value in means.items()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        ranges[name] = [
            sorted(run[column] for run in runs)[:: max(1, len(runs) - 1)]
            for column in (f"at {steps}", "mean")
            if column in columns
        ]
    print(
        f"\nleast and most of {flags.seeds} seeds after {steps} steps, and of the means over the evaluations:"
    )
    for name, pairs in ranges.items():
        print(
            f"  {name}: " + ", ".join("-".join(f"{value:.3f}" for value in pair) for pair in pairs)
        )


if __name__ == "__main__":
    main()
