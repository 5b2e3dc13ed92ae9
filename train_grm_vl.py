"""The generative reward model: a vision-language model that judges pictures and answers and ends with a verdict.

    torchrun --nproc_per_node 8 train_grm_vl.py --model Qwen/Qwen2.5-VL-7B-Instruct --data a.jsonl --eval_data b.jsonl
    torchrun --nproc_per_node 2 train_grm_vl.py         # no flags: the embedded toy (launch/toy.py), also on a CPU
    python train_grm_vl.py --help                       # every flag with its default and unit

One step: prompts + images + targets -> packed rows -> update by next-token loss on targets -> log, evaluate, checkpoint

A row of --data is a JSON object whose fields tell its kind; image paths are relative to its file, "source" is optional:

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

import argparse
import dataclasses
import fcntl
import functools
import hashlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two busy ranks on the same cores slow each other tenfold

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from common import losses
from common.buffers import (Row, Samples, all_gather_json, build_row, exchange_features, make_blocks, make_packs, mix,
                            parse_datasets, take_rows)
from common.logging import RunLogger, StageTimer, draw_sample
from common.vlm import (FLASH_ATTN_INSTALL, PackedAttention, Processor, Prompt, choose_attention, image_features,
                        image_list, language_hidden, load_pixels, load_rows, load_weights, make_prompt, materialize,
                        prompt_positions, read_image, resolve_folder, skeleton, use_attention)

HERE = Path(__file__).resolve().parent
EXIT_PREEMPTED = 75  # of a worker that stopped after SIGTERM or SIGUSR1 with everything saved (sysexits.h: EX_TEMPFAIL)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, or only evaluate. Returns the last metrics."""
    run = start_run(parse_args(argv))
    checkpoints = Checkpoints(run)
    processor, datasets, weights, held_out = load_data(run)
    rows = sum(map(len, datasets))
    args = run.args = plan_steps(run.args, rows)
    judge = build_judge(run, processor)
    models = {"judge": (judge, build_optimizer(judge, args.update.lr, args))}
    fresh = {"step": 0, "metrics": {}, "loss_mean": None, "dropped_prompts": 0}
    state = resume(run, checkpoints, models, fresh, rows)
    log = open_log(run, rows, held_out, state["step"])
    evaluate_at = functools.partial(evaluate, run, processor, judge, held_out, log)

    def end_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluation and record of a step whose checkpoint is on its way."""
        if evaluation_due(args, step, rows):
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
    elif first and not recorded:                               # killed between the save of this step and its record
        metrics = end_step(first, metrics)
    if first:
        export_if_due(run, judge, processor, first)            # or between the save and the export
    catch_signals()

    with checkpoints, PromptLoader(run, processor, datasets, weights, state["dropped_prompts"]) as loader:
        loader.prefetch(first)
        for step in range(first + 1, 0 if args.eval.eval_only else last + 1):
            run.timer.reset()
            if run.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with run.timer("data"):
                examples, prompts = loader.examples.pop(step - 1), loader.take(step - 1)
                loader.prefetch(step)
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
            export_if_due(run, judge, processor, step)
    preempted = state["step"] < last and not args.eval.eval_only
    if checkpoints.failed:
        raise UserError(f"the run ended after step {state['step']}, and its last checkpoint could not be saved")
    log.line(f"stopped by a signal after step {state['step']}; the same command goes on from there" if preempted else
             f"done: metrics in {args.run.out}/metrics.jsonl, judgements in {args.run.out}/eval, weights in "
             f"{args.run.out}/export")
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
    model: str = flag("", "checkpoint to start from: folder in Hugging Face format, or hub name")
    dtype: str = flag("auto", "compute type; weights and optimizer stay float32. auto: bfloat16 on GPU, float32 on CPU",
                      ("auto", "float32", "bfloat16"))
    attention: str = flag("auto", "attention back-end. auto: flash_attn if installed, else torch's varlen; sdpa on CPU",
                          ("auto", "flash_attn", "varlen", "sdpa"))
    gradient_checkpointing: bool = flag(False, "recompute layers in the backward pass: less memory, 30 % more time")


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
    weight_decay: float = flag(0.0, "decoupled weight decay; never on biases and norms", low=0)
    adam_beta1: float = flag(0.9, "beta 1 of AdamW", low=0, high=1)
    adam_beta2: float = flag(0.95, "beta 2 of AdamW", low=0, high=1)
    max_grad_norm: float = flag(1.0, "bound on the global gradient norm; 0: off", low=0)
    max_tokens_per_pack: int = flag(16384, "tokens per packed row: the memory of an update; more rows accumulate")
    share_prompts: bool = flag(True, "let the targets of a prompt share one copy of it in a packed row")
    head_chunk: int = flag(1024, "tokens whose logits exist at the same time", low=1)


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
    out: Path = flag(Path("runs/grm"), "output folder")
    seed: int = flag(0, "seed of data order and sampling", low=0)
    log_samples: int = flag(4, "samples shown as pictures and text per record; 0: none", low=0)
    log_samples_every: int = flag(50, "steps between records of samples; 0: never", low=0)
    timeout: float = flag(1800.0, "longest wait of a rank for the others, seconds", low=1e-6)


@dataclass(frozen=True)
class Args:
    model: ModelArgs
    data: DataArgs
    update: UpdateArgs
    eval: EvalArgs
    checkpoint: CheckpointArgs
    run: RunArgs


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
    if config is None and "model" not in given:
        config = str(embedded_toy("grm_args.json"))
    values = (read_config(config, groups) if config else {}) | given
    for name in ("system_instruction", *(f"{kind}_template" for kind in KINDS)):
        if os.path.isfile(values.get(name, "")):
            values[name] = Path(values[name]).read_text(encoding="utf-8").strip("\n")
    args = Args(**{name: group(**{field.name: values[field.name] for field in dataclasses.fields(group)
                                  if field.name in values}) for name, group in groups.items()})
    problems, update = out_of_bounds(args), args.update
    rules = {
        "--model and --data are needed together": bool(args.model.model and (args.data.data or args.eval.eval_only)),
        f"--max_tokens_per_pack {update.max_tokens_per_pack} must hold one example: --max_tokens "
        f"{args.data.max_tokens}": update.max_tokens_per_pack >= args.data.max_tokens,
        "--eval_only needs --eval_data": bool(args.data.eval_data) or not args.eval.eval_only,
        "--min_pixels exceeds --max_pixels": args.data.max_pixels == 0 or args.data.min_pixels <= args.data.max_pixels,
    }
    problems += [message for message, holds in rules.items() if not holds]
    try:
        parse_datasets(args.data.data), parse_datasets(args.data.eval_data)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
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


def flags_of(args: Args) -> dict[str, Any]:
    """Arguments as flags, JSON-ready, existing paths absolute: what --config reads back from any folder."""
    flags = {field.name: getattr(group, field.name)
             for group in vars(args).values() for field in dataclasses.fields(group)}
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    flags["model"] = str(Path(flags["model"]).resolve()) if Path(flags["model"]).exists() else flags["model"]
    for name in ("data", "eval_data"):
        flags[name] = ",".join(f"{Path(path).resolve()}" + (f":{weight!r}" if weight else "")
                               for path, weight in parse_datasets(flags[name]))
    return flags


def plan_steps(args: Args, rows: int) -> Args:
    """The arguments with --steps counted out."""
    steps = args.update.steps or -(-args.update.max_epochs * rows // args.update.prompts_per_step)
    return dataclasses.replace(args, update=dataclasses.replace(args.update, steps=steps))


# ---------------------------------------------------------------------------------------------------------------------
# Judgements: rows to questions, targets and verdicts. judge.json holds what is needed to ask in the same way.
# ---------------------------------------------------------------------------------------------------------------------

# kind: (template, verdicts, what a template must hold). The verdicts of scores are those of the training rows.
KINDS = {
    "pictures": ("Request: {prompt}\nPicture A: <image>\nPicture B: <image>\nWhich picture fits the request better? "
                 "End with <answer>A</answer>, <answer>B</answer> or <answer>tie</answer>.",
                 ["A", "B", "tie"], ["{prompt}"]),
    "answers": ("Question: {prompt}\nAnswer A: {response_a}\nAnswer B: {response_b}\nWhich answer is better? End with "
                "<answer>A</answer>, <answer>B</answer> or <answer>tie</answer>.",
                ["A", "B", "tie"], ["{prompt}", "{response_a}", "{response_b}"]),
    "correct": ("Question: {prompt}\nAnswer: {response}\nIs the answer correct? End with <answer>yes</answer> or "
                "<answer>no</answer>.", ["yes", "no"], ["{prompt}", "{response}"]),
    "score": ("Question: {prompt}\nAnswer: {response}\nHow good is the answer? End with <answer>its score</answer>.",
              [], ["{prompt}", "{response}"]),
}
ANSWER = "<answer>{verdict}</answer>"
SWAPPED = {"A": "B", "B": "A"}
# The field that tells a row's kind (the first that is there), the kind, further fields beside prompt, images, source.
MARKS = {"score": ("score", {"question", "response", "critique"}),
         "correct": ("correct", {"question", "response", "critique"}),
         "responses": ("answers", {"preferred", "critique"}), "preferred": ("pictures", {"critique"}),
         "response": ("response", {"messages"})}


@dataclass(frozen=True, eq=False)
class Example:
    """A question and what the judge shall say to it."""

    prompt: Prompt
    kind: str                    # response, or one of KINDS
    target: torch.Tensor         # (n,) label tokens, the end token last
    text: str                    # the target as text
    verdict: str | None          # None: a response without <answer>
    order: str                   # of a pair: given or swapped
    dataset: int
    source: str                  # what evaluations tell apart: the row's own word, or its file


def fill(template: str, **values: str) -> str:
    """Replace {name} in one pass: a value that holds braces stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def parse_verdict(text: str, which: str, words: list[str] | None) -> str | None:
    """The verdict of a judgement: one of ``words`` (None: any text), numbers by their value; None if there is none."""
    def spell(word: str) -> str:
        try:
            return f"{float(word):g}"
        except ValueError:
            return word.lower()

    found = re.findall(r"<answer>((?:(?!</?answer>).)*+)</answer>", text, re.DOTALL)
    said = found[0 if which == "first" else -1].strip() if found else ""
    return (said or None) if words is None else {spell(word): word for word in words}.get(spell(said))


