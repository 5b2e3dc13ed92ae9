"""Rows and pictures to tensors: what the rows mean, what the pictures become, and that every bad input is refused.

Pictures are a few pixels whose RGB values are written down by hand; the processor of transformers is the oracle of the
patch grids. The checkpoint is a byte-level tokenizer and a tiny config, made here.
"""

import json
import random
import struct
import time
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen3VLConfig

from common.vlm import Processor, Prompt, image_size, load_pixels, load_prompts, read_image

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
IM_END, EOT, IM_START, VISION_START, VISION_END, IMAGE, VIDEO = range(256, 263)  # the 256 bytes come first
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def write_checkpoint(folder, family="qwen2_5_vl", template=TEMPLATE, **settings):
    """A checkpoint folder without weights: byte-level tokenizer, chat template, config, image processor, end tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # As some families do: a start token of the tokenizer's own, which must not come on top of the template's.
    start = SPECIAL[0]
    backend.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=[(start, EOT)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|image_pad|>"]) == [IM_END, IMAGE]
    config_class, patch = (Qwen3VLConfig, 16) if family == "qwen3_vl" else (Qwen2_5_VLConfig, 14)
    text = dict(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, intermediate_size=32, bos_token_id=EOT, eos_token_id=IM_END)
    config = config_class(text_config=text, vision_config=dict(depth=1, patch_size=patch),
                          image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START,
                          vision_end_token_id=VISION_END)
    config.save_pretrained(folder)
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": patch, "merge_size": 2,
                 "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 200704} | settings
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, EOT]}))
    return folder


@pytest.fixture(scope="session")
def processor(tmp_path_factory):
    return Processor(write_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def load(tmp_path, processor):
    """load(rows, **options): write rows (dicts, or raw bytes) as train.jsonl beside two pictures and load them."""
    Image.new("RGB", (64, 40), RED).save(tmp_path / "a.png")
    Image.new("RGB", (30, 90), BLUE).save(tmp_path / "b.jpg")

    def load(rows, **options):
        data = rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / "train.jsonl").write_bytes(data)
        return load_prompts(str(tmp_path / "train.jsonl"), processor, **{"max_prompt_tokens": 500} | options)

    return load


# ---------------------------------------------------------------------------------------------------------- processor


def test_processor_attributes(processor):
    assert (processor.image_token_id, processor.patch_size, processor.merge_size) == (IMAGE, 14, 2)
    assert processor.stop_ids == (IM_END, EOT)
    assert processor.banned_ids == (VISION_START, VISION_END, IMAGE, VIDEO)
    assert processor.pad_id == EOT


def test_ids_beyond_the_vocabulary_are_not_banned_and_pad_falls_back_to_the_end_token(tmp_path):
    folder = write_checkpoint(tmp_path)
    edit(folder / "config.json", vision_end_token_id=151653)
    edit(folder / "tokenizer_config.json", pad_token=None)
    (folder / "generation_config.json").unlink()
    processor = Processor(folder)
    assert processor.banned_ids == (VISION_START, IMAGE, VIDEO)
    assert processor.stop_ids == (IM_END,) and processor.pad_id == IM_END


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("family, low, high", [("qwen2_5_vl", 0, 0), ("qwen2_5_vl", 50_000, 90_000),
                                               ("qwen2_5_vl", 784, 784), ("qwen3_vl", 0, 0), ("qwen3_vl", 1024, 9000)])
def test_grids_from_headers_equal_the_processors(tmp_path, family, low, high):
    processor = Processor(write_checkpoint(tmp_path, family), low, high)
    rng = random.Random(0)
    sizes = [(1, 1), (3, 3), (3, 500), (1, 200), (28, 28), (32, 32), (700, 4)]
    sizes += [(rng.randint(1, 400), rng.randint(10, 400)) for _ in range(25)]
    for width, height in sizes:
        patches, grids = processor.pixels([Image.new("RGB", (width, height))])
        grid = processor.grid(width, height)
        assert grid == tuple(grids[0].tolist()), (width, height)
        assert patches.shape == (grid[1] * grid[2], 3 * 2 * processor.patch_size**2) and patches.dtype == torch.float32


def test_bounds_of_one_checkpoint_do_not_leak_into_the_next(tmp_path):
    Processor(write_checkpoint(tmp_path / "one", min_pixels=100_000))
    two = write_checkpoint(tmp_path / "two")
    settings = json.loads((two / "preprocessor_config.json").read_text())
    del settings["min_pixels"], settings["max_pixels"]
    (two / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = Processor(two)
    assert (processor.min_pixels, processor.max_pixels) == (56 * 56, 28 * 28 * 1280)


def test_saved_folder_loads_with_the_bounds_in_use(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    (source / "video_preprocessor_config.json").write_text('{"fps": 2}')
    nested = {"image_processor": {"min_pixels": 1, "patch_size": 14}, "processor_class": "Qwen2_5_VLProcessor"}
    (source / "processor_config.json").write_text(json.dumps(nested))
    processor = Processor(source, 4000, 5000)
    target = tmp_path / "target"
    processor.save(target)
    (target / "config.json").write_text((source / "config.json").read_text())
    again = Processor(target)
    assert (again.min_pixels, again.max_pixels, again.stop_ids) == (4000, 5000, processor.stop_ids)
    assert again.tokenizer.chat_template == TEMPLATE
    assert json.loads((target / "processor_config.json").read_text()) == {"processor_class": "Qwen2_5_VLProcessor"}
    assert json.loads((target / "video_preprocessor_config.json").read_text()) == {"fps": 2}
    assert '"Qwen2VLImageProcessor"' in (target / "preprocessor_config.json").read_text()


def test_template_of_the_processor_takes_precedence(tmp_path):
    folder = write_checkpoint(tmp_path, template="text only")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert Processor(folder).tokenizer.chat_template == TEMPLATE


def spoil(name):
    def change(folder):
        (folder / name).unlink()
    return change


@pytest.mark.parametrize("change, message", [
    (spoil("config.json"), "config.json or tokenizer"),
    (lambda f: (f / "config.json").write_text('{"model_type": "nonsense"}'), "config.json or tokenizer .*nonsense"),
    (spoil("tokenizer.json"), "config.json or tokenizer"),
    (spoil("chat_template.jinja"), "no chat template"),
    (spoil("preprocessor_config.json"), "no preprocessor_config.json"),
    (lambda f: (f / "config.json").write_text('{"model_type": "llava"}'), "family 'llava' is not one of qwen2_vl, "),
    (lambda f: edit(f / "config.json", image_token_id=151655), "image_token_id 151655 is outside .* 263 in config"),
    (lambda f: edit(f / "preprocessor_config.json", patch_size=16), r"\(16, 2, 2\) in .*, \(14, 2, 2\) in config"),
    (lambda f: edit(f / "preprocessor_config.json", min_pixels=900, max_pixels=800), "min_pixels 900, max_pixels 800"),
])
def test_bad_checkpoint(tmp_path, change, message):
    folder = write_checkpoint(tmp_path)
    change(folder)
    with pytest.raises(ValueError, match=message):
        Processor(folder)


def test_bad_bounds_and_missing_folder(tmp_path):
    with pytest.raises(ValueError, match="max at least the 784 pixels of one image token"):
        Processor(write_checkpoint(tmp_path), 10, 700)
    with pytest.raises(ValueError, match="no_such_folder"):
        Processor(tmp_path / "no_such_folder")


# ----------------------------------------------------------------------------------------------------------- pictures


def two_pixels(mode, left, right, **save):
    image = Image.new(mode, (2, 1))
    image.putpixel((0, 0), left)
    image.putpixel((1, 0), right)
    return image, save


def palette(alpha=None):
    image, save = two_pixels("P", 0, 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    return image, save | ({"transparency": alpha} if alpha is not None else {})


def grey16(*values, **save):
    return Image.fromarray(np.array([values], dtype=np.uint16)), save


@pytest.mark.parametrize("made, suffix, left, right", [
    (two_pixels("RGB", RED, GREEN), "png", RED, GREEN),
    (two_pixels("RGBA", (255, 0, 0, 255), (0, 0, 255, 0)), "png", RED, WHITE),
    (two_pixels("RGBA", (0, 0, 0, 51), (255, 0, 0, 204)), "png", (204, 204, 204), (255, 51, 51)),
    (two_pixels("RGBA", (0, 255, 0, 255), (9, 9, 9, 0), lossless=True), "webp", GREEN, WHITE),
    (two_pixels("LA", (70, 255), (0, 0)), "png", (70, 70, 70), WHITE),
    (two_pixels("L", 7, 200), "png", (7, 7, 7), (200, 200, 200)),
    (two_pixels("L", 7, 200, transparency=200), "png", (7, 7, 7), WHITE),
    (two_pixels("1", 0, 1), "png", (0, 0, 0), WHITE),
    (palette(), "png", RED, BLUE),
    (palette(), "bmp", RED, BLUE),
    (palette(0), "png", WHITE, BLUE),
    (palette(bytes([255, 0])), "png", RED, WHITE),
    (palette(1), "gif", RED, WHITE),
    (grey16(257 * 100, 65535), "png", (100, 100, 100), WHITE),
    (grey16(257 * 9, 5, transparency=5), "png", (9, 9, 9), WHITE),
    (grey16(0, 1000), "tiff", (0, 0, 0), (4, 4, 4)),
    (two_pixels("I", 257 * 3, 65535), "tiff", (3, 3, 3), WHITE),
    (two_pixels("CMYK", (0, 255, 255, 0), (0, 0, 0, 0)), "tiff", RED, WHITE),
    (two_pixels("RGB", RED, GREEN), "ppm", RED, GREEN),
])
def test_every_mode_becomes_correct_rgb(tmp_path, made, suffix, left, right):
    image, save = made
    path = str(tmp_path / f"picture.{suffix}")
    image.save(path, **save)
    result = read_image(path)
    assert result.mode == "RGB" and result.size == image_size(path) == (2, 1)
    assert (result.getpixel((0, 0)), result.getpixel((1, 0))) == (left, right)


def test_cmyk_jpeg(tmp_path):
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=95)
    assert np.abs(np.subtract(read_image(str(tmp_path / "a.jpg")).getpixel((8, 8)), RED)).max() <= 3


def late_exif(data):
    """Move the eXIf chunk of a PNG behind its IDAT."""
    chunks, at = [], 8
    while at < len(data):
        end = at + 12 + struct.unpack(">I", data[at : at + 4])[0]
        chunks.append(data[at:end])
        at = end
    exif = [c for c in chunks if c[4:8] == b"eXIf"]
    assert len(exif) == 1
    rest = [c for c in chunks if c[4:8] != b"eXIf"]
    return data[:8] + b"".join(rest[:-1] + exif + rest[-1:])


@pytest.mark.parametrize("suffix", ["jpg", "png", "late.png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, orientation, suffix):
    """A 48 x 16 picture: red, green, blue squares from left to right, as the camera's sensor saw them."""
    stored = Image.new("RGB", (48, 16))
    for i, colour in enumerate((RED, GREEN, BLUE)):
        stored.paste(colour, (16 * i, 0, 16 * i + 16, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"picture.{suffix}"
    stored.save(path, exif=exif, **({"lossless": True} if suffix == "webp" else {}))
    if suffix == "late.png":
        path.write_bytes(late_exif(path.read_bytes()))
    image = read_image(str(path))
    # Where the stored left end stands upright, by the EXIF standard: 1, 4 left; 2, 3 right; 5, 6 top; 7, 8 bottom.
    first = {1: (8, 8), 4: (8, 8), 2: (40, 8), 3: (40, 8), 5: (8, 8), 6: (8, 8), 7: (8, 40), 8: (8, 40)}[orientation]
    assert image.size == image_size(str(path)) == ((48, 16) if orientation <= 4 else (16, 48))
    assert np.abs(np.subtract(image.getpixel(first), RED)).max() <= 3


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_first_frame_of_an_animation(tmp_path, suffix):
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    path = str(tmp_path / f"moving.{suffix}")
    frames[0].save(path, save_all=True, append_images=frames[1:], **({"lossless": True} if suffix == "webp" else {}))
    assert read_image(path).getpixel((4, 4)) == RED


def png_header(width, height):
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IDAT"


def test_bombs_are_refused_by_header(tmp_path):
    Image.new("RGB", (100, 100)).save(tmp_path / "small.png")
    for read in (read_image, image_size):
        with pytest.raises(ValueError, match="100x100 = 10000 pixels, allowed are 1 to 9999"):
            read(str(tmp_path / "small.png"), 9999)
        for side in (9000, 60000):  # below and above the size at which Pillow refuses by itself
            (tmp_path / "bomb.png").write_bytes(png_header(side, side))
            with pytest.raises(ValueError, match=f"bomb.png: .*({side * side}|67108864) pixels"):
                read(str(tmp_path / "bomb.png"))


@pytest.mark.parametrize("content", [
    b"", b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\x89PNG\r\n\x1a\n" + b"\xff" * 40,
    png_header(0, 5), b"GIF89a\x01", b"\xff\xd8\xff\xe1"])
def test_not_a_picture(tmp_path, content):
    (tmp_path / "x.png").write_bytes(content)
    for read in (read_image, image_size):
        with pytest.raises(ValueError, match="x.png"):
            read(str(tmp_path / "x.png"))


def test_unknown_range_is_refused(tmp_path):
    Image.fromarray(np.array([[0.0, 1.0]], dtype=np.float32)).save(tmp_path / "float.tiff")
    Image.fromarray(np.array([[0, 70000]], dtype=np.int32)).save(tmp_path / "int.tiff")
    with pytest.raises(ValueError, match="float.tiff.*no known range"):
        read_image(str(tmp_path / "float.tiff"))
    with pytest.raises(ValueError, match="int.tiff.*0 to 70000 exceed 16 bits"):
        read_image(str(tmp_path / "int.tiff"))


# ------------------------------------------------------------------------------------------------------- rows that hold


def rendered(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def test_one_row_in_full(load, processor, tmp_path):
    prompts, skipped = load([{"prompt": "Wie heißt das?", "images": ["a.png"], "answer": "Würfel", "label": "math"}])
    (prompt,) = prompts
    assert skipped == [] and isinstance(prompt, Prompt)
    assert (prompt.index, prompt.source, prompt.reference, prompt.label) == (0, "train.jsonl:1", "Würfel", "math")
    assert prompt.images == (str(tmp_path / "a.png"),) and prompt.grids == (processor.grid(64, 40),)
    assert prompt.text == rendered(("user", PICTURE + "Wie heißt das?"))
    _, h, w = prompt.grids[0]
    text = processor.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    at = text.index(IMAGE)
    assert prompt.input_ids.tolist() == text[:at] + [IMAGE] * (h * w // 4) + text[at + 1 :]
    assert prompt.input_ids.dtype == torch.int64
    patches, grids = load_pixels(prompt, processor)
    assert patches.shape == (h * w, 3 * 2 * 14 * 14) and grids.tolist() == [[1, h, w]]


def test_several_images_of_several_sizes_and_text_only_rows(load, processor):
    prompts, _ = load([{"prompt": "which?", "images": ["b.jpg", "a.png"]}, {"prompt": "1+1?"},
                       {"prompt": "and?", "images": "a.png"}, {"prompt": "null", "images": None, "label": None}])
    sizes = [processor.grid(30, 90), processor.grid(64, 40)]
    assert [p.grids for p in prompts] == [tuple(sizes), (), (sizes[1],), ()]
    for prompt in prompts:
        runs = "".join("x" if i == IMAGE else " " for i in prompt.input_ids.tolist()).split()
        assert [len(run) for run in runs] == [h * w // 4 for _, h, w in prompt.grids]
    patches, grids = load_pixels(prompts[0], processor)
    assert grids.tolist() == [list(g) for g in sizes] and len(patches) == grids.prod(-1).sum()
    assert load_pixels(prompts[1], processor) is None
    assert prompts[1].text == rendered(("user", "1+1?")) and IMAGE not in prompts[1].input_ids


@pytest.mark.parametrize("prompt, text", [
    ("A <image> and <image>?", f"A {PICTURE} and {PICTURE}?"),
    ("<image><image>", None),
    ("Compare.", f"{PICTURE}{PICTURE}Compare."),
    ([{"role": "user", "content": "Compare."}], f"{PICTURE}{PICTURE}Compare."),
    ([{"role": "user", "content": "A <image> and <image>?"}], f"A {PICTURE} and {PICTURE}?"),
    ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]}],
     f"{PICTURE}or{PICTURE}"),
])
def test_places_of_images(load, prompt, text):
    row = {"prompt": prompt, "images": ["a.png", "b.jpg"]}
    if text is None:
        with pytest.raises(ValueError, match="train.jsonl:1: empty prompt"):
            load([row])
        return
    assert load([row])[0][0].text == rendered(("user", text))


def test_messages_that_name_their_files_and_several_turns(load, tmp_path):
    turns = [{"role": "system", "content": "Be brief."},
             {"role": "user", "content": [{"type": "image", "image": "b.jpg"}, {"type": "text", "text": "What?"}]},
             {"role": "assistant", "content": "A box."},
             {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image", "path": "a.png"}]}]
    prompt = load([{"prompt": turns}])[0][0]
    assert prompt.images == (str(tmp_path / "b.jpg"), str(tmp_path / "a.png"))
    assert prompt.text == rendered(("system", "Be brief."), ("user", PICTURE + "What?"), ("assistant", "A box."),
                                   ("user", "And " + PICTURE))


def test_system_prompt_and_column_names(load):
    prompts, _ = load([{"q": "Hi", "target": "4", "pics": "a.png", "task": "t"}], system_prompt="Think.",
                      prompt_column="q", reference_column="target", images_column="pics", label_column="task")
    assert prompts[0].text == rendered(("system", "Think."), ("user", PICTURE + "Hi"))
    assert (prompts[0].reference, prompts[0].label) == ("4", "t")


def test_reference_or_answer(load):
    prompts, _ = load([{"prompt": "x", "reference": "r"}, {"prompt": "x", "answer": "s", "reference": "s"},
                       {"prompt": "x"}, {"prompt": "x", "answer": None, "reference": "t"}])
    assert [p.reference for p in prompts] == ["r", "s", None, "t"]


def test_bom_crlf_blank_lines_and_line_separators(load):
    """U+2028 ends a line for str.splitlines, but not in JSON; index counts rows, source counts lines."""
    data = b"\xef\xbb\xbf" + '{"prompt": "a"}\r\n\r\n   \n{"prompt": "b\u2028c"}\r\n\n{"prompt": "d"}'.encode()
    prompts, _ = load(data)
    assert [(p.index, p.source, p.messages[0]["content"]) for p in prompts] == [
        (0, "train.jsonl:1", "a"), (1, "train.jsonl:4", "b\u2028c"), (2, "train.jsonl:6", "d")]


def test_limit(load):
    assert [p.index for p in load([{"prompt": str(i)} for i in range(5)], limit=2)[0]] == [0, 1]


def test_order_is_kept_over_tokenizer_batches(load):
    prompts, _ = load([{"prompt": str(i)} for i in range(5000)])
    assert [p.index for p in prompts] == list(range(5000))
    for prompt in prompts:  # one token per byte, and three special ones
        assert prompt.text == rendered(("user", str(prompt.index)))
        assert len(prompt.input_ids) == len(f"user\n{prompt.index}\nassistant\n") + 3


def test_loading_reads_each_header_once_and_fast(load):
    """100,000 rows should take well under a minute: 5,000 rows with one picture in a few seconds, at worst."""
    start = time.process_time()
    load([{"prompt": f"question {i}", "images": "a.png", "answer": "x"} for i in range(5000)])
    assert time.process_time() - start < 6


def test_qwen3_vl_end_to_end(tmp_path):
    processor = Processor(write_checkpoint(tmp_path / "checkpoint", "qwen3_vl"))
    Image.new("RGB", (100, 64), GREEN).save(tmp_path / "a.png")
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "What?", "images": "a.png"}))
    (prompt,), _ = load_prompts(str(tmp_path / "d.jsonl"), processor, max_prompt_tokens=99)
    assert prompt.grids == ((1, 4, 6),) and (prompt.input_ids == IMAGE).sum() == 6
    assert load_pixels(prompt, processor)[0].shape == (24, 3 * 2 * 16 * 16)


