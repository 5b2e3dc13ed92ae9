"""Bytes per GPU by role and stage, operations of an update, and how much of both a run used.

The formulas read modules with parameters, which may be on the meta device; `common.memory.budget` adds
them up.
"""

import resource
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from common import distributed
from common.logging import Metrics
from common.logprobs import can_fuse
from common.model import experts
from common.model.attention import LARGEST_HEAD, SlotCache, head_dim, layer_configs
from common.model.layers import RMSNorm, RMSNormPlusOne, SwiGLU
from common.model.linear_attention import DeltaNet, activation_bytes
from common.model.teams import piece_bytes
from common.model.vlm import (
    UpdateSetting,
    Wrapper,
    decoder,
    experts_per_token,
    routers,
    tower_parameters,
    whole_parameters,
)

LEAST_FREE = 2 * 2**30  # least bytes of a GPU that a rollout leaves free
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


def resident_bytes(module: Wrapper, shards: int) -> dict[str, int]:
    """What a role keeps on a GPU between stages: its weights, and Adam's two moments of those that are
    trained. FSDP2 cuts them along the first dimension into ``shards``, of which the largest counts, but
    for `whole_parameters`."""
    whole = whole_parameters(module, shards)
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


def gathered_bytes(module: Wrapper, shards: int) -> tuple[int, int, int]:
    """Bytes of the gathered weights of the root group (embeddings, head, norm), of the largest layer,
    and of all layers, if ``shards`` ranks share them."""
    width, whole = module.model.setup.dtype.itemsize, whole_parameters(module, shards)

    def gathered(parameters: Iterable[nn.Parameter]) -> int:
        return width * count(set(parameters) - whole)

    layers = [gathered(layer.parameters()) for layer in decoder(module.model).layers]
    tower = gathered(tower_parameters(module.model))
    root = gathered(module.parameters()) - tower - sum(layers)
    return root, max(layers), sum(layers)


def decoding_bytes(module: Wrapper, shards: int, ranks: int) -> int:
    """Bytes of the gathered weights in a rollout: all; or where a team of ``ranks`` shares the layers, the
    root, the pieces of one rank, and the last layer, which is whole until it is cut."""
    root, layer, layers = gathered_bytes(module, shards)
    if ranks == 1:
        return root + layers
    return root + layer + piece_bytes(module.model, ranks)


def activations(module: Wrapper, keys: float = 1.0) -> list[tuple[float, float]]:
    """`layer_activations` of each decoder layer. ``keys``: how many are gathered per token of a pack, as
    responses attend to their prompts too; sdpa on a GPU repeats them for each query head."""
    configs = layer_configs(module.model.config.get_text_config())
    layers = zip(decoder(module.model).layers, configs)
    return [layer_activations(module, layer, config, keys) for layer, config in layers]


def layer_activations(
    module: Wrapper, layer: nn.Module, config, keys: float
) -> tuple[float, float]:
    """Bytes per token that a layer keeps for its backward, and those of the gradients that exist in it
    while most of these do.

    Kept are the inputs of norms, for our own as a GPU's kernel keeps them, else in float32 and with the
    output before the scale; the inputs of the matrix products; queries, keys, values and output of
    attention, or what linear attention keeps; four tensors of the MLP (gate, its activation, up, their
    product), three where gates are fused; in MoE for each expert of the token, with its input and output;
    and the same four for the layer's own inputs, if it has any. Gradients are two of the MLP's tensors, or
    three of the outputs of experts, which return into the order of the tokens; the residual's; and one of
    adapters' inputs, beside that of their layers'.
    """
    text, setup = module.model.config.get_text_config(), module.model.setup
    width, hidden = setup.dtype.itemsize, text.hidden_size
    queries, kv_heads = config.num_attention_heads, config.num_key_value_heads
    repeats = {"q_norm": queries, "k_norm": kv_heads}  # one scale for all heads
    per_number: dict[type, int] = {RMSNorm: width, RMSNormPlusOne: 4}
    fuses = setup.device.type == "meta" or can_fuse(setup.device)  # a plan without GPUs is for GPUs
    norms = gates = experts = fused = 0
    for name, part in layer.named_modules():
        last = name.split(".")[-1]
        if "norm" in last:
            numbers = count(part.parameters()) * repeats.get(last, 1)
            norms += numbers * per_number.get(type(part), 4 + width)
        if last in ("gate_proj", "per_layer_input_gate"):
            gates += len(part.get_parameter("weight"))
        if isinstance(part, SwiGLU) and fuses:
            fused += len(part.gate_proj.weight)
        if last == "experts":
            experts = experts_per_token(module.model)
    inner = gates or getattr(text, "intermediate_size", 0)
    if experts:
        inner = gates + experts * text.moe_intermediate_size
    if head_dim(config) > LARGEST_HEAD:
        kv_heads = queries
    mixing = 2 * width * head_dim(config) * (queries + keys * kv_heads)
    if any(isinstance(part, DeltaNet) for part in layer.children()):
        mixing = activation_bytes(text, width)
    products = width * ((2 + 2 * experts) * hidden + 4 * inner - fused)
    gradients = width * (hidden + max(2 * inner, 3 * experts * hidden))
    if setup.adapter:
        gradients += width * hidden
    return norms + mixing + products, gradients