def judge_settings(args: DataArgs, saved: dict) -> dict:
    """Content of judge.json: from flags, else from the ``saved`` one of --model, else built in. Raises ValueError."""
    kinds = {}
    for kind, (template, words, needed) in KINDS.items():
        old = saved.get("kinds", {}).get(kind, {})
        text, pictures = getattr(args, f"{kind}_template") or old.get("template") or template, 2 * (kind == "pictures")
        if not all(part in text for part in needed) or text.count("<image>") != pictures:
            raise ValueError(f"--{kind}_template must hold {', '.join(needed)} and {pictures} <image>: {text!r:.200}")
        kinds[kind] = {"template": text, "verdicts": old.get("verdicts") or words, "examples": 0, "critiques": 0}
    which = args.verdict if args.verdict != "auto" else saved.get("which_answer", "last")
    return {"system_instruction": args.system_instruction or saved.get("system_instruction", ""), "answer": ANSWER,
            "which_answer": which, "kinds": kinds}


def check_row(row: dict) -> tuple[str, str]:
    """The field that tells the kind of a row, and the kind. Raises ValueError: unknown, missing or wrong fields."""
    mark = next((field for field in MARKS if field in row), None)
    if mark is None:
        raise ValueError("a row needs a target: one of the fields response, preferred, correct and score")
    kind, extra = MARKS[mark]
    known = {mark, "prompt", "images", "source"} | extra
    if unknown := sorted(set(row) - known):
        raise ValueError(f"unknown field {', '.join(map(repr, unknown))} beside {mark!r}; known are "
                         f"{', '.join(sorted(known))}")
    prompts = [row[field] for field in ("prompt", "question", "messages") if field in row]
    pair = row.get("responses", ["", ""])
    number = type(row.get("score", 0)) in (int, float) and math.isfinite(row.get("score", 0))
    rules = {
        "one prompt": len(prompts) == 1 and isinstance(prompts[0], (str, list) if kind == "response" else str),
        "texts as response, critique and source": all(isinstance(row.get(field) or "", str) for field in (
            "response", "critique", "source")) and not ("response" in known and row.get("response") is None),
        "a response that is not empty": kind != "response" or bool(str(row["response"]).strip()),
        "two texts as responses": isinstance(pair, list) and [type(text) for text in pair] == [str, str],
        "two images or two responses": kind != "pictures" or len(image_list(row.get("images"), "images")) == 2,
        "A, B or tie as preferred": kind not in ("pictures", "answers") or row.get("preferred") in ("A", "B", "tie"),
        "true or false as correct": isinstance(row.get("correct", True), bool),
        "a finite number as score": number,
    }
    if wrong := [need for need, holds in rules.items() if not holds]:
        raise ValueError(f"a row with {mark!r} needs {'; '.join(wrong)}")
    return mark, kind


