"""What a run is told and what it leaves behind: flags in; metrics, progress, pictures, checkpoints and exports out.

    flag, read_flags, CheckpointArgs           dataclasses of flags -> --help, --config, checked values
    MetricSums     sums over tokens and samples, kept on the device -> one dict of means, the same on all ranks
    StageTimer     wall seconds per stage of a step
    environment    versions and git commit for the first record
    RunLogger      rank 0's files: metrics.jsonl, tensorboard/, samples/step-*.jsonl and .png; the bar, the lines
    draw_sample, contact_sheet                 PNG pictures by Pillow alone
    Checkpoints    a folder is complete or it does not exist: save in the background, commit by rename, resume, export
    run_main       exit codes: 0 done, 2 what the user can mend, 75 stopped by a signal with everything saved

Metric names carry their TensorBoard section: rollout/, train/, eval/, perf/. JSON has no NaN: it is an error.
"""

import argparse
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from huggingface_hub import split_torch_state_dict_into_shards
from PIL import Image, ImageDraw, ImageFont, ImageOps
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from common.buffers import UserError, all_gather_json, failing_together
from common.vlm import as_in_files, resolve_folder

EXIT_PREEMPTED = 75  # of a worker that stopped after SIGTERM or SIGUSR1 with everything saved (EX_TEMPFAIL of sysexits.h)


# ---------------------------------------------------------------------------------------------------------------------
# Flags: a field of a frozen dataclass is a flag, a dataclass is a group in --help
# ---------------------------------------------------------------------------------------------------------------------


def flag(default, help: str, choices: tuple = (), low: float = -math.inf, high: float = math.inf):
    """A field of an argument class: its default, its help with the unit, and the values or bounds it must respect."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


def finite_float(text: str) -> float:
    """argparse type: a float that is neither NaN nor infinite."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        unknown = [word for word in message.split() if word.startswith("--")] if message.startswith("unrecognized") else []
        near = {flag for word in unknown for flag in get_close_matches(word, self._option_string_actions, 1)}
        raise UserError(message + f"; did you mean {', '.join(sorted(near))}?" * bool(near))


def build_parser(groups: dict[str, type], description: str) -> Parser:
    """One argument group per dataclass; flags that were not given stay absent, so a --config value can stand."""
    parser = Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", help="JSON object of flags (such as <out>/args.json); flags override it")
    for group in groups.values():
        section = parser.add_argument_group(group.__doc__)
        for field in dataclasses.fields(group):
            help_text = f"{field.metadata['help']} (default: {field.default!s:.60})".replace("%", "%%")
            if field.type is bool:
                section.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction, help=help_text)
            else:
                kind = finite_float if field.type is float else field.type
                section.add_argument(f"--{field.name}", type=kind, choices=field.metadata["choices"] or None,
                                     metavar=None if field.metadata["choices"] else field.type.__name__.upper(),
                                     help=help_text)
    return parser


def read_config(path: str, groups: dict[str, type]) -> dict[str, Any]:
    """Flags from a JSON file, checked like flags.

    Raises:
        UserError: not a JSON object, an unknown flag, or a value of another type.
    """
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--config {path}: {error}") from error
    known = {field.name: field for group in groups.values() for field in dataclasses.fields(group)}
    if extra := sorted(set(config) - set(known)) if isinstance(config, dict) else "no JSON object":
        raise UserError(f"--config {path}: unknown flags: {extra}")
    for name, value in config.items():
        field = known[name]
        accepted = {float: (float, int), Path: (str,)}.get(field.type, (field.type,))
        wrong_kind = not isinstance(value, accepted) or (isinstance(value, bool) and field.type is not bool)
        if wrong_kind or value != value or value in (math.inf, -math.inf):
            raise UserError(f"--config {path}: {name} = {value!r} is not of type {field.type.__name__}")
        if field.metadata["choices"] and value not in field.metadata["choices"]:
            raise UserError(f"--config {path}: {name} = {value!r}: choose from {', '.join(field.metadata['choices'])}")
        config[name] = field.type(value)
    return config


def read_flags(groups: dict[str, type], description: str, argv: list[str] | None, toy: str) -> tuple[dict[str, Any], set[str]]:
    """Values of flags, over --config, over the embedded toy's file ``toy`` where neither --config nor --model is given;
    and the names of the flags given. Raises UserError: an unknown flag or a value of another type."""
    given = vars(build_parser(groups, description).parse_args(argv))
    config = given.pop("config", None)
    if config is None and "model" not in given:
        if given.keys() & {"data", "eval_data"}:
            raise UserError("--model and --data are needed together; without both, the toy's model learns from its own rows")
        config = str(embedded_toy(toy))
    return (read_config(config, groups) if config else {}) | given, set(given)


