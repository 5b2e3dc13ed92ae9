"""From a checkpoint's files and rows of data to batches of prompts, in the order of their drawing.

    checkpoint -> config, tokenizer, chat template, image processor            Processor
    rows       -> prompts, every one checked                                   rows.load_prompts
    draw       -> dataset and row                                              DrawOrder, InOrder
    batch      -> pictures and clips decoded, one batch ahead                  PromptLoader

Shapes: P prompt tokens, I images, M image tokens, V vocabulary. A user's mistake is a ValueError
that names the file, the line and the numbers.
"""

import hashlib
import json
import math
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed
from common.buffers import Batch
from common.data import images
from common.data.families import family_of, is_clip
from common.data.folder import read_model_config, read_settings, read_tokenizer
from common.data.rows import Prompt, load_prompts, load_rows, parse_columns, user_text
from common.distributed import UserError, printable
from common.flags import DataArgs, absolute, parse_datasets

Pixels = tuple[Tensor, Tensor]  # patches of some pictures, and their grids

# -------------------------------------------------------------------------------------------------
# Processor
# -------------------------------------------------------------------------------------------------


# The settings of a checkpoint that an export repeats.
SAVED_FILES = ("generation_config", "judge", "processor_config", "video_preprocessor_config")


class Processor:
    """Tokenizer, chat template and Pillow image processor of a checkpoint folder.

    Not `AutoProcessor`: for the Qwen-VL families it needs torchvision, for its videos; here Pillow
    resizes their frames.

    Attributes:
        config, tokenizer, family (a `families.Family`), vocab_size, files (JSON by name).
        stop_ids end a response; banned_ids are never sampled; reserved_tokens are in no row.
    Raises:
        ValueError: files missing or unreadable, an unknown family, no chat template, contradictory
            settings.
    """

    def __init__(self, folder: str | Path, args: DataArgs = DataArgs()):
        try:
            self.config = read_model_config(folder)
            self.family = family_of(self.config)
            self.tokenizer = read_tokenizer(folder)
            self.files = read_settings(folder)
            self.vocab_size = self.config.get_text_config().vocab_size
            self._set_template()
            self._set_tokens()
            self.family.prepare(self.files, self.tokenizer, args)
        except (OSError, ValueError) as error:
            raise ValueError(f"checkpoint {folder}: {error}") from error

    def _set_template(self) -> None:
        # Older checkpoints keep the template that knows images in this file, which only
        # AutoProcessor reads.
        tokenizer = self.tokenizer
        tokenizer.chat_template = (
            self.files["chat_template"].get("chat_template") or tokenizer.chat_template
        )
        if not tokenizer.chat_template:
            raise ValueError("no chat template; take that of the instruction-tuned checkpoint")

    def _set_tokens(self) -> None:
        tokenizer, added = self.tokenizer, self.tokenizer.added_tokens_decoder
        ends = self._generation_ends()
        for name, token in (
            ("the image token", int(self.family.visual_token_ids()[0])),
            ("the tokenizer's eos token", tokenizer.eos_token_id),
        ):
            if token is not None and token >= self.vocab_size:
                raise ValueError(
                    f"{name} has the id {token}; config.json has a vocab_size of {self.vocab_size}"
                )
        ids = set()
        for name in ("image", "video", "vision_start", "vision_end", "boi", "eoi"):
            ids.add(getattr(self.config, f"{name}_token_id", None))
        for i, token in added.items():
            if re.fullmatch(self.family.unnamed_tokens, token.content):
                ids.add(i)
        ids -= {None}
        # A small model may keep the large ones' default ids, beyond its own vocabulary: nothing
        # there to ban.
        self.banned_ids = tuple(sorted(i for i in ids if 0 <= i < self.vocab_size))
        # Gemma's end of a turn is a stop token, though not all of its files call it an end.
        ends |= {tokenizer.eos_token_id, tokenizer.get_vocab().get("<end_of_turn>")}
        self.stop_ids = tuple(sorted(ends - {None}))
        # Not every special token: those the template does not use, as Qwen2-VL's for boxes, are a
        # row's to write.
        self.reserved_tokens = []
        for i, token in added.items():
            is_used = i in ends or token.content in str(tokenizer.chat_template)
            if i in ids or (token.special and is_used):
                self.reserved_tokens.append(token.content)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
            self.config.get_text_config().pad_token_id = tokenizer.eos_token_id

    def _generation_ends(self) -> set[int]:
        """The end tokens of generation_config.json."""
        written = self.files["generation_config"].get("eos_token_id")
        ends = written if isinstance(written, list) else [written]
        for end in ends:
            if end is not None and not (type(end) is int and 0 <= end < self.vocab_size):
                raise ValueError(
                    f"generation_config.json: eos_token_id {written!r:.80}: must be ids of tokens, "
                    f"from 0 to {self.vocab_size - 1}"
                )
        return {end for end in ends if end is not None}

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
        encoding = self.tokenizer.backend_tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        )
        ids = encoding.ids
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
        picture and clip expanded, and how many of these are image tokens.

        Raises ValueError: a reserved token in a message, a template that fails, or not one
        placeholder per picture or clip.
        """
        text = self._render_prompt(messages)
        expanded, counts = self.expand(text, grids)
        # The template has written the special tokens: the tokenizer must not add its own on top.
        # But in the families whose processors have it add the BOS if the template has not.
        has_bos = self.family.template_has_bos or text.startswith(self.tokenizer.bos_token or "")
        ids = self.ids_with_pictures(expanded, counts, add_special_tokens=not has_bos)
        return text, ids, sum(counts)

    def ids_with_pictures(
        self, text: str, counts: Sequence[int], add_special_tokens: bool = False
    ) -> Tensor:
        """(P,) int64 of a text with image tokens, each of which is repeated as often as ``counts``
        says. Raises ValueError: see `encode`."""
        ids = np.array(self.token_ids(text, add_special_tokens), dtype=np.int64)
        is_image = np.isin(ids, self.family.visual_token_ids())
        if is_image.sum() != len(counts):
            raise ValueError(
                f"image-token mismatch: {is_image.sum()} image tokens in the encoded prompt for "
                f"{len(counts)}"
            )
        repeats = np.ones_like(ids)
        repeats[is_image] = counts
        return torch.from_numpy(ids.repeat(repeats))

    def ids_behind(self, context: str, text: str, counts: Sequence[int] = ()) -> Tensor:
        """(n,) int64 ids of a text that follows another: some tokenizers put a space before the
        beginning of a text. Where the two share a token, the text is encoded alone. Raises
        ValueError: see `encode`."""
        known = self.token_ids(context)
        ids = self.ids_with_pictures(context + text, counts)
        if ids[: len(known)].tolist() == known:
            return ids[len(known) :]
        return self.ids_with_pictures(text, counts)

    def _render_prompt(self, messages: list[dict]) -> str:
        """Messages as the template's text, up to the response, with nothing lost."""
        text = self.render(self.as_chat(messages), add_generation_prompt=True)
        # JSON may hold half a surrogate pair: a ValueError here, a TypeError in the tokenizer.
        text.encode("utf-8")
        asked = [part for m in messages if m["role"] == "user" for part in m["content"]]
        for part in asked:
            said = part.get("text", "").strip()
            if said not in text:
                raise ValueError(f"the chat template leaves out {said!r:.80}")
        return text

    def as_chat(self, messages: list[dict]) -> list[dict]:
        """Messages as the template knows them: it may know parts only, that of a text model strings
        only. Raises ValueError: a reserved token in them."""
        # As templates join the parts.
        joined = ["".join(part.get("text", "\n") for part in m["content"]) for m in messages]
        written = f"{messages} {joined}"
        for token in self.reserved_tokens:
            if token in written:
                raise ValueError(
                    f"special token {token} in the text: the model would take it for the "
                    "template's own"
                )
        if self.family.has_pictures:
            return messages
        return [{**message, "content": said} for message, said in zip(messages, joined)]

    def expand(self, text: str, grids: tuple) -> tuple[str, list[int]]:
        """A rendered prompt with what stands for each picture and clip in the placeholders' places,
        and how often each image token in it is repeated."""
        family = self.family
        marks = [mark for mark in (family.placeholder, family.clip_placeholder) if mark]
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        found = pieces[1::2]
        if found != [family.placeholder_of(grid) for grid in grids]:
            clips, marked = sum(map(is_clip, grids)), found.count(family.placeholder)
            raise ValueError(
                f"image-token mismatch: {marked} image placeholders and {len(found) - marked} of "
                f"videos in the rendered prompt for {len(grids) - clips} images and {clips} videos "
                "(a template for text only?)"
            )
        counts: list[int] = []
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
            settings = {
                key: value for key, value in self.files[name].items() if key != "image_processor"
            }
            if settings and (name != "judge" or settings["trained_on"]):
                Path(folder, f"{name}.json").write_text(json.dumps(settings, indent=2), "utf-8")