def read_row(row: dict, judge: dict, orders: str) -> list[dict]:
    """What a row asks and wants to hear, once per order: kind, order, prompt (for the system instruction), question,
    images, text, verdict. Raises ValueError."""
    mark, kind = check_row(row)
    prompt = next(row[field] for field in ("prompt", "question", "messages") if field in row)
    images, critique = image_list(row.get("images"), "images"), row.get("critique") or ""
    if kind == "response":
        verdict = parse_verdict(row["response"], judge["which_answer"], None)
        return [{"kind": kind, "order": "given", "prompt": prompt, "question": prompt, "images": images,
                 "text": row["response"], "verdict": verdict}]
    pair = kind in ("pictures", "answers")
    both = pair and orders == "both"
    if both and re.search(r"\b(?i:pictures?|images?|answers?|responses?|options?) [AB]\b", critique):
        raise ValueError(f"write {{A}} and {{B}} for the names, which change in the other order: {critique!r:.120}")
    examples = []
    for order, turn in (("given", 1), ("swapped", -1))[:2 if both else 1]:
        first, second = row.get("responses", ["", ""])[::turn]
        verdict = row[mark] if kind == "pictures" else row.get("preferred") or (
            f"{row['score']:g}" if kind == "score" else judge["kinds"][kind]["verdicts"][not row["correct"]])
        verdict = SWAPPED.get(verdict, verdict) if turn < 0 else verdict
        said = fill(critique, **dict(zip("AB", "AB"[::turn]))) if pair else critique
        question = fill(judge["kinds"][kind]["template"], prompt=prompt, response=row.get("response", ""),
                        response_a=first, response_b=second)
        examples.append({"kind": kind, "order": order, "prompt": prompt, "question": question, "verdict": verdict,
                         "images": images[::turn] if kind == "pictures" else images,
                         "text": said + "\n" * bool(said) + fill(judge["answer"], verdict=verdict)})
    return examples


