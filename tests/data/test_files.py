"""Files from strangers: checkpoints and rows that are damaged, text that forges messages, pictures
outside of a root."""

import ast
import copy
import functools
import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

import train_grm_vl as grm
import train_ppo_vl as ppo
from common.data.folder import read_tokenizer
from common.data.processor import Processor
from common.data.rows import load_prompts
from common.flags import DataArgs
from common.ground import files, process
from common.model.build import build_model
from common.model.weights import open_weights, resolve_folder, weight_index
from common.rewards.judgements import KINDS, JudgeSettings
from conftest import (
    read_json,
    same_tensors,
    start,
    table,
    user_error,
    words,
    write_json,
    write_rows,
)
from helpers import COMPUTE, RED, edit, load_model, load_weights, write_processor


# -------------------------------------------------------------------------------------------------
# checkpoint folders
def edit_part(folder, part: str, **changes) -> None:
    config = read_json(folder / "config.json")
    edit(folder / "config.json", **{part: config[part] | changes})


DAMAGES = table("""
config.json            | cut  | config.json
config.json            | gone | config.json
config.json            | {"text_config": {"num_hidden_layers": "1"}} | config.json: .*num_hidden_layers
config.json | {"quantization_config": {"quant_method": "fp8"}}
    | config.json: quantization_config .*fp8
config.json | {"model_type": "their_own", "auto_map": {"AutoConfig": "configuration.TheirConfig"}}
    | config.json: it needs Python code of its own, which is never run here$
generation_config.json | []   | generation_config.json must be dict, not
tokenizer_config.json  | {"model_max_length": "x"} | the tokenizer's files cannot be used
preprocessor_config.json | {"image_processor_type": 7}
    | preprocessor_config.json: image_processor_type must be str, not 7
tokenizer*             | gone | no vocabulary: tokenizer.json
tokenizer.json         | {}   | the tokenizer's files cannot be used
tokenizer.json         | version https://git-lfs.github.com/spec/v1 | tokenizer.json is a pointer of git-lfs
chat_template.jinja    | gone | no chat template
preprocessor_config.json | gone | no preprocessor_config.json
preprocessor_config.json | {"image_processor_type": "CLIPImageProcessor"}
    | preprocessor_config.json names the image processor 'CLIP'; qwen2_5_vl needs Qwen2VL
preprocessor_config.json | {"size": 448} | preprocessor_config.json: size must be dict, not 448
preprocessor_config.json | {"image_mean": "grey"} | preprocessor_config.json
preprocessor_config.json | {"min_pixels": 900, "max_pixels": 800} | min_pixels 900 is more than max_pixels 800
""")


def damage(path, change: str) -> None:
    """Cut or delete a file, change some of its settings, or write it anew."""
    if change == "cut":
        os.truncate(path, 50)
    elif change == "gone":
        path.unlink()
    elif change.startswith('{"text_config"'):
        edit_part(path.parent, "text_config", **json.loads(change)["text_config"])
    elif change.startswith('{"'):
        edit(path, **json.loads(change))
    else:
        path.write_text(change)


@pytest.mark.parametrize("names, change, message", DAMAGES)
def test_damaged_checkpoint(tmp_path, names, change, message):
    """One message with the file, when it is opened: before any weight is read."""
    for path in list(write_processor(tmp_path).glob(names)):
        damage(path, change)
    with user_error(f"(?s)^checkpoint {tmp_path}: .*{message}"):
        Processor(tmp_path)


