"""Whether this machine computes what it should: a check of a few seconds at the start of a run.

Kernels of a GPU come from many hands, and one that errs does so silently. Each part that a run
relies on is therefore computed once, on the loaded model's own first layer, head and vision block,
and compared with a reference that shares no kernel with it.

    settle    checks the parts, takes another attention back-end where one fails -> Compute

Errors are relative: the norm of the difference over the norm of the reference. A bound counts what
rounding can explain, `explained`; a wrong kernel is off by 0.1 and more.

Shapes: N tokens of a packed row, Hq query heads, Hkv key heads, D numbers of a head, H hidden size,
P patches, V vocabulary.
"""

import math
import time
from collections import OrderedDict
from dataclasses import replace
from typing import Callable, Iterator, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from common import distributed, logprobs
from common.buffers import Row
from common.fsdp import shard_of
from common.process import UserError
from common.settings import ModelArgs
from common.vlm.attention import BACKENDS, DecodeAttention, PackedAttention, SlotCache
from common.vlm.families import Qwen
from common.vlm.layers import RMSNorm, RMSNormPlusOne
from common.vlm.model import decoder, hidden_states, image_features, patch_size, routers
from common.vlm.weights import Compute, use_attention, whole

# A short prompt and one that fills its slot but for one token, each with two responses; the first
# token of the first response is also decoded from the slot.
SHORT, FULL = 7, 255
SEGMENTS = [
    (0, 7, 0, 0),
    (7, 8, 0, 7),
    (8, 40, 0, 7),
    (40, 295, 40, 40),
    (295, 296, 40, 295),
    (296, 316, 40, 295),
]
TOKENS = 316
PROMPTS = {0: (0, SHORT), 2: (40, FULL)}  # slot -> first row, tokens; slots 1 and 3 are free
DECODED = [7, 0, 295, 0]  # row of the token that each slot decodes
GRIDS = [[1, 12, 8], [1, 4, 6]]  # two pictures, (1, h, w) patches
VOCABULARY = 4096  # most rows of the head, and of the embeddings
TARGETS, CHUNK = 33, 32  # so that the last chunk of the head holds one token


class Part(NamedTuple):
    """A part that was computed, here or on the rank where it was worst."""

    name: str
    error: float  # relative
    bound: float
    problem: str = ""  # what was raised instead

    @property
    def fails(self) -> bool:
        return not self.error <= self.bound


def settle(model: nn.Module, args: ModelArgs) -> Compute:
    """Check a loaded model, and agree on the attention back-end of the run: with --attention auto
    the first of `BACKENDS` that passes on every rank. All ranks must call. Returns how models
    compute from now on; this one does already.

    Raises:
        UserError: on every rank alike: a part fails for which there is no other way to compute it.
    """
    found = distributed.gather_json(model.compute.backend)
    backends = BACKENDS[max(map(BACKENDS.index, found)) :]  # a node may lack a package
    if args.attention != "auto":
        backends = backends[:1]
    wanted = args.self_check == "on"
    if args.self_check == "auto":
        wanted = model.compute.device.type == "cuda"
    if wanted:
        started = time.perf_counter()
        check = SelfCheck(model)
        require(check.parts())
        backend = first_that_passes(check, backends)
        if distributed.is_main():
            print(f"self-check: {time.perf_counter() - started:.1f} s", flush=True)
    else:
        backend = backends[0]
    model.compute = replace(model.compute, backend=backend)
    use_attention(model, backend)
    return model.compute


def first_that_passes(check: "SelfCheck", backends: tuple[str, ...]) -> str:
    """The first back-end whose parts all pass on all ranks; what fails is said."""
    for backend, following in zip(backends, (*backends[1:], None)):
        parts = worst_of_ranks(check.attention_parts(backend))
        report(f"attention by {backend}", parts)
        failing = [part for part in parts if part.fails]
        if not failing:
            break
        reason = f"attention back-end {backend} fails its self-check: {describe(failing)}"
        if following is None:
            raise UserError(f"{reason}. {ADVICE}")
        if distributed.is_main():
            print(f"warning: {reason}; taking {following}", flush=True)
    return backend


ADVICE = (
    "The run would train on wrong numbers: try another --attention, other versions of torch and "
    "flash-attn, or --dtype float32; --self_check off starts all the same"
)


