"""How a batch becomes packs on the device.

    with_examples     prompts, and behind them the responses to imitate
    of_batch          this rank's packs of some prompts, with image features from all ranks
    join_packs        what was computed for each token of each pack, back on every rank
    run_forward       a forward pass over a batch, for every token
    prefill_pack      prompts or replies as one pack that fills the KV cache

Shapes: I images, K levels of image features, M image tokens, L tokens of a pack, T of them response
tokens, N response tokens of all samples, H hidden size.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed
from common.buffers import (
    Batch,
    Block,
    Conversation,
    Features,
    ImageKey,
    Pack,
    assign_blocks,
    build_pack,
    image_keys,
    make_blocks,
    ragged_index,
)
from common.data.conversations import stream_of
from common.data.rows import Example, Stream
from common.logging import progress
from common.model import vlm
from common.model.attention import PackedAttention, SlotCache
from common.model.experts import NOT_RECORDED, Recorder, Replay
from common.model.fsdp import reshard_root
from common.model.vlm import Model, Wrapper, positions_of


def with_examples(model: Model, prompts: Batch, examples: list[list[Example]]) -> Batch:
    """The prompts with their ``examples`` as samples. Answers of a conversation are the policy's own tokens,
    and what others say between them is a reply."""
    samples = [
        (g, each) for g, part in enumerate(examples) for each in part if g not in prompts.dropped
    ]
    batch = prompts.with_responses((g, each.target) for g, each in samples)
    if not any(each.stream for _, each in samples):
        return batch
    streams, positions = [], []
    for index, each in samples:
        stream = stream_of(each)
        streams.append(stream)
        before = vlm.prompt_positions(model, stream.last.prompt)  # (3, P), all but the last answer
        after = before.max() + 1 + torch.arange(len(stream.last.target)).expand(3, -1)
        of_all = torch.cat([before, after], dim=1)
        size = len(each.prompt.input_ids)
        batch.positions[index] = of_all[:, :size]
        positions.append((of_all[:, size:] - of_all[:, :size].max() - 1).T)  # (R, 3)
        batch.conversations.append(conversation_of(stream))
    batch.stream_lengths = torch.tensor([len(stream.input_ids) for stream in streams])
    batch.stream = torch.cat([stream.input_ids for stream in streams])
    batch.is_own = torch.cat([stream.is_own for stream in streams])
    batch.stream_positions = torch.cat(positions)
    return batch


def conversation_of(stream: Stream) -> Conversation:
    """The turns of a stream, for records of it."""
    begins = stream.is_own.diff(prepend=stream.is_own[:1]) & stream.is_own  # (R,) of a later answer
    return Conversation(
        replies=[[part for m in chat for part in m["content"]] for chat in stream.messages],
        tokens_before=(stream.is_own.cumsum(0) - 1)[begins].tolist(),
    )


def of_batch(
    model: Model,
    batch: Batch,
    indices: Iterable[int] | None = None,
    teacher: tuple[Model, Batch] | None = None,
    replay: bool = False,
) -> Iterator[Pack]:
    """This rank's packs of the given prompts (all by default), on the device, one after the other.

    All ranks get the same number of packs; surplus ones are empty and weigh nothing. A collective:
    calling it sends features from the rank that decoded an image to the ranks whose packs need them.

    Args:
        teacher: another model, and the same samples as that model sees them. The ``teacher`` of
            each pack is then the pack of the same blocks for the other model.
        replay: whether ``model`` chooses the experts that were recorded when it sampled.
    """
    setup = model.setup
    hidden_size = model.config.get_text_config().hidden_size
    # of a masked score, in units of tokens
    score_cost = 1 / (6 * hidden_size) if setup.backend == "sdpa" else 0.0
    sized = batch if teacher is None else with_longer_prompts(batch, teacher[1])
    most = setup.max_tokens_per_pack
    if setup.updates and torch.is_grad_enabled():  # a backward needs room for activations
        most = setup.updates.tokens
    blocks = make_blocks(sized, most, indices, score_cost)
    assigned = assign_blocks(sized, blocks, dist.get_world_size(), most, hidden_size)
    needed = [{key for blocks in part for key in image_keys(blocks)} for part in assigned]
    mine = assigned[dist.get_rank()]

    packs = packs_of_blocks(model, batch, progress(mine, "packs"), needed)
    if replay:
        ids = exchange_experts(model, batch, needed)
        packs = replay_experts(packs, batch, mine, ids)
    if teacher is not None:
        pairs = zip(packs, packs_of_blocks(*teacher, mine, needed))
        packs = (replace(pack, teacher=other) for pack, other in pairs)
    return packs


def packs_of_blocks(
    model: Model, batch: Batch, mine: Iterable[list[Block]], needed: list[set[ImageKey]]
) -> Iterator[Pack]:
    """The packs of this rank's blocks, one after the other, for which every rank sends the images that
    others ``needed``, at once."""
    dtype, spare = model.setup.dtype, set()
    if model.setup.trains_vision:
        # Pixels stay float32: some towers scale them before they cast them.
        dtype, spare = torch.float32, spare_image(batch)
    images = local_images(model, batch)
    features = exchange_features(images, [keys | spare for keys in needed], dtype)
    return (make_pack(model, batch, blocks, features, spare) for blocks in mine)


def with_longer_prompts(batch: Batch, other: Batch) -> Batch:
    """The batch with the longer of both prompts of each sample, for sizes alone."""
    pairs = zip(batch.prompts, other.prompts)
    longer = [max(pair, key=lambda prompt: len(prompt.input_ids)) for pair in pairs]
    return replace(batch, prompts=longer)


def join_packs(done: list[tuple[Tensor, Tensor]], tokens: int) -> Tensor:
    """The values of all ranks' packs as flat tensors (N,) or (k, N), on every rank. ``done`` has, for
    each pack of this rank, the index (T,) and the values (T,) or (k, T)."""
    leading = done[0][1].shape[:-1] if done else ()
    # whatever torch's default type is: a user's program may be loading a model in another thread
    joined = torch.zeros(*leading, tokens, dtype=torch.float32)
    for flat, values in done:  # only after the last pack: .cpu() would keep the device waiting
        joined[..., flat] = values.cpu().to(joined.dtype)
    dist.all_reduce(joined)
    return joined


def make_pack(
    model: Model,
    batch: Batch,
    blocks: list[Block],
    features: Features,
    spare: set[ImageKey],
) -> Pack:
    """One pack, on the device. If the model trains its tower, ``spare`` is its `spare_image`."""
    setup = model.setup
    positions = {index: positions_of(model, batch, index) for index, _ in blocks}
    pack = build_pack(batch, blocks, positions, features, setup.family.visual_token_ids())
    if setup.trains_vision:
        grids = image_grids(batch, image_keys(blocks))
        if not grids and spare:
            (key,) = spare
            grids, pack.features = image_grids(batch, spare), features[key]
        pack.grids = torch.tensor(grids) if grids else None
    segments = setup.family.attention_segments(pack.segments, pack.image_index)
    pack = pack.to(setup.device)
    pack.attention = PackedAttention(segments, setup.backend, setup.device)
    return pack


def local_images(model: Model, batch: Batch) -> Features:
    """What packs need of the images that this rank decoded: features (K, M, H), or pixels (1,
    patches, patch size) if the model trains its tower."""
    of_prompts = batch.features
    if model.setup.trains_vision:
        of_prompts = {index: patches[None] for index, patches in batch.patches.items()}
    images: Features = {("prompt", index): image for index, image in of_prompts.items()}
    for i, conversation in enumerate(batch.conversations):
        if conversation.features is not None:
            images["reply", i] = conversation.features
    return images


def image_grids(batch: Batch, keys: Iterable[ImageKey]) -> list[tuple]:
    """The grids of images, those of clips (t, h, w), in the order of the keys."""
    grids = []
    for kind, i in keys:
        if kind == "prompt":
            grids += batch.prompts[i].grids
        elif batch.conversations:
            grids += batch.conversations[i].grids
    return [grid[:3] for grid in grids]


def exchange_experts(model: Model, batch: Batch, needed: list[set[ImageKey]]) -> Features:
    """The ids of experts that prompts and samples chose, from the ranks that drew them to the ranks whose
    packs hold them: (n, layers, K) by the keys of their images. Empty if none are kept."""
    if not (model.setup.routers_hooked and batch.experts):  # the same on all ranks
        return {}
    local: Features = {("prompt", index): ids for index, ids in batch.prompt_experts.items()}
    local |= {("reply", i): ids for i, ids in enumerate(batch.experts) if len(ids)}
    # as bytes: not every back-end of torch.distributed sends 16 bits
    as_bytes = {key: ids.contiguous().view(torch.uint8) for key, ids in local.items()}
    exchanged = exchange_features(as_bytes, needed, torch.uint8)
    return {key: ids.view(torch.int16) for key, ids in exchanged.items()}


def replay_experts(
    packs: Iterator[Pack], batch: Batch, blocks: list[list[Block]], ids: Features
) -> Iterator[Pack]:
    """The packs of these blocks, whose tokens are to choose the experts ``ids`` again, if there are any."""
    for pack, part in zip(packs, blocks):
        if ids and part:
            recorded = distributed.to_device(
                recorded_experts(batch, part, ids), pack.targets.device
            )
            cast(PackedAttention, pack.attention).experts = Replay(recorded)
        yield pack


def recorded_experts(batch: Batch, blocks: list[Block], ids: Features) -> Tensor:
    """(L, layers, K) the experts of a pack's tokens, each prompt and then its samples, as `build_pack`
    lays them out."""
    *_, known = ids.values()
    unknown = known.new_full((1, *known.shape[1:]), NOT_RECORDED)
    rows = []
    for index, members in blocks:
        sizes: dict[ImageKey, int] = {("prompt", index): batch.prompt_lengths[index]}
        sizes |= {("reply", i): int(batch.pack_lengths[i]) for i in members}
        for key, size in sizes.items():
            rows.append(ids[key] if key in ids else unknown.expand(size, -1, -1))
    return torch.cat(rows)


def spare_image(batch: Batch) -> set[ImageKey]:
    """The key of the first image of a batch; none if the batch has no images. A pack without images puts
    this one through the trained tower, for no token, as every rank has to join the tower's collectives."""
    for key in image_keys([(index, [i]) for i, index in enumerate(batch.prompt_index.tolist())]):
        if image_grids(batch, [key]):
            return {key}
    return set()