def answer_frame(processor: Processor) -> tuple[str, int]:
    """What the chat template writes between generation prompt and answer (LLaVA: a space), and the end token after."""
    tokenizer, mark = processor.tokenizer, "(the answer)"
    for form in (str, lambda text: [{"type": "text", "text": text}]):                    # some templates know only one
        chat = [{"role": "user", "content": form("(a question)")}, {"role": "assistant", "content": form(mark)}]
        head = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
        before, found, tail = tokenizer.apply_chat_template(chat, tokenize=False).partition(mark)
        if found:
            break
    ends = [i for i in tokenizer.encode(tail, add_special_tokens=False) if i in processor.stop_ids]
    return before.removeprefix(head) if before.startswith(head) else "", [*ends, tokenizer.eos_token_id][0]


def encode_target(processor: Processor, frame: tuple[str, int], text: str) -> torch.Tensor:
    """(n,) label tokens of an answer: its own, as generation would see them, and the end token. Raises ValueError."""
    if typed := [token for token in processor.reserved_tokens if token in text]:
        raise ValueError(f"special token {typed[0]} in the target")
    ids = processor.tokenizer.encode(frame[0] + text, add_special_tokens=False)
    return torch.tensor([*ids, frame[1]], dtype=torch.int64)


def spoken(messages: list) -> str:
    """What the user says in a row's messages, which nobody has checked yet. Raises ValueError."""
    try:
        return user_text(messages)
    except (KeyError, TypeError) as error:
        raise ValueError(f"messages need role and content, as text or parts ({error!r})") from error


