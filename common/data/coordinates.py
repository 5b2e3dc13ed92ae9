"""Boxes and points in images: what rows say of them, and the coordinates in which a model answers.

    Place          an image's sizes and the space of a model's answers; to and from pixels of its file
    read_regions   the column `regions` of a row, in pixels of the file
    write_marks    <box> and <point> in a response to learn, in the model's coordinates

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
# The form of the column `regions`.
FORM = {
    "boxes?": [[int | float]],
    "points?": [[int | float]],
    "labels?": [str],
    "space?": ("file", "seen", "1000", "1"),
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


@dataclass(frozen=True)
class Place:
    """An image, and the space in which a model answers about it: `file` and `seen`, pixels; a number:
    0 to that number on both axes; `auto`: unknown."""

    file: tuple[int, int]  # (width, height) in pixels of the upright file
    seen: tuple[int, int] | None  # as the model saw it; None: it saw squares, or tiles
    space: str

    def to_file(self, *numbers: float) -> tuple[float, ...]:
        """A point x, y of an answer, or a box x1, y1, x2, y2, in pixels of the file; nothing is rounded or
        clipped."""
        axes = zip(numbers, self.file * 2, self.units() * 2)
        return tuple(number * pixels / units for number, pixels, units in axes)

    def from_file(self, *numbers: float) -> tuple[float, ...]:
        """The inverse of `to_file`."""
        axes = zip(numbers, self.file * 2, self.units() * 2)
        return tuple(number * units / pixels for number, pixels, units in axes)

    def units(self) -> tuple[float, float]:
        """How many units of the space the image is wide and high. Raises ValueError: nobody knows."""
        sizes = {"file": self.file, "seen": self.seen, "auto": None}
        if sizes.get(self.space, self.file) is None:
            raise ValueError(
                "in which coordinates this model answers is not known: --coordinates SPACE"
            )
        return sizes.get(self.space) or (float(self.space), float(self.space))


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
    place.units()
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
    region = source.to_file(*numbers)
    inside = clip(region, source.file)
    left, top, right, bottom = (inside * 2)[:4]
    # a box of less than a pixel: fractions, taken for pixels
    is_box = left < right and top < bottom and max(right - left, bottom - top) >= 1
    if max(map(abs, map(float.__sub__, region, inside))) > 1 or size == 4 and not is_box:
        raise ValueError(
            f"regions: {numbers} is no {'box' if size == 4 else 'point'} in an upright image of "
            f'{source.file[0]} x {source.file[1]} pixels: x1, y1, x2, y2, or x, y; other units need "space"'
        )
    return inside


def clip(region: Box | Point, size: tuple[int, int]) -> Box | Point:
    """A point or box with its numbers clamped to an image of that size."""
    return tuple(min(max(value, 0.0), float(limit)) for value, limit in zip(region, size * 2))


def write_marks(response: str, regions: Regions | None) -> str:
    """A response to learn, with each <box> and <point> replaced by the row's next one, in the model's
    coordinates. A response with closing tags has no marks: it is InternVL's own literal.

    Raises ValueError: the marks of a kind are not as many as its regions.
    """
    marks = re.findall("<(box|point)>", response)
    if not marks or re.search("</(box|point)>", response):
        return response
    known = {"box": regions.boxes, "point": regions.points} if regions else {}
    for kind in set(marks):
        if marks.count(kind) != len(known.get(kind, ())):
            raise ValueError(
                f"{marks.count(kind)} <{kind}> in the response for {len(known.get(kind, ()))} of the regions"
            )
    left = {kind: iter(of_kind) for kind, of_kind in known.items()}
    return re.sub(
        "<(box|point)>", lambda mark: numerals(next(left[mark[1]]), regions.place), response
    )


def numerals(region: Box | Point, place: Place) -> str:
    """A box or point in the space of a place, rounded half up."""
    unit = 1000 if place.space == "1" else 1
    numbers = [math.floor(x * unit + 0.5) / unit for x in place.from_file(*region)]
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"