def logits_bytes(module: Wrapper, tokens: int) -> int:
    """Bytes of the logits of so many tokens, as three float32 tensors; 0 without a head."""
    if not hasattr(module.model, "lm_head"):
        return 0
    return 12 * tokens * module.model.config.get_text_config().vocab_size


def forward_bytes(module: Wrapper, tokens: int) -> float:
    """What a forward without gradients needs besides gathered weights and cache: one layer's
    activations of a pack, or the logits of so many ``tokens`` if they are larger."""
    largest = max(size for size, _ in activations(module))
    pack = module.model.setup.max_tokens_per_pack * largest
    return max(pack, logits_bytes(module, tokens))


def slot_bytes(module: Wrapper, length: int, ranks: int) -> int:
    """Bytes of the cache of one sequence of up to ``length`` tokens on each of the ``ranks`` that share
    its heads, counted on meta."""
    text, setup = module.model.config.get_text_config(), module.model.setup
    meta = torch.device("meta")
    cache = SlotCache(text, 1, length, setup.dtype, meta, setup.backend, ranks)
    return cache.nbytes + length * experts_bytes(module)


def experts_bytes(module: Wrapper) -> int:
    """Bytes per token of the ids of the experts that a rollout records, in its slots and then in host
    memory; 0 where it records none."""
    if not module.model.setup.routers_hooked:
        return 0
    return experts.buffer_of(module.model, 1, 1, torch.device("meta")).nbytes


def fitting_slots(policy: Wrapper, length: int, most: int, free: float, ranks: int) -> int:
    """How many slots for sequences of ``length`` tokens fit into ``free`` bytes: at least one, at most
    ``most``. A tenth of the bytes, and at least 2 GiB, stay free for fragments of torch's cache, NCCL's
    buffers and CUDA graphs."""
    room = free - max(0.1 * free, LEAST_FREE) - forward_bytes(policy, most)
    return max(1, min(most, int(room // slot_bytes(policy, length, ranks))))


def kept_activations(module: Wrapper, setting: UpdateSetting, keys: float = 1.0) -> list[float]:
    """Bytes per token that each decoder layer keeps between forward and backward: its `activations`, or
    if it is recomputed its input and what ``setting`` says. Attention's output comes with the logarithm
    of a sum in float32 for each head."""
    text, width = module.model.config.get_text_config(), module.model.setup.dtype.itemsize
    sizes = [size for size, _ in activations(module, keys)]
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
    the backward adds where it needs most. ``keys``: see `activations`.

    At the head that is a chunk of logits, the weight's gradient in float32, and the last norm's tensors
    and gradients. In a layer, behind which the layers have dropped theirs: its activations, kept or
    computed again, and gradients of them; the gradient of its largest weight, and those of the layer
    behind it in float32, which are being reduced.
    """
    model, tokens = module.model, setting.tokens
    layers, width = decoder(model).layers, model.setup.dtype.itemsize
    text = model.config.get_text_config()
    by_layer = kept_activations(module, setting, keys)
    saved = tokens * sum(by_layer)
    head = 0  # numbers of its weight, if that is trained
    if hasattr(model, "lm_head") and model.lm_head.weight.requires_grad:
        head = model.lm_head.weight.numel()
    at_head = logits_bytes(module, model.setup.head_chunk) + 4 * head
    at_head += 4 * width * tokens * text.hidden_size

    in_layer = of_weights = 0.0
    for number, (size, gradients) in enumerate(activations(module, keys)):
        in_layer = max(in_layer, tokens * (sum(by_layer[:number]) + size + gradients))
        trained = [p.numel() for p in layers[number].parameters() if p.requires_grad]
        of_weights = max(of_weights, 4 * sum(trained) + width * max(trained, default=0))
    in_layer += of_weights + width * head

    # the layers' own inputs, before and after their norm, and their gradient
    inputs = 3 * width * tokens * len(layers) * getattr(text, "hidden_size_per_layer_input", 0)
    return {"activations": saved + inputs, "backward": max(at_head, in_layer - saved)}
