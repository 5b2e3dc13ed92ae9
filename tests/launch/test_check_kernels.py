"""launch/check_kernels.py: it passes on what is right, and finds each fault that is put into a part."""

import math

import pytest
import torch

from common import logprobs
from common.model import attention
from common.model.attention import DecodeAttention, PackedAttention
from conftest import words
from launch import check_kernels
from reference_kernels import attend


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_passes_on_a_cpu(capsys, dtype):
    """What it measures stays far below its bounds."""
    assert check_kernels.main(words("--dtype", dtype, "--heads 4 --kv_heads 2 --head_dim 32")) == []
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith(" ok")]
    assert len(lines) == 19
    assert all(float(line[-3]) < float(line[-2]) / 2 for line in lines)


def sees_one_key_too_many(patch):
    """Ahead of every query of a response."""
    mask = attention.bucket_mask

    def wrong(table, window):
        seen = mask(table, window)
        if seen is not None:
            seen[..., 1:] |= seen[..., :-1].copy()
        return seen

    patch.setattr(attention, "bucket_mask", wrong)


def loses_the_gradient_of_keys(patch):
    real = PackedAttention.__call__
    patch.setattr(
        PackedAttention,
        "__call__",
        lambda s, layer, q, k, v, *rest: real(s, layer, q, k.detach() + 0 * k, v, *rest),
    )


def mask_with(change):
    """Decoding by a mask that ``change`` has edited."""

    def fault(patch):
        real = DecodeAttention.mask

        def wrong(step, *key):
            mask = real(step, *key).clone()  # (B * Hkv, 1, longest)
            change(mask.unflatten(0, (len(step.lengths), -1)))
            return mask

        patch.setattr(DecodeAttention, "mask", wrong)

    return fault


def sees_too_much(mask):
    mask[0, :, :, check_kernels.SHORT + 1] = 0


def sees_too_little(mask):
    mask[1, :, :, check_kernels.FULL] = -math.inf


def stores_in_the_wrong_place(patch):
    real = PackedAttention.__init__

    def wrong(packed, segments, backend, device, cache=None, plan=()):
        real(
            packed,
            segments,
            backend,
            device,
            cache,
            (plan[0], plan[1], plan[2] * (plan[1] != 0)) if plan else plan,
        )

    patch.setattr(PackedAttention, "__init__", wrong)


def rounds_logits(patch):
    real = logprobs._product
    patch.setattr(logprobs, "_product", lambda a, b: real(a, b).bfloat16().float())


def forgets_the_last_chunk(patch):
    real = logprobs._ChunkedHead.dlogits

    def wrong(ctx, rows, outputs, grads):
        return real(ctx, rows, outputs, grads) * (rows.start == 0)

    patch.setattr(logprobs._ChunkedHead, "dlogits", staticmethod(wrong))


def raises(patch):
    def wrong(*_):
        raise RuntimeError("no kernel image is available")

    patch.setattr(logprobs, "_product", wrong)


FAULTS = {
    sees_one_key_too_many: "packs",
    loses_the_gradient_of_keys: "packs, gradient of k",
    mask_with(sees_too_much): "decoding, short slot",
    mask_with(sees_too_little): "decoding, full slot",
    stores_in_the_wrong_place: "decoding, short slot",
    rounds_logits: "head",
    forgets_the_last_chunk: "head, gradient of its input",
    raises: "head",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", FAULTS, ids=[f"{fault.__name__}-{name}" for fault, name in FAULTS.items()]
)
def test_a_fault_is_found(monkeypatch, capsys, fault):
    """By its part, and by no part before it."""
    fault(monkeypatch)
    assert check_kernels.main(words("--dtype bfloat16 --heads 4 --kv_heads 2 --head_dim 32"))
    failing = [
        line.strip().split("  ")[0]
        for line in capsys.readouterr().out.splitlines()
        if line.endswith("FAILS")
    ]
    assert failing[0] == FAULTS[fault]


class NoBackward(torch.autograd.Function):
    """A kernel whose backward this GPU does not have."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no kernel image is available")


ADVICE = {
    "packs": "--attention flash_attn or sdpa",
    "vision": "--attention flash_attn or sdpa",
    "vision trained": "no --train_vision, or --attention flash_attn or sdpa",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken, trained",
    [
        ("", True),
        ("packs", False),
        ("vision", False),
        ("vision trained", True),
        ("vision trained", False),
    ],
)
def test_the_back_ends_of_a_gpu(monkeypatch, capsys, broken, trained):
    """Stood in for by slow functions: windows of a tower that are not told apart are found by their
    part, for which there is a flag. The backward of a tower that is not trained may be missing."""

    def varlen(q, k, v, call, scale, backend, window=None):
        if broken == "vision" and not call.causal:
            ends = call.cu_q[[0, -1]]
            call = attention.VarlenCall(ends, ends, len(q), len(q), False)
        scale *= 1.3 if broken == "packs" and call.causal else 1
        # what it makes lies where its inputs lie, or they would not go together
        with torch.device("meta"):
            bounds = call.cu_q, call.cu_k, call.max_q, call.max_k
            out = attend(q, k, v, *bounds, scale, call.causal, (window or 0) - 1)
        return NoBackward.apply(out) if broken == "vision trained" and not call.causal else out

    monkeypatch.setattr(attention, "varlen_attention", varlen)
    monkeypatch.setattr(DecodeAttention, "attend_varlen", DecodeAttention.attend_sdpa)
    monkeypatch.setattr(check_kernels, "choose_backend", lambda backend, *_: backend)
    sizes = words("--heads 4 --kv_heads 2 --head_dim 32", *["--train_vision"] * trained)
    fails = bool(broken) and (trained or broken != "vision trained")
    assert bool(check_kernels.main(words("--dtype bfloat16 --attention varlen", *sizes))) == fails
    lines = capsys.readouterr().out.splitlines()
    failing = [line.strip().split("  ")[0] for line in lines if line.endswith("FAILS")]
    assert bool(failing) == fails
    if fails:
        assert (
            failing[0] == broken
            and f"varlen fails in: {broken}; what avoids it: {ADVICE[broken]}" in lines
        )
