"""Tiny checkpoints of every supported family, and what is checked of each."""

import json
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

import train_ppo_vl as ppo
from common.buffers import Batch
from common.model import vlm
from common.model.packs import run_forward
from conftest import (
    ROUNDING,
    read_rows,
    responses_of,
    rounding,
    save_weights,
    seeded,
    take,
    token_logprobs,
    write_json,
)
from helpers import random_responses
from launch import toy

TEXT = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=1024,
    bos_token_id=None,
    pad_token_id=None,
)
VISION = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=28,
    patch_size=7,
)
QWEN_VISION = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    patch_size=14,
    out_hidden_size=32,
    spatial_merge_size=2,
)


LINEAR = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    head_dim=16,
    mamba_ssm_dtype="float32",
    rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1]
    ),
)
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN_TOKENS = dict(
    image_token="<|image_pad|>",
    video_token="<|video_pad|>",
    vision_start_token="<|vision_start|>",
    vision_end_token="<|vision_end|>",
)
# What the chat template writes for a picture, and the special tokens of the family; "<s>" is every
# tokenizer's BOS.
TOKENS = {
    kind: ("<|vision_start|><|image_pad|><|vision_end|>", QWEN_TOKENS)
    for kind in ("qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
} | dict(
    llava=("<image>\n", {"image_token": "<image>"}),
    gemma3=(
        "<start_of_image>",
        {
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
    ),
    internvl=(
        "<IMG_CONTEXT>\n",
        dict(
            start_image_token="<img>",
            end_image_token="</img>",
            video_token="<video>",
            context_image_token="<IMG_CONTEXT>",
        ),
    ),
    idefics3=(
        "<image>",
        {
            "image_token": "<image>",
            "fake": "<fake_token_around_image>",
            "global": "<global-img>",
            "utterance": "<end_of_utterance>",
        }
        | {f"tile_{i}{j}": f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)},
    ),
)
TOKENS["smolvlm"] = TOKENS["idefics3"]
GLM_TOKENS = dict(
    image_token="<|image|>",
    video_token="<|video|>",
    image_start_token="<|begin_of_image|>",
    image_end_token="<|end_of_image|>",
    video_start_token="<|begin_of_video|>",
    video_end_token="<|end_of_video|>",
)
GLM = ("glm4v", "glm46v", "glm_ocr", "glm4v_moe")
TOKENS |= {kind: ("<|begin_of_image|><|image|><|end_of_image|>", GLM_TOKENS) for kind in GLM}
TOKENS["exaone4_5"] = (
    "<vision><|image_pad|></vision>",
    {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    | {"vision_start": "<vision>", "vision_end": "</vision>"},
)
PIXTRAL_TOKENS = dict(
    image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]"
)
TOKENS |= {kind: ("[IMG]", PIXTRAL_TOKENS) for kind in ("mistral3", "ministral3")}
TOKENS["lighton_ocr"] = (
    "<|image_pad|>",
    dict(
        image_token="<|image_pad|>",
        image_break_token="<|vision_pad|>",
        image_end_token="<|vision_end|>",
    ),
)
GEMMA4_TOKENS = dict(
    image_token="<|image|>",
    boi_token="<|image>",
    eoi_token="<image|>",
    video_token="<|video|>",
    audio_token="<|audio|>",
    boa_token="<|audio>",
    eoa_token="<audio|>",
)
# By size: E2B has inputs per layer, shared keys and a clipped tower; 31B k = v and two-way images.
GEMMA4 = ("gemma4_e2b", "gemma4_31b", "gemma4_26b_a4b")
TOKENS |= {kind: ("\n\n<|image|>\n\n", GEMMA4_TOKENS) for kind in GEMMA4}
TOKENS["llava_next"] = TOKENS["llava"]
TOKENS["llava_onevision"] = ("<image>\n", {"image_token": "<image>", "video_token": "<video>"})
# The template writes another token than that which is repeated.
TOKENS["aya_vision"] = (
    "<image>",
    dict(
        placeholder="<image>",
        image_token="<|IMG_PATCH|>",
        start="<|START_OF_IMG|>",
        end="<|END_OF_IMG|>",
        line_break="<|IMG_LINE_BREAK|>",
        tile_global="TILE_GLOBAL",
    ),
)
DESCRIBED = ("llava_next", "llava_onevision", "aya_vision")
# Their model_type, where a kind here is named after its text model.
MODEL_TYPES = {"ministral3": "mistral3", "internvl_moe": "internvl"}
TOKENS["internvl_moe"] = TOKENS["internvl"]
# Of each layout one: text alone, grids, linear attention, experts, shared keys and two-way images, a
# projector. `all` tests the others too.
DAILY = ("llama", "qwen2_vl", "qwen3_5", "qwen3_vl_moe", "gemma4_e2b", "llava")
# whose own processors work without torchvision
PLAIN = ("llava", "gemma3", "idefics3", "llava_next", "aya_vision")
TEXT_ONLY = dict(
    qwen2={},
    qwen3={},
    llama={"tie_word_embeddings": True},
    mistral={"sliding_window": 24},
    qwen3_5_text=LINEAR,
    qwen3_5_moe_text=LINEAR | EXPERTS | {"shared_expert_intermediate_size": 40},
)
KINDS = [*TEXT_ONLY, *TOKENS]


# Linear attention, which transformers computes in float32 whatever the model's type, solves a
# triangular system for each chunk of 64 tokens and multiplies by the solution: 2 x 64 additions
# more on the way forward, and as many on the way back.
THROUGH_CHUNKS = rounding(128 + 4 * 64)
TEMPLATE = """{bos}{{%- for message in messages -%}}<|im_start|>{{{{ message.role + '\\n' }}}}
{{%- if message.content is string -%}}{strings}{{%- else -%}}
{{%- for part in message.content -%}}{{%- if part.type == 'image' -%}}{image}{{%- else -%}}{{{{ part.text }}}}{{%- endif -%}}
{{%- endfor -%}}{{%- endif -%}}<|im_end|>{{{{ '\\n' }}}}{{%- endfor -%}}<|im_start|>assistant{{{{ '\\n' }}}}"""
REWARD = '''
def letters(prompts, responses, references, labels, images):
    """Depends on the response, so that samples of one prompt differ."""
    return [sum(c in "aeiou " for c in r) / max(1, len(r)) for r in responses]
'''


def make_tokenizer(kind: str):
    """The toy's byte-level BPE under the family's special tokens; it adds a BOS unless the template
    writes one."""
    image, special = TOKENS.get(kind, ("", {}))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=toy.make_tokenizer().backend_tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=special,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    bos = tokenizer.bos_token_id
    if not kind.startswith("qwen"):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    # A template for text writes its BOS and knows strings only; one for pictures may know parts only.
    tokenizer.chat_template = TEMPLATE.format(
        bos="<s>" if kind in (*TEXT_ONLY, "gemma3", *GEMMA4) else "",
        image=image,
        strings="{{ message.content }}" if kind in TEXT_ONLY else "",
    )
    return tokenizer


def pixtral_config(kind: str, vocabulary: dict, ids: dict):
    """Mistral Small 3, Ministral 3 or LightOnOCR, as their published configs are laid out."""
    yarn = dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        original_max_position_embeddings=64,  # so that queries behind are scaled
        max_position_embeddings=256,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1,
    )
    text = {
        "mistral3": {"model_type": "mistral", "sliding_window": None},
        "ministral3": {"model_type": "ministral3", "rope_parameters": yarn},
        "lighton_ocr": {"model_type": "qwen3"},
    }[kind]
    tower = VISION | {"model_type": "pixtral", "image_size": 112, "head_dim": 16}
    name = "image_token_id" if kind == "lighton_ocr" else "image_token_index"
    return AutoConfig.for_model(
        MODEL_TYPES.get(kind, kind),
        text_config=TEXT | vocabulary | text,
        vision_config=tower,
        spatial_merge_size=2,
        tie_word_embeddings=False,
        **{name: ids["image_token_id"]},
    )


