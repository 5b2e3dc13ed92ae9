"""Metrics, timers, and what the run folder records.

    MetricSums     statistics of packs, kept on the device -> means, the same on all ranks
    timer          wall seconds per stage of a step
    due            is this step a multiple of N, or the last?
    RunLogger      rank 0's files: args.json, metrics.jsonl, tensorboard/, samples/; bar and lines

Metric names carry their TensorBoard section: rollout/, train/, eval/, perf/. JSON has no NaN: it is
an error.
"""

import inspect
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from common import ROOT, VERSION, distributed
from common.flags import RunArgs, as_json, as_typed, steps_between
from common.ground.cards import contact_sheet
from common.ground.files import (
    UserError,
    as_message,
    printable,
    read_records,
    replace_durably,
    sha256,
    write_durably,
)
from common.ground.process import EXIT_PREEMPTED, Exit

# -------------------------------------------------------------------------------------------------
# Metrics of a step
# -------------------------------------------------------------------------------------------------


Metrics = dict[str, float]  # of a step or an evaluation, by name


class Mean(NamedTuple):
    """A statistic that is logged as its mean: a sum over ``count`` tokens or samples."""

    total: float | Tensor
    count: float | Tensor

    @property
    def result(self) -> float | None:
        return float(self.total / self.count) if self.count else None


class Largest(NamedTuple):
    """A statistic that is logged as its maximum, NaN if there is one; -inf is no value."""

    value: float | Tensor

    @property
    def result(self) -> float | None:
        return None if self.value == -math.inf else float(self.value)


class Share(NamedTuple):
    """A pack's share of the loss of a minibatch. Shares are summed over packs and ranks; the loss is
    logged as its mean over minibatches."""

    total: float | Tensor


def combine(parts: list) -> Mean | Largest | Share:
    """One statistic of several of its type, of packs or of ranks, in fp64 on the host."""
    columns = [[float(value) for value in column] for column in zip(*parts)]
    if isinstance(parts[0], Largest):
        return Largest(float(np.max(columns[0])))  # unlike Python's max, it keeps NaN
    return type(parts[0])(*map(sum, columns))


class MetricSums:
    """The statistics of one step, reduced over packs, updates and ranks at its end; until then no
    value reaches the host."""

    def __init__(self):
        # by metric, each detached; of a loss one `Share` of each minibatch
        self.parts: dict[str, list] = defaultdict(list)

    def record(self, packs: list[dict]) -> None:
        """Add the statistics of this rank's packs of a minibatch, as ``train/NAME`` where a name
        has no section. Each is a `Mean`, a `Largest` or a `Share`."""
        for name in dict.fromkeys(name for pack in packs for name in pack):
            values = [pack[name] for pack in packs if name in pack]
            if isinstance(values[0], Share):
                values = [Share(sum(share.total for share in values))]
            self.parts[name if "/" in name else f"train/{name}"] += values

    def record_update(self, role: str, norm: float, applied: bool, packs: list[dict]) -> None:
        """Add an update of a model: whether it was applied, the norm of its gradient, and its packs.
        The sums of a skipped one would be NaN."""
        self.record([{f"{role}_skipped": Mean(float(not applied), 1)}])
        if applied:
            self.record([*packs, {f"{role}_grad_norm": Mean(norm, 1)}])

    def reduce(self) -> Metrics:
        """Means and maxima over all ranks, the same on each; metrics without samples are
        omitted."""
        local = {name: combine(parts) for name, parts in self.parts.items()}
        # Not as vectors: names may differ between ranks, and vectors of unequal length would hang.
        ranks = distributed.gather_objects(local)
        reduced = {}
        for name in sorted(set().union(*ranks)):
            statistic = combine([part[name] for part in ranks if name in part])
            if isinstance(statistic, Share):
                reduced[name] = statistic.total / len(self.parts[name])  # the same on all ranks
            elif statistic.result is not None:
                reduced[name] = statistic.result
        return reduced


class StageTimer:
    """`with timer("rollout"): ...` adds the block's wall seconds to its stage."""

    def __init__(self):
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self._now()
        yield
        self._seconds[stage] += self._now() - start

    @staticmethod
    def _now() -> float:
        # kernels are asynchronous: a stage would end before its work does
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def metrics(self) -> Metrics:
        """perf/<stage>_seconds since the last reset, and perf/step_seconds, their sum."""
        stages = {f"perf/{name}_seconds": value for name, value in self._seconds.items()}
        return stages | {"perf/step_seconds": sum(self._seconds.values())}

    def reset(self) -> None:
        """Begin a step: forget the seconds, and the peak of GPU memory."""
        self._seconds.clear()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()


