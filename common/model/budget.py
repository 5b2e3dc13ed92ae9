"""Does a run fit? Bytes on a GPU by phase of a step, their peak, and what would help.

    PolicyMemory, JudgeMemory   what the steps of either script need: `phases`
    fastest                     the fastest setting that fits
    fit                         refuses what does not, on a GPU, before a weight is read

The formulas of each part are in `common.model.memory`; launch/plan.py prints them as a table.
"""

from typing import Any, Iterable, NamedTuple

import torch
import torch.nn as nn

from common import distributed
from common.data.rows import Prompt
from common.distributed import UserError
from common.model import memory
from common.model.attention import MOST_SLOTS
from common.model.weights import recompute_layers

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


class MemoryPlan:
    """Bytes on a GPU by phase of a step and part: sums of what may be there at the same time.

    Args:
        args: the flags of the script.
        models: by role, on any device.
        rows: what the script reads.
        ranks: of the run.
    """

    trained: tuple[str, ...]  # roles
    offload: str  # what is kept in host memory while it is not in use, as the flag says
    longest: int  # tokens of the longest prompt
    least_pack: int  # tokens that a pack must hold

    def __init__(self, args: Any, models: dict[str, nn.Module], rows: Any, ranks: int):
        self.args, self.models, self.rows, self.ranks = args, models, rows, ranks
        self.shards = args.run.hsdp or ranks  # ranks that share one copy of the weights
        self.held: dict[tuple[str, str], float] = {}  # (role, part)
        for role, module in models.items():
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
                offloaded = self.offload == "all" and role not in self.trained
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


class PolicyMemory(MemoryPlan):
    """Of a PPO step."""

    trained = ("actor", "critic")

    def __init__(self, args: Any, models: dict[str, nn.Module], rows: Any, ranks: int):
        super().__init__(args, models, rows, ranks)
        self.offload, self.least_pack = args.update.offload, args.longest
        self.longest = longest_prompt(rows.train + rows.held_out)
        if args.env.env:  # a first observation may fill the prompt
            self.longest = args.data.max_prompt_tokens
        if args.update.ema_beta:
            self.held["actor", "average"] = self.held["actor", "Adam"] // 2

    def phases(self, choice: Choice, room: float) -> dict[str, Parts]:
        """With ``room`` bytes on the GPU, of which a rollout takes what is left for its slots.
        Scoring by actor or critic needs less than their updates."""
        longest = self.longest + self.args.longest_response
        phases = {"rollout": self.decoding("actor", longest, self.resident(), room)}
        frozen = [role for role in self.models if role not in self.trained]
        if frozen:
            phases["score"] = max(map(self.scoring, frozen), key=total)
        for role in frozen:
            if role.startswith("grm") and self.args.reward.grm_mode == "critique":
                written = longest + self.args.reward.grm_max_new_tokens
                phases[f"{role} writes"] = self.decoding(role, written, self.resident(role), room)
        if self.args.run.eval_only:
            return phases
        if "critic" in self.models:
            phases["update critic"] = self.update("critic", choice)
        busy = ["reference"] if self.args.exact_kl_in_loss else []
        phases["update actor"] = self.update("actor", choice, *busy)
        return phases

    def decoding(self, role: str, length: int, stay: Parts, room: float) -> Parts:
        """All weights gathered; slots as `RolloutEngine.slot_count` takes them."""
        module, rollout = self.models[role], self.args.rollout
        root, _, layers = memory.gathered_bytes(module)
        work = memory.rollout_work(module, rollout.slots)
        sampled = -(-self.args.prompts_per_rollout // self.ranks) * rollout.samples_per_prompt
        answered = -(-len(self.rows.held_out) // self.ranks) * rollout.eval_samples
        slots = min(rollout.slots or MOST_SLOTS, max(sampled, answered))
        if not rollout.slots:
            slots = memory.fitting_slots(module, length, slots, room - total(stay) - root - layers)
        cache = slots * memory.slot_cache(module, length)
        return stay | {"gathered weights": root + layers, "KV cache": cache, "forward": work}

    def scoring(self, role: str) -> Parts:
        root, layer, _ = memory.gathered_bytes(self.models[role])
        forward = memory.scoring_work(self.models[role])
        return self.resident(role) | {"gathered weights": root + 2 * layer, "forward": forward}


class JudgeMemory(MemoryPlan):
    """Of the reward model's step and its evaluation, whose questions are assumed to be those of
    training."""

    trained, offload = ("judge",), "none"

    def __init__(self, args: Any, models: dict[str, nn.Module], rows: Any, ranks: int):
        super().__init__(args, models, rows, ranks)
        self.least_pack = args.data.max_prompt_tokens
        self.longest = longest_prompt(row.prompt for row in (*rows.held_out, *rows.train))

    def phases(self, choice: Choice, room: float) -> dict[str, Parts]:
        judge, batch = self.models["judge"], self.args.eval.eval_batch
        phases = {"update": self.update("judge", choice)}
        if self.rows.held_out:
            root, _, layers = memory.gathered_bytes(judge)
            length = self.longest + self.args.eval.eval_max_new_tokens
            phases["evaluate"] = self.resident() | {
                "gathered weights": root + layers,
                "KV cache": batch * memory.slot_cache(judge, length),
                "forward": batch * self.longest * memory.layer_activations(judge),
            }
        return phases


def longest_prompt(prompts: Iterable[Prompt]) -> int:
    return max(len(prompt.input_ids) for prompt in prompts)


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


def require_fit(plan: MemoryPlan, gib: float) -> str:
    """A line about the peak of a run on GPUs with ``gib``. Raises UserError: it does not fit, and
    what would."""
    args = plan.args.model
    choice = Choice(args.gradient_checkpointing != "off", args.max_tokens_per_pack)
    peak, phase = peak_of(plan, choice, gib)
    line = f"memory per GPU: {peak:.1f} of {gib:.1f} GiB, in {phase}"
    if peak > gib:
        raise UserError(f"{line}, does not fit; {advise(plan, args.max_tokens_per_pack, gib)}")
    return line


def fit(plan: MemoryPlan, ranks: distributed.Ranks) -> None:
    """On GPUs, before weights are read: hold the plan against the memory that is free on the
    fullest of them, say its peak, and recompute layers where --gradient_checkpointing is auto.

    Raises:
        UserError: on all ranks: the run does not fit, and what would.
    """
    if ranks.device.type != "cuda":
        return
    layer = max(memory.gathered_bytes(module)[1] for module in plan.models.values())
    distributed.warm_up(ranks, layer)
    memory.release()
    free, _ = torch.cuda.mem_get_info()
    line = require_fit(plan, min(distributed.gather_objects(free)) / GIB)
    if distributed.is_main():
        print(line, flush=True)
    if plan.args.model.gradient_checkpointing == "auto":
        for role in plan.models.keys() & set(plan.trained):
            recompute_layers(plan.models[role].model)
