"""Flags: a field of a frozen dataclass is a flag, a dataclass is a group in --help. A script's Args
inherits from its groups, so all of its values are attributes of one object.

flag           declares a flag: its default, its help and what values it may have
parse          command line, --config and defaults -> a script's Args
Refusals       collects what is wrong with the values
as_json        the values by flag, for args.json
"""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from common.files import parse_json, read_json
from common.process import Exit, UserError
from common.toy import toy_file, write_toy

Args = TypeVar("Args")  # a script's
NUMBER = r"-?\d*\.?\d+(e-?\d+)?"
LARGEST = 1e300  # of a flag's values: no infinity
# seconds, 115 days: more does not fit into the timers of sockets and process groups
LONGEST_WAIT = 1e7
# The flags that identify a run of either script.
IDENTITY = ("model", "lora_rank", "lora_alpha", "train_vision", "data", "template_options")

# -------------------------------------------------------------------------------------------------
# Declaring flags
# -------------------------------------------------------------------------------------------------


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple = (),
    low: float = 0,
    high: float = LARGEST,
    off: float | None = None,
) -> Any:
    """A field of an argument class.

    Args:
        help: what it does, with the unit.
        low, high: bounds of a number; one that may be negative says so.
        off: the one value outside of these bounds that is allowed.
    """
    rules = {"help": help, "choices": choices, "low": low, "high": high, "off": off}
    return dataclasses.field(default=default, metadata=rules)


def groups_of(args_class: type) -> list[type]:
    """The groups of flags that a script's Args inherits from, in order."""
    return [base for base in args_class.__bases__ if dataclasses.is_dataclass(base)]


def as_json(args: Any) -> dict:
    """The values of a script's Args by flag: what --config reads back."""
    return vars(args) | {"out": str(args.out)}


# -------------------------------------------------------------------------------------------------
# Command line and --config
# -------------------------------------------------------------------------------------------------


def parse(
    args_class: type[Args], doc: str | None, argv: list[str] | None, toy: tuple[str, str]
) -> Args:
    """An ``args_class`` with the values of flags. The command line overrides --config, which overrides
    the defaults.

    Without --config, --model and --data, a file of the embedded toy is read: ``toy`` is its task and its
    name.

    Raises:
        UserError: an unknown flag or a value of another type.
    """
    parser = build_parser(args_class, doc)
    typed = vars(parser.parse_args(argv))
    config = typed.pop("config", None)
    if config is None and not typed.keys() & {"model", "data", "eval_data"}:
        config = toy_file(*toy)
        if not config.exists() and not write_toy(config, toy[0]):
            raise UserError("no --model given, and launch/toy.py did not write the embedded toy")
    values = read_config(config, parser) if config else {}
    return args_class(**values | typed)


def build_parser(args_class: type, description: str | None) -> "Parser":
    """One section per group; flags that were not given stay absent, so that a value of --config can
    stand."""
    parser = Parser(
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="JSON file of flags (such as <out>/args.json); the command line overrides it",
    )
    fields = {field.name: field for field in dataclasses.fields(args_class)}
    for group in groups_of(args_class):
        section = parser.add_argument_group(group.__doc__)
        for name in group.__annotations__:
            add_flag(section, fields[name])
    return parser


def add_flag(section: Any, field: dataclasses.Field) -> None:
    text = f"{field.metadata['help']} (default: {field.default!s:.60})".replace("%", "%%")
    choices: Any = field.metadata["choices"]
    options: dict = {"type": field.type}
    if field.type is bool:
        options = {"action": argparse.BooleanOptionalAction}
    elif choices:
        options["choices"] = choices
        if "on" in choices:  # the bare flag switches it on
            options |= {"nargs": "?", "const": "on"}
    section.add_argument(f"--{field.name}", help=text, **options)


class Parser(argparse.ArgumentParser):
    """Raises UserError for a mistake, and suggests the flag that may be meant."""

    def error(self, message: str):
        raise UserError(message)

    def exit(self, status: int = 0, message: str | None = None):
        """Called by argparse for --help: another SystemExit would be taken for a user's program's."""
        raise Exit(status)

    def parse_args(self, argv: list[str] | None = None) -> argparse.Namespace:
        values, rest = self.parse_known_args(argv)
        unknown = [word.partition("=")[0] for word in rest if word.startswith("--")]
        known = list(self._option_string_actions)
        for word in unknown:
            if near := get_close_matches(word, known, 1, cutoff=0.7):
                self.error(f"unrecognized arguments: {word}; did you mean {near[0]}?")
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return values


def read_config(path: str | Path, parser: "Parser") -> dict:
    """Flags from a JSON file, read as if they stood on the command line.

    Raises:
        UserError: not a JSON object, an unknown flag, or a value of another type.
    """
    words = []
    try:
        for name, value in read_json(path).items():
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
        return vars(parser.parse_args(words))
    except ValueError as error:
        raise UserError(f"--config {path}: {error}") from error


# -------------------------------------------------------------------------------------------------
# Refusals
# -------------------------------------------------------------------------------------------------


