"""Every estimator, loss, KL and shaping flag reaches all of the mathematics: written out again, per sample and per token.

The formulas of common/losses.py have their own oracles in test_losses.py; here the flags of the script are followed from the
command line to the advantages and to the gradient.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROUNDING, computing, rounding, start, take, with_flags
from test_training import gradient, hand_batch, write_samples  # noqa: F401
from transformers import AutoModelForImageTextToText

import train_ppo_vl as ppo
from common import distributed, flags, losses
from common.model import fsdp
from common.rewards import scoring
from common.buffers import Batch
from common.data.loader import PromptLoader, load_pixels
from common.model import forward as vlm, weights as vlm_weights

SCORES = [1.0, 0.0, 0.5, 0.0, 2.0, 2.0, 2.0, 2.0, -1.0, 3.0, 0.0, 0.25, 0.1, 0.1, 0.0, 0.7]


@pytest.fixture(scope="module")
def env(qwen25, picture_rows):
    env = start(qwen25, picture_rows, "--kl_coef", "0.1", "--samples_per_prompt", "4")
    env.batch = hand_batch(env)
    env.batch.rewards = torch.tensor(SCORES)
    env.batch.greedy_rewards = torch.tensor([0.5, 1.0, -1.0, 0.2]).repeat_interleave(4)
    env.batch.greedy_lengths = torch.full((16,), 11)
    return env


def state_of(env, kl_coef: float = 0.1, moments: losses.RunningMoments | None = None) -> ppo.TrainState:
    """The state of a run with this weight of the KL and these moments of the rewards."""
    state = ppo.TrainState.fresh(with_flags(env.args, kl_coef=kl_coef))
    state.moments = moments or state.moments
    return state


def advantages(env, moments: losses.RunningMoments | None = None, **changes) -> list[list[float]]:
    """By sample, of a copy of the samples."""
    batch = env.batch.select(torch.arange(16))
    ppo.compute_advantages(batch, state_of(env, moments=moments), with_flags(env.args, **changes))
    return [part.tolist() for part in batch.split(batch.advantages)]


def spread(per_sample: list[float], lengths: list[int]) -> list[list[float]]:
    return [[value] * n for value, n in zip(per_sample, lengths)]


def to_go(rewards: list[list[float]], gamma: float) -> list[list[float]]:
    return [[sum(gamma ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))] for row in rewards]


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = np.array([x for row in rows for x in row])
    return [[(x - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8) for x in row] for row in rows]


def expected(name: str, scores: list[float], kl: list[list[float]], lengths: list[int], beta: float, gamma: float,
             greedy: list[float]) -> list[list[float]]:
    """The estimators, from their papers, by loops over prompts and samples."""
    rewards = [[-beta * k for k in row] for row in kl]
    for row, score in zip(rewards, scores):
        if row:
            row[-1] += score
    if name == "reinforce":
        return to_go(rewards, gamma)
    if name == "remax":
        return [[x - g for x in row] for row, g in zip(to_go(rewards, gamma), greedy)]
    if name == "reinforce++":
        return whitened(to_go(rewards, gamma))
    groups = [range(4 * g, 4 * g + 4) for g in range(4)]
    if name in ("grpo", "group_norm", "cpgd"):
        rows = []                              # of the scores alone; the KL to go afterwards, token by token
        for i, (score, own_kl) in enumerate(zip(scores, kl)):
            compared = scores if name == "cpgd" else [scores[k] for k in groups[i // 4]]
            flat = max(compared) - min(compared) < 1e-6
            value = 0.0 if flat else (score - np.mean(compared)) / (np.std(compared, ddof=1) + 1e-6)
            rows.append([value - beta * sum(own_kl[t:]) for t in range(len(own_kl))])
        return rows
    after = [s - beta * sum(row) for s, row in zip(scores, kl)]
    result = []
    for i, score in enumerate(after):
        own = [after[k] for k in groups[i // 4]]
        mean = np.mean(own)
        flat = max(own) - min(own) < 1e-6
        if name == "rloo":
            value = score - (sum(own) - score) / 3
        elif name == "opo":
            n = [lengths[k] for k in groups[i // 4]]
            value = score - sum(a * b for a, b in zip(n, own)) / sum(n)
        elif name == "gpg":
            alive = sum(4 for g in groups if max(scores[k] for k in g) - min(scores[k] for k in g) >= 1e-6)
            value = 16 / alive * (score - mean)
        else:
            value = score - mean
        result.append(0.0 if flat else value)
    rows = spread(result, lengths)
    return whitened(rows) if name == "reinforce_baseline" else rows


ESTIMATORS = ["reinforce", "reinforce++", "reinforce_baseline", "grpo", "group_norm", "dr_grpo", "rloo", "remax", "opo", "gpg", "cpgd"]


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(env, name, kl_in):
    found = advantages(env, advantage=name, kl_in=kl_in, gamma=0.9)
    kl = [part.tolist() for part in env.batch.split(env.batch.kl)]
    wanted = expected(name, SCORES, kl, env.batch.lengths.tolist(), 0.1 if kl_in == "reward" else 0.0, 0.9,
                      env.batch.greedy_rewards.tolist())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    assert any(abs(x) > 0.1 for row in found for x in row)


@pytest.mark.parametrize("name", ["grpo", "group_norm", "cpgd"])
def test_equal_scores_leave_the_kl_to_go_alone(env, name):
    """Not the noise of the KL over its spread, which is as large as any advantage, for any weight."""
    samples = env.batch.select(torch.arange(16))
    flat = [i for i in range(16) if SCORES[i] == 2.0]
    if name == "cpgd":                                                            # its group is the step
        samples.rewards, flat = torch.full((16,), 2.0), list(range(16))
    ppo.compute_advantages(samples, state_of(env, 0.001), with_flags(env.args, advantage=name, kl_in="reward"))
    kl, found = samples.split(samples.kl), samples.split(samples.advantages)
    for i in flat:
        wanted = [-0.001 * sum(kl[i].tolist()[t:]) for t in range(len(kl[i]))]
        assert found[i].tolist() == pytest.approx(wanted, rel=ROUNDING, abs=1e-9)
    assert 0 < max(found[i].abs().max() for i in flat if len(found[i])) < 0.1


def test_the_scale_of_gpg_counts_groups_by_their_scores(env):
    """Without spread in any group nothing is scaled up, and a KL alone does not make a spread."""
    samples = env.batch.select(torch.arange(16))
    samples.rewards = torch.ones(16)
    ppo.compute_advantages(samples, state_of(env), with_flags(env.args, advantage="gpg", kl_in="reward"))
    assert samples.advantages.tolist() == [0.0] * len(samples.tokens) and samples.kl.abs().max() > 0.1


@pytest.mark.parametrize("name", ["gae", "reinforce", "grpo", "rloo"])
def test_the_return_is_the_sum_of_a_samples_rewards(env, name):
    """Shaped, and after the KL, whatever the estimator makes of it; the critic's targets are others."""
    samples = env.batch.select(torch.arange(16))
    args = with_flags(env.args, advantage=name, kl_in="reward", gamma=0.9, reward_clip=1.5)
    metrics = ppo.compute_advantages(samples, state_of(env), args)
    kl = [sum(part.tolist()) for part in samples.split(samples.kl)]
    wanted = np.mean([min(score, 1.5) - 0.1 * own for score, own in zip(SCORES, kl)])
    assert metrics["rollout/return"] == pytest.approx(wanted, abs=ROUNDING)
    assert metrics["train/returns"] == pytest.approx(float(samples.returns.mean()))
    assert metrics["train/returns"] != pytest.approx(wanted, abs=1e-2)


