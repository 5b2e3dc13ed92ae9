"""What several test files need: small tasks and runs, hand-made samples, distances, rows."""

import base64
import dataclasses
import io
import json
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen3VLConfig

import ranks
import train_ppo_vl as ppo
from common import logging, logprobs, losses
from common.buffers import FIELDS, Batch, Pack
from common.data.processor import Processor
from common.flags import DataArgs
from common.memory import memory
from common.model import fsdp, packs, vlm
from common.model.build import build_model
from common.model.vlm import Compute, UpdateSetting, Wrapper
from common.model.weights import materialize, read_weights, shard_of
from common.rewards import sources
from common.user_code import in_thread
from conftest import (
    Tensors,
    assert_same_records,
    read_json,
    read_rows,
    records,
    reproducible,
    rounding,
    same_tensors,
    save_weights,
    seeded,
    start,
    take,
    words,
    write_json,
)
from launch import plan

REWARD = '''
def letters(prompts, responses, references, labels, images):
    """Depends on the response, so that samples of one prompt differ."""
    share = [sum(c in "aeiou " for c in r) / max(1, len(r)) for r in responses]
    reward = [s + 0.1 * len(p) for s, p in zip(share, images)]
    return {"reward": reward, "accuracy": [min(1.0, s / 0.3) for s in share]}

def of_rows(prompts, responses, references, labels, images, rows):
    """The same, of functions that ask for the rows: each sample has its own, on every rank."""
    assert all(row["prompt"] in prompt and len(row["images"]) == len(pictures) and row["answer"] == reference
               for row, prompt, pictures, reference in zip(rows, prompts, images, references, strict=True))
    return letters(prompts, responses, references, labels, images)

def fails(prompts, responses, references, labels, images):
    if "row 2" in prompts[0] or len(prompts) > 1 and any("row 2" in p for p in prompts):
        raise ZeroDivisionError("the reward of row 2")
    return [0.0] * len(responses)

def infinite(prompts, responses, references, labels, images):
    return [float("inf")] * len(responses)

def late(prompts, responses, references, labels, images):
    import time
    time.sleep(5)
'''


def samples_of_every_step() -> None:
    """Not of every tenth one only, which a run of a few steps does not reach."""
    logging.RunLogger.shows_samples = lambda log, step, last: log.log_samples > 0


def flags(checkpoint: Path, task: Path, out: Path, *more: str | Path) -> list[str]:
    """Of a run of one step, without a checkpoint; a recipe among ``more`` stands in for its reward."""
    more = words(*more)
    reward = [] if "--reward_recipe" in more else ["--reward", f"{task / 'reward.py'}:letters"]
    return words(
        "--model",
        checkpoint,
        "--data",
        task / "train.jsonl",
        "--out",
        out,
        *reward,
        "--max_prompt_tokens 512 --max_new_tokens 6 --max_tokens_per_pack 600 --prompts_per_step 4 "
        "--samples_per_prompt 3 --steps 1 --actor_lr 1e-3 --save_every 0",
        "--",
        *more,
    )


def train(checkpoint: Path, task: Path, out: Path, *more: str | Path) -> list[dict]:
    """A whole run in this process; the records of its steps."""
    ppo.main(flags(checkpoint, task, out, *more))
    return records(out)


def cut_back(whole: Path, folder: Path, step: int) -> Path:
    """A copy of a run that has ended before any later step was saved or exported."""
    shutil.copytree(whole, folder, symlinks=True)
    for path in [*folder.glob("checkpoints/step-*"), *folder.glob("export*/step-*")]:
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return folder


def resumed(checkpoint: Path, task: Path, folder: Path, *more: str | Path) -> Path:
    """A run of four steps, and one that goes on from its second, are the same in every bit; the
    folder of the first."""
    whole, parts = folder / "whole", folder / "parts"
    train(checkpoint, task, whole, *more, "--steps 4 --save_every 2")
    train(checkpoint, task, cut_back(whole, parts, 2), *more, "--steps 4 --save_every 2")
    assert_same_records(records(whole), records(parts))
    for place in ("export", "checkpoints"):
        assert same_tensors(tensors(whole / place / "step-4"), tensors(parts / place / "step-4"))
    return whole


