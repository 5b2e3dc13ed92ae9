"""The embedded toy, which launch/toy.py writes: a run without --model trains on it."""

import os
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT

# where launch/toy.py puts the toy of each task
TOY_FOLDERS = {"questions": "toy", "describe": "toy_describe"}


def toy_file(task: str, name: str) -> Path:
    return ROOT / TOY_FOLDERS[task] / name


def write_toy(config: Path, task: str) -> bool:
    """Write the toy of this task, with its argument file ``config``: the first process of each machine
    does, and the others wait. False: it failed, and its program has said why."""
    program = ROOT / "launch" / "toy.py"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        command = [sys.executable, program, "--task", task, "--out", config.parent]
        failed = subprocess.run(command).returncode
        if failed and not config.exists():  # else another machine was the first to write it
            return False
    # written last by toy.py; if that fails, torchrun ends this process with its peer
    while not config.exists():
        time.sleep(0.2)
    return True
