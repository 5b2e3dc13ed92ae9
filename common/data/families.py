"""One class per family of models: how its images and videos become tokens, patches and inputs of
the vision tower.

    config.json      -> token ids, attention segments, inputs of the tower    family_of(config)
    small files      -> image processor, placeholders                         Family.prepare
    width, height    -> grid -> text in the prompt and its image tokens       grid, expand
    decoded image    -> patches, and the grid again, by its own size          patches

A grid is whatever determines the tokens of an image: (1, h, w) patches, (height, width) in pixels once
resized, tiles, or (rows, columns) of tiles. A clip's has more entries: (t, h, w) patches, seconds per
temporal patch, and the second at the middle of each.

A new family is a new class here, one entry in CLASSES, and a test: common/README.md.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as smart_resize_glm
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_clip

from common.data.images import sample_frames
from common.flags import DataArgs
from common.ground.files import UserError, check_form

Grid = tuple  # see above
Patches = tuple[Tensor, Grid]
Inputs = dict[str, Tensor]  # of a model of transformers, by name
Files = dict[str, dict]  # the small files of a checkpoint, by name
Expansion = tuple[str, list[int]]  # a text, and how often each image token in it is repeated
FamilySegment = tuple  # (start, end, prefix_start, prefix_end[, BOTH_WAYS or IN_WINDOWS])


# The tokens of a segment all attend to each other: in every layer, or in those with a sliding window.
BOTH_WAYS, IN_WINDOWS = 1, 2


def is_clip(grid: Grid) -> bool:
    return len(grid) > 3


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Around calls of transformers alone, which raises anything for settings and images that it cannot
    use: that becomes a UserError, which begins with ``what``. What a family's own code raises is a bug."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{what}: {error!r}") from error


class Family:
    """What the families have in common: square images of one size, one tensor of pixels, no
    videos."""

    model_types: tuple = ()
    media: tuple = ("image",)
    # The space in which published checkpoints answer with boxes and points (see `coordinates`), by model
    # type. Without an entry, because their makers do not say, --coordinates is needed.
    spaces: dict[str, str] = {}
    replies_show_images = True  # whether replies of environments may hold images
    # The image processors that a checkpoint may name; the first is used if it names none.
    image_processors: tuple = ()
    processor_options: dict = {}  # override what the files say
    # A pattern of special tokens around images that no config names. They are never sampled.
    unnamed_tokens = ""
    begins_image = "image_token_id"  # config key of what the chat template writes for an image
    sees_both_ways = ""  # supported use_bidirectional_attention of its decoder's config, if set
    types_input = ""  # the input that tells transformers what each token is
    # how keys of its tower and projector begin in files, without "model."
    vision_keys: tuple = ("vision_tower.", "multi_modal_projector.")
    packs_images = False  # whether its tower takes the patches of several images as one sequence
    image_processor: Any  # transformers' own, for images and for the frames of clips
    frame_processor: Any
    clip_grid: Callable  # only in families that take clips

    def __init__(self, config):
        self.config = config
        self.image_token_id = getattr(config, "image_token_id", -1)  # -1: no token has it
        self.video_token_id = -1
        # What the chat template writes for an image and a clip.
        self.placeholder = self.clip_placeholder = ""

    # What a model needs

    def visual_token_ids(self) -> Tensor:
        """(2,) the ids that stand for features in `input_ids`: a piece of an image, a piece of a
        clip."""
        return torch.tensor([self.image_token_id, self.video_token_id])

    def attention_segments(
        self, segments: list[FamilySegment], image_index: Tensor
    ) -> list[FamilySegment]:
        """The segments of a row as the family's decoder attends to them; ``image_index`` (M,) are the
        positions of its image tokens, ascending."""
        return segments

    def token_types(self, input_ids: Tensor) -> Inputs:
        """The input that marks, for some families of transformers, the tokens of images (1) and clips
        (2)."""
        images, clips = input_ids == self.image_token_id, input_ids == self.video_token_id
        return {self.types_input: images.int() + 2 * clips.int()} if self.types_input else {}

    def vision_inputs(self, patches: Tensor, grids: Tensor) -> Inputs:
        """What transformers takes for the images of any number of prompts, as `loader.load_pixels`
        made them; clips are passed as images."""
        return {"pixel_values": patches}

    # What reading rows needs

    def among(self, count: int) -> "Family":
        """The family as it treats the images of a prompt with ``count`` of them."""
        return self

    def prepare(self, files: Files, tokenizer, args: DataArgs) -> None:
        """Read from the files of a checkpoint how images are prepared. Raises UserError: they are
        missing, or another family's."""
        self.tokenizer = tokenizer
        self.video_frames, self.video_fps = args.video_frames, args.video_fps
        self.placeholder = self.token(getattr(self.config, self.begins_image))
        settings = settings_of_images(files)
        if not settings:
            raise UserError("no preprocessor_config.json; copy the base checkpoint's")
        kind = settings.get("image_processor_type", self.image_processors[0])
        name, _, _ = kind.partition("ImageProcessor")
        if name not in self.image_processors:
            raise UserError(
                f"preprocessor_config.json names the image processor {name!r}; "
                f"{self.config.model_type} needs {' or '.join(self.image_processors)}"
            )
        settings = self.processor_settings(settings, args) | self.processor_options
        blank = Image.new("RGB", (64, 64))
        with explained("preprocessor_config.json cannot be used"):
            maker = getattr(transformers, f"{name}ImageProcessorPil")
            self.image_processor = maker.from_dict(settings)
            self.image_processor(images=[blank], return_tensors="pt")
        self.patches(blank)

    def processor_settings(self, settings: dict, args: DataArgs) -> dict:
        """The settings of the image processor, with the changes that flags ask for."""
        if args.min_pixels or args.max_pixels:
            name = self.config.model_type
            raise UserError(
                f"--min_pixels and --max_pixels: {name} takes image sizes from its files"
            )
        return settings

    def token(self, token_id: int) -> str:
        return self.tokenizer.convert_ids_to_tokens(token_id)

    def grid(self, width: int, height: int) -> Grid:
        """The grid of an image of width x height pixels. Raises UserError: one side is too
        long for the other."""
        side = self.config.vision_config.image_size
        return side, side

    def seen_size(self, grid: Grid) -> tuple[int, int] | None:
        """(width, height) in pixels of an image as the model sees it; None: as squares or tiles."""
        return None

    def expand(self, grid: Grid) -> Expansion:
        """What stands for an image or clip in the prompt: the text that the family's own processor
        writes, and the numbers of features that the model makes by its config."""
        raise NotImplementedError

    def patches(self, image: Image.Image) -> Patches:
        """The patches that the family's image processor makes of an image, and its grid."""
        return self.prepared(image)["pixel_values"], self.grid(*image.size)

    def prepared(self, image: Image.Image) -> Inputs:
        return self.processed([image])

    def processed(self, images: list) -> Inputs:
        """What transformers makes of images. Raises UserError: it cannot, as where one has an odd shape."""
        with explained("the image processor cannot use this image"):
            return self.image_processor(images=images, return_tensors="pt")


