"""Samples, packed rows, balanced partition, minibatches.

    Samples   the step's responses, flat and ragged, in prompt order: every rank holds the same copy of the text
    Block     one prompt and some of its responses: the unit that is balanced over ranks and packed
    Row       one packed row of blocks as tensors: [prompt | r1 | r2 | prompt | r1 ...]

    parse_datasets, mix, data_order, take_rows      which row of which dataset is drawn when

Shape legend: S samples, N response tokens of all samples, L tokens of a packed row, T response tokens of a row,
M image tokens, P prompt tokens. Pictures and their features stay on the rank that holds them; they move only by
`exchange_features`. Nothing here knows about losses or models.
"""

import functools
import heapq
import json
import math
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
import torch.distributed as dist

Block = tuple[int, tuple[int, ...]]  # (index into the step's prompts, indices of samples)
Segment = tuple[int, int, int, int]  # (start, end, prefix_start, prefix_end) in a row


class UserError(ValueError):
    """Something the user can mend: one message from rank 0, exit code 2 of every worker, no traceback."""


def tensors_of(record) -> dict[str, torch.Tensor]:
    """The fields of a dataclass that hold tensors, by name."""
    return {f.name: value for f in fields(record) if isinstance(value := getattr(record, f.name), torch.Tensor)}


@dataclass
class Samples:
    """Responses of one step, ordered by (prompt, sample number); per-token tensors are flat, (N,).

    ``logprobs`` are those recorded when the tokens were sampled. The later stages fill the optional fields.
    """

    group: torch.Tensor                          # (S,) index into the step's prompts
    number: torch.Tensor                         # (S,) which of its prompt's samples this is
    lengths: torch.Tensor                        # (S,) response tokens, a sampled end token included
    truncated: torch.Tensor                      # (S,) bool: ended by the token limit
    tokens: torch.Tensor                         # (N,)
    logprobs: torch.Tensor                       # (N,)
    scores: torch.Tensor | None = None           # (S,) reward before KL and shaping
    greedy_scores: torch.Tensor | None = None    # (S,) reward of the greedy response to the sample's prompt (remax)
    greedy_lengths: torch.Tensor | None = None   # (S,) and its tokens
    old_logprobs: torch.Tensor | None = None     # (N,) under the policy at the start of the update
    ref_logprobs: torch.Tensor | None = None     # (N,)
    kl: torch.Tensor | None = None               # (N,) to the reference, before the update
    entropy: torch.Tensor | None = None          # (N,) under the policy at the start of the update
    values: torch.Tensor | None = None           # (N,) critic's value of the state before the token
    advantages: torch.Tensor | None = None       # (N,)
    returns: torch.Tensor | None = None          # (N,)
    components: dict[str, torch.Tensor] = field(default_factory=dict)  # reward components, (S,) each; NaN: has none
    judgements: list[str] = field(default_factory=list)                # what judges said of each sample, after gathering

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property                                          # read for every row
    def offsets(self) -> torch.Tensor:
        """(S + 1,) where each sample starts in the flat tensors."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A flat (N,) tensor as one view per sample."""
        return list(flat.split(self.lengths.tolist()))

    def select(self, order: torch.Tensor) -> "Samples":
        """The samples ``order`` (k,), in that order."""
        offsets, lengths = self.offsets, self.lengths[order]
        flat = ragged_index(offsets[order], lengths)
        chosen = {name: value[flat if name in PER_TOKEN else order] for name, value in tensors_of(self).items()}
        judgements = [self.judgements[i] for i in order.tolist()] if self.judgements else []
        return replace(self, **chosen, components={k: v[order] for k, v in self.components.items()}, judgements=judgements)


def concatenate(parts: list[Samples]) -> Samples:
    """The samples of several parts, one after the other; a component that a part lacks is NaN there."""
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in tensors_of(parts[0])}
    names = dict.fromkeys(name for part in parts for name in part.components)
    missing = lambda part: torch.full((len(part),), float("nan"))  # noqa: E731
    components = {name: torch.cat([part.components.get(name, missing(part)) for part in parts]) for name in names}
    return Samples(**joined, components=components, judgements=[text for part in parts for text in part.judgements])


