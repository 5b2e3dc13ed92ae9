"""Everything a run writes but its checkpoints: metrics, progress, pictures.

    MetricSums     per-token and per-sample sums, kept on the device -> one dict of means, the same on all ranks
    StageTimer     wall seconds per stage of a step
    RunLogger      rank 0's files: metrics.jsonl, tensorboard/, samples/step-*.jsonl and .png; the bar, the lines
    environment    versions and git commit for the first record
    draw_sample, contact_sheet, plot_curves    PNG pictures by Pillow alone

Metric names carry their TensorBoard section: rollout/, train/, eval/, perf/. JSON has no NaN: a non-finite metric is an
error that names it, never a line that other readers cannot parse.
"""

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

MAX_MAXIMA = 64  # slots of the fixed-length MAX reduction in MetricSums.reduce


# ------------------------------------------------------------------------------------------------ metrics
class MetricSums:
    """Sums and maxima of one step, reduced over all ranks by two collectives and a single host sync."""

    def __init__(self):
        self._sums: dict[str, list] = {}  # name -> [total, count], each a float or a () fp64 tensor
        self._maxima: dict[str, float | torch.Tensor] = {}

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor) -> None:
        """Adds `total`, a sum over `count` tokens or samples of this rank; both are floats or one-element tensors."""
        entry = self._sums.setdefault(name, [0.0, 0.0])
        # `+`, not `+=`: in place it would write into the tensor the caller handed over.
        entry[0] = entry[0] + _scalar(total)
        entry[1] = entry[1] + _scalar(count)

    def max(self, name: str, value: float | torch.Tensor) -> None:
        """Keeps the largest `value`; a rank without data passes -inf, so that the names stay equal on all ranks."""
        value, old = _scalar(value), self._maxima.get(name)
        if old is not None:  # torch.maximum, unlike the builtin, lets a NaN through to the error in RunLogger.log
            value = torch.maximum(*(torch.as_tensor(v, dtype=torch.float64) for v in (old, value)))
        self._maxima[name] = value

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Means total/count and maxima over the ranks of `group` (default: all; this process alone without one).

        A mean with count 0 and a maximum of -inf have no value and are left out. Raises ValueError on every rank if
        the ranks hold different names, or if one rank's names collide.
        """
        names, maxima = sorted(self._sums), sorted(self._maxima)
        if len(maxima) > MAX_MAXIMA or set(names) & set(maxima):
            raise ValueError(f"at most {MAX_MAXIMA} maxima, none named like a mean; got {len(maxima)}, of which "
                             f"{sorted(set(names) & set(maxima))} are means too")
        ranks_exist = dist.is_available() and dist.is_initialized()
        # The device follows from the back-end, never from this rank's tensors: ranks must agree on it.
        on_cuda = ranks_exist and "nccl" in dist.get_backend_config(group)
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        # 48 bits of a hash are exact in fp64. MAX of (key, -key) yields the largest and the smallest key at once. This
        # vector goes first and has one length on all ranks, so that unequal names meet an error instead of a hang.
        digest = hashlib.sha256(json.dumps([names, maxima]).encode()).digest()
        key = float(int.from_bytes(digest[:6], "big"))
        padding = [-math.inf] * (MAX_MAXIMA - len(maxima))
        tops = _vector([key, -key, *(self._maxima[name] for name in maxima), *padding], device)  # (2 + MAX_MAXIMA,)
        tops = tops.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # MAX of a back-end may lose a NaN
        sums = _vector([part for name in names for part in self._sums[name]], device)  # (2 * names,)
        if ranks_exist:
            dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=group)
            largest, smallest = tops[0].item(), -tops[1].item()
            if largest != smallest:
                raise ValueError(f"metric names differ between ranks; this rank has {names} and maxima {maxima}")
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        sums, tops = sums.tolist(), tops[2:].tolist()
        result = {n: sums[2 * i] / sums[2 * i + 1] for i, n in enumerate(names) if sums[2 * i + 1] != 0}
        return result | {name: top for name, top in zip(maxima, tops) if top != -math.inf}


def _scalar(value: float | torch.Tensor) -> float | torch.Tensor:
    return value.detach().double().reshape(()) if isinstance(value, torch.Tensor) else float(value)


def _vector(values: list, device: torch.device) -> torch.Tensor:
    # One copy for all floats and one for all tensors: a copy per value would sync the host once each on CUDA.
    vector = torch.tensor([0.0 if isinstance(v, torch.Tensor) else v for v in values], dtype=torch.float64).to(device)
    where = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
    if where:
        vector[where] = torch.stack([values[i] for i in where]).to(device)
    return vector


class StageTimer:
    """`with timer("rollout"): ...` adds the block's wall seconds to its stage."""

    def __init__(self):
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str):
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - start

    @staticmethod
    def _synchronize() -> None:
        # Kernels are asynchronous: without this, a stage's time lands on the next one that reads a result.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def seconds(self) -> dict[str, float]:
        """Seconds per stage since the last reset."""
        return dict(self._seconds)

    def reset(self) -> None:
        self._seconds.clear()


