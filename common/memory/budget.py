"""Does a run fit? Bytes on a GPU by phase of a step, their peak, and what would help.

    MemoryPlan                what the steps of a script need: `MemoryPlan.phases`
    choose                    packs and recomputed layers of updates: as few as memory requires
    fit                       before weights are read: on a GPU, chooses, refuses what cannot fit and warns
                              of what may not; warns of sequences longer than a model was made for

The formulas of each part are in `common.memory.memory`; launch/plan.py prints a plan as a table.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from common import distributed
from common.data.rows import Example, Prompt
from common.flags import ModelArgs
from common.ground.files import UserError
from common.memory import memory
from common.memory.recompute import can_keep, recompute
from common.model.attention import most_slots
from common.model.vlm import Modules, UpdateSetting, decoder

GIB = 2**30
RESERVED = 2 * GIB  # assumed: CUDA's context, NCCL's buffers, what the allocator cannot use
PACK_UNIT = 256  # tokens; smaller packs than asked for are multiples of it
SPARE = 0.08  # share of a GPU, for what the formulas miss
SURE = 1.2  # times the memory of a GPU: the formulas do not err by as much

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
    group: int  # tokens of the longest prompt with all its responses
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

    def phases(self, setting: UpdateSetting) -> dict[str, Parts]:
        """Bytes by phase and part."""
        return {name: parts() for name, parts in self.fixed.items()} | self.update_phases(setting)

    def update_phases(self, setting: UpdateSetting) -> dict[str, Parts]:
        roles = self.trained if self.updates else []
        return {f"update {role}": self.update(role, setting) for role in roles}

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

    def update(self, role: str, setting: UpdateSetting) -> Parts:
        """Bytes of an update. Two layers are gathered, one of them ahead of its use; a single rank gathers
        none ahead."""
        module = self.models[role]
        root, layer, _ = memory.gathered_bytes(module, self.shards)
        parts = {
            "gathered weights": root + min(2, self.shards) * layer,
            "gradient shards": self.held[role, "Adam"] / 2,
        }
        parts |= memory.backward_bytes(module, setting, self.keys)
        for other in self.in_use:  # with adapters, the reference is this module
            root, _, _ = memory.gathered_bytes(self.models.get(other, module), self.shards)
            logits = memory.logits_bytes(module, module.model.setup.head_chunk)
            parts[f"KL to the {other}"] = root + logits
        return self.resident(role, *self.in_use) | parts

    def scoring(self, role: str) -> Parts:
        """Bytes of scoring by a frozen model. One in training needs less to score, even with masked or
        blank images, than to update."""
        module = self.models[role]
        root, layer, _ = memory.gathered_bytes(module, self.shards)
        forward = memory.forward_bytes(module, module.model.setup.head_chunk)
        return self.resident(role) | {"gathered weights": root + 2 * layer, "forward": forward}

    def decoding(self, role: str, length: int, slots: int, *busy: str) -> Parts:
        """Bytes of decoding, with all weights gathered, or a rank's pieces, and a cache of so many
        ``slots`` of ``length`` tokens."""
        module, ranks = self.models[role], self.args.rollout_shards
        return self.resident(*busy) | {
            "gathered weights": memory.decoding_bytes(module, self.shards, ranks),
            "KV cache": slots * memory.slot_bytes(module, length, ranks),
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
    return max((example.length for example in examples), default=0)


def total(parts: Parts) -> float:
    return sum(parts.values())


# -------------------------------------------------------------------------------------------------
# What fits
# -------------------------------------------------------------------------------------------------


def peak_of(phases: dict[str, Parts]) -> tuple[float, str]:
    """GiB of the largest phase, and its name."""
    return max((total(parts) / GIB, name) for name, parts in phases.items())


def has_room(phases: dict[str, Parts], gib: float) -> bool:
    """Whether the peak leaves a share `SPARE` of ``gib`` free."""
    return not phases or peak_of(phases)[0] <= (1 - SPARE) * gib


def choose(plan: MemoryPlan, gib: float) -> UpdateSetting:
    """How updates work on GPUs with ``gib``, as --gradient_checkpointing says: "on" recomputes all layers
    and "off" none, in packs of --max_tokens_per_pack. "auto" takes the first that leaves a share `SPARE`
    free, in both models in training:

    1. the largest pack, up to --max_tokens_per_pack, that needs no recomputation, if it holds a prompt
       with all its responses;
    2. the fewest recomputed layers, which keep the outputs of attention, and as many of these those of
       products, too, as then fit, if they can (`recompute.can_keep`);
    3. the same as "on", also with a trained tower, whose activations are in no plan.
    """
    args, most = plan.args, plan.args.max_tokens_per_pack
    models = [plan.models[role].model for role in plan.trained]
    layers = max(len(decoder(model).layers) for model in models)
    everything = UpdateSetting(most, layers)
    if args.gradient_checkpointing == "off":
        return UpdateSetting(most, 0)
    if args.gradient_checkpointing == "on" or args.train_vision:
        return everything

    def fits(setting: UpdateSetting) -> bool:
        return has_room(plan.update_phases(setting), gib)

    attention, products = map(all, zip(*map(can_keep, models)))
    smaller = range(-(-plan.group // PACK_UNIT) * PACK_UNIT, most, PACK_UNIT)
    settings = [UpdateSetting(tokens, 0) for tokens in (most, *reversed(smaller))]
    settings += [UpdateSetting(most, few, attention) for few in range(1, layers + 1)]
    setting = next(filter(fits, settings), everything)
    if products and setting.keep_attention:
        in_fewer = reversed(range(setting.recomputed + 1))
        setting = next(filter(fits, (setting._replace(keep_products=n) for n in in_fewer)))
    return setting


def require_fit(plan: MemoryPlan, setting: UpdateSetting, gib: float, most: float) -> str:
    """A line on the peak of a run on GPUs with ``gib``; where less than a share `SPARE` stays free, a
    warning with what would help. Raises UserError if the peak is ``most`` times as much as there is."""
    phases = plan.phases(setting)
    peak, phase = peak_of(phases)
    line = f"memory per GPU: {peak:.1f} of {gib:.1f} GiB, in {phase}"
    if plan.updates:
        line += f"; {setting}"
    if has_room(phases, gib):
        return line
    helps = [
        "smaller packs (--max_tokens_per_pack)",
        "--offload",
        "--lora_rank",
        "more or larger GPUs",
    ]
    if not phase.startswith("update"):
        helps = ["--rollout_shards", "fewer --slots", *helps]
    elif not setting.recomputed:
        helps = ["--gradient_checkpointing auto", *helps]
    if peak > most * gib:
        raise UserError(f"{line}: does not fit; what helps: {', '.join(helps)}")
    return f"warning: {line}: may not fit; what helps: {', '.join(helps)}"


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
    the free memory of the fullest of them, let updates work as `choose` says, and say its peak. What
    needs `SURE` times as much as is free raises a UserError on all ranks; less only warns."""
    plan.phases(UpdateSetting(1, 0))  # refuses layers that a team cannot share
    warning = new_positions(plan)
    if warning:
        distributed.say_once(warning)
    if ranks.device.type != "cuda":
        return
    layers = (memory.gathered_bytes(module, plan.shards)[1] for module in plan.models.values())
    distributed.warm_up(ranks, max(layers))
    torch.cuda.empty_cache()  # NCCL and the libraries cannot use torch's cache
    free, _ = torch.cuda.mem_get_info()  # what programs of the user hold is not free, either
    least = min(distributed.gather_objects(free)) / GIB
    # of the main rank: functions may compile there alone, which the plan depends on
    setting = distributed.from_main(choose(plan, least))
    if plan.args.gradient_checkpointing == "auto":
        for role in plan.trained:
            recompute(plan.models[role].model, setting)
    distributed.say_once(require_fit(plan, setting, least, SURE))
