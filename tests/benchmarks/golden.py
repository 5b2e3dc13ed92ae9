"""Golden runs: fixed toy runs whose metrics must stay the same, bit for bit, while the code is rebuilt.

    python tests/benchmarks/golden.py write /tmp/old --checkout ../old --toy /tmp/toy
    python tests/benchmarks/golden.py write /tmp/new --toy /tmp/toy
    python tests/benchmarks/golden.py compare /tmp/old /tmp/new

Seven runs of 10 steps each: `gae` (PPO with a critic, KL in the reward), `grpo` (LoRA, KL in the loss, two
datasets by weights), `judge` (the reward model), `env` (an environment that shows a picture), `hybrid`
(linear attention, a trained vision tower), `ptx` (a next-token loss, averaged weights, the exact KL) and
`grm` (a judge's probabilities as rewards). Each is run on 1 and on 2 ranks, once
undisturbed (`whole`) and once with a SIGKILL of all ranks after a checkpoint of a middle step was
committed, and then resumed (`killed`). Hashes of the exported weights stand beside the metrics of the last
step. About five minutes on 2 idle cores, and a minute more where the toys have to be written first.

`write` leaves one file per run, FOLDER/gae-1-whole.jsonl and so on: metrics.jsonl in a normal form, one
line per step, names sorted, floats by repr, without the record of arguments and versions, perf/* and
seconds. It exits with 1 if a killed run differs from the undisturbed one.

    --checkout PATH   the project to run; default: the one this file is in. Any commit: what became of a flag
                      that its --help does not know stands in RENAMED
    --toy FOLDER      model and data for both commits; written by the checkout's launch/toy.py where it is
                      absent, with FOLDER-hidden and FOLDER-hybrid beside it. Default: FOLDER/toy
    --only NAMES      only these: gae, gae-2, judge-1, ...
    --jobs N          processes at the same time (default 2)

`compare` prints the first difference of each run (step, name, both values) and exits with 1 if there is
one; with 2 if the folders cannot be compared. Metrics that only the runs of the second folder have are
listed, and are no difference. `--ignore name,name` leaves out metrics that a commit says it
changed, `--renamed old=new,old=new` follows those that it renamed. Only on the same machine, with the same
packages, do floats agree bit for bit.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
TIMEOUT = 600  # seconds for one launch; a hang is an error, not a wait
TOY = ["--train", "64", "--eval", "16", "--mixed", "--warm_start_steps", "100"]

# Every flag is given here, none by the toy's own files: those change with the project. {toy} is its folder.
# Few slots, so that a rollout refills them; few tokens per row, so that an update has several rows.
COMMON = {
    "model": "{toy}/model",
    "steps": STEPS,
    "save_every": 3,
    "keep_last": STEPS,
    "eval_every": 5,
    "export_every": -1,
    "log_samples": 0,
    "seed": 7,
}
PPO = COMMON | {
    "reward": "exact",
    "eval_data": "{toy}/eval.jsonl",
    "prompts_per_step": 8,
    "samples_per_prompt": 4,
    "minibatches": 2,
    "max_prompt_tokens": 256,
    "max_new_tokens": 4,
    "slots": 12,
    "max_tokens_per_pack": 512,
    "prefill_tokens": 512,
}
FLAGS = {
    "gae": PPO
    | {
        "data": "{toy}/train.jsonl",
        "epochs": 2,
        "actor_lr": 3e-4,
        "critic_lr": 1e-3,
        "kl_coef": 0.05,
        "kl_target": 0.01,
        "entropy_coef": 0.01,
    },
    "grpo": PPO
    | {
        "data": "{toy}/train.jsonl:0.7,{toy}/eval.jsonl:0.3",
        "advantage": "grpo",
        "lora_rank": 4,
        "actor_lr": 3e-3,
        "lr_schedule": "linear",
        "warmup_steps": 2,
        "kl_coef": 0.1,
        "kl_in": "loss",
        "kl_estimator": "k3+",
    },
    "env": PPO
    | {
        "model": "{toy}-hidden/model",
        "data": "{toy}-hidden/train.jsonl",
        "eval_data": "{toy}-hidden/eval.jsonl",
        "reward": "env",
        "env": "{launch}/environments/hidden_picture.py:Look",
        "env_workers": 0,
        "max_reply_tokens": 40,
        "advantage": "rloo",
        "actor_lr": 1e-3,
    },
    "hybrid": PPO
    | {
        "model": "{toy}-hybrid/model",
        "data": "{toy}-hybrid/train.jsonl",
        "eval_data": "{toy}-hybrid/eval.jsonl",
        "train_vision": True,
        "actor_lr": 1e-3,
        "critic_lr": 1e-3,
    },
    "ptx": PPO
    | {
        "data": "{toy}/train.jsonl",
        "advantage": "dr_grpo",
        "policy_loss": "gspo",
        "actor_lr": 1e-3,
        "kl_coef": 0.05,
        "kl_in": "loss",
        "kl_estimator": "full",
        "ema_beta": 0.9,
        "ptx_data": "{toy}-ptx.jsonl",
        "ptx_coef": 0.1,
        "ptx_batch": 8,
    },
    "grm": PPO
    | {
        "data": "{toy}/train.jsonl",
        "reward": "grm:{judge}/export/latest",
        "grm_question": "correct",
        "advantage": "reinforce++",
        "actor_lr": 1e-3,
    },
    "judge": COMMON
    | {
        "data": "{toy}/judge_train.jsonl",
        "eval_data": "{toy}/judge_eval.jsonl",
        "prompts_per_step": 8,
        "lr": 1e-2,  # large: after 10 steps some of the generated verdicts can be read
        "lr_schedule": "linear",
        "min_lr_ratio": 0.8,
        "max_prompt_tokens": 256,
        "max_tokens_per_pack": 512,
        "eval_max_new_tokens": 24,
        "templates": "{templates}",  # a file of TEMPLATES
    },
}
SCRIPTS = {name: "train_grm_vl.py" if name == "judge" else "train_ppo_vl.py" for name in FLAGS}

# What another commit calls a flag. None: it has no such flag, and its runs are the same without it.
RENAMED = {
    "prefill_tokens": None,  # here equal to max_tokens_per_pack, which takes its place
    "max_prompt_tokens": "max_tokens",  # of the reward model
}

# Questions of the judge by kind; an older commit has a flag for each.
TEMPLATES = {
    "correct": "{prompt}\n{response}\n",
    "pictures": "A<image>B<image>\n{prompt}\n",
}


class GoldenError(Exception):
    """A run that could not be made; the message says why."""


@dataclass(frozen=True)
class Run:
    """One golden run: which flags, on how many ranks."""

    name: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.name}-{self.ranks}"


RUNS = [Run(name, ranks) for name in FLAGS for ranks in (1, 2)]


# ---- Flags of a checkout


def known_flags(checkout: Path, script: str) -> set[str]:
    """The names that --help (all) of a script lists, with an indent in front: the usage above them has them too."""
    command = [sys.executable, str(checkout / script), "--help", "all"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=TIMEOUT
    )
    if done.returncode:
        raise GoldenError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return set(re.findall(r"^  --(\w+)", done.stdout, re.MULTILINE))


def command_line(name: str, places: dict[str, Path], known: set[str]) -> list[str]:
    """A run's flags as words, under the names that the checkout knows. Raises GoldenError: it knows none."""
    words = []
    for name, value in FLAGS[name].items():
        if name == "templates" and name not in known:
            for kind, text in TEMPLATES.items():
                words += [f"--{kind}_template", text]
            continue
        if name not in known:
            if name not in RENAMED:
                raise GoldenError(
                    f"the checkout has no flag --{name}; say in RENAMED what became of it"
                )
            if RENAMED[name] is None:
                continue
            name = RENAMED[name]
            if name not in known:
                raise GoldenError(f"the checkout has no flag --{name} either")
        words.append(f"--{name}")
        if value is not True:
            words.append(str(value).format_map(places))
    return words


