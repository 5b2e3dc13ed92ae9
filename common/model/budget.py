"""Does a run fit? Bytes on a GPU by phase of a step, their peak, and what would help.

    PolicyMemory, JudgeMemory   what the steps of either script need: `phases`
    fastest                     the fastest setting that fits
    check                       whether a run fits, on a GPU, before a weight is read

The formulas of each part are in `common.model.memory`; launch/plan.py prints them as a table.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn

from common import distributed
from common.distributed import UserError
from common.flags import ModelArgs
from common.model import memory

GIB = 2**30
RESERVED = 2 * GIB  # assumed: CUDA's context, NCCL's buffers, what the allocator cannot use
PACK_UNIT = 256  # tokens; the sizes of packs that are suggested are multiples of it
SPARE = 0.08  # of a GPU, for what the formulas do not know

Parts = dict[str, float]  # bytes on a GPU by part


class Choice(NamedTuple):
    """What decides the memory of an update, but not its result."""

    checkpointing: bool
    tokens: int  # of a pack


# -------------------------------------------------------------------------------------------------
# What a step needs
# -------------------------------------------------------------------------------------------------


@dataclass
class MemoryPlan:
    """What both scripts need.

    Attributes:
        models: by role, on any device.
        shards: ranks that share one copy of the weights.
        longest: tokens of the longest prompt.
        least_pack: tokens that a pack must hold.
        offload: what is kept in host memory while it is not in use, as the flag says.
    """

    models: dict[str, nn.Module]
    shards: int
    longest: int
    least_pack: int
    offload: str

    def __post_init__(self):
        self.held: dict[tuple[str, str], float] = {}  # (role, part)
        for role, module in self.models.items():
            for part, size in memory.resident_bytes(module, self.shards).items():
                if size:
                    self.held[role, part] = size

    def resident(self, *busy: str) -> Parts:
        """What lies on the GPU; of what is offloaded, the parts of the roles that are ``busy``: in
        training, or frozen and asked."""
        parts: Parts = {"reserved": RESERVED}
        for (role, part), size in self.held.items():
            if part in ("Adam", "average"):
                offloaded = self.offload != "none"
            else:
                offloaded = self.offload == "all" and role not in ("actor", "critic")
            if role in busy or not offloaded:
                parts[f"{role} {part}"] = size
        return parts

    def update(self, role: str, choice: Choice, *busy: str) -> Parts:
        """With two layers gathered, one of them ahead of its use."""
        module = self.models[role]
        root, layer, _ = memory.gathered_bytes(module)
        parts = {"gathered weights": root + 2 * layer, "gradient shards": self.held[role, "Adam"] / 2}
        parts |= memory.backward_bytes(module, choice.tokens, choice.checkpointing)
        return self.resident(role, *busy) | parts


@dataclass
class PolicyMemory(MemoryPlan):
    """Bytes on a GPU by phase of a PPO step and part: sums of what may be there at the same time.

    Attributes:
        max_new_tokens: of a response.
        critique_tokens: that a judge may write; 0: it writes none.
        sequences: of a rollout, on one rank.
        slots: sequences that decode together; 0: as many as fit, at most 256.
        average: whether the actor's weights are averaged.
        exact_kl: whether the actor's update asks the reference.
        trains: False: an evaluation.
    """

    max_new_tokens: int
    critique_tokens: int
    sequences: int
    slots: int
    average: bool
    exact_kl: bool
    trains: bool

    def __post_init__(self):
        super().__post_init__()
        if self.average:
            self.held["actor", "average"] = self.held["actor", "Adam"] // 2

    def phases(self, choice: Choice, room: float) -> dict[str, Parts]:
        """With ``room`` bytes on the GPU, of which a rollout takes what is left for its slots.
        Scoring by actor or critic needs less than their updates."""
        longest = self.longest + self.max_new_tokens
        phases = {"rollout": self.decoding("actor", longest, self.resident(), room)}
        frozen = [role for role in self.models if role not in ("actor", "critic")]
        if frozen:
            phases["score"] = max(map(self.scoring, frozen), key=total)
        for role in frozen:
            if role.startswith("grm") and self.critique_tokens:
                written = longest + self.critique_tokens
                phases[f"{role} writes"] = self.decoding(role, written, self.resident(role), room)
        if self.trains and "critic" in self.models:
            phases["update critic"] = self.update("critic", choice)
        if self.trains:
            busy = ["reference"] if self.exact_kl else []
            phases["update actor"] = self.update("actor", choice, *busy)
        return phases

    def decoding(self, role: str, length: int, stay: Parts, room: float) -> Parts:
        """All weights gathered; slots as `RolloutEngine.slot_count` takes them."""
        module = self.models[role]
        root, _, layers = memory.gathered_bytes(module)
        work = memory.rollout_work(module, self.slots)
        slots = min(self.slots or 256, self.sequences)
        if not self.slots:
            slots = memory.fitting_slots(module, length, slots, room - total(stay) - root - layers)
        cache = slots * memory.slot_cache(module, length)
        return stay | {"gathered weights": root + layers, "KV cache": cache, "forward": work}

    def scoring(self, role: str) -> Parts:
        root, layer, _ = memory.gathered_bytes(self.models[role])
        forward = memory.scoring_work(self.models[role])
        return self.resident(role) | {"gathered weights": root + 2 * layer, "forward": forward}


@dataclass
class JudgeMemory(MemoryPlan):
    """The same for the reward model's step and its evaluation, whose questions are assumed to be
    those of training.

    Attributes:
        batch, new_tokens: of an evaluation; 0: there is none.
    """

    batch: int
    new_tokens: int

    def phases(self, choice: Choice, room: float) -> dict[str, Parts]:
        judge = self.models["judge"]
        phases = {"update": self.update("judge", choice)}
        if self.batch:
            root, _, layers = memory.gathered_bytes(judge)
            slot = memory.slot_cache(judge, self.longest + self.new_tokens)
            phases["evaluate"] = self.resident() | {
                "gathered weights": root + layers,
                "KV cache": self.batch * slot,
                "forward": self.batch * self.longest * memory.layer_activations(judge),
            }
        return phases


def total(parts: Parts) -> float:
    return sum(parts.values())


# -------------------------------------------------------------------------------------------------
# Whether it fits
# -------------------------------------------------------------------------------------------------


def peak_of(plan: MemoryPlan, choice: Choice, gib: float) -> tuple[float, str]:
    """GiB of the largest phase on a GPU with ``gib``, and its name."""
    sizes = {name: total(parts) for name, parts in plan.phases(choice, gib * GIB).items()}
    name = max(sizes, key=sizes.get)
    return sizes[name] / GIB, name


def fastest(plan: MemoryPlan, most: int, gib: float) -> Choice | None:
    """The fastest setting that leaves a share `SPARE` of the memory free: without recomputation if
    any pack fits so, and the largest pack of at most ``most`` tokens. None: nothing fits."""
    sizes = range(-(-plan.least_pack // PACK_UNIT) * PACK_UNIT, most + 1, PACK_UNIT)
    for checkpointing in (False, True):
        for tokens in reversed(sizes):
            choice = Choice(checkpointing, tokens)
            if peak_of(plan, choice, gib)[0] <= (1 - SPARE) * gib:
                return choice
    return None


def advise(plan: MemoryPlan, most: int, gib: float) -> str:
    """The flags of `fastest`, or what else would help."""
    choice = fastest(plan, most, gib)
    if choice is None:
        return "no pack is small enough: use --offload, more or larger GPUs, or --lora_rank"
    checkpointing = "on" if choice.checkpointing else "off"
    return (
        f"fastest with {SPARE:.0%} to spare: --gradient_checkpointing {checkpointing} "
        f"--max_tokens_per_pack {choice.tokens}"
    )


def require_fit(plan: MemoryPlan, args: ModelArgs, gib: float) -> str:
    """A line about the peak of a run on GPUs with ``gib``. Raises UserError: it does not fit, and
    what would."""
    choice = Choice(args.gradient_checkpointing != "off", args.max_tokens_per_pack)
    peak, phase = peak_of(plan, choice, gib)
    line = f"memory per GPU: {peak:.1f} of {gib:.1f} GiB, in {phase}"
    if peak > gib:
        raise UserError(f"{line}, does not fit; {advise(plan, args.max_tokens_per_pack, gib)}")
    return line


def check(plan: MemoryPlan, args: ModelArgs, ranks: distributed.Ranks) -> bool:
    """Before weights are read on a GPU: hold the plan against the memory that is free on the
    fullest of them, and say its peak. Returns whether layers are recomputed.

    Raises:
        UserError: on all ranks: the run does not fit, and what would.
    """
    if ranks.device.type != "cuda":
        return args.gradient_checkpointing == "on"
    layer = max(memory.gathered_bytes(module)[1] for module in plan.models.values())
    distributed.warm_up(ranks, layer)
    memory.release()
    free, _ = torch.cuda.mem_get_info()
    line = require_fit(plan, args, min(distributed.gather_objects(free)) / GIB)
    if distributed.is_main():
        print(line, flush=True)
    return args.gradient_checkpointing != "off"
