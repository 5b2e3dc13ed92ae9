"""Flags: a field of a frozen dataclass is a flag, a dataclass is a group in --help.

flag           declares a flag: its default, its help and its rules
parse          command line, --config and defaults -> a script's Args, a dataclass of groups
Rules          what a flag may be, beside which others
Refusals       collects what is wrong with the values
as_flags       the values by flag, for args.json
"""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from common.files import follow_pointer, parse_json, read_json
from common.process import Exit, UserError
from common.toy import toy_file, write_toy

Groups = TypeVar("Groups")  # a script's Args: groups of flags
NUMBER = r"-?\d*\.?\d+(e-?\d+)?"
LARGEST = 1e300  # of a flag's values: no infinity
# seconds, 115 days: more does not fit into the timers of sockets and process groups
LONGEST_WAIT = 1e7
# The flags that identify a model, and a run of either script. A file or folder that they name counts
# by its content, and "data (rows)" by the number of rows, too.
MODEL_IDENTITY = ("model", "lora_rank", "lora_alpha", "train_vision")
IDENTITY = (*MODEL_IDENTITY, "data", "data (rows)", "template_options")
# flags of other systems, and those that earlier versions of this one had, with their defaults
FOREIGN = Path(__file__).with_name("foreign_flags.json")
# that most runs touch: --help alone shows these
OFTEN = """
model train_vision lora_rank gradient_checkpointing max_tokens_per_pack
data eval_data prompts_per_step max_prompt_tokens max_pixels columns
samples_per_prompt max_new_tokens temperature eval_samples env reward advantage kl_coef
epochs minibatches actor_lr critic_lr lr steps max_epochs warmup_steps
save_every resume out seed eval_every eval_only
""".split()

# -------------------------------------------------------------------------------------------------
# Declaring flags
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What a flag may be, alone and beside others.

    ``needs`` and ``excludes`` name other flags that are not at their defaults, or have a value, as in
    row_kind=prompts. ``idles`` name flags without effect: --config may hold them, the command line may
    not. Names are separated by spaces; ": " and a reason may follow. Each of the three is for all values
    but the default or, as a dictionary, for single values.
    """

    help: str  # with the unit
    choices: tuple = ()
    low: float = 0  # a flag that may be negative says so
    high: float = LARGEST
    off: float | None = None  # the one value outside of these bounds that is allowed
    check: Callable | None = None  # of the value; raises ValueError
    paths: bool = False  # paths in the value become absolute
    needs: str | dict[str, str] = ""
    excludes: str | dict[str, str] = ""
    idles: str | dict[str, str] = ""
    must_divide: str = ""  # the value of another flag
    must_not_exceed: str = ""  # the value of another flag, unless that is 0: off


def flag(default: Any, help: str, **rules: Any) -> Any:
    """A field of an argument class: its default, its help, and its `Rules`."""
    return dataclasses.field(default=default, metadata=vars(Rules(help, **rules)))


def fields_of(kind: type) -> list[Any]:
    """The fields of an argument class or group, whose types are classes, and not the names of classes."""
    return list(dataclasses.fields(kind))


def list_fields(args_class: type) -> dict[str, dataclasses.Field]:
    """The flags of a script's Args by name, group after group."""
    groups = [group.type for group in fields_of(args_class)]
    return {field.name: field for group in groups for field in fields_of(group)}


def as_flags(groups: object) -> dict:
    """The values of a script's Args by flag, JSON-ready: what --config reads back."""
    values = {}
    for group in vars(groups).values():
        values |= vars(group)
    return values | {"out": str(values["out"])}


def absolute_paths(text: str) -> str:
    """A flag's value with the paths in it absolute, so that args.json can be read from any folder:
    one path, or several: see `map_parts`. What does not exist (a hub name, a rule) stays."""
    # a word may be a rule's name, even where a file has it
    is_path = "/" in text or "." in text or os.path.isfile(f"{text}/config.json")
    if is_path and os.path.exists(text):
        return str(follow_pointer(text).resolve())
    return map_parts(text, absolute_paths)


