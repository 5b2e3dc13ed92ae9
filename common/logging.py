"""Everything a run writes but its checkpoints: metrics, progress, pictures.

    MetricSums     sums over tokens and samples, kept on the device -> one dict of means, the same on all ranks
    StageTimer     wall seconds per stage of a step
    environment    versions and git commit for the first record
    RunLogger      rank 0's files: metrics.jsonl, tensorboard/, samples/step-*.jsonl and .png; the bar, the lines
    draw_sample, contact_sheet, plot_curves    PNG pictures by Pillow alone

Metric names carry their TensorBoard section: rollout/, train/, eval/, perf/. JSON has no NaN: it is an error.
"""

import json
import math
import os
import subprocess
import sys
import time
from bisect import bisect_right
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from tqdm import tqdm

from common.buffers import all_gather_json


class MetricSums:
    """Sums and maxima of one step in fp64, reduced over the ranks at its end; until then no value reaches the host."""

    def __init__(self):
        self._sums, self._maxima = {}, {}  # name -> (total, count); name -> maximum; () fp64 tensors

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor) -> None:
        """Adds `total`, a sum over `count` tokens or samples of this rank; both are floats or one-element tensors."""
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = old_total + _fp64(total), old_count + _fp64(count)

    def max(self, name: str, value: float | torch.Tensor) -> None:
        """Keeps the largest `value`, or NaN if there is one; -inf is no value."""
        value = _fp64(value)
        self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def reduce(self) -> dict[str, float]:
        """Means total/count and maxima over all ranks, the same on each; those of no count or of -inf are left out."""
        local = [{name: [float(total), float(count)] for name, (total, count) in self._sums.items()},
                 {name: float(value) for name, value in self._maxima.items()}]
        sums, maxima = zip(*all_gather_json(local))  # not vectors: of unequal length they would hang
        totals = {name: np.sum([part[name] for part in sums if name in part], axis=0) for name in set().union(*sums)}
        tops = {name: np.max([part[name] for part in maxima if name in part]) for name in set().union(*maxima)}
        means = {name: float(total / count) for name, (total, count) in sorted(totals.items()) if count}
        return means | {name: float(top) for name, top in sorted(tops.items()) if top != -math.inf}


def _fp64(value: float | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach().reshape(())


class StageTimer:
    """`with timer("rollout"): ...` adds the block's wall seconds to its stage."""

    def __init__(self):
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str):
        start = self._now()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + self._now() - start

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_initialized():  # kernels are asynchronous: a stage would end before its work does
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Seconds per stage since the last reset."""
        return dict(self._seconds)

    def reset(self) -> None:
        self._seconds.clear()


def environment() -> dict:
    """Versions, device and git commit ("-dirty" after it: tracked files were changed; "unknown": no checkout)."""
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).resolve().parents[1]),  # a run takes no locks
               "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):  # git is not installed, or its file system does not answer
        commit = ""
    packages = ("torch", "transformers", "flash_attn")  # by their metadata: importing flash_attn takes seconds
    return {"python": sys.version.split()[0], "cuda": torch.version.cuda, "git_commit": commit or "unknown",
            **{name: next((found.version for found in metadata.distributions(name=name)), None) for name in packages},
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "world_size": int(os.environ.get("WORLD_SIZE", 1))}


class RunLogger:
    """What rank 0 writes and prints; on the other ranks every method is a no-op but for its checks.

    `first_step` steps are already done: records of later ones are dropped, here and in TensorBoard. `last_step` is the
    last one recorded, -1 without one. `header` (JSON values: all arguments) goes into the first record of this life.
    """

    def __init__(self, out: Path, is_main: bool, header: dict, total_steps: int, first_step: int = 0):
        self.out, self.is_main, self.last_step = Path(out), is_main, -1
        self.bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True,
                        disable=None if is_main else True)  # None: where the output is no terminal
        if not is_main:
            return
        from torch.utils.tensorboard import SummaryWriter  # seconds of import that only rank 0 needs
        (self.out / "samples").mkdir(parents=True, exist_ok=True)
        path, last = self.out / "metrics.jsonl", first_step if first_step > 0 else -1
        records = [record for record in read_records(path) if record.get("step", -1) <= last] if path.exists() else []
        if first_step == 0 and path.exists():                  # a run without a checkpoint starts over: its records stay
            path.rename(old := path.with_name(f"metrics.old-{time.time_ns()}.jsonl"))
            self.line(f"the records of an earlier run in this folder are now in {old}")
            records = []
        self.last_step = max((record["step"] for record in records if "step" in record), default=-1)
        records.append({"type": "header", "first_step": first_step, "environment": environment()} | header)
        _write(path.with_suffix(".tmp"), records)
        os.replace(path.with_suffix(".tmp"), path)
        self._file = open(path, "a", buffering=1)  # lines
        self._writer = SummaryWriter(self.out / "tensorboard", purge_step=last + 1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One JSON object and one TensorBoard point per metric. Raises ValueError naming a non-finite metric."""
        record = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        for name, value in record.items():
            if not math.isfinite(value):  # checked on every rank: reduced metrics are equal, so all ranks stop together
                raise ValueError(f"metric {name} is {value} at step {step}; all metrics must be finite")
        if not self.is_main:
            return
        self.last_step = step
        self._file.write(json.dumps({"step": step} | record) + "\n")
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, records: list[dict], pictures: list[Image.Image], stem: str = "step") -> None:
        """Writes `samples/<stem>-NNNNNN.jsonl` and .png (all pictures on one sheet); TensorBoard gets both."""
        if not self.is_main:
            return
        path = self.out / "samples" / f"{stem}-{step:06d}.jsonl"
        _write(path, records)
        if pictures:
            sheet = contact_sheet(pictures, columns=min(4, len(pictures)))
            sheet.save(path.with_suffix(".png"))
            self._writer.add_image(f"samples/{stem}", np.asarray(sheet), step, dataformats="HWC")  # (H, W, 3) uint8

    def line(self, text: str) -> None:
        """Prints one line above the bar."""
        if self.is_main:
            tqdm.write(text)
            sys.stdout.flush()  # a redirected stdout would keep the line for minutes

    def update(self, step: int, short: dict | None = None) -> None:
        """Moves the bar to `step` and shows `short`, a few names and values, behind it."""
        self.bar.set_postfix(short or {}, refresh=False)
        self.bar.update(step - self.bar.n)

    def close(self) -> None:
        """Closes bar and files; a second call does nothing."""
        self.bar.close()
        if self.is_main:
            self._file.close()
            self._writer.close()


