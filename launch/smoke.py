"""Does it run here? Starts short runs of train_ppo_vl.py, kills one, resumes it and loads what it
exports.

    bash launch/smoke.sh [--out FOLDER] [flags of train_ppo_vl.py]

With --model and --data the runs use that model, otherwise random weights. A run passes by its exit
code, if no update was skipped, and if the sampler gap is no more than rounding: the mean difference of
log-probs between rollout and training. Prints a line for each run, then PASS or FAIL, which is also
the exit code, and writes <out>/smoke.json."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder

from common.ground import versions

versions.check()


import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import torch
import torch.utils.collect_env

from common import ROOT, distributed
from common.ground.files import UserError, read_records
from common.logging import environment
from common.model.attention import REPLACEMENTS, choose_backend
from common.run_folder import step_folders
from launch import check_kernels, tool, toy

LONGEST_GAP = {"float32": 1e-4, "bfloat16": 0.05}  # of a correct sampler
LONGEST_RUN = 900.0  # seconds, after which a run counts as hanging
FLAGS = (
    "--prompts_per_step 8 --samples_per_prompt 2 --max_new_tokens 8 --minibatches 1 "
    "--log_samples 0 --eval_every 0 --timeout 120"
)
METRICS = (
    "perf/step_seconds",
    "perf/rollout_tokens_per_second",
    "perf/update_tokens_per_second",
    "train/sampler_gap",
    "perf/peak_memory_gib",
)


def main(argv: list[str] | None = None) -> int:
    parser = tool.parser(__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / time.strftime("smoke-%Y%m%d-%H%M%S")
    )
    args, flags = parser.parse_known_args(argv)
    args.out.mkdir(parents=True)
    gpus = torch.cuda.device_count()
    try:
        distributed.choose_device()
    except UserError as error:
        print(f"{error}\nFAIL")
        return 1
    print(f"{gpus} GPUs, torch {torch.__version__}; {args.out}", flush=True)
    task = [] if "--model" in flags else write_random_task(args.out / "task")
    runs = []
    for run in do_runs(args.out, [*FLAGS.split(), *task, *flags], gpus):
        line = [f"{run['name']}: {'; '.join(run['problems']) or 'ok'}"]
        for name in METRICS:
            if name in run["metrics"]:
                line.append(f"{name} {run['metrics'][name]:.3g}")
        print(*line, sep="  ", flush=True)
        runs.append(run)
    passed = not any(run["problems"] for run in runs)
    path = args.out / "smoke.json"
    details = torch.utils.collect_env.get_pretty_env_info().splitlines()
    report = dict(machine=environment(), details=details, flags=flags, runs=runs, passed=passed)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{'PASS' if passed else 'FAIL'}; {path}", flush=True)
    return int(not passed)


# ----------------------------------------------------------------------------------------------------------------------
# What is run
# ----------------------------------------------------------------------------------------------------------------------


def do_runs(folder: Path, flags: list[str], gpus: int) -> Iterator[dict]:
    """Reports of the check of kernels, of runs on one rank, and of its export; on all ranks, or two that
    share the only GPU, of a run that is killed after its first checkpoint and then resumed."""
    kernels = check_kernels.main(["--train_vision"] if "--train_vision" in flags else [])
    yield dict(name="kernels", problems=kernels, metrics={})
    for name, more in plan_runs(gpus):
        more = f"{more} --save_every 0 --export_every 0".split()
        yield start(name, folder / name.replace(" ", "-"), 1, [*flags, *more])
    ranks = max(gpus, 2)
    out = folder / "interrupted"
    flags = [*flags, *"--save_every 2 --kl_coef 0.01 --steps".split()]
    yield start(f"{ranks} ranks, killed", out, ranks, [*flags, "1000"], is_killed=True)
    newest = newest_checkpoint(out)
    last = str(newest + 2)
    flags += [last]
    yield start(f"{ranks} ranks, resumed", out, ranks, flags, resumes=newest)
    yield check_export(out / "export" / f"step-{last}", flags)


def plan_runs(gpus: int) -> list[tuple[str, str]]:
    """(name, flags) of the runs on one rank: on GPUs with all attention kernels that there are, with graphs
    and without."""
    if not gpus:
        return [("sdpa", "--steps 2")]
    runs = []
    for backend in ("varlen", "flash_attn", *REPLACEMENTS):
        try:
            choose_backend(backend, torch.device("cuda"))
        except UserError:  # the check of kernels has printed the reason
            continue
        for graphs in ("off", "on"):
            flags = f"--steps 3 --attention {backend} --cuda_graphs {graphs}"
            runs.append((f"{backend} graphs {graphs}", flags))
    return runs


def start(
    name: str,
    out: Path,
    ranks: int,
    flags: list[str],
    is_killed: bool = False,
    resumes: int | None = None,
) -> dict:
    """Run train_ppo_vl.py. Returns what was measured, and what is wrong. ``is_killed``: after its
    first checkpoint; ``resumes``: the step from which it must go on."""
    script = [*launcher(ranks), f"{ROOT}/train_ppo_vl.py"]
    command = [sys.executable, *script, *flags, "--out", f"{out}"]
    out.mkdir(exist_ok=True)
    log = out / f"{name}.log"
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    deadline = time.time() + LONGEST_RUN
    while process.poll() is None and time.time() < deadline:
        time.sleep(0.1)
        if is_killed and newest_checkpoint(out):
            break
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(2.0)  # workers of torchrun end with it
    problems = []
    if process.returncode != (-signal.SIGKILL if is_killed else 0):
        problems.append(f"exit code {process.returncode}; see {log}")
    path = out / "metrics.jsonl"
    records = read_records(path) if path.exists() else []
    steps = [record for record in records if "train/actor_updates" in record]
    text = log.read_text()
    if resumes is not None and f"resuming from {out}/checkpoints/step-{resumes}" not in text:
        problems.append(f"it did not resume from step {resumes}")
    dtype = "float32" if "compute: float32" in text else "bfloat16"
    problems += judge_steps(steps, LONGEST_GAP[dtype])
    return dict(
        name=name,
        command=command,
        exit_code=process.returncode,
        problems=problems,
        metrics=steps[-1] if steps else {},
        tail=text[-6000:],
    )


def launcher(ranks: int) -> list[str]:
    """The command that starts so many ranks of a script. If there is one GPU, they share it."""
    if ranks == 1:
        return []
    words = f"-m torch.distributed.run --standalone --nproc_per_node {ranks}".split()
    if torch.cuda.device_count() == 1:
        words.append(f"{ROOT}/tests/one_gpu_ranks.py")
    return words


def judge_steps(steps: list[dict], bound: float) -> list[str]:
    """What is wrong according to the records of a run's steps; ``bound``: of the sampler gap."""
    problems = [] if steps else ["no step was recorded"]
    for record in steps:
        if record["train/actor_skipped"]:
            problems.append(f"step {record['step']}: an update was not finite")
        if not record["train/sampler_gap"] < bound:
            gap = f"sampler gap {record['train/sampler_gap']:.2g}, at most {bound} is rounding"
            problems.append(f"step {record['step']}: {gap}")
    return problems


