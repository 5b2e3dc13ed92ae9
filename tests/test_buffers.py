"""Batches, minibatches, partition, packs and rows against python loops, on random inputs."""

import dataclasses
import itertools
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import buffers, losses
from common.buffers import (
    FIELDS,
    Batch,
    assign_blocks,
    balanced_partition,
    build_pack,
    image_keys,
    make_blocks,
)
from common.data.loader import data_order, draw_batches, mix
from common.flags import parse_datasets
from conftest import marked, user_error
from helpers import prompts_of, random_batch

SEEDS = marked(range(20), daily=3)
IMAGE = 3  # token id of an image place in the rows below


def with_replies(batch: Batch, rng: np.random.Generator) -> Batch:
    """The same samples in conversation: some begin with a first observation, some end with a
    reply's place left out."""
    stream, is_own, spans = [], [], []
    for tokens in batch.split(batch.tokens):
        before = len(stream)
        cuts = rng.integers(0, len(tokens) + 1, rng.integers(0, 3)).tolist()
        for t in range(len(tokens) + 1):
            # a reply of 1 to 3 tokens
            for _ in range(cuts.count(t)):
                reply = rng.integers(4, 1000, rng.integers(1, 4)).tolist()
                stream += reply
                is_own += [False] * len(reply)
            stream += tokens[t : t + 1].tolist()
            is_own += [True] * len(tokens[t : t + 1])
        spans.append(len(stream) - before)
    return dataclasses.replace(
        batch,
        stream_lengths=torch.tensor(spans),
        stream=torch.tensor(stream),
        is_own=torch.tensor(is_own),
        stream_positions=torch.from_numpy(rng.integers(0, 99, (len(stream), 3))),
        conversations=[f"talk {i}" for i in range(len(batch))],
        turn_rewards=torch.from_numpy(rng.normal(size=len(batch.tokens))),
    )


def with_prompts(batch: Batch, lengths: list[int]) -> Batch:
    return dataclasses.replace(batch, prompts=prompts_of(lengths))


def batch_of(prompts: list[int], responses: list[int]) -> Batch:
    """One response to each prompt, of so many tokens each."""
    batch = Batch(prompts_of(prompts), draws=list(range(len(prompts))), owners=[0] * len(prompts))
    return batch.with_responses(enumerate(torch.ones(n, dtype=torch.int64) for n in responses))


def pieces(samples: Batch, flat: torch.Tensor) -> list[list]:
    """A flat tensor cut into samples by a loop."""
    result, start = [], 0
    for length in samples.own_lengths.tolist():
        result.append(flat.tolist()[start : start + length])
        start += length
    return result


# ------------------------------------------------------------------------------------------------ Batch
OF_PROMPTS = (
    *("prompts", "draws", "owners", "dropped"),
    *("patches", "features", "positions", "prompt_experts"),
)


@pytest.mark.parametrize("seed", SEEDS)
def test_views_equal_loops(seed):
    samples = random_batch(np.random.default_rng(seed))
    parts = pieces(samples, samples.logprobs)
    assert samples.offsets.tolist() == [
        sum(samples.own_lengths.tolist()[:i]) for i in range(len(samples) + 1)
    ]
    assert [part.tolist() for part in samples.split(samples.logprobs)] == parts
    assert losses.sum_per_sample(samples.tokens, samples.own_lengths).tolist() == [
        sum(part) for part in pieces(samples, samples.tokens)
    ]
    assert samples.prompt_lengths == [1, 2, 3, 4, 5, 6]


def test_responses_take_the_place_of_samples():
    batch = random_batch(np.random.default_rng(0))
    batch.dropped = []
    nothing = torch.zeros(0, dtype=torch.int64)
    responses = [(1, torch.tensor([7, 8])), (2, torch.tensor([9])), (2, nothing)]
    asked = batch.with_responses(responses)
    assert asked.prompt_index.tolist() == [1, 2, 2]
    assert asked.sample_number.tolist() == [0, 0, 1]
    assert asked.own_lengths.tolist() == [2, 1, 0]
    assert asked.tokens.tolist() == [7, 8, 9]
    assert all(getattr(asked, name) is getattr(batch, name) for name in OF_PROMPTS)
    assert not len(asked.rewards)
    assert not len(asked.logprobs)
    assert not asked.components
    assert len(batch.with_responses([])) == 0
    batch.dropped = [1]
    assert batch.with_responses(responses).prompt_index.tolist() == [2, 2]
    with pytest.raises(ValueError, match=r"responses to the prompts \[3, 2\], not in their order"):
        batch.with_responses([(3, nothing), (2, nothing)])


