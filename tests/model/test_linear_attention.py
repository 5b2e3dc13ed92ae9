"""Gated DeltaNet in packs and slots: against a loop over tokens, against one Hugging Face forward
per sample and `generate`; every part without which a response would not continue its prompt is
taken away, and the checks notice."""

import dataclasses
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import extra_packages
import fla_interpreter
import train_ppo_vl as ppo
from common.model import attention, build, fsdp, layers, linear_attention, packs, vlm, weights
from common.model.linear_attention import PackedDelta, SlotStates
from common.rollout import RolloutEngine
from conftest import (
    ROUNDING,
    inputs_of,
    read_json,
    records,
    save_weights,
    seeded,
    start,
    take,
    user_error,
    write_checkpoint,
    write_json,
)
from families import EXPERTS, LINEAR, TEXT, make_config, make_tokenizer
from helpers import (
    COMPUTE,
    NormOfAGPU,
    peak_of_an_update,
    planned_peak,
    resumed,
    score,
    tensors,
)
from launch import toy

CPU = torch.device("cpu")
# The signature of chunk_gated_delta_rule in fla-core 0.6.0, and that of the first with cu_seqlens.
FLA = """(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs)"""
OLD_FLA = """(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
use_qk_l2norm_in_kernel=False, cu_seqlens=None, head_first=False)"""
KEY_HEADS, HEADS, DK, DV = 2, 4, 6, 10
CHANNELS = 12


# ------------------------------------------------------------------------------------------------ one layer
def lay_out(groups: list[tuple[int, list[int]]]) -> list[tuple]:
    """Segments of a pack for (prompt, responses) lengths."""
    segments, size = [], 0
    for prompt, responses in groups:
        start, end = size, size + prompt
        segments.append((start, end, start, start))
        for length in responses:
            segments.append((segments[-1][1], segments[-1][1] + length, start, end))
        size = segments[-1][1]
    return segments


ROWS = {
    "several groups": [(5, [1, 7, 3]), (1, [4, 1]), (2, [2]), (9, [])],
    "borders of chunks": [(64, [64, 65, 63, 1]), (63, [2, 128]), (130, [])],
    "prompts alone": [(3, []), (1, []), (70, [])],
    "one group": [(7, [3, 5])],
    "one token": [(1, [])],
}


def random_inputs(size: int) -> list[torch.Tensor]:
    """x, taps, q, k, v, log of the decay and strength; states fade so slowly that forgetting one
    would be seen."""
    generator = seeded(size)
    x, q, k, v, decay, strength = (
        torch.randn(size, *shape, generator=generator)
        for shape in (
            (CHANNELS,),
            (KEY_HEADS, DK),
            (KEY_HEADS, DK),
            (HEADS, DV),
            (HEADS,),
            (HEADS,),
        )
    )
    taps = torch.randn(4, CHANNELS, generator=generator)
    return [x.requires_grad_() for x in (x, taps, q, k, v, -0.05 * decay.exp(), strength.sigmoid())]


def one_by_one(segments, x, taps, q, k, v, decay, strength):
    """Convolution and delta rule of every segment behind its prefix, token by token, in float64."""
    x, taps, q, k, v, decay, strength = (y.double() for y in (x, taps, q, k, v, decay, strength))
    q, k = (y[:, [head // (HEADS // KEY_HEADS) for head in range(HEADS)]] for y in (q, k))
    convolved, mixed = [], []
    for start, end, p_start, p_end in segments:
        seen = [*range(p_start, p_end), *range(start, end)]
        state = torch.zeros(HEADS, DK, DV, dtype=torch.float64)
        for i, place in enumerate(seen):
            key = k[place] * torch.rsqrt(k[place].square().sum(-1, keepdim=True) + 1e-6)
            query = (
                q[place] * torch.rsqrt(q[place].square().sum(-1, keepdim=True) + 1e-6) * DK**-0.5
            )
            state = state * decay[place].exp()[:, None, None]
            change = (v[place] - (key[:, None] @ state)[:, 0]) * strength[place][:, None]
            state = state + key[:, :, None] * change[:, None]
            if place >= start:
                convolved.append(sum(x[seen[i - j]] * taps[3 - j] for j in range(4) if i >= j))
                mixed.append((query[:, None] @ state)[:, 0])
    return torch.stack(convolved), torch.stack(mixed)


def emulated_fla(signature: str):
    """A stand-in for the kernel that takes its arguments by this signature, and each sequence alone."""
    text = " ".join(signature.split())
    parameters = inspect.signature(eval(f"lambda {text[1:-1]}: None"))

    def kernel(*args, **named):
        call = parameters.bind(*args, **named)
        call.apply_defaults()
        call = SimpleNamespace(**call.arguments)
        bounds = call.cu_seqlens.tolist()
        assert call.q.shape[0] == 1
        assert call.cu_seqlens.dtype == torch.int64
        assert bounds[-1] == call.q.shape[1]
        assert call.initial_state is None or len(call.initial_state) == len(bounds) - 1
        outputs, states = [], []
        for i, (start, end) in enumerate(zip(bounds, bounds[1:])):
            part = [y[:, start:end] for y in (call.q, call.k, call.v)]
            repeats = call.v.shape[2] // call.k.shape[2]
            assert (repeats == 1) == (signature is OLD_FLA)
            part[:2] = (y.repeat_interleave(repeats, dim=2) for y in part[:2])
            state = None if call.initial_state is None else call.initial_state[i : i + 1]
            out, state = inspect.unwrap(linear_attention.qwen3_5.torch_recurrent_gated_delta_rule)(
                *part,
                g=call.g[:, start:end],
                beta=call.beta[:, start:end],
                initial_state=state,
                output_final_state=call.output_final_state,
                use_qk_l2norm_in_kernel=call.use_qk_l2norm_in_kernel,
            )
            outputs.append(out)
            states.append(state)
        return torch.cat(outputs, dim=1), torch.cat(states)

    return kernel


@pytest.fixture(params=["torch", FLA, OLD_FLA], ids=["torch", "fla", "old fla"])
def rule(request, monkeypatch):
    if request.param != "torch":
        monkeypatch.setattr(linear_attention, "load_fla", lambda: emulated_fla(request.param))
        monkeypatch.setattr(linear_attention, "fla_shares_keys", lambda: request.param is FLA)
        monkeypatch.setattr(linear_attention, "choose_rule", lambda *_: linear_attention.fla_rule)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual - expected).abs().max() / expected.abs().max()).detach())