def newest_checkpoint(out: Path) -> int:
    """The step of the newest checkpoint; 0: there is none."""
    return max((step for step, _ in step_folders(out / "checkpoints")), default=0)


def check_export(folder: Path, flags: list[str]) -> dict:
    """Whether transformers loads an export and computes the same with it as here, on the rows of the
    flags."""
    rows = dict(zip(flags, flags[1:])).get("--data")
    command = [sys.executable, f"{ROOT}/launch/check_model.py", folder]
    command += ["--data", rows] if rows else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_RUN)
    problems = [line for line in done.stdout.splitlines() if line.startswith("FAIL ")]
    if done.returncode and not problems:
        problems.append(f"exit code {done.returncode}: {done.stderr[-300:]}")
    return dict(name="export", problems=problems, metrics={}, tail=done.stdout)


# ----------------------------------------------------------------------------------------------------------------------
# Its task
# ----------------------------------------------------------------------------------------------------------------------


def write_random_task(folder: Path) -> list[str]:
    """The toy's rows, and random weights; flags for both."""
    toy.main(["--out", f"{folder}", *"--warm_start_steps 0 --train 64 --eval 1".split()])
    return ["--model", f"{folder}/model", "--data", f"{folder}/train.jsonl", "--reward", "exact"]


if __name__ == "__main__":
    sys.exit(main())
