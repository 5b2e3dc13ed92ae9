"""Does it run here? Starts short runs of train_ppo_vl.py, kills one, resumes it and loads what it exports.

    bash launch/smoke.sh [--out FOLDER] [--ranks N] [flags of train_ppo_vl.py]

With --model and --data the runs are of that model, else of random weights. Every run is judged by its exit code, by
updates that were skipped and by the sampler gap, the mean difference of log-probs between rollout and training, which is
rounding where sampling and training agree. Ends with a table and PASS or FAIL, which is also the exit code, and writes
<out>/smoke.json.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]

import torch

import toy
from common import memory
from common.files import read_json
from common.logging import read_records
from common.vlm.attention import choose_backend

LONGEST_GAP = {"float32": 1e-4, "bfloat16": 0.05}  # of a sampler that is right
LONGEST_RUN = 900.0  # seconds, after which a run counts as hanging
# sizes of the random model and of a step, where there are GPUs and where there are none
LARGE = {"hidden_size": 512, "layers": 24}  # heads of 128, as in Qwen2.5-VL
STEP = {True: "--prompts_per_step 32 --samples_per_prompt 8 --max_new_tokens 256 --max_prompt_tokens 512",
        False: "--prompts_per_step 4 --samples_per_prompt 2 --max_new_tokens 6 --max_prompt_tokens 256"}
COMMON = "--log_samples 0 --eval_every 0 --minibatches 1 --timeout 120"
# heading of the table -> metric, and how it is written
COLUMNS = {"step s": ("perf/step_seconds", ".2f"), "rollout s": ("perf/rollout_seconds", ".2f"),
           "update s": ("perf/update_actor_seconds", ".2f"), "rollout tok/s": ("perf/rollout_tokens_per_second", ".0f"),
           "update tok/s": ("perf/update_tokens_per_second", ".0f"), "MFU": ("perf/update_mfu", ".3f"),
           "gap": ("train/sampler_gap", ".1e"), "peak GiB": ("perf/peak_memory_gib", ".2f")}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    gpus = torch.cuda.device_count()
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / time.strftime("smoke-%Y%m%d-%H%M%S"))
    parser.add_argument("--ranks", type=int, default=gpus or 2, help="processes of the runs on all ranks")
    own, flags = parser.parse_known_args(argv)
    own.out.mkdir(parents=True)
    began, found = time.time(), {"machine": describe_machine(), "flags": flags, "runs": []}
    print(f"{found['machine']['device']}, torch {torch.__version__}; {own.out}", flush=True)
    if "--model" not in flags:
        flags = [*write_random_task(own.out / "task", large=gpus > 0), *flags]
    flags = [*STEP[gpus > 0].split(), *COMMON.split(), *flags]
    for name, ranks, more in plan_runs(gpus, own.ranks):
        run = Run(name, own.out / name.replace(" ", "-"), ranks, [*flags, *more])
        found["runs"].append(run.finish(run.start()))
        say(found["runs"][-1])
    found["runs"] += interrupted(own, flags, gpus)
    found["seconds"] = time.time() - began
    found["passed"] = not any(run["problems"] for run in found["runs"])
    (own.out / "smoke.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n" + table(found["runs"]))
    for run in found["runs"]:
        for problem in run["problems"]:
            print(f"{run['name']}: {problem}")
    print(f"\n{'PASS' if found['passed'] else 'FAIL'} after {found['seconds']:.0f} s; {own.out / 'smoke.json'}", flush=True)
    return 0 if found["passed"] else 1


# ----------------------------------------------------------------------------------------------------------------------
# What is run
# ----------------------------------------------------------------------------------------------------------------------


def plan_runs(gpus: int, ranks: int) -> list[tuple[str, int, list[str]]]:
    """(name, ranks, flags) of the runs that are not interrupted: each back-end with graphs and without, on one rank."""
    if not gpus:
        return [("sdpa", 1, ["--steps", "2", "--save_every", "0", "--export_every", "0"])]
    runs = []
    for backend in ("varlen", "flash_attn"):
        try:
            choose_backend(backend, torch.device("cuda"))
        except ValueError as error:
            print(f"without {backend}: {error}", flush=True)
            continue
        for graphs in ("off", "on"):
            flags = ["--steps", "3", "--save_every", "0", "--export_every", "0", "--attention", backend, "--cuda_graphs", graphs]
            runs.append((f"{backend} graphs {graphs}", 1, flags))
    return runs


def interrupted(own: argparse.Namespace, flags: list[str], gpus: int) -> list[dict[str, Any]]:
    """All ranks: a run that is killed after its first checkpoint, the same resumed, and its export loaded."""
    out, name = own.out / "interrupted", f"{own.ranks} ranks"
    more = [*flags, "--save_every", "2", "--kl_coef", "0.01"]
    killed = Run(f"{name}, killed", out, own.ranks, [*more, "--steps", "1000"])
    process = killed.start()
    step = killed.wait_for_checkpoint(process)
    kill(process)
    first = killed.finish(process, expected=-signal.SIGKILL)
    if step is None:
        first["problems"].append("no checkpoint was committed")
        return [first]
    say(first)
    resumed = Run(f"{name}, resumed", out, own.ranks, [*more, "--resume", "must", "--export_every", "-1"])
    newest = newest_checkpoint(out)  # it may have gone on until the kill
    resumed.flags += ["--steps", str(newest + 2)]
    second = resumed.finish(resumed.start())
    if f"resuming from {out}/checkpoints/step-{newest}" not in second["tail"]:
        second["problems"].append(f"it did not resume from step {newest}")
    say(second)
    third = load_export(out / "export" / f"step-{newest + 2}")
    say(third)
    return [first, second, third]


class Run:
    """One start of train_ppo_vl.py."""

    def __init__(self, name: str, out: Path, ranks: int, flags: list[str]):
        self.name, self.out, self.ranks, self.flags = name, out, ranks, flags

    def start(self) -> subprocess.Popen:
        self.began = time.time()
        program = [sys.executable]
        if self.ranks > 1:
            program += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(self.ranks)]
        self.command = [*program, str(ROOT / "train_ppo_vl.py"), *self.flags, "--out", str(self.out)]
        self.out.mkdir(exist_ok=True)
        self.log = self.out / f"{self.name.replace(', ', '-').replace(' ', '-')}.log"
        with open(self.log, "w") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=log, start_new_session=True)

    def wait_for_checkpoint(self, process: subprocess.Popen) -> int | None:
        """The step of the first checkpoint; None if the run ends, or hangs, without one."""
        while process.poll() is None and time.time() < self.began + LONGEST_RUN:
            step = newest_checkpoint(self.out)
            if step is not None:
                return step
            time.sleep(0.1)
        return newest_checkpoint(self.out)

    def finish(self, process: subprocess.Popen, expected: int = 0) -> dict[str, Any]:
        """Wait for the end; what was measured, and what is wrong with it."""
        problems = []
        try:
            code = process.wait(max(0.0, self.began + LONGEST_RUN - time.time()))
        except subprocess.TimeoutExpired:
            kill(process)
            code = process.wait()
            problems.append(f"it took more than {LONGEST_RUN:.0f} s and was killed")
        if code != expected:
            problems.append(f"exit code {code}; see {self.log}")
        path = self.out / "metrics.jsonl"
        records = read_records(path) if path.exists() else []
        steps = [record for record in records if "train/actor_updates" in record]
        said = self.log.read_text()
        problems += judge_steps(steps, LONGEST_GAP["float32" if "compute: float32" in said else "bfloat16"])
        last = {key: value for key, value in (steps[-1] if steps else {}).items() if isinstance(value, float | int)}
        return {"name": self.name, "command": self.command, "exit_code": code, "seconds": time.time() - self.began,
                "problems": problems, "metrics": last, "tail": said[-6000:]}


def judge_steps(steps: list[dict], bound: float) -> list[str]:
    """What the records of a run's steps say against it; ``bound``: of the sampler gap."""
    problems = [] if steps else ["no step was recorded"]
    for record in steps:
        if record["train/actor_skipped"]:
            problems.append(f"step {record['step']}: an update was not finite")
        if not record["train/sampler_gap"] < bound:
            problems.append(f"step {record['step']}: sampler gap {record['train/sampler_gap']:.2g}, at most {bound} is rounding")
    return problems