# ---- Processes


def environment() -> dict[str, str]:
    """That of this process without what a launcher may have left in it; CPU only, one thread per rank."""
    launcher = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    return inherited | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Launch:
    """The ranks of one launch, in a process group of their own, which is killed as a whole."""

    def __init__(self, command: list[str], ranks: int, log: Path):
        port = free_port()
        self.log, self.processes = log, []
        for rank in range(ranks):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            with open(log, "ab") as output:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=environment() | {name: str(value) for name, value in place.items()},
                        cwd=log.parent,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        process_group=self.processes[0].pid if rank else 0,
                    )
                )

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def kill(self) -> list[int]:
        """SIGKILL for the whole group, which exists until all ranks were waited for. Returns exit codes."""
        if None in self.codes():
            os.killpg(self.processes[0].pid, signal.SIGKILL)
        return [process.wait() for process in self.processes]

    def wait(self) -> None:
        """Wait until all ranks have ended. Raises GoldenError, with what they printed, if one failed."""
        deadline = time.monotonic() + TIMEOUT
        try:
            while None in self.codes() and not any(self.codes()) and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            codes = self.codes()
            if codes != [0] * len(codes):
                time.sleep(2)  # the others of a rank that failed say what they have to say
                self.kill()
        if codes != [0] * len(codes):
            raise GoldenError(
                f"exit codes {codes}; None: still running after {TIMEOUT} s\n{self.output()}"
            )

    def output(self) -> str:
        """The end of what the ranks printed."""
        return self.log.read_text(errors="replace")[-3000:]


