"""Packs with shared prefixes = one forward per sample with Hugging Face's own attention: log-probs,
values, gradients."""

import dataclasses
import itertools
import shutil
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from common import distributed
from common.buffers import Batch, build_pack
from common.data.loader import load_pixels
from common.model.attention import DecodeAttention, PackedAttention, SlotCache, bucket_segments
from common.model.fsdp import unsharded
from common.model.linear_attention import PackedDelta
from common.model.packs import Prefill, join_packs, prefill_pack
from common.model.vlm import image_features
from common.model.weights import resolve_folder
from conftest import (
    start,
    user_error,
)
from helpers import CUDA, load_model, load_weights, random_responses


def test_what_packs_compute_does_not_depend_on_torchs_default_type():
    """A reward function that loads a model changes it for a while, in another thread."""
    distributed.start(60.0, 0)
    values = torch.tensor([1.001, 2.003, 3.007])
    torch.set_default_dtype(torch.bfloat16)
    try:
        joined = join_packs([(torch.arange(3), values)], 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(joined, values)


def test_files_that_are_no_weights_are_told(qwen25, tmp_path):
    """A download cut short, a pointer of git-lfs, a checkpoint of pickles alone."""
    model = load_model(qwen25, loaded=False)
    shutil.copy(qwen25 / "config.json", tmp_path)
    for data, message in (
        ((qwen25 / "model.safetensors").read_bytes()[:9000], "cannot be read as safetensors"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a pointer of git-lfs; `git lfs pull`",
        ),
    ):
        (tmp_path / "model.safetensors").write_bytes(data)
        with user_error(f"model.safetensors {message}"):
            load_weights(model, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with user_error("model.safetensors cannot be read as safetensors: No such file"):
        load_weights(model, tmp_path)


@pytest.mark.parametrize("weights", [True, False])
def test_of_a_hub_name_weights_are_fetched_once(weights, tmp_path, monkeypatch):
    """Mistral's repositories hold them in a second layout as well."""
    files = [
        "config.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "pytorch_model.bin",
    ]
    (tmp_path / "config.json").write_text("{}")
    asked = {}
    monkeypatch.setattr(
        "common.model.weights.snapshot_download",
        lambda name, **patterns: asked.update(patterns) or tmp_path,
    )
    assert resolve_folder("owner/name", weights) == tmp_path
    assert list(huggingface_hub.utils.filter_repo_objects(files, **asked)) == files[: 2 + weights]


def test_buckets_cover_every_segment_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        len_q = rng.integers(1, 300, rng.integers(1, 40))
        len_k = len_q + rng.integers(0, 2, len(len_q)) * rng.integers(1, 500, len(len_q))
        buckets = bucket_segments(len_q, len_k)
        assert sorted(itertools.chain(*buckets)) == list(range(len(len_q)))
        areas = len_q * len_k * np.where(len_q == len_k, 0.5, 1)
        for members in buckets:
            q, k = len_q[members], len_k[members]
            padded = (
                len(members)
                * int(q.max())
                * int(k.max())
                * (0.5 if (q == k).all() and (q == q[0]).all() else 1)
            )
            assert len(members) == 1 or padded <= max(1 << 14, 1.5 * areas[members].sum())


def test_prompts_are_not_masked_for_the_sake_of_short_responses():
    """Three equal prompts, causal without a mask, and six responses of 4 tokens behind them: thrown
    together, they took twice the time of an update."""
    len_q, len_k = np.array([1024, 4, 4] * 3), np.array([1024, 1028, 1028] * 3)
    assert sorted(sorted(b.tolist()) for b in bucket_segments(len_q, len_k)) == [
        [0, 3, 6],
        [1, 2, 4, 5, 7, 8],
    ]


def test_bfloat16_leaves_rotary_frequencies_alone(qwen25, picture_rows):
    """Rounded to bfloat16, the tower's frequencies are off by 0.2 rad at patch 100; only its
    weights may be cast."""
    env, trained = (
        start(qwen25, picture_rows, "--dtype bfloat16", *flags)
        for flags in ((), ("--train_vision",))
    )
    assert {p.dtype for p in env.actor.model.model.visual.parameters()} == {torch.bfloat16}
    assert {b.dtype for name, b in env.actor.named_buffers() if "inv_freq" in name} == {
        torch.float32
    }
    # nor may FSDP2 cast the angles in front of a tower that is trained
    prompt = env.prompts[2]
    pixels = load_pixels(prompt, env.processor)
    with torch.no_grad(), unsharded(trained.actor):
        features = [
            image_features(e.actor.model, pixels, prompt.patch_grids) for e in (env, trained)
        ]
    assert torch.equal(*features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_reaches_sdpa(monkeypatch, device, dtype):
    """On a GPU, which the meta device stands for: four dimensions, a key head for each query head
    and nothing grouped, as all else is for the slow kernel of any input. Decoding reads the cache
    where it lies, and no further than it must."""
    reached = []

    def sdpa(q, k, v, attn_mask=None, **options):
        reached.append((q, k, v, options.get("enable_gqa", False)))
        return torch.empty_like(q)

    def product(mask, queries, keys, alpha):
        reached.append((queries, keys.transpose(1, 2), None, False))
        return torch.empty(*queries.shape[:2], keys.shape[2], device=device)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(torch, "baddbmm", product)
    q, k, v = (torch.zeros(1, heads, 30, 16, dtype=dtype, device=device) for heads in (4, 2, 2))
    segments = [(0, 20, 0, 0), (20, 25, 0, 20), (25, 30, 0, 20)]
    out = PackedAttention(segments, "sdpa", q.device)(0, q, k, v, 1.0)
    grouped = device == "cpu"
    assert out.shape == (1, 30, 4, 16) and reached
    for queries, keys, values, gqa in reached:
        assert (
            queries.shape[1] == 4
            and keys.shape[1] == values.shape[1] == (2 if grouped else 4)
            and gqa == grouped
        )
    reached.clear()
    config = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=2, head_dim=16)
    cache = SlotCache(config, 5, 100, dtype, q.device, "sdpa")
    step = DecodeAttention(cache, torch.zeros(3, dtype=torch.int64, device=device), 32, "sdpa")
    assert step(0, *(x[:, :, :3] for x in (q, k, v)), 1.0).shape == (1, 3, 4, 16)
    ((queries, keys, _, gqa),) = reached
    assert keys._base is cache.keys[0] and not gqa
    four = device == "meta" and dtype == torch.bfloat16
    assert queries.shape == ((3, 2, 2, 16) if four else (6, 2, 16)) and keys.shape[-2] == 32


def test_a_slot_has_the_heads_of_each_layer():
    """Gemma 4 E2B: of 35 layers the last 20 read what the first 15 store, every fifth of which has
    heads of 512, the others of 256; one head for keys, and for values."""
    text = AutoConfig.for_model(
        "gemma4_text",
        num_hidden_layers=35,
        num_kv_shared_layers=20,
        num_key_value_heads=1,
        global_head_dim=512,
        head_dim=256,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
    )
    cache = SlotCache(text, 2, 100, torch.bfloat16, torch.device("meta"), "sdpa")
    assert cache.nbytes == 2 * 100 * 2 * (12 * 256 + 3 * 512) * 2
    assert [part.shape for part in cache.keys[3:5]] == [(2, 100, 1, 256), (2, 100, 1, 512)]


def test_fsdp_does_not_walk_through_segments():
    """It looks through dataclasses in the arguments of every layer for tensors with a gradient:
    twice the calls of a step."""
    assert not dataclasses.is_dataclass(PackedAttention)


@pytest.fixture
def sent(monkeypatch):
    """For each tensor that is sent to a GPU, which is not there: whether its memory is pinned, and
    nobody waits."""
    pinned, transfers, to = [], [], torch.Tensor.to

    def pin_memory(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    def send(tensor, *target, non_blocking=False, **options):
        if CUDA not in target:
            return to(tensor, *target, non_blocking=non_blocking, **options)
        transfers.append((any(tensor is copy for copy in pinned), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", send)
    return transfers


def test_the_host_waits_for_no_table_of_a_pack(qwen25, sent):
    """A copy of more than 64 KiB from memory that is not pinned would wait until the GPU has
    finished the pack before."""
    segments = [(0, 5, 0, 0), (5, 9, 0, 5), (9, 12, 0, 5), (12, 20, 12, 12, True)]
    q, k, v = (torch.randn(1, heads, 20, 16) for heads in (4, 2, 2))
    numbers = {}
    PackedAttention(segments, "varlen", CUDA)
    numbers["varlen"] = len(sent)
    PackedAttention(segments, "sdpa", CUDA)(0, q, k, v, 0.25)
    numbers["sdpa"] = len(sent)
    PackedDelta(segments, CUDA)
    numbers["linear"] = len(sent)

    batch = Batch([SimpleNamespace(input_ids=torch.arange(7))], [0], [0]).with_responses(
        random_responses([2], 200)
    )
    positions = torch.arange(7).expand(3, -1)
    pack = build_pack(batch, [(0, [0, 1])], {0: positions}, {}, torch.tensor([])).to(CUDA)
    numbers["pack"] = len(sent)
    dataclasses.replace(pack, targets=SimpleNamespace(device=CUDA)).pick(
        torch.zeros(len(batch.tokens))
    )
    numbers["its numbers"] = len(sent)
    model = load_model(qwen25, loaded=False)
    model.setup = dataclasses.replace(model.setup, device=CUDA)
    cache, parts = SimpleNamespace(experts=None), [Prefill([0, 1], 3, torch.arange(7), positions)]
    prefill_pack(model, cache, parts, [torch.zeros(1, 2, 64)])
    numbers["prefill"] = len(sent)
    assert len(set(numbers.values())) == len(numbers), numbers  # each has sent something
    assert set(sent) == {(True, True)}
