"""Does a run fit? Bytes on a GPU by phase of a step, their peak, and what would help.

    PolicyMemory, JudgeMemory   what the steps of either script need: `phases`
    fastest                     the fastest setting that fits, for launch/plan.py
    check                       whether a run fits, on a GPU, before a weight is read

The formulas of each part are in `common.model.memory`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
SPARE = 0.08  # of a GPU, for what the formulas do not know

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
    offload: ClassVar[str] = "none"

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


# -------------------------------------------------------------------------------------------------
# Whether it fits
# -------------------------------------------------------------------------------------------------


Plan = PolicyMemory | JudgeMemory


def peak_of(plan: Plan, choice: Choice, gib: float) -> tuple[float, str]:
    """GiB of the largest phase on a GPU with ``gib``, with what is reserved; and its name."""
    phases = plan.phases(choice, gib * GIB)
    name = max(phases, key=lambda name: total(phases[name]))
    return total(phases[name]) / GIB + RESERVED_GIB, name


def choice_of(plan: Plan, args: ModelArgs, device: str) -> Choice:
    """What the flags say; layers are recomputed on a GPU unless --gradient_checkpointing is off."""
    wanted = {"on": True, "off": False}.get(args.gradient_checkpointing, device == "cuda")
    return Choice(wanted, args.max_tokens_per_pack, plan.offload)


def fastest(plan: Plan, most: int, gib: float) -> Choice | None:
    """The fastest setting that leaves a share `SPARE` of the memory free: without recomputation if
    any pack fits so, and the largest pack of at most ``most`` tokens. None: nothing fits."""
    sizes = range(-(-plan.least_pack // PACK_UNIT) * PACK_UNIT, most + 1, PACK_UNIT)
    for checkpointing in (False, True):
        for tokens in reversed(sizes):
            choice = Choice(checkpointing, tokens, plan.offload)
            if peak_of(plan, choice, gib)[0] <= (1 - SPARE) * gib:
                return choice
    return None


def advise(plan: Plan, most: int, gib: float) -> str:
    """The flags of `fastest`, or what else would help."""
    choice = fastest(plan, most, gib)
    if choice is None:
        return "no pack is small enough: use --offload, more or larger GPUs, or --lora_rank"
    checkpointing = "on" if choice.checkpointing else "off"
    return (
        f"fastest with {SPARE:.0%} to spare: --gradient_checkpointing {checkpointing} "
        f"--max_tokens_per_pack {choice.tokens}"
    )


def check(plan: Plan, args: ModelArgs, ranks: distributed.Ranks) -> bool:
    """Before weights are read on a GPU: hold the plan against the memory that is free on the
    fullest of them, and say its peak. Returns whether layers are recomputed.

    Raises:
        UserError: on all ranks: the run does not fit, and what would.
    """
    choice = choice_of(plan, args, ranks.device.type)
    if ranks.device.type != "cuda":
        return choice.checkpointing
    layer = max(memory.gathered_bytes(module)[1] for module in plan.modules)
    distributed.warm_up(ranks, layer)
    memory.release()
    free, _ = torch.cuda.mem_get_info()
    gib = min(distributed.gather_objects(free)) / GIB
    peak, phase = peak_of(plan, choice, gib)
    line = f"memory per GPU: {peak:.1f} of {gib:.1f} GiB, in {phase}"
    if peak > gib:
        raise UserError(f"{line}, does not fit; {advise(plan, args.max_tokens_per_pack, gib)}")
    if distributed.is_main():
        print(line, flush=True)
    return choice.checkpointing
