"""Runs as one HTML file that needs no server and no network: curves, evaluations, flags that differ,
seconds, and the samples with their pictures, boxes, turns, rewards and tokens.

python launch/page.py RUN [RUN ...] --out page.html           pictures stay where they are
python launch/page.py RUN --out page.html --embed             small copies of them go into the file
python launch/page.py RUN --out page.html --steps 0 50 100    samples of these steps alone

RUN is the --out of either script; evaluations by --eval_only inside it are shown as runs of
their own. A run may be going on, and its files may be damaged: what cannot be read is left out, and
counted on the page. Rows name pictures: only those below the folders of the data, of --image_root and
of the runs are shown.
"""

import base64
import gzip
import hashlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder

from common.ground.files import UserError, follow_pointer, read_records, say
from launch import tool

TEMPLATE = Path(__file__).with_name("page.html")
MARK = "<!-- data -->"  # in the template
SIDE = 320  # pixels of an embedded picture, at most
FRAMES = 16  # of a clip, at most
BLOCK = 2**18  # characters of JSON, about, that a browser unpacks at once
TOLD = 12  # metrics of a run that are printed, at most

LARGEST = sys.float_info.max
NUMERIC = int | float
# The forms of what the page computes with; any other field is shown as it is.
METRICS = {"step?": int, "first_step?": int, "arguments?": dict, "environment?": dict}
SAMPLE = {
    "response": str,
    "sample": int,
    "response_length": int,
    "images": list,
    "question?": str,
    "prompt?": str,
    "reward?": NUMERIC,
    "advantage?": NUMERIC,
    "components?": {str: NUMERIC},
    "judgement?": str,
    "conversation?": [{"role": str}],
    "turn_rewards?": [NUMERIC],
    "regions?": {"image": int, "true": [[NUMERIC]], "answered": [[NUMERIC]]},
    "per_token?": {"text": [str], "turns?": [int]},
}
# What the samples of a prompt share.
OF_PROMPT = ("source", "label", "prompt", "question", "reference", "images")


# -------------------------------------------------------------------------------------------------
# Pictures
# -------------------------------------------------------------------------------------------------


