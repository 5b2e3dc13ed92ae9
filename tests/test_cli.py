"""The command line: every flag is read and documented, what cannot work is refused at once, and
real launches."""

import hashlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common import flags as common_flags
from common import losses
from common.flags import ModelArgs
from common.ground import process, toy, versions
from common.model import attention, build
from conftest import read_json, read_rows, table, user_error, words

SCRIPT = Path(ppo.__file__)
ROOT = SCRIPT.parent
GROUPS = common_flags.groups_of(ppo.Args)  # by stage
FIELDS = [
    (group, field)
    for group, kind in GROUPS.items()
    for field in common_flags.fields_of(kind).values()
]
NEEDED = words("--model m --data d.jsonl")  # parse_args looks at neither


# ------------------------------------------------------------------------------------------------ every flag
def test_flags_of_the_pages_can_be_typed():
    """With their values, as `--offload all`, and in commands; N and %a stand for a number."""
    parsers = {script.__name__: common_flags.build_parser(script.Args, "") for script in (ppo, grm)}
    lines = []  # with the parsers of which one must take it
    for page in ("README.md", "common/README.md", "launch/README.md"):
        text = (ROOT / page).read_text().replace("\\\n", " ")
        for code in re.findall(r"`(--[a-z][^`\n]* [^`\n]*)`", text):
            names = {word[2:] for word in code.split() if word.startswith("--")}
            taking = [each for each in parsers.values() if names <= each.fields.keys() | {"config"}]
            if taking:
                lines.append((code.partition("\\|")[0], taking))
        for name, line in re.findall(r"^[^`\n]*(train_\w+_vl)\.py (--[^`\n]*)", text, re.MULTILINE):
            lines.append((line.partition("#")[0], [parsers[name]]))
    for line, taking in lines:
        typed = ["1" if word in ("N", "%a") else word for word in shlex.split(line)]
        problems = [problem_of(each, typed) for each in taking]
        assert "" in problems, (line, problems)
    assert len(lines) > 60


def problem_of(parser: common_flags.Parser, line: list[str]) -> str:
    try:
        parser.parse_args(line)
    except process.UserError as error:
        return str(error)
    return ""


def test_paths_become_absolute(tmp_path, monkeypatch):
    """args.json can then be read from any folder, and names one export where `latest` moves on."""
    for name in (
        "judge/config.json",
        "a.jsonl",
        "b.jsonl",
        "my.py",
        "exact",
        "out/export/step-7/config.json",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "out" / "export" / "latest").write_text("step-7\n")
    monkeypatch.chdir(tmp_path)
    expected = {
        "./judge": f"{tmp_path}/judge",
        "out/export/latest": f"{tmp_path}/out/export/step-7",
        "Qwen/Qwen2.5-VL-7B-Instruct": "Qwen/Qwen2.5-VL-7B-Instruct",
        "a.jsonl:0.7,b.jsonl:0.3": f"{tmp_path}/a.jsonl:0.7,{tmp_path}/b.jsonl:0.3",
        "exact,grm:./judge,my.py:score": f"exact,grm:{tmp_path}/judge,{tmp_path}/my.py:score",
        "judge": f"{tmp_path}/judge",
        '{"*": [["grm:judge", 0.5], ["my.py:score", 1]]}': f'{{"*": [["grm:{tmp_path}/judge", 0.5], '
        f'["{tmp_path}/my.py:score", 1]]}}',
        "http://127.0.0.1:8000/score": "http://127.0.0.1:8000/score",
        "exact": "exact",
        "": "",
    }
    assert {text: common_flags.absolute_paths(text) for text in expected} == expected
    args = ppo.parse_args(words("--model ./judge --data a.jsonl --advantage grpo"))
    assert (args.model, args.data) == (f"{tmp_path}/judge", f"{tmp_path}/a.jsonl")


def help_of(capsys, *stage: str) -> str:
    with pytest.raises(SystemExit) as stop:
        ppo.parse_args(["--help", *stage])
    assert stop.value.code == 0
    return capsys.readouterr().out


def shown(text: str) -> set[str]:
    """The flags of a help text."""
    return {
        field.name
        for _, field in FIELDS
        if re.search(rf"^  --{field.name}[ ,]", text, re.MULTILINE)
    }


def test_help_lists_every_flag_with_its_default(capsys):
    text = help_of(capsys, "all")
    squeezed = "".join(text.split())  # argparse wraps lines, also at hyphens
    assert shown(text) == {field.name for _, field in FIELDS}
    for group, field in FIELDS:
        entry = f"{field.metadata['help']} (default: {field.default!s:.60})"
        assert "".join(entry.split()) in squeezed, field.name
    places = [
        re.search(rf"^{re.escape(kind.__doc__)}:$", text, re.MULTILINE).start()
        for kind in GROUPS.values()
    ]
    assert places == sorted(places)
    assert "--config FILE" in text


def test_help_shows_what_most_runs_touch_and_the_rest_by_stage(capsys):
    text = help_of(capsys)
    assert shown(text) == {field.name for _, field in FIELDS if field.name in common_flags.OFTEN}
    assert 30 <= len(shown(text)) <= 35
    assert GROUPS["perception"].__doc__ not in text
    by_stage = [shown(help_of(capsys, stage)) for stage in GROUPS]
    assert by_stage == [common_flags.fields_of(kind).keys() for kind in GROUPS.values()]
    known = common_flags.fields_of(ppo.Args) | common_flags.fields_of(grm.Args)
    assert set(common_flags.OFTEN) <= known.keys()
    with user_error("invalid choice: 'nonsense'"):
        ppo.parse_args(["--help", "nonsense"])


