"""Updates: forward and backward of shared-prefix packed rows against two others, process CPU
seconds, one thread, alternated.

    python tests/benchmarks/update.py [--model qwen3_5] [--size tiny|20m]
        [--prompt_tokens 298] [--response_tokens 64] [--samples 8]
    python tests/benchmarks/update.py --linear    # seconds per token of the same shape, 1 to 16 prompts
    python tests/benchmarks/update.py --sweep     # sharing against no sharing over many shapes

    shared    the trainer's own: `packs` and `actor_loss`, the samples of a prompt behind one copy of it
    apart     the same where no prompt is shared: every sample stands with a copy of its prompt
    padded    Hugging Face's forward of the batch prompt + response with its own attention and logits of
              all positions; `kept` computes logits of the response only (logits_to_keep)

All of them compute the same PPO loss, and the gradients are compared before anything is timed. The
vision tower is frozen: ours reads image features that the rollout has computed, the padded forward
runs the tower for every sample (its seconds are printed)."""

import argparse
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ratios of CPU seconds hold on one thread only

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from transformers import AutoModelForImageTextToText

import train_ppo_vl as ppo
from common import buffers, distributed
from common.data.processor import Processor
from common.data.rows import Prompt
from common.model import packs, vlm
from launch import toy
from machine import machine

SIZES = {"tiny": {"hidden_size": 64, "layers": 3}, "20m": {"hidden_size": 512, "layers": 8}}
# (prompt tokens, response tokens, samples) of the sweep: text only, from long prompts to long
# responses, 1 to 16 samples
SHAPES = [(p, r, n) for p in (16, 64, 298, 1024) for r in (4, 64, 256) for n in (1, 2, 8)] + [
    (298, 64, 16),
    (32, 1024, 2),
    (32, 1024, 8),
]


def start(folder: Path, kind: str, size: str, longest: int, pack: int):
    """A random checkpoint, the trainer's arguments and actor on it, and Hugging Face's model with
    the same weights."""
    tokenizer = toy.make_tokenizer()
    model = toy.make_model(kind, tokenizer, seed=0, **SIZES[size])
    for name, parameter in model.named_parameters():
        # as made, they decay by e^-1000 within a chunk, whose float32 gradients have few digits
        if name.endswith("A_log"):
            parameter.data.uniform_(0.005, 0.3).log_()
    print(
        f"{kind} {size}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M weights, "
        f"torch {torch.__version__}"
    )
    for part in (model, tokenizer, toy.make_image_processor(kind)):
        part.save_pretrained(folder)
    args = ppo.parse_args(
        [
            "--model",
            str(folder),
            "--data",
            "no rows",
            "--advantage",
            "grpo",
            "--max_prompt_tokens",
            str(longest),
            "--max_new_tokens",
            "1",
            "--max_tokens_per_pack",
            str(pack),
        ]
    )
    processor = Processor(folder, args)
    actor = load_actor(args, processor)
    oracle = AutoModelForImageTextToText.from_pretrained(folder)
    oracle.model.visual.requires_grad_(False)
    return args, processor, actor, oracle.train()


def load_actor(args, processor):
    ranks = distributed.start(args.timeout, args.hsdp)
    models = ppo.build_models(args, processor, ranks.device)
    ppo.load_models(args, models.by_role(), ranks)
    return models.actor.train()


