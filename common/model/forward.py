"""The model in two stages: image features, then the language model on embeddings; and a batch as
packs.

    patches -> vision tower -> image features          image_features, compute_features
    batch   -> packs, with features of all ranks       packs; back: join_packs
    pack    -> embeddings with the features in place -> language model    hidden_states

A model of ours is one of transformers with three attributes: ``family``, its class of `families`;
``compute``, how it computes here (`weights.Compute`); and ``trains_vision``, whether its own
forward computes image features.

Shapes: P prompt tokens, I images, M image tokens, L tokens of a pack, H hidden size, K levels
of image features.
"""

import inspect
import math
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Iterable, Iterator, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from common import distributed
from common.buffers import (
    Batch,
    Block,
    Pack,
    assign_blocks,
    build_pack,
    fill_packs,
    image_keys,
    make_blocks,
    of_sample,
    ragged_index,
)
from common.data.families import Qwen
from common.logging import progress
from common.model.attention import (
    ATTENTION_NAME,
    PackedAttention,
    SlotCache,
    VISION_ATTENTION_NAME,
)
from common.model.linear_attention import Decay, DeltaNet, THEIRS

LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention"}  # that we handle


# -------------------------------------------------------------------------------------------------
# Parts of a model
# -------------------------------------------------------------------------------------------------


def decoder(model: nn.Module) -> nn.Module:
    """The language model: a part of `model.model`, or all of it in a model of text only."""
    core = model.model
    return getattr(core, "language_model", None) or getattr(core, "text_model", None) or core


def vision_parts(model: nn.Module) -> dict[str, nn.Module | nn.Parameter]:
    """What stands next to the decoder in `model.model`: tower, projector, a learnt newline. Empty
    where left out."""
    core, language = model.model, decoder(model)
    if language is core:
        return {}
    parts = {**core._modules, **core._parameters}
    return {name: part for name, part in parts.items() if part is not None and part is not language}


def tower_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `vision_parts`."""
    parameters: list[nn.Parameter] = []
    for part in vision_parts(model).values():
        parameters += [part] if isinstance(part, nn.Parameter) else part.parameters()
    return parameters


def trained_parts(model: nn.Module) -> list[nn.Module]:
    """The decoder, and the vision tower if it is trained."""
    return [decoder(model), model.model.visual] if model.trains_vision else [decoder(model)]


def layers(model: nn.Module) -> list[nn.Module]:
    """The layers of `trained_parts`: what FSDP gathers one by one."""
    blocks = model.model.visual.blocks if model.trains_vision else []
    return [*decoder(model).layers, *blocks]


def float32_parts(model: nn.Module) -> list[nn.Module]:
    """The modules whose weights stay float32 in every compute type: FSDP gathers them on their
    own."""
    return [module for module in decoder(model).modules() if isinstance(module, Decay)]


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules that choose the experts of each MoE layer and return (router logits, ...); none
    in a dense model."""
    return [
        module
        for module in decoder(model).modules()
        if type(module).__name__.endswith("TopKRouter")
    ]


@contextmanager
def router_logits(model: nn.Module):
    """Inside, each forward of the decoder appends the router logits (L, E) of its MoE layers to the
    list it yields."""
    logits: list[Tensor] = []
    hooks = []
    for router in routers(model):
        hooks.append(router.register_forward_hook(lambda module, args, out: logits.append(out[0])))
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


# -------------------------------------------------------------------------------------------------
# How layers mix tokens
# -------------------------------------------------------------------------------------------------


def use_attention(model: nn.Module, backend: str) -> None:
    """Point language model and vision tower at our attention functions."""
    model.config.get_text_config()._attn_implementation = ATTENTION_NAME
    decoder(model).config._attn_implementation = ATTENTION_NAME
    if not isinstance(model.family, Qwen):
        return  # the other towers have no windows: SDPA, their default, is one call per block
    # Set on the config itself: set_attn_implementation tries to download a kernel called "*flash*".
    vision = "sdpa" if backend == "sdpa" else VISION_ATTENTION_NAME + backend
    model.config.vision_config._attn_implementation = vision
    if model.model.visual is not None:
        model.model.visual.config._attn_implementation = vision