def embedded_toy(name: str) -> Path:
    """The toy's argument file ``name``; the first process of each machine writes the toy if it is not there yet."""
    root = Path(__file__).resolve().parents[1]
    config, program = root / "toy" / name, root / "launch" / "toy.py"
    if not config.exists() and not program.exists():
        raise UserError(f"no --model given, and the embedded toy is not there: {program} is missing")
    if not config.exists() and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        failed = subprocess.run([sys.executable, str(program), "--out", str(config.parent)]).returncode
        if failed and not config.exists():                       # else another machine was the first to write it
            raise UserError(f"no --model given, and {program} did not write the embedded toy, for the reason above")
    while not config.exists():      # written last by toy.py; if that fails, torchrun ends this process with its peer
        time.sleep(0.2)
    return config


def fill_groups(args_class: type, values: dict[str, Any]):
    """An ``args_class``, one dataclass per group, from flag values; the others have their defaults."""
    return args_class(**{group.name: group.type(**{field.name: values[field.name] for field in dataclasses.fields(group.type)
                                                   if field.name in values}) for group in dataclasses.fields(args_class)})


def broken_rules(args, rules: dict[str, bool]) -> list[str]:
    """What is wrong with single flags, by the rules of both scripts, and by ``rules``: message -> whether the rule holds."""
    problems = []
    for group in vars(args).values():
        for field in dataclasses.fields(group):
            value, low, high = getattr(group, field.name), field.metadata["low"], field.metadata["high"]
            if field.type in (int, float) and not low <= value <= high:
                at_most = f" and at most {high:g}" if high < math.inf else ""
                problems.append(f"--{field.name} {value} must be at least {low:g}{at_most}")
    rules = {
        "--model and --data are needed together": args.model.model and (args.data.data or args.eval.eval_only),
        "--eval_only needs --eval_data": args.data.eval_data or not args.eval.eval_only,
        "--keep_best needs --eval_data and evaluations (--eval_every)":
            not args.checkpoint.keep_best or (args.data.eval_data and args.eval.eval_every != 0),
        "--dry_run plans the training: it needs --data": args.data.data or not args.run.dry_run,
        "--lora_targets needs --lora_rank": args.model.lora_rank > 0 or not args.model.lora_targets,
        "--train_vision and --lora_rank: choose one of them": not (args.model.train_vision and args.model.lora_rank),
        "--vision_lr_factor needs --train_vision": args.model.train_vision or args.update.vision_lr_factor == 1,
        "--min_pixels exceeds --max_pixels": args.data.max_pixels == 0 or args.data.min_pixels <= args.data.max_pixels,
    } | rules
    return problems + [message for message, holds in rules.items() if not holds]


def list_flags(args) -> dict[str, Any]:
    """Arguments as flags, JSON-ready: what --config reads back."""
    flags = {field.name: getattr(group, field.name) for group in vars(args).values() for field in dataclasses.fields(group)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}


def check_same_flags(flags: dict[str, Any]) -> None:
    """Raises UserError on every rank if two ranks were started with different flags, as by hand on several nodes."""
    (host, first), *others = all_gather_json([socket.gethostname(), flags])
    for there, other in others:
        if different := [f"--{name} {first[name]!r} and {other[name]!r}" for name in first if first[name] != other[name]]:
            raise UserError(f"the ranks on {host} and on {there} were started with different flags: {'; '.join(different)}")


def absolute(path: str) -> str:
    """The path as seen from any folder; what is no existing path (empty, a hub name) stays."""
    return str(Path(path).resolve()) if path and Path(path).exists() else path


def absolute_model(name: str) -> str:
    """The same of a checkpoint; of <out>/export/latest the folder that it names now, to which later lives are held."""
    return absolute(str(resolve_folder(name)) if Path(name).name == "latest" and Path(name).is_file() else name)


def contents(paths: Iterable[str], rows: int) -> str:
    """The number of rows in use and a digest of each of their files: rows that were edited make another run."""
    digests = []
    for path in paths:
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest()[:12])
    return f"{rows} rows, sha256 {' '.join(digests)}"


