"""Shared by the tests: tiny random checkpoints of both families, written once per session, and the project on the path."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")   # a test must not depend on the network
if not any("test_gpu" in argument or argument == "gpu" for argument in sys.argv[1:]):
    # Tests expect the numbers of a CPU, and start more ranks than there may be GPUs: only what is named sees them, as by
    # `pytest tests/test_gpu.py` or `pytest tests -k gpu`.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

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


def start(checkpoint: Path, data: str | None = None, *flags: str):
    """The script's own start-up in this process, as one rank: run, processor, prompts, models."""
    from types import SimpleNamespace

    import train_ppo_vl as ppo

    args = ppo.parse_args(["--model", str(checkpoint), "--data", str(data), "--max_prompt_tokens", "512", "--max_new_tokens", "12",
                           "--prefill_tokens", "600", "--prompts_per_step", "4", *flags])
    run = ppo.start_run(args)
    processor, datasets, _, _ = ppo.load_data(run)
    actor, critic, reference = ppo.build_models(run, processor)
    return SimpleNamespace(run=run, args=args, processor=processor, prompts=sum(datasets, []), actor=actor, critic=critic,
                           reference=reference)


def take(env, count: int | None = None):
    """The first prompts of the file as one step, pictures decoded."""
    import train_ppo_vl as ppo

    rows = env.prompts[:count]
    with ppo.PromptLoader(env.processor, 1, "error") as loader:
        return loader.collect(*loader.submit(rows, list(range(len(rows)))))


@pytest.fixture(scope="session")
def picture_rows(tmp_path_factory) -> str:
    """A JSONL file: prompts with 0, 1, 2 and 1 images of different sizes."""
    import json

    import numpy as np
    from PIL import Image

    folder, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    lines = []
    for i, sizes in enumerate([[], [(56, 56)], [(84, 56), (56, 112)], [(112, 84)]]):
        names = [f"picture-{i}-{k}.png" for k in range(len(sizes))]
        for name, (width, height) in zip(names, sizes):
            Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / name)
        lines.append(json.dumps({"prompt": "how many circles are there? " * (i + 1), "images": names, "answer": "1"}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return str(folder / "rows.jsonl")