# ---- Runs


def run_whole(command: list[str], run: Run, out: Path) -> None:
    """From the first step to the last, undisturbed."""
    Launch([*command, "--out", str(out)], run.ranks, out.with_suffix(".log")).wait()


def committed(out: Path) -> dict[int, int]:
    """Step -> inode of each complete checkpoint."""
    inodes = {}
    for path in out.glob("checkpoints/step-*"):
        inodes[int(path.name.removeprefix("step-"))] = path.stat().st_ino
    return inodes


def run_killed(command: list[str], run: Run, out: Path) -> str:
    """Kill after a checkpoint of a middle step was committed, and resume. Returns what happened.

    A run that reached its last step before the kill proves nothing: it is repeated, at most twice.
    """
    for _ in range(3):
        shutil.rmtree(out, ignore_errors=True)
        launch = Launch([*command, "--out", str(out)], run.ranks, out.with_suffix(".log"))
        try:
            deadline = time.monotonic() + TIMEOUT
            while not committed(out) and None in launch.codes() and time.monotonic() < deadline:
                time.sleep(0.005)
        finally:
            codes = launch.kill()
        recorded = max(read_metrics(out / "metrics.jsonl"), default=-1)
        if codes == [-signal.SIGKILL] * run.ranks and recorded < STEPS:
            return resume(command, run, out, recorded)
        if any(code not in (0, -signal.SIGKILL) for code in codes):
            raise GoldenError(f"exit codes {codes} before the kill\n{launch.output()}")
    raise GoldenError("three runs ended before they could be killed: is the machine too busy?")


def resume(command: list[str], run: Run, out: Path, recorded: int) -> str:
    """Go on from the newest checkpoint. Raises GoldenError if the run started over instead."""
    before = committed(out)
    if not before or max(before) >= STEPS:
        raise GoldenError(
            f"killed with the checkpoints of steps {sorted(before)}: none of a middle step"
        )
    Launch([*command, "--out", str(out)], run.ranks, out.with_suffix(".log")).wait()
    after = committed(out)
    rewritten = [step for step, inode in before.items() if after.get(step) != inode]
    if rewritten:
        raise GoldenError(
            f"the run did not resume: it wrote the checkpoints of steps {rewritten} again"
        )
    return f"killed after the record of step {recorded}, resumed from step {max(before)}"


# ---- Normal form


def hash_exports(out: Path) -> dict[str, str]:
    """Of each exported folder (averaged weights, an adapter, are beside the weights) one hash over
    all tensors."""
    hashes = {}
    for path in sorted((out / "export").rglob("*.safetensors")):
        if path.parent.is_relative_to(out / "export" / "latest"):
            continue  # a link to the newest one
        tensors = load_file(path)
        total = hashlib.sha256()
        for name in sorted(tensors):
            total.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
            total.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        hashes[f"export/{path.relative_to(out / 'export')}"] = total.hexdigest()[:16]
    return hashes


def is_measured(name: str) -> bool:
    """Whether a metric is of the machine and not of the run: times, memory, rates."""
    return name.startswith("perf/") or "seconds" in name


def read_metrics(path: Path) -> dict[int, dict]:
    """Step -> its metrics, of all its records. Raises GoldenError: one of them stands in two records."""
    steps: dict[int, dict] = {}
    if not path.exists():
        return steps
    # the last one may have been cut by a kill
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    for line in lines:
        record = json.loads(line)
        if "step" not in record or record.get("type") == "header":
            continue
        metrics = steps.setdefault(record.pop("step"), {})
        twice = sorted(metrics.keys() & record.keys())
        if twice:
            raise GoldenError(f"{path} has {twice[0]} of a step in two records")
        metrics.update({name: value for name, value in record.items() if not is_measured(name)})
    return steps


def write_normal(steps: dict[int, dict], path: Path) -> None:
    lines = [
        json.dumps({"step": step} | dict(sorted(steps[step].items()))) for step in sorted(steps)
    ]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def first_difference(a: dict[int, dict], b: dict[int, dict]) -> str:
    """Step, name and both values of the first difference, and how many there are; empty: none."""
    differences = []
    for step in sorted(a.keys() | b.keys()):
        of_a, of_b = a.get(step, {}), b.get(step, {})
        for name in sorted(of_a.keys() | of_b.keys()):
            values = [json.dumps(of[name]) if name in of else "absent" for of in (of_a, of_b)]
            if values[0] != values[1]:
                differences.append(f"step {step}, {name}: {values[0]} and {values[1]}")
    if len(differences) > 1:
        return f"{differences[0]} (the first of {len(differences)} differences)"
    return "".join(differences)


