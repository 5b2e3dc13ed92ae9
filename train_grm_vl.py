"""Supervised training. A vision-language model learns to judge images and answers, as a generative
reward model whose judgements end in a verdict; or it learns the responses of any rows (SFT; the
export is a --model of train_ppo_vl.py).

    torchrun --nproc_per_node 8 train_grm_vl.py --model Qwen/Qwen2.5-VL-7B-Instruct --data a.jsonl
    torchrun --nproc_per_node 2 train_grm_vl.py  # no flags: the embedded toy (launch/toy.py)
    python train_grm_vl.py --help                # flags by stage: those that most runs touch

One step, in the order of `main`:

    prompts + images + targets -> packs -> update on the next-token loss of the targets -> report

A row of --data is a JSON object, and its fields decide its kind; image paths are relative to its
file. "source" is optional in every kind, "videos" in those with text to judge. A response needs no
<answer>: without one it is evaluated by its loss and, if it is short, by exact match.

    response   {"prompt": "what is this?", "images": ["x.png"], "response": "A cat."}
               {"messages": [...], "images": ["x.png"], "response": "Yes. <answer>yes</answer>"}
               {"messages": [question, answer, question, answer], "images": ["x.png"]}
    pictures   {"prompt": "a red cross", "images": ["a.png", "b.png"], "preferred": "A",
                "critique": "{A} is red."}
    videos     {"prompt": "a cross that turns", "videos": ["a.mp4", "b.mp4"], "preferred": "B"}
    answers    {"prompt": "what is this?", "images": ["x.png"], "responses": ["a cat", "a dog"],
                "preferred": "tie"}
    correct    {"question": "what is this?", "images": ["x.png"], "response": "a cat",
                "correct": true}
    rubric     {"question": "what is this?", "images": ["x.png"], "response": "a cat",
                "criterion": "names the animal", "correct": true}
    score      {"question": "what is this?", "images": ["x.png"], "response": "a cat", "score": 4}

If a row's messages end with the assistant's, every answer is learned, in one packed row, except those
with "loss": false or "weight": 0; "reasoning_content" may hold a thought. An evaluation generates the
last answer.

Pairs are shown in both orders (--orders); {A} and {B} in a critique become the names that the two
sides have in that order. The template of its kind turns a row into a question (--templates). The
judge.json of an export contains templates and verdicts, so that a judge is always asked as it was
trained.

Shapes: N target tokens in a step, L tokens in a pack, T of them targets.

Invariants, each with a test: the labels are what the chat template writes before the answer (an
empty thought, a space), the answer's tokens and its first end token, and nothing else; packs and
ranks affect only rounding; data order is a function of (seed, counters).
"""

import itertools
import math
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also with PYTHONSAFEPATH

from common.ground import standins, versions

versions.check()
standins.for_help()  # --help does not wait for the imports below

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import checkpoint, distributed, flags, identity, logging, losses, run_folder
from common.buffers import Batch
from common.data.loader import (
    PromptLoader,
    batches_in_order,
    draw_batches,
    repeated_rows,
    shares_of,
)
from common.data.overlap import tell_shared_rows
from common.data.processor import Processor
from common.data.rows import Example, Prompt, media_parts
from common.flags import flag
from common.ground import process, toy
from common.ground.files import UserError, parse_json, read_text
from common.memory import budget, memory
from common.memory.recompute import explain_memory
from common.model import build, fsdp, packs, vlm, weights
from common.model.policy import Policy, logprobs_of
from common.reports import accuracy
from common.reports.records import sample_cards, sample_records
from common.rewards import judgements
from common.rollout import prompts_together, rollout
from common.sampling import Sampling


