"""The load-balancing loss of mixture-of-experts models (--aux_loss_coef). A pack's share of it
depends on all packs of a minibatch, so the experts that are chosen are counted first."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from common import losses
from common.buffers import Batch, Pack
from common.model import fsdp, packs, vlm


@torch.no_grad()
def count_experts(
    module: vlm.Wrapper, batch: Batch, indices: Iterable[int] | None = None
) -> Tensor:
    """(E,) how often each expert is chosen in the minibatch of the prompts ``indices`` (None: all),
    over all ranks."""
    model = module.model
    text = model.config.get_text_config()
    load = torch.zeros(text.num_experts, device=model.setup.device)
    for pack in packs.of_batch(model, batch, indices):
        with vlm.router_logits(model) as routed:
            module(pack)
        load += losses.expert_load(
            routed, pack.copies.to(load.device), vlm.experts_per_token(model)
        )
    fsdp.forget_forwards(module)
    dist.all_reduce(load)
    return load


def pack_balance_loss(
    model: vlm.Model, pack: Pack, routed: list[Tensor], load: Tensor | None
) -> Tensor:
    """This pack's share of the load-balancing loss of a minibatch, from the router logits of its
    forward; 0 where the experts were not counted."""
    if load is None:
        return torch.zeros(())
    top_k = vlm.experts_per_token(model)
    return losses.balance_loss(routed, pack.copies.to(load.device), load, top_k)