def samples_of(out: Path, name: str) -> list[dict]:
    return read_rows(out / "samples" / f"{name}.jsonl")


def samples_of_steps(out: Path) -> list[dict]:
    """The samples of all training steps, in their order."""
    return [
        row for path in sorted((out / "samples").glob("step-*.jsonl")) for row in read_rows(path)
    ]


def tensors(folder: Path) -> Tensors:
    """All tensors of a checkpoint folder by their key in the files."""
    return {
        key: value
        for file in sorted(folder.glob("*.safetensors"))
        for key, value in load_file(file).items()
    }


def change_weight(
    folder: Path, change: Callable, name: str = "layers.0.mlp.up_proj.weight"
) -> torch.Tensor:
    """Change a tensor of a checkpoint in place, the first whose name ends so; it as it is then."""
    weights = tensors(folder)
    weight = next(value for key, value in weights.items() if key.endswith(name))
    change(weight)
    save_weights(folder, weights)
    return weight


def hand_batch(env) -> Batch:
    """Four random responses to each of the four prompts, one of them empty; all fields that an
    update reads."""
    generator = seeded(0)
    lengths = [5, 0, 9, 1, 7, 3, 12, 2, 4, 6, 8, 1, 2, 2, 11, 10]
    tokens = sum(lengths)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(tokens, generator=generator) * scale

    most = env.processor.config.text_config.vocab_size - 8
    ids = torch.randint(4, most, (tokens,), generator=generator).split(lengths)
    batch = take(env).with_responses((k // 4, tokens) for k, tokens in enumerate(ids))
    batch.truncated = torch.zeros(16, dtype=torch.bool)
    batch.sampling = env.sampling
    batch.in_policy_loss = torch.ones(tokens, dtype=torch.bool)
    batch.advantages, batch.returns, batch.values = noise(1.0), noise(1.0), noise(0.1)
    with torch.no_grad(), fsdp.unsharded(env.actor):
        vlm.compute_features(env.actor.model, batch)
    batch.logprobs = score(env.actor, batch)
    batch.old_logprobs = batch.logprobs + noise(0.3)  # far enough that both clips and dual clip act
    batch.old_logprobs[::7] = batch.logprobs[::7] - 2.0
    batch.ref_logprobs = batch.old_logprobs + noise(0.5)
    batch.kl = losses.kl_penalty("k3", batch.old_logprobs, batch.ref_logprobs)
    return batch


def score(policy: ppo.Policy, batch: Batch) -> torch.Tensor:
    """(N,) log-probs of the batch's tokens, as training computes them."""
    return ppo.logprobs_of(policy, batch)


HAND_FLAGS = (
    "--kl_coef 0.1 --kl_in loss --kl_estimator k3+ --entropy_coef 0.01 --temperature 0.7 --min_new_tokens 2 "
    "--clip_low 0.15 --clip_high 0.25 --dual_clip 2.5 --value_clip 0.3"
)


def stir_value_head(critic: ppo.Critic) -> None:
    """It begins at zero."""
    with torch.no_grad():
        weight = critic.value_head.weight.to_local()
        weight.copy_(torch.randn(weight.shape, generator=seeded(5)) / 8)


def hand_env(checkpoint: Path | str, rows: str, dtype: torch.dtype = torch.float32):
    """Models with a random value head, and hand-made samples."""
    env = start(checkpoint, rows, HAND_FLAGS)
    for module in (env.actor, env.critic, env.reference):
        module.to(dtype)
    stir_value_head(env.critic)
    env.batch = hand_batch(env)
    return env


def gradient(args: ppo.Args, module, batch: Batch) -> tuple[Tensors, int]:
    """Gradient of the loss of all samples by parameter, accumulated over packs as in an update; the
    number of packs."""
    weights = ppo.minibatch_weights(batch, range(4), batch.in_policy_loss, args)
    part = ppo.Minibatch(range(4), weights, weights, None)
    batch = dataclasses.replace(batch, kl_coef=args.kl_coef)
    count = 0
    for row in packs.of_batch(module.model, batch, range(4)):
        if isinstance(module, ppo.Critic):
            loss, _ = ppo.critic_loss(module, row, batch, part, args)
        else:
            loss, _ = ppo.actor_loss(module, None, row, batch, part, args)
        ppo.backward(loss)
        count += 1
    return take_gradients(module), count


def take_gradients(module) -> Tensors:
    """By parameter; the module has none afterwards."""
    gradients = {
        name: p.grad.full_tensor() for name, p in module.named_parameters() if p.requires_grad
    }
    module.zero_grad(set_to_none=True)
    return gradients


def signed_gradients(module, batch: Batch, signs: torch.Tensor, parts=(None,)) -> Tensors:
    """Of the sum of signs x outputs over all tokens, accumulated over the packs of each part of the
    prompts."""
    for groups in parts:
        for pack in packs.of_batch(module.model, batch, groups):
            is_critic = isinstance(module, ppo.Critic)
            out = module(pack) if is_critic else module(pack, batch.sampling)[0]
            (signs[pack.flat] * out).sum().backward()
    return take_gradients(module)


def trainable(module, args, lr: float) -> fsdp.Trainable:
    return fsdp.Trainable(module, ppo.adamw(module, lr, args), args)


class Caught(fsdp.Trainable):
    """Keeps the gradient of each update, by parameter, before it would be clipped, and changes no
    weight. It is its own optimizer."""

    def __init__(self, module, args):
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.gradients, self.state, self.param_groups = [], {}, [{"lr": 1e-3, "params": trained}]
        super().__init__(module, self, dataclasses.replace(args, max_grad_norm=0.0))
        self.gradients.clear()  # of the step that creates the state

    def step(self) -> None:
        self.gradients.append(take_gradients(self.module))

    def zero_grad(self) -> None:
        self.module.zero_grad()


def changed(before: Tensors, after: Tensors) -> set[str]:
    """The names of those that are not the same in every bit."""
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def assert_close_weights(one: Path, other: Path) -> None:
    """Of two exports: the same but for the order of additions."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    for key in ours:
        bound = 1e-3 * ours[key].norm() + rounding(16)
        assert (ours[key] - theirs[key]).norm() <= bound, key


def distance(actual: Tensors, expected: Tensors) -> float:
    """Norm of the difference over the norm, all parameters together."""
    assert actual.keys() == expected.keys()
    difference = sum(
        float((actual[name] - expected[name]).double().square().sum()) for name in expected
    )
    return (
        difference / sum(float(value.double().square().sum()) for value in expected.values())
    ) ** 0.5


def fresh(qwen25, picture_rows, *more: str):
    """Own models and optimizer, real samples with scores; ready for `update_actor`."""
    env = start(qwen25, picture_rows, "--minibatches 2 --epochs 2 --actor_lr 1e-2", *more)
    env.trained = trainable(env.actor, env.args, 1e-2)  # before any forward, as `main` does
    env.batch = hand_batch(env)
    env.batch.old_logprobs = env.batch.logprobs
    return env


def update_actor(env, args: ppo.Args | None = None) -> dict[str, float]:
    """Step 1 of a run without a KL and without --ptx_data."""
    return ppo.update_actor(env.trained, None, env.batch, 1, None, args or env.args)


def weights_of(module) -> Tensors:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).clone()
        for name, p in module.named_parameters()
    }


def on_a_gpu(monkeypatch) -> None:
    """As if this were an H100 that has taken 1 s per stage, for what `performance` says of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    seconds = dict.fromkeys(("rollout", "update_actor", "update_critic"), 1.0)
    monkeypatch.setattr(logging.timer, "_seconds", seconds)


TALKING = (
    "--max_new_tokens 24 --max_reply_tokens 200 --max_tokens_per_pack 900 "
    '--stop_strings ["a","e","r"] --env_workers 3'
)


def launch(world: int, *lines: list[str]) -> None:
    """Whole runs on so many ranks, one after the other."""
    runs = [(ppo.main, line) for line in lines]
    ranks.run(ranks.in_turn, *runs, world=world, patches=[(samples_of_every_step,)])


def assert_same_run(one: Path, other: Path) -> None:
    """The same samples and, within 1e-4, the same metrics but for those of speed and memory."""
    files = sorted(path.name for path in (one / "samples").glob("*.jsonl"))
    assert files == sorted(path.name for path in (other / "samples").glob("*.jsonl"))
    for file in files:
        for first, second in zip(
            samples_of(one, file[:-6]), samples_of(other, file[:-6]), strict=True
        ):
            for name in ("advantage", "reward", "components"):
                assert second.pop(name, 0) == pytest.approx(first.pop(name, 0), abs=1e-4, rel=1e-4)
            assert_same_tokens(second.pop("per_token", {}), first.pop("per_token", {}))
            # probabilities, three digits
            assert bool(second.pop("judgement", "")) == bool(first.pop("judgement", ""))
            assert first == second
    for first, second in zip(records(one), records(other), strict=True):
        assert first.keys() == second.keys()
        for name in reproducible(first):
            assert second[name] == pytest.approx(first[name], abs=1e-4, rel=1e-4), (
                first["step"],
                name,
            )


def assert_same_tokens(one: dict, other: dict) -> None:
    """The same texts, and the same numbers of three digits but for the last one."""
    assert one.keys() == other.keys()
    for name, column in one.items():
        if name in ("text", "turns"):
            assert column == other[name]
        else:
            pair = np.broadcast_arrays(column, other[name])
            np.testing.assert_allclose(*pair, rtol=2e-2, atol=1e-4)


def random_batch(
    rng: np.random.Generator, prompts: int = 6, most: int = 5, longest: int = 9, shortest: int = 0
) -> Batch:
    """Random samples (some prompts may have none), in (prompt, number) order, every field filled."""
    counts = rng.integers(0, most + 1, prompts)
    counts[rng.integers(prompts)] = most  # never none at all
    lengths = rng.integers(shortest, longest + 1, counts.sum())
    samples, tokens = len(lengths), int(lengths.sum())

    def noise(size: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=size).astype(np.float32))

    batch = Batch(
        prompts=prompts_of(range(1, prompts + 1)),
        draws=list(range(50, 50 + prompts)),
        owners=[g % 3 for g in range(prompts)],
        dropped=[g for g in range(prompts) if counts[g] == 0],
        sampling="as it was",
        patches={g: object() for g in range(0, prompts, 2)},
        features={g: object() for g in range(1, prompts, 2)},
        positions={g: object() for g in range(prompts)},
        prompt_index=torch.from_numpy(np.repeat(np.arange(prompts), counts)),
        sample_number=torch.from_numpy(np.concatenate([np.arange(n) for n in counts])),
        own_lengths=torch.from_numpy(lengths),
        truncated=noise(samples) > 0,
        tokens=torch.from_numpy(rng.integers(4, 1000, tokens)),
        rewards=noise(samples),
        greedy_rewards=noise(samples),
        greedy_lengths=torch.from_numpy(lengths),
        judgements=[str(i) for i in range(samples)],
        components={"accuracy": noise(samples)},
        weights=noise(2 * samples).reshape(-1, 2),
        history=torch.arange(2.0 * samples).reshape(-1, 2),
    )
    # all but the tokens themselves
    for name in FIELDS["token"][1:]:
        setattr(batch, name, noise(tokens))
    return batch


def prompts_of(lengths) -> list:
    """Prompts of so many tokens: all that a batch knows of them."""
    return [SimpleNamespace(input_ids=torch.arange(4, 4 + length)) for length in lengths]


def loss_oracle(name, logp, old, adv, low, high, dual):
    """One sequence, (T,): the mean over its tokens, term by term from the papers, with their gradient."""
    total, n = torch.zeros(()), len(logp)
    for lp, o, a in zip(logp, old, adv):
        ratio = torch.exp(lp - o)
        if name == "gspo":
            ratio = torch.exp((logp - old).mean().detach() + lp - lp.detach())
        if name in ("ppo", "gspo"):
            term = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
            if name == "ppo" and a < 0:
                term = torch.minimum(term, -dual * a)
        elif name == "cpgd" and a > 0:
            term = -a * torch.minimum(lp, o + math.log(1 + high))
        elif name == "cpgd":
            term = -a * torch.maximum(lp, o + math.log(1 - low))
        elif name == "cispo":
            term = -ratio.clamp(1 - low, 1 + high).detach() * a * lp
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            term = -a * 4 / tau * torch.sigmoid(tau * (ratio - 1))
        elif name == "gmpo":
            mean, changes = adv.mean(), logp - old
            changes = changes.clamp(max=high) if mean > 0 else changes.clamp(min=-low)
            term = -mean * torch.exp(changes.mean())
        total = total + term / n
    return total


MOVED: list[tuple[int, torch.Tensor]] = []  # bytes and new place of what was moved


def apart(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`fsdp.moved_to` as where host and device have memory of their own: always a copy, and what is
    left behind is lost."""
    old = shard_of(tensor)
    new = old.clone()
    rest = torch.empty(0, dtype=old.dtype).set_(old.untyped_storage())
    rest.fill_(math.nan if old.is_floating_point() else 1)
    MOVED.append((new.numel() * new.element_size(), new))
    return DTensor(new, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else new


def asleep(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As `apart`, and nothing can be computed with what rests in host memory: each move inverts all
    bits, so that the move there and the move back cancel."""
    moved = apart(tensor, device)
    bits = torch.empty(0, dtype=torch.uint8).set_(shard_of(moved).untyped_storage())
    bits.bitwise_not_()
    return moved


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
COMPUTE = Compute(
    "sdpa", torch.float32, CPU, max_tokens_per_pack=10**6, head_chunk=256, longest=1000
)


def random_responses(counts: list[int], vocabulary: int) -> list[tuple[int, torch.Tensor]]:
    """For each prompt as many random responses as ``counts`` says, with its index."""
    generator = seeded(3)
    lengths = torch.randint(1, 9, (sum(counts),), generator=generator)
    tokens = torch.randint(4, vocabulary - 8, (int(lengths.sum()),), generator=generator)
    indices = [index for index, count in enumerate(counts) for _ in range(count)]
    return list(zip(indices, tokens.split(lengths.tolist())))


def load_weights(model, folder) -> None:
    """A checkpoint's weights, in a model that is not sharded."""
    model.setup.folder = Path(folder)
    module = Wrapper()
    module.model = model
    module.load_state_dict(read_weights(module, seed=0))


def load_model(folder, loaded: bool = True):
    """The model of a folder, not sharded; without its weights if not ``loaded``."""
    model = build_model(Processor(folder, DataArgs()).config, COMPUTE).requires_grad_(False)
    if loaded:
        materialize(model, CPU)
        load_weights(model, folder)
    return model


def planned(checkpoint, rows, *flags: str) -> SimpleNamespace:
    """The models of a run on meta, as a plan builds them."""
    common = "--max_prompt_tokens 512 --max_new_tokens 12 --prompts_per_step 4"
    args = ppo.parse_args(words("--model", checkpoint, "--data", rows, common, "--", *flags))
    loaded = ppo.load_rows(args)
    models = ppo.build_models(args, loaded.processor, plan.META)
    modules = models.by_role() | ppo.reward_modules(
        args, sources.load_rewards(args), loaded, models.actor
    )
    needed = ppo.plan_memory(args, modules, loaded, 8)
    return SimpleNamespace(args=args, models=modules, prompts=loaded.train, needed=needed)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside had at the same time, without those ``before``; FSDP2
    shrinks storages that it keeps."""

    def __init__(self, before=()):
        super().__init__()
        self.storages, self.peak = weakref.WeakKeyDictionary(), 0
        self.before = weakref.WeakKeyDictionary({x.untyped_storage(): True for x in before})

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                if x.untyped_storage() not in self.before:
                    self.storages[x.untyped_storage()] = True
        self.peak = max(self.peak, sum(storage.nbytes() for storage in list(self.storages)))
        return result


class NormOfAGPU(torch.autograd.Function):
    """`F.rms_norm` as one kernel of a GPU computes it: its input is kept, where a CPU keeps two tensors
    in float32."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        inverse = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (x.float() * inverse * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, inverse = ctx.saved_tensors
        unit, scaled = x.float() * inverse, grad.float() * weight
        dx = inverse * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
        dweight = (grad.float() * unit).flatten(0, -2).sum(0)
        return dx.to(x.dtype), None, dweight.to(weight.dtype), None


def peak_of_an_update(env, module, batch: Batch) -> tuple[int, Pack]:
    """The most bytes that are alive while a module learns from the one pack of a batch, without gradient
    shards and what is frozen, which one rank holds whole; the second time, as in an update of several."""
    n = len(batch.tokens)
    batch.sampling, batch.in_policy_loss = env.sampling, torch.ones(n, dtype=torch.bool)
    batch.logprobs = batch.old_logprobs = torch.zeros(n)
    batch.advantages = batch.returns = batch.values = torch.randn(n)
    weights = ppo.minibatch_weights(batch, range(1), batch.in_policy_loss, env.args)
    part = ppo.Minibatch(range(1), weights, weights, None)
    module.train()
    for _ in range(2):
        frozen = [p for p in module.parameters() if not p.requires_grad]
        shards = [shard_of(p.grad) for p in module.parameters() if p.grad is not None]
        with LiveBytes([*frozen, *shards]) as live:
            (pack,) = packs.of_batch(module.model, batch)
            if isinstance(module, ppo.Critic):
                loss, _ = ppo.critic_loss(module, pack, batch, part, env.args)
            else:
                loss, _ = ppo.actor_loss(module, None, pack, batch, part, env.args)
            loss.backward()
    return live.peak, pack


def planned_peak(module, setting: UpdateSetting, keys: float = 1.0) -> float:
    """What a plan says of `peak_of_an_update`, on one rank."""
    root, layer, _ = memory.gathered_bytes(module, 1)
    return root + layer + sum(memory.backward_bytes(module, setting, keys).values())


needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)


def compile_layers(monkeypatch) -> None:
    """Let gates and rotary positions be compiled, as on a GPU; the head stays as it is on a CPU."""
    compiled = logprobs._compiled
    monkeypatch.setattr(logprobs, "can_fuse", lambda device: True)
    monkeypatch.setattr(
        logprobs, "_compiled", lambda f: f if f.__module__ == "common.logprobs" else compiled(f)
    )


HAS_CUDA = torch.version.cuda is not None
DEVICE = torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")
# Those that read a number of the device, or whose result has a size that only the device knows.
WAITS = ("_local_scalar", "nonzero", "item", "unique", "masked_select", "bincount", "isin")


def filled(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A model on meta, with empty weights and buffers on the device."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                empty = torch.zeros(parameter.shape, dtype=dtype, device=DEVICE)
                module._parameters[name] = nn.Parameter(
                    empty, requires_grad=parameter.requires_grad
                )
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=DEVICE)
    return model


def noise(seed: int, size=(60, 40)) -> Image.Image:
    width, height = size
    return Image.frombytes("RGB", size, np.random.default_rng(seed).bytes(3 * width * height))


def encode(image: Image.Image, form: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def base64_of(image: Image.Image) -> str:
    return base64.b64encode(encode(image)).decode()


SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|box_start|>",
]
# the 256 bytes come first
IM_END, EOT, IM_START, VISION_START, VISION_END, IMAGE, VIDEO, BOX = range(256, 264)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}"
    "{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def write_processor(folder, family="qwen2_5_vl", template=TEMPLATE):
    """A checkpoint folder without weights: byte-level tokenizer, chat template, config, image
    processor, end tokens."""
    folder.mkdir(exist_ok=True)
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # As some families do: a start token of the tokenizer's own, which must not come on top of the
    # template's, and a maximal length, which must not cut a prompt.
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", EOT)]
    )
    backend.enable_truncation(50)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|image_pad|>"]) == [IM_END, IMAGE]
    config_class, patch = (Qwen3VLConfig, 16) if family == "qwen3_vl" else (Qwen2_5_VLConfig, 14)
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        bos_token_id=EOT,
        eos_token_id=IM_END,
    )
    config_class(
        text_config=text,
        vision_config=dict(depth=1, patch_size=patch),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    ).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"patch_size": patch, "min_pixels": 3136, "max_pixels": 200704})
    )
    write_json(folder / "generation_config.json", {"eos_token_id": [IM_END, EOT]})
    return folder


