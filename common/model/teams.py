"""Rollouts of models that no GPU can hold: the ranks of a team decode the same samples, each with its
piece of every layer (tensor parallelism, Shoeybi et al. 2019).

A piece of a layer is a narrower layer, with some of the heads and some of the inner numbers of the
MLP. transformers' own modules compute it; two sums per layer over the team make its outputs whole.
FSDP gathers one layer after the other, as for training, and each rank keeps its piece of each
(`cut`): a team may have any size that divides the heads, however the weights are sharded in training.

Shapes: E experts, I their inner numbers, H hidden size.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.distributed import Team
from common.model.vlm import Model, decoder
from common.process import UserError

# What is cut of the layers and at both ends, by the names of modules: of each of its parameters the
# dimension. Whatever else a decoder has is whole on every rank: norms, routers, linear attention.
OUTPUTS = {"weight": 0, "bias": 0, "lora_B": 0}
INPUTS = {"weight": 1, "lora_A": 1}
READ = {  # a rank's outputs are read by its piece of the next product
    "q_proj": OUTPUTS,
    "k_proj": OUTPUTS,
    "v_proj": OUTPUTS,
    "gate_proj": OUTPUTS,
    "up_proj": OUTPUTS,
    "gate_up_proj": OUTPUTS,
}
SUMMED = {  # the outputs of all ranks are terms of a sum
    "o_proj": INPUTS,
    "down_proj": INPUTS,
    "experts": {"gate_up_proj": 1, "down_proj": 2},  # (E, 2 I, H), (E, H, I)
}
JOINED = {  # the outputs of all ranks stand side by side
    "embed_tokens": INPUTS,  # (V, H)
    "embed_tokens_per_layer": INPUTS,
    "lm_head": OUTPUTS,
}
CUTS = READ | SUMMED | JOINED
KEYS = {"k_proj", "v_proj"}  # which may be values as well, or another layer's
# What a module of a layer may have of these, besides keys: all that makes one computation.
TOGETHER = (
    set(),
    {"q_proj", "o_proj"},
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
    {"experts"},
)


# -------------------------------------------------------------------------------------------------
# Pieces
# -------------------------------------------------------------------------------------------------


def places(model: Model) -> dict[nn.Module, tuple[str, int]]:
    """Of each module of decoder and head its name in the module around it, and how many numbers stay
    together in what is cut of it: those of a head. Raises UserError: a module has only part of what
    is cut together, the rest by other names."""
    placed: dict[nn.Module, tuple[str, int]] = {}
    for path, outer in (("", model), *decoder(model).named_modules()):
        parts = outer._modules.keys() & (READ | SUMMED).keys()
        if parts - KEYS not in TOGETHER:
            raise UserError(
                f"--rollout_shards: {path} has {', '.join(sorted(parts))} alone, so ranks cannot share it"
            )
        for name, part in outer.named_children():
            # the experts' kernel reads 16 bytes at a time
            placed[part] = name, 8 if name == "experts" else getattr(outer, "head_dim", 1)
    return placed


def piece_of(value: Tensor, module: str, unit: int, kind: str, team: Team) -> Tensor:
    """A copy of this rank's piece of a parameter: of the ``kind``, as "weight", in a ``module`` of this
    name, where ``unit`` numbers stay together. Raises UserError: it cannot be shared equally."""
    dim, size = CUTS.get(module, {}).get(kind), team.size
    if dim is None:
        is_term = module in SUMMED and kind == "bias"
        return value / size if is_term else value.clone()
    if module == "lm_head":  # with rows for ids that do not exist, and are banned
        value = F.pad(value, (0, 0, 0, -len(value) % size))
    # all gates, then what they open: of each a piece
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
    """Of a rank's pieces of decoder and head where so many ranks share them, in the compute type;
    counted on meta. Raises UserError: they cannot."""
    numbers = 0
    for owner, place in places(model).items():
        for kind, value in owner.named_parameters(recurse=False):
            numbers += piece_of(value.to("meta"), *place, kind, Team(ranks)).numel()
    return numbers * model.setup.dtype.itemsize


# -------------------------------------------------------------------------------------------------
# A model of pieces
# -------------------------------------------------------------------------------------------------


@contextmanager
def cut(model: Model, parts: list) -> Iterator[None]:
    """Inside, the weights of ``parts``, which FSDP gathers one by one, are this rank's pieces, and
    their outputs are summed or joined over the team. A collective."""
    team, placed = model.setup.team, places(model)

    def make_whole(owner: nn.Module, _, out: Tensor) -> Tensor:
        if placed[owner][0] in SUMMED:
            return team.sum(out)
        # of a head, without ids that do not exist
        return team.join(out)[..., : getattr(owner, "out_features", None)]

    with ExitStack() as undo:
        for part in reversed(parts):  # inner ones first: what is a shard still is gathered with it
            part.reshard()  # a forward may have left it gathered
            shards = [
                (owner, kind, parameter)
                for owner in part.modules()
                for kind, parameter in owner.named_parameters(recurse=False)
                if isinstance(parameter, DTensor)
            ]
            part.unshard()
            pieces = [
                piece_of(getattr(owner, kind), *placed.get(owner, ("", 1)), kind, team)
                for owner, kind, _ in shards
            ]
            part.reshard()
            for (owner, kind, shard), piece in zip(shards, pieces):
                undo.callback(setattr, owner, kind, shard)
                setattr(owner, kind, nn.Parameter(piece, requires_grad=False))
        for owner, (name, _) in placed.items():
            if name in SUMMED | JOINED:
                undo.callback(owner.register_forward_hook(make_whole).remove)
            groups = getattr(owner, "num_key_value_groups", None)
            if groups:  # transformers' own attention repeats each key head so often
                undo.callback(setattr, owner, "num_key_value_groups", groups)
                inputs = owner.get_parameter("o_proj.weight").shape[1]
                owner.num_key_value_groups = min(groups, inputs // getattr(owner, "head_dim", 1))
        yield
