"""Bytes per GPU by role and stage, operations of an update, and how much of both a run used.

The formulas read modules with parameters, which may be on the meta device; `common.model.budget` adds
them up.
"""

import resource
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from common import distributed
from common.logging import Metrics
from common.model.attention import LARGEST_HEAD, SlotCache, head_dim, layer_configs
from common.model.linear_attention import DeltaNet, activation_bytes
from common.model.teams import piece_bytes
from common.model.vlm import (
    UpdateSetting,
    Wrapper,
    decoder,
    experts_per_token,
    routers,
    tower_parameters,
)

MARGIN = 2 * 2**30  # least bytes of a GPU that a rollout leaves free
# dense bfloat16, from data sheets
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}


# -------------------------------------------------------------------------------------------------
# What is used
# -------------------------------------------------------------------------------------------------


def update_flops(policy: Wrapper, tokens: float, responses: float) -> float:
    """Operations of an update on so many ``tokens``, of which those of ``responses`` go through the
    output head: per weight a multiplication and an addition in the forward, as many for the gradient
    of the inputs, and as many for that of the weight unless it is frozen."""
    used = 1.0  # share of the stacked experts that a token uses
    if mixtures := routers(policy.model):
        experts = mixtures[0].get_parameter("weight").shape[0]
        used = experts_per_token(policy.model) / experts
    weights = sum(
        p.numel() * (used if ".experts." in name else 1)
        for name, p in decoder(policy.model).layers.named_parameters()
    )
    per_weight = 4 if policy.model.setup.adapter else 6
    return per_weight * (tokens * weights + responses * policy.model.lm_head.weight.numel())