# ------------------------------------------------------------------------------------------------ files of a run
def environment() -> dict:
    """Versions, device and git commit ("-dirty" after it: tracked files were changed; "unknown": no checkout)."""
    versions = {}
    for package in ("torch", "transformers", "flash_attn"):
        try:  # the metadata, not an import: importing flash_attn takes seconds
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    commit = _git("rev-parse", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no"):
        commit += "-dirty"
    has_ranks = dist.is_available() and dist.is_initialized()
    return {
        "python": platform.python_version(),
        **versions,
        "cuda": torch.version.cuda,
        "git_commit": commit or "unknown",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "world_size": dist.get_world_size() if has_ranks else int(os.environ.get("WORLD_SIZE", 1)),
    }


def _git(*arguments: str) -> str | None:
    # No optional locks: a run must not disturb a commit that its user makes at the same moment.
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).resolve().parents[1]), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # git is not installed, or its file system does not answer
        return None
    return result.stdout.strip() if result.returncode == 0 else None


class RunLogger:
    """What rank 0 writes and prints; on the other ranks every method is a no-op but for its checks.

    `first_step` is the number of steps already done: above 0 the run is a resumed one, and what an earlier life wrote
    after that step is dropped (`truncate_after`). `header` (JSON values: all arguments) becomes the first record of
    this life of the run, `{"type": "header", "first_step", "environment", **header}`.
    """

    def __init__(self, out: Path, is_main: bool, header: dict, total_steps: int, first_step: int = 0):
        self.out, self.is_main = Path(out), is_main
        self.path = self.out / "metrics.jsonl"
        self._file = self._writer = None
        self.last_step = -1
        # disable=None: no bar where the output is no terminal; a log file gets the lines only.
        self.bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True,
                        disable=None if is_main else True)
        if not is_main:
            return
        (self.out / "samples").mkdir(parents=True, exist_ok=True)
        self.truncate_after(first_step if first_step > 0 else -1)
        first = {"type": "header", "first_step": first_step, "environment": environment()}
        self._write(first | header)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One JSON object and one TensorBoard point per metric. Raises ValueError naming a non-finite metric."""
        record = {"step": int(step)}
        for name, value in metrics.items():
            record[name] = int(value) if isinstance(value, int) else float(value)
            # On every rank, before the return below: reduced metrics are equal, so all ranks stop together.
            if not math.isfinite(record[name]):
                raise ValueError(f"metric {name} is {record[name]} at step {step}; all metrics must be finite")
        if not self.is_main:
            return
        self._write(record)
        self.last_step = step
        for name in metrics:
            self._writer.add_scalar(name, record[name], step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Drops records of steps > `step`, here and in TensorBoard, and a last line that was cut by a kill."""
        if not self.is_main:
            return
        self._close_files()
        self.last_step = -1                                                   # of the records kept
        if self.path.exists():
            kept = []
            # Iterating a file splits at newlines only; splitlines() would also split at U+2028 inside a string.
            with open(self.path, encoding="utf-8", newline="\n") as file:
                for number, line in enumerate(file, 1):
                    at = _record(line, self.path, number).get("step", -1) if line.endswith("\n") else math.inf
                    if at <= step:
                        kept.append(line)
                        self.last_step = max(self.last_step, at)
            _write_atomically(self.path, "".join(kept))
        self._open(purge_step=step + 1)

    def samples(self, step: int, records: list[dict], pictures: list[Image.Image], stem: str = "step") -> None:
        """Writes `samples/<stem>-NNNNNN.jsonl` and .png (all pictures on one sheet); TensorBoard gets both."""
        if not self.is_main:
            return
        path = self.out / "samples" / f"{stem}-{step:06d}.jsonl"
        _write_atomically(path, "".join(_dumps(record) + "\n" for record in records))
        tag = "samples" if stem == "step" else f"samples_{stem}"
        if pictures:
            contact_sheet(pictures, columns=min(4, len(pictures))).save(path.with_suffix(".png"))
        for index, picture in enumerate(pictures):  # (H, W, 3) uint8
            self._writer.add_image(f"{tag}/{index}", np.asarray(picture.convert("RGB")), step, dataformats="HWC")
        # Four leading spaces make Markdown show a text as it is, tags and line breaks of the response included.
        text = "\n\n".join(json.dumps(r, indent=2, ensure_ascii=False)[:4000] for r in records[:max(len(pictures), 4)])
        self._writer.add_text(f"{tag}/text", _encodable("\n".join("    " + row for row in text.split("\n"))), step)
        self._writer.flush()

    def line(self, text: str) -> None:
        """Prints one line above the bar."""
        if self.is_main:
            tqdm.write(_encodable(text))
            sys.stdout.flush()  # a redirected stdout would keep the line for minutes

    def update(self, step: int, short: dict | None = None) -> None:
        """Moves the bar to `step` and shows `short`, a few names and values, behind it."""
        self.bar.set_postfix(short or {}, refresh=False)
        self.bar.update(step - self.bar.n)

    def close(self) -> None:
        """Closes bar and files; a second call does nothing."""
        self.bar.close()
        self._close_files()

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds of import that only rank 0 needs

        self._file = open(self.path, "a", encoding="utf-8", errors="backslashreplace")
        self._writer = SummaryWriter(self.out / "tensorboard", purge_step=purge_step)

    def _close_files(self) -> None:
        for handle in (self._file, self._writer):
            if handle is not None:
                handle.close()
        self._file = self._writer = None

    def _write(self, record: dict) -> None:
        self._file.write(_dumps(record) + "\n")
        self._file.flush()


