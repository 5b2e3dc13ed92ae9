"""Checkpoints in and out.

    folder -> model of transformers, whole in rank 0's host memory -> shards of all ranks   fill
    shards -> what was trained, whole in rank 0's host memory -> the folder's files         export

A user's mistake is a ValueError that names the file. Models are of the type `vlm.Model`.

What stands in a checkpoint's files under which name is transformers' to know: it reads them, and its
conversions, reversed, give the names that trained weights have there. An export has the files that came,
in which the values of those are replaced: all else keeps its bytes.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from common import distributed
from common.data.folder import SMALL_FILES
from common.data.processor import Processor
from common.files import follow_pointer, open_file, read_json, sync_folder, write_link
from common.model.adapters import adapted_layers
from common.model.vlm import Model, Wrapper

# What no model here has, and exports copy: multi-token prediction, sound
COPIED_KEY = re.compile(r"(^|\.)(mtp|audio_tower|embed_audio)\.")
# what older versions of transformers wrote, and is computed
COMPUTED_KEY = re.compile(r"\.(inv_freq|position_ids|masked_bias)$")
# heads of scalar models that are not read: v_head.summary.weight, reward_head.weight, score.0.weight
OTHER_HEAD = re.compile(r"(?!lm_)\w*(head|score|reward|value|classifier)\.")
# the value head by its names in files: that of AutoModelForSequenceClassification, and ours
VALUE_HEAD = re.compile(r"(score|value_head)\.(weight|bias)")
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


# -------------------------------------------------------------------------------------------------
# Tensors that may be sharded
# -------------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded: a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_shard(target: Tensor, value: Tensor) -> None:
    """Copy a tensor into another, or this rank's part of it into a DTensor sharded on dimension 0."""
    local = shard_of(target)
    if not local.numel():  # the last ranks may have no part
        return
    if isinstance(target, DTensor):
        (chunk,) = target.__create_chunk_list__()
        start = chunk.offsets[0]
        value = value[start : start + len(local)]
    local.copy_(value)


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
    patterns = [*SMALL_FILES, *["*.safetensors"] * weights]
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


def weight_index(folder: Path) -> Path:
    """The file of a checkpoint that `from_pretrained` reads first, the weights themselves or the index of
    their files. Raises ValueError: there is none."""
    names = ["model.safetensors", "model.safetensors.index.json"]
    config = folder / "config.json"
    if config.is_file() and (file := read_json(config).get("transformers_weights")):
        names = [file]
    for path in (folder / name for name in names):
        if path.is_file():
            return path
    advice = CONVERT_BIN
    cached = re.search(r"/models--([^/]+)/snapshots/", f"{folder}/")
    if cached and not any(folder.glob("*.bin")):
        advice = (
            f"The cache of the hub has no weights of it: hf download {cached[1].replace('--', '/')}"
        )
    raise ValueError(f"{folder / names[0]} cannot be read as safetensors: No such file. {advice}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises ValueError: there are none, or they lie elsewhere."""
    first = weight_index(folder)
    if first.suffix != ".json":
        return [first]
    names = sorted(set(read_json(first, {"weight_map": {str: str}})["weight_map"].values()))
    for name in names:
        if name != Path(name).name:
            raise ValueError(f"{first}: weight_map: {name} is no file beside it")
    return [folder / name for name in names]


def open_weights(path: Path):
    """A safetensors file, whose tensors are read when asked for. Raises ValueError: no such file,
    or only a part of one."""
    try:
        open_file(path).close()
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
    """Allocate a module that is on meta, or this rank's shards of it, on ``device`` and fill it from its
    checkpoint, which rank 0 reads. Fresh adapters depend on ``seed``; a critic's value head that the
    files lack is zero. Raises UserError on every rank: see `read_weights`."""
    weights: Tensors = {}
    with distributed.raise_on_all_ranks():
        if distributed.is_main():
            weights = read_weights(module)
    materialize(module, device)
    init_adapters(module.model, seed)
    kinds = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
    kinds, done = distributed.from_main(kinds), set()
    for name, target in named_weights(module).items():
        if name not in kinds or target in done:  # an adapter, or tied
            continue
        shape, dtype = kinds[name]
        if distributed.is_main():
            value = weights.pop(name).to(device)
        else:
            value = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, 0)
        copy_shard(target, value)
        done.add(target)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate meta parameters on ``device``, keeping the values of all buffers."""
    module._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        )
    )


def init_adapters(model: Model, seed: int) -> None:
    """A uniform in ±1 / sqrt(in), B zero, identical on any number of ranks: the adapted model
    starts equal to its base."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted_layers(model):
        values = torch.empty(layer.lora_A.shape).uniform_(-1, 1, generator=generator)  # (r, in)
        copy_shard(layer.lora_A, values / layer.in_features**0.5)
        nn.init.zeros_(layer.lora_B)