def make_task(
    args,
    processor,
    actor,
    prompt_tokens: int,
    image_tokens: int,
    response_tokens: int,
    prompts: int,
    samples: int,
):
    """Random prompts (an image of ``image_tokens`` in each, if any) and random responses, all of
    the given lengths."""
    config, generator = processor.config, torch.Generator().manual_seed(0)
    text = lambda n: torch.randint(4, 200, (n,), generator=generator)  # noqa: E731
    rows, patches = [], {}
    for i in range(prompts):
        image = (
            [config.vision_start_token_id]
            + [config.image_token_id] * image_tokens
            + [config.vision_end_token_id]
        )
        image = torch.tensor(image if image_tokens else [], dtype=torch.int64)
        ids = torch.cat([text(4), image, text(prompt_tokens - 4 - len(image))])
        side = 2 * round(image_tokens**0.5)
        grids = ((1, side, side),) if image_tokens else ()
        rows.append(Prompt([], "", (), grids, ids, image_tokens, index=i, source=f"row {i}"))
        if image_tokens:
            patches[i] = torch.randn(
                side * side, 3 * 2 * config.vision_config.patch_size**2, generator=generator
            )
    asked = buffers.Batch(rows, list(range(prompts)), [0] * prompts, patches=dict(patches))
    vlm.compute_features(actor.model, asked)
    tokens = text(prompts * samples * response_tokens)
    responses = enumerate(tokens.split(response_tokens))
    batch = asked.with_responses((k // samples, part) for k, part in responses)
    batch.advantages = torch.randn(len(tokens), generator=generator)
    batch.in_policy_loss = torch.ones(len(tokens), dtype=torch.bool)
    batch.sampling = ppo.sampling_of(args, processor, actor.model.setup.device)
    batch.old_logprobs = ppo.logprobs_of(actor, batch)
    batch.logprobs = batch.old_logprobs
    return batch, patches


def ours(args, actor, batch, share: bool) -> None:
    """The trainer's update of one minibatch, up to the gradients."""
    weights = torch.full((len(batch.tokens),), 1 / len(batch.tokens))
    part = ppo.Minibatch(None, weights, weights, None)
    with sharing(share):
        for row in packs.of_batch(actor.model, batch):
            ppo.actor_loss(actor, None, row, batch, part, args)[0].backward()


@contextmanager
def sharing(share: bool):
    """Inside, prompts are shared where the trainer does so, or never."""
    make_blocks = packs.make_blocks
    if not share:
        packs.make_blocks = lambda batch, max_tokens, groups, score_cost: make_blocks(
            batch, 0, groups
        )
    try:
        yield
    finally:
        packs.make_blocks = make_blocks


def padded(oracle, processor, batch, patches, only_responses: bool, per_call: int) -> None:
    """Hugging Face's forward, ``per_call`` samples at a time, and the same loss from log_softmax of
    its logits."""
    length = int(batch.own_lengths[0])
    banned = torch.tensor(processor.banned_ids)
    tokens, old, advantages = (
        x.unflatten(0, (-1, length)) for x in (batch.tokens, batch.old_logprobs, batch.advantages)
    )
    for start in range(0, len(batch), per_call):
        rows = slice(start, start + per_call)
        groups = batch.prompt_index[rows].tolist()
        # (b, L)
        ids = torch.cat(
            [torch.stack([batch.prompts[g].input_ids for g in groups]), tokens[rows]], dim=1
        )
        images = {}
        if patches:
            images = {
                "pixel_values": torch.cat([patches[g] for g in groups]),
                "image_grid_thw": torch.cat([batch.prompts[g].patch_grids for g in groups]),
            }
        logits = oracle(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            logits_to_keep=length + 1 if only_responses else 0,
            mm_token_type_ids=(ids == processor.config.image_token_id).int(),
            **images,
        ).logits
        logits = logits[:, -length - 1 : -1].index_fill(2, banned, -torch.inf)
        logp = logits.log_softmax(-1).gather(2, tokens[rows, :, None])[..., 0]
        ratio = (logp - old[rows]).exp()
        adv = advantages[rows]
        (
            torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).sum() / len(batch.tokens)
        ).backward()


def gradients(model) -> list[torch.Tensor]:
    """The gradients of the language model, by transformers' names, and none left behind."""
    named = sorted(
        (name.replace("decay.", ""), p)
        for name, p in model.named_parameters()
        if p.grad is not None
    )
    grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for _, p in named]
    model.zero_grad(set_to_none=True)
    return grads


def alternate(programs: dict, repeats: int) -> dict[str, float]:
    """Best CPU seconds of each program; the first round is a warm-up."""
    seconds = {name: [] for name in programs}
    for repeat in range(repeats + 1):
        for name, program in programs.items():
            began = time.process_time()
            program()
            if repeat:
                seconds[name].append(time.process_time() - began)
    return {name: min(values) for name, values in seconds.items()}