# ------------------------------------------------------------------------------------------------------------- bad rows


def image_part(**keys):
    return [{"role": "user", "content": [{"type": "image", **keys}, {"type": "text", "text": "x"}]}]


BAD_ROWS = {
    "invalid JSON": (b'{"prompt": ', "invalid JSON"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', "invalid JSON"),
    "bottomless JSON": (b"[" * 100_000, "invalid JSON"),
    "no object": (b'["prompt"]', "must be a JSON object"),
    "unknown column": ({"prompt": "x", "imgs": 1},
                       "unknown column 'imgs'; known are prompt, images, label, answer, reference"),
    "no prompt": ({"answer": "x"}, "no prompt in column 'prompt'"),
    "empty prompt": ({"prompt": "  "}, "empty prompt"),
    "no messages": ({"prompt": []}, "empty prompt"),
    "prompt of wrong type": ({"prompt": 5}, "prompt must be a string or a list of messages"),
    "message without role": ({"prompt": [{"content": "x"}]}, "prompt must be a string or a list of messages"),
    "unknown role": ({"prompt": [{"role": "robot", "content": "x"}]}, "roles must be .*robot"),
    "assistant last": ({"prompt": [{"role": "assistant", "content": "x"}]}, "not assistant last"),
    "content of wrong type": ({"prompt": [{"role": "user", "content": 3}]}, "a string or a list of parts"),
    "unknown part": ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "a part must be .*video"),
    "part of wrong type": ({"prompt": image_part(image=3)}, "a part must be"),
    "part names two files": ({"prompt": image_part(image="a.png", path="a.png")}, "a part must be"),
    "files in two places": ({"prompt": image_part(image="a.png"), "images": "a.png"}, "1 of 1 image parts name a file"),
    "answer of wrong type": ({"prompt": "x", "answer": 4}, "column 'answer' must be a string, not 4"),
    "label of wrong type": ({"prompt": "x", "label": ["t"]}, "column 'label' must be a string"),
    "images of wrong type": ({"prompt": "x", "images": {"a": 1}}, "column 'images' must be a path or a list"),
    "empty path": ({"prompt": "x", "images": [""]}, "column 'images' must be a path or a list"),
    "two references": ({"prompt": "x", "answer": "1", "reference": "2"}, "answer and reference differ"),
    "no such image": ({"prompt": "x", "images": "c.png"}, "no such image: .*c.png"),
    "image is a folder": ({"prompt": "x", "images": "."}, "cannot be read as a picture"),
    "NUL in a path": ({"prompt": "x", "images": "a\0.png"}, "cannot be read as a picture"),
    "not a picture": ({"prompt": "x", "images": "train.jsonl"}, "not a picture"),
    "too thin": ({"prompt": "x", "images": "thin.png"}, "aspect ratio"),
    "too many places": ({"prompt": "<image> <image>x", "images": "a.png"}, "1 images for 2 places"),
    "too few places": ({"prompt": "<image>x", "images": ["a.png", "b.jpg"]}, "2 images for 1 places"),
    "place without image": ({"prompt": "<image>x"}, "0 images for 1 places"),
    "where?": ({"prompt": [{"role": "user", "content": "x"}] * 2, "images": "a.png"}, "1 images for 0 places"),
    "typed image token": ({"prompt": "x <|image_pad|>"}, "image-token mismatch: 1 image and 0 video .* 0 images"),
    "typed image token beside one": ({"prompt": "<|image_pad|>", "images": "a.png"}, "mismatch: 2 image .* 1 images"),
    "typed video token": ({"prompt": "<|video_pad|>", "images": "a.png"}, "mismatch: 1 image and 1 video"),
    "too long": ({"prompt": "x" * 600}, "prompt too long: 619 tokens, 0 of them for 0 images; the limit is 500"),
    "too long by its image": ({"prompt": "x" * 480, "images": "a.png"},
                              "prompt too long: 507 tokens, 6 of them for 1 images"),
    "half a surrogate pair": (b'{"prompt": "a\\ud800"}', "surrogates not allowed"),
    "two system prompts": ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]},
                           "drop one of them"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_row(load, tmp_path, case):
    """An error with file and line, and by choice a message: the other rows keep their numbers."""
    Image.new("RGB", (2, 500)).save(tmp_path / "thin.png")
    bad, message = BAD_ROWS[case]
    bad = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    data = b'{"prompt": "first"}\n\n' + bad + b'\n{"prompt": "last"}\n'
    options = {"system_prompt": "S" if case == "two system prompts" else ""}
    with pytest.raises(ValueError, match=f"train.jsonl: 1 of 3 rows are bad\n  train.jsonl:3: .*{message}"):
        load(data, **options)
    prompts, skipped = load(data, on_bad_row="skip", **options)
    assert [(p.index, p.source) for p in prompts] == [(0, "train.jsonl:1"), (2, "train.jsonl:4")]
    assert len(skipped) == 1 and skipped[0].startswith("train.jsonl:3: ")


