"""Checkpoints: a folder step-N is complete or it does not exist.

Saved in the background, committed by rename; a pointer to the newest is written last. What is in
such a folder, and how it is checked, stands in `common.model.storage`.
"""

import fcntl
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.data.processor import Processor
from common.distributed import (
    from_main,
    gather_objects,
    is_main,
    raise_on_all_ranks,
    say_once,
    stop_requested,
)
from common.files import follow_pointer, read_json, say, sha256
from common.flags import MODEL_IDENTITY, CheckpointArgs, RunArgs, absolute_paths
from common.logging import (
    UNFINISHED,
    Metrics,
    due,
    sync_folder,
    write_durably,
    write_link,
    write_pointer,
)
from common.model import weights
from common.model.fsdp import Trainable
from common.model.identity import NAMING, contents
from common.model.staging import Staging
from common.model.storage import (
    Roles,
    find_damage,
    is_complete,
    load_training_state,
    own_shards,
    step_folders,
    training_state,
    write_shards,
)
from common.process import UserError

MOST_FAILURES = 3  # failed saves in a row that end a run
# how often checkpoints are looked at of which none can be read, and the seconds in between: a file
# system may come back
LOOKS, PAUSE = 4, 20.0


class Args(CheckpointArgs, RunArgs):
    """What is read here of a script's Args."""


def of_today(saved: dict) -> dict:
    """A state.json as it is written today. Earlier versions counted the place in the data in batches, or
    steps, of the size that they had, and kept some paths as they were given."""
    flags, step = saved["flags"], saved["step"]
    for name in flags.keys() & NAMING.split():
        flags[name] = absolute_paths(flags[name])
    if "rows_drawn" not in saved:
        size = flags["prompts_per_step"] // flags.get("rollouts_per_step", 1)
        saved["rows_drawn"] = saved.pop("batches_taken", step) * size
        if flags.get("ptx_data"):
            updates = flags["epochs"] * flags["minibatches"] * (step - flags["critic_warmup_steps"])
            saved["ptx_rows"] = max(0, updates) * flags["ptx_batch"]
    return saved


def choose_folder(run: Args, flags: dict, identity: set[str]) -> Args:
    """``run`` with the folder of a run without --out, chosen by rank 0: the one that runs/latest
    names, if this is the same run, unfinished, or asks for what is there; else a new one, which
    runs/latest then names. A folder runs/latest of earlier versions is used.

    Raises UserError: what flags name cannot be read, or the folder cannot be made.
    """
    if run.out != RunArgs.out:
        return run
    with raise_on_all_ranks():
        folder = follow_pointer(run.out)
        is_asked_for = run.eval_only or run.resume == "must"
        is_used = folder.is_dir() and (is_asked_for or folder == run.out)
        if is_main() and not is_used:
            values = flags | contents(flags)
            described = json.dumps(
                {name: values[name] for name in sorted(values.keys() & identity)}
            )
            mark = folder / UNFINISHED
            if not mark.exists() or mark.read_text() != described:
                folder = run.out.with_name(f"{datetime.now():%Y-%m-%d-%H%M%S-%f}")
                write_durably(folder / UNFINISHED, described)
                write_link(run.out, folder.name)
    return from_main(replace(run, out=folder))


