"""The small files of a checkpoint folder, read with care: they may be damaged, or made up by
somebody else.

    config.json          read_model_config: sizes that can be true
    the tokenizer's      read_tokenizer; characters_per_token: how long its tokens can be
    SETTINGS_FILES       read_settings
    the chat template    TEMPLATE_LIMIT: it is a program, and may not end
"""

import ctypes
import threading
import time
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from common.files import read_json

# -------------------------------------------------------------------------------------------------
# config.json and the settings
# -------------------------------------------------------------------------------------------------

# The small files besides config.json and the tokenizer's, and the types of what is read from them.
SETTINGS_FILES = {
    "chat_template": {"chat_template": str},
    "generation_config": {},
    "judge": {"kinds": dict, "system_instruction": str, "which_answer": str},
    "processor_config": {"image_processor": dict, "video_processor": dict},
    "preprocessor_config": {"image_processor_type": str, "feature_extractor_type": str},
    "video_preprocessor_config": {},
}

# Sizes in config.json and the largest that is believed. A model that had more would be built layer
# by layer before anything could notice that the weights do not fit.
COUNTS = (
    "num_hidden_layers depth num_attention_heads num_key_value_heads num_heads num_experts "
    "num_experts_per_tok spatial_merge_size temporal_patch_size mm_tokens_per_image "
    "linear_conv_kernel_dim linear_num_key_heads linear_num_value_heads"
)
WIDTHS = (
    "hidden_size intermediate_size moe_intermediate_size head_dim embed_dim out_hidden_size "
    "patch_size image_size shared_expert_intermediate_size linear_key_head_dim "
    "linear_value_head_dim"
)
LARGEST_SIZES = dict.fromkeys(COUNTS.split(), 4096) | dict.fromkeys(WIDTHS.split(), 2**20)
LARGEST_SIZES |= {"vocab_size": 2**24, "max_position_embeddings": 2**31}


def read_model_config(folder: str | Path):
    """The config of a checkpoint's model. Raises ValueError: no config.json, or impossible
    values."""
    path = Path(folder, "config.json")
    settings = read_json(path, required={"model_type": str})
    try:
        check_sizes(settings)  # first: transformers lists the layers, however many there may be
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Each class of transformers has its own checks, which raise many types.
    except Exception as error:
        raise ValueError(f"{path}: {error}") from error
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise ValueError(
            f"{path}: quantization_config {quantization!s:.80}: quantized checkpoints are not "
            "supported; if the weights are floats, remove the entry"
        )
    for part in (config.get_text_config(), getattr(config, "vision_config", None)):
        if part is not None:
            check_heads(path, part)
    return config


def check_sizes(settings: dict, place: str = "") -> None:
    """Raises ValueError: a size in config.json, or in a part of it, is not a number in its
    range."""
    for key, value in settings.items():
        if isinstance(value, dict):
            check_sizes(value, f"{place}{key}.")
        most = LARGEST_SIZES.get(key)
        if most is None:
            continue
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if number is not None and not (type(number) is int and 0 < number <= most):
                raise ValueError(
                    f"{place}{key} is {value!r:.80}; it must be a whole number from 1 to {most}"
                )


def check_heads(path: Path, config) -> None:
    """Raises ValueError: the heads of a model's part do not divide its width, or those of keys not
    those of queries."""
    size, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None)
    if size and heads and size % heads and not getattr(config, "head_dim", None):
        raise ValueError(f"{path}: num_attention_heads {heads} does not divide hidden_size {size}")
    if heads and keys and heads % keys:
        raise ValueError(
            f"{path}: num_key_value_heads {keys} does not divide num_attention_heads {heads}"
        )


def read_settings(folder: str | Path) -> dict[str, dict]:
    """The objects in SETTINGS_FILES, by name; empty where there is no file. Raises ValueError: they
    are damaged."""
    files = {}
    for name, types in SETTINGS_FILES.items():
        path = Path(folder, f"{name}.json")
        files[name] = read_json(path, optional=types) if path.exists() else {}
    return files


# -------------------------------------------------------------------------------------------------
# Tokenizer
# -------------------------------------------------------------------------------------------------

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)


def read_tokenizer(folder: str | Path):
    """The tokenizer of a checkpoint. Raises ValueError: its files are missing or damaged."""
    for name in TOKENIZER_FILES:
        path = Path(folder, name)
        if path.exists():
            read_json(path, required={"model": dict} if name == "tokenizer.json" else {})
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library behind it raises bare exceptions
        names = ", ".join(TOKENIZER_FILES)
        raise ValueError(f"the tokenizer's files, {names}, cannot be used: {error}") from error
    # Without files transformers makes one without words.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise ValueError(
            "no vocabulary: tokenizer.json, or the files in its place, are missing; take the base "
            "checkpoint's"
        )
    tokenizer.backend_tokenizer.no_truncation()  # a tokenizer.json can ask for it: a silent cut
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def characters_per_token(tokenizer) -> int:
    """A bound of the characters that one token stands for, by which a giant text is refused before
    it is tokenized: the longest token, four times, because normal forms make one character of up to
    four (Unicode Annex 15, table 4)."""
    return 4 * max(map(len, tokenizer.get_vocab()))


# -------------------------------------------------------------------------------------------------
# Time: a chat template is a program that came with the checkpoint, and may not end
# -------------------------------------------------------------------------------------------------


class TimeLimit:
    """`with limit:` raises TimeoutError in a thread that stays inside for longer than ``seconds``.

    Signals reach the main thread only, and rows are read in others. A watching thread raises the
    error in the one that is late, which ends every loop in Python. It counts its own looks instead
    of reading a clock: a process that was stopped for an hour is not late.
    """

    looks = 20

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.inside: dict[int, int] = {}  # thread -> looks since it entered
        self.lock = threading.Lock()
        self.watcher: threading.Thread | None = None

    def __enter__(self) -> None:
        with self.lock:
            self.inside[threading.get_ident()] = 0
            if self.watcher is None or not self.watcher.is_alive():
                self.watcher = threading.Thread(target=self._watch, name="time limit", daemon=True)
                self.watcher.start()

    def __exit__(self, *_) -> None:
        thread = threading.get_ident()
        try:
            with self.lock:
                late = self.inside.pop(thread) > self.looks
        except TimeoutError:  # it came at this very moment
            with self.lock:
                self.inside.pop(thread, None)
            raise
        if late:
            _raise_in(thread, None)  # it may still be on its way
            raise TimeoutError

    def _watch(self) -> None:
        while True:
            time.sleep(self.seconds / self.looks)
            with self.lock:
                if not self.inside:
                    self.watcher = None
                    return
                for thread in self.inside:
                    self.inside[thread] += 1
                    if self.inside[thread] > self.looks:
                        # Again at every look: what the block calls may catch it.
                        _raise_in(thread, TimeoutError)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in another thread before its next step; None takes back one that has not been
    raised yet."""
    argument = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)


TEMPLATE_LIMIT = TimeLimit(10.0)
