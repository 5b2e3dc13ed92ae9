"""Rows and pictures to tensors: what the rows mean, what the pictures become, and that every bad
input is refused.

Pictures are a few pixels whose RGB values are written down by hand; the processor of transformers
is the oracle of the patch grids. The checkpoint is a byte-level tokenizer and a tiny config, made
here."""

import json
import random
import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

from common.data import images
from common.data.folder import copy_files, read_tokenizer, write_word_pattern
from common.data.images import image_size, read_image
from common.data.loader import load_pixels
from common.data.overlap import tell_shared_rows
from common.data.processor import Processor, answer_frame
from common.data.rows import load_prompts, parse_columns
from common.flags import DataArgs
from common.ground.files import UserError
from common.model.build import build_model
from common.model.weights import materialize, resolve_folder
from common.rewards.judgements import load_judgements, read_rubric
from conftest import (
    judge_settings,
    read_json,
    table,
    user_error,
    write_image,
    write_json,
    write_rows,
)
from helpers import (
    BLUE,
    BOX,
    COMPUTE,
    EOT,
    GREEN,
    IM_END,
    IM_START,
    IMAGE,
    PYTHONS_WORDS,
    RED,
    SPECIAL,
    TEMPLATE,
    VIDEO,
    VISION_END,
    VISION_START,
    WHITE,
    edit,
    odd_value,
    write_processor,
)

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"
# What published templates write: name, its template, eos_token, what ends a turn.
TURN_ENDS = [
    ("Qwen2.5 base", CHATML + CHATML_PROMPT, "<|endoftext|>", "<|im_end|>"),
    ("Qwen2.5", CHATML + CHATML_PROMPT, "<|im_end|>", "<|im_end|>"),
    (
        "R1 distill",
        "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
        "{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        "<|eos|>",
        "<|eos|>",
    ),
    (
        "Mistral",
        "<s>{% for m in messages %}{% if m.role == 'user' %} [INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>"
        "{% endif %}{% endfor %}",
        "</s>",
        "</s>",
    ),
    (
        "Gemma",
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<eos>",
        "<end_of_turn>",
    ),
    (
        "LLaVA",
        "{% for m in messages %}{{ m.role.upper() }}: "
        + PARTS
        + " {% endfor %}{% if add_generation_prompt %}ASSISTANT:"
        "{% endif %}",
        "</s>",
        "</s>",
    ),
    ("prompts alone", "{{ messages[0].content }}", "</s>", "</s>"),
]


@pytest.mark.parametrize("name, template, eos, end", TURN_ENDS)
def test_what_the_template_writes_behind_an_answer_ends_a_turn(
    tmp_path, capsys, name, template, eos, end
):
    folder = write_processor(tmp_path / "model", template=template)
    retokenize(
        folder,
        "<|endoftext|>",
        "<|User|>",
        "<|Assistant|>",
        "<|eos|>",
        "</s>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<eos>",
    )
    edit(folder / "tokenizer_config.json", eos_token=eos)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    eos_id, end_id = tokenizer.convert_tokens_to_ids([eos, end])
    edit(folder / "generation_config.json", eos_token_id=eos_id)
    processor = Processor(folder)
    assert set(processor.stop_ids) == {eos_id, end_id}
    if name != "prompts alone":
        assert answer_frame(processor).end == end_id
    assert capsys.readouterr().out == ""
    # others' `generate` stops there, too
    processor.save(tmp_path / "export")
    written = read_json(tmp_path / "export" / "generation_config.json")["eos_token_id"]
    assert written == (eos_id if eos == end else sorted({eos_id, end_id}))


def test_a_template_that_does_not_begin_the_answer_is_said(tmp_path, capsys):
    """Or a policy would be sampled behind the user's turn."""
    Processor(write_processor(tmp_path / "a"))
    assert "add_generation_prompt" not in capsys.readouterr().out
    folder = write_processor(tmp_path / "b", template=TEMPLATE.partition("{% if add_gen")[0])
    Processor(folder)
    assert (
        f"warning: {folder}: the chat template ignores add_generation_prompt: prompts end without "
        "'<|im_start|>assistant\\n'"
    ) in capsys.readouterr().out


def test_a_text_lacks_only_what_ends_a_turn_pads_or_stands_for_pixels(tmp_path):
    """Other special tokens are what the model says: boxes, tags that were registered, tool calls."""
    folder = write_processor(tmp_path)
    retokenize(folder, "<pad>", "<pad>", "<answer>", "</answer>", "[TOOL_CALLS]")
    processor = Processor(folder)
    texts = [
        "<|box_start|>(1,2) , x",
        "<answer>3</answer>",
        "[TOOL_CALLS] {}",
        "<|im_start|>",
        " two  spaces ",
        "",
    ]
    for stop in (IM_END, EOT):
        tokens = [
            torch.tensor(
                [IMAGE, *processor.token_ids(text), stop, *processor.token_ids("<pad><pad>")]
            )
            for text in texts
        ]
        assert processor.decode(tokens) == texts


LISTS = "{{ p.text if p.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}"
HEAD, END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n",
    "<|im_end|>\n{% endfor %}" + CHATML_PROMPT,
)
STRINGS_ONLY = [
    # our parts vanish
    HEAD + "{% if m.content is string %}{{ m.content }}{% endif %}" + END,
    # Python's, JSON's list
    CHATML + CHATML_PROMPT,
    HEAD + "{{ m.content | tojson if m.content is not string else m.content }}" + END,
    # raises
    HEAD + "{{ m.content.strip() }}" + END,
]
FOR_IMAGES = (  # of the system's message it knows strings only, as Llama 3.2's
    HEAD
    + "{% if m.role == 'system' %}{% if m.content is string %}{{ m.content }}{% endif %}{% else %}"
    "{% for p in m.content %}" + LISTS + "{% endfor %}{% endif %}" + END
)


@pytest.mark.parametrize(
    "template, images", [*((template, []) for template in STRINGS_ONLY), (FOR_IMAGES, ["a.png"])]
)
def test_a_template_that_knows_only_strings_gets_strings(
    load, processor, monkeypatch, template, images
):
    monkeypatch.setattr(processor.tokenizer, "chat_template", template)
    (prompt,) = load([{"prompt": 'What "is"\nit?', "images": images}], system_prompt="It's brief.")
    assert prompt.text == rendered(
        ("system", "It's brief."), ("user", PICTURE * len(images) + 'What "is"\nit?')
    )


REFUSED_TEMPLATES = table("""
{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}
    | leaves out what the system says: 'Brief.'
user\\n{{ question }}
    | leaves out what the system says: 'Brief.'
{{ messages[0].content }}{{ messages[-1].content.upper() }}
    | .*leaves out what the user says: 'What\\?'
{{ raise_exception('no pictures here') }}
    | cannot render this .*no pictures here
{% for m in messages %}{{ m.role + m.content }}{% endfor %}              | cannot render this .*TypeError
""")


@pytest.mark.parametrize("template, message", REFUSED_TEMPLATES)
def test_a_template_that_loses_a_text_is_refused(load, processor, monkeypatch, template, message):
    monkeypatch.setattr(processor.tokenizer, "chat_template", template)
    images = ["a.png"] * ("render" in message)
    with user_error(f"train.jsonl:1: the chat template {message}"):
        load([{"prompt": "What?", "images": images}], system_prompt="Brief.")