class Refusals:
    """All that is wrong with a script's Args, reported together: numbers out of bounds come first; a
    script adds combinations that cannot work, by ``refuse(condition, message)``."""

    def __init__(self, args: Any):
        self.problems: list[str] = []
        for field in dataclasses.fields(args):
            value, rules = getattr(args, field.name), field.metadata
            if isinstance(value, int | float) and value != rules["off"]:
                bounds = f"from {rules['low']:.7g} to {rules['high']:.10g}"
                inside = rules["low"] <= value <= rules["high"]  # NaN is not
                self(not inside, f"--{field.name} {value} must be {bounds}")
        self(
            not (args.model and (args.data or args.eval_only)),
            "--model and --data are needed together; without both, the built-in toy is trained on "
            "its own rows",
        )
        self(args.eval_only and not args.eval_data, "--eval_only needs --eval_data")
        self(args.train_vision and args.lora_rank, "--train_vision excludes --lora_rank")
        self(
            args.max_prompt_tokens > args.max_tokens_per_pack,
            f"--max_prompt_tokens {args.max_prompt_tokens} exceeds --max_tokens_per_pack "
            f"{args.max_tokens_per_pack}",
        )
        self.check("eval_data", check_eval_data, args.eval_data)
        self.check("data", parse_datasets, args.data)
        self.check("image_root", check_folder, args.image_root)
        self.check("template_options", parse_template_options, args.template_options)

    def __call__(self, condition: object, message: str) -> None:
        """Refuse with ``message`` if the condition holds."""
        if condition:
            self.problems.append(message)

    def check(self, name: str, function: Callable, value: str) -> None:
        """Refuse a value for which the function raises a ValueError."""
        try:
            function(value)
        except ValueError as error:
            self(True, f"--{name} {error}")

    def raise_any(self) -> None:
        """Raises UserError if anything was refused."""
        if self.problems:
            raise UserError("\n".join(self.problems))


def check_folder(path: str) -> None:
    """Raises ValueError: the folder does not exist."""
    if path and not os.path.isdir(path):
        raise ValueError(f"{path}: no such folder")


def parse_datasets(spec: str) -> list[tuple[str, float | None]]:
    """a.jsonl:0.7,b.jsonl:0.3 -> [("a.jsonl", 0.7), ("b.jsonl", 0.3)]; without weights: None.

    Raises:
        ValueError: no file, a weight that is not above 0, or weights for some of the files only.
    """
    sets = []
    for part in filter(None, map(str.strip, spec.split(","))):
        path, _, weight = part.rpartition(":")
        # another colon belongs to the name of a file or folder
        is_weight = re.fullmatch(NUMBER, weight)
        sets.append((path, float(weight)) if path and is_weight else (part, None))
    weights = [weight for _, weight in sets if weight is not None]
    mixed = len(weights) not in (0, len(sets)) or not all(weight > 0 for weight in weights)
    if mixed or spec and not sets:
        raise ValueError(
            f"{spec}: expected files separated by commas, all of them or none with a weight above "
            "0, as in a.jsonl:0.7,b.jsonl:0.3"
        )
    return sets


def check_eval_data(spec: str) -> None:
    """Raises ValueError: see `parse_datasets`; every row is evaluated once."""
    if any(weight is not None for _, weight in parse_datasets(spec)):
        raise ValueError(f"{spec}: every row is evaluated once, so its files have no weights")


def parse_template_options(text: str) -> dict:
    """The variables of --template_options. Raises ValueError: it is no JSON object, or has "false" as a
    text, which templates take for true."""
    options = parse_json(text or "{}", text)
    if not isinstance(options, dict):
        raise ValueError(f"{text}: expected an object of JSON, such as {{}}")
    for name, value in options.items():
        if value in ("true", "false", "True", "False"):
            raise ValueError(f"{text}: {name} is a text; true and false have no quotation marks")
    return options


def parse_stop_strings(text: str) -> list[str]:
    """The strings of --stop_strings. Raises ValueError: it is no JSON list of non-empty strings."""
    strings = parse_json(text or "[]", text)
    if not isinstance(strings, list) or not all(part and isinstance(part, str) for part in strings):
        raise ValueError(f"{text} is not a JSON list of non-empty strings")
    return strings


@dataclass(frozen=True)
class ModelArgs:
    """model"""

    model: str = flag("", "checkpoint to train: folder in Hugging Face format, or hub name")
    dtype: str = flag(
        "auto",
        "compute type; weights and optimizer stay float32. auto: bfloat16 on GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    attention: str = flag(
        "auto",
        "attention back-end. auto: flash_attn if installed, else torch's varlen; sdpa on CPU",
        choices=("auto", "flash_attn", "varlen", "sdpa"),
    )
    gradient_checkpointing: str = flag(
        "auto",
        "recompute layers in the backward pass: less memory, about 30 % more time. auto: on a GPU, "
        "never on a CPU (launch/plan.py says what is fastest)",
        choices=("auto", "on", "off"),
    )
    train_vision: bool = flag(
        False,
        "train the vision tower and its projector too; every model then has one of its "
        "own and computes image features in every forward pass",
    )
    lora_rank: int = flag(
        0,
        "rank of LoRA adapters on attention and MLP, but not on a mixture's experts: only they (and a "
        "value head) are trained, the other weights are kept in the compute type; 0: off, all weights "
        "are trained",
    )
    lora_alpha: int = flag(16, "adapters are scaled by this / --lora_rank", low=1)
    max_tokens_per_pack: int = flag(
        16384,
        "tokens per pack and per prefill; determines the memory of an update",
        low=1,
    )
    rollout_shards: int = flag(
        1,
        "neighbouring ranks that decode the same samples, each with its part of every layer (tensor "
        "parallelism), for models that one GPU cannot hold; the smallest number that fits is the fastest",
        low=1,
    )


