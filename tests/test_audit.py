"""What answers lose without their pictures, against one Hugging Face forward of each with the other pictures."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import start, take
from PIL import Image
from test_environments import talk
from test_training import fresh, update_actor
from transformers import AutoModelForImageTextToText

import train_ppo_vl as ppo
from common import audit
from common.buffers import Batch
from common.vlm import model, replies
from common.vlm.data import load_pixels


@pytest.fixture
def rows(tmp_path):
    """Two prompts with a picture of one size, one with a picture of another, one without."""
    rng, lines = np.random.default_rng(3), []
    for i, size in enumerate([(56, 84), (56, 84), (84, 28), None]):
        images = [] if size is None else [f"{i}.png"]
        for name in images:
            Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(tmp_path / name)
        lines.append(json.dumps({"prompt": f"what is {i}?", "images": images, "answer": "1"}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path / "rows.jsonl"


def by_hugging_face(env, oracle, batch, pictures: dict) -> list[float]:
    """The log-prob of each sample, whose prompt has the given patches and grids."""
    found = []
    for group, tokens in zip(batch.group.tolist(), batch.split(batch.tokens)):
        ids = torch.cat([env.prompts[group].input_ids, tokens])[None]
        inputs = env.processor.family.token_types(ids)
        if pictures.get(group):
            inputs |= env.processor.family.vision_inputs(*pictures[group])
        with torch.no_grad():
            logits = oracle(input_ids=ids, **inputs, use_cache=False).logits[0, -len(tokens) - 1:-1]
        logits[:, list(env.processor.banned_ids)] = -math.inf
        found.append(float(logits.log_softmax(-1).gather(1, tokens[:, None]).sum()))
    return found


def in_mean_colour(patches: torch.Tensor) -> torch.Tensor:
    """By loops over colours: Qwen's patches hold one colour after the other."""
    blank = patches.clone()
    size = patches.shape[1] // 3
    for colour in range(3):
        part = slice(colour * size, (colour + 1) * size)
        blank[:, part] = float(patches[:, part].double().mean())
    return blank


@pytest.mark.parametrize("flags", [(), ("--train_vision",)])
def test_gaps_are_those_of_forwards_with_other_pictures(checkpoint, rows, flags):
    env = start(checkpoint, rows, *flags)
    batch = take(env)
    pixels = dict(batch.patches)
    batch = ppo.rollout(env.actor, batch, env.sampling, 2)
    found = audit.Audit(env.actor, None, ppo.logprobs_as_drawn, ppo.rollout)
    found.add(batch, dataclasses.replace(batch, patches=pixels))
    oracle = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="eager").eval()
    own = {group: load_pixels(prompt, env.processor) for group, prompt in enumerate(env.prompts)}
    seen = by_hugging_face(env, oracle, batch, own)
    blank = by_hugging_face(env, oracle, batch, {
        group: (in_mean_colour(part[0]), part[1]) for group, part in own.items() if part})
    other = by_hugging_face(env, oracle, batch, {0: own[1], 1: own[0]} | {2: own[2]})
    assert found.blank == pytest.approx([a - b for a, b in zip(seen[:6], blank)], abs=1e-3)
    assert found.other == pytest.approx([a - b for a, b in zip(seen[:4], other)], abs=1e-3)
    metrics = found.metrics()
    assert metrics["eval/vision_gap_logprob"] == pytest.approx(sum(found.blank) / 6)
    assert metrics["eval/vision_gap_logprob_other_row"] == pytest.approx(sum(found.other) / 4)
    assert max(map(abs, found.blank)) > 0.1 and audit.warning(metrics) == ""


def test_an_unseeing_model_has_no_gap_in_bfloat16(qwen25, rows, monkeypatch):
    """The sampler's rounding is not in it: with the same pictures, the gap is exactly 0."""
    env = start(qwen25, rows, "--dtype", "bfloat16")
    prompts = take(env)
    pixels = dict(prompts.patches)
    batch = ppo.rollout(env.actor, prompts, env.sampling, 2)
    monkeypatch.setattr(type(env.processor.family), "blank", lambda self, patches: patches)
    found = audit.Audit(env.actor, None, ppo.logprobs_as_drawn, ppo.rollout)
    found.add(batch, dataclasses.replace(batch, patches=pixels))
    assert found.blank == [0.0] * 6 and max(map(abs, found.other)) > 1e-3


def test_the_other_row_shows_another_picture(rows):
    """Rows about one picture often follow each other."""
    def shown(*names):
        prompts = [SimpleNamespace(grids=((1, 4, 4),) if name else (), images=(name,)) for name in names]
        return audit.partners(Batch(prompts, [0] * len(prompts), [0] * len(prompts)))

    assert shown("a", "a", "b", "b") == {0: 2, 1: 2, 2: 0, 3: 0}
    assert shown("a", "b", "a", "b") == {0: 1, 1: 2, 2: 3, 3: 0}
    assert shown("a", "a", "") == {}