def test_a_template_without_a_place_for_pictures_is_refused(load, processor, monkeypatch):
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(processor.tokenizer, "chat_template", template)
    with user_error("train.jsonl:1: image-token mismatch: placeholders .* for 1 images"):
        load([{"prompt": "x", "images": "a.png"}])


def test_a_template_may_change_what_it_is_known_to_change(load, processor, monkeypatch):
    """Thoughts of earlier turns, which Qwen3 and R1 leave out; white space around a text; what a
    tool says, JSON in Llama 3."""
    monkeypatch.setattr(
        processor.tokenizer,
        "chat_template",
        HEAD + "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}"
        "{{ m.content.split('</think>')[-1].strip() }}{% endif %}" + END,
    )
    row = r"""{"prompt": [{"role": "user", "content": " Hi \n"},
    {"role": "assistant", "content": "<think>a</think>\n\nYes"},
    {"role": "tool", "content": "é \"1\"\n2"}]}"""
    (prompt,) = load([json.loads(row)])
    assert prompt.text == rendered(
        ("user", "Hi"), ("assistant", "Yes"), ("tool", '"é \\"1\\"\\n2"')
    )


def test_options_reach_the_template(tmp_path):
    template = (
        TEMPLATE + "{% if add_generation_prompt %}"
        "{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
    )
    folder = write_processor(tmp_path / "model", template=template)
    chat = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    for options, ending in (
        ("", "</think>\n\n"),
        ('{"enable_thinking": true}', "assistant\n<think>\n"),
    ):
        processor = Processor(folder, DataArgs(template_options=options))
        processor.check_options()
        assert processor.encode(chat, ())[0].endswith(ending)
        assert answer_frame(processor).head.endswith(ending)
    # its own, unless a flag says
    (folder / "judge.json").write_text('{"template_options": {"enable_thinking": true}}')
    for options, ending in (("", "assistant\n<think>\n"), ("{}", "</think>\n\n")):
        assert (
            Processor(folder, DataArgs(template_options=options))
            .encode(chat, ())[0]
            .endswith(ending)
        )
    with user_error("--template_options: the chat template knows no 'enable_thinkin'"):
        Processor(folder, DataArgs(template_options='{"enable_thinkin": true}')).check_options()


def test_token_ids(processor, tmp_path):
    assert (
        processor.family.image_token_id,
        processor.family.patch_size,
        processor.family.merge_size,
    ) == (IMAGE, 14, 2)
    assert processor.stop_ids == (IM_END, EOT)
    assert processor.banned_ids == (VISION_START, VISION_END, IMAGE, VIDEO)
    folder = write_processor(tmp_path)
    edit(folder / "config.json", vision_end_token_id=151653)  # beyond the vocabulary
    (folder / "generation_config.json").unlink()
    processor = Processor(folder)
    assert processor.stop_ids == (IM_END,)
    assert processor.banned_ids == (VISION_START, IMAGE, VIDEO)


def retokenize(folder, pad_token, *special):
    """Rewrites the folder's tokenizer: another pad token or none, and further special tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.pad_token = pad_token
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, *special]})
    tokenizer.save_pretrained(folder)
    edit(
        folder / "config.json",
        text_config=read_json(folder / "config.json")["text_config"]
        | {"vocab_size": len(tokenizer), "pad_token_id": None},
    )


def test_no_pad_token_is_added_and_one_that_ends_turns_is_trained(tmp_path):
    """An export with pad = eos would have other programs take each end for padding."""
    folder = write_processor(tmp_path / "bare")
    retokenize(folder, None)
    processor = Processor(folder)
    assert (
        processor.tokenizer.pad_token_id is processor.config.get_text_config().pad_token_id is None
    )
    processor.save(tmp_path / "again")
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "again").pad_token_id is None
    retokenize(folder, "<|im_end|>")
    edit(
        folder / "config.json",
        text_config=read_json(folder / "config.json")["text_config"] | {"pad_token_id": IM_END},
    )
    model = build_model(Processor(folder).config, COMPUTE)
    assert model.config.get_text_config().pad_token_id == IM_END
    # the end of a turn is still trained
    materialize(model, torch.device("cpu"))
    embedding = model.get_input_embeddings()
    embedding(torch.tensor([IM_END, IM_START])).sum().backward()
    assert (embedding.weight.grad.abs().sum(dim=1) > 0).nonzero()[:, 0].tolist() == [
        IM_END,
        IM_START,
    ]


@pytest.mark.parametrize(
    "ends, stops", [(EOT, (IM_END, EOT)), (None, (IM_END,)), ([EOT, BOX], (IM_END, EOT, BOX))]
)
@pytest.mark.parametrize("gemma", [False, True])
def test_stop_tokens_are_those_of_generation_config_tokenizer_and_template(
    tmp_path, ends, stops, gemma
):
    """Gemma's tokenizers have another eos_token than what its templates end a turn with."""
    folder = write_processor(
        tmp_path, template=TEMPLATE.replace("<|im_end|>", "<end_of_turn>") if gemma else TEMPLATE
    )
    if gemma:
        retokenize(folder, "<|endoftext|>", "<end_of_turn>")
    edit(folder / "generation_config.json", eos_token_id=ends)
    assert Processor(folder).stop_ids == stops + (BOX + 1,) * gemma


@pytest.mark.parametrize(
    "family, low, high",
    [
        ("qwen2_5_vl", 0, 0),
        ("qwen2_5_vl", 50_000, 90_000),
        ("qwen2_5_vl", 784, 784),
        ("qwen3_vl", 0, 0),
        ("qwen3_vl", 1024, 9000),
    ],
)
def test_grids_from_headers_equal_the_processors(tmp_path, family, low, high):
    args = DataArgs(min_pixels=low, max_pixels=high)
    family, rng = Processor(write_processor(tmp_path, family), args).family, random.Random(0)
    for width, height in [(1, 1), (3, 500), (1, 200), (28, 28), (32, 32), (700, 4)] + [
        (rng.randint(1, 400), rng.randint(10, 400)) for _ in range(25)
    ]:
        batch = family.image_processor(
            images=[Image.new("RGB", (width, height))], return_tensors="pt"
        )
        assert family.grid(width, height) == tuple(batch["image_grid_thw"][0].tolist()), (
            width,
            height,
        )


