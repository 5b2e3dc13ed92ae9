"""A checkpoint that is loaded and exported is the one that came: keys, types, layouts and files; what was
trained has its new values, rounded once, and nothing else has."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.data.folder import SMALL_FILES
from common.model.adapters import LoRALinear
from common.model.weights import digest_files, export
from conftest import marked, read_json, same_tensors, save_weights, seeded, start, write_checkpoint
from families import KINDS, TEXT_ONLY, write_family
from helpers import tensors

# of each layout one: renamed keys, experts in one tensor, one by one and transposed, tied heads
DAILY = ("qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe", "internvl_moe", "gemma4_e2b", "llava", "llama")
# float32 among bfloat16, as published: decays and norms of linear attention, biases of routers
WIDE = ("A_log", "linear_attn.norm.weight", "e_score_correction_bias")
BY = 0.25  # how far each weight is moved


def written(kind: str, folder, picture_rows: str):
    """A family's checkpoint, in bfloat16 but for what is float32 in published ones."""
    try:
        write_family(kind, folder, picture_rows)
    except ImportError:
        pytest.skip(f"this transformers wants torchvision for {kind}")


def in_bfloat16(folder) -> None:
    weights = load_file(folder / "model.safetensors")
    save_weights(
        folder,
        {key: w if key.endswith(WIDE) else w.bfloat16() for key, w in weights.items()}
        | {"mtp.norm.weight": torch.ones(3)},
    )