# Sizes of LLaVA's canvases: one tile and up to three by three.
PINPOINTS = [[28 * rows, 28 * columns] for rows in range(1, 4) for columns in range(1, 4)]


def described_config(kind: str, vocabulary: dict, ids: dict):
    """LLaVA-NeXT, LLaVA-OneVision, Aya Vision."""
    text, tower, more = {
        "llava_next": ("mistral", "clip_vision_model", {"image_grid_pinpoints": PINPOINTS}),
        "llava_onevision": (
            "qwen2",
            "siglip_vision_model",
            dict(
                image_grid_pinpoints=PINPOINTS,
                vision_aspect_ratio="anyres_max_4",  # more tiles than that are made smaller
                vision_feature_layer=-1,
                vision_feature_select_strategy="full",
                video_token_index=ids.get("video_token_id"),
            ),
        ),
        "aya_vision": (
            "cohere2",
            "siglip_vision_model",
            dict(
                downsample_factor=2,
                alignment_intermediate_size=64,
                vision_feature_layer=-1,
                vision_feature_select_strategy="full",
                tie_word_embeddings=True,
            ),
        ),
    }[kind]
    windows = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    return AutoConfig.for_model(
        kind,
        text_config=TEXT
        | vocabulary
        | {"model_type": text, "sliding_window": None}
        | (windows if kind == "aya_vision" else {}),
        vision_config=VISION | {"model_type": tower, "vision_use_head": False},
        image_token_index=ids["image_token_id"],
        **{"tie_word_embeddings": False} | more,
    )