@pytest.mark.parametrize(
    "settings, flags, bounds",
    table("""
{"min_pixels": 3136, "max_pixels": 9000}                     | [0, 0]       | [3136, 9000]
{"min_pixels": "3136", "max_pixels": "9000"}                 | [0, 0]       | [3136, 9000]
{"size": {"min_pixels": 3136, "max_pixels": 9000}}           | [0, 0]       | [3136, 9000]
{"size": {"shortest_edge": 4000, "longest_edge": 8000}}      | [0, 0]       | [4000, 8000]
{"size": {"shortest_edge": 4000, "longest_edge": 8000}, "min_pixels": 3136, "max_pixels": 9000}
    | [5000, 6000]
    | [5000, 6000]
{}                                                           | [0, 0]       | [3136, 1003520]
"""),
)
def test_spellings_of_the_bounds(tmp_path, settings, flags, bounds):
    """Last without any: those of the checkpoints before must not have become the default, as
    transformers would do."""
    folder = write_processor(tmp_path)
    none = {"min_pixels": None, "max_pixels": None}
    edit(folder / "preprocessor_config.json", **none | json.loads(settings))
    low, high = json.loads(flags)
    size = Processor(folder, DataArgs(min_pixels=low, max_pixels=high)).family.image_processor.size
    assert [size["shortest_edge"], size["longest_edge"]] == json.loads(bounds)


def test_the_config_has_the_last_word_on_patches(tmp_path):
    folder = write_processor(tmp_path)
    edit(folder / "preprocessor_config.json", patch_size=16, merge_size=1, temporal_patch_size=4)
    Image.new("RGB", (56, 112)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "images": "a.png"}')
    processor = Processor(folder)
    (prompt,) = load_prompts(
        str(tmp_path / "rows.jsonl"), processor, DataArgs(max_prompt_tokens=500)
    )
    patches = load_pixels(prompt, processor)
    assert prompt.patch_grids.tolist() == [[1, 8, 4]]
    assert patches.shape == (32, 3 * 2 * 14 * 14)
    assert (prompt.input_ids == IMAGE).sum() == 32 // 2**2


def test_saved_folder_has_the_bounds_and_the_template_in_use(tmp_path):
    """AutoProcessor's order: the template in processor_config.json, in chat_template.json, the
    tokenizer's."""
    source, target = write_processor(tmp_path / "source", template="text only"), tmp_path / "target"
    nested = {
        "image_processor": {"min_pixels": 1, "patch_size": 14},
        "processor_class": "Qwen2_5_VLProcessor",
    }
    for name, settings in [
        ("chat_template", {"chat_template": "stale"}),
        ("processor_config", nested | {"chat_template": TEMPLATE}),
        ("video_preprocessor_config", {"fps": 2}),
    ]:
        write_json(source / f"{name}.json", settings)
    Processor(source, DataArgs(min_pixels=4000, max_pixels=5000)).save(target)
    (target / "config.json").write_text((source / "config.json").read_text())
    again = Processor(target)
    size = again.family.image_processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (4000, 5000)
    assert again.stop_ids == (IM_END, EOT)
    assert again.tokenizer.chat_template == TEMPLATE
    settings = again.files["processor_config"]
    images = settings.pop("image_processor"), again.files["preprocessor_config"]
    assert [(part["min_pixels"], part["max_pixels"]) for part in images] == [(4000, 5000)] * 2
    nested.pop("image_processor")
    assert settings == nested | {"chat_template": TEMPLATE}
    assert again.files["video_preprocessor_config"] == {"fps": 2}
    # what no flag has changed keeps its bytes
    for path in source.iterdir():
        if path.name not in ("preprocessor_config.json", "processor_config.json"):
            assert (target / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("flags", [{}, {"template_options": '{"enable_thinking": false}'}])
def test_a_folder_is_saved_byte_for_byte(tmp_path, flags):
    """Vocabularies, templates and settings, however they are written; template options are noted where a
    judge is trained with them, and change no template."""
    source, target = write_processor(tmp_path / "source"), tmp_path / "target"
    more = {
        "tekken.json": '{"config":   {}}',
        "special_tokens_map.json": '{ "eos_token": "<|im_end|>" }',
        "vocab.json": '{"a":0}',
        "merges.txt": "#version: 0.2\n",
        "tokenizer.model": "\x00model",
        "tokenizer.model.v3": "\x00model",
        "tool_parser.py": "import vllm",
        "additional_chat_templates/tool.jinja": "{{ messages }}",
        "processor_config.json": '{ "processor_class":"Qwen2_5_VLProcessor" }',
    }
    for name, text in more.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["extra_special_tokens"] = {}  # of transformers 4
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    processor = Processor(source, DataArgs(**flags))
    processor.save(target, {"verdicts": {"score": []}} if flags else {})
    copies = {path.relative_to(target) for path in target.rglob("*") if path.is_file()}
    names = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    judge = {Path("judge.json")} if flags else set()
    assert copies == names - {Path("config.json")} | judge
    for name in copies - judge:
        assert (target / name).read_bytes() == (source / name).read_bytes(), name
    if flags:
        options = json.loads((target / "judge.json").read_text())["template_options"]
        assert options == {"enable_thinking": False}


def test_folders_that_are_no_model(tmp_path):
    """A run, its exports and its checkpoints are what people name in place of <out>/export/step-N."""
    with user_error(f"{tmp_path}: no config.json.*<out>/export/step-N"):
        resolve_folder(str(tmp_path))


def two_pixels(mode, left, right, palette=None):
    image = Image.new(mode, (2, 1), right)
    image.putpixel((0, 0), left)
    return image if palette is None else image.putpalette(palette) or image


def grey16(*values):
    return Image.fromarray(np.array([values], dtype=np.uint16))


RED_BLUE = two_pixels("P", 0, 1, [255, 0, 0, 0, 0, 255])


@pytest.mark.parametrize(
    "image, suffix, save, left, right",
    [
        (two_pixels("RGB", RED, GREEN), "ppm", {}, RED, GREEN),
        (
            two_pixels("RGBA", (0, 0, 0, 51), (255, 0, 0, 204)),
            "png",
            {},
            (204, 204, 204),
            (255, 51, 51),
        ),
        (two_pixels("LA", (70, 255), (0, 0)), "png", {}, (70, 70, 70), WHITE),
        (two_pixels("L", 7, 200), "png", {"transparency": 200}, (7, 7, 7), WHITE),
        (RED_BLUE, "bmp", {}, RED, BLUE),
        (RED_BLUE, "png", {"transparency": bytes([255, 0])}, RED, WHITE),
        (RED_BLUE, "gif", {"transparency": 1}, RED, WHITE),
        (grey16(257 * 100, 65535), "png", {}, (100, 100, 100), WHITE),
        (two_pixels("I", 257 * 3, 65535), "tiff", {}, (3, 3, 3), WHITE),
        (two_pixels("CMYK", (0, 255, 255, 0), (0, 0, 0, 0)), "tiff", {}, RED, WHITE),
    ],
)
def test_every_mode_becomes_correct_rgb(tmp_path, image, suffix, save, left, right):
    path = str(tmp_path / f"picture.{suffix}")
    image.save(path, **save)
    result = read_image(path)
    assert result.mode == "RGB"
    assert result.size == image_size(path) == (2, 1)
    assert (result.getpixel((0, 0)), result.getpixel((1, 0))) == (left, right)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, orientation, suffix):
    """A 48 x 16 picture: red, green, blue squares from left to right, as the camera's sensor saw them."""
    stored, exif, path = (
        Image.new("RGB", (48, 16)),
        Image.Exif(),
        str(tmp_path / f"picture.{suffix}"),
    )
    for i, colour in enumerate((RED, GREEN, BLUE)):
        stored.paste(colour, (16 * i, 0, 16 * i + 16, 16))
    exif[0x0112] = orientation
    stored.save(path, exif=exif, **({"lossless": True} if suffix == "webp" else {}))
    image = read_image(path)
    # Where the stored left end stands upright, by the EXIF standard: 1, 4 left; 2, 3 right; 5, 6
    # top; 7, 8 bottom.
    first = {2: (40, 8), 3: (40, 8), 7: (8, 40), 8: (8, 40)}.get(orientation, (8, 8))
    assert image.size == image_size(path) == ((48, 16) if orientation <= 4 else (16, 48))
    assert np.abs(np.subtract(image.getpixel(first), RED)).max() <= 3


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_first_frame_of_an_animation(tmp_path, suffix):
    frames, path = (
        [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)],
        str(tmp_path / f"moving.{suffix}"),
    )
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        **({"lossless": True} if suffix == "webp" else {}),
    )
    assert read_image(path).getpixel((4, 4)) == RED


