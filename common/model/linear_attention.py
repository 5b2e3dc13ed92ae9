"""Linear attention: the Gated DeltaNet layers of Qwen3.5 (Yang et al. 2025), exact in packs
and in decoding.

A token depends on earlier ones in two ways only: through the last K - 1 inputs of the layer's
convolution, and through one matrix per head, the state. A response in a pack gets both from the
end of its prompt, and gradients flow back through both; a slot keeps both from token to token.

    DeltaNet       the layer: transformers' weights, tokens mixed by one of the two below
    PackedDelta    mixes the tokens of one pack
    SlotStates     mixes one new token of each slot, and keeps what the next one needs

Shapes: N tokens of a pack, C channels of the convolution, K its width, Hk and Hv heads of keys and
values, Dk and Dv numbers of a head, B slots, W segments without a prefix, R with one.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe

from common import distributed
from common.ground.files import UserError

KERNEL_WIDTH = 4  # K of every Qwen3.5; other widths are refused, as they are not tested
FLA_INSTALL = "pip install fla-core"
# of transformers, the same but for the name
HF_LAYERS = (qwen3_5.Qwen3_5GatedDeltaNet, qwen3_5_moe.Qwen3_5MoeGatedDeltaNet)


# -------------------------------------------------------------------------------------------------
# Sizes
# -------------------------------------------------------------------------------------------------


def linear_layers(text_config) -> int:
    """How many layers have a state instead of keys and values."""
    return (getattr(text_config, "layer_types", None) or []).count("linear_attention")


def channels(text_config) -> int:
    """C: queries, keys and values side by side."""
    keys = text_config.linear_num_key_heads * text_config.linear_key_head_dim
    return 2 * keys + text_config.linear_num_value_heads * text_config.linear_value_head_dim


def activation_bytes(text_config, itemsize: int) -> int:
    """Bytes per token that a layer keeps for its backward: what the convolution reads, in float32,
    and its output before and after the activation; of `fla_rule` queries, keys and a product of
    each token with those of its chunk of 64; five copies of the output around the gated norm, three
    of them in float32. `padded_rule` keeps more."""
    heads, values = text_config.linear_num_value_heads, text_config.linear_value_head_dim
    keys = text_config.linear_num_key_heads * text_config.linear_key_head_dim
    rule = 2 * keys + 64 * heads
    around = (12 + 2 * itemsize) * heads * values
    return (4 + 2 * itemsize) * channels(text_config) + itemsize * rule + around


# -------------------------------------------------------------------------------------------------
# The layer
# -------------------------------------------------------------------------------------------------


class Decay(nn.Module):
    """How much of its state each head keeps: inputs (N, Hv) -> logarithms of it (N, Hv), float32.

    A module of its own so that the script can shard it with a policy of its own: the weights stay
    float32 where those of the layer are cast to bfloat16, as mamba_ssm_dtype in config.json asks.
    """

    def __init__(self, A_log: nn.Parameter, dt_bias: nn.Parameter):
        super().__init__()
        self.A_log, self.dt_bias = A_log, dt_bias

    def forward(self, inputs: Tensor) -> Tensor:
        return -self.A_log.float().exp() * F.softplus(inputs.float() + self.dt_bias.float())


class DeltaNet(qwen3_5.Qwen3_5GatedDeltaNet):
    """A layer of transformers with its weights, whose tokens are mixed by ``attention.linear``:
    `PackedDelta` or `SlotStates`.

    It takes over all that the layer has. Weights keep their names, but for the two in `Decay`.

    Raises:
        UserError: a convolution of another width, another activation.
    """

    slot_layer: int  # its number in the cache

    def __init__(self, theirs: Any):
        nn.Module.__init__(self)  # no weights of its own
        if theirs.conv_kernel_size != KERNEL_WIDTH or theirs.activation != "silu":
            raise UserError(
                f"linear attention with linear_conv_kernel_dim {theirs.conv_kernel_size} and "
                f"hidden_act {theirs.activation} is not supported; Qwen3.5 has {KERNEL_WIDTH} and silu"
            )
        vars(self).update(vars(theirs))
        self.decay = Decay(theirs.A_log, theirs.dt_bias)
        del self._parameters["A_log"], self._parameters["dt_bias"]

    def forward(self, hidden_states: Tensor, attention, **_) -> Tensor:
        """(1, N, H) -> (1, N, H)."""
        x = hidden_states[0]  # (N, H)
        taps = self.conv1d.weight[:, 0].T  # (K, C)
        mixed = attention.linear.convolve(self.slot_layer, self.in_proj_qkv(x), taps)
        q, k, v = F.silu(mixed).split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q, k = (y.unflatten(-1, (-1, self.head_k_dim)) for y in (q, k))  # (N, Hk, Dk)
        v = v.unflatten(-1, (-1, self.head_v_dim))  # (N, Hv, Dv)
        decay, strength = self.decay(self.in_proj_a(x)), self.in_proj_b(x).sigmoid()  # (N, Hv)
        out = attention.linear.recur(self.slot_layer, q, k, v, decay, strength)  # (N, Hv, Dv)
        gate = self.in_proj_z(x).view_as(out)
        out = self.norm(out.flatten(0, 1), gate.flatten(0, 1))
        return self.out_proj(out.view(1, len(x), -1))


# -------------------------------------------------------------------------------------------------
# Packs
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeltaCall:
    """The segments of a pack that one call of the delta rule takes, with n tokens in all.

    Attributes:
        tokens: (n,) indices in the pack, one segment after the other; empty: the whole pack.
        bounds: (segments + 1,) int64, where each segment begins and ends among these.
        padded: (segments, longest) indices in the pack; padding repeats a segment's first.
        is_padding: (segments, longest, 1) bool.
        index: (n,) where the tokens are in ``padded``, flattened.
    """

    tokens: Tensor
    bounds: Tensor
    padded: Tensor
    is_padding: Tensor
    index: Tensor


class PackedDelta:
    """Mixes the tokens of one pack. Segments without a prefix start from zero states; those with one
    start from the final state of their prefix, which is a segment without a prefix.

    Args:
        segments, plan: see `attention.PackedAttention`.
        states: prefill. If ``plan`` stores a segment's last token in a slot, the segment's final state
            and last inputs are stored there, too.
        resumed: every segment continues from the state of its slot instead; prefixes are only for
            layers with keys.
    """

    def __init__(
        self,
        segments: list[tuple],
        device: torch.device,
        states: "SlotStates | None" = None,
        plan: tuple[Tensor, ...] = (),
        resumed: bool = False,
    ):
        self.device, self.states = device, states
        self.resumed = states if resumed else None
        table = np.asarray([segment[:4] for segment in segments], dtype=np.int64)
        if resumed:
            table[:, 2:] = table[:, :1]
        start, end, prefix_start, prefix_end = table.T
        has_prefix = prefix_start < prefix_end  # (S,)
        parent = np.searchsorted(start[~has_prefix], prefix_start[has_prefix])
        self.parent = self.to_device(parent)  # (R,) which of the W segments each continues
        self.size = end[-1]  # N
        self.without_prefix = self.call_for(table[~has_prefix])
        self.with_prefix = None
        if has_prefix.any():
            self.with_prefix = self.call_for(table[has_prefix])
            # (N,) where each token is in the outputs of the two calls
            self.order = torch.cat([self.without_prefix.tokens, self.with_prefix.tokens]).argsort()
        inputs = convolution_inputs(table, resumed)  # (S, K - 1 + longest)
        # The convolution of the first K - 1 tokens of each segment reaches beyond its start.
        windows = np.lib.stride_tricks.sliding_window_view(
            inputs, KERNEL_WIDTH, axis=1
        )  # of each token
        first, windows = (
            inputs[:, KERNEL_WIDTH - 1 : 2 * KERNEL_WIDTH - 2],
            windows[:, : KERNEL_WIDTH - 1],
        )
        inside = first < end[:, None]
        self.first = self.to_device(first[inside])  # (F,)
        self.sources = self.to_device(windows[inside])  # (F, K) inputs under it, oldest first
        if states is not None:
            ends = (end - start)[:, None] + np.arange(KERNEL_WIDTH - 1)
            last = np.take_along_axis(inputs, ends, axis=1)  # (S, K - 1)
            self.keep(end[~has_prefix], last[~has_prefix], plan)

    def to_device(self, array: np.ndarray) -> Tensor:
        return distributed.to_device(torch.as_tensor(array), self.device)

    def call_for(self, table: np.ndarray) -> DeltaCall:
        padded, inside = padded_tokens(table)
        tokens = padded[inside]
        return DeltaCall(
            tokens=self.to_device(tokens[: 0 if len(tokens) == self.size else None]),
            bounds=self.to_device(np.append(0, np.cumsum(inside.sum(1)))),
            padded=self.to_device(padded),
            is_padding=self.to_device(~inside[..., None]),
            index=self.to_device(np.flatnonzero(inside)),
        )

    def keep(self, ends: np.ndarray, last: np.ndarray, plan: tuple[Tensor, ...]) -> None:
        """Which of the segments that end at ``ends`` (W,) goes to which slot, and the indices (k,
        K - 1) of its last inputs."""
        tokens, slots, _ = plan
        bounds = self.to_device(ends)
        is_last = torch.isin(tokens, bounds - 1)
        self.ending = torch.searchsorted(bounds, tokens[is_last], right=True)  # (k,)
        self.slots = slots[is_last]
        self.last = self.to_device(last)[self.ending]

    def convolve(self, layer: int, x: Tensor, taps: Tensor) -> Tensor:
        """The causal convolution, x (N, C) and taps (K, C) -> (N, C): over the pack, and once more
        for the first tokens of each segment. In float32, rounded once, as in decoding."""
        padded = F.pad(x.float(), (0, 0, KERNEL_WIDTH - 1, 1))
        inputs = padded[KERNEL_WIDTH - 1 :]  # the pack, and after it zeros
        if self.resumed is not None:
            earlier = self.resumed.inputs[layer, self.slots].float()
            inputs = torch.cat([inputs, earlier.flatten(0, 1)])
        weights = taps.float()
        out = padded[: len(x)] * weights[0]
        for i in range(1, KERNEL_WIDTH):
            out = out + padded[i : i + len(x)] * weights[i]
        again = (inputs[self.sources] * weights).sum(dim=1)
        if self.states is not None:
            self.states.inputs[layer, self.slots] = inputs[self.last].to(x.dtype)
        return out.index_copy(0, self.first, again).to(x.dtype)

    def recur(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor
    ) -> Tensor:
        """The delta rule: q, k (N, Hk, Dk), v (N, Hv, Dv), logarithm of the decay and strength of
        the update (N, Hv) -> (N, Hv, Dv)."""
        inputs = q, k, v, decay, strength
        rule = choose_rule(q.device.type, q.dtype)
        initial = None if self.resumed is None else self.resumed.states[layer, self.slots]
        out, state = rule(self.without_prefix, inputs, initial)  # (n, Hv, Dv), (W, Hv, Dk, Dv)
        if self.states is not None:
            self.states.states[layer, self.slots] = state[self.ending]
        if self.with_prefix is None:
            return out
        after, _ = rule(self.with_prefix, inputs, state.index_select(0, self.parent))
        return torch.cat([out, after]).index_select(0, self.order)


def padded_tokens(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(S, longest) the tokens of segments in the pack, padding repeating a segment's first token; and
    (S, longest) bool, which are not padding."""
    start, length = table[:, :1], table[:, 1:2] - table[:, :1]  # (S, 1)
    step = np.arange(length.max())
    inside = step < length
    return np.where(inside, start + step, start), inside


