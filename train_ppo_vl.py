"""PPO for vision-language models, one process per GPU.

    torchrun --nproc_per_node 8 train_ppo_vl.py --model Qwen/Qwen2.5-VL-7B-Instruct --data train.jsonl --eval_data eval.jsonl
    torchrun --nproc_per_node 2 train_ppo_vl.py                 # no flags: the embedded toy (launch/toy.py), also on a CPU
    python train_ppo_vl.py --help                               # every flag, by stage, with its default and unit

One step, as `main` names it:

    prompts + images -> rollout -> rewards -> score (reference, values) -> advantages -> update critic, update actor -> log

Shapes: S samples of the step, N response tokens of all samples, L tokens of a packed row, T response tokens of that row,
M image tokens, P prompt tokens, H hidden size, V vocabulary, B slots that decode together.

Invariants, each with a test:
  * Every rank holds the text of all samples, so advantages and their statistics need no all-reduce and do not depend on
    the number of ranks. Pictures and image features stay on one rank and move only to where they are trained.
  * A loss is a weighted sum over response tokens; the weights are global. No value depends on packs, ranks or order.
  * The policy that samples is the policy that trains: same weights, same positions, same banned tokens, same temperature.
  * Noise and data order are functions of (seed, counters); there is no generator state.
  * Collectives stand under no condition that could differ between ranks.
"""

import argparse
import base64
import dataclasses
import fcntl
import functools
import hashlib
import http.client
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable
from urllib.parse import urlsplit

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two busy ranks on the same cores slow each other tenfold

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from common import losses
from common.buffers import (Row, Samples, all_gather_json, build_row, exchange_features, gather_samples, make_blocks,
                            make_packs, minibatches, mix, parse_datasets, take_rows)
from common.logging import MetricSums, RunLogger, StageTimer, draw_sample
from common.vlm import (FLASH_ATTN_INSTALL, DecodeAttention, PackedAttention, Processor, Prompt, SlotCache, choose_attention,
                        image_features, language_hidden, load_pixels, load_prompts, load_weights, materialize, prompt_positions,
                        read_image, resolve_folder, skeleton, use_attention, with_same_tower)

HERE = Path(__file__).resolve().parent
EXIT_PREEMPTED = 75  # of a worker that stopped after SIGTERM or SIGUSR1 with everything saved (EX_TEMPFAIL of sysexits.h)
TRAIN, EVAL = 0, 1   # streams of sampling noise: a prompt met in both gets unrelated samples


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, or only evaluate. Returns the last metrics."""
    args = parse_args(argv)
    reward = load_reward(args.reward.reward, args.reward)
    run = start_run(args)
    checkpoints = Checkpoints(run)
    processor, datasets, weights, eval_prompts = load_data(run)
    rows = sum(map(len, datasets))
    actor, critic, reference = build_models(run, processor)
    models = {"actor": (actor, build_optimizer(actor, args.update.actor_lr, args))}
    if critic:
        models["critic"] = (critic, build_optimizer(critic, args.update.critic_lr, args))
    kl_controller = losses.KLController(args.algorithm.kl_coef, args.algorithm.kl_target or None, args.algorithm.kl_horizon)
    fresh = {"step": 0, "metrics": {}, "kl_controller": kl_controller.state_dict(), "dropped_prompts": 0}
    state = resume(run, checkpoints, models, fresh, rows)
    if args.model.init_critic_from and not state["step"]:
        load_critic_weights(Path(args.model.init_critic_from), critic)
    kl_controller.load_state_dict(state["kl_controller"])
    log = open_log(run, datasets, eval_prompts, state["step"])
    evaluate_at = functools.partial(evaluate, run, processor, actor, reward, eval_prompts, log)

    def end_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluation and record of a step whose checkpoint is on its way."""
        if evaluation_due(args, step, rows):
            metrics = metrics | evaluate_at(step)
            checkpoints.check_quality(metrics)
        log.log(step, metrics | {"perf/failed_saves": checkpoints.failed, "perf/save_seconds": checkpoints.waited})
        checkpoints.waited = 0.0
        return metrics

    recorded = all_gather_json(log.last_step)[0] >= state["step"]
    if args.eval.eval_only or (state["step"] == 0 and eval_prompts and args.eval.eval_every != 0):
        metrics = evaluate_at(state["step"])
        checkpoints.check_quality(metrics)
        if not recorded:
            log.log(state["step"], metrics)
        if args.eval.eval_only:
            log.close()
            checkpoints.close()
            return metrics
    elif state["step"] and not recorded:                       # killed between the save of this step and its record
        end_step(state["step"], state["metrics"])
    if state["step"]:
        export_if_due(run, actor, processor, state["step"])    # or between the save and the export
    catch_signals()
    metrics = state["metrics"]

    with checkpoints, PromptLoader(run, processor, actor, datasets, weights, state["dropped_prompts"]) as loader:
        loader.prefetch(state["step"])
        for step in range(state["step"] + 1, args.update.steps + 1):
            run.timer.reset()
            if run.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with run.timer("data"):
                prompts = loader.take(step - 1)
                loader.prefetch(step)
            with profiled(run, step):
                with run.timer("rollout"):
                    samples = rollout(run, processor, actor, prompts, args.rollout.samples_per_prompt, TRAIN)
                checkpoints.finish()                           # commit what has been written meanwhile
                with run.timer("reward"):
                    samples = score_rewards(run, processor, reward, prompts, samples)
                with run.timer("score"):
                    score_logprobs_and_values(run, actor, reference, critic, prompts, samples)
                with run.timer("advantages"):
                    metrics = compute_advantages(run, samples, kl_controller)
                with run.timer("update_critic"):
                    metrics |= update_critic(run, *models["critic"], prompts, samples, step) if critic else {}
                with run.timer("update_actor"):
                    frozen = step <= args.update.freezing_actor_steps
                    metrics |= {} if frozen else update_actor(run, *models["actor"], prompts, samples, step,
                                                              kl_controller.value)
            if "train/kl" in metrics and not frozen:
                metrics["train/kl_coef"] = kl_controller.value
                kl_controller.update(metrics["train/kl"], len(samples))
            metrics |= {"rollout/dropped_prompts": loader.dropped} | perf_metrics(run, actor, critic, prompts, samples)
            log_samples(run, log, step, metrics, processor, prompts, samples)
            state |= {"step": step, "metrics": metrics, "kl_controller": kl_controller.state_dict(),
                      "dropped_prompts": loader.dropped, "prompts_taken": step * args.rollout.prompts_per_step}
            stop = stop_requested()
            if stop or falls_due(step, args.checkpoint.save_every, args.update.steps):
                checkpoints.save(step, training_state(models), state)
            checkpoints.finish(wait=stop)
            if stop and step < args.update.steps:              # the next start evaluates, records and exports this step
                break
            metrics = end_step(step, metrics)
            export_if_due(run, actor, processor, step)
    preempted = state["step"] < args.update.steps
    if checkpoints.failed:
        raise UserError(f"the run ended after step {state['step']}, and its last checkpoint could not be saved")
    log.line(f"stopped by a signal after step {state['step']}; the same command goes on from there" if preempted else
             f"done: metrics in {args.run.out}/metrics.jsonl, TensorBoard in {args.run.out}/tensorboard, samples in "
             f"{args.run.out}/samples, weights in {args.run.out}/export")
    log.close()
    checkpoints.close()
    if preempted:
        dist.destroy_process_group()
        sys.exit(EXIT_PREEMPTED)
    return metrics


# ---------------------------------------------------------------------------------------------------------------------
# Arguments: one frozen dataclass per stage; a field is a flag
# ---------------------------------------------------------------------------------------------------------------------


def flag(default, help: str, choices: tuple = (), low: float = -math.inf, high: float = math.inf):
    """A field of an argument class: its default, its help with the unit, and the values or bounds it must respect."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True)
class ModelArgs:
    """model"""
    model: str = flag("", "checkpoint of the actor: folder in Hugging Face format, or hub name")
    critic_model: str = flag("", "checkpoint of the critic; empty: the actor's (a value head is read if it has one)")
    init_critic_from: str = flag("", "checkpoint folder (<out>/checkpoints/step-N) whose critic weights, and nothing else, "
                                     "start it")
    reference_model: str = flag("", "checkpoint of the frozen reference; empty: the actor's; loaded only if a KL is used")
    dtype: str = flag("auto", "compute type; weights and optimizer stay float32. auto: bfloat16 on GPU, float32 on CPU",
                      ("auto", "float32", "bfloat16"))
    attention: str = flag("auto", "attention back-end. auto: flash_attn if installed, else torch's varlen; sdpa on CPU",
                          ("auto", "flash_attn", "varlen", "sdpa"))
    gradient_checkpointing: bool = flag(False, "recompute layers in the backward pass: less memory, about 30 % more time")


@dataclass(frozen=True)
class DataArgs:
    """data"""
    data: str = flag("", "training rows: JSONL files, as a.jsonl,b.jsonl or with probabilities: a.jsonl:0.7,b.jsonl:0.3")
    eval_data: str = flag("", "held-out rows, a JSONL file; empty: no evaluation")
    prompt_column: str = flag("prompt", "column of the prompt: a string or chat messages")
    images_column: str = flag("images", "column of the image paths, relative to the file")
    reference_column: str = flag("answer", "column of the reference answer")
    label_column: str = flag("label", "column of the row's label")
    system_prompt: str = flag("", "system message put before every prompt; empty: none")
    max_prompt_tokens: int = flag(4096, "longest prompt, tokens with image tokens; longer ones are bad rows", low=1)
    min_pixels: int = flag(0, "smallest image after resizing, pixels; 0: the checkpoint's own", low=0)
    max_pixels: int = flag(0, "largest image after resizing, pixels; 0: the checkpoint's own", low=0)
    on_bad_row: str = flag("error", "what a bad row does: error stops the run, skip counts and reports it", ("error", "skip"))
    verify_images: bool = flag(False, "decode every image at the start, not only its header")
    max_rows: int = flag(0, "use the first rows of each file only; 0: all", low=0)
    max_eval_rows: int = flag(0, "evaluate on the first rows only; 0: all", low=0)
    data_threads: int = flag(2, "threads that decode images while the model works", low=1)


@dataclass(frozen=True)
class RolloutArgs:
    """rollout"""
    prompts_per_step: int = flag(128, "prompts per step, over all ranks", low=1)
    samples_per_prompt: int = flag(4, "samples per prompt", low=1)
    max_new_tokens: int = flag(1024, "longest response, tokens", low=1)
    min_new_tokens: int = flag(0, "shortest response, tokens: stop tokens are impossible before", low=0)
    temperature: float = flag(1.0, "sampling temperature; log-probs are taken at the same temperature everywhere", low=1e-6)
    top_k: int = flag(0, "sample from the k likeliest tokens; 0: off. Biases the gradient: training cannot undo it", low=0)
    top_p: float = flag(1.0, "sample from the smallest set with this probability; 1: off. Biases the gradient too",
                        low=1e-6, high=1)
    stop_tokens: str = flag("", "further stop tokens, comma separated, as text")
    stop_strings: str = flag("", "JSON list of strings that end a response when they appear in it")
    slots: int = flag(0, "sequences decoded together per rank; 0: as many as the memory allows, at most 256", low=0)
    prefill_tokens: int = flag(16384, "tokens per prefill call", low=1)
    poll_every: int = flag(0, "decoding steps between looks of the host at finished sequences; 0: 8 on GPU, 1 on CPU", low=0)


@dataclass(frozen=True)
class RewardArgs:
    """reward"""
    reward: str = flag("boxed", "rule (exact, boxed, answer), file.py:function, or reward server: http://host:port/path")
    reward_timeout: float = flag(60.0, "longest time for the rewards of a step, with all retries, seconds", low=1e-6)
    reward_workers: int = flag(1, "threads that score in parallel: for a reward server, requests at the same time per rank",
                               low=1)
    remote_batch: int = flag(32, "samples per request to a reward server", low=1)
    remote_timeout: float = flag(30.0, "longest time of one request to a reward server, seconds", low=1e-6)
    remote_retries: int = flag(4, "further tries of a request after a time-out, a lost connection or an answer 5xx; the "
                                  "pauses before them grow from 0.5 s to at most 8 s", low=0)


@dataclass(frozen=True)
class AlgorithmArgs:
    """algorithm"""
    advantage: str = flag("gae", "advantage estimator; gae needs a critic, grpo and rloo at least 2 samples per prompt",
                          ("gae", "grpo", "rloo", "reinforce++"))
    gamma: float = flag(1.0, "discount per token (gae, reinforce++)", low=0, high=1)
    gae_lambda: float = flag(0.95, "lambda of gae", low=0, high=1)
    advantages_norm: str = flag("auto", "whiten advantages over the step. auto: on for gae and reinforce++",
                                ("auto", "on", "off"))
    kl_coef: float = flag(0.0, "weight of the KL to the reference; 0: no reference is loaded", low=0)
    kl_in: str = flag("reward", "where the KL acts", ("reward", "loss"))
    kl_estimator: str = flag("k1", "estimator of the KL; k1 belongs in the reward, k2 or k3+ in the loss",
                             ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"))
    kl_target: float = flag(0.0, "KL per token that an adaptive weight aims at; 0: the weight is fixed", low=0)
    kl_horizon: int = flag(10000, "samples over which the adaptive weight changes", low=1)
    loss_aggregation: str = flag("token-mean", "how token losses are averaged",
                                 ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"))
    clip_low: float = flag(0.2, "ratio clip below 1", low=0, high=1)
    clip_high: float = flag(0.2, "ratio clip above 1; larger than --clip_low is clip-higher", low=0)
    dual_clip: float = flag(3.0, "ratio bound for negative advantages, above 1; 0: off")
    value_clip: float = flag(0.2, "clip of the value's change; 0: off", low=0)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", low=0)
    recompute_old_logprobs: bool = flag(False, "take old log-probs from a forward pass instead of the sampler's record")
    importance_cap: float = flag(2.0, "cap of the sampler-trainer weight, with --recompute_old_logprobs", low=1e-6)


@dataclass(frozen=True)
class UpdateArgs:
    """update"""
    steps: int = flag(1000, "steps: rollouts, each with its updates", low=1)
    epochs: int = flag(1, "passes over the samples of a step", low=1)
    minibatches: int = flag(1, "optimizer updates per pass; must divide --prompts_per_step", low=1)
    actor_lr: float = flag(1e-6, "learning rate of the actor", low=0)
    critic_lr: float = flag(9e-6, "learning rate of the critic", low=0)
    lr_schedule: str = flag("constant", "learning rate after the warm-up", ("constant", "linear", "cosine"))
    warmup_steps: int = flag(0, "steps of linear warm-up", low=0)
    min_lr_ratio: float = flag(0.1, "final learning rate of linear and cosine, as a fraction", low=0, high=1)
    weight_decay: float = flag(0.0, "decoupled weight decay; never on biases and norms", low=0)
    adam_beta1: float = flag(0.9, "beta 1 of AdamW", low=0, high=1)
    adam_beta2: float = flag(0.95, "beta 2 of AdamW", low=0, high=1)
    max_grad_norm: float = flag(1.0, "bound on each model's global gradient norm; 0: off", low=0)
    target_kl: float = flag(0.0, "stop a step's actor updates when KL(old, new) per token exceeds this; 0: off", low=0)
    freezing_actor_steps: int = flag(0, "first steps that update the critic only", low=0)
    max_tokens_per_pack: int = flag(16384, "tokens per packed row: the memory of an update")
    share_prompts: bool = flag(True, "let the samples of a prompt share one copy of it in a packed row")
    head_chunk: int = flag(1024, "tokens whose logits exist at the same time", low=1)


@dataclass(frozen=True)
class EvalArgs:
    """evaluation"""
    eval_every: int = flag(-1, "steps between evaluations, besides start and end; -1: once per pass over the data, 0: never",
                           low=-1)
    eval_samples: int = flag(1, "samples per prompt; 1: greedy, more: mean and pass@k at --temperature", low=1)
    eval_only: bool = flag(False, "evaluate the model and stop")


@dataclass(frozen=True)
class CheckpointArgs:
    """checkpoints"""
    save_every: int = flag(50, "steps between checkpoints, and after the last step; -1: only after the last step, 0: never",
                           low=-1)
    keep_last: int = flag(2, "complete checkpoints kept", low=1)
    keep_best: str = flag("", "an eval metric, such as eval/reward_mean: its best checkpoint is kept too; empty: none")
    save_strategy: str = flag("unrestricted", "who writes at the same time: all ranks, those of one node, or one rank",
                              ("unrestricted", "single_node", "single_process", "single_thread"))
    save_blocking: bool = flag(False, "wait for each checkpoint instead of writing it in the background")
    max_failed_saves: int = flag(3, "failed saves in a row that stop the run", low=1)
    export_every: int = flag(-1, "steps between exports of the weights; -1: only the last step, 0: never", low=-1)
    resume: str = flag("auto", "auto: go on from the newest checkpoint in --out if there is one; must: there has to be one; "
                               "never: --out must be new; or the path of a checkpoint, "
                               "from which an --out without checkpoints starts")
    resume_changed_args: str = flag("refuse", "what a resumed run does when flags that alter the result have changed",
                                    ("refuse", "allow"))


@dataclass(frozen=True)
class RunArgs:
    """run"""
    out: Path = flag(Path("runs/ppo"), "output folder")
    seed: int = flag(0, "seed of sampling and data order", low=0)
    log_samples: int = flag(4, "samples shown as pictures and text per record; 0: none", low=0)
    log_samples_every: int = flag(10, "steps between records of samples (all of them to JSONL, some as pictures)", low=0)
    profile: int = flag(0, "step to trace with torch.profiler into <out>/profile; 0: none", low=0)
    timeout: float = flag(1800.0, "longest wait of a rank for the others, seconds", low=1e-6)


@dataclass(frozen=True)
class Args:
    model: ModelArgs
    data: DataArgs
    rollout: RolloutArgs
    reward: RewardArgs
    algorithm: AlgorithmArgs
    update: UpdateArgs
    eval: EvalArgs
    checkpoint: CheckpointArgs
    run: RunArgs

    @property
    def stop_strings(self) -> list[str]:
        return json.loads(self.rollout.stop_strings) if self.rollout.stop_strings else []

    @property
    def whiten(self) -> bool:
        norm = self.algorithm.advantages_norm
        return norm == "on" or (norm == "auto" and self.algorithm.advantage in ("gae", "reinforce++"))


def finite_float(text: str) -> float:
    """argparse type: a float that is neither NaN nor infinite."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


