"""Data of other systems as rows of the trainers: JSONL, and a file for every image.

    python launch/data/convert.py rows.jsonl --out data/mine

Parquet needs a package that the trainers do without, hence an environment of its own. Geometry3k,
for example (https://huggingface.co/datasets/hiyouga/geometry3k: 2,101 / 300 / 601 rows):

    python -m venv .venv-convert
    .venv-convert/bin/pip install pyarrow pillow huggingface_hub
    .venv-convert/bin/hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    .venv-convert/bin/python launch/data/convert.py geometry3k/data --label geo3k --out data/geo3k

Sources are .parquet, .jsonl and .json files, or folders of the first two. JSON may be one list, objects
over several lines, or in UTF-16. The shards train-00000-of-00002 and train-00001-of-00002 become
train.jsonl. Images are written unchanged, as images/<split>-<row>-<place>.jpeg and so on; one that
several rows show is written once. Paths in the source are relative to its file or, if there is no such
file, to --image_root, outside of which nothing is read.

    our column   taken from (the first that is there)
    prompt       prompt, messages, conversations, conversation, message, query, question, problem, input: text, messages,
                 or messages as JSON text; before it columns system and history
    images       images, image or image_urls, and parts of messages that bring an image: bytes, base64, data URL, path
    videos       videos or video: paths, which become absolute, or lists of frames
    answer       answer, verl's reward_model.ground_truth, TRL's solution, ground_truth, or else the response; of a
                 worked solution the last <answer> or \\boxed{}, or what follows #### in the last line
    response     completion, output or response, or a last message by the assistant
    label        label, source, data_source, query_source, or else --label; in pairs it is called source
    regions      objects or, with --boxes, boxes, bbox, gt_bbox or solution; or an answer of objects with bbox_2d, point_2d, ...
    responses    chosen and rejected, as text or conversations, or the two of response (VL-RewardBench); ms-swift's
                 rejected_response or rejected_messages beside the chosen one
    preferred    A or B, the response that was chosen; with human_ranking also a tie

Where both responses are pictures (bytes, a path, a message of one image, or <image> for the two of
images), the row is a pair of pictures: images holds them, and there are no responses.

    form                  system                             read as
    role, content         verl, TRL, OpenAI, ms-swift        messages
    from, value           LLaVA, Qwen-VL, InternVL, VLM-R1   messages: human is the user, gpt the assistant
    instruction, input    alpaca, LLaMA-Factory              the prompt, joined by a newline
    <img>path</img>       Qwen-VL                            not read: put the path into images, and <image> in its place
    image_1, image_2      MMMU                               not read: make one column of them, images, and write <image>
                                                             for <image 1>
    objects               ms-swift                           regions; <ref-object> becomes the name, <bbox> in a response <box>
    bbox_2d; Position     Vero; Visual-RFT                   regions
    [x1, y1, x2, y2]      VLM-R1, GUI-R1, ScreenSpot-Pro     regions, with --boxes corners
    [x, y, w, h]          COCO, RefCOCO, ScreenSpot          regions, with --boxes sizes
    (x, y); <box>[[...    UGround; InternVL                  regions, with --boxes corners
    extra_info            Vero                               its reward_type is the label; its tolerance
    text                  RLHF-V                             columns, if it is an object of JSON

Boxes are in pixels of the file, unless --space says otherwise; ms-swift's norm1 is 0 to 1, its norm_1000 and
Visual-RFT's Position 0 to 1000. VLM-R1's boxes of RefCOCO end at x + w + 1, and stay as they are.

With --benchmark NAME the files are those of a benchmark of judges (launch/data/benchmarks.py). Its rows
get "source" (the official group) and "pair" (what counts together, as in ACC+). Rows without their
image, or of a kind that judges here cannot read, are counted and left out.

Every other column is kept under its name. In a pair, a name that would change how the row is read,
such as score, becomes original_score. A hash of the texts decides which response of a pair comes
first. Unless --keep names it, a column ends the conversion that would be lost: one named like a
preference (rejected_2, score, is_correct) in a row that is not a pair, one of pictures (rejected_images)
in a pair, and choices (options, A and B, choice_a) that the prompt does not show, or of which the answer
is the number."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project's folder

from common.ground import versions

versions.require("PIL")


import argparse
import ast
import base64
import hashlib
import io
import json
import os
import re
import shlex
import tempfile
import traceback
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from PIL import Image

from common.ground.files import UserError, number_as_text, open_file, parse_json, read_bytes, say
from common.rewards.rules import REGION, read_places, words_of
from launch import tool
from launch.data import benchmarks

PROMPTS = "prompt messages conversations conversation message query question problem input".split()
LABELS = ("label", "source", "data_source", "query_source")
# What --columns can rename.
COLUMNS = "image images videos answer response chosen rejected preferred boxes".split()
EXTRA = {"label": "reward_type", "tolerance": "tolerance"}  # of Vero's extra_info
BOX_COLUMNS = ("objects", "boxes", "bbox", "gt_bbox", "solution")
# Keys of a region and of its name. With --boxes, a region needs no key.
KEYS = ("bbox_2d", "bbox", "box", "Position", "point_2d", "point", "corners", "sizes")
NAMES = ("label", "ref", "caption", "name", "category")
# Spaces by ms-swift's bbox_type, old and new, and by a key.
SPACES = {"norm_1": "1", "norm1": "1", "norm_1000": "1000", "Position": "1000"}
IMAGE_KEYS = ("bytes", "image", "image_url", "url", "path", "value")
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # that the trainers read

# Settings of a part for how its image or video is to be read.
READING = "resized_height resized_width min_pixels max_pixels total_pixels fps nframes min_frames "
READING += "max_frames sample_fps video_start video_end"

# How columns of images, videos or bytes look when printed by Python.
IMAGE_COLUMN = r"(?i)\.(bmp|gif|jpe?g|png|tiff?|webp|avi|mkv|mov|mp4|webm)'|(^|[ \[(])b'"
IMAGE_COLUMN += "|'(data:image|iVBORw0KGgo|/9j/|https?://)"
PICTURE = r"(?is)data:image/.*|\S+\.(bmp|gif|jpe?g|png|tiff?|webp)"  # a response that is one
MESSAGES = r'\s*\[\s*\{\s*"(role|content|from|value)"'  # as text
ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "developer": "system"}
ROLES |= {"function_call": "assistant", "observation": "tool"}
BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"  # with up to two pairs in each other inside
FINAL_ANSWERS = (
    r"(?s)<answer>(.*?)</answer>",
    r"(?m)^####(.*)\s*\Z",
    rf"\\f?box(?:ed)?\s*\{{((?:[^{{}}]|{BRACES})*)\}}",
    r"\\boxed +([^\s{}$]+)\$",  # MATH has a few
)

# What a row of an unknown form may raise.
BAD_ROW = (ValueError, KeyError, IndexError, TypeError, AttributeError, OSError, RecursionError)

# Columns that would make a pair another kind of judgement.
NOT_IN_PAIRS = ("question", "messages", "response", "critique", "correct", "score", "criterion")
# Columns that say which of several responses is better, or how good one is.
PREFERENCE = "(?i)reject|chosen|prefer|rank|score|winner|loser|better|worse|best|worst|helpful|vote"
PREFERENCE += "|accepted|positive|negative|is_correct|correctness|^y_[wl]$|(^|_)(rating|reward)s?$"
# Columns of choices: one of all, or one for each.
CHOICES = r"(?i)options?|choice|((answer|multiple)_)?choices|candidates"
EACH_CHOICE = r"(?i:option|choice)[ _]?[A-Ja-j\d]|[A-J]|a\d"
IMAGE_OF_SEVERAL = r"(?i)(image|img|jpg|path)_?\d|(left|right)_image"
# How other systems write the place of one of several images.
NUMBERED_IMAGE = r"(?i)<\|?(image|img)[ _-]?\d+\|?>"


# ---- One row. Each function removes what it reads from `rest`, the columns that are left.


def convert(
    row: dict,
    images: "Images",
    label: str = "",
    boxes: str = "",
    space: str = "file",
    keep: Collection[str] = (),
) -> dict:
    """One row of the trainers from one of another system.

    label: for rows that have none. boxes, space, keep: see --help.
    Raises one of BAD_ROW; a UserError or FileNotFoundError has a message for the user.
    """
    rest = {column: value for column, value in row.items() if value is not None}
    entries = read_literal(rest.get("text"))
    if isinstance(entries, dict):
        rest = entries | {column: value for column, value in rest.items() if column != "text"}
    extra = rest.get("extra_info")
    if isinstance(extra, dict):
        further = {ours: extra.get(theirs) for ours, theirs in EXTRA.items()}
        rest = {name: value for name, value in further.items() if value not in (None, "")} | rest
    column = next((name for name in BOX_COLUMNS if name in rest), "")
    regions = read_regions(rest.get(column), boxes, space)
    if regions:
        del rest[column]
    for column in rest:
        if re.fullmatch(IMAGE_OF_SEVERAL, column):
            raise UserError(
                f"a column for each image ({column}): make one list of them, images, with <image> in its "
                "places"
            )
    for column in {"rejected_response", "rejected_messages"} & rest.keys():  # ms-swift
        rest |= {"rejected": rest.pop(column), "chosen": take(rest, "response", "messages")}
    is_pair = (
        bool(rest.keys() & {"human_ranking", "preferred"}) or {"chosen", "rejected"} <= rest.keys()
    )
    converted = convert_pair(rest, images) if is_pair else convert_prompt(rest, images)
    regions = regions or read_regions(converted.get("answer"), boxes, space)
    if regions:
        converted["regions"] = regions
        fill_marks(converted)
    texts = f"{converted.get('prompt')}{converted.get('response')}"
    if "objects" in row and re.search("<(bbox|ref-object)>", texts):
        raise UserError("<bbox> in a prompt, where models differ, or more marks than objects has")
    value = take(rest, *LABELS)
    value = label if value is None else as_text(value)
    if value:
        converted["source" if is_pair else "label"] = value
    unread = {column: value for column, value in rest.items() if column not in keep}
    lost = [column for column, value in unread.items() if is_preference(column, value)]
    if is_pair:  # pictures of one side alone
        lost = [column for column in lost if re.search("(?i)image|video", column)]
    if lost:
        raise UserError(
            f"{', '.join(lost)}: a preference that would be lost. Name both sides by --columns "
            "chosen=NAME,rejected=NAME, or what is none by --keep"
        )
    check_choices(unread, converted)
    for column, value in rest.items():
        if re.search(IMAGE_COLUMN, f"{value!r:.2000}"):
            images.unread.add(column)
        if is_pair and column in NOT_IN_PAIRS:
            column = f"original_{column}"
        converted[column] = value
    return converted


def is_preference(column: str, value: Any) -> bool:
    """Whether a column, or what it holds, is named like a preference."""
    names = [column, *(key for key, _ in parts_of(value, column))]
    return any(re.search(PREFERENCE, name) for name in names)


def check_choices(rest: dict, converted: dict) -> None:
    """Raises UserError: the prompt does not show the choices in other columns, or the answer is the
    number of one of them."""
    columns = [column for column in rest if re.fullmatch(CHOICES, column)]
    each = [column for column in rest if re.fullmatch(EACH_CHOICE, column)]
    columns += each if len(each) > 1 else []
    values = [read_literal(value) or value for value in map(rest.get, columns)]
    choices = []
    for _, part in parts_of(values):
        choices += [words_of(str(number_as_text(choice))) for choice in as_list(part)]
    names, prompt = ", ".join(columns), words_of(as_one_text(converted["prompt"]))
    texts = [re.sub(r"^\(?[a-z][.:)] *", "", choice) for choice in choices]
    if not all(text in prompt for text in texts if not re.fullmatch("[a-z]", text)):
        raise UserError(
            f"{names}: choices that the prompt does not show. Write prompts with them, or name a column that "
            "has both by --columns prompt=NAME"
        )
    answer = converted.get("answer", "")
    if choices and re.fullmatch(r"\d{1,2}", answer) and answer not in choices + texts:
        raise UserError(
            f"the answer {answer} is the number of one of {names}, from 0 or from 1: write its letter"
        )


def convert_prompt(rest: dict, images: "Images") -> dict:
    """The prompt, images, videos, answer and response of a row."""
    prompt = take_prompt(rest, images)
    response = take(rest, "completion", "output", "response")
    if response is not None:
        response = last_text(read_messages(response))
    elif isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        response = last_text(prompt)
        prompt = prompt[:-1]
    media, answer = take_media(rest, images), take_answer(rest)
    if answer is None and response is not None:
        answer = final_answer(response)
    texts = {"answer": answer, "response": response}
    return (
        {"prompt": prompt}
        | media
        | {name: text for name, text in texts.items() if text is not None}
    )


def convert_pair(rest: dict, images: "Images") -> dict:
    """The prompt, images, videos, responses and verdict of a pair; of a pair of pictures, no
    responses."""
    if "preferred" in rest:  # a pair of images, or one in our form
        return {"prompt": as_one_text(take_prompt(rest, images))} | take_media(rest, images)
    preferred = "A"
    if "human_ranking" in rest:
        prompt = take_prompt(rest, images)
        responses, ranks = rest.pop("response"), rest.pop("human_ranking")
        if not len(responses) == len(ranks) == 2:
            raise UserError("a pair has two responses")
        preferred = "tie" if ranks[0] == ranks[1] else "A" if ranks[0] < ranks[1] else "B"
    else:
        prompt, responses = take_chosen(rest, images)
    converted, prompt = take_media(rest, images), as_one_text(prompt)
    if images.embedded:
        if converted["images"]:
            raise UserError("images of a pair come with its messages or in a column, not both")
        converted["images"] = images.embedded
    pictures = [find_picture(response) for response in responses]
    if any(pictures):
        sides = write_sides(pictures, prompt, converted, images)
        key = [images.digest(side) for side in sides]
    else:
        key = sides = [last_text(response) for response in responses]
    text = json.dumps([prompt, *key])
    if hashlib.sha256(text.encode()).digest()[0] % 2:  # of half of all pairs, in any file
        sides = sides[::-1]
        preferred = {"A": "B", "B": "A", "tie": "tie"}[preferred]
    column = "images" if any(pictures) else "responses"
    return converted | {"prompt": prompt, column: sides, "preferred": preferred}


def take_chosen(rest: dict, images: "Images") -> tuple[str | list, list]:
    """The prompt, and the chosen and the rejected response, each a text, messages or a picture.
    Without a column for the prompt, it is what both conversations begin with."""
    sides = [rest.pop("chosen"), rest.pop("rejected")]
    chosen, rejected = (side if is_picture(side) else read_messages(side) for side in sides)
    if not set(PROMPTS) & rest.keys() and isinstance(chosen, list):
        if isinstance(rejected, list) and chosen[:-1] != rejected[:-1]:
            raise UserError(
                "without a prompt, 'chosen' and 'rejected' must begin with the same messages"
            )
        rest["prompt"] = chosen[:-1]
    return take_prompt(rest, images), [chosen, rejected]


def is_picture(side: Any) -> bool:
    """Whether a response is the path or the content of an image."""
    if isinstance(side, dict):
        return bool(set(IMAGE_KEYS) & side.keys()) and not {"role", "from"} & side.keys()
    return isinstance(side, bytes) or isinstance(side, str) and bool(re.fullmatch(PICTURE, side))


def find_picture(response: Any) -> Any:
    """The picture that is a response: <image> if it is in a column, None if the response is text. Raises
    UserError: it is both."""
    if is_picture(response):
        return response
    content = response if isinstance(response, str) else response[-1]["content"]
    if isinstance(content, str):
        return "<image>" if content.strip() == "<image>" else None
    parts = [part for part in content if part["type"] != "text" or part["text"].strip()]
    if all(part["type"] == "text" for part in parts):
        return None
    if len(parts) > 1 or parts[0]["type"] not in ("image", "image_url"):
        raise UserError(f"a response of a pair is a text or one picture, not {content!r:.80}")
    return parts[0] if any(parts[0].get(key) for key in IMAGE_KEYS) else "<image>"


def write_sides(pictures: list, prompt: str, converted: dict, images: "Images") -> list[str]:
    """The paths of both pictures of a pair. Raises UserError: there are not two, or more."""
    if not all(pictures):
        raise UserError("one response of the pair is a picture, the other a text")
    written = [images.write(picture) for picture in pictures if picture != "<image>"]
    sides = written + converted["images"]
    if len(sides) != 2 or len(written) == 1 or "<image>" in prompt or converted.get("videos"):
        raise UserError("a pair of pictures has two images, and none in its question")
    return sides


def take_prompt(rest: dict, images: "Images") -> str | list:
    """The prompt as text, or as messages whose images are written."""
    columns = ", ".join(rest)
    if "instruction" in rest:
        rest["prompt"] = f"{rest.pop('instruction')}\n{rest.pop('input', '')}".strip()
    prompt = read_messages(take(rest, *PROMPTS))
    if prompt is None:
        raise UserError(f"no column {', '.join(PROMPTS)}; the row has {columns:.400}")
    if isinstance(read_literal(prompt), dict):
        raise UserError(f"a prompt that is an object of JSON: make columns of it: {prompt!r:.120}")
    if re.search("<img>.+</img>", f"{prompt}"):
        raise UserError(
            "<img>path</img> in a text: give the path in images, and write <image> in its place"
        )
    turns = [("system", rest.pop("system", ""))]
    for pair in rest.pop("history") if isinstance(rest.get("history"), list) else []:
        turns += [("user", pair[0]), ("assistant", pair[1])]
    messages = [{"role": role, "content": text} for role, text in turns if text]
    if isinstance(prompt, str):
        if not messages:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    for message in prompt:
        content = message["content"]
        if not isinstance(content, str):
            content = [images.write_part(part) for part in content]
        messages.append(message | {"content": content})
    return messages


def read_messages(value: Any) -> Any:
    """A message, a list or JSON of them, as messages with role and content; anything else as it is."""
    if isinstance(value, str) and re.match(MESSAGES, value):
        value = parse_json(value, "messages")
    if not isinstance(value, dict | list):
        return value
    messages = []
    for turn in value if isinstance(value, list) else [value]:
        message = turn.copy()
        role, content = take(message, "role", "from"), take(message, "content", "value")
        if role is None:
            raise UserError(
                f"a message has role and content, or from and value, unlike {turn!r:.80}"
            )
        if role not in ROLES:
            raise UserError(f"role {role!r:.80} is not one of {', '.join(ROLES)}")
        messages.append({"role": ROLES[role], "content": content or ""} | message)
    return messages


def take_answer(rest: dict) -> str | None:
    """The reference answer as text, without the working of a solution. Solutions, and verl's column,
    stay in the row."""
    verl = rest.get("reward_model")
    answers = [
        rest.pop("answer", None),
        verl.get("ground_truth") if isinstance(verl, dict) else None,
    ]
    for answer in (*answers, rest.get("solution"), rest.pop("ground_truth", None)):
        if answer is not None:
            text = as_text(answer)
            if text != final_answer(text):
                rest.setdefault("solution", text)
            return final_answer(text)
    return None


def read_regions(value: Any, boxes: str, space: str) -> dict | None:
    """Our column of this name from regions of another system or their text; None from anything else."""
    value = read_literal(value) or value
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
    names = [part for key, part in parts if part and key in NAMES]
    return regions | {"labels": names} if len(names) == len(places) > 0 else regions


def read_literal(text: Any) -> Any:
    """A list or object that is a text in JSON or, as in Visual-RFT, in Python; None: it is none."""
    if not isinstance(text, str):
        return None
    text = re.sub(r"\A\s*```\w*\n|\n```\s*\Z", "", text)
    if text[:1] not in ("[", "{"):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def parts_of(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The texts and lists of numbers in a value, each with its innermost key."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from parts_of(part, key)
    elif isinstance(value, list) and not all(isinstance(item, int | float) for item in value):
        for part in value:
            yield from parts_of(part, key)
    else:
        yield key, value


def fill_marks(converted: dict) -> None:
    """Replace numbers in the response, and ms-swift's <bbox>, by our marks, as models differ in their
    coordinates; and its <ref-object> by the names of objects."""
    texts = {name: converted[name] for name in ("prompt", "response") if name in converted}
    if "response" in texts:
        mark = "<point>" if "points" in converted["regions"] else "<box>"
        # a call stays as it is: click(x=10, y=20)
        texts["response"] = re.sub(rf"<bbox>|(?<!\w){REGION}", mark, texts["response"])
    names = (json.dumps(name)[1:-1] for name in converted["regions"].get("labels", []))
    written = re.sub("<ref-object>", lambda mark: next(names, mark[0]), json.dumps(texts))
    converted |= json.loads(written)


def final_answer(solution: str) -> str:
    """The last answer that a text marks as such; without a mark the text."""
    for pattern in FINAL_ANSWERS:
        for answer in re.findall(pattern, solution)[-1:]:
            return answer.strip()
    return solution


def take_media(rest: dict, images: "Images") -> dict:
    """The columns of images and videos: files, absolute paths, lists of frames."""
    if "image" in rest and "images" in rest:
        raise UserError(
            "columns 'image' and 'images': choose one by --columns images=image or image=images"
        )
    pictures = as_list(take(rest, "image", "images", "image_urls"))
    converted = {"images": [images.write(image) for image in pictures]}
    clips = as_list(take(rest, "video", "videos"))
    if clips:
        converted["videos"] = [images.find_clip(clip) for clip in clips]
    return converted


def take(rest: dict, *columns: str) -> Any:
    """Take out the first of these columns that is there; None if there is none."""
    return next((rest.pop(column) for column in columns if column in rest), None)


def as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value] if value else []


def as_text(value: Any) -> str:
    text = number_as_text(value)
    if not isinstance(text, str):
        raise UserError(f"answer and label must be a string or a finite number, not {value!r:.80}")
    return text


def as_one_text(prompt: str | list) -> str:
    """A prompt as one string with <image> for each image, as the prompt of a pair must be."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return text_of(prompt[0])
    return "\n\n".join(f"{message['role']}: {text_of(message)}" for message in prompt)


