"""What a run keeps beside the weights in training, and where: the running average of the actor's weights (--ema_beta)."""

import math

import pytest
import torch
from test_training import fresh, samples_of, signal_handlers, task, tensors, train, weights_of  # noqa: F401

import train_ppo_vl as ppo
from common import losses

EMA = ("--ema_beta", "0.75")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def average_of(env) -> dict[str, torch.Tensor]:
    """The average, by the names of the trained parameters."""
    return {name: env.optimizer.state[p]["ema"].full_tensor().clone()
            for name, p in env.actor.named_parameters() if p.requires_grad}


def step_of(env, step: int) -> dict[str, float]:
    return ppo.update_actor(env.run, env.actor, env.optimizer, env.step, env.samples, step, 0.0)


# ------------------------------------------------------------------------------------------------ the average
def with_average(qwen25, picture_rows, *more: str):
    """One update per step."""
    env = fresh(qwen25, picture_rows, "--minibatches", "1", "--epochs", "1", *EMA, *more)
    ppo.start_average(env.args.update, env.optimizer)
    return env


@pytest.mark.parametrize("place", ["device", "cpu"])
def test_average_is_the_recursion_over_the_applied_steps(qwen25, picture_rows, monkeypatch, place):
    env = with_average(qwen25, picture_rows, "--ema_device", place)
    expected = average_of(env)
    assert same(expected, {name: value for name, value in weights_of(env.actor).items() if name in expected})
    for step in range(1, 5):
        step_of(env, step)
        now = weights_of(env.actor)
        expected = {name: 0.75 * value + 0.25 * now[name] for name, value in expected.items()}
    found = average_of(env)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-7) for name in expected)
    assert any((found[name] - now[name]).abs().max() > 1e-3 for name in found)          # it lags behind
    true_loss = losses.policy_loss
    monkeypatch.setattr(losses, "policy_loss", lambda *args: (true_loss(*args)[0] * math.nan, true_loss(*args)[1]))
    assert step_of(env, 5)["train/actor_skipped"] == 1 and same(average_of(env), found)


def test_one_average_per_update_not_per_pack(qwen25, picture_rows):
    """Small packs accumulate: the average moves once; two minibatches move it twice."""
    for more, moves in ((("--max_tokens_per_pack", "600", "--no-share_prompts"), 1), (("--minibatches", "2"), 2)):
        env = with_average(qwen25, picture_rows, *more)
        steps, true = [], ppo.update_average
        ppo.update_average = lambda *args: steps.append(true(*args))
        try:
            step_of(env, 1)
        finally:
            ppo.update_average = true
        assert len(steps) == moves


def test_frozen_steps_leave_the_average(qwen25, task, tmp_path):
    train(qwen25, task, tmp_path, *EMA, "--steps", "2", "--freezing_actor_steps", "2", "--export_ema")
    assert same(tensors(tmp_path / "export_ema" / "step-2"), tensors(qwen25))


def test_swapped_for_an_evaluation_and_back(qwen25, picture_rows):
    env = with_average(qwen25, picture_rows)
    step_of(env, 1)
    weights, average = weights_of(env.actor), average_of(env)
    with pytest.raises(ZeroDivisionError), ppo.averaged(env.optimizer):
        inside = weights_of(env.actor)
        assert same({name: inside[name] for name in average}, average)
        assert same(average_of(env), {name: weights[name] for name in average})
        logprobs = ppo.score_tokens(env.run, env.actor, env.step, env.samples)             # the forward sees it
        assert (logprobs - env.samples.logprobs).abs().max() > 1e-3
        1 / 0
    assert same(weights_of(env.actor), weights) and same(average_of(env), average)
    with torch.no_grad():
        for name, parameter in env.actor.named_parameters():
            if name in average:
                parameter.copy_(ppo.DTensor.from_local(average[name], parameter.device_mesh, parameter.placements))
    assert torch.equal(ppo.score_tokens(env.run, env.actor, env.step, env.samples), logprobs)


def test_training_is_the_same_with_an_average(qwen25, task, tmp_path):
    """Evaluated in place of the weights and exported beside them; what is trained, and its samples, do not feel it."""
    more = ("--steps", "3", "--actor_lr", "1e-2", "--eval_data", str(task / "eval.jsonl"), "--eval_every", "1", "--export_every", "2")
    train(qwen25, task, tmp_path / "plain", *more)
    train(qwen25, task, tmp_path / "average", *more, *EMA, "--eval_ema", "--export_ema")
    for step in (1, 2, 3):
        assert samples_of(tmp_path / "plain", f"step-{step:06d}") == samples_of(tmp_path / "average", f"step-{step:06d}")
    plain, average = (tensors(tmp_path / name / "checkpoints" / "step-3") for name in ("plain", "average"))
    kept = {name: value for name, value in average.items() if not name.endswith(".ema")}
    assert same(plain, kept) and len(kept) < len(average)
    assert same(*(tensors(tmp_path / name / "export" / "step-3") for name in ("plain", "average")))
    assert (tmp_path / "average" / "export_ema" / "latest").read_text() == "step-3\n"
    exported = tensors(tmp_path / "average" / "export_ema" / "step-2")
    assert exported.keys() == tensors(qwen25).keys() and not same(exported, tensors(qwen25))
    # What was evaluated is what was exported: the folder answers as the run did.
    ppo.main(["--model", str(tmp_path / "average" / "export_ema" / "latest"), "--out", str(tmp_path / "again"), "--eval_only",
              "--eval_data", str(task / "eval.jsonl"), "--reward", f"{task / 'reward.py'}:letters", "--max_prompt_tokens", "512",
              "--max_new_tokens", "6", "--prompts_per_step", "4", "--prefill_tokens", "600", "--max_tokens_per_pack", "600"])
    answers = [[row["response"] for row in samples_of(folder, name)] for folder, name in (
        (tmp_path / "again" / "evaluation-step-0", "eval-000000"), (tmp_path / "average", "eval-000003"),
        (tmp_path / "plain", "eval-000003"))]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("place", ["device", "cpu"])
def test_average_is_resumed_bit_for_bit(qwen25, task, tmp_path, place):
    more = (*EMA, "--ema_device", place, "--actor_lr", "1e-2", "--save_every", "2")
    train(qwen25, task, tmp_path / "whole", *more, "--steps", "4")
    train(qwen25, task, tmp_path / "parts", *more, "--steps", "2")
    train(qwen25, task, tmp_path / "parts", *more, "--steps", "4")
    whole, parts = (tensors(tmp_path / name / "checkpoints" / "step-4") for name in ("whole", "parts"))
    assert same(whole, parts) and sum(name.endswith(".ema") for name in whole) == sum(
        name.startswith("actor.model.") for name in whole)


def test_an_average_that_was_not_saved_cannot_be_resumed(qwen25, task, tmp_path):
    train(qwen25, task, tmp_path, "--steps", "1")
    with pytest.raises(ppo.UserError, match="flags that alter the result .*--ema_beta 0.0 -> 0.75"):
        train(qwen25, task, tmp_path, "--steps", "2", *EMA)
    with pytest.raises(ppo.UserError, match="cannot be loaded: .*Missing key .*ema"):
        train(qwen25, task, tmp_path, "--steps", "2", *EMA, "--resume_changed_args", "allow")
