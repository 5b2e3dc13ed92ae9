"""The forward of an update as a GPU would run it, traced on fake tensors of device cuda, which need
a build of torch for CUDA but no GPU: no operator has a tensor of the CPU or waits for a number of
the device, and products are of bfloat16. (Not the backward: autograd's engine asks the driver.)

    bash tests/run.sh --versions     runs this with such builds
"""

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

import train_ppo_vl as ppo
from common.buffers import Pack
from common.data.folder import read_model_config
from common.model import attention as vlm_attention
from common.model import build, vlm
from conftest import write_checkpoint
from helpers import DEVICE, WAITS, filled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None,
        reason="this build of torch is for CPUs: bash tests/run.sh --versions has one for CUDA",
    ),
]


class Operators(TorchDispatchMode):
    """Keeps the operators that a GPU would wait at, and the types of what matrix products give."""

    def __init__(self):
        super().__init__()
        self.waits, self.names, self.products = [], set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function)
        self.names.add(name)
        tensors = [
            x for x in torch.utils._pytree.tree_leaves((args, kwargs, result)) if torch.is_tensor(x)
        ]
        if any(x.device.type != "cuda" for x in tensors) or any(word in name for word in WAITS):
            self.waits.append((name, [(x.device.type, tuple(x.shape)) for x in tensors]))
        if name.startswith(("aten.mm", "aten.addmm")):
            self.products.add(tuple(x.dtype for x in tensors[-2:]))
        return result


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_nothing_in_the_forward_of_an_update_waits_for_the_device(kind, tmp_path, monkeypatch):
    """With images."""
    # an H100: torch 2.15 asks
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    folder = write_checkpoint(tmp_path, kind)
    compute = vlm.Compute("varlen", torch.bfloat16, DEVICE, 512, 8, 64)
    model = build.build_model(read_model_config(folder), compute, vision=False)
    vocabulary = model.config.get_text_config().vocab_size
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def to_device(self, array):
        with fake:
            return torch.zeros(array.shape, dtype=torch.as_tensor(array).dtype, device=DEVICE)

    # the host lays the segments out with numbers, which fakes do not have
    monkeypatch.setattr(vlm_attention.PackedAttention, "to_device", to_device)
    attention = vlm_attention.PackedAttention(
        [(0, 20, 0, 0), (20, 30, 0, 20), (30, 40, 0, 20)], "varlen", DEVICE
    )
    with fake:
        actor = ppo.Policy(filled(model, torch.bfloat16).train(), None)
        ids = torch.zeros(1, 40, dtype=torch.int64, device=DEVICE)
        sampling = ppo.Sampling(
            max_new_tokens=16,
            banned=torch.zeros(vocabulary, dtype=torch.bool, device=DEVICE),
            stop_ids=torch.zeros(2, dtype=torch.int64, device=DEVICE),
            temperature=0.7,
            min_new_tokens=3,
        )
        tokens = torch.zeros(20, dtype=torch.int64, device=DEVICE)
        levels = 1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
        hidden_size = model.config.get_text_config().hidden_size
        pack = Pack(
            input_ids=ids,
            image_index=torch.zeros(6, dtype=torch.int64, device=DEVICE),
            features=torch.zeros(levels, 6, hidden_size, dtype=torch.bfloat16, device=DEVICE),
            positions=torch.zeros(3, 1, 40, dtype=torch.int64, device=DEVICE),
            attention=attention,
            predict=tokens,
            targets=tokens,
            step=tokens,
        )
        with Operators() as operators:
            logp, entropy, _ = actor(pack, sampling, entropy=True)
    assert not operators.waits
    assert any("varlen" in name or "_flash_attention" in name for name in operators.names)
    # no product of float32 by float32
    assert {types[0] for types in operators.products} == {torch.bfloat16}
    assert logp.requires_grad
    assert logp.shape == entropy.shape == (20,)
    assert logp.dtype == torch.float32


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
        vlm_attention.varlen_attention(
            q, k, v, vlm_attention.VarlenCall(bounds, bounds, 256, 256, False), 1.0, "varlen"
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
            vlm_attention.choose_backend("varlen", DEVICE)
            assert chosen() == SDPBackend.FLASH_ATTENTION.value
        finally:
            torch.backends.cuda.enable_cudnn_sdp(enabled)
