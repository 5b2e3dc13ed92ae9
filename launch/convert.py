"""Data of other systems as rows of the trainers: JSONL, and a PNG file for every picture.

    python launch/convert.py rows.jsonl --out data/mine

Parquet needs a package that the trainers do without, hence an environment of its own. Geometry3k, for example
(https://huggingface.co/datasets/hiyouga/geometry3k: 2,101 / 300 / 601 rows):

    python -m venv .venv-convert
    .venv-convert/bin/pip install pyarrow pillow huggingface_hub
    .venv-convert/bin/hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    .venv-convert/bin/python launch/convert.py geometry3k/data --label geo3k --out data/geo3k

Sources are .parquet and .jsonl files, or folders of them. The shards train-00000-of-00002 and
train-00001-of-00002 become train.jsonl. Pictures become images/<split>-<row>-<place>.png, upright and without
loss.

    our column   taken from (the first that is there)
    prompt       prompt, messages, query, question, problem: text or messages
    images       images or image, and parts of messages that bring a picture: bytes, base64, data URL, path
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

from PIL import ExifTags, Image, ImageOps

PROMPTS = ("prompt", "messages", "query", "question", "problem")
ANSWERS = ("answer", "reward_model", "solution", "ground_truth")
LABELS = ("label", "source", "data_source", "query_source")
PICTURE_KEYS = ("bytes", "image", "image_url", "url", "path")

# Columns by which the reward model would take a pair for a row of another kind.
NOT_IN_PAIRS = ("question", "messages", "response", "critique", "correct", "score")

# Pillow writes these as PNG without loss.
PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


class RowError(ValueError):
    """What is wrong with a column of a row."""

    def __init__(self, column: str, message: str):
        super().__init__(f"column {column!r}: {message}")


# ---- One row


def convert(row: dict, pictures: "Pictures", label: str = "", seed: int = 0) -> dict:
    """One row of the trainers from one of another system. Raises RowError.

    label: for rows that have none. seed: of the order in which the responses of a pair are shown.
    """
    rest = {column: value for column, value in row.items() if value is not None}
    is_pair = "human_ranking" in rest or {"chosen", "rejected"} <= rest.keys()
    if is_pair:
        converted = convert_pair(rest, pictures, seed)
        converted |= take_label(rest, "source", label)
    else:
        converted = convert_prompt(rest, pictures)
        converted |= take_label(rest, "label", label)

    for column, value in rest.items():
        if is_pair and column in NOT_IN_PAIRS:
            column = f"original_{column}"
        converted[column] = value
    return converted


def convert_prompt(rest: dict, pictures: "Pictures") -> dict:
    """The prompt, images, videos, answer and response of a row; they are taken out of `rest`."""
    column, prompt = take_prompt(rest)
    prompt, response = take_response(rest, prompt)
    prompt, images = place_pictures(column, prompt, take_images(rest))
    converted = {"prompt": prompt, "images": pictures.write_all(images)}
    converted |= take_videos(rest, pictures)
    return converted | take_answer(rest) | response


def convert_pair(rest: dict, pictures: "Pictures", seed: int) -> dict:
    """The prompt, images, videos, responses and verdict of a pair; they are taken out of `rest`."""
    if "human_ranking" in rest:
        responses, preferred = take_ranked(rest)
        column, prompt = take_prompt(rest)
    else:
        column, prompt, responses = take_chosen(rest)
        preferred = "A"

    prompt, images = place_pictures(column, prompt, take_images(rest))
    prompt = as_one_text(prompt)
    if is_swapped(seed, prompt, responses):
        responses = responses[::-1]
        preferred = {"A": "B", "B": "A", "tie": "tie"}[preferred]

    converted = {"prompt": prompt, "images": pictures.write_all(images)}
    converted |= take_videos(rest, pictures)
    return converted | {"responses": responses, "preferred": preferred}


def take_chosen(rest: dict) -> tuple[str, str | list, list[str]]:
    """The prompt's column, the prompt, and the chosen and the rejected response.

    Without a column for the prompt, it is what both conversations begin with.
    """
    chosen, rejected = rest.pop("chosen"), rest.pop("rejected")
    responses = [last_response("chosen", chosen), last_response("rejected", rejected)]
    if any(column in rest for column in PROMPTS) or isinstance(chosen, str):
        column, prompt = take_prompt(rest)
        return column, prompt, responses

    if chosen[:-1] != rejected[:-1]:
        raise RowError("rejected", "without a prompt, it must begin with the same messages as 'chosen'")
    return "chosen", check_messages("chosen", chosen[:-1]), responses


def take_ranked(rest: dict) -> tuple[list[str], str]:
    """Two responses, and which one has the better (smaller) rank."""
    responses, ranks = rest.pop("response", None), rest.pop("human_ranking")
    if not isinstance(responses, list) or [type(text) for text in responses] != [str, str]:
        raise RowError("response", f"must hold two texts, beside 'human_ranking', not {responses!r:.80}")
    if not isinstance(ranks, list) or [type(rank) for rank in ranks] != [int, int]:
        raise RowError("human_ranking", f"must hold the ranks of two responses, not {ranks!r:.80}")
    if ranks[0] == ranks[1]:
        return responses, "tie"
    return responses, "A" if ranks[0] < ranks[1] else "B"


def is_swapped(seed: int, prompt: str, responses: list[str]) -> bool:
    """Whether the second response is shown first: for half of all pairs, wherever they stand in the file."""
    text = json.dumps([seed, prompt, *responses])
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 1


# ---- Columns. Each function takes what it reads out of the row.


def take_prompt(rest: dict) -> tuple[str, str | list]:
    """The name of the prompt's column, and the prompt as text or messages."""
    column = next((name for name in PROMPTS if name in rest), None)
    if column is None:
        others = ", ".join(PROMPTS[1:])
        raise RowError("prompt", f"missing, and so are {others}; the row has {', '.join(rest)}")
    prompt = rest.pop(column)
    if isinstance(prompt, str):
        return column, prompt
    return column, check_messages(column, prompt)