# ---------------------------------------------------------------------------------------------------------------------
# Metrics and progress
# ---------------------------------------------------------------------------------------------------------------------


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
        path, records = self.out / "metrics.jsonl", []
        if path.exists() and first_step == 0:                  # a run without a checkpoint starts over: its records stay
            path.rename(old := path.with_name(f"metrics.old-{time.time_ns()}.jsonl"))
            self.line(f"the records of an earlier run in this folder are now in {old}")
        elif path.exists():
            records = [record for record in read_records(path) if record.get("step", -1) <= first_step]
        self.last_step = max((record["step"] for record in records if "step" in record), default=-1)
        records.append({"type": "header", "first_step": first_step, "environment": environment()} | header)
        _write(path.with_suffix(".tmp"), records)
        sync_folder(path.with_suffix(".tmp"))  # or a power cut would leave an empty file in the place of all records
        os.replace(path.with_suffix(".tmp"), path)
        self._file = open(path, "a", buffering=1)  # lines
        self._writer = SummaryWriter(self.out / "tensorboard", purge_step=first_step + 1 if first_step else 0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One JSON object and one TensorBoard point per metric. Raises UserError naming a non-finite metric."""
        record = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        for name, value in record.items():
            if not math.isfinite(value):  # checked on every rank: reduced metrics are equal, so all ranks stop together
                raise UserError(f"metric {name} is {value} at step {step}; all metrics must be finite")
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


def progress(items: Iterable, name: str) -> tqdm:
    """``items``, with a bar on rank 0's terminal for what takes more than two seconds; it is gone when all are done."""
    hidden = True if int(os.environ.get("RANK", 0)) else None                                # None: where there is no terminal
    return tqdm(items, desc=name, leave=False, delay=2, dynamic_ncols=True, disable=hidden)


def start_log(out: Path, flags: dict[str, Any], total_steps: int, first_step: int, eval_only: bool) -> RunLogger:
    """Write args.json and open the records of a run; ``eval_only``: beside them, in a folder of its own, so that they stay as
    they are. Raises UserError on every rank alike: files that cannot be read or written."""
    is_main = dist.get_rank() == 0
    if eval_only:
        out, first_step = out / f"evaluation-step-{first_step}", 0
    with failing_together():
        if is_main:
            out.mkdir(parents=True, exist_ok=True)
            (out / "args.json").write_text(json.dumps(flags, indent=2) + "\n")
        return RunLogger(out, is_main, {"arguments": flags}, total_steps, first_step)


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


RESERVED_GIB = 2.0  # of a GPU, assumed: CUDA's context, NCCL's buffers, what the allocator cannot use


def memory_plan(phases: dict[str, dict[str, float]], gpu_gib: float) -> tuple[list[str], float]:
    """Lines of a table of the bytes of each part (rows) in each phase (columns), and the peak in GiB with what is reserved."""
    parts = list(dict.fromkeys(part for phase in phases.values() for part in phase))
    totals = {name: RESERVED_GIB + sum(phase.values()) / 2 ** 30 for name, phase in phases.items()}
    width, peak = max(map(len, [*parts, "GiB per GPU", "reserved"])), max(totals.values())
    cells = [["GiB per GPU".ljust(width), *(f"{name:>15}" for name in phases)]]
    for part in parts:
        cells.append([part.ljust(width), *(f"{phase[part] / 2 ** 30:15.2f}" if part in phase else " " * 15
                                           for phase in phases.values())])
    cells.append(["reserved".ljust(width), *[f"{RESERVED_GIB:15.2f}"] * len(phases)])
    cells.append(["total".ljust(width), *(f"{total:15.2f}" for total in totals.values())])
    verdict = f"fits, {gpu_gib - peak:.1f} GiB to spare" if peak <= gpu_gib else f"does not fit by {peak - gpu_gib:.1f} GiB"
    where = max(totals, key=totals.get)
    return ["".join(row) for row in cells] + [f"peak: {peak:.1f} of {gpu_gib:g} GiB, in {where}: {verdict}"], peak


def print_plan(lines: list[str], phases_with: Callable[[bool], dict[str, dict[str, float]]], checkpointing: bool,
               gpu_gib: float) -> dict[str, float]:
    """Print what --dry_run found: ``lines``, and the memory with or without gradient checkpointing. Raises UserError on every
    rank: too little of it."""
    (table, peak), (_, otherwise) = (memory_plan(phases_with(on), gpu_gib) for on in (checkpointing, not checkpointing))
    if dist.get_rank() == 0:
        print(*lines, *table, f"with{'out' * checkpointing} --gradient_checkpointing the peak is {otherwise:.1f} GiB",
              sep="\n", flush=True)
    if peak > gpu_gib:
        raise UserError(f"{table[-1]}; --gradient_checkpointing, a smaller --max_tokens_per_pack or more GPUs need less")
    return {"plan/peak_gib": peak}

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: a folder is complete or it does not exist
# ---------------------------------------------------------------------------------------------------------------------


def falls_due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps (-1: only after the last one, 0: never) happens after ``step``."""
    return (step == last and every != 0) or (every > 0 and step % every == 0)


def evaluation_due(args, step: int, prompts_per_step: int, rows: int) -> bool:
    """Whether to evaluate after ``step``; --eval_every -1: when it completes a pass over the ``rows`` of the data."""
    passes = [done * prompts_per_step // rows for done in (step - 1, step)]
    return bool(args.data.eval_data) and (falls_due(step, args.eval.eval_every, args.update.steps)
                                          or (args.eval.eval_every == -1 and passes[1] > passes[0]))


@dataclass(frozen=True)
class CheckpointArgs:
    """checkpoints"""
    save_every: int = flag(50, "steps between checkpoints, and after the last step; -1: only after the last step, 0: never",
                           low=-1)
    keep_last: int = flag(2, "complete checkpoints kept", low=1)
    keep_gb: float = flag(0.0, "disk space of complete checkpoints, 10^9 bytes: beyond it the oldest are deleted, never the "
                               "newest or the best; 0: no limit", low=0)
    keep_best: str = flag("", "an eval metric, such as eval/reward_mean or a judge's eval/accuracy: its best checkpoint is "
                              "kept too, where it is highest (a loss or ece: lowest); empty: none")
    save_strategy: str = flag("unrestricted", "who writes at the same time: all ranks, those of one node, or one rank",
                              ("unrestricted", "single_node", "single_process", "single_thread"))
    save_blocking: bool = flag(False, "wait for each checkpoint instead of writing it in the background")
    max_failed_saves: int = flag(3, "failed saves in a row that stop the run", low=1)
    export_every: int = flag(-1, "steps between exports of the weights; -1: only the last step, 0: never", low=-1)
    resume: str = flag("auto", "auto: go on from the newest checkpoint in --out if there is one; must: there has to be one; "
                               "never: --out must be new; or the path of a checkpoint (or its latest), "
                               "from which an --out without checkpoints starts")
    resume_changed_args: str = flag("refuse", "what a resumed run does when flags that alter the result have changed",
                                    ("refuse", "allow"))


Models = dict[str, tuple[nn.Module, torch.optim.Optimizer]]  # by role: actor, critic, judge


class Checkpoints:
    """Writes and finds <out>/checkpoints/step-N, and exports to <out>/export/step-N.

    A save goes into a fresh hidden folder: every rank's tensors as safetensors, in the background, then on rank 0
    COMMITTED.json with the size of every file, fsync, rename to step-N, the `latest` pointer, and only then the deletion
    of old checkpoints. Death at any instant leaves the earlier checkpoints as they were. One save is in flight at most.
    """

    def __init__(self, out: Path, args: CheckpointArgs, timeout: float):
        self.out, self.folder, self.args, self.rank = out, out / "checkpoints", args, dist.get_rank()
        self.failed, self.waited = 0, 0.0                                   # saves in a row; seconds that training waited
        self.first_step, self.saved_at = 0, 0                # from which this life goes on; when its save began, ns (rank 0)
        self.new_group = lambda: dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.group = self.new_group()                                                                   # of the background
        self.hosts = all_gather_json(socket.gethostname())                                              # of the ranks
        self.pending: tuple[int, Path, Any] | None = None
        mark = self.folder / all_gather_json(f".tmp-seen-{time.time_ns()}")[0]           # a name that no cache can know
        with failing_together(f"--out {out}"):
            if self.rank == 0:
                self.take_folder(mark)
        with failing_together(f"--out {out}"):
            if not os.path.exists(mark):                                            # each node would keep its own shards
                raise ValueError(f" on {socket.gethostname()} is not the folder of rank 0: nodes need one file system")
        if self.rank == 0:
            mark.rmdir()

    def take_folder(self, mark: Path) -> None:
        """Make this the only live run of the folder; the kernel drops the lock of a process that dies. Leaves ``mark`` for
        the other ranks to see. Rank 0 only. Raises ValueError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.out / ".lock", "a+")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                print(f"warning: the file system of {self.out} has no locks: a second run would not be refused", flush=True)
            self.lock.truncate(0)
            self.lock.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(),
                                        "job": os.environ.get("SLURM_JOB_ID")}))
            self.lock.flush()
            for path in [*self.folder.glob(".tmp-*"), *self.out.glob("export*/.step-*")]:   # of a life that died in writing
                shutil.rmtree(path)
            mark.mkdir()
        except BlockingIOError as error:
            self.lock.seek(0)
            raise ValueError(f" is in use by a live run: {self.lock.read().strip()}") from error
        except OSError as error:
            raise ValueError(f": {error}") from error

    def close(self) -> None:
        """Release the folder."""
        if self.rank == 0:
            self.lock.close()

    def resume(self, flags: dict[str, Any], neutral: set[str], state: dict[str, Any], models: Models,
               keep_newer: bool) -> dict[str, Any]:
        """Load the checkpoint that --resume asks for and return its state; the fresh ``state`` when there is none.

        Args:
            flags: what the checkpoint's must equal, but for the ``neutral`` ones, which do not alter the result.
            keep_newer: leave newer checkpoints than the one loaded, which the next start would take for ours.
        Raises:
            UserError: no checkpoint where one must be, one where none may be, or changed flags that alter the result.
        """
        path, changed = None, []
        with failing_together():
            if self.rank == 0:                                                    # its view of a shared file system counts
                path, state, changed = self.choose(flags, neutral, state, keep_newer)
        path, state, changed = all_gather_json([path, state, changed])[0]
        self.first_step = state["step"]
        if path is not None:
            load_training_state(Path(path), models)
        if self.rank == 0 and path is None:
            print(f"starting from step 0: no complete checkpoint in {self.folder}", flush=True)
        elif self.rank == 0:
            newer = [old for step, old in complete_checkpoints(self.folder) if step > state["step"] and not keep_newer]
            if newer and (records := self.out / "metrics.jsonl").exists():
                shutil.copy(records, records.with_name(f"metrics.old-{time.time_ns()}.jsonl"))
            if newer:
                write_pointer(self.folder / "latest", Path(path).name)
            for old in newer:
                old.rename(old.with_name(f"replaced-{old.name}-{time.time_ns()}"))
            print(f"resuming from {path}" + (f"; changed: {'; '.join(changed)}" if changed else ""), flush=True)
        return state | {"arguments": flags, "arguments_hash": hashlib.sha256(json.dumps(flags).encode()).hexdigest()}

    def choose(self, flags: dict[str, Any], neutral: set[str], state: dict[str, Any],
               keep_newer: bool) -> tuple[str | None, dict[str, Any], list[str]]:
        """Path, state and changed flags of the checkpoint that --resume means; without one None, the fresh ``state`` and [].
        Rank 0 only. Raises ValueError."""
        choice, found = self.args.resume, complete_checkpoints(self.folder)
        if choice == "never" and (found or (self.out / "metrics.jsonl").exists()):
            raise ValueError(f"--resume never: {self.out} already holds a run; choose another --out")
        if choice not in ("auto", "must", "never"):
            chosen, begun = Path(absolute_model(choice)), False
            own = os.path.realpath(chosen.parent) == os.path.realpath(self.folder)
            if own and found and not keep_newer:              # this very command has gone back already
                old = json.loads((found[0][1] / "state.json").read_text())["arguments"]
                begun = all(old.get(name) == value for name, value in flags.items() if name == "resume" or name not in neutral)
            # With a path of another run, what --out already has goes first: a requeued job must not start over.
            if not found or (own and not begun):
                found = [(step, path) for step, path in complete_checkpoints(chosen.parent) if path.name == chosen.name]
        if choice not in ("auto", "never") and not found:
            raise ValueError(f"--resume {choice}: no complete checkpoint in {self.folder if choice == 'must' else choice}")
        if not found:
            return None, state, []
        path = found[0][1]
        try:
            state = state | json.loads((path / "state.json").read_text())       # an older one may lack a counter
            self.saved_at = (path / "state.json").stat().st_mtime_ns
        except (OSError, ValueError) as error:
            raise ValueError(f"{path / 'state.json'} cannot be read: {error}") from error
        if state["step"] > flags["steps"] and not keep_newer:
            raise ValueError(f"{path} is further than --steps {flags['steps']}; --resume takes the path of an earlier one")
        changed = [f"--{name} {state['arguments'].get(name)!r} -> {value!r}" for name, value in flags.items()
                   if state["arguments"].get(name) != value]
        altering = [text for text in changed if text[2:].split()[0] not in neutral]
        if altering and self.args.resume_changed_args == "refuse":
            raise ValueError(f"flags that alter the result differ from those of {path}: " + "; ".join(altering)
                             + ". Choose another --out, or --resume_changed_args allow")
        return str(path), state, changed

    def save(self, step: int, training: dict[str, Any], scalars: dict) -> None:
        """Start saving; the tensors are copied before this returns, so training may go on changing them."""
        started, problem, aside = time.perf_counter(), None, self.folder / f".tmp-step-{step}"
        self.finish(wait=True)
        tensors = {name: value for name, value in training.items() if torch.is_tensor(value)}   # the rest are arguments
        if self.rank == 0:
            try:
                needed, free = sum(t.numel() * t.element_size() for t in tensors.values()), shutil.disk_usage(self.folder).free
                if needed * 1.02 + 2 ** 20 > free:
                    raise OSError(f"{needed / 2 ** 30:.3f} GiB are needed and {free / 2 ** 30:.3f} GiB free in {self.folder}")
                aside.mkdir()
                write_durably(aside / "state.json", json.dumps(scalars, indent=1, allow_nan=False))
            except (OSError, ValueError) as error:                          # ValueError: a scalar is not finite
                problem = str(error)
        if problem := all_gather_json(problem)[0]:
            return self.report(step, aside, problem)
        writer = HuggingFaceStorageWriter(str(aside), save_distributed=True)
        take_turns(writer, self.args.save_strategy, self.group)
        writer.finish = lambda metadata, results: check_arrival(aside, results)         # on rank 0, in the background
        kill_point("before-write")
        self.pending = step, aside, dcp.async_save(tensors, storage_writer=writer, process_group=self.group)
        if self.args.save_blocking:
            self.finish(wait=True)
        self.waited = time.perf_counter() - started

    def finish(self, wait: bool = False) -> None:
        """Commit the save in flight if it has been written on all ranks; with ``wait``, wait for that."""
        if self.pending is None:
            return
        step, aside, future = self.pending
        if not wait and not all(all_gather_json(future.done())):
            return
        self.pending, problem = None, None
        try:
            future.result()
        except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
            problem = describe_failure(error, self.hosts)
        if problem := next(filter(None, all_gather_json(problem)), None):
            self.group = self.new_group()                              # one that has timed out is of no use to any later save
        if self.rank == 0 and not problem:
            try:
                self.commit(step, aside)
            except (OSError, ValueError) as error:                          # ValueError: somebody has edited metrics.jsonl
                problem = str(error)
        if problem := all_gather_json(problem)[0]:
            return self.report(step, aside, problem)
        self.failed = 0

    def commit(self, step: int, aside: Path) -> None:
        """Make a written checkpoint visible, then delete those that need not be kept. Rank 0 only."""
        kill_point("before-commit")
        files = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
        state = json.loads((aside / "state.json").read_text())
        write_durably(aside / "COMMITTED.json", json.dumps({"step": step, "world_size": dist.get_world_size(), "files": files,
                                                            "arguments_hash": state["arguments_hash"]}, indent=1))
        sync_folder(aside)
        kill_point("before-rename")
        final = self.folder / f"step-{step}"
        if final.exists():                            # left by a life whose later records were not resumed from
            shutil.rmtree(final)
        aside.rename(final)
        sync_folder(self.folder)
        kill_point("before-pointer")
        write_pointer(self.folder / "latest", final.name)
        kill_point("before-rotation")
        best, size, limit = self.best_step(), 0, self.args.keep_gb * 1e9 or math.inf
        # A later step, unreadable when this life looked for it, would have the one just written deleted.
        for number, (old_step, old) in enumerate(c for c in complete_checkpoints(self.folder) if c[0] <= step):
            size += sum(path.stat().st_size for path in old.iterdir())
            if number and old_step != best and (number >= self.args.keep_last or size > limit):
                try:
                    old.rename(old.with_name(f".tmp-old-{old.name}"))     # never half of a checkpoint under a valid name
                    shutil.rmtree(self.folder / f".tmp-old-{old.name}")
                except OSError as error:
                    print(f"warning: the old checkpoint {old} was not deleted: {error}", flush=True)

    def best_step(self) -> int | None:
        """The step with the best --keep_best metric among those that have a checkpoint. The records of the run are the
        memory: they outlive a kill, and a resume drops those of steps that are taken again."""
        name, path = self.args.keep_best, self.out / "metrics.jsonl"
        records = read_records(path) if name and path.exists() else []
        sign = -1 if name in ("eval/loss", "eval/likelihood_ece") else 1          # whole names: a source's may end so, too
        values = {record["step"]: sign * record[name] for record in records if name in record}
        return max((step for step, _ in complete_checkpoints(self.folder) if step in values), key=values.get, default=None)

    def report(self, step: int, aside: Path, problem: str) -> None:
        """Count a failed save; give up after --max_failed_saves in a row."""
        self.failed += 1
        if self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            print(f"warning: the checkpoint of step {step} was not saved ({self.failed} in a row): {problem}", flush=True)
        if self.failed >= self.args.max_failed_saves:
            raise UserError(f"{self.failed} checkpoints in a row could not be saved, the last because: {problem}")

    def check_quality(self, metrics: dict[str, float]) -> None:
        """Raises UserError if an evaluation has no metric of the name of --keep_best."""
        name = self.args.keep_best
        if name and name not in metrics:
            raise UserError(f"--keep_best {name} is not a metric of the evaluation: {', '.join(sorted(metrics))}")

    def export_if_due(self, module: nn.Module, processor, step: int, last: int, place: str = "export") -> None:
        """Export the model to <out>/``place`` after ``step`` if --export_every says so and the life before has not done it.
        Raises UserError if the last one fails; others are not what the run is for."""
        folder = self.out / place / f"step-{step}"
        # Older than its checkpoint, or of a later step, it is of a life that was set aside.
        done = self.rank == 0 and step == self.first_step and folder.exists() and folder.stat().st_mtime_ns >= self.saved_at
        if falls_due(step, self.args.export_every, last) and not all_gather_json(done)[0]:
            problem = export(module, processor, folder)
            if problem and step == last:
                raise UserError(f"the weights were not exported to {folder}: {problem}. Once that is mended, the same command "
                                "goes on from the newest checkpoint and exports them")
            if problem and self.rank == 0:
                print(f"warning: the weights were not exported to {folder}: {problem}", flush=True)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None or issubclass(kind, UserError):        # which all ranks raise together: what was written counts
            self.finish(wait=True)