def settings_of_images(files: Files) -> dict:
    """The settings of the image processor in a checkpoint's files."""
    return files["processor_config"].get("image_processor") or files["preprocessor_config"]


class TextOnly(Family):
    """Language models without a vision tower."""

    model_types = ("qwen2", "qwen3", "qwen3_5_text", "qwen3_5_moe_text", "llama", "mistral")
    media = ()
    replies_show_images = False

    def prepare(self, files: Files, tokenizer, args: DataArgs) -> None:
        self.tokenizer = tokenizer


class Qwen(Family):
    """Qwen-VL: images of any size as (1, h, w) patches, clips as (t, h, w), two frames deep."""

    model_types = (
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
    )
    # Qwen3-VL's README, its issue 1486 and its notebook of process_bbox; Qwen3.5 as ms-swift has it.
    spaces = dict.fromkeys(model_types, "1000") | {"qwen2_5_vl": "seen"}
    media = ("image", "video")
    vision_keys = ("visual.",)
    image_processors = ("Qwen2VL",)
    packs_images = True
    usual_pixels = 56 * 56, 28 * 28 * 1280  # fewest and most, if neither flags nor files set them
    types_input = "mm_token_type_ids"

    def __init__(self, config):
        super().__init__(config)
        tower = config.vision_config  # its weights have the shape of the patches
        self.patch_size, self.merge_size = tower.patch_size, tower.spatial_merge_size
        # pixels along a side of the square for one token
        self.side = self.patch_size * self.merge_size
        self.depth = tower.temporal_patch_size
        self.is_third = config.model_type.startswith("qwen3")
        self.video_token_id = config.video_token_id

    def vision_inputs(self, patches: Tensor, grids: Tensor) -> Inputs:
        return {"pixel_values": patches, "image_grid_thw": grids}

    def prepare(self, files: Files, tokenizer, args: DataArgs) -> None:
        super().prepare(files, tokenizer, args)
        self.clip_placeholder = self.token(self.video_token_id)
        if "video" in self.media:
            self.prepare_clips(files, args)
        if args.min_pixels or args.max_pixels:  # exports say so wherever a program may look
            nested = files["processor_config"].get("image_processor", {})
            for settings in (nested, files["preprocessor_config"]):
                settings |= self.processor_settings(settings, args) if settings else {}

    def prepare_clips(self, files: Files, args: DataArgs) -> None:
        """Set how the frames of clips are prepared. Older checkpoints have no settings for them, and
        treat them like images; exports have settings if flags change these."""
        self.max_frame_pixels = args.max_pixels
        settings = files["processor_config"].get("video_processor")
        settings = settings or files["video_preprocessor_config"]
        if not settings:
            settings = dict(settings_of_images(files))
            settings.pop("image_processor_type", None)
            if args.min_pixels or args.max_pixels:
                files["video_preprocessor_config"] = settings
        token = self.side**2
        frames = self.bounded(settings, (0, 0), (128 * token, 768 * token))
        frames |= {"do_resize": False, "temporal_patch_size": 1}
        with explained("the settings of videos cannot be used"):
            self.frame_processor = transformers.Qwen2VLImageProcessorPil.from_dict(frames)

    def processor_settings(self, settings: dict, args: DataArgs) -> dict:
        return self.bounded(settings, (args.min_pixels, args.max_pixels), self.usual_pixels)

    def bounded(self, settings: dict, flags: tuple, defaults: tuple) -> dict:
        """Settings with the fewest and most pixels from the flags, or else from the settings, which
        spell them in three ways. They include a size: given min_pixels without one, transformers
        5.17 would change the class's default, and so every later checkpoint."""
        check_form(settings, {"size?": dict}, "preprocessor_config.json")
        values = (settings.get("size") or {}) | {key: v for key, v in settings.items() if v}
        low = flags[0] or values.get("min_pixels") or values.get("shortest_edge") or defaults[0]
        high = flags[1] or values.get("max_pixels") or values.get("longest_edge") or defaults[1]
        with explained("preprocessor_config.json cannot be used"):
            low, high = int(low), int(high)  # some files hold them as text
        if low > high:
            raise UserError(f"min_pixels {low} is more than max_pixels {high}")
        return settings | {
            "min_pixels": low,
            "max_pixels": high,
            "size": {"shortest_edge": low, "longest_edge": high},
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "temporal_patch_size": self.depth,
        }

    def grid(self, width: int, height: int) -> Grid:
        bounds = self.image_processor.size
        h, w = self.resized(height, width, bounds["shortest_edge"], bounds["longest_edge"])
        return 1, h // self.patch_size, w // self.patch_size

    def resized(self, height: int, width: int, low: int, high: int) -> tuple[int, int]:
        """(height, width) of an image once resized to whole tokens and ``low`` to ``high`` pixels."""
        with explained("the image cannot be resized"):
            return smart_resize(height, width, self.side, low, high)

    def seen_size(self, grid: Grid) -> tuple[int, int]:
        return grid[2] * self.patch_size, grid[1] * self.patch_size

    def clip_grid(self, size: tuple[int, int], times: list[float], rate: float) -> Grid:
        """(t, h, w) patches of a clip's sampled frames, seconds per temporal patch, and the second
        at the middle of each of these; arguments as `images.clip_times` returns them."""
        picks = sample_frames(len(times), self.video_frames)
        width, height = self.frame_size(*size, len(picks))
        seconds = self.depth / (len(picks) / len(times) * rate)
        picks += picks[-1:] * (-len(picks) % self.depth)
        ends = zip(picks[:: self.depth], picks[self.depth - 1 :: self.depth])
        middles = [(times[first] + times[last]) / 2 for first, last in ends]
        return len(middles), height // self.patch_size, width // self.patch_size, seconds, *middles

    def frame_size(self, width: int, height: int, count: int) -> tuple[int, int]:
        """(width, height) to which the ``count`` frames of a clip are resized: Qwen2-VL and
        Qwen2.5-VL bound the pixels of a frame, Qwen3-VL those of all frames."""
        bounds = self.frame_processor.size
        low, high = bounds["shortest_edge"], bounds["longest_edge"]
        if self.is_third:
            with explained("the clip cannot be resized"):
                h, w = smart_resize_clip(count, height, width, self.depth, self.side, low, high)
        else:
            h, w = self.resized(height, width, low, high)
        if 0 < self.max_frame_pixels < h * w:
            h, w = self.resized(height, width, 0, self.max_frame_pixels)
        return w, h

    def expand(self, grid: Grid) -> Expansion:
        t, h, w = grid[:3]
        tokens = h * w // self.merge_size**2  # per temporal patch; an image has one
        if not is_clip(grid):
            return self.placeholder, [tokens]
        if not self.is_third:
            return self.clip_placeholder, [t * tokens]
        start = self.token(self.config.vision_start_token_id)
        end = self.token(self.config.vision_end_token_id)
        text = ""
        for second in grid[4:]:  # each temporal patch with its time
            text += f"<{second:.1f} seconds>{start}{self.clip_placeholder}{end}"
        return text, [tokens] * t

    def patches(self, *frames: Image.Image) -> Patches:
        """The patches and grid of an image; or of the frames of a clip, (t * h * w, 3 * deep * side**2)
        patches in the order of the families' video processors, and (t, h, w). The last frame is
        repeated to fill the last temporal patch."""
        if len(frames) == 1:
            return super().patches(*frames)
        deep, side = self.depth, self.patch_size
        width, height = self.frame_size(*frames[0].size, len(frames))
        resized = [frame.resize((width, height), self.frame_processor.resample) for frame in frames]
        resized += resized[-1:] * (-len(frames) % deep)
        pixels = self.frame_processor(images=resized, return_tensors="pt")["pixel_values"]
        grid = len(resized) // deep, height // side, width // side
        pixels = pixels.view(grid[0], deep, -1, 3, side**2)  # (t, deep, hw, 3, side**2)
        return pixels.permute(0, 2, 3, 1, 4).reshape(math.prod(grid), -1), grid