FeatureKey = TypeVar("FeatureKey", int, ImageKey)  # of features: a prompt, or any images


def exchange_features(
    local: dict[FeatureKey, Tensor], needed: list[set[FeatureKey]], dtype: torch.dtype
) -> dict[FeatureKey, Tensor]:
    """Send image features from the ranks that computed them to the ranks that need them.

    Args:
        local: the features that this rank computed, CPU tensors of any shape, by any keys that can be
            sorted.
        needed: the keys that each rank needs (the same list on all ranks); some have no images.

    Returns:
        the features of every key in ``needed[rank]`` that has images, as ``dtype``.
    """
    shapes = distributed.gather_objects({key: value.shape for key, value in local.items()})
    outgoing, sent = [torch.empty(0, dtype=dtype)], []  # sent: how many numbers go to each rank
    for keys in needed:
        parts = [local[key].to(dtype).flatten() for key in sorted(keys & local.keys())]
        outgoing += parts
        sent.append(sum(map(len, parts)))
    arriving, received = [], []  # received: how many numbers come from each rank
    for held in shapes:
        parts = [(key, held[key]) for key in sorted(needed[dist.get_rank()] & held.keys())]
        arriving += parts
        received.append(sum(shape.numel() for _, shape in parts))
    incoming = torch.empty(sum(received), dtype=dtype)
    dist.all_to_all_single(incoming, torch.cat(outgoing), received, sent)
    pieces = incoming.split([shape.numel() for _, shape in arriving])
    return {key: piece.view(shape) for (key, shape), piece in zip(arriving, pieces)}