@pytest.mark.parametrize("seed", SEEDS)
def test_select_takes_every_field_along(seed):
    rng = np.random.default_rng(seed)
    samples = with_replies(random_batch(rng), rng)
    samples.experts = [torch.tensor([i]) for i in range(len(samples))]
    # repeats and gaps
    order = rng.integers(0, len(samples), rng.integers(0, 2 * len(samples))).tolist()
    ends = samples.stream_lengths.cumsum(0).tolist()
    chosen = samples.select(torch.tensor(order, dtype=torch.int64))
    for field in dataclasses.fields(Batch):
        name = field.name
        old, new = getattr(samples, name), getattr(chosen, name)
        if name in (*OF_PROMPTS, "sampling", "kl_coef", "compared", "teacher_view"):
            assert new is old
        elif name in ("judgements", "conversations", "experts"):
            assert new == [old[i] for i in order]
        elif name in ("stream", "is_own", "stream_positions"):
            assert new.tolist() == [
                x
                for i in order
                for x in old.tolist()[ends[i] - int(samples.stream_lengths[i]) : ends[i]]
            ], name
        elif name == "components":
            assert new["accuracy"].tolist() == [old["accuracy"].tolist()[i] for i in order]
        elif name in FIELDS["token"]:
            assert new.tolist() == [x for i in order for x in pieces(samples, old)[i]], name
        else:
            assert new.tolist() == [old.tolist()[i] for i in order], name


def assert_equal(one: Batch, other: Batch) -> None:
    """In all fields, and in the component that both have."""
    for field in dataclasses.fields(Batch):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if field.name == "components":
            first, second = first["accuracy"], second["accuracy"]
        assert torch.equal(first, second) if torch.is_tensor(first) else first == second, field.name


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_selected_prompts_take_their_samples_along(seed):
    samples = with_replies(random_batch(np.random.default_rng(seed)), np.random.default_rng(seed))
    chosen = samples.select_prompts([1, 4, 5])
    assert_equal(
        chosen, Batch.concatenate([samples.select_prompts([prompt]) for prompt in (1, 4, 5)])
    )
    assert chosen.prompts == [samples.prompts[prompt] for prompt in (1, 4, 5)]
    for place, prompt in enumerate((1, 4, 5)):
        assert (
            chosen.rewards[chosen.prompt_index == place].tolist()
            == samples.rewards[samples.prompt_index == prompt].tolist()
        )


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_parts_are_joined_in_order(seed):
    """Cut into parts and joined: the same; a component that a part lacks is NaN there."""
    samples = with_replies(random_batch(np.random.default_rng(seed)), np.random.default_rng(seed))
    parts = [samples.select_prompts(groups) for groups in ([0, 1], [], [2, 3, 4, 5])]
    first = len(parts[0])
    parts[0].components["length"] = parts[0].own_lengths.float()
    parts[0].compared, parts[2].compared = ["length"], ["vowels", "length"]
    joined = Batch.concatenate(parts)
    assert set(joined.compared) == {"length", "vowels"}
    assert_equal(dataclasses.replace(joined, compared=[]), samples)
    assert joined.components["length"][:first].tolist() == samples.own_lengths[:first].tolist()
    assert joined.components["length"][first:].isnan().all()


def test_a_field_without_a_role_is_an_error_where_it_is_declared():
    """It would be lost where batches are joined, or selected by the wrong index, silently."""
    added = dataclasses.make_dataclass(
        "Batch", [("temperatures", torch.Tensor, dataclasses.field(default=None))], bases=(Batch,)
    )
    with pytest.raises(
        TypeError, match="Batch.temperatures does not say .* annotate it with PerSample"
    ):
        buffers.fields_by_role(added)


# ------------------------------------------------------------------------------------------------
# order, minibatches
def first(count: int, endless) -> list:
    return list(itertools.islice(endless, count))