def test_tiles_become_their_mean_colour(qwen25):
    """Of the families whose processors give tiles (T, 3, h, w)."""
    from common.vlm.families import Family

    tiles = torch.rand(2, 3, 4, 5)
    blank = Family.blank(None, tiles)
    assert blank.shape == tiles.shape
    for colour in range(3):
        assert torch.allclose(blank[:, colour], tiles[:, colour].mean().expand(2, 4, 5))


def test_pictures_of_environments_are_blanked_too(qwen25, rows):
    """Replies, observations that samples share, and those that they do not."""
    env = start(qwen25, rows, "--max_new_tokens", "16", "--stop_strings", '["a", "e", "r"]')
    for name in ("Talk", "Same"):
        prompts = take(env)
        pixels = dict(prompts.patches)
        batch = talk(env, name, 2, batch=prompts)
        found = audit.Audit(env.actor, None, ppo.logprobs_as_drawn, ppo.rollout)
        found.add(batch, dataclasses.replace(batch, patches=pixels))
        shown = [bool(said.grids) or bool(batch.prompts[group].grids)
                 for group, said in zip(batch.group.tolist(), batch.conversations)]
        assert len(found.blank) == sum(shown) and all(abs(gap) < 1e3 for gap in found.blank)
        blank = found.repainted(batch, pixels, env.processor.family.blank)
        for said, other in zip(batch.conversations, blank.conversations):
            assert (said.features is None) == (other.features is None)
            if said.features is not None:
                assert said.features.shape == other.features.shape
        # these pictures have one colour already, so that those of replies stay as they are
        only = dataclasses.replace(blank, features=batch.features, patches=batch.patches)
        gap = (ppo.logprobs_as_drawn(env.actor, only) - batch.logprobs).abs().max()
        assert gap < 1e-3


