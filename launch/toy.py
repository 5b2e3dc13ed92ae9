"""A tiny vision-language model and a picture task for it, in the ordinary file formats.

    python launch/toy.py --out toy                       Qwen2.5-VL; about 30 seconds on one processor core
    python launch/toy.py --out toy2 --task describe      longer answers; about a minute
    python launch/toy.py --out toy4 --task locate --train 4096    boxes, first learned from written answers
    python launch/toy.py --out toy3 --model qwen3_vl     Qwen3-VL
    python launch/toy.py --out toy35 --model qwen3_5     Qwen3.5: two layers of three with linear attention

    <out>/model/        config.json, model.safetensors, tokenizer files with a chat template, preprocessor_config.json
    <out>/train.jsonl   rows {"prompt", "images", "answer", "label"}, pictures in <out>/images/; eval.jsonl likewise
    <out>/args.json     flags of train_ppo_vl.py that suit them (common/ground/toy.py), for its --config
    <out>/judge_train.jsonl, judge_eval.jsonl    judgements about the pictures of train.jsonl and eval.jsonl: right and wrong
                        answers, pairs of pictures
    <out>/grm_args.json flags of train_grm_vl.py that suit them

With --task describe there are no judgements. With --task locate, grm_args.json is for the responses in
train.jsonl, which the random weights learn first.

The task "questions". A picture is a 2 x 2 board that holds one to four copies of one coloured
shape. Three kinds of question (the label of a row) ask for the colour, the shape or the number.
Every question text has all its answers equally often, so a policy that ignores the picture is right in
1 of 6 or 1 of 4 cases, 0.22 overall. No picture occurs twice.

The task "describe". The first two to four cells of the board hold one object each, and the answer
names all of them in reading order, then their number: "red circle, blue cross, 2", in 9 to 15 tokens.
Each part earns its share (launch/toy_reward.py), but all at the last token: the critic must find out
which token earned what.

The task "locate". On a board of 2 x 2 to 3 x 3 cells lie one to three objects of different colours; the
answer is the box of one of them. Pictures have many sizes, and those of 3 x 3 cells more pixels than
--max_pixels allows. The rows, in pixels of the files, are the same for all families.

The model. RL usually starts from an instruction-tuned model. So does this one, after a supervised "warm
start" on other pictures: it learns to describe what it sees (in three words, in any order; or the
objects without their number), and to answer the task's prompts in the right format, but blindly. It
then sees, but still answers at chance: to answer the question is left to reinforcement learning."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder

from common.ground import versions

versions.check()


import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw
from tokenizers import pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging

from common.ground.toy import FLAGS, toy_flags
from launch import tool

COLOURS = dict(
    red="#dc2828",
    green="#28a03c",
    blue="#3250dc",
    yellow="#f0c828",
    purple="#963cb4",
    grey="#828282",
)
SHAPES = dict(circle="circles", square="squares", triangle="triangles", cross="crosses")
COUNTS = ("1", "2", "3", "4")
ANSWERS = {"colour": list(COLOURS), "shape": list(SHAPES), "count": list(COUNTS)}  # by label
CELLS = tuple(itertools.product((0, 1), repeat=2))  # (row, column) on the board
Objects = dict[tuple[int, ...], tuple[str, str]]  # {cell: (colour, shape)}
Rows = list[dict]
CAPTION_PROMPT = "describe the picture in three words."
LIST_PROMPT = "list all objects, then say how many."  # --task describe
SIGHT_PROMPT = "what is there?"  # its warm start's
OBJECT_COUNTS = (2, 3, 4)
BOARDS = ((2, 2), (2, 3), (3, 2), (3, 3))  # rows and columns, for --task locate

# pixels; a cell of the board is one merged block of 2 x 2 patches
PATCH_SIZE = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_5": 16}
VISION_TOKENS = dict(
    vision_start="<|vision_start|>",
    vision_end="<|vision_end|>",
    image="<|image_pad|>",
    video="<|video_pad|>",
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_TOKENS.values())
# A question about a board as the chat template writes it, with one image token per cell.
PICTURE = "<|vision_start|>" + "<|image_pad|>" * len(CELLS) + "<|vision_end|>"
ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part.type == 'text' -%}
{{ part.text }}
{%- else -%}
{{ raise_exception('a content part must be of type text, image or video') }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


# ----------------------------------------------------------------------------------------------------------------------
# Task
# ----------------------------------------------------------------------------------------------------------------------


def question_cells() -> list[tuple[str, str, dict[str, str]]]:
    """Every (label, question, what is known of the board), with all answers to each question once, so
    that cycling is balanced."""
    cells = []
    for shape, colour in itertools.product(SHAPES, COLOURS):
        known = dict(shape=shape, colour=colour)
        cells.append(("colour", f"what colour is each {shape}?", known))
    for colour, shape in itertools.product(COLOURS, SHAPES):
        known = dict(shape=shape, colour=colour)
        cells.append(("shape", f"what shape is each {colour} object?", known))
    for shape, count in itertools.product(SHAPES, COUNTS):
        known = dict(shape=shape, count=count)
        cells.append(("count", f"how many {SHAPES[shape]} are there?", known))
    return cells


def random_thing(rng: random.Random) -> tuple[str, str]:
    return rng.choice(ANSWERS["colour"]), rng.choice(ANSWERS["shape"])


def random_copies(rng: random.Random, known: dict[str, str]) -> Objects:
    """A board of one to four copies of one object, at random except for what is ``known``."""
    thing = dict(zip(("colour", "shape"), random_thing(rng))) | known
    count = known["count"] if "count" in known else rng.choice(COUNTS)
    return dict.fromkeys(rng.sample(CELLS, int(count)), (thing["colour"], thing["shape"]))


def random_objects(rng: random.Random, count: int) -> Objects:
    """One in each of the first `count` cells, in reading order."""
    return {place: random_thing(rng) for place in CELLS[:count]}


def scattered_objects(rng: random.Random, board: tuple[int, int]) -> Objects:
    """One to three of different colours on a board with so many rows and columns."""
    places = rng.sample(list(itertools.product(*map(range, board))), rng.randint(1, 3))
    colours = rng.sample(ANSWERS["colour"], len(places))
    return {place: (colour, random_thing(rng)[1]) for place, colour in zip(places, colours)}


def draw_objects(
    rng: random.Random, objects: Objects, cell: int, board: tuple[int, int] | None
) -> tuple[Image.Image, list[tuple]]:
    """An RGB picture of cells of `cell` pixels, and the boxes of its objects. On a `board` of rows and
    columns the objects nearly fill their cells; without one, on 2 x 2 cells, they differ in size."""
    rows, columns = board or (2, 2)
    image = Image.new("RGB", (cell * columns, cell * rows), (255, 255, 255))
    draw, boxes = ImageDraw.Draw(image), []
    for (row, column), (colour, shape) in objects.items():
        fill = COLOURS[colour]
        size = rng.randint(cell * (6 if board else 4) // 7, cell * 6 // 7)
        x, y = (at * cell + rng.randint(1, cell - size - 1) for at in (column, row))
        right, bottom = x + size, y + size
        box = x, y, right, bottom
        if shape == "circle":
            draw.ellipse(box, fill=fill)
        elif shape == "square":
            draw.rectangle(box, fill=fill)
        elif shape == "triangle":
            draw.polygon((x + size // 2, y, x, bottom, right, bottom), fill=fill)
        else:
            for line in (box, (x, bottom, right, y)):
                draw.line(line, fill=fill, width=cell // 5)
        boxes.append((x, y, right + 1, bottom + 1))  # edges; right and bottom are pixels
    return image, boxes


def new_picture(
    rng: random.Random, choose: Callable, known, cell: int, seen: set, board: tuple | None = None
) -> tuple[Objects, Image.Image, list[tuple]]:
    """Objects from `choose(rng, known)`, a picture of them that is not in `seen`, and their boxes."""
    while True:
        objects = choose(rng, known)
        image, boxes = draw_objects(rng, objects, cell, board)
        if image.tobytes() not in seen:
            seen.add(image.tobytes())
            return objects, image, boxes


def random_rows(rng: random.Random, count: int, cell: int, seen: set) -> Rows:
    """`count` questions with new pictures: every 64 in a row hold each of `question_cells` once."""
    rows, cells = [], []
    while len(rows) < count:
        if not cells:
            cells = question_cells()
            rng.shuffle(cells)
        label, question, known = cells.pop()
        objects, image, _ = new_picture(rng, random_copies, known, cell, seen)
        sights = [*next(iter(objects.values())), str(len(objects))]
        row = dict(prompt=question, sights=sights, images=[image], answer=known[label], label=label)
        rows.append(row)
    return rows


def description(objects: Objects) -> str:
    """As in "red circle, blue cross, 2": 3 tokens per object, 3 for the number and the end."""
    return ", ".join([*map(" ".join, objects.values()), str(len(objects))])


def description_rows(rng: random.Random, count: int, cell: int, seen: set) -> Rows:
    """`count` rows of --task describe with new pictures; equally many with each of OBJECT_COUNTS."""
    rows = []
    for number in range(count):
        known = OBJECT_COUNTS[number % 3]
        objects, image, _ = new_picture(rng, random_objects, known, cell, seen)
        row = dict(prompt=LIST_PROMPT, images=[image], answer=description(objects))
        rows.append(row | dict(sights=list(map(" ".join, objects.values())), label="description"))
    rng.shuffle(rows)
    return rows


def location_rows(rng: random.Random, count: int, cell: int, seen: set) -> Rows:
    """`count` rows of --task locate with new pictures. The sides of cells are drawn, not the model's `cell`,
    so that all families get the same rows; on the largest board they are twice as long, so that its
    pictures have to be resized."""
    rows = []
    for number in range(count):
        board = BOARDS[number % 4]
        side = rng.randint(28, 32) * (2 if board == BOARDS[-1] else 1)
        objects, image, boxes = new_picture(rng, scattered_objects, board, side, seen, board)
        thing, box = rng.choice(list(zip(map(" ".join, objects.values()), boxes)))
        response = f'[{{"bbox_2d": <box>, "label": "{thing}"}}]'
        row = dict(prompt=f"where is the {thing}?", images=[image], response=response)
        rows.append(row | dict(regions={"boxes": [box]}, label=f"{board[0]} x {board[1]}"))
    return rows


def mixed_rows(rng: random.Random, count: int, cell: int, seen: set) -> Rows:
    """`count` rows of other forms, in turn: two pictures of different size, and text without a picture."""
    rows = []
    for first, second in zip(
        random_rows(rng, count, cell, seen), random_rows(rng, count, cell * 3 // 2, seen)
    ):
        if len(rows) % 2 == 0:
            prompt = second["prompt"].replace("?", " in the second picture?")
            images = first["images"] + second["images"]
            rows.append(second | dict(prompt=prompt, images=images, label="two_pictures"))
        else:
            answer = first["answer"]
            rows.append(dict(prompt=f"say {answer}.", images=[], answer=answer, label="text"))
    return rows


def judgement_rows(rng: random.Random, rows: Rows) -> Rows:
    """Rows of train_grm_vl.py about the boards of `rows`, whose "files" exist: for every board a right
    and a wrong answer to its question; for every second board a pair of pictures, of which only the
    board's fits a request."""
    boards, judgements = [row for row in rows if len(row["images"]) == 1], []
    for number, row in enumerate(boards):
        label, answer = row["label"], row["answer"]
        wrong = rng.choice([value for value in ANSWERS[label] if value != answer])
        # what a policy tries, too: other kinds of words, none, or two
        if rng.random() < 0.25:
            words = [word for kind in ANSWERS if kind != label for word in ANSWERS[kind]]
            wrong = rng.choice([*words, "", f"{answer} {wrong}"])
        asked = dict(question=row["prompt"], images=row["files"])
        for response, correct in ((answer, True), (wrong, False)):
            judgements.append(asked | dict(response=response, correct=correct))
        sample = rng.sample(boards, min(len(boards), 60))
        others = [other for other in sample if set(row["sights"]).isdisjoint(other["sights"])]
        if number % 2 and others:
            files, preferred = row["files"] + rng.choice(others)["files"], rng.choice("AB")
            if preferred == "B":
                files.reverse()
            prompt = " ".join(row["sights"])
            judgements.append(dict(prompt=prompt, images=files, preferred=preferred))
    return judgements


