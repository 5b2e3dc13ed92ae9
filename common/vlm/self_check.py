"""Whether this machine computes what it should: a check of a few seconds at the start of a run.

Kernels of a GPU come from many hands, and one that errs does so silently. Attention, head and
vision are therefore computed once, on the loaded model's own first layers, and compared with
references that share no kernel with them.

    settle    checks, takes the next attention back-end where one fails

Errors are relative: the norm of the difference over the norm of the reference. A bound counts what
rounding can explain (`explained`); a wrong kernel is off by 0.1 and more.

Shapes: N tokens of a packed row, Hq query heads, Hkv key heads, D numbers of a head, H hidden size,
P patches, V rows of the head.
"""

import math
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
from common.vlm.linear_attention import PackedDelta, SlotStates, linear_layers, padded_rule
from common.vlm.model import decoder, hidden_states, image_features, use_attention
from common.vlm.weights import whole

# A short prompt, and one that fills its slot but for one token, each with two responses. The first
# response is one token, which is decoded as well.
SHORT, SECOND, FULL = 7, 40, 255  # tokens of the first prompt; first row and tokens of the second
DECODED = [7, 295]  # rows
TOKENS = 316
SEGMENTS = [
    (0, 7, 0, 0),
    (7, 8, 0, 7),
    (8, 40, 0, 7),
    (40, 295, 40, 40),
    (295, 296, 40, 295),
    (296, 316, 40, 295),
]
PATCHES = 120
GRIDS = torch.tensor([[1, 12, 8], [1, 4, 6]])  # two pictures, (1, h, w) patches
ROWS = 4096  # most rows of the head and of the embeddings: those that this rank holds
TARGETS, CHUNK = 33, 32  # so that the last chunk of the head holds one token
Checked = Iterator[tuple[str, Tensor, Tensor, float]]  # name, found, expected, bound


class Part(NamedTuple):
    name: str
    error: float  # relative
    bound: float
    problem: str = ""  # what was raised instead

    @property
    def fails(self) -> bool:
        return not self.error <= self.bound

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        return f"{self.name}: error {self.error:.2g}, at most {self.bound:.2g}"


def settle(models: list[nn.Module], args: ModelArgs) -> None:
    """Check the first of the loaded models, and agree on the attention back-end of all: with
    --attention auto the first of `BACKENDS` that passes on every rank. All ranks must call.

    Raises:
        UserError: on every rank alike: a part fails, and there is no other back-end.
    """
    model = models[0]
    held = distributed.gather_json(model.compute.backend)
    backends = list(BACKENDS[max(map(BACKENDS.index, held)) :])  # a node may lack a package
    if args.attention != "auto":
        backends = backends[:1]
    on_gpu = model.compute.device.type == "cuda"
    if args.self_check == "on" or (args.self_check == "auto" and on_gpu):
        check = SelfCheck(model)
        while failing := run_check(check, backends[0]):
            reason = f"attention {backends.pop(0)} fails the self-check: {'; '.join(failing)}"
            if not backends:
                raise UserError(
                    f"{reason}. The run would train on wrong numbers: try another --attention, "
                    "other versions of torch and flash-attn, or --dtype float32; --self_check off "
                    "starts the run anyway"
                )
            say(f"warning: {reason}; taking {backends[0]}")
    for model in models:
        model.compute = replace(model.compute, backend=backends[0])
        use_attention(model, backends[0])


def run_check(check: "SelfCheck", backend: str) -> list[str]:
    """What fails with a back-end, on any rank; the main rank prints a table of all parts, each as
    it is where it is worst. All ranks must call."""
    worst: dict[str, Part] = {}
    for found in distributed.gather_json(check.parts(backend)):
        for values in found:
            part = Part(*values)
            before = worst.setdefault(part.name, part)
            if part.error / part.bound > before.error / before.bound:
                worst[part.name] = part
    say(f"self-check with attention {backend}: relative errors, and what rounding explains at most")
    for part in worst.values():
        verdict = "FAILS" if part.fails else "ok"
        say(f"  {part.name:32} {part.error:8.1e} {part.bound:8.1e}  {verdict}")
    return [str(part) for part in worst.values() if part.fails]


def say(text: str) -> None:
    if distributed.is_main():
        print(text, flush=True)


# -------------------------------------------------------------------------------------------------
# Measuring
# -------------------------------------------------------------------------------------------------


