"""The compiled draw of tokens against the eager one, and what happens where nothing compiles."""

import shutil

import pytest
import torch

from common import logprobs

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    logprobs._fused_race.cache_clear()
    yield
    logprobs._fused_race.cache_clear()


@pytest.mark.slow
@needs_compiler
def test_the_compiled_race_draws_the_same_ids():
    """Of other batches and vocabularies without compiling anew, banned ids among them."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        fused = logprobs._fused_race(CPU)
        assert fused is not logprobs._race
        for batch, vocabulary in ((5, 997), (64, 4001)):
            logits = torch.randn(batch, vocabulary, generator=generator) * 3
            logits[:, ::7] = -torch.inf
            keys = torch.randint(-2**62, 2**62, (batch,), generator=generator)
            with torch.compiler.set_stance("fail_on_recompile"):
                ids = fused(logits, keys, logprobs._id_hashes(vocabulary, CPU))
            assert torch.equal(ids, logprobs.gumbel_race(logits, keys))


def test_where_nothing_compiles_it_runs_as_it_is(monkeypatch, capsys):
    def failing(function, dynamic):
        def compiled(*tensors):
            raise RuntimeError("ptxas not found")

        return compiled

    monkeypatch.setattr(torch, "compile", failing)
    assert logprobs._fused_race(CPU) is logprobs._fused_race(CPU) is logprobs._race
    text = capsys.readouterr().out
    assert text.count("warning") == 1
    assert "failed, which costs only time: ptxas not found" in text


def test_a_cpu_compiles_nothing(monkeypatch):
    monkeypatch.delattr(torch, "compile")
    logprobs.gumbel_race(torch.zeros(2, 5), torch.arange(2))
