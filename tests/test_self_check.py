"""The check of kernels at the start: it passes on what is right, and finds each fault that is put into a part; where an
attention back-end fails, the next one is taken, the same on every rank."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import start
from test_training import flags, task  # noqa: F401

import train_grm_vl as grm
import train_ppo_vl as ppo
from common import logprobs, process
from common.settings import ModelArgs
from common.vlm import attention, layers, self_check
from common.vlm.attention import DecodeAttention, PackedAttention

ON = ModelArgs(self_check="on")


def model_of(checkpoint, picture_rows, *more: str):
    return start(checkpoint, picture_rows, "--advantage", "grpo", *more).actor.model


def settle(model, args: ModelArgs):
    """How the model computes after the check."""
    self_check.settle([model], args)
    return model.compute


FORMS = {"float32": ("--dtype", "float32"), "bfloat16": ("--dtype", "bfloat16"),
         "train_vision": ("--dtype", "bfloat16", "--train_vision"), "lora": ("--dtype", "bfloat16", "--lora_rank", "4")}


@pytest.mark.parametrize("form", FORMS)
def test_it_passes_on_a_cpu(checkpoint, picture_rows, capsys, form):
    """And leaves nothing behind: what it measures stays far below its bounds, the model computes as before."""
    model = model_of(checkpoint, picture_rows, *FORMS[form])
    before = {name: parameter.full_tensor().clone() if hasattr(parameter, "full_tensor") else parameter.clone()
              for name, parameter in model.named_parameters()}
    vision = model.model.visual.config._attn_implementation
    check = self_check.SelfCheck(model)
    parts = check.parts("sdpa")
    count = 19 if model.config.model_type == "qwen3_5" else 13
    assert len(parts) == len({part.name for part in parts}) == count
    for part in parts:
        assert not part.problem and (part.error < part.bound / 2), part
    assert settle(model, ON).backend == "sdpa"
    said = capsys.readouterr().out
    assert said.count(" ok\n") == count and "FAILS" not in said and "self-check with attention sdpa" in said
    assert model.model.visual.config._attn_implementation == vision
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert torch.equal(whole, before[name]) and parameter.grad is None


def test_bounds_hold_for_peaked_attention(qwen25, picture_rows):
    """Real first layers have scores of hundreds, where one key takes all: gradients of queries and keys then cancel."""
    model = model_of(qwen25, picture_rows, "--dtype", "bfloat16")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model.layers.0.self_attn" in name and ("q_proj" in name or "k_proj" in name):
                parameter.mul_(6)
    check = self_check.SelfCheck(model)
    (_, q, k, _), (scale, *_) = check.first_layer()
    assert q.norm(dim=-1).max() * k.norm(dim=-1).max() * scale > 100
    parts = check.parts("sdpa")
    assert len(parts) == 13 and not any(part.fails for part in parts), parts


def test_it_is_off_on_a_cpu_unless_asked_for(qwen25, picture_rows, capsys):
    model = model_of(qwen25, picture_rows)
    for wanted in ("auto", "off"):
        before = model.compute
        assert settle(model, ModelArgs(self_check=wanted)) == before
    assert "self-check" not in capsys.readouterr().out


# ---- Faults


def sees_one_key_too_many(patch):
    """Ahead of every query of a response."""
    mask = attention.bucket_mask

    def wrong(table, window):
        found = mask(table, window)
        if found is not None:
            found[..., 1:] |= found[..., :-1].copy()
        return found

    patch.setattr(attention, "bucket_mask", wrong)


def loses_the_gradient_of_keys(patch):
    real = PackedAttention.__call__
    patch.setattr(PackedAttention, "__call__", lambda s, layer, q, k, v, *rest: real(s, layer, q, k.detach() + 0 * k, v, *rest))


def mask_with(change):
    """Decoding by a mask that ``change`` has edited."""

    def fault(patch):
        real = DecodeAttention.mask

        def wrong(step, window):
            mask = real(step, window).clone()  # (B * Hkv, 1, longest)
            change(mask.unflatten(0, (len(step.lengths), -1)))
            return mask

        patch.setattr(DecodeAttention, "mask", wrong)

    return fault


def sees_too_much(mask):
    mask[0, :, :, self_check.SHORT + 1] = 0


def sees_too_little(mask):
    mask[1, :, :, self_check.FULL] = -math.inf


def stores_in_the_wrong_place(patch):
    real = PackedAttention.__init__

    def wrong(packed, segments, backend, device, cache=None, plan=()):
        real(packed, segments, backend, device, cache, (plan[0], plan[1], plan[2] * (plan[1] != 0)) if plan else plan)

    patch.setattr(PackedAttention, "__init__", wrong)


def rounds_logits(patch):
    real = logprobs._product
    patch.setattr(logprobs, "_product", lambda a, b: real(a, b).bfloat16().float())


def forgets_the_last_chunk(patch):
    real = logprobs._ChunkedHead.dlogits

    def wrong(ctx, rows, outputs, grads):
        return real(ctx, rows, outputs, grads) * (rows.start == 0)

    patch.setattr(logprobs._ChunkedHead, "dlogits", staticmethod(wrong))


def multiplies_no_rows(patch):
    real = logprobs._product

    def wrong(a, b):
        if not len(a):
            raise RuntimeError("CUBLAS_STATUS_INVALID_VALUE")
        return real(a, b)

    patch.setattr(logprobs, "_product", wrong)


def takes_channels_last(patch):
    def wrong(projection, x):
        return torch.nn.functional.linear(x.transpose(1, 2).flatten(1), projection.weight.flatten(1), projection.bias)

    patch.setattr(layers.PatchProjection, "forward", wrong)


FAULTS = {
    sees_one_key_too_many: "packed rows",
    loses_the_gradient_of_keys: "packed rows, gradient of k",
    mask_with(sees_too_much): "decoding, short slot",
    mask_with(sees_too_little): "decoding, full slot",
    stores_in_the_wrong_place: "decoding, short slot",
    rounds_logits: "head",
    forgets_the_last_chunk: "head, gradient of its input",
    multiplies_no_rows: "head",
    takes_channels_last: "patch embedding",
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.__name__}-{name}" for fault, name in FAULTS.items()])
def test_a_fault_is_found(qwen25, picture_rows, monkeypatch, capsys, fault, dtype):
    """By its part, and by no part before it; on a CPU there is no other back-end, so the run ends."""
    model = model_of(qwen25, picture_rows, "--dtype", dtype)
    with monkeypatch.context() as patch, pytest.raises(process.UserError, match="fails the self-check: .*--self_check off") as error:
        fault(patch)
        settle(model, ON)
    said = capsys.readouterr().out
    failing = [line.strip().split("  ")[0] for line in said.splitlines() if line.endswith("FAILS")]
    assert failing[0] == FAULTS[fault] and f"{failing[0]}: " in str(error.value)
    assert settle(model, ON).backend == "sdpa"


# ---- Back-ends, stood in for by slow functions on the CPU


def slow_varlen(q, k, v, call, scale, backend, window=None):
    """`attention.varlen_attention` in float32, a segment at a time."""
    outputs = []
    for i in range(len(call.cu_q) - 1):
        a, b, c, d = (int(x) for x in (*call.cu_q[i:i + 2], *call.cu_k[i:i + 2]))
        one, others = q[a:b].float().transpose(0, 1), [x[c:d].float().transpose(0, 1) for x in (k, v)]
        keys, values = (x.repeat_interleave(len(one) // len(x), 0) for x in others)
        seen = torch.ones(b - a, d - c, dtype=torch.bool)
        if call.causal:
            seen = seen.tril(d - c - (b - a))
        scores = (one @ keys.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype))
    return torch.cat(outputs)


@pytest.fixture
def gpu_model(checkpoint, picture_rows, monkeypatch):
    """A model that believes it has both back-ends of a GPU; and a function that breaks one of them."""
    broken: dict[str, str] = {}

    def varlen(q, k, v, call, scale, backend, window=None):
        vision = not call.causal
        if broken.get(backend) == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")
        if broken.get(backend) == "rows" and not vision:
            scale = scale * 1.3
        if broken.get(backend) == "vision" and vision:  # windows, or pictures, are not told apart
            ends = call.cu_q[[0, -1]]
            call = replace(call, cu_q=ends, cu_k=ends)
        return slow_varlen(q, k, v, call, scale, backend, window)

    def decode(backend):
        def attend(step, q, keys, values, scale, window):
            factor = 1.3 if broken.get(backend) == "decoding" else 1.0
            return step.attend_sdpa(q, keys, values, factor * scale, window)

        return attend

    monkeypatch.setattr(attention, "varlen_attention", varlen)
    monkeypatch.setattr(DecodeAttention, "attend_flash", decode("flash_attn"))
    monkeypatch.setattr(DecodeAttention, "attend_varlen", decode("varlen"))
    model = model_of(checkpoint, picture_rows, "--dtype", "bfloat16")
    model.compute = replace(model.compute, backend="flash_attn")
    return model, broken


KINDS_OF_FAULT = {"rows": "packed rows: error", "decoding": "decoding, short slot: error", "vision": "vision block: error",
                  "raises": "attention: RuntimeError: no kernel image is available"}


@pytest.mark.parametrize("kind", KINDS_OF_FAULT)
def test_the_next_back_end_is_taken_and_the_first_is_named(gpu_model, checkpoint, picture_rows, capsys, kind):
    model, broken = gpu_model
    broken["flash_attn"] = kind
    critic = model_of(checkpoint, picture_rows, "--dtype", "bfloat16")  # not checked itself, it follows
    self_check.settle([model, critic], ON)
    assert model.compute.backend == critic.compute.backend == "varlen"
    assert critic.model.visual.config._attn_implementation == "packed_flash_varlen"
    assert model.model.visual.config._attn_implementation == "packed_flash_varlen"
    said = capsys.readouterr().out
    assert "warning: attention flash_attn fails the self-check: " in said and KINDS_OF_FAULT[kind] in said
    assert said.count("; taking varlen") == 1 and said.index("attention flash_attn:") < said.index("attention varlen:")
    broken["varlen"] = kind
    model.compute = replace(model.compute, backend="flash_attn")
    assert settle(model, ON).backend == "sdpa" and "; taking sdpa" in capsys.readouterr().out


def test_what_works_is_kept(gpu_model):
    model, _ = gpu_model
    assert settle(model, ON).backend == "flash_attn"


def test_a_back_end_that_was_asked_for_is_not_replaced(gpu_model):
    model, broken = gpu_model
    broken["flash_attn"] = "rows"
    with pytest.raises(process.UserError, match="flash_attn fails the self-check: packed rows: error 0"):
        settle(model, ModelArgs(attention="flash_attn", self_check="on"))


def test_all_ranks_decide_alike(gpu_model, monkeypatch, capsys):
    """By the worst of them; and where a package is missing on one of them, before anything is checked."""
    model, _ = gpu_model
    other = {"backend": "flash_attn"}

    def gather(value):
        if isinstance(value, str):
            return [value, other["backend"]]
        worse = [[name, math.inf, bound, "illegal instruction"] if name == other.get("part") else [name, error, bound, ""]
                 for name, error, bound, _ in value]
        return [value, worse]

    monkeypatch.setattr(self_check.distributed, "gather_objects", gather)
    for wanted, expected in (("off", "varlen"), ("on", "varlen")):
        model.compute = replace(model.compute, backend="flash_attn")
        other["backend"] = "varlen"
        assert settle(model, ModelArgs(self_check=wanted)).backend == expected
    assert "flash_attn" not in capsys.readouterr().out
    model.compute, other["part"] = replace(model.compute, backend="varlen"), "decoding, full slot"
    with pytest.raises(process.UserError, match="sdpa fails the self-check: decoding, full slot: illegal instruction"):
        settle(model, ON)
    assert "varlen fails the self-check: decoding, full slot: illegal instruction; taking sdpa" in capsys.readouterr().out


def test_both_scripts_run_it(qwen25, task, tmp_path, capsys):  # noqa: F811
    ppo.main(flags(qwen25, task, tmp_path / "ppo", "--self_check", "on", "--save_every", "0", "--export_every", "0"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "how many?", "images": [], "response": "3", "correct": true}\n' * 4)
    grm.main(["--model", str(qwen25), "--data", str(rows), "--out", str(tmp_path / "grm"), "--self_check", "on", "--steps", "1",
              "--max_prompt_tokens", "512", "--prompts_per_step", "4", "--save_every", "0", "--export_every", "0"])
    assert capsys.readouterr().out.count("self-check with attention sdpa") == 2
