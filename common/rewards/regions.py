"""Rewards for boxes and points, in pixels of the image's file whatever the model's coordinates are.

    read_regions_of   an answer -> its boxes and points in pixels of the file, and their labels
    pair              boxes one to one
    region_reward     box, boxes and point as reward functions
    region_record     the true and answered regions of a sample, for pictures and tables

Every box and point that an answer writes counts: copies are wrong, an unfinished thought or answer is
no answer, and so many boxes that one is bound to be right earn nothing.
"""

import math
import re

import numpy as np
from numpy.typing import ArrayLike

from common.data.coordinates import Box, Place, Point, Regions, clip
from common.data.rows import Prompt
from common.rewards.rules import (
    Columns,
    after_thought,
    extract_answer,
    plain_text,
    same_words,
    with_opened_thought,
)

# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------

# A region in pixels of the file, and its label, or "". A point may lie outside the image; a box has its
# corners sorted and is cut off at the image's edges.
Answered = tuple[Box | Point, str]

FENCE = re.compile(r"(?<!`)(`{3,5})\w*\n(.*?)\1", re.DOTALL)
NUMBER = r"\s*[-+]?(?:\d{1,25}\.?\d{0,25}|\.\d{1,25})(?:[eE][-+]?\d{1,2})?\s*"
POINT = f"{NUMBER},{NUMBER}"
NUMBERS = f"{POINT}(?:,{POINT})?"
TAG = r"<(?:ref|\|object_ref_start\|)>([^<]*)"  # InternVL, Qwen2-VL: <ref>cup</ref><box>...</box>
# {"bbox_2d": [1, 2, 3, 4], "label": "cup"}, or the numbers alone, perhaps behind a tag
ITEM = re.compile(rf"\{{[^{{}}]*\}}|(?:{TAG}<[^>]*>\s*<[^>]*>\[?)?[\[(<]{NUMBERS}[\])>]")
LABEL = re.compile(r"""["'](?:label|name|ref|category)["']\s*:\s*(["'])(.*?)\1""")
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


def read_regions_of(response: str, place: Place) -> list[Answered] | None:
    """The boxes and points of a response. None: it has none and does not say that there are none."""
    text = plain_text(answer_text(response))
    if re.fullmatch(NUMBERS, text):
        text = f"[{text}]"
    text = re.sub(rf"\(({POINT})\)\s*,\s*\(({POINT})\)", r"[\1,\2]", text)  # Qwen2-VL
    answered = []
    for item in ITEM.finditer(text):
        numbers, label = re.search(rf"[\[(<]({NUMBERS})[\])>]", item[0]), LABEL.search(item[0])
        if numbers:
            region = place.to_file(*map(float, numbers[1].split(",")))
            if len(region) == 4:
                x, y = sorted(region[::2]), sorted(region[1::2])
                region = clip((x[0], y[0], x[1], y[1]), place.file)
            answered.append((region, label[2] if label else item[1] or ""))
    return answered if answered or NOTHING.fullmatch(text) else None


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------

MOST = 100  # boxes that may be scored, or twice the true ones if more; those in a record
SLACK = 1e-9  # of a threshold, against rounding
NEAR = 0.05  # of the image's diagonal: how far from a true point a click may be


def iou(a: Box | Point, b: Box) -> float:
    """Intersection over union of two boxes; 0 for a point."""
    if len(a) < 4:
        return 0.0
    shared = area((*map(max, a[:2], b[:2]), *map(min, a[2:], b[2:])))
    return shared / (area(a) + area(b) - shared)


def area(box: Box) -> float:
    left, top, right, bottom = box
    return max(0.0, right - left) * max(0.0, bottom - top)


def pair(gains: ArrayLike) -> list[float]:
    """What the pairs of rows and columns of a table gain, one to one, the largest first."""
    table, gained = np.array(gains, dtype=float, ndmin=2), []
    while table.size and table.max() > 0:
        i, j = np.unravel_index(table.argmax(), table.shape)
        gained.append(float(table[i, j]))
        table[i, :] = table[:, j] = 0.0
    return gained


def score_boxes(response: str, truth: Regions, labels: tuple = ()) -> dict[str, float]:
    """`box_iou`: the sum of IoU over pairs / the larger number of boxes; `accuracy`: all are paired at an
    IoU of 0.5; `f1` of pairs at 0.5. With ``labels`` of the true boxes a pair has equal ones. Without true
    boxes, all are 1 for an answer that says there are none."""
    answered, count = read_regions_of(response, truth.place), len(truth.boxes)
    parsed = answered is not None
    if answered is None or len(answered) > max(MOST, 2 * count):
        answered = [((0.0, 0.0), "")]  # nothing that can be right
    larger = max(len(answered), count)
    gains = np.array([[iou(region, true) for true in truth.boxes] for region, _ in answered])
    if labels:
        gains *= [[same_words(name, label) for label in labels] for _, name in answered]
    gained = pair(gains)
    hits = sum(gain >= 0.5 - SLACK for gain in gained)
    mean_iou = sum(gained) / larger if larger else 1.0
    return {
        "reward": mean_iou,
        "box_iou": mean_iou,
        "accuracy": hits == larger,
        "f1": 2 * hits / (len(answered) + count) if larger else 1.0,
        "parsed": parsed,
    }


def score_point(response: str, truth: Regions) -> dict[str, float]:
    """`accuracy`: the one point of the answer, or the centre of its box, is in a true box, edges included,
    or within 5 % of the image's diagonal of a true point."""
    answered = read_regions_of(response, truth.place) or []
    right = False
    if len(answered) == 1:
        x, y = centre = np.reshape(answered[0][0], (-1, 2)).mean(axis=0)
        near = NEAR * math.hypot(*truth.place.file) + SLACK
        right = any(left <= x <= right and top <= y <= low for left, top, right, low in truth.boxes)
        right |= any(math.dist(centre, point) <= near for point in truth.points)
    return {"reward": right, "accuracy": right, "parsed": bool(answered)}


def score_named(response: str, truth: Regions) -> dict[str, float]:
    """Boxes with their labels, where the row has some."""
    return score_boxes(response, truth, truth.labels[: len(truth.boxes)])


# Each returns its "reward" among its scores.
RULES = {"box": score_boxes, "boxes": score_named, "point": score_point}


def region_reward(rule: str, prompts, responses, *_, regions: list[Regions]) -> Columns:
    """A rule for regions as a reward function."""
    answers = map(with_opened_thought, prompts, responses)
    scores = list(map(RULES[rule], answers, regions))
    return {name: [float(each[name]) for each in scores] for name in scores[0]}


def problem_of(rule: str, truth: Regions | None) -> str:
    """What a row lacks for a rule; "" if nothing."""
    if truth is None:
        return "no regions"
    if rule == "box" and len(truth.boxes) != 1:
        return f"{len(truth.boxes)} boxes in its regions, not one"
    return "" if rule == "boxes" or truth.boxes or truth.points else "no region to point at"


# --------------------------------------------------------------------------------------------------
# Records
# --------------------------------------------------------------------------------------------------


def region_record(row: Prompt, response: str) -> dict:
    """The entry for regions in the record of a response, if its row has some: the true ones, and those of
    the response, in pixels of the file."""
    truth = row.regions
    if truth is None:
        return {}
    answered = read_regions_of(with_opened_thought(row.text, response), truth.place) or []
    inside = [clip(region, truth.place.file) for region, _ in answered[:MOST]]
    return {
        "regions": {
            "image": truth.image,
            "true": truth.boxes + truth.points,
            "answered": inside,
        }
    }
