"""Does a run fit? Its memory on each GPU by stage, without a GPU and without weights.

    python launch/plan.py ppo --gpus 8 -- --model Qwen/Qwen2.5-VL-7B-Instruct --data a.jsonl
    python launch/plan.py grm --gpus 8 -- --model Qwen/Qwen2.5-VL-7B-Instruct --data b.jsonl

After -- come the flags of the run itself. Its rows are checked, and of a model on the hub only the
small files are fetched. Without --data, config.json alone is read, which --model may name: every
prompt is then as long as --max_prompt_tokens. Exit code 2: it does not fit. The run itself only
warns, unless it needs 1.2 times the memory that is free.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder

from common.ground import versions

versions.check()


from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

import train_grm_vl as grm
import train_ppo_vl as ppo
from common.data.rows import Example, Prompt
from common.flags import DataArgs, Parser
from common.ground.files import UserError
from common.ground.process import run_main
from common.memory import budget, memory
from common.rewards import sources
from launch.tool import between

META = torch.device("meta")
NOT_READ: Any = None  # in place of what needs rows, which such a plan has not
UNREAD = "(no rows)"  # --data of a plan without rows


def main(argv: list[str] | None = None) -> None:
    """Print the plan. Raises UserError: too little memory."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        description=str(__doc__).split("\n")[0],
        usage="plan.py {ppo,grm} [--gpus N] [--gib N] -- FLAGS",
    )
    parser.add_argument("script", choices=("ppo", "grm"), help="train_ppo_vl.py or train_grm_vl.py")
    parser.add_argument(
        "--gpus", type=between(1, 2**20), default=8, help="GPUs of the run (default 8)"
    )
    parser.add_argument(
        "--gib", type=between(0.1, 1e6), default=80.0, help="memory of each GPU, GiB (default 80)"
    )
    options = parser.parse_args(argv[:cut])

    plan_script = plan_ppo if options.script == "ppo" else plan_grm
    plan = plan_script(with_data(argv[cut + 1 :]), options.gpus)
    setting = budget.choose(plan, options.gib)
    print(f"{options.gpus} GPUs, {plan.shards} shards; {setting}:")
    print(
        *memory_table(plan.phases(setting)), *teams_table(plan, options.gpus), sep="\n", flush=True
    )
    print(budget.require_fit(plan, setting, options.gib, most=1.0))
    if options.script == "ppo":
        print(f"room for {plan.slots(options.gib)} samples that decode together", flush=True)
        size = memory.experts_bytes(plan.models["actor"])
        if size:
            where = "beside its key and value, and in host memory until the update"
            print(f"{size} bytes per token for the ids of its experts: {where}", flush=True)


def memory_table(phases: dict[str, budget.Parts]) -> list[str]:
    """Lines of a table of GiB, with a row for each part and a column for each phase."""
    columns = [parts | {"total": budget.total(parts)} for parts in phases.values()]
    parts = dict.fromkeys(part for column in phases.values() for part in column)
    lines = [table_line("GiB per GPU", phases)]
    for part in (*parts, "total"):
        sizes = []
        for column in columns:
            sizes.append(f"{column[part] / budget.GIB:.2f}" if part in column else "")
        lines.append(table_line(part, sizes))
    return lines


def teams_table(plan: budget.MemoryPlan, gpus: int) -> list[str]:
    """Two lines: what a step needs outside of updates with each number of --rollout_shards that can
    share the model."""
    if not plan.fixed:
        return []
    args, peaks = plan.args, {}
    for size in range(1, 9):
        plan.args = replace(args, rollout_shards=size)
        with suppress(UserError):  # so many ranks cannot share a layer
            peak = max(budget.total(parts()) for parts in plan.fixed.values())
            if gpus % size == 0:
                peaks[size] = f"{peak / budget.GIB:.2f}"
    plan.args = args
    return [table_line("--rollout_shards", peaks), table_line("GiB", peaks.values())]


def table_line(name: str, cells: Iterable) -> str:
    return (f"{name:20}" + "".join(f"{cell:>18}" for cell in cells)).rstrip()


def with_data(flags: list[str]) -> list[str]:
    """The flags of a run, with a mark in place of its rows where they name a model alone."""
    names = {word.partition("=")[0] for word in flags}
    named = "--model" in names and not names & {"--config", "--data", "--eval_data"}
    return [*flags, "--data", UNREAD] if named else flags


def longest_row(args: DataArgs) -> Prompt:
    ids = torch.empty(args.max_prompt_tokens, dtype=torch.int64, device="meta")
    return Prompt([], "", (), (), ids, 0)


def plan_ppo(flags: list[str], gpus: int) -> budget.MemoryPlan:
    args = ppo.parse_args(flags)
    if args.data == UNREAD:
        return plan_ppo_without_rows(args, gpus)
    reward = sources.load_rewards(args)
    rows = ppo.load_rows(args)
    reward.check_rows(rows.all)
    models = ppo.build_models(args, rows.processor, META)
    modules = models.by_role() | ppo.reward_modules(args, reward, rows, models.actor)
    ppo.check_teacher_rows(args, rows, models.teacher)
    return ppo.plan_memory(args, modules, rows, gpus)


def plan_ppo_without_rows(args: ppo.Args, gpus: int) -> budget.MemoryPlan:
    """Raises UserError: other models than actor, critic and reference, which read rows."""
    kinds = {source.kind for source in sources.load_rewards(args).sources}
    if args.ptx_data or args.teacher_model or kinds & {"grm", "rm"}:
        raise UserError(
            "--reward grm: or rm:, --teacher_model and --ptx_data need --data in a plan"
        )
    modules = ppo.build_models(args, NOT_READ, META).by_role()
    rows = ppo.Rows(NOT_READ, NOT_READ, [[longest_row(args)]], [], None)
    return ppo.plan_memory(args, modules, rows, gpus)


def plan_grm(flags: list[str], gpus: int) -> budget.MemoryPlan:
    args = grm.parse_args(flags)
    if args.data == UNREAD:
        example = Example(longest_row(args), torch.empty(0), "")
        rows = grm.Rows(
            NOT_READ, NOT_READ, [[grm.ExampleGroup(example.prompt, [example])]], [example]
        )
    else:
        rows = grm.load_rows(args)
    judge = grm.build_judge(args, rows.processor, META)
    return grm.plan_memory(args, judge, rows, gpus)


if __name__ == "__main__":
    run_main(main)
