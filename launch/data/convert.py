"""Data of other systems as rows of the trainers: JSONL, and a file for every image.

    python launch/data/convert.py rows.jsonl --out data/mine

Parquet needs a package that the trainers do without, hence an environment of its own. Geometry3k,
for example (https://huggingface.co/datasets/hiyouga/geometry3k: 2,101 / 300 / 601 rows):

    python -m venv .venv-convert
    .venv-convert/bin/pip install pyarrow pillow huggingface_hub
    .venv-convert/bin/hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    .venv-convert/bin/python launch/data/convert.py geometry3k/data --label geo3k --out data/geo3k

Sources are .parquet, .jsonl and .json files, or folders of the first two. JSON may be one list, or
objects over several lines. The shards train-00000-of-00002 and train-00001-of-00002 become train.jsonl,
and so does default/train/0000.parquet. Images are written unchanged, as images/<split>-<row>-<place>.jpeg
and so on; one that several rows show is written once. Paths in the source are relative to its file or, if
there is no such file, to --image_root, outside of which nothing is read.

    our column   taken from (the first that is there)
    prompt       prompt, messages, conversations, conversation, message, query, question, problem, input: text, messages,
                 or messages as JSON text; before it columns system and history
    images       images, image or image_urls, and parts of messages that bring an image: bytes, base64, data URL, path;
                 file_name in a metadata.jsonl
    videos       videos or video: paths, which become absolute, or lists of frames
    answer       answer, verl's reward_model.ground_truth, final_answer, TRL's solution, ground_truth, the most common of
                 answers, or else the response; of a worked solution the <answer> or \\boxed{}, or what follows
                 #### in the last line; a list of one is that one
    response     completion, output or response, or a last message by the assistant
    label        label, source, data_source, query_source, or else --label; in pairs it is called source
    regions      objects or, with --boxes, boxes, bbox, gt_bbox or solution; or an answer of objects with bbox_2d, point_2d, ...
    responses    chosen and rejected, as text or conversations, or the two of response (VL-RewardBench); ms-swift's
                 rejected_response or rejected_messages beside the chosen one; a pair for each of several rejected ones
    preferred    A or B, the response that was chosen; with human_ranking also a tie

--columns gives columns our names. Several that a plus joins become a list of those that are not null:

    --columns images=image_1+image_2,prompt=Text
    --columns responses=response1+response2,preferred=overall_preference --preferred_is sign

"preferred" may be a text (A, model_a, A>B, tie, the column of the better response) or a number, whose
meaning --preferred_is tells. Any other value is an error.

If both responses are pictures (bytes, a path, a message of one image, or <image> for the two of
images), the row is a pair of pictures: images holds them, and there are no responses.

    form                  system                             read as
    role, content         verl, TRL, OpenAI, ms-swift        messages
    from, value           LLaVA, Qwen-VL, InternVL, VLM-R1   messages: human is the user, gpt the assistant
    texts                 FineVision, The Cauldron           messages
    instruction, input    alpaca, LLaMA-Factory              the prompt, joined by a newline
    <img>path</img>       Qwen-VL                            not read: put the path into images, and <image> in its place
    objects               ms-swift                           regions; <ref-object> becomes the name, <bbox> in a response <box>
    bbox_2d; Position     Vero; Visual-RFT                   regions
    x, y                  PixMo                              regions: --columns boxes=points --space 100
    [x1, y1, x2, y2]      VLM-R1, GUI-R1, ScreenSpot-Pro     regions, with --boxes corners
    [x, y, w, h]          COCO, RefCOCO, ScreenSpot          regions, with --boxes sizes
    (x, y); <box>[[...    UGround; InternVL                  regions, with --boxes corners
    extra_info            Vero                               its reward_type is the label; its tolerance

Boxes are in pixels of the file, unless --space says otherwise; ms-swift's norm1 is 0 to 1, its norm_1000 and
Visual-RFT's Position 0 to 1000. VLM-R1's boxes of RefCOCO end at x + w + 1, and stay as they are.

For any other form, write a function: --map my_rows.py:row. It gets a row (images as bytes, or paths relative
to its file) and returns a row in one of the forms above, or None to leave it out.

With --benchmark NAME the files are those of a benchmark of judges (launch/data/benchmarks.py). Its rows
get "source" (the official group) and "pair" (what counts together, as in ACC+). Rows without their
image, or of a kind that judges here cannot read, are counted and left out.

A table at the end lists every other column and message key. Ids, URLs, dates and constant columns are only
listed, and stay in the rows. Anything that could change what is learned (a list, a number, true and false, a
label, a text, a message key) ends the conversion, until --keep or --drop names it. A column whose name would
change how the row is read, such as score, becomes original_score. A hash of the texts decides which response
of a pair comes first."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project's folder

from common.ground import versions

versions.require("PIL")


import argparse
import hashlib
import json
import re
import shlex
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from common.ground.files import UserError, open_file, parse_json, say
from launch import tool
from launch.data import accounts, benchmarks
from launch.data.foreign_answers import CHOICES, EACH_CHOICE
from launch.data.foreign_messages import PROMPTS, Options
from launch.data.foreign_rows import JUDGED, LABELS, convert
from launch.data.pictures import Images

# What --columns can rename, besides prompts and labels.
OTHER_COLUMNS = (
    "image images videos answer answers response responses chosen rejected preferred boxes choices"
)
# How other systems write the place of one of several images.
NUMBERED_IMAGE = r"(?i)<\|?(image|img)[ _-]?\d+\|?>"
# What a row of an unknown form may raise.
BAD_ROW = (ValueError, KeyError, IndexError, TypeError, AttributeError, OSError, RecursionError)
SHARD = r"(-\d+-of-\d+)?$"
# Two columns of responses: response1 and response2, model_a and model_b.
SIDE = r"(?i)(.*?)[ _]?([012ab]|left|right)"


# ---- Files


def read_source(path: Path) -> Iterator[str | bytes | dict]:
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
            yield from split_json(first + file.read(), path)


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
        table = pyarrow.parquet.ParquetFile(file)
        features = features_of(table.schema_arrow.metadata or {})
        for batch in table.iter_batches(100):
            for row in batch.to_pylist():
                yield {name: named(part, features.get(name)) for name, part in row.items()}
    except Exception as error:  # damaged files raise anything
        raise UserError(f"{path} cannot be read as parquet: {error!s:.1000}") from error


def features_of(metadata: dict[bytes, bytes]) -> dict:
    """What the package datasets says of the columns of a table that it wrote."""
    saved = metadata.get(b"huggingface")
    return parse_json(saved, "its metadata")["info"]["features"] if saved else {}


def named(value: Any, feature: Any) -> Any:
    """A value of a table: classes by their names in place of their numbers, and objects without the nulls
    that a table writes for keys that a row lacks."""
    if isinstance(value, dict):
        inner = feature if isinstance(feature, dict) else {}
        parts = {key: named(part, inner.get(key)) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part is not None}
    if isinstance(feature, list):  # older versions write [feature] for a list
        feature = {"feature": feature[0]}
    if not isinstance(feature, dict):
        feature = {}
    if isinstance(value, list):
        return [named(part, feature.get("feature")) for part in value]
    if feature.get("_type") == "ClassLabel" and isinstance(value, int):
        return feature["names"][value] if value >= 0 else None  # -1: not known
    return value


def split_json(data: bytes, path: Path) -> list:
    """The elements of a list, or objects over several lines; else it must be JSONL, perhaps with blank
    lines first. Raises UserError: it is in UTF-16."""
    if not json.detect_encoding(data).startswith("utf-8"):
        raise UserError(
            f"{path} is text in UTF-16: iconv -f UTF-16 -t UTF-8 {path} > NEW_FILE.json"
        )
    text = data.decode("utf-8-sig", "backslashreplace")
    try:
        # no string of JSON holds the end of a line
        objects = re.sub(r"\}\s*\n\s*\{", "},{", text)
        rows = json.loads(f"[{objects}]")
    except (ValueError, RecursionError):
        return text.split("\n")
    return rows[0] if len(rows) == 1 and isinstance(rows[0], list) else rows


def find_splits(sources: list[Path]) -> dict[str, list[Path]]:
    """The files by split."""
    splits = {}
    for source in sources:
        if not source.exists():
            raise UserError(f"{source}: no such file or folder")
        for path in sorted(source.iterdir()) if source.is_dir() else [source]:
            if path.suffix in (".parquet", ".jsonl") or path == source and path.suffix == ".json":
                splits.setdefault(split_of(path), []).append(path)
    if not splits:
        files = [file for source in sources for file in source.rglob("*")]
        below = {f"{file.parent}" for file in files if file.suffix in (".parquet", ".jsonl")}
        advice = (
            "name a .json file itself; make Parquet of Arrow (to_parquet), JSONL of a text table"
        )
        if below:
            advice = f"name {', '.join(sorted(below))}"
        raise UserError(f"no .parquet or .jsonl files in {', '.join(map(str, sources))}; {advice}")
    return splits


def split_of(path: Path) -> str:
    """The name of a file without suffix and without the number of the shard; that of its folder if it is
    only a number, as on the hub, or metadata of an image folder."""
    name = re.sub(SHARD, "", path.stem)
    is_named_by_folder = name.isdigit() or name == "metadata"
    return path.resolve().parent.name if is_named_by_folder else name


# ---- Conversion


@dataclass
class Conversion:
    """A conversion into a folder, and what all its splits share."""

    args: argparse.Namespace
    folder: Path
    how: Options
    account: accounts.Account = field(default_factory=accounts.Account)
    mapped: Callable[[Any], Any] | None = None  # by --map
    written: dict[bytes, str] = field(default_factory=dict)  # images: see `Images`
    left_out: Counter[str] = field(default_factory=Counter)  # rows, by reason

    def write_split(self, split: str, paths: list[Path]) -> None:
        """Write <folder>/<split>.jsonl and its images. Raises UserError with file and row."""
        total, pictures, numbered, keys = 0, 0, "", []
        skipped = (benchmarks.LeftOut, FileNotFoundError) if self.args.benchmark else ()
        with open(self.folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for path, number, text in numbered_rows(paths):
                row = text
                try:
                    row = parse_json(text, "the row") if isinstance(text, str | bytes) else text
                    for part in self.parts_of(row, path):
                        name = f"{split}-{total:05d}"
                        images = Images(
                            self.folder / "images",
                            name,
                            path.parent,
                            self.args.image_root,
                            self.written,
                        )
                        for converted in convert(part, images, self.how, self.account, split):
                            file.write(json.dumps(converted, default=plain) + "\n")
                            keys.append(key_of(converted))
                            total += 1
                            numbered = numbered or numbered_image(converted)
                        pictures += images.count
                except skipped as error:
                    reason = "image missing" if isinstance(error, OSError) else f"{error}"
                    self.left_out[reason] += 1
                except BAD_ROW as error:
                    raise UserError(f"{path}, row {number}: {describe(error, row)}") from error
                if self.account.rows.total() == accounts.ENOUGH:
                    self.check_account()
        say(f"{split}.jsonl: {total} rows, {pictures} images")
        if numbered:
            say(
                f"{numbered} in a text stands for no image: write <image> for it, in the order of images"
            )
        if self.left_out and not total:
            raise UserError(f"{split}: no row is left (images are looked for in --image_root)")
        if self.args.hold_out:
            hold_out(self.folder, split, keys, self.args.hold_out)

    def parts_of(self, row: Any, path: Path) -> list[dict]:
        """The rows that a row of a file stands for, with columns under the names of --columns."""
        if self.mapped:
            row = self.mapped(row)
            if row is None:
                self.left_out["as --map says"] += 1
                return []
            if not isinstance(row, dict):
                raise UserError(f"--map must return a row or None, not {row!r:.80}")
        rename(row, self.how.columns)
        if (
            path.name == "metadata.jsonl"
            and "file_name" in row
            and not {"image", "images"} & row.keys()
        ):
            row["image"] = row.pop("file_name")
        return benchmarks.rows_of(self.args.benchmark, row) if self.args.benchmark else [row]

    def check_account(self) -> None:
        """Raises UserError: what is not read could change what is learned, and no flag names it."""
        unnamed = self.account.unnamed(self.how.keep)
        if unnamed and not self.args.benchmark:  # whose reader knows its columns
            raise UserError(advice(self.account, unnamed, self.how.columns))

    def tell(self) -> None:
        """Print what was not read, and what else is to be said."""
        for reason, count in self.left_out.items():
            say(f"left out: {count} rows, {reason}")
        for note, count in self.account.notes.items():
            say(f"{count} {note}")
        if self.account.entries:
            say("not read, and kept in the rows:\n" + self.account.table(self.account.entries))


def load_map(spec: str) -> Callable[[Any], Any]:
    """The function of --map, which runs in a process of its own. Raises UserError: there is none."""
    from common.user_code import load_function  # only those who use it wait for it

    function, *_ = load_function("--map", spec, "row")

    def mapped(row: Any) -> Any:
        try:
            return function(row)
        except UserError as error:
            raise UserError(f"--map {spec}: {error}") from error

    return mapped


def advice(account: accounts.Account, unnamed: list[str], columns: dict[str, str]) -> str:
    """What is not read, and the flags to paste. A preference is never to be kept unread."""
    lines = ["not read, and it could change what is learned:", account.table(unnamed)]
    sides = sides_of([*account.entries, *columns.values()])
    preferences = [name for name in unnamed if account.entries[name].is_preference]
    preferences = [name for name in preferences if name not in sides]
    if sides and preferences:
        lines.append(advice_on_preferences(account, preferences, sides, columns))
        unnamed = [name for name in unnamed if name not in (*preferences, *sides)]
    if any(re.fullmatch(f"{CHOICES}|{EACH_CHOICE}", name) for name in unnamed):
        lines.append(
            "choices that the prompt does not show: --choices letters (letters0, letters1)"
        )
    pictures = [name for name in unnamed if account.entries[name].is_picture]
    if pictures:
        lines.append(f"pictures: --columns images={'+'.join(pictures)}")
    if any(name.startswith("messages.") for name in unnamed):
        lines.append("keys of messages: --turns all keeps messages whole, for train_grm_vl.py")
    if unnamed:
        names = ",".join(unnamed)
        lines.append(f"unread, they may stay in the rows: --keep {names}")
        lines.append(f"or be left out: --drop {names}")
    lines.append("--columns OURS=NAME and --map FILE.py:FUNCTION have them read (--help)")
    return "\n".join(lines)


def advice_on_preferences(
    account: accounts.Account, preferences: list[str], sides: list[str], columns: dict[str, str]
) -> str:
    """How columns are read that may say which of two responses is better."""
    others = {ours: name for ours, name in columns.items() if ours not in ("chosen", "rejected")}
    others["responses"] = "+".join(sides)
    others["preferred"] = preferences[0] if len(preferences) == 1 else "NAME"
    flags = "--columns " + ",".join(f"{ours}={name}" for ours, name in others.items())
    if any(account.entries[each].is_negative for each in preferences):
        flags += (
            f" --preferred_is sign (below 0: {sides[0]}; if it is the other, change the two names)"
        )
    return f"{' or '.join(preferences)} may say which response is better: {flags}"


def sides_of(columns: list[str]) -> list[str]:
    """Two columns whose names differ in their number, letter or side alone; [] if there are none."""
    stems = {}
    for name in columns:
        match = re.fullmatch(SIDE, name)
        if match and match[1]:
            stems.setdefault(match[1], set()).add(name)
    return next((sorted(names) for names in stems.values() if len(names) == 2), [])


def key_of(converted: dict) -> bytes:
    """What rows share that ask the same about the same pictures."""
    question = converted.get("prompt", converted.get("messages"))
    asked = [question, converted["images"], converted.get("videos")]
    return hashlib.sha256(json.dumps(asked, default=plain).encode()).digest()


def hold_out(folder: Path, split: str, keys: list[bytes], count: int) -> None:
    """Move ``count`` rows of a split, or a few less, into held_out.jsonl: rows that share a prompt and its
    pictures stay together, and a hash decides which. Raises UserError: there are too few."""
    sizes = Counter(keys)
    chosen, size = set(), 0
    for key in sorted(sizes):
        if size + sizes[key] <= count:
            chosen.add(key)
            size += sizes[key]
    if not chosen or len(chosen) == len(sizes):
        raise UserError(
            f"--hold_out {count}: {split} has {len(keys)} rows, of {len(sizes)} questions"
        )
    path, rest = folder / f"{split}.jsonl", folder / "rest"
    with (
        open(path, "rb") as rows,
        open(rest, "wb") as train,
        open(folder / "held_out.jsonl", "wb") as held,
    ):
        for key, line in zip(keys, rows, strict=True):
            (held if key in chosen else train).write(line)
    rest.replace(path)
    say(f"held_out.jsonl: {size} of them")


def numbered_image(converted: dict) -> str:
    """What the prompt of a row with images has in place of <image>; "" if nothing."""
    mark = re.search(NUMBERED_IMAGE, f"{converted.get('prompt')}")
    return mark[0] if mark and converted["images"] else ""


def numbered_rows(paths: list[Path]) -> Iterator[tuple[Path, int, str | bytes | dict]]:
    """The file, the number of the row in it, and the row or its line; blank lines are only counted."""
    for path in paths:
        for number, row in enumerate(read_source(path), start=1):
            if not isinstance(row, str | bytes) or row.strip():
                yield path, number, row


def rename(row: dict, columns: dict[str, str]) -> None:
    """Give columns our names; what had such a name becomes original_NAME. Raises UserError: there is no
    such column."""
    renamed = {}
    for ours, theirs in columns.items():
        names = theirs.split("+")
        if not set(names) & row.keys():
            has = ", ".join(row)
            raise UserError(f"no column {theirs!r} (see --columns); the row has {has:.400}")
        values = [row.pop(name, None) for name in names]
        renamed[ours] = (
            values[0] if len(names) == 1 else [part for part in values if part is not None]
        )
    replaced = set(renamed)
    if replaced & {"image", "images"}:
        replaced |= {"image", "images"}
    for name in replaced & row.keys():
        row[f"original_{name}"] = row.pop(name)
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


# ---- Command line


def parse_columns(text: str) -> dict[str, str]:
    parts = [item.partition("=") for item in text.split(",")]
    columns = {ours: theirs for ours, _, theirs in parts}
    unknown = columns.keys() - {*PROMPTS, *LABELS, *OTHER_COLUMNS.split(), *JUDGED}
    if unknown:
        names = ", ".join((*OTHER_COLUMNS.split(), *JUDGED))
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is not one of prompt, label, {names}")
    return columns


def parse_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


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
        "--benchmark",
        choices=benchmarks.FILE_COLUMNS,
        help="benchmark of judges, whose files the sources are",
    )
    parser.add_argument(
        "--columns",
        type=parse_columns,
        default={},
        metavar="OURS=THEIRS,...",
        help="columns under other names: prompt=Text,images=Image, or several as a list: images=a+b",
    )
    parser.add_argument(
        "--map",
        default="",
        metavar="FILE.py:FUNCTION",
        help="function of a row as the file has it, which returns a row that can be read, or None to leave "
        "the row out",
    )
    parser.add_argument("--label", default="", help="label of rows that have none")
    add_meanings(parser)
    parser.add_argument(
        "--keep",
        type=parse_names,
        default=[],
        metavar="NAME,...",
        help="columns to keep although nothing reads them; column.key of a column that holds objects, "
        "and messages.key of messages",
    )
    parser.add_argument(
        "--drop",
        type=parse_names,
        default=[],
        metavar="NAME,...",
        help="columns and keys to leave out, named as for --keep",
    )
    parser.add_argument(
        "--hold_out",
        type=tool.between(1, 10**9),
        default=0,
        metavar="N",
        help="number of rows of the only split that go to held_out.jsonl; rows with the same prompt and "
        "pictures stay together",
    )
    parser.add_argument(
        "--image_root",
        type=Path,
        help="folder of images and videos: paths are relative to the rows' file, or to this folder; "
        "files outside of this folder are not read",
    )
    return parser.parse_args(argv)


def add_meanings(parser: argparse.ArgumentParser) -> None:
    """The flags that say what values mean."""
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
        help="coordinates of boxes: pixels of the file, or 0 to this number on both axes",
    )
    parser.add_argument(
        "--preferred_is",
        choices=("sign", "number"),
        default="",
        help="what a number in the column preferred means: below 0 the first of responses is better, above 0 "
        "the second, 0 is a tie; or the number at the end of the name of the better response's column",
    )
    parser.add_argument(
        "--choices",
        choices=("letters", "letters0", "letters1"),
        default="",
        help='append choices that the prompt does not show, as lines "A. ...", and replace an answer that is the '
        "text of a choice by its letter; letters0 and letters1 also an answer that is the number of a choice, "
        "from 0 or from 1",
    )
    parser.add_argument(
        "--turns",
        choices=("last", "all"),
        default="last",
        help="which answers of the assistant are learned: the last one, as response, or all, in messages, "
        "which train_grm_vl.py reads",
    )


@tool.one_message()
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.out.exists():
        raise UserError(f"--out {args.out} exists: remove it or name another")
    splits = find_splits(args.sources)
    if args.hold_out and len(splits) > 1:
        raise UserError(f"--hold_out splits one file: name that of one of {', '.join(splits)}")
    names = "columns label boxes space choices turns preferred_is keep drop".split()
    how = Options(**{name: getattr(args, name) for name in names})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Written beside it and renamed, so that <out> is complete as soon as it exists.
    with tempfile.TemporaryDirectory(prefix=f"{args.out.name}.", dir=args.out.parent) as scratch:
        folder = Path(scratch) / "whole"
        (folder / "images").mkdir(parents=True)
        conversion = Conversion(args, folder, how)
        if args.map:
            conversion.mapped = load_map(args.map)
        for split, paths in splits.items():
            conversion.write_split(split, paths)
        conversion.check_account()
        folder.rename(args.out)
    conversion.tell()


if __name__ == "__main__":
    main()
