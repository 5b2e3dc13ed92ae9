"""A sampler that is not the policy in training is found by the value of train/sampler_gap: after
the first update it stops the run, later it is warned of."""

from types import SimpleNamespace

import pytest
import torch

import train_ppo_vl as ppo
from common.model.attention import DecodeAttention
from conftest import records, user_error, words
from helpers import flags

QUIET = "--advantage grpo --save_every 0 --export_every 0"


@pytest.fixture
def sampler(monkeypatch):
    """Decoding attends with its scores off by a factor."""
    off_by, real = [1.0], DecodeAttention.__call__

    def attend(step, layer, q, k, v, scale, window=None):
        return real(step, layer, q, k, v, scale * off_by[0], window)

    monkeypatch.setattr(DecodeAttention, "__call__", attend)
    return off_by


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sampler_that_is_off_stops_the_run(qwen25, task, tmp_path, sampler, dtype):
    sampler[0] = 2.5
    limit = {"float32": "0.001", "bfloat16": "0.1"}[dtype]
    with user_error(f"step 1: train/sampler_gap 0.* is above {limit}.*--attention sdpa"):
        ppo.main(flags(qwen25, task, tmp_path, QUIET, "--steps 2 --dtype", dtype))
    # it is recorded first
    (record,) = (record for record in records(tmp_path) if "train/sampler_gap" in record)
    assert record["step"] == 1
    assert record["train/sampler_gap"] > float(limit)


@pytest.mark.parametrize("limit", ["0", "5"])
def test_the_limit_can_be_moved(qwen25, task, tmp_path, sampler, capsys, limit):
    sampler[0] = 2.5
    ppo.main(flags(qwen25, task, tmp_path, QUIET, "--steps 2 --sampler_gap_limit", limit))
    assert len([record for record in records(tmp_path) if "train/sampler_gap" in record]) == 2
    assert "sampler_gap" not in capsys.readouterr().out


def test_an_evaluation_alone_compares_its_sampler(qwen25, task, tmp_path, sampler):
    """Its first rollout, with the same limit: no update would."""

    def evaluate(name: str, *more: str):
        return ppo.main(
            flags(
                qwen25,
                task,
                tmp_path / name,
                "--eval_data",
                task / "eval.jsonl",
                "--eval_only",
                "--",
                *more,
            )
        )

    assert evaluate("right")["eval/num_samples"] == 7
    sampler[0] = 2.5
    with user_error("evaluation: the sampler gap 0.* is above 0.001.*--attention sdpa"):
        evaluate("off")
    assert evaluate("unlimited", "--sampler_gap_limit 0")["eval/num_samples"] == 7


@pytest.mark.slow
def test_later_it_is_a_warning(qwen25, task, tmp_path, sampler, capsys, monkeypatch):
    """After --critic_warmup_steps steps without an update of the actor, the first of which is
    checked all the same."""
    advance = ppo.advance

    def then_off(state, *rest):
        advance(state, *rest)
        if state.step == 2:
            sampler[0] = 2.5

    monkeypatch.setattr(ppo, "advance", then_off)
    line = flags(qwen25, task, tmp_path, "--save_every 0 --export_every 0 --steps 3")
    ppo.main([*line, "--critic_warmup_steps", "1"])
    assert "warning: step 3: train/sampler_gap" in capsys.readouterr().out
    with user_error("step 3: train/sampler_gap"):
        ppo.main(words(*line, "--critic_warmup_steps 2 --resume never --out", tmp_path / "other"))


def test_nan_does_not_pass(qwen25, task, tmp_path):
    args = ppo.parse_args(flags(qwen25, task, tmp_path))
    state = SimpleNamespace(step=1, metrics={"train/sampler_gap": float("nan")})
    actor = SimpleNamespace(model=SimpleNamespace(setup=SimpleNamespace(dtype=torch.bfloat16)))
    with user_error("sampler_gap nan is above 0.1"):
        ppo.check_sampler(SimpleNamespace(first_step=0), state, actor, args)