def utilisation(policy: Wrapper, tokens: float, responses: float, seconds: float) -> Metrics:
    """The metric perf/update_mfu, on a known GPU: the share of its peak that the operations of
    `update_flops` on all ranks reached."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for known, peak_flops in PEAK_FLOPS.items():
        if known in name:
            possible = seconds * peak_flops * distributed.world_size()
            return {"perf/update_mfu": update_flops(policy, tokens, responses) / possible}
    return {}


def peak() -> Metrics:
    """The metric perf/peak_memory_gib: of the GPU since its counter was reset; without one, of this
    process."""
    if torch.cuda.is_available():
        used = torch.cuda.max_memory_allocated()
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"perf/peak_memory_gib": used / 2**30}


# -------------------------------------------------------------------------------------------------
# What is needed
# -------------------------------------------------------------------------------------------------


def count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def count_trained(parameters: Iterable[Tensor]) -> int:
    return count(parameter for parameter in parameters if parameter.requires_grad)


def resident_bytes(module: Wrapper, shards: int) -> dict[str, int]:
    """What a role keeps on a GPU between stages: its weights, and Adam's two moments of those that are
    trained. FSDP2 cuts them along the first dimension into ``shards``, of which the largest counts; a
    frozen vision tower is whole on every rank."""
    whole = {p for p in tower_parameters(module.model) if not p.requires_grad}
    weights = trained = 0
    for p in module.parameters():
        rows = len(p) if p in whole else -(-len(p) // shards)
        share = rows * (p.numel() // len(p))
        weights += share * p.itemsize
        trained += share * p.requires_grad
    return {
        "weights": weights,
        "Adam": 8 * trained,
    }


def gathered_bytes(module: Wrapper) -> tuple[int, int, int]:
    """Bytes of the gathered weights of the root group (embeddings, head, norm), of the largest layer,
    and of all layers."""
    width = module.model.setup.dtype.itemsize
    layers = [count(layer.parameters()) for layer in decoder(module.model).layers]
    tower = count(tower_parameters(module.model))
    root = count(module.parameters()) - tower - sum(layers)
    return width * root, width * max(layers), width * sum(layers)


def decoding_bytes(module: Wrapper, ranks: int) -> int:
    """Bytes of the gathered weights in a rollout: all; or where ``ranks`` share the layers, the root, the
    pieces of one rank, and the last layer, which is whole until it is cut."""
    root, layer, layers = gathered_bytes(module)
    if ranks == 1:
        return root + layers
    return root + layer + piece_bytes(module.model, ranks)


def activations(module: Wrapper, keys: float = 1.0) -> list[float]:
    """Bytes per token that each decoder layer keeps for its backward. ``keys``: how many are gathered
    per token of a pack, as responses attend to their prompts too; sdpa on a GPU repeats them for each
    query head."""
    configs = layer_configs(module.model.config.get_text_config())
    layers = zip(decoder(module.model).layers, configs)
    return [layer_activations(module, layer, config, keys) for layer, config in layers]


def layer_activations(module: Wrapper, layer: nn.Module, config, keys: float) -> float:
    """Those of one layer: each norm's input in float32 and its output before the scale (less on a GPU,
    where a norm is one kernel); the inputs of the matrix products; queries, keys, values and output of
    attention, or what linear attention keeps; four tensors of the MLP (gate, its activation, up, their
    product), in MoE for each expert of the token, with its input; and the same four for the layer's
    own inputs, if it has any."""
    text, width = module.model.config.get_text_config(), module.model.setup.dtype.itemsize
    queries, kv_heads = config.num_attention_heads, config.num_key_value_heads
    repeats = {"q_norm": queries, "k_norm": kv_heads}  # one scale for all heads
    norms = gates = experts = 0
    for name, p in layer.named_parameters():
        if "norm" in name:
            norms += p.numel() * repeats.get(name.split(".")[-2], 1)
        if name.endswith(("gate_proj.weight", "per_layer_input_gate.weight")):
            gates += len(p)
        if "experts." in name:
            experts = experts_per_token(module.model)
    inner = gates or getattr(text, "intermediate_size", 0)
    if experts:
        inner = gates + experts * text.moe_intermediate_size
    if head_dim(config) > LARGEST_HEAD:
        kv_heads = queries
    heads = queries + keys * kv_heads
    mixing = 2 * width * head_dim(config) * heads
    if any(isinstance(part, DeltaNet) for part in layer.children()):
        mixing = activation_bytes(text, width)
    products = width * ((2 + experts) * text.hidden_size + 4 * inner)
    return (4 + width) * norms + mixing + products


def logits_bytes(module: Wrapper, tokens: int) -> int:
    """Bytes of the logits of so many tokens, as three float32 tensors; 0 without a head."""
    if not hasattr(module.model, "lm_head"):
        return 0
    return 12 * tokens * module.model.config.get_text_config().vocab_size


def forward_bytes(module: Wrapper, tokens: int) -> float:
    """What a forward without gradients needs besides gathered weights and cache: one layer's
    activations of a pack, or the logits of so many ``tokens`` if they are larger."""
    pack = module.model.setup.max_tokens_per_pack * max(activations(module))
    return max(pack, logits_bytes(module, tokens))


def slot_bytes(module: Wrapper, length: int, ranks: int) -> int:
    """Bytes of the cache of one sequence of up to ``length`` tokens on each of the ``ranks`` that share
    its heads, counted on meta."""
    text, setup = module.model.config.get_text_config(), module.model.setup
    meta = torch.device("meta")
    return SlotCache(text, 1, length, setup.dtype, meta, setup.backend, ranks).nbytes


def fitting_slots(policy: Wrapper, length: int, most: int, free: float, ranks: int) -> int:
    """How many slots for sequences of ``length`` tokens fit into ``free`` bytes: at least one, at most
    ``most``. A tenth of the bytes, and at least 2 GiB, stay free for fragments of torch's cache, NCCL's
    buffers and CUDA graphs."""
    room = free - max(0.1 * free, MARGIN) - forward_bytes(policy, most)
    return max(1, min(most, int(room // slot_bytes(policy, length, ranks))))


def kept_activations(module: Wrapper, setting: UpdateSetting, keys: float = 1.0) -> list[float]:
    """Bytes per token that each decoder layer keeps between forward and backward: its `activations`, or
    if it is recomputed its input and what ``setting`` says. Attention's output comes with the logarithm
    of a sum in float32 for each head."""
    text, width = module.model.config.get_text_config(), module.model.setup.dtype.itemsize
    sizes = activations(module, keys)
    first_with_products = setting.recomputed - setting.keep_products
    layers = zip(decoder(module.model).layers, layer_configs(text))
    for number, (layer, config) in enumerate(layers):
        if number == setting.recomputed:
            break
        sizes[number] = width * text.hidden_size
        if setting.keep_attention:
            sizes[number] += config.num_attention_heads * (width * head_dim(config) + 4)
        if number >= first_with_products:
            products = (part for part in layer.modules() if isinstance(part, nn.Linear))
            sizes[number] += width * sum(part.out_features for part in products)
    return sizes


def backward_bytes(module: Wrapper, setting: UpdateSetting, keys: float = 1.0) -> dict[str, float]:
    """Bytes of an update, without gathered weights and gradient shards: what the forward keeps, and what
    the backward adds where it needs most: at the head, a chunk of logits and the weight's gradient in
    float32; in a layer, the activations computed again, their gradients, and those of two layers'
    weights before they are reduced, in the compute dtype and in float32. By then the layers behind it
    have dropped theirs. ``keys``: see `activations`.
    """
    model, tokens = module.model, setting.tokens
    layers = decoder(model).layers
    width = model.setup.dtype.itemsize
    text = model.config.get_text_config()
    hidden = tokens * text.hidden_size
    inputs = tokens * len(layers) * getattr(text, "hidden_size_per_layer_input", 0)
    # embeddings, with images, and the last norm; the layers' own inputs, their norm and gradient
    saved = (hidden + inputs) * (4 + 4 * width)

    sizes, peak, below = kept_activations(module, setting, keys), 0.0, 0.0
    for number, size in enumerate(activations(module, keys)):
        at_once = size + (width * text.hidden_size if number < setting.recomputed else 0)
        peak = max(peak, tokens * (below + at_once + size // 3))
        below += sizes[number]
    saved += tokens * below

    head = count_trained([model.lm_head.weight]) if hasattr(model, "lm_head") else 0
    at_head = logits_bytes(module, model.setup.head_chunk) + 4 * head
    largest = max(count_trained(layer.parameters()) for layer in layers)
    in_layer = peak - tokens * below + 2 * largest * (4 + width) + width * head
    return {"activations": saved, "backward": max(at_head, in_layer)}
