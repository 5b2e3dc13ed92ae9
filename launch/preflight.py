"""Half a minute before a run on many machines: do its ranks meet, and have they what the run needs?

    torchrun ... launch/preflight.py train_ppo_vl.py FLAGS
    sbatch --nodes 4 ... launch/train.slurm launch/preflight.py train_ppo_vl.py FLAGS

FLAGS are the flags of the run. Checked, on all ranks: they meet within a minute; every process has a GPU, and a
driver that torch can use; --out is one folder, in which every machine can write; the flags, and the files
behind them, are the same; an all-reduce gives the right sum, and how long it takes. Prints a line for each
machine and each check, then PASS; or one message, with exit code 2. It trains nothing, loads no weights,
and leaves nothing in --out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder

from common.ground import versions

versions.check()


import argparse
import importlib.util
import socket
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from common import distributed, identity
from common.flags import Parser
from common.ground import process
from common.ground.files import UserError, write_durably
from common.logging import environment

LONGEST_WAIT = 60.0  # seconds, for the other ranks, and for what they write
DRIVER = Path("/proc/driver/nvidia/version")


def main(argv: list[str] | None = None) -> None:
    """Raises UserError: what the run would miss."""
    parser = Parser(
        description=__doc__,
        usage="preflight.py SCRIPT FLAGS",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", type=Path, help="train_ppo_vl.py, train_grm_vl.py, or a fork")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the run")
    options, start = parser.parse_args(argv), time.monotonic()
    args = parse_flags(options.script, options.flags)

    wait = min(LONGEST_WAIT, args.timeout)
    ranks = distributed.start(wait, args.hsdp, args.rollout_shards)
    machines = Counter(distributed.gather_objects(describe_machine(ranks)))
    for (host, what), count in machines.items():
        distributed.say_once(f"{host}: {count} ranks, {what}")
    if len({what for _, what in machines}) > 1:
        distributed.say_once("warning: the machines differ")
    share_folder(args.out, wait)
    distributed.say_once(f"--out {args.out}: one folder, in which every machine can write")
    identity.fingerprint_of(args)
    distributed.say_once("the flags, and the files behind them, are the same")
    size, seconds = time_all_reduce(ranks)
    distributed.say_once(f"all-reduce of {size >> 20} MiB: right, {1000 * seconds:.1f} ms")
    distributed.say_once(f"PASS after {time.monotonic() - start:.0f} s")


def parse_flags(script: Path, flags: list[str]) -> Any:
    """The arguments of a run, as its script reads them. Raises UserError."""
    spec = importlib.util.spec_from_file_location(script.stem, script.resolve())
    if not script.is_file() or spec is None or spec.loader is None:
        raise UserError(f"{script}: no such script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, "parse_args"):
        raise UserError(f"{script} is no script that trains: it has no parse_args")
    return module.parse_args(flags)


def describe_machine(ranks: distributed.Ranks) -> tuple[str, str]:
    """The name of this machine, and what all machines should have alike."""
    here = environment()
    what = f"torch {here['torch']}, transformers {here['transformers']}"
    if ranks.device.type == "cuda":
        gib = torch.cuda.get_device_properties(ranks.device).total_memory / 2**30
        driver = DRIVER.read_text().splitlines()[0] if DRIVER.exists() else "unknown driver"
        what = f"{torch.cuda.device_count()} x {here['gpu']} of {gib:.0f} GiB, {driver}, {what}"
    return socket.gethostname(), what


def share_folder(folder: Path, wait: float) -> None:
    """Each rank writes a file into the folder, and looks for those of all others. Raises UserError: this
    machine cannot write there, or does not see what another one has written."""
    token, made = distributed.from_main((time.time_ns(), not folder.exists()))
    marks = [folder / f".preflight-{token}-{rank}" for rank in range(distributed.world_size())]
    hosts = distributed.gather_objects(socket.gethostname())
    try:
        with distributed.raise_on_all_ranks(f"--out {folder}: "):
            write_durably(marks[dist.get_rank()], "")
        with distributed.raise_on_all_ranks(f"--out {folder}: "):
            deadline = time.monotonic() + wait / 2  # a network's file system may take a while
            for rank, mark in enumerate(marks):
                while not mark.exists():
                    if time.monotonic() > deadline:
                        raise UserError(
                            f"{socket.gethostname()} does not see what rank {rank} ({hosts[rank]}) has "
                            "written there; the folder must lie on a file system that all machines share"
                        )
                    time.sleep(0.2)
    finally:
        with suppress(OSError):
            marks[dist.get_rank()].unlink()
    distributed.gather_objects(None)  # all have removed their files
    if made and distributed.is_main():
        with suppress(OSError):
            folder.rmdir()


def time_all_reduce(ranks: distributed.Ranks) -> tuple[int, float]:
    """The bytes of an all-reduce, and its seconds. Raises UserError: its sum is wrong."""
    on_gpu, rank = ranks.device.type == "cuda", dist.get_rank()
    size = 2**28 if on_gpu else 2**22
    x = torch.empty(size // 4, device=ranks.device)
    seconds = 0.0
    for _ in range(3):  # the first one connects
        x.fill_(rank + 1)
        start = time.perf_counter()
        dist.all_reduce(x)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    wrong = int((x != ranks.world * (ranks.world + 1) / 2).sum())
    with distributed.raise_on_all_ranks():
        if wrong:
            raise UserError(
                f"an all-reduce is wrong on rank {rank}, {wrong} of {x.numel()} numbers"
            )
    return size, seconds


if __name__ == "__main__":
    process.run_main(main)