def explained(dtype: torch.dtype, roundings: int, terms: float = 1.0) -> float:
    """The relative error that rounding explains: at most half an epsilon for each of ``roundings``
    to ``dtype``, and the root of ``terms`` epsilons for sums in float32. Rounding errors rarely add
    up, so what is measured is a third of this, and less."""
    of_sums = math.sqrt(terms) * torch.finfo(torch.float32).eps
    return roundings * torch.finfo(dtype).eps / 2 + of_sums


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Infinite where a number is not finite or the shape is another."""
    if found.shape != expected.shape:
        return math.inf
    found = found.detach().double().cpu()
    expected = expected.detach().double().cpu()
    error = float((found - expected).norm())
    if not math.isfinite(error):
        return math.inf
    return error / (float(expected.norm()) or 1.0)


def measured(name: str, checked: Checked) -> list[Part]:
    """The parts with their errors. A kernel may raise anything: then ``name`` fails."""
    parts = []
    try:
        for part, found, expected, bound in checked:
            parts.append(Part(part, relative_error(found, expected), bound))
    except Exception as error:
        said = " ".join(str(error).split())
        problem = f"{type(error).__name__}: {said:.200}".rstrip(".")
        parts.append(Part(name, math.inf, 1.0, problem))
    return parts


class SelfCheck:
    """The first layers of a model in the compute type (`low`) and, from the same rounded weights,
    in float32 (`high`). All ranks must build one: sharded weights are gathered."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.dtype, self.device = model.compute.dtype, model.compute.device
        self.text = model.config.get_text_config()
        self.generator = torch.Generator().manual_seed(0)  # of the CPU: the same on any machine
        self.wide = [decoder(model).get_input_embeddings().weight]
        if model.lm_head is not None:
            self.wide.append(model.lm_head.weight)
        self.low = first_layers(model, self.lowered)
        self.high = first_layers(self.low, Tensor.float)

    @torch.no_grad()
    def lowered(self, parameter: Tensor) -> Tensor:
        """A whole weight in the compute type; of those over the vocabulary the rows that are
        here."""
        if any(parameter is wide for wide in self.wide):
            own = shard_of(parameter)[:ROWS]
            if not len(own):  # the last ranks may have no row
                own = own.new_ones(1, own.shape[1])
        else:
            own = whole(parameter)
        return own.detach().to(self.dtype)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers, rounded to the compute type."""
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def parts(self, backend: str) -> list[Part]:
        """Everything, with an attention back-end. An exception leaves out what would follow."""
        parts = measured("attention", self.attention(backend))
        if linear_layers(self.text):
            parts += measured("linear attention", self.linear_attention())
        if self.model.lm_head is not None:
            parts += measured("head", self.head())
        if isinstance(self.model.family, Qwen) and self.model.model.visual is not None:
            parts += measured("vision", self.vision(backend))
        return parts

    # Attention

    def attention(self, backend: str) -> Checked:
        """Packed rows with shared prompts, forward and backward, and decoding from a short slot and
        a full one, on the first layer's own queries, keys and values."""
        seen = self.first_layer()
        _, heads, _, width = seen.inputs[0].shape
        upstream = self.random(1, TOKENS, heads, width)
        exact = [x.double().requires_grad_() for x in seen.inputs]
        expected, largest = naive_attention(*exact, *seen.options)
        truth = torch.autograd.grad(expected, exact, upstream.double())

        ours = [x.clone().requires_grad_() for x in seen.inputs]
        packed = PackedAttention(SEGMENTS, backend, self.device)
        out = packed(0, *ours, *seen.options)  # (1, N, Hq, D)
        # A score is a sum over D, its error becomes a factor of its probability, and a sum over
        # keys follows. In the gradients of scores, and with them of queries and keys, most cancels.
        terms = (width + FULL) * max(1.0, largest) ** 2
        forward = explained(self.dtype, 4, terms)
        backward = explained(self.dtype, 12, terms)
        yield "packed rows", out, expected, forward
        found = torch.autograd.grad(out, ours, upstream)
        yield "packed rows, gradient of q", found[0], truth[0], 10 * backward
        yield "packed rows, gradient of k", found[1], truth[1], 10 * backward
        yield "packed rows, gradient of v", found[2], truth[2], backward
        decoded = self.decode(backend, seen)
        at_once = expected[:, DECODED]
        yield "decoding, short slot", decoded[:, 0], at_once[:, 0], forward
        yield "decoding, full slot", decoded[:, 1], at_once[:, 1], forward

    @torch.no_grad()
    def first_layer(self) -> "NaiveAttention":
        """What the first layer hands to its attention, for random tokens."""
        seen = NaiveAttention()
        rows = len(decoder(self.low).get_input_embeddings().weight)
        ids = torch.randint(rows, (1, TOKENS), generator=self.generator)
        row = Row(
            input_ids=ids.to(self.device),
            positions=positions_in_segments().expand(3, 1, -1).to(self.device),
            attention=seen,
        )
        hidden_states(self.low, row)
        return seen

    @torch.no_grad()
    def decode(self, backend: str, seen: "NaiveAttention") -> Tensor:
        """(1, 2, Hq, D): both prompts are stored by a packed row, and the token behind each is
        decoded. What it may not see is large."""
        cache = SlotCache(self.text, 2, FULL + 1, self.dtype, self.device)
        cache.keys.fill_(1e3)
        cache.values.fill_(1e3)
        rows = torch.tensor([*range(SHORT), *range(SECOND, SECOND + FULL)], device=self.device)
        slots = (rows >= SECOND).long()
        plan = rows, slots, rows - SECOND * slots
        packed = PackedAttention(SEGMENTS, backend, self.device, cache, plan)
        packed(0, *seen.inputs, *seen.options)
        lengths = torch.tensor([SHORT, FULL], device=self.device)
        step = DecodeAttention(cache, lengths, FULL + 1, backend)
        new = [x[:, :, DECODED] for x in seen.inputs]
        return step(0, *new, *seen.options)

    # Linear attention

    def linear_attention(self) -> Checked:
        """The delta rule of a row, forward and backward, and of decoding, against plain torch in
        float32 on the CPU."""
        inputs = self.delta_inputs()
        upstream = self.random(*inputs["v"].shape)
        exact, ours = [], []
        for x in inputs.values():
            exact.append(x.float().cpu().requires_grad_())
            ours.append(x.clone().requires_grad_())
        on_host = PackedDelta(SEGMENTS, torch.device("cpu"), rule=padded_rule)
        expected = on_host.recur(0, *exact)  # (N, Hv, Dv)
        truth = torch.autograd.grad(
            expected,
            exact,
            upstream.float().cpu(),
        )
        out = PackedDelta(SEGMENTS, self.device).recur(0, *ours)
        found = torch.autograd.grad(out, ours, upstream)
        forward = explained(self.dtype, 8, FULL)
        backward = explained(self.dtype, 16, FULL**2)
        yield "delta rule", out, expected, forward
        for name, gradient, right in zip(inputs, found, truth):
            yield f"delta rule, gradient of {name}", gradient, right, backward
        decoded = self.decode_delta(list(inputs.values()))
        yield "delta rule, decoding", decoded, expected[DECODED], forward

    def delta_inputs(self) -> dict[str, Tensor]:
        """What `PackedDelta.recur` takes for a row, states that fade slowly."""
        heads = self.text.linear_num_value_heads
        keys = self.text.linear_key_head_dim
        values = self.text.linear_value_head_dim
        return {
            "q": self.random(TOKENS, heads, keys),
            "k": self.random(TOKENS, heads, keys),
            "v": self.random(TOKENS, heads, values),
            "decay": self.random(TOKENS, heads).float().exp() * -0.05,
            "strength": self.random(TOKENS, heads).sigmoid(),
        }

    @torch.no_grad()
    def decode_delta(self, inputs: list[Tensor]) -> Tensor:
        """(2, Hv, Dv): both prompts leave their state in a slot, and the token behind each is
        decoded."""
        slots = torch.arange(2, device=self.device)
        ends = torch.tensor(DECODED, device=self.device) - 1
        states = SlotStates(self.text, 2, self.dtype, self.device)
        packed = PackedDelta(SEGMENTS, self.device, states, (ends, slots, slots))
        packed.recur(0, *inputs)
        return states.recur(0, *[x[DECODED] for x in inputs])

    # Head

    def head(self) -> Checked:
        """Log-probs of the chunked head, whose products have float32 results, and their gradients;
        and the head of a rank without responses."""
        weight = self.low.lm_head.weight.clone().requires_grad_()  # (V, H)
        hidden = self.random(TARGETS, weight.shape[1]).requires_grad_()
        targets = torch.randint(len(weight), (TARGETS,), generator=self.generator)
        targets = targets.to(self.device)
        upstream = self.random(TARGETS).float()
        exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        expected = -F.cross_entropy(exact[0] @ exact[1].t(), targets, reduction="none")
        truth = torch.autograd.grad(expected, exact, upstream.double())

        logp, _ = logprobs.linear_logprobs(hidden, weight, targets, chunk=CHUNK)
        # Tensor cores cut off what a sum does not keep, so that errors grow with its length.
        of_sums = explained(torch.float32, 0, weight.shape[1] ** 2)
        yield "head", logp, expected, of_sums
        found = torch.autograd.grad(logp, (hidden, weight), upstream)
        bound = explained(self.dtype, 6) + of_sums
        yield "head, gradient of its input", found[0], truth[0], bound
        yield "head, gradient of its weight", found[1], truth[1], bound

        logp, _ = logprobs.linear_logprobs(hidden[:0], weight, targets[:0])
        found = torch.autograd.grad(logp, (hidden, weight), logp.detach())
        nothing = torch.zeros_like(weight)
        yield "head of no rows", found[1], nothing, explained(torch.float32, 0)

    # Vision

    def vision(self, backend: str) -> Checked:
        """The patch embedding, against a convolution on the CPU; then two pictures through the
        tower's first block and the projector, forward and backward."""
        projection = self.low.model.visual.patch_embed.proj
        exact = self.high.model.visual.patch_embed.proj
        size = exact.weight.shape[1:]  # (3, deep, side, side)
        patches = self.random(PATCHES, *size)
        bias = None if exact.bias is None else exact.bias.cpu()
        expected = F.conv3d(patches.float().cpu(), exact.weight.cpu(), bias, stride=size[1:])
        bound = explained(self.dtype, 2, math.prod(size))
        yield "patch embedding", projection(patches), expected.flatten(1), bound

        pixels = patches.flatten(1).requires_grad_()
        out, gradient = self.features(self.low, backend, pixels)
        expected, truth = self.features(self.high, "sdpa", pixels)
        sums = PATCHES * math.prod(size)
        yield "vision block", out, expected, explained(self.dtype, 24, sums)
        yield "vision block, backward", gradient, truth, explained(self.dtype, 48, sums)

    def features(self, copy: nn.Module, backend: str, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Image features (K, M, H), and a gradient of the pixels (P, patch)."""
        use_attention(copy, backend)
        out = image_features(copy, pixels, GRIDS)
        upstream = torch.linspace(-1, 1, out.numel(), device=self.device)
        (gradient,) = torch.autograd.grad(out, pixels, upstream.view_as(out).to(out))
        return out, gradient


# -------------------------------------------------------------------------------------------------
# References
# -------------------------------------------------------------------------------------------------


def first_layers(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a module with converted weights, of lists of layers only the first one that has
    attention, and without what FSDP2 hung on it. It shares all else, and computes gradients of its
    vision tower."""
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    copy = object.__new__(kind)
    children = list(module._modules.items())
    if isinstance(module, nn.ModuleList):
        children = [item for item in children if not hasattr(item[1], "linear_attn")][:1]
    vars(copy).update(vars(module))
    copy._forward_hooks, copy._forward_pre_hooks = OrderedDict(), OrderedDict()
    copy._parameters, copy._modules = {}, {}
    for name, parameter in module._parameters.items():
        copy._parameters[name] = None if parameter is None else convert(parameter)
    for name, child in children:
        copy._modules[name] = None if child is None else first_layers(child, convert)
    copy.training, copy.trains_vision = False, True
    return copy


class NaiveAttention:
    """Attention of the row of `SEGMENTS` by its definition; keeps what it was called with.

    Attributes:
        inputs: q (1, Hq, N, D), k and v (1, Hkv, N, D).
        options: scale and window.
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    options: tuple[float, int | None]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        self.inputs = q, k, v
        self.options = scale, window
        out, _ = naive_attention(q, k, v, scale, window)
        return out


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
) -> tuple[Tensor, float]:
    """q (1, Hq, N, D), k and v (1, Hkv, N, D) -> (1, N, Hq, D), and the largest absolute score."""
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)  # (1, Hq, N, D)
    v = v.repeat_interleave(group, dim=1)
    seen = visible(window).to(q.device)
    scores = q @ k.transpose(2, 3) * scale  # (1, Hq, N, N)
    largest = float(scores.detach()[..., seen].abs().max())
    scores = scores.masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), largest


def visible(window: int | None) -> Tensor:
    """(N, N) bool: which keys each query of the row sees."""
    seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for start, end, prefix_start, prefix_end in SEGMENTS:
        seen[start:end, prefix_start:prefix_end] = True
        seen[start:end, start:end] = True
    place = positions_in_segments()
    behind = place[:, None] - place
    return seen & (behind >= 0) & (behind < (window or TOKENS))


def positions_in_segments() -> Tensor:
    """(N,) the place of each token of the row in its sequence."""
    parts = []
    for start, end, prefix_start, prefix_end in SEGMENTS:
        parts.append(torch.arange(end - start) + prefix_end - prefix_start)
    return torch.cat(parts)
