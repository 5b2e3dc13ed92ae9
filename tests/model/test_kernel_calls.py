"""The calls of attention kernels, as on a GPU, without one: rollouts, scoring and updates through
reference kernels with FlashAttention's argument rules (tests/reference_kernels.py), and every call
bound to the signatures of torch 2.11 and newer and of flash-attn."""

import inspect
import re

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen

import train_ppo_vl as ppo
from common.model import attention, vlm
from conftest import (
    responses_by_prompt,
    start,
    take,
    write_checkpoint,
)
from families import write_family
from helpers import score, trainable
from reference_kernels import OPERATOR, Call, replace_kernels

pytestmark = pytest.mark.slow  # a GPU has run them
BACKENDS = ("varlen", "flash_attn")
DECODING = {"varlen": OPERATOR, "flash_attn": "flash_attn_with_kvcache"}
PACKED = {"varlen": "varlen_attn", "flash_attn": "flash_attn_varlen_func"}
# family -> flags; gemma3 has sliding windows and pictures whose tokens see each other, gemma4 only in
# windows, and every second layer has heads that the kernels do not take
CASES = {"qwen2_5_vl trained": ("--train_vision",), "gemma3": (), "gemma4_31b": ()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, picture_rows):
    """kind -> checkpoint and rows, written when asked for."""
    written = {}

    def of(kind: str):
        if kind not in written:
            folder = tmp_path_factory.mktemp(kind)
            if kind.startswith("qwen"):
                written[kind] = write_checkpoint(folder, kind), picture_rows
            else:
                write_family(kind, folder, picture_rows)
                written[kind] = folder, str(folder / "rows.jsonl")
        return written[kind]

    return of


def env_of(folders, case: str, backend: str, *flags: str):
    kind, *_ = case.split()
    checkpoint, rows = folders(kind)
    line = "--advantage grpo --samples_per_prompt 3 --slots 7 --dtype bfloat16 --min_new_tokens 4"
    return start(checkpoint, rows, line, "--attention", backend, *CASES.get(case, ()), *flags)


def logprobs_by_sdpa(folders, case: str, batch) -> torch.Tensor:
    """(N,) of the same samples, by the reference back-end."""
    env = env_of(folders, case, "sdpa")
    again = take(env).with_targets(responses_by_prompt(batch))
    again.sampling = batch.sampling
    if not env.actor.model.setup.trains_vision:
        vlm.compute_features(env.actor.model, again)
    return score(env.actor, again)


# what flash_attn is called with beyond varlen: windows, two-way pictures, and smaller heads
@pytest.mark.parametrize(
    "case, backend",
    [(case, "varlen") for case in CASES] + [("gemma3", "flash_attn"), ("gemma4_31b", "flash_attn")],
)
def test_a_step_through_the_kernels(folders, kernels, case, backend, monkeypatch):
    """Sampled, scored and trained by the same calls; the log-probs are those of the reference back-end."""
    monkeypatch.setattr(attention, "LARGEST_HEAD", 8 if case.startswith("gemma4") else 256)
    env = env_of(folders, case, backend)
    batch = ppo.rollout(env.actor, take(env), env.sampling, 3)
    assert DECODING[backend] in kernels.names()
    assert PACKED[backend] in kernels.names()
    scored = score(env.actor, batch)
    assert (scored - batch.logprobs).abs().mean() < 0.01
    assert (scored - logprobs_by_sdpa(folders, case, batch)).abs().mean() < 0.02
    batch.old_logprobs, batch.advantages = batch.logprobs, torch.randn(len(batch.tokens))
    batch.in_policy_loss = torch.ones(len(batch.tokens), dtype=torch.bool)
    kernels.calls.clear()
    trained = trainable(env.actor, env.args, 1e-3)
    metrics = ppo.update_actor(trained, None, batch, 1, None, env.args)
    assert metrics["train/actor_skipped"] == 0
    assert metrics["train/actor_grad_norm"] > 0
    assert kernels.names() == {PACKED[backend]}
    assert metrics["train/sampler_gap"] < 0.01