timer = StageTimer()


def due(step: int, every: int, last: int) -> bool:
    """Whether ``step`` is a multiple of ``every``, or the ``last`` one (-1: the last one only, 0: never)."""
    if step == 0 or every == 0:
        return False
    return step == last or (every > 0 and step % every == 0)


def evaluation_due(step: int, last: int, pass_ended: bool, run: RunArgs) -> bool:
    """Whether a run evaluates after ``step`` of ``last`` steps: at the start, every --eval_every (-1:
    after each pass over the data) and at the end; with --eval_only, at once."""
    if run.eval_only or run.eval_every == 0:
        return run.eval_only
    ended = run.eval_every == -1 and pass_ended
    return step == 0 or ended or due(step, run.eval_every, last)


def progress(items: Iterable, name: str) -> tqdm:
    """``items``, with a bar on rank 0's terminal if they take more than two seconds; it disappears
    when all are done."""
    return tqdm(items, desc=name, leave=False, delay=2, dynamic_ncols=True, disable=hides_bars())


def hides_bars() -> bool | None:
    """tqdm's ``disable``: None hides a bar only where the output is no terminal."""
    return None if distributed.is_main() else True


# -------------------------------------------------------------------------------------------------
# The run folder
# -------------------------------------------------------------------------------------------------

# steps between records of samples; those of the first and the last step are written, too
SAMPLES_EVERY = 5
IMAGE_SIDE = 640  # pixels of an image that is written with samples, at most


