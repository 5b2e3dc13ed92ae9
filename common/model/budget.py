"""Does a run fit? Bytes on a GPU by phase of a step, their peak, and what would help.

    PolicyMemory, JudgeMemory   what the steps of either script need: `phases`
    decide                      gradient checkpointing; or why the run does not fit
    check                       the same on a GPU, before a weight is read; and the host's memory
    memory_table                a plan as a table, for launch/plan.py

The formulas of each part are in `common.model.memory`.
"""

import bisect
import functools
import os
from dataclasses import dataclass
from typing import Callable, ClassVar, NamedTuple

import torch
import torch.nn as nn

from common import distributed
from common.distributed import UserError
from common.flags import ModelArgs
from common.model import memory
from common.model.attention import slot_bytes

# of a GPU, assumed: CUDA's context, NCCL's buffers, what the allocator cannot use
RESERVED_GIB = 2.0
GIB = 2**30
PACK_UNIT = 256  # tokens; the sizes of packs that are suggested are multiples of it

Phases = dict[str, dict[str, float]]  # bytes on a GPU by phase and part


class Choice(NamedTuple):
    """What decides the memory that a run takes, but not its result."""

    checkpointing: bool
    tokens: int  # of a pack
    offload: str = "none"


# -------------------------------------------------------------------------------------------------
# What a step needs
# -------------------------------------------------------------------------------------------------


