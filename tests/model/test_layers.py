"""Our own norms against transformers', and that no model is left with another one."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLRMSNorm,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

from common.data.families import Qwen
from common.data.folder import read_model_config
from common.model import build, layers
from conftest import write_checkpoint
from families import make_config, make_tokenizer
from helpers import COMPUTE

NORMS = [Qwen2_5_VLRMSNorm, Qwen3VLTextRMSNorm, Gemma3RMSNorm]


def with_gradients(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """The output of a module, and the gradients of its input and parameters."""
    x = x.clone().requires_grad_()
    out = module(x)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), (x, *module.parameters()))]


def norms(kind, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A norm of transformers and ours, on the same random weights."""
    theirs, holder = kind(48, eps=1e-5), nn.Module()
    nn.init.normal_(theirs.weight, mean=0.5)
    holder.norm = theirs.to(dtype)
    layers.use_fewer_kernels(holder)
    assert isinstance(holder.norm, layers.RMSNorm)
    assert holder.norm.weight is theirs.weight
    return theirs, holder.norm


@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_those_of_transformers_bit_for_bit_in_float32(kind):
    theirs, ours = norms(kind, torch.float32)
    x, weight = torch.randn(3, 5, 48) * 7, torch.randn(3, 5, 48)
    for expected, actual in zip(with_gradients(theirs, x, weight), with_gradients(ours, x, weight)):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("kind", NORMS)
def test_norms_in_bfloat16_are_nearer_to_float64_than_those_of_transformers(kind):
    """They round once instead of twice."""
    theirs, ours = norms(kind, torch.bfloat16)
    x, weight = torch.randn(200, 48).bfloat16() * 7, torch.randn(200, 48).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact *= theirs.weight.double() + (1.0 if kind is Gemma3RMSNorm else 0.0)
    before, now = ((module(x).double() - exact).norm() / exact.norm() for module in (theirs, ours))
    assert now <= before
    assert now < torch.finfo(torch.bfloat16).eps / 3
    for expected, actual in zip(with_gradients(theirs, x, weight), with_gradients(ours, x, weight)):
        assert actual.dtype == torch.bfloat16
        assert (expected.float() - actual.float()).norm() < 0.01 * expected.float().norm()


def types_of(modules, *bases: type) -> list[type]:
    return [type(module) for module in modules if isinstance(module, bases)]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_every_model_that_is_built_has_them(kind, tmp_path):
    model = build.build_model(read_model_config(write_checkpoint(tmp_path, kind)), COMPUTE)
    norms = {
        type(module).__name__ for module in model.modules() if "RMSNorm" in type(module).__name__
    }
    assert norms == {"RMSNorm"}
    assert types_of(model.modules(), nn.Conv3d) == [layers.PatchProjection]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_no_tower_that_can_be_trained_has_a_convolution(kind):
    model = build.build_model(make_config(kind, make_tokenizer(kind)), COMPUTE)
    assert isinstance(model.setup.family, Qwen)
    assert types_of(model.model.visual.modules(), nn.Conv1d, nn.Conv2d, nn.Conv3d) == [
        layers.PatchProjection
    ]
