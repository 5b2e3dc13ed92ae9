"""What transformers' own layers compute, in fewer kernels: norms, rotary positions, gates, the patch
embedding, DeepStack's sum.

The weights keep their names, so checkpoints load and export as with transformers' layers. Which of
transformers' modules are replaced is a rule by class; tests compare each family with transformers.

Shapes: D numbers of a norm's vectors, P patches, E numbers of an embedded patch, L tokens, H hidden
size, M image tokens.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import SiLUActivation

from common.logprobs import fuse

# The packages of transformers whose layers were compared with these, by tests and launch/check_model.py;
# those of others are left as they are.
COMPARED = """cohere2 exaone4 exaone4_5 gemma3 gemma4 glm4v glm4v_moe glm_ocr lighton_ocr llama ministral3
mistral mistral3 pixtral qwen2 qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe qwen3_5
qwen3_5_moe""".split()
# norms whose weights are stored as their difference from 1
PLUS_ONE = ("Gemma3RMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
# The parts of a SwiGLU; a module with further ones is something else.
SWIGLU = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def is_compared(module: nn.Module) -> bool:
    """Whether a module is of the packages in COMPARED: transformers.models.PACKAGE.modeling_PACKAGE."""
    package, *_ = type(module).__module__.removeprefix("transformers.models.").split(".")
    return package in COMPARED


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019), by torch's one kernel
    on a GPU, where transformers' own formula takes eight.

    Both compute in float32. This one rounds to the compute type once, at the end; transformers'
    rounds before the product with the weight as well. In float32 they are the same, bit for bit on
    a CPU.
    """

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RMSNormPlusOne(RMSNorm):
    """Gemma's and Qwen3.5's: weights are stored as their difference from 1. The sum is taken in
    float32, since bfloat16 would round it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()  # (D,)
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).type_as(x)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), with the layers of transformers' own module."""

    def __init__(self, theirs: Any):
        super().__init__()
        self.gate_proj, self.up_proj = theirs.gate_proj, theirs.up_proj
        self.down_proj = theirs.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`silu_product`, which keeps gate and up alone where it is fused."""
    return fuse(silu_product, gate, up, gradient=functools.partial(fuse, silu_product_backward))


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def silu_product_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


class PatchProjection(nn.Conv3d):
    """The patch embedding of Qwen-VL as the matrix product that it is: its kernel covers exactly
    one patch. cuDNN's convolution of so many tiny volumes is slow in some versions, and its
    backward in bfloat16 fails in others."""

    def forward(self, x: Tensor) -> Tensor:
        """x (P, 3, deep, side, side) -> (P, E)."""
        return F.linear(x.flatten(1), self.weight.flatten(1), self.bias)


def add_images(theirs: Callable, hidden: Tensor, index: Tensor, features: Tensor) -> Tensor:
    """DeepStack: features (M, H) added to hidden states (1, L, H) at ``index`` (M,). A mask, which
    transformers' own `generate` gives, goes to ``theirs``: a GPU would wait for the mask's sum."""
    if index.dtype == torch.bool:
        return theirs(hidden, index, features)
    return hidden.index_add(1, index, features[None])


def fuse_rotary(theirs: ModuleType) -> None:
    """Let the layers of a module of transformers rotate queries and keys by one kernel each. They
    look the function up by its name, so it is replaced there, for all models of this process."""
    rotate = getattr(theirs, "apply_rotary_pos_emb", None)
    if rotate and not isinstance(rotate, functools.partial):
        gradient = functools.partial(fuse, rotate_back, rotate=rotate)
        vars(theirs)["apply_rotary_pos_emb"] = functools.partial(fuse, rotate, gradient=gradient)


def rotate_back(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, rotate: Callable) -> tuple:
    """Gradients of what ``rotate`` took. The two numbers of a pair have one cosine and one sine."""
    return *rotate(dq, dk, cos, -sin), None, None


def in_place_of(theirs: Any) -> nn.Module | None:
    """The module of ours that computes what one of transformers does, by its class and parts."""
    if not is_compared(theirs):
        return None
    kind, weights = type(theirs).__name__, dict(theirs.named_parameters())
    is_norm = kind.endswith("RMSNorm") and weights.keys() == {"weight"}
    if is_norm and theirs.weight.ndim == 1:
        eps: Any = getattr(theirs, "variance_epsilon", getattr(theirs, "eps", None))
        return (RMSNormPlusOne if kind in PLUS_ONE else RMSNorm)(theirs.weight, eps)
    is_linear = theirs._modules.keys() == SWIGLU and isinstance(theirs.gate_proj, nn.Linear)
    if is_linear and isinstance(theirs.act_fn, nn.SiLU | SiLUActivation):
        return SwiGLU(theirs)
    return None


def use_fewer_kernels(model: nn.Module) -> None:
    """Put these in the place of transformers' own that compute the same."""
    modules: list = list(model.named_modules())  # their classes differ by family
    for name, module in modules:
        kind, ours = type(module).__name__, in_place_of(module)
        if ours is not None:
            model.set_submodule(name, ours)
        elif kind.endswith("Attention"):
            fuse_rotary(sys.modules[type(module).__module__])
        elif kind.endswith("PatchEmbed") and isinstance(module.proj, nn.Conv3d):
            module.proj.__class__ = PatchProjection
        elif hasattr(module, "_deepstack_process"):
            module._deepstack_process = functools.partial(add_images, module._deepstack_process)