def main(argv: list[str] | None = None) -> logging.Metrics:
    """Train, or only evaluate (--eval_only). Returns the last metrics."""
    args = parse_args(argv)
    run_folder.leave_if_stopped(args.out)
    ranks = distributed.start(args.timeout, args.hsdp, args.rollout_shards)
    rows = load_rows(args)
    fingerprint = identity.fingerprint_of(args)  # equal on all ranks
    identity.compare_rows(row.prompt for row in (*rows.train, *rows.held_out))
    args = run_folder.choose_folder(args, fingerprint)
    state = TrainState()
    checkpoints = checkpoint.Checkpoints(args, state, fingerprint)
    args = count_steps(args, len(rows.train), checkpoints.saved, fingerprint)
    judge = load_judge(args, rows, ranks)

    trained = fsdp.Trainable(judge, adamw(judge, args.lr, args), args)
    roles = {"judge": trained}
    checkpoints.resume(roles, args.steps, IDENTITY)
    log = open_log(args, rows, state.step)
    last = args.steps
    if not args.eval_only:  # an evaluation has nothing to save
        process.catch_signals()

    with checkpoints, open_loader(args, rows, state) as loader:
        for step in range(state.step, max(state.step, last) + 1):  # the number of finished steps
            # Between two steps: save, evaluate, export, stop. A resumed run starts here and does
            # whatever was left undone.
            checkpoints.save_if_due(step, last)
            if checkpoints.saved_to_stop(step, last):
                break
            due = logging.evaluation_due(step, last, state.pass_ended, args)
            if due and rows.held_out and not log.has_evaluation(step):
                evaluate(judge, rows, state, log, args)
            rows.note_evaluation(log.newest_evaluation())
            checkpoints.save_if_best(step, log.best_evaluation(args.keep_best))
            checkpoints.export_if_due(step, last, {"export": trained}, rows.save_files)
            # a signal may have come meanwhile
            if step == last or args.eval_only or checkpoints.saved_to_stop(step, last):
                break

            # One step.
            logging.timer.reset()
            with logging.timer("data"):
                batch = next_batch(loader, judge)
            with logging.timer("update"), explain_memory(trained.module.model):
                metrics = update(trained, batch, state)
            advance(state, metrics, batch, rows, args)
            state.metrics |= performance(batch) | checkpoints.metrics()
            # logged before it is saved
            report(log, rows, batch, state, args)
            fsdp.check_skipped_updates(roles)

    log.close(state.step, last)
    return state.metrics


# -------------------------------------------------------------------------------------------------
# Flags of the judge. The flags that both scripts share (models, data, optimizers, checkpoints, runs)
# are in common/flags.py.
# -------------------------------------------------------------------------------------------------


def check_not_file(text: str) -> None:
    """Raises UserError: the text looks like the name of a file that does not exist."""
    is_name = Path(text).suffix and len(text.split()) == 1 and "{" not in text
    if is_name and not os.path.isfile(text):
        raise UserError(f"{text}: no such file")


@dataclass(frozen=True)
class JudgeArgs:
    """judgements (a text, or a file that contains it; empty: judge.json of --model, else built in)"""

    system_instruction: str = flag(
        "", "system message; {prompt} in it becomes the row's prompt", check=check_not_file
    )
    templates: str = flag(
        "",
        "JSON {kind: question}, in which braces become columns of the row: correct and score hold {prompt} "
        "and {response}, rubric also {criterion}, answers {prompt}, {response_a} and {response_b}, pictures "
        "{prompt} and two <image>, videos {prompt} and two <video>",
        check=check_not_file,
    )
    orders: str = flag(
        "both",
        "orders in which pairs are shown, in training and evaluation",
        choices=("both", "given"),
    )


@dataclass(frozen=True)
class UpdateArgs:
    """update"""

    max_epochs: int = flag(
        0, "passes over the data, rounded up to whole steps, unless --steps is given; 0: 2"
    )
    lr: float = flag(1e-5, "learning rate")


@dataclass(frozen=True)
class EvalArgs:
    """evaluation"""

    eval_max_new_tokens: int = flag(1024, "longest generated judgement, tokens", low=1)