def compare(flags, args, processor, actor, oracle) -> None:
    """The three ways at one shape."""
    batch, patches = make_task(
        args,
        processor,
        actor,
        flags.prompt_tokens,
        flags.image_tokens,
        flags.response_tokens,
        flags.prompts,
        flags.samples,
    )
    update = lambda share: (ours(args, actor, batch, share), gradients(actor))[1]  # noqa: E731
    rest = (processor, batch, patches)
    naive = lambda only_responses: (
        padded(oracle, *rest, only_responses, flags.samples),
        gradients(oracle),
    )[1]  # noqa: E731
    expected = naive(False)
    for actual in (update(True), update(False), naive(True)):
        assert len(actual) == len(expected)
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(actual, expected))
        assert error < 1e-4, f"gradients differ by {error:.1e}"
    seconds = alternate(
        {
            "shared": lambda: update(True),
            "apart": lambda: update(False),
            "padded": lambda: naive(False),
            "kept": lambda: naive(True),
        },
        flags.repeats,
    )
    print(
        f"prompt {flags.prompt_tokens} ({flags.image_tokens} of an image), "
        f"response {flags.response_tokens}, {flags.samples} "
        f"samples of "
        f"{flags.prompts} prompts; gradients agree to {error:.0e}"
    )
    for name, value in seconds.items():
        print(
            f"  {name:7s} {value:7.3f} CPU seconds   {value / seconds['shared']:5.2f} times those of shared"
        )
    if patches:
        groups = batch.prompt_index[: flags.samples].tolist()
        grouped = [
            torch.cat([patches[g] for g in groups]),
            torch.cat([batch.prompts[g].patch_grids for g in groups]),
        ]
        oracle.setup = actor.model.setup
        tower = (
            alternate({"tower": lambda: vlm.image_features(oracle, *grouped)}, flags.repeats)[
                "tower"
            ]
            * flags.prompts
        )
        print(
            f"  of which the vision tower in padded and kept: {tower:.3f}; without it padded / shared "
            f"{(seconds['padded'] - tower) / seconds['shared']:.2f}, "
            f"kept / shared {(seconds['kept'] - tower) / seconds['shared']:.2f}"
        )


def linear(flags, args, processor, actor) -> None:
    """CPU seconds of an update per 1,000 tokens of its packed rows, for more and more prompts."""
    for prompts in (1, 2, 4, 8, 16):
        batch, _ = make_task(
            args,
            processor,
            actor,
            flags.prompt_tokens,
            flags.image_tokens,
            flags.response_tokens,
            prompts,
            flags.samples,
        )
        program = lambda: (ours(args, actor, batch, True), gradients(actor))  # noqa: E731
        tokens = prompts * flags.prompt_tokens + len(batch.tokens)
        seconds = alternate({"shared": program}, flags.repeats)["shared"]
        print(
            f"  {prompts:3d} prompts {tokens:7d} tokens {seconds:7.3f} CPU seconds  "
            f"{1000 * seconds / tokens:.4f} per 1,000 tokens"
        )


def sweep(flags, args, processor, actor, shapes) -> None:
    """CPU seconds without sharing over those with it; below 0.95 sharing should have been left."""
    for prompt_tokens, response_tokens, samples in shapes:
        prompts = max(1, round(6000 / (samples * (prompt_tokens + response_tokens))))
        batch, _ = make_task(
            args, processor, actor, prompt_tokens, 0, response_tokens, prompts, samples
        )
        programs = {
            str(share): lambda share=share: (ours(args, actor, batch, share), gradients(actor))
            for share in (True, False)
        }
        seconds = alternate(programs, flags.repeats)
        ratio = seconds["False"] / seconds["True"]
        print(
            f"  prompt {prompt_tokens:5d} response {response_tokens:5d} samples {samples:3d}  "
            f"shared {seconds['True']:.3f}  "
            f"apart {seconds['False']:.3f}  ratio {ratio:.2f}"
            + ("  <-- below 0.95" if ratio < 0.95 else ""),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=sorted(toy.PATCH_SIZE), default="qwen2_5_vl", help="family"
    )
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--prompt_tokens", type=int, default=298)
    parser.add_argument(
        "--image_tokens",
        type=int,
        default=256,
        choices=(0, 4, 16, 64, 144, 256),
        help="of the prompt's tokens",
    )
    parser.add_argument("--response_tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--pack", type=int, default=4096, help="tokens per packed row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument(
        "--shapes", type=int, default=len(SHAPES), help="of the sweep: only the first so many"
    )
    flags = parser.parse_args()
    print(machine())
    longest = max(flags.prompt_tokens, 1024)
    with tempfile.TemporaryDirectory() as folder:
        args, processor, actor, oracle = start(
            Path(folder), flags.model, flags.size, longest, max(flags.pack, longest + 1)
        )
        if flags.linear:
            linear(flags, args, processor, actor)
        elif flags.sweep:
            sweep(flags, args, processor, actor, SHAPES[: flags.shapes])
        else:
            compare(flags, args, processor, actor, oracle)


if __name__ == "__main__":
    main()
