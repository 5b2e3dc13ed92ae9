"""An error from outside costs no finished step: what is saved at the end is what --save_every 1 would have
saved, in every byte but times, and the next life goes on with the same rows. A mistake of ours saves
nothing."""

import errno
import gc
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common.data import images
from common.ground.files import UserError
from common.looks import image_changes
from conftest import (
    read_json,
    read_rows,
    reproducible,
    same_tensors,
    user_error,
    words,
    write_checkpoint,
    write_image,
    write_rows,
)
from lives import assert_bitwise, steps

# Raises, on one rank, in the step and for the prompts that a file beside it names.
REWARD = """
import os, pathlib

def letters(prompts, responses, references, labels, images, step):
    mark = pathlib.Path(__file__).with_name("fails")
    rank, at, word = mark.read_text().split() if mark.exists() else ("", "", "")
    if rank == os.environ.get("RANK", "0") and int(at) == step and word in prompts[0]:
        raise KeyError("the table is gone")
    return [sum(c in "aeiou " for c in r) / max(1, len(r)) for r in responses]

def later(rows, samples, rewards):
    return 1 + samples
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """Rows of both scripts, each with a picture of its own, and a reward that fails on demand."""
    folder, rng = tmp_path_factory.mktemp("task"), np.random.default_rng(0)
    (folder / "reward.py").write_text(REWARD)
    rows = []
    for i in range(12):
        write_image(folder / f"{i}.png", (56, 56), rng)
        rows.append({"prompt": f"row {i}: how many?", "images": [f"{i}.png"], "answer": "1"})
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "eval.jsonl", [{"prompt": f"held {i}", "answer": "1"} for i in range(2)])
    answers = [row | {"response": "<answer>1</answer>"} for row in rows]
    write_rows(folder / "answers.jsonl", answers)
    return folder


@pytest.fixture(scope="module")
def flags_of_all(task, qwen25) -> Callable:
    """flags_of_all(out, "--more flags"): PPO with all that a step counts, evaluated after each."""

    def build(out: Path, more: str = "") -> list[str]:
        return words(
            f"--model {qwen25} --data {task}/rows.jsonl --eval_data {task}/eval.jsonl --out {out} "
            f"--reward {task}/reward.py:letters --curriculum {task}/reward.py:later --reward_norm "
            "--advantage grpo --kl_coef 0.1 --kl_target 0.001 --kl_horizon 40 --minibatches 2 "
            f"--ptx_data {task}/answers.jsonl --ptx_coef 0.1 --ptx_batch 2 --ema_beta 0.9 "
            "--max_prompt_tokens 256 --max_new_tokens 4 --max_tokens_per_pack 400 --prompts_per_step 4 "
            "--samples_per_prompt 2 --actor_lr 1e-3 --steps 3 --eval_every 1 --save_every -1 "
            "--log_samples 0 --timeout 90 --keep_last 9",
            *more.split(),
        )

    return build


def fail(task: Path, marks: dict[str, list[str]]) -> None:
    """In each rank, one after the other: runs that end because the reward fails where a mark says."""
    for mark, argv in marks.items():
        (task / "fails").write_text(mark)
        try:
            ppo.main(argv)
        except UserError as error:
            assert "KeyError: 'the table is gone'" in str(error), error
        else:
            raise AssertionError(f"the run has not ended by {mark}")
        gc.collect()  # the frames that the error held own the lock of the folder


def as_saved(out: Path, step: int) -> tuple[dict, list]:
    """The state of a checkpoint but for times and for flags that name folders and intervals, and its
    tensors, file by file."""
    folder = out / "checkpoints" / f"step-{step}"
    state = read_json(folder / "state.json")
    state["metrics"] = reproducible(state["metrics"])
    for name in ("out", "save_every"):
        del state["fingerprint"][name]
    return state, [load_file(file) for file in sorted(folder.glob("*.safetensors"))]


def assert_same_checkpoint(one: Path, other: Path, step: int) -> None:
    (state, tensors), (expected, theirs) = as_saved(one, step), as_saved(other, step)
    assert state == expected
    assert len(tensors) == len(theirs) > 0
    assert all(map(same_tensors, tensors, theirs))


@pytest.mark.slow
def test_an_error_on_one_rank_costs_no_step(task, flags_of_all, tmp_path):
    """In the rewards of the third step, or in the evaluation before it: with all that the step has counted by
    then. The next life draws the same rows."""
    whole, rewards, evaluation = (tmp_path / name for name in ("whole", "rewards", "evaluation"))
    marks = {"1 2 row": flags_of_all(rewards), "1 2 held": flags_of_all(evaluation)}
    saved = (ppo.main, flags_of_all(whole, "--save_every 1"))
    told = ranks.run(ranks.in_turn, saved, (fail, task, marks), world=2)
    assert told.count("an error ends the run: saving step 2 first") == 2
    assert told.count("step 2 is saved: the same command with --out") == 2
    for out in (rewards, evaluation):
        assert steps(out) == [2]
        assert_same_checkpoint(out, whole, 2)
    (task / "fails").unlink()
    ranks.run(ranks.in_turn, *((ppo.main, argv) for argv in marks.values()), world=2)
    for out in (rewards, evaluation):
        assert_bitwise(out, whole, 3)


@pytest.mark.parametrize(
    "function, error, more, saved",
    [
        ("compute_advantages", UserError, "", [1]),
        ("compute_advantages", ValueError, "", []),  # a mistake of ours
        ("compute_advantages", UserError, "--save_every 0", []),
        ("report", UserError, "", []),  # the weights are those of the step that is not finished
    ],
)
def test_what_saves_the_last_step(flags, out, monkeypatch, function, error, more, saved):
    original, calls = getattr(ppo, function), []

    def fail_at_second(*arguments):
        calls.append(function)
        if len(calls) == 2:
            raise error("no more")
        return original(*arguments)

    monkeypatch.setattr(ppo, function, fail_at_second)
    with pytest.raises(error, match="no more"):
        ppo.main(flags(out, f"--save_every -1 {more}"))
    assert steps(out) == saved


# Objects number themselves by the bytes of a file, as each is a process of its own.
AWAY = """
import pathlib

