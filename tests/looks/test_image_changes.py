"""The same tokens with other images, against one Hugging Face forward of each sample with these images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

import train_ppo_vl as ppo
from common.data.processor import Processor
from common.looks import image_changes
from common.model import vlm
from conftest import (
    ROUNDING,
    hugging_face,
    logits_of,
    marked,
    responses_of,
    start,
    take,
    token_logprobs,
    words,
    write_image,
    write_rows,
)
from talkers import talk


@pytest.fixture
def rows(tmp_path):
    """Two prompts with a picture of one size, one with a picture of another, one without."""
    rng, lines = np.random.default_rng(3), []
    for i, size in enumerate([(84, 56), (84, 56), (28, 84), None]):
        images = [f"{i}.png"] if size else []
        for name in images:
            write_image(tmp_path / name, size, rng)
        lines.append({"prompt": f"what is {i}?", "images": images, "answer": "1"})
    return Path(write_rows(tmp_path / "rows.jsonl", lines))


@torch.no_grad()
def by_hugging_face(env, oracle, batch, images: list) -> list[float]:
    """The log-prob of each sample, whose prompt shows the given patches."""
    return [
        float(
            token_logprobs(
                logits_of(oracle, env.prompts[group], tokens, env.processor, images[group]), tokens
            ).sum()
        )
        for group, tokens in responses_of(batch)
    ]


def in_mean_colour(processor, prompt):
    """By numpy: a file of one colour, as the checkpoint's processor reads it."""
    if not prompt.images:
        return None
    pixels = np.asarray(Image.open(prompt.images[0]).convert("RGB"))
    flat = np.broadcast_to(pixels.mean(axis=(0, 1)).round().astype(np.uint8), pixels.shape)
    return processor.family.patches(Image.fromarray(flat))[0]


@pytest.mark.parametrize("trained", marked([False, True]))
def test_the_gap_is_that_of_forwards_with_blank_images(checkpoint, rows, trained):
    env = start(checkpoint, rows, *["--train_vision"] * trained)
    batch = ppo.rollout(env.actor, take(env), env.sampling, 2)
    gaps = image_changes.vision_gaps(env.actor, batch)
    oracle = hugging_face(checkpoint)
    seen, blank = (
        by_hugging_face(env, oracle, batch, [look(env.processor, row) for row in env.prompts])
        for look in (lambda *_: None, in_mean_colour)
    )
    assert gaps.tolist() == pytest.approx([a - b for a, b in zip(seen[:6], blank)], abs=1e-3)
    assert gaps.abs().max() > 0.1
    text = batch.select_prompts([3])
    assert not image_changes.has_images(text).any()
    assert len(image_changes.vision_gaps(env.actor, text)) == 0


def test_the_same_images_leave_no_gap_in_bfloat16(qwen25, rows, monkeypatch):
    """The sampler's rounding is not in it."""
    env = start(qwen25, rows, "--dtype bfloat16")
    batch = ppo.rollout(env.actor, take(env), env.sampling, 2)
    monkeypatch.setattr(image_changes, "blank", lambda images, place: images)
    assert image_changes.vision_gaps(env.actor, batch).tolist() == [0.0] * 6


@pytest.mark.slow
def test_images_of_environments_are_changed_too(qwen25, rows):
    """Replies, observations that samples share, and those that they do not."""
    env = start(qwen25, rows, "--max_new_tokens 16 --stop_strings", '["a", "e", "r"]')

    def change(images, place):
        places.append(place)
        return [Image.new("RGB", image.size, (10, 200, 30)) for image in images]

    for name in ("Noise", "Same"):
        places = []
        batch = talk(env, name, 2, batch=take(env))
        batch.draws = [14, 15, 16, 17]
        changed = image_changes.reread_images(batch, env.actor.model, env.processor, change)
        same = image_changes.reread_images(
            batch, env.actor.model, env.processor, lambda images, place: images
        )
        logprobs = ppo.logprobs_of(env.actor, same)
        assert (logprobs - ppo.logprobs_of(env.actor, batch)).abs().max() < ROUNDING
        assert (logprobs - ppo.logprobs_of(env.actor, changed)).abs().max() > 1e-3
        gaps = image_changes.vision_gaps(env.actor, batch)
        assert len(gaps) == int(image_changes.has_images(batch).sum())
        assert gaps.isfinite().all()
        assert len(set(places)) == len(places) > len(batch.prompts)
        assert {draw for draw, *_ in places} == {14, 15, 16, 17}