def write_rows(rows: Rows, folder: Path, split: str) -> None:
    """Write <folder>/<split>.jsonl, and <folder>/images/<split>-<row>[-1].png, which become the
    rows' "files"."""
    lines = []
    for number, row in enumerate(rows):
        row["files"] = []
        for place, image in zip(("", "-1"), row["images"]):
            row["files"].append(f"images/{split}-{number:05d}{place}.png")
            image.save(folder / row["files"][-1])
        line = row | {"images": row["files"]}
        columns = ("prompt", "images", "answer", "response", "regions", "label")
        lines.append({name: line[name] for name in columns if name in line})
    write_lines(folder / f"{split}.jsonl", lines)


def write_lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Task(NamedTuple):
    # (rng, how many, pixels of a cell, pictures that were drawn) -> rows with new pictures
    rows: Callable
    caption_prompt: str  # the prompt to which the warm start describes the picture
    blind_share: float  # of the warm start's examples: the question, answered blindly
    warm_start_steps: int
    texts: list[str]  # whose words become tokens
    rope: dict = {}  # of the model


TASKS = {
    "questions": Task(
        random_rows,
        CAPTION_PROMPT,
        0.3,
        300,
        [
            *(question for _, question, _ in question_cells()),
            CAPTION_PROMPT,
            "say in the second picture?",
        ],
    ),
    "describe": Task(description_rows, SIGHT_PROMPT, 0.2, 500, [LIST_PROMPT, SIGHT_PROMPT]),
    "locate": Task(
        location_rows,
        "",
        0.0,
        0,
        ["where is the", '[{"bbox_2d": [1, 2], "label": "'],
        # With the usual base, positions in so small a picture would hardly differ in angle.
        dict(rope_theta=20.0, mrope_section=[2, 3, 3]),
    ),
}