def newest_checkpoint(out: Path) -> int | None:
    """The step of the newest committed checkpoint."""
    committed = [int(path.parent.name.removeprefix("step-")) for path in out.glob("checkpoints/step-*/COMMITTED.json")]
    return max(committed, default=None)


def kill(process: subprocess.Popen) -> None:
    """At once, with all of its session; workers of torchrun end with it. Returns when they have."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(2.0)


def load_export(folder: Path) -> dict[str, Any]:
    """Whether transformers loads an export and computes with it."""
    began, problems = time.time(), []
    try:
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits = model(input_ids=torch.arange(5, 13)[None]).logits
        if not logits.isfinite().all():
            problems.append(f"the logits of {folder} are not finite")
    except Exception as error:  # whatever it is, it belongs into the report
        problems.append(f"from_pretrained({folder}): {error!r}")
    return {"name": "export loaded", "seconds": time.time() - began, "problems": problems, "metrics": {}, "tail": ""}


# ----------------------------------------------------------------------------------------------------------------------
# What it is run on
# ----------------------------------------------------------------------------------------------------------------------


def write_random_task(folder: Path, large: bool) -> list[str]:
    """The toy's rows, and random weights; flags for both."""
    sizes = ["--train", "256", "--eval", "16"] if large else ["--train", "64", "--eval", "1"]
    toy.main(["--out", str(folder), "--warm_start_steps", "0", *sizes])
    if large:
        shutil.rmtree(folder / "model")
        tokenizer = toy.make_tokenizer()
        for part in (toy.make_model("qwen2_5_vl", tokenizer, 0, **LARGE), tokenizer, toy.make_image_processor("qwen2_5_vl")):
            part.save_pretrained(folder / "model")
    task = read_json(folder / "args.json")
    return ["--model", task["model"], "--data", task["data"], "--reward", "exact"]


