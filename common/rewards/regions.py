"""Rewards for boxes and points, in pixels of the image's file whatever the model's coordinates are.

    read_predictions   an answer -> boxes and points as they are written, in the model's space
    read_boxes         ... as boxes of the file, None for one that is no box
    match              the best one-to-one pairing
    region_reward      box, boxes and point as reward functions
    region_record      the true and predicted regions of a sample, for pictures and tables

Everything that is written counts: copies and malformed boxes are wrong predictions, an unfinished
thought or answer leaves nothing, and so many boxes that one must be right earn nothing.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from common.data.coordinates import Box, Place, Point, Regions, is_region
from common.data.rows import Prompt
from common.rewards.rules import Columns, extract_answer, with_opened_thought

RULES = ("box", "boxes", "point")
# Numbers as written, in the order x, y, x, y or x, y; None if these cannot be read. And the label.
Prediction = tuple[list[float] | None, str]
BOX_SCORES = ("box_iou", "accuracy", "f1", "f1_class")
MOST = 100  # predictions that may be scored, or twice the true regions if these are more
SLACK = 1e-9  # of a threshold, against rounding
NEAR = 0.05  # of the image's diagonal: how far from a true point a click may be
OPENING = re.compile(r"[\[{]")
NONE = ("none", "no objects", "no object")
KEYS = ("bbox_2d", "bbox", "box", "point_2d", "point", "Position", "box_2d")
LABELS = ("label", "name", "ref", "category")
NUMBER = r"[-+]?(?:\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})(?:[eE][-+]?\d{1,3})?"
LIST = rf"\s*{NUMBER}(?:\s*,\s*{NUMBER}){{1,3}}\s*"
POINT = rf"\(\s*({NUMBER})\s*,\s*({NUMBER})\s*\)"
# What families write, as the JSON it means; in this order.
SPELLINGS = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=[\[{:,\s])'([^'\"\\\n]{0,200})'(?=\s*[]},:])", r'"\1"'),  # as Python writes text
        (rf"{POINT}\s*,\s*{POINT}", r"[\1, \2, \3, \4]"),  # Qwen2-VL
        (rf"[(<]({LIST})[)>]", r"[\1]"),
        (rf'<point x="({NUMBER})" y="({NUMBER})"', r"[\1, \2]"),  # Molmo
        (rf'<points coords="\d{{1,9}} \d{{1,9}} ({NUMBER}) ({NUMBER})"', r"[\1, \2]"),  # Molmo 2
        (r"<loc0*(\d{1,4})>" * 4, r"[\2, \1, \4, \3]"),  # PaliGemma
        (rf"\A({LIST})\Z", r"[\1]"),  # bare numbers that are the whole answer
    )
]
TAGGED = re.compile(
    r"(?:(?:<ref>|<\|object_ref_start\|>)([^<]{0,200})(?:</ref>|<\|object_ref_end\|>)\s*)?"
    r"(?:<box>|<\|box_start\|>)([^<]*)(?:</box>|<\|box_end\|>)"
)

# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


def answer_text(response: str) -> str:
    r"""The part of a response that answers: of what follows the last thought the last
    <answer>...</answer>, GLM's last box, the last `\boxed{...}`, or all; of that the last fenced
    block, if any. "" where a thought or the answer is not finished."""
    text = response.rpartition("</think>")[2]
    if "<think>" in text or text.rfind("<answer>") > text.rfind("</answer>"):
        return ""
    glm = text.rpartition("<|end_of_box|>")[0].rpartition("<|begin_of_box|>")
    parts = (
        extract_answer(text, "answer"),
        glm[2] if glm[1] else None,
        extract_answer(text, "boxed"),
    )
    text = next((part for part in parts if part is not None), text)
    blocks = text.split("```")
    if len(blocks) == 1:
        return text
    return re.sub(r"\A\w{0,20}\n", "", blocks[-1 - len(blocks) % 2])  # ```json


def read_predictions(response: str) -> list[Prediction] | None:
    """The boxes and points of a response. Lists of them: the last one alone; single ones: all. None:
    it says neither any, nor that there is none, or a bracket is not closed, as it was cut off."""
    text = answer_text(response).strip()
    if text.count("[") > text.count("]") or text.count("{") > text.count("}"):
        return None
    tagged = TAGGED.findall(text)
    if tagged:
        return [
            (numbers, label.strip())
            for label, content in tagged
            for numbers, _ in read_json(content) or [(None, "")]
        ]
    if text.lower().strip(" .") in NONE:
        return []
    return read_json(text)


def read_json(text: str) -> list[Prediction] | None:
    """Those of a text without tags."""
    for pattern, new in SPELLINGS:
        text = pattern.sub(new, text)
    single, many = [], None
    for value in json_values(text):
        items = value if isinstance(value, list) else [value]
        if not items or isinstance(items[0], dict | list) and value is items:
            many = items
        else:
            single.append(value)
    predictions = [read_prediction(item) for item in (single if many is None else many)]
    return predictions if predictions or many is not None else None


def json_values(text: str) -> list:
    """The JSON lists and objects in a text, the outermost that can be read."""
    decoder, values, at, unread = json.JSONDecoder(parse_int=float), [], 0, 0
    while start := OPENING.search(text, at):
        try:
            value, at = decoder.raw_decode(text, start.start())
            values.append(value)
        except (ValueError, RecursionError):
            at, unread = start.end(), unread + 1
        if unread > MOST:  # each may be as long as the text
            return []
    return values


def read_prediction(item: Any) -> Prediction:
    """One box or point of JSON."""
    label = ""
    if isinstance(item, dict):
        label = str(next((item[name] for name in LABELS if name in item), ""))
        name = next((name for name in KEYS if name in item), "")
        item = item.get(name)
        if name == "box_2d" and isinstance(item, list) and len(item) == 4:  # Gemini's: y first
            item = [item[1], item[0], item[3], item[2]]
    is_region = isinstance(item, list) and len(item) in (2, 4)
    if not is_region or not all(isinstance(x, float) and math.isfinite(x) for x in item):
        return None, label
    return item, label


def as_box(numbers: list[float] | None, place: Place) -> Box | None:
    """Numbers of an answer as a box in pixels of the file, its corners sorted, clipped to the image;
    None: there are not four, or nothing is left."""
    if numbers is None or len(numbers) != 4:
        return None
    (x1, y1), (x2, y2) = place.to_file(*numbers[:2]), place.to_file(*numbers[2:])
    width, height = place.file
    left, right = max(0.0, min(x1, x2)), min(float(width), max(x1, x2))
    top, bottom = max(0.0, min(y1, y2)), min(float(height), max(y1, y2))
    return (left, top, right, bottom) if left < right and top < bottom else None


def as_point(numbers: list[float] | None, place: Place) -> Point | None:
    """Numbers of an answer as a point in pixels of the file; a box stands for its centre."""
    if numbers is None:
        return None
    x, y = numbers[0::2], numbers[1::2]
    return place.to_file(sum(x) / len(x), sum(y) / len(y))


def read_boxes(response: str, place: Place) -> list[tuple[Box | None, str]] | None:
    """The boxes of a response in pixels of the file, and their labels; see `read_predictions`."""
    predictions = read_predictions(response)
    if predictions is None:
        return None
    return [(as_box(numbers, place), label) for numbers, label in predictions]


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------


def iou(a: Box | None, b: Box | None) -> float:
    """Intersection over union of two boxes; 0 for what is no box."""
    if a is None or b is None:
        return 0.0
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    both = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return shared / (both - shared)


def match(gains: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The (row, column) pairs, each row and column at most once, with the largest sum of ``gains``: the
    Hungarian method by shortest augmenting paths (Jonker and Volgenant 1987), O(n^2 m)."""
    rows, columns = len(gains), len(gains[0]) if gains else 0
    if rows > columns:
        return [(i, j) for j, i in match([*zip(*gains)])]
    # of column j - 1, the row that has it; column 0 is where a path begins
    row_of = [0] * (columns + 1)
    row_price, price = [0.0] * (rows + 1), [0.0] * (columns + 1)
    for row in range(1, rows + 1):
        row_of[0], column = row, 0
        cost, before = [math.inf] * (columns + 1), [0] * (columns + 1)
        reached = [False] * (columns + 1)
        while row_of[column]:
            reached[column], i = True, row_of[column]
            for j in range(1, columns + 1):
                reduced = -gains[i - 1][j - 1] - row_price[i] - price[j]
                if not reached[j] and reduced < cost[j]:
                    cost[j], before[j] = reduced, column
            following = min(
                (j for j in range(1, columns + 1) if not reached[j]), key=cost.__getitem__
            )
            step = cost[following]
            for j in range(columns + 1):
                if reached[j]:
                    row_price[row_of[j]] += step
                    price[j] -= step
                else:
                    cost[j] -= step
            column = following
        while column:
            row_of[column] = row_of[before[column]]
            column = before[column]
    return [(row_of[j] - 1, j - 1) for j in range(1, columns + 1) if row_of[j]]