# ----------------------------------------------------------------------------------------------------------------------
# Model
# ----------------------------------------------------------------------------------------------------------------------


def make_tokenizer(task: str = "questions") -> Qwen2Tokenizer:
    """Qwen's byte-level BPE, trained on the words of the task: one token for each, and any other
    text in bytes."""
    words = [*COLOURS, *SHAPES, *SHAPES.values(), "user", "assistant", "system"]
    texts = words + [" " + word for word in words] + TASKS[task].texts
    backend = Qwen2Tokenizer().backend_tokenizer
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=4096,
            min_frequency=1,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    model = json.loads(backend.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],  # type: ignore[arg-type]  # both forms are read
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,  # type: ignore[arg-type]  # there is none
        model_max_length=4096,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(
    kind: str,
    tokenizer: Qwen2Tokenizer,
    seed: int,
    hidden_size: int = 64,
    layers: int = 3,
    rope: dict = {},
):
    """A model of `kind`, a key of PATCH_SIZE, with random weights: 0.4 to 0.5 million, fp32."""
    # At this width the usual 0.02 would start with attention that is uniform and outputs that are
    # nearly zero.
    heads, head_dim, std = 4, hidden_size // 4, 0.08
    section = [head_dim // 4, head_dim // 8, head_dim // 8]
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=section) | rope
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=4096,
        initializer_range=std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        rope_parameters=rope,
    )
    vision: dict[str, Any] = dict(
        depth=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=2,
        patch_size=PATCH_SIZE[kind],
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=hidden_size,
        initializer_range=std,
    )
    if kind == "qwen2_5_vl":
        vision |= dict(window_size=4 * PATCH_SIZE[kind], fullatt_block_indexes=[1])
    else:
        text["head_dim"], vision["num_position_embeddings"] = head_dim, 64
        rope["mrope_interleaved"] = True
    if kind == "qwen3_vl":
        vision["deepstack_visual_indexes"] = [0]
    elif kind == "qwen3_5":
        # A quarter of these wider heads would be too small for positions in three dimensions:
        # half of them rotates.
        rope["partial_rotary_factor"] = 0.5
        kinds = ["full_attention" if i % 3 == 1 else "linear_attention" for i in range(layers)]
        text |= dict(
            head_dim=2 * head_dim,
            linear_num_key_heads=heads // 2,
            linear_num_value_heads=heads,
            linear_key_head_dim=head_dim,
            linear_value_head_dim=head_dim,
            mamba_ssm_dtype="float32",
            layer_types=kinds,
        )
    token_ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in VISION_TOKENS.items()
    }
    config = AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        dtype="float32",
        initializer_range=std,
        **token_ids,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return model


