"""What a decoding step would launch on a GPU, counted without one: operators that are no views,
each a kernel.

Where torch is built for CUDA, the step is traced on fake tensors of device cuda, which also shows
that nothing in it waits for the device. Otherwise it runs on the CPU: the same Python, with one
operator in place of each fused kernel of a GPU."""

import collections
import functools
import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
import train_ppo_vl as ppo
from common import logprobs
from common.data.folder import read_model_config
from common.distributed import ALONE, Team
from common.model import build, experts, layers, teams, vlm
from common.rollout import RolloutEngine
from conftest import write_checkpoint
from families import write_family
from helpers import DEVICE, HAS_CUDA, WAITS, filled

SLOTS = 8


class Launches(TorchDispatchMode):
    """Counts operators by name, and keeps those that would wait for the device."""

    def __init__(self):
        super().__init__()
        self.count, self.waits = collections.Counter(), []
        self.compiled = False  # inside a function that a GPU compiles

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith("aten._flash_attention_forward"):
            result = (torch.empty_like(args[0]), *[None] * 4)
        else:
            result = function(*args, **(kwargs or {}))
        tensors = [
            x for x in torch.utils._pytree.tree_leaves((args, kwargs, result)) if torch.is_tensor(x)
        ]
        if any(x.device != DEVICE for x in tensors) or any(word in name for word in WAITS):
            self.waits.append(name)
        if not (
            name.startswith("prim") or function.is_view or "_unsafe_view" in name or self.compiled
        ):
            self.count[name] += 1
        return result

    def fuse(self, function, *tensors, gradient=None):
        """A compiled function: a kernel for each result. (Inductor of torch 2.14, made to write for
        an H100, writes two for the rotation of queries and keys and one for the gate.)"""
        self.compiled = True
        results = function(*tensors)
        self.compiled = False
        self.count["compiled"] += len(results) if isinstance(results, tuple) else 1
        return results


def launches(
    folder, count_layers: int, team: Team = ALONE, records_experts: bool = False, **sampling
) -> Launches:
    """A second decoding step of a model with so many layers, in bfloat16 with varlen."""
    compute = vlm.Compute("varlen", torch.bfloat16, DEVICE, 512, 256, 64)
    model = build.build_model(read_model_config(folder), compute, vision=False).requires_grad_(
        False
    )
    model.setup.team = team
    if records_experts:
        experts.hook_routers(model)
    decoder = vlm.decoder(model.eval())
    decoder.layers = nn.ModuleList([*decoder.layers] * count_layers)[:count_layers]
    decoder.config.num_hidden_layers = model.config.get_text_config().num_hidden_layers = (
        count_layers
    )
    vocabulary = model.config.get_text_config().vocab_size
    # fakes of another trace
    logprobs._id_hashes.cache_clear()
    # not inference_mode, in which casts and products are operators of several kernels
    with FakeTensorMode() if HAS_CUDA else nullcontext(), torch.no_grad(), ExitStack() as pieces:
        settings = ppo.Sampling(
            max_new_tokens=16,
            banned=torch.zeros(vocabulary, dtype=torch.bool, device=DEVICE),
            stop_ids=torch.zeros(2, dtype=torch.int64, device=DEVICE),
            slots=SLOTS,
            cuda_graphs="off",
            keeps_experts=records_experts,
            **sampling,
        )
        actor = SimpleNamespace(model=filled(model, torch.bfloat16))
        if team.size > 1:
            for layer in set(decoder.layers):
                layer.reshard = lambda: None
                teams.cut(layer, team, pieces)
        batch = SimpleNamespace(prompt_lengths=[8] * SLOTS)
        engine = RolloutEngine(actor, batch, settings, list(range(SLOTS)), 1)
        with Launches() as counted, pytest.MonkeyPatch.context() as patch:
            patch.setattr(layers, "fuse", counted.fuse)
            theirs = sys.modules[type(decoder).__module__]
            if isinstance(theirs.apply_rotary_pos_emb, functools.partial):
                patch.setattr(
                    theirs,
                    "apply_rotary_pos_emb",
                    functools.partial(counted.fuse, *theirs.apply_rotary_pos_emb.args),
                )
            # makes tables that later steps share
            engine.decode_on_device(SLOTS, engine.cache.capacity)
            assert (engine.cache.experts is not None) == records_experts
            counted.count.clear(), counted.waits.clear()
            engine.decode_on_device(SLOTS, engine.cache.capacity)
    logprobs._id_hashes.cache_clear()
    return counted


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """A trace cannot be; the draw of tokens counts as its many kernels."""
    monkeypatch.setattr(logprobs, "_compiles", lambda device: False)


@pytest.fixture
def kernels_of_a_gpu(monkeypatch):
    """On a CPU, one operator for each fused kernel; on fake tensors of a GPU, an H100."""
    if HAS_CUDA:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    else:
        monkeypatch.setattr(layers.F, "rms_norm", lambda x, *_: x.clone())
        monkeypatch.setattr(logprobs, "_product", lambda a, b: (a @ b).float())


# Projections 4, MLP 4, norms 2 (Qwen3: and 2 of queries and keys), rotary 2, keys and values 2,
# attention 1, sums 2.
LAYER = {"qwen2_5_vl": 17, "qwen3_vl": 19}


@pytest.mark.parametrize("kind", LAYER)
def test_a_layer_of_a_decoding_step_launches_few_kernels(kind, tmp_path, kernels_of_a_gpu):
    folder = write_checkpoint(tmp_path, kind)
    one, two = (launches(folder, number) for number in (1, 2))
    more = {
        name: count - one.count[name]
        for name, count in two.count.items()
        if count > one.count[name]
    }
    assert sum(more.values()) <= LAYER[kind], more


SAMPLING = {
    "plain": {},
    "everything": dict(temperature=0.7, top_k=5, top_p=0.9, min_new_tokens=3),
    "greedy": {"greedy": True},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_nothing_in_a_decoding_step_waits_for_the_device(name, tmp_path, kernels_of_a_gpu):
    """Or depends on its numbers: it could not be captured."""
    launched = launches(write_checkpoint(tmp_path, "qwen2_5_vl"), 1, **SAMPLING[name])
    assert not launched.waits


def test_nor_does_one_that_records_experts(tmp_path, picture_rows, kernels_of_a_gpu):
    """The ids that a router chooses are cast, and written into a buffer whose address stays, at cells that
    tensors of the device name."""
    write_family("qwen3_vl_moe", tmp_path, picture_rows)
    plain, recording = (launches(tmp_path, 1, records_experts=records) for records in (False, True))
    assert not recording.waits
    written = {
        name: count - plain.count[name]
        for name, count in recording.count.items()
        if count > plain.count[name]
    }
    assert written == {"aten._to_copy.default": 1, "aten.index_put_.default": 1}


def step_of_a_team(folder) -> None:
    """As the second of two ranks, the other of which is a stand-in."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # of an H100: a broadcast asks
    logprobs._compiles = lambda device: False
    launched = launches(folder, 2, Team(2, 1, dist.group.WORLD))
    assert not launched.waits
    collectives = {name: n for name, n in launched.count.items() if name.startswith("c10d")}
    # two of each layer; tokens
    assert collectives == {"c10d.allreduce_.default": 4, "c10d.broadcast_.default": 1}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_nothing_in_the_step_of_a_team_waits_for_the_device(kind, tmp_path, picture_rows):
    if kind == "qwen3_vl_moe":
        write_family(kind, tmp_path, picture_rows)
    else:
        write_checkpoint(tmp_path, kind)
    ranks.run(step_of_a_team, tmp_path)
