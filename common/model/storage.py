"""One checkpoint's folder: the shards of its tensors, and whether they are what was committed.

COMMITTED.json lists every file with its sha256; it is written last. Tensors are safetensors files
that any number of ranks may have written, everything else is JSON: nothing is read with pickle.

    training_state, load_training_state    tensors of all roles, and back, on any number of ranks
    own_shards, write_shards               what this rank writes of them, in a file
    step_folders, find_damage              what is there, and whether it is as it was written
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.tensor import DTensor

from common.distributed import gather_objects
from common.files import read_json, sha256
from common.model.fsdp import Trainable
from common.model.shards import shard_of
from common.model.vlm import Wrapper
from common.model.weights import Tensors, check_finite, save_tensors
from common.process import UserError

# By role: actor, critic, judge; and a reference that moves, which has no optimizer.
Roles = Mapping[str, Trainable | Wrapper]


# -------------------------------------------------------------------------------------------------
# Tensors
# -------------------------------------------------------------------------------------------------


def training_state(roles: Roles) -> Tensors:
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


# -------------------------------------------------------------------------------------------------
# Writing
# -------------------------------------------------------------------------------------------------


def own_shards(tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
    """What this rank writes: its parts of tensors, and metadata for torch's HuggingFaceStorageReader,
    their offsets in the whole ones."""
    shards, offsets = {}, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        local = shard_of(tensor)
        if not local.numel() or not is_writer(tensor, number):
            continue
        shards[name], start = local, [0] * local.ndim
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()
            start = list(chunk.offsets)
        offsets[name] = {SAVED_OFFSETS_KEY: start}
    return shards, {CUSTOM_METADATA_KEY: json.dumps(offsets)}


def is_writer(tensor: Tensor, number: int) -> bool:
    """Whether it is this rank that writes its part of tensor ``number``: those that hold the same
    part (--hsdp) take turns from tensor to tensor; what is not sharded is small."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    mesh = tensor.device_mesh
    return all(
        number % mesh.size(dim) == mesh.get_local_rank(dim)
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


def write_shards(folder: Path, shards: Tensors, metadata: dict[str, str]) -> dict[str, str]:
    """Write what `own_shards` returns into a safetensors file, unless there is nothing to write.
    Returns the sha256 of each file.

    Raises:
        ValueError, OSError: a number is not finite, or the file cannot be written.
    """
    if not shards:
        return {}
    check_finite(shards)
    path = folder / f"shard-{dist.get_rank() + 1:05d}.safetensors"
    save_tensors(path, shards, metadata)
    return {path.name: sha256(path)}


# -------------------------------------------------------------------------------------------------
# Which folders can be trusted
# -------------------------------------------------------------------------------------------------


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, newest first. Raises OSError: they cannot be listed, which
    does not mean that there is none."""
    names = os.listdir(folder) if os.path.lexists(folder) else []
    paths = [folder / name for name in names if re.fullmatch(r"step-\d+", name)]
    return sorted([(int(path.name[5:]), path) for path in paths], reverse=True)


def is_complete(path: Path) -> bool:
    """Whether all files of a checkpoint are there."""
    try:
        return all((path / name).exists() for name in read_json(path / "COMMITTED.json")["sha256"])
    except (OSError, ValueError):
        return False


def find_damage(path: Path) -> str:
    """What is wrong with a checkpoint; "" if its files are those that were committed. The ranks
    share the reading; all must call."""
    problems = []
    try:
        committed = read_json(path / "COMMITTED.json", {"sha256": {str: str}})["sha256"]
        for name in sorted(committed)[dist.get_rank() :: dist.get_world_size()]:
            if sha256(path / name) != committed[name]:
                problems.append(f"{name} is not what was written: its sha256 is another")
    except (OSError, ValueError) as error:
        problems.append(str(error))
    return "; ".join(dict.fromkeys(sum(gather_objects(problems), [])))
