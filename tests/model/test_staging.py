"""common/staging.py: one copy of a training state, exact whatever the training does next, written without another."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

from common import distributed
from common.model import staging
from common.model.staging import Staging, write_safetensors
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode


def state() -> dict[str, torch.Tensor]:
    """A shard, tensors of other types, an odd number of bytes, a scalar, an empty one, and one that lies askew."""
    ranks = distributed.start(60.0, 0)
    generator = torch.Generator().manual_seed(0)
    shard = DTensor.from_local(torch.randn(5, 3, generator=generator), ranks.mesh, [Shard(0)])
    return {"shard": shard, "half": torch.randn(7, generator=generator).bfloat16(), "step": torch.tensor(3.0),
            "empty": torch.zeros(0, 4), "count": torch.tensor([5]), "askew": torch.randn(4, 6, generator=generator).T}


def values(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: (x.to_local() if isinstance(x, DTensor) else x).clone() for name, x in tensors.items()}


class Copies(TorchDispatchMode):
    """Bytes that operators inside have written."""

    def __init__(self):
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and torch.is_tensor(result) and "empty" not in str(function):
            self.written += result.nbytes
        return result


def test_a_copy_stands_apart_and_is_made_once():
    training, kept = state(), Staging()
    before = values(training)
    with Copies() as copies:
        staged = kept.stage(training)
    assert copies.written == sum(x.nbytes for x in before.values())
    for tensor in values(training).values():
        tensor.zero_()
    for x in training.values():
        (x.to_local() if isinstance(x, DTensor) else x).zero_()  # the next optimizer step
    assert all(torch.equal(x, before[name]) for name, x in values(staged).items())
    assert isinstance(staged["shard"], DTensor) and staged["shard"]._spec == training["shard"]._spec


def test_the_buffer_is_kept():
    """The second save allocates nothing; a larger state gets a larger one."""
    training, kept = state(), Staging()
    kept.stage(training)
    place = kept.buffer.data_ptr()
    with Copies() as copies:
        kept.stage(training)
    assert kept.buffer.data_ptr() == place and copies.written == sum(x.nbytes for x in values(training).values())
    staged = kept.stage(training | {"more": torch.ones(10000)})
    assert torch.equal(staged["more"], torch.ones(10000)) and kept.buffer.numel() > 40000


def test_files_are_those_of_safetensors(tmp_path):
    written = {name: x for name, x in values(state()).items()}
    with open(tmp_path / "ours.safetensors", "wb") as stream:
        write_safetensors(stream, written, {"format": "pt"})
    found = load_file(tmp_path / "ours.safetensors")
    assert found.keys() == written.keys()
    assert all(torch.equal(x, written[name]) and x.dtype == written[name].dtype for name, x in found.items())


class FakeCuda:
    """Streams and pinning that only note their order."""

    def __init__(self, register: int = 0):
        self.order = []
        self.register = register

    def is_initialized(self) -> bool:
        return True

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: self.order.append("copy waits for training"),
                               record_event=lambda: SimpleNamespace(synchronize=lambda: self.order.append("writer waits")))

    def current_stream(self):
        return SimpleNamespace(wait_event=lambda event: self.order.append("training waits for copy"))

    def stream(self, stream):
        self.order.append("copy")
        return nullcontext()

    def cudart(self):
        return SimpleNamespace(cudaHostRegister=lambda *given: self.order.append("pin") or self.register,
                               cudaHostUnregister=lambda *given: self.order.append("unpin"))


def test_order_of_streams(monkeypatch, capsys):
    """The copy waits for what training has done, training for the copy, the writer for its end; pinned once, and again
    only for a larger state."""
    cuda = FakeCuda()
    monkeypatch.setattr(staging, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    kept, training = Staging(), state()
    one = ["copy waits for training", "copy", "training waits for copy"]
    kept.stage(training)
    kept.wait()
    assert cuda.order == ["pin", *one, "writer waits"]
    kept.stage(training)
    assert cuda.order[5:] == one
    kept.stage(training | {"more": torch.ones(10000)})
    assert cuda.order[8:] == ["unpin", "pin", *one] and not capsys.readouterr().out
    monkeypatch.setattr(staging, "torch", SimpleNamespace(**{**vars(torch), "cuda": FakeCuda(register=2)}))
    Staging().stage(training)
    assert "could not be pinned (2); saves hold training up for longer" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_of_a_gpu_is_exact_and_pinned():
    """Though the next steps are already on their way."""
    large = torch.arange(2**26, device="cuda", dtype=torch.float32)  # 256 MiB
    kept = Staging()
    for _ in range(2):
        expected = large.cpu()
        staged = kept.stage({"large": large})["large"]
        for _ in range(10):
            large.add_(1)
        kept.wait()
        assert staged.is_pinned() and torch.equal(staged, expected)


PEAKS = """
import json, re, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from common import distributed
import torch
from common import checkpoint
from common.flags import CheckpointArgs

def resident(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

distributed.start(60.0, 0)
tensors = {f"actor.{i}": torch.full((4, 2**20), float(i)) for i in range(16)}            # 256 MiB
checkpoint.training_state = lambda trained: tensors
found = []
with checkpoint.Checkpoints(Path(sys.argv[2]), CheckpointArgs(), 60.0) as checkpoints:
    for step in (1, 2):
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")                                     # begin a new peak
        checkpoints.save(step, {}, {"skipped_steps": {}})
        for tensor in tensors.values():
            tensor.add_(1)                                                                # the next optimizer step
        checkpoints.finish()
        found.append((resident("VmHWM") - before) / 2**28)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks are read as Linux tells them")
def test_a_save_needs_one_copy_of_host_memory(tmp_path):
    """The first save 1.0 times the state, from then on what is there already; both exact, though training went on."""
    (tmp_path / "program.py").write_text(PEAKS)
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, str(tmp_path / "program.py"), str(ROOT), str(tmp_path / "out")], env=clean,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert 0.9 < first < 1.2 and second < 0.2, (first, second)
    for step in (1, 2):
        (file,) = (tmp_path / "out" / "checkpoints" / f"step-{step}").glob("*.safetensors")
        for name, tensor in load_file(file).items():
            assert (tensor == int(name.split(".")[1]) + step - 1).all()