def png_header(width, height):
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + b"\0\0\0\0IDAT"
    )


@pytest.mark.parametrize("read", [read_image, image_size])
@pytest.mark.parametrize(
    "content, message",
    [
        (png_header(60000, 60000), "3600000000 pixels"),
        (b"hello", ""),
        (png_header(0, 5), ""),
        (b"GIF89a\x01", ""),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", ""),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 40, ""),
    ],
)
def test_bombs_and_what_is_no_image_are_refused(tmp_path, read, content, message):
    (tmp_path / "x.png").write_bytes(content)
    with user_error(f"x.png: cannot be read as one of JPEG, PNG.*{message}"):
        read(str(tmp_path / "x.png"))


@pytest.mark.parametrize(
    "values, message",
    [
        (np.array([[0.0, 1.0]], np.float32), "mode F"),
        (np.array([[0, 70000]], np.int32), "values 0 to 70000"),
    ],
)
def test_grey_of_unknown_range_is_refused(tmp_path, values, message):
    Image.fromarray(values).save(tmp_path / "x.tiff")
    with user_error(f"x.tiff.*{message}"):
        read_image(str(tmp_path / "x.tiff"))


def rendered(*turns):
    return (
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
        + "<|im_start|>assistant\n"
    )


def test_one_row_in_full(load, processor, tmp_path):
    (prompt,) = load([dict(prompt="Wie heißt das?", images=["a.png"], answer="Würfel", label="m")])
    assert (prompt.index, prompt.source, prompt.reference, prompt.label) == (
        0,
        "train.jsonl:1",
        "Würfel",
        "m",
    )
    assert prompt.images == (str(tmp_path / "a.png"),)
    assert prompt.grids == (processor.family.grid(64, 40),)
    assert prompt.text == rendered(("user", PICTURE + "Wie heißt das?"))
    _, h, w = prompt.grids[0]
    text = processor.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    at = text.index(IMAGE)
    assert prompt.input_ids.tolist() == text[:at] + [IMAGE] * (h * w // 4) + text[at + 1 :]
    patches = load_pixels(prompt, processor)
    assert patches.shape == (h * w, 3 * 2 * 14 * 14)
    assert prompt.patch_grids.tolist() == [[1, h, w]]
    assert patches.dtype == torch.float32
    assert prompt.input_ids.dtype == torch.int64


def test_several_images_of_several_sizes_and_text_only_rows(load, processor):
    prompts = load(
        [
            {"prompt": "which?", "images": ["b.jpg", "a.png"]},
            {"prompt": "1+1?"},
            {"prompt": "and?", "images": "a.png"},
            {"prompt": "null", "images": None, "label": None},
        ]
    )
    sizes = [processor.family.grid(30, 90), processor.family.grid(64, 40)]
    assert [p.grids for p in prompts] == [tuple(sizes), (), (sizes[1],), ()]
    for prompt in prompts:
        runs = "".join("x" if i == IMAGE else " " for i in prompt.input_ids.tolist()).split()
        assert [len(run) for run in runs] == [h * w // 4 for _, h, w in prompt.grids]
    assert prompts[0].patch_grids.tolist() == [list(g) for g in sizes]
    assert len(load_pixels(prompts[0], processor)) == sum(h * w for _, h, w in sizes)
    assert load_pixels(prompts[1], processor) is None
    assert prompts[1].text == rendered(("user", "1+1?"))


@pytest.mark.parametrize(
    "prompt, turns",
    table("""
"A <image> and <image>?"                  | user: A PICTURE and PICTURE?
"Compare."                                | user: PICTUREPICTURECompare.
[{"role": "user", "content": "Compare."}] | user: PICTUREPICTURECompare.
[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]}]
    | user: PICTUREorPICTURE
[{"role": "system", "content": [{"type": "text", "text": "<image> is a tag."}]},
    {"role": "user", "content": "What?"}]
    | system: <image> is a tag.; user: PICTUREPICTUREWhat?
[{"role": "user", "content": [{"type": "text", "text": "<image>A<image>"}, {"type": "text", "text": "B"}]}]
    | user: PICTUREAPICTUREB
[{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "<image>?"}]}]
    | user: PICTUREPICTURE<image>?
"""),
)
def test_places_of_images(load, prompt, turns):
    """In a part of a message a mark is text, unless the user's parts give the images no other places."""
    expected = [turn.split(": ") for turn in turns.replace("PICTURE", PICTURE).split("; ")]
    row = {"prompt": json.loads(prompt), "images": ["a.png", "b.jpg"]}
    assert load([row])[0].text == rendered(*expected)


def test_system_prompt_and_column_names(load):
    prompts = load(
        [dict(q="Hi", target="4", pics="a.png", task="t")],
        system_prompt="Think.",
        columns="prompt=q, answer=target,images=pics,label=task",
    )
    assert prompts[0].text == rendered(("system", "Think."), ("user", PICTURE + "Hi"))
    assert (prompts[0].reference, prompts[0].label) == ("4", "t")
    prompts = load(
        [
            {"prompt": "x", "answer": "r"},
            {"prompt": "x", "label": "s"},
            {"prompt": "x", "answer": None},
        ]
    )
    assert [(p.reference, p.label) for p in prompts] == [("r", None), (None, "s"), (None, None)]
    assert [
        p.reference
        for p in load([{"prompt": "x", "solution": "s", "answer": "a"}], "answer=solution")
    ] == ["s"]
    (prompt,) = load([{"input": "x", "label": "4"}], "prompt=input,answer=label")  # OpenRLHF's
    assert (prompt.reference, prompt.label) == ("4", "4")


@pytest.mark.parametrize(
    "columns", ["question", "prompt=", "=question", "prompt=q,question=prompt"]
)
def test_columns_that_cannot_be(columns):
    with user_error(f"--columns {columns}: .* is not one of prompt, images, answer, label"):
        parse_columns(columns)


def test_a_row_keeps_all_its_columns(load, tmp_path, capsys):
    """As the file has them. Names that nobody reads are printed: they may be misspelled."""
    rows = [
        dict(prompt="Hi", imgs=["a.png"], answer=4, tools=[], depth={"of": [1, None]}),
        dict(
            prompt=[{"role": "user", "content": "<image>What?"}],
            images="a.png",
            answer=2.5,
            extra="ü",
        ),
        dict(prompt="<image>Find x.", images=["a.png"], answer=-12, reward_model={"style": "rule"}),
    ]
    before = json.loads(json.dumps(rows))
    prompts = load(rows)
    assert [prompt.row for prompt in prompts] == before
    assert [prompt.reference for prompt in prompts] == ["4", "2.5", "-12"]
    assert [len(prompt.images) for prompt in prompts] == [0, 1, 1]
    assert (
        capsys.readouterr().out
        == f"{tmp_path / 'train.jsonl'}: columns that are kept, but not read: "
        "'depth', 'extra', 'imgs' (images, or part of prompt or answer? see --columns, launch/data/convert.py), "
        "'reward_model' (images, or part of prompt or answer? see --columns, launch/data/convert.py), 'tools'\n"
    )
    load([dict(prompt="Hi", answer="4", label="l", images=[], videos=[])])
    assert capsys.readouterr().out == ""


def test_a_named_images_column_is_in_every_row(load):
    """Of another name than the default, it is what the user says pictures are called."""
    rows = [{"prompt": "x", "pics": "a.png"}, {"prompt": "x", "pics": None}]
    assert [len(prompt.images) for prompt in load(rows, "images=pics")] == [1, 0]
    with user_error("train.jsonl:2: no column 'pics' .*--columns.*the row has 'prompt', 'images'"):
        load([rows[0], {"prompt": "x", "images": "a.png"}], "images=pics")


SEVERAL_TURNS = """{"images": ["a.png", "b.jpg"], "answer": "no", "prompt": [
{"role": "system", "content": "Brief."}, {"role": "user", "content": "<image>What is it?"},
{"role": "assistant", "content": "<|box_start|>"},
{"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image", "image": "b.jpg"}]},
{"role": "assistant", "content": [{"type": "text", "text": "Blue."}]},
{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " again?"}]}]}"""


def test_prompts_of_several_turns(load, tmp_path, processor):
    """Pictures of parts, of the images column and of strings, in the order of their places."""
    (prompt,) = load([json.loads(SEVERAL_TURNS)])
    assert prompt.text == rendered(
        ("system", "Brief."),
        ("user", PICTURE + "What is it?"),
        ("assistant", "<|box_start|>"),
        ("user", "And " + PICTURE),
        ("assistant", "Blue."),
        ("user", PICTURE + " again?"),
    )
    a, b = processor.family.grid(64, 40), processor.family.grid(30, 90)
    assert prompt.images == tuple(str(tmp_path / name) for name in ("a.png", "b.jpg", "b.jpg"))
    assert prompt.grids == (a, b, b)
    assert prompt.reference == "no"


READ_AS_THEY_ARE = table(r"""
TRL, LLaVA | - | {"prompt": "Hi", "image": "a.png"}
LLaVA      | - | {"prompt": "Hi", "image": ["a.png"], "images": null}
EasyR1     | prompt=problem,answer=solution | {"problem": "Hi", "image": "a.png", "solution": "red"}
lmm-r1     | prompt=message | {"message": "TEXT", "answer": "red"}
MM-EUREKA | prompt=conversations,images=image_urls
    | {"conversations": [{"role": "user", "content": "<image>Hi"}], "image_urls": ["file://FOLDER/a.png"]}
Vero       | - | {"prompt": MESSAGES, "images": ["FOLDER/a.png"]}
""")
MESSAGES = """[{"role": "user", "content": [{"type": "image", "image": "file://FOLDER/a.png"}, \
{"type": "text", "text": "Hi"}]}]"""


@pytest.mark.parametrize("system, columns, row", READ_AS_THEY_ARE)
def test_rows_of_other_systems_that_need_no_conversion(
    load, tmp_path, capsys, system, columns, row
):
    row = row.replace('"TEXT"', json.dumps(MESSAGES)).replace("MESSAGES", MESSAGES)
    row = json.loads(row.replace("FOLDER", str(tmp_path)))
    (prompt,) = load([row], columns.strip("-"))
    assert prompt.text == rendered(("user", PICTURE + "Hi"))
    assert prompt.images == (str(tmp_path / "a.png"),)
    assert prompt.row == row
    assert "columns" not in capsys.readouterr().out


OLD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def test_words_of_mistral_are_cut_as_its_own_tokenizer_does(tmp_path, monkeypatch, caplog):
    """Not by the pattern in the published tokenizer.json, which keeps HelloWorld together; an export has the
    right one, for programs that mend nothing. With mistral-common, which vLLM brings, transformers would
    take that for a folder with a tekken.json, and fail."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = dict(zip([*bytes_, *(f"<{k}>" for k in range(100_000))], range(200_000)))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(OLD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    folder, export = tmp_path / "model", tmp_path / "export"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})
    config = {"model_type": "mistral3", "vision_config": {"model_type": "pixtral"}}
    write_json(folder / "config.json", config | {"transformers_version": "4.50.0"})
    write_json(folder / "tekken.json", {})
    monkeypatch.setitem(
        tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral3", "MistralCommonBackend"
    )
    monkeypatch.setattr(
        tokenization_auto, "_use_mistral_format", lambda *_, **__: True, raising=False
    )
    mended = read_tokenizer(folder)
    copy_files(folder, export)
    write_word_pattern(mended, export)
    write_json(export / "config.json", config | {"transformers_version": "5.24.0"})
    for read in (mended, read_tokenizer(export)):
        words = read.backend_tokenizer.pre_tokenizer.pre_tokenize_str("HelloWorld 12")
        assert [word for word, _ in words] == ["Hello", "World", "Ġ", "1", "2"]
    assert "regex" not in caplog.text
    before, after = (read_json(path / "tokenizer.json") for path in (folder, export))
    assert before | {"pre_tokenizer": None} == after | {"pre_tokenizer": None}


def row_with_calls(content, *calls: dict) -> dict:
    """A question that names the tool "look", calls, and an answer to them."""
    chat = [{"role": "user", "content": "May you look?"}, {"role": "tool", "content": "red"}]
    chat.insert(1, {"role": "assistant", "content": content, "tool_calls": [*calls]})
    return {"prompt": chat}


def call(name, arguments) -> dict:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS_AS_JSON = (  # as Qwen3-VL's, which takes the calls with and without "function"
    HEAD + "{{ m.content if m.content is string else '' }}{% for c in m.tool_calls or [] %}"
    "{% set f = c.function or c %}({{ f.name }} {{ f.arguments | tojson }}){% endfor %}" + END
)
CALLS_BY_ITEM = (  # as Qwen3.5's and GLM-4.5V's
    HEAD + "{{ m.content if m.content is string else '' }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %})"
    "{% endfor %}" + END
)


@pytest.mark.parametrize("content", [None, "", "So:", [{"type": "text", "text": "So:"}]])
@pytest.mark.parametrize("arguments", [{"at": 3}, '{"at": 3}'])
def test_calls_of_tools_reach_the_prompt(load, processor, monkeypatch, content, arguments):
    """OpenAI has the arguments as text: quoted twice in a template for JSON, no mapping in the others."""
    text = "So:" if content else ""
    for template, written in ((CALLS_AS_JSON, '(look {"at": 3})'), (CALLS_BY_ITEM, "(look at=3)")):
        monkeypatch.setattr(processor.tokenizer, "chat_template", template)
        (prompt,) = load([row_with_calls(content, call("look", arguments))])
        assert prompt.text == rendered(
            ("user", "May you look?"), ("assistant", text + written), ("tool", "red")
        )
    monkeypatch.setattr(processor.tokenizer, "chat_template", CALLS_AS_JSON)
    calls = {"name": "look", "arguments": ""}, {"name": "zoom", "arguments": None}
    (prompt,) = load([row_with_calls(content, *calls)])
    assert f"{text}(look {{}})(zoom {{}})<|im_end|>" in prompt.text


def test_calls_that_a_template_leaves_out_are_an_error(load, processor, monkeypatch):
    """As those of Qwen2.5-VL and the toy do; that a text names the tool is no call."""
    leaves_out = (
        "train.jsonl:1: .*the chat template leaves out a call of 'look': it knows no tool_calls"
    )
    with user_error(leaves_out):
        load([row_with_calls(None, call("look", "{}"))])
    first_only = CALLS_AS_JSON.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    monkeypatch.setattr(processor.tokenizer, "chat_template", first_only)
    with user_error(leaves_out):
        load([row_with_calls(None, call("look", {"at": 1}), call("look", {"at": 2}))])
    thinks = row_with_calls("<think>I look.</think>So:", call("look", {}))
    no_thoughts = CALLS_AS_JSON.replace("{{ m.content if", "{{ m.content.split('</think>')[-1] if")
    monkeypatch.setattr(processor.tokenizer, "chat_template", no_thoughts)
    (prompt,) = load([thinks])
    assert "assistant\nSo:(look {})<|im_end|>" in prompt.text


@pytest.mark.parametrize(
    "wrong",
    [
        "look",
        {"id": "1"},
        {"function": "look"},
        call("look", "{at: 3}"),
        call("look", "[3]"),
        call("look", [3]),
        call(None, {}),
    ],
)
def test_calls_of_no_form_are_an_error(load, wrong):
    with user_error(r"train.jsonl:1: tool_calls must be a list of \{"):
        load([row_with_calls("", wrong)])


@pytest.mark.parametrize(
    "row, name",
    table("""
{"picture": "sub/x.JPG", "id": 3, "url": "http://x.org"} | picture
{"image_1": {"bytes": "iVBORw0KGgoAAA", "path": null}, "image_2": null} | image_1
{"image": null, "frames": ["data:image/png;base64,iVBOR"]} | frames
{"images": ["a.png"], "image": "b.jpg"} | image
{"input": "2 + 2", "system": "", "history": []} | input
{"conversations": [{"from": "human", "value": "x"}]} | conversations
{"objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}} | objects
"""),
)
def test_an_unread_column_that_matters_is_said(load, capsys, row, name):
    load([{"prompt": "x"} | json.loads(row)])
    told = r"'(\w+)' \(images, or part of prompt or answer\?"
    assert re.findall(told, capsys.readouterr().out) == [name]


@pytest.mark.parametrize(
    "answer, is_worked",
    [
        ("6 * 12 = 72\n#### 72", True),
        (r"So $x = \boxed{2}$.", True),
        ("<answer> 3 </answer>", True),
        ("72", False),
        (r"\boxed{2}", False),
        ("a < b", False),
    ],
)
def test_worked_solutions_are_said(load, capsys, answer, is_worked):
    load([{"prompt": "x", "answer": "1"}, {"prompt": "x", "answer": answer}])
    assert ("answers seem to be worked solutions" in capsys.readouterr().out) == is_worked


@pytest.mark.parametrize(
    "columns, name", [("answer=TYPO", "TYPO"), ("label=task", "task"), ("prompt=q", "q")]
)
def test_a_named_column_is_in_every_row(load, columns, name):
    with user_error(
        f"train.jsonl:2: no column '{name}' .*--columns.*the row has 'prompt', 'answer'"
    ):
        load([{"prompt": "x", name: "y"}, {"prompt": "x", "answer": "y"}], columns)


@pytest.mark.parametrize(
    "content, what",
    [
        (json.dumps([{"prompt": "x"}]).encode(), "a JSON list"),
        (b"\xef\xbb\xbf\n[\n  {}]", "a JSON list"),
        (
            json.dumps({"prompt": "x"}, indent=2).encode(),
            "JSON with its objects on several lines each",
        ),
        ('{"prompt": "x"}\n'.encode("utf-16"), "text in UTF-16"),
        ('{"prompt": "x"}\n'.encode("utf-16-le"), "text in UTF-16"),
        (b"PAR1\x15\x04", "a Parquet table"),
        (b"\x1f\x8b\x08\x00", "compressed: unpack it first"),
        (b"BZh91AY&SY", "compressed: unpack it first"),
        (
            b"\xff\xff\xff\xff\x10\x02\x00\x00",
            "an Arrow table: convert.py reads what Dataset.to_parquet",
        ),
        (
            b"index\tquestion\timage\n",
            "a table of text: pandas' to_json.*lines=True",
        ),
        (
            b"id,prompt,answer\n0,x,y\n",
            "a table of text: pandas' to_json.*lines=True",
        ),
        (
            b",prompt,answer\n0,x,y\n",
            "a table of text: pandas' to_json.*lines=True",
        ),
        (b"prompt;answer\nx;y\n", "a table of text: pandas' to_json.*lines=True"),
        ("folder", "a folder; name its files, as in .*rows.json/train.jsonl, or convert them"),
        (None, "no file .data of the hub: hf download .*python launch/data/convert.py FOLDER"),
    ],
)
def test_data_that_is_no_jsonl(tmp_path, processor, content, what):
    """The command is told where it reads such a file."""
    path = tmp_path / "rows.json"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    command = "" if ":" in what else f".*: python launch/data/convert.py {path} --out"
    with user_error(f"^{path} is {what}{command}") as error:
        load_prompts(str(path), processor, DataArgs())
    assert "\n" not in str(error.value)


def test_bom_crlf_blank_lines_and_line_separators(load):
    """U+2028 ends a line for str.splitlines, but not in JSON; index counts rows, source counts lines."""
    data = (
        b"\xef\xbb\xbf"
        + '{"prompt": "a"}\r\n\r\n   \n{"prompt": "b\u2028c"}\r\n\n{"prompt": "d"}'.encode()
    )
    prompts = load(data)
    assert [(p.index, p.source) for p in prompts] == [
        (0, "train.jsonl:1"),
        (1, "train.jsonl:4"),
        (2, "train.jsonl:6"),
    ]
    assert [p.text for p in prompts] == [
        rendered(("user", text)) for text in ("a", "b\u2028c", "d")
    ]


def test_order(load):
    """Rows are read by several threads."""
    prompts = load([{"prompt": str(i), "images": "a.png", "answer": "x"} for i in range(60)])
    assert [(p.index, p.text) for p in prompts] == [
        (i, rendered(("user", PICTURE + str(i)))) for i in range(60)
    ]


def test_a_picture_alone_is_a_prompt(load):
    """As readers of pages are asked."""
    rows = [
        {"prompt": "", "images": "a.png"},
        {"prompt": "<image>", "images": "a.png"},
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": "a.png"},
    ]
    for prompt in load(rows):
        assert prompt.text == rendered(("user", PICTURE))
        assert len(prompt.images) == 1


@pytest.mark.parametrize(
    "mark", ["<image1>", "<image_1>", "<image 1>", "<Image-1>", "<|image_1|>", "<img1>"]
)
def test_numbered_places_of_images_are_told(load, processor, tmp_path, capsys, mark):
    """In prompts and in judgements."""
    row = {"prompt": f"Is {mark} red?", "images": "a.png"}
    load([row])
    path = str(tmp_path / "train.jsonl")
    warning = f"warning: {path}: <image1> or <image_1> in a text stands for no image"
    assert warning in capsys.readouterr().out
    write_rows(tmp_path / "train.jsonl", [row | {"responses": ["no", "yes"], "preferred": "A"}])
    load_judgements(path, processor, judge_settings(), DataArgs())
    assert warning in capsys.readouterr().out
    load([{"prompt": f"Is {mark} a tag?"}, {"prompt": "Is <image> red?", "images": "a.png"}])
    assert "stands for no image" not in capsys.readouterr().out


def test_an_environment_may_read_any_column(load, capsys):
    load([{"prompt": "x", "tools": [1], "hidden": "a.png"}], env="env.py:Game")
    assert capsys.readouterr().out == ""


def test_numbers_of_tables_are_read_as_they_were(load):
    """pandas makes floats of a column of integers with a gap."""
    values = [3.0, 2.5, -12.0, 1e-5, 20250101.0, 1e300]
    prompts = load([{"prompt": "x", "answer": value, "label": value} for value in values])
    texts = ["3", "2.5", "-12", "1e-05", "20250101", "1e+300"]
    assert [prompt.reference for prompt in prompts] == texts
    assert [prompt.label for prompt in prompts] == texts


BAD_ROWS = table(
    """
invalid JSON              | {"prompt":  | not JSON
invalid UTF-8             | {"prompt": "ÿ"} | not JSON
no object                 | ["prompt"] | a row must be a JSON object, not \\['prompt'\\]
no prompt column | {"question": "x", "answer": "y"}
    | no column 'prompt' .*; the row has 'question', 'answer'
prompt of wrong type      | {"prompt": 5} | prompt must be a string or messages; it is 5
empty prompt              | {"prompt": " "} | empty prompt
no messages               | {"prompt": []} | prompt must be a string or messages
message without content   | {"prompt": [{"role": "user"}]} | prompt must be .* not {'role': 'user'}
message of null | {"prompt": [{"role": "user", "content": null}]}
    | prompt must be .* 'content': None}
no message                | {"prompt": ["x"]} | prompt must be .* not 'x'
messages of LLaVA         | {"prompt": [{"from": "human", "value": "x"}]} | prompt must be .*convert.py
messages cut off          | {"prompt": "[{\\"role\\": "} | prompt: not JSON
messages of LLaVA as text | {"prompt": "[{\\"from\\": \\"human\\", \\"value\\": \\"x\\"}]"}
    | prompt must be .*convert.py
messages by Python's repr | {"prompt": "[{'role': 'user', 'content': 'x'}]"} | prompt: not JSON
one message as text | {"prompt": "{\\"role\\": \\"user\\", \\"content\\": \\"x\\"}"}
    | prompt must be a string or messages
no part                   | USER [5]}]} | a part of a message must be .* not 5
unknown role | {"prompt": [{"role": "robot", "content": "x"}]}
    | roles system, user, assistant, tool.*robot
