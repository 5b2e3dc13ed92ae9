"""Ranks: joining the process group, gathering, failing and stopping together.

    start                          join the process group -> Ranks: where this process stands in it
    warm_up                        the first collectives, while memory is still free
    gather_ragged, gather_objects     what every rank has, on every rank
    from_main                      what rank 0 has, on every rank
    raise_on_all_ranks             one message from rank 0, raised on all ranks
    stop_requested                 a signal to one rank stops all of them after the step in progress

CPU tensors travel over gloo, GPU tensors over NCCL. Every rank calls, with whatever it has.
"""

import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common import process
from common.process import UserError

ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among all of them."""

    world: int
    device: torch.device
    mesh: DeviceMesh


def start(timeout: float, hsdp: int) -> Ranks:
    """Join the process group; without torchrun this process is the only rank.

    Args:
        timeout: longest wait of a rank for the others, seconds.
        hsdp: ranks that share one copy of weights and optimizer; 0: all of them.
    Raises:
        UserError: more processes on this machine than GPUs, or ranks that hsdp does not divide.
    """
    for name, value in ONE_PROCESS.items():
        os.environ.setdefault(name, value)
    world = int(os.environ["WORLD_SIZE"])
    device = choose_device()
    shape, names = (world,), ("shards",)
    if hsdp:
        if world % hsdp:
            raise UserError(f"--hsdp {hsdp} must divide the number of ranks, {world}")
        shape, names = (world // hsdp, hsdp), ("copies", "shards")
    if not dist.is_initialized():
        options: dict[str, Any] = {"backend": "gloo"}
        if device.type == "cuda":
            options["backend"] = "cpu:gloo,cuda:nccl"
            # NCCL connects now. Not with two dimensions: torch would then make their groups by
            # splitting the communicators of both back-ends, which not every version can.
            options["device_id"] = None if hsdp else device
        dist.init_process_group(**options, timeout=timedelta(seconds=timeout))
    return Ranks(world, device, init_device_mesh(device.type, shape, mesh_dim_names=names))


def choose_device() -> torch.device:
    """This process's GPU, or the CPU of a machine without GPUs. Raises UserError: torch cannot use
    the GPUs, or there are too few."""
    if not torch.cuda.is_available():
        refuse_idle_gpus()
        # busy ranks on the same cores slow each other tenfold
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        return torch.device("cpu")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if processes > gpus:
        raise UserError(
            f"{processes} processes were started on this machine, but torch sees {gpus} GPUs: use "
            f"--nproc_per_node {gpus}, or set CUDA_VISIBLE_DEVICES= (empty) to run on CPUs"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def refuse_idle_gpus() -> None:
    """Raises UserError: the machine has GPUs that torch cannot use, and nobody has hidden them."""
    present = torch.cuda.device_count() > 0 or Path("/dev/nvidia0").exists()
    if not present or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    version = Path("/proc/driver/nvidia/version")
    words = version.read_text().split() if version.exists() else []
    driver = next((word for word in words if word.replace(".", "").isdigit()), "unknown")
    raise UserError(
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use this machine's "
        f"GPUs (driver {driver}): install a newer driver, or a build of torch for an older CUDA, as "
        "pytorch.org lists them; CUDA_VISIBLE_DEVICES= (empty) runs on CPUs"
    )


def warm_up(ranks: Ranks, size: int) -> None:
    """Run every collective of FSDP2 once on ``size`` bytes, in each group of ranks.

    NCCL connects and allocates its buffers at the first call of each kind. Left to the first
    update, that would be beside a cache that torch has filled.
    """
    for group in ranks.mesh.get_all_groups():
        members = dist.get_world_size(group)
        count = -(-size // 4 // members)
        shard = torch.zeros(count, device=ranks.device)
        whole = torch.zeros(count * members, device=ranks.device)
        dist.all_gather_into_tensor(whole, shard, group=group)
        dist.reduce_scatter_tensor(shard, whole, group=group)
        dist.all_reduce(shard, group=group)


def world_size() -> int:
    """The number of ranks; 1 before the process group is joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is rank 0, which prints and writes what all ranks know."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_ragged(tensor: Tensor) -> list[Tensor]:
    """Gather tensors whose first dimension differs between ranks: (n_r, ...) from every rank r."""
    if world_size() == 1:
        return [tensor]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([len(tensor)]))
    longest = max(int(size) for size in sizes)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [part[: int(size)] for part, size in zip(gathered, sizes)]


def gather_objects(value: Any) -> list:
    """Gather one small value from every rank."""
    if world_size() == 1:
        return [value]
    gathered = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def from_main(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    return gather_objects(value)[0]


@contextmanager
def raise_on_all_ranks(prefix: str = ""):
    """A ValueError or OSError inside, on any rank, becomes a UserError on every rank, with
    ``prefix`` before its message: one rank raising alone would leave the others waiting."""
    problem = None
    try:
        yield
    except (OSError, ValueError) as error:
        problem = f"{prefix}{error}"
    problems = [found for found in gather_objects(problem) if found]
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))


def check_same_flags(flags: dict[str, Any]) -> None:
    """Raises UserError on every rank if two ranks were started with different flags, as by hand on
    several nodes."""
    (host, first), *others = gather_objects([socket.gethostname(), flags])
    for there, other in others:
        different = [
            f"--{name} {first[name]!r} and {other[name]!r}"
            for name in first
            if first[name] != other[name]
        ]
        if different:
            raise UserError(
                f"the ranks on {host} and on {there} were started with different flags: "
                f"{'; '.join(different)}"
            )


def stop_requested() -> bool:
    """Whether any rank was asked to stop: the same answer on all of them."""
    return any(gather_objects(bool(process.STOP_SIGNALS)))