HELPING = """
import os, runpy, sys
import torch
for script in sys.argv[1:]:
    if not os.fork():
        sys.argv = [script, "--help"]
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            files = [name for name in sys.modules if getattr(sys.modules[name], "__file__", "")]
            print(*sorted(files))
        break
    assert not os.wait()[1]
"""


@pytest.mark.slow
def test_help_imports_no_models():
    """What takes seconds to import is a mock then. In processes of their own, with torch alone."""
    result = run(["-c", HELPING, ROOT / "train_ppo_vl.py", ROOT / "train_grm_vl.py"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n  --prompts_per_step INT") == 2
    imported = [line.split() for line in result.stdout.splitlines() if " torch.nn " in line]
    assert len(imported) == 2
    heavy = ("transformers", "torch.distributed.tensor", "torch._dynamo")
    assert not [name for names in imported for name in names if name.startswith(heavy)]


def test_defaults_are_consistent():
    """The defaults, with the two flags that have none, pass their own checks."""
    defaults = ppo.Args(model="m", data="d.jsonl", out=Path.cwd() / "runs/<time>")
    assert ppo.parse_args(NEEDED) == common_flags.override(defaults, {})


STATED = {
    "advantage": "gae",
    "advantage_clip": 0.0,
    "dual_clip": 3.0,
    "eval_samples": 1,
    "export_every": -1,
    "gradient_checkpointing": "auto",
    "importance_cap": 0.0,
    "loss_aggregation": "token-mean",
    "on_bad_row": "error",
    "replay_experts": True,
    "resume": "auto",
    "reward": "boxed",
    "train_vision": False,
}


def test_defaults_that_the_pages_state():
    args = ppo.parse_args(NEEDED)
    assert {name: getattr(args, name) for name in STATED} == STATED


def test_a_flag_reaches_its_field():
    """One other value for every flag."""
    for group, field in FIELDS:
        value = {str: "m", int: 1, float: 0.75, bool: not field.default, Path: "other"}[field.type]
        value = next((c for c in field.metadata["choices"] if c != field.default), value)
        line = [f"--{field.name}", str(value)]
        if field.type is bool:
            line = [f"--{'' if value else 'no-'}{field.name}"]
        parsed = vars(common_flags.build_parser(ppo.Args, "").parse_args(line))
        assert parsed == {field.name: Path(value) if field.type is Path else value}, field.name


# ------------------------------------------------------------------------------------------------ refusals
REFUSED = dict(
    table("""
--nonsense 1                                  | unrecognized arguments: --nonsense 1
--step 5                                      | unrecognized arguments: --step 5; did you mean --steps?
--actor_rl 1 --samples_per_promt 2            | --samples_per_promt: did you mean --samples_per_prompt?
--report_to wandb
    | --report_to wandb; metrics go to <out>/metrics.jsonl and TensorBoard
--use_vllm --push_to_hub                      | --use_vllm: the actor itself samples
--use_vllm true --push_to_hub                 | --push_to_hub: nothing is pushed; hf upload NAME
--trainer.logger console --do_train           | --do_train: a run trains; --eval_only does not
stray                                         | unrecognized arguments: stray
--steps                                       | --steps: expected one argument
--steps 1.5                                   | --steps: invalid int value: '1.5'
--gamma nan                                   | --gamma nan must be at least 0
--actor_lr inf                                | --actor_lr inf must be at most 1e+300
--actor_lr one                                | --actor_lr: invalid float value: 'one'
--advantage ppo                               | invalid choice: 'ppo'
--steps 0                                     | --steps 0 must be at least 1
--seed 100000000000000000000000               | --seed 100000000000000000000000 must be at most 4294967295
--timeout 1e18                                | --timeout 1e+18 must be at most 10000000
--gamma 1.5                                   | --gamma 1.5 must be at most 1
--temperature 0                               | --temperature 0.0 must be at least 1e-06
--prompts_per_step 10 --minibatches 4         | --minibatches 4 must divide --prompts_per_step 10
--prompts_per_step 10 --rollouts_per_step 4   | --rollouts_per_step 4 must divide --prompts_per_step 10
--rollouts_per_step 4 --dynamic_sampling 3    | --rollouts_per_step 4 exceeds --dynamic_sampling 3
--advantage grpo --samples_per_prompt 1       | --samples_per_prompt 1 must be at least 2
--advantage grpo --export_critic              | --export_critic True needs a critic
--advantage grpo --critic_model m             | --critic_model m needs a critic, and --advantage grpo has none
--advantage grpo --gae_alpha 0.1              | --gae_alpha need --advantage gae
--advantage bi_level_gae --gae_lambda_policy 0.9 | --gae_alpha need --advantage gae
--advantage grpo --turn_gamma 0.9             | --turn_gamma 0.9 needs --advantage bi_level_gae
--advantage gdpo --samples_per_prompt 1       | --samples_per_prompt 1 must be at least 2
--advantage gdpo --reward exact,boxed --reward_combiner m.py:f
    | --advantage gdpo excludes --reward_combiner: gdpo compares the sources
--advantage gdpo --reward_norm --overlong_buffer 5
    | --advantage gdpo excludes --overlong_buffer: gdpo compares the sources
--advantage gdpo --dynamic_sampling 2
    | --advantage gdpo excludes --dynamic_sampling: gdpo compares the sources
--policy_loss sapo --clip_high 1              | --policy_loss sapo excludes --clip_low and --clip_high: sapo has a soft gate
--perception_ratio 0.4 --policy_loss gspo
    | --policy_loss gspo excludes --perception_ratio: it takes whole responses
--perception_ratio 0.4 --policy_loss gmpo     | --policy_loss gmpo excludes --perception_ratio
--perception_ratio 0                          | --perception_ratio 0.0 must be at least 1e-06
--perception_coef -1                          | --perception_coef -1.0 must be at least 0
--black_prob 0.5                              | did you mean --perception_mask?
--gae_lambda_policy -0.5                      | --gae_lambda_policy -0.5 must be at least 0, or -1
--gae_lambda_policy 0 --gae_alpha 0.05        | --gae_lambda_policy 0.0 excludes --gae_alpha
--advantage grpo --critic_warmup_steps 2      | --critic_warmup_steps
--freezing_actor_steps 2                      | did you mean --critic_warmup_steps?
--reference_model m                           | --reference_model m needs --kl_coef
--reference_every 5                           | --reference_every 5 needs --kl_coef
--reference_every 5 --kl_coef 0.1 --lora_rank 4 | --reference_every 5 excludes --lora_rank and --reference_model: the
--reference_every 5 --kl_coef 0.1 --reference_model m
    | --reference_every 5 excludes --lora_rank and --reference_model: the
--kl_target 0.1                               | --kl_target 0.1 needs --kl_coef
--kl_coef 0.1 --kl_target 0.1 --kl_horizon 20 | --kl_horizon
--kl_coef 0.1 --kl_in loss --kl_estimator k1  | the gradient of k1 averages to zero
--timeout 60                                  | --reward_timeout 60 must be below --timeout 60
--reward_timeout 1800                         | --reward_timeout 1800 must be below --timeout 1800
--min_new_tokens 9 --max_new_tokens 8         | --min_new_tokens 9 exceeds --max_new_tokens 8
--dual_clip 1                                 | --dual_clip 1.0 must be at least 1.000001, or 0
--max_tokens_per_pack 4607                    | --max_prompt_tokens + --max_new_tokens = 4608
--eval_only                                   | --eval_only needs --eval_data
--row_kind judgements --system_prompt x       | --system_prompt needs --row_kind prompts
--ptx_data p.jsonl                            | --ptx_data and --ptx_coef need each other
--ptx_coef 0.1                                | --ptx_data and --ptx_coef need each other
--train_vision true                           | unrecognized arguments: true; --train_vision takes no
--stop_strings [1]                            | expected a JSON list of non-empty strings
--stop_strings end                            | --stop_strings end: expected a JSON list of non-empty
--stop_strings [""]                           | expected a JSON list of non-empty strings
--template_options {enable_thinking:false}    | --template_options {enable_thinking:false}: not JSON
--template_options {"thinking":"false"}       | thinking is a text; true and false have no quotation marks
--template_options [1]                        | --template_options [1]: expected an object of JSON, such as {}
--data a.jsonl:0.5,b.jsonl                    | --data a.jsonl:0.5,b.jsonl:
""")
)  # no abbreviations; a horizon below a step's 128 samples would turn the weight of the KL negative


@pytest.mark.parametrize("line", REFUSED)
def test_refused_before_the_process_group(monkeypatch, line):
    def refuse(*_, **__):
        raise AssertionError("the process group came first")

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(process.UserError) as refusal:
        ppo.main([*NEEDED, "--", *line.split(" ")])
    assert REFUSED[line] in str(refusal.value)
    assert "unrecognized" in str(refusal.value) or "did you mean" not in str(refusal.value)


FOREIGN = table("""
ppo | --learning_rate 1e-6                  | --actor_lr
grm | --learning_rate 1e-6                  | --lr
ppo | --lr 1e-6                             | --actor_lr
grm | --actor_lr 1e-6                       | --lr
ppo | --max_completion_length 512           | --max_new_tokens
grm | --max_completion_length 512           | --eval_max_new_tokens
ppo | --beta 0.04                           | --kl_coef
ppo | --epsilon 0.2                         | --clip_high, --clip_low
ppo | --num_train_epochs 3                  | --steps
grm | --num_train_epochs 3                  | --max_epochs, --steps
ppo | --output-dir runs/x                   | --out
ppo | actor_rollout_ref.actor.optim.lr=1e-6 | --actor_lr
ppo | actor_rollout_ref.rollout.n=5         | --samples_per_prompt
ppo | algorithm.adv_estimator=grpo          | --advantage
ppo | --init_kl_coef 0.01                   | --kl_coef
ppo | --pretrain m                          | --model
ppo | --actor-lr 1e-6                       | --actor_lr
ppo | --temp 1                              | --temperature
grm | --chat_template_kwargs {}             | --template_options
""")  # script, what TRL, verl, OpenRLHF or LightRFT would take, our flags


@pytest.mark.parametrize("script, line, ours", FOREIGN)
def test_names_of_other_systems_are_answered_with_ours(script, line, ours):
    with user_error(re.escape(f"unrecognized arguments: {line}; did you mean {ours}?")):
        {"ppo": ppo, "grm": grm}[script].parse_args(line.split())


def test_suggested_flags_exist():
    flags_of = [common_flags.fields_of(script.Args) for script in (ppo, grm)]
    foreign = read_json(ROOT / "common" / "ground" / "foreign_flags.json")
    assert not [name for name in foreign["without"] for known in flags_of if name in known]
    for ours, others in foreign["ours"].items():
        with_ours = [known for known in flags_of if ours in known]
        assert with_ours, ours
        for foreign in others.split():
            assert any(foreign not in known for known in with_ours), foreign


def test_the_losses_of_the_flag_are_those_of_the_formulas():
    """The flag is declared before torch, and with it the formulas, is imported."""
    choices = {field.name: field.metadata["choices"] for _, field in FIELDS}
    assert choices["policy_loss"] == tuple(ppo.POLICY_LOSSES)
    assert choices["advantage"] == ("auto", *ppo.ESTIMATORS)
    for mode in choices["loss_aggregation"][1:]:
        assert losses.token_weights(torch.tensor([3, 1]), mode, 8).shape == (2,)
    # two names of one estimator; "none" is none
    assert len(set(ppo.ESTIMATORS.values())) - 1 == 14
    assert len(ppo.POLICY_LOSSES) == 6


def test_the_help_names_the_estimators_that_whiten():
    (named,) = (field.metadata["help"] for _, field in FIELDS if field.name == "advantages_norm")
    words_of_it = set(re.split(", | and ", named.partition("auto: on for ")[2]))
    assert words_of_it == {name for name, kind in ppo.ESTIMATORS.items() if kind.whiten}


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed"
)
def test_without_flash_attn_a_gpu_takes_varlen_and_says_how_to_build_it(monkeypatch, capsys):
    choose = attention.choose_backend
    monkeypatch.setattr(
        build,
        "choose_backend",
        lambda requested, *_: choose(requested, torch.device("cuda"), torch.bfloat16),
    )
    assert build.choose_compute(ModelArgs(), torch.device("cpu"), 64).backend == "varlen"
    why = "flash-attn cannot be used: No module named 'flash_attn'; to build it: pip install flash-attn"
    assert f"attention: varlen ({why}" in capsys.readouterr().out


def test_varlen_needs_a_gpu():
    with pytest.raises(ValueError, match="--attention varlen computes in bfloat16 on a GPU"):
        build.choose_compute(ModelArgs(attention="varlen"), torch.device("cpu"), 64)


@pytest.mark.parametrize(
    "version, told",
    [
        ("4.57.1", "error: transformers 4.57.1 is too old; 5.17 or newer is needed"),
        (
            "5.999.0",
            f"transformers 5.999.0 is newer than {versions.TRIED['transformers'][1]}, "
            "the newest that was tried",
        ),
        (f"{versions.TRIED['transformers'][1]}.9", ""),
    ],
)
def test_a_transformers_that_was_not_tried_is_named(tmp_path, version, told):
    """On rank 0, before anything of it is used."""
    folder = tmp_path / f"transformers-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n"
    )
    for rank in ("0", "1"):
        result = run(
            ["-c", "from common.ground import versions; versions.check()"],
            PYTHONPATH=f"{tmp_path}:{ROOT}",
            RANK=rank,
        )
        lines = [
            line for line in (result.stdout + result.stderr).splitlines() if "transformers" in line
        ]
        assert lines[-1:] == [told] * (told != "" and ("error" in told or rank == "0"))


