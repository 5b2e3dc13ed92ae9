"""Formulas against golden values (computed by hand or by a python loop), oracles and statistics."""

import math
from types import SimpleNamespace

import pytest
import torch

import train_ppo_vl as ppo
from common import logprobs, losses
from conftest import ROUNDING, rounding, seeded
from helpers import LiveBytes, loss_oracle

MODES = losses.AGGREGATIONS
LENGTHS = torch.tensor([3, 2])
VALUES = torch.tensor([0.1, 0.5, 0.2, 0.3, 0.1])
# packed: sequences of 3 and 2 tokens
LOGP = torch.tensor([-1, -2, -0.5, -1.5, -0.2])
OLD = torch.tensor([-1.2, -1.5, -0.5, -1, -0.9])
ADV = torch.tensor([1, 1, -1, -2, 0.5])
SEQ = torch.tensor([0, 0, 0, 1, 1])
TWO_GROUPS = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


def close(actual, expected, tolerance=rounding(16)):
    actual, expected = (torch.as_tensor(x).double() for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def exponential_noise(vocabulary, keys):
    """(B, V) of the race between the ids."""
    return logprobs._exponentials(keys, logprobs._id_hashes(vocabulary, keys.device))


def estimate(name, scores, group, lengths):
    """(N,) advantages of an estimator that compares samples, without a KL and before whitening."""
    kl = torch.zeros(int(lengths.sum()))
    earned = losses.AdvantageInputs(
        rewards=scores, kl=kl, kl_coef=0.0, lengths=lengths, prompt_index=group
    )
    advantages, returns = ppo.ESTIMATORS[name].estimate(earned)
    assert torch.equal(advantages, returns)
    assert advantages.dtype == scores.dtype
    return advantages


def policy_loss(name, logp, old, adv, seq, n_seq, low, high, dual_clip=0.0, mask=None):
    """Terms of a policy loss, and the sums of its statistics."""
    in_loss = torch.ones_like(adv).bool() if mask is None else mask.bool()
    ratios = losses.PolicyLossInputs(logp, old, adv, seq, n_seq, in_loss)
    clips = (low, high, dual_clip) if name == "ppo" else (low, high)
    output = ppo.POLICY_LOSSES[name].compute(ratios, *clips)
    return output.per_token, losses.ratio_sums(ratios, output) | {
        "ratio_max": losses.largest_ratio(ratios, output)
    }


# Advantages


def test_gae_golden():
    advantages, returns = losses.gae(
        torch.tensor([-0.05, -0.05, 0.95, -0.05, 1.95]), VALUES, LENGTHS, 0.9, 0.95
    )
    close(advantages, [0.53191876, 0.27125, 0.75, 1.32175, 1.85])
    close(returns, [0.63191879, 0.77125, 0.95, 1.62175, 1.95])
    assert advantages.dtype == returns.dtype == torch.float32


def test_whiten():
    std = math.sqrt(7 / 3 + 1e-8)
    close(
        losses.whiten(torch.tensor([1.0, 2, 4])),
        [(1 - 7 / 3) / std, (2 - 7 / 3) / std, (4 - 7 / 3) / std],
    )
    assert not losses.whiten(torch.tensor([3.0])).any()
    assert not losses.whiten(torch.full((192,), 0.1)).any()


GROUP_GOLDEN = {
    "rloo": [2 / 3, -2 / 3, -2 / 3, 2 / 3, -1 / 3, -1 / 3, -1 / 3, 1],
    "reinforce_baseline dr_grpo gpg": [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75],
    "grpo group_norm": [0.866025, -0.866025, -0.866025, 0.866025, -0.5, -0.5, -0.5, 1.5],
}


@pytest.mark.parametrize("names", GROUP_GOLDEN)
def test_group_scores_golden(names):
    scores, group = TWO_GROUPS
    lengths, expected = torch.ones(8, dtype=torch.int64), torch.tensor(GROUP_GOLDEN[names])
    shuffle = torch.tensor([3, 7, 0, 5, 1, 2, 6, 4])
    for name in names.split():
        close(estimate(name, scores, group, lengths), expected, 3e-6)
        close(
            estimate(name, scores[shuffle], group[shuffle] * 5 + 2, lengths),
            expected[shuffle],
            3e-6,
        )


NAN = math.nan
# Of the samples of two prompts; golden values by a loop in float64 with the module statistics.
COMPONENTS = {
    "a": [1, 0, 0, 1, 0, 0, 0, 1],
    "b": [0, 10, 20, NAN, 5, 5, 5, 5],
    "c": [NAN] * 4 + [3, NAN, NAN, NAN],
}
BY_PROMPT = [[2.0] * 4 + [1.0] * 4, [0.5] * 8, [1.0] * 8]
GDPO_GOLDEN = {
    "none": (
        [],
        [-0.166435, -1.07584, 0.166435, 1.07584, -0.621136, -0.621136, -0.621136, 1.863408],
    ),
    "by prompt": (
        BY_PROMPT,
        [0.939589, -1.320901, -0.939589, 1.320901, -0.381311, -0.381311, -0.381311, 1.143933],
    ),
}


@pytest.mark.parametrize("name", GDPO_GOLDEN)
def test_gdpo_golden(name):
    """NaN, a component without spread and one that a single sample has count 0; the KL to go comes
    last, as for grpo."""
    weights, expected = GDPO_GOLDEN[name]
    components = {
        key: torch.tensor(values, dtype=torch.float32) for key, values in COMPONENTS.items()
    }
    _, group = TWO_GROUPS
    earned = losses.AdvantageInputs(
        rewards=torch.full((8,), 7.0),
        kl=torch.arange(16) / 10,
        kl_coef=0.1,
        lengths=torch.full((8,), 2),
        prompt_index=group,
        components=components,
        weights=torch.tensor(weights).T if weights else losses.NO_VALUES,
    )
    advantages, returns = losses.gdpo(earned)
    to_go = [[0.1 * (4 * i + 1) / 10, 0.1 * (2 * i + 1) / 10] for i in range(8)]
    close(advantages, [value - kl for value, pair in zip(expected, to_go) for kl in pair], 2e-6)
    assert torch.equal(advantages, returns)
    assert advantages.dtype == torch.float32


@pytest.mark.parametrize(
    "estimator", ["grpo", "gdpo", "dr_grpo", "rloo", "reinforce_baseline", "opo", "gpg", "cpgd"]
)
def test_equal_scores_give_exactly_zero(estimator):
    """With an epsilon of 1e-9 on the standard deviation, eight equal scores of 0.1 came out as
    -0.83 in float32."""
    one_group = torch.zeros(8, dtype=torch.int64)
    for lengths in (torch.arange(8), torch.zeros(8, dtype=torch.int64)):
        result = estimate(estimator, torch.full((8,), 0.1), one_group, lengths)
        assert result.tolist() == [0.0] * int(lengths.sum())
    # one that is compared with no other
    if estimator not in ("gdpo", "cpgd"):
        assert (
            estimate(
                estimator,
                torch.tensor([5.0, 1, 1]),
                torch.tensor([4, 7, 7]),
                torch.ones(3, dtype=torch.int64),
            ).tolist()
            == [0.0] * 3
        )


def turns_of(*samples: tuple[int, list[list[float]]]) -> losses.AdvantageInputs:
    """Samples as (prompt, of each turn the rewards of its tokens)."""
    lengths = torch.tensor([sum(map(len, turns)) for _, turns in samples])
    ends = [n == len(turn) - 1 for _, turns in samples for turn in turns for n in range(len(turn))]
    rewards = [reward for _, turns in samples for turn in turns for reward in turn]
    generator = seeded(0)
    kl, values = torch.rand(2, len(rewards), generator=generator)
    return losses.AdvantageInputs(
        torch.tensor([sum(map(sum, turns)) for _, turns in samples]),
        kl,
        0.3,
        lengths,
        torch.tensor([prompt for prompt, _ in samples]),
        turn_ends=torch.tensor(ends),
        turn_rewards=torch.tensor(rewards),
        values=values,
        gamma=0.9,
        turn_gamma=0.8,
        gae_lambda=0.7,
    )


TURNS = (
    (3, [[0.0, 1.0], [0.5], [0.0, 0.0, 2.0]]),
    (3, [[0.0, 0.0, -1.0]]),
    (3, [[0.25, 0.5], [1.0, 0.0]]),
    (5, [[1.0], [3.0]]),
    (5, [[1.0], [0.0]]),
)


def test_bi_level_gae():
    """By a loop over turns from the last to the first, and over the tokens of each, as in the
    paper's algorithm."""
    x = turns_of(*TURNS)
    advantages, returns = losses.bi_level_gae(x)
    rewards, place, expected = (x.turn_rewards - 0.3 * x.kl).tolist(), len(x.kl), []
    values = x.values.tolist()
    for _, turns in reversed(TURNS):
        of_turn = following = 0.0
        for turn in reversed(turns):
            place -= len(turn)
            last = place + len(turn) - 1
            of_turn = rewards[last] + 0.8 * following - values[last] + 0.8 * 0.7 * of_turn
            following = values[last]
            advantage, tokens = of_turn, [of_turn]
            for n in reversed(range(place, last)):
                advantage = rewards[n] + 0.9 * values[n + 1] - values[n] + 0.9 * 0.7 * advantage
                tokens.insert(0, advantage)
            expected = tokens + expected
    close(advantages, expected, 2e-6)
    close(returns, x.values + torch.tensor(expected), 2e-6)


def test_what_values_of_turns_are_compared_with():
    """With values of 0 and lambda 1: of each token the later rewards of its turn, discounted by
    tokens, and of each later turn the reward at its last token, discounted by turns; rewards within
    later turns are their own turns' affair."""
    x = turns_of(*TURNS)
    x.kl_coef = 0.0
    args = SimpleNamespace(advantage="bi_level_gae")
    expected = []
    for _, turns in TURNS:
        for k, turn in enumerate(turns):
            later = sum(0.8 ** (j + 1) * other[-1] for j, other in enumerate(turns[k + 1 :]))
            for n in range(len(turn)):
                within = sum(0.9 ** (m - n) * turn[m] for m in range(n, len(turn)))
                expected.append(within + 0.9 ** (len(turn) - 1 - n) * later)
    close(ppo.rewards_that_follow(x, args), expected, 2e-6)
    args.advantage = "gae"
    assert torch.equal(ppo.rewards_that_follow(x, args), x.rewards_to_go)


def test_turn_grpo():
    """By a loop: of each turn the reward against the same turn of the prompt's other samples, if
    there is one."""
    x = turns_of(*TURNS)
    expected = []
    kl = iter(x.kl.tolist())
    for prompt, turns in TURNS:
        of_turns = []
        for k, turn in enumerate(turns):
            others = torch.tensor(
                [sum(t[k]) for p, t in TURNS if p == prompt and len(t) > k], dtype=torch.float64
            )
            spread = len(others) > 1 and float(others.max() - others.min()) > 0
            of_turns.append(
                (sum(turn) - float(others.mean())) / (float(others.std()) + 1e-6) if spread else 0.0
            )
        cost = [next(kl) for turn in turns for _ in turn]
        numbers = [k for k, turn in enumerate(turns) for _ in turn]
        expected += [sum(of_turns[k:]) - 0.3 * sum(cost[n:]) for n, k in enumerate(numbers)]
    close(losses.turn_grpo(x)[0], expected, 2e-6)


def test_a_baseline_weighted_by_no_tokens_is_finite():
    empty = torch.zeros(3, dtype=torch.int64)
    assert losses.centre(torch.tensor([0.0, 1, 1]), empty, weight=empty.double()).isfinite().all()


def test_overlong_penalty():
    close(losses.overlong_penalty(torch.tensor([0, 80, 85, 100]), 100, 20, 2.0), [0, 0, -0.5, -2])


def test_running_moments_and_score_normalisation():
    moments = losses.RunningMoments()
    moments.update(torch.tensor([7.0]))
    # one value has no spread
    assert (moments.mean, moments.std) == (7.0, 1.0)
    moments = losses.RunningMoments()
    moments.update(torch.tensor([1.0, 2, 3]))
    resumed = losses.RunningMoments(**vars(moments))
    resumed.update(torch.tensor([4.0, 5]))
    assert resumed.mean == pytest.approx(3)
    assert resumed.std == pytest.approx(1.5811388)
    close(resumed.normalize(torch.tensor([3.0, 4.0])), [0, 1 / 1.5811388])
    assert resumed.count == 5  # it only reads them
    flat = losses.RunningMoments()
    flat.update(torch.full((4,), 0.1))
    close(flat.normalize(torch.full((4,), 0.1)), [0] * 4)  # not 0 / 0


@pytest.mark.parametrize("kl, factor", [(2.2, 1 + 0.1 * 0.1), (99.0, 1.02), (0.0, 0.98)])
def test_the_weight_of_the_kl_adapts(kl, factor):
    """Towards a KL of 2 per token, after 100 samples of a horizon of 1000; by at most a fifth of
    their share."""
    assert losses.adapt_kl_coef(0.1, kl, 2.0, samples=100, horizon=1000) == pytest.approx(
        0.1 * factor
    )


def test_explained_variance():
    returns = torch.tensor([1.0, 2, 3, 4])
    assert losses.explained_variance(returns, returns) == 1
    close(losses.explained_variance(torch.zeros(4), returns), 0)
    close(losses.explained_variance(returns / 2, returns), 0.75)
    assert (
        losses.explained_variance(returns, torch.ones(4))
        == losses.explained_variance(returns[:1], returns[:1])
        == 0
    )


# Losses


def packed_loss(name, clip_low=None, clip_high=None, mask=None, logp=LOGP, **options):
    low, high = ppo.POLICY_LOSSES[name].clip
    terms, stats = policy_loss(
        name,
        logp,
        OLD,
        ADV,
        SEQ,
        2,
        low if clip_low is None else clip_low,
        high if clip_high is None else clip_high,
        mask=mask,
        **options,
    )
    mask = torch.ones(5) if mask is None else mask.float()
    lengths = torch.zeros(2).index_add(0, SEQ, mask).long()
    weights = losses.token_weights(lengths, "seq-mean-token-mean", 8)[SEQ]
    return (terms * weights * mask).sum(), stats


def test_policy_loss_golden():
    loss, stats = packed_loss("ppo", dual_clip=3.0)
    close(loss, 0.11557822)
    assert [int(stats[k]) for k in ("clipped_high", "clipped_low", "clipped_dual")] == [2, 1, 0]
    close(stats["approx_kl"], sum(math.expm1(d) - d for d in (0.2, -0.5, 0, -0.5, 0.7)))
    close(stats["ratio"], sum(map(math.exp, (0.2, -0.5, 0, -0.5, 0.7))))
    close(stats["ratio_max"], math.exp(0.7))
    close(packed_loss("cpgd")[0], -0.10224888, 2e-7)
    # a high-entropy mask
    keep = torch.tensor([0, 1, 0, 0, 1]).bool()
    loss, stats = packed_loss("ppo", mask=keep)
    close(loss, -0.60326535)
    assert int(stats["clipped_high"]) == 1
    assert int(stats["clipped_low"]) == 0
    # gspo: one ratio, not rounded like logp
    logp, old = torch.tensor([-60, -0.5]), torch.tensor([-60, -0.5000036])
    _, stats = policy_loss("gspo", logp, old, torch.ones(2), torch.tensor([0, 0]), 1, 3e-4, 4e-4)
    close(stats["ratio"], 2 * math.exp(1.8e-6), 3e-7)


@pytest.mark.parametrize("name", ["ppo", "gspo", "cpgd", "gmpo"])
def test_advantages_that_are_rounding_are_not_counted_as_clipped(name):
    """A prompt whose samples earn the same has advantages of 0; whitening makes them rounding of
    either sign."""
    logp, old = torch.tensor([1.0, -1.0] * 4), torch.zeros(8)
    adv, counts = torch.tensor([0.5, -0.5, 1e-9, 1e-9, -1e-9, -1e-9, 0.0, 0.0]), []
    for sign in (1.0, -1.0):
        _, stats = policy_loss(
            name, logp, old, sign * adv, torch.arange(8), 8, 0.2, 0.2, dual_clip=2.0
        )
        counts.append([int(stats[f"clipped_{side}"]) for side in ("high", "low", "dual")])
    assert counts == [[1, 1, 0], [0, 0, int(name == "ppo")]]


@pytest.mark.parametrize("name", ppo.POLICY_LOSSES)
def test_policy_loss_equals_the_formula_of_a_sequence(name):
    """Value and gradient, whatever else is in the pack."""
    g = seeded(3)
    sizes, low, high = [4, 1, 7, 5], *ppo.POLICY_LOSSES[name].clip
    old = -torch.rand(17, generator=g) * 3
    logp = (old + torch.randn(17, generator=g) * 0.8).requires_grad_()
    adv = torch.randn(17, generator=g)
    adv[3] = 0
    # sparse, unordered indices
    seq = torch.tensor([5, 1, 0, 2]).repeat_interleave(torch.tensor(sizes))
    terms, stats = policy_loss(name, logp, old, adv, seq, 7, low, high, 2.0)
    for i in (5, 1, 0, 2):
        actual = terms[seq == i].mean()
        expected = loss_oracle(name, logp[seq == i], old[seq == i], adv[seq == i], low, high, 2.0)
        close(actual, expected, ROUNDING)
        ours, theirs = (
            torch.autograd.grad(loss, logp, retain_graph=True)[0] for loss in (actual, expected)
        )
        close(ours, theirs, ROUNDING)
    assert all(x.ndim == 0 and not x.requires_grad and torch.isfinite(x) for x in stats.values())


@pytest.mark.parametrize("name", ppo.POLICY_LOSSES)
def test_policy_loss_survives_extremes_and_nothing(name):
    logp = torch.tensor([-300.0, -0.1, -300, -0.1], requires_grad=True)
    low, high = ppo.POLICY_LOSSES[name].clip
    old, adv = torch.tensor([-0.1, -300, -0.1, -300]), torch.tensor([1.0, 1, -1, -1])
    terms, stats = policy_loss(name, logp, old, adv, torch.arange(4), 4, low, high, 3.0)
    terms.sum().backward()
    assert terms.isfinite().all()
    assert logp.grad.isfinite().all()
    assert all(x.isfinite() for x in stats.values())
    close(stats["ratio_max"] / math.exp(10 if name == "gspo" else 20), 1, ROUNDING)
    # KL(old, new) is not clamped, or it would look like 10; two of four tokens have all of it.
    close(stats["approx_kl"] / (2 * math.expm1(300 - 0.1)), 1, 1e-4)
    none = torch.zeros(0)
    terms, stats = policy_loss(name, none, none, none, none.long(), 4, low, high, 3.0)
    assert terms.shape == (0,)
    assert stats["ratio_max"] == 0


def test_token_weights_table():
    lengths = torch.tensor([3, 0, 2])
    expected = {
        "token-mean": [1 / 5, 0, 1 / 5],
        "seq-mean-token-sum": [1 / 2, 0, 1 / 2],
        "seq-mean-token-mean": [1 / 6, 0, 1 / 4],
        "seq-mean-token-sum-norm": [1 / 20, 0, 1 / 20],
        "token-sum": [1, 0, 1],
    }
    assert expected.keys() == set(MODES)
    for mode in MODES:
        close(losses.token_weights(lengths, mode, 10), expected[mode])
        assert not losses.token_weights(torch.zeros(2, dtype=torch.int64), mode, 10).any()


def test_high_entropy_mask():
    entropy, lengths = torch.tensor([1.0, 5, 2, 2, 4, 7, 7, 7, 7]), torch.tensor([3, 0, 2, 4])
    mask = losses.high_entropy_mask(entropy, lengths, 0.5)
    assert mask.nonzero()[:, 0].tolist() == [1, 4, 5, 6]
    assert losses.high_entropy_mask(entropy, lengths, 0.01).sum() == 3  # at least one of each
    assert losses.high_entropy_mask(entropy, lengths, 1.0).all()


# Perception: responses of 3, 0, 2, 2 and 1 tokens, of which the third is to no image
SEEN_LENGTHS = torch.tensor([3, 0, 2, 2, 1])
SEEN_OLD = torch.tensor([-1.2, -1.5, -0.5, -1, -0.9, -0.3, -0.2, -2])
SEEN_MASKED = torch.tensor([-2.2, -1.4, -0.5, NAN, NAN, -4, -0.1, 3])
# by a loop of Python's math in float64: exp(masked - old) - (masked - old) - 1, of the last one above 10
SEEN_GOLDEN = [0.36787944117, 0.00517091808, 0, NAN, NAN, 2.72472352647, 0.00517091808, 10]


def same(actual, expected, tolerance=2e-6):
    """Close, and NaN where NaN is expected."""
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected).double(), rtol=0, atol=tolerance, equal_nan=True
    )