def test_a_token_beyond_the_models_vocabulary_is_a_bad_row(tmp_path):
    """The tokenizers of some checkpoints know more tokens than the model; only a row that uses them
    is bad."""
    folder = write_processor(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<surplus>"])
    tokenizer.save_pretrained(folder)
    (folder / "rows.jsonl").write_text('{"prompt": "x"}\n{"prompt": "a <surplus>"}\n')
    with user_error("rows.jsonl:2: token '<surplus>' .* has the id 264; .* vocab_size of 264"):
        load_prompts(str(folder / "rows.jsonl"), Processor(folder), DataArgs())


# ------------------------------------------------------------------------------- what JSON must be
WEIGHT_INDEX, SCORES = (
    {"weight_map": {str: str}},
    {"count": range(1, 9), "step?": int | float, "words?": [str]},
)


@pytest.mark.parametrize(
    "form, value, problem",
    [
        (WEIGHT_INDEX, {"weight_map": {"a": "b"}, "metadata": 3}, ""),
        (WEIGHT_INDEX, {}, "f.json: weight_map must be dict, not None"),
        (WEIGHT_INDEX, {"weight_map": {"a": 3}}, "f.json: weight_map: a must be str, not 3"),
        (WEIGHT_INDEX, ["weight_map"], "f.json must be dict, not ['weight_map']"),
        (SCORES, {"count": 1, "step": 2.5, "words": None}, ""),
        (SCORES, {"count": 0}, "f.json: count must be an integer from 1 to 8, not 0"),
        (SCORES, {"count": []}, "f.json: count must be an integer from 1 to 8, not []"),
        (SCORES, {"count": 8, "step": "2"}, "f.json: step must be int | float, not '2'"),
        (SCORES, {"count": 8, "words": ["a", None]}, "f.json: words: each must be str, not None"),
        (SCORES, {"count": 8, "words": "a"}, "f.json: words must be list, not 'a'"),
    ],
)
def test_what_json_must_be(tmp_path, form, value, problem):
    write_json(tmp_path / "f.json", value)
    if not problem:
        assert files.read_json(tmp_path / "f.json", form) == value
        return
    with user_error(re.escape(f"{tmp_path}/{problem}") + "$"):
        files.read_json(tmp_path / "f.json", form)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{", "not JSON: Expecting property name"),
        ("", "not JSON: Expecting value"),
        ('{"a": 1},', "not JSON: Extra data at column 9"),
        ('{"a": 1}\n,', "not JSON: Extra data at line 2, column 1"),
        ("\udcff", "not JSON: .*utf-8"),
        ("9" * 5000, "not JSON: Exceeds the limit"),
        ("[" * 99_999, "not JSON: maximum recursion"),
    ],
)
def test_what_is_no_json_is_one_message(tmp_path, text, problem):
    (tmp_path / "f.json").write_text(text, errors="surrogateescape")
    with user_error(f"^{tmp_path}/f.json: .*{problem}"):
        files.read_json(tmp_path / "f.json", int | list)
    assert files.parse_json("[" * 99 + "1" + "]" * 99, "")[0]


JUDGE = {
    "system_instruction": "Judge.",
    "templates": {kind: entry.template for kind, entry in KINDS.items()},
    "verdicts": {"correct": ["yes", "no"], "score": ["1", "2.5"]},
    "thoughts": False,
    "position_consistency": 0.75,
}


EDITED_JUDGES = table(r"""
system_instruction            | 3              | must be str
templates                     | ["correct"]    | must be dict
templates.correct             | 3              | must be str
templates.correct             | "{prompt}?"    | correct must hold {prompt}, {response}
templates.beauty              | "x"            | 'beauty' is no kind of judgement
verdicts                      | "correct"      | must be dict
verdicts.correct              | 3              | must be list
verdicts.correct              | []             | has the verdicts \[\], expected
verdicts.correct              | ["yes", "perhaps"] | perhaps.*expected \['yes', 'no'\]
verdicts.correct              | ["yes", "yes", "no"] | expected
verdicts.score                | ["1", "good"]  | good.*expected numbers
verdicts.beauty               | []             | 'beauty' is no kind of judgement
thoughts                      | "no"           | thoughts must be bool
position_consistency          | "1"            | position_consistency must be
taught_by                     | "me"           | another version, with taught_by
""")


@pytest.mark.parametrize("path, value, problem", EDITED_JUDGES)
def test_an_edited_judge_json_is_refused(path, value, problem):
    judge = copy.deepcopy(JUDGE)
    *outer, last = path.split(".")
    functools.reduce(dict.get, outer, judge)[last] = json.loads(value)
    with user_error(f"judge.json.*{problem}"):
        JudgeSettings.of(SimpleNamespace(files={"judge": judge}))
    saved = SimpleNamespace(files={"judge": JUDGE | {"template_options": {"a": 1}}})
    assert vars(JudgeSettings.of(saved)) == JUDGE


