"""The models of the algorithm: a transformers model with what the loss reads from it.

    Policy       log-probs of response tokens; actor, reference, teacher and judge, which
                 train_grm_vl.py trains
    Critic       values; also the scalar reward model
    logprobs_of, logprobs_and_entropy_of, exact_kl_of, values_of   of all samples of a batch

FSDP gathers their weights in `forward`, so whatever needs weights happens there.

Shapes: N response tokens of all samples, T of them in a pack of L tokens; H hidden size, V
vocabulary.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from common import logprobs
from common.buffers import Batch, Pack
from common.data.processor import Processor
from common.model import vlm
from common.model.adapters import without_adapters
from common.model.experts import own_choice
from common.model.fsdp import clear_forward_order, reshard_root
from common.model.packs import run_forward
from common.sampling import Sampling


class ReferenceOutputs(NamedTuple):
    """What the exact KL to a frozen model needs of it, for a pack."""

    hidden: Tensor  # (T, H) of its own hidden size
    weight: Tensor  # (V, H) of its LM head
    softcap: float | None  # of its logits


class Policy(vlm.Wrapper):
    """Actor, reference, teacher or judge: maps a pack to the log-probs of its response tokens. The
    full logits are never materialized."""

    def __init__(self, model: vlm.Model, processor: Processor):
        super().__init__()
        self.model, self.processor = model, processor

    def forward(
        self,
        pack: Pack,
        sampling: Sampling | None = None,
        entropy: bool = False,
        references: Mapping[str, ReferenceOutputs] | None = None,
        hidden_only: bool = False,
    ):
        """Returns logp (T,) float32, entropy (T,) or None, and the exact KL (T,) to each reference, by its
        name.

        Args:
            sampling: how the tokens were drawn; None for text that was not sampled: temperature 1,
                and no banned ids.
            references: what frozen models have from `as_reference`, by any names.
            hidden_only: return only the hidden states (T, H) that predict the response tokens. (A
                flag, not a method: FSDP gathers weights only in `forward`.)
        """
        hidden = vlm.hidden_states(self.model, pack)[pack.predict]  # (T, H)
        if hidden_only:
            return hidden
        options = {"chunk": self.model.setup.head_chunk, "softcap": vlm.softcap(self.model)}
        if sampling is not None:
            options |= sampling.logits_options(pack.step)
        weight = self.model.lm_head.weight  # (V, H)
        logp, entropies = logprobs.linear_logprobs(
            hidden, weight, pack.targets, entropy=entropy, **options
        )
        kls = {}
        for name, other in (references or {}).items():
            kls[name] = logprobs.full_kl(
                hidden, other.hidden, weight, other.weight, ref_softcap=other.softcap, **options
            )
        return logp, entropies, kls

    @torch.no_grad()
    def as_reference(self, pack: Pack) -> ReferenceOutputs:
        """What the exact KL to this model, frozen and without adapters, needs of it. The LM head is still
        unsharded after the forward."""
        with without_adapters(self.model), own_choice(pack):
            hidden = self(pack, hidden_only=True)
        clear_forward_order(self)
        return ReferenceOutputs(hidden, self.model.lm_head.weight, vlm.softcap(self.model))


class Critic(vlm.Wrapper):
    """The value of the state before each response token, read at the position that predicts the
    token."""

    def __init__(self, model: vlm.Model):
        super().__init__()
        self.model = model
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        # the bias of a scalar model's files, which is not trained
        self.value_head.register_buffer("offset", torch.zeros(1))

    def forward(self, pack: Pack) -> Tensor:
        """Returns values (T,) in float32, the type of the head."""
        hidden = vlm.hidden_states(self.model, pack)  # (L, H)
        states = hidden[pack.predict].to(self.value_head.weight.dtype)  # (T, H)
        # sum, not squeeze: FSDP2 hooks the output, which must not be a view
        return self.value_head(states).sum(dim=-1) + self.value_head.offset


def logprobs_of(policy: Policy, batch: Batch) -> Tensor:
    """(N,) log-probs of the responses under the distribution they were drawn from, with its
    temperature and banned ids; under the plain model if the batch was not sampled."""
    return run_forward(policy, batch, lambda pack: policy(pack, batch.sampling)[0])


def logprobs_and_entropy_of(actor: Policy, batch: Batch) -> Tensor:
    """(2, N) the same of the policy that is trained, with its entropy; a mixture chooses the experts that
    were recorded while sampling."""

    def both(pack: Pack) -> Tensor:
        logp, entropy, _ = actor(pack, batch.sampling, entropy=True)
        return torch.stack([logp, entropy])

    return run_forward(actor, batch, both, replay=True)


def exact_kl_of(actor: Policy, reference: Policy, batch: Batch) -> Tensor:
    """(N,) the KL to the reference at every response token, a sum over the vocabulary."""

    def kl_of(pack: Pack) -> Tensor:
        references = {"kl": reference.as_reference(pack)}
        _, _, kls = actor(pack, batch.sampling, references=references)
        return kls["kl"]

    kl = run_forward(actor, batch, kl_of, replay=True)
    reshard_root(reference)
    return kl


def values_of(critic: Critic, batch: Batch) -> Tensor:
    """(N,) the critic's value of the state before every response token."""
    return run_forward(critic, batch, critic)
