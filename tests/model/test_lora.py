"""LoRA adapters: the layer is W + (alpha / r) B A, the reference is the model without them, nothing
else is trained, saved or moved, and what is exported loads without us."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import train_grm_vl as grm
import train_ppo_vl as ppo
from common.model import adapters, build, fsdp, packs
from common.model.weights import export
from conftest import (
    ROUNDING,
    computing,
    hugging_face,
    inputs_of,
    keep_activations,
    marked,
    read_json,
    records,
    responses_of,
    rounding,
    same_tensors,
    seeded,
    start,
    take,
    token_logprobs,
    user_error,
    with_flags,
)
from families import write_family
from helpers import (
    changed,
    distance,
    flags,
    hand_batch,
    judge_flags,
    resumed,
    score,
    signed_gradients,
    stir_value_head,
    take_gradients,
    tensors,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("write_samples")
LORA = "--lora_rank 3 --lora_alpha 6"
TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def stir(module) -> None:
    """Adapters that act: B is zero at the start."""
    generator = seeded(7)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("lora_B"):
                parameter.to_local().copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


@pytest.fixture(scope="module")
def env(qwen25, picture_rows):
    """One rank's models with adapters that act, and hand-made samples."""
    env = start(qwen25, picture_rows, LORA, "--kl_coef 0.1")
    stir(env.actor), stir(env.critic)
    env.batch = hand_batch(env)
    return env


def adapted(folder: Path, module) -> tuple[torch.nn.Module, dict, dict[str, torch.Tensor]]:
    """Hugging Face's model, leaves A and B by our names, and the weights W + 2 B A by its own."""
    model = hugging_face(folder).requires_grad_(False)
    weights = {
        name.removeprefix("model."): value
        for name, value in weights_of(module.model).items()
        if ".lora_" in name
    }
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in weights_of(module).items()
        if ".lora_" in name
    }
    stems = {name.rpartition(".")[0] for name in leaves}
    assert {stem.rpartition(".")[2] for stem in stems} == TARGETS
    assert len(stems) == 7 * model.config.text_config.num_hidden_layers
    assert len(weights) == len(leaves) == 2 * len(stems)
    merged = {
        f"{stem.removeprefix('model.')}.weight": model.get_parameter(
            f"{stem.removeprefix('model.')}.weight"
        )
        + 2.0 * leaves[f"{stem}.lora_B"] @ leaves[f"{stem}.lora_A"]
        for stem in stems
    }
    return model, leaves, merged


def hugging_face_rows(env, model, merged: dict[str, torch.Tensor], **more):
    """For every sample its tokens, and the output and rows of Hugging Face's own forward with the
    given weights."""
    for index, tokens in responses_of(env.batch):
        inputs = inputs_of(env.prompts[index], tokens, env.processor) | {"use_cache": False} | more
        yield (
            tokens,
            torch.func.functional_call(model, merged, (), inputs),
            slice(-len(tokens) - 1, -1),
        )


def hugging_face_logprobs(env, model, merged: dict[str, torch.Tensor]) -> torch.Tensor:
    """(N,) log-probs of all samples."""
    parts = []
    for tokens, out, rows in hugging_face_rows(env, model, merged):
        logits = out.logits[0, rows]
        logits[:, list(env.processor.banned_ids)] = -torch.inf
        parts.append(token_logprobs(logits, tokens))
    return torch.cat(parts)


# ------------------------------------------------------------------------------------------------ one process
def test_forward_and_gradients_are_those_of_the_explicit_sum(env, qwen25):
    model, leaves, merged = adapted(qwen25, env.actor)
    expected = hugging_face_logprobs(env, model, merged)
    assert (score(env.actor, env.batch) - expected).abs().max() < ROUNDING
    signs = torch.linspace(-1, 1, len(expected))
    (signs * expected).sum().backward()
    actual = signed_gradients(env.actor, env.batch, signs)
    assert distance(actual, {name: leaf.grad for name, leaf in leaves.items()}) < ROUNDING
    model, leaves, merged = adapted(qwen25, env.critic)
    stir_value_head(env.critic)
    head = env.critic.value_head.weight.full_tensor().detach()[0]
    values = torch.cat(
        [
            out.hidden_states[-1][0, rows] @ head
            for _, out, rows in hugging_face_rows(env, model, merged, output_hidden_states=True)
        ]
    )
    values.mul(signs).sum().backward()
    assert (ppo.values_of(env.critic, env.batch) - values).abs().max() < 1e-4
    actual = signed_gradients(env.critic, env.batch, signs)
    assert actual.pop("value_head.weight").norm() > 0
    assert distance(actual, {name: leaf.grad for name, leaf in leaves.items()}) < ROUNDING