def use_mixers(model: nn.Module) -> None:
    """Make sure that every layer mixes its tokens by `attention` or `linear_attention`, and number
    them by kind, as slots hold them.

    Raises:
        ValueError: a layer mixes tokens in another way. It would silently ignore our arguments,
            and each token would see the whole of a pack.
    """
    text = model.config.get_text_config()
    unknown = set(getattr(text, "layer_types", None) or []) - LAYER_TYPES
    if unknown:
        raise ValueError(
            f"the text model {text.model_type} has layers of type {', '.join(sorted(unknown))}, "
            "which are not supported"
        )
    counts = {True: 0, False: 0}  # layers with linear attention, and without
    for layer in decoder(model).layers:
        for name, part in layer.named_children():
            if type(part) in THEIRS:
                setattr(layer, name, DeltaNet(part))
        # transformers numbers whatever needs tokens of the past
        mixers = [part for part in layer.children() if hasattr(part, "layer_idx")]
        if len(mixers) != 1 or not is_ours(mixers[0]):
            names = [type(part).__name__ for part in mixers or layer.children()]
            raise ValueError(
                f"the text model {text.model_type} mixes tokens by {', '.join(names)}, which is "
                "not supported"
            )
        is_linear = isinstance(mixers[0], DeltaNet)
        mixers[0].slot_layer = counts[is_linear]
        counts[is_linear] += 1


def is_ours(mixer: nn.Module) -> bool:
    """Whether a layer's mixer of tokens is a `DeltaNet`, or hands all that it is given to the
    attention function that transformers finds by its name."""
    code = inspect.unwrap(type(mixer).forward).__code__
    takes_all = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    by_name = takes_all and "ALL_ATTENTION_FUNCTIONS" in code.co_names
    return by_name or isinstance(mixer, DeltaNet)


UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def check_decoder(language: nn.Module, text_config, longest: int) -> None:
    """Refuse attention and rotary positions that packs cannot have. Raises ValueError."""
    for name in UNSUPPORTED:
        if getattr(text_config, name, None):
            raise ValueError(f"the checkpoint's text model has {name}, which is not supported")
    rope = str(language.rotary_emb.rope_type)
    sinks = any(name.endswith(".sinks") for name, _ in language.named_parameters())
    if rope == "longrope" or sinks:
        raise ValueError(
            f"the checkpoint's text model {text_config.model_type} has rope_type longrope or "
            "attention sinks, which are not supported"
        )
    if rope != "dynamic":
        return
    # It changes with a batch's longest sequence, but only beyond this limit.
    limit = text_config.max_position_embeddings
    if longest > limit:
        raise ValueError(
            "the checkpoint's rope_type dynamic is supported up to its max_position_embeddings "
            f"{limit}; the flags allow sequences of {longest} tokens"
        )
    # which does not look at the positions: no CUDA graph could capture that
    language.rotary_emb.rope_type = "default"


# -------------------------------------------------------------------------------------------------
# Image features and positions
# -------------------------------------------------------------------------------------------------


def image_features(model: nn.Module, patches: Tensor, grids: Tensor) -> Tensor:
    """Run the vision tower on what `loader.load_pixels` made of images of any number of prompts ->
    (K, M, H).

    K is 1, plus one per DeepStack level where the family has them (Qwen3-VL). Without gradient but
    for a trained tower.
    """
    weight = tower_parameters(model)[0]
    patches, grids = patches.to(weight.device, weight.dtype), grids.to(weight.device)
    inputs = model.family.vision_inputs(patches, grids)
    with torch.set_grad_enabled(model.trains_vision and torch.is_grad_enabled()):
        out = model.model.get_image_features(**inputs, return_dict=True)
    levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    flat = []
    for level in levels:
        joined = level if torch.is_tensor(level) else torch.cat(list(level))
        flat.append(joined.flatten(0, -2))  # (M, H)
    return torch.stack(flat)