def edit(path, **changes):  # None deletes
    settings = read_json(path) | changes
    path.write_text(
        json.dumps({key: value for key, value in settings.items() if value is not None})
    )


PYTHONS_WORDS = (
    r"Error\b|to unpack|NoneType|has no attribute|subscriptable|unhashable|iterable|object is|"
    r"not supported between"
)
SCALARS = (
    None,
    True,
    3,
    1e400,
    "",
    "text <image>",
    "a.png",
    "A",
    "no.png",
    "file:///a.png",
    "B" * 50_000,
    '[{"role": 1}]',
)
KEYS = (
    "role",
    "content",
    "type",
    "text",
    "image",
    "file",
    "video",
    "tool_calls",
    "from",
    "value",
    "weight",
    "user",
)


def odd_value(rng, depth):
    """Anything that JSON can hold, often nearly a row's."""
    kind = rng.randrange(6) if depth else 0
    if kind == 1:
        return [odd_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 2:
        return {rng.choice(KEYS): odd_value(rng, depth - 1) for _ in range(rng.randrange(4))}
    if kind == 3:
        return [
            {
                "role": rng.choice(["user", "assistant", None, []]),
                "content": odd_value(rng, depth - 1),
            }
        ]
    if kind == 4:
        part = {
            "type": rng.choice(["text", "image", "video", {}]),
            rng.choice(KEYS): odd_value(rng, depth - 1),
        }
        return [{"role": "user", "content": [part, {"type": "text", "text": "x"}]}]
    return rng.choice(SCALARS)


JUDGEMENTS = [
    json.loads(line)
    for line in r"""
{"prompt": "what is this?", "images": ["0.png"], "response": "a circle. <answer>yes</answer>"}
{"prompt": "what is this?", "images": ["0.png"], "response": "no idea"}
{"messages": [{"role": "user", "content": "hello"}], "response": "hi", "source": "chat"}
{"prompt": "red", "images": ["1.png", "2.png"], "preferred": "A", "critique": "{A} is red and {B} is not.\nSo"}
{"prompt": "how many?", "images": ["2.png"], "responses": ["one {response_b}", "two"], "preferred": "B"}
{"prompt": "say a", "responses": ["a", "b"], "preferred": "tie", "source": "texts"}
{"question": "how many?", "images": ["1.png"], "response": "", "correct": false}
{"question": "how many?", "images": ["0.png"], "response": "3", "correct": true, "critique": "there are 3"}
{"question": "how many?", "images": ["1.png"], "response": "3", "score": 4.0}
{"prompt": "how many?", "images": [], "response": "3", "score": -1.5}
""".strip().splitlines()
]


def judge_flags(checkpoint: Path, task: Path, out: Path, *more: str | Path) -> list[str]:
    return words(
        "--model",
        checkpoint,
        "--data",
        task / "rows.jsonl",
        "--eval_data",
        task / "eval.jsonl",
        "--out",
        out,
        "--max_prompt_tokens 600 --max_tokens_per_pack 700 --prompts_per_step 4 --lr 1e-3 "
        "--eval_max_new_tokens 5 ",
        "--",
        *more,
    )


def evaluation(out: Path, step: int) -> dict:
    return read_json(out / "eval" / f"eval_result_{step}.json")


def score_samples(source, samples, args) -> dict[str, list]:
    """What a source says of samples, by its calls in threads."""
    from common.rewards.sources import CallOfSource, RewardMix, call_source

    call = CallOfSource(source, [], samples, in_thread(call_source, source, samples))
    (scores,) = RewardMix([source], {}, args).finish([call], None, None).values()
    return {name: column.tolist() for name, column in scores.columns.items()}


def reward_samples(
    responses: list[str],
    references=None,
    prompts=None,
    labels=None,
    images=None,
    rows=None,
    groups=None,
    step=0,
):
    """What a reward function is called with, each sample of a prompt of its own unless ``groups``
    says else."""
    from common.rewards.sources import Samples

    n = len(responses)
    return Samples(
        prompts or [""] * n,
        responses,
        references or [None] * n,
        labels or [None] * n,
        images or [[] for _ in range(n)],
        rows or [{} for _ in range(n)],
        [len(text) for text in responses],
        [False] * n,
        groups or list(range(n)),
        [[] for _ in range(n)],
        [None] * n,
        step,
        [f"rows.jsonl:{i + 1}" for i in range(n)],
    )
