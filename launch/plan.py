"""Does a run fit? Its memory on each GPU by stage, without a GPU and without weights.

    python launch/plan.py ppo --gpus 8 -- --model Qwen/Qwen2.5-VL-7B-Instruct --data a.jsonl
    python launch/plan.py grm --gpus 8 -- --model Qwen/Qwen2.5-VL-7B-Instruct --data b.jsonl

After -- stand the flags of the run itself. Its rows are checked, and of a hub name only the small
files are fetched. The data of the first step stand for all. Exit code 2: it does not fit.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn as nn

import train_grm_vl as grm
import train_ppo_vl as ppo
from common.model import budget, memory
from common.rewards import scoring
from common.buffers import Batch, assign_blocks, make_blocks
from common.distributed import raise_on_all_ranks
from common.flags import Parser
from common.distributed import UserError, run_main
from common.data.loader import DrawOrder
from common.model import weights


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The plan's own flags, and those of the run."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=layout)
    scripts = ("ppo", "grm")
    parser.add_argument("script", choices=scripts, help="train_ppo_vl.py or train_grm_vl.py")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of the run (default 8)")
    parser.add_argument(
        "--gib", type=float, default=80.0, help="memory of each of them (default 80)"
    )
    own, others = parser.parse_known_args(argv[:cut])
    if others:
        parser.error(f"{others[0]} is no flag of the plan; the flags of the run stand after --")
    if own.gpus < 1:
        parser.error("--gpus must be at least 1")
    return own, argv[cut + 1 :]


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Print the plan. Returns its peak. Raises UserError: too little memory."""
    own, flags = parse_args(argv)
    plan = plan_ppo if own.script == "ppo" else plan_grm
    args, lines, needed = plan(flags, own)
    lines.append(
        f"{own.gpus} GPUs, {args.run.hsdp or own.gpus} shards, rows of "
        f"{args.model.max_tokens_per_pack} tokens:"
    )
    choice = budget.choice_of(needed, args.model, "cuda")
    peak, phase = budget.peak_of(needed, choice, own.gib)
    lines += memory_table(needed.phases(choice, own.gib * budget.GIB))
    lines.append(f"peak: {peak:.1f} of {own.gib:.4g} GiB, in {phase}")
    advice = budget.advise(needed, args.model.max_tokens_per_pack, own.gib)
    print(*lines, sep="\n", flush=True)
    if peak > own.gib:
        raise UserError(f"does not fit; {advice}")
    print(advice, flush=True)
    return {"plan/peak_gib": peak}


def memory_table(phases: budget.Phases) -> list[str]:
    """Lines of a table of the GiB of each part (rows) in each phase (columns)."""
    columns = {}
    for name, parts in phases.items():
        whole = parts | {"reserved": budget.RESERVED_GIB * budget.GIB}
        columns[name] = whole | {"total": budget.total(whole)}
    parts = [part for column in phases.values() for part in column]
    rows = [*dict.fromkeys(parts), "reserved", "total"]
    width = max(map(len, ["GiB per GPU", *rows]))
    lines = ["GiB per GPU".ljust(width) + "".join(f"{name:>15}" for name in phases)]
    for row in rows:
        cells = [f"{part[row] / budget.GIB:.2f}" if row in part else "" for part in columns.values()]
        lines.append(row.ljust(width) + "".join(f"{cell:>15}" for cell in cells))
    return lines


META = torch.device("meta")


# -------------------------------------------------------------------------------------------------
# train_ppo_vl.py
# -------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The flags of a run, lines about it, and what its steps need."""

    args: Any
    lines: list[str]
    needed: budget.Plan


