"""Does a run fit? Bytes on a GPU by phase of a step, their peak, and what would help.

    MemoryPlan                what the steps of a script need: `MemoryPlan.phases`
    fastest                   the fastest setting that fits
    fit                       before weights are read: on a GPU, refuses what cannot fit and warns of
                              what may not; warns of sequences longer than a model was made for

The formulas of each part are in `common.model.memory`; launch/plan.py prints a plan as a table.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from common import distributed
from common.data.rows import Example, Prompt
from common.flags import ModelArgs
from common.model import memory
from common.model.attention import most_slots
from common.model.vlm import Modules
from common.process import UserError

GIB = 2**30
RESERVED = 2 * GIB  # assumed: CUDA's context, NCCL's buffers, what the allocator cannot use
PACK_UNIT = 256  # tokens; suggested sizes of packs are multiples of it
SPARE = 0.08  # share of a GPU, for what the formulas miss

# how the names of parts end that are exact, not estimates
CERTAIN = ("weights", "Adam", "average", "gradient shards", "KV cache")

Parts = dict[str, float]  # bytes on a GPU by part


# -------------------------------------------------------------------------------------------------
# What a step needs
# -------------------------------------------------------------------------------------------------


@dataclass
class MemoryPlan:
    """Peak bytes per phase of a step, by part."""

    models: Modules  # by role, on any device
    shards: int  # ranks that share one copy of the weights
    args: ModelArgs
    offload: str  # the value of --offload
    longest: int  # tokens of the longest sequence that is generated, with its prompt
    least_pack: int  # tokens that a pack must hold
    longest_target: int = 0  # tokens of the longest prompt with a target to learn
    updates: bool = True  # False: the run only evaluates
    keys: float = 1.0  # how many attention gathers per token of a pack

    def __post_init__(self):
        self.held: dict[tuple[str, str], float] = {}  # (role, part)
        for role, module in self.models.items():
            for part, size in memory.resident_bytes(module, self.shards).items():
                if size:
                    self.held[role, part] = size
        self.trained = [role for role, part in self.held if part == "Adam"]
        self.in_use: list[str] = []  # frozen roles to which the loss has an exact KL
        self.fixed: dict[str, Callable[[], Parts]] = {}  # phases that do not depend on packs

    @property
    def setting(self) -> tuple[int, bool]:
        """Tokens of a pack, and whether layers are recomputed, as the flags say."""
        return self.args.max_tokens_per_pack, self.args.gradient_checkpointing != "off"

    def phases(self, tokens: int, recompute: bool) -> dict[str, Parts]:
        """Bytes by phase and part, with updates on packs of so many tokens."""
        phases = {name: parts() for name, parts in self.fixed.items()}
        if self.updates:
            for role in self.trained:
                phases[f"update {role}"] = self.update(role, tokens, recompute)
        return phases

    def resident(self, *busy: str) -> Parts:
        """What stays on the GPU; of what --offload moves, only the parts of the roles that are ``busy``:
        in training, or frozen and in use."""
        parts: Parts = {"reserved": RESERVED}
        for (role, part), size in self.held.items():
            if part == "weights":
                offloaded = self.offload == "all" and role not in self.trained
            else:
                offloaded = self.offload != "none"
            if role in busy or not offloaded:
                parts[f"{role} {part}"] = size
        return parts

    def update(self, role: str, tokens: int, recompute: bool) -> Parts:
        """Bytes of an update. Two layers are gathered, one of them ahead of its use."""
        module = self.models[role]
        root, layer, _ = memory.gathered_bytes(module)
        parts = {
            "gathered weights": root + 2 * layer,
            "gradient shards": self.held[role, "Adam"] / 2,
        }
        parts |= memory.backward_bytes(module, tokens, recompute, self.keys)
        for other in self.in_use:  # with adapters, the reference is this module
            root, _, _ = memory.gathered_bytes(self.models.get(other, module))
            logits = memory.logits_bytes(module, module.model.setup.head_chunk)
            parts[f"KL to the {other}"] = root + logits
        return self.resident(role, *self.in_use) | parts

    def scoring(self, role: str) -> Parts:
        """Bytes of scoring by a frozen model. One in training needs less to score, even with masked or
        blank images, than to update."""
        module = self.models[role]
        root, layer, _ = memory.gathered_bytes(module)
        forward = memory.forward_bytes(module, module.model.setup.head_chunk)
        return self.resident(role) | {"gathered weights": root + 2 * layer, "forward": forward}

    def decoding(self, role: str, length: int, slots: int, *busy: str) -> Parts:
        """Bytes of decoding, with all weights gathered, or a rank's pieces, and a cache of so many
        ``slots`` of ``length`` tokens."""
        module, ranks = self.models[role], self.args.rollout_shards
        slot = memory.slot_bytes(module, length, ranks)
        return self.resident(*busy) | {
            "gathered weights": memory.decoding_bytes(module, ranks),
            "KV cache": slot,  # of one sequence, the least that a run needs
            "further slots": (slots - 1) * slot,
            "forward": memory.forward_bytes(module, slots),
        }

    def slots(self, gib: float) -> int:
        """How many samples a rollout can decode together on a GPU with ``gib``."""
        parts = self.decoding("actor", self.longest, slots=0)
        free = gib * GIB - total(parts) + parts["forward"]
        actor, ranks = self.models["actor"], self.args.rollout_shards
        return memory.fitting_slots(actor, self.longest, most_slots(ranks), free, ranks)


def longest_prompt(prompts: Iterable[Prompt]) -> int:
    return max(len(prompt.input_ids) for prompt in prompts)


def longest_example(examples: Iterable[Example]) -> int:
    """Tokens of the longest prompt with its target; 0 if there is none."""
    lengths = (len(example.prompt.input_ids) + len(example.target) for example in examples)
    return max(lengths, default=0)


def total(parts: Parts) -> float:
    return sum(parts.values())


def certain(parts: Parts) -> float:
    """Bytes that are exact: weights, gradients, optimizer states and one slot of a cache."""
    return sum(size for part, size in parts.items() if part.endswith(CERTAIN))


# -------------------------------------------------------------------------------------------------
# Whether it fits
# -------------------------------------------------------------------------------------------------


def peak_of(
    plan: MemoryPlan, tokens: int, recompute: bool, size: Callable = total
) -> tuple[float, str]:
    """GiB of the phase with the largest ``size``, `total` or `certain`, and its name."""
    return max((size(parts) / GIB, name) for name, parts in plan.phases(tokens, recompute).items())


def has_room(plan: MemoryPlan, gib: float, tokens: int, recompute: bool) -> bool:
    """Whether the peak leaves a share `SPARE` of ``gib`` free."""
    return peak_of(plan, tokens, recompute)[0] <= (1 - SPARE) * gib


def fastest(plan: MemoryPlan, most: int, gib: float) -> str:
    """The flags of the fastest setting that leaves a share `SPARE` of ``gib`` free: without
    recomputation if any pack then fits, and the largest pack of at most ``most`` tokens. If none fits,
    what else would help."""
    least = -(-plan.least_pack // PACK_UNIT) * PACK_UNIT
    for flag in ("off", "on"):
        for tokens in reversed(range(least, most + 1, PACK_UNIT)):
            if has_room(plan, gib, tokens, recompute=flag == "on"):
                return (
                    f"fastest with {SPARE:.0%} to spare: --gradient_checkpointing {flag} "
                    f"--max_tokens_per_pack {tokens}"
                )
    return "no pack is small enough: use --offload, more or larger GPUs, or --lora_rank"


def least_team(plan: MemoryPlan, gib: float) -> str:
    """The flag of the smallest teams whose rollouts leave a share `SPARE` of ``gib`` free; "" if none
    do."""
    args, advice = plan.args, ""
    for size in range(8, 0, -1):  # the smallest has the last word
        plan.args = replace(args, rollout_shards=size)
        with suppress(UserError):  # so many ranks cannot share a layer
            if plan.shards % size == 0 and has_room(plan, gib, *plan.setting):
                advice = f"--rollout_shards {size} fits: the smallest that does is the fastest"
    plan.args = args
    return advice


def require_fit(plan: MemoryPlan, gib: float, needed: Callable) -> str:
    """A line on the peak of a run on GPUs with ``gib`` and, if it has teams, on the smallest that fit.
    Where less than a share `SPARE` stays free, a warning with what would help. Raises UserError: a
    phase does not fit, measured by ``needed`` (`total` or `certain`)."""
    tokens, recompute = plan.setting
    peak, phase = peak_of(plan, tokens, recompute)
    line = f"memory per GPU: {peak:.1f} of {gib:.1f} GiB, in {phase}"
    if has_room(plan, gib, tokens, recompute):
        smallest = least_team(plan, gib) if plan.args.rollout_shards > 1 else ""
        return "; ".join(filter(None, (line, smallest)))
    advice = least_team(plan, gib) or fastest(plan, tokens, gib)
    if peak_of(plan, tokens, recompute, needed)[0] > gib:
        raise UserError(f"{line}, does not fit; {advice}")
    return f"warning: {line}, may not fit; {advice}"


def new_positions(plan: MemoryPlan) -> str:
    """A warning if sequences may be longer than a model was made for, else ""."""
    longest = max(plan.longest, plan.longest_target)
    limits = []
    for role, module in plan.models.items():
        text = module.model.config.get_text_config()
        limits.append((getattr(text, "max_position_embeddings", None) or longest, role))
    limit, role = min(limits)
    if longest <= limit:
        return ""
    return (
        f"warning: sequences may have {longest} tokens, more than the max_position_embeddings "
        f"{limit} of the {role}: it was not trained on the positions beyond"
    )


def fit(plan: MemoryPlan, ranks: distributed.Ranks) -> None:
    """Before weights are read: warn of sequences too long for a model; on GPUs, compare the plan with
    the free memory of the fullest of them, and say its peak. What is certain not to fit raises a
    UserError on all ranks; an estimate only warns."""
    plan.phases(*plan.setting)  # refuses layers that a team cannot share
    warning = new_positions(plan)
    if warning:
        distributed.say_once(warning)
    if ranks.device.type != "cuda":
        return
    layer = max(memory.gathered_bytes(module)[1] for module in plan.models.values())
    distributed.warm_up(ranks, layer)
    torch.cuda.empty_cache()  # NCCL and the libraries cannot use torch's cache
    free, _ = torch.cuda.mem_get_info()
    least = min(distributed.gather_objects(free)) / GIB
    distributed.say_once(require_fit(plan, least, certain))
