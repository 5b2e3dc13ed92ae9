"""The copy in host memory that a save is written from, while training goes on.

One buffer per process, allocated at the first save and kept: pinned where there is a GPU, so that a
save is one copy from the device, on a stream of its own. The training stream waits for that copy
and for nothing else; the host does not wait at all.

    Staging            the buffer: `stage` begins a copy, `wait` returns when it is done
    write_safetensors  from the buffer into a file, without another copy
"""

import json
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from common.model.fsdp import shard_of

ALIGNMENT = 64  # bytes
# how safetensors names the types that a training state has
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


class Staging(AsyncStager):
    """Copies of this rank's shards; torch's own stagers pin every tensor apart, or copy twice.

    Attributes:
        buffer: (bytes,) uint8, at least as large as the largest state so far.
    """

    _synchronize_after_execute = False  # the writer waits, not the training

    def __init__(self):
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.stream: torch.cuda.Stream | None = None
        self.copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors in host memory, complete once `wait` has returned. They may be changed
        at once: what the current stream does next, it does after the copy."""
        places, size = [], 0
        for tensor in state_dict.values():
            places.append(size)
            size += -(-shard_of(tensor).nbytes // ALIGNMENT) * ALIGNMENT
        self.reserve(size)
        if torch.cuda.is_initialized():
            self.stream = self.stream or torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
        copies = {}
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            for (name, tensor), place in zip(state_dict.items(), places):
                copies[name] = self.copy(tensor, place)
        if self.stream:
            self.copied = self.stream.record_event()
            torch.cuda.current_stream().wait_event(self.copied)
        return copies

    def copy(self, tensor: Tensor, place: int) -> Tensor:
        """One tensor, from byte ``place`` of the buffer on."""
        local = shard_of(tensor)
        kept = self.buffer[place : place + local.nbytes].view(local.dtype).view(local.shape)
        kept.copy_(local, non_blocking=True)
        if isinstance(tensor, DTensor):
            # not DTensor.from_local, which takes a shard back to the device of its mesh
            return DTensor(kept, tensor._spec, requires_grad=False)
        return kept

    def wait(self) -> None:
        """Return when the copy is complete."""
        if self.copied is not None:
            self.copied.synchronize()

    def reserve(self, size: int) -> None:
        """Make the buffer hold ``size`` bytes, and pin it where there is a GPU. Not by pin_memory,
        which rounds up to a power of two."""
        if self.buffer.numel() >= size:
            return
        pins = torch.cuda.is_initialized()
        if pins and self.buffer.numel():
            torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())
        self.buffer = torch.empty(0, dtype=torch.uint8)  # the old one is freed first
        self.buffer = torch.empty(size, dtype=torch.uint8)
        if not pins:
            return
        problem = torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), size, 0)
        if int(problem) != 0:
            print(
                f"warning: {size / 2**30:.1f} GiB of host memory could not be pinned ({problem}); "
                "saves hold training up for longer",
                flush=True,
            )


def write_safetensors(stream, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors of host memory as a safetensors file. The package's own `save` makes the whole
    file in memory first, up to two copies of it."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy())
