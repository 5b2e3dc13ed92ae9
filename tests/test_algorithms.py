"""Every estimator, loss, KL and shaping flag reaches all of the mathematics: written out again, per
sample and per token.

The formulas of common/losses.py have their own oracles in test_losses.py; here the flags of the
script are followed from the command line to the advantages and to the gradient."""

import dataclasses
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import train_ppo_vl as ppo
from common import losses
from common.buffers import Batch
from common.data.loader import PromptLoader
from common.model import packs
from common.rewards import sources
from conftest import (
    ROUNDING,
    assert_same_records,
    computing,
    hugging_face,
    logits_of,
    read_json,
    read_rows,
    records,
    reproducible,
    rounding,
    start,
    take,
    token_logprobs,
    with_flags,
    words,
    write_rows,
)
from helpers import (
    Caught,
    gradient,
    hand_batch,
    loss_oracle,
    random_batch,
    samples_of,
    samples_of_steps,
)

pytestmark = pytest.mark.usefixtures("write_samples")

SCORES = [1.0, 0.0, 0.5, 0.0, 2.0, 2.0, 2.0, 2.0, -1.0, 3.0, 0.0, 0.25, 0.1, 0.1, 0.0, 0.7]


@pytest.fixture(scope="module")
def env(qwen25, picture_rows):
    env = start(qwen25, picture_rows, "--kl_coef 0.1 --samples_per_prompt 4")
    env.batch = hand_batch(env)
    env.batch.rewards = torch.tensor(SCORES)
    env.batch.greedy_rewards = torch.tensor([0.5, 1.0, -1.0, 0.2]).repeat_interleave(4)
    env.batch.greedy_lengths = torch.full((16,), 11)
    return env


def copied(env) -> Batch:
    """The samples, whose columns a test may replace."""
    return dataclasses.replace(env.batch)


def state_of(
    env, kl_coef: float = 0.1, moments: losses.RunningMoments | None = None
) -> ppo.TrainState:
    """The state of a run with this weight of the KL and these moments of the rewards."""
    history = torch.zeros(2, len(env.prompts))
    return ppo.TrainState(kl_coef, moments or losses.RunningMoments(), history=history)


def advantages(
    env, moments: losses.RunningMoments | None = None, count: int = 16, **changes
) -> list[list[float]]:
    """By sample, of a copy of the first samples."""
    batch = env.batch.select(torch.arange(count))
    ppo.compute_advantages(batch, state_of(env, moments=moments), with_flags(env.args, **changes))
    return [part.tolist() for part in batch.split(batch.advantages)]


def to_go(rewards: list[list[float]], gamma: float) -> list[list[float]]:
    return [
        [sum(gamma ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))]
        for row in rewards
    ]


def rewards_of(scores: list[float], kl: list[list[float]], beta: float) -> list[list[float]]:
    """Of each token: -beta times its KL, and of each sample's last one its score, too."""
    rewards = [[-beta * k for k in row] for row in kl]
    for row, score in zip(rewards, scores):
        if row:
            row[-1] += score
    return rewards


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = np.array([x for row in rows for x in row])
    return [[(x - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8) for x in row] for row in rows]


def expected(
    name: str,
    scores: list[float],
    kl: list[list[float]],
    lengths: list[int],
    beta: float,
    gamma: float,
    greedy: list[float],
) -> list[list[float]]:
    """The estimators, from their papers, by loops over prompts and samples."""
    rows = to_go(rewards_of(scores, kl, beta), gamma)
    if name == "reinforce":
        return rows
    if name == "remax":
        return [[x - baseline for x in row] for row, baseline in zip(rows, greedy)]
    if name == "reinforce++":
        return whitened(rows)
    rows = []
    # the scores alone are compared; the KL to go afterwards, token by token
    alone = name in ("grpo", "group_norm", "cpgd")
    values = scores if alone else [score - beta * sum(row) for score, row in zip(scores, kl)]
    for i, value in enumerate(values):
        first = i // 4 * 4
        group = values if name == "cpgd" else values[first : first + 4]
        mean = np.mean(group)
        if max(group) - min(group) < 1e-6:
            advantage = 0.0
        elif alone:
            advantage = (value - mean) / (np.std(group, ddof=1) + 1e-6)
        elif name == "rloo":
            advantage = value - (sum(group) - value) / (len(group) - 1)
        elif name == "opo":
            n = lengths[first : first + len(group)]
            advantage = value - sum(a * b for a, b in zip(n, group)) / sum(n)
        elif name == "gpg":
            groups = [scores[g : g + 4] for g in range(0, len(scores), 4)]
            alive = sum(len(scores) for scores in groups if max(scores) - min(scores) >= 1e-6)
            advantage = len(values) / alive * (value - mean)
        else:
            advantage = value - mean
        rows.append(
            [advantage - beta * sum(kl[i][t:]) if alone else advantage for t in range(lengths[i])]
        )
    return whitened(rows) if name == "reinforce_baseline" else rows