def kill_point(name: str) -> None:
    """A marked instant of the save protocol. Tests set KILL_AT to die there; otherwise nothing happens."""
    if os.environ.get("KILL_AT") == name and os.environ.get("KILL_RANK", "0") == os.environ.get("RANK", "0"):
        os.kill(os.getpid(), signal.SIGKILL)


def write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder survive a power cut, or what a file holds."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_pointer(pointer: Path, name: str) -> None:
    """Replace a pointer file: readers see the old name or the new one."""
    write_durably(pointer.with_name(f".{pointer.name}.tmp"), name + "\n")
    os.replace(pointer.with_name(f".{pointer.name}.tmp"), pointer)
    sync_folder(pointer.parent)


def take_turns(writer: HuggingFaceStorageWriter, strategy: str, group: dist.ProcessGroup) -> None:
    """Let only some ranks write at a time: all, those of one node, or one. Runs in the background, between collectives."""
    if strategy == "unrestricted":
        return
    turn, turns, write = dist.get_rank(), dist.get_world_size(), writer.write_data
    if strategy == "single_node":
        turn, turns = int(os.environ.get("GROUP_RANK", 0)), int(os.environ.get("GROUP_WORLD_SIZE", 1))

    def in_turn(plan, planner):
        for _ in range(turn):
            dist.barrier(group)
        try:
            return write(plan, planner)
        finally:                                                          # also after an error, or the others would hang
            for _ in range(turns - turn):
                dist.barrier(group)

    writer.write_data = in_turn