def test_gae(env):
    """Gamma, lambda and the KL in the reward reach it; the critic's targets are those before whitening."""
    samples, raw, targets = env.batch.select(torch.arange(16)), [], []
    args = with_flags(env.args, advantage="gae", kl_in="reward", gamma=0.9, gae_lambda=0.8)
    metrics = ppo.compute_advantages(samples, state_of(env), args)
    columns = ([part.tolist() for part in samples.split(column)] for column in (samples.kl, samples.values))
    for score, kl, values in zip(SCORES, *columns, strict=True):
        rewards, row = [-0.1 * k for k in kl], []
        rewards[-1:] = [reward + score for reward in rewards[-1:]]
        for reward, value, following in list(zip(rewards, values, [*values[1:], 0.0]))[::-1]:
            row.insert(0, reward + 0.9 * following - value + 0.9 * 0.8 * (row[0] if row else 0.0))
        raw.append(row)
        targets += [a + value for a, value in zip(row, values)]
    assert samples.advantages.tolist() == pytest.approx(sum(whitened(raw), []), abs=ROUNDING)
    assert samples.returns.tolist() == pytest.approx(targets, abs=ROUNDING)
    earned = []
    for score, kl in zip(SCORES, samples.split(samples.kl), strict=True):
        rewards = [-0.1 * k for k in kl.tolist()]
        rewards[-1:] = [reward + score for reward in rewards[-1:]]
        earned += [sum(0.9**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))]
    left = np.var(np.array(earned) - samples.values.numpy()) / np.var(earned)
    assert metrics["train/explained_variance"] == pytest.approx(1 - left, abs=ROUNDING) and abs(1 - left) > 1e-3


def test_shaping_comes_before_the_group(env):
    """Normalised, clipped, less the length penalty, in this order; then dr_grpo's mean of the group."""
    moments = losses.RunningMoments()
    moments.update(torch.tensor([0.0, 4.0, -2.0, *SCORES]))                 # as `collect` has done
    found = advantages(env, advantage="dr_grpo", kl_in="loss", reward_norm=True, reward_clip=0.8, overlong_buffer=6,
                       overlong_factor=0.5, moments=moments)
    assert moments.count == 19
    seen = np.array([0.0, 4.0, -2.0, *SCORES])
    shaped = np.clip((np.array(SCORES) - seen.mean()) / seen.std(ddof=1), -0.8, 0.8)
    shaped += [min(0.0, -(n - (12 - 6)) / 6 * 0.5) for n in env.batch.lengths.tolist()]
    means = shaped.reshape(4, 4).mean(axis=1).repeat(4)
    for i, row in enumerate(found):
        assert row == pytest.approx([shaped[i] - means[i]] * len(row), abs=ROUNDING)
    moments = losses.RunningMoments()
    moments.update(torch.tensor(SCORES))
    found = advantages(env, advantage="remax", kl_in="loss", reward_norm=True, reward_clip=0.8, overlong_buffer=6,
                       moments=moments)
    scale = lambda x: np.clip((np.array(x) - np.mean(SCORES)) / np.std(SCORES, ddof=1), -0.8, 0.8)  # noqa: E731
    penalty = lambda n: np.array([min(0.0, -(k - 6) / 6) for k in n])  # noqa: E731
    lengths, greedy = env.batch.lengths.tolist(), env.batch.greedy_rewards.tolist()
    wanted = scale(SCORES) + penalty(lengths) - scale(greedy) - penalty([11] * 16)      # the greedy responses: 11 tokens
    for i, row in enumerate(found):
        assert row == pytest.approx([wanted[i]] * len(row), abs=ROUNDING)


