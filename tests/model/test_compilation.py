"""Decoder layers through torch.compile: log-probs, values and gradients of the eager layers, few
graphs for rows of any length, and eager graphs where nothing compiles."""

import shutil

import pytest
import torch

import train_ppo_vl as ppo
from common.model import compilation, vlm
from conftest import ROUNDING, computing, records, rounding, seeded, start, take
from helpers import HAND_FLAGS, distance, flags, gradient, hand_batch, score

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)
LENGTHS = (60, 90, 150, 16384)  # of packs, in which the same samples stand


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def make(checkpoint, rows, *more: str):
    """Models whose adapters and value head are not zero, and hand-made samples."""
    env = start(checkpoint, rows, HAND_FLAGS, *more)
    with torch.no_grad():
        for name, parameter in [*env.actor.named_parameters(), *env.critic.named_parameters()]:
            if name.endswith(("lora_B", "value_head.weight")):
                weight = parameter.to_local()
                weight.copy_(torch.randn(weight.shape, generator=seeded(5)) / 8)
    env.batch = hand_batch(env)
    return env


def compare(env, other, size: int) -> None:
    """Scores and gradients of actor and critic, of one environment with packs of ``size`` tokens."""
    for role in ("actor", "critic"):
        eager, compiled = getattr(env, role).train(), getattr(other, role).train()
        expected, _ = gradient(env.args, eager, env.batch)
        with computing(compiled, max_tokens_per_pack=size):
            actual, _ = gradient(other.args, compiled, env.batch)
        assert distance(actual, expected) < ROUNDING, (role, size)
    expected = score(env.actor, env.batch)
    with computing(other.actor, max_tokens_per_pack=size):
        assert (
            score(other.actor, env.batch) - expected
        ).abs().max() < ROUNDING * expected.abs().max()


@needs_compiler
def test_compiled_layers_compute_the_same(qwen25, picture_rows):
    """Forward and backward; all lengths of packs, actor and critic share the graphs of the first two."""
    env, other = make(qwen25, picture_rows), make(qwen25, picture_rows, "--compile layers")
    counts = []
    for size in LENGTHS:
        compare(env, other, size)
        counts.append(graphs())
    assert 0 < counts[0] <= 12
    assert counts[1:] == [counts[1]] * (len(LENGTHS) - 1)
    assert all(
        isinstance(layer, compilation.CompiledLayer) for layer in vlm.layers(other.actor.model)
    )
    assert not any(
        isinstance(layer, compilation.CompiledLayer) for layer in vlm.layers(env.actor.model)
    )


@needs_compiler
def test_a_run_is_the_same(qwen25, task, tmp_path):
    """With layers recomputed in the backward pass; sampling, which is eager, and training agree."""
    runs = []
    for name, more in (("eager", []), ("compiled", ["--compile", "layers"])):
        ppo.main(
            flags(
                qwen25,
                task,
                tmp_path / name,
                "--steps 2 --minibatches 2 --gradient_checkpointing --save_every 0 --export_every 0",
                *more,
            )
        )
        runs.append([r for r in records(tmp_path / name) if "train/sampler_gap" in r])
    for eager, compiled in zip(*runs, strict=True):
        assert compiled["train/sampler_gap"] < ROUNDING
        for metric in (
            "rollout/reward",
            "train/policy_loss",
            "train/critic_loss",
            "train/actor_grad_norm",
            "train/entropy",
        ):
            assert compiled[metric] == pytest.approx(eager[metric], rel=1e-4, abs=rounding(16)), (
                metric
            )


@needs_compiler
def test_rollouts_stay_eager(qwen25, picture_rows):
    env = start(qwen25, picture_rows, "--compile layers")
    torch._dynamo.reset()  # what other tests have compiled would be used again
    before = graphs()
    batch = ppo.rollout(env.actor, take(env), env.sampling, 2)
    assert graphs() == before
    assert len(batch) == 8
    score(env.actor, batch)
    assert graphs() > before
