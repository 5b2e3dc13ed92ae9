"""Updates and whole runs: gradients against a naive oracle and against themselves under other
packings, 1 rank against 2 and more, export, schedules, and what a run does when something goes
wrong."""

import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoModelForImageTextToText

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common import distributed, logging, losses
from common.data.processor import Processor
from common.data.rows import load_prompts
from common.distributed import gather_objects, raise_on_all_ranks
from common.flags import DataArgs
from common.ground import process
from common.ground.cards import sample_card
from common.model import fsdp, vlm
from common.model import weights as vlm_weights
from common.model.packs import exchange_features
from conftest import (
    ROUNDING,
    Tensors,
    assert_same_records,
    computing,
    hugging_face,
    inputs_of,
    logits_of,
    marked,
    read_json,
    read_rows,
    records,
    reproducible,
    responses_of,
    rounding,
    same_tensors,
    seeded,
    start,
    table,
    take,
    token_logprobs,
    user_error,
    with_flags,
    words,
    write_checkpoint,
    write_json,
    write_judge,
    write_rows,
)
from helpers import (
    HAND_FLAGS,
    TALKING,
    Caught,
    assert_close_weights,
    assert_same_run,
    changed,
    distance,
    flags,
    fresh,
    gradient,
    hand_batch,
    hand_env,
    launch,
    on_a_gpu,
    resumed,
    samples_of,
    samples_of_steps,
    score,
    tensors,
    train,
    trainable,
    update_actor,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("write_samples")


# ------------------------------------------------------------------------------------------------ set-up
def evaluate_only(checkpoint: Path, task: Path, out: Path, *more: str | Path) -> dict:
    """The metrics of the seven held-out rows."""
    return ppo.main(
        flags(checkpoint, task, out, "--eval_data", task / "eval.jsonl", "--eval_only", "--", *more)
    )


@pytest.fixture(scope="module")
def env(qwen25, picture_rows):
    return hand_env(qwen25, picture_rows)


@pytest.fixture(scope="module")
def exact(qwen25, picture_rows):
    """The same in float64, in which two orders of the same additions agree to 1e-10 on every CPU."""
    return hand_env(qwen25, picture_rows, torch.float64)


# ------------------------------------------------------------------------------------------------ gradients
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "token-sum"])
@pytest.mark.parametrize("part", ["actor", "critic"])
def test_gradient_does_not_depend_on_packing_or_order(exact, part, mode):
    module, args = getattr(exact, part), with_flags(exact.args, loss_aggregation=mode)
    expected, packs = gradient(args, module, exact.batch)
    assert packs == 1
    assert all(value.norm() > 0 for value in expected.values())
    shuffled = exact.batch.select(torch.randperm(16, generator=seeded(1)))
    for batch, at_least, changes in (
        (exact.batch, 3, {"max_tokens_per_pack": 110}),
        # no response shares its prompt
        (exact.batch, 5, {"max_tokens_per_pack": 75, "apart": True}),
        (exact.batch, 1, {"head_chunk": 7}),
        (shuffled, 3, {"max_tokens_per_pack": 110}),
    ):
        with computing(module, **changes):
            result, packs = gradient(args, module, batch)
        assert packs >= at_least and distance(result, expected) < 1e-10, changes


def test_weights_of_a_minibatch_are_those_of_its_tokens(env):
    """Its own tokens, and its own sequences that have any, count; also where only some tokens take part."""
    places = torch.arange(len(env.batch.tokens))
    third, parts = places % 3 == 0, env.batch.split(places)
    assert len(parts[1]) == 0
    assert not third[parts[3]].any()  # no tokens, and none that take part
    for mode, mask in itertools.product(losses.AGGREGATIONS, (torch.ones_like(third), third)):
        args, expected = with_flags(env.args, loss_aggregation=mode), torch.zeros(len(places))
        chosen = [
            part[mask[part]]
            for part, prompt in zip(parts, env.batch.prompt_index)
            if prompt in (0, 2)
        ]
        weights = losses.token_weights(
            torch.tensor(list(map(len, chosen))), mode, args.max_new_tokens
        )
        for part, weight in zip(chosen, weights):
            expected[part] = weight
        actual = ppo.minibatch_weights(env.batch, [0, 2], mask, args)
        assert torch.allclose(actual, expected, rtol=rounding(16), atol=0), mode


def test_gradient_equals_naive_oracle(env, qwen25):
    """Actor with clip, dual clip, entropy bonus, KL loss, temperature and banned tokens; critic
    with value clip: one forward per sample through Hugging Face's own model, the loss written out
    per token. No flag has its default."""
    oracle = hugging_face(qwen25)
    twin = hugging_face(qwen25)  # the critic's body
    head = env.critic.value_head.weight.full_tensor().detach().clone().requires_grad_()
    samples, total = env.batch, len(env.batch.tokens)
    columns = [
        samples.split(getattr(samples, name))
        for name in ("tokens", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
    ]
    for index, tokens, old, ref, adv, old_value, target in zip(
        samples.prompt_index.tolist(), *columns
    ):
        prompt = env.prompts[index]
        logits = logits_of(oracle, prompt, tokens, env.processor) / 0.7
        # --min_new_tokens 2
        logits[:2, list(env.processor.stop_ids)] = -torch.inf
        logp_all = logits.log_softmax(-1)
        logp = logp_all.gather(1, tokens[:, None])[:, 0]
        entropy = -(logp_all.exp() * logp_all.masked_fill(logp_all.isinf(), 0.0)).sum(-1)
        ratio = (logp - old).exp()
        term = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.85, 1.25))
        term = torch.where(adv < 0, torch.minimum(term, -2.5 * adv), term)
        # gradient of k3+ is k2's
        kl = 0.5 * (logp - ref) ** 2
        ((term - 0.01 * entropy + 0.1 * kl).sum() / total).backward()
        inputs = inputs_of(prompt, tokens, env.processor)
        hidden = twin(**inputs, output_hidden_states=True).hidden_states[-1][
            0, len(prompt.input_ids) - 1 : -1
        ]
        value = hidden @ head[0]
        clipped = old_value + (value - old_value).clamp(-0.3, 0.3)
        (
            0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2).sum() / total
        ).backward()
    for module, model in ((env.actor, oracle), (env.critic, twin)):
        expected = {
            f"model.{name}": p.grad for name, p in model.named_parameters() if "visual" not in name
        }
        if module is env.critic:
            expected["value_head.weight"] = head.grad
            expected.pop("model.lm_head.weight")
        assert distance(gradient(env.args, module, samples)[0], expected) < ROUNDING


def test_an_update_has_that_gradient(exact):
    """`gradient` above repeats what the updates do with their rows: both clip, weigh and scale alike."""
    # the controller's weight counts, not the flag it began with
    args = with_flags(exact.args, kl_coef=0.3)
    batch = dataclasses.replace(exact.batch, kl_coef=0.3)
    actor, critic = Caught(exact.actor, args), Caught(exact.critic, args)
    with (
        computing(exact.actor, max_tokens_per_pack=110),
        computing(exact.critic, max_tokens_per_pack=110),
    ):
        ppo.update_critic(critic, batch, 1, exact.args)
        ppo.update_actor(actor, None, batch, 1, None, exact.args)
    for trained in (actor, critic):
        assert (
            distance(trained.gradients[0], gradient(args, trained.module, exact.batch)[0]) < 1e-10
        )


def test_gradient_checkpointing_gives_the_same_gradients(exact, qwen25, picture_rows):
    other = start(qwen25, picture_rows, "--gradient_checkpointing", HAND_FLAGS)
    assert other.actor.model.model.language_model.layers[0].gradient_checkpointing
    other.critic.double().value_head.load_state_dict(exact.critic.value_head.state_dict())
    other.actor.double()
    for part in ("actor", "critic"):
        module = getattr(other, part).train()
        expected, _ = gradient(exact.args, getattr(exact, part), exact.batch)
        assert distance(gradient(other.args, module, exact.batch)[0], expected) < 1e-10


def test_importance_weight_acts_only_with_recomputed_logprobs(exact):
    def gradient_of(cap: float, shift: float) -> Tensors:
        args = with_flags(exact.args, kl_in="reward", entropy_coef=0.0, importance_cap=cap)
        batch = dataclasses.replace(exact.batch, logprobs=exact.batch.logprobs - shift)
        return gradient(args, exact.actor, batch)[0]

    assert distance(gradient_of(0.0, 0.5), gradient_of(0.0, 0.0)) == 0
    assert distance(gradient_of(2.0, 0.5), gradient_of(2.0, 0.0)) > 1e-3
    at_the_cap = gradient_of(2.0, 50.0)
    assert distance(gradient_of(2.0, 100.0), at_the_cap) == 0
    higher = {name: value / 1.5 for name, value in gradient_of(3.0, 50.0).items()}
    assert distance(higher, at_the_cap) < 1e-10