def test_advantage_clip_and_norm(env):
    plain = [x for row in advantages(env, advantage="reinforce", kl_in="loss") for x in row]
    clipped = [x for row in advantages(env, advantage="reinforce", kl_in="loss", advantage_clip=0.6) for x in row]
    assert clipped == pytest.approx([min(max(x, -0.6), 0.6) for x in plain]) and clipped != plain
    normed = [x for row in advantages(env, advantage="reinforce", kl_in="loss", advantages_norm="on") for x in row]
    assert normed == pytest.approx([x for row in whitened([plain]) for x in row], abs=ROUNDING)
    off = [x for row in advantages(env, advantage="reinforce++", kl_in="loss", advantages_norm="off") for x in row]
    assert off == pytest.approx(plain)


# ------------------------------------------------------------------------------------------------ losses
def oracle_gradient(env, qwen25, name: str, clip: tuple[float, float], keep: list[list[bool]] | None,
                    per_sequence: bool) -> torch.Tensor:
    """Gradient for the head's weight: one forward per sample through Hugging Face's model, the loss by loops.

    It is the mean over tokens, or over sequences of the mean over their tokens."""
    model = AutoModelForImageTextToText.from_pretrained(qwen25, attn_implementation="eager")
    samples, image_id = env.batch, env.processor.config.image_token_id
    low, high = clip
    columns = [samples.split(getattr(samples, key)) for key in ("tokens", "old_logprobs", "advantages")]
    keep = keep or [[True] * n for n in samples.lengths.tolist()]
    total, sequences, loss = sum(map(sum, keep)), sum(map(any, keep)), torch.zeros(())
    for i, (group, tokens, old, adv) in enumerate(zip(samples.prompt_index.tolist(), *columns)):
        if not any(keep[i]):
            continue
        prompt = env.prompts[group]
        ids = torch.cat([prompt.input_ids, tokens])[None]
        pixels = load_pixels(prompt, env.processor)
        images = dict(zip(("pixel_values", "image_grid_thw"), pixels)) if pixels else {}
        logits = model(input_ids=ids, mm_token_type_ids=(ids == image_id).int(), **images).logits[0]
        logits[:, list(env.processor.banned_ids)] = -torch.inf
        rows = slice(len(prompt.input_ids) - 1, ids.shape[1] - 1)
        lp = logits[rows].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        kept = [t for t in range(len(tokens)) if keep[i][t]]
        mean_d = torch.stack([lp[t] - old[t] for t in kept]).mean()
        mean_a = torch.stack([adv[t] for t in kept]).mean()
        for t in kept:
            d, a = lp[t] - old[t], adv[t]
            r = torch.exp(d)
            if name == "ppo":
                term = torch.maximum(-a * r, -a * r.clamp(1 - low, 1 + high))
                term = torch.minimum(term, -3.0 * a) if a < 0 else term
            elif name == "gspo":
                s = torch.exp(mean_d.detach() + lp[t] - lp[t].detach())
                term = torch.maximum(-a * s, -a * s.clamp(1 - low, 1 + high))
            elif name == "cpgd":
                term = -a * (torch.minimum(lp[t], old[t] + math.log(1 + high)) if a > 0 else
                             torch.maximum(lp[t], old[t] + math.log(1 - low)))
            elif name == "gmpo":
                ds = torch.stack([lp[k] - old[k] for k in kept])
                term = -mean_a * torch.exp((ds.clamp(max=high) if mean_a > 0 else ds.clamp(min=-low)).mean())
            elif name == "cispo":
                term = -(r.clamp(1 - low, 1 + high)).detach() * a * lp[t]
            else:
                tau = 1.0 if a > 0 else 1.05
                term = -a * 4 / tau * torch.sigmoid(tau * (r - 1))
            loss = loss + term / (sequences * len(kept) if per_sequence else total)
    loss.backward()
    return model.lm_head.weight.grad


CLIPS = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cpgd": (0.2, 0.2), "gmpo": (0.4, 0.4), "cispo": (1.0, 4.0), "sapo": (0, 0)}


