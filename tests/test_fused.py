"""Compiled functions of decoding against the eager ones, and what happens where nothing compiles."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from common import logprobs
from common.model import layers
from conftest import rounding, seeded
from helpers import compile_layers, needs_compiler

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    cached = logprobs._compiles, logprobs._compiled, logprobs._id_hashes  # a test may replace them
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.slow
@needs_compiler
def test_the_compiled_race_draws_the_same_ids():
    """Of any number of rows without compiling anew, banned ids among them; each vocabulary has a
    kernel of its own, as Inductor takes the block sizes from the first call. The probe leaves none
    behind."""
    generator = seeded(0)
    torch._dynamo.reset()
    with torch.inference_mode():
        assert logprobs._compiles(CPU)
        assert not _debug_get_cache_entry_list(logprobs._race)
        for batch, vocabulary, stance in (
            (5, 97, "default"),
            (5, 4001, "default"),
            (64, 4001, "fail_on_recompile"),
        ):
            logits = torch.randn(batch, vocabulary, generator=generator) * 3
            logits[:, ::7] = -torch.inf
            keys = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
            with torch.compiler.set_stance(stance):
                ids = logprobs._compiled(logprobs._race)(
                    logits, keys, logprobs._id_hashes(vocabulary, CPU)
                )
            assert torch.equal(ids, logprobs.gumbel_race(logits, keys))
        assert len(_debug_get_cache_entry_list(logprobs._race)) == 2


@pytest.fixture
def sources(monkeypatch):
    """The modules that Inductor writes for an H100, which is not there: they do not run."""
    from torch._inductor import config, graph, scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    h100 = dict(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
    )
    written = []

    def compile_to_module(lowering):
        code = lowering.codegen()[0]
        written.append(code.value)
        return SimpleNamespace(call=lambda tensors: lowering.module(*tensors), __file__="")

    monkeypatch.setattr(DeviceProperties, "create", lambda device: DeviceProperties(**h100))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(name="H100", **h100)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(scheduler, "has_triton", lambda: True)
    monkeypatch.setattr(torch.utils._triton, "triton_hash_with_backend", lambda: "")
    monkeypatch.setattr(graph.GraphLowering, "compile_to_module", compile_to_module)
    with config.patch(force_disable_caches=True):
        yield written


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is None,
    reason="this build of torch is for CPUs: bash tests/run.sh --versions has one for CUDA",
)
def test_the_draw_of_a_gpu_has_the_block_sizes_of_its_vocabulary(sources):
    """Of a model of 152,064 ids, after one of 300; not those of the probe."""
    cuda = torch.device("cuda", 0)
    torch._dynamo.reset()
    with FakeTensorMode(), torch.inference_mode():
        for batch, vocabulary in ((8, 300), (64, 152_064)):
            keys = torch.zeros(batch, dtype=torch.int64, device=cuda)
            logprobs.gumbel_race(torch.zeros(batch, vocabulary, device=cuda), keys)
    sizes = [
        re.findall(r"size_hints={'x': (\d+), 'r0_': (\d+)}", source)
        for source in sources
        if "argmax" in source
    ]
    assert sizes == [[("8", "512")], [("64", "262144")]]


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11's compiler leaves the roundings out on a CPU, where nothing needs it",
)
def test_rotary_positions_and_gates_are_compiled_bit_for_bit():
    """In bfloat16, whose roundings between two operations a compiler would leave out."""
    layers.fuse_rotary(modeling_qwen2_5_vl)
    (rotate,) = modeling_qwen2_5_vl.apply_rotary_pos_emb.args
    generator = seeded(0)
    q, k, cos, sin, gate, up = (
        torch.randn(1, 8, size, generator=generator).bfloat16() for size in (96, 32, 16, 16, 99, 99)
    )
    q, k = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in (q, k))
    for function, *tensors in ((rotate, q, k, cos, sin), (layers.silu_product, gate, up)):
        with torch.inference_mode():
            torch.testing.assert_close(
                logprobs._compiled(function)(*tensors), function(*tensors), rtol=0, atol=0
            )


def result_and_gradients(function, tensors, results):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    return [*out, *torch.autograd.grad(out, leaves, results)]


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(torch.__version__ < "2.12", reason="as above")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_both_ways_they_have_the_gradients_of_autograd(monkeypatch, dtype):
    """In bfloat16 in every bit; in float32 the exponential of a gate has another rounding."""
    compile_layers(monkeypatch)
    layers.fuse_rotary(modeling_qwen2_5_vl)
    (theirs,) = modeling_qwen2_5_vl.apply_rotary_pos_emb.args
    generator = seeded(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    angles = torch.randn(1, 37, 8, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    heads = [draw(1, 37, n, 16).transpose(1, 2) for n in (6, 2, 6, 2)]
    rotate = lambda q, k: modeling_qwen2_5_vl.apply_rotary_pos_emb(q, k, cos, sin)  # noqa: E731
    for ours, plain, tensors, results in (
        (layers.gated, layers.silu_product, [draw(1, 37, 99), draw(1, 37, 99)], [draw(1, 37, 99)]),
        (rotate, lambda q, k: theirs(q, k, cos, sin), heads[:2], heads[2:]),
    ):
        actual, expected = (result_and_gradients(f, tensors, results) for f in (ours, plain))
        tolerance = rounding(4) if ours is layers.gated and dtype == torch.float32 else 0
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_gate_keeps_two_tensors(monkeypatch):
    """Its inputs, where autograd keeps its activation as well."""
    monkeypatch.setattr(logprobs, "can_fuse", lambda device: True)
    monkeypatch.setattr(logprobs, "_compiled", lambda function: function)
    gate, up = (torch.randn(5, requires_grad=True) for _ in range(2))
    for function, count in ((layers.gated, 2), (layers.silu_product, 3)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            function(gate, up)
        assert len({x.data_ptr() for x in saved}) == count


def test_where_nothing_compiles_it_runs_as_it_is(monkeypatch, capsys):
    def failing(function, **options):
        def compiled(*tensors):
            raise RuntimeError("ptxas not found")

        return compiled

    monkeypatch.setattr(torch, "compile", failing)
    assert not logprobs._compiles(CPU) and not logprobs._compiles(CPU)
    text = capsys.readouterr().out
    assert text.count("warning") == 1
    assert "failed, which costs only time: ptxas not found" in text


def test_a_cpu_compiles_nothing(monkeypatch):
    monkeypatch.delattr(torch, "compile")
    with torch.no_grad():
        logprobs.gumbel_race(torch.zeros(2, 5), torch.arange(2))


def test_with_gradients_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(logprobs, "_compiles", lambda device: True)
    monkeypatch.setattr(logprobs, "_compiled", lambda function: lambda *tensors: "compiled")
    tensor = SimpleNamespace(device=torch.device("cuda"))
    assert logprobs.fuse(lambda x: "as it is", tensor) == "as it is"
    with torch.no_grad():
        assert logprobs.fuse(lambda x: "as it is", tensor) == "compiled"


def test_what_is_given_by_name_is_passed_on(monkeypatch):
    """Pixtral rotates with ``unsqueeze_dim``; Gemma 4 gives even its tensors by name."""
    monkeypatch.setattr(logprobs, "_compiles", lambda device: True)
    monkeypatch.setattr(logprobs, "_compiled", lambda function: functools.partial(function, "gpu"))
    tensor = SimpleNamespace(device=torch.device("cuda"))
    with torch.no_grad():
        assert logprobs.fuse(lambda *x, dim: (*x, dim), tensor, dim=2) == ("gpu", tensor, 2)
        assert logprobs.fuse(lambda *x, q: (*x, q), q=tensor) == ("gpu", tensor)