def _dumps(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _record(line: str, path: Path, number: int) -> dict:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: no JSON ({error}); repair or remove the line") from error


def _encodable(text: str) -> str:
    # A lone surrogate (legal as an escape in a data row) cannot be encoded: it would end the run at a log line.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(_encodable(text), encoding="utf-8")  # \udXXX inside a JSON string is its legal escape
    os.replace(temporary, path)


# ------------------------------------------------------------------------------------------------ pictures
INK, GREY, RULE, PAPER, TINT = "#1f2933", "#7b8794", "#d9dee5", "#ffffff", "#f3f5f8"
SERIES = ("#2563eb", "#e8710a", "#138a5b", "#b3266e", "#7048c6", "#8a6d00", "#0e7c9b", "#c0392b")


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size=size)  # Pillow's own font: Latin only, other scripts come out as boxes


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int, max_lines: int) -> list[str]:
    # The lines joined are the text, so the count of what is left out is exact. The middle goes: answers stand last.
    lines = []
    for paragraph in text.replace("\t", "    ").split("\n"):
        rest = paragraph or " "
        while rest:
            low, high = 1, min(len(rest), width // 3)  # narrower characters are rare, and then only break early
            while low < high:  # the longest prefix that fits
                middle = (low + high + 1) // 2
                low, high = (middle, high) if font.getlength(rest[:middle]) <= width else (low, middle - 1)
            space = rest.rfind(" ", 0, low)
            cut = space + 1 if low < len(rest) and space > 0 else low
            lines.append(rest[:cut])
            rest = rest[cut:]
    if len(lines) <= max_lines:
        return lines
    head, tail = max_lines * 2 // 3, max_lines - max_lines * 2 // 3 - 1
    hidden = lines[head:len(lines) - tail]
    return lines[:head] + [f"… {sum(map(len, hidden)):,} characters left out …"] + lines[len(lines) - tail:]


def _fit(image: Image.Image, width: int, height: int) -> Image.Image:
    image = image.convert("RGB")
    scale = min(width / image.width, height / image.height)
    if scale >= 2:  # whole pixels stay whole: the reader sees exactly what a tiny picture holds
        return image.resize((image.width * int(scale), image.height * int(scale)), Image.Resampling.NEAREST)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS)


