"""launch/preflight.py: two machines that have what a run needs, and machines that lack it."""

import os
import re
import shutil
from pathlib import Path

import pytest

import ranks
from conftest import ROOT, words
from launch import preflight

SCRIPT = ROOT / "train_ppo_vl.py"


def elsewhere(folder: str) -> None:
    """Rank 1 is a machine of its own: its home is not shared."""
    home = Path(folder, f"home-{os.environ['RANK']}")
    home.mkdir(exist_ok=True)
    os.environ["HOME"] = str(home)
    preflight.LONGEST_WAIT = 10.0


def check(line: list, folder: Path, codes: list[int]) -> str:
    patches = [(elsewhere, str(folder))]
    return ranks.run(preflight.main, words(*line), world=2, patches=patches, codes=codes)


def test_a_run_that_has_what_it_needs(tmp_path, qwen25, picture_rows):
    out = tmp_path / "runs" / "new"
    line = SCRIPT, "--model", qwen25, "--data", picture_rows, "--out", out
    told = check(line, tmp_path, [0, 0])
    machine = (
        rf"{re.escape(preflight.socket.gethostname())}: 2 ranks, torch \S+, transformers \S+\n"
    )
    assert re.match(machine, told)
    assert f"--out {out}: one folder, in which every machine can write\n" in told
    assert "the flags, and the files behind them, are the same\n" in told
    assert re.search(r"all-reduce of 4 MiB: right, [0-9.]+ ms\nPASS after \d+ s\n$", told)
    assert not out.exists()


def own_rows(rows: str, folder: str) -> None:
    """Rank 1 has other rows under the path of the run."""
    copy = Path(folder, os.environ["RANK"])
    copy.mkdir()
    shutil.copy(rows, copy / "rows.jsonl")
    if os.environ["RANK"] == "1":
        with open(copy / "rows.jsonl", "a") as file:
            file.write('{"prompt": "one more"}\n')
    os.chdir(copy)


def test_what_a_machine_lacks_is_one_message(tmp_path, qwen25, picture_rows, monkeypatch):
    line = [SCRIPT, "--model", qwen25, "--data", picture_rows]
    told = check([*line, "--out", "~/run"], tmp_path, [2, 2])
    host = re.escape(preflight.socket.gethostname())
    missing = (
        rf"(?m)^error: --out .*: {host} does not see what rank \d \({host}\) has written there; "
    )
    assert re.search(missing, told)
    assert told.count("error: ") == 1
    with pytest.raises(preflight.UserError, match="other.py: no such script"):
        preflight.main(["other.py"])
    with pytest.raises(preflight.UserError, match="usage: preflight.py SCRIPT FLAGS"):
        preflight.main(["--steps", "3"])
