"""What makes a run the same run, and from where it goes on.

Most checkpoints here hold scalars alone, which take no time; that tensors come back bit by bit is
shown by test_checkpoint.py.
"""

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common import checkpoint, distributed, identity, logging, losses, run_folder, user_code
from common.data.loader import PromptLoader
from common.flags import MODEL_IDENTITY, as_typed, fields_of
from common.model.weights import digest_files, digest_model
from conftest import ROOT, read_json, table, user_error, words, write_rows
from helpers import change_weight
from lives import (
    flip,
    live,
    records,
    refused,
    shard_file,
    small_task,
    steps,
    stop_at,
    write_cache,
)

SCRIPTS = {"ppo": ppo, "grm": grm}
NODE = "/proc/self/cwd"  # each process has another folder under this path


# ----------------------------------------------------------------------------- every flag has its row
WAY = """
adam_beta2 attention coordinates dtype eval_data eval_every export_every gradient_checkpointing hsdp
image_root keep_best keep_gb keep_last log_samples lr_schedule max_grad_norm max_pixels max_prompt_tokens
max_tokens_per_pack min_lr_ratio min_pixels on_bad_row out profile_steps prompts_per_step resume rollout_shards
save_blocking save_every save_strategy timeout video_fps video_frames warmup_steps weight_decay
eval_only
""".split()
WAY_OF_PPO = """
actor_lr aux_loss_coef critic_epochs critic_lr critic_warmup_steps cuda_graphs ema_beta env_timeout
env_workers epochs eval_samples export_critic grm_max_new_tokens max_new_tokens max_reply_tokens
max_turns min_new_tokens minibatches offload replay_experts reward_timeout rollouts_per_step sampler_gap_limit
samples_per_prompt slots stop_strings target_kl temperature top_k top_p
""".split()
WAY_OF_GRM = ["cuda_graphs", "eval_max_new_tokens", "lr", "slots"]
LENGTH = {"steps", "max_epochs"}


@pytest.mark.parametrize("script, more", [(ppo, WAY_OF_PPO), (grm, WAY_OF_GRM)])
def test_every_flag_is_of_the_run_its_length_or_its_way(script, more):
    """A new flag is put into one of the rows by hand: here if a resumed run takes it as it is now."""
    names = {*fields_of(script.Args)}
    length = names & LENGTH
    assert script.IDENTITY - {"thoughts"} <= names and not script.IDENTITY & length
    assert names - script.IDENTITY - length == {*WAY, *more}
    assert {*MODEL_IDENTITY} < script.IDENTITY


NAMES_FILES = r"JSONL|file\.py|\.json file|model folder|checkpoint to train|checkpoint of any size"


def test_flags_that_name_files_are_known():
    """By ``paths`` in their declaration; an image's bytes are not read for it."""
    naming = {line.split()[0][2:] for line in NAMED} | {"image_root"}
    for script in (ppo, grm):
        fields = fields_of(script.Args).values()
        assert {field.name for field in fields if field.metadata["paths"]} <= naming
        for field in fields:
            if re.search(NAMES_FILES, field.metadata["help"]):
                assert field.metadata["paths"], field.name


def test_what_belongs_to_flags_is_state():
    state = ppo.TrainState(0.1)
    assert ppo.DEPENDS_ON.keys() <= vars(state).keys()
    of_it = {name for names in ppo.DEPENDS_ON.values() for name in names}
    assert of_it <= fields_of(ppo.Args).keys()


# ----------------------------------------------------------------------------- the fingerprint
@pytest.fixture
def ones(life_task, qwen25, tmp_path) -> Path:
    """A folder with one of each that a flag can name; it is the same for any two calls."""
    return write_named(tmp_path / "ones", life_task, qwen25)


def write_named(folder: Path, task: Path, model: Path) -> Path:
    shutil.copytree(task, folder)
    shutil.copytree(model, folder / "model")
    recipe = {"*": [["grm:model", 0.5], ["reward.py:letters", 0.5]]}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder


NAMED = {  # a flag's value -> the file behind it, and one in which the weights are others
    "--model model": "model/chat_template.jinja",
    "--critic_model model": "model/config.json",
    "--reference_model model": "model/tokenizer.json",
    "--teacher_model model": "model/preprocessor_config.json",
    "--data rows.jsonl:0.5,eval.jsonl:0.5": "eval.jsonl",
    "--eval_data eval.jsonl": "eval.jsonl",
    "--ptx_data rows.jsonl": "rows.jsonl",
    "--curriculum reward.py:letters": "reward.py",
    "--env reward.py:letters": "reward.py",
    "--reward exact,grm:model": "model/generation_config.json",
    "--reward rm:model,reward.py:letters": "reward.py",
    "--reward_combiner reward.py:letters": "reward.py",
    "--reward_recipe recipe.json": "reward.py",
    '--reward_recipe {"*":[["grm:model",1]]}': "model/model.safetensors",
}


def args_of(line: str) -> ppo.Args:
    flag, value = line.split(" ")
    return dataclasses.replace(ppo.Args(), **{flag[2:]: value})


@pytest.mark.parametrize("line", NAMED)
def test_what_a_flag_names_counts_by_its_content(
    ones, life_task, qwen25, tmp_path, monkeypatch, line
):
    """Not by its path; and only in the flag that names it."""
    distributed.start(60.0, 0)
    monkeypatch.chdir(write_named(tmp_path / "others", life_task, qwen25))
    elsewhere = identity.fingerprint_of(args_of(line))
    monkeypatch.chdir(ones)
    before = identity.fingerprint_of(args_of(line))
    assert before == elsewhere
    change_content(Path(NAMED[line]))
    after = identity.fingerprint_of(args_of(line))
    assert {name for name in before if before[name] != after[name]} == {line.split()[0][2:]}


def change_content(path: Path) -> None:
    """Change something that is read: of JSON an entry, of rows the last, of other files a byte."""
    more = {".json": ', "note": 1}', ".jsonl": ', "note": 1}'}.get(path.suffix, " ")
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        content = content.rstrip().removesuffix(b"}")
    path.write_bytes(content + more.encode())


def test_what_is_not_read_does_not_count(ones, life_task, monkeypatch):
    """Spaces, empty lines and the order of names in JSON; files of a trainer beside a model; a file that is
    called as a rule; the address of a server. Each of them counted before "named"."""
    distributed.start(60.0, 0)
    recipe = '{"*": [["grm:model", 0.5], ["exact", 0.5]]}'
    values = {
        "model": "model",
        "data": "rows.jsonl:0.5,eval.jsonl:0.5",
        "reward_recipe": recipe,
        "reward": "exact,http://node-1:8000/score",
    }
    monkeypatch.chdir(ones)
    args = dataclasses.replace(ppo.Args(), **values)
    before, by_bytes = identity.fingerprint_of(args), identity.fingerprint_by_bytes(args)
    for name in ("rows.jsonl", "eval.jsonl"):
        rows = [json.loads(line) for line in (ones / name).read_text().splitlines()]
        lines = [json.dumps(dict(reversed(row.items())), indent=None) for row in rows]
        (ones / name).write_text("\n \n".join(lines) + "\n\n")
    config = read_json(ones / "model" / "config.json")
    (ones / "model" / "config.json").write_text(json.dumps(config, indent=7) + "\n")
    (ones / "model" / "notes.txt").write_text("mine")
    (ones / "model" / "trainer_state.json").write_text("{}")
    (ones / "exact").write_text("")
    moved = {
        "reward_recipe": json.dumps(json.loads(recipe), indent=1),
        "reward": "exact,http://node-2:9000/score",
    }
    args = dataclasses.replace(args, **moved)
    after = identity.fingerprint_of(args)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"servers", "named"}
    assert (before["servers"], after["servers"]) == ("http://node-1:8000", "http://node-2:9000")
    then = identity.fingerprint_by_bytes(args)
    assert {name for name in then if by_bytes[name] != then[name]} == values.keys()
    args = dataclasses.replace(args, reward="exact,http://node-2:9000/other")
    assert identity.fingerprint_of(args)["reward"] != before["reward"]