class UserError(ValueError):
    """Something the user can mend: one message from rank 0, exit code 2 of every worker, no traceback."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(message)


def build_parser(groups: dict[str, type], description: str) -> Parser:
    """One argument group per dataclass; flags that were not given stay absent, so a --config value can stand."""
    parser = Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", help="JSON object of flags (such as <out>/args.json); flags override it")
    for group in groups.values():
        section = parser.add_argument_group(group.__doc__)
        for field in dataclasses.fields(group):
            help_text = f"{field.metadata['help']} (default: {field.default!s:.60})".replace("%", "%%")
            if field.type is bool:
                section.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction, help=help_text)
            else:
                kind = finite_float if field.type is float else field.type
                section.add_argument(f"--{field.name}", type=kind, choices=field.metadata["choices"] or None,
                                     metavar=None if field.metadata["choices"] else field.type.__name__.upper(), help=help_text)
    return parser


def read_config(path: str, groups: dict[str, type]) -> dict[str, Any]:
    """Flags from a JSON file, checked like flags.

    Raises:
        UserError: not a JSON object, an unknown flag, or a value of another type.
    """
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--config {path}: {error}") from error
    known = {field.name: field for group in groups.values() for field in dataclasses.fields(group)}
    if not isinstance(config, dict) or not set(config) <= set(known):
        extra = sorted(set(config) - set(known)) if isinstance(config, dict) else "no JSON object"
        raise UserError(f"--config {path}: unknown flags: {extra}")
    for name, value in config.items():
        field = known[name]
        accepted = {float: (float, int), Path: (str,)}.get(field.type, (field.type,))
        wrong_kind = not isinstance(value, accepted) or (isinstance(value, bool) and field.type is not bool)
        if wrong_kind or value != value or value in (math.inf, -math.inf):
            raise UserError(f"--config {path}: {name} = {value!r} is not of type {field.type.__name__}")
        if field.metadata["choices"] and value not in field.metadata["choices"]:
            raise UserError(f"--config {path}: {name} = {value!r}: choose from {', '.join(field.metadata['choices'])}")
        config[name] = field.type(value)
    return config


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags, over --config, over defaults; without --model and --config: the toy.

    Raises:
        UserError: an unknown flag, a bad value, or a combination that cannot work.
    """
    groups = {field.name: field.type for field in dataclasses.fields(Args)}
    given = vars(build_parser(groups, __doc__).parse_args(argv))
    config = given.pop("config", None)
    idle = {"critic_model", "init_critic_from", "critic_lr", "value_clip", "gae_lambda", "freezing_actor_steps"} & set(given)
    if config is None and "model" not in given:
        config = str(embedded_toy("args.json"))
    values = (read_config(config, groups) if config else {}) | given
    args = Args(**{name: group(**{field.name: values[field.name] for field in dataclasses.fields(group)
                                  if field.name in values}) for name, group in groups.items()})
    if args.algorithm.advantage != "gae" and idle:
        raise UserError(f"--advantage {args.algorithm.advantage} has no critic: leave out --{', --'.join(sorted(idle))}")
    check_args(args)
    return args


def embedded_toy(name: str) -> Path:
    """The toy's argument file ``name``; the first process of each machine writes the toy if it is not there yet."""
    config, program = HERE / "toy" / name, HERE / "launch" / "toy.py"
    if not config.exists() and not program.exists():
        raise UserError(f"no --model given, and the embedded toy is not there: {program} is missing")
    if not config.exists() and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        subprocess.run([sys.executable, str(program), "--out", str(config.parent)], check=True)
    while not config.exists():      # written last by toy.py; if that fails, torchrun ends this process with its peer
        time.sleep(0.2)
    return config


def out_of_bounds(args: Args) -> list[str]:
    """What is wrong with single flags."""
    problems = []
    for group in vars(args).values():
        for field in dataclasses.fields(group):
            value, low, high = getattr(group, field.name), field.metadata["low"], field.metadata["high"]
            if field.type in (int, float) and not low <= value <= high:
                at_most = f" and at most {high:g}" if high < math.inf else ""
                problems.append(f"--{field.name} {value} must be at least {low:g}{at_most}")
    return problems


def check_args(args: Args) -> None:
    """Refuse what cannot work, before any process group or GPU is touched."""
    rollout, algorithm, update = args.rollout, args.algorithm, args.update
    longest = args.data.max_prompt_tokens + rollout.max_new_tokens
    has_critic = algorithm.advantage == "gae"
    problems = out_of_bounds(args)
    rules = {
        "--model and --data are needed together": bool(args.model.model) and bool(args.data.data or args.eval.eval_only),
        f"--minibatches {update.minibatches} must divide --prompts_per_step {rollout.prompts_per_step}":
            rollout.prompts_per_step % max(1, update.minibatches) == 0,
        f"--advantage {algorithm.advantage} compares the samples of a prompt: --samples_per_prompt "
        f"{rollout.samples_per_prompt} must be at least 2": has_critic or algorithm.advantage == "reinforce++"
            or rollout.samples_per_prompt > 1,
        f"--freezing_actor_steps {update.freezing_actor_steps} needs a critic to train meanwhile (--advantage gae)":
            has_critic or not update.freezing_actor_steps,
        "--reference_model is of no use without --kl_coef": algorithm.kl_coef > 0 or not args.model.reference_model,
        "--kl_target needs a --kl_coef above 0 to start from": algorithm.kl_coef > 0 or not algorithm.kl_target,
        f"--kl_horizon {algorithm.kl_horizon} must exceed a fifth of the samples per step": not algorithm.kl_target
            or 5 * algorithm.kl_horizon > rollout.prompts_per_step * rollout.samples_per_prompt,
        f"--min_new_tokens {rollout.min_new_tokens} exceeds --max_new_tokens {rollout.max_new_tokens}":
            rollout.min_new_tokens <= rollout.max_new_tokens,
        f"--dual_clip {algorithm.dual_clip} must be above 1, or 0 for off": algorithm.dual_clip == 0 or algorithm.dual_clip > 1,
        f"--max_tokens_per_pack {update.max_tokens_per_pack} must hold one prompt and one response: --max_prompt_tokens + "
        f"--max_new_tokens = {longest}": update.max_tokens_per_pack >= longest,
        f"--prefill_tokens {rollout.prefill_tokens} must hold one prompt: --max_prompt_tokens {args.data.max_prompt_tokens}":
            rollout.prefill_tokens >= args.data.max_prompt_tokens,
        "--keep_best needs --eval_data and evaluations (--eval_every)":
            not args.checkpoint.keep_best or (bool(args.data.eval_data) and args.eval.eval_every != 0),
        "--eval_only needs --eval_data": bool(args.data.eval_data) or not args.eval.eval_only,
        "--min_pixels exceeds --max_pixels": args.data.max_pixels == 0 or args.data.min_pixels <= args.data.max_pixels,
        f"--remote_timeout {args.reward.remote_timeout:g} exceeds --reward_timeout {args.reward.reward_timeout:g}":
            args.reward.remote_timeout <= args.reward.reward_timeout or not is_url(args.reward.reward),
    }
    problems += [message for message, holds in rules.items() if not holds]
    try:
        strings = args.stop_strings
        valid = isinstance(strings, list) and all(isinstance(s, str) and s for s in strings)
    except json.JSONDecodeError:
        valid = False
    if not valid:
        problems.append(f"--stop_strings {rollout.stop_strings} is not a JSON list of non-empty strings")
    try:
        parse_datasets(args.data.data)
    except ValueError as error:
        problems.append(f"--data {error}")
    if problems:
        raise UserError("\n".join(problems))


def flags_of(args: Args) -> dict[str, Any]:
    """Arguments as flags, JSON-ready, paths of models, data and reward absolute: what --config reads back from any folder."""
    flags = {field.name: getattr(group, field.name) for group in vars(args).values() for field in dataclasses.fields(group)}
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    absolute = lambda path: str(Path(path).resolve()) if path and Path(path).exists() else path  # noqa: E731
    for name in ("model", "critic_model", "init_critic_from", "reference_model", "eval_data"):
        flags[name] = absolute(flags[name])
    flags["data"] = ",".join(absolute(path) + (f":{weight!r}" if weight else "")
                             for path, weight in parse_datasets(flags["data"]))
    program, colon, function = flags["reward"].rpartition(":")
    if colon and not is_url(flags["reward"]) and Path(program).exists():
        flags["reward"] = f"{Path(program).resolve()}:{function}"
    return flags


