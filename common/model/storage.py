"""One checkpoint's folder: its tensors, what was committed, and whether that is what is there.

COMMITTED.json lists every file with its size and sha256; it is written last. Tensors are
safetensors files that any number of ranks may have written, everything else is JSON: nothing is
read with pickle.

    CheckpointWriter, training_state       tensors of all roles, to files
    load_training_state                    and back, on any number of ranks
    complete_checkpoints                   folders with all files, by their sizes
    read_checkpoint                        a state, once every file is known to be as it was written
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult

from common.buffers import balanced_partition
from common.data.folder import read_json
from common.distributed import UserError, from_main, gather_objects, is_main, raise_on_all_ranks
from common.model.fsdp import Trainable
from common.model.staging import write_safetensors
from common.model.weights import is_finite

# By role: actor, critic, judge; and a reference that moves, which has no optimizer.
Roles = dict[str, Trainable | nn.Module]

TRAINED = StateDictOptions(
    ignore_frozen_params=True, flatten_optimizer_state_dict=True, strict=False
)
FROZEN = StateDictOptions(strict=False)  # of a role without an optimizer: all of its weights


# -------------------------------------------------------------------------------------------------
# Tensors
# -------------------------------------------------------------------------------------------------


def training_state(roles: Roles) -> dict[str, Any]:
    """Weights and optimizer state of all roles in one flat dictionary.

    The frozen weights of a trained role are those of --model; a role without an optimizer has all
    of its own.
    """
    state: dict[str, Any] = {}
    for role, part in roles.items():
        if isinstance(part, nn.Module):
            model, optimizer = get_model_state_dict(part, options=FROZEN), {}
        else:
            model, optimizer = get_state_dict(part.module, part.optimizer, options=TRAINED)
        state |= {f"{role}.model.{name}": value for name, value in model.items()}
        state |= {f"{role}.optimizer.{name}": value for name, value in optimizer.items()}
    return state


def load_training_state(path: Path, roles: Roles) -> None:
    """Read a checkpoint's tensors into models and optimizers; any number of ranks may have written
    it. Raises UserError: it lacks some."""
    state = training_state(roles)
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
    except dcp.api.CheckpointException as error:  # a role, say, that the saved run did not have
        raise UserError(f"{path} cannot be loaded: {describe_failure(error)}") from error
    for role, part in roles.items():
        model, optimizer = entries(state, f"{role}.model."), entries(state, f"{role}.optimizer.")
        if isinstance(part, nn.Module):
            set_model_state_dict(part, model, options=FROZEN)
        else:
            arguments = {"model_state_dict": model, "optim_state_dict": optimizer}
            set_state_dict(part.module, part.optimizer, **arguments, options=TRAINED)


def entries(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Those whose names begin with the prefix, without it."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


# -------------------------------------------------------------------------------------------------
# Writing
# -------------------------------------------------------------------------------------------------


class HashedStream:
    """A file opened for writing that takes the sha256 of what is written, so that it need not be
    read again."""

    def __init__(self, stream):
        self.stream, self.sha256 = stream, hashlib.sha256()

    def write(self, data) -> int:
        self.sha256.update(data)
        return self.stream.write(data)


class WrittenFile(NamedTuple):
    """Where a tensor has been written: the name of the file."""

    relative_path: str


class CheckpointWriter(HuggingFaceStorageWriter):
    """Writes this rank's tensors to a safetensors file if all are finite, in the background, from
    copies in host memory. What is read back is torch's own format, by its HuggingFaceStorageReader.

    Args:
        strategy: --save_strategy. All ranks write at a time, or those of one node, or one, which
            take turns by barriers of the ``group``.
        wait: returns when the copies are complete.
    Attributes:
        digests: sha256 of the files that this rank has written.
    """

    def __init__(
        self, folder: Path, strategy: str, group: dist.ProcessGroup, wait: Callable[[], None]
    ):
        super().__init__(str(folder), save_distributed=True)
        self.wait = wait
        self.digests: dict[str, str] = {}
        self.turns_group = group
        self.turn, self.turns = dist.get_rank(), dist.get_world_size()
        if strategy == "unrestricted":
            self.turn = self.turns = 0
        elif strategy == "single_node":
            self.turn = int(os.environ.get("GROUP_RANK", 0))
            self.turns = int(os.environ.get("GROUP_WORLD_SIZE", 1))

    def write_data(self, plan, planner):
        for _ in range(self.turn):
            dist.barrier(self.turns_group)
        done: torch.futures.Future = torch.futures.Future()
        try:
            self.wait()
            done.set_result(self.write_file(plan, planner))
        finally:  # also after an error, or the others would hang
            for _ in range(self.turns - self.turn):
                dist.barrier(self.turns_group)
        return done

    def write_file(self, plan, planner) -> list[WriteResult]:
        """One file of all tensors of the plan, none if it is empty. Raises ValueError, OSError."""
        tensors, places = {}, {}
        for item in plan.items:
            name, tensor = item.index.fqn, planner.resolve_data(item)
            if not is_finite(tensor):
                raise ValueError(f"{name} is not finite")
            tensors[name] = tensor
            places[name] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
        file = WrittenFile(f"shard-{plan.storage_data['shard_index']:05d}.safetensors")
        if tensors:
            metadata = {CUSTOM_METADATA_KEY: json.dumps(places), "format": "pt"}
            path = Path(self.path) / file.relative_path
            with open(path, "wb") as opened:
                stream = HashedStream(opened)
                write_safetensors(stream, tensors, metadata)
                opened.flush()
                os.fsync(opened.fileno())
            self.digests[path.name] = stream.sha256.hexdigest()
        sizes = [tensors[item.index.fqn].nbytes for item in plan.items]
        return [WriteResult(item.index, size, file) for item, size in zip(plan.items, sizes)]

    def finish(self, metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0. Raises OSError if a file that some rank has written is not in the folder that
        rank 0 sees."""
        folder = Path(self.path)
        names = {result.storage_data.relative_path for part in results for result in part}
        missing = ", ".join(sorted(name for name in names if not (folder / name).exists()))
        if missing:
            raise OSError(
                f"{missing}: written by other ranks, but not in {folder} on rank 0; is it shared?"
            )


