"""Reference kernels with FlashAttention's argument rules, for a CPU, in place of those that only a
GPU has.

They stand where our code calls `torch.nn.attention.varlen.varlen_attn`, the operator
`aten::_flash_attention_forward` and the functions of the package flash_attn, so that whole
rollouts, scorings and updates run through the very calls of a GPU. They show that the calls are
right, not what the kernels make of them.

The fixtures kernels, device and gpu are in conftest.py."""

import importlib.machinery
import math
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.attention._registry as torch_registry
import torch.nn.attention.varlen as torch_varlen

from common.model import attention, build
from common.model.attention import DecodeAttention, PackedAttention, SlotCache, choose_backend
from launch import check_kernels

OPERATOR = "_flash_attention_forward"
CUDA, CPU = torch.device("cuda"), torch.device("cpu")

# What no CPU can stand in for. A test that needs a GPU and is not listed takes `device`: its names,
# flags and shapes are then right wherever the tests run.
ONLY_ON_A_GPU = {
    "test_graphs_decode_the_same_tokens": "captures CUDA graphs",
    "test_sampled_logprobs_are_those_of_training_with_graphs": "captures CUDA graphs",
    "test_graphs_are_freed_with_their_rollout": "measures the memory of a GPU",
    "test_ranks_that_share_a_gpu_learn_what_one_does": "several ranks of NCCL",
    "test_whole_runs_of_ranks_that_share_a_gpu": "several ranks of NCCL",
    "test_ranks_that_share_a_gpu_are_killed_and_resumed": "several ranks of NCCL",
    "test_a_rank_that_fails_ends_those_it_shares_a_gpu_with": "several ranks of NCCL",
    "test_judges_that_share_a_gpu": "several ranks of NCCL",
    "test_programs_compute_on_the_gpu_of_their_rank": "forks before CUDA is initialised",
    "test_a_gpu_is_relieved": "measures the memory of a GPU",
    "test_a_copy_of_a_gpu_is_exact_and_pinned": "copies on a stream into pinned memory",
}


class Call(NamedTuple):
    """Of a kernel: its name, and the arguments as they were given, tensors as their types."""

    name: str
    positional: tuple
    named: dict


