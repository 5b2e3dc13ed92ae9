"""Checkpoints: a folder step-N is complete or it does not exist.

    <out>/checkpoints/step-N/shard-*.safetensors    weights and optimizer states, by torch's DCP
                             state.json             counters, and the flags of the run
                             COMMITTED.json         the sha256 of every file; written last
    <out>/export/step-N/                            weights in Hugging Face format

Saved in the background, committed by rename. Tensors may be read on any number of ranks; nothing is
read with pickle.
"""

import fcntl
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

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
from common.flags import CheckpointArgs, RunArgs
from common.logging import Metrics, due, sync_folder, write_durably, write_pointer
from common.model import weights
from common.model.fsdp import Trainable
from common.model.vlm import Wrapper
from common.process import UserError

# By role: actor, critic, judge; and a reference that moves, which has no optimizer.
Roles = Mapping[str, Trainable | Wrapper]


# -------------------------------------------------------------------------------------------------
# What is in a checkpoint
# -------------------------------------------------------------------------------------------------


def training_state(roles: Roles) -> dict[str, Tensor]:
    """Weights and optimizer state of all roles, as they are in use, by their names in a checkpoint.

    The frozen weights of a trained role are those of --model; a role without an optimizer has all
    of its own. Rates and decays are flags.
    """
    state = {}
    for role, part in roles.items():
        module = part.module if isinstance(part, Trainable) else part
        for name, parameter in module.named_parameters():
            if parameter.requires_grad or module is part:
                state[f"{role}.model.{name}"] = parameter.detach()
            if parameter.requires_grad and isinstance(part, Trainable):
                for kind, value in part.optimizer.state[parameter].items():
                    state[f"{role}.optimizer.state.{name}.{kind}"] = value
    return state


def load_training_state(path: Path, roles: Roles) -> None:
    """Read a checkpoint's tensors into models and optimizers, in place; any number of ranks may
    have written it. Raises UserError: it lacks some, or has them in other shapes."""
    try:
        dcp.load(training_state(roles), storage_reader=HuggingFaceStorageReader(str(path)))
    except dcp.api.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise UserError(
            f"{path} cannot be loaded into the models of this run: {cause}; --config "
            "<out>/args.json has the flags of its run; to start from its weights alone, pass an export "
            "of its run as --model"
        ) from error


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, newest first. Raises OSError: they cannot be listed, which
    does not mean that there is none."""
    names = os.listdir(folder) if os.path.lexists(folder) else []
    paths = [folder / name for name in names if re.fullmatch(r"step-\d+", name)]
    return sorted([(int(path.name[5:]), path) for path in paths], reverse=True)


def find_damage(path: Path) -> str:
    """What is wrong with a checkpoint; "" if its files are those that were committed. The ranks
    share the reading; all must call."""
    problem = ""
    try:
        committed = read_json(path / "COMMITTED.json", {"sha256": {str: str}})["sha256"]
        for name in sorted(committed)[dist.get_rank() :: dist.get_world_size()]:
            if sha256(path / name) != committed[name]:
                problem = f"{name} is not what was written: its sha256 is another"
    except (OSError, ValueError) as error:
        problem = str(error)
    return max(gather_objects(problem))


def make_stager() -> DefaultStager:
    """Copies tensors into host memory, which is kept for the next save: pinned where there is a GPU."""
    gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=gpu,
        )
    )


# -------------------------------------------------------------------------------------------------
# The checkpoints of a run
# -------------------------------------------------------------------------------------------------


class Args(CheckpointArgs, RunArgs):
    """What is read here of a script's Args."""