def best_sum(gains: Sequence[Sequence[float]]) -> float:
    """What the best pairing gains."""
    return sum(gains[i][j] for i, j in match(gains))


def hits(ious: list[list[float]], threshold: float = 0.5) -> float:
    """The most pairs whose IoU reaches a threshold."""
    return best_sum([[float(value >= threshold - SLACK) for value in row] for row in ious])


def score_boxes(response: str, truth: Regions) -> dict[str, float]:
    """`box_iou`: the sum of IoU over the best pairing / the larger number of boxes; `accuracy`: all are
    paired at an IoU of 0.5; `f1` of pairs at 0.5; `f1_class`: ... with equal labels, where the row has
    some. With no true box: 1 for an answer that says so."""
    boxes = read_boxes(response, truth.place)
    count, most = len(truth.boxes), max(MOST, 2 * len(truth.boxes))
    if boxes is None or len(boxes) > most:
        return dict.fromkeys(BOX_SCORES, 0.0) | {"parsed": float(boxes is not None)}
    if not boxes or not count:
        return dict.fromkeys(BOX_SCORES, float(len(boxes) == count)) | {"parsed": 1.0}
    ious = [[iou(box, true) for true in truth.boxes] for box, _ in boxes]
    labels = [plain(label) for label in truth.labels]
    same = [
        [not labels or plain(label) == true for true in labels or ious[0]] for _, label in boxes
    ]
    of_class = [[value * equal for value, equal in zip(*rows)] for rows in zip(ious, same)]
    right, larger = hits(ious), max(len(boxes), count)
    scores = (
        best_sum(ious) / larger,
        float(right == larger),
        2 * right / (len(boxes) + count),
        2 * hits(of_class) / (len(boxes) + count),
    )
    return dict(zip(BOX_SCORES, scores)) | {"parsed": 1.0}


