"""A small run that is ended and started again, and what must be the same afterwards."""

import gc
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ranks
import train_ppo_vl as ppo
from common import checkpoint, run_folder
from common.ground import process
from conftest import assert_same_records, reproducible, words, write_image, write_rows

REWARD = '''
def letters(prompts, responses, references, labels, images):
    """Depends on the response, so that samples of one prompt differ and there is something to learn."""
    return [sum(c in "aeiou " for c in r) / max(1, len(r)) + 0.1 * len(p) for r, p in zip(responses, images)]
'''
ALGORITHMS = {
    "gae": "--steps 4 --minibatches 2 --kl_coef 0.1 --kl_target 0.001 --kl_horizon 40 --critic_lr 1e-3 "
    "--eval_every 2 --on_bad_row skip --data damaged.jsonl --ema_beta 0.9",
    "grpo": "--steps 4 --advantage grpo --kl_coef 0.1 --kl_in loss --kl_estimator k3+ --lr_schedule linear "
    "--warmup_steps 2 --eval_every 0",
}


def rank() -> int:
    return int(os.environ["RANK"])


SAVING = {  # what a save calls, in order
    "before-write": (checkpoint.Writer, "write_data"),
    "before-rename": (Path, "rename"),
    "before-pointer": (checkpoint, "write_link"),
    "before-rotation": (checkpoint.Checkpoints, "delete_old"),
}


def die_at(point: str, only: int) -> None:
    """SIGKILL of one rank at a point of its first save."""
    if rank() == only:
        setattr(*SAVING[point], lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))


def time_saves(log: str) -> None:
    """Write down the seconds that rank 0's training spends in save() and finish(), each with the
    step it belongs to."""
    depth, step = [], [0]

    def timed(original):
        def call(self, *arguments, **named):
            step[0] = arguments[0] if original.__name__ == "save" else step[0]
            depth.append(time.perf_counter())
            try:
                return original(self, *arguments, **named)
            finally:
                seconds = time.perf_counter() - depth.pop()
                # save() calls finish(): count it once
                if not depth and os.environ["RANK"] == "0":
                    with open(log, "a") as file:
                        file.write(json.dumps([step[0], seconds]) + "\n")

        return call

    checkpoint.Checkpoints.save = timed(checkpoint.Checkpoints.save)
    checkpoint.Checkpoints.finish = timed(checkpoint.Checkpoints.finish)


def live(
    argv: list[str],
    world: int = 1,
    patches: list = (),
    codes: list[int] | None = None,
    **environment: str,
) -> str:
    """A whole life of a run in processes of its own; its output."""
    return ranks.run(ppo.main, argv, world=world, patches=patches, codes=codes, **environment)


def wait_until_met(life: ranks.Life) -> None:
    """Until its ranks have met: later a rank that dies ends the others, before that they wait for it
    for minutes, and only torchrun would end them."""
    while life.ranks[0].is_alive() and "attention:" not in life.told():
        time.sleep(0.05)


def records(out: Path) -> list[dict]:
    """One for every step, in order: that of the step with that of its evaluation. No name may be in both."""
    by_step = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "step" in record:
            of_step = by_step.setdefault(record["step"], {})
            assert of_step.keys() & record.keys() <= {"step"}, (
                f"step {record['step']} is recorded twice"
            )
            of_step |= record
    return [by_step[step] for step in sorted(by_step)]


def assert_bitwise(out: Path, reference: Path, step: int = 4) -> None:
    """Every step recorded once and equal in every bit, and so are the exported weights."""
    assert_same_records(records(out), records(reference))
    ours, theirs = (
        sorted((folder / "export" / f"step-{step}").glob("*.safetensors"))
        for folder in (out, reference)
    )
    assert ours
    assert [file.read_bytes() for file in ours] == [file.read_bytes() for file in theirs]


def steps(out: Path) -> list[int]:
    """Steps of the complete checkpoints, newest first."""
    return [
        step
        for step, path in run_folder.step_folders(out / "checkpoints")
        if (path / "COMMITTED.json").exists()
    ]


def write_task(folder: Path) -> Path:
    """rows.jsonl, damaged.jsonl (a picture of it does not decode), eval.jsonl, reward.py."""
    rng = np.random.default_rng(0)
    (folder / "reward.py").write_text(REWARD)
    for i in range(4):
        write_image(folder / f"{i}.png", (56 + 28 * (i % 2), 56), rng)
    (folder / "damaged.png").write_bytes((folder / "0.png").read_bytes()[:2000])
    rows = [
        {
            "prompt": f"row {i}: how many circles?",
            "images": [f"{i}.png"] if i % 3 else [],
            "answer": "1",
        }
        for i in range(4)
    ]
    damaged = {"prompt": "row 4", "images": ["damaged.png"], "answer": "1"}
    files = {
        "rows": rows,
        "damaged": [*rows, damaged],
        "eval": [row | {"prompt": "held out " + row["prompt"]} for row in rows[:3]],
    }
    for name, lines in files.items():
        write_rows(folder / f"{name}.jsonl", lines)
    return folder