def head_gradient(env, args: ppo.Args, batch: Batch, kl_coef: float = 0.0, reference=None) -> torch.Tensor:
    """For the head's weight, of a minibatch of all prompts as an update of the actor makes it."""
    batch = dataclasses.replace(batch, kl_coef=kl_coef)
    part, = ppo.minibatches_of(env.actor, batch, 1, args.update.epochs, args)
    for row in vlm.packs(env.actor.model, batch, part.indices):
        fsdp.backward(ppo.actor_loss(env.actor, reference, row, batch, part, args)[0])
    found = env.actor.model.lm_head.weight.grad.full_tensor()
    env.actor.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name, clip, aggregation", [
    *((name, clip, "auto") for name, clip in CLIPS.items()),
    ("ppo", (0.1, 0.3), "auto"), ("cispo", (0.5, 0.5), "auto"),
    ("gspo", CLIPS["gspo"], "token-mean"), ("sapo", CLIPS["sapo"], "token-mean"),
    ("ppo", CLIPS["ppo"], "seq-mean-token-mean")])
def test_losses_reach_the_gradient_with_their_own_clip(env, qwen25, name, clip, aggregation):
    """And with the aggregation of their papers, unless another one is asked for."""
    own = clip == CLIPS[name]
    changes = {} if aggregation == "auto" else {"loss_aggregation": aggregation}        # nothing said: auto
    args = with_flags(env.args, policy_loss=name, kl_in="reward", entropy_coef=0.0,
                      clip_low=-1.0 if own else clip[0], clip_high=-1.0 if own else clip[1], **changes)
    found, _ = gradient(args, env.actor, env.batch)
    per_sequence = aggregation == "seq-mean-token-mean"
    if aggregation == "auto":
        per_sequence = name in ("gspo", "gmpo", "sapo")
    wanted = oracle_gradient(env, qwen25, name, clip, None, per_sequence)
    assert (found["model.lm_head.weight"] - wanted).norm() < 1e-4 * wanted.norm()


def test_high_entropy_tokens_alone_carry_the_policy_loss(env, qwen25):
    args = with_flags(env.args, high_entropy_ratio=0.4, kl_in="reward", policy_loss="gmpo")
    samples = env.batch.select(torch.arange(16))
    samples.logprobs = env.batch.logprobs - 1
    for cap in (2.0, 0.0):
        ppo.fill_logprobs_and_values(samples, env.actor, None, None, with_flags(args, importance_cap=cap))
        assert torch.allclose(samples.old_logprobs, samples.logprobs + bool(cap), atol=ROUNDING)
    model = AutoModelForImageTextToText.from_pretrained(qwen25, attn_implementation="eager")
    keep = []
    for group, tokens, found in zip(samples.prompt_index.tolist(), samples.split(samples.tokens), samples.split(samples.entropy)):
        prompt = env.prompts[group]
        ids = torch.cat([prompt.input_ids, tokens])[None]
        pixels = load_pixels(prompt, env.processor)
        images = dict(zip(("pixel_values", "image_grid_thw"), pixels)) if pixels else {}
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=(ids == model.config.image_token_id).int(), **images).logits[0]
        logits[:, list(env.processor.banned_ids)] = -torch.inf
        logp = logits[len(prompt.input_ids) - 1:-1].log_softmax(-1)
        entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)
        assert found.tolist() == pytest.approx(entropy.tolist(), abs=1e-4)
        best = sorted(range(len(tokens)), key=lambda t: -entropy[t])[:max(1, int(0.4 * len(tokens)))]
        keep.append([t in best for t in range(len(tokens))])
    samples.old_logprobs = env.batch.old_logprobs
    samples.in_policy_loss = ppo.policy_loss_mask(samples, args.algorithm)
    assert [part.tolist() for part in samples.split(samples.in_policy_loss)] == keep
    found = head_gradient(env, args, samples)
    wanted = oracle_gradient(env, qwen25, "gmpo", (0.4, 0.4), keep, per_sequence=True)
    assert (found - wanted).norm() < 1e-4 * wanted.norm()


