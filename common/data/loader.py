"""From rows of data to batches of prompts, in the order in which rows are drawn.

    rows  -> batches, drawn at random or in file order       draw_batches, batches_in_order
    batch -> images and clips decoded, one batch ahead       PromptLoader

Shapes: P prompt tokens, I images. A user's mistake is a UserError that names the file, the line
and the numbers.
"""

import heapq
import itertools
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common import distributed
from common.buffers import Batch
from common.data.images import read_frames
from common.data.processor import Processor
from common.data.rows import LEAVE_OUT, Prompt, report_bad
from common.flags import DataArgs, parse_datasets
from common.ground.files import UserError

DECODERS = 2  # threads that decode images while the model works
Drawn = tuple[list, list[int]]  # the rows of a batch, and their draw numbers

# -------------------------------------------------------------------------------------------------
# Order of rows
# -------------------------------------------------------------------------------------------------


def draw_batches(
    sets: list[list], shares: list[float], size: int, seed: int, start: int = 0
) -> Iterator[Drawn]:
    """Endless batches of a training run, from its row number ``start`` on. Each set of rows is drawn in
    proportion to its share, evenly over time, and reshuffled with every pass over it. The sequence of
    rows does not depend on the size of batches."""
    which = mix(shares)
    before = Counter(itertools.islice(which, start))
    orders = [data_order(len(rows), seed, before[k]) for k, rows in enumerate(sets)]
    rows = (sets[k][next(orders[k])] for k in which)
    return cut_batches(zip(rows, itertools.count(start)), size)


def batches_in_order(rows: list, size: int) -> list[Drawn]:
    """Rows in their order, ``size`` at a time, for evaluations."""
    return list(cut_batches(((row, prompt_of(row).index) for row in rows), size))


def cut_batches(draws: Iterator, size: int) -> Iterator[Drawn]:
    """(row, draw number), ... -> ([row, ...], [draw number, ...]), ..."""
    while batch := list(itertools.islice(draws, size)):
        rows, numbers = map(list, zip(*batch))
        yield rows, numbers


class HasPrompt(Protocol):
    """A script's own type of row, such as a question with its answers."""

    @property
    def prompt(self) -> Prompt: ...


def prompt_of(row: Prompt | HasPrompt) -> Prompt:
    return row if isinstance(row, Prompt) else row.prompt


def mix(weights: list[float]) -> Iterator[int]:
    """The set of each draw, without end. Draw j of set i has the time (j + 1/2) / weight i, so that
    each set gets its share of any run of consecutive draws."""

    def times(weight: float, k: int) -> Iterator:
        return (((j + 0.5) / weight, k) for j in itertools.count())

    return (k for _, k in heapq.merge(*map(times, weights, itertools.count())))


