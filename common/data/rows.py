"""JSONL rows to prompts.

    file   -> lines with JSON objects -> prompt and media          parse_lines, read_rows, load_prompts
    prompt -> messages as parts, media in their places             message_turns, place_media
           -> chat template -> token ids, placeholders expanded    make_prompt -> Prompt

Of images and videos only the headers are read here; `loader.PromptLoader` decodes them when a step
needs them. A user's mistake is a UserError that names the file, the line and the numbers.
"""

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import Image
from torch import Tensor

from common import distributed
from common.data.coordinates import Place, Regions, read_regions
from common.data.images import clip_times, image_size
from common.data.processor import UNBOUNDED, Processor, called_function
from common.flags import DataArgs, flag
from common.ground.files import (
    UserError,
    check_form,
    number_as_text,
    parse_json,
    printable,
    read_bytes,
)

MEDIA_MARKS = ("<image>", "<video>")  # in the strings of rows
ROLES = ("system", "user", "assistant", "tool")
MOST_TASKS = 50  # that have metrics of their own
# What --columns can rename.
COLUMNS = {name: name for name in ("prompt", "images", "answer", "label")}
# How files begin that are not JSONL, and what they are; after a colon, what to do if
# launch/data/convert.py cannot read them.
OTHER_FILES = {
    rb"PAR1": "a Parquet table",
    rb"\xff\xfe|\xfe\xff|.?\0": "text in UTF-16",
    rb"\s*\[": "a JSON list",
    rb"\s*\{\s*\n": "JSON with its objects on several lines each",
    rb"\x1f\x8b|PK\x03\x04|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd": "compressed: unpack it first",
    rb"ARROW1|\xff{4}": "an Arrow table: convert.py reads what Dataset.to_parquet makes of it",
    rb'[,;\t]?"?\w[\w ]*"?[,;\t]': (
        "a table of text: pandas' to_json(orient='records', lines=True) makes JSONL of it"
    ),
}
# How other systems call our columns, for the advice of `check_columns`; the first that a row has.
NAMES_ELSEWHERE = {
    "prompt": "question problem query message instruction conversations input".split(),
    "images": "image_urls image_paths image_path img pictures picture".split(),
    "answer": "solution ground_truth final_answer target gold".split(),
}
LEAVE_OUT = "(--on_bad_row skip leaves such rows out)"
# Columns that other systems read as part of the prompt or as the answer.
READ_ELSEWHERE = "conversations history input instruction objects reward_model system tools".split()
# What is not a path: URLs, base64 of PNG, JPEG, GIF and WebP, and names that no file can have.
NO_PATH = r"(?s)(https?|data|file):|iVBORw0KGgo|/9j/|R0lGOD|UklGR|.*[\0\ud800-\udfff]|.{4097}|$"
# How columns of images look when printed by Python.
PRINTED_IMAGES = r"(?i)\.(bmp|gif|jpe?g|png|tiff?|webp)'|'(data:image|iVBORw0KGgo|/9j/)"
JSON_CHAT = r"""\s*(\[\s*\{\s*["'](content|value)|\[?\s*\{\s*["'](role|from))["']\s*:"""
# How other systems write the place of one of several images.
NUMBERED_IMAGE = r"(?i)<\|?(image|img)[ _-]?\d+\|?>"
WORKED_SOLUTION = r"(?m)^####.*\s*\Z|.\\boxed|<answer>"
Media = str | tuple[str, ...]  # the path of an image; of a clip its file, or those of its frames


