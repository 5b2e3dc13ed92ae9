"""A tensor that may be sharded over the ranks: all of it, this rank's part, and what is copied into it."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded: a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_shard(target: Tensor, value: Tensor) -> None:
    """Copy a tensor into another, or this rank's part of it into a DTensor sharded on dimension 0."""
    local = shard_of(target)
    if not local.numel():  # the last ranks may have no part
        return
    if isinstance(target, DTensor):
        (chunk,) = target.__create_chunk_list__()
        start = chunk.offsets[0]
        value = value[start : start + len(local)]
    local.copy_(value)