def as_samples(targets: list[list[torch.Tensor]]) -> Samples:
    """Targets by prompt, as the responses that packed rows are made of."""
    flat = [(group, number, target) for group, part in enumerate(targets) for number, target in enumerate(part)]
    tokens = torch.cat([torch.zeros(0, dtype=torch.int64), *(target for *_, target in flat)])
    integers = lambda values: torch.tensor(list(values), dtype=torch.int64)  # noqa: E731
    return Samples(group=integers(group for group, *_ in flat), number=integers(number for _, number, _ in flat),
                   lengths=integers(len(target) for *_, target in flat), tokens=tokens,
                   truncated=torch.zeros(len(flat), dtype=torch.bool), logprobs=torch.zeros(len(tokens)))


PER_TOKEN = ("tokens", "logprobs", "old_logprobs", "ref_logprobs", "kl", "entropy", "values", "advantages", "returns")


def ragged_index(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Indices starts[i] .. starts[i] + lengths[i] - 1 for every i, concatenated."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - ends + lengths, lengths)


# ---------------------------------------------------------------------------------------------------------------------
# Exchange between ranks. CPU tensors travel over gloo; every rank calls, with whatever it has.
# ---------------------------------------------------------------------------------------------------------------------


def all_gather_ragged(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Gather tensors whose first dimension differs between ranks; (n_r, ...) from every rank r."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [tensor]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(tensor)]))
    longest = max(int(size) for size in sizes)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[:len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [part[:int(size)] for part, size in zip(gathered, sizes)]


def all_gather_json(value) -> list:
    """Gather one small JSON value from every rank (no pickle travels)."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(part.numpy())) for part in all_gather_ragged(data)]


@contextmanager
def failing_together(what: str = ""):
    """A ValueError inside, on any rank, is a UserError on every rank, with ``what`` before its message: one rank raising alone
    would leave the others waiting."""
    problem = None
    try:
        yield
    except ValueError as error:
        problem = f"{what}{error}"
    if problems := [p for p in all_gather_json(problem) if p]:
        raise UserError("\n".join(dict.fromkeys(problems)))


def gather_samples(local: Samples) -> Samples:
    """All ranks' samples, not yet scored, ordered by (prompt, sample number): the same on every rank, at any world size."""
    joined = Samples(**{name: torch.cat(all_gather_ragged(value)) for name, value in tensors_of(local).items()})
    return joined.select(torch.from_numpy(np.lexsort((joined.number.numpy(), joined.group.numpy()))))


def exchange_features(features: dict[int, torch.Tensor], owners: list[int], needed: list[set[int]],
                      shapes: dict[int, tuple[int, ...]], dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """Fetch the image features that this rank needs and another rank computed.

    Args:
        features: this rank's own, prompt index -> (K, M, H) CPU tensor.
        owners: the rank that computed each prompt's features.
        needed: for every rank the prompts whose features it will use (the same list on all ranks).
        shapes: the shape of every prompt's features; prompts without images are absent.

    Returns:
        the features of every prompt in ``needed[rank]`` that has images.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    moved = lambda a, b: [p for p in sorted(needed[b]) if p in shapes and owners[p] == a != b]  # noqa: E731
    send, receive = [moved(rank, r) for r in range(world)], [moved(r, rank) for r in range(world)]
    result = {p: features[p] for p in needed[rank] if p in shapes and owners[p] == rank}
    sent, received = ([sum(math.prod(shapes[p]) for p in prompts) for prompts in lists] for lists in (send, receive))
    outgoing = torch.cat([torch.empty(0, dtype=dtype)] + [features[p].flatten() for prompts in send for p in prompts])
    incoming = torch.empty(sum(received), dtype=dtype)
    dist.all_to_all_single(incoming, outgoing, received, sent)
    arrived = sum(receive, [])
    pieces = incoming.split([math.prod(shapes[p]) for p in arrived])
    return result | {p: piece.view(shapes[p]) for p, piece in zip(arrived, pieces)}


# ---------------------------------------------------------------------------------------------------------------------
# Data order: a function of (seed, number of the draw), so every rank knows it, and a resumed run goes on in it
# ---------------------------------------------------------------------------------------------------------------------


def parse_datasets(spec: str) -> list[tuple[str, float | None]]:
    """a.jsonl:0.7,b.jsonl:0.3 -> [("a.jsonl", 0.7), ("b.jsonl", 0.3)]; no weights: None.

    Raises:
        ValueError: no file, a weight that is no number above 0, or weights for some of the files only.
    """
    sets: list[tuple[str, float | None]] = []
    for part in filter(None, map(str.strip, spec.split(","))):
        path, colon, text = part.rpartition(":")                        # where a / follows, it belongs to a folder's name
        try:
            sets.append((path, float(text)) if colon and "/" not in text else (part, None))
        except ValueError as error:
            raise ValueError(f"{spec}: {text!r} is no number; expected files separated by commas, all of them or none "
                             "with a weight, as in a.jsonl:0.7,b.jsonl:0.3") from error
    given = [weight for _, weight in sets if weight is not None]
    if (spec and not sets) or len(given) not in (0, len(sets)) or not all(path for path, _ in sets) \
            or not all(0 < weight < math.inf for weight in given):
        raise ValueError(f"{spec}: expected files separated by commas, all of them or none with a weight above 0")
    return sets


def mix(weights: list[float], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """(draws,) dataset of each draw, and (draws,) its number among that set's draws. Draw j of set i has the time
    (j + 1/2) / weight i: shares are kept at every moment, and a longer plan begins like a shorter one."""
    # At any time each other set may be half a draw behind its share, all of which are this one's then.
    counts = [math.ceil(draws * weight / sum(weights)) + len(weights) // 2 + 1 for weight in weights]
    which = np.repeat(np.arange(len(weights)), counts)
    number = np.concatenate([np.arange(0), *map(np.arange, counts)])
    order = np.lexsort((which, (number + 0.5) / np.asarray(weights)[which]))[:draws]
    return which[order], number[order]


def take_rows(which: np.ndarray, number: np.ndarray, sizes: list[int], seed: int) -> list[tuple[int, int]]:
    """(dataset, row) of consecutive draws of a plan made by `mix`; each dataset has its own passes, as in `data_order`."""
    picks = {}
    for k in set(which.tolist()):
        own = number[which == k]                                                                             # consecutive
        picks[k] = iter(data_order(range(own[0], own[-1] + 1), sizes[k], seed))
    return [(k, next(picks[k])) for k in which.tolist()]


def data_order(draws: range, rows: int, seed: int) -> list[int]:
    """Rows taken as draws number ``draws``: pass e over the data uses a permutation that depends on (seed, e) only."""
    order = {}
    for epoch in {draw // rows for draw in draws}:
        order[epoch] = np.random.default_rng([seed, epoch]).permutation(rows)
    return [int(order[draw // rows][draw % rows]) for draw in draws]


# ---------------------------------------------------------------------------------------------------------------------
# Minibatches, balanced partition, packs: every rank computes the same answer from lengths alone
# ---------------------------------------------------------------------------------------------------------------------


def minibatches(groups: int, count: int, seed: tuple[int, ...]) -> list[np.ndarray]:
    """Cut prompt groups 0..groups-1, shuffled by ``seed``, into ``count`` equal minibatches."""
    return np.split(np.random.default_rng(seed).permutation(groups), count)


def make_blocks(samples: Samples, prompt_lengths: list[int], max_tokens: int, groups=None, share: bool = True,
                score_cost: float = 0.0) -> list[Block]:
    """Blocks of the given prompt groups (all by default), each at most ``max_tokens`` long.

    A group that is too long is split and its prompt repeated; without ``share`` every sample is its own block.

    Args:
        score_cost: of one attention score, in tokens, where a response behind a shared prompt pays for its whole rectangle of
            scores, masked half included (`PackedAttention` on sdpa; kernels that skip what is masked: 0). A response alone
            with its prompt pays for half, so long responses to short prompts are left apart.
    """
    lengths = samples.lengths.tolist()
    members: dict[int, list[int]] = {}
    for i, group in enumerate(samples.group.tolist()):
        members.setdefault(group, []).append(i)
    blocks: list[Block] = []
    for group in sorted(members) if groups is None else sorted(int(g) for g in groups):
        prompt, own = prompt_lengths[group], members.get(group, [])
        saved = (len(own) - 1) * (prompt + score_cost * prompt ** 2 / 2)                     # copies of the prompt
        together = share and saved > score_cost * sum(lengths[i] ** 2 for i in own) / 2      # masked halves of the responses
        current, size = [], prompt
        for i in own:
            if current and (size + lengths[i] > max_tokens or not together):
                blocks.append((group, tuple(current)))
                current, size = [], prompt
            current.append(i)
            size += lengths[i]
        if current:
            blocks.append((group, tuple(current)))
    return blocks


def balanced_partition(costs: list[float], bins: int) -> list[list[int]]:
    """Indices of ``costs`` in ``bins`` lists of nearly equal sum: longest processing time first (Graham 1969)."""
    heap: list[tuple[float, int, list[int]]] = [(0.0, b, []) for b in range(bins)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, b, part = heap[0]                                                                # the lightest
        part.append(i)
        heapq.heapreplace(heap, (load + costs[i], b, part))
    return [part for *_, part in heap]


def make_packs(samples: Samples, prompt_lengths: list[int], blocks: list[Block], world: int, max_tokens: int,
               hidden_size: int) -> list[list[list[Block]]]:
    """Partition blocks over ranks, and each rank's share into packs of at most ``max_tokens`` tokens (or of one block).

    Returns:
        packs[rank][k] = list of blocks; all ranks have the same number of packs, some may be empty, because every pack is
        one collective forward and backward. Packs of one k are alike: the ranks wait for each other in every layer.
    """
    lengths = samples.lengths.tolist()
    sizes = [prompt_lengths[group] + sum(lengths[i] for i in members) for group, members in blocks]
    costs = []
    for (group, members), size in zip(blocks, sizes):
        prompt = prompt_lengths[group]
        scores = prompt ** 2 / 2 + sum(lengths[i] * (prompt + lengths[i] / 2) for i in members)
        costs.append(size + scores / (6 * hidden_size))     # attention next to the 24 H^2 operations of a token's layer
    parts = balanced_partition(costs, world)
    count = max(min(len(part), -(-sum(sizes[i] for i in part) // max_tokens)) for part in parts)
    while True:
        packs = [[[part[k] for k in pack] for pack in balanced_partition([sizes[i] for i in part], count)] for part in parts]
        if all(len(pack) < 2 or sum(sizes[i] for i in pack) <= max_tokens for own in packs for pack in own):
            break
        count = min(count + 1 + count // 32, max(map(len, parts)))      # not one by one: of thousands it would take minutes
    costly_first = [sorted(own, key=lambda pack: -sum(costs[i] for i in pack)) for own in packs]
    return [[[blocks[i] for i in pack] for pack in own] for own in costly_first]


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A packed row. Targets are the response tokens; target t is predicted by the hidden state of row ``predict[t]``."""

    input_ids: torch.Tensor                # (1, L)
    positions: torch.Tensor                # (3, 1, L) rotary positions
    segments: list[Segment]
    image_rows: torch.Tensor               # (M,) rows that hold image tokens
    features: torch.Tensor | None          # (K, M, H), or None without images; with grids: pixels (1, patches, patch size)
    predict: torch.Tensor                  # (T,) int64
    targets: torch.Tensor                  # (T,) int64
    flat: torch.Tensor                     # (T,) index into the flat tensors of Samples, on the CPU
    sample: torch.Tensor                   # (T,) index of the sample in Samples
    step: torch.Tensor                     # (T,) 0-based position in the response
    grids: torch.Tensor | None = None      # (I, 3) of its pictures, for a model that trains its vision tower

    @property
    def copies(self) -> torch.Tensor:
        """(L,) in how many samples each token stands: a shared prompt counts once for each of its responses."""
        counts = torch.zeros(self.input_ids.shape[1])
        shared = {p_start for _, _, p_start, p_end in self.segments if p_end > p_start}
        for start, end, p_start, p_end in self.segments:
            if p_end > p_start:
                counts[start:end] += 1
                counts[p_start:p_end] += 1
            elif start not in shared and ((self.predict >= start) & (self.predict < end)).any():     # alone with its prompt
                counts[start:end] += 1
        return counts

    def to(self, device: torch.device) -> "Row":
        """The row on ``device``, but for ``flat``, which indexes CPU tensors."""
        pinned = lambda value: value.pin_memory() if device.type == "cuda" else value  # noqa: E731
        return replace(self, **{name: pinned(value).to(device, non_blocking=True) for name, value in tensors_of(self).items()
                                if name != "flat"})


def build_row(samples: Samples, blocks: list[Block], prompt_ids: dict[int, torch.Tensor],
              prompt_positions: dict[int, torch.Tensor], features: dict[int, torch.Tensor],
              image_token_ids: torch.Tensor) -> Row:
    """Lay out blocks as [prompt | r1 | r2 | ...]; response positions start at ``max(prompt positions) + 1``.

    The first token of a response is predicted by the prompt's last row, so a response's last row predicts nothing.
    An empty pack becomes one token that predicts nothing: its rank takes part in the collectives, with gradient 0.
    """
    order = torch.tensor([i for _, members in blocks for i in members], dtype=torch.int64)
    counts = samples.lengths[order]
    lengths, segments, size = dict(zip(order.tolist(), counts.tolist())), [], 0
    places: list[tuple[int, int, int]] = []       # of every response: its first row, the end of its prompt, its first position
    for group, members in blocks:
        start, end = size, size + len(prompt_ids[group])
        alone = lengths[members[0]] if len(members) == 1 else 0      # one sample: one causal segment, cheaper than two
        segments.append((start, end + alone, start, start))
        size, first = end, int(prompt_positions[group].max()) + 1
        for i in members:
            if lengths[i] and not alone:
                segments.append((size, size + lengths[i], start, end))
            places.append((size, end, first))
            size += lengths[i]
    starts, ends, following = torch.tensor(places, dtype=torch.int64).reshape(-1, 3).T
    flat, rows = ragged_index(samples.offsets[order], counts), ragged_index(starts, counts)                           # (T,)
    step = rows - starts.repeat_interleave(counts)
    targets = samples.tokens[flat]
    is_prompt = torch.ones(max(size, 1), dtype=torch.bool).index_fill_(0, rows, False)                                # (L,)
    input_ids, positions = torch.zeros(max(size, 1), dtype=torch.int64), torch.zeros(3, max(size, 1), dtype=torch.int64)
    if blocks:
        input_ids[is_prompt] = torch.cat([prompt_ids[group] for group, _ in blocks])
        positions[:, is_prompt] = torch.cat([prompt_positions[group] for group, _ in blocks], dim=1)
    input_ids[rows] = targets
    positions[:, rows] = following.repeat_interleave(counts) + step
    pieces = [features[group] for group, _ in blocks if group in features]
    return Row(input_ids=input_ids[None], positions=positions[:, None], segments=segments or [(0, 1, 0, 0)],
               image_rows=(torch.isin(input_ids, image_token_ids) & is_prompt).nonzero()[:, 0],
               features=torch.cat(pieces, dim=1) if pieces else None,
               predict=torch.where(step == 0, ends.repeat_interleave(counts), rows) - 1, targets=targets, flat=flat,
               sample=order.repeat_interleave(counts), step=step)


def label_text(row: Row, skipped: torch.Tensor) -> Row:
    """A row of samples that stand alone with their prompts, with every token as a target but the first of each sample, which
    nothing predicts, and the ids ``skipped`` (V,) bool. Only ``predict`` and ``targets`` fit together then."""
    ids = row.input_ids[0]                                                                                # (L,)
    labelled = ~skipped[ids]
    labelled[[start for start, *_ in row.segments]] = False
    places = labelled.nonzero()[:, 0]                                                                     # (T,)
    return replace(row, predict=places - 1, targets=ids[places])
