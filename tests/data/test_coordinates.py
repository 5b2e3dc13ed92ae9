"""Places in images: what rows say of them, and in which coordinates models answer.

Seen sizes and rounded marks are those of transformers 5.24's smart resize."""

import pytest
from PIL import Image

from common.data.coordinates import Place, read_regions, write_marks
from common.data.processor import Processor, answer_frame
from common.flags import DataArgs
from common.rewards.judgements import JudgeSettings, load_judgements
from conftest import marked, user_error, write_rows
from helpers import write_processor

BOX = [[100.2, 100, 500, 400]]
POINT = [[300, 200]]


def regions_of(row, space="seen", file=(1000, 600), seen=(1008, 588)):
    return read_regions(row, (Place(file, seen, space),))


@pytest.mark.parametrize(
    "file, seen",
    [
        ((1000, 500), (1008, 504)),
        ((640, 428), (644, 420)),
        ((4000, 3000), (1148, 840)),
        ((50, 30), (84, 56)),
        ((1920, 1080), (1316, 728)),
        ((42, 70), (56, 56)),
    ],
)
def test_what_qwen_sees_is_its_grid(tmp_path, file, seen):
    folder = write_processor(tmp_path, "qwen2_5_vl")
    family = Processor(folder, DataArgs(min_pixels=3136, max_pixels=1003520)).family
    assert family.seen_size(family.grid(*file)) == seen
    pixels = family.patches(Image.new("RGB", file))[0]
    assert len(pixels) == seen[0] * seen[1] // family.patch_size**2


def test_another_space_than_the_familys_is_told(tmp_path, capsys):
    """An args.json of Qwen2.5-VL, used for Qwen3-VL, would read answers in the wrong space."""
    folder = write_processor(tmp_path, "qwen3_vl")
    assert Processor(folder, DataArgs()).space == "1000"
    assert "--coordinates" not in capsys.readouterr().out
    assert Processor(folder, DataArgs(coordinates="seen")).space == "seen"
    assert "--coordinates seen: qwen3_vl usually answers in 1000" in capsys.readouterr().out


def test_a_row_is_read_in_pixels_of_its_upright_file(load, tmp_path):
    turned = Image.new("RGB", (90, 30))
    exif = turned.getexif()
    exif[0x0112] = 6  # upright it is 30 x 90
    turned.save(tmp_path / "turned.jpg", exif=exif)
    rows = [
        {"prompt": "p", "images": ["a.png"], "regions": {"boxes": [[1, 2, 64, 40]]}},
        {
            "prompt": "p",
            "images": ["a.png", "turned.jpg"],
            "regions": {"points": [[30, 90]], "image": 1},
        },
        {
            "prompt": "p",
            "images": ["a.png"],
            "regions": {"boxes": [[0, 0, 500, 1000]], "space": "1000"},
        },
        {"prompt": "p", "images": ["a.png"], "regions": {"boxes": []}},
        {"prompt": "p", "images": ["a.png"]},
    ]
    first, second, third, empty, none = load(rows)
    assert first.regions.boxes == ((1, 2, 64, 40),)
    assert first.places[0].file == (64, 40)
    assert second.regions.points == ((30, 90),)
    assert second.regions.place == second.places[1]
    assert second.regions.place.file == (30, 90)
    assert third.regions.boxes == ((0, 0, 32, 40),)
    assert empty.regions.boxes == ()
    assert none.regions is None


@pytest.mark.parametrize(
    "regions, problem",
    marked(
        [
            ({"boxes": [[500, 100, 400, 200]]}, "x1, y1, x2, y2"),
            ({"boxes": [[0, 0, 1001.5, 10]]}, "1000 x 600 pixels"),
            ({"boxes": [[10, 10, 10, 20]]}, "no box .x1"),
            ({"boxes": [[-0.9, 0, -0.1, 20]]}, "no box .x1"),
            ({"boxes": [[0.1, 0.2, 0.5, 0.6]]}, '"space"'),
            ({"boxes": [[500, 600, 900, 900]]}, '"space"'),
            ({"boxes": [[100, 600, 500, 900]]}, "upright"),
            ({"boxes": [[1, 2, 3]]}, "not 4 finite numbers"),
            ({"boxes": [[10**400, 0, 1, 1]]}, "not 4 finite numbers"),
            ({"points": [[1, 2, 3, 4]]}, "not 2 finite numbers"),
            ({"points": [[1, 700]]}, "no point .x, y"),
            ({"boxes": [[1, 2, 3, float("nan")]]}, "finite"),
            ({"boxes": [1, 2, 3, 4]}, "boxes: each must be list, not 1"),
            ({"boxes": [[1, 2, 3, "4"]]}, "boxes: each must be"),
            ({"boxes": [[1, 2, 3, 4]], "labels": []}, None),
            ({"boxes": [[1, 2, 3, 4]], "labels": ["a", "b"]}, "2 labels for 1"),
            ({"box": [[1, 2, 3, 4]]}, "box"),
            ({"boxes": [], "image": 1}, "no image 1"),
            ({"boxes": [[1, 2, 3, 4]], "space": "2048!"}, "space"),
            ([[1, 2, 3, 4]], "must be dict"),
        ],
        daily=5,
    ),
)
def test_bad_regions_are_bad_rows(regions, problem):
    if problem is None:
        regions_of(regions)
    else:
        with user_error(f"regions.*{problem}"):
            regions_of(regions)


