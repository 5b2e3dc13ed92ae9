"""From rows of data to batches of prompts, in the order of their drawing.

    draw  -> dataset and row                                                   DrawOrder, InOrder
    batch -> images and clips decoded, one batch ahead                         PromptLoader

Shapes: P prompt tokens, I images. A user's mistake is a ValueError that names the file, the line
and the numbers.
"""

import hashlib
import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed
from common.buffers import Batch
from common.data import images
from common.data.processor import Processor
from common.data.rows import Prompt
from common.distributed import UserError, printable
from common.flags import DataArgs, absolute, parse_datasets

Pixels = tuple[Tensor, Tensor]  # patches of some images, and their grids

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


def digest_data(spec: str, rows: int) -> str:
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
