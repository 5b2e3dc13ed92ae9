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
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.distributed import Team
from common.model.attention import layer_configs
from common.model.vlm import Model, decoder
from common.process import UserError

# The dimension of a module's parameters that is cut, by the last words of their names. Whatever else a
# decoder has is whole on every rank: norms, routers, linear attention.
OUTPUTS = {"weight": 0, "bias": 0, "lora_B": 0}
INPUTS = {"weight": 1, "lora_A": 1}
CUTS = {
    "q_proj": OUTPUTS,
    "k_proj": OUTPUTS,
    "v_proj": OUTPUTS,
    "o_proj": INPUTS,
    "gate_proj": OUTPUTS,
    "up_proj": OUTPUTS,
    "gate_up_proj": OUTPUTS,
    "down_proj": INPUTS,
    "experts": {"gate_up_proj": 1, "down_proj": 2},  # (E, 2 I, H), (E, H, I)
    "embed_tokens": {"weight": 1},
    "embed_tokens_per_layer": {"weight": 1},
    "lm_head": {"weight": 0},
}
QUERIES, KEYS = "num_attention_heads", "num_key_value_heads"
HEADS = {"q_proj": QUERIES, "k_proj": KEYS, "v_proj": KEYS, "o_proj": QUERIES}  # never within one
SUMMED = ("o_proj", "down_proj", "experts")  # whose outputs are terms of a sum
JOINED = ("embed_tokens", "embed_tokens_per_layer", "lm_head")  # whose outputs stand side by side
# What a module may have of these: all that makes one computation. Keys may be values, or another
# layer's.
TOGETHER = (
    set(),
    {"q_proj", "k_proj", "v_proj", "o_proj"},
    {"q_proj", "k_proj", "o_proj"},
    {"q_proj", "o_proj"},
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
    {"experts"},
)


# -------------------------------------------------------------------------------------------------
# Pieces
# -------------------------------------------------------------------------------------------------


def names_and_configs(model: Model) -> dict[nn.Module, tuple[str, Any]]:
    """Of each module of decoder and head the last word of its name, and the config of its layer: heads
    may differ between layers."""
    body, config, named = decoder(model), None, {}
    configs = dict(zip(body.layers, layer_configs(model.config.get_text_config())))
    for name, part in (
        *body.named_modules(),
        ("lm_head", model.lm_head),
    ):  # layers, then their parts
        config = configs.get(part, config)
        named[part] = name.rpartition(".")[2], config
    return named


def piece_of(value: Tensor, module: str, config: Any, kind: str, team: Team) -> Tensor:
    """A copy of this rank's piece of a parameter, by the name of its module, the config of its layer
    and its own name. Raises UserError: it cannot be shared equally."""
    dim, size = CUTS.get(module, {}).get(kind), team.size
    if dim is None:
        # what is added to a sum is added once
        is_added_again = module in SUMMED and kind == "bias" and team.rank > 0
        return torch.zeros_like(value) if is_added_again else value.clone()
    if module == "lm_head":  # with rows for ids that do not exist, and are banned
        value = F.pad(value, (0, 0, 0, -len(value) % size))
    # all gates, then what they open: of each a piece
    value = value.unflatten(dim, (2 if "gate_up_proj" in (module, kind) else 1, -1))
    heads = HEADS.get(module)
    units = getattr(config, heads) if heads else value.shape[dim + 1]
    least = size * 8 if module == "experts" else size  # whose kernel reads 16 bytes at a time
    if units % least and (heads != KEYS or size % units):  # a key head may be on several ranks
        raise UserError(
            f"--rollout_shards {size}: {least} must divide the {units} {'heads' if heads else 'numbers'} "
            f"of {module}"
        )
    count = min(units, size)
    piece = value.chunk(count, dim + 1)[team.rank * count // size]
    return piece.flatten(dim, dim + 1).clone()


def piece_bytes(model: Model) -> int:
    """Of this rank's pieces of decoder and head, in the compute type; counted on meta. Raises
    UserError: the model cannot be shared by so many ranks."""
    numbers = 0
    check_cuts(model)
    for owner, name_and_config in names_and_configs(model).items():
        for kind, value in owner.named_parameters(recurse=False):
            piece = piece_of(value.detach().to("meta"), *name_and_config, kind, model.setup.team)
            numbers += piece.numel()
    return numbers * model.setup.dtype.itemsize


def check_cuts(model: Model) -> None:
    """Raises UserError: a layer has only part of what is cut together, the rest by other names."""
    for name, part in decoder(model).layers.named_modules():
        parts = part._modules.keys() & CUTS.keys()
        if parts not in TOGETHER:
            raise UserError(
                f"--rollout_shards {model.setup.team.size}: layer {name} has {', '.join(sorted(parts))} "
                "alone, so ranks cannot share it"
            )


# -------------------------------------------------------------------------------------------------
# A model of pieces
# -------------------------------------------------------------------------------------------------


@contextmanager
def cut(model: Model, parts: list) -> Iterator[None]:
    """Inside, the weights of ``parts``, which FSDP gathers one by one, are this rank's pieces, and
    their outputs are summed or joined over the team. A collective."""
    team, named = model.setup.team, names_and_configs(model)
    for part in parts:
        part.reshard()  # a forward may have left it gathered
    owners = {owner for part in parts for owner in part.modules()}
    shards = {(owner, kind): p for owner in owners for kind, p in owner._parameters.items()}
    pieces = {}
    for part in parts:
        part.unshard()
        for (owner, kind), shard in shards.items():
            value = owner._parameters[kind]
            if value is not shard:  # gathered with this part; a tied one has several owners
                piece = piece_of(value.detach(), *named.get(owner, ("", None)), kind, team)
                pieces[owner, kind] = nn.Parameter(piece, requires_grad=False)
        part.reshard()

    def make_whole(owner: nn.Module, _, out: Tensor) -> Tensor:
        if named[owner][0] in SUMMED:
            return team.sum(out)
        # of a head, without ids that do not exist
        return team.join(out)[..., : getattr(owner, "out_features", None)]

    with ExitStack() as undo:
        undo.callback(set_parameters, shards)
        set_parameters(pieces)
        for owner, (name, config) in named.items():
            if name in (*SUMMED, *JOINED):
                undo.callback(owner.register_forward_hook(make_whole).remove)
            groups = getattr(owner, "num_key_value_groups", None)
            if groups:  # transformers' own attention repeats each key head so often
                undo.callback(setattr, owner, "num_key_value_groups", groups)
                owner.num_key_value_groups = min(groups, config.num_attention_heads // team.size)
        yield


def set_parameters(parameters: dict) -> None:
    """By module and name."""
    for (owner, kind), parameter in parameters.items():
        owner._parameters[kind] = parameter