# ---------------------------------------------------------------------------------------------------------------------
# Start: process group, data, models, optimizers
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What every stage needs to know about this process."""

    args: Args
    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype           # of the forward pass; weights and optimizer are float32
    backend: str                 # attention back-end
    mesh: DeviceMesh
    timer: StageTimer


def start_run(args: Args) -> Run:
    """Join the process group. CPU tensors travel over gloo, GPU tensors over NCCL."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)                                   # a plain `python train_ppo_vl.py` is one rank
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32, "float32": torch.float32,
             "bfloat16": torch.bfloat16}[args.model.dtype]
    try:
        backend = choose_attention(args.model.attention, device, dtype)
    except ValueError as error:
        raise UserError(str(error)) from error
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                                timeout=timedelta(seconds=args.run.timeout))
    if rank == 0:
        install = f" (flash-attn is not installed; to build it: {FLASH_ATTN_INSTALL})" if backend == "varlen" else ""
        print(f"{world} x {device.type}, attention: {backend}{install}, compute: {str(dtype)[6:]}", flush=True)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            print("warning: restarted workers cannot connect through torchrun's own store; for --max_restarts set "
                  "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in front of torchrun", flush=True)
    return Run(args, rank, world, device, dtype, backend, init_device_mesh(device.type, (world,)), StageTimer())


def fail_together(problem: str | None) -> None:
    """Raise UserError on every rank if any rank has a problem; one rank raising alone would leave the others waiting."""
    problems = [p for p in all_gather_json(problem) if p]
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))


def load_data(run: Run) -> tuple[Processor, list[list[Prompt]], list[float], list[Prompt]]:
    """Processor, checked rows of each training set and the sets' weights, and held-out rows; the same on every rank.

    Raises:
        UserError: on every rank alike: bad checkpoint files or bad rows, with file and line.
    """
    args, problem, sets = run.args, None, parse_datasets(run.args.data.data)
    files = [("data", path, args.data.max_rows) for path, _ in sets]
    files += [("eval_data", args.data.eval_data, args.data.max_eval_rows)] if args.data.eval_data else []
    loaded: dict[str, list[list[Prompt]]] = {"data": [], "eval_data": []}
    try:
        processor = Processor(str(resolve_folder(args.model.model)), args.data.min_pixels, args.data.max_pixels)
        for name, path, limit in files:
            rows, skipped = load_prompts(
                path, processor, prompt_column=args.data.prompt_column, images_column=args.data.images_column,
                reference_column=args.data.reference_column, label_column=args.data.label_column,
                system_prompt=args.data.system_prompt, max_prompt_tokens=args.data.max_prompt_tokens,
                on_bad_row=args.data.on_bad_row, verify_images=args.data.verify_images, limit=limit)
            loaded[name].append(rows)
            if skipped and run.rank == 0:
                print(f"--{name}: skipped {len(skipped)} bad rows of {path}:", *skipped[:5], sep="\n  ", flush=True)
    except ValueError as error:
        problem = str(error)
    fail_together(problem)
    weights = [float(len(rows)) if weight is None else weight for rows, (_, weight) in zip(loaded["data"], sets)]
    return processor, loaded["data"], weights, sum(loaded["eval_data"], [])


class Policy(nn.Module):
    """Actor or reference: a packed row in, log-probs of its response tokens out. Full logits never exist."""

    def __init__(self, model: nn.Module, processor: Processor, args: Args):
        super().__init__()
        self.model = model
        self.temperature, self.min_new_tokens = args.rollout.temperature, args.rollout.min_new_tokens
        self.chunk = args.update.head_chunk
        banned = torch.zeros(model.config.text_config.vocab_size, dtype=torch.bool)
        banned[list(processor.banned_ids)] = True
        self.register_buffer("banned", banned, persistent=False)                                                 # (V,)
        self.register_buffer("stop_ids", torch.tensor(stop_token_ids(processor, args)), persistent=False)

    def forward(self, row: Row, attention: PackedAttention, entropy: bool = False):
        """Returns logp (T,) float32 and entropy (T,) or None."""
        hidden = language_hidden(self.model, row, attention)                                                   # (L, H)
        return losses.linear_logprobs(hidden[row.predict], self.model.lm_head.weight, row.targets,
                                      temperature=self.temperature, banned=self.banned,
                                      row_banned=row.step < self.min_new_tokens, row_banned_ids=self.stop_ids,
                                      entropy=entropy, chunk=self.chunk)


class Critic(nn.Module):
    """The value of the state before each response token, read from the row that predicts the token."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.value_head = nn.Linear(model.config.text_config.hidden_size, 1, bias=False)

    def forward(self, row: Row, attention: PackedAttention) -> torch.Tensor:
        """Returns values (T,) float32."""
        hidden = language_hidden(self.model, row, attention)                                                   # (L, H)
        return self.value_head(hidden[row.predict].float()).sum(dim=-1)      # not a view: FSDP2 hooks the output


def stop_token_ids(processor: Processor, args: Args) -> list[int]:
    """The checkpoint's stop tokens and those of --stop_tokens.

    Raises:
        ValueError: a name that is not one token.
    """
    ids = set(processor.stop_ids)
    for text in filter(None, args.rollout.stop_tokens.split(",")):
        encoded = processor.tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) != 1:
            raise ValueError(f"--stop_tokens: {text!r} is {len(encoded)} tokens, not one; --stop_strings takes any text")
        ids.add(encoded[0])
    return sorted(ids)


def build_models(run: Run, processor: Processor) -> tuple[Policy, Critic | None, Policy | None]:
    """Actor, critic (gae only) and reference (only if a KL is used), sharded, with their weights."""
    args = run.args
    actor = critic = reference = problem = None
    try:
        folder = resolve_folder(args.model.model)
        model = skeleton(processor.config)
        for parameter in model.model.visual.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(run.dtype)   # replicated, outside FSDP's precision policy; buffers stay float32
        actor = Policy(model, processor, args)
        actor.spelled = load_sharded(run, actor, folder)
        if args.algorithm.advantage == "gae":
            critic = Critic(skeleton(processor.config, vision=False, head=False))
            load_sharded(run, critic, with_same_tower(args.model.critic_model, folder))
        if args.algorithm.kl_coef > 0:
            reference = Policy(skeleton(processor.config, vision=False), processor, args).requires_grad_(False)
            load_sharded(run, reference, with_same_tower(args.model.reference_model, folder))
    except ValueError as error:
        problem = str(error)
    fail_together(problem)
    if args.model.gradient_checkpointing:
        for module in filter(None, (actor, critic)):
            module.model.model.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    return actor, critic, reference


def load_sharded(run: Run, module: nn.Module, folder: Path) -> dict[str, str]:
    """Shard a module that is on meta (ZeRO-3, FSDP2), allocate the shards and stream the weights into them."""
    full = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=run.dtype if run.dtype != torch.float32 else None, reduce_dtype=torch.float32)
    core = module.model.model
    use_attention(module.model, run.backend)
    for layer in core.language_model.layers:
        fully_shard(layer, mesh=run.mesh, mp_policy=policy)
    head = getattr(module, "value_head", None)
    if head is not None:
        fully_shard(head, mesh=run.mesh, mp_policy=full)
    frozen = set(core.visual.parameters()) if core.visual is not None else set()
    fully_shard(module, mesh=run.mesh, mp_policy=policy, ignored_params=frozen)
    materialize(module, run.device)
    if head is None:
        return load_weights(module.model, folder)
    nn.init.zeros_(head.weight)
    return load_weights(module.model, folder, {"value_head.weight": head.weight})


def build_optimizer(module: nn.Module, lr: float, args: Args) -> torch.optim.AdamW:
    """AdamW on the trained parameters; matrices decay, biases and norms (one dimension) do not."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2], "weight_decay": args.update.weight_decay},
              {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr,
                                  betas=(args.update.adam_beta1, args.update.adam_beta2))
    for parameter in trained:      # what AdamW would make at its first step; a checkpoint before that would otherwise take one
        optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter),
                                      "exp_avg_sq": torch.zeros_like(parameter)}
    return optimizer


def lr_factor(step: int, args: UpdateArgs, delay: int = 0) -> float:
    """Learning rate of 1-based ``step`` as a fraction of the base; the actor's schedule starts after its frozen steps."""
    step, steps = step - delay, max(1, args.steps - delay)
    if step <= args.warmup_steps:
        return step / (args.warmup_steps + 1)
    progress = min(1.0, (step - args.warmup_steps) / max(1, steps - args.warmup_steps))
    if args.lr_schedule == "cosine":
        return args.min_lr_ratio + (1 - args.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    if args.lr_schedule == "linear":
        return 1 - (1 - args.min_lr_ratio) * progress
    return 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Prompts of a step
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class StepPrompts:
    """The prompts of one step. Each rank decodes, and computes features for, the pictures of its own prompts only."""

    prompts: list[Prompt]
    draws: list[int]                               # number of this draw among all prompts ever taken
    owners: list[int]                              # rank that rolls the prompt out
    positions: dict[int, torch.Tensor]             # (3, P) for the prompts needed so far
    patches: dict[int, tuple]                      # own pictures, until their features exist
    features: dict[int, torch.Tensor]              # own features, (K, M, H) on the CPU
    dropped: list[int]                             # prompts whose pictures do not decode (--on_bad_row skip)

    @property
    def lengths(self) -> list[int]:
        return [len(prompt.input_ids) for prompt in self.prompts]


class PromptLoader:
    """Takes prompts in data order and decodes the next step's pictures in threads while the model works."""

    def __init__(self, run: Run, processor: Processor, actor: Policy, datasets: list[list[Prompt]], weights: list[float],
                 dropped: int = 0):
        self.run, self.processor, self.datasets, self.model = run, processor, datasets, actor.model
        self.which, self.number = mix(weights, run.args.update.steps * run.args.rollout.prompts_per_step)
        self.pool = ThreadPoolExecutor(run.args.data.data_threads, thread_name_prefix="pictures")
        self.pending: dict[int, tuple] = {}
        self.dropped = dropped                                                      # prompts since the start of the run

    def __enter__(self) -> "PromptLoader":
        return self

    def __exit__(self, *_) -> None:
        self.pool.shutdown(cancel_futures=True)

    def prefetch(self, index: int) -> None:
        """Start decoding this rank's pictures of the 0-based step ``index``."""
        args = self.run.args
        if index >= args.update.steps:
            return
        size = args.rollout.prompts_per_step
        draws = range(index * size, (index + 1) * size)
        picks = take_rows(self.which[draws.start:draws.stop], self.number[draws.start:draws.stop],
                          [len(rows) for rows in self.datasets], args.run.seed)
        self.pending[index] = self.submit([self.datasets[k][row] for k, row in picks], list(draws))

    def submit(self, prompts: list[Prompt], draws: list[int]) -> tuple:
        own = range(self.run.rank, len(prompts), self.run.world)
        return prompts, draws, {i: self.pool.submit(load_pixels, prompts[i], self.processor) for i in own}

    def take(self, index: int) -> StepPrompts:
        """The prompts of a step, decoded."""
        prompts = self.collect(*self.pending.pop(index))
        if len(prompts.dropped) == len(prompts.prompts):
            raise UserError(f"no prompt is left in step {index + 1}: no picture of {prompts.prompts[0].source} and the others "
                            "decodes")
        return prompts

    def collect(self, prompts: list[Prompt], draws: list[int], futures: dict) -> StepPrompts:
        """Wait for the pictures.

        Raises:
            UserError: on every rank, if a picture of any rank does not decode and --on_bad_row is error.
        """
        patches, bad = {}, {}
        for i, future in futures.items():
            try:
                pixels = future.result()
            except ValueError as error:
                bad[i] = f"{prompts[i].source}: {error}"
            else:
                patches |= {i: pixels} if pixels is not None else {}
        problems = {int(i): message for part in all_gather_json(bad) for i, message in part.items()}
        if problems and self.run.args.data.on_bad_row == "error":
            raise UserError("\n".join(problems.values()))
        self.dropped += len(problems)
        owners = [i % self.run.world for i in range(len(prompts))]
        return StepPrompts(prompts, draws, owners, {}, patches, {}, sorted(problems))


def positions_of(model: nn.Module, prompts: StepPrompts, group: int) -> torch.Tensor:
    """(3, P) rotary positions of a prompt, computed at first use."""
    if group not in prompts.positions:
        prompts.positions[group] = prompt_positions(model, prompts.prompts[group], model.config.image_token_id)
    return prompts.positions[group]


# ---------------------------------------------------------------------------------------------------------------------
# Rollout
# ---------------------------------------------------------------------------------------------------------------------


def rollout(run: Run, processor: Processor, actor: Policy, prompts: StepPrompts, count: int, stream: int,
            greedy: bool = False) -> Samples:
    """Sample ``count`` responses of every prompt; returns all ranks' samples.

    The actor is unsharded once; then no collective runs, so ranks may finish at different times.
    """
    actor.eval()
    own = [g for g, owner in enumerate(prompts.owners) if owner == run.rank and g not in prompts.dropped]
    with torch.no_grad(), unsharded(actor):
        compute_features(run, actor, prompts)
        engine = RolloutEngine(run, processor, actor, prompts, own, count, stream, greedy)
        results = engine.generate(own, count)
    order = sorted(results)
    tokens = [results[key][0] for key in order]
    local = Samples(
        group=torch.tensor([group for group, _ in order], dtype=torch.int64),
        number=torch.tensor([number for _, number in order], dtype=torch.int64),
        lengths=torch.tensor([len(t) for t in tokens], dtype=torch.int64),
        truncated=torch.tensor([results[key][2] for key in order], dtype=torch.bool),
        tokens=torch.cat([torch.zeros(0, dtype=torch.int64), *tokens]),
        logprobs=torch.cat([torch.zeros(0), *(results[key][1] for key in order)]))
    return gather_samples(local)


def compute_features(run: Run, owner: nn.Module, prompts: StepPrompts) -> None:
    """Image features of the own prompts, once per prompt, several pictures per call of the vision tower."""
    waiting, size = [], 0
    groups = sorted(prompts.patches)
    for group in groups:
        waiting.append(group)
        size += len(prompts.patches[group][0])
        if size < run.args.update.max_tokens_per_pack and group != groups[-1]:
            continue
        patches, grids = (torch.cat(parts) for parts in zip(*(prompts.patches.pop(g) for g in waiting)))
        features = image_features(owner.model, patches, grids).cpu()                                        # (K, M, H)
        counts = [image_token_count(prompts.prompts[g], owner.model.config.image_token_id) for g in waiting]
        prompts.features |= dict(zip(waiting, features.split(counts, dim=1)))
        waiting, size = [], 0


def image_token_count(prompt: Prompt, image_token_id: int) -> int:
    return int((prompt.input_ids == image_token_id).sum())


# ---------------------------------------------------------------------------------------------------------------------
# Rewards. A rule reads the response alone: a prompt that shows `\boxed{...}` as an example must not earn a reward.
# ---------------------------------------------------------------------------------------------------------------------


BRACES = r"(?:\\.|[^{}\\]|\{" * 6 + "[^{}]*+" + r"\})*+" * 6  # balanced, six levels; `*+` never backtracks: linear time
ANSWER = {"boxed": re.compile(rf"(?=\\boxed\s*\{{({BRACES})\}})", re.DOTALL),  # the look-ahead finds a box in a box
          "answer": re.compile(r"<answer>((?:(?!</?answer>).)*+)</answer>", re.DOTALL)}
MAX_ANSWER = 512  # characters; longer answers compare as text, which bounds the work of the patterns below
SYMBOLS = str.maketrans({"−": "-", "×": "*", "·": "*", "π": r"\pi ", "√": r"\sqrt", "²": "^2", "°": ""})
SPELLINGS = [(re.compile(pattern, re.ASCII), new) for pattern, new in (  # applied in this order to lower-case text
    (r"(?<=\d)\\,(?=\d{3})|\\!|\\?\$|\^ ?(?:\\circ|\{ ?\\circ ?\})", ""),  # 12\,345   $5   90^\circ
    (r"\\(?:left|right)(?![a-z])|\\[,;: ]|~", " "), (r"\{,\}", ","), (r"\\(?:times|cdot)(?![a-z])", "*"),
    (rf"\\(?:text[a-z]*|math[a-z]+|mbox|boxed) ?\{{({BRACES})\}}", r" \1 "), (r"\\([{}%])", r"\1"),
    (r"\\[dt]?frac ?(?=[{\d])", r"\\frac"), (r"\\frac(\d)", r"\\frac{\1}"), (r"(\\frac\{[^{}]*\}) ?(\d)", r"\1{\2}"),
    (r" +(?![a-z0-9])|(?<![a-z0-9,)}]) +", ""),  # the other spaces have a meaning: "1 2" is not "12", "5 m" not "5m"
    (r"^\(?([a-z])\)?[.:]?$|\.+$", r"\1"))]  # a choice is its letter: (b)   b.   b:
NUMBER = r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,2}|\*10\^(?:\d|\{[+-]?\d{1,2}\}))?"
FACTOR = r"(?:[* ]?(?:\\?sqrt ?[{(]?\d+(?:\.\d+)?[)}]?|\\?pi(?![a-z])))"
PRODUCT = rf"(?:{NUMBER}{FACTOR}*|{FACTOR}+)"  # one number only: echoing the question's "2 * 2" must not count as 4
QUOTIENT = re.compile(rf"([+-]?)(?:(\d+) (?=\d+/\d+$))?({PRODUCT})(?:/({PRODUCT}))?", re.ASCII)
FRACTION = re.compile(rf"\\frac\{{([+-]?{PRODUCT})\}}\{{({PRODUCT})\}}({FACTOR}*)$", re.ASCII)
UNIT = re.compile(r"(?: |(?<=\d)(?=[a-z]{2}))(?!\w*illion|thousand|hundred|dozen)(?:square |cubic )?[a-z]+"
                  r"(?:(?:/| per )[a-z]+)?(?:\^\{?[23]\}?)?$")  # 5 m   5cm   5 m/s^2; not 5x, which has a variable