def order(draws: range, rows: int, seed: int) -> list[int]:
    return first(len(draws), data_order(rows, seed, draws.start))


@pytest.mark.parametrize("rows, per_step", [(7, 3), (10, 10), (1, 2)])
def test_every_row_once_per_epoch_in_another_order(rows, per_step):
    taken = []
    for step in range(6 * rows):
        taken += order(range(step * per_step, (step + 1) * per_step), rows, seed=5)
    epochs = [taken[first : first + rows] for first in range(0, len(taken) - rows + 1, rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert rows < 5 or len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert all(isinstance(row, int) for row in taken)


def test_data_order_depends_on_seed_and_epoch_alone():
    whole = order(range(35), 7, seed=5)
    # other step sizes walk the same sequence
    for size in (1, 4, 7, 20):
        assert (
            sum((order(range(s, min(s + size, 35)), 7, 5) for s in range(0, 35, size)), []) == whole
        )
    np.random.seed(1)
    torch.manual_seed(1)
    # resumed in the middle, other global generators
    assert order(range(28, 35), 7, 5) == whole[28:]
    assert order(range(35), 7, seed=6) != whole


def test_parse_datasets():
    assert parse_datasets("a.jsonl:0.7, b.jsonl:3e-1") == [("a.jsonl", 0.7), ("b.jsonl", 0.3)]
    assert parse_datasets("a.jsonl") == [("a.jsonl", None)]
    assert parse_datasets("") == []
    assert parse_datasets("x:y/a.jsonl,/b.jsonl") == [("x:y/a.jsonl", None), ("/b.jsonl", None)]
    assert parse_datasets("x:y/a.jsonl:2") == [("x:y/a.jsonl", 2.0)]
    assert parse_datasets("a:b.jsonl") == [("a:b.jsonl", None)]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("a.jsonl:1,b.jsonl", "all of them or none"),
        ("a.jsonl:0", "weight above 0"),
        ("a.jsonl:-1", "weight above 0"),
        ("a.jsonl:0.7b,b.jsonl:0.3", "all of them or none"),
    ],
)
def test_bad_datasets(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_datasets(spec)


def test_a_comma_in_the_path_of_rows_is_told(tmp_path):
    (tmp_path / "a,b.jsonl").touch()
    with user_error("this path contains a comma, which separates files"):
        parse_datasets(str(tmp_path / "a,b.jsonl"))


def test_mixture():
    which = np.array(first(1000, mix([0.7, 0.3])))
    for n in (10, 100, 1000):
        assert abs(int((which[:n] == 1).sum()) - 0.3 * n) <= 1
    # the ten are half a draw behind, so all 100 draws are the first's
    for weights in ([0.7, 0.3], [100.0] + [0.49] * 10):
        times = [((j + 0.5) / weight, k) for k, weight in enumerate(weights) for j in range(200)]
        assert first(100, mix(weights)) == [k for _, k in sorted(times)[:100]]
    # sizes as weights: a pass has every prompt once
    assert np.bincount(first(15, mix([9.0, 6.0]))).tolist() == [9, 6]


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1.0, 50.0], [9.0, 6.0]])
def test_rows_of_a_mixture(weights):
    """Cut into batches of any size, and begun at any row, it is the same sequence: per set, its own
    passes in order."""
    sets, seed = [[(k, row) for row in range(size)] for k, size in enumerate((9, 6))], 3
    whole, _ = next(draw_batches(sets, weights, 60, seed))
    for k in (0, 1):
        rows = [row for part, row in whole if part == k]
        assert rows == order(range(len(rows)), len(sets[k]), seed)
    for size, start in ((1, 0), (4, 8), (20, 2), (6, 54)):
        batches = draw_batches(sets, weights, size, seed, start)
        for at in range(start, 60 - size + 1, size):
            assert next(batches) == (whole[at : at + size], list(range(at, at + size)))


@pytest.mark.slow
def test_the_draws_of_a_long_run_are_not_listed():
    """A million rows in: what is ahead is not there yet, and little is kept of what is behind."""
    tracemalloc.start()
    rows, draws = next(draw_batches([range(1000)], [1.0], 4, seed=1, start=1_000_002))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert draws == [1_000_002, 1_000_003, 1_000_004, 1_000_005]
    assert rows == np.random.default_rng([1, 1000]).permutation(1000)[2:6].tolist()
    assert peak < 1e6