def test_masks_blacken_whole_squares_by_seed_and_place():
    """Each square by a draw of its own, row by row, those that the border cuts too."""
    pixels = np.random.default_rng(0).integers(1, 255, (50, 31, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)

    def masked(share: float, seed: int = 7, key: tuple = (123, 0)) -> list[np.ndarray]:
        images = image_changes.at_random(image_changes.mask, share, seed)([image] * 3, key)
        return [np.asarray(part) for part in images]

    before, actual, behind = masked(0.6)
    # by numpy's PCG64 from (7, 123, 0, 1), below 0.6
    black = np.array([[0, 1, 0], [0, 1, 1], [1, 1, 1], [1, 1, 1]], dtype=bool)
    squares = black.repeat(14, 0)[:50].repeat(14, 1)[:, :31, None]
    assert (actual == np.where(squares, 0, pixels)).all()
    others = [masked(0.6, 8)[1], masked(0.6, 7, (124, 0))[1], masked(0.6, 7, (123, 1))[1]]
    assert all((other != actual).any() for other in (before, behind, *others))
    for share, wanted in ((0.0, pixels), (1.0, 0 * pixels)):
        assert all((part == wanted).all() for part in masked(share))
    grey = image_changes.at_random(image_changes.mask, 0.6, 7)([image.convert("L")], (123, 0))
    assert grey[0].mode == "L"


def test_all_images_of_a_prompt_change_together(qwen25, tmp_path):
    """Pictures and frames in reverse order, and all but the first dropped, are those of rows that say so."""
    rng, names = np.random.default_rng(5), [f"{k}.png" for k in range(5)]
    for name in [*names, "white.png"]:
        write_image(tmp_path / name, (56, 56), rng)
    Image.new("RGB", (56, 56), "white").save(tmp_path / "white.png")

    def row(files: list[str]) -> dict:
        text = "was <image> in <video>?"
        return {"prompt": text, "images": files[:1], "videos": [files[1:]], "answer": "1"}

    orders = [names, names[::-1], [names[0], *["white.png"] * 4]]
    lines = write_rows(tmp_path / "rows.jsonl", list(map(row, orders)))
    env = start(qwen25, lines, "--video_frames 4")
    alone = take(env).select_prompts([0])
    batch, seen = ppo.rollout(env.actor, alone, env.sampling, 2), []

    def turned(images, key):
        seen.append((len(images), key))
        return images[::-1]

    def dropped(images, key):
        return [images[0], *[Image.new("RGB", image.size, "white") for image in images[1:]]]

    responses = [(k, tokens) for k in range(3) for tokens in batch.split(batch.tokens)]
    expected = take(env).with_responses(responses)
    expected.sampling = batch.sampling
    vlm.compute_features(env.actor.model, expected)
    wanted = ppo.logprobs_of(env.actor, expected).chunk(3)
    for change, logprobs in zip((image_changes.unchanged, turned, dropped), wanted):
        changed = image_changes.changed_logprobs(env.actor, batch, change)
        assert (changed - logprobs).abs().max() < ROUNDING
        assert change == image_changes.unchanged or (changed - wanted[0]).abs().max() > 0.01
    assert seen == [(5, (0, 0))]


@pytest.mark.slow
def test_a_model_that_does_not_see_is_told(qwen25, rows, tmp_path, capsys):
    """Whose tower says the same of every image; and rows without images are not asked about."""
    folder = tmp_path / "blind"
    model = AutoModelForImageTextToText.from_pretrained(qwen25)
    with torch.no_grad():
        for name, parameter in model.model.visual.merger.named_parameters():
            parameter.zero_()
    model.save_pretrained(folder)
    Processor(qwen25).save(str(folder))
    line = words(
        "--model",
        folder,
        "--data",
        rows,
        "--eval_data",
        rows,
        "--reward exact --eval_only --max_new_tokens 4 --max_prompt_tokens 200 --prompts_per_step 4",
        "--out",
        tmp_path / "run",
    )
    metrics = ppo.main(line)
    assert metrics["eval/vision_gap_logprob"] == pytest.approx(0, abs=ROUNDING)
    told = capsys.readouterr().out
    assert "the model does not use what it sees" in told
    assert "vision_gap 0.000" in told.replace("-", "")
    text = rows.with_name("text.jsonl")
    text.write_text(rows.read_text().splitlines()[3])
    assert "eval/vision_gap_logprob" not in ppo.main(
        words(*line, "-- --eval_data", text, "--out", tmp_path / "text")
    )
