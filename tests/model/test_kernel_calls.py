"""The calls of attention kernels, as on a GPU, without one: rollouts, scoring and updates through
reference kernels with FlashAttention's argument rules (tests/reference_kernels.py), and every call
bound to the signatures of torch 2.11 and newer and of flash-attn."""

import importlib.metadata
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention._fa3 as torch_fa3
import torch.nn.attention._fa4 as torch_fa4
import torch.nn.attention._registry as torch_registry
import torch.nn.attention.varlen as torch_varlen

import train_ppo_vl as ppo
from common.model import attention, vlm
from conftest import (
    responses_of,
    start,
    take,
    user_error,
    write_checkpoint,
)
from families import write_family
from helpers import score, trainable
from reference_kernels import (
    OPERATOR,
    Call,
    Handle,
    offer_flash_attention_4,
    replace_kernels,
)

pytestmark = pytest.mark.slow  # a GPU has run them
BACKENDS = ("varlen", "flash_attn")
DECODING = {"varlen": OPERATOR, "fa4": OPERATOR, "flash_attn": "flash_attn_with_kvcache"}
PACKED = {"varlen": "varlen_attn", "fa4": "varlen_attn", "flash_attn": "flash_attn_varlen_func"}
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
    again = take(env).with_responses(responses_of(batch))
    again.sampling = batch.sampling
    if not env.actor.model.setup.trains_vision:
        vlm.compute_features(env.actor.model, again)
    return score(env.actor, again)


# what flash_attn is called with beyond varlen: windows, two-way pictures, and smaller heads
@pytest.mark.parametrize(
    "case, backend",
    [(case, "varlen") for case in CASES]
    + [(case, kernels) for case in ("gemma3", "gemma4_31b") for kernels in ("flash_attn", "fa4")],
)
def test_a_step_through_the_kernels(folders, kernels, case, backend, monkeypatch):
    """Sampled, scored and trained by the same calls; the log-probs are those of the reference back-end."""
    monkeypatch.setattr(attention, "LARGEST_HEAD", 8 if case.startswith("gemma4") else 256)
    if backend == "fa4":
        offer_flash_attention_4(monkeypatch)
    env = env_of(folders, case, backend)
    batch = ppo.rollout(env.actor, take(env), env.sampling, 3)
    assert DECODING[backend] in kernels.names()
    assert PACKED[backend] in kernels.names()
    scored = score(env.actor, batch)
    assert (scored - batch.logprobs).abs().mean() < 0.01
    assert attention.replaced_kernels() == ("FA4" if backend == "fa4" else None)
    assert (scored - logprobs_by_sdpa(folders, case, batch)).abs().mean() < 0.02
    if backend == "fa4":  # the reference back-end has put torch's own back
        attention.choose_backend("fa4", torch.device("cuda"))
    batch.old_logprobs, batch.advantages = batch.logprobs, torch.randn(len(batch.tokens))
    batch.in_policy_loss = torch.ones(len(batch.tokens), dtype=torch.bool)
    kernels.calls.clear()
    trained = trainable(env.actor, env.args, 1e-3)
    metrics = ppo.update_actor(trained, None, batch, 1, None, env.args)
    assert metrics["train/actor_skipped"] == 0
    assert metrics["train/actor_grad_norm"] > 0
    assert kernels.names() == {PACKED[backend]}
    assert metrics["train/sampler_gap"] < 0.01
    attention.restore_kernels()