def test_versions_that_were_tried_last_are_told(tmp_path):
    python = tmp_path / "python3.12"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo "$0"\n')  # makes no environment
    python.chmod(0o755)
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", ROOT / "tests" / "run.sh", "--versions"],
        env=variables,
        capture_output=True,
        text=True,
    )
    for name in ("torch", "transformers"):
        oldest, newest = versions.TRIED[name]
        assert f"tried last: {name} {newest} " in result.stdout
        assert f"{name}>={oldest}," in (ROOT / "requirements.txt").read_text()
    python, torch_, (oldest, _) = versions.TRIED.values()
    stated = (
        f"Python {' or '.join(python)}, torch {' to '.join(torch_)}, transformers {oldest} or later"
    )
    assert stated in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("line", ["--data d.jsonl --model=", "--model m"])
def test_model_and_data_are_needed_together(line):
    with user_error("--model and --data are needed together"):
        ppo.parse_args(line.split())


def test_a_toy_that_cannot_be_written_is_no_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(
        toy.subprocess, "run", lambda *_: subprocess.CompletedProcess((), returncode=2)
    )
    monkeypatch.setattr(toy, "ROOT", tmp_path)
    with user_error("toy.py did not write the embedded toy"):
        toy.write_if_missing(f"{tmp_path}/toy/model")