# -------------------------------------------------------------------------------------------------
# Order of rows
# -------------------------------------------------------------------------------------------------


class DrawOrder:
    """The batches of a training run: several sets of rows, each drawn in its share at every moment,
    and reshuffled with every pass over it. Called with the 0-based number of a batch, gives its
    rows and their draw numbers, None after the last; a function of (seed, number), so that a
    resumed run goes on in it."""

    def __init__(
        self, sets: list[list], shares: list[float], per_batch: int, batches: int, seed: int
    ):
        self.sets, self.per_batch, self.seed = sets, per_batch, seed
        self.which, self.number = mix(shares, per_batch * batches)

    def __call__(self, index: int) -> tuple[list, list[int]] | None:
        draws = slice(index * self.per_batch, (index + 1) * self.per_batch)
        if draws.start >= len(self.which):
            return None
        sizes = [len(rows) for rows in self.sets]
        picks = take_rows(self.which[draws], self.number[draws], sizes, self.seed)
        return [self.sets[k][row] for k, row in picks], list(range(draws.start, draws.stop))


class InOrder:
    """Rows as they stand, ``size`` at a time, for evaluations; ``len`` is the number of batches."""

    def __init__(self, rows: list, size: int):
        self.rows, self.size = rows, size

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)

    def __call__(self, index: int) -> tuple[list, list[int]] | None:
        rows = self.rows[index * self.size : (index + 1) * self.size]
        return (rows, [prompt_of(row).index for row in rows]) if rows else None


