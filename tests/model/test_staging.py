"""common/model/staging.py: one copy of a training state, exact whatever the training does next, written without another."""

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

from common.model import staging
from common.model.staging import Staging
from torch.utils._python_dispatch import TorchDispatchMode


def state() -> dict[str, torch.Tensor]:
    """Tensors of several types, an odd number of bytes, a scalar, and one that lies askew."""
    generator = torch.Generator().manual_seed(0)
    return {"half": torch.randn(7, generator=generator).bfloat16(), "step": torch.tensor(3.0),
            "count": torch.tensor([5]), "askew": torch.randn(4, 6, generator=generator).T}


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
    """The second time in the same memory."""
    training, kept, places = state(), Staging(), []
    for _ in range(2):
        before = {name: x.clone() for name, x in training.items()}
        with Copies() as copies:
            staged = kept.stage(training)
        assert copies.written == sum(x.nbytes for x in before.values())
        for x in training.values():
            x.zero_()  # the next optimizer step
        assert all(torch.equal(x, before[name]) and x.dtype == before[name].dtype for name, x in staged.items())
        places.append(kept.buffer.data_ptr())
    assert places[0] == places[1]


class FakeCuda:
    """Streams, devices and pinning that only note their order; a failure to pin stays the last error."""

    def __init__(self, register: int = 0):
        self.order = []
        self.register, self.last_error = register, 0

    def is_initialized(self) -> bool:
        return True

    def Stream(self):
        return SimpleNamespace(device="GPU 3", wait_stream=lambda other: self.order.append("copy waits for training"),
                               record_event=lambda: SimpleNamespace(synchronize=lambda: self.order.append("writer waits")))

    def current_stream(self):
        return SimpleNamespace(wait_event=lambda event: self.order.append("training waits for copy"))

    def stream(self, stream):
        self.order.append("copy")
        return nullcontext()

    def set_device(self, device):
        self.order.append(f"writer uses {device}")

    def pin(self, *arguments):
        self.order.append("pin")
        self.last_error = self.register
        return self.register

    def cudart(self):
        return SimpleNamespace(cudaHostRegister=self.pin)

    def launch(self, *arguments, **named):
        """A kernel: the launch is blamed for the last error, and clears it."""
        blamed, self.last_error = self.last_error, 0
        if blamed:
            raise RuntimeError("CUDA error")


@pytest.fixture
def fake(monkeypatch):
    """fake(failure): torch with such a CUDA, which cannot pin if the failure is not 0."""
    def patch(failure: int = 0) -> FakeCuda:
        cuda = FakeCuda(failure)
        monkeypatch.setattr(staging, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda, "ones": cuda.launch}))
        return cuda

    return patch


def test_order_of_streams(fake):
    """The copy waits for what training has done, training for the copy, the writer, on the same GPU, for its end;
    pinned once."""
    cuda, kept = fake(), Staging()
    one = ["copy waits for training", "copy", "training waits for copy"]
    kept.stage(state())
    kept.wait()
    assert cuda.order == ["pin", *one, "writer uses GPU 3", "writer waits"]
    kept.stage(state())
    assert cuda.order[6:] == one


def test_a_failure_to_pin_is_not_blamed_on_training(fake, capsys):
    cuda, kept = fake(failure=2), Staging()
    for _ in range(2):
        kept.stage(state())
        cuda.launch()
    assert cuda.order.count("pin") == 1
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
from common.model import checkpoint
from common.flags import CheckpointArgs

def resident(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

distributed.start(60.0, 0)
tensors = {f"actor.{i}": torch.full((4, 2**20), float(i)) for i in range(16)}            # 256 MiB
checkpoint.training_state = lambda trained: tensors
peaks = []
with checkpoint.Checkpoints(Path(sys.argv[2]), CheckpointArgs(), 60.0) as checkpoints:
    for step in (1, 2):
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")                                     # begin a new peak
        checkpoints.save(step, {}, {})
        for tensor in tensors.values():
            tensor.add_(1)                                                                # the next optimizer step
        checkpoints.finish()
        peaks.append((resident("VmHWM") - before) / 2**28)
print(json.dumps(peaks))
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
