"""Models on meta, from a checkpoint's config; `weights` fills them.

Builder         the models of a run by role, as the flags say
build_reader    the frozen model of another checkpoint, with its own processor
build_model     a model of transformers whose layers mix tokens as packs need it
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

import torch
import torch.nn as nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from common import distributed
from common.data.families import Family, family_of
from common.data.folder import read_model_config
from common.data.processor import Processor
from common.flags import DataArgs, ModelArgs
from common.ground.files import UserError
from common.model.adapters import add_adapters, freeze, freeze_model
from common.model.attention import (
    ATTENTION_NAME,
    LARGEST_HEAD,
    VISION_ATTENTION_NAME,
    check_heads,
    choose_backend,
    flash_attn_problem,
    largest_head,
    replaced_kernels,
)
from common.model.layers import is_compared, use_fewer_kernels
from common.model.linear_attention import HF_LAYERS, DeltaNet, choose_rule
from common.model.vlm import (
    Compute,
    Model,
    Setup,
    decoder,
    float32_parts,
    routers,
    tower_parameters,
    trained_parts,
    vision_parts,
)
from common.model.weights import Tensors, resolve_folder, stored_tensors

# -------------------------------------------------------------------------------------------------
# The models of a run
# -------------------------------------------------------------------------------------------------


def choose_compute(args: ModelArgs, device: torch.device, longest: int) -> Compute:
    """What the flags mean on this device; the main rank prints it. On the meta device, where models
    are only planned, they mean what they do on a GPU. Raises UserError: an attention back-end that
    cannot run here.
    """
    small = device.type == "cpu"
    name = args.dtype
    if name == "auto":
        name = "float32" if small else "bfloat16"
    dtype = getattr(torch, name)
    backend = "sdpa"
    if device.type != "meta":
        backend = choose_backend(args.attention, device, dtype)
        kernels = ""
        if backend == "varlen":
            kernels = replaced_kernels() or flash_attn_problem()
        ranks = f"{distributed.world_size()} x {device.type}"
        note = f" ({kernels})" if kernels else ""
        distributed.say_once(f"{ranks}, attention: {backend}{note}, compute: {name}")
    # Every chunk costs a pass over the gradient of the head's weight: on a GPU this is expensive, on
    # a CPU it is not, and memory decides. Plans count on it: a pack may have fewer tokens.
    head_chunk = min(256 if small else 4096, args.max_tokens_per_pack)
    return Compute(backend, dtype, device, args.max_tokens_per_pack, head_chunk, longest)


class Builder:
    """The models of a run, on meta: that of the checkpoint to train, and those of other roles.

    Args:
        longest: tokens of the longest sequence.
    """

    def __init__(self, args: ModelArgs, device: torch.device, longest: int):
        self.args, self.compute = args, choose_compute(args, device, longest)
        self.folder = resolve_folder(args.model, weights=not self.compute.planned)

    def actor(self) -> Model:
        """The model to train, with its vision tower. The main rank says what adapters leave out, and
        which layers have another attention."""
        model = self.build(self.folder, vision=True)
        text = model.config.get_text_config()
        check_heads(text, self.compute.device)
        largest = largest_head(text)
        if largest > LARGEST_HEAD:
            distributed.say_once(
                f"attention of layers with heads of {largest}: sdpa, as others end at {LARGEST_HEAD}"
            )
        mixtures = len(routers(model))
        if self.args.lora_rank and mixtures:
            distributed.say_once(
                f"warning: --lora_rank leaves the experts and routers of {mixtures} layers as they "
                "are; without it, all weights are trained"
            )
        return model

    def role(self, name: str, head: bool = True, frozen: bool = False) -> Model:
        """The model of a checkpoint, or the actor's if ``name`` is empty. It reads the actor's
        image features, but has a tower of its own where towers are trained.

        Raises:
            UserError: the checkpoint has another vocabulary, or another tower, so that its
                language model expects other features.
        """
        folder = self.folder
        if name:
            folder = resolve_folder(name, weights=not self.compute.planned)
            self.check_role(folder)
        return self.build(folder, self.args.train_vision, head, frozen, base=name)

    def check_role(self, folder: Path) -> None:
        config = read_model_config(self.folder)
        size, tokens = (
            part.get_text_config().vocab_size for part in (read_model_config(folder), config)
        )
        if size != tokens:
            raise UserError(
                f"{folder}: vocab_size {size}, the actor's is {tokens}: critic and reference need "
                "the same"
            )
        same = self.args.train_vision or same_tower(family_of(config), self.folder, folder)
        if not same:
            raise UserError(
                f"{folder}: its vision tower differs from that of {self.folder}; critic and "
                "reference use the image features of the actor"
            )

    def build(
        self, folder: Path, vision: bool, head: bool = True, frozen: bool = False, base: str = ""
    ) -> Model:
        """With adapters and gradient checkpointing, as the flags say. ``base``: the checkpoint as a flag
        names it, if it is not the actor's."""
        args = self.args
        model = build_model(
            read_model_config(folder),  # each its own: same shapes do not make the same model
            self.compute,
            folder,
            vision=vision,
            head=head,
            trains_vision=args.train_vision,
        )
        if frozen:
            return freeze_model(model)
        if args.lora_rank:
            add_adapters(model, base or args.model, args.lora_rank, args.lora_alpha)
        by_default = args.gradient_checkpointing == "auto" and self.compute.device.type == "cuda"
        if by_default or args.gradient_checkpointing == "on":
            recompute_layers(model)
        return model


