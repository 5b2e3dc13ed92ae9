"""Responses that begin with given tokens, and tokens that the policy
has not drawn."""

import dataclasses
import math
import re

import pytest
import torch

import train_ppo_vl as ppo
from common.rollout import Beginnings
from conftest import (
    ROUNDING,
    computing,
    marked,
    responses_of,
    seeded,
    start,
    take,
    with_flags,
)
from helpers import fresh
from talkers import talk


def beginnings_of(batch, share: float) -> Beginnings:
    """Of all samples, this share of their tokens."""
    parts = zip(
        batch.prompt_index.tolist(),
        batch.sample_number.tolist(),
        batch.split(batch.tokens),
        batch.split(batch.logprobs),
    )
    return {
        (index, number): (tokens[: int(share * len(tokens))], logps[: int(share * len(tokens))])
        for index, number, tokens, logps in parts
    }


def rolled_out(env, prompts, count: int, beginnings=None, **changes):
    sampling = dataclasses.replace(env.sampling, **changes)
    return ppo.rollout(env.actor, prompts, sampling, count, beginnings)


def assert_same_samples(one, other) -> None:
    for name in ("prompt_index", "sample_number", "own_lengths", "tokens", "truncated"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.logprobs - other.logprobs).abs().max() < ROUNDING


@pytest.mark.parametrize("stops", marked([False, True]), ids=["", "strings"])
def test_a_response_goes_on_from_its_own_beginning(checkpoint, picture_rows, poll, stops):
    """It is the same response, whatever else is in the batch: a token's noise is that of its place."""
    strings = ['--stop_strings ["a","e"]'] * stops
    env = start(checkpoint, picture_rows, "--max_new_tokens 24 --temperature 0.8", *strings)
    expected = rolled_out(env, take(env), 5)
    assert len(set(expected.own_lengths.tolist())) > 1
    # a stop string that is given ends nothing
    all_of_it = 0.99 if stops else 1.0
    for share, slots, every in (
        (0.0, 0, 1),
        (0.4, 3, 8),
        (all_of_it, 7, 1),
    ):
        poll[0] = every
        begun = beginnings_of(expected, share)
        assert_same_samples(rolled_out(env, take(env), 5, begun, slots=slots), expected)
    with computing(env.actor, max_tokens_per_pack=64):
        assert_same_samples(rolled_out(env, take(env), 5, begun), expected)
    # only some of them, of other lengths
    some = {key: begun[key] for key in list(begun)[::3]}
    again = rolled_out(env, take(env), 5, beginnings_of(expected, 0.4) | some)
    assert_same_samples(again, expected)
    assert not again.foreign.any()


def test_a_stop_string_of_a_beginning_ends_nothing(qwen25, picture_rows, poll):
    """Wherever it stands in it; one of which the last character is drawn ends the response."""
    env = start(qwen25, picture_rows, "--max_new_tokens 24")
    for text in ("stop here", "here stop", "stop stop "):
        words = torch.tensor(env.processor.token_ids(text))
        begun = {(0, 1): (words, torch.zeros(len(words)))}
        free = rolled_out(env, take(env), 2, begun)
        for poll[0] in (1, 8):
            stopped = rolled_out(env, take(env), 2, begun, stop_strings=("stop",))
            assert_same_samples(stopped, free)
    drawn = free.split(free.tokens)[1][len(words)]
    (letter,) = env.processor.decode([drawn[None]])
    ended = rolled_out(env, take(env), 2, begun, stop_strings=(f"stop {letter}",))
    assert len(ended.split(ended.tokens)[1]) == len(words) + 1


def test_a_beginning_with_a_token_that_is_never_sampled_is_refused(qwen25, picture_rows):
    env = start(qwen25, picture_rows)
    tokens = torch.tensor([*env.processor.token_ids("a"), env.processor.banned_ids[0]])
    name = env.processor.tokenizer.convert_ids_to_tokens(env.processor.banned_ids[0])
    with pytest.raises(
        ValueError, match=f"of sample 1 of prompt 2 contains {re.escape(name)}, which"
    ):
        rolled_out(env, take(env), 2, {(2, 1): (tokens, torch.zeros(2))})


