"""Rollouts against Hugging Face `generate`: useful tokens per process CPU second, one thread,
alternated in one process.

    python tests/benchmarks/rollout.py [--model qwen3_5] [--size tiny|5m|20m|33m] [--image_tokens 16|144] [--responses 64] [--slots 64]
    python tests/benchmarks/rollout.py --responses 32..512 --slots 32      # ours alone: cost per token as the rollout grows

Both sides answer the same prompts (one image each, 8 samples per prompt) with response lengths from
one fixed log-normal table (mean about 36, at most 128 tokens); a token counts if it lies within its
sample's length. `generate` runs one batch with its dynamic cache until the longest response has
ended, as trainers that sample with it do."""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ratios of CPU seconds hold on one thread only

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from transformers import AutoModelForImageTextToText

import train_ppo_vl as ppo
from common import distributed
from common.buffers import Batch
from common.data.loader import load_pixels
from common.rollout import RolloutEngine
from launch import toy
from machine import machine

SAMPLES, LONGEST = 8, 128
SIZES = {
    "tiny": {"hidden_size": 64, "layers": 3},
    "5m": {"hidden_size": 256, "layers": 6},
    "20m": {"hidden_size": 512, "layers": 8},
    "33m": {"hidden_size": 512, "layers": 14},
}


def write_task(
    folder: Path,
    size: str,
    image_tokens: int,
    prompts: int,
    words: int = 0,
    kind: str = "qwen2_5_vl",
) -> Path:
    """A random checkpoint and a JSONL file of prompts with one square image, and so many more
    ``words``, each."""
    tokenizer, side = toy.make_tokenizer(), round(image_tokens**0.5) * 2 * toy.PATCH_SIZE[kind]
    model = toy.make_model(kind, tokenizer, seed=0, **SIZES[size])
    print(
        f"{kind} {size}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M weights, "
        f"{image_tokens} image tokens"
    )
    processor = toy.make_image_processor(kind)
    processor.size = {"shortest_edge": side * side, "longest_edge": side * side}
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder / "model")
    rng, lines = np.random.default_rng(0), []
    for i in range(prompts):
        Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)).save(
            folder / f"{i}.png"
        )
        lines.append(
            json.dumps(
                {
                    "prompt": "how many circles are there?" + " circles" * words,
                    "images": [f"{i}.png"],
                }
            )
        )
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder


def length_table(prompts: int) -> np.ndarray:
    """(prompts, SAMPLES) response lengths, log-normal: mean about 36, at most LONGEST."""
    return (
        np.random.default_rng(1)
        .lognormal(3.45, 0.75, (prompts, SAMPLES))
        .clip(1, LONGEST)
        .astype(int)
    )


def give_lengths(table: torch.Tensor) -> None:
    """From now on responses end where the table (prompts, samples) says, so that both sides have
    the same work."""
    prefill, sample = RolloutEngine.prefill, RolloutEngine.sample

    def prefill_with_limit(engine, members):
        if not hasattr(engine, "limit"):
            engine.limit = torch.zeros_like(engine.response_tokens)
            # moves with its slot
            engine.state.append(engine.limit)
        for group, samples in members:
            for slot, number in samples:
                engine.limit[slot] = table[group, number]
        prefill(engine, members)

    def sample_to_limit(engine, hidden, slots):
        done = engine.done[slots].clone()
        sample(engine, hidden, slots)
        engine.done[slots] = done | (engine.response_tokens[slots] >= engine.limit[slots])

    RolloutEngine.prefill, RolloutEngine.sample = prefill_with_limit, sample_to_limit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=sorted(toy.PATCH_SIZE), default="qwen2_5_vl", help="family"
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--image_tokens", type=int, choices=(16, 144), default=144)
    parser.add_argument(
        "--responses", default="64", help="a number, or FROM..TO: doubled from the one to the other"
    )
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    print(machine())
    first, _, last = flags.responses.partition("..")
    counts = [int(first)]
    while last and counts[-1] < int(last):
        counts.append(counts[-1] * 2)
    prompts = counts[-1] // SAMPLES
    folder = write_task(
        Path(tempfile.mkdtemp()), flags.size, flags.image_tokens, prompts, kind=flags.model
    )
    args = ppo.parse_args(
        [
            "--model",
            str(folder / "model"),
            "--data",
            str(folder / "rows.jsonl"),
            "--advantage",
            "grpo",
            "--max_new_tokens",
            str(LONGEST),
            "--max_prompt_tokens",
            "512",
            "--slots",
            str(flags.slots),
            "--out",
            str(folder / "run"),
        ]
    )
    ranks = distributed.start(args.timeout, args.hsdp)
    loaded = ppo.load_rows(args)
    rows, processor = loaded.train, loaded.processor
    models = ppo.build_models(args, processor, ranks.device)
    ppo.load_models(args, models.by_role(), ranks)
    actor = models.actor
    sampling = ppo.sampling_of(args, processor, ranks.device)
    lengths = length_table(prompts)
    give_lengths(torch.from_numpy(lengths))
    pixels = [load_pixels(row, processor) for row in rows]

    def ours(n: int) -> None:
        prompts = Batch(rows[:n], list(range(n)), [0] * n, patches=dict(enumerate(pixels[:n])))
        samples = ppo.rollout(actor, prompts, sampling, SAMPLES)
        assert samples.own_lengths.tolist() == lengths[:n].flatten().tolist()

    def theirs(n: int) -> None:
        longest = int(lengths[:n].max())
        with torch.no_grad():
            oracle.generate(
                **inputs, do_sample=True, max_new_tokens=longest, min_new_tokens=longest
            )

    if last:
        programs = {f"ours, {n} responses": (ours, n // SAMPLES) for n in counts}
    else:
        ids = torch.stack([row.input_ids for row in rows]).repeat_interleave(SAMPLES, 0)
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == processor.config.image_token_id).int(),
            "pixel_values": torch.cat([part for part in pixels for _ in range(SAMPLES)]),
            "image_grid_thw": torch.cat([row.patch_grids for row in rows for _ in range(SAMPLES)]),
        }
        oracle = AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
        programs = {"ours": (ours, prompts), "generate": (theirs, prompts)}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(flags.repeats + 1):
        for name, (program, n) in programs.items():
            start = time.process_time()
            program(n)
            # the first is a warm-up
            if repeat:
                seconds[name].append(time.process_time() - start)
    useful = {name: int(lengths[:n].sum()) for name, (_, n) in programs.items()}
    for name, values in seconds.items():
        rate = useful[name] / min(values)
        print(
            f"{name:20s} {rate:8.0f} useful tokens per CPU second, "
            f"{1e6 / rate:6.0f} us per token   (CPU seconds:",
            ", ".join(f"{v:.2f}" for v in values) + ")",
        )
    if not last:
        print(
            f"ratio {min(seconds['generate']) / min(seconds['ours']):.2f}   {flags.responses} "
            "responses, mean length "
            f"{lengths.mean():.0f}, longest {lengths.max()}, torch {torch.__version__}"
        )


if __name__ == "__main__":
    main()