def draw_sample(images: list[Image.Image], prompt: str, response: str, caption: str, width: int = 480) -> Image.Image:
    """A card of `width` pixels: the images side by side, the prompt, the response, and `caption` (reward, reference).

    Tiny images are enlarged by a whole factor; of long texts the middle is left out, with the count of its characters.
    """
    margin, gap = 18, 10
    inner = width - 2 * margin
    fitted = []
    if images:
        share = (inner - gap * (len(images) - 1)) // len(images)
        fitted = [_fit(image, max(1, share), 224) for image in images]
    blocks = [(label, _wrap(text.strip() or "(empty)", _font(15), inner, lines))
              for label, text, lines in (("PROMPT", prompt, 10), ("RESPONSE", response, 14))]
    footer = _wrap(caption, _font(14), inner, 4)
    band = max((image.height for image in fitted), default=0) + (2 * margin if fitted else 0)
    height = band + sum(30 + 20 * len(lines) for _, lines in blocks) + margin + 18 + 19 * len(footer)
    card = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(card)
    draw.rectangle((0, 0, width, band), fill=TINT)
    x = (width - sum(image.width for image in fitted) - gap * (len(fitted) - 1)) // 2
    for image in fitted:
        y = (band - image.height) // 2
        card.paste(image, (x, y))
        draw.rectangle((x - 1, y - 1, x + image.width, y + image.height), outline=RULE)
        x += image.width + gap
    y = band
    for label, lines in blocks:
        draw.text((margin, y + 13), label, font=_font(10), fill=GREY)
        for row, line in enumerate(lines):
            draw.text((margin, y + 28 + 20 * row), line, font=_font(15), fill=GREY if line[0] == "…" else INK)
        y += 30 + 20 * len(lines)
    y += margin
    draw.rectangle((0, y, width, height), fill="#e6effc")
    for row, line in enumerate(footer):
        draw.text((margin, y + 8 + 19 * row), line, font=_font(14), fill="#1d4ed8")
    draw.rectangle((0, 0, width - 1, height - 1), outline=RULE)
    return card