def take_response(rest: dict, prompt: str | list) -> tuple[str | list, dict]:
    """The prompt, and what the model is to say: `completion`, or a last message by the assistant."""
    if "completion" in rest:
        return prompt, {"response": last_response("completion", rest.pop("completion"))}
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        return prompt[:-1], {"response": text_of(prompt[-1])}
    return prompt, {}


def take_answer(rest: dict) -> dict:
    """The reference answer as text; a number is written out."""
    for column in ANSWERS:
        value = take_ground_truth(rest) if column == "reward_model" else rest.pop(column, None)
        if value is None:
            continue
        answer = as_text(column, value)
        tagged = re.findall("<answer>(.*?)</answer>", answer, re.DOTALL)
        if column == "solution" and tagged:  # a worked solution, which stays in the row
            rest[column] = value
            answer = tagged[-1].strip()
        return {"answer": answer}
    return {}


def take_ground_truth(rest: dict) -> Any:
    """The ground truth in verl's `reward_model`, or None; what else that column says stays in the row."""
    settings = rest.get("reward_model")
    if not isinstance(settings, dict):
        return None
    others = {key: value for key, value in settings.items() if value is not None}
    truth = others.pop("ground_truth", None)
    rest["reward_model"] = others
    if not others:
        del rest["reward_model"]
    return truth


def take_label(rest: dict, name: str, default: str) -> dict:
    """The label of a row under our `name` for it."""
    for column in LABELS:
        if column in rest:
            return {name: as_text(column, rest.pop(column))}
    return {name: default} if default else {}