def convolution_inputs(table: np.ndarray, resumed: bool) -> np.ndarray:
    """(S, K - 1 + longest) the index of each input of the convolution: K - 1 before the segment, then
    its own. Those before are the end of its prefix, or N, where there are zeros; for a resumed segment
    they are N + 1 and on, where the inputs from its slot are."""
    size, width = table[-1, 1], KERNEL_WIDTH - 1
    start, end, prefix_start, prefix_end = (table[:, i : i + 1] for i in range(4))  # (S, 1)
    before = prefix_end + np.arange(-width, 0)
    before = np.where(before < prefix_start, size, before)
    if resumed:
        before = size + 1 + np.arange(width * len(table)).reshape(-1, width)
    inside = start + np.arange(max((end - start).max(), width))
    return np.concatenate([before, inside], axis=1)


# -------------------------------------------------------------------------------------------------
# The delta rule
# -------------------------------------------------------------------------------------------------


@functools.cache
def choose_rule(device: str, dtype: torch.dtype) -> Callable:
    """`fla_rule` on a GPU in reduced precision if its package is installed, otherwise `padded_rule`."""
    if device != "cuda" or dtype == torch.float32:
        return padded_rule
    if importlib.util.find_spec("fla") is None:
        distributed.say_once(f"linear attention runs in plain torch; faster: {FLA_INSTALL}")
        return padded_rule
    load_fla()
    return fla_rule