class Pictures:
    """The pictures of a page, by number: where they lie as seen from it, or small copies."""

    def __init__(self, page: Path, roots: list[Path], embed: bool):
        self.folder = page.parent.resolve()
        self.roots = [root.resolve() for root in roots]
        self.embed = embed
        self.copied = 0
        self.numbers: dict[str, int] = {}
        self.table: list[dict] = []

    def number(self, item: Any) -> int:
        """The number of a picture or clip, as a record names it: a path, or the paths of its frames."""
        key = json.dumps(item)
        if key not in self.numbers:
            self.numbers[key] = len(self.table)
            self.table.append(self.clip(item) if isinstance(item, list) else self.picture(item))
        return self.numbers[key]

    def clip(self, items: list) -> dict:
        if len(items) == 1:  # a film
            return self.picture(items[0])
        count = min(len(items), FRAMES)
        picks = [items[k * (len(items) - 1) // max(1, count - 1)] for k in range(count)]
        name = f"{count} of {len(items)} frames of a clip"
        return {"name": name, "frames": [self.picture(item) for item in picks]}

    def picture(self, item: Any) -> dict:
        """Its name, and "src", a URL without a host, or "why" it is not shown."""
        if not isinstance(item, str):
            return {"name": as_json(item), "why": "no path"}
        if re.match(r"[\\/]{2}|[A-Za-z][\w+.-]+:", item):
            return {"name": item, "why": "on another host"}
        try:
            path = Path(item).resolve()
        except (
            OSError,
            ValueError,
            RuntimeError,
        ):  # NUL, half of a surrogate pair, links in a circle
            return {"name": item, "why": "no path"}
        if not any(path.is_relative_to(root) for root in self.roots):
            return {"name": item, "why": "outside of the data's folders and of --image_root"}
        small = thumbnail(path) if self.embed else None
        self.copied += small is not None
        return {"name": item, **(small or {"src": self.url(path)})}

    def url(self, path: Path) -> str:
        try:
            return quote(Path(os.path.relpath(path, self.folder)).as_posix())
        except ValueError:  # on another drive
            return path.as_uri()


def thumbnail(path: Path) -> dict | None:
    """A small upright copy as a data URL, and the size of the picture itself; None: it is none."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")) as image:
            upright = ImageOps.exif_transpose(image)
            width, height = upright.size
            upright.thumbnail((SIDE, SIDE))
            file = io.BytesIO()
            upright.convert("RGB").save(file, "WEBP", quality=80)
    except Exception:  # a damaged file makes Pillow raise anything; the page says "not there"
        return None
    data = base64.b64encode(file.getvalue()).decode()
    return {"src": f"data:image/webp;base64,{data}", "size": [width, height]}


def data_folders(flags: dict) -> list[Path]:
    """The folders of a run's rows and of its --image_root."""
    folders = []
    for name in ("data", "eval_data", "image_root"):
        for part in str(flags.get(name) or "").split(","):
            path = Path(re.sub(r":[\d.e+-]+$", "", part.strip()))  # a file may have a weight
            folder = path if path.is_dir() else path.parent
            if folder.is_absolute() and folder != Path(folder.anchor):
                folders.append(folder)
    return folders


# -------------------------------------------------------------------------------------------------
# Runs
# -------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a page shows of a run beside its samples."""

    folder: str
    name: str
    flags: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # first steps of its processes
    metrics: dict[str, list] = field(default_factory=dict)  # by name: [steps, values]
    files: list[dict] = field(default_factory=list)  # of samples, in order of steps
    problems: list[str] = field(default_factory=list)  # lines that were left out, and why


def find_runs(folder: Path) -> list[Path]:
    """A run, and the evaluations without training in its folder. Raises UserError: there is none."""
    run = follow_pointer(folder)
    folders = [run, *sorted(run.glob("evaluation-step-*"))]
    found_runs = [path for path in folders if (path / "metrics.jsonl").exists()]
    if not found_runs:
        raise UserError(f"{run} has no metrics.jsonl: not the folder of a run")
    return found_runs


def read_run(folder: Path) -> Run:
    run = Run(str(folder), folder.name)
    records = read_records(folder / "metrics.jsonl", METRICS, run.problems, finite)
    points: dict[str, dict[int, float]] = {}
    for record in records:
        if record.get("type") == "header":
            run.flags = record.get("arguments") or {}
            run.environment = record.get("environment") or {}
            run.starts.append(record.get("first_step") or 0)
            continue
        step = record.pop("step", None)
        for name, value in record.items():
            # JSON's integers may have any size
            if step is not None and isinstance(value, NUMERIC) and abs(value) <= LARGEST:
                points.setdefault(name, {})[step] = value
    for name, values in sorted(points.items()):
        run.metrics[name] = [list(values), list(values.values())]
    return run


def finite(text: str) -> float | None:
    """A number in six digits; None for what JavaScript cannot read as JSON."""
    value = float(text)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def name_apart(runs: list[Run]) -> None:
    """Name the runs by as many folders of their paths as it takes."""
    for depth in range(1, 9):
        for run in runs:
            run.name = "/".join(Path(run.folder).absolute().parts[-depth:])
        if len({run.name for run in runs}) == len(runs):
            break


# -------------------------------------------------------------------------------------------------
# Samples
# -------------------------------------------------------------------------------------------------


class SampleFile(NamedTuple):
    step: int
    run: int  # its number
    stem: str  # step: of training, or eval
    path: Path


def sample_files(runs: list[Run], steps: list[int] | None) -> list[SampleFile]:
    """The files of samples of all runs, or those of some steps, in order of steps."""
    files = []
    for number, run in enumerate(runs):
        for path in Path(run.folder).glob("samples/*-*.jsonl"):
            stem, _, step = path.stem.rpartition("-")
            if step.isdecimal() and (steps is None or int(step) in steps):
                files.append(SampleFile(int(step), number, stem, path))
    return sorted(files)


class Samples:
    """The samples of runs as blocks of the page, each of some prompts, and an index of the rows in them."""

    def __init__(self, runs: list[Run], pictures: Pictures):
        self.runs, self.pictures = runs, pictures
        self.skipped = 0  # files that were too much
        self.rows: dict[str, int] = {}  # the numbers of rows, by what identifies them

    def blocks(self, files: list[SampleFile], limit: int) -> Iterator[str]:
        """Of all files, the newest first: they stay if there are more than ``limit`` bytes."""
        for file in reversed(files):
            limit -= file.path.stat().st_size if file.path.exists() else 0
            if limit < 0:
                self.skipped += 1
            else:
                yield from self.blocks_of(file)

    def blocks_of(self, file: SampleFile) -> Iterator[str]:
        """The blocks of a file; its run gets an entry that lists them."""
        run = self.runs[file.run]
        try:
            records = read_records(file.path, SAMPLE, run.problems, finite)
        except UserError as error:  # it cannot be read at all
            run.problems.append(str(error))
            return
        blocks: list[dict] = []
        entry = {"step": file.step, "stem": file.stem, "count": len(records), "blocks": blocks}
        run.files.insert(0, entry)
        rows, texts = [], []
        groups = self.groups(records, file.path.parent)
        for group in groups:
            rows.append(group["row"])
            texts.append(as_json(group))
            if sum(map(len, texts)) > BLOCK or group is groups[-1]:
                name = f"samples-{file.run}-{len(run.files)}-{len(blocks)}"
                blocks.append({"id": name, "rows": rows})
                yield element(name, f"[{','.join(texts)}]")
                rows, texts = [], []

    def groups(self, records: list[dict], folder: Path) -> list[dict]:
        """The samples by prompt: what they share, the number of the row, and "samples" with the rest."""
        groups: list[dict] = []
        newest: dict[str, dict] = {}  # by what the samples share
        for record in records:
            show_files(record.get("conversation") or [], folder, self.pictures)
            shared = {name: record.pop(name, None) for name in OF_PROMPT}
            key = json.dumps(shared)
            group, number = newest.get(key), record["sample"]
            # a row that is drawn twice in a step makes two groups
            if group is None or any(one["sample"] == number for one in group["samples"]):
                row = json.dumps([shared["source"], shared["question"]])
                shared["row"] = self.rows.setdefault(row, len(self.rows))
                shared["images"] = [self.pictures.number(item) for item in shared["images"]]
                group = newest[key] = shared | {"samples": []}
                groups.append(group)
            group["samples"].append(record)
        return groups


def show_files(conversation: list[dict], folder: Path, pictures: Pictures) -> None:
    """Number the pictures that an environment has shown, which lie as files in ``folder``."""
    for message in conversation:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("file"), str):
                part["picture"] = pictures.number(str(folder / part["file"]))


# -------------------------------------------------------------------------------------------------
# The file
# -------------------------------------------------------------------------------------------------


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def element(name: str, text: str) -> str:
    """A text as an element of the page. In base64, nothing that a model wrote can end it."""
    # half of a surrogate pair becomes its escape again
    packed = gzip.compress(text.encode("utf-8", "backslashreplace"), 6, mtime=0)
    data = base64.b64encode(packed).decode()
    return f'<script type="text/plain" id="{name}">{data}</script>\n'


def write_page(out: Path, blocks: Iterator[str]) -> None:
    """Write the page aside and rename it: a browser that reloads sees the old one or the new one."""
    head, _, tail = TEMPLATE.read_text("utf-8").partition(MARK)
    (script,) = re.findall("<script>(.*?)</script>", tail, re.DOTALL)
    # the only script that a browser runs on this page
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    aside = out.with_name(f".{out.name}.tmp")
    with open(aside, "w", encoding="utf-8", newline="\n") as file:
        file.write(head.replace("SCRIPT-HASH", f"sha256-{digest}"))
        for text in blocks:
            file.write(text)
        file.write(tail)
    aside.replace(out)


def all_blocks(samples: Samples, files: list[SampleFile], limit: int) -> Iterator[str]:
    """The samples; then what a browser reads first, the pictures' names and the runs."""
    yield from samples.blocks(files, limit)
    yield element("pictures", as_json(samples.pictures.table))
    told = {"runs": [asdict(run) for run in samples.runs], "skipped": samples.skipped}
    yield element("runs", as_json(told))


def tell(run: Run) -> None:
    """Print the rewards, accuracies and held-out losses of a run at its start and its end."""
    wanted = r"^rollout/reward$|^eval/(.+[_/])?reward_mean$|^eval/.*accuracy|^eval/(exact_match|loss)$|pass@"
    names = sorted(filter(re.compile(wanted).search, run.metrics), key=lambda name: name.count("/"))
    say(run.name)
    for name in names[:TOLD]:
        _, values = run.metrics[name]
        say(f"  {name:38} {values[0]:.3f} -> {values[-1]:.3f}")
    if len(names) > TOLD:
        say(f"  and {len(names) - TOLD} more")


@tool.one_message()
def main(argv: list[str]) -> None:
    parser = tool.parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--embed", action="store_true", help="put small pictures into the file")
    parser.add_argument("--steps", type=int, nargs="+", help="samples of these steps alone")
    parser.add_argument(
        "--mib", type=tool.between(1, 4096), default=512, help="samples to read, the newest first"
    )
    parser.add_argument(
        "--image_root", type=Path, help="show pictures below this folder, too", metavar="FOLDER"
    )
    args = parser.parse_args(argv)
    if args.out.exists() and not args.out.is_file():  # renaming would replace a device
        raise UserError(f"--out {args.out} is no file")
    if not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.parent}")
    runs = [read_run(folder) for run in args.runs for folder in find_runs(run)]
    name_apart(runs)
    roots = [folder for run in runs for folder in (Path(run.folder), *data_folders(run.flags))]
    pictures = Pictures(args.out, roots + [args.image_root] * bool(args.image_root), args.embed)
    files = sample_files(runs, args.steps)
    write_page(args.out, all_blocks(Samples(runs, pictures), files, args.mib * 2**20))
    for run in runs:
        tell(run)
    copies = f" with {pictures.copied} copies of pictures" if args.embed else ""
    say(
        f"wrote {args.out}, {args.out.stat().st_size / 2**20:.1f} MiB{copies}: open it in a browser"
    )
    say("before you share it: it contains all samples, flags and paths, and the host names in them")


if __name__ == "__main__":
    main(sys.argv[1:])