@dataclass(frozen=True)
class RowArgs:
    """rows"""

    row_kind: str = flag(
        "prompts",
        "kind of rows: prompts; or judgements (see train_grm_vl.py --help judgements), to train a judge by "
        "RL: --reward verdict compares the judge's answers with the rows' verdicts",
        choices=("prompts", "judgements"),
    )
    columns: str = flag(
        "",
        "columns of your files, as in prompt=question,answer=solution,label=source",
        several=True,
    )
    system_prompt: str = flag(
        "",
        "system message put before every prompt; empty: none",
    )
    curriculum: str = flag(
        "",
        "file.py:function of (rows, samples, rewards) that returns weights, by which rows are drawn; it gets "
        "the columns of each row of --data, its number of samples so far, and the sum of their rewards; "
        "empty: every row once in a pass",
        paths=True,
    )
    ptx_data: str = flag(
        "",
        "JSONL with prompt, images, response for a next-token loss besides the RL loss; empty: none",
        paths=True,
    )
    ptx_coef: float = flag(
        0.0,
        "weight of the --ptx_data loss in the actor's loss (PPO-ptx); 0: off",
    )
    ptx_batch: int = flag(64, "rows of --ptx_data per update of the actor, over all ranks", low=1)
    ptx_labels: str = flag(
        "text",
        "tokens of --ptx_data that carry the loss: all text, or responses",
        choices=("text", "responses"),
    )


@dataclass(frozen=True, eq=False)
class Prompt:
    """One row of the data, ready for the model except for its pixels (see `loader.load_pixels`)."""

    messages: list[dict]  # content as parts, without their files
    text: str  # rendered prompt, one placeholder per image or clip
    images: tuple[Media, ...]  # absolute paths
    grids: tuple[tuple, ...]  # `Family.grid` of each image, `clip_grid` of each clip
    input_ids: Tensor  # (P,) int64, placeholders expanded as `Family.expand` says
    image_tokens: int  # M, those of input_ids that stand for image features
    # Number of rows before it in the files, bad ones included (of judgements twice as many, as each can be
    # asked in two orders): it seeds the sampling noise, so a skipped row must not shift it.
    index: int = 0
    position: int = 0  # among the rows that are trained on: where a run keeps its history
    source: str = ""  # "train.jsonl:12", for messages
    reference: str | None = None
    label: str | None = None
    task: str = ""  # its label or file, where there are several: see `name_tasks`
    order: str = ""  # of the sides of a judgement: given or swapped; "": no judgement
    # All columns as the file has them, for reward functions, and the folder of the file.
    row: dict = field(default_factory=dict)
    folder: str = ""
    # One for each image, None for a clip. Empty if the headers were not read.
    places: tuple[Place | None, ...] = ()
    regions: Regions | None = None

    @property
    def patch_grids(self) -> Tensor:
        """(I, G) int64, G up to 3: frames, rows and columns of each image or clip, without a clip's times."""
        return torch.tensor([grid[:3] for grid in self.grids])


class Example(NamedTuple):
    """A prompt and the response to imitate, or the answers of a conversation (``stream``)."""

    prompt: Prompt  # a judge's: the label is the kind of question, the reference the right verdict
    # (n,) label tokens, an end token after each answer; empty for rows that are not imitated
    target: Tensor
    text: str  # the target as text; of a conversation the last answer
    stream: "Stream | None" = None  # if there are several answers

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        following = self.stream.input_ids if self.stream else self.target
        return len(self.prompt.input_ids) + len(following)


class Stream(NamedTuple):
    """What follows the prompt of a conversation: R tokens, from its first answer to its last. The
    images that it shows are the last of the prompt's."""

    input_ids: Tensor  # (R,)
    is_own: Tensor  # (R,) bool: label tokens
    messages: list[list[dict]]  # between each answer and the next, not the labels' own
    last: Example  # the last answer, behind all that comes before it


# -------------------------------------------------------------------------------------------------
# Files of rows
# -------------------------------------------------------------------------------------------------


def parse_columns(text: str) -> dict[str, str]:
    """--columns: prompt=question,answer=solution -> the name in the file of each of our columns."""
    columns = dict(COLUMNS)
    for pair in filter(None, text.split(",")):
        name, _, theirs = (part.strip() for part in pair.partition("="))
        if name not in COLUMNS or not theirs:
            raise UserError(
                f"--columns {text}: {pair!r} is not one of {', '.join(COLUMNS)}, = and the name of "
                "a column"
            )
        columns[name] = theirs
    return columns


