"""Flags: a field of a frozen dataclass is a flag, a dataclass is a group in --help. A script's Args
inherits from its groups: the flags are its attributes.

flag           declares a flag: its default, its help and what values it may have
parse          command line, --config and defaults -> a script's Args
override       an Args with other values of some flags
Refusals       collects flags that cannot be used, or not together
as_json        the values by flag
as_typed       the values as they were chosen, for args.json
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from common import ROOT
from common.ground.files import UserError, follow_pointer, parse_json, read_json
from common.ground.process import Exit
from common.ground.toy import TOY_FOLDERS, toy_flags

SomeArgs = TypeVar("SomeArgs", bound="RunArgs")  # a script's
FLOAT_TEXT = r"-?\d*\.?\d+(e-?\d+)?"
LARGEST = 1e300  # of a flag's values, so that infinity is none
# seconds, 115 days: more does not fit into the timers of sockets and process groups
LONGEST_WAIT = 1e7
# The flags that identify a model, and a run of either script.
MODEL_IDENTITY = ("model", "lora_rank", "lora_alpha", "train_vision")
SHARED_IDENTITY = (*MODEL_IDENTITY, "data", "template_options", "seed")
FOREIGN_FLAGS = ROOT / "common" / "ground" / "foreign_flags.json"  # flags of other systems
# the flags that most runs touch, which --help alone shows
OFTEN = """
model train_vision lora_rank gradient_checkpointing max_tokens_per_pack
data eval_data prompts_per_step max_prompt_tokens max_pixels columns
samples_per_prompt max_new_tokens temperature eval_samples env reward advantage kl_coef
epochs minibatches actor_lr critic_lr lr steps max_epochs warmup_steps
save_every resume out seed eval_every eval_only
""".split()
# Flags that replace each other: one on the command line overrides all of its set in --config.
ALTERNATIVES = ({"reward", "reward_recipe"}, {"steps", "max_epochs"})
# The flags that tell a run's args.json from a --config that somebody has written, who leaves these out.
RECORDED = {"out", "seed", "eval_every", "eval_only", "log_samples", "timeout"}

# -------------------------------------------------------------------------------------------------
# Declaring flags
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What a flag does, and which values it may have."""

    help: str  # with the unit
    choices: tuple = ()
    check: Callable | None = None  # raises UserError for a bad value
    paths: bool = False  # paths in the value become absolute
    several: bool = False  # there may be several in the value, with commas between them
    # the bounds of a number, which by default is not negative
    low: float = 0
    high: float = LARGEST
    off: float | None = None  # the one value outside of these bounds that is allowed


def flag(default: Any, help: str, **rules: Any) -> Any:
    """A field of an argument class: see `Rules`."""
    return dataclasses.field(default=default, metadata=vars(Rules(help, **rules)))


def groups_of(args_class: type) -> dict[str, type]:
    """The groups that a script's Args inherits from, by their names in --help STAGE: the first word of
    their docstring."""
    groups = [base for base in args_class.__bases__ if dataclasses.is_dataclass(base)]
    return {str(group.__doc__).split()[0].strip(",:"): group for group in groups}


@functools.cache
def fields_of(args_class: type) -> Mapping[str, Any]:
    """The fields of an argument class that are flags, by name. Their types are classes, not the names of
    classes."""
    return {field.name: field for field in dataclasses.fields(args_class) if field.metadata}


def as_json(args: Any) -> dict:
    """The values of a script's Args by flag."""
    values = {name: getattr(args, name) for name in fields_of(type(args))}
    return values | {"out": str(args.out)}