REFUSED = {
    "card": (
        "fa4",
        (8, 0),
        set(),
        r"made for compute capabilities \(9, 10\), and this GPU has 8.0",
    ),
    "two packages": (
        "fa4",
        (9, 0),
        {"flash_attn", "flash-attn-4"},
        "write into one folder; pip uninstall flash-attn flash-attn-4",
    ),
    "no package": ("fa3", (9, 0), set(), "flash_attn_interface.*; to install it: build the folder"),
    "two versions": (
        "fa4",
        (9, 0),
        {"torch"},
        f"too many values to unpack.*flash-attn-4=={attention.fitting_flash_attn_4(attention.TORCH)}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_kernels_that_cannot_be_used_are_refused(monkeypatch, case):
    """With the reason, and torch's own in their place."""
    name, capability, packages, message = REFUSED[case]
    offer_flash_attention_4(monkeypatch, capability)
    if packages:
        installed = [SimpleNamespace(metadata={"Name": package}) for package in packages]
        monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)

    def of_another_version(device):
        raise ValueError("too many values to unpack (expected 2)")

    monkeypatch.setattr(attention, "try_kernels", of_another_version)
    with user_error(f"--attention {name}: .*{message}.*; use auto"):
        attention.choose_backend(name, torch.device("cuda"))
    assert attention.replaced_kernels() is None


def test_other_kernels_are_under_the_operators_until_another_backend_is_chosen(monkeypatch):
    """But not in rollouts."""
    offer_flash_attention_4(monkeypatch)
    monkeypatch.setattr(attention, "try_kernels", lambda device: None)
    assert attention.choose_backend("fa4", torch.device("cuda")) == "varlen"
    assert attention.replaced_kernels() == "FA4"
    with attention.own_kernels():
        assert attention.replaced_kernels() is None
    assert attention.replaced_kernels() == "FA4"
    assert attention.choose_backend("varlen", torch.device("cuda")) == "varlen"
    assert attention.replaced_kernels() is None


def test_torch_without_their_backward_is_refused(monkeypatch):
    """torch 2.11 has all of FlashAttention 3, and of FlashAttention 4 no backward that varlen could call."""
    offer_flash_attention_4(monkeypatch)
    monkeypatch.setitem(torch_registry._FLASH_ATTENTION_IMPLS, "FA3", Handle)
    monkeypatch.setattr(attention, "try_kernels", lambda device: None)
    monkeypatch.setattr(attention, "TORCH", (2, 11))
    with user_error("--attention fa4: torch .* cannot train with it; torch 2.12 or newer can"):
        attention.choose_backend("fa4", torch.device("cuda"))
    assert attention.replaced_kernels() is None
    assert attention.choose_backend("fa3", torch.device("cuda")) == "varlen"
    assert attention.replaced_kernels() == "FA3"
    attention.restore_kernels()


# torch 2.14 alone would give a backward with (-1, -1) to cuDNN: varlen.py's _can_use_cudnn asks for no flag
@pytest.mark.parametrize("release, right", [((2, 13), -1), ((2, 14), 24), ((2, 15), -1)])
def test_other_kernels_keep_their_backward(monkeypatch, release, right):
    offer_flash_attention_4(monkeypatch)
    monkeypatch.setattr(attention, "try_kernels", lambda device: None)
    attention.choose_backend("fa4", torch.device("cuda"))
    monkeypatch.setattr(attention, "TORCH", release)
    windows = []

    def varlen_attn(*positional, window_size, scale, enable_gqa=False):
        windows.append(window_size)

    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    q, bounds = torch.zeros(24, 2, 64), torch.tensor([0, 24], dtype=torch.int32)
    for causal in (False, True):
        call = attention.VarlenCall(bounds, bounds, 24, 24, causal)
        attention.varlen_attention(q, q, q, call, 0.125, "varlen")
    assert windows == [(-1, right), (-1, 0)]
    attention.restore_kernels()


FULL, WINDOWS = ("full_attention",), ("full_attention", "sliding_attention")
BLACKWELL = "on this GPU it takes heads of at most 128 numbers, or of 256 without sliding windows"
# (major capability, numbers of a head, layers) -> how the refusal ends
HEADS = {
    (9, 192, FULL): "",
    (9, 256, WINDOWS): "",
    (10, 128, WINDOWS): "",
    (10, 192, FULL): "heads of 192;",
    (10, 256, FULL): "",
    (10, 256, WINDOWS): "heads of 256 with windows;",
    (10, 512, FULL): "",
}


@pytest.mark.parametrize("major, dim, layers", HEADS)
def test_heads_that_blackwell_lacks_are_refused(monkeypatch, major, dim, layers):
    """Above 256 they are for sdpa anyway."""
    offer_flash_attention_4(monkeypatch, (major, 0))
    monkeypatch.setattr(attention, "try_kernels", lambda device: None)
    attention.choose_backend("fa4", torch.device("cuda"))
    text = SimpleNamespace(num_hidden_layers=len(layers), head_dim=dim, layer_types=layers)
    refusal = HEADS[major, dim, layers]
    if refusal:
        with user_error(f"{BLACKWELL}, and this model has {refusal} use auto"):
            attention.check_heads(text, torch.device("cuda"))
    else:
        attention.check_heads(text, torch.device("cuda"))
    attention.restore_kernels()
    attention.check_heads(text, torch.device("cuda"))


# Arguments of _flash_attn_fwd and _flash_attn_bwd: flash_attn/cute/interface.py of the wheels.
FLASH_ATTN_4 = {}
FLASH_ATTN_4["4.0.0b18"] = {
    "forward": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, "
    "causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, "
    "tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, "
    "_arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, "
    "lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, "
    "gather_kv_indices=None",
    "backward": "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
    "window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, "
    "pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, "
    "dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, "
    "cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "dlse=None",
}
FLASH_ATTN_4["4.0.0b36"] = {
    "forward": f"{FLASH_ATTN_4['4.0.0b18']['forward']}, scheduler_metadata=None, seqlen_k_per_split=None, "
    "disable_scheduler_metadata=False, gather_bwd_recompute_p=False",
    "backward": f"{FLASH_ATTN_4['4.0.0b18']['backward']}, learnable_sink=None",
}
RETURNED = {"4.0.0b18": 2, "4.0.0b36": 5}  # values of the forward
# How torch 2.12, 2.13, 2.14 and 2.15 call them: torch/nn/attention/_fa4.py of their wheels.
NAMED = {
    "forward": "softmax_scale causal window_size_left window_size_right return_lse cu_seqlens_q cu_seqlens_k "
    "max_seqlen_q max_seqlen_k seqused_k page_table num_splits out",
    "backward": "softmax_scale causal window_size_left window_size_right cu_seqlens_q cu_seqlens_k "
    "deterministic",
}
POSITIONAL = {"forward": 3, "backward": 6}
# whether torch takes two values of the forward, and no more
TAKES_TWO = {(2, 12): True, (2, 13): True, (2, 14): False, (2, 15): False}


@pytest.mark.parametrize("release", TAKES_TWO)
def test_the_flash_attn_4_that_is_named_fits_torch(release):
    """The message of a failed try names it."""
    version = attention.fitting_flash_attn_4(release)
    assert RETURNED[version] == 2 or not TAKES_TWO[release]
    for direction, names in NAMED.items():
        arguments = signature(FLASH_ATTN_4[version][direction])
        arguments.bind(*[None] * POSITIONAL[direction], **dict.fromkeys(names.split()))


# how varlen gives each form to the operator -> what the kernels are to see
FORMS = {
    "causal": ((True, -1, 0), (True, None, 0)),
    "window": ((False, 23, 0), (False, 23, 0)),
    "both ways": ((False, -1, -1), (False, None, None)),
}


@pytest.mark.skipif(attention.TORCH < (2, 12), reason="torch 2.11 has no backward with windows")
@pytest.mark.parametrize("form", FORMS)
def test_torchs_calls_are_those_of_flash_attn_4(monkeypatch, form):
    """Forward and backward, as the installed torch hands them on; a call that sees both ways is no
    window."""
    (causal, left, right), expected = FORMS[form]
    seen = []
    version = attention.fitting_flash_attn_4(attention.TORCH)

    def note(direction: str, positional: tuple, named: dict) -> None:
        assert named.keys() == set(NAMED[direction].split())
        assert len(positional) == POSITIONAL[direction]
        arguments = signature(FLASH_ATTN_4[version][direction])
        seen.append(arguments.bind(*positional, **named).arguments)

    def forward(*positional, **named):
        note("forward", positional, named)
        return positional[0], torch.zeros(2, 24), *[None] * (RETURNED[version] - 2)

    def backward(*positional, **named):
        note("backward", positional, named)
        return positional[:3]

    module = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(torch_fa4, "_get_device_major", lambda device: 9)  # asked by torch 2.15
    monkeypatch.setattr(torch_fa4, "_fa4_import_module", lambda path: module)
    monkeypatch.setattr(torch_fa4, "_FA4_MODULE_PATH", "flash_attn.cute.interface")
    q, bounds = torch.zeros(24, 2, 64), torch.tensor([0, 24], dtype=torch.int32)
    out, logsumexp = torch_fa4._fa4_run_forward(
        q, q, q, bounds, bounds, 24, 24, 0.125, causal, left, right, None
    )
    torch_fa4._fa4_run_backward(
        out, q, q, q, out, logsumexp, bounds, bounds, 0.125, causal, left, right
    )
    for arguments in seen:
        sides = arguments["window_size_left"], arguments["window_size_right"]
        assert (arguments["causal"], *sides) == expected
    assert len(seen) == 2


# of hopper/flash_api_stable.cpp of FlashAttention 3, as torch 2.11 to 2.15 call them: by position, with all
# arguments
FLASH_ATTN_3 = {
    "fwd": "q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None, "
    "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, "
    "seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
    "is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, "
    "is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0",
    "bwd": "dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, "
    "cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, "
    "deterministic=False, sm_margin=0",
}


@pytest.mark.parametrize("form", FORMS)
def test_torchs_calls_are_those_of_flash_attn_3(monkeypatch, form):
    """Forward and backward; -1 is no window."""
    (causal, left, right), _ = FORMS[form]
    q, bounds, seen = torch.zeros(24, 2, 64), torch.tensor([0, 24], dtype=torch.int32), {}

    def kernel(name: str):
        def called(*positional):
            seen[name] = signature(FLASH_ATTN_3[name]).bind(*positional).arguments
            return positional[0], torch.zeros(2, 24), None, None

        return called

    monkeypatch.setattr(torch_fa3, "_FA3_CUDA_FWD", kernel("fwd"))
    monkeypatch.setattr(torch_fa3, "_FA3_CUDA_BWD", kernel("bwd"))
    common = bounds, bounds, 24, 16, 0.125, causal, left, right
    out, logsumexp = torch_fa3._fa3_run_forward(q, q, q, *common, None)
    torch_fa3._fa3_run_backward(out, q, q, q, out, logsumexp, *common)
    for arguments in (seen["fwd"], seen["bwd"]):
        named = "cu_seqlens_q max_seqlen_q max_seqlen_k softmax_scale is_causal".split()
        named += ["window_size_left", "window_size_right"]
        values = bounds, 24, 16, 0.125, causal, left, right
        for name, value in zip(named, values, strict=True):
            assert arguments[name] is value or arguments[name] == value, name
    assert seen["fwd"]["softcap"] == seen["bwd"]["softcap"] == 0.0
    assert seen["fwd"]["attention_chunk"] == 0


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
