"""launch/smoke.sh: passes where everything works, fails with the reason where something does not."""

import contextlib
import io
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.ground.files import UserError
from conftest import ROOT, read_json, words
from launch import check_model, smoke
from ranks import TORCHRUN

pytestmark = pytest.mark.slow


def check_model_here(command: list, **_) -> SimpleNamespace:
    """check_model.py in this process, which has imported all that takes it seconds."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        code = check_model.main(words(*command[2:]))
    return SimpleNamespace(returncode=code, stdout=told.getvalue())


def test_it_passes_here(tmp_path, monkeypatch, capfd):
    """One rank, two ranks that are killed and resumed, an export; a line for each, and a report."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    started = subprocess.run
    monkeypatch.setattr(
        smoke.subprocess,
        "run",
        lambda command, **how: (
            check_model_here(command)
            if "check_model.py" in str(command)
            else started(command, **how)
        ),
    )
    code, told = smoke.main(words("--out", tmp_path / "out")), capfd.readouterr().out
    assert code == 0, told
    assert "\nPASS; " in told
    assert "FAIL" not in told
    report = read_json(tmp_path / "out" / "smoke.json")
    assert [run["name"] for run in report["runs"]] == [
        "kernels",
        "sdpa",
        "2 ranks, killed",
        "2 ranks, resumed",
        "export",
    ]
    assert [run.get("exit_code") for run in report["runs"]] == [None, 0, -9, 0, None]
    assert "ok   log-probs of packs" in report["runs"][4]["tail"]
    assert report["passed"]
    for run in report["runs"][1:4]:
        assert run["metrics"]["train/sampler_gap"] < 1e-4
        assert run["metrics"]["perf/rollout_tokens_per_second"] > 0
        assert f"\n{run['name']}: ok  perf/step_seconds " in told
    assert report["machine"]["torch"]
    assert report["machine"]["transformers"]
    before, after = (run["metrics"]["step"] for run in report["runs"][2:4])
    assert after > before >= 2 or after == before + 1


def test_it_fails_with_the_reason(tmp_path, monkeypatch, capsys):
    start = smoke.start
    monkeypatch.setattr(
        smoke, "start", lambda name, out, ranks, *rest, **more: start(name, out, 1, *rest, **more)
    )
    monkeypatch.setattr(smoke.check_kernels, "main", lambda argv: ["varlen fails in: head"])
    (tmp_path / "train_ppo_vl.py").write_text("raise SystemExit('error: ' + 'no disk')")
    monkeypatch.setattr(smoke, "ROOT", tmp_path)
    assert smoke.main(words("--out", tmp_path / "out", "--model here")) == 1
    told = capsys.readouterr().out
    assert "\nFAIL; " in told
    assert "\nkernels: varlen fails in: head\n" in told  # and the runs go on, as they tell more
    assert "sdpa: exit code 1; see" in told
    assert "it did not resume from step 0" in told
    report = read_json(tmp_path / "out" / "smoke.json")
    assert not report["passed"]
    assert report["runs"][0]["problems"] == ["varlen fails in: head"]
    assert report["runs"][1]["tail"] == "error: no disk\n"
    assert "check_model.py" in report["runs"][-1]["problems"][0]


def test_gpus_that_torch_cannot_use_are_a_failure(tmp_path, monkeypatch, capsys):
    """Nothing is run: it would pass on the CPUs."""
    monkeypatch.setattr(smoke.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(smoke.torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert smoke.main(words("--out", tmp_path / "out")) == 1
    assert capsys.readouterr().out.endswith("FAIL\n")
    assert not (tmp_path / "out" / "task").exists()


def test_a_resumed_run_is_known_by_its_whole_log(tmp_path, monkeypatch):
    """However much eight ranks print after that line."""
    (tmp_path / "train_ppo_vl.py").write_text(
        "import sys; print('resuming from', sys.argv[-1] + '/checkpoints/step-2', '.' * 9000)"
    )
    monkeypatch.setattr(smoke, "ROOT", tmp_path)
    for step, problems in ((2, []), (4, ["it did not resume from step 4"])):
        report = smoke.start("resumed", tmp_path / "out", 1, [], resumes=step)
        assert report["problems"] == [*problems, "no step was recorded"]


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_several_ranks_share_the_only_gpu(monkeypatch, gpus):
    monkeypatch.setattr(smoke.torch.cuda, "device_count", lambda: gpus)
    assert smoke.launcher(1) == []
    last = Path(smoke.launcher(2)[-1])
    assert (last == ROOT / "tests" / "one_gpu_ranks.py") == (gpus == 1)
    assert last.is_file() == (gpus == 1)


def test_what_speaks_against_a_run():
    good = {"step": 1, "train/actor_skipped": 0, "train/sampler_gap": 0.004}
    assert smoke.judge_steps([good], 0.05) == []
    assert smoke.judge_steps([], 0.05) == ["no step was recorded"]
    assert smoke.judge_steps([good], 1e-4) == [
        "step 1: sampler gap 0.004, at most 0.0001 is rounding"
    ]
    nan = good | {"train/sampler_gap": float("nan"), "train/actor_skipped": 1.0}
    assert len(smoke.judge_steps([nan], 0.05)) == 2


def test_every_back_end_of_a_gpu_is_run(monkeypatch):
    """Those that are there, with graphs and without."""

    def choose(requested, device):
        if requested != "varlen" and requested not in installed:
            raise UserError("the package is not installed")

    monkeypatch.setattr(smoke, "choose_backend", choose)
    for installed, count in ((("flash_attn", "fa3", "fa4"), 8), (("fa4",), 4), ((), 2)):
        runs = smoke.plan_runs(8)
        assert len(runs) == count
        assert all(name.split()[-1] == flags.split()[-1] for name, flags in runs)
