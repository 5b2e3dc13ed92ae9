"""Whole steps of PAPO, VPPO, GDPO and of two lambdas: rollout, rewards, looks, advantages, loss and
gradient, against one Hugging Face forward per sample and loops in plain Python; and which samples a
masked image concerns."""

import dataclasses
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train_ppo_vl as ppo
from common.data.loader import load_pixels
from common.looks import image_changes
from common.rewards import sources
from conftest import (
    ROUNDING,
    hugging_face,
    logits_of,
    marked,
    read_rows,
    responses_of,
    start,
    take,
    token_logprobs,
    user_error,
    with_flags,
    words,
    write_image,
    write_rows,
)
from helpers import Caught, distance, stir_value_head
from talkers import talk

REWARD = '''
def score(prompts, responses, references, labels, images):
    """Without a reward of its own: the sum, of parts on other scales."""
    return {"vowels": [float(sum(c in "aeiou" for c in r)) for r in responses],
            "letters": [20.0 * sum(c.isalpha() for c in r) / max(1, len(r)) for r in responses]}
'''
SHARE, SEED = 0.6, 5


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Prompts with two pictures, without, with one and with one; beside them a reward."""
    folder, rng, lines = tmp_path_factory.mktemp("looked"), np.random.default_rng(3), []
    for i, sizes in enumerate([[(84, 56), (30, 56)], [], [(28, 84)], [(70, 70)]]):
        names = [f"{i}-{k}.png" for k in range(len(sizes))]
        for name, size in zip(names, sizes):
            write_image(folder / name, size, rng)
        lines.append({"prompt": f"what is {i}?", "images": names, "answer": "1"})
    (folder / "reward.py").write_text(REWARD)
    return Path(write_rows(folder / "rows.jsonl", lines))


def masked_pixels(processor, prompt, draw: int):
    """Patches of a prompt's images with black squares, by a loop over the squares."""
    patches = []
    for k, path in enumerate(prompt.images):
        pixels = np.array(Image.open(path).convert("RGB"))
        height, width = pixels.shape[:2]
        draws = iter(np.random.default_rng((SEED, draw, 0, k)).random(10_000))
        for y in range(0, height, 14):
            for x in range(0, width, 14):
                if next(draws) < SHARE:
                    pixels[y : y + 14, x : x + 14] = 0
        patches.append(processor.family.patches(Image.fromarray(pixels))[0])
    return torch.cat(patches) if patches else None


def forward(env, oracle, prompt, tokens: torch.Tensor, pixels) -> torch.Tensor:
    """(T, V) log-probs of the positions that predict the tokens, by Hugging Face's model at images
    with these pixels."""
    return logits_of(oracle, prompt, tokens, env.processor, pixels).log_softmax(-1)


def sampled(folder: Path, rows: Path, *flags: str):
    """A start, and the samples of its second step, which draws the rows once more, with their
    rewards and log-probs; a value head that is not 0."""
    reward = (
        () if "--reward_recipe" in flags[0] else ("--reward", f"{rows.parent / 'reward.py'}:score")
    )
    env = start(folder, rows, f"--seed {SEED} --samples_per_prompt 4 --steps 2", *reward, *flags)
    if env.critic is not None:
        stir_value_head(env.critic)
    env.models = ppo.Models(env.actor, env.critic, env.reference)
    history = torch.zeros(2, len(env.prompts))
    env.state = ppo.TrainState(env.args.kl_coef, rows_drawn=4, history=history)
    with ppo.open_loader(env.args, env.rows, env.state) as loader:
        env.batch, _ = ppo.collect(
            env.models,
            loader,
            sources.load_rewards(env.args),
            env.sampling,
            env.state,
            env.args,
        )
    # draws of the run, which seed the masks, are no indices of prompts
    assert env.batch.draws == [4, 5, 6, 7]
    return env