@pytest.mark.parametrize("prompts, count", [(12, 4), (6, 1), (5, 5)])
def test_minibatches_are_equal_and_drop_nothing(prompts, count):
    def minibatches(*seed: int) -> list[list[int]]:
        return [
            part.tolist()
            for part in Batch.minibatches(SimpleNamespace(prompts=range(prompts)), count, seed)
        ]

    parts = minibatches(0, 3, 1)
    assert [len(part) for part in parts] == [prompts // count] * count
    assert sorted(sum(parts, [])) == list(range(prompts))
    assert parts == minibatches(0, 3, 1)
    assert parts not in (minibatches(0, 3, 2), minibatches(0, 4, 1), minibatches(1, 3, 1))


def budgeted(rng: np.random.Generator) -> tuple[Batch, int]:
    """Samples with prompts of up to 19 tokens, and a length of packs that holds the longest."""
    prompts = rng.integers(1, 20, 6).tolist()
    return with_prompts(random_batch(rng), prompts), max(prompts) + 9 + int(rng.integers(0, 40))


def test_a_minibatch_keeps_groups_whole():
    samples = random_batch(np.random.default_rng(2))
    for groups in samples.minibatches(3, (0, 0, 0)):
        blocks = make_blocks(samples, 1000, groups)
        members = sorted(i for _, chosen in blocks for i in chosen)
        assert members == [i for i, g in enumerate(samples.prompt_index.tolist()) if g in groups]


# ------------------------------------------------------------------------------------------------
# partition, packs
def block_size(samples: Batch, block) -> int:
    return samples.prompt_lengths[block[0]] + sum(samples.own_lengths.tolist()[i] for i in block[1])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [True, False])
def test_blocks_respect_the_budget_and_lose_nothing(seed, share):
    samples, budget = budgeted(np.random.default_rng(seed))
    blocks = make_blocks(samples, budget if share else 0)
    assert all(
        members and block_size(samples, (prompt, members)) <= budget for prompt, members in blocks
    )
    assert [i for _, members in blocks for i in members] == list(range(len(samples)))
    assert all(samples.prompt_index[i] == prompt for prompt, members in blocks for i in members)
    if not share:
        assert all(len(members) == 1 for _, members in blocks)
        return
    # a split happens only where the next response would not have fitted
    for block, following in zip(blocks, blocks[1:]):
        if block[0] == following[0]:
            assert block_size(samples, block) + int(samples.own_lengths[following[1][0]]) > budget


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_share_where_it_costs_less(seed):
    """The scores of every layout, counted entry by entry: together the rectangle of a response,
    alone its triangle."""
    rng = np.random.default_rng(seed)
    prompts, score_cost = rng.integers(1, 20, 6).tolist(), float(rng.choice([0.01, 0.1, 1]))
    samples = with_prompts(random_batch(rng, longest=40), prompts)
    blocks = make_blocks(samples, 10**6, score_cost=score_cost)
    for index in samples.prompt_index.unique().tolist():
        prompt, lengths = (
            prompts[index],
            samples.own_lengths[samples.prompt_index == index].tolist(),
        )
        together = (
            prompt
            + sum(lengths)
            + score_cost * (prompt**2 / 2 + sum(n * (prompt + n) for n in lengths))
        )
        apart = sum(prompt + n + score_cost * (prompt + n) ** 2 / 2 for n in lengths)
        expected = 1 if together < apart or len(lengths) == 1 else len(lengths)
        assert len([block for block in blocks if block[0] == index]) == expected, (together, apart)
    # for nothing: always together
    shared = make_blocks(samples, 10**6)
    assert len(shared) == len(samples.prompt_index.unique())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bins", [1, 2, 7])
