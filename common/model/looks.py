"""A second look at the same tokens: functions from a batch to a batch with the same samples and
other images, which is scored like any other.

    with_images   every image of the prompts and of environments changed
    blank         a change: of an image and its place in the run
    masked_images makes a change: random squares become black
    has_images    which samples a change of images concerns
    changed_logprobs   the log-probs then
    focus         what VPPO makes of them
    vision_gaps   what answers lose with blank images: the vision audit
"""

import math
from dataclasses import replace
from typing import Callable

import numpy as np
import torch
import torch.nn as nn
from PIL import Image, ImageStat
from torch import Tensor

from common import losses
from common.buffers import Batch, Conversation
from common.data.loader import join_pixels, load_pixels
from common.data.processor import Processor
from common.flags import PerceptionArgs
from common.model.forward import compute_features, image_features


# Which image of a run: the draw of its prompt, 0 or 1 + the number of the sample in whose
# conversation it is, and which image of that. What is random in a change is seeded by it.
Place = tuple[int, int, int]
MASK_SQUARE = 14  # pixels


def blank(image: Image.Image, place: Place) -> Image.Image:
    """An image of the same size in its mean colour."""
    mean = tuple(round(value) for value in ImageStat.Stat(image).mean)
    return Image.new(image.mode, image.size, mean)


def masked_images(share: float, seed: int) -> Callable:
    """A change: each square of 14 pixels of an image is black with probability ``share`` (the random
    masking of PAPO, Wang et al. 2025)."""

    def change(image: Image.Image, place: Place) -> Image.Image:
        across, down = (-(-side // MASK_SQUARE) for side in image.size)
        squares = np.random.default_rng((seed, *place)).random((down, across)) < share
        black = squares.repeat(MASK_SQUARE, axis=0).repeat(MASK_SQUARE, axis=1)
        mask = Image.fromarray(black).crop((0, 0, *image.size))
        return Image.composite(Image.new(image.mode, image.size), image, mask)

    return change


def has_images(batch: Batch) -> Tensor:
    """(S,) bool: whether a sample's prompt or conversation has images. The same on every rank."""
    seeing = [bool(batch.prompts[index].grids) for index in batch.prompt_index.tolist()]
    for i, conversation in enumerate(batch.conversations):
        seeing[i] = seeing[i] or bool(conversation.grids)
    return torch.tensor(seeing, dtype=torch.bool)


def with_images(batch: Batch, model: nn.Module, processor: Processor, change: Callable) -> Batch:
    """The batch with ``change(image, place)`` for every image (Pillow's) and every frame of a clip,
    of the same sizes.

    Raises ValueError: a file that has changed since it was read.
    """
    patches = {}
    for index in batch.own_prompts():
        prompt = batch.prompts[index]
        # a first observation that all samples of a prompt share has grids there, and no file
        files = replace(prompt, grids=prompt.grids[: len(prompt.images)])
        pixels = load_pixels(files, processor, change, (batch.prompt_ids[index], 0))
        if pixels is not None:
            patches[index] = pixels
    conversations = list(batch.conversations)
    for i, conversation in enumerate(conversations):
        index = int(batch.prompt_index[i])
        if not conversation.images:  # none, or on another rank
            continue
        pixels = []
        for k, image in enumerate(conversation.images):
            place = batch.prompt_ids[index], 1 + int(batch.number[i]), k
            pixels.append(processor.family.patches(change(image, place)))
        in_prompt = len(batch.prompts[index].grids) - len(batch.prompts[index].images)
        if in_prompt and batch.number[i] == 0:
            patched, grids = zip(*pixels[:in_prompt])
            parts = [patches[index]] if index in patches else []
            patches[index] = join_pixels([*parts, (torch.cat(patched), torch.tensor(grids))])
        later = [patched for patched, _ in pixels[in_prompt:]]
        conversations[i] = with_patches(model, conversation, later)
    changed = replace(batch, patches=patches, features={}, conversations=conversations)
    if not model.trains_vision:
        compute_features(model, changed)
    return changed


def vision_gaps(policy: nn.Module, batch: Batch, compute_logprobs: Callable) -> Tensor:
    """(k,) what each of the k answers to images loses in log-prob (nats) if these are blank; empty
    for a batch without images. Two packed forwards: the sampler's log-probs are too coarse in
    bfloat16."""
    seeing = has_images(batch)
    if not seeing.any():
        return torch.zeros(0)
    blanked = changed_logprobs(policy, batch, blank, compute_logprobs)
    gaps = compute_logprobs(policy, batch).double() - blanked.double()
    return batch.per_sample_sum(gaps)[seeing]


def changed_logprobs(
    policy: nn.Module, batch: Batch, change: Callable, compute_logprobs: Callable
) -> Tensor:
    """(N,) log-probs of the batch's tokens with ``change`` of the images; NaN where there are none."""
    seeing = has_images(batch)
    logprobs = torch.zeros(len(batch.tokens))
    if seeing.any():
        changed = with_images(batch, policy.model, policy.processor, change)
        logprobs = compute_logprobs(policy, changed)
    return logprobs.masked_fill(~seeing.repeat_interleave(batch.lengths), math.nan)


def focus(batch: Batch, args: PerceptionArgs) -> Tensor:
    """(N,) factors of the advantages by what the tokens owe to the images (VPPO). Tokens that owe them
    little leave the policy loss."""
    seen = losses.perception(batch.old_logprobs, batch.masked_logprobs)  # (N,)
    batch.in_policy_loss &= losses.perception_mask(seen, batch.lengths, args.perception_ratio)
    factors = losses.perception_factors(seen, batch.lengths, args.perception_scale)  # (S,)
    return factors.repeat_interleave(batch.lengths)


def with_patches(model: nn.Module, conversation: Conversation, patches: list[Tensor]) -> Conversation:
    """A conversation with other images of the same grids after its prompt."""
    if not patches:
        return conversation
    joined = torch.cat(patches)
    if model.trains_vision:
        return replace(conversation, features=joined[None])
    features = image_features(model, joined, torch.tensor(conversation.grids)).cpu()
    return replace(conversation, features=features)