@dataclass(frozen=True)
class DataArgs:
    """data"""

    data: str = flag(
        "",
        "training rows: JSONL files, as a.jsonl,b.jsonl or with probabilities: "
        "a.jsonl:0.7,b.jsonl:0.3",
    )
    eval_data: str = flag(
        "",
        "held-out rows: JSONL files; empty: no evaluation",
    )
    prompts_per_step: int = flag(32, "prompts per step, over all ranks", low=1)
    max_prompt_tokens: int = flag(
        4096,
        "longest prompt (of the reward model: with its target), tokens with image tokens; longer "
        "ones are bad rows",
        low=1,
    )
    min_pixels: int = flag(0, "smallest image after resizing, pixels; 0: the checkpoint's own")
    max_pixels: int = flag(
        0, "largest image or video frame after resizing, pixels; 0: the checkpoint's own"
    )
    video_frames: int = flag(16, "largest number of frames per video, evenly spaced", low=2)
    video_fps: float = flag(
        2.0, "frames per second of videos that do not state it: lists of images", low=1e-3
    )
    coordinates: str = flag(
        "auto",
        "in which the model answers with boxes and points: pixels of the file, or of the image as seen; "
        "0 to a number; 0 to 1 of the image in a square; auto: as the family's makers say",
        choices=("auto", "file", "seen", "1000", "100", "1", "square"),
    )
    image_root: str = flag(
        "",
        "folder of images and videos: paths are relative to the rows' file, or to this folder; what "
        "lies outside of it, links resolved, is refused; empty: any file",
    )
    template_options: str = flag(
        "",
        'variables of the chat template, as a JSON object: {"enable_thinking": false}; empty: those of '
        "judge.json, if any",
    )
    on_bad_row: str = flag(
        "error",
        "what a bad row does: error stops the run, skip counts and reports it",
        choices=("error", "skip"),
    )


@dataclass(frozen=True)
class OptimArgs:
    """optimizer"""

    steps: int = flag(100, "steps of the run", low=1)
    lr_schedule: str = flag(
        "constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_steps: int = flag(0, "steps of linear warm-up")
    min_lr_ratio: float = flag(
        0.1,
        "learning rate of the last step of linear and cosine, as a fraction; 0 comes one step later",
        high=1,
    )
    weight_decay: float = flag(0.0, "decoupled weight decay; never on biases and norms")
    adam_beta2: float = flag(0.95, "beta 2 of AdamW; beta 1 is 0.9", high=1)
    max_grad_norm: float = flag(1.0, "bound on each model's global gradient norm; 0: off")


@dataclass(frozen=True)
class CheckpointArgs:
    """checkpoints"""

    save_every: int = flag(
        50,
        "steps between checkpoints, and after the last step; -1: only after the last step, 0: "
        "never",
        low=-1,
    )
    keep_last: int = flag(2, "complete checkpoints kept", low=1)
    keep_gb: float = flag(
        0.0,
        "disk space of complete checkpoints, 10^9 bytes: beyond it the oldest are deleted, never "
        "the newest; 0: no limit",
    )
    save_blocking: bool = flag(
        False, "wait for each checkpoint instead of writing it in the background"
    )
    export_every: int = flag(
        -1,
        "steps between exports of the weights; -1: only the last step, 0: never",
        low=-1,
    )
    resume: str = flag(
        "auto",
        "auto: resume if --out has a checkpoint, but not one of another model, data, reward or "
        "algorithm; never: fail if it has one; PATH: start --out, unless it has its own, from that "
        "checkpoint, with other flags if need be",
    )


@dataclass(frozen=True)
class RunArgs:
    """run"""

    out: Path = flag(
        Path("runs/latest"),
        "output folder",
    )
    seed: int = flag(0, "seed of sampling and data order", high=2**32 - 1)
    eval_every: int = flag(
        -1,
        "steps between evaluations, besides start and end; -1: once per pass over the data, 0: "
        "never",
        low=-1,
    )
    eval_only: bool = flag(False, "evaluate the model and stop")
    log_samples: int = flag(
        4,
        "samples shown as pictures and text, with every evaluation and some steps; 0: none",
    )
    timeout: float = flag(
        1800.0,
        "longest wait of a rank for the others, seconds",
        low=1e-6,
        high=LONGEST_WAIT,
    )
    hsdp: int = flag(
        0,
        "ranks that share one copy of weights and optimizer, such as the GPUs of a node; only "
        "gradients travel between the copies (HSDP). 0: all ranks share one",
    )
