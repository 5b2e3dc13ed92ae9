"""What a run keeps beside the weights in training, and where: the running average of the actor's
weights (--ema_beta), and host memory (--offload).
"""

import json
import math
import os
import re

import pytest
import torch
from torch.distributed.tensor import DTensor

import ranks
import train_ppo_vl as ppo
from common import losses
from common.looks.teacher import update_ema_teacher
from common.model import fsdp, packs
from common.model.weights import shard_of
from conftest import (
    computing,
    rounding,
    same_tensors,
    save_weights,
    seeded,
    start,
    words,
    write_judge,
)
from helpers import (
    MOVED,
    apart,
    flags,
    fresh,
    hand_batch,
    samples_of,
    samples_of_every_step,
    score,
    tensors,
    train,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("write_samples")

EMA = "--ema_beta 0.75"


def average_of(env) -> dict[str, torch.Tensor]:
    """The average, by the names of the trained parameters."""
    return {
        name: env.trained.optimizer.state[p]["ema"].full_tensor().clone()
        for name, p in env.actor.named_parameters()
        if p.requires_grad
    }


def step_of(env, step: int) -> dict[str, float]:
    return ppo.update_actor(env.trained, None, env.batch, step, None, env.args)


# ------------------------------------------------------------------------------------------------ the average
def with_average(qwen25, picture_rows, *more: str):
    """One update per step."""
    env = fresh(qwen25, picture_rows, "--minibatches 1 --epochs 1", EMA, *more)
    env.trained = ppo.make_trainables(env.args, ppo.Models(env.actor, None, None))["actor"]
    return env


def test_average_is_the_recursion_over_the_applied_steps(qwen25, picture_rows, monkeypatch):
    env = with_average(qwen25, picture_rows, "--offload optimizer")
    expected = average_of(env)
    assert same_tensors(
        expected, {name: value for name, value in weights_of(env.actor).items() if name in expected}
    )
    for step in range(1, 5):
        step_of(env, step)
        now = weights_of(env.actor)
        expected = {name: 0.75 * value + 0.25 * now[name] for name, value in expected.items()}
    average = average_of(env)
    assert all(
        torch.allclose(average[name], expected[name], rtol=rounding(16), atol=rounding(1))
        for name in expected
    )
    assert any((average[name] - now[name]).abs().max() > 1e-3 for name in average)  # it lags behind
    true_loss = losses.ppo

    def broken(*args):
        loss = true_loss(*args)
        loss.per_token = loss.per_token * math.nan
        return loss

    monkeypatch.setitem(ppo.POLICY_LOSSES, "ppo", ppo.POLICY_LOSSES["ppo"]._replace(compute=broken))
    assert step_of(env, 5)["train/actor_skipped"] == 1
    assert same_tensors(average_of(env), average)


def test_one_average_per_update_not_per_pack(qwen25, picture_rows, monkeypatch):
    """Small packs accumulate: the average moves once; two minibatches move it twice."""
    steps, true = [], fsdp.Trainable.update_average
    monkeypatch.setattr(
        fsdp.Trainable, "update_average", lambda trained: steps.append(true(trained))
    )
    for minibatches, tokens in ((1, 110), (2, 600)):
        env = with_average(qwen25, picture_rows, "--minibatches", str(minibatches))
        steps.clear()
        with computing(env.actor, max_tokens_per_pack=tokens):
            assert len(list(packs.of_batch(env.actor.model, env.batch))) > 1 or minibatches > 1
            step_of(env, 1)
        assert len(steps) == minibatches


def test_frozen_steps_leave_the_average(qwen25, task, tmp_path):
    train(qwen25, task, tmp_path, EMA, "--steps 2 --critic_warmup_steps 2")
    assert same_tensors(tensors(tmp_path / "export_ema" / "step-2"), tensors(qwen25))


def test_swapped_for_an_evaluation_and_back(qwen25, picture_rows):
    env = with_average(qwen25, picture_rows)
    step_of(env, 1)
    weights, average = weights_of(env.actor), average_of(env)
    with pytest.raises(ZeroDivisionError), env.trained.averaged():
        inside = weights_of(env.actor)
        assert same_tensors({name: inside[name] for name in average}, average)
        assert same_tensors(average_of(env), {name: weights[name] for name in average})
        logprobs = score(env.actor, env.batch)  # the forward sees it
        assert (logprobs - env.batch.logprobs).abs().max() > 1e-3
        1 / 0
    assert same_tensors(weights_of(env.actor), weights)
    assert same_tensors(average_of(env), average)
    with torch.no_grad():
        for name, parameter in env.actor.named_parameters():
            if name in average:
                parameter.copy_(
                    DTensor.from_local(average[name], parameter.device_mesh, parameter.placements)
                )
    assert torch.equal(score(env.actor, env.batch), logprobs)


def test_a_teacher_gets_the_average(qwen25, picture_rows):
    """Of all weights that are trained, in every bit; the policy goes on as it was."""
    env = with_average(qwen25, picture_rows, "--teacher_model ema")
    for step in (1, 2):
        step_of(env, step)
    weights, average = weights_of(env.actor), average_of(env)
    update_ema_teacher(env.models.teacher, env.trained)
    assert same_tensors(weights_of(env.models.teacher.policy), average)
    assert same_tensors(weights_of(env.actor), weights)
    assert not any(torch.equal(average[name], weights[name]) for name in average)


@pytest.mark.slow
def test_training_is_the_same_with_an_average(qwen25, task, tmp_path):
    """Evaluated in place of the weights and exported beside them; what is trained, and its samples,
    do not feel it."""
    more = (
        "--steps 2 --actor_lr 1e-2",
        "--eval_data",
        str(task / "eval.jsonl"),
        "--eval_every 2 --save_every -1 --export_every 1",
    )
    train(qwen25, task, tmp_path / "plain", *more)
    train(qwen25, task, tmp_path / "average", *more, EMA)
    for step in (1, 2):
        assert samples_of(tmp_path / "plain", f"step-{step:06d}") == samples_of(
            tmp_path / "average", f"step-{step:06d}"
        )
    plain, average = (
        tensors(tmp_path / name / "checkpoints" / "step-2") for name in ("plain", "average")
    )
    without_average = {name: value for name, value in average.items() if not name.endswith(".ema")}
    assert same_tensors(plain, without_average)
    assert len(without_average) < len(average)
    assert same_tensors(
        *(tensors(tmp_path / name / "export" / "step-2") for name in ("plain", "average"))
    )
    assert os.readlink(tmp_path / "average" / "export_ema" / "latest") == "step-2"
    exported = tensors(tmp_path / "average" / "export_ema" / "step-1")
    assert exported.keys() == tensors(qwen25).keys()
    assert not same_tensors(exported, tensors(qwen25))
    # What was evaluated is what was exported: the folder answers as the run did.
    ppo.main(
        words(
            "--model",
            tmp_path / "average" / "export_ema" / "latest",
            "--out",
            tmp_path / "again",
            "--eval_only",
            "--eval_data",
            task / "eval.jsonl",
            "--reward",
            f"{task / 'reward.py'}:letters",
            "--max_prompt_tokens 512 --max_new_tokens 6 --prompts_per_step 4 --max_tokens_per_pack 600",
        )
    )
    answers = [
        [row["response"] for row in samples_of(folder, name)]
        for folder, name in (
            (tmp_path / "again" / "evaluation-step-0", "eval-000000"),
            (tmp_path / "average", "eval-000002"),
            (tmp_path / "plain", "eval-000002"),
        )
    ]
    assert answers[0] == answers[1] != answers[2]


# ------------------------------------------------------------------------------------------------ host memory


def run_apart(lines: list[list[str]]) -> None:
    """Whole runs, from the second on as if host and device had memory of their own."""
    for line in lines:
        ppo.main(line)
        fsdp.moved_to = apart
    print(f"{len(MOVED)} tensors moved", flush=True)


@pytest.mark.slow
def test_training_does_not_feel_where_things_rest(qwen25, task, tmp_path):
    """Reference, judge, scalar reward model, critic and average; two steps without moves, and two
    with them. Three ranks: uneven shards, some of them empty."""
    for name in ("judge", "scalar"):
        (tmp_path / name).mkdir()
        for file in qwen25.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    write_judge(tmp_path / "judge", ("correct", "yes"))
    weights = tensors(qwen25)
    head = torch.randn(1, weights["lm_head.weight"].shape[1], generator=seeded(0))
    save_weights(tmp_path / "scalar", weights | {"score.weight": head})
    recipe = json.dumps(
        {"*": [[f"grm:{tmp_path / 'judge'}", 1], [f"rm:{tmp_path / 'scalar'}", 0.1]]}
    )
    more = (
        "--reward_recipe",
        recipe,
        "--prompts_per_step 3 --kl_coef 0.1 --kl_in loss --kl_estimator full --reference_every 1 --critic_lr 1e-3",
        EMA,
        "--eval_data",
        str(task / "eval-3.jsonl"),
    )
    lines = []
    for name, extra in (
        ("plain", "--steps 2 --save_every -1"),
        ("moved", "--steps 2 --save_every -1 --offload all"),
    ):
        line = flags(qwen25, task, tmp_path / name, *more, extra)
        lines.append(line)
    told = ranks.run(run_apart, lines, world=3, patches=[(samples_of_every_step,)])
    plain, moved = (
        tensors(tmp_path / name / "checkpoints" / "step-2") for name in ("plain", "moved")
    )
    assert same_tensors(plain, moved)
    assert any(name.startswith("critic.optimizer.state") for name in moved)
    assert any(name.startswith("reference.model") for name in moved)
    for name in ("step-000001", "step-000002", "eval-000002"):
        assert samples_of(tmp_path / "plain", name) == samples_of(tmp_path / "moved", name)
    moves = re.findall(r"(\d+) tensors moved", told)
    assert len(moves) == 3
    assert all(int(count) > 500 for count in moves)


def test_every_tensor_of_a_model_and_of_a_state_is_moved(qwen25, picture_rows, monkeypatch):
    monkeypatch.setattr(fsdp, "moved_to", apart)
    env = start(qwen25, picture_rows, "--kl_coef 0.1 --offload optimizer", EMA)
    role = ppo.make_trainables(env.args, ppo.Models(env.actor, None, env.reference))["actor"]
    trained = [p for p in env.actor.parameters() if p.requires_grad]
    MOVED.clear()
    fsdp.move(role, env.ranks.device)
    assert len(MOVED) == 3 * len(trained)
    state = role.optimizer.state.values()
    held = {
        of_parameter[name].to_local().data_ptr()
        for of_parameter in state
        for name in ("exp_avg", "exp_avg_sq", "ema")
    }
    assert held == {tensor.data_ptr() for _, tensor in MOVED}
    MOVED.clear()
    before = dict(env.reference.named_parameters())
    fsdp.move(env.reference, env.ranks.device)
    tensors_of = [*env.reference.parameters(), *env.reference.buffers()]
    assert {shard_of(t).data_ptr() for t in tensors_of} == {
        tensor.data_ptr() for _, tensor in MOVED
    }
    assert all(before[name] is p for name, p in env.reference.named_parameters())
    assert sum(size for size, _ in MOVED) == sum(
        shard_of(t).numel() * t.element_size() for t in tensors_of
    )


def test_a_gpu_is_relieved(gpu, qwen25, picture_rows):
    """Memory of the device falls by what is moved, the host's copy is pinned, and the log-probs are
    the same after the way back."""
    env = start(qwen25, picture_rows, "--kl_coef 0.1 --offload optimizer", EMA)
    trained = ppo.make_trainables(env.args, ppo.Models(env.actor, None, env.reference))["actor"]
    batch = hand_batch(env)
    expected = score(env.reference, batch)

    def weights():
        return [shard_of(parameter) for parameter in env.reference.parameters()]

    def optimizer_state():
        states = trained.optimizer.state.values()
        return [
            shard_of(state[name]) for state in states for name in ("exp_avg", "exp_avg_sq", "ema")
        ]

    for part, held in ((env.reference, weights), (trained, optimizer_state)):
        fsdp.move(part, env.ranks.device)
        before, size = torch.cuda.memory_allocated(), sum(tensor.nbytes for tensor in held())
        fsdp.move(part, torch.device("cpu"))
        assert before - torch.cuda.memory_allocated() >= size > 0
        assert all(tensor.is_pinned() for tensor in held() if tensor.numel())
        fsdp.move(part, env.ranks.device)
        assert all(tensor.is_cuda for tensor in held())
    assert torch.equal(score(env.reference, batch), expected)