def extract_answer(response: str, rule: str) -> str | None:
    r"""Content of the last `\boxed{...}` (rule "boxed") or `<answer>...</answer>` (rule "answer"); None without one."""
    found = ANSWER[rule].findall(response)
    return found[-1].strip() if found else None


def format_score(response: str, rule: str) -> float:
    """1.0 for exactly one `<think>...</think>` with an answer, not an empty one, behind it; else 0.0."""
    thought, closed, rest = response.partition("</think>")
    once = response.count("<think>") == thought.count("<think>") == 1 and "</think>" not in rest
    return float(bool(closed and once and extract_answer(rest, rule)))


def exact_match(given: str, reference: str) -> bool:
    """Equality up to case and white space."""
    return " ".join(given.lower().split()) == " ".join(reference.lower().split())


def answers_equal(given: str, reference: str) -> bool:
    """Whether two answers agree as text, choice letter, number or ordered list; never raises on any string.

    Case, spaces and LaTeX spelling do not count. "x = 3" equals "3", not "y = 3"; a percentage its hundredth and its
    bare number. A unit behind `given` is ignored if `reference` is a bare number. An empty answer equals nothing.
    """
    if max(len(given), len(reference)) > MAX_ANSWER:
        return exact_match(given, reference)
    a, b = (" ".join(text.translate(SYMBOLS).lower().split()) for text in (given, reference))
    for pattern, new in SPELLINGS:
        a, b = pattern.sub(new, a), pattern.sub(new, b)
    xs, ys = (re.split(r"([()\[\]]|, ?)", text) for text in (a, b))  # elements of a tuple, its brackets and commas
    return bool(a and b) and (_equal(a, b) or (len(xs) == len(ys) > 1 and all(map(_equal, xs, ys))))


def _equal(a: str, b: str) -> bool:
    plain_a, plain_b = (re.sub(r"(?<=[,)}]) |(?<=\d) (?=[a-z])", "", text) for text in (a, b))
    if plain_a == plain_b:
        return True
    (a_name, a), (b_name, b) = (re.fullmatch(r"(?:(\\?[a-z]\w*)=)?(.*)", text).groups() for text in (a, b))
    if a_name and b_name and a_name != b_name:
        return False
    x, y = parse_number(a.removesuffix("%")), parse_number(b.removesuffix("%"))
    x = parse_number(UNIT.sub("", a)) if x is None else x
    if x is None or y is None:
        return a == b
    scale = Fraction(100) ** (b.endswith("%") - a.endswith("%"))
    tolerance = 0 if isinstance(x, Fraction) and isinstance(y, Fraction) else 1e-6
    return any(abs(value - y) <= tolerance * abs(y) for value in (x, x * scale))


def parse_number(text: str) -> Fraction | float | None:
    r"""Value of -1,234.5, 3*10^{5}, 1 1/2, 2\pi/3, \frac{3\sqrt{2}}{2} and the like, below 1e300 and normalised as in
    `answers_equal`: a Fraction if there is no decimal point, root or pi. None for any other text."""
    text = re.sub(r"(?<=\d)\\frac\{(\d+)\}\{(\d+)\}$", r" \1/\2", text)  # 1\frac{1}{2} is 1 1/2
    match = QUOTIENT.fullmatch(FRACTION.sub(r"\1\3/\2", text))  # \frac{4}{3}\pi is 4\pi/3
    if not match:
        return None
    sign, whole, *sides = match.groups(default="")
    try:
        for i, side in enumerate(sides):
            number = re.sub(r"[,{}]", "", re.match(rf"(?:{NUMBER})?", side)[0]).replace("*10^", "e") or "1"
            roots = [math.sqrt(float(n)) if n else math.pi for n in re.findall(r"sqrt ?[{(]?([\d.]+)|pi", side)]
            sides[i] = math.prod(roots, start=float(number) if "." in number else Fraction(number))
        value = int(sign + "1") * (int(whole or 0) + sides[0] / sides[1])
        return value if abs(value) < 1e300 else None
    except (ZeroDivisionError, OverflowError):
        return None


def rule_reward(rule: str, prompts, responses, references, labels, images) -> dict[str, list[float]]:
    """`exact`: 1 where the whole response is the reference; else 0.9 accuracy of the extracted answer + 0.1 format."""
    if rule == "exact":
        accuracy = [float(exact_match(response, reference)) for response, reference in zip(responses, references)]
        return {"reward": accuracy, "accuracy": accuracy}
    accuracy = [float(answers_equal(extract_answer(a, rule) or "", b)) for a, b in zip(responses, references)]
    formats = [format_score(response, rule) for response in responses]
    return {"reward": [0.9 * a + 0.1 * f for a, f in zip(accuracy, formats)], "accuracy": accuracy, "format": formats}


def is_url(spec: str) -> bool:
    """Whether `--reward` names a server."""
    return spec.startswith(("http://", "https://"))


def load_reward(spec: str, args: RewardArgs = RewardArgs()) -> Callable:
    """The reward function of `--reward`: `exact`, `boxed`, `answer`, `path.py:function`, or an URL. Raises UserError.

    `f(prompts, responses, references, labels, images)` gets lists of equal length and returns a list of floats or a
    dict of such lists: its "reward" is the reward, or else the sum of all; the others are logged as components.
    """
    if spec in ("exact", "boxed", "answer"):
        return lambda *batch: rule_reward(spec, *batch)
    if is_url(spec):
        return remote_reward(spec, args)
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"--reward {spec}: expected one of exact, boxed, answer, an existing path.py:function, or an "
                        "URL http://host:port/path")
    module_spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = sys.modules[module_spec.name] = importlib.util.module_from_spec(module_spec)  # dataclasses look there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"--reward {spec}: {path} raised {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        raise UserError(f"--reward {spec}: {path} has no function {name!r}")
    return getattr(module, name)


class RewardError(RuntimeError):
    """A reward function failed; the message shows its spec, the numbers and the sample."""


MAX_REPLY = 2 ** 26  # bytes that are read of a reward server's answer


def remote_reward(url: str, args: RewardArgs) -> Callable:
    """The reward function that asks a server; the README has the contract. Raises UserError: an URL that cannot be asked.

    A call POSTs its samples --remote_batch at a time, one request after the other: `score_samples` makes --reward_workers
    calls side by side. What may pass (time-outs, lost connections, answers 5xx) is tried again; any other answer but a
    valid one is a RewardError at once. No proxy, redirect or password is used.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        valid = bool(host) and "@" not in parts.netloc and not parts.fragment and re.fullmatch("[!-~]+", url)
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        raise UserError(f"--reward {url}: expected http://host:port/path or https://..., without spaces, user name or #")
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def post(body: bytes) -> tuple[int, bytes]:
        """One try: the status and what the server said."""
        deadline, said = time.monotonic() + args.remote_timeout, b""
        connection = connect(host, port, timeout=args.remote_timeout)
        try:
            connection.request("POST", target, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            while chunk := response.read1(2 ** 16):
                said += chunk
                if len(said) > MAX_REPLY:
                    raise RewardError(f"the server's answer is longer than {MAX_REPLY} bytes")
                if time.monotonic() > deadline:  # the socket's own time-out starts anew with every byte
                    raise TimeoutError("timed out in the middle of the answer")
            if response.length:  # a read1 at the end of the stream does not look
                raise http.client.IncompleteRead(said, response.length)
            return response.status, said
        finally:
            connection.close()

    def ask(body: bytes) -> bytes:
        """The server's answer with status 200, after as many tries as it takes or --remote_retries allow."""
        for attempt in range(args.remote_retries + 1):
            try:
                status, said = post(body)
                problem = f"HTTP {status}: {said[:500].decode(errors='replace')!r}"
            except (OSError, http.client.IncompleteRead) as error:
                status, problem = 0, f"{type(error).__name__}: {error}"
            except http.client.HTTPException as error:
                raise RewardError(f"the server does not speak HTTP: {type(error).__name__}: {error}") from error
            if status == 200:
                return said
            if 0 < status < 500:
                raise RewardError(f"the server answered {problem}")
            if attempt < args.remote_retries:
                pause = 0.5 * 2 ** min(attempt, 4)
                print(f"--reward {url}: {problem}; retry {attempt + 1} of {args.remote_retries} in {pause:g} s", flush=True)
                time.sleep(pause)
        raise RewardError(f"no answer in {args.remote_retries + 1} tries (--remote_retries), at last {problem}")

    def score(prompts, responses, references, labels, images) -> dict[str, list[float]]:
        columns: dict[str, list[float]] = {}
        for start in range(0, len(responses), args.remote_batch):
            part = slice(start, start + args.remote_batch)
            pictures = {path: encode_picture(path) for path in sorted({path for paths in images[part] for path in paths})}
            said = ask(json.dumps({
                "queries": [prompt + response for prompt, response in zip(prompts[part], responses[part])],
                "prompts": prompts[part], "responses": responses[part], "references": references[part],
                "labels": labels[part], "images": [[pictures[path] for path in paths] for paths in images[part]]}).encode())
            answer = read_reply(said, len(responses[part]))
            if columns and answer.keys() != columns.keys():
                raise RewardError(f"the server's components were {sorted(columns)} and are now {sorted(answer)}")
            for name, values in answer.items():
                columns.setdefault(name, []).extend(values)
        return columns

    return score


def encode_picture(path: str) -> str:
    """A picture, upright and RGB, as PNG in base64."""
    file = io.BytesIO()
    read_image(path).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def read_reply(said: bytes, count: int) -> dict[str, list[float]]:
    """{"rewards": [...], further components} of a server's answer, as a reward function returns them; `score_samples`
    looks at the numbers. Raises RewardError."""
    try:
        reply = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"the server's answer is not JSON ({error}): {said[:500].decode(errors='replace')!r}") from error
    if not isinstance(reply, dict) or "rewards" not in reply or "reward" in reply:
        raise RewardError(f'the server must answer {{"rewards": [...]}}, with components beside it or not: {reply!r:.500}')
    for name, values in reply.items():
        if not isinstance(values, list) or len(values) != count:
            raise RewardError(f"the server's {name!r} must be a list of {count} numbers, one per sample: {values!r:.500}")
    return {"reward": reply.pop("rewards")} | reply