# ---- Commands


def digest(toy: Path) -> str:
    """Of model, rows and pictures; not of the toy's flags, which name its folder."""
    total = hashlib.sha256()
    for path in sorted(toy.rglob("*")):
        if path.is_file() and not path.name.endswith("args.json"):
            of_file = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(toy)} {of_file}\n".encode())
    return total.hexdigest()[:16]


def describe(checkout: Path, toy: Path) -> dict[str, str]:
    """What the runs were made with; `compare` wants the same toy and the same packages."""
    git = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"commit": commit or "unknown", "toy": digest(toy), **packages}


def run_program(checkout: Path, program: str, *words: str) -> None:
    command = [sys.executable, str(checkout / "launch" / program), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=TIMEOUT
    )
    if done.returncode:
        raise GoldenError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def make_toys(checkout: Path, toy: Path) -> None:
    """The toy, and beside it: its pictures hidden, a hybrid, its answers as rows for a next-token loss."""
    hidden, hybrid, ptx = (
        toy.with_name(toy.name + suffix) for suffix in ("-hidden", "-hybrid", "-ptx.jsonl")
    )
    pictures = toy.with_name(toy.name + "-shown")  # every row has one picture
    if not toy.exists():
        run_program(checkout, "toy.py", "--out", str(toy), *TOY)
    if not hidden.exists():
        run_program(
            checkout, "toy.py", "--out", str(pictures), *[word for word in TOY if word != "--mixed"]
        )
        run_program(ROOT, "../tests/benchmarks/hidden_toy.py", str(pictures), str(hidden))
    if not hybrid.exists():
        run_program(checkout, "toy.py", "--out", str(hybrid), *TOY, "--model", "qwen3_5")
    with open(ptx, "w", encoding="utf-8") as file:
        for line in (toy / "train.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            images = [f"{toy.name}/{image}" for image in row.get("images", [])]
            file.write(
                json.dumps({"prompt": row["prompt"], "images": images, "response": row["answer"]})
                + "\n"
            )


def choose_runs(only: str) -> list[Run]:
    """The runs whose name, or name and ranks, are listed; all if nothing is."""
    if not only:
        return RUNS
    wanted = only.split(",")
    unknown = [name for name in wanted if not any(name in (run.name, str(run)) for run in RUNS)]
    if unknown:
        raise GoldenError(f"--only {unknown[0]}: there are {', '.join(map(str, RUNS))}")
    return [run for run in RUNS if run.name in wanted or str(run) in wanted]


class Slots:
    """Lets so many processes run at the same time; a launch takes all of its slots at once."""

    def __init__(self, count: int):
        self.count, self.free, self.changed = count, count, threading.Condition()

    @contextmanager
    def take(self, ranks: int):
        needed = min(ranks, self.count)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= needed)
            self.free -= needed
        try:
            yield
        finally:
            with self.changed:
                self.free += needed
                self.changed.notify_all()


def run_both(run: Run, command: list[str], work: Path, folder: Path, slots: Slots) -> str:
    """Run whole and killed, and write both normal forms. Returns the first difference between the two."""
    whole, killed = work / f"{run}-whole", work / f"{run}-killed"
    with slots.take(run.ranks):
        run_whole(command, run, whole)
    with slots.take(run.ranks):
        happened = run_killed(command, run, killed)
    metrics = []
    for out in (whole, killed):
        steps = read_metrics(out / "metrics.jsonl")
        steps.setdefault(STEPS, {}).update(hash_exports(out))
        if sorted(steps) != list(range(STEPS + 1)):
            raise GoldenError(
                f"{out.name} has records of steps {sorted(steps)}, not of 0 to {STEPS}"
            )
        write_normal(steps, folder / f"{out.name}.jsonl")
        metrics.append(steps)
    difference = first_difference(*metrics)
    verdict = (
        f"DIFFERENT, whole and killed: {difference}" if difference else "the same as undisturbed"
    )
    print(f"{run}: {happened}; {verdict}", flush=True)
    return difference


