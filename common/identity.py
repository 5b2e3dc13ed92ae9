"""What makes a run the same run: its flags, and what they name.

fingerprint_of         flags and what they name, the same on all ranks; a resume compares it
fingerprint_by_bytes   what versions before 0.2.0 compared
compare_rows           rows that were read, and sizes of their images, the same on all ranks
"""

import ast
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from common import ROOT
from common.data.rows import Prompt
from common.distributed import gather_objects, raise_on_all_ranks, say_once
from common.flags import as_json, fields_of, map_parts, parse_datasets
from common.ground.files import UserError, open_file, plain_json, read_text, sha256
from common.logging import script_of
from common.model import weights
from common.user_code import files_of

# What stands beside the flags, and is a warning if it has changed: versions, the script that runs, and
# files that programs name.
VERSIONS = ("torch", "transformers", "project", "script", "tables")
ROWS = ("data", "eval_data", "ptx_data")  # flags that name files of rows
ADDRESS = re.compile(r"(https?)://[^/\",\s]+")  # of a server


def fingerprint_of(args: Any) -> dict:
    """The value of every flag, with digests in place of the paths of what it names, which stand under
    "named"; and versions.

    All ranks must call. Raises UserError on every rank: what a flag names cannot be read, or two ranks
    have different flags, or different files behind them.
    """
    values, named = as_json(args), paths_of(args)
    for name, value in named.items():
        with raise_on_all_ranks(f"--{name}: "):
            values[name] = digest_value(name, value, named["image_root"])
    with raise_on_all_ranks():
        sources = named.get("reward", "") + recipe_text(named.get("reward_recipe", ""))
        values |= {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "project": weights.digest_files(project_files()),
            "script": sha256(script_of(args))[:12],
            "tables": digest_tables(named.values()),
            "servers": ", ".join(sorted({match[0] for match in ADDRESS.finditer(sources)})),
        }
    compare_ranks(values)
    return values | {"named": named}


def paths_of(args: Any) -> dict[str, str]:
    """The flags whose values have paths in them."""
    fields = fields_of(type(args)).items()
    return {name: getattr(args, name) for name, field in fields if field.metadata["paths"]}


def project_files() -> list[Path]:
    """Both scripts, and what they import of this project."""
    return [*ROOT.glob("train_*.py"), *ROOT.glob("common/**/*.py")]


def compare_ranks(values: dict) -> None:
    """Raises UserError if a flag, or what it names, differs between two ranks; versions only warn."""
    (host, first), *others = gather_objects((socket.gethostname(), values))
    for rank, (other_host, other) in enumerate(others, start=1):
        for name in first:
            if first[name] == other[name]:
                continue
            difference = f"{name} is {first[name]!r} on rank 0 ({host})"
            difference += f" and {other[name]!r} on rank {rank} ({other_host})"
            if name not in VERSIONS:
                raise UserError(
                    f"--{difference}: all ranks need the same flags, and the same files behind them"
                )
            say_once(f"warning: {difference}")


def compare_rows(rows: Iterable[Prompt]) -> None:
    """Raises UserError if the rows that were read, or the sizes of their images, differ between two ranks,
    as where a node lacks an image, and --on_bad_row skip leaves out its row."""
    read = str([(row.source, len(row.input_ids), row.grids) for row in rows])
    compare_ranks(
        {"data, as rows and sizes of their images,": hashlib.sha256(read.encode()).hexdigest()}
    )


def digest_value(flag: str, value: str, image_root: str) -> str:
    """A flag's value with digests in place of paths. Raises UserError: something cannot be read."""
    if flag.endswith("model"):
        return value if value in ("", "self", "ema") else weights.digest_model(value)
    if flag in ROWS:
        return digest_rows(value, image_root)
    return digest_parts(recipe_text(value) if flag == "reward_recipe" else value)


def recipe_text(value: str) -> str:
    """A recipe of rewards, or the file of one, as JSON that is always written alike."""
    text = read_text(value) if os.path.isfile(value) else value
    return plain_json(text.encode()).decode()


def digest_rows(spec: str, image_root: str) -> str:
    """The value of a flag that names files of rows, by what is read of them: the rows as JSON, without empty
    lines, and the sizes of the files that they name. Raises UserError."""
    digests = []
    for path, weight in parse_datasets(spec):
        digest = hashlib.sha256()
        with open_file(path) as file:
            for line in filter(bytes.strip, file):
                digest.update(plain_json(line))
                sizes = listed_sizes(line, os.path.dirname(os.path.abspath(path)), image_root)
                digest.update(str(sizes).encode())
        digests.append(digest.hexdigest()[:12] + ("" if weight is None else f":{weight:g}"))
    return ",".join(digests)


