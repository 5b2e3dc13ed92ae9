"""Metric reduction, the files of a run, and its pictures."""

import functools
import io
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image, ImageColor
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

import ranks
from common import distributed, flags, logging
from common.flags import CheckpointArgs, RunArgs
from common.ground import files, process
from common.ground.cards import (
    BLUE,
    CHARACTERS,
    GREEN,
    draw_regions,
    sample_card,
    wrap,
)
from common.ground.files import sha256
from common.logging import (
    Largest,
    Mean,
    MetricSums,
    RunLogger,
    Share,
    StageTimer,
    due,
    environment,
    evaluation_due,
    read_records,
)
from conftest import ROOT, read_json, user_error

PAGE = os.path.relpath(ROOT / "launch" / "page.py")


@dataclass(frozen=True)
class LogArgs(CheckpointArgs, RunArgs):
    pass


def open_log(out, first_step: int = 0, **flags) -> RunLogger:
    """The log of a run of 6 steps in a folder, which has the checkpoint that it resumes from."""
    if first_step:
        (out / "checkpoints" / f"step-{first_step}").mkdir(parents=True, exist_ok=True)
    return RunLogger(LogArgs(out=out, **flags), total_steps=6, first_step=first_step)


def steps(out):
    return [record["step"] for record in read_records(out / "metrics.jsonl") if "step" in record]


def test_means_and_maxima():
    sums, total = MetricSums(), torch.tensor(3.0, requires_grad=True)
    sums.record(
        [
            {"loss": Mean(total.detach(), 2)},
            {"loss": Mean(5.0, torch.tensor([2])), "empty": Mean(0.0, 0)},
        ]
    )
    for value, count in ((2.0**24, 1), (1.0, 0)):  # exact beyond fp32
        sums.record([{"large": Mean(torch.tensor(value), count)}])
    sums.record(
        [
            {"ratio_max": Largest(torch.tensor(1.5))},
            {"ratio_max": Largest(1.25), "none_max": Largest(-math.inf)},
        ]
    )
    assert sums.reduce() == {"train/large": 2.0**24 + 1, "train/loss": 2.0, "train/ratio_max": 1.5}
    assert total.item() == 3.0  # the caller's tensor is not the accumulator


def test_statistics_of_updates():
    """Means over tokens, the largest value, a loss averaged over the applied updates; nothing of a
    skipped one."""
    sums = MetricSums()
    for scale, applied in ((1.0, True), (math.nan, False), (3.0, True)):
        rows = [
            {"loss": Share(torch.tensor(scale)), "gap": Mean(2 * scale, 4), "top": Largest(scale)},
            {"loss": Share(scale)},
        ]
        sums.record_update("actor", 10 * scale, applied, rows)
    assert sums.reduce() == {
        "train/actor_grad_norm": 20.0,
        "train/actor_skipped": 1 / 3,
        "train/gap": 1.0,
        "train/loss": 4.0,
        "train/top": 3.0,
    }


@pytest.mark.parametrize(
    "every, at, evaluated",
    [
        (0, [], []),
        (-1, [7], [0, 3, 5, 7]),
        (1, range(1, 8), range(8)),
        (3, [3, 6, 7], [0, 3, 6, 7]),
    ],
)
def test_what_is_due(every, at, evaluated):
    """Of 7 steps of 4 prompts, with 10 rows: passes end after 10, 20 and 30 prompts."""
    assert [step for step in range(8) if due(step, every, 7)] == list(at)
    ends = [4 * step // 10 > 4 * (step - 1) // 10 for step in range(8)]
    assert [
        step for step in range(8) if evaluation_due(step, 7, ends[step], RunArgs(eval_every=every))
    ] == list(evaluated)
    assert all(
        evaluation_due(step, 7, False, RunArgs(eval_every=every, eval_only=True))
        for step in range(8)
    )


def add_as_a_rank() -> None:
    """Called in other orders and with other names on the two ranks."""
    distributed.start(60.0, 0)
    rank = dist.get_rank()
    sums = MetricSums()
    for name in ["b", "a"] if rank else ["a", "b"]:
        sums.record([{name: Mean(torch.tensor(rank + 1.0), 1 + 2 * rank)}])
    if rank:
        sums.record([{"one rank": Mean(6.0, 2)}])
    for minibatch in range(3):  # of packs of both ranks
        sums.record([{"loss": Share(minibatch + 10.0 * rank)}, {"loss": Share(torch.tensor(1.0))}])
    sums.record(
        [
            {
                "eval/top": Largest([float("-inf"), -3.0][rank]),
                "bad": Largest([float("nan"), 5.0][rank]),
            }
        ]
    )
    means = "'train/a': 0.75, 'train/b': 0.75, 'train/bad': nan, 'train/loss': 14.0, 'train/one rank': 3.0"
    assert str(sums.reduce()) == "{'eval/top': -3.0, " + means + "}", sums.reduce()


def test_two_ranks():
    ranks.run(add_as_a_rank, world=2)


def test_stage_timer():
    timer = StageTimer()
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.02)
    assert 0.04 <= timer.metrics()["perf/rollout_seconds"] < 1
    timer.reset()
    assert timer.metrics() == {"perf/step_seconds": 0}


