"""Metric reduction, the files of a run, and its pictures."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.logging import (MetricSums, RunLogger, StageTimer, _ticks, _wrap, _font, contact_sheet, draw_sample,
                            environment, plot_curves)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def git(tmp_path, monkeypatch):
    """A `git` of our own first on PATH: it prints a commit, and one changed file if FAKE_DIRTY is set."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "git"
    script.write_text('#!/bin/sh\n[ -n "$FAKE_FAIL" ] && exit 128\n'
                      'case "$*" in\n*rev-parse*) echo abc123;;\n'
                      '*status*) [ -n "$FAKE_DIRTY" ] && echo " M x"; exit 0;;\nesac\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().split("\n") if line]


def steps(out):
    return [r["step"] for r in records(out) if "step" in r]


def tensorboard(out):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(out / "tensorboard"))
    accumulator.Reload()
    return accumulator


# ------------------------------------------------------------------------------------------------ MetricSums
def test_means_and_maxima():
    sums = MetricSums()
    total = torch.tensor(3.0, requires_grad=True)
    sums.add("train/loss", total, 2)
    sums.add("train/loss", 5.0, torch.tensor([2]))
    sums.add("train/empty", 0.0, 0)
    sums.add("train/float", 1, 3)
    sums.max("train/ratio_max", torch.tensor(1.5))
    sums.max("train/ratio_max", 1.25)
    sums.max("train/none_max", -math.inf)
    assert sums.reduce() == {"train/loss": 2.0, "train/float": 1 / 3, "train/ratio_max": 1.5}
    assert total.item() == 3.0  # the caller's tensor is not the accumulator


def test_sums_are_exact_beyond_fp32():
    sums = MetricSums()
    for _ in range(10):
        sums.add("x", torch.tensor(2.0**24, dtype=torch.float32), 1)
        sums.add("x", torch.tensor(1.0, dtype=torch.bfloat16), 0)
    assert sums.reduce()["x"] == 2.0**24 + 1


@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0), (torch.tensor(math.nan), 1.0), (math.nan,)])
def test_nan_maximum_does_not_vanish(values):
    sums = MetricSums()
    for value in values:
        sums.max("x", value)
    assert sums.reduce()["x"] == math.inf


def test_colliding_names_and_bad_shapes():
    sums = MetricSums()
    sums.add("x", 1, 1)
    sums.max("x", 1)
    with pytest.raises(ValueError, match="x"):
        sums.reduce()
    with pytest.raises(RuntimeError):
        sums.add("y", torch.zeros(2), 1)


RANK_PROGRAM = """
import sys, torch, torch.distributed as dist
from common.logging import MetricSums
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
sums = MetricSums()
order = ["b", "a"] if rank else ["a", "b"]          # the order of the calls may differ
for name in order:
    sums.add(name, torch.tensor(rank + 1.0), 1 + 2 * rank)
sums.add("only_one_has_data", 6.0 * rank, 2 * rank)
sums.max("top", [float("-inf"), -3.0][rank])
assert sums.reduce() == {"a": 0.75, "b": 0.75, "only_one_has_data": 3.0, "top": -3.0}, sums.reduce()
sums = MetricSums()
for name in ["a", "b"][:1 + rank]:
    sums.add(name, 1, 1)
try:
    sums.reduce()
    raise SystemExit("no error for unequal names")
except ValueError as error:
    assert "differ between ranks" in str(error)
sums = MetricSums()
sums.add("after", 1, 1)                             # the failure left no collective half done
assert sums.reduce() == {"after": 1.0}
dist.destroy_process_group()
"""


def test_two_ranks(tmp_path):
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK_PROGRAM, str(rank), str(tmp_path / "store")], env=environ,
                              stderr=subprocess.PIPE, text=True) for rank in range(2)]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_stage_timer():
    timer = StageTimer()
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.02)
    with pytest.raises(KeyError), timer("update"):
        raise KeyError
    seconds = timer.seconds()
    assert seconds.keys() == {"rollout", "update"} and 0.04 <= seconds["rollout"] < 1
    timer.reset()
    assert timer.seconds() == {} and seconds  # a copy, not the accumulator


