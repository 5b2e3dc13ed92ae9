"""The files of launch/: what they hand to the trainers passes the trainers' own checks.

Every script is run by bash with a torchrun, srun and sbatch that only note their arguments.
"""

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common.rewards import sources
from conftest import ROOT, read_rows, words
from helpers import noise

RECIPES = sorted(
    path.relative_to(ROOT / "launch").as_posix()
    for path in (ROOT / "launch").rglob("*.s*")
    if path.suffix in (".sh", ".slurm")
)
ABILITIES = (
    "chart_ocr knowledge_recognition spatial_action counting_grounding_search stem visual_alignment"
).split()
NOTE = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["NOTED"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if not os.path.isdir("launch"):
    sys.exit("not the folder of the project: " + os.getcwd())
"""


@pytest.fixture
def launch(tmp_path):
    """launch(name, *arguments, **environment): run a copy of a launch file, in a folder with a
    space in its name, and return what it called, as lists of words. Job scripts start where they
    are submitted; the others, from anywhere, in their project."""
    project = tmp_path / "a project"
    for folder in "bin launch/judges toy toy_describe real/smollm2 real/fashion".split():
        (project / folder).mkdir(parents=True)
    for program in ("torchrun", "srun", "sbatch", "scontrol"):
        (project / "bin" / program).write_text(NOTE)
        (project / "bin" / program).chmod(0o755)
    # makes no data and no summary
    (project / "bin" / "python").write_text("#!/bin/sh\n")
    (project / "bin" / "python").chmod(0o755)
    (project / "data" / "vero").mkdir(parents=True)
    (project / "data/vero/vero_600k_train.verl.jsonl").write_text(
        "".join(json.dumps({"ability": ability}) + "\n" for ability in ABILITIES)
    )
    made = "toy/train.jsonl toy/eval.jsonl real/smollm2/config.json real/fashion/eval.jsonl"
    for path in made.split():
        (project / path).touch()
    for name in (*RECIPES, "reward_math.py", "real_rewards.py", "reward_vision.py"):
        (project / "launch" / name).write_text((ROOT / "launch" / name).read_text())
    for script in ("train_ppo_vl.py", "train_grm_vl.py"):
        (project / script).touch()
    (project / "launch" / "setup.sh").write_text("# installs nothing here\n")
    for config in ("args.json", "grm_args.json"):
        for toy in ("toy", "toy_describe"):
            (project / toy / config).write_text(
                json.dumps({"model": f"{toy}/model", "data": "toy/train.jsonl"})
            )

    def launch(name, *arguments, **environment):
        noted = tmp_path / "noted"
        noted.unlink(missing_ok=True)
        environment |= {
            "PATH": f"{project / 'bin'}:{os.environ['PATH']}",
            "NOTED": str(noted),
            "HOME": str(tmp_path),
        }
        result = subprocess.run(
            words("bash", project / "launch" / name, *arguments),
            env=environment,
            capture_output=True,
            cwd=project if name.endswith(".slurm") else "/",
            text=True,
            timeout=60,
        )
        assert result.returncode == 0, result.stderr
        launch.printed = result.stdout
        return [json.loads(line) for line in noted.read_text().splitlines()]

    return launch


def parsed(call: list[str], monkeypatch, folder: Path):
    """The trainer that a call starts, and its arguments, checked as at its start."""
    place = next(i for i, word in enumerate(call) if word.endswith(".py"))
    monkeypatch.chdir(folder)
    script = {"train_ppo_vl.py": ppo, "train_grm_vl.py": grm}[call[place]]
    return script, script.parse_args(call[place + 1 :])


@pytest.mark.parametrize("name", ["quickstart.sh", "quickstart_grm.sh", "real_words.sh"])
def test_commands_that_a_recipe_prints_work_as_printed(launch, tmp_path, name):
    """Though the project, or the run, lies in a folder with a space in its name."""
    launch(name, "--out", "two words")
    python = str(tmp_path / "a project" / "bin" / "python")
    commands = []
    for line in launch.printed.splitlines():
        if "launch/page.py" in line or "launch/chat.py" in line:
            read = shlex.split(line)
            commands.append(read[read.index(python) + 1 :])
    page = next(command for command in commands if command[0] == "launch/page.py")
    assert page[-3:] == ["two words", "--out", "two words/page.html"]
    for command in commands:
        assert (ROOT / command[0]).is_file()
        assert command[0] != "launch/chat.py" or command[1] == "two words/export/latest"


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in RECIPES
        if name.endswith(".sh") and name not in ("setup.sh", "smoke.sh", "judges/judge_loop.sh")
    ],
)
def test_every_script_starts_a_trainer_that_accepts_its_flags(launch, monkeypatch, tmp_path, name):
    environment = {}
    if name == "vero.sh":
        environment = {"JUDGE": "http://127.0.0.1:1/judge"}
    if name.startswith("grm"):
        environment = {
            "DATA": "pairs.jsonl:2,more.jsonl:1",
            "EVAL_DATA": "held.jsonl",
            "JUDGE": "judge",
        }
    *before, call = launch(name, "--seed 7 --out", "two words", **environment)
    # the judge that rewards, or SFT
    assert len(before) == (name in ("quickstart_grm.sh", "sft_then_ppo.sh"))
    for other in before:
        parsed(other, monkeypatch, tmp_path / "a project")
    assert call[0] == "torchrun"
    assert "--nproc_per_node" in call
    script, args = parsed(call, monkeypatch, tmp_path / "a project")
    assert args.seed == 7
    assert args.out == Path.cwd() / "two words"
    if script is ppo:
        package = SimpleNamespace(LatexExtractionConfig=dict, parse=None, verify=None)
        monkeypatch.setitem(sys.modules, "math_verify", package)
        sources.load_rewards(args)
        # The gradient of k3 as such vanishes where its value is clamped, which is where it is needed.
        if args.kl_in_loss:
            assert args.kl_estimator in ("k2", "k3+", "full")
    if name.startswith("geo3k"):
        assert (args.data, args.eval_data) == (
            "data/geo3k/train.jsonl",
            "data/geo3k/test.jsonl",
        )
        assert r"\boxed{}" in args.system_prompt
        assert args.model == "Qwen/Qwen2.5-VL-7B-Instruct"


def test_what_is_typed_replaces_what_a_recipe_says(launch, monkeypatch, tmp_path):
    """Also of flags that take several, and of those that exclude each other."""
    for name in ("geo3k_grpo.sh", "grounding.sh"):
        (call,) = launch(name, "--data", "mine.jsonl", "--reward point")
        _, args = parsed(call, monkeypatch, tmp_path / "a project")
        assert (args.data, args.reward, args.reward_recipe) == ("mine.jsonl", "point", "")


def test_the_parts_of_a_recipe_fit_together(launch, monkeypatch, tmp_path):
    """What one trainer writes is what the next one starts from, and a task is trained with its own rule."""
    project = tmp_path / "a project"
    for model in ({}, dict(MODEL="m", SFT_DATA="s.jsonl", DATA="d.jsonl", EVAL_DATA="e.jsonl")):
        first, second = launch("sft_then_ppo.sh", OUT="runs/two", **model)
        (script, sft), (other, args) = (
            parsed(call, monkeypatch, project) for call in (first, second)
        )
        assert (script, other) == (grm, ppo)
        assert sft.out == project / "runs/two/sft"
        assert args.model == "runs/two/sft/export/latest"
        assert args.out == project / "runs/two/ppo"
        assert sft.model == model.get("MODEL", "toy/model")
    # before the first half takes its hours
    with pytest.raises(AssertionError, match="EVAL_DATA: the held-out rows of PPO"):
        launch("sft_then_ppo.sh", MODEL="m", SFT_DATA="s.jsonl", SFT_EVAL="h.jsonl", DATA="d.jsonl")
    assert not (tmp_path / "noted").exists()
    for flags, advantage in (((), "grpo"), (("--critic",), "gae"), (("--teacher",), "none")):
        (call,) = launch("real_words.sh", *flags)
        args = parsed(call, monkeypatch, project)[1]
        assert args.advantage == advantage
        assert args.model == "real/fashion/model"
        mix = sources.load_rewards(args)
        rules = [
            (label, spec.rpartition(":")[2], weight)
            for label, weights in mix.recipe.items()
            for spec, weight in weights.items()
        ]
        assert rules == [("*", "named", 1), ("grey", "grey", 0), ("another", "another", 0)]


@pytest.mark.parametrize("model", ["", "a model"])
def test_the_stages_of_a_judge_fit_together(launch, monkeypatch, tmp_path, model):
    """Each begins with what an earlier one wrote, and every flag is accepted."""
    environment = (
        dict(MODEL=model, COLD="c.jsonl", DATA="d.jsonl", EVAL_DATA="e.jsonl") if model else {}
    )
    calls = [
        parsed(call, monkeypatch, tmp_path / "a project")
        for call in launch("judges/judge_loop.sh", "--seed 7", OUT="o", **environment)
    ]
    start, cold_data, data, held = (
        ["a model", "c.jsonl", "d.jsonl", "e.jsonl"]
        if model
        else ["o/toy/model", "o/pairs/cold.jsonl", "o/pairs/train.jsonl", "o/pairs/eval.jsonl"]
    )
    cold, right, rl = (f"o/{stage}/export/latest" for stage in ("cold", "right", "rl"))
    stages = [
        (
            script is ppo,
            args.model,
            args.data,
            args.eval_data,
            str(args.out.relative_to(Path.cwd())),
        )
        for script, args in calls
    ]
    assert stages == [
        (True, start, "", held, "o/start-table"),
        (False, start, cold_data, "", "o/cold"),
        (True, cold, "", held, "o/cold-table"),
        (True, cold, "", data, "o/judged"),
        (False, cold, "o/right.jsonl", "", "o/right"),
        (True, right, "", held, "o/right-table"),
        (True, right, "o/wrong.jsonl", "", "o/rl"),
        (True, rl, "", held, "o/rl-table"),
    ]
    assert {args.seed for _, args in calls} == {7}
    assert [args.eval_only for script, args in calls if script is ppo] == [
        True,
        True,
        True,
        True,
        False,
        True,
    ]
    if model:
        with pytest.raises(AssertionError, match="EVAL_DATA: held-out pairs"):
            launch("judges/judge_loop.sh", MODEL="m", COLD="c", DATA="d")


@pytest.mark.parametrize(
    "name, script", [("geo3k_grpo.sh", "ppo"), ("grm_7b.sh", "grm"), ("grm_rl.sh", "ppo")]
)
def test_a_recipe_for_another_model_under_slurm(launch, monkeypatch, tmp_path, name, script):
    """The recipe submits the job script, and the job script hands every flag to the trainer."""
    (call,) = launch(
        name,
        "--steps 3",
        MODEL="small model",
        JUDGE="small model",
        OUT="runs/small",
        DATA="d",
        EVAL_DATA="e",
        LAUNCH=f"sbatch --nodes 2 --gpus-per-node 8 launch/train.slurm train_{script}_vl.py",
    )
    assert call[:6] == words("sbatch", "--nodes 2 --gpus-per-node 8 launch/train.slurm")
    (step,) = launch(
        "train.slurm",
        *call[6:],
        SLURM_JOB_ID="5",
        SLURM_NNODES="2",
        SLURM_JOB_NAME="train",
        SLURM_GPUS_ON_NODE="8",
        MASTER_ADDR="node",
    )
    assert step[0] == "srun"
    assert step[step.index("--nnodes") + 1] == "2"
    assert step[step.index("--nproc_per_node") + 1] == "8"
    trainer, args = parsed(step, monkeypatch, tmp_path / "a project")
    assert trainer.__name__ == f"train_{script}_vl"
    assert args.steps == 3
    assert args.model == "small model"
    assert args.out == Path.cwd() / "runs/small"


CUP = {"boxes": [[2, 2, 40, 30]]}
PERCEPTION = {
    "grounding.sh": (
        "refcoco_train refcocop_train refcocog_train refcoco_val",
        [{"prompt": "the cup", "regions": CUP}],
    ),
    "vero.sh": (
        "vero_600k_train.verl vero_600k_val.verl",
        [
            {"prompt": "where?", "label": "grounding", "regions": CUP},
            {"prompt": "click", "label": "clicking", "regions": CUP},
            {"prompt": "which?", "label": "multiple_choice", "answer": "B"},
            {"prompt": "how much?", "label": "numeric", "answer": "5", "tolerance": 0.0},
            {"prompt": "how many?", "label": "counting", "answer": "7"},
            {"prompt": "who?", "label": "list_string_match", "answer": "['a', 'b']"},
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PERCEPTION)
def test_recipes_of_perception_take_two_steps(tmp_path, qwen25, monkeypatch, name):
    """On a tiny model, with rows as convert.py writes them."""
    files, rows = PERCEPTION[name]
    noise(1).save(tmp_path / "a.png")
    rows = [
        row | {"images": ["a.png"], "ability": ability} for row, ability in zip(rows * 6, ABILITIES)
    ]
    for split in files.split():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(text)
    flags = """--steps 2 --prompts_per_step 6 --samples_per_prompt 2 --max_prompt_tokens 1024
        --max_new_tokens 8 --max_tokens_per_pack 4096 --overlong_buffer 4 --eval_every 2 --save_every 0"""
    (tmp_path / "note").write_text(NOTE)
    (tmp_path / "note").chmod(0o755)
    environment = {
        "MODEL": str(qwen25),
        "DATA": str(tmp_path),
        "OUT": str(tmp_path / "out"),
        "LAUNCH": f"{tmp_path}/note train_ppo_vl.py",
        "NOTED": str(tmp_path / "noted"),
        "JUDGE": "http://127.0.0.1:1/never_asked",
    }
    command = ["bash", str(ROOT / "launch" / name), *flags.split()]
    subprocess.run(command, env=os.environ | environment, check=True, timeout=60)
    (call,) = read_rows(tmp_path / "noted")
    monkeypatch.chdir(ROOT)
    ranks.run(ppo.main, call[call.index("train_ppo_vl.py") + 1 :])
    records = read_rows(tmp_path / "out" / "metrics.jsonl")
    steps = [record["step"] for record in records if "rollout/reward" in record]
    assert steps == [1, 2]


def test_a_job_needs_its_script(tmp_path):
    job = ["bash", str(ROOT / "launch" / "train.slurm"), "train_none_vl.py"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    result = subprocess.run(
        job, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "submit it by sbatch" in result.stderr
    assert not (tmp_path / "logs").exists()
    variables |= {"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "train"}
    assert subprocess.run(job, cwd=tmp_path, env=variables, timeout=60).returncode == 2
    assert (
        "the first argument must be the script" in (tmp_path / "logs" / "train-5.out").read_text()
    )


SRUN = """#!/usr/bin/env bash
while [ "$1" != --output ]; do shift; done
exec >> "$2" 2>&1
shift 4    # with --open-mode append
exec "$@"
"""


def test_a_job_without_torchrun_says_so(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    (tmp_path / "train_ppo_vl.py").touch()
    variables = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NAME": "train",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "1",
        "MASTER_ADDR": "node",
    }
    job = ["bash", str(ROOT / "launch" / "train.slurm"), "train_ppo_vl.py", "--out", "run"]
    assert subprocess.run(job, cwd=tmp_path, env=variables, timeout=60).returncode == 127
    told = (tmp_path / "logs" / "train-5.out").read_text()
    assert "srun ended with code 127; logs/train-5-0.log ends with:" in told
    assert "torchrun: not found" in told.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpu, offered, wanted",
    [
        (False, "2.15.0, 2.13.0+cpu, 2.12.0+cpu", ["torch==2.13.0+cpu"]),
        (True, "2.15.0, 2.13.0+cpu", []),
        (False, "2.15.0, 2.13.0", []),
    ],
)
def test_a_build_for_cpus_is_installed_where_there_is_one_and_no_gpu(
    tmp_path, gpu, offered, wanted
):
    for folder in ("bin", ".venv/bin", "launch"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "launch" / "setup.sh").write_text((ROOT / "launch" / "setup.sh").read_text())
    (tmp_path / "requirements.txt").write_text("torch>=2.11,<2.16\n")
    (tmp_path / ".venv" / "bin" / "activate").touch()
    for tool in ("bash", "cat", "grep", "head"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    pip = tmp_path / ".venv" / "bin" / "python"
    pip.write_text(
        f'#!/bin/sh\n[ "$3" = index ] && echo "Available versions: {offered}" || echo "$@" >> noted\n'
    )
    programs = [pip, tmp_path / "bin" / "nvidia-smi"][: 1 + gpu]
    for program in programs:
        program.touch()
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", "set -euo pipefail; source launch/setup.sh pytest"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "noted").read_text().split()
    assert asked[-1] == "pytest"
    assert [word for word in asked if word.startswith("torch")] == wanted


PACKAGES = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "safetensors": "0.8.0",
    "pillow": "12.0",
    "numpy": "2.4",
    "tqdm": "4.67",
    "tensorboard": "2.20",
    "pytest": "9.0",
}


@pytest.fixture
def machine(tmp_path):
    """machine(packages, *names): a project, and on the PATH a Python that has these packages, under
    these names. Returns what sources launch/setup.sh there: the output, with the Python in use in
    its last line. Into .venv nothing can be installed before the file ``index`` is there."""
    project, tools, site = tmp_path / "project", tmp_path / "tools", tmp_path / "site"
    for folder in (project / "launch", project / ".venv" / "bin", tools, site):
        folder.mkdir(parents=True)
    for name in ("launch/setup.sh", "requirements.txt"):
        (project / name).write_text((ROOT / name).read_text())
    (project / ".venv" / "bin" / "activate").write_text("PATH=$PWD/.venv/bin:$PATH\n")

    def write_program(path: Path, text: str):
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def machine(packages: dict[str, str], *names: str):
        # not by find_spec, at which setuptools stands back for the rest of the process: Inductor
        # cannot import it then
        (site / "pip").symlink_to(importlib.metadata.distribution("pip").locate_file("pip"))
        for name, version in packages.items():
            info = site / f"{name}-{version}.dist-info" / "METADATA"
            info.parent.mkdir()
            info.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for name in names:
            write_program(tools / name, f'PYTHONPATH={site} exec {sys.executable} -sS "$@"')
        for tool in ("bash", "cat", "grep", "head", "sleep", "flock"):
            if shutil.which(tool):
                (tools / tool).symlink_to(shutil.which(tool))
        write_program(
            project / ".venv" / "bin" / "python",
            '[ "$3" = install ] || exit 0\necho installed >> noted\nsleep 1\n[ -f index ]',
        )
        return set_up

    def set_up(**variables: str) -> subprocess.Popen:
        line = "set -euo pipefail; source launch/setup.sh pytest; python --version >&2; command -v python"
        environment = {
            "PATH": str(tools),
            "PIP_FIND_LINKS": str(tmp_path),
            "PIP_CONSTRAINT": "none.txt",
        } | variables
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=project,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return machine


@pytest.mark.parametrize(
    "torch, names",
    [
        ("2.11.0", ["python", "python3"]),
        ("2.13.0", ["python3"]),
        ("2.11.0a0+5228986c39.nv26.1", ["python"]),
        ("2.15.1a0", ["python"]),
    ],
)
def test_an_environment_that_has_everything_is_used(machine, tmp_path, torch, names):
    """As it is, and not .venv; a vendor's build of a torch in the range is one. Settings of pip do
    not matter."""
    text, _ = machine(PACKAGES | {"torch": torch}, *names)().communicate(timeout=60)
    assert text.startswith(
        f"using {tmp_path / 'tools' / names[0]}, which has all packages\nPython 3.1"
    )
    assert not list((tmp_path / "project").glob("noted"))


@pytest.mark.slow
def test_without_an_index_the_missing_packages_are_named(machine, tmp_path):
    packages = PACKAGES | {"torch": "2.16.0a0", "transformers": "5.16.2"}
    del packages["tqdm"], packages["pytest"]
    missing = "torch>=2.11,<2.16 transformers>=5.17,<6 tqdm pytest"
    process = machine(packages, "python")()
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert text.endswith(
        "error: pip could not install into .venv, see above. Without a package index, "
        "an environment with all "
        f"packages is needed; {tmp_path / 'tools' / 'python'} lacks: {missing}\n"
    )
    assert not (tmp_path / "project" / ".venv" / "installed").exists()


@pytest.mark.slow
def test_the_venv_is_made_once_and_gives_way_to_an_active_environment(machine, tmp_path):
    """Also by two nodes that share the folder; the second one waits for the first."""
    project = tmp_path / "project"
    set_up = machine(PACKAGES | {"torch": "2.10.0"}, "python", "python3")
    (project / "index").touch()
    for processes in (
        [set_up(), set_up()],
        [set_up()],
        [set_up(VIRTUAL_ENV=str(tmp_path / "other"))],
    ):
        for process in processes:
            text, _ = process.communicate(timeout=120)
            assert process.returncode == 0, text
            assert text.endswith(f"{project}/.venv/bin/python\n")
    assert (project / "noted").read_text() == "installed\n"
    (info,) = (tmp_path / "site").glob("torch*/METADATA")
    info.write_text(info.read_text().replace("2.10.0", "2.13.0"))
    for variables, python in (
        ({}, project / ".venv/bin/python"),
        ({"CONDA_PREFIX": str(tmp_path)}, tmp_path / "tools/python"),
    ):
        text, _ = set_up(**variables).communicate(timeout=60)
        assert text.endswith(f"{python}\n")
