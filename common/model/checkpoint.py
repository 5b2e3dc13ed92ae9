"""What makes a run the same run, and its checkpoints: a folder step-N is complete or does not exist.

    <out>/checkpoints/step-N/shard-*.safetensors    weights and optimizer states, by torch's DCP
                             state.json             counters, and the fingerprint of the run
                             COMMITTED.json         the sha256 of every file; written last
    <out>/export/step-N/                            weights in Hugging Face format

    fingerprint_of   flags and what they name, the same on all ranks; a resume compares it
    choose_folder    the folder of a run without --out
    Checkpoints      saves in the background, commits by rename, resumes on any number of ranks

Nothing is read with pickle.
"""

import fcntl
import hashlib
import itertools
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
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
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
from common.files import (
    check_form,
    follow_pointer,
    open_file,
    read_json,
    read_text,
    say,
    sha256,
    sync_folder,
    write_durably,
    write_link,
    write_pointer,
)
from common.flags import MODEL_IDENTITY, RunArgs, as_json, fields_of
from common.logging import Metrics, due, how_to_go_on
from common.model import weights
from common.model.fsdp import Trainable
from common.model.vlm import Wrapper
from common.process import UserError
from common.threads import GIVEN_UP

# By role: actor, critic, judge; and a reference that moves, which has no optimizer.
Roles = Mapping[str, Trainable | Wrapper]
MOST_FAILURES = 3  # failed saves in a row that end a run


Script = TypeVar("Script", bound=RunArgs)  # a script's Args, with CheckpointArgs


# -------------------------------------------------------------------------------------------------
# What makes a run the same run
# -------------------------------------------------------------------------------------------------

VERSIONS = ("torch", "transformers", "project")  # stand beside the flags; a change is a warning
# The files of a model that are read; a folder may hold others.
READ = re.compile(r"(?!consolidated).*\.(json|txt|jinja|model|safetensors)")
MIB = 2**20


def fingerprint_of(args: Any) -> dict:
    """The value of every flag, with digests in place of the paths of what it names; and versions.

    All ranks must call. Raises UserError on every rank: what a flag names cannot be read, or two ranks
    have different flags, or different files behind them.
    """
    values = as_json(args)
    with raise_on_all_ranks():
        for name, field in fields_of(type(args)).items():
            try:
                if field.metadata["paths"]:
                    values[name] = contents(name, values[name])
            except ValueError as error:
                raise ValueError(f"--{name}: {error}") from error
        values |= {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "project": digest_project(),
        }
    compare_ranks(values)
    return values


def compare_ranks(values: dict) -> None:
    """Raises UserError if a flag, or what it names, differs between two ranks; versions only warn."""
    (host, first), *others = gather_objects((socket.gethostname(), values))
    for rank, (other_host, other) in enumerate(others, start=1):
        for name in first:
            if first[name] == other[name]:
                continue
            difference = f"{first[name]!r} on rank 0 ({host})"
            difference += f" and {other[name]!r} on rank {rank} ({other_host})"
            if name not in VERSIONS:
                raise UserError(
                    f"--{name} is {difference}: all ranks need the same flags, and the same files "
                    "behind them"
                )
            say_once(f"warning: {name} is {difference}")


def contents(flag: str, value: str) -> str:
    """A flag's value with digests in place of paths. Raises ValueError: something cannot be read."""
    if flag.endswith("model"):
        return value if value in ("", "self", "ema") else digest_model(value)
    if flag == "reward_recipe" and os.path.isfile(value):
        value = read_text(value)
    return digest_parts(value)


def digest_parts(text: str) -> str:
    """A text with digests in place of the files and judges that it names, as in a.jsonl:0.7,b.jsonl:0.3
    or grm:FOLDER,file.py:function, or in the JSON of a recipe."""
    if os.path.isfile(text):
        return sha256(text)[:12]
    for mark in '",':
        if mark in text:
            return mark.join(map(digest_parts, text.split(mark)))
    kind, _, name = text.partition(":")
    if kind in ("grm", "rm"):
        return f"{kind}:{digest_model(name)}"
    return ":".join(map(digest_parts, text.split(":"))) if ":" in text else text