def test_pictures_of_rows_count_by_their_sizes(ones, monkeypatch):
    """In whatever column; also below --image_root."""
    monkeypatch.chdir(ones)
    before = identity.digest_rows("rows.jsonl", "")
    (ones / "1.png").write_bytes((ones / "1.png").read_bytes() + b"0")
    after = identity.digest_rows("rows.jsonl", "")
    assert before != after
    for name in ("sub", "root/sub"):
        (ones / name).mkdir(parents=True)
    write_rows(
        ones / "sub" / "rows.jsonl", [{"messages": [{"content": [{"image": "file://sub/a.png"}]}]}]
    )
    first = identity.digest_rows("sub/rows.jsonl", str(ones / "root"))
    (ones / "root" / "sub" / "a.png").write_bytes(b"0")
    assert identity.digest_rows("sub/rows.jsonl", str(ones / "root")) != first


def test_the_script_and_tables_of_programs_are_told(ones, save, start, capfd, monkeypatch):
    """A fork that git does not know, and a table that the reward names in a text."""
    program = ones / "tabled.py"
    program.write_text(
        "import pathlib\nHERE = pathlib.Path(__file__).parent\n"
        "TABLE = (HERE / 'tables' / 'words.csv').read_text()\n"
        "def score(prompts, responses, references, labels):\n    return [0.0] * len(prompts)\n"
    )
    (ones / "tables").mkdir()
    (ones / "tables" / "words.csv").write_text("a")
    more = f"--reward {program}:score"
    path = save(1, more)
    (ones / "tables" / "words.csv").write_text("b")
    fork = ones / "my_ppo.py"
    fork.write_text("# mine")
    monkeypatch.setattr(identity, "script_of", lambda args: fork)
    capfd.readouterr()
    assert resume(start(more)).step == 1
    told = capfd.readouterr().out
    assert (
        f"warning: {path} was saved with tables words.csv ca978112ca1b; this is words.csv 3e23e8160039"
        in told
    )
    assert f"warning: {path} was saved with script " in told
    assert logging.script_of(ppo.Args()) == Path(ppo.__file__).resolve()


def test_a_checkpoint_of_before_named_is_compared_by_bytes(
    save, start, life_task, qwen25, tmp_path
):
    """As its version did it: the same files are the same run, and others are not."""
    folder = write_named(tmp_path / "old", life_task, qwen25)
    more = f"--data {folder}/rows.jsonl --model {folder}/model --reward {folder}/reward.py:letters"
    path = save(1, more)
    saved = read_json(path / "state.json")
    fingerprint = saved["fingerprint"]
    for name in ("named", "servers", "tables", "script"):
        del fingerprint[name]
    rows = hashlib.sha256((folder / "rows.jsonl").read_bytes()).hexdigest()
    fingerprint["data"] = hashlib.sha256(rows.encode()).hexdigest()[:12]
    fingerprint["model"] = digest_files(
        file
        for file in (folder / "model").iterdir()
        if file.suffix in (".json", ".jinja", ".safetensors")
    )
    fingerprint["eval_data"] = identity.parts_by_bytes(str(life_task / "eval.jsonl"))
    (path / "state.json").write_text(json.dumps(saved))
    commit(path)
    begun = start(more)
    assert resume(begun).step == 1
    change_content(folder / "rows.jsonl")
    with user_error(
        rf"is of another run: --data '{fingerprint['data']}' -> '\w+' \({folder}/rows.jsonl\)"
    ):
        resume(start(more))


# What runs of commit 0187b0b have recorded of programs of launch/, which have changed since.
OF_0187B0B = {
    "reward": ("launch/reward_vision.py:words", "ea332359be09:words"),
    "env": ("launch/environments/tools.py:Calculator", "01f44753e61b:Calculator"),
}


def record(path: Path, fingerprint: dict) -> None:
    """Let a checkpoint have this fingerprint, without what that commit did not know."""
    for name in ("named", "servers", "tables", "script"):
        fingerprint.pop(name, None)
    saved = read_json(path / "state.json") | {"fingerprint": fingerprint}
    (path / "state.json").write_text(json.dumps(saved))
    commit(path)


@pytest.mark.parametrize("flag", OF_0187B0B)
def test_a_run_goes_on_with_our_programs_as_they_are_now(save, start, flag):
    """But not with one that its user had changed."""
    program, recorded = OF_0187B0B[flag]
    more = f"--{flag} {ROOT / program} --max_tokens_per_pack 2000"
    path, args = save(1, more), start(more).args
    before = read_json(path / "state.json")["fingerprint"] | identity.fingerprint_by_bytes(args)
    record(path, before | {flag: recorded})
    assert resume(start(more)).step == 1
    record(path, before | {flag: "0" * 12})
    with user_error(f"is of another run: --{flag} '000000000000' -> "):
        resume(start(more))


def test_a_run_goes_on_by_the_args_json_of_then(save, life_task, qwen25, out):
    """It had every flag, with what "auto" stood for."""
    path = save(1)
    flags = read_json(Path(__file__).with_name("args_0187b0b.json"))
    flags |= {"model": str(qwen25), "data": str(life_task / "rows.jsonl"), "out": str(out)}
    flags["env"] = str(ROOT / flags["env"])
    (out / "args.json").write_text(json.dumps(flags))
    line = ["--config", out / "args.json"]
    args = begin(*line).args
    record(path, flags | identity.fingerprint_by_bytes(args) | {"env": OF_0187B0B["env"][1]})
    assert resume(begin(*line)).step == 1


def test_a_program_counts_with_what_it_imports_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(user_code, "programs", {})
    (tmp_path / "bits_of_it.py").write_text("N = 1\n")
    (tmp_path / "late_bits.py").write_text("import bits_of_it\n")
    (tmp_path / "scored.py").write_text("def score(rewards):\n    import late_bits\n")
    spec = f"{tmp_path}/scored.py:score"
    user_code.load_function("--reward", spec, "rewards")
    before = identity.digest_parts(spec)
    (tmp_path / "unused.py").write_text("N = 1\n")
    assert identity.digest_parts(spec) == before
    (tmp_path / "bits_of_it.py").write_text("N = 2\n")
    assert identity.digest_parts(spec) != before


