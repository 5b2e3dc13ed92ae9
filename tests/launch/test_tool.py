"""The tools end as the scripts do: whatever their files and flags hold, a tool does its work, or
one message says what is wrong, and the exit code is 2."""

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train_grm_vl as grm
import train_ppo_vl as ppo
from common.flags import fields_of, groups_of
from conftest import ROOT, read_rows, table, user_error, words, write_rows
from helpers import PYTHONS_WORDS
from launch import chat, page, plan
from launch.data import convert
from launch.judges import judge_filter, judge_table

PROGRAMS = sorted(
    path
    for folder in (ROOT / "launch", ROOT / "tests" / "benchmarks")
    for path in folder.glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
SCRIPTS = [ROOT / "train_ppo_vl.py", ROOT / "train_grm_vl.py"]
# Starts programs, each in a process of its own, in which no module of ours has been imported. A program
# without flags is only imported.
STARTING = """
import json, os, runpy, sys
import torch.distributed.fsdp, torch.utils.tensorboard
import transformers.convert_slow_tokenizer, transformers.generation.utils
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl
for program, *flags in json.load(sys.stdin):
    if not os.fork():
        sys.argv, sys.path[0] = [program, *flags], os.path.dirname(program)
        code = 0
        try:
            runpy.run_path(program, run_name="__main__" if flags else "imported")
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush()
        os._exit(code)  # an ordinary exit would free all that was imported, for a second
    assert os.wait()[1] == 0, [program, *flags]
"""
# Of plan.py: the flags of every group stand in one of these.
PLANS = table("""
ppo | --lora_rank 4 --rollout_shards 2 --gradient_checkpointing on --eval_data ROWS --min_pixels 9 --hsdp 2
ppo | --train_vision --ptx_data LEARNED --ptx_coef 0.1 --perception_coef 0.01 --ema_beta 0.9 --offload all
ppo | --teacher_model self --teacher_in loss --reward_recipe {"*":[["exact",1]]} --save_every 1
ppo | --env ENV:Zoom --reward env --advantage grpo --kl_coef 0.1 --dynamic_sampling 2 --warmup_steps 1
    --samples_per_prompt 2
grm | --lora_rank 4 --eval_data LEARNED --eval_max_new_tokens 8 --orders given --lr 1e-4 --warmup_steps 1
    --save_every 1 --hsdp 2
""")


def start(folder, *commands: list) -> str:
    """What these programs print, one after the other. They must end with 0."""
    result = subprocess.run(
        [sys.executable, "-c", STARTING],
        input=json.dumps([words(*command) for command in commands]),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_programs_start(tmp_path):
    """All of launch/ and both scripts show their help, the scripts also that of each group of flags."""
    can_start = importlib.util.find_spec("math_verify")
    programs = [path for path in PROGRAMS if path.stem != "reward_math" or can_start]
    assert len(programs) > 20
    tools = [path for path in programs if "launch" in path.parts]
    others = [[path] for path in programs if path not in tools]
    helped = [[path, "--help"] for path in (*tools, *SCRIPTS)]
    for script, module in zip(SCRIPTS, (ppo, grm)):
        helped += [[script, "--help", group] for group in groups_of(module.Args)]
    told = start(tmp_path, *others, *helped)
    assert told.count("usage:") == len(helped)


@pytest.mark.slow
def test_a_plan_starts_with_each_group_of_flags(tmp_path, qwen25, picture_rows):
    rows = Path(picture_rows)
    learned = rows.with_name("learned.jsonl")
    write_rows(learned, [row | {"response": "one"} for row in read_rows(rows)])
    zoom = ROOT / "launch" / "environments" / "zoom.py"
    names = {"ROWS": rows, "LEARNED": learned, "ENV": zoom}
    line = "--model", qwen25, "--max_prompt_tokens 256 --max_tokens_per_pack 2048 --data"
    commands = []
    for script, more in PLANS:
        for name, path in names.items():
            more = more.replace(name, str(path))
        data = rows if script == "ppo" else learned
        commands.append([ROOT / "launch" / "plan.py", script, "--", *line, data, more])
    told = start(tmp_path, *commands)
    assert told.count("GiB per GPU") == len(PLANS)


@pytest.mark.parametrize("script", ["ppo", "grm"])
def test_the_plans_have_flags_of_every_group(script):
    named = {
        word for name, line in PLANS if name == script for word in re.findall(r"--(\w+)", line)
    }
    for name, group in groups_of({"ppo": ppo, "grm": grm}[script].Args).items():
        assert named & fields_of(group).keys(), name


def test_a_reward_without_its_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        ModuleNotFoundError, match="math_verify.*; to install it: pip install math-v"
    ):
        runpy.run_path(str(ROOT / "launch" / "reward_math.py"))


DEEP = b"[" * 5000 + b"]" * 5000
FILES = {
    "missing": None,
    "folder": "folder",
    "a picture": b"\x89PNG\r\n\x1a\n\0\xff" + bytes(range(256)) + b"\n",
    "Latin-1": b'{"prompt": "caf\xe9"}\n',
    "half of UTF-16": '{"prompt": "x"}\n'.encode("utf-16")[:-1],
    "no objects": b'3\n[1]\nnull\n"x"\n',
    "an odd line": b'{}\n{"prompt"\n',
    "deep": DEEP + b"\n",
    "deep inside": b'{"a": ' + DEEP + b"}\n",
    "escapes": b'{"\\u001b[2J\\nerror: all is well": "\\u202e"}\n',
    "a long number": b'{"step": ' + b"9" * 5000 + b"}\n",
}
ODD = [
    None,
    True,
    -1,
    2**80,
    10**400,
    1.5,
    float("nan"),
    "",
    "x",
    "\x1b[2J",
    [],
    [1, 2, 3],
    [None],
    {},
    {"x": []},
]


def place(path, content):
    """Put one of FILES there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)


def ending(capsys, program, *line) -> int:
    """How a tool ended; asserts that it did so in our words, and in one message."""
    code = 0
    try:
        program([str(word) for word in line])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert not re.search(r"[^\n\t -\x7e\xa0-\uffff]|\u202e", out + err)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (code == 2), (code, err)
    assert not re.search(PYTHONS_WORDS, "".join(errors))
    assert len(err) < 3000
    return code


@pytest.mark.parametrize("tool", [chat, convert, judge_filter, judge_table, page])
def test_help_is_the_docstring(capsys, tool):
    with pytest.raises(SystemExit) as ended:
        tool.main(["--help"])
    assert ended.value.code == 0
    assert tool.__doc__.strip() in capsys.readouterr().out


@pytest.mark.parametrize("name", FILES)
def test_files_of_any_kind(tmp_path, capsys, name):
    """As the metrics or the answers of a run, as its judgements, and as rows, under every suffix."""
    run, answers, out = tmp_path / "run", tmp_path / "answers", tmp_path / "page.html"
    place(run / "metrics.jsonl", FILES[name])
    # of what cannot be read, a page says how much it was
    no_run = name in ("missing", "folder")
    assert ending(capsys, page.main, run, "--out", out) == (2 if no_run else 0)
    place(answers / "samples" / "eval-000001.jsonl", FILES[name])
    (answers / "metrics.jsonl").write_text('{"step": 1, "rollout/reward": 0.5}\n')
    assert ending(capsys, page.main, answers, "--out", out) == 0
    assert ending(capsys, judge_table.main, answers) == 2
    assert (
        ending(
            capsys, judge_filter.main, answers, "--right", tmp_path / "a", "--wrong", tmp_path / "b"
        )
        == 2
    )
    for suffix in (".jsonl", ".json", ".parquet"):
        place(tmp_path / f"rows{suffix}", FILES[name])
        assert (
            ending(capsys, convert.main, tmp_path / f"rows{suffix}", "--out", tmp_path / "out") == 2
        )
        assert not (tmp_path / "out").exists()


def test_metrics_and_samples_of_any_shape(tmp_path, capsys):
    samples, out = tmp_path / "samples" / "eval-000001.jsonl", tmp_path / "page.html"
    samples.parent.mkdir()
    record = {"question": "q", "response": "r", "sample": 0, "response_length": 1, "images": []}
    for value in ODD:
        lines = [{"type": "header", "arguments": value}, {"step": value}, {"step": 1, "x/y": value}]
        write_rows(tmp_path / "metrics.jsonl", lines)
        fields = (*record, "reward", "reference", "conversation", "per_token", "regions", "source")
        write_rows(samples, [record | {field: value} for field in fields])
        assert ending(capsys, page.main, tmp_path, "--out", out) == 0, value


@pytest.mark.parametrize(
    "flags",
    [
        "--gpus -3",
        "--gpus 0",
        "--gpus 2.5",
        "--gpus many",
        "--gib nan",
        "--gib -80",
        "--gib 0",
        "--gib inf",
        "--gib 1e400",
        "--gpus 99999999999999999999",
    ],
)
def test_a_plan_is_of_possible_machines(flags):
    with user_error(flags.split()[0]):
        plan.main(words("ppo", flags, "--", "--model", "none"))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_checkpoint_does_not_talk(tmp_path, qwen25, capsys, file):
    shutil.copytree(qwen25, tmp_path / "model")
    (tmp_path / "model" / file).write_bytes(b"\xff" * 9)
    with pytest.raises(SystemExit) as stop:
        chat.main(words(tmp_path / "model", "hello"))
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "1e9"])
def test_a_chat_says_something(capsys, limit):
    with pytest.raises(SystemExit) as stop:
        chat.main(["folder", "hello", "--max_new_tokens", limit])
    assert stop.value.code == 2
    assert "argument --max_new_tokens: " in capsys.readouterr().err


def test_ctrl_c_ends_a_tool_without_a_traceback(tmp_path):
    code = "from launch import tool\nwith tool.one_message(): raise KeyboardInterrupt"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (130, b"")
