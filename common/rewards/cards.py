"""Samples as pictures, by Pillow alone: a card per sample, several cards on one sheet. Sizes are
pixels."""

import textwrap
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont, ImageOps

INK, GREY, PAPER, BLUE = "#1f2933", "#7b8794", "#ffffff", "#1d4ed8"
WIDTH, MARGIN = 480, 18  # of a card
IMAGE_HEIGHT = 224  # at most
SIZE, LINE_HEIGHT = 14, 19  # of the text
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
    top = MARGIN + max((image.height + MARGIN for image in fitted), default=0)
    lines = [(line, INK) for line in wrap(text, LINES)] + [("", INK)]
    lines += [(line, BLUE) for line in wrap(caption, 4)]
    card = Image.new("RGB", (WIDTH, top + LINE_HEIGHT * len(lines) + MARGIN), PAPER)
    x = MARGIN
    for image in fitted:
        card.paste(image, (x, MARGIN))
        x += image.width + MARGIN
    draw = ImageDraw.Draw(card)
    for k, (line, colour) in enumerate(lines):
        draw.text((MARGIN, top + LINE_HEIGHT * k), line, colour, font(SIZE))
    return card


def fit_images(images: list[Image.Image]) -> list[Image.Image]:
    """The images in a size that fits side by side. Tiny ones are enlarged by whole pixels: the
    reader sees exactly what they hold."""
    share = max(1, (WIDTH - MARGIN) // max(1, len(images)) - MARGIN)
    fitted = []
    for image in images:
        image = image.convert("RGB")
        factor = max(1, min(share // image.width, IMAGE_HEIGHT // image.height))
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