ESTIMATORS = "reinforce reinforce++ reinforce_baseline grpo group_norm dr_grpo rloo remax opo gpg cpgd".split()


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(env, name, kl_in):
    """Of three prompts with four samples and one with three."""
    actual = advantages(env, count=15, advantage=name, kl_in=kl_in, gamma=0.9)
    kl = [part.tolist() for part in env.batch.split(env.batch.kl)][:15]
    wanted = expected(
        name,
        SCORES[:15],
        kl,
        env.batch.own_lengths.tolist(),
        0.1 if kl_in == "reward" else 0.0,
        0.9,
        env.batch.greedy_rewards.tolist(),
    )
    for ours, theirs in zip(actual, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    assert any(abs(x) > 0.1 for row in actual for x in row)


def test_the_scale_of_gpg_counts_groups_by_their_scores(env):
    """Without spread in any group nothing is scaled up, and a KL alone does not make a spread."""
    samples = copied(env)
    samples.rewards = torch.ones(16)
    ppo.compute_advantages(
        samples, state_of(env), with_flags(env.args, advantage="gpg", kl_in="reward")
    )
    assert samples.advantages.tolist() == [0.0] * len(samples.tokens)
    assert samples.kl.abs().max() > 0.1


@pytest.mark.parametrize("name", ["gae", "grpo"])
def test_the_return_is_the_sum_of_a_samples_rewards(env, name):
    """Shaped, and after the KL, whatever the estimator makes of it; the critic's targets are others."""
    samples = copied(env)
    args = with_flags(env.args, advantage=name, kl_in="reward", gamma=0.9, reward_clip=1.5)
    metrics = ppo.compute_advantages(samples, state_of(env), args)
    kl = [sum(part.tolist()) for part in samples.split(samples.kl)]
    wanted = np.mean([min(score, 1.5) - 0.1 * k for score, k in zip(SCORES, kl)])
    assert metrics["rollout/return"] == pytest.approx(wanted, abs=ROUNDING)
    assert metrics["train/returns"] == pytest.approx(float(samples.returns.mean()))
    assert metrics["train/returns"] != pytest.approx(wanted, abs=1e-2)


def gae_rows(samples: Batch, lambdas: list[float]) -> list[list[float]]:
    """The recursion by sample, each with a lambda of its own; gamma 0.9, 0.1 times the KL in the reward."""
    kl, values = (
        [part.tolist() for part in samples.split(column)] for column in (samples.kl, samples.values)
    )
    rows = []
    for reward, value, lam in zip(rewards_of(SCORES, kl, 0.1), values, lambdas, strict=True):
        row, carry, following = [], 0.0, 0.0
        for t in reversed(range(len(reward))):
            carry = reward[t] + 0.9 * following - value[t] + 0.9 * lam * carry
            following = value[t]
            row.insert(0, carry)
        rows.append(row)
    return rows


def test_gae(env):
    """Gamma, lambda and the KL in the reward reach it; the critic's targets are those before whitening."""
    samples = copied(env)
    args = with_flags(env.args, advantage="gae", kl_in="reward", gamma=0.9, gae_lambda=0.8)
    metrics = ppo.compute_advantages(samples, state_of(env), args)
    raw, values = gae_rows(samples, [0.8] * 16), samples.values.double().numpy()
    assert samples.advantages.tolist() == pytest.approx(sum(whitened(raw), []), abs=ROUNDING)
    targets = np.array(sum(raw, [])) + values
    assert samples.returns.tolist() == pytest.approx(targets.tolist(), abs=ROUNDING)
    kl = [part.tolist() for part in samples.split(samples.kl)]
    earned = np.array(sum(to_go(rewards_of(SCORES, kl, 0.1), 0.9), []))
    unexplained = np.var(earned - values) / np.var(earned)
    assert metrics["train/explained_variance"] == pytest.approx(1 - unexplained, abs=ROUNDING)
    assert unexplained != 1


@pytest.mark.parametrize(
    "changes",
    [
        {"gae_lambda_policy": 0.3},
        {"gae_lambda_policy": 0.0},
        {"gae_alpha": 0.2},
        {"gae_alpha": 2.0},
    ],
)
def test_two_lambdas(env, changes):
    """The critic's targets and the advantages by a loop each; one flag for all responses, the other
    by their lengths."""
    samples = copied(env)
    args = with_flags(
        env.args, advantage="gae", kl_in="reward", gamma=0.9, gae_lambda=0.8, advantages_norm="off"
    )
    ppo.compute_advantages(samples, state_of(env), with_flags(args, **changes))
    lambdas = [
        changes.get(
            "gae_lambda_policy", max(0.0, 1 - 1 / (changes.get("gae_alpha", 1) * max(1, n)))
        )
        for n in samples.own_lengths.tolist()
    ]
    advantages, targets = (sum(gae_rows(samples, row), []) for row in (lambdas, [0.8] * 16))
    assert samples.advantages.tolist() == pytest.approx(advantages, abs=ROUNDING)
    assert (samples.returns - samples.values).tolist() == pytest.approx(targets, abs=ROUNDING)


def test_shaping_comes_before_the_group(env):
    """Normalised, clipped, less the length penalty, in this order; then the estimator, with remax's
    baseline shaped alike."""
    moments = losses.RunningMoments()
    seen = [0.0, 4.0, -2.0, *SCORES]
    moments.update(torch.tensor(seen))  # as `collect` has done
    changes = dict(
        kl_in="loss",
        reward_norm=True,
        reward_clip=0.8,
        overlong_buffer=6,
        overlong_factor=0.5,
        moments=moments,
    )

    def shaped(scores: list[float], lengths: list[int]) -> np.ndarray:
        clipped = np.clip((np.array(scores) - np.mean(seen)) / np.std(seen, ddof=1), -0.8, 0.8)
        return clipped + [min(0.0, -(n - (12 - 6)) / 6 * 0.5) for n in lengths]

    rewards = shaped(SCORES, env.batch.own_lengths.tolist())
    baselines = {
        "dr_grpo": rewards.reshape(4, 4).mean(axis=1).repeat(4),
        # the greedy responses: 11 tokens
        "remax": shaped(env.batch.greedy_rewards.tolist(), [11] * 16),
    }
    for name, baseline in baselines.items():
        for i, row in enumerate(advantages(env, advantage=name, **changes)):
            assert row == pytest.approx([rewards[i] - baseline[i]] * len(row), abs=ROUNDING)
    assert moments.count == 19


def test_advantage_clip_and_norm(env):
    def flat(name: str, **changes) -> list[float]:
        return sum(advantages(env, advantage=name, kl_in="loss", **changes), [])

    plain, clipped = flat("reinforce"), flat("reinforce", advantage_clip=0.6)
    assert clipped == pytest.approx([min(max(x, -0.6), 0.6) for x in plain])
    assert clipped != plain
    assert flat("reinforce", advantages_norm="on") == pytest.approx(
        whitened([plain])[0], abs=ROUNDING
    )
    assert flat("reinforce++", advantages_norm="off") == pytest.approx(plain)


# ------------------------------------------------------------------------------------------------ losses
def oracle_gradient(
    env,
    qwen25,
    name: str,
    clip: tuple[float, float],
    keep: list[list[bool]] | None,
    per_sequence: bool,
) -> torch.Tensor:
    """Gradient for the head's weight: one forward per sample through Hugging Face's model, the loss by loops.

    It is the mean over tokens, or over sequences of the mean over their tokens."""
    model = hugging_face(qwen25)
    samples = env.batch
    columns = [
        samples.split(getattr(samples, key)) for key in ("tokens", "old_logprobs", "advantages")
    ]
    keep = keep or [[True] * n for n in samples.own_lengths.tolist()]
    tokens, sequences, loss = sum(map(sum, keep)), sum(map(any, keep)), torch.zeros(())
    for index, ids, old, adv, mask in zip(
        samples.prompt_index.tolist(), *columns, map(torch.tensor, keep)
    ):
        if not mask.any():
            continue
        logits = logits_of(model, env.prompts[index], ids, env.processor)
        logp = token_logprobs(logits, ids)
        mean = loss_oracle(name, logp[mask], old[mask], adv[mask], *clip, 3.0)
        loss = loss + mean * (1 / sequences if per_sequence else int(mask.sum()) / tokens)
    loss.backward()
    return model.lm_head.weight.grad


CLIPS = dict(
    ppo=(0.2, 0.2),
    gspo=(3e-4, 4e-4),
    cpgd=(0.2, 0.2),
    gmpo=(0.4, 0.4),
    cispo=(1.0, 4.0),
    sapo=(0, 0),
)


def head_gradient(
    env, args: ppo.Args, batch: Batch, kl_coef: float = 0.0, models=None
) -> torch.Tensor:
    """For the head's weight, of a minibatch of all prompts as an update of the actor makes it."""
    batch = dataclasses.replace(batch, kl_coef=kl_coef)
    (part,) = ppo.minibatches_of(env.actor, batch, 1, args.epochs, args)
    for pack in packs.of_batch(env.actor.model, batch, part.indices):
        ppo.backward(ppo.actor_loss(env.actor, models, pack, batch, part, args)[0])
    grad = env.actor.model.lm_head.weight.grad.full_tensor()
    env.actor.zero_grad(set_to_none=True)
    return grad


def flat(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in gradient.values()])


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(
    "name, clip, aggregation",
    [
        *((name, clip, "auto") for name, clip in CLIPS.items()),
        ("ppo", (0.1, 0.3), "auto"),
        ("gspo", CLIPS["gspo"], "token-mean"),
        ("ppo", CLIPS["ppo"], "seq-mean-token-mean"),
    ],
)
def test_losses_reach_the_gradient_with_their_own_clip(env, qwen25, name, clip, aggregation):
    """And with the aggregation of their papers, unless another one is asked for."""
    changes = {} if aggregation == "auto" else {"loss_aggregation": aggregation}
    if clip != CLIPS[name]:
        changes |= {"clip_low": clip[0], "clip_high": clip[1]}
    args = with_flags(env.args, policy_loss=name, kl_in="reward", entropy_coef=0.0, **changes)
    actual, _ = gradient(args, env.actor, env.batch)
    per_sequence = (
        aggregation == "seq-mean-token-mean"
        or aggregation == "auto"
        and name in ("gspo", "gmpo", "sapo")
    )
    assert_close(
        actual["model.lm_head.weight"], oracle_gradient(env, qwen25, name, clip, None, per_sequence)
    )


