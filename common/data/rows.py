"""JSONL rows to prompts.

    line   -> JSON object -> what it asks                               read_rows, read_row -> Asked
    Asked  -> messages as parts, pictures in their places               message_turns, place_media
           -> chat template -> token ids, placeholders expanded         make_prompt -> Prompt

Of pictures and videos only the headers are read here; `loader.PromptLoader` decodes them when a step
needs them. A user's mistake is a ValueError that names the file, the line and the numbers.
"""

import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Collection

from PIL import Image
from torch import Tensor

from common import distributed
from common.data.families import Family, is_clip, video_model_types
from common.data.folder import is_inside
from common.data.images import clip_times, image_size
from common.data.processor import Processor
from common.distributed import printable
from common.flags import DataArgs

PLACES = ("<image>", "<video>")  # in the strings of rows
ROLES = ("system", "user", "assistant", "tool")
# What --columns can rename.
COLUMNS = {name: name for name in ("prompt", "images", "answer", "label")}
Media = str | tuple[str, ...]  # the path of a picture; of a clip its file, or those of its frames


@dataclass(frozen=True)
class Asked:
    """What a row asks, as the file has it."""

    prompt: str | list  # text or messages
    media: list[Media] = field(default_factory=list)  # paths, relative to the folder
    index: int = 0
    source: str = ""
    folder: str = "/"
    system_prompt: str = ""
    reference: str | None = None
    label: str | None = None
    row: dict = field(default_factory=dict)
    grids: tuple | None = None  # of the media, where they are known: no header is read then


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """One row of the data, ready for the model but for its pixels (see `loader.load_pixels`)."""

    # Rows before it in the file, bad ones too: it seeds the sampling noise, so a skip must not
    # shift it.
    index: int
    source: str  # "train.jsonl:12", for messages
    messages: list[dict]  # content as parts, without their files
    text: str  # rendered prompt, one placeholder per picture or clip
    images: tuple[Media, ...]  # absolute paths
    grids: tuple[tuple, ...]  # `Family.grid` of each picture, `clip_grid` of each clip
    input_ids: Tensor  # (P,) int64, placeholders expanded as `Family.expand` says
    image_tokens: int  # M, those of input_ids that stand for image features
    reference: str | None
    label: str | None
    # All columns as the file has them, for reward functions, and the folder of the file.
    row: dict = field(default_factory=dict)
    folder: str = ""


# -------------------------------------------------------------------------------------------------
# Files of rows
# -------------------------------------------------------------------------------------------------


def parse_columns(text: str) -> dict[str, str]:
    """--columns: prompt=question,answer=solution -> the name in the file of each of our columns."""
    columns = dict(COLUMNS)
    pairs = text.split(",") if text else []
    for pair in pairs:
        ours, _, theirs = (part.strip() for part in pair.partition("="))
        if ours not in COLUMNS or not theirs:
            raise ValueError(
                f"--columns {text}: {pair!r} is not one of {', '.join(COLUMNS)}, = and the name of "
                "a column"
            )
        columns[ours] = theirs
    return columns


def load_prompts(
    path: str,
    processor: Processor,
    args: DataArgs,
    columns: dict[str, str] = COLUMNS,
    system_prompt: str = "",
) -> list[Prompt]:
    """Read a JSONL file of prompts; the paths of pictures are relative to it, and only their
    headers are read.

    Raises ValueError: no such file, no rows, bad rows (the first five and their number), no row
    left after skipping.
    """
    folder = os.path.dirname(os.path.abspath(path))

    def build(index: int, source: str, row: dict) -> Prompt:
        fields = read_row(row, columns)
        asked = Asked(
            **fields,
            index=index,
            source=source,
            folder=folder,
            system_prompt=system_prompt,
            row=row,
        )
        return make_prompt(processor, asked, args)

    return read_rows(path, build, args, known={*columns.values(), "videos"})


