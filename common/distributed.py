"""Ranks: joining the process group, gathering, failing and stopping together.

    start                 join the process group -> Ranks: where this process stands in it
    Team                  ranks that decode the same samples
    to_device             a tensor goes to the GPU while the host goes on
    gather_objects        what every rank has, on every rank
    say_once              print what all ranks know
    raise_on_all_ranks    a user's mistake on any rank, raised on all of them
    stop_requested        a signal to one rank stops all of them after the step in progress

CPU tensors travel over gloo, GPU tensors over NCCL. Every rank calls, with whatever it has.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.ground.files import UserError, say
from common.ground.process import (
    EXIT_USER_ERROR,
    STOP_SIGNALS,
    Exit,
    end_with_others,
    watch_signals,
)

# torch 2.13 renamed both
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PATIENCE = 15  # seconds of waiting for other ranks before a line says so
# what srun and mpirun tell a process: how many of it were started, and which one it is
STARTED_TOGETHER = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True)
class Team:
    """Neighbouring ranks of a machine that decode the same samples, each with its pieces of the
    weights; alone, a rank decodes by itself."""

    size: int = 1
    rank: int = 0  # of this process among them
    group: Any = None

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the team, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def agree(self, x: Tensor) -> Tensor:
        """What the first rank has, in place: rounding must not lead them to different tokens."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def gather_objects(self, value: Any) -> list:
        """What each of the team has: numbers, text, tensors on the CPU."""
        return gather_objects(value, self.size, self.group)


ALONE = Team()  # a rank that decodes by itself


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among all of them."""

    world: int
    device: torch.device
    mesh: DeviceMesh
    team: Team


def attempt(function: Callable, *arguments: Any) -> tuple[Any, UserError | None]:
    """What a function returns before `start`, or its UserError, which `start` raises: ranks that wait
    there for this one would not hear of it."""
    try:
        return function(*arguments), None
    except UserError as error:
        return None, error


def start(
    timeout: float, hsdp: int, rollout_shards: int = 1, problem: UserError | None = None
) -> Ranks:
    """Join the process group; without torchrun this process is the only rank.

    Args:
        timeout: longest wait of a rank for the others, seconds.
        hsdp: ranks that share one copy of weights and optimizer; 0: all of them.
        rollout_shards: ranks of a team.
        problem: of this rank, see `attempt`.
    Raises:
        UserError: the problem of any rank, on all of them; more processes on this machine than GPUs,
            or ranks that hsdp or the team does not divide.
        Exit: not all ranks came in time, or this process is none of them.
    """
    world = expected_ranks()
    device, no_device = attempt(choose_device)
    device = device or torch.device("cpu")  # with which this rank joins, to say what is wrong
    problem, gpu = problem or no_device, device.type == "cuda"
    shape, names = (world,), ("shards",)
    if hsdp:
        if world % hsdp:
            raise UserError(f"--hsdp {hsdp} must divide the number of ranks, {world}")
        shape, names = (world // hsdp, hsdp), ("copies", "shards")
    if not dist.is_initialized():
        watch_signals()
        with waiting_for_ranks(world, timeout):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout)
            )
        end_with_others()
    with raise_on_all_ranks():
        if problem:
            raise problem
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if local % rollout_shards:  # a team would span machines
            raise UserError(
                f"--rollout_shards {rollout_shards} must divide the ranks of a machine, {local}"
            )
    if gpu:
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects now
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return Ranks(world, device, mesh, join_team(rollout_shards, timeout))


def expected_ranks() -> int:
    """The number of ranks by the environment, in which variables that are empty or missing are those of
    one process; one that is alone has nobody to meet at MASTER_ADDR. Raises Exit: RANK is none of them, or
    is missing where srun or mpirun has started several processes."""
    refuse_lone_tasks()
    of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    alone = os.environ.get("WORLD_SIZE") in (None, "", "1") and not of_torchrun
    for name, value in ONE_PROCESS.items():
        if not os.environ.get(name) or alone and name.startswith("MASTER"):
            os.environ[name] = value
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world:
        say(
            f"error: RANK={rank} is none of the ranks of WORLD_SIZE={world}: start all of them with "
            "torchrun, or unset both for one process",
            file=sys.stderr,
        )
        raise Exit(EXIT_USER_ERROR)
    return world


def refuse_lone_tasks() -> None:
    """Raises Exit: srun or mpirun has started several of this process without torchrun, each of which would
    be a run of its own."""
    for name, number in STARTED_TOGETHER.items():
        count = int(os.environ.get(name) or 1)
        if count == 1 or os.environ.get("RANK"):
            continue
        if os.environ.get(number, "0") == "0":
            say(
                f"error: {count} processes ({name}) were started without torchrun, and each would be a run "
                "of one rank: start a torchrun on each node, as launch/train.slurm does: srun "
                "--ntasks-per-node 1 torchrun --nnodes NODES --nproc_per_node 8 --rdzv_backend c10d "
                f"--rdzv_endpoint HOST:29400 {' '.join(sys.argv)}",
                file=sys.stderr,
            )
        raise Exit(EXIT_USER_ERROR)


@contextmanager
def waiting_for_ranks(world: int, timeout: float) -> Iterator[None]:
    """Say after a while which ranks this process waits for. Raises Exit: they did not come."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = f"{world} ranks at {place} (WORLD_SIZE={world}, {here} here)"
    patience = threading.Timer(PATIENCE, say, [f"waiting for {ranks}"])
    patience.daemon = True
    patience.start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        say(
            f"error: not all of {ranks} came within {timeout:g} s (--timeout): start all of them with "
            f"torchrun, or unset WORLD_SIZE for one process ({str(error).splitlines()[0]:.200})",
            file=sys.stderr,
        )
        raise Exit(EXIT_USER_ERROR) from error
    finally:
        patience.cancel()