def check_rules(q, k, v, cu_q, cu_k, max_q: int, max_k: int) -> None:
    """What FlashAttention-2 asks of its inputs."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16), (
        "half precision, all alike"
    )
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "the last dimension lies side by side"
    assert q.ndim == k.ndim == v.ndim == 3 and k.shape == v.shape, "(tokens, heads, dimension)"
    assert q.shape[2] == k.shape[2] <= 256 and q.shape[2] % 8 == 0, "a multiple of 8, at most 256"
    assert q.shape[1] % k.shape[1] == 0, "whole groups of query heads"
    for bounds, tokens in ((cu_q, len(q)), (cu_k, len(k))):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds.ndim == 1, (
            "int32 bounds"
        )
        assert bounds[0] == 0 and bool((bounds.diff() >= 0).all()) and bounds[-1] <= tokens, (
            "bounds within the tokens"
        )
    assert cu_q[-1] == len(q), "every query has a segment"
    assert len(cu_q) == len(cu_k), "as many segments of keys as of queries"
    assert type(max_q) is int and type(max_k) is int, "lengths known to the host"


def attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal: bool, left: int, used=None):
    """(tokens, Hq, D): softmax in float32, segment by segment; ``left``: keys seen before the own
    one, -1: all; ``used``: how many keys of a segment are filled."""
    check_rules(q, k, v, cu_q, cu_k, max_q, max_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    outputs = []
    for i in range(len(bounds_q) - 1):
        start, end = bounds_k[i], bounds_k[i + 1] if used is None else bounds_k[i] + int(used[i])
        queries = q[bounds_q[i] : bounds_q[i + 1]].float().transpose(0, 1)  # (Hq, n, D)
        keys, values = (
            x[start:end].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v)
        )
        n, m = queries.shape[1], keys.shape[1]
        assert n <= max_q and m <= max_k, "segments within the lengths that were promised"
        # aligned at the bottom right
        place = torch.arange(max(n, m), device=q.device)
        age = place[:n, None] + (m - n) - place[None, :m]
        hidden = torch.zeros_like(age, dtype=torch.bool)
        if causal:
            hidden |= age < 0
        if left >= 0:
            hidden |= age > left
        scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(hidden, -math.inf)
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype))
    return torch.cat(outputs)


class Kernels:
    """Notes every call before it computes."""

    def __init__(self, grouped: bool):
        self.calls: list[Call] = []
        self.grouped = grouped  # whether varlen_attn must be told of grouped query heads

    def names(self) -> set[str]:
        return {call.name for call in self.calls}

    def note(self, name: str, positional: tuple, named: dict) -> None:
        kinds = {key: type(value) for key, value in named.items()}
        self.calls.append(Call(name, tuple(type(value) for value in positional), kinds))

    def varlen_attn(
        self,
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        **more,
    ):
        self.note(
            "varlen_attn",
            (q, k, v, cu_q, cu_k, max_q, max_k),
            {"scale": scale, "window_size": window_size, **more},
        )
        assert q.shape[1] == k.shape[1] or not self.grouped or more["enable_gqa"]
        # -1: torch 2.14 may leave the backward to cuDNN. Other kernels would take max_k for a window
        may_leave = hasattr(torch_varlen, "_can_use_cudnn")
        replaced = torch.nn.attention.current_flash_attention_impl()
        both_ways = -1 if replaced and not may_leave else max_k
        assert window_size[1] in (both_ways, 0)
        return attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size[1] == 0, window_size[0])

    def operator(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **named):
        self.note(OPERATOR, (q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug), named)
        used, left = named.get("seqused_k"), named.get("window_size_left")
        assert used is None or (used.dtype == torch.int32 and len(used) == len(cu_k) - 1)
        assert dropout == 0.0
        assert not debug
        assert not torch.nn.attention.current_flash_attention_impl()  # rollouts have torch's own
        assert named.get("alibi_slopes") is None
        out = attend(
            q,
            k,
            v,
            cu_q,
            cu_k,
            max_q,
            max_k,
            named.get("scale"),
            causal,
            -1 if left is None else left,
            used,
        )
        return out, *(torch.zeros(1) for _ in range(4))

    def flash_attn_varlen_func(self, q, k, v, cu_q, cu_k, max_q, max_k, **named):
        self.note("flash_attn_varlen_func", (q, k, v, cu_q, cu_k, max_q, max_k), named)
        left, right = named["window_size"]
        assert right == -1 or named["causal"]
        return attend(
            q, k, v, cu_q, cu_k, max_q, max_k, named["softmax_scale"], named["causal"], left
        )

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, **named):
        self.note("flash_attn_with_kvcache", (q, k_cache, v_cache), named)
        slots, capacity = k_cache.shape[:2]
        used = named["cache_seqlens"]
        assert q.ndim == 4
        assert len(q) == slots
        assert q.shape[1] == 1
        assert used.dtype == torch.int32
        assert used.shape == (slots,)
        assert int(used.max()) <= capacity
        bounds = torch.arange(slots + 1, dtype=torch.int32)
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        out = attend(
            q[:, 0],
            keys,
            values,
            bounds,
            bounds * capacity,
            1,
            capacity,
            named["softmax_scale"],
            False,
            named["window_size"][0],
            used,
        )
        return out[:, None]


class Handle:
    """What torch keeps of kernels that are under its operators."""

    def remove(self) -> None:
        pass


def offer_flash_attention_4(monkeypatch, capability: tuple[int, int] = (9, 0)) -> None:
    """As on a GPU with the package, whose kernels stay torch's; they are tried on the CPU."""
    monkeypatch.setitem(torch_registry._FLASH_ATTENTION_IMPLS, "FA4", Handle)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "TORCH", max(attention.TORCH, (2, 12)))  # 2.11 is refused
    tried = attention.try_kernels
    monkeypatch.setattr(attention, "try_kernels", lambda device: tried(CPU))


def replace_kernels(monkeypatch) -> Iterator[Kernels]:
    """Inside, every back-end runs on a CPU."""
    replaced = Kernels(grouped="enable_gqa" in torch_varlen.varlen_attn.__kwdefaults__)
    # which our code asks for the keywords of the installed torch
    real = torch_varlen.varlen_attn.__kwdefaults__

    def varlen_attn(*positional, **named):
        assert named.keys() <= real.keys()
        return replaced.varlen_attn(*positional, **named)

    varlen_attn.__kwdefaults__ = real
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    package = types.ModuleType("flash_attn")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.flash_attn_varlen_func = replaced.flash_attn_varlen_func
    package.flash_attn_with_kvcache = replaced.flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", package)

    def choose(requested, device, dtype=torch.bfloat16):
        return choose_backend(requested, CUDA, dtype)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(build, "choose_backend", choose)
    monkeypatch.setattr(check_kernels, "choose_backend", choose)
    library = torch.library.Library("aten", "IMPL")
    library.impl(OPERATOR, replaced.operator, "CPU")
    yield replaced
    library._destroy()


HEADS, KV_HEADS, GROUP, DIM = 4, 2, 2, 64
# Two prompts, the first with two responses and the second with three, and a prompt alone.
SEGMENTS = [
    (0, 150, 0, 0),
    (150, 190, 0, 150),
    (190, 191, 0, 150),
    (191, 208, 208, 208),
    (208, 240, 191, 208),
    (240, 310, 191, 208),
    (310, 333, 191, 208),
    (333, 400, 400, 400),
]


