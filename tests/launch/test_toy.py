"""launch/toy.py: its files are ordinary ones, its task needs the pictures, and a seed gives the
same bytes."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from common.data.processor import Processor
from common.data.rows import load_prompts
from common.flags import DataArgs
from common.ground.toy import TRAINER_ARGS
from common.rewards import sources
from conftest import read_json, read_rows, words
from launch import toy

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


def write(folder: Path, *flags: str) -> Path:
    toy.main(words("--out", folder, "--warm_start_steps 0 --train 128 --eval 64", *flags))
    return folder


def read(folder: Path, split: str) -> list[dict]:
    return read_rows(folder / f"{split}.jsonl")


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp(request.param) / "toy", "--model", request.param)


def test_files_load_and_fit_each_other(folder):
    kind = AutoConfig.from_pretrained(folder / "model").model_type
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder / "model")
    generation = GenerationConfig.from_pretrained(folder / "model")
    assert kind in KINDS
    assert model.dtype == torch.float32
    assert (
        generation.eos_token_id
        == tokenizer.eos_token_id
        == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    assert tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer) == model.config.text_config.vocab_size
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == model.config.image_token_id
    row = read(folder, "eval")[0]
    image = Image.open(folder / row["images"][0])
    patches = processor(images=[image], return_tensors="pt")
    assert image.mode == "RGB"
    # pictures keep their size: one image token per cell
    assert patches["image_grid_thw"].tolist() == [[1, 4, 4]]
    prompt = torch.tensor([tokenizer.encode(toy.ASK.format(toy.PICTURE + row["prompt"]))])
    logits = model(**toy.model_inputs(model, prompt, patches["pixel_values"][None])).logits
    assert logits.shape == (1, prompt.shape[1], len(tokenizer))
    assert logits.isfinite().all()


def test_rows_have_short_answers_and_pictures_of_their_own(folder):
    tokenizer, pictures = AutoTokenizer.from_pretrained(folder / "model"), []
    assert len(read(folder, "train")) == 128
    assert len(read(folder, "eval")) == 64
    for row in read(folder, "train") + read(folder, "eval"):
        assert set(row) == {"prompt", "images", "answer", "label"}
        assert 1 <= len(tokenizer.encode(row["answer"])) <= 3
        pictures += [Image.open(folder / name).tobytes() for name in row["images"]]
    assert len(set(pictures)) == len(pictures) == 128 + 64
    args = read_json(folder / "args.json")
    assert Path(args["model"]).is_dir()
    assert set(TRAINER_ARGS) < set(args)


def test_who_ignores_the_picture_scores_at_chance(tmp_path):
    """The best constant answer per question text, fitted to eval itself, is right in 1 of (number
    of answers)."""
    rows = read(write(tmp_path / "toy", "--train 1 --eval 256"), "eval")
    answers = defaultdict(Counter)
    for row in rows:
        answers[row["prompt"]][row["answer"]] += 1
    for counts in answers.values():
        assert max(counts.values()) == min(counts.values())
        assert len(counts) in (4, 6)
    best_blind = sum(max(counts.values()) for counts in answers.values()) / len(rows)
    assert best_blind == 0.21875  # 24/64 cells at 1/6, 40/64 at 1/4
    assert len({row["label"] for row in rows}) == 3


def test_seed_determines_every_byte(tmp_path):
    first, second = (write(tmp_path / name, "--seed 3") for name in "ab")
    other = write(tmp_path / "c", "--seed 4")
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    assert names == sorted(
        str(path.relative_to(second)) for path in second.rglob("*") if path.is_file()
    )
    for name in names:
        if name not in ("args.json", "grm_args.json"):  # holds the folder's name
            assert (first / name).read_bytes() == (second / name).read_bytes(), name
    for name in ("train.jsonl", "model/model.safetensors"):
        assert (first / name).read_bytes() != (other / name).read_bytes(), name


def test_mixed_rows(tmp_path):
    folder = write(tmp_path / "toy", "--mixed")
    rows = read(folder, "train")
    assert Counter(len(row["images"]) for row in rows) == {1: 128, 2: 8, 0: 8}
    sizes = {Image.open(folder / name).size for row in rows for name in row["images"]}
    assert sizes == {(56, 56), (84, 84)}
    assert all(row["prompt"] == f"say {row['answer']}." for row in rows if not row["images"])


def test_warm_start_moves_every_weight(tmp_path):
    folder = tmp_path / "toy"
    write(folder, "--warm_start_steps 2")
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    fresh = toy.make_model("qwen2_5_vl", toy.make_tokenizer(), seed=0)
    for (name, weight), start in zip(model.named_parameters(), fresh.parameters()):
        assert not torch.equal(weight, start), name


def test_folder_in_use_is_refused(folder, capsys):
    with pytest.raises(SystemExit) as error:
        toy.main(words("--out", folder))
    assert error.value.code == 2
    assert "exists: remove it" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# --task describe


@pytest.fixture(scope="module")
def described(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("describe") / "toy", "--task describe")


def test_descriptions_name_what_is_drawn(described):
    """The colour of each named object is that of its cell of the picture, and cells that are not
    named are empty."""
    colours = {ImageColor.getrgb(rgb): name for name, rgb in toy.COLOURS.items()}
    for row in read(described, "train") + read(described, "eval"):
        *objects, number = row["answer"].split(", ")
        image = Image.open(described / row["images"][0])
        cells = [image.crop((28 * x, 28 * y, 28 * x + 28, 28 * y + 28)) for y, x in toy.CELLS]
        # a thick line may reach a few pixels into the next cell
        drawn = [
            {rgb for pixels, rgb in cell.getcolors() if pixels > 20} - {(255, 255, 255)}
            for cell in cells
        ]
        assert [{colours[rgb] for rgb in cell} for cell in drawn if cell] == [
            {name.split()[0]} for name in objects
        ]
        assert int(number) == len(objects)
        assert all(name.split()[1] in toy.SHAPES for name in objects)
    assert len({row["prompt"] for row in read(described, "train")}) == 1


def test_the_reward_counts_parts_in_their_places(described):
    """Checked by hand; the file's own flags name it."""
    args = read_json(described / "args.json")
    source = sources.load_source(args["reward"])
    asked = "red circle, blue cross, 2"
    wanted = {
        asked: 1.0,
        "red square, blue cross, 2": 4 / 5,
        "blue cross, red circle, 2": 1 / 5,
        "red circle, 2": 3 / 5,
        "red circle, blue cross, red circle, 2": 5 / 7,  # one object too many: two parts more
        "red circle, blue cross": 2 / 5,  # the last part is taken for the number
        "red circle blue cross 2": 0.0,
        "2": 1 / 5,
        "": 0.0,
    }
    rewards = source.function(None, list(wanted), [asked] * len(wanted), None, None)
    assert rewards["reward"] == pytest.approx(list(wanted.values()))
    assert rewards["accuracy"] == [float(response == asked) for response in wanted]


