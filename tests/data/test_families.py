"""Every family against Hugging Face, on a tiny random checkpoint in the family's own files: prompt
ids = those of the family's processor, packed shared-prefix log-probs = one forward per sample,
greedy rollouts = `generate`; of each layout, gradients, other images, and one PPO step whose export
`from_pretrained` loads."""

import copy
import functools
import itertools
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

import train_grm_vl as grm
import train_ppo_vl as ppo
from common import distributed
from common.buffers import Batch
from common.data.families import BOTH_WAYS, FAMILIES, IN_WINDOWS, family_of
from common.data.loader import PromptLoader, load_pixels
from common.data.processor import Processor, answer_frame
from common.data.rows import load_prompts, measure
from common.envs.replies import read_parts
from common.flags import DataArgs
from common.looks import further_losses, image_changes
from common.looks.teacher import with_prompts
from common.model import attention as vlm_attention
from common.model import build, packs, vlm
from common.model import weights as vlm_weights
from common.rewards import judgements
from conftest import (
    ROUNDING,
    computing,
    marked,
    our_name,
    read_json,
    read_rows,
    responses_of,
    rounding,
    same_tensors,
    save_weights,
    seeded,
    start,
    token_logprobs,
    user_error,
    with_flags,
    words,
    write_json,
    write_rows,
)
from families import (
    DAILY,
    EXPERTS,
    GEMMA4,
    GLM,
    KINDS,
    PLAIN,
    REWARD,
    TEXT,
    TEXT_ONLY,
    THROUGH_CHUNKS,
    TOKENS,
    as_parts,
    check_logprobs,
    check_rollouts,
    logprobs,
    make_config,
    make_image_processor,
    make_tokenizer,
    responses_to,
    save_processor,
    with_response,
    write_family,
)
from helpers import COMPUTE, assert_same_run, changed, launch, on_a_gpu, tensors, trainable
from launch import toy


def of_kinds(daily, more=()):
    """A test of some kinds only; in `all` of ``more``."""
    kinds = [*daily, *more]
    return pytest.mark.parametrize("family", marked(kinds, daily), indirect=True)


@pytest.fixture(scope="module")
def families_here() -> dict[str, SimpleNamespace]:
    """Those that have been made: tests of some kinds take turns with tests of all."""
    return {}


@pytest.fixture(scope="module", params=marked(KINDS, DAILY))
def family(request, tmp_path_factory, picture_rows, families_here):
    """Folder, our run of it, and the oracle with Hugging Face's own attention."""
    kind = request.param
    if kind not in families_here:
        families_here[kind] = make_family(kind, tmp_path_factory.mktemp(kind), picture_rows)
    return families_here[kind]


def skip_without_torchvision(kind: str) -> None:
    """Where the image processor of this transformers wants it."""
    try:
        make_image_processor(kind)
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} wants torchvision for {kind}")


def make_family(kind: str, folder: Path, picture_rows: str) -> SimpleNamespace:
    if kind in TOKENS:
        skip_without_torchvision(kind)
    model = write_family(kind, folder, picture_rows)
    oracle = model.from_pretrained(folder, attn_implementation="eager").eval()
    data = folder / "rows.jsonl"
    return SimpleNamespace(
        kind=kind, folder=folder, data=data, env=start(folder, data), oracle=oracle
    )


