"""An experiment is a small change of one file: each of tests/experiments/*.diff applies to the script and then does what
it says, in two steps of a toy."""

import importlib.util
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT, read_rows, rounding
from test_training import flags, task  # noqa: F401

from common import losses

DIFFS = sorted((ROOT / "tests" / "experiments").glob("*.diff"))


def changed_lines(diff: Path) -> list[str]:
    return [line for line in diff.read_text().splitlines() if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]


def changed_script(diff: Path, folder: Path) -> ModuleType:
    """A copy of the script with the change applied, imported; it finds common/ where the tests find it."""
    copy = folder / "train_ppo_vl.py"
    copy.write_bytes((ROOT / "train_ppo_vl.py").read_bytes())
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}           # in no repository
    subprocess.run(["git", "apply", str(diff)], cwd=folder, env=outside, check=True)
    assert copy.read_bytes() != (ROOT / "train_ppo_vl.py").read_bytes()
    spec = importlib.util.spec_from_file_location(f"experiment_{diff.stem}", copy)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script                                                  # where dataclasses look
    spec.loader.exec_module(script)
    return script


@pytest.fixture
def run(qwen25, task, tmp_path):  # noqa: F811
    """A function that runs the script of a diff for two steps: the script, its records, and the batch of each step."""

    def run_two_steps(name: str, *more: str) -> tuple[ModuleType, list[dict], list]:
        script, batches = changed_script(ROOT / "tests" / "experiments" / f"{name}.diff", tmp_path), []
        advance = script.advance

        def see(state, batch, *others):
            batches.append(batch)
            return advance(state, batch, *others)

        script.advance = see
        script.main(flags(qwen25, task, tmp_path / "run", "--steps 2 --save_every 0 --export_every 0 "
                          "--advantage grpo --samples_per_prompt 4", *more))
        steps = [record for record in read_rows(tmp_path / "run" / "metrics.jsonl") if "rollout/reward" in record]
        assert len(steps) == len(batches) == 2
        return script, steps, batches

    yield run_two_steps
    for name in [name for name in sys.modules if name.startswith("experiment_")]:
        del sys.modules[name]


def test_there_are_four_and_each_is_small():
    assert [diff.stem for diff in DIFFS] == ["estimator", "filter", "loss_term", "sampling"]
    for diff in DIFFS:
        assert 0 < len(changed_lines(diff)) <= 25, diff
        assert diff.read_text().count("\n+++ ") == 1
        assert "+++ b/train_ppo_vl.py" in diff.read_text()
        assert f"git apply tests/experiments/{diff.name}" in diff.read_text()


def test_an_estimator_of_ones_own(run):
    """Of every sample the score less the median of its prompt's."""
    script, steps, batches = run("estimator", "--advantage median")
    for batch in batches:
        for i, advantages in enumerate(batch.split(batch.advantages)):
            rewards = [float(score) for score, group in zip(batch.rewards, batch.prompt_index) if group == batch.prompt_index[i]]
            wanted = float(batch.rewards[i]) - statistics.median(rewards)
            assert advantages.tolist() == pytest.approx([wanted] * len(advantages), abs=rounding(16))
    assert any(step["train/advantages_std"] > 0 for step in steps)
    two = losses.AdvantageInputs(torch.tensor([1.0, 2, 9, 5]), torch.full((4,), 0.5), 0.2, torch.ones(4, dtype=torch.int64),
                        torch.tensor([3, 3, 3, 8]))
    assert script.ESTIMATORS["median"].estimate(two)[0].tolist() == pytest.approx([-1, 0, 7, 0])


def test_a_loss_term_with_a_metric_of_its_own(run):
    """Before the first update of a step the term is the mean surprise of the tokens of responses that earned something."""
    script, steps, batches = run("loss_term", "--imitation_coef 0.1")
    source = Path(script.__file__).read_text()
    assert source.count("imitation_loss") == 1
    for step, batch in zip(steps, batches):
        earned = (batch.rewards > 0).repeat_interleave(batch.lengths)
        assert step["train/imitation_loss"] == pytest.approx(float(-(earned * batch.logprobs).mean()), rel=1e-4)
        assert step["train/imitation_loss"] > 0


def test_a_filter_of_samples_after_the_reward(run):
    """All are scored, and half of them are learned from: of each prompt the best and the worst."""
    script, steps, batches = run("filter", "--keep_samples 2")
    assert [step["rollout/samples"] for step in steps] == [8, 8]
    for step, batch in zip(steps, batches):
        assert batch.prompt_index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(batch.tokens) < step["rollout/generated_tokens"]
    whole = batches[0].with_targets([[torch.tensor([k]) for k in range(n)] for n in (5, 1, 0, 4)])
    whole.rewards = torch.tensor([3.0, 1, 4, 1.5, 9, 7, 0, 0, 0, 1])
    extremes = script.extremes(whole, 1)
    assert list(zip(extremes.prompt_index.tolist(), extremes.number.tolist())) == [(0, 1), (0, 4), (1, 0), (3, 0), (3, 3)]


def test_a_changed_sampling_rule(run):
    """With --min_p 1 only the likeliest token is left: all samples of a prompt are alike."""
    _, steps, batches = run("sampling", "--min_p 1")
    assert [step["rollout/groups_without_spread"] for step in steps] == [4, 4]
    for batch in batches:
        responses = [tuple(tokens.tolist()) for tokens in batch.split(batch.tokens)]
        assert [len(set(responses[k:k + 4])) for k in range(0, 16, 4)] == [1] * 4
        assert len(set(responses)) > 1