class Checkpoints:
    """Writes and finds <out>/checkpoints/step-N, and exports to <out>/export/step-N.

    A save goes into a fresh hidden folder: every rank's tensors as safetensors, in the background,
    then on rank 0 COMMITTED.json with the sha256 of every file, fsync, rename to step-N, the
    `latest` pointer, and only then the deletion of old checkpoints. Death at any instant leaves the
    earlier checkpoints as they were. One save is in flight at most. A resume takes the newest
    checkpoint whose files are those committed.

    As a context manager it waits for the save in flight at the end, even after a UserError.
    """

    def __init__(self, run: Args):
        self.out, self.args, self.timeout = run.out, run, run.timeout
        self.folder = run.out / "checkpoints"
        self.first_step = 0  # the step that was resumed from
        self.saved_step = 0  # the newest that is saved, or on its way
        self.damaged: set[Path] = set()  # what could not be resumed from
        # nothing will be saved: --steps may lie before the checkpoint
        self.read_only, self.export_only = run.eval_only or run.export_only, run.export_only
        self.failed = 0  # saves in a row
        self.waited = 0.0  # seconds that training waited for saves since they were last recorded
        # a save in flight: its step, and the sha256 of each file that this rank writes
        self.pending: tuple[int, Future] | None = None
        self.staging = Staging()
        self.start_writer()
        lock, began = run.out / ".lock", from_main(f"{time.time_ns()}")
        with raise_on_all_ranks(f"--out {run.out}: "):
            if is_main():
                self.take_folder(lock, began)
        with raise_on_all_ranks(f"--out {run.out}: "):
            if not lock.exists() or lock.read_text() != began:  # each node would keep its shards
                raise ValueError(
                    f"on {socket.gethostname()} this is not rank 0's folder: use a file system that "
                    "all nodes share"
                )

    def start_writer(self) -> None:
        """A thread that writes, and a group in which those of all ranks take turns."""
        self.thread = ThreadPoolExecutor(1)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def take_folder(self, lock: Path, began: str) -> None:
        """Make this the only live run of the folder; the kernel drops the lock of a process that
        dies. Rank 0 only. Raises ValueError, OSError."""
        self.out.mkdir(parents=True, exist_ok=True)
        if lock.is_symlink() or (lock.exists() and lock.stat().st_nlink > 1):
            raise ValueError(f"{lock} is a link; remove it, or the file behind it is overwritten")
        self.lock = open(lock, "a+")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError("it is in use by a live run") from error
        except OSError as error:  # Lustre, say, without its mount option
            say(f"warning: a second run in {self.out} would not be refused: {error}")
        self.lock.truncate(0)
        self.lock.write(began)
        self.lock.flush()
        os.fsync(self.lock.fileno())
        # Left by a process that was killed during a save or an export.
        for pattern in ("checkpoints/.tmp-*", "export*/.step-*"):
            for path in self.out.glob(pattern):
                shutil.rmtree(path)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None or issubclass(kind, UserError):  # raised on all ranks, so they can commit
            self.finish()
        if is_main():
            self.lock.close()
        if kind is None and self.failed:
            raise UserError(self.problem)

    # ---------------------------------------------------------------------------------------------
    # Resume
    # ---------------------------------------------------------------------------------------------

    def resume(
        self,
        state,
        roles: Roles,
        flags: dict,
        identity: Container[str],
        resolve: Callable[[dict], dict] = dict,
    ) -> None:
        """Load the checkpoint that --resume asks for, if there is one.

        Args:
            state: has `state_dict`, `load_state_dict`, `step` and `metrics`.
            flags: of this run, and digests of its rows.
            identity: those that make it another run: --resume auto does not go on from the
                checkpoint of another one. All other changes are printed.
            resolve: flags -> flags with what `auto` stands for.

        Raises:
            UserError: no checkpoint where one must be, one where none may be, none that can be
                read, one of another run, or one that does not fit into the models.
        """
        self.state, self.roles, self.flags = state, roles, flags
        with raise_on_all_ranks():
            self.contents = contents(flags)
        self.contents = from_main(self.contents)
        message = f"starting from step 0: no complete checkpoint in {self.folder}"
        if self.path is not None:
            before, digests = resolve(self.saved.pop("flags")), self.saved.pop("contents", {})
            now = resolve(flags) | {k: v for k, v in self.contents.items() if k in digests}
            with raise_on_all_ranks(f"{self.path}: "):
                changed = self.compare_flags(before | digests, now, identity)
            # A critic, say, that --critic_model has replaced is not the one that was saved.
            stay = {role: part for role, part in roles.items() if f"{role}_model" not in changed}
            load_training_state(self.path, stay)
            state.load_state_dict(self.saved, set(changed))
            self.first_step = self.saved_step = state.step
            message = f"resuming from {self.path}"
            message += f"; changed: {'; '.join(changed.values())}" if changed else ""
        say_once(message)

    @cached_property
    def saved(self) -> dict:
        """state.json of `path`; {} to start from step 0. All ranks must ask. Raises UserError."""
        with raise_on_all_ranks():
            return of_today(read_json(self.path / "state.json")) if self.path else {}

    @cached_property
    def path(self) -> Path | None:
        """The checkpoint that --resume means, if its files are as they were written, else the one
        before it; None to start from step 0, as there is none. All ranks must ask. Raises
        UserError."""
        choice = self.args.resume
        with raise_on_all_ranks(f"{self.folder}: "):
            ours = [path for _, path in step_folders(self.folder)] if is_main() else []
        named, candidates = self.folder, from_main(ours)
        if choice == "never" and (candidates or from_main((self.out / "metrics.jsonl").exists())):
            raise UserError(f"--resume never: {self.out} already holds a run; choose another --out")
        if choice not in ("auto", "must", "never"):
            # a step of this --out, a folder, or a pointer `latest`
            step = self.folder / f"step-{choice}"
            named = from_main((step if choice.isdecimal() else follow_pointer(choice)).resolve())
            there = [named] if from_main((named / "COMMITTED.json").exists()) else []
            if named.parent != self.folder.resolve():
                candidates = candidates or there  # a requeued job goes on from its own
            elif self.read_only:
                candidates = there
            else:
                raise UserError(
                    f"--resume {choice} is a checkpoint of this --out itself: leave out --resume "
                    "to continue from the newest one, or choose another --out to start from this one"
                )
        missing = f"--resume {choice}: no complete checkpoint in {named}"
        if candidates:
            return self.first_readable(candidates, missing)
        if choice not in ("auto", "never") or self.export_only:
            raise UserError(missing)
        return None

    def first_readable(self, candidates: list[Path], missing: str) -> Path:
        """The first checkpoint whose files are as they were written. All ranks must call. Raises
        UserError with what is ``missing``: there is none, which does not mean to start over."""
        for attempt in range(LOOKS):
            time.sleep(attempt and PAUSE)
            self.damaged.clear()
            for path in candidates:
                problem = find_damage(path)
                if not problem:
                    return path
                self.damaged.add(path)
                say_once(f"warning: not resumed from: {path}: {problem}")
        raise UserError(
            f"{missing}, but damaged ones: {path}: {problem}. Start again once their files can be "
            f"read, or move {path.parent} away to start from step 0"
        )

    def compare_flags(self, before: dict, now: dict, identity: Container[str]) -> dict[str, str]:
        """How flags have changed, by name. Raises ValueError: they make this another run, or --steps is
        less than what is saved."""
        steps = self.flags["steps"]
        if self.saved["step"] > steps and not self.read_only:
            raise ValueError(
                f"it is already beyond --steps {steps}; raise --steps, or start another --out from "
                "an earlier checkpoint"
            )
        changed = {}
        for name, old in before.items():
            if now.get(name, old) != old:
                changed[name] = f"--{name} {old!r} -> {now[name]!r}"
        if self.read_only:  # which changes nothing: only the model has to be the same
            identity = MODEL_IDENTITY
        others = [text for name, text in changed.items() if name in identity]
        if others and self.args.resume == "auto":
            raise ValueError(
                f"it is of another run: {'; '.join(others)}. Choose another --out, or --resume must"
            )
        return changed

    # ---------------------------------------------------------------------------------------------
    # Save
    # ---------------------------------------------------------------------------------------------

    def save_if_due(self, step: int, last: int) -> None:
        """Save after ``step`` steps if --save_every says so and they are not saved yet."""
        self.commit_if_written()
        if step > self.saved_step and due(step, self.args.save_every, last):
            self.save(step)

    def saved_to_stop(self, step: int, last: int) -> bool:
        """Whether a signal has asked to stop after ``step`` steps, before the ``last``; if so, they
        are saved. The same on every rank."""
        if step == last or not stop_requested():
            return False
        if step > self.saved_step:
            self.save(step)
        self.finish()
        return True

    def save(self, step: int) -> None:
        """Start saving; training may change the tensors at once, which it does after their copy."""
        started = time.perf_counter()
        self.finish()
        folder = self.unfinished(step)
        try:
            with raise_on_all_ranks():
                if is_main():
                    self.begin(folder)
        except UserError as error:
            self.count_failure(step, error)
            return
        shards, metadata = own_shards(training_state(self.roles))
        copies = self.staging.stage(shards)
        done = self.thread.submit(self.write, self.group, folder, copies, metadata)
        self.pending, self.saved_step = (step, done), step
        if self.args.save_blocking:
            self.finish()
        self.waited += time.perf_counter() - started

    def unfinished(self, step: int) -> Path:
        """The folder that is written, before it becomes step-N."""
        return self.folder / f".tmp-step-{step}"

    def begin(self, folder: Path) -> None:
        """Make the folder, with state.json. Raises OSError: the disk is full; ValueError: a scalar is
        not finite."""
        folder.mkdir(parents=True)
        scalars = self.state.state_dict() | {"flags": self.flags, "contents": self.contents}
        write_durably(folder / "state.json", json.dumps(scalars, indent=1, allow_nan=False))

    def write(
        self,
        group: Any,
        folder: Path,
        copies: weights.Tensors,
        metadata: dict[str, str],
    ) -> dict[str, str]:
        """In the thread: `write_shards`, when it is this rank's turn."""
        self.staging.wait()
        turn, turns = 0, 0  # unrestricted: all ranks at once
        if self.args.save_strategy == "single_node":
            turn = int(os.environ.get("GROUP_RANK", 0))
            turns = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        elif self.args.save_strategy != "unrestricted":
            turn, turns = dist.get_rank(), dist.get_world_size()
        for _ in range(turn):
            dist.barrier(group)
        try:
            return write_shards(folder, copies, metadata)
        finally:  # also after an error, or the others would hang
            for _ in range(turns - turn):
                dist.barrier(group)

    def commit_if_written(self) -> None:
        """Commit the save in flight if it has been written on all ranks."""
        if self.pending is not None and all(gather_objects(self.pending[1].done())):
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, and commit it."""
        if self.pending is None:
            return
        (step, done), self.pending = self.pending, None
        try:
            with raise_on_all_ranks(f"{socket.gethostname()}: "):
                digests = self.wait_for(done)
            parts = gather_objects(digests)
            with raise_on_all_ranks():
                if is_main():
                    self.commit(step, parts)
            self.failed = 0
        except UserError as error:
            self.count_failure(step, error)

    def wait_for(self, done: Future) -> dict[str, str]:
        """The sha256 of each file that this rank has written. Raises ValueError, OSError."""
        limit = 0.8 * self.timeout  # less than the other ranks wait for this one
        try:
            return done.result(limit)
        except TimeoutError as error:
            raise OSError(f"not written within {limit:g} s, 0.8 of --timeout") from error
        except RuntimeError as error:  # CUDA's, and those of a turn that never came
            raise OSError(str(error)) from error

    def commit(self, step: int, parts: list[dict[str, str]]) -> None:
        """Make a written checkpoint visible, then delete those that need not be kept. Rank 0 only.

        ``parts``: the sha256 of every file, from the ranks that wrote them. Raises OSError.
        """
        sync_folder(self.out / "metrics.jsonl")  # which the checkpoint needs after a power cut
        folder, final = self.unfinished(step), self.folder / f"step-{step}"
        digests = {"state.json": sha256(folder / "state.json")}
        for part in parts:
            digests |= part
        committed = json.dumps({"step": step, "sha256": digests}, indent=1)
        write_durably(folder / "COMMITTED.json", committed)
        sync_folder(folder)
        if final.exists():  # it is damaged, or of an attempt that was rolled back
            shutil.rmtree(final)
        folder.rename(final)
        self.damaged.discard(final)
        sync_folder(self.folder)
        write_pointer(self.folder / "latest", final.name)
        self.delete_old(step)

    def delete_old(self, step: int) -> None:
        """Delete checkpoints beyond --keep_last and --keep_gb, but not that of this ``step``; what is
        damaged counts for neither."""
        count, size, limit = 0, 0, self.args.keep_gb * 1e9 or math.inf
        # Newer ones are damaged, or could not be read when the run started.
        for path in (path for number, path in step_folders(self.folder) if number <= step):
            is_good = path not in self.damaged and is_complete(path)
            if is_good:
                size += sum(file.stat().st_size for file in path.iterdir())
            if count and (count >= self.args.keep_last or size > limit):
                shutil.rmtree(path, ignore_errors=True)  # what is left is deleted the next time
            count += is_good

    def count_failure(self, step: int, problem: UserError) -> None:
        """Count a failed save. Raises UserError after MOST_FAILURES in a row."""
        self.failed += 1
        self.problem = (
            f"the checkpoint of step {step} was not saved ({self.failed} in a row): {problem}"
        )
        self.saved_step = self.first_step
        if is_main():
            shutil.rmtree(self.unfinished(step), ignore_errors=True)
        say_once(f"warning: {self.problem}")
        if self.failed >= MOST_FAILURES:
            raise UserError(self.problem)
        self.start_writer()  # the old one may wait for ranks that have given up

    # ---------------------------------------------------------------------------------------------
    # Records
    # ---------------------------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """For the record of a step: failed saves in a row, and the seconds that training has waited
        for saves since the last record."""
        waited, self.waited = self.waited, 0.0
        return {"perf/failed_saves": self.failed, "perf/save_seconds": waited}

    # ---------------------------------------------------------------------------------------------
    # Exports
    # ---------------------------------------------------------------------------------------------

    def export_if_due(
        self, step: int, last: int, exports: dict[str, Trainable], processor: Processor
    ) -> None:
        """Export the weights after ``step`` steps if --export_every says so. Raises UserError if
        the last export fails; earlier ones only warn."""
        if not self.read_only and due(step, self.args.export_every, last):
            self.export(step, exports, processor, must=step == last)

    def export_now(self, exports: dict[str, Trainable], processor: Processor) -> Metrics:
        """Export the weights of the checkpoint that was resumed from, for --export_only. Returns
        the metrics of its step. Raises UserError if that fails."""
        step = self.first_step
        self.export(step, exports, processor, must=True)
        for name in exports:
            say_once(f"exported to {self.out}/{name}/step-{step}")
        return self.state.metrics

    def export(
        self, step: int, exports: dict[str, Trainable], processor: Processor, must: bool
    ) -> None:
        """Write models to <out>/NAME/step-N, by their names there, and averages of their weights to
        <out>/NAME_ema/step-N. What cannot be written is an error if it ``must``, else a warning."""
        models = []
        for name, trained in exports.items():
            models.append((name, trained.module, nullcontext()))
            if trained.ema_beta:
                models.append((f"{name}_ema", trained.module, trained.averaged()))
        for name, module, swapped in models:
            folder = self.out / name / f"step-{step}"
            with swapped:
                problem = weights.export(module, processor, folder)
            if problem and must:
                raise UserError(
                    f"the weights were not exported to {folder}: {problem}. Once that is fixed, "
                    "the same command goes on from the newest checkpoint and exports them"
                )
            if problem:
                say_once(f"warning: the weights were not exported to {folder}: {problem}")
