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

import base64
import functools
import http.client
import importlib.util
import inspect
import io
import json
import math
import os
import re
import resource
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable
from urllib.parse import urlsplit

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two busy ranks on the same cores slow each other tenfold

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from common import losses
from common.buffers import (Row, Samples, UserError, all_gather_json, as_samples, build_row, concatenate, data_order,
                            exchange_features, failing_together, gather_samples, label_text, make_blocks, make_packs,
                            minibatches, mix, parse_datasets, take_rows)
from common.logging import (RESERVED_GIB, CheckpointArgs, Checkpoints, MetricSums, RunLogger, StageTimer, absolute,
                            absolute_model, broken_rules, catch_signals, check_same_flags, complete_checkpoints, contents,
                            describe_failure, draw_sample, end_run, evaluation_due, falls_due, fill_groups, flag, list_flags,
                            print_plan, progress, read_flags, run_main, start_log, stop_requested, training_state)
from common.vlm import (FLASH_ATTN_INSTALL, PLACES, VALUE_HEADS, DecodeAttention, PackedAttention, Processor, Prompt,
                        PromptLoader, SlotCache, StepPrompts, add_adapters, answer_frame, attention_segments, backward_bytes,
                        bare_forwards, cache_bytes, check_judgement, check_media, choose_attention, clear_forward_order,
                        count_judgements, count_parameters, differing_tower, encode_target, fill, freeze, gathered_bytes,
                        image_features, init_adapters, judge_prompt, judge_settings, language_hidden, language_model,
                        layer_activations, load_judgements, load_prompts, load_rows, load_weights, make_prompt, materialize,
                        move_module, move_state, parse_verdict, positions_of, question_text, read_frames, read_judgement,
                        resident_bytes, resolve_folder, router_logits, routers, row_pictures, shard_of, skeleton,
                        trained_parts, unsharded, use_attention, user_text, vision_parameters, visual_token_ids, with_grids,
                        with_same_tower, without_adapters)

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # batch sizes of CUDA graphs; the last batch is all slots
GRAPH_PAYS = 16      # decoding steps after which a capture, which takes about as long as so many launches, pays
COMPARE_GROUPS = ("grpo", "group_norm", "dr_grpo", "rloo", "opo", "gpg", "reinforce_baseline")
TRAIN, EVAL, JUDGE = 0, 1, 2   # streams of sampling noise: a prompt met in both gets unrelated samples


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, or only evaluate. Returns the last metrics."""
    args = parse_args(argv)
    reward = load_reward(args.reward)
    run = start_run(args)
    checkpoints = None if args.run.dry_run else Checkpoints(args.run.out, args.checkpoint, args.run.timeout)
    processor, datasets, weights, eval_prompts = load_data(run)
    text = load_text(run, processor)
    rows = sum(map(len, datasets))
    check_rows(args, reward, sum(datasets, []) + eval_prompts)
    actor, critic, reference = build_models(run, processor)
    build_reward_models(run, reward, processor, sum(datasets, []) + eval_prompts)
    if args.run.dry_run:
        return dry_run(run, datasets, weights, actor, critic, reference, reward)
    models = {"actor": (actor, actor_optimizer := build_optimizer(actor, args.update.actor_lr, args))}
    start_average(args.update, actor_optimizer)
    if critic:
        models["critic"] = (critic, build_optimizer(critic, args.update.critic_lr, args))
    kl_controller = losses.KLController(args.algorithm.kl_coef, args.algorithm.kl_target or None, args.algorithm.kl_horizon)
    running = {"kl_controller": kl_controller, "moments": losses.RunningMoments()}
    running_state = lambda: {name: part.state_dict() for name, part in running.items()}  # noqa: E731
    fresh = {"step": 0, "metrics": {}, "dropped_prompts": 0, "batches_taken": 0, "evaluations": 0} | running_state()
    used = {"data (rows)": contents([path for path, _ in parse_datasets(args.data.data)], rows),
            "ptx_data (rows)": contents([args.data.ptx_data], len(text.rows)) if text else ""}
    state = checkpoints.resume(flags_of(args) | used, neutral_flags(args), fresh, models, keep_newer=args.eval.eval_only)
    for _, optimizer in models.values():
        put_away(run, optimizer)
    if args.model.init_critic_from and not state["step"]:
        load_critic_weights(Path(absolute_model(args.model.init_critic_from)), critic)
    for name, part in running.items():
        part.load_state_dict(state[name])
    log = open_log(run, datasets, eval_prompts, state["step"])

    due = lambda step: evaluation_due(args, step, args.rollout.prompts_per_step, rows)  # noqa: E731
    passes = lambda batches: batches * args.prompts_per_rollout / max(1, rows)  # noqa: E731

    def evaluate_at(step: int) -> dict[str, float]:
        with averaged(actor_optimizer) if args.eval.eval_ema else nullcontext():
            return evaluate(run, processor, actor, reward, eval_prompts, log, step) | {
                "eval/index": state["evaluations"], "eval/episode": passes(state["batches_taken"])}

    def export_at(step: int) -> None:
        checkpoints.export_if_due(actor, processor, step, args.update.steps)
        if args.update.export_ema:
            with averaged(actor_optimizer):
                checkpoints.export_if_due(actor, processor, step, args.update.steps, "export_ema")

    def end_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluation and record of a step whose checkpoint is on its way."""
        if due(step):
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
        export_at(state["step"])                               # or between the save and the export
    catch_signals()
    metrics = state["metrics"]

    draws = args.update.steps * args.prompts_per_rollout * max(args.rollout.rollouts_per_step, args.algorithm.dynamic_sampling)
    choose = functools.partial(prompts_of_batch, args, datasets, *mix(weights, draws))
    with checkpoints, PromptLoader(processor, args.data.data_threads, args.data.on_bad_row, choose,
                                   state["dropped_prompts"]) as loader:
        for step in range(state["step"] + 1, args.update.steps + 1):
            run.timer.reset()
            if run.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with profiled(run, step):
                prompts, samples, rolled = sample_and_score(run, processor, actor, reward, loader, state["batches_taken"])
                checkpoints.finish()                           # commit what has been written meanwhile
                with run.timer("score"):
                    score_logprobs_and_values(run, actor, reference, critic, prompts, samples)
                with run.timer("advantages"):
                    metrics = compute_advantages(run, samples, **running)
                with run.timer("update_critic"), at_hand(run, models["critic"][1] if critic else None):
                    metrics |= update_critic(run, *models["critic"], prompts, samples, step) if critic else {}
                frozen = step <= args.update.freezing_actor_steps
                exact = reference if args.algorithm.kl_estimator == "full" and args.algorithm.kl_in == "loss" else None
                with run.timer("update_actor"), nullcontext() if frozen else at_hand(run, actor_optimizer, exact):
                    metrics |= {} if frozen else update_actor(run, *models["actor"], prompts, samples, step,
                                                              kl_controller.value, exact, text)
            if "train/kl" in metrics and not frozen:
                metrics["train/kl_coef"] = kl_controller.value
                kl_controller.update(metrics["train/kl"], len(samples))
            taken = state["batches_taken"] + rolled["rollout/rollouts"]
            metrics |= rolled | {f"{part}/{name}": value for part in ("rollout", "train")
                                 for name, value in (("episode", passes(taken)), ("global_step", step))}
            metrics |= perf_metrics(run, actor, critic, prompts, samples, metrics)
            log_samples(run, log, step, metrics, processor, prompts, samples)
            state |= {"step": step, "metrics": metrics, "dropped_prompts": loader.dropped, "batches_taken": taken,
                      "evaluations": state["evaluations"] + due(step)} | running_state()
            stop = stop_requested()
            if stop or falls_due(step, args.checkpoint.save_every, args.update.steps):
                checkpoints.save(step, training_state(models), state)
            checkpoints.finish(wait=stop)
            if stop and step < args.update.steps:              # the next start evaluates, records and exports this step
                break
            metrics = end_step(step, metrics)
            export_at(step)
    end_run(log, checkpoints, state["step"], args.update.steps,
            f", TensorBoard in {args.run.out}/tensorboard, samples in {args.run.out}/samples")
    return metrics


# ---------------------------------------------------------------------------------------------------------------------
# Arguments: one frozen dataclass per stage; a field is a flag
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelArgs:
    """model"""
    model: str = flag("", "checkpoint of the actor: folder in Hugging Face format, or hub name")
    critic_model: str = flag("", "checkpoint of the critic; empty: the actor's (a value head is read if it has one)")
    init_critic_from: str = flag("", "<out>/checkpoints/step-N (or its latest) whose critic weights, and nothing else, start "
                                     "the critic")
    reference_model: str = flag("", "checkpoint of the frozen reference, loaded only if a KL is used; empty: the actor's")
    dtype: str = flag("auto", "compute type; weights and optimizer stay float32. auto: bfloat16 on GPU, float32 on CPU",
                      ("auto", "float32", "bfloat16"))
    attention: str = flag("auto", "attention back-end. auto: flash_attn if installed, else torch's varlen; sdpa on CPU",
                          ("auto", "flash_attn", "varlen", "sdpa"))
    gradient_checkpointing: bool = flag(False, "recompute layers in the backward pass: less memory, about 30 % more time")
    train_vision: bool = flag(False, "train the vision tower and its projector too (Qwen-VL); actor, critic and reference "
                                     "then have one each and compute image features in every forward pass")
    lora_rank: int = flag(0, "rank of LoRA adapters in actor and critic, which alone are trained then (with the value head); "
                             "other weights are kept in the compute type; 0: off, all are trained", low=0)
    lora_alpha: int = flag(16, "adapters are scaled by this / --lora_rank", low=1)
    lora_targets: str = flag("", "linear layers with adapters: ends of their names, such as q_proj,v_proj; empty: all of the "
                                 "decoder, attention and MLP, but experts of MoE models")


@dataclass(frozen=True)
class DataArgs:
    """data"""
    data: str = flag("", "training rows: JSONL files, as a.jsonl,b.jsonl or with probabilities: a.jsonl:0.7,b.jsonl:0.3")
    row_kind: str = flag("prompts", "what the rows are: prompts, or judgements (train_grm_vl.py --help), whose verdicts "
                                    "become references: RL of a judge, with --reward verdict", ("prompts", "judgements"))
    eval_data: str = flag("", "held-out rows, a JSONL file; empty: no evaluation")
    ptx_data: str = flag("", "rows that keep the actor a language model: JSONL of prompt, images, response; empty: none")
    prompt_column: str = flag("prompt", "column of the prompt: a string or chat messages")
    images_column: str = flag("images", "column of the image paths, relative to the file")
    reference_column: str = flag("answer", "column of the reference answer")
    label_column: str = flag("label", "column of the row's label")
    system_prompt: str = flag("", "system message put before every prompt; empty: none")
    max_prompt_tokens: int = flag(4096, "longest prompt, tokens with image tokens; longer ones are bad rows", low=1)
    min_pixels: int = flag(0, "smallest image after resizing, pixels; 0: the checkpoint's own", low=0)
    max_pixels: int = flag(0, "largest image after resizing, pixels; 0: the checkpoint's own", low=0)
    video_frames: int = flag(16, "most frames of a video, taken evenly from all of it", low=2)
    video_fps: float = flag(2.0, "frames per second of videos that do not tell: lists of pictures", low=1e-3)
    video_max_pixels: int = flag(0, "largest frame after resizing, pixels; 0: the checkpoint's own", low=0)
    on_bad_row: str = flag("error", "what a bad row does: error stops the run, skip counts and reports it", ("error", "skip"))
    verify_images: bool = flag(False, "decode every image at the start, not only its header")
    max_rows: int = flag(0, "use the first rows of each file only; 0: all", low=0)
    max_eval_rows: int = flag(0, "evaluate on the first rows only; 0: all", low=0)
    data_threads: int = flag(2, "threads that decode images while the model works", low=1)


@dataclass(frozen=True)
class RolloutArgs:
    """rollout"""
    prompts_per_step: int = flag(128, "prompts per step, over all ranks", low=1)
    rollouts_per_step: int = flag(1, "rollouts of a step, of equally many prompts, whose samples feed its updates together; "
                                     "must divide --prompts_per_step", low=1)
    samples_per_prompt: int = flag(4, "samples per prompt", low=1)
    max_new_tokens: int = flag(1024, "longest response, tokens", low=1)
    min_new_tokens: int = flag(0, "shortest response, tokens: before, stop tokens are impossible and stop strings wait", low=0)
    temperature: float = flag(1.0, "sampling temperature; log-probs are taken at the same temperature everywhere", low=1e-6)
    top_k: int = flag(0, "sample from the k likeliest tokens; 0: off. Biases the gradient: training cannot undo it", low=0)
    top_p: float = flag(1.0, "keep the smallest set with this probability; 1: off. Biases the gradient too", low=1e-6, high=1)
    stop_tokens: str = flag("", "further stop tokens, comma separated, as text")
    stop_strings: str = flag("", "JSON list of strings that end a response when they appear in it")
    slots: int = flag(0, "sequences decoded together per rank; 0: as many as the memory allows, at most 256", low=0)
    prefill_tokens: int = flag(16384, "tokens per prefill call", low=1)
    poll_every: int = flag(0, "decoding steps between looks of the host at finished sequences; 0: 8 on GPU, 1 on CPU", low=0)
    cuda_graphs: str = flag("auto", "decode by CUDA graphs, captured anew in every rollout: one launch per step. auto: on "
                                    f"GPU, for a batch size that has lasted {GRAPH_PAYS} steps", ("auto", "on", "off"))


@dataclass(frozen=True)
class RewardArgs:
    """reward"""
    reward: str = flag("boxed", "source of rewards, or several separated by commas: a rule (exact, boxed, answer, verdict), "
                                "file.py:function, grm:FOLDER (generative judge), rm:FOLDER (scalar reward model), or a "
                                "server: http://host:port/path")
    reward_recipe: str = flag("", 'JSON, or a .json file, in place of --reward: {label: [[source, weight], ...]}, "*" for '
                                  "every other label; weight 0: only measured")
    reward_combiner: str = flag("", "file.py:function of {source: rewards} to rewards, for several sources without a recipe")
    grm_question: str = flag("auto", "what a judge is asked; answers: which is better, the response or the reference; auto: "
                                     "what it was trained on more, correct or score", ("auto", "correct", "score", "answers"))
    grm_mode: str = flag("probability", "what of a judge counts: the mean by its verdicts' probabilities, its likeliest "
                                        "verdict, or that of a critique it writes", ("probability", "verdict", "critique"))
    grm_max_new_tokens: int = flag(512, "longest critique of a judge, tokens", low=1)
    reward_timeout: float = flag(60.0, "longest time for the rewards of a step, with all retries, seconds", low=1e-6)
    reward_workers: int = flag(1, "threads per rank that score in parallel: requests at a time to a reward server", low=1)
    remote_batch: int = flag(32, "samples per request to a reward server", low=1)
    remote_timeout: float = flag(30.0, "longest time of one request to a reward server, seconds", low=1e-6)
    remote_retries: int = flag(4, "further tries of a request after a time-out, a lost connection or an answer 5xx; the "
                                  "pauses before them grow from 0.5 s to at most 8 s", low=0)