def load_examples(path: str, dataset: int, args: Args, processor: Processor,
                  limit: int) -> tuple[list[Example], list[str]]:
    """Read one file: its examples, and what was wrong with the rows skipped. Raises ValueError with file and line."""
    judge, frame, folder = processor.files["judge"], answer_frame(processor), os.path.dirname(os.path.abspath(path))

    def build(index: int, source: str, row: dict) -> list[Example]:
        examples = []
        for ask in read_row(row, judge, args.data.orders):
            system, said = judge["system_instruction"], ask["prompt"]
            if "{prompt}" in system:
                system = fill(system, prompt=said if isinstance(said, str) else spoken(said))
            prompt = make_prompt(processor, index, source, ask["question"], ask["images"], folder=folder,
                                 system_prompt=system, max_prompt_tokens=args.data.max_tokens,
                                 verify_images=args.data.verify_images)
            target = encode_target(processor, frame, ask["text"])
            if (size := len(prompt.input_ids) + len(target)) > args.data.max_tokens:
                raise ValueError(f"example too long: {size} tokens, {len(target)} of them target; the limit is "
                                 f"{args.data.max_tokens}")
            examples.append(Example(prompt, ask["kind"], target, ask["text"], ask["verdict"], ask["order"], dataset,
                                    row.get("source") or os.path.basename(path)))
        return examples

    rows, skipped = load_rows(path, build, on_bad_row=args.data.on_bad_row, limit=limit)
    return [example for row in rows for example in row], skipped


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


def load_data(run: Run) -> tuple[Processor, list[list[list[Example]]], list[float], list[Example]]:
    """Processor (its files["judge"] is what judge.json will hold), training sets as lists of prompts (each a list of
    examples) and their weights, and the held-out examples; the same on every rank.

    Raises:
        UserError: on every rank alike: bad checkpoint files, templates or rows, with file and line.
    """
    args, problem, loaded, weights = run.args, None, {"data": [], "eval_data": []}, []
    try:
        processor = Processor(str(resolve_folder(args.model.model)), args.data.min_pixels, args.data.max_pixels)
        processor.files["judge"] = judge_settings(args.data, processor.files["judge"])
        for name, limit in (("data", args.data.max_rows), ("eval_data", args.data.max_eval_rows)):
            for k, (path, weight) in enumerate(parse_datasets(getattr(args.data, name))):
                examples, skipped = load_examples(path, k, args, processor, limit)
                loaded[name].append(examples)
                weights += [weight] if name == "data" else []
                if skipped and run.rank == 0:
                    print(f"--{name}: skipped {len(skipped)} bad rows of {path}:", *skipped[:5], sep="\n  ", flush=True)
        count_judgements(processor.files["judge"], [example for part in loaded["data"] for example in part])
    except ValueError as error:
        problem = str(error)
    fail_together(problem)
    datasets = []
    for part in loaded["data"]:
        groups: dict[tuple, list[Example]] = {}
        for example in part:                                  # the targets of a prompt share its copy in a packed row
            groups.setdefault((example.prompt.text, example.prompt.images), []).append(example)
        datasets.append(list(groups.values()))
    weights = [float(len(part)) if weight is None else weight for part, weight in zip(datasets, weights)]
    return processor, datasets, weights, [example for part in loaded["eval_data"] for example in part]