def read_records(path: Path) -> list[dict]:
    """The objects of a JSONL file but for a last line cut by a kill. ValueError shows a line that is no JSON."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # not splitlines: U+2028 may stand in a string
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} has a line that is no JSON, repair or remove it: {error.doc[:100]!r}") from error


def _write(path: Path, records: list[dict]) -> None:
    lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records]
    # A lone surrogate, legal as an escape in a data row, has no encoding: backslashreplace writes the escape again.
    path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


INK, GREY, RULE, PAPER = "#1f2933", "#7b8794", "#d9dee5", "#ffffff"
SERIES = ("#2563eb", "#e8710a", "#138a5b", "#b3266e", "#7048c6", "#8a6d00", "#0e7c9b", "#c0392b")
_font = lru_cache(ImageFont.load_default)  # of a size; Pillow's own: Latin only, other scripts come out as boxes


def _wrap(text: str, size: int, width: int, most: int) -> list[str]:
    # Lines of at most `width` pixels; of more than `most` lines the middle is left out, since answers stand last.
    lines = []
    for paragraph in (text.strip() or "(empty)").expandtabs(4).split("\n"):
        rest = paragraph or " "
        while rest:
            lengths = range(1, min(len(rest), width // 3) + 1)
            fits = max(1, bisect_right(lengths, width, key=lambda n: _font(size).getlength(rest[:n])))
            cut = fits if fits == len(rest) else rest.rfind(" ", 0, fits) + 1 or fits
            lines.append(rest[:cut])
            rest = rest[cut:]
    if len(lines) > most:
        head, tail = most * 2 // 3, len(lines) - most + most * 2 // 3 + 1
        lines[head:tail] = [f"… {sum(map(len, lines[head:tail])):,} characters left out …"]
    return lines


def draw_sample(images: list[Image.Image], prompt: str, response: str, caption: str, width: int = 480) -> Image.Image:
    """A card of `width` pixels: the images side by side, the prompt, the response, `caption` (reward, reference)."""
    margin, gap, inner = 18, 10, width - 36
    share = max(1, (inner + gap) // max(1, len(images)) - gap)
    fitted = []
    for image in images:
        image = image.convert("RGB")
        factor = min(share // image.width, 224 // image.height)
        if factor > 1:  # whole pixels stay whole: the reader sees exactly what a tiny picture holds
            image = ImageOps.scale(image, factor, Image.Resampling.NEAREST)
        image.thumbnail((share, 224))
        fitted.append(image)
    y = band = max((image.height + 2 * margin for image in fitted), default=0)
    rows = []  # (y, text, size, colour)
    for label, text, most in (("PROMPT", prompt, 10), ("RESPONSE", response, 14)):
        lines = _wrap(text, 15, inner, most)
        rows += [(y + 13, label, 10, GREY)] + [(y + 28 + 20 * i, line, 15, INK) for i, line in enumerate(lines)]
        y += 30 + 20 * len(lines)
    foot = y + margin
    rows += [(foot + 8 + 19 * i, line, 14, "#1d4ed8") for i, line in enumerate(_wrap(caption, 14, inner, 4))]
    card = Image.new("RGB", (width, rows[-1][0] + 29), PAPER)
    draw = ImageDraw.Draw(card)
    draw.rectangle((0, 0, width, band), fill="#f3f5f8")
    draw.rectangle((0, foot, width, card.height), fill="#e6effc")
    x = (width - sum(image.width + gap for image in fitted) + gap) // 2
    for image in fitted:
        card.paste(ImageOps.expand(image, 1, RULE), (x - 1, (band - image.height) // 2 - 1))
        x += image.width + gap
    for y, text, size, colour in rows:
        draw.text((margin, y), text, font=_font(size), fill=colour)
    draw.rectangle((0, 0, width - 1, card.height - 1), outline=RULE)
    return card


def contact_sheet(pictures: list[Image.Image], columns: int) -> Image.Image:
    """The pictures in rows of `columns`, in cells as large as the largest one. ValueError without pictures."""
    gap, rows = 14, -(-len(pictures) // columns)
    width, height = gap + max(p.width for p in pictures), gap + max(p.height for p in pictures)
    sheet = Image.new("RGB", (gap + width * min(columns, len(pictures)), gap + height * rows), "#e4e8ee")
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (gap + width * (i % columns), gap + height * (i // columns)))
    return sheet


def _ticks(low: float, high: float, most: int) -> list[float]:  # in steps of 1, 2 or 5
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= most)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def plot_curves(metrics_jsonl: Path, names: list[str], path: Path, title: str = "") -> None:
    """Draws metrics over steps as a PNG of 800 x 440 pixels. ValueError if a name is nowhere in `metrics_jsonl`."""
    records = [record for record in read_records(metrics_jsonl) if "step" in record]
    curves = {name: sorted((r["step"], r[name]) for r in records if name in r) for name in names}
    if not names or not all(curves.values()):
        missing, known = [name for name in names if not curves[name]], sorted(set().union(*records) - {"step"})
        raise ValueError(f"{metrics_jsonl} has no values of {missing}; it has {known}")
    xs, ys = zip(*(point for points in curves.values() for point in points))
    x0, x1, y0, y1 = min(xs), max(max(xs), min(xs) + 1), min(ys), max(ys)
    if 0 <= y0 and y1 <= 1:  # a share keeps its full scale, so that curves of two runs compare by eye
        y0, y1 = 0.0, 1.0
    elif y0 == y1:
        y0, y1 = y0 - max(1.0, abs(y0) / 10), y1 + max(1.0, abs(y1) / 10)
    k = 3  # drawn three times as large and scaled down: Pillow's lines have no anti-aliasing
    left, right, top, bottom = 64 * k, 776 * k, 72 * k, 388 * k
    image = Image.new("RGB", (800 * k, 440 * k), PAPER)
    draw = ImageDraw.Draw(image)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - x0) / (x1 - x0) * (right - left), bottom - (y - y0) / (y1 - y0) * (bottom - top)

    for tick in _ticks(y0, y1, most=6):
        y = place(x0, tick)[1]
        draw.line((left, y, right, y), fill="#e9edf2", width=k)
        draw.text((left - 8 * k, y), f"{tick:.6g}", font=_font(12 * k), fill=GREY, anchor="rm")
    for tick in _ticks(x0, x1, most=8):
        x = place(tick, y0)[0]
        draw.line((x, bottom, x, bottom + 5 * k), fill=GREY, width=k)
        draw.text((x, bottom + 9 * k), f"{tick:.6g}", font=_font(12 * k), fill=GREY, anchor="mt")
    draw.line((left, bottom, right, bottom), fill=GREY, width=k)
    draw.text(((left + right) / 2, 430 * k), "step", font=_font(12 * k), fill=GREY, anchor="mb")
    draw.text((left, 12 * k), title, font=_font(16 * k), fill=INK)
    x = left
    for colour, (name, points) in zip(SERIES * len(curves), curves.items()):
        spots = [place(*point) for point in points]
        draw.line(spots, fill=colour, width=2 * k, joint="curve")
        for spot in spots if len(spots) <= 30 else []:  # few values, such as evaluations, show where they were taken
            draw.circle(spot, 4 * k, fill=colour, outline=PAPER, width=k)
        draw.line((x, 48 * k, x + 18 * k, 48 * k), fill=colour, width=3 * k)
        draw.text((x + 24 * k, 48 * k), name, font=_font(13 * k), fill=INK, anchor="lm")
        x += 44 * k + _font(13 * k).getlength(name)
    image.resize((800, 440), Image.Resampling.LANCZOS).save(path)
