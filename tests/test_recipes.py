"""The files of launch/: what they hand to the trainers passes the trainers' own checks, and geo3k.py writes rows they read.

Every script is run by bash with a torchrun, srun and sbatch that only note their arguments.
"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import geo3k
import pytest
from conftest import ROOT
from PIL import Image

import train_grm_vl as grm
import train_ppo_vl as ppo
from common.vlm import Processor, load_prompts

RECIPES = sorted(path.name for path in (ROOT / "launch").glob("*.s*") if path.suffix in (".sh", ".slurm"))
NOTE = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["NOTED"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if not os.path.isdir("launch"):
    sys.exit("not the folder of the project: " + os.getcwd())
"""


@pytest.fixture
def launch(tmp_path):
    """launch(name, *arguments, **environment): run a copy of a launch file, in a folder with a space in its name, and return
    what it called, as lists of words. Job scripts start where they are submitted; the others, from anywhere, in their project."""
    project = tmp_path / "a project"
    for folder in ("bin", "launch", "toy"):
        (project / folder).mkdir(parents=True)
    for program in ("torchrun", "srun", "sbatch", "scontrol"):
        (project / "bin" / program).write_text(NOTE)
        (project / "bin" / program).chmod(0o755)
    for name in RECIPES:
        (project / "launch" / name).write_text((ROOT / "launch" / name).read_text())
    (project / "launch" / "setup.sh").write_text("# installs nothing here\n")
    for config in ("args.json", "grm_args.json"):
        (project / "toy" / config).write_text(json.dumps({"model": "toy/model", "data": "toy/train.jsonl"}))

    def launch(name, *arguments, **environment):
        noted = tmp_path / "noted"
        noted.unlink(missing_ok=True)
        environment |= {"PATH": f"{project / 'bin'}:{os.environ['PATH']}", "NOTED": str(noted), "HOME": str(tmp_path)}
        result = subprocess.run(["bash", str(project / "launch" / name), *arguments], env=environment, capture_output=True,
                                cwd=project if name.endswith(".slurm") else "/", text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in noted.read_text().splitlines()]

    return launch


def parsed(call: list[str], monkeypatch, folder: Path):
    """The trainer that a call starts, and its arguments, checked as at its start."""
    place = next(i for i, word in enumerate(call) if word.endswith(".py"))
    monkeypatch.chdir(folder)
    script = {"train_ppo_vl.py": ppo, "train_grm_vl.py": grm}[call[place]]
    return script, script.parse_args(call[place + 1:])


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith(".sh") and name != "setup.sh"])
def test_every_script_starts_a_trainer_that_accepts_its_flags(launch, monkeypatch, tmp_path, name):
    environment = {"DATA": "pairs.jsonl:2,more.jsonl:1", "EVAL_DATA": "held.jsonl", "JUDGE": "judge"} if name.startswith("grm") else {}
    *before, call = launch(name, "--seed", "7", "--out", "two words", **environment)
    assert len(before) == (name == "quickstart_grm.sh")                                  # the judge that rewards
    for other in before:
        parsed(other, monkeypatch, tmp_path / "a project")
    assert call[0] == "torchrun" and "--nproc_per_node" in call
    script, args = parsed(call, monkeypatch, tmp_path / "a project")
    assert args.run.seed == 7 and str(args.run.out) == "two words"
    if script is ppo:
        ppo.load_reward(args.reward)
    if name.startswith("geo3k"):
        assert (args.data.data, args.data.eval_data) == ("data/geo3k/train.jsonl", "data/geo3k/test.jsonl")
        assert r"\boxed{}" in args.data.system_prompt and args.model.model == "Qwen/Qwen2.5-VL-7B-Instruct"


@pytest.mark.parametrize("name, script", [("geo3k_grpo.sh", "ppo"), ("geo3k_ppo.sh", "ppo"), ("grm_7b.sh", "grm"),
                                          ("grm_rl.sh", "ppo")])