def check_arrival(folder: Path, written: list[list[WriteResult]]) -> None:
    """Raises OSError if a file that some rank has written is not in the folder that rank 0 sees."""
    names = {result.storage_data.relative_path for results in written for result in results}
    if missing := sorted(name for name in names if not (folder / name).exists()):
        raise OSError(f"{', '.join(missing)}: written by other ranks, but not to the {folder} that rank 0 sees")


def describe_failure(error: BaseException, hosts: list[str] = []) -> str:
    """One line; torch's CheckpointException carries the failures of the ranks, which run on ``hosts``."""
    failures = getattr(error, "failures", None) or {dist.get_rank(): error}
    rank, cause = next(iter(failures.items()))
    cause = cause[0] if isinstance(cause, tuple) else cause
    host = f", host {hosts[rank]}" if hosts else ""
    return f"{type(cause).__name__} on rank {rank}{host}: {str(cause).splitlines()[0] if str(cause) else ''}"


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, newest first."""
    found = []
    for path in folder.glob("step-*"):
        try:
            committed = json.loads((path / "COMMITTED.json").read_text())
            step, files = committed["step"], committed["files"]
            whole = type(step) is int and path.name == f"step-{step}" and "state.json" in files and \
                all(Path(name).name == name and (path / name).stat().st_size == size for name, size in files.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):     # missing, truncated, or not ours: not complete
            continue
        if whole:
            found.append((step, path))
    return sorted(found, reverse=True)


STATE_OPTIONS = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True, strict=False)


def training_state(models: Models) -> dict[str, Any]:
    """Weights and optimizer state of all roles in one flat dictionary; frozen weights are those of --model."""
    state: dict[str, Any] = {}
    for role, (module, optimizer) in models.items():
        weights, moments = get_state_dict(module, optimizer, options=STATE_OPTIONS)
        state |= {f"{role}.model.{name}": value for name, value in weights.items()}
        state |= {f"{role}.optimizer.{name}": value for name, value in moments.items()}
    return state


def load_training_state(path: Path, models: Models) -> None:
    """Read a checkpoint's tensors into models and optimizers; any number of ranks may have written it."""
    state = training_state(models)
    try:
        dcp.load({name: value for name, value in state.items() if torch.is_tensor(value)},
                 storage_reader=HuggingFaceStorageReader(str(path)))
    except dcp.api.CheckpointException as error:                # say of a role or an average that the run did not have
        raise UserError(f"{path} cannot be loaded: {describe_failure(error)}") from error
    for role, (module, optimizer) in models.items():
        weights, moments = ({name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
                            for start in (f"{role}.model.", f"{role}.optimizer."))
        set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=moments, options=STATE_OPTIONS)