COUNTING = """
from pathlib import Path
with open(Path(__file__).with_name("starts"), "a") as file:
    file.write("once\\n")
def score(prompts, responses, references, labels, images):
    return [0.0] * len(responses)
"""


@pytest.mark.parametrize(
    "line, message",
    table("""
--gamma 1.5                          | --gamma 1.5 must be at most 1
--stop_strings end                   | --stop_strings end: expected a JSON list
--minibatches 3                      | --minibatches 3 must divide --prompts_per_step 32
--kl_target 1                        | --kl_target 1.0 needs --kl_coef
--reward exakt                       | --reward exakt: expected one of exact,
--reward exact,boxed                 | 2 sources need a --reward_recipe
--reward_recipe {                    | --reward_recipe {: expected {label:
--env PROGRAM.py:Missing             | Missing
--curriculum PROGRAM.py:score        | --curriculum PROGRAM.py:score:
--reward grm:./nowhere               | checkpoint ./nowhere: no such folder
--kl_coef 1 --reference_model ./none | checkpoint ./none: no such folder
--reward PROGRAM.py:score            | the toy is written now
"""),
)
def test_a_mistake_does_not_wait_for_the_toy(monkeypatch, tmp_path, line, message):
    """What is typed is checked with what the toy's flags add, before the toy is written; a program is
    started once, with a mistake or without."""

    def write(_):
        raise process.UserError("the toy is written now")

    monkeypatch.setattr(toy, "write_if_missing", write)
    program = tmp_path / "program"
    program.with_suffix(".py").write_text(COUNTING)
    line, message = (text.replace("PROGRAM", str(program)) for text in (line, message))
    with user_error(re.escape(message)):
        ppo.main(words(line, "--out", tmp_path / "out"))
    if "program" in line:
        assert (tmp_path / "starts").read_text() == "once\n"


