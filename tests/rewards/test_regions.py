"""Boxes and points: golden values, the pairing against all permutations, and answers that hackers write.

Golden values come from formulas by hand, IoU by shapely, pairings by scipy."""

import json
import random
import time
from types import SimpleNamespace

import pytest

from common.data.coordinates import Place, Regions
from common.rewards import sources
from common.rewards.regions import (
    REGION_RULES,
    find_regions,
    pair,
    region_record,
    region_reward,
    score_boxes,
    score_point,
)
from common.rewards.rules import read_places
from common.rewards.sources import RewardArgs
from conftest import marked

WIDE = (1000, 500)  # pixels of the file, 1008 x 504 as Qwen2.5-VL sees it
CUP = [250, 125, 500, 250]
TEN = [0, 0, 100, 100]
SPACES = ["file", "seen", "1000", "1"]


def truth(boxes, labels=(), space="file", file=WIDE, seen=(1008, 504), points=()):
    return Regions(tuple(map(tuple, boxes)), tuple(points), tuple(labels), Place(file, seen, space))


def scores(response, boxes, space="file", labels=(), **more):
    return REGION_RULES["boxes"](response, truth(boxes, labels, space, **more))


def as_json(*boxes, labels=None):
    objects = [{"bbox_2d": box} for box in boxes]
    for entry, label in zip(objects, labels or []):
        entry["label"] = label
    return json.dumps(objects)