@dataclass(frozen=True)
class Args(
    flags.ModelArgs,
    flags.DataArgs,
    JudgeArgs,
    UpdateArgs,
    flags.OptimArgs,
    EvalArgs,
    flags.CheckpointArgs,
    flags.RunArgs,
):
    """All flags."""

    steps: int = flag(0, "steps of the run; 0: those of --max_epochs")

    def automatic(self) -> dict:
        return {"max_epochs": 0 if self.steps else 2}


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags override --config, which overrides defaults. Without --model and --config the run is
    the toy's.

    Raises:
        UserError: an unknown flag, a bad value, or a combination that cannot work.
    """
    args = flags.parse(Args, __doc__, argv, toy=("questions", "grm_args.json"))
    refuse = flags.Refusals()
    flags.check_shared(refuse, args)
    refuse.raise_any()
    return read_texts(args)


def read_texts(args: Args) -> Args:
    """Templates and instruction; those that name a file are read from it."""
    texts = {}
    for name in JudgeArgs.__annotations__:
        value = getattr(args, name)
        if os.path.isfile(value):
            texts[name] = read_text(value).strip("\n")
    return replace(args, **texts)


def count_steps(args: Args, rows: int, saved: dict, fingerprint: dict) -> Args:
    """The arguments with the --steps that --max_epochs take, counted from the checkpoint ``saved``."""
    if args.steps:
        return args
    left = args.max_epochs * rows
    if saved and saved["fingerprint"]["data"] == fingerprint["data"]:
        left -= saved["rows_drawn"]
    steps = saved.get("step", 0) + max(0, math.ceil(left / args.prompts_per_step))
    return replace(args, steps=steps, derived=(*args.derived, "steps"))


# The flags that identify a run: if one has changed, --resume auto refuses the checkpoint.
IDENTITY = {
    *flags.SHARED_IDENTITY,
    *JudgeArgs.__annotations__,
}


# -------------------------------------------------------------------------------------------------
# Data: from rows to questions, targets and verdicts. judge.json keeps their templates.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExampleGroup:
    """A prompt and its examples, whose targets share one copy of the prompt in a pack."""

    prompt: Prompt
    examples: list[Example]


@dataclass
class Rows:
    """The data of a run, the same on every rank: the processor, and checked rows."""

    processor: Processor
    settings: judgements.JudgeSettings  # an export's judge.json
    train_sets: list[list[ExampleGroup]]
    held_out: list[Example]

    @cached_property
    def train(self) -> list[ExampleGroup]:
        return list(itertools.chain(*self.train_sets))

    def note_evaluation(self, metrics: logging.Metrics) -> None:
        """Let exports say how often the judge gives a pair the same verdict in both orders."""
        self.settings.position_consistency = metrics.get("eval/position_consistency")

    def save_files(self, folder: Path) -> None:
        """Write the files of an export beside its weights and config.json."""
        self.processor.save(folder, vars(self.settings))


def load_rows(args: Args) -> Rows:
    """Read the checkpoint's processor and all rows; those of the embedded toy may have to be written first.

    Raises:
        UserError: on every rank; bad checkpoint files, templates or rows, with file and line.
    """
    distributed.once_per_machine(toy.write_if_missing, args.model)
    with distributed.raise_on_all_ranks():
        processor = Processor(weights.resolve_folder(args.model, weights=False), args)
        processor.check_options()
        templates = parse_json(args.templates or "{}", "--templates")
        settings = judgements.JudgeSettings.to_train(processor, templates, args.system_instruction)
        loaded = load_examples(args.data, args, processor, settings)
        held_out = load_examples(args.eval_data, args, processor, settings)
        settings.note_training(example.prompt for examples in loaded for example in examples)
        train, held_out = (
            list(itertools.chain(*map(last_answers, sets))) for sets in (loaded, held_out)
        )
        asked = ([(answer.prompt, answer.text) for answer in part] for part in (train, held_out))
        tell_shared_rows(*asked)
    train_sets = [group_by_prompt(examples) for examples in loaded]
    return Rows(processor, settings, train_sets, held_out)


def load_examples(
    spec: str,
    args: Args,
    processor: Processor,
    settings: judgements.JudgeSettings,
) -> list[list[Example]]:
    """The examples of each file of --data or --eval_data. Raises UserError with file and line."""
    frame = judgements.answer_frame(processor)
    return [
        judgements.load_judgements(path, processor, settings, args, args.orders, frame)
        for path, _ in flags.parse_datasets(spec)
    ]


def last_answers(examples: list[Example]) -> list[Example]:
    """The examples, conversations with their last answer alone, which an evaluation generates."""
    last = {}
    for example in examples:
        stream, prompt = example.stream, example.prompt
        last[prompt.source, prompt.order] = stream.last if stream else example
    return list(last.values())


def group_by_prompt(examples: list[Example]) -> list[ExampleGroup]:
    """The examples grouped by their prompts, in the order of first occurrence. A conversation that shows
    images in later turns is alone, as its prompt brings them."""
    groups = {}
    for example in examples:
        prompt = example.prompt
        key = (prompt.text, prompt.images)
        if len(prompt.grids) > len(media_parts(prompt.messages)):
            key += (prompt.source,)
        groups.setdefault(key, ExampleGroup(example.prompt, [])).examples.append(example)
    return list(groups.values())


def open_loader(args: Args, rows: Rows, state: "TrainState") -> PromptLoader:
    """The training prompts with their examples, in order, continuing where the run stopped."""
    shares = shares_of(args.data, rows.train_sets)
    size, seed = args.prompts_per_step, args.seed
    batches = draw_batches(rows.train_sets, shares, size, seed, start=state.rows_drawn)
    return PromptLoader(rows.processor, args, batches)


def next_batch(loader: PromptLoader, judge: Policy) -> Batch:
    """The prompts of a step with their targets; prompts whose images do not decode get none."""
    groups, prompts = loader.take()
    examples = [group.examples for group in groups]
    return packs.with_examples(judge.model, prompts, examples)


@dataclass
class TrainState:
    """What a resumed run needs besides weights and optimizer state. Each checkpoint contains it."""

    step: int = 0  # finished steps
    rows_drawn: int = 0  # of --data
    pass_ended: bool = False  # in the last step
    dropped_prompts: int = 0  # because an image did not decode
    loss_mean: float | None = None  # running average
    metrics: logging.Metrics = field(default_factory=dict)  # of the last step

    def state_dict(self) -> dict:
        return vars(self)

    def load_state_dict(self, saved: dict, changed: set[str]) -> None:
        """Restore what was saved; passes over other data begin anew."""
        vars(self).update(saved)
        if "data" in changed:
            self.rows_drawn, self.pass_ended = 0, False


def advance(
    state: TrainState, metrics: logging.Metrics, batch: Batch, rows: Rows, args: Args
) -> None:
    """Count a finished step: update the state, and add its counters to the metrics."""
    prompts, count = args.prompts_per_step, len(rows.train)
    state.step += 1
    state.rows_drawn += prompts
    state.pass_ended = state.rows_drawn % count < prompts
    state.dropped_prompts += len(batch.dropped)
    metrics |= {
        "train/dropped_prompts": state.dropped_prompts,
        "train/epoch": state.rows_drawn / count,
    }
    state.metrics = metrics


# -------------------------------------------------------------------------------------------------
# Model: built on meta, sharded here, filled from safetensors
# -------------------------------------------------------------------------------------------------


def build_judge(args: Args, processor: Processor, device: torch.device) -> Policy:
    """The model on meta; it will compute on ``device``. Raises UserError on every rank: bad files."""
    longest = args.max_prompt_tokens + args.eval_max_new_tokens  # with its judgement
    with distributed.raise_on_all_ranks():
        return Policy(build.Builder(args, device, longest).actor(), processor)


def plan_memory(args: Args, judge: Policy, rows: Rows, ranks: int) -> budget.MemoryPlan:
    """The memory of a step on so many ranks, and of an evaluation. That is planned with --slots or with a
    single slot; it uses more if memory is free."""
    prompt = budget.longest_prompt(row.prompt for row in (*rows.held_out, *rows.train))
    length = prompt + args.eval_max_new_tokens
    target = budget.longest_example(example for row in rows.train for example in row.examples)
    plan = budget.MemoryPlan(
        {"judge": judge},
        shards=args.hsdp or ranks,
        args=args,
        offload="none",
        longest=length if rows.held_out else 0,
        group=target,
        longest_target=target,
        updates=not args.eval_only,
    )
    if rows.held_out:
        plan.fixed["evaluate"] = partial(plan.decoding, "judge", length, args.slots or 1)
    return plan


def load_judge(args: Args, rows: Rows, ranks: distributed.Ranks) -> Policy:
    """The model, sharded and loaded. Raises UserError on every rank: bad files, or too little
    memory."""
    judge = build_judge(args, rows.processor, ranks.device)
    budget.fit(plan_memory(args, judge, rows, ranks.world), ranks)
    judge.model.setup.team = ranks.team
    with distributed.raise_on_all_ranks():
        shard(judge, ranks.mesh)
        weights.fill(judge, ranks.device, args.seed)
    return judge


# -------------------------------------------------------------------------------------------------
# FSDP2 and AdamW, for a fork that wraps a model or takes its steps in another way. Weights gathered
# for a rollout, offloading and schedules are in common/model/fsdp.py.
# -------------------------------------------------------------------------------------------------


def shard(module: vlm.Wrapper, mesh: DeviceMesh) -> None:
    """ZeRO-3: every decoder layer, then the root. A frozen vision tower stays outside of FSDP, and on one
    rank all that is frozen."""
    model = module.model
    dtype = model.setup.dtype
    full = dtype == torch.float32  # then nothing is cast: tests compute in float64
    mixed = MixedPrecisionPolicy(
        param_dtype=None if full else dtype,
        reduce_dtype=None if full else torch.float32,
        # keeps the tower's rotary angles float32; torch 2.11 would cast them, but only when
        # recomputing
        cast_forward_inputs=False,
    )
    whole = vlm.whole_parameters(module, shards=mesh.shape[-1])
    for part in vlm.float32_parts(model):  # before the layers, which would take them along
        fully_shard(part, mesh=mesh, ignored_params=whole)
    for layer in vlm.layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=mixed, ignored_params=whole)
    fully_shard(module, mesh=mesh, mp_policy=mixed, ignored_params=whole)


def adamw(module: nn.Module, lr: float, args: flags.OptimArgs) -> torch.optim.Optimizer:
    """AdamW on the trained parameters; matrices decay, biases and norms (one dimension) do not. A
    group may have a learning rate of its own."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return fsdp.AdamW(groups, lr=lr, fused=True, betas=(0.9, args.adam_beta2))