@torch.no_grad()
def export(module: nn.Module, processor, folder: Path, shard_bytes: int = 4 << 30) -> str | None:
    """Write a Hugging Face folder that `from_pretrained` loads: safetensors under the names the checkpoint came with,
    config, tokenizer and processor files. Complete or absent: written aside and renamed. All ranks must call.

    LoRA adapters are merged, in float32, cast once, and stand in `adapter/` beside it as well, as PEFT loads them.
    Returns on every rank why the folder could not be written, or None."""
    aside, problem, config = folder.with_name(f".{folder.name}.tmp"), None, processor.config
    dtype = getattr(config, "dtype", None) or torch.float32
    empty = {key: torch.empty(module.model.get_parameter(name).shape, dtype=dtype, device="meta")
             for name, key in module.spelled.items()}
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=shard_bytes)
    shards = gather_shards(module, plan.filename_to_tensors, config, dtype)
    if dist.get_rank() == 0:
        try:
            for file, tensors in shards:
                (aside / file).parent.mkdir(parents=True, exist_ok=True)
                save_file(tensors, aside / file, metadata={"format": "pt"})
            if plan.is_sharded:
                table = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
                (aside / "model.safetensors.index.json").write_text(json.dumps(table, indent=2))
            if adapter_config := getattr(module.model, "adapter", None):
                (aside / "adapter" / "adapter_config.json").write_text(json.dumps(adapter_config, indent=2))
            config.save_pretrained(aside)
            processor.save(str(aside))
            for path in aside.rglob("*.safetensors"):              # written for their owner alone by safetensors 0.8
                shutil.copymode(aside / "config.json", path)
            for path in (aside, *aside.rglob("*")):
                sync_folder(path)
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
            write_pointer(folder.parent / "latest", folder.name)
        except (OSError, SafetensorError) as error:
            problem = str(error)
            shutil.rmtree(aside, ignore_errors=True)               # the disk may be full of it
    for _ in shards:                                               # the collectives that are left, after an error as well
        pass
    return all_gather_json(problem)[0]