def last_text(value: str | list) -> str:
    """A response given as text, or as the last message of a conversation."""
    if isinstance(value, str):
        return value
    if value[-1]["role"] != "assistant":
        raise UserError("the last message of a response must be the assistant's")
    return text_of(value[-1])


def text_of(message: dict) -> str:
    """The text of a message, with <image> and <video> where its parts have them."""
    content = message["content"]
    if isinstance(content, str):
        return content
    pieces = []
    for part in content:
        if part["type"] == "text":
            # of a part, it is only text
            pieces.append(re.sub("<(image|video)>", " ", part["text"]))
        else:
            pieces.append(f"<{part['type']}>")
    return "".join(pieces)


# ---- Images


@dataclass
class Images:
    """Writes the images of one row as <folder>/<name>-<place>.<format>."""

    folder: Path
    name: str  # of the row: <split>-<number>
    # paths in the row are relative to this folder or, where they are not there,
    beside: Path
    root: Path | None = None  # to this one, outside of which none is read
    # of all rows: digest of an image -> its path in rows
    written: dict[bytes, str] = field(default_factory=dict)
    count: int = 0  # images of this row that no earlier row has
    embedded: list[str] = field(default_factory=list)  # written from messages
    unread: set[str] = field(default_factory=set)  # columns that seem to hold images or videos

    def write(self, image: Any) -> str:
        """Write an image; returns its path beside the JSONL file. Raises one of BAD_ROW."""
        data = self.read(image)
        digest = hashlib.sha256(data).digest()
        if digest in self.written:
            return self.written[digest]
        try:
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as picture:
                picture.load()  # finds a damaged body now, not in the middle of training
        except Exception as error:  # damaged files raise anything, by plugin
            problem = f"an image that cannot be decoded: {image!r:.80} ({error!s:.200})"
            raise UserError(problem) from error
        path = self.folder / f"{self.name}-{self.count}.{picture.format.lower()}"
        path.write_bytes(data)
        self.count += 1
        self.written[digest] = f"{self.folder.name}/{path.name}"
        return self.written[digest]

    def digest(self, path: str) -> str:
        """The digest of an image's content."""
        return hashlib.sha256(self.folder.parent.joinpath(path).read_bytes()).hexdigest()

    def write_part(self, part: dict) -> dict:
        """A part of a message, with the path of its image if it brings one."""
        check_reading(part)
        if part["type"] == "text":
            return {"type": "text", "text": part.get("text") or part.get("value", "")}
        if part["type"] == "video":
            return part | {"video": self.find_clip(part["video"])} if part.get("video") else part
        if part["type"] not in ("image", "image_url"):
            raise UserError(
                f"a part of a message is text, image, image_url or video, not {part!r:.80}"
            )
        if not any(part.get(key) for key in IMAGE_KEYS):
            return {"type": "image"}
        self.embedded.append(self.write(part))
        return {"type": "image", "image": self.embedded[-1]}

    def read(self, image: Any) -> bytes:
        """An encoded image, given as bytes, base64, data URL or path, or as an object with one of these."""
        if isinstance(image, dict):
            check_reading(image)
            return self.read(next((image[key] for key in IMAGE_KEYS if image.get(key)), None))
        if isinstance(image, bytes):
            return image
        if not image:
            raise FileNotFoundError("an image without bytes or path")
        file = self.locate(image)
        if os.path.isfile(file):
            return read_bytes(file)
        encoded = re.sub("^data:[^,]*;base64,", "", image)
        try:
            return base64.b64decode("".join(encoded.split()), validate=True)
        except ValueError as error:
            message = f"{image!r:.80} is neither a file in {self.root or self.beside} nor an image in base64"
            raise FileNotFoundError(message) from error

    def locate(self, path: str) -> Path:
        """A file or folder that a row names. Raises UserError: it lies outside of --image_root."""
        path, root = path.removeprefix("file://"), self.root
        file = self.beside / path
        if root and not os.path.exists(file):
            file = root / path
        if root and os.path.exists(file) and not file.resolve().is_relative_to(root.resolve()):
            raise UserError(f"{file} lies outside of --image_root {root}")
        return file

    def find_clip(self, clip: Any) -> str | list[str]:
        """A video file as its absolute path; a list or folder of frames as the list of its images."""
        if isinstance(clip, list):
            return [self.write(frame) for frame in clip]
        if isinstance(clip, dict):
            check_reading(clip)
        path = clip["video"] if isinstance(clip, dict) else clip
        path = self.locate(path)
        if not path.exists():
            raise FileNotFoundError(f"no such video: {clip!r:.80}")
        if path.is_dir():
            # frame-2 before frame-10
            frames = sorted(path.iterdir(), key=lambda frame: (len(frame.name), frame))
            return [self.write(str(frame.absolute())) for frame in frames]
        return str(path.resolve())


