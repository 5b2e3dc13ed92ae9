"""The compiled draw of tokens against the eager one, and what happens where nothing compiles."""

import shutil

import pytest
import torch
from conftest import rounding
from test_losses import exponential_noise

from common import logprobs
from common.logprobs import Fused

needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


@pytest.mark.slow
@needs_compiler
def test_the_compiled_race_draws_the_same_ids():
    """From the same noise, but for the last bits of a logarithm, in which libraries differ; of other batches and
    vocabularies without compiling anew, banned ids among them."""

    def both(logits, keys, hashes):
        return logprobs._eager_race(logits, keys, hashes), logprobs._exponentials(keys, hashes)

    fused, generator = Fused(both, ("cpu",)), torch.Generator().manual_seed(0)
    for batch, vocabulary in ((5, 997), (64, 4001)):
        logits = torch.randn(batch, vocabulary, generator=generator) * 3
        logits[:, ::7] = -torch.inf
        keys = torch.randint(-2**62, 2**62, (batch,), generator=generator)
        with torch.inference_mode():
            ids, noise = fused(logits, keys, logprobs._id_hashes(vocabulary, logits.device))
            torch.testing.assert_close(noise, exponential_noise(vocabulary, keys), rtol=rounding(2), atol=0)
            assert torch.equal(ids, logprobs.gumbel_race(logits, keys))
    assert not fused.failed
    assert fused.compiled is not None


def test_a_function_that_does_not_compile_runs_as_it_is(monkeypatch, capsys):
    def failing(function, dynamic):
        def compiled(*tensors):
            raise RuntimeError("ptxas not found")

        return compiled

    monkeypatch.setattr(torch, "compile", failing)
    double = Fused(lambda x: 2 * x, ("cpu",))
    assert [double(torch.tensor(value)).item() for value in (1, 2)] == [2, 4]
    text = capsys.readouterr().out
    assert text.count("warning") == 1
    assert "failed, which costs only time: ptxas not found" in text


def test_a_cpu_compiles_nothing():
    fused = Fused(torch.sin)
    assert fused(torch.zeros(1)).item() == 0
    assert fused.compiled is None