def score_samples(reward_fn: Callable, prompts: list, responses: list[str], references: list, labels: list,
                  images: list, *, spec: str, timeout_s: float = 0.0, workers: int = 1) -> tuple[list, dict[str, list]]:
    """Score n samples in at most `workers` chunks side by side: n rewards, and n values of each component by name.
    RewardError if the function raises, is later than `timeout_s` (0 = any time), or returns other than finite numbers.
    """
    batch, n, results, columns = (prompts, responses, references, labels, images), len(responses), {}, {}
    size = -(-n // workers) or 1

    def work(start: int) -> None:
        try:
            results[start] = reward_fn(*(column[start:start + size] for column in batch))
        except BaseException as error:  # raised again below; a SystemExit would vanish in its thread
            results[start] = error

    def failure(i: int, problem: str) -> RewardError:
        named = zip(("prompt", "response", "reference", "label"), batch)
        sample = "".join(f"\n  {name}: {str(column[i])[-500:]!r}" for name, column in named)
        return RewardError(f"--reward {spec}: {problem}; sample {i} of {n} (the last 500 characters of each):{sample}")

    # Daemon threads, not a ThreadPoolExecutor, which would wait at exit for a reward function that hangs.
    threads = {start: threading.Thread(target=work, args=(start,), daemon=True) for start in range(0, n, size)}
    deadline = time.monotonic() + timeout_s
    for thread in threads.values():
        thread.start()
    for start, thread in threads.items():
        count = min(size, n - start)
        thread.join(max(0.0, deadline - time.monotonic()) if timeout_s > 0 else None)
        result = results.get(start, TimeoutError(f"took longer than {timeout_s:g} s (--reward_timeout)"))
        if isinstance(result, BaseException):
            raise failure(start, f"{count} samples raised {type(result).__name__}: {result}") from result
        result = result if isinstance(result, dict) else {"reward": result}
        if not result or (columns and result.keys() != columns.keys()):
            raise failure(start, f"components {sorted(result)}, expected {sorted(columns) or 'at least one'}")
        for name, values in result.items():
            values = values.tolist() if hasattr(values, "tolist") else values  # numpy, torch
            if not isinstance(values, (list, tuple)) or len(values) != count:
                raise failure(start, f"{name} must be a list of {count} numbers, got {values!r:.200}")
            for i, value in enumerate(values, start):
                value = value.tolist() if hasattr(value, "tolist") else value
                if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:  # NaN as well
                    raise failure(i, f"{name} is {value!r}, not a finite number")
                columns.setdefault(name, []).append(float(value))
    return columns.pop("reward", None) or [math.fsum(values) for values in zip(*columns.values())], columns


def score_rewards(run: Run, processor: Processor, reward: Callable, prompts: StepPrompts, samples: Samples) -> Samples:
    """Score this rank's responses, the text after the prompt only; returns all samples with scores and components.

    Raises:
        UserError: on every rank, when the reward fails on any: the sample is in the message.
    """
    mine = torch.tensor([i for i, g in enumerate(samples.group.tolist()) if prompts.owners[g] == run.rank], dtype=torch.int64)
    local, problem = samples.select(mine), None
    rows = [prompts.prompts[g] for g in local.group.tolist()]
    responses = processor.tokenizer.batch_decode([t.tolist() for t in local.split(local.tokens)], skip_special_tokens=True)
    scores, components = [], {}
    if rows:
        try:
            scores, components = score_samples(
                reward, [p.text for p in rows], responses, [p.reference for p in rows], [p.label for p in rows],
                [list(p.images) for p in rows], spec=run.args.reward.reward, timeout_s=run.args.reward.reward_timeout,
                workers=run.args.reward.reward_workers)
        except RewardError as error:
            problem = str(error)
    fail_together(problem)
    parts = [part for part in all_gather_json(sorted(components) if rows else None) if part is not None]
    names = parts[0] if parts else []                                                         # a rank may have no samples
    if any(part != names for part in parts):
        raise UserError(f"--reward {run.args.reward.reward}: components differ between calls: {parts}")
    local.scores = torch.tensor(scores, dtype=torch.float32)
    local.components = {name: torch.tensor(components.get(name, []), dtype=torch.float32) for name in names}
    return gather_samples(local)


# ---------------------------------------------------------------------------------------------------------------------
# Scoring and advantages
# ---------------------------------------------------------------------------------------------------------------------


def packed_rows(run: Run, model: nn.Module, prompts: StepPrompts, samples: Samples, groups=None):
    """This rank's packed rows of the given prompt groups (all by default), on the device, one after the other.

    All ranks get equally many rows; surplus ones are empty and weigh nothing.
    """
    config, limit = model.config, run.args.update.max_tokens_per_pack
    lengths = prompts.lengths
    blocks = make_blocks(samples, lengths, limit, groups, run.args.update.share_prompts)
    packs = make_packs(samples, lengths, blocks, run.world, limit, config.text_config.hidden_size)
    needed = [{group for pack in part for group, _ in pack} for part in packs]
    used = set().union(*needed)
    levels = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or [])
    shapes = {g: (levels, image_token_count(prompts.prompts[g], config.image_token_id), config.text_config.hidden_size)
              for g in used if prompts.prompts[g].grids}
    features = exchange_features(prompts.features, prompts.owners, needed, shapes, run.dtype)
    for pack in packs[run.rank]:
        members = {group for group, _ in pack}
        row = build_row(samples, pack, {g: prompts.prompts[g].input_ids for g in members},
                        {g: positions_of(model, prompts, g) for g in members}, features, config.image_token_id)
        yield row.to(run.device), PackedAttention(row.segments, run.backend, run.device)


@torch.no_grad()
def score_tokens(run: Run, module: nn.Module, prompts: StepPrompts, samples: Samples) -> torch.Tensor:
    """(N,) log-probs or values of all samples, on every rank."""
    module.eval()
    result = torch.zeros(len(samples.tokens))
    for row, attention in packed_rows(run, module.model, prompts, samples):
        out = module(row, attention)
        result[row.flat] = (out[0] if isinstance(out, tuple) else out).cpu()
    clear_forward_order(module)
    module.reshard()                                 # FSDP2 leaves the root's weights gathered, for a backward that never comes
    dist.all_reduce(result)
    return result


def score_logprobs_and_values(run: Run, actor: Policy, reference: Policy | None, critic: Critic | None,
                              prompts: StepPrompts, samples: Samples) -> None:
    """Fill old_logprobs, ref_logprobs and values."""
    recompute = run.args.algorithm.recompute_old_logprobs
    samples.old_logprobs = score_tokens(run, actor, prompts, samples) if recompute else samples.logprobs
    if reference is not None:
        samples.ref_logprobs = score_tokens(run, reference, prompts, samples)
    if critic is not None:
        samples.values = score_tokens(run, critic, prompts, samples)


def compute_advantages(run: Run, samples: Samples, kl_controller: losses.KLController) -> dict[str, float]:
    """Fill advantages and returns; the whole step at once, alike on every rank. Returns the rollout metrics."""
    algorithm, mask = run.args.algorithm, samples.mask                                                # (S, longest)
    kl = torch.zeros(mask.shape)
    if samples.ref_logprobs is not None:
        kl = samples.padded(losses.kl_penalty(algorithm.kl_estimator, samples.old_logprobs, samples.ref_logprobs))
    in_reward = kl_controller.value if algorithm.kl_in == "reward" else 0.0
    if algorithm.advantage in ("grpo", "rloo"):
        scores = samples.scores - in_reward * kl.sum(dim=1)
        advantages = losses.group_scores(scores, samples.group, algorithm.advantage)[:, None] * mask
        returns = advantages
    else:
        rewards = losses.token_rewards(samples.scores, kl, mask, in_reward)
        if algorithm.advantage == "gae":
            advantages, returns = losses.gae(rewards, samples.padded(samples.values), mask, algorithm.gamma,
                                             algorithm.gae_lambda)
        elif algorithm.advantage == "reinforce++":
            advantages = returns = losses.rewards_to_go(rewards, mask, algorithm.gamma)
        else:
            raise ValueError(f"unknown --advantage {algorithm.advantage}")
    if run.args.whiten:
        advantages = losses.masked_whiten(advantages, mask)
    samples.advantages, samples.returns = advantages[mask], returns[mask]
    return rollout_metrics(samples, kl[mask])


def rollout_metrics(samples: Samples, kl: torch.Tensor) -> dict[str, float]:
    lengths, scores, advantages = samples.lengths.float(), samples.scores, samples.advantages
    metrics = {"rollout/reward": scores.mean(), "rollout/reward_std": scores.std(correction=0),
               "rollout/response_length": lengths.mean(), "rollout/response_length_max": lengths.max(),
               "rollout/truncated": samples.truncated.float().mean(), "rollout/return": samples.returns.mean(),
               "rollout/samples": len(samples), "train/advantages_mean": advantages.mean(),
               "train/advantages_std": advantages.std(correction=0), "train/advantages_min": advantages.min(),
               "train/advantages_max": advantages.max()}
    metrics |= {f"rollout/{name}_reward": values.mean() for name, values in samples.components.items()}
    if samples.ref_logprobs is not None:
        metrics["train/kl"] = kl.mean()
    if samples.values is not None:
        metrics["train/values"] = samples.values.mean()
        metrics["train/explained_variance"] = losses.explained_variance(
            samples.values, samples.returns, torch.ones(len(samples.values)))
    return {name: float(value) for name, value in metrics.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Updates
# ---------------------------------------------------------------------------------------------------------------------


def minibatch_weights(run: Run, samples: Samples, groups) -> torch.Tensor:
    """(N,) weight of every token in the minibatch of prompt ``groups``, by its global counts; 0 elsewhere."""
    lengths = samples.lengths * torch.isin(samples.group, torch.as_tensor(groups))
    weights = losses.token_weights(lengths, run.args.algorithm.loss_aggregation, int(lengths.sum()), int((lengths > 0).sum()),
                                   run.args.rollout.max_new_tokens)                                                # (S,)
    return weights.float().repeat_interleave(samples.lengths)


def apply_gradients(run: Run, module: nn.Module, optimizer: torch.optim.Optimizer, lr: float) -> tuple[float, bool]:
    """Clip by the model's global norm and step. A non-finite norm, which all ranks see alike, skips the step."""
    bound = run.args.update.max_grad_norm or float("inf")
    norm = nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], bound)
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    applied = math.isfinite(norm)
    if applied:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, applied


def update_critic(run: Run, critic: Critic, optimizer: torch.optim.Optimizer, prompts: StepPrompts, samples: Samples,
                  step: int) -> dict[str, float]:
    """Regress the values on the returns for all epochs and minibatches of a step."""
    args, sums = run.args, MetricSums()
    lr = args.update.critic_lr * lr_factor(step, args.update)
    critic.train()
    for epoch in range(args.update.epochs):
        for groups in minibatches(len(prompts.prompts), args.update.minibatches, (args.run.seed, step, epoch)):
            weights = minibatch_weights(run, samples, groups)
            if not weights.any():
                continue
            total = 0.0
            for row, attention in packed_rows(run, critic.model, prompts, samples, groups):
                values = critic(row, attention)                                                                # (T,)
                old, returns, weight = (x[row.flat].to(run.device) for x in (samples.values, samples.returns, weights))
                loss = (weight * losses.value_loss(values, old, returns, args.algorithm.value_clip)).sum()
                (loss * run.world).backward()                                     # FSDP averages gradients over ranks
                total = total + loss.detach()
            norm, applied = apply_gradients(run, critic, optimizer, lr)
            sums.add("train/critic_skipped", float(not applied), 1)
            if applied:
                sums.add("train/critic_grad_norm", norm, 1)
                sums.add("train/critic_loss", total, 1 / run.world)      # the ranks' shares of a minibatch add up to its loss
    return sums.reduce() | {"train/critic_lr": lr}


def update_actor(run: Run, actor: Policy, optimizer: torch.optim.Optimizer, prompts: StepPrompts, samples: Samples, step: int,
                 kl_coef: float) -> dict[str, float]:
    """Policy-gradient updates for all epochs and minibatches of a step, or until --target_kl is exceeded."""
    args, sums = run.args, MetricSums()
    lr = args.update.actor_lr * lr_factor(step, args.update, args.update.freezing_actor_steps)
    actor.train()
    updates = 0
    for epoch in range(args.update.epochs):
        for groups in minibatches(len(prompts.prompts), args.update.minibatches, (args.run.seed, step, epoch)):
            weights = minibatch_weights(run, samples, groups)
            if not weights.any():
                continue
            rows = []
            for row, attention in packed_rows(run, actor.model, prompts, samples, groups):
                loss, stats = actor_loss(run, actor, row, attention, samples, weights, kl_coef)
                (loss * run.world).backward()                                     # FSDP averages gradients over ranks
                rows.append(stats)
            if args.update.target_kl and exceeds(rows, args.update.target_kl):
                optimizer.zero_grad(set_to_none=True)
                return sums.reduce() | {"train/actor_lr": lr, "train/actor_updates": updates}
            norm, applied = apply_gradients(run, actor, optimizer, lr)
            sums.add("train/actor_skipped", float(not applied), 1)
            if applied:                                         # the sums of a skipped minibatch would be NaN
                sums.add("train/actor_grad_norm", norm, 1)
                add_actor_stats(sums, rows, 1 / run.world, first=updates == 0)
            updates += applied
    return sums.reduce() | {"train/actor_lr": lr, "train/actor_updates": updates}