def map_parts(text: str, change: Callable[[str], str]) -> str:
    """A flag's value with each of its parts changed, as in a.jsonl:0.7,b.jsonl:0.3 or
    grm:FOLDER,file.py:function, or in the JSON of a recipe."""
    for mark in '",:':
        if mark in text and (mark != ":" or "://" not in text):
            return mark.join(map(change, text.split(mark)))
    return text


# -------------------------------------------------------------------------------------------------
# Command line and --config
# -------------------------------------------------------------------------------------------------


def parse(
    args_class: type[Groups],
    doc: str | None,
    argv: list[str] | None,
    toy: tuple[str, str],
    check: Callable | None = None,
) -> tuple[Groups, set[str], set[str]]:
    """An ``args_class`` with the values of flags, the names of the flags on the command line, and
    those on the command line or in --config.

    The command line overrides --config, which overrides the defaults. Without --config,
    --export_only reads the run's own args.json, and without --model a file of the embedded toy is
    read: ``toy`` is its task and its name. Before the toy is written, ``check`` sees the flags of the
    command line.

    Raises:
        UserError: an unknown flag or a value of another type.
    """
    parser = build_parser(args_class, doc)
    typed = vars(parser.parse_args(argv))
    if "help" in typed:
        build_parser(args_class, doc, listed=typed["help"]).print_help()
        raise Exit(0)
    config = typed.pop("config", None)
    if config is None and "model" not in typed:
        if typed.get("export_only"):
            # it may have been moved since
            out = typed.setdefault("out", follow_pointer(RunArgs.out))
            config = out / "args.json"
        elif not typed.keys() & {"data", "eval_data"}:
            config = toy_file(*toy)
            if not config.exists():
                early = from_flags(args_class, typed)  # a mistake in them does not wait for the toy
                Refusals(early, typed, with_others=False).raise_any()
                if check:
                    check(early)
                if not write_toy(config, toy[0]):
                    raise UserError(
                        "no --model given, and launch/toy.py did not write the embedded toy, for the "
                        "reason above"
                    )
    values = read_config(config, parser) if config else {}
    if typed.get("export_only"):
        values["resume"] = "auto"  # whatever the interrupted run began with
    values |= typed
    return from_flags(args_class, values), set(typed), set(values)


def from_flags(args_class: type[Groups], values: dict) -> Groups:
    """An ``args_class`` with the values of some flags and the defaults of the others."""
    groups = {}
    for group in fields_of(args_class):
        names = {field.name for field in fields_of(group.type)}
        groups[group.name] = group.type(
            **{name: value for name, value in values.items() if name in names}
        )
    return args_class(**groups)


def build_parser(args_class: type, description: str | None, listed: str = "all") -> "Parser":
    """One section per group; flags that were not given stay absent, so that a value of --config can
    stand. Its help has the flags that are ``listed``: those most touched, all, or those of a stage."""
    stages = [stage.name for stage in fields_of(args_class)]
    parser = Parser(
        description=description,
        epilog=f"--help all: every flag; --help STAGE: those of a stage: {', '.join(stages)}",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="JSON file of flags (such as <out>/args.json); the command line overrides it",
    )
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="most",
        choices=("most", "all", *stages),
        metavar="STAGE",
        help="the flags that most runs touch; more of them: see the last line",
    )
    for stage in fields_of(args_class):
        section = parser.add_argument_group(stage.type.__doc__)
        for field in fields_of(stage.type):
            text = f"{field.metadata['help']} (default: {field.default!s:.60})".replace("%", "%%")
            if listed not in ("all", stage.name, "most" if field.name in OFTEN else ""):
                text = argparse.SUPPRESS
            choices = field.metadata["choices"]
            options: dict = {"type": field.type}
            if field.metadata["paths"]:
                options["type"] = absolute_paths
            if field.type is bool:
                options = {"action": argparse.BooleanOptionalAction}
            elif choices:
                options["choices"] = choices
                if "on" in choices:  # the bare flag switches it on
                    options |= {"nargs": "?", "const": "on"}
            else:
                options["metavar"] = field.type.__name__.upper()
            section.add_argument(f"--{field.name}", help=text, **options)
    return parser