def named_weights(module: Wrapper) -> Tensors:
    """All that a checkpoint may hold of a module, by transformers' names: parameters, tied ones by each
    name, and buffers such as scales, bounds, biases of routers."""
    weights: Tensors = {}
    for name, weight in module.model.state_dict(keep_vars=True).items():
        weights[re.sub(r"decay\.(A_log|dt_bias)$", r"\1", name)] = weight  # of linear attention
    head = getattr(module, "value_head", None)
    if head is not None:
        weights |= {"score.weight": head.weight, "score.bias": head.get_buffer("offset")}
    return weights


def read_weights(module: Wrapper) -> Tensors:
    """What the checkpoint of a module holds of it, by the names of `named_weights`, in host memory and in
    types that hold the files' values; how the files name it is noted in the model.

    Raises:
        ValueError: no safetensors files, missing or quantized weights, two values for tied ones, a
            shape that does not fit, or a value head of another kind; names and shapes are given.
    """
    setup = module.model.setup
    folder = setup.folder
    model, info = read_model(module.model)
    wanted, weights = named_weights(module), dict(model.state_dict())
    for name, shape, expected in sorted(info["mismatched_keys"]):
        if name in wanted:
            raise ValueError(
                f"{folder}: {name} is {tuple(shape)}, the model's config.json asks for {tuple(expected)}"
            )
    for name in info["missing_keys"]:
        del weights[name]
    weights |= read_head(module, info["unexpected_keys"])
    on_meta = [name for name, buffer in module.model.named_buffers() if buffer.is_meta]
    missing = [name for name in (*wanted, *on_meta) if name not in weights and ".lora_" not in name]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} weights are in no file, the first: {', '.join(missing[:3])}; "
            f"not read of the files: {sorted(info['unexpected_keys'])[:3]}"
        )
    check_unexpected(module, info["unexpected_keys"])
    check_tied(folder, wanted, weights)
    vars(module.model)["_weight_conversions"] = model._weight_conversions
    setup.types = {name: weight.dtype for name, weight in weights.items()}
    return weights


def read_model(model: Model) -> tuple[PreTrainedModel, dict]:
    """The model of the checkpoint's folder as transformers reads it, in host memory, and its report of
    the keys. Raises ValueError: it cannot be read."""
    folder, kind = model.setup.folder, cast(type[PreTrainedModel], type(model))
    dtype, wide = types_of(folder)
    # What else the files hold in float32 would be rounded; and no weight may be left random unseen.
    changes = {"_keep_in_fp32_modules_strict": wide, "_keys_to_ignore_on_load_missing": None}
    reader: Any = type(kind.__name__, (kind,), changes | {"__module__": kind.__module__})
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with quiet():
            return reader.from_pretrained(folder, **options)
    except Exception as error:  # transformers and safetensors have their own
        raise ValueError(
            f"{folder}: transformers cannot read its weights, of which some may be missing or have another "
            f"shape: {error}"
        ) from error