def plain(label: str) -> str:
    """A label without case, with single blanks."""
    return " ".join(label.lower().split())


def score_point(response: str, truth: Regions) -> dict[str, float]:
    """`accuracy`: the one point of the answer is in a true box, edges included, or near a true point."""
    predictions = read_predictions(response)
    right = False
    if predictions is not None and len(predictions) == 1:
        point = as_point(predictions[0][0], truth.place)
        right = point is not None and is_hit(point, truth)
    return {"accuracy": float(right), "parsed": float(predictions is not None)}


def is_hit(point: Point, truth: Regions) -> bool:
    """Whether a point is in a true box, or within 5 % of the diagonal of a true point."""
    x, y = point
    near = NEAR * math.hypot(*truth.place.file) + SLACK
    in_box = any(x1 <= x <= x2 and y1 <= y <= y2 for x1, y1, x2, y2 in truth.boxes)
    return in_box or any(math.dist(point, true) <= near for true in truth.points)


def earned_by_lazy(rule: str, rows: Sequence[Regions | None]) -> tuple[str, float]:
    """An answer for which no image need be seen, and what it earns on average."""
    score, reward = SCORES[rule]
    whole, earned = rule != "point", []
    for truth in filter(None, rows):
        width, height = truth.place.file
        corners = [(0, 0), (width, height)] if whole else [(width / 2, height / 2)]
        numbers = [value for point in corners for value in truth.place.from_file(*point)]
        earned.append(score(json.dumps(numbers), truth)[reward])
    return "the whole image" if whole else "the centre", sum(earned) / len(earned)


# By rule: its score of a response, and the component that is the reward.
SCORES: dict[str, tuple[Callable[[str, Regions], dict[str, float]], str]] = {
    "box": (score_boxes, "box_iou"),
    "boxes": (score_boxes, "box_iou"),
    "point": (score_point, "accuracy"),
}


def region_reward(rule: str, prompts, responses, *_, regions: list[Regions]) -> Columns:
    """A rule for regions as a reward function."""
    score, reward = SCORES[rule]
    columns = {"reward": []}
    for prompt, response, truth in zip(prompts, responses, regions):
        scores = score(with_opened_thought(prompt, response), truth)
        for name, value in ({"reward": scores[reward]} | scores).items():
            columns.setdefault(name, []).append(value)
    return columns


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
    """What the record of a response says of regions, if its row has some: the true ones and those of the
    response that are in the image, in pixels of the file. The score of a box is its IoU with its partner
    in the best pairing, that of a predicted point 1 if it hits."""
    truth = row.regions
    if truth is None:
        return {}
    names = itertools.chain(truth.labels, itertools.repeat(""))
    true = [one_region(*pair) for pair in zip(truth.boxes + truth.points, names)]
    predicted = []
    for numbers, label in (read_predictions(with_opened_thought(row.text, response)) or [])[:MOST]:
        box = as_box(numbers, truth.place)
        point = as_point(numbers, truth.place) if numbers and len(numbers) == 2 else None
        if box:
            predicted.append(one_region(box, label))
        elif point and is_region([point], truth.place.file):
            predicted.append(one_region(point, label, is_hit(point, truth)))
    boxes = [one for one in predicted if len(one["region"]) == 4]
    ious = [[iou(one["region"], box) for box in truth.boxes] for one in boxes]
    for i, j in match(ious):
        boxes[i]["score"] = true[j]["score"] = ious[i][j]
    return {"regions": {"image": truth.image, "true": true, "predicted": predicted}}


def one_region(numbers: Box | Point, label: str, score: float = 0.0) -> dict:
    return {"region": list(numbers), "label": label, "score": float(score)}