def count_judgements(judge: dict, examples: list[Example]) -> None:
    """Note in judge.json's content what the judge was trained on. Raises ValueError: too many different scores."""
    for kind, settings in judge["kinds"].items():
        own = [example for example in examples if example.kind == kind]
        bare = sum(example.text == fill(judge["answer"], verdict=example.verdict) for example in own)
        settings |= {"examples": len(own), "critiques": len(own) - bare}
        if kind == "score" and own:
            settings["verdicts"] = sorted({example.verdict for example in own}, key=float)
            if len(settings["verdicts"]) > 32:
                raise ValueError(f"--data: {len(settings['verdicts'])} different scores; round them to at most 32")


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
    judge = problem = None
    try:
        model = skeleton(processor.config)
        model.model.visual.to(run.dtype).requires_grad_(False)  # replicated and outside the mixed-precision policy
        judge = Judge(model, run.args.update.head_chunk)
        judge.spelled = load_sharded(run, judge, resolve_folder(run.args.model.model))
    except ValueError as error:
        problem = str(error)
    fail_together(problem)
    if run.args.model.gradient_checkpointing:
        judge.model.model.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    return judge


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

    def __init__(self, run: Run, processor: Processor, datasets: list[list[list[Example]]], weights: list[float],
                 dropped: int = 0):
        self.run, self.processor, self.datasets = run, processor, datasets
        self.which, self.number = mix(weights, run.args.update.steps * run.args.update.prompts_per_step)
        self.pool = ThreadPoolExecutor(run.args.data.data_threads, thread_name_prefix="pictures")
        self.pending: dict[int, tuple] = {}
        self.examples: dict[int, list[list[Example]]] = {}                          # of the pending steps, by prompt
        self.dropped = dropped                                                      # prompts since the start of the run

    def prefetch(self, index: int) -> None:
        """Start decoding this rank's pictures of the 0-based step ``index``."""
        size, seed = self.run.args.update.prompts_per_step, self.run.args.run.seed
        draws = range(len(self.which))[index * size:(index + 1) * size]
        picks = take_rows(self.which[draws.start:draws.stop], self.number[draws.start:draws.stop],
                          [len(part) for part in self.datasets], seed)
        self.examples[index] = [self.datasets[k][row] for k, row in picks]
        self.pending[index] = self.submit([group[0].prompt for group in self.examples[index]], list(draws))

    def __enter__(self) -> "PromptLoader":
        return self

    def __exit__(self, *_) -> None:
        self.pool.shutdown(cancel_futures=True)

    def submit(self, prompts: list[Prompt], draws: list[int]) -> tuple:
        own = range(self.run.rank, len(prompts), self.run.world)
        return prompts, draws, {i: self.pool.submit(load_pixels, prompts[i], self.processor) for i in own}

    def take(self, index: int) -> StepPrompts:
        """The prompts of a step, decoded."""
        prompts = self.collect(*self.pending.pop(index))
        if len(prompts.dropped) == len(prompts.prompts):
            raise UserError(f"no prompt is left in step {index + 1}: no picture of {prompts.prompts[0].source} and the others decodes")
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


def as_samples(targets: list[list[torch.Tensor]]) -> Samples:
    """Targets by prompt, as the responses that packed rows are made of."""
    flat = [(group, number, target) for group, part in enumerate(targets) for number, target in enumerate(part)]
    tokens = torch.cat([torch.zeros(0, dtype=torch.int64), *(target for *_, target in flat)])
    integers = lambda values: torch.tensor(list(values), dtype=torch.int64)  # noqa: E731
    return Samples(group=integers(group for group, *_ in flat), number=integers(number for _, number, _ in flat),
                   lengths=integers(len(target) for *_, target in flat), tokens=tokens,
                   truncated=torch.zeros(len(flat), dtype=torch.bool), logprobs=torch.zeros(len(tokens)))


# ---------------------------------------------------------------------------------------------------------------------
# Update
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


def update(run: Run, judge: Judge, optimizer: torch.optim.Optimizer, prompts: StepPrompts, samples: Samples,
           step: int) -> tuple[dict[str, float], torch.Tensor]:
    """One optimizer step on the mean of -log p over all target tokens of all ranks. Also returns logp (N,)."""
    lr, tokens = run.args.update.lr * lr_factor(step, run.args.update), max(1, len(samples.tokens))
    judge.train()
    compute_features(run, judge, prompts)
    done, logprobs = [], torch.zeros(len(samples.tokens))
    for row, attention in packed_rows(run, judge.model, prompts, samples):
        logp = judge(row, attention)                                                                           # (T,)
        (-logp.sum() * (run.world / tokens)).backward()                       # FSDP averages gradients over ranks
        done.append((row.flat, logp.detach()))
    for flat, logp in done:                                              # not above: .cpu() waits for the device
        logprobs[flat] = logp.cpu()
    dist.all_reduce(logprobs)
    norm, applied = apply_gradients(run, judge, optimizer, lr)
    loss = -float(logprobs.double().sum()) / tokens
    metrics = {"train/lr": lr, "train/skipped": float(not applied), "train/tokens": len(samples.tokens),
               "train/examples": len(samples), "train/grad_norm": norm if applied else 0.0}
    return metrics | ({"train/loss": loss} if math.isfinite(loss) else {}), logprobs          # JSON has no NaN


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


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, records, export
# ---------------------------------------------------------------------------------------------------------------------


