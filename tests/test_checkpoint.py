"""Checkpoints: killed at any instant, on any rank, a run goes on as if nothing had happened.

Run as a program (`test_checkpoint.py serve`), this file imports the script once and then forks one process per rank and life
of a run, so that real processes get real SIGKILLs at a tenth of the price of a launch. HOOKS are what a life may suffer.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, write_checkpoint
from PIL import Image
from safetensors.torch import load_file

import train_ppo_vl as ppo

REWARD = '''
import os

CALLS = []

def letters(prompts, responses, references, labels, images):
    """Depends on the response, so that samples of one prompt differ and there is something to learn."""
    return [sum(c in "aeiou " for c in r) / max(1, len(r)) + 0.1 * len(p) for r, p in zip(responses, images)]

def planned(prompts, responses, references, labels, images):
    """Of the k-th evaluation: the k-th number of SCORES; elsewhere as above."""
    if "held out" not in prompts[0]:
        return letters(prompts, responses, references, labels, images)
    CALLS.append(1)
    return [float(os.environ["SCORES"].split()[len(CALLS) - 1])] * len(responses)
'''
ALGORITHMS = {
    "gae": "--steps 6 --epochs 2 --minibatches 2 --kl_coef 0.1 --kl_target 0.001 --kl_horizon 40 --critic_lr 1e-3 --eval_every 2 "
           "--on_bad_row skip --data damaged.jsonl",
    "grpo": "--steps 6 --advantage grpo --kl_coef 0.1 --kl_in loss --kl_estimator k3+ --lr_schedule linear --warmup_steps 2 "
            "--eval_every 0",
}


# ------------------------------------------------------------------------------------------------ what a life may suffer
def die(function: str, call: int, ranks: list[int] | None = None) -> None:
    """SIGKILL of this process at the given call (1-based) of a function of the script."""
    original, calls = getattr(ppo, function), []

    def counted(*arguments, **named):
        calls.append(function)
        if len(calls) == call and (ranks is None or int(os.environ["RANK"]) in ranks):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(ppo, function, counted)


def die_at_record(step: int) -> None:
    """SIGKILL once the checkpoint of a step is committed, before the step is evaluated and recorded."""
    original = ppo.StepEnd.__call__

    def killed(self, at, metrics):
        if at == step:
            self.checkpoints.finish(wait=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, at, metrics)

    ppo.StepEnd.__call__ = killed


def stop_at(function: str, call: int, rank: int, number: int) -> None:
    """A signal that reaches one rank in the middle of a step."""
    original, calls = getattr(ppo, function), []

    def counted(*arguments, **named):
        calls.append(function)
        if len(calls) == call and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), number)
        return original(*arguments, **named)

    setattr(ppo, function, counted)


def change_writes(rank: int, failing: list[int], seconds: float = 0.0, fill: str = "", log: str = "") -> None:
    """The writer of one rank (-1: all) fails at the given saves (1-based), is slow, or finds its disk full."""
    original, calls = ppo.HuggingFaceStorageWriter.write_data, []

    def write(self, plan, planner):
        calls.append(plan)
        own = rank in (-1, int(os.environ["RANK"]))
        if own and len(calls) in failing and fill:
            with open(fill, "wb") as file:
                free = os.statvfs(Path(fill).parent)
                file.write(bytes(free.f_bavail * free.f_frsize))
        elif own and len(calls) in failing:
            raise OSError(5, "Input/output error")
        started = time.time()
        time.sleep(seconds if own else 0)
        result = original(self, plan, planner)
        if log:
            with open(log, "a") as file:
                file.write(json.dumps([int(os.environ["RANK"]), started, time.time()]) + "\n")
        return result

    ppo.HuggingFaceStorageWriter.write_data = write


def hang(call: int, rank: int) -> None:
    """One rank stops answering, as when its node is lost without a word."""
    stop_at("update_actor", call, rank, signal.SIGSTOP)


HOOKS = {function.__name__: function for function in (die, die_at_record, stop_at, change_writes, hang)}


def live(order: dict, rank: int) -> None:
    """One rank of one life, in a process of its own; does not return."""
    code = 1
    try:
        with open(order["log"], "ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(order["env"], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(order["world"]),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(order["port"]), GLOO_SOCKET_IFNAME="lo")
        for name, *arguments in order["hooks"]:
            HOOKS[name](*arguments)
        ppo.run_main(lambda: ppo.main(order["argv"]))
        code = 0
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Fork the lives that standard input orders, one JSON object per line; answer with process ids or exit codes."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401  (these imports once, not once per life)
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer  # noqa: F401
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl  # noqa: F401
    for line in sys.stdin:
        order = json.loads(line)
        if "argv" in order:
            answer = []
            for rank in range(order["world"]):
                answer.append(os.fork())
                if answer[-1] == 0:
                    live(order, rank)
        else:
            answer, deadline = {}, time.time() + order["seconds"]
            while len(answer) < len(order["pids"]) and time.time() < deadline:
                for pid in set(order["pids"]) - set(answer):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    answer |= {pid: os.waitstatus_to_exitcode(status)} if ended else {}
                time.sleep(0.01)
            answer = [answer.get(pid) for pid in order["pids"]]
        print(json.dumps(answer), flush=True)


class Lives:
    """Starts lives of runs through one server process."""

    def __init__(self, folder: Path):
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        self.folder, self.count = folder, 0
        self.server = subprocess.Popen([sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                       env=environment)

    def ask(self, order: dict) -> list:
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, argv: list[str], world: int = 1, hooks: list | None = None, **env: str) -> SimpleNamespace:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.count += 1
        log = self.folder / f"life-{self.count}.log"
        log.touch()
        pids = self.ask({"argv": argv, "world": world, "hooks": hooks or [], "env": env, "port": port, "log": str(log)})
        return SimpleNamespace(pids=pids, log=log)

    def wait(self, life: SimpleNamespace, seconds: float = 60) -> SimpleNamespace:
        """Exit codes, negative for signals, and what all ranks printed. A rank still alive after that time is a failure."""
        codes = self.ask({"pids": life.pids, "seconds": seconds})
        for pid, code in zip(life.pids, codes):
            if code is None:
                os.kill(pid, signal.SIGKILL)
        output = life.log.read_text()
        assert None not in codes, f"still alive after {seconds} s: {output[-3000:]}"
        return SimpleNamespace(codes=codes, output=output)

    def __call__(self, argv: list[str], world: int = 1, hooks: list | None = None, codes: list[int] | None = None, **env: str) -> str:
        """A whole life; its output."""
        life = self.wait(self.start(argv, world, hooks, **env))
        assert life.codes == (codes or [0] * world), life.output[-4000:]
        return life.output


# ------------------------------------------------------------------------------------------------ set-up
@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    lives = Lives(tmp_path_factory.mktemp("lives"))
    yield lives
    lives.server.stdin.close()
    lives.server.wait(10)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """rows.jsonl, damaged.jsonl (a picture of it does not decode), eval.jsonl, more.jsonl (a row more), reward.py."""
    folder, rng = tmp_path_factory.mktemp("task"), np.random.default_rng(0)
    (folder / "reward.py").write_text(REWARD)
    for i in range(4):
        Image.fromarray(rng.integers(0, 255, (56, 56 + 28 * (i % 2), 3), dtype=np.uint8)).save(folder / f"{i}.png")
    (folder / "damaged.png").write_bytes((folder / "0.png").read_bytes()[:2000])
    rows = [{"prompt": f"row {i}: how many circles?", "images": [f"{i}.png"] if i % 3 else [], "answer": "1"} for i in range(4)]
    files = {"rows": rows, "more": rows + rows[:1], "damaged": [*rows, {"prompt": "row 4", "images": ["damaged.png"], "answer": "1"}],
             "eval": [row | {"prompt": "held out " + row["prompt"]} for row in rows[:3]]}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


@pytest.fixture(scope="module")
def flags(qwen25, task):
    """flags(out, "--more flags"): a run of a second or so."""
    def build(out: Path, more: str = "") -> list[str]:
        words = [str(task / word) if word.endswith(".jsonl") or word.startswith("reward.py") else word for word in more.split()]
        return ["--model", str(qwen25), "--data", str(task / "rows.jsonl"), "--eval_data", str(task / "eval.jsonl"),
                "--reward", f"{task / 'reward.py'}:letters", "--out", str(out), "--max_prompt_tokens", "256",
                "--max_new_tokens", "4", "--max_tokens_per_pack", "400", "--prefill_tokens", "400", "--prompts_per_step", "4",
                "--samples_per_prompt", "2", "--actor_lr", "1e-3", "--steps", "2", "--eval_every", "0", "--save_every", "1",
                "--log_samples", "0", "--timeout", "60", "--keep_last", "9", *words]
    return build


@pytest.fixture(scope="module")
def undisturbed(lives, flags, tmp_path_factory):
    """(algorithm, ranks) -> folder of a run of six steps that nothing happened to."""
    folders = {}

    def run(name: str, world: int) -> Path:
        if (name, world) not in folders:
            folders[name, world] = tmp_path_factory.mktemp(f"{name}-{world}") / "run"
            lives(flags(folders[name, world], ALGORITHMS[name]), world)
        return folders[name, world]

    return run


def records(out: Path) -> list[dict]:
    return [record for record in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "step" in record]


def reproducible(record: dict) -> dict:
    return {name: value for name, value in record.items() if not name.startswith("perf/") and not name.endswith("seconds")}


def assert_bitwise(out: Path, reference: Path, step: int = 6) -> None:
    """Every step recorded once and equal in every bit, and so are the exported weights."""
    assert [reproducible(r) for r in records(out)] == [reproducible(r) for r in records(reference)]
    ours, theirs = (sorted((folder / "export" / f"step-{step}").glob("*.safetensors")) for folder in (out, reference))
    assert ours and [file.read_bytes() for file in ours] == [file.read_bytes() for file in theirs]


def steps(out: Path) -> list[int]:
    """Steps of the complete checkpoints, newest first."""
    return [step for step, _ in ppo.complete_checkpoints(out / "checkpoints")]


def pointer(out: Path) -> str:
    return (out / "checkpoints" / "latest").read_text().strip()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def train(argv: list[str]) -> dict[str, float]:
    """A whole run in this process."""
    return ppo.main(argv)


def refused(argv: list[str], *parts: str) -> None:
    with pytest.raises(ppo.UserError) as error:
        ppo.main(argv)
    for part in parts:
        assert part in str(error.value)


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> Path:
    """A run of two steps with the checkpoints step-1 and step-2; copy it before use."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(flags(out))
    return out


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


# ------------------------------------------------------------------------------------------------ bitwise resume
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_six_steps_are_three_and_three(lives, flags, undisturbed, tmp_path, name, world):
    """3 steps, SIGKILL of all ranks in step 4, resume, 3 steps: metrics and weights equal an undisturbed run's bit for bit."""
    argv = flags(tmp_path / "run", ALGORITHMS[name] + " --save_every 3")
    lives([*argv, "--save_blocking"], world, [["die", "update_actor", 4]], codes=[-signal.SIGKILL] * world)
    assert steps(tmp_path / "run") == [3] and records(tmp_path / "run")[-1]["step"] == 3
    assert "resuming from" in lives(argv, world)
    assert_bitwise(tmp_path / "run", undisturbed(name, world))
    if name == "gae":
        last = records(tmp_path / "run")[-1]
        assert last["rollout/dropped_prompts"] > 1 and last["train/kl_coef"] != 0.1        # counters and KL weight were state


if __name__ == "__main__":
    serve()