def test_first_five_of_many(load):
    """In the order of lines, though they are found at three different stages."""
    rows = [{"prompt": "x" * 600}, {"prompt": 1}, {"prompt": "x", "images": "c.png"}, {"prompt": "ok"}, {"prompt": ""},
            {"nope": 1}, {"prompt": 1}, {"prompt": 1}]
    with pytest.raises(ValueError) as error:
        load(rows)
    lines = str(error.value).split("\n")
    assert "7 of 8 rows are bad" in lines[0]
    assert [line.split(": ")[0].strip() for line in lines[1:6]] == [f"train.jsonl:{i}" for i in (1, 2, 3, 5, 6)]
    assert lines[6:] == ["  ..."]


def test_nothing_left(load, tmp_path, processor):
    with pytest.raises(ValueError, match="2 of 2 rows are bad"):
        load([{"prompt": 1}, {"prompt": 2}], on_bad_row="skip")
    for empty in (b"", b"\n \r\n"):
        with pytest.raises(ValueError, match="train.jsonl: empty file"):
            load(empty)
    with pytest.raises(ValueError, match="none.jsonl: no such file"):
        load_prompts(str(tmp_path / "none.jsonl"), processor, max_prompt_tokens=9)
    with pytest.raises(ValueError, match="on_bad_row must be"):
        load([{"prompt": "x"}], on_bad_row="ignore")