def test_a_judge_json_of_an_earlier_version_is_one_message():
    earlier = {
        "system_instruction": "",
        "kinds": {"correct": {"template": "{prompt}{response}", "verdicts": ["yes", "no"]}},
        "trained_on": ["correct"],
        "template_options": {},
        "held_out": None,
    }
    with user_error("judge.json is of another version, with held_out, kinds, trained_on: train"):
        JudgeSettings.of(SimpleNamespace(files={"judge": earlier}))


@pytest.mark.parametrize(
    "part, changes",
    table("""
text_config   | {"num_attention_heads": 0}
text_config   | {"num_key_value_heads": 0}
text_config   | {"hidden_size": 3}
text_config   | {"hidden_act": "x"}
text_config   | {"rope_parameters": {"rope_type": []}}
text_config   | {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}
vision_config | {"num_heads": 0}
"""),
)
def test_a_config_with_sizes_that_no_model_has(tmp_path, part, changes):
    """Transformers says which."""
    edit_part(write_processor(tmp_path), part, **json.loads(changes))
    with user_error("config.json: "):
        build_model(Processor(tmp_path).config, COMPUTE)


def test_index_of_weights(qwen25, tmp_path):
    index = {"weight_map": {"a": "b.safetensors"}}
    write_json(tmp_path / "model.safetensors.index.json", index)
    shutil.copy(qwen25 / "config.json", tmp_path)
    with user_error(f"{tmp_path}/b.safetensors cannot be read as safetensors: .*No such file"):
        load_weights(build_model(Processor(str(qwen25)).config, COMPUTE), tmp_path)