# ------------------------------------------------------------------------------------------------- golden values
@pytest.mark.parametrize(
    "space, response, value",
    marked(
        [
            ("seen", '[{"bbox_2d": [252, 126, 504, 252], "label": "cup"}]', 1),
            (
                "seen",
                as_json(CUP),
                0.95355,
            ),  # pixels of the file, where those of the seen image are meant
            ("1000", as_json([250, 250, 500, 500]), 1),
            (
                "1000",
                "<|object_ref_start|>cup<|object_ref_end|><|box_start|>(250,250),(500,500)<|box_end|>",
                1,
            ),
            ("1000", "<ref>cup</ref><box>[[250, 250, 500, 500]]</box>", 1),
            (
                "1000",
                "<think>x</think><answer><|begin_of_box|>[[250,250,500,500]]<|end_of_box|></answer>",
                1,
            ),
            ("1000", "<|begin_of_box|>[250,250,500,500]<|end_of_box|>", 1),
            ("1000", "答案是［２５０，２５０，５００，５００］", 1),
            ("1000", "<|begin_of_box|>(250,250,500,500)<|end_of_box|>", 1),
            ("1000", "<|begin_of_box|><250,250,500,500><|end_of_box|>", 1),
            (
                "1000",
                '<think>[9,9,10,10]</think>The cup:\n```json\n[{"bbox_2d": [250.0, 250, 5e2, 500]}]\n```',
                1,
            ),
            ("1000", "[{'bbox_2d': [250, 250, 500, 500], 'label': 'cup'}]", 1),
            ("1000", "[{'bbox_2d': [250, 250, 500, 500], 'label': \"the man's cup\"}]", 1),
            ("1000", '[{"bbox_2d": [250, 250, 500, 500], "label": "the man\'s cup"}]', 1),
            ("1000", '<answer>{"bbox_2d": [500, 500, 250, 250]}</answer>', 1),  # corners are sorted
            ("1000", "<answer>[1,1,2,2]</answer> no: <answer>[250,250,500,500]</answer>", 1),
            ("1000", "[1,1,2,2] no: [250,250,500,500]", 0.5),  # all that is written counts
            ("1000", "The cup [on the left] is at [250,250,500,500]", 1),
            ("1000", "[[1,1,2,2]] no: [[250,250,500,500]]", 0.5),
            ("1000", "[[250, 250, 500, 500], []]", 1),  # what is no region does not count
            ("1000", "[[250, 250, 500, 500], null]", 1),
            ("1000", '["cup", {"bbox_2d": [250, 250, 500, 500]}, 5, [null]]', 1),
            ("1000", "[[250, 250, 500, 500], ...]", 1),
            ("1000", "(250, 250), (500, )", 0),
            ("1000", "````\n```json\n[[250, 250, 500, 500]]\n```\n````", 1),
            ("1000", '{"bbox_2d": [250, 250, 500, 500], "is": {"colour": "red"}}', 1),
            (
                "1000",
                '{"all": [{"bbox_2d": [250, 250, 500, 500]}, {"bbox_2d": [1, 1, 2, 2]}]}',
                0.5,
            ),
            ("1000", "<answer>[250,250,500,500]", 0),  # not closed
            ("1000", "<think>[250,250,500,500]", 0),  # an unfinished thought
            ("1000", '{"box_2d": [250, 250, 500, 500]}', 1),
            ("1000", '{"box_2d": [250, 125, 500, 250]}', 0),  # y first: x 125 to 250, y 125 to 250
            ("1000", "250, 250, 500, 500", 1),  # bare numbers that are the whole answer
            ("1000", "It is at 250, 250, 500, 500", 0),
            ("1000", "(250, 250), (500, 500)", 1),
            ("1000", '{"x1": 250, "y1": 250, "x2": 500, "y2": 500}', 1),
            ("1000", r"\boxed{[250, 250, 500, 500]}", 1),
            (
                "1000",
                "\n[{'Position': [250, 250, 500, 500], 'Confidence': 0.9}]",
                1,
            ),  # Visual-RFT's
            ("1000", "<box>250 250 500 500</box>", 1),
            ("1000", "<ref>cup</ref><box>250, 250, 500.0, 500</box>", 1),
            ("1000", "<bbox>\n500 500 250 250\n</bbox>", 1),
            ("1000", "<box>250 250 500 500; 1 1 2 2</box>", 0.5),
            ("1000", '<bbox x1="250" y1="250" x2="500" y2="500" label="cup"/>', 1),
            ("1000", "<box y1=250 x1=250 y2=500 x2=500>cup</box>", 1),
            ("1000", "<points x1='250' y1='250' x2='500' y2='500'>cup</points>", 0),  # two points
            ("1000", '<bbox x="250" y="250" width="250" height="250">', 0),
            ("1000", "<box>250 250 500</box>", 0),
            ("1000", "<box>about 250 250 500 500</box>", 0),
            ("1000", "<cup>250 250 500 500</cup>", 0),
            ("1000", "It is not at <box>250 250 500 500</box>.", 0),
            ("1000", "It is not at [250, 250, 500, 500].", 0),
            ("1000", "I see nothing.", 0),
            ("1000", "", 0),
        ],
        daily=8,
    ),
)
def test_answers_are_read_in_the_space_and_literal_of_each_family(space, response, value):
    assert scores(response, [CUP], space)["box_iou"] == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    "numbers, value",
    [
        ("-50, 0, 500, 1000", 1),  # clipped to the image
        ("NaN, 0, 500, 1000", 0),
        ("Infinity, 0, 500, 1000", 0),
        ("0, 0, 1e999, 1000", 0),
        ('"0", "0", "500", "1000"', 0),
        ("true, 0, 500, 1000", 0),
        ("250, 250, 250, 500", 0),  # no area
        ("2000, 1500, 2500, 2000", 0),  # nothing left
    ],
)
def test_malformed_boxes_match_nothing(numbers, value):
    for answer in (f'[{{"bbox_2d": [{numbers}]}}]', f"[[{numbers}]]"):
        result = scores(answer, [[0, 0, 500, 500]], "1000")
        assert result["box_iou"] == value