def require(parts: Iterator[Part]) -> None:
    """Raises UserError on every rank if one of the parts fails on one of them."""
    worst = worst_of_ranks(parts)
    report("all but attention", worst)
    failing = [part for part in worst if part.fails]
    if failing:
        raise UserError(f"self-check: {describe(failing)}. {ADVICE}")


def worst_of_ranks(parts: Iterator[Part]) -> list[Part]:
    """Each part as it is on the rank where it is worst, the same list on every rank."""
    worst: dict[str, Part] = {}
    for found in distributed.gather_json(list(parts)):
        for part in (Part(*values) for values in found):
            before = worst.setdefault(part.name, part)
            if part.error / part.bound > before.error / before.bound:
                worst[part.name] = part
    return list(worst.values())


def report(title: str, parts: list[Part]) -> None:
    if not distributed.is_main():
        return
    print(f"self-check: {title}; relative errors, and the most that rounding explains", flush=True)
    for part in parts:
        verdict = "FAILS" if part.fails else "ok"
        print(f"  {part.name:32} {part.error:8.1e} {part.bound:8.1e}  {verdict}", flush=True)


def describe(parts: list[Part]) -> str:
    told = []
    for part in parts:
        reason = part.problem or f"error {part.error:.2g}, at most {part.bound:.2g}"
        told.append(f"{part.name}: {reason}")
    return "; ".join(told)


# -------------------------------------------------------------------------------------------------
# Measuring
# -------------------------------------------------------------------------------------------------


