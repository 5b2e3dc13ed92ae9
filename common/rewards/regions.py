"""Rewards for boxes and points, in pixels of the image's file whatever the model's coordinates are.

    read_predictions   an answer -> its boxes and points in pixels of the file, and their labels
    read_boxes         ... as boxes inside the image
    match              the best one-to-one pairing
    region_reward      box, boxes and point as reward functions
    region_record      the true and predicted regions of a sample, for pictures and tables

Everything that is written counts: copies and malformed boxes are wrong predictions, an unfinished
thought or answer is no answer, and so many boxes that one is bound to be right earn nothing.
"""

import ast
import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import ArrayLike

from common.data.coordinates import NUMBERS, Box, Place, Point, Regions, clip, is_region
from common.data.rows import Prompt
from common.rewards.rules import Columns, after_thought, extract_answer, with_opened_thought

# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------

# A region in pixels of the file, and its label, or "". A point may lie outside the image; a box has its
# corners sorted and is cut off at the image's edges. None: it is neither, or nothing of it is left.
Prediction = tuple[Box | Point | None, str]

# These patterns take time in proportion to the text: what one part may match ends where the next part
# begins.
FENCE = re.compile(r"(?<!`)(`{3,5})\w*\n(.*?)\1", re.DOTALL)
LIST = r"([-+.\deE\s]+(?:,[-+.\deE\s]+)+)"  # 1.2.3 too, which is no number
POINT = r"\(([-+.\deE\s]+),([-+.\deE\s]+)\)"
# What families write, and the list that it stands for; replaced in this order.
SPELLINGS = {
    rf"{POINT}\s*,\s*{POINT}": r"[\1,\2,\3,\4]",  # Qwen2-VL
    rf"[(<]{LIST}[)>]": r"[\1]",
    r'\bx\d*="([^"]*)" y\d*="([^"]*)"': r"[\1,\2]",  # Molmo: <point x="1" y="2"
    r'<points coords="\d+ \d+ ([^" ]*) ([^" ]*)"': r"[\1,\2]",  # Molmo 2
    r"<loc(\d+)>" * 4: r"[\2,\1,\4,\3]",  # PaliGemma, y first
    rf"\A{LIST}\Z": r"[\1]",  # bare numbers that are the whole answer
    r"(?i)\A(?:none|no objects?)\.?\Z": "[]",
}
# <ref>cup</ref><box>...</box>: InternVL, Qwen2-VL
TAGGED = re.compile(
    r"(?:(?:<ref>|<\|object_ref_start\|>)([^<]*)(?:</ref>|<\|object_ref_end\|>)\s*)?"
    r"(?:<box>|<\|box_start\|>)([^<]*)(?:</box>|<\|box_end\|>)"
)
# {"bbox_2d": [1, 2, 3, 4], "label": "cup"}, [1, 2, 3, 4] or [], but not [see below]
OBJECT_OR_NUMBERS = r"\{(?:[^{}]|\{[^][{}]*\})*\}|\[[^][{}\d]*\d[^][{}]*\]"
ITEM = rf"{OBJECT_OR_NUMBERS}|\[\s*\]"
OTHER = r"[^][{}]|\[\s*[^][{}\d\s][^][{}\d]*\]"
ITEMS = rf"\[\s*\]|\[(?:{OTHER})*(?:{ITEM})(?:{OTHER}|{ITEM})*\]"  # a list of them
ITEMS_OR_ONE = re.compile(f"({ITEMS})|{OBJECT_OR_NUMBERS}")
# An element of a list; what is no item, such as null, counts as a malformed one.
ELEMENT = re.compile(rf"{ITEM}|\[[^][]*\]|\w[^][{{}},]*")
REGION = re.compile(
    r"""(?:\A|["'](bbox_2d|bbox|box|point_2d|point|Position|box_2d)["']\s*:\s*)"""
    rf"\[({NUMBERS})\]"
)
LABEL = re.compile(
    r"""["'](?:label|name|ref|category)["']\s*:\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|-?\d+)"""
)


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
    return text


