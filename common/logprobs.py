"""The distribution of the next token: one definition for sampling and training.

    log-probs       (N, H) hidden states -> log-probs, entropy or KL; (N, V) logits never exist
    sampling        (B, V) logits -> (B,) ids, by noise that is a pure function of (B,) keys

Shapes: B sequences that are sampled together; N response tokens, n of them in a chunk; H hidden
size, V vocabulary.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ground.files import say

# the gradient of the weight is added up for this many ids at a time
VOCABULARY_SLICE = 16384


# -------------------------------------------------------------------------------------------------
# Logits
# -------------------------------------------------------------------------------------------------


def logits_fp32(
    hidden: Tensor,
    weight: Tensor,
    temperature: float = 1.0,
    banned: Tensor | None = None,
    early: Tensor | None = None,
    early_banned: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """(n, H) hidden states -> (n, V) logits of the distribution that is sampled from and trained, in
    float32: rounding them to bf16 would change log-probs by up to 0.1 nats.

    Args:
        weight: (V, H) of the language-model head.
        temperature: the sampling temperature, positive.
        banned: (V,) bool, ids that are -inf at every position. The model may have more or fewer than V
            ids; those from V on are -inf as well.
        early: (n,) bool, positions at which the ids ``early_banned`` (k,) are -inf as well: of
            responses that must not end yet.
        softcap: the model squeezes its logits into (-softcap, softcap) (Gemma 2, 2408.00118).
    """
    logits = _product(hidden, weight.t())
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        logits /= temperature
    if banned is not None:
        logits[:, : len(banned)].masked_fill_(banned[: logits.shape[1]], -math.inf)
        logits[:, len(banned) :].fill_(-math.inf)
    if early is not None:
        chosen = logits[:, early_banned]  # (n, k)
        logits[:, early_banned] = chosen.masked_fill(early[:, None], -math.inf)
    return logits


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` as float32; float64 stays float64."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)  # keeps the float32 accumulators
    exact = torch.promote_types(a.dtype, torch.float32)
    return a.to(exact) @ b.to(exact)


# -------------------------------------------------------------------------------------------------
# Log-probs, entropy and KL, a chunk of tokens at a time
# -------------------------------------------------------------------------------------------------


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int,
    entropy: bool = False,
    **head,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (N,) of ``targets`` (N,) under the distribution of `logits_fp32`, and its entropy
    (N,) in nats if asked for.

    Both are float32 (float64 for float64 inputs), with gradients for hidden (N, H) and weight (V, H).
    A banned target gets -inf. Memory: three (chunk, V) float32 tensors and, in the backward pass, the
    gradient of the weight in float32.

    Args:
        chunk: number of tokens whose logits exist at the same time.
        head: further arguments of `logits_fp32`.
    """
    picked, *rest, _ = _ChunkedHead.apply(hidden, weight, head, chunk, _LogProbs(targets, entropy))
    return picked, rest[0] if entropy else None


def full_kl(
    hidden: Tensor,
    ref_hidden: Tensor,
    weight: Tensor,
    ref_weight: Tensor,
    *,
    chunk: int,
    ref_softcap: float | None = None,
    **head,
) -> Tensor:
    """(N,) exact KL(policy | reference), a sum over the vocabulary, with gradients for hidden (N, H)
    and weight (V, H). The hidden size of the reference may be another, and so may its vocabulary, if
    ids that only one of the two models has are banned.

    Args:
        chunk: as for `linear_logprobs`.
        head: further arguments of `logits_fp32`, but for ``softcap`` the same for both models.
    """
    reference = _FullKL(ref_hidden, ref_weight, head | {"softcap": ref_softcap})
    return _ChunkedHead.apply(hidden, weight, head, chunk, reference)[0]


@dataclass
class _LogProbs:
    """Log-probs of targets, and the entropy; and of each position the logarithm of its normalizer,
    which spares the backward pass a reduction of its logits."""

    targets: Tensor
    entropy: bool

    def values(self, logits: Tensor, span: slice) -> tuple[Tensor, ...]:
        function = _logprobs_and_entropy if self.entropy else _target_logprobs
        return fuse(function, logits, self.targets[span])

    def dlogits(
        self, logits: Tensor, span: slice, outputs: list, grads: list, dtype: torch.dtype
    ) -> Tensor:
        picked, *entropy, normalizer = outputs
        dlogp = torch.zeros_like(picked) if grads[0] is None else grads[0]  # (n,)
        per_token = normalizer, dlogp
        if self.entropy and grads[1] is not None:
            per_token = normalizer, dlogp, *entropy, grads[1]
        dlogits = fuse(_dlogits_off_target, logits, dtype, *per_token)
        # At its target a log-prob has another term; the logit of a banned target is a constant.
        targets = self.targets[span, None]
        term = torch.where(picked.isinf(), 0.0, dlogp)[:, None]
        at_target = _dlogits_off_target(logits.gather(1, targets), term.dtype, *per_token) + term
        return dlogits.scatter_(1, targets, at_target.to(dtype))


