"""Files that may be damaged, planted or made up by somebody else.

    read_json, open_regular              a clear message instead of a traceback or an endless wait
    is_inside                            whether a path, links resolved, stays in a folder
    create_anew, never_through_links     openers for `open` that do not write through planted links
    write_durably, sync_folder           files that survive a power cut
    printable                            text of unknown origin, fit for a terminal

Imports no torch.
"""

import json
import os
import shutil
import signal
import stat
import unicodedata
from pathlib import Path
from typing import Any, BinaryIO

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


def open_regular(path: str | Path) -> BinaryIO:
    """A file opened for reading.

    Raises:
        OSError: no such file, or a folder, pipe, socket or device, which could block.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is not a regular file")
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # exchanged in between
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


def read_json(
    path: str | Path, required: dict[str, type] = {}, optional: dict[str, type] = {}
) -> dict[str, Any]:
    """The JSON object in a file, where some keys must have a value of the given type; ``optional``
    ones may be missing or null.

    Raises:
        ValueError: names the file and what was expected: unreadable, no JSON object, or a value of
            another type.
    """
    try:
        with open_regular(path) as file:
            found = json.loads(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object, but {found!r:.80}")
    for key, kind in (optional | required).items():
        value = found.get(key)
        if value is None and key not in required:
            continue
        if not isinstance(value, kind):
            raise ValueError(f"{path}: {key} must be of type {kind.__name__}, not {value!r:.80}")
    return found


def is_inside(folder: str | Path, path: str | Path) -> bool:
    """Whether a path lies in a folder, after resolving the links of both."""
    root = os.path.realpath(folder)
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def create_anew(path: str, flags: int) -> int:
    """Opener for `open`: makes a new file and first removes what has its name, instead of writing
    through a link."""
    Path(path).unlink(missing_ok=True)
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def never_through_links(path: str, flags: int) -> int:
    """Opener for `open`: opens or makes a file; a link in its place is removed."""
    if os.path.islink(path):
        os.unlink(path)
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def remove_tree(path: Path) -> None:
    """Delete a folder with all that is in it, but of a link only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


# -------------------------------------------------------------------------------------------------
# Files that survive a power cut
# -------------------------------------------------------------------------------------------------


def write_durably(path: Path, text: str) -> None:
    """Write a text file whose content is on the disk when this returns."""
    with open(path, "w", opener=create_anew) as file:
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
