"""launch/page.py: what a page holds, whatever a model, a kill or a disk has written."""

import base64
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from conftest import ROOT, write_rows
from launch import page

HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "\u202eright to left \u0000\u001b[2J",
    "half \ud800 a pair",
    "'\"`${alert(1)}&lt;",
    "漢字 العربية 🙂",
]


def sample(**changes) -> dict:
    row = {
        "index": 0,
        "source": "rows.jsonl:1",
        "sample": 0,
        "prompt": "<user> how many?",
        "question": "how many?",
        "images": [],
        "response": "3",
        "reference": "3",
        "label": "count",
        "response_length": 2,
        "truncated": False,
        "reward": 1.0,
        "components": {"accuracy": 1.0},
    }
    return row | changes


def write_run(folder: Path, metrics: list[dict] = [], **files: list[dict]) -> Path:
    """A run with a header, metrics, and files of samples by name (step_1)."""
    header = {"type": "header", "first_step": 0, "environment": {"torch": "2"}}
    header["arguments"] = {"data": str(folder / "rows.jsonl"), "steps": 4}
    (folder / "samples").mkdir(parents=True)
    write_rows(folder / "metrics.jsonl", [header, *metrics])
    for name, samples in files.items():
        stem, step = name.split("_")
        write_rows(folder / "samples" / f"{stem}-{int(step):06d}.jsonl", samples)
    return folder


def made(tmp_path: Path, *line) -> tuple[str, dict]:
    """The text of a page, and what its elements hold, by id."""
    out = tmp_path / "page.html"
    page.main([*map(str, line), "--out", str(out)])
    text = out.read_text(encoding="utf-8")
    elements = re.findall(
        r'<script type="text/plain" id="([\w-]+)">([A-Za-z0-9+/=]*)</script>', text
    )
    return text, {
        name: json.loads(gzip.decompress(base64.b64decode(data))) for name, data in elements
    }


def groups_of(held: dict, step: int, stem: str = "step") -> list[dict]:
    """Of the first run."""
    files = held["runs"]["runs"][0]["files"]
    (file,) = [file for file in files if (file["step"], file["stem"]) == (step, stem)]
    return [group for block in file["blocks"] for group in held[block["id"]]]