def build_reader(
    name: str,
    actor: Model,
    processor: Processor,
    args: DataArgs,
    head: bool = True,
) -> tuple[Model, Processor]:
    """The frozen model of another checkpoint, on meta, and the processor with which it reads rows. It
    has no vision tower if it can read the image features of the ``actor``, whose ``processor`` this
    is.

    Raises UserError: a folder that is no model, or of a family that is not supported.
    """
    setup = actor.setup
    folder = resolve_folder(name, weights=not setup.planned)
    # It sees images at the size that it was trained on, and its family may count in another space.
    reader = Processor(folder, replace(args, min_pixels=0, max_pixels=0, coordinates="auto"))
    if reader.config.model_type == processor.config.model_type:
        reader.space = processor.space
    # The actor's image features serve if family, image processor and tower are the actor's, untrained.
    shares = (
        not setup.trains_vision
        and image_settings(reader) == image_settings(processor)
        and same_tower(setup.family, setup.folder, folder)
    )
    model = build_model(reader.config, setup, folder, vision=not shares, head=head)
    return freeze_model(model), reader


# -------------------------------------------------------------------------------------------------
# A model of transformers on meta
# -------------------------------------------------------------------------------------------------


def recompute_layers(model: Model) -> None:
    """Gradient checkpointing: the backward pass computes the activations of each layer again."""
    for part in trained_parts(model):
        # Newer versions of transformers warn about the name that older ones know.
        enable = getattr(
            part, "activation_checkpointing_enable", part.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})