@pytest.mark.parametrize("name", marked(["Talk", "Same"]))
def test_a_first_turn_goes_on_behind_the_first_observation(
    checkpoint, picture_rows, monkeypatch, name
):
    env = start(checkpoint, picture_rows, "--max_new_tokens 24 --max_tokens_per_pack 900")
    expected, rollout = talk(env, name, 4), ppo.rollout
    first = [
        (turns.ends or [len(tokens)])[0]
        for turns, tokens in zip(expected.conversations, expected.split(expected.tokens))
    ]
    begun = beginnings_of(expected, 1)
    for (key, (tokens, logps)), end in zip(begun.items(), first):
        begun[key] = tokens[: end // 2], logps[: end // 2]
    monkeypatch.setattr(ppo, "rollout", lambda *args: rollout(*args, begun))
    again = talk(env, name, 4)
    assert_same_samples(again, expected)
    assert torch.equal(again.stream, expected.stream)
    assert torch.equal(again.stream_positions, expected.stream_positions)


def test_another_beginning_is_read_as_it_stands(checkpoint, picture_rows):
    """Log-probs are those of training; tokens without one are foreign, and get the policy's."""
    env = start(checkpoint, picture_rows, "--temperature 0.8 --advantage grpo")
    words = torch.tensor(env.processor.token_ids("red, or is it blue?"))[:7]
    begun = {(index, 2): (words, torch.full((7,), math.nan)) for index in range(4)}
    begun[1, 0] = words[:3], torch.zeros(3)
    batch = rolled_out(env, take(env), 3, begun)
    for (_, tokens), number in zip(responses_of(batch), batch.sample_number.tolist()):
        assert number != 2 or tokens[:7].tolist() == words.tolist()
    number = batch.sample_number.repeat_interleave(batch.own_lengths)
    place = torch.cat([torch.arange(n) for n in batch.own_lengths.tolist()])
    assert torch.equal(batch.foreign, (number == 2) & (place < 7))
    expected = ppo.logprobs_of(env.actor, batch)
    untold = batch.foreign.clone()
    untold[batch.flat_index(torch.tensor([3]))[:3]] = True
    assert (batch.logprobs - expected)[~untold].abs().max() < ROUNDING
    recorded = batch.logprobs
    ppo.fill_logprobs_and_values(batch, env.models._replace(critic=None), env.args)
    assert (batch.logprobs - expected)[batch.foreign].abs().max() < ROUNDING
    assert torch.equal(batch.logprobs[~batch.foreign], recorded[~batch.foreign])
    assert torch.equal(batch.old_logprobs, batch.logprobs)


def test_foreign_tokens_stay_out_of_what_is_said_of_the_sampler(qwen25, picture_rows):
    """And out of the policy loss."""
    env = fresh(qwen25, picture_rows, "--advantage grpo --minibatches 1 --epochs 1")
    batch, args = env.batch, env.args
    whole = ppo.policy_loss_mask(batch, args)
    assert whole.all()
    generator = seeded(3)
    batch.foreign = torch.rand(len(batch.tokens), generator=generator) < 0.3
    drawn = ~batch.foreign
    batch.in_policy_loss = ppo.policy_loss_mask(batch, args)
    assert torch.equal(batch.in_policy_loss, drawn)
    batch.logprobs[batch.foreign] -= 5
    batch.logprobs[drawn] += 0.01
    _, entropy = ppo.packs.run_forward(
        env.actor,
        batch,
        lambda pack: torch.stack(env.actor(pack, batch.sampling, entropy=True)[:2]),
    )
    metrics = ppo.update_actor(
        env.trained, None, batch, 1, None, with_flags(args, minibatches=1, epochs=1)
    )
    assert metrics["train/sampler_gap"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["train/entropy"] == pytest.approx(float(entropy[drawn].mean()), rel=1e-4)


def test_all_tokens_may_be_foreign(qwen25, picture_rows):
    env = fresh(qwen25, picture_rows, "--advantage grpo --minibatches 1 --epochs 1")
    env.batch.foreign = torch.ones_like(env.batch.foreign)
    metrics = ppo.update_actor(env.trained, None, env.batch, 1, None, env.args)
    assert "train/sampler_gap" not in metrics


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_minibatches_may_differ_by_a_prompt(qwen25, picture_rows, count):
    parts = take(start(qwen25, picture_rows)).minibatches(count, (1, 2, 3))
    assert sorted(index for part in parts for index in part.tolist()) == [0, 1, 2, 3]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