def test_high_entropy_tokens_alone_carry_the_policy_loss(env, qwen25):
    args = with_flags(env.args, high_entropy_ratio=0.4, kl_in="reward", policy_loss="gmpo")
    samples = copied(env)
    samples.logprobs = env.batch.logprobs - 1
    for cap in (2.0, 0.0):
        ppo.fill_logprobs_and_values(
            samples, ppo.Models(env.actor, None, None), with_flags(args, importance_cap=cap)
        )
        assert torch.allclose(samples.old_logprobs, samples.logprobs + bool(cap), atol=ROUNDING)
    model = hugging_face(qwen25)
    keep = []
    columns = samples.split(samples.tokens), samples.split(samples.entropy)
    for index, tokens, entropy in zip(samples.prompt_index.tolist(), *columns):
        with torch.no_grad():
            logp = logits_of(model, env.prompts[index], tokens, env.processor).log_softmax(-1)
        expected = -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)
        assert entropy.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
        best = sorted(range(len(tokens)), key=lambda t: -expected[t])[
            : max(1, int(0.4 * len(tokens)))
        ]
        keep.append([t in best for t in range(len(tokens))])
    samples.old_logprobs = env.batch.old_logprobs
    samples.in_policy_loss = ppo.policy_loss_mask(samples, args)
    assert [part.tolist() for part in samples.split(samples.in_policy_loss)] == keep
    assert_close(
        head_gradient(env, args, samples),
        oracle_gradient(env, qwen25, "gmpo", (0.4, 0.4), keep, per_sequence=True),
    )


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_truncated_responses_carry_no_policy_loss(env, qwen25, name):
    """Nor count in it: the gradient of an update is that of the others alone, with weights of their own."""
    samples = copied(env)
    samples.truncated = torch.arange(16) % 3 == 0
    args = with_flags(env.args, mask_truncated=True, policy_loss=name, kl_in="reward")
    samples.in_policy_loss = ppo.policy_loss_mask(samples, args)
    trained = Caught(env.actor, args)
    with computing(env.actor, max_tokens_per_pack=600):
        metrics = ppo.update_actor(trained, None, samples, 1, None, args)
    keep = [[i % 3 != 0] * n for i, n in enumerate(samples.own_lengths.tolist())]
    wanted = oracle_gradient(env, qwen25, name, CLIPS[name], keep, per_sequence=name == "gspo")
    assert_close(trained.gradients[0]["model.lm_head.weight"], wanted)
    assert metrics["train/actor_updates"] == 1
    # nothing to learn from: no update
    samples.truncated[:] = True
    samples.in_policy_loss = ppo.policy_loss_mask(samples, args)
    assert ppo.update_actor(trained, None, samples, 1, None, args)["train/actor_updates"] == 0
    assert len(trained.gradients) == 1
    assert env.actor.model.lm_head.weight.grad is None


