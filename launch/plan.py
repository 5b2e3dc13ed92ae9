"""Does a run fit? Its memory on each GPU by stage, without a GPU and without weights.

    python launch/plan.py ppo --gpus 8 -- --model Qwen/Qwen2.5-VL-7B-Instruct --data a.jsonl
    python launch/plan.py grm --gpus 8 -- --model Qwen/Qwen2.5-VL-7B-Instruct --data b.jsonl

After -- stand the flags of the run itself. Its rows are checked, and of a hub name only the small
files are fetched. Exit code 2: it does not fit.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import train_grm_vl as grm
import train_ppo_vl as ppo
from common.distributed import UserError, raise_on_all_ranks, run_main
from common.flags import ModelArgs, Parser
from common.model import budget, weights
from common.rewards import scoring

META = torch.device("meta")


def main(argv: list[str] | None = None) -> None:
    """Print the plan. Raises UserError: too little memory."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        description=__doc__.split("\n")[0], usage="plan.py {ppo,grm} [--gpus N] [--gib N] -- FLAGS"
    )
    parser.add_argument("script", choices=("ppo", "grm"), help="train_ppo_vl.py or train_grm_vl.py")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of the run (default 8)")
    parser.add_argument("--gib", type=float, default=80.0, help="memory of each (default 80)")
    options = parser.parse_args(argv[:cut])

    plan_script = plan_ppo if options.script == "ppo" else plan_grm
    needed = plan_script(argv[cut + 1 :], options.gpus)
    args = needed.args.model
    tokens = args.max_tokens_per_pack
    choice = budget.Choice(args.gradient_checkpointing != "off", tokens)
    print(f"{options.gpus} GPUs, {needed.shards} shards, packs of {tokens} tokens:")
    print(*memory_table(needed.phases(choice, options.gib * budget.GIB)), sep="\n", flush=True)
    print(budget.require_fit(needed, options.gib))
    print(budget.advise(needed, tokens, options.gib), flush=True)


def memory_table(phases: dict[str, budget.Parts]) -> list[str]:
    """Lines of a table of the GiB of each part (rows) in each phase (columns)."""
    columns = [parts | {"total": budget.total(parts)} for parts in phases.values()]
    parts = dict.fromkeys(part for column in phases.values() for part in column)
    names = "".join(f"{name:>15}" for name in phases)
    lines = [f"{'GiB per GPU':20}{names}"]
    for part in (*parts, "total"):
        line = f"{part:20}"
        for column in columns:
            size = f"{column[part] / budget.GIB:.2f}" if part in column else ""
            line += f"{size:>15}"
        lines.append(line.rstrip())
    return lines


def plan_ppo(flags: list[str], gpus: int) -> budget.PolicyMemory:
    args = ppo.parse_args(flags)
    check_run(args, gpus)
    algorithm = replace(
        args.algorithm,
        critic_model=small_files(args.algorithm.critic_model),
        reference_model=small_files(args.algorithm.reference_model),
    )
    args = replace(args, model=with_small_files(args.model), algorithm=algorithm)
    reward = scoring.load(args.reward)
    rows = ppo.load_rows(args)
    reward.check_rows(rows.train + rows.held_out)
    models = ppo.build_models(args, rows.processor, META)
    models |= ppo.build_reward_models(args, reward, rows, models["actor"])
    return budget.PolicyMemory(args, models, rows, gpus)


def plan_grm(flags: list[str], gpus: int) -> budget.JudgeMemory:
    args = grm.parse_args(flags)
    check_run(args, gpus)
    args = replace(args, model=with_small_files(args.model))
    rows = grm.load_rows(args)
    longest = grm.longest_sequence(args)
    with raise_on_all_ranks():
        judge = grm.Judge(weights.Builder(args.model, META, longest).actor())
    return budget.JudgeMemory(args, {"judge": judge}, rows, gpus)


def check_run(args: ppo.Args | grm.Args, gpus: int) -> None:
    """Raises UserError: --data is missing, or --hsdp does not divide the GPUs."""
    if not args.data.data:
        raise UserError("a plan is about training: it needs --data")
    if args.run.hsdp and gpus % args.run.hsdp:
        raise UserError(f"--hsdp {args.run.hsdp} must divide the number of ranks, {gpus}")


def with_small_files(args: ModelArgs) -> ModelArgs:
    return replace(args, model=small_files(args.model))


def small_files(checkpoint: str) -> str:
    """The folder of a hub name's small files. Raises UserError: it is not found."""
    with raise_on_all_ranks():
        return str(weights.resolve_folder(checkpoint, weights=False)) if checkpoint else ""


if __name__ == "__main__":
    run_main(main)
