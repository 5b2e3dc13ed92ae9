"""common/model/staging.py: one copy of a training state, exact whatever the training does next,
written without another."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from common.model import staging
from common.model.staging import Staging
from conftest import ROOT, seeded
from ranks import clean_environment


def state() -> dict[str, torch.Tensor]:
    """Tensors of several types, an odd number of bytes, a scalar, and one that lies askew."""
    generator = seeded(0)
    return dict(
        half=torch.randn(7, generator=generator).bfloat16(),
        step=torch.tensor(3.0),
        count=torch.tensor([5]),
        askew=torch.randn(4, 6, generator=generator).T,
    )


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
    training, stager, places = state(), Staging(), []
    for _ in range(2):
        before = {name: x.clone() for name, x in training.items()}
        with Copies() as copies:
            staged = stager.stage(training)
        assert copies.written == sum(x.nbytes for x in before.values())
        for x in training.values():
            x.zero_()  # the next optimizer step
        assert all(
            torch.equal(x, before[name]) and x.dtype == before[name].dtype
            for name, x in staged.items()
        )
        places.append(stager.buffer.data_ptr())
    assert places[0] == places[1]


class FakeCuda:
    """Streams that do nothing, and memory that cannot be pinned: the failure stays the last error of CUDA."""

    def __init__(self):
        self.pins, self.last_error = 0, 0

    def is_initialized(self) -> bool:
        return True

    def Stream(self):
        return MagicMock()

    current_stream = Stream

    def stream(self, stream):
        return nullcontext()

    def pin(self, *arguments):
        self.pins, self.last_error = self.pins + 1, 2
        return self.last_error

    def cudart(self):
        return SimpleNamespace(cudaHostRegister=self.pin)

    def launch(self, *arguments, **named):
        """A kernel: the launch is blamed for the last error, and clears it."""
        blamed, self.last_error = self.last_error, 0
        if blamed:
            raise RuntimeError("CUDA error")


def test_a_failure_to_pin_is_not_blamed_on_training(monkeypatch, capsys):
    cuda, stager = FakeCuda(), Staging()
    monkeypatch.setattr(
        staging, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda, "ones": cuda.launch})
    )
    for _ in range(2):
        stager.stage(state())
        cuda.launch()
    assert cuda.pins == 1
    assert "could not be pinned (2); saves hold training up for longer" in capsys.readouterr().out


def test_the_thread_that_writes_waits_on_the_gpu_of_its_rank(monkeypatch):
    """Not on GPU 0, where every rank would then have a context."""
    cuda, stager = MagicMock(), Staging()
    stager.stream, stager.copied = SimpleNamespace(device="cuda:3"), cuda.copied
    monkeypatch.setattr(staging, "torch", SimpleNamespace(cuda=cuda))
    stager.wait()
    assert cuda.mock_calls == [call.set_device("cuda:3"), call.copied.synchronize()]


def test_a_copy_of_a_gpu_is_exact_and_pinned(gpu):
    """Though the next steps are already on their way."""
    large = torch.arange(2**26, device=gpu, dtype=torch.float32)  # 256 MiB
    stager = Staging()
    for _ in range(2):
        expected = large.cpu()
        staged = stager.stage({"large": large})["large"]
        for _ in range(10):
            large.add_(1)
        stager.wait()
        assert staged.is_pinned()
        assert torch.equal(staged, expected)


PEAKS = """
import json, re, sys, time
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from common import distributed
import torch
from common.model import checkpoint
from common.flags import CheckpointArgs, RunArgs

def resident(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

distributed.start(60.0, 0)
tensors = {f"actor.{i}": torch.full((4, 2**20), float(i)) for i in range(16)}            # 256 MiB
checkpoint.training_state = lambda trained: tensors
peaks = []
with checkpoint.Checkpoints(RunArgs(out=Path(sys.argv[2]), timeout=60.0), CheckpointArgs()) as checkpoints:
    checkpoints.state, checkpoints.roles = SimpleNamespace(state_dict=dict), {}
    checkpoints.flags, checkpoints.contents = {}, {}
    (Path(sys.argv[2]) / "metrics.jsonl").touch()
    for step in (1, 2):
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")                                     # begin a new peak
        checkpoints.save(step)
        for tensor in tensors.values():
            tensor.add_(1)                                                                # the next optimizer step
        checkpoints.finish()
        peaks.append((resident("VmHWM") - before) / 2**28)
print(json.dumps(peaks))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="peaks are read as Linux tells them"
)
def test_a_save_needs_one_copy_of_host_memory(tmp_path):
    """The first save 1.0 times the state, from then on what is there already; both exact, though
    training went on."""
    (tmp_path / "program.py").write_text(PEAKS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(ROOT), str(tmp_path / "out")],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert 0.9 < first < 1.2 and second < 0.2, (first, second)
    for step in (1, 2):
        (file,) = (tmp_path / "out" / "checkpoints" / f"step-{step}").glob("*.safetensors")
        for name, tensor in load_file(file).items():
            assert (tensor == int(name.split(".")[1]) + step - 1).all()