def test_a_browser_runs_one_script_and_asks_nobody(tmp_path):
    text, held = made(tmp_path, write_run(tmp_path / "run", step_1=[sample()]))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(re.findall("<script", text)) == len(scripts) + len(held) == 1 + 3
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', text)[1]
    rules = dict(rule.split(maxsplit=1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert not re.search("unsafe-(eval|hashes)", policy)
    addresses = re.findall(r"https?://[^\"' ]*", text)
    assert addresses == ["http://www.w3.org/2000/svg"]  # the name of a vocabulary
    assert "innerHTML" not in text


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_is_javascript(tmp_path):
    (script,) = re.findall("<script>(.*?)</script>", page.TEMPLATE.read_text(), re.DOTALL)
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True, timeout=60)


def test_the_template_is_laid_out_for_people():
    text = page.TEMPLATE.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 120
    bodies = re.findall(r"^(?:async )?function (\w+).*?^}$", text, re.DOTALL | re.MULTILINE)
    assert len(bodies) > 40


def test_what_a_model_wrote_is_data(tmp_path):
    """In every field, name and path: it comes back as it was, and the page holds none of it."""
    samples = [
        sample(
            sample=i,
            **dict.fromkeys(("response", "judgement", "env_error", "ended", "further"), text),
            components={text: 1.0},
            conversation=[{"role": text, "content": text}],
            images=[text],
            per_token={"text": [text, text], text: [0.5, 1]},
        )
        for i, text in enumerate(HOSTILE)
    ]
    named = [
        sample(**dict.fromkeys(("question", "prompt", "source", "label", "reference"), text))
        for text in HOSTILE
    ]
    metrics = [{"step": 1, f"eval/{text}/accuracy": 0.5} for text in HOSTILE]
    run = write_run(tmp_path / "run", metrics, step_1=samples, eval_1=named)
    text, held = made(tmp_path, run)
    # the template's own code stands in the page, too
    template = page.TEMPLATE.read_text(encoding="utf-8")
    assert not any(line in text and line not in template for line in HOSTILE)
    (told,) = held["runs"]["runs"]
    assert told["problems"] == []
    assert {name.split("/", 1)[1][:-9] for name in told["metrics"]} == set(HOSTILE)
    training, evaluated = groups_of(held, 1), groups_of(held, 1, "eval")
    assert [group["question"] for group in evaluated] == HOSTILE
    assert [one["response"] for group in training for one in group["samples"]] == HOSTILE
    assert [one["further"] for group in training for one in group["samples"]] == HOSTILE
    assert all("src" not in entry for entry in held["pictures"] if "script" in entry["name"])


def test_samples_stand_by_prompt(tmp_path):
    """Those of a row together, with what they share once; a row that was drawn twice is two groups."""
    rows = [
        *(sample(sample=i, reward=i / 2) for i in range(3)),
        sample(source="rows.jsonl:2", question="else?"),
        *(sample(sample=i, reward=0.0) for i in range(2)),
    ]
    run = write_run(tmp_path / "run", step_1=rows, step_5=rows[3:4])
    _, held = made(tmp_path, run)
    groups = groups_of(held, 1)
    assert [[one["reward"] for one in group["samples"]] for group in groups] == [
        [0.0, 0.5, 1.0],
        [1.0],
        [0.0, 0.0],
    ]
    assert "question" not in groups[0]["samples"][0]
    # the index of rows: the same number in every step
    first, second = held["runs"]["runs"][0]["files"]
    (one, other, again) = first["blocks"][0]["rows"]
    assert one == again != other
    assert second["blocks"][0]["rows"] == [other]


def test_a_row_is_found_without_unpacking_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "BLOCK", 1000)
    rows = [sample(source=f"rows.jsonl:{i}", question="q" * 100) for i in range(40)]
    _, held = made(tmp_path, write_run(tmp_path / "run", eval_0=rows))
    (file,) = held["runs"]["runs"][0]["files"]
    assert len(file["blocks"]) > 5
    listed = [row for block in file["blocks"] for row in block["rows"]]
    assert listed == list(range(40))
    for block in file["blocks"]:
        assert [group["row"] for group in held[block["id"]]] == block["rows"]


def test_what_cannot_be_read_is_counted(tmp_path, capsys):
    run = write_run(tmp_path / "run", [{"step": 1, "rollout/reward": 0.5}])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rollout/reward": NaN, "train/kl": 1e999, "perf/x": 0.1234567}\n')
        file.write('{"step": "three"}\n{"step": 4, "rollout/rew')  # a run that goes on
    lines = [
        sample(),
        sample(response=None),
        sample(reward=float("inf"), advantage=float("nan")),
        sample(images="a.png"),
        sample(tokens=7, per_token={"text": "?"}),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "samples" / "step-000001.jsonl").write_text(text + "{\n[1]\n" + '{"half')
    (run / "samples" / "eval-000001.jsonl").write_bytes(b'{"response": 3}\n\0\0\0\0')
    (run / "samples" / "eval-000002.jsonl").mkdir()
    _, held = made(tmp_path, run)
    (told,) = held["runs"]["runs"]
    assert told["metrics"] == {
        "rollout/reward": [[1], [0.5]],
        "perf/x": [[2], [0.123457]],
    }
    # a step of text; no text, a path, text that is no list, half an object, a list; an evaluation, a folder
    assert len(told["problems"]) == 1 + 5 + 1 + 1
    assert f"{run}/metrics.jsonl:4: step must be int" in told["problems"][0]
    (one,), (other,) = (group["samples"] for group in groups_of(held, 1))
    assert (one["reward"], other["reward"], other["advantage"]) == (1.0, None, None)
    assert "rollout/reward" in capsys.readouterr().out


