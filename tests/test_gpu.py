"""Attention back-ends and CUDA graphs on a GPU; without one only the reference path and the benchmark's tiny mode run."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, start, take

import train_ppo_vl as ppo
from common.vlm import DecodeAttention, PackedAttention, SlotCache, bare_forwards, choose_attention, unsharded

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HEADS, KV_HEADS, GROUP, DIM = 4, 2, 2, 64
# Two prompts, the first with two responses and the second with three, and a prompt alone.
SEGMENTS = [(0, 150, 0, 0), (150, 190, 0, 150), (190, 191, 0, 150), (191, 208, 208, 208), (208, 240, 191, 208),
            (240, 310, 191, 208), (310, 333, 191, 208), (333, 400, 400, 400)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().cpu().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def packed_errors(backend: str, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of the packed forward and its gradients against per-segment softmax in float64."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, 400, DIM, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    ours = [x.to(device).requires_grad_() for x in inputs[:3]]
    truth = [x.double().requires_grad_() for x in inputs[:3]]
    out = PackedAttention(SEGMENTS, backend, device)(0, *ours, DIM ** -0.5)                                # (1, N, Hq, D)
    q, k, v = (x[0].repeat_interleave(HEADS // x.shape[1], 0) for x in truth)                               # (Hq, N, D)
    expected = []
    for start_, end, p_start, p_end in SEGMENTS:
        rows = [*range(p_start, p_end), *range(start_, end)]
        seen = torch.ones(end - start_, len(rows), dtype=torch.bool).tril(p_end - p_start)
        scores = q[:, start_:end] @ k[:, rows].transpose(1, 2) * DIM ** -0.5
        expected.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, rows])
    expected = torch.cat(expected, 1).transpose(0, 1)[None]
    weight = inputs[3].transpose(1, 2)
    gradients = torch.autograd.grad((out * weight.to(device)).sum(), ours)
    expected_gradients = torch.autograd.grad((expected * weight.double()).sum(), truth)
    names = ("forward", "dq", "dk", "dv")
    return {name: relative_error(*pair) for name, pair in zip(names, zip((out, *gradients), (expected, *expected_gradients)))}


@torch.no_grad()
def decode_error(backend: str, device: torch.device, dtype: torch.dtype) -> float:
    """Relative error of one decoding step over slots of different lengths against softmax in float64; slots behind and cached
    tokens behind a slot's end hold large values, which must not be seen."""
    config = type("Config", (), dict(num_hidden_layers=2, num_key_value_heads=KV_HEADS, head_dim=DIM))
    lengths, generator = torch.tensor([0, 1, 63, 64, 150, 299]), torch.Generator().manual_seed(0)
    size = len(lengths)
    cache = SlotCache(config, size + 2, 300, dtype, device)
    stored = [torch.randn(2, size + 2, 300, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2)]
    for own, values in zip((cache.keys, cache.values), stored):
        values.masked_fill_((torch.arange(300) > lengths.max()).view(1, 1, -1, 1, 1), 1e3)
        for slot, length in enumerate(lengths):
            values[:, slot, length:] = 1e3
        own.copy_(values)
    q, k, v = (torch.randn(1, heads, size, DIM, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    attention = DecodeAttention(cache, lengths.to(device), 300, backend)
    out = attention(1, *(x.to(device) for x in (q, k, v)), DIM ** -0.5)[0]                                      # (B, Hq, D)
    expected = []
    for slot, length in enumerate(lengths):
        keys, values = (torch.cat([x[1, slot, :length], new[0, :, slot][None]]).repeat_interleave(GROUP, 1).double()
                        for x, new in zip(stored, (k, v)))                                                      # (M, Hq, D)
        scores = torch.einsum("hd,mhd->hm", q[0, :, slot].double(), keys) * DIM ** -0.5
        expected.append(torch.einsum("hm,mhd->hd", scores.softmax(-1), values))
    return relative_error(out, torch.stack(expected))


def usable(backend: str) -> bool:
    try:
        return bool(choose_attention(backend, CUDA if torch.cuda.is_available() else CPU))
    except ValueError:
        return False


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
def test_reference_backend(dtype, bound):
    assert max(packed_errors("sdpa", CPU, dtype).values()) < bound
    assert decode_error("sdpa", CPU, dtype) < bound


@needs_gpu
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flash_attn"])
def test_backends_on_a_gpu(backend):
    if not usable(backend):
        pytest.skip(f"{backend} is not installed")
    assert max(packed_errors(backend, CUDA, torch.bfloat16).values()) < 0.02
    assert decode_error(backend, CUDA, torch.bfloat16) < 0.02


@needs_gpu
def test_graphs_decode_the_same_tokens(checkpoint, picture_rows):
    """In float32, where rounding by other batch sizes does not reach a token."""
    tokens = {}
    for graphs in ("off", "on"):
        env = start(checkpoint, picture_rows, "--dtype", "float32", "--cuda_graphs", graphs, "--slots", "7")
        samples = ppo.rollout(env.run, env.processor, env.actor, take(env), 5, ppo.TRAIN)
        tokens[graphs] = samples.tokens.tolist()
    assert tokens["on"] == tokens["off"]


@needs_gpu
def test_sampled_logprobs_are_those_of_training_on_a_gpu(checkpoint, picture_rows):
    env = start(checkpoint, picture_rows)
    prompts = take(env)
    samples = ppo.rollout(env.run, env.processor, env.actor, prompts, 5, ppo.TRAIN)
    assert (ppo.score_tokens(env.run, env.actor, prompts, samples) - samples.logprobs).abs().mean() < 0.02


@needs_gpu
def test_a_decoding_step_never_waits_for_the_device(checkpoint, picture_rows):
    env = start(checkpoint, picture_rows)
    prompts = take(env)
    with torch.no_grad(), unsharded(env.actor), bare_forwards(env.actor.model):
        ppo.compute_features(env.run, env.actor, prompts)
        engine = ppo.RolloutEngine(env.run, env.processor, env.actor, prompts, [0, 1], 2, ppo.TRAIN, False)
        engine.prefill([(0, [(0, 0), (1, 1)]), (1, [(2, 0), (3, 1)])])
        engine.step(4, engine.cache.capacity)                                          # the first makes tables and workspaces
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.step(4, engine.cache.capacity)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_gpu_benchmark_runs():
    """Its tiny mode, in a process of its own since it replaces the loading of weights."""
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / "gpu.py"), "--tiny"]
    program = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert program.returncode == 0, program.stderr[-3000:]
    for cell in ("| sdpa | float32 |", "| 4 x 32 |", "| 256 |", "| 2056 | shared |", "| rollout_seconds |"):
        assert cell in program.stdout, program.stdout