def digest_model(name: str) -> str:
    """Of a model's folder or hub name: of small files all bytes; of weights the size, and a megabyte
    at the start, in the middle and at the end of each file."""
    folder = weights.resolve_folder(name)
    parts = []
    for path in sorted(folder.iterdir()):
        if not READ.fullmatch(path.name):
            continue
        if path.suffix != ".safetensors":
            parts.append(f"{path.name} {sha256(path)}")
            continue
        with open_file(path) as file:
            size, sample = path.stat().st_size, hashlib.sha256()
            for start in (0, size // 2, size - MIB):
                file.seek(max(0, start))
                sample.update(file.read(MIB))
        parts.append(f"{path.name} {size} {sample.hexdigest()}")
    return short_digest(parts)


def digest_project() -> str:
    """Of the scripts and common/."""
    root = Path(__file__).resolve().parents[2]
    files = sorted([*root.glob("train_*.py"), *root.glob("common/**/*.py")])
    return short_digest([sha256(path) for path in files])


def short_digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


# -------------------------------------------------------------------------------------------------
# The folder of a run
# -------------------------------------------------------------------------------------------------


def choose_folder(args: Script, fingerprint: dict) -> Script:
    """``args`` with the folder of a run without --out: a new one, which runs/latest then names. An
    evaluation takes the one that runs/latest names; a restart by torchrun that of its first start.

    All ranks must call. Raises UserError: the folder cannot be made.
    """
    folder, launched = follow_pointer(args.out), launchers()
    with raise_on_all_ranks("--out: "):
        if args.out.name == RunArgs.out.name and is_main():
            folder = find_folder(args, launched) or new_folder(args, fingerprint)
    return replace(args, out=from_main(folder))


def find_folder(args: Any, launched: list[str]) -> Path | None:
    """The folder in which an evaluation, or a restart by torchrun, goes on, if there is one."""
    runs = args.out.parent
    latest = follow_pointer(runs / "latest")
    if args.eval_only and args.resume == "auto" and latest.is_dir():
        return latest
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        for lock in sorted(runs.glob("*/.lock"), reverse=True):
            if not lock.parent.is_symlink() and set(read_holder(lock)["launchers"]) & set(launched):
                return lock.parent
    return None


def new_folder(args: RunArgs, fingerprint: dict) -> Path:
    """A new folder in runs/, for this start alone."""
    runs, began = args.out.parent, f"{datetime.now():%Y-%m-%d-%H%M%S}"
    folder = runs / began
    for number in itertools.count(2):  # another start may have been in the same second
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            folder = runs / f"{began}-{number}"
    if not args.eval_only:
        mention_unfinished(follow_pointer(runs / "latest"), fingerprint)
        write_link(runs / "latest", folder.name)
    return folder


def mention_unfinished(folder: Path, fingerprint: dict) -> None:
    """Say how to go on with the run in a folder, if it is one of the same model and data and has not
    reached its last step."""
    steps = step_folders(folder / "checkpoints")
    try:
        saved = read_json(steps[0][1] / "state.json", STATE_FORM) if steps else None
    except ValueError:  # of another version, say: it is not this run's
        return
    if saved is None:
        return
    before, step = saved["fingerprint"], saved["step"]
    last = before["steps"]
    is_same = all(before.get(name) == fingerprint[name] for name in ("model", "data"))
    if is_same and step < last:
        say(
            f"this is a new run; {folder}, of the same model and data, has stopped after step {step} of "
            f"{last}: --out {folder} goes on with it"
        )


def launchers() -> list[str]:
    """The torchrun of each machine, which is the same when it starts its workers anew."""
    launcher = f"{socket.gethostname()} {os.getppid()} {os.environ.get('TORCHELASTIC_RUN_ID')}"
    return sorted(set(gather_objects(launcher)))


HOLDER_FORM = {"host": str, "process": int, "job": str, "life": str, "launchers": [str]}


def read_holder(lock: Path) -> dict:
    """Which run has, or had, the lock of a folder; of earlier versions, or without one, nobody."""
    try:
        return read_json(lock, HOLDER_FORM)
    except ValueError:
        return {"host": "", "process": 0, "job": "", "life": "", "launchers": []}


def take_lock(path: Path, text: str) -> TextIO:
    """Hold the lock of a folder, which the kernel drops when this process ends; ``text`` says who holds
    it. Raises ValueError: a live run has it; OSError."""
    holder = read_holder(path)
    lock = open(path, "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_held = isinstance(error, BlockingIOError)
        # a child of a dead run has it, or a machine that is gone
        if is_held and not may_live(holder):
            path.unlink()
            return take_lock(path, text)
        if is_held or is_neighbour(holder):
            who = f"process {holder['process']} on {holder['host']}"
            raise ValueError(f"it is in use by a live run, {who}") from error
        # Lustre, say, without its mount option
        say(f"warning: a second run in {path.parent} would not be refused: {error}")
    lock.truncate(0)
    lock.write(text)
    lock.flush()
    os.fsync(lock.fileno())
    return lock


def may_live(holder: dict) -> bool:
    """Whether the holder of a lock may be alive: neither a process of this machine that has ended, nor
    this job of SLURM before it was requeued."""
    if holder["host"] == socket.gethostname():
        return is_neighbour(holder) or holder["process"] == os.getpid()
    job, life = slurm_job()
    return not job or holder["job"] != job or holder["life"] == life


def is_neighbour(holder: dict) -> bool:
    """Whether the holder of a lock is another live process of this machine."""
    try:
        os.kill(holder["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return holder["host"] == socket.gethostname() and holder["process"] != os.getpid()


def slurm_job() -> tuple[str, str]:
    """The job, and how often it was requeued."""
    return os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")


# -------------------------------------------------------------------------------------------------
# What is in a checkpoint
# -------------------------------------------------------------------------------------------------

STATE_FORM = {"step": range(2**53), "fingerprint": {"steps": range(2**53)}}


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
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise UserError(
            f"{path} cannot be loaded into the models of this run: {cause}; --config "
            "<out>/args.json has the flags of its run; to start from its weights alone, pass an export "
            "of its run as --model"
        ) from error


def read_state(path: Path, form: dict) -> dict:
    """The scalars of a checkpoint. Raises ValueError: they cannot be read, or have another form."""
    file = path / "state.json"
    saved = read_json(file)
    if "fingerprint" not in saved:
        raise ValueError(
            f"{path} was saved by an earlier version of this project, and cannot be resumed from: go on "
            "with that version, or start from an export of its run, as --model <out>/export/latest"
        )
    lacking = sorted(form.keys() - saved.keys())
    if lacking:
        raise ValueError(
            f"{path} is of another script: {file.name} has no {', '.join(lacking[:3])}; to start from its "
            "weights, pass an export of its run as --model"
        )
    check_form(saved, form | STATE_FORM, f"{file}")
    return saved


def form_of(value: Any) -> Any:
    """What `check_form` asks of a saved value in whose place ``value`` is now."""
    if isinstance(value, dict):
        return {name: form_of(part) for name, part in value.items()}
    if isinstance(value, float) or value is None:  # a mean that has no value yet
        return int | float | None if value is None else int | float
    return type(value)


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


class Writer(HuggingFaceStorageWriter):
    """Writes this rank's shards when it is its turn (--save_strategy), if all numbers are finite."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor], strategy: str, group: Any):
        super().__init__(str(folder), save_distributed=True)
        self.tensors, self.group = tensors, group
        self.busy = False  # this rank is at work, and not waiting for others
        self.turn, self.turns = 0, 0  # all ranks at once
        if strategy == "single_node":
            self.turn = int(os.environ.get("GROUP_RANK", 0))
            self.turns = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        elif strategy != "unrestricted":
            self.turn, self.turns = dist.get_rank(), dist.get_world_size()

    def write_data(self, plan: Any, planner: Any) -> Any:
        for _ in range(self.turn):
            dist.barrier(self.group)
        self.busy = True
        try:
            shards = {name: weights.shard_of(tensor) for name, tensor in self.tensors.items()}
            weights.check_finite({name: shard for name, shard in shards.items() if shard.numel()})
            return super().write_data(plan, planner)
        finally:  # also after an error, or the others would wait
            self.busy = False
            for _ in range(self.turns - self.turn):
                dist.barrier(self.group)


# -------------------------------------------------------------------------------------------------
# The checkpoints of a run
# -------------------------------------------------------------------------------------------------


class Checkpoints:
    """Writes and finds <out>/checkpoints/step-N, and exports to <out>/export/step-N.

    A save goes into a fresh hidden folder, in the background; then rank 0 writes COMMITTED.json,
    renames the folder to step-N, moves the `latest` pointer, and only then deletes old checkpoints.
    Death at any instant leaves the earlier checkpoints as they were. One save is in flight at most. A
    resume takes the newest checkpoint whose files are those committed.

    As a context manager it waits for the save in flight at the end, even after a UserError.
    """

    def __init__(self, args: Any, state: Any, fingerprint: dict):
        """
        Args:
            args: a script's, with CheckpointArgs and RunArgs.
            state: has `state_dict`, `load_state_dict`, `step` and `metrics`.
            fingerprint: see `fingerprint_of`.
        """
        self.out, self.args, self.timeout = args.out, args, args.timeout
        self.state, self.fingerprint = state, fingerprint
        self.folder = args.out / "checkpoints"
        self.committed_step = 0  # the newest that is saved
        self.saved_step = 0  # ... or on its way
        self.failed = 0  # saves in a row
        self.damaged: set[Path] = set()  # what could not be resumed from
        self.problem = ""  # of the last save
        self.waited = 0.0  # seconds that training waited for saves since they were last recorded
        # a save in flight: its step, and the sha256 of each file that this rank writes
        self.pending: tuple[int, Future] | None = None
        self.roles: Roles = {}  # what is saved: `resume` is told
        self.writer: Writer | None = None  # of the save in flight
        self.stager = make_stager()
        self.place = f"rank {dist.get_rank()} on {socket.gethostname()}"
        self.places = gather_objects(self.place)
        self.thread, self.group = self.make_writer()
        self.lock = self.lock_folder(launchers())

    def make_writer(self) -> tuple[ThreadPoolExecutor, Any]:
        """A thread that writes, and a group for the collectives of its own."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        return ThreadPoolExecutor(1), group

    def lock_folder(self, launched: list[str]) -> TextIO | None:
        """Make this the only live run of the folder, which all ranks must see: rank 0 holds its lock.
        Raises UserError."""
        job, life = slurm_job()
        holder = {"host": socket.gethostname(), "process": os.getpid(), "job": job, "life": life}
        holder |= {"launchers": launched, "began": time.time_ns()}
        text, lock, file = from_main(json.dumps(holder)), self.out / ".lock", None
        with raise_on_all_ranks(f"--out {self.out}: "):
            if is_main():
                self.out.mkdir(parents=True, exist_ok=True)
                file = take_lock(lock, text)
                # Left by a process that was killed during a save or an export.
                for pattern in ("checkpoints/.tmp-*", "export*/.step-*"):
                    for path in self.out.glob(pattern):
                        shutil.rmtree(path)
        with raise_on_all_ranks(f"--out {self.out}: "):
            if not lock.exists() or lock.read_text() != text:  # each node would keep its shards
                raise ValueError(
                    f"on {socket.gethostname()} this is not rank 0's folder: use a file system that "
                    "all nodes share"
                )
        return file

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None or issubclass(kind, UserError):  # raised on all ranks, so they can commit
            self.finish()
        if self.lock:
            self.lock.close()
        if kind and not self.pending and self.saved_step and not self.args.eval_only:
            say_once(f"step {self.saved_step} is saved: {how_to_go_on(self.out)}")
        if kind is None and self.problem:
            raise UserError(self.problem)

    # ---------------------------------------------------------------------------------------------
    # Resume
    # ---------------------------------------------------------------------------------------------

    def resume(self, roles: Roles, steps: int, identity: Container[str]) -> None:
        """Load the checkpoint that --resume asks for, if there is one.

        Args:
            steps: --steps, or those of --max_epochs.
            identity: the flags that make it another run: --resume auto does not go on from the
                checkpoint of another one. All other changes are printed.

        Raises:
            UserError: no checkpoint where one must be, one where none may be, none that can be
                read, one of another run, or one that does not fit into the models.
        """
        self.roles = roles
        self.fingerprint["steps"] = steps
        if self.path is None:
            say_once(f"starting from step 0: no complete checkpoint in {self.folder}")
            return
        if self.saved["step"] > steps and not self.args.eval_only:
            raise UserError(
                f"{self.path} is already beyond --steps {steps}; raise --steps, or start another --out "
                "from an earlier checkpoint"
            )
        changed = self.compare(self.saved.pop("fingerprint"), identity)
        # A critic, say, that --critic_model has replaced is not the one that was saved.
        stay = {role: part for role, part in roles.items() if f"{role}_model" not in changed}
        load_training_state(self.path, stay)
        with raise_on_all_ranks(f"{self.path / 'state.json'}: "):
            self.state.load_state_dict(self.saved, set(changed))
        self.committed_step = self.saved_step = self.state.step
        message = f"resuming from {self.path}"
        say_once(message + (f"; changed: {'; '.join(changed.values())}" if changed else ""))

    def compare(self, before: dict, identity: Container[str]) -> dict[str, str]:
        """How flags, or what they name, have changed, by name. Raises UserError: this is another run."""
        changed = {}
        for name, old in before.items():
            new = self.fingerprint.get(name, old)
            if new != old and name in VERSIONS:
                say_once(f"warning: {self.path} was saved with {name} {old}; this is {new}")
            elif new != old:
                changed[name] = f"--{name} {old!r} -> {new!r}"
        if self.args.eval_only:  # it changes nothing: only the model has to be the same
            identity = MODEL_IDENTITY
        others = [text for name, text in changed.items() if name in identity]
        if others and self.args.resume == "auto":
            raise UserError(
                f"{self.path} is of another run: {'; '.join(others)}. Choose another --out; with "
                f"--resume {self.path} as well it starts from this checkpoint"
            )
        return changed

    @cached_property
    def saved(self) -> dict:
        """state.json of `path`; {} to start from step 0. All ranks must ask. Raises UserError."""
        with raise_on_all_ranks():
            return read_state(self.path, form_of(self.state.state_dict())) if self.path else {}

    @cached_property
    def path(self) -> Path | None:
        """The newest checkpoint of --out whose files are as they were written; without any, or for an
        evaluation, that which --resume names; None to start from step 0. All ranks must ask. Raises
        UserError."""
        choice = self.args.resume
        with raise_on_all_ranks(f"{self.folder}: "):
            ours = [path for _, path in step_folders(self.folder)] if is_main() else []
        candidates = from_main(ours)
        if choice == "never" and (candidates or from_main((self.out / "metrics.jsonl").exists())):
            raise UserError(f"--resume never: {self.out} already holds a run; choose another --out")
        if choice not in ("auto", "never"):
            with raise_on_all_ranks(f"--resume {choice}: "):
                named = self.find_named(choice, candidates) if is_main() else []
            candidates = from_main(named)
        problem = ""
        for path in candidates:
            problem = find_damage(path)
            if not problem:
                return path
            self.damaged.add(path)
            say_once(f"warning: not resumed from: {path}: {problem}")
        if problem:  # which does not mean to start over
            raise UserError(
                f"no checkpoint that can be resumed from: {path}: {problem}. Start again once its "
                "files can be read, or choose another --out"
            )
        return None

    def find_named(self, choice: str, ours: list[Path]) -> list[Path]:
        """The checkpoints that --resume PATH means, newest first: of a run, of its checkpoints, or a
        single one; but ``ours`` once this --out has some, as when a job is requeued. Raises ValueError,
        OSError."""
        place = follow_pointer(choice).resolve()
        folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
        named = [path for _, path in step_folders(folder)] if folder.is_dir() else []
        if not named and (folder / "COMMITTED.json").exists():
            named = [folder]
        if not named and (place / "config.json").exists():
            raise ValueError("this is a model and no checkpoint of a run: pass it as --model")
        if not named:
            raise ValueError("no complete checkpoint there")
        if not ours or self.args.eval_only:
            return named
        if named[0].parent == self.folder.resolve() and named[0].name != ours[0].name:
            raise ValueError(
                "this is a checkpoint of this --out itself: leave out --resume to go on from the newest "
                "one, or choose another --out to start from this one"
            )
        return ours

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
        scalars = self.state.state_dict() | {"fingerprint": self.fingerprint}
        text = json.dumps(scalars, indent=1, allow_nan=False)
        copies: Any = self.stager.stage(training_state(self.roles))
        self.writer = Writer(self.unfinished(step), copies, self.args.save_strategy, self.group)
        self.pending = step, self.thread.submit(self.write, self.writer, copies, step, text)
        self.saved_step = step
        if self.args.save_blocking:
            self.finish()
        self.waited += time.perf_counter() - started

    def unfinished(self, step: int) -> Path:
        """The folder that is written, before it becomes step-N."""
        return self.folder / f".tmp-step-{step}"

    def write(
        self, writer: Writer, copies: dict[str, Tensor], step: int, text: str
    ) -> dict[str, str]:
        """In the thread: write this rank's files; their sha256. Raises OSError; CheckpointException:
        of any rank's files."""
        folder = self.unfinished(step)
        dcp.save(copies, storage_writer=writer, process_group=self.group)
        writer.busy = True
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
        unless it is the last save; the next one tries again. Raises UserError: MOST_FAILURES in a row."""
        if self.pending is None:
            return
        (step, done), self.pending = self.pending, None
        self.problem = ""
        digests, failed, waited = self.wait_for(done)
        parts = gather_objects((digests, failed, waited))
        # of the rank that failed, if one has, and not of those that waited for it
        problems = [part[1] for part in parts if part[1]] or [part[2] for part in parts if part[2]]
        try:
            with raise_on_all_ranks():
                if problems:
                    raise OSError(problems[0])
            with raise_on_all_ranks(f"{self.place}: "):
                if is_main():
                    self.commit(step, {name: part[0][name] for part in parts for name in part[0]})
        except UserError as error:
            self.problem = f"the checkpoint of step {step} was not saved: {error}"
            self.saved_step, self.failed = self.committed_step, self.failed + 1
            if is_main():  # the disk may be full of it
                shutil.rmtree(self.unfinished(step), ignore_errors=True)
            say_once(f"warning: {self.problem}")
            if self.failed == MOST_FAILURES:
                problem = f"{self.failed} saves in a row have failed; {self.problem}"
                raise UserError(problem) from error
            # the old one may wait for ranks that have given up
            self.thread, self.group = self.make_writer()
        else:
            self.committed_step, self.failed = step, 0

    def wait_for(self, done: Future) -> tuple[dict[str, str], str, str]:
        """The sha256 of each file that this rank has written; what has failed, and where; and for what
        this rank has waited in vain."""
        limit = 0.8 * self.timeout  # less than the other ranks wait for this one
        try:
            return done.result(limit), "", ""
        except TimeoutError:
            GIVEN_UP.append(done)
            problem = f"{self.place}: not written within {limit:g} s, 0.8 of --timeout"
            return ({}, problem, "") if self.writer and self.writer.busy else ({}, "", problem)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            return {}, f"{self.places[rank]}: {cause}", ""
        except (OSError, ValueError) as error:
            return {}, f"{self.place}: {error}", ""
        except RuntimeError as error:  # a collective that another rank has left
            return {}, "", f"{self.place}: {error}"

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
        self.damaged.discard(final)
        sync_folder(self.folder)
        write_pointer(self.folder / "latest", final.name)
        self.delete_old(step)

    def delete_old(self, step: int) -> None:
        """Delete checkpoints beyond --keep_last and --keep_gb, but not that of this ``step``; what is
        damaged counts for neither."""
        count, size, limit = 0, 0, self.args.keep_gb * 1e9 or math.inf
        for path in (path for number, path in step_folders(self.folder) if number <= step):
            if path not in self.damaged:
                size += sum(file.stat().st_size for file in path.iterdir())
            if count and (count >= self.args.keep_last or size > limit):
                shutil.rmtree(path, ignore_errors=True)  # what is left is deleted the next time
            count += path not in self.damaged

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
        """Write models to <out>/NAME/step-N if --export_every says so, by their names there, and
        averages of their weights to <out>/NAME_ema/step-N. Raises UserError if the last export
        fails; earlier ones only warn."""
        if self.args.eval_only or not due(step, self.args.export_every, last):
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
                    f"{how_to_go_on(self.out)} and exports them"
                )
            if problem:
                say_once(f"warning: the weights were not exported to {folder}: {problem}")
