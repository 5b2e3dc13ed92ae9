"""The embedded toy, on which a run without --model trains, and which launch/toy.py writes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT
from common.ground.files import UserError

# where launch/toy.py puts the toy of each task
TOY_FOLDERS = {"questions": "toy", "describe": "toy_describe"}

# Flags of train_ppo_vl.py with which the task "questions" is learned.
TRAINER_ARGS = dict(
    reward="exact",
    prompts_per_step=32,
    samples_per_prompt=8,
    minibatches=4,
    steps=40,
    actor_lr=3e-4,
    critic_lr=1e-3,
    gae_lambda=1.0,
    max_prompt_tokens=256,
    max_new_tokens=4,
    max_tokens_per_pack=4096,
    eval_every=10,
)

# And for the task "describe".
DESCRIBE_ARGS = TRAINER_ARGS | dict(
    reward=f"{ROOT / 'launch' / 'toy_reward.py'}:score", steps=60, max_new_tokens=20
)

# Flags of train_grm_vl.py with which the judgements are learned. The templates are short because
# the tokenizer knows few words: any other takes a token per letter.
JUDGE_ARGS = dict(
    prompts_per_step=32,
    steps=1500,
    lr=1e-3,  # by a sweep, tests/benchmarks/RESULTS.md; with --train_vision 3e-4 and 2500 steps
    lr_schedule="linear",
    warmup_steps=20,
    max_prompt_tokens=256,
    max_tokens_per_pack=4096,
    eval_every=300,
    eval_max_new_tokens=24,
    templates=json.dumps(
        {"correct": "{prompt}\n{response}\n", "pictures": "A<image>B<image>\n{prompt}\n"}
    ),
)

# For the task "locate": written answers first, then rewards.
SFT_ARGS = dict(
    prompts_per_step=64,
    steps=600,
    lr=3e-3,
    lr_schedule="linear",
    warmup_steps=20,
    train_vision=True,
    max_prompt_tokens=256,
    max_tokens_per_pack=4096,
    max_pixels=10_000,  # 3 x 3 tokens of 28 or 32 pixels
    eval_every=200,
    eval_max_new_tokens=40,
)
LOCATE_ARGS = TRAINER_ARGS | dict(
    reward="box", advantage="grpo", max_new_tokens=40, max_pixels=10_000
)

# By task and file of flags: the names of the files of rows begin with the prefix.
FLAGS: dict[str, dict[str, tuple[str, dict]]] = {
    "questions": {"args.json": ("", TRAINER_ARGS), "grm_args.json": ("judge_", JUDGE_ARGS)},
    "describe": {"args.json": ("", DESCRIBE_ARGS)},
    "locate": {"args.json": ("", LOCATE_ARGS), "grm_args.json": ("", SFT_ARGS)},
}


def toy_flags(folder: Path, task: str, name: str) -> dict[str, Any]:
    """The flags in a file of the toy in this folder: see FLAGS."""
    prefix, flags = FLAGS[task][name]
    rows = f"{folder}/{prefix}"
    paths = dict(model=f"{folder}/model", data=f"{rows}train.jsonl", eval_data=f"{rows}eval.jsonl")
    return paths | flags


def write_if_missing(model: str) -> None:
    """Write the embedded toy whose model this is, if nobody has. Raises UserError: that failed."""
    for task, name in TOY_FOLDERS.items():
        folder = ROOT / name
        if model == f"{folder}/model" and not folder.exists():
            program = ROOT / "launch" / "toy.py"
            command = [sys.executable, program, "--task", task, "--out", folder]
            failed = subprocess.run(command).returncode
            if failed and not folder.exists():  # else another machine was the first to write it
                raise UserError(
                    "launch/toy.py did not write the embedded toy, which a run without --model "
                    "trains, for the reason above"
                )