def describe_machine() -> dict[str, Any]:
    """What a bug report has to say. The GPUs are asked by a program of their own: no memory of theirs is taken here."""
    found: dict[str, Any] = {"device": platform.processor() or platform.machine(), "cpus": os.cpu_count(),
                             "python": platform.python_version(), "system": platform.platform(),
                             "host_free_gib": (memory.free_on_host() or 0) / 2**30,
                             "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for package in ("torch", "transformers", "triton", "flash-attn", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if torch.cuda.device_count():
        query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version,compute_cap", "--format=csv,noheader"]
        found["gpus"] = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
        found["device"] = f"{torch.cuda.device_count()} x {(found['gpus'] or ['GPU'])[0].split(',')[0]}"
    found["git"] = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What is said
# ----------------------------------------------------------------------------------------------------------------------


def say(run: dict[str, Any]) -> None:
    print(f"{run['name']}: {'; '.join(run['problems']) or 'ok'}, {run['seconds']:.0f} s", flush=True)


def table(runs: list[dict[str, Any]]) -> str:
    """A row per run, with the numbers of its last step."""
    rows = [["run", "", "s", *COLUMNS]]
    for run in runs:
        cells = [f"{run['metrics'][key]:{form}}" if key in run["metrics"] else "" for key, form in COLUMNS.values()]
        rows.append([run["name"], "FAIL" if run["problems"] else "ok", f"{run['seconds']:.0f}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
