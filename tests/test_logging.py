"""Metric reduction, the files of a run, and its pictures."""

import functools
import io
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
from figures import plot_curves
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from common import logging
from common.logging import (MetricSums, RunLogger, StageTimer, _font, _wrap, contact_sheet, draw_sample, environment,
                            read_records, run_main)

ROOT = Path(__file__).resolve().parents[1]


def steps(out):
    return [record["step"] for record in read_records(out / "metrics.jsonl") if "step" in record]


def test_means_and_maxima():
    sums, total = MetricSums(), torch.tensor(3.0, requires_grad=True)
    sums.add("train/loss", total, 2)
    sums.add("train/loss", 5.0, torch.tensor([2]))
    sums.add("train/empty", 0.0, 0)
    for value, count in ((2.0**24, 1), (1.0, 0)):  # exact beyond fp32
        sums.add("train/large", torch.tensor(value), count)
    for value in (torch.tensor(1.5), 1.25):
        sums.max("train/ratio_max", value)
    sums.max("train/none_max", -math.inf)
    assert sums.reduce() == {"train/large": 2.0**24 + 1, "train/loss": 2.0, "train/ratio_max": 1.5}
    assert total.item() == 3.0  # the caller's tensor is not the accumulator


RANK_PROGRAM = """
import sys, torch, torch.distributed as dist
from common.logging import MetricSums
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
sums = MetricSums()
for name in ["b", "a"] if rank else ["a", "b"]:     # the order of the calls may differ
    sums.add(name, torch.tensor(rank + 1.0), 1 + 2 * rank)
if rank:                                            # and so may the names
    sums.add("one rank", 6.0, 2)
sums.max("top", [float("-inf"), -3.0][rank])
sums.max("bad", [float("nan"), 5.0][rank])
assert str(sums.reduce()) == "{'a': 0.75, 'b': 0.75, 'one rank': 3.0, 'bad': nan, 'top': -3.0}", sums.reduce()
dist.destroy_process_group()
"""


def test_two_ranks(tmp_path):
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK_PROGRAM, str(rank), str(tmp_path / "store")], env=environ,
                              stderr=subprocess.PIPE, text=True) for rank in range(2)]
    errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_stage_timer():
    timer = StageTimer()
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.02)
    assert 0.04 <= timer.seconds()["rollout"] < 1 and (timer.reset(), timer.seconds())[1] == {}


def test_environment(tmp_path, monkeypatch):
    (tmp_path / "git").write_text('#!/bin/sh\ncase "$*" in *describe*--dirty*) echo abc123-dirty;; esac\n')
    (tmp_path / "git").chmod(0o755)
    for path, commit in ((f"{tmp_path}:{os.environ['PATH']}", "abc123-dirty"), ("/nonexistent", "unknown")):
        monkeypatch.setenv("PATH", path)
        found = environment()
        assert found["git_commit"] == commit and found["torch"] == torch.__version__ and found["world_size"] >= 1
        assert json.loads(json.dumps(found)) == found and {"transformers", "flash_attn", "cuda", "gpu"} <= found.keys()


def test_files_of_a_run(tmp_path, capsys):
    log = RunLogger(tmp_path, True, {"args": {"lr": 1e-3}}, total_steps=3)
    log.log(0, {"eval/accuracy": 0.25})
    log.log(1, {"rollout/reward": np.float32(0.5), "train/count": 3, "train/loss": torch.tensor(2.0)})
    assert steps(tmp_path) == [0, 1] and log.last_step == 1  # readable while the run goes on
    card = draw_sample([Image.new("RGB", (8, 8), "red")], "p", "r", "c")
    log.samples(1, [{"prompt": "é\ud800\u2028", "reward": 1.0}], [card, card])
    with pytest.raises(ValueError):  # JSON has no NaN
        log.samples(2, [{"reward": math.nan}], [])
    log.line("hello")
    log.close()
    log.close()
    first, *others = read_records(tmp_path / "metrics.jsonl")
    assert first["type"] == "header" and first["args"] == {"lr": 1e-3} and first["environment"]["torch"]
    assert others[1:] == [{"step": 1, "rollout/reward": 0.5, "train/count": 3, "train/loss": 2.0}]
    assert read_records(tmp_path / "samples/step-000001.jsonl") == [{"prompt": "é\ud800\u2028", "reward": 1.0}]
    assert Image.open(tmp_path / "samples/step-000001.png").width > 2 * card.width
    assert capsys.readouterr().out == "hello\n" and not list(tmp_path.rglob("*.tmp"))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"eval/accuracy", "rollout/reward", "train/count", "train/loss"}
    assert events.Tags()["images"] == ["samples/step"] and events.Images("samples/step")[0].step == 1