def glm_config(kind: str, vocabulary: dict, ids: dict):
    """GLM-4.1V, 4.6V, 4.5V, GLM-OCR."""
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1])
    # GLM-4.1V has no head_dim: hidden_size / heads
    text = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    text["rope_parameters"] = rope | {"partial_rotary_factor": 0.5}
    if kind == "glm4v_moe":
        text |= dict(
            n_routed_experts=6,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=EXPERTS["moe_intermediate_size"],
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        )
    return AutoConfig.for_model(
        kind,
        text_config=TEXT | vocabulary | text,
        **ids,
        vision_config=QWEN_VISION | {"image_size": 112},
    )


def exaone_config(vocabulary: dict, ids: dict):
    text = {"model_type": "exaone4", "sliding_window": 24, "sliding_window_pattern": 2}
    return AutoConfig.for_model(
        "exaone4_5",
        text_config=TEXT | vocabulary | text,
        image_token_id=ids["image_token_id"],
        video_token_id=ids["video_token_id"],
        vision_config=QWEN_VISION
        | dict(num_heads=4, num_key_value_heads=2, window_size=56, fullatt_block_indexes=[1]),
    )


def gemma4_config(kind: str, vocabulary: dict, ids: dict):
    text = dict(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=24,
        global_head_dim=16,
        num_global_key_value_heads=1,
        final_logit_softcapping=30.0,
        vocab_size_per_layer_input=vocabulary["vocab_size"],
        hidden_size_per_layer_input=0,
        pad_token_id=0,
        attention_k_eq_v=True,
        use_bidirectional_attention="vision",
    )
    if kind == "gemma4_e2b":
        text |= dict(
            attention_k_eq_v=False,
            use_bidirectional_attention=None,
            num_kv_shared_layers=2,
            num_key_value_heads=1,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=6,
        )
    if kind == "gemma4_26b_a4b":
        text |= dict(
            enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=32
        )
    sound = dict(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        subsampling_conv_channels=[4, 2],
        output_proj_dims=32,
    )
    return AutoConfig.for_model(
        "gemma4",
        text_config=TEXT | vocabulary | text,
        vision_config=dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            patch_size=4,
            position_embedding_size=256,
            rope_parameters={"rope_theta": 100.0, "rope_type": "default"},
            standardize=kind != "gemma4_e2b",
            use_clipped_linears=kind != "gemma4_31b",
        ),
        audio_config=sound if kind == "gemma4_e2b" else None,
        **{name: token for name, token in ids.items() if name != "eoa_token_id"},
        eoa_token_index=ids["eoa_token_id"],
    )