def shifted(qwen25, by: float) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, all larger by a number."""
    return {key: value + by for key, value in load_file(qwen25 / "model.safetensors").items()}


@pytest.mark.parametrize(
    "named, expected", [(None, 1), ("index.safetensors.index.json", 2), ("other.safetensors", 3)]
)
def test_weights_are_those_that_from_pretrained_reads(qwen25, tmp_path, named, expected):
    """A stale index beside a newer model.safetensors, and the files that config.json may name."""
    shutil.copytree(qwen25, tmp_path, dirs_exist_ok=True)
    save_file(shifted(qwen25, 1), tmp_path / "model.safetensors", {"format": "pt"})
    save_file(shifted(qwen25, 2), tmp_path / "part.safetensors", {"format": "pt"})
    save_file(shifted(qwen25, 3), tmp_path / "other.safetensors", {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(load_file(qwen25 / "model.safetensors"), "part.safetensors"),
    }
    for name in ("model", "index"):
        write_json(tmp_path / f"{name}.safetensors.index.json", index)
    edit(tmp_path / "config.json", transformers_weights=named)
    model, theirs = load_model(tmp_path), AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, theirs.lm_head.weight)
    assert torch.equal(
        model.lm_head.weight, load_file(qwen25 / "model.safetensors")["lm_head.weight"] + expected
    )


@pytest.mark.parametrize(
    "name, message",
    [
        ("FOLDER/modle", "modle: no such folder$"),
        ("runs/sft/export/step-9", "step-9: no such folder$"),
        ("~/modle", "modle: no such folder$"),
        (
            "runs/modle",
            "runs/modle: no such folder; and the hub, where a model might have this name, cannot be reached$",
        ),
    ],
)
def test_a_mistyped_folder_is_called_that(tmp_path, name, message):
    with user_error(message):
        resolve_folder(name.replace("FOLDER", str(tmp_path)))


def test_a_file_is_no_model_but_a_config_means_its_folder(qwen25):
    with user_error("model.safetensors: this is a file; name the folder of the model"):
        resolve_folder(f"{qwen25}/model.safetensors")
    assert resolve_folder(f"{qwen25}/config.json") == qwen25


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_is_refused_with_the_program_that_merges_it(tmp_path, has_config):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct"}
    write_json(tmp_path / "adapter_config.json", adapter)
    if has_config:
        (tmp_path / "config.json").write_text("{}")
    with user_error(f"checkpoint {tmp_path}: this is an adapter") as error:
        resolve_folder(str(tmp_path))
    program = str(error.value).splitlines()[1:-1]
    ast.parse("\n".join(program))
    assert "Qwen/Qwen2.5-VL-3B-Instruct" in program[2]
    assert str(tmp_path) in program[3]


@pytest.mark.parametrize("parts", [1, 2])
def test_pickled_weights_are_refused_with_two_lines_that_convert_them(
    qwen25, picture_rows, tmp_path, monkeypatch, parts
):
    shutil.copytree(qwen25, tmp_path, dirs_exist_ok=True)
    weights = load_file(qwen25 / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weights["visual.patch_embed.proj.weight"] = (
        weights["visual.patch_embed.proj.weight"].mT.contiguous().mT
    )
    # one memory
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for part in range(parts):
        names = list(weights)[part::parts]
        torch.save(
            {name: weights[name] for name in names},
            tmp_path / f"pytorch_model{f'-{part}' * (parts - 1)}.bin",
        )
    with user_error("model.safetensors cannot be read as safetensors: No such file") as error:
        start(tmp_path, picture_rows)
    monkeypatch.chdir(tmp_path)
    exec("\n".join(str(error.value).splitlines()[-2:]), {})
    assert same_tensors(load_file(tmp_path / "model.safetensors"), weights)
    load_model(tmp_path)
    AutoModelForImageTextToText.from_pretrained(tmp_path)


def test_a_part_of_a_snapshot_of_the_hub_is_to_be_downloaded(qwen25, tmp_path):
    """As launch/plan.py, a program that read config.json, or a download that was interrupted leave it in the
    cache."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    shutil.copytree(qwen25, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    advice = r"\. The cache of the hub does not have all of it: hf download org/name$"
    with user_error(f"No such file{advice}"):
        weight_index(snapshot)
    with user_error(f"part.safetensors cannot be read as safetensors: .*{advice}"):
        open_weights(snapshot / "part.safetensors")
    only_config = tmp_path / "models--org--name" / "snapshots" / "4567"
    only_config.mkdir()
    shutil.copy(snapshot / "config.json", only_config)
    with user_error(f"no vocabulary: .* are missing{advice}"):
        read_tokenizer(only_config)
    (snapshot / "pytorch_model.bin").write_bytes(b"")
    with user_error(r"No such file. If it has pytorch_model\*.bin, run these two lines"):
        weight_index(snapshot)


# ------------------------------------------------------------------------------------------------
# messages
FORGED = "a.png\nerror: everything is fine \x1b[2J\u202e"


@pytest.mark.parametrize(
    "row, message",
    [
        ('{"prompt": "x", "images": "a\\ud800.png"}', "an image must be the path of a file"),
        (
            json.dumps({"prompt": "x", "images": FORGED}),
            r"a.png\\nerror: everything is fine \\x1b\[2J\\u202e",
        ),
    ],
)
def test_rows_that_forge_messages(load, capsys, row, message):
    """Each is one line with its place, and the lines of the message are ours."""
    data = b'{"prompt": "fine"}\n' + row.encode() + b"\n"
    with user_error(f"(?m)^  train.jsonl:2: .*{message}") as error:
        load(data)
    advice = ["  (--on_bad_row skip leaves such rows out)"]
    assert str(error.value).split("\n")[2:] in ([], advice)
    str(error.value).encode("utf-8")
    assert len(load(data, on_bad_row="skip")) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_a_message_has_one_first_line(monkeypatch, capsys):
    """What a server or a reward function said may hold anything."""

    def program():
        raise process.UserError(f"the server said {FORGED}\ud800\n\tsecond line")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(process, "GIVEN_UP", [])
    with pytest.raises(SystemExit):
        process.run_main(program)
    lines = capsys.readouterr().err.split("\n")
    assert (
        [line for line in lines if line.startswith("error:")]
        == [lines[0]]
        == ["error: the server said a.png"]
    )
    assert lines[1:] == [r"  error: everything is fine \x1b[2J\u202e\ud800", "  \tsecond line", ""]