def as_typed(args: Any) -> dict:
    """The same as they were chosen: what --config reads back, and derives again from other flags."""
    return as_json(args) | {name: getattr(type(args), name) for name in args.derived}


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
    args_class: type[SomeArgs],
    doc: str | None,
    argv: list[str] | None,
    toy: tuple[str, str],
) -> SomeArgs:
    """An ``args_class`` with the values of flags. The command line overrides --config, which overrides
    the defaults.

    Without --config, --model and --data, the flags of the embedded toy are read: ``toy`` is its task and
    the name of their file. The toy itself may not have been written yet.

    Raises:
        UserError: an unknown flag, or a bad value.
    """
    parser = build_parser(args_class, doc)
    typed = parser.read_flags(argv)
    if "help" in typed:
        build_parser(args_class, doc, listed=typed["help"]).print_help()
        raise Exit(0)
    config = typed.pop("config", None)
    args = args_class()
    if config is None and not typed.keys() & {"model", "data", "eval_data"}:
        flags = toy_flags(ROOT / TOY_FOLDERS[toy[0]], *toy)
        args = args_class(**parser.read_flags(as_words(flags)))
    elif config:
        recorded = read_config(config, parser)
        args = args_class(**recorded)
        if RECORDED <= recorded.keys():
            args = read_record(args, recorded, Path(config), typed)
    args = override(args, typed)
    return dataclasses.replace(args, out=args.out.absolute())


def read_record(args: SomeArgs, recorded: dict, path: Path, typed: dict) -> SomeArgs:
    """The flags of an args.json that a run has written."""
    changes: dict[str, Any] = {}
    if "keep_best" not in recorded:
        # A version before this flag recorded what `auto`, -1 and 0 stood for. What equals that was
        # probably not chosen.
        for name, value in args.automatic().items():
            if value == recorded.get(name):
                changes[name] = getattr(type(args), name)
    out = run_of(path) if path.name == "args.json" else args.out
    if typed.get("eval_only") and not args.eval_only:
        changes["resume"] = CheckpointArgs.resume  # what the run began from is not what it is now
    was_trained = not args.eval_only or (out / "metrics.jsonl").exists()
    if was_trained and "model" not in typed:
        changes["recorded_run"] = out
    return dataclasses.replace(args, **changes, out=out)


def run_of(record: Path) -> Path:
    """The run that has written this args.json, with whose folder it may have been moved."""
    folder = record.absolute().parent
    is_evaluation = re.match(r"evaluation-step-\d", folder.name)
    return folder.parent if is_evaluation else folder


def override(args: SomeArgs, values: dict) -> SomeArgs:
    """The flags with other ``values`` of some. What follows from other flags (`RunArgs.automatic`) is
    derived again; what was chosen stays, except alternatives to the new values."""
    unchosen = set(args.derived)
    for names in ALTERNATIVES:
        if names & values.keys():
            unchosen |= names
    back = {name: getattr(type(args), name) for name in unchosen & fields_of(type(args)).keys()}
    args = dataclasses.replace(args, **back | values)
    follows = {}
    for name, value in args.automatic().items():
        if getattr(args, name) == getattr(type(args), name):  # its default
            follows[name] = value
    return dataclasses.replace(args, **follows, derived=tuple(follows))


def build_parser(args_class: type, description: str | None, listed: str = "all") -> "Parser":
    """One section per group; flags that were not given stay absent, so that --config can set them.
    Its help has the flags that are ``listed``: those most touched, all, or those of a stage."""
    groups = groups_of(args_class)
    parser = Parser(
        description=description,
        epilog=f"--help all: every flag; --help STAGE: those of a stage: {', '.join(groups)}",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        action=Several,
        help="JSON file of flags (such as <out>/args.json); the command line overrides it",
    )
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="most",
        choices=("most", "all", *groups),
        metavar="STAGE",
        help="show the flags that most runs touch; the last line says how to see others",
    )
    parser.fields = fields_of(args_class)
    for stage, group in groups.items():
        section = parser.add_argument_group(group.__doc__)
        for name in fields_of(group):
            is_listed = listed in ("all", stage) or (listed == "most" and name in OFTEN)
            add_flag(section, parser.fields[name], is_listed)
    return parser