@pytest.mark.parametrize("place", [0, 5_000_000, -1])
def test_another_revision_has_the_same_names_and_sizes(ones, place):
    """Weights of ten million bytes: others at the start, in the middle and at the end are seen."""
    weights = ones / "model" / "model.safetensors"
    weights.write_bytes(bytes(10_000_000))
    before = digest_model(str(ones / "model"))
    data = bytearray(weights.read_bytes())
    data[place] = 1
    weights.write_bytes(data)
    assert digest_model(str(ones / "model")) != before
    (ones / "model" / "README.md").write_text("not read")
    data[place] = 0
    weights.write_bytes(data)
    assert digest_model(str(ones / "model")) == before


def compare_members(lines: list[str], folders: list[str]) -> None:
    """In every rank, each of them in a folder of its own: what a comparison says of each flag."""
    rank = int(os.environ["RANK"])
    os.chdir(folders[rank])
    constants.HF_HUB_CACHE = str(Path(folders[rank]) / "hub")
    constants.HF_HUB_OFFLINE = True
    distributed.start(60.0, 0)
    for line in lines:
        try:
            identity.fingerprint_of(args_of(line))
            distributed.say_once(f"{line}: equal")
        except checkpoint.UserError as error:
            distributed.say_once(f"{line}: {error}")


def test_two_nodes_with_other_files_under_one_path_are_refused(ones, life_task, qwen25, tmp_path):
    """Of each flag that names something; of two hub caches with another revision, too."""
    others = write_named(tmp_path / "others", life_task, qwen25)
    for folder, text in ((ones, ""), (others, "{# another revision #}")):
        write_cache(folder, qwen25, text)
    lines = [*NAMED, "--model org/name", "--reward grm:org/name"]
    told = ranks.run(compare_members, lines, [str(ones), str(others)], world=2)
    for line in lines:
        assert told.count(f"{line}: equal") == ("org/name" not in line), told
    for path in {*NAMED.values()}:
        change_content(others / path)
    told = ranks.run(compare_members, lines, [str(ones), str(others)], world=2)
    host = re.escape(checkpoint.socket.gethostname())
    for line in lines:
        flag = line.split()[0]
        difference = rf"{flag} is '.*' on rank 0 \({host}\) and '.*' on rank 1 \({host}\)"
        assert re.search(f"{re.escape(line)}: {difference}: all ranks need the same", told), line


def own_cache(folder: str) -> None:
    """Each rank is a node with a hub cache of its own, as on local scratch."""
    constants.HF_HUB_CACHE = str(Path(folder) / os.environ["RANK"] / "hub")
    constants.HF_HUB_OFFLINE = True


@pytest.mark.slow
def test_nodes_may_have_caches_of_their_own(flags, qwen25, tmp_path):
    """They train as on one folder: models are compared by content."""
    for rank in "01":
        write_cache(tmp_path / rank, qwen25, "")
    out = tmp_path / "run"
    more = "--model org/name --steps 1 --advantage grpo --save_every 0"
    told = live(flags(out, more), 2, [(own_cache, str(tmp_path))])
    assert "2 x cpu" in told
    assert (out / "export" / "step-1" / "model.safetensors").exists()


def other_node(folder: str, versions: bool = False) -> None:
    """Rank 1 is a node of its own: what lies under NODE is another, and perhaps the versions are."""
    os.chdir(folder)
    if os.environ["RANK"] == "1":
        os.chdir("node-1")
        if versions:
            identity.transformers.__version__ = "5.0.0"


@pytest.mark.slow
def test_nodes_with_other_rows_train_nothing(flags, life_task, tmp_path):
    """One message on all ranks, before a folder is made; other versions are a warning."""
    shutil.copytree(life_task, tmp_path / "task")
    shutil.copytree(life_task, tmp_path / "node-1" / "task")
    argv = flags(tmp_path / "run", f"--data {NODE}/task/rows.jsonl --steps 1 --export_every 0")
    argv = words(*argv, "--", "--data", f"{NODE}/task/rows.jsonl")
    told = live(argv, 2, [(other_node, str(tmp_path), True)])
    assert "warning: transformers is " in told and "5.0.0" in told
    rows = (tmp_path / "node-1" / "task" / "rows.jsonl").read_text()
    (tmp_path / "node-1" / "task" / "rows.jsonl").write_text(rows.replace("row 3", "row 4"))
    argv = words(*argv, "--out", tmp_path / "new")
    told = live(argv, 2, [(other_node, str(tmp_path))], codes=[2, 2])
    assert told.count("error: --data is ") == 1 and "Traceback" not in told
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("script", [ppo, grm])
def test_nodes_with_other_pictures_train_nothing(life_task, qwen25, tmp_path, script):
    """On one node there is none, and the row is skipped, or it has another size."""
    node = tmp_path / "node-1" / "task"
    for folder in (tmp_path / "task", node):
        shutil.copytree(life_task, folder)
        rows = [{"prompt": "a", "response": "b", "images": [f"{i}.png"]} for i in range(3)]
        write_rows(folder / "sft.jsonl", rows)
    data = f"{NODE}/task/sft.jsonl" if script is grm else f"{NODE}/task/rows.jsonl"
    argv = words("--model", qwen25, "--data", data, "--out", tmp_path / "out", "--on_bad_row skip")
    (node / "1.png").unlink()
    for _ in range(2):
        told = ranks.run(
            script.main, argv, world=2, patches=[(other_node, str(tmp_path))], codes=[2, 2]
        )
        assert told.count("error: --data is ") == 1
        shutil.copy(node / "0.png", node / "1.png")
    assert not (tmp_path / "out").exists()


def test_a_program_that_does_not_compile_on_one_node(flags, life_task, tmp_path):
    """Nobody waits for its rank: one message on all, from the one that has met it."""
    shutil.copytree(life_task, tmp_path / "task")
    shutil.copytree(life_task, tmp_path / "node-1" / "task")
    (tmp_path / "node-1" / "task" / "reward.py").write_text("def letters(:\n")
    argv = words(*flags(tmp_path / "run"), "--reward", f"{NODE}/task/reward.py:letters")
    told = live(argv, 2, [(other_node, str(tmp_path))], codes=[2, 2])
    assert told.count("error: --reward ") == 1 and "SyntaxError" in told


def live_apart(argv: list[str], more: list[str]) -> None:
    """The run, which one rank was started for with further flags."""
    ppo.main([*argv, *more] if os.environ["RANK"] == "1" else argv)


def test_ranks_with_other_flags(flags, out):
    more = words("--gamma 0.5")
    told = ranks.run(live_apart, flags(out), more, world=2, codes=[2, 2])
    assert re.search(r"--gamma is 1.0 on rank 0 \(.*\) and 0.5 on rank 1 \(.*\)", told)
    assert not out.exists()


def test_nodes_that_share_no_folder(flags, tmp_path):
    """Refused before the first step, on all ranks."""
    (tmp_path / "node-1").mkdir()
    told = live(flags(Path(f"{NODE}/run")), 2, [(other_node, str(tmp_path))], codes=[2, 2])
    assert "is not rank 0's folder: use a file system that all nodes share" in told
    assert f"on {checkpoint.socket.gethostname()} this" in told
    assert "step     1" not in told


