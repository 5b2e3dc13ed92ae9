"""The checkpoints of a run: a folder step-N is complete or does not exist.

    <out>/checkpoints/step-N/shard-*.safetensors    weights and optimizer states, by torch's DCP
                             state.json             counters, and the fingerprint of the run
                             COMMITTED.json         the sha256 of every file; written last
    <out>/export/step-N/                            weights in Hugging Face format

    Checkpoints      saves in the background, commits by rename, resumes on any number of ranks

Nothing is read with pickle.
"""

import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Container, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from packaging.version import Version
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from common import VERSION
from common.distributed import (
    from_main,
    gather_objects,
    is_main,
    raise_on_all_ranks,
    say_once,
    stop_requested,
)
from common.flags import MODEL_IDENTITY, fields_of
from common.ground.files import (
    UserError,
    check_form,
    follow_pointer,
    read_json,
    sha256,
    sync_folder,
    write_durably,
    write_link,
)
from common.ground.process import GIVEN_UP
from common.identity import VERSIONS, fingerprint_by_bytes
from common.logging import Metrics, due, how_to_go_on
from common.model import weights
from common.model.fsdp import Trainable
from common.model.vlm import Wrapper
from common.run_folder import lock_folder, note_stop, step_folders

# By role: actor, critic, judge; and a reference that moves, which has no optimizer.
Roles = Mapping[str, Trainable | Wrapper]
MOST_FAILURES = 3  # failed saves in a row that end a run


# -------------------------------------------------------------------------------------------------
# What is in a checkpoint
# -------------------------------------------------------------------------------------------------