def backward(loss: Tensor) -> None:
    """Add the gradient of a pack's share of a loss. Shares sum over the ranks, but FSDP averages."""
    (loss * dist.get_world_size()).backward()


def take_step(trained: fsdp.Trainable, step: int) -> tuple[float, bool]:
    """Clip by the model's global norm and update, at the learning rates of ``step`` (from 1). Returns the
    norm before clipping and whether the update was applied: it is skipped if the norm, which is the
    same on all ranks, is not finite."""
    norm = trained.clip_gradients()
    applied = math.isfinite(norm)
    if applied:
        trained.set_rates(step)
        trained.optimizer.step()
    trained.end_update(step, applied)
    return norm, applied


# -------------------------------------------------------------------------------------------------
# Update
# -------------------------------------------------------------------------------------------------


def update(trained: fsdp.Trainable, batch: Batch, state: TrainState) -> logging.Metrics:
    """The optimizer update of the next step, on the mean of -log p over the target tokens of all
    ranks."""
    judge, tokens, step = trained.module, len(batch.tokens), state.step + 1
    judge.train()
    vlm.compute_features_unless_trained(judge.model, batch)
    done = []
    for pack in packs.of_batch(judge.model, batch):
        logp, *_ = judge(pack)  # (T,)
        backward(-logp.sum() / tokens)
        done.append((pack.flat, logp.detach()))
    logprobs = packs.join_packs(done, tokens)  # (N,)
    norm, applied = take_step(trained, step)
    metrics = {
        "train/lr": trained.rates_at(step)[0],
        "train/skipped": float(not applied),
        "train/tokens": tokens,
        "train/examples": len(batch),
        "train/grad_norm": norm if applied else 0.0,
    }
    loss = -float(logprobs.double().sum()) / tokens
    if math.isfinite(loss):  # JSON has no NaN
        before = loss if state.loss_mean is None else state.loss_mean
        state.loss_mean = 0.9 * before + 0.1 * loss
        metrics |= {"train/loss": loss, "train/loss_mean": state.loss_mean}
    return metrics


