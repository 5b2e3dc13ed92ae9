"""Every formula of the two scripts, as pure functions of tensors: nothing here communicates or knows a model.

    advantages     (N,) rewards and values, (S,) scores -> advantages, returns; reward shaping; the KL controller
    losses         (N,) terms per token, and the weight of each token in the one sum of an optimizer step
    log-probs      (N, H) hidden states -> log-probs, entropy or KL, without ever holding (N, V) logits
    sampling noise (B,) keys -> the draw of one token per row, a pure function of its key

Shape legend: B or S sequences, N response tokens of all sequences, one after the other, H hidden size, V vocabulary.
A gap inside a response (tool output) is left out of the N tokens: every sum passes it as if it took no time.

A loss is ``sum_t weight_t * term_t`` with weights from the counts of the whole optimizer step, over all ranks and
packed rows (`token_weights`). Nothing here takes a mean over the tokens it happens to be given.
"""

import functools
import math

import torch
from torch.autograd.function import once_differentiable

# ---------------------------------------------------------------------------------------------------------------------
# Advantages
# ---------------------------------------------------------------------------------------------------------------------


def token_rewards(scores: torch.Tensor, kl: torch.Tensor, lengths: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """(S,) scores and (N,) KL -> (N,) rewards: ``-kl_coef * kl``, plus the score on the last token of each sequence."""
    last = lengths.cumsum(0)[lengths > 0] - 1
    return (-kl_coef * kl).index_add(0, last, scores[lengths > 0])


def gae(rewards: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, gamma: float,
        lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (N,) advantages and unwhitened returns.

    The value after the last token is 0, of a truncated response too.
    """
    starts = (lengths.cumsum(0) - lengths)[lengths.argsort(descending=True)]               # (S,) of the longest sequence first
    reach = len(lengths) - torch.bincount(lengths).cumsum(0)[:-1]            # (longest,) sequences with a token at position t
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    following, carry = torch.zeros(2, len(lengths), dtype=torch.float64)                                    # (S,) each
    for t, count in reversed(list(enumerate(reach.tolist()))):               # one position of all sequences that reach it
        place = starts[:count] + t
        value = values[place].double()
        delta = rewards[place].double() + gamma * following[:count] - value
        carry[:count] = delta + gamma * lam * carry[:count]
        following[:count] = value
        advantages[place] = carry[:count]
    return advantages.to(rewards.dtype), (advantages + values).to(rewards.dtype)


def rewards_to_go(rewards: torch.Tensor, lengths: torch.Tensor, gamma: float) -> torch.Tensor:
    """(N,) discounted sum of the rewards from each token on: GAE with lambda 1 and no critic."""
    return gae(rewards, torch.zeros_like(rewards), lengths, gamma, 1.0)[0]


def whiten(x: torch.Tensor) -> torch.Tensor:
    """(N,) to mean 0 and unbiased variance 1. A single entry is only centred."""
    centred = x.double() - x.double().mean()
    return (centred / (centred.var() + 1e-8).sqrt() if len(x) > 1 else centred).to(x.dtype)


def group_scores(scores: torch.Tensor, group: torch.Tensor, estimator: str, lengths: torch.Tensor) -> torch.Tensor:
    """Compare samples of one prompt by their scores -> (S,), the advantage of each one's tokens before whitening.

    With a KL in the reward, ``scores`` are those after it: ``score - kl_coef * sum_t kl_t``.

    Args:
        group: (S,) int64, which prompt a sample belongs to.
        estimator: grpo or group_norm (Shao et al. 2024), dr_grpo (Liu et al. 2025), rloo (Ahmadian et al. 2024), opo
            (Hao et al. 2025), gpg (Chu et al. 2025), reinforce_baseline (Hu 2025; whiten the result), and cpgd (Liu et
            al. 2025), which normalises over the whole batch.
        lengths: (S,) response tokens, for opo.
    Raises:
        ValueError: unknown estimator, or a group of one sample.
    """
    if estimator == "cpgd":
        group = torch.zeros_like(group)
    ids, group, count = group.unique(return_inverse=True, return_counts=True)
    if count.min() < 2:
        raise ValueError(f"{estimator} compares the samples of a group, but group {int(ids[count.argmin()])} has only one: "
                         "draw two or more samples per prompt")

    x, per_group = scores.double(), torch.zeros(len(ids), dtype=torch.float64)
    if estimator == "opo":
        weight = lengths.double()
        baseline = per_group.index_add(0, group, weight * x) / per_group.index_add(0, group, weight).clamp(min=1)
    else:
        baseline = per_group.index_add(0, group, x) / count                                             # (G,)
    highest, lowest = (per_group.scatter_reduce(0, group, x, how, include_self=False) for how in ("amax", "amin"))
    # Equal scores must give exactly 0: rounding of their mean, over a standard deviation as small, is of order 1.
    distinct = (highest - lowest)[group] >= 1e-6
    centred = torch.where(distinct, x - baseline[group], 0.0)                                               # (S,)

    if estimator in ("grpo", "group_norm", "cpgd"):
        std = (per_group.index_add(0, group, centred.square()) / (count - 1)).sqrt()
        centred = centred / (std[group] + 1e-6)
    elif estimator == "rloo":
        centred = centred * (count / (count - 1))[group]
    elif estimator == "gpg":
        centred = centred * (len(x) / max(int(distinct.sum()), 1))
    elif estimator not in ("dr_grpo", "reinforce_baseline", "opo"):
        raise ValueError(f"unknown group estimator {estimator!r}")
    return centred.to(scores.dtype)


def overlong_penalty(lengths: torch.Tensor, max_new_tokens: int, buffer: int, factor: float) -> torch.Tensor:
    """(S,) length penalty (DAPO, Yu et al. 2025, eq. 13): from 0, ``buffer`` tokens below the limit, to -factor."""
    return (-(lengths - (max_new_tokens - buffer)) / buffer * factor).clamp(max=0.0)


class RunningMoments:
    """Mean and unbiased standard deviation of all values so far (Welford; batches merged after Chan et al. 1979)."""

    def __init__(self):
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    @property
    def std(self) -> float:
        """1 until two values were seen."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 1.0

    def update(self, x: torch.Tensor) -> None:
        x = x.double()
        total, shift = self.count + x.numel(), float(x.mean()) - self.mean
        self.squares += float((x - x.mean()).square().sum()) + shift**2 * self.count * x.numel() / total
        self.mean += shift * x.numel() / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


def normalize_scores(scores: torch.Tensor, moments: RunningMoments, update: bool = True) -> torch.Tensor:
    """(S,) scores over the standard deviation so far, these included (``update``). It comes before any group statistics."""
    if update:
        moments.update(scores)
    centred = scores - moments.mean
    return centred / moments.std if moments.std > 1e-6 else centred


class KLController:
    """The weight of the KL: fixed without a target, else adaptive (Ziegler et al. 2019, section 2.2)."""

    def __init__(self, kl_coef: float, target: float | None = None, horizon: int = 10000):
        self.value, self.target, self.horizon = kl_coef, target, horizon

    def update(self, kl: float, n: int) -> None:
        """After a rollout of ``n`` samples, with ``kl`` per token, both over all ranks. The weight stays positive for n less
        than 5 horizons."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """``1 - Var(returns - values) / Var(returns)`` over the tokens (N,), 0-d; 0 where the returns do not vary."""
    values, returns = values.double(), returns.double()
    if len(returns) < 2 or returns.var() == 0:
        return torch.zeros(())
    return (1 - (returns - values).var() / returns.var()).float()


# ---------------------------------------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------------------------------------

# (clip_low, clip_high) of each policy loss: their unit is the loss's own.
LOSS_CLIP_DEFAULTS = {"ppo": (0.2, 0.2), "cpgd": (0.2, 0.2), "gspo": (3e-4, 4e-4), "gmpo": (0.4, 0.4),
                      "cispo": (1.0, 4.0),   # a ratio is never below 1 - 1: no lower bound
                      "sapo": (0.0, 0.0)}    # not used: its gate is soft


def token_weights(lengths: torch.Tensor, mode: str, n_tokens: int, n_seqs: int, max_new_tokens: int) -> torch.Tensor:
    """(S,) weight of each token of a sequence in the loss of an optimizer step.

    Args:
        lengths: (S,) tokens of each sequence that take part in this term.
        n_tokens, n_seqs: tokens, and sequences with any, of the whole optimizer step: all ranks, all packed rows.
        max_new_tokens: the constant length of seq-mean-token-sum-norm (Dr.GRPO, Liu et al. 2025).
    """
    divisors = {"token-mean": n_tokens, "seq-mean-token-sum": n_seqs, "seq-mean-token-mean": n_seqs * lengths,
                "seq-mean-token-sum-norm": n_seqs * max_new_tokens}
    if mode not in divisors:
        raise ValueError(f"unknown loss aggregation {mode!r}: expected one of {', '.join(divisors)}")
    return (lengths > 0) / torch.as_tensor(divisors[mode], device=lengths.device).clamp(min=1)


def high_entropy_mask(entropy: torch.Tensor, lengths: torch.Tensor, fraction: float) -> torch.Tensor:
    """(N,) bool: the ``max(1, int(fraction * n))`` tokens of highest entropy in each sequence (Wang et al. 2025).

    ``entropy`` (N,) holds the sequences one after the other, ``lengths`` (S,) their tokens.
    """
    ranks = [part.argsort(descending=True, stable=True).argsort() for part in entropy.split(lengths.tolist())]
    return torch.cat([rank < max(1, int(fraction * len(rank))) for rank in ranks])


def _sequence_mean(x: torch.Tensor, seq: torch.Tensor, n_seq: int, keep: torch.Tensor) -> torch.Tensor:
    """(N,) mean of ``x`` over the kept tokens of each sequence, given to all its tokens."""
    total = x.new_zeros(n_seq).index_add(0, seq, x * keep)
    count = x.new_zeros(n_seq).index_add(0, seq, keep.to(x.dtype))
    return (total / count.clamp(min=1))[seq]


def policy_loss(loss: str, logp: torch.Tensor, old: torch.Tensor, adv: torch.Tensor, seq: torch.Tensor, n_seq: int,
                clip_low: float, clip_high: float, dual_clip: float | None = None,
                is_weight: torch.Tensor | None = None,
                mask: torch.Tensor | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Terms (N,) of a policy-gradient loss, to be summed with `token_weights`, and sums of statistics over the tokens.

    ppo     (Schulman et al. 2017) ratio clipped to ``1 - clip_low .. 1 + clip_high``; where adv < 0, ``dual_clip`` c
            above 1 bounds the term by ``-c * adv`` (Ye et al. 2020; None or 0: off)
    cpgd    (Liu et al. 2025) the log-prob, clipped where the ratio would be, on the side that adv pushes to
    gspo    (Zheng et al. 2025) ppo with the ratio of the whole sequence, per-token form
    gmpo    (Zhao et al. 2025) geometric mean of ratios, clipped in log space on the side that adv pushes to
    cispo   (MiniMax-M1 2025) the clipped ratio as a constant weight of the log-prob
    sapo    (Gao et al. 2025) a soft gate in place of the clip

    Under seq-mean-token-mean the terms of gspo and gmpo sum to the loss of the sequence, which must be here as a whole.

    Args:
        logp, old, adv: (N,) log-probs under the trained policy and at the start of the update; advantages.
        seq: (N,) int64 in [0, n_seq), the sequence of each token.
        is_weight: (N,) weight of each token against a sampler that differs from ``old``; multiplies after clipping.
        mask: (N,) tokens that count in means over a sequence and in the statistics; the others must get weight 0.
    Returns:
        stats, 0-d and detached: clipped_high, clipped_low, clipped_dual (counts), ratio (sum; gspo: of the sequence's),
        approx_kl (sum; KL(old | policy) by k3), ratio_max.
    Raises:
        ValueError: unknown loss.
    """
    keep = torch.ones_like(adv, dtype=torch.bool) if mask is None else mask.bool()
    up, down = adv > 0, adv < 0
    delta = (logp - old).clamp(-20, 20)                                    # keeps exp and its gradient finite
    ratio = delta.exp()
    dual = torch.zeros_like(up)

    if loss in ("ppo", "gspo"):
        if loss == "gspo":
            ratio = (_sequence_mean(delta.detach(), seq, n_seq, keep) + (logp - logp.detach())).clamp(max=10).exp()
        terms = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip_low, 1 + clip_high))
        high, low = up & (ratio > 1 + clip_high), down & (ratio < 1 - clip_low)
        if loss == "ppo" and dual_clip:
            dual = down & (ratio > dual_clip)
            terms = torch.where(down, torch.minimum(terms, -dual_clip * adv), terms)
    elif loss == "cpgd":
        bound_high = old + math.log1p(clip_high)
        bound_low = old + (math.log1p(-clip_low) if clip_low < 1 else -math.inf)
        terms = -adv * torch.where(up, torch.minimum(logp, bound_high), torch.maximum(logp, bound_low))
        high, low = up & (logp > bound_high), down & (logp < bound_low)
    elif loss == "gmpo":
        adv = _sequence_mean(adv, seq, n_seq, keep)
        clipped = torch.where(adv > 0, delta.clamp(max=clip_high), delta.clamp(min=-clip_low))
        terms = -adv * _sequence_mean(clipped, seq, n_seq, keep).exp()
        high, low = (adv > 0) & (delta > clip_high), (adv < 0) & (delta < -clip_low)
    elif loss == "cispo":
        terms = -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * adv * logp
        high, low = ratio > 1 + clip_high, ratio < 1 - clip_low
    elif loss == "sapo":
        tau = torch.where(up, 1.0, 1.05)                           # a faster decay where the policy is pushed down
        terms = -adv * 4 / tau * torch.sigmoid(tau * (ratio - 1))
        high = low = dual
    else:
        raise ValueError(f"unknown policy loss {loss!r}: expected one of {', '.join(LOSS_CLIP_DEFAULTS)}")

    if is_weight is not None:
        terms = terms * is_weight.detach()
    ratio, moved = ratio.detach() * keep, kl_penalty("k3", old, logp.detach()) * keep
    stats = {"clipped_high": (high & keep).sum(), "clipped_low": (low & keep).sum(),
             "clipped_dual": (dual & keep).sum(), "ratio": ratio.sum(), "approx_kl": moved.sum(),
             "ratio_max": torch.cat([ratio, ratio.new_zeros(1)]).max()}                         # N may be 0
    return terms, stats