class Look:
    def reset(self, row):
        with open(pathlib.Path(__file__).with_name("resets"), "ab") as file:
            file.write(b".")
            if file.tell() > 16:
                raise OSError("the simulator is away")
    def step(self, text):
        return {"reward": len(text), "done": True}
"""


def test_an_environment_that_fails_in_every_sample_costs_no_step(task, qwen25, tmp_path):
    """In the third step of eight samples each; the next life goes on."""
    (tmp_path / "away.py").write_text(AWAY)
    line = (
        f"--model {qwen25} --data {task}/rows.jsonl --env {tmp_path}/away.py:Look --advantage grpo "
        "--max_prompt_tokens 256 --max_new_tokens 4 --max_tokens_per_pack 1300 --prompts_per_step 4 "
        "--samples_per_prompt 2 --actor_lr 1e-3 --steps 3 --save_every -1 --export_every 0 "
        f"--log_samples 0 --out {tmp_path}/run"
    )
    with user_error("the simulator is away"):
        ppo.main(words(line))
    assert steps(tmp_path / "run") == [2]
    (tmp_path / "resets").unlink()
    ppo.main(words(line))
    assert steps(tmp_path / "run") == [3, 2]


AWAY_FILE = OSError(errno.ESTALE, "Stale file handle")


def fail_after(
    monkeypatch, module, name: str, calls: int, error: Exception, counts: Callable = lambda *_: True
) -> None:
    """Let a function raise after so many ``calls``, of those that count."""
    function, number = getattr(module, name), itertools.count(1)

    def failing(*arguments):
        if counts(*arguments) and next(number) > calls:
            raise error
        return function(*arguments)

    monkeypatch.setattr(module, name, failing)


def test_pictures_that_cannot_be_read_cost_the_judge_no_step(task, qwen25, tmp_path, monkeypatch):
    """The sixth picture, of the third step."""
    line = (
        f"--model {qwen25} --data {task}/answers.jsonl --max_prompt_tokens 256 --max_tokens_per_pack 400 "
        "--prompts_per_step 2 --steps 4 --eval_every 0 --export_every 0 --log_samples 0 --keep_last 9"
    )
    grm.main(words(line, f"--out {tmp_path}/whole --save_every 1"))
    fail_after(monkeypatch, images, "read_patiently", 5, AWAY_FILE)
    with user_error("Stale file handle"):
        grm.main(words(line, f"--out {tmp_path}/away --save_every -1"))
    assert steps(tmp_path / "away") == [2]
    assert_same_checkpoint(tmp_path / "away", tmp_path / "whole", 2)


def test_pictures_of_language_model_rows_cost_no_step(task, flags_of_all, tmp_path, monkeypatch):
    """The last of the four that the third step's two updates need: all are read before the first of them."""
    answers = []
    for row in read_rows(task / "answers.jsonl"):
        (picture,) = row["images"]
        shutil.copy(task / picture, tmp_path / picture)
        answers.append(row | {"images": [str(tmp_path / picture)]})
    text = f"--ptx_data {write_rows(tmp_path / 'answers.jsonl', answers)}"
    ppo.main(flags_of_all(tmp_path / "whole", f"{text} --save_every 1"))
    fail_after(
        monkeypatch,
        images,
        "read_patiently",
        11,
        AWAY_FILE,
        counts=lambda path, *_: Path(path).parent == tmp_path,
    )
    with user_error("Stale file handle"):
        ppo.main(flags_of_all(tmp_path / "away", text))
    assert steps(tmp_path / "away") == [2]
    assert_same_checkpoint(tmp_path / "away", tmp_path / "whole", 2)