def load_fla() -> Callable:
    """The kernel of flash-linear-attention."""
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


@functools.cache
def fla_shares_keys() -> bool:
    """Whether the kernel takes fewer heads of keys than of values, as it does since version 0.5."""
    return Version(importlib.import_module("fla").__version__) >= Version("0.5")


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (..., Hk, Dk), each head as often as values (..., Hv, Dv) have heads for it."""
    repeats = v.shape[-2] // k.shape[-2]
    return q.repeat_interleave(repeats, dim=-2), k.repeat_interleave(repeats, dim=-2)


def fla_rule(
    call: DeltaCall, inputs: tuple[Tensor, ...], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The delta rule by the kernels of flash-linear-attention: inputs of the whole pack and initial
    states (segments, Hv, Dk, Dv) -> outputs (n, Hv, Dv), one segment after the other, and final
    states."""
    if len(call.tokens):
        inputs = tuple(x.index_select(0, call.tokens) for x in inputs)
    q, k, v, decay, strength = (x[None] for x in inputs)
    if not fla_shares_keys():
        q, k = repeat_heads(q, k, v)
    out, final = load_fla()(
        q,
        k,
        v,
        g=decay,
        beta=strength,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=call.bounds,
    )
    return out[0], final


def padded_rule(
    call: DeltaCall, inputs: tuple[Tensor, ...], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`fla_rule` in plain torch, by transformers' function for segments of one length. Padding
    neither lets a state decay nor writes into it."""
    shape = call.padded.shape
    batch = [x.index_select(0, call.padded.flatten()).unflatten(0, shape) for x in inputs]
    q, k = repeat_heads(*batch[:3])  # (segments, longest, Hv, Dk)
    decay, strength = (x.masked_fill(call.is_padding, 0) for x in batch[3:])
    # Unwrapped: with flash-linear-attention installed, the name would call its kernel.
    function = inspect.unwrap(qwen3_5.torch_chunk_gated_delta_rule)
    out, final = function(
        q,
        k,
        batch[2],
        g=decay,
        beta=strength,
        chunk_size=min(64, shape[1]),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out.flatten(0, 1).index_select(0, call.index), final


# -------------------------------------------------------------------------------------------------
# Decoding
# -------------------------------------------------------------------------------------------------


class SlotStates:
    """What decoding needs of each sequence's tokens so far, in layers without keys:
    ``inputs`` (layers, slots, K - 1, C), and ``states`` (layers, slots, Hv, Dk, Dv) in float32.

    Mixes one new token for each of the first B slots, all in place and without waiting for the
    device.
    """

    def __init__(self, text_config, slots: int, dtype: torch.dtype, device: torch.device):
        layers, heads = linear_layers(text_config), text_config.linear_num_value_heads
        head = text_config.linear_key_head_dim, text_config.linear_value_head_dim
        window = layers, slots, KERNEL_WIDTH - 1, channels(text_config)
        self.inputs = torch.zeros(window, dtype=dtype, device=device)
        self.states = torch.zeros(layers, slots, heads, *head, device=device)
        # (slots,) bool: slots that must not change, as their sequences wait to go on
        self.done: Tensor | None = None

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` over slots ``target``, layer by layer."""
        for layer in (*self.inputs, *self.states):
            layer[target] = layer[source]

    def convolve(self, layer: int, x: Tensor, taps: Tensor) -> Tensor:
        """x (B, C) and taps (K, C) -> (B, C)."""
        inputs = self.inputs[layer, : len(x)]
        window = torch.cat([inputs, x[:, None]], dim=1)  # (B, K, C)
        newest = window[:, 1:]
        if self.done is not None:
            newest = torch.where(self.done[: len(x), None, None], inputs, newest)
        inputs.copy_(newest)
        return (window.float() * taps.float()).sum(dim=1).to(x.dtype)

    def recur(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor
    ) -> Tensor:
        """q, k (B, Hk, Dk), v (B, Hv, Dv), logarithm of the decay and strength of the update (B,
        Hv) -> (B, Hv, Dv).

        S' = decay S + k d with d = strength (v - k decay S), and out = q S', where the old state is
        read once for both products.
        """
        if self.done is not None:
            done = self.done[: len(q), None]
            decay = decay.masked_fill(done, 0)
            strength = strength.masked_fill(done, 0)
        state = self.states[layer, : len(q)]  # (B, Hv, Dk, Dv)
        scale, dtype = q.shape[-1] ** -0.5, v.dtype
        q, k = repeat_heads(q, k, v)
        q, k, v, strength = (x.float() for x in (q, k, v, strength))
        q, k = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
        q, decay = q * scale, decay.exp()[..., None]  # (B, Hv, 1)
        by_query, by_key = ((torch.stack([q, k], dim=-2) @ state) * decay[..., None]).unbind(-2)
        change = (v - by_key) * strength[..., None]  # (B, Hv, Dv)
        state.mul_(decay[..., None]).addcmul_(k[..., None], change[..., None, :])
        return (by_query + (q * k).sum(dim=-1, keepdim=True) * change).to(dtype)
