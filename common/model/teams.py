"""Rollouts of models too large for one GPU: the ranks of a team decode the same samples, each with its
piece of every layer (tensor parallelism, Shoeybi et al. 2019).

A piece of a layer is a narrower layer, with some of the heads and a slice of the MLP's inner dimension.
transformers' own modules compute it; two sums per layer over the team complete its outputs. FSDP
gathers one layer after the other, as for training, and each rank keeps its piece of each (`cut`). So a
team may have any size that divides the heads, however the weights are sharded in training.

Embeddings and head are complete on every rank. They are gathered anyway, before the layers, and to
gather logits from pieces of the head would take about as long as computing all of them.

Shapes: E experts, I their inner size, H hidden size.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.distributed import Team
from common.ground.files import UserError
from common.model.vlm import Model, decoder

# What is cut: by module name, the dimension of each of its parameters. Everything else is complete on
# every rank: norms, routers, linear attention.
OUTPUTS = {"weight": 0, "bias": 0, "lora_B": 0}
INPUTS = {"weight": 1, "lora_A": 1}
SUMMED = {  # the team sums their outputs
    "o_proj": INPUTS,
    "down_proj": INPUTS,
    "experts": {"gate_up_proj": 1, "down_proj": 2},  # (E, 2 I, H), (E, H, I)
}
CUTS = SUMMED | {
    "q_proj": OUTPUTS,
    "k_proj": OUTPUTS,
    "v_proj": OUTPUTS,
    "gate_proj": OUTPUTS,
    "up_proj": OUTPUTS,
    "gate_up_proj": OUTPUTS,
}
KEYS = {"k_proj", "v_proj"}  # of which ranks may share a head


def names_and_units(layer: nn.Module) -> dict[nn.Module, tuple[str, int]]:
    """For a layer and each module in it: its name in its parent, and how many entries of a cut
    dimension stay together, such as those of a head."""
    named = {layer: ("", 1)}
    for outer in layer.modules():
        for name, part in outer.named_children():
            # the experts' kernel reads 16 bytes at a time
            named[part] = name, 8 if name == "experts" else getattr(outer, "head_dim", 1)
    return named


def piece_of(value: Tensor, module: str, unit: int, kind: str, team: Team) -> Tensor:
    """A copy of this rank's piece of a parameter: the ``kind``, such as "weight", of a ``module`` of this
    name, in which ``unit`` entries stay together. Raises UserError: it cannot be divided equally."""
    dim, size = CUTS.get(module, {}).get(kind), team.size
    if dim is None:
        is_term = module in SUMMED and kind == "bias"
        return value / size if is_term else value.clone()
    # gate_up_proj is all gates, then all ups: take a piece of each
    value = value.unflatten(dim, (2 if "gate_up_proj" in (module, kind) else 1, -1))
    numbers, least = value.shape[dim + 1], size * unit
    if numbers % least and (module not in KEYS or least % numbers):  # ranks may share a key head
        raise UserError(
            f"--rollout_shards {size} must divide the {numbers / unit:g} parts of {module}, of {unit} "
            "numbers each"
        )
    count = min(numbers // unit, size)
    piece = value.chunk(count, dim + 1)[team.rank * count // size]
    return piece.flatten(dim, dim + 1).clone()


def piece_bytes(model: Model, ranks: int) -> int:
    """Bytes of a rank's pieces of all layers if so many ranks share them, in the compute dtype; counted
    on meta. Raises UserError: they cannot be divided among so many."""
    numbers = 0
    for layer in decoder(model).layers:
        for owner, name_and_unit in names_and_units(layer).items():
            for kind, value in owner.named_parameters(recurse=False):
                numbers += piece_of(value.to("meta"), *name_and_unit, kind, Team(ranks)).numel()
    return numbers * model.setup.dtype.itemsize


class Sharded(nn.Module):
    """A module that FSDP wraps, as far as it is used here."""

    reshard: Callable


def cut(layer: Sharded, team: Team, undo: ExitStack) -> None:
    """Until ``undo`` closes, replace the weights of a layer that FSDP has gathered by this rank's
    pieces, and sum its outputs over the team."""
    named = names_and_units(layer)
    weights = [
        (owner, kind, weight)
        for owner in layer.modules()
        for kind, weight in owner.named_parameters(recurse=False)
        if not isinstance(weight, DTensor)  # FSDP gathers this one with another module of the layer
    ]
    pieces = [piece_of(weight, *named[owner], kind, team) for owner, kind, weight in weights]
    layer.reshard()
    for (owner, kind, _), piece in zip(weights, pieces):
        undo.callback(setattr, owner, kind, getattr(owner, kind))
        setattr(owner, kind, nn.Parameter(piece, requires_grad=False))

    def sum_outputs(_, __, out: Tensor) -> Tensor:
        return team.sum(out)

    for owner, (name, _) in named.items():
        if name in SUMMED:
            undo.callback(owner.register_forward_hook(sum_outputs).remove)
        groups = getattr(owner, "num_key_value_groups", None)
        if groups:  # transformers' own attention repeats each key head this often
            undo.callback(setattr, owner, "num_key_value_groups", groups)
            inputs = owner.get_parameter("o_proj.weight").shape[1]
            owner.num_key_value_groups = min(groups, inputs // getattr(owner, "head_dim", 1))