def test_value_kl_and_entropy_terms_keep_truncated_responses(env):
    """The critic's gradient, and what the actor's other terms add to its own, do not depend on the mask."""
    samples = copied(env)
    samples.truncated, samples.kl_coef = torch.arange(16) % 3 == 0, 0.5
    by_mask = []
    with (
        computing(env.actor, max_tokens_per_pack=600),
        computing(env.critic, max_tokens_per_pack=600),
    ):
        for masked in (False, True):
            actor, critic = Caught(env.actor, env.args), Caught(env.critic, env.args)
            for terms in ({}, {"kl_in": "loss", "kl_estimator": "k3+"}, {"entropy_coef": 0.3}):
                args = with_flags(
                    env.args, **({"kl_in": "reward", "mask_truncated": masked} | terms)
                )
                samples.in_policy_loss = ppo.policy_loss_mask(samples, args)
                ppo.update_actor(actor, None, samples, 1, None, args)
            ppo.update_critic(critic, samples, 1, args)
            plain, kl, entropy = map(flat, actor.gradients)
            value = flat(critic.gradients[0])
            by_mask.append(dict(plain=plain, kl=kl - plain, entropy=entropy - plain, value=value))
    whole, masked = by_mask
    assert (whole["plain"] - masked["plain"]).norm() > 0.1 * whole["plain"].norm()
    for name in ("kl", "entropy", "value"):
        assert whole[name].norm() > 1e-2
        assert_close(masked[name], whole[name])


