"""Images and videos of rows, as bytes, base64, data URLs or paths, to files beside the new rows."""

import base64
import hashlib
import io
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from common.ground.files import UserError, read_bytes

IMAGE_KEYS = ("bytes", "image", "image_url", "url", "path", "value")
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # that the trainers read
PART_KEYS = {"type", "text", "video", "index", *IMAGE_KEYS}
PICTURE = r"(?is)data:image/.*|\S+\.(bmp|gif|jpe?g|png|tiff?|webp)"  # a response that is one

# Settings of a part for how its image or video is to be read.
READING = "resized_height resized_width min_pixels max_pixels total_pixels fps nframes min_frames "
READING += "max_frames sample_fps video_start video_end"


@dataclass
class Images:
    """Writes the images of one row as <folder>/<name>-<place>.<format>."""

    folder: Path
    name: str  # of the row: <split>-<number>
    # paths in the row are relative to this folder or, where they are not there,
    beside: Path
    root: Path | None = None  # to this one, outside of which none is read
    # of all rows: digest of an image -> its path in rows
    written: dict[bytes, str] = field(default_factory=dict)
    count: int = 0  # images of this row that no earlier row has
    embedded: list[str] = field(default_factory=list)  # written from messages

    def write(self, image: Any) -> str:
        """Write an image; returns its path beside the JSONL file. Raises UserError, FileNotFoundError."""
        data = self.read(image)
        digest = hashlib.sha256(data).digest()
        if digest in self.written:
            return self.written[digest]
        try:
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as picture:
                picture.load()  # finds a damaged body now, not in the middle of training
        except Exception as error:  # damaged files raise anything, by plugin
            problem = f"an image that cannot be decoded: {image!r:.80} ({error!s:.200})"
            raise UserError(problem) from error
        path = self.folder / f"{self.name}-{self.count}.{str(picture.format).lower()}"
        path.write_bytes(data)
        self.count += 1
        self.written[digest] = f"{self.folder.name}/{path.name}"
        return self.written[digest]

    def digest(self, path: str) -> str:
        """The digest of an image's content."""
        return hashlib.sha256(self.folder.parent.joinpath(path).read_bytes()).hexdigest()

    def write_part(self, part: dict) -> dict:
        """A part of a message, with the path of its image if it brings one."""
        check_reading(part)
        unread = [key for key in part if key not in PART_KEYS and part[key]]
        if unread:
            raise UserError(
                f"{', '.join(unread)} in a part of a message, which nothing reads: {part!r:.80}; --map can "
                "rename or remove it"
            )
        if part["type"] == "text":
            return {"type": "text", "text": part.get("text") or part.get("value", "")}
        if part["type"] == "video":
            return part | {"video": self.find_clip(part["video"])} if part.get("video") else part
        if part["type"] not in ("image", "image_url"):
            raise UserError(
                f"a part of a message is text, image, image_url or video, not {part!r:.80}"
            )
        if not any(part.get(key) for key in IMAGE_KEYS):
            return {"type": "image"}
        self.embedded.append(self.write(part))
        return {"type": "image", "image": self.embedded[-1]}

    def read(self, image: Any) -> bytes:
        """An encoded image, given as bytes, base64, data URL or path, or as an object with one of these, or
        one of Pillow, which becomes a PNG."""
        if isinstance(image, dict):
            check_reading(image)
            return self.read(next((image[key] for key in IMAGE_KEYS if image.get(key)), None))
        if isinstance(image, bytes):
            return image
        if isinstance(image, Image.Image):  # of --map
            file = io.BytesIO()
            image.save(file, "PNG")
            return file.getvalue()
        if not image:
            raise FileNotFoundError("an image without bytes or path")
        file = self.locate(image)
        if os.path.isfile(file):
            return read_bytes(file)
        encoded = re.sub("^data:[^,]*;base64,", "", str(image))
        try:
            return base64.b64decode("".join(encoded.split()), validate=True)
        except ValueError as error:
            message = f"{image!r:.80} is neither a file in {self.root or self.beside} nor an image in base64"
            raise FileNotFoundError(message) from error

    def locate(self, path: str | Path) -> Path:
        """A file or folder that a row names. Raises UserError: it lies outside of --image_root."""
        path, root = str(path).removeprefix("file://"), self.root
        file = self.beside / path
        if root and not os.path.exists(file):
            file = root / path
        if root and os.path.exists(file) and not file.resolve().is_relative_to(root.resolve()):
            raise UserError(f"{file} lies outside of --image_root {root}")
        return file

    def find_clip(self, clip: Any) -> str | list[str]:
        """A video file as its absolute path; a list or folder of frames as the list of its images."""
        if isinstance(clip, list):
            return [self.write(frame) for frame in clip]
        if isinstance(clip, dict):
            check_reading(clip)
        path = clip["video"] if isinstance(clip, dict) else clip
        path = self.locate(path)
        if not path.exists():
            raise FileNotFoundError(f"no such video: {clip!r:.80}")
        if path.is_dir():
            # frame-2 before frame-10
            frames = sorted(path.iterdir(), key=lambda frame: (len(frame.name), frame))
            return [self.write(str(frame.absolute())) for frame in frames]
        return str(path.resolve())


def is_picture(side: Any) -> bool:
    """Whether a response is the path or the content of an image."""
    if isinstance(side, dict):
        return bool(set(IMAGE_KEYS) & side.keys()) and not {"role", "from"} & side.keys()
    return isinstance(side, bytes) or isinstance(side, str) and bool(re.fullmatch(PICTURE, side))


def check_reading(part: dict) -> None:
    """Raises UserError: a part has settings for how its own image or video is to be read."""
    named = [key for key in READING.split() if part.get(key) is not None]
    if named:
        raise UserError(
            f"{', '.join(named)} of one picture or film: the trainers read all alike, as --min_pixels, "
            "--max_pixels and --video_fps say; resize its file, and remove the entry"
        )