def take_images(rest: dict) -> list[tuple[str, Any]]:
    """The pictures of the images' column, each with the column's name."""
    if "image" in rest and "images" in rest:
        choice = "--columns images=image or image=images"
        raise RowError("image", f"there is a column 'images' as well; choose one by {choice}")
    column = "image" if "image" in rest else "images"
    images = rest.pop(column, [])
    if not isinstance(images, list):
        images = [images]
    return [(column, image) for image in images]


def take_videos(rest: dict, pictures: "Pictures") -> dict:
    """The clips of a row: absolute paths, or lists of frames."""
    column = "video" if "video" in rest else "videos"
    clips = rest.pop(column, None) or []
    if not isinstance(clips, list):
        clips = [clips]
    videos = [pictures.find_clip(column, clip) for clip in clips]
    return {"videos": videos} if videos else {}


# ---- Prompts


def check_messages(column: str, prompt: Any) -> list[dict]:
    """Messages {"role", "content"} without the keys that tables fill with null."""
    if not isinstance(prompt, list) or not prompt:
        raise RowError(column, f"must be text or a list of messages, not {prompt!r:.80}")
    messages = []
    for message in prompt:
        valid = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not valid or not isinstance(message.get("content"), str | list):
            rule = 'a message must be {"role": ..., "content": text or parts}'
            raise RowError(column, f"{rule}, not {message!r:.80}")
        content = message["content"]
        if isinstance(content, list):
            content = [check_part(column, part) for part in content]
        messages.append({"role": message["role"], "content": content})
    return messages


def check_part(column: str, part: Any) -> dict:
    """A part of a message without nulls."""
    if isinstance(part, dict):
        part = {key: value for key, value in part.items() if value is not None}
        if part.get("type") == "image_url":
            part["type"] = "image"
        if part.get("type") == "video" and len(part) > 1:
            raise RowError(column, "a part brings its video; such a path belongs into the column 'videos'")
        if part.get("type") in ("image", "video") or isinstance(part.get("text"), str):
            return part
    raise RowError(column, f"a part of a message must be text, an image or a video, not {part!r:.80}")


def place_pictures(column: str, prompt: str | list, given: list) -> tuple[str | list, list]:
    """The prompt without embedded pictures, and all pictures, (column, picture), in order of their places.

    given: the pictures for the places that bring none: <image> in a string, or a part of type image.
    """
    contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    if not any(has_text(content) for content in contents):
        raise RowError(column, "no text")

    found = [picture for content in contents for picture in pictures_in(column, content)]
    is_dialogue = isinstance(prompt, list) and [message["role"] for message in prompt].count("user") > 1
    if not found and not is_dialogue:
        return prompt, given  # the trainer puts them before the text
    free = found.count(None)
    if free != len(given):
        places = "<image> in a string, or parts of type image"
        raise RowError(column, f"{len(given)} pictures for {free} places ({places})")
    waiting = iter(given)
    ordered = [next(waiting) if picture is None else picture for picture in found]

    if isinstance(prompt, list):
        prompt = [{**message, "content": without_pictures(message["content"])} for message in prompt]
    return prompt, ordered


def pictures_in(column: str, content: str | list) -> list[tuple[str, Any] | None]:
    """One entry for each place of a picture: (column, picture), or None where the place brings none."""
    if isinstance(content, str):
        return [None] * content.count("<image>")
    found = []
    for part in content:
        if part.get("type") == "image":
            source = {key: part[key] for key in PICTURE_KEYS if key in part}
            found.append((column, source) if source else None)
    return found


def without_pictures(content: str | list) -> str | list:
    if isinstance(content, str):
        return content
    return [{"type": "image"} if part.get("type") == "image" else part for part in content]


def has_text(content: str | list) -> bool:
    if isinstance(content, str):
        return bool(content.replace("<image>", "").strip())
    return any(part.get("text", "").strip() for part in content)


def as_one_text(prompt: str | list) -> str:
    """A prompt as one string with <image> for each picture, as the prompt of a pair must be."""
    if isinstance(prompt, str):
        return prompt
    if [message["role"] for message in prompt] == ["user"]:
        return text_of(prompt[0])
    return "\n\n".join(f"{message['role']}: {text_of(message)}" for message in prompt)


