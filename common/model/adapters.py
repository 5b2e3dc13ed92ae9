"""Adapters: low-rank updates of a frozen model's linear layers (Hu et al. 2021)."""

from collections.abc import Iterable
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.model.vlm import Model, decoder, float32_parts, routers


def freeze(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Freeze parameters and keep them in the compute type: those that each rank holds whole are outside of
    FSDP's precision policy, and others it would cast in every forward. Buffers stay float32."""
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)


def freeze_model(model: Model) -> Model:
    """Freeze all parameters of a model on meta; those that compute in float32 in any type stay float32."""
    freeze(model.parameters(), model.setup.dtype)
    for part in float32_parts(model):
        freeze(part.parameters(), torch.float32)
    return model


class LoRALinear(nn.Linear):
    """A frozen linear layer with a trained adapter (Hu et al. 2021): x -> W x + scale B A x, A (r,
    in), B (out, r).

    Its weight keeps its name, so checkpoints load and export as without adapters.
    """

    def __init__(self, layer: nn.Linear, rank: int, scale: float):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias, self.scale = layer.weight, layer.bias, scale
        self.acts = True
        self.lora_A = nn.Parameter(torch.empty(rank, layer.in_features, device="meta"))
        self.lora_B = nn.Parameter(torch.empty(layer.out_features, rank, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        out = F.linear(rows, self.weight, self.bias)
        if self.acts:  # added by the product itself: a scale and a sum would pass over `out` again
            out.addmm_(F.linear(rows, self.lora_A), self.lora_B.t(), alpha=self.scale)
        return out.unflatten(0, x.shape[:-1])


def add_adapters(model: Model, base: str, rank: int, alpha: int) -> None:
    """Freeze a model on meta, in the compute type, and give every linear layer of its decoder,
    attention and MLP, an adapter in float32, scaled by alpha / rank. Routers get none, nor do experts,
    which are stacked in single parameters, no linear layers. ``base``: the checkpoint that the adapters
    belong to.
    """
    freeze_model(model)
    inside = set(decoder(model).layers.modules()) - set(routers(model))
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and layer in inside
    }
    for name, layer in layers.items():
        model.set_submodule(name, LoRALinear(layer, rank, alpha / rank))
    # Whole names: a suffix alone would also fit layers of a vision tower.
    model.setup.adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(layers),
    }


@contextmanager
def without_adapters(model: Model):
    """Inside, a model with adapters is its base: the reference of a KL needs no copy of the
    weights."""
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for layer in layers:
        layer.acts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.acts = True