def flags_of(model: Path, task: Path) -> Callable:
    """flags(out, "--more flags"): a run of a second or so."""

    def build(out: Path, more: str = "") -> list[str]:
        more = [task / word if word.endswith(".jsonl") else word for word in more.split()]
        return words(
            "--model",
            model,
            "--data",
            task / "rows.jsonl",
            "--eval_data",
            task / "eval.jsonl",
            "--reward",
            f"{task / 'reward.py'}:letters",
            "--out",
            out,
            "--max_prompt_tokens 256 --max_new_tokens 4 --max_tokens_per_pack 400 --prompts_per_step 4 "
            "--samples_per_prompt 2 --actor_lr 1e-3 --steps 2 --eval_every 0 --save_every 1 --log_samples 0 "
            "--timeout 90 --keep_last 9",
            "--",
            *more,
        )

    return build


def undisturbed_runs(flags: Callable, tmp_path_factory) -> Callable:
    """(algorithm, ranks) -> folder of a run of four steps that nothing happened to."""
    folders = {}

    def run(name: str, world: int) -> Path:
        if (name, world) not in folders:
            folders[name, world] = tmp_path_factory.mktemp(f"{name}-{world}") / "run"
            live(flags(folders[name, world], ALGORITHMS[name]), world)
        return folders[name, world]

    return run


def stop_at(function: str, call: int, only: int, number: int) -> None:
    """A signal that reaches one rank (-1: all) at the given call (1-based) of a function of the script."""
    original, calls = getattr(ppo, function), []

    def counted(*arguments, **named):
        calls.append(function)
        if len(calls) == call and only in (-1, rank()):
            os.kill(os.getpid(), number)
        return original(*arguments, **named)

    setattr(ppo, function, counted)


def assert_close_records(ours: list[dict], theirs: list[dict]) -> None:
    """The same but for the order of additions, which is another on another number of ranks."""
    for first, second in zip(ours, theirs, strict=True):
        assert reproducible(first) == pytest.approx(reproducible(second), abs=1e-4, rel=1e-4)


def refused(argv: list[str], *parts: str) -> None:
    """A run in this process that ends with a message of all these parts."""
    with pytest.raises(process.UserError) as error:
        ppo.main(argv)
    for part in parts:
        assert part in str(error.value)
    del error
    # the frames that the error holds own the lock of the folder
    gc.collect()


def flip(path: Path, place: int) -> None:
    """One bit of the byte there; from the end if it is negative."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def shard_file(folder: Path) -> Path:
    """The file of a checkpoint's tensors that one rank has written."""
    return next(folder.glob("*.safetensors"))


def small_task(folder: Path, model: Path, name: str) -> list[str]:
    """Flags of a run of either script on 16 rows."""
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"row {i}: how many circles?", "answer": "1"} for i in range(16)]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "eval.jsonl", rows[:2])
    write_rows(
        folder / "judged.jsonl", [{"prompt": row["prompt"], "response": "one"} for row in rows]
    )
    write_rows(folder / "ptx.jsonl", [{"prompt": f"say {i}", "response": f"{i}"} for i in range(7)])
    flags = words(
        "--model",
        model,
        "--out",
        folder / name,
        "--max_prompt_tokens 256 --max_tokens_per_pack 400 "
        "--save_every 1 --log_samples 0 --timeout 90 --keep_last 9 --prompts_per_step 4 --export_every 0",
    )
    if name == "grm":
        return words(
            *flags,
            "--data",
            folder / "judged.jsonl",
            "--eval_data",
            folder / "judged.jsonl",
            "--lr 1e-3 --eval_every 0 --eval_max_new_tokens 4",
            "--",
        )
    return words(
        *flags,
        "--data",
        f"{folder}/rows.jsonl:0.5",
        "--eval_data",
        folder / "eval.jsonl",
        "--reward",
        f"{folder}/reward.py:letters",
        "--max_new_tokens 4 --samples_per_prompt 2 --rollouts_per_step 2 --actor_lr 1e-3 "
        "--advantage grpo --kl_coef 0.1 --kl_target 0.001 --kl_horizon 40 --reward_norm --minibatches 2 "
        "--ptx_coef 0.1 --ptx_batch 2 --ptx_data",
        folder / "ptx.jsonl",
        "--",
    )


def write_cache(folder: Path, model: Path, text: str) -> Path:
    """A hub cache with the model org/name, whose chat template is followed by a text."""
    hub = folder / "hub" / "models--org--name"
    (hub / "refs").mkdir(parents=True)
    commit = hashlib.sha1(text.encode()).hexdigest()
    (hub / "refs" / "main").write_text(commit)
    shutil.copytree(model, hub / "snapshots" / commit)
    with open(hub / "snapshots" / commit / "chat_template.jinja", "a") as file:
        file.write(text)
    return folder
