"""What FSDP2 leaves to its users: steps on shards, learning rates, weights gathered for a rollout, host
memory. The scripts themselves shard models, make optimizers and take their steps.

    Trainable                          a model in training, with optimizer, schedule and average
    AdamW                              torch's, on this rank's shards
    unsharded, unwrapped_forward       many forwards without a collective
    reshard_root, clear_forward_order  after forwards without a backward
    offload, on_device                 what --offload keeps in host memory while not in use
"""

import inspect
import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from common.flags import OptimArgs
from common.ground.files import UserError
from common.model import vlm
from common.model.teams import cut
from common.model.weights import shard_of

HOST = torch.device("cpu")
MOST_SKIPPED = 3  # steps in a row that train a model but skip all its updates


# -------------------------------------------------------------------------------------------------
# Training
# -------------------------------------------------------------------------------------------------


Trained = TypeVar("Trained", bound=vlm.Wrapper)


@dataclass(eq=False)
class Trainable(Generic[Trained]):
    """A model in training: its optimizer, whose rates follow the schedule, and the running average of
    its weights."""

    module: Trained
    optimizer: torch.optim.Optimizer
    args: OptimArgs
    delay: int = 0  # first steps in which the model is not trained; its schedule starts after them
    ema_beta: float = 0.0  # weight of the past in the running average; 0: no average

    def __post_init__(self):
        self.skipped: set[int] = set()  # steps of the updates skipped since the last applied one
        # each group has its own
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        create_state(self.optimizer)
        if self.ema_beta:
            # The average is optimizer state, on the same shards: it is saved and resumed with it.
            for parameter, state in self.optimizer.state.items():
                state["ema"] = parameter.detach().clone()

    def rates_at(self, step: int) -> list[float]:
        """The learning rate of each group of parameters at 1-based ``step``."""
        factor = schedule(step - self.delay, self.args.steps - self.delay, self.args)
        return [rate * factor for rate in self.rates]

    def set_rates(self, step: int) -> None:
        """To be called before each update of ``step``."""
        for group, rate in zip(self.optimizer.param_groups, self.rates_at(step)):
            group["lr"] = rate

    @torch.no_grad()
    def clip_gradients(self) -> float:
        """Scale them to a global norm of at most --max_grad_norm; returns the norm before. The same bits
        as torch's clip_grad_norm_, which is slow on DTensors (see `AdamW`)."""
        gradients: list = [p.grad for p in self.module.parameters() if p.grad is not None]
        shards = [shard_of(gradient) for gradient in gradients]
        squares = torch.stack(torch._foreach_norm(shards)).square()  # of the norm of each
        dist.all_reduce(squares, group=gradients[0].device_mesh.get_group("shards"))
        norm = squares.sqrt().norm()
        if self.args.max_grad_norm:
            torch._foreach_mul_(shards, (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    def end_update(self, step: int, applied: bool) -> None:
        """Drop the gradients. An applied update moves the average; a skipped one is counted."""
        self.optimizer.zero_grad()
        if applied:
            self.skipped.clear()
            self.update_average()
        else:
            self.skipped.add(step)

    @torch.no_grad()
    def update_average(self) -> None:
        """average = beta * average + (1 - beta) * weights."""
        if not self.ema_beta:
            return
        for parameter, state in self.optimizer.state.items():
            average = shard_of(state["ema"])
            average.lerp_(shard_of(parameter).to(average.device), 1 - self.ema_beta)

    @contextmanager
    def averaged(self):
        """Inside, weights and average are swapped in place; afterwards both are as before, bit for
        bit. Without an average nothing happens."""
        self.swap_average()
        try:
            yield
        finally:
            self.swap_average()

    @torch.no_grad()
    def swap_average(self) -> None:
        if not self.ema_beta:
            return
        for parameter, state in self.optimizer.state.items():
            weight, average = shard_of(parameter), shard_of(state["ema"])
            before = weight.to(average.device, copy=True)
            weight.copy_(average)
            average.copy_(before)


class AdamW(torch.optim.AdamW):
    """Its step works on this rank's shards of parameters and state. torch's own plans how a list of
    DTensors is sharded by walking through it for each of them: 10 s at the first step of 840."""

    def _init_group(self, group, *lists):
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(shard_of, tensors)
        return has_complex


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create an optimizer's state, by a step at a rate of 0: a checkpoint may be saved or read before
    the first update."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def check_skipped_updates(trainables: Mapping[str, Trainable]) -> None:
    """Raises UserError on every rank if updates of a model were skipped in MOST_SKIPPED steps of this
    process, and none was applied in between."""
    for role, trained in trainables.items():
        steps = trained.skipped
        if len(steps) >= MOST_SKIPPED:
            raise UserError(
                f"step {max(steps)}: the gradient of the {role} was not finite and all its updates "
                f"were skipped, {len(steps)} steps in a row; to go back, pass an earlier checkpoint "
                "of this run to --resume with a new --out, perhaps with a smaller learning rate"
            )


def schedule(step: int, steps: int, args: OptimArgs) -> float:
    """Learning rate of 1-based ``step`` of ``steps`` as a fraction of the base."""
    if step <= args.warmup_steps:
        return step / (args.warmup_steps + 1)
    # an update at a rate of 0 would be wasted: a decay to 0 ends one step after the last
    done = step - args.warmup_steps - (args.min_lr_ratio == 0)
    progress = min(1.0, done / max(1, steps - args.warmup_steps))
    if args.lr_schedule == "cosine":
        return args.min_lr_ratio + (1 - args.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    if args.lr_schedule == "linear":
        return 1 - (1 - args.min_lr_ratio) * progress
    return 1.0


# -------------------------------------------------------------------------------------------------
# Shards
# -------------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` the weights of ``source``. Both are sharded alike, so every rank copies its
    own part."""
    weights = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        shard_of(parameter).copy_(shard_of(weights[name]))


def fsdp_parts(module: nn.Module) -> list:
    """The modules that FSDP gathers one by one, each also an `FSDPModule`; first ``module`` itself if
    it is one."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


@contextmanager
def unsharded(module: vlm.Wrapper):
    """Gather all weights once; inside, forwards run no collective, so ranks may do different
    amounts of work. In a team, each rank keeps its pieces of the layers, and all do the same work."""
    parts, team = fsdp_parts(module), module.model.setup.team
    layers = set(vlm.decoder(module.model).layers.modules())
    # otherwise the first unshard() below would initialise each part as a root
    parts[0]._get_fsdp_state()._lazy_init()
    with without_hooks(parts), ExitStack() as undo:
        # one after the other: what is gathered exists twice until it is in place
        for part in parts:
            part.unshard()
            undo.callback(part.reshard)
            if team.size > 1 and part in layers:
                cut(part, team, undo)
        yield


@contextmanager
def without_hooks(parts: list):
    """Inside, forwards of these modules run without FSDP2's hooks; other hooks stay. While weights are
    gathered and everything is in the compute dtype, FSDP2's have nothing to do, but they would record
    every forward, and their waits for FSDP2's streams could not be captured in a CUDA graph."""
    hooked = [(part, part._forward_pre_hooks, part._forward_hooks) for part in parts]
    for part, pre_hooks, hooks in hooked:
        state = part._get_fsdp_state()
        part._forward_pre_hooks, part._forward_hooks = OrderedDict(pre_hooks), OrderedDict(hooks)
        del part._forward_pre_hooks[state._pre_forward_hook_handle.id]
        del part._forward_hooks[state._post_forward_hook_handle.id]
    try:
        yield
    finally:
        for part, pre_hooks, hooks in hooked:
            # hooks registered inside stay, such as transformers' recorders
            pre_hooks.update(part._forward_pre_hooks)
            hooks.update(part._forward_hooks)
            part._forward_pre_hooks, part._forward_hooks = pre_hooks, hooks


def reshard_root(module: nn.Module) -> None:
    """Drop what forwards without a backward leave behind: a record, and the root's gathered weights."""
    clear_forward_order(module)
    fsdp_parts(module)[0].reshard()


def clear_forward_order(module: nn.Module) -> None:
    """Clear FSDP2's record of forwards. Only a backward does so otherwise, so with a frozen model, or
    in a long rollout, it would grow without bound."""
    parts = fsdp_parts(module)
    parts[0]._get_fsdp_state()._comm_ctx.post_forward_order.clear()
    for part in parts:
        state = part._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is not None:
                group._post_forward_indices.clear()


@contextmanager
def unwrapped_forward(decoder: nn.Module):
    """Inside, forwards run without transformers' wrappers (defaults, recording), which cost time in
    every decoding step."""
    decoder.forward = inspect.unwrap(type(decoder).forward).__get__(decoder)
    try:
        yield
    finally:
        del decoder.forward


# -------------------------------------------------------------------------------------------------
# Host memory
# -------------------------------------------------------------------------------------------------


def is_offloaded(part: Trainable | vlm.Wrapper, setting: str) -> bool:
    """True if ``setting``, the value of --offload, parks this part in host memory while it is not in
    use: the optimizer's state of a model in training (optimizer, all), or a frozen model (all). A
    reference that is the actor without its adapters is not frozen."""
    if isinstance(part, Trainable):
        return setting != "none"
    is_frozen = not any(parameter.requires_grad for parameter in part.parameters())
    return setting == "all" and is_frozen


def offload(part: Trainable | vlm.Wrapper, setting: str) -> None:
    """Move a part into host memory if `is_offloaded` says so."""
    if is_offloaded(part, setting):
        move(part, HOST)


@contextmanager
def on_device(setting: str, *parts: Trainable | vlm.Wrapper):
    """Inside, those of the parts that are offloaded are back on their device."""
    for part in parts:
        module = part.module if isinstance(part, Trainable) else part
        if is_offloaded(part, setting):
            move(part, module.model.setup.device)
    try:
        yield
    finally:
        for part in parts:
            offload(part, setting)


@torch.no_grad()
def move(part: Trainable | vlm.Wrapper, device: torch.device) -> None:
    """Put an optimizer's state, or the shards and buffers of a module that FSDP2 wraps, into the
    memory of ``device``. Parameters stay the same objects, and FSDP2's own `_apply` updates its
    references to them; forwards need them on the device of the mesh."""
    if isinstance(part, Trainable):
        for state in part.optimizer.state.values():
            state |= {name: moved_to(state[name], device) for name in state if name != "step"}
    else:
        part._apply(lambda tensor: moved_to(tensor, device))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # copies may still be on their way to the host


def moved_to(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, or this rank's shard of it, in the memory of ``device``, which is pinned if that is
    the host."""
    local = shard_of(tensor)
    if local.device == device:
        return tensor
    target = torch.empty_like(local, device=device, pin_memory=device.type == "cpu")
    target.copy_(local, non_blocking=True)
    if isinstance(tensor, DTensor):
        # Not DTensor.from_local, which takes a shard back to the device of its mesh.
        return DTensor(target, tensor._spec, requires_grad=False)
    return target