def test_a_run_of_which_there_is_nothing_yet(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    _, held = made(tmp_path, tmp_path / "run")
    assert held["runs"]["runs"][0]["files"] == []
    with pytest.raises(SystemExit) as ended:
        made(tmp_path, tmp_path / "none")
    assert ended.value.code == 2
    assert "not the folder of a run" in capsys.readouterr().err


def test_what_is_no_file_is_not_replaced_by_a_page(tmp_path, capsys):
    """Such as /dev/null: to rename a file to it would take the device away."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out in (pipe, tmp_path / "run"):
        with pytest.raises(SystemExit) as ended:
            page.main([f"{tmp_path}/run", "--out", f"{out}"])
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"error: --out {out} is no file\n"
    with pytest.raises(SystemExit):
        page.main([f"{tmp_path}/run", "--out", f"{tmp_path}/none/a.html"])
    told = f"error: --out {tmp_path}/none/a.html: there is no folder {tmp_path}/none\n"
    assert capsys.readouterr().err == told
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "run"]


def test_which_samples_are_read(tmp_path):
    files = {f"step_{step}": [sample(further="x" * 2**18)] for step in (1, 5, 10, 15, 20)}
    run = write_run(tmp_path / "run", **files)
    _, held = made(tmp_path, run, "--steps", 5, 15)
    assert [file["step"] for file in held["runs"]["runs"][0]["files"]] == [5, 15]
    assert held["runs"]["skipped"] == 0
    _, held = made(tmp_path, run, "--mib", 1)  # three quarters of them fit, the newest
    assert [file["step"] for file in held["runs"]["runs"][0]["files"]] == [10, 15, 20]
    assert held["runs"]["skipped"] == 2


def test_evaluations_of_a_run_are_runs_of_their_own(tmp_path):
    """Of --eval_only, inside its folder or alone; names tell runs apart."""
    for name in ("a/run", "b/run"):
        write_run(tmp_path / name, step_1=[sample()])
    write_run(
        tmp_path / "a/run/evaluation-step-4", [{"step": 4, "eval/accuracy": 0.5}], eval_4=[sample()]
    )
    _, held = made(tmp_path, tmp_path / "a/run", tmp_path / "b/run")
    names = [run["name"] for run in held["runs"]["runs"]]
    assert names == ["a/run", "run/evaluation-step-4", "b/run"]
    assert [run["files"][0]["stem"] for run in held["runs"]["runs"]] == ["step", "eval", "step"]
    (tmp_path / "a/run/metrics.jsonl").unlink()
    _, held = made(tmp_path, tmp_path / "a/run")
    assert [run["name"] for run in held["runs"]["runs"]] == ["evaluation-step-4"]


def test_records_of_a_judge(tmp_path, capsys):
    """As train_grm_vl.py writes them: no reward; "tokens" is a number."""
    judged = sample(tokens=5, loss=0.5, target="yes", verdict="yes", probabilities={"yes": 0.75})
    del judged["reward"], judged["components"]
    metrics = [{"step": 0, "eval/accuracy": 0.25, "eval/loss": 2}, {"step": 5, "eval/accuracy": 1}]
    _, held = made(tmp_path, write_run(tmp_path / "run", metrics, eval_5=[judged]))
    (group,) = groups_of(held, 5, "eval")
    assert group["samples"][0]["probabilities"] == {"yes": 0.75}
    text = capsys.readouterr().out
    assert re.search(r"eval/accuracy +0.250 -> 1.000\n", text)
    assert re.search(r"eval/loss +2.000 -> 2.000\n", text)


@pytest.fixture
def pictures(tmp_path) -> Path:
    """A run whose data, in another folder, has a wide picture that is stored upright."""
    data = tmp_path / "data and more"
    data.mkdir()
    tags = Image.Exif()
    tags[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (400, 800), "red").save(data / "50 %.jpg", exif=tags)
    Image.new("RGB", (8, 8)).save(tmp_path / "private.png")
    (data / "link.png").symlink_to(tmp_path / "private.png")
    (data / "damaged.png").write_bytes(b"\x89PNG no")
    return data


OUTSIDE = "outside of the data's folders and of --image_root"


def test_only_pictures_of_the_data_and_of_the_run_are_named(tmp_path, pictures, capsys):
    """As a row may name any file, and any host."""
    names = {
        str(pictures / "50 %.jpg"): "data%20and%20more/50%20%25.jpg",
        str(pictures / "gone.png"): "data%20and%20more/gone.png",
        str(tmp_path / "private.png"): OUTSIDE,
        str(pictures / "../private.png"): OUTSIDE,
        str(pictures / "link.png"): OUTSIDE,
        "//host/share/a.png": "on another host",
        "\\\\host\\share\\a.png": "on another host",
        "https://host/a.png": "on another host",
        "file://host/a.png": "on another host",
        "javascript:alert(1)": "on another host",
        "a\0.png": "no path",
    }
    run = write_run(tmp_path / "run", step_1=[sample(images=list(names))])
    header = {
        "type": "header",
        "arguments": {"data": f"{pictures}/a.jsonl:0.5,{pictures}/b.jsonl:.5"},
    }
    write_rows(run / "metrics.jsonl", [header])
    _, held = made(tmp_path, run)
    told = {entry["name"]: entry.get("why", entry.get("src")) for entry in held["pictures"]}
    assert told == names
    _, held = made(tmp_path, run, "--image_root", tmp_path)
    told = {entry["name"]: entry.get("src") for entry in held["pictures"]}
    assert told[str(tmp_path / "private.png")] == "private.png"
    _, held = made(tmp_path, run, "--embed")
    assert "with 1 copies of pictures" in capsys.readouterr().out
    by_name = {entry["name"]: entry for entry in held["pictures"]}
    copy = by_name[str(pictures / "50 %.jpg")]
    assert copy["size"] == [800, 400]  # upright
    data = base64.b64decode(copy["src"].removeprefix("data:image/webp;base64,"))
    (tmp_path / "copy.webp").write_bytes(data)
    assert Image.open(tmp_path / "copy.webp").size == (320, 160)
    assert by_name[str(tmp_path / "private.png")] == {
        "name": str(tmp_path / "private.png"),
        "why": OUTSIDE,
    }


def test_clips_and_pictures_of_environments(tmp_path, pictures):
    """A clip is a list of frames, or of one film; an environment's pictures lie beside the samples."""
    frames = [f"{pictures}/{k}.png" for k in range(40)]
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "file": "step-000001/0.png"}, {"type": "?"}],
        },
        {"role": "assistant", "content": "look"},
        {"role": "user", "content": [{"type": "image", "file": "../../../private.png"}]},
    ]
    one = sample(images=[frames, [f"{pictures}/film.mp4"], frames[3]], conversation=chat)
    run = write_run(tmp_path / "run", step_1=[one])
    write_rows(
        run / "metrics.jsonl", [{"type": "header", "arguments": {"eval_data": str(pictures)}}]
    )
    _, held = made(tmp_path, run)
    (group,) = groups_of(held, 1)
    clip, film, frame = (held["pictures"][number] for number in group["images"])
    assert (len(clip["frames"]), clip["name"]) == (16, "16 of 40 frames of a clip")
    assert [clip["frames"][k]["name"] for k in (0, 15)] == [frames[0], frames[39]]
    assert film["src"] == "data%20and%20more/film.mp4"
    assert frame["name"] == frames[3]
    first, _, last = group["samples"][0]["conversation"]
    assert (
        held["pictures"][first["content"][0]["picture"]]["src"] == "run/samples/step-000001/0.png"
    )
    assert held["pictures"][last["content"][0]["picture"]]["why"] == OUTSIDE


def test_it_needs_python_alone(tmp_path):
    """A page can be made where no torch is installed, and without Pillow."""
    run = write_run(tmp_path / "run", step_1=[sample()])
    code = (
        "import sys; from launch import page; page.main(sys.argv[1:]); "
        "assert not {'torch', 'numpy', 'PIL', 'transformers', 'packaging'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, run, "--out", tmp_path / "page.html"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "before you share it" in result.stdout
