"""Several ranks on one GPU, each with its share of the memory: NCCL's calls, shards, CUDA graphs with
collectives, saves and resumes where there is no second GPU.

    torchrun --standalone --nproc_per_node 2 tests/one_gpu_ranks.py train_ppo_vl.py FLAGS

NCCL refuses ranks of one host with the same GPU. Here each says that it is a host, and what they send goes
through sockets of the loopback interface: right, but slow, since the processes take turns on the GPU. Nothing
that is timed so says anything about several GPUs. Without a GPU the script runs over gloo, as without this.
"""

import os
import runpy
import sys
from pathlib import Path

SHARE = 0.97  # of the GPU, for all ranks together
OUTSIDE = 2 * 2**30  # bytes of a rank beside torch's cache: CUDA's context, NCCL's buffers, graphs


def set_variables(rank: str) -> None:
    """What NCCL reads when it is loaded; and the device of every rank, the first."""
    os.environ |= {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "LOCAL_RANK": "0",
    }


def share_gpu(ranks: int) -> None:
    """Let this process see as many GPUs as there are ranks, and of the first its share of the memory."""
    import torch

    if not torch.cuda.is_available():
        return
    torch.cuda.init()  # which asks all GPUs that torch counts
    torch.cuda.set_device(0)
    memory_of_all = torch.cuda.mem_get_info
    _, whole = memory_of_all(0)
    share = int(SHARE * whole / ranks) - OUTSIDE
    torch.cuda.set_per_process_memory_fraction(share / whole, 0)

    def mem_get_info(device=None) -> tuple[int, int]:
        """Plans and slots go by what is free: here, of the share."""
        free, _ = memory_of_all(0)
        return max(0, min(free, share - torch.cuda.memory_reserved(0))), share

    torch.cuda.mem_get_info = mem_get_info
    torch.cuda.device_count = lambda: ranks


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path[0] = str(script.parent)  # as for a script that is started itself
    set_variables(os.environ["RANK"])
    share_gpu(int(os.environ["LOCAL_WORLD_SIZE"]))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