def join_team(size: int, timeout: float) -> Team:
    """This rank's team, of so many neighbours: a collective."""
    if size == 1:
        return ALONE
    group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout))
    return Team(size, dist.get_rank() % size, group)


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


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``. The host does not wait for a GPU, which fetches pinned memory by
    itself; of other memory it would wait for what has more than 64 KiB."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def refuse_idle_gpus() -> None:
    """Raises UserError: the machine has GPUs that torch cannot use, and nobody has hidden them."""
    present = torch.cuda.device_count() > 0 or Path("/dev/nvidia0").exists()
    if not present or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    raise UserError(
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use this machine's "
        "GPUs: install a newer driver, or a build of torch for an older CUDA, as pytorch.org lists "
        "them; CUDA_VISIBLE_DEVICES= (empty) runs on CPUs"
    )


def warm_up(ranks: Ranks, size: int) -> None:
    """Run every collective of FSDP2 once on ``size`` bytes, in each group of ranks, and those of a
    team, on one number as well.

    NCCL connects and allocates its buffers at the first call of each kind. Left to the first
    update, that would be beside a cache that torch has filled.
    """
    for group in ranks.mesh.get_all_groups():
        members = dist.get_world_size(group)
        count = -(-size // 4 // members)
        shard = torch.zeros(count, device=ranks.device)
        whole = torch.zeros(count * members, device=ranks.device)
        all_gather(whole, shard, group=group)
        reduce_scatter(shard, whole, group=group)
        dist.all_reduce(shard, group=group)
    team = ranks.team
    if team.size > 1:
        for count in (size // 4, 1):
            team.agree(team.sum(torch.zeros(count, device=ranks.device)))


def world_size() -> int:
    """The number of ranks; 1 before the process group is joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank_here() -> int:
    """The rank of this process; 0 before the process group is joined."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is rank 0, which prints and writes what all ranks know."""
    return rank_here() == 0


def say_once(text: str) -> None:
    """Print what all ranks know: rank 0 does."""
    if is_main():
        say(text)


def gather_objects(value: Any, size: int | None = None, group: Any = None) -> list:
    """What each of all ranks has, or each of a group of that size."""
    size = world_size() if size is None else size
    gathered = [value] * size
    if size > 1:
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def from_main(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    return gather_objects(value)[0]


@contextmanager
def raise_on_all_ranks(prefix: str = ""):
    """A UserError or OSError inside, on any rank, becomes a UserError on every rank, with ``prefix``
    before its message: one rank raising alone would leave the others waiting. Of several ranks' mistakes
    the first is enough: they are mostly one, met with different samples. Any other exception is a bug: it
    leaves the block at once, and this rank's end ends the others."""
    problem = cause = None
    try:
        yield
    except (OSError, UserError) as error:
        problem, cause = f"{prefix}{error}", error
    problems = [problem for problem in gather_objects(problem) if problem is not None]
    if problems:
        raise UserError(problems[0]) from cause


def once_per_machine(function: Callable, *arguments: Any) -> None:
    """Call a function on the first rank of each machine, while the others wait. Raises UserError on every
    rank."""
    with raise_on_all_ranks():
        if os.environ.get("LOCAL_RANK") in (None, "", "0"):
            function(*arguments)


def run_on_main(flag: str, function: Callable, *inputs: Any) -> Any:
    """Call a function that runs code of the user on rank 0 only, and return its result on every rank: it
    may depend on chance or on a clock. Raises UserError on every rank, which names the ``flag``."""
    returned = None
    with raise_on_all_ranks(f"{flag}: "):
        if is_main():
            returned = function(*inputs)
    return from_main(returned)


def stop_requested() -> bool:
    """Whether any rank was asked to stop: the same answer on all of them."""
    return any(gather_objects(bool(STOP_SIGNALS)))
