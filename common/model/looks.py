"""A second look at the same tokens: functions from a batch to one with the same samples but other
prompts or images, to be scored like any other.

    with_prompts   every prompt in a template, as some processor reads it
    with_images    every image of prompts and conversations changed, or as in its file
    blank, ...     changes: functions of an image and its place in the run
    vision_gaps    what answers lose with blank images: the vision audit
    changed_logprobs, focus  log-probs with changed images, and what VPPO makes of them
    Teacher        another model that scores the tokens, and how it looks at them
"""

import functools
import math
import re
import string
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np
import torch
import torch.nn as nn
from PIL import Image, ImageStat
from torch import Tensor

from common import distributed, losses
from common.buffers import Batch, Conversation
from common.data.loader import join_pixels, load_pixels
from common.data.processor import Processor
from common.data.rows import Prompt, columns_of, make_prompt
from common.distributed import UserError
from common.flags import PerceptionArgs, Refusals, TeacherArgs
from common.model.forward import (
    Modules,
    compute_frozen_features,
    image_features,
    tower_parameters,
)
from common.model.fsdp import Trainable, copy_weights, onloaded
from common.model.weights import without_adapters

# -------------------------------------------------------------------------------------------------
# Other images
# -------------------------------------------------------------------------------------------------

# An image's place in the run: the draw of its prompt; 0 if the prompt has it, or 1 + the number of the
# sample whose conversation has it; its index there. It seeds what is random in a change.
Place = tuple[int, int, int]
MASK_SQUARE = 14  # pixels


def unchanged(image: Image.Image, place: Place) -> Image.Image:
    return image


def blank(image: Image.Image, place: Place) -> Image.Image:
    """An image of the same size in its mean colour."""
    mean = tuple(round(value) for value in ImageStat.Stat(image).mean)
    return Image.new(image.mode, image.size, mean)


def masked_images(share: float, seed: int) -> Callable:
    """A change: each square of 14 x 14 pixels of an image is black with probability ``share`` (the random
    masking of PAPO, Wang et al. 2025)."""

    def change(image: Image.Image, place: Place) -> Image.Image:
        masked, rng = image.copy(), np.random.default_rng((seed, *place))
        for y in range(0, image.height, MASK_SQUARE):
            for x in range(0, image.width, MASK_SQUARE):
                if rng.random() < share:
                    masked.paste(0, (x, y, x + MASK_SQUARE, y + MASK_SQUARE))
        return masked

    return change


def noisy_images(deviation: float, seed: int) -> Callable:
    """A change: Gaussian noise on every colour of every pixel; colours are between 0 and 1."""

    def change(image: Image.Image, place: Place) -> Image.Image:
        pixels = np.asarray(image, dtype=np.float32)
        noise = np.random.default_rng((seed, *place)).standard_normal(pixels.shape, np.float32)
        return Image.fromarray((pixels + 255 * deviation * noise).clip(0, 255).astype(np.uint8))

    return change


# kind of damage -> function of its amount and a seed that makes the change
DAMAGE = {"mask": masked_images, "noise": noisy_images}


def damage(spec: str, seed: int) -> Callable | None:
    """The change that a flag such as noise:0.3 asks for; None if it is empty. Raises UserError: bad flag."""
    if not spec:
        return None
    kind, _, amount = spec.partition(":")
    try:
        if not 0 < float(amount) <= 1:
            raise ValueError(amount)
        return DAMAGE[kind](float(amount), seed)
    except (KeyError, ValueError) as error:
        kinds = ", ".join(DAMAGE)
        raise UserError(
            f"--student_images {spec}: expected one of {kinds} and an amount up to 1, as in noise:0.3"
        ) from error


def has_images(batch: Batch) -> Tensor:
    """(S,) bool: whether a sample's prompt or conversation has images. The same on every rank."""
    seeing = [bool(batch.prompts[index].grids) for index in batch.prompt_index.tolist()]
    for i, conversation in enumerate(batch.conversations):
        seeing[i] = seeing[i] or bool(conversation.grids)
    return torch.tensor(seeing, dtype=torch.bool)


def with_images(
    batch: Batch, model: nn.Module, processor: Processor, change: Callable = unchanged
) -> Batch:
    """The batch with every (Pillow) image and every frame of a clip replaced by ``change(image, place)``
    of the same size, which the processor reads and the tower of the model sees.

    Raises UserError, on every rank: a file that has changed since it was read.
    """
    patches = {}
    with distributed.raise_on_all_ranks():
        for index in batch.own_prompts():
            prompt = batch.prompts[index]
            # a first observation shared by all samples of a prompt adds grids to it, but no file
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
    compute_frozen_features(model, changed)
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
    """(N,) log-probs of the batch's tokens with images changed; NaN for samples without images."""
    seeing = has_images(batch)
    logprobs = torch.zeros(len(batch.tokens))
    if seeing.any():
        changed = with_images(batch, policy.model, policy.processor, change)
        logprobs = compute_logprobs(policy, changed)
    return logprobs.masked_fill(~seeing.repeat_interleave(batch.lengths), math.nan)