class Gemma3(Family):
    """Square images, whose tokens attend to each other in the decoder."""

    # An image's tokens attend to each other, and a segment with a prefix cannot be cut up for that.
    replies_show_images = False
    model_types = ("gemma3",)
    image_processors = ("Gemma3", "Siglip")
    processor_options = {"do_pan_and_scan": False}  # no crops beside the image
    begins_image = "boi_token_id"
    both_ways = BOTH_WAYS
    types_input = "token_type_ids"

    def attention_segments(
        self, segments: list[FamilySegment], image_index: Tensor
    ) -> list[FamilySegment]:
        """Cut a prompt into texts and images, each with all that comes before it as its prefix."""
        if not len(image_index):
            return segments
        index = image_index.cpu().numpy()
        runs = np.split(index, np.flatnonzero(np.diff(index) > 1) + 1)
        images = [(int(run[0]), int(run[-1]) + 1) for run in runs]
        pieces = []
        for start, end, *prefix in segments:
            at = start
            for first, after in images:
                if start <= first < end:
                    image = first, after, start, first, self.both_ways
                    pieces += [(at, first, start, at), image]
                    at = after
            if at > start:
                prefix = start, at
            pieces.append((at, end, *prefix))
        return [piece for piece in pieces if piece[0] < piece[1]]

    def expand(self, grid: Grid) -> Expansion:
        token, end = self.token(self.image_token_id), self.token(self.config.eoi_token_id)
        return f"\n\n{self.placeholder}{token}{end}\n\n", [self.config.mm_tokens_per_image]


