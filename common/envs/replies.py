"""The replies of an environment, as the model reads them.

    parts -> texts and images                                  read_parts
    reply -> token ids that follow the assistant's end token   encode_reply

The chat template itself writes a reply: it renders a conversation of a user, an assistant and the
reply, of which the part after the assistant's words is taken. Only that part is tokenized, never again
what the policy has sampled. A UserError says what is wrong with a reply.

Shapes: E tokens of a reply.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from common.buffers import EMPTY, Content
from common.data.images import read_image, upright_rgb
from common.data.processor import Processor
from common.ground.files import UserError

TURN = "\x02turn\x03"  # occurs in nothing else, and no template changes it


@dataclass
class Reply:
    """A reply or a first observation."""

    content: Content = field(default_factory=list)
    images: list[Image.Image] = field(default_factory=list)  # RGB
    patches: Tensor = EMPTY  # of all images, concatenated
    grids: tuple[tuple, ...] = ()
    features: Tensor = EMPTY  # of all images, as `Conversation` keeps them
    input_ids: Tensor = EMPTY  # (E,) int64
    positions: Tensor = EMPTY  # (3, E) rotary positions, counted from its beginning


def read_parts(parts: Any, processor: Processor, limit: int) -> Reply:
    """Read a text, an image (Pillow's, or the path of one), or a list of these, without encoding it. A
    text far too long for ``limit`` tokens is cut, but to a length that still exceeds the limit, to
    spare the tokenizer."""
    reply, family = Reply(), processor.family
    longest = limit * processor.token_characters
    if not isinstance(parts, list | tuple):
        parts = [parts]
    for part in parts:
        if isinstance(part, str):
            reply.content.append({"type": "text", "text": part[: longest + 1]})
        elif isinstance(part, Image.Image | Path):
            image = read_image(str(part)) if isinstance(part, Path) else upright_rgb(part)
            reply.content.append({"type": "image", "width": image.width, "height": image.height})
            reply.images.append(image)
        else:
            raise UserError(
                "expected a text, a Pillow image, a pathlib.Path of an image, or a list of these;"
                f" got {part!r:.80}"
            )
    if reply.images:
        if not family.replies_show_images:
            name = processor.config.model_type
            raise UserError(f"images in replies are not supported for {name}")
        patches, grids = zip(*map(family.patches, reply.images))
        reply.patches, reply.grids = torch.cat(patches), grids
    return reply


def encode_reply(processor: Processor, reply: Reply, role: str, by_string: bool) -> Tensor:
    """(E,) the tokens between the last one that the policy sampled and the first one of its next
    turn.

    Args:
        by_string: a stop string ended the turn; otherwise the policy sampled an end token.
    """
    tail = render_reply(processor, reply, role)
    # The first end token closes the assistant's turn. LLaVA's template writes none, though its
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
        {"role": "assistant", "content": [{"type": "text", "text": TURN}]},
        {"role": role, "content": reply.content},
    ]
    return processor.render(messages, add_generation_prompt=True).partition(TURN)[2]
