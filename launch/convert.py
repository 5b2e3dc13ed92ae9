"""Data of other systems as rows of the trainers: JSONL, and a PNG file for every image.

    python launch/convert.py rows.jsonl --out data/mine

Parquet needs a package that the trainers do without, hence an environment of its own. Geometry3k, for example
(https://huggingface.co/datasets/hiyouga/geometry3k: 2,101 / 300 / 601 rows):

    python -m venv .venv-convert
    .venv-convert/bin/pip install pyarrow pillow huggingface_hub
    .venv-convert/bin/hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    .venv-convert/bin/python launch/convert.py geometry3k/data --label geo3k --out data/geo3k

Sources are .parquet and .jsonl files, or folders of them. The shards train-00000-of-00002 and
train-00001-of-00002 become train.jsonl. Images become images/<split>-<row>-<place>.png, upright and without
loss.

    our column   taken from (the first that is there)
    prompt       prompt, messages, query, question, problem: text or messages
    images       images or image, and parts of messages that bring an image: bytes, base64, data URL, path
    videos       videos or video: paths, which become absolute, or lists of frames
    answer       answer, verl's reward_model.ground_truth, TRL's solution, ground_truth
    response     completion, or a last message by the assistant
    label        label, source, data_source, query_source, or else --label; it is called source in pairs
    responses    chosen and rejected, as text or conversations, or the two of response (VL-RewardBench)
    preferred    A or B, the chosen one of the responses, or by human_ranking, where it may be a tie

Every other column is kept under its name. In a pair, a name that would change how the row is read, such as
score, becomes original_score. A hash of the seed and the texts decides which response of a pair stands first.
"""

import argparse
import base64
import binascii
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

PROMPTS = ("prompt", "messages", "query", "question", "problem")
ANSWERS = ("answer", "reward_model", "solution", "ground_truth")
LABELS = ("label", "source", "data_source", "query_source")
IMAGE_KEYS = ("bytes", "image", "image_url", "url", "path")

# Columns by which the reward model would take a pair for a row of another kind.
NOT_IN_PAIRS = ("question", "messages", "response", "critique", "correct", "score")

# Pillow writes these as PNG without loss.
PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")


# ---- One row. Each function takes what it reads out of `rest`, the columns that are left.


def convert(row: dict, images: "Images", label: str = "", seed: int = 0) -> dict:
    """One row of the trainers from one of another system.

    label: for rows that have none. seed: of the order in which the responses of a pair are shown.
    Raises ValueError, and KeyError or TypeError where a column is not built as it should be.
    """
    rest = {column: value for column, value in row.items() if value is not None}
    is_pair = "human_ranking" in rest or {"chosen", "rejected"} <= rest.keys()
    converted = convert_pair(rest, images, seed) if is_pair else convert_prompt(rest, images)
    column = first_of(LABELS, rest)
    label = as_text(rest.pop(column)) if column else label
    if label:
        converted["source" if is_pair else "label"] = label
    for column, value in rest.items():
        if is_pair and column in NOT_IN_PAIRS:
            column = f"original_{column}"
        converted[column] = value
    return converted


def convert_prompt(rest: dict, images: "Images") -> dict:
    """The prompt, images, videos, answer and response of a row."""
    prompt, response = take_prompt(rest), None
    if "completion" in rest:
        response = last_text(rest.pop("completion"))
    elif isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        *prompt, last = prompt
        response = text_of(last)
    converted = take_media(rest, prompt, images)
    answer = take_answer(rest)
    if answer is not None:
        converted["answer"] = answer
    if response is not None:
        converted["response"] = response
    return converted