@dataclass(frozen=True)
class AlgorithmArgs:
    """algorithm"""
    advantage: str = flag("gae", "advantage estimator; gae has a critic; grpo (group_norm), dr_grpo, rloo, opo, gpg and "
                                 "reinforce_baseline compare at least 2 samples per prompt; remax adds a greedy one",
                          ("gae", "reinforce", "reinforce++", "reinforce_baseline", "grpo", "group_norm", "dr_grpo", "rloo",
                           "remax", "opo", "gpg", "cpgd"))
    gamma: float = flag(1.0, "discount per token (gae, reinforce, reinforce++, remax)", low=0, high=1)
    gae_lambda: float = flag(0.95, "lambda of gae", low=0, high=1)
    advantages_norm: str = flag("auto", "whiten advantages over the step. auto: on for gae, reinforce++ and "
                                        "reinforce_baseline", ("auto", "on", "off"))
    advantage_clip: float = flag(0.0, "bound of the advantages' absolute value; 0: off", low=0)
    reward_norm: bool = flag(False, "divide rewards, less their mean, by their standard deviation since the start of the run")
    reward_clip: float = flag(0.0, "bound of the rewards' absolute value, after --reward_norm; 0: off", low=0)
    overlong_buffer: int = flag(0, "tokens below --max_new_tokens over which a length penalty grows (DAPO); 0: off", low=0)
    overlong_factor: float = flag(1.0, "length penalty at --max_new_tokens, with --overlong_buffer", low=0)
    dynamic_sampling: int = flag(0, "rollouts per step, at most, to replace prompts whose samples all earn the same (DAPO); "
                                    "0: off", low=0)
    kl_coef: float = flag(0.0, "weight of the KL to the reference; 0: no reference is loaded", low=0)
    kl_in: str = flag("reward", "where the KL acts", ("reward", "loss"))
    kl_estimator: str = flag("k1", "in the reward k1, which alone has the gradient of the KL there; in the loss k2, k3+ or "
                                   "full: the whole vocabulary, for one more forward pass of the reference",
                             ("k1", "k2", "k3", "abs", "full", "k1+", "k3+", "abs+"))
    kl_target: float = flag(0.0, "KL per token that an adaptive weight aims at; 0: the weight is fixed", low=0)
    kl_horizon: int = flag(10000, "samples over which the adaptive weight changes", low=1)
    loss_aggregation: str = flag("token-mean", "how token losses are averaged",
                                 ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"))
    policy_loss: str = flag("ppo", "loss of the actor", tuple(losses.LOSS_CLIP_DEFAULTS))
    clip_low: float = flag(-1.0, "ratio clip below 1; -1: the loss's own: ppo and cpgd 0.2, gspo 3e-4, gmpo 0.4 (in log "
                                 "space), cispo 1 (none)", low=-1, high=1)
    clip_high: float = flag(-1.0, "ratio clip above 1; larger than --clip_low is clip-higher; -1: the loss's own: ppo and "
                                  "cpgd 0.2, gspo 4e-4, gmpo 0.4, cispo 4", low=-1)
    dual_clip: float = flag(3.0, "ratio bound for negative advantages (ppo), above 1; 0: off")
    value_clip: float = flag(0.2, "clip of the value's change; 0: off", low=0)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", low=0)
    high_entropy_ratio: float = flag(1.0, "share of each response's tokens, those of highest entropy, in the policy loss; "
                                          "below 1 it costs a forward pass", low=1e-6, high=1)
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
    vision_lr_factor: float = flag(1.0, "learning rate of the vision tower, as a multiple; with --train_vision", low=0)
    weight_decay: float = flag(0.0, "decoupled weight decay; never on biases and norms", low=0)
    adam_beta1: float = flag(0.9, "beta 1 of AdamW", low=0, high=1)
    adam_beta2: float = flag(0.95, "beta 2 of AdamW", low=0, high=1)
    max_grad_norm: float = flag(1.0, "bound on each model's global gradient norm; 0: off", low=0)
    aux_loss_coef: float = flag(0.0, "weight of the load-balancing loss of MoE models, actor and critic; above 0 it costs one "
                                "more forward per update", low=0)
    target_kl: float = flag(0.0, "stop a step's actor updates when KL(old, new) per token exceeds this; 0: off", low=0)
    ptx_coef: float = flag(0.0, "weight of the next-token loss on --ptx_data in the actor's loss (PPO-ptx); 0: off", low=0)
    ptx_batch: int = flag(64, "rows of --ptx_data per update of the actor, over all ranks", low=1)
    ptx_labels: str = flag("text", "tokens of --ptx_data that carry the loss: all text, or responses", ("text", "responses"))
    freezing_actor_steps: int = flag(0, "first steps that update the critic only", low=0)
    ema_beta: float = flag(0.0, "weight of the past in a running average of the actor's weights, taken after each applied "
                                "update, say 0.992; 0: no average", low=0, high=0.999999)
    ema_device: str = flag("device", "where the average is kept: with the weights, or in host memory", ("device", "cpu"))
    export_ema: bool = flag(False, "whenever weights are exported, export the average too, to <out>/export_ema")
    offload_optimizer: bool = flag(False, "keep the optimizers' state in host memory between their updates")
    offload_frozen: bool = flag(False, "keep reference and reward models in host memory, but for the stages that ask them")
    max_tokens_per_pack: int = flag(16384, "tokens per packed row: the memory of an update")
    share_prompts: bool = flag(True, "let the samples of a prompt share one copy of it in a packed row")
    head_chunk: int = flag(0, "tokens whose logits exist at the same time; 0: 1024 on a GPU, 256 on a CPU", low=0)


@dataclass(frozen=True)
class EvalArgs:
    """evaluation"""
    eval_every: int = flag(-1, "steps between evaluations, besides start and end; -1: once per pass, were --dynamic_sampling "
                                "off, 0: never", low=-1)
    eval_samples: int = flag(1, "samples per prompt; 1: greedy, more: mean and, of accuracy, pass@k at --temperature", low=1)
    eval_ema: bool = flag(False, "evaluate the average of --ema_beta in place of the weights in training")
    eval_only: bool = flag(False, "evaluate the model and stop")


@dataclass(frozen=True)
class RunArgs:
    """run"""
    out: Path = flag(Path("runs/ppo"), "output folder")
    seed: int = flag(0, "seed of sampling and data order", low=0)
    log_samples: int = flag(4, "samples shown as pictures and text per record; 0: none", low=0)
    log_samples_every: int = flag(10, "steps between records of samples (all of them to JSONL, some as pictures)", low=0)
    profile: int = flag(0, "step to trace with torch.profiler into <out>/profile; 0: none", low=0)
    timeout: float = flag(1800.0, "longest wait of a rank for the others, seconds", low=1e-6)
    hsdp: int = flag(0, "ranks that share one copy of weights and optimizer, such as the GPUs of a node; only gradients "
                        "travel between the copies (HSDP). 0: all ranks share one", low=0)
    dry_run: bool = flag(False, "check the data, print parameters, packs and memory per GPU, and stop: no GPU, no weights")
    plan_world: int = flag(8, "GPUs that --dry_run plans for", low=1)
    plan_gpu_gib: float = flag(80.0, "memory of each of them, GiB; exit code 2 if that is too little", low=1)


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
        return json.loads(self.rollout.stop_strings or "[]")

    @property
    def prompts_per_rollout(self) -> int:
        return self.rollout.prompts_per_step // self.rollout.rollouts_per_step

    @property
    def whiten(self) -> bool:
        norm = self.algorithm.advantages_norm
        return norm == "on" or (norm == "auto" and self.algorithm.advantage in ("gae", "reinforce++", "reinforce_baseline"))

    @property
    def clip(self) -> tuple[float, float]:
        given = (self.algorithm.clip_low, self.algorithm.clip_high)
        return tuple(own if value == -1 else value
                     for value, own in zip(given, losses.LOSS_CLIP_DEFAULTS[self.algorithm.policy_loss]))


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags, over --config, over defaults; without --model and --config: the toy.

    Raises:
        UserError: an unknown flag, a bad value, or a combination that cannot work.
    """
    values, given = read_flags({field.name: field.type for field in fields(Args)}, __doc__, argv, "args.json")
    if os.path.isfile(values.get("reward_recipe", "")):
        values["reward_recipe"] = Path(values["reward_recipe"]).read_text(encoding="utf-8")
    if values.get("reward_recipe") and "reward" not in given:
        values["reward"] = ""
    idle = {"critic_model", "init_critic_from", "critic_lr", "value_clip", "gae_lambda", "freezing_actor_steps"} & given
    args = fill_groups(Args, values)
    if args.algorithm.advantage != "gae" and idle:
        raise UserError(f"--advantage {args.algorithm.advantage} has no critic: leave out --{', --'.join(sorted(idle))}")
    check_args(args)
    return args


def check_args(args: Args) -> None:
    """Refuse what cannot work, before any process group or GPU is touched."""
    rollout, algorithm, update = args.rollout, args.algorithm, args.update
    longest = args.data.max_prompt_tokens + rollout.max_new_tokens
    rules = {
        f"--minibatches {update.minibatches} must divide --prompts_per_step {rollout.prompts_per_step}":
            rollout.prompts_per_step % max(1, update.minibatches) == 0,
        f"--rollouts_per_step {rollout.rollouts_per_step} must divide --prompts_per_step {rollout.prompts_per_step}":
            rollout.prompts_per_step % max(1, rollout.rollouts_per_step) == 0,
        f"--rollouts_per_step {rollout.rollouts_per_step} exceeds --dynamic_sampling {algorithm.dynamic_sampling}":
            rollout.rollouts_per_step <= (algorithm.dynamic_sampling or math.inf),
        f"--advantage {algorithm.advantage} compares the samples of a prompt: --samples_per_prompt "
        f"{rollout.samples_per_prompt} must be at least 2": algorithm.advantage not in COMPARE_GROUPS
            or rollout.samples_per_prompt > 1,
        "--advantage cpgd compares the samples of a step: it needs at least 2": algorithm.advantage != "cpgd"
            or rollout.samples_per_prompt * rollout.prompts_per_step > 1,
        "--dynamic_sampling drops prompts whose samples all earn the same: --samples_per_prompt must be at least 2":
            not algorithm.dynamic_sampling or rollout.samples_per_prompt > 1,
        f"--overlong_buffer {algorithm.overlong_buffer} exceeds --max_new_tokens {rollout.max_new_tokens}":
            algorithm.overlong_buffer <= rollout.max_new_tokens,
        "--clip_low and --clip_high must be at least 0, or -1 for the loss's own": all(
            value == -1 or value >= 0 for value in (algorithm.clip_low, algorithm.clip_high)),
        f"--freezing_actor_steps {update.freezing_actor_steps} needs a critic to train meanwhile (--advantage gae)":
            algorithm.advantage == "gae" or not update.freezing_actor_steps,
        "--reference_model is of no use without --kl_coef": algorithm.kl_coef > 0 or not args.model.reference_model,
        "--kl_target needs a --kl_coef above 0 to start from": algorithm.kl_coef > 0 or not algorithm.kl_target,
        f"--kl_horizon {algorithm.kl_horizon} must exceed a fifth of the samples per step": not algorithm.kl_target
            or 5 * algorithm.kl_horizon > rollout.prompts_per_step * rollout.samples_per_prompt,
        f"--min_new_tokens {rollout.min_new_tokens} exceeds --max_new_tokens {rollout.max_new_tokens}":
            rollout.min_new_tokens <= rollout.max_new_tokens,
        f"--dual_clip {algorithm.dual_clip} must be above 1, or 0 for off":
            algorithm.dual_clip == 0 or algorithm.dual_clip > 1,
        f"--max_tokens_per_pack {update.max_tokens_per_pack} must hold one prompt and one response: --max_prompt_tokens + "
        f"--max_new_tokens = {longest}": update.max_tokens_per_pack >= longest,
        f"--prefill_tokens {rollout.prefill_tokens} must hold one prompt: --max_prompt_tokens {args.data.max_prompt_tokens}":
            rollout.prefill_tokens >= args.data.max_prompt_tokens,
        "--system_prompt is for --row_kind prompts: a judge's own system_instruction stands before judgements":
            args.data.row_kind == "prompts" or not args.data.system_prompt,
        "--ptx_data and a --ptx_coef above 0 are needed together": bool(args.data.ptx_data) == (update.ptx_coef > 0),
        "--eval_ema and --export_ema need an average: --ema_beta above 0":
            update.ema_beta > 0 or not (args.eval.eval_ema or update.export_ema),
        "--cuda_graphs on needs a GPU, and torch sees none; leave it at auto":
            rollout.cuda_graphs != "on" or torch.cuda.is_available() or args.run.dry_run,
        f"--profile {args.run.profile} exceeds --steps {update.steps}": args.run.profile <= update.steps,
        f"--remote_timeout {args.reward.remote_timeout:g} exceeds --reward_timeout {args.reward.reward_timeout:g}":
            args.reward.remote_timeout <= args.reward.reward_timeout
            or "http" not in args.reward.reward + args.reward.reward_recipe,
    }
    problems = broken_rules(args, rules)
    try:
        strings = args.stop_strings
    except json.JSONDecodeError:
        strings = None
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        problems.append(f"--stop_strings {rollout.stop_strings} is not a JSON list of non-empty strings")
    try:
        parse_datasets(args.data.data)
    except ValueError as error:
        problems.append(f"--data {error}")
    if problems:
        raise UserError("\n".join(problems))


def flags_of(args: Args) -> dict[str, Any]:
    """Arguments as flags, paths of models, data and reward absolute: what --config reads back from any folder."""
    flags = list_flags(args)
    for name in ("model", "critic_model", "reference_model", "init_critic_from"):
        flags[name] = absolute_model(flags[name])
    for name in ("eval_data", "ptx_data"):
        flags[name] = absolute(flags[name])
    flags["data"] = ",".join(absolute(path) + (f":{weight!r}" if weight else "")
                             for path, weight in parse_datasets(flags["data"]))
    flags["reward"] = ",".join(map(absolute_source, flags["reward"].split(",")))
    flags["reward_combiner"] = absolute_source(flags["reward_combiner"])
    if flags["reward_recipe"]:
        recipe = read_recipe(flags["reward_recipe"])
        flags["reward_recipe"] = json.dumps({label: [[absolute_source(spec), weight] for spec, weight in parts.items()]
                                             for label, parts in recipe.items()})
    return flags


def absolute_source(spec: str) -> str:
    """A source of rewards as seen from any folder."""
    kind, colon, rest = (spec := spec.strip()).partition(":")
    program, _, function = spec.rpartition(":")
    return f"{kind}:{absolute_model(rest)}" if kind in ("grm", "rm") else f"{absolute(program)}:{function}" if colon else spec


def neutral_flags(args: Args) -> set[str]:
    """Flags that change where, how fast or how visibly a run computes, but not what."""
    groups = (EvalArgs, CheckpointArgs, RunArgs)
    return {field.name for group in groups for field in fields(group)} - {"seed"} | {
        "attention", "gradient_checkpointing", "data_threads", "verify_images", "slots", "prefill_tokens", "poll_every",
        "cuda_graphs", "reward_timeout", "reward_workers", "remote_batch", "remote_timeout", "remote_retries",
        "max_tokens_per_pack", "share_prompts", "head_chunk", "eval_data", "max_eval_rows", "ema_device", "export_ema",
        "offload_optimizer", "offload_frozen"} | (
        {"steps"} if args.update.lr_schedule == "constant" else set())


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
        if (here := int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > (gpus := torch.cuda.device_count()):
            raise UserError(f"{here} processes on this machine, and torch sees {gpus} GPUs here: --nproc_per_node {gpus}; or "
                            "CUDA_VISIBLE_DEVICES= (nothing), to use none")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32, "float32": torch.float32,
             "bfloat16": torch.bfloat16}[args.model.dtype]
    with failing_together():
        backend = choose_attention("auto" if args.run.dry_run else args.model.attention, device, dtype)
    ranks = args.run.plan_world if args.run.dry_run else world
    if ranks % max(1, args.run.hsdp):
        raise UserError(f"--hsdp {args.run.hsdp} must divide the number of ranks, {ranks}")
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                                timeout=timedelta(seconds=args.run.timeout))
    check_same_flags(list_flags(args))
    if rank == 0:
        install = f" (flash-attn is not installed; to build it: {FLASH_ATTN_INSTALL})" if backend == "varlen" else ""
        print(f"{world} x {device.type}, attention: {backend}{install}, compute: {str(dtype)[6:]}", flush=True)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            print("warning: restarted workers cannot connect through torchrun's own store; for --max_restarts set "
                  "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in front of torchrun", flush=True)
    shape = (world // args.run.hsdp, args.run.hsdp) if args.run.hsdp and not args.run.dry_run else (world,)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "shards")[-len(shape):])
    return Run(args, rank, world, device, dtype, backend, mesh, StageTimer())


def load_data(run: Run) -> tuple[Processor, list[list[Prompt]], list[float], list[Prompt]]:
    """Processor, checked rows of each training set and the sets' weights, and held-out rows; the same on every rank.

    Raises:
        UserError: on every rank alike: bad checkpoint files or bad rows, with file and line.
    """
    args, sets = run.args.data, parse_datasets(run.args.data.data)
    judgements = args.row_kind == "judgements"
    common = {"max_prompt_tokens": args.max_prompt_tokens, "on_bad_row": args.on_bad_row, "verify_images": args.verify_images}

    def load(path: str, limit: int) -> list[Prompt]:
        if judgements:
            return load_judgements(path, processor, limit=limit, **common)
        return load_prompts(path, processor, prompt_column=args.prompt_column, images_column=args.images_column,
                            reference_column=args.reference_column, label_column=args.label_column,
                            system_prompt=args.system_prompt, limit=limit, **common)

    with failing_together():
        folder = resolve_folder(run.args.model.model, weights=not run.args.run.dry_run)
        processor = Processor(str(folder), args.min_pixels, args.max_pixels, args.video_frames, args.video_fps,
                              args.video_max_pixels)
        if judgements:
            learned = processor.files["judge"].get("kinds", {})
            judge = processor.files["judge"] = judge_settings(processor.files["judge"], which="last")          # is exported
        datasets = [load(path, args.max_rows) for path, _ in sets]
        held_out = load(args.eval_data, args.max_eval_rows) if args.eval_data else []
        if judgements:                               # who learned its verdicts behind critiques only goes on writing them
            wrote = {kind for kind, own in learned.items() if 0 < own.get("examples", 0) == own.get("critiques")}
            count_judgements(judge, [(row.label, row.reference, row.label not in wrote) for rows in datasets for row in rows])
    weights = [float(len(rows)) if weight is None else weight for rows, (_, weight) in zip(datasets, sets)]
    return processor, datasets, weights, held_out


@dataclass
class TextRows:
    """Rows of --ptx_data with their target tokens, and the threads that decode their pictures."""

    rows: list[tuple[Prompt, torch.Tensor]]
    loader: PromptLoader


def load_text(run: Run, processor: Processor) -> TextRows | None:
    """Checked rows of --ptx_data, as they stand: no system prompt is added. Raises UserError on every rank alike."""
    args, limit = run.args.data, run.args.update.max_tokens_per_pack
    if not args.ptx_data:
        return None
    frame, folder = answer_frame(processor), os.path.dirname(os.path.abspath(args.ptx_data))

    def build(index: int, source: str, row: dict) -> tuple[Prompt, torch.Tensor]:
        if check_judgement(row)[1] != "response":
            raise ValueError("a judgement; rows of --ptx_data have a prompt and a response")
        ask, = read_judgement(row, {"which_answer": "last"}, "given")
        prompt = make_prompt(processor, index, source, ask["question"], ask["images"], folder=folder,
                             verify_images=args.verify_images)
        target = encode_target(processor, frame, ask["text"])
        if (size := len(prompt.input_ids) + len(target)) > limit:
            raise ValueError(f"row too long: {size} tokens; --max_tokens_per_pack is {limit}")
        return prompt, target

    with failing_together("--ptx_data "):
        rows = load_rows(args.ptx_data, build, on_bad_row=args.on_bad_row, limit=args.max_rows)
    return TextRows(rows, PromptLoader(processor, args.data_threads, args.on_bad_row))


class Policy(nn.Module):
    """Actor or reference: a packed row in, log-probs of its response tokens out. Full logits never exist."""

    def __init__(self, model: nn.Module, processor: Processor, args: Args):
        super().__init__()
        self.model = model
        self.temperature, self.min_new_tokens = args.rollout.temperature, args.rollout.min_new_tokens
        self.chunk = args.update.head_chunk
        banned = torch.zeros(model.config.get_text_config().vocab_size, dtype=torch.bool)
        banned[list(processor.banned_ids)] = True
        self.register_buffer("banned", banned, persistent=False)                                                 # (V,)
        self.register_buffer("stop_ids", torch.tensor(stop_token_ids(processor, args)), persistent=False)

    def forward(self, row: Row, attention: PackedAttention, entropy: bool = False, reference: tuple | None = None,
                hidden_only: bool = False, plain: bool = False):
        """Returns logp (T,) float32, entropy (T,) or None, and the exact KL (T,) to a reference or None.

        Args:
            reference: hidden states (T, H) and head (V, H) of the reference, for the exact KL.
            hidden_only: return the hidden states (T, H) that predict the responses, and nothing else.
            plain: log-probs of the model as it is, for text that nobody sampled: no temperature, nothing banned.
        """
        hidden = language_hidden(self.model, row, attention)[row.predict]                                      # (T, H)
        if hidden_only:
            return hidden
        head = {"temperature": self.temperature, "banned": self.banned, "row_banned": row.step < self.min_new_tokens,
                "row_banned_ids": self.stop_ids} if not plain else {}
        head["chunk"] = self.chunk
        weight = self.model.lm_head.weight
        logp, spread = losses.linear_logprobs(hidden, weight, row.targets, entropy=entropy, **head)
        return logp, spread, losses.full_kl(hidden, reference[0], weight, reference[1], **head) if reference else None


class Critic(nn.Module):
    """The value of the state before each response token, read from the row that predicts the token."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)

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
    critic = reference = None
    adapt = functools.partial(add_adapters, base=absolute_model(args.model.model), rank=args.model.lora_rank,
                              alpha=args.model.lora_alpha, targets=args.model.lora_targets, dtype=run.dtype)
    with failing_together():
        folder, own_tower = resolve_folder(args.model.model, weights=not args.run.dry_run), args.model.train_vision
        longest = args.data.max_prompt_tokens + args.rollout.max_new_tokens
        model = skeleton(processor.config, sees_pixels=own_tower, longest=longest)
        if not own_tower:
            freeze(vision_parameters(model), run.dtype)
        if args.update.aux_loss_coef and not routers(model):
            raise ValueError(f"--aux_loss_coef {args.update.aux_loss_coef}: {folder} has no experts to balance")
        if args.model.lora_rank:
            adapt(model)
        actor = Policy(model, processor, args)
        actor.spelled = load_sharded(run, actor, folder)
        if args.algorithm.advantage == "gae":
            path, config = with_same_tower(args.model.critic_model, folder, processor.config, own_tower)
            body = skeleton(config, vision=own_tower, head=False, sees_pixels=own_tower, longest=longest)
            if args.model.lora_rank:
                adapt(body)
            critic = Critic(body)
            load_sharded(run, critic, path)
        if args.algorithm.kl_coef > 0 and args.model.lora_rank and not args.model.reference_model:
            reference = actor                                                  # without its adapters
        elif args.algorithm.kl_coef > 0:
            path, config = with_same_tower(args.model.reference_model, folder, processor.config, own_tower)
            model = skeleton(config, vision=own_tower, sees_pixels=own_tower, longest=longest)
            reference = Policy(model, processor, args).requires_grad_(False).eval()
            load_sharded(run, reference, path)
            put_away(run, frozen=reference)
    if args.model.gradient_checkpointing:
        for part in [part for module in filter(None, (actor, critic)) for part in trained_parts(module.model)]:
            part.gradient_checkpointing_enable({"use_reentrant": False})
    return actor, critic, reference


def load_sharded(run: Run, module: nn.Module, folder: Path) -> dict[str, str]:
    """Shard a module that is on meta (ZeRO-3, FSDP2), allocate the shards and stream the weights into them."""
    full = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32)
    # Inputs keep their type: a tower's angles are float32, and torch 2.11 casts them only until it computes a layer again.
    policy = MixedPrecisionPolicy(param_dtype=run.dtype if run.dtype != torch.float32 else None,
                                  reduce_dtype=torch.float32, cast_forward_inputs=False)
    if run.args.run.dry_run:                                   # parameters stay on meta, and the files are believed
        return dict.fromkeys(VALUE_HEADS, "")
    use_attention(module.model, run.backend)
    own_tower = module.model.sees_pixels                         # else replicated, without collectives
    for layer in [*language_model(module.model).layers, *(module.model.model.visual.blocks if own_tower else ())]:
        fully_shard(layer, mesh=run.mesh, mp_policy=policy)
    head = getattr(module, "value_head", None)
    if head is not None:
        fully_shard(head, mesh=run.mesh, mp_policy=full)
    replicated = set() if own_tower else set(vision_parameters(module.model))
    fully_shard(module, mesh=run.mesh, mp_policy=policy, ignored_params=replicated)
    materialize(module, run.device)
    init_adapters(module.model, run.args.run.seed)
    if head is None:
        return load_weights(module.model, folder)
    nn.init.zeros_(head.weight)
    return load_weights(module.model, folder, dict.fromkeys(VALUE_HEADS, head.weight))