def test_the_flags_of_the_toy_are_those_that_it_writes():
    for script, task, name in ((ppo, "describe", "args.json"), (grm, "questions", "grm_args.json")):
        args, folder = script.parse_args([]), ROOT / toy.TOY_FOLDERS[task]
        recorded = json.loads(json.dumps(toy.toy_flags(folder, task, name)))
        assert {flag: getattr(args, flag) for flag in recorded} == recorded


def test_two_machines_may_write_the_toy_at_the_same_time(monkeypatch, tmp_path):
    def second(*_):
        (tmp_path / "toy").mkdir()
        return subprocess.CompletedProcess((), returncode=1)

    monkeypatch.setattr(toy.subprocess, "run", second)
    monkeypatch.setattr(toy, "ROOT", tmp_path)
    toy.write_if_missing(f"{tmp_path}/toy/model")
    toy.write_if_missing(f"{tmp_path}/another/model")


def test_all_problems_are_told_at_once():
    with pytest.raises(process.UserError) as refusal:
        ppo.parse_args(NEEDED + "--steps 0 --gamma 2 --stop_strings x".split())
    assert str(refusal.value).count("\n") == 2
    with pytest.raises(process.UserError) as refusal:
        ppo.parse_args(NEEDED + "--minibatches 3 --kl_target 1 --turn_gamma 0.5".split())
    assert str(refusal.value).count("\n") == 2


def test_flags_that_are_no_contradiction():
    for line in (
        "--advantage reinforce++ --samples_per_prompt 1",
        "--dual_clip 0",
        "--max_tokens_per_pack 4608",
        "--prompts_per_step 12 --minibatches 4",
        "--min_pixels 9",
        '--stop_strings ["a","b"]',
        "--kl_coef 0.1 --kl_target 0.1 --reference_model m",
    ):
        ppo.parse_args(NEEDED + line.split())
    args = ppo.parse_args("--model m --eval_data e.jsonl --eval_only".split())
    assert args.eval_only
    assert not args.data


