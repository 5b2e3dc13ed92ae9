"""Advantages and policy losses, as pure functions of tensors: nothing here communicates or knows a
model.

    advantages    (S,) rewards, (N,) KL and values -> (N,) advantages and returns; reward shaping;
                  the adaptive weight of the KL
    losses        a term for each token (`ppo` and others: here the ratio is clipped), and the
                  weight of each token (`token_weights`)

Shapes: S sequences; N response tokens of all sequences, one sequence after the other; T of them in
a pack of L tokens; G prompts; E experts. A gap inside a response (a tool's output) is not among the
N tokens: sums and discounts skip it as if it took no time.

A loss is ``sum_t weight_t * term_t``. The weights come from token counts of the whole optimizer
step, over all ranks and packs; none is a mean over just the tokens of a pack.
"""

import functools
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

NO_VALUES = torch.zeros(0)
ROUNDING = 1e-6  # smaller differences of rewards, and smaller advantages, count as zero

# -------------------------------------------------------------------------------------------------
# Advantages: an estimator maps `AdvantageInputs` to (N,) advantages before whitening, and (N,) returns
# -------------------------------------------------------------------------------------------------


@dataclass
class AdvantageInputs:
    """What an estimator knows about the samples of a step; tensors that a run does not have are empty."""

    rewards: Tensor  # (S,) shaped
    kl: Tensor  # (N,) KL to the reference; zeros without one
    kl_coef: float  # its weight in the reward
    lengths: Tensor  # (S,) response tokens
    prompt_index: Tensor  # (S,) int64, the prompt of a sample
    # (S,) each, before shaping; NaN where a sample has none: the rewards of several sources, or the
    # parts of a single source's reward
    components: dict[str, Tensor] = field(default_factory=dict)
    weights: Tensor = NO_VALUES  # (S, K) of the K sources
    # (S, 2) of the sample's row in earlier steps: its samples, and the sum of their rewards
    history: Tensor = NO_VALUES
    turn_ends: Tensor = NO_VALUES  # (N,) bool: the last token of a turn of the policy
    # (N,) the part of the rewards that turns and spans of text earned, at their last tokens
    turn_rewards: Tensor = NO_VALUES
    values: Tensor = NO_VALUES  # (N,) the critic's
    # (S,) shaped reward of the greedy response to the same prompt
    greedy_rewards: Tensor = NO_VALUES
    gamma: float = 1.0
    turn_gamma: float = 1.0
    gae_lambda: float = 1.0
    gae_lambda_policy: float | None = None  # of gae's advantages alone; None: gae_lambda
    gae_alpha: float = 0.0  # above 0: their lambda is `length_adaptive_lambda`

    @functools.cached_property
    def token_rewards(self) -> Tensor:
        """(N,) reward of each token: minus its weighted KL, plus the reward of the turn or span that it
        ends. The rest of the sample's reward falls on the sample's last token."""
        if not len(self.turn_rewards):
            return token_rewards(self.rewards, self.kl, self.lengths, self.kl_coef)
        earned = sum_per_sample(self.turn_rewards, self.lengths)  # (S,)
        left = (self.rewards.double() - earned).to(self.rewards.dtype)
        at_turns = self.turn_rewards.to(left.dtype)
        return at_turns + token_rewards(left, self.kl, self.lengths, self.kl_coef)

    @property
    def turns(self) -> Tensor:
        """(S,) number of turns."""
        return sum_per_sample(self.turn_ends.long(), self.lengths)

    @property
    def turn_lengths(self) -> Tensor:
        """(T,) tokens of each of the T turns of all samples."""
        return self.turn_ends.nonzero()[:, 0].diff(prepend=torch.tensor([-1]))

    @property
    def rewards_after_kl(self) -> Tensor:
        """(S,) rewards minus the weighted KL, summed over the tokens of the sample."""
        return self.rewards - self.kl_coef * sum_per_sample(self.kl, self.lengths)

    @functools.cached_property
    def rewards_to_go(self) -> Tensor:
        """(N,) the discounted sum of the token rewards from each token on."""
        return rewards_to_go(self.token_rewards, self.lengths, self.gamma)

    def per_token(self, per_sample: Tensor) -> Tensor:
        """(S,) -> (N,)."""
        return per_sample.repeat_interleave(self.lengths)


