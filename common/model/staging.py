"""The copy in host memory that a save is written from, while training goes on.

One buffer per process, allocated at the first save and kept: pinned where there is a GPU, so that a
save is one copy from the device, on a stream of its own. The training stream waits for that copy
and for nothing else; the host does not wait at all.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from common.files import say

ALIGNMENT = 64  # bytes


class Staging:
    """Copies of this rank's shards; torch's own stagers pin every tensor apart, or copy twice."""

    def __init__(self):
        self.buffer: Tensor | None = None  # (bytes,) uint8, for the one state that a run has
        self.stream: torch.cuda.Stream | None = None
        self.copied: torch.Event | torch.cuda.Event | None = None

    @torch.no_grad()
    def stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors in host memory, complete once `wait` has returned. They may be changed
        at once: what the current stream does next, it does after the copy."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
        if self.buffer is None:
            self.buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            if torch.cuda.is_initialized():
                pin(self.buffer)
                self.stream = torch.cuda.Stream()
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        copies = {}
        with torch.cuda.stream(self.stream):  # of None: nothing
            for (name, tensor), part in zip(tensors.items(), self.buffer.split(sizes)):
                copy = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[name] = copy.copy_(tensor, non_blocking=True)
        if self.stream:
            self.copied = self.stream.record_event()
            torch.cuda.current_stream().wait_event(self.copied)
        return copies

    def wait(self) -> None:
        """Return when the copy is complete. Called first in the thread that writes."""
        if self.stream is not None and self.copied is not None:
            # A new thread would use GPU 0, and every rank would have a context there.
            torch.cuda.set_device(self.stream.device)
            self.copied.synchronize()


def pin(buffer: Tensor) -> None:
    """Pin host memory, or warn. Not by pin_memory, which rounds up to a power of two."""
    size = buffer.numel()
    cudart: Any = torch.cuda.cudart()
    problem = cudart.cudaHostRegister(buffer.data_ptr(), size, 0)
    if int(problem) == 0:
        return
    say(
        f"warning: {size / 2**30:.1f} GiB of host memory could not be pinned ({problem}); saves "
        "hold training up for longer"
    )
    # The failure stays CUDA's last error until a kernel is launched, which is blamed for it and
    # clears it; torch has no binding of cudaGetLastError. So launch one that nobody needs.
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