def add_flag(section: Any, field: Any, is_listed: bool) -> None:
    """Add a flag to a parser's section, whose help lists it or not."""
    text = f"{field.metadata['help']} (default: {field.default!s:.60})".replace("%", "%%")
    choices: Any = field.metadata["choices"]
    options: dict = {"type": absolute_paths if field.metadata["paths"] else field.type}
    if field.metadata["several"]:
        options["action"] = Several
    if field.type is Path:
        options["type"] = lambda text: Path(text).expanduser()  # "~" in quotes
    if field.type is bool:
        options = {"action": argparse.BooleanOptionalAction}
    elif choices:
        options["choices"] = choices
        if "on" in choices:  # the bare flag switches it on
            options |= {"nargs": "?", "const": "on"}
    else:
        options["metavar"] = field.type.__name__.upper()
    section.add_argument(
        f"--{field.name}", help=text if is_listed else argparse.SUPPRESS, **options
    )


class Several(argparse.Action):
    """A flag that takes all at once: given twice, it would take the last alone."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        before = getattr(namespace, self.dest, None)
        if before is not None:
            problem = f"{option_string} is given twice"
            if self.dest != "config":  # of which there is one
                problem += f"; commas separate several: {option_string} {before},{values}"
            raise UserError(problem)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError for a mistake, and suggests a flag."""

    fields: Mapping[str, Any]  # by flag, for `read_flags`

    def error(self, message: str):
        raise UserError(f"{message}\nusage: {self.usage}" if self.usage else message)

    def exit(self, status: int = 0, message: str | None = None):
        """Called by argparse for --help of a tool. A plain SystemExit would be taken for one of a user's
        program."""
        raise Exit(status)

    def parse_args(self, argv: list[str] | None = None) -> argparse.Namespace:
        values, rest = self.parse_known_args(argv)
        if not rest:
            return values
        words = [word for word in rest if word.startswith("--") or "=" in word]
        known = [option.removeprefix("--") for option in self._option_string_actions]
        hints = {word: suggest(word.removeprefix("--").partition("=")[0], known) for word in words}
        for option, word in pairwise(sys.argv[1:] if argv is None else argv):
            action = self._option_string_actions.get(option)
            if action and action.nargs == 0 and word in rest and not word.startswith("-"):
                hints[word] = f"{option} takes no value"
        message = f"unrecognized arguments: {' '.join(rest)}"
        for word, hint in hints.items():
            if hint:
                message += f"; {hint}" if len(hints) == 1 else f"\n{word}: {hint}"
        self.error(message)

    def read_flags(self, argv: list[str] | None) -> dict:
        """The flags that were given, with their values checked. Those behind a `--`, where recipes pass on
        what is typed, override those before it. Raises UserError."""
        layers: list[list[str]] = [[]]
        for word in sys.argv[1:] if argv is None else argv:
            if word == "--":
                layers.append([])
            else:
                layers[-1].append(word)
        values = {}
        for layer in layers:
            typed = vars(self.parse_args(layer))
            for names in ALTERNATIVES:
                if names & typed.keys():
                    values = {name: value for name, value in values.items() if name not in names}
            values |= typed
        refuse = Refusals()
        for name, field in self.fields.items():
            if name in values:
                check_value(refuse, name, values[name], field.metadata)
        refuse.raise_any()
        return values


def read_config(path: str | Path, parser: Parser) -> dict:
    """Flags from a JSON file, read as if they stood on the command line.

    Raises:
        UserError: not a JSON object, an unknown flag, or a bad value.
    """
    try:
        config = read_json(path)
    except UserError as error:
        raise UserError(f"--config {error}") from error
    unknown = [f"--{name}" for name in config if name not in parser.fields]
    if unknown and RECORDED <= config.keys():
        raise UserError(
            f"{path} is of another script or version: {len(unknown)} of its flags are unknown here, such as "
            f"{unknown[0]}; start that script, or remove them from a copy"
        )
    try:
        flags = parser.read_flags(as_words(config))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    for name in flags.keys() - parser.fields:
        raise UserError(f"{path}: --{name} belongs on the command line")
    return flags