def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor,
               clip: float | None) -> torch.Tensor:
    """(N,) ``max((V - R)^2, (V_clip - R)^2) / 2``, V_clip within ``clip`` of the old value; None or 0: no clip."""
    error = (values - returns).square()
    if clip:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error


def expert_load(logits: list[torch.Tensor], weights: torch.Tensor, top_k: int) -> torch.Tensor:
    """(E,) how often each expert is chosen: logits (L, E) of every layer, weights (L,) of the tokens of a row."""
    probs = torch.stack(logits).float().softmax(dim=-1)                                                     # (layers, L, E)
    chosen = torch.zeros_like(probs).scatter(-1, probs.topk(top_k, dim=-1).indices, 1.0)
    return (chosen * weights[:, None]).sum(dim=(0, 1))


def balance_loss(logits: list[torch.Tensor], weights: torch.Tensor, load: torch.Tensor, top_k: int) -> torch.Tensor:
    """A row's share of E Σ_e F_e P_e, which is ``top_k`` where all experts are used alike (Switch Transformer, equation 4).

    F_e is the share of tokens, and P_e the mean probability, that expert e gets in a whole minibatch on all ranks. F comes
    from ``load`` (E,), the sum of `expert_load` over its rows, without gradient: given it, the loss is a sum over tokens.
    """
    total = load.sum() / top_k                                                                  # weighted tokens x layers
    probs = (torch.stack(logits).float().softmax(dim=-1) * weights[:, None]).sum(dim=(0, 1))                         # (E,)
    return len(load) * (load / total * probs / total).sum()