# ----------------------------------------------------------------------------- what a resume does with it
def begin(*line: object) -> checkpoint.Checkpoints:
    """As a script starts with this command line, up to where models would be built."""
    args = ppo.parse_args(words(*line))
    fingerprint = identity.fingerprint_of(args)
    args = run_folder.choose_folder(args, fingerprint)
    state = ppo.TrainState(args.kl_coef, history=torch.zeros(2, 4))
    return checkpoint.Checkpoints(args, state, fingerprint)


@pytest.fixture
def start(flags, out) -> Callable:
    """start("--more flags"): `begin` of a run of two steps."""
    distributed.start(60.0, 0)

    return lambda more="", folder=out: begin(*flags(folder, more))


@pytest.fixture
def save(start, out) -> Callable:
    """save(step, "--more flags", kl_coef=0.3): a checkpoint of scalars alone."""

    def write(number: int, more: str = "", folder: Path = out, **scalars) -> Path:
        begun = start(more, folder)
        path = folder / "checkpoints" / f"step-{number}"
        path.mkdir(parents=True)
        fingerprint = begun.fingerprint | {"steps": begun.args.steps}
        state = begun.state.state_dict() | {"step": number, "fingerprint": fingerprint} | scalars
        (path / "state.json").write_text(json.dumps(state))
        commit(path)
        return path

    return write


def commit(path: Path) -> None:
    """Write the digests of a checkpoint's files as they are now."""
    digests = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.iterdir()
        if file.name != "COMMITTED.json"
    }
    (path / "COMMITTED.json").write_text(json.dumps({"step": 0, "sha256": digests}))


def resume(begun: checkpoint.Checkpoints) -> ppo.TrainState:
    begun.resume({}, begun.args.steps, ppo.IDENTITY)
    return begun.state


def test_a_change_is_refused_or_taken_by_its_row(save, start, out, tmp_path, capfd):
    path = save(1, "--advantage grpo")
    with user_error("step-1 is of another run: --seed 0 -> 1; --gamma 1.0 -> 0.5. Choose another"):
        resume(start("--advantage grpo --gamma 0.5 --seed 1 --keep_last 5"))
    capfd.readouterr()
    more = "--advantage grpo --steps 9 --samples_per_prompt 3 --lr_schedule cosine --eval_every 3"
    assert resume(start(more)).step == 1
    told = capfd.readouterr().out
    assert f"resuming from {path}; changed: " in told
    for text in ("--steps 2 -> 9", "--samples_per_prompt 2 -> 3", "'constant' -> 'cosine'"):
        assert text in told
    assert resume(start(f"--resume {path} --gamma 0.5", tmp_path / "new")).step == 1
    told = capfd.readouterr().out
    assert "--gamma 1.0 -> 0.5" in told and "--advantage 'grpo' -> 'gae'" in told


def test_other_contents_are_another_run(save, start, life_task, tmp_path, qwen25):
    """The same paths, other rows, reward, template; base weights below adapters."""
    folder = write_named(tmp_path / "named", life_task, qwen25)
    reward = f"{folder}/reward.py:letters"
    more = f"--lora_rank 2 --data {folder}/rows.jsonl --model {folder}/model --reward {reward}"
    save(1, more)
    assert resume(start(more)).step == 1
    for name, flag in (
        ("rows.jsonl", "data"),
        ("reward.py", "reward"),
        ("model/chat_template.jinja", "model"),
    ):
        text = (folder / name).read_text()
        change_content(folder / name)
        with user_error(f"step-1 is of another run: --{flag} '"):
            resume(start(more))
        (folder / name).write_text(text)
    change_weight(folder / "model", lambda weight: weight[0, 0].add_(1))
    for also in ("", " --eval_only"):
        with user_error("step-1 is of another run: --model '"):
            resume(start(more + also))


def test_an_evaluation_is_held_to_the_model_alone(save, start):
    save(2)
    more = "--eval_only --steps 1 --gamma 0.5 --system_prompt brief --reward exact"
    assert resume(start(more)).step == 2
    with user_error("is of another run: --lora_rank 0 -> 2. "):
        resume(start(f"{more} --lora_rank 2"))


@pytest.mark.parametrize("name", identity.VERSIONS)
def test_other_versions_are_a_warning(save, start, capfd, name):
    path = save(1)
    saved = read_json(path / "state.json")
    saved["fingerprint"][name] = "0.1"
    (path / "state.json").write_text(json.dumps(saved))
    commit(path)
    assert resume(start()).step == 1
    assert f"warning: {path} was saved with {name} 0.1; this is " in capfd.readouterr().out


def test_steps_below_what_is_saved(save, start, tmp_path):
    path = save(2)
    for more, folder in (("", None), (f" --resume {path}", tmp_path / "new")):
        with user_error("step-2 is already beyond --steps 1; raise --steps"):
            resume(start(f"--steps 1{more}", *filter(None, [folder])))
    # which would not help another model
    with user_error("step-2 is of another run: --lora_rank 0 -> 2"):
        resume(start("--steps 1 --lora_rank 2"))
    # its export
    assert resume(start(f"--steps 2 --resume {path}", tmp_path / "exported")).step == 2


def test_what_belongs_to_a_changed_flag_begins_anew():
    """The weight of the KL, moments of rewards, the history of rows, rows drawn ahead, and PTX rows."""

    def loaded(*changed: str, rows: int = 4) -> ppo.TrainState:
        before = ppo.TrainState(0.3, losses.RunningMoments(7), history=torch.ones(2, 4))
        before.step, before.ptx_rows, before.ahead = 5, 6, [1, 2]
        before.rows_drawn, before.passes, before.pass_ended = 20, 5.0, True
        state = ppo.TrainState(0.1, history=torch.zeros(2, rows))
        state.load_state_dict(json.loads(json.dumps(before.state_dict())), {*changed})
        assert state.step == 5
        return state

    assert vars(loaded())["kl_coef"] == 0.3
    assert loaded("seed").moments.count == 7 and loaded("seed").history.sum() == 8
    for flag in ("kl_coef", "kl_target"):
        assert loaded(flag).kl_coef == 0.1
    for flag in ("reward", "env", "grm_mode"):
        state = loaded(flag)
        assert (state.moments.count, state.history.sum(), state.ahead) == (0, 0, [1, 2])
    assert loaded("data").ahead == [] and loaded("data").moments.count == 7
    of_rows = loaded("data")
    assert (of_rows.rows_drawn, of_rows.passes, of_rows.pass_ended) == (0, 0, False)
    assert loaded("curriculum").ahead == [] and loaded("curriculum").history.sum() == 8
    assert loaded("prompts_per_step").ahead == [] and loaded("prompts_per_step").history.sum() == 8
    assert loaded("ptx_data").ptx_rows == 0
    # other rows are too long now
    fewer = loaded(rows=3)
    assert fewer.history.shape == (2, 3) and fewer.ahead == [] and fewer.rows_drawn == 20
    judge = grm.TrainState()
    judge.load_state_dict({"step": 5, "rows_drawn": 20, "pass_ended": True}, {"data"})
    assert (judge.step, judge.rows_drawn, judge.pass_ended) == (5, 0, False)


