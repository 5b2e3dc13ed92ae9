"""CUDA graphs of a decoding step: eager steps at first, then a capture, then replays.

The step must be a function of device state alone. Weights are gathered to new addresses in every
rollout, so graphs live for one rollout.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch


class StepGraphs:
    """Graphs of one rollout, one per batch size and capacity, all in one memory pool.

    Args:
        eager_steps: steps at a batch size and capacity before these are captured. The first one
            also sets up what a capture needs: workspaces, kernels.
    """

    def __init__(self, eager_steps: int):
        self.eager_steps = eager_steps
        self.steps = Counter()  # by batch size and capacity
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def is_first(self, size: int, capacity: int) -> bool:
        """Whether `run` is going to capture the first of all graphs."""
        return not self.graphs and self.steps[size, capacity] >= self.eager_steps

    def run(self, step: Callable, size: int, capacity: int) -> None:
        """``step(size, capacity)`` for the slots 0..size-1, by its graph if there is one. Raises
        RuntimeError: it cannot be captured."""
        shape = size, capacity
        self.steps[shape] += 1
        if self.steps[shape] <= self.eager_steps:
            return step(size, capacity)
        if shape not in self.graphs:
            try:
                self.graphs[shape] = capture(step, size, capacity, self.pool)
            except RuntimeError as error:
                # ending a failed capture raises once more, without the cause
                cause = error.__context__ or error
                raise RuntimeError(
                    f"a CUDA graph of {size} slots could not be captured: {cause}; "
                    "--cuda_graphs off decodes without graphs"
                ) from error
        self.graphs[shape].replay()


def capture(step: Callable, size: int, capacity: int, pool: Any) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a step, which does not run, in a memory pool. Only addresses, batch size and
    capacity are baked in."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: CUDA calls of other threads meanwhile (NCCL's watchdog, a checkpoint being
    # written) must not invalidate the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step(size, capacity)
    return graph
