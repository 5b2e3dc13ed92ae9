"""What a run remembers of each row: how many samples it had, and what they earned."""

import pytest
import torch

import train_ppo_vl as ppo
from conftest import read_json, read_rows, words, write_rows
from helpers import flags, train

FLAGS = "--advantage grpo --samples_per_prompt 3 --save_every 1 --keep_last 9 --export_every 0 --log_samples 99"


@pytest.fixture
def seen(monkeypatch):
    """Of each step, a list of (row, earlier samples, sum of their rewards, reward) of its samples; and
    the step at which an exception ends the run."""
    steps, advance = [], ppo.advance

    def watched(state, batch, *others):
        rows = [batch.prompts[index].row["prompt"] for index in batch.prompt_index.tolist()]
        steps.append(list(zip(rows, *batch.history.T.tolist(), batch.rewards.tolist())))
        return advance(state, batch, *others)

    monkeypatch.setattr(ppo, "advance", watched)
    return steps


def assert_remembered(steps: list) -> dict:
    """Every sample knows the samples of its row in earlier steps, counted by a loop; the counts."""
    known = {}
    for step in steps:
        for row, count, total, _ in step:
            assert (count, total) == pytest.approx(known.get(row, (0, 0.0)))
        for row, _, _, reward in step:
            count, total = known.get(row, (0, 0.0))
            known[row] = count + 1, total + reward
    return known


def test_a_row_is_remembered_over_steps_files_and_a_resume(qwen25, task, tmp_path, seen):
    rows = read_rows(task / "train.jsonl")
    parts = []
    for name, part in (("a", rows[:3]), ("b", rows[3:6])):
        part = [
            row | {"images": [str(task / image) for image in row.get("images", [])]} for row in part
        ]
        parts.append(write_rows(tmp_path / f"{name}.jsonl", part))
    argv = words(*flags(qwen25, task, tmp_path / "run", FLAGS), "--data", ",".join(parts))
    for steps in ("2", "5"):
        ppo.main(words(*argv, "--rollouts_per_step 2 --steps", steps))
    known = assert_remembered(seen)
    assert len(known) == 6
    assert sum(count for count, _ in known.values()) == 5 * 12
    state = read_json(tmp_path / "run" / "checkpoints" / "step-5" / "state.json")
    history = torch.frombuffer(bytearray.fromhex(state["history"]), dtype=torch.float32).view(2, 6)
    wanted = torch.tensor([known[row["prompt"]] for row in rows[:6]]).T
    assert torch.allclose(history, wanted)


def test_prompts_that_dynamic_sampling_replaces_are_remembered_too(qwen25, task, tmp_path, seen):
    train(qwen25, task, tmp_path, FLAGS, "--dynamic_sampling 3 --steps 3")
    records = [
        record for record in read_rows(tmp_path / "metrics.jsonl") if "rollout/rollouts" in record
    ]
    state = read_json(tmp_path / "checkpoints" / "step-3" / "state.json")
    history = torch.frombuffer(bytearray.fromhex(state["history"]), dtype=torch.float32).view(2, -1)
    assert history[0].sum() == sum(12 * record["rollout/rollouts"] for record in records)


def test_what_600_000_rows_earned_is_a_short_text():
    state = ppo.TrainState(0.0, history=torch.rand(2, 600_000))
    saved = state.state_dict()
    assert len(saved["history"]) == 2 * 4 * 2 * 600_000
    again = ppo.TrainState(0.0)
    again.load_state_dict(saved, set())
    assert torch.equal(again.history, state.history)
    # other rewards or rows begin anew
    for flag in ("reward", "data (rows)"):
        other = ppo.TrainState(0.0, history=torch.zeros(2, 4))
        other.load_state_dict(state.state_dict(), {flag})
        assert other.history.tolist() == [[0.0] * 4] * 2