def test_perception_golden():
    same(losses.perception(SEEN_OLD, SEEN_MASKED), SEEN_GOLDEN)
    apart = torch.tensor([0.0, 0.0, 500.0])
    # finite, and exact near 0
    same(losses.perception(apart, torch.tensor([1e-4, -500.0, 0.0])), [5e-9, 10, 10], 1e-11)


def test_perception_chooses_tokens_of_each_response():
    """ceil(ratio * n), as in the authors' code; the first of equal ones; all of a response to no image."""
    seen = losses.perception(SEEN_OLD, SEEN_MASKED)
    for ratio, chosen in (
        (0.4, [0, 1, 3, 4, 5, 7]),
        (0.3, [0, 3, 4, 5, 7]),
        (0.7, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1e-6, [0, 3, 4, 5, 7]),
    ):
        mask = losses.perception_mask(seen, SEEN_LENGTHS, ratio)
        assert mask.nonzero()[:, 0].tolist() == chosen, ratio
    assert losses.perception_mask(seen, SEEN_LENGTHS, 1.0).all()
    # not one more by rounding
    for ratio, length, count in ((0.7, 10, 7), (0.6, 25, 15), (0.3, 50, 15), (0.07, 100, 7)):
        even = losses.perception_mask(torch.ones(length), torch.tensor([length]), ratio)
        assert even.nonzero()[:, 0].tolist() == list(range(count))