# ----------------------------------------------------------------------------- signatures
# As `inspect.signature` and the operator's schema print them, less types that are no part of a call.
VARLEN = {
    "2.11": "q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)",
    "2.13": "q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, "
    "window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None",
}
VARLEN["2.15"] = VARLEN["2.13"]
SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, "
    "float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None, "
    "Tensor? seqused_k=None, Tensor? alibi_slopes=None"
)
OPERATORS = {"2.11": SCHEMA, "2.13": f"{SCHEMA}, Tensor? block_table=None, int? num_splits=None"}
OPERATORS["2.15"] = OPERATORS["2.13"]
OPTIONS = "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0"
FLASH_ATTN = {  # 2.8
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"dropout_p=0.0, {OPTIONS}, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
    f"rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, {OPTIONS}, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}


def signature(parameters: str) -> inspect.Signature:
    space: dict = {}
    exec(f"def function({parameters}): pass", space)
    return inspect.signature(space["function"])


def of_schema(text: str) -> inspect.Signature:
    """The signature of an operator: names without their types."""
    return signature(re.sub(r"(?:Tensor|SymInt|float|bool|int)\?? (\w+)", r"\1", text))


def schema_of_this_torch() -> str:
    text = str(torch.ops.aten._flash_attention_forward.default._schema)
    return text[text.index("(") + 1 : text.index(") -> (")]


def check(call: Call, to: inspect.Signature) -> None:
    # TypeError: an argument too many, too few, or of another name
    to.bind(*call.positional, **call.named)


@pytest.fixture(scope="module")
def our_calls(folders):
    """Every form of call that a rollout and an update of a model with windows make, by both back-ends."""
    with pytest.MonkeyPatch.context() as patch:
        generator = replace_kernels(patch)
        emulation = next(generator)
        for backend in BACKENDS:
            env = env_of(folders, "gemma3", backend)
            batch = ppo.rollout(env.actor, take(env), env.sampling, 3)
            score(env.actor, batch)
        next(generator, None)
    return emulation.calls


def calls_of(calls: list[Call], name: str) -> list[Call]:
    chosen = [call for call in calls if call.name == name]
    assert chosen
    return chosen


@pytest.mark.parametrize("name", FLASH_ATTN)
def test_our_calls_are_those_of_flash_attn(our_calls, name):
    for call in calls_of(our_calls, name):
        check(call, signature(FLASH_ATTN[name]))


@pytest.mark.parametrize("version", OPERATORS)
def test_our_calls_of_the_operator_are_those_of_torch(our_calls, version):
    for call in calls_of(our_calls, OPERATOR):
        check(call, of_schema(OPERATORS[version]))


@pytest.mark.parametrize("version", VARLEN)
def test_our_calls_of_varlen_are_those_of_torch(our_calls, version):
    """enable_gqa is given where it is known, which depends on the torch that is installed."""
    for call in calls_of(our_calls, "varlen_attn"):
        named = {
            name: kind
            for name, kind in call.named.items()
            if name != "enable_gqa" or version != "2.11"
        }
        check(call._replace(named=named), signature(VARLEN[version]))


def test_the_signatures_are_those_of_the_torch_that_is_installed(our_calls):
    """What is stored as text says what torch says; a release that says something else is added above."""
    installed = ".".join(torch.__version__.split(".")[:2])
    names = [
        parameter.name
        for parameter in inspect.signature(torch_varlen.varlen_attn).parameters.values()
    ]
    assert schema_of_this_torch() in OPERATORS.values()
    assert len(names) in {len(signature(x).parameters) for x in VARLEN.values()}
    if installed in OPERATORS:
        assert schema_of_this_torch() == OPERATORS[installed]
        assert names[7:] == list(signature(VARLEN[installed]).parameters)[7:]
    for call in calls_of(our_calls, OPERATOR):
        check(call, of_schema(schema_of_this_torch()))
    for call in calls_of(our_calls, "varlen_attn"):
        check(call, inspect.signature(torch_varlen.varlen_attn))