def last_response(column: str, value: Any) -> str:
    """A response given as text, or as the last message of a conversation."""
    if isinstance(value, str):
        return value
    messages = check_messages(column, value)
    if messages[-1]["role"] != "assistant":
        raise RowError(column, "the last message must be the assistant's")
    return text_of(messages[-1])


def text_of(message: dict) -> str:
    """The text of a message, with <image> and <video> where its parts have them."""
    content = message["content"]
    if isinstance(content, str):
        return content
    pieces = []
    for part in content:
        if part.get("type") in ("image", "video"):
            pieces.append(f"<{part['type']}>")
        else:
            pieces.append(re.sub("<(image|video)>", " ", part["text"]))  # of a part, it is only text
    return "".join(pieces)


def as_text(column: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(column, f"must be text or a number, not {value!r:.80}")
    return str(value)


# ---- Pictures


@dataclass
class Pictures:
    """Writes the pictures of one row as <folder>/<name>-<place>.png."""

    folder: Path
    name: str            # of the row: <split>-<number>
    root: Path           # paths in the row are relative to it
    count: int = 0

    def write_all(self, images: list[tuple[str, Any]]) -> list[str]:
        """Write pictures, (column, picture); returns their paths beside the JSONL file."""
        return [self.write(column, image) for column, image in images]

    def write(self, column: str, image: Any) -> str:
        path = self.folder / f"{self.name}-{self.count}.png"
        self.count += 1
        data = self.read(column, image)
        try:
            write_png(data, path)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RowError(column, f"a picture cannot be decoded ({reason})") from error
        return f"{self.folder.name}/{path.name}"

    def read(self, column: str, image: Any) -> bytes:
        """An encoded picture, given as bytes, base64, data URL or path, or as an object with one of these."""
        if isinstance(image, bytes):
            return image
        if isinstance(image, dict):
            given = [image[key] for key in PICTURE_KEYS if image.get(key)]
            if given:
                return self.read(column, given[0])
        if not isinstance(image, str) or not image:
            rule = "a picture must be bytes, base64, a data URL or a path"
            raise RowError(column, f"{rule}, not {image!r:.80}")
        if re.match("https?:", image):
            raise RowError(column, f"{image:.120}: nothing is downloaded; fetch the file and give its path")

        file = self.root / image.removeprefix("file://")
        if os.path.isfile(file):
            return file.read_bytes()
        encoded = re.sub("^data:[^,]*;base64,", "", image)
        try:
            return base64.b64decode("".join(encoded.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            problem = f"{image!r:.80} is neither a file in {self.root} nor a picture in base64"
            raise RowError(column, problem) from error

    def find_clip(self, column: str, clip: Any) -> str | list[str]:
        """A film as its absolute path; a folder or a list of frames as the list of its pictures."""
        if isinstance(clip, dict):
            clip = clip.get("video") or clip.get("path")
        if isinstance(clip, list) and clip:
            return [self.write(column, frame) for frame in clip]
        if not isinstance(clip, str) or not clip:
            raise RowError(column, f"a video must be a path or a list of frames, not {clip!r:.80}")

        path = (self.root / clip.removeprefix("file://")).resolve()
        if path.is_dir():
            return [str(frame) for frame in sorted(path.iterdir())]
        if path.is_file():
            return str(path)
        raise RowError(column, f"no such file or folder: {path}")


def write_png(data: bytes, path: Path) -> None:
    """Write an encoded picture as PNG, upright; one that is that already keeps its bytes."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()  # finds a damaged body now, not in the middle of a training run
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        if image.format == "PNG" and not turned:
            path.write_bytes(data)
            return

        image = ImageOps.exif_transpose(image)
        if image.mode not in PNG_MODES:
            image = as_png_mode(image)
        image.save(path, icc_profile=None)


def as_png_mode(image: Image.Image) -> Image.Image:
    """The picture in a mode that PNG has. Raises ValueError: grey values of which PNG has none."""
    if image.mode[0] not in "IF":
        return image.convert("RGBA" if image.has_transparency_data else "RGB")
    least, most = image.getextrema()
    if image.mode == "F" or least < 0 or most >= 2**16:
        raise ValueError(f"grey values from {least} to {most} in mode {image.mode} are not of 16 bits")
    return image.convert("I").convert("I;16")


# ---- Files


def read_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a file with their numbers, from 1; of JSONL, that is the line."""
    if path.suffix == ".parquet":
        yield from read_parquet(path)
        return
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise ValueError(f"{path}, row {number}: invalid JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, row {number}: must be a JSON object, not {row!r:.80}")
            yield number, row


def read_parquet(path: Path) -> Iterator[tuple[int, dict]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        hint = "pip install pyarrow, in an environment of its own"
        raise ValueError(f"{path}: parquet needs a package ({hint})") from error
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(100):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}, after row {number}: {error}") from error


def rename(row: dict, columns: dict[str, str]) -> dict:
    """The row with our names for its columns; `columns` maps ours to theirs."""
    renamed = dict(row)
    for ours, theirs in columns.items():
        if theirs not in renamed:
            raise RowError(theirs, f"missing; the row has {', '.join(row)}")
        renamed[ours] = renamed.pop(theirs)
    return renamed


def write_split(split: str, paths: list[Path], folder: Path, args: argparse.Namespace) -> None:
    """Write <folder>/<split>.jsonl and its pictures. Raises ValueError with file, row and column."""
    total = images = 0
    with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
        for path in paths:
            for number, row in read_rows(path):
                pictures = Pictures(folder / "images", f"{split}-{total:05d}", args.image_root or path.parent)
                try:
                    converted = convert(rename(row, args.columns), pictures, args.label, args.seed)
                except RowError as error:
                    raise ValueError(f"{path}, row {number}, {error}") from error
                file.write(json.dumps(converted, default=as_json) + "\n")
                total += 1
                images += pictures.count
    if not total:
        raise ValueError(f"{', '.join(map(str, paths))}: no rows")
    print(f"{split}.jsonl: {total} rows, {images} pictures", flush=True)


def as_json(value: Any) -> str:
    """What JSON lacks, in the columns that are only kept: bytes as base64, dates and decimals as text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def find_splits(sources: list[Path]) -> dict[str, list[Path]]:
    """The files by split: the name without suffix and without the number of the shard."""
    splits: dict[str, list[Path]] = {}
    for source in sources:
        paths = [source]
        if source.is_dir():
            paths = sorted(path for path in source.iterdir() if path.suffix in (".parquet", ".jsonl"))
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{path}: no such file")
            if path.suffix not in (".parquet", ".jsonl"):
                raise ValueError(f"{path}: must end in .parquet or .jsonl")
            split = re.sub(r"-\d+-of-\d+$", "", path.stem)
            splits.setdefault(split, []).append(path)
    if not splits:
        raise ValueError(f"no .parquet or .jsonl files in {', '.join(map(str, sources))}")
    return splits


def parse_columns(text: str) -> dict[str, str]:
    pairs = [item.split("=", 1) for item in text.split(",") if item]
    if any(len(pair) < 2 or not all(pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected ours=theirs,..., not {text!r}")
    return dict(pairs)


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
        splits = find_splits(args.sources)
        if args.out.exists():
            raise ValueError(f"--out {args.out} exists: remove it or name another")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        # Written next to it and renamed: whoever finds <out> finds all of it.
        with tempfile.TemporaryDirectory(prefix=f"{args.out.name}.", dir=args.out.parent) as scratch:
            folder = Path(scratch) / "whole"
            (folder / "images").mkdir(parents=True)
            for split, paths in splits.items():
                write_split(split, paths, folder, args)
            folder.rename(args.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