def exceeds(rows: list[dict[str, torch.Tensor]], target_kl: float) -> bool:
    """Whether KL(old, new) per token of a minibatch, over all ranks, is above the target."""
    moved = torch.tensor([sum(float(stats["approx_kl"]) for stats in rows), sum(stats["tokens"] for stats in rows)],
                         dtype=torch.float64)
    dist.all_reduce(moved)
    return bool(moved[0] > target_kl * moved[1])


def actor_loss(run: Run, actor: Policy, row: Row, attention: PackedAttention, samples: Samples, weights: torch.Tensor,
               kl_coef: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This row's share of the loss of a minibatch, and sums over its tokens for the metrics."""
    algorithm = run.args.algorithm
    pick = lambda values: values[row.flat].to(run.device)  # noqa: E731
    old, sampled = pick(samples.old_logprobs), pick(samples.logprobs)                                           # (T,)
    advantages, weight = pick(samples.advantages), pick(weights)                                                # (T,)
    logp, entropy = actor(row, attention, entropy=True)                                                         # (T,)
    correction = (old - sampled).exp().clamp(max=algorithm.importance_cap) if algorithm.recompute_old_logprobs else None
    terms, stats = losses.policy_loss("ppo", logp, old, advantages, row.sample, len(samples), algorithm.clip_low,
                                      algorithm.clip_high, algorithm.dual_clip, correction)
    loss = (weight * terms).sum()
    stats |= {"policy_loss": loss.detach(), "entropy": entropy.detach().sum(), "tokens": len(row.targets),
              "gap": (logp.detach() - sampled).abs().sum()}
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * (weight * entropy).sum()
    if algorithm.kl_in == "loss" and samples.ref_logprobs is not None:
        kl_loss = (weight * losses.kl_penalty(algorithm.kl_estimator, logp, pick(samples.ref_logprobs))).sum()
        loss = loss + kl_coef * kl_loss
        stats["kl_loss"] = kl_loss.detach()
    return loss, stats


def add_actor_stats(sums: MetricSums, rows: list[dict[str, torch.Tensor]], share: float, first: bool) -> None:
    """Add a minibatch: sums over the tokens of its rows, and its losses, which this rank's rows are a ``share`` of."""
    tokens = sum(stats["tokens"] for stats in rows)
    for name in ("approx_kl", "clipped_low", "clipped_high", "clipped_dual", "ratio", "entropy"):
        sums.add(f"train/{name}", sum(stats[name] for stats in rows), tokens)
    for name in rows[0].keys() & {"policy_loss", "kl_loss"}:
        sums.add(f"train/{name}", sum(stats[name] for stats in rows), share)
    for stats in rows:
        sums.max("train/ratio_max", stats["ratio_max"])
    # Before the first update the trained policy is the one that sampled: any gap is a bug, or low precision.
    if first:
        sums.add("train/sampler_gap", sum(stats["gap"] for stats in rows), tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, records, export
# ---------------------------------------------------------------------------------------------------------------------


def falls_due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps (-1: only after the last one, 0: never) happens after ``step``."""
    return (step == last and every != 0) or (every > 0 and step % every == 0)


def evaluation_due(args: Args, step: int, rows: int) -> bool:
    """Whether to evaluate after ``step``; --eval_every -1: when it completes a pass over the data."""
    passes = [done * args.rollout.prompts_per_step // rows for done in (step - 1, step)]
    return bool(args.data.eval_data) and (falls_due(step, args.eval.eval_every, args.update.steps)
                                          or (args.eval.eval_every == -1 and passes[1] > passes[0]))


def evaluate(run: Run, processor: Processor, actor: Policy, reward: Callable, rows: list[Prompt], log: RunLogger,
             step: int) -> dict[str, float]:
    """Answer every held-out prompt once over all ranks; write the answers; return the eval/ metrics."""
    count, size = run.args.eval.eval_samples, run.args.rollout.prompts_per_step
    sums, records = MetricSums(), []
    started = time.perf_counter()
    with PromptLoader(run, processor, actor, [], []) as loader:
        chunks = [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
        pending = loader.submit([rows[i] for i in chunks[0]], [rows[i].index for i in chunks[0]])
        for n, chunk in enumerate(chunks):
            prompts = loader.collect(*pending)
            if n + 1 < len(chunks):                                   # decode the next pictures while the model answers
                pending = loader.submit([rows[i] for i in chunks[n + 1]], [rows[i].index for i in chunks[n + 1]])
            samples = rollout(run, processor, actor, prompts, count, EVAL, greedy=count == 1)
            samples = score_rewards(run, processor, reward, prompts, samples)
            records += sample_records(processor, prompts, samples)
        dropped = loader.dropped
    if not records:
        raise UserError("evaluation: no held-out prompt is left, no picture decodes")
    for record in records:                                     # every rank has all records: these sums need no reduction
        for name in ("reward", "response_length", "truncated", *(f"{name}_reward" for name in record["components"])):
            value = record["components"].get(name.removesuffix("_reward"), record.get(name))
            sums.add(f"eval/{name}_mean", float(value), 1)
    metrics = sums.reduce() | {"eval/num_samples": len(records), "eval/dropped_prompts": dropped,
                               "eval/seconds": time.perf_counter() - started}
    if count > 1 and "accuracy" in records[0]["components"]:
        solved: dict[int, float] = {}
        for record in records:
            solved[record["index"]] = max(solved.get(record["index"], 0.0), float(record["components"]["accuracy"] >= 1))
        metrics[f"eval/pass@{count}"] = sum(solved.values()) / len(solved)
    pictures = sample_pictures(records[:run.args.run.log_samples]) if run.rank == 0 else []
    log.samples(step, records, pictures, stem="eval")
    log.line(f"eval  step {step:5d}  " + "  ".join(f"{name[5:]} {value:.3f}" for name, value in metrics.items()))
    return metrics


def sample_records(processor: Processor, prompts: StepPrompts, samples: Samples) -> list[dict]:
    """One JSON-ready record per sample."""
    texts = processor.tokenizer.batch_decode([t.tolist() for t in samples.split(samples.tokens)], skip_special_tokens=True)
    advantages = [float(a.mean()) for a in samples.split(samples.advantages)] if samples.advantages is not None else None
    records = []
    for i, (group, response) in enumerate(zip(samples.group.tolist(), texts)):
        row = prompts.prompts[group]
        records.append({"index": row.index, "source": row.source, "sample": int(samples.number[i]), "prompt": row.text,
                        "question": user_text(row.messages), "images": list(row.images), "response": response,
                        "reference": row.reference, "label": row.label,
                        "reward": float(samples.scores[i]), "response_length": int(samples.lengths[i]),
                        "truncated": bool(samples.truncated[i]),
                        "components": {name: float(values[i]) for name, values in samples.components.items()}}
                       | ({"advantage": advantages[i]} if advantages else {}))
    return records


def sample_pictures(records: list[dict]) -> list:
    """Pictures of samples: the images, what was asked, what was answered, what it earned."""
    return [draw_sample([read_image(path) for path in record["images"]], record["question"], record["response"],
                        f"reward {record['reward']:.2f}   reference: {record['reference']}") for record in records]


def user_text(messages: list[dict]) -> str:
    """What the user says in a conversation, without markup and image places."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    return "\n".join(part if isinstance(part, str) else "\n".join(p["text"] for p in part if p.get("type") == "text")
                     for part in said)


def perf_metrics(run: Run, actor: Policy, critic: Critic | None, prompts: StepPrompts, samples: Samples) -> dict[str, float]:
    """Seconds per stage, throughput, memory and, on a known GPU, MFU of the updates."""
    seconds = run.timer.seconds()
    metrics = {f"perf/{name}_seconds": value for name, value in seconds.items()}
    metrics["perf/step_seconds"] = sum(seconds.values())
    response, prompt = len(samples.tokens), sum(prompts.lengths)
    update = seconds["update_actor"] + seconds["update_critic"]
    metrics["perf/rollout_tokens_per_second"] = response / seconds["rollout"]
    metrics["perf/update_tokens_per_second"] = (response + prompt) * run.args.update.epochs / update
    if run.device.type == "cuda":
        metrics["perf/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2 ** 30
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
        layers = sum(p.numel() for p in actor.model.model.language_model.layers.parameters())
        head = actor.model.lm_head.weight.numel()
        trained = (1 + (critic is not None)) * layers * (response + prompt) + head * response
        if peak:
            metrics["perf/update_mfu"] = 6 * trained * run.args.update.epochs / (update * peak * run.world)
    else:
        with open("/proc/self/statm") as statm:
            metrics["perf/resident_memory_gib"] = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2 ** 30
    return metrics


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}  # dense bf16, the makers' data sheets


def open_log(run: Run, datasets: list[list[Prompt]], eval_prompts: list[Prompt], first_step: int) -> RunLogger:
    """Write args.json and the first record; print the plan."""
    args, update = run.args, run.args.update
    flags, folder = flags_of(args), args.run.out
    if args.eval.eval_only:                                    # beside the records of the run, which stay as they are
        folder, first_step = folder / f"evaluation-step-{first_step}", 0
    if run.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "args.json").write_text(json.dumps(flags, indent=2) + "\n")
    log = RunLogger(folder, run.rank == 0, {"arguments": flags}, update.steps, first_step)
    per_step, rows = args.rollout.prompts_per_step, sum(map(len, datasets))
    log.line(f"{rows} training prompts, {len(eval_prompts)} held out; a step: {per_step} prompts x "
             f"{args.rollout.samples_per_prompt} samples, {update.epochs * update.minibatches} updates; {update.steps} steps = "
             f"{update.steps * per_step / max(1, rows):.1f} passes over the data; output: {args.run.out}")
    sets = parse_datasets(args.data.data) if len(datasets) > 1 else []
    total = sum(weight or len(part) for part, (_, weight) in zip(datasets, sets))
    for part, (path, weight) in zip(datasets, sets):
        share = (weight or len(part)) / total
        log.line(f"  {path}: {len(part)} rows, {share:.1%} of the draws, "
                 f"{share * update.steps * per_step / len(part):.1f} passes")
    if args.rollout.top_k or args.rollout.top_p < 1:
        log.line("warning: --top_k/--top_p truncate the sampling distribution; the gradient assumes they do not")
    if args.algorithm.kl_in == "loss" and args.algorithm.kl_estimator == "k1" and args.algorithm.kl_coef:
        log.line("warning: the expected gradient of k1 as a loss is zero; use k2 or k3+")
    return log


def log_samples(run: Run, log: RunLogger, step: int, metrics: dict[str, float], processor: Processor, prompts: StepPrompts,
                samples: Samples) -> None:
    """One line, the bar, and every so often the samples themselves."""
    every = run.args.run.log_samples_every
    show = [("reward", "rollout/reward"), ("accuracy", "rollout/accuracy_reward"), ("length", "rollout/response_length"),
            ("kl", "train/kl"), ("entropy", "train/entropy"), ("clip", "train/clipped_high"),
            ("ev", "train/explained_variance"), ("s", "perf/step_seconds")]
    short = {name: f"{metrics[key]:.3f}" for name, key in show if key in metrics}
    log.line(f"step {step:5d}  " + "  ".join(f"{name} {value}" for name, value in short.items()))
    log.update(step, {"reward": short["reward"]})
    if every and (step % every == 0 or step == run.args.update.steps):
        records = sample_records(processor, prompts, samples) if run.rank == 0 else []
        stride = run.args.rollout.samples_per_prompt                                        # pictures of different prompts
        log.samples(step, records, sample_pictures(records[::stride][:run.args.run.log_samples]))


@contextmanager
def profiled(run: Run, step: int):
    """Trace the step --profile names with torch.profiler, one Chrome trace per rank."""
    if step != run.args.run.profile:
        with nullcontext():
            yield
        return
    folder = run.args.run.out / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as trace:
        yield
    trace.export_chrome_trace(str(folder / f"step-{step}-rank-{run.rank}.json"))


def export_if_due(run: Run, module: nn.Module, processor: Processor, step: int) -> None:
    """Export the model after ``step`` if --export_every says so and it has not been done."""
    folder = run.args.run.out / "export" / f"step-{step}"
    if falls_due(step, run.args.checkpoint.export_every, run.args.update.steps) and not all_gather_json(folder.exists())[0]:
        export(run, module, processor, folder)