def explained(dtype: torch.dtype, roundings: int, terms: float = 1.0, scale: float = 1.0) -> float:
    """The relative error that rounding explains: of ``roundings`` to ``dtype`` at most half its
    epsilon each, and of sums in float32 of ``terms`` numbers their square root in epsilons.

    Rounding errors rarely add up: what is measured is a third of this, and less.

    Args:
        scale: by how much the sums' errors grow, as scores do in the exponent of a softmax.
    """
    of_sums = math.sqrt(terms) * scale * torch.finfo(torch.float32).eps
    return roundings * torch.finfo(dtype).eps / 2 + of_sums


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Infinite where a number is not finite or the shape is another."""
    if found.shape != expected.shape:
        return math.inf
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    size = float(expected.norm())
    error = float((found - expected).norm()) / (size or 1.0)
    return error if math.isfinite(error) else math.inf


def measure(bounds: dict[str, float], compute: Callable[[], tuple]) -> Iterator[Part]:
    """The parts of ``bounds``, from pairs (found, expected) that ``compute`` returns in this
    order. A kernel may raise anything; it then fails with what it said."""
    try:
        pairs = compute()
        errors = [relative_error(*pair) for pair in pairs]
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('.')}"
        yield from (Part(name, math.inf, bound, said) for name, bound in bounds.items())
        return
    for (name, bound), error in zip(bounds.items(), errors, strict=True):
        yield Part(name, error, bound)


def gradients(out: Tensor, inputs: tuple[Tensor, ...], upstream: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, upstream.to(out))


# -------------------------------------------------------------------------------------------------
# The parts
# -------------------------------------------------------------------------------------------------


class SelfCheck:
    """The first layers of a model in the compute type (`low`) and, from the same rounded weights,
    in float32 (`high`). All ranks must build one: sharded weights are gathered."""

    def __init__(self, model: nn.Module):
        self.model, self.dtype, self.device = model, model.compute.dtype, model.compute.device
        self.generator = torch.Generator().manual_seed(0)  # of the CPU: the same on any machine
        language = decoder(model)
        wide = {id(language.get_input_embeddings().weight)}
        if model.lm_head is not None:
            wide.add(id(model.lm_head.weight))

        @torch.no_grad()
        def lowered(parameter: Tensor) -> Tensor:
            if id(parameter) in wide:  # too large to gather: this rank's own rows serve as well
                rows = shard_of(parameter)[:VOCABULARY]
                own = rows if len(rows) else rows.new_ones(1, *rows.shape[1:])
            else:
                own = whole(parameter)
            return own.detach().to(self.dtype)

        self.low = first_layers(model, lowered)
        self.high = first_layers(self.low, Tensor.float)
        self.text = model.config.get_text_config()
        self.row = self.make_row()

    def random(self, *shape: int) -> Tensor:
        """Normal numbers, rounded to the compute type."""
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def make_row(self) -> Row:
        """Random tokens in the segments."""
        rows = len(decoder(self.low).get_input_embeddings().weight)
        ids = torch.randint(rows, (1, TOKENS), generator=self.generator)
        positions = torch.zeros(TOKENS, dtype=torch.int64)
        for start, end, prefix_start, prefix_end in SEGMENTS:
            first = prefix_end - prefix_start
            positions[start:end] = torch.arange(first, first + end - start)
        positions = positions.expand(3, 1, -1)
        return Row(input_ids=ids.to(self.device), positions=positions.to(self.device))

    def parts(self) -> Iterator[Part]:
        """What does not depend on the attention back-end."""
        yield from self.norm()
        yield from self.first_layer()
        if self.model.lm_head is not None:
            yield from self.head()
            yield from self.head_without_rows()
        if self.has_patches():
            yield from self.patch_embedding()

    def attention_parts(self, backend: str) -> Iterator[Part]:
        """What depends on it."""
        yield from self.attention(backend)
        if self.has_patches():
            yield from self.vision(backend)

    def has_patches(self) -> bool:
        family = self.model.family
        return isinstance(family, Qwen) and self.model.model.visual is not None

    # Norm and first layer

    def norm(self) -> Iterator[Part]:
        """The first norm of the decoder, forward and backward, against its formula."""
        norm = next((m for m in decoder(self.low).modules() if isinstance(m, RMSNorm)), None)
        if norm is None:
            return
        x = self.random(TOKENS, len(norm.weight)).requires_grad_()
        upstream = self.random(*x.shape)
        exact = x.detach().double().requires_grad_()
        weight = norm.weight.double() + float(isinstance(norm, RMSNormPlusOne))
        expected = exact * (exact.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weight

        def compute():
            out = norm(x)
            (found,) = gradients(out, (x,), upstream)
            return (out, expected), (found, gradients(expected, (exact,), upstream)[0])

        yield from measure(
            {
                "norm": explained(self.dtype, 2, len(norm.weight)),
                "norm, backward": explained(self.dtype, 6, len(norm.weight)),
            },
            compute,
        )

    def first_layer(self) -> Iterator[Part]:
        """Queries, keys and values of the first layer, and what follows from the same attention.
        Keeps what the layer hands to its attention. Of experts rounding may choose others."""
        low, high = NaiveAttention(), NaiveAttention()

        def compute():
            with torch.no_grad():
                out = hidden_states(self.low, replace(self.row, attention=low))
                high.given = low.given
                expected = hidden_states(self.high, replace(self.row, attention=high))
            pairs = zip(low.seen[0], high.seen[0], strict=True)
            return *pairs, (out, out if routers(self.model) else expected)

        size = self.text.hidden_size
        names = ("first layer, queries", "first layer, keys", "first layer, values")
        bounds = {name: explained(self.dtype, 12, size) for name in names}
        yield from measure(bounds | {"first layer": explained(self.dtype, 24, size)}, compute)
        self.seen = getattr(low, "seen", None)  # where the layer raised, the run ends

    # Head

    def head(self) -> Iterator[Part]:
        """Log-probs of the chunked head, whose products have float32 results, and its gradients."""
        weight = self.low.lm_head.weight.clone().requires_grad_()  # (V', H)
        hidden = self.random(TARGETS, weight.shape[1]).requires_grad_()
        targets = torch.randint(len(weight), (TARGETS,), generator=self.generator)
        targets = targets.to(self.device)
        upstream = torch.randn(TARGETS, generator=self.generator).to(self.device)
        exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        logits = exact[0] @ exact[1].t()
        expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

        def compute():
            logp, _ = logprobs.linear_logprobs(hidden, weight, targets, chunk=CHUNK)
            found = gradients(logp, (hidden, weight), upstream)
            truth = gradients(expected, tuple(exact), upstream)
            return (logp, expected), *zip(found, truth, strict=True)

        # An exponential turns the absolute error of a logit into a relative one. Sums of tensor
        # cores cut off what they do not keep, so errors grow with their length, not with its root.
        largest = max(1.0, float(logits.detach().abs().max()))
        of_sums = explained(torch.float32, 0, weight.shape[1] ** 2, largest)
        of_gradients = explained(self.dtype, 6) + of_sums
        yield from measure(
            {
                "head": of_sums,
                "head, gradient of its input": of_gradients,
                "head, gradient of its weight": of_gradients,
            },
            compute,
        )

    def head_without_rows(self) -> Iterator[Part]:
        """A rank without responses: nothing comes out, and the gradients are zeros."""
        weight = self.low.lm_head.weight.clone().requires_grad_()
        hidden = self.random(0, weight.shape[1]).requires_grad_()

        def compute():
            targets = torch.zeros(0, dtype=torch.int64, device=self.device)
            logp, entropy = logprobs.linear_logprobs(hidden, weight, targets, entropy=True)
            found = gradients(logp + entropy, (hidden, weight), logp)
            return (logp, logp.new_zeros(0)), (found[1], torch.zeros_like(weight))

        exact = torch.finfo(torch.float32).tiny
        yield from measure({"head of no rows": exact, "head of no rows, gradient": exact}, compute)

    # Attention

    def attention(self, backend: str) -> Iterator[Part]:
        """Packed rows with shared prompts, forward and backward, and decoding from a short slot and
        a full one, on the first layer's own queries, keys and values."""
        inputs, scale, window = self.seen
        upstream = self.random(1, TOKENS, inputs[0].shape[1], inputs[0].shape[3])
        exact = tuple(x.double().requires_grad_() for x in inputs)
        expected, largest, cancelled = naive_attention(*exact, scale, window, upstream.double())
        truth = gradients(expected, exact, upstream)

        def compute():
            ours = tuple(x.clone().requires_grad_() for x in inputs)
            packed = PackedAttention(SEGMENTS, backend, self.device)
            out = packed(0, *ours, scale, window)  # (1, N, Hq, D)
            found = gradients(out, ours, upstream)
            decoded = self.decode(backend)  # (1, slots, Hq, D)
            pairs = [(out, expected), *zip(found, truth, strict=True)]
            for slot in PROMPTS:
                pairs.append((decoded[:, slot], expected[:, DECODED[slot]]))
            return tuple(pairs)

        # Queries and keys multiply and are summed, and so are values; a score's error becomes a
        # factor of its probability.
        terms = inputs[0].shape[3] + FULL
        forward = explained(self.dtype, 4, terms, max(1.0, largest))
        backward = explained(self.dtype, 12, terms, max(1.0, largest))
        bounds = {"packed rows": forward}
        for name, total, gradient in zip("qk", cancelled, truth):
            growth = max(1.0, float(total.norm() / gradient.norm()))
            bounds[f"packed rows, gradient of {name}"] = min(0.5, backward * growth)
        bounds["packed rows, gradient of v"] = backward
        bounds |= {"decoding, short slot": forward, "decoding, full slot": forward}
        yield from measure(bounds, compute)

    @torch.no_grad()
    def decode(self, backend: str) -> Tensor:
        """(1, slots, Hq, D): the prompts are stored by a packed row, the first token behind each is
        decoded. What no token may see is large."""
        inputs, scale, window = self.seen
        cache = SlotCache(self.text, len(DECODED), FULL + 1, self.dtype, self.device)
        cache.keys.fill_(1e3)
        cache.values.fill_(1e3)
        rows, slots, places = [], [], []
        lengths = torch.zeros(len(DECODED), dtype=torch.int64)
        for slot, (first, count) in PROMPTS.items():
            rows.append(torch.arange(first, first + count))
            slots.append(torch.full((count,), slot))
            places.append(torch.arange(count))
            lengths[slot] = count
        plan = tuple(torch.cat(part).to(self.device) for part in (rows, slots, places))
        PackedAttention(SEGMENTS, backend, self.device, cache, plan)(0, *inputs, scale, window)
        step = DecodeAttention(cache, lengths.to(self.device), FULL + 1, backend)
        return step(0, *(x[:, :, DECODED] for x in inputs), scale, window)

    # Vision

    def patch_embedding(self) -> Iterator[Part]:
        """Against a convolution on the CPU, where no cuDNN is."""
        projection, exact = (copy.model.visual.patch_embed.proj for copy in (self.low, self.high))
        size = exact.weight.shape[1:]  # (3, deep, side, side)
        x = self.random(sum(math.prod(grid) for grid in GRIDS), *size)
        bias = None if exact.bias is None else exact.bias.cpu()
        expected = F.conv3d(x.float().cpu(), exact.weight.cpu(), bias, stride=size[1:]).flatten(1)
        bound = explained(self.dtype, 2, math.prod(size))
        yield from measure({"patch embedding": bound}, lambda: ((projection(x), expected),))

    def vision(self, backend: str) -> Iterator[Part]:
        """Two pictures through the tower's first block and the projector, forward and backward."""
        patches = sum(math.prod(grid) for grid in GRIDS)
        x = self.random(patches, patch_size(self.low)).requires_grad_()
        upstream = self.random(patches // 4, self.text.hidden_size)

        def features(copy: nn.Module, backend: str) -> tuple[Tensor, Tensor]:
            use_attention(copy, backend)
            out = image_features(copy, x, torch.tensor(GRIDS))  # (K, M, H)
            return out, gradients(out, (x,), upstream.expand_as(out))[0]

        def compute():
            found = features(self.low, backend)
            return tuple(zip(found, features(self.high, "sdpa"), strict=True))

        size = self.model.config.vision_config.hidden_size
        yield from measure(
            {
                "vision block": explained(self.dtype, 24, size),
                "vision block, backward": explained(self.dtype, 48, size),
            },
            compute,
        )


# -------------------------------------------------------------------------------------------------
# References
# -------------------------------------------------------------------------------------------------


def first_layers(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a module with converted weights, of lists of layers only the first, and without
    what FSDP2 hung on it. It shares all else, and computes gradients of its vision tower."""
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    copy = object.__new__(kind)
    children = list(module._modules.items())
    if isinstance(module, nn.ModuleList):
        children = children[:1]
    own = {name: None if p is None else convert(p) for name, p in module._parameters.items()}
    below = {name: None if m is None else first_layers(m, convert) for name, m in children}
    vars(copy).update(
        vars(module),
        _parameters=own,
        _modules=below,
        _forward_hooks=OrderedDict(),
        _forward_pre_hooks=OrderedDict(),
        training=False,
        trains_vision=True,
    )
    return copy


class NaiveAttention:
    """Attention of the row of `SEGMENTS` as it is defined.

    Attributes:
        seen: what it was called with: (q, k, v), scale, window.
        given: its output; where set before the call, returned instead.
    """

    def __init__(self):
        self.given: Tensor | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        self.seen = (q, k, v), scale, window
        if self.given is None:
            self.given, *_ = naive_attention(q.double(), k.double(), v.double(), scale, window)
        return self.given.to(q.dtype)


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    upstream: Tensor | None = None,
) -> tuple[Tensor, float, tuple[Tensor, Tensor]]:
    """q (1, Hq, N, D), k and v (1, Hkv, N, D), all float64 -> (1, N, Hq, D), one segment after the
    other; the largest absolute score; and, with the gradient ``upstream`` of the output, what the
    gradients of q and k would be, per query head, if nothing in their sums cancelled."""
    k, v = (x[0].repeat_interleave(q.shape[1] // k.shape[1], dim=0) for x in (k, v))  # (Hq, N, D)
    q = q[0]  # (Hq, N, D)
    outputs, largest = [], 0.0
    of_q, of_k = torch.zeros_like(q), torch.zeros_like(k)
    for start, end, prefix_start, prefix_end in SEGMENTS:
        rows = [*range(prefix_start, prefix_end), *range(start, end)]
        # how far behind its query each key is; below 0 it is ahead
        behind = torch.arange(end - start)[:, None] - torch.arange(len(rows))[None]
        behind += prefix_end - prefix_start
        hidden = (behind < 0) | (behind >= (window or TOKENS))
        scores = q[:, start:end] @ k[:, rows].transpose(1, 2) * scale
        largest = max(largest, float(scores.detach().abs().max()))
        probabilities = scores.masked_fill(hidden.to(q.device), -math.inf).softmax(-1)
        outputs.append(probabilities @ v[:, rows])  # (Hq, L, D)
        if upstream is not None:
            with torch.no_grad():
                # The gradient of a score is p (dp - sum of p dp).
                dp = upstream[0, start:end].transpose(0, 1) @ v[:, rows].transpose(1, 2)
                total = (probabilities * dp).sum(-1, keepdim=True).abs()
                sums = probabilities * (dp.abs() + total) * scale  # (Hq, L, keys)
                of_q[:, start:end] += sums @ k[:, rows].abs()
                of_k[:, rows] += sums.transpose(1, 2) @ q[:, start:end].abs()
    return torch.cat(outputs, dim=1).transpose(0, 1)[None], largest, (of_q, of_k)
