"""Files from strangers: checkpoints, rows and pictures that are damaged, hostile or without end."""

import json
import os
import random
import socket
import sys
import threading
import time
import unicodedata

import pytest
import torch
from conftest import start
from PIL import Image
from safetensors.torch import save_file
from test_data import RED, edit, load, processor, write_checkpoint  # noqa: F401  (fixtures)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import train_grm_vl as grm
import train_ppo_vl as ppo
from common import judge as judgements, process
from common.settings import DataArgs
from common.vlm import folder as vlm_folder, images
from common.vlm.data import Processor
from common.vlm.folder import characters_per_token
from common.vlm.images import read_clip, read_image
from common.vlm.rows import load_prompts
from common.vlm.weights import build_on_meta, load as load_weights


def within(seconds: float, function):
    """What ``function()`` raises; fails if it has not ended in time."""
    raised = []

    def run():
        try:
            function()
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still running after {seconds} s"
    return raised[0] if raised else None


# --------------------------------------------------------------------------------------------------- what never ends
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_a_picture_is_a_regular_file(tmp_path, monkeypatch, kind):
    """Opening a pipe waits for a writer, and a device has no end."""
    monkeypatch.chdir(tmp_path)                                              # the address of a socket must be short
    listener = socket.socket(socket.AF_UNIX)
    if kind == "pipe":
        os.mkfifo("x.png")
    elif kind == "socket":
        listener.bind("x.png")
    else:
        os.symlink("/dev/zero", "x.png")
    Image.new("RGB", (56, 56)).save("a.png")
    for read in (lambda: read_image("x.png"), lambda: images.image_size("x.png"), lambda: read_clip(("a.png", "x.png"), 2),
                 lambda: images.clip_times(("x.png",), 2.0)):
        error = within(20, read)
        assert error and "x.png" in str(error) and ("regular file" in str(error) or "no such video" in str(error))
    listener.close()


ENDLESS = ("{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
           "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{{ messages[r] }}{% endfor %}{% endfor %}")


@pytest.mark.parametrize("loop", ENDLESS)
def test_a_template_without_end(load, processor, monkeypatch, loop, capsys):  # noqa: F811
    """It is ended in the thread that reads the row; the other rows are fine, and rendering goes on as before."""
    template = "{% if 'endless' in messages | string %}" + loop + "{% endif %}" + processor.tokenizer.chat_template
    monkeypatch.setattr(processor.tokenizer, "chat_template", template)
    monkeypatch.setattr(vlm_folder.TEMPLATE_LIMIT, "seconds", 0.5)
    rows = [{"prompt": "fine"}, {"prompt": "endless"}, *[{"prompt": f"number {i}"} for i in range(40)]]
    error = within(60, lambda: load(rows))
    assert "1 of 42 rows are bad" in str(error) and "train.jsonl:2: the chat template has not rendered this within 0.5" in str(error)
    kept = []
    assert within(60, lambda: kept.extend(load(rows, on_bad_row="skip"))) is None and len(kept) == 41
    assert [prompt.index for prompt in kept[:2]] == [0, 2]


