"""Nothing of a model is replaced, dropped or ignored unseen: whatever would give wrong features without
an error is refused, or left to transformers."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, CLIPVisionConfig, LlamaConfig, LlavaConfig, SeedOssConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionPatchMerger
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from common.data.processor import Processor
from common.model import attention, build, layers, vlm
from common.model import weights as vlm_weights
from conftest import read_json, save_weights, start, user_error, value_error, write_json
from families import TEXT, VISION, make_config, make_tokenizer, write_family
from helpers import COMPUTE


@pytest.mark.parametrize("activation, replaced", [("silu", True), ("gelu", False)])
def test_only_a_swiglu_is_replaced(activation, replaced):
    holder, x = nn.Module(), torch.randn(5, 32)
    config = LlamaConfig(hidden_size=32, intermediate_size=80, hidden_act=activation)
    holder.part = LlamaMLP(config)
    expected = holder.part(x)
    layers.use_fewer_kernels(holder)
    assert isinstance(holder.part, layers.SwiGLU) == replaced
    assert torch.allclose(holder.part(x), expected, atol=1e-5)


def test_the_same_products_and_more_are_left():
    """GLM's merger of patches projects first."""
    holder = nn.Module()
    holder.part = Glm4vVisionPatchMerger(48, 80, "silu")
    assert layers.SWIGLU < holder.part._modules.keys()
    layers.use_fewer_kernels(holder)
    assert type(holder.part) is Glm4vVisionPatchMerger


class BoundedMLP(LlamaMLP):
    """Of no package that was compared: the same parts compute something else."""

    def forward(self, x):
        return super().forward(x).clamp(-7, 7)


class ShiftedRMSNorm(LlamaRMSNorm):
    """Another one's weights are differences from 2."""

    def forward(self, x):
        return super().forward(x) + 2 * x


def test_layers_of_other_packages_are_left_as_they_are():
    holder = nn.Module()
    holder.mlp = BoundedMLP(LlamaConfig(hidden_size=32, intermediate_size=80))
    holder.norm = ShiftedRMSNorm(48)
    layers.use_fewer_kernels(holder)
    assert (type(holder.mlp), type(holder.norm)) == (BoundedMLP, ShiftedRMSNorm)


@pytest.mark.parametrize("kind", ["gpt_oss", "olmo2"])
def test_decoders_that_were_not_compared_are_refused(kind):
    """Attention sinks, norms in other places: our attention would ignore some."""
    config = AutoConfig.for_model(
        "llava", text_config=TEXT | {"model_type": kind, "vocab_size": 50}, vision_config=VISION
    )
    with user_error(f"the text model {kind} mixes tokens by .*, which is not supported"):
        build.build_model(config, COMPUTE)


def test_a_mask_or_an_argument_that_attention_would_ignore_is_an_error():
    q = torch.randn(1, 2, 3, 4)
    seen = []

    def attend(*arguments):
        seen.append(arguments)
        return q

    layer, call = SimpleNamespace(slot_layer=0), attention.language_attention
    options = {"scaling": 1.0, "attention": attend, "dropout": 0.1, "softcap": None}
    call(layer, q, q, q, None, **options)
    with value_error("gives its attention a mask of its own"):
        call(layer, q, q, q, torch.ones(3, 3), **options)
    with value_error("gives its attention block_indices, softcap, which"):
        call(layer, q, q, q, None, **options | {"softcap": 30.0, "block_indices": q})
    assert len(seen) == 1
    options.pop("attention")  # as StableLM's layers do
    with value_error("SimpleNamespace is not told by its layer what a pack holds"):
        call(layer, q, q, q, None, **options)


@pytest.mark.parametrize("kind, value", [("gemma4_31b", "all"), ("gemma3", True)])
def test_decoders_that_see_ahead_in_text_are_refused(kind, value):
    config = make_config(kind, make_tokenizer(kind))
    build.build_model(config, COMPUTE)
    config.text_config.use_bidirectional_attention = value
    with user_error("text model has use_bidirectional_attention, which is not supported"):
        build.build_model(config, COMPUTE)


