"""Files to RGB frames: images and videos. Sizes are read from headers, pixels only when a step needs
them.

A clip is several images, one after the other, or one file (MP4, GIF, ...), for which a further package
is needed. A user's mistake is a UserError that names the file.
"""

import functools
import io
import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers.video_utils import Path as VideoPath
from transformers.video_utils import load_video

from common.ground.files import UserError, open_file, say

# Pillow would also try formats that start other programs (EPS runs Ghostscript), which a data file must
# not do.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# By package, the name in transformers.
VIDEO_DECODERS = {"torchcodec": "torchcodec", "av": "pyav", "cv2": "opencv"}
EXIF_ORIENTATION = 0x0112
# Seconds between tries of a file that was there when the run began.
PAUSES = (1, 2, 4, 8)


# -------------------------------------------------------------------------------------------------
# Files whose file system may be away
# -------------------------------------------------------------------------------------------------


class Outage:
    """Since a file could not be read, none has been."""

    told = False
    waited = False  # for one of them, in vain: the others fail at once


def read_patiently(path: str, size: int = -1) -> bytes:
    """So many bytes of a file that was there when the run began, or all. While it cannot be read, as its
    file system may be away, it is tried again a few times. Raises OSError, UserError: see `open_file`."""
    for pause in (*PAUSES, None):
        try:
            with open_file(path) as file:
                content = file.read(size)
        except OSError as error:
            if pause is None or Outage.waited:
                Outage.waited = True
                raise
            if not Outage.told:
                Outage.told = True
                say(
                    f"warning: {path}: {error.strerror}; pictures that cannot be read are tried again for "
                    f"{sum(PAUSES)} s, as their file system may be away"
                )
            time.sleep(pause)
        else:
            Outage.told = Outage.waited = False
            return content
    raise AssertionError("the last try returns or raises")


# -------------------------------------------------------------------------------------------------
# Images
# -------------------------------------------------------------------------------------------------


@contextmanager
def _open_image(path: str, patient: bool = False):
    """An image file opened by its header; Pillow refuses one that claims far too many pixels."""
    try:
        opened = io.BytesIO(read_patiently(path)) if patient else open_file(path)
        with opened as file, Image.open(file, formats=IMAGE_FORMATS) as image:
            yield image
    except FileNotFoundError as error:
        raise UserError(f"no such image: {path}") from error
    # Damaged files raise anything (struct.error, zlib.error, SyntaxError, IndexError, ...).
    except Exception as error:
        formats = ", ".join(IMAGE_FORMATS)
        raise UserError(f"{path}: cannot be read as one of {formats}: {error!r}") from error


def image_size(path: str) -> tuple[int, int]:
    """(width, height) in pixels as `read_image` will return it, from the header alone, so EXIF after
    the body of a PNG is missed. Raises UserError: see `read_image`."""
    with _open_image(path) as image:
        if image.format == "TIFF":  # Pillow reports the turned size by itself
            return image.size
        # Not image.getexif(): that of a PNG decodes the body first.
        orientation = Image.Image.getexif(image).get(EXIF_ORIENTATION)
        width, height = image.size
        return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def read_image(path: str, patient: bool = False) -> Image.Image:
    """Decode an image file to RGB: upright by its EXIF, transparency laid on white, first frame of
    an animation.

    16-bit grey is scaled, not clipped. With ``patient``, see `read_patiently`. Raises UserError with path
    and reason: no such file, not an image, too many pixels, truncated or damaged body, grey values of
    unknown range.
    """
    with _open_image(path, patient) as image:
        return upright_rgb(image)