def test_perception_factors_golden():
    """By the same loop: means .12435012, 1.36494722 and 10, so quotients 0, .1256202 and 1, and a
    largest factor of 1.16651935."""
    seen = losses.perception(SEEN_OLD, SEEN_MASKED)
    factors = losses.perception_factors(seen, SEEN_LENGTHS, 0.9)
    same(factors, [0.9, 1, 1, 0.93348064606, 1.16651935394])
    assert factors[[0, 3, 4]].mean() == pytest.approx(1)
    assert losses.perception_factors(seen, SEEN_LENGTHS, 1.0).tolist() == [1.0] * 5
    for flat in (
        torch.full((8,), 0.1),
        torch.full((8,), NAN),
        torch.full((8,), 0.1) + torch.arange(8) * 1e-9,
    ):
        assert losses.perception_factors(flat, SEEN_LENGTHS, 0.5).tolist() == [1.0] * 5
    one = torch.zeros(1000)
    # bounded: low + (1 - low) * S, and the others low
    one[7] = 10.0
    factors = losses.perception_factors(one, torch.ones(1000, dtype=torch.int64), 0.9)
    assert factors[7] == pytest.approx(0.9 + 0.1 * 1000)
    assert factors.mean() == pytest.approx(1)


def test_perception_kl_and_its_gradient_golden():
    """PAPO's term, by the same loop: its derivative is 1 - exp(masked - logp), and 0 where the
    value is clamped at 10 or where there is no image."""
    logp = LOGP.clone().requires_grad_()
    terms = losses.perception_kl(logp, torch.tensor([-1.5, -1.2, NAN, 4.0, -0.2]))
    close(terms.detach(), [0.10653065971, 0.42554092849, 0, 10, 0], 1e-6)
    terms.sum().backward()
    close(logp.grad, [0.39346934029, -1.22554092849, 0, 0, 0], 1e-6)