def _target_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) log-probs of targets (n,), and the logarithms of the normalizers."""
    normalizer = logits.logsumexp(-1)
    return logits.gather(1, targets[:, None])[:, 0] - normalizer, normalizer


def _logprobs_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    picked, normalizer = _target_logprobs(logits, targets)
    logp = logits - normalizer[:, None]  # (n, V)
    # 0 * log 0 must be 0: the bound makes it 0 * 1e4 instead of 0 * inf
    return picked, -logp.exp().mul_(logp.clamp_(min=-1e4)).sum(-1), normalizer


def _dlogits_off_target(
    logits: Tensor,
    dtype: torch.dtype,
    normalizer: Tensor,
    dlogp: Tensor,
    entropy: Tensor | None = None,
    dentropy: Tensor | None = None,
) -> Tensor:
    """(n, V) gradient of the logits z of all ids that are not the target: -p_v dlogp, and with an
    entropy H also -p_v (log p_v + H) dH. The other tensors are (n,)."""
    logp = logits - normalizer[:, None]
    if entropy is None or dentropy is None:
        return logp.exp_().mul_(-dlogp[:, None]).to(dtype)
    probs = logp.exp()
    scale = logp.clamp_(min=-1e4).add_(entropy[:, None]).mul_(-dentropy[:, None])
    return probs.mul_(scale.sub_(dlogp[:, None])).to(dtype)


@dataclass
class _FullKL:
    """The KL to a reference that has its own hidden states and head."""

    ref_hidden: Tensor
    ref_weight: Tensor
    head: dict  # of the reference

    def log_ratio(self, logits: Tensor, span: slice) -> tuple[Tensor, Tensor]:
        """(n, V) log-probs of the policy, and their difference from the reference's: 0 for banned
        ids."""
        ref = _logits_of(self.ref_hidden, self.ref_weight, self.head, span).log_softmax(-1)
        logp = logits.log_softmax(-1)
        if ref.shape != logp.shape:  # pad or cut
            ref = F.pad(ref, (0, logp.shape[1] - ref.shape[1]), value=-math.inf)
        return logp, (logp - ref).masked_fill_(logp == -math.inf, 0.0)

    def values(self, logits: Tensor, span: slice) -> tuple[Tensor, ...]:
        logp, ratio = self.log_ratio(logits, span)
        return (ratio.mul_(logp.exp()).sum(-1),)

    def dlogits(
        self, logits: Tensor, span: slice, outputs: list, grads: list, dtype: torch.dtype
    ) -> Tensor:
        logp, ratio = self.log_ratio(logits, span)
        # dKL/dz_v = p_v (log p_v - log q_v - KL)
        return ratio.sub_(outputs[0][:, None]).mul_(logp.exp()).mul_(grads[0][:, None]).to(dtype)


def _logits_of(hidden: Tensor, weight: Tensor, head: dict, span: slice) -> Tensor:
    """(n, V) logits of a slice of ``hidden``."""
    if head.get("early") is not None:
        head = head | {"early": head["early"][span]}
    return logits_fp32(hidden[span], weight, **head)


class _ChunkedHead(torch.autograd.Function):
    """Computes functions of the logits of each position without ever holding more than a chunk of the
    logits; the backward pass computes them again.

    ``function`` is a `_LogProbs` or a `_FullKL`. Its ``values(logits, span)`` returns tensors (n,)
    for a slice of the N positions; its ``dlogits(logits, span, outputs, grads, dtype)`` returns the
    gradient (n, V) of the logits, rounded to ``dtype``, given the gradients of the outputs. Both may
    overwrite the logits.
    """

    @staticmethod
    def forward(ctx, hidden, weight, head, chunk, function):
        # At least one chunk, even if empty: a rank without responses needs gradients, all zero.
        ctx.spans = [slice(start, start + chunk) for start in range(0, max(len(hidden), 1), chunk)]
        parts = []
        for span in ctx.spans:
            parts.append(function.values(_logits_of(hidden, weight, head, span), span))
        outputs = [torch.cat(part) for part in zip(*parts)]
        ctx.save_for_backward(hidden, weight, *outputs)
        ctx.head, ctx.function = head, function
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        hidden, weight, *outputs = ctx.saved_tensors
        dhidden = dweight = None
        if ctx.needs_input_grad[0]:
            dhidden = torch.empty_like(hidden)
        if ctx.needs_input_grad[1]:
            exact = torch.promote_types(hidden.dtype, torch.float32)  # for the sum over chunks
            dweight = torch.zeros_like(weight, dtype=exact)
        for span in ctx.spans:
            dlogits = _ChunkedHead.dlogits(ctx, span, outputs, grads)  # (n, V)
            if dhidden is not None:
                dhidden[span] = _product(dlogits, weight).to(hidden.dtype)
            if dweight is not None:
                # In slices: another (V, H) float32 tensor would be larger than the chunk's logits.
                slices = zip(dweight.split(VOCABULARY_SLICE), dlogits.t().split(VOCABULARY_SLICE))
                for part, columns in slices:
                    part += _product(columns, hidden[span])
            del dlogits  # else it would still exist while the next chunk's logits are computed
        if dweight is not None:
            dweight = dweight.to(weight.dtype)
        return dhidden, dweight, None, None, None

    @staticmethod
    def dlogits(ctx, span, outputs, grads):
        """(n, V) gradient of the product of hidden states and weight, in their type."""
        hidden, weight, *_ = ctx.saved_tensors
        logits = _logits_of(hidden, weight, ctx.head, span)
        own_outputs = [output[span] for output in outputs]
        temperature = ctx.head.get("temperature", 1.0)  # which divides the product
        own_grads = [None if grad is None else grad[span] / temperature for grad in grads]
        softcap = ctx.head.get("softcap")
        if softcap is None:
            return ctx.function.dlogits(logits, span, own_outputs, own_grads, hidden.dtype)
        # the derivative of c tanh(x / c) is 1 - tanh^2; 0 for banned ids, which are at -inf
        slope = 1 - (logits * (temperature / softcap)).clamp_(min=-1).square_()
        dlogits = ctx.function.dlogits(logits, span, own_outputs, own_grads, logits.dtype)
        return dlogits.mul_(slope).to(hidden.dtype)


# -------------------------------------------------------------------------------------------------
# Sampling: every id races with noise that is hashed from (seed, stream, draw, sample, position, id),
# and the winner is the token. So a token does not depend on the batch, rank or device, and a resume
# has no generator state to restore.
# -------------------------------------------------------------------------------------------------


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """(n, V) logits, -inf except for the ``top_k`` likeliest ids (0: all) and, among those, the
    smallest set with probability ``top_p``."""
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]  # (n, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p < 1:
        ordered, ids = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        likelier = probs.cumsum(dim=-1) - probs  # total probability of the likelier ids
        candidates = ordered.masked_fill(likelier >= top_p, -math.inf)
        logits = torch.full_like(logits, -math.inf).scatter(1, ids, candidates)
    return logits


def gumbel_race(logits: Tensor, keys: Tensor) -> Tensor:
    """Draw one id per row (B,) from softmax(logits (B, V)) by the Gumbel-max trick; a logit of -inf
    never wins.

    Rounding of the logits changes the draw only at near ties: much less often than with an inverse
    CDF. On a GPU this is one compiled kernel instead of about twenty, each of which would pass over
    (B, V); its logarithms may differ from those of eager mode in the last bits.
    """
    return fuse(_race, logits, keys, _id_hashes(logits.shape[-1], logits.device))


def _race(logits: Tensor, keys: Tensor, hashes: Tensor) -> Tensor:
    return (logits - _exponentials(keys, hashes).log_()).argmax(-1)


def fuse(
    function: Callable, *arguments: Any, gradient: Callable | None = None, **named: Any
) -> Any:
    """``function(*arguments, **named)``, the first of which is a tensor; on a GPU by one compiled
    kernel for each result, rounded as the function itself rounds. It runs uncompiled where nothing
    compiles, and where gradients are wanted, unless ``gradient`` computes them, see `_Fused`."""
    tensor = next(iter((*arguments, *named.values())))
    trains = torch.is_grad_enabled()
    if not can_fuse(tensor.device) or (trains and (named or gradient is None)):
        return function(*arguments, **named)
    if trains:
        return _Fused.apply(function, gradient, *arguments)
    return _compiled(function)(*arguments, **named)


class _Fused(torch.autograd.Function):
    """A fused function of tensors, of which it keeps the last two. ``gradient`` (of the results, and these
    two) returns what is known of the gradients of all, or None."""

    @staticmethod
    def forward(ctx, function, gradient, *tensors):
        ctx.save_for_backward(*tensors[-2:])
        ctx.gradient = gradient
        return fuse(function, *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, None, *ctx.gradient(*grads, *ctx.saved_tensors)


def can_fuse(device: torch.device) -> bool:
    """Whether functions of tensors there are compiled."""
    return device.type == "cuda" and _compiles(device)


@functools.cache
def _compiled(function: Callable) -> Callable:
    """A function through torch.compile, for any sizes but those that are marked as static."""
    return torch.compile(function, dynamic=True, options={"emulate_precision_casts": True})


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Whether torch.compile works here; if not, this warns."""
    # Not by a function that is compiled for use: a kernel keeps the block sizes of its first call.
    try:
        _compiled(_exponentials)(torch.arange(2, device=device), _id_hashes(3, device))
    except Exception as error:  # compilers raise anything
        text = " ".join(str(error).split())[:200]
        say(f"warning: torch.compile failed, which costs only time: {text}")
        return False
    return True