def test_soft_capped_attention_is_refused():
    config = make_config("llava", make_tokenizer("llava"))
    config.text_config.attn_logit_softcapping = 50.0
    with user_error("text model has attn_logit_softcapping, which is not supported"):
        build.build_model(config, COMPUTE)


def test_heads_too_large_for_a_back_end_are_said(tmp_path, picture_rows, monkeypatch, capfd):
    """At the start: these layers attend by sdpa."""
    write_family("gemma4_31b", tmp_path, picture_rows)
    for limit in (16, 8):
        monkeypatch.setattr(build, "LARGEST_HEAD", limit)
        start(tmp_path, tmp_path / "rows.jsonl")
        line = f"attention of layers with heads of 16: sdpa, as others end at {limit}"
        assert (line in capfd.readouterr().out) == (limit == 8)


def with_scalars(monkeypatch) -> None:
    """Llama has one more number in each layer, as Gemma 4: in the files, but not trained."""
    made = LlamaDecoderLayer.__init__

    def init(self, *arguments):
        made(self, *arguments)
        self.register_buffer("layer_scalar", torch.ones(()))

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", init)


def test_buffers_in_the_files_are_loaded_and_exported(tmp_path, picture_rows, monkeypatch):
    write_family("llama", tmp_path, picture_rows)
    data = tmp_path / "rows.jsonl"
    scalars = {f"model.layers.{k}.layer_scalar": torch.tensor(0.5 + k) for k in range(2)}
    weights = load_file(tmp_path / "model.safetensors")
    save_weights(tmp_path, weights | scalars)
    with_scalars(monkeypatch)
    env, export = start(tmp_path, data), tmp_path / "export" / "step-1"
    read = [layer.layer_scalar.item() for layer in vlm.decoder(env.actor.model).layers]
    assert read == [0.5, 1.5]
    export.parent.mkdir()
    assert vlm_weights.export(env.actor, env.processor.save, export) is None
    exported = load_file(export / "model.safetensors")
    assert exported.keys() == {*weights, *scalars}
    assert all(torch.equal(exported[name], scalars[name]) for name in scalars)
    save_weights(tmp_path, weights)
    with user_error("2 weights do not fit .* model.layers.0.layer_scalar is in no file"):
        start(tmp_path, data)


def test_a_tensor_that_would_be_dropped_is_an_error(tmp_path, picture_rows):
    """Unless it is known why: computed, of multi-token prediction, a head that a critic lacks."""
    write_family("llava", tmp_path, picture_rows)
    data, weights = tmp_path / "rows.jsonl", load_file(tmp_path / "model.safetensors")
    known = ("language_model.model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.norm.weight")
    known += ("lm_head.inv_freq", "vision_tower.vision_model.embeddings.position_ids")
    save_weights(tmp_path, weights | {name: torch.ones(2) for name in known})
    start(tmp_path, data)
    heads = ("language_model.lm_head.bias", "value_embedding.weight", "v_head.summary.weight")
    for lost in (
        "model.layers.0.mlp.gate_bias",
        "vision_tower.vision_model.head.probe",
        *heads,
    ):
        save_weights(tmp_path, weights | {lost: torch.ones(2)})
        with user_error(f"1 weights do not fit .*{lost[-11:]} is no part of the model"):
            start(tmp_path, data)


def test_what_is_wrong_with_weights_is_said_before_memory_is_taken(
    tmp_path, picture_rows, monkeypatch
):
    """Names, shapes and types."""
    write_family("qwen3_vl_moe", tmp_path, picture_rows)
    data, weights = tmp_path / "rows.jsonl", load_file(tmp_path / "model.safetensors")
    start(tmp_path, data)
    monkeypatch.setattr(vlm_weights, "materialize", lambda *_: pytest.fail("memory is taken"))
    key = "model.visual.pos_embed.weight"
    stem = "model.language_model.layers.1.mlp"
    experts = weights[f"{stem}.experts.down_proj"]
    wrong = {
        f"the first: {key} is in no file": {name: w for name, w in weights.items() if name != key},
        f"the first: {stem}.bias is no part of the model": weights
        | {f"{stem}.bias": torch.ones(2)},
        f"{key} is of type torch.int8; quantized weights": weights | {key: weights[key].char()},
        f"{key} is .*, not \\(": weights | {key: weights[key].T.contiguous()},
        "down_proj is .*, not \\(": weights | {f"{stem}.experts.down_proj": experts[:-1].clone()},
    }
    for message, tensors in wrong.items():
        save_weights(tmp_path, tensors)
        with user_error(message):
            start(tmp_path, data)