def load_prompts(
    path: str,
    processor: Processor,
    args: DataArgs,
    columns: dict[str, str] = COLUMNS,
    system_prompt: str = "",
    env: str = "",
) -> list[Prompt]:
    """Read a JSONL file of prompts; the paths of images are relative to it, and only their headers
    are read. An environment (``env``) may read any column.

    Raises UserError: no rows, bad rows (the first five and their number), no row left after
    skipping.
    """

    def build(row: dict, fields: dict) -> Prompt:
        for name, theirs in columns.items():
            # Rows may lack a column, but not one that the user named: a misspelled name would lose
            # all images, or all answers.
            is_needed = name == "prompt" or theirs != name
            if is_needed and theirs not in row and not (name == "images" and "videos" in row):
                raise UserError(
                    f"no column {theirs!r} (see --columns; launch/data/convert.py reads rows of other "
                    f"systems); {columns_of(row)}"
                )
        prompt = make_prompt(
            processor,
            row[columns["prompt"]],
            media_list(row, columns["images"]),
            args,
            system_prompt,
            reference=text_column(row, columns["answer"]),
            label=text_column(row, columns["label"]),
            **fields,
        )
        return with_regions(prompt)

    lines = parse_lines(path)
    check_columns(path, objects_of(lines), columns)
    prompts = read_rows(path, lines, build, args)
    if not env:
        tell_unread(path, lines, {*columns.values(), "videos", "rubric", "regions"})
    tell_numbered_images(path, prompts)
    worked = any(re.search(WORKED_SOLUTION, prompt.reference or "") for prompt in prompts)
    if worked:
        distributed.say_once(
            f"warning: {path}: answers seem to be worked solutions, which rules compare as a whole; "
            "launch/data/convert.py takes the final answers out of them"
        )
    return prompts


def name_tasks(sets: list[list[Prompt]], paths: Sequence[str]) -> list[list[Prompt]]:
    """The rows of files with the names of their tasks, for metrics of each: their labels and, where these
    do not tell rows apart, their files. Rows of a single task get none."""
    files = [Path(path).stem for path in paths]
    if len(set(files)) < len(files):
        files = [f"{Path(path).absolute().parent.name}/{name}" for path, name in zip(paths, files)]
    by_label = [[row.label or name for row in rows] for rows, name in zip(sets, files)]
    count = len(set(itertools.chain(*by_label)))
    if count > MOST_TASKS:
        distributed.say_once(f"{count} labels in {', '.join(paths)}: no metrics of each of them")
    if count == 1 < len(files) or count > MOST_TASKS:
        by_label = [[name] * len(rows) for rows, name in zip(sets, files)]
    if len(set(itertools.chain(*by_label))) < 2:
        return sets
    return [
        [replace(row, task=task) for row, task in zip(rows, tasks)]
        for rows, tasks in zip(sets, by_label)
    ]


def check_columns(path: str, rows: list[dict], columns: dict[str, str]) -> None:
    """Raises UserError, once for all rows: none of them has a prompt, and how --columns names what they
    have in its place. Rows with a prompt and no answer are told of."""
    if not rows:
        return
    lacking = {
        name
        for name in NAMES_ELSEWHERE
        if columns[name] == name and not any(row.get(name) or row.get(name[:-1]) for row in rows)
    }
    found_as = {name: name_elsewhere(name, rows, columns) for name in lacking}
    named = {name: theirs for name, theirs in columns.items() if theirs != name}
    named |= {name: theirs for name, theirs in found_as.items() if theirs}
    advice = ",".join(f"{name}={named[name]}" for name in columns if name in named)
    if found_as.get("prompt"):
        raise UserError(
            f"{path}: no row has a column 'prompt': --columns {advice} reads what they have, and python "
            f"launch/data/convert.py {path} --out NEW_FOLDER rows of other systems; {columns_of(rows[0])}"
        )
    if "prompt" not in lacking and found_as.get("answer"):
        distributed.say_once(f"{path}: no row has a column 'answer': --columns {advice} reads one")


def name_elsewhere(name: str, rows: list[dict], columns: dict[str, str]) -> str:
    """The column in which every row seems to have what we call ``name``; "" if there is none."""
    for theirs in NAMES_ELSEWHERE[name]:
        if theirs not in columns.values() and all(theirs in row for row in rows):
            return theirs
    return ""


