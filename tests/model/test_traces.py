"""Which kernel torch chooses for attention on a GPU, asked on fake tensors of device cuda, which need
a build of torch for CUDA but no GPU.

    bash tests/run.sh --versions     runs this with such builds
"""

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from common.model import attention
from helpers import DEVICE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None,
        reason="this build of torch is for CPUs: bash tests/run.sh --versions has one for CUDA",
    ),
]


@pytest.fixture
def h100(monkeypatch):
    """Where torch would take cuDNN for the windows of a vision tower: an H100 with a new cuDNN."""
    for name, answer in {
        "_should_use_cudnn": True,
        "_cudnn_version": 92600,
        "_cudnn_supports_head_dims": True,
    }.items():
        monkeypatch.setattr(torch_varlen, name, lambda *_, answer=answer: answer, raising=False)


class Calls(TorchDispatchMode):
    """Keeps the arguments of varlen_attn's operator."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("torch_attn._varlen_attn"):
            self.arguments = args
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(
    not hasattr(torch_varlen, "_can_use_cudnn"), reason="torch 2.14 alone chooses so"
)
def test_the_backward_of_a_tower_never_takes_cudnn(h100):
    """That heads may be grouped keeps the forward from it; of the backward, torch does not tell the
    selector."""
    with FakeTensorMode(), Calls() as calls:
        q, k, v = (torch.empty(512, 16, 80, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
        bounds = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        attention.varlen_attention(
            q, k, v, attention.VarlenCall(bounds, bounds, 256, 256, False), 1.0, "varlen"
        )
        window, grouped = calls.arguments[9:11]
        assert grouped is True
        assert torch_varlen._can_use_cudnn(q, k, v, 256, [-1, -1])
        assert not torch_varlen._can_use_cudnn(q, k, v, 256, window)  # as the backward asks


@pytest.mark.skipif(
    not hasattr(torch_varlen, "_select_backend"),
    reason="this torch has no choice: 2.15 is the first",
)
def test_varlen_never_takes_cudnn(h100):
    with FakeTensorMode():
        q, k, v = (torch.empty(512, 16, 80, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
        bounds = torch.zeros(5, dtype=torch.int32, device=DEVICE)

        def chosen() -> int:
            return torch_varlen._select_backend(q, k, v, bounds, bounds, 256, [-1, -1])

        enabled = torch.backends.cuda.cudnn_sdp_enabled()
        try:
            torch.backends.cuda.enable_cudnn_sdp(True)
            assert chosen() == SDPBackend.CUDNN_ATTENTION.value
            attention.choose_backend("varlen", DEVICE)
            assert chosen() == SDPBackend.FLASH_ATTENTION.value
        finally:
            torch.backends.cuda.enable_cudnn_sdp(enabled)