def test_the_time_limit_of_a_block(monkeypatch):
    """It counts from the start of each block, in each thread of its own, and leaves alone who is in time."""
    limit, outcomes = vlm_folder.TimeLimit(0.4), {}

    def work(name: int, pause: float, blocks: int):
        try:
            for _ in range(blocks):
                with limit:
                    deadline = time.perf_counter() + pause
                    while time.perf_counter() < deadline:
                        pass
            outcomes[name] = "done"
        except TimeoutError:
            outcomes[name] = "late"

    threads = [threading.Thread(target=work, args=(k, *what)) for k, what in enumerate([(0.01, 60), (30, 1), (0.0, 2000)])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {0: "done", 1: "late", 2: "done"} and not limit.inside
    time.sleep(0.1)
    work(3, 0.01, 1)
    assert outcomes[3] == "done"


# ------------------------------------------------------------------------------------------------- checkpoint folders
def edit_part(folder, part: str, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", **{part: config[part] | changes})


CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}
DAMAGES = {
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), r"config.json holds no JSON object, but \[1\]"),
    "config is cut": (lambda f: os.truncate(f / "config.json", 50), "config.json cannot be read as JSON"),
    "config is deep": (lambda f: (f / "config.json").write_text("[" * 10**5), "config.json cannot be read as JSON"),
    "config is a folder": (lambda f: (f / "config.json").unlink() or (f / "config.json").mkdir(), "config.json .*regular"),
    "family of a wrong type": (lambda f: edit(f / "config.json", model_type=5), "model_type must be of type str, not 5"),
    "part of a wrong type": (lambda f: edit(f / "config.json", text_config=[1]), r"config.json"),
    "no layers": (lambda f: edit_part(f, "text_config", num_hidden_layers=0), "num_hidden_layers is 0; .* from 1 to 4096"),
    "layers below zero": (lambda f: edit_part(f, "text_config", num_hidden_layers=-1), "config.json: .*num_hidden_layers"),
    "too many layers": (lambda f: edit_part(f, "text_config", num_hidden_layers=10**12),
                        "text_config.num_hidden_layers is 1000000000000"),
    "layers as text": (lambda f: edit_part(f, "text_config", num_hidden_layers="1"), "config.json: .*num_hidden_layers"),
    "layers by half": (lambda f: edit_part(f, "text_config", num_hidden_layers=1.5), "config.json: .*num_hidden_layers"),
    "heads": (lambda f: edit_part(f, "text_config", num_attention_heads=5, num_key_value_heads=5),
              "config.json: .*5"),
    "keys": (lambda f: edit_part(f, "text_config", num_attention_heads=4, num_key_value_heads=3),
             "num_key_value_heads 3 does not divide num_attention_heads 4"),
    "blocks of the tower": (lambda f: edit_part(f, "vision_config", depth=-1), "vision_config.depth is -1"),
    "patches": (lambda f: edit_part(f, "vision_config", patch_size=0), "vision_config.patch_size is 0"),
    "no vocabulary": (lambda f: edit_part(f, "text_config", vocab_size=0), "vocab_size is 0"),
    "image token beyond": (lambda f: edit(f / "config.json", image_token_id=10**6),
                           "the image token has the id 1000000; config.json has a vocab_size of 264"),
    "vocabulary too small": (lambda f: (f / "generation_config.json").unlink() or edit_part(f, "text_config", vocab_size=100),
                             "has the id 26.; .* vocab_size of 100"),
    "layers beyond a list": (lambda f: edit_part(f, "text_config", num_hidden_layers=10**12, layer_types=None),
                             "text_config.num_hidden_layers is 1000000000000"),
    "quantized": (lambda f: edit(f / "config.json", quantization_config={"quant_method": "fp8"}),
                  "config.json: quantization_config .*fp8"),
    "end beyond": (lambda f: edit(f / "generation_config.json", eos_token_id=264),
                   "generation_config.json: eos_token_id 264: must be ids of tokens, from 0 to 263"),
    "ends beyond": (lambda f: edit(f / "generation_config.json", eos_token_id=[258, -1]), r"eos_token_id \[258, -1\]"),
    "end as text": (lambda f: edit(f / "generation_config.json", eos_token_id="<|im_end|>"), "eos_token_id '<.im_end.>'"),
    "end as object": (lambda f: edit(f / "generation_config.json", eos_token_id={"id": 1}), "eos_token_id {'id': 1}"),
    "generation is a list": (lambda f: (f / "generation_config.json").write_text("[]"), "generation_config.json holds no"),
    "empty tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json: model must be of type dict"),
    "tokenizer is a list": (lambda f: (f / "tokenizer.json").write_text("[]"), "tokenizer.json holds no JSON object"),
    "no tokenizer model": (lambda f: edit(f / "tokenizer.json", model={"type": "BPE"}), "the tokenizer's files, tokenizer.j"),
    "its settings": (lambda f: (f / "tokenizer_config.json").write_text("3"), "tokenizer_config.json holds no JSON object"),
    "its end token": (lambda f: edit(f / "tokenizer_config.json", eos_token=[1]), "tokenizer"),
    "template": (lambda f: (f / "chat_template.json").write_text('{"chat_template": 5}'), "chat_template must be of type str"),
    "pictures of CLIP": (lambda f: (f / "preprocessor_config.json").write_text(json.dumps(CLIP)),
                         "preprocessor_config.json: image processor 'CLIP'; that of qwen2_5_vl is Qwen2VL"),
    "pictures of an old CLIP": (lambda f: (f / "preprocessor_config.json").write_text(
        '{"feature_extractor_type": "CLIPFeatureExtractor", "size": 224}'), "image processor 'CLIP'"),
    "size is a number": (lambda f: edit(f / "preprocessor_config.json", size=224), "preprocessor_config.json"),
    "mean is text": (lambda f: edit(f / "preprocessor_config.json", image_mean="grey"), "preprocessor_config.json"),
    "too few means": (lambda f: edit(f / "preprocessor_config.json", image_mean=[0.5, 0.5]), "preprocessor_config.json"),
    "bounds are text": (lambda f: edit(f / "preprocessor_config.json", min_pixels="1"), "min_pixels '1', max_pixels 200704"),
    "giant pictures": (lambda f: edit(f / "preprocessor_config.json", min_pixels=10**12, max_pixels=10**13),
                       "min_pixels 1000000000000, max_pixels 10000000000000: .* min at most 67108864"),
    "judge is a list": (lambda f: (f / "judge.json").write_text("[]"), "judge.json holds no JSON object"),
    "kinds is a list": (lambda f: (f / "judge.json").write_text('{"kinds": [1]}'), "judge.json: kinds must be of type dict"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(tmp_path, damage):
    """One message with the file, when it is opened: before any weight is read."""
    change, message = DAMAGES[damage]
    change(write_checkpoint(tmp_path))
    with pytest.raises(ValueError, match=f"(?s)^checkpoint {tmp_path}: .*{message}"):
        Processor(tmp_path)


def test_a_file_that_is_not_read_as_json_is_a_pipe(tmp_path):
    folder = write_checkpoint(tmp_path)
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    assert "generation_config.json is not a regular file" in str(within(30, lambda: Processor(folder)))


@pytest.mark.parametrize("change", [{"hidden_act": "nonsense"}, {"pad_token_id": 5000},
                                    {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}}])