# -------------------------------------------------------------------------------------------------
# Evaluation
# -------------------------------------------------------------------------------------------------


# what the console shows of an evaluation: word -> metric
EVALUATION_COLUMNS = {
    "accuracy": "eval/accuracy",
    "parse_rate": "eval/parse_rate",
    "position_consistency": "eval/position_consistency",
    "exact_match": "eval/exact_match",
    "loss": "eval/loss",
}
# ... and of a step
STEP_COLUMNS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "tokens/s": "perf/tokens_per_second",
}


def evaluate(
    judge: Policy, rows: Rows, state: TrainState, log: logging.RunLogger, args: Args
) -> logging.Metrics:
    """Judge every held-out example, spread over the ranks: by a generated judgement, and by the
    likelihood of every verdict. Log the judgements, and return the eval/ metrics."""
    started = time.perf_counter()
    records, dropped = judge_all(judge, rows, args)
    summary: dict = {"step": state.step, "dropped": dropped} | accuracy.summarise_judgements(
        records
    )
    metrics = {f"eval/{name}": value for name, value in summary.items() if type(value) is float}
    for name in ("source", "kind"):
        for key, value in summary[f"accuracy_per_{name}"].items():
            metrics[f"eval/{name}/{key}"] = value
    metrics |= {
        "eval/num_samples": len(records),
        "eval/dropped_prompts": dropped,
        "eval/seconds": time.perf_counter() - started,
    }
    state.metrics |= metrics
    evaluated = {"summary": summary, "records": list(map(evaluation_record, records))}
    log.json(f"eval/eval_result_{state.step}.json", evaluated)
    log_samples(log, state.step, records, stem="eval")
    # written last: if this record is missing, a resumed run evaluates again
    log.evaluation(state.step, metrics, EVALUATION_COLUMNS)
    return metrics