LARGEST_COUNT = 2**40  # of what a run may have counted
STATE_FORM = {
    "step": range(LARGEST_COUNT),
    "fingerprint": {"steps": range(LARGEST_COUNT), "named?": {str: str}},
}


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
    have written it. Averages that it lacks begin at the weights. Raises UserError: it lacks others, has
    them in other shapes, or has weights of a model that does not train them here."""
    state, reader = training_state(roles), HuggingFaceStorageReader(str(path))
    with raise_on_all_ranks(f"{path}: "):
        saved = saved_names(path)
    wanted = {name: state[name] for name in state if name in saved or not name.endswith(".ema")}
    of_roles = tuple(f"{role}.model." for role in roles)
    lost = [name for name in saved - state.keys() if name.startswith(of_roles)]
    problem, cause = f"{min(lost)} is not trained here" if lost else "", None
    try:
        dcp.load(wanted, storage_reader=reader)
    except CheckpointException as error:
        cause = error
        problem, _ = next(iter(error.failures.values()))
    if problem:
        raise UserError(
            f"{path} cannot be loaded into the models of this run: {problem}; --config "
            "<out>/args.json has the flags of its run; to start from its weights alone, pass an export "
            "of its run as --model"
        ) from cause
    for name in state.keys() - wanted:
        weight = name.replace(".optimizer.state.", ".model.", 1).removesuffix(".ema")
        weights.shard_of(state[name]).copy_(weights.shard_of(state[weight]))


def saved_names(path: Path) -> set[str]:
    """The names of a checkpoint's tensors. Raises UserError: a file is no safetensors file, though it is
    what was written."""
    names: set[str] = set()
    for file in sorted(path.glob("*.safetensors")):
        with weights.open_weights(file) as tensors:
            names |= {*tensors.keys()}
    return names


def read_state(path: Path, form: dict) -> dict:
    """The scalars of a checkpoint. Raises UserError: they cannot be read, or have another form."""
    file, form = path / "state.json", form | STATE_FORM
    saved = read_json(file)
    lacking = sorted(form.keys() - saved.keys())
    if lacking:
        committed = read_json(path / "COMMITTED.json", {"version?": str})
        version = committed.get("version", "before 0.2.0")
        raise UserError(
            f"{path} was saved by the other script, or by another version of this project ({version}): "
            f"{file.name} has no {', '.join(lacking[:3])}; to start from its weights, pass an export of "
            "its run as --model"
        )
    check_form(saved, form, f"{file}")
    return saved


def form_of(value: Any) -> Any:
    """What `check_form` asks of a saved value in whose place ``value`` is now."""
    if isinstance(value, dict):
        return {name: form_of(part) for name, part in value.items()}
    if value is None:  # a mean that has no value yet
        return int | float | None
    if type(value) is int:
        return range(LARGEST_COUNT)
    return int | float if isinstance(value, float) else type(value)


def find_named(place: str) -> list[Path]:
    """The checkpoints of a run, or of its folder checkpoints, newest first; or a single one; or of a file
    in these. Raises UserError: there is none."""
    folder = follow_pointer(place).resolve()
    if not folder.exists():
        raise UserError(f"--resume {place}: no such folder")
    if folder.is_file():
        folder = folder.parent
    if (folder / "COMMITTED.json").exists():
        return [folder]
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    paths = [path for _, path in step_folders(folder)]
    is_model = any((path / "config.json").exists() for path in (folder, *paths))
    if is_model or not paths:
        advice = ": this is a model, pass it as --model" if is_model else ""
        raise UserError(f"--resume {place}: no complete checkpoint there{advice}")
    return paths


def described(value: Any, name: str | None) -> str:
    """A value of a fingerprint, with the name of that whose digest it is."""
    return f"{value!r} ({name})" if name not in (None, value) else repr(value)


def ways_to_evaluate(run: Path, model: str) -> str:
    """What to type to evaluate a run, or the model of --model."""
    ways = []
    if step_folders(run / "checkpoints"):
        ways.append(f"its newest checkpoint: --resume {run} --out NEW")
    if (run / "export" / "latest").exists():
        ways.append(f"its export: --model {run}/export/latest --out NEW")
    if not ways:
        ways.append("it has no checkpoint and no export yet")
    return "; ".join([*ways, f"that model itself: --model {model} --out NEW"])


def describe_model(args: Any) -> str:
    """The model of an evaluation that has no checkpoint, in words."""
    folder = follow_pointer(args.model)
    if re.fullmatch(r"export\w*/step-\d+", f"{folder.parent.name}/{folder.name}"):
        return f"the export {folder}"
    return f"the model {args.model} as it is: no checkpoint in {args.out}/checkpoints"


def find_damage(path: Path) -> str:
    """What is wrong with a checkpoint; "" if its files are those that were committed. The ranks
    share the reading; all must call."""
    problem = ""
    try:
        committed = read_json(path / "COMMITTED.json", {"sha256": {str: str}})["sha256"]
        for name in sorted(committed)[dist.get_rank() :: dist.get_world_size()]:
            if sha256(path / name) != committed[name]:
                problem = f"{name} is not what was written: its sha256 is another"
        for file in path.glob("*.safetensors"):  # DCP reads all that are there
            if file.name not in committed:
                problem = f"{file.name} is no file of this checkpoint: move it elsewhere"
    except (OSError, UserError) as error:
        problem = str(error)
    return max(gather_objects(problem))


# an older torch closes a stager after its first save
KEEPS_STAGER = Version(torch.__version__) >= Version("2.13")


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


class Writer(HuggingFaceStorageWriter):
    """Writes the files of this rank when it is its turn (--save_strategy)."""

    future: Any  # of the whole save, once it has begun

    def __init__(self, folder: Path, step: int, state: str, strategy: str, group: Any):
        super().__init__(str(folder), save_distributed=True)
        self.folder, self.step, self.group = folder, step, group
        self.state = state  # of state.json, which rank 0 writes
        self.digests: dict[str, str] | None = None  # the sha256 of each file, once all are written
        self.turn, self.turns = 0, 0  # all ranks at once
        if strategy == "single_node":
            self.turn = int(os.environ.get("GROUP_RANK", 0))
            self.turns = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        elif strategy != "unrestricted":
            self.turn, self.turns = dist.get_rank(), dist.get_world_size()

    def write_data(self, plan: Any, planner: Any) -> Any:
        """What DCP calls in its thread; it tells all ranks of an error on any of them."""
        for _ in range(self.turn):
            dist.barrier(self.group)
        try:
            return self.write_files(plan, planner)
        finally:  # also after an error, or the others would wait
            for _ in range(self.turns - self.turn):
                dist.barrier(self.group)

    def write_files(self, plan: Any, planner: Any) -> Any:
        """Raises OSError."""
        written = super().write_data(plan, planner)
        files = list(self.folder.glob(f"shard-{dist.get_rank() + 1:05d}-*"))
        if is_main():
            files.append(self.folder / "state.json")
            write_durably(files[-1], self.state)
        self.digests = {path.name: sha256(path) for path in files}
        return written


# -------------------------------------------------------------------------------------------------
# The checkpoints of a run
# -------------------------------------------------------------------------------------------------


class Checkpoints:
    """Writes and finds <out>/checkpoints/step-N, and exports to <out>/export/step-N.

    A save goes into a fresh hidden folder, in the background; then rank 0 writes COMMITTED.json,
    renames the folder to step-N, moves the `latest` pointer, and only then deletes old checkpoints.
    Death at any instant leaves the earlier checkpoints as they were. One save is in flight at most. A
    resume takes the newest checkpoint whose files are those committed.

    As a context manager it waits for the save in flight at the end. After a UserError (a reward that has
    raised, a server or a file system that is away) it saves the last finished step as well, if no update
    of the next one has begun. Any other exception is a bug, and saves nothing.
    """

    def __init__(self, args: Any, state: Any, fingerprint: dict):
        """
        Args:
            args: a script's, with CheckpointArgs and RunArgs.
            state: has `state_dict`, `load_state_dict`, `step` and `metrics`.
            fingerprint: see `fingerprint_of`.
        Raises:
            UserError: another run has the folder; no checkpoint where one must be, one where none may
                be, or none that can be read.
        """
        self.args, self.state, self.fingerprint = args, state, fingerprint
        self.folder = args.out / "checkpoints"
        self.best: int | None = None  # the step of the best evaluation, with --keep_best
        self.damaged: set[Path] = set()  # checkpoints that were found so
        self.roles: Roles = {}  # what is saved: `resume` is told
        # The last finished step and its state.json; None: an update has changed weights since.
        self.finished: tuple[int, str] | None = None
        self.saved_step = 0  # the newest that is committed
        self.pending: Writer | None = None  # of the save in flight
        self.failed = 0  # saves in a row
        self.problem = ""  # of the last save
        self.waited = 0.0  # seconds that training waited for saves since they were last recorded
        self.stager = make_stager()
        self.group = self.new_group()
        newest = f"--resume {args.out} --out NEW evaluates its newest checkpoint"
        self.lock = lock_folder(args.out, f"; {newest}" if args.eval_only else "")
        self.path = self.find_newest()  # from which to resume; None: from step 0
        if args.eval_only and not self.path:
            self.require_untrained()
        self.saved: dict = {}  # its state.json
        if self.path:
            with raise_on_all_ranks():
                self.saved = read_state(self.path, form_of(state.state_dict()))
            self.renew_fingerprint()

    def new_group(self) -> Any:
        """For the collectives of the thread that saves."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.args.timeout))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.finish()
        elif issubclass(kind, UserError):  # raised on all ranks, so they can commit
            self.save_unsaved()
        if self.lock:
            self.lock.close()
        if kind and self.saved_step and not self.args.eval_only:
            say_once(f"step {self.saved_step} is saved: {how_to_go_on(self.args)}")
        if kind is None and self.problem:
            raise UserError(self.problem)

    # ---------------------------------------------------------------------------------------------
    # Resume
    # ---------------------------------------------------------------------------------------------

    def find_newest(self) -> Path | None:
        """The newest of the checkpoints that --resume means whose files are as they were written; None:
        there are none. Raises UserError."""
        with raise_on_all_ranks():
            candidates = self.find_candidates() if is_main() else []
        candidates, problem = from_main(candidates), ""
        for path in candidates:
            problem = find_damage(path)
            if not problem:
                return path
            self.damaged.add(path)
            say_once(f"warning: not resumed from: {path}: {problem}")
        if problem:  # which does not mean to start over
            raise UserError(
                f"no checkpoint that can be resumed from: {candidates[-1]}: {problem}. Start again once "
                "its files can be read, or choose another --out"
            )
        return None

    def find_candidates(self) -> list[Path]:
        """The checkpoints that --resume means, newest first. With a PATH they are those of this --out
        once it has some, as when a job is requeued. Raises UserError, OSError."""
        choice, out = self.args.resume, self.args.out
        ours = [path for _, path in step_folders(self.folder)]
        if choice == "auto":
            return ours
        if choice == "never":
            if ours or (out / "metrics.jsonl").exists():
                raise UserError(
                    f"--resume never: {out} already holds a run; choose another --out, or resume it by "
                    "--resume auto"
                )
            return []
        if not ours or self.args.eval_only:
            return find_named(choice)
        named = follow_pointer(choice).resolve()  # which may be gone by now
        if named.parent == self.folder.resolve() and named.name != ours[0].name:
            raise UserError(
                f"--resume {choice}: this is a checkpoint of this --out itself: leave out --resume to go "
                "on from the newest one, or choose another --out to start from this one"
            )
        return ours

    def require_untrained(self) -> None:
        """Raises UserError: an evaluation without a checkpoint would take the initial weights of a run for
        those that it has trained."""
        with raise_on_all_ranks("--eval_only: "):
            run = self.args.recorded_run
            if (self.args.out / "metrics.jsonl").exists():
                run = self.args.out
            if is_main() and run:
                raise UserError(
                    f"no checkpoint in {self.folder}, and --model {self.args.model} is not what the run "
                    f"{run} has trained; {ways_to_evaluate(run, self.args.model)}"
                )

    def resume(self, roles: Roles, steps: int, identity: Container[str]) -> None:
        """Load the checkpoint that --resume asks for, if there is one.

        Args:
            steps: --steps, or those of --max_epochs.
            identity: the flags that make it another run: --resume auto does not go on from the
                checkpoint of another one. All other changes are printed.

        Raises:
            UserError: it is of another run, beyond its last step, or does not fit into the models.
        """
        self.roles = roles
        for part in roles.values():
            if isinstance(part, Trainable):
                part.optimizer.register_step_pre_hook(self.begin_update)
        self.fingerprint["steps"] = steps
        if self.path is None:
            start = f"starting from step 0: no complete checkpoint in {self.folder}"
            say_once(f"evaluating {describe_model(self.args)}" if self.args.eval_only else start)
            return
        changed = self.compare(self.path, self.saved.pop("fingerprint"), identity)
        if self.saved["step"] > steps and not self.args.eval_only:
            raise UserError(
                f"{self.path} is already beyond --steps {steps}; raise --steps, or start another --out "
                "from an earlier checkpoint"
            )
        # A critic, say, that --critic_model has replaced is not the one that was saved.
        stay = {role: part for role, part in roles.items() if f"{role}_model" not in changed}
        load_training_state(self.path, stay)
        with raise_on_all_ranks(f"{self.path}/state.json: "):
            # an evaluation begins nothing anew
            self.state.load_state_dict(self.saved, set() if self.args.eval_only else set(changed))
        self.saved_step = self.state.step
        changes = f"; changed: {'; '.join(changed.values())}" if changed else ""
        does = f"evaluating step {self.saved_step}:" if self.args.eval_only else "resuming from"
        say_once(f"{does} {self.path}{changes}")
        if self.saved_step == steps and not self.args.eval_only:
            say_once(f"all --steps {steps} are done: raise --steps to train on")

    def renew_fingerprint(self) -> None:
        """What the flags name may be as it was for a checkpoint of an earlier version, which compared all
        bytes of files: then it is the same here."""
        before = self.saved["fingerprint"]
        if "named" not in before:
            for name, old in fingerprint_by_bytes(self.args).items():
                if before.get(name) == old:
                    before[name] = self.fingerprint[name]

    def compare(self, path: Path, before: dict, identity: Container[str]) -> dict[str, str]:
        """How flags, or what they name, have changed since ``path`` was saved, by name. Raises UserError:
        it is another run, in this --out, and --resume did not name it."""
        changed = {}
        named, named_before = self.fingerprint["named"], before.pop("named", {})
        for name, old in before.items():
            new = self.fingerprint.get(name, old)
            if new != old and name in VERSIONS:
                say_once(f"warning: {path} was saved with {name} {old}; this is {new}")
            elif new != old:
                flag = f"--{name}" if name in fields_of(type(self.args)) else name
                texts = (described(old, named_before.get(name)), described(new, named.get(name)))
                changed[name] = f"{flag} {' -> '.join(texts)}"
        if self.args.eval_only:  # it changes nothing: only the model has to be the same
            identity = MODEL_IDENTITY
        others = [text for name, text in changed.items() if name in identity]
        choice = self.args.resume
        names_it = choice != "auto" and path.resolve().is_relative_to(
            follow_pointer(choice).resolve()
        )
        if others and path.parent == self.folder and not names_it:
            raise UserError(
                f"{path} is of another run: {'; '.join(others)}. Choose another --out; "
                f"to start it from this checkpoint, add --resume {path}"
            )
        return changed

    # ---------------------------------------------------------------------------------------------
    # Save
    # ---------------------------------------------------------------------------------------------

    def save_if_due(self, step: int, last: int) -> None:
        """Save after ``step`` steps if --save_every says so and they are not saved yet. Until the next
        update, what can be saved of them is as it is now, whatever the next step counts meanwhile."""
        self.commit_if_written()
        state = self.state.state_dict() | {"fingerprint": self.fingerprint}
        self.finished = step, json.dumps(state, indent=1, allow_nan=False)
        if step > self.saved_step and due(step, self.args.save_every, last):
            self.save(step)

    def save_if_best(self, step: int, best: int | None) -> None:
        """Save after ``step`` steps if their evaluation is the ``best`` so far, and have
        checkpoints/best name it; `export_if_due` does the same with its exports."""
        self.best = best
        if step != best or self.args.eval_only or not self.args.save_every:
            return
        if self.pending and self.pending.step == step:
            return  # `commit` names it
        with raise_on_all_ranks(f"{self.folder}/best: "):
            is_saved = from_main((self.folder / f"step-{step}").exists())
            if is_saved and is_main():
                write_link(self.folder / "best", f"step-{step}")
        if not is_saved:
            self.save(step)

    def saved_to_stop(self, step: int, last: int) -> bool:
        """Whether a signal has asked to stop after ``step`` steps, before the ``last``; if so, they
        are saved. The same on every rank."""
        if step == last or not stop_requested():
            return False
        self.finish()
        if step > self.saved_step:
            self.save(step)
            self.finish()
        note_stop(self.lock)
        return True

    def begin_update(self, *_) -> None:
        """Before an optimizer's step: the weights will no longer be those of the last finished step."""
        self.finished = None

    def save_unsaved(self) -> None:
        """After an error from outside: save the last finished step unless the error came later than the
        first update of the next one, or --save_every is 0. A failure is only a warning."""
        self.commit_or_warn()
        if not (self.finished and self.args.save_every and self.failed < MOST_FAILURES):
            return
        step, _ = self.finished
        if self.saved_step < step == self.state.step:
            say_once(f"an error ends the run: saving step {step} first")
            self.start_saving(step)
            self.commit_or_warn()

    def save(self, step: int) -> None:
        """Save the finished ``step``, in the background unless --save_blocking says otherwise."""
        started = time.perf_counter()
        self.finish()
        self.start_saving(step)
        if self.args.save_blocking:
            self.finish()
        self.waited += time.perf_counter() - started

    def start_saving(self, step: int) -> None:
        """Training may change the tensors at once, as they are copied first."""
        assert self.finished and self.finished[0] == step
        _, text = self.finished
        folder = self.folder / f".tmp-step-{step}"
        writer = Writer(folder, step, text, self.args.save_strategy, self.group)
        if not KEEPS_STAGER:
            self.stager = make_stager()
        writer.future = dcp.async_save(
            training_state(self.roles),
            storage_writer=writer,
            process_group=self.group,
            async_stager=self.stager,
        )
        self.pending = writer

    def commit_if_written(self) -> None:
        """Commit the save in flight if it has been written on all ranks."""
        if self.pending is not None and all(gather_objects(self.pending.future.done())):
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, and commit it. A failure is only a warning,
        unless it is the last save; the next one tries again. Raises UserError: MOST_FAILURES in a row."""
        self.commit_or_warn()
        if self.failed >= MOST_FAILURES:
            raise UserError(f"{self.failed} saves in a row have failed; {self.problem}")

    def commit_or_warn(self) -> None:
        """Wait for the save in flight, if there is one, and commit it. A failure is a warning."""
        if self.pending is None:
            return
        writer, self.pending = self.pending, None
        place = f"rank {dist.get_rank()} on {socket.gethostname()}: "
        try:
            with raise_on_all_ranks(place):
                digests = self.wait_for(writer)
            parts = gather_objects(digests)
            with raise_on_all_ranks(place):
                if is_main():
                    self.commit(writer.step, writer.folder, parts)
        except UserError as error:
            self.problem = f"the checkpoint of step {writer.step} was not saved: {error}"
            self.failed += 1
            if is_main():  # the disk may be full of it
                shutil.rmtree(writer.folder, ignore_errors=True)
            say_once(f"warning: {self.problem}")
            self.group = self.new_group()  # ranks may wait in the old one
        else:
            self.saved_step, self.failed, self.problem = writer.step, 0, ""

    def wait_for(self, writer: Writer) -> dict[str, str] | None:
        """The sha256 of each file that this rank has written. Raises OSError: this rank has failed, or
        another that had to write before it."""
        limit = 0.8 * self.args.timeout  # less than the other ranks wait for this one
        try:
            writer.future.result(limit)
        except TimeoutError as error:
            GIVEN_UP.append(writer.future)
            if writer.digests is None:
                raise OSError(f"not written within {limit:g} s, 0.8 of --timeout") from error
        except CheckpointException as error:
            if dist.get_rank() in error.failures:
                cause, _ = error.failures[dist.get_rank()]
                if not isinstance(cause, OSError | RuntimeError | MemoryError):
                    raise cause from error  # a bug
                raise OSError(str(cause)) from error
        except RuntimeError as error:  # a collective that a rank has left, or where it was late
            if writer.digests is None:
                raise OSError(str(error)) from error
        return writer.digests

    def commit(self, step: int, folder: Path, parts: list[dict[str, str]]) -> None:
        """Make a written checkpoint visible, then delete those that need not be kept. Rank 0 only.

        Args:
            parts: of each rank, the sha256 of its files.
        Raises:
            OSError: files cannot be written.
        """
        sync_folder(self.args.out / "metrics.jsonl")  # which the checkpoint needs after a power cut
        digests = {name: part[name] for part in parts for name in part}
        committed = json.dumps({"step": step, "version": VERSION, "sha256": digests}, indent=1)
        write_durably(folder / "COMMITTED.json", committed)
        sync_folder(folder)
        final = self.folder / f"step-{step}"
        if final.exists():  # it could not be read, or is of an attempt that was rolled back
            shutil.rmtree(final)
        folder.rename(final)
        sync_folder(self.folder)
        write_link(self.folder / "latest", final.name)
        self.damaged.discard(final)
        if step == self.best:
            write_link(self.folder / "best", final.name)
        self.delete_old(step)

    def delete_old(self, step: int) -> None:
        """Delete checkpoints beyond --keep_last and --keep_gb, but not that of this ``step`` nor the best.
        One that is damaged takes no place of a good one: it is neither counted nor deleted."""
        size, limit = 0, self.args.keep_gb * 1e9 or math.inf
        spared = {*self.damaged, follow_pointer(self.folder / "best")}
        written = [path for number, path in step_folders(self.folder) if number <= step]
        for count, path in enumerate(path for path in written if path not in spared):
            size += sum(file.stat().st_size for file in path.iterdir())
            if count and (count >= self.args.keep_last or size > limit):
                shutil.rmtree(path, ignore_errors=True)  # what is left is deleted the next time

    def metrics(self) -> Metrics:
        """For the record of a step: failed saves in a row, and the seconds that training has waited
        for saves since the last record."""
        waited, self.waited = self.waited, 0.0
        return {"perf/failed_saves": self.failed, "perf/save_seconds": waited}

    # ---------------------------------------------------------------------------------------------
    # Exports
    # ---------------------------------------------------------------------------------------------

    def export_if_due(
        self, step: int, last: int, exports: dict[str, Trainable], save: Callable[[Path], None]
    ) -> None:
        """Write models to <out>/NAME/step-N if --export_every says so, or if they are the best so far, by
        their names there, and averages of their weights to <out>/NAME_ema/step-N; ``save`` writes the files
        beside the weights. Raises UserError if the last export fails; earlier ones only warn."""
        is_due = due(step, self.args.export_every, last)
        if self.args.eval_only or not (is_due or step == self.best):
            return
        for name, trained in exports.items():
            self.export(self.args.out / name, trained.module, step, last, save)
            if trained.ema_beta:
                with trained.averaged():
                    self.export(self.args.out / f"{name}_ema", trained.module, step, last, save)

    def export(
        self, folder: Path, module: Wrapper, step: int, last: int, save: Callable[[Path], None]
    ) -> None:
        """Write the weights to a new export in ``folder``: see `export_if_due`."""
        folder = folder / f"step-{step}"
        problem = weights.export(module, save, folder)
        if not problem:
            if step == self.best:
                self.name_best(folder, last)
            return
        message = f"the weights were not exported to {folder}: {problem}"
        if step == last:
            how = how_to_go_on(self.args)
            raise UserError(f"{message}. Once that is fixed, {how} and exports them")
        say_once(f"warning: {message}")

    def name_best(self, folder: Path, last: int) -> None:
        """Have `best` name this export, and delete the one that it has named unless --export_every asks for
        it."""
        with raise_on_all_ranks(f"{folder.parent}/best: "):
            if is_main():
                before = follow_pointer(folder.parent / "best")
                write_link(folder.parent / "best", folder.name)
                number = before.name.removeprefix("step-")  # "best" if there was none
                if before != folder and number != "best":
                    if not due(int(number), self.args.export_every, last):
                        shutil.rmtree(before, ignore_errors=True)
