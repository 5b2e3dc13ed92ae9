"""Kill a running job at random instants, resume, and compare with a run that nothing happened to.

    python tests/benchmarks/kill_test.py                       # 30 kills, about 4 minutes on 2 cores
    python tests/benchmarks/kill_test.py --kills 100 --seed 1 --work /scratch/kills

Each life of the 2-rank job gets a SIGKILL on one random rank or on all, a random time after its
ranks have met. After each kill the newest complete checkpoint must load and must not be older than before; a
run that reaches its last step must equal the undisturbed run in every metric and in every byte of
its exported weights; then the next run starts from nothing. The second part measures how long
training waits for a save, in the background and blocking, with a larger model."""

import argparse
import collections
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from safetensors.torch import load_file  # noqa: E402

import conftest  # noqa: E402  (puts the project on the path)
import ranks  # noqa: E402
import train_ppo_vl as ppo  # noqa: E402
from launch import toy  # noqa: E402
from lives import (  # noqa: E402
    assert_bitwise,
    flags_of,
    live,
    records,
    steps,
    time_saves,
    wait_until_met,
    write_task,
)

RANKS = 2


def kill_at_random(
    flags: Callable, work: Path, kills: int, last: int, longest: float, seed: int
) -> None:
    """The first part. Raises AssertionError at the first thing that is not as it should be."""
    rng, counts, reached, resumed = np.random.default_rng(seed), collections.Counter(), 0, []
    plan = f"--steps {last} --keep_last 2 --eval_every 5 --critic_lr 1e-3 --kl_coef 0.1 --kl_target 0.001"
    started = time.time()
    live(flags(work / "undisturbed", plan), RANKS)
    print(f"undisturbed run: {last} steps in {time.time() - started:.0f} s", flush=True)
    run, out = 0, work / "run-0"
    while counts["kills"] < kills or reached:
        unfinished = {path.stat().st_ino for path in out.glob("checkpoints/.tmp-*")}
        life = ranks.start(ppo.main, flags(out, plan), world=RANKS)
        if counts["kills"] < kills:
            wait_until_met(life)
            time.sleep(rng.uniform(0, longest))
            victims = life.pids if rng.random() < 0.4 else [life.pids[rng.integers(RANKS)]]
            for pid in victims:
                with suppress(ProcessLookupError):  # it has reached its last step
                    os.kill(pid, signal.SIGKILL)
        codes = life.wait(120)
        if -signal.SIGKILL in codes:
            counts["kills"] += 1
            counts["of all ranks" if codes == [-signal.SIGKILL] * RANKS else "of one rank"] += 1
            if {path.stat().st_ino for path in out.glob("checkpoints/.tmp-*")} - unfinished:
                counts["while a checkpoint was being written"] += 1
        complete = steps(out)
        newest = complete[0] if complete else 0
        assert newest >= reached, (
            f"the newest complete checkpoint went back from {reached} to {newest}"
        )
        for file in (out / "checkpoints" / f"step-{newest}").glob("*.safetensors"):
            assert load_file(file)
        if newest > 0:
            json.loads((out / "checkpoints" / f"step-{newest}" / "state.json").read_text())
            resumed.append(newest)
        reached = newest
        if codes == [0] * RANKS:
            assert_bitwise(out, work / "undisturbed", last)
            counts["runs finished, equal in every bit"] += 1
            shutil.rmtree(out)
            run, reached = run + 1, 0
            out = work / f"run-{run}"
    print(f"checked in {time.time() - started:.0f} s; newest checkpoints along the way: {resumed}")
    for name, count in counts.items():
        print(f"{count:5d} {name}")


def measure_waits(task: Path, work: Path, hidden: int, layers: int) -> None:
    """The second part: seconds that training spends on each save but the first and the last."""
    model, kind = work / "large", "qwen2_5_vl"
    tokenizer = toy.make_tokenizer()
    toy.make_model(kind, tokenizer, 0, hidden, layers).save_pretrained(model)
    tokenizer.save_pretrained(model)
    toy.make_image_processor(kind).save_pretrained(model)
    for mode in ("--no-save_blocking", "--save_blocking"):
        out, log = work / f"large{mode}", work / f"waits{mode}.jsonl"
        plan = "--steps 9 --save_every 2 --keep_last 1 --export_every 0 --critic_lr 1e-3"
        argv = flags_of(model, task)(out, f"{plan} {mode}")
        live(argv, RANKS, [(time_saves, str(log))])
        size = sum(file.stat().st_size for file in (out / "checkpoints" / "step-9").iterdir())
        waits = collections.defaultdict(float)
        for step, seconds in map(json.loads, log.read_text().splitlines()):
            waits[step] += seconds
        step_seconds = statistics.median(record["perf/step_seconds"] for record in records(out)[1:])
        middle = [waits[step] for step in (4, 6, 8)]
        print(
            f"{mode:20s} checkpoint {size / 2**20:.0f} MiB, step {step_seconds:.2f} s; "
            "training waits for a save "
            f"{statistics.median(middle):.2f} s ({', '.join(f'{seconds:.2f}' for seconds in middle)})",
            flush=True,
        )
        shutil.rmtree(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30, help="SIGKILLs (default: 30)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run (default: 12)")
    parser.add_argument(
        "--longest", type=float, default=5.0, help="longest time until a kill, seconds (default: 5)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of instants and victims (default: 0)"
    )
    parser.add_argument(
        "--hidden",
        type=int,
        default=512,
        help="width of the model of the second part (default: 512)",
    )
    parser.add_argument(
        "--layers", type=int, default=8, help="layers of the model of the second part (default: 8)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="folder for the runs; default: a temporary one, removed afterwards",
    )
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="kill-test-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        model = conftest.write_checkpoint(work / "model", "qwen2_5_vl")
        task = write_task(work)
        if args.kills:
            flags = flags_of(model, task)
            kill_at_random(flags, work, args.kills, args.steps, args.longest, args.seed)
        measure_waits(task, work, args.hidden, args.layers)
    finally:
        if not args.work:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
