"""Whether this machine computes what it should: a check of a few seconds at the start of a run.

Kernels of a GPU come from many hands, and one that errs does so silently. Attention, head and
vision are therefore computed once, on the loaded model's own first layers, and compared with
references that share no kernel with them.

    settle    checks, takes the next attention back-end where one fails

Errors are relative: the norm of the difference over the norm of the reference. A bound counts what
rounding can explain (`explained`); a wrong kernel is off by 0.1 and more.

Shapes: N tokens of a pack, Hq query heads, Hkv key heads, D numbers of a head, H hidden size,
P patches, V rows of the head.
"""

import math
from collections import OrderedDict
from dataclasses import replace
from typing import Callable, Iterable, Iterator, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from common import distributed
from common.buffers import Pack
from common.fsdp import shard_of
from common.fused import describe
from common.logprobs import linear_logprobs
from common.process import UserError
from common.settings import ModelArgs
from common.vlm.attention import BACKENDS, DecodeAttention, PackedAttention, SlotCache
from common.vlm.families import Qwen
from common.vlm.linear_attention import PackedDelta, linear_layers, padded_rule
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
TINY = 1e-300  # the least norm that an error is divided by
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
    held = distributed.gather_objects(model.compute.backend)
    first = max(map(BACKENDS.index, held))  # a node may lack a package
    backends = list(BACKENDS[first:])
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
    gathered = distributed.gather_objects(check.parts(backend))
    found = [Part(*part) for own in gathered for part in own]
    failing = []
    say(f"self-check with attention {backend}: relative errors, and what rounding explains at most")
    for name in dict.fromkeys(part.name for part in found):
        own = [part for part in found if part.name == name]
        worst = max(own, key=lambda part: part.error / part.bound)
        verdict = "ok"
        if worst.fails:
            verdict = "FAILS"
            failing.append(str(worst))
        say(f"  {name:32} {worst.error:8.1e} {worst.bound:8.1e}  {verdict}")
    return failing


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
    of_results = roundings * torch.finfo(dtype).eps / 2
    return of_results + of_sums


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Infinite where a number is not finite or the shape is another."""
    if found.shape != expected.shape:
        return math.inf
    found, expected = (x.detach().double().cpu() for x in (found, expected))
    error = float((found - expected).norm() / expected.norm().clamp_min(TINY))
    return error if math.isfinite(error) else math.inf


def measured(name: str, checked: Checked) -> list[Part]:
    """The parts with their errors. A kernel may raise anything: then ``name`` fails."""
    parts = []
    try:
        for part, found, expected, bound in checked:
            parts.append(Part(part, relative_error(found, expected), bound))
    except Exception as error:
        parts.append(Part(name, math.inf, 1.0, describe(error).rstrip(".")))
    return parts


def with_gradients(function: Callable, inputs: Iterable[Tensor]) -> list[Tensor]:
    """The output of a function, and gradients of its inputs; from above comes what is the same for
    an output of this shape in any type, on any machine."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad(out, inputs, upstream.bfloat16().to(out))]


def compared(name: str, inputs: Iterable[str], *columns: Iterable) -> Checked:
    """What `with_gradients` found and what is right, as parts; ``columns``: found, expected,
    bounds."""
    names = [name, *(f"{name}, gradient of {x}" for x in inputs)]
    yield from zip(names, *columns)


