"""A vision tower that is trained: gradients of one Hugging Face forward and backward per sample,
the same step on one and two ranks where some rows hold no picture, a reference that keeps the tower
it began with."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common.model import vlm
from common.model.build import recompute_layers
from common.model.packs import make_packs
from conftest import (
    ROUNDING,
    computing,
    hugging_face,
    inputs_of,
    keep_activations,
    our_name,
    records,
    reproducible,
    responses_by_prompt,
    rounding,
    seeded,
    start,
    take,
    token_logprobs,
    user_error,
    write_checkpoint,
)
from families import write_family
from helpers import (
    assert_same_run,
    distance,
    evaluation,
    flags,
    gradient,
    hand_batch,
    judge_flags,
    resumed,
    samples_of_every_step,
    score,
    tensors,
)

pytestmark = pytest.mark.usefixtures("write_samples")


def gradients(env, module, signs: torch.Tensor, parts=([0, 1, 2, 3],)) -> dict[str, torch.Tensor]:
    """Of the sum of signs x outputs over all tokens, accumulated over the packs of each part of the
    prompts."""
    for groups in parts:
        for pack in make_packs(module.model, env.batch, groups):
            out = module(pack) if module is env.critic else module(pack, env.sampling)[0]
            (signs[pack.flat] * out).sum().backward()
    of_parameters = {
        name: p.grad.full_tensor() for name, p in module.named_parameters() if p.requires_grad
    }
    module.zero_grad(set_to_none=True)
    return of_parameters


@pytest.fixture(scope="module")
def env(checkpoint, picture_rows):
    env = start(checkpoint, picture_rows, "--train_vision --kl_coef 0.1")
    env.folder, env.batch = checkpoint, hand_batch(env)
    head = torch.randn(1, env.critic.value_head.in_features, generator=seeded(5))
    with torch.no_grad():
        env.critic.value_head.weight.to_local().copy_(head)
    return env


@pytest.mark.slow
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
        inputs = inputs_of(env.prompts[group], tokens, env.processor) | {"use_cache": False}
        places = slice(-len(tokens) - 1, -1)
        logits = model(**inputs).logits[0, places]
        logits[:, list(env.processor.banned_ids)] = -torch.inf
        (weight * token_logprobs(logits, tokens)).sum().backward()
        (
            weight
            * (body(**inputs, output_hidden_states=True).hidden_states[-1][0, places] @ head[0])
        ).sum().backward()
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
                actual = gradients(env, module, signs, parts)
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
    other = take(env).with_targets(responses_by_prompt(batch))
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
    before, one = tensors(qwen25), tensors(whole / "export" / "step-4")
    assert before.keys() == one.keys()
    moved = {key for key in before if not torch.equal(before[key], one[key])}
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
    for kind in ("llava", "qwen2"):
        write_family(kind, tmp_path / kind, picture_rows)
        with user_error(
            f"--train_vision: the checkpoint is of the family {kind}; only vision towers"
        ):
            start(tmp_path / kind, tmp_path / kind / "rows.jsonl", "--train_vision")
    with user_error("--train_vision excludes --lora_rank"):
        start(qwen25, picture_rows, "--train_vision --lora_rank 2")


@pytest.mark.slow
def test_one_rank_equals_two(qwen25, task, judgements, tmp_path):
    """With a critic and a reference, several packs, rows without pictures and ranks without rows;
    and a judge."""
    other = write_checkpoint(tmp_path / "qwen3", "qwen3_vl")
    judge = judge_flags(
        qwen25, judgements, Path("judge"), "--train_vision --steps 3 --eval_every -1"
    )
    plans = []
    for world in (1, 2):
        out = tmp_path / str(world)
        plans.append(
            [
                (
                    ppo.main,
                    flags(
                        qwen25,
                        task,
                        out / "gae",
                        RUN,
                        "--steps 3 --prompts_per_step 4 --eval_data",
                        task / "eval.jsonl",
                        "--eval_every 2 --max_tokens_per_pack 524",
                    ),
                ),
                (
                    ppo.main,
                    flags(
                        other,
                        task,
                        out / "full",
                        "--train_vision --advantage grpo --steps 2 --prompts_per_step 3 --kl_coef 0.1 "
                        "--kl_in loss --kl_estimator full --gradient_checkpointing --dynamic_sampling 2 "
                        "--max_tokens_per_pack 524",
                    ),
                ),
                (grm.main, [str(out / "judge") if word == "judge" else word for word in judge]),
            ]
        )
    ranks.run(ranks.in_turn, *plans[1], world=2, patches=[(samples_of_every_step,)])
    ranks.in_turn(*plans[0])
    for name, step in (("gae", 3), ("full", 2), ("judge", 3)):
        one, two = (tmp_path / world / name for world in "12")
        if name == "judge":
            first, second = (
                [reproducible(record) for record in records(out)] for out in (one, two)
            )
            assert len(first) == len(second) >= 4
            for ours, theirs in zip(first, second):
                assert theirs == pytest.approx(ours, abs=1e-4, rel=1e-4)
        else:
            assert_same_run(one, two)
        ours, theirs = (tensors(out / "export" / f"step-{step}") for out in (one, two))
        before = tensors(other if name == "full" else qwen25)
        for key in ours:
            assert (ours[key] - theirs[key]).norm() <= 1e-3 * ours[key].norm() + rounding(16), key
        assert sum("visual" in key and not torch.equal(before[key], ours[key]) for key in ours) > 10


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
