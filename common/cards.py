"""Samples as pictures, by Pillow alone.

    sample_card       a sample: its images, what was asked, what was answered, what it earned
    conversation_card a sample with an environment: its turns side by side
    contact_sheet     several of them on one sheet

Sizes are pixels.
"""

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont, ImageOps

INK, GREY, RULE, PAPER, BLUE = "#1f2933", "#7b8794", "#d9dee5", "#ffffff", "#1d4ed8"
GREEN = "#0f766e"  # what an environment says
WIDTH = 480  # of a card
MARGIN = 18
INNER = WIDTH - 2 * MARGIN
GAP = 10  # between the images of a card
IMAGE_HEIGHT = 224  # at most


class Line(NamedTuple):
    """A line of text on a card."""

    y: int
    text: str
    size: int
    colour: str


@lru_cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font: Latin only, other scripts come out as boxes."""
    return ImageFont.load_default(size)


class Section(NamedTuple):
    """A text with a label over it; of more than ``most`` lines the middle is left out."""

    label: str
    text: str
    most: int
    colour: str = INK


def sample_card(images: list[Image.Image], prompt: str, response: str, caption: str) -> Image.Image:
    """A picture of a sample: the images side by side, the prompt, the response, and a caption
    (reward, reference)."""
    sections = [Section("PROMPT", prompt, 10), Section("RESPONSE", response, 14)]
    return with_caption(panel(images, sections), caption)


def conversation_card(panels: list[Image.Image], caption: str) -> Image.Image:
    """A picture of a conversation: what `panel` makes of the prompt and of each turn, side by side,
    and a caption."""
    height = max(part.height for part in panels)
    joined = Image.new("RGB", (WIDTH * len(panels), height), PAPER)
    for k, part in enumerate(panels):
        joined.paste(part, (WIDTH * k, 0))
    draw = ImageDraw.Draw(joined)
    for k in range(1, len(panels)):
        draw.line((WIDTH * k, 0, WIDTH * k, height), fill=RULE)
    return with_caption(joined, caption)


def panel(images: list[Image.Image], sections: list[Section]) -> Image.Image:
    """Images side by side, and texts below them."""
    fitted = fit_images(images)
    band = max((image.height + 2 * MARGIN for image in fitted), default=0)
    lines, y = [], band
    for label, text, most, colour in sections:
        lines.append(Line(y + 13, label, 10, GREY))
        y += 28
        for part in wrap(text, 15, most):
            lines.append(Line(y, part, 15, colour))
            y += 20
        y += 2
    card = Image.new("RGB", (WIDTH, y + MARGIN), PAPER)
    draw = ImageDraw.Draw(card)
    draw.rectangle((0, 0, WIDTH, band), fill="#f3f5f8")
    x = (WIDTH - sum(image.width + GAP for image in fitted) + GAP) // 2
    for image in fitted:
        top = (band - image.height) // 2
        card.paste(ImageOps.expand(image, 1, RULE), (x - 1, top - 1))
        x += image.width + GAP
    draw_lines(draw, lines)
    return card


def with_caption(top: Image.Image, caption: str) -> Image.Image:
    """A card: its upper part, and a caption below it."""
    foot = top.height
    lines, y = [], foot + 8
    for part in wrap(caption, 14, 4):
        lines.append(Line(y, part, 14, BLUE))
        y += 19
    card = Image.new("RGB", (top.width, y + 10), "#e6effc")
    card.paste(top, (0, 0))
    draw = ImageDraw.Draw(card)
    draw_lines(draw, lines)
    draw.rectangle((0, 0, card.width - 1, card.height - 1), outline=RULE)
    return card


def draw_lines(draw: ImageDraw.ImageDraw, lines: list[Line]) -> None:
    for line in lines:
        draw.text((MARGIN, line.y), line.text, font=font(line.size), fill=line.colour)


def fit_images(images: list[Image.Image]) -> list[Image.Image]:
    """The images in a size that fits side by side. Tiny ones are enlarged by whole pixels: the
    reader sees exactly what they hold."""
    share = max(1, (INNER + GAP) // max(1, len(images)) - GAP)
    fitted = []
    for image in images:
        image = image.convert("RGB")
        factor = min(share // image.width, IMAGE_HEIGHT // image.height)
        if factor > 1:
            image = ImageOps.scale(image, factor, Image.Resampling.NEAREST)
        image.thumbnail((share, IMAGE_HEIGHT))
        fitted.append(image)
    return fitted


def wrap(text: str, size: int, most: int) -> list[str]:
    """Lines that fit a card; of more than ``most`` lines the middle is left out: answers stand
    last."""
    lines = []
    for paragraph in (text.strip() or "(empty)").expandtabs(4).split("\n"):
        rest = paragraph or " "
        while rest:
            cut = line_end(rest, size)
            lines.append(rest[:cut])
            rest = rest[cut:]
    if len(lines) > most:
        head = most * 2 // 3
        tail = len(lines) - most + head + 1
        left_out = sum(map(len, lines[head:tail]))
        lines[head:tail] = [f"… {left_out:,} characters left out …"]
    return lines


def line_end(text: str, size: int) -> int:
    """How many characters of a text stand on one line: up to a space, if there is one."""
    lengths = range(1, min(len(text), INNER // 3) + 1)
    fits = bisect_right(lengths, INNER, key=lambda n: font(size).getlength(text[:n]))
    fits = max(1, fits)
    if fits == len(text):
        return fits
    return text.rfind(" ", 0, fits) + 1 or fits


def contact_sheet(pictures: list[Image.Image], columns: int) -> Image.Image:
    """The pictures in rows of ``columns``, in cells as large as the largest one. ValueError without
    pictures."""
    gap, columns = 14, min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    width = gap + max(picture.width for picture in pictures)
    height = gap + max(picture.height for picture in pictures)
    sheet = Image.new("RGB", (gap + width * columns, gap + height * rows), "#e4e8ee")
    for i, picture in enumerate(pictures):
        row, column = divmod(i, columns)
        sheet.paste(picture, (gap + width * column, gap + height * row))
    return sheet
