"""The same samples with other images, to be scored like any others.

reread_images      a batch with all images of prompts and conversations changed, or read again
blank, ...         changes: functions of images and the key of their noise
vision_gaps        how much log-prob answers lose with blank images
changed_logprobs   log-probs with changed images
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image, ImageStat
from torch import Tensor

from common import distributed, losses
from common.buffers import Batch, Conversation
from common.data.loader import load_pixels
from common.data.processor import Processor
from common.flags import flag
from common.model.packs import image_grids
from common.model.policy import Policy, logprobs_of
from common.model.vlm import Model, compute_features_unless_trained, image_features


@dataclass(frozen=True)
class PerceptionArgs:
    """perception: what masked images change, by one more forward pass"""

    perception_coef: float = flag(
        0.0,
        "weight of the KL between the policy with its images and with masked ones, which is subtracted "
        "from the actor's loss; 0: off (PAPO: 0.01 or 0.02, with an --entropy_coef below 0)",
    )
    perception_ratio: float = flag(
        1.0,
        "below 1: use only this fraction of each response's tokens, those that depend most on its "
        "images, in the policy loss (VPPO: 0.4)",
        low=1e-6,
        high=1,
    )
    perception_scale: float = flag(
        1.0,
        "below 1: multiply advantages by a factor that grows with how much the response depends on "
        "its images; this is the smallest factor, and the mean of all factors is 1 (VPPO: 0.9)",
        high=1,
    )
    perception_mask: float = flag(
        0.6, "share of an image's squares of 14 pixels that are masked black", low=1e-6, high=1
    )

    @property
    def masks_images(self) -> bool:
        return self.perception_coef > 0 or min(self.perception_ratio, self.perception_scale) < 1


# -------------------------------------------------------------------------------------------------
# Other images
# -------------------------------------------------------------------------------------------------

# What seeds the randomness of a change: the draw of the prompt; 0 if the prompt has the images, or
# 1 + the number of the sample whose conversation has them.
NoiseKey = tuple[int, int]
Images = list[Image.Image]  # all images, and frames of clips, of a prompt or of a conversation
MASK_SQUARE = 14  # pixels


def unchanged(images: Images, key: NoiseKey) -> Images:
    return images


def blank(images: Images, key: NoiseKey) -> Images:
    """Images of the same sizes in their mean colours."""
    return [
        Image.new(image.mode, image.size, tuple(map(round, ImageStat.Stat(image).mean)))
        for image in images
    ]


def mask(image: Image.Image, share: float, rng: np.random.Generator) -> Image.Image:
    """Each square of 14 x 14 pixels is black with probability ``share`` (the random masking of PAPO,
    Wang et al. 2025)."""
    masked = image.copy()
    for y in range(0, image.height, MASK_SQUARE):
        for x in range(0, image.width, MASK_SQUARE):
            if rng.random() < share:
                masked.paste(0, (x, y, x + MASK_SQUARE, y + MASK_SQUARE))
    return masked


def at_random(change: Callable, amount: float, seed: int) -> Callable:
    """A change that treats each image by itself, by ``change(image, amount, generator)``."""
    return lambda images, key: [
        change(image, amount, np.random.default_rng((seed, *key, k)))
        for k, image in enumerate(images)
    ]


def has_images(batch: Batch) -> Tensor:
    """(S,) bool: whether a sample's prompt or conversation has images. The same on every rank."""
    seeing = []
    for i, index in enumerate(batch.prompt_index.tolist()):
        seeing.append(bool(image_grids(batch, [("prompt", index), ("reply", i)])))
    return torch.tensor(seeing, dtype=torch.bool)


def reread_images(
    batch: Batch, model: Model, processor: Processor, change: Callable = unchanged
) -> Batch:
    """The batch with the (Pillow) images and frames of each prompt and each conversation replaced by
    ``change(images, key)``, which returns as many of the same sizes; then read by the processor and
    encoded by the tower of the model.

    Raises UserError, on every rank: a file has changed since it was read.
    """
    patches, conversations = {}, list(batch.conversations)
    with distributed.raise_on_all_ranks():
        for index in batch.own_prompts():
            key = batch.draws[index], 0
            pixels = load_pixels(batch.prompts[index], processor, change, key)
            if pixels is not None:
                patches[index] = pixels
        for i, conversation in enumerate(conversations):
            index = int(batch.prompt_index[i])
            if not conversation.images:  # none, or on another rank
                continue
            key = batch.draws[index], 1 + int(batch.sample_number[i])
            changed = change(list(conversation.images), key)
            pixels = [patched for patched, _ in map(processor.family.patches, changed)]
            in_prompt = len(batch.prompts[index].grids) - len(batch.prompts[index].images)
            if in_prompt and batch.sample_number[i] == 0:
                parts = [patches[index]] if index in patches else []
                patches[index] = torch.cat([*parts, *pixels[:in_prompt]])
            conversations[i] = with_patches(model, conversation, pixels[in_prompt:])
    others = replace(batch, patches=patches, features={}, conversations=conversations)
    compute_features_unless_trained(model, others)
    return others


def vision_gaps(policy: Policy, batch: Batch) -> Tensor:
    """(k,) how much log-prob (nats) each of the k answers to images loses if the images are blank;
    empty for a batch without images. Takes two packed forward passes, as the sampler's log-probs are
    too coarse in bfloat16."""
    seeing = has_images(batch)
    if not seeing.any():
        return torch.zeros(0)
    gaps = logprobs_of(policy, batch).double() - changed_logprobs(policy, batch, blank).double()
    return losses.sum_per_sample(gaps, batch.own_lengths)[seeing]


def changed_logprobs(policy: Policy, batch: Batch, change: Callable) -> Tensor:
    """(N,) log-probs of the batch's tokens with images changed; NaN for samples without images."""
    seeing = has_images(batch)
    logprobs = torch.zeros(len(batch.tokens), dtype=torch.float32)
    if seeing.any():
        changed = reread_images(batch, policy.model, policy.processor, change)
        logprobs = logprobs_of(policy, changed)
    return logprobs.masked_fill(~seeing.repeat_interleave(batch.own_lengths), math.nan)


def with_patches(model: Model, conversation: Conversation, patches: list[Tensor]) -> Conversation:
    """The conversation with other images after its prompt, on the same grids."""
    if not patches:
        return conversation
    joined = torch.cat(patches)
    if model.setup.trains_vision:
        return replace(conversation, features=joined[None])
    features = image_features(model, joined, torch.tensor(conversation.grids)).cpu()
    return replace(conversation, features=features)
