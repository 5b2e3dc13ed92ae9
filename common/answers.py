"""What a program of the user returns, on its way to the trainer: as JSON, so that it brings no code.

    encode    in the program's process
    decode    in the trainer

Beside the values of JSON travel bytes, arrays and tensors of numbers as their bytes, Pillow images as PNG,
and pathlib.Paths. Tuples become lists. Of any other object only type and text arrive, for a message.
"""

import base64
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.ground.files import UserError

KIND = "\0"  # the key of a dict that stands for what JSON has no value for
MOST_BYTES = 512 * 2**20  # bytes of an answer
# which PNG keeps as they are
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


class Other:
    """Something that cannot travel. Its class has the name that it had there."""

    text: str

    def __repr__(self) -> str:
        return self.text


def encode(value: Any) -> bytes:
    """Raises UserError: no plain data, or too much of it."""
    try:
        content = json.dumps(value, default=describe).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"it returned something that is not plain data: {error}") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"it returned {len(content):,} bytes, more than {MOST_BYTES:,}")
    return content


def describe(value: Any) -> Any:
    """JSON of what is none."""
    pictures = sys.modules.get("PIL.Image")
    if pictures and isinstance(value, pictures.Image):
        return {KIND: "image", "png": in_text(png_of(value))}
    if isinstance(value, bytes | bytearray):
        return {KIND: "bytes", "content": in_text(value)}
    if isinstance(value, Path):
        return {KIND: "path", "path": str(value)}
    array = numbers_of(value)
    is_tensor = hasattr(value, "detach")
    if array is not None and array.shape == () and not is_tensor:
        return array.item()
    if array is not None:
        known = {"type": array.dtype.str, "shape": array.shape, "tensor": is_tensor}
        return {KIND: "array", "numbers": in_text(array.tobytes())} | known
    if isinstance(value, Sequence):
        return list(value)
    return {KIND: "other", "type": type(value).__name__, "text": f"{value!r:.200}"}


def png_of(image: Any) -> bytes:
    """A Pillow image as a PNG file. Raises UserError: grey values of unknown range."""
    exif, mode = image.getexif(), image.mode
    if mode in ("I", "F"):
        low, high = image.getextrema()
        if mode == "F" or low < 0 or high > 65535:
            raise UserError(f"mode {mode}, values {low} to {high}: not 16-bit grey")
        image = image.convert("I;16")
    elif mode not in PNG_MODES:
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1, exif=exif)
    return file.getvalue()


def numbers_of(value: Any) -> Any:
    """The array of numbers that a value is, of numpy, torch or a relative of theirs; None: it is none."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value  # numpy has no bfloat16
    if not hasattr(value, "__array__"):
        return None
    import numpy

    array = numpy.asarray(value)
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "biuf":
        return None
    # torch knows no other order of bytes, and nothing wider
    return array.astype(f"{kind}{min(size, 8)}", copy=False)


def in_text(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode()


def decode(content: bytes) -> Any:
    """What `encode` was given. Raises UserError: a picture of far too many pixels."""
    return json.loads(content, object_hook=restore)


def restore(entry: dict) -> Any:
    """What `describe` has described."""
    kind = entry.get(KIND)
    if kind == "image":
        from PIL import Image

        try:
            image = Image.open(io.BytesIO(base64.b64decode(entry["png"])), formats=["PNG"])
        except Image.DecompressionBombError as error:
            raise UserError(f"it returned a picture that is too large: {error}") from error
        image.load()
        return image
    if kind == "bytes":
        return base64.b64decode(entry["content"])
    if kind == "path":
        return Path(entry["path"])
    if kind == "array":
        import numpy

        array = numpy.frombuffer(base64.b64decode(entry["numbers"]), entry["type"])
        array = array.reshape(entry["shape"]).copy()
        return sys.modules["torch"].from_numpy(array) if entry["tensor"] else array
    if kind == "other":
        other = type(entry["type"], (Other,), {"text": entry["text"]})
        return other()
    return entry
