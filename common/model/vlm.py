"""The model in two stages: image features, and then the language model.

    patches -> vision tower -> image features              image_features, compute_features
    pack    -> embeddings, those of image tokens replaced by image features -> language model
                                                           hidden_states

A model here is one of transformers, of the type `Model`, with one more attribute: ``setup``, what it
is and how it computes (`Setup`). The attention module of each layer also has a ``slot_layer``, the
layer's number in the cache. `build` makes such models.

Shapes: P prompt tokens, I images, M image tokens, L tokens of a pack, H hidden size, K levels
of image features.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from common.buffers import Batch, Pack, fill_packs
from common.data.families import Family
from common.distributed import ALONE, Team, raise_on_all_ranks
from common.ground.files import UserError
from common.model.linear_attention import Decay

# -------------------------------------------------------------------------------------------------
# What a model is
# -------------------------------------------------------------------------------------------------


@dataclass
class Compute:
    """How the models of a run compute."""

    backend: str  # of attention
    dtype: torch.dtype  # of forward passes; trained weights and their optimizer are float32
    device: torch.device
    max_tokens_per_pack: int
    head_chunk: int  # tokens whose logits exist at the same time
    longest: int  # tokens of the longest sequence

    @property
    def planned(self) -> bool:
        """Whether nothing is computed: models on the meta device are planned, and need no weights."""
        return self.device.type == "meta"


class UpdateSetting(NamedTuple):
    """What the forward pass of an update keeps for the backward pass, which computes the rest again
    (`recompute`)."""

    tokens: int  # of a pack
    recomputed: int  # number of layers, the first ones, whose activations are computed again
    keep_attention: bool = False  # whether all of these keep the outputs of attention
    keep_products: int = 0  # number of these, the last ones, that keep those of matrix products

    def __str__(self) -> str:
        packs = f"packs of {self.tokens:,} tokens"
        if not self.recomputed:
            return f"{packs}, nothing recomputed"
        text = f"{packs}, the first {self.recomputed} layers recomputed"
        if self.keep_attention:
            text += " but for attention"
        if self.keep_products:
            text += f", and for products in {self.keep_products} of them"
        return text


@dataclass(kw_only=True)
class Setup(Compute):
    """``model.setup``: what a model here is, and how it computes."""

    family: Family
    folder: Path  # its checkpoint
    trains_vision: bool = False  # its own forward computes image features
    team: Team = ALONE  # the ranks that decode together, once it is loaded
    # on rank 0: the types of its weights in the checkpoint's files
    types: dict[str, torch.dtype] = field(default_factory=dict)
    digest: str = ""  # on rank 0, of these files
    # whether its routers do what `experts.Recorder` and `experts.Replay` say
    routers_hooked: bool = False
    updates: UpdateSetting | None = None  # what --gradient_checkpointing auto chose, on a GPU
    # what PEFT's adapter_config.json says of its adapters, if it has any
    adapter: dict[str, Any] | None = None


# The classes of transformers' modules differ by family. The classes here declare which attributes are
# used, for readers and the type checker; they are never instantiated. A part that was left out of a
# model is absent.


class Rotary(nn.Module):
    rope_type: str | dict[str, str]


class Part(nn.Module):
    """What can be trained: a decoder or a tower."""

    config: Any
    gradient_checkpointing_enable: Callable


class Decoder(Part):
    """The language model."""

    layers: nn.ModuleList
    rotary_emb: Rotary
    get_input_embeddings: Callable[..., nn.Embedding]
    get_per_layer_inputs: Callable[..., Tensor]  # of Gemma 4's small models


class Core(nn.Module):
    """``model.model``: the decoder, and in most families what makes image features. The decoder itself
    in a text-only model."""

    visual: Part  # of Qwen-VL
    get_image_features: Callable
    get_rope_index: Callable[..., tuple[Tensor, Tensor]]  # only with three-dimensional positions


class Model(nn.Module):
    """A model, as `build.build_model` makes it."""

    setup: Setup
    config: Any
    model: Core
    lm_head: nn.Linear
    get_decoder: Callable[..., Decoder]
    tie_weights: Callable[[], None]
    _weight_conversions: list  # between names of modules and those in files, set by transformers


class Wrapper(nn.Module):
    """A model with what is read from its hidden states: `policy.Policy`, `policy.Critic`."""

    model: Model


Modules = dict[str, Wrapper]  # by role


# -------------------------------------------------------------------------------------------------
# Parts of a model
# -------------------------------------------------------------------------------------------------


def decoder(model: Model) -> Decoder:
    """The language model: a part of `model.model`; in a text-only model, all of it."""
    return model.get_decoder()


def vision_parts(model: Model) -> dict[str, nn.Module | nn.Parameter]:
    """What `model.model` has besides the decoder: tower, projector, a learnt newline. Empty in a
    model that has none, or was built without."""
    core, language = model.model, decoder(model)
    if language is core:
        return {}
    parts = {**core._modules, **core._parameters}
    return {name: part for name, part in parts.items() if part is not None and part is not language}


def tower_parameters(model: Model) -> list[nn.Parameter]:
    """The parameters of `vision_parts`."""
    parameters = []
    for part in vision_parts(model).values():
        parameters += [part] if isinstance(part, nn.Parameter) else part.parameters()
    return parameters


def whole_parameters(module: Wrapper, shards: int) -> set[nn.Parameter]:
    """What stays outside of FSDP: each rank holds it whole, in the type in which it computes. That is a
    frozen vision tower; and where one rank holds all ``shards``, everything frozen, of which FSDP would
    gather a copy."""
    if shards == 1:
        return {parameter for parameter in module.parameters() if not parameter.requires_grad}
    return set() if module.model.setup.trains_vision else set(tower_parameters(module.model))


def trained_parts(model: Model) -> list[Part]:
    """The decoder, and the vision tower if it is trained."""
    parts: list = [decoder(model)]
    if model.setup.trains_vision:
        parts += [p for p in vision_parts(model).values() if isinstance(p, PreTrainedModel)]
    return parts


def layers(model: Model) -> list[nn.Module]:
    """The layers of `trained_parts`, which FSDP gathers one by one."""
    _, *towers = trained_parts(model)
    blocks = [
        module
        for tower in towers
        for module in tower.modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    return [*decoder(model).layers, *blocks]


def softcap(model: Model) -> float | None:
    """The bound of a model that soft-caps its logits, or None."""
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def float32_parts(model: Model) -> list[nn.Module]:
    """The modules whose weights stay float32 in any compute type; FSDP gathers them separately."""
    return [module for module in decoder(model).modules() if isinstance(module, Decay)]


def routers(model: Model) -> list[nn.Module]:
    """The modules that return the router logits of each MoE layer, or a tuple that begins with
    them; none in a dense model."""
    return [
        module
        for name, module in decoder(model).named_modules()
        if type(module).__name__.lower().endswith("topkrouter") or name.endswith("router.proj")
    ]


def balances_by_loss(model: Model) -> bool:
    """Whether it has routers that choose by their logits alone (GLM's add a bias to each expert)."""
    return any(not hasattr(router, "e_score_correction_bias") for router in routers(model))


def experts_per_token(model: Model) -> int:
    text = model.config.get_text_config()
    return getattr(text, "top_k_experts", 0) or text.num_experts_per_tok


@contextmanager
def router_logits(model: Model):
    """Yields a list, to which each forward of the decoder appends the router logits (L, E) of its MoE
    layers."""
    logits = []

    def keep(router: nn.Module, _, out: Any) -> None:
        logits.append(out if torch.is_tensor(out) else out[0])

    with ExitStack() as undo:
        for router in routers(model):
            undo.callback(router.register_forward_hook(keep).remove)
        yield logits


# -------------------------------------------------------------------------------------------------
# Image features and positions
# -------------------------------------------------------------------------------------------------


def image_features(model: Model, patches: Tensor, grids: Tensor) -> Tensor:
    """Run the vision tower on images of any number of prompts, as `loader.load_pixels` made them ->
    (K, M, H).

    K is 1, plus the number of DeepStack levels in families that have them (Qwen3-VL). There is no
    gradient unless the tower is trained.
    """
    weight = tower_parameters(model)[0]
    # Pixels stay float32: towers cast them, some only after scaling.
    patches, grids = patches.to(weight.device), grids.to(weight.device)
    inputs = model.setup.family.vision_inputs(patches, grids)
    with torch.set_grad_enabled(model.setup.trains_vision and torch.is_grad_enabled()):
        out = model.model.get_image_features(**inputs, return_dict=True)
    levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    flat = []
    for level in levels:
        joined = level if torch.is_tensor(level) else torch.cat(list(level))
        flat.append(joined.flatten(0, -2))  # (M, H)
    return torch.stack(flat)


def compute_features(model: Model, batch: Batch) -> None:
    """Fill the image features of this rank's prompts, once per prompt, several images per call of
    the vision tower. (If the tower is trained, these features serve only the rollout: the forward
    pass of an update computes its own.) Raises UserError on every rank: one has other numbers of features
    than image tokens.
    """
    problem = ""
    waiting = sorted(batch.patches.keys() - batch.features.keys())
    # roughly the number of patches, even if images are split into tiles
    sizes = [batch.patches[index].numel() // 1024 for index in waiting]
    for part in fill_packs(waiting, sizes, model.setup.max_tokens_per_pack):
        patches = torch.cat([batch.patches[index] for index in part])
        grids = torch.cat([batch.prompts[index].patch_grids for index in part])
        features = image_features(model, patches, grids).cpu()  # (K, M, H)
        counts = [batch.prompts[index].image_tokens for index in part]
        if sum(counts) != features.shape[1]:
            problem = f"{features.shape[1]} image features for {sum(counts)} image tokens"
            break
        batch.features.update(zip(part, features.split(counts, dim=1)))
        if not model.setup.trains_vision:
            for index in part:
                del batch.patches[index]
    with raise_on_all_ranks():
        if problem:
            raise UserError(
                f"{model.setup.folder}: {problem}; processor_config.json or preprocessor_config.json do not "
                "fit config.json"
            )


def compute_features_unless_trained(model: Model, batch: Batch) -> None:
    """`compute_features`, unless the tower is trained: then every forward pass computes its own."""
    if not model.setup.trains_vision:
        compute_features(model, batch)


def prompt_positions(model: Model, prompt) -> Tensor:
    """(3, P) rotary positions of a prompt by the model's own rule; a response continues at ``max +
    1``."""
    ids = prompt.input_ids[None]
    if not prompt.grids or not hasattr(model.model, "get_rope_index"):
        return torch.arange(ids.shape[1]).expand(3, -1)
    clips = [grid for grid in prompt.grids if len(grid) > 3]
    images = [grid for grid in prompt.grids if len(grid) == 3]
    positions, _ = model.model.get_rope_index(
        ids,
        **model.setup.family.token_types(ids),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor([clip[:3] for clip in clips]) if clips else None,
        second_per_grid_ts=torch.tensor([clip[3] for clip in clips], dtype=torch.float32),
    )
    return positions[:, 0]


def positions_of(model: Model, batch: Batch, index: int) -> Tensor:
    """(3, P) rotary positions of a prompt, cached in the batch."""
    if index not in batch.positions:
        batch.positions[index] = prompt_positions(model, batch.prompts[index])
    return batch.positions[index]


# -------------------------------------------------------------------------------------------------
# Forward
# -------------------------------------------------------------------------------------------------


def hidden_states(model: Model, pack: Pack) -> Tensor:
    """The last hidden states (L, H) of a pack, whose image features replace the embeddings of image
    tokens.

    If a pack has ``grids``, it contains pixels, and their features are computed here, inside FSDP's
    forward. Each token has three positions, all equal in families without three-dimensional rotary
    positions. The others get a fourth row, in which transformers looks for packed sequences. It is
    zero, so that no mask is built: our attention uses segments.
    """
    language = decoder(model)
    embeds = language.get_input_embeddings()(pack.input_ids)  # (1, L, H)
    features = pack.features
    if features is not None and pack.grids is not None:
        features = image_features(model, features[0], pack.grids)
        if not len(pack.image_index):  # the image is one of `packs.spare_image`
            embeds, features = embeds + 0.0 * features.sum(), None
    further = {}
    if getattr(language, "hidden_size_per_layer_input", 0):
        ids = pack.input_ids
        if len(pack.image_index):  # whose features have no such inputs
            ids = ids.index_fill(1, pack.image_index, language.config.pad_token_id)
        further["per_layer_inputs"] = language.get_per_layer_inputs(ids, None)
    if features is not None:
        features = features.to(embeds.dtype)
        embeds = embeds.index_copy(1, pack.image_index, features[:1])
        if len(features) > 1:
            # indices instead of a mask: see `layers.add_images`
            further["visual_pos_masks"] = pack.image_index
            further["deepstack_visual_embeds"] = list(features[1:])
    positions = pack.positions[0]  # (1, L)
    if hasattr(model.model, "get_rope_index"):
        positions = torch.cat([torch.zeros_like(pack.positions[:1]), pack.positions])  # (4, 1, L)
    out = language(
        inputs_embeds=embeds,
        position_ids=positions,
        use_cache=False,
        attention=pack.attention,
        **further,
    )
    return out.last_hidden_state[0]