@pytest.mark.slow
def test_a_critic_that_a_flag_names_is_not_the_one_that_was_saved(flags, copy, qwen25, tmp_path):
    """Its weights are those of --critic_model, where the rate is 0."""
    critic = Path(shutil.copytree(qwen25, tmp_path / "critic"))
    changed = change_weight(critic, lambda weight: weight.add_(1))
    line = flags(tmp_path / "new", f"--steps 3 --critic_lr 0 --export_every 0 --resume {copy}")
    ppo.main(words(*line, "--critic_model", critic))
    saved = load_file(shard_file(tmp_path / "new" / "checkpoints" / "step-3"))
    name = r"critic\.model\..*layers\.0\.mlp\.up_proj\.weight"
    critics = next(value for key, value in saved.items() if re.fullmatch(name, key))
    assert torch.equal(critics, changed)


def test_an_average_that_is_new_begins_at_the_weights_that_were_saved(flags, copy):
    """It is no reason to refuse the checkpoint: here rates of 0 keep it there."""
    folder = copy / "checkpoints"
    ppo.main(
        flags(copy, "--steps 3 --ema_beta 0.9 --actor_lr 0 --critic_lr 0 --export_every 0 --seed 0")
    )
    before, after = [load_file(shard_file(folder / f"step-{step}")) for step in (2, 3)]
    averages = {name for name in after if name.endswith(".ema")}
    assert after.keys() - before.keys() == averages != set()
    for name in averages:
        weight = name.replace("optimizer.state", "model").removesuffix(".ema")
        assert torch.equal(after[name], before[weight])


def test_trained_weights_are_not_left_behind(flags, copy, tmp_path):
    """As those of a tower would be, which --train_vision has trained, and the next run does not."""
    path = copy / "checkpoints" / "step-2"
    save_file({"actor.model.visual.weight": torch.ones(2)}, path / "tower.safetensors")
    commit(path)
    argv = flags(tmp_path / "new", f"--steps 3 --resume {path}")
    refused(argv, "cannot be loaded into", "actor.model.visual.weight is not trained here")


# ----------------------------------------------------------------------------- --resume
def test_a_finished_run_says_that_nothing_is_left(flags, copy, capsys):
    ppo.main(flags(copy))
    assert "all --steps 2 are done: raise --steps to train on\n" in capsys.readouterr().out


def test_resume_choices(save, start, tmp_path, out):
    first, newest = save(1), save(2)
    with user_error(f"--resume never: {out} already holds a run"):
        start("--resume never").path
    assert start("--resume never", tmp_path / "fresh").path is None
    (tmp_path / "fresh" / "metrics.jsonl").write_text("")
    with user_error("--resume never: .*fresh already holds a run"):
        start("--resume never", tmp_path / "fresh").path
    run_folder.write_link(out / "checkpoints" / "latest", "step-1")
    for number, (place, path) in enumerate(
        {
            out: newest,
            out / "checkpoints": newest,
            out / "checkpoints" / "latest": first,
            first: first,
            first / "state.json": first,
        }.items()
    ):
        assert start(f"--resume {place}", tmp_path / f"new-{number}").path == path
    for place in (out / "checkpoints" / "step-9", tmp_path / "new-0", tmp_path / "fresh"):
        problem = "no complete checkpoint there" if place.exists() else "no such folder"
        with user_error(f"--resume {place}: {problem}"):
            start(f"--resume {place}", tmp_path / "new-1").path
    model = tmp_path / "export" / "step-1"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for place in (model, model / "config.json", model.parent):
        with user_error("no complete checkpoint there: this is a model, pass it as --model"):
            start(f"--resume {place}", tmp_path / "new-1").path


def test_a_path_is_only_a_start(save, start, out, tmp_path):
    """The same command once more, as a requeued job gives it, goes on from the run's own."""
    path, of_new = save(1), save(2, folder=tmp_path / "new")
    assert start(f"--resume {path}", tmp_path / "new").path == of_new
    # from which the other run may have been moved, or have deleted it
    assert start(f"--resume {out}/checkpoints/step-0", tmp_path / "new").path == of_new
    # but not as another run, which was to begin from there
    with user_error("new/checkpoints/step-2 is of another run: --gamma 1.0 -> 0.5. Choose"):
        resume(start(f"--resume {path} --gamma 0.5", tmp_path / "new"))
    # its own newest, by whatever name, also as another run
    assert start(f"--resume {out}").path == path
    assert resume(start(f"--resume {path} --gamma 0.5")).step == 1
    newer = save(3)
    with user_error(f"--resume {path}: this is a checkpoint of this --out itself"):
        start(f"--resume {path}").path
    assert start(f"--resume {path} --eval_only").path == path
    assert start(f"--resume {newer}").path == newer


def test_what_was_saved_before_is_one_message(save, start):
    """By 28d46cb: flags and contents in place of a fingerprint."""
    path = save(1)
    saved = read_json(path / "state.json")
    saved |= {"flags": saved.pop("fingerprint"), "contents": {}}
    (path / "state.json").write_text(json.dumps(saved))
    commit(path)
    message = f"{path} was saved by the other script, or by another version of this project .before 0.2.0."
    with user_error(f"^{message}: state.json has no fingerprint; to start from its weights"):
        resume(start())


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("step", "x", "step must be an integer from 0 to .*, not 'x'"),
        ("step", -1, "step must be an integer"),
        ("rows_drawn", -4, "rows_drawn must be an integer from 0 to 1099511627775, not -4"),
        ("rows_drawn", 10**15, "rows_drawn must be an integer from 0 to "),
        ("history", "nonsense", "history: non-hexadecimal number"),
        ("ahead", [0, 4], "ahead: each must be an integer from 0 to 3, not 4"),
        ("moments", None, "moments must be dict, not None"),
        ("moments", {"count": 1}, "moments: mean must be"),
        ("kl_coef", "0.1", "kl_coef must be int . float, not '0.1'"),
        ("metrics", [], "metrics must be dict"),
        ("history", 3, "history must be str, not 3"),
        ("ahead", 3, "ahead must be list, not 3"),
        ("fingerprint", 3, "fingerprint must be dict, not 3"),
    ],
)
def test_a_state_of_wrong_types_is_one_message(save, start, name, value, message):
    path = save(1, **{name: value})
    with user_error(f"^{path}/state.json: {message}"):
        resume(start())


def test_a_state_of_wrong_types_of_the_judge(save, tmp_path):
    """Its running mean is null before the first step."""
    form = checkpoint.form_of(grm.TrainState().state_dict())
    path = save(1, loss_mean=None)
    assert checkpoint.read_state(path, form)["loss_mean"] is None
    path = save(2, loss_mean="x")
    with pytest.raises(ValueError, match="loss_mean must be .*, not 'x'"):
        checkpoint.read_state(path, form)


# ----------------------------------------------------------------------------- what is evaluated
def recorded_run(start: Callable, out: Path) -> Path:
    """The folder of a run that has taken no step yet."""
    args = start().args
    (out / "args.json").write_text(json.dumps(as_typed(args)))
    (out / "metrics.jsonl").write_text("")
    return out