def read_rows(
    path: str, build: Callable[[int, str, dict], Any], args: DataArgs, known: Collection[str]
) -> list:
    """``build(index, "file.jsonl:12", row)`` of every row of a JSONL file, in file order; blank
    lines are no rows. ``build`` raises ValueError for a bad row, which stops the run or is skipped,
    by --on_bad_row.

    Columns that are not ``known`` are no error, but rank 0 prints their names: one may be
    misspelled.
    """
    rows = read_lines(path)[: args.max_rows or None]
    further: set[str] = set()

    def load_row(index: int, source: str, line: bytes) -> tuple[Any, str]:
        """What ``build`` makes of a line, and what is wrong with it."""
        try:
            row = parse_row(line)
            further.update(row.keys() - known)
            return build(index, source, row), ""
        except ValueError as error:
            return None, printable(f"{source}: {error}")

    Image.init()  # or the threads would race to load the plugins
    with ThreadPoolExecutor(8) as pool:  # headers wait for the file system, not for the processor
        loaded = list(pool.map(load_row, range(len(rows)), *zip(*rows)))
    good = [row for row, problem in loaded if not problem]
    bad = [problem for _, problem in loaded if problem]
    if bad and (args.on_bad_row == "error" or not good):
        raise ValueError("\n  ".join([f"{path}: {len(bad)} of {len(rows)} rows are bad", *bad[:5]]))
    if bad and distributed.is_main():
        print(
            f"{path}: skipped {len(bad)} bad rows of {len(rows)}:", *bad[:5], sep="\n  ", flush=True
        )
    if further and distributed.is_main():
        names = ", ".join(map(repr, sorted(further)))
        print(f"{path}: columns that are kept, but not read: {names:.400}", flush=True)
        if further & {"image", "image_path", "image_paths", "picture", "pictures"}:
            print(f"warning: {path}: pictures are read from the column 'images' only", flush=True)
    return good