def gather_shards(module: nn.Module, files: dict[str, list[str]], config,
                  dtype: torch.dtype) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The files of an export, each with its tensors on rank 0 and with none on the others. All ranks must iterate."""
    parameters = dict(module.model.named_parameters(remove_duplicate=False))
    names = {key: name for name, key in module.spelled.items()}
    adapter, adapter_config = {}, getattr(module.model, "adapter", None)
    for file, keys in files.items():
        shard = {}
        for key in keys:
            name, stem = names[key], names[key].removesuffix(".weight")
            found = [parameters[part] for part in (name, f"{stem}.lora_A", f"{stem}.lora_B") if part in parameters]
            full, *pair = (p.full_tensor() if isinstance(p, DTensor) else p for p in found)      # a collective: all ranks
            if dist.get_rank() == 0:
                if pair:
                    full = full.float() + pair[1] @ pair[0] * (adapter_config["lora_alpha"] / adapter_config["r"])
                    adapter |= {f"base_model.model.{stem}.lora_{part}.weight": value.cpu() for part, value in zip("AB", pair)}
                shard[key] = as_in_files(config, name, full).to(dtype, copy=True).cpu().contiguous()    # tied ones twice
        yield file, shard
    if adapter_config:
        yield "adapter/adapter_model.safetensors", adapter

# ---------------------------------------------------------------------------------------------------------------------
# How a run ends
# ---------------------------------------------------------------------------------------------------------------------


STOP_SIGNALS: list[int] = []  # what arrived; looked at by all ranks together after each step


def catch_signals() -> None:
    """SIGTERM (a cancelled job) and SIGUSR1 (SLURM's warning) ask for a stop after the step in progress."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: STOP_SIGNALS.append(received))


def stop_requested() -> bool:
    """Whether any rank was asked to stop: the same answer on all of them."""
    return any(all_gather_json(bool(STOP_SIGNALS)))


def end_run(log: RunLogger, checkpoints: Checkpoints, step: int, last: int, products: str) -> None:
    """Say after ``step`` how a run to step ``last`` ended and where its ``products`` are; exits the process if a signal ended
    it. Raises UserError: the last checkpoint could not be saved."""
    if checkpoints.failed:
        raise UserError(f"the run ended after step {step}, and its last checkpoint could not be saved")
    log.line(f"stopped by a signal after step {step}; the same command goes on from there" if step < last else
             "done" + " before this start" * (checkpoints.first_step >= last) + f": metrics in {log.out}/metrics.jsonl"
             + products + f", weights in {checkpoints.out}/export" * (checkpoints.args.export_every != 0))
    log.close()
    checkpoints.close()
    if step < last:
        dist.destroy_process_group()
        sys.exit(EXIT_PREEMPTED)


def run_main(program: Callable[[], Any]) -> None:
    """Run a script's main: exit code 2 and one message from rank 0 for what the user can mend, on every rank alike."""
    try:
        program()
    except UserError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)          # torchrun ends the others as soon as one of them has exited
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        speak_first()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit(2)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        # The peers' own reasons stand above; this one only lost them. What NCCL itself failed for is its message's last line.
        reason = " ".join(str(error).partition("Exception raised from")[0].split())
        print(f"error: rank {os.environ.get('RANK', 0)} lost contact with another rank, which died or did not answer within "
              f"--timeout, or could not reach it: {reason}", file=sys.stderr, flush=True)
        os._exit(1)                                            # no destructor may wait for the lost rank
    if dist.is_initialized():
        dist.destroy_process_group()


def speak_first() -> None:
    """Wait until rank 0 has printed its message: a faster rank that exits would have it killed while it still imports."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              timeout=timedelta(seconds=60))
        if int(os.environ["RANK"]) == 0:
            store.set("rank 0 has spoken", "yes")
        store.wait(["rank 0 has spoken"])