def test_a_config_of_which_no_model_can_be_made(tmp_path, change):
    edit_part(write_checkpoint(tmp_path), "text_config", **change)
    with pytest.raises(ValueError, match="config.json"):
        build_on_meta(Processor(tmp_path).config, longest=100)


def test_a_token_beyond_the_models_vocabulary_is_a_bad_row(tmp_path):
    """The tokenizers of some checkpoints know more tokens than the model; only a row that uses them is bad."""
    folder = write_checkpoint(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<surplus>"])
    tokenizer.save_pretrained(folder)
    (folder / "rows.jsonl").write_text('{"prompt": "x"}\n{"prompt": "a <surplus>"}\n')
    with pytest.raises(ValueError, match="rows.jsonl:2: token '<surplus>' .* has the id 264; .* vocab_size of 264"):
        load_prompts(str(folder / "rows.jsonl"), Processor(folder), DataArgs())


INDEXES = {
    "{}": "weight_map must be of type dict, not None",
    '{"weight_map": [1]}': r"weight_map must be of type dict, not \[1\]",
    '{"weight_map": {}}': "weight_map is empty",
    "3": "holds no JSON object, but 3",
    "[]": "holds no JSON object",
    '{"weight_map": {"a"': "cannot be read as JSON",
    '{"weight_map": {"a": 3}}': "weight_map names 3,",
    '{"weight_map": {"a": ["x.safetensors"]}}': "weight_map names ",
    '{"weight_map": {"a": "../model.safetensors"}}': "weight_map names '../model.safetensors', .* this folder",
    '{"weight_map": {"a": "/etc/passwd"}}': "weight_map names '/etc/passwd'",
    '{"weight_map": {"a": "b.safetensors"}}': "b.safetensors is missing",
}


@pytest.mark.parametrize("text", INDEXES)
def test_index_of_weights(qwen25, tmp_path, text):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=f"{folder}.*{INDEXES[text]}"):
        load_weights(build_on_meta(Processor(str(qwen25)).config, longest=100), folder)