@pytest.mark.parametrize(
    "predicted, boxes, value, f1",
    marked(
        [
            ([[0, 0, 100, 60]], [TEN], 0.6, 1),
            ([[50, 50, 150, 150]], [TEN], 0.142857, 0),  # 2500 / 17500
            ([[0, 0, 1000, 500]], [TEN], 0.02, 0),  # its share of the area
            ([[0, 0, 100, 50]], [TEN], 0.5, 1),  # exactly .5
            ([[0, 0, 100, 49]], [TEN], 0.49, 0),
            ([TEN, [500, 0, 600, 100]], [TEN], 0.5, 0.666667),
            ([TEN], [TEN, [500, 0, 600, 100]], 0.5, 0.666667),
            ([TEN, [0, 0, 100, 60]], [[0, 0, 100, 80], [0, 0, 100, 125]], 0.64, 0.5),  # .8 and .48
            # .833 and .402, the largest first, not .8 and .603
            ([[0, 0, 10, 10], [0, 0, 10, 19.9]], [[0, 0, 10, 12], [0, 0, 10, 8]], 0.617672, 0.5),
            ([TEN, TEN], [TEN], 0.5, 0.666667),  # copies
            ([TEN, [1, 2], [1, 2, 3]], [TEN], 1 / 2, 2 / 3),  # a point is a wrong box
            ([TEN] + [[1, 1, 2, 2]] * 99, [TEN], 0.01, 0.019802),  # 2 / 101
            ([TEN] + [[1, 1, 2, 2]] * 100, [TEN], 0, 0),  # refused
            ([TEN] + [[1, 1, 2, 2]] * 499, [TEN], 0, 0),
            ([], [], 1, 1),
            ([TEN], [], 0, 0),
            ([], [TEN], 0, 0),
        ],
        daily=5,
    ),
)
def test_iou_of_pairs_and_f1_of_pairs_at_one_half(predicted, boxes, value, f1):
    result = scores(as_json(*predicted), boxes)
    assert result["box_iou"] == result["reward"] == pytest.approx(value, abs=1e-6)
    assert result["f1"] == pytest.approx(f1, abs=1e-6)


def test_labels_are_compared_without_case_and_outer_blanks():
    other = [200, 0, 300, 100]
    answer = as_json(TEN, other, labels=["dog", "Cat "])
    assert scores(answer, [TEN, other], labels=["cat", "cat"])["f1"] == 0.5
    assert scores(as_json(TEN), [TEN], labels=["cat"])["f1"] == 0  # a missing label
    tagged = "<ref>Cat</ref><box>[[0, 0, 100, 100], [200, 0, 300, 100]]</box>"
    assert scores(tagged, [TEN, other], labels=["cat", "cat"])["f1"] == 1
    named_by_numbers = '{"bbox_2d": [0, 0, 100, 100], "label": "f(1, 2)"}'
    assert scores(named_by_numbers, [TEN], labels=["f(1, 2)"])["box_iou"] == 1
    assert (
        REGION_RULES["box"](as_json(TEN), truth([TEN], ["cat"]))["reward"] == 1
    )  # one box needs no name


@pytest.mark.parametrize(
    "predicted, boxes, value",
    [("AB", "AB", 1), ("BA", "AB", 1), ("AC", "A", 0), ("A", "AB", 0), ("AC", "AB", 0)],
)
def test_accuracy_at_one_half(predicted, boxes, value):
    """Of V-Triune's inputs, of which "BA" of "AB" pays it .5 and "AC" of "AB" 1.0."""
    known = {"A": [0, 0, 10, 10], "B": [20, 20, 30, 30], "C": [50, 50, 60, 60]}
    answer = as_json(*(known[name] for name in predicted))
    result = scores(answer, [known[name] for name in boxes])
    assert result["accuracy"] == value
    share = len({*predicted} & {*boxes}) / max(len(predicted), len(boxes))
    assert result["box_iou"] == share


@pytest.mark.parametrize(
    "answered, true, value", [(100, 1, 0.01), (101, 1, 0), (120, 60, 0.5), (121, 60, 0)]
)
def test_too_many_boxes_earn_nothing(answered, true, value):
    """Though the true ones are among them."""
    boxes = [[7 * k, 0, 7 * k + 5, 50] for k in range(answered)]
    result = scores(as_json(*boxes), boxes[:true])
    assert result["box_iou"] == pytest.approx(value)
    assert result["parsed"]


