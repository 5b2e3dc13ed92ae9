"""Functions of many small kernels as one, by torch.compile, where that works."""

import os
from typing import Any, Callable

import torch
from torch import Tensor


class Fused:
    """A function of tensors that is compiled at its first call on a GPU, for any sizes. If that
    fails, a warning is printed once and the function runs uncompiled.

    Args:
        devices: types of device where it is compiled.
    """

    def __init__(self, function: Callable, devices: tuple[str, ...] = ("cuda",)):
        self.function, self.devices = function, devices
        self.compiled: Any = None
        self.problem = ""

    def __call__(self, *tensors: Tensor) -> Any:
        if self.problem or tensors[0].device.type not in self.devices:
            return self.function(*tensors)
        self.compiled = self.compiled or torch.compile(self.function, dynamic=True)
        try:
            return self.compiled(*tensors)
        except Exception as error:  # compilers raise anything
            self.problem = describe(error)
        warn_of(self.function.__name__, self.problem)
        return self.function(*tensors)


def describe(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def warn_of(what: str, problem: str) -> None:
    """Say that something did not compile."""
    rank = os.environ.get("RANK", "0")
    print(
        f"warning: rank {rank}: torch.compile of {what} failed, which costs only time: {problem}",
        flush=True,
    )
