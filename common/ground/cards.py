"""Samples as images, by Pillow alone: a card per sample, several cards on one sheet. Sizes are
pixels."""

import textwrap

from PIL import Image, ImageDraw, ImageFont, ImageOps

INK, PAPER, BLUE = "#1f2933", "#ffffff", "#1d4ed8"
GREEN = "#16a34a"
WIDTH, MARGIN = 480, 18  # of a card
IMAGE_HEIGHT = 224  # at most
SIZE, LINE_HEIGHT = 14, 19  # of the text
CHARACTERS = 64  # of a line
LINES = 32  # of a card, at most
CARD_GAP = 14  # pixels between cards


def sample_card(images: list[Image.Image], text: str, caption: str) -> Image.Image:
    """A sample as an image: its own images side by side, what was said, and a caption in blue (what it
    earned)."""
    fitted = fit_images(images)
    top = MARGIN + max((image.height + MARGIN for image in fitted), default=0)
    texts = [(wrap(text, LINES), INK), (wrap(caption, 4), BLUE)]
    height = top + LINE_HEIGHT * sum(len(lines) + 1 for lines, _ in texts)
    card = Image.new("RGB", (WIDTH, height), PAPER)
    x = MARGIN
    for image in fitted:
        card.paste(image, (x, MARGIN))
        x += image.width + MARGIN
    draw, font = ImageDraw.Draw(card), ImageFont.load_default(SIZE)  # Latin only; others: boxes
    for lines, colour in texts:
        for line in lines:
            draw.text((MARGIN, top), line, colour, font)
            top += LINE_HEIGHT
        top += LINE_HEIGHT
    return card


def fit_images(images: list[Image.Image]) -> list[Image.Image]:
    """The images in a size that fits side by side. Tiny ones are enlarged without smoothing: the
    reader sees exactly what they hold."""
    share = max(1, (WIDTH - MARGIN) // max(1, len(images)) - MARGIN)
    fitted = []
    for image in images:
        tiny = max(image.width / share, image.height / IMAGE_HEIGHT) < 1
        method = Image.Resampling.NEAREST if tiny else Image.Resampling.BICUBIC
        fitted.append(ImageOps.contain(image.convert("RGB"), (share, IMAGE_HEIGHT), method))
    return fitted


def draw_regions(image: Image.Image, true: list, answered: list) -> Image.Image:
    """An image in the size of a card with the true boxes and points green, and those of an answer blue."""
    (fitted,) = fit_images([image])
    draw, scale = ImageDraw.Draw(fitted), fitted.width / image.width
    for regions, colour in ((true, GREEN), (answered, BLUE)):
        for region in regions:
            corners = [value * scale for value in region]
            if len(corners) == 2:
                draw.circle(corners, 5, outline=colour, width=2)
            else:
                draw.rectangle(corners, outline=colour, width=2)
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


def contact_sheet(cards: list[Image.Image]) -> Image.Image:
    """The cards, which are equally wide, one below the other."""
    height = sum(card.height + CARD_GAP for card in cards)
    sheet, top = Image.new("RGB", (cards[0].width, height), "#e4e8ee"), 0
    for card in cards:
        sheet.paste(card, (0, top))
        top += card.height + CARD_GAP
    return sheet