assistant last | {"prompt": [{"role": "assistant", "content": "x"}]}
    | a prompt must not end with the assistant's message: python launch/data/convert.py FILE
unknown part              | USER [{"type": "audio"}]}]} | a part of a message must be .*audio
part of wrong type        | USER [{"type": "text", "text": 3}]}]} | a part of a message must be
part with bytes | USER [{"type": "image", "bytes": "iVBOR"}]}]}
    | with their file as "image" or "video".*bytes
part with its file elsewhere too | USER [{"type": "image", "image": "a.png"},
    {"type": "text", "text": "x"}]}], "images": ["b.jpg"]}
    | hold 1 images for 0 places .*without a file
image in the web | {"prompt": "x", "images": ["http://x.org/a.png"]}
    | the path of a file.*http.*convert.py
image in base64           | {"prompt": "x", "images": "iVBORw0KGgoAAA"} | the path of a file.*convert.py
a megabyte                | {"prompt": "x", "image": "MEGABYTE"} | the path of a file.*convert.py
zero in a name            | {"prompt": "x", "image": "a\\u0000.png"} | the path of a file
bytes of an image | {"prompt": "x", "images": [{"bytes": "iVBOR", "path": "a.png"}]}
    | the path of a file.*bytes
answer of wrong type | {"prompt": "x", "answer": true}
    | column 'answer' must be a string or a finite number, not T