@pytest.mark.parametrize("terms", [{"kl_in": "loss", "kl_estimator": "k3+"}, {"entropy_coef": 0.3}])
def test_a_minibatch_of_truncated_responses_has_other_terms(env, terms):
    """Their gradient is that of a loss whose advantages are zero."""
    samples, silent = copied(env), copied(env)
    samples.truncated, silent.advantages = (
        torch.ones(16, dtype=torch.bool),
        torch.zeros_like(samples.advantages),
    )
    args = with_flags(env.args, **({"kl_in": "reward", "mask_truncated": True} | terms))
    trained = Caught(env.actor, args)
    for batch in (samples, silent):
        batch.kl_coef, batch.in_policy_loss = 0.5, ppo.policy_loss_mask(batch, args)
        assert ppo.update_actor(trained, None, batch, 1, None, args)["train/actor_updates"] == 1
    weights, expected = map(flat, trained.gradients)
    assert expected.norm() > 1e-2
    assert_close(weights, expected)


def test_statistics_are_those_of_the_tokens_in_the_policy_term(qwen25, picture_rows, tmp_path):
    """Before any update the ratio is 1 and KL(old, new) is 0 on average, also where only some of
    the tokens take part."""
    metrics = ppo.main(
        words(
            "--model",
            qwen25,
            "--data",
            picture_rows,
            "--out",
            tmp_path,
            "--steps 1 --advantage grpo --reward exact --max_prompt_tokens 512 --max_new_tokens 8 "
            "--prompts_per_step 4 --high_entropy_ratio 0.4 --save_every 0 --export_every 0",
        )
    )
    assert metrics["train/ratio"] == pytest.approx(1, abs=1e-4)
    assert abs(metrics["train/approx_kl"]) < rounding(16)
    # of all tokens
    assert metrics["train/entropy"] > 1