def attention_bounds(dtype: torch.dtype) -> dict[str, float]:
    """Relative errors that rounding explains, as launch/check_kernels.py has them: inputs of a
    product, scores and results are rounded, backwards three times as often; sums are of up to 400
    numbers."""
    forward, backward = (
        check_kernels.explained(dtype, roundings, terms=400) for roundings in (4, 12)
    )
    return dict(forward=forward, dq=backward, dk=backward, dv=backward)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().cpu().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def packed_errors(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    segments=SEGMENTS,
    window: int | None = None,
) -> dict[str, float]:
    """Relative errors of the packed forward and its gradients against per-segment softmax in float64."""
    generator, size = torch.Generator().manual_seed(0), segments[-1][1]
    inputs = [
        torch.randn(1, heads, size, DIM, generator=generator).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    ours = [x.to(device).requires_grad_() for x in inputs[:3]]
    truth = [x.double().requires_grad_() for x in inputs[:3]]
    # (1, N, Hq, D)
    out = PackedAttention(segments, backend, device)(0, *ours, DIM**-0.5, window)
    # (Hq, N, D)
    q, k, v = (x[0].repeat_interleave(HEADS // x.shape[1], 0) for x in truth)
    expected = []
    for start_, end, p_start, p_end, *both in segments:
        places = [*range(p_start, p_end), *range(start_, end)]
        ones = torch.ones(end - start_, len(places), dtype=torch.bool)
        seen = (ones if both else ones.tril(p_end - p_start)) & ones.triu(
            p_end - p_start - (window or size) + 1
        )
        scores = q[:, start_:end] @ k[:, places].transpose(1, 2) * DIM**-0.5
        expected.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, places])
    expected = torch.cat(expected, 1).transpose(0, 1)[None]
    weight = inputs[3].transpose(1, 2)
    gradients = torch.autograd.grad((out * weight.to(device)).sum(), ours)
    expected_gradients = torch.autograd.grad((expected * weight.double()).sum(), truth)
    # a softmax of one number is 1: the gradients of queries and keys are 0
    if size == 1:
        assert all(
            gradient.abs().max() < attention_bounds(dtype)["forward"] for gradient in gradients[:2]
        )
        return {
            "forward": relative_error(out, expected),
            "dv": relative_error(gradients[2], expected_gradients[2]),
        }
    names = ("forward", "dq", "dk", "dv")
    return {
        name: relative_error(*pair)
        for name, pair in zip(names, zip((out, *gradients), (expected, *expected_gradients)))
    }


@torch.no_grad()
def decode_error(
    backend: str, device: torch.device, dtype: torch.dtype, window: int | None = None
) -> float:
    """Relative error of one decoding step over slots of different lengths against softmax in
    float64; slots behind and cached tokens behind a slot's end hold large values, which must not be
    seen."""
    config = type(
        "Config", (), dict(num_hidden_layers=2, num_key_value_heads=KV_HEADS, head_dim=DIM)
    )
    lengths, generator = torch.tensor([0, 1, 63, 64, 150, 299]), torch.Generator().manual_seed(0)
    size = len(lengths)
    cache = SlotCache(config, size + 2, 300, dtype, device, backend)
    stored = [
        torch.randn(2, size + 2, 300, KV_HEADS, DIM, generator=generator).to(dtype)
        for _ in range(2)
    ]
    for column, values in zip((cache.keys, cache.values), stored):
        values.masked_fill_((torch.arange(300) > lengths.max()).view(1, 1, -1, 1, 1), 1e3)
        for slot, length in enumerate(lengths):
            values[:, slot, length:] = 1e3
        for part, value in zip(column, values):
            part.copy_(value)
    q, k, v = (
        torch.randn(1, heads, size, DIM, generator=generator).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    attention = DecodeAttention(cache, lengths.to(device), 300, backend)
    # (B, Hq, D)
    out = attention(1, *(x.to(device) for x in (q, k, v)), DIM**-0.5, window)[0]
    expected = []
    for slot, length in enumerate(lengths):
        keys, values = (
            torch.cat([x[1, slot, :length], new[0, :, slot][None]])[-(window or 0) :]
            # (M, Hq, D)
            .repeat_interleave(GROUP, 1)
            .double()
            for x, new in zip(stored, (k, v))
        )
        scores = torch.einsum("hd,mhd->hm", q[0, :, slot].double(), keys) * DIM**-0.5
        expected.append(torch.einsum("hm,mhd->hd", scores.softmax(-1), values))
    return relative_error(out, torch.stack(expected))


def usable(backend: str) -> bool:
    try:
        return bool(build.choose_backend(backend, CUDA if torch.cuda.is_available() else CPU))
    except ValueError:
        return False
