"""Checkpoints in and out.

    folder -> model on meta (`build`) -> sharded -> weights streamed       load_weights
    shards -> safetensors under the checkpoint's names, whole on rank 0    export

A user's mistake is a ValueError that names the file and the numbers. Models are of the type `vlm.Model`.

transformers' `from_pretrained` and `save_pretrained` are not used: a rank would hold the whole
model, and they drop the weights of multi-token prediction, the stored copy of a tied head, and
the float32 type of linear attention's decays.
"""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn as nn
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from common import distributed
from common.data.processor import Processor
from common.files import follow_pointer, open_regular, read_json
from common.logging import sync_folder, write_link
from common.model.adapters import adapted_layers, init_adapters
from common.model.shards import copy_shard, shard_of, whole
from common.model.vlm import Model, Setup, StoredWeight, Wrapper, vision_parts

# Hub files and modules spell the same weights differently; tried in this order.
KEY_SPELLINGS = (
    (r"^", ""),
    (r"^visual\.", "model.visual."),
    (r"^model\.(?!visual|language_model)", "model.language_model."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.", ""),
    (r"^(?:model\.)?vision_tower\.(?:vision_model\.)?", "model.vision_tower."),
    (r"^(multi_modal_projector|image_newline)", r"model.\1"),
    (r"^score\.", "value_head."),  # of AutoModelForSequenceClassification
)
VISION_KEYS = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.")
VISION_KEYS += ("vision_encoder.", "vision_projection.", "embed_vision.", "image_newline")
# What exports copy from the files, as no model here has such a part: multi-token prediction, sound. And
# the tower of a critic that reads the actor's features.
COPIED_KEYS = ("mtp.", "audio_tower.", "embed_audio.")
# What older versions of transformers wrote, and is computed.
COMPUTED = re.compile(r"\.(inv_freq|position_ids|masked_bias)$")
# one matrix of one expert, where the files hold each alone
EXPERT_KEY = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
# heads of scalar models that are not read: v_head.summary.weight, reward_head.weight, score.0.weight
OTHER_HEAD = re.compile(r"(?!lm_)\w*(head|score|reward|value|classifier)\.")
# What to do about checkpoints that are not read as they are.
MERGE_ADAPTER = """this is an adapter (adapter_config.json). Merge it with its base, in Python:
from peft import PeftModel
from transformers import AutoModelForImageTextToText as Auto  # of text alone: AutoModelForCausalLM
base = Auto.from_pretrained("{base}", dtype="auto")
PeftModel.from_pretrained(base, "{adapter}").merge_and_unload().save_pretrained("merged")
and copy the files of the base's tokenizer and image processor into the new folder"""
CONVERT_BIN = """If it has pytorch_model*.bin, run these two lines of Python in that folder:
import glob, torch, safetensors.torch as st; parts = map(torch.load, glob.glob("pytorch_model*.bin"))
st.save_file({k: v.contiguous().clone() for p in parts for k, v in p.items()}, "model.safetensors")"""
Tensors = dict[str, Tensor]  # by name
# of floats; a quantized weight has its scales under another key
WEIGHT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# -------------------------------------------------------------------------------------------------
# Folders and files
# -------------------------------------------------------------------------------------------------


def resolve_folder(name: str, weights: bool = True) -> Path:
    """A local checkpoint folder, the one that <out>/export/latest names, or the
    downloaded snapshot of a hub name; without ``weights``, of its small files only.

    Raises:
        ValueError: there is no such folder, and the hub has nothing of this name; or it is no model,
            but an adapter of one, say.
    """
    path = follow_pointer(name)
    folder = path if path.is_dir() else download(name, weights)
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        raise ValueError(f"checkpoint {name}: " + MERGE_ADAPTER.format(base=base, adapter=name))
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"checkpoint {name}: no config.json, so this is no model in Hugging Face format; a "
            "run's models are <out>/export/step-N"
        )
    return folder