def load_critic_weights(path: Path, critic: Critic) -> None:
    """Start a critic from the critic of another run's checkpoint: weights only, its optimizer starts fresh."""
    if path not in [found for _, found in complete_checkpoints(path.parent)]:
        raise UserError(f"--init_critic_from {path}: not a complete checkpoint")
    weights = {f"critic.model.{name}": value for name, value in get_model_state_dict(
        critic, options=StateDictOptions(ignore_frozen_params=True)).items()}
    try:
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(path)))
    except dcp.api.CheckpointException as error:
        raise UserError(f"--init_critic_from {path}: {describe_failure(error)}") from error


def build_optimizer(module: nn.Module, lr: float, args: Args) -> torch.optim.AdamW:
    """AdamW on the trained parameters; matrices decay, biases and norms (one dimension) do not. The vision tower's learning
    rate has a factor."""
    trained, tower = [p for p in module.parameters() if p.requires_grad], set(vision_parameters(module.model))
    groups = [{"params": [p for p in trained if (p.ndim >= 2) == matrix and (p in tower) == seen],
               "weight_decay": args.update.weight_decay * matrix, "factor": args.update.vision_lr_factor if seen else 1.0}
              for seen in (False, True) for matrix in (True, False)]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, fused=True,      # not a loop over DTensors
                                  betas=(args.update.adam_beta1, args.update.adam_beta2))
    for parameter in trained:      # what AdamW would make at its first step; a checkpoint before that would otherwise take one
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | moments
    return optimizer


def start_average(args: UpdateArgs, optimizer: torch.optim.Optimizer) -> None:
    """Begin the running average at the weights. It is optimizer state, on the same shards: saved and resumed with it."""
    for parameter, state in optimizer.state.items() if args.ema_beta else ():
        state["ema"] = parameter.detach().clone()


@torch.no_grad()
def update_average(args: UpdateArgs, optimizer: torch.optim.Optimizer) -> None:
    """average = beta * average + (1 - beta) * weights."""
    for parameter, state in optimizer.state.items() if args.ema_beta else ():
        average = shard_of(state["ema"])
        average.lerp_(shard_of(parameter).to(average.device), 1 - args.ema_beta)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer):
    """Inside, weights and average have changed places, in the memory of both; afterwards both are as before, bit for bit."""
    @torch.no_grad()
    def swap():
        for parameter, state in optimizer.state.items():
            weight, average = shard_of(parameter), shard_of(state["ema"])
            kept = weight.to(average.device, copy=True)
            weight.copy_(average)
            average.copy_(kept)

    swap()
    try:
        yield
    finally:
        swap()


