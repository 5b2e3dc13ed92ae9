"""Checkpoints: a folder step-N is complete or it does not exist.

Saved in the background, committed by rename; a pointer to the newest is written last. What is in
such a folder, and how it is checked, stands in `common.model.storage`.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor

from common import flags
from common.distributed import UserError, from_main, gather_objects, is_main, raise_on_all_ranks
from common.flags import CheckpointArgs
from common.logging import due, kill_point, sync_folder, write_durably, write_pointer
from common.model import weights
from common.model.fsdp import Trainable, shard_of
from common.model.staging import Staging
from common.model.storage import (
    CheckpointWriter,
    Roles,
    complete_checkpoints,
    describe_failure,
    load_training_state,
    read_checkpoint,
    step_folders,
    training_state,
)


class Save(NamedTuple):
    """A save in flight."""

    step: int
    skipped_steps: dict[str, int]
    folder: Path
    writer: CheckpointWriter
    done: Future


def check_roles(path: Path, saved: dict[str, Any], roles: Roles) -> None:
    """Raises ValueError: the checkpoint was written by a run that trained something else."""
    trained = saved.get("roles", list(roles))
    lacking = [role for role in roles if role not in trained]
    if lacking:
        raise ValueError(
            f"{path} holds {' and '.join(trained)}, and not the {' and '.join(lacking)} of this run; "
            "to start from its weights, pass its export as --model"
        )


class Checkpoints:
    """Writes and finds <out>/checkpoints/step-N, and exports to <out>/export/step-N.

    A save goes into a fresh hidden folder: every rank's tensors as safetensors, in the background,
    then on rank 0 COMMITTED.json with size and sha256 of every file, fsync, rename to step-N, the
    `latest` pointer, and only then the deletion of old checkpoints. Death at any instant leaves the
    earlier checkpoints as they were. One save is in flight at most. A resume takes the newest
    checkpoint whose files are those committed.

    As a context manager it waits for the save in flight at the end, even after a UserError.
    """

    def __init__(self, out: Path, args: CheckpointArgs, timeout: float):
        self.out, self.folder, self.args = out, out / "checkpoints", args
        self.timeout = timedelta(seconds=timeout)
        self.first_step = 0  # the step that was resumed from
        self.saved_at = 0  # when its save began, ns
        self.read_only = False
        self.failed = 0  # saves in a row
        self.waited = 0.0  # seconds that training waited for saves since they were last recorded
        self.pending: Save | None = None
        self.staging = Staging()
        self.damaged: list[Path] = []  # found by resume()
        self.group = self.new_group()
        self.hosts = gather_objects(socket.gethostname())  # of the ranks
        mark = out / from_main(f".tmp-seen-{time.time_ns()}")  # a name that no cache can know
        with raise_on_all_ranks(f"--out {out}"):
            if is_main():
                self.take_folder(mark)
        with raise_on_all_ranks(f"--out {out}"):
            if not os.path.exists(mark):  # each node would keep its own shards
                host = socket.gethostname()
                raise ValueError(
                    f" on {host} is not rank 0's folder: use a file system that all nodes share"
                )
        if is_main():
            mark.rmdir()

    def new_group(self) -> dist.ProcessGroup:
        """For the collectives of a save in the background."""
        return dist.new_group(backend="gloo", timeout=self.timeout)

    def take_folder(self, mark: Path) -> None:
        """Make this the only live run of the folder; the kernel drops the lock of a process that
        dies. Leaves ``mark`` for the other ranks to see. Rank 0 only. Raises ValueError."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.out / ".lock", "a+")
            self.lock_file()
            # Left by a process that was killed during a save, an export or this method.
            for pattern in ("checkpoints/.tmp-*", "export*/.step-*", ".tmp-seen-*"):
                for path in self.out.glob(pattern):
                    shutil.rmtree(path)
            mark.mkdir()
        except BlockingIOError as error:
            self.lock.seek(0)
            owner = self.lock.read().strip()
            raise ValueError(f" is in use by a live run: {owner}") from error
        except OSError as error:
            raise ValueError(f": {error}") from error

    def lock_file(self) -> None:
        """Lock the folder and write down who holds it. Raises BlockingIOError: another run does."""
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            print(
                f"warning: the file system of {self.out} has no locks: a second run would not be "
                "refused",
                flush=True,
            )
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
        }
        self.lock.truncate(0)
        self.lock.write(json.dumps(owner))
        self.lock.flush()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, UserError):  # raised on all ranks together, so they can commit
            self.finish()

    def close(self) -> None:
        """Wait for the save in flight and release the folder.

        Raises:
            UserError: the last checkpoint could not be saved.
        """
        self.finish()
        if is_main():
            self.lock.close()
        if self.failed:
            raise UserError("the run has ended, and its last checkpoint could not be saved")

    # ---------------------------------------------------------------------------------------------
    # Resume
    # ---------------------------------------------------------------------------------------------

    def resume(
        self,
        state,
        roles: Roles,
        recorded: dict[str, Any],
        script_args: Any,
        read_only: bool = False,
    ) -> None:
        """Load the checkpoint that --resume asks for, if there is one.

        Args:
            state: has `state_dict`, `load_state_dict`, `step`, `skipped_steps` and `metrics`.
            recorded: flags and digests of data files, which must equal those of the checkpoint,
                except for the neutral ones, which do not alter the result.
            script_args: the script's Args, which knows what is neutral, and the default of a flag
                that the checkpoint is older than.
            read_only: nothing will be saved: damaged checkpoints keep their names, and --steps may
                lie before the checkpoint.

        Raises:
            UserError: no checkpoint where one must be, one where none may be, or changed flags
                that alter the result.
        """
        self.state, self.flags, self.read_only = state, recorded, read_only
        said = f"starting from step 0: no complete checkpoint in {self.folder}"
        found = self.choose()
        if found is not None:
            path, saved = found
            with raise_on_all_ranks():
                check_roles(path, saved, roles)
                changed = self.compare_flags(path, saved, script_args)
                self.saved_at = (path / "state.json").stat().st_mtime_ns
            load_training_state(path, roles)
            fresh = state.state_dict()  # an older version may have saved fewer entries
            state.load_state_dict({name: saved.get(name, fresh[name]) for name in fresh})
            self.first_step = state.step
            said = f"resuming from {path}"
            if changed:
                said += f"; changed: {'; '.join(changed)}"
        with raise_on_all_ranks(f"--out {self.out}: "):
            if is_main() and not read_only:
                self.set_damaged_aside()
        if is_main():
            print(said, flush=True)

    def choose(self) -> tuple[Path, dict[str, Any]] | None:
        """The checkpoint that --resume means, all of whose files are as they were written, and its
        state; None to start from step 0. All ranks must call. Raises UserError."""
        choice = self.args.resume
        own = [path for _, path in step_folders(self.folder)]
        if choice == "never":
            with raise_on_all_ranks():
                if is_main() and (own or (self.out / "metrics.jsonl").exists()):
                    raise ValueError(
                        f"--resume never: {self.out} already holds a run; choose another --out"
                    )
            return None
        if choice not in ("auto", "must", "force"):
            return self.choose_path(own)
        found = self.newest_sound(own)
        if found is None and choice == "must":
            raise UserError(f"--resume must: no complete checkpoint in {self.folder}")
        return found

    def choose_path(self, own: list[Path]) -> tuple[Path, dict[str, Any]]:
        """The same for --resume PATH, from which an --out without checkpoints starts. An --out that
        has its ``own`` belongs to a requeued job, and goes on from those."""
        choice = self.args.resume
        if choice.isdecimal():
            choice = str(self.folder / f"step-{choice}")
        path = Path(from_main(weights.absolute_model(choice)))
        if self.is_own(path) and not self.read_only:
            raise UserError(
                f"--resume {path} is a checkpoint of this --out itself: leave out --resume to "
                "continue from the newest one, or choose another --out to start from this one"
            )
        found = None if self.is_own(path) else self.newest_sound(own)
        found = found or self.newest_sound([path] if path.is_dir() else [])
        if found is None:
            raise UserError(f"--resume {self.args.resume}: no complete checkpoint in {path}")
        return found

    def is_own(self, path: Path) -> bool:
        """Whether a path is of a checkpoint of this --out."""
        return os.path.realpath(path.parent) == os.path.realpath(self.folder)

    def newest_sound(self, candidates: list[Path]) -> tuple[Path, dict[str, Any]] | None:
        """The first of the ``candidates`` of rank 0 whose files are as they were written, and its
        state; says what is wrong with the others. All ranks must call."""
        for name in from_main([str(path) for path in candidates]):
            path = Path(name)
            saved, problem = read_checkpoint(path)
            if not problem:
                return path, saved
            self.damaged.append(path)
            if is_main():
                print(f"warning: not resumed from: {path}: {problem}", flush=True)
        return None

    def compare_flags(self, path: Path, saved: dict[str, Any], script_args: Any) -> list[str]:
        """The flags that have changed, as text. Those that alter the result may change only if the
        checkpoint is another run's, or with --resume force. Raises ValueError."""
        steps = self.flags["steps"]
        if saved["step"] > steps and not self.read_only:
            raise ValueError(
                f"{path} is already beyond --steps {steps}; raise --steps, or start another --out "
                "from an earlier checkpoint"
            )
        old = flags.default_flags(script_args) | saved["arguments"]
        neutral = flags.neutral_flags(script_args)
        changed = {}
        for name, value in self.flags.items():
            if old.get(name) != value:
                changed[name] = f"--{name} {old.get(name)!r} -> {value!r}"
        altering = [text for name, text in changed.items() if name not in neutral]
        if altering and self.is_own(path) and self.args.resume != "force":
            raise ValueError(
                f"flags that alter the result differ from those of {path}: {'; '.join(altering)}. "
                "Choose another --out, or --resume force"
            )
        return list(changed.values())

    def set_damaged_aside(self) -> None:
        """Rename damaged checkpoints: later ones will need their names. Rank 0 only."""
        for path in self.damaged:
            path.rename(path.with_name(f"damaged-{path.name}-{time.time_ns()}"))
        complete = complete_checkpoints(self.folder)
        if self.damaged and complete:
            write_pointer(self.folder / "latest", complete[0][1].name)

    # ---------------------------------------------------------------------------------------------
    # Save
    # ---------------------------------------------------------------------------------------------

    def save_if_due(self, step: int, last: int, state, roles: Roles, now: bool = False) -> None:
        """Save after ``step`` steps if --save_every says so; with ``now``, because the run is being
        stopped, save in any case and wait. The step that was resumed from is on disk already."""
        self.commit_if_written()
        if step > self.first_step and (now or due(step, self.args.save_every, last)):
            more = {"arguments": self.flags, "roles": list(roles)}
            self.save(step, roles, state.state_dict() | more)
        if now:
            self.finish()

    def save(self, step: int, roles: Roles, scalars: dict[str, Any]) -> None:
        """Start saving; training may change the tensors at once, which it does after their copy."""
        started = time.perf_counter()
        self.finish()
        aside = self.folder / f".tmp-step-{step}"
        strategy = self.args.save_strategy
        writer = CheckpointWriter(aside, strategy, self.group, self.staging.wait)
        training = training_state(roles)
        tensors = {name: value for name, value in training.items() if torch.is_tensor(value)}
        problem = None
        if is_main():
            try:
                self.make_room(tensors)
                aside.mkdir()
                text = json.dumps(scalars, indent=1, allow_nan=False)
                write_durably(aside / "state.json", text)
                writer.digests["state.json"] = hashlib.sha256(text.encode()).hexdigest()
            except (OSError, ValueError) as error:  # ValueError: a scalar is not finite
                problem = str(error)
        problem = from_main(problem)
        if problem:
            self.count_failure(step, aside, problem)
            return
        kill_point("before-write")
        done = dcp.async_save(
            tensors, storage_writer=writer, process_group=self.group, async_stager=self.staging
        )
        self.pending = Save(step, scalars["skipped_steps"], aside, writer, done)
        if self.args.save_blocking:
            self.finish()
        self.waited += time.perf_counter() - started

    def make_room(self, tensors: dict[str, Tensor]) -> None:
        """Make the folder of the checkpoints. Raises OSError: the disk is too full."""
        self.folder.mkdir(exist_ok=True)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        free = shutil.disk_usage(self.folder).free
        if needed * 1.02 + 2**20 > free:
            sizes = f"{needed / 2**30:.3f} GiB are needed and {free / 2**30:.3f} GiB free"
            raise OSError(f"{sizes} in {self.folder}")

    def commit_if_written(self) -> None:
        """Commit the save in flight if it has been written on all ranks."""
        if self.pending is not None and all(gather_objects(self.pending.done.done())):
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, and commit it."""
        if self.pending is None:
            return
        save, self.pending = self.pending, None
        problem = None
        try:
            save.done.result()
        except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
            problem = describe_failure(error, self.hosts)
        problem = next(filter(None, gather_objects(problem)), None)
        if problem:
            self.group = self.new_group()  # one that has timed out is of no use to any later save
        digests: dict[str, str] = {}
        for part in gather_objects(save.writer.digests):
            digests |= part
        if is_main() and not problem:
            try:
                self.commit(save, digests)
            except (OSError, ValueError) as error:  # ValueError: somebody has edited metrics.jsonl
                problem = str(error)
        problem = from_main(problem)
        if problem:
            self.count_failure(save.step, save.folder, problem)
        else:
            self.failed = 0

    def commit(self, save: Save, digests: dict[str, str]) -> None:
        """Make a written checkpoint visible, then delete those that need not be kept. Rank 0 only.

        ``digests``: the sha256 of every file, from the ranks that wrote them.
        """
        kill_point("before-commit")
        records = self.out / "metrics.jsonl"
        if records.exists():
            sync_folder(records)  # a checkpoint that survives a power cut needs them
        files = {path.name: path.stat().st_size for path in sorted(save.folder.iterdir())}
        if files.keys() != digests.keys():
            written = ", ".join(sorted(digests))
            raise OSError(f"{save.folder} holds {', '.join(files)}; these were written: {written}")
        committed = {
            "step": save.step,
            "world_size": dist.get_world_size(),
            "files": files,
            "sha256": digests,
        }
        write_durably(save.folder / "COMMITTED.json", json.dumps(committed, indent=1))
        sync_folder(save.folder)
        kill_point("before-rename")
        final = self.folder / f"step-{save.step}"
        if final.exists():  # left by an attempt that was rolled back, or incomplete
            shutil.rmtree(final)
        save.folder.rename(final)
        sync_folder(self.folder)
        kill_point("before-pointer")
        write_pointer(self.folder / "latest", final.name)
        kill_point("before-rotation")
        self.delete_old(save)

    def delete_old(self, save: Save) -> None:
        """Delete checkpoints beyond --keep_last and --keep_gb, except the one just written and
        the newest from before a model's updates were skipped."""
        kept = {save.step}
        before = self.newest_before(save.step, save.skipped_steps)
        if before is not None:
            kept.add(before[0])
        # Ignore newer ones: one that was unreadable at start-up must not rotate out the new one.
        complete = [found for found in complete_checkpoints(self.folder) if found[0] <= save.step]
        size, limit = 0, self.args.keep_gb * 1e9 or math.inf
        for number, (step, path) in enumerate(complete):
            size += sum(file.stat().st_size for file in path.iterdir())
            if step in kept or (number < self.args.keep_last and size <= limit):
                continue
            aside = path.with_name(f".tmp-old-{path.name}")
            try:
                path.rename(aside)  # never half of a checkpoint under a valid name
                shutil.rmtree(aside)
            except OSError as error:
                print(f"warning: the old checkpoint {path} was not deleted: {error}", flush=True)

    def newest_before(self, step: int, skipped: dict[str, int]) -> tuple[int, Path] | None:
        """Step and folder of the newest checkpoint from before the ``skipped`` steps up to
        ``step``."""
        last = step - max(skipped.values(), default=0)
        complete = complete_checkpoints(self.folder)
        return next((found for found in complete if found[0] <= last), None)

    def count_failure(self, step: int, folder: Path, problem: str) -> None:
        """Count a failed save. Raises UserError after --max_failed_saves in a row."""
        self.failed += 1
        if is_main():
            shutil.rmtree(folder, ignore_errors=True)
            count = f"({self.failed} in a row)"
            print(
                f"warning: the checkpoint of step {step} was not saved {count}: {problem}",
                flush=True,
            )
        if self.failed >= self.args.max_failed_saves:
            raise UserError(
                f"{self.failed} checkpoints in a row could not be saved, the last because: "
                f"{problem}"
            )

    # ---------------------------------------------------------------------------------------------
    # Records and checks
    # ---------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """For the record of a step: failed saves in a row, and the seconds that training has waited
        for saves since the last record."""
        waited, self.waited = self.waited, 0.0
        return {"perf/failed_saves": self.failed, "perf/save_seconds": waited}

    def check_skipped(self, state, roles: Roles, most: int) -> None:
        """Raises UserError on every rank if in ``most`` steps in a row (0: never) all updates of a
        model were skipped. All ranks must call."""
        lost = [role for role, count in state.skipped_steps.items() if most and count >= most]
        if not lost:
            return
        self.finish()  # the save in flight may be the newest from before
        role = lost[0]
        name = first_not_finite(roles[role].module)
        finding = "its parameters are finite"
        if name:
            finding = f"the first parameter that is not finite is {name}"
        found = self.newest_before(state.step, state.skipped_steps)
        path = from_main(str(found[1]) if found else None)
        way_back = "there is no earlier checkpoint"
        if path:
            way_back = (
                f"the newest earlier checkpoint is {path}; to restart from it, pass "
                "it to --resume with a new --out, perhaps with a smaller learning rate"
            )
        raise UserError(
            f"step {state.step}: the gradient of the {role} was not finite and all its updates "
            f"were skipped, {state.skipped_steps[role]} steps in a row; {finding}; {way_back}"
        )

    # ---------------------------------------------------------------------------------------------
    # Exports
    # ---------------------------------------------------------------------------------------------

    def export_if_due(self, step: int, last: int, trained: Trainable, processor) -> None:
        """Export the weights after ``step`` steps if --export_every says so, unless the process
        before a resume has done it. Raises UserError if the last export fails; earlier ones only
        warn."""
        if self.read_only or not due(step, self.args.export_every, last):
            return
        problem = self.export(step, trained, processor)
        if problem and step == last:
            raise UserError(
                f"{problem}. Once that is fixed, the same command goes on from the newest "
                "checkpoint and exports them"
            )
        if problem and is_main():
            print(f"warning: {problem}", flush=True)

    def export_now(self, trained: Trainable, processor) -> dict[str, float]:
        """Export the weights of the checkpoint that was resumed from, for --export_only. Returns
        the metrics of its step. Raises UserError if that fails."""
        self.saved_at = time.time_ns()  # an export that is there already is written anew
        problem = self.export(self.first_step, trained, processor)
        if problem:
            raise UserError(problem)
        if is_main():
            print(f"exported to {self.out}/export/step-{self.first_step}", flush=True)
        self.close()
        return self.state.metrics

    def export(self, step: int, trained: Trainable, processor) -> str:
        """Write <out>/export/step-N and, with an average of the weights, <out>/export_ema/step-N.
        Returns why that was not possible, "" if it was."""
        places = {"export": nullcontext()}
        if trained.ema_beta:
            places["export_ema"] = trained.averaged()
        problems = []
        for place, swapped in places.items():
            folder = self.out / place / f"step-{step}"
            if step == self.first_step and self.is_exported(folder):
                continue
            with swapped:
                problem = weights.export(trained.module, processor, folder)
            if problem:
                problems.append(f"the weights were not exported to {folder}: {problem}")
        return "; ".join(problems)

    def is_exported(self, folder: Path) -> bool:
        """Whether the folder holds the weights of the checkpoint that was resumed from. An export
        older than its checkpoint is stale."""
        return from_main(folder.exists() and folder.stat().st_mtime_ns >= self.saved_at)


def first_not_finite(module: nn.Module) -> str | None:
    """Name of a parameter that is not finite in the shard of some rank, the first of the first such
    rank. All ranks must call."""
    own = None
    for name, parameter in module.named_parameters():
        if not weights.is_finite(shard_of(parameter)):
            own = name
            break
    return next(filter(None, gather_objects(own)), None)


def count_skipped(counts: dict[str, int], metrics: dict[str, float]) -> dict[str, int]:
    """Role -> steps in a row in which all updates were skipped, after a step with these metrics.

    ``train/<role>_skipped`` is the fraction of a role's updates that were skipped. A step without
    updates of the role has no such metric, and leaves its count as it is.
    """
    new = dict(counts)
    for name, share in metrics.items():
        found = re.fullmatch(r"train/(\w+)_skipped", name)
        if found is not None:
            role = found[1]
            new[role] = counts.get(role, 0) + 1 if share == 1 else 0
    return new
