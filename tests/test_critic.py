"""What the critic says of held-out answers: eval/explained_variance, against a forward pass of
Hugging Face's model per sample."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import train_ppo_vl as ppo
from conftest import hugging_face, inputs_of, start, with_flags
from helpers import fresh, stir_value_head, trainable


class Scorer:
    """A reward of the length and of the first token, so that it varies; it keeps what it scored."""

    def __init__(self):
        self.batches = []

    def score(self, batch, processor, step=0):
        first = torch.stack([tokens[0] for tokens in batch.split(batch.tokens)])
        batch.rewards = batch.own_lengths / 4 + (first % 5).float()
        self.batches.append(batch)

    def can_earn(self, label):
        return label != "measured"


@pytest.fixture(scope="module")
def env(qwen25, picture_rows):
    env = start(qwen25, picture_rows, "--eval_data", picture_rows, "--prompts_per_step 3")
    stir_value_head(env.critic)
    return env


def evaluate(env, rows=None, **changes) -> tuple[dict[str, float], list]:
    args, scorer = with_flags(env.args, **changes), Scorer()
    roles = ppo.make_trainables(args, ppo.Models(env.actor, env.critic, env.reference))
    state = ppo.TrainState(args.kl_coef)
    metrics, *_ = ppo.evaluate(roles, scorer, rows or env.rows, env.sampling, state, args)
    return metrics, scorer.batches


def oracle(env, folder, batches: list, gamma: float) -> float:
    """1 - Var(returns - values) / Var(returns), one sample after the other."""
    model = hugging_face(folder)
    head = env.critic.value_head.weight.full_tensor()[0]
    values, returns = [], []
    for batch in batches:
        per_sample = zip(
            batch.prompt_index.tolist(), batch.split(batch.tokens), batch.rewards.tolist()
        )
        for group, tokens, score in per_sample:
            prompt = batch.prompts[group]
            with torch.no_grad():
                output = model(
                    **inputs_of(prompt, tokens, env.processor), output_hidden_states=True
                )
            hidden = output.hidden_states[-1][0, len(prompt.input_ids) - 1 : -1]
            values += (hidden @ head).tolist()
            returns += [score * gamma ** (len(tokens) - 1 - t) for t in range(len(tokens))]
    return 1 - np.var(np.subtract(returns, values)) / np.var(returns)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_explained_variance_of_held_out_answers(env, qwen25, gamma):
    metrics, batches = evaluate(env, gamma=gamma, slots=3)
    assert sum(len(batch) for batch in batches) == len(env.rows.held_out) > 3  # several batches
    wanted = oracle(env, qwen25, batches, gamma)
    assert metrics["eval/explained_variance"] == pytest.approx(wanted, abs=1e-4)
    assert abs(wanted) > 0.01


def test_rows_that_are_only_measured_are_not_to_be_explained(env):
    """Their returns are 0, whatever the critic expects of an answer that is paid."""
    rows = [replace(row, label="measured" * (i % 2)) for i, row in enumerate(env.rows.held_out)]
    some, _ = evaluate(env, rows=replace(env.rows, held_out=rows))
    alone, _ = evaluate(env, rows=replace(env.rows, held_out=rows[::2]))
    assert some["eval/explained_variance"] == pytest.approx(
        alone["eval/explained_variance"], abs=1e-4
    )
    none, _ = evaluate(env, rows=replace(env.rows, held_out=rows[1::2]))
    assert none["eval/explained_variance"] == 0


def test_returns_are_on_the_scale_of_training(env):
    """A critic that was trained on clipped rewards is held against clipped rewards."""
    plain, _ = evaluate(env)
    clipped, batches = evaluate(env, reward_clip=1.0)
    assert any((batch.rewards > 1).any() for batch in batches)
    assert clipped["eval/explained_variance"] != pytest.approx(plain["eval/explained_variance"])


def test_an_evaluation_fills_the_slots(env):
    """Eleven rows by two samples, in rollouts of --slots samples, whatever --prompts_per_step is."""
    rows = [replace(env.rows.held_out[k % 4], index=k) for k in range(11)]
    _, batches = evaluate(
        env, replace(env.rows, held_out=rows), prompts_per_step=2, slots=8, eval_samples=2
    )
    assert [len(batch.prompts) for batch in batches] == [4, 4, 3]


def test_without_a_critic_there_is_none(env):
    args = with_flags(env.args, advantage="grpo")
    roles = ppo.make_trainables(args, ppo.Models(env.actor, None, None))
    state = ppo.TrainState(args.kl_coef)
    metrics, *_ = ppo.evaluate(roles, Scorer(), env.rows, env.sampling, state, args)
    assert "eval/explained_variance" not in metrics
    assert "eval/reward_mean" in metrics


@pytest.mark.parametrize("critic_epochs, passes", [(0, 2), (3, 3)])
def test_the_critic_may_have_passes_of_its_own(
    qwen25, picture_rows, monkeypatch, critic_epochs, passes
):
    """Each over all prompts, in orders of their own; the actor keeps its --epochs."""
    env, seen, inner = fresh(qwen25, picture_rows), [], ppo.minibatches_of

    def watched(*arguments):
        for minibatch in inner(*arguments):
            seen.extend(map(int, minibatch.indices))
            yield minibatch

    monkeypatch.setattr(ppo, "minibatches_of", watched)
    args = with_flags(env.args, minibatches=4, epochs=2, critic_epochs=critic_epochs)
    ppo.update_critic(trainable(env.critic, args, 0.0), env.batch, 1, args)
    orders = [tuple(seen[k : k + 4]) for k in range(0, len(seen), 4)]
    assert len(orders) == passes == len(set(orders))
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    seen.clear()
    ppo.update_actor(trainable(env.actor, args, 0.0), None, env.batch, 1, None, args)
    assert len(seen) == 2 * 4
