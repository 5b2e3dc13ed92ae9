"""What an environment says, as the model reads it.

    parts  -> texts and pictures                                       read_parts
    reply  -> token ids that follow the assistant's end token          encode_reply
    first observation -> the end of the prompt                         encode_opening
    waiting replies   -> features of their pictures, one pack    compute_features, reply_pack

A reply is written by the chat template itself: in a conversation of a user, an assistant and the
reply, it is what follows after the assistant's words. Only these tokens are new; what the policy
has sampled is never tokenized again. Raised are ValueErrors: what is wrong with a reply.

Shapes: E tokens of a reply, M image tokens, H hidden size, K levels of image features.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from PIL import Image
from torch import Tensor

from common.buffers import Content, Pack, ragged_index
from common.data.images import read_image, upright_rgb
from common.data.processor import Processor
from common.data.rows import Prompt
from common.model.attention import PackedAttention, SlotCache
from common.model.forward import image_features

SAID = "\x02said\x03"  # nothing else contains it, and no template changes it


@dataclass
class Reply:
    """A reply or a first observation."""

    content: Content = field(default_factory=list)
    pictures: list[Image.Image] = field(default_factory=list)  # RGB
    patches: Tensor | None = None  # of all pictures, one after the other
    grids: tuple[tuple, ...] = ()
    features: Tensor | None = None  # (K, M, H) of all pictures, on the CPU
    input_ids: Tensor | None = None  # (E,) int64
    positions: Tensor | None = None  # (3, E) rotary positions from the first token on


def read_parts(said: Any, processor: Processor) -> Reply:
    """A text, a picture (Pillow's, or the path of one), or a list of these, not yet encoded."""
    given = list(said) if isinstance(said, list | tuple) else [said]
    reply = Reply()
    for part in given:
        if isinstance(part, str):
            part.encode("utf-8")
            reply.content.append({"type": "text", "text": part})
        elif isinstance(part, Image.Image | Path):
            picture = read_image(str(part)) if isinstance(part, Path) else upright_rgb(part)
            size = {"width": picture.width, "height": picture.height}
            reply.content.append({"type": "image", **size})
            reply.pictures.append(picture)
        else:
            raise ValueError(
                "expected a text, a picture of Pillow's, a pathlib.Path of one, or a list of these;"
                f" got {part!r:.80}"
            )
    if not given:
        raise ValueError("an empty list; say nothing with an empty text")
    if reply.pictures:
        check_pictures(processor)
        patches, grids = zip(*map(processor.family.patches, reply.pictures))
        reply.patches, reply.grids = torch.cat(patches), tuple(grids)
    return reply


def check_pictures(processor: Processor) -> None:
    """Raises ValueError: models that cannot have pictures in replies."""
    name = processor.config.model_type
    if not processor.family.has_images:
        raise ValueError(f"pictures for {name}, a model of text only")
    if not processor.family.replies_show_images:
        raise ValueError(f"pictures in replies are not supported for {name}")


def encode_reply(processor: Processor, reply: Reply, role: str, by_string: bool) -> Tensor:
    """(E,) the tokens between the last one that the policy sampled and the first one of its next
    turn.

    Args:
        by_string: the turn was ended by a stop string; else the policy has sampled an end token.
    """
    tail = render_reply(processor, reply, role)
    # The first end token closes the assistant's turn. LLaVA's template closes none, though its
    # models sample one.
    ends = processor.tokenizer.convert_ids_to_tokens(list(processor.stop_ids))
    first = re.match(rf"\s*({'|'.join(map(re.escape, ends))})", tail)
    closing = first[1] if first else processor.tokenizer.eos_token
    rest, counts = processor.expand(tail[first.end() :] if first else tail, reply.grids)
    ids = processor.ids_behind(closing, rest, counts)
    if by_string and first:
        closing_id = processor.tokenizer.convert_tokens_to_ids(closing)
        ids = torch.cat([torch.tensor([closing_id]), ids])
    return ids


def render_reply(processor: Processor, reply: Reply, role: str) -> str:
    """What the template writes after the assistant's words: end of turn, reply, next turn."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": SAID}]},
        {"role": role, "content": reply.content},
    ]
    text = processor.render(processor.as_chat(messages), add_generation_prompt=True)
    _, found, tail = text.partition(SAID)
    if not found:
        raise ValueError("the chat template leaves out what the assistant said")
    for part in reply.content:
        if part.get("text", "").strip() not in tail:
            raise ValueError(f"the chat template leaves out {part['text']!r:.80} of role {role!r}")
    shown = tail.count(processor.family.placeholder) if processor.family.has_images else 0
    if shown != len(reply.pictures):
        raise ValueError(
            f"the chat template writes {shown} places for {len(reply.pictures)} pictures of role "
            f"{role!r}"
        )
    return tail


def check_template(processor: Processor, role: str, pictures: bool) -> None:
    """Raises ValueError: the chat template cannot say what an environment of that role may."""
    picture = [Image.new("RGB", (64, 64), "white")] if pictures else []
    encode_reply(processor, read_parts([*picture, "seen"], processor), role, by_string=False)


def encode_opening(
    processor: Processor, prompt: Prompt, opening: Reply, limit: int
) -> tuple[str, Tensor, int]:
    """A prompt with a first observation at the end of its last message: text, token ids (P,) and
    how many of them are image tokens. Raises ValueError: more than ``limit`` tokens."""
    *before, last = prompt.messages
    messages = [*before, {**last, "content": last["content"] + opening.content}]
    text, ids, image_tokens = processor.encode(messages, prompt.grids + opening.grids)
    if len(ids) > limit:
        raise ValueError(
            f"prompt too long with the first observation: {len(ids)} tokens; the limit is {limit}"
        )
    return text, ids, image_tokens


# -------------------------------------------------------------------------------------------------
# Prefill of replies
# -------------------------------------------------------------------------------------------------


class Resumed(NamedTuple):
    """A conversation that goes on: a segment that attends to what its slot has cached."""

    slot: int
    cached: int  # tokens of the slot that stay
    input_ids: Tensor  # (n,) the last own token, which may not be cached, and the reply
    positions: Tensor  # (3, n)


def compute_features(model: nn.Module, replies: list[Reply]) -> list[Tensor]:
    """Fill the image features of the replies, by one call of the vision tower, and return those
    there are. Only a tower that is trained needs the patches again."""
    shown = [reply for reply in replies if reply.grids]
    if not shown:
        return []
    patches = torch.cat([reply.patches for reply in shown])
    grids = torch.tensor([grid for reply in shown for grid in reply.grids])
    with torch.inference_mode(False), torch.no_grad():  # they are trained on later
        features = image_features(model, patches, grids).cpu()
    image_ids = model.family.visual_token_ids()
    counts = [int(torch.isin(reply.input_ids, image_ids).sum()) for reply in shown]
    for reply, part in zip(shown, features.split(counts, dim=1)):
        reply.features = part
        if not model.trains_vision:
            reply.patches = None
    return [reply.features for reply in shown]


def reply_pack(
    model: nn.Module, cache: SlotCache, resumed: list[Resumed], features: list[Tensor]
) -> Pack:
    """One pack of conversations that go on, each after the keys and values of its slot; its
    end predicts the next turn.

    Args:
        features: of their images, (K, M, H) each.
    """
    compute = model.compute
    slot, cached = torch.tensor([part[:2] for part in resumed]).T  # (b,) each
    counts = torch.tensor([len(part.input_ids) for part in resumed])  # (b,)
    ends = counts.cumsum(0)
    size = int(ends[-1])  # L; the slots' keys and values follow the row
    kept_ends = size + cached.cumsum(0)
    segments = torch.stack([ends - counts, ends, kept_ends - cached, kept_ends], dim=1).tolist()
    plan = torch.arange(size), slot.repeat_interleave(counts), ragged_index(cached, counts)
    kept = slot.repeat_interleave(cached), ragged_index(torch.zeros_like(cached), cached)
    plan, kept = (tuple(x.to(compute.device) for x in part) for part in (plan, kept))
    ids = torch.cat([part.input_ids for part in resumed])  # (L,)
    positions = torch.cat([part.positions for part in resumed], dim=1)  # (3, L)
    image_index = torch.isin(ids, model.family.visual_token_ids()).nonzero()[:, 0]  # (M,)
    return Pack(
        input_ids=ids[None].to(compute.device),
        positions=positions[:, None].to(compute.device),
        image_index=image_index.to(compute.device),
        features=torch.cat(features, dim=1).to(compute.device) if features else None,
        attention=PackedAttention(segments, compute.backend, compute.device, cache, plan, kept),
        predict=ends.to(compute.device) - 1,
    )
