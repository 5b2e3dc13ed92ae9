"""Rewards for boxes and points, in pixels of the image's file whatever the model's coordinates are.

    find_regions     an answer -> its boxes and points in pixels of the file, and their labels
    pair             boxes one to one, the largest IoU first
    region_reward    box, boxes and point as reward functions
    region_record    the true and the answered regions of a sample, for pictures and tables

Every box and point that an answer writes counts: copies are wrong, an unfinished thought or answer is
no answer, and so many boxes that one is bound to be right earn nothing.
"""

import math
import re
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from common.data.coordinates import Box, Place, Point, Regions, clip
from common.data.rows import Prompt
from common.ground.files import UserError
from common.rewards.rules import (
    NOT,
    REGION,
    Columns,
    after_thought,
    extract_answer,
    plain_text,
    read_places,
    same_words,
    with_brackets,
    with_opened_thought,
)

# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------

# A region in pixels of the file, and its label, or "". A point may lie outside the image; a box has its
# corners sorted and is cut off at the image's edges.
Found = tuple[Box | Point, str]

FENCE = re.compile(r"(?<!`)(`{3,5})\w*\n(.*?)\1", re.DOTALL)
NOTHING = re.compile(r"(?i)\[\s*\]|(?:none|no objects?)\.?")


def answer_text(response: str) -> str:
    r"""The part of a response that answers. After the last thought, it is the last
    <answer>...</answer> or GLM's box, or else everything; in that the last `\boxed{...}`, and in that
    the last fenced block, if there is one. "" if a thought or the answer is not finished."""
    text = (
        after_thought(response)
        .replace("<|begin_of_box|>", "<answer>")
        .replace("<|end_of_box|>", "</answer>")
    )
    if text.rfind("<answer>") > text.rfind("</answer>"):
        return ""
    for rule in ("answer", "boxed"):
        answer = extract_answer(text, rule)
        text = text if answer is None else answer
    while fenced := FENCE.findall(text):  # a block may be inside one with more backticks
        text = fenced[-1][1]
    return text.strip()


def find_regions(response: str, place: Place) -> list[Found] | None:
    """The boxes and points of a response. None: it has none and does not say that there are none, or it
    takes one back."""
    text = with_brackets(plain_text(answer_text(response)))
    if re.search(f"{NOT}{REGION}", text):
        return None
    regions = [(region_in_file(numbers, place), name) for numbers, name in read_places(text)]
    return regions if regions or NOTHING.fullmatch(text) else None


def region_in_file(numbers: list[float], place: Place) -> Box | Point:
    """A point, or the part of a box that is in the image, in pixels of the file."""
    region = place.to_file(*numbers)
    if len(region) == 2:
        return region
    (left, right), (top, bottom) = sorted(region[::2]), sorted(region[1::2])
    return clip((left, top, right, bottom), place.file)


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------

MOST_BOXES = 100  # boxes that may be scored, or twice the true ones if more; those in a record
SLACK = 1e-9  # of a threshold, against rounding
HALF = 0.5 - SLACK  # the IoU of a hit
NEAR = 0.05  # of the image's diagonal: how far from a true point a click may be


def area(box: Box) -> float:
    left, top, right, bottom = box
    return max(0.0, right - left) * max(0.0, bottom - top)


def iou(a: Box | Point, b: Box) -> float:
    """Intersection over union of two boxes; 0 for a point."""
    if len(a) == 2:
        return 0.0
    shared = area((*map(max, a[:2], b[:2]), *map(min, a[2:], b[2:])))
    return shared / (area(a) + area(b) - shared)


def pair(gains: ArrayLike) -> list[float]:
    """What the pairs of rows and columns of a table gain, one to one, the largest first, as COCO's
    evaluation pairs boxes."""
    table, gained = np.array(gains, dtype=float, ndmin=2), []
    while table.size and table.max() > 0:
        row, column = np.unravel_index(table.argmax(), table.shape)
        gained.append(float(table[row, column]))
        table[row, :] = 0.0
        table[:, column] = 0.0
    return gained