def tell_numbered_images(path: str, prompts: Iterable[Prompt]) -> None:
    """Print that texts name images as other systems do."""
    if any(row.images and re.search(NUMBERED_IMAGE, row.text) for row in prompts):
        distributed.say_once(
            f"warning: {path}: <image1> or <image_1> in a text stands for no image: write <image> for "
            "each, in the order of images"
        )


Row = TypeVar("Row")


class BadRow(str):
    """What is wrong with a row, with file and line."""


Line = tuple[int, dict | BadRow]  # the number of a line, and its object or what is wrong with it


def read_rows(
    path: str,
    lines: list[Line],
    build: Callable[[dict, dict], Row],
    args: DataArgs,
) -> list[Row]:
    """``build(row, fields)`` of every row in the lines of a file, in their order.
    ``fields`` are those of `Prompt` about the origin of a row: index, source, row and folder.
    A row for which ``build`` raises stops the run or is skipped, by --on_bad_row.
    """
    folder, name = os.path.split(os.path.abspath(path))

    def read_row(index: int, number: int, row: dict | BadRow) -> Row | BadRow:
        source = f"{name}:{number}"
        if isinstance(row, BadRow):
            return row
        try:
            fields = {"index": index, "source": source, "row": row, "folder": folder}
            return build(row, fields)
        except UserError as error:
            return BadRow(f"{source}: {error}")
        except Exception as error:
            error.add_note(f"in {source}")
            raise

    Image.init()  # or the threads would race to load the plugins
    with ThreadPoolExecutor(8) as pool:  # headers wait for the file system, not for the processor
        rows = list(pool.map(read_row, range(len(lines)), *zip(*lines)))
    bad = [row for row in rows if isinstance(row, BadRow)]
    is_error = args.on_bad_row == "error" or len(bad) == len(rows)
    report_bad(path, bad, len(rows), is_error, LEAVE_OUT)
    return [row for row in rows if not isinstance(row, BadRow)]


def tell_unread(path: str, lines: list[Line], known: Collection[str]) -> None:
    """Print which columns of rows are none of the ``known`` ones: one may be misspelled, or contain what
    other systems read."""
    unread = set()
    for row in objects_of(lines):
        for column in row.keys() - known:
            plural = f"{column}s"  # see `media_list`
            if plural not in known or row.get(plural):
                unread.add(describe_column(column, row[column]))
    if unread:
        names = ", ".join(sorted(unread))
        distributed.say_once(f"{path}: columns that are kept, but not read: {names:.400}")


def count_rows(path: str) -> int:
    """The rows of a JSONL file, bad ones included."""
    return sum(bool(line.strip()) for line in read_jsonl(path).split(b"\n"))


