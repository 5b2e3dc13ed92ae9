"""Gradient checkpointing of some layers, some of whose results are kept: what `budget.choose` chose.

can_keep         what recomputed layers of a model may keep
recompute        let a decoder's layers keep what a setting says
explain_memory   an out-of-memory error of an update names the setting
"""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from common.model.vlm import Model, UpdateSetting, decoder, float32_parts, routers

PRODUCTS = ("aten::mm", "aten::addmm")


def can_keep(model: Model) -> tuple[bool, bool]:
    """Whether recomputed layers can keep the outputs of attention, and those of products. Nothing where
    FSDP gathers parts of a layer by themselves: its operators would have to be the same in both passes.
    No products where adapters add to them in place, or experts hide theirs."""
    attention = not float32_parts(model)
    return attention, attention and not (model.setup.adapter or routers(model))


def recompute(model: Model, setting: UpdateSetting) -> None:
    """Let updates of a model work as ``setting`` says. A trained tower stays as it is."""
    model.setup.updates = setting
    layers: Any = decoder(model).layers
    for number, layer in enumerate(layers):
        from_end = setting.recomputed - number
        contexts = noop_context_fn
        if setting.keep_attention:
            policy = functools.partial(keep_or_recompute, from_end <= setting.keep_products)
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        layer.gradient_checkpointing = from_end > 0
        layer._gradient_checkpointing_func = functools.partial(
            checkpoint, use_reentrant=False, context_fn=contexts
        )


def keep_or_recompute(
    with_products: bool, _, operator: Callable, *args, **named
) -> CheckpointPolicy:
    """What to do with an operator's result: keep that of attention, perhaps that of a product."""
    if is_attention(operator) or (with_products and operator.name() in PRODUCTS):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def is_attention(operator: Callable) -> bool:
    """Of any back-end: aten::_scaled_dot_product_flash_attention, torch_attn::_varlen_attn,
    flash_attn::_flash_attn_varlen_forward ..."""
    name = operator.name()
    return "attention" in name or "attn::_" in name


@contextmanager
def explain_memory(model: Model):
    """Inside, an out-of-memory error gets a note of what was chosen, and the flag that undoes it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if model.setup.updates:
            error.add_note(
                f"in an update with {model.setup.updates}, as --gradient_checkpointing auto chose: "
                "--gradient_checkpointing on recomputes all layers"
            )
        raise