def upright_rgb(image: Image.Image) -> Image.Image:
    """A Pillow image as `read_image` returns it."""
    image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":
        return _scaled_grey(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _scaled_grey(image: Image.Image) -> Image.Image:
    """16-bit grey as RGB. Pillow's own conversion clips everything above 255 to white."""
    values = np.asarray(image)  # (h, w)
    low, high = values.min(), values.max()
    if image.mode == "F" or low < 0 or high > 65535:
        raise UserError(f"mode {image.mode}, values {low} to {high}: not 16-bit grey")
    return Image.fromarray((values / 257).round().astype(np.uint8)).convert("RGB")


# -------------------------------------------------------------------------------------------------
# Clips
# -------------------------------------------------------------------------------------------------


def clip_times(files: Sequence[str], fps: float) -> tuple[tuple[int, int], list[float], float]:
    """(width, height) of a clip's frames, the second at which each is shown, and frames per second:
    those of the video file, or ``fps`` of a list of images.

    Raises UserError: no such file, not a clip, fewer than 2 frames, frames of different size, no
    decoder installed.
    """
    if len(files) > 1:
        sizes = {image_size(file): file for file in files}
        if len(sizes) > 1:
            raise UserError(f"the frames of a clip differ in size: {sizes}")
        size, total = next(iter(sizes)), len(files)
    else:
        frames, header = _read_film(files[0], lambda total: [0])
        size, total, fps = frames[0].size, header.total_num_frames, header.fps
    if total < 2:
        raise UserError(
            f"{files[0]}: a video has at least 2 frames, this has {total} (images are the frames of "
            "a video if they stand in a list of their own)"
        )
    return size, [k / fps for k in range(total)], fps


def sample_frames(total: int, most: int) -> list[int]:
    """Which of a clip's frames are used: all of them, or ``most`` of them, evenly spaced from the first
    to the last."""
    return np.linspace(0, total - 1, min(total, most)).round().astype(int).tolist()


def read_frames(item: str | Sequence[str], most: int) -> list[Image.Image]:
    """One of `Prompt.images`: the image, or up to ``most`` frames of the clip. Waits for files: see
    `read_patiently`."""
    if isinstance(item, str):
        return [read_image(item, patient=True)]
    if len(item) > 1:
        return [read_image(item[k], patient=True) for k in sample_frames(len(item), most)]
    with suppress(OSError):  # which is told next
        read_patiently(item[0], 1)
    frames, _ = _read_film(item[0], lambda total: sample_frames(total, most))
    return frames


def _read_film(path: str, choose: Callable[[int], list[int]]) -> tuple[list[Image.Image], Any]:
    """The frames ``choose(their number)`` of a video file, and its metadata by transformers (fps,
    total_num_frames)."""
    if not os.path.isfile(path):
        raise UserError(f"no such video: {path}")
    package = next(filter(find_spec, VIDEO_DECODERS), None)
    if package is None:
        raise UserError(
            f"{path}: to read videos, install one of {', '.join(VIDEO_DECODERS)}, or give their frames as a "
            "list of images"
        )

    def pick(metadata, **_) -> list[int]:  # transformers passes it by this name
        if metadata.total_num_frames <= 0:
            metadata.total_num_frames = _count_frames(path)
        if not (metadata.total_num_frames and metadata.fps):
            raise UserError(f"{metadata.total_num_frames} frames, {metadata.fps} in a second")
        return choose(metadata.total_num_frames)

    try:
        frames, header = load_video(
            VideoPath(path), backend=VIDEO_DECODERS[package], sample_indices_fn=pick
        )
    except Exception as error:  # decoders raise anything
        raise UserError(f"{path}: not a video that {package} can decode: {error!r}") from error
    if torch.is_tensor(frames):
        frames = frames.permute(0, 2, 3, 1).numpy()  # (F, h, w, 3)
    return [Image.fromarray(frame) for frame in frames], header


@functools.cache  # every step that reads the file needs it again
def _count_frames(path: str) -> int:
    """The number of frames of a video whose header lacks it, such as WebM or MKV, by decoding it
    once."""
    import av

    with av.open(path) as film:
        return sum(1 for _ in film.decode(video=0))