@pytest.mark.parametrize("answer", ["none", "None.", "no objects", "[]", "<answer>none</answer>"])
def test_there_may_be_nothing(answer):
    assert scores(answer, [])["box_iou"] == 1
    assert scores(answer, [TEN])["box_iou"] == 0
    for other in ("I see nothing.", "[null]", "[[0, 0, 100, 100], null, []]"):
        assert scores(other, [])["box_iou"] == 0  # does not say so


@pytest.mark.parametrize(
    "response, value",
    marked(
        [
            ('[{"point_2d": [300, 400], "label": "cup"}]', 1),
            ("(250, 250)", 1),  # edges belong to the box
            ("250, 250", 1),
            ("[-500, 250, 700, 550]", 1),  # of a box the centre of what is in the image: (350, 200)
            ("[300, 400, 300, 400]", 0),  # no area
            (as_json([250, 250, 350, 450]), 1),  # a box stands for its centre
            ("[[300, 400], [800, 800]]", 0),
            ("[300, 900]", 0),
            ("null", 0),  # UI-R1 takes what it cannot read for the corner
            ("[-3, 5]", 0),
            ("[NaN, 400]", 0),
            ("[300.5, 400.25]", 1),
            ("pyautogui.click(x=300.5, y=400)", 1),
            ('{"x": 300, "y": 400}', 1),
            ("pyautogui.click(x=300, y=900)", 0),
            ("300 400", 0),
            # Qwen2.5-VL's cookbook, Molmo, UI-TARS
            ('<points x="300" y="400" alt="the cup">the cup</points>', 1),
            ('<points x1="300" y1="400" alt="the cup">the cup</points>', 1),
            ('<point y=400 x=300 alt="x=9 y=9">', 1),
            ("<point>300 400</point>", 1),
            ("click(point='<point>300, 400.5</point>')", 1),
            ('<points x1="300" y1="400" x2="800" y2="800" alt="cups">cups</points>', 0),
            ('<points x="300" y="400">[800, 800]</points>', 0),
            ("<points>300 400 800 800</points>", 0),
            ("It is not <point>300 400</point>.", 0),
            ('Not <points x="300" y="400" alt="the cup">', 0),
            ("<point>300</point>", 0),
            ("<pointer>300 400</pointer>", 0),
        ],
        daily=4,
    ),
)
def test_point(response, value):
    assert score_point(response, truth([CUP], space="1000"))["accuracy"] == value


@pytest.mark.parametrize(
    "text, numbers",
    [
        ('{"y": 20, "x": 10}', [10, 20]),
        ("click(y=20.5, x=-10)", [-10, 20.5]),
        ('{"x1": 1, "x2": 3, "y1": 2, "y2": 4}', [1, 2, 3, 4]),
        ('{"y1": 2, "x1": 1, "y2": 4, "x2": 3}', [1, 2, 3, 4]),
        ("click(x=10, 20)", [10, 20]),
        ('{"x1": 1, "x2": 3}', [1, 3]),
    ],
)
def test_named_axes_may_come_in_any_order(text, numbers):
    assert read_places(text) == [(numbers, "")]


@pytest.mark.parametrize("x, value", [(225, 1), (226, 0), (175, 1), (174, 0)])
def test_a_point_is_near_within_a_twentieth_of_the_diagonal(x, value):
    """Of 500 pixels: 25."""
    there = truth([], file=(300, 400), points=[(200, 300)])
    assert score_point(f"[{x}, 300]", there)["accuracy"] == value


