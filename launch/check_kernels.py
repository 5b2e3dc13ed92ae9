"""Do this machine's kernels compute what they should? Prints a table of errors and bounds, and PASS or
FAIL, within seconds.

    python launch/check_kernels.py [--dtype bfloat16] [--attention flash_attn] [--head_dim 128] [--heads 28] [--kv_heads 4]
        [--train_vision]

Kernels come from many sources, and a wrong one errs silently: sampler and trainer may share the fault,
which no metric of a run would show. So each back-end computes attention of packs that share prompts,
decoding from slots, attention of a vision tower, the delta rule of linear attention and the output
head, forward and backward. Each is compared with its definition in float64 on the CPU.

An error is relative: the norm of the difference over the norm of the reference. A bound is what
rounding can explain; a wrong kernel is off by 0.1 or more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder

from common.ground import versions
from common.ground.files import UserError

versions.check()


import argparse
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.logprobs import linear_logprobs
from common.model import attention
from common.model.attention import (
    BACKENDS,
    REPLACEMENTS,
    DecodeAttention,
    PackedAttention,
    SlotCache,
    choose_backend,
    own_kernels,
)
from common.model.linear_attention import PackedDelta
from launch import tool

# A short prompt, and one that fills its slot except for one token, each with two responses, the first
# of one token.
SEGMENTS = [
    (0, 7, 0, 0),
    (7, 8, 0, 7),
    (8, 40, 0, 7),
    (40, 295, 40, 40),
    (295, 296, 40, 295),
    (296, 316, 40, 295),
]
# tokens of the first prompt; place and tokens of the second; of all
SHORT, SECOND, FULL, TOKENS = 7, 40, 255, 316
DECODED = [7, 295]  # places of the tokens that are decoded as well
HIDDEN, ROWS, TARGETS = 1024, 4096, 33  # of the head; its last chunk of 32 holds one token
DELTA_HEADS, DELTA_DIM = 4, 128


class Part(NamedTuple):
    """What a back-end computes, and what it should."""

    computed: Callable  # of the inputs
    expected: Callable  # of the inputs in float64 on the CPU: its definition
    inputs: dict[str, Tensor]
    bounds: tuple[float, float]  # of the error of the output, and of each gradient
    trained: bool = True  # whether there are gradients


def main(argv: list[str] | None = None) -> list[str]:
    """Print errors and bounds. Returns a line for each part that fails, with the flag that avoids it."""
    parser = tool.parser(__doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16" if on_gpu else "float32"
    )
    names = (*BACKENDS, *REPLACEMENTS)
    parser.add_argument("--attention", choices=names, nargs="*", default=names)
    for name, value in (("heads", 28), ("kv_heads", 4), ("head_dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--train_vision", action="store_true", help="the backward of vision towers as well"
    )
    args = parser.parse_args(argv)
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), getattr(torch, args.dtype)
    failing = []
    for backend in args.attention:
        try:
            chosen = choose_backend(backend, device, dtype)
        except UserError as error:
            print(f"without {backend}: {error}")
            continue
        print(f"{backend} on {device}, {args.dtype}: error, and what rounding explains at most")
        for name, part in Check(args, chosen, device, dtype).parts().items():
            if not passes(name, part):
                failing.append(
                    f"{backend} fails in: {name}; what avoids it: {remedy(backend, name)}"
                )
    print(*failing, "FAIL" if failing else "PASS", sep="\n")
    return failing


def remedy(backend: str, part: str) -> str:
    """The flag of a run that does without a part of a back-end."""
    others = "--attention " + " or ".join(name for name in BACKENDS if name != backend)
    special = {
        "vision trained": f"no --train_vision, or {others}",
        "delta rule": "pip uninstall fla-core",
        "head": "--dtype float32",
    }
    return special.get(part, others)


# ----------------------------------------------------------------------------------------------------------------------
# Measuring
# ----------------------------------------------------------------------------------------------------------------------


def passes(name: str, part: Part) -> bool:
    """Print the errors of a part, and return whether all are within its bounds. A kernel may raise
    anything, which counts as an error, too."""
    results = ["", *(f", gradient of {letter}" for letter in part.inputs)]
    run = with_gradients if part.trained else outputs
    try:
        computed = run(part.computed, part.inputs.values())
        expected = run(part.expected, [x.double().cpu() for x in part.inputs.values()])
    except Exception as error:
        print(f"  {name:32} {type(error).__name__}: {error}  FAILS")
        return False
    passed = True
    for i, (result, here, there) in enumerate(zip(results, computed, expected)):
        error, bound = relative_error(here, there), part.bounds[i > 0]
        right = error <= bound  # false for NaN
        print(f"  {name + result:32} {error:8.1e} {bound:8.1e}  {'ok' if right else 'FAILS'}")
        passed = passed and right
    return passed


def explained(dtype: torch.dtype, roundings: int, terms: float = 1.0) -> float:
    """The relative error that rounding explains: at most half an epsilon for each of ``roundings``
    to ``dtype``, and the root of ``terms`` epsilons for sums in float32. Errors rarely add up:
    measured ones are a third of this, or less."""
    return (
        roundings * torch.finfo(dtype).eps / 2 + math.sqrt(terms) * torch.finfo(torch.float32).eps
    )


def relative_error(computed: Tensor, expected: Tensor) -> float:
    computed, expected = (x.detach().double().cpu() for x in (computed, expected))
    return float((computed - expected).norm() / expected.norm())


def outputs(function: Callable, inputs: Iterable[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [function(*inputs)]


def with_gradients(function: Callable, inputs: Iterable[Tensor]) -> list[Tensor]:
    """The output of a function, and the gradients of its inputs; the gradient of the output depends on
    its shape alone."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad(out, inputs, upstream.bfloat16().to(out))]


