"""The generative reward model: a vision-language model that judges pictures and answers and ends with a verdict.

    torchrun --nproc_per_node 8 train_grm_vl.py --model Qwen/Qwen2.5-VL-7B-Instruct --data a.jsonl --eval_data b.jsonl
    torchrun --nproc_per_node 2 train_grm_vl.py         # no flags: the embedded toy (launch/toy.py), also on a CPU
    python train_grm_vl.py --help                       # every flag with its default and unit

One step: prompts + images + targets -> packed rows -> update by next-token loss on targets -> log, evaluate, checkpoint

A row of --data is a JSON object whose fields tell its kind; image paths are relative to its file, "source" is optional, as is
"videos" but beside preferred pictures:

    response   {"prompt": "or messages": [...], "images": ["x.png"], "response": "It is red. <answer>yes</answer>"}
    pictures   {"prompt": "a red cross", "images": ["a.png", "b.png"], "preferred": "A", "critique": "{A} is red."}
    answers    {"prompt": "what is this?", "images": ["x.png"], "responses": ["a cat", "a dog"], "preferred": "tie"}
    correct    {"question": "what is this?", "images": ["x.png"], "response": "a cat", "correct": true}
    score      {"question": "what is this?", "images": ["x.png"], "response": "a cat", "score": 4}

Pairs are shown in both orders (--orders); {A} and {B} in a critique become the names in that order. A template makes a
question of a row, and judge.json of an exported folder holds all templates: who uses a judge asks as it was trained.

Shapes: S targets of the step, N tokens of all of them, L tokens of a packed row, T target tokens of that row, M image
tokens, P prompt tokens, H hidden size. Invariants, each with a test: labels are the target's tokens and its first end
token, nothing else; no value depends on packs or ranks; data order is a function of (seed, counters). What also stands
in train_ppo_vl.py is the same there (tests/test_twins.py).
"""

import functools
import json
import math
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two busy ranks on the same cores slow each other tenfold

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from common import losses
from common.buffers import (Row, Samples, UserError, all_gather_json, as_samples, build_row, exchange_features,
                            failing_together, make_blocks, make_packs, mix, parse_datasets, take_rows)
from common.logging import (CheckpointArgs, Checkpoints, RunLogger, StageTimer, absolute, absolute_model, broken_rules,
                            catch_signals, check_same_flags, contents, draw_sample, end_run, evaluation_due, falls_due,
                            fill_groups, flag, list_flags, print_plan, progress, read_flags, run_main, start_log,
                            stop_requested, training_state, write_durably)