@contextmanager
def quiet():
    """Inside, transformers neither reports keys, which are checked here, nor draws progress bars."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def types_of(folder: Path) -> tuple[torch.dtype, set[str]]:
    """The type in which to read a checkpoint's files without rounding, and patterns of names that are in
    float32 if it is smaller. Raises ValueError: the files cannot be read, or are quantized."""
    types, wide = set(), set()
    for path, key, value in stored_tensors(folder):
        # of one byte; those of four bits are packed into such, or have keys of their own
        if value.dtype.itemsize == 1 and value.dtype is not torch.bool:
            raise ValueError(
                f"{path}: {key} is of type {value.dtype}; quantized weights are not supported"
            )
        if value.is_floating_point():
            types.add(value.dtype)
        if value.dtype == torch.float32:
            wide.add(re.escape(".".join(key.split(".")[-2:])) + "$")
    small = types - {torch.float32}
    if len(small) == 1 and small <= {torch.bfloat16, torch.float16}:
        return small.pop(), wide
    return torch.float32, set()


def read_head(module: Wrapper, keys: set[str]) -> Tensors:
    """The value head in the checkpoint's files, zeros where they have none, which only one that is
    trained may lack. Raises ValueError."""
    head, folder = getattr(module, "value_head", None), module.model.setup.folder
    if head is None:
        return {}
    values = {"score.bias": torch.zeros(head.get_buffer("offset").shape)}
    for path, key, value in stored_tensors(folder):
        match = VALUE_HEAD.fullmatch(key)
        if not match:
            continue
        name = f"score.{match[2]}"
        expected = named_weights(module)[name].shape
        if value.shape != expected:
            raise ValueError(
                f"{path}: {key} is {tuple(value.shape)}, a value head has {tuple(expected)}"
            )
        values[name] = value
    if "score.weight" in values:
        return values
    heads = sorted(key for key in keys if OTHER_HEAD.match(key))
    if heads:
        raise ValueError(
            f"{folder}: {', '.join(heads)}: a value head is read from score.weight or "
            "value_head.weight, one row on the last hidden state, and its bias; if this is one, "
            "rename it"
        )
    if head.weight.requires_grad:
        values["score.weight"] = torch.zeros(head.weight.shape)
    return values


def check_unexpected(module: Wrapper, keys: set[str]) -> None:
    """Raises ValueError: among the keys of a checkpoint that are not read is one without a reason."""
    lost = [key for key in keys if not (COPIED_KEY.search(key) or COMPUTED_KEY.search(key))]
    if hasattr(module, "value_head"):  # which has been read
        lost = [key for key in lost if not OTHER_HEAD.match(key)]
    if lost:
        raise ValueError(
            f"{module.model.setup.folder}: {len(lost)} tensors of the files are no part of the model in "
            f"config.json, the first: {', '.join(sorted(lost)[:3])}"
        )


def check_tied(folder: Path, wanted: Tensors, weights: Tensors) -> None:
    """Raises ValueError: two values for what is one weight."""
    first: dict[Tensor, str] = {}
    for name, target in wanted.items():
        other = first.setdefault(target, name)
        if other != name and not torch.equal(weights[name], weights[other]):
            raise ValueError(
                f"{folder}: {name} differs from {other}, to which config.json ties it; to keep both, "
                "set tie_word_embeddings to false there"
            )


# -------------------------------------------------------------------------------------------------
# Weights out
# -------------------------------------------------------------------------------------------------


@torch.no_grad()
def export(module: Wrapper, processor: Processor, folder: Path) -> str | None:
    """Write a Hugging Face folder that `from_pretrained` loads: the files that the checkpoint came with,
    in which what was trained has its new values, in the same types. Complete or absent: written next
    to its place and renamed. All ranks must call.

    LoRA adapters are merged, in float32, cast once, and stand in `adapter/` as well, as PEFT loads
    them. Returns on every rank why the folder could not be written, or None.
    """
    setup, problem = module.model.setup, None
    trained = gather_trained(module)
    if distributed.is_main():
        aside = folder.with_name(f".{folder.name}.tmp")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            write_weights(aside, module.model, trained)
            if setup.adapter:
                write_adapter(aside / "adapter", setup.adapter, trained.adapter)
            processor.save(aside)
            shutil.copyfile(setup.folder / "config.json", aside / "config.json")
            for path in aside.rglob(
                "*.safetensors"
            ):  # safetensors 0.8 writes for their owner alone
                shutil.copymode(aside / "config.json", path)
            for path in (aside, *aside.rglob("*")):
                sync_folder(path)
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
            write_link(folder.parent / "latest", folder.name)
        except (OSError, ValueError, SafetensorError) as error:
            problem = str(error)
            shutil.rmtree(aside, ignore_errors=True)  # the disk may be full of it
    return distributed.from_main(problem)


@dataclass
class Trained:
    """What was trained, in rank 0's host memory, by the names of `named_weights`."""

    weights: Tensors = field(default_factory=dict)  # new values, in types that hold the files'
    tied: set[str] = field(default_factory=set)  # those of them that are one weight under two names
    terms: Tensors = field(default_factory=dict)  # float32, what adapters add to other weights
    adapter: Tensors = field(default_factory=dict)  # float32, by PEFT's names


