"""Do this machine's kernels compute what they should? A table of errors and bounds, PASS or FAIL; seconds.

    python launch/check_kernels.py [--dtype bfloat16] [--attention flash_attn] [--head_dim 128] [--heads 28] [--kv_heads 4]
        [--train_vision]

Kernels of a GPU come from many hands, and one that errs does so silently: sampler and trainer may share the fault, and
nothing in a run's metrics would show it. Attention of packs that share prompts, decoding from slots, attention of a vision
tower, the delta rule of linear attention and the output head are therefore computed by each back-end, forward and backward,
and compared with their definitions in float64 on the CPU.

An error is relative: the norm of the difference over the norm of the reference. A bound counts what rounding can explain; a
wrong kernel is off by 0.1 and more.
"""

import argparse
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from common.logprobs import linear_logprobs
from common.model import attention
from common.model.attention import (
    BACKENDS,
    DecodeAttention,
    PackedAttention,
    SlotCache,
    choose_backend,
)
from common.model.linear_attention import PackedDelta

# A short prompt, and one that fills its slot but for one token, each with two responses, the first of one token.
SEGMENTS = [(0, 7, 0, 0), (7, 8, 0, 7), (8, 40, 0, 7), (40, 295, 40, 40), (295, 296, 40, 295), (296, 316, 40, 295)]
SHORT, SECOND, FULL, TOKENS = 7, 40, 255, 316  # tokens of the first prompt; place and tokens of the second; of all
DECODED = [7, 295]  # places of the tokens that are decoded as well
HIDDEN, ROWS, TARGETS = 1024, 4096, 33  # of the head; its last chunk of 32 holds one token
DELTA_HEADS, DELTA_DIM = 4, 128

Checked = Iterator[tuple[str, Tensor, Tensor, float]]  # name, computed, expected, bound


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--attention", choices=BACKENDS, nargs="*", default=BACKENDS)
    for name, value in (("heads", 28), ("kv_heads", 4), ("head_dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--train_vision", action="store_true", help="the backward of vision towers as well")
    args = parser.parse_args(argv)
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), getattr(torch, args.dtype)
    failing: dict[tuple[str, str], None] = {}  # (back-end, part), in the order found
    for backend in args.attention:
        try:
            choose_backend(backend, device, dtype)
        except ValueError as error:
            print(f"without {backend}: {error}")
            continue
        print(f"{backend} on {device}, {args.dtype}: error, and what rounding explains at most")
        for part, name, error, bound in Check(args, backend, device, dtype).measure():
            right = error <= bound
            if not right:
                failing[backend, part] = None
            print(f"  {name:32} {error:8.1e} {bound:8.1e}  {'ok' if right else 'FAILS'}")
    for backend, part in failing:
        print(f"{backend} fails in: {part}; what avoids it: {remedy(backend, part)}")
    print("FAIL" if failing else "PASS")
    return int(bool(failing))


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


def explained(dtype: torch.dtype, roundings: int, terms: float = 1.0) -> float:
    """The relative error that rounding explains: at most half an epsilon for each of ``roundings`` to ``dtype``, and the
    root of ``terms`` epsilons for sums in float32. Errors rarely add up: what is measured is a third of this, and less."""
    return roundings * torch.finfo(dtype).eps / 2 + math.sqrt(terms) * torch.finfo(torch.float32).eps


def relative_error(computed: Tensor, expected: Tensor) -> float:
    """Not a number, which is below no bound, where one of the results is none."""
    computed, expected = (x.detach().double().cpu() for x in (computed, expected))
    return float((computed - expected).norm() / expected.norm())