def dry_run(run: Run, datasets: list[list[Prompt]], weights: list[float], actor: Policy, critic: Critic | None,
            reference: Policy | None, reward: "Reward") -> dict[str, float]:
    """Print what --dry_run is asked for, the data of the first step standing for all. Raises UserError: too little memory."""
    args, update = run.args, run.args.update
    size, count = args.rollout.prompts_per_step, args.rollout.samples_per_prompt
    rows = sum(datasets, [])
    lengths, pictures = [len(row.input_ids) for row in rows], [row.image_tokens for row in rows]
    roles = [("actor", actor), ("critic", critic), ("reference", None if reference is actor else reference)]     # with LoRA
    models = {name: module for name, module in [*roles, *((s.name, s.model) for s in reward.sources)] if module is not None}
    lines = [f"{len(rows)} prompts of {sum(lengths) / len(rows):.0f} tokens, at most {max(lengths)}; of pictures "
             f"{sum(pictures) / len(rows):.0f}, at most {max(pictures)}", f"{update.steps} steps of {size} prompts x {count} "
             f"samples = {update.steps * size / len(rows):.1f} passes; {update.epochs * update.minibatches} updates per step"]
    choose = functools.partial(prompts_of_batch, args, datasets, *mix(weights, size))
    first = [len(row.input_ids) for batch in range(args.rollout.rollouts_per_step) for row in choose(batch)[0]]
    groups = minibatches(size, update.minibatches, (args.run.seed, 1, 0))[0]
    for length in (args.rollout.max_new_tokens, -(-args.rollout.max_new_tokens // 2)):
        samples = as_samples([[torch.zeros(length, dtype=torch.int64)] * count] * size)
        blocks = make_blocks(samples, first, update.max_tokens_per_pack, groups, update.share_prompts)
        packs = make_packs(samples, first, blocks, args.run.plan_world, update.max_tokens_per_pack,
                           actor.model.config.get_text_config().hidden_size)
        lines.append(f"responses of {length} tokens: {sum(first) + len(samples.tokens)} tokens per step, "
                     f"{len(packs[0])} packs per GPU and update")
    for name, module in models.items():
        lines.append(f"{name}, million parameters: " + "  ".join(
            f"{part} {number / 1e6:.3f}" for part, number in count_parameters(module).items() if number))
    lines.append(f"{args.run.plan_world} GPUs, {args.run.hsdp or args.run.plan_world} shards, rows of "
                 f"{update.max_tokens_per_pack} tokens:")
    return print_plan(lines, functools.partial(plan_memory, args, models, max(lengths)), args.model.gradient_checkpointing,
                      args.run.plan_gpu_gib)


def plan_memory(args: Args, models: dict[str, nn.Module], longest: int, checkpointing: bool) -> dict[str, dict[str, float]]:
    """Bytes on a GPU by phase of a step and part, with prompts of at most ``longest`` tokens: sums of what may coincide."""
    itemsize, ranks = 4 if args.model.dtype == "float32" else 2, args.run.hsdp or args.run.plan_world
    held = {f"{name} {part}": size for name, module in models.items()
            for part, size in resident_bytes(module, ranks, itemsize).items() if size}
    if args.update.ema_beta and args.update.ema_device == "device":
        held["actor average"] = held["actor Adam"] // 2
    away = [part for part in held if (args.update.offload_optimizer and part.endswith((" Adam", " average")))
            or (args.update.offload_frozen and part.split()[0] not in ("actor", "critic"))]
    tokens, chunk, actor = args.update.max_tokens_per_pack, args.update.head_chunk or 1024, models["actor"]

    def at_hand_of(*busy: str) -> dict[str, float]:
        """What lies on the GPU; of what is offloaded, the parts of these models: in training, or frozen and asked."""
        return {part: size for part, size in held.items() if part not in away or part.split()[0] in busy}

    def decode(module: nn.Module, length: int, stay: dict[str, float]) -> dict[str, float]:
        """All weights gathered; slots as `RolloutEngine.slot_count` takes them."""
        text, (root, _, layers) = module.model.config.get_text_config(), gathered_bytes(module, itemsize)
        room = (args.run.plan_gpu_gib - RESERVED_GIB) * 2 ** 30 - sum(stay.values())
        slot = length * cache_bytes(text, itemsize)
        wanted = min(args.rollout.slots or 256, -(-args.prompts_per_rollout // args.run.plan_world)
                     * args.rollout.samples_per_prompt)
        work = rollout_work(module, args.rollout, itemsize)
        slots = wanted if args.rollout.slots else max(1, min(wanted, int(0.9 * (room - root - layers - work) // slot)))
        return stay | {"gathered weights": root + layers, "KV cache": slots * slot, "forward": work}

    def score(name: str) -> dict[str, float]:
        module = models[name]
        root, layer, _ = gathered_bytes(module, itemsize)
        logits = 12 * chunk * module.model.config.get_text_config().vocab_size if module.model.lm_head is not None else 0
        work = max(tokens * layer_activations(module, itemsize), logits)
        asked = name if name not in ("actor", "critic") else ""                              # which need no optimizer here
        return at_hand_of(asked) | {"gathered weights": root + 2 * layer, "forward": work}

    def update(name: str) -> dict[str, float]:
        root, layer, _ = gathered_bytes(models[name], itemsize)
        return at_hand_of(name, "reference" if exact and name == "actor" else "") | {
            "gathered weights": root + 2 * layer, "gradient shards": held[f"{name} Adam"] / 2} | backward_bytes(
            models[name], tokens, itemsize, checkpointing, chunk)

    algorithm, longest = args.algorithm, longest + args.rollout.max_new_tokens
    exact = algorithm.kl_estimator == "full" and algorithm.kl_in == "loss"
    phases = {"rollout": decode(actor, longest, at_hand_of())}
    of_actor = algorithm.recompute_old_logprobs or algorithm.high_entropy_ratio < 1 or algorithm.kl_estimator == "full"
    scored = [score(name) for name in models if name != "actor" or of_actor]
    if scored:
        phases["score"] = max(scored, key=lambda parts: sum(parts.values()))
    for name, module in models.items():
        if name.startswith("grm") and args.reward.grm_mode == "critique":
            phases[f"{name} writes"] = decode(module, longest + args.reward.grm_max_new_tokens, at_hand_of(name))
    return phases | {f"update {name}": update(name) for name in ("critic", "actor") if name in models}


def offloaded(run: Run, module: nn.Module | None) -> bool:
    """Whether --offload_frozen is about this module; the reference may be the actor, without its adapters."""
    return run.args.update.offload_frozen and not run.args.run.dry_run and module is not None and not any(
        p.requires_grad for p in module.parameters())


def put_away(run: Run, optimizer: torch.optim.Optimizer | None = None, frozen: nn.Module | None = None) -> None:
    """Put what --offload_optimizer, --offload_frozen and --ema_device keep in host memory there."""
    args, host = run.args.update, torch.device("cpu")
    if optimizer is not None and (args.offload_optimizer or args.ema_device == "cpu"):
        move_state(optimizer, host, ("exp_avg", "exp_avg_sq", "ema") if args.offload_optimizer else ("ema",))
    if offloaded(run, frozen):
        move_module(frozen, host)


@contextmanager
def at_hand(run: Run, optimizer: torch.optim.Optimizer | None = None, frozen: nn.Module | None = None):
    """Inside, what --offload_optimizer and --offload_frozen keep in host memory is on the device."""
    args = run.args.update
    if optimizer is not None and args.offload_optimizer:
        move_state(optimizer, run.device, ("exp_avg", "exp_avg_sq") + ("ema",) * (args.ema_device == "device"))
    if offloaded(run, frozen):
        move_module(frozen, run.device)
    try:
        yield
    finally:
        put_away(run, optimizer, frozen)


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
# Prompts and rollout
# ---------------------------------------------------------------------------------------------------------------------


def prompts_of_batch(args: Args, datasets: list[list[Prompt]], which: np.ndarray, number: np.ndarray,
                     index: int) -> tuple[list[Prompt], list[int]] | None:
    """Batch ``index`` of prompts, 0-based, and their draw numbers: how many prompts were taken before each. A step takes
    --rollouts_per_step batches, or more with --dynamic_sampling. Draw j is draw ``number[j]`` of dataset ``which[j]``. None
    behind the last."""
    draws = slice(index * args.prompts_per_rollout, (index + 1) * args.prompts_per_rollout)
    if draws.start >= len(which):
        return None
    picks = take_rows(which[draws], number[draws], [len(rows) for rows in datasets], args.run.seed)
    return [datasets[k][row] for k, row in picks], list(range(draws.start, draws.stop))


def sample_and_score(run: Run, processor: Processor, actor: Policy, reward: "Reward", loader: PromptLoader,
                     batch: int) -> tuple[StepPrompts, Samples, dict[str, float]]:
    """Roll out and score the --rollouts_per_step batches of a step, which begin at 0-based ``batch``; with --dynamic_sampling,
    go on with further ones until --prompts_per_step prompts have samples that earn different rewards (DAPO, Yu et al. 2025,
    section 3.2).

    Where the limit comes first, prompts without spread fill the step. Returns metrics, too.
    """
    args, size, dynamic = run.args, run.args.rollout.prompts_per_step, run.args.algorithm.dynamic_sampling
    limit = dynamic or args.rollout.rollouts_per_step
    parts, useful, generated = [], [], 0
    while len(parts) < limit and len(useful) < size:
        with run.timer("data"):
            prompts = loader.take(batch + len(parts))
        with run.timer("rollout"):
            samples = rollout(run, processor, actor, prompts, args.rollout.samples_per_prompt, TRAIN)
            greedy = rollout(run, processor, actor, prompts, 1, TRAIN, greedy=True) \
                if args.algorithm.advantage == "remax" else None
        with run.timer("reward"):
            samples = score_rewards(run, processor, reward, prompts, samples)
            if greedy is not None:
                greedy = score_rewards(run, processor, reward, prompts, greedy)                # one per group, in order
                own = torch.searchsorted(greedy.group, samples.group)
                samples.greedy_scores, samples.greedy_lengths = greedy.scores[own], greedy.lengths[own]
        generated += len(samples.tokens) + (0 if greedy is None else len(greedy.tokens))
        useful += [(len(parts), group) for group in groups_with_spread(samples)]
        parts.append((prompts, samples))
    metrics = {"rollout/rollouts": len(parts), "rollout/generated_tokens": generated,
               "rollout/dropped_prompts": loader.dropped}
    if limit > 1:
        lost = [(i, group) for i, (prompts, _) in enumerate(parts) for group in prompts.dropped]
        groups = {(i, group) for i, (prompts, _) in enumerate(parts) for group in range(len(prompts.prompts))}
        dull, room = sorted(groups.difference(useful, lost), reverse=True), max(0, size - len(useful))
        prompts, samples = merge_steps(parts, sorted(useful + (dull + lost)[:room])[:size])      # what has no samples, last
        metrics |= {"rollout/groups_without_spread": len(dull), "rollout/groups_not_replaced": room} if dynamic else {}
    lengths = torch.tensor(prompts.lengths)[samples.group] + samples.lengths                                             # (S,)
    return prompts, samples, metrics | {"rollout/total_length": float(lengths.double().mean())}


def groups_with_spread(samples: Samples) -> list[int]:
    """The prompts whose samples do not all earn the same."""
    scores = {}
    for group, score in zip(samples.group.tolist(), samples.scores.tolist()):
        scores.setdefault(group, []).append(score)
    return [group for group, earned in sorted(scores.items()) if max(earned) - min(earned) >= 1e-6]


def merge_steps(parts: list[tuple[StepPrompts, Samples]], picks: list[tuple[int, int]]) -> tuple[StepPrompts, Samples]:
    """One step of several: of the groups ``picks``, as (part, group) in ascending order."""
    place = {pick: k for k, pick in enumerate(picks)}
    steps = [prompts for prompts, _ in parts]
    renumber = lambda name: {place[i, group]: value for i, step in enumerate(steps)  # noqa: E731
                             for group, value in getattr(step, name).items() if (i, group) in place}
    merged = StepPrompts([steps[i].prompts[group] for i, group in picks], [steps[i].draws[group] for i, group in picks],
                         [steps[i].owners[group] for i, group in picks], renumber("positions"), renumber("patches"),
                         renumber("features"), [place[i, group] for i, step in enumerate(steps) for group in step.dropped
                                                if (i, group) in place])
    samples = []
    for i, (_, part) in enumerate(parts):
        own = torch.tensor([k for k, group in enumerate(part.group.tolist()) if (i, group) in place], dtype=torch.int64)
        part = part.select(own)
        groups = torch.tensor([place[i, group] for group in part.group.tolist()], dtype=torch.int64)
        samples.append(replace(part, group=groups))
    return merged, concatenate(samples)


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
        with torch.inference_mode(), bare_forwards(actor.model):       # a toy step costs a seventh less than under no_grad
            results = engine.generate(own, count)
    found = [[] for _ in prompts.prompts]
    for group in own:
        found[group] = [results[group, number] for number in range(count)]
    logprobs, truncated = ([sample[k] for part in found for sample in part] for k in (1, 2))
    local = as_samples([[tokens for tokens, *_ in part] for part in found])
    return gather_samples(replace(local, logprobs=torch.cat([torch.zeros(0), *logprobs]),
                                  truncated=torch.tensor(truncated, dtype=torch.bool)))


def compute_features(run: Run, owner: nn.Module, prompts: StepPrompts) -> None:
    """Image features of the own prompts, once per prompt, several pictures per call of the vision tower."""
    waiting, size = [], 0
    groups = sorted(prompts.patches.keys() - prompts.features.keys())
    for group in groups:
        waiting.append(group)
        size += prompts.patches[group][0].numel() // 1024            # about patches, also where pictures come as tiles
        if size < run.args.update.max_tokens_per_pack and group != groups[-1]:
            continue
        patches, grids = (torch.cat(parts) for parts in zip(*(prompts.patches[g] for g in waiting)))
        features = image_features(owner.model, patches, grids).cpu()                                        # (K, M, H)
        counts = [prompts.prompts[g].image_tokens for g in waiting]
        prompts.features |= dict(zip(waiting, features.split(counts, dim=1)))
        for g in () if owner.model.sees_pixels else waiting:
            del prompts.patches[g]
        waiting, size = [], 0


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


RULES = ("exact", "boxed", "answer", "verdict")


def rule_reward(rule: str, prompts, responses, references, labels, images) -> dict[str, list[float]]:
    """`exact`: 1 where the whole response is the reference; `verdict`: 1 where its last <answer> is, as judgements end;
    `boxed` and `answer`: 0.9 accuracy of the extracted answer + 0.1 format."""
    if rule == "exact":
        accuracy = [float(exact_match(response, reference)) for response, reference in zip(responses, references)]
        return {"reward": accuracy, "accuracy": accuracy}
    if rule == "verdict":
        accuracy = [float(parse_verdict(a, "last", [b]) is not None) for a, b in zip(responses, references)]
        formats = [float(parse_verdict(response, "last", None) is not None) for response in responses]
        return {"reward": accuracy, "accuracy": accuracy, "format": formats}
    accuracy = [float(answers_equal(extract_answer(a, rule) or "", b)) for a, b in zip(responses, references)]
    formats = [format_score(response, rule) for response in responses]
    return {"reward": [0.9 * a + 0.1 * f for a, f in zip(accuracy, formats)], "accuracy": accuracy, "format": formats}


@dataclass
class Source:
    """One source of rewards: a function of texts, scored by the rank of the sample, or a model, by all ranks together."""

    spec: str                                  # as given: boxed, file.py:function, grm:FOLDER, rm:FOLDER
    name: str                                  # in metrics and records
    function: Callable | None = None
    batch: int = 0                             # most samples per call of the function; 0: any number
    model: nn.Module | None = None             # from here on: grm and rm, by build_reward_models
    processor: Processor | None = None
    shares_tower: bool = False                 # with the actor: its image features serve
    question: str = ""                         # the kind of question a judge is asked
    run: "Run | None" = None                   # with the judge's own rollout settings


@dataclass
class Reward:
    """What a sample earns: a weighted sum of sources, chosen by the label of its row."""

    sources: list[Source]
    recipe: dict[str, dict[str, float]]        # label -> source's name -> weight; "*": rows of every other label
    combiner: Callable | None = None           # {name: rewards} -> rewards, in place of the sum

    def weights(self, label: str | None) -> dict[str, float]:
        """Raises KeyError: a label that the recipe does not have."""
        return self.recipe[label if label in self.recipe else "*"]


def load_function(flag_name: str, spec: str, takes: str) -> Callable:
    """The function of ``path.py:function``, which is called with what it ``takes``. Raises UserError."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"{flag_name} {spec}: expected one of {', '.join(RULES)}, grm:FOLDER, rm:FOLDER, "
                        "http://host:port/path, or an existing path.py:function")
    module_spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = sys.modules[module_spec.name] = importlib.util.module_from_spec(module_spec)  # dataclasses look there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{flag_name} {spec}: {path} raised {told(error)}") from error
    if not callable(getattr(module, name, None)):
        raise UserError(f"{flag_name} {spec}: {path} has no function {name!r}")
    try:
        inspect.signature(getattr(module, name)).bind(*takes.split(", "))
    except (TypeError, ValueError) as error:                                         # ValueError: a builtin
        raise UserError(f"{flag_name} {spec}: must take ({takes}): {error}") from error
    return getattr(module, name)


def told(error: BaseException) -> str:
    """What a program of the user's raised, and the lines that led there, the innermost first."""
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(traceback.extract_tb(error.__traceback__))
             if frame.filename != __file__ and frame.filename[:1] != "<"]
    return f"{type(error).__name__}: {error}" + f" ({' < '.join(lines)})" * bool(lines)


def load_source(spec: str, args: RewardArgs = RewardArgs()) -> Source:
    """A source by its spec; folders of models are looked at later, by `build_reward_models`. Raises UserError.

    A function `f(prompts, responses, references, labels, images)` gets lists of equal length and returns a list of floats
    or a dict of such lists: its "reward" is the reward, or else the sum of all; the others are logged as components.
    """
    kind, _, rest = spec.partition(":")
    if spec in RULES:
        return Source(spec, spec, functools.partial(rule_reward, spec))
    if kind in ("grm", "rm") and rest:
        return Source(spec, kind)
    if kind in ("http", "https"):
        return Source(spec, "remote", remote_reward(spec, args), args.remote_batch)
    function = load_function("--reward", spec, "prompts, responses, references, labels, images")
    return Source(spec, spec.rpartition(":")[2], function)


def load_reward(args: RewardArgs) -> Reward:
    """The sources of --reward or --reward_recipe and how they are combined. Raises UserError."""
    recipe = read_recipe(args.reward_recipe) if args.reward_recipe else {
        "*": dict.fromkeys(filter(None, map(str.strip, args.reward.split(","))), 1.0)}
    specs = list(dict.fromkeys(spec for weights in recipe.values() for spec in weights))
    if not specs:
        raise UserError("--reward is empty: no source of rewards")
    if len(specs) > 1 and not args.reward_recipe and not args.reward_combiner:
        raise UserError(f"--reward {args.reward}: {len(specs)} sources need a --reward_recipe with their weights, or a "
                        "--reward_combiner")
    if args.reward_recipe and (args.reward or args.reward_combiner):
        raise UserError(f"--{'reward' if args.reward else 'reward_combiner'} and --reward_recipe: choose one of them")
    sources, names = [load_source(spec, args) for spec in specs], {}
    for source in sources:                                                       # two judges: grm, grm2
        same = [source.name, *(f"{source.name}{k}" for k in range(2, len(sources) + 1))]
        names[source.spec] = source.name = next(name for name in same if name not in names.values())
    recipe = {label: {names[spec]: weight for spec, weight in weights.items()} for label, weights in recipe.items()}
    combiner = load_function("--reward_combiner", args.reward_combiner, "rewards") if args.reward_combiner else None
    return Reward(sources, recipe, combiner)


def read_recipe(text: str) -> dict[str, dict[str, float]]:
    """label -> source -> weight, of JSON {label: [[source, weight], ...]}. Raises UserError."""
    try:
        recipe = json.loads(text)
    except ValueError as error:
        raise UserError(f"--reward_recipe {text}: no such file, and as JSON: {error}") from error

    def valid(parts) -> bool:
        return isinstance(parts, list) and parts and all(
            isinstance(part, list) and list(map(type, part)) in ([str, int], [str, float]) and part[0]
            and math.isfinite(part[1]) for part in parts) and len(dict(parts)) == len(parts)

    if not isinstance(recipe, dict) or not recipe or not all(map(valid, recipe.values())):
        raise UserError(f"--reward_recipe {text}: expected {{label: [[source, weight], ...]}}, each source once for a label; "
                        '"*" for all other labels; weight 0: only measured')
    return {label: dict(parts) for label, parts in recipe.items()}


def check_rows(args: Args, reward: Reward, rows: list[Prompt]) -> None:
    """Raises UserError: rows that the reward cannot score, with their lines."""
    needs = {source.name: source.spec in RULES or (source.spec.startswith("grm:") and args.reward.grm_question == "answers")
             for source in reward.sources}
    bad = []
    for row in rows:
        label = row.label if row.label in reward.recipe else "*"
        if label not in reward.recipe:
            bad.append(f"{row.source}: label {row.label!r} is not in --reward_recipe: {', '.join(reward.recipe)}")
        elif row.reference is None and (names := [name for name in reward.recipe[label] if needs[name]]):
            bad.append(f"{row.source}: no reference answer, which {names[0]} compares with")
    if bad:
        raise UserError("\n  ".join([f"{len(bad)} of {len(rows)} rows cannot be scored", *bad[:5]]))


class RewardError(ValueError):
    """A reward function failed; the message shows its spec, the numbers and the sample."""


MAX_REPLY = 2 ** 26  # bytes that are read of a reward server's answer
REMOTE_FRAMES = 16   # of a video, that a reward server gets


def remote_reward(url: str, args: RewardArgs) -> Callable:
    """The reward function that asks a server; the README has the contract. Raises UserError: an URL that cannot be asked.

    What may pass (time-outs, lost connections, answers 5xx) is tried again; any other answer but a valid one is a
    RewardError at once. No proxy, redirect or password is used.
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
        with closing(connect(host, port, timeout=args.remote_timeout)) as connection:
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

    def ask(body: bytes) -> bytes:
        """The server's answer with status 200, after as many tries as it takes or --remote_retries allow."""
        for attempt in range(args.remote_retries + 1):
            try:
                status, said = post(body)
                if status == 200:
                    return said
                problem = f"HTTP {status}: {said[:500].decode(errors='replace')!r}"
                if status < 500:
                    raise RewardError(f"the server answered {problem}")
            except (OSError, http.client.IncompleteRead) as error:
                problem = f"{type(error).__name__}: {error}"
            except http.client.HTTPException as error:
                raise RewardError(f"the server does not speak HTTP: {type(error).__name__}: {error}") from error
            if attempt < args.remote_retries:
                pause = 0.5 * 2 ** min(attempt, 4)
                print(f"--reward {url}: {problem}; retry {attempt + 1} of {args.remote_retries} in {pause:g} s", flush=True)
                time.sleep(pause)
        raise RewardError(f"no answer in {args.remote_retries + 1} tries (--remote_retries), at last {problem}")

    def score(prompts, responses, references, labels, images) -> dict[str, list[float]]:
        pictures = {item: encode_picture(item) for item in set().union(*images)}
        return read_reply(ask(json.dumps({
            "queries": [prompt + response for prompt, response in zip(prompts, responses)], "prompts": prompts,
            "responses": responses, "references": references, "labels": labels,
            "images": [[pictures[item] for item in items] for items in images]}).encode()))

    return score


def encode_picture(item: str | tuple[str, ...]) -> str | list[str]:
    """A picture, upright and RGB, as PNG in base64; of a video a list of up to REMOTE_FRAMES of its frames."""
    coded = []
    for image in read_frames([item], REMOTE_FRAMES):
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        coded.append(base64.b64encode(file.getvalue()).decode())
    return coded[0] if isinstance(item, str) else coded


def read_reply(said: bytes) -> dict[str, list[float]]:
    """{"rewards": [...], further components} of a server's answer, as a reward function returns them; `score_samples`
    looks at the lists. Raises RewardError."""
    try:
        reply = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"the server's answer is not JSON ({error}): {said[:500].decode(errors='replace')!r}") from error
    if not isinstance(reply, dict) or "rewards" not in reply or "reward" in reply:
        raise RewardError(f'the server must answer {{"rewards": [...]}}, with components beside it or not: {reply!r:.500}')
    return {"reward": reply.pop("rewards")} | reply


def score_samples(reward_fn: Callable, prompts: list, responses: list[str], references: list, labels: list, images: list, *,
                  spec: str, timeout_s: float = 60.0, workers: int = 1, batch: int = 0) -> dict[str, list[float]]:
    """Score n samples by `workers` calls side by side, of at most `batch` samples each (0: any number): n rewards under
    "reward", and n values of each component. RewardError if the function raises, all of it is later than `timeout_s`, or a
    call returns other than finite numbers.
    """
    given, n, results, columns = (prompts, responses, references, labels, images), len(responses), {}, {}
    size = min(-(-n // workers), batch or n) or 1

    def work(first: int) -> None:
        for start in range(first, n, size * workers):
            try:
                results[start] = reward_fn(*(column[start:start + size] for column in given))
            except BaseException as error:  # raised again below; a SystemExit would vanish in its thread
                results[start] = error
                return

    def failure(i: int, problem: str) -> RewardError:
        named = zip(("prompt", "response", "reference", "label"), given)
        sample = "".join(f"\n  {name}: {str(column[i])[-500:]!r}" for name, column in named)
        return RewardError(f"--reward {spec}: {problem}; sample {i} of {n} (the last 500 characters of each):{sample}")

    # Daemon threads, not a ThreadPoolExecutor, which would wait at exit for a reward function that hangs.
    threads = [threading.Thread(target=work, args=(first,), daemon=True) for first in range(0, n, size)[:workers]]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = TimeoutError(f"took longer than {timeout_s:g} s (--reward_timeout)")
    for start in range(0, n, size):
        count, result = min(size, n - start), results.get(start, late)
        if isinstance(result, BaseException):
            raise failure(start, f"{count} samples raised {told(result)}") from result
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
    return columns if "reward" in columns else {"reward": [sum(values) for values in zip(*columns.values())]} | columns


def score_rewards(run: Run, processor: Processor, reward: Reward, prompts: StepPrompts, samples: Samples) -> Samples:
    """Score all responses, the text after the prompt only; returns the samples with scores, components (NaN where a
    source does not score a sample) and judgements, alike on every rank.

    Raises:
        UserError: on every rank, when a source fails on any: the sample is in the message.
    """
    everything = any(source.function is None for source in reward.sources)            # models are asked by all ranks together
    read = [i for i, g in enumerate(samples.group.tolist()) if everything or prompts.owners[g] == run.rank]
    tokens, texts = samples.split(samples.tokens), [""] * len(samples)
    for i, text in zip(read, processor.tokenizer.batch_decode([tokens[i].tolist() for i in read], skip_special_tokens=True)):
        texts[i] = text
    weights = [reward.weights(prompts.prompts[g].label) for g in samples.group.tolist()]
    unscored = torch.full((len(samples),), math.nan, dtype=torch.float64)                                               # (S,)
    rewards = {source.name: unscored.clone() for source in reward.sources}
    curves = rewards if len(rewards) > 1 else {}
    scores, components, judgements = torch.zeros_like(unscored), {}, [""] * len(samples)
    for source in reward.sources:
        used = torch.tensor([i for i, chosen in enumerate(weights) if source.name in chosen], dtype=torch.int64)        # (n,)
        if not len(used):
            continue
        columns, notes = score_source(run, source, prompts, samples, texts, used.tolist())
        rewards[source.name][used] = earned = columns.pop("reward")
        scores[used] += torch.tensor([weights[i][source.name] for i in used], dtype=torch.float64) * earned
        for name, values in columns.items():     # where an earlier source of the sample has it, with the source's name before
            taken = ~components.get(name, unscored)[used].isnan() | (name in curves)
            for key, part in ((name, ~taken), (f"{source.name}_{name}", taken)):
                components.setdefault(key, unscored.clone())[used[part]] = values[part]
        for i, note in zip(used.tolist(), notes):
            judgements[i] += f"{source.name}: {note}\n"
    scores = (combine_rewards(run, reward, rewards) if reward.combiner else scores).float()
    if bad := (~scores.isfinite()).nonzero()[:, 0].tolist():
        said = {name: float(values[bad[0]]) for name, values in rewards.items()}
        raise UserError(f"rewards must be finite float32 numbers: {len(bad)} of {len(samples)} are not; for the first of them "
                        f"the sources say {said}")
    components = {name: values.float() for name, values in (components | curves).items() if not values.isnan().all()}
    return replace(samples, scores=scores, components=components, judgements=[text.strip() for text in judgements])


def score_source(run: Run, source: Source, prompts: StepPrompts, samples: Samples, texts: list[str],
                 used: list[int]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Columns (n,) float64 of the n samples ``used``: "reward" and components; and what a judge said about each."""
    with at_hand(run, frozen=source.model):
        if source.spec.startswith("grm:"):
            return ask_judge(run, source, prompts, samples, texts, used)
        if source.spec.startswith("rm:"):
            return {"reward": ask_reward_model(run, source, prompts, samples, texts, used)}, []
    groups = samples.group[used].tolist()
    own = [k for k, group in enumerate(groups) if prompts.owners[group] == run.rank]
    rows = [prompts.prompts[groups[k]] for k in own]
    args, columns = run.args.reward, {}
    with failing_together():
        if own:                                                                              # a rank may have no samples
            columns = score_samples(
                source.function, [p.text for p in rows], [texts[used[k]] for k in own], [p.reference for p in rows],
                [p.label for p in rows], [list(p.images) for p in rows], spec=source.spec, timeout_s=args.reward_timeout,
                workers=args.reward_workers, batch=source.batch)
    names = [part for part in all_gather_json(sorted(columns)) if part]
    if any(part != names[0] for part in names):
        raise UserError(f"--reward {source.spec}: components differ between calls: {names}")
    table = torch.zeros(len(names[0]), len(used), dtype=torch.float64)
    if own:
        table[:, own] = torch.tensor([columns[name] for name in names[0]], dtype=torch.float64)
    dist.all_reduce(table)
    return dict(zip(names[0], table)), []


def combine_rewards(run: Run, reward: Reward, rewards: dict[str, torch.Tensor]) -> torch.Tensor:
    """(S,) what --reward_combiner makes of the sources' rewards; rank 0 computes. Raises UserError on every rank."""
    values, count = None, len(next(iter(rewards.values())))
    with failing_together(f"--reward_combiner {run.args.reward.reward_combiner}: "):
        if run.rank == 0:
            try:
                values = list(map(float, reward.combiner({name: column.tolist() for name, column in rewards.items()})))
            except Exception as error:                              # a program of the user's, which raises what it likes
                raise ValueError(told(error)) from error
            if len(values) != count:
                raise ValueError(f"{len(values)} values for {count} samples")
    return torch.tensor(all_gather_json(values)[0], dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------------------
# Rewards by models: a generative judge (train_grm_vl.py), or a scalar reward model; frozen, sharded as the reference
# ---------------------------------------------------------------------------------------------------------------------


def build_reward_models(run: Run, reward: Reward, actor_processor: Processor, rows: list[Prompt] = []) -> None:
    """Load the grm: and rm: sources, which shall score ``rows``. A judge whose vision tower and image processor are the
    actor's has no tower of its own.

    Raises:
        UserError: on every rank alike: no such folder, no judge.json, no value head, a question it was not trained on, rows
            with pictures or videos that its family cannot see.
    """
    args = run.args
    for source in (source for source in reward.sources if source.function is None):
        kind, _, name = source.spec.partition(":")
        with failing_together(f"--reward {source.spec}: "):
            folder, own = (resolve_folder(path, weights=not args.run.dry_run) for path in (name, args.model.model))
            processor = source.processor = Processor(
                str(folder), video_frames=args.data.video_frames, video_fps=args.data.video_fps,
                video_max_pixels=args.data.video_max_pixels)
            for row in (row for row in rows if row.images and source.name in reward.weights(row.label)):
                with naming(source, row):                                        # not only when the first step asks
                    check_media(processor, row.images)
            settings = [(p.config.model_type, [part and part.to_dict() for part in (p.image_processor, p.frame_processor)])
                        for p in (processor, actor_processor)]
            source.shares_tower = settings[0] == settings[1] and not args.model.train_vision \
                and not differing_tower(own, folder)
            model = skeleton(processor.config, vision=not source.shares_tower, head=kind == "grm",
                             longest=args.data.max_prompt_tokens + args.rollout.max_new_tokens)
            freeze(vision_parameters(model), run.dtype)
            if kind == "grm":
                source.question = judge_question(processor.files["judge"], args.reward.grm_question)
                learned = processor.files["judge"]["kinds"][source.question]
                if args.reward.grm_mode != "critique" and learned.get("critiques") == learned["examples"] and not run.rank:
                    print(f"warning: --reward {source.spec}: a critique stood before each of the {learned['examples']} "
                          "verdicts the judge learned, so what it says without one may mean little; --grm_mode critique lets "
                          "it write", flush=True)
                plain = replace(args.rollout, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0, stop_tokens="",
                                stop_strings="", max_new_tokens=args.reward.grm_max_new_tokens)
                source.run = replace(run, args=replace(args, rollout=plain))
                source.model = Policy(model, processor, source.run.args).requires_grad_(False)
                if args.reward.grm_mode != "critique":
                    source.model.banned.zero_()                                  # as the judge was trained and evaluated
            else:
                source.model = Critic(model).requires_grad_(False)
            spelled = load_sharded(run, source.model, folder)
            if kind == "rm" and not spelled.keys() & VALUE_HEADS:
                raise ValueError(f"no value head: none of the weights {', '.join(VALUE_HEADS)}")
            put_away(run, frozen=source.model)


def judge_question(judge: dict, wanted: str) -> str:
    """The kind of question to ask: the wanted one, or the pointwise one the judge has seen most. Raises ValueError."""
    seen = {kind: entry.get("examples", 0) for kind, entry in judge.get("kinds", {}).items()}
    kind = wanted if wanted != "auto" else max(("correct", "score"), key=lambda kind: seen.get(kind, 0))
    if not seen.get(kind):
        raise ValueError(f"the judge was not trained on questions of the kind {kind} (--grm_question); judge.json counts "
                         f"{seen or 'nothing: there is none'}")
    return kind


@contextmanager
def naming(source: Source, row: Prompt):
    """What a model cannot be asked about a row, every rank finds out alike: a UserError that names both."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{row.source}, asked of {source.name}: {error}") from error


def lend_pictures(run: Run, source: Source, prompts: StepPrompts, groups: list[int], asked: list[Prompt]) -> StepPrompts:
    """Questions ``asked`` about the pictures of the step's prompts ``groups``; a picture's features are computed once."""
    owners, features = dict(enumerate(prompts.owners)), prompts.features
    if not source.shares_tower:
        any_of = dict(zip(groups, asked))                                        # all questions of a group have its pictures
        with PromptLoader(source.processor, run.args.data.data_threads, "error") as loader:
            pictures = loader.collect(*loader.submit(list(any_of.values()), list(any_of)))
        compute_features(run, source.model, pictures)
        owners = dict(zip(any_of, pictures.owners))
        features = {group: pictures.features[k] for k, group in enumerate(any_of) if k in pictures.features}
    return StepPrompts(asked, list(range(len(asked))), [owners[group] for group in groups], {}, {},
                       {k: features[group] for k, group in enumerate(groups) if group in features}, [])


def without_markup(text: str, processor: Processor) -> str:
    """Text of a policy or its prompt, for a question: nothing in it may pass for a special token or an image place."""
    for token in (*processor.reserved_tokens, *PLACES):
        text = text.replace(token, " ")
    return text


def ask_judge(run: Run, source: Source, prompts: StepPrompts, samples: Samples, texts: list[str],
              used: list[int]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Let a generative judge look at the responses ``used``, each distinct one once; beside the reference answer in both
    orders. Its verdicts are worth: no 0, yes 1; a score itself; a lost pair 0, a tie 1/2, a won pair 1. A critique
    without a verdict is worth the lowest of them."""
    processor, kind, mode = source.processor, source.question, run.args.reward.grm_mode
    settings = processor.files["judge"]
    words, template = (settings["kinds"][kind][name] for name in ("verdicts", "template"))
    worth = {"correct": [1.0, 0.0], "answers": [1.0, 0.0, 0.5]}.get(kind) or [float(word) for word in words]
    orders = {1: torch.tensor(worth, dtype=torch.float64)}
    orders |= {-1: 1 - orders[1]} if kind == "answers" else {}                       # the response stands in place B
    asked: dict[tuple[int, str, int], int] = {}                                      # (group, response, order) -> question
    places = torch.tensor([[asked.setdefault((int(samples.group[i]), texts[i], order), len(asked)) for order in orders]
                           for i in used])                                                              # (n, orders)
    questions, grids = [], {}
    for group, text, order in asked:
        row = prompts.prompts[group]
        plain = functools.partial(without_markup, processor=processor)
        question, said, answer = question_text(row.messages, len(row.images), plain), plain(text), plain(row.reference or "")
        first, second = (said, answer)[::order]
        ask = {"prompt": question, "images": list(row.images), "question": fill(
            template, prompt=question, response=said, response_a=first, response_b=second)}
        with naming(source, row):
            questions.append(judge_prompt(processor, ask, row.index, row.source, folder="/", grids=grids.get(group)))
        grids[group] = questions[-1].grids                                           # headers are read once per prompt
    groups, values = [group for group, *_ in asked], torch.stack([orders[order] for *_, order in asked])   # (questions, words)
    step = lend_pictures(run, source, prompts, groups, questions)
    if mode == "critique":
        written = rollout(source.run, processor, source.model, step, 1, JUDGE, greedy=True)
        logprobs = written.logprobs
        notes = processor.tokenizer.batch_decode([t.tolist() for t in written.split(written.tokens)], skip_special_tokens=True)
        verdicts = [parse_verdict(note, settings["which_answer"], words) for note in notes]
        chances = torch.tensor([[float(word == verdict) for word in words] for verdict in verdicts], dtype=torch.float64)
    else:
        frame = answer_frame(processor)
        targets = [encode_target(processor, frame, fill(settings["answer"], verdict=word)) for word in words]
        candidates = as_samples([targets] * len(questions))
        logprobs = score_tokens(source.run, source.model, step, candidates)
        totals = torch.stack([part.double().sum() for part in candidates.split(logprobs)])
        chances = totals.view(-1, len(words)).softmax(dim=1)                                          # (questions, words)
        notes = ["  ".join(f"{word} {chance:.3f}" for word, chance in zip(words, row)) for row in chances.tolist()]
        if mode == "verdict":
            chances = torch.nn.functional.one_hot(chances.argmax(dim=1), len(words)).double()
    if not logprobs.isfinite().all():                   # the likeliest of NaN would be the first verdict
        raise UserError(f"--reward {source.spec}: log-probs of what the judge says are not finite; are its weights?")
    points = (chances * values).sum(dim=1) + (1 - chances.sum(dim=1)) * values.min(dim=1).values     # (questions,)
    columns = {"reward": points[places].mean(dim=1)}
    if mode == "critique":
        columns["parsed"] = chances.sum(dim=1)[places].mean(dim=1)
    return columns, [" | ".join(notes[q] for q in own) for own in places.tolist()]


def ask_reward_model(run: Run, source: Source, prompts: StepPrompts, samples: Samples, texts: list[str],
                     used: list[int]) -> torch.Tensor:
    """(n,) what the head of a scalar reward model says at the end token of each response ``used``, each distinct one asked
    once: rounding, which differs by row, would give equal responses a spread."""
    processor, answers = source.processor, {}                                                  # group -> its responses
    frame = answer_frame(processor)
    keys = [(int(samples.group[i]), texts[i]) for i in used]                                   # in the order of groups
    places = {key: k for k, key in enumerate(dict.fromkeys(keys))}
    for group, text in places:
        answer = encode_target(processor, frame, without_markup(text, processor))
        answer = torch.cat([answer, answer[-1:]])              # values stand at the rows that predict a token: one more
        answers.setdefault(group, []).append(answer)
    rows = [prompts.prompts[group] for group in answers]
    asked = []
    for row in rows:
        with naming(source, row):
            asked.append(make_prompt(processor, row.index, row.source, row.messages, list(row.images), folder="/"))
    candidates = as_samples(list(answers.values()))
    values = score_tokens(run, source.model, lend_pictures(run, source, prompts, list(answers), asked), candidates)
    return values[candidates.offsets[1:] - 1].double()[[places[key] for key in keys]]


# ---------------------------------------------------------------------------------------------------------------------
# Scoring and advantages
# ---------------------------------------------------------------------------------------------------------------------


def packed_rows(run: Run, model: nn.Module, prompts: StepPrompts, samples: Samples, groups=None):
    """This rank's packed rows of the given prompt groups (all by default), on the device, one after the other.

    All ranks get equally many rows; surplus ones are empty and weigh nothing.
    """
    config, limit = model.config, run.args.update.max_tokens_per_pack
    lengths = prompts.lengths
    hidden_size = config.get_text_config().hidden_size
    wasted = 1 / (6 * hidden_size) if run.backend == "sdpa" else 0.0          # of a masked score, in tokens; see make_packs
    blocks = make_blocks(samples, lengths, limit, groups, run.args.update.share_prompts, wasted)
    packs = make_packs(samples, lengths, blocks, run.world, limit, hidden_size)
    needed = [{group for pack in part for group, _ in pack} for part in packs]
    used = set().union(*needed)
    own, shapes = row_pictures(model, prompts, used, run.dtype)
    features = exchange_features(own, prompts.owners, needed, shapes, run.dtype)
    for pack in progress(packs[run.rank], "packed rows"):
        members = {group for group, _ in pack}
        row = build_row(samples, pack, {g: prompts.prompts[g].input_ids for g in members},
                        {g: positions_of(model, prompts, g) for g in members}, features, visual_token_ids(config))
        if model.sees_pixels:
            row = with_grids(model, row, [prompts.prompts[g] for g, _ in pack])
        segments = attention_segments(config, row.segments, row.image_rows)
        yield row.to(run.device), PackedAttention(segments, run.backend, run.device)


@torch.no_grad()
def score_tokens(run: Run, module: nn.Module, prompts: StepPrompts, samples: Samples, ask: Callable | None = None,
                 count: int = 1) -> torch.Tensor:
    """(N,) log-probs or values of all samples, on every rank; or what ``ask(row, attention)`` answers: ``count`` tensors (T,)
    of a row, which become (count, N)."""
    module.eval()
    done, result = [], torch.zeros(count, len(samples.tokens))
    for row, attention in packed_rows(run, module.model, prompts, samples):
        out = (ask or module)(row, attention)
        done.append((row.flat, out[:count] if isinstance(out, tuple) else (out,)))
    for flat, out in done:                                # not above: .cpu() waits, and then the device for the next row
        result[:, flat] = torch.stack(out).cpu()
    rest_after_scoring(module)
    dist.all_reduce(result)
    return result if count > 1 else result[0]


def score_logprobs_and_values(run: Run, actor: Policy, reference: Policy | None, critic: Critic | None,
                              prompts: StepPrompts, samples: Samples) -> None:
    """Fill old_logprobs, ref_logprobs, kl, values and entropy, whatever the flags need."""
    algorithm = run.args.algorithm
    samples.old_logprobs = samples.logprobs
    if algorithm.recompute_old_logprobs or algorithm.high_entropy_ratio < 1:
        logprobs, samples.entropy = score_tokens(run, actor, prompts, samples, functools.partial(actor, entropy=True), count=2)
        samples.old_logprobs = logprobs if algorithm.recompute_old_logprobs else samples.logprobs
    if reference is not None and algorithm.kl_estimator == "full":
        with at_hand(run, frozen=reference):
            samples.kl = score_tokens(run, actor, prompts, samples, lambda row, attention: actor(
                row, attention, reference=reference_head(reference, row, attention))[2])
            rest_after_scoring(reference)
    elif reference is not None:
        with at_hand(run, frozen=reference), without_adapters(reference.model):
            samples.ref_logprobs = score_tokens(run, reference, prompts, samples)
        samples.kl = losses.kl_penalty(algorithm.kl_estimator, samples.old_logprobs, samples.ref_logprobs)
    if critic is not None:
        samples.values = score_tokens(run, critic, prompts, samples)


@torch.no_grad()
def reference_head(reference: Policy, row: Row, attention: PackedAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """What the exact KL needs of the reference: hidden states (T, H), and its head, which that forward leaves gathered."""
    with without_adapters(reference.model):
        hidden = reference(row, attention, hidden_only=True)
    clear_forward_order(reference)
    return hidden, reference.model.lm_head.weight


def rest_after_scoring(module: nn.Module) -> None:
    """Forwards without a backward leave a record, and the root's weights gathered: drop both."""
    clear_forward_order(module)
    module.reshard()


def shape_scores(args: Args, scores: torch.Tensor, lengths: torch.Tensor, moments: losses.RunningMoments,
                 update: bool = True) -> torch.Tensor:
    """(S,) scores as the estimator sees them: normalised, clipped, less the length penalty."""
    algorithm = args.algorithm
    if algorithm.reward_norm:
        scores = losses.normalize_scores(scores, moments, update=update)
    if algorithm.reward_clip:
        scores = scores.clamp(-algorithm.reward_clip, algorithm.reward_clip)
    if algorithm.overlong_buffer:
        scores = scores + losses.overlong_penalty(lengths, args.rollout.max_new_tokens, algorithm.overlong_buffer,
                                                  algorithm.overlong_factor)
    return scores


def compute_advantages(run: Run, samples: Samples, kl_controller: losses.KLController,
                       moments: losses.RunningMoments) -> dict[str, float]:
    """Fill advantages and returns; the whole step at once, alike on every rank. Returns the rollout metrics."""
    algorithm, lengths = run.args.algorithm, samples.lengths
    scores = shape_scores(run.args, samples.scores, lengths, moments)                                 # (S,)
    kl = samples.kl if samples.kl is not None else torch.zeros(len(samples.tokens))                   # (N,)
    in_reward = kl_controller.value if algorithm.kl_in == "reward" else 0.0
    if algorithm.advantage in ("gae", "reinforce", "reinforce++", "remax"):
        rewards = losses.token_rewards(scores, kl, lengths, in_reward)
        if algorithm.advantage == "gae":
            advantages, returns = losses.gae(rewards, samples.values, lengths, algorithm.gamma, algorithm.gae_lambda)
        else:
            advantages = returns = losses.rewards_to_go(rewards, lengths, algorithm.gamma)
        if algorithm.advantage == "remax":                                       # the baseline is one number, not discounted
            greedy = shape_scores(run.args, samples.greedy_scores, samples.greedy_lengths, moments, update=False)     # (S,)
            advantages = returns - greedy.repeat_interleave(lengths)
    else:
        scores = scores - in_reward * torch.stack([part.sum() for part in samples.split(kl)])
        advantages = losses.group_scores(scores, samples.group, algorithm.advantage, lengths).repeat_interleave(lengths)
        returns = advantages
    if run.args.whiten:
        advantages = losses.whiten(advantages)
    if algorithm.advantage_clip:
        advantages = advantages.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
    samples.advantages, samples.returns = advantages, returns
    return rollout_metrics(samples)


def rollout_metrics(samples: Samples) -> dict[str, float]:
    lengths, scores, advantages = samples.lengths.float(), samples.scores, samples.advantages
    metrics = {"rollout/reward": scores.mean(), "rollout/reward_std": scores.std(correction=0),
               "rollout/response_length": lengths.mean(), "rollout/response_length_max": lengths.max(),
               "rollout/truncated": samples.truncated.float().mean(), "rollout/return": samples.returns.mean(),
               "rollout/samples": len(samples), "train/advantages_mean": advantages.mean(),
               "train/advantages_std": advantages.std(correction=0), "train/advantages_min": advantages.min(),
               "train/advantages_max": advantages.max()}
    metrics |= {f"rollout/{name}_reward": values.nanmean() for name, values in samples.components.items()
                if not values.isnan().all()}
    if samples.kl is not None:
        metrics["train/kl"] = samples.kl.mean()
    if samples.values is not None:
        metrics["train/values"] = samples.values.mean()
        metrics["train/explained_variance"] = losses.explained_variance(samples.values, samples.returns)
    return {name: float(value) for name, value in metrics.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Updates
# ---------------------------------------------------------------------------------------------------------------------


def minibatch_weights(run: Run, samples: Samples, groups, keep: torch.Tensor | None = None) -> torch.Tensor:
    """(N,) weight of every token in the minibatch of prompt ``groups``, by its global counts; 0 elsewhere, and where
    ``keep`` (N,) is false."""
    lengths = samples.lengths if keep is None else torch.stack([part.sum() for part in samples.split(keep)])
    lengths = lengths * torch.isin(samples.group, torch.as_tensor(groups))
    weights = losses.token_weights(lengths, run.args.algorithm.loss_aggregation, int(lengths.sum()), int((lengths > 0).sum()),
                                   run.args.rollout.max_new_tokens)                                                # (S,)
    weights = weights.float().repeat_interleave(samples.lengths)
    return weights if keep is None else weights * keep


def apply_gradients(run: Run, module: nn.Module, optimizer: torch.optim.Optimizer, lr: float) -> tuple[float, bool]:
    """Clip by the model's global norm and step. A non-finite norm, which all ranks see alike, skips the step."""
    bound = run.args.update.max_grad_norm or float("inf")
    norm = nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], bound, foreach=True)
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    applied = math.isfinite(norm)
    if applied:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, applied


@torch.no_grad()
def expert_load(run: Run, module: nn.Module, prompts: StepPrompts, samples: Samples, groups) -> torch.Tensor | None:
    """(E,) how often each expert is chosen in a minibatch, over all ranks: the balance of a row depends on all others'."""
    if not run.args.update.aux_loss_coef:
        return None
    text = module.model.config.get_text_config()
    load = torch.zeros(text.num_experts, device=run.device)
    for row, attention in packed_rows(run, module.model, prompts, samples, groups):
        with router_logits(module.model) as logits:
            module(row, attention)
        load += losses.expert_load(logits, row.copies.to(run.device), text.num_experts_per_tok)
    clear_forward_order(module)
    dist.all_reduce(load)
    return load


def balance_loss(run: Run, module: nn.Module, row: Row, logits: list[torch.Tensor], load: torch.Tensor | None):
    """This row's share of the load-balancing loss of a minibatch, weighted; 0.0 without."""
    if load is None:
        return 0.0
    top_k = module.model.config.get_text_config().num_experts_per_tok
    return run.args.update.aux_loss_coef * losses.balance_loss(logits, row.copies.to(run.device), load, top_k)


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
            total, load = 0.0, expert_load(run, critic, prompts, samples, groups)
            for row, attention in packed_rows(run, critic.model, prompts, samples, groups):
                with router_logits(critic.model) as logits:
                    values = critic(row, attention)                                                            # (T,)
                old, returns, weight = (x[row.flat].to(run.device, non_blocking=True)
                                        for x in (samples.values, samples.returns, weights))
                loss = (weight * losses.value_loss(values, old, returns, args.algorithm.value_clip)).sum()
                balance = balance_loss(run, critic, row, logits, load)
                ((loss + balance) * run.world).backward()                         # FSDP averages gradients over ranks
                total = total + loss.detach()
            norm, applied = apply_gradients(run, critic, optimizer, lr)
            sums.add("train/critic_skipped", float(not applied), 1)
            if applied:
                sums.add("train/critic_grad_norm", norm, 1)
                sums.add("train/critic_loss", total, 1 / run.world)      # the ranks' shares of a minibatch add up to its loss
    return sums.reduce() | {"train/critic_lr": lr}


def update_actor(run: Run, actor: Policy, optimizer: torch.optim.Optimizer, prompts: StepPrompts, samples: Samples, step: int,
                 kl_coef: float, reference: Policy | None = None, text: TextRows | None = None) -> dict[str, float]:
    """Policy-gradient updates for all epochs and minibatches of a step, or until --target_kl is exceeded."""
    args, sums = run.args, MetricSums()
    lr = args.update.actor_lr * lr_factor(step, args.update, args.update.freezing_actor_steps)
    actor.train()
    updates, keep, text_draws = 0, None, draws_of_text(args, text, step)
    if args.algorithm.high_entropy_ratio < 1:
        keep = losses.high_entropy_mask(samples.entropy, samples.lengths, args.algorithm.high_entropy_ratio)       # (N,)
    for epoch in range(args.update.epochs):
        for groups in minibatches(len(prompts.prompts), args.update.minibatches, (args.run.seed, step, epoch)):
            weights = minibatch_weights(run, samples, groups)
            if not weights.any():
                continue
            rows, kept_weights = [], None if keep is None else minibatch_weights(run, samples, groups, keep)
            pending = text and text.loader.submit(*next(text_draws))               # pictures decode meanwhile
            load = expert_load(run, actor, prompts, samples, groups)
            for row, attention in packed_rows(run, actor.model, prompts, samples, groups):
                exact = reference_head(reference, row, attention) if reference is not None else None
                with router_logits(actor.model) as logits:
                    loss, stats = actor_loss(run, actor, row, attention, samples, weights, kl_coef, exact, keep, kept_weights)
                balance = balance_loss(run, actor, row, logits, load)
                ((loss + balance) * run.world).backward()                         # FSDP averages gradients over ranks
                stats |= {"aux_loss": torch.as_tensor(balance).detach()} if load is not None else {}
                rows.append(stats)
            if reference is not None and args.algorithm.kl_estimator == "full":
                rest_after_scoring(reference)
            if args.update.target_kl and exceeds(rows, args.update.target_kl):
                optimizer.zero_grad(set_to_none=True)
                return sums.reduce() | {"train/actor_lr": lr, "train/actor_updates": updates}
            text_stats = text and backward_text(run, actor, text, text.loader.collect(*pending))
            norm, applied = apply_gradients(run, actor, optimizer, lr)
            sums.add("train/actor_skipped", float(not applied), 1)
            if applied:                                         # the sums of a skipped minibatch would be NaN
                update_average(args.update, optimizer)
                sums.add("train/actor_grad_norm", norm, 1)
                add_actor_stats(sums, rows, 1 / run.world, first=updates == 0)
                for name, value in (text_stats or {}).items():
                    sums.add(f"train/{name}", value, 1 / run.world)
            updates += applied
    return sums.reduce() | {"train/actor_lr": lr, "train/actor_updates": updates}


def draws_of_text(args: Args, text: TextRows, step: int):
    """For each update of a step the rows of --ptx_data, and their numbers: a function of (seed, updates so far), so that a
    resumed run goes on in it."""
    updates, size = args.update.epochs * args.update.minibatches, args.update.ptx_batch
    first = (step - 1 - args.update.freezing_actor_steps) * updates
    for update in range(first, first + updates):
        picks = data_order(range(update * size, (update + 1) * size), len(text.rows), args.run.seed)
        yield [text.rows[k][0] for k in picks], picks


def backward_text(run: Run, actor: Policy, text: TextRows, prompts: StepPrompts) -> dict[str, torch.Tensor | float]:
    """Add the gradient of --ptx_coef times the next-token loss of drawn rows: PPO-ptx (Ouyang et al. 2022, equation 2), the
    mean over the label tokens of all ranks. Returns this rank's share of that loss and of the number of dropped rows."""
    args = run.args.update
    samples = as_samples([[] if g in prompts.dropped else [text.rows[k][1]] for g, k in enumerate(prompts.draws)])
    banned, count = actor.banned.cpu(), len(samples.tokens)
    if args.ptx_labels == "text":                                               # the first token of a row is no label
        count = sum(int((~banned[prompts.prompts[group].input_ids[1:]]).sum()) for group in samples.group.tolist()) \
            + int((~banned[samples.tokens]).sum())
    if not actor.model.sees_pixels:
        compute_features(run, actor, prompts)
    total, load = torch.zeros((), device=run.device), expert_load(run, actor, prompts, samples, None)
    for row, attention in packed_rows(run, actor.model, prompts, samples):
        row = label_text(row, actor.banned) if args.ptx_labels == "text" else row
        with router_logits(actor.model) as logits:
            logp, *_ = actor(row, attention, plain=True)                                                        # (T,)
        loss = -logp.sum() / count
        balance = balance_loss(run, actor, row, logits, load)
        (args.ptx_coef * (loss + balance) * run.world).backward()               # FSDP averages gradients over ranks
        total += loss.detach()
    return {"ptx_loss": total, "ptx_dropped": len(prompts.dropped) / run.world}


def exceeds(rows: list[dict[str, torch.Tensor]], target_kl: float) -> bool:
    """Whether KL(old, new) per token of a minibatch, over all ranks, is above the target."""
    moved = torch.tensor([sum(float(stats["approx_kl"]) for stats in rows), sum(stats["kept"] for stats in rows)],
                         dtype=torch.float64)
    dist.all_reduce(moved)
    return bool(moved[0] > target_kl * moved[1])


def actor_loss(run: Run, actor: Policy, row: Row, attention: PackedAttention, samples: Samples, weights: torch.Tensor,
               kl_coef: float, exact: tuple | None = None, keep: torch.Tensor | None = None,
               kept_weights: torch.Tensor | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This row's share of the loss of a minibatch, and sums over its tokens for the metrics.

    Args:
        weights: (N,) weight of every token.
        exact: what `reference_head` gives for this row, for the exact KL in the loss.
        keep, kept_weights: (N,) the tokens of high entropy, and their weights in the policy term, which is theirs alone.
    """
    algorithm = run.args.algorithm
    pick = lambda values: values[row.flat].to(run.device, non_blocking=True)  # noqa: E731
    old, sampled = pick(samples.old_logprobs), pick(samples.logprobs)                                           # (T,)
    advantages, weight = pick(samples.advantages), pick(weights)                                                # (T,)
    in_loss = algorithm.kl_in == "loss" and samples.kl is not None
    logp, entropy, kl = actor(row, attention, entropy=True, reference=exact)                                    # (T,)
    correction = (old - sampled).exp().clamp(max=algorithm.importance_cap) if algorithm.recompute_old_logprobs else None
    terms, stats = losses.policy_loss(algorithm.policy_loss, logp, old, advantages, row.sample, len(samples), *run.args.clip,
                                      algorithm.dual_clip, correction, None if keep is None else pick(keep))
    loss = ((weight if keep is None else pick(kept_weights)) * terms).sum()
    stats |= {"policy_loss": loss.detach(), "entropy": entropy.detach().sum(), "tokens": len(row.targets),
              "kept": len(row.targets) if keep is None else int(keep[row.flat].sum()),
              "gap": (logp.detach() - sampled).abs().sum()}
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * (weight * entropy).sum()
    if in_loss:
        kl = losses.kl_penalty(algorithm.kl_estimator, logp, pick(samples.ref_logprobs)) if kl is None else kl
        kl_loss = (weight * kl).sum()
        loss = loss + kl_coef * kl_loss
        stats["kl_loss"] = kl_loss.detach()
    return loss, stats


def add_actor_stats(sums: MetricSums, rows: list[dict[str, torch.Tensor]], share: float, first: bool) -> None:
    """Add a minibatch: sums over the tokens of its rows, and its losses, which this rank's rows are a ``share`` of."""
    tokens, kept = (sum(stats[name] for stats in rows) for name in ("tokens", "kept"))
    for name in ("approx_kl", "clipped_low", "clipped_high", "clipped_dual", "ratio"):     # of the tokens in the policy term
        sums.add(f"train/{name}", sum(stats[name] for stats in rows), kept)
    sums.add("train/entropy", sum(stats["entropy"] for stats in rows), tokens)
    for name in rows[0].keys() & {"policy_loss", "kl_loss", "aux_loss"}:
        sums.add(f"train/{name}", sum(stats[name] for stats in rows), share)
    for stats in rows:
        sums.max("train/ratio_max", stats["ratio_max"])
    # Before the first update the trained policy is the one that sampled: any gap is a bug, or low precision.
    if first:
        sums.add("train/sampler_gap", sum(stats["gap"] for stats in rows), tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, records, export
# ---------------------------------------------------------------------------------------------------------------------


def evaluate(run: Run, processor: Processor, actor: Policy, reward: Reward, rows: list[Prompt], log: RunLogger,
             step: int) -> dict[str, float]:
    """Answer every held-out prompt once over all ranks; write the answers; return the eval/ metrics."""
    count, size = run.args.eval.eval_samples, run.args.rollout.prompts_per_step
    sums, records = MetricSums(), []
    started = time.perf_counter()
    chunks = [rows[start:start + size] for start in range(0, len(rows), size)] + [[]]
    choose = lambda n: (chunks[n], [row.index for row in chunks[n]])  # noqa: E731
    with PromptLoader(processor, run.args.data.data_threads, run.args.data.on_bad_row, choose) as loader:
        for n in range(len(chunks) - 1):
            prompts = loader.take(n, least=0)
            samples = rollout(run, processor, actor, prompts, count, EVAL, greedy=count == 1)
            samples = score_rewards(run, processor, reward, prompts, samples)
            records += sample_records(processor, prompts, samples)
    if not records:
        raise UserError("evaluation: no held-out prompt is left, no picture decodes")
    for record in records:                                     # every rank has all records: these sums need no reduction
        for name in ("reward", "response_length", "truncated"):
            sums.add(f"eval/{name}_mean", float(record[name]), 1)
        for name, value in record["components"].items():
            sums.add(f"eval/{name}_reward_mean", value, 1)
    metrics = sums.reduce() | {"eval/num_samples": len(records), "eval/dropped_prompts": loader.dropped,
                               "eval/seconds": time.perf_counter() - started, "eval/train_step": step}
    graded = [record for record in records if "accuracy" in record["components"]]
    if count > 1 and graded:
        solved = {record["index"] for record in graded if record["components"]["accuracy"] >= 1}
        metrics[f"eval/pass@{count}"] = len(solved) / len({record["index"] for record in graded})
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
                        "components": {name: float(values[i]) for name, values in samples.components.items()
                                       if not values[i].isnan()}}
                       | ({"judgement": samples.judgements[i]} if any(samples.judgements) else {})
                       | ({"advantage": advantages[i]} if advantages else {}))
    return records


def sample_pictures(records: list[dict]) -> list:
    """Pictures of samples: the images, frames of the videos, what was asked, what was answered, what it earned."""
    return [draw_sample(read_frames(record["images"], 6), record["question"], record["response"],
                        f"reward {record['reward']:.2f}   "
                        + (f"advantage {record['advantage']:+.2f}   " if "advantage" in record else "")
                        + f"reference: {record['reference']}\n{record.get('judgement', '')}".strip())
            for record in records]


def perf_metrics(run: Run, actor: Policy, critic: Critic | None, prompts: StepPrompts, samples: Samples,
                 metrics: dict[str, float]) -> dict[str, float]:
    """Seconds per stage, throughput, memory and, on a known GPU, MFU of the updates that ``metrics`` tells of."""
    seconds, told, args = run.timer.seconds(), metrics, run.args.update
    metrics = {f"perf/{name}_seconds": value for name, value in seconds.items()}
    metrics["perf/step_seconds"] = sum(seconds.values())
    response = len(samples.tokens)
    both = response + sum(length for group, length in enumerate(prompts.lengths) if group not in prompts.dropped)
    update = seconds["update_actor"] + seconds["update_critic"]
    actor_passes = told.get("train/actor_updates", 0) / args.minibatches        # frozen: 0; fewer than epochs by --target_kl
    critic_passes = args.epochs * (critic is not None)
    metrics["perf/rollout_tokens_per_second"] = told["rollout/generated_tokens"] / seconds["rollout"]
    metrics["perf/update_tokens_per_second"] = both * max(actor_passes, critic_passes) / update
    if run.device.type == "cuda":
        metrics["perf/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2 ** 30
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
        text = actor.model.config.get_text_config()
        used = text.num_experts_per_tok / text.num_experts if routers(actor.model) else 1        # of stacked experts, 3-d
        layers = sum(p.numel() * (used if p.ndim == 3 else 1) for p in language_model(actor.model).layers.parameters())
        head = actor.model.lm_head.weight.numel()
        trained = (actor_passes + critic_passes) * layers * both + actor_passes * head * response
        if peak:
            per_weight = 4 if run.args.model.lora_rank else 6             # frozen weights need no gradient of their own
            metrics["perf/update_mfu"] = per_weight * trained / (update * peak * run.world)
    else:
        unit = 1 if sys.platform == "darwin" else 1024                                                       # bytes there, KiB
        metrics["perf/peak_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2 ** 30
    return metrics


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}  # dense bf16, the makers' data sheets


def open_log(run: Run, datasets: list[list[Prompt]], eval_prompts: list[Prompt], first_step: int) -> RunLogger:
    """Write args.json and the first record; print the plan."""
    args, update = run.args, run.args.update
    log = start_log(args.run.out, flags_of(args), update.steps, first_step, args.eval.eval_only)
    per_step, rows = args.rollout.prompts_per_step, sum(map(len, datasets))
    if args.eval.eval_only:
        log.line(f"{len(eval_prompts)} held-out rows; output: {log.out}")
        return log
    log.line(f"{rows} training prompts, {len(eval_prompts)} held out; a step: {per_step} prompts x "
             f"{args.rollout.samples_per_prompt} samples, {update.epochs * update.minibatches} updates; {update.steps} "
             f"steps = {update.steps * per_step / max(1, rows):.1f} passes over the data; output: {args.run.out}")
    updates, samples = update.epochs * update.minibatches, per_step * args.rollout.samples_per_prompt
    rollouts, mode = args.rollout.rollouts_per_step, "several updates per rollout" if updates > 1 else "one update per rollout"
    mode, after = ("several rollouts per update", f" after {rollouts} rollouts") if rollouts > 1 else (mode, "")
    log.line(f"mode: {mode}; {samples // rollouts} samples per rollout, {updates} updates of {samples // update.minibatches} "
             f"each{after}, {rows / args.prompts_per_rollout:.1f} rollouts per pass")
    sets = parse_datasets(args.data.data) if len(datasets) > 1 else []
    total = sum(weight or len(part) for part, (_, weight) in zip(datasets, sets))
    for part, (path, weight) in zip(datasets, sets):
        share = (weight or len(part)) / total
        log.line(f"  {path}: {len(part)} rows, {share:.1%} of the draws, "
                 f"{share * update.steps * per_step / len(part):.1f} passes")
    if args.rollout.top_k or args.rollout.top_p < 1:
        log.line("warning: --top_k/--top_p truncate the sampling distribution; the gradient assumes they do not")
    kl, place = args.algorithm.kl_estimator, args.algorithm.kl_in
    if args.algorithm.kl_coef and place == "loss" and kl == "k1":
        log.line("warning: the expected gradient of k1 as a loss is zero in a step's first update, and later leads away from "
                 "its samples; use k2, k3+ or full")
    if args.algorithm.kl_coef and place == "reward" and kl not in ("k1", "k1+"):
        log.line(f"warning: {kl} as a reward does not have the gradient of the KL and hardly holds the policy; use k1, or "
                 "--kl_in loss")
    if args.algorithm.policy_loss in ("gspo", "gmpo") and args.algorithm.loss_aggregation != "seq-mean-token-mean":
        log.line(f"warning: {args.algorithm.policy_loss} is a loss per sequence; --loss_aggregation seq-mean-token-mean "
                 "makes it the paper's")
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
    log.update(step, short)
    largest = max(metrics["train/advantages_max"], -metrics["train/advantages_min"])
    if largest > 10:
        log.line(f"warning: step {step} has an advantage of absolute value {largest:.1f}; --advantage_clip bounds them")
    if every and (step % every == 0 or step == run.args.update.steps):
        records = sample_records(processor, prompts, samples) if run.rank == 0 else []
        for record in records[:min(1, run.args.run.log_samples)]:
            log.line(f"  {record['question'][-200:]!r} -> {record['response'][:500]!r}  reward {record['reward']:.3f}")
        stride = run.args.rollout.samples_per_prompt                                        # pictures of different prompts
        log.samples(step, records, sample_pictures(records[::stride][:run.args.run.log_samples]))


@contextmanager
def profiled(run: Run, step: int):
    """Trace the step --profile names with torch.profiler, one Chrome trace per rank."""
    if step != run.args.run.profile:
        yield
        return
    folder = run.args.run.out / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as trace:
        yield
    trace.export_chrome_trace(str(folder / f"step-{step}-rank-{run.rank}.json"))


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
        self.cache = SlotCache(actor.model.config.get_text_config(), slots, capacity, run.dtype, device)
        self.rows = torch.arange(slots, device=device)
        self.counters = torch.zeros(3, slots, dtype=torch.int64, device=device)
        self.length, self.rope, self.count = self.counters            # (slots,) cached tokens, next position, response tokens
        self.last, self.keys = torch.zeros_like(self.counters[:2])    # (slots,) newest token, noise key of the sequence
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        # One column more than is read: a finished slot that still computes writes behind its end.
        self.out_tokens = torch.zeros(slots, self.args.max_new_tokens + 1, dtype=torch.int64, device=device)
        self.out_logprobs = torch.zeros(slots, self.args.max_new_tokens + 1, device=device)
        self.state = [self.length, self.rope, self.count, self.last, self.keys, self.done, self.out_tokens, self.out_logprobs]
        # Weights change address with each gathering, so graphs last for one rollout: one per batch size, from one pool.
        self.steps_by_size: dict[int, int] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.eager_steps = {"auto": GRAPH_PAYS, "on": 1, "off": math.inf}[self.args.cuda_graphs] if self.pool else math.inf
        self.owner: list[tuple[int, int] | None] = [None] * slots     # host side: (group, sample number) of a busy slot
        self.stored = [0] * slots                                     # host side: at least the cached tokens of a slot
        self.searched = [0] * slots                                   # host side: tokens already searched for stop strings

    def slot_count(self, capacity: int, wanted: int) -> int:
        """--slots, or as many as fit into 90 % of the memory that is free beside a prefill, at most 256."""
        wanted, itemsize = min(wanted, self.args.slots or 256), self.run.dtype.itemsize
        if self.args.slots or self.run.device.type != "cuda":
            return wanted
        torch.cuda.empty_cache()
        room = torch.cuda.mem_get_info()[0] - rollout_work(self.actor, self.args, itemsize)
        slot = capacity * cache_bytes(self.actor.model.config.get_text_config(), itemsize)
        return max(1, min(wanted, int(0.9 * room) // slot))

    def generate(self, groups: list[int], count: int) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, bool]]:
        """``count`` samples of every prompt: (group, number) -> tokens (n,), log-probs (n,), truncated."""
        waiting = deque((group, range(first, min(first + self.cache.slots, count)))
                        for group in groups for first in range(0, count, self.cache.slots))
        results: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, bool]] = {}
        bar = progress(range(len(groups) * count), "own samples")
        while waiting or any(self.owner):
            bar.update(len(results) - bar.n)
            while self.admit(waiting):
                pass
            self.harvest(results)                                            # one-token responses end with the prefill
            active = [slot for slot, owner in enumerate(self.owner) if owner]
            if not waiting and len(active) <= 0.875 * (max(active, default=-1) + 1):
                active = self.compact(active)
            if active:
                for _ in range(self.poll):
                    self.decode(max(active) + 1)
                self.harvest(results)
        bar.close()
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
            input_ids=ids[None].to(device),
            image_rows=torch.isin(ids, visual_token_ids(model.config)).nonzero()[:, 0].to(device),
            positions=torch.cat([positions_of(model, self.prompts, g) for g, _ in batch], dim=1)[:, None].to(device),
            features=torch.cat(features, dim=1).to(device) if features else None, grids=None)
        plan = tuple(torch.cat(parts).to(device) for parts in (rows, slots, places))
        segments = attention_segments(model.config, segments, row.image_rows)
        hidden = language_hidden(model, row, PackedAttention(segments, self.run.backend, device, self.cache, plan))   # (L, H)
        slot, length, following, draw, number = torch.tensor(state, device=device).T                                # (b,) each
        self.length[slot], self.rope[slot], self.count[slot], self.done[slot] = length, following, 0, False
        self.keys[slot] = losses.sequence_keys(self.run.args.run.seed, self.stream, draw, number)
        self.sample(hidden[last_rows], slot)
        self.count[slot] = 1

    def decode(self, size: int) -> None:
        """One token for each of the slots 0..size-1. Slots that are done compute too; nothing of theirs changes."""
        longest = min(max(self.stored[:size]) + 1, self.cache.capacity)
        self.stored[:size] = [min(n + 1, self.cache.capacity - 1) for n in self.stored[:size]]
        if self.eager_steps == math.inf:
            return self.step(size, longest)
        size = min(next(s for s in (*GRAPH_SIZES, self.cache.slots) if s >= size), self.cache.slots)
        self.steps_by_size[size] = steps = self.steps_by_size.get(size, 0) + 1
        if steps <= self.eager_steps:                # the first also sets up what a capture must find: workspaces, kernels
            return self.step(size, self.cache.capacity)
        if size not in self.graphs:
            self.graphs[size] = self.capture(size)
        self.graphs[size].replay()

    def capture(self, size: int) -> torch.cuda.CUDAGraph:
        """A graph of `step`. Its numbers are device state: nothing is baked in but addresses, batch size and capacity."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do meanwhile (NCCL's watchdog, a checkpoint being written) must not end the capture.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self.step(size, self.cache.capacity)
        return graph

    def step(self, size: int, longest: int) -> None:
        """The device's part of `decode`; the host reads nothing back. ``longest``: bound of cached tokens plus the new one."""
        row = SimpleNamespace(input_ids=self.last[None, :size], positions=self.rope[:size].expand(3, 1, -1), features=None,
                              grids=None)
        attention = DecodeAttention(self.cache, self.length[:size], longest, self.run.backend)
        hidden = language_hidden(self.actor.model, row, attention)                                                     # (B, H)
        live = ~self.done[:size]
        self.sample(hidden, slice(0, size))
        self.counters[:, :size] += live

    def sample(self, hidden: torch.Tensor, slots: torch.Tensor | slice) -> None:
        """Draw the next token of ``slots`` (b,) from the last hidden states (b, H), and see whether it is the last one."""
        actor, args, count = self.actor, self.args, self.count[slots]
        too_short = count < args.min_new_tokens if args.min_new_tokens else None
        logits = losses.logits_fp32(hidden, actor.model.lm_head.weight, actor.temperature, actor.banned, too_short,
                                    actor.stop_ids)                                                                    # (b, V)
        if self.greedy:
            ids = logits.argmax(dim=-1)
        else:
            ids = losses.gumbel_race(truncate_distribution(logits, args.top_k, args.top_p),
                                     losses.token_keys(self.keys[slots], count))
        logprobs = logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]             # untruncated, as in training
        place = self.rows[slots], count
        self.out_tokens[place], self.out_logprobs[place] = ids, logprobs
        self.last[slots] = ids
        stopped = (ids[:, None] == actor.stop_ids).any(dim=1)          # isin sorts from ten ids on, which no graph can capture
        self.done[slots] = self.done[slots] | stopped | (count + 1 >= args.max_new_tokens)

    def harvest(self, results: dict) -> None:
        """Take finished sequences out of their slots. The one place where the host waits for the device."""
        active = [slot for slot, owner in enumerate(self.owner) if owner]
        done = self.done.tolist() if active else []
        ready = [slot for slot in active if done[slot] or self.stop_strings]
        if not ready:
            return
        counts = self.count[ready].tolist()
        tokens, logprobs = (x[ready, :max(counts)].cpu() for x in (self.out_tokens, self.out_logprobs))
        stop_ids, freed = set(self.actor.stop_ids.tolist()), []
        for slot, row_tokens, row_logprobs, n in zip(ready, tokens, logprobs, counts):
            end = self.stop_string_end(slot, row_tokens[:n])
            if end is None and not done[slot]:
                continue
            n = end or n
            truncated = end is None and int(row_tokens[n - 1]) not in stop_ids
            results[self.owner[slot]] = row_tokens[:n].clone(), row_logprobs[:n].clone(), truncated
            self.owner[slot], self.stored[slot] = None, 0
            freed.append(slot)
        self.done[freed] = True
        self.length[freed] = 0                       # a free slot decodes along; it need not read an old sequence for that

    def stop_string_end(self, slot: int, tokens: torch.Tensor) -> int | None:
        """Number of tokens up to the one that completes a stop string, --min_new_tokens at least, or None."""
        if not self.stop_strings or len(tokens) < self.args.min_new_tokens:
            return None
        window = 8 + 2 * max(len(stop.encode()) for stop in self.stop_strings)        # a token holds at least one byte
        first = max(0, self.searched[slot] + 1 - window)
        recent = tokens[first:].tolist()                                  # not all of them again at every look

        def shows(part: list[int]) -> bool:
            text = self.tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return any(stop in text for stop in self.stop_strings)

        for n in range(self.searched[slot] + 1, len(tokens) + 1) if shows(recent) else ():
            if shows(recent[max(0, n - window - first):n - first]):
                return max(n, self.args.min_new_tokens)
        self.searched[slot] = len(tokens)
        return None

    def compact(self, active: list[int]) -> list[int]:
        """Move busy slots to the front once no prompt waits, so that the tail of a rollout decodes in small batches."""
        target = [slot for slot in range(len(active)) if self.owner[slot] is None]
        source = [slot for slot in active if slot >= len(active)]
        if source:
            self.cache.move(source, target, max(self.stored[slot] for slot in source))
            for state in self.state:
                state[target] = state[source]
            for s, t in zip(source, target):
                self.owner[t], self.stored[t], self.searched[t] = self.owner[s], self.stored[s], self.searched[s]
                self.owner[s] = None
            self.done[source] = True
        return list(range(len(active)))


def rollout_work(actor: Policy, args: RolloutArgs, itemsize: int) -> int:
    """Bytes that a rollout needs beside weights and cache: for a layer of a prefill, or the logits of all slots."""
    return max(args.prefill_tokens * layer_activations(actor, itemsize),
               16 * (args.slots or 256) * actor.model.config.get_text_config().vocab_size)


def truncate_distribution(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Keep the top_k likeliest ids and, of those, the smallest set with probability top_p; the rest is -inf. (b, V)."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, ids = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)           # probability of likelier ids
        logits = torch.full_like(logits, -torch.inf).scatter(1, ids, ordered.masked_fill(before >= top_p, -torch.inf))
    return logits


if __name__ == "__main__":
    run_main(main)
