"""launch/check_model.py on tiny checkpoints, and on one with a module that computes something else."""

import pytest
import torch

from common.model import build, layers
from conftest import marked, words
from families import PLAIN, TEXT_ONLY, write_family
from launch import check_model

DAILY = ("qwen3_5", "gemma3", "llama")
FURTHER = ("qwen3_vl_moe", "gemma4_26b_a4b", "mistral3")


@pytest.mark.parametrize("kind", marked((*DAILY, *FURTHER), DAILY))
def test_every_comparison_of_a_sound_checkpoint_passes(kind, tmp_path, picture_rows, capfd):
    try:
        write_family(kind, tmp_path, picture_rows)
    except ImportError:
        pytest.skip(f"this transformers wants torchvision for {kind}")
    assert check_model.main(words(tmp_path)) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "PASS"
    names = ("module by module", "log-probs of packs", "log-probs of the sampler")
    for name in (*names, "greedy samples", "weights of an export"):
        assert sum(line.startswith(f"ok   {name}") for line in lines) == 1, name
    ids = [line for line in lines if "prompt ids" in line]
    if kind in PLAIN:
        assert ids == ["ok   prompt ids: 0, at most 0"]
    else:
        assert len(ids) == (kind not in TEXT_ONLY)
    # a prompt with one drawn picture and one with two
    features = sum(line.startswith("ok   image features") for line in lines)
    assert features == (0 if kind in TEXT_ONLY else 2)
    assert ("not for this family: images, clips" in lines[-2]) == (kind in TEXT_ONLY)


def test_rows_of_a_user_are_read(tmp_path, picture_rows, capfd):
    write_family("gemma3", tmp_path, picture_rows)
    assert check_model.main(words(tmp_path, "--data", tmp_path / "rows.jsonl")) == 0
    with pytest.raises(SystemExit):
        check_model.main(words(tmp_path, "--data", tmp_path / "config.json"))
    assert "error" in capfd.readouterr().err


def test_a_wrong_module_is_named(tmp_path, picture_rows, monkeypatch, capfd):
    """As if one norm had been taken for another: the model computes on, without an error."""
    write_family("gemma3", tmp_path, picture_rows)
    monkeypatch.setattr(layers, "PLUS_ONE", ())
    assert check_model.main(words(tmp_path)) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "FAIL"
    (worst,) = [line for line in lines if "module by module" in line]
    assert worst.startswith("FAIL") and "norm" in worst
    assert any(line.startswith("FAIL log-probs of packs") for line in lines)


def other_activation(model) -> None:
    """Of no class of this project."""
    model.model.multi_modal_projector.act = torch.nn.Tanh()


def other_scale(model) -> None:
    """The module is transformers' own; what it asks of our attention is not."""
    model.model.language_model.layers[1].self_attn.scaling *= 2


def other_scale_in_the_tower(model) -> None:
    model.model.vision_tower.encoder.layers[1].self_attn.scale *= 2


def other_epsilon(model) -> None:
    model.model.language_model.layers[1].input_layernorm.eps = 1e-2


def other_theta(model) -> None:
    model.model.language_model.rotary_emb.inv_freq **= 1.1


class Swapped(layers.SwiGLU):
    """Takes the gate for what it opens, and the other way round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(layers.silu_product(self.up_proj(x), self.gate_proj(x)))


def gate_for_up(model) -> None:
    for module in model.modules():
        if isinstance(module, layers.SwiGLU):
            module.__class__ = Swapped


@pytest.mark.parametrize(
    "change, name",
    marked(
        [
            (other_activation, "multi_modal_projector.act"),
            (other_scale, "language_model.layers.1.self_attn"),
            (other_scale_in_the_tower, "vision_tower.encoder.layers.1.self_attn"),
            (other_epsilon, "language_model.layers.1.input_layernorm"),
            (other_theta, "language_model.rotary_emb"),
            (gate_for_up, "language_model.layers.0.mlp"),
        ]
    ),
)
def test_a_wrong_module_of_any_origin_is_named(
    change, name, tmp_path, picture_rows, monkeypatch, capfd
):
    write_family("llava", tmp_path, picture_rows)
    use_ours = build.use_ours

    def also(model):
        use_ours(model)
        change(model)

    monkeypatch.setattr(build, "use_ours", also)
    assert check_model.main(words(tmp_path)) == 1
    (worst,) = [line for line in capfd.readouterr().out.splitlines() if "module by module" in line]
    assert worst.startswith(f"FAIL module by module, model.{name}:")
