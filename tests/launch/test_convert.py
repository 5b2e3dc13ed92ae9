"""launch/data/convert.py: converted rows load in the trainers, with the text and pixels that were put in."""

import base64
import json
import random
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from common.data.images import read_image
from common.data.processor import Processor
from common.data.rows import load_prompts, text_column
from common.flags import DataArgs
from common.rewards.judgements import load_judgements
from conftest import ROOT, judge_settings, marked, read_rows, user_error, words, write_json
from helpers import PYTHONS_WORDS, base64_of, encode, noise, odd_value
from launch.data import accounts, convert, foreign_rows
from launch.data.accounts import Account
from launch.data.foreign_messages import PROMPTS, Options
from launch.data.pictures import Images

# ---- Numbers


@pytest.mark.parametrize(
    "number, text",
    [
        ("3", "3"),
        ("3.0", "3"),
        ("-12.0", "-12"),
        ("2.50", "2.5"),
        ("0.00001", "1e-05"),
        ("2e16", "2e+16"),
        ("true", None),
        ("NaN", None),
        ("1e999", None),
    ],
)
def test_a_number_has_one_text_converted_or_not(number, text):
    """None: refused by both."""
    row = json.loads(f'{{"answer": {number}}}')
    readers = (
        lambda: text_column(row, "answer"),
        lambda: foreign_rows.convert({"prompt": "p"} | row, None, Options(), Account())[0][
            "answer"
        ],
    )
    for read in readers:
        if text is None:
            with user_error("must be .* finite number, not"):
                read()
        else:
            assert read() == text


def test_converting_needs_no_torch():
    code = "import sys; from launch.data import convert; from common import user_code; "
    code += "sys.exit('torch' in sys.modules)"  # with --map, too
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# ---- Pictures


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_picture_is_written_as_it_is(tmp_path, form):
    images = Images(tmp_path, "row", tmp_path)
    data = encode(noise(6), form)
    assert images.write(data) == f"{tmp_path.name}/row-0.{form.lower()}"
    assert (tmp_path / f"row-0.{form.lower()}").read_bytes() == data


# ---- Rows


def run(tmp_path, rows: list[dict], *flags: str, name: str = "rows.jsonl") -> list[dict]:
    """Convert rows as a program does; returns what stands in the new file,
    <tmp_path>/out/rows.jsonl, in place of an earlier one. Lines end as on Windows, the last one is blank."""
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    source = tmp_path / name
    source.write_text("".join(json.dumps(row) + "\r\n" for row in rows) + " \r\n")
    convert.main(words(source, "--out", tmp_path / "out", *flags))
    return read_rows(tmp_path / "out" / "rows.jsonl")


def stopped(tmp_path, capsys, rows: list[dict], *flags: str) -> str:
    """What is said of rows whose conversion ends with exit code 2; nothing is left of it."""
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, rows, *flags)
    assert stop.value.code == 2
    assert not list(tmp_path.glob("out*"))
    return capsys.readouterr().err


def load(path, qwen25):
    return load_prompts(str(path), Processor(str(qwen25)), DataArgs(max_prompt_tokens=600))


def assert_pixels(prompt, *images: Image.Image):
    assert len(prompt.images) == len(images)
    for path, image in zip(prompt.images, images):
        assert np.array_equal(np.asarray(read_image(path)), np.asarray(image))


def verl_row(picture) -> dict:
    return dict(
        data_source="geo",
        prompt=[{"role": "user", "content": "<image>Find $x$. Is <image> it?"}],
        images=[picture(noise(10)), picture(noise(11))],
        ability="math",
        reward_model={"style": "rule", "ground_truth": "5"},
        extra_info={"split": "train", "index": 7, "answer": "5"},
    )


def trl_rows(picture) -> list[dict]:
    parts = [
        {"type": "text", "text": "Is "},
        {"type": "image", "image": picture(noise(12))},
        {"type": "text", "text": " like "},
        {"type": "image"},
    ]
    worked = "<think>2 + 1</think><answer> 3 </answer>"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    return [
        {
            "prompt": [{"role": "user", "content": parts}],
            "image": picture(noise(13)),
            "solution": "no",
        },
        {"problem": "How many?", "image": picture(noise(14)), "solution": worked},
        {"messages": messages, "images": None, "solution": 2},
    ]


def check_prompts(prompts):
    """The prompts loaded from `verl_row` and `trl_rows`, written by hand."""
    verl, parts, problem, messages = prompts
    assert (verl.reference, verl.label) == ("5", "geo")
    assert_pixels(verl, noise(10), noise(11))
    assert [part["type"] for part in verl.messages[0]["content"]] == [
        "image",
        "text",
        "image",
        "text",
    ]

    assert parts.reference == "no"
    assert_pixels(parts, noise(12), noise(13))
    assert [part.get("text", "*") for part in parts.messages[0]["content"]] == [
        "Is ",
        "*",
        " like ",
        "*",
    ]

    assert problem.reference == "3"
    assert_pixels(problem, noise(14))
    assert messages.reference == "2"
    assert not messages.images
    assert [message["role"] for message in messages.messages] == ["system", "user"]


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64_of(image)


@pytest.mark.parametrize(
    "picture",
    [
        base64_of,
        data_url,
        lambda image: {"bytes": base64_of(image), "path": None},
        lambda image: {"url": data_url(image)},
    ],
)
def test_verl_and_trl_in_jsonl(tmp_path, qwen25, picture):
    read_by_none = "ability,reward_model.style,extra_info.split"
    rows = run(tmp_path, [verl_row(picture), *trl_rows(picture)], "--keep", read_by_none)
    assert rows[0]["extra_info"] == {"split": "train", "index": 7, "answer": "5"}
    assert rows[0]["ability"] == "math"
    assert rows[0]["reward_model"]["style"] == "rule"
    assert "data_source" not in rows[0]
    assert rows[2]["solution"].startswith("<think>")  # the worked solution stays in the row
    check_prompts(load(tmp_path / "out" / "rows.jsonl", qwen25))