class Parser(argparse.ArgumentParser):
    """Raises UserError for a mistake, and suggests the flag that may be meant."""

    def error(self, message: str):
        raise UserError(message)

    def exit(self, status: int = 0, message: str | None = None):
        """Called by argparse for --help: another SystemExit would be taken for a user's program's."""
        raise Exit(status)

    def parse_args(self, argv: list[str] | None = None) -> argparse.Namespace:
        values, rest = self.parse_known_args(argv)
        if not rest:
            return values
        words = [word for word in rest if word.startswith("--") or "=" in word]
        known = [option.removeprefix("--") for option in self._option_string_actions]
        hints = {word: suggest(word.removeprefix("--").partition("=")[0], known) for word in words}
        message = f"unrecognized arguments: {' '.join(rest)}"
        for word, hint in hints.items():
            if hint:
                message += f"; {hint}" if len(hints) == 1 else f"\n{word}: {hint}"
        raise UserError(message)


def read_config(path: str | Path, parser: "Parser") -> dict:
    """Flags from a JSON file, read as if they stood on the command line.

    Raises:
        UserError: not a JSON object, an unknown flag, or a value of another type.
    """
    try:
        config = read_json(path)
    except ValueError as error:
        raise UserError(f"--config {error}") from error
    left = read_json(FOREIGN)["left"]
    try:
        if config.keys() & {"config", "help"}:
            raise ValueError("expected a JSON object of flags, --config and --help not among them")
        words = []
        for name, value in config.items():
            if name in left and value == left[name]:
                continue  # of a run of an earlier version, which did not use it
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
        return vars(parser.parse_args(words))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


# -------------------------------------------------------------------------------------------------
# Names of other systems
# -------------------------------------------------------------------------------------------------


def suggest(unknown: str, known: list[str]) -> str:
    """What to write instead of an unknown flag: one of another system, the beginning of a ``known`` one,
    or a misspelling. "" if nothing is like it."""
    foreign = read_json(FOREIGN)
    name = unknown.lower().replace("-", "_")
    ours = [name] if name in known else []  # it was written --actor-lr
    for word in (name, name.rpartition(".")[2]):  # verl's are paths: actor_rollout_ref.rollout.n
        if word in foreign["without"]:
            return foreign["without"][word]
        ours = ours or [
            flag
            for flag, others in foreign["ours"].items()
            if flag in known and word in others.split()
        ]
    longer = [other for other in known if other.startswith(name)]
    ours = ours or longer[:1] or get_close_matches(name, known, 1, cutoff=0.7)
    return f"did you mean {', '.join(f'--{flag}' for flag in sorted(ours))}?" if ours else ""


# -------------------------------------------------------------------------------------------------
# Refusals
# -------------------------------------------------------------------------------------------------