class Llava(Family):
    """LLaVA 1.5: a square image by CLIP or SigLIP."""

    model_types = ("llava",)
    image_processors = ("CLIP", "Llava", "Siglip")

    def expand(self, grid: Grid) -> Expansion:
        tower = self.config.vision_config
        count = (tower.image_size // tower.patch_size) ** 2
        if tower.model_type == "clip_vision_model":
            count += 1  # CLIP puts one class token before the patches
        if self.config.vision_feature_select_strategy == "default":
            count -= 1  # this strategy drops the first token, class token or not
        return self.placeholder, [count]


class Glm(Qwen):
    """GLM-4.1V to GLM-4.6V, GLM-OCR: Qwen-VL's patches, but images are resized by another rule. Their
    clips, in which each frame is an image with its time, are not read."""

    model_types = ("glm4v", "glm46v", "glm_ocr", "glm4v_moe")
    spaces = dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), "1000")  # GLM-V's README
    media = ("image",)
    image_processors = ("Glm4v", "Glm46V")
    usual_pixels = 112 * 112, 28 * 28 * 15000
    unnamed_tokens = r"<\|(begin|end)_of_(image|video)\|>"

    def resized(self, height: int, width: int, low: int, high: int) -> tuple[int, int]:
        """GLM's bounds are for as many frames together as a patch is deep."""
        with explained("the image cannot be resized"):
            return smart_resize_glm(self.depth, height, width, self.depth, self.side, low, high)


