"""What a conversion does not read: each column, and each key of a message, stands in one table.

What a reader does not take out of a row is entered here under its name; inside an object as column.key.
At the end, what could change what is learned must have been named by --keep or --drop:

    listed alone    empty values, URLs, dates, ids (columns called so, and hashes), what the prompt or the
                    answer says anyway, and a text or number that is the same in every row
    ends it         anything else: lists, truth values, numbers, labels, texts, names of sides, pictures
"""

import datetime
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from common.rewards.rules import words_of

ENOUGH = 1000  # rows after which an early end tells what the end would tell
URL = r"(?i)(https?|ftp|s3|gs|hf)://\S+"
HASH = r"(?i)[0-9a-f]{16,}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
DATE = r"\d{4}-\d\d-\d\d([T ][\d:.]+(Z|[+-][\d:]+)?)?"
ID = r"(?i:id|idx|index|uid|uuid)"  # a column called so
AN_ID = rf"{ID}|.*_{ID}|.*[a-z](Id|ID|Idx|Index)"  # ... or so, unless its values number two sides
NOTHING = r"(?i)\s*(none|null|nan|n/a)?\s*"
PICTURE_VALUE = r"(?is)data:image/.*|iVBORw0KGgo.*|/9j/.*|\S+\.(bmp|gif|jpe?g|png|tiff?|webp|mp4|avi|mkv|mov|webm)"
LONG = 20  # characters of a text that is not by chance in a prompt

# How a text names a side of a pair, or neither.
RELATION = r"\W*([ab])\s*([<>=~≈])[<>=~≈]*\s*([ab])\W*"
LETTER = r"\W*((model|response|assistant|answer|output|option|choice|side)[ _-]?)?([ab])\W*"
TIE = r"\W*(tie|tied|draw|equal|equally good|same|both|neither|both ?bad|tie ?\(both ?bad\))\W*"


def read_side(text: str) -> str:
    """The side that a text prefers, A or B, or tie; "": it names none."""
    text = text.lower().replace("_", " ").strip()
    relation = re.fullmatch(RELATION, text)
    if relation and relation[1] != relation[3]:
        first = relation[1] if relation[2] != "<" else relation[3]
        return first.upper() if relation[2] in "<>" else "tie"
    letter = re.fullmatch(LETTER, text)
    if letter:
        return letter[3].upper()
    return "tie" if re.fullmatch(TIE, text) else ""


@dataclass(frozen=True)
class Row:
    """The row in which something is not read."""

    split: str
    texts: Collection[str] = ()  # what its prompt and answer say
    is_pair: bool = False
    replaced: Collection[str] = ()  # columns in whose place --columns has named others


@dataclass
class Entry:
    """A column, or a key, that is not read."""

    example: str
    rows: Counter[str] = field(default_factory=Counter)  # by split
    values: dict[str, str] = field(default_factory=dict)  # the first one of each split
    varies: bool = False
    matters: bool = False  # a value could change what is learned, even if all rows have it
    is_preference: bool = False  # beside a pair, it may say which side is better
    is_negative: bool = False  # a number below 0 was seen
    is_picture: bool = False


@dataclass
class Account:
    """The entries of a conversion, by name, and what else is to be said at its end."""

    rows: Counter[str] = field(default_factory=Counter)  # by split
    entries: dict[str, Entry] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def enter(self, name: str, value: Any, row: "Row") -> None:
        """Enter a value that is not read; of an object, each of its values."""
        if isinstance(value, dict) and value and not is_key(name):
            for key, part in value.items():
                self.enter(f"{name}.{key}", part, row)
            return
        split, kind = row.split, kind_of(name, value, row.texts)
        if kind == "empty":
            return
        entry = self.entries.setdefault(name, Entry(f"{value!r:.60}"))
        entry.rows[split] += 1
        if name in row.replaced or kind not in ("other", "constant"):
            return
        is_number = isinstance(value, int | float)
        is_side = isinstance(value, str) and bool(read_side(value))
        entry.is_preference |= is_side or is_number
        entry.is_negative |= is_number and value < 0
        entry.is_picture |= isinstance(value, bytes) or bool(
            re.fullmatch(PICTURE_VALUE, f"{value}")
        )
        entry.matters |= kind == "other" or is_side or is_key(name) or is_number and row.is_pair
        first = entry.values.setdefault(split, f"{value!r}")
        entry.varies |= first != f"{value!r}"

    def could_matter(self, name: str) -> bool:
        """Whether an entry could change what is learned."""
        entry = self.entries[name]
        if not entry.values:
            return False
        everywhere = all(entry.rows[split] == self.rows[split] for split in entry.values)
        return entry.matters or entry.varies or not everywhere or entry.rows.total() < 2

    def unnamed(self, named: Collection[str]) -> list[str]:
        """The entries that could change what is learned and that no flag names."""
        return [
            name
            for name in self.entries
            if self.could_matter(name) and not any(part in named for part in names_of(name))
        ]

    def table(self, names: Iterable[str]) -> str:
        """A line for each of these entries: its name, in how many rows it is, and an example."""
        names = list(names)
        width = max((len(name) for name in names), default=0)
        total = self.rows.total()
        lines = []
        for name in names:
            entry = self.entries[name]
            lines.append(f"  {name:{width}}  {entry.rows.total()} of {total} rows  {entry.example}")
        return "\n".join(lines)


def names_of(name: str) -> Iterator[str]:
    """The names that a flag may call an entry: a.b.c, a.b, a."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def is_key(name: str) -> bool:
    """Whether an entry is a key of messages."""
    return name.startswith("messages.")


def kind_of(name: str, value: Any, texts: Collection[str]) -> str:
    """What a value is: empty, a URL, date or id, said (by the prompt or answer), what may be a constant, or
    other."""
    if value is None or isinstance(value, float) and math.isnan(value):
        return "empty"
    if isinstance(value, datetime.date):
        return "date"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "id" if is_id(name, value) else "constant"
    if not isinstance(value, str):
        return "other" if value or isinstance(value, bool) else "empty"
    if re.fullmatch(NOTHING, value):
        return "empty"
    if re.fullmatch(URL, value):
        return "URL"
    if re.fullmatch(DATE, value):
        return "date"
    if re.fullmatch(HASH, value) or is_id(name, value):
        return "id"
    return "said" if is_said(value, texts) else "constant"


def is_id(name: str, value: Any) -> bool:
    """Whether a column is called an id, and holds none of what a side is called: 0, 1, 2, model_a."""
    last = name.rpartition(".")[2]
    if isinstance(value, str) and (re.search(r"\s", value) or read_side(value)):
        return False
    if re.fullmatch(ID, last):
        return not isinstance(value, float)
    return bool(re.fullmatch(AN_ID, last)) and value not in (0, 1, 2, "0", "1", "2")


def is_said(value: str, texts: Collection[str]) -> bool:
    """Whether a text is one of these or, if it is long, a part of one."""
    plain = words_of(value)
    for text in texts:
        text = words_of(re.sub("<(image|video)>", "", text))
        if plain == text or len(plain) >= LONG and plain in text:
            return True
    return False