@torch.no_grad()
def export(run: Run, module: nn.Module, processor: Processor, folder: Path, shard_bytes: int = 4 << 30) -> None:
    """Write a Hugging Face folder that `from_pretrained` loads: safetensors under the names the checkpoint came with,
    config, tokenizer and processor files. Complete or absent: written aside and renamed. All ranks must call."""
    parameters = dict(module.model.named_parameters(remove_duplicate=False))
    dtype = getattr(processor.config, "dtype", None) or torch.float32
    files: list[list[str]] = [[]]
    size = 0
    for name in module.spelled:
        n_bytes = parameters[name].numel() * dtype.itemsize
        if files[-1] and size + n_bytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += n_bytes
    aside = folder.with_name(f".{folder.name}.tmp")
    index, problem = {}, None
    for k, names in enumerate(files):
        file = f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        shard = {}
        for name in names:
            parameter = parameters[name]
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter      # a collective: all ranks
            if run.rank == 0:
                shard[module.spelled[name]] = full.to(dtype).cpu().contiguous()
                index[module.spelled[name]] = file
        if run.rank == 0 and not problem:
            try:
                aside.mkdir(parents=True, exist_ok=True)
                save_file(shard, aside / file, metadata={"format": "pt"})
            except (OSError, SafetensorError) as error:                   # go on with the collectives, then report
                problem = str(error)
    if run.rank == 0 and not problem:
        try:
            if len(files) > 1:
                table = {"metadata": {}, "weight_map": index}
                (aside / "model.safetensors.index.json").write_text(json.dumps(table, indent=2))
            processor.config.save_pretrained(aside)
            processor.save(str(aside))
            for path in aside.iterdir():
                sync_folder(path)
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
            write_pointer(folder.parent / "latest", folder.name)
        except OSError as error:
            problem = str(error)
    problem = all_gather_json(problem)[0]
    if problem and run.rank == 0:
        print(f"warning: the weights were not exported to {folder}: {problem}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: a folder is complete or it does not exist
# ---------------------------------------------------------------------------------------------------------------------


class Checkpoints:
    """Writes and finds <out>/checkpoints/step-N.

    A save goes into a fresh hidden folder: every rank's tensors as safetensors, in the background, then on rank 0
    COMMITTED.json with the size of every file, fsync, rename to step-N, the `latest` pointer, and only then the deletion
    of old checkpoints. Death at any instant leaves the earlier checkpoints as they were. One save is in flight at most.
    """

    def __init__(self, run: Run):
        self.run, self.args, self.failed, self.waited = run, run.args.checkpoint, 0, 0.0
        self.folder = run.args.run.out / "checkpoints"
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=run.args.run.timeout))  # of the background
        self.pending: tuple[int, Path, Any] | None = None
        problem = None
        if run.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                problem = self.take_lock()
                stale = [*self.folder.glob(".tmp-*"), *self.folder.with_name("export").glob(".step-*")]
                for path in [] if problem else stale:                       # of a life that died while it was writing
                    shutil.rmtree(path)
            except OSError as error:
                problem = f"--out {run.args.run.out}: {error}"
        fail_together(problem)

    def take_lock(self) -> str | None:
        """Make this the only live run of the folder; the kernel drops the lock of a process that dies. Rank 0 only."""
        self.lock = open(self.run.args.run.out / ".lock", "a+")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            return f"--out {self.run.args.run.out} is in use by a live run: {self.lock.read().strip()}"
        self.lock.truncate(0)
        self.lock.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID")}))
        self.lock.flush()
        return None

    def close(self) -> None:
        """Release the folder."""
        if self.run.rank == 0:
            self.lock.close()

    def save(self, step: int, training: dict[str, Any], scalars: dict) -> None:
        """Start saving; the tensors are copied before this returns, so training may go on changing them."""
        started, problem, aside = time.perf_counter(), None, self.folder / f".tmp-step-{step}"
        self.finish(wait=True)
        tensors = {name: value for name, value in training.items() if torch.is_tensor(value)}   # the rest are arguments
        if self.run.rank == 0:
            try:
                needed, free = sum(t.numel() * t.element_size() for t in tensors.values()), shutil.disk_usage(self.folder).free
                if needed * 1.02 + 2 ** 20 > free:
                    raise OSError(f"{needed / 2 ** 30:.3f} GiB are needed and {free / 2 ** 30:.3f} GiB free in {self.folder}")
                aside.mkdir()
                write_durably(aside / "state.json", json.dumps(scalars, indent=1, allow_nan=False))
            except (OSError, ValueError) as error:                          # ValueError: a scalar is not finite
                problem = str(error)
        if any(problems := all_gather_json(problem)):
            return self.report(step, aside, next(filter(None, problems)))
        writer = HuggingFaceStorageWriter(str(aside), save_distributed=True)
        take_turns(writer, self.args.save_strategy, self.group)
        kill_point("before-write")
        self.pending = step, aside, dcp.async_save(tensors, storage_writer=writer, process_group=self.group)
        if self.args.save_blocking:
            self.finish(wait=True)
        self.waited = time.perf_counter() - started

    def finish(self, wait: bool = False) -> None:
        """Commit the save in flight if it has been written on all ranks; with ``wait``, wait for that."""
        if self.pending is None:
            return
        step, aside, future = self.pending
        if not wait and not all(all_gather_json(future.done())):
            return
        self.pending, problem = None, None
        try:
            future.result()
        except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
            problem = f"rank {self.run.rank} on {socket.gethostname()}: {describe_failure(error)}"
        problems = [p for p in all_gather_json(problem) if p]
        if not problems and self.run.rank == 0:
            try:
                self.commit(step, aside)
            except OSError as error:
                problems = [str(error)]
        problems = all_gather_json(problems)[0]
        if problems:
            return self.report(step, aside, problems[0])
        self.failed = 0

    def commit(self, step: int, aside: Path) -> None:
        """Make a written checkpoint visible, then delete those that need not be kept. Rank 0 only."""
        kill_point("before-commit")
        files = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
        state = json.loads((aside / "state.json").read_text())
        write_durably(aside / "COMMITTED.json", json.dumps({"step": step, "world_size": self.run.world, "files": files,
                                                            "arguments_hash": state["arguments_hash"]}, indent=1))
        sync_folder(aside)
        kill_point("before-rename")
        final = self.folder / f"step-{step}"
        if final.exists():                            # left by a life whose later records were not resumed from
            shutil.rmtree(final)
        aside.rename(final)
        sync_folder(self.folder)
        kill_point("before-pointer")
        write_pointer(self.folder / "latest", final.name)
        kill_point("before-rotation")
        best = self.best_step()
        for old_step, old in complete_checkpoints(self.folder)[self.args.keep_last:]:
            if old_step != best:
                try:
                    old.rename(old.with_name(f".tmp-old-{old.name}"))     # never half of a checkpoint under a valid name
                    shutil.rmtree(self.folder / f".tmp-old-{old.name}")
                except OSError as error:
                    print(f"warning: the old checkpoint {old} was not deleted: {error}", flush=True)

    def best_step(self) -> int | None:
        """The step with the best --keep_best metric among those that have a checkpoint. The records of the run are the
        memory: they outlive a kill, and a resume drops those of steps that are taken again."""
        name, values = self.args.keep_best, {}
        if name and (self.run.args.run.out / "metrics.jsonl").exists():
            with open(self.run.args.run.out / "metrics.jsonl", encoding="utf-8", newline="\n") as file:
                records = [json.loads(line) for line in file if name in line]
            values = {record["step"]: record[name] for record in records if name in record and "step" in record}
        return max((step for step, _ in complete_checkpoints(self.folder) if step in values), key=values.get, default=None)

    def report(self, step: int, aside: Path, problem: str) -> None:
        """Count a failed save; give up after --max_failed_saves in a row."""
        self.failed += 1
        if self.run.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            print(f"warning: the checkpoint of step {step} was not saved ({self.failed} in a row): {problem}", flush=True)
        if self.failed >= self.args.max_failed_saves:
            raise UserError(f"{self.failed} checkpoints in a row could not be saved, the last because: {problem}")

    def check_quality(self, metrics: dict[str, float]) -> None:
        """Raises UserError if an evaluation has no metric of the name of --keep_best."""
        name = self.args.keep_best
        if name and name not in metrics:
            raise UserError(f"--keep_best {name} is not a metric of the evaluation: {', '.join(sorted(metrics))}")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None or issubclass(kind, UserError):        # which all ranks raise together: what was written counts
            self.finish(wait=True)


def kill_point(name: str) -> None:
    """A marked instant of the save protocol. Tests set KILL_AT to die there; otherwise nothing happens."""
    if os.environ.get("KILL_AT") == name and os.environ.get("KILL_RANK", "0") == os.environ.get("RANK", "0"):
        os.kill(os.getpid(), signal.SIGKILL)


def write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_pointer(pointer: Path, name: str) -> None:
    """Replace a pointer file: readers see the old name or the new one."""
    write_durably(pointer.with_name(f".{pointer.name}.tmp"), name + "\n")
    os.replace(pointer.with_name(f".{pointer.name}.tmp"), pointer)
    sync_folder(pointer.parent)


def take_turns(writer: HuggingFaceStorageWriter, strategy: str, group: dist.ProcessGroup) -> None:
    """Let only some ranks write at a time: all, those of one node, or one. Runs in the background, between collectives."""
    if strategy == "unrestricted":
        return
    turn = int(os.environ.get("GROUP_RANK", 0)) if strategy == "single_node" else dist.get_rank()
    turns = int(os.environ.get("GROUP_WORLD_SIZE", 1)) if strategy == "single_node" else dist.get_world_size()
    write = writer.write_data

    def in_turn(plan, planner):
        for _ in range(turn):
            dist.barrier(group)
        try:
            return write(plan, planner)
        finally:                                                          # also after an error, or the others would hang
            for _ in range(turns - turn):
                dist.barrier(group)

    writer.write_data = in_turn


def describe_failure(error: BaseException) -> str:
    """One line; torch's CheckpointException carries the failures of the ranks."""
    failures = getattr(error, "failures", None) or {0: error}
    rank, cause = next(iter(failures.items()))
    cause = cause[0] if isinstance(cause, tuple) else cause
    return f"{type(cause).__name__} on rank {rank}: {str(cause).splitlines()[0] if str(cause) else ''}"


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, newest first."""
    found = []
    for path in folder.glob("step-*"):
        try:
            committed = json.loads((path / "COMMITTED.json").read_text())
            files = committed["files"]
            whole = "state.json" in files and \
                all(Path(name).name == name and (path / name).stat().st_size == size for name, size in files.items())
            step = int(path.name.removeprefix("step-"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):     # missing, truncated, or not ours: not complete
            continue
        if whole and path.name == f"step-{step}" and committed.get("step") == step:
            found.append((step, path))
    return sorted(found, reverse=True)


# Flags that change where, how fast or how visibly a run computes, but not what.
NEUTRAL_FLAGS = {"attention", "gradient_checkpointing", "data_threads", "verify_images", "slots", "prefill_tokens",
                 "poll_every",
                 "reward_timeout", "reward_workers", "remote_batch", "remote_timeout", "remote_retries",
                 "max_tokens_per_pack", "share_prompts", "head_chunk"} \
    | {field.name for group in (EvalArgs, CheckpointArgs, RunArgs) for field in dataclasses.fields(group)} - {"seed"} \
    | {"eval_data", "max_eval_rows"}


def resume(run: Run, checkpoints: Checkpoints, models: dict[str, tuple[nn.Module, torch.optim.Optimizer]],
           state: dict[str, Any], rows: int) -> dict[str, Any]:
    """Load the checkpoint that --resume asks for and return its state; the fresh ``state`` when there is none.

    Raises:
        UserError: no checkpoint where one must be, one where none may be, or changed flags that alter the result.
    """
    args, choice = run.args, run.args.checkpoint.resume
    flags = flags_of(args) | {"data (rows)": rows}
    found, parent = complete_checkpoints(checkpoints.folder), Path(choice).resolve().parent
    if choice not in ("auto", "must", "never") and (not found or parent == checkpoints.folder.resolve()):
        # With a path of another run, what --out already has goes first: a requeued job must not start over.
        found = [(step, path) for step, path in complete_checkpoints(parent) if path.name == Path(choice).name]
    path = all_gather_json(str(found[0][1]) if found else None)[0]            # rank 0's view of a shared file system
    problem = None
    if choice == "never" and (path or (args.run.out / "metrics.jsonl").exists()):
        problem = f"--resume never: {args.run.out} already holds a run; choose another --out"
    elif choice not in ("auto", "never") and path is None:
        problem = f"--resume {choice}: no complete checkpoint in {checkpoints.folder if choice == 'must' else choice}"
    elif path is not None:
        state = json.loads((Path(path) / "state.json").read_text())
        changed = [f"--{name} {state['arguments'].get(name)!r} -> {value!r}" for name, value in flags.items()
                   if state["arguments"].get(name) != value]
        neutral = NEUTRAL_FLAGS | ({"steps"} if args.update.lr_schedule == "constant" else set())
        altering = [text for text in changed if text[2:].split()[0] not in neutral]
        if altering and args.checkpoint.resume_changed_args == "refuse":
            problem = (f"flags that alter the result differ from those of {path}: " + "; ".join(altering)
                       + ". Choose another --out, or --resume_changed_args allow")
    fail_together(problem)
    if path is None:
        if run.rank == 0:
            print(f"starting from step 0: no complete checkpoint in {checkpoints.folder}", flush=True)
    else:
        load_training_state(Path(path), models)
        if run.rank == 0:
            # Newer checkpoints than the one we go on from: the next start would take them for ours.
            for step, newer in complete_checkpoints(checkpoints.folder) if not args.eval.eval_only else ():
                if step > state["step"]:
                    newer.rename(newer.with_name(f"replaced-{newer.name}-{time.time_ns()}"))
            print(f"resuming from {path}" + (f"; changed: {'; '.join(changed)}" if changed else ""), flush=True)
    return state | {"arguments": flags, "arguments_hash": hashlib.sha256(json.dumps(flags).encode()).hexdigest()}


def load_critic_weights(path: Path, critic: Critic) -> None:
    """Start a critic from the critic of another run's checkpoint: weights only, its optimizer starts fresh."""
    if path not in [found for _, found in complete_checkpoints(path.parent)]:
        raise UserError(f"--init_critic_from {path}: not a complete checkpoint")
    weights = {f"critic.model.{name}": value for name, value in get_model_state_dict(critic).items()}
    try:
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(path)))
    except dcp.api.CheckpointException as error:
        raise UserError(f"--init_critic_from {path}: {describe_failure(error)}") from error


STOP_SIGNALS: list[int] = []  # what arrived; looked at by all ranks together after each step