class Exaone(Qwen):
    """EXAONE 4.5: Qwen2.5-VL's images and tower. Its clips are not read."""

    model_types = ("exaone4_5",)
    media = ("image",)
    types_input = ""
    unnamed_tokens = r"</?vision>"


class Measured(Family):
    """Families in which only the image processor knows what determines an image's tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.grids: dict[tuple[int, int], Grid] = {}

    def grid(self, width: int, height: int) -> Grid:
        """The grid, measured on a blank image, as it depends on the size alone."""
        size = width, height
        if size not in self.grids:
            self.grids[size] = self.patches(Image.new("RGB", size))[1]
        return self.grids[size]


class Mistral3(Measured):
    """Mistral Small 3 and Ministral 3, whose tower is Pixtral: images of any size, in rows of tokens
    with a break between them. A grid is (height, width) in pixels. Its processor in transformers needs
    torchvision."""

    model_types = ("mistral3",)
    image_processors = ("Pixtral",)
    in_whole_tokens = True  # whether images are resized to multiples of a token's side
    unnamed_tokens = r"\[IMG(_BREAK|_END)?\]"

    @property
    def side(self) -> int:
        """Pixels along a side of the square for one token."""
        return self.config.vision_config.patch_size * self.config.spatial_merge_size

    def processor_settings(self, settings: dict, args: DataArgs) -> dict:
        settings = super().processor_settings(settings, args)
        # the files have the side of the tower's patches
        return settings | {"patch_size": self.side} if self.in_whole_tokens else settings

    def seen_size(self, grid: Grid) -> tuple[int, int]:
        return grid[1], grid[0]

    def expand(self, grid: Grid) -> Expansion:
        rows, columns = (size // self.side for size in grid)
        text = "[IMG_BREAK]".join([self.placeholder] * rows)
        return f"{text}[IMG_END]", [columns] * rows

    def patches(self, image: Image.Image) -> Patches:
        """(3 * h * w,) pixels, which can be concatenated with those of images of other sizes."""
        batch = self.prepared(image)
        return batch["pixel_values"].flatten(), tuple(batch["image_sizes"][0].tolist())

    def vision_inputs(self, patches: Tensor, grids: Tensor) -> Inputs:
        """Images of several sizes, padded into one tensor; the tower does not see the padding."""
        images = patches.split((3 * grids.prod(dim=1)).tolist())
        height, width = grids.amax(dim=0).tolist()
        framed = []
        for image, (h, w) in zip(images, grids.tolist()):
            framed.append(F.pad(image.view(3, h, w), (0, width - w, 0, height - h)))
        return {"pixel_values": torch.stack(framed), "image_sizes": grids}


class LightOn(Mistral3):
    """LightOnOCR: Pixtral's tower without breaks between the rows."""

    model_types = ("lighton_ocr",)
    vision_keys = ("vision_encoder.", "vision_projection.")
    in_whole_tokens = False
    unnamed_tokens = r"<\|vision_(pad|end)\|>"

    def expand(self, grid: Grid) -> Expansion:
        _, columns = super().expand(grid)
        return self.placeholder, [sum(columns)]