def download(name: str, weights: bool) -> Path:
    """The snapshot of a hub name. Raises ValueError: there is none."""
    patterns = ["*.json", "*.txt", "*.jinja", "*.model"]
    if weights:
        patterns.append("*.safetensors")
    try:
        # not Mistral's second copy of the weights
        folder = snapshot_download(name, allow_patterns=patterns, ignore_patterns="consolidated*")
    except HFValidationError as error:  # it can only be a path
        raise ValueError(f"checkpoint {name}: no such folder") from error
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"checkpoint {name}: no such folder; and the hub, where a model might have this name, "
            "cannot be reached"
        ) from error
    except (OSError, ValueError) as error:  # whatever else the hub raises is one of them
        raise ValueError(
            f"checkpoint {name}: no such folder, and the hub says: {str(error).splitlines()[0]}"
        ) from error
    return Path(folder)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Where there are several models, those that
    `from_pretrained` would read. Raises ValueError: there are none."""
    names, config = ["model.safetensors", "model.safetensors.index.json"], folder / "config.json"
    if config.is_file() and (file := read_json(config).get("transformers_weights")):
        names = [file]
    for path in (folder / name for name in names):
        if path.is_file() and path.suffix == ".json":
            index = read_json(path, {"weight_map": {str: str}})
            return [folder / name for name in sorted(set(index["weight_map"].values()))]
        if path.is_file():
            return [path]
    raise ValueError(
        f"{folder / names[0]} cannot be read as safetensors: No such file. {CONVERT_BIN}"
    )


def open_weights(path: Path):
    """A safetensors file, whose tensors are read when asked for. Raises ValueError: no such file,
    or only a part of one."""
    try:
        open_regular(path).close()
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def stored_tensors(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """(file, key, tensor) of all that a checkpoint's files hold. A tensor is in mapped memory: what is
    used of it is read then."""
    for path in weight_files(folder):
        with open_weights(path) as file:
            for key in file.keys():
                yield path, key, file.get_tensor(key)


# -------------------------------------------------------------------------------------------------
# Weights in
# -------------------------------------------------------------------------------------------------


def fill(module: Wrapper, device: torch.device, seed: int) -> None:
    """Allocate a module that is on meta, or this rank's shards of it, on ``device`` and stream its
    checkpoint into them. Fresh adapters depend on ``seed``; a critic's value head that the files lack
    is zero. Raises ValueError: see `load_weights`."""
    folder, head = module.model.setup.folder, getattr(module, "value_head", None)
    load_weights(module.model, folder, head)  # on meta, which compares names, types and shapes
    materialize(module, device)
    init_adapters(module.model, seed)
    if head is not None:
        nn.init.zeros_(head.weight)
    load_weights(module.model, folder, head)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate meta parameters on ``device``, keeping the values of all buffers."""
    module._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        )
    )


def named_weights(model: Model, value_head: nn.Linear | None) -> Tensors:
    """What `load_weights` reads and `export` writes, by name: all parameters, tied ones by each name, and the
    buffers that checkpoints hold: scales, bounds, biases of routers."""
    weights: Tensors = model.state_dict(keep_vars=True)
    if value_head is not None:
        weights["value_head.weight"] = value_head.weight
        weights["value_head.bias"] = value_head.get_buffer("offset")
    return weights


def load_weights(model: Model, folder: Path, value_head: nn.Linear | None = None) -> None:
    """Stream safetensors into a materialised, possibly sharded model; each rank reads only its own
    rows. A value head that is trained is read where the files have one.

    Raises:
        ValueError: no safetensors files, missing or quantized weights, two values for tied ones, a
            shape that does not fit, or a value head of another kind; names and shapes are given.
    """
    parameters = named_weights(model, value_head)
    stored = model.setup.stored = {}
    read, unknown = set(), []  # tied ones are one; keys
    counts = Counter()  # numbers read of each parameter: experts may stand alone
    for path, key, value in stored_tensors(folder):
        merged, part = expert_part(key)
        name = parameter_name(merged, parameters)
        if not name and not is_copied(key, model):
            unknown.append(key)
            continue
        stored[key] = StoredWeight(name, path, torch.empty_like(value, device="meta"), part)
        if not name:
            continue
        target = parameters[name]
        tied = shard_of(target).clone() if target in read else None
        read_weight(f"{path}: {key}", target, value, part)
        if tied is not None and not (tied.is_meta or torch.equal(tied, shard_of(target))):
            raise ValueError(
                f"{path}: {key} differs from the weight that config.json ties it to; to keep both, "
                "set tie_word_embeddings to false there"
            )
        counts[name] += value.numel()
        if counts[name] == target.numel():
            read.add(target)
    if value_head is not None and value_head.weight not in read:
        check_heads(folder, unknown)
        like = torch.empty(value_head.weight.shape, device="meta")
        stored["score.weight"] = StoredWeight("value_head.weight", folder, like)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter not in read and not may_be_fresh(name, parameter)
    ]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} weights are in no file, the first: {', '.join(missing[:3])}; "
            f"not read of the files: {unknown[:3]}"
        )
    check_unknown(model, folder, unknown)


