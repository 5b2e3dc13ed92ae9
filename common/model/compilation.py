"""Decoder layers through torch.compile: norms, rotary positions, gates and residual sums between
the matrix products become a few kernels, forward and backward.

What mixes tokens, linear attention and experts run as they are written, between the compiled
parts. All layers of a kind, of actor and critic, share their graphs, for packs of any length.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from transformers import AttentionInterface

from common.model.attention import ATTENTION_NAME, PackedAttention, language_attention
from common.model.linear_attention import DeltaNet
from common.model.vlm import Model, decoder, routers

# Most graphs of one piece of code. Layers differ in kind, in whether their input has a gradient,
# and in whether adapters are on: torch's own limit of 8 is below the product of these.
GRAPHS = 32


class CompiledLayer(nn.Module):
    """Comes before the class of a layer, whose forward it compiles for packs of training and
    scoring."""

    compiled: Callable

    def forward(self, hidden_states: Tensor, *args, **named) -> Any:
        attention = named.get("attention")
        # Rollouts stay eager: decoding waits for weights and keys, and CUDA graphs already take its
        # kernels' launches away. Both compute the same but for rounding: train/sampler_gap.
        trains = isinstance(attention, PackedAttention) and attention.cache is None
        # An empty pack is one token, which would be compiled on its own.
        if not trains or hidden_states.shape[1] == 1:
            return super().forward(hidden_states, *args, **named)
        return self.compiled(hidden_states, *args, **named)


def compile_layers(model: Model) -> None:
    """Let the decoder's layers be compiled, each at its first pack."""
    torch._dynamo.config.recompile_limit = GRAPHS
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(language_attention))
    choosing = set(routers(model))
    for layer in decoder(model).layers:
        for part in layer.children():
            if isinstance(part, DeltaNet) or choosing & set(part.modules()):
                part.__class__ = left_out(type(part))
        layer.__class__ = compiled_class(type(layer))


@functools.cache
def compiled_class(kind: type) -> type:
    """The class of a layer with `CompiledLayer` before it."""
    code = inspect.unwrap(kind.forward)  # gradient checkpointing stays outside
    compiled = torch.compile(code, dynamic=True)
    return type(kind.__name__, (CompiledLayer, kind), {"compiled": compiled})


@functools.cache
def left_out(kind: type) -> type:
    """The class of a part of a layer that is not compiled."""
    return type(kind.__name__, (kind,), {"forward": torch.compiler.disable(kind.forward)})
