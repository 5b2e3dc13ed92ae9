"""A reference that moves (--reference_every): the actor of an earlier step, and a role of the checkpoint."""

import pytest
import torch

from conftest import (
    ROUNDING,
    Tensors,
    assert_same_records,
    read_json,
    same_tensors,
)
from helpers import cut_back, tensors, train

KL = "--kl_coef 0.1 --actor_lr 1e-2 --save_every 1 --keep_last 9 --export_every 0"


def role(folder, name: str) -> Tensors:
    """The weights of a role in a checkpoint, by their names in it."""
    start = f"{name}.model."
    return {
        key.removeprefix(start): value
        for key, value in tensors(folder).items()
        if key.startswith(start)
    }


@pytest.fixture(scope="module")
def whole(qwen25, task, tmp_path_factory):
    """Folder and records of five steps; the reference becomes the actor after the second and the fourth."""
    out = tmp_path_factory.mktemp("whole")
    return out, train(qwen25, task, out, KL, "--steps 5 --reference_every 2")


@pytest.mark.slow
def test_the_reference_is_the_actor_of_its_step(whole, qwen25):
    out, steps = whole
    actors, references = (
        [role(out / "checkpoints" / f"step-{step}", name) for step in range(1, 6)]
        for name in ("actor", "reference")
    )
    first = role(out / "checkpoints" / "step-1", "reference")
    assert torch.equal(first["model.lm_head.weight"], tensors(qwen25)["lm_head.weight"].float())
    assert not same_tensors(actors[0], first)
    assert not same_tensors(actors[1], actors[3])
    for reference, expected in zip(
        references, (first, actors[1], actors[1], actors[3], actors[3]), strict=True
    ):
        assert same_tensors(reference, expected)
    # Right after the copy the samples are the reference's own; a step later they are not.
    drift = [abs(step["train/kl"]) for step in steps]
    assert max(drift[0], drift[2], drift[4]) < ROUNDING < 1e-3 < min(drift[1], drift[3])


@pytest.mark.slow
def test_it_is_resumed_bit_for_bit(whole, qwen25, task, tmp_path):
    """Between two copies; with its weights in host memory, too."""
    out, steps = whole
    parts = cut_back(out, tmp_path / "parts", 3)
    again = train(qwen25, task, parts, KL, "--steps 5 --reference_every 2 --offload all")
    assert_same_records(again, steps)
    first, second = (tensors(folder / "checkpoints" / "step-5") for folder in (out, parts))
    assert same_tensors(first, second)
    assert any(name.startswith("reference.") for name in first)


def test_a_reference_that_stays_is_in_no_checkpoint(qwen25, task, tmp_path):
    train(qwen25, task, tmp_path, KL, "--steps 1")
    names = set(tensors(tmp_path / "checkpoints" / "step-1"))
    assert {name.split(".")[0] for name in names} == {"actor", "critic"}
    written = read_json(tmp_path / "checkpoints" / "step-1" / "COMMITTED.json")["sha256"]
    assert not any("reference" in name for name in written)