def convert_pair(rest: dict, images: "Images", seed: int) -> dict:
    """The prompt, images, videos, responses and verdict of a pair."""
    if "human_ranking" in rest:
        prompt = take_prompt(rest)
        responses, (one, other) = rest.pop("response"), rest.pop("human_ranking")
        preferred = "tie" if one == other else "A" if one < other else "B"
    else:
        prompt, responses = take_chosen(rest)
        preferred = "A"
    converted = take_media(rest, prompt, images)
    prompt = as_one_text(converted["prompt"])
    if is_swapped(seed, prompt, responses):
        responses = responses[::-1]
        preferred = {"A": "B", "B": "A", "tie": "tie"}[preferred]
    return converted | {"prompt": prompt, "responses": responses, "preferred": preferred}


def take_chosen(rest: dict) -> tuple[str | list, list[str]]:
    """The prompt, and the chosen and the rejected response. Without a column for the prompt, it is
    what both conversations begin with."""
    chosen, rejected = rest.pop("chosen"), rest.pop("rejected")
    responses = [last_text(chosen), last_text(rejected)]
    if first_of(PROMPTS, rest) or isinstance(chosen, str):
        return take_prompt(rest), responses
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("without a prompt, 'chosen' and 'rejected' must begin with the same messages")
    return clean(chosen[:-1]), responses


def is_swapped(seed: int, prompt: str, responses: list[str]) -> bool:
    """Whether the second response is shown first: for half of all pairs, wherever they stand in the file."""
    text = json.dumps([seed, prompt, *responses])
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 1


def take_prompt(rest: dict) -> str | list:
    """The prompt as text or messages."""
    column = first_of(PROMPTS, rest)
    if column is None:
        raise ValueError(f"no column {', '.join(PROMPTS)}; the row has {', '.join(rest)}")
    prompt = rest.pop(column)
    return prompt if isinstance(prompt, str) else clean(prompt)


def take_answer(rest: dict) -> str | None:
    """The reference answer as text; a number is written out."""
    for column in ANSWERS:
        value = rest.pop(column, None)
        if column == "reward_model" and value is not None:  # what else it says stays in the row
            rest[column] = {key: other for key, other in value.items() if key != "ground_truth"}
            value = value.get("ground_truth")
        if value is None:
            continue
        answer = as_text(value)
        tagged = re.findall("<answer>(.*?)</answer>", answer, re.DOTALL)
        if column == "solution" and tagged:  # a worked solution, which stays in the row
            rest[column] = value
            answer = tagged[-1].strip()
        return answer
    return None


def take_media(rest: dict, prompt: str | list, images: "Images") -> dict:
    """The prompt without what was embedded in it, images written, and videos: absolute paths, or lists of frames."""
    if "image" in rest and "images" in rest:
        raise ValueError("columns 'image' and 'images': choose one by --columns images=image or image=images")
    beside = as_list(rest.pop("image", None) or rest.pop("images", None))
    prompt, sources = place_images(prompt, beside)
    converted = {"prompt": prompt, "images": [images.write(source) for source in sources]}
    clips = as_list(rest.pop("video", None) or rest.pop("videos", None))
    if clips:
        converted["videos"] = [images.find_clip(clip) for clip in clips]
    return converted


def first_of(names: tuple[str, ...], row: dict) -> str | None:
    return next((name for name in names if name in row), None)