def test_a_click_of_computer_use_is_a_point():
    """As Qwen3-VL's own tool writes it."""
    call = {"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [300, 400]}}
    response = f"Action: click the cup.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    assert score_point(response, truth([CUP], space="1000"))["accuracy"] == 1
    assert score_point(response, truth([TEN], space="1000"))["accuracy"] == 0


def test_a_box_beside_the_image_is_no_click_at_its_edge():
    corner = truth([[900, 400, 1000, 500]], space="1000")
    assert score_point("[999, 999]", corner)["accuracy"] == 1
    assert score_point("[2000, 1500, 2500, 2000]", corner)["accuracy"] == 0


@pytest.mark.parametrize(
    "space, numbers, value",
    [
        ("seen", [101, 98, 504, 392], 0.999504),
        ("seen", [100, 100, 500, 400], 0.955663),
        ("1000", [100, 167, 500, 667], 0.998668),
        ("1000", [100, 100, 500, 400], 0.411765),
        ("1", [0.1, 0.3, 0.5, 0.6], 0.6),
    ],
)
def test_the_space_matters(space, numbers, value):
    result = scores(str(numbers), [[100, 100, 500, 400]], space, file=(1000, 600), seen=(1008, 588))
    assert result["box_iou"] == pytest.approx(value, abs=1e-6)


# ------------------------------------------------------------------------------------------------- properties
def some_boxes(rng, count, size=WIDE):
    boxes = []
    for _ in range(count):
        x, y = (sorted(rng.sample(range(side), 2)) for side in size)
        boxes.append([x[0], y[0], x[1], y[1]])
    return boxes


@pytest.mark.parametrize("seed", marked(range(20), daily=3))
def test_pairs_are_one_to_one_and_the_largest_first(seed):
    rng = random.Random(seed)
    gains = [[rng.random() for _ in range(4)] for _ in range(rng.randint(1, 6))]
    left = {(i, j): gain for i, row in enumerate(gains) for j, gain in enumerate(row)}
    expected = []
    while left:
        best = max(left, key=left.get)
        expected.append(left[best])
        left = {key: gain for key, gain in left.items() if key[0] != best[0] and key[1] != best[1]}
    assert pair(gains) == expected


@pytest.mark.parametrize("seed", marked(range(20), daily=3))
def test_the_order_of_boxes_does_not_matter(seed):
    rng = random.Random(seed)
    boxes, predicted = some_boxes(rng, 4), some_boxes(rng, 3)
    once = scores(as_json(*predicted), boxes)
    again = scores(as_json(*rng.sample(predicted, 3)), rng.sample(boxes, 4))
    assert once == pytest.approx(again)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("seen", [(1008, 504), (56, 84)])
def test_every_family_earns_the_same(space, seen):
    """... for the same boxes, however the image was resized."""
    rng = random.Random(0)
    boxes, predicted = some_boxes(rng, 4), some_boxes(rng, 4)
    place = Place(WIDE, seen, space)
    written = [[*place.from_file(*box[:2]), *place.from_file(*box[2:])] for box in predicted]
    result = scores(json.dumps(written), boxes, space, seen=seen)
    assert result == pytest.approx(scores(as_json(*predicted), boxes))


# ------------------------------------------------------------------------------------------------- hackers
HOSTILE = [
    "[" * 100_000,
    "[[" * 2_000 + "]]" * 2_000,
    "{" * 100_000,
    "1" * 100_000,
    "1," * 50_000,
    "(1,2)," * 30_000,
    "(1,1," * 30_000,
    "[1,2,3,4]" * 20_000,
    "[1,2,3,4" * 20_000 + "]" * 20_000,
    " " * 100_000,
    "'" * 100_000,
    "['" * 50_000,
    "<box>" * 20_000,
    "<ref>" * 20_000,
    "<box>[[1,2,3,4]]</box>" * 5_000,
    "<answer>" * 20_000,
    "<answer></answer>" * 10_000,
    r"\boxed{" * 20_000,
    "```" * 30_000,
    "<think>" * 20_000,
    "<|begin_of_box|>" * 10_000,
    "[" + "9" * 5_000 + ", 1, 2, 3]",
    "[1e99999, 1, 2, 3]",
    '{"bbox_2d": {"bbox_2d": [1, 2, 3, 4]}}',
    '{"bbox_2d": null}',
    "[null]",
    "[[]]",
    "[{}]",
    "\x00\ud800",
    '<point x="' * 10_000,
    "<point>" + "1 " * 50_000,
    "<box>" + "1 " * 50_000 + "a",
    "<box>" + " " * 100_000,
    "<points " + "x=1 " * 20_000 + ">",
    '<point alt="' * 10_000 + ">",
    "<box>1 2 3 4</box>" * 5_000,
    "-" * 100_000,
    "1 " * 50_000,
    "(" + " " * 100_000,
    "[1, 2" + " " * 100_000,
    "[[1], a" * 15_000,
    "[[]" + "[a], [1], {1}, " * 6_000,
    "['label': '\\" * 8_000,
    "(1, 2" * 20_000,
]


@pytest.mark.slow
@pytest.mark.parametrize("response", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_earn_nothing_in_little_time(response):
    started = time.process_time()
    for score in (score_boxes, score_point):
        result = score(response, truth([CUP], ["cup"]))
        assert result.get("box_iou", 0) <= 0.01 and result["accuracy"] == 0
    assert time.process_time() - started < 20


# ------------------------------------------------------------------------------------------------- use
def test_an_opened_thought_of_the_prompt_counts():
    answers = ["[0, 0, 100, 100]", "no</think>[0, 0, 100, 100]"]
    columns = region_reward(
        "box",
        ["Where?<think>"] * 2,
        answers,
        [None] * 2,
        [None] * 2,
        [[]] * 2,
        regions=[truth([TEN])] * 2,
    )
    assert columns["reward"] == columns["box_iou"] == [0, 1]


def test_regions_are_read_with_their_labels():
    place = Place(WIDE, None, "1000")
    answer = '[{"bbox_2d": [0, 0, 100, 200], "label": "cup"}, {"point_2d": [1, 2]}]'
    assert find_regions(answer, place) == [((0, 0, 100, 100), "cup"), ((1, 1), "")]
    assert find_regions("a cup", place) is None


# ------------------------------------------------------------------------------------------------- records
def record(response, regions, prompt="p"):
    return region_record(SimpleNamespace(text=prompt, regions=regions), response)


def test_the_record_of_a_sample_has_its_regions():
    row = truth([TEN, [500, 0, 600, 100]], ["cup", "dog"], space="1000")
    answer = as_json([0, 0, 100, 100], [0, 0, 50, 50])
    assert record(answer, row)["regions"] == {
        "image": 0,
        "true": ((0, 0, 100, 100), (500, 0, 600, 100)),
        "answered": [(0, 0, 100, 50), (0, 0, 50, 25)],
    }
    clicks = record("[[50, 50], [1e3, -1e30]]", truth([TEN]))["regions"]["answered"]
    assert clicks == [(50, 50), (1000, 0)]
    assert record(answer, None) == {}
    assert record(answer, row, "p<think>")["regions"]["answered"] == []


@pytest.mark.parametrize(
    "reward, told",
    [
        ("exact", "--reward exact: always answering 'B' is right in 0.667 of its rows\n"),
        ("launch/reward_vision.py:choice", "choice: always answering 'B' is right in 0.667 of its"),
        ("boxes", ""),
        ("none", ""),
    ],
)
def test_the_answer_that_is_right_most_often_is_told(reward, told, capsys):
    rows = [SimpleNamespace(label=None, reference=answer) for answer in "BAB"]
    sources.load_rewards(RewardArgs(reward=reward)).report_constant_answers(rows)
    printed = capsys.readouterr().out
    assert told in printed and bool(told) == bool(printed)


def test_gdpo_compares_the_number_that_is_the_reward():
    """Accuracy and F1 of the same boxes are no further parts of it."""
    mix = sources.load_rewards(RewardArgs(reward="boxes"))
    assert mix.compared(["box_iou", "accuracy", "f1", "parsed"]) == []