def as_words(values: dict) -> list[str]:
    """Flags as they would stand on the command line."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    return words


# -------------------------------------------------------------------------------------------------
# Names of other systems
# -------------------------------------------------------------------------------------------------


def suggest(unknown: str, known: list[str]) -> str:
    """What to write instead of an unknown flag: one of another system, the beginning of a ``known`` one,
    or a misspelling. "" if nothing is like it."""
    foreign = read_json(FOREIGN_FLAGS)
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
    """What is wrong with flags, reported together."""

    def __init__(self):
        self.problems: list[str] = []

    def __call__(self, condition: object, message: str) -> None:
        """Refuse with ``message`` if the condition holds."""
        if condition:
            self.problems.append(message)

    def raise_any(self) -> None:
        """Raises UserError if anything was refused."""
        if self.problems:
            raise UserError("\n".join(self.problems))


def check_value(refuse: Refusals, name: str, value: Any, rules: Mapping) -> None:
    """Refuse a value that a flag with these rules cannot have: see `flag`."""
    low, high, off = rules["low"], rules["high"], rules["off"]
    if isinstance(value, int | float) and value != off:
        or_off = "" if off is None else f", or {off:g}"
        # NaN is not
        refuse(not low <= value, f"--{name} {value} must be at least {low:.7g}{or_off}")
        refuse(value > high, f"--{name} {value} must be at most {high:.10g}{or_off}")
    # what Python's locale could not decode
    refuse(
        re.search("[\ud800-\udfff]", str(value)),
        f"--{name} {value} is not UTF-8, or was read by a locale without these letters: set PYTHONUTF8=1",
    )
    if rules["check"]:
        try:
            rules["check"](value)
        except UserError as error:
            refuse(True, f"--{name} {error}")


def check_shared(refuse: Refusals, args: Any) -> None:
    """Refuse flags of both scripts that cannot be used together."""
    refuse(
        not (args.model and (args.data or args.eval_only)),
        "--model and --data are needed together; without both, the built-in toy is trained on "
        "its own rows",
    )
    refuse(args.eval_only and not args.eval_data, "--eval_only needs --eval_data")
    refuse(
        args.keep_best and not (args.eval_data and args.eval_every),
        f"--keep_best {args.keep_best} needs evaluations: --eval_data, and an --eval_every other than 0",
    )
    refuse(
        args.train_vision and args.lora_rank,
        f"--train_vision excludes --lora_rank {args.lora_rank}: only the language model has adapters",
    )
    refuse(
        args.max_prompt_tokens > args.max_tokens_per_pack,
        f"--max_prompt_tokens {args.max_prompt_tokens} exceeds --max_tokens_per_pack "
        f"{args.max_tokens_per_pack}",
    )


def steps_between(text: str) -> tuple[int, int] | None:
    """The first and the last step of "A-B"; None for "". Raises UserError: it is something else."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"{text!r} must be the first and the last step, such as 5-6")
    return int(match[1]), int(match[2])


def check_folder(path: str) -> None:
    """Raises UserError: the folder does not exist."""
    if path and not os.path.isdir(path):
        raise UserError(f"{path}: no such folder")


