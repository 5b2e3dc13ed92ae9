"""Checkpoints in and out.

    folder -> tensors in mapped memory, which rank 0 sends -> shards of all ranks        fill
    shards -> what was trained, in rank 0's host memory -> the folder's files            export

A user's mistake is a UserError that names the file. Models are of the type `vlm.Model`.

Transformers knows which tensor a checkpoint's files hold under which name: it reads the files, and its
conversions, reversed, give the names of trained weights in the files. An export is a copy of the files of
the checkpoint with the values of trained weights replaced: everything else keeps its bytes.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import contextmanager
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
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from common import VERSION, distributed
from common.data.folder import SMALL_FILES, advice_on_missing, read_model_config
from common.ground.files import (
    UserError,
    follow_pointer,
    open_file,
    plain_json,
    read_bytes,
    read_json,
    sync_folder,
    write_link,
)
from common.model.vlm import Model, Wrapper

# Keys that nothing reads, and exports copy: multi-token prediction, sound, and what older versions of
# transformers wrote although it is computed.
COPIED_KEY = re.compile(
    r"(^|\.)(mtp|audio_tower|embed_audio)\.|\.(inv_freq|position_ids|masked_bias)$"
)
EXPERT = re.compile(r"\.experts\.\d+\.")  # in the key of a weight of one expert
# the value head in files, by the name of AutoModelForSequenceClassification, or ours
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
# The files of a model that are read beside its weights; a folder may hold others.
READ = re.compile(
    r"(config|generation_config|judge|special_tokens_map|added_tokens|(|pre|video_pre)processor_config"
    r"|.*tokenizer.*|.*vocab.*|chat_template|merges)\.(json|txt|jinja)|.*\.(model|model\.v\d+|tiktoken)"
)
# ... and those that versions before compared
READ_BEFORE = re.compile(r"(?!consolidated).*\.(json|txt|jinja|model|safetensors)")
MIB = 2**20


# -------------------------------------------------------------------------------------------------
# Folders and files
# -------------------------------------------------------------------------------------------------


def resolve_folder(name: str, weights: bool = True) -> Path:
    """A local checkpoint folder, that of a config.json, the one that <out>/export/latest names, or
    the downloaded snapshot of a hub name; without ``weights``, of its small files only.

    Raises:
        UserError: there is no such folder, and the hub has nothing of this name; or it is no model,
            but an adapter of one, say.
    """
    path = follow_pointer(name)
    if path.is_file():
        if path.name != "config.json":
            raise UserError(f"checkpoint {name}: this is a file; name the folder of the model")
        path = path.parent
    folder = path if path.is_dir() else download(name, weights)
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        raise UserError(f"checkpoint {name}: " + MERGE_ADAPTER.format(base=base, adapter=name))
    if not (folder / "config.json").is_file():
        raise UserError(
            f"checkpoint {name}: no config.json, so this is no model in Hugging Face format; a "
            "run's models are <out>/export/step-N"
        )
    return folder


def download(name: str, weights: bool) -> Path:
    """The snapshot of a hub name. Raises UserError: there is none."""
    patterns = [*SMALL_FILES, *["*.safetensors"] * weights]
    try:
        # not Mistral's second copy of the weights
        folder = snapshot_download(name, allow_patterns=patterns, ignore_patterns="consolidated*")
    except HFValidationError as error:  # it can only be a path
        raise UserError(f"checkpoint {name}: no such folder") from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"checkpoint {name}: no such folder; and the hub, where a model might have this name, "
            "cannot be reached"
        ) from error
    except (OSError, ValueError) as error:  # whatever else the hub raises is one of them
        raise UserError(
            f"checkpoint {name}: no such folder, and the hub says: {str(error).splitlines()[0]}"
        ) from error
    return Path(folder)


def weight_index(folder: Path) -> Path:
    """The weights of a checkpoint that `from_pretrained` reads, or the index of their files. Raises
    UserError: there is none."""
    names = ["model.safetensors", "model.safetensors.index.json"]
    if file := read_json(folder / "config.json").get("transformers_weights"):
        names = [file]
    for path in (folder / name for name in names):
        if path.is_file():
            return path
    advice = CONVERT_BIN if any(folder.glob("*.bin")) else advice_on_missing(folder, CONVERT_BIN)
    raise UserError(f"{folder / names[0]} cannot be read as safetensors: No such file. {advice}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises UserError: there are none."""
    first = weight_index(folder)
    if first.suffix != ".json":
        return [first]
    names = read_json(first, {"weight_map": {str: str}})["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def open_weights(path: Path):
    """A safetensors file. Raises UserError: there is none, or only a part of one."""
    try:
        open_file(path).close()
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        advice = "" if path.exists() else advice_on_missing(path.parent)
        raise UserError(
            f"{path} cannot be read as safetensors: {error}. {advice}".strip()
        ) from error


def digest_model(name: str, as_read: bool = True) -> str:
    """Of a model's folder or hub name: of what is read of it, or as versions before did it."""
    folder = resolve_folder(name)
    if not as_read:
        return digest_files(path for path in folder.iterdir() if READ_BEFORE.fullmatch(path.name))
    small = [path for path in folder.iterdir() if READ.fullmatch(path.name)]
    # of a folder without weights, loading tells
    stored = weight_files(folder) if any(folder.glob("*.safetensors")) else []
    return digest_files([*small, *stored], plain=True)


def digest_files(paths: Iterable[Path], plain: bool = False) -> str:
    """Of names and contents, of JSON perhaps in its ``plain`` form; of weights the size, and a megabyte at
    the start, in the middle and at the end of each file."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        if plain and path.suffix == ".json":
            digest.update(f"{path.name} ".encode() + plain_json(read_bytes(path)))
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open_file(path) as file:
            if path.suffix != ".safetensors":
                digest.update(file.read())
                continue
            for start in (0, size // 2, max(0, size - MIB)):
                file.seek(start)
                digest.update(file.read(MIB))
    return digest.hexdigest()[:12]


def stored_tensors(folder: Path) -> Tensors:
    """All that a checkpoint's files hold, in mapped memory: what is used of a tensor is read then."""
    tensors = {}
    for path in weight_files(folder):
        with open_weights(path) as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}
    return tensors