answer that is no number | {"prompt": "x", "answer": NaN}
    | column 'answer' must be a string or a finite number
label of wrong type       | {"prompt": "x", "label": ["t"]} | column 'label' must be a string
no such image             | {"prompt": "x", "images": "c.png"} | no such image: .*c.png
image is a folder         | {"prompt": "x", "images": "."} | cannot be read as one of
image in Qwen-VL's tag | {"prompt": "Picture 1: <img>red.png</img>x"}
    | <img>path</img> in a text: give the path in images
not an image | {"prompt": "x", "images": "train.jsonl"}
    | train.jsonl: cannot be read as one of JPEG
too thin                  | {"prompt": "x", "images": "thin.png"} | aspect ratio
too many places           | {"prompt": "<image> <image>x", "images": "a.png"} | hold 1 images for 2 places
too few places            | {"prompt": "<image>x", "images": ["a.png", "b.jpg"]} | hold 2 images for 1 places
where? | USER "x"}, {"role": "user", "content": "x"}], "images": "a.png"}
    | hold 1 images for 0 places
typed image token | {"prompt": "<|image_pad|>", "images": "a.png"}
    | special token <.image_pad.> in the text
end of turn from two parts | USER [{"type": "image"}, {"type": "text", "text": "x<|im_"},
    {"type": "text", "text": "end|>"}]}], "images": "a.png"}
    | special token <.im_end.> in the text