from common.vlm import (FLASH_ATTN_INSTALL, JUDGEMENTS, SWAPPED, VALUE_HEADS, PackedAttention, Processor, Prompt, PromptLoader,
                        StepPrompts, add_adapters, answer_frame, attention_segments, backward_bytes, cache_bytes,
                        choose_attention, clear_forward_order, count_judgements, count_parameters, encode_target, fill, freeze,
                        gathered_bytes, image_features, init_adapters, judge_prompt, judge_settings, language_hidden,
                        language_model, layer_activations, load_rows, load_weights, materialize, parse_verdict, positions_of,
                        read_frames, read_judgement, resident_bytes, resolve_folder, row_pictures, skeleton, token_types,
                        trained_parts, unsharded, use_attention, user_text, vision_inputs, vision_parameters, visual_token_ids,
                        with_grids)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, or only evaluate. Returns the last metrics."""
    run = start_run(parse_args(argv))
    dry = run.args.run.dry_run
    checkpoints = None if dry else Checkpoints(run.args.run.out, run.args.checkpoint, run.args.run.timeout)
    processor, datasets, weights, held_out = load_data(run)
    rows = sum(map(len, datasets))
    args = run.args = plan_steps(run.args, rows)
    judge = build_judge(run, processor)
    if dry:
        return dry_run(run, datasets, weights, judge)
    models = {"judge": (judge, build_optimizer(judge, args.update.lr, args))}
    fresh = {"step": 0, "metrics": {}, "loss_mean": None, "dropped_prompts": 0}
    used = {"data (rows)": contents([path for path, _ in parse_datasets(args.data.data)], rows)}
    state = checkpoints.resume(flags_of(args) | used, neutral_flags(args), fresh, models,
                               keep_newer=args.eval.eval_only)
    log = open_log(run, rows, held_out, state["step"])
    evaluate_at = functools.partial(evaluate, run, processor, judge, held_out, log)

    def end_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluation and record of a step whose checkpoint is on its way."""
        if evaluation_due(args, step, args.update.prompts_per_step, rows):
            metrics = metrics | evaluate_at(step)
            checkpoints.check_quality(metrics)
        log.log(step, metrics | {"perf/failed_saves": checkpoints.failed})
        return metrics

    metrics, first, last = state["metrics"], state["step"], args.update.steps
    recorded = all_gather_json(log.last_step)[0] >= first
    if args.eval.eval_only or (first == 0 and held_out and args.eval.eval_every != 0):
        metrics = evaluate_at(first)
        checkpoints.check_quality(metrics)
        if not recorded:
            log.log(first, metrics)
        if args.eval.eval_only:
            log.close()
            checkpoints.close()
            return metrics
    elif first and not recorded:                               # killed between the save of this step and its record
        metrics = end_step(first, metrics)
    if first:
        checkpoints.export_if_due(judge, processor, first, last)       # or between the save and the export
    catch_signals()

    examples_of = functools.partial(examples_of_step, args, datasets, *mix(weights, last * args.update.prompts_per_step))

    def choose(index: int) -> tuple[list[Prompt], list[int]]:
        examples, first_draw = examples_of(index), index * args.update.prompts_per_step
        return [group[0].prompt for group in examples], list(range(first_draw, first_draw + len(examples)))

    with checkpoints, PromptLoader(processor, args.data.data_threads, args.data.on_bad_row, choose,
                                   state["dropped_prompts"]) as loader:
        for step in range(first + 1, last + 1):
            run.timer.reset()
            if run.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with run.timer("data"):
                examples, prompts = examples_of(step - 1), loader.take(step - 1)
            samples = as_samples([[] if g in prompts.dropped else [example.target for example in group]
                                  for g, group in enumerate(examples)])
            with run.timer("update"):
                metrics, logprobs = update(run, *models["judge"], prompts, samples, step)
            if "train/loss" in metrics:
                mean = state["loss_mean"] if state["loss_mean"] is not None else metrics["train/loss"]
                metrics["train/loss_mean"] = state["loss_mean"] = 0.9 * mean + 0.1 * metrics["train/loss"]
            metrics |= {"train/dropped_prompts": loader.dropped,
                        "train/epoch": step * args.update.prompts_per_step / rows}
            metrics |= perf_metrics(run, prompts, samples)
            log_samples(run, log, step, metrics, examples, samples, logprobs)
            state |= {"step": step, "metrics": metrics, "dropped_prompts": loader.dropped}
            stop = stop_requested()
            if stop or falls_due(step, args.checkpoint.save_every, last):
                checkpoints.save(step, training_state(models), state)
            checkpoints.finish(wait=stop)
            if stop and step < last:                           # the next start evaluates, records and exports this step
                break
            metrics = end_step(step, metrics)
            checkpoints.export_if_due(judge, processor, step, last)
    end_run(log, checkpoints, state["step"], last, f", judgements in {args.run.out}/eval" * bool(held_out))
    return metrics


# ---------------------------------------------------------------------------------------------------------------------
# Arguments: one frozen dataclass per stage; a field is a flag
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelArgs:
    """model"""
    model: str = flag("", "checkpoint to start from: folder in Hugging Face format, or hub name")
    dtype: str = flag("auto", "compute type; weights and optimizer stay float32. auto: bfloat16 on GPU, float32 on CPU",
                      ("auto", "float32", "bfloat16"))
    attention: str = flag("auto", "attention back-end. auto: flash_attn if installed, else torch's varlen; sdpa on CPU",
                          ("auto", "flash_attn", "varlen", "sdpa"))
    gradient_checkpointing: bool = flag(False, "recompute layers in the backward pass: less memory, 30 % more time")
    train_vision: bool = flag(False, "train the vision tower and its projector too (Qwen-VL); image features are then "
                                     "computed in every forward pass")
    lora_rank: int = flag(0, "rank of LoRA adapters, which alone are trained then; the other weights are kept in the compute "
                             "type; 0: off, all are trained", low=0)
    lora_alpha: int = flag(16, "adapters are scaled by this / --lora_rank", low=1)
    lora_targets: str = flag("", "linear layers with adapters: ends of their names, such as q_proj,v_proj; empty: all of the "
                                 "decoder, attention and MLP, but experts of MoE models")


@dataclass(frozen=True)
class DataArgs:
    """data (a template or instruction: text, or name of a text file; empty: judge.json's of --model, else built in)"""
    data: str = flag("", "training rows: JSONL files, as a.jsonl,b.jsonl or with weights: a.jsonl:0.7,b.jsonl:0.3")
    eval_data: str = flag("", "held-out rows: JSONL files, as a.jsonl,b.jsonl; empty: no evaluation")
    system_instruction: str = flag("", "system message; {prompt} in it becomes the row's prompt")
    pictures_template: str = flag("", "asks which of two pictures is better: {prompt} and two <image>")
    answers_template: str = flag("", "asks which of two answers is better: {prompt}, {response_a}, {response_b}")
    correct_template: str = flag("", "asks whether an answer is correct: {prompt}, {response}")
    score_template: str = flag("", "asks for the score of an answer: {prompt}, {response}")
    verdict: str = flag("auto", "which <answer> of a judgement is its verdict. auto: judge.json's, else the last",
                        ("auto", "last", "first"))
    orders: str = flag("both", "orders in which pairs are shown, in training and evaluation", ("both", "given"))
    max_tokens: int = flag(4096, "longest example, tokens with images and target; longer ones are bad rows", low=1)
    min_pixels: int = flag(0, "smallest image after resizing, pixels; 0: the checkpoint's own", low=0)
    max_pixels: int = flag(0, "largest image after resizing, pixels; 0: the checkpoint's own", low=0)
    video_frames: int = flag(16, "most frames of a video, taken evenly from all of it", low=2)
    video_fps: float = flag(2.0, "frames per second of videos that do not tell: lists of pictures", low=1e-3)
    video_max_pixels: int = flag(0, "largest frame after resizing, pixels; 0: the checkpoint's own", low=0)
    on_bad_row: str = flag("error", "what a bad row does: error stops the run, skip counts and reports it",
                           ("error", "skip"))
    verify_images: bool = flag(False, "decode every image at the start, not only its header")
    max_rows: int = flag(0, "use the first rows of each file only; 0: all", low=0)
    max_eval_rows: int = flag(0, "evaluate on the first rows of each file only; 0: all", low=0)
    data_threads: int = flag(2, "threads that decode images while the model works", low=1)