def test_value_loss_golden():
    old = torch.tensor([0, 0, 0.1, 0.2, 0.2])
    values, returns = VALUES, torch.tensor([1.0, 1, 1, 0, 0])
    weights = losses.token_weights(torch.tensor([3, 2]), "seq-mean-token-mean", 3)[SEQ]
    close((weights * losses.value_loss(values, old, returns, 0.2)).sum(), 0.18666668)
    close((weights * losses.value_loss(values, old, returns, 0)).sum(), 0.15416667)


def test_kl_golden_and_straight_through_gradients():
    golden = dict(
        k1=[0.2, -0.5, 0, -0.5, 0.7],
        k2=[0.02, 0.125, 0, 0.125, 0.245],
        abs=[0.2, 0.5, 0, 0.5, 0.7],
        k3=[0.01873076, 0.14872122, 0, 0.14872122, 0.1965853],
    )
    for kind, values in golden.items():
        logp = LOGP.clone().requires_grad_()
        close(losses.kl_penalty(kind, logp, OLD), values)
        straight = losses.kl_penalty(kind + "+", logp, OLD)
        close(straight, values)
        # the gradient of k2
        close(torch.autograd.grad(straight.sum(), logp)[0], LOGP - OLD)
    small = losses.kl_penalty("k3", torch.tensor([1e-4]), torch.zeros(1))
    # the literal form gives 0 or 1e-8
    torch.testing.assert_close(small, torch.tensor([5e-9]), rtol=2e-3, atol=0)
    assert losses.kl_penalty("k3", torch.tensor([-90.0]), torch.zeros(1)) == 10
    with pytest.raises(ValueError, match="'other'"):
        losses.kl_penalty("other", LOGP, OLD)