# ----------------------------------------------------------------------------------------------------------------------
# Parts
# ----------------------------------------------------------------------------------------------------------------------


class Check:
    """One attention back-end on one device, in one type."""

    def __init__(
        self, args: argparse.Namespace, backend: str, device: torch.device, dtype: torch.dtype
    ):
        self.args, self.backend, self.device, self.dtype = args, backend, device, dtype
        self.generator = torch.Generator().manual_seed(0)  # of the CPU: the same on any machine
        self.scale = args.head_dim**-0.5
        heads = {"q": args.heads, "k": args.kv_heads, "v": args.kv_heads}
        self.qkv = {
            name: self.random(1, count, TOKENS, args.head_dim) for name, count in heads.items()
        }
        # A score is a sum over D, its error becomes a factor of its probability, and a sum over keys follows.
        sums = (args.head_dim + FULL) * 16.0
        self.bounds = explained(dtype, 4, sums), explained(dtype, 12, sums)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers, rounded to the type."""
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def parts(self) -> dict[str, Part]:
        """What is checked, by name."""
        parts = {
            "packs": self.packs(None),
            "packs, window": self.packs(24),
            "decoding, short slot": self.decoding(0),
            "decoding, full slot": self.decoding(1),
            "delta rule": self.delta_rule(),
            "head": self.head(),
        }
        if self.backend != "sdpa":  # with sdpa, the tower is transformers' own
            # a frozen tower needs only the forward
            parts["vision"] = self.vision(trained=False)
            if self.args.train_vision:
                parts["vision trained"] = self.vision(trained=True)
        return parts

    def packs(self, window: int | None) -> Part:
        def computed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (1, N, Hq, D)
            pack = PackedAttention(SEGMENTS, self.backend, self.device)
            return pack(0, q, k, v, self.scale, window)

        def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return naive_attention(q, k, v, self.scale, visible(window))

        return Part(computed, expected, self.qkv, self.bounds)

    def decoding(self, slot: int) -> Part:
        def computed(*qkv: Tensor) -> Tensor:
            with own_kernels():  # as in rollouts
                return self.decode(*qkv)[:, slot]

        def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return naive_attention(q, k, v, self.scale, visible(None))[:, DECODED[slot]]

        return Part(computed, expected, self.qkv, self.bounds, trained=False)

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A pack stores both prompts, and the token after each is decoded, (1, 2, Hq, D). Entries that it
        must not see are large."""
        text = SimpleNamespace(
            num_hidden_layers=1, num_key_value_heads=self.args.kv_heads, head_dim=self.args.head_dim
        )
        cache = SlotCache(text, 2, FULL + 1, self.dtype, self.device, self.backend)
        for part in (*cache.keys, *cache.values):
            part.fill_(1e3)
        places = torch.tensor([*range(SHORT), *range(SECOND, SECOND + FULL)], device=self.device)
        slots = (places >= SECOND).long()
        plan = places, slots, places - SECOND * slots
        pack = PackedAttention(SEGMENTS, self.backend, self.device, cache, plan)
        pack(0, q, k, v, self.scale)
        step = DecodeAttention(
            cache, torch.tensor([SHORT, FULL], device=self.device), FULL + 1, self.backend
        )
        last_q, last_k, last_v = (x[:, :, DECODED] for x in (q, k, v))
        return step(0, last_q, last_k, last_v, self.scale)

    def vision(self, trained: bool) -> Part:
        """Windows of a tower: every patch sees its own window in both directions."""
        bounds = torch.tensor([0, 16, 80, TOKENS], dtype=torch.int32, device=self.device)
        longest = TOKENS - 80
        sizes = {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        call = attention.AttentionInterface()[attention.VISION_ATTENTION_NAME + self.backend]
        window = torch.bucketize(torch.arange(TOKENS), bounds[1:-1].cpu(), right=True)
        seen = window[:, None] == window

        def computed(*qkv: Tensor) -> Tensor:
            return call(None, *qkv, None, scaling=80**-0.5, **sizes)[0]

        def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return naive_attention(q, k, v, 80**-0.5, seen)

        qkv = {name: self.random(1, 16, TOKENS, 80) for name in "qkv"}
        return Part(computed, expected, qkv, self.bounds, trained)

    def delta_rule(self) -> Part:
        """States that fade slowly, against plain torch in float32 on the CPU. Decoding is plain
        torch itself."""
        shape = TOKENS, DELTA_HEADS
        keys = {name: self.random(TOKENS, DELTA_HEADS // 2, DELTA_DIM) for name in "qk"}
        inputs = keys | {"v": self.random(*shape, DELTA_DIM)}
        inputs["decay"] = self.random(*shape).float().exp() * -0.05
        inputs["strength"] = self.random(*shape).sigmoid()

        def computed(*x: Tensor) -> Tensor:  # (N, Hv, Dv)
            return PackedDelta(SEGMENTS, self.device).recur(0, *x)

        def expected(*x: Tensor) -> Tensor:
            return PackedDelta(SEGMENTS, torch.device("cpu")).recur(
                0, *(part.float() for part in x)
            )

        bounds = explained(self.dtype, 8, FULL), explained(self.dtype, 16, FULL**2)
        return Part(computed, expected, inputs, bounds)

    def head(self) -> Part:
        """Log-probs of the chunked head, whose products have float32 results, and their gradients."""
        targets = torch.randint(ROWS, (TARGETS,), generator=self.generator)

        def computed(x: Tensor, weight: Tensor) -> Tensor:
            return linear_logprobs(x, weight, targets.to(self.device), chunk=32)[0]

        def expected(x: Tensor, weight: Tensor) -> Tensor:
            return -F.cross_entropy(x @ weight.t(), targets, reduction="none")

        inputs = {
            "its input": self.random(TARGETS, HIDDEN),
            "its weight": self.random(ROWS, HIDDEN) / HIDDEN**0.5,
        }
        # Tensor cores truncate in sums, so errors grow with their length.
        of_sums = explained(torch.float32, 0, HIDDEN**2)
        return Part(computed, expected, inputs, (of_sums, explained(self.dtype, 6) + of_sums))


# ----------------------------------------------------------------------------------------------------------------------
# References
# ----------------------------------------------------------------------------------------------------------------------


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Attention by its definition: q (1, Hq, N, D), k and v (1, Hkv, N, D), seen (N, N) bool -> (1,
    N, Hq, D)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def visible(window: int | None) -> Tensor:
    """(N, N) bool: which keys each query of `SEGMENTS` sees."""
    seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    place = torch.zeros(TOKENS, dtype=torch.int64)
    for start, end, prefix_start, prefix_end in SEGMENTS:
        seen[start:end, prefix_start:prefix_end] = True
        seen[start:end, start:end] = True
        place[start:end] = torch.arange(end - start) + prefix_end - prefix_start
    distance = place[:, None] - place
    return seen & (distance >= 0) & (distance < (window or TOKENS))


if __name__ == "__main__":
    sys.exit(bool(main()))