def test_two_values_for_a_tied_weight_are_refused(tmp_path, picture_rows):
    """transformers would read both and untie them; one would train the other away here."""
    write_family("llama", tmp_path, picture_rows)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    save_weights(tmp_path, weights | {"lm_head.weight": head})
    start(tmp_path, tmp_path / "rows.jsonl")
    save_weights(tmp_path, weights | {"lm_head.weight": head + 1})
    with user_error("lm_head.weight differs from model.embed_tokens.weight, to which it is tied"):
        start(tmp_path, tmp_path / "rows.jsonl")


@pytest.mark.parametrize("kind", ["internvl", "mistral3"])
def test_a_head_that_the_text_model_does_not_tie_is_its_own(kind, tmp_path, picture_rows):
    """Published configs of these say nothing of ties, and transformers' default is to tie."""
    write_family(kind, tmp_path, picture_rows)
    config = read_json(tmp_path / "config.json")
    for part in (config, config["text_config"]):
        part.pop("tie_word_embeddings", None)
    write_json(tmp_path / "config.json", config)
    weights = load_file(tmp_path / "model.safetensors")
    (table,) = (key for key in weights if key.endswith("embed_tokens.weight"))
    for other in (1, 0):
        save_weights(tmp_path, weights | {"language_model.lm_head.weight": weights[table] + other})
        model = start(tmp_path, tmp_path / "rows.jsonl", "--advantage grpo").actor.model
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == (other == 0)
        assert torch.equal(model.lm_head.weight.full_tensor(), weights[table] + other)


@pytest.mark.parametrize("which", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotary_positions_that_change_in_some_layers_are_refused(which, rope):
    """Gemma has a type for each kind of layer."""
    config = make_config("gemma3", make_tokenizer("gemma3"))
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 2.0}
    factors["original_max_position_embeddings"] = 64
    config.text_config.rope_parameters[which] |= factors | {"rope_type": rope}
    with user_error("gemma3_text has rope_type longrope, or dynamic in some layers"):
        build.build_model(config, COMPUTE)


def test_a_quantized_part_is_refused(tmp_path, picture_rows):
    write_family("llava", tmp_path, picture_rows)
    config = read_json(tmp_path / "config.json")
    config["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    write_json(tmp_path / "config.json", config)
    with user_error("quantized checkpoints are not supported"):
        Processor(tmp_path)


def test_a_config_loses_its_noise_and_nothing_else():
    """Seed-OSS has dropout by default; a router's noise acts in training alone, too."""
    noise = {"attention_dropout": 0.1, "residual_dropout": 0.1, "router_jitter_noise": 0.01}
    text = SeedOssConfig(hidden_size=32, **noise)
    whole = LlavaConfig(text_config=text, vision_config=CLIPVisionConfig(attention_dropout=0.2))
    before = whole.to_dict()
    after = build.without_noise(whole).to_dict()
    assert before["text_config"] | dict.fromkeys(noise, 0.0) == after["text_config"]
    assert before["vision_config"] | {"attention_dropout": 0.0} == after["vision_config"]


def test_a_tower_gets_pixels_as_they_are_read():
    """Some scale them before they cast them: rounded first, they would be others."""
    seen = []

    class Core(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Linear(4, 4, dtype=torch.bfloat16)

        def get_image_features(self, pixel_values, return_dict):
            seen.append(pixel_values.dtype)
            return SimpleNamespace(pooler_output=pixel_values)

    config = make_config("llava", make_tokenizer("llava"))
    model = build.build_model(config, COMPUTE)
    core = Core()
    core.language_model = model.model.language_model
    model.model = core
    vlm.image_features(model, torch.rand(2, 4), torch.ones(1, 2))
    assert seen == [torch.float32]