def kl_penalty(kind: str, logp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """(N,) estimates of KL(policy | reference) on samples of the policy (Schulman 2020, "Approximating KL divergence").

    k1, k2, k3, abs. A trailing ``+`` keeps the value and takes the gradient of k2, which is
    that of the KL in expectation; the gradient of k1 is zero in expectation, so k1 belongs in the reward. There no other
    does: what multiplies grad log p must be the log-ratio itself, and of the exact KL, which no draw changes, nothing is left.
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
        return (torch.expm1(-delta) + delta).clamp(-10, 10)                # exp(-d) - 1 loses its digits near d = 0
    if kind == "abs":
        return delta.abs()
    raise ValueError(f"unknown KL estimator {kind!r}: expected k1, k2, k3, abs, or one of them with a trailing +")


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs
# ---------------------------------------------------------------------------------------------------------------------


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` as float32 (float64 stays). Half-precision products on CUDA keep the float32 of their accumulators."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    exact = torch.promote_types(a.dtype, torch.float32)
    return a.to(exact) @ b.to(exact)


def logits_fp32(hidden: torch.Tensor, weight: torch.Tensor, temperature: float = 1.0, banned: torch.Tensor | None = None,
                row_banned: torch.Tensor | None = None, row_banned_ids: torch.Tensor | None = None) -> torch.Tensor:
    """(n, H) hidden states -> (n, V) logits of the policy's distribution: one definition for sampling and training.

    Rounded to bf16 they would move log-probs by up to 0.1 nats.

    Args:
        weight: (V, H) of the language-model head.
        temperature: the sampling temperature, positive.
        banned: (V,) bool, ids that are -inf in every row.
        row_banned, row_banned_ids: (n,) bool rows in which the (k,) ids are -inf as well.
    """
    logits = _product(hidden, weight.t())
    if temperature != 1.0:
        logits /= temperature
    if banned is not None:
        logits.masked_fill_(banned, -math.inf)
    if row_banned is not None:
        logits[:, row_banned_ids] = logits[:, row_banned_ids].masked_fill(row_banned[:, None], -math.inf)
    return logits


VOCABULARY_SLICE = 16384  # ids whose rows of the weight's gradient are added at a time


class _ChunkedHead(torch.autograd.Function):
    """Functions of each row of the logits, of which ``chunk`` rows (0: 1,024 on a GPU, 256 on a CPU) exist at a time; the
    backward computes them again.

    ``values(logits, rows)`` returns (n,) tensors for a slice of the N rows, ``dlogits(logits, rows, outputs, grads)``
    the gradient (n, V) for the logits given those for the outputs. Both may overwrite the logits. ``head``: keyword
    arguments of `logits_fp32`.
    """

    @staticmethod
    def logits(hidden, weight, head, rows):
        banned = head.get("row_banned")
        return logits_fp32(hidden[rows], weight, **head | {"row_banned": None if banned is None else banned[rows]})

    @staticmethod
    def forward(ctx, hidden, weight, head, chunk, values, dlogits):
        # On a GPU every chunk costs a pass over the gradient of the weight, on a CPU little: there memory decides.
        chunk = chunk or (1024 if hidden.is_cuda else 256)
        # At least one chunk, if an empty one: a rank without responses (N = 0) must get gradients too, of zero.
        ctx.rows = [slice(start, start + chunk) for start in range(0, max(len(hidden), 1), chunk)]
        parts = [values(_ChunkedHead.logits(hidden, weight, head, rows), rows) for rows in ctx.rows]
        outputs = [torch.cat(part) for part in zip(*parts)]
        ctx.save_for_backward(hidden, weight, *outputs)
        ctx.head, ctx.dlogits = head, dlogits
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        hidden, weight, *outputs = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        temperature = ctx.head.get("temperature", 1.0)
        exact = torch.promote_types(hidden.dtype, torch.float32)                  # of sums over chunks, never bf16
        dhidden = torch.empty_like(hidden) if needs_hidden else None
        dweight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        for rows in ctx.rows:
            logits = _ChunkedHead.logits(hidden, weight, ctx.head, rows)                                  # (n, V)
            dlogits = ctx.dlogits(logits, rows, [x[rows] for x in outputs],
                                  [None if x is None else x[rows] for x in grads])
            if temperature != 1.0:
                dlogits /= temperature
            dlogits = dlogits.to(hidden.dtype)
            if needs_hidden:
                dhidden[rows] = _product(dlogits, weight).to(hidden.dtype)
            if needs_weight:
                # By slices of the vocabulary: a second (V, H) float32 tensor would be larger than the chunk's logits.
                for part, columns in zip(dweight.split(VOCABULARY_SLICE), dlogits.t().split(VOCABULARY_SLICE)):
                    part += _product(columns, hidden[rows])
            del logits, dlogits                                       # or they would still be there beside the next chunk's
        return dhidden, dweight.to(weight.dtype) if needs_weight else None, None, None, None, None


def linear_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, entropy: bool = False,
                    chunk: int = 0, **head) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs (N,) of ``targets`` (N,) under the distribution of `logits_fp32`; its entropy (N,) in nats if asked.

    Both are float32 (float64 for float64 inputs), differentiable for hidden and weight. A banned target gets -inf.
    ``head``: arguments of `logits_fp32`. Memory: three (chunk, V) float32 tensors, and in the backward the gradient of
    the weight in float32.
    """
    # In place, as (chunk, V) is the largest tensor of an update. In the entropy 0 * log 0 is 0: the bound of -1e4,
    # where a probability is exactly 0, keeps the product from being 0 * inf.
    def values(logits, rows):
        logp = logits.sub_(logits.logsumexp(-1, keepdim=True))                                            # (n, V)
        picked = logp.gather(1, targets[rows, None])[:, 0]
        return (picked, -logp.exp().mul_(logp.clamp_(min=-1e4)).sum(-1)) if entropy else (picked,)

    def dlogits(logits, rows, outputs, grads):
        dlogp = torch.zeros_like(outputs[0]) if grads[0] is None else grads[0]                            # (n,)
        logp = logits.sub_(logits.logsumexp(-1, keepdim=True))
        probs, scale = logp.exp(), -dlogp[:, None]
        if entropy and grads[1] is not None:                               # dH/dz_v = -p_v (log p_v + H)
            scale = logp.clamp_(min=-1e4).add_(outputs[1][:, None]).mul_(-grads[1][:, None]).add_(scale)
        dlogp = torch.where(outputs[0].isinf(), 0.0, dlogp)                # the logit of a banned target is a constant
        return probs.mul_(scale).scatter_add_(1, targets[rows, None], dlogp[:, None])

    outputs = _ChunkedHead.apply(hidden, weight, head, chunk, values, dlogits)
    return outputs[0], outputs[1] if entropy else None


def full_kl(hidden: torch.Tensor, ref_hidden: torch.Tensor, weight: torch.Tensor, ref_weight: torch.Tensor, *,
            chunk: int = 0, **head) -> torch.Tensor:
    """(N,) exact KL(policy | reference) over the vocabulary, differentiable for hidden (N, H) and weight (V, H).

    ``head``: arguments of `logits_fp32`, for both.
    """
    def log_ratio(logits, rows):
        """(n, V) log-probs of the policy, and their distance to the reference's: 0 where both are banned."""
        ref = _ChunkedHead.logits(ref_hidden, ref_weight, head, rows).log_softmax(-1)
        logp = logits.log_softmax(-1)
        return logp, (logp - ref).masked_fill_(logp == -math.inf, 0.0)

    def values(logits, rows):
        logp, ratio = log_ratio(logits, rows)
        return (ratio.mul_(logp.exp()).sum(-1),)

    def dlogits(logits, rows, outputs, grads):     # dKL/dz_v = p_v (log p_v - log q_v - KL)
        logp, ratio = log_ratio(logits, rows)
        return ratio.sub_(outputs[0][:, None]).mul_(logp.exp()).mul_(grads[0][:, None])

    return _ChunkedHead.apply(hidden, weight, head, chunk, values, dlogits)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Sampling noise
# ---------------------------------------------------------------------------------------------------------------------

# Hashes rather than a generator: the noise of a token depends neither on the batch it is drawn in nor on the rank or
# device, and a resume has no generator state to restore. Products wrap around modulo 2^32 or 2^64, by design; shifts
# of signed integers copy the sign, hence the masks.


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 64-bit finaliser (Appleby 2011) on int64: a bijection."""
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * (0xFF51AFD7ED558CCD - 2**64)
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * (0xC4CEB9FE1A85EC53 - 2**64)
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit one on int32, in place, without its last step, which only improves the low bits."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x85EBCA6B - 2**32
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= 0xC2B2AE35 - 2**32
    return x


@functools.lru_cache(maxsize=8)
def _id_hashes(vocab: int, device: torch.device) -> torch.Tensor:
    """(V,) int32, distinct: of two ids with one hash, thus one noise, the likelier would always win."""
    return _mix32_(torch.arange(1, vocab + 1, dtype=torch.int32, device=device))


def sequence_keys(seed: int, stream: int, draw: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """(B,) int64 keys of the noise of one sequence each, for `token_keys`. ``stream``: its purpose (training,
    evaluation, ...); ``draw``: (B,) count of prompts taken; ``sample``: (B,) sample of that prompt.
    """
    key = torch.full_like(draw, seed % 2**63, dtype=torch.int64)
    for part in (stream, draw, sample):
        key = _mix64(key + (0x9E3779B97F4A7C15 - 2**64)) ^ part
    return _mix64(key + (0x9E3779B97F4A7C15 - 2**64))


def token_keys(sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """(B,) keys of the noise of one token each, from those of its sequence and its position in it, (B,)."""
    return _mix64(sequence ^ position)


def exponential_noise(vocab: int, keys: torch.Tensor) -> torch.Tensor:
    """(B,) int64 keys -> (B, V) float32 draws of Exp(1), positive and finite, each a pure function of (key, id)."""
    keys = _mix64(keys)
    low, odd = (keys << 32) >> 32, (keys >> 32) | 1                                          # in the range of int32
    x = _id_hashes(vocab, keys.device) * odd.int()[:, None]
    x = _mix32_(x.add_(low.int()[:, None])).bitwise_and_(0x7FFFFFFF)                                      # (B, V)
    # u = (x + 1/2) / 2^31. A float resolves small u, which unlikely tokens need to win, and rounds large ones up to 1.
    return (x + 0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1).log1p_().neg_()


def gumbel_race(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one id per row (B,) from softmax(logits (B, V)) by the Gumbel-max trick; a logit of -inf never wins.

    Rounding of the logits changes the draw only at near ties, much more rarely than with an inverse CDF.
    """
    return (logits - exponential_noise(logits.shape[-1], keys).log_()).argmax(-1)