def make_image_processor(kind: str) -> Qwen2VLImageProcessorPil:
    """The family's Pillow image processor; pictures of 1 to 16 cells keep their size."""
    cell = 2 * PATCH_SIZE[kind]
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH_SIZE[kind],
        size=dict(shortest_edge=cell**2, longest_edge=(4 * cell) ** 2),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Warm start
# ----------------------------------------------------------------------------------------------------------------------


def model_inputs(model, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> dict:
    """Keyword arguments of the forward pass for ids (B, T) that show boards, and patches (boards, 16, C)."""
    return dict(
        input_ids=input_ids,
        pixel_values=pixel_values.flatten(0, 1),
        image_grid_thw=torch.tensor([[1, 4, 4]] * len(pixel_values)),
        mm_token_type_ids=(input_ids == model.config.image_token_id).int(),
    )


def next_token_loss(
    model, tokenizer: Qwen2Tokenizer, dialogues: list[list[str]], pixel_values: torch.Tensor
) -> torch.Tensor:
    """Mean over the tokens of the responses. A dialogue is a prompt, its response, a further prompt
    and so on; patches (boards, 16, C) of the boards that the dialogues show."""
    sequences, labels = [], []
    for texts in dialogues:
        ids = tokenizer(texts)["input_ids"]
        targets = [part if number % 2 else [-100] * len(part) for number, part in enumerate(ids)]
        sequences.append(torch.tensor(sum(ids, [])))
        labels.append(torch.tensor(sum(targets, [])))
    # Padding follows the response, where the tokens of a causal model cannot see it: no mask is needed.
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(sequences, True, model.generation_config.pad_token_id)
    inputs = model_inputs(model, ids, pixel_values)
    return model(**inputs, labels=pad(labels, True, -100), use_cache=False).loss


def blind_answer(rng: random.Random, label: str) -> str:
    """An answer in the right format that has nothing to do with the picture."""
    if label == "description":
        return description(random_objects(rng, rng.choice(OBJECT_COUNTS)))
    # A favourite answer: with equal odds, a trace of the descriptions' training would decide the argmax.
    answers = ANSWERS[label]
    return rng.choices(answers, [2] + [1] * (len(answers) - 1))[0]


def warm_start_example(rng: random.Random, row: dict, task: Task) -> list[str]:
    """Prompt and response about a board: mostly a description in random order, otherwise its question
    with a blind answer."""
    prompt = task.caption_prompt
    if rng.random() < task.blind_share:
        prompt, response = row["prompt"], blind_answer(rng, row["label"])
    elif row["label"] == "description":
        response = ", ".join(row["sights"])
    else:
        response = "\n".join(rng.sample(row["sights"], 3))
    return [ASK.format(PICTURE + prompt), response + "<|im_end|>"]


def warm_start(
    model,
    tokenizer: Qwen2Tokenizer,
    rows: Rows,
    pixels: torch.Tensor,
    rng: random.Random,
    steps: int,
    task: Task,
) -> None:
    """Train all weights, tower included, by next-token prediction on the responses; pixels (rows, 16, C)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1 - step / (steps + 1))
    )
    model.train()
    for step in range(1, steps + 1):
        chosen = rng.sample(range(len(rows)), 64)
        dialogues = [warm_start_example(rng, rows[i], task) for i in chosen]
        loss = next_token_loss(model, tokenizer, dialogues, pixels[chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == steps:
            print(f"  step {step} of {steps}: loss {loss.item():.3f} nats per token", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write a tiny vision-language model and a picture task for it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder to write")
    parser.add_argument(
        "--task",
        choices=sorted(TASKS),
        default="questions",
        help="one word about a picture, a list, or a box",
    )
    parser.add_argument(
        "--model", choices=sorted(PATCH_SIZE), default="qwen2_5_vl", help="model family"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, pictures and warm start"
    )
    parser.add_argument(
        "--train", type=int, default=2048, help="rows to train on; best a multiple of 64"
    )
    parser.add_argument(
        "--eval", type=int, default=256, help="held-out rows; best a multiple of 64"
    )
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="an eighth more rows, with two pictures or with text only; for --task questions",
    )
    parser.add_argument(
        "--warm_start_steps",
        type=int,
        help="supervised steps; None: 300, 500 to describe, 0 to locate; 0 leaves random weights",
    )
    args = parser.parse_args(argv)
    if args.warm_start_steps is None:
        args.warm_start_steps = TASKS[args.task].warm_start_steps
    if args.out.exists():
        parser.error(f"--out {args.out} exists: remove it or name another")
    return args


def board_pixels(processor: Qwen2VLImageProcessorPil, rows: Rows) -> torch.Tensor:
    """Patches of one board per row, (rows, 16, C)."""
    patches = processor(images=[row["images"][0] for row in rows], return_tensors="pt").pixel_values
    return patches.unflatten(0, (len(rows), -1))


def write_toy(args: argparse.Namespace, folder: Path) -> None:
    """Write everything but the files of flags into `folder`."""
    task, cell, seen = TASKS[args.task], 2 * PATCH_SIZE[args.model], set()
    (folder / "images").mkdir(parents=True)
    for split in ("train", "eval"):
        rng, count = random.Random(f"{args.seed} {split}"), getattr(args, split)
        rows = task.rows(rng, count, cell, seen)
        if args.mixed:
            rows += mixed_rows(rng, count // 8, cell, seen)
        rng.shuffle(rows)
        write_rows(rows, folder, split)
        if args.task == "questions":
            judgements = judgement_rows(random.Random(f"{args.seed} judge {split}"), rows)
            write_lines(folder / f"judge_{split}.jsonl", judgements)
        print(f"toy: {split}.jsonl: {len(rows)} rows", flush=True)

    tokenizer, processor = make_tokenizer(args.task), make_image_processor(args.model)
    model = make_model(args.model, tokenizer, args.seed, rope=task.rope)
    size = model.num_parameters() / 1e6
    print(
        f"toy: model: {args.model}, {size:.2f} million weights, {len(tokenizer)} tokens", flush=True
    )
    if args.warm_start_steps:
        print(
            "toy: warm start, supervised: descriptions of other pictures, and blind answers",
            flush=True,
        )
        start, rng = time.perf_counter(), random.Random(f"{args.seed} warm start")
        rows = task.rows(rng, 2048, cell, seen)
        warm_start(
            model, tokenizer, rows, board_pixels(processor, rows), rng, args.warm_start_steps, task
        )
        print(f"toy: warm start took {time.perf_counter() - start:.0f} s", flush=True)
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder / "model")


def main(argv: list[str] | None = None) -> None:
    """Run the command line; `argv` defaults to that of the process. A bad flag exits with code 2."""
    args = parse_args(argv)
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # more are slower on matrices of this size, and round differently
    out = args.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    # Written beside it and renamed, so that <out> is complete as soon as it exists.
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as scratch:
        folder = Path(scratch) / "toy"
        write_toy(args, folder)
        for name in FLAGS[args.task]:
            text = json.dumps(toy_flags(out, args.task, name), indent=2)
            (folder / name).write_text(f"{text}\n", encoding="utf-8")
        folder.rename(out)
    tool.say(f"toy: wrote {out}")


if __name__ == "__main__":
    main()
