"""The small files of a checkpoint folder: config.json, the tokenizer's, and further settings."""

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from common.files import read_json


# The small files besides config.json and the tokenizer's.
SETTINGS_FILES = (
    "chat_template",
    "generation_config",
    "judge",
    "processor_config",
    "preprocessor_config",
    "video_preprocessor_config",
)


def read_model_config(folder: str | Path):
    """The config of a checkpoint's model. Raises ValueError: no config.json, or one that
    transformers cannot use."""
    path = Path(folder, "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each class of transformers has its own checks
        raise ValueError(f"{path}: {without_advice(error)}") from error
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise ValueError(
            f"{path}: quantization_config {quantization!s:.80}: quantized checkpoints are not "
            "supported; if the weights are floats, remove the entry"
        )
    return config


def without_advice(error: Exception) -> str:
    """What transformers says, but for its advice to run code of the checkpoint's."""
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own, which is never run here"
    return str(error)


def read_settings(folder: str | Path) -> dict[str, dict]:
    """The objects in SETTINGS_FILES, by name; empty where there is no file. Raises ValueError."""
    files = {}
    for name in SETTINGS_FILES:
        path = Path(folder, f"{name}.json")
        files[name] = read_json(path) if path.exists() else {}
    return files


def read_tokenizer(folder: str | Path):
    """The tokenizer of a checkpoint. Raises ValueError: its files are missing or damaged."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library behind it raises bare exceptions
        raise ValueError(
            f"the tokenizer's files cannot be used: {without_advice(error)}"
        ) from error
    # Without files transformers makes one without words.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise ValueError(
            "no vocabulary: tokenizer.json, or the files in its place, are missing; take the base "
            "checkpoint's"
        )
    tokenizer.backend_tokenizer.no_truncation()  # a tokenizer.json can ask for it: a silent cut
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
