"""The small files of a checkpoint folder: config.json, the files of the tokenizer, and further settings."""

import json
import re
import shutil
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from common.ground.files import UserError, open_file, read_json

IMAGES_FORM = {"image_processor_type?": str}
# The small files besides config.json and the tokenizer's, and the form of what is read of them here;
# JudgeSettings and the image processors check the rest.
SETTINGS_FILES = {
    "chat_template": {"chat_template?": str},
    "generation_config": {"eos_token_id?": int | list},
    "judge": dict,
    "processor_config": {
        "chat_template?": str,
        "image_processor?": IMAGES_FORM,
        "video_processor?": IMAGES_FORM,
    },
    "preprocessor_config": IMAGES_FORM,
    "video_preprocessor_config": IMAGES_FORM,
}

# Which files a checkpoint has besides its weights: settings, vocabularies (tokenizer.model.v3), templates,
# and programs, which only other tools run.
SMALL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.model.v*", "*.tiktoken", "*.py")


def copy_files(source: Path, target: Path) -> None:
    """Copy the small files of a checkpoint, but for config.json and the index of its weights."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in (*SMALL_FILES, "additional_chat_templates/*.jinja"):
        for path in source.glob(pattern):
            if path.name != "config.json" and not path.name.endswith(".index.json"):
                copy = target / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def read_model_config(folder: str | Path):
    """The config of a checkpoint's model. Raises UserError: no config.json, or one that
    transformers cannot use."""
    path = Path(folder, "config.json")
    read_json(path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each class of transformers has its own checks
        raise UserError(f"{path}: {without_advice(error)}") from error
    for part in (config, config.get_text_config()):
        quantization = getattr(part, "quantization_config", None)
        if quantization:
            raise UserError(
                f"{path}: quantization_config {quantization!s:.80}: quantized checkpoints are not "
                "supported; if the weights are floats, remove the entry"
            )
    return config


def advice_on_missing(folder: str | Path, otherwise: str = "") -> str:
    """What to do about files that are missing: the cache of the hub may hold a part of a model."""
    cached = re.search(r"/models--([^/]+)/snapshots/", f"{folder}/")
    if not cached:
        return otherwise
    return (
        f"The cache of the hub does not have all of it: hf download {cached[1].replace('--', '/')}"
    )


def without_advice(error: Exception) -> str:
    """A message of transformers, without its advice to run the checkpoint's code."""
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own, which is never run here"
    return str(error)


def read_settings(folder: str | Path) -> dict[str, dict]:
    """The objects in SETTINGS_FILES, by name; empty where there is no file. Raises UserError."""
    files = {}
    for name, form in SETTINGS_FILES.items():
        path = Path(folder, f"{name}.json")
        files[name] = read_json(path, form) if path.exists() else {}
    return files


def read_tokenizer(folder: str | Path):
    """The tokenizer of a checkpoint. Raises UserError: its files are missing or damaged."""
    for file in Path(folder).glob("tokenizer*"):
        open_file(file).close()
    try:
        # The files of Mistral Small 3.1 and its relatives cut words otherwise than Mistral does. The option
        # mends that, and spares folders with a tekken.json the tokenizer of mistral-common.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, fix_mistral_regex=True
        )
        has_words = tokenizer.encode("a", add_special_tokens=False)
    except Exception as error:  # the library behind it raises bare exceptions
        raise UserError(f"the tokenizer's files cannot be used: {without_advice(error)}") from error
    # Without files, transformers makes a tokenizer without words.
    if not has_words:
        raise UserError(
            "no vocabulary: tokenizer.json, or the files in its place, are missing. "
            + advice_on_missing(folder, "Take the base checkpoint's.")
        )
    tokenizer.backend_tokenizer.no_truncation()  # a tokenizer.json can ask for it: a silent cut
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def write_word_pattern(tokenizer, folder: Path) -> None:
    """Write into the tokenizer.json of a folder how the tokenizer cuts words, if `read_tokenizer` has mended
    that: nobody mends what a newer transformers has written."""
    backend, path = tokenizer.backend_tokenizer, folder / "tokenizer.json"
    if not getattr(backend, "fix_mistral_regex", False) or not path.exists():
        return
    content = read_json(path)
    mended = json.loads(backend.to_str())["pre_tokenizer"]
    if content["pre_tokenizer"] != mended:
        content["pre_tokenizer"] = mended
        path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