@pytest.mark.slow
def test_masked_logprobs_are_those_of_forwards_with_masked_images(checkpoint, rows):
    """Of every family, in float64, from which the log-probs themselves are rounded to float32; NaN
    for the samples of the prompt without images."""
    env = sampled(checkpoint, rows, "--advantage grpo")
    env.actor.double()
    change = image_changes.at_random(image_changes.mask, SHARE, SEED)
    actual = image_changes.changed_logprobs(env.actor, env.batch, change)
    oracle = hugging_face(checkpoint).double()
    for (index, tokens), ours in zip(responses_of(env.batch), env.batch.split(actual)):
        prompt = env.batch.prompts[index]
        pixels = masked_pixels(env.processor, prompt, env.batch.draws[index])
        with torch.no_grad():
            theirs = token_logprobs(forward(env, oracle, prompt, tokens, pixels), tokens)
        if not prompt.images:
            assert ours.isnan().all()
        else:
            assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-6)
    text = env.batch.select_prompts(
        [k for k, prompt in enumerate(env.batch.prompts) if not prompt.images]
    )
    assert image_changes.changed_logprobs(env.actor, text, change).isnan().all()


def k3(p: float, q: float) -> float:
    return min(10.0, math.exp(min(20.0, max(-20.0, q - p))) - min(20.0, max(-20.0, q - p)) - 1)


def standardized(values: list[float], eps: float = 1e-6) -> list[float]:
    if max(values) - min(values) < 1e-6:
        return [0.0] * len(values)
    return [
        (value - statistics.fmean(values)) / (statistics.stdev(values) + eps) for value in values
    ]


def by_prompt(values: list[float]) -> list[float]:
    return sum((standardized(values[k : k + 4]) for k in range(0, len(values), 4)), [])


def lambdas(reward: list[float], values: list[list[float]], lam) -> list[list[float]]:
    """Generalised advantages of samples that earn at their last token."""
    rows = []
    for earned, row in zip(reward, values):
        carry, following, advantages = 0.0, 0.0, []
        for t in reversed(range(len(row))):
            carry = (
                (earned if t == len(row) - 1 else 0.0) + following - row[t] + lam(len(row)) * carry
            )
            following = row[t]
            advantages.insert(0, carry)
        rows.append(advantages)
    return rows


STEPS = {
    "papo": "--advantage grpo --perception_coef 0.7 --entropy_coef -0.05",
    "vppo": "--advantage grpo --perception_ratio 0.4 --perception_scale 0.7",
    "gdpo": "--advantage gdpo",
    "gae": "--gae_lambda 0.9 --gae_alpha 0.15 --advantages_norm off",
}