def is_copied(key: str, model: Model) -> bool:
    """Whether a key that no weight of the model has belongs to a part that exports copy: multi-token
    prediction, whatever transformers leaves out of this model, or a tower that this role lacks."""
    if any(re.search(pattern, key) for pattern in model._keys_to_ignore_on_load_unexpected):
        return True
    copied = COPIED_KEYS if vision_parts(model) else COPIED_KEYS + VISION_KEYS
    return key.removeprefix("model.").startswith(copied)


def check_unknown(model: Model, folder: Path, keys: list[str]) -> None:
    """Raises ValueError: among the keys of a checkpoint that are not read is one without a reason."""
    lost = [key for key in keys if not COMPUTED.search(key)]
    if not hasattr(model, "lm_head"):  # a critic or a scalar model, which has read its own head
        lost = [key for key in lost if not OTHER_HEAD.match(key) and "lm_head." not in key]
    if lost:
        raise ValueError(
            f"{folder}: {len(lost)} tensors of the files are no part of the model in config.json, the "
            f"first: {', '.join(lost[:3])}"
        )


def may_be_fresh(name: str, parameter: Tensor) -> bool:
    """Whether a weight that the files lack is what it was initialised to: adapters, a trained head."""
    trained_head = name == "value_head.weight" and parameter.requires_grad
    return trained_head or ".lora_" in name or name == "value_head.bias"


def check_heads(folder: Path, keys: list[str]) -> None:
    """Raises ValueError: among the keys of a checkpoint without our value head is another one."""
    heads = [key for key in keys if OTHER_HEAD.match(key)]
    if heads:
        raise ValueError(
            f"{folder}: {', '.join(heads)}: a value head is read from score.weight or "
            "value_head.weight, one row on the last hidden state, and its bias; if this is one, "
            "rename it"
        )


def parameter_name(key: str, parameters: Tensors) -> str:
    """The parameter that a key of the files is about; "": no part of this model."""
    key = re.sub(r"(A_log|dt_bias)$", r"decay.\1", key)  # of linear attention
    for old, new in KEY_SPELLINGS:
        name = re.sub(old, new, key)
        if name in parameters:
            return name
    return ""


def expert_part(key: str) -> tuple[str, tuple[int, int, int] | None]:
    """For the key of one matrix of one expert that of all experts of a layer, and the part that it is,
    as of `StoredWeight`; for other keys (key, None)."""
    match = EXPERT_KEY.fullmatch(key)
    if match is None:
        return key, None
    stem, expert, kind = match.groups()
    if kind == "down":
        return f"{stem}.down_proj", (int(expert), 0, 1)
    return f"{stem}.gate_up_proj", (int(expert), int(kind == "up"), 2)


@torch.no_grad()
def read_weight(
    source: str, target: Tensor, value: Tensor, part: tuple[int, int, int] | None = None
) -> None:
    """Copy a tensor of a file into a parameter, or into the ``part`` of it, as of `StoredWeight`;
    ``source`` names it in a message."""
    if value.dtype not in WEIGHT_TYPES:
        raise ValueError(f"{source} is of type {value.dtype}; quantized weights are not supported")
    if part:
        expert, index, count = part
        local = shard_of(target)
        if isinstance(target, DTensor) and local.numel():
            expert -= target.__create_chunk_list__()[0].offsets[0]
        if expert in range(len(local)):  # this rank has it
            read_weight(source, local[expert].chunk(count)[index], value)
        return
    # those of Qwen3-VL-MoE have the matrices of the experts (E, I, O) transposed
    is_of_all = value.ndim == 3 and ".experts." in source
    is_transposed = is_of_all and value.shape != target.shape
    weight = value.mT if is_transposed else value
    if weight.shape != target.shape:
        raise ValueError(
            f"{source} is {tuple(value.shape)}, the model's config.json asks for "
            f"{tuple(target.shape)}"
        )
    copy_shard(target, weight)


# -------------------------------------------------------------------------------------------------
# Weights out
# -------------------------------------------------------------------------------------------------


def check_finite(tensors: Tensors) -> None:
    """Raises ValueError: a number of what was trained is not finite."""
    for name, tensor in tensors.items():
        # in one pass, without a copy: both bounds are NaN if one number is
        if not all(math.isfinite(bound) for bound in tensor.aminmax()):
            raise ValueError(f"{name} is not finite")