def check_reading(part: dict) -> None:
    """Raises UserError: a part has settings for how its own image or video is to be read."""
    named = [key for key in READING.split() if part.get(key) is not None]
    if named:
        raise UserError(
            f"{', '.join(named)} of one picture or film: the trainers read all alike, as --min_pixels, "
            "--max_pixels and --video_fps say; resize its file, and remove the entry"
        )


# ---- Files


def read_rows(path: Path) -> Iterator[str | bytes | dict]:
    """The rows of a table or of JSON, or the lines of JSONL, whatever the file is called."""
    with open_file(path) as file:
        if path.suffix == ".parquet":
            yield from read_parquet(file, path)
            return
        first = file.readline()
        if re.match(rb"(\xef\xbb\xbf)?\s*\{.*\}\s*$", first):
            yield first
            yield from file
        else:
            yield from read_json(first + file.read())


def read_parquet(file: BinaryIO, path: Path) -> Iterator[dict]:
    """The rows of a table. Raises UserError: it is damaged."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{path}: parquet needs pyarrow, here in an environment of its own:\n"
            "python -m venv .venv-convert && .venv-convert/bin/pip install pyarrow pillow\n"
            f".venv-convert/bin/python {shlex.join(sys.argv)}"
        ) from error
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(100):
            yield from batch.to_pylist()
    except Exception as error:  # damaged files raise anything
        raise UserError(f"{path} cannot be read as parquet: {error!s:.1000}") from error


def read_json(data: bytes) -> list:
    """The elements of a list, or objects over several lines; else it must be JSONL, perhaps in UTF-16,
    or with blank lines first."""
    text = data.decode(json.detect_encoding(data), "backslashreplace")
    try:
        # no string of JSON holds the end of a line
        objects = re.sub(r"\}\s*\n\s*\{", "},{", text)
        rows = json.loads(f"[{objects}]")
    except (ValueError, RecursionError):
        return text.split("\n")
    return rows[0] if len(rows) == 1 and isinstance(rows[0], list) else rows


def write_split(
    split: str, paths: list[Path], folder: Path, args: argparse.Namespace, known: dict[bytes, str]
) -> None:
    """Write <folder>/<split>.jsonl and its images, but for those that are ``known``, to which they are
    added. Raises UserError with file and row."""
    total, written, unread, left_out, numbered = 0, 0, set(), Counter(), ""
    skipped = (benchmarks.LeftOut, FileNotFoundError) if args.benchmark else ()
    with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
        for path, number, text in numbered_rows(paths):
            row = text
            try:
                row = parse_json(text, "the row") if isinstance(text, str | bytes) else text
                rename(row, args.columns)
                parts = benchmarks.rows_of(args.benchmark, row) if args.benchmark else [row]
                for part in parts:
                    name = f"{split}-{total:05d}"
                    images = Images(folder / "images", name, path.parent, args.image_root, known)
                    how = args.label, args.boxes, args.space, args.keep
                    converted = convert(part, images, *how)
                    file.write(json.dumps(converted, default=plain) + "\n")
                    total, written = total + 1, written + images.count
                    unread |= images.unread
                    numbered = numbered or numbered_image(converted)
            except skipped as error:
                left_out["image missing" if isinstance(error, OSError) else f"{error}"] += 1
            except BAD_ROW as error:
                raise UserError(f"{path}, row {number}: {describe(error, row)}") from error
    say(f"{split}.jsonl: {total} rows, {written} images")
    if unread:
        names = ", ".join(sorted(unread))
        say(
            f"not read, but perhaps images or videos (--columns images=NAME,videos=NAME): {names:.400}"
        )
    if numbered:
        say(
            f"{numbered} in a text stands for no image: write <image> for it, in the order of images"
        )
    for reason, count in left_out.items():
        say(f"left out: {count} rows, {reason}")
    if left_out and not total:
        raise UserError(f"{split}: no row is left (images are looked for in --image_root)")


def numbered_image(converted: dict) -> str:
    """What the prompt of a row with images has in place of <image>; "" if nothing."""
    mark = re.search(NUMBERED_IMAGE, f"{converted['prompt']}")
    return mark[0] if mark and converted["images"] else ""


def numbered_rows(paths: list[Path]) -> Iterator[tuple[Path, int, str | bytes | dict]]:
    """The file, the number of the row in it, and the row or its line; blank lines are only counted."""
    for path in paths:
        for number, row in enumerate(read_rows(path), start=1):
            if not isinstance(row, str | bytes) or row.strip():
                yield path, number, row


def rename(row: dict, columns: dict[str, str]) -> None:
    """Give columns our names; one that is named as its images replaces the other. Raises UserError:
    there is no such column."""
    renamed = {}
    for ours, theirs in columns.items():
        if theirs not in row:
            names = ", ".join(row)
            raise UserError(f"no column {theirs!r} (see --columns); the row has {names:.400}")
        renamed[ours] = row.pop(theirs)
    if renamed.keys() & {"image", "images"}:
        for column in ("image", "images"):
            row.pop(column, None)
    row |= renamed


def plain(value: Any) -> str | None:
    """What JSON lacks, in columns that are only kept: dates and the like as text; bytes are left out."""
    return None if isinstance(value, bytes) else str(value)


def describe(error: Exception, row: Any) -> str:
    """What is wrong with a row, as a message for the user."""
    if isinstance(error, UserError | OSError):
        return f"{error!s:.1000}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{Path(place.filename).name}:{place.lineno}"
    return f"no row as in the tables of --help: {row!r:.120} ({line})"


def find_splits(sources: list[Path]) -> dict[str, list[Path]]:
    """The files by split: the name without suffix and without the number of the shard."""
    splits = {}
    for source in sources:
        if not source.exists():
            raise UserError(f"{source}: no such file or folder")
        for path in sorted(source.iterdir()) if source.is_dir() else [source]:
            if path.suffix in (".parquet", ".jsonl") or path == source and path.suffix == ".json":
                split = re.sub(r"-\d+-of-\d+$", "", path.stem)
                splits.setdefault(split, []).append(path)
    if not splits:
        below = {f"{file.parent}" for source in sources for file in source.rglob("*.parquet")}
        advice = (
            "name a .json file itself; make Parquet of Arrow (to_parquet), JSONL of a text table"
        )
        if below:
            advice = f"name {', '.join(sorted(below))}"
        raise UserError(f"no .parquet or .jsonl files in {', '.join(map(str, sources))}; {advice}")
    return splits


def parse_columns(text: str) -> dict[str, str]:
    columns = dict(item.partition("=")[::2] for item in text.split(","))
    unknown = columns.keys() - {*PROMPTS, *LABELS, *COLUMNS}
    if unknown:
        names = ", ".join(COLUMNS)
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is not one of prompt, label, {names}")
    return columns


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = tool.parser(__doc__)
    parser.add_argument(
        "sources",
        type=Path,
        nargs="+",
        help=".parquet, .jsonl and .json files, or folders",
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder to write")
    parser.add_argument(
        "--benchmark", choices=benchmarks.COLUMNS, help="of judges, whose files these are"
    )
    parser.add_argument(
        "--columns",
        type=parse_columns,
        default={},
        metavar="OURS=THEIRS,...",
        help="columns under other names: prompt=Text,images=Image",
    )
    parser.add_argument("--label", default="", help="label of rows that have none")
    parser.add_argument(
        "--boxes",
        choices=("corners", "sizes"),
        default="",
        help="lists of numbers, in a column boxes, bbox, gt_bbox or solution or else in the answer, are boxes: "
        "x1, y1, x2, y2, or x, y, width, height",
    )
    parser.add_argument(
        "--space",
        choices=("file", "1", "100", "1000"),
        default="file",
        help="pixels of the file, or 0 to this number on both axes",
    )
    parser.add_argument(
        "--keep",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,...",
        help="columns to keep although they are named like preferences, or hold choices",
    )
    parser.add_argument(
        "--image_root",
        type=Path,
        help="folder of images and videos: paths are relative to the rows' file, or to this folder; "
        "none outside of it is read",
    )
    return parser.parse_args(argv)


@tool.one_message()
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.out.exists():
        raise UserError(f"--out {args.out} exists: remove it or name another")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Written beside it and renamed, so that <out> is complete as soon as it exists.
    with tempfile.TemporaryDirectory(prefix=f"{args.out.name}.", dir=args.out.parent) as scratch:
        folder = Path(scratch) / "whole"
        (folder / "images").mkdir(parents=True)
        known = {}
        for split, paths in find_splits(args.sources).items():
            write_split(split, paths, folder, args, known)
        folder.rename(args.out)


if __name__ == "__main__":
    main()