def test_a_recipe_for_another_model_under_slurm(launch, monkeypatch, tmp_path, name, script):
    """The recipe submits the job script, and the job script hands every flag to the trainer."""
    (call,) = launch(name, "--steps", "3", MODEL="small model", JUDGE="small model", OUT="runs/small", DATA="d",
                     EVAL_DATA="e",
                     LAUNCH=f"sbatch --nodes 2 --gpus-per-node 8 launch/{script}.slurm")
    assert call[:5] == ["sbatch", "--nodes", "2", "--gpus-per-node", "8"] and call[5] == f"launch/{script}.slurm"
    (step,) = launch(f"{script}.slurm", *call[6:], SLURM_JOB_ID="5", SLURM_NNODES="2", SLURM_JOB_NAME="ppo",
                     SLURM_GPUS_ON_NODE="8", MASTER_ADDR="node")
    assert step[0] == "srun" and step[step.index("--nnodes") + 1] == "2" and step[step.index("--nproc_per_node") + 1] == "8"
    trainer, args = parsed(step, monkeypatch, tmp_path / "a project")
    assert trainer.__name__ == f"train_{script}_vl" and args.update.steps == 3 and args.model.model == "small model"
    assert str(args.run.out) == "runs/small"


def test_the_recipes_are_the_baselines(launch, monkeypatch, tmp_path):
    """Numbers of the sources named in the headers that follow from several flags."""
    _, args = parsed(launch("geo3k_grpo.sh")[0], monkeypatch, tmp_path / "a project")
    assert args.rollout.prompts_per_step // args.update.minibatches == 128 and args.update.steps == 15 * (2101 // 512)
    _, args = parsed(launch("geo3k_ppo.sh")[0], monkeypatch, tmp_path / "a project")
    samples = args.rollout.prompts_per_step * args.rollout.samples_per_prompt
    assert samples // args.update.minibatches == 128 and args.update.steps == 30 * 2101 // 128
    assert args.update.warmup_steps == round(0.03 * args.update.steps) and args.whiten


def test_no_launch_file_speaks_of_a_flag_that_is_not_there():
    """In comments, too."""
    known = {"help", "config"}
    for script in (ppo, grm):
        known |= {name for group in script.Args.__dataclass_fields__.values() for name in group.type.__dataclass_fields__}
    known |= {"standalone", "nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id"}                # torchrun
    known |= {"nodes", "gpus-per-node", "time", "partition", "signal", "output", "open-mode", "job-name",
              "ntasks-per-node", "requeue", "exclusive", "cpus-per-task"}                                                # slurm
    known |= {"quiet", "disable-pip-version-check", "version", "logdir"}                                      # pip, tensorboard
    for name in RECIPES:
        text = (ROOT / "launch" / name).read_text()
        assert not set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", text)) - known, name


