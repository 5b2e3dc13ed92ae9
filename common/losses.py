"""Every formula of the two scripts, as pure functions of tensors: nothing here communicates or
knows a model.

    advantages    (S,) rewards, (N,) KL and values -> (N,) advantages and returns; the shaping of
                  rewards; the weight of the KL
    losses        (N,) terms per token, and the weight of each token in the one sum of an update

Shape legend: S sequences, N response tokens of all sequences, one after the other, G prompts, E
experts. A gap inside a response (tool output) is left out of the N tokens: every sum
skips it as if it took no time.

A loss is ``sum_t weight_t * term_t`` with weights from the counts of the whole optimizer step, over
all ranks and packs (`token_weights`). Nothing here takes a mean over the tokens it happens to
be given.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-6  # smaller differences of rewards, and smaller advantages, are taken for none

# -------------------------------------------------------------------------------------------------
# Advantages: an estimator maps `AdvantageInputs` to (N,) advantages before whitening, and (N,) returns
# -------------------------------------------------------------------------------------------------


@dataclass
class AdvantageInputs:
    """What the samples of a step earned: all that an estimator may look at."""

    rewards: Tensor  # (S,) shaped
    kl: Tensor  # (N,) KL to the reference; zeros without one
    kl_coef: float  # its weight in the reward
    lengths: Tensor  # (S,) response tokens
    prompt_index: Tensor  # (S,) int64, the prompt of a sample
    # (N,) the part of the rewards that was earned at the end of a turn, where it was
    turn_rewards: Tensor | None = None
    values: Tensor | None = None  # (N,) the critic's
    # (S,) shaped reward of the greedy response to the same prompt
    greedy_rewards: Tensor | None = None
    gamma: float = 1.0
    gae_lambda: float = 1.0
    # of the advantages, where they have another one than the returns; (S,) or one for all
    gae_lambda_policy: Tensor | float | None = None

    @functools.cached_property
    def token_rewards(self) -> Tensor:
        """(N,) what each token earns: minus the weighted KL, plus the reward of its turn; the last
        token of a sample earns what is left of the sample's reward."""
        if self.turn_rewards is None:
            return token_rewards(self.rewards, self.kl, self.lengths, self.kl_coef)
        left = (self.rewards.double() - self.per_sample(self.turn_rewards)).to(self.rewards.dtype)
        at_turns = self.turn_rewards.to(left.dtype)
        return at_turns + token_rewards(left, self.kl, self.lengths, self.kl_coef)

    @property
    def rewards_after_kl(self) -> Tensor:
        """(S,) rewards less the weighted KL of all tokens of the sample: what the sample earns in
        total."""
        return self.rewards - self.kl_coef * self.per_sample(self.kl)

    def per_sample(self, per_token: Tensor) -> Tensor:
        """(N,) -> (S,) sums."""
        return torch.stack([part.sum() for part in per_token.split(self.lengths.tolist())])

    @functools.cached_property
    def rewards_to_go(self) -> Tensor:
        """(N,) the discounted sum of what is earned from each token on."""
        return rewards_to_go(self.token_rewards, self.lengths, self.gamma)

    def per_token(self, per_sample: Tensor) -> Tensor:
        """(S,) -> (N,)."""
        return per_sample.repeat_interleave(self.lengths)


AdvantagesAndReturns = tuple[Tensor, Tensor]  # (N,) each


def gae_estimate(x: AdvantageInputs) -> AdvantagesAndReturns:
    """Generalised advantage estimation with a critic. Advantages may have a lambda of their own, while
    the critic's targets keep theirs (decoupled GAE: VC-PPO, Yuan et al. 2025; VAPO, Yue et al. 2025)."""
    advantages, returns = gae(x.token_rewards, x.values, x.lengths, x.gamma, x.gae_lambda)
    if x.gae_lambda_policy is not None:
        advantages, _ = gae(x.token_rewards, x.values, x.lengths, x.gamma, x.gae_lambda_policy)
    return advantages, returns


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """(S,) float64 ``1 - 1 / (alpha * length)``, so that the weights of a response's TD errors sum to
    about alpha times its length (VAPO, Yue et al. 2025, alpha 0.05). 0 where a response of less than
    1 / alpha tokens would make it negative."""
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)