class SelfCheck:
    """The first layers of a model in the compute type (`low`) and, from the same rounded weights,
    in float32 (`high`). All ranks must build one: sharded weights are gathered."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.dtype, self.device = model.compute.dtype, model.compute.device
        self.text = model.config.get_text_config()
        self.generator = torch.Generator().manual_seed(0)  # of the CPU: the same on any machine
        self.low = first_layers(model, self.lowered)
        self.high = first_layers(self.low, Tensor.float)

    @torch.no_grad()
    def lowered(self, parameter: Tensor) -> Tensor:
        """A whole weight in the compute type; of those over the vocabulary the rows that are
        here."""
        if parameter.shape[:1] == (self.text.vocab_size,):
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
        is_known = isinstance(self.model.family, Qwen)
        if is_known and self.model.model.visual is not None:
            parts += measured("vision", self.vision(backend))
        return parts

    # Attention

    def attention(self, backend: str) -> Checked:
        """packs with shared prompts, forward and backward, and decoding from a short slot and
        a full one, on the first layer's own queries, keys and values."""
        (_, *inputs), options = self.first_layer()
        packed = PackedAttention(SEGMENTS, backend, self.device)
        found = with_gradients(lambda *x: packed(0, *x, *options), inputs)  # (1, N, Hq, D)
        exact = [x.double() for x in inputs]
        truth = with_gradients(lambda *x: naive_attention(0, *x, *options), exact)
        # A score is a sum over D, its error becomes a factor of its probability, and a sum over
        # keys follows. In the gradients of scores, and with them of queries and keys, most cancels.
        scores = naive_scores(*exact[:2], *options)
        largest = float(scores[scores.isfinite()].abs().max())
        terms = (exact[0].shape[-1] + FULL) * max(1.0, largest) ** 2
        forward = explained(self.dtype, 4, terms)
        backward = explained(self.dtype, 12, terms)
        bounds = [forward, 10 * backward, 10 * backward, backward]
        yield from compared("packs", "qkv", found, truth, bounds)
        decoded = self.decode(backend, inputs, options)
        for i, slot in enumerate(("short", "full")):
            yield f"decoding, {slot} slot", decoded[:, i], truth[0][:, DECODED[i]], forward

    @torch.no_grad()
    def first_layer(self) -> tuple[tuple, tuple]:
        """What the first layer hands to its attention, for random tokens: its number, q (1, Hq, N,
        D), k and v (1, Hkv, N, D); scale and window."""
        seen = Recorder()
        rows = len(decoder(self.low).get_input_embeddings().weight)
        ids = torch.randint(rows, (1, TOKENS), generator=self.generator)
        row = Pack(
            input_ids=ids.to(self.device),
            positions=positions_in_segments().expand(3, 1, -1).to(self.device),
            attention=seen,
        )
        hidden_states(self.low, row)
        return seen.given[:4], seen.given[4:]

    @torch.no_grad()
    def decode(self, backend: str, inputs: list[Tensor], options: tuple) -> Tensor:
        """(1, 2, Hq, D): both prompts are stored by a pack, and the token after each is
        decoded. What it may not see is large."""
        cache = SlotCache(self.text, 2, FULL + 1, self.dtype, self.device)
        cache.keys.fill_(1e3)
        cache.values.fill_(1e3)
        rows = torch.tensor([*range(SHORT), *range(SECOND, SECOND + FULL)], device=self.device)
        slots = (rows >= SECOND).long()
        plan = rows, slots, rows - SECOND * slots
        packed = PackedAttention(SEGMENTS, backend, self.device, cache, plan)
        packed(0, *inputs, *options)
        lengths = torch.tensor([SHORT, FULL], device=self.device)
        step = DecodeAttention(cache, lengths, FULL + 1, backend)
        return step(0, *[x[:, :, DECODED] for x in inputs], *options)

    # Linear attention

    def linear_attention(self) -> Checked:
        """The delta rule of a row, forward and backward, against plain torch in float32 on the CPU.
        Decoding is plain torch itself."""
        inputs = self.delta_inputs()
        here = PackedDelta(SEGMENTS, self.device)
        found = with_gradients(lambda *x: here.recur(0, *x), inputs.values())  # (N, Hv, Dv)
        host = PackedDelta(SEGMENTS, torch.device("cpu"), rule=padded_rule)
        exact = [x.float().cpu() for x in inputs.values()]
        truth = with_gradients(lambda *x: host.recur(0, *x), exact)
        bounds = [explained(self.dtype, 8, FULL)]
        bounds += [explained(self.dtype, 16, FULL**2)] * len(inputs)
        yield from compared("delta rule", inputs, found, truth, bounds)

    def delta_inputs(self) -> dict[str, Tensor]:
        """What `PackedDelta.recur` takes for a row, states that fade slowly."""
        rows = TOKENS, self.text.linear_num_value_heads
        return {
            "q": self.random(*rows, self.text.linear_key_head_dim),
            "k": self.random(*rows, self.text.linear_key_head_dim),
            "v": self.random(*rows, self.text.linear_value_head_dim),
            "decay": self.random(*rows).float().exp() * -0.05,
            "strength": self.random(*rows).sigmoid(),
        }

    # Head

    def head(self) -> Checked:
        """Log-probs of the chunked head, whose products have float32 results, and their gradients;
        and the head of a rank without responses."""
        weight = self.low.lm_head.weight  # (V, H)
        inputs = [self.random(TARGETS, weight.shape[1]), weight]
        targets = torch.randint(len(weight), (TARGETS,), generator=self.generator)
        targets = targets.to(self.device)
        found = with_gradients(lambda *x: linear_logprobs(*x, targets, chunk=CHUNK)[0], inputs)
        truth = with_gradients(lambda *x: naive_logprobs(*x, targets), [x.double() for x in inputs])
        # Tensor cores cut off what a sum does not keep, so that errors grow with its length.
        of_sums = explained(torch.float32, 0, weight.shape[1] ** 2)
        bound = explained(self.dtype, 6) + of_sums
        yield from compared(
            "head", ("its input", "its weight"), found, truth, (of_sums, bound, bound)
        )
        nothing = [inputs[0][:0], weight]
        *_, gradient = with_gradients(lambda *x: linear_logprobs(*x, targets[:0])[0], nothing)
        yield "head of no rows", gradient, torch.zeros_like(weight), explained(torch.float32, 0)

    # Vision

    def vision(self, backend: str) -> Checked:
        """The patch embedding, against a convolution on the CPU; then two pictures through the
        tower's first block and the projector, forward and backward."""
        projection = self.low.model.visual.patch_embed.proj
        exact = self.high.model.visual.patch_embed.proj
        patches = self.random(PATCHES, *exact.weight.shape[1:])  # (P, 3, deep, side, side)
        sums = patches[0].numel()
        bias = None if exact.bias is None else exact.bias.cpu()
        on_host = patches.float().cpu()
        expected = F.conv3d(on_host, exact.weight.cpu(), bias).flatten(1)
        bound = explained(self.dtype, 2, sums)
        embedded = projection(patches)
        yield "patch embedding", embedded, expected, bound
        pixels = [patches.flatten(1)]
        sums *= PATCHES
        use_attention(self.low, backend)
        found = with_gradients(lambda x: image_features(self.low, x, GRIDS), pixels)  # (K, M, H)
        use_attention(self.high, "sdpa")
        truth = with_gradients(lambda x: image_features(self.high, x, GRIDS), pixels)
        bounds = [explained(self.dtype, roundings, sums) for roundings in (24, 48)]
        yield from compared("vision block", ["its pixels"], found, truth, bounds)


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
    vars(copy).update(vars(module), training=False, trains_vision=True)
    copy._forward_hooks, copy._forward_pre_hooks = OrderedDict(), OrderedDict()
    copy._parameters, copy._modules = {}, {}
    for name, parameter in module._parameters.items():
        copy._parameters[name] = None if parameter is None else convert(parameter)
    for name, child in children:
        copy._modules[name] = None if child is None else first_layers(child, convert)
    return copy


