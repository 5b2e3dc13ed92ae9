"""Each benchmark runs, at its smallest, and prints the figures it promises: a figure that nobody
can reproduce is none."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ranks
from conftest import ROOT
from launch import toy

pytestmark = pytest.mark.slow

BENCHMARKS = ROOT / "tests" / "benchmarks"
# (script, flags, what must stand in its output); trl.py without its peer, which needs packages of its own
RUNS = [
    ("rollout.py", "--image_tokens 16 --responses 8 --repeats 1", r"ratio +\d+\.\d+"),
    (
        "environments.py",
        "--size tiny --samples 8 --seconds 0.01 --repeats 1",
        r"10 ms +\d+\.\d+ s, .* of answers at once",
    ),
    (
        "update.py",
        "--size tiny --prompt_tokens 40 --image_tokens 16 --response_tokens 6 --samples 2 "
        "--prompts 2 --repeats 1",
        r"(?s)gradients agree.*shared .*apart .*padded .*kept .*tower",
    ),
    (
        "update.py",
        "--size tiny --sweep --shapes 1 --repeats 1",
        r"prompt +16 response +4 samples +1 .*ratio \d",
    ),
    (
        "memory.py",
        "--tokens 64 --vocabulary 5000 --hidden 64 --chunk 16 --steps 0",
        r"chunks of +16: +\d+ MiB, 1/",
    ),
    ("scale.py", "", r"\| 72B \| 512 \|"),
    ("trl.py", "--help", r"GRPOTrainer"),
]


@pytest.mark.parametrize(
    "script, flags, expected", RUNS, ids=[f"{run[0]}-{i}" for i, run in enumerate(RUNS)]
)
def test_benchmark_runs(script, flags, expected):
    told = ranks.run(ranks.as_program, BENCHMARKS / script, flags.split())
    assert re.search(expected, told), told


LEARNING = """
import pathlib, sys, learning
learning.ROOT = pathlib.Path(sys.argv.pop(1))
learning.main()
"""


def test_learning_prints_a_line_of_its_table(tmp_path):
    """Of a toy whose weights are random, by few samples."""
    toy.main(
        ["--out", str(tmp_path / "toy"), "--warm_start_steps", "0", "--train", "16", "--eval", "8"]
    )
    flags = [
        "--steps",
        "4",
        "--only",
        "gae",
        "--flags",
        "--prompts_per_step 2 --samples_per_prompt 2 --minibatches 1",
    ]
    done = subprocess.run(
        [sys.executable, "-c", LEARNING, str(tmp_path), *flags],
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        timeout=300,
    )
    assert re.search(r"\| gae \| 0\.\d+ \| 0\.", done.stdout), done.stdout + done.stderr


def test_the_tables_of_scale_are_those_of_its_script():
    printed = subprocess.run(
        [sys.executable, str(BENCHMARKS / "scale.py")], capture_output=True, text=True, check=True
    ).stdout
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    written = Path(BENCHMARKS / "scale.md").read_text().splitlines()
    assert len(rows) > 20
    assert [line for line in written if line.startswith("|")] == rows


def test_scale_counts_the_weights_of_transformers_own_model():
    """The smallest and the second checkpoint, built without memory from the numbers that the tables
    start from."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    import scale

    for name in ("3B", "7B"):
        hidden, inner, layers, heads, kv_heads, vocabulary, tied, vision_inner = scale.MODELS[name]
        text = dict(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [16, 24, 24],
            },
        )
        vision = dict(
            depth=32,
            hidden_size=1280,
            intermediate_size=vision_inner,
            num_heads=16,
            out_hidden_size=hidden,
        )
        config = AutoConfig.for_model(
            "qwen2_5_vl", text_config=text, vision_config=vision, tie_word_embeddings=tied
        )
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        size = scale.parameters(name)
        assert sum(p.numel() for p in model.model.visual.parameters()) == size["tower"]
        assert sum(p.numel() for p in model.parameters()) == sum(
            size[k] for k in ("layers", "embedding", "head", "tower")
        )