def test_template_that_refuses(load, processor, monkeypatch):
    refusing = "{{ raise_exception('no system role') }}"
    monkeypatch.setattr(processor.tokenizer, "chat_template", refusing)
    with pytest.raises(ValueError, match="train.jsonl:1: the chat template cannot render this .*no system role"):
        load([{"prompt": "x"}])
    text_only = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    monkeypatch.setattr(processor.tokenizer, "chat_template", text_only)
    assert load([{"prompt": "x"}])[0][0].text == "userx"
    with pytest.raises(ValueError, match="train.jsonl:1: the chat template cannot render this"):
        load([{"prompt": "x", "images": "a.png"}])
    monkeypatch.setattr(processor.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="image-token mismatch: 0 image .* 1 images"):
        load([{"prompt": "x", "images": "a.png"}])


def test_damaged_body_is_found_at_first_use_or_by_verify_images(load, processor, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    for name in ("cut.png", "cut.jpg", "cut.webp"):
        Image.fromarray(noise).save(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        rows = [{"prompt": "fine"}, {"prompt": "x", "images": ["a.png", name]}]
        if name != "cut.webp":  # of WebP, Pillow opens whole files only
            prompts, _ = load(rows)
            with pytest.raises(ValueError, match=f"train.jsonl:2: .*{name}: cannot be read as a picture"):
                load_pixels(prompts[1], processor)
        with pytest.raises(ValueError, match=f"train.jsonl:2: .*{name}"):
            load(rows, verify_images=True)
        prompts, skipped = load(rows, verify_images=True, on_bad_row="skip")
        assert len(prompts) == len(skipped) == 1


def test_file_changed_since_load(load, processor, tmp_path):
    prompts, _ = load([{"prompt": "x", "images": "a.png"}])
    Image.new("RGB", (200, 40)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="train.jsonl:1: pictures changed since they were loaded"):
        load_pixels(prompts[0], processor)
    (tmp_path / "a.png").unlink()
    with pytest.raises(ValueError, match="train.jsonl:1: no such image"):
        load_pixels(prompts[0], processor)


def test_verify_images_accepts_good_ones(load):
    assert len(load([{"prompt": "x", "images": ["a.png", "b.jpg"]}], verify_images=True)[0]) == 1