def parse_datasets(spec: str) -> list[tuple[str, float | None]]:
    """a.jsonl:0.7,b.jsonl:0.3 -> [("a.jsonl", 0.7), ("b.jsonl", 0.3)]; without weights: None.

    Raises:
        UserError: no file, a path with a comma, a weight that is not above 0, or weights for some of
            the files only.
    """
    if "," in spec and os.path.exists(spec):
        raise UserError(f"{spec}: this path contains a comma, which separates files; rename it")
    sets = []
    for part in filter(None, map(str.strip, spec.split(","))):
        path, _, weight = part.rpartition(":")
        # another colon belongs to the name of a file or folder
        is_weight = re.fullmatch(FLOAT_TEXT, weight)
        sets.append((path, float(weight)) if path and is_weight else (part, None))
    weights = [weight for _, weight in sets if weight is not None]
    mixed = len(weights) not in (0, len(sets)) or not all(weight > 0 for weight in weights)
    if mixed or spec and not sets:
        raise UserError(
            f"{spec}: expected files separated by commas, all of them or none with a weight above "
            "0, as in a.jsonl:0.7,b.jsonl:0.3"
        )
    return sets


def check_eval_data(spec: str) -> None:
    """Raises UserError: see `parse_datasets`; every row is evaluated once."""
    if any(weight is not None for _, weight in parse_datasets(spec)):
        raise UserError(f"{spec}: evaluation files take no weights, as every row is evaluated once")


def parse_template_options(text: str) -> dict:
    """The variables of --template_options. Raises UserError: it is no JSON object, or has "false" as a
    text, which templates take for true."""
    options = parse_json(text or "{}", text)
    if not isinstance(options, dict):
        raise UserError(f"{text}: expected an object of JSON, such as {{}}")
    for name, value in options.items():
        if value in ("true", "false", "True", "False"):
            raise UserError(f"{text}: {name} is a text; true and false have no quotation marks")
    return options


def parse_stop_strings(text: str) -> list[str]:
    """The strings of --stop_strings. Raises UserError: it is no JSON list of non-empty strings."""
    form = f'{text}: expected a JSON list of non-empty strings, such as ["</answer>"]'
    try:
        strings = parse_json(text or "[]", text)
    except UserError as error:
        raise UserError(form) from error
    if not isinstance(strings, list) or not all(part and isinstance(part, str) for part in strings):
        raise UserError(form)
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
        "attention back-end. auto: flash_attn if installed, else torch's varlen; sdpa on CPU. fa4 and fa3: "
        "varlen with kernels of FlashAttention 4 or 3, except in rollouts (Hopper; fa4 also Blackwell)",
        choices=("auto", "flash_attn", "varlen", "fa4", "fa3", "sdpa"),
    )
    gradient_checkpointing: str = flag(
        "auto",
        "recompute layers in the backward pass: less memory, about 30 % more time. auto: on a GPU, as "
        "few layers as memory allows, perhaps with smaller packs (launch/plan.py prints the choice); "
        "none on a CPU",
        choices=("auto", "on", "off"),
    )
    train_vision: bool = flag(
        False,
        "train the vision tower and its projector too; every model then has a tower of "
        "its own and computes image features in every forward pass",
    )
    lora_rank: int = flag(
        0,
        "rank of LoRA adapters on attention and MLP, but not on a mixture's experts: only adapters "
        "(and a value head) are trained, the other weights are kept in the compute type; 0: off, all "
        "weights are trained",
    )
    lora_alpha: int = flag(16, "adapters are scaled by this / --lora_rank", low=1)
    max_tokens_per_pack: int = flag(
        16384,
        "most tokens of a pack or a prefill; determines the memory of an update",
        low=1,
    )
    rollout_shards: int = flag(
        1,
        "neighbouring ranks that decode the same samples, each with its part of every layer (tensor "
        "parallelism), for models that one GPU cannot hold; the smallest number that fits is the fastest",
        low=1,
    )
    slots: int = flag(
        0,
        "sequences decoded together per rank, or per team of --rollout_shards; 0: as many as fit into "
        "memory, at most 256, in a team 512",
    )
    cuda_graphs: str = flag(
        "auto",
        "decode with CUDA graphs (one launch per token), captured again in every rollout. auto: "
        "on a GPU, after the first tokens at the same batch size",
        choices=("auto", "on", "off"),
    )