@torch.no_grad()
def judge_all(judge: Policy, rows: Rows, args: Args) -> tuple[list[dict], int]:
    """The records of all held-out examples, in order, and the number of those that were dropped
    because an image does not decode.

    Raises:
        UserError: no example is left.
    """
    batches = batches_in_order(
        rows.held_out, prompts_together(args.slots, args.rollout_shards, samples=1)
    )
    records, first, dropped = [], 0, 0  # first: index of the first example of a batch
    with PromptLoader(rows.processor, args, batches) as loader:
        for _ in batches:
            examples, prompts = loader.take(least=0)
            batch = write_judgements(judge, prompts, args)
            dropped += len(batch.dropped)
            likelihoods = weigh_verdicts(judge, rows, examples, batch)
            answers = sample_records(batch, rows.processor, rows.settings)
            for k, record in zip(batch.prompt_index.tolist(), answers):
                example = examples[k]
                target = {"target": example.text, "tokens": len(example.target)}
                records.append(record | target | likelihoods[k] | {"index": first + k})
            first += len(examples)
    if not records:
        raise UserError("evaluation: no held-out example is left; no image decodes")
    return records, dropped


def evaluation_record(record: dict) -> dict:
    """A record of eval_result_N.json: the question under "info", and the answers under the names that
    other systems use."""
    info = {
        "row": record["source"],
        "source": record.get("group"),
        "kind": record["label"],
        "images": record["images"],
        "question": record["question"],
    }
    unchanged = ("index", "order", "truncated", "tokens", "loss", "probabilities", "regions")
    return {
        "info": info,
        "generated_text": record["response"],
        "response_text": record["target"],
        "predicted_answer": record.get("verdict"),
        "gt_answer": record["reference"],
    } | {name: record[name] for name in unchanged if name in record}


def write_judgements(judge: Policy, batch: Batch, args: Args) -> Batch:
    """The judge's judgement of every question, sampled greedily, with the image features that the
    sampler computed."""
    processor, device = judge.processor, judge.model.setup.device
    sampling = Sampling(
        banned=processor.banned_mask().to(device),
        stop_ids=torch.tensor(processor.stop_ids, device=device),
        max_new_tokens=args.eval_max_new_tokens,
        greedy=True,
        slots=args.slots,
        cuda_graphs=args.cuda_graphs,
    )
    return rollout(judge, batch, sampling, samples_per_prompt=1)


def weigh_verdicts(
    judge: Policy, rows: Rows, examples: list[Example], batch: Batch
) -> dict[int, dict]:
    """For every example whose images decode: its loss, summed over the target's tokens, and the
    probability of each verdict, a softmax over the verdicts' log-probs right after the prompt. One
    packed forward pass computes both."""
    kinds = [example.prompt.label for example in examples]
    verdicts = {kind: rows.settings.known_verdicts(kind) for kind in set(kinds)}
    encoded = {
        kind: judgements.encode_verdicts(rows.processor, words) for kind, words in verdicts.items()
    }
    responses = []
    for k, (example, kind) in enumerate(zip(examples, kinds)):
        responses += [(k, tokens) for tokens in (example.target, *encoded[kind])]
    batch = batch.with_responses(responses)
    if not len(batch):
        return {}  # no image decodes
    vlm.compute_features_unless_trained(judge.model, batch)
    logprobs = logprobs_of(judge, batch).double()  # (N,)
    totals = losses.sum_per_sample(logprobs, batch.own_lengths)  # (S,)
    likelihoods = {}
    for index in set(batch.prompt_index.tolist()):
        logps = totals[batch.prompt_index == index]  # of the target, and of each verdict
        chances = logps[1:].softmax(dim=0).tolist()
        probabilities = dict(zip(verdicts[kinds[index]], chances))
        likelihoods[index] = {"loss": -float(logps[0]), "probabilities": probabilities}
    return likelihoods