class Checkpoints:
    """Writes and finds <out>/checkpoints/step-N, and exports to <out>/export/step-N.

    A save goes into a fresh hidden folder, in the background; then rank 0 writes COMMITTED.json,
    renames the folder to step-N, moves the `latest` pointer, and only then deletes old checkpoints.
    Death at any instant leaves the earlier checkpoints as they were. One save is in flight at most. A
    resume takes the newest checkpoint whose files are those committed.

    As a context manager it waits for the save in flight at the end, even after a UserError.
    """

    def __init__(self, run: Args):
        self.out, self.args, self.timeout = run.out, run, run.timeout
        self.folder = run.out / "checkpoints"
        self.eval_only = run.eval_only
        self.first_step = 0  # the step that was resumed from
        self.saved_step = 0  # the newest that is saved, or on its way
        self.problem = ""  # of the last save
        self.waited = 0.0  # seconds that training waited for saves since they were last recorded
        # a save in flight: its step, and the sha256 of each file that this rank writes
        self.pending: tuple[int, Future] | None = None
        self.stager = make_stager()
        self.start_writer()
        lock, began = run.out / ".lock", from_main(f"{time.time_ns()}")
        with raise_on_all_ranks(f"--out {run.out}: "):
            if is_main():
                self.lock_folder(lock, began)
        with raise_on_all_ranks(f"--out {run.out}: "):
            if not lock.exists() or lock.read_text() != began:  # each node would keep its shards
                raise ValueError(
                    f"on {socket.gethostname()} this is not rank 0's folder: use a file system that "
                    "all nodes share"
                )

    def start_writer(self) -> None:
        """A thread that writes, and a group for the collectives of its own."""
        self.thread = ThreadPoolExecutor(1)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def lock_folder(self, lock: Path, began: str) -> None:
        """Make this the only live run of the folder; the kernel drops the lock of a process that
        dies. Raises ValueError, OSError."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.lock = open(lock, "a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError("it is in use by a live run") from error
        except OSError as error:  # Lustre, say, without its mount option
            say(f"warning: a second run in {self.out} would not be refused: {error}")
        self.lock.truncate(0)
        self.lock.write(began)
        self.lock.flush()
        for path in self.folder.glob(".tmp-*"):  # of saves that were killed
            shutil.rmtree(path)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None or issubclass(kind, UserError):  # raised on all ranks, so they can commit
            self.finish()
        if is_main():
            self.lock.close()
        if kind is None and self.problem:
            raise UserError(self.problem)

    # ---------------------------------------------------------------------------------------------
    # Resume
    # ---------------------------------------------------------------------------------------------

    def resume(self, state, roles: Roles, flags: dict, identity: Container[str]) -> None:
        """Load the checkpoint that --resume asks for, if there is one.

        Args:
            state: has `state_dict`, `load_state_dict`, `step` and `metrics`.
            flags: of this run.
            identity: those that make it another run: --resume auto does not go on from the
                checkpoint of another one. All other changes are printed.

        Raises:
            UserError: no checkpoint where one must be, none that can be read, one of another run,
                or one that does not fit into the models.
        """
        self.state, self.roles, self.flags = state, roles, flags
        if self.path is None:
            say_once(f"starting from step 0: no complete checkpoint in {self.folder}")
            return
        before = self.saved.pop("flags")
        changed = {
            name: f"--{name} {old!r} -> {flags[name]!r}"
            for name, old in before.items()
            if flags.get(name, old) != old
        }
        others = [text for name, text in changed.items() if name in identity]
        if others and self.args.resume == "auto" and not self.eval_only:
            raise UserError(
                f"{self.path} is of another run: {'; '.join(others)}. Choose another --out; to start "
                f"from this checkpoint anyway, pass --resume {self.path} as well"
            )
        load_training_state(self.path, roles)
        state.load_state_dict(self.saved)
        self.first_step = self.saved_step = state.step
        if state.step > flags["steps"] and not self.eval_only:
            raise UserError(f"{self.path} is already beyond --steps {flags['steps']}")
        message = f"resuming from {self.path}"
        say_once(message + (f"; changed: {'; '.join(changed.values())}" if changed else ""))

    @cached_property
    def saved(self) -> dict:
        """state.json of `path`; {} to start from step 0. All ranks must ask. Raises UserError."""
        with raise_on_all_ranks():
            return read_json(self.path / "state.json") if self.path else {}

    @cached_property
    def path(self) -> Path | None:
        """The newest checkpoint of --out whose files are as they were written; without any, or for an
        evaluation, the one that --resume names; None to start from step 0. All ranks must ask. Raises
        UserError."""
        choice = self.args.resume
        with raise_on_all_ranks(f"{self.folder}: "):
            ours = [path for _, path in step_folders(self.folder)] if is_main() else []
        candidates = from_main(ours)
        if choice == "never" and candidates:
            raise UserError(f"--resume never: {self.out} already holds a run; choose another --out")
        if choice not in ("auto", "never") and (self.eval_only or not candidates):
            candidates = [from_main(follow_pointer(choice).resolve())]
        problem = ""
        for path in candidates:
            problem = find_damage(path)
            if not problem:
                return path
            say_once(f"warning: not resumed from: {path}: {problem}")
        if problem:  # which does not mean to start over
            raise UserError(
                f"no checkpoint that can be resumed from: {path}: {problem}. Start again once its "
                "files can be read, or choose another --out"
            )
        return None

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
        """Start saving; training may change the tensors at once, as they are copied first."""
        started = time.perf_counter()
        self.finish()
        scalars = self.state.state_dict() | {"flags": self.flags}
        text = json.dumps(scalars, indent=1, allow_nan=False)
        copies = self.stager.stage(training_state(self.roles))
        self.pending = step, self.thread.submit(self.write, step, text, copies)
        self.saved_step = step
        if self.args.save_blocking:
            self.finish()
        self.waited += time.perf_counter() - started

    def unfinished(self, step: int) -> Path:
        """The folder that is written, before it becomes step-N."""
        return self.folder / f".tmp-step-{step}"

    def write(self, step: int, text: str, copies: dict[str, Tensor]) -> dict[str, str]:
        """In the thread: write this rank's files; their sha256. Raises OSError."""
        folder = self.unfinished(step)
        try:
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            dcp.save(copies, storage_writer=writer, process_group=self.group)
        except dcp.api.CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise OSError(str(cause)) from error
        files = list(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*"))
        if is_main():
            write_durably(folder / "state.json", text)
            files.append(folder / "state.json")
        return {path.name: sha256(path) for path in files}

    def commit_if_written(self) -> None:
        """Commit the save in flight if it has been written on all ranks."""
        if self.pending is not None and all(gather_objects(self.pending[1].done())):
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, and commit it. A failure is only a warning,
        unless it is the last save; the next one tries again."""
        if self.pending is None:
            return
        (step, done), self.pending = self.pending, None
        self.problem = ""
        try:
            with raise_on_all_ranks(f"{socket.gethostname()}: "):
                digests = self.wait_for(done)
            parts = gather_objects(digests)
            with raise_on_all_ranks():
                if is_main():
                    self.commit(step, {name: part[name] for part in parts for name in part})
        except UserError as error:
            self.problem = f"the checkpoint of step {step} was not saved: {error}"
            self.saved_step = self.first_step
            if is_main():
                shutil.rmtree(
                    self.unfinished(step), ignore_errors=True
                )  # the disk may be full of it
            say_once(f"warning: {self.problem}")
            self.start_writer()  # the old one may wait for ranks that have given up

    def wait_for(self, done: Future) -> dict[str, str]:
        """The sha256 of each file that this rank has written. Raises OSError."""
        limit = 0.8 * self.timeout  # less than the other ranks wait for this one
        try:
            return done.result(limit)
        except TimeoutError as error:
            raise OSError(f"not written within {limit:g} s, 0.8 of --timeout") from error
        except RuntimeError as error:  # CUDA's, and a collective that another rank has left
            raise OSError(str(error)) from error

    def commit(self, step: int, digests: dict[str, str]) -> None:
        """Make a written checkpoint visible, then delete those that need not be kept. Rank 0 only.
        Raises OSError."""
        sync_folder(self.out / "metrics.jsonl")  # which the checkpoint needs after a power cut
        folder, final = self.unfinished(step), self.folder / f"step-{step}"
        committed = json.dumps({"step": step, "sha256": digests}, indent=1)
        write_durably(folder / "COMMITTED.json", committed)
        sync_folder(folder)
        if final.exists():  # it could not be read, or is of an attempt that was rolled back
            shutil.rmtree(final)
        folder.rename(final)
        sync_folder(self.folder)
        write_pointer(self.folder / "latest", final.name)
        self.delete_old(step)

    def delete_old(self, step: int) -> None:
        """Delete checkpoints beyond --keep_last and --keep_gb, but not that of this ``step``."""
        size, limit = 0, self.args.keep_gb * 1e9 or math.inf
        old = [path for number, path in step_folders(self.folder) if number <= step]
        for count, path in enumerate(old):
            size += sum(file.stat().st_size for file in path.iterdir())
            if count and (count >= self.args.keep_last or size > limit):
                shutil.rmtree(path, ignore_errors=True)  # what is left is deleted the next time

    def metrics(self) -> Metrics:
        """For the record of a step: seconds that training has waited for saves since the last one."""
        waited, self.waited = self.waited, 0.0
        return {"perf/save_seconds": waited}

    # ---------------------------------------------------------------------------------------------
    # Exports
    # ---------------------------------------------------------------------------------------------

    def export_if_due(
        self, step: int, last: int, exports: dict[str, Trainable], processor: Processor
    ) -> None:
        """Write models to <out>/NAME/step-N if --export_every says so, by their names there, and
        averages of their weights to <out>/NAME_ema/step-N. Raises UserError if the last export
        fails; earlier ones only warn."""
        if self.eval_only or not due(step, self.args.export_every, last):
            return
        models = []
        for name, trained in exports.items():
            models.append((name, trained.module, nullcontext()))
            if trained.ema_beta:
                models.append((f"{name}_ema", trained.module, trained.averaged()))
        for name, module, swapped in models:
            folder = self.out / name / f"step-{step}"
            with swapped:
                problem = weights.export(module, processor, folder)
            if problem and step == last:
                raise UserError(
                    f"the weights were not exported to {folder}: {problem}. Once that is fixed, "
                    "the same command goes on from the newest checkpoint and exports them"
                )
            if problem:
                say_once(f"warning: the weights were not exported to {folder}: {problem}")