def data_order(rows: int, seed: int, start: int = 0) -> Iterator[int]:
    """Rows as they are drawn, without end, from draw number ``start`` on: pass e over the data uses a
    permutation that depends on (seed, e) only."""
    for k in itertools.count(start // rows):
        order = np.random.default_rng([seed, k]).permutation(rows)
        yield from order[max(0, start - k * rows) :].tolist()


def draw_by_weights(
    weights: Sequence[float], count: int, size: int, seed: tuple[int, ...]
) -> list[int]:
    """``size`` of ``count`` rows, each at most once, by their weights. Raises UserError: these are not
    ``count`` numbers of at least 0, ``size`` of them above 0."""
    try:
        chances = np.array(weights, np.float64)
        if chances.shape != (count,) or chances.min() < 0 or not 0 < chances.sum() < np.inf:
            raise ValueError(f"expected {count} weights of 0 or more, got {chances!s:.200}")
        noise = np.random.default_rng(seed)
        return noise.choice(count, size, False, chances / chances.sum()).tolist()
    except (TypeError, ValueError, OverflowError) as error:  # other numbers, or too few above 0
        raise UserError(f"{type(error).__name__}: {error}") from error


def shares_of(spec: str, sets: list[list]) -> list[float]:
    """How often each set of rows is drawn, in proportion: its weight in --data, or its size."""
    return [weight or float(len(rows)) for (_, weight), rows in zip(parse_datasets(spec), sets)]


def repeated_rows(args: DataArgs, sets: list[list]) -> list[str]:
    """Messages about files of --data that have fewer rows than a step takes of them."""
    shares, problems = shares_of(args.data, sets), []
    for (path, _), rows, share in zip(parse_datasets(args.data), sets, shares):
        taken = args.prompts_per_step * share / sum(shares)
        if len(rows) < taken:
            problems.append(
                f"{path}: a step takes {taken:.0f} of its {len(rows)} rows, some of them again"
            )
    return problems


# -------------------------------------------------------------------------------------------------
# Decoding, one batch ahead
# -------------------------------------------------------------------------------------------------


@dataclass
class PromptLoader:
    """Decodes the images of the next batch in threads while the model works on this one."""

    processor: Processor
    args: DataArgs
    batches: Iterable[Drawn] = ()  # to come; rows are prompts, or objects with a ``prompt``

    def __post_init__(self):
        self.rank, self.world = distributed.rank_here(), distributed.world_size()
        self.pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="images")
        self.later = iter(self.batches)

    def __enter__(self) -> "PromptLoader":
        self.ahead = self.submit_next()  # what is decoding for the next `take`
        return self

    def __exit__(self, *_) -> None:
        self.pool.shutdown(cancel_futures=True)

    def take(self, least: int = 1) -> tuple[list, Batch]:
        """The rows of the next batch and their prompts, decoded; from now on those of the one after it
        decode. Raises UserError: fewer than ``least`` prompts have images that decode."""
        rows, draws, futures = self.ahead
        batch = self.collect(rows, draws, futures)
        self.ahead = self.submit_next()
        if len(batch.prompts) - len(batch.dropped) < least:
            raise UserError(f"the images of all {len(batch.prompts)} prompts cannot be decoded")
        return rows, batch

    def submit_next(self) -> tuple:
        """Begin to decode the next batch; there is none after the last."""
        return self.submit(*next(self.later, ([], [])))

    def submit(self, rows: list, draws: list[int]) -> tuple:
        """Begin to decode this rank's share; `collect` takes what this returns."""
        futures = {}
        for i, owner in enumerate(self.owners(len(rows))):
            prompt = prompt_of(rows[i])
            if owner == self.rank and prompt.images:
                futures[i] = self.pool.submit(load_pixels, prompt, self.processor)
        return rows, draws, futures

    def owners(self, count: int) -> list[int]:
        """The ranks of ``count`` prompts."""
        return [i % self.world for i in range(count)]

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
            except UserError as error:
                bad[i] = f"{prompts[i].source}: {error}"
            except Exception as error:
                error.add_note(f"in {prompts[i].source}")
                raise
        problems = dict(ChainMap(*distributed.gather_objects(bad)))
        is_error = self.args.on_bad_row == "error"
        report_bad("images of a batch", list(problems.values()), len(prompts), is_error, LEAVE_OUT)
        owners = self.owners(len(prompts))
        return Batch(prompts, draws, owners, dropped=sorted(problems), patches=patches)


def load_pixels(
    prompt: Prompt,
    processor: Processor,
    change: Callable | None = None,
    key: tuple[int, ...] = (),
) -> Tensor | None:
    """Decode the images and clips of a prompt: patches (ΣP, ...) or tiles (ΣT, 3, h, w) float32, which
    have its `Prompt.patch_grids`; None without either.

    Args:
        change: (all Pillow images and frames of the prompt, the key of their noise) -> as many of the
            same sizes, to be used instead.

    Raises UserError: a body that cannot be decoded, or a file that changed since it was loaded.
    """
    if not prompt.images:
        return None
    family = processor.family.among(len(prompt.grids))
    parts = [read_frames(item, family.video_frames) for item in prompt.images]
    if change is not None:
        changed = iter(change(list(itertools.chain(*parts)), key))
        parts = [list(itertools.islice(changed, len(frames))) for frames in parts]
    patches, grids = zip(*[family.patches(*frames) for frames in parts])
    # the grids of an environment's images may follow those of the prompt's own
    expected = tuple(grid[:3] for grid in prompt.grids[: len(grids)])
    if grids != expected:
        raise UserError(
            f"{prompt.images}: patch grids {expected} by the headers, but {grids} decoded: a file has "
            "changed since the start, or a PNG has EXIF data after its body; restore the file"
        )
    return torch.cat(patches)
