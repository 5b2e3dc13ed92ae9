"""The golden runs' own net: what the program takes for the same, and what it must notice. Trains nothing."""

import json
from pathlib import Path

import pytest

import golden
from conftest import words

# A trainer of a few lines: a step is a number that depends on all numbers before it.
TRAINER = """
import json, os, pathlib, sys, time

if "--help" in sys.argv:
    print("\\n".join(f"  --{name} X" for name in FLAGS), flush=True)
    sys.exit()
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, last, every = pathlib.Path(flags["--out"]), int(flags["--steps"]), int(flags["--save_every"])
if os.environ["RANK"] != "0":
    while not (out / "done").exists():
        time.sleep(0.01)
    sys.exit()
saved = sorted(out.glob("checkpoints/step-*"), key=lambda path: int(path.name[5:])) if RESUMES else []
step, value = json.loads((saved[-1] / "state.json").read_text()) if saved else (0, 1.0)
records = [json.dumps({"type": "header"})]
for line in (out / "metrics.jsonl").read_text().splitlines() if saved else ():
    if json.loads(line).get("step", step + 1) <= step:
        records.append(line)
(out / "checkpoints").mkdir(parents=True, exist_ok=True)
with open(out / "metrics.jsonl", "w", buffering=1) as file:
    file.write("\\n".join(records) + "\\n")
    if not saved:
        file.write(json.dumps({"step": 0, "eval/x": 1.0}) + "\\n")
    while step < last:
        step, value = step + 1, value * 1.1 + DRIFT * bool(saved)
        file.write(json.dumps({"step": step, "train/x": value, "perf/x": time.time()}) + "\\n")
        if step % every == 0:
            (out / "tmp").mkdir()
            (out / "tmp" / "state.json").write_text(json.dumps([step, value]))
            target = out / "checkpoints" / f"step-{step}"
            if target.exists():
                target.rename(out / f"old-{step}-{time.time_ns()}")
            (out / "tmp").rename(target)
        time.sleep(PAUSE)
(out / "done").touch()
"""


@pytest.fixture
def write(tmp_path, capfd):
    """A function that makes golden runs of such a trainer. Returns exit code, output and error output."""
    flags = {name for run in golden.FLAGS.values() for name in run} | {"out"}

    def write(
        folder: str,
        only: str = "gae",
        resumes: bool = True,
        drift: float = 0.0,
        pause: float = 0.05,
    ):
        checkout, toy = tmp_path / "checkout", tmp_path / "toy"
        for path in (checkout, toy, tmp_path / "toy-hidden", tmp_path / "toy-hybrid"):
            path.mkdir(exist_ok=True)
        (toy / "train.jsonl").touch()
        values = dict(FLAGS=sorted(flags), RESUMES=resumes, DRIFT=drift, PAUSE=pause)
        settings = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        for script in set(golden.SCRIPTS.values()):
            (checkout / script).write_text(settings + TRAINER)
        command = words(
            "write", tmp_path / folder, "--checkout", checkout, "--toy", toy, "--only", only
        )
        return golden.main([str(word) for word in command]), *capfd.readouterr()

    return write


@pytest.mark.slow
def test_runs_are_killed_in_the_middle_and_resumed(write, tmp_path):
    (tmp_path / "a").mkdir()
    stale = tmp_path / "a" / "judge-1-whole.jsonl"
    stale.touch()
    code, output, _ = write("a")
    assert not stale.exists()
    assert code == 0
    assert output.count("the same as undisturbed") == 2
    for name in ("gae-1-whole", "gae-1-killed", "gae-2-whole", "gae-2-killed"):
        lines = (tmp_path / "a" / f"{name}.jsonl").read_text().splitlines()
        assert len(lines) == golden.STEPS + 1
        assert "perf" not in "".join(lines)
        assert lines[1] == json.dumps({"step": 1, "train/x": 1.1})


def test_a_resumed_run_that_differs_is_noticed(write):
    code, output, _ = write("a", "gae-1", drift=1e-15)
    assert code == 1
    assert "DIFFERENT, whole and killed: step" in output


def test_a_run_that_starts_over_is_not_taken_for_a_resumed_one(write):
    code, _, errors = write("a", "gae-1", resumes=False)
    assert code == 2
    assert "did not resume" in errors


def test_a_run_that_ends_before_the_kill_is_not_taken_for_a_killed_one(write, monkeypatch):
    monkeypatch.setattr(golden, "committed", lambda out: {3: 0} if (out / "done").exists() else {})
    code, _, errors = write("a", "gae-1", pause=0.0)
    assert code == 2
    assert "before they could be killed" in errors


