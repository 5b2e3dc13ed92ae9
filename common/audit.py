"""Whether answers depend on the pictures: the same answers, scored with other pictures.

    blanked    each prompt's pictures in their mean colour
    swapped    the pictures of another prompt, of the same grids
    Audit      what answers lose by it, over the batches of an evaluation
"""

from dataclasses import dataclass, field, replace
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from PIL import Image, ImageStat
from torch import Tensor

from common.buffers import Batch
from common.conversations import Conversation
from common.vlm.families import Family
from common.vlm.model import compute_features, image_features

# Nats. Below it even the rounding of bfloat16 would explain the difference.
LEAST_GAP = 1e-4
Pixels = tuple[Tensor, Tensor]  # patches of all pictures, grids


@dataclass
class Audit:
    """Log-probs of answers with their pictures, less those with others: one number per sample."""

    family: Family  # of the actor's processor
    blank: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    def add(
        self, model: nn.Module, batch: Batch, pixels: dict[int, Pixels], score: Callable
    ) -> None:
        """Two packed forwards of a batch with samples.

        Args:
            pixels: of this rank's prompts, as they were decoded.
            score: batch -> (N,) log-probs of its tokens, on every rank.
        """
        groups = batch.group.tolist()
        shown = [bool(batch.prompts[group].grids) for group in groups]
        for i, said in enumerate(batch.conversations):
            shown[i] = shown[i] or bool(said.grids)
        if not any(shown):
            return
        with_pictures = batch.per_sample_sum(batch.logprobs.double())
        blind = batch.per_sample_sum(score(self.blanked(model, batch, pixels)).double())
        gaps = (with_pictures - blind).tolist()
        self.blank += [gap for gap, seen in zip(gaps, shown) if seen]
        partner = partners(batch)
        if partner:
            other = batch.per_sample_sum(score(swapped(batch, partner)).double())
            gaps = (with_pictures - other).tolist()
            self.other += [gap for gap, group in zip(gaps, groups) if group in partner]

    def blanked(self, model: nn.Module, batch: Batch, pixels: dict[int, Pixels]) -> Batch:
        """The batch with pictures of one colour: the mean of all pixels of a prompt's own, and of
        each picture that an environment has shown."""
        blank = self.family.blank
        changed = {group: (blank(patches), grids) for group, (patches, grids) in pixels.items()}
        conversations = []
        for i, said in enumerate(batch.conversations):
            group = int(batch.group[i])
            if batch.owners[group] == dist.get_rank() and said.pictures:
                found = [self.family.patches(in_one_colour(picture)) for picture in said.pictures]
                # those of a first observation that all samples of the prompt share
                have = len(pixels[group][1]) if group in pixels else 0
                in_prompt = len(batch.prompts[group].grids) - have
                if in_prompt and batch.number[i] == 0:
                    patches, grids = zip(*found[:in_prompt])
                    before = [changed[group]] if group in pixels else []
                    parts = [*before, (torch.cat(patches), torch.tensor(grids))]
                    changed[group] = tuple(map(torch.cat, zip(*parts)))
                said = with_pictures(model, said, [patches for patches, _ in found[in_prompt:]])
            conversations.append(said)
        result = replace(batch, patches=changed, features={}, conversations=conversations)
        if not model.trains_vision:
            compute_features(model, result)
        return result

    def metrics(self) -> dict[str, float]:
        """Means over all samples with pictures, the same on every rank."""
        found = {}
        for name, gaps in (("", self.blank), ("_other_row", self.other)):
            if gaps:
                found[f"eval/vision_gap_logprob{name}"] = sum(gaps) / len(gaps)
        return found


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


def in_one_colour(picture: Image.Image) -> Image.Image:
    mean = tuple(round(value) for value in ImageStat.Stat(picture).mean)
    return Image.new("RGB", picture.size, mean)


def with_pictures(model: nn.Module, said: Conversation, patches: list[Tensor]) -> Conversation:
    """A conversation with other pictures of the same grids after its prompt."""
    if not patches or model.trains_vision:
        return replace(said, patches=patches)
    features = image_features(model, torch.cat(patches), torch.tensor(said.grids)).cpu()
    return replace(said, features=features)


def partners(batch: Batch) -> dict[int, int]:
    """For each prompt the next one with pictures of the same grids; none where there is no other.
    The same on every rank."""
    alike: dict[tuple, list[int]] = {}
    for group, prompt in enumerate(batch.prompts):
        if prompt.grids and group not in batch.dropped:
            alike.setdefault(prompt.grids, []).append(group)
    found = {}
    for groups in alike.values():
        if len(groups) > 1:
            found |= dict(zip(groups, groups[1:] + groups[:1]))
    return found


def swapped(batch: Batch, partner: dict[int, int]) -> Batch:
    """The batch in which each prompt has the pictures of its partner, on the rank that has them."""
    source = [partner.get(group, group) for group in range(len(batch.prompts))]
    changed: dict[str, Any] = {"owners": [batch.owners[group] for group in source]}
    for name in ("patches", "features"):
        own = getattr(batch, name)
        changed[name] = {g: own[other] for g, other in enumerate(source) if other in own}
    return replace(batch, **changed)
