"""Mixtures choose the same experts in training as while sampling ("routing replay").

    hook_routers the routers of a model do from now on what the attention of a pass says
    Recorder     a rollout keeps the choices of its tokens, beside their keys and values
    Replay       updates choose these again; the weights of the experts come from the live scores, so that
                 the router still learns

In bfloat16 a decoding step and a pack round differently, and near a tie other experts would win: the
model that is trained would not be the one that sampled.

Shapes: L tokens of a pass, K experts of a token, E experts of a layer.
"""

import functools
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from common.buffers import Pack
from common.model.vlm import Model, decoder, experts_per_token

NOT_RECORDED = -1  # the token's choice was not recorded: the router chooses


def choosers(model: Model) -> list[tuple[nn.Module, Any]]:
    """Each layer with experts, and the module in it that returns scores (L, E), weights (L, K) and ids
    (L, K) of the experts of each token."""
    pairs = []
    for layer in decoder(model).layers:
        for part in layer.modules():
            is_gemmas = hasattr(part, "per_expert_scale") and hasattr(part, "proj")
            if is_gemmas or type(part).__name__.lower().endswith("topkrouter"):
                pairs.append((layer, part))
    return pairs


def hook_routers(model: Model) -> None:
    """Let the routers of a model do what `Recorder` or `Replay` of a pass's attention says. Each layer passes
    it to what mixes its tokens, also when a backward pass computes the layer again; hooks of the layer
    itself would not run then."""
    model.setup.routers_hooked = True
    for number, (layer, chooser) in enumerate(choosers(model)):
        for name, part in layer.named_children():
            if name.endswith("attn"):
                part.register_forward_pre_hook(functools.partial(tell, chooser), with_kwargs=True)
        chooser.told = None
        chooser.register_forward_hook(functools.partial(choose_again, number))


def tell(chooser: Any, _, args: tuple, named: dict[str, Any]) -> None:
    """Before the tokens of a layer are mixed: what the attention of the pass says."""
    chooser.told = getattr(named.get("attention"), "experts", None)


def choose_again(
    number: int, chooser: Any, _, out: tuple[Tensor, ...]
) -> tuple[Tensor, ...] | None:
    """After a router: the experts that it was told, with their weights."""
    told, chooser.told = chooser.told, None
    scores, _, live = out
    ids = told(number, live) if told else live
    return None if ids is live else (scores, weights_of(chooser, scores, ids), ids)


def weights_of(chooser: Any, scores: Tensor, ids: Tensor) -> Tensor:
    """(L, K) the weights of the experts ``ids``, as each class of transformers computes them."""
    if hasattr(chooser, "e_score_correction_bias"):  # GLM
        weights = scores.sigmoid().gather(1, ids)
        if chooser.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * chooser.routed_scaling_factor
    if hasattr(chooser, "per_expert_scale"):  # Gemma 4, whose scores are probabilities
        weights = scores.gather(1, ids)
        return weights / weights.sum(dim=-1, keepdim=True) * chooser.per_expert_scale[ids]
    weights = scores.softmax(dim=-1, dtype=torch.float).gather(1, ids)
    if getattr(chooser, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(scores.dtype)


class Recorder:
    """Writes what each layer chooses into cells of a buffer (layers, slots, capacity, K), by device
    tensors alone, as a CUDA graph needs it.

    Args:
        slots, cells: where the tokens ``rows`` of the pass go; None: all tokens, in their order.
    """

    def __init__(self, buffer: Tensor, slots: Tensor, cells: Tensor, rows: Tensor | None = None):
        self.buffer, self.slots, self.cells, self.rows = buffer, slots, cells, rows

    def __call__(self, layer: int, live: Tensor) -> Tensor:
        chosen = live if self.rows is None else live[self.rows]
        self.buffer[layer][self.slots, self.cells] = chosen.to(self.buffer.dtype)
        return live


class Replay:
    """Chooses the recorded ids (L, layers, K) again."""

    def __init__(self, ids: Tensor):
        self.ids = ids

    def __call__(self, layer: int, live: Tensor) -> Tensor:
        recorded = self.ids[:, layer].to(live.dtype)
        return torch.where(recorded == NOT_RECORDED, live, recorded)


def buffer_of(model: Model, slots: int, capacity: int, device: torch.device) -> Tensor:
    """(layers, slots, capacity, K) for the ids of a rollout."""
    shape = len(choosers(model)), slots, capacity, experts_per_token(model)
    return torch.zeros(shape, dtype=torch.int16, device=device)


@contextmanager
def own_choice(pack: Pack):
    """Inside, a forward of the pack chooses its own experts: of a reference that is the actor itself."""
    attention: Any = pack.attention
    told, attention.experts = attention.experts, None
    try:
        yield
    finally:
        attention.experts = told


@contextmanager
def choices(model: Model):
    """Yields a list, to which each forward of the decoder appends the ids (L, K) that its layers use."""
    ids: list[Tensor] = []

    def keep(_, __, out: tuple[Tensor, ...]) -> None:
        ids.append(out[2])

    with ExitStack() as undo:
        for _, chooser in choosers(model):
            undo.callback(chooser.register_forward_hook(keep).remove)
        yield ids