def rows_of_pixtral(processor, batch: dict, i: int) -> str:
    """`PixtralProcessor.replace_image_token`, which cannot be imported without torchvision."""
    height, width = (int(size) // 14 for size in batch["image_sizes"][i])
    row = processor.image_token * width + processor.image_break_token
    return (row * height).removesuffix(processor.image_break_token) + processor.image_end_token


def tokens_of_gemma4(processor, batch: dict, i: int) -> str:
    """`Gemma4Processor.replace_image_token`, which transformers 5.17 cannot import without torchvision."""
    tokens = processor.image_token * int(batch["num_soft_tokens_per_image"][i])
    return f"{processor.boi_token}{tokens}{processor.eoi_token}"


def onevision_inputs(family, messages: list[dict], pictures: list[Image.Image]) -> dict:
    """By a processor without the part for clips, which wants torchvision."""

    class WithoutClips(transformers.LlavaOnevisionProcessor):
        def check_argument_for_proper_class(self, *_):
            pass

    tokenizer = AutoTokenizer.from_pretrained(family.folder)
    settings = read_json(family.folder / "processor_config.json")
    settings.pop("processor_class")
    images = make_image_processor(family.kind)
    processor = WithoutClips(images, tokenizer, None, **settings)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return dict(
        processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt")
    )


def hf_inputs(family, prompt) -> dict:
    """What the family's own processor makes of a prompt's messages and pictures."""
    messages = as_parts(copy.deepcopy(prompt.messages))
    pictures = [Image.open(path).convert("RGB") for path in prompt.images]
    if family.kind in TEXT_ONLY:
        return AutoTokenizer.from_pretrained(family.folder).apply_chat_template(
            prompt.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    if family.kind in PLAIN:
        for part, picture in zip(
            (p for m in messages for p in m["content"] if p["type"] == "image"), pictures
        ):
            part["image"] = picture
        return dict(
            AutoProcessor.from_pretrained(family.folder).apply_chat_template(
                messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        )
    if family.kind == "llava_onevision":
        return onevision_inputs(family, messages, pictures)
    # The others want torchvision or more for their videos: their own words for a picture, put in by hand.
    tokenizer = AutoTokenizer.from_pretrained(family.folder)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    token = TOKENS[family.kind][1][
        "context_image_token" if family.kind.startswith("internvl") else "image_token"
    ]
    batch, options = {}, {}
    stand_in = SimpleNamespace(
        image_token=token,
        image_processor=SimpleNamespace(merge_size=2),
        start_image_token="<img>",
        end_image_token="</img>",
        image_seq_length=4,
        image_seq_len=4,
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        patch_size=7,
        spatial_merge_size=2,
        effective_patch_size=14,
        boi_token="<|image>",
        eoi_token="<image|>",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    if family.kind.startswith("internvl"):
        options["crop_to_patches"] = True
    elif family.kind == "smolvlm":
        options["return_row_col_info"] = True
    elif family.kind in ("mistral3", "ministral3"):
        options["patch_size"] = 14  # as their processor says
    if pictures:
        batch = dict(
            make_image_processor(family.kind)(images=pictures, return_tensors="pt", **options)
        )
    maker = {
        "internvl": "InternVL",
        "internvl_moe": "InternVL",
        "smolvlm": "SmolVLM",
        "lighton_ocr": "LightOnOcr",
        "exaone4_5": "Exaone4_5_",
        **dict.fromkeys(GEMMA4, "Gemma4"),
    }.get(family.kind, "Glm4v" if family.kind in GLM else "Qwen2VL")
    if family.kind in ("mistral3", "ministral3"):
        words = rows_of_pixtral
    else:
        try:
            words = getattr(transformers, f"{maker}Processor").replace_image_token
        except ImportError:
            words = tokens_of_gemma4
    first, *rest = text.split(token)
    text = first + "".join(words(stand_in, batch, i) + part for i, part in enumerate(rest))
    options = {"return_token_type_ids": False, "add_special_tokens": not text.startswith("<s>")}
    inputs = dict(tokenizer(text, return_tensors="pt", **options)) | batch
    if family.kind.startswith(("qwen", "glm", "gemma4")):
        inputs["mm_token_type_ids"] = (
            inputs["input_ids"] == family.oracle.config.image_token_id
        ).int()
    unused = ("rows", "cols", "num_patches", "num_soft_tokens_per_image")
    return {name: value for name, value in inputs.items() if name not in unused}


@of_kinds(DAILY, ("gemma4_31b", "llava_onevision"))
def test_a_look_is_a_forward_with_that_prompt_and_those_images(family, tmp_path):
    """A hint around the prompt, and noise in every image: what a teacher, another reference, a mask
    would see."""

    def noisy(image: Image.Image, place: tuple[int, ...]) -> Image.Image:
        noise = np.random.default_rng(place).integers(-90, 90, np.shape(image))
        return Image.fromarray((np.asarray(image, dtype=int) + noise).clip(0, 255).astype(np.uint8))

    def all_noisy(images: list[Image.Image], key: image_changes.NoiseKey) -> list[Image.Image]:
        return [noisy(image, (*key, k)) for k, image in enumerate(images)]

    def by_hand(family, prompt) -> dict:
        """Of files with that noise, and a message with that hint."""
        index, images = family.env.prompts.index(prompt), []
        for k, path in enumerate(prompt.images):
            images.append(str(tmp_path / f"{index}-{k}.png"))
            noisy(Image.open(path).convert("RGB"), (index, 0, k)).save(images[-1])
        text = {"type": "text", "text": f" It is {prompt.reference}."}
        content = [*prompt.messages[-1]["content"], text]
        # behind leading images
        question = next(k for k, part in enumerate(content) if part["type"] == "text")
        content.insert(question, {"type": "text", "text": "Look: "})
        messages = [*prompt.messages[:-1], prompt.messages[-1] | {"content": content}]
        if family.kind in TEXT_ONLY:
            messages[-1]["content"] = "".join(part["text"] for part in content)
        return hf_inputs(family, replace(prompt, messages=messages, images=tuple(images)))

    def look(family, batch: Batch) -> Batch:
        model, processor = family.env.actor.model, family.env.processor
        batch = with_prompts(batch, processor, "Look: {prompt} It is {answer}.")
        return (
            image_changes.reread_images(batch, model, processor, all_noisy)
            if family.kind in TOKENS
            else batch
        )

    exact = in_float64(family)
    with Wide():
        check_logprobs(exact, [2, 1, 3, 2], by_hand, look, bound=1e-10)


class Wide(TorchFunctionMode):
    """Inside, models of float64 cast nothing to float32, as they do for norms and softmaxes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        options = {"dtype": torch.float64} if function is torch.zeros else {}
        options |= {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        args = [torch.float64 if value is torch.float32 else value for value in args]
        return (torch.Tensor.double if function is torch.Tensor.float else function)(
            *args, **options
        )


def in_float64(family, *flags: str) -> SimpleNamespace:
    """Policy and oracle anew, with weights in float64."""
    env = start(family.folder, family.data, *flags)
    oracle = type(family.oracle).from_pretrained(family.folder, attn_implementation="eager").eval()
    for model in (env.actor.model, oracle):
        # the products of all experts in one are float32's
        model.config._experts_implementation = "eager"
    env.actor.double()
    env.actor.model.setup = replace(env.actor.model.setup, dtype=torch.float64)
    return SimpleNamespace(**vars(family) | {"env": env, "oracle": oracle.double()})


def test_prompt_ids_equal_those_of_the_familys_processor(family):
    for prompt in family.env.prompts:
        assert torch.equal(prompt.input_ids, hf_inputs(family, prompt)["input_ids"][0])


@pytest.mark.parametrize("family", marked(TOKENS, DAILY), indirect=True)
def test_sizes_alone_tell_how_many_features_a_picture_gets(family):
    ours, rng = family.env.processor.family, random.Random(0)
    sizes = [(56, 28), (300, 31), (31, 300), (57, 56), (1, 30), (150, 20)] + [
        (rng.randint(20, 400), rng.randint(20, 400)) for _ in range(20)
    ]
    for width, height in sizes:
        picture = Image.new("RGB", (width, height), (200, 10, 90))
        patches, grid = ours.patches(picture)
        assert grid == ours.grid(width, height), (width, height)
        features = vlm.image_features(family.env.actor.model, patches, torch.tensor([grid]))
        assert features.shape[1] == sum(ours.expand(grid)[1]), (width, height)


def test_packed_logprobs_equal_one_forward_per_sample(family):
    check_logprobs(family, [3, 2, 2, 3], hf_inputs)


# of each tower and each way to its features one
@of_kinds(
    (),
    ("qwen2_vl", "qwen3_5", "gemma4_e2b", "gemma4_31b", "glm4v_moe", "exaone4_5", "mistral3")
    + ("llava", "internvl", "idefics3", "aya_vision"),
)
def test_gradients_equal_those_of_one_forward_per_sample(family):
    """Of every parameter in float64, the tower's too."""
    exact = in_float64(family, "--train_vision")
    env, counts = exact.env, [3, 2, 2, 3]
    with Wide():
        batch = responses_to(env, counts, exact.oracle.config.get_text_config().vocab_size)
        banned = torch.tensor(env.processor.banned_ids)
        is_counted = ~torch.isin(batch.tokens, banned)
        weights = torch.randn(len(batch.tokens), generator=seeded(3)).double() * is_counted
        for pack in packs.of_batch(env.actor.model, batch):
            logp = env.actor(pack, env.sampling)[0]
            logp.backward(weights[pack.flat].to(logp))
        start_at = 0
        for group, tokens in responses_of(batch):
            inputs = with_response(hf_inputs(exact, env.prompts[group]), tokens)
            inputs.pop("attention_mask", None)
            if "pixel_values" in inputs:
                inputs["pixel_values"] = inputs["pixel_values"].double()
            logits = exact.oracle(**inputs, use_cache=False).logits[0, -len(tokens) - 1 : -1]
            logits = logits.index_fill(1, banned, -torch.inf)
            mine = slice(start_at, start_at := start_at + len(tokens))
            chosen = token_logprobs(logits, tokens).masked_fill(~is_counted[mine], 0)
            (chosen * weights[mine]).sum().backward()
    expected = {our_name(name): p.grad for name, p in exact.oracle.named_parameters()}
    compared = 0
    for name, parameter in env.actor.model.named_parameters():
        if parameter.requires_grad:
            gradient = expected[name]
            if gradient is None or parameter.grad is None:  # a layer behind the one that is read
                assert gradient is None and parameter.grad is None, name
                continue
            error = (parameter.grad.full_tensor() - gradient).norm()
            # a bias of keys has none but rounding
            assert error < 1e-10 * gradient.norm() + 1e-12, (name, float(error))
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("family", ["gemma4_e2b"], indirect=True)
def test_layers_that_are_computed_again_read_the_same_shared_keys(family):
    gradients = []
    for flag in ("off", "on"):
        env = start(family.folder, family.data, "--gradient_checkpointing", flag)
        env.actor.train()
        for pack in packs.of_batch(env.actor.model, responses_to(env, [3, 2, 2, 3], 64)):
            env.actor(pack, env.sampling)[0].nan_to_num(neginf=0.0).sum().backward()
        gradients.append([p.grad.full_tensor() for p in env.actor.parameters() if p.requires_grad])
    for stored, again in zip(*gradients, strict=True):
        assert torch.equal(stored, again)


def test_greedy_rollouts_equal_generate(family):
    check_rollouts(family, hf_inputs)


def ppo_flags(kind: str, folder: Path, out: Path, *further: str) -> list[str]:
    """One step with a critic, into out/kind."""
    (out / "reward.py").write_text(REWARD)
    more = dict(
        qwen3_vl_moe="--aux_loss_coef 0.01 --max_tokens_per_pack 524",
        qwen3_5="--gradient_checkpointing",
        gemma3="--gradient_checkpointing --advantage grpo",
        gemma4_e2b="--gradient_checkpointing",
        gemma4_26b_a4b="--aux_loss_coef 0.01 --max_tokens_per_pack 700",
    ).get(kind, "")
    return words(
        "--model",
        folder,
        "--data",
        folder / "rows.jsonl",
        "--max_prompt_tokens 512 --max_new_tokens 6 --prompts_per_step 3 --samples_per_prompt 2 --steps 1 "
        "--actor_lr 1e-3 --save_every 0",
        "--reward",
        f"{out / 'reward.py'}:letters",
        "--out",
        out / kind,
        "--",
        *more.split(),
        *further,
    )


FROZEN = ("visual", "vision", "projector", "connector", "audio", "embed_tokens_per_layer")


@of_kinds(DAILY, ("gemma3", "gemma4_26b_a4b"))
def test_one_ppo_step_exports_what_from_pretrained_loads(family, tmp_path):
    metrics = ppo.main(ppo_flags(family.kind, family.folder, tmp_path))
    if family.kind in ("qwen3_vl_moe", "gemma4_26b_a4b"):
        # coefficient x (2: even; 6: all alike)
        assert 0.01 < metrics["train/aux_loss"] < 0.06
    assert metrics["train/sampler_gap"] < ROUNDING
    assert metrics["train/actor_grad_norm"] > 0
    exported = tmp_path / family.kind / "export" / "step-1"
    shapes = [
        {
            name: tuple(weight.shape)
            for name, weight in load_file(folder / "model.safetensors").items()
        }
        for folder in (family.folder, exported)
    ]
    # names and shapes as the checkpoint came, and the config
    assert shapes[0] == shapes[1]
    assert read_json(exported / "config.json") == read_json(family.folder / "config.json")
    model, report = type(family.oracle).from_pretrained(exported, output_loading_info=True)
    assert not any(
        report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    before = dict(family.oracle.named_parameters())
    moved = {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    frozen = {name for name, _ in model.named_parameters() if any(part in name for part in FROZEN)}
    assert moved
    assert not moved & frozen
    again = start(exported, family.data)
    assert [p.input_ids.tolist() for p in again.prompts] == [
        p.input_ids.tolist() for p in family.env.prompts
    ]


@pytest.mark.slow
def test_two_ranks_take_the_same_step(tmp_path, picture_rows):
    """Uneven shares, windows and pictures, tiles, experts and their balance; with a trained tower, which
    moves in the export."""
    kinds, plan = ["qwen3_vl_moe", "qwen3_5"], []
    trained = ["internvl_moe", "gemma4_e2b"]
    for ranks in ("one", "two"):
        (tmp_path / ranks).mkdir()
    further = {kind: ("--train_vision",) if kind in trained else () for kind in kinds + trained}
    for kind, more in further.items():
        write_family(kind, tmp_path / kind, picture_rows)
        plan.append(ppo_flags(kind, tmp_path / kind, tmp_path / "two", *more))
    launch(2, *plan)
    for kind, more in further.items():
        ppo.main(ppo_flags(kind, tmp_path / kind, tmp_path / "one", *more))
        assert_same_run(tmp_path / "one" / kind, tmp_path / "two" / kind)
        export = tmp_path / "two" / kind / "export" / "step-1"
        moved = changed(tensors(tmp_path / kind), tensors(export))
        assert any(part in key for key in moved for part in FROZEN) == (kind in trained), kind


def answered(family) -> list[dict]:
    """The rows of a family with a response."""
    rows = [{name: row[name] for name in ("prompt", "images")} for row in read_rows(family.data)]
    return [row | {"response": "a circle"} for row in rows]


def test_every_answer_of_a_conversation_is_learned(family, tmp_path):
    """Answers behind questions with pictures, in one packed row: their log-probs are those of one forward of
    Hugging Face over the whole conversation. A family that shows no pictures behind an answer has two
    rows, of which the first is a forward over what it has."""
    pictured = [row for row in read_rows(family.data) if row["images"]]
    images = [row["images"][0] for row in pictured[:2]]
    texts, see = ["a circle", "two of them, blue", "no"], "<image>" if images else ""
    talk = [f"{see}what is it?", texts[0], f"and {see}?", texts[1], "sure?", texts[2]]
    roles = ["user", "assistant"] * 3
    row = {"messages": [{"role": role, "content": text} for role, text in zip(roles, talk)]}
    path = write_rows(tmp_path / "talk.jsonl", [row | {"images": images}])
    env, model = family.env, family.env.actor.model
    frame = answer_frame(env.processor)
    settings = judgements.JudgeSettings.to_train(env.processor)
    args = DataArgs(max_prompt_tokens=4000)
    examples = judgements.load_judgements(path, env.processor, settings, args, frame=frame)
    rows = len(examples)
    assert rows == (1 if env.processor.family.replies_show_images or not images else 2)
    with PromptLoader(env.processor, args) as loader:
        prompts = [example.prompt for example in examples]
        batch = loader.collect(*loader.submit(prompts, list(range(rows))))
    batch = packs.with_examples(model, batch, [[example] for example in examples])
    vlm.compute_features_unless_trained(model, batch)
    ours = logprobs(env.actor, batch, None)
    expected, rest = [], iter(texts)
    for example in examples:
        last = example.stream.last if example.stream else example
        with torch.no_grad():
            inputs = with_response(hf_inputs(family, last.prompt), last.target)
            logits = family.oracle(**inputs, use_cache=False).logits[0].float()
        ids, at = inputs["input_ids"][0].tolist(), len(example.prompt.input_ids)
        for text in itertools.islice(rest, int((example.target == example.target[-1]).sum())):
            answer = env.processor.token_ids(text + "<|im_end|>")
            at = next(k for k in range(at, len(ids)) if ids[k : k + len(answer)] == answer)
            before = logits[at - 1 : at - 1 + len(answer)]
            expected.append(token_logprobs(before, torch.tensor(answer)))
    assert len(expected) == 3
    expected = torch.cat(expected)
    bound = THROUGH_CHUNKS if "qwen3_5" in family.kind else ROUNDING
    assert (ours - expected).abs().max() < bound * expected.abs().max()


def test_unknown_families_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mllama"}')
    (tmp_path / "preprocessor_config.json").write_text("{}")
    toy.make_tokenizer().save_pretrained(tmp_path)
    with user_error("family 'mllama' is not one of " + ", ".join(FAMILIES)):
        Processor(tmp_path)
    deep = SimpleNamespace(model_type="deep", temporal_patch_size=2)
    towers = {"Described": AutoConfig.for_model("mllama").vision_config, "Qwen": deep}
    towers |= {"Mistral3": AutoConfig.for_model("pixtral"), "TextOnly": None}
    for name, tower in towers.items():
        with user_error(f"begin with the class {name} of common/data/families.py"):
            family_of(SimpleNamespace(model_type="new", vision_config=tower))


def test_onevision_treats_an_image_alone_in_another_way(tmp_path, picture_rows):
    """So that a judge has to know of the pictures in replies, and a policy gets none."""
    write_family("llava_onevision", tmp_path, picture_rows)
    env = start(tmp_path, tmp_path / "rows.jsonl")
    processor, family, prompt = env.processor, env.processor.family, env.prompts[1]
    assert prompt.grids == ((56, 56, 1),)
    assert len(load_pixels(prompt, processor)) == 5  # the whole and four tiles
    together, _ = measure(processor, prompt.images[0], 2)
    assert together == (56, 56, 2)
    assert family.expand(together)[1] == [17]  # 4 x 4 and a newline
    beside = replace(prompt, grids=(together, family.among(2).grid(30, 40)))
    assert len(load_pixels(beside, processor)) == 1
    with user_error("images in replies are not supported for llava_onevision"):
        read_parts(Image.new("RGB", (30, 40)), processor, 100)


def test_pan_and_scan_is_off_whatever_the_file_says(tmp_path, picture_rows):
    """As in Gemma's own processor, which takes it from a call alone."""
    write_family("gemma3", tmp_path, picture_rows)
    settings = read_json(tmp_path / "processor_config.json")
    settings["image_processor"]["do_pan_and_scan"] = True
    write_json(tmp_path / "processor_config.json", settings)
    Image.new("RGB", (2000, 500)).save(tmp_path / "wide.png")
    path = write_rows(tmp_path / "wide.jsonl", [{"prompt": "what?", "images": ["wide.png"]}])
    processor = Processor(tmp_path)
    (prompt,) = load_prompts(path, processor, DataArgs(max_prompt_tokens=2000))
    theirs = hf_inputs(SimpleNamespace(kind="gemma3", folder=tmp_path), prompt)
    assert theirs["input_ids"][0].tolist() == prompt.input_ids.tolist()
    assert len(theirs["pixel_values"]) == len(load_pixels(prompt, processor)) == 1


@pytest.mark.parametrize(
    "kind", ["llava_next", "llava_onevision", "internvl", "smolvlm", "aya_vision"]
)
def test_a_checkpoint_without_processor_config_has_what_its_config_says(
    kind, tmp_path, picture_rows
):
    """As several of LLaVA 1.6 and OneVision are published; also a file whose entries are null."""
    skip_without_torchvision(kind)
    write_family(kind, tmp_path, picture_rows)
    file = tmp_path / "processor_config.json"
    written = read_json(file)
    texts = []
    for settings in (written, {}, dict.fromkeys(written)):
        write_json(file, settings)
        family = Processor(tmp_path).family
        texts.append(
            [family.expand(family.grid(*size)) for size in ((64, 64), (30, 90), (200, 50))]
        )
    assert texts[0] == texts[1] == texts[2]


def test_a_processor_that_does_not_fit_its_model_is_named(tmp_path, picture_rows):
    write_family("llava_next", tmp_path, picture_rows)
    file = tmp_path / "processor_config.json"
    settings = read_json(file)
    write_json(file, settings | {"patch_size": 14})
    env = start(tmp_path, tmp_path / "rows.jsonl")
    with user_error("image features for .* image tokens; processor_config.json"):
        responses_to(env, [1, 1, 1, 1], 64)
    write_json(file, settings | {"patch_size": "large"})
    with user_error("processor_config.json cannot be used"):
        Processor(tmp_path)


def edit_config(folder: Path, part: str | None, **changes) -> None:
    """Change settings in config.json, or in a part of it."""
    config = read_json(folder / "config.json")
    (config[part] if part else config).update(changes)
    write_json(folder / "config.json", config)


def test_dynamic_rotary_frequencies_do_not_change(tmp_path, picture_rows):
    """InternVL3's are those of short sequences up to a limit, which the flags must keep; above,
    those of a row would depend on what is packed into it."""
    model = write_family("internvl", tmp_path, picture_rows)
    rope, data = (
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        tmp_path / "rows.jsonl",
    )
    edit_config(tmp_path, "text_config", rope_parameters=rope, max_position_embeddings=512)
    with user_error("dynamic is supported up to its max_position_embeddings 512; .* of 524 tokens"):
        start(tmp_path, data)
    env = start(tmp_path, data, "--max_prompt_tokens 500")
    rotary = env.actor.model.model.language_model.rotary_emb
    before = rotary.inv_freq.clone()
    # and it looks at no position
    rotary(torch.zeros(1), torch.tensor([[10**4]]))
    assert torch.equal(rotary.inv_freq, before)
    family = SimpleNamespace(
        kind="internvl",
        folder=tmp_path,
        env=env,
        oracle=model.from_pretrained(tmp_path, attn_implementation="eager").eval(),
    )
    check_logprobs(family, [2, 1, 1, 2], hf_inputs)
    # the other roles' checkpoints have their own
    shutil.copytree(tmp_path, other := tmp_path / "other")
    edit_config(other, "text_config", max_position_embeddings=511)
    with user_error("max_position_embeddings 511; .* of 512 tokens"):
        start(tmp_path, data, "--max_prompt_tokens 500 --critic_model", other)


def test_what_our_attention_is_not_is_refused():
    """Factors by length, and the attention sinks of InternVL3.5's GPT-OSS."""
    rope = dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.0] * 4,
        long_factor=[4.0] * 4,
        original_max_position_embeddings=64,
    )
    text = dict(model_type="gpt_oss", num_local_experts=2, num_experts_per_tok=1, layer_types=None)
    with user_error("llama has rope_type longrope, or dynamic in some layers"):
        build.build_model(AutoConfig.for_model("llama", **TEXT, rope_parameters=rope), COMPUTE)
    config = make_config("internvl", make_tokenizer("internvl")).to_dict()
    config["text_config"] |= text
    with user_error("text model gpt_oss mixes tokens by GptOssAttention, which is not supported"):
        build.build_model(AutoConfig.for_model(**config), COMPUTE)


def test_critic_and_reference_are_read_by_their_own_config(tmp_path, picture_rows):
    """Mistral 0.1 and 0.2 have the same shapes, but not the same frequencies and windows."""
    write_family("mistral", tmp_path / "actor", picture_rows)
    data, other = (
        tmp_path / "actor" / "rows.jsonl",
        Path(shutil.copytree(tmp_path / "actor", tmp_path / "other")),
    )
    edit_config(
        other,
        None,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    flags = "--kl_coef 0.1", "--reference_model", str(other), "--critic_model", str(other)
    env, alone = start(tmp_path / "actor", data, *flags), start(other, data)
    batch = responses_to(env, [3, 2, 2, 3], 64)
    for critic in (env.critic, alone.critic):
        torch.nn.init.ones_(critic.value_head.weight)
    assert torch.equal(*(ppo.values_of(critic, batch) for critic in (env.critic, alone.critic)))
    of_reference, expected, of_actor = (
        logprobs(policy, batch, env.sampling) for policy in (env.reference, alone.actor, env.actor)
    )
    assert torch.equal(of_reference, expected)
    assert (of_actor - expected).abs().max() > 0.01
    edit_config(other, None, vocab_size=400)
    with user_error(
        r"other: vocab_size 400, the actor's is \d+: critic and reference need the same"
    ):
        start(tmp_path / "actor", data, *flags)


@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_a_text_model_refuses_pictures(family, picture_rows):
    with user_error(f"{family.kind} takes no images"):
        start(family.folder, picture_rows)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"], indirect=True)
@pytest.mark.parametrize(
    "budget, counts", [(10**6, [3, 2, 2, 3]), (150, [3, 2, 2, 3]), (10**6, [1, 2, 1, 1])]
)
def test_balance_loss_equals_hugging_faces_over_the_batch_of_samples(family, budget, counts):
    """Value and gradients, over one pack, over several with split groups, and with samples alone
    with their prompt."""
    env = family.env
    samples = responses_to(env, counts, family.oracle.config.text_config.vocab_size)
    total, count = 0.0, 0
    with computing(env.actor, max_tokens_per_pack=budget):
        load = further_losses.count_experts(env.actor, samples)
        for pack in packs.of_batch(env.actor.model, samples):
            with vlm.router_logits(env.actor.model) as logits:
                logp, *_ = env.actor(pack, None)
            share = 0.5 * further_losses.pack_balance_loss(env.actor.model, pack, logits, load)
            # FSDP gathers a layer's weights when its output gets a gradient
            (share + 0 * logp.sum()).backward()
            total, count = total + share.item(), count + 1
    assert (count == 1) == (budget > 10**5)

    batch: dict[str, list] = {}
    for group, tokens in responses_of(samples):
        for name, value in with_response(hf_inputs(family, env.prompts[group]), tokens).items():
            batch.setdefault(name, []).append(value)
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    of_images = ("pixel_values", "image_grid_thw")
    aux = family.oracle(
        **{
            name: torch.cat(parts) if name in of_images else pad([part[0] for part in parts])
            for name, parts in batch.items()
        },
        output_router_logits=True,
        use_cache=False,
    ).aux_loss
    (0.5 * aux).backward()
    assert abs(total - 0.5 * aux.item()) < ROUNDING * total
    expected = {
        our_name(name): p.grad for name, p in family.oracle.model.language_model.named_parameters()
    }
    bound = THROUGH_CHUNKS if family.kind == "qwen3_5_moe" else ROUNDING
    for name, parameter in vlm.decoder(env.actor.model).named_parameters():
        if (gradient := expected[name]) is not None:
            error = (parameter.grad.full_tensor() - gradient).norm() / gradient.norm()
            assert error < bound, (name, float(error))
    family.oracle.zero_grad()
    env.actor.zero_grad()


@pytest.mark.parametrize("family", ["qwen3_vl_moe"], indirect=True)
def test_balance_over_text_has_the_weight_of_the_text(family, tmp_path):
    """--ptx_coef weighs all that --ptx_data adds to the gradient, and the balance is in it."""
    data = tmp_path / "ptx.jsonl"
    data.write_text(
        '{"prompt": "count", "response": "one two three"}\n{"prompt": "red", "response": "blue"}'
    )
    env, router_gradients = (
        start(family.folder, family.data, "--ptx_data", data, "--ptx_coef 1"),
        {},
    )
    text = env.rows.ptx
    text.batches = [text.loader.collect(*text.loader.submit(text.rows, [0, 1]))]
    for ptx, aux in ((1.0, 0.0), (1.0, 0.5), (0.5, 0.5)):
        text.coef = ptx
        ppo.add_ptx_gradient(text, env.actor, 0, with_flags(env.args, aux_loss_coef=aux))
        router_gradients[ptx, aux] = torch.cat(
            [router.weight.grad.full_tensor() for router in vlm.routers(env.actor.model)]
        )
        env.actor.zero_grad(set_to_none=True)
    whole = router_gradients[1.0, 0.5]
    assert (router_gradients[0.5, 0.5] - whole / 2).norm() < ROUNDING * whole.norm()
    assert (whole - router_gradients[1.0, 0.0]).norm() > 1e-2 * whole.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, flags",
    [
        ("llava", ""),
        *((name, "--train_vision") for name in "llava idefics3 gemma3 internvl mistral3".split()),
    ],
    indirect=["family"],
)
def test_no_tower_drops_anything(family, flags, tmp_path):
    """Whatever dropout its config has, frozen or trained: the model that samples would be another one
    than that which learns. Losses of both scripts are those without."""
    rows = [row for row in answered(family) if row["images"]]
    data = write_rows(family.folder / "answered.jsonl", rows)
    config, ids, measured = read_json(family.folder / "config.json"), [0, 1], {}
    for rate in (0.0, 0.5):
        folder = tmp_path / str(rate)
        shutil.copytree(family.folder, folder)
        dropout = dict.fromkeys(
            ("attention_dropout", "hidden_dropout_prob", "projection_dropout"), rate
        )
        changed = config | {"vision_config": config["vision_config"] | dropout}
        write_json(folder / "config.json", changed)
        line = words("--model", folder, "--data", data, "--out", tmp_path / "out", *flags.split())
        args = grm.parse_args(line)
        judge_rows, ranks = grm.load_rows(args), distributed.start(args.timeout, args.hsdp)
        judge, questions = grm.load_judge(args, judge_rows, ranks), judge_rows.train[:2]
        with PromptLoader(judge_rows.processor, args) as loader:
            batch = loader.collect(*loader.submit(questions, ids))
        batch = batch.with_responses(
            (k, example.target)
            for k, question in enumerate(questions)
            for example in question.examples
        )
        metrics = grm.update(trainable(judge, args, 1e-3), batch, grm.TrainState())
        more = f"--advantage grpo --ptx_coef 1 {flags} --ptx_data", data
        env = start(folder, family.data, *more)
        env.actor.train()
        text = env.rows.ptx
        drawn = text.loader.submit([text.rows[i] for i in ids], ids)
        text.batches = [text.loader.collect(*drawn)]
        beside = ppo.add_ptx_gradient(text, env.actor, 0, env.args)
        measured[rate] = metrics["train/loss"], float(beside["ptx_loss"].total)
    assert measured[0.5] == measured[0.0]


class MaskedIndices(TorchDispatchMode):
    """Keeps what a GPU would wait at: operators whose result has a size that only the device knows."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        masked = name.startswith(("aten.index.", "aten.index_put")) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masked or name.startswith(WAITS):
            self.waits.append(
                (name, [tuple(x.shape) for x in tree_leaves(args) if torch.is_tensor(x)])
            )
        return function(*args, **(kwargs or {}))


WAITS = ("aten.nonzero", "aten.masked_select", "aten.unique", "aten._unique", "aten.bincount")


@pytest.mark.parametrize("family", marked(TOKENS, DAILY), indirect=True)
def test_no_pack_with_images_waits_for_the_device(family):
    """Forward and backward of an update."""
    samples = without_advantage(family.env)
    actor, args = family.env.actor, family.env.args
    weights = torch.full((len(samples.tokens),), 1 / len(samples.tokens))
    part = ppo.Minibatch(range(len(samples.prompts)), weights, weights, None)
    all_packs = list(packs.of_batch(actor.model, samples))
    assert any(pack.features is not None for pack in all_packs)
    for pack in all_packs:
        with MaskedIndices() as indices:
            loss, _ = ppo.actor_loss(actor, None, pack, samples, part, args)
            loss.backward()
        assert not indices.waits
    actor.zero_grad()


def without_advantage(env) -> Batch:
    """Random samples, ready for an update, which the policy's loss does not move."""
    samples = responses_to(env, [3, 2, 2, 3], 64)
    samples.values = samples.returns = samples.advantages = torch.zeros(len(samples.tokens))
    samples.in_policy_loss = torch.ones(len(samples.tokens), dtype=torch.bool)
    samples.old_logprobs = samples.logprobs = logprobs(env.actor, samples, env.sampling)
    return samples


@pytest.mark.parametrize("family", ["qwen3_vl_moe"], indirect=True)
def test_actor_and_critic_are_balanced(family):
    """While the critic's head and the advantages are zero, nothing but the balance moves their routers."""

    def update_policy(trained, samples, step, args):
        ppo.update_actor(trained, None, samples, step, None, args)

    for coef in (0.0, 0.5):
        env = start(family.folder, family.data, "--aux_loss_coef", coef)
        samples = without_advantage(env)
        for module, update in ((env.critic, ppo.update_critic), (env.actor, update_policy)):
            before = [router.weight.full_tensor().clone() for router in vlm.routers(module.model)]
            trained = trainable(module, env.args, 1e-3)
            update(trained, samples, 1, env.args)
            for router, old in zip(vlm.routers(module.model), before, strict=True):
                assert torch.equal(router.weight.full_tensor(), old) == (coef == 0)


@pytest.mark.parametrize("family", ["qwen3_vl_moe"], indirect=True)
def test_the_reference_of_an_exact_kl_is_not_balanced(family):
    """With adapters the reference is the actor itself: its forward has router logits, too."""
    aux_losses = []
    for estimator in ("k2", "full"):
        env = start(
            family.folder,
            family.data,
            "--aux_loss_coef 0.5 --lora_rank 4 --advantage grpo --kl_coef 0.1 --kl_in loss --kl_estimator",
            estimator,
        )
        samples = without_advantage(env)
        models = ppo.Models(env.actor, None, env.reference)
        ppo.fill_logprobs_and_values(samples, models, env.args)
        trained = trainable(env.actor, env.args, 1e-3)
        samples.kl_coef = 0.1
        aux_losses.append(
            ppo.update_actor(trained, models, samples, 1, None, env.args)["train/aux_loss"]
        )
    assert aux_losses[0] == pytest.approx(aux_losses[1], rel=rounding(16))
    assert aux_losses[0] > 0.5


@pytest.mark.parametrize("family", ["qwen3_vl_moe"], indirect=True)
def test_mfu_counts_the_experts_of_a_token(family, monkeypatch):
    """Two of six: the other four multiply nothing."""
    env = family.env
    samples = responses_to(env, [3, 2, 2, 3], family.oracle.config.text_config.vocab_size)
    told = {"rollout/generated_tokens": 1, "train/actor_updates": 1}
    on_a_gpu(monkeypatch)
    mfu = ppo.performance(samples, ppo.Models(env.actor, None, None), told, env.args)[
        "perf/update_mfu"
    ]
    sizes = {name: p.numel() for name, p in vlm.decoder(env.actor.model).layers.named_parameters()}
    used = sum(size / 3 if ".experts." in name else size for name, size in sizes.items())
    assert used < 0.8 * sum(sizes.values())
    tokens = len(samples.tokens)
    operations = 6 * (
        used * (tokens + sum(samples.prompt_lengths))
        + env.actor.model.lm_head.weight.numel() * tokens
    )
    assert mfu == pytest.approx(operations / (2 * 989e12))


@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_a_dense_model_has_no_experts_to_balance(family):
    with user_error("--aux_loss_coef 0.1: .* has no experts to balance"):
        start(family.folder, family.data, "--aux_loss_coef 0.1")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4v_moe"], indirect=True)
def test_experts_that_a_bias_balances_have_no_loss(family):
    with user_error("--aux_loss_coef 0.1: .* balances them by a bias"):
        start(family.folder, family.data, "--aux_loss_coef 0.1")


def test_square_matrices_of_experts_come_back_as_they_were(tmp_path, picture_rows, monkeypatch):
    """Readers tell a transposed matrix by its shape: a square one is never transposed."""
    monkeypatch.setitem(EXPERTS, "moe_intermediate_size", TEXT["hidden_size"] // 2)
    model = AutoModelForImageTextToText.from_config(
        make_config("qwen3_vl_moe", make_tokenizer("qwen3_vl_moe"))
    )
    model.save_pretrained(tmp_path)
    save_processor("qwen3_vl_moe", tmp_path, make_tokenizer("qwen3_vl_moe"))
    env = start(tmp_path, picture_rows)
    vlm_weights.export(env.actor, env.processor.save, tmp_path / "export")
    again = type(model).from_pretrained(tmp_path / "export").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again[name]), name


def test_experts_one_by_one_of_which_one_is_missing_are_refused(tmp_path, picture_rows):
    """In transformers' words."""
    write_family("internvl_moe", tmp_path, picture_rows)
    weights = load_file(tmp_path / "model.safetensors")
    alone = [name for name in weights if re.search(r"experts\.\d+\.(gate|up|down)_proj", name)]
    save_weights(tmp_path, {name: value for name, value in weights.items() if name != alone[-1]})
    with user_error(r"cannot read its weights|mlp\.experts\..* is "):
        start(tmp_path, picture_rows)


def test_files_rewritten_by_the_names_of_modules_are_the_same_model(tmp_path, picture_rows):
    """What common/README.md advises where files need more than another spelling."""
    old, new = tmp_path / "old", tmp_path / "new"
    model = write_family("internvl_moe", old, picture_rows)
    model.from_pretrained(old, dtype="auto").save_pretrained(new, save_original_format=False)
    assert (
        load_file(old / "model.safetensors").keys() != load_file(new / "model.safetensors").keys()
    )
    for path in old.iterdir():
        if not (new / path.name).exists():
            shutil.copy(path, new)
    one, other = (start(folder, old / "rows.jsonl").actor for folder in (old, new))
    assert same_tensors(one.state_dict(), other.state_dict())


def naive_attention(q, k, v, segments, window, scale):
    """Query by query: q (N, Hq, D), k and v (N, Hkv, D) -> (N, Hq, D)."""
    out = torch.zeros_like(q)
    for first, end, p_start, p_end, *both in segments:
        # of the keys, in the segment's order
        places = [*range(p_start, p_end), *range(first, end)]
        for i in range(first, end):
            position = i - first + p_end - p_start
            seen = [
                place
                for j, place in enumerate(places)
                if (j <= position or any(both)) and (window is None or position - j < window)
            ]
            for head in range(q.shape[1]):
                kv = head // (q.shape[1] // k.shape[1])
                out[i, head] = (k[seen, kv] @ q[i, head] * scale).softmax(0) @ v[seen, kv]
    return out


@pytest.mark.parametrize("dim", [8, 12])
@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_windows_and_pictures_in_both_forms_of_attention(window, dim, monkeypatch):
    """SDPA over buckets, and the calls that a GPU would make, with a loop in the kernel's place, which
    takes heads up to 8."""
    generator = seeded(0)
    monkeypatch.setattr(vlm_attention, "LARGEST_HEAD", 8)
    segments = [(0, 14, 0, 0), (14, 19, 0, 14), (19, 20, 0, 14), (20, 26, 20, 20), (26, 30, 20, 26)]
    pictures = torch.tensor([2, 3, 4, 9, 10, 11, 12, 20, 21])
    gemma, llama = (family_of(SimpleNamespace(model_type=name)) for name in ("gemma3", "llama"))
    text = SimpleNamespace(use_bidirectional_attention="vision")
    newer = family_of(SimpleNamespace(model_type="gemma4", get_text_config=lambda: text))
    pieces = gemma.attention_segments(segments, pictures)
    assert pieces[:3] == [(0, 2, 0, 0), (2, 5, 0, 2, BOTH_WAYS), (5, 9, 0, 5)]
    assert len(pieces) == 10
    in_windows = newer.attention_segments(segments, pictures)
    assert in_windows[1] == (2, 5, 0, 2, IN_WINDOWS)
    assert (
        llama.attention_segments(segments, pictures)
        == segments
        == gemma.attention_segments(segments, pictures[:0])
    )
    q, k, v = (torch.randn(30, heads, dim, generator=generator) for heads in (4, 2, 2))

    def kernel(q, k, v, call, scale, backend, window):
        assert q.shape[-1] <= 8
        causal = call.causal and not (call.in_windows and window)
        out = []
        for a, b, c, d in zip(call.cu_q, call.cu_q[1:], call.cu_k, call.cu_k[1:]):
            assert b - a <= call.max_q
            assert d - c <= call.max_k
            stretch = torch.cat([torch.zeros(int((d - c) - (b - a)), *q.shape[1:]), q[a:b]])
            length, prefix = int(d - c), int((d - c) - (b - a))
            parts = [(prefix, length, 0, prefix, not causal)]
            part = naive_attention(stretch, k[c:d], v[c:d], parts, window, scale)
            out.append(part[prefix:])
        return torch.cat(out)

    monkeypatch.setattr(vlm_attention, "varlen_attention", kernel)
    for parts in (segments, pieces, in_windows):
        # without a window, those of Gemma 4 are as if there were no pictures
        seen = segments if parts is in_windows and window is None else parts
        expected = naive_attention(q, k, v, seen, window, 0.3)
        for backend in ("sdpa", "varlen"):
            attention = vlm_attention.PackedAttention(parts, backend, torch.device("cpu"))
            ours = attention(0, *(x.transpose(0, 1)[None] for x in (q, k, v)), 0.3, window)[0]
            assert (ours - expected).abs().max() < ROUNDING, backend