def test_an_evaluation_never_takes_the_initial_weights_for_the_runs(
    start, save, out, qwen25, capfd
):
    """Before the first checkpoint, and once all are gone: the commands that work are named, and work."""
    run, new = recorded_run(start, out), out.with_name("new")
    by_config = words("--eval_only --config", run / "args.json")
    commands = [[*by_config, "--out", str(new)], by_config, [*by_config, "--out", str(run)]]
    typed = words("--model", qwen25, *by_config, "--out", run)
    itself = f"that model itself: --model {qwen25} --out NEW"
    for argv in (*commands, typed):
        with user_error(
            f"not what the run {run} has trained; it has no checkpoint and no export yet; {itself}"
        ):
            begin(*argv)
    export = run / "export" / "step-7"
    shutil.copytree(qwen25, export)
    run_folder.write_link(export.parent / "latest", export.name)
    for argv in commands:
        with user_error(f"its export: --model {run}/export/latest --out NEW; {itself}"):
            begin(*argv)
    path = save(1)
    with user_error(f"its newest checkpoint: --resume {run} --out NEW; its export: "):
        begin(*commands[0])
    told = {
        f"evaluating step 1: {path}": ["--resume", str(run), "--out", str(new)],
        f"evaluating the export {export}": ["--model", f"{run}/export/latest", "--out", str(new)],
        f"evaluating the model {qwen25} as it is: no": words("--model", qwen25, "--out", new),
        f"evaluating step 1: {path}; changed: --eval_only": ["--out", str(run)],
    }
    for text, more in told.items():
        capfd.readouterr()
        resume(begin(*by_config, *more))
        assert text in capfd.readouterr().out


def test_what_a_run_began_from_is_not_what_it_is(start, save, out, tmp_path):
    """Its args.json has the --resume with which it was started, and its checkpoints are its own."""
    first, new = save(1), tmp_path / "new"
    args = start(f"--resume {first}", new).args
    newest = save(2, f"--resume {first}", new)
    (new / "args.json").write_text(json.dumps(as_typed(args)))
    by_config = words("--eval_only --config", new / "args.json")
    assert begin(*by_config, "--out", str(new)).path == newest
    assert begin(*by_config, "--resume", str(first)).path == first


def test_a_live_run_is_evaluated_in_another_folder(start, held, out):
    with user_error(f"in use by a live run.*; --resume {out} --out NEW evaluates its newest"):
        start("--eval_only")


# ----------------------------------------------------------------------------- the best evaluation
def evaluate_as(values: dict[int, float]) -> None:
    """Evaluations by step, without a model."""
    ppo.evaluate = lambda *arguments: ({"eval/x": values[arguments[4].step]}, [])


@pytest.mark.parametrize("metric, sign", [("eval/x", 1), ("min:eval/x", -1)])
def test_the_best_evaluation_is_kept(flags, out, metric, sign):
    """Its checkpoint beside the last ones, its export beside the last; a second life knows it. The model as
    it came is none."""
    values = {0: 9.0, 1: 1.0, 2: 5.0, 3: 2.0, 4: 5.0, 5: 4.0}
    values = {step: sign * value for step, value in values.items()}
    more = f"--advantage grpo --eval_every 1 --keep_last 1 --save_every -1 --keep_best {metric} --steps"
    for last in (3, 5):
        live(flags(out, f"{more} {last}"), 2, [(evaluate_as, values)])
        assert os.readlink(out / "checkpoints" / "best") == "step-2"
        assert steps(out) == [last, 2]
        exports = out / "export"
        assert os.readlink(exports / "best") == "step-2"
        assert os.readlink(exports / "latest") == f"step-{last}"
    assert {path.name for path in exports.iterdir()} == {
        "best",
        "latest",
        "step-2",
        "step-3",
        "step-5",
    }
    assert checkpoint.find_named(str(out / "checkpoints" / "best")) == [
        out / "checkpoints" / "step-2"
    ]
    told = live(flags(out, f"{more} 6 --keep_best eval/y"), 1, [(evaluate_as, values)], codes=[2])
    assert (
        "--keep_best eval/y: evaluations only have eval/episode, eval/index, eval/train_step, eval/x"
        in told
    )


def test_without_saves_the_best_is_exported_alone(start, out, monkeypatch):
    more = "--eval_every 1 --save_every 0 --export_every 0 --keep_best eval/x"
    begun = start(more)
    monkeypatch.setattr(begun, "save", None)
    monkeypatch.setattr(
        checkpoint.weights, "export", lambda module, processor, folder: folder.mkdir(parents=True)
    )
    exports = {"export": SimpleNamespace(module=None, ema_beta=0)}
    for step, best in ((0, None), (1, 1), (2, 2), (3, 2)):
        begun.save_if_best(step, best)
        begun.export_if_due(step, 5, exports, None)
    assert steps(out) == []
    assert sorted(path.name for path in (out / "export").iterdir()) == ["best", "step-2"]
    assert os.readlink(out / "export" / "best") == "step-2"


