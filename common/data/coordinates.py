"""Boxes and points in images: what rows say of them, and the coordinates in which a model answers.

    Place          an image's sizes and the space of a model's answers; to and from pixels of its file
    read_regions   the column `regions` of a row, in pixels of the file
    write_marks    <box> and <point> in a response to learn, as a family writes them
    restate        the boxes and points of an answer in another model's space

Families were trained to answer in different spaces: pixels of the image as they saw it, thousandths,
fractions. The space is never guessed from how large the numbers are. Pixels of the file are those of
the upright image, as EXIF turns it.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from common.files import check_form

Box = tuple[float, ...]  # left, top, right, bottom
Point = tuple[float, ...]  # x, y
# Two or four finite numbers.
NUMBER = r"\s*[-+]?(?:\d{1,25}\.?\d{0,25}|\.\d{1,25})(?:[eE][-+]?\d{1,2})?\s*"
NUMBERS = f"{NUMBER},{NUMBER}(?:,{NUMBER},{NUMBER})?"
# The form of the column `regions`.
FORM = {
    "boxes?": [[int | float]],
    "points?": [[int | float]],
    "labels?": [str],
    "space?": ("file", "seen", "1000", "100", "1", "square"),
    "image?": int,
}

# The space in which a family's published checkpoints answer, by model type. Where its makers say
# nothing, there is no entry, and --coordinates is needed.
SPACES = {
    "qwen2_vl": "1000",  # Qwen3-VL's repository, the notebook of process_bbox
    "qwen2_5_vl": "seen",  # the same
    "qwen3_vl": "1000",  # Qwen3-VL's README and its issue 1486
    "qwen3_vl_moe": "1000",
    "qwen3_5": "1000",  # ms-swift's template, which is Qwen3-VL's
    "qwen3_5_moe": "1000",
    "internvl": "1000",  # the pattern of InternVL's demo
    "glm4v": "1000",  # GLM-V's README, of 4.1V, 4.5V and 4.6V
    "glm4v_moe": "1000",
    "glm46v": "1000",
}
# How a family writes a box and a point where that is not Qwen2.5-VL's JSON; sources as above.
LITERALS = {
    "qwen2_vl": (
        "<|box_start|>({0},{1}),({2},{3})<|box_end|>",
        "<|box_start|>({0},{1})<|box_end|>",
    ),
    "internvl": ("<box>[[{0}, {1}, {2}, {3}]]</box>", "<box>[[{0}, {1}]]</box>"),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe", "glm46v"),
        (
            "<|begin_of_box|>[[{0},{1},{2},{3}]]<|end_of_box|>",
            "<|begin_of_box|>[[{0},{1}]]<|end_of_box|>",
        ),
    ),
}


@dataclass(frozen=True)
class Place:
    """An image, and the space in which a model answers about it.

    Spaces: `file` and `seen`, pixels; a number: 0 to that number on both axes; `square`: 0 to 1 of the
    image padded to a square (LLaVA 1.5); `auto`: unknown.
    """

    file: tuple[int, int]  # (width, height) in pixels of the upright file
    seen: tuple[int, int] | None  # as the model saw it; None: it saw squares, or tiles
    space: str

    def to_file(self, *numbers: float) -> tuple[float, ...]:
        """A point x, y of an answer, or a box x1, y1, x2, y2, in pixels of the file; nothing is rounded or
        clipped."""
        axes = zip(numbers, self._axes() * 2)
        return tuple(number * pixels / units - margin for number, (pixels, units, margin) in axes)

    def from_file(self, *numbers: float) -> tuple[float, ...]:
        """The inverse of `to_file`."""
        axes = zip(numbers, self._axes() * 2)
        return tuple((number + margin) * units / pixels for number, (pixels, units, margin) in axes)

    def check(self) -> None:
        """Raises ValueError: answers in this space cannot be placed in this image."""
        if self.space == "auto":
            raise ValueError(
                "in which coordinates this model answers is not known: --coordinates SPACE"
            )
        if self.space == "seen" and self.seen is None:
            raise ValueError("--coordinates seen: this model sees no image as a whole")

    def _axes(self) -> list[tuple[float, float, float]]:
        """For x and y: how many pixels of the file the space spans, how many units that is, and how many
        pixels before the image it begins. Raises ValueError: see `check`."""
        self.check()
        if self.space == "square":
            side = max(self.file)
            return [(side, 1, (side - pixels) // 2) for pixels in self.file]
        sizes = {"file": self.file, "seen": self.seen}
        units = sizes.get(self.space) or [float(self.space)] * 2
        return [(pixels, count, 0) for pixels, count in zip(self.file, units)]


@dataclass(frozen=True)
class Regions:
    """The boxes and points that a row has for one of its images, in pixels of the file."""

    boxes: tuple[Box, ...]
    points: tuple[Point, ...]
    labels: tuple[str, ...]  # of the boxes or, without boxes, of the points; empty: none
    place: Place
    image: int = 0  # its number among those of the row


def read_regions(entry: Any, places: tuple[Place | None, ...]) -> Regions | None:
    """Read the column `regions` of a row with images at these places: {"boxes": [[x1, y1, x2, y2], ...],
    "points": [[x, y], ...], "labels": [...]}, in pixels of the file or in the "space" that it names, for
    the first image or the one with the number "image".

    Raises ValueError: another form, a space that is not known, or a region that is not in the image.
    """
    if entry is None:
        return None
    check_form(entry, FORM, "regions")
    known = {name: value for name, value in entry.items() if value is not None}
    entry = {"boxes": [], "points": [], "labels": [], "space": "file", "image": 0} | known
    if len(entry) > len(FORM):
        raise ValueError(
            f"regions has {', '.join(known)}; known are boxes, points, labels, space, image"
        )
    place = dict(enumerate(places)).get(entry["image"])
    if place is None:
        raise ValueError(f"regions: the row has no image {entry['image']} (counted from 0)")
    place.check()
    source = replace(place, space=entry["space"])
    boxes = tuple(row_region(box, 4, source) for box in entry["boxes"])
    points = tuple(row_region(point, 2, source) for point in entry["points"])
    labels = tuple(entry["labels"])
    if labels and len(labels) != len(boxes or points):
        raise ValueError(f"regions: {len(labels)} labels for {len(boxes or points)} regions")
    return Regions(boxes, points, labels, place, entry["image"])


def row_region(numbers: list[float], size: int, source: Place) -> Box | Point:
    """A box (``size`` 4) or point (2) in pixels of the file. Up to a pixel beyond the image's edge may
    be rounding, and is cut off. Raises ValueError: it is not in the image."""
    # JSON may hold integers too large for a float
    if len(numbers) != size or not all(abs(number) < 1e100 for number in numbers):
        raise ValueError(f"regions: {numbers} are not {size} finite numbers")
    region, file = source.to_file(*numbers), source.file
    if is_region(region, file):
        return clip(region, file)
    (left, top), (width, height) = region[:2], region[-2:]
    readings = {
        'with "space": "1"': (replace(source, space="1").to_file(*numbers), file),
        'with "space": "1000"': (replace(source, space="1000").to_file(*numbers), file),
        "as x, y, width and height": ((left, top, left + width, top + height), file),
        "before EXIF turns the image": (region, file[::-1]),
    }
    fitting = [words for words, reading in readings.items() if is_region(*reading)]
    kind = "box" if size == 4 else "point"
    advice = f"; it would be one {', or '.join(fitting)}" if fitting else ""
    raise ValueError(
        f"regions: {numbers} is no {kind} in an image of {file[0]} x {file[1]} pixels{advice}"
    )


def is_region(region: Box | Point, size: tuple[int, int]) -> bool:
    """Whether a point or box is in an image of that size. A box has at least a pixel, so that fractions are
    not taken for pixels."""
    if not all(-1 <= value <= limit + 1 for value, limit in zip(region, size * 2)):
        return False
    if len(region) == 2:
        return True
    left, top, right, bottom = clip(region, size)
    return left < right and top < bottom and max(right - left, bottom - top) >= 1


def clip(region: Box | Point, size: tuple[int, int]) -> Box | Point:
    """A point or box with its numbers clamped to an image of that size."""
    return tuple(min(max(value, 0), limit) for value, limit in zip(region, size * 2))


MARK = re.compile("<(box|point)>")
# Decimals to write: none, except where a unit is a large part of the image.
DECIMALS = {"1": 3, "square": 3, "100": 1}


def write_marks(response: str, regions: Regions | None, model_type: str) -> str:
    """A response to learn, with each <box> and <point> replaced by the row's next one, as the family writes
    it. A response with closing tags has no marks: it is InternVL's own literal, written by hand.

    Raises ValueError: the marks of a kind are not as many as its regions.
    """
    marks = MARK.findall(response)
    if not marks or re.search("</(box|point)>", response):
        return response
    if regions is None:
        raise ValueError(f"<{marks[0]}> in the response, but no regions in the row")
    literals = LITERALS.get(model_type, ("[{0}, {1}, {2}, {3}]", "[{0}, {1}]"))
    written = {}
    for kind, known, literal in zip(("box", "point"), (regions.boxes, regions.points), literals):
        count = marks.count(kind)
        if count not in (0, len(known)):
            raise ValueError(f"{count} <{kind}> in the response for {len(known)} of the regions")
        written[kind] = [literal.format(*numerals(one, regions.place)) for one in known]
    return MARK.sub(lambda mark: written[mark[1]].pop(0), response)


def numerals(region: Box | Point, place: Place) -> list[str]:
    """The numbers of a box or point in the space of a place, rounded half up."""
    unit = 10 ** DECIMALS.get(place.space, 0)
    numbers = place.from_file(*region)
    return [f"{math.floor(number * unit + 0.5) / unit:g}" for number in numbers]


# Numbers in brackets, except Gemini's box_2d, which has y first.
IN_BRACKETS = re.compile(
    rf"""(?<!["']box_2d["']:\[)(?<!["']box_2d["']: \[)(?<=[(<[]){NUMBERS}(?=[])>])"""
)


def restate(text: str, source: Place, target: Place) -> str:
    """A text with its boxes and points converted from the coordinates of one model to those of another;
    unchanged if these are the same, or not known."""
    if target == source or target.space == "auto":
        return text

    def restated(numbers: re.Match) -> str:
        region = source.to_file(*map(float, numbers[0].split(",")))
        return ", ".join(numerals(region, target))

    return IN_BRACKETS.sub(restated, text)