def falls_due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps (-1: only after the last one, 0: never) happens after ``step``."""
    return (step == last and every != 0) or (every > 0 and step % every == 0)


def evaluation_due(args: Args, step: int, rows: int) -> bool:
    """Whether to evaluate after ``step``; --eval_every -1: when it completes a pass over the data."""
    passes = [done * args.update.prompts_per_step // rows for done in (step - 1, step)]
    return bool(args.data.eval_data) and (falls_due(step, args.eval.eval_every, args.update.steps)
                                          or (args.eval.eval_every == -1 and passes[1] > passes[0]))


@torch.no_grad()
def evaluate(run: Run, processor: Processor, judge: Judge, examples: list[Example], log: RunLogger,
             step: int) -> dict[str, float]:
    """Judge every held-out example once over all ranks, in words and by the likelihood of every verdict; write
    <out>/eval/eval_result_{step}.json; return the eval/ metrics."""
    started, records, folder = time.perf_counter(), [], run.args.run.out / "eval"
    order = sorted(range(len(examples)), key=lambda i: -len(examples[i].prompt.input_ids))   # batches of one length
    with PromptLoader(run, processor, [], []) as loader:
        for start in range(0, len(order), run.args.update.prompts_per_step):
            chunk = order[start:start + run.args.update.prompts_per_step]
            prompts = loader.collect(*loader.submit([examples[i].prompt for i in chunk], chunk))
            own = generate(run, processor, judge, prompts, step)
            texts = {int(g): text for part in all_gather_json(own) for g, text in part.items()}
            scores = score_verdicts(run, processor, judge, [examples[i] for i in chunk], prompts)
            records += [judgement_record(processor.files["judge"], chunk[g], examples[chunk[g]], texts[g], *scores[g])
                        for g in sorted(scores)]
        dropped = loader.dropped
    if not records:
        raise UserError("evaluation: no held-out example is left; all pictures failed to decode")
    records.sort(key=lambda record: record["index"])
    summary = {"step": step, "dropped": dropped} | summarise(records)
    if run.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        result = json.dumps({"summary": summary, "records": records}, indent=1)
        write_durably(folder / f"eval_result_{step}.json", result)
    metrics = {f"eval/{name}": value for name, value in summary.items() if isinstance(value, float)}
    for name in ("source", "kind", "order"):
        metrics |= {f"eval/{name}/{key}": value for key, value in summary[f"accuracy_per_{name}"].items()}
    metrics |= {"eval/num_samples": len(records), "eval/dropped_prompts": dropped,
                "eval/seconds": time.perf_counter() - started}
    count = run.args.run.log_samples
    shown = records[::max(1, len(records) // max(1, count))][:count] if run.rank == 0 else []
    log.samples(step, records, [draw_sample([read_image(path) for path in record["info"]["images"]],
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


def generate(run: Run, processor: Processor, judge: Judge, prompts: StepPrompts, step: int) -> dict[int, str]:
    """This rank's judgements in words, by Hugging Face's `generate` in batches padded on the left."""
    args, model, tokenizer = run.args.eval, judge.model, processor.tokenizer
    own = [g for g, owner in enumerate(prompts.owners) if owner == run.rank and g not in prompts.dropped]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else processor.stop_ids[0]
    greedy = args.eval_temperature == 0
    sampling = {} if greedy else {"temperature": args.eval_temperature, "top_p": args.eval_top_p, "top_k": 0}
    texts: dict[int, str] = {}
    judge.eval()
    torch.manual_seed(run.args.run.seed * 1_000_003 + step * run.world + run.rank)            # only sampling reads it
    with unsharded(judge), plain_attention(model):
        for start in range(0, len(own), args.eval_batch):
            batch = own[start:start + args.eval_batch]
            longest = max(prompts.lengths[g] for g in batch)
            ids, mask = torch.full((len(batch), longest), pad), torch.zeros(len(batch), longest, dtype=torch.int64)
            for k, g in enumerate(batch):
                ids[k, longest - prompts.lengths[g]:] = prompts.prompts[g].input_ids
                mask[k, longest - prompts.lengths[g]:] = 1
            inputs = {"input_ids": ids, "attention_mask": mask,
                      "mm_token_type_ids": (ids == model.config.image_token_id).int()}
            if pictures := [prompts.patches[g] for g in batch if g in prompts.patches]:
                inputs |= zip(("pixel_values", "image_grid_thw"), map(torch.cat, zip(*pictures)))
            tokens = model.generate(
                **{name: value.to(run.device) for name, value in inputs.items()}, do_sample=not greedy, **sampling,
                max_new_tokens=args.eval_max_new_tokens, eos_token_id=list(processor.stop_ids), pad_token_id=pad,
                suppress_tokens=list(processor.banned_ids), use_cache=True, synced_gpus=False)
            texts |= zip(batch, tokenizer.batch_decode(tokens[:, longest:], skip_special_tokens=True))
    return texts


@contextmanager
def plain_attention(model: nn.Module):
    """transformers' own attention in the language model: `generate` pads, and knows no packed rows."""
    configs = [model.config.text_config, model.model.language_model.config]
    kept = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        for config, name in zip(configs, kept):
            config._attn_implementation = name


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