def save_tensors(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Write a safetensors file that survives a power cut. Raises OSError: a full disk, say."""
    try:
        save_file(tensors, path, metadata | {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    sync_folder(path)


@torch.no_grad()
def export(
    module: Wrapper, processor: Processor, folder: Path, shard_bytes: int = 4 << 30
) -> str | None:
    """Write a Hugging Face folder that `from_pretrained` loads: safetensors with the names, shapes
    and types that the checkpoint came with, config, tokenizer and processor files. Complete or
    absent: written next to its place and renamed. All ranks must call.

    LoRA adapters are merged, in float32, cast once, and stand in `adapter/` as well, as PEFT loads
    them. Returns on every rank why the folder could not be written, or None.
    """
    model, problem = module.model, None
    empty = {key: weight.like for key, weight in model.setup.stored.items()}
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=shard_bytes)
    files = gather_files(module, plan.filename_to_tensors)
    if distributed.is_main():
        aside = folder.with_name(f".{folder.name}.tmp")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            for file, tensors in files:
                keys = plan.filename_to_tensors.get(file, tensors)
                write_file(aside / file, keys, tensors, model.setup.stored)
            if plan.is_sharded:
                index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
                (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
            write_settings(aside, model.setup, processor)
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
            write_link(folder.parent / "latest", folder.name)
        except (OSError, ValueError) as error:
            problem = str(error)
            shutil.rmtree(aside, ignore_errors=True)  # the disk may be full of it
    for _ in files:  # the collectives that are left, after an error as well
        pass
    return distributed.from_main(problem)


def gather_files(module: Wrapper, files: dict[str, list[str]]) -> Iterator[tuple[str, Tensors]]:
    """The files of an export by their keys, each with its trained tensors on rank 0, and with none
    on the others. All ranks must iterate."""
    model = module.model
    parameters = named_weights(model, getattr(module, "value_head", None))
    adapted = {layer.weight: layer for layer in adapted_layers(model)}
    for file, keys in files.items():
        tensors, recent = {}, {}
        for key in keys:  # in one order on all ranks
            weight = model.setup.stored[key]
            parameter = parameters.get(weight.name)
            if parameter is None:
                continue
            layer = adapted.get(parameter)
            if layer:
                full = whole(layer.lora_B) @ whole(layer.lora_A) * layer.scale
            elif parameter.requires_grad:
                full = gathered(parameter, weight, recent)
            else:
                continue
            if distributed.is_main():
                # its own weight is rounded, if the compute type is smaller than the files'
                if layer:
                    full += read_stored(key, weight).to(full)
                if full.shape != weight.like.shape:  # see read_weight
                    full = full.transpose(1, 2)
                # copy: a tied weight stands in the files twice
                tensors[key] = full.to(weight.like.dtype, copy=True).cpu().contiguous()
        yield file, tensors
    if model.setup.adapter:
        tensors = {
            f"base_model.model.{name}.weight": whole(parameter).cpu()
            for name, parameter in model.named_parameters()
            if ".lora_" in name
        }
        yield "adapter/adapter_model.safetensors", tensors


def gathered(parameter: Tensor, weight: StoredWeight, recent: dict[Tensor, Tensor]) -> Tensor:
    """What the files hold as one weight; ``recent`` are gathered parameters of whole layers. A collective."""
    if weight.part is None:
        return whole(parameter)
    if parameter not in recent:
        if len(recent) == 2:  # the experts of a layer are in two, in turns
            recent.clear()
        recent[parameter] = whole(parameter)
    expert, index, count = weight.part
    return recent[parameter][expert].chunk(count)[index]


def read_stored(key: str, weight: StoredWeight) -> Tensor:
    """A weight as it is in the checkpoint's files. Raises ValueError: they are gone."""
    with open_weights(weight.path) as file:
        return file.get_tensor(key)


def write_file(
    path: Path, keys: Iterable[str], tensors: Tensors, stored: dict[str, StoredWeight]
) -> None:
    """One of the safetensors files of an export; what ``tensors`` lacks of its keys, because it was
    not trained, is copied from the checkpoint's files, infinite bounds too. Raises ValueError: a
    trained weight that is not finite, or one whose file is gone."""
    check_finite(tensors)
    for key in keys:
        if key not in tensors:
            tensors[key] = read_stored(key, stored[key])
    path.parent.mkdir(exist_ok=True)
    save_tensors(path, tensors, {})


def write_settings(aside: Path, setup: Setup, processor: Processor) -> None:
    """The small files of an export, and everything durable."""
    if setup.adapter:
        (aside / "adapter" / "adapter_config.json").write_text(json.dumps(setup.adapter, indent=2))
    # As it came: transformers writes names that other readers do not know, as of Gemma 4's heads.
    config = read_json(setup.folder / "config.json")
    config.pop("transformers_weights", None)
    (aside / "config.json").write_text(json.dumps(config, indent=2))
    processor.save(str(aside))
    for path in aside.rglob("*.safetensors"):  # safetensors 0.8 writes them for their owner alone
        shutil.copymode(aside / "config.json", path)
    for path in (aside, *aside.rglob("*")):
        sync_folder(path)