def contact_sheet(pictures: list[Image.Image], columns: int) -> Image.Image:
    """The pictures in rows of `columns`, each row as high as its highest picture. ValueError without pictures."""
    if not pictures or columns < 1:
        raise ValueError(f"a contact sheet needs pictures and columns, got {len(pictures)} and {columns}")
    gap, cell = 14, max(picture.width for picture in pictures)
    rows = [pictures[i:i + columns] for i in range(0, len(pictures), columns)]
    heights = [max(picture.height for picture in row) for row in rows]
    size = (gap + (cell + gap) * min(columns, len(pictures)), gap + sum(h + gap for h in heights))
    sheet = Image.new("RGB", size, "#e4e8ee")
    y = gap
    for row, height in zip(rows, heights):
        for column, picture in enumerate(row):
            sheet.paste(picture, (gap + column * (cell + gap), y))
        y += height + gap
    return sheet


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    # The classic 1-2-5 steps: the smallest that needs no more than `most` intervals.
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= most)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def plot_curves(metrics_jsonl: Path, names: list[str], path: Path, title: str = "") -> None:
    """Draws metrics over steps as a PNG of 800 x 440 pixels. ValueError if a name is nowhere in `metrics_jsonl`."""
    with open(metrics_jsonl, encoding="utf-8", newline="\n") as file:
        records = [_record(line, metrics_jsonl, number) for number, line in enumerate(file, 1)]
    series = {name: [(r["step"], r[name]) for r in records if "step" in r and name in r] for name in names}
    missing = [name for name in names if not series[name]]
    if missing or not names:
        known = sorted({key for r in records if "step" in r for key in r} - {"step"})
        raise ValueError(f"{metrics_jsonl} has no values of {missing}; it has {known}")
    xs, ys = zip(*(point for points in series.values() for point in points))
    x0, x1 = min(xs), max(max(xs), min(xs) + 1)
    y0, y1 = min(ys), max(ys)
    if 0 <= y0 and y1 <= 1:  # a share keeps its full scale, so that curves of two runs compare by eye
        y0, y1 = 0.0, 1.0
    elif y0 == y1:
        y0, y1 = y0 - max(1.0, abs(y0) / 10), y1 + max(1.0, abs(y1) / 10)
    k = 3  # drawn three times as large and scaled down: Pillow's lines have no anti-aliasing
    width, height, left, right, top, bottom = 800 * k, 440 * k, 64 * k, 776 * k, 64 * k, 388 * k
    image = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(image)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - x0) / (x1 - x0) * (right - left), bottom - (y - y0) / (y1 - y0) * (bottom - top - 8 * k)

    for tick in _ticks(y0, y1):
        y = place(x0, tick)[1]
        draw.line((left, y, right, y), fill="#e9edf2", width=k)
        draw.text((left - 8 * k, y), f"{tick:.6g}", font=_font(12 * k), fill=GREY, anchor="rm")
    for tick in _ticks(x0, x1, most=8):
        x = place(tick, y0)[0]
        draw.line((x, bottom, x, bottom + 5 * k), fill=GREY, width=k)
        draw.text((x, bottom + 9 * k), f"{tick:.6g}", font=_font(12 * k), fill=GREY, anchor="mt")
    draw.line((left, bottom, right, bottom), fill=GREY, width=k)
    draw.text(((left + right) / 2, height - 10 * k), "step", font=_font(12 * k), fill=GREY, anchor="mb")
    draw.text((left, 12 * k), title, font=_font(16 * k), fill=INK)
    x = left
    for index, (name, points) in enumerate(series.items()):
        colour = SERIES[index % len(SERIES)]
        spots = [place(*point) for point in sorted(points)]
        draw.line(spots, fill=colour, width=2 * k, joint="curve")
        if len(spots) <= 30:  # few values, such as evaluations, show where they were taken
            for sx, sy in spots:
                draw.ellipse((sx - 4 * k, sy - 4 * k, sx + 4 * k, sy + 4 * k), fill=colour, outline=PAPER, width=k)
        draw.line((x, 48 * k, x + 18 * k, 48 * k), fill=colour, width=3 * k)
        draw.text((x + 24 * k, 48 * k), name, font=_font(13 * k), fill=INK, anchor="lm")
        x += 44 * k + _font(13 * k).getlength(name)
    image.resize((800, 440), Image.Resampling.LANCZOS).save(path)