class Refusals:
    """All that is wrong with a script's Args, reported together. The `Rules` of each flag come first; a
    script adds what they cannot express, by ``refuse(condition, message)``. ``typed``: the flags on the
    command line; ``with_others``: also check each flag against the others."""

    def __init__(self, groups: object, typed: Collection[str], with_others: bool = True):
        self.problems: list[str] = []
        self.values = SimpleNamespace(**as_flags(groups))
        self.fields = list_fields(type(groups))
        for name, field in self.fields.items():
            rules, value = Rules(**field.metadata), getattr(self.values, name)
            self.check_alone(name, value, rules)
            if with_others:
                self.check_relations(name, value, rules, typed)
        values = self.values
        self(
            with_others and not (values.model and (values.data or values.eval_only)),
            "--model and --data are needed together; without both, the built-in toy is trained on "
            "its own rows",
        )

    def __call__(self, condition: object, message: str) -> None:
        """Refuse with ``message`` if the condition holds."""
        if condition:
            self.problems.append(message)

    def raise_any(self) -> None:
        """Raises UserError if anything was refused."""
        if self.problems:
            raise UserError("\n".join(self.problems))

    def check_alone(self, name: str, value: Any, rules: Rules) -> None:
        if isinstance(value, int | float) and value != rules.off:
            low, high = rules.low, rules.high
            off = "" if rules.off is None else f", or {rules.off:g}"
            # NaN is not
            self(not low <= value, f"--{name} {value} must be at least {low:.7g}{off}")
            self(value > high, f"--{name} {value} must be at most {high:.10g}{off}")
        if rules.check:
            try:
                rules.check(value)
            except ValueError as error:
                self(True, f"--{name} {error}")

    def check_relations(self, name: str, value: Any, rules: Rules, typed: Collection[str]) -> None:
        this = f"--{name} {value!s:.60}".removesuffix(" True")
        for verb, texts, holds, wanted in (
            ("needs", rules.needs, self.holds, True),
            ("excludes", rules.excludes, self.holds, False),
            ("has no use for", rules.idles, typed.__contains__, False),
        ):
            if isinstance(texts, str):
                texts = {value: texts} if self.holds(name) else {}
            others, mark, reason = texts.get(value, "").partition(": ")
            for other in others.split():
                message = f"{this} {verb} --{other.replace('=', ' ')}{mark}{reason}"
                self(holds(other) != wanted, message)
        if other := rules.must_divide:
            total = getattr(self.values, other)
            self(total % max(1, value), f"{this} must divide --{other} {total}")
        if other := rules.must_not_exceed:
            limit = getattr(self.values, other)
            self(0 < limit < value, f"{this} exceeds --{other} {limit}")

    def holds(self, condition: str) -> bool:
        name, _, wanted = condition.partition("=")
        value = getattr(self.values, name)
        return value == wanted if wanted else value != self.fields[name].default


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

    model: str = flag(
        "", "checkpoint to train: folder in Hugging Face format, or hub name", paths=True
    )
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
        excludes="lora_rank",
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
        paths=True,
        check=parse_datasets,
    )
    eval_data: str = flag(
        "", "held-out rows: JSONL files; empty: no evaluation", paths=True, check=check_eval_data
    )
    prompts_per_step: int = flag(32, "prompts per step, over all ranks", low=1)
    max_prompt_tokens: int = flag(
        4096,
        "longest prompt (of the reward model: with its target), tokens with image tokens; longer "
        "ones are bad rows",
        low=1,
        must_not_exceed="max_tokens_per_pack",
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
        paths=True,
        check=check_folder,
    )
    template_options: str = flag(
        "",
        'variables of the chat template, as a JSON object: {"enable_thinking": false}; empty: those of '
        "judge.json, if any",
        check=parse_template_options,
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
    save_strategy: str = flag(
        "unrestricted",
        "who writes at the same time: all ranks, those of one node, or one rank",
        choices=("unrestricted", "single_node", "single_process", "single_thread"),
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
        "algorithm; must: fail if it has none; never: fail if it has one; PATH: start a new --out from "
        "that checkpoint (or its latest); with --export_only, a step of --out as well",
    )


@dataclass(frozen=True)
class RunArgs:
    """run"""

    out: Path = flag(
        Path("runs/latest"),
        "output folder; without it a new one, or that of the same run if it is unfinished, which "
        "runs/latest then names",
    )
    seed: int = flag(0, "seed of sampling and data order", high=2**32 - 1)
    eval_every: int = flag(
        -1,
        "steps between evaluations, besides start and end; -1: once per pass over the data, 0: "
        "never",
        low=-1,
    )
    eval_only: bool = flag(False, "evaluate the model and stop", needs="eval_data")
    export_only: bool = flag(
        False,
        "export the weights of the run in --out, from its newest checkpoint or --resume PATH, and "
        "stop; the other flags are those of the run",
        excludes="eval_only",
    )
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
