"""Rollouts with environments: what a wait of 50 ms costs, seconds on the clock and of the CPU,
alternated in one process.

    python tests/benchmarks/environments.py [--size tiny|5m|20m|33m] [--samples 128] [--seconds 0.05] [--workers 16]

The same samples of the same lengths three times: with an environment that sleeps before each reply,
with one that answers at once, and without an environment, where the own tokens are one turn. Of
three turns a sample draws each length from one fixed log-normal table (mean about 18, at most 64
tokens); a reply is twelve words. All samples have slots at once, so that as many as the threads can
take wait side by side."""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

from rollout import SAMPLES, SIZES, ppo, write_task  # sets one thread and the path before torch

# isort: split
import numpy as np
import torch

from common import distributed
from common.buffers import Batch
from common.data.loader import load_pixels
from common.envs import environments
from common.rollout import RolloutEngine
from machine import machine

TURNS, LONGEST = 3, 64


class Asks:
    """Two replies, then done."""

    pictures = False

    def reset(self, row):
        self.turn, self.seconds = 0, row["seconds"]

    def step(self, text):
        time.sleep(self.seconds)
        self.turn += 1
        if self.turn == TURNS:
            return None, 1.0, True
        return "and how many of them are red or blue or very green?", 0.0, False


def give_turns(table: torch.Tensor) -> None:
    """From now on turns end where the table (prompts, samples, turns) says, by the end token."""
    prefill, sample = RolloutEngine.prefill, RolloutEngine.sample

    def prefill_with_ends(engine, members):
        if not hasattr(engine, "ends"):
            engine.ends = torch.zeros(engine.cache.slots, TURNS, dtype=torch.int64)
            # moves with its slot
            engine.state.append(engine.ends)
        for group, samples in members:
            for slot, number in samples:
                ends = table[group, number].cumsum(0)
                engine.ends[slot] = ends if engine.envs else ends[-1]
        prefill(engine, members)

    def sample_to_end(engine, hidden, slots):
        done, step = engine.done[slots].clone(), engine.response_tokens[slots].clone()
        sample(engine, hidden, slots)
        ended = ~done & (step[:, None] + 1 == engine.ends[slots]).any(dim=1)
        ids = torch.where(ended, engine.sampling.stop_ids[0], engine.last[slots])
        engine.out_tokens[engine.slot_ids[slots], step] = engine.last[slots] = ids
        engine.done[slots] = done | ended

    RolloutEngine.prefill, RolloutEngine.sample = prefill_with_ends, sample_to_end


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="5m")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0.05, help="of a call of the environment")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    print(machine())
    prompts = flags.samples // SAMPLES
    folder = write_task(Path(tempfile.mkdtemp()), flags.size, 16, prompts)
    args = ppo.parse_args(
        [
            "--model",
            str(folder / "model"),
            "--data",
            str(folder / "rows.jsonl"),
            "--advantage",
            "grpo",
            "--max_new_tokens",
            str(TURNS * LONGEST + 1),
            "--max_prompt_tokens",
            "512",
            "--env",
            f"{__file__}:Asks",
            "--env_workers",
            str(flags.workers),
            "--max_turns",
            str(TURNS),
            "--reward",
            "env",
            "--max_reply_tokens",
            "100",
            "--slots",
            str(flags.samples),
            "--out",
            str(folder / "run"),
        ]
    )
    ranks = distributed.start(args.timeout, args.hsdp)
    loaded = ppo.load_rows(args)
    models = ppo.build_models(args, loaded.processor, ranks.device)
    ppo.load_models(args, models.by_role(), ranks)
    actor = models.actor
    # banned: turns end by the table alone
    sampling = ppo.sampling_of(args, loaded.processor, ranks.device)
    sampling.banned[list(loaded.processor.stop_ids)] = True
    answering = dataclasses.replace(
        sampling, environment=environments.load_environment(args, args.max_prompt_tokens)
    )
    lengths = (
        np.random.default_rng(1)
        .lognormal(2.7, 0.7, (prompts, SAMPLES, TURNS))
        .clip(1, LONGEST)
        .astype(int)
    )
    give_turns(torch.from_numpy(lengths))
    pixels = [load_pixels(row, loaded.processor) for row in loaded.train]

    def roll(sampling: ppo.Sampling, seconds: float) -> tuple[float, float]:
        for row in loaded.train:
            row.row["seconds"] = seconds
        batch = Batch(
            loaded.train, list(range(prompts)), [0] * prompts, patches=dict(enumerate(pixels))
        )
        start = time.perf_counter(), time.process_time()
        samples = ppo.rollout(actor, batch, sampling, SAMPLES)
        seconds = time.perf_counter() - start[0], time.process_time() - start[1]
        assert samples.own_lengths.tolist() == lengths.sum(axis=2).flatten().tolist()
        assert all(len(talk.replies) == TURNS - 1 for talk in samples.conversations)
        if samples.conversations:
            replied.append(float((samples.stream_lengths - samples.own_lengths).double().mean()))
        return seconds

    replied: list[float] = []
    programs = {
        "one turn": (sampling, 0.0),
        "answers at once": (answering, 0.0),
        f"{1000 * flags.seconds:g} ms": (answering, flags.seconds),
    }
    seconds_of: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for repeat in range(flags.repeats + 1):
        for name, program in programs.items():
            seconds = roll(*program)
            # the first is a warm-up
            if repeat:
                seconds_of[name].append(seconds)
    torch.distributed.destroy_process_group()
    waits = flags.samples * TURNS * flags.seconds
    print(
        f"{flags.samples} samples of {TURNS} turns, "
        f"{lengths.sum(axis=2).mean():.0f} own tokens and {replied[-1]:.0f} of "
        f"replies (mean); {flags.workers} threads, "
        f"{waits:.1f} s of waiting in all, {waits / flags.workers:.1f} s for each"
    )
    for name, values in seconds_of.items():
        best = min(values)[0]
        ratios = ", ".join(
            f"{best / min(seconds_of[other])[0]:.2f} of {other}" for other in list(programs)[:2]
        )
        print(
            f"{name:16s} {best:6.2f} s, {min(cpu for _, cpu in values):.2f} of the CPU   "
            f"({', '.join(f'{clock:.2f}' for clock, _ in values)})   {ratios}"
        )


if __name__ == "__main__":
    main()
