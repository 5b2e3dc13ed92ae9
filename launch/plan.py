"""Does a run fit? Its memory on each GPU by stage, without a GPU and without weights.

    python launch/plan.py ppo --gpus 8 -- --model Qwen/Qwen2.5-VL-7B-Instruct --data a.jsonl
    python launch/plan.py grm --gpus 8 -- --model Qwen/Qwen2.5-VL-7B-Instruct --data b.jsonl

After -- stand the flags of the run itself. Its rows are checked, and of a hub name only the small
files are fetched. The data of the first step stand for all. Exit code 2: it does not fit.
"""

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.flags import Parser
from common.process import UserError, run_main

# of a GPU, assumed: CUDA's context, NCCL's buffers, what the allocator cannot use
RESERVED_GIB = 2.0
GIB = 2**30

Phases = dict[str, dict[str, float]]  # bytes on a GPU by phase and part


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
    args, lines, phases = plan(flags, own)
    lines.append(
        f"{own.gpus} GPUs, {args.run.hsdp or own.gpus} shards, rows of "
        f"{args.model.max_tokens_per_pack} tokens:"
    )
    checkpointing = args.model.gradient_checkpointing
    table, peak = memory_table(phases(checkpointing), own.gib)
    _, otherwise = memory_table(phases(not checkpointing), own.gib)
    what = "without" if checkpointing else "with"
    print(
        *lines,
        *table,
        f"{what} --gradient_checkpointing the peak is {otherwise:.1f} GiB",
        sep="\n",
        flush=True,
    )
    if peak > own.gib:
        raise UserError(
            f"{table[-1]}; lower the largest parts of that phase (--gradient_checkpointing, a "
            "smaller --max_tokens_per_pack, --offload, more GPUs)"
        )
    return {"plan/peak_gib": peak}


if __name__ == "__main__":
    run_main(parse_args)  # --help and refused flags need not wait for the imports below

import torch
import torch.nn as nn

import train_grm_vl as grm
import train_ppo_vl as ppo
from common import memory, rewards
from common.buffers import Batch, make_blocks, make_packs
from common.distributed import raise_on_all_ranks
from common.vlm import attention, data, weights

META = torch.device("meta")


# -------------------------------------------------------------------------------------------------
# train_ppo_vl.py
# -------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The flags of a run, lines about it, and its phases with or without gradient checkpointing."""

    args: Any
    lines: list[str]
    phases: Callable[[bool], Phases]


