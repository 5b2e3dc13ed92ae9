"""What transformers' own layers compute, in fewer kernels: norms, rotary positions, gates, the patch
embedding, DeepStack's sum.

Their weights keep their names, so checkpoints load and export as without them. Whether a module of
transformers computes what ours does is not guessed by its name: when a model is built, both are run
once on the same small random weights and inputs (`agree`), and it is left as it is where they differ.

Shapes: D numbers of a norm's vectors, P patches, E numbers of an embedded patch, L tokens, H hidden
size, M image tokens.
"""

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from common.logprobs import fuse

# The parts of a SwiGLU; a module with further ones is something else.
SWIGLU = {"gate_proj", "up_proj", "down_proj", "act_fn"}


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
        return self.down_proj(fuse(silu_product, self.gate_proj(x), self.up_proj(x)))


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


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
        vars(theirs)["apply_rotary_pos_emb"] = functools.partial(fuse, rotate)


def agree(theirs: nn.Module, ours: nn.Module) -> bool:
    """Whether two modules with weights of the same names compute the same. Their weights and inputs are
    drawn at random and small: each size of the real weights is replaced by a small one, the same
    wherever it occurs."""
    generator = torch.Generator().manual_seed(0)  # the run's own is left alone
    shapes = {name: weight.shape for name, weight in ours.named_parameters()}
    first = next(iter(shapes.values()))
    size = first[1:] or first  # that of a norm has the inputs' size
    small = {length: 4 + 2 * k for k, length in enumerate(sorted({*sum(shapes.values(), ())}))}

    def random(lengths: Iterable[int]) -> Tensor:
        return torch.randn([small[length] for length in lengths], generator=generator)

    weights = {name: random(shape) for name, shape in shapes.items()}
    # so small that the epsilon of a norm matters, and so large that bounds would
    x = torch.stack([random(size), 1e-3 * random(size), 30 * random(size)])
    one, other = (functional_call(module, weights, (x,)) for module in (theirs, ours))
    return torch.allclose(one.flatten(), other.flatten(), rtol=1e-4, atol=1e-5)


def candidates(theirs: Any) -> list[nn.Module]:
    """Modules of ours that may compute what one of transformers does, judging by its parts."""
    weights = dict(theirs.named_parameters())
    is_norm = type(theirs).__name__.endswith("RMSNorm") and weights.keys() == {"weight"}
    if is_norm and theirs.weight.ndim == 1:
        eps: Any = getattr(theirs, "variance_epsilon", getattr(theirs, "eps", None))
        return [kind(theirs.weight, eps) for kind in (RMSNorm, RMSNormPlusOne)]
    if theirs._modules.keys() == SWIGLU and isinstance(theirs.gate_proj, nn.Linear):
        return [SwiGLU(theirs)]
    return []


def check_add_images(theirs: Callable) -> None:
    """Raises ValueError: a sum of DeepStack that `add_images` is not."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 5, 4, generator=generator)
    features = torch.randn(2, 4, generator=generator)
    ours = add_images(theirs, hidden, torch.tensor([1, 3]), features)
    is_image = torch.tensor([[False, True, False, True, False]])
    if not torch.allclose(ours, theirs(hidden.clone(), is_image, features)):
        raise ValueError(f"{theirs.__qualname__} of transformers is another sum than is known here")


def use_fewer_kernels(model: nn.Module) -> None:
    """Put these in the place of transformers' own, wherever they compute the same. Raises ValueError:
    see `check_add_images`."""
    modules: list = list(model.named_modules())  # their classes differ by family
    for name, module in modules:
        ours = next((part for part in candidates(module) if agree(module, part)), None)
        kind = type(module).__name__
        if ours is not None:
            model.set_submodule(name, ours)
        elif kind.endswith("Attention"):
            fuse_rotary(sys.modules[type(module).__module__])
        elif kind.endswith("PatchEmbed") and isinstance(module.proj, nn.Conv3d):
            ours = copy.copy(module.proj)
            ours.__class__ = PatchProjection
            if agree(module.proj, ours):
                module.proj = ours
        elif hasattr(module, "_deepstack_process"):
            theirs = module._deepstack_process
            check_add_images(theirs)
            module._deepstack_process = functools.partial(add_images, theirs)
