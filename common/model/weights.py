"""Checkpoints in and out.

    folder -> transformers' model, whole in rank 0's host memory -> shards of all ranks    fill
    shards -> transformers' model, whole in rank 0's host memory -> folder                  export

Rank 0 needs memory for the whole model in the types of its files. A user's mistake is a ValueError
that names the file. Models are of the type `vlm.Model`.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn as nn
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common import distributed
from common.data.processor import Processor
from common.files import follow_pointer, read_json, sync_folder, write_link
from common.model.adapters import adapted_layers, init_adapters
from common.model.shards import copy_shard, whole
from common.model.vlm import Model, Setup, Wrapper

VISION_KEYS = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.")
VISION_KEYS += ("vision_encoder.", "vision_projection.", "embed_vision.", "image_newline")
# What exports copy from the files, as no model of transformers has such a part: multi-token prediction
COPIED_KEYS = ("mtp.", "model.mtp.")
# What to do about checkpoints that are not read as they are.
MERGE_ADAPTER = """this is an adapter (adapter_config.json). Merge it with its base, in Python:
from peft import PeftModel
from transformers import AutoModelForImageTextToText as Auto  # of text alone: AutoModelForCausalLM
base = Auto.from_pretrained("{base}", dtype="auto")
PeftModel.from_pretrained(base, "{adapter}").merge_and_unload().save_pretrained("merged")
and copy the files of the base's tokenizer and image processor into the new folder"""
Tensors = dict[str, Tensor]  # by name
disable_progress_bar()


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


def stored_tensors(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """(file, key, tensor) of all that a checkpoint's files hold. A tensor is in mapped memory: what is
    used of it is read then. Raises ValueError: there are none, or they cannot be read."""
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} has no model*.safetensors")
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():
                    yield path, key, file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


# -------------------------------------------------------------------------------------------------
# Weights in
# -------------------------------------------------------------------------------------------------


