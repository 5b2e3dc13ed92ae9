"""A vision tower that is trained: gradients of one Hugging Face forward and backward per sample,
the same step on one and two ranks where some rows hold no picture, a reference that keeps the tower
it began with."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

import train_grm_vl as grm
import train_ppo_vl as ppo
from common.model import vlm
from common.model.build import recompute_layers
from conftest import (
    ROUNDING,
    computing,
    hugging_face,
    inputs_of,
    keep_activations,
    logits_of,
    our_name,
    records,
    reproducible,
    responses_of,
    rounding,
    start,
    take,
    token_logprobs,
    user_error,
)
from families import write_family
from helpers import (
    changed,
    distance,
    evaluation,
    gradient,
    hand_batch,
    judge_flags,
    resumed,
    score,
    signed_gradients,
    stir_value_head,
    tensors,
)

pytestmark = pytest.mark.usefixtures("write_samples")


@pytest.fixture(scope="module")
def env(checkpoint, picture_rows):
    env = start(checkpoint, picture_rows, "--train_vision --kl_coef 0.1")
    env.folder, env.batch = checkpoint, hand_batch(env)
    stir_value_head(env.critic)
    return env


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_gradients_equal_one_backward_per_sample(env):
    """Prompts with 0, 1 and 2 pictures; in one pack, in many, in some without a picture, and with
    checkpointing."""
    batch = env.batch
    signs = torch.linspace(-1, 1, len(batch.tokens))
    model, body = (hugging_face(env.folder) for _ in range(2))
    head = env.critic.value_head.weight.full_tensor().detach()
    for group, tokens, weight in zip(
        batch.prompt_index.tolist(), batch.split(batch.tokens), batch.split(signs)
    ):
        logits = logits_of(model, env.prompts[group], tokens, env.processor)
        (weight * token_logprobs(logits, tokens)).sum().backward()
        inputs = inputs_of(env.prompts[group], tokens, env.processor)
        hidden = body(**inputs, output_hidden_states=True).hidden_states[-1]
        (weight * (hidden[0, -len(tokens) - 1 : -1] @ head[0])).sum().backward()
    many = {"max_tokens_per_pack": 75, "apart": True}
    assert not env.prompts[0].images
    assert all(prompt.images for prompt in env.prompts[1:])
    for module, oracle in ((env.actor, model), (env.critic, body)):
        expected = {
            f"model.{our_name(name)}": p.grad
            for name, p in oracle.named_parameters()
            if p.grad is not None
        }
        tower = {name for name in expected if "visual" in name}
        module.train()
        for changes in ({}, {"max_tokens_per_pack": 110}, many, "checkpointing"):
            if changes == "checkpointing":
                recompute_layers(module.model)
            # the first row has no picture
            parts = ([0], [1, 2, 3]) if changes else ([0, 1, 2, 3],)
            changes = {} if changes == "checkpointing" else changes
            with computing(module, **changes):
                actual = signed_gradients(module, batch, signs, parts)
            actual.pop("value_head.weight", None)
            assert distance(actual, expected) < ROUNDING, changes
            assert (
                distance({n: actual[n] for n in tower}, {n: expected[n] for n in tower}) < 1e-4
            ), changes
            for name in tower:
                assert (actual[name] - expected[name]).norm() < 1e-4 * expected[
                    name
                ].norm() + rounding(16), (name, changes)
        keep_activations(module.model)


def test_the_reference_keeps_its_tower(env, picture_rows):
    """The actor's tower moves; rollouts and training see the new one, the reference the old one."""
    base = start(env.folder, picture_rows)
    expected = score(base.actor, seen_by(base, env.batch))
    assert (score(env.reference, env.batch) - expected).abs().max() < ROUNDING
    assert (score(env.actor, env.batch) - expected).abs().max() < ROUNDING
    moved = start(env.folder, picture_rows, "--train_vision --kl_coef 0.1")
    with torch.no_grad():
        for parameter in vlm.tower_parameters(moved.actor.model):
            parameter.to_local().mul_(1.1)
    batch = ppo.rollout(moved.actor, take(moved), moved.sampling, 2)
    assert (score(moved.actor, batch) - batch.logprobs).abs().max() < ROUNDING
    old = score(base.actor, seen_by(base, batch))
    assert (score(moved.reference, batch) - old).abs().max() < ROUNDING
    assert (batch.logprobs - old).abs().max() > 1e-2


def seen_by(env, batch):
    """The samples of a batch after prompts with the image features of another model."""
    other = take(env).with_responses(responses_of(batch))
    other.sampling = batch.sampling
    with torch.no_grad():
        vlm.compute_features(env.actor.model, other)
    return other


RUN = "--train_vision --kl_coef 0.1 --actor_lr 1e-3 --critic_lr 1e-3 --steps 4 --minibatches 2"


@pytest.mark.slow
def test_a_run_trains_the_tower_and_resumes_bit_by_bit(qwen25, task, tmp_path):
    whole = resumed(qwen25, task, tmp_path, RUN)
    steps = records(whole)
    assert steps[0]["train/kl"] < rounding(16) < steps[-1]["train/kl"]
    assert all(step["train/sampler_gap"] < ROUNDING for step in steps)
    moved = changed(tensors(qwen25), tensors(whole / "export" / "step-4"))
    assert any("visual.merger" in key for key in moved)
    assert any("visual.blocks.0" in key for key in moved)
    AutoModelForImageTextToText.from_pretrained(whole / "export" / "step-4")


def test_rows_with_pixels_are_rows_with_features(qwen25, picture_rows):
    """The language model gets the same gradient from its own tower and from a frozen one."""
    by_tower = []
    for more in ((), ("--train_vision",)):
        env = start(qwen25, picture_rows, *more)
        whole, _ = gradient(env.args, env.actor, hand_batch(env))
        by_tower.append({name: value for name, value in whole.items() if "visual" not in name})
    assert distance(*by_tower) < ROUNDING


def test_refusals(qwen25, picture_rows, tmp_path):
    write_family("qwen2", tmp_path, picture_rows)
    with user_error("--train_vision: qwen2 has no vision tower"):
        start(tmp_path, tmp_path / "rows.jsonl", "--train_vision")
    with user_error("--train_vision excludes --lora_rank"):
        start(qwen25, picture_rows, "--train_vision --lora_rank 2")


@pytest.mark.slow
def test_a_judge_evaluates_as_with_a_frozen_tower(qwen25, judgements, tmp_path):
    """Before any step: what it says, and its losses and likelihoods."""
    metrics = [
        grm.main(judge_flags(qwen25, judgements, tmp_path / str(len(more)), *more, "--eval_only"))
        for more in ((), ("--train_vision",))
    ]
    frozen, trained = map(reproducible, metrics)
    assert trained == pytest.approx(frozen, abs=ROUNDING)
    assert frozen["eval/num_samples"] > 5
    folders = [tmp_path / name / "evaluation-step-0" for name in "01"]
    texts = [
        [record["generated_text"] for record in evaluation(folder, 0)["records"]]
        for folder in folders
    ]
    assert texts[0] == texts[1]