def move(module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.to_local().add_(BY)


def exported(env, folder) -> dict[str, torch.Tensor]:
    assert export(env.actor, env.processor.save, folder) is None
    return tensors(folder)


def assert_same(one: dict, other: dict) -> None:
    assert same_tensors(one, other)
    assert all(one[key].dtype == other[key].dtype for key in one)


@pytest.mark.parametrize("kind", marked(KINDS, DAILY))
def test_every_kind_comes_back_key_by_key_and_type_by_type(kind, tmp_path, picture_rows):
    """In float32 and in bfloat16; every trained weight has moved by the same, in its place."""
    written(kind, tmp_path, picture_rows)
    data, out = tmp_path / "rows.jsonl", tmp_path / "export"
    for change in (lambda folder: None, in_bfloat16):
        change(tmp_path)
        before = tensors(tmp_path)
        trains = "--train_vision" * (kind not in TEXT_ONLY)
        env = start(tmp_path, data, f"--advantage grpo {trains}")
        assert_same(exported(env, out), before)
        for path in tmp_path.iterdir():
            if any(path.match(pattern) for pattern in SMALL_FILES):
                assert (out / path.name).read_bytes() == path.read_bytes(), path.name
        move(env.actor)
        after = exported(env, out)
        assert [after[key].dtype for key in before] == [w.dtype for w in before.values()]
        still = {key for key in before if torch.equal(after[key], before[key])}
        moved = {
            key: (before[key].float() + BY).to(before[key].dtype) for key in before.keys() - still
        }
        assert all(torch.equal(after[key], moved[key]) for key in moved)
        trained = sum(p.numel() for p in env.actor.parameters() if p.requires_grad)
        assert sum(w.numel() for w in moved.values()) == trained


@pytest.mark.parametrize("kind", marked((*DAILY, "qwen3_5", "glm4v_moe", "gemma4_26b_a4b"), DAILY))
def test_adapters_are_added_to_the_values_in_the_files(kind, tmp_path, picture_rows):
    """Which are bfloat16, and rounded once; the adapter stands beside them, and the base does not."""
    written(kind, tmp_path, picture_rows)
    in_bfloat16(tmp_path)
    before, out = tensors(tmp_path), tmp_path / "export"
    flags = "--advantage grpo --lora_rank 2 --lora_alpha 6 --dtype bfloat16"
    env = start(tmp_path, tmp_path / "rows.jsonl", flags)
    assert_same({key: w for key, w in exported(env, out).items() if ".lora_" not in key}, before)
    for layer in (part for part in env.actor.modules() if isinstance(part, LoRALinear)):
        with torch.no_grad():
            layer.lora_B.to_local().normal_(std=0.2, generator=seeded(1))
    assert export(env.actor, env.processor.save, out) is None
    after, adapter = tensors(out), load_file(out / "adapter" / "adapter_model.safetensors")
    sums = []
    for name in read_json(out / "adapter" / "adapter_config.json")["target_modules"]:
        a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        sums.append(b @ a * 3.0)  # in this order, to the last digit
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert len(changed) == len(sums) > 0
    for key in changed:
        assert any(
            term.shape == before[key].shape
            and torch.equal(after[key], (before[key].float() + term).to(before[key].dtype))
            for term in sums
        ), key


@pytest.mark.parametrize("tied", [False, True])
def test_files_with_an_index_keep_their_names(tied, tmp_path, picture_rows):
    source = write_checkpoint(tmp_path / "source", "qwen2_5_vl", tie=tied, shard_size="200KB")
    env, out = start(source, picture_rows, "--advantage grpo"), tmp_path / "export"
    assert_same(exported(env, out), tensors(source))
    names = [{path.name for path in folder.glob("model*")} for folder in (source, out)]
    assert names[0] == names[1]
    assert len(names[0]) > 3
    index = "model.safetensors.index.json"
    assert read_json(out / index) == read_json(source / index)
    for name in names[0] - {index}:
        assert load_file(out / name).keys() == load_file(source / name).keys()


@pytest.mark.parametrize(
    "named, shard_size",
    [("", "200KB"), ("", "5GB"), ("score", "200KB"), ("value_head", "5GB")],
)
def test_a_value_head_is_written_and_read(named, shard_size, tmp_path, picture_rows):
    """By the name that it came with; a new one in the last file, and in the index."""
    actor = write_checkpoint(tmp_path / "actor", "qwen2_5_vl", shard_size=shard_size)
    shutil.copytree(actor, source := tmp_path / "source")
    if named:
        last = sorted(source.glob("*.safetensors"))[-1]
        head = {f"{named}.weight": torch.full((1, 64), 0.5), f"{named}.bias": torch.tensor([2.0])}
        save_file(load_file(last) | head, last, metadata={"format": "pt"})
    env = start(actor, picture_rows, "--critic_model", source)
    weight, offset = env.critic.value_head.weight, env.critic.value_head.offset
    assert weight.full_tensor().unique().tolist() == [0.5 if named else 0.0]
    assert offset.tolist() == [2.0 if named else 0.0]
    with torch.no_grad():
        weight.to_local().fill_(3.0)
    out = tmp_path / "export"
    assert export(env.critic, env.processor.save, out) is None
    before, after = tensors(source), tensors(out)
    before.pop(f"{named}.weight", None)
    assert after.pop(f"{named or 'score'}.weight").unique().tolist() == [3.0]
    assert_same(after, before)
    again = start(actor, picture_rows, "--critic_model", out).critic.value_head.weight
    assert again.full_tensor().unique().tolist() == [3.0]


def test_what_the_files_say_decides_on_types_and_not_the_config(tmp_path, picture_rows):
    source = write_checkpoint(tmp_path / "source", "qwen2_5_vl")
    config = read_json(source / "config.json") | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    before = tensors(source)
    assert {w.dtype for w in before.values()} == {torch.float32}
    env = start(source, picture_rows, "--advantage grpo")
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    key = name.replace("language_model.", "")
    ours = env.actor.model.get_parameter(name).full_tensor()
    assert not torch.equal(before[key], before[key].bfloat16().float())
    assert torch.equal(ours, before[key])
    assert_same(exported(env, tmp_path / "export"), before)


@pytest.mark.parametrize("kind", marked(("internvl_moe", "glm4v_moe"), ("internvl_moe",)))
def test_experts_in_float32_beside_bfloat16_are_not_rounded(kind, tmp_path, picture_rows):
    """All experts of a layer, or one of them: they are stored one by one, and trained as one tensor."""
    written(kind, tmp_path, picture_rows)
    wide = load_file(tmp_path / "model.safetensors")
    in_bfloat16(tmp_path)
    narrow = load_file(tmp_path / "model.safetensors")
    last = max(
        re.search(r"layers\.(\d+)\..*\.experts\.\d", key)[1] for key in narrow if ".experts." in key
    )
    for part in (rf"layers\.{last}\..*\.experts\.\d+\.", rf"layers\.{last}\..*\.experts\.0\."):
        full = {key: wide[key] for key in narrow if re.search(part, key)}
        assert full and not any(torch.equal(w, w.bfloat16().float()) for w in full.values())
        save_weights(tmp_path, narrow | full)
        before = tensors(tmp_path)
        env = start(tmp_path, tmp_path / "rows.jsonl", "--advantage grpo")
        assert_same(exported(env, tmp_path / "export"), before)


def test_files_that_are_gone_or_others_are_a_message(tmp_path, picture_rows):
    source = write_checkpoint(tmp_path / "source", "qwen2_5_vl")
    env = start(source, picture_rows, "--advantage grpo")
    weights = tensors(source)
    lost = "model.layers.0.mlp.up_proj.weight"
    save_weights(source, {key: w for key, w in weights.items() if key != lost})
    problem = export(env.actor, env.processor.save, tmp_path / "export")
    assert problem == f"the weights in {source} have changed since the run started"
    setup = env.actor.model.setup
    setup.digest = digest_files([source / "model.safetensors"])
    problem = export(env.actor, env.processor.save, tmp_path / "export")
    assert problem == f"{source} has no {lost}, which was trained"
    (source / "model.safetensors").unlink()
    assert "No such file" in export(env.actor, env.processor.save, tmp_path / "export")
    assert not list(tmp_path.glob("export*"))
    assert not list(tmp_path.glob(".export*"))