def fill(folder: Path, steps: dict[int, dict], **about: str) -> Path:
    folder.mkdir()
    golden.write_normal(steps, folder / "gae-1-whole.jsonl")
    about = dict(commit=folder.name, toy="t", torch="2", transformers="5") | about
    (folder / "about.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def compare(tmp_path, capfd):
    """A function that compares two folders with these metrics. Returns exit code and output."""

    def compare(a: dict[int, dict], b: dict[int, dict], *flags: str, **about: str):
        folders = [fill(tmp_path / "a", a), fill(tmp_path / "b", b, **about)]
        code = golden.main(["compare", *map(str, folders), *flags])
        return code, "".join(capfd.readouterr())

    return compare


def test_equal_runs_are_identical(compare):
    a, b = {1: {"x": 0.1 + 0.2}}, {1: {"x": 0.30000000000000004}}
    assert compare(a, b) == (0, "1 runs: identical, a and b\n")


def test_the_first_difference_is_shown(compare):
    a = {1: {"x": 1.0, "y": 2.0}, 2: {"x": 0.3}}
    b = {1: {"x": 1.0, "y": 2.1}, 2: {"x": 0.1 + 0.2}}
    assert compare(a, b) == (
        1,
        "gae-1-whole: step 1, y: 2.0 and 2.1 (the first of 2 differences)\n",
    )


def test_a_metric_that_is_new_is_listed_and_no_difference(compare, tmp_path):
    a, b = {1: {"x": 1.0}, 2: {"x": 0.3}}, {1: {"x": 1.0}, 2: {"x": 0.3, "z": 1}}
    listed = f"only in {tmp_path / 'b'}: z\n"
    assert compare(a, b) == (0, listed + "1 runs: identical, a and b\n")


@pytest.mark.parametrize(
    "a, b, problem",
    [
        ({"x": 0.3}, {"x": 0.4, "z": 1}, "x: 0.3 and 0.4"),
        ({"x": 0.3, "y": 1}, {"x": 0.3}, "y: 1 and absent"),
    ],
)
def test_a_new_metric_hides_no_difference_and_one_that_is_gone_is_one(compare, a, b, problem):
    code, output = compare({1: a}, {1: b})
    assert code == 1
    assert f"gae-1-whole: step 1, {problem}\n" in output


def test_a_metric_that_one_step_lacks_is_not_new(compare):
    a, b = {1: {"x": 1}, 2: {}}, {1: {"x": 1}, 2: {"x": 1}}
    assert compare(a, b) == (1, "gae-1-whole: step 2, x: absent and 1\n")


def test_a_missing_step_is_a_difference(compare):
    assert compare({1: {"x": 1}, 2: {"x": 1}}, {1: {"x": 1}}) == (
        1,
        "gae-1-whole: step 2, x: 1 and absent\n",
    )


def test_metrics_are_ignored_and_renamed_by_name(compare):
    flags = ("--ignore", "gone,changed", "--renamed", "old=new")
    assert (
        compare({1: {"old": 1, "gone": 1, "changed": 1}}, {1: {"new": 1, "changed": 2}}, *flags)[0]
        == 0
    )


def test_runs_on_different_toys_are_not_compared(compare):
    code, output = compare({1: {"x": 1}}, {1: {"x": 1}}, toy="other")
    assert code == 2
    assert "not comparable: toy is t in" in output


def test_records_of_a_step_are_one_but_none_is_said_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"type": "header", "step": 0}',
        '{"step": 1, "a": 1}',
        '{"step": 1, "b": 2, "eval/seconds": 3}',
    ]
    path.write_text("\n".join([*lines, '{"step": 2, "cut by a ki']))
    assert golden.read_metrics(path) == {1: {"a": 1, "b": 2}}
    path.write_text("\n".join([*lines, '{"step": 1, "a": 1}', ""]))
    with pytest.raises(golden.GoldenError, match="has a of a step in two records"):
        golden.read_metrics(path)


def test_flags_go_by_the_names_that_a_checkout_knows(monkeypatch):
    monkeypatch.setattr(golden, "RENAMED", {"old": "new", "gone": None})
    monkeypatch.setattr(
        golden,
        "FLAGS",
        {"run": {"old": 1, "gone": 2, "data": "{toy}/rows.jsonl"}, "older": {"old": 1}},
    )
    places = {"toy": Path("/t")}
    assert golden.command_line("run", places, {"new", "data"}) == words(
        "--new 1 --data /t/rows.jsonl"
    )
    assert golden.command_line("older", places, {"old"}) == ["--old", "1"]
    with pytest.raises(golden.GoldenError, match="has no flag --data"):
        golden.command_line("run", places, {"new"})