def _exponentials(keys: Tensor, hashes: Tensor) -> Tensor:
    """The draws (B, V) from the hashes (V,) of the ids."""
    keys = _mix64(keys)
    low, odd = (keys << 32) >> 32, (keys >> 32) | 1  # in the range of int32
    x = hashes * odd.int()[:, None]
    x = _mix32_(x.add_(low.int()[:, None])).bitwise_and_(0x7FFFFFFF)  # (B, V)
    # u = (x + 1/2) / 2^31, and the draw is -log(1 - u). Unlikely tokens win by small u, which a float
    # resolves. It would round the largest u to 1, which the clamp prevents. (Not of torch's default type:
    # a user's program may change it in another thread.)
    return (x.float() + 0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1).log1p_().neg_()


def sequence_keys(seed: int, stream: int, draws: Tensor, samples: Tensor) -> Tensor:
    """(B,) int64 keys for the noise of B sequences; see `token_keys`.

    Args:
        stream: what the sequences are for: training, evaluation, ...
        draws: (B,) number of prompts drawn before the sequence's prompt.
        samples: (B,) number of the sequence among the samples of its prompt.
    """
    key = torch.full_like(draws, seed % 2**63, dtype=torch.int64)
    for part in (stream, draws, samples):
        key = _mix64(key + (0x9E3779B97F4A7C15 - 2**64)) ^ part
    return _mix64(key + (0x9E3779B97F4A7C15 - 2**64))