def prompt_of(row: Any) -> Prompt:
    """The prompt of a row: itself, or its attribute."""
    return row if isinstance(row, Prompt) else row.prompt


def mix(weights: list[float], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """(draws,) dataset of each draw, and (draws,) its number among that set's draws. Draw j of set
    i has the time (j + 1/2) / weight i: shares are kept at every moment, and a longer plan begins
    like a shorter one.
    """
    # At any time each other set may be half a draw behind its share, all of which are this one's
    # then.
    counts = [
        math.ceil(draws * weight / sum(weights)) + len(weights) // 2 + 1 for weight in weights
    ]
    which = np.repeat(np.arange(len(weights)), counts)
    number = np.concatenate([np.arange(0), *map(np.arange, counts)])
    order = np.lexsort((which, (number + 0.5) / np.asarray(weights)[which]))[:draws]
    return which[order], number[order]


def take_rows(
    which: np.ndarray, number: np.ndarray, sizes: list[int], seed: int
) -> list[tuple[int, int]]:
    """(dataset, row) of consecutive draws of a plan made by `mix`; each dataset has its own passes,
    as in `data_order`."""
    picks = {}
    for k in set(which.tolist()):
        own = number[which == k]  # consecutive
        picks[k] = iter(data_order(range(own[0], own[-1] + 1), sizes[k], seed))
    return [(k, next(picks[k])) for k in which.tolist()]


def data_order(draws: range, rows: int, seed: int) -> list[int]:
    """Rows taken as draws number ``draws``: pass e over the data uses a permutation that depends on
    (seed, e) only."""
    order = {}
    for epoch in {draw // rows for draw in draws}:
        order[epoch] = np.random.default_rng([seed, epoch]).permutation(rows)
    return [int(order[draw // rows][draw % rows]) for draw in draws]


def absolute_datasets(spec: str) -> str:
    """The value of --data or --eval_data with absolute paths."""
    parts = []
    for path, weight in parse_datasets(spec):
        parts.append(absolute(path) + (f":{weight!r}" if weight else ""))
    return ",".join(parts)


def describe_shares(spec: str, sets: list[list], shares: list[float], draws: int) -> list[str]:
    """One line for each of several sets of rows: how often it is drawn."""
    if len(sets) < 2:
        return []
    lines = []
    for rows, weight, (path, _) in zip(sets, shares, parse_datasets(spec)):
        share = weight / sum(shares)
        passes = share * draws / len(rows)
        lines.append(f"  {path}: {len(rows)} rows, {share:.1%} of the draws, {passes:.1f} passes")
    return lines


def digest(spec: str, rows: int) -> str:
    """The number of rows in use and a digest of each of their files: rows that were edited make
    another run."""
    digests = []
    for path, _ in parse_datasets(spec):
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest()[:12])
    return f"{rows} rows, sha256 {' '.join(digests)}"


# -------------------------------------------------------------------------------------------------
# Decoding, one batch ahead
# -------------------------------------------------------------------------------------------------


class PromptLoader:
    """Decodes the pictures of the next batch in threads while the model works on this one.

    Args:
        order: 0-based number of a batch -> its rows and their draw numbers, or None after the last.
            Rows are prompts, or objects with a ``prompt``.
        taken: batches taken so far.
        dropped: prompts dropped so far, whose pictures do not decode (--on_bad_row skip).

    ``rows`` are those of the batch taken last.
    """

    def __init__(
        self,
        processor: Processor,
        args: DataArgs,
        order: Callable | None = None,
        taken: int = 0,
        dropped: int = 0,
    ):
        self.processor, self.on_bad_row, self.order = processor, args.on_bad_row, order
        self.taken, self.dropped = taken, dropped
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.pool = ThreadPoolExecutor(args.data_threads, thread_name_prefix="pictures")
        self.ahead: tuple | None = None  # what is decoding for the next `take`
        self.rows: list = []

    def __enter__(self) -> "PromptLoader":
        return self

    def __exit__(self, *_) -> None:
        self.pool.shutdown(cancel_futures=True)

    def take(self, least: int = 1) -> Batch:
        """The prompts of the next batch, decoded; from now on those of the one after it decode.
        Raises UserError: of prompts whose pictures decode there are not ``least``."""
        if self.ahead is None:
            self.ahead = self.submit(*self.order(self.taken))
        self.rows = self.ahead[0]
        batch = self.collect(*self.ahead)
        self.taken += 1
        following = self.order(self.taken)
        self.ahead = None if following is None else self.submit(*following)
        if len(batch.prompts) - len(batch.dropped) < least:
            raise UserError(
                f"none of the {len(batch.prompts)} prompts of a batch is left: no picture of "
                f"{batch.prompts[0].source} and the others could be decoded"
            )
        return batch

    def submit(self, rows: list, draws: list[int]) -> tuple:
        """Begin to decode this rank's share; `collect` takes what this returns."""
        futures = {}
        for i in range(self.rank, len(rows), self.world):
            futures[i] = self.pool.submit(load_pixels, prompt_of(rows[i]), self.processor)
        return rows, draws, futures

    def collect(self, rows: list, draws: list[int], futures: dict[int, Future]) -> Batch:
        """Wait for the pictures.

        Raises:
            UserError: on every rank, if a picture of any rank does not decode and --on_bad_row is
                error.
        """
        prompts = [prompt_of(row) for row in rows]
        patches, bad = {}, {}
        for i, future in futures.items():
            try:
                pixels = future.result()
            except ValueError as error:
                bad[i] = printable(f"{prompts[i].source}: {error}")
                continue
            if pixels is not None:
                patches[i] = pixels
        problems: dict[int, str] = {}
        for part in distributed.gather_objects(bad):
            problems |= {int(i): message for i, message in part.items()}
        if problems and self.on_bad_row == "error":
            raise UserError("\n".join(problems.values()))
        if problems and distributed.is_main():
            first = list(problems.values())[:5]
            print(
                f"dropped {len(problems)} of {len(prompts)} prompts:",
                *first,
                sep="\n  ",
                flush=True,
            )
        self.dropped += len(problems)
        owners = [i % self.world for i in range(len(prompts))]
        return Batch(prompts, draws, owners, dropped=sorted(problems), patches=patches)


def join_pixels(parts: list[Pixels]) -> Pixels:
    """One after the other."""
    patches, grids = zip(*parts)
    return torch.cat(patches), torch.cat(grids)


def load_pixels(
    prompt: Prompt, processor: Processor, change: Callable | None = None
) -> tuple[Tensor, Tensor] | None:
    """Decode the pictures and clips of a prompt: patches (ΣP, ...) or tiles (ΣT, 3, h, w) float32,
    and grids (I, G) int64, G up to 3; None without either. ``change``: Pillow's image -> another of
    the same size, which stands in its place.

    Raises ValueError: a body that cannot be decoded, or a file that changed since it was loaded.
    """
    if not prompt.images:
        return None
    family = processor.family
    pixels, found = [], []
    for item in prompt.images:
        is_clip = not isinstance(item, str)
        frames = images.read_clip(item, family.video_frames) if is_clip else [images.read_image(item)]
        if change is not None:
            frames = list(map(change, frames))
        patches, grid = family.clip_patches(frames) if is_clip else family.patches(frames[0])
        pixels.append(patches)
        found.append(grid)
    promised = [grid[:3] for grid in prompt.grids]
    if found != promised:
        names = ", ".join(item if isinstance(item, str) else item[0] for item in prompt.images)
        raise ValueError(
            f"{names}: patch grids {promised} by the headers, but {found} decoded: changed since "
            "loaded, or a PNG has EXIF data after its body; restore the file"
        )
    return torch.cat(pixels), torch.tensor(found)
