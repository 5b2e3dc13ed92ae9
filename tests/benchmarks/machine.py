"""What figures were measured on: seconds, and ratios of seconds too, belong to a machine and to its load."""

import os
import platform
import time

import torch

SIDE, REPEATS = 1024, 10


def machine() -> str:
    """Cores, load and the speed of float32 matrix products of this process, the best of a few;
    takes under a second."""
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        left @ right
        seconds.append(time.process_time() - start)
    speed = 2 * SIDE**3 / min(seconds) / 1e9
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"torch {torch.__version__}: "
        f"{speed:.0f} GFLOP per CPU second in products of {SIDE} x {SIDE} ({torch.get_num_threads()} threads)"
    )


if __name__ == "__main__":
    print(machine())