def test_where_an_estimator_has_the_gradient_of_the_kl():
    """Exact expectations over five tokens. As a reward k1 alone has it, and the exact KL has none;
    as a loss k2 and ``+``."""
    ref = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64).log()
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    kl = (logp.exp() * (logp - ref)).sum()
    expected, as_reward, as_loss = gradient(kl), [], []
    for kind in ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"):
        estimates = losses.kl_penalty(kind, logp, ref)
        if torch.allclose(
            gradient((logp.exp() * estimates.detach()).sum()), expected, rtol=1e-9, atol=1e-12
        ):
            as_reward.append(kind)
        if torch.allclose(
            gradient((logp.exp().detach() * estimates).sum()), expected, rtol=1e-9, atol=1e-12
        ):
            as_loss.append(kind)
    assert as_reward == ["k1", "k1+"]
    assert as_loss == ["k2", "k1+", "k3+", "abs+"]
    # one number for all samples
    assert gradient((logp.exp() * kl.detach()).sum()).abs().max() < 1e-12


# Log-probs


def head_case(n=13, vocab=17, dim=5, dtype=torch.float64, seed=0):
    g = seeded(seed)
    hidden, weight = (
        torch.randn(*s, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for s in ((n, dim), (vocab, dim))
    )
    banned = torch.zeros(vocab, dtype=torch.bool)
    banned[[3, 8]] = True
    return (
        hidden,
        weight,
        9 + torch.randint(vocab - 9, (n,), generator=g),
        banned,
        torch.arange(n) < 4,
    )


def naive_distribution(hidden, weight, temperature, banned, early, ids, softcap=None):
    logits = hidden.double() @ weight.double().t()
    logits = (logits if softcap is None else softcap * (logits / softcap).tanh()) / temperature
    out = (
        torch.zeros_like(logits, dtype=torch.bool)
        if banned is None
        else banned.expand_as(logits).clone()
    )
    if early is not None:
        for row in early.nonzero()[:, 0].tolist():
            out[row, ids] = True
    logp = logits.masked_fill(out, -1e300).log_softmax(-1)
    return torch.where(out, -math.inf, logp), out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"banned": True},
        {"early": True},
        {"temperature": 1.3, "banned": True, "early": True},
        {"temperature": 1.3, "banned": True, "early": True, "softcap": 2.0},
    ],
)
@pytest.mark.parametrize("chunk", [5, 100])
def test_linear_logprobs_equal_naive_values_and_gradients(options, chunk):
    hidden, weight, targets, banned, early = head_case()
    banned = banned if "banned" in options else None
    early, ids = (early, torch.tensor([1, 2])) if "early" in options else (None, None)
    temperature, softcap = options.get("temperature", 1.0), options.get("softcap")
    logp, out = naive_distribution(hidden, weight, temperature, banned, early, ids, softcap)
    entropy = -torch.where(out, 0.0, logp.exp() * logp.masked_fill(out, 0)).sum(-1)
    expected = logp.gather(1, targets[:, None])[:, 0], entropy
    head = dict(temperature=temperature, banned=banned, early=early, early_banned=ids, chunk=chunk)
    head["softcap"] = softcap
    actual = logprobs.linear_logprobs(hidden, weight, targets, entropy=True, **head)
    only, no_entropy = logprobs.linear_logprobs(hidden, weight, targets, **head)
    assert no_entropy is None
    close(only, expected[0], 1e-12)
    upstream = torch.randn(len(targets), generator=seeded(9), dtype=torch.float64)
    for ours, theirs in zip(actual, expected):
        close(ours, theirs, 1e-12)
        grads = [
            torch.autograd.grad(x, (hidden, weight), upstream, retain_graph=True)
            for x in (ours, theirs)
        ]
        for a, b in zip(*grads):
            close(a, b, 1e-11)