def test_weights_are_a_folder(qwen25, tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path}: model.safetensors is not a file"):
        load_weights(build_on_meta(Processor(str(qwen25)).config, longest=100), tmp_path)


# ------------------------------------------------------------------------------------------------------ length of rows
def words_tokenizer(added: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with tokens of up to 16 characters, and one more."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges, word = [], "a"
    while len(word) < 16:
        merges.append((word, word))
        word += word
        vocab[word] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer, backend.pre_tokenizer = normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens([added])
    return tokenizer


def test_no_token_stands_for_more_characters_than_the_bound():
    """Of texts that make the most of a token: the longest one, characters composed of four, and any mixture."""
    tokenizer, rng = words_tokenizer("<a-long-added-token>"), random.Random(0)
    bound = characters_per_token(tokenizer)
    assert bound == 4 * len("<a-long-added-token>")
    composed = unicodedata.normalize("NFD", "\u1f82")
    pieces = ["a" * 16, composed, "<a-long-added-token>", "  ", "\u4e2d", "\U0001f600", "b", "\n"]
    texts = [piece * 50 for piece in pieces] + ["".join(rng.choices(pieces, k=60)) for _ in range(50)]
    for text in texts:
        assert len(text) <= bound * len(tokenizer.backend_tokenizer.encode(text).ids)
    assert len(composed * 50) > 8 * 50 / 3 and len(tokenizer.encode("a" * 1600)) == 100


def test_no_character_is_composed_of_more_than_four():
    assert max(len(unicodedata.normalize("NFD", chr(i))) for i in range(sys.maxunicode + 1)
               if not 0xd800 <= i < 0xe000) == 4


def test_a_giant_row_is_refused_before_it_is_tokenized(load, processor):  # noqa: F811
    """Also where its pictures take the rest."""
    bound = processor.characters_per_token
    assert 0 < bound < 100
    with pytest.raises(ValueError, match=r"train.jsonl:2: text too long: 100000\d\d characters are at least \d+ tokens; the "
                                         "limit is 500"):
        load([{"prompt": "fine"}, {"prompt": "x" * 10**7}])
    Processor.token_ids(processor, "x" * (bound * 400), 500, known=99)
    with pytest.raises(ValueError, match="at least 501 tokens; the limit is 500"):
        Processor.token_ids(processor, "x" * (bound * 400), 500, known=101)
    frame = judgements.answer_frame(processor)
    with pytest.raises(ValueError, match=r"text too long: 100000\d\d characters"):
        judgements.encode_target(processor, frame, "x" * 10**7, 500)


# ------------------------------------------------------------------------------------------------------------- messages
FORGED = "a.png\nerror: everything is fine \x1b[2J\u202e"


@pytest.mark.parametrize("row, message", [
    ('{"prompt": "x", "images": "a\\ud800.png"}', "is no Unicode text"),
    ('{"prompt": "x", "images": "a\\udc80.png"}', "is no Unicode text"),
    ('{"prompt": "x", "videos": [["a\\ud800.png", "b.png"]]}', "is no Unicode text"),
    ('{"prompt": "x", "prompt": "y"}', "key 'prompt' is given twice"),
    ('{"prompt": [{"role": "user", "role": "system", "content": "x"}]}', "key 'role' is given twice"),
    (json.dumps({"prompt": "x", "images": FORGED}), r"a.png\\nerror: everything is fine \\x1b\[2J\\u202e"),
])
def test_rows_that_forge_messages(load, capsys, row, message):  # noqa: F811
    """Each is one line with its place, and the lines of the message are ours."""
    data = b'{"prompt": "fine"}\n' + row.encode() + b"\n"
    with pytest.raises(ValueError, match=f"(?m)^  train.jsonl:2: .*{message}") as error:
        load(data)
    assert len(str(error.value).split("\n")) == 2
    str(error.value).encode("utf-8")
    assert len(load(data, on_bad_row="skip")) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_a_message_has_one_first_line(monkeypatch, capsys):
    """What a server or a reward function said may hold anything."""
    def program():
        raise process.UserError(f"the server said {FORGED}\ud800\n\tsecond line")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(process, "leave_group", lambda: None)
    with pytest.raises(SystemExit):
        process.run_main(program)
    lines = capsys.readouterr().err.split("\n")
    assert [line for line in lines if line.startswith("error:")] == [lines[0]] == ["error: the server said a.png"]
    assert lines[1:] == [r"  error: everything is fine \x1b[2J\u202e\ud800", "  \tsecond line", ""]


# ----------------------------------------------------------------------------------------------------------- --image_root
def test_pictures_outside_of_the_root_are_refused(load, tmp_path):  # noqa: F811
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
        prompt, = load([{"prompt": "x", "images": ["rows/a.png", "rows/good.png"]}], image_root=root)
        assert prompt.images == (str(inside / "a.png"),) * 2
        for row in ({"images": "a.png"}, {"images": "rows/bad.png"}, {"images": "rows/door/a.png"},
                    {"images": "rows/../a.png"}, {"images": str(outside / "a.png")}, {"images": "rows-2/a.png"},
                    {"videos": [["rows/a.png", "rows/bad.png"]]}, {"videos": ["rows/door/a.gif"]},
                    {"prompt": [{"role": "user", "content": [{"type": "image", "image": "rows/bad.png"},
                                                             {"type": "text", "text": "x"}]}]}):
            with pytest.raises(ValueError, match="train.jsonl:1: .* lies outside of --image_root"):
                load([{"prompt": "x"} | row], image_root=root)
    assert load([{"prompt": "x", "images": "rows/bad.png"}])[0].images == (str(inside / "bad.png"),)


def test_both_scripts_know_the_root(tmp_path, qwen25, picture_rows):
    folder = os.path.dirname(picture_rows)
    assert len(start(qwen25, picture_rows, "--image_root", folder).prompts) == 4
    with pytest.raises(process.UserError, match="lies outside of --image_root"):
        start(qwen25, picture_rows, "--image_root", str(tmp_path))
    row = {"prompt": "x", "images": [os.path.join(folder, "picture-1-0.png")], "response": "y"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    common = ["--model", str(qwen25), "--data", str(tmp_path / "rows.jsonl"), "--image_root"]
    assert len(grm.load_rows(grm.parse_args([*common, folder])).train) == 1
    with pytest.raises(process.UserError, match="lies outside of --image_root"):
        grm.load_rows(grm.parse_args([*common, str(tmp_path)]))
    for script in (ppo, grm):
        with pytest.raises(process.UserError, match="--image_root none: no such folder"):
            script.parse_args([*common, "none"])
    ptx = ["--ptx_data", str(tmp_path / "rows.jsonl"), "--ptx_coef", "0.1", "--image_root", str(tmp_path)]
    args = ppo.parse_args(["--model", str(qwen25), "--data", picture_rows, *ptx])
    with pytest.raises(process.UserError, match="(?s)--ptx_data .*lies outside of --image_root"):
        ppo.load_text(args, Processor(str(qwen25)))
