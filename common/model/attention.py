"""Attention: packs (training, scoring, prefill) and decoding over KV slots.

    PackedAttention    the segments of a pack: prompts, and responses that see their prompt
    DecodeAttention    one new token for each slot of a SlotCache

Either is handed to the language model as the keyword argument ``attention`` and reaches the
function that is registered with transformers under ATTENTION_NAME.

Shapes: N tokens of a pack, S its segments, Hq query heads, Hkv key heads, D numbers of a
head, B slots.
"""

import functools
import importlib
import importlib.metadata
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.attention
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from common import distributed
from common.buffers import ragged_index
from common.data.families import BOTH_WAYS, IN_WINDOWS
from common.ground.files import UserError
from common.model.linear_attention import PackedDelta, SlotStates, linear_layers, padded_tokens

ATTENTION_NAME = "packs"  # registered for the language model
# The back-end is appended. transformers passes cu_seqlens only to names that contain "flash".
VISION_ATTENTION_NAME = "packed_flash_"
BACKENDS = ("flash_attn", "varlen", "sdpa")


TORCH = Version(torch.__version__).release[:2]


def fitting_flash_attn_4(release: tuple[int, ...]) -> str:
    """The newest version of flash-attn-4 known to fit this release of torch: torch before 2.14 takes two
    values from the forward, and from 4.0.0b20 on it returns more."""
    return "4.0.0b36" if release >= (2, 14) else "4.0.0b18"


class Replacement(NamedTuple):
    """Kernels that torch can put under the operators of varlen, in the whole process."""

    name: str  # of torch's register
    torch: tuple[int, int]  # the first release whose varlen has their forward and backward
    cards: tuple[int, ...]  # the major compute capabilities that they are made for
    install: str


REPLACEMENTS = {
    "fa3": Replacement(
        "FA3", (2, 11), (9,), "build the folder hopper/ of the project flash-attention"
    ),
    # torch 2.11 refuses the backward with any window, and varlen always gives one.
    "fa4": Replacement(
        "FA4", (2, 12), (9, 10), f"pip install flash-attn-4=={fitting_flash_attn_4(TORCH)}"
    ),
}
LARGEST_HEAD = 256  # numbers of a head, for the first two; sdpa takes any
FLASH_ATTN_INSTALL = "pip install flash-attn --no-build-isolation"