@pytest.fixture
def two_files(tmp_path):
    """Rows whose colours have whole means, the same rows with files of that colour, and a reward for any answer."""
    rng, lines = np.random.default_rng(4), {"seen": [], "blank": []}
    for i, size in enumerate([(56, 84), (28, 56), (84, 56), None, (56, 56), (112, 28)]):
        for name in lines:
            images = [] if size is None else [f"{name}-{i}.png"]
            lines[name].append(json.dumps({"prompt": f"what is {i}?", "images": images, "answer": "1"}))
        if size is not None:
            mean, away = rng.integers(60, 196, 3), rng.integers(-60, 60, (size[0] // 2, size[1], 3))
            seen = np.concatenate([mean + away, mean - away]).astype(np.uint8)
            assert (seen.mean(axis=(0, 1)) == mean).all()
            Image.fromarray(seen).save(tmp_path / f"seen-{i}.png")
            Image.fromarray(np.broadcast_to(mean, seen.shape).astype(np.uint8)).save(tmp_path / f"blank-{i}.png")
    for name, texts in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(texts))
    (tmp_path / "reward.py").write_text(
        "import zlib\n\ndef worth(responses):\n    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in responses]\n\n"
        "def graded(prompts, responses, references, labels, images):\n"
        "    assert all('seen' in path for paths in images for path in paths)\n"
        "    return {'accuracy': worth(responses), 'brevity': [0.5] * len(responses)}\n\n"
        "def plain(prompts, responses, references, labels, images):\n    return worth(responses)\n")
    return tmp_path


def evaluated(model, folder, name: str, out: str, reward: str, *more: str) -> dict[str, float]:
    return ppo.main(["--model", str(model), "--data", str(folder / f"{name}.jsonl"), "--eval_data", str(folder / f"{name}.jsonl"),
                     "--reward", f"{folder}/reward.py:{reward}", "--eval_only", "--max_new_tokens", "8",
                     "--max_prompt_tokens", "200", "--prompts_per_step", "4", "--out", str(folder / out), *more])


@pytest.mark.parametrize("checkpoint", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_accuracy_with_blank_pictures_is_that_of_blank_files(checkpoint, two_files):
    """An evaluation of files that are blank answers and earns what the audit says; rewards get the rows as they are."""
    program = two_files / "reward.py"
    seen = evaluated(checkpoint, two_files, "seen", "a", "graded")
    program.write_text(program.read_text().replace("'seen' in path", "'blank' in path"))
    blank = evaluated(checkpoint, two_files, "blank", "b", "graded")
    assert seen["eval/accuracy_blanked"] == blank["eval/accuracy_reward_mean"] == blank["eval/accuracy_blanked"]
    assert abs(seen["eval/accuracy_blanked"] - seen["eval/accuracy_reward_mean"]) > 0.01 and "eval/reward_blanked" not in seen
    plain = evaluated(checkpoint, two_files, "seen", "c", "plain")
    assert plain["eval/reward_blanked"] == pytest.approx(seen["eval/accuracy_blanked"])
    drawn = evaluated(checkpoint, two_files, "seen", "d", "plain", "--eval_samples", "2")
    assert "eval/reward_blanked" not in drawn and "eval/vision_gap_logprob" in drawn


@pytest.mark.parametrize("name", ["", "Noise"])
def test_the_policy_sees_blanks_and_judges_see_pictures(qwen25, rows, monkeypatch, name):
    """Of prompts, first observations and replies; what a rollout computes features of has one colour."""
    env = start(qwen25, rows, "--max_new_tokens", "16", "--stop_strings", '["a", "e", "r"]')
    greedy, prompts, shown, judged = dataclasses.replace(env.sampling, greedy=True), take(env), [], []
    pixels = dict(prompts.patches)
    env.sampling = greedy
    batch = talk(env, name, 1, batch=prompts) if name else ppo.rollout(env.actor, prompts, greedy, 1)
    judge = SimpleNamespace(model_sources=lambda: ["a judge"], score=lambda part, _: judged.append(part))
    batch.scores = torch.zeros(len(batch))

    def answer(*args):
        with monkeypatch.context() as patch:
            for module in (model, replies):
                patch.setattr(module, "image_features", lambda *inputs: shown.append(inputs[1]) or image_features(*inputs))
            found = ppo.rollout(*args)
        found.scores = torch.zeros(len(found))
        return found

    image_features = model.image_features
    seen = audit.Audit(env.actor, judge, ppo.logprobs_as_drawn, answer)
    seen.add(batch, dataclasses.replace(prompts, patches=pixels, features={}))
    assert sum(map(len, shown)) > 0 and seen.rewards == [0.0] * len(batch)
    assert all(patches.unflatten(1, (3, -1)).std(dim=2).max() < 1e-6 for patches in shown)
    for group, features in judged[0].features.items():
        assert (features - batch.features[group]).abs().max() < 1e-4
    for said in judged[0].conversations:
        if said.grids:
            pictures = said.pictures[-len(said.grids):]
            true = image_features(env.actor.model, torch.cat([env.processor.family.patches(part)[0] for part in pictures]),
                                  torch.tensor(said.grids))
            assert (said.features - true).abs().max() < 1e-4


def test_a_model_that_does_not_see_is_told(qwen25, rows, tmp_path, capsys):
    """Whose tower says the same of every picture; and rows without pictures are not asked about."""
    folder = tmp_path / "blind"
    model = AutoModelForImageTextToText.from_pretrained(qwen25)
    with torch.no_grad():
        for name, parameter in model.model.visual.merger.named_parameters():
            parameter.zero_()
    model.save_pretrained(folder)
    ppo.data.Processor(qwen25).save(str(folder))
    line = ["--model", str(folder), "--data", str(rows), "--eval_data", str(rows), "--reward", "exact", "--eval_only",
            "--max_new_tokens", "4", "--max_prompt_tokens", "200", "--prompts_per_step", "4", "--out", str(tmp_path / "run")]
    metrics = ppo.main(line)
    assert metrics["eval/vision_gap_logprob"] == pytest.approx(0, abs=1e-5)
    assert "the model does not use what it sees" in capsys.readouterr().out
    metrics = ppo.main([*line, "--no-vision_audit", "--out", str(tmp_path / "other")])
    assert "eval/vision_gap_logprob" not in metrics and "eval/accuracy_blanked" not in metrics
    text = rows.with_name("text.jsonl")
    text.write_text(rows.read_text().splitlines()[3])
    metrics = ppo.main([*line, "--eval_data", str(text), "--out", str(tmp_path / "text")])
    assert "eval/vision_gap_logprob" not in metrics and "eval/accuracy_blanked" not in metrics


def test_the_kl_of_sampler_and_trainer(qwen25, picture_rows):
    """k3 of the first minibatch alone, per token: 0 where the two agree, by the formula where they do not."""
    env = fresh(qwen25, picture_rows)
    now = ppo.logprobs_as_drawn(env.actor, env.batch)
    env.batch.logprobs = env.batch.old_logprobs = now.clone()
    env.trained.lr = 0.0
    assert update_actor(env)["rollout/train_kl"] < 1e-9
    env.batch.logprobs = now - 0.1
    assert update_actor(env)["rollout/train_kl"] == pytest.approx(math.expm1(0.1) - 0.1, rel=1e-3)