def focus(batch: Batch, args: PerceptionArgs) -> tuple[Tensor, Tensor]:
    """(N,) factors on the advantages, by how much responses depend on their images, and (N,) bool:
    the tokens that depend on them most, which stay in the policy loss (VPPO)."""
    seen = losses.perception(batch.old_logprobs, batch.masked_logprobs)  # (N,)
    factors = losses.perception_factors(seen, batch.lengths, args.perception_scale)  # (S,)
    depends = losses.perception_mask(seen, batch.lengths, args.perception_ratio)
    return factors.repeat_interleave(batch.lengths), depends


def with_patches(model: nn.Module, conversation: Conversation, patches: list[Tensor]) -> Conversation:
    """The conversation with other images after its prompt, on the same grids."""
    if not patches:
        return conversation
    joined = torch.cat(patches)
    if model.setup.trains_vision:
        return replace(conversation, features=joined[None])
    features = image_features(model, joined, torch.tensor(conversation.grids)).cpu()
    return replace(conversation, features=features)


# -------------------------------------------------------------------------------------------------
# Other prompts
# -------------------------------------------------------------------------------------------------


def with_prompts(batch: Batch, processor: Processor, template: str = "") -> Batch:
    """The batch with all prompts as `read_prompt` returns them. A processor other than the batch's own
    may cut images into other grids: `with_images` must follow."""
    prompts = [read_prompt(prompt, processor, template) for prompt in batch.prompts]
    return replace(batch, prompts=prompts, positions={})


@functools.cache  # a row is read once in a run
def read_prompt(prompt: Prompt, processor: Processor, template: str) -> Prompt:
    """A row's prompt in the template, if there is one, as a processor reads it. Raises ValueError:
    a column that the row lacks, images that the family does not take, too many tokens."""
    try:
        messages = with_hint(prompt, template) if template else prompt.messages
        return make_prompt(processor, messages, prompt.images, processor.args)
    except ValueError as error:
        raise ValueError(f"{prompt.source}: {error}") from error


def with_hint(prompt: Prompt, template: str) -> list[dict]:
    """A prompt's messages, the last one wrapped in a template (see `check_template`): {prompt} stands
    for its text, other names for columns of the row. Raises ValueError: the row lacks one of them."""
    columns = prompt.row | {"answer": prompt.reference}
    columns = {name: value for name, value in columns.items() if value is not None}
    try:
        before, after = (text.format_map(columns) for text in template.split("{prompt}"))
    except KeyError as error:
        raise ValueError(f"--teacher_prompt: no {error}; {columns_of(prompt.row)}") from error
    *earlier, last = prompt.messages
    content = last["content"]
    places = [k for k, part in enumerate(content) if part["type"] == "text"]
    first = places[0] if places else len(content)  # images that lead the prompt stay in front
    hint = {"type": "text", "text": before}
    parts = [*content[:first], hint, *content[first:], {"type": "text", "text": after}]
    return [*earlier, last | {"content": [part for part in parts if part.get("text") != ""]}]


# -------------------------------------------------------------------------------------------------
# Another model
# -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Teacher:
    """A frozen model that scores the policy's tokens, and how it looks at them: with its own
    processor and tower if it has them, at prompts in a template, at images without damage."""

    policy: nn.Module  # gives log-probs; has a model and a processor, as the actor
    actor: nn.Module
    args: TeacherArgs
    offload: str  # of --offload

    @contextmanager
    def asked(self):
        """Inside, its module is on its device and without adapters."""
        policy = self.policy
        with onloaded(policy, self.offload), without_adapters(policy.model):
            yield policy

    @property
    def own_tower(self) -> bool:
        """Whether image features must be made for it."""
        model = self.policy.model
        return not (self.policy is self.actor or model.setup.trains_vision or not tower_parameters(model))

    def look(self, batch: Batch) -> Batch:
        """The batch, with or without samples, as the teacher sees it."""
        actor, processor, template = self.actor, self.policy.processor, self.args.teacher_prompt
        compute_frozen_features(actor.model, batch)
        if batch.conversations:
            return batch
        if template or processor is not actor.processor:
            batch = with_prompts(batch, processor, template)
        if self.own_tower or self.args.student_images:
            sees = self.own_tower or actor.model.setup.trains_vision
            batch = with_images(batch, (self.policy if sees else actor).model, processor)
        return batch