def with_gradients(function: Callable, inputs: Iterable[Tensor]) -> list[Tensor]:
    """The output of a function, and gradients of its inputs; what comes from above depends on the output's shape alone."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad(out, inputs, upstream.bfloat16().to(out))]


def on_host(inputs: list[Tensor]) -> list[Tensor]:
    return [x.double().cpu() for x in inputs]


def compare(name: str, letters: Iterable[str], inputs: list[Tensor], function: Callable, reference: Callable,
            bounds: tuple[float, float], run: Callable = with_gradients) -> Checked:
    """A function against its reference in float64; ``bounds``: of the output, of each gradient."""
    names = [name, *(f"{name}, gradient of {letter}" for letter in letters)]
    bound, of_gradients = bounds
    yield from zip(names, run(function, inputs), run(reference, on_host(inputs)), [bound, *[of_gradients] * len(inputs)])


# ----------------------------------------------------------------------------------------------------------------------
# Parts
# ----------------------------------------------------------------------------------------------------------------------


class Check:
    """One attention back-end on one device, in one type."""

    def __init__(self, args: argparse.Namespace, backend: str, device: torch.device, dtype: torch.dtype):
        self.args, self.backend, self.device, self.dtype = args, backend, device, dtype
        self.generator = torch.Generator().manual_seed(0)  # of the CPU: the same on any machine
        self.scale = args.head_dim**-0.5
        heads = (args.heads, args.kv_heads, args.kv_heads)
        self.qkv = [self.random(1, count, TOKENS, args.head_dim) for count in heads]
        # A score is a sum over D, its error becomes a factor of its probability, and a sum over keys follows.
        self.sums = (args.head_dim + FULL) * 16.0

    def random(self, *shape: int) -> Tensor:
        """Normal numbers, rounded to the type."""
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def measure(self) -> Iterator[tuple[str, str, float, float]]:
        """Each part, what was compared in it, its error, and its bound. A kernel may raise anything: that is an infinite
        error."""
        parts = {"packs": self.packs(None), "packs, window": self.packs(24), "decoding": self.decoding(),
                 "delta rule": self.delta_rule(), "head": self.head()}
        if self.backend != "sdpa":  # whose tower is transformers' own
            parts["vision"] = self.vision("vision", lambda function, qkv: [function(*qkv)])
            if self.args.train_vision:
                parts["vision trained"] = self.vision("vision trained", with_gradients)
        for part, checked in parts.items():
            try:
                for name, computed, expected, bound in checked:
                    yield part, name, relative_error(computed, expected), bound
            except Exception as error:
                print(f"  {part}: {type(error).__name__}: {error}")
                yield part, part, math.inf, 1.0

    def attention_bounds(self) -> tuple[float, float]:
        return explained(self.dtype, 4, self.sums), explained(self.dtype, 12, self.sums)

    def packs(self, window: int | None) -> Checked:
        packed = PackedAttention(SEGMENTS, self.backend, self.device)
        name = f"packs, window {window}" if window else "packs"
        yield from compare(name, "qkv", self.qkv, lambda *x: packed(0, *x, self.scale, window),  # (1, N, Hq, D)
                           lambda *x: naive_attention(*x, self.scale, visible(window)), self.attention_bounds())

    @torch.no_grad()
    def decoding(self) -> Checked:
        """Both prompts are stored by a pack, and the token after each is decoded. What it may not see is large."""
        text = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=self.args.kv_heads, head_dim=self.args.head_dim)
        cache = SlotCache(text, 2, FULL + 1, self.dtype, self.device, self.backend)
        cache.keys.fill_(1e3)
        cache.values.fill_(1e3)
        places = torch.tensor([*range(SHORT), *range(SECOND, SECOND + FULL)], device=self.device)
        slots = (places >= SECOND).long()
        plan = places, slots, places - SECOND * slots
        PackedAttention(SEGMENTS, self.backend, self.device, cache, plan)(0, *self.qkv, self.scale)
        step = DecodeAttention(cache, torch.tensor([SHORT, FULL], device=self.device), FULL + 1, self.backend)
        decoded = step(0, *[x[:, :, DECODED] for x in self.qkv], self.scale)  # (1, 2, Hq, D)
        expected = naive_attention(*on_host(self.qkv), self.scale, visible(None))
        for i, slot in enumerate(("short", "full")):
            yield f"decoding, {slot} slot", decoded[:, i], expected[:, DECODED[i]], explained(self.dtype, 4, self.sums)

    def vision(self, name: str, run: Callable) -> Checked:
        """Windows of a tower: every patch sees its own window in both directions. ``run``: `with_gradients`, or the forward
        alone, which is all that a frozen tower needs."""
        bounds = torch.tensor([0, 16, 80, TOKENS], dtype=torch.int32, device=self.device)
        longest = TOKENS - 80
        sizes = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        call = attention.AttentionInterface()[attention.VISION_ATTENTION_NAME + self.backend]
        qkv = [self.random(1, 16, TOKENS, 80) for _ in range(3)]
        window = torch.bucketize(torch.arange(TOKENS), bounds[1:-1].cpu(), right=True)
        seen = window[:, None] == window
        yield from compare(name, "qkv", qkv, lambda *x: call(None, *x, None, scaling=80**-0.5, **sizes)[0],
                           lambda *x: naive_attention(*x, 80**-0.5, seen), self.attention_bounds(), run)

    def delta_rule(self) -> Checked:
        """States that fade slowly, against plain torch in float32 on the CPU. Decoding is plain torch itself."""
        shape = TOKENS, DELTA_HEADS
        inputs = [self.random(*shape, DELTA_DIM) for _ in "qkv"]
        inputs += [self.random(*shape).float().exp() * -0.05, self.random(*shape).sigmoid()]
        here, host = PackedDelta(SEGMENTS, self.device), PackedDelta(SEGMENTS, torch.device("cpu"))
        bounds = explained(self.dtype, 8, FULL), explained(self.dtype, 16, FULL**2)
        names = ("q", "k", "v", "decay", "strength")
        yield from compare("delta rule", names, inputs, lambda *x: here.recur(0, *x),  # (N, Hv, Dv)
                           lambda *x: host.recur(0, *(part.float() for part in x)), bounds)

    def head(self) -> Checked:
        """Log-probs of the chunked head, whose products have float32 results, and their gradients."""
        inputs = [self.random(TARGETS, HIDDEN), self.random(ROWS, HIDDEN) / HIDDEN**0.5]
        targets = torch.randint(ROWS, (TARGETS,), generator=self.generator)
        there = targets.to(self.device)
        # Tensor cores cut off what a sum does not keep, so that errors grow with its length.
        of_sums = explained(torch.float32, 0, HIDDEN**2)
        bounds = of_sums, explained(self.dtype, 6) + of_sums
        yield from compare("head", ("its input", "its weight"), inputs,
                           lambda *x: linear_logprobs(*x, there, chunk=32)[0],
                           lambda x, w: -F.cross_entropy(x @ w.t(), targets, reduction="none"), bounds)


# ----------------------------------------------------------------------------------------------------------------------
# References
# ----------------------------------------------------------------------------------------------------------------------


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Attention by its definition: q (1, Hq, N, D), k and v (1, Hkv, N, D), seen (N, N) bool -> (1, N, Hq, D)."""
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
    sys.exit(main())
