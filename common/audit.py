"""Whether answers depend on the pictures: evaluated with other pictures.

    Audit      over the batches of an evaluation: what its answers lose in log-prob, and what greedy
               answers to blank pictures earn
    swapped    a batch with the pictures of another prompt, of the same grids

A blank picture has the grid of the true one, and one colour: the mean of all pictures of its
prompt or reply.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from common.buffers import Batch
from common.conversations import Conversation
from common.rewards import RewardMix
from common.vlm.model import compute_features, image_features
from common.vlm.replies import Pixels, join_pixels

# Nats. A model that does not see has a gap of 0, or of rounding.
LEAST_GAP = 1e-4


@dataclass
class Audit:
    """One number per sample, of all batches so far."""

    policy: nn.Module  # with its `model` and `processor`
    reward: RewardMix
    score: Callable  # (policy, batch) -> (N,) log-probs of its tokens
    answer: Callable  # (policy, prompts, sampling, samples of each prompt) -> batch with samples
    blank: list[float] = field(default_factory=list)  # log-prob with its pictures, less with blanks
    other: list[float] = field(default_factory=list)  # ... less with those of another prompt
    # what greedy answers to blank pictures earn, and those to prompts without pictures
    rewards: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)  # NaN where a reward has none

    def add(self, batch: Batch, prompts: Batch) -> None:
        """Look at a scored batch; every rank calls. ``prompts``: what it answers, with this rank's
        pictures as they were decoded."""
        shown = has_pictures(batch)
        if any(shown):
            self.compare(batch, prompts.patches, shown)
        if batch.sampling.greedy:
            blind = self.answer_blindly(batch, prompts) if any(shown) else batch
            self.rewards += blind.scores.tolist()
            self.accuracies += blind.component("accuracy").tolist()

    def compare(self, batch: Batch, pixels: dict[int, Pixels], shown: list[bool]) -> None:
        """The same answers with their own and with other pictures: three packed forwards. The
        sampler's log-probs would not do: in bfloat16 its rounding is larger than `LEAST_GAP`."""
        groups = batch.group.tolist()
        with_pictures = batch.per_sample_sum(self.score(self.policy, batch).double())
        blanked = self.repainted(batch, pixels, self.policy.processor.family.blank)
        blind = batch.per_sample_sum(self.score(self.policy, blanked).double())
        gaps = (with_pictures - blind).tolist()
        self.blank += [gap for gap, seen in zip(gaps, shown) if seen]
        partner = partners(batch)
        if partner:
            found = self.score(self.policy, swapped(batch, partner))
            gaps = (with_pictures - batch.per_sample_sum(found.double())).tolist()
            self.other += [gap for gap, group in zip(gaps, groups) if group in partner]

    def answer_blindly(self, batch: Batch, prompts: Batch) -> Batch:
        """Answers to the same prompts with blank pictures, scored: one more rollout."""
        sampling, processor = batch.sampling, self.policy.processor
        if sampling.environments is not None:
            blank = replace(sampling.environments, blank=True)
            sampling = replace(sampling, environments=blank)
        blank = painted(prompts.patches, processor.family.blank)
        blind = self.answer(self.policy, replace(prompts, patches=blank), sampling, 1)
        if self.reward.model_sources():  # they judge by the true pictures
            blind = self.repainted(blind, prompts.patches, lambda patches: patches)
        self.reward.score(blind, processor)
        return blind

    def repainted(self, batch: Batch, pixels: dict[int, Pixels], paint: Callable) -> Batch:
        """The batch with other pictures: what ``paint`` makes of the patches of a prompt's own, and
        of each picture that an environment has shown."""
        model, family = self.policy.model, self.policy.processor.family
        changed = painted(pixels, paint)
        conversations = []
        for i, said in enumerate(batch.conversations):
            group = int(batch.group[i])
            if batch.owners[group] == dist.get_rank() and said.pictures:
                patches, grids = zip(*map(family.patches, said.pictures))
                patches = list(map(paint, patches))
                # those of a first observation that all samples of the prompt share
                have = len(pixels[group][1]) if group in pixels else 0
                in_prompt = len(batch.prompts[group].grids) - have
                if in_prompt and batch.number[i] == 0:
                    parts = [changed[group]] if group in pixels else []
                    parts.append((torch.cat(patches[:in_prompt]), torch.tensor(grids[:in_prompt])))
                    changed[group] = join_pixels(parts)
                said = with_patches(model, said, patches[in_prompt:])
            conversations.append(said)
        result = replace(batch, patches=changed, features={}, conversations=conversations)
        if not model.trains_vision:
            compute_features(model, result)
        return result

    def metrics(self) -> dict[str, float]:
        """Means over all samples with pictures, the same on every rank."""
        columns = {"vision_gap_logprob": self.blank, "vision_gap_logprob_other_row": self.other}
        graded = [value for value in self.accuracies if not math.isnan(value)]
        if self.blank and graded:
            columns["accuracy_blanked"] = graded
        elif self.blank:
            columns["reward_blanked"] = self.rewards
        return {f"eval/{name}": sum(own) / len(own) for name, own in columns.items() if own}