# ------------------------------------------------------------------------------------------------ RunLogger
def test_files_of_a_run(tmp_path):
    log = RunLogger(tmp_path, True, {"args": {"lr": 1e-3}}, total_steps=3)
    log.log(0, {"eval/accuracy": 0.25})
    log.log(1, {"rollout/reward": np.float32(0.5), "train/count": 3, "train/loss": torch.tensor(2.0)})
    card = draw_sample([Image.new("RGB", (8, 8), "red")], "p", "r", "c")
    log.samples(1, [{"prompt": "é\ud800\u2028", "reward": 1.0}], [card, card])
    log.update(1, {"reward": 0.5})
    log.close()
    log.close()
    first, second, third = records(tmp_path)
    assert first["type"] == "header" and first["args"] == {"lr": 1e-3}
    assert first["environment"]["git_commit"] == "abc123"
    assert second == {"step": 0, "eval/accuracy": 0.25}
    assert third == {"step": 1, "rollout/reward": 0.5, "train/count": 3, "train/loss": 2.0} and list(third)[0] == "step"
    sample = json.loads((tmp_path / "samples/step-000001.jsonl").read_text(encoding="utf-8").rstrip("\n"))
    assert sample == {"prompt": "é\ud800\u2028", "reward": 1.0}
    assert Image.open(tmp_path / "samples/step-000001.png").width > 2 * card.width
    assert not list(tmp_path.rglob("*.tmp"))
    events = tensorboard(tmp_path)
    assert set(events.Tags()["scalars"]) == {"eval/accuracy", "rollout/reward", "train/count", "train/loss"}
    assert events.Tags()["images"] == ["samples/0", "samples/1"]
    assert events.Images("samples/0")[0].width == card.width and events.Images("samples/0")[0].step == 1


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(-math.inf)])
def test_non_finite_metric_is_named_on_every_rank(tmp_path, is_main, value):
    log = RunLogger(tmp_path, is_main, {}, total_steps=1)
    with pytest.raises(ValueError, match="train/loss is -?(nan|inf) at step 4"):
        log.log(4, {"rollout/reward": 1.0, "train/loss": value})
    log.close()
    assert not is_main or steps(tmp_path) == []  # half a record is worse than none


def test_other_ranks_write_nothing(tmp_path, capsys):
    log = RunLogger(tmp_path / "run", False, {}, total_steps=3, first_step=1)
    log.log(2, {"x": 1.0})
    log.samples(2, [{}], [])
    log.truncate_after(1)
    log.line("hello")
    log.update(2, {"reward": 1})
    log.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr() == ("", "")


def test_line_is_printed_once(tmp_path, capsys):
    log = RunLogger(tmp_path, True, {}, total_steps=3)
    log.line("step 1 | reward 0.5 \ud800")
    log.close()
    assert capsys.readouterr().out == "step 1 | reward 0.5 \\ud800\n"


def test_resume_drops_later_records_and_a_cut_line(tmp_path):
    log = RunLogger(tmp_path, True, {"args": {"text": "a\u2028b"}}, total_steps=6)
    for step in range(6):
        log.log(step, {"x": float(step)})
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "x"')  # killed while writing
    log = RunLogger(tmp_path, True, {"args": {}}, total_steps=6, first_step=3)
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert log.bar.n == 3
    for step in (4, 5, 6):
        log.log(step, {"x": 10.0 * step})
    log.close()
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert [r["first_step"] for r in records(tmp_path) if "type" in r] == [0, 3]
    points = {e.step: e.value for e in tensorboard(tmp_path).Scalars("x")}
    assert points == {0: 0, 1: 1, 2: 2, 3: 3, 4: 40, 5: 50, 6: 60}


def test_truncate_keeps_logging(tmp_path):
    log = RunLogger(tmp_path, True, {}, total_steps=6)
    for step in (1, 2, 3):
        log.log(step, {"x": 1.0})
    log.truncate_after(1)
    log.log(2, {"x": 2.0})
    log.close()
    assert steps(tmp_path) == [1, 2]


def test_a_second_fresh_run_appends(tmp_path):
    for _ in range(2):
        log = RunLogger(tmp_path, True, {}, total_steps=1)
        log.log(1, {"x": 1.0})
        log.close()
    assert steps(tmp_path) == [1, 1]  # nothing of an earlier run is deleted unless a resume says so


def test_damaged_file_is_an_error_with_its_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2"):
        RunLogger(tmp_path, True, {}, total_steps=3, first_step=2)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_records_without_nan(tmp_path):
    log = RunLogger(tmp_path, True, {}, total_steps=1)
    with pytest.raises(ValueError):
        log.samples(1, [{"reward": math.nan}], [])
    log.close()
    assert not list((tmp_path / "samples").iterdir())