def score_boxes(response: str, truth: Regions) -> dict[str, float]:
    """`box_iou`: the sum of IoU over pairs / the larger number of boxes; `accuracy`: all are paired at an
    IoU of 0.5; `f1` of pairs at 0.5. Where the row has labels, only boxes of one label are paired. Without
    true boxes, all are 1 for an answer that says there are none."""
    answered, count = find_regions(response, truth.place), len(truth.boxes)
    parsed = answered is not None
    if answered is None or len(answered) > max(MOST_BOXES, 2 * count):
        answered = [((0.0, 0.0), "")]  # nothing that can be right
    larger = max(len(answered), count)
    if not larger:
        return dict.fromkeys(("reward", "box_iou", "accuracy", "f1", "parsed"), 1.0)
    gains = np.array([[iou(region, box) for box in truth.boxes] for region, _ in answered])
    if truth.boxes and truth.labels:  # without boxes they name points
        gains *= [[same_words(name, label) for label in truth.labels] for _, name in answered]
    gained = pair(gains)
    hits = sum(gain >= HALF for gain in gained)
    mean_iou = sum(gained) / larger
    return {
        "reward": mean_iou,
        "box_iou": mean_iou,
        "accuracy": hits == larger,
        "f1": 2 * hits / (len(answered) + count),
        "parsed": parsed,
    }


def score_box(response: str, truth: Regions) -> dict[str, float]:
    """`score_boxes`, where the one box needs no label."""
    return score_boxes(response, replace(truth, labels=()))


def score_point(response: str, truth: Regions) -> dict[str, float]:
    """`accuracy`: the one point of the answer, or the centre of its one box, is in a true box, edges
    included, or within 5 % of the image's diagonal of a true point."""
    answered = find_regions(response, truth.place)
    right = answered is not None and len(answered) == 1 and is_hit(answered[0][0], truth)
    return {"reward": right, "accuracy": right, "parsed": answered is not None}


def is_hit(region: Box | Point, truth: Regions) -> bool:
    """Whether a point, or the centre of a box, is where `score_point` wants it."""
    if len(region) == 4 and not area(region):
        return False  # nothing of it is in the image
    x, y = centre = np.reshape(region, (-1, 2)).mean(axis=0)
    for left, top, right, bottom in truth.boxes:
        if left <= x <= right and top <= y <= bottom:
            return True
    near = NEAR * math.hypot(*truth.place.file) + SLACK
    return any(math.dist(centre, point) <= near for point in truth.points)


# Each returns its "reward" among its scores.
REGION_RULES = {"box": score_box, "boxes": score_boxes, "point": score_point}


def region_reward(rule: str, prompts, responses, *_, regions: list[Regions]) -> Columns:
    """A rule for regions as a reward function."""
    answers = map(with_opened_thought, prompts, responses)
    scores = list(map(REGION_RULES[rule], answers, regions))
    return {name: [float(each[name]) for each in scores] for name in scores[0]}


def check_regions(rule: str, reference: str | None, regions: Regions | None) -> None:
    """Raises UserError: a row has no regions, or not those that a rule compares with."""
    if regions is None:
        raise UserError("no regions")
    if rule == "box" and len(regions.boxes) != 1:
        raise UserError(f"{len(regions.boxes)} boxes in its regions, not one")
    if rule == "point" and not (regions.boxes or regions.points):
        raise UserError("no region to point at")


# --------------------------------------------------------------------------------------------------
# Records
# --------------------------------------------------------------------------------------------------


def region_record(row: Prompt, response: str) -> dict:
    """The entry for regions in the record of a response, if its row has some: the true ones, and those of
    the response as far as they are in the image, in pixels of the file."""
    truth = row.regions
    if truth is None:
        return {}
    regions = find_regions(with_opened_thought(row.text, response), truth.place) or []
    answered = [clip(region, truth.place.file) for region, _ in regions[:MOST_BOXES]]
    true = truth.boxes + truth.points
    return {"regions": {"image": truth.image, "true": true, "answered": answered}}