@pytest.mark.parametrize("is_main", [True, False])
def test_ranks_refuse_the_same_metrics_and_only_one_writes(tmp_path, capsys, is_main):
    log = RunLogger(tmp_path / "run", is_main, {}, total_steps=3)
    for value in (math.nan, math.inf, torch.tensor(-math.inf)):
        with pytest.raises(ValueError, match="train/loss is -?(nan|inf) at step 4"):
            log.log(4, {"rollout/reward": 1.0, "train/loss": value})
    log.log(1, {"x": 1.0})
    log.samples(2, [{}], [])
    log.line("hello")
    log.update(2, {"reward": 1})
    log.close()
    if is_main:
        assert steps(tmp_path / "run") == [1]  # and no half of a refused record
    else:
        assert not (tmp_path / "run").exists() and capsys.readouterr() == ("", "") and log.last_step == -1


def test_a_bar_inside_a_step(monkeypatch, capsys):
    """On the terminal of rank 0, after two seconds, until all is done; nowhere else."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(logging, "tqdm", functools.partial(tqdm, file=screen, mininterval=0))
    for rank, late, shown in (("0", 3, True), ("0", 0, False), ("1", 3, False)):
        monkeypatch.setenv("RANK", rank)
        bar = logging.progress(range(5), "packed rows")
        bar.start_t = getattr(bar, "start_t", 0) - late
        assert list(bar) == [0, 1, 2, 3, 4] and ("packed rows:" in screen.getvalue()) == shown
        screen.truncate(0)
    monkeypatch.undo()
    assert list(logging.progress(range(5), "packed rows")) == [0, 1, 2, 3, 4] and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("first_step, kept", [(3, [0, 1, 2, 3]), (0, [])])
def test_resume_drops_later_records_and_a_cut_line(tmp_path, first_step, kept):
    log = RunLogger(tmp_path, True, {"args": {"text": "a\u2028b"}}, total_steps=6)
    for step in range(6):
        log.log(step, {"x": float(step)})
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "x"')  # killed while writing
    log = RunLogger(tmp_path, True, {}, total_steps=6, first_step=first_step)
    assert steps(tmp_path) == kept and log.bar.n == first_step and log.last_step == max(kept, default=-1)
    for step in range(len(kept), 7):
        log.log(step, {"x": 10.0 * step})
    log.close()
    assert steps(tmp_path) == list(range(7))
    assert [r["first_step"] for r in read_records(tmp_path / "metrics.jsonl") if "type" in r] == ([0, 3] if first_step else [0])
    assert len([*tmp_path.glob("metrics.old-*.jsonl")]) == (first_step == 0)      # a new start keeps the old records aside
    points = {e.step: e.value for e in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("x")}
    assert points == {step: step if step in kept else 10 * step for step in range(7)}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl has a line that is no JSON.*'{\"step\": 2'"):
        RunLogger(tmp_path, True, {}, total_steps=3, first_step=2)
    RunLogger(tmp_path, True, {}, total_steps=3).close()                                          # set aside unread


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
    sheet = contact_sheet([Image.new("RGB", (100, 50 + 10 * i)) for i in range(5)], 2)
    assert sheet.size == (14 + 2 * 114, 14 + 3 * (90 + 14))


@pytest.mark.parametrize("text", ["a b " * 400, "x" * 999, "a\n" * 300, "one two\n\n" * 99, "WWW iii " * 90])
def test_wrap_counts_what_it_hides(text):
    everything, lines = _wrap(text, 15, 300, 10**9), _wrap(text, 15, 300, 10)
    assert len(lines) == 10 and all(_font(15).getlength(line.rstrip()) <= 300 for line in lines)
    assert lines[6] == f"… {len(''.join(everything[6:-3])):,} characters left out …"
    assert lines[:6] + lines[7:] == everything[:6] + everything[-3:]
    assert "".join(everything).replace(" ", "") == "".join(text.split())


@pytest.mark.parametrize("values", [[0.1, 0.9], [3.0], [-5.0, 5.0, 1e6], [2.0] * 50, [0.0]])
def test_plot_curves(tmp_path, values):
    lines = ['{"type": "header"}'] + [json.dumps({"step": i, "x": v, "y": 1}) for i, v in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    plot_curves(tmp_path / "metrics.jsonl", ["x", "y"], tmp_path / "curve.png", "title")
    assert Image.open(tmp_path / "curve.png").size == (800, 440)
    with pytest.raises(ValueError, match=r"no values of \['z'\]; it has \['x', 'y'\]"):
        plot_curves(tmp_path / "metrics.jsonl", ["x", "z"], tmp_path / "other.png")


def test_a_failure_of_nccl_says_its_reason(monkeypatch, capsys):
    """The reason stands in its message's last line; of a store's only what stands before the stack of C++."""
    def fail():
        raise torch.distributed.DistBackendError("NCCL error in: NCCLUtils.cpp:93, unhandled system error\nLast error:\n"
                                                 "Error while creating shared memory segment /dev/shm/nccl-x (size 9)\n"
                                                 "Exception raised from check at x.cpp:7 (most recent call first):\nframe 0")

    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        run_main(fail)
    said = capsys.readouterr().err
    assert said.endswith("system error Last error: Error while creating shared memory segment /dev/shm/nccl-x (size 9)\n")
