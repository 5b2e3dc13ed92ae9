"""From rows of data to batches of prompts, in the order of their drawing.

    draw  -> dataset and row                                                   DrawOrder, InOrder
    batch -> images and clips decoded, one batch ahead                         PromptLoader

Shapes: P prompt tokens, I images. A user's mistake is a ValueError that names the file, the line
and the numbers.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed
from common.buffers import Batch
from common.data.images import read_frames
from common.data.processor import Processor
from common.data.rows import Prompt
from common.distributed import UserError, printable
from common.flags import DataArgs, parse_datasets

DECODERS = 2  # threads that decode images while the model works
Pixels = tuple[Tensor, Tensor]  # patches of some images, and their grids

# -------------------------------------------------------------------------------------------------
# Order of rows
# -------------------------------------------------------------------------------------------------


class DrawOrder:
    """The batches of a training run: several sets of rows, each drawn in its share at every moment,
    and reshuffled with every pass over it. Called with the 0-based number of a batch, gives its
    rows and their draw numbers, none after the last; a function of (seed, number), so that a
    resumed run goes on in it."""

    def __init__(
        self, sets: list[list], shares: list[float], per_batch: int, batches: int, seed: int
    ):
        self.per_batch = per_batch
        which = mix(shares, per_batch * batches).tolist()
        places = []  # of the rows in each set, as they are drawn
        for k, rows in enumerate(sets):
            places.append(iter(data_order(range(which.count(k)), len(rows), seed)))
        self.rows = [sets[k][next(places[k])] for k in which]

    def __call__(self, index: int) -> tuple[list, list[int]]:
        start = index * self.per_batch
        rows = self.rows[start : start + self.per_batch]
        return rows, list(range(start, start + len(rows)))


class InOrder:
    """Rows as they stand, ``size`` at a time, for evaluations; ``len`` is the number of batches."""

    def __init__(self, rows: list, size: int):
        self.rows, self.size = rows, size

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)

    def __call__(self, index: int) -> tuple[list, list[int]]:
        rows = self.rows[index * self.size : (index + 1) * self.size]
        return rows, [prompt_of(row).index for row in rows]


def prompt_of(row: Any) -> Prompt:
    """The prompt of a row: itself, or its attribute."""
    return getattr(row, "prompt", row)


def mix(weights: list[float], draws: int) -> np.ndarray:
    """(draws,) set of each draw. Draw j of set i has the time (j + 1/2) / weight i: shares are kept
    at every moment, and a longer plan begins like a shorter one."""
    times = (np.arange(draws) + 0.5) / np.reshape(weights, (-1, 1))  # (sets, draws)
    which = np.repeat(np.arange(len(weights)), draws)
    return which[np.lexsort((which, times.ravel()))[:draws]]


def data_order(draws: range, rows: int, seed: int) -> list[int]:
    """Rows taken as draws number ``draws``: pass e over the data uses a permutation that depends on
    (seed, e) only."""
    passes = range(draws.stop // rows + 1)
    order = [np.random.default_rng([seed, k]).permutation(rows) for k in passes]
    return np.concatenate(order)[draws.start : draws.stop].tolist()


def shares_of(named: list[tuple[str, float | None]], sets: list[list]) -> list[float]:
    """How often each set of rows is drawn, in proportion: its weight in --data, or its size."""
    return [weight or float(len(rows)) for (_, weight), rows in zip(named, sets)]


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
    """Decodes the images of the next batch in threads while the model works on this one.

    Args:
        order: 0-based number of a batch -> its rows and their draw numbers, none after the last.
            Rows are prompts, or objects with a ``prompt``.
        taken: batches taken so far.
        dropped: prompts dropped so far, whose images do not decode (--on_bad_row skip).

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
        self.pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="images")
        self.ahead: tuple | None = None  # what is decoding for the next `take`
        self.rows: list = []

    def __enter__(self) -> "PromptLoader":
        return self

    def __exit__(self, *_) -> None:
        self.pool.shutdown(cancel_futures=True)

    def take(self, least: int = 1) -> Batch:
        """The prompts of the next batch, decoded; from now on those of the one after it decode.
        Raises UserError: of prompts whose images decode there are not ``least``."""
        if self.ahead is None:
            self.ahead = self.submit(*self.order(self.taken))
        self.rows = self.ahead[0]
        batch = self.collect(*self.ahead)
        self.taken += 1
        self.ahead = self.submit(*self.order(self.taken))
        if len(batch.prompts) - len(batch.dropped) < least:
            raise UserError(f"of {len(batch.prompts)} prompts no image can be decoded")
        return batch

    def submit(self, rows: list, draws: list[int]) -> tuple:
        """Begin to decode this rank's share; `collect` takes what this returns."""
        futures = {}
        for i in range(self.rank, len(rows), self.world):
            prompt = prompt_of(rows[i])
            if prompt.images:
                futures[i] = self.pool.submit(load_pixels, prompt, self.processor)
        return rows, draws, futures

    def collect(self, rows: list, draws: list[int], futures: dict[int, Future]) -> Batch:
        """Wait for the images.

        Raises:
            UserError: on every rank, if an image of any rank does not decode and --on_bad_row is
                error.
        """
        prompts = [prompt_of(row) for row in rows]
        patches, bad = {}, {}
        for i, future in futures.items():
            try:
                patches[i] = future.result()
            except ValueError as error:
                bad[i] = printable(f"{prompts[i].source}: {error}")
        problems: dict[int, str] = {}
        for part in distributed.gather_objects(bad):
            problems |= part
        if problems and self.on_bad_row == "error":
            raise UserError("\n".join(problems.values()))
        if problems and distributed.is_main():
            first = "\n  ".join(list(problems.values())[:5])
            print(f"dropped {len(problems)} of {len(prompts)} prompts:\n  {first}", flush=True)
        self.dropped += len(problems)
        owners = [i % self.world for i in range(len(prompts))]
        return Batch(prompts, draws, owners, dropped=sorted(problems), patches=patches)


def join_pixels(parts: list[Pixels]) -> Pixels:
    """One after the other."""
    patches, grids = zip(*parts)
    return torch.cat(patches), torch.cat(grids)


def load_pixels(
    prompt: Prompt,
    processor: Processor,
    change: Callable | None = None,
    place: tuple[int, ...] = (),
) -> Pixels | None:
    """Decode the images and clips of a prompt: patches (ΣP, ...) or tiles (ΣT, 3, h, w) float32,
    and grids (I, G) int64, G up to 3; None without either.

    Args:
        change: of Pillow's image and ``(*place, k)``, where k counts the images and frames of the
            prompt -> another image of the same size, which stands in its place.

    Raises ValueError: a body that cannot be decoded, or a file that changed since it was loaded.
    """
    if not prompt.images:
        return None
    family, count = processor.family, 0
    pixels = []
    for item in prompt.images:
        frames = read_frames([item], family.video_frames)
        if change is not None:
            frames = [change(frame, (*place, count + k)) for k, frame in enumerate(frames)]
        count += len(frames)
        pixels.append(family.patches(*frames))
    patches, grids = zip(*pixels)
    expected = tuple(grid[:3] for grid in prompt.grids)
    if grids != expected:
        raise ValueError(
            f"{prompt.images}: patch grids {expected} by the headers, but {grids} decoded: changed "
            "since loaded, or a PNG has EXIF data after its body; restore the file"
        )
    return torch.cat(patches), torch.tensor(grids)
