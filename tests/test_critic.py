"""The critic's own passes over a step, and a run with a critic that evaluates."""

from dataclasses import replace

import pytest

import train_ppo_vl as ppo
from conftest import start, with_flags
from helpers import fresh, trainable


class Scorer:
    """A reward of the length; it keeps what it scored."""

    def __init__(self):
        self.batches = []

    def score(self, batch, processor, step=0):
        batch.rewards = batch.own_lengths.float()
        self.batches.append(batch)


def test_an_evaluation_fills_the_slots(qwen25, picture_rows):
    """Eleven rows by two samples, in rollouts of --slots samples, whatever --prompts_per_step is."""
    env = start(qwen25, picture_rows, "--eval_data", picture_rows, "--prompts_per_step 3")
    rows = [replace(env.rows.held_out[k % 4], index=k) for k in range(11)]
    args, scorer = with_flags(env.args, prompts_per_step=2, slots=8, eval_samples=2), Scorer()
    roles = ppo.make_trainables(args, ppo.Models(env.actor, env.critic, env.reference))
    state = ppo.TrainState(args.kl_coef)
    held_out = replace(env.rows, held_out=rows)
    ppo.evaluate(roles, scorer, held_out, env.sampling, state, args)
    assert [len(batch.prompts) for batch in scorer.batches] == [4, 4, 3]


@pytest.mark.parametrize("critic_epochs, passes", [(0, 2), (3, 3)])
def test_the_critic_may_have_passes_of_its_own(
    qwen25, picture_rows, monkeypatch, critic_epochs, passes
):
    """Each over all prompts, in orders of their own; the actor keeps its --epochs."""
    env, seen, inner = fresh(qwen25, picture_rows), [], ppo.minibatches_of

    def watched(*arguments, **named):
        for minibatch in inner(*arguments, **named):
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