class Gemma4(Measured, Gemma3):
    """Gemma 4: images of any shape. In the large models the tokens of an image attend to each other,
    in layers with a window. A grid is (tokens,). Clips and sound are not read."""

    model_types = ("gemma4",)
    vision_keys = ("vision_tower.", "embed_vision.")
    image_processors = ("Gemma4",)
    processor_options: dict = {}
    unnamed_tokens = r"<\|?(image|audio|video)\|?>"
    begins_image = "image_token_id"
    both_ways = IN_WINDOWS
    sees_both_ways = "vision"
    types_input = "mm_token_type_ids"

    def __init__(self, config):
        super().__init__(config)
        self.replies_show_images = not config.get_text_config().use_bidirectional_attention

    def attention_segments(
        self, segments: list[FamilySegment], image_index: Tensor
    ) -> list[FamilySegment]:
        is_causal = self.replies_show_images
        return segments if is_causal else super().attention_segments(segments, image_index)

    def patches(self, image: Image.Image) -> Patches:
        """(1, P, 3 * side**2 + 2): each patch's pixels, then its column and row, -1 where the processor
        pads. It sizes images to fill its budget of patches, so it seldom pads much."""
        batch = self.prepared(image)
        pixels = torch.cat([batch["pixel_values"], batch["image_position_ids"]], dim=2)
        return pixels, tuple(batch["num_soft_tokens_per_image"].tolist())

    def vision_inputs(self, patches: Tensor, grids: Tensor) -> Inputs:
        return {"pixel_values": patches[..., :-2], "image_position_ids": patches[..., -2:].long()}

    def expand(self, grid: Grid) -> Expansion:
        begin, end = self.token(self.config.boi_token_id), self.token(self.config.eoi_token_id)
        return f"{begin}{self.placeholder}{end}", [*grid]