def token_keys(sequence: Tensor, position: Tensor) -> Tensor:
    """(B,) keys for the noise of one token in each sequence, from the keys (B,) of the sequences and
    the positions (B,) of the tokens."""
    return _mix64(sequence ^ position)


# Products wrap around modulo 2^32 or 2^64, as they should. Shifts of signed integers copy the sign
# bit; the masks remove the copies.


def _mix64(x: Tensor) -> Tensor:
    """MurmurHash3's 64-bit finaliser (Appleby 2011) on int64: a bijection."""
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * (0xFF51AFD7ED558CCD - 2**64)
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * (0xC4CEB9FE1A85EC53 - 2**64)
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def _mix32_(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on int32, in place, without its last step, which only improves
    the low bits."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))  # not ^=, which compilers support less well
    x *= 0x85EBCA6B - 2**32
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF))
    x *= 0xC2B2AE35 - 2**32
    return x


@functools.lru_cache(maxsize=8)
def _id_hashes(vocab: int, device: torch.device) -> Tensor:
    """(V,) int32, all different: two ids with equal hashes would share their noise, and the likelier
    would always win."""
    hashes = _mix32_(torch.arange(1, vocab + 1, dtype=torch.int32, device=device))
    # A kernel for each vocabulary: the compiler's cache on disk would hand the draw of a small model,
    # with its block sizes, to a large one.
    torch._dynamo.mark_static(hashes)
    return hashes