AdvantagesAndReturns = tuple[Tensor, Tensor]  # (N,) each


def no_advantages(x: AdvantageInputs) -> AdvantagesAndReturns:
    """Zeros: rewards are only measured."""
    return torch.zeros_like(x.kl), torch.zeros_like(x.kl)


def gae_estimate(x: AdvantageInputs) -> AdvantagesAndReturns:
    """Generalised advantage estimation with a critic. Advantages may use another lambda than the
    critic's targets (decoupled GAE: VC-PPO, Yuan et al. 2025; VAPO, Yue et al. 2025)."""
    advantages, returns = gae(x.token_rewards, x.values, x.lengths, x.gamma, x.gae_lambda)
    lam: Tensor | float | None = x.gae_lambda_policy
    if x.gae_alpha:
        lam = length_adaptive_lambda(x.lengths, x.gae_alpha)
    elif lam == x.gae_lambda:
        lam = None  # the same advantages
    if lam is not None:
        advantages, _ = gae(x.token_rewards, x.values, x.lengths, x.gamma, lam)
    return advantages, returns


def bi_level_gae(x: AdvantageInputs) -> AdvantagesAndReturns:
    """GAE over turns, from the value of the last token of each, with a discount of its own; and within
    a turn over its tokens, the last of which gets the advantage of the turn (VAGEN, Wang et al. 2025).

    What a turn earns before its last token (a KL, spans) is seen by the tokens of that turn alone."""
    ends = x.turn_ends
    _, targets = gae(x.token_rewards[ends], x.values[ends], x.turns, x.turn_gamma, x.gae_lambda)
    rewards = x.token_rewards.masked_scatter(ends, targets)
    return gae(rewards, x.values, x.turn_lengths, x.gamma, x.gae_lambda)


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """(S,) float64 ``max(0, 1 - 1 / (alpha * length))``: the weights of a response's TD errors then
    sum to about alpha times its length (VAPO, Yue et al. 2025, alpha 0.05)."""
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)