@dataclass(frozen=True)
class UpdateArgs:
    """update"""
    prompts_per_step: int = flag(64, "prompts per step, over all ranks; all targets of a prompt count", low=1)
    max_epochs: int = flag(2, "passes over the data, if --steps is 0; the last step is filled up", low=1)
    steps: int = flag(0, "steps; 0: by --max_epochs", low=0)
    lr: float = flag(1e-5, "learning rate", low=0)
    lr_schedule: str = flag("cosine", "learning rate after the warm-up", ("constant", "linear", "cosine"))
    warmup_steps: int = flag(0, "steps of linear warm-up", low=0)
    min_lr_ratio: float = flag(0.1, "final learning rate of linear and cosine, as a fraction", low=0, high=1)
    vision_lr_factor: float = flag(1.0, "learning rate of the vision tower, as a multiple; with --train_vision", low=0)
    weight_decay: float = flag(0.0, "decoupled weight decay; never on biases and norms", low=0)
    adam_beta1: float = flag(0.9, "beta 1 of AdamW", low=0, high=1)
    adam_beta2: float = flag(0.95, "beta 2 of AdamW", low=0, high=1)
    max_grad_norm: float = flag(1.0, "bound on the global gradient norm; 0: off", low=0)
    max_tokens_per_pack: int = flag(16384, "tokens per packed row: the memory of an update; more rows accumulate")
    share_prompts: bool = flag(True, "let the targets of a prompt share one copy of it in a packed row")
    head_chunk: int = flag(0, "tokens whose logits exist at the same time; 0: 1024 on a GPU, 256 on a CPU", low=0)


@dataclass(frozen=True)
class EvalArgs:
    """evaluation"""
    eval_every: int = flag(-1, "steps between evaluations, besides start and end; -1: once per pass, 0: never", low=-1)
    eval_only: bool = flag(False, "evaluate the model and stop")
    eval_batch: int = flag(32, "judgements generated together per rank", low=1)
    eval_max_new_tokens: int = flag(1024, "longest generated judgement, tokens", low=1)
    eval_temperature: float = flag(0.0, "sampling temperature; 0: greedy. Samples depend on batches and ranks", low=0)
    eval_top_p: float = flag(1.0, "sample from the smallest set with this probability; 1: off", low=1e-6, high=1)


