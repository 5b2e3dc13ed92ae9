"""A user's files, above all JSON: what cannot be read, or does not hold what it must, is one message.

    UserError                what a user can mend
    open_file                a file as bytes, if Git LFS has fetched it
    read_bytes, read_text    all of a file
    sha256                   of a file
    parse_json, read_json    every failure is a UserError that says where it is
    plain_json               JSON as it is always written alike, to be compared
    check_form               what a value of JSON must be
    number_as_text           a number of JSON as the text that rows hold of it
    read_records             the JSON objects that a run has written, line by line
    follow_pointer           the folder that <out>/export/latest names
    write_durably, replace_durably, write_link, sync_folder
                             what survives a power cut
    show_anything            a terminal gets escapes of what it cannot show; its end is no error
    say                      print what may quote files and programs
    as_message, printable    a text of files and programs, fit for a terminal

A form is one of these:

    str, int | float, list, dict       a value of this type
    range(1, 9), ("a", "b")            an integer, or another value, that is in it
    [form]                             a list of such values
    {str: form}                        an object of such values, under any names
    {"name": form, "other?": form}     an object with such entries and any others; one that is marked by ?
                                       may be missing or null

launch/data/convert.py reads this file without the rest of common/, which needs torch.
"""

import errno
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO

LARGEST_WHOLE = 2**53  # above it, floats skip integers
LFS = b"version https://git-lfs."  # how a pointer begins


class UserError(ValueError):
    """What a user can mend, in a file, a flag or on a machine: one message without a traceback, and
    exit code 2. Every other exception is a bug, and keeps its traceback: see `process.run_main`."""


def open_file(path: str | Path) -> BufferedReader:
    """Open a file for reading. Raises OSError: it cannot be opened; UserError: it only names what Git LFS
    has."""
    file = open(path, "rb")
    if file.peek().startswith(LFS):
        file.close()
        raise UserError(f"{path} is a pointer of git-lfs; `git lfs pull` fetches the file itself")
    return file