def test_a_model_begins_as_its_base(env, qwen25, picture_rows):
    base, fresh = start(qwen25, picture_rows), start(qwen25, picture_rows, LORA)
    expected = score(base.actor, env.batch)
    assert torch.equal(score(fresh.actor, env.batch), expected)
    assert (score(env.actor, env.batch) - expected).abs().max() > 0.1
    for layer in (m for m in fresh.actor.modules() if isinstance(m, adapters.LoRALinear)):
        values, bound = layer.lora_A.full_tensor(), layer.in_features**-0.5
        assert not layer.lora_B.full_tensor().any()
        assert 0.9 * bound < values.abs().max() <= bound
    again = start(qwen25, picture_rows, LORA, "--seed 1")
    drawn = [weights_of(part.actor) for part in (fresh, again)]
    assert all(
        torch.equal(value, drawn[1][name]) == ("lora_A" not in name)
        for name, value in drawn[0].items()
    )
    assert {
        name
        for name, p in fresh.critic.named_parameters()
        if p.requires_grad and ".lora_" not in name
    } == {"value_head.weight"}


def test_the_reference_is_the_model_without_adapters(env, qwen25, picture_rows):
    """Its log-probs, and the exact KL in the reward and in the loss, are those of a second copy of
    the base."""
    assert env.reference is env.actor
    other = start(qwen25, picture_rows, LORA, "--kl_coef 0.1 --reference_model", qwen25)
    assert other.reference is not other.actor
    assert not any(p.requires_grad for p in other.reference.parameters())
    batch, runs = env.batch.select(torch.arange(16)), []
    ppo.fill_logprobs_and_values(batch, ppo.Models(env.actor, None, env.reference), env.args)
    expected = score(other.reference, batch)
    assert torch.equal(batch.ref_logprobs, expected)
    assert batch.kl.abs().max() > 0.1
    # they act again
    assert torch.equal(score(env.actor, batch), batch.logprobs)
    args, batch.kl_coef = with_flags(env.args, kl_estimator="full", kl_in="loss"), 1.0
    weights = ppo.minibatch_weights(batch, range(4), batch.in_policy_loss, args)
    part = ppo.Minibatch(range(4), weights, weights, None)
    for checkpointing in (False, True):
        if checkpointing:
            build.recompute_layers(env.actor.model)
        for reference in (env.reference, other.reference):
            models = ppo.Models(env.actor, None, reference)
            ppo.fill_logprobs_and_values(batch, models, args)
            env.actor.train()
            with computing(env.actor, max_tokens_per_pack=110):
                for pack in packs.of_batch(env.actor.model, batch):
                    loss, _ = ppo.actor_loss(env.actor, models, pack, batch, part, args)
                    loss.backward()
            assert env.actor.training
            fsdp.reshard_root(reference)
            runs.append((batch.kl, take_gradients(env.actor)))
    keep_activations(env.actor.model)
    for kl, gradients in runs[1:]:
        assert torch.allclose(kl, runs[0][0], atol=ROUNDING)
        assert kl.max() > 0.01
        assert distance(gradients, runs[0][1]) < rounding(len(batch.tokens))
    # one rank holds what is frozen whole, and gathers nothing of it
    sharded = {name for name, p in env.actor.named_parameters() if hasattr(p, "to_local")}
    assert sharded == {name for name, p in env.actor.named_parameters() if p.requires_grad}