def as_gemma4_is_published(folder: Path, generator: torch.Generator) -> None:
    """Heads of full layers by two names of their own, and weights of layers that never use them."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    assert text.pop("per_layer_config")
    text |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    write_json(path, config)
    weights = load_file(folder / "model.safetensors")
    for layer in range(4 - text["num_kv_shared_layers"], 4):
        stem = f"model.language_model.layers.{layer}.self_attn"
        for name, size in (("k_proj.weight", (8, 32)), ("k_norm.weight", (8,))):
            weights[f"{stem}.{name}"] = torch.randn(size, generator=generator)
    save_weights(folder, weights)


def make_config(kind: str, tokenizer):
    """A model of 2 + 2 layers with the family's own config class."""
    vocabulary = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if kind in TEXT_ONLY:
        return AutoConfig.for_model(kind, **TEXT | vocabulary | TEXT_ONLY[kind])
    image, special = TOKENS[kind]
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in special.items()}
    if kind in GLM:
        return glm_config(kind, vocabulary, ids)
    if kind in GEMMA4:
        return gemma4_config(kind, vocabulary, ids)
    if kind == "exaone4_5":
        return exaone_config(vocabulary, ids)
    if kind in DESCRIBED:
        return described_config(kind, vocabulary, ids)
    if kind in ("mistral3", "ministral3", "lighton_ocr"):
        return pixtral_config(kind, vocabulary, ids)
    if kind == "qwen2_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        return AutoConfig.for_model(
            kind,
            text_config=TEXT | vocabulary | {"rope_parameters": rope},
            **ids,
            vision_config=dict(
                depth=2, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=14
            ),
        )
    if kind == "qwen3_vl_moe":
        rope = dict(
            rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1], mrope_interleaved=True
        )
        text = EXPERTS | {"rope_parameters": rope}
        return AutoConfig.for_model(
            kind,
            text_config=TEXT | vocabulary | text,
            **ids,
            vision_config=QWEN_VISION
            | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        )
    if kind in ("qwen3_5", "qwen3_5_moe"):
        text = TEXT_ONLY[f"{kind}_text"]
        return AutoConfig.for_model(
            kind,
            text_config=TEXT | vocabulary | text,
            **ids,
            vision_config=QWEN_VISION | {"num_position_embeddings": 64},
        )
    if kind.startswith("internvl"):
        text = {"model_type": "qwen2"}
        if kind == "internvl_moe":
            text = EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True}
        vision = VISION | {"image_size": [28, 28], "patch_size": [7, 7]}
        return AutoConfig.for_model(
            "internvl",
            text_config=TEXT | vocabulary | text,
            vision_config=vision,
            image_token_id=ids["context_image_token_id"],
        )
    text = {"gemma3": "gemma3_text"}.get(kind, "llama")
    tower = {
        "gemma3": "siglip_vision_model",
        "idefics3": "idefics3_vision",
        "smolvlm": "smolvlm_vision",
    }.get(kind, "clip_vision_model")
    more = {
        "gemma3": {
            "mm_tokens_per_image": 4,
            "boi_token_index": ids.get("boi_token_id"),
            "eoi_token_index": ids.get("eoi_token_id"),
        }
    }.get(kind, {"scale_factor": 2})
    windows = {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    }
    name = "image_token_id" if kind in ("idefics3", "smolvlm") else "image_token_index"
    return AutoConfig.for_model(
        kind,
        **{name: ids["image_token_id"]},
        **more,
        text_config=TEXT
        | vocabulary
        | {"model_type": text}
        | (windows if kind == "gemma3" else {}),
        vision_config=VISION | {"model_type": tower},
    )


def make_image_processor(kind: str):
    """The family's Pillow image processor, for small pictures."""
    if kind.startswith(("qwen", "exaone", "glm")):
        name = {"ex": "Qwen2VL", "qw": "Qwen2VL"}.get(kind[:2], "Glm4v")
        name = "Glm46V" if kind in ("glm46v", "glm_ocr") else name
        frames = 1 if name == "Qwen2VL" else 2  # the pixels that GLM counts
        size = {"shortest_edge": 28**2 * frames, "longest_edge": 112**2 * frames}
        return getattr(transformers, f"{name}ImageProcessorPil")(patch_size=14, size=size)
    if kind in ("mistral3", "ministral3", "lighton_ocr"):
        # LightOn's file has the side of a token; the others' that of the tower's patches
        patch = 14 if kind == "lighton_ocr" else 7
        return transformers.PixtralImageProcessorPil(
            size={"longest_edge": 70}, patch_size={"height": patch, "width": patch}
        )
    if kind in GEMMA4:
        return transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    square, shortest = {"height": 28, "width": 28}, {"shortest_edge": 28}
    if kind == "llava":
        return transformers.CLIPImageProcessorPil(size=shortest, crop_size=square)
    if kind == "gemma3":
        return transformers.Gemma3ImageProcessorPil(size=square)
    if kind.startswith("internvl"):
        return transformers.GotOcr2ImageProcessorPil(size=square, max_patches=6)
    if kind == "aya_vision":
        options = {"size": square, "max_patches": 6, "crop_to_patches": True}
        return transformers.GotOcr2ImageProcessorPil(**options)
    if kind == "llava_next":
        return transformers.LlavaNextImageProcessorPil(
            size=shortest, crop_size=square, image_grid_pinpoints=PINPOINTS
        )
    if kind == "llava_onevision":
        return transformers.LlavaOnevisionImageProcessorPil(
            size=square, image_grid_pinpoints=PINPOINTS
        )
    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[kind]
    return getattr(transformers, f"{name}ImageProcessorPil")(
        size={"longest_edge": 84}, max_image_size={"longest_edge": 28}
    )