# ----------------------------------------------------------------------------- damaged checkpoints
DAMAGES = {  # of a checkpoint -> what is said
    "a weight or a moment": (lambda folder: flip(shard_file(folder), -1), "its sha256 is another"),
    "a digit of the state": (
        lambda folder: flip(folder / "state.json", -3),
        "state.json is not what was written",
    ),
    "no shard": (lambda folder: shard_file(folder).unlink(), "No such file"),
    "weights of another checkpoint": (
        lambda folder: shutil.copy(shard_file(folder), folder / "older.safetensors"),
        "older.safetensors is no file of this checkpoint",
    ),
    "no commit": (
        lambda folder: (folder / "COMMITTED.json").unlink(),
        "COMMITTED.json cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(copy, damage):
    distributed.start(60.0, 0)
    path = copy / "checkpoints" / "step-2"
    assert checkpoint.find_damage(path) == ""
    apply, reason = DAMAGES[damage]
    apply(path)
    assert reason in checkpoint.find_damage(path)


def test_the_newest_undamaged_one_is_taken(save, start, capfd):
    """Whatever the pointer says. A damaged one that is newer is not counted among those that are kept."""
    paths = {step: save(step) for step in (1, 2, 3)}
    flip(paths[3] / "state.json", -3)
    capfd.readouterr()
    begun = start("--keep_last 2")
    assert begun.path == paths[2]
    assert f"warning: not resumed from: {paths[3]}: state.json is not" in capfd.readouterr().out
    begun.delete_old(2)
    assert sorted(path.name for path in begun.folder.iterdir()) == ["step-1", "step-2", "step-3"]


def test_a_damaged_one_takes_no_place_of_a_good_one(save, start):
    """Else a second damage would leave nothing to go on from. Written again, it counts again."""
    paths = {step: save(step) for step in (1, 2)}
    flip(paths[2] / "state.json", -3)
    begun = start("--keep_last 2")
    assert begun.path == paths[1]
    save(3)
    begun.delete_old(3)
    assert [step for step, _ in run_folder.step_folders(begun.folder)] == [3, 2, 1]
    begun.damaged.clear()
    begun.delete_old(3)
    assert [step for step, _ in run_folder.step_folders(begun.folder)] == [3, 2]


def test_what_cannot_be_read_is_no_reason_to_start_over(save, start, out, tmp_path):
    """One message, and everything is left as it was."""
    paths = [save(1), save(2)]
    for path in paths:
        (path / "state.json").rename(out / path.name)
    before = sorted(out.rglob("*"))
    for more, folder in (("", out), ("--eval_only", out), (f"--resume {out}", tmp_path / "new")):
        with user_error(
            "no checkpoint that can be resumed from: .*No such file.* Start again once"
        ):
            start(more, folder).path
    assert sorted(out.rglob("*")) == before
    (out / "step-2").rename(paths[1] / "state.json")
    assert resume(start()).step == 2


def test_a_folder_that_cannot_be_listed_is_not_empty(start, out):
    """As where checkpoints/ is a link to a disk that is not there."""
    out.mkdir()
    (out / "checkpoints").symlink_to(out.parent / "gone")
    with user_error(f"No such file .*{out}/checkpoints"):
        start().path


def test_no_pickle_on_load(flags, copy, monkeypatch):
    """Safetensors and JSON only."""
    kinds = {file.suffix for file in (copy / "checkpoints" / "step-2").iterdir()}
    assert kinds == {".json", ".safetensors"}

    def unpickled(*arguments, **named):
        raise AssertionError("something is unpickled from a file")

    for name in ("torch.load", "pickle.load", "pickle.Unpickler", "torch.serialization.load"):
        monkeypatch.setattr(name, unpickled)
    ppo.main(flags(copy, "--steps 3 --export_every 0"))
    assert records(copy)[-1]["step"] == 3


def test_a_broken_shard_that_was_written_so(flags, copy, tmp_path):
    """Its sha256 is right: a message, once, from both ranks."""
    path = copy / "checkpoints" / "step-2"
    for file in path.glob("*.safetensors"):
        file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    commit(path)
    told = live(flags(copy, "--steps 3"), 2, codes=[2, 2])
    assert told.count("error: ") == 1 and "cannot be read as safetensors" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("script", ["ppo", "grm"])
def test_other_rows_begin_at_their_first(tmp_path, qwen25, script):
    """With --resume PATH; the step and the weights stay."""
    argv = small_task(tmp_path, qwen25, script)
    SCRIPTS[script].main(words(*argv, "--steps 2"))
    files = {"ppo": "rows.jsonl", "grm": "judged.jsonl"}
    rows = (tmp_path / files[script]).read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(rows[:12]) + "\n")
    new = [
        "--out",
        tmp_path / "new",
        "--resume",
        tmp_path / script,
        "--data",
        tmp_path / "other.jsonl",
    ]
    SCRIPTS[script].main(words(*argv, *new, "--steps 3"))
    state = read_json(tmp_path / "new" / "checkpoints" / "step-3" / "state.json")
    assert (state["step"], state["rows_drawn"]) == (3, 4)


def test_a_stop_is_no_crash_to_start_again_from(flags, out):
    """For the torchrun whose run was stopped; another one goes on."""
    argv = flags(out, "--steps 3 --export_every 0")
    stop = (stop_at, "update_actor", 1, 1, signal.SIGUSR1)
    same = {"TORCHELASTIC_RUN_ID": "a", "world": 2}
    live(argv, patches=[stop], codes=[75, 75], **same)
    assert steps(out) == [1]
    live(argv, codes=[75, 75], TORCHELASTIC_RESTART_COUNT="1", **same)
    assert steps(out) == [1]
    live(argv, patches=[(stop_at, "update_actor", 2, 1, signal.SIGKILL)], codes=[1, -9], **same)
    assert "stopped" not in read_json(out / ".lock")
    live(argv, TORCHELASTIC_RESTART_COUNT="1", **same)
    assert steps(out) == [3, 2, 1]


# ----------------------------------------------------------------------------- one run per folder
HOLD = """
import fcntl, time
file = open(".lock", "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print(1, flush=True)
time.sleep(60)
"""


@pytest.fixture
def held(out):
    """Another process has the lock of the folder; what it has written there."""
    out.mkdir()
    holder = {"process": "process 7 on elsewhere", "job": "7", "restart": "0"}
    (out / ".lock").write_text(json.dumps(holder))
    process = subprocess.Popen([sys.executable, "-c", HOLD], cwd=out, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield holder
    process.kill()
    process.wait()


@pytest.mark.parametrize("job, restart", [("", ""), ("8", "1"), ("7", "0")])
def test_the_lock_of_a_live_run(start, held, monkeypatch, job, restart):
    """Its process and host are named; another step of the same job is another run."""
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    with user_error("in use by a live run, process 7 on elsewhere"):
        start()


def test_the_lock_of_a_requeued_job(start, held, out, monkeypatch):
    """The machine of its earlier life is gone, and nobody has told the file system."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start()
    assert read_json(out / ".lock")["restart"] == "1"


def test_a_child_of_a_dead_run_holds_no_lock(start, out):
    """As a worker of a pool that a user's program has started, and that outlives the run."""
    with start().lock:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        hold = HOLD.replace("time.sleep(60)", "")
        held = subprocess.run([sys.executable, "-c", hold], cwd=out, timeout=30)
        assert held.returncode == 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_file_system_without_locks(start, out, monkeypatch, capfd):
    """Lustre without its mount option, say: a warning."""

    def locked(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_folder.fcntl, "lockf", locked)
    start()
    told = capfd.readouterr().out
    assert f"warning: a second run in {out} would not be refused: [Errno {errno.ENOSYS}]" in told


def test_leftovers_of_a_killed_run_are_removed(start, out):
    for stale in ("checkpoints/.tmp-step-3", "export/.step-2.tmp", "export/step-1"):
        (out / stale).mkdir(parents=True)
    start()
    left = [path.name for folder in ("checkpoints", "export") for path in (out / folder).iterdir()]
    assert left == ["step-1"]


# ----------------------------------------------------------------------------- without --out
LATEST = Path("runs", "latest")


@pytest.fixture
def unnamed(flags, tmp_path, monkeypatch) -> Callable:
    """unnamed("--more flags"): a command without --out, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def build(more: str = "") -> list[str]:
        argv = flags(Path("none"), more)
        place = argv.index("--out")
        return argv[:place] + argv[place + 2 :]

    return build


@pytest.fixture
def choose(unnamed) -> Callable:
    """choose("--more flags"): the folder that a start gets, and a mark as of one that has locked it."""
    distributed.start(60.0, 0)

    def begin(more: str = "") -> Path:
        args = ppo.parse_args(unnamed(more))
        out = run_folder.choose_folder(args, identity.fingerprint_of(args)).out
        (out / ".lock").write_text(
            json.dumps(run_folder.read_holder(out / ".lock") | {"launcher": run_folder.launcher()})
        )
        return out

    return begin


def test_each_start_without_out_is_a_new_folder(choose, monkeypatch):
    """Two of one second, too; runs/latest names the newest; paths are absolute from the start."""

    moments = iter((5, 5, 5, 6, 6, 7, 8))

    class Clock(run_folder.datetime):
        @classmethod
        def now(cls):
            return cls(2026, 1, 2, 3, 4, next(moments))

    monkeypatch.setattr(run_folder, "datetime", Clock)
    for second in (5, 6, 7):
        folder = choose()
        assert folder == Path.cwd() / "runs" / f"2026-01-02-03040{second}"
        assert os.readlink(LATEST) == folder.name
    # an evaluation reads the newest, and a pointer is followed
    assert choose("--eval_only") == folder
    assert choose("--out runs/latest") == folder
    assert choose(f"--eval_only --resume {folder}") != folder
    assert os.readlink(LATEST) == folder.name


def test_a_restart_by_torchrun_goes_on_in_the_folder_of_its_first_start(choose, monkeypatch):
    """Also after another start has begun a folder; a restart of the other does not."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    first = choose()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    second = choose()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert choose() == second
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert choose() == first != second
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "three")  # which has died before it had a folder
    assert choose() not in (first, second)


@pytest.mark.parametrize(
    "saved, more, told",
    [
        (1, "--gamma 0.9", True),
        (2, "", False),
        (1, "--train_vision", True),
        (1, "--data eval.jsonl", False),
        (0, "", False),
    ],
)
def test_an_unfinished_run_is_mentioned(choose, unnamed, capfd, saved, more, told):
    """If it is of the same model and data: how to go on with it, in one line."""
    folder = choose()
    args = ppo.parse_args(unnamed())
    if saved:
        path = folder / "checkpoints" / f"step-{saved}"
        path.mkdir(parents=True)
        fingerprint = identity.fingerprint_of(args)
        (path / "state.json").write_text(json.dumps({"step": saved, "fingerprint": fingerprint}))
    capfd.readouterr()
    assert choose(more) != folder
    line = f"this is a new run; {folder}, of the same model and data, has stopped after step 1 of 2"
    end = f"{line}: --config {folder}/args.json resumes it\n"
    assert (end in capfd.readouterr().out) == told


def test_without_links_a_file_names_the_folder(choose, monkeypatch):
    def no_link(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", no_link)
    folder = choose()
    assert LATEST.read_text() == f"{folder.name}\n"
    assert choose("--eval_only") == folder


def test_a_stopped_run_says_how_it_goes_on(unnamed):
    """It stops at a signal, goes on, and an earlier step is exported into another folder."""
    told = live(unnamed(), 1, [(stop_at, "update_actor", 1, -1, signal.SIGTERM)], codes=[75])
    out = LATEST.resolve()
    how = f"the same command with --out {out} goes on from there, and with --steps 1 exports"
    assert how in told
    ppo.main(words(*unnamed(), "--out", out))
    assert steps(out) == [2, 1]
    argv = words(*unnamed("--steps 1 --resume"), out / "checkpoints" / "step-1", "--out export")
    ppo.main(argv)
    assert sorted(path.name for path in Path("export/export").iterdir()) == ["latest", "step-1"]
    assert steps(Path("export")) == []


# ----------------------------------------------------------------------------- the place in the data
@pytest.mark.parametrize(
    "name, files, first, second, evaluated",
    table("""
ppo | rows:0.75,judged:0.25 | --rollouts_per_step 2 | --prompts_per_step 8 --rollouts_per_step 4 | 0 2 5 6
grm | judged:1              | --eval_every -1       | --prompts_per_step 2 | 0 2 6
"""),
)
def test_steps_of_another_size_go_on_at_the_next_row(
    qwen25, tmp_path, monkeypatch, name, files, first, second, evaluated
):
    """Two steps of four rows, then four of another size: the rows of a run that nothing happened
    to, once each in a pass, in several files by their shares, with the noise of their own draws;
    passes end where they do."""
    taken, take = [], PromptLoader.take

    def noted(self, least=1):
        rows, batch = take(self, least)
        if least:
            taken.extend(zip(batch.draws, (prompt.source for prompt in batch.prompts)))
        return rows, batch

    monkeypatch.setattr(PromptLoader, "take", noted)
    sets = [part.split(":") for part in files.split(",")]
    data = ",".join(f"{tmp_path}/{file}.jsonl:{share}" for file, share in sets)
    argv = words(
        *small_task(tmp_path, qwen25, name), "--data", data, "--eval_every -1", *first.split()
    )
    SCRIPTS[name].main(words(*argv, "--steps 2"))
    assert len(taken) == 8
    SCRIPTS[name].main(words(*argv, "--steps 6", *second.split()))
    drawn = []
    for file, share in sets:
        drawn += order_of(f"{file}.jsonl", float(share))
    drawn.sort(key=lambda draw: draw[0])
    size = int((second + " --prompts_per_step 4").split("--prompts_per_step ")[1].split()[0])
    count = 8 + 4 * size
    assert taken == [(k, source) for k, (_, source) in enumerate(drawn[:count])]
    last = records(tmp_path / name)[-1]
    assert last["train/epoch" if name == "grm" else "train/episode"] == count / (16 * len(sets))
    seen = [record["step"] for record in records(tmp_path / name) if "eval/seconds" in record]
    assert seen == list(map(int, evaluated.split()))


def order_of(name: str, share: float) -> list[tuple[float, str]]:
    """When each row of a file of 16 rows is due in five passes, and its place."""
    orders = [ppo.np.random.default_rng([0, k]).permutation(16) for k in range(5)]
    rows = [row for order in orders for row in order]
    return [((j + 0.5) / share, f"{name}:{row + 1}") for j, row in enumerate(rows)]


@pytest.mark.parametrize("epochs, last", [(2, 14), (1, 6)])
def test_passes_are_counted_in_rows_that_are_left(epochs, last):
    """--max_epochs of 16 rows, 8 of them drawn in two steps of four: the rest in steps of two."""
    args = grm.parse_args(words("--model m --data d --prompts_per_step 2 --max_epochs", epochs))
    saved = {"step": 2, "rows_drawn": 8, "fingerprint": {"data": "d"}}
    counted = grm.count_steps(args, 16, saved, {"data": "d"})
    assert (counted.steps, counted.max_epochs) == (last, epochs)


def test_passes_over_other_data_begin_anew(qwen25, tmp_path):
    """A finished run goes on with other rows, in a folder of its own: both passes over these."""
    argv = [*small_task(tmp_path, qwen25, "grm"), "--max_epochs", "1"]
    assert grm.main(argv)["train/epoch"] == 1
    shutil.copy(tmp_path / "judged.jsonl", tmp_path / "others.jsonl")
    with open(tmp_path / "others.jsonl", "a") as file:
        file.write('{"prompt": "one more", "response": "one"}\n')
    argv = words(*argv, "--data", tmp_path / "others.jsonl", "--max_epochs 2 --resume")
    metrics = grm.main([*argv, str(tmp_path / "grm"), "--out", str(tmp_path / "on")])
    assert metrics["train/epoch"] == 36 / 17
    assert records(tmp_path / "on")[-1]["step"] == 4 + 9


def test_a_lock_that_is_a_link_is_not_written_through(start, out):
    """Who can write into the folder of a run must not choose which file of its user is emptied."""
    precious = out.parent / "precious"
    precious.write_text("kept")
    out.mkdir(exist_ok=True)
    (out / ".lock").unlink(missing_ok=True)
    (out / ".lock").symlink_to(precious)
    with user_error("symbolic links"):
        start()
    assert precious.read_text() == "kept"