# ------------------------------------------------------------------------------------------------
# optimizer, schedule
@pytest.mark.parametrize(
    "delay, line, factors",
    table("""
0 | --steps 3                                                                  | 1 1 1
0 | --steps 5 --warmup_steps 3                                                 | 0.25 0.5 0.75 1 1
0 | --steps 2 --warmup_steps 5                                                 | 0.1667 0.3333
0 | --steps 1 --lr_schedule linear --min_lr_ratio 0                            | 1
0 | --steps 5 --lr_schedule linear --min_lr_ratio 0                            | 1 0.8 0.6 0.4 0.2
2 | --steps 7 --lr_schedule linear --min_lr_ratio 0                            | 1 0.8 0.6 0.4 0.2
0 | --steps 5 --lr_schedule linear                                             | 0.82 0.64 0.46 0.28 0.1
0 | --steps 5 --lr_schedule linear --min_lr_ratio 0 --warmup_steps 2           | 0.3333 0.6667 1 0.6667 0.3333
0 | --steps 1 --lr_schedule cosine --min_lr_ratio 0                            | 1
0 | --steps 4 --lr_schedule cosine --min_lr_ratio 0                            | 1 0.8536 0.5 0.1464
0 | --steps 6 --lr_schedule cosine --min_lr_ratio 0.5 --warmup_steps 2
    | 0.3333 0.6667 0.9268 0.75 0.5732 0.5
"""),
)
def test_lr_schedule(delay, line, factors):
    args = ppo.parse_args(words("--model m --data d.jsonl", line))
    trained = SimpleNamespace(rates=[1.0], delay=int(delay), args=args)
    steps = range(1 + trained.delay, args.steps + 1)
    rates = [round(fsdp.Trainable.rates_at(trained, step)[0], 4) for step in steps]
    assert rates == list(map(float, factors.split()))


def test_each_group_of_parameters_keeps_a_rate_of_its_own(qwen25, picture_rows):
    """The schedule scales it; a matrix at rate 0 stays as it is. Without a step, the state is that
    of no step."""
    env = start(qwen25, picture_rows, "--steps 5 --warmup_steps 3")
    optimizer = ppo.adamw(env.actor, 1e-2, env.args)
    for group, rate in zip(optimizer.param_groups, (0.0, 0.4)):
        group["lr"] = rate
    before = weights_of(env.actor)
    trained = fsdp.Trainable(env.actor, optimizer, env.args)
    parameters = [p for p in env.actor.parameters() if p.requires_grad]
    assert optimizer.state.keys() == set(parameters)
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())
    assert all(torch.equal(value, before[name]) for name, value in weights_of(env.actor).items())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert ppo.take_step(trained, 2)[1]
    assert (
        [group["lr"] for group in optimizer.param_groups]
        == [0, pytest.approx(0.2)]
        == trained.rates_at(2)
    )
    for name, parameter in env.actor.named_parameters():
        assert torch.equal(weights_of(env.actor)[name], before[name]) == (
            parameter.ndim >= 2 or not parameter.requires_grad
        )


def test_weight_decay_spares_biases_and_norms(env):
    for module in (env.actor, env.critic):
        optimizer = ppo.adamw(module, 1e-3, with_flags(env.args, weight_decay=0.1))
        decay = {
            id(p): group["weight_decay"]
            for group in optimizer.param_groups
            for p in group["params"]
        }
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        assert set(decay) == {id(p) for p in trained.values()}
        assert not any("visual" in name for name in trained)
        for name, parameter in trained.items():
            assert decay[id(parameter)] == (0.1 if parameter.ndim >= 2 else 0.0), name
        assert any(name.endswith("bias") for name in trained)


def test_scoring_leaves_the_weights_sharded(qwen25, picture_rows):
    """A forward without a backward leaves FSDP's root group gathered: embedding and head in full on
    every rank, and plain tensors where a checkpoint or an optimizer expects shards."""
    env = start(qwen25, picture_rows, "--kl_coef 0.1")
    batch = hand_batch(env)
    for module in (env.actor, env.critic, env.reference):
        ppo.values_of(module, batch) if module is env.critic else score(module, batch)
        sharded = {name for name, p in module.named_parameters() if isinstance(p, DTensor)}
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        assert sharded == trained, type(module).__name__
        assert bool(trained) == (module is not env.reference)  # one rank holds what is frozen whole


# ------------------------------------------------------------------------------------------------ updates
def test_a_step_is_adamw_on_clipped_gradients(qwen25, picture_rows):
    """As torch takes it on whole tensors: two steps with gradients far beyond the bound on their
    global norm, and one below it."""
    env = fresh(qwen25, picture_rows, "--max_grad_norm 0.5 --weight_decay 0.1 --adam_beta2 0.7")
    ours = {name: p for name, p in env.actor.named_parameters() if p.requires_grad}
    whole = {name: torch.nn.Parameter(p.full_tensor().clone()) for name, p in ours.items()}
    groups = [{"params": [p], "weight_decay": 0.1 * (p.ndim >= 2)} for p in whole.values()]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.7))
    for step, size in enumerate((3.0, 1.0, 1e-4), 1):
        for parameter in (*ours.values(), *whole.values()):
            parameter.grad = (size * parameter + 0.1 * size).detach()
        norm = float(torch.nn.utils.clip_grad_norm_(whole.values(), 0.5))
        assert (norm > 0.5) == (step < 3)
        assert ppo.take_step(env.trained, step) == (pytest.approx(norm, rel=ROUNDING), True)
        adamw.step()
        for name, parameter in ours.items():
            actual, expected = parameter.full_tensor(), whole[name]
            assert torch.allclose(actual, expected, rtol=1e-4, atol=ROUNDING), name