def test_export_is_merged_and_the_adapter_stands_beside_it(env, qwen25, tmp_path):
    export(env.actor, env.processor.save, tmp_path / "hf")
    expected = score(env.actor, env.batch)
    merged = hugging_face(tmp_path / "hf").requires_grad_(False)
    assert (hugging_face_logprobs(env, merged, {}) - expected).abs().max() < ROUNDING
    moved = changed(tensors(qwen25), tensors(tmp_path / "hf"))
    assert {key.split(".")[-2] for key in moved} == TARGETS
    assert not any("visual" in key for key in moved)
    # By the rules of PEFT: base_model.model.<module>.lora_A.weight, W + (lora_alpha / r) B A, whole
    # names or suffixes.
    config = read_json(tmp_path / "hf" / "adapter" / "adapter_config.json")
    weights = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    assert (config["r"], config["lora_alpha"], config["peft_type"], config["task_type"]) == (
        3,
        6,
        "LORA",
        "CAUSAL_LM",
    )
    base = hugging_face(config["base_model_name_or_path"])
    modules = [
        name for name, _ in base.named_modules() if name.endswith(tuple(config["target_modules"]))
    ]
    assert {
        f"base_model.model.{name}.lora_{part}.weight" for name in modules for part in "AB"
    } == weights.keys()
    with torch.no_grad():
        for name in modules:
            a, b = (weights[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            base.get_submodule(name).weight += config["lora_alpha"] / config["r"] * b @ a
    assert (
        hugging_face_logprobs(env, base.requires_grad_(False), {}) - expected
    ).abs().max() < ROUNDING
    # again, over the first
    export(env.actor, env.processor.save, tmp_path / "hf")


def test_the_adapter_of_a_critic_names_its_own_base(qwen25, picture_rows, tmp_path):
    """Not the actor's, to which PEFT would add it without a word."""
    other = shutil.copytree(qwen25, tmp_path / "other")
    env = start(qwen25, picture_rows, LORA, "--critic_model", other)
    for module, base in ((env.actor, qwen25), (env.critic, other)):
        export(module, env.processor.save, tmp_path / "hf")
        config = read_json(tmp_path / "hf" / "adapter" / "adapter_config.json")
        assert config["base_model_name_or_path"] == str(base)


# ------------------------------------------------------------------------------------------------ whole runs
RUN = f"{LORA} --steps 4 --minibatches 2 --kl_coef 0.1 --actor_lr 1e-2"


@pytest.mark.slow
def test_a_run_resumes_bit_by_bit_from_adapters_alone(qwen25, task, tmp_path):
    whole = resumed(qwen25, task, tmp_path, RUN)
    first, *_, last = records(whole)
    assert first["train/kl"] < rounding(16) < 1e-3 < last["train/kl"]
    assert first["train/sampler_gap"] < ROUNDING
    one, two = (
        tensors(tmp_path / name / "export" / "step-4" / "adapter") for name in ("whole", "parts")
    )
    assert same_tensors(one, two)
    saved = tensors(whole / "checkpoints" / "step-4")
    assert saved
    assert all(".lora_" in key or "value_head" in key for key in saved)
    assert {key.split(".")[1] for key in saved} == {"model", "optimizer"}
    assert {key.split(".")[0] for key in saved} == {"actor", "critic"}
    with user_error("is of another run: .*--lora_alpha 6 -> 7"):
        ppo.main(flags(qwen25, task, tmp_path / "parts", RUN, "--lora_alpha 7"))


def test_a_judge_with_adapters(qwen25, judgements, tmp_path):
    line = judge_flags(qwen25, judgements, tmp_path, LORA, "--steps 3 --lr 1e-2 --eval_every 0")
    grm.main(line)
    assert records(tmp_path)[-1]["train/loss"] < records(tmp_path)[0]["train/loss"]
    moved = changed(tensors(qwen25), tensors(tmp_path / "export" / "step-3"))
    assert {key.split(".")[-2] for key in moved} == TARGETS
    assert (tmp_path / "export" / "step-3" / "adapter" / "adapter_model.safetensors").exists()
    assert all(".lora_" in key for key in tensors(tmp_path / "checkpoints" / "step-3"))


OF_FAMILY = {
    "qwen3_vl_moe": TARGETS - {"gate_proj", "up_proj", "down_proj"},
    "qwen3_5": TARGETS | {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"},
}
OF_FAMILY["glm4v"] = TARGETS - {"gate_proj", "up_proj"} | {"gate_up_proj"}
PER_LAYER = {"per_layer_input_gate", "per_layer_projection"}
OF_FAMILY["gemma4_e2b"] = TARGETS | PER_LAYER
OF_FAMILY["qwen3_5_moe"] = OF_FAMILY["qwen3_5"] | {"shared_expert_gate"}


TUNED = ("qwen3_5_moe", "gemma3", "llama", "qwen3_vl_moe", "glm4v", "gemma4_e2b")


@pytest.mark.parametrize("kind", marked(TUNED, TUNED[:3]))
def test_other_families(kind, picture_rows, tmp_path, capfd):
    """Experts, linear attention, windows, another name of the decoder, text only with tied
    embeddings: sampled = trained = exported; that experts have no adapters is said once."""
    try:
        write_family(kind, tmp_path / "base", picture_rows)
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} wants torchvision for {kind}")
    env = start(tmp_path / "base", tmp_path / "base" / "rows.jsonl", LORA)
    printed = capfd.readouterr().out
    experts = 2 * kind.endswith("_moe")
    line = f"--lora_rank leaves the experts and routers of {experts} layers as they are"
    assert printed.count(line) == printed.count("warning") == bool(experts)
    stir(env.actor)
    batch = ppo.rollout(env.actor, take(env), env.sampling, 2)
    assert (score(env.actor, batch) - batch.logprobs).abs().max() < ROUNDING
    export(env.actor, env.processor.save, tmp_path / "hf")
    other = start(tmp_path / "hf", tmp_path / "base" / "rows.jsonl", "--advantage grpo")
    assert (score(other.actor, batch) - batch.logprobs).abs().max() < ROUNDING
    targets = {name.rpartition(".")[2] for name in env.actor.model.setup.adapter["target_modules"]}
    assert targets == OF_FAMILY.get(kind, TARGETS)