def read_predictions(response: str, place: Place) -> list[Prediction] | None:
    """The boxes and points of a response: those of its last list, or all if they are not in lists.
    None: it has none and does not say that there are none, or a bracket is open as it was cut off."""
    text = answer_text(response).strip()
    # hides brackets in labels
    text = LABEL.sub(lambda label: quote(label[0], errors="replace"), text)
    if text.count("[") > text.count("]") or text.count("{") > text.count("}"):
        return None
    for spelling, meaning in SPELLINGS.items():
        text = re.sub(spelling, meaning, text)
    tagged = TAGGED.findall(text)
    if tagged:
        return [
            (predicted_region(item, place), label.strip())
            for label, content in tagged
            for item in re.findall(ITEM, content) or [content]
        ]
    pieces = [*ITEMS_OR_ONE.finditer(text)]
    if not pieces:
        return None
    lists = [piece[1] for piece in pieces if piece[1]]
    items = ELEMENT.findall(lists[-1][1:-1]) if lists else [piece[0] for piece in pieces]
    return [(predicted_region(item, place), read_label(item)) for item in items]


def predicted_region(item: str, place: Place) -> Box | Point | None:
    """The point of an object or a list of numbers, or the part of its box that is in the image."""
    keyed = REGION.search(item)
    if keyed is None:
        return None
    numbers = [float(number) for number in keyed[2].split(",")]
    if keyed[1] == "box_2d":  # Gemini's y1, x1, y2, x2
        numbers.reverse()
    region = place.to_file(*numbers)
    if len(region) == 2:
        return region
    region = clip(region, place.file)
    left, right = sorted(region[::2])
    top, bottom = sorted(region[1::2])
    return (left, top, right, bottom) if left < right and top < bottom else None


def read_label(item: str) -> str:
    keyed = LABEL.search(unquote(item))
    if keyed is None:
        return ""
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return str(read(keyed[1]))
    return keyed[1][1:-1]  # has escapes of neither language


def read_boxes(response: str, place: Place) -> list[tuple[Box | None, str]] | None:
    """The boxes of a response in pixels of the file, and their labels. None in place of a box for what is
    not one, and in place of the list where `read_predictions` returns None."""
    predictions = read_predictions(response, place)
    if predictions is None:
        return None
    return [(region if len(region or ()) == 4 else None, label) for region, label in predictions]


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------

BOX_SCORES = ("reward", "box_iou", "accuracy", "f1", "f1_class", "parsed")
MOST = 100  # boxes that may be scored, or twice the true ones if more; predictions in a record
SLACK = 1e-9  # of a threshold, against rounding
HALF = 0.5 - SLACK  # the IoU of a hit
NEAR = 0.05  # of the image's diagonal: how far from a true point a click may be


def area(box: Box) -> float:
    left, top, right, bottom = box
    return max(0.0, right - left) * max(0.0, bottom - top)


def iou(a: Box | None, b: Box | None) -> float:
    """Intersection over union of two boxes; 0 for what is no box."""
    if not (a and b):
        return 0.0
    shared = area((*map(max, a[:2], b[:2]), *map(min, a[2:], b[2:])))
    return shared / (area(a) + area(b) - shared)


def match(gains: ArrayLike) -> list[tuple[int, int]]:
    """The (row, column) pairs of a table, each row and column at most once, with the largest sum of
    ``gains`` (0 or more): by shortest augmenting paths (Jonker and Volgenant 1987), in O(n^3)."""
    table = np.array(gains, dtype=float, ndmin=2)
    rows, columns = table.shape
    size = max(rows, columns)
    cost = np.zeros((rows, size))  # columns that gain nothing are added, so that each row gets one
    cost[:, :columns] = -table
    price = np.zeros(size)
    row_of = np.full(size, -1)  # of a column; -1: it is free
    for first in range(rows):
        # The shortest path from a new row to a free column; the rows on it move to its next column.
        distance = np.full(size, np.inf)
        before = np.full(size, -1)
        reached = np.zeros(size, dtype=bool)
        row, column, so_far = first, -1, 0.0
        while row >= 0:
            through = so_far + cost[row] - price
            nearer = ~reached & (through < distance)
            distance[nearer] = through[nearer]
            before[nearer] = column
            column = np.where(reached, np.inf, distance).argmin()
            reached[column] = True
            row = row_of[column]
            so_far = distance[column] + price[column] - cost[row, column]
        price[reached] += distance[reached] - distance[column]
        while before[column] >= 0:
            row_of[column] = row_of[before[column]]
            column = before[column]
        row_of[column] = first
    return [(int(row), j) for j, row in enumerate(row_of[:columns]) if row >= 0]


def best_sum(gains: np.ndarray) -> float:
    """What the best pairing gains."""
    return sum(gains[i][j] for i, j in match(gains))