def parse_lines(path: str) -> list[Line]:
    """Every line of a JSONL file but blank ones. Raises UserError: there is none, or it is another kind of
    file."""
    lines, name = [], os.path.basename(path)
    # Bytes: JSON strings may contain other line separators, but only \n ends a row.
    for number, line in enumerate(read_jsonl(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, "the row")
            if not isinstance(row, dict):
                raise UserError(f"a row must be a JSON object, not {row!r:.80}")
        except UserError as error:
            row = BadRow(f"{name}:{number}: {error}")
        lines.append((number, row))
    if not lines:
        raise UserError(f"{path}: empty file, no rows")
    return lines


def objects_of(lines: list[Line]) -> list[dict]:
    return [row for _, row in lines if isinstance(row, dict)]


def read_jsonl(path: str) -> bytes:
    """The bytes of a JSONL file. Raises UserError: another kind of file, and what to do."""
    if os.path.isdir(path):
        raise UserError(
            f"{path} is a folder; name its files, as in {path}/train.jsonl, or convert them: python "
            f"launch/data/convert.py {path} --out NEW_FOLDER"
        )
    if not os.path.isfile(path):
        raise UserError(
            f"{path} is no file (data of the hub: hf download NAME --repo-type dataset --local-dir "
            "FOLDER, then python launch/data/convert.py FOLDER --out NEW_FOLDER)"
        )
    content = read_bytes(path)
    start = content.removeprefix(b"\xef\xbb\xbf")
    for beginning, what in OTHER_FILES.items():
        if re.match(beginning, start):
            convert = f": python launch/data/convert.py {path} --out NEW_FOLDER"
            advice = "" if ":" in what else convert
            raise UserError(f"{path} is {what}; rows are JSONL, one JSON object per line{advice}")
    return content


def describe_column(column: str, value: Any) -> str:
    """The name of a column that is not read, with a hint if perhaps it should be."""
    if re.search(PRINTED_IMAGES, f"{value!r:.2000}") or column in READ_ELSEWHERE and value:
        return f"{column!r} (images, or part of prompt or answer? see --columns, launch/data/convert.py)"
    return repr(column)


def report_bad(
    where: str, problems: Sequence[str], rows: int, is_error: bool, advice: str = ""
) -> None:
    """Print how many of ``rows`` are bad, and what is wrong with the first five. Raises UserError
    if this ends the run, with advice on how the others go on."""
    if not problems:
        return
    first = [printable(problem[:1000]) for problem in problems[:5]]
    if is_error and advice and len(problems) < rows:
        first.append(advice)
    summary = "\n  ".join([f"{where}: {len(problems)} of {rows} rows are bad", *first])
    if is_error:
        raise UserError(summary)
    distributed.say_once(f"skipped: {summary}")


# -------------------------------------------------------------------------------------------------
# Columns of a row
# -------------------------------------------------------------------------------------------------


def columns_of(row: dict) -> str:
    """The columns of a row, for messages."""
    return f"the row has {', '.join(map(repr, row)) or 'no columns':.400}"


def text_column(row: dict, column: str) -> str | None:
    """A column of texts or numbers, as text."""
    text = number_as_text(row.get(column))
    if not isinstance(text, str | None):
        raise UserError(f"column {column!r} must be a string or a finite number, not {text!r:.80}")
    return text


def media_list(row: dict, column: str = "images") -> list[Media]:
    """The images of a row as paths, and then its clips as tuples of paths: of one file, or of a list of
    images. The names of these columns may also be singular."""
    images, clips = (
        row.get(name) or row.get(name.removesuffix("s")) for name in (column, "videos")
    )
    return [*map(_path, _as_list(images)), *map(_clip_paths, _as_list(clips))]


def _as_list(value: Any) -> list:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _clip_paths(clip: Any) -> tuple[str, ...]:
    return tuple(_path(frame) for frame in _as_list(clip) or [clip])  # an empty list is no clip


def _path(file: Any) -> str:
    """A path, perhaps behind file://."""
    if isinstance(file, str):
        file = file.removeprefix("file://")
    if not isinstance(file, str) or re.match(NO_PATH, file):
        raise UserError(
            "an image must be the path of a file, a video a path or a list of paths, not "
            f"{file!r:.80} (launch/data/convert.py writes images to files)"
        )
    return file


# -------------------------------------------------------------------------------------------------
# Messages
# -------------------------------------------------------------------------------------------------


def message_turns(prompt: str | list) -> list[dict]:
    """The messages of a prompt, as `read_messages` reads them. Raises UserError: neither a string nor
    messages that can be a prompt."""
    messages = read_messages(prompt)
    if not messages:
        raise UserError(f"prompt must be a string or messages; it is {prompt!r:.120}")
    if messages[-1]["role"] == "assistant":
        raise UserError(
            "a prompt must not end with the assistant's message: python launch/data/convert.py FILE "
            f"--out NEW_FOLDER makes it the response; the messages are {prompt!r:.120}"
        )
    return messages


def read_messages(prompt: str | list) -> list[dict]:
    """The messages of a row, which may be JSON in a string, with content as parts; empty if it holds
    neither. Raises UserError: something in them is no message."""
    turns = prompt
    if isinstance(prompt, str):
        is_json = re.match(JSON_CHAT, prompt)
        turns = parse_json(prompt, "prompt") if is_json else [{"role": "user", "content": prompt}]
    return [_read_turn(turn) for turn in turns] if isinstance(turns, list) else []


def _read_turn(turn: Any) -> dict:
    match turn:
        case {"role": "assistant", "tool_calls": [_, *_] as calls}:  # the template writes them
            parts = message_parts(turn.get("content") or [])
            return {**turn, "content": parts, "tool_calls": [_read_call(call) for call in calls]}
        case {"role": role, "content": str() | list() as content} if role in ROLES:
            return {**turn, "content": message_parts(content)}
    raise UserError(
        'prompt must be a string or messages {"role": ..., "content": string or parts}, with '
        f"roles {', '.join(ROLES)}, not {turn!r:.120} (launch/data/convert.py reads other forms)"
    )


def _read_call(call: Any) -> dict:
    """A call of a tool, with its arguments as an object. OpenAI has them as text, which templates would
    quote once more, or cannot iterate."""
    try:
        check_form(call, {"function?": dict}, "the call")
        function = called_function(call)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = parse_json(arguments, "its arguments")
        function = {**function, "arguments": arguments}
        check_form(function, {"name": str, "arguments": dict}, "the call")
    except UserError as error:
        raise UserError(
            'tool_calls must be a list of {"function": {"name": text, "arguments": object}}, '
            f"not {call!r:.120} ({error})"
        ) from error
    return {**call, "function": function} if call.get("function") else function


def message_parts(content: str | list) -> list[dict]:
    """Message content as text, image and video parts, the latter with "file" if they name one;
    "<image>" and "<video>" in a string stand for them."""
    if not isinstance(content, str):
        return [_read_part(part) for part in content]
    parts = []
    for piece in re.split("(<image>|<video>)", content):
        if piece in MEDIA_MARKS:
            parts.append({"type": piece[1:-1]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _read_part(part: Any) -> dict:
    pairs = part.items() if isinstance(part, dict) else ()
    # Tables give every part all keys, with null for those that it lacks.
    entries = {key: value for key, value in pairs if value is not None}
    match entries:
        case {"type": "text", "text": str(), **further} if not further:
            return entries
        case {"type": "image", "image": file, **further} if not further:
            return {"type": "image", "file": _path(file)}
        case {"type": "video", "video": clip, **further} if not further:
            return {"type": "video", "file": _clip_paths(clip)}
        case {"type": "image" | "video", **further} if not further:
            return entries
    raise UserError(
        'a part of a message must be {"type": "text", "text": ...}, {"type": "image"} or '
        '{"type": "video"}, the latter two with their file as "image" or "video", or in the '
        f"columns, not {part!r:.80} (launch/data/convert.py reads other forms)"
    )


def place_media(messages: list[dict], media: Sequence[Media]) -> list[Media]:
    """The images and clips of messages, in their order. A part that names its file loses the name here;
    ``media`` are for the other parts, or repeat those files. Raises UserError: the media do not fit
    the parts."""
    marks = _find_media_marks(messages, media)
    for kind in ("image", "video"):
        parts = [part for part in marks if part["type"] == kind]
        items = [item for item in media if kind_of(item) == kind]
        if items == [part.get("file") for part in parts]:
            continue
        free = [part for part in parts if "file" not in part]
        if len(free) != len(items):
            raise UserError(
                f"the columns of the row hold {len(items)} {kind}s for {len(free)} places "
                f"(<{kind}> in a string, without a number, or parts without a file of their own)"
            )
        for part, item in zip(free, items):
            part["file"] = item
    return [part.pop("file") for part in marks]


def _find_media_marks(messages: list[dict], media: Sequence[Media]) -> list[dict]:
    """The parts of messages that stand for images and clips; if there is none, <image> and <video>
    in the user's text parts do. A row without either has them before all text of its only user message,
    as Qwen-VL is trained."""
    users = [message for message in messages if message["role"] == "user"]
    marks = media_parts(messages)
    if media and not marks:
        for message in users:
            texts = [part["text"] for part in message["content"]]
            message["content"] = [part for text in texts for part in message_parts(text)]
        marks = media_parts(users)
    if not marks and len(users) == 1:
        marks = [{"type": kind_of(item)} for item in media]
        users[0]["content"] = marks + users[0]["content"]
    return marks


def media_parts(messages: list[dict]) -> list[dict]:
    """The parts of messages other than text."""
    return [part for message in messages for part in message["content"] if part["type"] != "text"]


def kind_of(item: Media) -> str:
    return "image" if isinstance(item, str) else "video"


def user_text(messages: list[dict], images: int = 0, plain: Callable[[str], str] = str) -> str:
    """The user's text in the messages of a prompt, each part passed through ``plain``. The marks of its
    ``images`` images and clips stay only if all are in the user's messages and some follow text."""
    users = [message["content"] for message in messages if message["role"] == "user"]
    kinds = [part["type"] for content in users for part in content]
    come_first = "text" not in kinds[:images]
    with_marks = not come_first and len(kinds) - kinds.count("text") == images
    lines = []
    for content in users:
        line = ""
        for part in content:
            if part["type"] == "text":
                line += plain(part["text"])
            elif with_marks:
                line += f"<{part['type']}>"
        lines.append(line)
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------
# Prompts
# -------------------------------------------------------------------------------------------------


def make_prompt(
    processor: Processor,
    prompt: str | list,
    media: Sequence[Media] = (),
    args: DataArgs = UNBOUNDED,
    system_prompt: str = "",
    grids: tuple | None = None,
    **fields: Any,
) -> Prompt:
    """Render and encode one row. Raises UserError: the row is bad.

    Args:
        prompt: text or messages.
        media: paths, relative to the folder.
        args: the longest prompt, and the folder in which all images must lie.
        grids: of the media, if they are known; no header is read then.
        fields: the further ones of `Prompt`.
    """
    messages = message_turns(prompt)
    items = place_media(messages, media)
    check_text(user_text(messages), items)
    if system_prompt:
        if any(message["role"] == "system" for message in messages):
            raise UserError(
                "the row has a system message, and a flag or judge.json sets a system prompt: remove "
                "one of them"
            )
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system_prompt}]})
    paths = tuple(locate(item, fields.get("folder", ""), args.image_root) for item in items)
    check_media(processor, paths)
    places = ()
    if grids is None:
        measured = [measure(processor, path, len(paths)) for path in paths]
        grids, places = zip(*measured) if measured else ((), ())
    text, input_ids, image_tokens = processor.encode(messages, grids, args)
    return Prompt(messages, text, paths, grids, input_ids, image_tokens, places=places, **fields)


