"""A checkpoint's tokenizer, chat template and image processor: messages to token ids.

    checkpoint -> config, tokenizer, chat template, image processor            Processor
    messages   -> the template's text -> token ids, placeholders expanded      Processor.encode

Shapes: P prompt tokens, V vocabulary. A user's mistake is a ValueError that names the folder or
what is wrong with the text.
"""

import json
import re
from pathlib import Path
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from common.data.families import Expansion, family_of, is_clip
from common.data.folder import read_model_config, read_settings, read_tokenizer
from common.flags import DataArgs

# The settings of a checkpoint that an export repeats.
SAVED_FILES = ("generation_config", "judge", "processor_config", "video_preprocessor_config")


class Processor:
    """Tokenizer, chat template and Pillow image processor of a checkpoint folder.

    Not `AutoProcessor`: for the Qwen-VL families it needs torchvision, for its videos; here Pillow
    resizes their frames.

    Attributes:
        args, config, tokenizer, family (a `families.Family`), vocab_size, files (JSON by name).
        stop_ids end a response; banned_ids are never sampled; reserved_tokens are in no row.
    Raises:
        ValueError: files missing or unreadable, an unknown family, no chat template, contradictory
            settings.
    """

    def __init__(self, folder: str | Path, args: DataArgs = DataArgs()):
        self.args = args
        try:
            self.config = read_model_config(folder)
            self.family = family_of(self.config)
            self.tokenizer = read_tokenizer(folder)
            self.files = read_settings(folder)
            self.vocab_size = self.config.get_text_config().vocab_size
            # Older checkpoints keep the template that knows images in a file of its own, which only
            # AutoProcessor reads.
            template = self.files["chat_template"].get("chat_template")
            self.tokenizer.chat_template = template or self.tokenizer.chat_template
            if not self.tokenizer.chat_template:
                raise ValueError("no chat template; take that of the instruction-tuned checkpoint")
            self._set_tokens()
            self.family.prepare(self.files, self.tokenizer, args)
        except (OSError, ValueError) as error:
            raise ValueError(f"checkpoint {folder}: {error}") from error

    def _set_tokens(self) -> None:
        tokenizer, added = self.tokenizer, self.tokenizer.added_tokens_decoder
        names = ("image", "video", "vision_start", "vision_end", "boi", "eoi")
        visual = {getattr(self.config, f"{name}_token_id", None) for name in names}
        unnamed = re.compile(self.family.unnamed_tokens)
        visual |= {i for i, token in added.items() if unnamed.fullmatch(token.content)}
        # Gemma's end of a turn is a stop token, though not all of its files call it an end.
        ends = {tokenizer.eos_token_id, tokenizer.get_vocab().get("<end_of_turn>")}
        written = self.files["generation_config"].get("eos_token_id")
        ends |= {*written} if isinstance(written, list) else {written}
        self.banned_ids, self.stop_ids = self._known(visual), self._known(ends)
        # Not every special token: those the template does not use, as Qwen2-VL's for boxes, are a
        # row's to write.
        self.reserved_tokens = []
        for i, token in added.items():
            is_used = i in ends or token.content in str(tokenizer.chat_template)
            if i in visual or (token.special and is_used):
                self.reserved_tokens.append(token.content)

    def _known(self, ids: set[int | None]) -> tuple[int, ...]:
        """Those in the model's vocabulary: a small model may keep the large ones' default ids."""
        return tuple(sorted(ids.intersection(range(self.vocab_size))))

    def banned_mask(self) -> Tensor:
        """(V,) bool: the ids that are never sampled."""
        banned = torch.zeros(self.vocab_size, dtype=torch.bool)
        banned[list(self.banned_ids)] = True
        return banned

    def decode(self, responses: list[Tensor]) -> list[str]:
        """The texts of token ids (n,), without special tokens."""
        return self.tokenizer.batch_decode(
            [ids.tolist() for ids in responses], skip_special_tokens=True
        )

    def render(self, chat: list[dict], **options) -> str:
        """Chat messages as the template's text. Raises ValueError: a template that fails."""
        try:
            return self.tokenizer.apply_chat_template(chat, tokenize=False, **options)
        # A template is a program that came with the checkpoint, and raises what it likes.
        except Exception as error:
            raise ValueError(f"the chat template cannot render this ({error!r})") from error

    def token_ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text. Raises ValueError: an id that the model has no embedding for."""
        backend = self.tokenizer.backend_tokenizer
        ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
        largest = max(ids, default=-1)
        if largest >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise ValueError(
                f"token {token!r} of the tokenizer has the id {largest}; config.json has a "
                f"vocab_size of {self.vocab_size}"
            )
        return ids

    def encode(self, messages: list[dict], grids: tuple) -> tuple[str, Tensor, int]:
        """Chat messages as the template's text, as token ids (P,) int64, the placeholder of each
        image and clip expanded, and how many of these are image tokens.

        Raises ValueError: a reserved token in a message, a template that fails, or not one
        placeholder per image or clip.
        """
        text = self.render(self.as_chat(messages), add_generation_prompt=True)
        # JSON may hold half a surrogate pair: a ValueError here, a TypeError in the tokenizer.
        text.encode("utf-8")
        expanded, counts = self.expand(text, grids)
        # The template has written the special tokens: the tokenizer must not add its own on top.
        # But in the families whose processors have it add the BOS if the template has not.
        has_bos = not self.family.media or text.startswith(self.tokenizer.bos_token or "")
        ids = self.ids_with_images(expanded, counts, add_special_tokens=not has_bos)
        return text, ids, sum(counts)

    def check_holds(self, text: str, content: list[dict]) -> None:
        """Raises ValueError: the chat template has lost a part of a message."""
        for part in content:
            if part.get("text", "").strip() not in text:
                raise ValueError(f"the chat template leaves out {part['text']!r:.80}")

    def ids_with_images(
        self, text: str, counts: Sequence[int], add_special_tokens: bool = False
    ) -> Tensor:
        """(P,) int64 of a text with image tokens, each of which is repeated as often as ``counts``
        says. Raises ValueError: see `encode`."""
        ids = np.array(self.token_ids(text, add_special_tokens), dtype=np.int64)
        is_image = np.isin(ids, self.family.visual_token_ids())
        if is_image.sum() != len(counts):
            raise ValueError(f"image-token mismatch: {is_image.sum()} tokens for {len(counts)}")
        repeats = np.ones_like(ids)
        repeats[is_image] = counts
        return torch.from_numpy(ids.repeat(repeats))

    def ids_behind(self, context: str, text: str, counts: Sequence[int] = ()) -> Tensor:
        """(n,) int64 ids of a text that follows another: some tokenizers put a space before the
        beginning of a text. Where the two share a token, the text is encoded alone. Raises
        ValueError: see `encode`."""
        before = self.token_ids(context)
        ids = self.ids_with_images(context + text, counts)
        if ids[: len(before)].tolist() == before:
            return ids[len(before) :]
        return self.ids_with_images(text, counts)

    def as_chat(self, messages: list[dict]) -> list[dict]:
        """Messages as the template knows them: it may know parts only, that of a text model strings
        only. Raises ValueError: a reserved token in them."""
        # As templates join the parts.
        texts = ["".join(part.get("text", "\n") for part in m["content"]) for m in messages]
        written = f"{messages} {texts}"
        for token in self.reserved_tokens:
            if token in written:
                raise ValueError(
                    f"special token {token} in the text: the model would take it for the "
                    "template's own"
                )
        if self.family.media:
            return messages
        return [{**message, "content": text} for message, text in zip(messages, texts)]

    def expand(self, text: str, grids: tuple) -> Expansion:
        """A rendered prompt with what stands for each image and clip in the placeholders' places."""
        family = self.family
        marks = family.placeholder, family.clip_placeholder
        pattern = "|".join(re.escape(mark) for mark in marks if mark)
        pieces = re.split(f"({pattern})", text) if pattern else [text]
        expected = [marks[is_clip(grid)] for grid in grids]
        if pieces[1::2] != expected:
            raise ValueError(
                f"image-token mismatch: placeholders {pieces[1::2]} in the rendered prompt for "
                f"{len(grids)} images and videos (a template for text only?)"
            )
        counts = []
        for k, grid in enumerate(grids):
            pieces[2 * k + 1], repeats = family.expand(grid)
            counts += repeats
        return "".join(pieces), counts

    def save(self, folder: str) -> None:
        """Write tokenizer, template, processor and generation settings, with the pixel bounds in
        use, to a folder."""
        self.tokenizer.save_pretrained(folder)
        if self.family.image_processor is not None:
            self.family.image_processor.save_pretrained(folder)
        for name in SAVED_FILES:
            # A nested image processor would take precedence over the pixel bounds just written.
            settings = dict(self.files[name])
            settings.pop("image_processor", None)
            if settings and (name != "judge" or settings.get("trained_on")):
                Path(folder, f"{name}.json").write_text(json.dumps(settings, indent=2), "utf-8")