def test_linear_logprobs_of_banned_targets_and_of_nothing():
    hidden, weight, targets, banned, _ = head_case(dtype=torch.float32)
    targets[2] = 8
    logp, entropy = logprobs.linear_logprobs(
        hidden, weight, targets, banned=banned, entropy=True, chunk=256
    )
    assert logp.dtype == entropy.dtype == torch.float32
    assert logp[2] == -math.inf
    assert logp[:2].isfinite().all()
    assert entropy.isfinite().all()
    (grad,) = torch.autograd.grad(logp[3:].sum() + entropy.sum(), weight)
    assert grad.isfinite().all()
    assert not grad[banned].any()

    logp, entropy = logprobs.linear_logprobs(
        hidden[:0], weight, targets[:0], entropy=True, chunk=256
    )
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("function", ["linear_logprobs", "full_kl"])
def test_memory_does_not_grow_with_tokens_times_vocabulary(function):
    """Four times the tokens, 64 to 256: full logits of the others would be 768,000 bytes, forward
    and backward."""
    chunk, vocab, peaks = 8, 1000, []
    for n in (64, 256):
        hidden, weight, targets, banned, early = head_case(n, vocab, 4, torch.float32)
        options = dict(
            temperature=0.7, banned=banned, early=early, early_banned=torch.tensor([1]), chunk=chunk
        )
        with LiveBytes() as live:
            if function == "full_kl":
                result = logprobs.full_kl(
                    hidden, hidden.detach() + 1, weight, weight.detach(), **options
                )
            else:
                result = sum(
                    logprobs.linear_logprobs(hidden, weight, targets, entropy=True, **options)
                )
            result.sum().backward()
        peaks.append(live.peak)
    assert peaks[0] < 8 * chunk * vocab * 4
    # 100 bytes for each token
    assert peaks[1] - peaks[0] < 192 * 100