class Described(Family):
    """Families whose processor in transformers writes the text that stands for an image."""

    processor: str  # its class

    def prepare(self, files: Files, tokenizer, args: DataArgs) -> None:
        super().prepare(files, tokenizer, args)
        # Its video processor is not used and may be None, which this check would refuse.
        unchecked = {"check_argument_for_proper_class": lambda *_: None}
        theirs = type(self.processor, (getattr(transformers, self.processor),), unchecked)
        parts = {"image_processor": self.image_processor}
        parts["tokenizer"] = copy.deepcopy(tokenizer)  # some processors add tokens to it
        blank = self.described(self.grid(64, 64))
        settings = {k: v for k, v in files["processor_config"].items() if v is not None}
        with explained("processor_config.json cannot be used"):
            settings = self.settings_of_config() | settings
            self.writer = theirs.from_args_and_dict([], settings, **parts)
            self.writer.replace_image_token(blank, 0)
        self.placeholder = self.writer.image_token

    def settings_of_config(self) -> dict[str, Any]:
        """What processor_config.json repeats of the model's config, for checkpoints without that file."""
        return {}

    def patches_of_side(self) -> int:
        """Patches along a side of the squares that the tower takes."""
        tower = self.config.vision_config
        side, patch = (np.ravel(size)[0] for size in (tower.image_size, tower.patch_size))
        return int(side // patch)

    def described(self, grid: Grid) -> dict[str, Any]:
        """What the image processor returns for an image of this grid, as far as the text needs it."""
        raise NotImplementedError

    def expand(self, grid: Grid) -> Expansion:
        text = self.writer.replace_image_token(self.described(grid), 0)
        token = self.token(self.image_token_id)
        runs = f"(?:{re.escape(token)})+"
        counts = [len(run) // len(token) for run in re.findall(runs, text)]
        return re.sub(runs, token, text), counts

    def patches(self, image: Image.Image) -> Patches:
        pixels, grid = super().patches(image)
        return pixels.flatten(0, -4), grid  # (T, 3, h, w) of T tiles


class InternVL(Described):
    """An image cut into square tiles, whose number depends on its shape."""

    model_types = ("internvl",)
    spaces = {"internvl": "1000"}  # the pattern of InternVL's demo
    image_processors = ("GotOcr2",)
    processor = "InternVLProcessor"
    unnamed_tokens = r"</?img>|<video>|<IMG_CONTEXT>"
    processor_options = {"crop_to_patches": True}  # as its processor does, whatever the file says

    def settings_of_config(self) -> dict[str, Any]:
        side = int(self.patches_of_side() * self.config.downsample_ratio)
        return {"image_seq_length": side**2}

    def grid(self, width: int, height: int) -> Grid:
        return (self.image_processor.get_number_of_image_patches(height, width),)

    def described(self, grid: Grid) -> dict[str, Any]:
        return {"num_patches": grid}


class Aya(InternVL):
    """Aya Vision: InternVL's tiles, numbered."""

    model_types = ("aya_vision",)
    processor = "AyaVisionProcessor"
    unnamed_tokens = r"<image>|<\|(START_OF_IMG|END_OF_IMG|IMG_PATCH|IMG_LINE_BREAK)\|>|TILE\w*"

    def settings_of_config(self) -> dict[str, Any]:
        tower = self.config.vision_config
        settings = {"patch_size": tower.patch_size, "img_size": tower.image_size}
        return settings | {"downsample_factor": self.config.downsample_factor}


class SmolVLM(Described):
    """Idefics3 and SmolVLM: tiles and the whole image. A grid is (rows, columns) of tiles, or (0, 0)
    for the whole image alone."""

    model_types = ("idefics3", "smolvlm")
    vision_keys = ("vision_model.", "connector.")
    image_processors = ("Idefics3", "SmolVLM")
    processor = "Idefics3Processor"  # SmolVLM's writes the same, but needs a video package
    unnamed_tokens = r"<fake_token_around_image>|<global-img>|<image>|<row_\d_col_\d>"
    processor_options = {"return_row_col_info": True}

    def settings_of_config(self) -> dict[str, Any]:
        return {"image_seq_len": (self.patches_of_side() // self.config.scale_factor) ** 2}

    def vision_inputs(self, patches: Tensor, grids: Tensor) -> Inputs:
        return {"pixel_values": patches[None]}

    def grid(self, width: int, height: int) -> Grid:
        # exact where max_image_size divides the longest edge, as in every checkpoint of these
        _, *tiles = self.image_processor.get_number_of_image_patches(height, width)
        return tuple(tiles)

    def described(self, grid: Grid) -> dict[str, Any]:
        rows, columns = grid
        return {"rows": [[rows]], "cols": [[columns]]}


class LlavaNext(Described):
    """LLaVA-NeXT (1.6): the whole image, and tiles of it whose padding is cut off again. A grid is its
    (height, width)."""

    model_types = ("llava_next",)
    vision_keys = (*Family.vision_keys, "image_newline")
    image_processors = ("LlavaNext",)
    processor = "LlavaNextProcessor"

    def settings_of_config(self) -> dict[str, Any]:
        tower = self.config.vision_config
        return {
            "patch_size": tower.patch_size,
            "vision_feature_select_strategy": self.config.vision_feature_select_strategy,
            # CLIP puts one class token before the patches
            "num_additional_image_tokens": int(tower.model_type == "clip_vision_model"),
        }

    def vision_inputs(self, patches: Tensor, grids: Tensor) -> Inputs:
        return {"pixel_values": patches, "image_sizes": grids[:, :2]}

    def grid(self, width: int, height: int) -> Grid:
        return height, width

    def described(self, grid: Grid) -> dict[str, Any]:
        side = self.config.vision_config.image_size
        pixels = torch.empty(1, 1, side, side, device="meta")  # only its shape is read
        return {"image_sizes": [grid[:2]], "pixel_values": pixels}


class OneVision(LlavaNext):
    """LLaVA-OneVision: the same, but several images in a prompt become one square each. A grid is
    (height, width, images in the prompt). Its clips are not read."""

    model_types = ("llava_onevision",)
    # a second image would change how the first one is encoded
    replies_show_images = False
    image_processors = ("LlavaOnevision",)
    processor = "LlavaOnevisionProcessor"
    count = 1  # images in the prompt

    def settings_of_config(self) -> dict[str, Any]:
        return {
            "num_image_tokens": self.patches_of_side() ** 2,
            "vision_feature_select_strategy": self.config.vision_feature_select_strategy,
            "vision_aspect_ratio": self.config.vision_aspect_ratio,
        }

    def among(self, count: int) -> Family:
        family = copy.copy(self)
        family.count = count
        return family

    def vision_inputs(self, patches: Tensor, grids: Tensor) -> Inputs:
        counts, first = [], 0  # of images in each prompt
        while first < len(grids):
            counts.append(int(grids[first, 2]))
            first += counts[-1]
        return super().vision_inputs(patches, grids) | {"batch_num_images": torch.tensor(counts)}

    def grid(self, width: int, height: int) -> Grid:
        return height, width, self.count

    def described(self, grid: Grid) -> dict[str, Any]:
        return super().described(grid) | {"batch_num_images": [grid[2]]}

    def prepared(self, image: Image.Image) -> Inputs:
        together = [image] * min(self.count, 2)  # in a prompt; more are treated like two
        pixels = self.processed([together])["pixel_values"]
        return {"pixel_values": pixels[:1]}


CLASSES = (
    Qwen,
    Glm,
    Exaone,
    Llava,
    Gemma3,
    Gemma4,
    Mistral3,
    LightOn,
    InternVL,
    Aya,
    SmolVLM,
    LlavaNext,
    OneVision,
    TextOnly,
)
FAMILIES = {model_type: family for family in CLASSES for model_type in family.model_types}


def family_of(config) -> Family:
    """The family of a model's config. Raises UserError: it is not supported."""
    if config.model_type not in FAMILIES:
        raise UserError(
            f"family {config.model_type!r} is not one of {', '.join(FAMILIES)}; to add it, begin with "
            f"the class {nearest(config).__name__} of common/data/families.py: see common/README.md"
        )
    return FAMILIES[config.model_type](config)


def nearest(config) -> type[Family]:
    """The class to begin a new family with, by its vision tower."""
    tower = getattr(config, "vision_config", None)
    if tower is None:
        return TextOnly
    if getattr(tower, "model_type", "") == "pixtral":
        return Mistral3
    return Qwen if hasattr(tower, "temporal_patch_size") else Described