# -------------------------------------------------------------------------------------------------
# Records
# -------------------------------------------------------------------------------------------------


def open_log(args: Args, rows: Rows, first_step: int) -> logging.RunLogger:
    """Write args.json and the first record, and print what the run will do."""
    log = logging.RunLogger(args, args.steps, first_step)
    if any(group.prompt.regions for group in rows.train):
        log.line(f"boxes and points of responses are in the coordinates {rows.processor.space!r}")
    prompts, count, steps = args.prompts_per_step, len(rows.train), args.steps
    sizes = [len(group.examples) for group in rows.train]
    log.line(
        f"{sum(sizes)} examples of {count} training prompts, {len(rows.held_out)} held-out examples; {steps} "
        f"steps of {prompts} prompts = {steps * prompts / max(1, count):.1f} passes; output: {log.out}"
    )
    if args.eval_only:
        return log
    notes = [*repeated_rows(args, rows.train_sets), *uneven_prompts(rows.train)]
    for line in [*notes, *split_conversations(rows.train)]:
        log.line(line)
    warmup = args.warmup_steps
    if warmup >= steps:
        log.line(f"warning: --warmup_steps {warmup} of --steps {steps}: --lr is never reached")
    return log


def uneven_prompts(groups: list[ExampleGroup]) -> list[str]:
    """A warning where one prompt has more than a tenth of all examples, and more than twice as many as others
    have on average: its step is far larger than the others."""
    largest = max(groups, key=lambda group: len(group.examples))
    count, total = len(largest.examples), sum(len(group.examples) for group in groups)
    if count <= max(total / 10, 2 * total / len(groups)):
        return []
    return [
        f"warning: {count} of {total} examples share one prompt ({largest.prompt.source}), and a step has "
        "whole prompts: put what distinguishes these rows into their prompts, or give them several prompts"
    ]


def split_conversations(groups: list[ExampleGroup]) -> list[str]:
    """A message on conversations that are several examples: the template writes earlier turns in another
    way, or the family shows no images behind an answer."""
    answers = [one.prompt for group in groups for one in group.examples]
    responses = [prompt for prompt in answers if prompt.label == judgements.RESPONSE]
    rows = Counter((prompt.folder, prompt.source) for prompt in responses)
    split = [count for count in rows.values() if count > 1]
    if not split:
        return []
    return [
        f"{len(split)} conversations are {sum(split)} examples, each behind what the chat template makes of "
        "the turns before: it changes them, so that no single row is what the model reads"
    ]


def performance(batch: Batch) -> logging.Metrics:
    """Seconds per stage, throughput and memory."""
    metrics = logging.timer.metrics()
    metrics["perf/tokens_per_second"] = batch.total_tokens / metrics["perf/update_seconds"]
    return metrics | memory.peak()


def report(log: logging.RunLogger, rows: Rows, batch: Batch, state: TrainState, args: Args) -> None:
    """Log a step: metrics, a line on the console, the progress bar and, after some steps, the targets."""
    step, metrics = state.step, state.metrics
    log.step(step, metrics, STEP_COLUMNS)
    if log.shows_samples(step, args.steps):
        records = sample_records(batch, rows.processor, rows.settings)
        log_samples(log, step, records, stem="step")


def log_samples(log: logging.RunLogger, step: int, records: list[dict], stem: str) -> None:
    """Log the records, and cards of some of them, evenly spaced."""
    count = log.log_samples
    every = max(1, len(records) // max(1, count))
    log.samples(step, records, sample_cards(records[::every][:count]), stem)


if __name__ == "__main__":
    process.run_main(main)