def reinforce(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The discounted reward to go (Williams 1992)."""
    return x.rewards_to_go, x.rewards_to_go


def remax(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward to go minus the undiscounted reward of the greedy response (Li et al. 2024)."""
    return x.rewards_to_go - x.per_token(x.greedy_rewards), x.rewards_to_go


def grpo(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward standardized among the samples of its prompt (Shao et al. 2024)."""
    return _subtract_kl(x, x.per_token(standardize(x.rewards, x.prompt_index)))


def turn_grpo(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward of each turn, standardized among the samples' turns of the same number, and of a prompt;
    a turn's tokens get the sum of its own and of all later ones. With two turns this is MT-GRPO with
    equal weights (Zeng et al. 2025, arXiv 2505.11821), with one grpo."""
    turns, each = x.turns, replace(x, lengths=x.turn_lengths)  # each turn as a sample
    earned = replace(x, kl_coef=0.0).token_rewards.double()  # (N,)
    rewards = sum_per_sample(earned, each.lengths)  # (T,)
    number = torch.cat([torch.arange(count) for count in turns.tolist()])  # (T,) in its sample
    group = x.prompt_index.repeat_interleave(turns) * len(number) + number  # (T,)
    to_go = rewards_to_go(standardize(rewards, group), turns, 1.0)  # (T,)
    return _subtract_kl(x, each.per_token(to_go))


def gdpo(x: AdvantageInputs) -> AdvantagesAndReturns:
    """Each source of rewards (or each component, if there is one source) is standardized among the
    samples of a prompt; the weighted sum of the results is divided by its standard deviation over
    the step (Liu et al. 2026, arXiv 2601.05242).

    That deviation is over samples, as in the paper and the authors' TRL; the authors' verl takes it
    over tokens. The mean of the sum is 0 already. A source adds 0 where it is NaN, and where it is
    equal for all samples of a prompt.
    """
    columns, weights = list(x.components.values()) or [x.rewards], x.weights
    if not x.components or not len(weights):
        weights = torch.ones(len(x.rewards), 1)
    weights = weights.expand(-1, len(columns))  # all components of one source have its weight
    total = torch.zeros_like(x.rewards, dtype=torch.float64)  # (S,)
    for values, weight in zip(columns, weights.T):
        (index,) = torch.where(~values.isnan())
        index = index[has_spread(values[index], x.prompt_index[index])]
        if len(index):
            standard = standardize(values[index], x.prompt_index[index])
            total[index] += weight[index] * standard
    return _subtract_kl(x, x.per_token(total / (total.std() + 1e-6)))


def cpgd(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward standardized among all samples of the step (Liu et al. 2025)."""
    all_alike = torch.zeros_like(x.prompt_index)
    return _subtract_kl(x, x.per_token(standardize(x.rewards, all_alike)))


def dr_grpo(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward minus the mean of its prompt (Liu et al. 2025). Whitened, it is reinforce_baseline
    (Hu 2025)."""
    return _for_all_tokens(x, centre(x.rewards_after_kl, x.prompt_index))


def rloo(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward minus the mean of the prompt's other samples (Ahmadian et al. 2024)."""
    _, group, count = x.prompt_index.unique(return_inverse=True, return_counts=True)
    scale = (count / (count - 1).clamp(min=1))[group]  # (S,)
    centred = centre(x.rewards_after_kl, x.prompt_index)
    return _for_all_tokens(x, centred * scale)


def opo(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward minus the length-weighted mean of its prompt (Hao et al. 2025)."""
    weight = x.lengths.double()
    return _for_all_tokens(x, centre(x.rewards_after_kl, x.prompt_index, weight))


def gpg(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward minus the mean of its prompt, divided by the share of samples in prompts whose
    rewards (before the KL) differ (Chu et al. 2025)."""
    alive = int(has_spread(x.rewards, x.prompt_index).sum())
    scale = len(x.rewards) / alive if alive else 0.0
    return _for_all_tokens(x, centre(x.rewards_after_kl, x.prompt_index) * scale)


def _for_all_tokens(x: AdvantageInputs, per_sample: Tensor) -> AdvantagesAndReturns:
    """Gives every token the advantage (S,) of its sample; the returns are the same numbers."""
    advantages = x.per_token(per_sample.to(x.rewards.dtype))
    return advantages, advantages


def _subtract_kl(x: AdvantageInputs, standard: Tensor) -> AdvantagesAndReturns:
    """Advantages from rewards (N,) that were standardized without the KL: each token subtracts its
    undiscounted KL to go.

    With the KL in the rewards, its noise would tell equal samples apart.
    """
    kl_by_sample = x.kl.split(x.lengths.tolist())
    kl_to_go = torch.cat([kl.flip(0).cumsum(0).flip(0) for kl in kl_by_sample])  # (N,)
    advantages = standard.to(x.rewards.dtype) - x.kl_coef * kl_to_go
    return advantages, advantages


# In the functions below, samples with the same number in ``group`` (S,) int64 are compared with each other.


def group_reduce(values: Tensor, group: Tensor, reduce: str) -> Tensor:
    """(S,) float64, at each sample the ``reduce`` (sum, amax or amin) of the values (S,) of its group."""
    ids, index = group.unique(return_inverse=True)
    reduced = torch.zeros(len(ids), dtype=torch.float64)  # (G,)
    reduced.scatter_reduce_(0, index, values.double(), reduce, include_self=False)
    return reduced[index]


def centre(rewards: Tensor, group: Tensor, weight: Tensor | None = None) -> Tensor:
    """(S,) float64 rewards minus the mean of the group, weighted by ``weight`` (S,) if given; exactly 0
    where all rewards of the group are equal, and where there is only one."""
    x = rewards.double()
    if weight is None:
        weight = torch.ones_like(x)
    total = group_reduce(weight, group, "sum")
    baseline = group_reduce(weight * x, group, "sum") / total.clamp(min=1)
    # Equal rewards must give exactly 0: the rounding error of their mean, divided by a standard
    # deviation just as small, would be of order 1.
    return torch.where(has_spread(x, group), x - baseline, 0.0)


def standardize(rewards: Tensor, group: Tensor) -> Tensor:
    """(S,) float64 rewards minus the mean of the group, divided by its unbiased standard deviation."""
    centred = centre(rewards, group)
    count = group_reduce(torch.ones_like(centred), group, "sum")
    squares = group_reduce(centred.square(), group, "sum")
    # 0 for a single sample, as is its reward
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    return centred / (deviation + 1e-6)


def has_spread(rewards: Tensor, group: Tensor) -> Tensor:
    """(S,) bool: whether the rewards of a sample's group differ by more than rounding."""
    return group_range(rewards, group) >= ROUNDING


def group_range(values: Tensor, group: Tensor) -> Tensor:
    """(S,) float64, at each sample the largest minus the smallest value (S,) of its group."""
    return group_reduce(values, group, "amax") - group_reduce(values, group, "amin")


def level(rewards: Tensor, group: Tensor, noise: Tensor) -> Tensor:
    """(S,) float64 rewards, in which those of a group are equal to their mean if they differ by less than
    the noise (S,) of one of them. NaN is in no group."""
    levelled = rewards.double().clone()
    (known,) = torch.where(~rewards.isnan())
    x, group, noise = levelled[known], group[known], noise[known]
    count = group_reduce(torch.ones_like(x), group, "sum")
    mean = group_reduce(x, group, "sum") / count
    is_noise = group_range(x, group) < group_reduce(noise, group, "amax")
    levelled[known] = torch.where(is_noise, mean, x)
    return levelled


def sum_per_sample(per_token: Tensor, lengths: Tensor) -> Tensor:
    """(S,) sums of values (N,) over the tokens of each sample."""
    return torch.stack([part.sum() for part in per_token.split(lengths.tolist())])


def token_rewards(rewards: Tensor, kl: Tensor, lengths: Tensor, kl_coef: float) -> Tensor:
    """(S,) rewards and (N,) KL -> (N,): ``-kl_coef * kl``, plus the reward at the last token of each
    sequence."""
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
    lam = torch.as_tensor(lam, dtype=torch.float64)
    lam = lam.expand(len(lengths))[longest_first]  # (S,)
    # (longest,) how many sequences reach position t
    reach = len(lengths) - torch.bincount(lengths).cumsum(0)[:-1]
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    following = torch.zeros(len(lengths), dtype=torch.float64)  # (S,)
    carry = torch.zeros(len(lengths), dtype=torch.float64)  # (S,)
    # one position at a time, for all sequences that reach it
    for t, count in reversed(list(enumerate(reach.tolist()))):
        index = starts[:count] + t
        value = values[index].double()
        delta = rewards[index].double() + gamma * following[:count] - value
        carry[:count] = delta + gamma * lam[:count] * carry[:count]
        following[:count] = value
        advantages[index] = carry[:count]
    return advantages.to(rewards.dtype), (advantages + values).to(rewards.dtype)


def rewards_to_go(rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """(N,) discounted sum of the rewards from each token on: GAE with lambda 1 and values of 0."""
    no_values = torch.zeros_like(rewards)
    return gae(rewards, no_values, lengths, gamma, 1.0)[0]


def whiten(x: Tensor) -> Tensor:
    """Scale (N,) to mean 0 and unbiased variance 1. A single number is only centred."""
    centred = x.double() - x.double().mean()
    if len(x) > 1:
        centred = centred / (centred.var() + 1e-8).sqrt()
    return centred.to(x.dtype)


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """``1 - Var(returns - values) / Var(returns)`` over the tokens (N,), 0-d; 0 if the returns do
    not vary."""
    values, returns = values.double(), returns.double()
    if len(returns) < 2 or returns.var() == 0:
        return torch.zeros(())
    return (1 - (returns - values).var() / returns.var()).float()


# -------------------------------------------------------------------------------------------------
# Shaping of rewards, weight of the KL
# -------------------------------------------------------------------------------------------------


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int, factor: float) -> Tensor:
    """(S,) length penalty (DAPO, Yu et al. 2025, eq. 13): 0 up to ``buffer`` tokens below the limit,
    then falling linearly to -factor at the limit."""
    over = lengths - (max_new_tokens - buffer)
    return (-over / buffer * factor).clamp(max=0.0)


@dataclass
class RunningMoments:
    """Mean and unbiased standard deviation of all values so far (Welford's method; batches are
    merged as in Chan et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    @property
    def std(self) -> float:
        """The standard deviation; 1 if there are fewer than two values, or all are equal."""
        std = math.sqrt(self.squares / max(1, self.count - 1))
        return std if std > 1e-6 else 1.0

    def normalize(self, rewards: Tensor) -> Tensor:
        """(S,) rewards minus the mean so far, divided by the standard deviation so far."""
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
    """The weight of the KL after a step with ``kl`` per token and ``samples`` samples, both over all
    ranks (Ziegler et al. 2019, section 2.2). Positive as long as samples < 5 * horizon."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * samples / horizon)


# -------------------------------------------------------------------------------------------------
# Weights of tokens
# -------------------------------------------------------------------------------------------------


AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
)


def token_weights(lengths: Tensor, mode: str, max_new_tokens: int) -> Tensor:
    """(S,) weight of each token of a sequence in the loss of an optimizer step.

    Args:
        lengths: (S,) number of tokens that take part in the term, for every sequence of the
            optimizer step, of all ranks and packs.
        mode: one of AGGREGATIONS.
        max_new_tokens: the constant length of seq-mean-token-sum-norm (Dr.GRPO, Liu et al. 2025).
    """
    n_seqs = (lengths > 0).sum()
    divisors = {
        "token-mean": lengths.sum(),
        "seq-mean-token-sum": n_seqs,
        "seq-mean-token-mean": n_seqs * lengths,
        "seq-mean-token-sum-norm": n_seqs * max_new_tokens,
        "token-sum": torch.ones_like(n_seqs),
    }
    return (lengths > 0) / divisors[mode].clamp(min=1)


def high_entropy_mask(entropy: Tensor, lengths: Tensor, fraction: float) -> Tensor:
    """(N,) bool: the ``max(1, int(fraction * n))`` tokens of highest entropy in each sequence of n
    tokens (Wang et al. 2025), from ``entropy`` (N,) and ``lengths`` (S,)."""
    return _largest(entropy, lengths, (fraction * lengths.double()).floor().clamp(min=1))


def _largest(values: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """(N,) bool: the ``counts`` (S,) tokens of each sequence with the largest values (N,)."""
    masks = []
    for part, count in zip(values.split(lengths.tolist()), counts.tolist()):
        rank = part.argsort(descending=True, stable=True).argsort()
        masks.append(rank < count)
    return torch.cat(masks)


# -------------------------------------------------------------------------------------------------
# Perception: how log-probs change if images are masked. NaN: a token of a response without images
# -------------------------------------------------------------------------------------------------


def perception(old: Tensor, masked: Tensor) -> Tensor:
    """(N,) how much each token depends on the images, from 0 to 10: k3 of the log-probs (N,) at the
    start of the update and ``masked`` (N,), those with masked images (VPPO, Huang et al. 2025)."""
    return kl_penalty("k3", old, masked).clamp(0, 10)


def perception_mask(seen: Tensor, lengths: Tensor, ratio: float) -> Tensor:
    """(N,) bool: the ``ceil(ratio * n)`` tokens of largest `perception` (N,) in each response of n
    tokens (VPPO), and all tokens of responses without images."""
    counts = (ratio * lengths.double() - ROUNDING).ceil().clamp(min=1)
    return _largest(seen, lengths, counts) | seen.isnan()


def perception_factors(seen: Tensor, lengths: Tensor, low: float) -> Tensor:
    """(S,) factors of the responses' advantages (VPPO, Huang et al. 2025): ``low + (top - low) *
    (s - min) / (max - min)``, where s is the mean `perception` of a response that has images.

    ``top`` makes the mean factor 1; it is at most ``low + (1 - low) * S``, as the largest s has the
    quotient 1. Responses without images have the factor 1, and so have all if all s are equal. All
    responses of the step are compared; the authors' code takes min and max per device, and the mean
    per micro-batch.
    """
    responses = seen.double().split(lengths.tolist())
    means = torch.stack([response.mean() for response in responses])  # (S,)
    factors = torch.ones_like(means)
    seeing = ~means.isnan()  # responses with images and at least one token
    s = means[seeing]
    if len(s) and s.max() - s.min() > ROUNDING:
        quotient = (s - s.min()) / (s.max() - s.min())
        top = low + (1 - low) / quotient.mean()
        factors[seeing] = low + (top - low) * quotient
    return factors.to(seen.dtype)


def perception_kl(logp: Tensor, masked: Tensor) -> Tensor:
    """(N,) k3 between the policy's log-probs and ``masked``, the log-probs with masked images at the
    start of the update. The actor's loss subtracts it (PAPO, Wang et al. 2025). 0 without images.

    As in the authors' runs, ``masked`` has no gradient. The paper's entropy of the masked policy would
    have none either, and is left out.
    """
    masked = torch.where(masked.isnan(), logp.detach(), masked)
    return kl_penalty("k3", logp, masked)


# -------------------------------------------------------------------------------------------------
# Policy losses: (`PolicyLossInputs`, clip below 1, clip above 1) -> `PolicyLossOutput`
# -------------------------------------------------------------------------------------------------


@dataclass
class PolicyLossInputs:
    """The tokens of a pack as a policy loss sees them."""

    logp: Tensor  # (T,) log-probs under the policy that is trained
    old: Tensor  # (T,) log-probs under the policy as it was before the update
    adv: Tensor  # (T,) advantages
    seq: Tensor  # (T,) int64 in [0, n_seq), the sequence of each token
    n_seq: int
    # (T,) bool, the tokens that take part in the loss, and so in means over a sequence and in
    # statistics; the others get weight 0
    in_loss: Tensor

    def __post_init__(self):
        self.delta = (self.logp - self.old).clamp(-20, 20)  # keeps exp and its gradient finite
        self.ratio = self.delta.exp()
        # The sign of adv, for counting clipped tokens. The margin ignores the rounding that whitening
        # leaves where the samples of a prompt earned the same.
        self.up, self.down = self.adv > ROUNDING, self.adv < -ROUNDING

    def sequence_mean(self, x: Tensor) -> Tensor:
        """(T,) mean of ``x`` over the `in_loss` tokens of a sequence, at each of its tokens."""
        total = x.new_zeros(self.n_seq).index_add(0, self.seq, x * self.in_loss)
        count = x.new_zeros(self.n_seq).index_add(0, self.seq, self.in_loss.to(x.dtype))
        return (total / count.clamp(min=1))[self.seq]


@dataclass
class PolicyLossOutput:
    """(T,) each: the terms of a policy-gradient loss, to be summed with `token_weights`, and where
    they were clipped."""

    per_token: Tensor
    ratio: Tensor
    # bool, or False if the loss never clips in this way
    high: Tensor | bool = False  # from above
    low: Tensor | bool = False  # from below
    dual: Tensor | bool = False  # by the dual clip


def ppo(x: PolicyLossInputs, low: float, high: float, dual_clip: float = 0.0) -> PolicyLossOutput:
    """Ratio clipped to ``1 - low .. 1 + high`` (Schulman et al. 2017). Where adv < 0, the term is at
    most ``-dual_clip * adv`` (Ye et al. 2020; dual_clip is above 1, or 0 for off)."""
    out = _clipped(x, x.ratio, low, high)
    if dual_clip:
        out.dual = x.down & (x.ratio > dual_clip)
        bounded = torch.minimum(out.per_token, -dual_clip * x.adv)
        out.per_token = torch.where(x.adv < 0, bounded, out.per_token)
    return out


def gspo(x: PolicyLossInputs, low: float, high: float) -> PolicyLossOutput:
    """PPO with the ratio of the whole sequence, in its per-token form (Zheng et al. 2025)."""
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
    """The log-prob, clipped where PPO clips the ratio, on the side to which adv pushes it (Liu et al.
    2025, arXiv 2505.12504), without the paper's drift, a KL to the old policy."""
    upper = x.old + math.log1p(high)
    lower = x.old + (math.log1p(-low) if low < 1 else -math.inf)
    risen = torch.minimum(x.logp, upper)
    fallen = torch.maximum(x.logp, lower)
    clipped = torch.where(x.adv > 0, risen, fallen)
    return PolicyLossOutput(
        per_token=-x.adv * clipped,
        ratio=x.ratio,
        high=x.up & (x.logp > upper),
        low=x.down & (x.logp < lower),
    )


def gmpo(x: PolicyLossInputs, low: float, high: float) -> PolicyLossOutput:
    """Geometric mean of the ratios, which are clipped in log space, on the side to which adv pushes
    them (Zhao et al. 2025)."""
    adv = x.sequence_mean(x.adv)
    clipped = torch.where(adv > 0, x.delta.clamp(max=high), x.delta.clamp(min=-low))
    return PolicyLossOutput(
        per_token=-adv * x.sequence_mean(clipped).exp(),
        ratio=x.ratio,
        high=(adv > ROUNDING) & (x.delta > high),
        low=(adv < -ROUNDING) & (x.delta < -low),
    )


def cispo(x: PolicyLossInputs, low: float, high: float) -> PolicyLossOutput:
    """The clipped ratio, without gradient, as the weight of the log-prob (MiniMax-M1 2025)."""
    clipped = x.ratio.detach().clamp(1 - low, 1 + high)
    return PolicyLossOutput(
        per_token=-clipped * x.adv * x.logp,
        ratio=x.ratio,
        high=x.ratio > 1 + high,
        low=x.ratio < 1 - low,
    )


def sapo(x: PolicyLossInputs, low: float, high: float) -> PolicyLossOutput:
    """A soft gate instead of a clip (Gao et al. 2025); it decays faster for negative advantages."""
    tau = torch.where(x.adv > 0, 1.0, 1.05)
    gate = torch.sigmoid(tau * (x.ratio - 1))
    return PolicyLossOutput(-x.adv * 4 / tau * gate, x.ratio)


def ratio_sums(x: PolicyLossInputs, out: PolicyLossOutput) -> dict[str, Tensor]:
    """Sums over the `in_loss` tokens, 0-d and detached: the ratio, KL(old | policy) estimated by k3,
    and clipped tokens. The KL is not clamped, so that a diverging policy is noticed."""
    log_ratio = (x.logp.detach() - x.old).double()
    moved = torch.expm1(log_ratio) - log_ratio
    sums = {
        "ratio": (out.ratio.detach() * x.in_loss).sum(),
        "approx_kl": (moved * x.in_loss).sum(),
    }
    for side in ("high", "low", "dual"):
        sums[f"clipped_{side}"] = (getattr(out, side) & x.in_loss).sum()
    return sums


def largest_ratio(x: PolicyLossInputs, out: PolicyLossOutput) -> Tensor:
    """0-d, over the `in_loss` tokens; 0 if there are none."""
    ratio = out.ratio.detach() * x.in_loss
    return torch.cat([ratio, ratio.new_zeros(1)]).max()


# -------------------------------------------------------------------------------------------------
# Value loss, KL, load balance
# -------------------------------------------------------------------------------------------------


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """(N,) ``max((V - R)^2, (V_clip - R)^2) / 2``, where V_clip is V kept within ``clip`` of the old
    value; clip 0 is no clip."""
    error = (values - returns).square()
    if clip:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error


def kl_penalty(kind: str, logp: Tensor, ref: Tensor) -> Tensor:
    """(N,) estimates of KL(policy | reference) on samples of the policy (Schulman 2020,
    "Approximating KL divergence"). ``kind``: k1, k2, k3 or abs; with a trailing ``+`` the value is
    the same, but the gradient is that of k2, whose expectation is the gradient of the KL.

    Only k1 belongs in the reward: there the estimate multiplies grad log p, and only the log-ratio
    makes that the gradient of the KL. (The exact KL is the same for every draw: its gradient would
    average to 0.) As a loss, k1 has an expected gradient of zero.
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


def expert_load(chosen: list[Tensor], weights: Tensor, experts: int) -> Tensor:
    """(E,) how often each of E ``experts`` is chosen, from the ids (L, K) that every layer uses and the
    weights (L,) of the tokens of a pack."""
    ids = torch.stack(chosen)  # (layers, L, K)
    times = weights[:, None].expand(ids.shape)
    return torch.bincount(ids.flatten(), times.flatten(), minlength=experts).to(weights.dtype)


def balance_loss(logits: list[Tensor], weights: Tensor, load: Tensor, top_k: int) -> Tensor:
    """A pack's share of ``E sum_e F_e P_e``, which is ``top_k`` if all experts are used equally
    (Switch Transformer, eq. 4).

    F_e is the share of tokens that expert e gets, and P_e its mean probability, over the minibatch
    on all ranks. F comes from ``load`` (E,), the sum of `expert_load` over its packs, and has no
    gradient; so the loss is a sum over tokens.
    """
    total = load.sum() / top_k  # tokens x layers
    probs = torch.stack(logits).float().softmax(dim=-1)  # (layers, L, E)
    probs = (probs * weights[:, None]).sum(dim=(0, 1))  # (E,)
    return len(load) * (load / total * probs / total).sum()
