"""Held-out rows that are training rows: an evaluation with them measures memory."""

import functools
import os
from collections.abc import Callable, Sequence

from common import distributed
from common.data.rows import Prompt
from common.ground.files import sha256

# rows, each with the answer that is right or to be imitated
Asked = Sequence[tuple[Prompt, str | None]]


def tell_shared_rows(train: Asked, held_out: Asked) -> None:
    """Print how many held-out rows are training rows: the same prompt, answer and images, wherever their
    files lie."""
    if not held_out or not distributed.is_main():
        return
    texts = {(prompt.text, answer) for prompt, answer in held_out}
    alike: dict[tuple, list[Prompt]] = {}
    for prompt, answer in train:
        if (prompt.text, answer) in texts:
            alike.setdefault((prompt.text, answer, sizes_of(prompt)), []).append(prompt)
    digest = functools.cache(sha256)
    twins = {}  # of held-out rows, by their place in a file; a pair in both orders is one row
    for prompt, answer in held_out:
        for other in alike.get((prompt.text, answer, sizes_of(prompt)), []):
            if have_same_files(prompt, other, digest):
                twins.setdefault(prompt.source, other.source)
                break
    if twins:
        row, twin = next(iter(twins.items()))
        count = len({prompt.source for prompt, _ in held_out})
        distributed.say_once(
            f"warning: {len(twins)} of {count} held-out rows are training rows, too: the same prompt, images "
            f"and answer, as in {row} and {twin}"
        )


def media_files(prompt: Prompt) -> list[str]:
    """The files of a row's images and of the frames of its clips."""
    return [path for item in prompt.images for path in ([item] if isinstance(item, str) else item)]


def sizes_of(prompt: Prompt) -> tuple[int, ...]:
    return tuple(map(os.path.getsize, media_files(prompt)))


def have_same_files(a: Prompt, b: Prompt, digest: Callable[[str], str]) -> bool:
    """Whether the files of two rows, of which there are equally many, have the same content."""
    return all(x == y or digest(x) == digest(y) for x, y in zip(media_files(a), media_files(b)))
