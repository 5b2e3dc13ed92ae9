"""A user's files: only regular ones are opened, and JSON is read or is one message.

    open_regular             a file as bytes; a FIFO or a device is refused, not waited for
    parse_json, read_json    every failure is a ValueError that says where it is
    number_as_text           a number of JSON as the text that rows hold of it

launch/convert.py reads this file without the rest of common/, which needs torch.
"""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading. Raises OSError: it cannot be opened; ValueError: it is no regular file,
    but a folder, a FIFO or a device, whose reading might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO without a writer blocks otherwise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def parse_json(text: str | bytes, where: str | Path) -> Any:
    """The value that ``text`` holds as JSON. Raises ValueError, which begins with ``where``: it is no
    JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error


def read_json(path: str | Path) -> dict:
    """The JSON object in a file. Raises ValueError, with the file's name: it cannot be read."""
    try:
        with open_regular(path) as file:
            text = file.read()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    content = parse_json(text, path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object, but {content!r:.80}")
    return content


def number_as_text(value: Any) -> Any:
    """An integer or finite float as its text, anything else unchanged. True and false are left
    alone: whether a model should say "true", "yes" or "1" is for the data to say."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number and abs(value) < math.inf else value