def catch_signals() -> None:
    """SIGTERM (a cancelled job) and SIGUSR1 (SLURM's warning) ask for a stop after the step in progress."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: STOP_SIGNALS.append(received))


def stop_requested() -> bool:
    """Whether any rank was asked to stop: the same answer on all of them."""
    return any(all_gather_json(bool(STOP_SIGNALS)))


def training_state(models: dict[str, tuple[nn.Module, torch.optim.Optimizer]]) -> dict[str, Any]:
    """Weights and optimizer state of all roles in one flat dictionary; frozen weights are those of --model."""
    state: dict[str, Any] = {}
    options = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)
    for role, (module, optimizer) in models.items():
        weights, moments = get_state_dict(module, optimizer, options=options)
        state |= {f"{role}.model.{name}": value for name, value in weights.items()}
        state |= {f"{role}.optimizer.{name}": value for name, value in moments.items()}
    return state


def load_training_state(path: Path, models: dict[str, tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    """Read a checkpoint's tensors into models and optimizers; any number of ranks may have written it."""
    state = training_state(models)
    dcp.load({name: value for name, value in state.items() if torch.is_tensor(value)},
             storage_reader=HuggingFaceStorageReader(str(path)))
    options = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True, strict=False)
    for role, (module, optimizer) in models.items():
        part = {kind: {name.removeprefix(f"{role}.{kind}."): value for name, value in state.items()
                       if name.startswith(f"{role}.{kind}.")} for kind in ("model", "optimizer")}
        set_state_dict(module, optimizer, model_state_dict=part["model"], optim_state_dict=part["optimizer"], options=options)


# ---------------------------------------------------------------------------------------------------------------------
# Appendix: FSDP2 details
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def unsharded(module: nn.Module):
    """Gather all weights once; inside, forwards run no collective, so ranks may do different amounts of work."""
    parts = [m for m in module.modules() if isinstance(m, FSDPModule)]
    module._get_fsdp_state()._lazy_init()      # a first unshard() below would otherwise initialise each part as a root
    for handle in [part.unshard(async_op=True) for part in parts]:
        if handle is not None:
            handle.wait()
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not module, recurse=False)
        clear_forward_order(module)


def clear_forward_order(module: nn.Module) -> None:
    """Forget forwards without a backward: FSDP2 records every forward and only a backward clears the record, so a
    frozen model, or a long rollout, would grow it without bound."""
    module._get_fsdp_state()._comm_ctx.post_forward_order.clear()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                if group is not None:
                    group._post_forward_indices.clear()


# ---------------------------------------------------------------------------------------------------------------------
# Appendix: the rollout engine
# ---------------------------------------------------------------------------------------------------------------------


class RolloutEngine:
    """Continuous batching over KV slots, with the model's own layers.

    A prompt is prefilled once and its keys and values are stored into the slots of all its samples. Slots 0..B-1 decode
    together; a finished slot is refilled at once. All sampling state lives on the device; the host looks at it every
    ``poll_every`` steps. A token is a function of (seed, stream, draw, sample number, position) and the logits alone, so it
    does not depend on slots, batch composition or ranks.
    """

    def __init__(self, run: Run, processor: Processor, actor: Policy, prompts: StepPrompts, groups: list[int], count: int,
                 stream: int, greedy: bool):
        self.run, self.actor, self.prompts, self.args = run, actor, prompts, run.args.rollout
        self.tokenizer, self.stop_strings = processor.tokenizer, run.args.stop_strings
        self.stream, self.greedy, device = stream, greedy, run.device
        self.poll = self.args.poll_every or (8 if device.type == "cuda" else 1)
        capacity = max((prompts.lengths[g] for g in groups), default=1) + self.args.max_new_tokens
        slots = self.slot_count(capacity, max(1, len(groups) * count))
        self.cache = SlotCache(actor.model.config.text_config, slots, capacity, run.dtype, device)
        integers = lambda: torch.zeros(slots, dtype=torch.int64, device=device)  # noqa: E731
        self.length, self.rope, self.count, self.last, self.draw, self.number = (integers() for _ in range(6))     # (slots,)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        self.out_tokens = torch.zeros(slots, self.args.max_new_tokens, dtype=torch.int64, device=device)
        self.out_logprobs = torch.zeros(slots, self.args.max_new_tokens, device=device)
        self.owner: list[tuple[int, int] | None] = [None] * slots     # host side: (group, sample number) of a busy slot
        self.stored = [0] * slots                                     # host side: at least the cached tokens of a slot
        self.searched = [0] * slots                                   # host side: tokens already searched for stop strings

    def slot_count(self, capacity: int, wanted: int) -> int:
        """--slots, or as many as fit into 80 % of the free memory, at most 256."""
        if self.args.slots:
            return min(self.args.slots, wanted)
        if self.run.device.type != "cuda":
            return min(256, wanted)
        text = self.actor.model.config.text_config
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        per_slot = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * capacity * self.run.dtype.itemsize
        torch.cuda.empty_cache()
        return max(1, min(256, wanted, int(0.8 * torch.cuda.mem_get_info()[0]) // per_slot))

    def generate(self, groups: list[int], count: int) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, bool]]:
        """``count`` samples of every prompt: (group, number) -> tokens (n,), log-probs (n,), truncated."""
        waiting = deque((group, range(first, min(first + self.cache.slots, count)))
                        for group in groups for first in range(0, count, self.cache.slots))
        results: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, bool]] = {}
        while waiting or any(self.owner):
            while self.admit(waiting):
                pass
            self.harvest(results)                                            # one-token responses end with the prefill
            active = [slot for slot, owner in enumerate(self.owner) if owner]
            if not waiting and len(active) <= 0.75 * (max(active, default=-1) + 1):
                active = self.compact(active)
            if active:
                for _ in range(self.poll):
                    self.decode(max(active) + 1)
                self.harvest(results)
        return results

    def admit(self, waiting: deque) -> bool:
        """Prefill as many waiting prompts as the free slots and --prefill_tokens allow, in one packed row."""
        free = [slot for slot, owner in enumerate(self.owner) if owner is None]
        batch, tokens = [], 0
        while waiting and len(free) >= len(waiting[0][1]):
            group, numbers = waiting[0]
            tokens += self.prompts.lengths[group]
            if batch and tokens > self.args.prefill_tokens:
                break
            waiting.popleft()
            batch.append((group, [(free.pop(0), number) for number in numbers]))
        if batch:
            self.prefill(batch)
        return bool(batch) and bool(waiting)

    def prefill(self, batch: list[tuple[int, list[tuple[int, int]]]]) -> None:
        """Run the prompts of (group, [(slot, number), ...]) and sample every sample's first token."""
        model, device, size = self.actor.model, self.run.device, 0
        segments, rows, slots, places, last_rows, state = [], [], [], [], [], []
        for group, members in batch:
            length = self.prompts.lengths[group]
            following = int(positions_of(model, self.prompts, group).max()) + 1
            for slot, number in members:
                rows.append(torch.arange(size, size + length))
                slots.append(torch.full((length,), slot))
                places.append(torch.arange(length))
                last_rows.append(size + length - 1)
                state.append((slot, length, following, self.prompts.draws[group], number))
                self.owner[slot], self.stored[slot], self.searched[slot] = (group, number), length, 0
            segments.append((size, size + length, size, size))
            size += length
        ids = torch.cat([self.prompts.prompts[group].input_ids for group, _ in batch])
        features = [self.prompts.features[group] for group, _ in batch if group in self.prompts.features]
        row = SimpleNamespace(
            input_ids=ids[None].to(device), image_rows=(ids == model.config.image_token_id).nonzero()[:, 0].to(device),
            positions=torch.cat([positions_of(model, self.prompts, g) for g, _ in batch], dim=1)[:, None].to(device),
            features=torch.cat(features, dim=1).to(device) if features else None)
        plan = tuple(torch.cat(parts).to(device) for parts in (rows, slots, places))
        hidden = language_hidden(model, row, PackedAttention(segments, self.run.backend, device, self.cache, plan))   # (L, H)
        slot, length, following, draw, number = torch.tensor(state, device=device).T                                # (b,) each
        self.length[slot], self.rope[slot], self.draw[slot], self.number[slot] = length, following, draw, number
        self.count[slot] = 0
        self.done[slot] = False
        self.sample(hidden[last_rows], slot)

    def decode(self, size: int) -> None:
        """One token for each of the slots 0..size-1. Slots that are done compute too; nothing of theirs changes."""
        live = ~self.done[:size]
        row = SimpleNamespace(input_ids=self.last[None, :size], positions=self.rope[:size].expand(3, 1, -1), features=None)
        longest = min(max(self.stored[:size]) + 1, self.cache.capacity)
        attention = DecodeAttention(self.cache, self.length[:size], longest, self.run.backend)
        hidden = language_hidden(self.actor.model, row, attention)                                                      # (B, H)
        self.length[:size] += live
        self.rope[:size] += live
        self.stored[:size] = [min(n + 1, self.cache.capacity - 1) for n in self.stored[:size]]
        self.sample(hidden, torch.arange(size, device=hidden.device))

    def sample(self, hidden: torch.Tensor, slots: torch.Tensor) -> None:
        """Draw the next token of ``slots`` (b,) from the last hidden states (b, H) and append it where not done."""
        actor, count, live = self.actor, self.count[slots], ~self.done[slots]
        logits = losses.logits_fp32(hidden, actor.model.lm_head.weight, None, actor.temperature, actor.banned,
                                    count < self.args.min_new_tokens, actor.stop_ids)                                   # (b, V)
        if self.greedy:
            ids = logits.argmax(dim=-1)
        else:
            keys = losses.noise_keys(self.run.args.run.seed, self.stream, self.draw[slots], self.number[slots], count)
            ids = losses.gumbel_race(truncate_distribution(logits, self.args.top_k, self.args.top_p), keys)
        logprobs = logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(dim=-1)      # untruncated, as in training
        place = count.clamp(max=self.args.max_new_tokens - 1)
        self.out_tokens[slots, place] = torch.where(live, ids, self.out_tokens[slots, place])
        self.out_logprobs[slots, place] = torch.where(live, logprobs, self.out_logprobs[slots, place])
        self.last[slots] = torch.where(live, ids, self.last[slots])
        self.count[slots] = count + live
        self.done[slots] |= torch.isin(ids, actor.stop_ids) | (count + 1 >= self.args.max_new_tokens)

    def harvest(self, results: dict) -> None:
        """Take finished sequences out of their slots. The one place where the host waits for the device."""
        active = [slot for slot, owner in enumerate(self.owner) if owner]
        if not active:
            return
        done = self.done.tolist()
        ready = [slot for slot in active if done[slot] or self.stop_strings]
        if not ready:
            return
        tokens, logprobs, counts = self.out_tokens[ready].cpu(), self.out_logprobs[ready].cpu(), self.count[ready].tolist()
        stop_ids = set(self.actor.stop_ids.tolist())
        for slot, row_tokens, row_logprobs, n in zip(ready, tokens, logprobs, counts):
            end = self.stop_string_end(slot, row_tokens[:n].tolist())
            if end is None and not done[slot]:
                continue
            n = end or n
            truncated = end is None and int(row_tokens[n - 1]) not in stop_ids
            results[self.owner[slot]] = row_tokens[:n].clone(), row_logprobs[:n].clone(), truncated
            self.owner[slot] = None
            self.done[slot] = True

    def stop_string_end(self, slot: int, tokens: list[int]) -> int | None:
        """Number of tokens up to the one that completes a stop string, or None."""
        if not self.stop_strings:
            return None
        window = 8 + 2 * max(len(stop.encode()) for stop in self.stop_strings)        # a token holds at least one byte
        for n in range(self.searched[slot] + 1, len(tokens) + 1):
            text = self.tokenizer.decode(tokens[max(0, n - window):n], skip_special_tokens=True)
            if any(stop in text for stop in self.stop_strings):
                return n
        self.searched[slot] = len(tokens)
        return None

    def compact(self, active: list[int]) -> list[int]:
        """Move busy slots to the front once no prompt waits, so that the tail of a rollout decodes in small batches."""
        target = [slot for slot in range(len(active)) if self.owner[slot] is None]
        source = [slot for slot in active if slot >= len(active)]
        if source:
            self.cache.move(source, target)
            for state in (self.length, self.rope, self.count, self.last, self.draw, self.number, self.done, self.out_tokens,
                          self.out_logprobs):
                state[target] = state[source]
            for s, t in zip(source, target):
                self.owner[t], self.stored[t], self.searched[t] = self.owner[s], self.stored[s], self.searched[s]
                self.owner[s] = None
            self.done[source] = True
        return list(range(len(active)))


def truncate_distribution(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Keep the top_k likeliest ids and, of those, the smallest set with probability top_p; the rest is -inf. (b, V)."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, ids = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)           # probability of likelier ids
        logits = torch.full_like(logits, -torch.inf).scatter(1, ids, ordered.masked_fill(before >= top_p, -torch.inf))
    return logits


def run_main(program: Callable[[], Any]) -> None:
    """Run a script's main: exit code 2 and one message from rank 0 for what the user can mend, on every rank alike."""
    try:
        program()
    except UserError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)          # torchrun ends the others as soon as one of them has exited
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        speak_first()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit(2)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        # The peers' own reasons stand above; this one only lost them.
        print(f"error: rank {os.environ.get('RANK', 0)} lost contact with another rank, which died or did not answer within "
              f"--timeout: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        os._exit(1)                                            # no destructor may wait for the lost rank
    if dist.is_initialized():
        dist.destroy_process_group()


def speak_first() -> None:
    """Wait until rank 0 has printed its message: a faster rank that exits would have it killed while it still imports."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              timeout=timedelta(seconds=60))
        if int(os.environ["RANK"]) == 0:
            store.set("rank 0 has spoken", "yes")
        store.wait(["rank 0 has spoken"])


if __name__ == "__main__":
    run_main(main)