def judgement_record(judge: dict, index: int, example: Example, text: str, loss: float,
                     chances: dict[str, float]) -> dict:
    """One JSON-ready record of the evaluation."""
    words = None if example.kind == "response" else judge["kinds"][example.kind]["verdicts"]
    return {"info": {"row": example.prompt.source, "dataset": example.dataset, "source": example.source,
                     "kind": example.kind, "images": list(example.prompt.images),
                     "question": user_text(example.prompt.messages)},
            "generated_text": text, "response_text": example.text, "gt_answer": example.verdict,
            "predicted_answer": parse_verdict(text, judge["which_answer"], words), "index": index,
            "order": example.order, "loss": loss, "tokens": len(example.target), "probabilities": chances}


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


def user_text(messages: list[dict]) -> str:
    """What the user says in a conversation, without markup and image places."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    return "\n".join(part if isinstance(part, str) else "\n".join(p["text"] for p in part if p.get("type") == "text")
                     for part in said)


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
    args, flags, update = run.args, flags_of(run.args), run.args.update
    if run.rank == 0:
        (args.run.out / "args.json").write_text(json.dumps(flags, indent=2) + "\n")
    log = RunLogger(args.run.out, run.rank == 0, {"arguments": flags}, update.steps, first_step)
    log.line(f"{rows} training prompts, {len(held_out)} held-out examples; {update.steps} steps of "
             f"{update.prompts_per_step} prompts = {update.steps * update.prompts_per_step / max(1, rows):.1f} passes; "
             f"output: {args.run.out}")
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
    records, pictures = [], []
    for group, number, logp in zip(samples.group.tolist(), samples.number.tolist(), samples.split(logprobs)):
        prompt, target = examples[group][number].prompt, examples[group][number].text
        records.append({"row": prompt.source, "order": examples[group][number].order, "images": list(prompt.images),
                        "question": user_text(prompt.messages), "target": target,
                        "nats_per_token": f"{-float(logp.mean()):.3f}"})
    for record in records[:run.args.run.log_samples]:
        pictures.append(draw_sample([read_image(path) for path in record["images"]], record["question"],
                                    record["target"], f"{record['nats_per_token']} nats per token"))
    log.samples(step, records, pictures)


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
NEUTRAL_FLAGS = {"attention", "gradient_checkpointing", "data_threads", "verify_images", "max_tokens_per_pack",
                 "share_prompts", "head_chunk", "max_epochs", "eval_data", "max_eval_rows"} \
    | {field.name for group in (EvalArgs, CheckpointArgs, RunArgs) for field in dataclasses.fields(group)} - {"seed"}


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