def layer_errors(segments) -> dict[str, float]:
    """Largest errors of outputs and gradients, relative to the largest entry."""
    inputs = random_inputs(segments[-1][1])
    packed = PackedDelta(segments, CPU)
    actual = packed.convolve(0, *inputs[:2]), packed.recur(0, *inputs[2:])
    expected = one_by_one(segments, *inputs)
    generator = seeded(1)
    weights = [torch.randn(y.shape, generator=generator) for y in actual]
    ours, theirs = (
        torch.autograd.grad(sum((y * w).sum() for y, w in zip(out, weights)), inputs)
        for out in (actual, expected)
    )
    names = "x taps q k v decay strength".split()
    errors = {
        f"gradient of {name}": relative(*pair)
        for name, *pair in zip(names, ours, theirs)
        if pair[1].any()
    }
    return errors | {
        "convolution": relative(actual[0], expected[0]),
        "delta rule": relative(actual[1], expected[1]),
    }


@pytest.mark.slow
def test_flas_own_kernels_mix_a_pack_as_plain_torch_does(tmp_path):
    """Forward and backward, on a CPU: in Triton's interpreter, which needs no GPU. What is left for one are
    compilation and bfloat16."""
    packages = tmp_path / "packages"
    with (
        extra_packages.installed("triton", "triton", packages),
        extra_packages.installed("fla-core", "fla", packages),
    ):
        package = Path(importlib.util.find_spec("fla").origin).parent
        fla_interpreter.prepare(package, tmp_path / "changed")
        paths = os.pathsep.join([str(tmp_path / "changed"), *filter(None, sys.path)])
    told = subprocess.run(
        [sys.executable, fla_interpreter.__file__],
        env=os.environ
        | {"TRITON_INTERPRET": "1", "FLA_DISABLE_BACKEND_DISPATCH": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    errors = json.loads(told.stdout.splitlines()[-1])
    assert set(errors) == {"output", "q", "k", "v", "decay", "strength"}
    assert max(errors.values()) < ROUNDING, errors


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_mixed_as_token_by_token(name, rule):
    errors = layer_errors(lay_out(ROWS[name]))
    assert max(errors.values()) < ROUNDING, errors


# ------------------------------------------------------------------------------------------------ a model
@pytest.fixture(scope="module")
def qwen35(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("qwen35"), "qwen3_5", layers=3)


def greedy(env, slots: int) -> list[list[int]]:
    sampling = dataclasses.replace(env.sampling, greedy=True, slots=slots, stop_ids=env.stop_ids)
    samples = ppo.rollout(env.actor, take(env), sampling, 2)
    return [tokens.tolist() for tokens in samples.split(samples.tokens)]


@pytest.fixture(scope="module")
def decoding(qwen35, picture_rows):
    """Our run, and what `generate` answers: twice for each prompt, up to ids that end some answers early."""
    env = start(qwen35, picture_rows, "--max_new_tokens 40 --advantage grpo")
    oracle = AutoModelForImageTextToText.from_pretrained(qwen35).eval()
    env.answers = []
    for prompt in env.prompts:
        inputs = inputs_of(prompt, torch.zeros(0, dtype=torch.int64), env.processor)
        out = oracle.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(env.processor.banned_ids),
        )
        env.answers += [out[0, len(prompt.input_ids) :].tolist()] * 2
    ends = {env.answers[0][6], env.answers[4][15]}
    env.stop_ids = torch.tensor(sorted(ends))
    for i, answer in enumerate(env.answers):
        stops = (n for n, token in enumerate(answer, start=1) if token in ends)
        env.answers[i] = answer[: next(stops, 40)]
    return env


def test_greedy_tokens_are_those_of_generate(decoding, rule, monkeypatch):
    """Two samples of each prompt, with as many slots as samples and with few, that are refilled and
    whose last ones move."""
    moved, refilled = [], []
    move, prefill = SlotStates.move, RolloutEngine.prefill

    def counted_move(states, source, target):
        moved.append(len(source))
        move(states, source, target)

    def counted_prefill(engine, members):
        refilled.append(len(members))
        prefill(engine, members)

    monkeypatch.setattr(SlotStates, "move", counted_move)
    monkeypatch.setattr(RolloutEngine, "prefill", counted_prefill)
    assert max(map(len, decoding.answers)) == 40 > min(map(len, decoding.answers))
    for slots in (0, 4):
        assert greedy(decoding, slots) == decoding.answers
    assert sum(moved) > 0
    assert refilled[0] == 4
    assert len(refilled) > 2


# ------------------------------------------------------------------------------------------------ checkpoints
@pytest.fixture(scope="module")
def official(tmp_path_factory, qwen35):
    """A checkpoint of the types that the official ones have, with weights of the multi-token prediction."""
    folder = tmp_path_factory.mktemp("official") / "model"
    shutil.copytree(qwen35, folder)
    exact = ("A_log", "linear_attn.norm.weight")
    weights = {
        key: value if key.endswith(exact) else value.bfloat16()
        for key, value in tensors(folder).items()
    }
    generator = seeded(0)
    weights |= {
        "mtp.fc.weight": torch.randn(64, 128, generator=generator).bfloat16(),
        "mtp.norm.weight": torch.randn(64),
    }
    save_weights(folder, weights)
    settings = read_json(folder / "config.json")
    settings["dtype"] = settings["text_config"]["dtype"] = settings["vision_config"]["dtype"] = (
        "bfloat16"
    )
    settings["text_config"]["mtp_num_hidden_layers"] = 1
    write_json(folder / "config.json", settings)
    return folder


@pytest.mark.parametrize("lora", ["--lora_rank 0", "--lora_rank 4"], ids=["weights", "adapters"])
def test_decays_stay_float32_where_everything_else_is_bfloat16(official, picture_rows, lora):
    """Of a decay of exp(-0.01 x), bfloat16 would lose what distinguishes it from exp(-0.0101 x)."""
    env = start(official, picture_rows, "--dtype bfloat16 --advantage grpo", lora)
    seen = {}
    with fsdp.unsharded(env.actor):
        for name, parameter in vlm.decoder(env.actor.model).named_parameters():
            seen[name] = parameter.dtype
    exact = {name for name, dtype in seen.items() if dtype == torch.float32}
    assert exact == {name for name in seen if ".decay." in name}
    assert len(exact) == 2 * 2
    model = env.actor.model
    before = tensors(official)["model.language_model.layers.0.linear_attn.A_log"]
    decay = vlm.decoder(model).layers[0].linear_attn.decay
    assert torch.equal(weights.whole(decay.A_log), before)
    assert before.bfloat16().float().ne(before).any()
    batch = ppo.rollout(env.actor, take(env), env.sampling, 2)
    # bfloat16 on both sides
    assert (score(env.actor, batch) - batch.logprobs).abs().mean() < 0.02
    env.actor.train()
    for pack in packs.of_batch(model, batch):
        env.actor(pack, env.sampling)[0].sum().backward()
    gradient = vlm.decoder(model).layers[0].linear_attn.decay.A_log.grad
    assert (
        gradient is None
        if lora == "--lora_rank 4"
        else gradient.dtype == torch.float32 and gradient.full_tensor().any()
    )


@pytest.mark.slow
def test_runs_resume_bit_by_bit(qwen35, task, tmp_path):
    """With adapters and recomputed activations: weights and metrics of the whole run are those of
    its parts."""
    whole = resumed(
        qwen35, task, tmp_path, "--advantage grpo --lora_rank 2 --gradient_checkpointing --slots 5"
    )
    assert records(whole)[-1]["train/sampler_gap"] < ROUNDING


# ------------------------------------------------------------------------------------------------
# what is refused
def text_model(kind: str, **changes):
    """InternVL around a text model of another kind, on meta."""
    config = make_config("internvl", make_tokenizer("internvl")).to_dict()
    config["text_config"] = (
        TEXT | {"model_type": kind, "vocab_size": config["text_config"]["vocab_size"]} | changes
    )
    return build.build_model(AutoConfig.for_model(**config), COMPUTE)


FOREIGN = {
    "qwen3_next": (
        LINEAR | EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
        "Qwen3NextGatedDeltaNet",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "mixes tokens by Lfm2ShortConv"),
    "qwen3_5_text": (
        LINEAR | {"linear_conv_kernel_dim": 3},
        "linear_conv_kernel_dim 3 and hidden_act silu",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_ways_to_mix_tokens_are_refused(kind):
    """Left as they are, each would take our arguments without a word, and mix all samples of a pack."""
    changes, message = FOREIGN[kind]
    with user_error(message):
        text_model(kind, **changes)


def test_the_rule_is_chosen_and_a_missing_package_named(monkeypatch, capsys):
    choose = linear_attention.choose_rule.__wrapped__
    monkeypatch.setattr(linear_attention, "load_fla", lambda: None)
    for spec in (None, "fla"):
        monkeypatch.setattr(linear_attention.importlib.util, "find_spec", lambda name: spec)
        in_bfloat16 = linear_attention.fla_rule if spec else linear_attention.padded_rule
        assert choose("cuda", torch.bfloat16) is in_bfloat16
        assert (
            choose("cpu", torch.float32)
            is choose("cuda", torch.float32)
            is linear_attention.padded_rule
        )
    assert (
        capsys.readouterr().out
        == "linear attention runs in plain torch; faster: pip install fla-core\n"
    )


# ------------------------------------------------------------------------------------------------ memory
class KeepsWhatTheKernelKeeps(torch.autograd.Function):
    """In the place of the delta rule: nothing is computed, and as much is kept for the backward as
    fla's kernel keeps."""

    @staticmethod
    def forward(ctx, q, k, v, decay, strength):
        ctx.save_for_backward(
            q.clone(), k.clone(), v, decay, strength, q.new_zeros(*v.shape[:2], 64)
        )
        return torch.zeros_like(v)

    @staticmethod
    def backward(ctx, gradient):
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors[:5])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags_", [(), ("--gradient_checkpointing",)], ids=["all kept", "recomputed"]
)
def test_peak_of_an_update(picture_rows, tmp_path, flags_, monkeypatch):
    """Gathered weights, activations and backward of one pack of 1,000 tokens against what is alive,
    in bfloat16."""
    monkeypatch.setattr(layers.F, "rms_norm", NormOfAGPU.apply)
    monkeypatch.setattr(
        linear_attention,
        "choose_rule",
        lambda *_: lambda call, inputs, state: (KeepsWhatTheKernelKeeps.apply(*inputs), None),
    )
    tokenizer = toy.make_tokenizer()
    model = toy.make_model("qwen3_5", tokenizer, 0, hidden_size=128, layers=4)
    for part in (model, tokenizer, toy.make_image_processor("qwen3_5")):
        part.save_pretrained(tmp_path)
    env = start(tmp_path, picture_rows, "--dtype bfloat16 --advantage grpo", *flags_)
    env.actor.model.setup = replace(env.actor.model.setup, head_chunk=64)
    batch = take(env, 1).with_responses([(0, torch.randint(4, 200, (1000,)))])
    peak, pack = peak_of_an_update(env, env.actor, batch)
    setting = vlm.UpdateSetting(pack.input_ids.shape[1], 4 * len(flags_))
    assert 0.92 < planned_peak(env.actor, setting) / peak < 1.05, peak


def test_bytes_of_a_slot():
    """At the sizes of Qwen3.5-4B and 9B 48 MiB of states, however short the sequence is."""
    # those of the 9B
    text = AutoConfig.for_model("qwen3_5_text")
    assert linear_attention.linear_layers(text) == 24
    states = 24 * 32 * 128 * 128 * 4
    assert states == 48 * 2**20
    cache = attention.SlotCache(text, 1, 1000, torch.bfloat16, torch.device("meta"), "sdpa")
    assert cache.nbytes == states + 24 * 3 * 8192 * 2 + 1000 * 8 * 2 * 4 * 256 * 2
    small = AutoConfig.for_model("qwen3_5_text", **TEXT | LINEAR)
    for dtype in (torch.float32, torch.bfloat16):
        cache = attention.SlotCache(small, 3, 50, dtype, CPU, "sdpa")
        held = (*cache.keys, *cache.values, cache.linear.inputs, cache.linear.states)
        assert sum(part.nbytes for part in held) == cache.nbytes
        assert cache.linear.states.dtype == torch.float32
        assert cache.linear.inputs.dtype == dtype
