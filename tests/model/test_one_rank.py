"""One rank that holds all shards keeps frozen weights whole, outside of FSDP: every number is the one
that a gathered copy gives, and a run goes on on other numbers of ranks."""

import pytest
import torch

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common.model import fsdp, vlm, weights
from conftest import (
    ROUNDING,
    assert_same_records,
    marked,
    records,
    reproducible,
    same_tensors,
    save_weights,
    seeded,
    start,
)
from helpers import (
    MOVED,
    asleep,
    changed,
    evaluation,
    flags,
    judge_flags,
    samples_of_every_step,
    tensors,
)

pytestmark = pytest.mark.usefixtures("write_samples")

IN_LOSS = "--kl_coef 0.1 --kl_in loss --kl_estimator full --dtype bfloat16 --offload all --steps 2"
MOVING = f"{IN_LOSS} --reference_every 1 --ema_beta 0.6 --save_every 1 --keep_last 4"
RUNS = {
    "adapters": f"{IN_LOSS} --lora_rank 3 --actor_lr 1e-2 --critic_lr 1e-2 --teacher_model TEACHER",
    "moving reference": f"{MOVING} --teacher_model ema --teacher_in loss --advantage grpo",
}


def gathered(module: vlm.Wrapper, shards: int) -> set:
    """`whole_parameters` of several ranks."""
    return set() if module.model.setup.trains_vision else set(vlm.tower_parameters(module.model))


@pytest.mark.parametrize("name", marked(RUNS))
def test_what_is_held_whole_computes_what_a_gathered_copy_would(
    qwen25, task, tmp_path, monkeypatch, name
):
    """Reference, teacher and adapters' base in bfloat16: every metric and every weight, bit for bit. What
    rests in host memory cannot be computed with."""
    monkeypatch.setattr(fsdp, "moved_to", asleep)
    folders = []
    for way in (vlm.whole_parameters, gathered):
        monkeypatch.setattr(vlm, "whole_parameters", way)
        MOVED.clear()
        out = tmp_path / way.__name__
        ppo.main(flags(qwen25, task, out, RUNS[name].replace("TEACHER", str(qwen25))))
        assert len(MOVED) > 100
        folders.append(out)
    whole, copied = folders
    assert_same_records(records(whole), records(copied))
    assert same_tensors(tensors(whole / "export" / "step-2"), tensors(copied / "export" / "step-2"))


def test_a_judge_with_adapters_is_trained_and_evaluated_as_with_a_gathered_copy(
    qwen25, judgements, tmp_path, monkeypatch
):
    """train_grm_vl.py in bfloat16: every metric, every judgement and every merged weight."""
    whole_parameters, held, folders = vlm.whole_parameters, [], []

    def noted(module: vlm.Wrapper, shards: int) -> set:
        held.append(whole_parameters(module, shards))
        return held[-1]

    for way in (noted, gathered):
        monkeypatch.setattr(vlm, "whole_parameters", way)
        folders.append(tmp_path / way.__name__)
        flags = "--lora_rank 3 --dtype bfloat16 --lr 1e-2 --steps 1 --save_every 0"
        grm.main(judge_flags(qwen25, judgements, folders[-1], flags))
    whole, copied = folders
    assert_same_records(records(whole), records(copied))
    assert evaluation(whole, 1) == evaluation(copied, 1)
    exports = [tensors(folder / "export" / "step-1") for folder in folders]
    assert same_tensors(*exports)
    assert changed(tensors(qwen25), exports[0])
    (frozen,) = held
    assert sum(p.numel() for p in frozen) > 1e5


def test_an_export_holds_the_files_values(qwen25, picture_rows, tmp_path):
    """A checkpoint in float32 that computes in bfloat16: what is frozen is exported byte for byte, and
    adapters are added to the values of the files, not to rounded ones."""
    values = tensors(qwen25)
    for file in qwen25.iterdir():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    # none of which bfloat16 holds
    values = {key: value.float() + 1e-4 for key, value in values.items()}
    save_weights(tmp_path / "model", values)
    env = start(tmp_path / "model", picture_rows, "--lora_rank 2 --lora_alpha 6 --dtype bfloat16")
    added = {}
    with torch.no_grad():
        for name, layer in env.actor.model.named_modules():
            if hasattr(layer, "lora_B"):
                assert layer.weight.dtype == torch.bfloat16
                layer.lora_B.to_local().normal_(std=0.2, generator=seeded(1))
                added[name] = 3 * layer.lora_B.full_tensor() @ layer.lora_A.full_tensor()
    weights.export(env.actor, env.processor.save, tmp_path / "hf")
    exported = tensors(tmp_path / "hf")
    moved = changed(values, exported)
    assert len(moved) == len(added) > 0
    for name, change in added.items():
        place = name.partition("layers.")[2] + ".weight"
        (key,) = (key for key in moved if key.partition("layers.")[2] == place)
        expected = values[key] + change
        assert (exported[key] - expected).abs().max() < ROUNDING
    assert exported.keys() == values.keys()


@pytest.mark.slow
def test_a_run_goes_on_on_other_numbers_of_ranks(qwen25, task, tmp_path):
    """A step on one rank, the next on two that shard the reference, one on two with a copy each, and one
    on one rank again: the steps of one rank alone. Float32, as ranks round differently."""
    moving = MOVING.replace("bfloat16", "float32").replace("--steps 2", "--steps 4")
    ppo.main(flags(qwen25, task, tmp_path / "alone", moving))
    alone = {record["step"]: reproducible(record) for record in records(tmp_path / "alone")}
    before = tmp_path / "alone" / "checkpoints" / "step-1"
    for step, world, more in ((2, 2, ""), (3, 2, "--hsdp 1"), (4, 1, "")):
        out = tmp_path / f"step {step}"
        line = flags(qwen25, task, out, moving.replace("--steps 4", f"--steps {step}"))
        line += [*more.split(), "--resume", str(before)]
        ranks.run(ppo.main, line, world=world, patches=[(samples_of_every_step,)])
        before = out / "checkpoints" / f"step-{step}"
        record = {record["step"]: reproducible(record) for record in records(out)}[step]
        assert record.keys() == alone[step].keys()
        for name, value in alone[step].items():
            assert record[name] == pytest.approx(value, abs=1e-4, rel=1e-4), (step, name)
    for kind in ("reference.model", "actor.optimizer"):
        assert any(name.startswith(kind) for name in tensors(before))