def choose_backend(
    requested: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> str:
    """Resolve ``--attention auto`` to a back-end that runs here; `flash_attn_problem` says why that
    is not flash_attn. With varlen, cuDNN's attention is switched off in this process; fa3 and fa4 are
    varlen with other kernels.

    Raises:
        UserError: the requested back-end cannot run here.
    """
    restore_kernels()
    fits = device.type == "cuda" and dtype != torch.float32
    if requested == "sdpa" or (requested == "auto" and not fits):
        return "sdpa"
    if not fits:
        raise UserError(f"--attention {requested} computes in bfloat16 on a GPU; use auto")
    problem = flash_attn_problem()
    if requested == "flash_attn" and problem:
        raise UserError(f"--attention {requested}: {problem}; use auto")
    if requested == "auto":
        requested = "varlen" if problem else "flash_attn"
    replacement = REPLACEMENTS.get(requested)
    if replacement:
        problem = replacement_problem(replacement, device)
        if problem:
            raise UserError(f"--attention {requested}: {problem}; use auto")
        requested = "varlen"
    if requested == "varlen":
        # varlen_attn of torch 2.15 gives calls that are not causal to cuDNN, which plans for
        # 40 ms and more whenever the lengths are new.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return requested


def flash_attn_problem() -> str:
    """Why flash_attn cannot be used here; "" if it can. Found out at the start, not after minutes of
    loading weights: a wheel fits one version of torch only, and flash-attn-4 has no such kernel."""
    try:
        importlib.import_module("flash_attn").flash_attn_with_kvcache
    except (ImportError, OSError, AttributeError) as error:
        return f"flash-attn cannot be used: {error}; to build it: {FLASH_ATTN_INSTALL}"
    return ""


def replacement_problem(replacement: Replacement, device: torch.device) -> str:
    """Put other kernels under the operators of varlen, and try them once: versions of torch and of the
    package do not always fit. Returns why they cannot be used; "" if they now are."""
    if TORCH < replacement.torch:
        oldest = ".".join(map(str, replacement.torch))
        return f"torch {torch.__version__} cannot train with it; torch {oldest} or newer can"
    names = (each.metadata["Name"] or "" for each in importlib.metadata.distributions())
    packages = {name.replace("_", "-") for name in names}
    if {"flash-attn", "flash-attn-4"} <= packages:
        return "flash-attn and flash-attn-4 write into one folder; pip uninstall flash-attn flash-attn-4"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in replacement.cards:
        return (
            f"made for compute capabilities {replacement.cards}, and this GPU has {major}.{minor}"
        )
    try:
        torch.nn.attention.activate_flash_attention_impl(replacement.name)
        try_kernels(device)
    except Exception as error:  # a package may raise anything when it is imported or compiles
        restore_kernels()
        return f"{type(error).__name__}: {error}; to install it: {replacement.install}"
    return ""


def try_kernels(device: torch.device) -> None:
    """A forward and a backward of varlen, in both directions and causal."""
    bounds = torch.tensor([0, 16, 24], dtype=torch.int32, device=device)
    for causal in (True, False):
        q, k, v = torch.zeros(3, 24, 2, 64, dtype=torch.bfloat16, device=device).requires_grad_()
        call = VarlenCall(bounds, bounds, 16, 16, causal)
        varlen_attention(q, k, v, call, 0.125, "varlen").sum().backward()


def replaced_kernels() -> str | None:
    """The name of the kernels that are under the operators of varlen now; None: torch's own."""
    return torch.nn.attention.current_flash_attention_impl()


def restore_kernels() -> None:
    if replaced_kernels():
        torch.nn.attention.restore_flash_attention_impl()


@contextmanager
def own_kernels():
    """Inside, torch's own kernels are under the operators of varlen: FlashAttention 4 splits no keys on
    Hopper, so that its decoding would leave most of a GPU idle."""
    name = replaced_kernels()
    restore_kernels()
    try:
        yield
    finally:
        if name:
            torch.nn.attention.activate_flash_attention_impl(name)


def backend_of(backend: str, dim: int) -> str:
    """The back-end of layers whose heads have ``dim`` numbers, in a model with a ``backend``."""
    return "sdpa" if dim > LARGEST_HEAD else backend


def head_dim(layer_config) -> int:
    """D, the dimension of an attention head."""
    return (
        getattr(layer_config, "head_dim", None)
        or layer_config.hidden_size // layer_config.num_attention_heads
    )


def layer_configs(text_config) -> list:
    """The config of each layer: heads may differ between layers."""
    layers = range(text_config.num_hidden_layers)
    if getattr(text_config, "is_heterogeneous", False):
        return [text_config.per_layer_config[layer] for layer in layers]
    return [text_config for _ in layers]


def largest_head(text_config) -> int:
    """D of the layers where it is largest."""
    return max(map(head_dim, layer_configs(text_config)))


def check_heads(text_config, device: torch.device) -> None:
    """Raises UserError: FlashAttention 4 takes fewer sizes of heads on Blackwell than on Hopper, and the
    largest only without windows."""
    if replaced_kernels() != "FA4" or torch.cuda.get_device_capability(device)[0] == 9:
        return
    kinds = getattr(text_config, "layer_types", None) or ()
    windows = " with windows" if "sliding_attention" in kinds else ""
    for dim in map(head_dim, layer_configs(text_config)):
        if 128 < dim < LARGEST_HEAD or (dim == LARGEST_HEAD and windows):
            raise UserError(
                f"--attention fa4: on this GPU it takes heads of at most 128 numbers, or of {LARGEST_HEAD} "
                f"without sliding windows, and this model has heads of {dim}{windows}; use auto"
            )


def cached_heads(text_config) -> list[tuple[int, int]]:
    """(Hkv, D) of each layer that stores keys and values: not those with linear attention, nor the
    last ones that read what earlier layers store."""
    layers = layer_configs(text_config)
    stored = len(layers) - linear_layers(text_config)
    stored -= getattr(text_config, "num_kv_shared_layers", 0)
    return [(layer.num_key_value_heads, head_dim(layer)) for layer in layers[:stored]]


def most_slots(ranks: int) -> int:
    """The most sequences that so many ranks decode together with --slots 0. A team may have twice as
    many, as its sums take no longer for them."""
    return 256 if ranks == 1 else 512


class SlotCache:
    """Keys and values of the sequences being generated, (slots, capacity, Hkv, D) for each layer; for
    layers with linear attention their states, ``linear``, instead. ``ranks`` share the heads.

    A plain object, not a tensor in a dict: FSDP's input hooks would cast or copy the latter.
    """

    def __init__(
        self,
        text_config,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
        ranks: int = 1,
    ):
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for heads, dim in cached_heads(text_config):
            # For sdpa the tokens of a head are contiguous, which suits matrix products.
            order = (0, 2, 1, 3) if backend_of(backend, dim) == "sdpa" else (0, 1, 2, 3)
            shape = (slots, capacity, -(-heads // ranks), dim)
            for part in (self.keys, self.values):
                part.append(torch.empty_permuted(shape, order, dtype=dtype, device=device).zero_())
        self.slots, self.capacity, self.device = slots, capacity, device
        # whether a layer uses sdpa, which also reads the keys that it masks
        self.reads_masked = backend_of(backend, largest_head(text_config)) == "sdpa"
        # (layers, slots, capacity, K) ids of the experts that each token chose, if they are recorded
        self.experts: Tensor | None = None
        self.linear = None
        if linear_layers(text_config):
            self.linear = SlotStates(text_config, slots, dtype, device)

    @property
    def nbytes(self) -> int:
        states = [] if self.linear is None else [self.linear.inputs, self.linear.states]
        return sum(part.nbytes for part in (*self.keys, *self.values, *states))

    def move(self, source: list[int], target: list[int], longest: int) -> None:
        """Copy the first ``longest`` tokens of slots ``source`` over slots ``target`` (disjoint
        lists), layer by layer, as a copy of half the cache would not fit into memory."""
        sources = torch.tensor(source, device=self.device)
        targets = torch.tensor(target, device=self.device)
        experts = () if self.experts is None else self.experts
        # (slots, capacity, Hkv, D), and of experts (slots, capacity, K)
        for cache in (*self.keys, *self.values, *experts):
            cache[targets, :longest] = cache[sources, :longest]
        if self.linear is not None:
            self.linear.move(sources, targets)


# -------------------------------------------------------------------------------------------------
# Packs
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VarlenCall:
    """Segments that one kernel call takes, as its arguments.

    Attributes:
        q_tokens, k_tokens: tokens of the pack to gather first; None: all, in their order.
        cu_q, cu_k: (S + 1,) int32, where each segment starts and ends.
        max_q, max_k: tokens of the longest segment, of queries and of keys.
        causal: whether tokens see only those before them; in_windows: not in layers with a window.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    in_windows: bool = False
    q_tokens: Tensor | None = None
    k_tokens: Tensor | None = None


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: VarlenCall,
    scale: float,
    backend: str,
    window: int | None = None,
) -> Tensor:
    """Variable-length attention on CUDA: q (Tq, Hq, D), k and v (Tk, Hkv, D) -> (Tq, Hq, D).

    With more keys than queries the causal mask is aligned at the bottom right: query i of a segment
    sees the surplus keys and its own first i + 1 (FlashAttention >= 2.1, Dao 2023). ``window``: how
    many keys a query sees at most.
    """
    left = -1 if window is None else window - 1
    causal = call.causal and not (call.in_windows and window)
    lengths = (call.cu_q, call.cu_k, call.max_q, call.max_k)
    if backend == "flash_attn":
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q, k, v, *lengths, softmax_scale=scale, causal=causal, window_size=(left, -1)
        )
    from torch.nn.attention.varlen import varlen_attn  # a second of import

    attend: Any = varlen_attn  # could also return logsumexp, hence the type
    # Not -1, with which torch 2.14 leaves a backward without grouped heads to cuDNN, whatever computed
    # the forward. No key is further away than max_k, so max_k limits nothing. Other kernels would take it
    # for a window; they are given it under torch 2.14 only.
    both_ways = -1 if replaced_kernels() and TORCH != (2, 14) else call.max_k
    right = 0 if causal else both_ways
    options = {}
    # torch 2.11 has no such flag, and does not compare the heads
    if "enable_gqa" in attend.__kwdefaults__:
        options["enable_gqa"] = True
    return attend(q, k, v, *lengths, scale=scale, window_size=(left, right), **options)


class PackedAttention:
    """Attention of one pack: every segment is causal in itself and may see one earlier range of
    tokens, its prefix, in full.

    A prompt is a segment without prefix; each of its responses is a segment whose prefix is that
    prompt. Nothing else is visible, so a pack may hold any number of prompts. Built once per pack
    and shared by all layers. A layer with a sliding window sees only the nearest of these keys: a
    segment's own tokens come after its prefix, wherever the pack holds them.

    (Not a dataclass: FSDP would walk through all segments in every layer, in search of gradients.)

    Args:
        segments: (start, end, prefix_start, prefix_end) in order, covering the pack; a fifth entry
            says in which layers the segment's tokens also see later ones: BOTH_WAYS or
            IN_WINDOWS (`Family.attention_segments`).
        cache, plan: prefill. Keys and values of token ``plan[0][i]`` of the pack are stored at slot
            ``plan[1][i]``, position ``plan[2][i]``: one prompt may go to many slots.
        earlier: (slots, positions) of the cache whose keys and values are appended to the pack's, so
            that prefixes may point there: the conversation before this pack.
    """

    def __init__(
        self,
        segments: list[tuple],
        backend: str,
        device: torch.device,
        cache: SlotCache | None = None,
        plan: tuple[Tensor, ...] = (),
        earlier: tuple[Tensor, ...] = (),
    ):
        self.backend, self.device, self.segments = backend, device, segments
        # tells routers which experts to choose, or keeps which they chose: see `experts`
        self.experts: Any = None
        self.cache, self.plan, self.earlier = cache, plan, earlier
        # (S, 5)
        table = np.asarray([(*segment, False)[:5] for segment in segments], dtype=np.int64)
        if backend == "sdpa":
            self.make_buckets(table)
        else:
            self.make_calls(table)

    @functools.cached_property
    def by_sdpa(self) -> "PackedAttention":
        """The same pack for layers whose heads are too large for the back-end."""
        rest = self.cache, self.plan, self.earlier
        return PackedAttention(self.segments, "sdpa", self.device, *rest)

    @functools.cached_property
    def linear(self) -> PackedDelta:
        """Mixes the pack's tokens in layers with linear attention; made when the first one runs."""
        states = None if self.cache is None else self.cache.linear
        resumed = bool(self.earlier)
        return PackedDelta(self.segments, self.device, states, self.plan, resumed=resumed)

    def to_device(self, array: np.ndarray | Tensor) -> Tensor:
        return distributed.to_device(torch.as_tensor(array), self.device)

    def make_buckets(self, table: np.ndarray) -> None:
        """Padded groups of similar segments, for one SDPA call each."""
        self.buckets: list[tuple[np.ndarray, Tensor, Tensor]] = []
        # by window, made when the first layer with it runs
        self.masks: dict[int | None, list[Tensor | None]] = {}
        len_q, prefix = table[:, 1] - table[:, 0], table[:, 3] - table[:, 2]
        order = np.empty(len_q.sum(), dtype=np.int64)
        offset = 0
        for members in bucket_segments(len_q, len_q + prefix):
            q_tokens, inside = padded_tokens(table[members])  # (b, Lq)
            k_tokens = bucket_keys(table[members])
            order[q_tokens[inside]] = offset + np.flatnonzero(inside)
            offset += q_tokens.size
            self.buckets.append(
                (table[members], self.to_device(q_tokens), self.to_device(k_tokens))
            )
        # (N,) where each token of the pack is in the outputs of the buckets
        self.order = self.to_device(order)

    def make_calls(self, table: np.ndarray) -> None:
        """One kernel call for all causal segments, and one for those that attend in both
        directions."""
        self.calls: list[VarlenCall] = []
        queries = []
        for both in sorted(set(table[:, 4])):
            part = torch.from_numpy(table[table[:, 4] == both])
            start, end, prefix_start, prefix_end, _ = part.T
            len_q, prefix = end - start, prefix_end - prefix_start
            queries.append(ragged_index(start, len_q))
            # the keys of a segment: its prefix, then itself
            starts = torch.stack([prefix_start, start], dim=1).flatten()
            lengths = torch.stack([prefix, len_q], dim=1).flatten()
            self.calls.append(
                VarlenCall(
                    cu_q=self.cumulated(len_q),
                    cu_k=self.cumulated(len_q + prefix),
                    max_q=int(len_q.max()),
                    max_k=int((len_q + prefix).max()),
                    causal=both != BOTH_WAYS,
                    in_windows=both == IN_WINDOWS,
                    q_tokens=self.unless_all(queries[-1]),
                    k_tokens=self.unless_all(ragged_index(starts, lengths)),
                )
            )
        # (N,) where each token of the pack is in the outputs of the calls
        self.order = self.unless_all(torch.cat(queries).argsort())

    def cumulated(self, lengths: Tensor) -> Tensor:
        return self.to_device(F.pad(lengths.cumsum(0), (1, 0)).int())

    def unless_all(self, tokens: Tensor) -> Tensor | None:
        """The tokens on the device; None if they are all of the pack's, in their order."""
        if torch.equal(tokens, torch.arange(self.segments[-1][1])):
            return None
        return self.to_device(tokens)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """q (1, Hq, N, D), k and v (1, Hkv, N, D) -> (1, N, Hq, D)."""
        if backend_of(self.backend, q.shape[-1]) != self.backend:
            return self.by_sdpa(layer, q, k, v, scale, window)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (N, H, D)
        if self.cache is not None:
            tokens, slots, positions = self.plan
            self.cache.keys[layer][slots, positions] = k[tokens]
            self.cache.values[layer][slots, positions] = v[tokens]
            if self.earlier:
                k = torch.cat([k, self.cache.keys[layer][self.earlier]])
                v = torch.cat([v, self.cache.values[layer][self.earlier]])
        if self.backend == "sdpa":
            outputs = self.attend_by_buckets(q, k, v, scale, window)
        else:
            outputs = []
            for call in self.calls:
                # Repeats a prompt's keys for each response; its backward sums their gradients.
                outputs.append(
                    varlen_attention(
                        select(q, call.q_tokens),
                        select(k, call.k_tokens),
                        select(v, call.k_tokens),
                        call,
                        scale,
                        self.backend,
                        window,
                    )
                )
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return select(out, self.order)[None]

    def attend_by_buckets(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> list[Tensor]:
        """The outputs (b * Lq, Hq, D) of each bucket, padding included, for q, k, v (N, H, D)."""
        if q.device.type != "cpu":  # fused kernels of GPUs take no grouped heads with a mask
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if window not in self.masks:
            masks = [bucket_mask(table, window) for table, *_ in self.buckets]
            self.masks[window] = [None if mask is None else self.to_device(mask) for mask in masks]
        outputs = []
        for (_, q_tokens, k_tokens), mask in zip(self.buckets, self.masks[window]):
            batch = []
            for x, tokens in ((q, q_tokens), (k, k_tokens), (v, k_tokens)):
                # (b, H, L, D)
                batch.append(
                    x.index_select(0, tokens.flatten()).unflatten(0, tokens.shape).transpose(1, 2)
                )
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                *batch, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return outputs


def select(x: Tensor, tokens: Tensor | None) -> Tensor:
    return x if tokens is None else x.index_select(0, tokens)


# A call costs about as much as CALL_ENTRIES entries of a score matrix, so that padding up to WASTE
# times the true area, or up to CALL_ENTRIES entries, is cheaper than another call.
CALL_ENTRIES, WASTE = 1 << 14, 1.5


def bucket_segments(len_q: np.ndarray, len_k: np.ndarray) -> list[np.ndarray]:
    """Group segments of similar size for one padded call each.

    The area of a segment without prefix is half its square. So is that of each in a bucket of equal
    ones, which needs no mask; a bucket with others in it computes the full rectangle.
    """
    order = np.lexsort((len_q, len_k, len_k > len_q))
    buckets = []
    start, area = 0, 0.0
    max_q = max_k = 0
    for i, s in enumerate(order):
        size = len_q[s] * len_k[s] * (0.5 if len_q[s] == len_k[s] else 1.0)
        new_q, new_k = max(max_q, len_q[s]), max(max_k, len_k[s])
        # sorted: all are equal if the first and the last are
        equal = len_q[order[start]] == len_k[s] == len_q[s]
        padded = new_q * new_k * (i - start + 1) * (0.5 if equal else 1.0)
        if i > start and padded > max(CALL_ENTRIES, WASTE * (area + size)):
            buckets.append(order[start:i])
            start, area, new_q, new_k = i, 0.0, len_q[s], len_k[s]
        area, max_q, max_k = area + size, new_q, new_k
    return [*buckets, order[start:]]


def bucket_keys(table: np.ndarray) -> np.ndarray:
    """(b, Lk) the tokens that each segment of a bucket (b, 5) may see: its prefix, then its own; padding
    points at its first."""
    start, end, prefix_start, prefix_end = (table[:, i : i + 1] for i in range(4))  # (b, 1)
    length, prefix = end - start, prefix_end - prefix_start
    j = np.arange((length + prefix).max())
    of_itself = np.where(j < prefix + length, start + j - prefix, start)
    return np.where(j < prefix, prefix_start + j, of_itself)


def bucket_mask(table: np.ndarray, window: int | None) -> np.ndarray | None:
    """Which keys each query of a bucket sees, (b, 1, Lq, Lk) bool; None where plain causal
    attention is the same."""
    # (b, 1)
    length, prefix, both = (
        table[:, 1:2] - table[:, :1],
        table[:, 3:4] - table[:, 2:3],
        (table[:, 4:] == BOTH_WAYS) if window is None else table[:, 4:] > 0,
    )
    equal = (prefix == 0).all() and (length == length[0]).all() and not both.any()
    if equal and (window is None or length[0] <= window):
        return None
    # (b, Lq, 1); padding must see some key, or it would be NaN
    i = np.minimum(np.arange(length.max()), length - 1)[..., None]
    # (b, 1, Lk) index after the prefix, below 0 inside it
    j = (np.arange((length + prefix).max()) - prefix)[:, None]
    mask = (j < length[..., None]) & ((j <= i) | both[..., None])
    if window is not None:
        mask &= i - j < window
    return mask[:, None]


# -------------------------------------------------------------------------------------------------
# Decoding
# -------------------------------------------------------------------------------------------------


class DecodeAttention:
    """One new token for each of the first B slots: stores its key and value, then attends to the
    slot's own tokens.

    Args:
        lengths: (B,) tokens already stored in each slot (device tensor; the new token goes to this
            position).
        longest: host-side upper bound of ``lengths + 1`` of the busy slots; in a graph, which must
            serve any length, the cache capacity, or for sdpa a power of two.
    """

    def __init__(self, cache: SlotCache, lengths: Tensor, longest: int, backend: str):
        self.cache, self.lengths, self.longest, self.backend = cache, lengths, longest, backend
        self.experts: Any = None  # as in `PackedAttention`
        self.linear = cache.linear
        # What all layers share is computed here, once: on a GPU each line launches a kernel.
        self.slots = torch.arange(len(lengths), device=lengths.device)
        # by window and heads, made when the first layer with them runs
        self.masks: dict[tuple[int | None, int], Tensor] = {}
        if backend != "sdpa":
            self.stored = (lengths + 1).int()  # (B,) with the new token
            self.q_bounds = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
            self.k_bounds = self.q_bounds * cache.capacity  # (B + 1,) where each slot begins

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """q (1, Hq, B, D), k and v (1, Hkv, B, D), with the B slots as one sequence -> (1, B, Hq,
        D)."""
        size = len(self.lengths)
        keys, values = self.cache.keys[layer], self.cache.values[layer]  # (slots, M, Hkv, D)
        keys[self.slots, self.lengths] = k[0].transpose(0, 1)
        values[self.slots, self.lengths] = v[0].transpose(0, 1)
        q = q[0].transpose(0, 1)  # (B, Hq, D)
        attend = getattr(self, f"attend_{backend_of(self.backend, q.shape[-1])}")
        return attend(q, keys[:size], values[:size], scale, window)[None]

    def attend_flash_attn(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        from flash_attn import flash_attn_with_kvcache

        left = -1 if window is None else window - 1
        out = flash_attn_with_kvcache(
            q[:, None],
            keys,
            values,
            softmax_scale=scale,
            cache_seqlens=self.stored,
            causal=True,
            window_size=(left, -1),
        )
        return out[:, 0]

    def attend_varlen(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """By the aten operator, which takes seqused_k in every supported torch; varlen_attn does
        not."""
        out, *_ = torch.ops.aten._flash_attention_forward(
            q,
            keys.flatten(0, 1),
            values.flatten(0, 1),
            self.q_bounds,
            self.k_bounds,
            1,
            self.cache.capacity,
            0.0,
            False,
            False,
            scale=scale,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=-1,
            seqused_k=self.stored,
        )
        return out

    def attend_sdpa(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Folds grouped query heads into the batch, so that keys are not repeated."""
        queries = q.reshape(len(q) * keys.shape[2], -1, q.shape[-1])  # (B * Hkv, G, D)
        # (B * Hkv, M, D)
        k, v = (x[:, : self.longest].transpose(1, 2).flatten(0, 1) for x in (keys, values))
        mask = self.mask(window, keys.shape[2])
        if q.dtype == torch.float32:  # SDPA costs up to twice as much for so few queries
            scores = torch.baddbmm(mask, queries, k.transpose(1, 2), alpha=scale)  # (B * Hkv, G, M)
            return torch.bmm(scores.softmax(-1), v).view(q.shape)
        batch = [queries, k, v, mask]
        if q.device.type != "cpu":  # fused kernels of GPUs take four dimensions only
            batch = [x.unflatten(0, (len(q), -1)) for x in batch]
        # scores and sums in float32
        return F.scaled_dot_product_attention(*batch, scale=scale).reshape(q.shape)

    def mask(self, window: int | None, heads: int) -> Tensor:
        """(B * Hkv, 1, longest), of Hkv ``heads``: 0 at the keys that the new tokens see, else
        -inf."""
        if (window, heads) not in self.masks:
            # (B, longest)
            age = self.lengths[:, None] - torch.arange(self.longest, device=self.lengths.device)
            mask = torch.zeros(age.shape, dtype=self.cache.keys[0].dtype, device=age.device)
            mask.masked_fill_((age < 0) | (age >= (window or self.longest)), -torch.inf)
            self.masks[window, heads] = mask.repeat_interleave(heads, dim=0)[:, None]
        return self.masks[window, heads]


# -------------------------------------------------------------------------------------------------
# What transformers calls
# -------------------------------------------------------------------------------------------------


# Other arguments that layers pass: ours knows them better, or they change nothing.
PASSED_ALONG = ("cache_position", "dropout", "position_ids", "use_cache")


def check_call(attention_mask, others: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raises ValueError: a layer brings its own mask, or an argument that our attention would ignore."""
    wanted = {name for name, value in others.items() if value is not None and value is not False}
    names = sorted(wanted - {*known})
    if attention_mask is not None:
        names.append("a mask of its own")
    if names:
        raise ValueError(
            f"a layer of the model gives its attention {', '.join(names)}, which is not supported"
        )


def language_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling: float,
    attention: "PackedAttention | DecodeAttention | None" = None,
    sliding_window=None,
    **others,
):
    """The attention function of the language model: ``attention`` is one of the two classes
    above. Raises ValueError: see `check_call`; or the layer did not pass it on."""
    if attention is None:
        raise ValueError(
            f"{type(module).__name__} is not told by its layer what a pack holds, which is not supported"
        )
    check_call(attention_mask, others, PASSED_ALONG)
    return attention(module.slot_layer, query, key, value, scaling, sliding_window), None


LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
VISION_PASSED_ALONG = (*LENGTHS, "dropout", "is_causal")


def _vision_attention(
    module, query, key, value, attention_mask, scaling: float, *, backend: str, **lengths
):
    """The vision tower's attention on CUDA: one varlen call per block, not one SDPA call per
    window."""
    check_call(attention_mask, lengths, VISION_PASSED_ALONG)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    call = VarlenCall(
        cu_q=lengths["cu_seq_lens_q"].int(),
        cu_k=lengths["cu_seq_lens_k"].int(),
        max_q=int(lengths["max_length_q"]),
        max_k=int(lengths["max_length_k"]),
        causal=False,
    )
    return varlen_attention(q, k, v, call, scaling, backend)[None], None


# Registered without a mask function on purpose: transformers then builds no (N, N) mask and passes
# None.
AttentionInterface.register(ATTENTION_NAME, language_attention)
for _backend in ("flash_attn", "varlen"):
    _function = functools.partial(_vision_attention, backend=_backend)
    AttentionInterface.register(VISION_ATTENTION_NAME + _backend, _function)