def gather_trained(module: Wrapper) -> Trained:
    """All ranks must call; on the others it is empty."""
    trained, types = Trained(), module.model.setup.types
    adapted = {layer.weight: layer for layer in adapted_layers(module.model)}
    names: dict[Tensor, str] = {}
    for name, parameter in named_weights(module).items():
        into, dtype = trained.weights, types.get(name)
        if parameter in adapted:
            layer, into, dtype = adapted[parameter], trained.terms, torch.float32
            value = whole(layer.lora_B) @ whole(layer.lora_A) * layer.scale
        elif parameter.requires_grad:
            value = whole(parameter)
            if (first := names.setdefault(parameter, name)) != name:
                trained.tied |= {first, name}
        else:
            continue
        if ".lora_" in name:
            into, name = trained.adapter, f"base_model.model.{name}.weight"
        if distributed.is_main():
            # copies, as files cannot hold one memory twice
            into[name] = value.to("cpu", dtype, copy=True)
    return trained


def by_keys(model: Model, weights: Tensors) -> Tensors:
    """Weights by the keys that they have in the checkpoint's files, and in the layouts of these."""
    head = {name: weight for name, weight in weights.items() if VALUE_HEAD.fullmatch(name)}
    others = {name: weight for name, weight in weights.items() if name not in head}
    return revert_weight_conversion(cast(PreTrainedModel, model), others) | head


def write_weights(folder: Path, model: Model, trained: Trained) -> None:
    """The files of the model's checkpoint, with what was trained in its places; a value head that they
    lack stands in the last. Raises ValueError: a trained number is not finite, or the files are no
    longer those that were read."""
    check_finite(trained.weights | trained.terms)
    new, terms = by_keys(model, trained.weights), by_keys(model, trained.terms)
    source, written = model.setup.folder, set()
    *_, last = paths = weight_files(source)
    for path in paths:
        with open_weights(path) as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
            for key, value in tensors.items():
                name = VALUE_HEAD.sub(r"score.\2", key)
                changed = new[name] if name in new else value
                if name in terms:
                    changed = value.float() + terms[name]
                if (
                    changed.shape != value.shape
                ):  # experts: transformers does not transpose them back
                    changed = changed.mT
                tensors[key] = changed.to(value.dtype).contiguous()
                written.add(name)
            if path == last:
                head = {"score.weight"} & new.keys() - written
                tensors |= {name: new[name] for name in head}
            save_tensors(folder / path.name, tensors, file.metadata() or {})
    write_index(folder, weight_index(source), dict.fromkeys(head, last.name))
    tied = by_keys(model, {name: trained.weights[name] for name in trained.tied})
    lost = (new.keys() | terms.keys()) - written - head - tied.keys()
    if lost:
        raise ValueError(f"{source} no longer has {', '.join(sorted(lost)[:3])}, which was trained")


def write_index(folder: Path, index: Path, further: dict[str, str]) -> None:
    """The index of a checkpoint's files, if it has one, with ``further`` keys and their files."""
    if index.suffix != ".json":
        return
    content = read_json(index)
    content["weight_map"] |= further
    (folder / index.name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def check_finite(tensors: Tensors) -> None:
    """Raises ValueError: a number of what was trained is not finite. Parts of tensors may be empty."""
    for name, tensor in tensors.items():
        # in one pass, without a copy: both bounds are NaN if one number is
        if tensor.numel() and not all(math.isfinite(bound) for bound in tensor.aminmax()):
            raise ValueError(f"{name} is not finite")


def write_adapter(folder: Path, config: dict, tensors: Tensors) -> None:
    """An adapter as PEFT loads it."""
    folder.mkdir()
    save_tensors(folder / "adapter_model.safetensors", tensors, {})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def save_tensors(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Write a safetensors file that survives a power cut. Raises OSError: a full disk, say."""
    try:
        save_file(tensors, path, metadata | {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    sync_folder(path)