def test_pictures_for_a_teacher_cost_no_step(task, flags_of_all, tmp_path, monkeypatch):
    """A tower of its own reads the four pictures of a step again: before the critic's first update, too."""
    teacher = write_checkpoint(tmp_path / "teacher", "qwen2_5_vl", hidden_size=32)
    more = f"--advantage gae --critic_lr 1e-3 --teacher_model {teacher} --teacher_in loss"
    ppo.main(flags_of_all(tmp_path / "whole", f"{more} --save_every 1"))
    fail_after(monkeypatch, image_changes, "load_pixels", 11, UserError("Stale file handle"))
    with user_error("Stale file handle"):
        ppo.main(flags_of_all(tmp_path / "away", more))
    assert steps(tmp_path / "away") == [2]
    assert_same_checkpoint(tmp_path / "away", tmp_path / "whole", 2)


def test_damaged_pictures_cost_no_evaluation(flags, life_task, out, tmp_path):
    """The teacher, too, goes on to the first prompts whose pictures decode."""
    names = ("damaged.png", "1.png")
    rows = [
        {"prompt": f"see {name}", "images": [str(life_task / name)], "answer": "1"}
        for name in names
    ]
    line = "--eval_only --teacher_model self --slots 1 --on_bad_row skip --eval_data"
    metrics = ppo.main([*flags(out, line), write_rows(tmp_path / "held.jsonl", rows)])
    assert (metrics["eval/num_samples"], metrics["eval/dropped_prompts"]) == (1, 1)
    assert metrics["eval/teacher_reward"] == metrics["eval/reward_mean"]


# ----------------------------------------------------------------------------- a file system that is away
@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "there" / "a.png"
    path.parent.mkdir()
    write_image(path, (56, 28), np.random.default_rng(0))
    return path


@pytest.fixture
def pauses(monkeypatch) -> list[int]:
    """Pauses before tries, noted instead of waited for."""
    noted = []
    monkeypatch.setattr(images, "time", SimpleNamespace(sleep=noted.append))
    monkeypatch.setattr(images, "Outage", type("Outage", (), vars(images.Outage).copy()))
    return noted


def test_pictures_are_waited_for(picture, pauses, monkeypatch, capsys):
    """Until their folder is there again, with one line."""
    away = picture.parent.rename(picture.parent.with_name("away"))

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            away.rename(picture.parent)

    monkeypatch.setattr(images.time, "sleep", sleep)
    (frame,) = images.read_frames(str(picture), 1)
    assert frame.size == (56, 28)
    assert pauses == [1, 2, 4]
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    assert re.match(r"warning: \S+/a.png: No such file or directory; .* tried again for 15 s", told)


def test_a_picture_that_is_gone_is_waited_for_once(picture, pauses):
    """The others then fail at once, until one can be read; and what is missing at the start always does."""
    gone = str(picture.with_name("gone.png"))
    for _ in range(3):
        with user_error("no such image"):
            images.read_frames(gone, 1)
    assert pauses == [1, 2, 4, 8]
    images.read_frames(str(picture), 1)
    with user_error("no such image"):
        images.read_frames([gone, gone], 2)
    assert pauses == [1, 2, 4, 8] * 2
    with user_error("no such image"):
        images.image_size(gone)
    assert pauses == [1, 2, 4, 8] * 2