class RunLogger:
    """What rank 0 writes and prints; on the other ranks, methods only check. All ranks must call
    them.

    The first ``first_step`` steps are already done: records of later ones are dropped, here and in
    TensorBoard. An evaluation without training has a folder of its own, so that the records of the
    training stay as they are.
    """

    def __init__(self, run: RunArgs, total_steps: int, first_step: int):
        """Open the files. args.json has all flags as they were chosen, and the first record of this process
        what they stand for.

        Raises:
            UserError: on every rank alike: files that cannot be read or written.
        """
        self.run, self.out, self.eval_only = run, run.out, run.eval_only
        self.log_samples = run.log_samples
        if self.eval_only:
            self.out, first_step = self.out / f"evaluation-step-{first_step}", 0
        self.first_step = first_step
        self.console = sys.stdout  # user code may replace it for a while
        self._warned: dict[str, bool] = {}  # name -> whether its condition held last time
        evaluations: dict[int, Metrics] = {}  # by step
        self.bar = tqdm(
            total=total_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=hides_bars(),
        )
        with distributed.raise_on_all_ranks(f"--out {self.out}: "):
            if distributed.is_main():
                from torch.utils.tensorboard import SummaryWriter  # memory that other ranks save

                if self.eval_only and self.out.exists():
                    old = self.out.rename(
                        self.out.with_name(f"{self.out.name}.old-{time.time_ns()}")
                    )
                    self.line(f"the evaluation that was in {self.out} is now in {old}")
                typed = json.dumps(as_typed(run), indent=2)
                replace_durably(self.out / "args.json", typed + "\n")
                # the checkpoint may be another run's; what lies here is then of an attempt before
                goes_on = first_step > 0 and any(self.out.glob("checkpoints/step-*"))
                evaluations = self._open_records(goes_on)
                purge = first_step + 1 if goes_on else 0
                self._writer = SummaryWriter(self.out / "tensorboard", purge_step=purge)
        self._evaluations = distributed.from_main(evaluations)
        self._profiler = Profiler(steps_between(run.profile_steps), self.out / "tensorboard")
        self._profiler.after(first_step)

    def _open_records(self, goes_on: bool) -> dict[int, Metrics]:
        """Open metrics.jsonl, with the records up to the first step if the run ``goes_on``; its
        evaluations by step."""
        path, records = self.out / "metrics.jsonl", []
        if path.exists() and not goes_on:
            old = path.with_name(f"metrics.old-{time.time_ns()}.jsonl")
            path.rename(old)
            self.line(f"the records of an earlier run in this folder are now in {old}")
        elif path.exists():
            for record in read_records(path, {"step?": int}):
                if (record.get("step") or 0) <= self.first_step:  # headers have none
                    records.append(record)
        script = str(script_of(self.run))
        header = {
            "type": "header",
            "first_step": self.first_step,
            "script": {"file": script, "sha256": sha256(script)},
            "environment": environment(),
        }
        replace_durably(path, as_lines([*records, header | {"arguments": as_json(self.run)}]))
        self._file = open(path, "a", encoding="utf-8", buffering=1)
        return {
            record["step"]: record
            for record in records
            if any(name.startswith("eval/") for name in record)
        }

    # What a run reports

    def step(self, step: int, metrics: Metrics, columns: dict[str, str]) -> None:
        """Record a step; the bar, too, shows the metrics among ``columns`` (word -> metric) that
        it has. Raises UserError: see `_record`."""
        values = self._record(f"step {step:5d}", step, metrics, columns)
        self.bar.set_postfix(values, refresh=False)
        self.bar.update(step - self.bar.n)
        self._profiler.after(step)

    def evaluation(self, step: int, metrics: Metrics, columns: dict[str, str]) -> None:
        """Record an evaluation after ``step`` steps. Raises UserError: see `_record`."""
        self._record(f"eval  step {step:5d}", step, metrics, columns)
        self._evaluations[step] = metrics

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation after ``step`` steps is recorded, perhaps by an earlier process: the same
        on every rank."""
        return step in self._evaluations

    def newest_evaluation(self) -> Metrics:
        """The metrics of the newest evaluation; none before the first."""
        return self._evaluations[max(self._evaluations)] if self._evaluations else {}

    def best_evaluation(self, metric: str) -> int | None:
        """The step of the best evaluation so far by a metric of --keep_best, the first of equal ones; None:
        there is none since training began. Raises UserError: evaluations have no such metric."""
        if not metric:
            return None
        name = metric.removeprefix("min:")
        sign = -1 if name != metric else 1
        # one that has no such metric, as where a component applied to no sample, is not compared
        values = {step: each[name] for step, each in self._evaluations.items() if name in each}
        if self._evaluations and not values:
            known = {key for each in self._evaluations.values() for key in each}
            names = sorted(key for key in known if key.startswith("eval/"))
            raise UserError(f"--keep_best {metric}: evaluations only have {', '.join(names)}")
        # the model as it came, before the first step, is no result of the run
        steps = [step for step in sorted(values) if step]
        return max(steps, key=lambda step: sign * values[step], default=None)

    def shows_samples(self, step: int, last: int) -> bool:
        """Whether samples are written after ``step`` steps."""
        return self.log_samples > 0 and (step == 1 or due(step, SAMPLES_EVERY, last))

    def samples(
        self, step: int, records: list[dict], cards: list[Image.Image], stem: str = "step"
    ) -> None:
        """Write samples/<stem>-NNNNNN.jsonl; an image in a record becomes a file in a folder beside it, and
        the record names it. TensorBoard gets the cards, on one sheet. Raises UserError: see
        `writing`."""
        with self.writing(f"samples of step {step}"):
            if distributed.is_main():
                images = ImageFiles(self.out / f"samples/{stem}-{step:06d}")
                lines = as_lines(records, images.save)
                write_durably(images.folder.with_suffix(".jsonl"), lines)
                if cards:
                    sheet = np.asarray(contact_sheet(cards))  # (H, W, 3) uint8
                    self._writer.add_image(f"samples/{stem}", sheet, step, dataformats="HWC")

    def json(self, name: str, value: Any) -> None:
        """Write a JSON file, and its folders, below the run's folder: all of it, or nothing if the
        process is killed. Raises UserError: see `writing`."""
        with self.writing(name):
            if distributed.is_main():
                replace_durably(self.out / name, in_json(value, indent=1))

    @contextmanager
    def writing(self, what: str):
        """Raises UserError on every rank alike if writing fails inside, as on a full disk."""
        advice = "on a full disk, free space and start again from the newest checkpoint"
        with distributed.raise_on_all_ranks(
            f"--out {self.out}: {what} cannot be written ({advice}): "
        ):
            yield

    def warn(self, name: str, holds: bool, text: str) -> None:
        """Print a warning when its condition ``holds`` for the first time, or again after it did not."""
        if holds and not self._warned.get(name):
            self.line(f"warning: {text}")
        self._warned[name] = holds

    def line(self, text: str) -> None:
        """Print one line above the bar."""
        if distributed.is_main():
            tqdm.write(as_message(text), file=self.console)
            self.console.flush()  # a redirected stdout would keep the line for minutes

    def close(self, step: int, last: int) -> None:
        """Say how a run of ``last`` steps ended after ``step`` steps, and where its results are.

        Raises:
            Exit: a signal ended the run.
        """
        stopped = step < last and not self.eval_only
        if stopped:
            exports = f", and with --steps {step} exports the weights of this step" if step else ""
            self.line(f"stopped by a signal after step {step}; {how_to_go_on(self.run)}{exports}")
        else:
            self.line(f"done: all results are in {self.out}")
            self.line(f"a page of curves and samples: {page_command(self.out)}")
        self.bar.close()
        self._profiler.stop()
        if distributed.is_main():
            self._file.close()
            self._writer.close()
        if stopped:
            raise Exit(EXIT_PREEMPTED)

    # How it is recorded

    def _record(
        self, title: str, step: int, metrics: Metrics, columns: dict[str, str]
    ) -> dict[str, str]:
        """Write one JSON object and one TensorBoard point per metric, and print a line of those metrics
        that ``columns`` (word -> metric) name. Returns what it prints after each word.

        Raises UserError: a metric is not finite. Every rank checks the same reduced metrics, so
        they raise together.
        """
        record = {
            name: value if isinstance(value, int) else float(value)
            for name, value in metrics.items()
        }
        for name, value in record.items():
            if not math.isfinite(value):
                raise UserError(
                    f"metric {name} is {value} at step {step}; all metrics must be finite"
                )
        with self.writing(f"the record of step {step}"):
            if distributed.is_main():
                self._file.write(json.dumps({"step": step} | record) + "\n")
                for name, value in record.items():
                    self._writer.add_scalar(name, value, step)
                self._writer.flush()
        values = {word: record[name] for word, name in columns.items() if name in record}
        texts = {}
        for word, value in values.items():
            texts[printable(word)] = f"{value:.3f}" if abs(value) < 1000 else f"{value:.0f}"
        self.line("  ".join([title, *(f"{word} {text}" for word, text in texts.items())]))
        return texts


def script_of(args: RunArgs) -> Path:
    """The file of the script whose flags these are, such as a fork that git does not know."""
    return Path(inspect.getfile(type(args))).resolve()


class Profiler:
    """torch.profiler around some steps, and what lies between them, on rank 0: a trace with the memory of
    tensors, which TensorBoard's profiler and Perfetto read."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path):
        self.steps, self.folder = steps if distributed.is_main() else None, folder
        self.profile: torch.profiler.profile | None = None

    def after(self, step: int) -> None:
        """Begin or end when so many steps are finished."""
        if self.steps is None:
            return
        first, last = self.steps
        if step >= last:
            self.stop()
        elif step >= first - 1 and self.profile is None:
            self.profile = torch.profiler.profile(
                profile_memory=True,
                on_trace_ready=torch.profiler.tensorboard_trace_handler(str(self.folder)),
            )
            self.profile.start()
            if (
                torch.cuda.is_available()
            ):  # who allocated what, for the snapshot when memory runs out
                torch.cuda.memory._record_memory_history(max_entries=100_000)

    def stop(self) -> None:
        """Write what was recorded, if anything is."""
        if self.profile is not None:
            self.profile.stop()
            self.profile = None
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(enabled=None)