def reinforce(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The discounted reward to go (Williams 1992)."""
    return x.rewards_to_go, x.rewards_to_go


def remax(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward to go less the undiscounted reward of the greedy response (Li et al. 2024)."""
    return x.rewards_to_go - x.per_token(x.greedy_rewards), x.rewards_to_go


def grpo(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward among those of its prompt, divided by their deviation (Shao et al. 2024)."""
    return _compare_then_subtract_kl(x, x.prompt_index)


def cpgd(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward within the whole step, divided by its deviation (Liu et al. 2025)."""
    return _compare_then_subtract_kl(x, torch.zeros_like(x.prompt_index))


def dr_grpo(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward less the mean of its prompt (Liu et al. 2025). Whitened, it is reinforce_baseline
    (Hu 2025)."""
    return _same(x, centre(x.rewards_after_kl, x.prompt_index))


def rloo(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward less the mean of the prompt's other samples (Ahmadian et al. 2024)."""
    _, place, count = x.prompt_index.unique(return_inverse=True, return_counts=True)
    scale = (count / (count - 1))[place]  # (S,)
    return _same(x, centre(x.rewards_after_kl, x.prompt_index) * scale)


def opo(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward less the mean of its prompt weighted by length (Hao et al. 2025)."""
    return _same(x, centre(x.rewards_after_kl, x.prompt_index, weight=x.lengths.double()))


def gpg(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward less the mean of its prompt, scaled up by the share of samples whose prompt has
    spread (Chu et al. 2025), which is that of the rewards before the KL."""
    alive = int(has_spread(x.rewards, x.prompt_index).sum())
    scale = len(x.rewards) / alive if alive else 0.0
    return _same(x, centre(x.rewards_after_kl, x.prompt_index) * scale)


def _same(x: AdvantageInputs, per_sample: Tensor) -> AdvantagesAndReturns:
    """(S,) advantages of samples as those of their tokens; returns are the same."""
    advantages = x.per_token(per_sample.to(x.rewards.dtype))
    return advantages, advantages


def _compare_then_subtract_kl(x: AdvantageInputs, compared: Tensor) -> AdvantagesAndReturns:
    """Standardize the rewards alone, then subtract the KL to go, token by token and undiscounted.

    With the KL inside, equal rewards would yield the KL's noise over its own spread.
    """
    standard = standardize(x.rewards, compared).to(x.rewards.dtype)  # (S,)
    per_sample = x.kl.split(x.lengths.tolist())
    kl_to_go = torch.cat([part.flip(0).cumsum(0).flip(0) for part in per_sample])  # (N,)
    advantages = x.per_token(standard) - x.kl_coef * kl_to_go
    return advantages, advantages


# What follows compares the samples of equal number in ``compared`` (S,) int64.


def centre(rewards: Tensor, compared: Tensor, weight: Tensor | None = None) -> Tensor:
    """(S,) float64 rewards less the mean of those compared, weighted if ``weight`` (S,) is given;
    exactly 0 where these have no spread.

    Raises:
        ValueError: a sample that is compared with no other.
    """
    ids, place, count = compared.unique(return_inverse=True, return_counts=True)
    if count.min() < 2:
        raise ValueError(
            f"the samples of a prompt are compared, but prompt {int(ids[count.argmin()])} has only "
            "one: draw two or more samples per prompt"
        )
    x = rewards.double()
    weight = torch.ones_like(x) if weight is None else weight
    empty = torch.zeros(len(ids), dtype=torch.float64)  # (G,)
    total = empty.index_add(0, place, weight)
    baseline = empty.index_add(0, place, weight * x) / total.clamp(min=1)
    # Equal rewards must give exactly 0: the rounding error of their mean, divided by a standard
    # deviation just as small, would be of order 1.
    return torch.where(has_spread(x, compared), x - baseline[place], 0.0)


def standardize(rewards: Tensor, compared: Tensor) -> Tensor:
    """(S,) float64 rewards less the mean of those compared, over their unbiased standard
    deviation."""
    centred = centre(rewards, compared)
    ids, place, count = compared.unique(return_inverse=True, return_counts=True)
    # (G,)
    squares = torch.zeros(len(ids), dtype=torch.float64).index_add(0, place, centred.square())
    deviation = (squares / (count - 1)).sqrt()
    return centred / (deviation[place] + 1e-6)


def has_spread(rewards: Tensor, compared: Tensor) -> Tensor:
    """(S,) bool: whether the rewards compared with a sample's differ, by more than rounding."""
    ids, place = compared.unique(return_inverse=True)
    x = rewards.double()
    empty = torch.zeros(len(ids), dtype=torch.float64)  # (G,)
    highest = empty.scatter_reduce(0, place, x, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, place, x, "amin", include_self=False)
    return (highest - lowest)[place] >= ROUNDING


def token_rewards(rewards: Tensor, kl: Tensor, lengths: Tensor, kl_coef: float) -> Tensor:
    """(S,) rewards and (N,) KL -> (N,): ``-kl_coef * kl``, plus the reward on the last token of
    each sequence."""
    last = lengths.cumsum(0)[lengths > 0] - 1
    return (-kl_coef * kl).index_add(0, last, rewards[lengths > 0])


def gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: Tensor | float
) -> AdvantagesAndReturns:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (N,) advantages and
    unwhitened returns. ``lam`` is one number, or (S,).

    The value after the last token is 0, even if the response was truncated.
    """
    longest_first = lengths.argsort(descending=True)
    starts = (lengths.cumsum(0) - lengths)[longest_first]  # (S,)
    lam = torch.as_tensor(lam, dtype=torch.float64).expand(len(lengths))[longest_first]  # (S,)
    # (longest,) sequences with a token at position t
    reach = len(lengths) - torch.bincount(lengths).cumsum(0)[:-1]
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    following = torch.zeros(len(lengths), dtype=torch.float64)  # (S,)
    carry = torch.zeros(len(lengths), dtype=torch.float64)  # (S,)
    # one position at a time, for all sequences that reach it
    for t, count in reversed(list(enumerate(reach.tolist()))):
        place = starts[:count] + t
        value = values[place].double()
        delta = rewards[place].double() + gamma * following[:count] - value
        carry[:count] = delta + gamma * lam[:count] * carry[:count]
        following[:count] = value
        advantages[place] = carry[:count]
    return advantages.to(rewards.dtype), (advantages + values).to(rewards.dtype)


def rewards_to_go(rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """(N,) discounted sum of the rewards from each token on: GAE with lambda 1 and no critic."""
    return gae(rewards, torch.zeros_like(rewards), lengths, gamma, 1.0)[0]


def whiten(x: Tensor) -> Tensor:
    """(N,) to mean 0 and unbiased variance 1. A single entry is only centred."""
    centred = x.double() - x.double().mean()
    if len(x) > 1:
        centred = centred / (centred.var() + 1e-8).sqrt()
    return centred.to(x.dtype)


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """``1 - Var(returns - values) / Var(returns)`` over the tokens (N,), 0-d; 0 where the returns
    do not vary."""
    values, returns = values.double(), returns.double()
    if len(returns) < 2 or returns.var() == 0:
        return torch.zeros(())
    return (1 - (returns - values).var() / returns.var()).float()


# -------------------------------------------------------------------------------------------------
# Shaping of rewards, weight of the KL
# -------------------------------------------------------------------------------------------------


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int, factor: float) -> Tensor:
    """(S,) length penalty (DAPO, Yu et al. 2025, eq. 13): from 0, ``buffer`` tokens below the
    limit, to -factor."""
    return (-(lengths - (max_new_tokens - buffer)) / buffer * factor).clamp(max=0.0)


@dataclass
class RunningMoments:
    """Mean and unbiased standard deviation of all values so far (Welford; batches merged after Chan
    et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    @property
    def std(self) -> float:
        """1 where there is none to divide by: before two values, or where all were the same."""
        std = math.sqrt(self.squares / max(1, self.count - 1))
        return std if std > 1e-6 else 1.0

    def normalize(self, rewards: Tensor) -> Tensor:
        """(S,) rewards less the mean so far, over the standard deviation so far."""
        return (rewards - self.mean) / self.std

    def update(self, x: Tensor) -> None:
        x = x.double()
        total = self.count + x.numel()
        shift = float(x.mean()) - self.mean
        within = float((x - x.mean()).square().sum())
        between = shift**2 * self.count * x.numel() / total
        self.squares += within + between
        self.mean += shift * x.numel() / total
        self.count = total


def adapt_kl_coef(coef: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The weight of the KL after a rollout of so many samples with ``kl`` per token, both over all
    ranks (Ziegler et al. 2019, section 2.2). It stays positive for fewer samples than 5 horizons."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * samples / horizon)


# -------------------------------------------------------------------------------------------------
# Weights of tokens
# -------------------------------------------------------------------------------------------------


def token_weights(lengths: Tensor, mode: str, max_new_tokens: int) -> Tensor:
    """(S,) weight of each token of a sequence in the loss of an optimizer step.

    Args:
        lengths: (S,) tokens that take part in this term, of every sequence of the optimizer step:
            of all ranks and packs.
        max_new_tokens: the constant length of seq-mean-token-sum-norm (Dr.GRPO, Liu et al. 2025).
    """
    n_seqs = (lengths > 0).sum()
    divisors = {
        "token-mean": lengths.sum(),
        "seq-mean-token-sum": n_seqs,
        "seq-mean-token-mean": n_seqs * lengths,
        "seq-mean-token-sum-norm": n_seqs * max_new_tokens,
    }
    return (lengths > 0) / divisors[mode].clamp(min=1)


def high_entropy_mask(entropy: Tensor, lengths: Tensor, fraction: float) -> Tensor:
    """(N,) bool: the ``max(1, int(fraction * n))`` tokens of highest entropy in each sequence (Wang
    et al. 2025).

    ``entropy`` (N,) holds the sequences one after the other, ``lengths`` (S,) their tokens.
    """
    masks = []
    for part in entropy.split(lengths.tolist()):
        rank = part.argsort(descending=True, stable=True).argsort()
        masks.append(rank < max(1, int(fraction * len(rank))))
    return torch.cat(masks)


# -------------------------------------------------------------------------------------------------
# Policy losses: a function of `PolicyLossInputs` and its clip range -> `PolicyLossOutput`
# -------------------------------------------------------------------------------------------------


class PolicyLossInputs:
    """The tokens of a pack as a policy loss sees them.

    Args:
        logp, old, adv: (T,) log-probs under the trained policy and at the start of the update;
            advantages.
        seq: (T,) int64 in [0, n_seq), the sequence of each token.
        in_loss: (T,) bool, tokens that count in means over a sequence and in statistics; the others
            get weight 0.
    """

    def __init__(
        self,
        logp: Tensor,
        old: Tensor,
        adv: Tensor,
        seq: Tensor,
        n_seq: int,
        in_loss: Tensor,
    ):
        self.logp, self.old, self.adv = logp, old, adv
        self.seq, self.n_seq, self.in_loss = seq, n_seq, in_loss
        self.delta = (logp - old).clamp(-20, 20)  # keeps exp and its gradient finite
        self.ratio = self.delta.exp()
        # What clips are counted by. Whitening leaves rounding, of either sign, where the samples of a
        # prompt earned the same.
        self.up, self.down = adv > ROUNDING, adv < -ROUNDING

    def sequence_mean(self, x: Tensor) -> Tensor:
        """(T,) mean of ``x`` over the kept tokens of each sequence, given to all its tokens."""
        total = x.new_zeros(self.n_seq).index_add(0, self.seq, x * self.in_loss)
        count = x.new_zeros(self.n_seq).index_add(0, self.seq, self.in_loss.to(x.dtype))
        return (total / count.clamp(min=1))[self.seq]


@dataclass
class PolicyLossOutput:
    """(T,) terms of a policy-gradient loss, to be summed with `token_weights`, and where they were
    clipped."""

    per_token: Tensor
    ratio: Tensor
    high: Tensor | None = None  # bool: clipped from above
    low: Tensor | None = None  # bool: clipped from below
    dual: Tensor | None = None  # bool: bounded by the dual clip


def ppo(x: PolicyLossInputs, low: float, high: float, dual_clip: float = 0.0) -> PolicyLossOutput:
    """Ratio clipped to ``1 - low .. 1 + high`` (Schulman et al. 2017); where adv < 0, ``dual_clip``
    c above 1 bounds the term by ``-c * adv`` (Ye et al. 2020; 0: off)."""
    out = _clipped(x, x.ratio, low, high)
    if dual_clip:
        out.dual = x.down & (x.ratio > dual_clip)
        out.per_token = torch.where(
            x.adv < 0, torch.minimum(out.per_token, -dual_clip * x.adv), out.per_token
        )
    return out


def gspo(x: PolicyLossInputs, low: float, high: float) -> PolicyLossOutput:
    """PPO with the ratio of the whole sequence, per-token form (Zheng et al. 2025)."""
    log_ratio = x.sequence_mean(x.delta.detach()) + (x.logp - x.logp.detach())
    return _clipped(x, log_ratio.clamp(max=10).exp(), low, high)


def _clipped(x: PolicyLossInputs, ratio: Tensor, low: float, high: float) -> PolicyLossOutput:
    clipped = ratio.clamp(1 - low, 1 + high)
    return PolicyLossOutput(
        per_token=torch.maximum(-x.adv * ratio, -x.adv * clipped),
        ratio=ratio,
        high=x.up & (ratio > 1 + high),
        low=x.down & (ratio < 1 - low),
    )


def cpgd_loss(x: PolicyLossInputs, low: float, high: float) -> PolicyLossOutput:
    """The log-prob, clipped where the ratio would be, on the side that adv pushes to (Liu et al.
    2025)."""
    upper = x.old + math.log1p(high)
    lower = x.old + (math.log1p(-low) if low < 1 else -math.inf)
    clipped = torch.where(x.adv > 0, torch.minimum(x.logp, upper), torch.maximum(x.logp, lower))
    return PolicyLossOutput(
        per_token=-x.adv * clipped,
        ratio=x.ratio,
        high=x.up & (x.logp > upper),
        low=x.down & (x.logp < lower),
    )


def gmpo(x: PolicyLossInputs, low: float, high: float) -> PolicyLossOutput:
    """Geometric mean of ratios, clipped in log space on the side that adv pushes to (Zhao et al.
    2025)."""
    adv = x.sequence_mean(x.adv)
    clipped = torch.where(adv > 0, x.delta.clamp(max=high), x.delta.clamp(min=-low))
    return PolicyLossOutput(
        per_token=-adv * x.sequence_mean(clipped).exp(),
        ratio=x.ratio,
        high=(adv > ROUNDING) & (x.delta > high),
        low=(adv < -ROUNDING) & (x.delta < -low),
    )


def cispo(x: PolicyLossInputs, low: float, high: float) -> PolicyLossOutput:
    """The clipped ratio as a constant weight of the log-prob (MiniMax-M1 2025)."""
    clipped = x.ratio.detach().clamp(1 - low, 1 + high)
    return PolicyLossOutput(
        per_token=-clipped * x.adv * x.logp,
        ratio=x.ratio,
        high=x.ratio > 1 + high,
        low=x.ratio < 1 - low,
    )


def sapo(x: PolicyLossInputs, low: float, high: float) -> PolicyLossOutput:
    """A soft gate in place of the clip (Gao et al. 2025); it decays faster where the policy is
    pushed down."""
    tau = torch.where(x.adv > 0, 1.0, 1.05)
    terms = -x.adv * 4 / tau * torch.sigmoid(tau * (x.ratio - 1))
    return PolicyLossOutput(terms, x.ratio)


def ratio_sums(x: PolicyLossInputs, out: PolicyLossOutput) -> dict[str, Tensor]:
    """Sums over the kept tokens, 0-d and detached: clipped tokens, the ratio, and KL(old | policy)
    by k3, not clamped, so that a policy that has run away shows."""
    log_ratio = (x.logp.detach() - x.old).double()
    moved = torch.expm1(log_ratio) - log_ratio
    sums = {"ratio": (out.ratio.detach() * x.in_loss).sum(), "approx_kl": (moved * x.in_loss).sum()}
    for name, clipped in (
        ("clipped_high", out.high),
        ("clipped_low", out.low),
        ("clipped_dual", out.dual),
    ):
        sums[name] = sums["ratio"].new_zeros(()) if clipped is None else (clipped & x.in_loss).sum()
    return sums


def largest_ratio(x: PolicyLossInputs, out: PolicyLossOutput) -> Tensor:
    """0-d, over the kept tokens; 0 without any."""
    ratio = out.ratio.detach() * x.in_loss
    return torch.cat([ratio, ratio.new_zeros(1)]).max()


# -------------------------------------------------------------------------------------------------
# Value loss, KL, load balance
# -------------------------------------------------------------------------------------------------


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """(N,) ``max((V - R)^2, (V_clip - R)^2) / 2``, V_clip within ``clip`` of the old value; 0: no
    clip."""
    error = (values - returns).square()
    if clip:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error


def kl_penalty(kind: str, logp: Tensor, ref: Tensor) -> Tensor:
    """(N,) estimates of KL(policy | reference) on samples of the policy (Schulman 2020,
    "Approximating KL divergence").

    ``kind``: k1, k2, k3 or abs. A trailing ``+`` keeps the value and takes the gradient of k2,
    whose expectation is the gradient of the KL. As a loss, k1 has an expected gradient of zero, so
    it belongs in the reward. Only k1 does: there the estimate multiplies grad log p, so it must be
    the log-ratio itself; the exact KL, which is the same for every draw, would cancel.
    """
    if kind.endswith("+"):
        k2 = kl_penalty("k2", logp, ref)
        return kl_penalty(kind[:-1], logp, ref).detach() + k2 - k2.detach()
    delta = logp - ref
    if kind == "k1":
        return delta
    if kind == "k2":
        return 0.5 * delta.square()
    if kind == "k3":
        delta = delta.clamp(-20, 20)
        # exp(-d) - 1 loses its digits near d = 0
        return (torch.expm1(-delta) + delta).clamp(-10, 10)
    if kind == "abs":
        return delta.abs()
    raise ValueError(f"unknown KL estimator {kind!r}")


def expert_load(logits: list[Tensor], weights: Tensor, top_k: int) -> Tensor:
    """(E,) how often each expert is chosen: logits (L, E) of every layer, weights (L,) of the
    tokens of a row."""
    probs = torch.stack(logits).float().softmax(dim=-1)  # (layers, L, E)
    chosen = torch.zeros_like(probs).scatter(-1, probs.topk(top_k, dim=-1).indices, 1.0)
    return (chosen * weights[:, None]).sum(dim=(0, 1))


def balance_loss(logits: list[Tensor], weights: Tensor, load: Tensor, top_k: int) -> Tensor:
    """A row's share of E sum_e F_e P_e, which is ``top_k`` where all experts are used alike (Switch
    Transformer, eq. 4).

    F_e is the share of tokens, and P_e the mean probability, that expert e gets in a whole
    minibatch on all ranks. F comes from ``load`` (E,), the sum of `expert_load` over its rows,
    without gradient: given it, the loss is a sum over tokens.
    """
    total = load.sum() / top_k  # tokens x layers
    probs = torch.stack(logits).float().softmax(dim=-1)  # (layers, L, E)
    probs = (probs * weights[:, None]).sum(dim=(0, 1))  # (E,)
    return len(load) * (load / total * probs / total).sum()