@dataclass
class PolicyMemory:
    """Bytes on a GPU by phase of a PPO step and part: sums of what may be there at the same time.

    Attributes:
        shards: ranks that share one copy of the weights.
        longest: tokens of the longest prompt.
        least_pack: tokens that a pack must hold.
        sequences: of a rollout, on one rank.
        slots: sequences that decode together; 0: as many as fit, at most 256.
        critique_tokens: that a judge may write; 0: it writes none.
    """

    models: dict[str, nn.Module]
    shards: int
    longest: int
    least_pack: int
    max_new_tokens: int
    sequences: int
    slots: int
    offload: str
    average: bool
    scores_actor: bool
    exact_kl: bool
    critique_tokens: int
    trains: bool
    saved: tuple[str, ...]  # roles in checkpoints
    offloads: ClassVar[tuple[str, ...]] = ("optimizer", "all")

    def __post_init__(self):
        self.modules = list(self.models.values())
        self.held: dict[tuple[str, str], float] = {}  # (role, part)
        for role, module in self.models.items():
            for part, size in memory.resident_bytes(module, self.shards).items():
                if size:
                    self.held[role, part] = size
        if self.average:
            self.held["actor", "average"] = self.held["actor", "Adam"] // 2

    def phases(self, choice: Choice, room: float) -> Phases:
        """With ``room`` bytes on the GPU, of which a rollout takes what is left for its slots."""
        offload, longest = choice.offload, self.longest + self.max_new_tokens
        phases = {"rollout": self.decoding("actor", longest, self.resident(offload), room)}
        idle = set() if self.scores_actor else {"actor"}
        if not self.trains:
            idle = {"actor", "critic", "reference"}
        scored = [self.scoring(role, offload) for role in self.models if role not in idle]
        if scored:
            phases["score"] = max(scored, key=total)
        for role in self.models:
            if role.startswith("grm") and self.critique_tokens:
                stay = self.resident(offload, role)
                written = longest + self.critique_tokens
                phases[f"{role} writes"] = self.decoding(role, written, stay, room)
        for role in ("critic", "actor"):
            if role in self.models and self.trains:
                phases[f"update {role}"] = self.update(role, choice)
        return phases

    def resident(self, offload: str, *busy: str) -> dict[str, float]:
        """What lies on the GPU; of what is offloaded, the parts of the roles that are ``busy``: in
        training, or frozen and asked."""
        found = {}
        for (role, part), size in self.held.items():
            if role in busy or not is_offloaded(role, part, offload):
                found[f"{role} {part}"] = size
        return found

    def decoding(
        self, role: str, length: int, stay: dict[str, float], room: float
    ) -> dict[str, float]:
        """All weights gathered; slots as `RolloutEngine.slot_count` takes them."""
        module = self.models[role]
        root, _, layers = memory.gathered_bytes(module)
        work = memory.rollout_work(module, self.slots)
        text = module.model.config.get_text_config()
        slot = slot_bytes(text, length, memory.itemsize(module))
        slots = min(self.slots or 256, self.sequences)
        if not self.slots:
            free = room - RESERVED_GIB * GIB - total(stay) - root - layers
            slots = max(1, min(slots, int((memory.without_margin(free) - work) // slot)))
        return stay | {"gathered weights": root + layers, "KV cache": slots * slot, "forward": work}

    def scoring(self, role: str, offload: str) -> dict[str, float]:
        root, layer, _ = memory.gathered_bytes(self.models[role])
        stay = self.resident(offload)
        if role not in ("actor", "critic"):  # they need no optimizer here
            stay = self.resident(offload, role)
        forward = memory.scoring_work(self.models[role])
        return stay | {"gathered weights": root + 2 * layer, "forward": forward}

    def update(self, role: str, choice: Choice) -> dict[str, float]:
        module = self.models[role]
        exact = self.exact_kl and role == "actor"
        busy = (role, "reference") if exact else (role,)
        parts = update_bytes(module, self.held[role, "Adam"], choice)
        return self.resident(choice.offload, *busy) | parts

    def host_bytes(self) -> float:
        """Of host memory per rank: the copy that a save makes, and what is offloaded."""
        copied = kept = 0.0
        for (role, part), size in self.held.items():
            if role in self.saved:
                copied += staged_bytes(part, size, self.held.get((role, "Adam"), 0))
            if is_offloaded(role, part, self.offload):
                kept += size
        return copied + kept


@dataclass(frozen=True)
class JudgeMemory:
    """The same for the reward model's step and its evaluation, whose questions are assumed to be
    those of training.

    Attributes:
        longest: tokens of the longest prompt.
        least_pack: tokens that a pack must hold.
        batch, new_tokens: of an evaluation; 0: there is none.
    """

    judge: nn.Module
    shards: int
    longest: int
    least_pack: int
    batch: int
    new_tokens: int
    saves: bool
    offload: ClassVar[str] = "none"
    offloads: ClassVar[tuple[str, ...]] = ()

    @property
    def modules(self) -> list[nn.Module]:
        return [self.judge]

    @property
    def held(self) -> dict[str, int]:
        return memory.resident_bytes(self.judge, self.shards)

    def phases(self, choice: Choice, room: float) -> Phases:
        root, _, layers = memory.gathered_bytes(self.judge)
        text, width = self.judge.model.config.get_text_config(), memory.itemsize(self.judge)
        slot = slot_bytes(text, self.longest + self.new_tokens, width)
        evaluation = {
            "gathered weights": root + layers,
            "KV cache": self.batch * slot,
            "forward": self.batch * self.longest * memory.layer_activations(self.judge),
        }
        update = update_bytes(self.judge, self.held["Adam"], choice)
        phases = {"update": self.held | update}
        return phases | {"evaluate": self.held | evaluation} if self.batch else phases

    def host_bytes(self) -> float:
        if not self.saves:
            return 0.0
        adam = self.held["Adam"]
        return sum(staged_bytes(part, size, adam) for part, size in self.held.items())


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def update_bytes(module: nn.Module, adam: float, choice: Choice) -> dict[str, float]:
    """Of an update, besides what is resident; ``adam``: bytes of the optimizer's two moments."""
    root, layer, _ = memory.gathered_bytes(module)
    parts = {"gathered weights": root + 2 * layer, "gradient shards": adam / 2}
    return parts | memory.backward_bytes(module, choice.tokens, choice.checkpointing)


def is_offloaded(role: str, part: str, offload: str) -> bool:
    """Whether --offload keeps it in host memory while it is not in use."""
    if part in ("Adam", "average"):
        return offload != "none"
    return offload == "all" and role not in ("actor", "critic")


def staged_bytes(part: str, size: float, adam: float) -> float:
    """What a checkpoint has of a part of a role: trained weights and their optimizer, or all
    weights of a role without one; never the tower that is not trained."""
    if part == "tower":
        return 0.0
    if part == "weights" and adam:
        return min(size, adam / 2)
    return size


# -------------------------------------------------------------------------------------------------
# Whether it fits
# -------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """What `decide` found: how layers are computed, the phases so, and what to say."""

    choice: Choice
    phases: Phases
    peak: float  # GiB
    lines: list[str]  # the peak and its phase, and what gradient checkpointing does to it
    problem: str  # why the run does not fit, and what would help; "" if it does


Plan = PolicyMemory | JudgeMemory


def peak_of(plan: Plan, gib: float, choice: Choice) -> float:
    """GiB of the largest phase, with what is reserved."""
    return max(map(total, plan.phases(choice, gib * GIB).values())) / GIB + RESERVED_GIB


def decide(plan: Plan, args: ModelArgs, gib: float) -> Fit:
    """Choose gradient checkpointing where it is left open, for GPUs with ``gib`` GiB."""
    peak = functools.partial(peak_of, plan, gib)
    without = Choice(False, args.max_tokens_per_pack, plan.offload)
    wanted = {"on": True, "off": False}.get(args.gradient_checkpointing)
    choice = without._replace(checkpointing=peak(without) > gib if wanted is None else wanted)
    other = peak(choice._replace(checkpointing=not choice.checkpointing))
    said = f"gradient checkpointing: off; with it the peak is {other:.1f} GiB"
    if choice.checkpointing:
        said = f"gradient checkpointing: on; without it the peak is {other:.1f} GiB"
        pack = largest_pack(peak, without, plan.least_pack, gib)
        if pack:
            said += f"; with --max_tokens_per_pack {pack} it would fit without"
    phases = plan.phases(choice, gib * GIB)
    where, needed = max(phases, key=lambda name: total(phases[name])), peak(choice)
    line, problem = f"peak: {needed:.1f} of {gib:.4g} GiB, in {where}: ", ""
    if needed <= gib:
        line += f"fits, {gib - needed:.1f} GiB to spare"
    else:
        line += f"does not fit by {needed - gib:.1f} GiB"
        problem = f"{line}; {advise(plan, choice, gib)}"
    return Fit(choice, phases, needed, [line, said], problem)


def largest_pack(peak: Callable, choice: Choice, least: int, gib: float) -> int:
    """The largest --max_tokens_per_pack, not above the run's own, with which it fits; 0: none that
    holds ``least`` tokens."""
    sizes = range(-(-least // PACK_UNIT) * PACK_UNIT, choice.tokens + 1, PACK_UNIT)
    fitting = bisect.bisect(sizes, False, key=lambda n: peak(choice._replace(tokens=n)) > gib)
    return sizes[fitting - 1] if fitting else 0


def advise(plan: Plan, choice: Choice, gib: float) -> str:
    """Which flags would make a run fit that does not: smaller packs before --offload."""
    peak = functools.partial(peak_of, plan, gib)
    for offload in (choice.offload, *plan.offloads):
        option = choice._replace(checkpointing=True, offload=offload)
        pack = option.tokens
        if peak(option) > gib:
            pack = largest_pack(peak, option, plan.least_pack, gib)
        if pack:
            flags = "--gradient_checkpointing on"
            if pack < option.tokens:
                flags += f" --max_tokens_per_pack {pack}"
            if offload != choice.offload:
                flags += f" --offload {offload}"
            return f"what would help: {flags}"
    return "no pack is small enough: it needs more or larger GPUs, or adapters (--lora_rank)"


def check(plan: Plan, args: ModelArgs, ranks: distributed.Ranks) -> bool:
    """Before weights are read on a GPU: hold the plan against the memory that is free on the
    fullest of them, and a save against that of the host. Says the peak, and returns whether layers
    are computed again in the backward pass.

    Raises:
        UserError: on all ranks: the run does not fit, and what would help.
    """
    if ranks.device.type != "cuda":
        return args.gradient_checkpointing == "on"
    layer = max(memory.gathered_bytes(module)[1] for module in plan.modules)
    distributed.warm_up(ranks, layer)
    memory.release()
    free, _ = torch.cuda.mem_get_info()
    gib = min(distributed.gather_objects(free)) / GIB
    fit = decide(plan, args, gib)
    if fit.problem:
        raise UserError(f"memory of the GPUs: {fit.problem}")
    if distributed.is_main():
        print("memory per GPU,", "; ".join(fit.lines), flush=True)
    check_host(plan.host_bytes())
    return fit.choice.checkpointing


def check_host(needed: float) -> None:
    """Raises UserError on all ranks if ``needed`` bytes for each of its ranks are more than some
    machine has."""
    processes, free = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), memory.free_on_host()
    with distributed.raise_on_all_ranks():
        if free is not None and needed * processes > free:
            raise ValueError(
                f"saves (and --offload) need {needed * processes / GIB:.1f} GiB of host memory for "
                f"the {processes} ranks of a machine, but {free / GIB:.1f} GiB are free: use more "
                "machines, offload less, or pass --save_every 0"
            )


# -------------------------------------------------------------------------------------------------
# The table
# -------------------------------------------------------------------------------------------------


def memory_table(phases: Phases) -> list[str]:
    """Lines of a table of the GiB of each part (rows) in each phase (columns)."""
    columns = {}
    for name, parts in phases.items():
        whole = parts | {"reserved": RESERVED_GIB * GIB}
        columns[name] = whole | {"total": total(whole)}
    parts = [part for column in phases.values() for part in column]
    rows = [*dict.fromkeys(parts), "reserved", "total"]
    width = max(map(len, ["GiB per GPU", *rows]))
    lines = ["GiB per GPU".ljust(width) + "".join(f"{name:>15}" for name in phases)]
    for row in rows:
        cells = [f"{column[row] / GIB:.2f}" if row in column else "" for column in columns.values()]
        lines.append(row.ljust(width) + "".join(f"{cell:>15}" for cell in cells))
    return lines
