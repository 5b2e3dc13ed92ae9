"""The samples of a step, and the packs in which they are trained.

    Batch     prompts and their responses, flat and ragged, in prompt order; every rank holds the
              same copy of the text
    Block     one prompt and some of its responses: what is assigned to ranks and packed as a whole
    Pack      blocks side by side, as tensors: [prompt | r1 | r2 | prompt | r1 ...]

Shapes: G prompts, S samples, N response tokens of all samples, L tokens of a pack, T response
tokens of a pack, I images, M image tokens, P prompt tokens. Images and their features stay on the
rank that decoded them, until `packs.exchange_features` sends them where they are trained. Nothing
here knows about losses or models.

With an environment, a sample is a stream: the policy's own tokens, and between them the
environment's replies; the streams of all samples have R tokens. Tensors (N,) contain only own
tokens; replies matter only for the layout of packs.
"""

import functools
import heapq
import itertools
import math
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, TypeVar, get_origin

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common import distributed
from common.sampling import Sampling

REPLY_ROLES = ("user", "tool")  # the roles in which an environment may speak
# What ended a sample: its environment, --max_turns, --max_new_tokens or --max_reply_tokens, an
# error of the environment.
ENDINGS = ("answered", "turn_limit", "token_limit", "error")
# Parts of a message: {"type": "text", "text": ...}, {"type": "image", "width": w, "height": h}
Content = list[dict]


@dataclass
class Conversation:
    """One sample's conversation. Own tokens are those of the policy, counted across turns."""

    role: str = "user"
    opening: Content = field(default_factory=list)  # the first observation
    replies: list[Content] = field(default_factory=list)
    tokens_before: list[int] = field(default_factory=list)  # own tokens before each reply
    ends: list[int] = field(default_factory=list)  # own tokens up to the end of each finished turn
    rewards: list[float] = field(default_factory=list)  # of each finished turn
    is_cut: bool = False  # a limit cut the last turn, and the environment was asked about it
    accuracy: float | None = None  # the last one that the environment reported, if any
    ended: str = ""  # one of ENDINGS
    error: str = ""  # what went wrong in the environment
    seconds: float = 0.0  # time that its environment took
    # of the images in replies; not of those in the prompt
    grids: list[tuple] = field(default_factory=list)
    # Only on the rank that ran the environment:
    images: list = field(default_factory=list)  # Pillow's, those of the opening first
    # (K, M, H) for `grids`, on the CPU; for a model that trains its vision tower (1, patches, size)
    features: Tensor | None = None

    def add_images(self, grids: tuple, features: Tensor) -> None:
        """Add the images of a reply."""
        self.grids += grids
        parts = [features] if self.features is None else [self.features, features]
        self.features = torch.cat(parts, dim=1)

    def turn_tokens(self, tokens: Tensor) -> list[Tensor]:
        """A sample's own tokens (n,), turn by turn; the last turn may be cut short."""
        bounds = [0, *self.tokens_before, len(tokens)]
        return [tokens[start:end] for start, end in zip(bounds, bounds[1:])]


def gather_conversations(local: list[Conversation]) -> list[Conversation]:
    """The conversations of all ranks, in the order of ranks. Only this rank's have their images and
    features."""
    shared = [replace(conversation, images=[], features=None) for conversation in local]
    by_rank = distributed.gather_objects(shared)
    by_rank[dist.get_rank()] = local
    return [conversation for part in by_rank for conversation in part]


Block = tuple[int, list[int]]  # (index of a prompt, indices of its samples)
Segment = tuple[int, int, int, int]  # (start, end, prefix_start, prefix_end) in a pack
# Whose images: ("prompt", its index), or ("reply", i) of those that an environment shows in sample i.
# (Recorded experts have the same keys: those of a prompt, and of all tokens of sample i.)
ImageKey = tuple[str, int]
Features = dict[ImageKey, Tensor]  # (K, M, H) each


# -------------------------------------------------------------------------------------------------
# Batch
# -------------------------------------------------------------------------------------------------

# What the entries of a field of a batch belong to: this decides how it is selected and joined.
Item = TypeVar("Item")
PerPrompt = Annotated[list, "prompt"]
OfPrompts = Annotated[dict[int, Item], "some prompts"]  # by their indices
PerSample = Annotated[Tensor, "sample"]
PerToken = Annotated[Tensor, "token"]  # flat: the response tokens of all samples
PerStreamToken = Annotated[Tensor, "stream token"]  # flat: the tokens of all streams
OfBatch = Annotated[Item, "batch"]  # joined: lists are concatenated, of others the first is kept