def share_features(model: Model, batch: Batch, ours: list[int]) -> Batch:
    """The batch with the image features of the prompts ``ours``, of this rank's team. A collective."""
    if model.setup.team.size == 1:
        return batch
    needed = distributed.gather_objects(set(ours))
    return replace(batch, features=exchange_features(batch.features, needed, model.setup.dtype))


class Prefill(NamedTuple):
    """Tokens that slots read next: a prompt, an environment's reply, or what a response begins with."""

    slots: list[int]  # several may read one prompt
    cached: int  # tokens that are in the cache already
    input_ids: Tensor  # (n,)
    positions: Tensor  # (3, n)
    spoken: int = 0  # response tokens of the slots, up to here


def prefill_pack(
    model: Model, cache: SlotCache, parts: list[Prefill], features: list[Tensor]
) -> Pack:
    """One pack of several parts, each of which sees what its slot has cached, with the ``features``
    (K, M, H) of their images. The forward pass of the pack stores keys and values into the slots
    (`PackedAttention`). ``predict`` (b,) is the last token that each slot reads, in order."""
    setup, device = model.setup, model.setup.device
    counts = torch.tensor([len(part.input_ids) for part in parts])
    cached = torch.tensor([part.cached for part in parts])
    ends = counts.cumsum(0)
    cache_ends = ends[-1] + cached.cumsum(0)  # cached keys and values are appended to the pack's
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
    plan = tuple(distributed.to_device(x, device) for x in plan)
    earlier = tuple(distributed.to_device(x, device) for x in earlier)
    ids = torch.cat([part.input_ids for part in parts])  # (L,)
    positions = torch.cat([part.positions for part in parts], dim=1)  # (3, L)
    image_index = torch.isin(ids, model.setup.family.visual_token_ids()).nonzero()[:, 0]  # (M,)
    segments = model.setup.family.attention_segments(bounds.tolist(), image_index)
    attention = PackedAttention(
        segments, setup.backend, device, cache, plan, earlier if cached.any() else ()
    )
    if cache.experts is not None:
        rows, *cells = plan
        attention.experts = Recorder(cache.experts, *cells, rows=rows)
    pack = Pack(
        input_ids=ids[None],
        positions=positions[:, None],
        image_index=image_index,
        features=torch.cat(features, dim=1) if features else None,
        attention=attention,
        predict=ends - 1,
    )
    return pack.to(device)


@torch.no_grad()
def run_forward(
    module: Wrapper, batch: Batch, forward: Callable[[Pack], Tensor], replay: bool = False
) -> Tensor:
    """(N,) what ``forward`` (a pack -> (T,)) computes for every response token, on every rank; (k, N)
    if it returns (k, T). ``replay``: see `of_batch`."""
    module.eval()
    packs = of_batch(module.model, batch, replay=replay)
    done = [(pack.flat, forward(pack)) for pack in packs]
    reshard_root(module)
    return join_packs(done, len(batch.tokens))