def write(folder: Path, checkout: Path, toy: Path, only: str, jobs: int) -> int:
    """Run all, and write their normal forms. Returns the exit code."""
    began, runs, slots = time.monotonic(), choose_runs(only), Slots(jobs)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / "about.json", *folder.glob("*-*-*.jsonl")):
        # of an earlier call: they would stand beside those of this one
        path.unlink(missing_ok=True)
    make_toys(checkout, toy)
    known = {script: known_flags(checkout, script) for script in set(SCRIPTS.values())}
    about = describe(checkout, toy)
    with (
        tempfile.TemporaryDirectory(prefix="golden-") as work,
        ThreadPoolExecutor(len(runs)) as pool,
    ):
        judge, templates = Path(work, "judge"), Path(work, "templates.json")
        templates.write_text(json.dumps(TEMPLATES), encoding="utf-8")
        places = {
            "toy": toy,
            "launch": checkout / "launch",
            "judge": judge,
            "templates": templates,
        }
        commands = {}
        for name, script in SCRIPTS.items():
            flags = command_line(name, places, known[script])
            commands[name] = [sys.executable, str(checkout / script), *flags]
        if any(run.name == "grm" for run in runs):
            run_whole(commands["judge"], Run("judge", 1), judge)
        results = []
        for run in runs:
            results.append(
                pool.submit(run_both, run, commands[run.name], Path(work), folder, slots)
            )
        differences = [result.result() for result in results]
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    seconds = time.monotonic() - began
    print(f"{2 * len(runs)} runs of {about['commit']} in {seconds:.0f} s: {folder}", flush=True)
    return int(any(differences))


def metric_names(steps: dict[int, dict]) -> set[str]:
    return {name for metrics in steps.values() for name in metrics}


def without(steps: dict[int, dict], names: set[str]) -> dict[int, dict]:
    """The metrics of each step, but for those with these names."""
    remaining = {}
    for step, metrics in steps.items():
        remaining[step] = {name: value for name, value in metrics.items() if name not in names}
    return remaining


def read_folder(
    folder: Path, names: dict[str, str], ignored: set[str]
) -> dict[str, dict[int, dict]]:
    """Run -> step -> metrics, those of `names` renamed, without the `ignored` ones."""
    runs = {}
    for path in sorted(folder.glob("*-*-*.jsonl")):
        steps = {}
        for step, metrics in read_metrics(path).items():
            steps[step] = {names.get(name, name): value for name, value in metrics.items()}
        runs[path.stem] = without(steps, ignored)
    return runs


def compare(folders: list[Path], ignored: set[str], renamed: dict[str, str]) -> int:
    """Print the first difference of each run, or that there is none. Returns the exit code."""
    about = [json.loads((folder / "about.json").read_text(encoding="utf-8")) for folder in folders]
    for name in ("toy", "torch", "transformers"):
        old, new = (record[name] for record in about)
        if old != new:
            raise GoldenError(
                f"not comparable: {name} is {old} in {folders[0]} and {new} in {folders[1]}"
            )
    old, new = (read_folder(folder, renamed, ignored) for folder in folders)
    problems = [f"{name}: only in one folder" for name in sorted(old.keys() ^ new.keys())]
    added: set[str] = set()
    for name in sorted(old.keys() & new.keys()):
        of_run = metric_names(new[name]) - metric_names(old[name])
        added |= of_run
        difference = first_difference(old[name], without(new[name], of_run))
        if difference:
            problems.append(f"{name}: {difference}")
    if not old:
        problems.append(f"{folders[0]} holds no runs")
    if added:
        print(f"only in {folders[1]}: {', '.join(sorted(added))}")
    same = f"{len(old)} runs: identical, {about[0]['commit']} and {about[1]['commit']}"
    print("\n".join(problems) if problems else same)
    return int(bool(problems))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write", help="run, and write the metrics into a folder")
    writer.add_argument("folder", type=Path)
    writer.add_argument("--checkout", type=Path, default=ROOT)
    writer.add_argument("--toy", type=Path)
    writer.add_argument("--only", default="")
    writer.add_argument("--jobs", type=int, default=2)
    comparer = commands.add_parser("compare", help="compare two such folders")
    comparer.add_argument("folders", type=Path, nargs=2)
    comparer.add_argument("--ignore", default="", metavar="NAME,NAME")
    comparer.add_argument("--renamed", default="", metavar="OLD=NEW,OLD=NEW")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.command == "compare":
            renamed = dict(pair.split("=") for pair in args.renamed.split(",") if pair)
            return compare(args.folders, set(args.ignore.split(",")), renamed)
        folder = args.folder.resolve()
        toy = (args.toy or folder / "toy").resolve()
        return write(folder, args.checkout.resolve(), toy, args.only, args.jobs)
    except (GoldenError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
