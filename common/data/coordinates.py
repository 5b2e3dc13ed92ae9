"""Boxes and points in images: those of rows, and the coordinates in which models answer.

    Place          an image's sizes and the space of a model's answers; to and from pixels of its file
    read_regions   the column `regions` of a row, in pixels of the file
    write_marks    replaces <box> and <point> in responses to imitate, in the model's coordinates

Families were trained to answer in different spaces: pixels of the image as they saw it, thousandths,
fractions (`Family.spaces`). The space is never guessed from the size of the numbers. Pixels of the file
are those of the image turned upright by its EXIF.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from common.ground.files import UserError, check_form

Box = tuple[float, ...]  # left, top, right, bottom
Point = tuple[float, ...]  # x, y
# The form of the column `regions`.
REGIONS_FORM = {
    "boxes?": [[int | float]],
    "points?": [[int | float]],
    "labels?": [str],
    "space?": ("file", "seen", "1000", "1"),
    "image?": int,
}


@dataclass(frozen=True)
class Place:
    """An image, and the space in which a model answers about it: `file` and `seen` are pixels, a number
    means 0 to that number on both axes, `auto` that the space is not known."""

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
        """The width and height of the image in units of the space. Raises UserError: answers in this
        space cannot be placed in this image."""
        if self.space == "auto":
            raise UserError(
                "the coordinates of this model's answers are not known: name them by --coordinates"
            )
        if self.space == "seen":
            if self.seen is None:
                raise UserError("--coordinates seen: this model sees no image as a whole")
            return self.seen
        return self.file if self.space == "file" else (float(self.space), float(self.space))


@dataclass(frozen=True)
class Regions:
    """The boxes and points that a row has for one of its images, in pixels of the file."""

    boxes: tuple[Box, ...]
    points: tuple[Point, ...]
    labels: tuple[str, ...]  # of the boxes or, without boxes, of the points; empty: none
    place: Place
    image: int = 0  # number of the image among those of the row


def read_regions(entry: Any, places: tuple[Place | None, ...]) -> Regions | None:
    """Read the column `regions` of a row with images at these places: {"boxes": [[x1, y1, x2, y2], ...],
    "points": [[x, y], ...], "labels": [...]}, in pixels of the file or in the "space" that it names, for
    the first image or the one with the number "image".

    Raises UserError: another form, a space that is not known, or a region that is not in the image.
    """
    if entry is None:
        return None
    check_form(entry, REGIONS_FORM, "regions")
    known = {name: value for name, value in entry.items() if value is not None}
    entry = {"boxes": [], "points": [], "labels": [], "space": "file", "image": 0} | known
    if len(entry) > len(REGIONS_FORM):
        raise UserError(
            f"regions has {', '.join(known)}; known are boxes, points, labels, space, image"
        )
    place = dict(enumerate(places)).get(entry["image"])
    if place is None:
        raise UserError(f"regions: the row has no image {entry['image']} (counted from 0)")
    place.units()  # raises where the answers to this row could not be read
    source = replace(place, space=entry["space"])
    boxes = tuple(row_region(box, 4, source) for box in entry["boxes"])
    points = tuple(row_region(point, 2, source) for point in entry["points"])
    labels = tuple(entry["labels"])
    if labels and len(labels) != len(boxes or points):
        raise UserError(f"regions: {len(labels)} labels for {len(boxes or points)} regions")
    return Regions(boxes, points, labels, place, entry["image"])


def row_region(numbers: list[float], size: int, source: Place) -> Box | Point:
    """A box (``size`` 4) or point (2) in pixels of the file. Up to a pixel beyond the image's edge may
    be rounding, and is cut off. Raises UserError: it is not in the image."""
    # JSON may hold integers too large for a float
    if len(numbers) != size or not all(abs(number) < 1e100 for number in numbers):
        raise UserError(f"regions: {numbers} are not {size} finite numbers")
    region = source.to_file(*numbers)
    inside = clip(region, source.file)
    is_inside = max(abs(x - y) for x, y in zip(region, inside)) <= 1
    if size == 4:
        sides = inside[2] - inside[0], inside[3] - inside[1]
        # a box smaller than a pixel: fractions, given as pixels by mistake
        is_inside = is_inside and min(sides) > 0 and max(sides) >= 1
    if not is_inside:
        what = "box (x1, y1, x2, y2)" if size == 4 else "point (x, y)"
        width, height = source.file
        raise UserError(
            f"regions: {numbers} is no {what} in this image of {width} x {height} pixels (upright); "
            'if they are not pixels of the file, name their units in "space"'
        )
    return inside


def clip(region: Box | Point, size: tuple[int, int]) -> Box | Point:
    """A point or box with its numbers clamped to an image of that size."""
    return tuple(min(max(value, 0.0), float(limit)) for value, limit in zip(region, size * 2))


# <box> and <point>, but not InternVL's and Qwen-VL's own literals, in which numbers or a mark follow:
# <box>[[1, 2, 3, 4]]</box>   <box>[<box>]</box>   <box><box></box>
MARK = re.compile(r"<(box|point)>(?!\[|<\1></\1>)")


def write_marks(responses: list[str], regions: Regions | None) -> list[str]:
    """The responses of a row to imitate, with each <box> and <point> replaced by the row's next one, in
    the model's coordinates. Raises UserError: the numbers of marks and regions differ."""
    marks = [kind for response in responses for kind in MARK.findall(response)]
    if not marks:
        return responses
    if regions is None:
        raise UserError(f"<{marks[0]}> in the response, but no regions in the row")
    written = {}
    for kind, known in (("box", regions.boxes), ("point", regions.points)):
        count = marks.count(kind)
        if count not in (0, len(known)):
            raise UserError(f"{count} <{kind}> in the response for {len(known)} of the regions")
        written[kind] = [numerals(one, regions.place) for one in known]
    return [MARK.sub(lambda mark: written[mark[1]].pop(0), response) for response in responses]


def numerals(region: Box | Point, place: Place) -> str:
    """The text of a box or point in the space of a place, rounded half up: to whole units, fractions
    to thousandths."""
    unit = 1000 if place.space == "1" else 1
    numbers = [math.floor(x * unit + 0.5) / unit for x in place.from_file(*region)]
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"