def plan_ppo(flags: list[str], own: argparse.Namespace) -> Plan:
    args = with_small_files(ppo.parse_args(flags), own.gpus)
    reward = rewards.load(args.reward)
    rows = ppo.load_rows(args)
    reward.check_rows(rows.train + rows.held_out)
    models = build_ppo_models(args, reward, rows)

    lengths = [len(row.input_ids) for row in rows.train]
    pictures = [row.image_tokens for row in rows.train]
    size, count = args.data.prompts_per_step, args.rollout.samples_per_prompt
    lines = [
        f"prompts of {describe(lengths)}; of pictures {describe(pictures)}",
        f"{describe_steps(args, len(lengths))}; {count} samples of each, "
        f"{args.update.epochs * args.update.minibatches} updates per step",
    ]
    order = data.DrawOrder(
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
    needed = StepMemory(args, models, own)
    return Plan(args, lines, functools.partial(needed.phases, max(lengths)))


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


def build_ppo_models(
    args: ppo.Args, reward: rewards.RewardMix, rows: ppo.Rows
) -> dict[str, nn.Module]:
    """Every model of a run, by role, on meta. Raises UserError: one cannot be built, or cannot see
    the rows."""
    algorithm, processor = args.algorithm, rows.processor
    with raise_on_all_ranks():
        builder = weights.Builder(args.model, processor, META, args.longest)
        models: dict[str, nn.Module] = {"actor": ppo.Policy(builder.actor(), processor)}
        if algorithm.advantage == "gae":
            models["critic"] = ppo.Critic(builder.role(algorithm.critic_model, head=False)[0])
        if algorithm.kl_coef and (algorithm.reference_model or not args.model.lora_rank):
            body, _ = builder.role(algorithm.reference_model, frozen=True)
            models["reference"] = ppo.Policy(body, processor)
    for source in reward.model_sources():
        with raise_on_all_ranks(f"--reward {source.spec}: "):
            models[source.name] = build_reward_model(args, reward, source, rows, models["actor"])
    return models


def build_reward_model(
    args: ppo.Args,
    reward: rewards.RewardMix,
    source: rewards.Source,
    rows: ppo.Rows,
    actor: nn.Module,
) -> nn.Module:
    folder = weights.resolve_folder(source.folder, weights=False)
    processor = data.Processor(folder, dataclasses.replace(args.data, min_pixels=0, max_pixels=0))
    reward.check_media(source, processor, rows.train + rows.held_out)
    shares_tower = weights.same_tower(folder, processor, actor.model, rows.processor)
    writes = source.kind == "grm"
    compute = actor.model.compute
    model = weights.build_frozen(
        processor.config, compute, args.longest, vision=not shares_tower, head=writes
    )
    module = ppo.Policy(model, processor) if writes else ppo.Critic(model)
    return module.requires_grad_(False)


class StepMemory:
    """Bytes on a GPU by phase of a PPO step and part: sums of what may be there at the same
    time."""

    def __init__(self, args: ppo.Args, models: dict[str, nn.Module], own: argparse.Namespace):
        self.args, self.models, self.gpus, self.gib = args, models, own.gpus, own.gib
        self.held: dict[tuple[str, str], float] = {}  # (role, part)
        for role, module in models.items():
            for part, size in memory.resident_bytes(module, args.run.hsdp or own.gpus).items():
                if size:
                    self.held[role, part] = size
        if args.update.ema_beta:
            self.held["actor", "average"] = self.held["actor", "Adam"] // 2

    def phases(self, longest: int, checkpointing: bool) -> Phases:
        """For prompts of at most ``longest`` tokens."""
        args, algorithm = self.args, self.args.algorithm
        longest += args.longest_response
        phases = {"rollout": self.decoding("actor", longest, self.resident())}
        scores_actor = (
            algorithm.importance_cap
            or algorithm.high_entropy_ratio < 1
            or algorithm.kl_estimator == "full"
        )
        scored = [self.scoring(role) for role in self.models if role != "actor" or scores_actor]
        if scored:
            phases["score"] = max(scored, key=lambda parts: sum(parts.values()))
        for role in self.models:
            if role.startswith("grm") and args.reward.grm_mode == "critique":
                written = longest + args.reward.grm_max_new_tokens
                phases[f"{role} writes"] = self.decoding(role, written, self.resident(role))
        for role in ("critic", "actor"):
            if role in self.models:
                phases[f"update {role}"] = self.update(role, checkpointing)
        return phases

    def resident(self, *busy: str) -> dict[str, float]:
        """What lies on the GPU; of what is offloaded, the parts of the roles that are ``busy``: in
        training, or frozen and asked."""
        offload, found = self.args.update.offload, {}
        for (role, part), size in self.held.items():
            away = offload == "all" and role not in ("actor", "critic")
            if part in ("Adam", "average"):
                away = offload != "none"
            if not away or role in busy:
                found[f"{role} {part}"] = size
        return found

    def decoding(self, role: str, length: int, stay: dict[str, float]) -> dict[str, float]:
        """All weights gathered; slots as `RolloutEngine.slot_count` takes them."""
        module, rollout = self.models[role], self.args.rollout
        root, _, layers = memory.gathered_bytes(module)
        work = memory.rollout_work(module, rollout.slots)
        text, width = module.model.config.get_text_config(), memory.itemsize(module)
        slot = length * attention.cache_bytes(text, width)
        prompts = -(-self.args.prompts_per_rollout // self.gpus)
        slots = min(rollout.slots or 256, prompts * rollout.samples_per_prompt)
        if not rollout.slots:
            room = (self.gib - RESERVED_GIB) * GIB - sum(stay.values()) - root - layers - work
            slots = max(1, min(slots, int(0.9 * room // slot)))
        return stay | {"gathered weights": root + layers, "KV cache": slots * slot, "forward": work}

    def scoring(self, role: str) -> dict[str, float]:
        root, layer, _ = memory.gathered_bytes(self.models[role])
        stay = self.resident()
        if role not in ("actor", "critic"):  # they need no optimizer here
            stay = self.resident(role)
        forward = memory.scoring_work(self.models[role])
        return stay | {"gathered weights": root + 2 * layer, "forward": forward}

    def update(self, role: str, checkpointing: bool) -> dict[str, float]:
        module = self.models[role]
        root, layer, _ = memory.gathered_bytes(module)
        exact = self.args.exact_kl_in_loss and role == "actor"
        stay = self.resident(role, "reference") if exact else self.resident(role)
        tokens = module.model.compute.max_tokens_per_pack
        parts = {
            "gathered weights": root + 2 * layer,
            "gradient shards": self.held[role, "Adam"] / 2,
        }
        return stay | parts | memory.backward_bytes(module, tokens, checkpointing)


# -------------------------------------------------------------------------------------------------
# train_grm_vl.py
# -------------------------------------------------------------------------------------------------


def plan_grm(flags: list[str], own: argparse.Namespace) -> Plan:
    args = with_small_files(grm.parse_args(flags), own.gpus)
    rows = grm.load_rows(args)
    args = grm.count_steps(args, len(rows.train))
    longest = args.data.max_prompt_tokens + args.eval.eval_max_new_tokens
    with raise_on_all_ranks():
        judge = grm.Judge(weights.Builder(args.model, rows.processor, META, longest).actor())

    lengths = [len(question.prompt.input_ids) for question in rows.train]
    size = args.data.prompts_per_step
    first, _ = data.DrawOrder(rows.train_sets, rows.shares, size, 1, args.run.seed)(0)
    targets = [[example.target for example in question.examples] for question in first]
    batch = batch_of([question.prompt for question in first], targets)
    tokens = sum(batch.prompt_lengths) + len(batch.tokens)
    lines = [
        f"prompts of {describe(lengths)}",
        describe_steps(args, len(lengths)),
        f"first step: {tokens} tokens, {count_packs(judge, batch, own.gpus)} packs per GPU",
        f"million parameters: {describe_parameters(judge)}",
    ]
    phases = functools.partial(judge_phases, args, judge, max(lengths), own.gpus)
    return Plan(args, lines, phases)


def judge_phases(
    args: grm.Args, judge: grm.Judge, longest: int, gpus: int, checkpointing: bool
) -> Phases:
    """Bytes on a GPU by phase and part. Evaluations are assumed to ask what training shows: prompts
    of at most ``longest`` tokens."""
    held = memory.resident_bytes(judge, args.run.hsdp or gpus)
    root, layer, layers = memory.gathered_bytes(judge)
    parts = {"gathered weights": root + 2 * layer, "gradient shards": held["Adam"] / 2}
    parts |= memory.backward_bytes(judge, args.model.max_tokens_per_pack, checkpointing)
    asked = args.eval.eval_batch * longest
    cached = asked + args.eval.eval_batch * args.eval.eval_max_new_tokens
    text = judge.model.config.get_text_config()
    evaluation = {
        "gathered weights": root + layers,
        "KV cache": cached * attention.cache_bytes(text, memory.itemsize(judge)),
        "forward": asked * memory.layer_activations(judge),
    }
    return {"update": held | parts, "evaluate": held | evaluation}


# -------------------------------------------------------------------------------------------------
# Tables
# -------------------------------------------------------------------------------------------------


def batch_of(rows: list, targets: list[list[torch.Tensor]]) -> Batch:
    """Prompts with made-up responses."""
    return Batch(rows, list(range(len(rows))), [0] * len(rows)).with_targets(targets)


def count_packs(module: nn.Module, batch: Batch, gpus: int, groups: Any = None) -> int:
    """Packs per GPU of an update on the prompts ``groups``."""
    limit = module.model.compute.max_tokens_per_pack
    hidden_size = module.model.config.get_text_config().hidden_size
    blocks = make_blocks(batch, limit, groups)
    return len(make_packs(batch, blocks, gpus, limit, hidden_size)[0])


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


def memory_table(phases: Phases, gib: float) -> tuple[list[str], float]:
    """Lines of a table of the GiB of each part (rows) in each phase (columns), and the peak with
    what is reserved."""
    columns = {}
    for name, parts in phases.items():
        columns[name] = {part: size / GIB for part, size in parts.items()}
        columns[name]["reserved"] = RESERVED_GIB
        columns[name]["total"] = sum(columns[name].values())
    rows = [part for parts in phases.values() for part in parts]
    rows = [*dict.fromkeys(rows), "reserved", "total"]
    width = max(map(len, ["GiB per GPU", *rows]))
    lines = ["GiB per GPU".ljust(width) + "".join(f"{name:>15}" for name in phases)]
    for row in rows:
        cells = [f"{parts[row]:.2f}" if row in parts else "" for parts in columns.values()]
        lines.append(row.ljust(width) + "".join(f"{cell:>15}" for cell in cells))

    where = max(columns, key=lambda name: columns[name]["total"])
    peak = columns[where]["total"]
    verdict = f"fits, {gib - peak:.1f} GiB to spare"
    if peak > gib:
        verdict = f"does not fit by {peak - gib:.1f} GiB"
    lines.append(f"peak: {peak:.1f} of {gib:g} GiB, in {where}: {verdict}")
    return lines, peak


if __name__ == "__main__":
    run_main(main)