class Caught(fsdp.Trainable):
    """Keeps the gradient of each update, by parameter, and changes no weight."""

    def __init__(self, module, args: ppo.Args, applied: bool = True):
        super().__init__(module, args.optim, 1e-3)
        self.gradients, self.applied = [], applied

    def update(self, step: int) -> tuple[float, bool]:
        self.gradients.append({name: p.grad.full_tensor() for name, p in self.module.named_parameters() if p.requires_grad})
        self.module.zero_grad(set_to_none=True)
        return 1.0, self.applied


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_truncated_responses_carry_no_policy_loss(env, qwen25, name):
    """Nor count in it: the gradient of an update is that of the others alone, with weights of their own."""
    samples = env.batch.select(torch.arange(16))
    samples.truncated = torch.arange(16) % 3 == 0
    args = with_flags(env.args, mask_truncated=True, policy_loss=name, kl_in="reward")
    samples.in_policy_loss = ppo.policy_loss_mask(samples, args.algorithm)
    trained = Caught(env.actor, args)
    with computing(env.actor, max_tokens_per_pack=600):
        metrics = ppo.update_actor(trained, None, samples, 1, None, args)
    keep = [[i % 3 != 0] * n for i, n in enumerate(samples.lengths.tolist())]
    wanted = oracle_gradient(env, qwen25, name, CLIPS[name], keep, per_sequence=name == "gspo")
    found = trained.gradients[0]["model.lm_head.weight"]
    assert (found - wanted).norm() < 1e-4 * wanted.norm()
    assert metrics["train/masked_responses"] == 6 and metrics["train/actor_updates"] == 1
    entropies = samples.entropy = torch.rand(len(samples.tokens), generator=torch.Generator().manual_seed(0))
    both = ppo.policy_loss_mask(samples, with_flags(args, high_entropy_ratio=0.5).algorithm)
    for i, (kept, own) in enumerate(zip(samples.split(both), samples.split(entropies))):
        best = sorted(own.tolist(), reverse=True)[:max(1, len(own) // 2)]
        assert kept.tolist() == [i % 3 != 0 and x in best for x in own.tolist()]
    samples.truncated[:] = True                                         # nothing to learn from: no update
    samples.in_policy_loss = ppo.policy_loss_mask(samples, args.algorithm)
    assert ppo.update_actor(trained, None, samples, 1, None, args)["train/actor_updates"] == 0
    assert len(trained.gradients) == 1 and env.actor.model.lm_head.weight.grad is None


def test_value_kl_and_entropy_terms_keep_truncated_responses(env):
    """The critic's gradient, and what the actor's other terms add to its own, do not depend on the mask."""
    samples = env.batch.select(torch.arange(16))
    samples.truncated, samples.kl_coef = torch.arange(16) % 3 == 0, 0.5
    actor, critic = Caught(env.actor, env.args), Caught(env.critic, env.args)
    with computing(env.actor, max_tokens_per_pack=600), computing(env.critic, max_tokens_per_pack=600):
        for masked in (False, True):
            for terms in ({}, {"kl_in": "loss", "kl_estimator": "k3+"}, {"entropy_coef": 0.3}):
                args = with_flags(env.args, **({"kl_in": "reward", "mask_truncated": masked} | terms))
                samples.in_policy_loss = ppo.policy_loss_mask(samples, args.algorithm)
                ppo.update_actor(actor, None, samples, 1, None, args)
            ppo.update_critic(critic, samples, 1, args)
    flat = [torch.cat([part.flatten() for part in found.values()]) for found in actor.gradients + critic.gradients]
    plain, kl, entropy, plain_masked, kl_masked, entropy_masked, value, value_masked = flat
    assert (plain - plain_masked).norm() > 0.1 * plain.norm()
    for ours, theirs in ((kl - plain, kl_masked - plain_masked),
                         (entropy - plain, entropy_masked - plain_masked), (value, value_masked)):
        assert ours.norm() > 1e-2 and (ours - theirs).norm() < 1e-4 * ours.norm()


@pytest.mark.parametrize("changes", [{"entropy_coef": 0.3}, {"kl_in": "loss", "kl_estimator": "k3+"}])
def test_entropy_bonus_and_kl_are_of_all_tokens(env, changes):
    """What they add to the gradient does not depend on which tokens are in the policy term."""
    keep, added = torch.arange(len(env.batch.tokens)) % 3 == 0, []
    for mask in (torch.ones_like(keep), keep):
        batch, heads = dataclasses.replace(env.batch, in_policy_loss=mask), []
        for own in ({"kl_in": "reward"}, {"kl_in": "reward"} | changes):
            args = with_flags(env.args, loss_aggregation="seq-mean-token-mean", **own)
            heads.append(head_gradient(env, args, batch, kl_coef=0.5))
        added.append(heads[1] - heads[0])
    assert added[0].norm() > 1e-2 and (added[1] - added[0]).norm() < 1e-4 * added[0].norm()


def test_statistics_are_those_of_the_tokens_in_the_policy_term(qwen25, picture_rows, tmp_path):
    """Before any update the ratio is 1 and KL(old, new) is 0 on average, also where only some of the tokens take part."""
    metrics = ppo.main(["--model", str(qwen25), "--data", picture_rows, "--out", str(tmp_path), "--steps", "1", "--advantage", "grpo",
                        "--reward", "exact", "--max_prompt_tokens", "512", "--max_new_tokens", "8", "--prompts_per_step", "4",
                        "--high_entropy_ratio", "0.4", "--save_every", "0", "--export_every", "0"])
    assert metrics["train/ratio"] == pytest.approx(1, abs=1e-4) and abs(metrics["train/approx_kl"]) < 1e-6
    assert metrics["train/entropy"] > 1                                                         # of all tokens


def test_the_exact_kl(env, qwen25):
    """Over the whole vocabulary, in the reward and in the loss, against Hugging Face's logits and autograd."""
    builder = vlm_weights.Builder(env.args.model, env.processor, env.ranks.device, env.args.longest)
    reference = ppo.Policy(builder.role("", frozen=True), env.processor)
    ppo.shard_and_load(reference, env.args, env.ranks)
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.03
            parameter.to_local().add_(noise)
    other = AutoModelForImageTextToText.from_pretrained(qwen25, attn_implementation="eager")
    with torch.no_grad():
        ours = {name.removeprefix("model."): p.full_tensor() for name, p in reference.named_parameters()}
        for name, parameter in other.named_parameters():
            if name in ours:
                parameter.copy_(ours[name])
    model = AutoModelForImageTextToText.from_pretrained(qwen25, attn_implementation="eager")
    args = with_flags(env.args, kl_estimator="full", kl_in="loss")
    samples = env.batch.select(torch.arange(16))
    samples.kl = None
    ppo.fill_logprobs_and_values(samples, env.actor, None, reference, args)
    loss, kls = torch.zeros(()), []
    for group, tokens in zip(samples.prompt_index.tolist(), samples.split(samples.tokens)):
        prompt = env.prompts[group]
        ids = torch.cat([prompt.input_ids, tokens])[None]
        pixels = load_pixels(prompt, env.processor)
        inputs = {"input_ids": ids, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
        inputs |= dict(zip(("pixel_values", "image_grid_thw"), pixels)) if pixels else {}
        rows = slice(len(prompt.input_ids) - 1, ids.shape[1] - 1)
        logits, others = model(**inputs).logits[0][rows], other(**inputs).logits[0][rows].detach()
        for x in (logits, others):
            x[:, list(env.processor.banned_ids)] = -1e9
        logp, logq = logits.log_softmax(-1), others.log_softmax(-1)
        kl = (logp.exp() * (logp - logq)).sum(-1)
        kls += kl.tolist()
        loss = loss + kl.sum() / len(samples.tokens)
    assert samples.kl.tolist() == pytest.approx(kls, abs=1e-4) and max(kls) > 0.01
    loss.backward()
    samples.advantages, samples.old_logprobs = torch.zeros(len(samples.tokens)), samples.logprobs
    found = head_gradient(env, args, samples, kl_coef=1.0, reference=reference)
    fsdp.rest_after_scoring(reference)
    assert (found - model.lm_head.weight.grad).norm() < 1e-4 * model.lm_head.weight.grad.norm()
    assert not any(p.requires_grad for p in reference.parameters())


# ------------------------------------------------------------------------------------------------ dynamic sampling, remax
RULED = """
FLAT = {0, 2, 3, 5, 6}

def flat(prompts, responses, references, labels, images):
    return [0.5 if int(p.split("row ")[1].split(":")[0]) in FLAT else float(i % 2) for i, p in enumerate(prompts)]

def letters(prompts, responses, references, labels, images):
    return [sum(c in "aeiou " for c in r) / max(1, len(r)) + 0.1 * len(p) for r, p in zip(responses, images)]
"""


def hand_part(generator, groups: int, dropped: list[int]) -> Batch:
    """A rollout of so many prompts with two or three samples each, as `sample_and_score` returns it."""
    counts = [0 if g in dropped else int(torch.randint(2, 4, (), generator=generator)) for g in range(groups)]
    group = torch.arange(groups).repeat_interleave(torch.tensor(counts))
    lengths = torch.randint(0, 5, (len(group),), generator=generator)
    noise = lambda size: torch.rand(size, generator=generator)  # noqa: E731
    name = lambda what: {g: noise(3) for g in range(groups) if g % 2 == what}  # noqa: E731
    return Batch(
        [f"prompt {float(noise(()))}" for _ in range(groups)], torch.randperm(99)[:groups].tolist(),
        [g % 3 for g in range(groups)], dropped, patches=name(1), features=name(0), positions=name(0),
        prompt_index=group, number=torch.cat([torch.arange(n) for n in counts]), lengths=lengths, truncated=noise(len(group)) > 0.5,
        tokens=torch.randint(0, 99, (int(lengths.sum()),), generator=generator), logprobs=noise(int(lengths.sum())),
        rewards=noise(len(group)).round(decimals=1), greedy_rewards=noise(groups)[group],
        components={"style": noise(len(group))}, judgements=[f"said {float(x)}" for x in noise(len(group))])


def test_merged_steps_equal_a_loop():
    """Everything of the chosen prompts and of their samples, in the order chosen, and nothing of the others."""
    generator = torch.Generator().manual_seed(0)
    for chosen in ([[1, 3], [], [0, 1, 4]], [[0, 2, 4], [], []], [[2], [0, 5], [1]]):
        parts = [hand_part(generator, 6, dropped) for dropped in ([4], [0], [])]
        picks = [(part, group) for part, groups in zip(parts, chosen) for group in groups]
        samples = Batch.concatenate(parts).select_prompts([6 * i + g for i, groups in enumerate(chosen) for g in groups])
        assert len(samples.prompts) == len(picks) and samples.prompt_index.max() < len(picks)
        own = iter(range(len(samples)))
        for place, (part, group) in enumerate(picks):
            for column in ("prompts", "prompt_ids", "owners"):
                assert getattr(samples, column)[place] == getattr(part, column)[group]
            for column in ("positions", "patches", "features"):
                ours, theirs = getattr(samples, column).get(place), getattr(part, column).get(group)
                assert ours is theirs and (ours is None) == (group not in getattr(part, column))
            assert (place in samples.dropped) == (group in part.dropped)
            for i in (part.prompt_index == group).nonzero()[:, 0].tolist():
                k = next(own)
                assert samples.prompt_index[k] == place and samples.judgements[k] == part.judgements[i]
                for column in ("number", "lengths", "truncated", "rewards", "greedy_rewards"):
                    assert getattr(samples, column)[k] == getattr(part, column)[i], column
                assert samples.components["style"][k] == part.components["style"][i]
                for column in ("tokens", "logprobs"):
                    ours, theirs = (x.split(getattr(x, column))[j] for x, j in ((samples, k), (part, i)))
                    assert ours.tolist() == theirs.tolist()
        assert next(own, None) is None


def test_groups_with_spread():
    generator = torch.Generator().manual_seed(1)
    samples = hand_part(generator, 9, [2])
    samples.rewards = samples.rewards.round()
    wanted = [g for g in range(9) if len({float(s) for s, h in zip(samples.rewards, samples.prompt_index) if h == g}) > 1]
    assert scoring.prompts_with_spread(samples) == wanted and 0 < len(wanted) < 8
    samples.rewards = torch.full((len(samples),), 0.1) + torch.arange(len(samples)) * 1e-8           # equal up to rounding
    assert scoring.prompts_with_spread(samples) == []


def test_groups_without_spread_are_counted():
    """By the samples of each prompt; prompts with one sample each are compared over the whole step."""
    generator = torch.Generator().manual_seed(1)
    parts = [hand_part(generator, 9, [2]) for _ in range(2)]

    def count(parts: list[Batch]) -> int:
        batch = Batch.concatenate(parts)
        return len(batch.prompt_index.unique()) - len(scoring.prompts_with_spread(batch))

    for part in parts:
        part.rewards = part.rewards.round()
    earned = [{float(s) for s, h in zip(part.rewards, part.prompt_index) if h == g} for part in parts
              for g in set(part.prompt_index.tolist())]
    flat = sum(len(scores) == 1 for scores in earned)
    assert count(parts) == flat and 0 < flat < len(earned)
    single = [part.select((part.number == 0).nonzero()[:, 0]) for part in parts]
    assert count(single) == 0
    for value, part in enumerate(single):
        part.rewards = torch.full_like(part.rewards, float(value))
    assert [count([part]) for part in single] == [len(part) for part in single]
    assert count(single) == 0


@pytest.fixture(scope="module")
def ruled(tmp_path_factory, picture_rows):
    """rows.jsonl: 8 prompts with 0 or 1 pictures; rules.py: rewards of which those of five prompts are always equal."""
    folder = tmp_path_factory.mktemp("ruled")
    (folder / "rules.py").write_text(RULED)
    picture = str(Path(picture_rows).parent / "picture-1-0.png")
    rows = [{"prompt": f"row {i}: how many circles?", "images": [picture] if i % 2 else []} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def dynamic(qwen25, ruled, out, *more: str) -> list[dict]:
    """Records of a run of 4 prompts x 2 samples per step, of at most 3 rollouts."""
    ppo.main(["--model", str(qwen25), "--data", str(ruled / "rows.jsonl"), "--reward", f"{ruled / 'rules.py'}:flat", "--out",
              str(out), "--max_prompt_tokens", "256", "--max_new_tokens", "4", "--max_tokens_per_pack", "400",
              "--prompts_per_step", "4", "--samples_per_prompt", "2", "--advantage", "dr_grpo", "--reward_norm", "--actor_lr", "1e-3",
              "--dynamic_sampling", "3", "--log_samples", "1", *more])
    return [record for record in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "step" in record]


def test_flat_prompts_are_replaced(qwen25, ruled, tmp_path):
    """Which prompts a step trains on, by a loop over the draws; and a resume between steps of unequal appetite is exact,
    the moments of --reward_norm with it."""
    records = dynamic(qwen25, ruled, tmp_path / "whole", "--steps", "4", "--save_every", "2")
    order = np.concatenate([np.random.default_rng([0, epoch]).permutation(8) for epoch in range(6)]).tolist()
    flat, batch, appetites, scored = {0, 2, 3, 5, 6}, 0, [], []
    for step, record in enumerate(records, start=1):
        rolled, lively = [], 0
        while len(rolled) < 3 and lively < 4:
            rolled.append(order[4 * batch:4 * batch + 4])
            lively += sum(row not in flat for row in rolled[-1])
            batch += 1
        missing = max(0, 4 - lively)                           # then the last rolled flat prompts fill the step
        fill = [(k, row) for k, rows in enumerate(rolled) for row in rows if row in flat][::-1][:missing]
        used = [row for k, rows in enumerate(rolled) for row in rows if row not in flat or (k, row) in fill][:4]
        samples = (tmp_path / "whole" / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines()
        assert [json.loads(sample)["index"] for sample in samples] == [row for row in used for _ in range(2)]
        assert record["rollout/rollouts"] == len(rolled) and record["rollout/groups_not_replaced"] == missing
        assert record["rollout/groups_without_spread"] == sum(row in flat for rows in rolled for row in rows)
        assert record["rollout/samples"] == 8
        appetites.append((len(rolled), missing))
        for row in [row for rows in rolled for row in rows]:
            scored += [0.5, 0.5] if row in flat else [0.0, 1.0]
    assert {n for n, _ in appetites} == {2, 3} and {missing > 0 for _, missing in appetites} == {True, False}, appetites
    dynamic(qwen25, ruled, tmp_path / "parts", "--steps", "2")
    parts = dynamic(qwen25, ruled, tmp_path / "parts", "--steps", "4")
    for ours, theirs in zip(parts, records, strict=True):
        assert {k: v for k, v in ours.items() if "perf" not in k} == {k: v for k, v in theirs.items() if "perf" not in k}
    for step in range(1, 5):
        first, second = ((tmp_path / name / "samples" / f"step-{step:06d}.jsonl").read_text() for name in ("whole", "parts"))
        assert first == second
    state = json.loads((tmp_path / "whole" / "checkpoints" / "step-4" / "state.json").read_text())
    assert state["batches_taken"] == batch
    moments = losses.RunningMoments()                           # of all that were scored, and then dropped
    moments.load_state_dict(state["moments"])
    assert (moments.count, moments.mean) == (len(scored), pytest.approx(0.5)) and len(scored) > 4 * 8
    assert moments.std == pytest.approx(np.std(scored, ddof=1))


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["dr_grpo", "remax"])
def test_several_rollouts_feed_an_update(qwen25, ruled, tmp_path, advantage):
    """Two rollouts of two prompts give what one of four gives, to rounding; resumed between two steps, every bit."""
    more = ["--dynamic_sampling", "0", "--advantage", advantage, "--minibatches", "2", "--max_new_tokens", "3", "--steps"]
    one = dynamic(qwen25, ruled, tmp_path / "one", *more, "4")
    whole = dynamic(qwen25, ruled, tmp_path / "whole", *more, "4", "--rollouts_per_step", "2")
    dynamic(qwen25, ruled, tmp_path / "parts", *more, "2", "--rollouts_per_step", "2")
    parts = dynamic(qwen25, ruled, tmp_path / "parts", *more, "4", "--rollouts_per_step", "2")
    for first, second, third in zip(one, whole, parts, strict=True):
        first, second, third = ({k: v for k, v in step.items() if "perf" not in k} for step in (first, second, third))
        assert second == third and (first.pop("rollout/rollouts"), second.pop("rollout/rollouts")) == (1, 2)
        assert second == pytest.approx(first, rel=1e-3, abs=ROUNDING)
    answers = [[json.loads(line)["response"] for line in (tmp_path / name / "samples" / "step-000004.jsonl").open()]
               for name in ("one", "whole")]
    assert answers[0] == answers[1] and len(answers[0]) == 8
    state = json.loads((tmp_path / "parts" / "checkpoints" / "step-4" / "state.json").read_text())
    assert state["batches_taken"] == 8 and parts[-1]["rollout/episode"] == 2


def test_a_prompt_without_samples_fills_no_place_of_one_that_has_some(qwen25, ruled, tmp_path):
    """Each step sees all eight rows: three of spread, two whose picture does not decode, and three flat ones, of which one
    fills the step. An evaluation counts the passes by what was drawn."""
    whole = (Path(ruled) / "rows.jsonl").read_text().splitlines()
    (ruled / "damaged.png").write_bytes(Path(json.loads(whole[1])["images"][0]).read_bytes()[:-40])
    rows = [json.loads(line) | ({"images": ["damaged.png"]} if i in (3, 5) else {}) for i, line in enumerate(whole)]
    (ruled / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = dynamic(qwen25, ruled, tmp_path, "--data", str(ruled / "bad.jsonl"), "--on_bad_row", "skip", "--dynamic_sampling",
                      "2", "--steps", "3", "--minibatches", "4", "--eval_data", str(ruled / "rows.jsonl"), "--eval_every", "3")
    steps = [record for record in records if "rollout/samples" in record]
    for step in steps:
        found = (step["rollout/samples"], step["rollout/groups_without_spread"], step["rollout/groups_not_replaced"])
        assert found == (8, 3, 1) and step["train/actor_updates"] == 4
    first, last = (record for record in records if "eval/episode" in record)
    assert len(steps) == 3 and first["eval/episode"] == 0 and last["eval/episode"] == steps[2]["rollout/episode"] == 3


@pytest.mark.parametrize("limit", [0, 2])
def test_the_baseline_of_remax_is_the_greedy_reward(env, ruled, limit):
    """Of each prompt, whatever is sampled; also of prompts of two rollouts that were merged."""
    rollouts = max(1, limit)
    args = with_flags(env.args, advantage="remax", dynamic_sampling=limit, prompts_per_step=4 * rollouts)
    reward = scoring.load(flags.RewardArgs(reward=f"{ruled / 'rules.py'}:letters"))
    order = lambda index: (env.prompts, list(range(4 * index, 4 * index + 4)))  # noqa: E731
    with PromptLoader(env.processor, args.data, order) as loader:
        samples, rolled = ppo.collect(env.actor, loader, reward, env.sampling, state_of(env), args)
    greedy = ppo.rollout(env.actor, take(env), dataclasses.replace(env.sampling, greedy=True), 1)
    texts = env.processor.tokenizer.batch_decode([t.tolist() for t in greedy.split(greedy.tokens)], skip_special_tokens=True)
    wanted = {prompt.source: sum(c in "aeiou " for c in text) / max(1, len(text)) + 0.1 * len(prompt.images)
              for prompt, text in zip(env.prompts, texts)}
    assert len(set(wanted.values())) == 4 and len(samples) == 16 * rollouts and rolled["rollout/rollouts"] == rollouts
    for group, baseline, score in zip(samples.prompt_index.tolist(), samples.greedy_rewards.tolist(), samples.rewards.tolist()):
        assert baseline == pytest.approx(wanted[samples.prompts[group].source], abs=rounding(16))
    ppo.compute_advantages(samples, state_of(env, 0.0), with_flags(args, kl_in="loss", advantages_norm="off"))
    for i, own in enumerate(samples.split(samples.advantages)):
        assert own.tolist() == pytest.approx([float(samples.rewards[i] - samples.greedy_rewards[i])] * len(own), abs=rounding(16))
