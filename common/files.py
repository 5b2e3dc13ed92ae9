"""Files and text of unknown origin.

    read_json                            an object, or a message with the file's name
    is_inside                            whether a path, links resolved, stays in a folder
    write_durably, sync_folder           files that survive a power cut
    printable                            text of unknown origin, fit for a terminal
"""

import json
import os
import signal
import unicodedata
from pathlib import Path
from typing import Any

# Unicode categories: control, format, surrogate, line separator, paragraph separator.
INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str, keep: str = "") -> str:
    """The text with every invisible character written as an escape, except those in ``keep``. A
    message could otherwise recolour the terminal, or forge a line of its own."""
    shown = []
    for character in text:
        invisible = character not in keep and unicodedata.category(character) in INVISIBLE
        shown.append(ascii(character)[1:-1] if invisible else character)
    return "".join(shown)


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, with the file's name: it cannot be read."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object, but {content!r:.80}")
    return content


def is_inside(folder: str | Path, path: str | Path) -> bool:
    """Whether a path lies in a folder, after resolving the links of both."""
    root = os.path.realpath(folder)
    return os.path.commonpath([root, os.path.realpath(path)]) == root


# -------------------------------------------------------------------------------------------------
# Files that survive a power cut
# -------------------------------------------------------------------------------------------------


def write_durably(path: Path, text: str) -> None:
    """Write a text file whose content is on the disk when this returns."""
    with open(path, "w") as file:
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


def write_pointer(pointer: Path, name: str) -> None:
    """Replace a file that holds the name of its newest neighbour."""
    replace_durably(pointer, name + "\n")
    sync_folder(pointer.parent)


def kill_point(name: str) -> None:
    """A marked instant of the save protocol. Tests set KILL_AT to die there; otherwise nothing
    happens."""
    own_rank = os.environ.get("RANK", "0") == os.environ.get("KILL_RANK", "0")
    if own_rank and os.environ.get("KILL_AT") == name:
        os.kill(os.getpid(), signal.SIGKILL)