def compute_features(model: nn.Module, batch: Batch) -> None:
    """Fill the image features of this rank's prompts, once per prompt, several images per call of
    the vision tower. A model that trains its tower computes them in its own forward instead, and
    its rollout's serve that rollout alone.
    """
    waiting = sorted(batch.patches.keys() - batch.features.keys())
    # about patches, also where images come as tiles
    sizes = [batch.patches[index][0].numel() // 1024 for index in waiting]
    for part in fill_packs(waiting, sizes, model.compute.max_tokens_per_pack):
        pixels, grids = zip(*(batch.patches[index] for index in part))
        features = image_features(model, torch.cat(pixels), torch.cat(grids)).cpu()  # (K, M, H)
        counts = [batch.prompts[index].image_tokens for index in part]
        batch.features.update(zip(part, features.split(counts, dim=1)))
        if not model.trains_vision:
            for index in part:
                del batch.patches[index]


def prompt_positions(model: nn.Module, prompt) -> Tensor:
    """(3, P) rotary positions of a prompt by the model's own rule; its response continues at ``max
    + 1``."""
    ids = prompt.input_ids[None]
    if not prompt.grids or not hasattr(model.model, "get_rope_index"):
        return torch.arange(ids.shape[1]).expand(3, -1)
    clips = [grid for grid in prompt.grids if len(grid) > 3]
    images = [grid for grid in prompt.grids if len(grid) == 3]
    positions, _ = model.model.get_rope_index(
        ids,
        **model.family.token_types(ids),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor([clip[:3] for clip in clips]) if clips else None,
        second_per_grid_ts=torch.tensor([clip[3] for clip in clips]),
    )
    return positions[:, 0]


def positions_of(model: nn.Module, batch: Batch, index: int) -> Tensor:
    """(3, P) rotary positions of a prompt, cached in the batch."""
    if index not in batch.positions:
        batch.positions[index] = prompt_positions(model, batch.prompts[index])
    return batch.positions[index]


# -------------------------------------------------------------------------------------------------
# packs
# -------------------------------------------------------------------------------------------------


def packs(
    model: nn.Module,
    batch: Batch,
    indices: Iterable[int] | None = None,
    look: tuple[nn.Module, Batch] | None = None,
) -> Iterator[Pack]:
    """This rank's packs of the given prompts (all by default), on the device, one after
    the other.

    All ranks get equally many rows; surplus ones are empty and weigh nothing. A collective: when
    this is called, features move from the rank that decoded an image to those that hold its packs.

    Args:
        look: another model, and the same samples as it sees them: each pack has the pack of the
            same blocks there as its ``look``.
    """
    compute = model.compute
    hidden_size = model.config.get_text_config().hidden_size
    # of a masked score, in tokens
    score_cost = 1 / (6 * hidden_size) if compute.backend == "sdpa" else 0.0
    sized = batch if look is None else with_longer_prompts(batch, look[1])
    blocks = make_blocks(sized, compute.max_tokens_per_pack, indices, score_cost)
    assigned = assign_blocks(
        sized, blocks, dist.get_world_size(), compute.max_tokens_per_pack, hidden_size
    )
    features = pack_features(model, batch, assigned)
    mine = progress(assigned[dist.get_rank()], "packs")
    if look is None:
        return (make_pack(model, batch, blocks, features) for blocks in mine)
    others = pack_features(*look, assigned)
    return (
        replace(make_pack(model, batch, blocks, features), look=make_pack(*look, blocks, others))
        for blocks in mine
    )


def with_longer_prompts(batch: Batch, other: Batch) -> Batch:
    """The batch with the longer prompt of the two at each index, by which blocks are sized."""
    pairs = zip(batch.prompts, other.prompts)
    return replace(batch, prompts=[max(pair, key=lambda p: len(p.input_ids)) for pair in pairs])


def pack_features(
    model: nn.Module, batch: Batch, assigned: list[list[list[Block]]]
) -> dict[int, Tensor]:
    """What this rank's packs hold of images, by `image_keys`: a collective. ``assigned``: the blocks
    of each pack of each rank."""
    needed = [{key for blocks in part for key in image_keys(blocks)} for part in assigned]
    return exchange_features(local_images(model, batch), needed, model.compute.dtype)


def join_packs(done: list[tuple[Tensor, Tensor]], tokens: int) -> Tensor:
    """(N,) or (k, N), on every rank: ``done`` has the places (T,), and the values (T,) or (k, T),
    of this rank's rows."""
    leading = done[0][1].shape[:-1] if done else ()
    joined = torch.zeros(*leading, tokens)
    for flat, values in done:  # after the last pack: .cpu() waits, and then the device for the next
        joined[..., flat] = values.cpu().to(joined.dtype)
    dist.all_reduce(joined)
    return joined


def make_pack(
    model: nn.Module, batch: Batch, blocks: list[Block], features: dict[int, Tensor]
) -> Pack:
    """One pack, on the device."""
    positions = {index: positions_of(model, batch, index) for index, _ in blocks}
    pack = build_pack(batch, blocks, positions, features, model.family.visual_token_ids())
    if model.trains_vision:
        pack = with_grids(model, pack, pack_grids(batch, blocks))
    segments = model.family.attention_segments(pack.segments, pack.image_index)
    pack = pack.to(model.compute.device)
    pack.attention = PackedAttention(segments, model.compute.backend, model.compute.device)
    return pack


def local_images(model: nn.Module, batch: Batch) -> dict[int, Tensor]:
    """What packs hold of the images that this rank decoded, by `image_keys`: their features
    (K, M, H), or pixels (1, patches, patch size) for a model that trains its tower."""
    images = dict(batch.features)
    if model.trains_vision:
        images = {index: patches[None] for index, (patches, _) in batch.patches.items()}
    for i, conversation in enumerate(batch.conversations):
        if conversation.features is not None:
            images[of_sample(i)] = conversation.features
    return images


def pack_grids(batch: Batch, blocks: list[Block]) -> list[tuple]:
    """(t, h, w) of the images and clips of a pack, in its order."""
    grids: list[tuple] = []
    for index, members in blocks:
        grids += batch.prompts[index].grids
        for i in members:
            grids += batch.conversations[i].grids if batch.conversations else []
    return [grid[:3] for grid in grids]


def exchange_features(
    local: dict[int, Tensor], needed: list[set[int]], dtype: torch.dtype
) -> dict[int, Tensor]:
    """Fetch the image features that this rank needs and another rank computed.

    Args:
        local: those that this rank computed, CPU tensors of any shape, by `image_keys`.
        needed: the keys that each rank needs (the same list on all ranks); some have no images.

    Returns:
        the features of every key in ``needed[rank]`` that has images, as ``dtype``.
    """
    rank = dist.get_rank()
    features = {key: local[key].to(dtype) for key in needed[rank] & local.keys()}
    missing = [*needed]
    missing[rank] = needed[rank] - local.keys()
    shapes = distributed.gather_objects({key: value.shape for key, value in local.items()})
    outgoing, sent = [torch.empty(0, dtype=dtype)], []  # numbers to each rank
    for keys in missing:
        parts = [local[key].to(dtype).flatten() for key in sorted(keys & local.keys())]
        outgoing += parts
        sent.append(sum(map(len, parts)))
    arriving, received = [], []  # numbers from each rank
    for held in shapes:
        parts = [(key, held[key]) for key in sorted(missing[rank] & held.keys())]
        arriving += parts
        received.append(sum(shape.numel() for _, shape in parts))
    incoming = torch.empty(sum(received), dtype=dtype)
    dist.all_to_all_single(incoming, torch.cat(outgoing), received, sent)
    pieces = incoming.split([shape.numel() for _, shape in arriving])
    for (key, shape), piece in zip(arriving, pieces):
        features[key] = piece.view(shape)
    return features


def patch_size(model: nn.Module) -> int:
    """Numbers in a patch that the vision tower takes."""
    return math.prod(model.model.visual.patch_embed.proj.weight.shape[1:])


def with_grids(model: nn.Module, pack: Pack, grids: list[tuple]) -> Pack:
    """A pack with the grids of its images and clips; without any, with one of zeros that no token
    stands for."""
    if grids:
        return replace(pack, grids=torch.tensor(grids))
    side = model.config.vision_config.spatial_merge_size
    nothing = torch.zeros(1, side * side, patch_size(model))
    return replace(pack, grids=torch.tensor([[1, side, side]]), features=nothing)


class Prefill(NamedTuple):
    """Tokens that slots read after what they hold: a prompt, or an environment's reply."""

    slots: list[int]  # several may read one prompt
    cached: int  # tokens that the slot holds already
    input_ids: Tensor  # (n,)
    positions: Tensor  # (3, n)


def prefill_pack(
    model: nn.Module, cache: SlotCache, parts: list[Prefill], features: list[Tensor]
) -> Pack:
    """The parts in one pack, each after the keys and values of its slot, with the ``features`` (K,
    M, H) of their images. ``predict`` (b,) is, for every slot in order, the end of its part."""
    compute, device = model.compute, model.compute.device
    counts = torch.tensor([len(part.input_ids) for part in parts])
    cached = torch.tensor([part.cached for part in parts])
    ends = counts.cumsum(0)
    cache_ends = ends[-1] + cached.cumsum(0)  # keys and values of the slots follow the pack
    bounds = torch.stack([ends - counts, ends, cache_ends - cached, cache_ends], dim=1)
    slots = torch.tensor([slot for part in parts for slot in part.slots])  # (b,)
    copies = torch.tensor([len(part.slots) for part in parts])
    counts, cached, ends = (x.repeat_interleave(copies) for x in (counts, cached, ends))  # (b,)
    plan = (
        ragged_index(ends - counts, counts),
        slots.repeat_interleave(counts),
        ragged_index(cached, counts),
    )
    earlier = slots.repeat_interleave(cached), ragged_index(torch.zeros_like(cached), cached)
    plan, earlier = (tuple(x.to(device) for x in places) for places in (plan, earlier))
    ids = torch.cat([part.input_ids for part in parts])  # (L,)
    positions = torch.cat([part.positions for part in parts], dim=1)  # (3, L)
    image_index = torch.isin(ids, model.family.visual_token_ids()).nonzero()[:, 0]  # (M,)
    segments = model.family.attention_segments(bounds.tolist(), image_index)
    attention = PackedAttention(
        segments, compute.backend, device, cache, plan, earlier if cached.any() else ()
    )
    return Pack(
        input_ids=ids[None].to(device),
        positions=positions[:, None].to(device),
        image_index=image_index.to(device),
        features=torch.cat(features, dim=1).to(device) if features else None,
        attention=attention,
        predict=ends.to(device) - 1,
    )


def hidden_states(model: nn.Module, pack: Pack) -> Tensor:
    """Last hidden states of a pack, (L, H).

    A pack with ``grids`` holds pixels, whose features are computed here, inside FSDP's forward.
    Families without rotary positions in three dimensions have three equal rows of them. The fourth
    row of the others, which transformers reads to detect packing, is zero: our attention goes by
    segments and no mask is built.
    """
    language = decoder(model)
    embeds = language.get_input_embeddings()(pack.input_ids)  # (1, L, H)
    features = pack.features
    if pack.grids is not None:
        features = image_features(model, features[0], pack.grids)
        # a stand-in: every rank takes part in the collectives of the tower
        if not len(pack.image_index):
            embeds, features = embeds + 0.0 * features.sum(), None
    deepstack: dict[str, Any] = {}
    if features is not None:
        features = features.to(embeds.dtype)
        embeds = embeds.index_copy(1, pack.image_index, features[:1])
        if len(features) > 1:
            # places, not a mask: see `layers.add_images`
            deepstack = {
                "visual_pos_masks": pack.image_index,
                "deepstack_visual_embeds": list(features[1:]),
            }
    positions = pack.positions[0]  # (1, L)
    if hasattr(model.model, "get_rope_index"):
        positions = torch.cat([torch.zeros_like(pack.positions[:1]), pack.positions])  # (4, 1, L)
    out = language(
        inputs_embeds=embeds,
        position_ids=positions,
        use_cache=False,
        attention=pack.attention,
        **deepstack,
    )
    return out.last_hidden_state[0]