def build_model(
    config,
    compute: Compute,
    folder: Path = Path(),
    *,
    vision: bool = True,
    head: bool = True,
    trains_vision: bool = False,
) -> Model:
    """The model of a ``folder``'s config with parameters on the meta device and real buffers. Without
    ``vision`` or ``head`` that part is left out; a tower that is not trained is frozen, in the
    compute type.

    Only parameters are moved to meta: rotary frequencies are buffers in no file, and would come out
    of `materialize` as garbage had they been built there.

    Raises:
        UserError: something in the config is not supported.
    """
    family = family_of(config)
    if trains_vision and not family.media:
        raise UserError(f"--train_vision: {config.model_type} has no vision tower")
    auto = AutoModelForImageTextToText if family.media else AutoModelForCausalLM
    config = without_noise(copy.deepcopy(config))  # it is written into
    if has_own_head(config, folder):
        config.tie_word_embeddings = False
    try:
        with parameters_on_meta(), no_init_weights():
            model = cast(Model, auto.from_config(config, dtype=torch.float32))
        model.tie_weights()  # which was left out with the initial values
    except Exception as error:  # each class of transformers has its own checks, or none
        problem = f"transformers cannot build the model of config.json: {error!r}"
        raise UserError(problem) from error
    how = {part.name: getattr(compute, part.name) for part in fields(Compute)}
    model.setup = Setup(**how, family=family, folder=folder, trains_vision=trains_vision)
    for name in ("audio_tower", "embed_audio"):  # of models that hear
        model.model._modules.pop(name, None)
    use_ours(model)
    # EOS may serve as padding, and learns like any token
    decoder(model).get_input_embeddings().padding_idx = None
    if not vision:
        for name in vision_parts(model):
            delattr(model.model, name)
    if not head:
        del model.lm_head
    freeze(untrained(model), compute.dtype)
    if float32_parts(model) and not compute.planned:
        choose_rule(compute.device.type, compute.dtype)  # which names a missing package
    return model