@pytest.mark.parametrize("name", marked(STEPS))
def test_a_step_has_the_gradient_of_the_naive_oracle(qwen25, rows, name):
    """From the sampled tokens alone: rewards from their text, log-probs by forwards of single
    samples with the images as they are and masked, advantages and losses by loops."""
    env = sampled(qwen25, rows, "--max_new_tokens 9", STEPS[name])
    batch, args = env.batch, env.args
    ppo.compute_advantages(batch, env.state, args)
    trained = Caught(env.actor, args)
    metrics = ppo.update_actor(trained, env.models, batch, 1, None, args)

    oracle, prompts = hugging_face(qwen25), batch.prompts
    # a response may contain it, and is then an input as any
    oracle.get_input_embeddings().padding_idx = None
    texts = env.processor.decode([tokens for _, tokens in responses_of(batch)])
    vowels = [float(sum(c in "aeiou" for c in text)) for text in texts]
    letters = [20.0 * sum(c.isalpha() for c in text) / max(1, len(text)) for text in texts]
    rewards, lengths = [a + b for a, b in zip(vowels, letters)], batch.own_lengths.tolist()
    whole, masked = [], []
    for index, tokens in responses_of(batch):
        whole.append(
            forward(env, oracle, prompts[index], tokens, load_pixels(prompts[index], env.processor))
        )
        pixels = masked_pixels(env.processor, prompts[index], batch.draws[index])
        with torch.no_grad():
            masked.append(
                token_logprobs(
                    forward(env, oracle, prompts[index], tokens, pixels), tokens
                ).tolist()
            )
    logp = [token_logprobs(rows, tokens) for rows, (_, tokens) in zip(whole, responses_of(batch))]
    old = [row.tolist() for row in logp]
    seen = [
        [k3(p, q) for p, q in zip(*pair)] if prompts[index].images else None
        for index, pair in zip(batch.prompt_index.tolist(), zip(old, masked))
    ]

    keep, factors = [[True] * n for n in lengths], [1.0] * 16
    if name == "vppo":
        for i, row in enumerate(seen):
            if row is not None:
                best = sorted(range(len(row)), key=lambda t: -row[t])[: math.ceil(0.4 * len(row))]
                keep[i] = [t in best for t in range(len(row))]
        means = {i: statistics.fmean(row) for i, row in enumerate(seen) if row}
        low, high = min(means.values()), max(means.values())
        middle = statistics.fmean((mean - low) / (high - low) for mean in means.values())
        for i, mean in means.items():
            factors[i] = 0.7 + 0.3 / middle * (mean - low) / (high - low)
        assert statistics.fmean(factors) == pytest.approx(1)
        assert max(factors) > 1.2
    if name == "gdpo":
        sums = [a + b for a, b in zip(by_prompt(vowels), by_prompt(letters))]
        advantages = [[value] * n for value, n in zip(standardized(sums), lengths)]
    elif name == "gae":
        values = [row.tolist() for row in batch.split(ppo.values_of(env.critic, batch))]
        advantages = lambdas(rewards, values, lambda n: max(0.0, 1 - 1 / (0.15 * n)))
        targets = [
            a + v
            for row in zip(lambdas(rewards, values, lambda n: 0.9), values)
            for a, v in zip(*row)
        ]
        assert batch.returns.tolist() == pytest.approx(targets, abs=1e-4)
    else:
        advantages = [
            [factor * value] * n for factor, value, n in zip(factors, by_prompt(rewards), lengths)
        ]
    assert batch.advantages.tolist() == pytest.approx(sum(advantages, []), abs=1e-4)
    assert max(map(abs, sum(advantages, []))) > 0.5

    loss, total, chosen = torch.zeros(()), sum(lengths), sum(map(sum, keep))
    for i, logps in enumerate(logp):
        for t, p in enumerate(logps):
            ratio = (p - old[i][t]).exp()
            loss = loss - keep[i][t] * advantages[i][t] * ratio / chosen
            if name == "papo":
                if seen[i] is not None:
                    delta = masked[i][t] - p
                    loss = loss - 0.7 * (delta.exp() - delta - 1).clamp(max=10) / total
                probs = whole[i][t].exp()
                loss = (
                    loss - 0.05 * (probs * whole[i][t].masked_fill(probs == 0, 0.0)).sum() / total
                )
    loss.backward()
    expected = {
        f"model.{key}": p.grad for key, p in oracle.named_parameters() if "visual" not in key
    }
    assert distance(trained.gradients[0], expected) < ROUNDING
    if name in ("papo", "vppo"):
        mean = sum(sum(row) for row in seen if row) / total
        assert metrics["train/perception_kl"] == pytest.approx(mean, rel=1e-3)
        assert mean > 0.01


def test_gdpo_pays_what_a_recipe_pays(qwen25, rows):
    """A label of weight 0 is only measured, also where there is one source."""
    labelled = write_rows(
        rows.parent / "labelled.jsonl",
        [row | {"label": "ab"[k % 2]} for k, row in enumerate(read_rows(rows))],
    )
    recipe = {
        label: [[f"{rows.parent / 'reward.py'}:score", weight]]
        for label, weight in (("a", 2.0), ("b", 0.0))
    }
    env = sampled(qwen25, Path(labelled), "--advantage gdpo --reward_recipe", json.dumps(recipe))
    ppo.compute_advantages(env.batch, env.state, env.args)
    sums = [
        a + b
        for a, b in zip(
            *(by_prompt(env.batch.components[name].tolist()) for name in ("vowels", "letters"))
        )
    ]
    paid = [env.batch.prompts[index].label == "a" for index in env.batch.prompt_index.tolist()]
    sums = [value * earns for value, earns in zip(sums, paid)]
    expected = torch.tensor(sums) / (statistics.stdev(sums) + 1e-6)
    assert torch.allclose(
        env.batch.advantages, expected.repeat_interleave(env.batch.own_lengths), atol=1e-5
    )
    assert 0 < sum(paid) < 16