def read_whole(model: Model) -> PreTrainedModel:
    """The model of the checkpoint's folder as transformers reads it, whole, in host memory and the types
    of its files.

    Raises:
        ValueError: it cannot be read, or lacks weights of the model.
    """
    folder, kind = model.setup.folder, cast(type[PreTrainedModel], type(model))
    try:
        whole_model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except Exception as error:  # transformers and safetensors have their own
        raise ValueError(f"{folder}: transformers cannot read its weights: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        names = ", ".join(missing[:3])
        raise ValueError(f"{folder}: {len(missing)} weights are in no file, the first: {names}")
    return whole_model


def fill(module: Wrapper, device: torch.device, seed: int) -> None:
    """Allocate a module that is on meta, or this rank's shards of it, on ``device`` and fill it from its
    checkpoint, which rank 0 reads. Fresh adapters depend on ``seed``; a critic's value head that the
    files lack is zero. Raises UserError on every rank: see `read_whole`."""
    materialize(module, device)
    init_adapters(module.model, seed)
    weights: Tensors = {}
    with distributed.raise_on_all_ranks():
        if distributed.is_main():
            weights = dict(read_whole(module.model).state_dict())
            weights |= read_head(module)
    shapes = distributed.from_main({name: (w.shape, w.dtype) for name, w in weights.items()})
    for name, target in named_weights(module).items():
        if name not in shapes:
            continue
        shape, dtype = shapes[name]
        value = weights[name] if distributed.is_main() else torch.empty(shape, dtype=dtype)
        value = value.to(device)
        dist.broadcast(value, 0)
        copy_shard(target, value)


def read_head(module: Wrapper) -> Tensors:
    """The value head in the checkpoint's files; zeros where they have none. Raises ValueError: a frozen
    scalar model without a head."""
    head = getattr(module, "value_head", None)
    if head is None:
        return {}
    names = {"score": "value_head", "value_head": "value_head"}
    found = {}
    for _, key, value in stored_tensors(module.model.setup.folder):
        stem, _, kind = key.rpartition(".")
        if stem in names and kind in ("weight", "bias"):
            found[f"value_head.{kind}"] = value
    if not found and not head.weight.requires_grad:
        raise ValueError(f"{module.model.setup.folder} has no value head: score.weight")
    return {"value_head.weight": torch.zeros(head.weight.shape)} | found


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate meta parameters on ``device``, keeping the values of all buffers."""
    module._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        )
    )


def named_weights(module: Wrapper) -> Tensors:
    """All that a checkpoint holds of a module, by transformers' names: parameters, tied ones by each name,
    and buffers such as scales, bounds, biases of routers."""
    weights = {}
    for name, weight in module.model.state_dict(keep_vars=True).items():
        weights[re.sub(r"decay\.(A_log|dt_bias)$", r"\1", name)] = weight  # of linear attention
    head = getattr(module, "value_head", None)
    if head is not None:
        weights["value_head.weight"] = head.weight
        weights["value_head.bias"] = head.get_buffer("offset")
    return weights


# -------------------------------------------------------------------------------------------------
# Weights out
# -------------------------------------------------------------------------------------------------


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
    """Write a Hugging Face folder that `from_pretrained` loads, as transformers writes it: what was
    trained in the place of what the checkpoint came with, in the same types. Complete or absent:
    written next to its place and renamed. All ranks must call.

    LoRA adapters are merged, in float32, cast once, and stand in `adapter/` as well, as PEFT loads
    them. Returns on every rank why the folder could not be written, or None.
    """
    model, problem, base, weights = module.model, None, None, {}
    try:
        if distributed.is_main():
            base = read_whole(model)
            weights = dict(base.state_dict())
    except ValueError as error:
        problem = str(error)
    adapter: Tensors = {}
    for name, value, kind in trained_weights(module):
        if not distributed.is_main():
            continue
        if kind == "adapter":
            adapter[f"base_model.model.{name}.weight"] = value.cpu()
            continue
        if kind == "term" and name in weights:  # of what the files hold: ours may be rounded
            value = weights[name].to(value) + value
        weights[name] = value.to(weights.get(name, value).dtype).cpu()
        if not all(math.isfinite(bound) for bound in weights[name].aminmax()):
            problem = f"{name} is not finite"
    if base is not None:
        aside = folder.with_name(f".{folder.name}.tmp")
        try:
            if problem:
                raise ValueError(problem)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            turned = False  # experts of Qwen3-VL-MoE, whose files have them transposed
            for _, key, value in stored_tensors(model.setup.folder):
                if key.startswith(COPIED_KEYS):
                    weights[key] = value
                elif key in weights and weights[key].shape != value.shape:
                    weights[key], turned = weights[key].mT.contiguous(), True
            # transformers would turn them back
            base.save_pretrained(
                aside,
                state_dict=weights,
                max_shard_size=shard_bytes,
                save_original_format=not turned,
            )
            write_settings(aside, module.model.setup, adapter, processor)
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
            write_link(folder.parent / "latest", folder.name)
        except (OSError, ValueError, SafetensorError) as error:
            problem = str(error)
            shutil.rmtree(aside, ignore_errors=True)  # the disk may be full of it
    return distributed.from_main(problem)


def trained_weights(module: Wrapper) -> Iterator[tuple[str, Tensor, str]]:
    """(name, whole tensor, kind) of all that was trained: a "weight", what an adapter adds to one (a
    "term"), and the parts of the "adapter". All ranks must iterate."""
    adapted = {layer.weight: layer for layer in adapted_layers(module.model)}
    for name, parameter in named_weights(module).items():
        layer = adapted.get(parameter)
        if layer:
            yield name, whole(layer.lora_B) @ whole(layer.lora_A) * layer.scale, "term"
        elif ".lora_" in name:
            yield name, whole(parameter), "adapter"
        elif parameter.requires_grad:
            yield name.replace("value_head", "score"), whole(parameter), "weight"


def check_finite(tensors: Tensors) -> None:
    """Raises ValueError: a number of what was trained is not finite."""
    for name, tensor in tensors.items():
        # in one pass, without a copy: both bounds are NaN if one number is
        if not all(math.isfinite(bound) for bound in tensor.aminmax()):
            raise ValueError(f"{name} is not finite")


def write_settings(aside: Path, setup: Setup, adapter: Tensors, processor: Processor) -> None:
    """The small files of an export, its adapters, and everything durable."""
    if setup.adapter:
        (aside / "adapter").mkdir()
        save_tensors(aside / "adapter" / "adapter_model.safetensors", adapter, {})
        (aside / "adapter" / "adapter_config.json").write_text(json.dumps(setup.adapter, indent=2))
    # As it came: transformers writes names that other readers do not know, as of Gemma 4's heads.
    config = read_json(setup.folder / "config.json")
    (aside / "config.json").write_text(json.dumps(config, indent=2))
    processor.save(str(aside))
    for path in (aside, *aside.rglob("*")):
        sync_folder(path)