# ------------------------------------------------------------------------------------------------
# dynamic sampling, remax
RULED = """
FLAT = {0, 2, 3, 5, 6}

def flat(prompts, responses, references, labels, images):
    return [0.5 if int(p.split("row ")[1].split(":")[0]) in FLAT else float(i % 2) for i, p in enumerate(prompts)]

def letters(prompts, responses, references, labels, images):
    return [sum(c in "aeiou " for c in r) / max(1, len(r)) + 0.1 * len(p) for r, p in zip(responses, images)]
"""


def test_groups_without_spread_are_counted():
    """By the samples of each prompt; prompts with one sample each are compared over the whole step."""
    part, wanted = random_batch(np.random.default_rng(1), prompts=9, most=3), []
    part.rewards = part.rewards.sign()
    for prompt in range(9):
        rewards = part.rewards[part.prompt_index == prompt].tolist()
        if len(set(rewards)) > 1:
            wanted.append(prompt)
    assert sources.prompts_with_spread(part) == wanted
    assert 0 < len(wanted) < 8
    single = part.select((part.sample_number == 0).nonzero()[:, 0])
    assert sources.prompts_with_spread(single) == single.prompt_index.tolist()
    for batch in (part, single):
        # equal up to rounding
        batch.rewards = torch.full((len(batch),), 0.1) + torch.arange(len(batch)) * 1e-8
        assert sources.prompts_with_spread(batch) == []


@pytest.fixture(scope="module")
def ruled(tmp_path_factory, picture_rows):
    """rows.jsonl: 8 prompts with 0 or 1 pictures; rules.py: rewards of which those of five prompts
    are always equal."""
    folder = tmp_path_factory.mktemp("ruled")
    (folder / "rules.py").write_text(RULED)
    picture = str(Path(picture_rows).parent / "picture-1-0.png")
    write_rows(
        folder / "rows.jsonl",
        [
            {"prompt": f"row {i}: how many circles?", "images": [picture] if i % 2 else []}
            for i in range(8)
        ],
    )
    return folder


def dynamic(qwen25, ruled, out, *more: str) -> list[dict]:
    """Records of a run of 4 prompts x 2 samples per step, of at most 3 rollouts."""
    ppo.main(
        words(
            "--model",
            qwen25,
            "--data",
            ruled / "rows.jsonl",
            "--reward",
            f"{ruled / 'rules.py'}:flat",
            "--out",
            out,
            "--max_prompt_tokens 256 --max_new_tokens 4 --max_tokens_per_pack 400 --prompts_per_step 4 "
            "--samples_per_prompt 2 --advantage dr_grpo --reward_norm --actor_lr 1e-3 --dynamic_sampling 3 "
            "--log_samples 1",
            "--",
            *more,
        )
    )
    return records(out)