def test_gdpo_compares_parts_of_a_reward(qwen25, rows):
    """Not what is only measured: whether an answer can be read, and accuracies of an environment,
    by whose rewards it is grpo over the deviation in the step."""
    env = start(qwen25, rows, "--max_new_tokens 16 --stop_strings", '["a", "e", "r"]')
    texts = ["\\boxed{1}", "1", "<think>x</think>\\boxed{2}", "\\boxed{1}"]
    responses = [torch.tensor(env.processor.token_ids(text)) for text in texts]
    batch = take(env).with_responses((k, tokens) for k in range(4) for tokens in responses)
    batch.truncated = torch.zeros(len(batch)).bool()
    sources.load_rewards(with_flags(env.args, reward="boxed")).score(batch, env.processor, 0)
    assert batch.compared == ["accuracy", "format"]
    assert batch.components.keys() == {"accuracy", "format", "parsed"}
    batch = talk(env, "Noise", 4)
    sources.load_rewards(with_flags(env.args, reward="env")).score(batch, env.processor, 0)
    assert not torch.equal(batch.components["accuracy"], batch.rewards)
    batch.old_logprobs = batch.logprobs
    advantages = []
    for name in ("gdpo", "grpo"):
        ppo.compute_advantages(batch, ppo.TrainState(0.0), with_flags(env.args, advantage=name))
        advantages.append(torch.stack([part.mean() for part in batch.split(batch.advantages)]))
    assert torch.allclose(advantages[0], advantages[1] / advantages[1].std(), atol=1e-4)
    assert advantages[1].abs().max() > 0.5


def test_nothing_is_masked_without_the_flags(qwen25, rows, monkeypatch):
    monkeypatch.setattr(image_changes, "reread_images", None)
    assert (
        sampled(
            qwen25, rows, "--advantage grpo --perception_mask 0.3"
        ).batch.masked_logprobs.numel()
        == 0
    )


def test_responses_to_no_image_keep_all_tokens_and_their_advantages(qwen25, rows):
    env = sampled(qwen25, rows, "--advantage grpo --perception_ratio 0.3 --perception_scale 0.2")
    plain = dataclasses.replace(env.batch)
    ppo.compute_advantages(env.batch, env.state, env.args)
    ppo.compute_advantages(
        plain, env.state, with_flags(env.args, perception_ratio=1.0, perception_scale=1.0)
    )
    assert plain.in_policy_loss.all()
    text = ~image_changes.has_images(env.batch).repeat_interleave(env.batch.own_lengths)
    assert 0 < text.sum() < len(text)
    assert env.batch.in_policy_loss[text].all()
    assert not env.batch.in_policy_loss[~text].all()
    assert torch.equal(env.batch.advantages[text], plain.advantages[text])
    assert not torch.equal(env.batch.advantages[~text], plain.advantages[~text])
    assert plain.masked_logprobs.isnan().tolist() == text.tolist()


def test_rows_without_images_cannot_be_masked(qwen25, rows, tmp_path):
    text = write_rows(
        tmp_path / "text.jsonl", [{"prompt": f"say {i}", "answer": "1"} for i in range(4)]
    )
    line = words(
        "--model",
        qwen25,
        "--data",
        text,
        "--max_prompt_tokens 64 --max_new_tokens 4 --advantage grpo --prompts_per_step 4 "
        "--reward exact --out",
        tmp_path / "run",
    )
    with user_error("mask images, and no row of --data has any"):
        ppo.main(line + ["--perception_coef", "0.01"])
