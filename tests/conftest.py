"""Shared by the tests: tiny random checkpoints of both families, written once per session, and the project on the path."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")   # a test must not depend on the network

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
torch.set_num_threads(1)


def write_checkpoint(folder: Path, kind: str, tie: bool = False, shard_size: str = "5GB") -> Path:
    """A random checkpoint whose weights are large enough that attention is not uniform and positions matter."""
    import toy

    tokenizer = toy.make_tokenizer()
    model = toy.make_model(kind, tokenizer, seed=0)
    if tie:
        model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
        model.tie_weights()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5)
            elif "bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    toy.make_image_processor(kind).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl"])
def checkpoint(request, tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def qwen25(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen25"), "qwen2_5_vl")