# -------------------------------------------------------------------------------------------------
# The weights of a module
# -------------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded: a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate meta parameters on ``device``, keeping the values of all buffers."""
    module._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        )
    )


def stored_name(name: str) -> str:
    """What transformers calls a parameter or buffer of a module."""
    name = name.replace("value_head.offset", "score.bias").replace("value_head.", "score.")
    name = name.removeprefix("model.")
    return re.sub(r"decay\.(A_log|dt_bias)$", r"\1", name)  # of linear attention


def named_weights(module: Wrapper) -> Tensors:
    """All that a checkpoint may hold of a module, by transformers' names: parameters, tied ones by each
    name, and buffers such as scales, bounds, biases of routers."""
    return {stored_name(name): w for name, w in module.state_dict(keep_vars=True).items()}


# -------------------------------------------------------------------------------------------------
# Weights in
# -------------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(module: Wrapper, device: torch.device, seed: int) -> None:
    """Allocate a module that is on meta, or this rank's shards of it, on ``device`` and fill it from its
    checkpoint, which rank 0 reads and sends, tensor by tensor. Raises UserError on every rank: see
    `read_weights`."""
    weights: Tensors = {}
    with distributed.raise_on_all_ranks():
        if distributed.is_main():
            weights = read_weights(module, seed)
    materialize(module, device)
    for name, target in module.state_dict().items():
        if distributed.is_main():
            value = weights.pop(name).to(device, target.dtype).contiguous()
        else:
            value = torch.empty(target.shape, dtype=target.dtype, device=device)
        if isinstance(target, DTensor):  # each rank receives its own rows
            value = distribute_tensor(value, target.device_mesh, target.placements)
        else:
            dist.broadcast(value, 0)
        target.copy_(value)


def read_weights(module: Wrapper, seed: int) -> Tensors:
    """The state of a module: what its checkpoint holds, in types that hold the files' values, and
    `fresh_weights`. The model notes what an export will need.

    Raises:
        UserError: no safetensors files, quantized weights, or weights that do not fit config.json.
    """
    setup, wanted = module.model.setup, named_weights(module)
    stored = stored_tensors(setup.folder)
    model, report = convert(module.model, stored)
    weights = fresh_weights(wanted, seed) | model.state_dict()
    for name in report["missing_keys"]:
        del weights[name]
    for name, shape, _ in report["mismatched_keys"]:
        weights[name] = torch.empty(shape, device="meta")
    heads = {key for key in stored if VALUE_HEAD.fullmatch(key) and "score.weight" in wanted}
    weights |= {VALUE_HEAD.sub(r"score.\2", key): stored[key] for key in heads}
    check_weights(setup.folder, wanted, weights, report["unexpected_keys"] - heads)
    setup.types = {name: weight.dtype for name, weight in weights.items()}
    setup.digest = digest_files(weight_files(setup.folder))
    vars(module.model)["_weight_conversions"] = model._weight_conversions
    return {name: weights[stored_name(name)] for name in module.state_dict()}