def test_environment(monkeypatch):
    found = environment()
    assert found["python"] == sys.version.split()[0] and found["torch"] == torch.__version__
    assert found["git_commit"] == "abc123" and found["world_size"] >= 1
    assert json.loads(json.dumps(found)) == found and {"transformers", "flash_attn", "cuda", "gpu"} <= found.keys()
    monkeypatch.setenv("FAKE_DIRTY", "1")
    assert environment()["git_commit"] == "abc123-dirty"
    monkeypatch.setenv("FAKE_FAIL", "1")
    assert environment()["git_commit"] == "unknown"
    monkeypatch.setenv("PATH", "/nonexistent")
    assert environment()["git_commit"] == "unknown"


def test_import_is_light():
    code = ("import sys, common.logging, logging; assert logging.INFO == 20; "
            "print('tensorboard' in str(sys.modules.keys()))")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr


# ------------------------------------------------------------------------------------------------ pictures
@pytest.mark.parametrize("modes", [[], ["RGB"], ["RGBA", "L", "P"], ["1"] * 40])
def test_draw_sample_is_bounded(modes):
    images = [Image.new(mode, size) for mode, size in zip(modes, [(1, 1), (3000, 2), (5, 4000)] * 20)]
    hostile = "word " * 5000 + "x" * 5000 + "\n" * 500 + "\t\x00\u202e\ud83d 漢字"
    card = draw_sample(images, hostile, hostile, hostile)
    assert card.width == 480 and card.height < 1200 and card.mode == "RGB"
    assert draw_sample(images, "", "", "").height < card.height


def test_tiny_pictures_are_enlarged_by_whole_pixels():
    image = Image.new("RGB", (2, 2), "red")
    image.putpixel((1, 1), (0, 255, 0))
    colours = {c for _, c in draw_sample([image], "", "", "").crop((0, 20, 480, 240)).getcolors(10_000)}
    assert {(255, 0, 0), (0, 255, 0)} <= colours and len(colours) <= 5  # no colours mixed by smoothing


@pytest.mark.parametrize("text", ["a b " * 400, "x" * 999, "a\n" * 300, "one two\n\n" * 99, " " * 500])
def test_wrap_counts_what_it_hides(text):
    everything = _wrap(text, _font(15), 300, 10**9)
    lines = _wrap(text, _font(15), 300, 10)
    assert len(lines) <= 10 and all(_font(15).getlength(line.rstrip()) <= 300 for line in lines)
    if len(everything) > 10:
        assert lines[6] == f"… {len(''.join(everything[6:-3])):,} characters left out …"
        assert lines[:6] == everything[:6] and lines[7:] == everything[-3:]
    assert "".join(everything).replace(" ", "") == text.replace("\n", "").replace(" ", "")


def test_contact_sheet():
    cards = [Image.new("RGB", (100, 50 + 10 * i), "red") for i in range(5)]
    sheet = contact_sheet(cards, 2)
    assert sheet.width == 14 + 2 * 114 and sheet.height == 14 + (60 + 14) + (80 + 14) + (90 + 14)
    with pytest.raises(ValueError):
        contact_sheet([], 2)


@pytest.mark.parametrize("low, high", [(0, 1), (0, 200), (-3, 7), (1e-9, 2e-9), (1e6, 1.1e6), (0, 3), (-1, 1e5)])
def test_ticks(low, high):
    ticks = _ticks(low, high)
    assert 2 <= len(ticks) <= 7 and low - 1e-6 * (high - low) <= ticks[0] and ticks[-1] <= high + 1e-6 * (high - low)
    steps = np.diff(ticks)
    assert np.allclose(steps, steps[0]) and f"{steps[0]:e}"[0] in "125"


@pytest.mark.parametrize("values", [[0.1, 0.9], [3.0], [-5.0, 5.0, 1e6], [2.0] * 50, [0.0]])
def test_plot_curves(tmp_path, values):
    lines = ['{"type": "header"}'] + [json.dumps({"step": i, "x": v, "y": 1}) for i, v in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    plot_curves(tmp_path / "metrics.jsonl", ["x", "y"], tmp_path / "curve.png", "title")
    assert Image.open(tmp_path / "curve.png").size == (800, 440)
    with pytest.raises(ValueError, match=r"no values of \['z'\]; it has \['x', 'y'\]"):
        plot_curves(tmp_path / "metrics.jsonl", ["x", "z"], tmp_path / "other.png")