@pytest.mark.parametrize("softcap, ref_softcap", [(None, None), (2.0, 3.0), (None, 2.0)])
@pytest.mark.parametrize("chunk", [3, 100])
def test_full_kl_equals_naive(chunk, softcap, ref_softcap):
    hidden, weight, _, banned, early = head_case()
    ref_hidden, ref_weight, *_ = head_case(seed=1)
    ids = torch.tensor([1, 2])
    logp, out = naive_distribution(hidden, weight, 0.7, banned, early, ids, softcap)
    ref, _ = naive_distribution(ref_hidden, ref_weight, 0.7, banned, early, ids, ref_softcap)
    expected = (logp.exp() * (logp.masked_fill(out, 0) - ref.masked_fill(out, 0).detach())).sum(-1)
    actual = logprobs.full_kl(
        hidden,
        ref_hidden,
        weight,
        ref_weight,
        temperature=0.7,
        banned=banned,
        early=early,
        early_banned=ids,
        softcap=softcap,
        ref_softcap=ref_softcap,
        chunk=chunk,
    )
    close(actual, expected, 1e-12)
    upstream = torch.randn(len(actual), generator=seeded(2), dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad(kl, (hidden, weight), upstream) for kl in (actual, expected)
    )
    for a, b in zip(ours, theirs):
        close(a, b, 1e-11)
    assert not logprobs.full_kl(hidden, hidden, weight, weight, banned=banned, chunk=256).any()


def test_draws_on_a_gpu(device):
    index = torch.arange(2000)
    keys = noise_keys(1, 2, index, index % 4, index % 7)
    assert torch.equal(
        keys, noise_keys(1, 2, *(x.to(device) for x in (index, index % 4, index % 7))).cpu()
    )
    close(
        exponential_noise(500, keys.to(device)).cpu().log(),
        exponential_noise(500, keys).log(),
        ROUNDING,
    )
    logits = torch.randn(2000, 500, generator=seeded(0))
    same = logprobs.gumbel_race(logits.to(device), keys.to(device)).cpu() == logprobs.gumbel_race(
        logits, keys
    )
    assert same.float().mean() > 0.999


# Sampling noise


def noise_keys(seed, stream, draw, sample, position):
    return logprobs.token_keys(logprobs.sequence_keys(seed, stream, draw, sample), position)