def teacher_of(args: Any, modules: Modules) -> Teacher | None:
    """The teacher of --teacher_model, if any; if it has no module of its own, the actor without adapters."""
    actor = modules["actor"]
    teacher = Teacher(modules.get("teacher", actor), actor, args.teacher, args.update.offload)
    return teacher if args.teacher.teacher_model else None


def prepare(args: Any, modules: Modules, rows: Any) -> None:
    """Ban the ids for which the teacher has no embedding. Raises UserError, on every rank: the
    teacher lacks tokens of the policy or cannot read a row; no row has an image to damage."""
    if args.teacher.student_images and rows.train and not any(row.images for row in rows.train):
        raise UserError("--student_images: no row of --data has images")
    teacher = teacher_of(args, modules)
    if teacher is None:
        return
    student, processor, template = rows.processor, teacher.policy.processor, args.teacher.teacher_prompt
    student.banned_ids += tuple(range(processor.vocab_size, student.vocab_size))
    tokens, others = student.tokenizer.get_vocab(), processor.tokenizer.get_vocab()
    lacking = tokens.items() - others.items()
    with distributed.raise_on_all_ranks(f"--teacher_model {args.teacher.teacher_model}: "):
        if lacking:
            raise ValueError(
                f"another tokenizer, which lacks {len(lacking)} of the policy's {len(tokens)} tokens "
                f"or has them under other ids, such as {min(lacking)}"
            )
        sees = processor.family.media == student.family.media
        if args.env.env and (teacher.own_tower or not sees):
            raise ValueError("with --env it must have the vision tower of the policy")
        everything = rows.train + rows.held_out if template or processor is not student else []
        with ThreadPoolExecutor(8) as pool:  # image headers wait for the file system
            list(pool.map(lambda row: read_prompt(row, processor, template), everything))


def follow_average(teacher: Teacher | None, trained: Trainable) -> None:
    """Give a teacher `ema` the averaged weights of the actor."""
    if teacher is not None and teacher.args.teacher_model == "ema":
        with trained.averaged():
            copy_weights(trained.module, teacher.policy)


def refuse_flags(refuse: Refusals, perception: PerceptionArgs) -> None:
    """Refuse `TeacherArgs` that cannot work, and learning from nothing."""
    values, teacher = refuse.values, refuse.values.teacher_model
    ema, idle = teacher == "ema", values.advantage == "none"
    refuse(ema and not values.ema_beta, "--teacher_model ema needs an --ema_beta above 0")
    refuse(ema and values.lora_rank, "--teacher_model ema has no adapters (--lora_rank); use self")
    refuse(
        (values.teacher_prompt or values.teacher_in == "loss") and not teacher,
        "--teacher_prompt and --teacher_in loss need a --teacher_model",
    )
    if values.teacher_prompt:
        check_template(values.teacher_prompt)
    refuse(
        idle and values.dynamic_sampling,
        "--dynamic_sampling chooses prompts by rewards, which --advantage none does not use",
    )
    refuse(
        values.env and (values.teacher_prompt or values.student_images),
        "--env: conversations are scored unchanged, without --teacher_prompt or --student_images",
    )
    refuse(
        values.student_images and perception.masks_images,
        "--student_images and --perception_coef, _ratio, _scale: choose one of them",
    )
    damage(values.student_images, values.seed)
    refuse(
        not teacher and (idle or values.reward == "none"),
        "--reward none and --advantage none learn from a teacher alone: pass a --teacher_model",
    )
    refuse(
        idle and values.kl_coef and values.kl_in == "reward",
        "--advantage none, which --reward none implies, needs --kl_in loss for its --kl_coef",
    )


def check_template(template: str) -> None:
    """Raises UserError: no template of --teacher_prompt. It is a Python format string of plain names:
    a format of its own could ask for gigabytes, and an attribute for more than the row."""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(
            f"--teacher_prompt {template}: {error} (a brace of the text is written twice)"
        ) from error
    for _, name, form, conversion in pieces:
        is_plain = name is None or re.fullmatch(r"[^\W\d][^.\[\]]*", name)
        if form or conversion or not is_plain:
            raise UserError(
                f"--teacher_prompt {template}: braces hold the name of a column and nothing else, as in "
                "{answer} (a brace of the text is written twice)"
            )
    names = [name for _, name, *_ in pieces]
    if not names.count("prompt") == template.count("{prompt}") == 1:
        raise UserError(
            f"--teacher_prompt {template} has no {{prompt}}, the place of the row's prompt, or several"
        )