@pytest.mark.parametrize("space", ["auto", "seen"])
def test_an_unknown_space_needs_a_flag(space):
    with user_error("--coordinates"):
        regions_of({"boxes": BOX}, space, seen=None)


def marked(response, regions):
    (written,) = write_marks([response], regions)
    return written


@pytest.mark.parametrize(
    "space, text",
    [
        ("seen", "at [101, 98, 504, 392], [302, 196]"),
        ("1000", "at [100, 167, 500, 667], [300, 333]"),
        ("1", "at [0.1, 0.167, 0.5, 0.667], [0.3, 0.333]"),
        ("file", "at [100, 100, 500, 400], [300, 200]"),
    ],
)
def test_marks_become_the_coordinates_of_the_model(space, text):
    regions = regions_of({"boxes": BOX, "points": POINT}, space)
    assert marked("at <box>, <point>", regions) == text


def test_marks_are_rounded_half_up_and_stay_in_the_image():
    at = regions_of({"boxes": [[90.9, 160.8, 135, 212.8]]}, file=(640, 480), seen=(644, 476))
    assert marked("<box>", at) == "[91, 159, 136, 211]"
    beyond = regions_of({"boxes": [[-0.9, -1, 1000.6, 601]]}, "1000")
    assert marked("<box>", beyond) == "[0, 0, 1000, 1000]"


def test_marks_and_regions_are_as_many():
    regions = regions_of({"boxes": BOX + [[1, 2, 3, 4]]}, "1000")
    assert marked("<box> and <box>", regions) == "[100, 167, 500, 667] and [1, 3, 3, 7]"
    for text in ("no marks", "<box>[[1, 2, 3, 4]]</box>", '<point x="1">'):
        assert marked(text, regions) == text
    framed = marked("<ref>cups</ref><box>[<box>, <box>]</box>", regions)  # as InternVL writes them
    assert framed == "<ref>cups</ref><box>[[100, 167, 500, 667], [1, 3, 3, 7]]</box>"
    framed = marked("<box><box></box> and <box><box></box>", regions)  # as Qwen-VL
    assert framed == "<box>[100, 167, 500, 667]</box> and <box>[1, 3, 3, 7]</box>"
    for text, problem in {"<box>": "1 <box> in the response for 2", "<point>": "1 <point>"}.items():
        with user_error(problem):
            marked(text, regions)
    with user_error("<box> in the response, but no regions in the row"):
        marked("<box>", None)


@pytest.mark.parametrize(
    "family, target",
    [("qwen2_5_vl", "[84, 56]: [0, 0, 84, 28]"), ("qwen3_vl", "[1000, 1000]: [0, 0, 1000, 500]")],
)
def test_one_file_trains_all_families(tmp_path, family, target):
    """50 x 30 pixels are 84 x 56 as both see them."""
    folder = write_processor(tmp_path, family)
    Image.new("RGB", (50, 30)).save(tmp_path / "a.png")
    regions = {"boxes": [[0, 0, 50, 15]], "points": [[50, 30]]}
    row = {
        "prompt": "where?",
        "images": ["a.png"],
        "response": "<point>: <box>",
        "regions": regions,
    }
    path, processor = write_rows(tmp_path / "rows.jsonl", [row]), Processor(folder)
    frame = answer_frame(processor)
    (example,) = load_judgements(path, processor, JudgeSettings(), DataArgs(), frame=frame)
    assert example.text == target
    assert processor.decode([example.target]) == [target]