# ------------------------------------------------------------------------------------------------ --config
@pytest.mark.parametrize(
    "content, message",
    [
        (b"\xff\xfe\x00", "config"),
        *table("""
{"model": "m", "data": "d", "step": 3}  | unrecognized arguments: --step=3; did you mean --steps?
{"learning_rate": 1e-6}
    | unrecognized arguments: --learning_rate=1e-06; did you mean --actor_lr?
["--steps", "3"]                        | must be dict, not ['--steps', '3']
steps: 3                                | Expecting value
{"steps": 3.5}                          | argument --steps: invalid int value: '3.5'
{"steps": true}                         | argument --steps: expected one argument
{"gamma": NaN}                          | --gamma nan must be at least 0
{"advantage": "ppo"}                    | argument --advantage: invalid choice: 'ppo'
{"model": "m", "data": "d", "gamma": 3} | --gamma 3.0 must be at most 1
"""),
    ],
)
def test_bad_config_file(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(process.UserError) as refusal:
        ppo.parse_args(words("--config", path))
    assert message in str(refusal.value)


def test_the_record_of_another_scripts_run(tmp_path):
    """One message, not the names of all of its flags."""
    record = tmp_path / "args.json"
    record.write_text(json.dumps(common_flags.as_json(ppo.parse_args(NEEDED))))
    with user_error("args.json is of another script or version: .* such as --.*; start .*copy$"):
        grm.parse_args(["--config", str(record)])


def test_missing_config_file(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with user_error(str(path)):
            ppo.parse_args(words("--config", path))


def test_flags_override_config_override_defaults(tmp_path):
    config = tmp_path / "a.json"
    config.write_text(
        '{"model": "m", "data": "d.jsonl", "gamma": 1, "steps": 7, "save_blocking": true, "out": "here"}'
    )
    args = ppo.parse_args(words("--config", config, "--steps 9 --no-save_blocking"))
    assert (args.steps, args.save_blocking, args.data) == (
        9,
        False,
        "d.jsonl",
    )
    assert args.out == Path.cwd() / "here"  # before anything changes the folder
    assert isinstance(args.gamma, float)
    assert args.top_k == 0
    assert ppo.parse_args(words("--config", config, "--out there")).out == Path.cwd() / "there"


FOLLOWING = "advantages_norm loss_aggregation clip_low clip_high kl_estimator critic_epochs".split()
FOLLOWING += ["gae_lambda_policy", "advantage"]


@pytest.mark.parametrize("record", [common_flags.as_typed, common_flags.as_json])
def test_what_follows_from_other_flags_is_recorded_and_follows_them_again(tmp_path, record):
    """With another estimator or loss from the command line, those that follow from it are not of the
    recorded one, and what was chosen stays. Earlier versions recorded the values in force."""

    def parsed(*line: str) -> list:
        args = ppo.parse_args(words(*line))
        recorded = record(args)
        if record is common_flags.as_json:
            del recorded["keep_best"]  # which they did not know
        (tmp_path / "args.json").write_text(json.dumps(recorded))
        return [getattr(args, name) for name in FOLLOWING]

    again = ("--config", tmp_path / "args.json")
    first = parsed(*NEEDED, "--epochs 2 --gae_lambda 0.9 --clip_low 0.1")
    assert first == ["on", "token-mean", 0.1, 0.2, "k1", 2, 0.9, "gae"]
    assert parsed(*again) == first
    other = parsed(
        *again, "--advantage grpo --policy_loss gspo --kl_in loss --epochs 3 --gae_lambda 0.8"
    )
    assert other == ["off", "seq-mean-token-mean", 0.1, 4e-4, "k3+", 3, 0.8, "grpo"]
    assert parsed(*again, "--advantage gae --kl_estimator k2")[:5] == ["on", *other[1:4], "k2"]
    alone = parsed(*NEEDED, "--reward none --teacher_model m")
    assert (alone[-1], alone[0]) == ("none", "off")
    assert parsed(*again, "--reward exact")[-1] == "gae"


def test_a_choice_that_is_todays_default_stays(tmp_path):
    """Of a recorded run, and of a file that somebody has written."""
    chosen = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "advantages_norm": "on",
        "critic_epochs": 2,
        "kl_estimator": "k1+",
    }
    line = words(*NEEDED, "--epochs 2 --kl_estimator k1+ --critic_epochs 2 --advantages_norm on")
    args = ppo.parse_args([*line, *words("--clip_low 0.2 --clip_high 0.2")])
    path = tmp_path / "args.json"
    for recorded in (common_flags.as_typed(args), chosen | {"model": "m", "data": "d.jsonl"}):
        path.write_text(json.dumps(recorded))
        other = "--policy_loss gspo --advantage grpo --epochs 3"
        again = ppo.parse_args(words("--config", path, other))
        assert {name: getattr(again, name) for name in chosen} == chosen
        assert again.loss_aggregation == "seq-mean-token-mean"
    with user_error("--reward none excludes --advantage gae"):
        ppo.parse_args(words(*NEEDED, "--advantage gae --reward none --teacher_model m"))


def test_a_moved_run_writes_into_its_own_folder(tmp_path):
    """Also where the folder in which it began is still there; a file of another name says where."""
    old, new = tmp_path / "old", tmp_path / "new"
    recorded = common_flags.as_typed(ppo.parse_args([*NEEDED, "--out", str(old)]))
    for path in (old, new / "evaluation-step-3"):
        path.mkdir(parents=True)
    for path in (
        new / "args.json",
        new / "evaluation-step-3" / "args.json",
        tmp_path / "mine.json",
    ):
        path.write_text(json.dumps(recorded))
        wanted = old if path.name == "mine.json" else new
        assert ppo.parse_args(words("--config", path)).out == wanted
        assert ppo.parse_args(words("--config", path, "--out", old)).out == old
    config = new / "args.json"  # which somebody has written
    config.write_text(json.dumps({"model": "m", "data": "d.jsonl", "out": str(old)}))
    assert ppo.parse_args(words("--config", config)).out == old


def typed_values(script, folder: Path) -> dict[str, list]:
    """Values for every flag: one that is not its default, and what it stands for if it is not chosen."""
    special = {
        "image_root": str(folder),
        "template_options": '{"a": 1}',
        "stop_strings": '["x"]',
        "teacher_prompt": "{prompt} b",
        "columns": "prompt=a",
        "dual_clip": 2.5,
        "keep_best": "eval/loss",
        "profile_steps": "2-3",
        "out": folder / "other",
    }
    follows, values = script.Args().automatic(), {}
    for name, field in common_flags.fields_of(script.Args).items():
        value = {str: "m", float: 0.75}.get(field.type)
        if field.type is int:
            value = max(field.default, 1) + 1
        elif field.type is bool:
            value = not field.default
        value = next((c for c in field.metadata["choices"] if c != field.default), value)
        values[name] = [special.get(name, value)]
        if name in follows:
            values[name].append(follows[name])
    return values


@pytest.mark.parametrize("script", [ppo, grm])
def test_every_flag_is_read_back_as_it_was_typed(script, tmp_path):
    """Alone, and with any other flag changed: as if both had been typed together."""
    start = {"model": "m", "data": "d.jsonl", "out": tmp_path}
    first = common_flags.override(script.Args(), start)
    # of another name, as args.json says where it lies
    values, path = typed_values(script, tmp_path), tmp_path / "mine.json"
    for name, of_flag in values.items():
        for value in of_flag:
            typed = common_flags.override(first, {name: value})
            path.write_text(json.dumps(common_flags.as_typed(typed)))
            again = common_flags.parse(script.Args, "", ["--config", str(path)], ("", ""))
            assert again == typed, name
            alternatives = [pair for pair in common_flags.ALTERNATIVES if name in pair]
            for other in values.keys() - {name}.union(*alternatives):
                change = {other: values[other][0]}
                together = common_flags.override(first, {name: value} | change)
                assert common_flags.override(again, change) == together, (name, other)


def test_a_flag_that_takes_several_takes_them_at_once():
    """The last alone would count; of other flags it does."""
    line = "--model m --data a.jsonl --steps 3 --steps 4"
    with user_error("--data is given twice; commas separate several: --data a.jsonl,b.jsonl$"):
        ppo.parse_args(words(line, "--data b.jsonl"))
    with user_error("--reward is given twice; commas separate several: --reward exact,boxed$"):
        ppo.parse_args(words(line, "--reward exact --reward boxed"))
    with user_error("--config is given twice$"):
        ppo.parse_args(words(line, "--config a.json --config b.json"))
    assert ppo.parse_args(words(line)).steps == 4


def test_a_config_names_no_other_and_asks_for_no_help(tmp_path):
    for name in ("config", "help"):
        (tmp_path / "a.json").write_text(json.dumps({name: "all", "steps": 7}))
        with user_error(f"a.json: --{name} belongs on the command line$"):
            ppo.parse_args(words("--config", tmp_path / "a.json"))


def test_what_stands_behind_two_dashes_overrides_a_recipe():
    line = ["--model m --data a.jsonl --steps 3 --reward_recipe", '{"*": [["exact", 1]]}']
    args = ppo.parse_args(words(*line, "--", "--data b.jsonl --reward box"))
    assert (args.data, args.reward, args.reward_recipe, args.steps) == ("b.jsonl", "box", "", 3)
    with user_error("--data is given twice"):
        ppo.parse_args(words(*line, "--", "--data b.jsonl --data c.jsonl"))


def test_one_of_two_flags_that_stand_for_each_other_replaces_the_other_of_a_config(tmp_path):
    config = tmp_path / "a.json"
    config.write_text('{"model": "m", "data": "d.jsonl", "reward": "exact", "steps": 7}')
    args = ppo.parse_args(words("--config", config, "--reward_recipe", '{"*": [["answer", 1]]}'))
    assert (args.reward, args.steps) == ("boxed", 7)
    with user_error("--reward_recipe replaces --reward exact: give one of them"):
        ppo.parse_args(words("--config", config, "--reward exact --reward_recipe r.json"))
    config.write_text('{"model": "m", "data": "d.jsonl", "steps": 7}')

    def length(*line) -> tuple[int, int]:
        args = grm.parse_args(words(*line))
        return args.steps, args.max_epochs

    assert length("--config", config) == (7, 0)
    assert length("--config", config, "--max_epochs 3") == (0, 3)
    assert length(*NEEDED) == (0, 2)
    assert length(*NEEDED, "--steps 5") == (5, 0)
    assert length(*NEEDED, "--max_epochs 2 --steps 5") == (5, 2)  # which are not asked


# ------------------------------------------------------------------------------------------------
# real launches
def run(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        env=ranks.clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_one_message(result: subprocess.CompletedProcess, ours: str) -> None:
    """torchrun's last lines are the message, without a traceback; rank 0 may have printed it, too."""
    *_, root_cause = result.stderr.split("Root Cause (first observed failure):")
    assert result.returncode == 1 and re.search(r"exitcode *: 2 ", root_cause), result.stderr
    message, line = root_cause.rstrip().splitlines()[-2:]
    assert message.endswith(f"error: {ours}") and not line.strip("="), result.stderr
    assert (result.stdout + result.stderr).count(ours) <= 3  # and another worker
    assert SCRIPT.name + '", line' not in result.stderr


REFUSING = """
import os, time
from common import flags
from common.ground import process

def main():
    if os.environ["RANK"] == "0":
        time.sleep(1)
    flags.build_parser(flags.OptimArgs, None).read_flags(None)
process.run_main(main)
"""


@pytest.mark.slow
def test_two_ranks_refuse_a_bad_flag_with_one_message(tmp_path):
    """torchrun ends all workers as soon as one has ended: the message must come out even if rank 0
    is slower."""
    script = tmp_path / SCRIPT.name
    script.write_text(REFUSING)
    launcher = words("-m", "torch.distributed.run", "--standalone --nproc_per_node 2", script)
    result = run([*launcher, "--nonsense", "1"], PYTHONPATH=str(ROOT))
    assert_one_message(result, "unrecognized arguments: --nonsense 1")


def test_two_ranks_refuse_a_bad_row_with_one_message(tmp_path, qwen25):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "how many?"}\n{"prompt": "how many?", "images": ["none.png"]}\n')
    line = words(
        "--model", qwen25, "--data", rows, "--out", tmp_path / "out", "--prompts_per_step 2"
    )
    text = ranks.run(ppo.main, line, world=2, codes=[2, 2])
    assert text.count("error: ") == 1 == text.count(f"{rows}: 1 of 2 rows are bad")
    assert "Traceback" not in text
    assert f"rows.jsonl:2: no such image: {tmp_path / 'none.png'}" in text
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_mistake_that_all_ranks_meet_is_told_once(tmp_path, qwen25, picture_rows):
    (tmp_path / "typo.py").write_text(
        "def score(prompts, responses, *rest):\n    return [lenght(r) for r in responses]\n"
    )
    line = words(
        "--model",
        qwen25,
        "--data",
        picture_rows,
        "--out",
        tmp_path / "out",
        "--reward",
        tmp_path / "typo.py:score",
        "--prompts_per_step 2 --max_prompt_tokens 256 --max_new_tokens 4 --steps 1 --eval_every 0",
    )
    text = ranks.run(ppo.main, line, world=2, codes=[2, 2])
    assert text.count("it is called once more") == 2  # by each rank
    assert text.count("error: ") == 1
    assert "NameError: name 'lenght' is not defined" in text.partition("error: ")[2]


@pytest.fixture
def hub(qwen25, monkeypatch, tmp_path):
    """A model hub on loopback, with the checkpoint as someone/tiny; yields the files that it served."""
    served, commit = [], "0" * 40

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith("/api/models/someone/tiny/"):
                files = [
                    dict(
                        type="file",
                        rfilename=path.name,
                        path=path.name,
                        size=path.stat().st_size,
                        oid=path.name,
                    )
                    for path in qwen25.iterdir()
                ]
                listing = (
                    files
                    if "/tree/" in self.path
                    else {"id": "someone/tiny", "sha": commit, "siblings": files}
                )
                body = json.dumps(listing).encode()
            else:
                name = self.path.rpartition("/")[2]
                if not (qwen25 / name).is_file():
                    return self.send_error(404)
                body = (qwen25 / name).read_bytes()
                served.extend([name] if self.command == "GET" else [])
            self.send_response(200)
            for header, value in (
                ("Content-Length", len(body)),
                ("ETag", hashlib.sha1(body).hexdigest()),
                ("X-Repo-Commit", commit),
            ):
                self.send_header(header, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        yield served
        server.shutdown()


METRICS = """
rollout/response_length rollout/truncated rollout/reward_std rollout/accuracy_reward
rollout/total_length rollout/return rollout/episode rollout/global_step
train/policy_loss train/critic_loss train/actor_grad_norm train/critic_grad_norm train/approx_kl
train/clipped_low train/clipped_high train/clipped_dual train/ratio train/ratio_max train/entropy
train/explained_variance train/sampler_gap train/kl train/values train/returns train/actor_lr
train/critic_lr train/episode train/global_step
perf/rollout_seconds perf/update_actor_seconds perf/rollout_tokens_per_second
perf/update_tokens_per_second perf/peak_memory_gib
"""


PLAN_AND_RUN = """
import os, runpy, sys
from pathlib import Path
from launch import plan
plan.main(["ppo", "--gpus", "1", "--", *sys.argv[2:]])
print("weights:", *Path(os.environ["HF_HOME"]).rglob("model.safetensors"))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_plain_python_is_one_rank_from_end_to_end(tmp_path, hub, picture_rows):
    """With a model from the hub; a plan takes no weights from there."""
    flags = words(
        "--model someone/tiny --reward exact --max_prompt_tokens 512 --max_new_tokens 8 --prompts_per_step 2 "
        '--samples_per_prompt 2 --steps 2 --eval_every 0 --stop_strings ["x","yz"] --kl_coef 0.01',
        "--data",
        picture_rows,
        "--eval_data",
        picture_rows,
        "--out",
        tmp_path / "out",
        "--coordinates",
        "seen",
    )
    result = run(["-c", PLAN_AND_RUN, SCRIPT, *flags], PYTHONPATH=f"{ROOT}/launch:{ROOT}")
    assert result.returncode == 0, result.stderr
    planned, _, trained = result.stdout.partition("weights:")
    assert "GiB per GPU" in planned
    assert trained.startswith("\n")
    assert hub.count("model.safetensors") == 1
    assert "1 x " in result.stdout
    assert "step     2  " in result.stdout
    assert "done: " in result.stdout
    lines = read_rows(tmp_path / "out" / "metrics.jsonl")
    assert lines[0]["type"] == "header"
    assert lines[0]["environment"]["world_size"] == 1
    steps = [line for line in lines if "rollout/reward" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for name in METRICS.split():
        assert name in steps[1], name
    assert (
        AutoModelForImageTextToText.from_pretrained(
            tmp_path / "out" / "export" / "step-2"
        ).num_parameters()
        > 0
    )

    recorded = read_json(tmp_path / "out" / "args.json")
    assert recorded.keys() == {field.name for _, field in FIELDS}
    assert recorded["clip_low"] == -1 and lines[0]["arguments"]["clip_low"] == 0.2
    stood_for = {name for name in recorded if lines[0]["arguments"][name] != recorded[name]}
    assert stood_for == {*FOLLOWING}
    again = ppo.parse_args(words("--config", tmp_path / "out" / "args.json"))
    assert again == ppo.parse_args(flags)


@pytest.mark.parametrize("flag", ["--out", "--system_prompt"])
def test_letters_that_the_locale_has_not_are_one_message(flag):
    """As Python reads them with LC_ALL=POSIX and PYTHONUTF8=0: TensorBoard's folder, or the model's text,
    would have others."""
    with user_error(f"{flag} .* is not UTF-8, .* set PYTHONUTF8=1"):
        ppo.parse_args([*NEEDED, flag, "Größe".encode().decode("ascii", "surrogateescape")])


def test_the_folder_of_a_run_may_begin_with_a_quoted_tilde():
    args = ppo.parse_args(["--out", "~/runs/mine", "--model", "m", "--data", "d.jsonl"])
    assert args.out == Path.home() / "runs" / "mine"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ppo_vl.py", "train_grm_vl.py"])
def test_a_script_finds_its_modules_where_python_adds_no_folder(script):
    assert run([str(ROOT / script), "--help"], PYTHONSAFEPATH="1").returncode == 0