def describe_failure(error: BaseException, hosts: list[str] | None = None) -> str:
    """One line; torch's CheckpointException carries the failures of the ranks, which run on
    ``hosts``."""
    failures = getattr(error, "failures", None) or {dist.get_rank(): error}
    rank, cause = next(iter(failures.items()))
    if isinstance(cause, tuple):
        cause = cause[0]
    host = f", host {hosts[rank]}" if hosts else ""
    first_line = str(cause).partition("\n")[0]
    return f"{type(cause).__name__} on rank {rank}{host}: {first_line}"


# -------------------------------------------------------------------------------------------------
# Which folders can be trusted
# -------------------------------------------------------------------------------------------------


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all that may be a checkpoint, newest first."""
    found = []
    for path in folder.glob("step-*"):
        step = path.name.removeprefix("step-")
        if step.isdecimal():
            found.append((int(step), path))
    return sorted(found, reverse=True)


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, newest first. `read_checkpoint` looks into their
    files."""
    complete = []
    for step, path in step_folders(folder):
        try:
            read_commit(path)
        except (OSError, ValueError):  # missing, truncated, or not ours: not complete
            continue
        complete.append((step, path))
    return complete


def read_commit(path: Path) -> dict[str, Any]:
    """COMMITTED.json of a checkpoint that holds exactly the files listed there, in these sizes.

    Raises:
        OSError, ValueError: say which file is missing, of another size, or not listed.
    """
    file = path / "COMMITTED.json"
    committed = read_json(file)
    files, step = committed["files"], committed["step"]
    if path.name != f"step-{step}":
        raise ValueError(f"COMMITTED.json is of step {step!r}")
    found = {other.name: other.stat().st_size for other in path.iterdir() if other != file}
    names = sorted({*files, *found, "state.json"})
    differing = ", ".join(name for name in names if files.get(name, -1) != found.get(name))
    if differing:
        raise ValueError(f"{differing}: missing, of another size, or not listed in COMMITTED.json")
    if committed["sha256"].keys() != files.keys():
        raise ValueError("COMMITTED.json does not have the sha256 of every file")
    return committed


def read_checkpoint(path: Path) -> tuple[dict[str, Any], str]:
    """The state of a checkpoint, and what is wrong with it: "" if every file is as it was written.
    The ranks share the reading; all must call."""
    committed, problem = {}, ""
    if is_main():
        try:
            committed = read_commit(path)
        except (OSError, ValueError) as error:
            problem = str(error)
    committed, problem = from_main([committed, problem])
    if problem:
        return {}, problem
    files = sorted(committed["files"].items())
    shares = balanced_partition([size for _, size in files], dist.get_world_size())
    names = [files[i][0] for i in sorted(shares[dist.get_rank()])]
    own = [find_damage(path / name, committed["sha256"][name]) for name in names]
    problems = [problem for part in gather_objects(own) for problem in part if problem]
    if problems:
        return {}, "; ".join(problems)
    with raise_on_all_ranks():
        state = read_json(path / "state.json")
    return state, ""


def find_damage(file: Path, digest: str) -> str:
    """What is wrong with one file of a checkpoint, whose sha256 was ``digest``; "" if nothing."""
    try:
        with open(file, "rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        return f"{file.name} cannot be read: {error}"
    if found != digest:
        return f"{file.name} is not what was written: its sha256 is another"
    return ""