def keys_of(n, seed=0, stream=0):
    """Keys as neighbours in a rollout have them: draw, sample and position are small counts."""
    index = torch.arange(n)
    return noise_keys(seed, stream, index // 400, index // 50 % 8, index % 50)


def test_hashes_equal_big_integer_arithmetic():
    def mix64(x):
        for constant in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ x >> 33) * constant % 2**64
        return x ^ x >> 33

    def mix32(x):
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        return (x ^ x >> 13) * 0xC2B2AE35 % 2**32

    signed = lambda x: x - 2**64 if x >= 2**63 else x  # noqa: E731
    key = 7
    for part in (3, 11, 5, 100):
        key = mix64((key + 0x9E3779B97F4A7C15) % 2**64) ^ part
    actual = noise_keys(7, 3, torch.tensor([11]), torch.tensor([5]), torch.tensor([100]))
    assert actual.tolist() == [signed(mix64(key))]
    mixed = mix64(int(actual) % 2**64)
    x = [
        mix32((mix32(v + 1) * (mixed >> 32 | 1) + mixed % 2**32) % 2**32) % 2**31 for v in range(50)
    ]
    expected = -torch.log1p(-(torch.tensor(x).double() + 0.5) / 2**31)
    torch.testing.assert_close(
        exponential_noise(50, actual)[0].double(), expected, rtol=rounding(16), atol=0
    )


def test_a_draw_does_not_depend_on_torchs_default_type():
    """A user's program may have changed it in another thread, as loading a model does for a while."""
    expected = exponential_noise(77, keys_of(64))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(exponential_noise(77, keys_of(64)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_draw_depends_on_its_key_only():
    keys, logits = keys_of(64), torch.randn(64, 77, generator=seeded(0))
    noise, ids = exponential_noise(77, keys), logprobs.gumbel_race(logits, keys)
    order = torch.randperm(64, generator=seeded(1))
    assert torch.equal(logprobs.gumbel_race(logits[order], keys[order]), ids[order])
    assert torch.equal(exponential_noise(77, keys[17:18])[0], noise[17])
    # the vocabulary's padding
    torch.testing.assert_close(exponential_noise(500, keys)[:, :77], noise)
    distinct = set()
    # each part by itself, and none
    for change in torch.eye(6, dtype=torch.int64)[:, :5]:
        seed, stream, *index = change + 5
        distinct.add(int(noise_keys(int(seed), int(stream), *(part[None] for part in index))))
    assert len(distinct) == 6
    assert keys_of(200_000).unique().numel() == 200_000
    assert logprobs._id_hashes(200_000, torch.device("cpu")).unique().numel() == 200_000


def chi_square_z(observed, expected):
    """Standard score of the chi-square statistic, by the cube-root normal approximation of Wilson
    and Hilferty."""
    df = len(expected) - 1
    per_df = float(((observed - expected) ** 2 / expected).sum()) / df
    return (per_df ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


@pytest.mark.parametrize(
    "logits",
    [
        torch.linspace(0, -6, 30),
        torch.tensor([3.0, 0, -math.inf, 1, -math.inf]),
        torch.randn(100, generator=seeded(4)),
    ],
)
def test_draws_follow_the_softmax(logits):
    n, probs = 200_000, logits.double().softmax(0)
    ids = logprobs.gumbel_race(logits.expand(n, -1), keys_of(n))
    observed = torch.bincount(ids, minlength=len(logits)).double()
    assert not observed[probs == 0].any()
    assert abs(chi_square_z(observed[probs > 0], n * probs[probs > 0])) < 4


@pytest.mark.slow
def test_unlikely_tokens_are_drawn_as_often_as_they_should():
    """2^16 tokens that share a mass of 1e-2: with 23 bits of noise the draws of such tokens would
    be quantised."""
    vocab, n = 2**16 + 1, 1000
    logits = torch.full((vocab,), math.log(0.01 / 2**16))
    logits[0] = math.log(0.99)
    drawn = sum(
        int((logprobs.gumbel_race(logits.expand(100, -1), keys) > 0).sum())
        for keys in keys_of(n).split(100)
    )
    assert abs(drawn - 10) < 4 * math.sqrt(10)
    quantile = (exponential_noise(20_000, keys_of(1000)) < 1e-6).float().sum()  # expect 20
    assert abs(quantile - 20) < 4 * math.sqrt(20)


@pytest.mark.parametrize("bits", [0, -1])
def test_noise_is_finite_at_both_ends(monkeypatch, bits):
    # fills the cache of id hashes
    assert exponential_noise(3, keys_of(1)).shape == (1, 3)
    monkeypatch.setattr(logprobs, "_mix32_", lambda x: torch.full_like(x, bits))
    noise = exponential_noise(3, keys_of(1))
    assert (noise > 0).all()
    assert (noise < 20).all()