class Recorder:
    """Naive attention that keeps what it was called with."""

    given: tuple

    def __call__(self, *given) -> Tensor:
        self.given = given
        return naive_attention(*given)


def naive_attention(
    layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Attention of the row of `SEGMENTS` by its definition: q (1, Hq, N, D), k and v (1, Hkv, N, D)
    -> (1, N, Hq, D)."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (1, Hq, N, D)
    return (naive_scores(q, k, scale, window).softmax(-1) @ v).transpose(1, 2)


def naive_scores(q: Tensor, k: Tensor, scale: float, window: int | None = None) -> Tensor:
    """(1, Hq, N, N); -inf where a key is not seen."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (1, Hq, N, D)
    return (q @ k.transpose(2, 3) * scale).masked_fill(~visible(window).to(q.device), -math.inf)


def naive_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy(hidden @ weight.t(), targets, reduction="none")


def visible(window: int | None) -> Tensor:
    """(N, N) bool: which keys each query of the row sees."""
    seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for start, end, prefix_start, prefix_end in SEGMENTS:
        seen[start:end, prefix_start:prefix_end] = True
        seen[start:end, start:end] = True
    place = positions_in_segments()
    distance = place[:, None] - place
    return seen & (distance >= 0) & (distance < (window or TOKENS))


def positions_in_segments() -> Tensor:
    """(N,) the place of each token of the row in its sequence."""
    parts = []
    for start, end, prefix_start, prefix_end in SEGMENTS:
        parts.append(torch.arange(end - start) + prefix_end - prefix_start)
    return torch.cat(parts)
