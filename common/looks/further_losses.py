"""Losses beside those of the algorithm.

count_experts, pack_balance_loss   the load-balancing loss of mixture-of-experts models (--aux_loss_coef);
                                   a pack's share of it depends on all packs of a minibatch, so the experts
                                   that are chosen are counted first
PtxLoss                            a next-token loss on rows of text: PPO-ptx (Ouyang et al. 2022, equation 2)
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from common import losses
from common.buffers import Batch, Pack
from common.data.loader import PromptLoader, data_order
from common.data.rows import Example
from common.logging import Mean, Share
from common.model import experts, fsdp, packs, vlm
from common.model.policy import Policy


@torch.no_grad()
def count_experts(
    module: vlm.Wrapper, batch: Batch, indices: Iterable[int] | None = None, replay: bool = False
) -> Tensor:
    """(E,) how often each expert is chosen in the minibatch of the prompts ``indices`` (None: all),
    over all ranks. ``replay``: see `packs.of_batch`."""
    model = module.model
    text = model.config.get_text_config()
    load = torch.zeros(text.num_experts, device=model.setup.device)
    for pack in packs.of_batch(model, batch, indices, replay=replay):
        with experts.choices(model) as chosen:
            module(pack)
        load += losses.expert_load(chosen, pack.copies.to(load.device), len(load))
    fsdp.clear_forward_order(module)
    dist.all_reduce(load)
    return load


def pack_balance_loss(
    model: vlm.Model, pack: Pack, routed: list[Tensor], load: Tensor | None
) -> Tensor:
    """This pack's share of the load-balancing loss of a minibatch, from the router logits of its
    forward; 0 where the experts were not counted."""
    if load is None:
        return torch.zeros(())
    top_k = vlm.experts_per_token(model)
    return losses.balance_loss(routed, pack.copies.to(load.device), load, top_k)


@dataclass(kw_only=True)
class PtxLoss:
    """Rows with their target tokens, and the loader whose threads decode their images."""

    rows: list[Example]
    loader: PromptLoader
    batch: int  # rows per update, over all ranks
    coef: float  # weight of the loss in the actor's
    labels: str  # which tokens carry the loss: all "text", or "responses"
    seed: int
    scheduled: int = 0  # rows that earlier steps had for their updates, taken or not
    pending: list[tuple] = field(default_factory=list)  # what `PromptLoader.submit` returned
    batches: list[Batch] = field(default_factory=list)  # of the updates of this step, decoded

    def __post_init__(self):
        # (V,) bool: image tokens and such are no labels
        self.banned = self.loader.processor.banned_mask()

    def start(self, updates: int) -> None:
        """Begin to decode the images of the rows of a step's updates, while its samples are drawn."""
        order = data_order(len(self.rows), self.seed, self.scheduled)
        drawn = [list(itertools.islice(order, self.batch)) for _ in range(updates)]
        self.batches = []  # frees the images of the step before
        self.pending = [self.loader.submit([self.rows[k] for k in picks], picks) for picks in drawn]

    def collect(self) -> None:
        """Wait for the images of all updates, before the first: an image that cannot be read costs no
        finished step. Raises UserError: see `PromptLoader.collect`."""
        self.batches = [self.loader.collect(*batch) for batch in self.pending]
        self.scheduled += self.batch * len(self.batches)
        self.pending = []

    def losses(
        self, policy: Policy, update: int, aux_loss_coef: float, stats: dict
    ) -> Iterator[Tensor]:
        """Each pack's share of the loss, a mean over the label tokens of all ranks.

        Args:
            update: its number in the step, from 0.
            stats: gets statistics like those of the actor's loss, after the last pack.
        """
        model = policy.model
        prompts = self.batches[update]
        examples = [[self.rows[k]] for k in prompts.draws]
        batch = packs.with_examples(model, prompts, examples)
        vlm.compute_features_unless_trained(model, batch)
        load = count_experts(policy, batch) if aux_loss_coef else None
        count = self.count_labels(batch)
        total = torch.zeros((), device=model.setup.device)
        for pack in packs.of_batch(model, batch):
            if self.labels == "text":
                pack = pack.label_text(self.banned.to(total.device))
            with vlm.router_logits(model) as routed:
                logp, *_ = policy(pack)  # (T,)
            loss = -logp.sum() / count
            balance = aux_loss_coef * pack_balance_loss(model, pack, routed, load)
            yield self.coef * (loss + balance)
            total += loss.detach()
        stats["ptx_loss"] = Share(total)
        stats["ptx_dropped"] = Mean(len(prompts.dropped), 1)  # the same on all ranks

    def count_labels(self, batch: Batch) -> int:
        """Tokens that carry the loss, over all ranks."""
        if self.labels == "responses":
            return len(batch.tokens)
        following, *_ = batch.in_pack(torch.arange(len(batch)))  # (R,)
        count = int((~self.banned[following]).sum())
        # the first token of a text is no label: nothing predicts it
        for index in batch.prompt_index.tolist():
            count += int((~self.banned[batch.prompts[index].input_ids[1:]]).sum())
        return count