def without_noise(config):
    """The config without dropout, and without the noise of some routers, which act in training alone: the
    model that learns is the one that has sampled."""
    for name in config.sub_configs:
        if part := getattr(config, name, None):
            without_noise(part)
    for name, value in list(vars(config).items()):
        if re.search("drop|jitter", name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def has_own_head(config, folder: Path) -> bool:
    """Whether a checkpoint whose text model ties no weights has a head besides its embeddings. As for
    Mistral Small 3.1, where only the text model's part of config.json used to count, transformers ties
    them by default unless it finds two values."""
    of_text = getattr(config.get_text_config(), "tie_word_embeddings", config.tie_word_embeddings)
    if of_text or not config.tie_word_embeddings:
        return False
    if not any(folder.glob("*.safetensors")):  # a plan has fetched none
        return False
    stored = stored_tensors(folder).items()
    heads = [value for key, value in stored if key.endswith("lm_head.weight")]
    tables = [value for key, value in stored if key.endswith("embed_tokens.weight")]
    return any(not torch.equal(head, table) for head, table in zip(heads, tables))


def untrained(model: Model) -> Iterator[nn.Parameter]:
    """What is frozen by default: a tower, and the table of the inputs that each layer of Gemma 4 E2B
    looks up, half of all weights, of which a step would move a few rows."""
    if not model.setup.trains_vision:
        yield from tower_parameters(model)
    for name, parameter in decoder(model).named_parameters():
        if "embed_tokens_per_layer" in name:
            yield parameter


@contextmanager
def parameters_on_meta():
    """Inside, every parameter that a module registers moves to the meta device at once."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        # A tied weight is there already, and must stay one object.
        if param is not None and not param.is_meta:
            moved = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            self._parameters[name] = moved

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


# -------------------------------------------------------------------------------------------------
# Vision towers that are the same
# -------------------------------------------------------------------------------------------------


def image_settings(processor: Processor) -> list:
    """Whatever decides how a processor turns an image into patches."""
    settings = [processor.config.model_type]
    for name in ("image_processor", "frame_processor"):
        part = getattr(processor.family, name, None)
        settings.append(part and part.to_dict())
    return settings


def same_tower(family: Family, first: Path, second: Path) -> bool:
    """Whether two checkpoints, the first of which is of this family, have the same vision tower; also
    where one has no weights, because a plan has fetched none."""
    if not all(any(folder.glob("*.safetensors")) for folder in (first, second)):
        return True
    a, b = (vision_tensors(folder, family.vision_keys) for folder in (first, second))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def vision_tensors(folder: Path, keys: tuple) -> Tensors:
    """The weights of a folder's files whose keys begin so, which are read when they are used."""
    tensors = {key.removeprefix("model."): value for key, value in stored_tensors(folder).items()}
    return {name: value for name, value in tensors.items() if name.startswith(keys)}


# -------------------------------------------------------------------------------------------------
# How layers mix tokens
# -------------------------------------------------------------------------------------------------


def use_ours(model: Model) -> None:
    """Let a model of transformers work on packs. Raises UserError: something of it cannot."""
    use_mixers(model)
    use_fewer_kernels(model)
    use_attention(model, model.setup.backend)
    check_decoder(model)


def use_attention(model: Model, backend: str) -> None:
    """Point language model and vision tower at our attention functions."""
    # Set on the config itself: set_attn_implementation tries to download a kernel called "*flash*".
    decoder(model).config._attn_implementation = ATTENTION_NAME
    if model.setup.family.packs_images and hasattr(model.model, "visual"):
        # in the other towers SDPA, their default, is one call per block
        vision = "sdpa" if backend == "sdpa" else VISION_ATTENTION_NAME + backend
        model.model.visual.config._attn_implementation = vision


def use_mixers(model: Model) -> None:
    """Make every layer mix its tokens by `attention` or `linear_attention`, and number the layers of
    each kind, as the cache does.

    Raises:
        UserError: a layer mixes tokens in another way. It would silently ignore our arguments, and
            each token would see the whole pack.
    """
    text = model.config.get_text_config()
    counts = {True: 0, False: 0}  # layers with linear attention, and without
    last = {}  # that stores keys, by its kind
    for layer in decoder(model).layers:
        for name, part in layer.named_children():
            if type(part) in HF_LAYERS:
                setattr(layer, name, DeltaNet(part))
        # transformers numbers the modules that need earlier tokens
        mixers: list = [part for part in layer.children() if hasattr(part, "layer_idx")]
        if len(mixers) != 1 or not isinstance(mixers[0], DeltaNet) and not is_compared(mixers[0]):
            names = [type(part).__name__ for part in mixers or layer.children()]
            raise UserError(
                f"the text model {text.model_type} mixes tokens by {', '.join(names)}, which is "
                "not supported"
            )
        (mixer,) = mixers
        is_linear, kind = isinstance(mixer, DeltaNet), getattr(mixer, "layer_type", "")
        # Some read what the last layer of their kind has stored.
        if not getattr(mixer, "is_kv_shared_layer", False):
            last[kind] = counts[is_linear]
            counts[is_linear] += 1
        mixer.slot_layer = last[kind]


UNSUPPORTED = ("attn_logit_softcapping", "use_bidirectional_attention")


def check_decoder(model: Model) -> None:
    """Refuse kinds of attention and rotary positions that do not work in packs. Raises UserError."""
    language, text = decoder(model), model.config.get_text_config()
    for name in UNSUPPORTED:
        value = getattr(text, name, None)
        if value and value != model.setup.family.sees_both_ways:
            raise UserError(f"the checkpoint's text model has {name}, which is not supported")
    rope = language.rotary_emb.rope_type
    by_layer = isinstance(rope, dict)  # by the kind of layer, as Gemma's
    kinds = rope.values() if by_layer else [rope]
    if "longrope" in kinds or (by_layer and "dynamic" in kinds):
        raise UserError(
            f"the checkpoint's text model {text.model_type} has rope_type longrope, or dynamic in some "
            "layers, which is not supported"
        )
    if "dynamic" not in kinds:
        return
    # Dynamic positions change with a batch's longest sequence, but only beyond this limit.
    limit = text.max_position_embeddings
    if model.setup.longest > limit:
        raise UserError(
            "the checkpoint's rope_type dynamic is supported up to its max_position_embeddings "
            f"{limit}; the flags allow sequences of {model.setup.longest} tokens"
        )
    # "default" does not inspect the positions, which a CUDA graph could not capture
    language.rotary_emb.rope_type = "default"
