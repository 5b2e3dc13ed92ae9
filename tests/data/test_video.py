"""Videos in the Qwen-VL families, in rows mixed with pictures and text, against Hugging Face:
prompt ids by the family's own processor (which needs torchvision only for its pixels), patches by
its video processor's `patchify`, log-probs by one forward per sample, greedy rollouts and
judgements by `generate`; what a clip's time is; and that every bad clip is refused."""

import json
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers.models.qwen3_vl.video_processing_qwen3_vl as qwen3_video
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2_5_VLProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.utils.import_utils import is_av_available
from transformers.video_utils import VideoMetadata

import extra_packages
import train_ppo_vl as ppo
from common.data import images as vlm_images
from common.data.families import is_clip
from common.data.loader import load_pixels
from common.data.processor import Processor
from common.data.rows import load_prompts, make_prompt
from common.flags import DataArgs
from common.model import vlm
from common.rewards import judgements, remote, sources
from conftest import (
    ROUNDING,
    build_rewards,
    hugging_face,
    read_rows,
    seeded,
    start,
    table,
    take,
    token_logprobs,
    user_error,
    words,
    write_checkpoint,
    write_json,
    write_judge,
    write_rows,
)
from families import (
    REWARD,
    as_parts,
    check_logprobs,
    check_rollouts,
    make_config,
    make_image_processor,
    make_tokenizer,
    with_response,
)
from helpers import assert_same_run, launch, write_processor

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
# --video_frames of all tests
FRAMES = 5
# clips: how many frames, of which size
CLIPS = {"long": (7, 64, 40), "loop": (4, 60, 90), "frame": (3, 80, 56)}


def paint(rng, width: int, height: int) -> Image.Image:
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


def frames_of(name: str) -> list[str]:
    return [f"{name}-{k}.png" for k in range(CLIPS[name][0])]