def test_flat_prompts_are_replaced(qwen25, ruled, tmp_path):
    """Which prompts a step trains on, by a loop over the draws; and a resume between steps of
    unequal appetite is exact, the moments of --reward_norm with it."""
    whole = dynamic(qwen25, ruled, tmp_path / "whole", "--steps 4 --save_every 2")
    order = [
        row
        for epoch in range(6)
        for row in np.random.default_rng([0, epoch]).permutation(8).tolist()
    ]
    flat, taken, appetites, scored = {0, 2, 3, 5, 6}, 0, set(), []
    for step, record in enumerate(whole, start=1):
        rollouts, rolled, lively = 0, [], 0
        while rollouts < 3 and lively < 4:
            rolled += order[4 * taken : 4 * taken + 4]
            lively = sum(row not in flat for row in rolled)
            rollouts += 1
            taken += 1
        # then the last rolled flat prompts fill the step
        missing = max(0, 4 - lively)
        fill = [place for place, row in enumerate(rolled) if row in flat][::-1][:missing]
        used = [row for place, row in enumerate(rolled) if row not in flat or place in fill][:4]
        samples = samples_of(tmp_path / "whole", f"step-{step:06d}")
        assert [sample["index"] for sample in samples] == [row for row in used for _ in range(2)]
        assert record["rollout/rollouts"] == rollouts
        assert record["rollout/groups_not_replaced"] == missing
        assert record["rollout/groups_without_spread"] == sum(row in flat for row in rolled)
        appetites.add((rollouts, missing > 0))
        for row in rolled:
            scored += [0.5, 0.5] if row in flat else [0.0, 1.0]
    assert {2, 3} == {n for n, _ in appetites}
    assert {True, False} == {short for _, short in appetites}
    dynamic(qwen25, ruled, tmp_path / "parts", "--steps 2")
    parts = dynamic(qwen25, ruled, tmp_path / "parts", "--steps 4")
    assert_same_records(parts, whole)
    assert samples_of_steps(tmp_path / "parts") == samples_of_steps(tmp_path / "whole")
    state = read_json(tmp_path / "whole" / "checkpoints" / "step-4" / "state.json")
    assert state["rows_drawn"] == 4 * taken
    # of all that were scored, and then dropped
    moments = losses.RunningMoments(**state["moments"])
    assert (moments.count, moments.mean) == (len(scored), pytest.approx(0.5))
    assert len(scored) > 4 * 8
    assert moments.std == pytest.approx(np.std(scored, ddof=1))


@pytest.mark.slow
def test_several_rollouts_feed_an_update(qwen25, ruled, tmp_path):
    """Two rollouts of two prompts give what one of four gives, to rounding; resumed between two
    steps, every bit."""
    more = "--dynamic_sampling 0 --advantage remax --minibatches 2 --max_new_tokens 3"
    one = dynamic(qwen25, ruled, tmp_path / "one", more, "--steps 4")
    whole = dynamic(qwen25, ruled, tmp_path / "whole", more, "--steps 4 --rollouts_per_step 2")
    dynamic(qwen25, ruled, tmp_path / "parts", more, "--steps 2 --rollouts_per_step 2")
    parts = dynamic(qwen25, ruled, tmp_path / "parts", more, "--steps 4 --rollouts_per_step 2")
    assert_same_records(parts, whole)
    for first, second in zip(map(reproducible, one), map(reproducible, whole), strict=True):
        assert (first.pop("rollout/rollouts"), second.pop("rollout/rollouts")) == (1, 2)
        assert second == pytest.approx(first, rel=1e-3, abs=ROUNDING)
    first, second = (
        [row["response"] for row in samples_of_steps(tmp_path / name)] for name in ("one", "whole")
    )
    assert first == second
    assert len(first) == 4 * 8
    state = read_json(tmp_path / "parts" / "checkpoints" / "step-4" / "state.json")
    assert state["rows_drawn"] == 16
    assert parts[-1]["rollout/episode"] == 2