@dataclass(frozen=True)
class RunArgs:
    """run"""
    out: Path = flag(Path("runs/grm"), "output folder")
    seed: int = flag(0, "seed of data order and sampling", low=0)
    log_samples: int = flag(4, "samples shown as pictures and text per record; 0: none", low=0)
    log_samples_every: int = flag(50, "steps between records of samples; 0: never", low=0)
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
    update: UpdateArgs
    eval: EvalArgs
    checkpoint: CheckpointArgs
    run: RunArgs


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags, over --config, over defaults; without --model and --config: the toy.

    Raises:
        UserError: an unknown flag, a bad value, or a combination that cannot work.
    """
    values, given = read_flags({field.name: field.type for field in fields(Args)}, __doc__, argv, "grm_args.json")
    if "max_epochs" in given and "steps" not in given:         # else the steps of a --config, or of the toy's, would count
        values["steps"] = 0
    for name in ("system_instruction", *(f"{kind}_template" for kind in JUDGEMENTS)):
        if os.path.isfile(values.get(name, "")):
            values[name] = Path(values[name]).read_text(encoding="utf-8-sig").strip("\n")
    args = fill_groups(Args, values)
    problems = broken_rules(args, {
        f"--max_tokens_per_pack {args.update.max_tokens_per_pack} must hold one example: --max_tokens "
        f"{args.data.max_tokens}": args.update.max_tokens_per_pack >= args.data.max_tokens,
        f"--system_instruction {args.data.system_instruction}: no such file": not Path(args.data.system_instruction).suffix
            or len(args.data.system_instruction.split()) > 1,
    })
    try:
        parse_datasets(args.data.data)
        if any(weight is not None for _, weight in parse_datasets(args.data.eval_data)):
            problems.append(f"--eval_data {args.data.eval_data}: every row is judged once, so its files have no weights")
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return args


def flags_of(args: Args) -> dict[str, Any]:
    """Arguments as flags, existing paths absolute: what --config reads back from any folder."""
    flags = list_flags(args)
    for name in ("data", "eval_data"):
        flags[name] = ",".join(absolute(path) + (f":{weight!r}" if weight else "")
                               for path, weight in parse_datasets(flags[name]))
    return flags | {"model": absolute_model(flags["model"])}


def neutral_flags(args: Args) -> set[str]:
    """Flags that change where, how fast or how visibly the run computes, but not what."""
    return {field.name for group in (EvalArgs, CheckpointArgs, RunArgs) for field in fields(group)} - {"seed"} | {
        "attention", "gradient_checkpointing", "data_threads", "verify_images", "max_tokens_per_pack", "share_prompts",
        "head_chunk", "max_epochs", "eval_data", "max_eval_rows"} | (
        {"steps"} if args.update.lr_schedule == "constant" else set())


def plan_steps(args: Args, rows: int) -> Args:
    """The arguments with --steps counted out."""
    steps = args.update.steps or -(-args.update.max_epochs * rows // args.update.prompts_per_step)
    return replace(args, update=replace(args.update, steps=steps))


# ---------------------------------------------------------------------------------------------------------------------
# Judgements: rows to questions, targets and verdicts. judge.json holds what is needed to ask in the same way.
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, eq=False)
class Example:
    """A question and what the judge shall say to it."""

    prompt: Prompt
    kind: str                    # response, or one of JUDGEMENTS
    target: torch.Tensor         # (n,) label tokens, the end token last
    text: str                    # the target as text
    verdict: str | None          # None: a response without <answer>
    order: str                   # of a pair: given or swapped
    dataset: int
    source: str                  # what evaluations tell apart: the row's own word, or its file (the path, if names are alike)


def load_examples(path: str, dataset: int, args: Args, processor: Processor, limit: int) -> list[Example]:
    """The examples of one file. Raises ValueError with file and line."""
    judge, frame, folder = processor.files["judge"], answer_frame(processor), os.path.dirname(os.path.abspath(path))
    files = [os.path.basename(other) for other, _ in parse_datasets(args.data.eval_data)]
    name = path if files.count(os.path.basename(path)) > 1 else os.path.basename(path)

    def build(index: int, source: str, row: dict) -> list[Example]:
        examples = []
        for ask in read_judgement(row, judge, args.data.orders):
            prompt = judge_prompt(processor, ask, index, source, folder=folder, max_prompt_tokens=args.data.max_tokens,
                                  verify_images=args.data.verify_images)
            target = encode_target(processor, frame, ask["text"])
            if (size := len(prompt.input_ids) + len(target)) > args.data.max_tokens:
                raise ValueError(f"example too long: {size} tokens, {len(target)} of them target; the limit is "
                                 f"{args.data.max_tokens}")
            examples.append(Example(prompt, ask["kind"], target, ask["text"], ask["verdict"], ask["order"], dataset,
                                    row.get("source") or name))
        return examples

    return [example for row in load_rows(path, build, on_bad_row=args.data.on_bad_row, limit=limit) for example in row]


# ---------------------------------------------------------------------------------------------------------------------
# Start: process group, data, model, optimizer
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


def load_data(run: Run) -> tuple[Processor, list[list[list[Example]]], list[float], list[Example]]:
    """Processor (its files["judge"] is what judge.json will hold), training sets as lists of prompts (each a list of
    examples) and their weights, and the held-out examples; the same on every rank.

    Raises:
        UserError: on every rank alike: bad checkpoint files, templates or rows, with file and line.
    """
    args, loaded = run.args, {}
    with failing_together():
        folder = resolve_folder(args.model.model, weights=not run.args.run.dry_run)
        processor = Processor(str(folder), args.data.min_pixels, args.data.max_pixels, args.data.video_frames,
                              args.data.video_fps, args.data.video_max_pixels)
        processor.files["judge"] = judge_settings(
            processor.files["judge"], {kind: getattr(args.data, f"{kind}_template") for kind in JUDGEMENTS},
            args.data.system_instruction, args.data.verdict)
        for name, limit in (("data", args.data.max_rows), ("eval_data", args.data.max_eval_rows)):
            loaded[name] = [load_examples(path, k, args, processor, limit)
                            for k, (path, _) in enumerate(parse_datasets(getattr(args.data, name)))]
        judge = processor.files["judge"]
        bare = lambda example: example.text == fill(judge["answer"], verdict=example.verdict)  # noqa: E731
        count_judgements(judge, [(example.kind, example.verdict, bare(example))
                                 for part in loaded["data"] for example in part if example.kind in JUDGEMENTS])
    datasets = []
    for part in loaded["data"]:
        groups: dict[tuple, list[Example]] = {}
        for example in part:                                  # the targets of a prompt share its copy in a packed row
            groups.setdefault((example.prompt.text, example.prompt.images), []).append(example)
        datasets.append(list(groups.values()))
    weights = [weight or float(len(part)) for part, (_, weight) in zip(datasets, parse_datasets(args.data.data))]
    return processor, datasets, weights, [example for part in loaded["eval_data"] for example in part]


class Judge(nn.Module):
    """A packed row in, log-probs of its target tokens out. Full logits never exist."""

    def __init__(self, model: nn.Module, chunk: int):
        super().__init__()
        self.model, self.chunk = model, chunk

    def forward(self, row: Row, attention: PackedAttention) -> torch.Tensor:
        """Returns logp (T,) float32."""
        hidden = language_hidden(self.model, row, attention)                                                   # (L, H)
        return losses.linear_logprobs(hidden[row.predict], self.model.lm_head.weight, row.targets, chunk=self.chunk)[0]


def build_judge(run: Run, processor: Processor) -> Judge:
    """The model, sharded, with its weights."""
    args = run.args.model
    with failing_together():
        model = skeleton(processor.config, sees_pixels=args.train_vision,
                         longest=run.args.data.max_tokens + run.args.eval.eval_max_new_tokens)
        if not args.train_vision:
            freeze(vision_parameters(model), run.dtype)
        if args.lora_rank:
            add_adapters(model, absolute(args.model), args.lora_rank, args.lora_alpha, args.lora_targets, run.dtype)
        judge = Judge(model, run.args.update.head_chunk)
        folder = resolve_folder(args.model, weights=not run.args.run.dry_run)
        judge.spelled = load_sharded(run, judge, folder)
    for part in trained_parts(judge.model) if args.gradient_checkpointing else ():
        part.gradient_checkpointing_enable({"use_reentrant": False})
    return judge


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


def dry_run(run: Run, datasets: list[list[list[Example]]], weights: list[float], judge: Judge) -> dict[str, float]:
    """Print what --dry_run is asked for, the data of the first step standing for all. Raises UserError: too little memory."""
    args, update, ranks = run.args, run.args.update, run.args.run.hsdp or run.args.run.plan_world
    itemsize, text = 4 if args.model.dtype == "float32" else 2, judge.model.config.get_text_config()
    groups = [group for part in datasets for group in part]
    lengths = [len(group[0].prompt.input_ids) for group in groups]
    first = examples_of_step(args, datasets, *mix(weights, update.prompts_per_step), 0)
    samples, prompts = as_samples([[e.target for e in g] for g in first]), [len(g[0].prompt.input_ids) for g in first]
    blocks = make_blocks(samples, prompts, update.max_tokens_per_pack, share=update.share_prompts)
    packs = make_packs(samples, prompts, blocks, args.run.plan_world, update.max_tokens_per_pack, text.hidden_size)
    root, layer, layers = gathered_bytes(judge, itemsize)
    held, own = resident_bytes(judge, ranks, itemsize), layer_activations(judge, itemsize)
    asked = args.eval.eval_batch * max(lengths)                     # evaluation is assumed to ask what training shows
    cached = (asked + args.eval.eval_batch * args.eval.eval_max_new_tokens) * cache_bytes(text, itemsize)

    def phases(checkpointing: bool) -> dict[str, dict[str, float]]:
        work = backward_bytes(judge, update.max_tokens_per_pack, itemsize, checkpointing, update.head_chunk or 1024)
        return {"update": held | {"gathered weights": root + 2 * layer, "gradient shards": held["Adam"] / 2} | work,
                "evaluate": held | {"gathered weights": root + layers, "KV cache": cached, "forward": asked * own}}

    parts = "  ".join(f"{part} {number / 1e6:.3f}" for part, number in count_parameters(judge).items() if number)
    lines = [f"{len(groups)} prompts of {sum(lengths) / len(groups):.0f} tokens, at most {max(lengths)}",
             f"{update.steps} steps of {update.prompts_per_step} prompts = "
             f"{update.steps * update.prompts_per_step / len(groups):.1f} passes",
             f"first step: {sum(prompts) + len(samples.tokens)} tokens, {len(packs[0])} packs per GPU",
             f"million parameters: {parts}",
             f"{args.run.plan_world} GPUs, {ranks} shards, rows of {update.max_tokens_per_pack} tokens:"]
    return print_plan(lines, phases, args.model.gradient_checkpointing, args.run.plan_gpu_gib)


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


def examples_of_step(args: Args, datasets: list[list[list[Example]]], which: np.ndarray, number: np.ndarray,
                     index: int) -> list[list[Example]]:
    """The prompts, each with its examples, of the 0-based step ``index``: draw j is draw ``number[j]`` of set ``which[j]``."""
    draws = slice(index * args.update.prompts_per_step, (index + 1) * args.update.prompts_per_step)
    picks = take_rows(which[draws], number[draws], [len(part) for part in datasets], args.run.seed)
    return [datasets[k][row] for k, row in picks]


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
# Update
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


def update(run: Run, judge: Judge, optimizer: torch.optim.Optimizer, prompts: StepPrompts, samples: Samples,
           step: int) -> tuple[dict[str, float], torch.Tensor]:
    """One optimizer step on the mean of -log p over all target tokens of all ranks. Also returns logp (N,)."""
    lr, tokens = run.args.update.lr * lr_factor(step, run.args.update), len(samples.tokens)
    judge.train()
    if not judge.model.sees_pixels:
        compute_features(run, judge, prompts)
    done, logprobs = [], torch.zeros(tokens)
    for row, attention in packed_rows(run, judge.model, prompts, samples):
        logp = judge(row, attention)                                                                           # (T,)
        (-logp.sum() * (run.world / tokens)).backward()                       # FSDP averages gradients over ranks
        done.append((row.flat, logp.detach()))
    for flat, logp in done:                                              # not above: .cpu() waits for the device
        logprobs[flat] = logp.cpu()
    dist.all_reduce(logprobs)
    norm, applied = apply_gradients(run, judge, optimizer, lr)
    loss = -float(logprobs.double().sum()) / tokens
    metrics = {"train/lr": lr, "train/skipped": float(not applied), "train/tokens": tokens,
               "train/examples": len(samples), "train/grad_norm": norm if applied else 0.0}
    return metrics | ({"train/loss": loss} if math.isfinite(loss) else {}), logprobs          # JSON has no NaN


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


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, records, export
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(run: Run, processor: Processor, judge: Judge, examples: list[Example], log: RunLogger,
             step: int) -> dict[str, float]:
    """Judge every held-out example once over all ranks, in words and by the likelihood of every verdict; write
    <log's folder>/eval/eval_result_{step}.json; return the eval/ metrics."""
    started, records, folder = time.perf_counter(), [], log.out / "eval"
    torch.manual_seed(run.args.run.seed * 1_000_003 + step * run.world + run.rank)            # only sampling reads it
    order = sorted(range(len(examples)), key=lambda i: -len(examples[i].prompt.input_ids))   # batches of one length
    size = run.args.eval.eval_batch * run.world
    chunks = [order[start:start + size] for start in range(0, len(order), size)] + [[]]
    choose = lambda n: ([examples[i].prompt for i in chunks[n]], chunks[n])  # noqa: E731
    with PromptLoader(processor, run.args.data.data_threads, run.args.data.on_bad_row, choose) as loader:
        for n, chunk in enumerate(chunks[:-1]):
            prompts = loader.take(n, least=0)
            own = generate(run, processor, judge, prompts)
            texts = {int(g): text for part in all_gather_json(own) for g, text in part.items()}
            scores = score_verdicts(run, processor, judge, [examples[i] for i in chunk], prompts)
            records += [judgement_record(processor.files["judge"], chunk[g], examples[chunk[g]], texts[g], *scores[g])
                        for g in sorted(scores)]
    if not records:
        raise UserError("evaluation: no held-out example is left; all pictures failed to decode")
    records.sort(key=lambda record: record["index"])
    if bad := [record for record in records if not math.isfinite(record["loss"] + sum(record["probabilities"].values()))]:
        raise UserError(f"evaluation after step {step}: the loss of {len(bad)} of {len(records)} held-out examples is not "
                        f"finite, the first of them {bad[0]['info']['row']}; are the weights?")
    summary = {"step": step, "dropped": loader.dropped} | summarise(records)
    if run.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        result = json.dumps({"summary": summary, "records": records}, indent=1)
        write_durably(folder / f"eval_result_{step}.json", result)
    metrics = {f"eval/{name}": value for name, value in summary.items() if isinstance(value, float)}
    for name in ("source", "kind", "order"):
        metrics |= {f"eval/{name}/{key}": value for key, value in summary[f"accuracy_per_{name}"].items()}
    metrics |= {"eval/num_samples": len(records), "eval/dropped_prompts": loader.dropped,
                "eval/seconds": time.perf_counter() - started}
    count = run.args.run.log_samples
    shown = records[::max(1, len(records) // max(1, count))][:count] if run.rank == 0 else []
    log.samples(step, records, [draw_sample(read_frames(record["info"]["images"], 6),
                                            record["info"]["question"], record["generated_text"],
                                            f"verdict: {record['predicted_answer']}   right: {record['gt_answer']}")
                                for record in shown], stem="eval")
    log.line(f"eval  step {step:5d}  " + "  ".join(f"{name[5:]} {value:.3f}" for name, value in metrics.items()))
    return metrics


def score_verdicts(run: Run, processor: Processor, judge: Judge, examples: list[Example],
                   prompts: StepPrompts) -> dict[int, tuple[float, dict[str, float]]]:
    """Of every example whose pictures decode: its loss, summed over the target's tokens, and the probability of each
    verdict given the bare prompt: a softmax over the verdicts' log-probs. One packed forward."""
    settings, frame = processor.files["judge"], answer_frame(processor)
    words = [settings["kinds"].get(example.kind, {"verdicts": []})["verdicts"] for example in examples]
    if not judge.model.sees_pixels:
        compute_features(run, judge, prompts)
    samples = as_samples([[] if g in prompts.dropped else [example.target, *(
        encode_target(processor, frame, fill(settings["answer"], verdict=word)) for word in words[g])]
        for g, example in enumerate(examples)])
    logprobs = score_tokens(run, judge, prompts, samples)
    sums: dict[int, list[float]] = {}
    for group, part in zip(samples.group.tolist(), samples.split(logprobs.double())):
        sums.setdefault(group, []).append(float(part.sum()))
    return {g: (-own[0], dict(zip(words[g], torch.tensor(own[1:], dtype=torch.float64).softmax(dim=0).tolist())))
            for g, own in sums.items()}


def generate(run: Run, processor: Processor, judge: Judge, prompts: StepPrompts) -> dict[int, str]:
    """This rank's judgements in words, by Hugging Face's `generate` in batches padded on the left."""
    args, model, tokenizer = run.args.eval, judge.model, processor.tokenizer
    own = [g for g, owner in enumerate(prompts.owners) if owner == run.rank and g not in prompts.dropped]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else processor.stop_ids[0]
    greedy = args.eval_temperature == 0
    sampling = {} if greedy else {"temperature": args.eval_temperature, "top_p": args.eval_top_p, "top_k": 0}
    texts: dict[int, str] = {}
    judge.eval()
    with unsharded(judge), plain_attention(model):
        for start in range(0, len(own), args.eval_batch):
            batch = own[start:start + args.eval_batch]
            asked = [prompts.prompts[g].input_ids for g in batch]
            ids = pad_sequence(asked, batch_first=True, padding_value=pad, padding_side="left")                # (b, longest)
            mask = pad_sequence(list(map(torch.ones_like, asked)), batch_first=True, padding_side="left")
            inputs = {"input_ids": ids, "attention_mask": mask} | token_types(model.config, ids)
            if pictures := [prompts.patches[g] for g in batch if g in prompts.patches]:
                items = sum((prompts.prompts[g].grids for g in batch), ())
                inputs |= vision_inputs(model.config, *map(torch.cat, zip(*pictures)), items)
            tokens = model.generate(
                **{name: value.to(run.device) for name, value in inputs.items()}, do_sample=not greedy, **sampling,
                max_new_tokens=args.eval_max_new_tokens, eos_token_id=list(processor.stop_ids), pad_token_id=pad,
                suppress_tokens=list(processor.banned_ids), use_cache=True, synced_gpus=False)
            texts |= zip(batch, tokenizer.batch_decode(tokens[:, ids.shape[1]:], skip_special_tokens=True))
    return texts


@contextmanager
def plain_attention(model: nn.Module):
    """transformers' own attention in the language model: `generate` pads, and knows no packed rows."""
    configs = [model.config.get_text_config(), language_model(model).config]
    kept = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        for config, name in zip(configs, kept):
            config._attn_implementation = name


@torch.no_grad()
def score_tokens(run: Run, judge: Judge, prompts: StepPrompts, samples: Samples) -> torch.Tensor:
    """(N,) log-probs of all targets, on every rank."""
    judge.eval()
    done, result = [], torch.zeros(len(samples.tokens))
    for row, attention in packed_rows(run, judge.model, prompts, samples):
        done.append((row.flat, judge(row, attention)))
    for flat, logp in done:                               # not above: .cpu() waits, and then the device for the next row
        result[flat] = logp.cpu()
    clear_forward_order(judge)
    judge.reshard()                         # FSDP2 leaves the root's weights gathered, for a backward that never comes
    dist.all_reduce(result)
    return result


def judgement_record(judge: dict, index: int, example: Example, text: str, loss: float,
                     chances: dict[str, float]) -> dict:
    """One JSON-ready record of the evaluation."""
    # The right word too: of a judge that was trained on no scores, or on others, none is known.
    free = example.kind == "response"                          # any text may be its verdict, spelled as numbers and words are
    words = [] if free else judge["kinds"][example.kind]["verdicts"]
    said = parse_verdict(text, judge["which_answer"], [*words, example.verdict or ""])
    said = said or (parse_verdict(text, judge["which_answer"], None) if free else None)
    return {"info": {"row": example.prompt.source, "dataset": example.dataset, "source": example.source,
                     "kind": example.kind, "images": list(example.prompt.images),
                     "question": user_text(example.prompt.messages)},
            "generated_text": text, "response_text": example.text, "gt_answer": example.verdict,
            "predicted_answer": said, "index": index, "order": example.order, "loss": loss, "tokens": len(example.target),
            "probabilities": chances}


def summarise(records: list[dict]) -> dict[str, Any]:
    """Accuracy and its relatives over the records with a verdict. What is not parsed is wrong, like nothing."""
    graded = [record for record in records if record["gt_answer"] is not None]
    likely = [record for record in graded if record["probabilities"]]
    pairs: dict[tuple, list[str | None]] = {}
    confusion: dict[str, dict[str, dict[str, int]]] = {}
    parts: dict[str, dict[str, list[bool]]] = {"source": {}, "kind": {}, "order": {}}
    for record in graded:
        info, said, order = record["info"], record["predicted_answer"], record["order"]
        pair = info["kind"] in ("pictures", "answers")
        for name, key in (("source", info["source"]), ("kind", info["kind"]), *[("order", order)] * pair):
            parts[name].setdefault(key, []).append(said == record["gt_answer"])
        row = confusion.setdefault(info["kind"], {}).setdefault(record["gt_answer"], {})
        row[said or "unparsable"] = row.get(said or "unparsable", 0) + 1
        if pair:
            said = SWAPPED.get(said, said) if order == "swapped" else said
            pairs.setdefault((info["dataset"], info["row"]), []).append(said)
    both = [verdicts for verdicts in pairs.values() if len(verdicts) == 2]
    summary: dict[str, Any] = {"loss": sum(r["loss"] for r in records) / sum(r["tokens"] for r in records)}
    if graded:
        summary["accuracy"] = float(np.mean([r["predicted_answer"] == r["gt_answer"] for r in graded]))
        summary["parse_rate"] = float(np.mean([r["predicted_answer"] is not None for r in graded]))
    if both:
        summary["position_consistency"] = float(np.mean([a is not None and a == b for a, b in both]))
    if likely:
        best = [max(r["probabilities"], key=r["probabilities"].get) for r in likely]
        sure = np.array([r["probabilities"][word] for word, r in zip(best, likely)])
        hits = np.array([word == r["gt_answer"] for word, r in zip(best, likely)], dtype=float)
        bins = np.minimum((sure * 10).astype(int), 9)                # expected calibration error (Guo et al. 2017)
        gaps = [abs(float((hits - sure)[bins == b].sum())) for b in range(10)]
        summary |= {"likelihood_accuracy": float(hits.mean()), "likelihood_ece": sum(gaps) / len(likely)}
    summary |= {f"accuracy_per_{name}": {key: float(np.mean(hits)) for key, hits in sorted(part.items())}
                for name, part in parts.items()}
    return summary | {"confusion": confusion,
                      "counts": {"examples": len(records), "graded": len(graded), "pairs_in_both_orders": len(both)}}


def perf_metrics(run: Run, prompts: StepPrompts, samples: Samples) -> dict[str, float]:
    """Seconds per stage, throughput and memory."""
    seconds = run.timer.seconds()
    metrics = {f"perf/{name}_seconds": value for name, value in seconds.items()}
    metrics["perf/step_seconds"] = sum(seconds.values())
    metrics["perf/tokens_per_second"] = (len(samples.tokens) + sum(prompts.lengths)) / seconds["update"]
    if run.device.type == "cuda":
        metrics["perf/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2 ** 30
    return metrics


def open_log(run: Run, rows: int, held_out: list[Example], first_step: int) -> RunLogger:
    """Write args.json and the first record; print the plan."""
    args, update = run.args, run.args.update
    log = start_log(args.run.out, flags_of(args), update.steps, first_step, args.eval.eval_only)
    log.line(f"{rows} training prompts, {len(held_out)} held-out examples; {update.steps} steps of "
             f"{update.prompts_per_step} prompts = {update.steps * update.prompts_per_step / max(1, rows):.1f} passes; "
             f"output: {log.out}")
    return log


def log_samples(run: Run, log: RunLogger, step: int, metrics: dict[str, float], examples: list[list[Example]],
                samples: Samples, logprobs: torch.Tensor) -> None:
    """One line, the bar, and every so often the targets with their likelihood."""
    every, loss = run.args.run.log_samples_every, f"{metrics.get('train/loss', math.nan):.4f}"
    log.line(f"step {step:5d}  loss {loss}  grad_norm {metrics['train/grad_norm']:.3f}  "
             f"tokens/s {metrics['perf/tokens_per_second']:.0f}")
    log.update(step, {"loss": loss})
    if run.rank or not every or (step % every and step != run.args.update.steps):
        return
    records = []
    for group, number, logp in zip(samples.group.tolist(), samples.number.tolist(), samples.split(logprobs)):
        example = examples[group][number]
        records.append({"row": example.prompt.source, "order": example.order, "images": list(example.prompt.images),
                        "question": user_text(example.prompt.messages), "target": example.text,
                        "nats_per_token": f"{-float(logp.mean()):.3f}"})
    log.samples(step, records, [draw_sample(read_frames(record["images"], 6), record["question"], record["target"],
                                            f"{record['nats_per_token']} nats per token")
                                for record in records[:run.args.run.log_samples]])


if __name__ == "__main__":
    run_main(main)
