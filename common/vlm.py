"""What transformers leaves to its users: rows and pictures to tensors, and the packed two-stage forward.

    JSONL row -> messages -> chat template -> token ids, placeholders expanded -> Prompt            load_prompts
    picture   -> header: width, height -> patch grid, when the data are loaded                      Processor.grid
              -> body: correct RGB -> patches, when a step needs them                 load_pixels, PromptLoader
    clip      -> size and time of its frames -> patch grid, seconds        clip_times, Processor.clip_grid
              -> some of its frames -> patches, `temporal_patch_size` frames deep                        read_clip
    patches   -> vision tower -> image features                                                     image_features
    row       -> embeddings with the features in place -> language model -> hidden states           language_hidden
    folder    -> model on meta -> (sharded by the script) -> weights streamed into shards  skeleton, load_weights, unsharded

Shapes: P prompt tokens, I images, M image tokens, N tokens of a packed row, H hidden size (or heads, with D), B slots.
A user's mistake is a ValueError that names the file, the line and the numbers.
"""

import copy
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import platform
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import transformers
from PIL import Image, ImageOps, UnidentifiedImageError
from safetensors import SafetensorError, safe_open
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

OLD = [f"{name} {have}" for name, have, least in (                         # before imports of what older ones do not have
    ("Python", platform.python_version(), (3, 11)), ("torch", torch.__version__, (2, 11)),
    ("transformers", transformers.__version__, (5, 17))) if tuple(map(int, have.split(".")[:2])) < least]
if OLD:
    raise ImportError(f"{', '.join(OLD)}: too old; Python 3.11, torch 2.11 and transformers 5.17 are the least")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.modeling_utils import AttentionInterface
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size as idefics3_size
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size as pixtral_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_clip
from transformers.video_utils import load_video

from common.buffers import UserError, all_gather_json

# model_type -> how its pictures become tokens, or "text" for none. A new layout: its image processor, a branch in Processor's
# `_set_image_processor`, `grid` and `expand`, in `_patches` and `vision_inputs`, where it differs; the rest is in common.
FAMILIES = {"qwen2_vl": "qwen", "qwen2_5_vl": "qwen", "qwen3_vl": "qwen", "qwen3_vl_moe": "qwen", "llava": "llava",
            "llava_next": "llava_next", "gemma3": "gemma3", "internvl": "internvl", "mistral3": "pixtral",
            "idefics3": "idefics3", "smolvlm": "idefics3", "qwen2": "text", "qwen3": "text", "llama": "text",
            "mistral": "text"}
IMAGE_PROCESSORS = {"qwen": "Qwen2VL", "llava": "CLIP", "llava_next": "LlavaNext", "gemma3": "Gemma3", "internvl": "GotOcr2",
                    "pixtral": "Pixtral", "idefics3": "Idefics3"}  # where the files do not say; then a name of these or:
OTHER_IMAGE_PROCESSORS = ("Llava", "Siglip", "SmolVLM")
# Pillow would also try formats that start other programs (EPS runs Ghostscript): a data file must not be able to.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
FILM_DECODERS = {"torchcodec": "torchcodec", "av": "pyav", "cv2": "opencv"}  # package -> its name in transformers
# Special tokens around pictures that no config names: never to be sampled.
IMAGE_TOKENS = {"internvl": r"</?img>|<video>|<IMG_CONTEXT>", "pixtral": r"\[IMG(_BREAK|_END)?\]",
                "idefics3": r"<fake_token_around_image>|<global-img>|<image>|<row_\d_col_\d>"}
IDEFICS3_FAKE = "<fake_token_around_image>"
MAX_DECODED_PIXELS = 2**26  # 8192 x 8192, 200 MB as RGB; a few kB of PNG can claim a thousand times that
PLACES = ("<image>", "<video>")  # in the strings of rows
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """One row of the data, ready for the model but for its pixels (see `load_pixels`)."""

    index: int  # rows before it in the file, bad ones too: it seeds the sampling noise, so a skip must not shift it
    source: str  # "train.jsonl:12", for messages
    messages: list[dict]  # content as parts, without their files
    text: str  # rendered prompt, one placeholder per image or clip
    images: tuple[str | tuple[str, ...], ...]  # absolute paths; a clip is a tuple: its file, or those of its frames
    grids: tuple[tuple, ...]  # what `Processor.grid` says of each image, `Processor.clip_grid` of a clip (4 or more entries)
    input_ids: torch.Tensor  # (P,) int64, placeholders expanded as `Processor.expand` says
    image_tokens: int  # M, those of input_ids that stand for image features
    reference: str | None
    label: str | None


@contextmanager
def _open_image(path: str):
    """A picture file opened by its header, refused by its size before any body is decoded."""
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            if not 0 < image.width * image.height <= MAX_DECODED_PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels; allowed are {MAX_DECODED_PIXELS} in all")
            yield image
    except FileNotFoundError as error:
        raise ValueError(f"no such image: {path}") from error
    except Exception as error:  # damaged files raise anything (struct, zlib, Syntax, Index, ...), by plugin
        raise ValueError(f"{path}: cannot be read as one of {', '.join(IMAGE_FORMATS)}: {error!r}") from error


def image_size(path: str) -> tuple[int, int]:
    """(width, height) in pixels as `read_image` will return it, from the header alone: EXIF behind the body of a PNG is
    not seen. Raises ValueError: no such file, not a picture, too many pixels."""
    with _open_image(path) as image:
        # Not image.getexif(): that of a PNG decodes the body first. TIFF: Pillow reports the turned size by itself.
        turned = image.format != "TIFF" and Image.Image.getexif(image).get(0x0112) in (5, 6, 7, 8)
        return image.size[::-1] if turned else image.size


def read_image(path: str) -> Image.Image:
    """Decode a picture file to RGB: upright by its EXIF, transparency laid on white, first frame of an animation.

    16-bit grey is scaled, not clipped. Raises ValueError with path and reason: no such file, not a picture, too many
    pixels, truncated or damaged body, grey values of unknown range.
    """
    with _open_image(path) as image:
        return _upright_rgb(image)


def _upright_rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":  # Pillow's own conversion clips everything above 255 to white
        values = np.asarray(image)  # (h, w)
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise ValueError(f"mode {image.mode}, values {values.min()} to {values.max()}: not 16-bit grey")
        image = Image.fromarray((values / 257).round().astype(np.uint8))
    elif image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def clip_times(files: tuple[str, ...], fps: float) -> tuple[tuple[int, int], list[float], float]:
    """(width, height) of a clip's frames, the second at which each is shown, and frames per second. A clip is several
    pictures, `fps` in a second, or one file: an animation, which tells how long it shows each frame (else `fps`), or a film.

    Raises ValueError: no such file, not a clip, fewer than 2 frames, frames of different size, no decoder installed.
    """
    shown = []                                               # milliseconds, where a file tells them for each frame
    if len(files) > 1:
        sizes, total = [image_size(file) for file in files], len(files)
        if other := next((k for k, size in enumerate(sizes) if size != sizes[0]), 0):
            raise ValueError("the frames of a clip differ in size: {} x {} pixels in {}, {} x {} in {}".format(
                *sizes[0], files[0], *sizes[other], files[other]))
    elif _is_film(files[0]):
        frames, header = _film(files[0], lambda total: [0])
        sizes, total, fps = [frames[0].size], header.total_num_frames, header.fps
    else:
        sizes = [image_size(files[0])]
        with _open_image(files[0]) as image:
            total = getattr(image, "n_frames", 1)
            for k in range(total):                           # known of a frame once those before are decoded
                image.seek(k)
                image.load()
                shown.append(image.info.get("duration", 0))
    if total < 2:
        raise ValueError(f"{files[0]}: a video has at least 2 frames, this has {total} (pictures are the frames of one "
                         "video if they stand in a list of their own)")
    if shown and all(shown):
        return sizes[0], (np.cumsum([0, *shown[:-1]]) / 1000).tolist(), 1000 * total / sum(shown)
    return sizes[0], [k / fps for k in range(total)], fps


def sample_frames(total: int, most: int) -> list[int]:
    """Which of a clip's frames are used: all of them, or `most`, evenly from the first to the last."""
    return np.linspace(0, total - 1, min(total, most)).round().astype(int).tolist()


def read_clip(files: tuple[str, ...], most: int) -> list[Image.Image]:
    """The sampled frames of a clip as `read_image` gives pictures. Raises ValueError: see `clip_times`, or a damaged body."""
    if len(files) > 1:
        return [read_image(files[k]) for k in sample_frames(len(files), most)]
    if _is_film(files[0]):
        return _film(files[0], lambda total: sample_frames(total, most))[0]
    frames = []
    with _open_image(files[0]) as image:
        for k in sample_frames(getattr(image, "n_frames", 1), most):
            image.seek(k)
            frames.append(_upright_rgb(image))
    return frames


def read_frames(images: Any, most: int) -> list[Image.Image]:
    """To look at: the pictures of `Prompt.images`, and in a clip's place up to `most` of its frames."""
    return [frame for item in images
            for frame in ([read_image(item)] if isinstance(item, str) else read_clip(tuple(item), most))]


def _is_film(path: str) -> bool:
    """Whether the file of a clip is in none of Pillow's formats."""
    if not os.path.isfile(path):
        raise ValueError(f"no such video: {path}")
    try:
        with _open_image(path):
            return False
    except ValueError as error:
        if isinstance(error.__cause__, UnidentifiedImageError):
            return True
        raise


def _importable(package: str) -> bool:
    try:
        return importlib.import_module(package) is not None
    except (ImportError, OSError, RuntimeError):  # the latter: installed, but built for other libraries than there are
        return False


def _film(path: str, choose: Callable[[int], list[int]]) -> tuple[list[Image.Image], Any]:
    """The frames ``choose(their number)`` of a film, and what transformers says of it (fps, total_num_frames)."""
    package = next(filter(_importable, FILM_DECODERS), None)
    if package is None:
        raise ValueError(f"{path}: none of {', '.join(IMAGE_FORMATS)}; to read films, install one of "
                         f"{', '.join(FILM_DECODERS)}, or give their frames as a list of pictures")

    def pick(metadata, **_) -> list[int]:
        total, rate = metadata.total_num_frames, metadata.fps
        if not (total and rate and 0 < metadata.width * metadata.height <= MAX_DECODED_PIXELS):
            raise ValueError(f"it says {metadata.width}x{metadata.height} pixels, {total} frames, {rate} in a second; allowed "
                             f"are {MAX_DECODED_PIXELS} pixels, and number and rate are needed")
        return choose(total)

    try:
        frames, header = load_video(path, backend=FILM_DECODERS[package], sample_indices_fn=pick)
        frames = frames.permute(0, 2, 3, 1).numpy() if torch.is_tensor(frames) else frames                   # (F, h, w, 3)
        if len(frames) != len(header.frames_indices):
            raise ValueError(f"{len(frames)} of the frames {header.frames_indices} decode")
    except Exception as error:  # decoders raise anything
        raise ValueError(f"{path}: not a film that {package} can decode: {error!r}") from error
    return [Image.fromarray(frame) for frame in frames], header