EMPTY = torch.zeros(0, dtype=torch.int64)


@dataclass
class Batch:
    """Prompts of a step and their samples, ordered by (prompt, sample number); per-token tensors
    are flat, (N,).

    A batch begins with prompts alone. The rollout adds the samples, and each later stage fills its
    own fields. A tensor that no stage has filled is empty.
    """

    # Prompts. Each rank decodes the images of its own prompts, and computes their features.
    prompts: PerPrompt  # rows of the data
    draws: PerPrompt  # number of the draw in the run: a key of the sampling noise
    owners: PerPrompt  # rank that samples the responses
    # ids (P, layers, K) of the experts that prompts chose, those of this rank's own, on the CPU
    prompt_experts: OfPrompts[Tensor] = field(default_factory=dict)
    # indices of prompts without samples, as an image does not decode
    dropped: OfBatch[list[int]] = field(default_factory=list)
    # images of own prompts, until their features exist
    patches: OfPrompts[Tensor] = field(default_factory=dict)
    # of own prompts, (K, M, H), on the CPU
    features: OfPrompts[Tensor] = field(default_factory=dict)
    # (3, P) rotary positions, cached at first use
    positions: OfPrompts[Tensor] = field(default_factory=dict)

    # Samples.
    prompt_index: PerSample = EMPTY  # index of the sample's prompt
    sample_number: PerSample = EMPTY  # which of its prompt's samples this is
    own_lengths: PerSample = EMPTY  # response tokens, a sampled end token included
    truncated: PerSample = EMPTY  # bool: cut off by a limit, of tokens or of turns
    tokens: PerToken = EMPTY
    # As recorded when the tokens were sampled; for foreign tokens the policy's, once they are scored.
    logprobs: PerToken = EMPTY
    # bool: not drawn by the policy from this prompt, such as a demonstration or an earlier sample
    foreign: PerToken = EMPTY
    # (S,) ids (R, layers, K) of the experts that the tokens of a sample's stream chose; empty for samples
    # that another rank has drawn
    experts: Annotated[list[Tensor], "sample"] = field(default_factory=list)
    sampling: OfBatch[Sampling | None] = None  # how they were drawn; training uses the same

    # Conversations, if there is an environment.
    stream_lengths: PerSample = EMPTY  # tokens of a sample's stream
    stream: PerStreamToken = EMPTY  # (R,) token ids of the streams, one after the other
    is_own: PerStreamToken = EMPTY  # (R,) bool: a token of the policy
    # (R, 3) rotary positions, counted from the prompt's end
    stream_positions: PerStreamToken = EMPTY
    conversations: Annotated[list[Conversation], "sample"] = field(default_factory=list)  # (S,)

    # Rewards.
    rewards: PerSample = EMPTY  # before KL and shaping
    # the part of the rewards that an environment gave for turns, at the last own token of each, or
    # functions for spans of text, at the tokens that end them
    turn_rewards: PerToken = EMPTY
    greedy_rewards: PerSample = EMPTY  # of the prompt's greedy response (remax)
    greedy_lengths: PerSample = EMPTY  # tokens of that response
    # (S,) each; NaN where a sample lacks it. With several sources of rewards, those of each source
    # are among them
    components: Annotated[dict[str, Tensor], "sample"] = field(default_factory=dict)
    # components that gdpo compares (may repeat after `concatenate`)
    compared: OfBatch[list[str]] = field(default_factory=list)
    weights: PerSample = EMPTY  # (S, K) float64, of the K sources; NaN where one does not score it
    # (S, 2) of the sample's row in earlier steps: its samples, and the sum of their rewards
    history: PerSample = EMPTY
    # (S,) what judges wrote about each sample
    judgements: Annotated[list[str], "sample"] = field(default_factory=list)

    # Scoring and advantages.
    old_logprobs: PerToken = EMPTY  # under the policy at the start of the update
    # the same with masked images; NaN: the sample has no images
    masked_logprobs: PerToken = EMPTY
    ref_logprobs: PerToken = EMPTY
    teacher_logprobs: PerToken = EMPTY
    # the samples as the teacher in the loss sees them
    teacher_view: Annotated["Batch | None", "batch"] = None
    kl: PerToken = EMPTY  # to the reference, before the update
    kl_coef: OfBatch[float] = 0.0  # weight of the KL in this step
    entropy: PerToken = EMPTY  # under the policy at the start of the update
    values: PerToken = EMPTY  # critic's value of the state before the token
    advantages: PerToken = EMPTY
    returns: PerToken = EMPTY
    in_policy_loss: PerToken = EMPTY  # bool: the tokens of the policy loss

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.own_lengths)

    @functools.cached_property  # read for every pack
    def offsets(self) -> Tensor:
        """(S + 1,) where each sample starts in the flat tensors."""
        return F.pad(self.own_lengths.cumsum(0), (1, 0))

    @property
    def pack_lengths(self) -> Tensor:
        """(S,) tokens that each sample takes in a pack."""
        return self.stream_lengths if len(self.stream_lengths) else self.own_lengths

    def flat_index(self, order: Tensor) -> Tensor:
        """Indices of the tokens of the samples ``order`` in the flat tensors."""
        return ragged_index(self.offsets[order], self.own_lengths[order])

    def stream_index(self, order: Tensor) -> Tensor:
        """Indices of the streams of the samples ``order`` in `stream`."""
        starts = self.pack_lengths.cumsum(0) - self.pack_lengths  # (S,)
        return ragged_index(starts[order], self.pack_lengths[order])

    def in_pack(self, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the samples ``order`` put into a pack: token ids (R,), rotary positions counted from
        the prompt's end (R, 3), and which tokens are the policy's own (R,) bool."""
        lengths = self.own_lengths[order]
        if not len(self.stream_lengths):
            flat = self.flat_index(order)
            step = ragged_index(torch.zeros_like(lengths), lengths)
            return self.tokens[flat], step[:, None].expand(-1, 3), torch.ones_like(step).bool()
        index = self.stream_index(order)
        return self.stream[index], self.stream_positions[index], self.is_own[index]

    @functools.cached_property  # read for every prompt of thousands
    def prompt_lengths(self) -> list[int]:
        """(G,) prompt tokens."""
        return [len(prompt.input_ids) for prompt in self.prompts]

    @property
    def total_tokens(self) -> int:
        """Number of tokens of all samples and their prompts, each prompt counted once."""
        prompts = torch.tensor(self.prompt_lengths)[self.prompt_index.unique()]
        return int(self.pack_lengths.sum() + prompts.sum())

    def own_prompts(self, team: int = 1) -> list[int]:
        """Indices of the prompts that this rank, or its team of so many, samples responses to."""
        number = dist.get_rank() // team
        owned = [g for g, owner in enumerate(self.owners) if owner // team == number]
        return [g for g in owned if g not in self.dropped]

    def minibatches(self, count: int, seed: tuple[int, ...]) -> list[np.ndarray]:
        """The indices of all prompts, shuffled by ``seed``, in ``count`` minibatches of equal size, or
        one prompt more in the first ones."""
        order = np.random.default_rng(seed).permutation(len(self.prompts))
        return np.array_split(order, count)

    def split(self, flat: Tensor) -> list[Tensor]:
        """A flat (N,) tensor as one view per sample."""
        return list(flat.split(self.own_lengths.tolist()))

    @property
    def turns(self) -> list[list[Tensor]]:
        """(S,) each sample's own tokens (n,), turn by turn; one turn without an environment."""
        samples = self.split(self.tokens)
        if not self.conversations:
            return [[tokens] for tokens in samples]
        return [talk.turn_tokens(tokens) for talk, tokens in zip(self.conversations, samples)]

    @property
    def turn_ends(self) -> Tensor:
        """(N,) bool: the last token of a turn of the policy. Without an environment, a sample is a turn."""
        lengths = [len(turn) for turns in self.turns for turn in turns if len(turn)]
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
        return torch.zeros_like(self.tokens, dtype=torch.bool).index_fill(0, ends, True)

    def with_responses(self, responses: Iterable[tuple[int, Tensor]]) -> "Batch":
        """The same prompts with other samples, complete ones: the index of the prompt and the token ids (n,)
        of each. Dropped prompts get none. Raises ValueError: they are not in the order of prompts."""
        responses = [(index, tokens) for index, tokens in responses if index not in self.dropped]
        prompt_index = torch.tensor([index for index, _ in responses], dtype=torch.int64)  # (S,)
        if (prompt_index.diff() < 0).any():
            raise ValueError(
                f"responses to the prompts {prompt_index.tolist()}, not in their order"
            )
        counts = prompt_index.bincount()  # (G,) or fewer
        names = (*FIELDS["prompt"], *FIELDS["some prompts"], "dropped")
        tokens = torch.cat([EMPTY, *(tokens for _, tokens in responses)])
        return Batch(
            **{name: getattr(self, name) for name in names},
            prompt_index=prompt_index,
            sample_number=ragged_index(torch.zeros_like(counts), counts),
            own_lengths=torch.tensor([len(tokens) for _, tokens in responses], dtype=torch.int64),
            truncated=torch.zeros(len(responses), dtype=torch.bool),
            tokens=tokens,
            foreign=torch.zeros_like(tokens, dtype=torch.bool),
        )

    def gathered(self) -> "Batch":
        """The batch with the samples of all ranks, which have no rewards yet, in the order of (prompt,
        sample number). It is the same at any number of ranks."""
        ranks = distributed.gather_objects(tensor_fields(self))
        samples = {name: torch.cat([part[name] for part in ranks]) for name in ranks[0]}
        conversations = gather_conversations(self.conversations)
        whole = replace(self, **samples, conversations=conversations)
        if self.sampling and self.sampling.keeps_experts:
            counts = [len(part["own_lengths"]) for part in ranks]
            first = sum(counts[: dist.get_rank()])
            whole.experts = [EMPTY] * len(whole)
            if self.experts:
                whole.experts[first : first + len(self)] = self.experts
        return whole.select(whole.prompt_index.argsort(stable=True))

    def select(self, order: Tensor) -> "Batch":
        """The batch with only the samples ``order`` (k,), in that order, but all prompts."""
        indices = {
            "sample": order,
            "token": self.flat_index(order),
            "stream token": self.stream_index(order),
        }
        chosen = {}
        for role, index in indices.items():
            for name in FIELDS[role]:
                chosen[name] = pick(getattr(self, name), index)
        return replace(self, **chosen)

    def select_prompts(self, indices: list[int]) -> "Batch":
        """The batch with only the prompts ``indices``, which must ascend, and their samples."""
        numbers = {index: k for k, index in enumerate(indices)}
        chosen = torch.isin(self.prompt_index, torch.tensor(indices, dtype=torch.int64))
        part = self.select(chosen.nonzero()[:, 0])._renumbered(numbers)
        prompts = {name: [getattr(self, name)[g] for g in indices] for name in FIELDS["prompt"]}
        return replace(part, **prompts)

    def _renumbered(self, numbers: dict[int, int]) -> "Batch":
        """The batch with its prompts renumbered by ``numbers``; what belongs to other prompts is left
        out."""
        indices = [numbers[index] for index in self.prompt_index.tolist()]
        changes = {
            "prompt_index": torch.tensor(indices, dtype=torch.int64),
            "dropped": [numbers[g] for g in self.dropped if g in numbers],
        }
        for name in FIELDS["some prompts"]:
            values = getattr(self, name)
            changes[name] = {numbers[g]: values[g] for g in values if g in numbers}
        return replace(self, **changes)

    @staticmethod
    def concatenate(parts: list["Batch"]) -> "Batch":
        """Joins batches, one after the other. A reward component that a part lacks is NaN there."""
        shifted, start = [], 0
        for part in parts:
            end = start + len(part.prompts)
            shifted.append(part._renumbered(dict(enumerate(range(start, end)))))
            start = end
        joined = {}
        for name in itertools.chain(*FIELDS.values()):
            joined[name] = join_field([getattr(part, name) for part in shifted])
        joined["components"] = {
            name: torch.cat(
                [each.components.get(name, torch.full((len(each),), math.nan)) for each in parts]
            )
            for part in parts
            for name in part.components
        }
        if any(part.experts for part in parts):  # samples that no sampler drew have none
            experts = [part.experts or [EMPTY] * len(part) for part in parts]
            joined["experts"] = list(itertools.chain(*experts))
        return Batch(**joined)


def fields_by_role(kind: type) -> dict[str, list[str]]:
    """The names of a class's fields by what their entries belong to. Raises TypeError: a field is not
    annotated."""
    names: dict = defaultdict(list)
    for part in fields(kind):
        annotation: Any = part.type
        if get_origin(annotation) is not Annotated:
            raise TypeError(
                f"{kind.__name__}.{part.name} does not say what its entries belong to, which decides how it "
                "is selected and joined: annotate it with PerSample, PerToken or another of the types "
                "above Batch"
            )
        names[annotation.__metadata__[0]].append(part.name)
    return names


FIELDS = fields_by_role(Batch)


def pick(values: Any, order: Tensor) -> Any:
    """The entries ``order`` (k,) of a field, if it is filled."""
    if isinstance(values, dict):
        return {name: column[order] for name, column in values.items()}
    if not len(values):
        return values
    return values[order] if isinstance(values, Tensor) else [values[i] for i in order.tolist()]


def join_field(values: list) -> Any:
    """A field of several batches."""
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    if isinstance(values[0], list):
        return sum(values, [])
    return dict(ChainMap(*values)) if isinstance(values[0], dict) else values[0]


def tensor_fields(record) -> dict[str, Tensor]:
    """The fields of a dataclass that hold tensors, by name."""
    values = {part.name: getattr(record, part.name) for part in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def ragged_index(starts: Tensor, lengths: Tensor) -> Tensor:
    """Indices starts[i] .. starts[i] + lengths[i] - 1 for every i, concatenated."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(
        starts - ends + lengths, lengths
    )


def image_keys(blocks: list["Block"]) -> list[ImageKey]:
    """The keys of everything in a pack that may have images, in the order of the pack."""
    keys = []
    for index, members in blocks:
        keys.append(("prompt", index))
        keys += [("reply", i) for i in members]
    return keys


# -------------------------------------------------------------------------------------------------
# From samples to packs: every rank computes the same assignment, from lengths alone
# -------------------------------------------------------------------------------------------------


def make_blocks(
    batch: Batch, max_tokens: int, indices: Iterable[int] | None = None, score_cost: float = 0.0
) -> list[Block]:
    """Blocks of the given prompts (all by default), each at most ``max_tokens`` long.

    The responses of a prompt share one copy of it if that is cheaper. If they do not fit into one
    block, the prompt is repeated:

        [prompt and images | r1 | r2 | r3]   [prompt and images | r4 | r5]

    Args:
        score_cost: cost of one attention score, in units of tokens, for kernels that also compute
            the masked half of the scores of a response behind a shared prompt (`PackedAttention` on
            sdpa); 0 for kernels that skip it. A response that is alone with its prompt never pays
            for that half, so long responses to short prompts are better kept apart.
    """
    lengths = batch.pack_lengths.tolist()
    members: dict[int, list[int]] = {}
    for i, index in enumerate(batch.prompt_index.tolist()):
        members.setdefault(index, []).append(i)

    blocks = []
    for index in sorted(members if indices is None else map(int, indices)):
        samples = members.get(index, [])
        prompt = batch.prompt_lengths[index]
        saved = (len(samples) - 1) * (prompt + score_cost * prompt**2 / 2)  # copies of the prompt
        # the responses' masked halves
        spent = score_cost * sum(lengths[i] ** 2 for i in samples) / 2
        longest = max_tokens if saved > spent else 0  # 0: each response alone
        sizes = [lengths[i] for i in samples]
        blocks += [(index, part) for part in fill_packs(samples, sizes, longest - prompt)]
    return blocks


def fill_packs(items: list, sizes: list[int], most: int) -> Iterator[list]:
    """The items in order, in lists whose sizes sum to at most ``most``; a larger item is alone."""
    part, total = [], 0
    for item, size in zip(items, sizes):
        if part and total + size > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += size
    if part:
        yield part


def balanced_partition(items: Iterable[int], costs: Sequence[float], bins: int) -> list[list[int]]:
    """Distribute ``items``, indices of ``costs``, over ``bins`` lists of nearly equal cost, by longest
    processing time first (Graham 1969)."""
    heap = [(0.0, b, []) for b in range(bins)]  # load, number, indices
    for i in sorted(items, key=lambda i: -costs[i]):
        load, b, part = heap[0]  # the lightest
        part.append(i)
        heapq.heapreplace(heap, (load + costs[i], b, part))
    return [part for *_, part in heap]


def assign_blocks(
    batch: Batch, blocks: list[Block], world: int, max_tokens: int, hidden_size: int
) -> list[list[list[Block]]]:
    """Distribute blocks over ranks, and each rank's share over packs of at most ``max_tokens`` tokens
    (or of one block).

    Returns:
        packs[rank][k], a list of blocks. All ranks have the same number of packs, some of them
        perhaps empty, because a forward or backward pass of a pack is collective. The k-th packs of
        all ranks cost about the same, because ranks wait for each other in every layer.
    """
    sizes, costs = _sizes_and_costs(batch, blocks, hidden_size)
    shares = balanced_partition(range(len(blocks)), costs, world)
    count = 0
    for share in shares:
        count = max(count, min(len(share), -(-sum(sizes[i] for i in share) // max_tokens)))
    while True:
        packs = [balanced_partition(share, sizes, count) for share in shares]
        several = [pack for rank_packs in packs for pack in rank_packs if len(pack) > 1]
        if all(sum(sizes[i] for i in pack) <= max_tokens for pack in several):
            break
        # in growing strides: with thousands of packs, strides of one would take minutes
        count = min(count + 1 + count // 32, max(map(len, shares)))
    for rank_packs in packs:
        rank_packs.sort(key=lambda pack: -sum(costs[i] for i in pack))
    return [[[blocks[i] for i in pack] for pack in rank_packs] for rank_packs in packs]


def _sizes_and_costs(
    batch: Batch, blocks: list[Block], hidden_size: int
) -> tuple[list[int], list[float]]:
    """Tokens of each block, and its cost in units of tokens, that is, of the 24 H^2 operations that
    one token takes in one layer besides attention."""
    lengths = batch.pack_lengths.tolist()
    sizes, costs = [], []
    for index, members in blocks:
        prompt = batch.prompt_lengths[index]
        responses = [lengths[i] for i in members]
        size = prompt + sum(responses)
        scores = prompt**2 / 2 + sum(length * (prompt + length / 2) for length in responses)
        sizes.append(size)
        costs.append(size + scores / (6 * hidden_size))
    return sizes, costs


# -------------------------------------------------------------------------------------------------
# Packs
# -------------------------------------------------------------------------------------------------


@dataclass
class Pack:
    """The tokens of one forward pass of the language model. Targets are response tokens; target t is
    predicted by the hidden state ``predict[t]``. Packs of prefill and decoding have no
    targets."""

    input_ids: Tensor  # (1, L)
    positions: Tensor  # (3, 1, L) rotary positions
    image_index: Tensor = EMPTY  # (M,) of image tokens
    # (K, M, H), or None without images; with grids: pixels (1, patches, size)
    features: Tensor | None = None
    grids: Tensor | None = None  # (I, 3) of its images, for a model that trains its vision tower
    segments: list[Segment] = field(default_factory=list)
    attention: Callable | None = (
        None  # which tokens attend to which: `PackedAttention` or `DecodeAttention`
    )
    predict: Tensor = EMPTY  # (T,) int64
    targets: Tensor = EMPTY  # (T,) int64
    flat: Tensor = EMPTY  # (T,) index into the flat tensors of the batch, on the CPU
    sample: Tensor = EMPTY  # (T,) index of the sample in the batch
    step: Tensor = EMPTY  # (T,) 0-based number among the sample's response tokens
    # the same targets in the same order, after other prompts and images
    teacher: "Pack | None" = None

    def pick(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """The pack's entries (T,) of flat (N,) tensors of the batch, on the pack's device."""
        device = self.targets.device
        return tuple(distributed.to_device(values[self.flat], device) for values in flat)

    @property
    def copies(self) -> Tensor:
        """(L,) number of samples that contain each token: a token of a shared prompt is in all the
        samples of that prompt."""
        counts = torch.zeros(self.input_ids.shape[1])
        for start, end, p_start, p_end in self.segments:
            # Only the last token of a shared prompt predicts a target. In a segment that contains a
            # prompt and its response, the last token predicts none.
            inside = (self.predict >= start) & (self.predict < end - 1)  # (T,)
            if p_end > p_start or inside.any():
                counts[start:end] += 1
                counts[p_start:p_end] += 1
        return counts

    def label_text(self, skipped: Tensor) -> "Pack":
        """The pack with all tokens as targets, except the ids ``skipped`` (V,) bool and the first token
        of each sample, which nothing predicts. Each sample must be alone with its prompt. Of the
        fields (T,), only ``predict`` and ``targets`` of the result are valid."""
        ids = self.input_ids[0]  # (L,)
        labelled = ~skipped[ids]
        labelled[[start for start, *_ in self.segments]] = False
        index = labelled.nonzero()[:, 0]  # (T,)
        return replace(self, predict=index - 1, targets=ids[index])

    def to(self, device: torch.device) -> "Pack":
        """The pack on ``device``, except ``flat``, which indexes CPU tensors."""
        moved = {}
        for name, value in tensor_fields(self).items():
            if name != "flat":
                moved[name] = distributed.to_device(value, device)
        return replace(self, **moved)


def build_pack(
    batch: Batch,
    blocks: list[Block],
    prompt_positions: dict[int, Tensor],
    features: Features,
    image_token_ids: Tensor,
) -> Pack:
    """Lay out blocks as [prompt | r1 | r2 | ...]; the positions of a response start at ``max(prompt
    positions) + 1``. ``features`` are those of the images.

    The first token of a response is predicted by the last token of its prompt (or of a reply, if an
    environment speaks first), and the last token of a response predicts nothing. Replies of an
    environment are input, never targets. An empty pack becomes one token that predicts nothing, so
    that its rank takes part in the collectives, with a gradient of 0.
    """
    order = torch.tensor([i for _, members in blocks for i in members], dtype=torch.int64)
    # (k,) with replies, without
    counts, lengths = batch.pack_lengths[order], batch.own_lengths[order]
    segments, samples, size = _lay_out(batch, blocks, prompt_positions)
    starts, ends, following = torch.tensor(samples, dtype=torch.int64).reshape(-1, 3).T  # (k,) each
    index = ragged_index(starts, counts)  # (R,)
    begins = index == starts.repeat_interleave(counts)  # (R,)
    tokens, offsets, is_own = batch.in_pack(order)  # (R,), (R, 3), (R,)

    length = max(size, 1)
    is_prompt = torch.ones(length).bool().index_fill_(0, index, False)  # (L,)
    input_ids = torch.zeros(length, dtype=torch.int64)
    positions = torch.zeros(3, length, dtype=torch.int64)
    if blocks:
        input_ids[is_prompt] = torch.cat([batch.prompts[i].input_ids for i, _ in blocks])
        positions[:, is_prompt] = torch.cat([prompt_positions[i] for i, _ in blocks], dim=1)
    input_ids[index] = tokens
    positions[:, index] = following.repeat_interleave(counts) + offsets.T

    is_image = torch.isin(input_ids, image_token_ids)  # (L,)
    is_image[index[is_own]] = False  # an image token that the policy drew stands for no image
    pieces = [features[key] for key in image_keys(blocks) if key in features]
    flat = batch.flat_index(order)  # (T,)
    return Pack(
        input_ids=input_ids[None],
        positions=positions[:, None],
        image_index=is_image.nonzero()[:, 0],
        features=torch.cat(pieces, dim=1) if pieces else None,
        segments=segments or [(0, 1, 0, 0)],
        predict=torch.where(begins, ends.repeat_interleave(counts), index)[is_own] - 1,
        targets=batch.tokens[flat],
        flat=flat,
        sample=order.repeat_interleave(lengths),
        step=ragged_index(torch.zeros_like(lengths), lengths),
    )


def _lay_out(
    batch: Batch, blocks: list[Block], prompt_positions: dict[int, Tensor]
) -> tuple[list[Segment], list[tuple[int, int, int]], int]:
    """The segments of a pack; (first token, end of its prompt, first position) of every sample; and
    the length of the pack."""
    segments, samples, size = [], [], 0
    for index, members in blocks:
        start, end = size, size + batch.prompt_lengths[index]
        following = int(prompt_positions[index].max()) + 1
        lengths = [int(batch.pack_lengths[i]) for i in members]
        alone = len(members) == 1  # one causal segment, cheaper than a prompt and a response
        segments.append((start, end + lengths[0] if alone else end, start, start))
        size = end
        for length in lengths:
            if length and not alone:
                segments.append((size, size + length, start, end))
            samples.append((size, end, following))
            size += length
    return segments, samples, size