def test_environment(tmp_path, monkeypatch):
    (tmp_path / "git").write_text(
        '#!/bin/sh\ncase "$*" in *describe*--dirty*) echo abc123-dirty;; esac\n'
    )
    (tmp_path / "git").chmod(0o755)
    for path, commit in (
        (f"{tmp_path}:{os.environ['PATH']}", "abc123-dirty"),
        ("/nonexistent", "unknown"),
    ):
        monkeypatch.setenv("PATH", path)
        values = environment()
        assert values["git_commit"] == commit
        assert values["torch"] == torch.__version__
        assert values["world_size"] >= 1
        assert json.loads(json.dumps(values)) == values
        assert {"transformers", "cuda", "gpu"} <= values.keys()


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    log = open_log(tmp_path)
    log.json("eval/a.json", "old")

    def die(*_):
        raise KeyboardInterrupt  # as a kill would, between the first byte and the last

    monkeypatch.setattr("common.ground.files.os.fsync", die)
    for name in ("eval/a.json", "eval/b.json"):
        with pytest.raises(KeyboardInterrupt):
            log.json(name, "new")
    assert (tmp_path / "eval/a.json").read_text() == '"old"'
    assert not (tmp_path / "eval/b.json").exists()


def test_files_of_a_run(tmp_path, capsys):
    log = open_log(tmp_path)
    log.evaluation(0, {"eval/accuracy": 0.25}, {"accuracy": "eval/accuracy"})
    metrics = {"rollout/reward": np.float32(0.5), "train/count": 3, "train/loss": torch.tensor(2.0)}
    log.step(1, metrics, {"reward": "rollout/reward"})
    assert steps(tmp_path) == [0, 1]  # readable while the run goes on
    card = sample_card([Image.new("RGB", (8, 8), "red")], "said", "earned")
    square = Image.new("L", (1280, 640), 128)
    record = {"prompt": "é\ud800\u2028", "reward": 1.0, "seen": [square, square]}
    log.samples(1, [record], [card, card])
    log.json("notes/a.json", "text")
    with user_error("samples of step 2 cannot be written.*not JSON compliant"):
        log.samples(2, [{"reward": math.nan}], [])
    with pytest.raises(TypeError, match="has no form in JSON"):
        log.samples(2, [{"reward": torch.ones(2)}], [])
    with user_error("notes/b.json cannot be written.*not JSON compliant"):
        log.json("notes/b.json", {"loss": math.nan})
    log.line("hello")
    log.close(6, 6)
    first, *others = read_records(tmp_path / "metrics.jsonl")
    assert first["type"] == "header"
    assert first["arguments"] == flags.as_json(LogArgs(out=tmp_path))
    assert first["environment"]["torch"]
    assert first["script"] == {"file": __file__, "sha256": sha256(__file__)}
    assert read_json(tmp_path / "args.json") == first["arguments"]  # nothing follows from others
    assert others == [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "rollout/reward": 0.5, "train/count": 3, "train/loss": 2.0},
    ]
    (record,) = read_records(tmp_path / "samples/step-000001.jsonl")
    files = ["step-000001/0.png", "step-000001/1.png"]
    assert record == {"prompt": "é\ud800\u2028", "reward": 1.0, "seen": files}
    image = Image.open(tmp_path / "samples" / files[1])
    assert (image.size, image.getpixel((9, 9))) == ((640, 320), (128, 128, 128))
    assert (tmp_path / "notes/a.json").read_text() == '"text"'
    assert not list(tmp_path.rglob("*.tmp"))
    assert capsys.readouterr().out.splitlines() == [
        "eval  step     0  accuracy 0.250",
        "step     1  reward 0.500",
        "hello",
        f"done: all results are in {tmp_path}",
        f"a page of curves and samples: python {PAGE} {tmp_path} --out {tmp_path}/page.html",
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {
        "eval/accuracy",
        "rollout/reward",
        "train/count",
        "train/loss",
    }
    assert events.Tags()["images"] == ["samples/step"]
    (sheet,) = events.Images("samples/step")
    assert (sheet.step, sheet.height > 2 * card.height) == (1, True)


@pytest.mark.parametrize("is_main", [True, False])
def test_ranks_refuse_the_same_metrics_and_only_one_writes(tmp_path, monkeypatch, capsys, is_main):
    monkeypatch.setattr(distributed, "is_main", lambda: is_main)
    log = open_log(tmp_path / "run")
    for value in (math.nan, math.inf, torch.tensor(-math.inf)):
        with pytest.raises(ValueError, match="train/loss is -?(nan|inf) at step 4"):
            log.step(4, {"rollout/reward": 1.0, "train/loss": value}, {})
    log.step(1, {"x": 1.0}, {"reward": "1"})
    log.samples(2, [{}], [])
    log.line("hello")
    log.close(6, 6)
    if is_main:
        assert steps(tmp_path / "run") == [1]  # and no half of a refused record
    else:
        assert not (tmp_path / "run").exists()
        assert capsys.readouterr() == ("", "")


def test_samples_are_shown_at_the_first_every_fifth_and_the_last_step(tmp_path):
    log = open_log(tmp_path)
    assert [step for step in range(27) if log.shows_samples(step, 26)] == [1, 5, 10, 15, 20, 25, 26]
    assert not any(open_log(tmp_path, log_samples=0).shows_samples(step, 26) for step in range(27))


def test_how_a_run_ended(tmp_path, capsys):
    """A signal ends it with the exit code of a preempted job, after its last records."""
    log = open_log(tmp_path)
    log.step(2, {"x": 1.0}, {})
    with pytest.raises(process.Exit) as stop:
        log.close(2, 6)
    assert stop.value.code == 75
    assert steps(tmp_path) == [2]
    assert (
        f"stopped by a signal after step 2; the same command with --out {tmp_path} goes on from there"
        in capsys.readouterr().out
    )
    open_log(tmp_path, first_step=6).close(6, 6)
    assert f"done: all results are in {tmp_path}\n" in capsys.readouterr().out


def test_a_run_that_was_not_to_resume_says_how_it_does(tmp_path):
    """Otherwise the same command would refuse what it has saved."""
    args = LogArgs(out=tmp_path, resume="never")
    how = f"the same command with --out {tmp_path} --resume auto goes on from there"
    assert logging.how_to_go_on(args) == how


def test_a_stop_before_the_first_step_promises_no_export(tmp_path, capsys):
    """--steps 0 is refused."""
    for step in (0, 1):
        log = open_log(tmp_path / f"{step}")
        with pytest.raises(process.Exit):
            log.close(step, 6)
        assert (f"with --steps {step} exports" in capsys.readouterr().out) == (step > 0)


def test_a_start_from_another_runs_checkpoint_has_its_own_records(tmp_path):
    """Those of an attempt that was never saved are set aside, with its evaluation."""
    log = open_log(tmp_path)
    log.step(1, {"x": 1.0}, {})
    log.evaluation(1, {"eval/accuracy": 0.5}, {})
    log.close(6, 6)
    log = RunLogger(LogArgs(out=tmp_path), total_steps=6, first_step=1)
    assert steps(tmp_path) == [] and not log.has_evaluation(1)
    (old,) = tmp_path.glob("metrics.old-*.jsonl")
    assert len(read_records(old)) == 3
    log.close(6, 6)


def test_an_evaluation_alone_has_a_folder_of_its_own(tmp_path, capsys):
    log = open_log(tmp_path, first_step=4, eval_only=True)
    assert not log.has_evaluation(4)
    log.evaluation(4, {"eval/accuracy": 0.5}, {"accuracy": "eval/accuracy"})
    log.close(4, 6)
    assert steps(tmp_path / "evaluation-step-4") == [4]
    assert not (tmp_path / "metrics.jsonl").exists()
    assert capsys.readouterr().out == (
        f"eval  step     4  accuracy 0.500\ndone: all results are in {tmp_path}/evaluation-step-4\n"
        f"a page of curves and samples: python {PAGE} {tmp_path}/evaluation-step-4 "
        f"--out {tmp_path}/evaluation-step-4/page.html\n"
    )


def test_an_evaluation_leaves_an_earlier_one_as_it_is(tmp_path, capsys):
    """Of other rows, say, with other samples."""
    for text in ("first", "second"):
        log = open_log(tmp_path, first_step=4, eval_only=True)
        log.samples(4, [{"response": text}], [], "eval")
        log.close(4, 6)
    new, old = sorted(tmp_path.glob("evaluation-*"))
    assert f"the evaluation that was in {new} is now in {old}\n" in capsys.readouterr().out
    for folder, text in ((old, "first"), (new, "second")):
        assert text in (folder / "samples" / "eval-000004.jsonl").read_text()


def test_a_resumed_run_knows_what_was_evaluated(tmp_path):
    """The step that it resumes from may have been evaluated before the kill, or not."""
    log = open_log(tmp_path)
    for step in (1, 2):
        log.step(step, {"x": 1.0}, {})
        assert not log.has_evaluation(step)
    log.evaluation(2, {"eval/accuracy": 0.5}, {})
    log.close(6, 6)
    resumed = open_log(tmp_path, first_step=2)
    assert resumed.has_evaluation(2)
    assert not resumed.has_evaluation(1)
    resumed.close(6, 6)
    open_log(tmp_path, first_step=1).close(6, 6)
    assert not open_log(tmp_path, first_step=2).has_evaluation(2)


TAILS = {
    "NUL bytes": b"\0" * 4096,
    "half a line": b'{"step": 3, "x"' + b"\0" * 100,
    "half a character": b'{"step": 3, "text": "\xc3',
    "NUL bytes first": b"\0" * 60 + b'\n{"step": 4, "x": 4.0}\n',
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_what_a_power_cut_leaves_is_dropped(tmp_path, tail):
    """Half a line, even half a character; blocks that were never written, also before one that was."""
    log = open_log(tmp_path)
    for step in (1, 2):
        log.step(step, {"x": float(step)}, {})
    log.close(6, 6)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    open_log(tmp_path, first_step=4).close(6, 6)
    assert steps(tmp_path) == [1, 2]
    assert b"\0" not in (tmp_path / "metrics.jsonl").read_bytes()


def test_a_bar_inside_a_step(monkeypatch, capsys):
    """On the terminal of rank 0, after two seconds, until all is done; nowhere else."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(logging, "tqdm", functools.partial(tqdm, file=screen, mininterval=0))
    for is_main, late, visible in ((True, 3, True), (True, 0, False), (False, 3, False)):
        monkeypatch.setattr(distributed, "is_main", lambda: is_main)
        bar = logging.progress(range(5), "packed rows")
        bar.start_t = getattr(bar, "start_t", 0) - late
        assert list(bar) == [0, 1, 2, 3, 4]
        assert ("packed rows:" in screen.getvalue()) == visible
        screen.truncate(0)
    monkeypatch.undo()
    assert list(logging.progress(range(5), "packed rows")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("first_step, earlier", [(3, [0, 1, 2, 3]), (0, [])])
def test_resume_drops_later_records_and_a_cut_line(tmp_path, first_step, earlier):
    log = RunLogger(LogArgs(out=tmp_path, resume="a\u2028b"), total_steps=6, first_step=0)
    for step in range(6):
        log.step(step, {"x": float(step)}, {})
    log.close(6, 6)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "x"')  # killed while writing
    time.sleep(1.1)  # TensorBoard reads files in the order of the seconds in their names
    log = open_log(tmp_path, first_step)
    assert steps(tmp_path) == earlier
    assert log.bar.n == first_step
    for step in range(len(earlier), 7):
        log.step(step, {"x": 10.0 * step}, {})
    log.close(6, 6)
    assert steps(tmp_path) == list(range(7))
    assert [r["first_step"] for r in read_records(tmp_path / "metrics.jsonl") if "type" in r] == (
        [0, 3] if first_step else [0]
    )
    # a new start keeps the old records aside
    assert len([*tmp_path.glob("metrics.old-*.jsonl")]) == (first_step == 0)
    points = {
        e.step: e.value
        for e in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("x")
    }
    assert points == {step: step if step in earlier else 10 * step for step in range(7)}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2: not JSON: Expecting"):
        open_log(tmp_path, first_step=2)
    # set aside unread
    open_log(tmp_path).close(6, 6)


@pytest.mark.parametrize("modes", [[], ["RGB"], ["RGBA", "L", "P"], ["1"] * 40])
def test_a_card_is_bounded(modes):
    images = [
        Image.new(mode, size) for mode, size in zip(modes, [(1, 1), (3000, 2), (5, 4000)] * 20)
    ]
    hostile = "word " * 5000 + "x" * 5000 + "\n" * 500 + "\t\x00\u202e\ud83d 漢字"
    card = sample_card(images, hostile, hostile)
    assert card.width == 480
    assert card.height < 1200
    assert card.mode == "RGB"
    assert sample_card(images, "", "").height < card.height


def test_regions_are_drawn_in_pixels_of_the_file():
    """In the card's scale: true ones green, answered ones blue."""
    white = Image.new("RGB", (40, 20), "white")
    image = draw_regions(white, [[0, 0, 20, 10]], [[20, 10, 40, 20], [30, 5]])
    assert image.size == (444, 222)  # 11.1 times
    assert image.getpixel((0, 60)) == image.getpixel((221, 60)) == ImageColor.getrgb(GREEN)
    assert image.getpixel((222, 150)) == image.getpixel((443, 150)) == ImageColor.getrgb(BLUE)
    assert image.getpixel((333 + 5, 56)) == ImageColor.getrgb(BLUE)
    assert image.getpixel((110, 180)) == (255, 255, 255)


@pytest.mark.parametrize(
    "text", ["a b " * 400, "x" * 999, "a\n" * 300, "one two\n\n" * 99, "WWW iii " * 90]
)
def test_wrap_counts_what_it_hides(text):
    everything, lines = wrap(text, 10**9), wrap(text, 10)
    assert len(lines) == 10
    assert all(len(line) <= CHARACTERS for line in lines)
    assert lines[6] == f"… {len(everything) - 9} lines left out …"
    assert lines[:6] + lines[7:] == everything[:6] + everything[-3:]
    assert "".join(everything).replace(" ", "") == "".join(text.split())


@pytest.mark.parametrize("links", [True, False])
def test_latest_is_a_link_or_a_file_and_replaces_either(tmp_path, monkeypatch, links):
    for before in ("nothing", "file", "link", "folder"):
        latest = tmp_path / before / "latest"
        latest.parent.mkdir()
        if before == "file":
            latest.write_text("step-1\n")
        elif before == "link":
            latest.symlink_to("step-1")
        # cp -rL, or a copy by a tool that follows links
        elif before == "folder":
            latest.mkdir()
            (latest / "config.json").write_text("{}")
        with monkeypatch.context() as patch:
            if not links:

                def none(*_):
                    raise PermissionError("no links here")

                patch.setattr(Path, "symlink_to", none)
            files.write_link(latest, "step-2")
        assert latest.is_symlink() == links
        assert files.follow_pointer(str(latest)) == latest.parent / "step-2"
        # nothing is deleted
        assert len(list(latest.parent.rglob("config.json"))) == (before == "folder")


def test_no_text_reaches_the_terminal_raw(tmp_path, monkeypatch, capsys):
    """Of a folder, a warning that quotes user code, and a component's name, on the bar, too."""
    name = "\x1b[2Jx\nerror: all is well\r"
    log = open_log(tmp_path / "\x1b[31mred")
    bar = []
    monkeypatch.setattr(log.bar, "set_postfix", lambda values, **_: bar.extend(values))
    log.step(1, {f"rollout/{name}_reward": 0.5}, {name: f"rollout/{name}_reward"})
    log.warn("environment", True, f"2 of 4 samples failed, the first: {name}")
    log.close(6, 6)
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line]
    assert lines[0].endswith(r"step     1  \x1b[2Jx\nerror: all is well\r 0.500")
    assert lines[1].endswith(r"warning: 2 of 4 samples failed, the first: \x1b[2Jx")
    assert lines[2] == r"  error: all is well\r"
    assert lines[3].endswith(rf"done: all results are in {tmp_path}/\x1b[31mred")
    assert lines[4].startswith(
        rf"a page of curves and samples: python {PAGE} '{tmp_path}/\x1b[31mred' "
    )
    assert "\x1b" not in out + err + "".join(bar)


@pytest.mark.parametrize("metric, best", [("eval/x", 6), ("min:eval/x", 2), ("", None)])
def test_an_evaluation_without_the_metric_is_not_compared(metric, best):
    """As where a component of the reward applied to no sample of it; nor is that before the first step."""
    values = {0: 9.0, 2: 1.0, 4: None, 6: 3.0}
    evaluations = {
        step: {"eval/y": 0.0} if x is None else {"eval/x": x} for step, x in values.items()
    }
    log = SimpleNamespace(_evaluations=evaluations)
    assert logging.RunLogger.best_evaluation(log, metric) == best