LONG, LOOP, FRAME = map(frames_of, CLIPS)
PARTS = [
    {"type": "text", "text": "before "},
    {"type": "video", "video": LOOP},
    {"type": "image", "image": "a.png"},
    {"type": "text", "text": " and "},
    {"type": "video"},
    {"type": "video", "video": FRAME[1:]},
]
ROWS = [
    {"prompt": "how many circles are there?"},
    {"prompt": "what moves?", "videos": [LONG]},
    {
        "prompt": "was <image> in <video>, or in <video>?",
        "images": ["a.png"],
        "videos": [FRAME, LOOP],
    },
    {"prompt": [{"role": "user", "content": PARTS}], "videos": [LONG]},
    {"prompt": "what is this?", "images": ["a.png"]},
    {"prompt": "and?", "images": "a.png", "videos": [FRAME]},
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A JSONL file of rows with no, one and several pictures and clips in any order; clips of odd
    length, and long ones."""
    folder, rng = tmp_path_factory.mktemp("clips"), np.random.default_rng(0)
    for name, (_, width, height) in CLIPS.items():
        for file in frames_of(name):
            paint(rng, width, height).save(folder / file)
    paint(rng, 56, 84).save(folder / "a.png")
    return write_rows(folder / "rows.jsonl", [{"answer": "1"} | row for row in ROWS])


def write_family(kind: str, folder):
    """A checkpoint whose chat template knows videos."""
    if kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_5"):
        return write_checkpoint(folder, kind)
    tokenizer = make_tokenizer(kind)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- if part.type == 'image' -%}",
        "{%- if part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>"
        "{%- elif part.type == 'image' -%}",
    )
    model, generator = (
        AutoModelForImageTextToText.from_config(make_config(kind, tokenizer)),
        seeded(1),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim >= 2 else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    for part in (model, tokenizer, make_image_processor(kind)):
        part.save_pretrained(folder)
    # Videos have bounds of their own: in Qwen3-VL those of all frames together.
    bounds = {"shortest_edge": 28**2, "longest_edge": (6 if kind == "qwen3_vl_moe" else 1) * 84**2}
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps({"size": bounds, "image_mean": [0.4, 0.5, 0.6]})
    )
    return folder


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory, rows):
    """Folder, our run of it, and the oracle with Hugging Face's own attention."""
    folder = write_family(request.param, tmp_path_factory.mktemp(request.param))
    oracle = hugging_face(folder)
    return SimpleNamespace(
        kind=request.param,
        folder=folder,
        oracle=oracle,
        env=start(folder, rows, "--video_frames", FRAMES, "--video_fps 3"),
    )


def clip_by_hand(family, item) -> tuple[torch.Tensor, list[int], VideoMetadata]:
    """Patches, grid and metadata of a clip, by the rules of the family's video processor."""
    frames, rate = [Image.open(path).convert("RGB") for path in item], 3.0
    total = len(frames)
    indices = np.linspace(0, total - 1, min(FRAMES, total)).round().astype(int)
    frames = [frames[k] for k in indices]
    settings, config = (
        family.env.processor.family.frame_processor,
        family.oracle.config.vision_config,
    )
    if family.kind.endswith("moe"):
        assert settings.size["longest_edge"] == 6 * 84**2
    side, (width, height) = config.patch_size * 2, frames[0].size
    low, high = settings.size["shortest_edge"], settings.size["longest_edge"]
    if family.kind.startswith("qwen3"):
        size = qwen3_video.smart_resize(len(frames), height, width, 2, side, low, high)
    else:
        size = smart_resize(height, width, side, low, high)
    pixels = torch.stack(
        [
            torch.from_numpy(np.array(frame.resize(size[::-1], Image.Resampling.BICUBIC)))
            for frame in frames
        ]
    )
    # (F, h, w, 3)
    pixels = (pixels / 255 - torch.tensor(settings.image_mean)) / torch.tensor(settings.image_std)
    patchify, pixels = qwen3_video.Qwen3VLVideoProcessor.patchify, pixels.permute(0, 3, 1, 2)
    patches, *grid = patchify(None, pixels[None], config.patch_size, 2, 2)
    return (
        patches[0],
        grid,
        VideoMetadata(total_num_frames=total, fps=rate, frames_indices=indices.tolist()),
    )


def hf_inputs(family, prompt) -> dict[str, torch.Tensor]:
    """What the family's processor makes of a prompt, but for its pixels, which it needs torchvision for."""
    tokenizer, images = (
        AutoTokenizer.from_pretrained(family.folder),
        family.env.processor.family.image_processor,
    )
    maker = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}.get(
        family.kind, Qwen3VLProcessor
    )
    processor = object.__new__(maker)
    for name, token in dict(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    ).items():
        setattr(processor, name, token)
    processor.__dict__.update(
        all_special_multimodal_tokens=["<|image_pad|>", "<|video_pad|>"],
        image_processor=images,
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
    )
    inputs, words, clip_words = {}, [], []
    if pictures := [
        Image.open(path).convert("RGB") for path in prompt.images if isinstance(path, str)
    ]:
        inputs |= images(images=pictures, return_tensors="pt")
        words = [processor.replace_image_token(inputs, i) for i in range(len(pictures))]
    if clips := [clip_by_hand(family, path) for path in prompt.images if not isinstance(path, str)]:
        patches, grids, metadata = zip(*clips)
        inputs |= {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        clip_words = [
            processor.replace_video_token(inputs | {"video_metadata": metadata}, i)
            for i in range(len(clips))
        ]
        if family.kind == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor(
                [2 / entry.sampled_fps for entry in metadata]
            )
    text = tokenizer.apply_chat_template(
        as_parts(prompt.messages), add_generation_prompt=True, tokenize=False
    )
    text, _ = processor.get_text_with_replacements([text], words, clip_words)
    inputs |= dict(tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    ids, config = inputs["input_ids"], family.oracle.config
    return inputs | {
        "mm_token_type_ids": (ids == config.image_token_id).int()
        + 2 * (ids == config.video_token_id).int()
    }


def test_ids_and_patches_equal_those_of_the_familys_processors(family):
    clips = []
    for prompt in family.env.prompts:
        inputs = hf_inputs(family, prompt)
        assert torch.equal(prompt.input_ids, inputs["input_ids"][0])
        if not prompt.images:
            continue
        patches, grids = load_pixels(prompt, family.env.processor), prompt.patch_grids
        pixels = patches.split(grids.prod(dim=1).tolist())
        of_clip = torch.tensor([is_clip(grid) for grid in prompt.grids])
        for kind, which, suffix in (("image", ~of_clip, ""), ("video", of_clip, "_videos")):
            theirs = inputs.get(f"pixel_values{suffix}", patches[:0])
            ours = [patches[:0], *(part for part, chosen in zip(pixels, which) if chosen)]
            assert theirs.shape == torch.cat(ours).shape
            assert (theirs - torch.cat(ours)).abs().le(ROUNDING).all()
            assert torch.equal(grids[which], inputs.get(f"{kind}_grid_thw", grids[:0]))
        seconds = [grid[3] for grid in prompt.grids if is_clip(grid)]
        if "second_per_grid_ts" in inputs:
            assert seconds == pytest.approx(inputs["second_per_grid_ts"].tolist())
        clips += [tuple(grid) for grid in grids[of_clip].tolist()]
    assert {t for t, *_ in clips} == {1, 2, 3}
    assert len(clips) == 7
    text = family.env.processor.tokenizer.decode(family.env.prompts[1].input_ids)
    assert ("<0.3 seconds>" in text and "<1.2 seconds>" in text) == family.kind.startswith("qwen3")


def test_packed_logprobs_equal_one_forward_per_sample(family):
    check_logprobs(family, [2, 3, 1, 2, 2, 3], hf_inputs)


def test_greedy_rollouts_equal_generate(family):
    check_rollouts(family, hf_inputs)


def test_a_pair_of_clips_is_asked_about_in_both_orders(rows, tmp_path):
    """By the built-in template, without a picture; the sides change places with the verdict."""
    pair = {"prompt": "a fast one", "videos": [LONG, LOOP], "preferred": "B"}
    folder = Path(rows).parent
    path = write_rows(folder / "pairs.jsonl", [pair])
    args = DataArgs(data=path, video_frames=FRAMES)
    processor = Processor(write_family("qwen3_vl", tmp_path / "judge"), args)
    settings = judgements.JudgeSettings.to_train(processor)
    examples = judgements.load_judgements(path, processor, settings, args)
    sides = [tuple(str(folder / name) for name in clip) for clip in (LONG, LOOP)]
    sought = [(sides, "B"), (sides[::-1], "A")]
    for example, (clips, verdict) in zip(examples, sought, strict=True):
        prompt = example.prompt
        assert prompt.label == "videos"
        assert list(prompt.images) == clips
        assert prompt.reference == verdict
        _, request, a, b, _ = re.split("Request: |Video [AB]: |Which ", prompt.text)
        assert request == "a fast one\n"
        assert a.count("<|video_pad|>") == b.count("<|video_pad|>") > 0
        assert example.text == f"<answer>{verdict}</answer>"
    alone = pair | {"videos": [LONG]}
    with user_error("a row of the kind videos compares two videos, not 1"):
        judgements.read_judgement(alone, settings, "both")


def test_a_judge_with_a_tower_of_its_own_sees_the_clips(rows, tmp_path):
    """Its reward is the chance that Hugging Face's model gives to yes, of its own grids and times;
    said <video> stays text."""
    actor, judge = (
        write_family("qwen2_5_vl", tmp_path / "actor"),
        write_family("qwen3_vl", tmp_path / "judge"),
    )
    write_judge(judge, ("correct", "yes"))
    env = start(
        actor,
        rows,
        "--advantage grpo --reward",
        f"grm:{judge}",
        "--video_frames",
        FRAMES,
        "--video_fps 3",
    )
    reward = sources.load_rewards(env.args)
    build_rewards(env.args, reward, env.rows, env.actor, env.ranks)
    responses = ["3", "a <video>", "3", "square"]
    encode = env.processor.tokenizer.encode
    batch = take(env, 4).with_responses(enumerate(torch.tensor(encode(text)) for text in responses))
    batch.truncated = torch.zeros(4, dtype=torch.bool)
    vlm.compute_features(env.actor.model, batch)
    reward.score(batch, env.processor, 0)
    oracle = hugging_face(judge)
    processor = reward.sources[0].score.processor
    family = SimpleNamespace(
        kind="qwen3_vl", folder=judge, oracle=oracle, env=SimpleNamespace(processor=processor)
    )
    questions = [
        "how many circles are there?",
        "what moves?",
        "was <image> in <video>, or in <video>?",
        "before <video><image> and <video><video>",
    ]
    for prompt, question, text, score in zip(
        env.prompts, questions, responses, batch.rewards.tolist()
    ):
        asked = judgements.fill_in(
            judgements.KINDS["correct"].template,
            {"prompt": question, "response": text.replace("<video>", " ")},
        )
        instruction = reward.sources[0].score.settings.instruction(question)
        asked = hf_inputs(
            family,
            make_prompt(processor, asked, prompt.images, system_prompt=instruction),
        )
        chances = []
        for word in ("yes", "no"):
            target = judgements.encode_target(
                processor, judgements.answer_frame(processor), f"<answer>{word}</answer>"
            )
            with torch.no_grad():
                logits = oracle(**with_response(asked, target)).logits[0, -len(target) - 1 : -1]
            chances.append(float(token_logprobs(logits, target).sum()))
        assert score == pytest.approx(float(torch.tensor(chances).softmax(dim=0)[0]), abs=ROUNDING)


@pytest.mark.slow
def test_a_run_on_mixed_rows(rows, tmp_path):
    """A step with a critic and evaluation on one rank and on two; what rewards and records hold;
    frames in sample pictures."""
    write_family("qwen3_vl", tmp_path / "model")
    (tmp_path / "reward.py").write_text(
        REWARD
        + '''

def seen(prompts, responses, references, labels, images):
    """How many files each sample's images and clips have."""
    assert {type(item) for items in images for item in items} <= {str, tuple}
    return [float(sum(1 if isinstance(item, str) else len(item) for item in items)) for items in images]
'''
    )
    for ranks in ("one", "two"):
        (tmp_path / ranks).mkdir()
    flags = words(
        "--model",
        tmp_path / "model",
        "--data",
        rows,
        "--eval_data",
        rows,
        "--max_new_tokens 6 --prompts_per_step 6 --samples_per_prompt 2 --steps 1 --actor_lr 1e-3 --save_every 0",
        "--reward_recipe",
        json.dumps(
            {"*": [[f"{tmp_path}/reward.py:letters", 1.0], [f"{tmp_path}/reward.py:seen", 0.0]]}
        ),
        "--video_frames 5 --out",
    )
    launch(2, [*flags, str(tmp_path / "two" / "run")])
    ppo.main([*flags, str(tmp_path / "one" / "run")])
    assert_same_run(tmp_path / "one" / "run", tmp_path / "two" / "run")
    sheet = tmp_path / "one" / "run" / "samples"
    records = read_rows(next(sheet.glob("step-*.jsonl")))
    clips = {record["index"]: record["images"] for record in records}
    assert len(clips[2]) == 3
    assert isinstance(clips[2][0], str)
    assert [len(item) for item in clips[2][1:]] == [3, 4]
    assert [len(vlm_images.read_frames(item, 6)) for item in clips[2]] == [1, 3, 4]
    assert remote.encode_image(tuple(clips[2][1])) == [
        remote.encode_image(path) for path in clips[2][1]
    ]


@pytest.fixture
def load(tmp_path):
    """load(rows, family, **settings): the rows' prompts, or the error, of files beside those that
    the test writes."""

    def load(row, family="qwen2_5_vl", **settings):
        if not (tmp_path / family).exists():
            write_processor(tmp_path / family, family, TEMPLATE)
        args = DataArgs(max_prompt_tokens=100_000, **settings)
        processor = Processor(tmp_path / family, args)
        write_json(tmp_path / "rows.jsonl", row)
        prompts = load_prompts(str(tmp_path / "rows.jsonl"), processor, args)
        return processor, prompts[0]

    return load


TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}"
    "<|vision_start|>"
    "<|{{ p.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"
)