@pytest.mark.slow
def test_a_prompt_without_samples_fills_no_place_of_one_that_has_some(qwen25, ruled, tmp_path):
    """Each step sees all eight rows: three of spread, two whose picture does not decode, and three
    flat ones, of which one fills the step. Passes, after each of which is an evaluation, are
    counted by what was drawn."""
    rows = read_rows(ruled / "rows.jsonl")
    (ruled / "damaged.png").write_bytes(Path(rows[1]["images"][0]).read_bytes()[:-40])
    for i in (3, 5):
        rows[i]["images"] = ["damaged.png"]
    bad = write_rows(ruled / "bad.jsonl", rows)
    lines = dynamic(
        qwen25,
        ruled,
        tmp_path,
        "--data",
        bad,
        "--on_bad_row skip --dynamic_sampling 2 --steps 3 --minibatches 4 --eval_data",
        ruled / "rows.jsonl",
        "--eval_every -1",
    )
    steps = [line for line in lines if "rollout/samples" in line]
    for step in steps:
        counts = (
            step["rollout/samples"],
            step["rollout/groups_without_spread"],
            step["rollout/groups_not_replaced"],
        )
        assert counts == (8, 3, 1)
        assert step["train/actor_updates"] == 4
    assert len(steps) == 3
    assert [line["eval/episode"] for line in lines if "eval/episode" in line] == [0, 1, 2, 3]


@pytest.mark.parametrize("limit", [0, 2])
def test_the_baseline_of_remax_is_the_greedy_reward(env, ruled, limit):
    """Of each prompt, whatever is sampled; also of prompts of two rollouts that were merged."""
    rollouts = max(1, limit)
    args = with_flags(
        env.args, advantage="remax", dynamic_sampling=limit, prompts_per_step=4 * rollouts
    )
    reward = sources.load_rewards(sources.RewardArgs(reward=f"{ruled / 'rules.py'}:letters"))
    batches = [(env.prompts, list(range(4 * k, 4 * k + 4))) for k in range(rollouts)]
    with PromptLoader(env.processor, args, batches) as loader:
        samples, metrics = ppo.collect(
            ppo.Models(env.actor, None, None), loader, reward, env.sampling, state_of(env), args
        )
    assert len(samples) == 16 * rollouts
    assert metrics["rollout/rollouts"] == rollouts
    greedy = ppo.rollout(env.actor, take(env), dataclasses.replace(env.sampling, greedy=True), 1)
    wanted = {}
    for prompt, tokens in zip(env.prompts, greedy.split(greedy.tokens)):
        text = env.processor.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        wanted[prompt.source] = sum(c in "aeiou " for c in text) / max(1, len(text)) + 0.1 * len(
            prompt.images
        )
    assert len(set(wanted.values())) == 4
    baselines = [wanted[samples.prompts[index].source] for index in samples.prompt_index.tolist()]
    assert samples.greedy_rewards.tolist() == pytest.approx(baselines, abs=rounding(16))
    ppo.compute_advantages(
        samples, state_of(env, 0.0), with_flags(args, kl_in="loss", advantages_norm="off")
    )
    differences = (samples.rewards - samples.greedy_rewards).repeat_interleave(samples.own_lengths)
    assert torch.allclose(samples.advantages.double(), differences.double(), atol=rounding(16))


def test_functions_score_while_the_models_do(env, ruled, monkeypatch):
    """The reward waits until the log-probs are there; with --dynamic_sampling these wait for the reward."""
    events, filled = [], threading.Event()
    fill = ppo.fill_logprobs_and_values

    def noted(*args):
        fill(*args)
        events.append("log-probs")
        filled.set()

    def reward(prompts, responses, references, labels, images):
        filled.wait(0.0 if args.dynamic_sampling else 60.0)
        events.append("rewards")
        return [float(len(response)) for response in responses]

    monkeypatch.setattr(ppo, "fill_logprobs_and_values", noted)
    mix = sources.load_rewards(sources.RewardArgs(reward="exact"))
    mix.sources[0].function = reward
    for dynamic, expected in ((0, ["log-probs", "rewards"]), (1, ["rewards", "log-probs"])):
        args = with_flags(env.args, dynamic_sampling=dynamic, prompts_per_step=4)
        with PromptLoader(env.processor, args, [(env.prompts, [0, 1, 2, 3])]) as loader:
            batch, _ = ppo.collect(
                ppo.Models(env.actor, None, None), loader, mix, env.sampling, state_of(env), args
            )
        assert events == expected and len(batch.old_logprobs)
        assert batch.rewards.tolist() == [
            len(text) for text in env.processor.decode(list(batch.split(batch.tokens)))
        ]
        events.clear()
        filled.clear()