def read_bytes(path: str | Path) -> bytes:
    """All of a file. Raises UserError, with the file's name: it cannot be read."""
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def read_text(path: str | Path) -> str:
    """A file of UTF-8. Raises UserError, with the file's name: it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error


def sha256(path: str | Path) -> str:
    """The digest of a file's content. Raises OSError, UserError: see `open_file`."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(
    text: str | bytes, where: str | Path, numbers: Callable[[str], float | None] = float
) -> Any:
    """The value that ``text`` holds as JSON; ``numbers`` reads those that are no integers. Raises
    UserError, which begins with ``where``: it is no JSON."""
    try:
        return json.loads(text, parse_float=numbers, parse_constant=numbers)
    except json.JSONDecodeError as error:
        # the only line of a text, such as a row, is not the first of its file
        line = f"line {error.lineno}, " if "\n" in error.doc.strip() else ""
        raise UserError(f"{where}: not JSON: {error.msg} at {line}column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from error


def plain_json(content: bytes) -> bytes:
    """JSON without what does not matter: spaces and the order of names. What is no JSON stays."""
    try:
        return json.dumps(json.loads(content), sort_keys=True).encode()
    except (ValueError, RecursionError):
        return content


def read_json(path: str | Path, form: Any = dict) -> Any:
    """The JSON in a file. Raises UserError, with the file's name: it cannot be read, or has another
    form."""
    content = parse_json(read_bytes(path), path)
    check_form(content, form, f"{path}")
    return content


def read_records(
    path: Path,
    form: Any = dict,
    problems: list[str] | None = None,
    numbers: Callable[[str], float | None] = float,
) -> list[dict]:
    """The objects of a JSONL file that a run has written, without what a kill or a power cut leaves
    at its end: half a line, or NUL bytes where a block was never written.

    Args:
        problems: if given, gets a message about each line that is left out, as it cannot be read or
            has another form. Otherwise the first is raised as a UserError, with file and line.
        numbers: what reads numbers that are no integers.
    """
    records = []
    # no JSON text has a NUL byte; a string may hold U+2028
    written, _, _ = read_bytes(path).partition(b"\0")
    for number, line in enumerate(written.split(b"\n")[:-1], 1):
        where = f"{path}:{number}"
        try:
            record = parse_json(line, where, numbers)
            check_form(record, form, where)
        except UserError as error:
            if problems is None:
                raise
            problems.append(str(error))
        else:
            records.append(record)
    return records


def check_form(value: Any, form: Any, name: str) -> None:
    """Raises UserError, which begins with ``name``: the value has another form."""
    kind = type(form) if isinstance(form, dict | list) else form
    wanted = getattr(kind, "__name__", kind)
    if isinstance(form, range):
        wanted = f"an integer from {form[0]} to {form[-1]}"
        # anything else would be sought in it, one by one
        fits = type(value) in (int, bool) and value in form
    elif isinstance(form, tuple):
        fits = value in form
    else:
        fits = isinstance(value, kind)
    if not fits:
        raise UserError(f"{name} must be {wanted}, not {value!r:.80}")
    if isinstance(form, list):
        each = f"{name.removesuffix(': each')}: each"  # also of lists in a list
        for item in value:
            check_form(item, form[0], each)
    elif isinstance(form, dict):
        parts = dict.fromkeys(value, form[str]) if str in form else form
        for key, part in parts.items():
            entry = value.get(key.removesuffix("?"))
            if entry is not None or not key.endswith("?"):
                check_form(entry, part, f"{name}: {key.removesuffix('?')}")


def number_as_text(value: Any) -> Any:
    """An integer or finite float as its text, 3.0 as "3" (tables write a column of integers so, if one is
    missing); anything else unchanged. True and false are left alone: whether a model should say
    "true", "yes" or "1" is for the data to say."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < math.inf:
        return value
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_WHOLE
    return str(int(value) if is_whole else value)


def printable(text: str, keep: str = "") -> str:
    """The text with every invisible character written as an escape, except those in ``keep``."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def as_message(text: str) -> str:
    """A text as it may be printed. Invisible characters could recolour the terminal or overwrite
    lines; lines after the first are indented: what a file or a server says must not pass for a
    message of its own."""
    return re.sub("\n(?!  )", "\n  ", printable(text, keep="\n\t"))


class Output:
    """A stream whose reader may go, as `| head` and a closed terminal do, or `| tee log` of the Ctrl-C that
    a run survives: what can no longer be written is dropped."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)

    def flush(self) -> None:
        """Nothing is left to be flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def show_anything() -> None:
    """From now on, characters that the terminal has no encoding of are written as escapes, and what nobody
    reads is dropped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # it was closed, as by >&-
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")
        if not isinstance(stream, Output):
            setattr(sys, name, Output(stream))


def say(text: str, file: TextIO | None = None) -> None:
    """Print a text, by default on stdout: see `as_message`."""
    print(as_message(text), file=file, flush=True)


def follow_pointer(name: str | Path) -> Path:
    """The folder that a `latest` or `best` of a run names now; any other path as it is."""
    path = Path(name)
    if path.name not in ("latest", "best"):
        return path
    if path.is_symlink():
        return path.parent / path.readlink()
    if path.is_file():  # where links cannot be made
        return path.parent / read_text(path).strip()
    return path


# -------------------------------------------------------------------------------------------------
# Files that survive a power cut
# -------------------------------------------------------------------------------------------------


def write_durably(path: Path, text: str) -> None:
    """Write a text file, with its folder, whose content is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate, legal as an escape in a data row, has no encoding: backslashreplace writes
    # the escape again.
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make what is in a file, or new names and renames in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def replace_durably(path: Path, text: str) -> None:
    """Replace a text file: readers see the old content or the new one."""
    aside = path.with_name(f".{path.name}.tmp")
    write_durably(aside, text)
    os.replace(aside, path)


def write_link(link: Path, name: str) -> None:
    """Replace a relative link to its newest neighbour, or a file with the name where links cannot be
    made: see `follow_pointer`."""
    aside = link.with_name(f".{link.name}.link")
    if link.is_dir() and not link.is_symlink():  # a run was copied, and each link became a folder
        link.rename(link.with_name(f"{link.name}-{time.time_ns()}"))
    aside.unlink(missing_ok=True)
    try:
        aside.symlink_to(name)
    except OSError:
        write_durably(aside, f"{name}\n")
    os.replace(aside, link)
    sync_folder(link.parent)
