"""What a run remembers of each row: how many samples it had, and what they earned."""

import pytest
import torch

import train_ppo_vl as ppo
from conftest import marked, read_json, read_rows, user_error, words, write_rows
from helpers import assert_same_run, flags, launch, resumed, samples_of_steps, train

FLAGS = "--advantage grpo --samples_per_prompt 3 --save_every -1 --export_every 0 --log_samples 99"


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    again = ppo.TrainState(0.0, history=torch.zeros(2, 600_000))
    again.load_state_dict(saved, set())
    assert torch.equal(again.history, state.history)
    # other rewards or rows begin anew
    for flag in ("reward", "data"):
        other = ppo.TrainState(0.0, history=torch.zeros(2, 4))
        other.load_state_dict(state.state_dict(), {flag})
        assert other.history.tolist() == [[0.0] * 4] * 2


CURRICULUM = """
import numpy as np

def least_seen(rows, samples, rewards):
    assert len(rows) == len(samples) == len(rewards) == 8 and all("prompt" in row for row in rows)
    return 10.0 ** (-3 * samples.astype(float))

def solved(rows, samples, rewards):
    return np.where(rewards > 0.5 * np.maximum(samples, 1), 0.01, 1.0)

def unlike(rows, samples, rewards):
    return [1.0] * 7 + [-1.0]

def nothing(rows, samples, rewards):
    return [1.0, 1.0] + [0.0] * 6

def short(rows, samples, rewards):
    return [1.0] * 7

def zero(rows, samples, rewards):
    return 0 * samples

def nan(rows, samples, rewards):
    return [1.0] * 7 + [np.nan]

def huge(rows, samples, rewards):
    return [10**400] * 8

def column(rows, samples, rewards):
    return np.ones((8, 1))

def none(rows, samples, rewards):
    pass

def raises(rows, samples, rewards):
    return [row["difficulty"] for row in rows]

def by_rank(rows, samples, rewards):
    import os
    return 10.0 ** (-3 * np.arange(8) * (-1) ** int(os.environ["RANK"]))

def two(rows, samples):
    return [1.0] * 8

async def waits(rows, samples, rewards):
    return [1.0] * 8

def changes(rows, samples, rewards):
    weights = solved(rows, samples, rewards)
    samples[:], rewards[:] = 7, 7
    for row in rows:
        row.clear()
    rows.clear()
    return weights
"""


@pytest.fixture
def curriculum(tmp_path):
    (tmp_path / "curriculum.py").write_text(CURRICULUM)
    return lambda name: f"--curriculum {tmp_path / 'curriculum.py'}:{name}"


def test_weights_decide_which_rows_are_drawn(qwen25, task, tmp_path, seen, curriculum):
    """By what earlier steps but the last have earned: a batch is drawn while the step before it runs."""
    train(qwen25, task, tmp_path / "run", FLAGS, curriculum("least_seen"), "--steps 4")
    assert_remembered(seen)
    rows = [{row for row, *_ in step} for step in seen]
    for step, drawn in enumerate(rows):
        assert len(drawn) == 4
        known = {
            row: sum(row in before for before in rows[: max(0, step - 1)])
            for row in set().union(*rows)
        }
        fewest = sorted(known.values())[:4]
        assert sorted(known[row] for row in drawn) == fewest
    # a row's draws have noise of their own
    tokens = [tuple(row["response"]) for row in samples_of_steps(tmp_path / "run")]
    assert len(set(tokens)) > len(tokens) // 2


@pytest.mark.parametrize("more", marked(["", "--dynamic_sampling 3"]))
def test_a_resumed_run_draws_the_same_rows(qwen25, task, tmp_path, curriculum, more):
    """The next batch was drawn before the checkpoint, by what was known then."""
    flags = [FLAGS, curriculum("least_seen"), *filter(None, [more])]
    resumed(qwen25, task, tmp_path, *flags)


@pytest.mark.slow
def test_a_function_may_change_what_it_gets(qwen25, task, tmp_path, seen, curriculum):
    for name in ("solved", "changes"):
        train(qwen25, task, tmp_path / name, FLAGS, curriculum(name), "--steps 3")
    assert seen[:3] == seen[3:]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("unlike", "--curriculum .*:unlike: .*expected 8 weights of 0 or more, got .* -1"),
        ("nothing", "--curriculum .*:nothing: .*[Ff]ewer non-zero"),
        ("short", "--curriculum .*:short: .*expected 8 weights"),
        ("zero", "--curriculum .*:zero: .*expected 8 weights"),
        ("nan", "--curriculum .*:nan: .*expected 8 weights .* nan"),
        ("huge", "--curriculum .*:huge: OverflowError: "),
        ("column", "--curriculum .*:column: .*expected 8 weights"),
        ("none", "--curriculum .*:none: .*expected 8 weights .* got nan"),
        ("raises", "--curriculum .*:raises: KeyError: 'difficulty'"),
    ],
)
def test_weights_that_cannot_be_drawn_by(qwen25, task, tmp_path, curriculum, name, problem):
    with user_error(problem):
        train(qwen25, task, tmp_path / "run", FLAGS, curriculum(name))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("curriculum.py:absent", ":absent: .*curriculum.py has no .absent."),
        ("absent.py:solved", "absent.py:solved: the file /.*/absent.py is missing"),
        ("curriculum.py", "expected an existing path.py:function"),
        ("curriculum.py:two", r":two: must take \(rows, samples, rewards\): too many positional"),
        ("curriculum.py:np", r":np: must take \(rows, samples, rewards\): .*not a callable"),
        ("curriculum.py:waits", ":waits: waits is async"),
    ],
)
def test_a_function_that_cannot_be_called_ends_the_run_before_rows_are_read(
    qwen25, task, tmp_path, curriculum, monkeypatch, spec, problem
):
    monkeypatch.setattr(ppo, "load_rows", None)
    with user_error(f"--curriculum .*{problem}"):
        train(qwen25, task, tmp_path / "run", FLAGS, f"--curriculum {tmp_path}/{spec}")


def test_a_rollout_has_no_more_prompts_than_a_curriculum_has_rows(
    qwen25, task, tmp_path, curriculum, monkeypatch
):
    monkeypatch.setattr(ppo, "build_models", None)
    with user_error("--curriculum draws 9 different rows for a rollout, and --data has 8: "):
        train(qwen25, task, tmp_path, FLAGS, curriculum("solved"), "--prompts_per_step 9")


def test_an_evaluation_without_rows_to_train_draws_none(qwen25, task, tmp_path, curriculum):
    argv = flags(qwen25, task, tmp_path, FLAGS, curriculum("solved"), "--eval_only --data")
    ppo.main(words(*argv, "", "--eval_data", task / "train.jsonl"))


@pytest.mark.slow
@pytest.mark.usefixtures("write_samples")
def test_a_curriculum_is_the_same_on_two_ranks(qwen25, task, tmp_path, curriculum):
    """And ranks draw the same rows, whatever each would."""

    def line(name: str, function: str, *more: str) -> list[str]:
        return flags(qwen25, task, tmp_path / name, FLAGS, curriculum(function), *more)

    ppo.main(line("1", "least_seen", "--steps 3"))
    launch(2, line("2", "least_seen", "--steps 3"), line("ranks", "by_rank", "--steps 1"))
    assert_same_run(tmp_path / "1", tmp_path / "2")
    state = read_json(tmp_path / "ranks" / "checkpoints" / "step-1" / "state.json")
    assert sorted(state["ahead"]) == [0, 1, 2, 3]
