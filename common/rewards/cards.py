"""Samples as pictures, by Pillow alone: a card per sample, several cards on one sheet. Sizes are
pixels."""

import textwrap
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont, ImageOps

INK, GREY, PAPER, BLUE = "#1f2933", "#7b8794", "#ffffff", "#1d4ed8"
WIDTH, MARGIN = 480, 18  # of a card
IMAGE_HEIGHT = 224  # at most
SIZE = 14  # of the text
CHARACTERS = 64  # of a line
LINES = 32  # of a card, at most


@lru_cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font: Latin only, other scripts come out as boxes."""
    return ImageFont.load_default(size)


def sample_card(images: list[Image.Image], text: str, caption: str) -> Image.Image:
    """A picture of a sample: its images side by side, what was said, and a caption in blue (what it
    earned)."""
    fitted = fit_images(images)
    said = "\n".join(wrap(text, LINES))
    earned = "\n".join(wrap(caption, 4))
    text_top = MARGIN + max((image.height + MARGIN for image in fitted), default=0)
    caption_top = text_top + text_height(said) + MARGIN
    height = caption_top + text_height(earned) + MARGIN
    card = Image.new("RGB", (WIDTH, height), PAPER)
    x = MARGIN
    for image in fitted:
        card.paste(image, (x, MARGIN))
        x += image.width + MARGIN
    draw = ImageDraw.Draw(card)
    draw.multiline_text((MARGIN, text_top), said, font=font(SIZE), fill=INK)
    draw.multiline_text((MARGIN, caption_top), earned, font=font(SIZE), fill=BLUE)
    return card


def text_height(lines: str) -> int:
    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    _, top, _, bottom = draw.multiline_textbbox((0, 0), lines, font(SIZE))
    return int(bottom - min(top, 0))


def fit_images(images: list[Image.Image]) -> list[Image.Image]:
    """The images in a size that fits side by side. Tiny ones are enlarged by whole pixels: the
    reader sees exactly what they hold."""
    share = max(1, (WIDTH - MARGIN) // max(1, len(images)) - MARGIN)
    fitted = []
    for image in images:
        image = image.convert("RGB")
        factor = min(share // image.width, IMAGE_HEIGHT // image.height)
        if factor > 1:
            image = ImageOps.scale(image, factor, Image.Resampling.NEAREST)
        image.thumbnail((share, IMAGE_HEIGHT))
        fitted.append(image)
    return fitted


def wrap(text: str, most: int) -> list[str]:
    """Lines that fit a card; of more than ``most`` the middle is left out: answers stand last."""
    lines = []
    for paragraph in text.strip().expandtabs(4).split("\n"):
        lines += textwrap.wrap(paragraph, CHARACTERS) or [""]
    if len(lines) > most:
        head = most * 2 // 3
        tail = len(lines) - most + head + 1
        lines[head:tail] = [f"… {tail - head} lines left out …"]
    return lines