def warning(metrics: dict[str, float]) -> str:
    """What to say of a model that does not see; "" if it does, or is not asked about pictures."""
    gap = metrics.get("eval/vision_gap_logprob", 1.0)
    if abs(gap) >= LEAST_GAP:
        return ""
    return (
        f"answers are as likely with blank pictures as with their own (eval/vision_gap_logprob "
        f"{gap:.1e}): the model does not use what it sees. Check that the chat template writes the "
        "pictures, that --max_pixels leaves something to see, and that the checkpoint's vision "
        "tower and projector are trained"
    )


def has_pictures(batch: Batch) -> list[bool]:
    """(S,) whether a sample's prompt or conversation has pictures. The same on every rank."""
    prompts = [batch.prompts[group] for group in batch.group.tolist()]
    conversations = batch.conversations or [Conversation()] * len(prompts)
    return [bool(row.grids or said.grids) for row, said in zip(prompts, conversations)]


def painted(pixels: dict[int, Pixels], paint: Callable) -> dict[int, Pixels]:
    return {group: (paint(patches), grids) for group, (patches, grids) in pixels.items()}


def with_patches(model: nn.Module, said: Conversation, patches: list[Tensor]) -> Conversation:
    """A conversation with other pictures of the same grids after its prompt."""
    if not patches or model.trains_vision:
        return replace(said, patches=patches)
    features = image_features(model, torch.cat(patches), torch.tensor(said.grids)).cpu()
    return replace(said, features=features)


def partners(batch: Batch) -> dict[int, int]:
    """For each prompt the next one with other pictures of the same grids; none where there is no
    such prompt. The same on every rank."""
    alike: dict[tuple, list[int]] = {}
    for group, prompt in enumerate(batch.prompts):
        if prompt.grids and group not in batch.dropped:
            alike.setdefault(prompt.grids, []).append(group)
    found = {}
    for groups in alike.values():
        for i, group in enumerate(groups):
            others = groups[i + 1 :] + groups[:i]
            others = [other for other in others if pictures_differ(batch, group, other)]
            if others:
                found[group] = others[0]
    return found


def pictures_differ(batch: Batch, group: int, other: int) -> bool:
    """Whether two prompts show different files. What an environment shows is taken for its own."""
    return bool(batch.conversations) or batch.prompts[group].images != batch.prompts[other].images


def swapped(batch: Batch, partner: dict[int, int]) -> Batch:
    """The batch in which each prompt has the pictures of its partner, on the rank that has them."""
    source = [partner.get(group, group) for group in range(len(batch.prompts))]
    changed: dict[str, Any] = {"owners": [batch.owners[group] for group in source]}
    for name in ("patches", "features"):
        own = getattr(batch, name)
        changed[name] = {g: own[other] for g, other in enumerate(source) if other in own}
    return replace(batch, **changed)
