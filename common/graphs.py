"""CUDA graphs of a decoding step: captured where they pay, checked once, left out where they fail.

    run -> eager steps at first, then a capture -> the first replay against an eager step -> replays

The step must be a function of device state alone; what it reads and writes is `state`. Weights are
gathered to new addresses in every rollout, so graphs live for one rollout; what went wrong with
them is remembered for all later ones.
"""

import os
from typing import Any, Callable

import torch
from torch import Tensor

from common import logprobs

# Why graphs are no longer used in this process; empty: nothing is wrong.
PROBLEMS: list[str] = []


class StepGraphs:
    """Graphs of one rollout, one per batch size, all in one memory pool.

    Args:
        state: by name, one row per slot: "last" token and "out_logprobs", "done", and counters.
        eager_steps: at a batch size before it is captured. The first one also sets up what a
            capture needs: workspaces, kernels.
        dtype: of the model.
        repeatable: whether a step can be run twice. One that moves the states of linear attention
            on cannot: no replay is then compared with it.
    """

    def __init__(
        self, state: dict[str, Tensor], eager_steps: int, dtype: torch.dtype, repeatable: bool
    ):
        self.state, self.eager_steps, self.dtype = state, eager_steps, dtype
        self.steps: dict[int, int] = {}  # by batch size
        self.graphs: dict[int, Any] = {}
        self.pool: Any = None
        self.compared = not repeatable

    def run(self, step: Callable, size: int, capacity: int) -> None:
        """``step(size, capacity)`` for the slots 0..size-1, by its graph if there is one."""
        self.steps[size] = self.steps.get(size, 0) + 1
        if not PROBLEMS and size not in self.graphs and self.steps[size] > self.eager_steps:
            self.add(step, size, capacity)
        if PROBLEMS or size not in self.graphs:
            step(size, capacity)
        elif self.compared:
            self.graphs[size].replay()
        else:
            self.compare(step, size, capacity)

    def add(self, step: Callable, size: int, capacity: int) -> None:
        """Capture a step, which does not run it. One that cannot be captured is left eager."""
        before = torch.cuda.current_stream() if torch.cuda.is_available() else None
        try:
            self.graphs[size], self.pool = capture(step, size, capacity, self.pool)
        except RuntimeError as error:
            if before is not None:  # a capture that fails leaves its own stream behind
                torch.cuda.set_stream(before)
            self.give_up(f"a CUDA graph of {size} slots could not be captured: {error}")

    def compare(self, step: Callable, size: int, capacity: int) -> None:
        """One step, eager and by its graph, from the same state. The keys and values that the
        second one stores are those of the first."""
        begin = cloned(self.state)
        live = torch.nonzero(~begin["done"][:size])[:, 0]  # (b,) slots
        step(size, capacity)
        if not len(live):  # nothing to compare
            return
        eager = cloned(self.state)
        restore(self.state, begin)
        self.graphs[size].replay()
        problem = difference(eager, self.state, live, logprobs.gap_limit(self.dtype))
        self.compared = True
        if problem:
            restore(self.state, eager)
            self.give_up(
                f"the CUDA graph of {size} slots does not reproduce the eager step: {problem}"
            )

    def give_up(self, problem: str) -> None:
        """Say so, and decode eagerly from now on."""
        self.graphs.clear()
        PROBLEMS.append(problem)
        rank = os.environ.get("RANK", "0")
        print(f"warning: rank {rank}: {problem}; decoding goes on without graphs", flush=True)


def capture(step: Callable, size: int, capacity: int, pool: Any) -> tuple[Any, Any]:
    """A CUDA graph of a step, and its memory pool: a new one if ``pool`` is None. Only addresses,
    batch size and capacity are baked in."""
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    graph = torch.cuda.CUDAGraph()
    # thread_local: CUDA calls of other threads meanwhile (NCCL's watchdog, a checkpoint being
    # written) must not invalidate the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step(size, capacity)
    return graph, pool


def cloned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def restore(state: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Put saved values back, at the same addresses."""
    for name, tensor in state.items():
        tensor.copy_(saved[name])


def difference(
    eager: dict[str, Tensor], replayed: dict[str, Tensor], live: Tensor, limit: float
) -> str:
    """How two runs of a step differ in the slots ``live`` (b,) beyond rounding, which may turn a
    near tie between two tokens; "" if they do not."""
    same = eager["last"][live] == replayed["last"][live]  # (b,) whose new tokens are the same
    others = len(live) - int(same.sum())
    if others > max(1, len(live) // 8):
        return f"{others} of {len(live)} tokens differ"
    slots = live[same]
    # (b', longest): only the newest token's entry is new
    gaps = (eager["out_logprobs"][slots] - replayed["out_logprobs"][slots]).abs()
    gap = float(gaps.sum()) / max(1, len(slots))
    return "" if gap <= limit else f"log-probs differ by {gap:.3g} on average, at most {limit:.3g}"