# -----------------------------------------------------------------------------------------------------------
# --image_root
OUTSIDE = """\
{"images": "a.png"}
{"images": "rows/bad.png"}
{"images": "rows/door/a.png"}
{"images": "rows/../a.png"}
{"images": "OUT/a.png"}
{"images": "rows-2/a.png"}
{"videos": [["rows/a.png", "rows/bad.png"]]}
{"videos": ["rows/door/a.gif"]}
{"prompt": [{"role": "user", "content": [{"type": "image", "image": "rows/bad.png"}, {"type": "text", "text": "x"}]}]}
"""


def test_pictures_outside_of_the_root_are_refused(load, tmp_path):
    """After resolving links, of pictures, of videos and of the root itself."""
    outside, inside = tmp_path / "outside", tmp_path / "rows"
    for folder in (outside, inside):
        folder.mkdir()
        Image.new("RGB", (64, 40), RED).save(folder / "a.png")
    (inside / "good.png").symlink_to("a.png")
    (inside / "bad.png").symlink_to("../outside/a.png")
    (inside / "door").symlink_to("../outside")
    (tmp_path / "link").symlink_to("rows")
    for root in (str(inside), str(tmp_path / "link")):
        (prompt,) = load(
            [{"prompt": "x", "images": ["rows/a.png", "rows/good.png"]}], image_root=root
        )
        assert prompt.images == (str(inside / "a.png"),) * 2
        for row in OUTSIDE.replace("OUT", str(outside)).splitlines():
            with user_error("train.jsonl:1: .* lies outside of --image_root"):
                load([{"prompt": "x"} | json.loads(row)], image_root=root)
    assert load([{"prompt": "x", "images": "rows/bad.png"}])[0].images == (str(inside / "bad.png"),)


def test_both_scripts_know_the_root(tmp_path, qwen25, picture_rows):
    folder = os.path.dirname(picture_rows)
    assert len(start(qwen25, picture_rows, "--image_root", folder).prompts) == 4
    with user_error("lies outside of --image_root"):
        start(qwen25, picture_rows, "--image_root", tmp_path)
    row = {"prompt": "x", "images": [os.path.join(folder, "picture-1-0.png")], "response": "y"}
    write_rows(tmp_path / "rows.jsonl", [row])
    common = words("--model", qwen25, "--data", tmp_path / "rows.jsonl", "--image_root")
    assert len(grm.load_rows(grm.parse_args([*common, folder])).train) == 1
    with user_error("lies outside of --image_root"):
        grm.load_rows(grm.parse_args([*common, str(tmp_path)]))
    for script in (ppo, grm):
        with user_error("--image_root none: no such folder"):
            script.parse_args([*common, "none"])
    ptx = words("--ptx_data", tmp_path / "rows.jsonl", "--ptx_coef 0.1 --image_root", tmp_path)
    args = ppo.parse_args(words("--model", qwen25, "--data", picture_rows, *ptx))
    with user_error("(?s)--ptx_data .*lies outside of --image_root"):
        ppo.load_ptx(args, Processor(str(qwen25)))


def test_both_scripts_tell_of_held_out_rows_that_are_training_rows(tmp_path, qwen25, capsys):
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"))]
    rows = [
        {"prompt": "x", "response": "y"},
        {
            "messages": [
                *turns,
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ]
        },
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "held.jsonl", [{"prompt": "x", "response": "z"}, rows[1]])
    files = words("--model", qwen25, "--data", tmp_path / "train.jsonl", "--eval_data")
    grm.load_rows(grm.parse_args([*files, str(tmp_path / "held.jsonl")]))
    told = "1 of 2 held-out rows are training rows, too: the same prompt, images and answer, as in held.jsonl:2"
    assert f"{told} and train.jsonl:2" in capsys.readouterr().out
    write_rows(tmp_path / "train.jsonl", [{"prompt": "x", "answer": "y"}])
    write_rows(tmp_path / "held.jsonl", [{"prompt": "x", "answer": answer} for answer in "zy"])
    ppo.load_rows(ppo.parse_args([*files, str(tmp_path / "held.jsonl")]))
    assert f"{told} and train.jsonl:1" in capsys.readouterr().out