@dataclass(frozen=True)
class DataArgs:
    """data"""

    data: str = flag(
        "",
        "training rows: JSONL files, as a.jsonl,b.jsonl or with probabilities: "
        "a.jsonl:0.7,b.jsonl:0.3",
        paths=True,
        several=True,
        check=parse_datasets,
    )
    eval_data: str = flag(
        "",
        "held-out rows: JSONL files; empty: no evaluation",
        paths=True,
        several=True,
        check=check_eval_data,
    )
    prompts_per_step: int = flag(32, "prompts per step, over all ranks", low=1)
    max_prompt_tokens: int = flag(
        4096,
        "longest prompt (in train_grm_vl.py with its target), in tokens, image tokens included; longer "
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
        "coordinates of boxes and points in the model's answers. file, seen: pixels of the file, or of the "
        "image as the model sees it; 1000, 1: from 0 to this number on both axes; auto: the "
        "coordinates of the family",
        choices=("auto", "file", "seen", "1000", "1"),
    )
    image_root: str = flag(
        "",
        "folder of images and videos: paths are relative to the rows' file, or to this folder; files "
        "outside of this folder (with links resolved) are refused; empty: any file",
        paths=True,
        check=check_folder,
    )
    template_options: str = flag(
        "",
        'variables of the chat template, as a JSON object: {"enable_thinking": false}; empty: the '
        "variables in judge.json, if any",
        check=parse_template_options,
    )
    on_bad_row: str = flag(
        "error",
        "what a bad row does: error ends the run, skip leaves the row out, counts and reports it",
        choices=("error", "skip"),
    )

    # No flag itself: the name of the flag that bounds a row's tokens, for messages.
    limit_flag: str = "--max_prompt_tokens"


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
        "learning rate of the last step of linear and cosine, as a fraction; with 0, the rate reaches 0 "
        "one step later",
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
        "largest disk space of complete checkpoints, 10^9 bytes: the oldest are deleted, but never "
        "the newest; 0: no limit",
    )
    keep_best: str = flag(
        "",
        "metric of evaluations, such as eval/accuracy_reward_mean, or min:eval/loss if less is better: "
        "export/best and a checkpoint besides those of --keep_last have the weights of the best "
        "evaluation so far; empty: none",
    )
    save_strategy: str = flag(
        "unrestricted",
        "who writes at the same time: all ranks, the ranks of one node, or one rank",
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
        "auto: resume if --out has a checkpoint, but refuse one of another model, data, reward, algorithm "
        "or seed; never: fail if --out has a checkpoint; PATH of a run or a checkpoint: "
        "start --out from there, even with other flags, unless --out has a checkpoint of its own",
    )


@dataclass(frozen=True)
class RunArgs:
    """run"""

    out: Path = flag(
        Path("runs/<time>"),
        "output folder; by default a new one, to which runs/latest links",
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
        "prompts whose samples are recorded as pictures, in evaluations and some steps (in steps also with "
        "the numbers of every token); 0: no samples of steps are written",
    )
    timeout: float = flag(
        1800.0,
        "longest wait of a rank for the others, seconds",
        low=1e-6,
        high=LONGEST_WAIT,
    )
    profile_steps: str = flag(
        "",
        "A-B: torch.profiler records steps A to B on rank 0, with their memory, into the run's tensorboard/",
        check=steps_between,
    )
    hsdp: int = flag(
        0,
        "ranks that share one copy of weights and optimizer, such as the GPUs of a node; only "
        "gradients travel between the copies (HSDP). 0: all ranks share one",
    )

    # Not flags: those that were not chosen and follow from others, and the run that began with --model,
    # if that is known from its args.json alone.
    derived: tuple[str, ...] = ()
    recorded_run: Path | None = dataclasses.field(default=None, compare=False)

    def automatic(self) -> dict[str, Any]:
        """What flags stand for at their defaults (auto, -1, 0), where that depends on other flags."""
        return {}