# ------------------------------------------------------------------------------------------------
# --task locate


@pytest.fixture(scope="module")
def located(tmp_path_factory) -> list[Path]:
    """Of two families that count differently, one in a picture's pixels as seen, one in thousandths."""
    folder = tmp_path_factory.mktemp("locate")
    return [write(folder / kind, "--task locate --model", kind) for kind in KINDS[:2]]


def test_boxes_are_those_of_what_is_asked_for(located):
    for row in read(located[0], "train"):
        image = Image.open(located[0] / row["images"][0])
        (box,) = row["regions"]["boxes"]
        colour, shape = row["prompt"].removeprefix("where is the ").rstrip("?").split()
        fill = ImageColor.getrgb(toy.COLOURS[colour])
        y, x = (np.asarray(image) == fill).all(axis=-1).nonzero()
        slack = 4 if shape == "cross" else 1  # its lines are thick
        expected = pytest.approx(box, abs=slack)
        assert [x.min(), y.min(), x.max() + 1, y.max() + 1] == expected


def test_families_share_the_rows_and_differ_in_their_spaces(located):
    """A token shows a cell; the sizes of most pictures change, those of the largest by half."""
    texts = [(folder / "train.jsonl").read_bytes() for folder in located]
    assert texts[0] == texts[1]
    for folder, space in zip(located, ("seen", "1000")):
        args = read_json(folder / "args.json")
        data = DataArgs(max_prompt_tokens=256, max_pixels=args["max_pixels"])
        prompts = load_prompts(args["data"], Processor(args["model"], data), data)
        cells = Counter()
        for prompt in prompts:
            ((_, height, width),) = prompt.grids
            (place,) = prompt.places
            assert place.space == space
            assert prompt.label == f"{height // 2} x {width // 2}"
            cells[place.file[0] * place.file[1] > args["max_pixels"], prompt.label] += 1
        assert {label for large, label in cells if large} == {"3 x 3"}
        assert cells[True, "3 x 3"] == 32