def with_regions(prompt: Prompt) -> Prompt:
    """A prompt with the regions of its row. Raises UserError: see `read_regions`."""
    return replace(prompt, regions=read_regions(prompt.row.get("regions"), prompt.places))


def check_text(text: str, media: Sequence[Media]) -> None:
    """Raises UserError: there is neither text nor an image of the user's, or images are named in the
    text, as in rows for Qwen-VL."""
    if not text.strip() and not media:
        raise UserError("empty prompt: the user's messages have neither text nor image")
    if re.search("<img>.+</img>", text):
        raise UserError(
            "<img>path</img> in a text: give the path in images, and write <image> in its place"
        )


def locate(item: Media, folder: str, root: str) -> Media:
    """The absolute path of an image, or those of a clip: relative to the folder or, if there is no such
    file, to ``root``. Raises UserError: with links resolved, it lies outside of ``root``, if given."""
    if isinstance(item, tuple):
        return tuple(str(locate(path, folder, root)) for path in item)
    paths = [os.path.normpath(os.path.join(base, item)) for base in (folder, root)]
    path = next(filter(os.path.exists, paths if root else ()), paths[0])
    if root:
        path = os.path.realpath(path)  # a link that changes later must not lead out of the folder
        if not Path(path).is_relative_to(Path(root).resolve()):
            raise UserError(f"{path} lies outside of --image_root {root}")
    return path


def check_media(processor: Processor, items: tuple[Media, ...]) -> None:
    """Raises UserError: images or clips that the processor's family does not take."""
    for kind in map(kind_of, items):
        if kind not in processor.family.media:
            raise UserError(f"{processor.config.model_type} takes no {kind}s")


def measure(processor: Processor, item: Media, count: int) -> tuple[tuple, Place | None]:
    """The grid of an image or clip and, for an image, its place: read from the header, for a prompt with
    ``count`` of them."""
    family = processor.family.among(count)
    if not isinstance(item, str):
        return family.clip_grid(*clip_times(item, family.video_fps)), None
    size = image_size(item)
    grid = family.grid(*size)
    return grid, Place(size, family.seen_size(grid), processor.space)