def note_dtensors(patch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each list that clipping and AdamW give to torch's operators holds DTensors."""
    told = []
    for name in ("_foreach_norm", "_foreach_mul_", "_fused_adamw_"):

        def watched(tensors, *more, inner=getattr(torch, name), **named):
            told.append(isinstance(tensors[0], DTensor))
            return inner(tensors, *more, **named)

        patch.setattr(torch, name, watched)
    return told


def clip_as_torch_does(trained) -> float:
    bound = trained.args.max_grad_norm or math.inf
    return float(torch.nn.utils.clip_grad_norm_(trained.module.parameters(), bound).full_tensor())


def step_on_shards() -> None:
    """Two steps of ours and of torch's own, on parameters whose shards differ in size or are empty."""
    for hsdp in (0, 2):
        mesh = distributed.start(60.0, hsdp).mesh
        cut = [Replicate()] * bool(hsdp) + [Shard(0)]
        made, with_lists = [], []
        for adamw, clip in (
            (torch.optim.AdamW, clip_as_torch_does),
            (fsdp.AdamW, fsdp.Trainable.clip_gradients),
        ):
            module, generator = torch.nn.Module(), seeded(0)
            module.parts = torch.nn.ParameterList(
                distribute_tensor(torch.randn(rows, 3, generator=generator), mesh, cut)
                for rows in (1, 2, 5, 4)
            )
            optimizer = adamw(module.parameters(), lr=0.1, fused=True)
            for bound in (0.5, 0.0):
                args = SimpleNamespace(max_grad_norm=bound)
                for p in module.parameters():
                    p.grad = distribute_tensor(torch.randn(p.shape, generator=generator), mesh, cut)
                with pytest.MonkeyPatch.context() as patch:
                    with_lists.append(note_dtensors(patch))
                    norm = clip(SimpleNamespace(module=module, args=args))
                    optimizer.step()
                made += [torch.tensor(norm), *map(vlm_weights.whole, module.parameters())]
        half = len(made) // 2
        assert all(map(torch.equal, made[:half], made[half:]))
        assert [set(lists) for lists in with_lists] == [{True}] * 2 + [{False}] * 2


def test_a_step_on_shards_is_that_on_dtensors():
    """Bit for bit, with four shards and with two copies of two; without operators on lists of DTensors, whose
    first call takes a time that grows with the square of their number."""
    ranks.run(step_on_shards, world=4)


@pytest.mark.slow
def test_every_epoch_of_every_step_has_an_order_of_its_own(qwen25, picture_rows, monkeypatch):
    env, seen, inner = fresh(qwen25, picture_rows), [], ppo.minibatches_of

    def watched(*arguments, **named):
        for part in inner(*arguments, **named):
            seen.extend(part.indices)
            yield part

    monkeypatch.setattr(ppo, "minibatches_of", watched)
    args = with_flags(env.args, minibatches=4, epochs=3)
    actor, critic = (trainable(module, env.args, 0.0) for module in (env.actor, env.critic))
    for step in (1, 2):
        ppo.update_actor(actor, None, env.batch, step, None, args)
        ppo.update_critic(critic, env.batch, step, args)
    assert seen[:12] == seen[12:24]
    # the critic's order is the actor's
    assert seen[24:36] == seen[36:]
    orders = [tuple(map(int, seen[k : k + 4])) for k in (0, 4, 8, 24)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(set(orders)) == 4


def test_target_kl_stops_a_steps_updates(qwen25, picture_rows):
    counts = []
    for target in ("0", "1e-9", "1e9"):
        env = fresh(qwen25, picture_rows, "--target_kl", target)
        metrics = update_actor(env)
        counts.append(metrics["train/actor_updates"])
        assert metrics["train/sampler_gap"] < ROUNDING
    assert counts == [4, 1, 4]
    rows = [{"approx_kl": logging.Mean(torch.tensor(kl), 2)} for kl in (0.3, 0.1)]  # 0.1 per token
    assert ppo.exceeds(rows, 0.09)
    assert not ppo.exceeds(rows, 0.11)


def test_a_statistic_of_a_loss_needs_no_other_mention(qwen25, picture_rows, monkeypatch):
    """Its type says how it is reduced over packs, ranks and updates."""
    env, inner, rows = fresh(qwen25, picture_rows), ppo.actor_loss, []

    def loss_with_more(actor, reference, row, batch, part, *rest):
        loss, stats = inner(actor, reference, row, batch, part, *rest)
        rows.append(row)
        stats["my_term"] = logging.Share((part.weights[row.flat] * 3.0).sum())
        stats["my_mean"] = logging.Mean(row.targets.sum(), len(row.targets))
        stats["my_top"] = logging.Largest(row.targets.max() if len(row.targets) else -math.inf)
        if len(rows) == 1:
            stats["my_rare"] = logging.Mean(5, 2)
        return loss, stats

    monkeypatch.setattr(ppo, "actor_loss", loss_with_more)
    with computing(env.actor, max_tokens_per_pack=110):
        metrics = update_actor(env)
    assert metrics["train/actor_updates"] == 4 < len(rows)
    # the weights of a minibatch sum to 1
    assert metrics["train/my_term"] == pytest.approx(3)
    assert metrics["train/my_mean"] == pytest.approx(float(env.batch.tokens.double().mean()))
    assert metrics["train/my_top"] == env.batch.tokens.max()
    assert metrics["train/my_rare"] == 2.5


def test_a_non_finite_minibatch_is_skipped_and_counted(qwen25, picture_rows, monkeypatch):
    """All four minibatches bad: weights and Adam's moments stay as they were. One bad: the others
    are applied."""
    env = fresh(qwen25, picture_rows)
    before, calls, bad = weights_of(env.actor), [], {1, 2, 3, 4}

    def broken(*args):
        output = losses.ppo(*args)
        calls.append(1)
        if len(calls) in bad:
            output.per_token = output.per_token * math.inf
        return output

    monkeypatch.setitem(ppo.POLICY_LOSSES, "ppo", ppo.POLICY_LOSSES["ppo"]._replace(compute=broken))
    metrics = update_actor(env)
    assert metrics["train/actor_skipped"] == 1
    assert metrics["train/actor_updates"] == 0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(env.actor).items())
    assert all(state["step"] == 0 for state in env.trained.optimizer.state.values())
    bad.clear()
    bad.add(6)  # the second of the next four
    metrics = update_actor(env)
    assert metrics["train/actor_skipped"] == 0.25
    assert metrics["train/actor_updates"] == 3
    after = weights_of(env.actor)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize(
    "function, counter",
    marked([("ppo", "train/actor_skipped"), ("value_loss", "train/critic_skipped")]),
)
def test_a_run_survives_a_non_finite_minibatch(
    qwen25, task, tmp_path, monkeypatch, function, counter
):
    """The record of the step must be written: a NaN in the loss is counted, not logged."""
    compute, calls = getattr(losses, function), []

    def broken(*args):
        output = compute(*args)
        calls.append(1)
        if len(calls) == 1 and function == "value_loss":
            output = output * math.nan
        elif len(calls) == 1:
            output.per_token = output.per_token * math.nan
        return output

    monkeypatch.setattr(losses, function, broken)
    monkeypatch.setitem(
        ppo.POLICY_LOSSES, "ppo", ppo.POLICY_LOSSES["ppo"]._replace(compute=losses.ppo)
    )
    steps = train(qwen25, task, tmp_path, "--steps 2 --minibatches 2")
    assert [step[counter] for step in steps] == [0.5, 0.0]


def test_frozen_actor_keeps_its_weights(qwen25, task, tmp_path):
    steps = train(
        qwen25, task, tmp_path, "--steps 2 --critic_warmup_steps 2 --epochs 4 --critic_lr 1e-3"
    )
    before, after = tensors(qwen25), tensors(tmp_path / "export" / "step-2")
    assert same_tensors(before, after)
    assert "train/policy_loss" not in steps[0]
    assert steps[0]["train/values"] == 0
    # the critic did learn
    assert abs(steps[1]["train/values"]) > 1e-3


@pytest.mark.slow
def test_actor_moves_after_its_frozen_steps(qwen25, task, tmp_path):
    steps = train(
        qwen25,
        task,
        tmp_path,
        "--steps 3 --critic_warmup_steps 1 --warmup_steps 1 --critic_lr 1e-3",
    )
    assert "train/actor_lr" not in steps[0]
    assert [step["train/actor_lr"] for step in steps[1:]] == [0.0005, 0.001]
    assert [step["train/critic_lr"] for step in steps] == [0.0005, 0.001, 0.001]


# ------------------------------------------------------------------------------------------------
# whole runs, one rank
@pytest.mark.parametrize("advantage", ["gae", "rloo"])
def test_every_estimator_trains(qwen25, task, tmp_path, advantage):
    """With a critic and without; the other estimators train in RUNS and in test_algorithms.py."""
    (step,) = train(
        qwen25, task, tmp_path, "--advantage", advantage, "--kl_coef 0.05 --importance_cap 2"
    )
    moved = changed(tensors(qwen25), tensors(tmp_path / "export" / "step-1"))
    assert moved
    assert not any("visual" in key for key in moved)
    assert step["train/sampler_gap"] < ROUNDING
    assert abs(step["train/ratio"] - 1) < ROUNDING
    assert step["train/kl"] < rounding(16)
    assert ("train/critic_loss" in step) == ("train/values" in step) == (advantage == "gae")
    samples = samples_of(tmp_path, "step-000001")
    assert [s["sample"] for s in samples] == [0, 1, 2] * 4
    assert len({s["index"] for s in samples}) == 4
    rewards = np.array([s["reward"] for s in samples])
    assert step["rollout/reward"] == pytest.approx(rewards.mean(), rel=ROUNDING)
    assert step["rollout/accuracy_reward"] == pytest.approx(
        np.mean([s["components"]["accuracy"] for s in samples])
    )
    for name in ("response_length", "truncated"):
        assert step[f"rollout/{name}"] == pytest.approx(np.mean([s[name] for s in samples]))
    for sample in samples:
        tokens = sample["per_token"]
        assert tokens.keys() == {"text", "advantages", "logprobs", "entropy", "kl"} | (
            {"values"} if advantage == "gae" else set()
        )
        assert "".join(tokens["text"]).startswith(sample["response"])
        for column in tokens.values():
            assert isinstance(column, float) or len(column) == sample["response_length"]
        assert np.mean(tokens["advantages"]) == pytest.approx(sample["advantage"], abs=5e-3)
    if advantage == "rloo":
        baselines = rewards.reshape(4, 3).mean(1).repeat(3)
        assert [s["advantage"] for s in samples] == pytest.approx(
            1.5 * (rewards - baselines), abs=ROUNDING
        )


def test_roles_are_loaded_where_they_are_used(qwen25, picture_rows):
    for line, roles in (
        ("", (True, False)),
        ("--advantage grpo", (False, False)),
        ("--advantage rloo --kl_coef 0.1", (False, True)),
    ):
        env = start(qwen25, picture_rows, *line.split())
        assert (env.critic is not None, env.reference is not None) == roles, line


@pytest.mark.parametrize("place", marked(["reward", "loss"]))
def test_adaptive_kl_weight(qwen25, task, tmp_path, monkeypatch, place):
    """One controller drives either: the weight that the step's rewards, or its updates, see is the
    controller's."""
    seen, inputs_of, update = [], ppo.advantage_inputs, ppo.update_actor

    def note_the_inputs(*args):
        inputs = inputs_of(*args)
        seen.append(inputs.kl_coef)
        return inputs

    if place == "reward":
        monkeypatch.setattr(ppo, "advantage_inputs", note_the_inputs)
    else:
        monkeypatch.setattr(
            ppo, "update_actor", lambda *args: seen.append(args[2].kl_coef) or update(*args)
        )
    steps = train(
        qwen25,
        task,
        tmp_path,
        "--steps 4 --kl_coef 0.1 --kl_target 0.001 "
        "--kl_horizon 24 --critic_warmup_steps 1 --actor_lr 1e-2 --kl_in",
        place,
    )
    value, expected = 0.1, []
    if place == "reward":
        # a frozen step has rewards, and no update
        expected.append(0.1)
    # 12 samples; a frozen step says nothing about the policy's drift
    for step in steps[1:]:
        expected.append(value)
        value *= 1 + np.clip(step["train/kl"] / 0.001 - 1, -0.2, 0.2) * 12 / 24
    assert seen == pytest.approx(expected, rel=ROUNDING)
    assert seen[-1] != pytest.approx(0.1)


@pytest.mark.slow
def test_the_kl_of_the_loss_has_a_gradient_by_default(qwen25, task, tmp_path):
    """--kl_estimator auto is k1 in the reward and k3+ in the loss. A KL in the loss is none in the
    reward."""
    line = "--steps 2 --advantage grpo --kl_coef 0.1 --actor_lr 1e-2 --kl_in"
    for place, estimator in (("reward", "k1"), ("loss", "k3+")):
        args = ppo.parse_args(words("--model m --data d.jsonl", line, place))
        assert args.kl_estimator == estimator
    first, second = train(qwen25, task, tmp_path, line, "loss")
    assert first["train/kl_loss"] < 1e-6 < second["train/kl_loss"]
    assert second["train/kl_loss"] == pytest.approx(second["train/kl"], rel=1e-3)
    assert second["rollout/return"] == pytest.approx(second["rollout/reward"])


@pytest.mark.parametrize(
    "line, text",
    [
        (
            "--steps 1 --critic_warmup_steps 1",
            "--critic_warmup_steps 1 of --steps 1: the actor never learns",
        ),
        (
            "--steps 1 --warmup_steps 1",
            "--warmup_steps 1 of --steps 1: --actor_lr is never reached",
        ),
        (
            "--steps 1 --max_new_tokens 1 --min_new_tokens 1 --mask_truncated",
            "step 1: the actor was not updated",
        ),
        (
            "--steps 1 --max_new_tokens 1 --min_new_tokens 1 --mask_truncated --entropy_coef 0.1 "
            "--target_kl 0.1",
            "",
        ),
    ],
)
def test_a_run_that_learns_nothing_says_so(qwen25, task, tmp_path, capsys, line, text):
    train(qwen25, task, tmp_path, line)
    output = capsys.readouterr().out
    assert text in output if text else not re.search("never|not updated", output)


def test_evaluation_samples_and_pass_at_k(qwen25, task, tmp_path):
    metrics = evaluate_only(qwen25, task, tmp_path / "a", "--eval_samples 2")
    rows = samples_of(tmp_path / "a" / "evaluation-step-0", "eval-000000")
    assert [(row["index"], row["sample"]) for row in rows] == [
        (i, k) for i in range(7) for k in range(2)
    ]
    best = [
        max(row["components"]["accuracy"] for row in rows if row["index"] == i) for i in range(7)
    ]
    assert any(0 < value < 1 for value in best)
    # nearly is not solved
    assert metrics["eval/num_samples"] == 14
    assert metrics["eval/pass@2"] == pytest.approx(best.count(1.0) / 7)
    assert 1.0 in best
    assert metrics["eval/reward_mean"] == pytest.approx(np.mean([row["reward"] for row in rows]))
    assert not (tmp_path / "a" / "export").exists()
    env = start(qwen25, str(task / "eval.jsonl"), "--max_new_tokens 6")
    sampling = dataclasses.replace(env.sampling, stream=ppo.EVAL)  # noise of its own
    drawn = ppo.rollout(env.actor, take(env), sampling, 2)
    assert [row["response"] for row in rows] == env.processor.tokenizer.batch_decode(
        [tokens.tolist() for tokens in drawn.split(drawn.tokens)], skip_special_tokens=True
    )
    greedy = evaluate_only(qwen25, task, tmp_path / "b")
    again = evaluate_only(qwen25, task, tmp_path / "c", "--prompts_per_step 2 --seed 9 --slots 1")
    assert "eval/pass@1" not in greedy
    assert greedy["eval/num_samples"] == 7
    for metrics in (greedy, again):
        assert metrics.pop("eval/seconds") > 0
    # by rounding, of other packs
    gap = greedy.pop("eval/vision_gap_logprob")
    assert again.pop("eval/vision_gap_logprob") == pytest.approx(gap, abs=1e-4)
    assert greedy == again


@pytest.mark.slow
def test_evaluation_after_every_pass_over_the_data(qwen25, task, tmp_path):
    """The default: at the start, after each pass over the 8 rows (3 prompts a step: steps 3, 6 and
    8), at the end."""
    train(
        qwen25,
        task,
        tmp_path,
        "--steps 9 --prompts_per_step 3 --eval_data",
        task / "eval-1.jsonl",
        "--max_new_tokens 2 --advantage reinforce++ --save_every -1",
    )
    names = sorted(path.stem for path in (tmp_path / "samples").glob("eval-*.jsonl"))
    assert names == [f"eval-{step:06d}" for step in (0, 3, 6, 8, 9)]
    evaluated = [record for record in records(tmp_path) if "eval/index" in record]
    columns = [
        (record["eval/index"], record["eval/train_step"], record["eval/episode"])
        for record in evaluated
    ]
    assert columns == [(index, step, step * 3 / 8) for index, step in enumerate((0, 3, 6, 8, 9))]
    state = read_json(tmp_path / "checkpoints" / "step-9" / "state.json")
    # saved: after a resume with another --eval_every the count goes on
    assert state["evaluations"] == 4


def test_evaluation_changes_nothing(qwen25, task, tmp_path):
    """Training with and without evaluations: the same metrics and weights in every bit."""
    line, more = "--steps 2 --minibatches 2", ("--eval_data", task / "eval.jsonl", "--eval_every 1")
    without = train(qwen25, task, tmp_path / "without", line)
    both = train(qwen25, task, tmp_path / "with", line, *more)
    assert [record["step"] for record in both if "eval/index" in record] == [0, 1, 2]
    assert_same_records([record for record in both if "rollout/reward" in record], without)
    exports = (tensors(tmp_path / name / "export" / "step-2") for name in ("with", "without"))
    assert same_tensors(*exports)


def test_what_a_run_tells(qwen25, task, tmp_path, capsys, monkeypatch):
    """The mode at the start, a decoded sample per record, lengths and passes; large advantages are
    nothing to warn of."""
    captions, bars, draw, tell = [], [], sample_card, logging.RunLogger.step
    monkeypatch.setattr(
        "common.reports.records.sample_card", lambda *args: captions.append(args[2]) or draw(*args)
    )
    monkeypatch.setattr(
        logging.RunLogger, "step", lambda *args: bars.append(args[3]) or tell(*args)
    )
    (task / "large.py").write_text(
        "def score(prompts, responses, *rest):\n"
        "    return [60.0 * i for i in range(len(responses))]\n"
    )
    (step,) = train(
        qwen25,
        task,
        tmp_path / "a",
        "--advantage dr_grpo --minibatches 2 --epochs 3 --reward",
        f"{task / 'large.py'}:score",
    )
    text = capsys.readouterr().out
    assert "a step: 4 prompts x 3 samples, 6 updates;" in text
    assert "warning" not in text
    samples = samples_of(tmp_path / "a", "step-000001")
    assert f"-> {samples[0]['response'][:500]!r}  reward 0.000" in text
    per_token = np.repeat([-60.0, 0.0, 60.0] * 4, [sample["response_length"] for sample in samples])
    for name in ("mean", "std", "min", "max"):
        assert step[f"train/advantages_{name}"] == pytest.approx(
            getattr(np, name)(per_token), abs=1e-4
        )
    rows = load_prompts(str(task / "train.jsonl"), Processor(qwen25), DataArgs())
    total = [len(rows[sample["index"]].input_ids) + sample["response_length"] for sample in samples]
    assert step["rollout/total_length"] == pytest.approx(np.mean(total))
    assert all(
        (step[f"{part}/episode"], step[f"{part}/global_step"]) == (0.5, 1)
        for part in ("rollout", "train")
    )
    assert bars[0].keys() >= {"reward", "length", "entropy", "clip"}
    assert captions == [
        f"reward {s['reward']:.2f}   advantage {s['advantage']:+.2f}   reference: 1"
        for s in samples[::3]
    ]
    assert not list(tmp_path.rglob("*.png"))  # TensorBoard has the cards


def warnings_of(env, tmp_path, capsys, *steps: dict) -> list[str]:
    """What is warned of in steps with such metrics, and rewards (of a batch of 16) if they have some."""
    args = with_flags(env.args, prompts_per_step=32, out=tmp_path, log_samples=0)
    state, log = ppo.TrainState(args.kl_coef), ppo.open_log(args, env.rows, 0)
    for state.step, metrics in enumerate(steps, start=1):
        state.metrics = {"rollout/rollouts": 1, "rollout/reward": 0.125} | metrics
        rewards = torch.tensor(state.metrics.pop("rewards", [0.0] * 16))
        batch = dataclasses.replace(env.batch, rewards=rewards)
        ppo.report(log, batch, state, env.rows, SimpleNamespace(metrics=dict), args)
    log.close(5, 5)
    return re.findall("^warning: (.*)", capsys.readouterr().out, re.MULTILINE)


def test_most_prompts_without_spread_are_enough(env, tmp_path, capsys):
    """Not all: 30 of 32 are told, once until it changes; 28 of 32 are not, and neither is a large
    advantage."""
    large = {"train/advantages_max": 60.0, "train/advantages_min": -70.0}
    steps = [large | {"rollout/groups_without_spread": flat} for flat in (28, 30, 31, 28, 29)]
    told = [line.split(" prompts")[0] for line in warnings_of(env, tmp_path, capsys, *steps)]
    assert told == ["step 2: 30 of 32", "step 5: 29 of 32"]


def test_advantages_of_0_where_rewards_differ_are_told(env, tmp_path, capsys):
    """As of pass@k with k samples. Not again while they stay, nor where no prompt's rewards differ, though
    a prompt was dropped."""
    flat = {"rollout/groups_without_spread": 31, "train/advantages_min": 0.0}
    differ = flat | {"rewards": [0.0, 1.0] + [0.0] * 14}
    steps = [
        part | {"train/advantages_max": largest}
        for largest, part in (
            (0.1, differ),
            (0.0, differ),
            (0.0, differ),
            (0.0, flat),
            (0.0, differ),
        )
    ]
    told = warnings_of(env, tmp_path, capsys, *steps)
    assert [line[:6] for line in told if "advantages are 0" in line] == ["step 2", "step 5"]


def test_an_evaluation_warns_of_a_blind_policy_and_of_no_right_answer(env, tmp_path, capsys):
    """Of the former every time, of the latter once until it changes."""
    args = with_flags(env.args, out=tmp_path, log_samples=0)
    state, log = ppo.TrainState(args.kl_coef), ppo.open_log(args, env.rows, 0)
    warned = []
    for state.step, (gap, accuracy) in enumerate(
        [(0.3, 0.0), (4.8e-4, 0.0), (-0.4, 0.5), (0.2, 0.0), (0.0, 0.0)]
    ):
        metrics = {
            "eval/reward_mean": 0.5,
            "eval/accuracy_reward_mean": accuracy,
            "eval/vision_gap_logprob": gap,
        }
        ppo.report_evaluation(log, metrics, [{"response": "x"}] * 3, state)
        text = capsys.readouterr().out
        if state.step == 0:
            assert "eval  step     0  accuracy 0.000  reward 0.500  vision_gap 0.300\n" in text
        assert state.step != 1 or "4.8e-04 nats" in text
        blind = "warning: the model does not use what it sees" in text
        warned.append((blind, "warning: no held-out answer is right" in text))
    assert warned == [(False, False), (True, True), (True, False), (False, True), (True, False)]
    log.close(5, 5)


@pytest.mark.parametrize("updates, with_critic", [(0, True), (1, False), (4, True)])
def test_throughput_is_of_what_was_done(env, monkeypatch, updates, with_critic):
    """A frozen actor, or one that --target_kl stopped after one of four updates, has not passed
    over the samples twice; nor has anybody seen the prompt that was dropped."""
    on_a_gpu(monkeypatch)
    args = with_flags(env.args, epochs=2, minibatches=2)
    told = {"rollout/generated_tokens": 123}
    if updates:
        told["train/actor_updates"] = updates
    batch = env.batch.with_responses(pair for pair in responses_of(env.batch) if pair[0] != 2)
    metrics = ppo.performance(
        batch, ppo.Models(env.actor, env.critic if with_critic else None, None), told, args
    )
    response = len(batch.tokens)
    tokens = response + sum(len(prompt.input_ids) for i, prompt in enumerate(env.prompts) if i != 2)
    layers = sum(
        p.numel()
        for name, p in env.actor.named_parameters()
        if ".layers." in name and "visual" not in name
    )
    head = env.actor.model.lm_head.weight.numel()
    operations = 12 * with_critic * layers * tokens + 3 * updates * (
        layers * tokens + head * response
    )
    assert metrics["perf/update_mfu"] == pytest.approx(operations / (2 * 989e12))
    assert metrics["perf/step_seconds"] == 3
    assert metrics["perf/update_tokens_per_second"] == tokens * (2 * with_critic + updates / 2) / 2
    assert metrics["perf/rollout_tokens_per_second"] == 123


@pytest.mark.parametrize(
    "data, told",
    [
        ("train", "8 training prompts, 6 with images"),
        ("eval-1", "1 training prompts, none with images"),
    ],
)
def test_a_start_says_how_many_prompts_have_images(qwen25, task, tmp_path, capsys, data, told):
    args = ppo.parse_args(
        words("--model", qwen25, "--data", task / f"{data}.jsonl", "--out", tmp_path / "run")
    )
    ppo.open_log(args, ppo.load_rows(args), 0)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("script", [ppo, grm])
@pytest.mark.parametrize(
    "size, weights, repeated",
    [(8, ("",), {}), (9, ("",), {"train": (9, 8)}), (10, (":0.3", ":0.7"), {"eval": (7, 1)})],
)
def test_a_start_says_which_files_a_step_repeats(
    qwen25, tmp_path, capsys, script, size, weights, repeated
):
    """Without weights here the first file alone; a step of 10 takes 7 of the one row of the second."""
    data = []
    for (name, count), weight in zip({"train": 8, "eval": 1}.items(), weights):
        rows = [
            {"prompt": f"{n} how many circles are there?", "answer": str(n), "response": str(n)}
            for n in range(count)
        ]
        data.append(f"{write_rows(tmp_path / f'{name}.jsonl', rows)}{weight}")
    flags = words("--model", qwen25, "--data", ",".join(data), "--prompts_per_step", size)
    args = script.parse_args([*flags, "--out", str(tmp_path / "run")])
    script.open_log(args, script.load_rows(args), 0)
    lines = re.findall(
        r"(\w+).jsonl: a step takes (\d+) of its (\d+) rows, some of them again",
        capsys.readouterr().out,
    )
    assert {name: (int(taken), int(held)) for name, taken, held in lines} == repeated


def test_several_datasets_by_probability_and_resumed(qwen25, task, tmp_path, capsys):
    """Four steps, and two and two after a restart, draw the same rows, in the shares asked for at
    every step."""
    data = f"{task / 'train.jsonl'}:0.75,{task / 'eval.jsonl'}:0.25"
    more = f"--data {data} --advantage grpo --max_new_tokens 3"
    whole = resumed(qwen25, task, tmp_path, more)
    assert "15 training prompts, 11 with images, " in capsys.readouterr().out
    samples = samples_of_steps(whole)
    assert samples == samples_of_steps(tmp_path / "parts")
    files = [sample["source"].partition(":")[0] for sample in samples if sample["sample"] == 0]
    assert all(files[k : k + 4].count("eval.jsonl") == 1 for k in range(0, 16, 4))
    (first,) = [
        record
        for record in read_rows(whole / "metrics.jsonl")
        if record.get("rollout/global_step") == 1
    ]
    for name in ("train", "eval"):
        of_file = [
            sample["reward"]
            for sample in samples_of(whole, "step-000001")
            if sample["source"].startswith(name)
        ]
        assert first[f"rollout/{name}/reward"] == pytest.approx(np.mean(of_file))
    drawn = {sample["source"] for sample in samples}
    assert len([source for source in drawn if source.startswith("train")]) == 8
    assert len(drawn) == 12
    with user_error("is of another run: .*--data"):
        train(qwen25, task, whole, more, "--steps 4 -- --data", data.replace("0.75", "0.5"))


def test_one_dataset_is_drawn_in_the_order_of_its_seed(qwen25, task, tmp_path):
    """With a weight and without: pass e takes the rows in the order that numpy draws from (0, e)."""
    order = [row for epoch in range(2) for row in np.random.default_rng([0, epoch]).permutation(8)]
    for name, data in (("plain", "train.jsonl"), ("weight", "train.jsonl:0.3")):
        train(
            qwen25,
            task,
            tmp_path / name,
            "--data",
            task / data,
            "--steps 4 --prompts_per_step 3 "
            "--max_new_tokens 2 --advantage grpo --export_every 0 --save_every 0",
        )
        drawn = [
            sample["index"] for sample in samples_of_steps(tmp_path / name) if sample["sample"] == 0
        ]
        assert drawn == order[:12]


def test_eval_only_without_training_data_and_without_a_schedule(
    qwen25, task, tmp_path, capsys, monkeypatch
):
    """--eval_only evaluates, whatever --eval_every says, and needs no --data; it leaves no empty
    folder and prints a line that fits a terminal. A signal ends it at once: none is caught."""
    with monkeypatch.context() as patched:
        patched.setattr(ppo.process, "catch_signals", None)
        metrics = evaluate_only(qwen25, task, tmp_path / "run", "--data= --eval_every 0")
    assert metrics["eval/num_samples"] == 7
    (printed,) = (
        text for text in capsys.readouterr().out.splitlines() if text.startswith("eval  ")
    )
    assert len(printed) <= 120
    assert f"  reward {metrics['eval/reward_mean']:.3f}" in printed
    assert "train_step" not in printed
    assert "num_samples" not in printed
    folders = [path for path in (tmp_path / "run").rglob("*") if path.is_dir()]
    assert folders
    assert all(any(folder.iterdir()) for folder in folders)
    train(qwen25, task, tmp_path / "trained", "--advantage grpo --save_every -1")
    metrics = evaluate_only(qwen25, task, tmp_path / "trained", "--data= --advantage grpo")
    assert metrics["eval/train_step"] == 1


def files_of(folder: Path) -> dict[str, bytes]:
    """All but the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_export_of_an_interrupted_run(qwen25, task, tmp_path):
    """Weights and average, of the newest checkpoint and of an earlier one, as the finished run
    wrote them at those steps: the same command with --steps there."""
    line = "--steps 3 --save_every 1 --keep_last 9 --ema_beta 0.9"
    train(qwen25, task, tmp_path / "whole", line, "--export_every 1")
    train(qwen25, task, tmp_path / "half", line, "--steps 2 --export_every 0")
    half = tmp_path / "half"
    train(qwen25, task, half, line, "--steps 2")
    before = files_of(half)
    path = half / "checkpoints" / "step-1"
    train(qwen25, task, tmp_path / "earlier", line, "--steps 1 --resume", path)
    for folder, step in ((half, 2), (tmp_path / "earlier", 1)):
        for place in ("export", "export_ema"):
            expected = files_of(tmp_path / "whole" / place / f"step-{step}")
            assert files_of(folder / place / f"step-{step}") == expected
    assert files_of(half) == before


# ------------------------------------------------------------------------------------------------
# what goes wrong
def test_a_damaged_picture_drops_its_prompt(qwen25, task, tmp_path, capsys):
    bad = task / "bad.jsonl"
    steps = train(
        qwen25, task, tmp_path / "b", "--data", bad, "--on_bad_row skip --steps 2 --minibatches 4"
    )
    assert [(step["rollout/dropped_prompts"], step["rollout/samples"]) for step in steps] == [
        (1, 9),
        (2, 9),
    ]
    # as at the start: which row, and what is wrong
    text = capsys.readouterr().out
    assert (
        text.count(
            "skipped: images of a batch: 1 of 4 rows are bad\n"
            f"  bad.jsonl:2: {task / 'damaged.png'}: cannot be read"
        )
        == 2
    )
    assert {s["index"] for s in samples_of(tmp_path / "b", "step-000001")} == {0, 2, 3}
    held_out = evaluate_only(qwen25, task, tmp_path / "c", "--eval_data", bad, "--on_bad_row skip")
    assert held_out["eval/dropped_prompts"] == 1
    assert held_out["eval/num_samples"] == 3


def test_a_step_whose_prompts_are_all_dropped_stops_the_run(qwen25, task, tmp_path):
    """One prompt per step: nothing is left of the step with the damaged picture."""
    one = "--on_bad_row skip --prompts_per_step 1"
    with user_error("the images of all 1 prompts cannot be decoded"):
        train(qwen25, task, tmp_path / "a", "--data", task / "bad.jsonl", "--steps 4", one)
    held_out = evaluate_only(qwen25, task, tmp_path / "b", "--eval_data", task / "bad.jsonl", one)
    # a chunk without prompts is no evaluation without prompts
    assert held_out["eval/num_samples"] == 3
    (task / "all-bad.jsonl").write_text('{"prompt": "row 0", "images": ["damaged.png"]}')
    with user_error("no held-out prompt is left"):
        evaluate_only(qwen25, task, tmp_path / "c", "--eval_data", task / "all-bad.jsonl", one)


@pytest.mark.parametrize(
    "function, message",
    [
        ("infinite", "(?s)inf, not a finite number.*response"),
        ("late", r"(?s)longer than 0\.2 s.*response"),
    ],
)
def test_a_failing_reward_stops_with_the_sample(qwen25, task, tmp_path, function, message):
    reward = f"--reward {task / 'reward.py'}:{function} --reward_timeout 0.2 --prompts_per_step 8"
    with user_error(message):
        train(qwen25, task, tmp_path, reward)


# ------------------------------------------------------------------------------------------------
# checkpoint folders
@pytest.fixture(
    scope="module",
    params=[
        "tied",
        "tied twice",
        "module spelling",
    ],
)
def any_checkpoint(request, tmp_path_factory) -> Path:
    variant = request.param
    folder = tmp_path_factory.mktemp("checkpoint")
    size = "200KB" if variant == "tied" else "5GB"
    write_checkpoint(folder, "qwen2_5_vl", tie=variant.startswith("tied"), shard_size=size)
    if variant == "tied":
        return folder
    values = load_file(folder / "model.safetensors")
    # some writers store the tied weight under both names
    if variant == "tied twice":
        values["lm_head.weight"] = values["model.embed_tokens.weight"].clone()
    # as the modules are called, not as hub files spell it
    else:
        values = {
            re.sub("^visual", "model.visual", re.sub("^model", "model.language_model", name)): value
            for name, value in values.items()
        }
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_export_is_the_trained_actor(any_checkpoint, picture_rows, tmp_path):
    env = start(any_checkpoint, picture_rows, "--actor_lr 1e-2 --advantage grpo")
    env.trained = trainable(env.actor, env.args, 1e-2)
    env.batch = samples = hand_batch(env)
    samples.old_logprobs = samples.logprobs
    update_actor(env)
    trained = score(env.actor, samples)
    assert (trained - samples.logprobs).abs().max() > 0.01
    exported = tmp_path / "hf"
    vlm_weights.export(env.actor, env.processor.save, exported)

    source, written = tensors(any_checkpoint), tensors(exported)
    assert written.keys() == source.keys()
    assert all(
        written[key].shape == source[key].shape and written[key].dtype == source[key].dtype
        for key in source
    )
    names = [
        {path.name for path in part.glob("*.safetensors*")} for part in (any_checkpoint, exported)
    ]
    assert names[0] == names[1]
    assert not list(tmp_path.glob(".*"))
    assert read_json(exported / "config.json") == read_json(any_checkpoint / "config.json")
    model, info = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = []
    for index, tokens in responses_of(samples):
        with torch.no_grad():
            logits = logits_of(model, env.prompts[index], tokens, env.processor)
        expected.append(token_logprobs(logits, tokens))
    assert (torch.cat(expected) - trained).abs().max() < ROUNDING

    # trains on from there
    again = start(exported, picture_rows, "--advantage grpo")
    same = dataclasses.replace(samples, patches=take(again).patches, features={}, positions={})
    with torch.no_grad():
        vlm.compute_features(again.actor.model, same)
    assert torch.equal(score(again.actor, same), trained)


def test_export_keeps_the_checkpoints_dtype(tmp_path, picture_rows):
    """Of float16 here, of others in test_weights.py; and in bfloat16 what is not trained: the export's origin can be its reference, as their
    towers are the same."""
    source, dtype = write_checkpoint(tmp_path / "source", "qwen2_5_vl"), torch.float16
    AutoModelForImageTextToText.from_pretrained(source, dtype=dtype).save_pretrained(source)
    env = start(source, picture_rows, "--advantage grpo --dtype bfloat16")
    assert {(p.dtype, p.requires_grad) for p in env.actor.parameters()} == {
        (torch.float32, True),
        (torch.bfloat16, False),
    }
    # the second one over the first
    for _ in range(2):
        assert vlm_weights.export(env.actor, env.processor.save, tmp_path / "hf") is None
        assert same_tensors(tensors(source), tensors(tmp_path / "hf"))
        assert AutoModelForImageTextToText.from_pretrained(tmp_path / "hf").dtype == dtype
    start(tmp_path / "hf", picture_rows, "--advantage grpo --kl_coef 0.1 --reference_model", source)


# ------------------------------------------------------------------------------------------------
# several ranks
# name -> (family, flags); an odd number of prompts per step, so that ranks have unequal shares
RUNS = {
    "gae": (
        "qwen2_5_vl",
        "--steps 2 --prompts_per_step 9 --minibatches 3 --epochs 2 --kl_coef 0.1 --critic_lr 1e-3 "
        "--eval_data TASK/eval.jsonl --eval_every 1 --lr_schedule linear --warmup_steps 1",
    ),
    "grpo": (
        "qwen3_vl",
        "--steps 2 --prompts_per_step 5 --advantage grpo --kl_coef 0.1 --kl_in loss "
        "--kl_estimator k3+ --kl_target 0.01 --loss_aggregation seq-mean-token-mean "
        "--max_tokens_per_pack 518 "
        "--clip_high 0.28 --entropy_coef 0.01 --eval_every 0",
    ),
    "judged": (
        "qwen2_5_vl",
        "--steps 2 --advantage grpo --reward_recipe TASK/recipe.json --grm_question correct "
        "--prompts_per_step 3 --minibatches 3 --ema_beta 0.6 "
        "--ptx_data TASK/ptx.jsonl --ptx_coef 0.5 --ptx_batch 3",
    ),
    "rivals": (  # a judge compares the samples to rows of one label; the others earn nothing
        "qwen2_5_vl",
        "--steps 2 --advantage grpo --data TASK/open.jsonl --reward_recipe TASK/rivals.json "
        "--grm_opponents 2 --dynamic_sampling 2 --prompts_per_step 3 --eval_every 0 "
        "--loss_aggregation token-sum",
    ),
    "judging": (
        "qwen2_5_vl",
        "--steps 2 --advantage grpo --data TASK/judgements.jsonl --row_kind judgements --reward verdict "
        "--eval_data TASK/judgements.jsonl",
    ),
    "masked": (
        "qwen2_5_vl",
        "--steps 2 --prompts_per_step 5 --advantage gdpo --perception_coef 0.1 --perception_ratio 0.5 "
        "--perception_scale 0.8 --entropy_coef -0.01 --eval_every 0",
    ),
    "talking": (
        "qwen2_5_vl",
        "--steps 2 --train_vision --kl_coef 0.1 --gamma 0.9 --env TALKERS:Words --reward_recipe TASK/talk.json "
        "--grm_question correct --eval_data TASK/talk.jsonl --perception_coef 0.1 --perception_scale 0.8 "
        + TALKING,
    ),
    "seeing exactly": (
        "qwen3_vl",
        "--steps 2 --train_vision --advantage grpo --prompts_per_step 3 --kl_coef 0.1 --kl_in loss "
        "--kl_estimator full --gradient_checkpointing --dynamic_sampling 2 --max_tokens_per_pack 524",
    ),
    # the second rank holds one row of every A
    "adapters": (
        "qwen2_5_vl",
        "--steps 2 --lora_rank 3 --lora_alpha 6 --minibatches 3 --kl_coef 0.1 --actor_lr 1e-2 "
        "--critic_lr 1e-2 --data TASK/train.jsonl:0.75,TASK/eval.jsonl:0.25 --prompts_per_step 3 "
        "--gradient_checkpointing --importance_cap 2 --temperature 0.7 --min_new_tokens 2 "
        "--eval_samples 2 --slots 2 --reward TASK/reward.py:of_rows",
    ),
    "looking": (
        "qwen2_5_vl",
        "--steps 2 --advantage rloo --train_vision --env TALKERS:Same --reward env "
        "--eval_samples 2 --teacher_model self --teacher_in loss --epochs 2 --target_kl 1e-4 "
        + TALKING,
    ),
}
# run by one group of ranks, as starting one takes as long as a run
TOGETHER = (
    ["gae", "grpo", "judging"],
    ["judged", "rivals", "masked", "talking"],
    ["seeing exactly", "adapters", "looking"],
)
FAILURES = {  # name -> flags, the message
    "picture": ("--data TASK/bad.jsonl", "bad.jsonl:2.*damaged.png"),
    "reward": (
        "--reward TASK/reward.py:fails --prompts_per_step 8",
        "the reward of row 2.*response",
    ),
    "gap": (
        "--sampler_gap_limit 1e-12 --advantage grpo --steps 2",
        "step 1: train/sampler_gap .* is above 1e-12",
    ),
}


def run_flags(
    name: str, spec: tuple[str, str], checkpoints: dict[str, Path], task: Path, out: Path
) -> list[str]:
    family, more = spec
    talkers = str(Path(__file__).with_name("talkers.py"))
    more = more.replace("TASK", str(task)).replace("TALKERS", talkers)
    held_out = "--eval_data", task / "eval-3.jsonl", "--"
    return flags(checkpoints[family], task, out / name, *held_out, more)


@pytest.fixture(scope="module")
def checkpoints(qwen25, task, tmp_path_factory) -> dict[str, Path]:
    """The models of RUNS; beside the task's files a judge, of another family with a tower of its
    own, and rows."""
    checkpoints = {
        "qwen2_5_vl": qwen25,
        "qwen3_vl": write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3_vl"),
    }
    shutil.copytree(checkpoints["qwen3_vl"], task / "judge")
    write_judge(task / "judge", ("correct", "yes"), ("answers", "A"))
    (task / "recipe.json").write_text(
        json.dumps({"*": [[f"grm:{task / 'judge'}", 1], ["exact", 0.5]]})
    )
    write_json(task / "rivals.json", {"open": [[f"grm:{task / 'judge'}", 1]], "*": [["exact", 1]]})
    write_rows(
        task / "open.jsonl",
        [
            {"prompt": f"describe {i}", "images": [f"train-{i}-0.png"], "label": "open"}
            for i in (1, 3, 6)
        ]
        + [{"prompt": f"count {i}", "answer": "1"} for i in range(2)],
    )
    write_json(task / "talk.json", {"*": [["env", 1], [f"grm:{task / 'judge'}", 0.5]]})
    write_rows(
        task / "judgements.jsonl",
        [
            dict(question="how many?", images=["train-1-0.png"], response="3", correct=True),
            {"prompt": "red", "images": ["train-3-0.png", "train-1-0.png"], "preferred": "A"},
            {"prompt": "say a", "responses": ["a", "b"], "preferred": "tie"},
        ],
    )
    write_rows(
        task / "talk.jsonl",
        [
            {"prompt": f"what is {i}?", "images": [f"train-{i}-0.png"], "answer": "1"}
            for i in (1, 1, 3, 3, 1)
        ],
    )
    write_rows(
        task / "ptx.jsonl",
        [
            {
                "prompt": f"count {i} times",
                "images": ["train-1-0.png"] * (i % 3),
                "response": "one " * i,
            }
            for i in range(1, 6)
        ],
    )
    return checkpoints


@pytest.fixture(scope="module")
def both(checkpoints, task, tmp_path_factory):
    """both(name): the folders of that run on one rank and on two."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))

    def run(name: str) -> tuple[Path, Path]:
        if not (one / name).exists():
            names = next((group for group in TOGETHER if name in group), [name])
            first, second = (
                [run_flags(each, RUNS[each], checkpoints, task, out) for each in names]
                for out in (one, two)
            )
            launch(2, *second)
            for line in first:
                ppo.main(line)
        return one / name, two / name

    return run


@pytest.mark.parametrize("name", marked(RUNS, daily=2))
def test_one_rank_equals_two_ranks(both, name):
    one, two = both(name)
    assert_same_run(one, two)
    gaps = [
        record["train/sampler_gap"]
        for record in records(one) + records(two)
        if "train/sampler_gap" in record
    ]
    assert gaps
    # sampled is trained, before any update of a step
    assert max(gaps) < ROUNDING
    # of weights, averages and adapters
    exports = one.glob(f"export*/step-{records(one)[-1]['step']}/**/*.safetensors")
    for folder in {file.parent.relative_to(one) for file in exports}:
        assert_close_weights(one / folder, two / folder)


def test_a_group_that_a_judge_compares_earns_half_of_what_there_is(both):
    """Where every sample meets as many others, the shares of wins of a prompt have the mean 1/2; a prompt
    without spread was replaced as long as there were rollouts."""
    _, out = both("rivals")
    samples = [row for step in (1, 2) for row in samples_of(out, f"step-{step:06d}")]
    judged = [row["reward"] for row in samples if row["label"] == "open"]
    assert judged
    assert np.mean(judged) == pytest.approx(0.5, abs=1e-3)
    assert len(set(judged)) > 1
    steps = [record for record in records(out) if "rollout/rollouts" in record]
    assert [step["rollout/rollouts"] for step in steps] == [2, 2]


def test_one_and_two_ranks_agree_as_the_readme_says(both):
    """In step 1, with a KL in the reward and with one in the loss; later, rounding may have grown."""
    for name in ("gae", "grpo"):
        one, two = (
            {record["step"]: record for record in records(folder)}[1] for folder in both(name)
        )
        gaps = [
            abs(two[key] - value) / max(1, abs(value)) for key, value in reproducible(one).items()
        ]
        assert max(gaps) <= 5e-6 and np.median(gaps) <= rounding(16), name


def test_a_judge_learns_from_verdicts(both):
    """Judgement rows as prompts: pairs in both orders with their verdict as reference; the export
    can be asked as a judge."""
    _, out = both("judging")
    rows = samples_of(out, "eval-000002")
    assert [(row["label"], row["reference"]) for row in rows] == [
        ("correct", "yes"),
        ("pictures", "A"),
        ("pictures", "B"),
        ("answers", "tie"),
        ("answers", "tie"),
    ]
    assert rows[1]["images"] == rows[2]["images"][::-1]
    assert "Answer A: a\nAnswer B: b" in rows[3]["question"]
    # each order has noise of its own
    assert len({row["index"] for row in rows}) == 5
    judge = Processor(out / "export" / "step-2").files["judge"]
    assert sorted(judge["verdicts"]) == ["answers", "correct", "pictures"]
    *_, trained, evaluated = records(out)
    assert {"rollout/accuracy_reward", "rollout/format_reward"} <= trained.keys()
    assert {"eval/accuracy_reward_mean", "eval/format_reward_mean"} <= evaluated.keys()


def test_every_held_out_row_is_answered_once(both):
    _, out = both("gae")
    for step in (0, 1, 2):
        assert [row["index"] for row in samples_of(out, f"eval-{step:06d}")] == list(range(7))


@pytest.mark.parametrize("name", marked(FAILURES))
def test_failures_are_told_once_and_end_every_rank(checkpoints, task, tmp_path, name):
    more, message = FAILURES[name]
    line = run_flags(name, ("qwen2_5_vl", more), checkpoints, task, tmp_path)
    text = ranks.run(ppo.main, line, world=2, codes=[2, 2])
    assert text.count("error: ") == 1
    assert re.search(f"error: .*{message}", text, re.DOTALL)
    assert "Traceback" not in text
    if name == "gap":
        assert [
            record["step"] for record in records(tmp_path / "gap") if "train/policy_loss" in record
        ] == [1]


@pytest.mark.slow
def test_more_ranks_than_prompts(qwen25, task, tmp_path):
    """And than some parameters have rows, so that shards are empty: the same run as on one rank."""
    three, one = (
        flags(
            qwen25,
            task,
            tmp_path / name,
            "--steps 2 --minibatches 2 --prompts_per_step 2 "
            "--critic_lr 1e-3 --eval_every 1 --eval_data",
            task / "eval-3.jsonl",
        )
        for name in ("three", "one")
    )
    launch(3, three)
    ppo.main(one)
    assert_same_run(tmp_path / "one", tmp_path / "three")


def test_what_ranks_tell_each_other():
    ranks.run(check_exchange, world=3)


def check_exchange() -> None:
    """Features and ragged tensors arrive where they are needed, bit by bit; failures and decisions
    are everyone's."""
    distributed.start(60.0, 0)
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = np.random.default_rng(0)
    for dtype in (torch.float32, torch.bfloat16) * 10:
        shapes = {p: (2, int(rng.integers(1, 6)), 3) for p in range(9) if rng.random() < 0.7}
        owners = rng.integers(0, world, 9).tolist()
        needed = [set(rng.permutation(9)[: rng.integers(0, 9)].tolist()) for _ in range(world)]
        whole = {
            p: torch.from_numpy(rng.normal(size=shape)).to(dtype) for p, shape in shapes.items()
        }
        local = {p: value for p, value in whole.items() if owners[p] == rank}
        arrived = exchange_features(local, needed, dtype)
        assert arrived.keys() == needed[rank] & shapes.keys()
        assert all(torch.equal(value, whole[p]) for p, value in arrived.items())
    parts = gather_objects(torch.full((rank, 3), rank))
    assert [part.tolist() for part in parts] == [[[r] * 3] * r for r in range(world)]
    assert gather_objects({"text": "ü" * rank}) == [{"text": "ü" * r} for r in range(world)]
    for text, message in (("alike", "what: alike"), (f"of {rank}", "what: of 0")):
        with pytest.raises(process.UserError) as error, raise_on_all_ranks("what: "):
            raise process.UserError(text)
        assert str(error.value) == message
    with pytest.raises(ValueError, match="a bug"), raise_on_all_ranks("what: "):
        raise ValueError("a bug")  # reaches no other rank
    # all stop together, or none
    rows = [{"approx_kl": logging.Mean(torch.tensor(float(rank == 0)), 1)}]
    assert ppo.exceeds(rows, 0.9 / world)
    assert not ppo.exceeds(rows, 1.1 / world)


def test_boxes_are_rewarded_in_the_models_coordinates(qwen25, tmp_path, capsys):
    """From rows in pixels of the file to the reward, its components, records and cards. An evaluation
    with the run's args.json finds no flag that differs."""
    Image.new("RGB", (50, 30), "white").save(tmp_path / "a.png")
    row = {
        "prompt": "where?",
        "images": ["a.png"],
        "regions": {"boxes": [[0, 0, 25, 30]], "labels": ["cup"]},
    }
    rows = write_rows(tmp_path / "rows.jsonl", [row] * 4)
    (tmp_path / "mine.py").write_text(
        "from common.data.coordinates import Place\n"
        "def score(prompts, responses, references, labels, images, places):\n"
        "    assert places == [[Place((50, 30), (56, 28), 'seen')]] * len(prompts), places\n"
        "    return [float(i) for i in range(len(prompts))]\n"
    )
    more = words("--data", rows, "--eval_data", rows, "--max_pixels 4704 --reward box")
    before, step, _ = train(qwen25, tmp_path, tmp_path / "a", *more, "--save_every 1")
    text = capsys.readouterr().out
    assert "coordinates 'seen'" in text
    ppo.main(words("--eval_only --config", tmp_path / "a" / "args.json"))
    assert "--coordinates" not in capsys.readouterr().out
    assert step["rollout/box_iou"] == step["rollout/reward"]
    assert before["eval/box_iou"] == before["eval/reward_mean"]
    answer = samples_of(tmp_path / "a", "step-000001")[0]
    assert answer["regions"]["true"] == [[0, 0, 25, 30]]
    # a function gets the same places
    train(qwen25, tmp_path, tmp_path / "b", *more, "-- --reward", f"{tmp_path / 'mine.py'}:score")
    with user_error("no regions, which box compares with"):
        train(
            qwen25,
            tmp_path,
            tmp_path / "d",
            *more,
            "-- --data",
            write_rows(tmp_path / "no.jsonl", [{"prompt": "p"}]),
        )


def test_a_skipped_row_does_not_change_the_samples_of_later_ones(qwen25, task, tmp_path):
    """Noise is seeded by the number of a row in its files; a bad row, in the first file or the second, takes
    one, too."""
    rows = read_rows(task / "eval.jsonl")
    bad = {"prompt": "never read", "images": ["is-missing.png"]}
    sampled = "--eval_samples 2 --on_bad_row skip --temperature 1"
    texts = []
    for name, first in (("whole", rows[:3]), ("skipped", [rows[0], bad, rows[2]])):
        files = [task / f"{name}-{k}.jsonl" for k in (1, 2)]
        for file, part in zip(files, (first, rows[3:5])):
            write_rows(file, part)
        evaluate_only(qwen25, task, tmp_path / name, f"--eval_data {files[0]},{files[1]}", sampled)
        samples = samples_of(tmp_path / name / "evaluation-step-0", "eval-000000")
        texts.append({(s["index"], s["sample"]): s["response"] for s in samples})
    whole, skipped = texts
    assert skipped.keys() == {(k, n) for k in (0, 2, 3, 4) for n in (0, 1)}
    assert all(skipped[key] == whole[key] for key in skipped)


def test_a_skipped_row_does_not_change_the_numbers_of_judgements(qwen25, tmp_path):
    """Each row of judgements has the numbers of two orders, asked or not; so has a bad one."""
    pair = {"prompt": "say a", "responses": ["a", "b"], "preferred": "A"}
    scored = {"prompt": "how many?", "response": "3", "score": 4}
    bad = {"prompt": "say a", "responses": ["a", "a"], "preferred": "A"}
    files = [
        write_rows(tmp_path / "1.jsonl", [pair, bad, scored]),
        write_rows(tmp_path / "2.jsonl", [bad, pair]),
    ]
    argv = words("--model", qwen25, f"--data {files[0]},{files[1]} --row_kind judgements")
    args = ppo.parse_args([*argv, "--reward", "verdict", "--on_bad_row", "skip"])
    numbers = [[row.index for row in rows] for rows in ppo.load_rows(args).train_sets]
    assert numbers == [[0, 1, 4], [8, 9]]
