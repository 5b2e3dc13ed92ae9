"""Nothing of a model is replaced, dropped or ignored unseen: whatever would give wrong features without
an error is refused, or left to transformers."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.activations import ACT2FN

from common.data.families import Llava
from common.data.processor import Processor
from common.model import attention, build, layers, vlm
from common.model import weights as vlm_weights
from conftest import read_json, save_weights, start, user_error, value_error, write_json
from families import TEXT, make_config, make_tokenizer, write_family
from helpers import COMPUTE


class PlainMLP(nn.Module):
    """A SwiGLU, as transformers writes it."""

    def __init__(self, activation: str = "silu"):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(48, 80), nn.Linear(48, 80)
        self.down_proj, self.act_fn = nn.Linear(80, 48), ACT2FN[activation]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Projector(PlainMLP):
    """GLM's: the same three products, and more."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(48, 48)

    def forward(self, x):
        return super().forward(self.proj(x))


class Bounded(PlainMLP):
    """The same parts, which compute something else."""

    def forward(self, x):
        up = self.up_proj(x).clamp(-7, 7)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


@pytest.mark.parametrize(
    "module, replaced",
    [(PlainMLP(), True), (PlainMLP("gelu"), False), (Projector(), False), (Bounded(), False)],
)
def test_only_a_swiglu_that_is_nothing_else_is_replaced(module, replaced):
    holder, x = nn.Module(), torch.randn(5, 48)
    holder.part, expected = module, module(x)
    layers.use_fewer_kernels(holder)
    assert isinstance(holder.part, layers.SwiGLU) == replaced
    assert torch.allclose(holder.part(x), expected, atol=1e-5)


class GemmaRMSNorm(nn.Module):
    """Called like Gemma's, whose weights are differences from 1; these are not, as in Gemma 4."""

    def __init__(self, with_scale: bool = True):
        super().__init__()
        self.eps = 1e-6
        if with_scale:
            self.weight = nn.Parameter(torch.rand(48))

    def forward(self, x):
        x = F.rms_norm(x, x.shape[-1:], eps=self.eps)
        return x * self.weight if hasattr(self, "weight") else x


class MeanRMSNorm(GemmaRMSNorm):
    """Takes the mean away first."""

    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


@pytest.mark.parametrize(
    "norm, ours",
    [(GemmaRMSNorm(), layers.RMSNorm), (GemmaRMSNorm(False), None), (MeanRMSNorm(), None)],
)
def test_a_norm_is_known_by_what_it_computes(norm, ours):
    holder, x = nn.Module(), torch.randn(5, 48)
    holder.norm, expected = norm, norm(x)
    layers.use_fewer_kernels(holder)
    assert type(holder.norm) is (ours or type(norm))
    assert torch.allclose(holder.norm(x), expected, atol=1e-5)


def test_looking_at_a_model_draws_no_random_number():
    holder = nn.ModuleDict({"mlp": PlainMLP(), "norm": GemmaRMSNorm()})
    before = torch.get_rng_state()
    layers.use_fewer_kernels(holder)
    assert isinstance(holder["mlp"], layers.SwiGLU)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_sum_of_deepstack_is_refused():
    def scaled(hidden, mask, features):
        hidden = hidden.clone()
        hidden[mask] = hidden[mask] + 0.5 * features
        return hidden

    holder = nn.Module()
    holder.decoder = nn.Module()
    holder.decoder._deepstack_process = scaled
    with value_error("scaled of transformers is another sum"):
        layers.use_fewer_kernels(holder)


MASKED = ("minimax_m3_vl", "mistral_large4", "dots3_note", "molmo2")


@pytest.mark.parametrize("kind", MASKED)
def test_decoders_with_indexers_or_masks_of_their_own_are_refused(kind, monkeypatch):
    """Our attention would ignore both."""
    try:
        config = AutoConfig.for_model(kind)
        if kind == "minimax_m3_vl":  # by default without
            config.text_config.layer_types = ["minimax_m3_sparse"] * 2
            config.text_config.num_hidden_layers = 2
    except ValueError:
        pytest.skip("this transformers has no such model")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    model.setup = SimpleNamespace(family=Llava(config))
    monkeypatch.setattr(build, "UNSUPPORTED", ())
    with pytest.raises(ValueError, match="masks of its own|mixes tokens by"):
        build.use_mixers(model)
        build.check_decoder(model)


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
    with value_error("text model has use_bidirectional_attention, which is not supported"):
        build.build_model(config, COMPUTE)


def test_heads_too_large_for_a_back_end_are_said(tmp_path, picture_rows, monkeypatch, capfd):
    """At the start: these layers attend by sdpa."""
    write_family("gemma4_31b", tmp_path, picture_rows)
    for limit in (16, 8):
        monkeypatch.setattr(build, "LARGEST_HEAD", limit)
        start(tmp_path, tmp_path / "rows.jsonl")
        line = f"attention of layers with heads of 16: sdpa, as others end at {limit}"
        assert (line in capfd.readouterr().out) == (limit == 8)