def test_the_readme_names_what_is_there():
    """Every file, every flag but those of other programs, and in the table of parity every test."""
    text, known = (ROOT / "README.md").read_text(), {"config", "help", "nproc_per_node", "nnodes", "max_restarts", "rdzv_backend",
                                                     "rdzv_endpoint", "rdzv_id"}
    for script in (ppo, grm):
        known |= {name for group in script.Args.__dataclass_fields__.values() for name in group.type.__dataclass_fields__}
    ours = text[:text.index("## Benchmarks")] + text[text.index("## Limits"):]
    ours = "\n".join(line for line in ours.splitlines() if "sbatch" not in line)
    assert set(re.findall(r"(?<![\w-])--([a-z][a-z0-9_]+[a-z0-9])(?![\w-])", ours.replace("--remote_*", ""))) <= known
    assert all((ROOT / path).exists() for path in re.findall(r"\b(?:launch|tests|common)/[\w/]+\.\w+", text))
    parity = text[text.index("**LightRFT `PPOTrainerVL`**"):]
    tests = {path.stem[5:]: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    named = re.findall(r"\b(\w+)::(\w+)", parity)
    assert len(named) > 80 and [pair for pair in named if f"def test_{pair[1]}(" not in tests[pair[0]]] == []


# ------------------------------------------------------------------------------------------------ launch/geo3k.py
def picture(mode: str, form: str) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((60, 40)).convert(mode).save(file, form)
    return file.getvalue()


def table_row(*pictures: bytes, problem="<image>Find $x$.", answer=r"\frac{1}{2}") -> dict:
    return {"images": [{"bytes": data, "path": None} for data in pictures], "problem": problem, "answer": answer}


def test_geo3k_rows_are_rows_of_the_trainer(tmp_path, qwen25):
    (tmp_path / "images").mkdir()
    png = picture("RGBA", "PNG")
    rows = [table_row(png), table_row(png, picture("CMYK", "JPEG"), problem="<image>Is it <image>?", answer="no"),
            table_row(problem="2 + 2?", answer="4"), table_row(picture("L", "JPEG"), problem="Find it.")]
    rows = [geo3k.convert(row, f"train-{i}", tmp_path / "images", "geo3k") for i, row in enumerate(rows)]
    assert rows[0] == {"prompt": "<image>Find $x$.", "images": ["images/train-0-0.png"], "answer": r"\frac{1}{2}",
                       "label": "geo3k"}
    assert (tmp_path / "images" / "train-0-0.png").read_bytes() == png
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(str(tmp_path / "train.jsonl"), Processor(str(qwen25)), max_prompt_tokens=500, verify_images=True)
    assert [len(prompt.images) for prompt in prompts] == [1, 2, 0, 1]
    assert [prompt.reference for prompt in prompts] == [r"\frac{1}{2}", "no", "4", r"\frac{1}{2}"]


@pytest.mark.parametrize("row, message", [
    (table_row(problem="<image>x"), "train-3: 0 pictures for 1 places"),
    (table_row(b"", b"", problem="<image>x"), "train-3: 2 pictures for 1 places"),
    (table_row(answer=None), "train-3: problem and answer must be texts"), (table_row(problem=" "), "must be texts"),
    (table_row(b"GIF?"), "cannot identify image")])
def test_bad_geo3k_row(tmp_path, row, message):
    with pytest.raises((ValueError, OSError), match=message):
        geo3k.convert(row, "train-3", tmp_path, "geo3k")


def test_geo3k_from_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    (tmp_path / "source").mkdir()
    png = picture("RGB", "PNG")
    for name, count in (("train-00000-of-00002", 3), ("train-00001-of-00002", 2), ("test-00000-of-00001", 1)):
        rows = [table_row(png, answer=f"{name} {i}") | {"id": i} for i in range(count)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "source" / f"{name}.parquet")
    geo3k.main([str(tmp_path / "source"), "--out", str(tmp_path / "out" / "geo3k")])
    rows = [json.loads(line) for line in (tmp_path / "out" / "geo3k" / "train.jsonl").read_text().splitlines()]
    assert [row["answer"].split()[1] for row in rows] == ["0", "1", "2", "0", "1"]
    assert [row["images"] for row in rows] == [[f"images/train-{i:05d}-0.png"] for i in range(5)]
    assert sorted(path.name for path in (tmp_path / "out" / "geo3k").iterdir()) == ["images", "test.jsonl", "train.jsonl"]
    assert all((tmp_path / "out" / "geo3k" / row["images"][0]).read_bytes() == png for row in rows)


def test_geo3k_refuses_what_it_cannot_do(tmp_path, capsys):
    (tmp_path / "source").mkdir()
    for source in ("source", "none"):
        with pytest.raises(SystemExit) as stop:
            geo3k.main([str(tmp_path / source), "--out", str(tmp_path / "new")])
        assert stop.value.code == 2 and f"no parquet files in {tmp_path / source}" in capsys.readouterr().err
    (tmp_path / "source" / "train.parquet").touch()
    with pytest.raises(SystemExit):
        geo3k.main([str(tmp_path / "source"), "--out", str(tmp_path)])
    assert "exists: remove it or name another" in capsys.readouterr().err