def as_list(value: Any) -> list:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def as_text(value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise ValueError(f"answer and label must be text or a number, not {value!r:.80}")
    return str(value)


# ---- Prompts


def clean(messages: list[dict]) -> list[dict]:
    """Messages {"role", "content"} without the keys that tables fill with null."""
    cleaned = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [{key: value for key, value in part.items() if value is not None} for part in content]
        cleaned.append({"role": message["role"], "content": content})
    return cleaned


def place_images(prompt: str | list, beside: list) -> tuple[str | list, list]:
    """The prompt without embedded images, and all images in order of their places.

    beside: the images for the places that bring none: <image> in a string, or a part of type image.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    places = [place for message in messages for place in image_places(message["content"])]
    if not places and [message["role"] for message in messages].count("user") <= 1:
        return prompt, beside  # the trainer puts them before the text
    if places.count(None) != len(beside):
        raise ValueError(
            f"{len(beside)} images for {places.count(None)} places (<image> in a string, or parts of type image)"
        )
    waiting = iter(beside)
    images = [next(waiting) if place is None else place for place in places]
    if isinstance(prompt, list):
        prompt = [message | {"content": without_images(message["content"])} for message in prompt]
    return prompt, images


def image_places(content: str | list) -> list[dict | None]:
    """One entry for each place of an image: the image, or None where the place brings none."""
    if isinstance(content, str):
        return [None] * content.count("<image>")
    places = []
    for part in content:
        if is_image(part):
            places.append({key: part[key] for key in IMAGE_KEYS if key in part} or None)
    return places


def without_images(content: str | list) -> str | list:
    if isinstance(content, str):
        return content
    return [{"type": "image"} if is_image(part) else part for part in content]


def is_image(part: dict) -> bool:
    return part["type"] in ("image", "image_url")


def as_one_text(prompt: str | list) -> str:
    """A prompt as one string with <image> for each image, as the prompt of a pair must be."""
    if isinstance(prompt, str):
        return prompt
    if [message["role"] for message in prompt] == ["user"]:
        return text_of(prompt[0])
    return "\n\n".join(f"{message['role']}: {text_of(message)}" for message in prompt)


def last_text(value: str | list) -> str:
    """A response given as text, or as the last message of a conversation."""
    if isinstance(value, str):
        return value
    if value[-1]["role"] != "assistant":
        raise ValueError("the last message of a response must be the assistant's")
    return text_of(clean(value)[-1])


def text_of(message: dict) -> str:
    """The text of a message, with <image> and <video> where its parts have them."""
    content = message["content"]
    if isinstance(content, str):
        return content
    pieces = []
    for part in content:
        if part["type"] == "text":
            pieces.append(re.sub("<(image|video)>", " ", part["text"]))  # of a part, it is only text
        else:
            pieces.append("<image>" if is_image(part) else "<video>")
    return "".join(pieces)


# ---- Images


@dataclass
class Images:
    """Writes the images of one row as <folder>/<name>-<place>.png."""

    folder: Path
    name: str            # of the row: <split>-<number>
    root: Path           # paths in the row are relative to it
    count: int = 0

    def write(self, image: Any) -> str:
        """Write an image; returns its path beside the JSONL file. Raises ValueError."""
        path = self.folder / f"{self.name}-{self.count}.png"
        self.count += 1
        data = self.read(image)
        try:
            write_png(data, path)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"an image cannot be decoded ({type(error).__name__}: {error})") from error
        return f"{self.folder.name}/{path.name}"

    def read(self, image: Any) -> bytes:
        """An encoded image, given as bytes, base64, data URL or path, or as an object with one of these."""
        if isinstance(image, dict):
            return self.read(next((image[key] for key in IMAGE_KEYS if image.get(key)), None))
        if isinstance(image, bytes):
            return image
        if not image or not isinstance(image, str):
            raise ValueError(f"an image must be bytes, base64, a data URL or a path, not {image!r:.80}")
        if image.startswith("http"):
            raise ValueError(f"{image:.120}: nothing is downloaded; fetch the file and give its path")
        file = self.root / image.removeprefix("file://")
        if os.path.isfile(file):
            return file.read_bytes()
        encoded = re.sub("^data:[^,]*;base64,", "", image)
        try:
            return base64.b64decode("".join(encoded.split()), validate=True)
        except binascii.Error as error:
            raise ValueError(f"{image!r:.80} is neither a file in {self.root} nor an image in base64") from error

    def find_clip(self, clip: Any) -> str | list[str]:
        """A film as its absolute path; a folder or a list of frames as the list of its images."""
        if isinstance(clip, dict):
            clip = clip.get("video") or clip["path"]
        if isinstance(clip, list):
            return [self.write(frame) for frame in clip]
        path = (self.root / clip.removeprefix("file://")).resolve(strict=True)
        if path.is_dir():
            return [str(frame) for frame in sorted(path.iterdir())]
        return str(path)


def write_png(data: bytes, path: Path) -> None:
    """Write an encoded image as PNG, upright."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()  # finds a damaged body now, not in the middle of a training run
        image = ImageOps.exif_transpose(image)
        if image.mode not in PNG_MODES:
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        image.save(path, "PNG", icc_profile=None)


# ---- Files


def read_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a file with their numbers, from 1; of JSONL, that is the line."""
    if path.suffix == ".jsonl":
        with open(path, encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, row {number}: no JSON: {error}") from error
                yield number, row
        return
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path}: pip install pyarrow, in an environment of its own") from error
    number = 0
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(100):
        for row in batch.to_pylist():
            number += 1
            yield number, row


def rename(row: dict, columns: dict[str, str]) -> dict:
    """The row with our names for its columns; `columns` maps ours to theirs."""
    renamed = dict(row)
    for ours, theirs in columns.items():
        if theirs not in row:
            raise ValueError(f"no column {theirs!r}; the row has {', '.join(row)}")
        renamed[ours] = renamed.pop(theirs)
    return renamed


def write_split(split: str, paths: list[Path], folder: Path, args: argparse.Namespace) -> None:
    """Write <folder>/<split>.jsonl and its images. Raises ValueError with file and row."""
    total = written = 0
    with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
        for path in paths:
            for number, row in read_rows(path):
                images = Images(folder / "images", f"{split}-{total:05d}", args.image_root or path.parent)
                try:
                    converted = convert(rename(row, args.columns), images, args.label, args.seed)
                except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                    raise ValueError(f"{path}, row {number}: {type(error).__name__}: {error}") from error
                file.write(json.dumps(converted, default=as_json) + "\n")
                total += 1
                written += images.count
    print(f"{split}.jsonl: {total} rows, {written} images", flush=True)


def as_json(value: Any) -> str:
    """What JSON lacks, in the columns that are only kept: bytes as base64, dates and decimals as text."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def find_splits(sources: list[Path]) -> dict[str, list[Path]]:
    """The files by split: the name without suffix and without the number of the shard."""
    splits: dict[str, list[Path]] = {}
    for source in sources:
        for path in sorted(source.iterdir()) if source.is_dir() else [source]:
            if path.suffix in (".parquet", ".jsonl"):
                split = re.sub(r"-\d+-of-\d+$", "", path.stem)
                splits.setdefault(split, []).append(path)
    if not splits:
        raise ValueError(f"no .parquet or .jsonl files in {', '.join(map(str, sources))}")
    return splits


def parse_columns(text: str) -> dict[str, str]:
    return dict(item.split("=") for item in text.split(","))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("sources", type=Path, nargs="+", help=".parquet and .jsonl files, or folders of them")
    parser.add_argument("--out", type=Path, required=True, help="new folder to write")
    parser.add_argument("--columns", type=parse_columns, default={}, metavar="OURS=THEIRS,...",
                        help="columns under other names: prompt=Text,images=Image")
    parser.add_argument("--label", default="", help="label of the rows that have none")
    parser.add_argument("--image_root", type=Path,
                        help="folder to which paths in the rows are relative; default: that of their file")
    parser.add_argument("--seed", type=int, default=0,
                        help="of the order in which the responses of a pair are shown")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        if args.out.exists():
            raise ValueError(f"--out {args.out} exists: remove it or name another")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        # Written next to it and renamed: whoever finds <out> finds all of it.
        with tempfile.TemporaryDirectory(prefix=f"{args.out.name}.", dir=args.out.parent) as scratch:
            folder = Path(scratch) / "whole"
            (folder / "images").mkdir(parents=True)
            for split, paths in find_splits(args.sources).items():
                write_split(split, paths, folder, args)
            folder.rename(args.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