def listed_sizes(line: bytes, folder: str, image_root: str) -> list[int]:
    """The sizes of the files, such as pictures and videos, that a row names."""
    sizes = []
    for name in re.findall(rb'"((?:[^"\\\n]|\\.){1,400}\.\w{2,5})"', line):
        for base in (folder, image_root):
            with suppress(OSError, ValueError):
                path = json.loads(b'"' + name + b'"').removeprefix("file://")
                sizes.append(os.stat(os.path.join(base, path)).st_size)
                break
    return sizes


def digest_parts(text: str) -> str:
    """A text with digests in place of the programs, with what they import from their folders, and judges
    that it names: see `map_parts`. The address of a server is a way to it: its path stays."""
    if "." in text and os.path.isfile(text):  # a word is a rule, even where a file has its name
        digests = sorted(map(sha256, files_of(Path(text).resolve())))
        return hashlib.sha256("".join(digests).encode()).hexdigest()[:12]
    judge = re.fullmatch(r'(grm|rm):([^",]+)', text)
    if judge:
        return f"{judge[1]}:{weights.digest_model(judge[2])}"
    if "://" in text and not re.search('[",]', text):
        return ADDRESS.sub(r"\1:", text)
    return map_parts(text, digest_parts)


def digest_tables(values: Iterable[str]) -> str:
    """The files, such as tables, that programs of these flags name in their texts: their names and
    digests. Raises UserError."""
    programs = {path for value in values for path in re.findall(r'[^",:]+\.py', value)}
    tables = {}
    for program in filter(os.path.isfile, programs):
        for file in files_of(Path(program).resolve()):
            for table in files_named_in(file):
                tables[table.name] = sha256(table)[:12]
    return ", ".join(f"{name} {digest}" for name, digest in sorted(tables.items()))


def files_named_in(program: Path) -> set[Path]:
    """The files that texts of a program name, in its folder, in the folders that it names, and in the
    working folder. Raises UserError: it is no Python."""
    try:
        tree = ast.parse(program.read_bytes() if program.suffix == ".py" else "")
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{program}: {error}") from error
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 400
    }
    texts = {text for text in texts if text.isprintable() and text.strip("./")}
    bases = {program.parent, Path.cwd(), *(program.parent / text for text in texts)}
    files = {base / text for base in bases if base.is_dir() for text in texts if "." in text}
    return {file.resolve() for file in files if file.suffix != ".py" and file.is_file()}


# What versions before "named" compared: all bytes of files. Programs of launch/ that the project has changed
# since, with the digests of what it shipped then: such a change is the project's, as that of common/ is.
SHIPPED_THEN = {
    ROOT / "launch/reward_math.py": "6c5f5bfc1537",
    ROOT / "launch/reward_vision.py": "ea332359be09",
    ROOT / "launch/environments/hidden_picture.py": "074aef0f63fc",
    ROOT / "launch/environments/tools.py": "01f44753e61b",
    ROOT / "launch/environments/zoom.py": "55ff29355b4f",
}


def fingerprint_by_bytes(args: Any) -> dict[str, str]:
    """The flags that name files as in a fingerprint of an earlier version. All ranks must call. Raises
    UserError."""
    values = {}
    with raise_on_all_ranks():
        for name, value in paths_of(args).items():
            if name.endswith("model") and value not in ("", "self", "ema"):
                values[name] = weights.digest_model(value, as_read=False)
            elif not name.endswith("model"):
                is_recipe = name == "reward_recipe" and os.path.isfile(value)
                values[name] = parts_by_bytes(read_text(value) if is_recipe else value)
    return values


def parts_by_bytes(text: str) -> str:
    """As `digest_parts`."""
    if os.path.isfile(text):
        file = Path(text).resolve()
        if file in SHIPPED_THEN:
            return SHIPPED_THEN[file]
        digests = sorted(map(sha256, files_of(file)))
        return hashlib.sha256("".join(digests).encode()).hexdigest()[:12]
    judge = re.fullmatch(r'(grm|rm):([^",]+)', text)
    if judge:
        return f"{judge[1]}:{weights.digest_model(judge[2], as_read=False)}"
    return map_parts(text, parts_by_bytes)