# What their published processor_config.json say.
WRITERS = dict(
    internvl={"image_seq_length": 4, "processor_class": "InternVLProcessor"},
    smolvlm={"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
    llava_next=dict(
        image_token="<image>",
        num_additional_image_tokens=1,
        patch_size=7,
        processor_class="LlavaNextProcessor",
        vision_feature_select_strategy="default",
    ),
    llava_onevision=dict(
        image_token="<image>",
        num_image_tokens=16,
        processor_class="LlavaOnevisionProcessor",
        video_token="<video>",
        vision_aspect_ratio="anyres_max_4",
        vision_feature_select_strategy="full",
    ),
    aya_vision=dict(
        downsample_factor=2,
        end_of_img_token="<|END_OF_IMG|>",
        image_token="<image>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
        img_patch_token="<|IMG_PATCH|>",
        img_size=28,
        patch_size=7,
        processor_class="AyaVisionProcessor",
        start_of_img_token="<|START_OF_IMG|>",
        tile_global_token="TILE_GLOBAL",
        tile_token="TILE",
    ),
)
WRITERS["internvl_moe"] = WRITERS["internvl"]


def save_processor(kind: str, folder, tokenizer) -> None:
    """Tokenizer, template and image processor in the files that the family's processor writes,
    where it works here."""
    images = make_image_processor(kind)
    if kind in GEMMA4:
        tokenizer.save_pretrained(folder)
        settings = {"processor_class": "Gemma4Processor", "image_seq_length": 280}
        sound = {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
        clips = {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70}
        parts = {"image_processor": images.to_dict(), "feature_extractor": sound}
        text = json.dumps(settings | parts | {"video_processor": clips})
        (folder / "processor_config.json").write_text(text)
        return
    if kind not in PLAIN or kind in WRITERS:
        tokenizer.save_pretrained(folder)
        images.save_pretrained(folder)
        if kind in WRITERS:
            (folder / "processor_config.json").write_text(json.dumps(WRITERS[kind]))
        if kind in ("mistral3", "ministral3", "lighton_ocr"):
            name = "LightOnOcr" if kind == "lighton_ocr" else "Pixtral"
            settings = {"processor_class": f"{name}Processor", "spatial_merge_size": 2}
            text = json.dumps(settings | {"patch_size": 7})
            (folder / "processor_config.json").write_text(text)
        return
    options = {
        "image_processor": images,
        "tokenizer": tokenizer,
        "chat_template": tokenizer.chat_template,
    }
    if kind == "gemma3":
        processor = transformers.Gemma3Processor(**options, image_seq_length=4)
    elif kind == "idefics3":
        processor = transformers.Idefics3Processor(**options, image_seq_len=4)
    else:
        processor = transformers.LlavaProcessor(
            **options,
            patch_size=7,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    processor.save_pretrained(folder)


def write_family(kind: str, folder: Path, picture_rows: str):
    """A checkpoint with large random weights and rows.jsonl; returns the class of the model."""
    tokenizer = make_tokenizer(kind)
    auto = AutoModelForCausalLM if kind in TEXT_ONLY else AutoModelForImageTextToText
    torch.manual_seed(0)
    model = auto.from_config(make_config(kind, tokenizer))
    generator = seeded(1)
    # large enough that attention is not uniform and positions matter
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim >= 2 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
            # as they are made, states would be forgotten within a token or two
            if name.endswith("A_log"):
                parameter.uniform_(0.005, 0.3, generator=generator).log_()
        # clip bounds, scales
        for name, buffer in model.state_dict().items():
            if kind in GEMMA4 and name not in dict(model.named_parameters()):
                low = {"min": -1.5, "max": 1.0}.get(name[-3:], 0.5)
                buffer.uniform_(low, low + 0.5, generator=generator)
            if name.endswith("up_proj.output_max"):
                buffer.fill_(torch.inf)  # not clipped there
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    # the files on the hub are older than the modules
    if kind in ("llava", "gemma3", "qwen3_vl_moe", *DESCRIBED):
        weights = load_file(folder / "model.safetensors")
        weights = {
            name.replace("vision_tower.", "vision_tower.vision_model."): value.transpose(
                1, 2
            ).contiguous()
            if ".experts." in name
            else value
            for name, value in weights.items()
        }
        save_weights(folder, weights)
    # which on the hub are one tensor for all experts, as the module's
    if kind.startswith("qwen3_5_moe"):
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_weights(folder, weights)
    if kind in GEMMA4:
        as_gemma4_is_published(folder, generator)
    if kind in TEXT_ONLY:
        tokenizer.save_pretrained(folder)
    else:
        save_processor(kind, folder, tokenizer)
    source = Path(picture_rows)
    rows = read_rows(source)
    for row in rows:
        row["images"] = (
            [] if kind in TEXT_ONLY else [str(source.parent / name) for name in row["images"]]
        )
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return type(model)


def responses_to(env, counts: list[int], vocabulary: int) -> Batch:
    """``counts`` random responses to the prompts, whose image features the actor has computed."""
    batch = take(env).with_responses(random_responses(counts, vocabulary))
    batch.sampling = env.sampling
    with torch.no_grad():
        vlm.compute_features_unless_trained(env.actor.model, batch)
    return batch


def logprobs(policy: ppo.Policy, batch: Batch, sampling) -> torch.Tensor:
    """(N,) of the responses, as the policy samples them."""
    return run_forward(policy, batch, lambda pack: policy(pack, sampling)[0])


def as_parts(messages: list[dict]) -> list[dict]:
    """Messages whose content is a list of parts, as the families' own processors want them."""
    text = lambda content: [{"type": "text", "text": content}]  # noqa: E731
    return [
        m | {"content": text(m["content"]) if isinstance(m["content"], str) else m["content"]}
        for m in messages
    ]


def with_response(inputs: dict, tokens: torch.Tensor) -> dict:
    """The inputs of a prompt with the tokens of a response behind it."""
    inputs = dict(inputs)
    further = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    further |= dict.fromkeys(("token_type_ids", "mm_token_type_ids"), torch.zeros_like(tokens))
    for name in inputs.keys() & further.keys():
        more = further[name][None].to(inputs[name].dtype)
        inputs[name] = torch.cat([inputs[name], more], dim=1)
    return inputs


def check_logprobs(
    family, counts: list[int], inputs_of, look=lambda family, batch: batch, bound: float = 0.0
) -> None:
    """Packed log-probs of ``counts`` random samples per prompt = one forward per sample of what
    ``inputs_of`` makes of it; ``look``: at other prompts and images."""
    env = family.env
    batch = look(
        family, responses_to(env, counts, family.oracle.config.get_text_config().vocab_size)
    )
    with torch.no_grad():
        expected = []
        for group, tokens in responses_of(batch):
            inputs = with_response(inputs_of(family, env.prompts[group]), tokens)
            logits = family.oracle(**inputs, use_cache=False).logits
            logits = logits[0, -len(tokens) - 1 : -1].float()
            logits[:, list(env.processor.banned_ids)] = -torch.inf
            expected.append(token_logprobs(logits, tokens))
    expected, ours = torch.cat(expected), logprobs(env.actor, batch, env.sampling)
    # a drawn token may be a banned one
    finite = expected.isfinite()
    assert finite.sum() > 0.9 * len(finite)

    assert (ours - expected)[finite].abs().max() < (
        bound or ROUNDING * expected[finite].abs().max()
    )


def generated(family, prompt, inputs_of, count: int) -> list[int]:
    """Hugging Face's greedy tokens."""
    inputs = inputs_of(family, prompt)
    out = family.oracle.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=count,
        suppress_tokens=list(family.env.processor.banned_ids),
    )
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def check_rollouts(family, inputs_of) -> None:
    """Greedy rollouts = `generate`."""
    env = family.env
    samples = ppo.rollout(env.actor, take(env), replace(env.sampling, greedy=True), 1)
    for prompt, tokens in zip(env.prompts, samples.split(samples.tokens)):
        assert tokens.tolist() == generated(family, prompt, inputs_of, 12)
    assert samples.own_lengths.max() > 3