def convert(model: Model, stored: Tensors) -> tuple[PreTrainedModel, dict]:
    """The model that transformers makes of a checkpoint's tensors, in mapped memory unless it converts
    them, and its report of their keys. Raises UserError: they are quantized, or cannot be read."""
    folder, kind = model.setup.folder, cast(type[PreTrainedModel], type(model))
    for key, value in stored.items():
        # those of four bits are packed into bytes, or have keys of their own
        if value.dtype.itemsize == 1 and value.dtype is not torch.bool:
            raise UserError(
                f"{folder}: {key} is of type {value.dtype}; quantized weights are not supported"
            )
    # One type that rounds nothing. What is float32 beside a smaller one is named by its last words.
    types = {value.dtype for value in stored.values() if value.is_floating_point()}
    small = types - {torch.float32}
    dtype = small.pop() if len(small) == 1 else torch.float32
    full = [key.split(".")[-2:] for key, value in stored.items() if value.dtype == torch.float32]
    strict = {re.escape(".".join(words)) + "$" for words in full}
    # experts that are stored one by one get another name, as one tensor
    are_full = (value.dtype == torch.float32 for key, value in stored.items() if EXPERT.search(key))
    strict |= {r"\.experts\."} if any(are_full) else set()
    changes = {"_keep_in_fp32_modules_strict": strict, "__module__": kind.__module__}
    reader: Any = type(kind.__name__, (kind,), changes)
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with quiet():
            config = read_model_config(folder)
            return reader.from_pretrained(None, config=config, state_dict=stored, **options)
    except Exception as error:  # transformers has its own
        raise UserError(
            f"{folder}: transformers cannot read its weights, of which some may be missing or have another "
            f"shape: {error}"
        ) from error