class Processor:
    """Tokenizer, chat template and Pillow image processor of a checkpoint folder.

    Not `AutoProcessor`: for the Qwen-VL families it needs torchvision, for its videos; here Pillow resizes their frames.
    min_pixels, max_pixels: bounds of the area an image is resized to, in pixels; 0 keeps the checkpoint's own.
    video_frames, video_fps, video_max_pixels: most frames of a clip, frames per second where it does not tell, largest
    area of a frame in pixels; 0 leaves it to the checkpoint.
    Raises ValueError: files missing or unreadable, another family, no chat template, contradictory settings.
    Attributes: config, tokenizer, image_processor, files (JSON by name), image_token_id, stop_ids, banned_ids (never
    to be sampled), reserved_tokens (never in a row), patch_size, merge_size (patches per side of an image token).
    """

    def __init__(self, folder: str | Path, min_pixels: int = 0, max_pixels: int = 0, video_frames: int = 16,
                 video_fps: float = 2.0, video_max_pixels: int = 0):
        self.video_frames, self.video_fps, self.video_max_pixels = video_frames, video_fps, video_max_pixels
        paths = [Path(folder, f"{name}.json") for name in ("chat_template", "generation_config", "judge", "processor_config",
                                                           "preprocessor_config", "video_preprocessor_config")]
        try:
            self.config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            self.files = {path.stem: json.loads(path.read_text("utf-8")) if path.exists() else {} for path in paths}
            self.layout = layout(self.config)
            self.image_processor = self.frame_processor = None
            if self.layout != "text":
                self._set_image_processor(min_pixels, max_pixels)
            self._set_tokens()
        except (OSError, ValueError) as error:
            raise ValueError(f"checkpoint {folder}: {error}") from error

    def _set_image_processor(self, min_pixels: int, max_pixels: int) -> None:
        config, tower, self.call = self.config, self.config.vision_config, {}
        settings = self.files["processor_config"].get("image_processor") or self.files["preprocessor_config"]
        if not settings:
            raise ValueError("no preprocessor_config.json, the rule from pictures to patches; take the base checkpoint's")
        known = (*IMAGE_PROCESSORS.values(), *OTHER_IMAGE_PROCESSORS)
        name = settings.get("image_processor_type") or IMAGE_PROCESSORS[self.layout]
        name = re.sub("(ImageProcessor)?(Fast|Pil)?$", "", name, count=1)
        if name not in known:
            raise ValueError(f"image processor {name!r} is not one of {', '.join(known)}")
        if self.layout != "qwen" and (min_pixels or max_pixels):
            raise ValueError(f"min_pixels {min_pixels}, max_pixels {max_pixels}: {config.model_type} resizes by its own files")
        if self.layout == "qwen":
            clips = self.files["processor_config"].get("video_processor") or self.files["video_preprocessor_config"]
            if not clips:                                              # older checkpoints treat frames as they do pictures
                clips = {key: value for key, value in settings.items() if key != "image_processor_type"}
                self.files["video_preprocessor_config"] = clips
            side = tower.patch_size * tower.spatial_merge_size
            self.frame_processor = transformers.Qwen2VLImageProcessorPil.from_dict(
                self._qwen_settings(clips, 0, 0, 128 * side**2, 768 * side**2) | {"do_resize": False})
            settings = self._qwen_settings(settings, min_pixels, max_pixels, 56 * 56, 28 * 28 * 1280)
        elif self.layout == "gemma3" and settings.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan: crops beside the picture are not supported; switch it off in the files")
        elif self.layout == "internvl":
            self.call = {"crop_to_patches": True}           # as its processor does, whatever the file says
        elif self.layout == "pixtral":
            self.patch_size = tower.patch_size * getattr(config, "spatial_merge_size", 1)
            self.call = {"patch_size": {"height": self.patch_size, "width": self.patch_size}}
        elif self.layout == "idefics3":
            self.call = {"return_row_col_info": True}
        try:
            self.image_processor = getattr(transformers, f"{name}ImageProcessorPil").from_dict(settings)
        except ImportError as error:
            raise ValueError(f"transformers {transformers.__version__} wants torchvision for the pictures of "
                             f"{config.model_type}; a newer one does not") from error

    def _qwen_settings(self, settings: dict, min_pixels: int, max_pixels: int, lowest: int, highest: int) -> dict:
        # Files of different age spell the bounds in three ways; and given min_pixels, transformers 5.17 writes it into
        # the default of the class, for every later checkpoint. Hence `size`, always.
        given = (settings.get("size") or {}) | {key: value for key, value in settings.items() if value}
        low = min_pixels or given.get("min_pixels") or given.get("shortest_edge") or lowest
        high = max_pixels or given.get("max_pixels") or given.get("longest_edge") or highest
        tower = self.config.vision_config  # has the last word on patches: its weights have their shape
        self.patch_size, self.merge_size = tower.patch_size, tower.spatial_merge_size
        if not 0 < low <= high:
            raise ValueError(f"min_pixels {low}, max_pixels {high}: must be 0 < min <= max")
        return {key: value for key, value in settings.items() if key not in ("min_pixels", "max_pixels")} | {
            "size": {"shortest_edge": low, "longest_edge": high}, "do_resize": True, "patch_size": self.patch_size,
            "merge_size": self.merge_size, "temporal_patch_size": tower.temporal_patch_size}

    def _set_tokens(self) -> None:
        tokenizer, config, ends = self.tokenizer, self.config, self.files["generation_config"].get("eos_token_id")
        if not tokenizer.encode("a", add_special_tokens=False):      # transformers makes one without words of no files
            raise ValueError("no vocabulary: tokenizer.json, or the files in its place, are missing; take the base "
                             "checkpoint's")
        # Older checkpoints keep the template that knows images in this file, which only AutoProcessor reads.
        tokenizer.chat_template = self.files["chat_template"].get("chat_template") or tokenizer.chat_template
        if not tokenizer.chat_template:
            raise ValueError("no chat template; take that of the instruction-tuned checkpoint")
        self.image_token_id = int(visual_token_ids(config)[0])
        ids = {getattr(config, f"{name}_token_id", None)
               for name in ("image", "video", "vision_start", "vision_end", "boi", "eoi")}
        ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if self.layout in IMAGE_TOKENS
                and re.fullmatch(IMAGE_TOKENS[self.layout], token.content)}
        # A small model may keep the large ones' default ids, beyond its own vocabulary: nothing there to ban.
        self.banned_ids = tuple(sorted(i for i in ids - {None} if 0 <= i < config.get_text_config().vocab_size))
        # What the template writes for a picture: the image token, but in Gemma3 the one that begins a picture.
        self.placeholder = tokenizer.convert_ids_to_tokens(config.boi_token_id if self.layout == "gemma3"
                                                           else self.image_token_id) if self.layout != "text" else ""
        self.clip_placeholder = tokenizer.convert_ids_to_tokens(config.video_token_id) if self.layout == "qwen" else ""
        ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends]),
                tokenizer.get_vocab().get("<end_of_turn>")}              # Gemma's, which not all of its files call an end
        self.stop_ids = tuple(sorted(ends - {None}))
        # Not every special token: those the template does not use, as Qwen2-VL's for boxes, are a row's to write.
        self.reserved_tokens = [token.content for i, token in tokenizer.added_tokens_decoder.items() if i in ids
                                or token.special and (i in ends or token.content in str(tokenizer.chat_template))]
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
            config.get_text_config().pad_token_id = tokenizer.eos_token_id
        tokenizer.backend_tokenizer.no_truncation()  # a tokenizer.json can ask for it: a silent cut
        tokenizer.backend_tokenizer.no_padding()

    def grid(self, width: int, height: int) -> tuple[int, ...]:
        """What the family's tokens for a picture of width x height pixels depend on, from its size alone: (1, h, w) patches,
        or (height, width) in pixels once resized, or the tiles, or their (rows, columns), or the size as it is.
        ValueError for sides too unlike each other (in Qwen's families longer than 200 : 1), or a picture too small."""
        processor = self.image_processor
        if self.layout == "qwen":
            low, high = processor.size["shortest_edge"], processor.size["longest_edge"]
            h, w = smart_resize(height, width, self.patch_size * self.merge_size, low, high)
            return 1, h // self.patch_size, w // self.patch_size
        if self.layout in ("llava", "gemma3"):
            return self.config.vision_config.image_size, self.config.vision_config.image_size
        if self.layout == "internvl":
            return (processor.get_number_of_image_patches(height, width, dict(self.call)),)
        if self.layout == "llava_next":
            return height, width
        shape = np.broadcast_to(np.uint8(0), (3, height, width))           # the rules read the shape of an array: no memory
        if self.layout == "pixtral":
            h, w = pixtral_size(shape, processor.size["longest_edge"], self.patch_size, "channels_first")
            if h * w <= self.patch_size**2:                # no token, or the single one that transformers' merger fails on
                raise ValueError(f"a picture of {width} x {height} pixels is too small or too long for this family")
            return h, w
        if self.layout == "idefics3":       # get_number_of_image_patches errs unless max_image_size divides the longest edge
            height, width = idefics3_size(shape, processor.size["longest_edge"])
            side, ratio = processor.max_image_size["longest_edge"], width / height
            rows, columns = math.ceil(height / side), math.ceil(width / side)
            if width >= height:
                rows = math.ceil(int(columns * side / ratio) / side)
            else:
                columns = math.ceil(int(rows * side * ratio) / side)
            return (rows, columns) if processor.do_image_splitting and max(rows, columns) > 1 else (0, 0)
        raise ValueError(f"unknown layout {self.layout}")

    def clip_grid(self, size: tuple[int, int], times: list[float], rate: float) -> tuple:
        """(t, h, w) patches of a clip's sampled frames, seconds per temporal patch, and the second at the middle of each of
        these; arguments as `clip_times` returns them. ValueError for sides too unlike each other."""
        picks, deep = sample_frames(len(times), self.video_frames), self.config.vision_config.temporal_patch_size
        width, height = self.frame_size(*size, len(picks))
        seconds = deep / (len(picks) / len(times) * rate)
        picks += picks[-1:] * (-len(picks) % deep)
        middles = [(times[first] + times[last]) / 2 for first, last in zip(picks[::deep], picks[deep - 1::deep])]
        return len(middles), height // self.patch_size, width // self.patch_size, seconds, *middles

    def frame_size(self, width: int, height: int, count: int) -> tuple[int, int]:
        """(width, height) to which the `count` frames of a clip are resized: Qwen2-VL and Qwen2.5-VL bound the pixels of a
        frame, Qwen3-VL those of all frames."""
        if getattr(self.frame_processor, "cap_pixels_per_frame", None):
            raise ValueError("cap_pixels_per_frame in the checkpoint's files is not supported; use --video_max_pixels")
        side, bounds = self.patch_size * self.merge_size, self.frame_processor.size
        low, high = bounds["shortest_edge"], bounds["longest_edge"]
        if self.config.model_type.startswith("qwen3"):
            deep = self.config.vision_config.temporal_patch_size
            h, w = smart_resize_clip(count, height, width, deep, side, low, high)
        else:
            h, w = smart_resize(height, width, side, low, high)
        if 0 < self.video_max_pixels < h * w:
            h, w = smart_resize(height, width, side, 0, self.video_max_pixels)
        return w, h

    def expand(self, grid: tuple) -> tuple[str, list[int]]:
        """What stands in the prompt for a picture or clip: a text, and how often each image or video token in it is repeated.

        The counts are those of the features that the model makes, by its config; the texts those of the families' processors.
        """
        config, token = self.config, self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        if self.layout == "qwen":
            (t, h, w), middles = grid[:3], grid[4:]
            if middles and config.model_type.startswith("qwen3"):                  # each temporal patch with its time
                start, end = self.tokenizer.convert_ids_to_tokens([config.vision_start_token_id, config.vision_end_token_id])
                return "".join(f"<{second:.1f} seconds>{start}{self.clip_placeholder}{end}" for second in middles), \
                    [h * w // self.merge_size**2] * t
            return self.clip_placeholder if middles else token, [t * h * w // self.merge_size**2]
        if self.layout == "gemma3":
            end = self.tokenizer.convert_ids_to_tokens(config.eoi_token_id)
            return f"\n\n{self.placeholder}{token}{end}\n\n", [config.mm_tokens_per_image]
        if self.layout == "pixtral":
            rows, columns = grid[0] // self.patch_size, grid[1] // self.patch_size
            return f"{token}[IMG_BREAK]" * (rows - 1) + f"{token}[IMG_END]", [columns] * rows
        size, patch = (np.atleast_1d(value)[0] for value in (config.vision_config.image_size, config.vision_config.patch_size))
        side = int(size // patch)                                                       # patches along a tile
        if self.layout == "internvl":
            return f"<img>{token}</img>", [grid[0] * int(side * config.downsample_ratio) ** 2]
        if self.layout == "idefics3":
            rows, columns = grid
            tiles = "".join("".join(f"{IDEFICS3_FAKE}<row_{i + 1}_col_{j + 1}>{token}" for j in range(columns)) + "\n"
                            for i in range(rows)) + ("\n" if rows else "")
            return f"{tiles}{IDEFICS3_FAKE}<global-img>{token}{IDEFICS3_FAKE}", \
                [side**2 // config.scale_factor**2] * (rows * columns + 1)
        # CLIP puts one class token before the patches; the strategy "default" drops the first token, whatever it is.
        count = side**2 + (config.vision_config.model_type == "clip_vision_model") \
            - (config.vision_feature_select_strategy == "default")
        if self.layout == "llava_next":
            rows, columns = get_anyres_image_grid_shape(grid, config.image_grid_pinpoints, int(size))
            _, height, width = unpad_image(torch.empty(1, rows * side, columns * side, device="meta"), grid).shape
            count += height * (width + 1)                                               # every row ends with a newline
        return token, [count]

    def encode(self, messages: list[dict], grids: tuple) -> tuple[str, torch.Tensor, int]:
        """Chat messages as the template's text, as token ids (P,) int64, the placeholder of each image and clip expanded, and
        how many of these are image tokens.
        Raises ValueError: a reserved token in a message, a template that fails, not one placeholder per image or clip."""
        texts = ["".join(part.get("text", "\n") for part in m["content"]) for m in messages]  # as templates join the parts
        if typed := [token for token in self.reserved_tokens if token in f"{messages} {texts}"]:
            raise ValueError(f"special token {typed[0]} in the text: the model would take it for the template's own")
        chat = messages  # templates may know parts only; those of text models know strings only
        if self.layout == "text":
            chat = [{**m, "content": said} for m, said in zip(messages, texts)]
        try:
            text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program that came with the checkpoint, and raises what it likes
            raise ValueError(f"the chat template cannot render this ({error!r})") from error
        text.encode("utf-8")  # JSON may hold half a surrogate pair: a ValueError here, a TypeError in the tokenizer
        said = [part.get("text", "").strip() for m in messages if m["role"] == "user" for part in m["content"]]
        if lost := [part for part in said if part not in text]:
            raise ValueError(f"the chat template leaves out {lost[0]!r:.80}")
        marks = [mark for mark in (self.placeholder, self.clip_placeholder) if mark]
        before, *rest = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        found, behind = rest[::2], rest[1::2]
        if found != [self.clip_placeholder if len(grid) > 3 else self.placeholder for grid in grids]:
            clips, marked = sum(len(grid) > 3 for grid in grids), found.count(self.placeholder)
            raise ValueError(f"image-token mismatch: {marked} image placeholders and {len(found) - marked} of videos in the "
                             f"rendered prompt for {len(grids) - clips} images and {clips} videos (a template for text only?)")
        words, counts = zip(*map(self.expand, grids)) if grids else ((), ())
        # The template has written the special tokens: the tokenizer must not add its own on top. But in the families whose
        # processors have it add the BOS if the template has not.
        bos = self.tokenizer.bos_token if self.layout not in ("text", "qwen") else None
        ids = self.tokenizer.backend_tokenizer.encode(
            before + "".join(word + part for word, part in zip(words, behind)),
            add_special_tokens=bos is not None and not text.startswith(bos)).ids
        ids, counts = np.array(ids, dtype=np.int64), sum(counts, [])
        is_image = np.isin(ids, visual_token_ids(self.config))
        if is_image.sum() != len(counts):
            raise ValueError(f"image-token mismatch: {is_image.sum()} image tokens in the encoded prompt for {len(counts)}")
        repeats = np.ones_like(ids)
        repeats[is_image] = counts
        return text, torch.from_numpy(ids.repeat(repeats)), sum(counts)

    def save(self, folder: str) -> None:
        """Write tokenizer, template, processor and generation settings, with the pixel bounds in use, to a folder."""
        self.tokenizer.save_pretrained(folder)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(folder)
        for name in ("generation_config", "judge", "processor_config", "video_preprocessor_config"):
            # The nested image processor would take precedence over the pixel bounds just written.
            if settings := {key: value for key, value in self.files[name].items() if key != "image_processor"}:
                Path(folder, f"{name}.json").write_text(json.dumps(settings, indent=2), "utf-8")


def layout(config) -> str:
    """How the family of a model's config lays out its pictures. Raises ValueError: a family that is not supported."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"family {config.model_type!r} is not one of {', '.join(FAMILIES)}")
    if config.model_type == "llava" and config.vision_config.model_type == "pixtral":
        return "pixtral"
    return FAMILIES[config.model_type]


def visual_token_ids(config) -> torch.Tensor:
    """(2,) the ids that stand for features in `input_ids`: a piece of a picture, a piece of a clip; -1, which no token has,
    where there is none."""
    return torch.tensor([getattr(config, "image_token_id", -1),
                         config.video_token_id if layout(config) == "qwen" else -1])


# Columns that rows made for verl and for TRL have besides prompt, images and answer; no other foreign column is known.
FOREIGN_COLUMNS = ("data_source", "ability", "reward_model", "extra_info", "videos",
                   "image", "solution", "problem", "original_question", "original_answer")


def _parse_row(row: dict, columns: tuple[str, ...]) -> tuple:
    """(prompt, images and clips, label, reference) of one row; the prompt is yet to be checked.

    Of the foreign columns are read: `image` without images, `data_source` without a label, and, without a reference in
    "answer", `reward_model.ground_truth` or else `solution`. `videos` are clips, see `media_list`. The others are passed over.
    """
    if unknown := sorted(set(row) - set(columns) - set(FOREIGN_COLUMNS)):
        raise ValueError(f"unknown column {', '.join(map(repr, unknown))}; known are {', '.join(columns)}, and of verl's "
                         f"and TRL's rows {', '.join(FOREIGN_COLUMNS)}")
    prompt, images, *texts = map(row.get, columns)
    if images is not None and row.get("image") is not None and columns[1] != "image":
        raise ValueError(f"columns {columns[1]!r} and 'image': give one of them")
    images = media_list(row.get("image") if images is None else images, row.get("videos"), columns[1])
    if not isinstance(verl := row.get("reward_model") or {}, dict):
        raise ValueError(f'column \'reward_model\' must be {{"ground_truth": ...}}, not {verl!r:.80}')
    foreign = {"data_source": row.get("data_source"), "reward_model.ground_truth": verl.get("ground_truth"),
               "solution": row.get("solution")}
    for column, text in [*zip(columns[2:], texts), *foreign.items()]:
        if not isinstance(text, str | None):
            raise ValueError(f"column {column!r} must be a string, not {text!r:.80}")
    label, *references = texts
    if len({*references} - {None}) > 1:
        raise ValueError(f"columns {' and '.join(columns[3:])} differ: {references!r:.120}; give one of them")
    data_source, *others = foreign.values()
    references += others if columns[3] == "answer" else []
    label = data_source if label is None else label
    return prompt, images, label, next((text for text in references if text is not None), None)


def media_list(images: Any, clips: Any, column: str = "images") -> list[str | tuple[str, ...]]:
    """The images of a row as paths, and then its clips, each a file or a list of pictures, as tuples of paths. Raises
    ValueError: neither one nor a list of them nor None; see `_image_file`."""
    listed = lambda value: [] if value is None else value if isinstance(value, list) else [value]  # noqa: E731
    rule = "column 'videos' must be a list of clips, each a path or a list of the paths of its frames"
    return [_image_file(image, f"column {column!r} must be a path or a list of paths") for image in listed(images)] + \
        [_clip_files(clip, rule) for clip in listed(clips)]


def _clip_files(clip: Any, rule: str) -> tuple[str, ...]:
    """The paths of a clip that a row gives as path, list of pictures, or object with one of the two as video."""
    if isinstance(clip, dict) and [key for key, value in clip.items() if value is not None] == ["video"]:
        clip = clip["video"]
    if clip == []:
        raise ValueError(f"{rule}; this clip has 0 frames")
    return tuple(_image_file(frame, rule) for frame in (clip if isinstance(clip, list) else [clip]))


def _image_file(image: Any, rule: str) -> str:
    """The path of an image that a row gives as path, file:// address, or object with one of the two as image, path or
    url. Raises ValueError, with the `rule` that the row breaks."""
    file = image
    if isinstance(image, dict):
        given = {key: value for key, value in image.items() if value is not None}
        if "bytes" in given:
            raise ValueError(f"{rule}, not the bytes of a picture: write it to a file, as launch/geo3k.py does")
        file = next(iter(given.values())) if len(given) == 1 and given.keys() <= {"image", "path", "url"} else None
    if not isinstance(file, str) or not file or re.match("(?:https?|data):", file):
        raise ValueError(f"{rule}, not {image!r:.80}")
    return file.removeprefix("file://")


def _parts(content: str | list) -> list[dict]:
    """Message content as text, image and video parts, the latter with "file" if they name one; "<image>" and "<video>" in a
    string stand for them."""
    if isinstance(content, str):
        pieces = [piece for piece in re.split("(<image>|<video>)", content) if piece]
        return [{"type": piece[1:-1]} if piece in PLACES else {"type": "text", "text": piece} for piece in pieces]
    parts, rule = [], ('a part of a message must be {"type": "text", "text": ...} or {"type": "image"}, with its file as '
                       '"image", "path" or "url" or in the images column, or alike {"type": "video"}')
    for part in content:  # tables give every part every key, the ones it has not as null
        match {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part:
            case {"type": "text", "text": str(text), **rest} if not rest:
                parts.append({"type": "text", "text": text})
            case {"type": "image", **rest}:
                parts.append({"type": "image"} | ({"file": _image_file(rest, rule)} if rest else {}))
            case {"type": "video", **rest}:
                parts.append({"type": "video"} | ({"file": _clip_files(rest, rule)} if rest else {}))
            case _:
                raise ValueError(f"{rule}, not {part!r:.80}")
    return parts


def _turns(prompt: str | list) -> list[dict]:
    """The messages of a row, content as parts. Raises ValueError: neither a string nor messages that a prompt can be."""
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    valid = isinstance(prompt, list) and prompt and all(
        isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str | list) for m in prompt)
    if not valid or prompt[-1]["role"] == "assistant":
        raise ValueError('prompt must be a string or messages {"role": ..., "content": string or parts}, with roles '
                         f"{', '.join(ROLES)}, the last not by the assistant; it is {prompt!r:.120}")
    return [{**m, "content": _parts(m["content"])} for m in prompt]


def _chat(prompt: str | list, images: list, system_prompt: str) -> tuple[list[dict], list]:
    """Messages, content as parts; and the images (paths) and clips (tuples) in their order: those of the parts that name
    one, and `images` for the other places."""
    messages = _turns(prompt)
    if not any(part.get("text", "").strip() for m in messages if m["role"] != "system" for part in m["content"]):
        raise ValueError("empty prompt: no text but the system's")
    users = [m for m in messages if m["role"] == "user"]
    places = [part for m in messages for part in m["content"] if part["type"] != "text"]
    if not places and len(users) == 1:  # the row does not say where: images first, as the Qwen-VL families are trained
        places = [{"type": "image" if isinstance(image, str) else "video"} for image in images]
        users[0]["content"] = places + users[0]["content"]
    for kind, form in (("image", str), ("video", tuple)):
        own = [image for image in images if isinstance(image, form)]
        free = [part for part in places if part["type"] == kind and "file" not in part]
        if len(free) != len(own):
            raise ValueError(f"{len(own)} {kind}s for {len(free)} places (<{kind}> in a string, or parts of type {kind} "
                             "without a file of their own)")
        for part, image in zip(free, own):
            part["file"] = image
    if system_prompt:
        if any(m["role"] == "system" for m in messages):
            raise ValueError("a system message in the row, and a system prompt by flag or judge.json: drop one of them")
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system_prompt}]})
    return messages, [part.pop("file") for part in places]


def load_prompts(path: str, processor: Processor, *, prompt_column: str = "prompt", images_column: str = "images",
                 reference_column: str = "answer", label_column: str = "label", on_bad_row: str = "error",
                 limit: int = 0, **options) -> list[Prompt]:
    """Read a JSONL file of prompts; image paths are relative to it, and of the pictures only headers are read.

    Rows made for verl and for TRL are read as they are, see `_parse_row`.
    reference_column: "answer" also admits "reference". limit: only the first so many rows, bad ones included; 0 for all.
    on_bad_row: "error", or "skip" to leave them out and print how many. Blank lines are no rows. options: of `make_prompt`.
    Raises ValueError: no such file, no rows, bad rows (the first five and their number), no row left after skipping.
    """
    columns = (prompt_column, images_column, label_column, reference_column)
    columns += ("reference",) if reference_column == "answer" and "reference" not in columns else ()

    def build(index: int, source: str, row: dict) -> Prompt:
        prompt, images, label, reference = _parse_row(row, columns)
        return make_prompt(processor, index, source, prompt, images, folder=os.path.dirname(os.path.abspath(path)),
                           reference=reference, label=label, **options)

    return load_rows(path, build, on_bad_row=on_bad_row, limit=limit)


def make_prompt(processor: Processor, index: int, source: str, prompt: str | list, images: list, *, folder: str,
                system_prompt: str = "", max_prompt_tokens: int = 1 << 30, verify_images: bool = False,
                reference: str | None = None, label: str | None = None, grids: tuple | None = None) -> Prompt:
    """Render and encode one row; the paths of images (strings) and clips (tuples) are relative to `folder`. Raises ValueError:
    whatever is wrong with it.

    grids: the patch grids of the images, if they are known; otherwise their headers are read, or, to verify_images, all.
    """
    messages, images = _chat(prompt, images, system_prompt)
    place = lambda path: os.path.normpath(os.path.join(folder, path))  # noqa: E731
    paths = tuple(place(image) if isinstance(image, str) else tuple(map(place, image)) for image in images)
    clips = check_media(processor, paths)
    if grids is None:
        grids = tuple(_item_grid(processor, path, verify_images) for path in paths)
    text, input_ids, image_tokens = processor.encode(messages, grids)
    if len(input_ids) > max_prompt_tokens:
        raise ValueError(f"prompt too long: {len(input_ids)} tokens with those of {len(grids)} images"
                         f"{' and videos' * (clips > 0)}; the limit is {max_prompt_tokens}")
    return Prompt(index, source, messages, text, paths, grids, input_ids, image_tokens, reference, label)


def check_media(processor: Processor, items: tuple[str | tuple[str, ...], ...]) -> int:
    """How many of a prompt's pictures and clips are clips. Raises ValueError: the family takes none such."""
    clips, family = sum(not isinstance(item, str) for item in items), processor.config.model_type
    if items and processor.layout == "text":
        raise ValueError(f"{len(items)} images for {family}, a model of text only")
    if clips and processor.layout != "qwen":
        raise ValueError(f"{clips} videos for {family}; only "
                         f"{', '.join(name for name, kind in FAMILIES.items() if kind == 'qwen')} take videos")
    return clips


def _item_grid(processor: Processor, item: str | tuple[str, ...], verify: bool) -> tuple:
    """The grid of an image or clip by its header, or, to `verify`, after decoding it."""
    if isinstance(item, str):
        return processor.grid(*(read_image(item).size if verify else image_size(item)))
    size, times, rate = clip_times(item, processor.video_fps)
    if verify:
        size = read_clip(item, processor.video_frames)[0].size
    return processor.clip_grid(size, times, rate)


def load_rows(path: str, build: Callable[[int, str, dict], Any], *, on_bad_row: str, limit: int) -> list:
    """`build(index, "file.jsonl:12", row)` of every row of a JSONL file, in file order; see `load_prompts`, which has
    the meaning of the arguments and the errors. `build` raises ValueError for a bad row."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: {'a folder, not a JSONL file' if os.path.isdir(path) else 'no such file'}")
    name = os.path.basename(path)
    # Bytes: of all the line separators that JSON strings may hold, only \n ends a row.
    lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows = [(f"{name}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()][:limit or None]
    if not rows:
        raise ValueError(f"{path}: empty file, no rows")

    def load_row(index: int, source: str, line: bytes) -> tuple[Any, str]:
        """What `build` makes of a line, and what is wrong with it."""
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            return None, f"{source}: invalid JSON ({error}); a row is one line"
        if not isinstance(row, dict):
            return None, f"{source}: a row must be a JSON object, not {row!r:.80}"
        try:
            return build(index, source, row), ""
        except ValueError as error:
            return None, f"{source}: {error}"

    Image.init()  # or the threads would race to load the plugins
    with ThreadPoolExecutor(8) as pool:  # headers wait for the file system, not for the processor
        loaded = list(pool.map(load_row, range(len(rows)), *zip(*rows)))
    good, bad = [row for row, problem in loaded if not problem], [problem for _, problem in loaded if problem]
    if bad and (on_bad_row == "error" or not good):
        raise ValueError("\n  ".join([f"{path}: {len(bad)} of {len(rows)} rows are bad", *bad[:5]]))
    if bad and int(os.environ.get("RANK", 0)) == 0:
        print(f"{path}: skipped {len(bad)} bad rows of {len(rows)}:", *bad[:5], sep="\n  ", flush=True)
    return good


def load_pixels(prompt: Prompt, processor: Processor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Decode the pictures and clips of a prompt: patches (ΣP, ...) or tiles (ΣT, 3, h, w) float32, and grids (I, G) int64,
    G up to 3; None without either.

    Raises ValueError: a body that cannot be decoded, or a file that changed since it was loaded.
    """
    if not prompt.images:
        return None
    pixels, found = zip(*(_patches(processor, read_image(path)) if isinstance(path, str) else
                          _clip_patches(processor, read_clip(path, processor.video_frames)) for path in prompt.images))
    if found != (promised := tuple(grid[:3] for grid in prompt.grids)):
        names = ", ".join(path if isinstance(path, str) else path[0] for path in prompt.images)
        raise ValueError(f"{names}: patch grids {promised} by the headers, {found} decoded: "
                         "changed since loaded, or EXIF behind the body of a PNG (--verify_images reads it)")
    return torch.cat(pixels), torch.tensor(found)


def _patches(processor: Processor, image: Image.Image) -> tuple[torch.Tensor, tuple[int, ...]]:
    """One picture by the family's image processor, and its grid by what came out."""
    layout = processor.layout
    batch = processor.image_processor(images=[[image]] if layout == "idefics3" else [image], return_tensors="pt",
                                      **processor.call)
    pixels = batch["pixel_values"]
    if layout == "qwen":
        return pixels, tuple(batch["image_grid_thw"][0].tolist())
    if layout == "idefics3":
        return pixels[0], (int(batch["rows"][0][0]), int(batch["cols"][0][0]))
    if layout == "internvl":
        return pixels, (len(pixels),)
    if layout == "llava_next":
        return pixels[0], tuple(batch["image_sizes"][0].tolist())
    if layout == "pixtral":           # pictures of all sizes: as patches they stand one behind the other
        side, grid = processor.config.vision_config.patch_size, tuple(batch["image_sizes"][0].tolist())
        patches = pixels[0].unfold(1, side, side).unfold(2, side, side)                                  # (3, h, w, s, s)
        return patches.permute(1, 2, 0, 3, 4).flatten(0, 1), grid
    return pixels, tuple(pixels.shape[-2:])


def _clip_patches(processor: Processor, frames: list[Image.Image]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The frames of a clip as (t * h * w, 3 * deep * side**2) patches in the order of the families' video processors, and
    (t, h, w). The last frame is repeated to fill the last temporal patch."""
    deep, side = processor.config.vision_config.temporal_patch_size, processor.patch_size
    if any(frame.size != frames[0].size for frame in frames):
        raise ValueError(f"frames of a clip differ in size: {sorted({frame.size for frame in frames})}")
    width, height = processor.frame_size(*frames[0].size, len(frames))
    frames = [frame.resize((width, height), processor.frame_processor.resample) for frame in frames]
    frames += frames[-1:] * (-len(frames) % deep)
    pixels = processor.frame_processor(images=frames, return_tensors="pt")["pixel_values"]       # each frame `deep` times
    pixels = pixels.view(len(frames) // deep, deep, -1, 3, deep, side**2)[:, :, :, :, 0]               # (t, deep, hw, 3, s s)
    grid = len(pixels), height // side, width // side
    return pixels.permute(0, 2, 3, 1, 4).reshape(math.prod(grid), -1), grid


@dataclass
class StepPrompts:
    """The prompts of one step. Each rank decodes, and computes features for, the pictures of its own prompts only."""

    prompts: list[Prompt]
    draws: list[int]                               # number of this draw among all prompts ever taken
    owners: list[int]                              # rank that rolls the prompt out
    positions: dict[int, torch.Tensor]             # (3, P) for the prompts needed so far
    patches: dict[int, tuple]                      # own pictures, until their features exist; to the end if a tower is trained
    features: dict[int, torch.Tensor]              # own features, (K, M, H) on the CPU
    dropped: list[int]                             # prompts whose pictures do not decode (--on_bad_row skip)

    @functools.cached_property                                 # read for every prompt of thousands
    def lengths(self) -> list[int]:
        return [len(prompt.input_ids) for prompt in self.prompts]


class PromptLoader:
    """Decodes the pictures of the next step in threads while the model works on this one.

    Args:
        choose: 0-based step -> its prompts and their draw numbers, or None behind the last step.
        on_bad_row: "error" or "skip", for pictures whose body does not decode.
        dropped: prompts dropped so far.
    """

    def __init__(self, processor: Processor, threads: int, on_bad_row: str, choose: Callable | None = None, dropped: int = 0):
        self.processor, self.on_bad_row, self.choose, self.dropped = processor, on_bad_row, choose, dropped
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="pictures")
        self.ahead: tuple | None = None                            # what is decoding for the next `take`

    def __enter__(self) -> "PromptLoader":
        return self

    def __exit__(self, *_) -> None:
        self.pool.shutdown(cancel_futures=True)

    def take(self, index: int, least: int = 1) -> StepPrompts:
        """The prompts of the 0-based step ``index``, decoded; from now on those of the next one decode. Steps are taken in
        order. Raises UserError: of prompts whose pictures decode there are not ``least``."""
        prompts = self.collect(*(self.ahead or self.submit(*self.choose(index))))
        following = self.choose(index + 1)
        self.ahead = following and self.submit(*following)
        if len(prompts.prompts) - len(prompts.dropped) < least:
            raise UserError(f"no prompt is left of {len(prompts.prompts)} drawn together: no picture of "
                            f"{prompts.prompts[0].source} and the others decodes")
        return prompts

    def submit(self, prompts: list[Prompt], draws: list[int]) -> tuple:
        own = range(self.rank, len(prompts), self.world)
        return prompts, draws, {i: self.pool.submit(load_pixels, prompts[i], self.processor) for i in own}

    def collect(self, prompts: list[Prompt], draws: list[int], futures: dict) -> StepPrompts:
        """Wait for the pictures.

        Raises:
            UserError: on every rank, if a picture of any rank does not decode and ``on_bad_row`` is error.
        """
        patches, bad = {}, {}
        for i, future in futures.items():
            try:
                if (pixels := future.result()) is not None:
                    patches[i] = pixels
            except ValueError as error:
                bad[i] = f"{prompts[i].source}: {error}"
        problems = {int(i): message for part in all_gather_json(bad) for i, message in part.items()}
        if problems and self.on_bad_row == "error":
            raise UserError("\n".join(problems.values()))
        if problems and self.rank == 0:
            print(f"dropped {len(problems)} of {len(prompts)} prompts:", *[*problems.values()][:5], sep="\n  ", flush=True)
        self.dropped += len(problems)
        owners = [i % self.world for i in range(len(prompts))]
        return StepPrompts(prompts, draws, owners, {}, patches, {}, sorted(problems))


def user_text(messages: list[dict]) -> str:
    """What the user says in the messages of a prompt, without markup and image places."""
    return "\n".join(part["text"] for m in messages if m["role"] == "user" for part in m["content"] if part["type"] == "text")


def question_text(messages: list[dict], images: int, plain: Callable[[str], str] = str) -> str:
    """What the user says, each text made `plain`, for a question about it and the prompt's `images` pictures and clips: with
    their places; without where they come before all text, as in a row that does not say where, or not from the user."""
    users = [m["content"] for m in messages if m["role"] == "user"]
    kinds = [part["type"] for content in users for part in content]
    first = "text" not in kinds[:images] or len(kinds) - kinds.count("text") != images
    said = lambda part: plain(part["text"]) if part["type"] == "text" else "" if first else f"<{part['type']}>"  # noqa: E731
    return "\n".join("".join(map(said, content)) for content in users)


# ---------------------------------------------------------------------------------------------------------------------
# Judgements: rows to questions, targets and verdicts. judge.json holds what is needed to ask in the same way.
# ---------------------------------------------------------------------------------------------------------------------


# kind: (template, verdicts, what a template must hold). The verdicts of scores are those of the training rows.
JUDGEMENTS = {
    "pictures": ("Request: {prompt}\nPicture A: <image>\nPicture B: <image>\nWhich picture fits the request better? "
                 "End with <answer>A</answer>, <answer>B</answer> or <answer>tie</answer>.",
                 ["A", "B", "tie"], ["{prompt}"]),
    "answers": ("Question: {prompt}\nAnswer A: {response_a}\nAnswer B: {response_b}\nWhich answer is better? End with "
                "<answer>A</answer>, <answer>B</answer> or <answer>tie</answer>.",
                ["A", "B", "tie"], ["{prompt}", "{response_a}", "{response_b}"]),
    "correct": ("Question: {prompt}\nAnswer: {response}\nIs the answer correct? End with <answer>yes</answer> or "
                "<answer>no</answer>.", ["yes", "no"], ["{prompt}", "{response}"]),
    "score": ("Question: {prompt}\nAnswer: {response}\nHow good is the answer? End with <answer>its score</answer>.",
              [], ["{prompt}", "{response}"]),
}
VERDICT_FRAME = "<answer>{verdict}</answer>"
SWAPPED = {"A": "B", "B": "A"}
# The field that tells a row's kind (the first that is there), the kind, further fields beside prompt, images, source.
JUDGEMENT_FIELDS = {"score": ("score", {"question", "response", "critique"}),
                    "correct": ("correct", {"question", "response", "critique"}),
                    "responses": ("answers", {"preferred", "critique"}), "preferred": ("pictures", {"critique"}),
                    "response": ("response", {"messages"})}


def fill(template: str, **values: str) -> str:
    """Replace {name} in one pass: a value that holds braces stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def parse_verdict(text: str, which: str, words: list[str] | None) -> str | None:
    """The verdict of a judgement: one of ``words`` (None: any text), numbers by their value; None if there is none."""
    def spell(word: str) -> str:
        try:
            return f"{float(word):g}"
        except ValueError:
            return word.lower()

    found = re.findall(r"<answer>((?:(?!</?answer>).)*+)</answer>", text, re.DOTALL)
    said = found[0 if which == "first" else -1].strip() if found else ""
    return (said or None) if words is None else {spell(word): word for word in words}.get(spell(said))


def judge_settings(saved: dict, templates: dict[str, str] = {}, system_instruction: str = "", which: str = "auto") -> dict:
    """Content of judge.json: what is given, else what the ``saved`` one of the checkpoint says, else built in.

    which: the <answer> that is the verdict, first or last; auto: as saved, or last. Raises ValueError: a bad template.
    """
    kinds = {}
    for kind, (template, words, needed) in JUDGEMENTS.items():
        old = saved.get("kinds", {}).get(kind, {})
        text, pictures = templates.get(kind) or old.get("template") or template, 2 * (kind == "pictures")
        if not all(part in text for part in needed) or text.count("<image>") != pictures:
            raise ValueError(f"--{kind}_template must hold {', '.join(needed)} and {pictures} <image>: {text!r:.200}")
        kinds[kind] = {"template": text, "verdicts": old.get("verdicts") or words, "examples": 0, "critiques": 0}
    return {"system_instruction": system_instruction or saved.get("system_instruction", ""), "answer": VERDICT_FRAME,
            "which_answer": which if which != "auto" else saved.get("which_answer", "last"), "kinds": kinds}


def count_judgements(judge: dict, seen: list[tuple[str, str, bool]]) -> None:
    """Note in judge.json's content what the judge is trained on: (kind, verdict, whether the verdict stands alone).

    Raises ValueError: too many different scores.
    """
    for kind, settings in judge["kinds"].items():
        own = [(verdict, bare) for seen_kind, verdict, bare in seen if seen_kind == kind]
        settings |= {"examples": len(own), "critiques": sum(not bare for _, bare in own)}
        if kind == "score" and own:
            settings["verdicts"] = sorted({verdict for verdict, _ in own}, key=float)
            if len(settings["verdicts"]) > 32:
                raise ValueError(f"--data: {len(settings['verdicts'])} different scores; round them to at most 32")


def check_judgement(row: dict) -> tuple[str, str]:
    """The field that tells the kind of a row, and the kind. Raises ValueError: unknown, missing or wrong fields."""
    mark = next((field for field in JUDGEMENT_FIELDS if field in row), None)
    if mark is None:
        raise ValueError("a row needs a target: one of the fields response, preferred, correct and score")
    kind, extra = JUDGEMENT_FIELDS[mark]
    known = {mark, "prompt", "images", "videos", "source"} | extra
    if unknown := sorted(set(row) - known):
        raise ValueError(f"unknown field {', '.join(map(repr, unknown))} beside {mark!r}; known are "
                         f"{', '.join(sorted(known))}")
    prompts = [row[field] for field in ("prompt", "question", "messages") if field in row]
    pair, score = row.get("responses", ["", ""]), row.get("score", 0)
    rules = {
        "one prompt": len(prompts) == 1 and isinstance(prompts[0], (str, list) if kind == "response" else str),
        "texts as response, critique and source": all(isinstance(row.get(field), str | None) for field in (
            "response", "critique", "source")) and not ("response" in known and row.get("response") is None),
        "a response that is not empty": kind != "response" or bool(str(row["response"]).strip()),
        "two texts as responses": isinstance(pair, list) and [type(text) for text in pair] == [str, str],
        "two images or two responses": kind != "pictures" or (
            [type(item) for item in media_list(row.get("images"), row.get("videos"))] == [str, str]),
        "A, B or tie as preferred": kind not in ("pictures", "answers") or row.get("preferred") in ("A", "B", "tie"),
        "true or false as correct": isinstance(row.get("correct", True), bool),
        "a finite number as score": type(score) in (int, float) and abs(score) < 1e300,      # an int may be beyond floats
    }
    if wrong := [need for need, holds in rules.items() if not holds]:
        raise ValueError(f"a row with {mark!r} needs {'; '.join(wrong)}")
    return mark, kind


def read_judgement(row: dict, judge: dict, orders: str) -> list[dict]:
    """What a row asks and wants to hear, once per order: kind, order, prompt (for the system instruction), question,
    images, text, verdict. Raises ValueError."""
    _, kind = check_judgement(row)
    prompt = next(row[field] for field in ("prompt", "question", "messages") if field in row)
    images, critique = media_list(row.get("images"), row.get("videos")), row.get("critique") or ""
    ask = {"kind": kind, "order": "given", "prompt": prompt, "question": prompt, "images": images}
    if kind == "response":
        return [ask | {"text": row["response"], "verdict": parse_verdict(row["response"], judge["which_answer"], None)}]
    if kind != "pictures" and sum(map(prompt.count, PLACES)) == len(images):     # else `make_prompt` says what is wrong
        prompt = question_text(_turns(prompt), len(images))
    pair = kind in ("pictures", "answers")
    both = pair and orders == "both"
    if both and re.search(r"\b(?i:pictures?|images?|answers?|responses?|options?) [AB]\b", critique):
        raise ValueError(f"write {{A}} and {{B}} for the names, which change in the other order: {critique!r:.120}")
    plain = functools.partial(re.sub, "|".join(PLACES), " ")     # what is judged has no pictures, whatever it says
    examples = []
    for order, turn in (("given", 1), ("swapped", -1))[:2 if both else 1]:
        first, second = map(plain, row.get("responses", ["", ""])[::turn])
        verdict = row.get("preferred") or (
            f"{row['score']:g}" if kind == "score" else judge["kinds"][kind]["verdicts"][not row["correct"]])
        verdict = SWAPPED.get(verdict, verdict) if turn < 0 else verdict
        said = fill(critique, **dict(zip("AB", "AB"[::turn]))) if pair else critique
        question = fill(judge["kinds"][kind]["template"], prompt=prompt, response=plain(row.get("response", "")),
                        response_a=first, response_b=second)
        text = said + "\n" * bool(said) + fill(judge["answer"], verdict=verdict)
        if parse_verdict(text, judge["which_answer"], [verdict]) is None:
            raise ValueError(f"the critique has an <answer> of its own, and the {judge['which_answer']} of a judgement is its "
                             f"verdict (--verdict): {critique!r:.120}")
        examples.append(ask | {"order": order, "question": question, "verdict": verdict, "text": text,
                               "images": images[::turn] if kind == "pictures" else images})
    return examples


def answer_frame(processor: Processor) -> tuple[str, int]:
    """What the chat template writes between generation prompt and answer (LLaVA: a space), and the end token after."""
    tokenizer, said = processor.tokenizer, {"user": "(a question)", "assistant": "(the answer)"}
    chat = [{"role": role, "content": text if processor.layout == "text" else _parts(text)} for role, text in said.items()]
    head = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
    before, found, tail = tokenizer.apply_chat_template(chat, tokenize=False).partition(said["assistant"])
    if not found:
        raise ValueError("the chat template leaves out what the assistant says")
    ends = [i for i in tokenizer.encode(tail, add_special_tokens=False) if i in processor.stop_ids]
    return before.removeprefix(head) if before.startswith(head) else "", [*ends, tokenizer.eos_token_id][0]


def encode_target(processor: Processor, frame: tuple[str, int], text: str) -> torch.Tensor:
    """(n,) label tokens of an answer: its own, as generation would see them, and the end token. Raises ValueError."""
    if typed := [token for token in processor.reserved_tokens if token in text]:
        raise ValueError(f"special token {typed[0]} in the target")
    ids = processor.tokenizer.encode(frame[0] + text, add_special_tokens=False)
    return torch.tensor([*ids, frame[1]], dtype=torch.int64)


def judge_prompt(processor: Processor, ask: dict, index: int, source: str, **options) -> Prompt:
    """The prompt of one entry of `read_judgement`, under the judge's system instruction; ``options`` are those of
    `make_prompt`. Raises ValueError."""
    system = processor.files["judge"]["system_instruction"]
    if "{prompt}" in system:
        system = fill(system, prompt=user_text(_turns(ask["prompt"])))
    return make_prompt(processor, index, source, ask["question"], ask["images"], system_prompt=system, **options)


def load_judgements(path: str, processor: Processor, *, on_bad_row: str, limit: int, **options) -> list[Prompt]:
    """Rows of judgements as prompts, pairs in both orders: the reference is the verdict, the label the row's kind. See
    `load_prompts` for the rest."""
    def build(index: int, source: str, row: dict) -> list[Prompt]:
        asks = read_judgement(row, processor.files["judge"], "both")
        if asks[0]["verdict"] is None:
            raise ValueError("the response has no <answer>: no verdict to compare with")
        return [judge_prompt(processor, ask, 2 * index + k, source, folder=os.path.dirname(os.path.abspath(path)),
                             reference=ask["verdict"], label=ask["kind"], **options) for k, ask in enumerate(asks)]

    return [prompt for row in load_rows(path, build, on_bad_row=on_bad_row, limit=limit) for prompt in row]


# ---------------------------------------------------------------------------------------------------------------------
# Attention: packed rows (training, scoring, prefill) and decoding over KV slots
# ---------------------------------------------------------------------------------------------------------------------

ATTENTION_NAME = "packed_rows"           # registered for the language model
VISION_ATTENTION_NAME = "packed_flash_"  # and the back-end: transformers hands cu_seqlens only to names containing "flash"
BACKENDS = ("flash_attn", "varlen", "sdpa")
FLASH_ATTN_INSTALL = "pip install flash-attn --no-build-isolation"


def choose_attention(requested: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """Resolve ``--attention auto`` to a back-end that can run here. Raises ValueError: the requested one cannot, or flash_attn
    is there and does not load."""
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if requested == "auto":
        requested = "sdpa" if device.type != "cuda" or dtype == torch.float32 else "flash_attn" if has_flash else "varlen"
    if requested not in BACKENDS:
        raise ValueError(f"--attention {requested}: expected auto or one of {', '.join(BACKENDS)}")
    if requested != "sdpa" and device.type != "cuda":
        raise ValueError(f"--attention {requested} needs a CUDA device and this run is on {device.type}; use sdpa")
    if requested != "sdpa" and dtype == torch.float32:
        raise ValueError(f"--attention {requested} computes in bfloat16 only, and --dtype is float32; use sdpa")
    if requested == "flash_attn" and not has_flash:
        raise ValueError(f"--attention flash_attn: the package is not installed; build it with: {FLASH_ATTN_INSTALL}")
    if requested == "flash_attn":
        try:                                       # now, not after minutes of loading weights: wheels fit one torch only
            importlib.import_module("flash_attn").flash_attn_with_kvcache
        except (ImportError, OSError, AttributeError) as error:
            raise ValueError(f"--attention flash_attn: the package is installed, but cannot be used: {error}; build it anew "
                             f"with: {FLASH_ATTN_INSTALL}, or choose --attention varlen") from error
    return requested


def varlen_attention(q, k, v, cu_q, cu_k, max_q: int, max_k: int, scale: float, causal: bool, backend: str,
                     window: int | None = None):
    """Variable-length attention on CUDA. q (Tq, Hq, D); k, v (Tk, Hkv, D); cu_* (S+1,) int32 -> (Tq, Hq, D).

    With ``causal`` and more keys than queries the mask is aligned at the bottom right: query i of a segment sees the
    surplus keys and its own first i+1 (FlashAttention >= 2.1, Dao 2023). ``window``: of the keys before it and its own, only
    so many.
    """
    left = -1 if window is None else window - 1
    if backend == "flash_attn":
        from flash_attn import flash_attn_varlen_func
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=causal,
                                      window_size=(left, -1))
    from torch.nn.attention.varlen import varlen_attn          # a second of import
    options: dict[str, Any] = {"scale": scale, "window_size": (left, 0 if causal else -1)}
    if "enable_gqa" in varlen_attn.__kwdefaults__:             # torch 2.11 has no such flag, and does not compare the heads
        options["enable_gqa"] = True
    return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options)


def head_dim(text_config) -> int:
    """D, numbers in a head of a token's query, key or value."""
    return getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads


def cache_bytes(text_config, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * text_config.num_hidden_layers * text_config.num_key_value_heads * head_dim(text_config) * itemsize


class SlotCache:
    """Keys and values of the sequences being generated: (layers, slots, capacity, Hkv, D).

    A plain object, not a tensor in a dict: FSDP's input hooks would cast or copy the latter.
    """

    def __init__(self, text_config, slots: int, capacity: int, dtype: torch.dtype, device: torch.device):
        shape = (text_config.num_hidden_layers, slots, capacity, text_config.num_key_value_heads, head_dim(text_config))
        # In the memory of a CPU the tokens of a head lie side by side, as matrix products want them.
        order = (0, 1, 3, 2, 4) if device.type == "cpu" else (0, 1, 2, 3, 4)
        self.keys, self.values = (torch.empty_permuted(shape, order, dtype=dtype, device=device).zero_() for _ in range(2))
        self.slots, self.capacity = slots, capacity

    def move(self, source: list[int], target: list[int], longest: int) -> None:
        """Copy the first ``longest`` tokens of slots ``source`` over slots ``target`` (disjoint lists), by layers: of half the
        cache at once there would be no room for a copy."""
        source, target = (torch.tensor(slots, device=self.keys.device) for slots in (source, target))
        for cache in (*self.keys, *self.values):                                                 # (slots, capacity, Hkv, D)
            cache[target, :longest] = cache[source, :longest]


class PackedAttention:
    """Attention of one packed row: every segment is causal in itself and may see one earlier stretch in full.

    A prompt is a segment without prefix; each of its responses is a segment whose prefix is that prompt. Nothing else
    is visible, so a row may hold any number of groups. Built once per row and shared by all layers; it reaches the
    attention function as the keyword argument ``attention``. A layer with a sliding window sees only so many of these
    keys, the nearest: a segment's own tokens stand behind its prefix, wherever the row holds them.

    Args:
        segments: (start, end, prefix_start, prefix_end) in row order, covering the row; a fifth entry True where the
            segment's tokens see each other in both directions (see `attention_segments`).
        cache, plan: prefill. Keys and values of row ``plan[0][i]`` are stored at slot ``plan[1][i]``, position
            ``plan[2][i]``: one prompt may go to many slots.
    """

    def __init__(self, segments: list[tuple[int, int, int, int]], backend: str, device: torch.device,
                 cache: SlotCache | None = None, plan: tuple[torch.Tensor, ...] = ()):
        self.backend, self.cache, self.plan = backend, cache, plan
        table = np.asarray([(*segment, False)[:5] for segment in segments], dtype=np.int64)                # (S, 5)
        len_q = table[:, 1] - table[:, 0]
        len_k = len_q + table[:, 3] - table[:, 2]
        to_device = lambda array: torch.as_tensor(array).to(device, non_blocking=True)  # noqa: E731
        if backend == "sdpa":
            self.buckets, order, offset = [], np.empty(len_q.sum(), dtype=np.int64), 0
            for members in bucket_segments(len_q, len_k):
                q_rows, k_rows = bucket_indices(table[members])
                inside = np.arange(q_rows.shape[1])[None] < len_q[members][:, None]                        # (b, Lq)
                order[q_rows[inside]] = offset + np.flatnonzero(inside)
                offset += q_rows.size
                self.buckets.append((table[members], to_device(q_rows), to_device(k_rows)))
            self.order = to_device(order)        # (N,) where each row of the packed row lies in the buckets' outputs
            self.masks: dict[int | None, list[torch.Tensor | None]] = {}         # by window, made for the first such layer
            return
        self.calls, places = [], []              # segments that see both ways cannot share a call with the causal ones
        for both in sorted(set(table[:, 4])):
            part = table[:, 4] == both
            q_rows = np.concatenate([np.arange(start, end) for start, end, *_ in table[part]])
            k_rows = np.concatenate([np.arange(a, b) for start, end, p_start, p_end, _ in table[part]
                                     for a, b in ((p_start, p_end), (start, end))])
            cu_q, cu_k = (to_device(np.concatenate([[0], np.cumsum(n[part])]).astype(np.int32)) for n in (len_q, len_k))
            self.calls.append((None if part.all() else to_device(q_rows), None if len(k_rows) == len_q.sum() else
                               to_device(k_rows), cu_q, cu_k, int(len_q[part].max()), int(len_k[part].max()), not both))
            places.append(q_rows)
        self.order = to_device(np.argsort(np.concatenate(places))) if len(places) > 1 else None

    def __call__(self, layer: int, q, k, v, scale: float, window: int | None = None) -> torch.Tensor:
        """q (1, Hq, N, D), k and v (1, Hkv, N, D) -> (1, N, Hq, D)."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))                                              # (N, H, D)
        if self.cache is not None:
            rows, slots, positions = self.plan
            self.cache.keys[layer][slots, positions] = k[rows]
            self.cache.values[layer][slots, positions] = v[rows]
        if self.backend == "sdpa":
            return self._bucketed(q, k, v, scale, window)[None]
        outputs = []
        for q_rows, k_rows, cu_q, cu_k, max_q, max_k, causal in self.calls:
            # Repeats a prompt's keys per response; its backward sums their gradients.
            part = [x if rows is None else x.index_select(0, rows) for x, rows in ((q, q_rows), (k, k_rows), (v, k_rows))]
            outputs.append(varlen_attention(*part, cu_q, cu_k, max_q, max_k, scale, causal, self.backend, window))
        return (outputs[0] if self.order is None else torch.cat(outputs).index_select(0, self.order))[None]

    def _bucketed(self, q, k, v, scale: float, window: int | None) -> torch.Tensor:
        """One SDPA call per bucket of similar segments; (N, H, D) -> (N, Hq, D)."""
        if window not in self.masks:
            masks = [bucket_mask(table, window) for table, *_ in self.buckets]
            self.masks[window] = [mask if mask is None else torch.from_numpy(mask).to(q.device) for mask in masks]
        outputs = []
        for (_, q_rows, k_rows), mask in zip(self.buckets, self.masks[window]):
            batch = [x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)        # (b, H, L, D)
                     for x, rows in ((q, q_rows), (k, k_rows), (v, k_rows))]
            out = F.scaled_dot_product_attention(*batch, attn_mask=mask, is_causal=mask is None, scale=scale,
                                                 enable_gqa=q.shape[1] != k.shape[1])
            outputs.append(out.transpose(1, 2).flatten(0, 1))                                       # (b * Lq, Hq, D)
        return torch.cat(outputs).index_select(0, self.order)


def attention_segments(config, segments: list[tuple], image_rows: torch.Tensor) -> list[tuple]:
    """The segments of a row as the family's decoder attends to them. In Gemma3 the tokens of one picture see each other, so a
    prompt is cut into text and pictures, each of which has all before it as its prefix; ``image_rows`` (M,) ascending."""
    if layout(config) != "gemma3" or not len(image_rows):
        return segments
    rows = image_rows.cpu().numpy()
    pictures = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    pieces = []
    for start, end, *prefix in segments:
        at = start
        for first, behind in ((int(p[0]), int(p[-1]) + 1) for p in pictures if start <= p[0] < end):
            pieces += [(at, first, start, at), (first, behind, start, first, True)]
            at = behind
        pieces.append((at, end, *(prefix if at == start else (start, at))))
    return [piece for piece in pieces if piece[0] < piece[1]]


def bucket_segments(len_q: np.ndarray, len_k: np.ndarray, waste: float = 1.5, small: int = 1 << 14) -> list[np.ndarray]:
    """Group segments of similar size for one padded call each: a call costs about as much as ``small`` score entries,
    so padding up to ``waste`` times the true area, or up to ``small`` entries, is cheaper than another call.

    A segment without prefix has half its square as area, and so has a bucket of equal ones, which needs no mask: it pays
    for its whole rectangle once others join it."""
    order = np.lexsort((len_q, len_k, len_k > len_q))
    buckets, start, area = [], 0, 0.0
    max_q = max_k = 0
    for i, s in enumerate(order):
        own = len_q[s] * len_k[s] * (0.5 if len_q[s] == len_k[s] else 1.0)
        new_q, new_k = max(max_q, len_q[s]), max(max_k, len_k[s])
        maskless = len_q[order[start]] == len_k[s] == len_q[s]         # sorted: the first and the last being equal, all are
        padded = new_q * new_k * (i - start + 1) * (0.5 if maskless else 1.0)
        if i > start and padded > max(small, waste * (area + own)):
            buckets.append(order[start:i])
            start, area, new_q, new_k = i, 0.0, len_q[s], len_k[s]
        area, max_q, max_k = area + own, new_q, new_k
    return buckets + [order[start:]]


def bucket_indices(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row indices of a bucket of segments: table (b, 5) -> q_rows (b, Lq), k_rows (b, Lk). Padding points at the segment's
    first row."""
    start, end, p_start, p_end = (table[:, i:i + 1] for i in range(4))                                     # (b, 1)
    own, prefix = end - start, p_end - p_start
    i, j = np.arange(own.max())[None], np.arange((own + prefix).max())[None]
    q_rows = np.where(i < own, start + i, start)
    return q_rows, np.where(j < prefix, p_start + j, np.where(j < prefix + own, start + j - prefix, start))


def bucket_mask(table: np.ndarray, window: int | None) -> np.ndarray | None:
    """Which keys each query of a bucket sees, (b, 1, Lq, Lk) bool; None where plain causal attention is the same."""
    own, prefix, both = table[:, 1:2] - table[:, :1], table[:, 3:4] - table[:, 2:3], table[:, 4:] > 0      # (b, 1)
    if (prefix == 0).all() and (own == own[0]).all() and not both.any() and (window is None or own[0] <= window):
        return None
    i = np.minimum(np.arange(own.max()), own - 1)[..., None]    # (b, Lq, 1); padding sees something, or it would be NaN
    j = (np.arange((own + prefix).max()) - prefix)[:, None]     # (b, 1, Lk) place behind the prefix, below 0 inside it
    mask = (j < own[..., None]) & ((j <= i) | both[..., None])
    if window is not None:
        mask &= i - j < window
    return mask[:, None]


class DecodeAttention:
    """One new token for each of the first B slots: stores its key and value, then attends to the slot's own tokens.

    Args:
        lengths: (B,) tokens already stored in each slot (device tensor; the new token goes to this position).
        longest: host-side upper bound of ``lengths + 1``; on CUDA the cache capacity, so that nothing is baked in.
    """

    def __init__(self, cache: SlotCache, lengths: torch.Tensor, longest: int, backend: str):
        self.cache, self.lengths, self.longest, self.backend = cache, lengths, longest, backend
        self.slots = torch.arange(len(lengths), device=lengths.device)
        self.masks: dict[int | None, torch.Tensor] = {}                    # by window, made for the first such layer

    def mask(self, window: int | None) -> torch.Tensor:
        """(B * Hkv, 1, longest): 0 at the keys that the new tokens see, else -inf."""
        if window not in self.masks:
            age = self.lengths[:, None] - torch.arange(self.longest, device=self.lengths.device)       # (B, longest)
            mask = torch.zeros(age.shape, dtype=self.cache.keys.dtype, device=age.device)
            mask.masked_fill_((age < 0) | (age >= (window or self.longest)), -torch.inf)
            self.masks[window] = mask.repeat_interleave(self.cache.keys.shape[3], dim=0)[:, None]
        return self.masks[window]

    def __call__(self, layer: int, q, k, v, scale: float, window: int | None = None) -> torch.Tensor:
        """q (1, Hq, B, D), k and v (1, Hkv, B, D): the B tokens stand in one row -> (1, B, Hq, D)."""
        size, left = len(self.lengths), -1 if window is None else window - 1
        keys, values = self.cache.keys[layer], self.cache.values[layer]                        # (slots, M, Hkv, D)
        keys[self.slots, self.lengths] = k[0].transpose(0, 1)
        values[self.slots, self.lengths] = v[0].transpose(0, 1)
        q = q[0].transpose(0, 1)                                                                         # (B, Hq, D)
        if self.backend == "flash_attn":
            from flash_attn import flash_attn_with_kvcache
            out = flash_attn_with_kvcache(q[:, None], keys[:size], values[:size], softmax_scale=scale,
                                          cache_seqlens=(self.lengths + 1).int(), causal=True, window_size=(left, -1))[:, 0]
        elif self.backend == "varlen":    # the aten operator of every supported torch takes seqused_k, varlen_attn not
            bounds = torch.arange(size + 1, device=q.device, dtype=torch.int32)
            out = torch.ops.aten._flash_attention_forward(
                q, keys[:size].flatten(0, 1), values[:size].flatten(0, 1), bounds, bounds * self.cache.capacity, 1,
                self.cache.capacity, 0.0, False, False, scale=scale, window_size_left=left, window_size_right=-1,
                seqused_k=(self.lengths + 1).int())[0]
        else:                             # the query heads of one key head side by side: no repeated keys, no GQA path
            queries = q.reshape(size * keys.shape[2], -1, q.shape[-1])                              # (B * Hkv, G, D)
            k, v = (x[:size, :self.longest].transpose(1, 2).flatten(0, 1) for x in (keys, values))  # (B * Hkv, M, D)
            if q.dtype == torch.float32:  # SDPA costs up to twice as much for so few queries
                scores = torch.baddbmm(self.mask(window), queries, k.transpose(1, 2), alpha=scale)  # (B * Hkv, G, M)
                out = torch.bmm(scores.softmax(-1), v)
            else:                         # with scores and sums in float32
                out = F.scaled_dot_product_attention(queries, k, v, attn_mask=self.mask(window), scale=scale)
            out = out.view(q.shape)
        return out[None]


def _language_attention(module, query, key, value, attention_mask, scaling=None, attention=None, sliding_window=None, **_):
    """The attention function of the language model: ``attention`` is one of the two classes above."""
    return attention(module.layer_idx, query, key, value, scaling, sliding_window), None


def _vision_attention(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, cu_seq_lens_k=None,
                      max_length_q=None, max_length_k=None, *, backend: str, **_):
    """The vision tower's attention on CUDA: one varlen call per block, not one SDPA call per window."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu_q, cu_k = cu_seq_lens_q.int(), cu_seq_lens_k.int()
    return varlen_attention(q, k, v, cu_q, cu_k, int(max_length_q), int(max_length_k), scaling, False, backend)[None], None


# Registered without a mask function on purpose: transformers then builds no (N, N) mask and hands over None.
AttentionInterface.register(ATTENTION_NAME, _language_attention)
for _backend in ("flash_attn", "varlen"):
    AttentionInterface.register(VISION_ATTENTION_NAME + _backend, functools.partial(_vision_attention, backend=_backend))


# ---------------------------------------------------------------------------------------------------------------------
# The model in two stages: image features, then the language model on embeddings
# ---------------------------------------------------------------------------------------------------------------------


def language_model(model: nn.Module) -> nn.Module:
    """The decoder: a part of `model.model`, or all of it in a model of text only."""
    return getattr(model.model, "language_model", None) or getattr(model.model, "text_model", None) or model.model


def vision_parts(model: nn.Module) -> dict[str, nn.Module | nn.Parameter]:
    """What stands beside the decoder in `model.model`: tower, projector, a learnt newline. Empty where left out."""
    core, decoder = model.model, language_model(model)
    parts = {} if decoder is core else {**core._modules, **core._parameters}
    return {name: part for name, part in parts.items() if part is not None and part is not decoder}


def vision_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `vision_parts`."""
    return [p for part in vision_parts(model).values() for p in ([part] if torch.is_tensor(part) else part.parameters())]


def trained_parts(model: nn.Module) -> list[nn.Module]:
    """The decoder, and the vision tower if it is trained."""
    return [language_model(model), *([model.model.visual] if model.sees_pixels else [])]


def vision_inputs(config, patches: torch.Tensor, grids: torch.Tensor, items: tuple = ()) -> dict[str, torch.Tensor]:
    """What transformers takes for pictures, of any number of prompts, as `load_pixels` made them.

    items: the prompts' grids, which tell pictures and clips apart; without, the vision tower takes clips as pictures.
    """
    kind = layout(config)
    if kind == "qwen" and any(len(item) > 3 for item in items):
        is_clip = torch.tensor([len(item) > 3 for item in items])
        of_clip = is_clip.repeat_interleave(grids.prod(dim=1))                                               # (P,)
        inputs = {"pixel_values_videos": patches[of_clip], "video_grid_thw": grids[is_clip]}
        if config.model_type == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor([item[3] for item in items if len(item) > 3])
        return inputs if is_clip.all() else inputs | {"pixel_values": patches[~of_clip], "image_grid_thw": grids[~is_clip]}
    if kind == "qwen":
        return {"pixel_values": patches, "image_grid_thw": grids}
    if kind == "llava_next":
        return {"pixel_values": patches, "image_sizes": grids}
    if kind == "idefics3":
        return {"pixel_values": patches[None]}
    if kind != "pixtral":
        return {"pixel_values": patches}
    side, images = patches.shape[-1], patches.new_zeros(len(grids), 3, *grids.amax(dim=0).tolist())
    shapes = [(h // side, w // side) for h, w in grids.tolist()]
    for image, (h, w), part in zip(images, shapes, patches.split([h * w for h, w in shapes])):
        whole = part.view(h, w, 3, side, side).permute(2, 0, 3, 1, 4).reshape(3, h * side, w * side)
        image[:, :h * side, :w * side] = whole
    return {"pixel_values": images, "image_sizes": grids}


def token_types(config, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What transformers asks for in some families: which tokens are pieces of pictures (1) or clips (2)."""
    name = {"qwen": "mm_token_type_ids", "gemma3": "token_type_ids"}.get(layout(config))
    image, video = visual_token_ids(config)
    return {name: (input_ids == image).int() + 2 * (input_ids == video).int()} if name else {}


def image_features(model: nn.Module, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Run the vision tower on what `load_pixels` made of pictures of any number of prompts -> (K, M, H), M image tokens.

    K is 1, plus one per DeepStack level where the family has them (Qwen3-VL). Without gradient but for a trained tower.
    """
    weight = vision_parameters(model)[0]
    patches, grids = patches.to(weight.device, weight.dtype), grids.to(weight.device)
    with torch.set_grad_enabled(model.sees_pixels and torch.is_grad_enabled()):
        out = model.model.get_image_features(**vision_inputs(model.config, patches, grids), return_dict=True)
    levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    return torch.stack([(level if torch.is_tensor(level) else torch.cat(list(level))).flatten(0, -2) for level in levels])


def language_hidden(model: nn.Module, row, attention) -> torch.Tensor:
    """Last hidden states of a packed row, (N, H).

    ``row`` has input_ids (1, N), positions (3, 1, N), image_rows (M,) and features (K, M, H) or None, or pixels (1, P, D) with
    the ``grids`` (I, 3) of their pictures, for the features to be computed here, inside FSDP's forward. Families without
    rotary positions in three dimensions have three equal rows of them. The fourth row of the others, which transformers
    reads to detect packing, is zero: our attention goes by segments and no mask is built.
    """
    decoder = language_model(model)
    embeds = decoder.get_input_embeddings()(row.input_ids)                                               # (1, N, H)
    deepstack: dict[str, Any] = {}
    features = row.features
    if row.grids is not None:
        features = image_features(model, features[0], row.grids)
        if not len(row.image_rows):                  # a stand-in: every rank takes part in the collectives of the tower
            embeds, features = embeds + 0.0 * features.sum(), None
    if features is not None:
        features = features.to(embeds.dtype)
        embeds = embeds.index_copy(1, row.image_rows, features[:1])
        if len(features) > 1:
            is_image = torch.zeros_like(row.input_ids, dtype=torch.bool).index_fill(1, row.image_rows, True)
            deepstack = {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(features[1:])}
    positions = row.positions[0]                                                                             # (1, N)
    if hasattr(model.model, "get_rope_index"):
        positions = torch.cat([torch.zeros_like(row.positions[:1]), row.positions])                       # (4, 1, N)
    return decoder(inputs_embeds=embeds, position_ids=positions, use_cache=False, attention=attention,
                   **deepstack).last_hidden_state[0]


def row_pictures(model: nn.Module, prompts: StepPrompts, groups: Iterable[int],
                 dtype: torch.dtype) -> tuple[dict[int, torch.Tensor], dict[int, tuple[int, ...]]]:
    """What packed rows hold of the pictures of ``groups``, this rank's own, and the shapes of all, by prompt: image features
    (K, M, H), or pixels (1, patches, patch size) for a model that trains its tower."""
    config, grids = model.config, {g: prompts.prompts[g].grids for g in groups if prompts.prompts[g].grids}
    if not model.sees_pixels:
        levels = 1 + len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or [])
        hidden_size = config.get_text_config().hidden_size
        return prompts.features, {g: (levels, prompts.prompts[g].image_tokens, hidden_size) for g in grids}
    size = math.prod(model.model.visual.patch_embed.proj.weight.shape[1:])
    return ({g: prompts.patches[g][0][None].to(dtype) for g in grids if g in prompts.patches},
            {g: (1, sum(math.prod(grid[:3]) for grid in grids[g]), size) for g in grids})


def with_grids(model: nn.Module, row, prompts: list[Prompt]):
    """A row with the grids of its ``prompts``' pictures and clips; without any, with one of zeros that no token stands for."""
    grids, side = [grid[:3] for prompt in prompts for grid in prompt.grids], model.config.vision_config.spatial_merge_size
    if grids:
        return replace(row, grids=torch.tensor(grids))
    nothing = torch.zeros(1, side * side, math.prod(model.model.visual.patch_embed.proj.weight.shape[1:]))
    return replace(row, grids=torch.tensor([[1, side, side]]), features=nothing)


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules that choose the experts of each MoE layer and return (router logits, ...); none in a dense model."""
    return [module for module in language_model(model).modules() if type(module).__name__.endswith("TopKRouter")]


@contextmanager
def router_logits(model: nn.Module):
    """Inside, each forward of the decoder appends the router logits (L, E) of its MoE layers to the list it yields."""
    found: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda module, args, out: found.append(out[0])) for router in routers(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def prompt_positions(model: nn.Module, prompt: Prompt) -> torch.Tensor:
    """(3, P) rotary positions of a prompt by the model's own rule; its response continues at ``max + 1``."""
    ids = prompt.input_ids[None]
    if not prompt.grids or not hasattr(model.model, "get_rope_index"):
        return torch.arange(ids.shape[1]).expand(3, -1)
    clips = [grid for grid in prompt.grids if len(grid) > 3]
    images = [grid for grid in prompt.grids if len(grid) == 3]
    positions, _ = model.model.get_rope_index(
        ids, **token_types(model.config, ids), image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor([clip[:3] for clip in clips]) if clips else None,
        second_per_grid_ts=torch.tensor([clip[3] for clip in clips]))
    return positions[:, 0]


def positions_of(model: nn.Module, prompts: StepPrompts, group: int) -> torch.Tensor:
    """(3, P) rotary positions of a prompt, computed at first use."""
    if group not in prompts.positions:
        prompts.positions[group] = prompt_positions(model, prompts.prompts[group])
    return prompts.positions[group]


# ---------------------------------------------------------------------------------------------------------------------
# Loading: parameters on meta, sharded from outside, then streamed from safetensors into the shards
# ---------------------------------------------------------------------------------------------------------------------

# Hub files and modules spell the same weights differently; tried in this order.
KEY_SPELLINGS = ((r"^", ""), (r"^visual\.", "model.visual."), (r"^model\.(?!visual|language_model)", "model.language_model."),
                 (r"^language_model\.model\.", "model.language_model."), (r"^language_model\.", ""),
                 (r"^(?:model\.)?vision_tower\.(?:vision_model\.)?", "model.vision_tower."),
                 (r"^(multi_modal_projector|image_newline)", r"model.\1"))
VISION_KEYS = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.", "image_newline")


def resolve_folder(name: str, weights: bool = True) -> Path:
    """A local checkpoint folder, the one that a pointer file names (<out>/export/latest), or the downloaded snapshot of a
    hub name; without ``weights``, of its small files only. Raises ValueError: no folder, and nothing that the hub gives."""
    if Path(name).is_dir():
        if not Path(name, "config.json").is_file():
            raise ValueError(f"checkpoint {name}: no config.json, so this is no model in Hugging Face format; a run's models "
                             "are <out>/export/step-N")
        return Path(name)
    if Path(name).name == "latest" and Path(name).is_file():
        return Path(name).parent / Path(name).read_text(errors="replace").strip()
    if Path(name).exists() or name.startswith((".", "/")) or name.count("/") != 1:
        raise ValueError(f"checkpoint {name}: no such folder (a hub name looks like owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    try:
        patterns = ["*.json", "*.txt", "*.jinja", "*.model"] + ["*.safetensors"] * weights
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns="consolidated*"))    # Mistral's own copy
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"checkpoint {name}: no such folder, and the hub gave: {str(error).splitlines()[0]}") from error


def with_same_tower(name: str, actor_folder: Path, actor_config, own_tower: bool = False) -> tuple[Path, Any]:
    """The folder of a role's own checkpoint and its config, or the actor's if ``name`` is empty. Without a tower of its own, a
    role uses the actor's image features. Raises ValueError: its checkpoint has another tower, so its language model expects
    other features, or another vocabulary."""
    if not name:
        return actor_folder, actor_config
    folder = resolve_folder(name, weights=any(actor_folder.glob("*.safetensors")))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)       # same shapes do not make the same model
    size, tokens = (c.get_text_config().vocab_size for c in (config, actor_config))
    if size != tokens:
        raise ValueError(f"{folder}: vocab_size {size}, the actor's is {tokens}: critic and reference read its tokens")
    if not own_tower and (different := differing_tower(actor_folder, folder)):
        raise ValueError(f"{folder}: {len(different)} weights of its vision tower differ from those of {actor_folder} (such "
                         f"as {different[0]}); critic and reference work on the image features of the actor")
    return folder, config


def differing_tower(first: Path, second: Path) -> list[str]:
    """Names of the vision tower's weights that are not the same in two checkpoints; none if a plan has fetched no weights."""
    if not all(any(folder.glob("*.safetensors")) for folder in (first, second)):
        return []
    a, b = vision_tensors(first), vision_tensors(second)
    return sorted(key for key in a | b if key not in a or key not in b or not torch.equal(a[key](), b[key]()))


def vision_tensors(folder: Path) -> dict[str, Any]:
    """name -> function that reads the weight, for the vision tower in a folder's safetensors files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = open_weights(path)
        for key in tensors.keys():
            if (name := key.removeprefix("model.")).startswith(VISION_KEYS):
                found[name] = functools.partial(tensors.get_tensor, key)
    return found


def open_weights(path: Path):
    """A safetensors file, whose tensors are read when asked for. Raises ValueError: no such file, or only a part of one."""
    if not path.exists():
        raise ValueError(f"{path.parent}: {path.name} is missing (weights are read from safetensors files only)")
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: {path.stat().st_size} bytes are no whole safetensors file ({error}); fetch it again (a git "
                         "clone without git-lfs leaves pointers of some 130 bytes)") from error


def skeleton(config, vision: bool = True, head: bool = True, sees_pixels: bool = False, longest: int = 0) -> nn.Module:
    """The checkpoint's model with parameters on the meta device and real buffers, for sequences of up to ``longest`` tokens.

    Only parameters are moved to meta: rotary frequencies are buffers in no file, and would come out of
    ``to_empty`` as garbage had they been built there. Without ``vision`` or ``head`` that part is left out. A model that
    ``sees_pixels`` computes image features in its own forward: its tower is trained, or is not the actor's.
    """
    if sees_pixels and layout(config) != "qwen":
        raise ValueError(f"--train_vision: the checkpoint is of the family {config.model_type}; only vision towers of Qwen-VL "
                         "can be trained")
    family, text = AutoModelForCausalLM if layout(config) == "text" else AutoModelForImageTextToText, config.get_text_config()
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(text, name, None):
            raise ValueError(f"the checkpoint's text model has {name} {getattr(text, name)}, which is not supported")
    register = nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:      # a tied weight is there already, and must stay one object
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta
    try:
        model = family.from_config(copy.deepcopy(config), dtype=torch.float32)     # writes into it
    finally:
        nn.Module.register_parameter = register
    decoder = language_model(model)
    rope, limit = str(decoder.rotary_emb.rope_type), text.max_position_embeddings
    if rope == "longrope" or any(name.endswith(".sinks") for name, _ in decoder.named_parameters()):
        raise ValueError(f"the checkpoint's text model {text.model_type} has rope_type longrope or attention sinks, which are "
                         "not supported")
    if rope == "dynamic":                   # changes with a batch's longest sequence, if beyond the limit, and only then
        if longest > limit:
            raise ValueError(f"the checkpoint's rope_type dynamic is supported up to its max_position_embeddings {limit}; the "
                             f"flags allow sequences of {longest} tokens")
        decoder.rotary_emb.rope_type = "default"           # need not look at the positions, which no CUDA graph can capture
    decoder.get_input_embeddings().padding_idx = None                  # EOS may serve as pad, and learns like any token
    for name in () if vision else vision_parts(model):
        setattr(model.model, name, None)
    if not head:
        model.lm_head = None
    model.sees_pixels = sees_pixels
    return model


def freeze(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Freeze parameters and keep them in the compute dtype: those of the vision tower are outside FSDP's precision policy, the
    others it would cast in every forward. Buffers stay float32."""
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)


class LoRALinear(nn.Linear):
    """A frozen linear layer with a trained adapter (Hu et al. 2021): x -> W x + scale B A x, A (r, in), B (out, r).

    Its weight keeps its name, so checkpoints load and export as without adapters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale if self.scale else out


def add_adapters(model: nn.Module, base: str, rank: int, alpha: int, targets: str, dtype: torch.dtype) -> None:
    """Freeze a skeleton, in the compute dtype; give linear layers of its decoder adapters in float32, scaled by alpha / rank.

    Args:
        targets: comma-separated suffixes of the layers' names; empty: every linear layer, attention and MLP.

    Raises:
        ValueError: a suffix that no linear layer of the decoder has.
    """
    freeze(model.parameters(), dtype)
    inside = set(language_model(model).layers.modules())
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and layer in inside}
    suffixes = tuple(f".{suffix.strip()}" for suffix in targets.split(",")) if targets else ("",)
    chosen = {name: layer for name, layer in layers.items() if name.endswith(suffixes)}
    if unknown := [suffix[1:] for suffix in suffixes if not any(name.endswith(suffix) for name in layers)]:
        raise ValueError(f"--lora_targets {targets}: no linear layer of the decoder ends in {', '.join(unknown)}; there are "
                         f"{', '.join(sorted({name.rpartition('.')[2] for name in layers}))}")
    for layer in chosen.values():
        layer.__class__, layer.scale = LoRALinear, alpha / rank
        layer.lora_A = nn.Parameter(torch.empty(rank, layer.in_features, device="meta"))
        layer.lora_B = nn.Parameter(torch.empty(layer.out_features, rank, device="meta"))
    # What PEFT's adapter_config.json says. Whole names: a suffix alone would also fit layers of a vision tower.
    model.adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
                     "lora_alpha": alpha, "target_modules": list(chosen), "lora_dropout": 0.0, "bias": "none",
                     "fan_in_fan_out": False, "inference_mode": True}


def init_adapters(model: nn.Module, seed: int) -> None:
    """A uniform within 1 / sqrt(in), B zero, alike on any number of ranks: a model begins as its base."""
    generator = torch.Generator().manual_seed(seed)
    for layer in filter(lambda module: isinstance(module, LoRALinear), model.modules()):
        values = torch.empty(layer.lora_A.shape).uniform_(-1, 1, generator=generator)                       # (r, in)
        copy_rows(layer.lora_A, values / layer.in_features ** 0.5)
        nn.init.zeros_(layer.lora_B)


@contextmanager
def without_adapters(model: nn.Module):
    """Inside, a model with adapters is its base: the reference of a KL needs no copy of the weights."""
    layers = [(layer, layer.scale) for layer in model.modules() if isinstance(layer, LoRALinear)]
    for layer, _ in layers:
        layer.scale = 0.0
    try:
        yield
    finally:
        for layer, scale in layers:
            layer.scale = scale


def use_attention(model: nn.Module, backend: str) -> None:
    """Point language model and vision tower at our attention functions."""
    model.config.get_text_config()._attn_implementation = ATTENTION_NAME
    language_model(model).config._attn_implementation = ATTENTION_NAME
    if layout(model.config) != "qwen":
        return                                   # the other towers have no windows: SDPA, their default, is one call per block
    # The name must be set on the config itself: set_attn_implementation tries to download a kernel called "*flash*".
    vision = VISION_ATTENTION_NAME + backend if backend != "sdpa" else "sdpa"
    model.config.vision_config._attn_implementation = vision
    if model.model.visual is not None:
        model.model.visual.config._attn_implementation = vision


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate meta parameters on ``device``, keeping the values of all buffers."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


VALUE_HEADS = ("value_head.weight", "score.weight")  # ours, and that of AutoModelForSequenceClassification


def load_weights(model: nn.Module, folder: Path, optional: dict[str, nn.Parameter] = {}) -> dict[str, str]:
    """Stream safetensors into a materialised, possibly sharded model; each rank reads only its own rows.

    Args:
        optional: further parameters by file key, loaded where the files have them (a value head).

    Returns:
        parameter name -> key in the files, so that an export can use the names the checkpoint came with.

    Raises:
        ValueError: no safetensors files, missing or quantized weights, two values for tied ones, or a shape that does not
            fit; names and shapes are given.
    """
    index = folder / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    spelled: dict[str, str] = {}
    read: set[int] = set()
    for file in files:
        with open_weights(folder / file) as tensors:
            for key in tensors.keys():
                name = next((n for n in (re.sub(old, new, key) for old, new in KEY_SPELLINGS) if n in parameters), None)
                target = parameters[name] if name else optional.get(key)
                if target is None:
                    continue                       # a part this role leaves out: the vision tower or the output head
                value = tensors.get_slice(key)
                if (kind := value.get_dtype()) not in ("F64", "F32", "BF16", "F16"):       # its scales stand under another key
                    raise ValueError(f"{folder / file}: {key} is of type {kind}; quantized weights are not supported")
                shape, wanted = tuple(value.get_shape()), tuple(target.shape)
                if shape != wanted and (not name or shape != as_in_files(model.config, name, target).shape):
                    raise ValueError(f"{folder / file}: {key} is {shape}, the model's config.json asks for {wanted}")
                before = shard_of(target).clone() if id(target) in read else None     # a tied head, in the files all the same
                copy_rows(target, value, turned=shape != wanted)
                if before is not None and not torch.equal(before, shard_of(target)):
                    raise ValueError(f"{folder / file}: {key} is not the weight that config.json ties it to; if both shall "
                                     "count, tie_word_embeddings must be false there")
                spelled[name or key] = key
                read.add(id(target))
    missing = [n for n, p in parameters.items() if id(p) not in read and ".lora_" not in n]
    if missing:
        raise ValueError(f"{folder}: {len(missing)} weights are in no file, the first: {', '.join(missing[:3])}")
    return spelled


def as_in_files(config, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A parameter as checkpoints hold it: those of Qwen3-VL-MoE have the matrices of the experts (E, I, O) transposed."""
    return weight.transpose(1, 2) if config.model_type == "qwen3_vl_moe" and ".mlp.experts." in name else weight


@torch.no_grad()
def copy_rows(target: torch.Tensor, value, turned: bool = False) -> None:
    """Copy a safetensors slice into a tensor, or this rank's rows of it into a DTensor sharded on dimension 0; if ``turned``,
    with dimensions 1 and 2 exchanged."""
    turn = (lambda rows: rows.transpose(1, 2)) if turned else (lambda rows: rows)
    if not isinstance(target, DTensor):
        target.copy_(turn(value[:]))
        return
    local = target.to_local()
    shard_dim = next(i for i, placement in enumerate(target.placements) if placement.is_shard())
    rows = -(-target.shape[0] // target.device_mesh.size(shard_dim))    # FSDP2 cuts into ceil-sized chunks
    start = rows * target.device_mesh.get_local_rank(shard_dim)
    if len(local):                                                       # the last ranks may have no row
        local.copy_(turn(value[start:start + len(local)]))


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a tensor that may be sharded; they share its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor, this rank's rows only if it is sharded, in the memory of ``device``: pinned if that is the host."""
    local = shard_of(tensor)
    if local.device == device:
        return tensor
    target = torch.empty_like(local, device=device, pin_memory=device.type == "cpu").copy_(local, non_blocking=True)
    # Not DTensor.from_local, which takes a shard back to the device of its mesh.
    return DTensor(target, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else target


def move_state(optimizer: torch.optim.Optimizer, device: torch.device, names: tuple[str, ...]) -> None:
    """Put the entries ``names`` of an optimizer's state into the memory of ``device``."""
    with torch.no_grad():
        for state in optimizer.state.values():
            state |= {name: placed(state[name], device) for name in names if name in state}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()                                  # before the host reads what is on its way


def move_module(module: nn.Module, device: torch.device) -> None:
    """Put the shards and buffers of a module that FSDP2 wraps into the memory of ``device``. Parameters stay the same objects,
    and FSDP2's own `_apply` tells each of its parts where they are now; forwards need them on the device of the mesh."""
    module._apply(lambda tensor: placed(tensor, device))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def unsharded(module: nn.Module):
    """Gather all weights once; inside, forwards run no collective, so ranks may do different amounts of work."""
    parts = [m for m in module.modules() if isinstance(m, FSDPModule)]
    module._get_fsdp_state()._lazy_init()      # a first unshard() below would otherwise initialise each part as a root
    for part in parts:                         # one after the other: what is gathered exists twice until it is in its place
        part.unshard()
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not module, recurse=False)
        clear_forward_order(module)


def clear_forward_order(module: nn.Module) -> None:
    """Forget forwards without a backward: FSDP2 records every forward and only a backward clears the record, so a
    frozen model, or a long rollout, would grow it without bound."""
    module._get_fsdp_state()._comm_ctx.post_forward_order.clear()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                if group is not None:
                    group._post_forward_indices.clear()


@contextmanager
def bare_forwards(model: nn.Module):
    """Skip what surrounds the layers and has nothing to do where the weights are gathered and everything is in the compute
    dtype already: FSDP2's hooks and transformers' wrappers (defaults, recording), a quarter of a toy's decoding step. FSDP's
    waits for its own streams could not be captured in a CUDA graph either."""
    core = language_model(model)
    parts = [part for part in core.modules() if isinstance(part, FSDPModule)]
    hooked = [(part, part._forward_pre_hooks, part._forward_hooks) for part in parts]
    for part, pre_hooks, hooks in hooked:
        state = part._get_fsdp_state()
        part._forward_pre_hooks, part._forward_hooks = OrderedDict(pre_hooks), OrderedDict(hooks)
        del part._forward_pre_hooks[state._pre_forward_hook_handle.id]
        del part._forward_hooks[state._post_forward_hook_handle.id]
    core.forward = inspect.unwrap(type(core).forward).__get__(core)
    try:
        yield
    finally:
        del core.forward
        for part, pre_hooks, hooks in hooked:
            part._forward_pre_hooks, part._forward_hooks = pre_hooks, hooks


# ---------------------------------------------------------------------------------------------------------------------
# Memory per GPU, of modules with parameters, which may be on meta: what --dry_run adds up. A module is a role's: its
# `model` and what the role adds to it. ``itemsize``: bytes of a number of the compute type.
# ---------------------------------------------------------------------------------------------------------------------


def count_parameters(module: nn.Module) -> dict[str, int]:
    """Parameters by part; a tied head counts with the embeddings, norms and value head with the rest."""
    decoder, head = language_model(module.model), module.model.lm_head
    embeddings = decoder.get_input_embeddings().weight
    parts = {"vision": vision_parameters(module.model), "layers": decoder.layers.parameters(), "embeddings": [embeddings],
             "head": [] if head is None or head.weight is embeddings else [head.weight]}
    counts = {name: sum(p.numel() for p in part) for name, part in parts.items()}
    total = sum(p.numel() for p in module.parameters())
    return counts | {"rest": total - sum(counts.values()), "total": total}


def resident_bytes(module: nn.Module, ranks: int, itemsize: int) -> dict[str, int]:
    """What a role keeps on a GPU between stages: shards, cut along the first dimension into ``ranks`` as FSDP2 cuts them, on
    the rank with the largest, in float32 but for what adapters freeze; Adam's two moments of trained ones; and, whole, the
    frozen vision tower."""
    tower = {id(p): p for p in vision_parameters(module.model) if not p.requires_grad}
    shares = {True: 0, False: 0}                                                        # numbers, by whether they are trained
    for p in module.parameters():
        if id(p) not in tower:
            shares[p.requires_grad] += -(-p.shape[0] // ranks) * (p.numel() // p.shape[0])
    frozen = itemsize if hasattr(module.model, "adapter") else 4
    return {"weights": 4 * shares[True] + frozen * shares[False], "Adam": 8 * shares[True],
            "tower": itemsize * sum(p.numel() for p in tower.values())}


def gathered_bytes(module: nn.Module, itemsize: int) -> tuple[int, int, int]:
    """Gathered weights of the root group (embeddings, head, norm), of the largest layer, and of all layers."""
    counts = count_parameters(module)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in language_model(module.model).layers]
    root = counts["embeddings"] + counts["head"] + counts["rest"]
    return itemsize * root, itemsize * max(layers), itemsize * sum(layers)


def layer_activations(module: nn.Module, itemsize: int) -> int:
    """Bytes per token that a decoder layer keeps for its backward: of every norm its input in float32 and its output before
    the scale; what the products read; queries, keys, values and output of the attention; four tensors of the MLP (gate,
    its activation, up, their product), in MoE for each expert of the token, with its input."""
    text, layer = module.model.config.get_text_config(), language_model(module.model).layers[-1]
    repeats = {"q_norm": text.num_attention_heads, "k_norm": text.num_key_value_heads}          # one scale for all heads
    norms = sum(p.numel() * repeats.get(name.split(".")[-2], 1) for name, p in layer.named_parameters() if "norm" in name)
    experts = text.num_experts_per_tok if routers(module.model) else 0
    inner = experts * text.moe_intermediate_size if experts else text.intermediate_size
    heads = 2 * head_dim(text) * (text.num_attention_heads + text.num_key_value_heads)
    return (4 + itemsize) * norms + itemsize * ((2 + experts) * text.hidden_size + heads + 4 * inner)


def backward_bytes(module: nn.Module, tokens: int, itemsize: int, checkpointing: bool, chunk: int) -> dict[str, int]:
    """Of an update by a row of so many tokens, without gathered weights and gradient shards: what the forward keeps, and the
    largest of what the backward adds to it: at the head, chunks of logits and the weight's gradient in float32; in a layer,
    the activations computed again, gradients of them, and those of two layers' weights before they are reduced, in the
    compute type and in float32; at the end, when nothing is kept any more, those of the root group's."""
    text, model = module.model.config.get_text_config(), module.model
    trained = lambda part: sum(p.numel() for p in part.parameters() if p.requires_grad)  # noqa: E731
    layers = language_model(model).layers
    own, hidden = tokens * layer_activations(module, itemsize), tokens * text.hidden_size
    kept = hidden * (4 + 4 * itemsize)                             # embeddings, with pictures, and the last norm
    kept += len(layers) * (itemsize * hidden if checkpointing else own)
    head = 0 if model.lm_head is None else model.lm_head.weight.numel() * model.lm_head.weight.requires_grad
    logits = 0 if model.lm_head is None else chunk * text.vocab_size
    at_head = max(12 * logits + 4 * head, (4 + itemsize) * logits + 8 * head)
    in_layer = own * checkpointing + own // 3 + 2 * max(map(trained, layers)) * (4 + itemsize) + itemsize * head
    root = trained(module) - trained(layers) - sum(p.numel() for p in vision_parameters(model) if p.requires_grad)
    return {"activations": kept, "backward": max(at_head, in_layer, root * (4 + itemsize) - kept)}
