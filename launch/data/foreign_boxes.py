"""Boxes and points of other systems as our column regions."""

import json
import re
from collections.abc import Iterator
from typing import Any

from common.ground.files import UserError
from common.rewards.rules import REGION, read_places
from launch.data.accounts import Row
from launch.data.foreign_messages import Options, Reading, as_list, read_json_text

BOX_COLUMNS = ("objects", "boxes", "bbox", "gt_bbox", "solution")
# Keys of a region and of its name. With --boxes, a region needs no key.
KEYS = ("bbox_2d", "bbox", "box", "Position", "point_2d", "point", "corners", "sizes")
NAMES = ("label", "ref", "caption", "name", "category")
# Spaces by ms-swift's bbox_type, old and new, and by a key.
SPACES = {"norm_1": "1", "norm1": "1", "norm_1000": "1000", "Position": "1000"}
READ_KEYS = ("", *KEYS, *NAMES, "bbox_type", "image", "image_id", "Confidence")  # Visual-RFT's is 1


def take_regions(reading: Reading) -> tuple[dict | None, list[str]]:
    """The regions of a row's column of boxes, and the names of its objects, of which there may be more. Other
    keys of the objects are entered. Raises UserError: the column gives no region."""
    rest, how = reading.rest, reading.how
    column = next((name for name in BOX_COLUMNS if name in rest), "")
    value = rest.get(column)
    regions = read_regions(value, how)
    if regions:
        del rest[column]
        parts = [name.partition(".") for name in how.drop]
        dropped = {key for parent, _, key in parts if parent == column}
        value = without_dropped(read_json_text(value) or value, dropped)
        enter_unread_keys(reading, column, value)
        return regions, names_in(value)
    is_named = column in rest and column not in ("solution", *how.keep)
    if is_named and (value or value == 0):
        raise UserError(
            f"{column} gives no region: {value!r:.80}; --boxes corners or --boxes sizes says what lists of "
            f"numbers are, --keep {column} keeps it unread"
        )
    return None, []


def read_regions(value: Any, how: Options) -> dict | None:
    """Our column of this name from regions of another system or their text; None from anything else."""
    boxes, space = how.boxes, how.space
    value = read_json_text(value) or value
    if isinstance(value, str):  # without a place it is no list of none
        places = read_places(value) if boxes else []
        value = [{"label": name, boxes: numbers} for numbers, name in places] or value
    parts = list(parts_of(value))
    listed = [part for key, part in parts if isinstance(part, list) and (key or boxes) in KEYS]
    if not listed:
        return None
    places = list(filter(None, listed))  # an empty list: no object
    if any(key in ("image", "image_id") and any(as_list(part)) for key, part in parts):
        raise UserError("objects of another image than the first (image, image_id)")
    for key, part in parts:
        space = SPACES.get(key) or SPACES.get(str(part)) or space
    if boxes == "sizes":
        # a point has no size
        places = [[*place[:2], *map(sum, zip(place, place[2:]))] for place in places]
    kind = "points" if places and len(places[0]) == 2 else "boxes"
    regions = {kind: places, "space": space}
    names = names_in(value)
    return regions | {"labels": names} if len(names) == len(places) > 0 else regions


def enter_unread_keys(reading: Reading, column: str, value: Any) -> None:
    """Enter the keys of objects that are not read; the column then stays in the row."""
    unread = {}
    for key, part in parts_of(value):
        if key not in READ_KEYS:
            unread.setdefault(key, []).append(part)
    for key, parts in unread.items():
        is_one = all(part == parts[0] for part in parts)
        reading.account.enter(f"{column}.{key}", parts[0] if is_one else parts, Row(reading.split))
    if unread:
        reading.known[column] = value


def names_in(value: Any) -> list[str]:
    """The names of the objects of a value, in their order."""
    return [part for key, part in parts_of(value) if part and key in NAMES]


def parts_of(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The texts and lists of numbers in a value, each with its innermost key. An object of two numbers, x and
    y, is a point."""
    if isinstance(value, dict) and value.keys() == {"x", "y"}:
        yield "point", [value["x"], value["y"]]
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from parts_of(part, key)
    elif isinstance(value, list) and not all(isinstance(item, int | float) for item in value):
        for part in value:
            yield from parts_of(part, key)
    else:
        yield key, value


def without_dropped(value: Any, dropped: set[str]) -> Any:
    """A value whose objects, at any depth, lack the ``dropped`` keys."""
    if isinstance(value, dict):
        keys = [key for key in value if key not in dropped]
        return {key: without_dropped(value[key], dropped) for key in keys}
    if isinstance(value, list):
        return [without_dropped(part, dropped) for part in value]
    return value


def fill_marks(converted: dict, names: list[str]) -> None:
    """Replace numbers in the response, and ms-swift's <bbox>, by our marks, as models differ in their
    coordinates; and its <ref-object> by the names of objects, in their order over prompt and response."""
    texts = {name: converted[name] for name in ("prompt", "response") if name in converted}
    if "response" in texts:
        mark = "<point>" if "points" in converted["regions"] else "<box>"
        # a call stays as it is: click(x=10, y=20)
        texts["response"] = re.sub(rf"<bbox>|(?<!\w){REGION}", mark, texts["response"])
    is_response = "response" in texts and converted.get("answer") == converted["response"]
    has_marks = is_response and re.search("<bbox>|<ref-object>", converted["response"])
    escaped = (json.dumps(name)[1:-1] for name in names)
    written = re.sub("<ref-object>", lambda mark: next(escaped, mark[0]), json.dumps(texts))
    converted |= json.loads(written)
    if has_marks:
        converted["answer"] = converted["response"]


def check_marks(converted: dict, names: list[str]) -> None:
    """Raises UserError: marks of ms-swift that stand for no object, or that no trainer fills."""
    texts = f"{converted.get('prompt')}{converted.get('response', '')}"
    if "<bbox>" in texts:
        raise UserError(
            "<bbox> in a prompt: models differ in how they write a box; write the object's name in its place"
        )
    left = texts.count("<ref-object>")
    if left:
        raise UserError(f"{left + len(names)} <ref-object> for {len(names)} names in objects")