@contextmanager
def quiet():
    """Inside, transformers does not report keys, which are checked here; it no longer draws progress bars."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def fresh_weights(wanted: Tensors, seed: int) -> Tensors:
    """What a checkpoint may lack. Adapters: A (r, in) uniform in ±1 / sqrt(in), equal on any number of
    ranks, B zero: the adapted model starts equal to its base. A value head of zeros, if it is trained."""
    fresh, generator = {}, torch.Generator().manual_seed(seed)
    for name, weight in wanted.items():
        if name.endswith("lora_A"):
            values = torch.empty(weight.shape).uniform_(-1, 1, generator=generator)
            fresh[name] = values / weight.shape[1] ** 0.5
        elif name.endswith("lora_B") or name == "score.bias":
            fresh[name] = torch.zeros(weight.shape)
        elif name == "score.weight" and weight.requires_grad:
            fresh[name] = torch.zeros(weight.shape)
    return fresh


def check_weights(folder: Path, wanted: Tensors, weights: Tensors, unread: set[str]) -> None:
    """Raises UserError: not exactly what a module wants was read of its checkpoint."""
    problems = []
    first: dict[Tensor, str] = {}  # names of parameters that may be tied
    for name, target in wanted.items():
        other = first.setdefault(target, name)
        if name not in weights:
            problems.append(f"{name} is in no file")
        elif weights[name].shape != target.shape:
            problems.append(f"{name} is {tuple(weights[name].shape)}, not {tuple(target.shape)}")
        elif other != name and not torch.equal(weights[name], weights[other]):
            problems.append(
                f"{name} differs from {other}, to which it is tied; to keep both, set "
                "tie_word_embeddings to false"
            )
    lost = (key for key in sorted(unread) if not COPIED_KEY.search(key))
    problems += [f"{key} is no part of the model" for key in lost]
    if problems:
        text = "; ".join(problems[:3])
        if "score.weight" in wanted:
            text += " (a value head is score.weight or value_head.weight, one row)"
        raise UserError(
            f"{folder}: {len(problems)} weights do not fit config.json, the first: {text}"
        )


# -------------------------------------------------------------------------------------------------
# Weights out
# -------------------------------------------------------------------------------------------------


@torch.no_grad()
def export(module: Wrapper, save: Callable[[Path], None], folder: Path) -> str | None:
    """Write a Hugging Face folder that `from_pretrained` loads: the files that the checkpoint came with,
    in which what was trained has its new values, in the same types; ``save`` writes those beside the
    weights and config.json. Complete or absent: written next to its place and renamed. All ranks must
    call.

    LoRA adapters are merged, in float32, cast once, and stand in `adapter/` as well, as PEFT loads
    them. Returns on every rank why the folder could not be written, or None.
    """
    problem, trained = None, gather_trained(module)
    if distributed.is_main():
        aside = folder.with_name(f".{folder.name}.tmp")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            write_weights(aside, module.model, trained)
            save(aside)
            (aside / "export.json").write_text(json.dumps({"version": VERSION}) + "\n")
            came = module.model.setup.folder / "config.json"
            config = shutil.copyfile(came, aside / "config.json")
            for path in aside.rglob("*.safetensors"):  # which are written for their owner alone
                shutil.copymode(config, path)
            for path in (aside, *aside.rglob("*")):
                sync_folder(path)
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
            write_link(folder.parent / "latest", folder.name)
        except (OSError, UserError, SafetensorError) as error:
            problem = str(error)
            shutil.rmtree(aside, ignore_errors=True)  # the disk may be full of it
    return distributed.from_main(problem)


def gather_trained(module: Wrapper) -> Tensors:
    """What was trained, by the names of `named_weights`, in types that hold the files' values, in rank 0's
    host memory. All ranks must call; on the others it is empty."""
    trained, types = {}, module.model.setup.types
    for name, parameter in named_weights(module).items():
        if parameter.requires_grad:
            value = whole(parameter)
            if distributed.is_main():
                # a copy, as files cannot hold one memory twice
                trained[name] = value.to("cpu", types[name], copy=True)
    return trained


def write_weights(folder: Path, model: Model, trained: Tensors) -> None:
    """The files of the model's checkpoint, with what was trained in its places; a value head that they
    lack stands in the last. Raises UserError: the files are no longer those that were read."""
    adapter = {name: value for name, value in trained.items() if ".lora_" in name}
    weights = {name: value for name, value in trained.items() if name not in adapter}
    source = model.setup.folder
    if digest_files(weight_files(source)) != model.setup.digest:
        raise UserError(f"the weights in {source} have changed since the run started")
    stored = stored_tensors(source)
    new = by_keys(model, weights, stored) | merged(model, adapter, stored)
    head = {"score.weight"} & new.keys() - stored.keys()
    replaced = [new[key] for key in new.keys() & stored.keys()]
    for key in new.keys() - stored.keys() - head:
        # a tied weight may stand there by one of its names
        if not any(torch.equal(new[key], value) for value in replaced):
            raise UserError(f"{source} has no {key}, which was trained")
    *_, last = paths = weight_files(source)
    for path in paths:
        with open_weights(path) as file:
            keys, metadata = file.keys(), file.metadata()
        tensors = {key: as_stored(new.get(key, stored[key]), stored[key]) for key in keys}
        if path == last:
            tensors |= {key: new[key] for key in head}
        save_file(tensors, folder / path.name, metadata)
    index = weight_index(source)
    if index.suffix == ".json":
        content = read_json(index)
        content["weight_map"] |= dict.fromkeys(head, last.name)
        (folder / index.name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    if adapter:
        write_adapter(folder / "adapter", model, adapter)


def by_keys(model: Model, weights: Tensors, stored: Tensors) -> Tensors:
    """Weights by the keys that they have in the checkpoint's files."""
    others = {name: weight for name, weight in weights.items() if name != "score.weight"}
    new = revert_weight_conversion(cast(Any, model), others)
    if "score.weight" in weights:
        key = "value_head.weight" if "value_head.weight" in stored else "score.weight"
        new[key] = weights["score.weight"]
    return new


def merged(model: Model, adapter: Tensors, stored: Tensors) -> Tensors:
    """The weights to which adapters belong, with these added to the values in the files, by key."""
    new, config = {}, model.setup.adapter or {"target_modules": []}
    for layer in config["target_modules"]:
        change = adapter[f"{layer}.lora_B"] @ adapter[f"{layer}.lora_A"]
        change *= config["lora_alpha"] / config["r"]
        for key, value in by_keys(model, {f"{layer}.weight": change}, stored).items():
            if key in stored:
                value = (stored[key].float() + value).to(stored[key].dtype)
            new[key] = value
    return new


def as_stored(value: Tensor, stored: Tensor) -> Tensor:
    """A weight in the type and layout of the files: transformers does not transpose experts back."""
    value = value if value.shape == stored.shape else value.mT
    return value.to(stored.dtype).contiguous()


def write_adapter(folder: Path, model: Model, tensors: Tensors) -> None:
    """An adapter as PEFT loads it."""
    folder.mkdir()
    tensors = {f"base_model.model.{name}.weight": value for name, value in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(model.setup.adapter, indent=2))