def test_paths_of_pictures(tmp_path, qwen25):
    """Relative to the file or to --image_root; written anew, so that the new folder stands alone."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(encode(noise(1), "JPEG"))
    rows = [
        {"query": "what?", "image": {"path": "a.jpg", "bytes": None}},
        {"query": "what?", "image": "a.jpg"},
        {"query": "what?", "images": [{"image": f"file://{folder}/a.jpg"}]},
    ]
    run(tmp_path, rows, "--image_root", folder)
    expected = read_image(str(folder / "a.jpg"))
    (folder / "a.jpg").unlink()
    for prompt in load(tmp_path / "out" / "rows.jsonl", qwen25):
        assert_pixels(prompt, expected)


def test_labels_columns_and_responses(tmp_path):
    """A label by flag, columns under other names, conversations that end with what the model is to say."""
    dialogue = [{"role": "user", "content": "a?"}, *answered("b")]
    source = [
        {"Text": dialogue, "Image": base64_of(noise(1)), "Gold": 3.5, "pass": {"rate": 0.5}},
        dict(Text="c?", Image=None, Gold="d", label="own", completion="e"),
    ]
    names = "prompt=Text,images=Image,answer=Gold"
    rows = run(tmp_path, source, "--label mine --keep pass --columns", names)
    assert rows[0] == {
        "prompt": [{"role": "user", "content": "a?"}],
        "images": ["images/rows-00000-0.png"],
        "answer": "3.5",
        "response": "b",
        "label": "mine",
        "pass": {"rate": 0.5},
    }
    assert rows[1] == dict(prompt="c?", images=[], answer="d", response="e", label="own")


def test_columns_change_their_names(tmp_path):
    rows = run(tmp_path, [{"prompt": "a", "answer": "q?"}], "--columns answer=prompt,prompt=answer")
    assert rows == [{"prompt": "q?", "images": [], "answer": "a"}]


@pytest.mark.parametrize("ours", ["image", "images"])
def test_the_column_of_images_that_is_named_is_read(tmp_path, ours):
    """MathVista and MathVision have the path of a file that is not there beside the picture."""
    row = {"prompt": "a", "image": "images/1.jpg", "decoded_image": base64_of(noise(1))}
    rows = run(tmp_path, [row], f"--columns {ours}=decoded_image")
    assert rows[0]["images"] == ["images/rows-00000-0.png"]
    assert "decoded_image" not in rows[0]
    assert rows[0]["original_image"] == "images/1.jpg"


def test_videos(tmp_path):
    """A film by its path, a list as frames."""
    (tmp_path / "film.mp4").write_bytes(b"film")
    rows = run(
        tmp_path,
        [
            {"prompt": "<video>what?", "videos": [{"type": "video", "video": "film.mp4"}]},
            {"prompt": "<video>what?", "videos": [[base64_of(noise(1)), base64_of(noise(2))]]},
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "film.mp4"}]}]},
        ],
    )
    assert rows.pop()["prompt"][0]["content"] == [
        {"type": "video", "video": str(tmp_path / "film.mp4")}
    ]
    assert [row["videos"] for row in rows] == [
        [str(tmp_path / "film.mp4")],
        [["images/rows-00001-0.png", "images/rows-00001-1.png"]],
    ]


@pytest.mark.parametrize(
    "system, row, expected",
    json.loads(r"""[
["LLaVA, Qwen-VL, InternVL, VLM-R1",
 {"image": "a.png",
  "conversations": [{"from": "human", "value": "<image>How many?"}, {"from": "gpt", "value": "Say where."},
                    {"from": "human", "value": "On the left."},
                    {"from": "gpt", "value": "<think>2</think><answer> 3 </answer>"}]},
 {"prompt": [{"role": "user", "content": "<image>How many?"},
             {"role": "assistant", "content": "Say where."}, {"role": "user", "content": "On the left."}],
  "answer": "3", "response": "<think>2</think><answer> 3 </answer>"}],
["LLaVA",
 {"image": "a.png",
  "conversations": [{"from": "human", "value": "<image>How many?"}, {"from": "gpt", "value": "0"}]},
 {"prompt": [{"role": "user", "content": "<image>How many?"}], "answer": "0", "response": "0"}],
["lmm-r1, MM-EUREKA",
 {"message": "[{\"role\": \"user\", \"content\": \"<image>How many?\"}, {\"role\": \"assistant\", \"content\": \"Say where.\"}, {\"role\": \"user\", \"content\": \"On the left.\"}]",
  "images": "a.png", "answer": "3"},
 {"prompt": [{"role": "user", "content": "<image>How many?"},
             {"role": "assistant", "content": "Say where."}, {"role": "user", "content": "On the left."}],
  "answer": "3"}],
["lmm-r1",
 {"conversations": [{"role": "user", "content": "<image>How many?"},
                    {"role": "assistant", "content": "Say where."},
                    {"role": "user", "content": "On the left."}],
  "image_urls": ["a.png"], "answer": "3"},
 {"prompt": [{"role": "user", "content": "<image>How many?"},
             {"role": "assistant", "content": "Say where."}, {"role": "user", "content": "On the left."}],
  "answer": "3"}],
["alpaca, LLaMA-Factory",
 {"instruction": "Add.", "input": "1 + 1", "output": "2", "system": "Be brief.",
  "history": [["Hi", "Hello"]], "images": ["a.png"]},
 {"answer": "2", "response": "2",
  "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
             {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Add.\n1 + 1"}]}],
["alpaca",
 {"instruction": "Add.", "input": "", "output": "2", "system": "", "image": "a.png"},
 {"prompt": "Add.", "answer": "2", "response": "2"}],
["ms-swift",
 {"query": "2?", "response": "3", "history": [["1?", "2"]], "images": ["a.png"]},
 {"answer": "3", "response": "3",
  "prompt": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"},
             {"role": "user", "content": "2?"}]}],
["image_url by value",
 {"messages": [{"role": "user",
                "content": [{"type": "image_url", "value": "a.png"}, {"type": "text", "value": "what?"}]}]},
 {"prompt": [{"role": "user",
              "content": [{"type": "image", "image": "images/rows-00000-0.png"},
                          {"type": "text", "text": "what?"}]}]}],
["R1-Reward, the whole question beside a short one",
 {"message": "[{\"role\": \"user\", \"content\": \"<image>How many?\"}]", "question": "How many?",
  "images": "a.png", "answer": ["<answer>3</answer>"]},
 {"prompt": [{"role": "user", "content": "<image>How many?"}], "original_question": "How many?",
  "answer": "3", "solution": "<answer>3</answer>"}],
["tool calls",
 {"messages": [{"role": "user", "content": "Hi"},
               {"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]},
               {"role": "tool", "content": "red"}],
  "image": "a.png"},
 {"prompt": [{"role": "user", "content": "Hi"},
             {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
             {"role": "tool", "content": "red"}]}],
["GSM8K",
 {"question": "How many?", "answer": "She sold 48/2 = <<48/2=24>>24 clips.\n#### 72", "image": "a.png"},
 {"prompt": "How many?", "answer": "72", "solution": "She sold 48/2 = <<48/2=24>>24 clips.\n#### 72"}],
["MATH",
 {"problem": "How many?", "solution": "So $\\boxed{\\frac{1}{2}}$, yes, $\\boxed{\\frac{1}{2}}$.",
  "image": "a.png"},
 {"prompt": "How many?", "answer": "\\frac{1}{2}",
  "solution": "So $\\boxed{\\frac{1}{2}}$, yes, $\\boxed{\\frac{1}{2}}$."}],
["MATH, braces in braces",
 {"problem": "2?", "solution": "So $\\boxed{\\frac{\\sqrt{a^{2}+b^{\\frac{1}{2}}}}{2}}$."},
 {"answer": "\\frac{\\sqrt{a^{2}+b^{\\frac{1}{2}}}}{2}", "prompt": "2?",
  "solution": "So $\\boxed{\\frac{\\sqrt{a^{2}+b^{\\frac{1}{2}}}}{2}}$."}],
["MATH, no braces",
 {"problem": "2?", "solution": "So $\\boxed 2$."},
 {"answer": "2", "prompt": "2?", "solution": "So $\\boxed 2$."}],
["MATH, box",
 {"problem": "2?", "solution": "\\box{2}."},
 {"answer": "2", "prompt": "2?", "solution": "\\box{2}."}],
["MATH, fbox",
 {"problem": "2?", "solution": "\\fbox{2}."},
 {"answer": "2", "prompt": "2?", "solution": "\\fbox{2}."}],
["OpenAI's developer",
 {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
 {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}],
["a completion of several messages",
 {"prompt": [{"role": "user", "content": "Hi"}],
  "completion": [{"role": "assistant", "content": "Who?"}, {"role": "user", "content": "I"},
                 {"role": "assistant", "content": "Ah"}]},
 {"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Who?"},
             {"role": "user", "content": "I"}],
  "response": "Ah", "answer": "Ah"}],
["FineVision, The Cauldron",
 {"images": ["a.png"], "texts": [{"user": "1?", "assistant": "2", "source": "s"},
                                 {"user": "3?", "assistant": "4", "source": "s"}]},
 {"prompt": [{"role": "user", "content": "<image>1?"}, {"role": "assistant", "content": "2"},
             {"role": "user", "content": "3?"}],
  "response": "4", "answer": "4", "label": "s"}],
["OlympiadBench",
 {"question": "x?", "final_answer": ["3", "4"]},
 {"prompt": "x?", "answer": "3, 4"}],
["TextVQA",
 {"question": "x?", "answers": ["a", "b", "b"]},
 {"prompt": "x?", "answer": "b", "answers": ["a", "b", "b"]}],
["a response with several final answers",
 {"prompt": "x?", "response": "\\boxed{1}, \\boxed{2}"},
 {"prompt": "x?", "response": "\\boxed{1}, \\boxed{2}"}],
["an answer that the solution marks, too",
 {"problem": "x?", "answer": "2", "solution": "It is \\boxed{2}."},
 {"prompt": "x?", "answer": "2", "solution": "It is \\boxed{2}."}]
]"""),
)
def test_rows_of_other_systems(tmp_path, system, row, expected):
    noise(1).save(tmp_path / "a.png")
    (converted,) = run(tmp_path, [row])
    images = ["images/rows-00000-0.png"] if {"image", "images", "image_urls"} & row.keys() else []
    assert converted == {"images": images} | expected


@pytest.mark.parametrize(
    "system, row, flags, expected",
    marked(
        map(
            tuple,
            json.loads(r"""[
["ms-swift 3",
 {"messages": [{"role": "user", "content": "<image>Find <ref-object>."},
               {"role": "assistant", "content": "<ref-object> at <bbox>, <bbox>"}],
  "objects": {"ref": ["a \"cat\"", "a"], "bbox": [[1, 2, 3, 4], [5, 6, 7, 8]]}},
 "",
 {"prompt": [{"role": "user", "content": "<image>Find a \"cat\"."}], "response": "a at <box>, <box>",
  "regions": {"boxes": [[1, 2, 3, 4], [5, 6, 7, 8]], "labels": ["a \"cat\"", "a"]}}],
["ms-swift, a point",
 {"query": "Where?", "objects": {"bbox": [[0.1, 0.2]], "bbox_type": "norm1"}},
 "",
 {"regions": {"points": [[0.1, 0.2]], "space": "1"}}],
["ms-swift before 3",
 {"query": "Where?",
  "objects": "[{\"caption\": \"a cat\", \"bbox\": [1, 2, 3, 4], \"bbox_type\": \"real\", \"image\": 0}]"},
 "",
 {"regions": {"boxes": [[1, 2, 3, 4]], "labels": ["a cat"]}}],
["ms-swift before 3, thousandths",
 {"query": "Where?", "objects": "[{\"caption\": \"a\", \"bbox\": [1, 2, 3, 4], \"bbox_type\": \"norm_1000\"}]"},
 "",
 {"regions": {"boxes": [[1, 2, 3, 4]], "space": "1000", "labels": ["a"]}}],
["ms-swift, nothing there",
 {"query": "Where?", "objects": {"ref": [], "bbox": []}},
 "",
 {"regions": {"boxes": []}}],
["VLM-R1, conversations",
 {"conversations": [{"from": "human", "value": "<image>How many?"},
                    {"from": "gpt", "value": "[1, 2.5, 3, 4]"}]},
 "--boxes corners",
 {"regions": {"boxes": [[1, 2.5, 3, 4]]}, "response": "<box>"}],
["VLM-R1, problems",
 {"problem": "Where?", "solution": [1, 2, 3, 4], "normalized_solution": [9, 9, 9, 9]},
 "--boxes corners --keep normalized_solution",
 {"regions": {"boxes": [[1, 2, 3, 4]]}, "normalized_solution": [9, 9, 9, 9]}],
["Vero",
 {"data_source": "refcocog", "prompt": [{"role": "user", "content": "<image>Find the cup."}],
  "ability": "counting_grounding_search",
  "reward_model": {"style": "rule", "ground_truth": "[{\"bbox_2d\": [1, 2, 3.5, 4], \"label\": \"cup\"}]"},
  "extra_info": {"reward_type": "grounding", "tolerance": null}},
 "--keep ability,data_source,reward_model",
 {"regions": {"boxes": [[1, 2, 3.5, 4]], "labels": ["cup"]}, "label": "grounding",
  "data_source": "refcocog"}],
["Vero, JSON that is no Python",
 {"query": "Where?", "answer": "[{\"bbox_2d\": [1, 2, 3, 4], \"label\": null}]"},
 "",
 {"regions": {"boxes": [[1, 2, 3, 4]]}}],
["Vero, a number",
 {"data_source": "refcocog", "prompt": [{"role": "user", "content": "<image>Find the cup."}],
  "ability": "counting_grounding_search", "reward_model": {"ground_truth": "95"},
  "extra_info": {"reward_type": "numeric", "tolerance": 0.0}},
 "--keep ability,data_source",
 {"label": "numeric", "tolerance": 0.0, "answer": "95"}],
["Visual-RFT, by --map",
 {"problem": "Where?", "solution": [{"Position": [1, 2, 3, 4], "Confidence": 1}]},
 "",
 {"regions": {"boxes": [[1, 2, 3, 4]], "space": "1000"}}],
["RefCOCO as COCO has it",
 {"question": "Where?", "bbox": [10, 20, 30, 40], "image_id": 7},
 "--boxes sizes",
 {"regions": {"boxes": [[10, 20, 40, 60]]}, "image_id": 7}],
["ScreenSpot",
 {"instruction": "Close.", "bbox": [0.1, 0.2, 0.3, 0.4]},
 "--boxes corners --space 1",
 {"regions": {"boxes": [[0.1, 0.2, 0.3, 0.4]], "space": "1"}}],
["UGround",
 {"conversations": [{"from": "human", "value": "<image>Where?"}, {"from": "gpt", "value": "(450, 613)"}]},
 "--boxes corners --space 1000",
 {"regions": {"points": [[450, 613]], "space": "1000"}, "response": "<point>"}],
["InternVL",
 {"query": "Where?", "response": "<ref>cup</ref><box>[[1, 2, 3, 4]]</box>"},
 "--boxes corners --space 1000",
 {"regions": {"boxes": [[1, 2, 3, 4]], "space": "1000", "labels": ["cup"]},
  "response": "<ref>cup</ref><box>[<box>]</box>"}],
["Qwen2-VL",
 {"query": "Where?", "answer": "<|box_start|>(1,2),(3,4)<|box_end|>"},
 "--boxes corners --space 1000",
 {"regions": {"boxes": [[1, 2, 3, 4]], "space": "1000"}}],
["Qwen3-VL, fenced",
 {"query": "Where?", "answer": "```json\n[{\"bbox_2d\": [1, 2, 3, 4], \"label\": \"cup\"}]\n```"},
 "",
 {"regions": {"boxes": [[1, 2, 3, 4]], "labels": ["cup"]}}],
["Aguvis",
 {"query": "Where?", "response": "pyautogui.click(x=0.5, y=0.25)"},
 "--boxes corners --space 1",
 {"regions": {"points": [[0.5, 0.25]], "space": "1"}, "response": "pyautogui.click(x=0.5, y=0.25)"}],
["no regions: a word", {"query": "Which?", "answer": "red"}, "--boxes corners", {"answer": "red"}],
["GUI-R1",
 {"instruction": "Click.", "gt_bbox": [30.0, 20.0], "history": "None"},
 "--boxes sizes",
 {"prompt": "Click.", "history": "None", "regions": {"points": [[30, 20]]}}],
["no regions: points without --boxes", {"query": "Sort.", "answer": "(1, 2)"}, "", {"answer": "(1, 2)"}],
["no regions: a list", {"query": "Sort.", "answer": "[1, 2, 3, 4]"}, "", {"answer": "[1, 2, 3, 4]"}],
["no regions: an action", {"query": "Do.", "answer": "{\"ACTION\": \"CLICK\", \"MARK\": [3, 4]}"}, "", {}],
["no regions: names", {"query": "Name.", "objects": ["cat", "dog"]}, "--keep objects",
 {"objects": ["cat", "dog"]}],
["PixMo",
 {"question": "Where?", "points": [{"x": 1.5, "y": 20}, {"x": 3, "y": 4}], "label": "cup"},
 "--columns boxes=points --space 100",
 {"regions": {"points": [[1.5, 20], [3, 4]], "space": "100"}, "label": "cup"}],
["ms-swift, more names than boxes",
 {"query": "<image>Is <ref-object> there?", "images": [],
  "response": "<ref-object> at <bbox>, <ref-object> at <bbox>",
  "objects": {"ref": ["a cup", "a cat", "a dog"], "bbox": [[1, 2, 3, 4], [5, 6, 7, 8]]}},
 "",
 {"prompt": "<image>Is a cup there?", "response": "a cat at <box>, a dog at <box>",
  "answer": "a cat at <box>, a dog at <box>",
  "regions": {"boxes": [[1, 2, 3, 4], [5, 6, 7, 8]]}}]
]"""),
        ),
        daily=4,
    ),
)
def test_regions_of_other_systems(tmp_path, system, row, flags, expected):
    (converted,) = run(tmp_path, [row], *([flags] if flags else []))
    regions = expected.pop("regions", None)
    assert converted.get("regions") == (regions and {"space": "file"} | regions)
    assert converted | expected == converted


def test_bytes_are_never_text(tmp_path):
    """In a column that is only kept."""
    images, account = Images(tmp_path, "row", tmp_path), Account()
    row = {"prompt": "x", "preview": {"bytes": b"\x89PNG", "path": None}, "when": 5}
    (converted,) = foreign_rows.convert(row, images, Options(), account)
    written = json.dumps(converted, default=convert.plain)
    assert json.loads(written) == row | {"images": [], "preview": {"bytes": None, "path": None}}
    assert account.unnamed([]) == ["preview.bytes", "when"]


@pytest.mark.parametrize(
    "name, content",
    [
        ("rows.json", json.dumps([{"prompt": "x"}, {"prompt": "y"}], indent=2)),
        ("rows.jsonl", json.dumps([{"prompt": "x"}, {"prompt": "y"}])),
        ("rows.json", '{"prompt": "x"}\n{"prompt": "y"}\n'),
        ("rows.jsonl", '\n{"prompt": "x"}\n\n{"prompt": "y"}\n'),
        ("rows.jsonl", '{\n  "prompt": "x"\n}\n{\n  "prompt": "y"\n}\n'),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_json_in_other_layouts(tmp_path, name, content, encoding):
    (tmp_path / name).write_text(content, encoding=encoding)
    convert.main(words(tmp_path / name, "--out", tmp_path / "out"))
    assert [row["prompt"] for row in read_rows(tmp_path / "out" / "rows.jsonl")] == ["x", "y"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf_16_is_told(tmp_path, capsys, encoding):
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": "x"}], indent=2), encoding=encoding)
    with pytest.raises(SystemExit):
        convert.main(words(tmp_path / "rows.json", "--out", tmp_path / "out"))
    assert "rows.json is text in UTF-16: iconv -f UTF-16 -t UTF-8" in capsys.readouterr().err


def test_the_root_is_that_of_the_trainers(tmp_path, qwen25, capsys):
    """Beside the file, then in --image_root, and nowhere else: rows go through both with the same flag."""
    for folder in ("root", "elsewhere"):
        (tmp_path / folder).mkdir()
        noise(1).save(tmp_path / folder / "a.png")
    (tmp_path / "root" / "link.png").symlink_to(tmp_path / "elsewhere" / "a.png")
    rows = [{"prompt": "x", "image": "a.png"}, {"prompt": "x", "image": "root/a.png"}]
    converted = run(tmp_path, rows, "--image_root", tmp_path / "root")
    assert [len(row["images"]) for row in converted] == [1, 1]
    args = DataArgs(max_prompt_tokens=600, image_root=str(tmp_path / "root"))
    loaded = load_prompts(str(tmp_path / "rows.jsonl"), Processor(str(qwen25)), args)
    assert [prompt.images for prompt in loaded] == [(str(tmp_path / "root" / "a.png"),)] * 2
    for image in ("elsewhere/a.png", "link.png", str(tmp_path / "elsewhere" / "a.png")):
        write_json(tmp_path / "rows.jsonl", {"prompt": "x", "image": image})
        with pytest.raises(SystemExit):
            convert.main(
                words(
                    tmp_path / "rows.jsonl",
                    "--out",
                    tmp_path / "more",
                    "--image_root",
                    tmp_path / "root",
                )
            )
        assert "lies outside of --image_root" in capsys.readouterr().err


# ---- Pairs


def answered(text: str) -> list[dict]:
    return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]


def asked(text: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def pairs() -> list[dict]:
    """Preferences in every form, the better response always "good N"."""
    picture = base64_of(noise(20))
    question = asked("which?")
    plain = dict(
        prompt="which?", image=picture, chosen="good 0", rejected="bad", data_source="plain"
    )
    embedded = [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_url(noise(20))}},
                {"type": "text", "text": "which?"},
            ],
        }
    ]
    trl = {"prompt": embedded, "chosen": answered("good 1"), "rejected": answered("bad")}
    whole = {
        "images": [picture],
        "chosen": question + answered("good 2"),
        "rejected": question + answered("bad"),
    }
    ranked = {"query": "which?", "image": picture}
    bench = ranked | dict(response=["good 3", "bad"], human_ranking=[0, 1], query_source="bench")
    second = ranked | {"response": ["bad", "good 4"], "human_ranking": [1, 0]}
    tie = ranked | {"response": ["good 5", "bad"], "human_ranking": [0, 0]}
    swift = {
        "images": [picture],
        "messages": question + answered("good 6"),
        "rejected_messages": question + answered("bad"),
    }
    swift_2 = swift | {"messages": question + answered("good 7"), "rejected_response": "bad"}
    swift_2.pop("rejected_messages")
    swift_3 = {
        "images": [picture],
        "query": "which?",
        "response": "good 8",
        "rejected_response": "bad",
    }
    return [plain, trl, whole, bench, second, tie, swift, swift_2, swift_3]


def test_pairs_are_judgements(tmp_path, qwen25):
    rows = run(tmp_path, pairs())
    for number, row in enumerate(rows):
        better = {"A": 0, "B": 1, "tie": row["responses"].index(f"good {number}")}[row["preferred"]]
        assert row["responses"][better] == f"good {number}"
        assert row["responses"][1 - better] == "bad"
    assert [row["preferred"] == "tie" for row in rows] == [k == 5 for k in range(9)]
    assert [row.get("source") for row in rows] == ["plain", None, None, "bench", *[None] * 5]

    processor = Processor(str(qwen25))
    loaded = load_judgements(
        str(tmp_path / "out" / "rows.jsonl"), processor, judge_settings(), DataArgs()
    )
    judgements = [prompt for prompt, *_ in loaded]
    assert len(judgements) == 2 * len(rows)  # both orders
    for number, row in enumerate(rows):
        prompt = judgements[2 * number]
        assert prompt.reference == row["preferred"]
        assert prompt.label == "answers"
        assert "which?" in prompt.text
        assert f"good {number}" in prompt.text
        assert_pixels(prompt, noise(20))


def test_the_order_of_a_pair_is_a_fair_coin(tmp_path):
    rows = run(
        tmp_path,
        [dict(prompt=f"question {k}", chosen="yes", rejected="no", score=k) for k in range(400)],
        "--keep score",
    )
    assert all(row["responses"]["AB".index(row["preferred"])] == "yes" for row in rows)
    assert [row["original_score"] for row in rows] == list(range(400))
    assert 160 < [row["preferred"] for row in rows].count("A") < 240  # four standard deviations


def test_a_dialogue_in_a_pair_is_one_text(tmp_path):
    dialogue = [
        {"role": "system", "content": "Be kind."},
        *asked("what?"),
        *answered("a cat"),
        {"role": "user", "content": "Sure?"},
    ]
    pair = dict(prompt=dialogue, image=base64_of(noise(1)), chosen="yes", rejected="no")
    (row,) = run(tmp_path, [pair])
    assert (
        row["prompt"] == "system: Be kind.\n\nuser: <image>what?\n\nassistant: a cat\n\nuser: Sure?"
    )


@pytest.mark.parametrize(
    "form", ["bytes", "messages", "placeholders", "paths", "ranking", "data URL"]
)
def test_two_generated_pictures_are_a_pair_of_pictures(tmp_path, qwen25, form):
    """Of the kind pictures, in either order; never two responses that say <image>."""
    good, bad = noise(40), noise(41)
    for name, image in (("good.png", good), ("bad.png", bad)):
        image.save(tmp_path / name)

    def messages(image):
        part = {"type": "image_url", "image_url": {"url": data_url(image)}}
        return [{"role": "assistant", "content": [part]}]

    sides = {
        "bytes": dict(chosen={"bytes": base64_of(good)}, rejected={"bytes": base64_of(bad)}),
        "messages": dict(chosen=messages(good), rejected=messages(bad)),
        "placeholders": dict(
            chosen="<image>", rejected="<image>", images=[base64_of(good), base64_of(bad)]
        ),
        "paths": dict(chosen="good.png", rejected="bad.png"),
        "data URL": dict(chosen=data_url(good), rejected=data_url(bad)),
        "ranking": dict(
            response=["<image>"] * 2,
            human_ranking=[0, 1],
            images=[base64_of(good), base64_of(bad)],
        ),
    }[form]
    rows = run(tmp_path, [{"prompt": f"a cat {k}"} | sides for k in range(8)])
    for row in rows:
        assert "responses" not in row
        assert row["images"]["AB".index(row["preferred"])] == "images/rows-00000-0.png"
        assert set(row["images"]) == {"images/rows-00000-0.png", "images/rows-00000-1.png"}
    assert {row["preferred"] for row in rows} == {"A", "B"}
    path = str(tmp_path / "out" / "rows.jsonl")
    loaded = load_judgements(path, Processor(str(qwen25)), judge_settings(), DataArgs())
    assert {prompt.label for prompt, *_ in loaded} == {"pictures"}
    assert_pixels(loaded[0].prompt, *((good, bad) if rows[0]["preferred"] == "A" else (bad, good)))


# ---- What is not read


MATTERS = {
    "rejected_conversations": [1],
    "output_preference": 2,
    "chosenResponse": "e",
    "better_response_id": 1,
    "best_image_uid": 0,
    "kto_tag": False,
    "advantage": -0.5,
    "passed": True,
    "hallucination": 0,
    "winner": "model_a",
    "points": [{"x": 1, "y": 2}],
    "caption": "a red square",
    "image_1": "a.png",
    "judged": {"by": {"rating": 5}},
}


@pytest.mark.parametrize("column", MATTERS)
def test_what_could_change_what_is_learned_ends_the_conversion(tmp_path, capsys, column):
    """With the flags to paste. It stays in the row, unread, or leaves it, as they say."""
    rows = [
        {"prompt": "a", "response": "b", column: MATTERS[column]},
        {"prompt": "c", "response": "d"},
    ]
    name = "judged.by.rating" if column == "judged" else column
    problem = stopped(tmp_path, capsys, rows)
    assert re.search(rf"\n  {name}  1 of 2 rows  ", problem)
    assert f"--keep {name}\n" in problem
    assert f"--drop {name}\n" in problem
    assert run(tmp_path, rows, "--keep", name)[0][column] == MATTERS[column]
    assert re.search(rf"not read, and kept in the rows:\n  {name}  1 of 2", capsys.readouterr().out)
    assert run(tmp_path, rows, "--drop", name)[0].get(column) in (None, {"by": {}})


HARMLESS = {
    "id": ["a-1", "a-2"],
    "image_id": [33471, 33471],
    "url": ["https://x.org/a.png", "https://x.org/b.png"],
    "sha": ["0123456789abcdef", "0123456789abcdee"],
    "when": ["2024-05-01", "2024-05-02T10:00:00Z"],
    "split": ["train", "train"],
    "version": [2, 2],
    "nothing": ["", []],
    "short": ["a cat?", "a dog?"],
}


def test_ids_urls_and_constants_are_listed_alone(tmp_path, capsys):
    rows = [
        {"prompt": f"<image>A {pet}?", "image": base64_of(noise(1)), "answer": "yes"}
        | {name: values[k] for name, values in HARMLESS.items()}
        for k, pet in enumerate(["cat", "dog"])
    ]
    converted = run(tmp_path, rows)
    assert [row["split"] for row in converted] == ["train", "train"]
    table = capsys.readouterr().out.partition("not read, and kept in the rows:\n")[2]
    assert [line.split()[0] for line in table.splitlines()] == [
        name for name in HARMLESS if name != "nothing"
    ]
    assert re.search(r"  id +2 of 2 rows  'a-1'\n", table)
    problem = stopped(tmp_path, capsys, [rows[0], rows[1] | {"split": "test", "version": 3}])
    assert re.findall(r"--keep (.*)", problem) == ["split,version"]


def test_an_account_that_is_clear_ends_early(tmp_path, capsys, monkeypatch):
    """Not after all pictures of a large set."""
    monkeypatch.setattr(accounts, "ENOUGH", 2)
    rows = [{"prompt": "x", "answer": "y", "score": k} for k in range(4)]
    assert "score  2 of 2 rows" in stopped(tmp_path, capsys, rows)


def test_a_kept_column_replaces_none_of_ours(tmp_path):
    row = {"prompt": "x", "completion": "a", "response": "b", "score": 1}
    (converted,) = run(tmp_path, [row], "--keep response,score")
    assert (converted["response"], converted["original_response"]) == ("a", "b")
    assert "score" not in converted  # a judge's row would have it
    assert converted["original_score"] == 1


def test_choices_that_are_called_answers_are_no_truths(tmp_path):
    """SAT's: words and anls of launch/reward_vision.py take any of `answers`."""
    row = {"question": "x?", "answers": ["left", "right"], "correct_answer": "right"}
    (converted,) = run(tmp_path, [row], "--columns answer=correct_answer --keep answers")
    assert converted == {"prompt": "x?", "images": [], "answer": "right"} | {
        "original_answers": ["left", "right"]
    }


def test_a_column_that_columns_replaces_is_listed(tmp_path, capsys):
    rows = run(tmp_path, [{"prompt": "x", "answer": "a", "label": "b"}], "--columns answer=label")
    assert rows == [{"prompt": "x", "images": [], "answer": "b", "original_answer": "a"}]
    assert "original_answer  1 of 1 rows  'a'" in capsys.readouterr().out


MESSAGE_KEYS = [{"loss": False}, {"weight": 0}, {"kto_tag": False}]


@pytest.mark.parametrize("key", MESSAGE_KEYS)
def test_keys_of_messages_are_read_or_end_the_conversion(tmp_path, capsys, key):
    (name,) = key
    first = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"} | key]
    rows = [{"messages": [*first, {"role": "user", "content": "3?"}, *answered("4")]}]
    assert f"--drop messages.{name}\n" in stopped(tmp_path, capsys, rows)
    (row,) = run(tmp_path, rows, "--drop", f"messages.{name}")
    assert row["prompt"][1] == {"role": "assistant", "content": "2"}
    assert "1 answers are context alone: --turns all has them learned" in capsys.readouterr().out
    # of the message to imitate, it would be lost
    problem = stopped(tmp_path, capsys, [{"messages": first}])
    assert f"row 1: the message to imitate holds more than a text, {name}: " in problem


def test_all_turns_are_kept_whole(tmp_path):
    """With what says which of them are learned."""
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "2", "loss": False},
        {"role": "user", "content": "3?"},
        {"role": "assistant", "content": "4", "reasoning_content": "3 + 1", "weight": 1},
    ]
    rows = [
        {"messages": messages},
        {"prompt": "5?", "response": "6"},
        {"prompt": "7?", "answer": "8"},
    ]
    assert run(tmp_path, rows, "--turns all") == [
        {"messages": messages, "images": []},
        {"messages": [messages[0] | {"content": "5?"}, *map(plain_turn, "6")], "images": []},
        {"prompt": "7?", "images": [], "answer": "8"},
    ]


def plain_turn(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_a_message_to_imitate_is_a_text(tmp_path, capsys):
    thought = {"role": "assistant", "content": "4", "reasoning_content": "3 + 1"}
    picture = {"role": "assistant", "content": [{"type": "image", "image": base64_of(noise(1))}]}
    for message, problem in (
        (thought, "holds more than a text, reasoning_content: keep messages whole by --turns all"),
        (picture, "is a text, without images"),
    ):
        row = {"messages": [{"role": "user", "content": "3?"}, message]}
        assert f"the message to imitate {problem}".replace("the", "") in stopped(
            tmp_path, capsys, [row]
        ).replace("a message", " message")


@pytest.mark.slow
def test_nulls_of_a_table_are_not_written(tmp_path, pyarrow):
    """A table gives each call the arguments of all others."""

    def calling(**arguments) -> dict:
        call = {"function": {"name": "look", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    rows = [
        {
            "messages": [
                {"role": "user", "content": "x"},
                calling(x=1),
                {"role": "tool", "content": "y"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "x"},
                calling(y=2),
                {"role": "tool", "content": "y"},
            ]
        },
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    convert.main(words(tmp_path / "rows.parquet", "--out", tmp_path / "out"))
    converted = read_rows(tmp_path / "out" / "rows.jsonl")
    assert [row["prompt"] for row in converted] == [row["messages"] for row in rows]


# ---- Preferences


HELPSTEER = [
    {"prompt": f"question {k}", "response1": f"first {k}", "response2": f"second {k}"}
    | {"overall_preference": strength}
    for k, strength in enumerate([-3, -1, 0, 1, 2])
]


def preferred_texts(rows: list[dict]) -> list[str]:
    return [
        "tie"
        if row["preferred"] == "tie"
        else row["responses"]["AB".index(row["preferred"])].split()[0]
        for row in rows
    ]


@pytest.mark.parametrize("named", ["", ",chosen=response1,rejected=response2"])
def test_advice_on_a_preference_is_right_for_every_row(tmp_path, capsys, named):
    """HelpSteer3: below 0 the first response is better. What is advised may be pasted."""
    rows = [{"asked" if name == "prompt" else name: row[name] for name in row} for row in HELPSTEER]
    problem = stopped(tmp_path, capsys, rows, f"--columns prompt=asked{named}")
    advised = re.search(r"(--columns prompt=asked\S+( --preferred_is sign)?)", problem)[1]
    assert "--keep" not in problem  # it would have the first response win every row
    rows = run(tmp_path, rows, advised)
    assert preferred_texts(rows) == ["first", "first", "tie", "second", "second"]


def test_a_number_decides_nothing_unless_its_meaning_is_said(tmp_path, capsys):
    """1 may be the first response, or stand above 0."""
    columns = "--columns responses=response1+response2,preferred=overall_preference"
    rows = [HELPSTEER[3]]
    assert "preferred is a number, 1: --preferred_is sign if" in stopped(
        tmp_path, capsys, rows, columns
    )
    assert preferred_texts(run(tmp_path, rows, columns, "--preferred_is sign")) == ["second"]
    assert preferred_texts(run(tmp_path, rows, columns, "--preferred_is number")) == ["first"]
    problem = stopped(tmp_path, capsys, HELPSTEER[:1], columns, "--preferred_is number")
    assert "preferred is -3, which ends the name of none of response1, response2" in problem


@pytest.mark.parametrize(
    "label, side",
    [
        ("A>B", "first"),
        ("B>>A", "second"),
        ("[[A<B]]", "second"),
        ("A=B", "tie"),
        ("a", "first"),
        ("model_b", "second"),
        ("Response A", "first"),
        ("tie", "tie"),
        ("tie (bothbad)", "tie"),
        ("model_b_text", "second"),  # the name of the column
        ("good", None),
        (True, None),
    ],
)
def test_a_label_decides_the_side(tmp_path, capsys, label, side):
    row = {"prompt": "x", "model_a_text": "first", "model_b_text": "second", "verdict": label}
    columns = "--columns responses=model_a_text+model_b_text,preferred=verdict"
    if side is None:
        assert "names neither side" in stopped(tmp_path, capsys, [row], columns)
    else:
        assert preferred_texts(run(tmp_path, [row], columns)) == [side]


def test_a_label_that_names_a_side_is_no_label(tmp_path, capsys):
    rows = [{"prompt": "x", "response_A": "first", "response_B": "second", "label": "B>A"}]
    advised = "--columns responses=response_A+response_B,preferred=label"
    assert advised in stopped(tmp_path, capsys, rows)
    (row,) = run(tmp_path, rows, advised)
    assert preferred_texts([row]) == ["second"]
    assert "source" not in row


def test_a_preference_that_remains_in_a_pair_ends_the_conversion(tmp_path, capsys):
    row = {"prompt": "x", "chosen": "a", "rejected": "b"}
    for column, value in {
        "score": 1,
        "winner": "B",
        "agreed": False,
        "rejected_images": ["c"],
    }.items():
        assert f"\n  {column}  2 of 2 rows" in stopped(
            tmp_path, capsys, [row | {column: value}] * 2
        )


def test_conversations_of_an_arena_keep_their_beginning(tmp_path):
    turns = [plain_turn("a cat"), {"role": "user", "content": "Sure?"}]
    asked_first = {"role": "user", "content": "what?"}
    row = {f"conversation_{side}": [asked_first, *turns, plain_turn(side)] for side in "ab"}
    columns = "--columns responses=conversation_a+conversation_b,preferred=winner"
    (converted,) = run(tmp_path, [row | {"winner": "model_b"}], columns)
    assert converted["prompt"] == "user: what?\n\nassistant: a cat\n\nuser: Sure?"
    assert (converted["responses"], converted["preferred"]) == (["a", "b"], "B")


@pytest.mark.parametrize("rejected", [["b", "c"], [{"role": "assistant", "content": "b"}]])
def test_rejected_responses_of_ms_swift(tmp_path, rejected):
    """Messages, or several texts, which are a pair each."""
    rows = run(tmp_path, [{"query": "x", "response": "good", "rejected_response": rejected}])
    worse = ["b", "c"][: len(rejected)]
    assert [sorted(row["responses"]) for row in rows] == [[text, "good"] for text in worse]
    assert preferred_texts(rows) == ["good"] * len(rows)
    talk = [{"role": "user", "content": "x"}, plain_turn("good")]
    again = run(tmp_path, [{"messages": talk, "rejected_response": rejected}])
    assert again == rows


def test_what_both_sides_begin_with_belongs_to_the_prompt(tmp_path, capsys):
    """Not only the last message of a side counts."""
    ask, told = {"role": "user", "content": "Sure?"}, plain_turn("a cat")
    row = {"prompt": [{"role": "user", "content": "what?"}]}
    row |= {"chosen": [told, ask, plain_turn("yes")], "rejected": [told, ask, plain_turn("no")]}
    (converted,) = run(tmp_path, [row])
    assert converted["prompt"] == "user: what?\n\nassistant: a cat\n\nuser: Sure?"
    repeated = {
        "prompt": "what?",
        "chosen": [*row["prompt"], told],
        "rejected": [*row["prompt"], ask | told],
    }
    assert run(tmp_path, [repeated])[0]["prompt"] == "what?"
    row["rejected"] = [plain_turn("a dog"), ask, plain_turn("no")]
    assert "must begin with the same messages" in stopped(tmp_path, capsys, [row])


# ---- Choices and other truths


@pytest.mark.parametrize(
    "source, row, message",
    marked(
        map(
            tuple,
            json.loads(r"""[
["ScienceQA", {"question": "Which is it?", "choices": ["solid", "liquid"], "answer": 1}, "HIDDEN"],
["MMBench", {"question": "Which?", "A": "left", "B": "right", "C": null, "answer": "A"}, "HIDDEN"],
["SEED-Bench", {"question": "Which?", "choice_a": "left", "choice_b": "right", "answer": "A"}, "HIDDEN"],
["NExT-QA", {"question": "Why?", "a0": "left", "a1": "right", "answer": 3}, "HIDDEN"],
["MVBench", {"question": "Where?", "candidates": ["left", "right"], "answer": "left"}, "HIDDEN"],
["Video-MME", {"question": "What?", "options": ["A. Apples.", "B. Candles."], "answer": "B"}, "HIDDEN"],
["We-Math", {"question": "What?", "option": "A. 3; B. 4", "answer": "B"}, "HIDDEN"],
["PMC-VQA", {"question": "What?", "Choice A": "left", "Choice B": "up", "answer": "B"}, "HIDDEN"],
["STAR", {"question": "What?", "choices": [{"choice_id": 0, "choice": "bed"}], "answer": "B"}, "HIDDEN"],
["a pair", {"prompt": "?", "choices": ["red", "tan"], "chosen": "red", "rejected": "tan"},
 "HIDDEN"],
["CV-Bench", {"prompt": "How many?\n(A) 1\n(B) 2", "choices": ["1", "2"], "answer": "(B)"}, ""],
["MathVista", {"query": "x?\n(A) 145°\n(B) 35°", "choices": ["145°", "35°"], "answer": "145°"}, ""],
["letters", {"question": "x? (A) Left (B) Up", "options": ["A. left", "B. up"], "answer": "B"}, ""],
["MathVision", {"question": "How many?", "options": [], "answer": "7"}, ""],
["MathVision, pictures", {"question": "Which?", "options": ["A", "B", "C"], "answer": "C"}, ""],
["numbers", {"question": "2, 3 or 4?", "options": [2.0, 3, 4], "answer": 3}, ""],
["an index", {"question": "A. left B. right", "options": ["left", "right"], "answer": 1}, "NUMBERED"],
["AI2D", {"question": "A. left B. right", "options": ["left", "right"], "answer": "1"}, "NUMBERED"],
["numbers of the prompt", {"question": "1 or 2?", "options": ["1", "2"], "answer": "1"}, ""]
]"""),
        ),
        daily=9,
    ),
)
def test_choices_are_in_the_prompt(tmp_path, capsys, source, row, message):
    """Or the row ends the conversion, as does the number of a choice for its letter."""
    columns = [column for column in row if column not in ("question", "prompt", "query", "answer")]
    if message == "HIDDEN":
        problem = stopped(tmp_path, capsys, [row])
        assert "choices that the prompt does not show: --choices letters" in problem
    elif message == "NUMBERED":
        assert "row 1: the answer 1 is the number of one of 2 choices" in stopped(
            tmp_path, capsys, [row]
        )
    (converted,) = run(tmp_path, [row], *(["--keep", ",".join(columns)] if message else []))
    assert converted.get("answer", "") == f"{row.get('answer', '')}"


@pytest.mark.parametrize(
    "source, row, how, prompt, answer",
    [
        (
            "ScienceQA",
            {"choices": ["solid", "gas"], "answer": 1},
            "letters0",
            "A. solid\nB. gas",
            "B",
        ),
        (
            "AI2D",
            {"options": ["a", "c", "b", "e"], "answer": "2"},
            "letters1",
            "A. a\nB. c\nC. b\nD. e",
            "B",
        ),
        (
            "MMBench",
            {"A": "left", "B": "up", "C": None, "answer": "B"},
            "letters",
            "A. left\nB. up",
            "B",
        ),
        (
            "Video-MME",
            {"options": ["A. red.", "B. tan."], "answer": "B"},
            "letters",
            "A. red.\nB. tan.",
            "B",
        ),
        (
            "MVBench",
            {"candidates": ["left", "up"], "answer": "up"},
            "letters",
            "A. left\nB. up",
            "B",
        ),
        ("numbers", {"choices": [2, 3], "answer": 0}, "letters0", "A. 2\nB. 3", "A"),
        (
            "shown",
            {"question": "Which? (A) Up (B) Left", "choices": ["Up", "Left"], "answer": 0},
            "letters0",
            "",
            "A",
        ),
        (
            "PMC-VQA",
            {"Choice A": " A: up ", "Choice B": " B: left ", "answer": "left"},
            "letters",
            "A. up\nB. left",
            "B",
        ),
        (
            "an object",
            {"options": {"B": "left", "A": "up"}, "answer": "B"},
            "letters",
            "A. up\nB. left",
            "B",
        ),
        ("JSON", {"options": '["up", "left"]', "answer": "B"}, "letters", "A. up\nB. left", "B"),
        (
            "MMBench's nan",
            {"A": "up", "B": "left", "C": "nan", "answer": "B"},
            "letters",
            "A. up\nB. left",
            "B",
        ),
        (
            "names with letters",
            {"choices": ["E. coli", "S. aureus"], "answer": 1},
            "letters0",
            "A. E. coli\nB. S. aureus",
            "B",
        ),
        ("none", {"answer": "red"}, "letters", "", "red"),
    ],
)
def test_choices_become_lines_of_the_prompt(tmp_path, source, row, how, prompt, answer):
    row = {"question": "Which?"} | row
    (converted,) = run(tmp_path, [row], "--choices", how)
    assert converted["prompt"] == "\n".join(filter(None, [row["question"], prompt]))
    assert converted["answer"] == answer
    if prompt:  # for launch/reward_vision.py:choice
        assert converted["choices"] == [line.split(". ", 1)[1] for line in prompt.split("\n")]


@pytest.mark.parametrize(
    "row, problem",
    [
        (
            {"choices": ["C", "A"], "answer": "A"},
            "the answer A is the letter of one choice and the",
        ),
        ({"A": "up", "C": "left", "answer": "C"}, "A, C: a choice between them is missing"),
    ],
)
def test_a_letter_that_could_be_another_choice_is_an_error(tmp_path, capsys, row, problem):
    row = {"question": "Which?"} | row
    assert problem in stopped(tmp_path, capsys, [row], "--choices letters")
    names = ",".join(row.keys() - {"question", "answer"})
    assert run(tmp_path, [row], "--keep", names)[0]["answer"] == row["answer"]


@pytest.mark.parametrize(
    "answer, how, message",
    [
        (1, "letters", "the answer 1 is the number of one of 2 choices: --choices letters0 if"),
        (2, "letters0", "the answer 2 is the number of none of 2 choices"),
        (0, "letters1", "the answer 0 is the number of none of 2 choices"),
    ],
)
def test_a_number_is_no_letter_by_chance(tmp_path, capsys, answer, how, message):
    row = {"question": "Which?", "choices": ["up", "left"], "answer": answer}
    assert message in stopped(tmp_path, capsys, [row], "--choices", how)


def test_choices_behind_messages(tmp_path):
    parts = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    row = {"messages": [{"role": "user", "content": parts}], "image": base64_of(noise(1))}
    (converted,) = run(tmp_path, [row | {"choices": ["up", "left"]}], "--choices letters")
    added = {"type": "text", "text": "\nA. up\nB. left"}
    assert converted["prompt"] == [{"role": "user", "content": [*parts, added]}]


def test_a_truth_that_is_a_list(tmp_path, capsys):
    """ChartQA's, of one; of several, it is said that all are asked for."""
    rows = run(tmp_path, [{"query": "x", "label": ["14"]}], "--columns answer=label")
    assert rows[0]["answer"] == "14"
    assert "list as answer" not in capsys.readouterr().out
    run(tmp_path, [{"query": "x", "answer": ["14", "15"]}])
    assert "1 rows have a list as answer, now in one text" in capsys.readouterr().out


@pytest.mark.parametrize("column", ["solution", "answer"])
def test_a_solution_with_several_final_answers_is_an_error(tmp_path, capsys, column):
    rows = [{"problem": "x", column: "\\boxed{1} or \\boxed{2}"}]
    assert "row 1: several final answers in one solution, '1', '2'" in stopped(
        tmp_path, capsys, rows
    )


@pytest.mark.parametrize(
    "row, function",
    [
        (
            {"text": '{"question": "q", "chosen": "a", "rejected": "b"}'},
            'json.loads(row.pop("text")) | row',
        ),
        ({"prompt": '{"question": "q"}'}, 'json.loads(row.pop("prompt")) | row'),
        (
            {"problem": "q", "solution": "<answer>[{'Position': [1, 2, 3, 4]}]</answer>"},
            'row | {"solution": ast.literal_eval(row["solution"].removeprefix("<answer>")'
            '.removesuffix("</answer>"))}',
        ),
        (
            {"question": "q", "options": "['left', 'up']", "answer": "A"},
            'row | {"options": ast.literal_eval(row["options"])}',
        ),
    ],
)
def test_what_leaves_the_converter_gets_a_function_to_paste(tmp_path, capsys, row, function):
    """RLHF-V's text, and what Python prints (Visual-RFT, MMMU)."""
    problem = stopped(tmp_path, capsys, [row])
    assert f"\n  def row(row):\n      return {function}\n" in problem
    assert "--map my_rows.py:row\n  import " in problem


def test_a_function_of_a_row_reads_what_no_form_does(tmp_path, capsys):
    """RLHF-V's text and Visual-RFT's boxes, by the functions that their errors print; images as bytes."""
    (tmp_path / "my_rows.py").write_text(
        "import ast, base64, io, json\n"
        "def row(row):\n"
        "    return json.loads(row.pop('text')) | row\n"
        "def boxes(row):\n"
        "    return row | {'solution': ast.literal_eval(row['solution'])}\n"
        "def red(row):\n"
        "    picture = base64.b64decode(row['picture'])\n"
        "    return {'prompt': 'x', 'images': [picture]} if row['colour'] == 'red' else None\n"
        "def cut(row):\n"
        "    from PIL import Image\n"
        "    picture = Image.open(io.BytesIO(base64.b64decode(row['picture'])))\n"
        "    return {'prompt': 'x', 'images': [picture.crop((0, 0, 9, 5))]}\n"
    )
    text = json.dumps({"question": "which?", "chosen": "good", "rejected": "bad"})
    (row,) = run(tmp_path, [{"text": text}], "--map", f"{tmp_path}/my_rows.py:row")
    assert preferred_texts([row]) == ["good"]
    row = {"problem": "x", "solution": "[{'Position': [1, 2, 3, 4]}]"}
    (row,) = run(tmp_path, [row], "--map", f"{tmp_path}/my_rows.py:boxes")
    assert row["regions"] == {"boxes": [[1, 2, 3, 4]], "space": "1000"}
    rows = [{"colour": colour, "picture": base64_of(noise(1))} for colour in ("blue", "red")]
    (row,) = run(tmp_path, rows, "--map", f"{tmp_path}/my_rows.py:red")
    assert (tmp_path / "out" / row["images"][0]).read_bytes() == base64.b64decode(
        base64_of(noise(1))
    )
    assert "left out: 1 rows, as --map says" in capsys.readouterr().out
    (row,) = run(tmp_path, rows[1:], "--map", f"{tmp_path}/my_rows.py:cut")
    assert read_image(str(tmp_path / "out" / row["images"][0])).size == (9, 5)
    problem = stopped(tmp_path, capsys, [{"colour": 1}], "--map", f"{tmp_path}/my_rows.py:red")
    assert "row 1: --map " in problem
    assert "KeyError: 'picture' (my_rows.py:7" in problem


def test_a_box_column_without_a_region_is_an_error(tmp_path, capsys):
    row = {"question": "Where?", "bbox": [1, 2, 3, 4]}
    problem = stopped(tmp_path, capsys, [row])
    assert (
        "row 1: bbox gives no region: [1, 2, 3, 4]; --boxes corners or --boxes sizes says"
        in problem
    )
    assert run(tmp_path, [row], "--keep bbox")[0]["bbox"] == [1, 2, 3, 4]


def test_keys_of_objects_are_read_or_end_the_conversion(tmp_path, capsys):
    """COCO's area, whose boxes have sizes."""
    objects = {"bbox": [[1, 2, 3, 4], [5, 6, 7, 8]], "category": ["a", "b"], "area": [12, 56]}
    row = {"question": "Where?", "objects": objects}
    assert "--keep objects.area\n" in stopped(tmp_path, capsys, [row], "--boxes sizes")
    (converted,) = run(tmp_path, [row], "--boxes sizes --keep objects.area")
    assert converted["regions"]["boxes"] == [[1, 2, 4, 6], [5, 6, 12, 14]]
    assert converted["objects"] == objects


def test_keys_of_each_object_are_left_out_as_the_message_says(tmp_path, capsys):
    objects = [{"bbox_2d": [1, 2, 3, 4], "label": "a", "area": 4, "score": 0.5}]
    row = {"question": "Where?", "objects": objects}
    assert "--drop objects.area,objects.score\n" in stopped(tmp_path, capsys, [row])
    (converted,) = run(tmp_path, [row], "--drop objects.area,objects.score,label")  # no column
    assert converted["regions"]["labels"] == ["a"]
    assert "objects" not in converted
    (converted,) = run(tmp_path, [row], "--drop objects.area --keep objects.score")
    assert converted["objects"] == [{"bbox_2d": [1, 2, 3, 4], "label": "a", "score": 0.5}]


def test_several_columns_become_a_list(tmp_path):
    """MMMU's images."""
    row = {
        "question": "<image>, <image>?",
        "image_1": base64_of(noise(1)),
        "image_2": base64_of(noise(2)),
    }
    flags = "--columns images=image_1+image_2+image_3"
    (converted,) = run(tmp_path, [row | {"image_3": None}], flags)
    assert converted["images"] == ["images/rows-00000-0.png", "images/rows-00000-1.png"]


def test_pictures_that_several_rows_show_are_one_file(tmp_path, qwen25, capsys):
    row = {"prompt": "x", "image": base64_of(noise(1))}
    rows = run(tmp_path, [row] * 10 + [row | {"image": base64_of(noise(2))}])
    assert {row["images"][0] for row in rows[:10]} == {"images/rows-00000-0.png"}
    assert len(list((tmp_path / "out" / "images").iterdir())) == 2
    assert capsys.readouterr().out == "rows.jsonl: 11 rows, 2 images\n"
    for prompt in load(tmp_path / "out" / "rows.jsonl", qwen25)[:10]:
        assert_pixels(prompt, noise(1))


@pytest.mark.parametrize("mark", ["<image1>", "<image_1>", "<image 1>", "<|image_1|>", "<IMG-1>"])
def test_numbered_places_of_images(tmp_path, capsys, mark):
    run(tmp_path, [{"prompt": f"Is {mark} red?", "images": [base64_of(noise(1))]}])
    assert f"{mark} in a text stands for no image: write <image> for it" in capsys.readouterr().out


# ---- Parquet


@pytest.mark.slow
def test_verl_and_trl_in_parquet(tmp_path, qwen25, pyarrow):
    """Structs of embedded bytes; a table gives every part of a message every key, if only as null."""

    def picture(image):
        return {"bytes": encode(image), "path": "original.jpg"}

    for number, row in enumerate([verl_row(picture), *trl_rows(picture)]):
        table = pyarrow.Table.from_pylist([row])
        pyarrow.parquet.write_table(table, tmp_path / f"train-{number:05d}-of-00004.parquet")
    flags = "--keep ability,reward_model.style,extra_info.split"
    convert.main(words(tmp_path, "--out", tmp_path / "out", flags))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["images", "train.jsonl"]
    check_prompts(load(tmp_path / "out" / "train.jsonl", qwen25))


@pytest.mark.slow
def test_geometry3k(tmp_path, qwen25, pyarrow, capsys):
    """Its columns, splits and shards."""
    picture = encode(noise(30))
    for name, count in (
        ("train-00000-of-00002", 3),
        ("train-00001-of-00002", 2),
        ("test-00000-of-00001", 1),
    ):
        row = {"images": [{"bytes": picture, "path": None}], "problem": "<image>Find $x$."}
        rows = [row | {"answer": f"{name} {k}"} for k in range(count)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    convert.main(words(tmp_path, "--label geo3k --out", tmp_path / "data" / "geo3k"))
    assert (
        capsys.readouterr().out == "test.jsonl: 1 rows, 1 images\ntrain.jsonl: 5 rows, 0 images\n"
    )

    folder = tmp_path / "data" / "geo3k"
    rows = read_rows(folder / "train.jsonl")
    assert rows[0] == dict(
        prompt="<image>Find $x$.",
        images=["images/test-00000-0.png"],
        answer="train-00000-of-00002 0",
        label="geo3k",
    )
    assert [row["answer"].split()[1] for row in rows] == ["0", "1", "2", "0", "1"]
    prompts = load(folder / "train.jsonl", qwen25)
    assert_pixels(prompts[4], noise(30))
    assert [prompt.label for prompt in prompts] == ["geo3k"] * 5


@pytest.mark.slow
def test_classes_have_their_names(tmp_path, pyarrow):
    """Those of the package datasets stand in the file's metadata."""
    label = {"names": ["cat", "dog"], "_type": "ClassLabel"}
    features = {"answer": label, "tags": {"feature": label, "_type": "List"}}
    features |= {"more": {"kind": label}, "old": [label]}
    row = {"prompt": "x", "answer": 1, "tags": [0, 1], "more": {"kind": 1}, "old": [1]}
    table = pyarrow.Table.from_pylist([row, row | {"answer": -1}])
    info = json.dumps({"info": {"features": features}})
    pyarrow.parquet.write_table(
        table.replace_schema_metadata({"huggingface": info}), tmp_path / "a.parquet"
    )
    convert.main(words(tmp_path / "a.parquet", "--keep tags,more,old --out", tmp_path / "out"))
    first, second = read_rows(tmp_path / "out" / "a.jsonl")
    assert first == {"prompt": "x", "images": [], "answer": "dog"} | {
        "tags": ["cat", "dog"],
        "more": {"kind": "dog"},
        "old": ["dog"],
    }
    assert "answer" not in second


@pytest.mark.parametrize("name", ["0000.jsonl", "metadata.jsonl"])
def test_splits_that_are_named_by_folders(tmp_path, capsys, name):
    """The hub's layout, and folders of images: never one file of training and test rows."""
    for split in ("train", "test"):
        folder = tmp_path / "default" / split
        folder.mkdir(parents=True)
        picture = {"file_name": "a.png"} if name == "metadata.jsonl" else {}
        write_json(folder / name, {"prompt": split, "answer": split} | picture)
        noise(1).save(folder / "a.png")
    with pytest.raises(SystemExit):
        convert.main(words(tmp_path / "default", "--out", tmp_path / "out"))
    advice = re.search("name (.*)", capsys.readouterr().err)[1].split(", ")
    convert.main(words(*advice, "--out", tmp_path / "out"))
    for split in ("train", "test"):
        (row,) = read_rows(tmp_path / "out" / f"{split}.jsonl")
        assert row["prompt"] == split
        assert len(row["images"]) == (name == "metadata.jsonl")


def test_rows_are_held_out(tmp_path, capsys):
    """As many as asked for; rows about the same stay together, and none is lost."""
    rows = [{"prompt": f"question {k // 2}", "answer": f"{k}"} for k in range(40)]
    train = run(tmp_path, rows, "--hold_out 10")
    held = read_rows(tmp_path / "out" / "held_out.jsonl")
    assert (len(train), len(held)) == (30, 10)
    assert sorted(int(row["answer"]) for row in train + held) == [*range(40)]
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held}
    assert "held_out.jsonl: 10 of them" in capsys.readouterr().out
    problem = stopped(tmp_path, capsys, rows[:2], "--hold_out 2")
    assert "--hold_out 2: rows has 2 rows, of 1 questions" in problem


def test_parquet_without_its_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train.parquet").touch()
    with pytest.raises(SystemExit):
        convert.main(words(tmp_path / "train.parquet", "--out", tmp_path / "out"))
    error = capsys.readouterr().err
    first, second = error.splitlines()[1:]
    assert first.strip() == (
        "python -m venv .venv-convert && .venv-convert/bin/pip install pyarrow pillow"
    )
    assert second.strip() == f".venv-convert/bin/python {shlex.join(sys.argv)}"


# ---- Errors


def embedded(row):
    """ONE and TWO are pictures, CUT is a part of one."""
    text = json.dumps(row).replace("ONE", base64_of(noise(1))).replace("TWO", base64_of(noise(2)))
    cut = base64.b64encode(encode(noise(1))[:900]).decode()
    return json.loads(text.replace("CUT", cut))


@pytest.mark.parametrize(
    "row, message",
    marked(
        map(
            tuple,
            json.loads(r"""[
[{"text": "what?", "id": 1}, "no column prompt, messages, conversations, conversation, message"],
[{"messages": [{"role": "user", "content": [{"type": "input_image", "image_url": "ONE"}]}]},
 "a part of a message is text, image, image_url or video, not {'type': 'input_image'"],
[{"prompt": [{"text": "x"}]}, "a message has role and content, or from and value, unlike {'text': 'x'}"],
[{"query": [{"role": "user", "content": [{"type": "image", "image": "ONE"}]}], "image": "TWO",
  "response": ["a", "b"], "human_ranking": [0, 1]},
 "images of a pair come with its messages or in a column"],
[{"prompt": "what?", "images": [], "image": "a.png"}, "columns 'image' and 'images'"],
[{"prompt": "what?", "images": ["none.png"]}, "'none.png' is neither a file in "],
[{"prompt": "what?", "images": ["http://host/a.png"]}, "'http://host/a.png' is neither a file in "],
[{"prompt": "what?", "images": ["CUT"]}, "an image that cannot be decoded: 'iVBOR"],
[{"prompt": "what?", "images": [], "videos": ["none.mp4"]}, "no such video: 'none.mp4'"],
[{"prompt": "what?", "images": [], "answer": [true]},
 "answer and label must be a string or a finite number, not True"],
[{"chosen": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]},
             {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
  "rejected": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "y"}]},
               {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]},
 "both sides of a pair must begin with the same messages"],
[{"prompt": "Picture 1: <img>a.png</img>what?"}, "<img>path</img> in a text: give the path in images"],
[{"messages": [{"role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": "Find <ref-object>"}]},
               {"role": "assistant", "content": [{"type": "text", "text": "<bbox>"}]}],
  "objects": {"ref": ["cat"]}},
 "objects gives no region: {'ref': ['cat']}"],
[{"query": "<ref-object>, <ref-object>?", "objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}},
 "2 <ref-object> for 1 names in objects"],
[{"conversations": [{"from": "robot", "value": "x"}]}, "role 'robot' is not one of system"],
[{"query": "<bbox>?", "objects": {"bbox": [[1, 2, 3, 4]]}}, "<bbox> in a prompt: models differ"],
[{"query": "Where?", "objects": {"bbox": [[1, 2]], "image_id": [1]}},
 "objects of another image than the first"],
[{"query": "Where?", "objects": "[{\"bbox\": [1, 2, 3, 4], \"image\": 1}]"},
 "objects of another image than the first"],
[3, "no row as in the tables of --help: 3"],
[{"messages": [{"role": "user", "content": [{"type": "image", "base64": "ONE"}]}]},
 "base64 in a part of a message, which nothing reads"],
[{"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "is_hint": true}]}]},
 "is_hint in a part of a message, which nothing reads"],
[{"messages": [{"role": "user", "content": [{"type": "image", "image": "ONE", "resized_height": 280}]}]},
 "resized_height of one picture or film: the trainers read all alike"],
[{"messages": [{"role": "user", "content": [{"type": "video", "video": ["ONE"], "sample_fps": 1}]}]},
 "sample_fps of one picture or film"],
[{"prompt": "x", "images": [{"image": "ONE", "max_pixels": 1000}]},
 "max_pixels of one picture or film"],
[{"prompt": "x", "videos": [{"video": "a.mp4", "fps": 2, "nframes": null}]},
 "fps of one picture or film"],
[{"prompt": "x", "chosen": {"bytes": "ONE"}, "rejected": "a dog"},
 "one response of the pair is a picture, the other a text"],
[{"prompt": "x", "chosen": "<image>", "rejected": "<image>", "images": ["ONE"]},
 "a pair of pictures has two images, and none in its question"],
[{"prompt": "<image>x", "chosen": {"bytes": "ONE"}, "rejected": {"bytes": "TWO"}, "images": ["ONE"]},
 "a pair of pictures has two images, and none in its question"],
[{"prompt": "x", "chosen": [{"role": "assistant", "content": [{"type": "image", "image": "ONE"},
                                                              {"type": "text", "text": "here"}]}],
  "rejected": "no"},
 "a response of a pair is a text or one picture"]
]"""),
        ),
        daily=5,
    ),
)
def test_an_error_names_file_and_row(tmp_path, capsys, row, message):
    """And nothing is left of what was written before."""
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, [{"prompt": "what?"}, embedded(row)])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith(f"error: {tmp_path / 'rows.jsonl'}, row 2: {message}")
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.slow
def test_odd_rows_are_refused_in_our_words(tmp_path, capsys):
    """Or converted: a row of any shape."""
    rng, converted = random.Random(1), 0
    noise(1).save(tmp_path / "a.png")
    names = [
        *PROMPTS,
        *foreign_rows.LABELS,
        "instruction",
        "system",
        "history",
        "image",
        "images",
        "videos",
        "answer",
        "solution",
        "reward_model",
        "completion",
        "chosen",
        "rejected",
        "response",
        "human_ranking",
        "preferred",
        "objects",
        "extra_info",
    ]
    for k in range(600):
        row = {name: odd_value(rng, 3) for name in rng.sample(names, rng.randrange(1, 6))}
        write_json(tmp_path / "rows.jsonl", row if k % 20 else odd_value(rng, 3))
        try:
            keep = ["--keep", ",".join(names)] if k % 2 else []
            convert.main(words(tmp_path / "rows.jsonl", "--out", tmp_path / f"out-{k}", *keep))
            converted += 1
        except SystemExit:
            error = capsys.readouterr().err
            assert len(error) < 1500
            assert not re.search(PYTHONS_WORDS, error), f"{error}: {row!r:.500}"
    assert converted > 30


@pytest.mark.parametrize(
    "name, content, flags, message",
    [
        (
            "rows.jsonl",
            "\n{]\n",
            [],
            "rows.jsonl, row 2: the row: not JSON: Expecting property name",
        ),
        ("rows.csv", "a,b", [], "no .parquet or .jsonl files in"),
        (
            "rows.jsonl",
            '{"prompt": "x"}',
            ["--columns", "anwser=prompt"],
            "'anwser' is not one of prompt, label, ",
        ),
        ("rows.jsonl", '{"prompt": "x"}', ["--columns", "prompt"], "row 1: no column ''"),
        (
            "rows.jsonl",
            '{"prompt": "x"}',
            ["--columns", "prompt=Text"],
            "row 1: no column 'Text' (see --columns)",
        ),
        ("rows.jsonl", '{"prompt": "x"}', ["--out", "."], ". exists: remove it or name another"),
    ],
)
def test_a_file_that_cannot_be_converted(tmp_path, capsys, name, content, flags, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as stop:
        convert.main(words(tmp_path / name, "--out", tmp_path / "out", *flags))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_whose_data_lie_deeper_names_where(tmp_path, capsys):
    """As `hf download` leaves a dataset."""
    (tmp_path / "source" / "data").mkdir(parents=True)
    (tmp_path / "source" / "data" / "train-00000-of-00001.parquet").touch()
    with pytest.raises(SystemExit):
        convert.main(words(tmp_path / "source", "--out", tmp_path / "out"))
    assert f"files in {tmp_path}/source; name {tmp_path}/source/data\n" in capsys.readouterr().err