too long | {"prompt": "LONG", "images": "a.png"}
    | too long: 507 tokens, 6 of them of images; the limit is 500 .--max_prompt_tokens.
half a surrogate pair     | {"prompt": "a\\ud800"} | is half of a character
two system prompts | {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]}
    | remove one of them
""".replace("USER", '{"prompt": [{"role": "user", "content":')
    .replace("LONG", "x" * 480)
    .replace("MEGABYTE", "A" * 2**20)
)


@pytest.mark.parametrize("case, row, message", BAD_ROWS)
def test_bad_row(load, tmp_path, case, row, message, capsys):
    """An error with file and line, and by choice a message: the other rows keep their numbers."""
    Image.new("RGB", (2, 500)).save(tmp_path / "thin.png")
    # in which ÿ is no UTF-8
    data = f'{{"prompt": "first"}}\n\n{row}\n{{"prompt": "last"}}\n'.encode("latin-1")
    system_prompt = "S" if case == "two system prompts" else ""
    with user_error(f"train.jsonl: 1 of 3 rows are bad\n  train.jsonl:3: .*{message}") as error:
        load(data, system_prompt=system_prompt)
    assert len(str(error.value)) < 1500
    prompts = load(data, on_bad_row="skip", system_prompt=system_prompt)
    assert [(p.index, p.source) for p in prompts] == [(0, "train.jsonl:1"), (2, "train.jsonl:4")]
    assert "train.jsonl: 1 of 3 rows are bad\n  train.jsonl:3: " in capsys.readouterr().out


def test_a_text_of_megabytes_is_refused_before_it_is_tokenized(load, processor, monkeypatch):
    """As many characters as --max_prompt_tokens can stand for are read."""
    sizes, token_ids = [], Processor.token_ids
    monkeypatch.setattr(
        Processor,
        "token_ids",
        lambda self, text, *more: sizes.append(len(text)) or token_ids(self, text, *more),
    )
    longest = max(set(processor.tokenizer.get_vocab()) - set(processor.reserved_tokens), key=len)
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x" * 5_000_000},
        {"role": "user", "content": "x"},
    ]
    for prompt in ("x" * 5_000_000, turns):
        with user_error(
            "train.jsonl:1: prompt too long: 5000... characters; the limit is 500 tokens"
        ):
            load([{"prompt": prompt}])
    assert not sizes
    assert load([{"prompt": longest * 480}])


PROMPT_COLUMNS = "images image videos answer label question".split()
JUDGE_COLUMNS = (
    "images image videos question messages response responses preferred correct score criterion "
    "critique source rubric pair"
).split()


def test_odd_rows_are_refused_in_our_words(tmp_path, processor):
    """Or read: a row of any shape, of a policy or of a judge, with a rubric."""
    write_image(tmp_path / "a.png", (64, 40), np.random.default_rng(0))
    path, rng, read = tmp_path / "rows.jsonl", random.Random(0), 0
    args, settings = DataArgs(max_prompt_tokens=500), judge_settings()
    for k in range(1500):
        names = rng.sample(JUDGE_COLUMNS if k % 2 else PROMPT_COLUMNS, rng.randrange(5))
        row = {"prompt": "x"} | {
            name: odd_value(rng, 3) for name in ["prompt"] * rng.randrange(2) + names
        }
        path.write_text(json.dumps(row if k % 50 else odd_value(rng, 3)) + "\n")
        try:
            if k % 2:
                read_rubric(row)
                load_judgements(str(path), processor, settings, args)
            else:
                load_prompts(str(path), processor, args)
            read += 1
        except UserError as error:
            assert len(str(error)) < 2000
            # Pillow says why
            text = str(error).partition("cannot be read as")[0]
            assert not re.search(PYTHONS_WORDS, text), f"{error}: {row!r:.500}"
    assert read > 50


def test_first_five_of_many(load):
    with user_error("7 of 8 rows are bad") as error:
        load([{"prompt": 1}, {"prompt": "ok"}] + [{"prompt": 1}] * 6)
    *lines, last = str(error.value).split("\n")[1:]
    assert last == "  (--on_bad_row skip leaves such rows out)"
    assert [line.split(": ")[0].strip() for line in lines] == [
        f"train.jsonl:{i}" for i in (1, 3, 4, 5, 6)
    ]


@pytest.mark.parametrize(
    "row, columns, advised",
    [
        ({"question": "x", "solution": "y"}, "", "prompt=question,answer=solution"),
        ({"problem": "x", "image_urls": [], "answer": "y"}, "", "prompt=problem,images=image_urls"),
        (
            {"query": "x", "gold": "y", "task": "z"},
            "label=task",
            "prompt=query,answer=gold,label=task",
        ),
    ],
)
def test_columns_that_every_row_lacks_are_named_once(load, row, columns, advised):
    with user_error(
        f"train.jsonl: no row has a column 'prompt': --columns {advised} reads"
    ) as error:
        load([row] * 7, columns)
    assert "\n" not in str(error.value)


def test_an_answer_of_another_name_is_told(load, capsys):
    load([{"prompt": "x", "solution": "y"}] * 2)
    assert (
        "no row has a column 'answer': --columns answer=solution reads one"
        in capsys.readouterr().out
    )
    load([{"prompt": "x", "solution": "y"}] * 2, "answer=solution")
    assert "no row has" not in capsys.readouterr().out


def test_held_out_rows_that_are_training_rows_are_told(load, tmp_path, capsys):
    """By the same prompt, answer and content of images, wherever the files lie."""
    shutil.copyfile(tmp_path / "a.png", tmp_path / "copy.png")
    train = [
        {"prompt": "x", "images": "a.png", "answer": "1"},
        {"prompt": "x", "images": "b.jpg", "answer": "1"},
        {"prompt": "x", "answer": "1"},
    ]
    held_out = [
        {"prompt": "x", "images": "copy.png", "answer": "1"},
        {"prompt": "x", "images": "copy.png", "answer": "2"},
        {"prompt": "y", "answer": "1"},
        {"prompt": "x", "answer": "1"},
    ]
    asked = [[(row, row.reference) for row in load(rows)] for rows in (train, held_out)]
    capsys.readouterr()
    tell_shared_rows(*asked)
    warning = capsys.readouterr().out
    assert warning.startswith("warning: 2 of 4 held-out rows are training rows, too")
    assert warning.endswith("as in train.jsonl:1 and train.jsonl:1\n")
    tell_shared_rows(asked[0], asked[1][1:3])
    assert capsys.readouterr().out == ""


def test_nothing_left(load, tmp_path, processor):
    with user_error("2 of 2 rows are bad"):
        load([{"prompt": 1}, {"prompt": 2}], on_bad_row="skip")
    for empty in (b"", b"\n \r\n"):
        with user_error("train.jsonl: empty file"):
            load(empty)


@pytest.mark.parametrize("name", ["cut.png", "cut.jpg", "cut.webp"])
def test_damaged_body_is_found_at_first_use(load, processor, tmp_path, name):
    write_image(tmp_path / name, (80, 60), np.random.default_rng(0))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    rows = [{"prompt": "fine", "images": "a.png"}, {"prompt": "x", "images": ["a.png", name]}]
    if name == "cut.webp":  # of WebP, Pillow opens whole files only
        with user_error(f"train.jsonl:2: .*{name}: cannot be read as one of"):
            load(rows)
        return
    prompts = load(rows)
    with user_error(f"{name}: cannot be read as one of"):
        load_pixels(prompts[1], processor)


def test_file_changed_since_load(load, processor, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "PAUSES", ())
    prompts = load([{"prompt": "x", "images": "a.png"}])
    Image.new("RGB", (200, 40)).save(tmp_path / "a.png")
    with user_error("a.png.*: patch grids .* changed since the start"):
        load_pixels(prompts[0], processor)
    (tmp_path / "a.png").unlink()
    with user_error("no such image"):
        load_pixels(prompts[0], processor)