def how_to_go_on(args: Any) -> str:
    """What to type after a run with CheckpointArgs and RunArgs has stopped."""
    again = " --resume auto" if args.resume == "never" else ""
    return f"the same command with --out {args.out}{again} goes on from there"


def page_command(out: Path) -> str:
    """What to type for a page of a run."""
    tool = os.path.relpath(ROOT / "launch" / "page.py")
    return shlex.join(["python", tool, str(out), "--out", str(out / "page.html")])


def environment() -> dict:
    """Versions, device and git commit ("-dirty" follows if tracked files have changed; "unknown": not
    a checkout)."""
    command = "git --no-optional-locks describe --always --abbrev=40 --exclude=* --dirty"
    try:
        described = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True)
        commit = described.stdout.strip()
    except OSError:  # git is not installed
        commit = ""
    return {
        "project": VERSION,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),  # to import it takes seconds
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda,
        "git_commit": commit or "unknown",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "world_size": distributed.world_size(),
    }


class ImageFiles:
    """Images as files 0.png, 1.png, … of a folder, which is made for the first one."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0

    def save(self, image: object) -> str:
        """Write an image, in at most IMAGE_SIDE pixels; its path, seen from beside the folder."""
        if not isinstance(image, Image.Image):
            raise TypeError(f"{image!r:.80} has no form in JSON")
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.count}.png"
        small = image.convert("RGB")
        small.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
        small.save(self.folder / name)
        self.count += 1
        return f"{self.folder.name}/{name}"


def as_lines(records: list[dict], default: Callable[[Any], Any] | None = None) -> str:
    """JSONL; ``default`` turns what JSON does not know into what it knows."""
    lines = [in_json(record, ensure_ascii=False, default=default) for record in records]
    return "".join(line + "\n" for line in lines)


def in_json(value: object, **options: Any) -> str:
    """A value as JSON. Raises UserError: a number in it is not finite, which only one of a row or of a
    program of the user can be."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError as error:
        raise UserError(f"{error}") from error