def read_lines(path: str) -> list[tuple[str, bytes]]:
    """("file.jsonl:12", line) of every line that is not blank."""
    if not os.path.isfile(path):
        raise ValueError(
            f"{path}: {'a folder, not a JSONL file' if os.path.isdir(path) else 'no such file'}"
        )
    name = os.path.basename(path)
    # Bytes: of all the line separators that JSON strings may hold, only \n ends a row.
    lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows = [
        (f"{name}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not rows:
        raise ValueError(f"{path}: empty file, no rows")
    return rows


def parse_row(line: bytes) -> dict:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"invalid JSON ({error}); a row is one line") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, not {row!r:.80}")
    return row


# -------------------------------------------------------------------------------------------------
# Columns of a row
# -------------------------------------------------------------------------------------------------


def read_row(row: dict, columns: dict[str, str]) -> dict[str, Any]:
    """prompt, media, label and reference of a row; the prompt is yet to be checked."""
    if columns["prompt"] not in row:
        raise ValueError(
            f"no column {columns['prompt']!r} for the prompt (--columns prompt=...); "
            f"{columns_of(row)}"
        )
    # Text-only rows may lack "images"; a column that the user named must exist, or all pictures may
    # be lost.
    named = columns["images"]
    if named != "images" and not {named, "videos"} & row.keys():
        raise ValueError(
            f"no column {named!r} for the pictures (--columns images=...; null: none); "
            f"{columns_of(row)}"
        )
    label, answer = row.get(columns["label"]), number_as_text(row.get(columns["answer"]))
    if not isinstance(label, str | None):
        raise ValueError(f"column {columns['label']!r} must be a string, not {label!r:.80}")
    if not isinstance(answer, str | None):
        raise ValueError(
            f"column {columns['answer']!r} must be a string or a finite number, not {answer!r:.80}"
        )
    media = media_list(row.get(named), row.get("videos"), named)
    return {"prompt": row[columns["prompt"]], "media": media, "label": label, "reference": answer}


def columns_of(row: dict) -> str:
    """The columns of a row, for messages."""
    return f"the row has {', '.join(map(repr, row)) or 'no columns':.400}"


def number_as_text(value: Any) -> Any:
    """An integer or finite float as its text, anything else unchanged. True and false are left
    alone: whether a model should say "true", "yes" or "1" is for the data to say."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number and abs(value) < math.inf else value


def media_list(images: Any, clips: Any, column: str = "images") -> list[Media]:
    """The pictures of a row as paths, and then its clips, each a file or a list of pictures, as
    tuples of paths. Raises ValueError: neither one nor a list of them nor None."""
    picture_rule = f"column {column!r} must be a path or a list of paths"
    clip_rule = (
        "column 'videos' must be a list of clips, each a path or a list of the paths of its frames"
    )
    pictures = [_path(image, picture_rule) for image in _as_list(images)]
    return pictures + [_clip_paths(clip, clip_rule) for clip in _as_list(clips)]


def _as_list(value: Any) -> list:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _clip_paths(clip: Any, rule: str) -> tuple[str, ...]:
    """The paths of a clip, which is a file or a list of pictures."""
    if clip == []:
        raise ValueError(f"{rule}; this clip has 0 frames")
    return tuple(_path(frame, rule) for frame in _as_list(clip))


def _path(file: Any, rule: str) -> str:
    """A path, as it is. Raises ValueError, with the ``rule`` that the row breaks."""
    if not isinstance(file, str) or not file or re.match("(?:https?|data|file):", file):
        raise ValueError(f"{rule} (launch/convert.py writes pictures to files), not {file!r:.80}")
    try:
        file.encode("utf-8")
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON may hold
        raise ValueError(f"{rule}; {file!r:.80} is no Unicode text") from error
    return file


# -------------------------------------------------------------------------------------------------
# Messages
# -------------------------------------------------------------------------------------------------

PART_RULE = (
    'a part of a message must be {"type": "text", "text": ...}, {"type": "image"} or {"type": '
    '"video"}, the latter two '
    'with their file as "image" or "video", or in the columns'
)


def message_turns(prompt: str | list) -> list[dict]:
    """The messages of a row, content as parts. Raises ValueError: neither a string nor messages
    that a prompt can be."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    valid = isinstance(turns, list) and turns and all(map(_is_message, turns))
    if not valid or turns[-1]["role"] == "assistant":
        raise ValueError(
            'prompt must be a string or messages {"role": ..., "content": string or parts}, with '
            f"roles {', '.join(ROLES)}, the last not by the assistant; it is {turns!r:.120}"
        )
    return [{**turn, "content": message_parts(turn["content"])} for turn in turns]


def _is_message(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and turn.get("role") in ROLES
        and isinstance(turn.get("content"), str | list)
    )


def message_parts(content: str | list) -> list[dict]:
    """Message content as text, image and video parts, the latter with "file" if they name one;
    "<image>" and "<video>" in a string stand for them."""
    if not isinstance(content, str):
        return [_read_part(part) for part in content]
    parts = []
    for piece in re.split("(<image>|<video>)", content):
        if piece in PLACES:
            parts.append({"type": piece[1:-1]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _read_part(part: Any) -> dict:
    given: dict[str, Any] = {}
    if isinstance(part, dict):  # tables give every part every key, the ones it has not as null
        given = {key: value for key, value in part.items() if value is not None}
    kind = given.get("type")
    if kind == "text" and given.keys() == {"type", "text"} and isinstance(given["text"], str):
        return given
    if kind not in ("image", "video") or not given.keys() <= {"type", kind}:
        raise ValueError(f"{PART_RULE}, not {part!r:.80}")
    if kind not in given:
        return {"type": kind}
    read = _path if kind == "image" else _clip_paths
    return {"type": kind, "file": read(given[kind], PART_RULE)}


def place_media(messages: list[dict], media: list[Media], row: dict) -> list[Media]:
    """The pictures and clips of messages in the order of their places: those of the parts that name
    one, which they lose here, and ``media`` for the others. The ``row`` is for messages."""
    users = [message for message in messages if message["role"] == "user"]
    places = []
    for message in messages:
        places += [part for part in message["content"] if part["type"] != "text"]
    if not places and len(users) == 1:
        # The row does not say where: images first, as Qwen-VL is trained.
        places = [{"type": kind_of(item)} for item in media]
        users[0]["content"] = places + users[0]["content"]
    for kind in ("image", "video"):
        free = [part for part in places if part["type"] == kind and "file" not in part]
        fill_places(kind, free, [item for item in media if kind_of(item) == kind], row)
    return [part.pop("file") for part in places]


def fill_places(kind: str, free: list[dict], media: list[Media], row: dict) -> None:
    """Give each place its picture or clip. Raises ValueError: more of the ones than of the
    others."""
    if len(free) != len(media):
        columns = f"; {columns_of(row)}" if row and not media else ""
        raise ValueError(
            f"{len(media)} {kind}s for {len(free)} places (<{kind}> in a string, or parts of type "
            f"{kind} without a file of their own){columns}"
        )
    for part, item in zip(free, media):
        part["file"] = item


def kind_of(item: Media) -> str:
    return "image" if isinstance(item, str) else "video"


def user_text(messages: list[dict]) -> str:
    """What the user says in the messages of a prompt, without markup and image places."""
    said = []
    for message in messages:
        if message["role"] == "user":
            said += [part["text"] for part in message["content"] if part["type"] == "text"]
    return "\n".join(said)


def question_text(messages: list[dict], images: int, plain: Callable[[str], str] = str) -> str:
    """What the user says, each text made ``plain``, for a question about it and the prompt's
    ``images`` pictures and clips: with their places; without where they come before all text, as in
    a row that does not say where, or not from the user."""
    users = [message["content"] for message in messages if message["role"] == "user"]
    kinds = [part["type"] for content in users for part in content]
    come_first = "text" not in kinds[:images]
    without_places = come_first or len(kinds) - kinds.count("text") != images
    lines = []
    for content in users:
        line = ""
        for part in content:
            if part["type"] == "text":
                line += plain(part["text"])
            elif not without_places:
                line += f"<{part['type']}>"
        lines.append(line)
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------
# Prompts
# -------------------------------------------------------------------------------------------------


def make_prompt(processor: Processor, asked: Asked, args: DataArgs | None = None) -> Prompt:
    """Render and encode one row by a `Processor`. Raises ValueError: whatever is wrong with
    it.

    args: the longest prompt, and the folder in which all pictures must lie; None: no such bounds.
    """
    limit, root = (args.max_prompt_tokens, args.image_root) if args else (1 << 30, "")
    messages = message_turns(asked.prompt)
    spoken = [
        part for message in messages if message["role"] != "system" for part in message["content"]
    ]
    if not any(part.get("text", "").strip() for part in spoken):
        raise ValueError("empty prompt: no text but the system's")
    items = place_media(messages, asked.media, asked.row)
    if asked.system_prompt:
        if any(message["role"] == "system" for message in messages):
            raise ValueError(
                "a system message in the row, and a system prompt by flag or judge.json: drop one "
                "of them"
            )
        system = {"type": "text", "text": asked.system_prompt}
        messages.insert(0, {"role": "system", "content": [system]})

    paths = tuple(locate(item, asked.folder, root) for item in items)
    check_media(processor, paths)
    grids = asked.grids
    if grids is None:
        grids = tuple(media_grid(processor.family, path) for path in paths)
    text, input_ids, image_tokens = processor.encode(messages, grids)
    if len(input_ids) > limit:
        videos = " and videos" if any(map(is_clip, grids)) else ""
        raise ValueError(
            f"prompt too long: {len(input_ids)} tokens with those of {len(grids)} images{videos}; "
            f"the limit is {limit}"
        )
    return Prompt(
        index=asked.index,
        source=asked.source,
        messages=messages,
        text=text,
        images=paths,
        grids=grids,
        input_ids=input_ids,
        image_tokens=image_tokens,
        reference=asked.reference,
        label=asked.label,
        row=asked.row,
        folder=asked.folder,
    )


def locate(item: Media, folder: str, root: str) -> Media:
    """The absolute path of a picture, or those of a clip. Raises ValueError: not in the folder
    ``root``, if there is one."""
    if isinstance(item, tuple):
        return tuple(locate(path, folder, root) for path in item)
    path = os.path.normpath(os.path.join(folder, item))
    if not root:
        return path
    if not is_inside(root, path):
        raise ValueError(f"{path} lies outside of --image_root {root}")
    return os.path.realpath(path)  # a link that is changed later must not lead out of the folder


def check_media(processor: Processor, items: tuple[Media, ...]) -> None:
    """Raises ValueError: pictures or clips that the processor's family does not take."""
    family, name = processor.family, processor.config.model_type
    clips = [kind_of(item) for item in items].count("video")
    if items and not family.has_pictures:
        raise ValueError(f"{len(items)} images for {name}, a model of text only")
    if clips and not family.takes_videos:
        raise ValueError(
            f"{clips} videos for {name}; only {', '.join(video_model_types())} take videos"
        )


def media_grid(family: Family, item: Media) -> tuple:
    """The grid of a picture or clip, by its header."""
    if isinstance(item, str):
        return family.grid(*image_size(item))
    return family.clip_grid(*clip_times(item, family.video_fps))