def score_boxes(response: str, truth: Regions) -> dict[str, float]:
    """`box_iou`: the sum of IoU over the best pairing / the larger number of boxes; `accuracy`: all are
    paired at an IoU of 0.5; `f1` of pairs at 0.5; `f1_class`: ... with equal labels, where the row has
    some. Without true boxes, all are 1 for an answer that says there are none."""
    boxes = read_boxes(response, truth.place)
    count = len(truth.boxes)
    parsed = boxes is not None
    if boxes is None or len(boxes) > max(MOST, 2 * count):
        boxes = [(None, "")]  # nothing that can be right
    larger = max(len(boxes), count)
    if not larger:
        return dict.fromkeys(BOX_SCORES, 1.0)
    ious = np.array([[iou(box, true) for true in truth.boxes] for box, _ in boxes])
    mean_iou = best_sum(ious) / larger
    hits = ious >= HALF
    right = named = best_sum(hits)
    if truth.labels:
        names = truth.labels[:count]  # without boxes they name points
        alike = [[plain(label) == plain(name) for name in names] for _, label in boxes]
        named = best_sum(hits * alike)
    mean = (len(boxes) + count) / 2
    return {
        "reward": mean_iou,
        "box_iou": mean_iou,
        "accuracy": right == larger,
        "f1": right / mean,
        "f1_class": named / mean,
        "parsed": parsed,
    }


def plain(label: str) -> str:
    """A label in lower case, with single spaces."""
    return " ".join(label.lower().split())


def score_point(response: str, truth: Regions) -> dict[str, float]:
    """`accuracy`: the one point of the answer is in a true box, edges included, or near a true point."""
    predictions = read_predictions(response, truth.place)
    regions = [region for region, _ in predictions or ()]
    right = len(regions) == 1 and is_hit(regions[0], truth)
    return {"reward": right, "accuracy": right, "parsed": predictions is not None}


def is_hit(region: Box | Point | None, truth: Regions) -> bool:
    """Whether a point, or the centre of a box, is in a true box, or within 5 % of the image's diagonal of a
    true point."""
    if region is None:
        return False
    x, y = centre = np.reshape(region, (-1, 2)).mean(axis=0)
    for left, top, right, bottom in truth.boxes:
        if left <= x <= right and top <= y <= bottom:
            return True
    near = NEAR * math.hypot(*truth.place.file) + SLACK
    return any(math.dist(centre, point) <= near for point in truth.points)


# Each returns its "reward" among its scores.
RULES = {"box": score_boxes, "boxes": score_boxes, "point": score_point}


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


def earned_by_lazy(rule: str, rows: Sequence[Regions]) -> tuple[str, float]:
    """An answer that can be given without seeing the image, and what it earns on average."""
    is_point = rule == "point"
    answer = "[0.5, 0.5]" if is_point else "[0, 0, 1, 1]"
    earned = []
    for truth in rows:
        fractions = replace(truth.place, space="1")
        earned.append(RULES[rule](answer, replace(truth, place=fractions))["reward"])
    return "the centre" if is_point else "the whole image", sum(earned) / len(earned)


# --------------------------------------------------------------------------------------------------
# Records
# --------------------------------------------------------------------------------------------------


def region_record(row: Prompt, response: str) -> dict:
    """The entry for regions in the record of a response, if its row has some: the true ones, and those of
    the response that are in the image, in pixels of the file. A box's score is its IoU with its partner
    in the best pairing, a predicted point's is 1 if it hits."""
    truth = row.regions
    if truth is None:
        return {}
    regions = truth.boxes + truth.points
    labels = truth.labels + ("",) * len(regions)
    true = list(map(one_region, regions, labels))
    predictions = read_predictions(with_opened_thought(row.text, response), truth.place) or []
    predicted = []
    for region, label in predictions[:MOST]:
        if region and is_region(region, truth.place.file):
            hit = len(region) == 2 and is_hit(region, truth)
            predicted.append(one_region(region, label, hit))
    boxes = [one for one in predicted if len(one["region"]) == 4]
    ious = [[iou(one["region"], true_box) for true_box in truth.boxes] for one in boxes]
    for i, j in match(ious):
        boxes[i]["score"] = true[j]["score"] = ious[i][j]
    return {"regions": {"image": truth.image, "true": true, "predicted": predicted}}


def one_region(region: Box | Point, label: str, score: float = 0.0) -> dict:
    return {"region": list(region), "label": label, "score": float(score)}