def plan_ppo(flags: list[str], own: argparse.Namespace) -> Plan:
    args = with_small_files(ppo.parse_args(flags), own.gpus)
    reward = scoring.load(args.reward)
    rows = ppo.load_rows(args)
    reward.check_rows(rows.train + rows.held_out)
    models = ppo.build_models(args, rows.processor, META)
    models |= ppo.build_reward_models(args, reward, rows, models["actor"])

    lengths = [len(row.input_ids) for row in rows.train]
    pictures = [row.image_tokens for row in rows.train]
    size, count = args.data.prompts_per_step, args.rollout.samples_per_prompt
    lines = [
        f"prompts of {describe(lengths)}; of pictures {describe(pictures)}",
        f"{describe_steps(args, len(lengths))}; {count} samples of each, "
        f"{args.update.epochs * args.update.minibatches} updates per step",
    ]
    order = DrawOrder(
        rows.train_sets,
        rows.shares,
        args.prompts_per_rollout,
        args.rollout.rollouts_per_step,
        args.run.seed,
    )
    first = []
    for rollout in range(args.rollout.rollouts_per_step):
        first += order(rollout)[0]
    longest = args.rollout.max_new_tokens
    for length in (longest, -(-longest // 2)):
        response = torch.zeros(length, dtype=torch.int64)
        batch = batch_of(first, [[response] * count] * size)
        groups = batch.minibatches(args.update.minibatches, (args.run.seed, 1, 0))[0]
        packs = count_packs(models["actor"], batch, own.gpus, groups)
        tokens = sum(batch.prompt_lengths) + len(batch.tokens)
        lines.append(
            f"responses of {length} tokens: {tokens} tokens per step, {packs} packs per GPU and "
            "update"
        )
    for name, module in models.items():
        lines.append(f"{name}, million parameters: {describe_parameters(module)}")
    return Plan(args, lines, ppo.memory_plan(args, models, rows, own.gpus))


def with_small_files(args: Any, gpus: int) -> Any:
    """The flags of a run with hub names replaced by folders that hold their small files only.

    Raises:
        UserError: --data is missing, a checkpoint is not found, or --hsdp does not divide the GPUs.
    """
    if not args.data.data:
        raise UserError("a plan is about training: it needs --data")
    if args.run.hsdp and gpus % args.run.hsdp:
        raise UserError(f"--hsdp {args.run.hsdp} must divide the number of ranks, {gpus}")
    replaced = {}
    for group in dataclasses.fields(args):
        settings = getattr(args, group.name)
        for name in ("model", "critic_model", "reference_model"):
            checkpoint = getattr(settings, name, "")
            if checkpoint:
                with raise_on_all_ranks():
                    folder = weights.resolve_folder(checkpoint, weights=False)
                settings = dataclasses.replace(settings, **{name: str(folder)})
        replaced[group.name] = settings
    return dataclasses.replace(args, **replaced)


# -------------------------------------------------------------------------------------------------
# train_grm_vl.py
# -------------------------------------------------------------------------------------------------


def plan_grm(flags: list[str], own: argparse.Namespace) -> Plan:
    args = with_small_files(grm.parse_args(flags), own.gpus)
    rows = grm.load_rows(args)
    args = grm.count_steps(args, len(rows.train))
    longest = grm.longest_sequence(args)
    with raise_on_all_ranks():
        judge = grm.Judge(weights.Builder(args.model, rows.processor, META, longest).actor())

    lengths = [len(question.prompt.input_ids) for question in rows.train]
    size = args.data.prompts_per_step
    first, _ = DrawOrder(rows.train_sets, rows.shares, size, 1, args.run.seed)(0)
    targets = [[example.target for example in question.examples] for question in first]
    batch = batch_of([question.prompt for question in first], targets)
    tokens = sum(batch.prompt_lengths) + len(batch.tokens)
    lines = [
        f"prompts of {describe(lengths)}",
        describe_steps(args, len(lengths)),
        f"first step: {tokens} tokens, {count_packs(judge, batch, own.gpus)} packs per GPU",
        f"million parameters: {describe_parameters(judge)}",
    ]
    return Plan(args, lines, grm.memory_plan(args, judge, rows, own.gpus))


# -------------------------------------------------------------------------------------------------
# Lines about a run
# -------------------------------------------------------------------------------------------------


def batch_of(rows: list, targets: list[list[torch.Tensor]]) -> Batch:
    """Prompts with made-up responses."""
    return Batch(rows, list(range(len(rows))), [0] * len(rows)).with_targets(targets)


def count_packs(module: nn.Module, batch: Batch, gpus: int, groups: Any = None) -> int:
    """Packs per GPU of an update on the prompts ``groups``."""
    limit = module.model.compute.max_tokens_per_pack
    hidden_size = module.model.config.get_text_config().hidden_size
    blocks = make_blocks(batch, limit, groups)
    return len(assign_blocks(batch, blocks, gpus, limit, hidden_size)[0])


def describe(lengths: list[int]) -> str:
    """Tokens of all rows."""
    mean = sum(lengths) / len(lengths)
    return f"{mean:.0f} tokens, at most {max(lengths)}"


def describe_steps(args: Any, rows: int) -> str:
    steps, size = args.optim.steps, args.data.prompts_per_step
    return f"{steps} steps of {size} prompts = {steps * size / rows:.1f} passes over {rows}"


def describe_parameters(module: nn.Module) -> str:
    counts = memory.count_parameters(module).items()
    return "  ".join(f"{part} {number / 1e6:.3f}" for part, number in counts if number)


if __name__ == "__main__":
    run_main(main)