def save_clip(folder, count: int, size: tuple[int, int] = (56, 56)) -> list[str]:
    """The names of the frames of a clip."""
    rng, names = np.random.default_rng(1), [f"{k}.png" for k in range(count)]
    for name in names:
        paint(rng, *size).save(folder / name)
    return names


def test_frame_lists_take_the_flags_rate(load, tmp_path):
    names = [f"{k}.png" for k in range(4)]
    for k, name in enumerate(names):
        Image.new("RGB", (56, 56), (60 * k, 0, 0)).save(tmp_path / name)
    for rate, expected in (
        (2.0, "<0.2 seconds>{}<1.2 seconds>{}"),
        (8.0, "<0.1 seconds>{}<0.3 seconds>{}"),
    ):
        processor, prompt = load({"prompt": "x", "videos": [names]}, "qwen3_vl", video_fps=rate)
        expected = (
            "<|vision_start|>"
            + expected.format(*["<|vision_start|><|video_pad|><|vision_end|>"] * 2)
            + "<|vision_end|>x"
        )
        text = processor.tokenizer.decode(prompt.input_ids)
        assert (
            text.replace(
                "<|video_pad|>" * (prompt.grids[0][1] * prompt.grids[0][2] // 4), "<|video_pad|>"
            )
            == expected
        )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_bounds_of_frames(load, tmp_path, family):
    """--max_pixels bounds a frame; the checkpoint's bounds those of a frame, or in Qwen3-VL of the clip."""
    row, areas = {"prompt": "x", "videos": [save_clip(tmp_path, 6, (320, 200))]}, []
    for cap in (0, 20_000, 5000):
        processor, prompt = load(row, family, max_pixels=cap)
        area = prompt.grids[0][1] * prompt.grids[0][2] * processor.family.patch_size**2
        assert area <= (cap or 200704)
        areas.append(area)
        assert len(load_pixels(prompt, processor)) == math.prod(prompt.grids[0][:3])
        assert prompt.patch_grids.tolist() == [list(prompt.grids[0][:3])]
    assert areas == sorted(set(areas))[::-1]
    assert (areas[0] > 50_000) == (family == "qwen2_5_vl")


BAD = table("""
no such file | {"videos": ["none.mp4"]} | no such video: .*none.mp4
no such frame | {"videos": [["a.png", "none.png"]]} | no such image: .*none.png
not a video | {"videos": ["rows.jsonl"]}
    | rows.jsonl: (to read videos, install one of torchcodec, av, cv2|not a video that)
zero frames | {"videos": [[]]} | a video a path or a list of paths, not \\[\\]
a list too few | {"videos": ["a.png", "b.png"]}
    | a.png: (to read videos, install .*list of images|not a video|.*this has 1 .*a list of their own)
frames differ | {"videos": [["a.png", "a.png", "b.png"]]}
    | clip differ in size: {.56, 28.: .*a.png', .28, 56.: .*b.png
video without a place | {"prompt": "<image> x", "images": "a.png", "videos": [["a.png", "a.png"]]}
    | hold 1 videos for 0 places
image in a video's place | {"prompt": "<video> x", "images": "a.png"} | hold 1 images for 0 places
part with an option | {"prompt": [{"role": "user", "content": [{"type": "video", "video": ["a.png", "a.png"],
    "fps": 1}]}]}
    | a part of a message must be
""")


@pytest.mark.parametrize("case, row, message", BAD)
def test_bad_clip(load, tmp_path, case, row, message):
    Image.new("RGB", (56, 28)).save(tmp_path / "a.png")
    Image.new("RGB", (28, 56)).save(tmp_path / "b.png")
    with user_error(f"rows.jsonl:1: .*{message}"):
        load({"prompt": "x"} | json.loads(row))


def test_a_clip_that_changed_since_load(load, tmp_path):
    names = save_clip(tmp_path, 3)
    processor, prompt = load({"prompt": "x", "videos": [names]})
    save_clip(tmp_path, 3, (84, 56))
    with user_error("0.png.*: patch grids .* changed since the start"):
        load_pixels(prompt, processor)


@pytest.mark.parametrize("kind", ["llava", "qwen2"])
def test_other_families_refuse_videos_by_name(tmp_path, kind):
    tokenizer = make_tokenizer(kind)
    tokenizer.save_pretrained(tmp_path)
    make_config(kind, tokenizer).save_pretrained(tmp_path)
    if kind == "llava":
        make_image_processor(kind).save_pretrained(tmp_path)
    clip = tuple(save_clip(tmp_path, 3))
    with user_error(f"{kind} takes no videos"):
        make_prompt(Processor(tmp_path), "what?", [clip], folder=str(tmp_path))


@pytest.fixture(scope="module")
def pyav(tmp_path_factory):
    with extra_packages.installed("av", "av", tmp_path_factory.mktemp("av")):
        is_av_available.cache_clear()  # transformers may have looked before
        import av

        yield av
    is_av_available.cache_clear()


def write_film(av, path, codec: str, frames: list[np.ndarray], rate: int) -> None:
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt, stream.bit_rate = (
            *frames[0].shape[:2],
            "yuv420p",
            4_000_000,
        )
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


@pytest.mark.slow
@pytest.mark.parametrize("package", vlm_images.VIDEO_DECODERS)
@pytest.mark.parametrize(
    "name, codec", [("a.mp4", "mpeg4"), ("a.webm", "libvpx"), ("a.mkv", "libx264")]
)
@pytest.mark.slow
def test_films(pyav, load, tmp_path, monkeypatch, package, name, codec):
    """The headers of WebM and MKV have no number of frames."""
    if not find_spec(package):
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(vlm_images, "VIDEO_DECODERS", {package: vlm_images.VIDEO_DECODERS[package]})
    frames = [np.full((64, 96, 3), (20 * k, 255 - 20 * k, 128), dtype=np.uint8) for k in range(12)]
    write_film(pyav, tmp_path / name, codec, frames, 4)
    processor, prompt = load({"prompt": "x", "videos": [name]}, video_frames=4)
    assert prompt.grids[0][:1] == (2,)
    assert prompt.grids[0][3:] == pytest.approx((2 / (4 / 3), 4 / 8, 18 / 8))
    for frame, k in zip(vlm_images.read_frames(prompt.images[0], 4), (0, 4, 7, 11)):
        assert frame.size == (96, 64)
        assert np.abs(np.asarray(frame).mean((0, 1)) - frames[k][0, 0]).max() < 6
    load_pixels(prompt, processor)
    (tmp_path / name).write_bytes(b"\0" * 999)
    with user_error(f"{name}: not a video that {package} can decode"):
        load({"prompt": "x", "videos": [name]})


@pytest.mark.parametrize("total, rate", [(4, None), (0, 25.0)])
def test_a_film_of_unknown_rate_or_length_is_refused(load, tmp_path, monkeypatch, total, rate):
    """As decoders give it, by name as transformers does: the containers that do not tell them are
    of many kinds."""
    header = SimpleNamespace(fps=rate, width=56, height=56, total_num_frames=total)
    monkeypatch.setattr(vlm_images, "VIDEO_DECODERS", {"json": "pyav"})
    monkeypatch.setattr(
        vlm_images,
        "load_video",
        lambda path, backend, sample_indices_fn: sample_indices_fn(metadata=header),
    )
    monkeypatch.setattr(vlm_images, "_count_frames", lambda path: 0)
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    with user_error(f"rows.jsonl:1: .*a.mp4: not a video .*{total} frames, {rate} in a second"):
        load({"prompt": "x", "videos": ["a.mp4"]})


def test_films_without_a_decoder_are_refused_with_the_packages_that_could(
    load, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(sys.modules, "cv2", None)
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    with user_error("a.mp4: to read videos, install one of torchcodec, av, cv2"):
        load({"prompt": "x", "videos": ["a.mp4"]})