def test_partition_is_complete_and_near_the_optimum(seed, bins):
    """Longest processing time first: at most 4/3 - 1/(3 bins) of the optimum (Graham 1969)."""
    costs = np.random.default_rng(seed).lognormal(0, 1, 40).tolist()
    parts = balanced_partition(range(40), costs, bins)
    assert sorted(i for part in parts for i in part) == list(range(40))
    assert len(parts) == bins
    # no partition is better
    bound = max(sum(costs) / bins, max(costs))
    assert (
        max(sum(costs[i] for i in part) for part in parts)
        <= (4 / 3 - 1 / (3 * bins)) * bound + 1e-9
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("world", [1, 2, 8])
def test_packs_hold_each_block_once_in_equal_number(seed, world):
    """Packs of a rank differ by a block at most; one pack less, and one of them would be too long."""
    samples, budget = budgeted(np.random.default_rng(seed))
    blocks = make_blocks(samples, budget if seed % 2 else 0)
    # the cost is the size
    packs = assign_blocks(samples, blocks, world, budget, hidden_size=10**9)
    assert len(packs) == world
    assert len({len(part) for part in packs}) == 1
    assert sorted(block for part in packs for pack in part for block in pack) == sorted(blocks)
    one_less = []
    for part in packs:
        sizes = [sum(block_size(samples, block) for block in pack) for pack in part]
        largest = max((block_size(samples, block) for pack in part for block in pack), default=0)
        assert max(sizes) <= budget
        assert max(sizes) - min(sizes) <= largest
        assert sizes == sorted(sizes, reverse=True)
        if len(part) > 1:
            one_less.append(sum(sizes) / (len(part) - 1) + largest)
    assert not one_less or max(one_less) > budget


def test_long_rows_cost_more_than_their_tokens():
    """Of 100 tokens in one row and 120 in twelve, a narrow model spends most on the one; a wide one
    shares by tokens."""
    lengths, prompts = [10] + [5] * 12, [90] + [5] * 12
    samples = batch_of(prompts, lengths)
    for hidden, beside in ((1, 0), (10**6, 1)):
        packs = assign_blocks(samples, make_blocks(samples, 200), 2, 200, hidden)
        (first,) = [rank for rank in packs if any(group == 0 for pack in rank for group, _ in pack)]
        assert sum(len(pack) for pack in first) == 1 + beside


def test_a_block_beyond_the_budget_has_a_pack_of_its_own():
    samples = with_prompts(random_batch(np.random.default_rng(0), shortest=1), [30] * 6)
    blocks = make_blocks(samples, 10)
    packs = assign_blocks(samples, blocks, 1, 10, 8)[0]
    assert sorted(block for pack in packs for block in pack) == sorted(blocks)
    assert all(len(pack) == 1 for pack in packs)


def test_many_packs_are_found_in_few_tries(monkeypatch):
    """1,000 blocks of which no two fit together: 1,000 packs, from a first guess of 501; one more
    per try took minutes."""
    samples, tries, partition = batch_of([50] * 1000, [1] * 1000), [], buffers.balanced_partition
    monkeypatch.setattr(
        buffers, "balanced_partition", lambda *args: tries.append(args) or partition(*args)
    )
    packs = assign_blocks(samples, make_blocks(samples, 101), 1, 101, 8)[0]
    assert sum(map(len, packs)) == 1000
    assert max(map(len, packs)) == 1
    assert len(packs) == 1000
    assert len(tries) < 40


# ------------------------------------------------------------------------------------------------
# packs, token by token
def naive_pack(samples: Batch, blocks, positions, image: int) -> dict[str, list]:
    """The pack, token by token; a sample is a list of (token, is it the policy's, offset of its position)."""
    talks, starts = [], samples.offsets.tolist()
    if not len(samples.stream_lengths):
        for tokens in pieces(samples, samples.tokens):
            talks.append([(token, True, [t] * 3) for t, token in enumerate(tokens)])
    else:
        columns = (
            samples.stream.tolist(),
            samples.is_own.tolist(),
            samples.stream_positions.tolist(),
        )
        tokens = iter(zip(*columns))
        talks = [[next(tokens) for _ in range(span)] for span in samples.stream_lengths.tolist()]
    names = (
        "input_ids",
        "positions",
        "segments",
        "image_index",
        "predict",
        "targets",
        "flat",
        "sample",
        "step",
    )
    pack = {name: [] for name in names}
    for index, members in blocks:
        prompt_start = len(pack["input_ids"])
        for t, token in enumerate(samples.prompts[index].input_ids.tolist()):
            if token == image:
                pack["image_index"].append(len(pack["input_ids"]))
            pack["input_ids"].append(token)
            pack["positions"].append(positions[index][:, t].tolist())
        prompt_end = len(pack["input_ids"])
        # one causal segment: prompt and response
        alone = len(members) == 1
        pack["segments"].append(
            (prompt_start, prompt_end + alone * len(talks[members[0]]), prompt_start, prompt_start)
        )
        first = int(positions[index].max()) + 1
        for i in members:
            start, previous, step = len(pack["input_ids"]), prompt_end - 1, 0
            for token, is_own, place in talks[i]:
                if is_own:
                    target = dict(
                        predict=previous, targets=token, flat=starts[i] + step, sample=i, step=step
                    )
                    for name, value in target.items():
                        pack[name].append(value)
                    step += 1
                previous = len(pack["input_ids"])
                pack["input_ids"].append(token)
                pack["positions"].append([first + offset for offset in place])
            if talks[i] and not alone:
                pack["segments"].append((start, len(pack["input_ids"]), prompt_start, prompt_end))
    return pack


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["shared", "alone", "replies"])
def test_packs_equal_loops(seed, kind):
    """Prompts with and without images, whose responses share them or not, or are conversations."""
    rng = np.random.default_rng(seed)
    samples = random_batch(rng)
    # whose images are in test_environments.py
    image = -1 if kind == "replies" else IMAGE
    # a sampled image token is no place of an image
    samples.tokens[rng.random(len(samples.tokens)) < 0.1] = IMAGE
    if kind == "replies":
        samples = with_replies(samples, rng)
    ids = [torch.from_numpy(rng.integers(4, 1000, rng.integers(2, 15))) for _ in range(6)]
    features = {}
    for index in () if kind == "replies" else (0, 2, 5):
        count = int(rng.integers(1, len(ids[index])))
        ids[index][rng.permutation(len(ids[index]))[:count]] = IMAGE
        features["prompt", index] = torch.randn(2, count, 4)
    positions = {i: torch.from_numpy(rng.integers(0, 30, (3, len(ids[i])))) for i in range(6)}
    samples = dataclasses.replace(
        samples, prompts=[SimpleNamespace(input_ids=prompt) for prompt in ids]
    )
    blocks = make_blocks(samples, 0 if kind == "alone" else max(map(len, ids)) + 15)
    for part in assign_blocks(samples, blocks, 1, 60, 8)[0]:
        pack = build_pack(samples, part, positions, features, torch.tensor([image, -1]))
        expected = naive_pack(samples, part, positions, image)
        assert pack.input_ids[0].tolist() == expected["input_ids"]
        assert len(part) == 1 or pack.input_ids.shape[1] <= 60
        assert pack.positions[:, 0].T.tolist() == expected["positions"]
        assert pack.positions.shape[:2] == (3, 1)
        assert pack.segments == expected["segments"]
        for name in ("image_index", "predict", "targets", "flat", "sample", "step"):
            assert getattr(pack, name).tolist() == expected[name], name
        pieces = [features[key] for key in image_keys(part) if key in features]
        assert (pack.features is None) == (not pieces)
        if pieces:
            assert torch.equal(pack.features, torch.cat(pieces, dim=1))
            assert pack.features.shape[1] == len(pack.image_index)


def test_an_empty_pack_is_one_token_that_predicts_nothing():
    pack = build_pack(random_batch(np.random.default_rng(0)), [], {}, {}, torch.tensor([IMAGE, -1]))
    assert pack.input_ids.shape == (1, 1)
    assert pack.positions.shape == (3, 1, 1)
    assert pack.segments == [(0, 1, 0, 0)]
    assert pack.features is None
    assert not len(pack.image_index)
    assert pack.copies.tolist() == [0]
    for name in ("predict", "targets", "flat", "sample", "step"):
        assert getattr(pack, name).shape == (0,) and getattr(pack, name).dtype == torch.int64, name


def test_a_block_of_an_empty_response_alone():
    pack = build_pack(
        batch_of([4], [0]),
        [(0, (0,))],
        {0: torch.arange(4).expand(3, -1)},
        {},
        torch.tensor([IMAGE, -1]),
    )
    assert pack.segments == [(0, 4, 0, 0)]
    assert len(pack.predict) == 0
    assert pack.targets.dtype == torch.int64
    # it is in no sample that trains
    assert pack.copies.tolist() == [0] * 4
