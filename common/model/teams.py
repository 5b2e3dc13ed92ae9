"""Rollouts of models that no GPU can hold: the ranks of a team decode the same samples, each with its
piece of every layer (tensor parallelism, Shoeybi et al. 2019).

A piece of a layer is a narrower layer, with some of the heads and some of the inner numbers of the
MLP. transformers' own modules compute it; two sums per layer over the team make its outputs whole.
FSDP gathers one layer after the other, as for training, and each rank keeps its piece of each
(`cut`): a team may have any size that divides the heads, however the weights are sharded in training.

Shapes: E experts, I their inner numbers, H hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.distributed import Team
from common.model.attention import layer_configs
from common.model.vlm import Model, decoder
from common.process import UserError

# By the names of a module and of its parameter: the dimension that is cut, and the heads that it
# consists of. Whatever else a decoder has is whole on every rank: norms, routers, linear attention.
OUTPUTS = {"weight": 0, "bias": 0, "lora_B": 0}
INPUTS = {"weight": 1, "lora_A": 1}
QUERIES, KEYS = "num_attention_heads", "num_key_value_heads"
CUTS = {
    "q_proj": (OUTPUTS, QUERIES),
    "k_proj": (OUTPUTS, KEYS),
    "v_proj": (OUTPUTS, KEYS),
    "o_proj": (INPUTS, QUERIES),
    "gate_proj": (OUTPUTS, ""),
    "up_proj": (OUTPUTS, ""),
    "down_proj": (INPUTS, ""),
    "experts": ({"gate_up_proj": 2, "down_proj": 2}, ""),  # (E, 2, I, H), (E, H, I)
    "embed_tokens": ({"weight": 1}, ""),
    "embed_tokens_per_layer": ({"weight": 1}, ""),
    "lm_head": ({"weight": 0}, ""),
}
SUMMED = ("o_proj", "down_proj", "experts")  # whose outputs are terms of a sum
JOINED = ("embed_tokens", "embed_tokens_per_layer", "lm_head")  # whose outputs stand side by side
# layers that are cut together: a module that has one of them has all
TOGETHER = ({"q_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"})


# -------------------------------------------------------------------------------------------------
# Pieces
# -------------------------------------------------------------------------------------------------


def names_of(model: Model) -> dict[nn.Module, str]:
    """The modules of decoder and head, by the last word of their names."""
    modules = [*decoder(model).named_modules(), ("lm_head", model.lm_head)]
    return {part: name.rpartition(".")[2] for name, part in modules}


def configs_of(model: Model) -> dict[nn.Module, Any]:
    """The config of each layer, by its modules: heads may differ between layers."""
    pairs = zip(layer_configs(model.config.get_text_config()), decoder(model).layers)
    return {part: config for config, layer in pairs for part in layer.modules()}


def piece_of(value: Tensor, module: str, kind: str, config: Any, team: Team) -> Tensor:
    """A copy of this rank's piece of a parameter, by the names of its module and its own, and the
    config of its layer. Raises UserError: it cannot be shared equally."""
    dims, heads = CUTS.get(module, ({}, ""))
    if kind not in dims:
        # what is added to a sum is added once
        once = module in SUMMED and kind == "bias" and team.rank > 0
        return value.new_zeros(value.shape) if once else value.clone()
    if module == "lm_head":  # with rows for ids that do not exist, and are banned
        value = F.pad(value, (0, 0, 0, -len(value) % team.size))
    if kind == "gate_up_proj":  # all gates of an expert, then what they open
        value = value.unflatten(1, (2, -1))
    length, size = value.shape[dims[kind]], team.size
    units = getattr(config, heads) if heads else length
    least = size * 8 if module == "experts" else size  # whose kernel reads 16 bytes at a time
    if units % least and (heads != KEYS or size % units):  # a key head may be on several ranks
        raise UserError(
            f"--rollout_shards {size}: {least} must divide the {units} {'heads' if heads else 'numbers'} "
            f"of {module}"
        )
    first, last = team.rank * units // size, -(-(team.rank + 1) * units // size)
    width = length // units
    piece = value.narrow(dims[kind], first * width, (last - first) * width)
    return piece.flatten(1, 2).clone() if kind == "gate_up_proj" else piece.contiguous().clone()


def piece_bytes(model: Model) -> int:
    """Of this rank's pieces of decoder and head, in the compute type; counted on meta. Raises
    UserError: the model cannot be shared by so many ranks."""
    configs, team, numbers = configs_of(model), model.setup.team, 0
    check_cuts(model)
    for owner, name in names_of(model).items():
        for kind, value in owner.named_parameters(recurse=False):
            piece = piece_of(value.detach().to("meta"), name, kind, configs.get(owner), team)
            numbers += piece.numel()
    return numbers * model.setup.dtype.itemsize


def check_cuts(model: Model) -> None:
    """Raises UserError: a layer joins or shares what is cut here, so that its pieces would not fit
    together."""
    for name, part in decoder(model).layers.named_modules():
        parts = part._modules.keys()
        for group in TOGETHER:
            if parts & group and not group <= parts:
                raise UserError(
                    f"--rollout_shards {model.setup.team.size}: layer {name} has no "
                    f"{', '.join(sorted(group - parts))}, so it cannot be shared by several ranks"
                )


# -------------------------------------------------------------------------------------------------
# A model of pieces
# -------------------------------------------------------------------------------------------------


@contextmanager
def cut(model: Model, parts: list) -> Iterator[None]:
    """Inside, the weights of ``parts``, which FSDP gathers one by one, are this rank's pieces, and
    their outputs are summed or joined over the team. A collective."""
    team, configs, names = model.setup.team, configs_of(model), names_of(model)
    shards, pieces = {}, {}  # by module and name
    for part in parts:
        part.reshard()  # a forward may have left it gathered
        sharded = {
            (owner, kind): shard
            for owner in part.modules()
            for kind, shard in owner._parameters.items()
        }
        part.unshard()
        for (owner, kind), shard in sharded.items():
            value = owner._parameters[kind]
            if value is not shard:  # FSDP gathers it with this part; tied ones have several places
                shards[owner, kind] = shard
                name, config = names.get(owner, ""), configs.get(owner)
                piece = piece_of(value.detach(), name, kind, config, team)
                pieces[owner, kind] = nn.Parameter(piece, requires_grad=False)
        part.reshard()
    set_parameters(pieces)
    hooks, groups = [], {}  # of heads, by module

    def make_whole(owner: nn.Module, _, out: Tensor) -> Tensor:
        if names[owner] in SUMMED:
            return team.sum(out)
        # of a head, without ids that do not exist
        return team.join(out)[..., : getattr(owner, "out_features", None)]

    for owner, name in names.items():
        if name in (*SUMMED, *JOINED):
            hooks.append(owner.register_forward_hook(make_whole))
        # transformers' own attention repeats each key head so often
        config: Any = configs.get(owner)
        if hasattr(owner, "num_key_value_groups") and config.num_key_value_heads < team.size:
            groups[owner] = owner.num_key_value_groups
            owner.num_key_value_groups = config.num_attention_heads // team.size
    try:
        yield
    finally:
        set_parameters(shards)
        for hook in hooks:
            hook.remove()
        for owner, number in groups.items():
            owner.num_key_value_groups = number


def set_parameters(parameters: dict[tuple[nn.Module, str], nn.Parameter]) -> None:
    for (owner, kind), parameter in parameters.items():
        owner._parameters[kind] = parameter