@pytest.mark.parametrize(
    "kind, setting", [("granite", {"logits_scaling": 8.0}), ("cohere2", {"logit_scale": 0.5})]
)
def test_logits_that_are_not_plain_products_are_refused(kind, setting):
    config = AutoConfig.for_model(kind, **TEXT, vocab_size=50, **setting)
    with build.parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config)
    with value_error("changes the product of hidden states and lm_head"):
        build.check_head(model)


def test_a_head_with_a_bias_is_refused():
    config = AutoConfig.for_model("llama", **TEXT, vocab_size=50)
    model = AutoModelForCausalLM.from_config(config)
    build.check_head(model)
    model.lm_head = nn.Linear(32, 50)
    with value_error("changes the product of hidden states and lm_head"):
        build.check_head(model)


def with_scalars(monkeypatch) -> None:
    """Models that are built have one more number in each layer, as Gemma 4's: in the files, but not
    trained."""
    use_mixers = build.use_mixers

    def also(model):
        use_mixers(model)
        for layer in vlm.decoder(model).layers:
            layer.register_buffer("layer_scalar", torch.ones(()))

    monkeypatch.setattr(build, "use_mixers", also)


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
    assert vlm_weights.export(env.actor, env.processor, export) is None
    exported = load_file(export / "model.safetensors")
    assert exported.keys() == {*weights, *scalars}
    assert all(torch.equal(exported[name], scalars[name]) for name in scalars)
    save_weights(tmp_path, weights)
    with user_error("2 weights are in no file, the first: model.layers.0.layer_scalar"):
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
        with user_error(f"1 tensors of the files are no part of .* the first: {lost}"):
            start(tmp_path, data)


def test_what_is_wrong_with_weights_is_said_before_memory_is_taken(
    tmp_path, picture_rows, monkeypatch
):
    """Names, shapes and types; a large checkpoint takes minutes to read."""
    write_family("qwen3_vl_moe", tmp_path, picture_rows)
    data, weights = tmp_path / "rows.jsonl", load_file(tmp_path / "model.safetensors")
    start(tmp_path, data)
    monkeypatch.setattr(vlm_weights, "materialize", lambda *_: pytest.fail("memory is taken"))
    key = "model.visual.pos_embed.weight"
    stem = "model.language_model.layers.1.mlp"
    experts = weights[f"{stem}.experts.down_proj"]
    wrong = {
        "1 weights are in no file": {name: w for name, w in weights.items() if name != key},
        f"1 tensors of the files .* the first: {stem}.bias": weights
        | {f"{stem}.bias": torch.ones(2)},
        f"{key} is of type torch.int8; quantized weights": weights | {key: weights[key].char()},
        f"{key} is .* asks for": weights | {key: weights[key].T.contiguous()},
        "down_proj is .* asks for": weights | {f"{stem}.experts.down_proj": experts[:-1].clone()},
    }
    for message, tensors in wrong.items():
        save_weights(tmp_path, tensors)
        with user_error(message):
            start(tmp_path, data)


def test_matrices_of_experts_alone_may_be_transposed(tmp_path, picture_rows):
    """No other tensor of three dimensions."""
    write_family("internvl", tmp_path, picture_rows)
    weights = load_file(tmp_path / "model.safetensors")
    (key,) = [name for name in weights if name.endswith("position_embeddings")]
    save_weights(tmp_path, weights | {key: weights[key].mT.contiguous()})
    with user_error(r"position_embeddings is \(1, 32, 17\), .* asks for \(1, 17, 32\)"):
        start(tmp_path, tmp_path / "rows.jsonl")


@pytest.mark.parametrize("which", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotary_positions_that_change_in_some_layers_are_refused(which, rope):
    """Gemma has a type for each kind of layer."""
    config = make_config("gemma3", make_tokenizer("gemma3"))
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 2.0}
    factors["original_max_position_embeddings"] = 64
    config.text_config.rope_parameters[which] |= factors | {"rope_type": rope}
    with value_error("gemma3_text has rope_type longrope, or dynamic in some layers"):
        build.build_model(config, COMPUTE)


def test_a_quantized_part_is_refused(tmp_path, picture_rows):
    write_family("llava", tmp_path, picture_rows)
    config = read_json(tmp_path / "config.json")
    config["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    write_json(tmp_path / "config.json", config)
    with value_error("quantized checkpoints are not supported"):
        Processor(tmp_path)


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


def test_buffers_that_nothing_computes_are_refused(monkeypatch):
    made = importlib.import_module("transformers").LlamaForCausalLM.__init__

    def init(self, config):
        made(self, config)
        self.register_buffer("mean", self.lm_head.weight.mean(0), persistent=False)

    monkeypatch.setattr(importlib.import_module("transformers").LlamaForCausalLM, "__init__", init)
    with value_error("mean are neither in the files nor computed"):
        build.build_model(AutoConfig.for_model("llama", **TEXT), COMPUTE)
