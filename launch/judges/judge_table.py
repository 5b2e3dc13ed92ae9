"""The accuracy of a judge, by every convention in which published tables differ.

    python launch/judges/judge_table.py RUN
    python launch/judges/judge_table.py RUN OTHER        two judges on the same rows, and their difference

RUN is the folder of `train_ppo_vl.py --eval_only --row_kind judgements --eval_samples K`, in which
every pair was judged K times in each order; the newest of its evaluations is read. Rows with only one
order do not count.

"votes@k" is the majority of the first k verdicts in an order, without those that could not be read; a
tied vote counts one half. (VL-RewardBench's cal.py requires more than half of all k, and leaves out
questions without such a majority.) All other lines are about single judgements. "macro" is the mean
over groups, blank if one of them has no value. In a benchmark without ties, such as VL-RewardBench, a
verdict of a tie is wrong, or left out as in cal.py. The interval is that of the first accuracy, by a
bootstrap over pairs, in which rows that count together stay together; that of the difference of two
judges draws the same pairs for both."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project's folder

from common.ground import versions

versions.require("numpy")


from collections import defaultdict
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from common.ground.files import UserError, check_form, read_records, say
from common.rewards.rules import vote
from launch import tool
from launch.data.benchmarks import VL_ELSEWHERE, vl_group

MIRRORED = {"A": "B", "B": "A"}
FIRST = "accuracy, unread is wrong"
INTERVAL = "95 % of the first accuracy"
BOOTSTRAPS = 1000

JUDGEMENT = {  # the form of what is read of a record
    "index": range(2**53),
    "order": ("given", "swapped"),
    "verdict?": str,
    "reference": str,
    "group": str,
    "row": {"benchmark?": str, "pair?": str | int | float, "responses?": list},
}

Orders = dict[str, list[dict]]  # order -> the judgements on a row, sample by sample
Column = dict[str, str]  # line -> cell
Units = dict[tuple, "Unit"]  # by what its rows share
Groups = list[list["Unit"]]  # a mean over them is a column

# ---- Judgements


def read_judgements(run: Path, form: dict = JUDGEMENT) -> list[Orders]:
    """The rows of a run's newest evaluation, whose file it prints. Raises UserError: nothing was
    judged, or a record has another form."""
    records = []
    paths = run.rglob("samples/eval-*.jsonl")
    for path in sorted(paths, key=lambda path: (path.name, path.stat().st_mtime))[-1:]:
        say(f"{path}", file=sys.stderr)
        records = read_records(path)
    if not records or "verdict" not in records[0]:
        raise UserError(
            f"{run} has no judgements: make them by train_ppo_vl.py --eval_only --row_kind judgements"
        )
    check_form(records, [form], f"{path}")
    rows = defaultdict(lambda: defaultdict(list))
    for record in records:
        rows[record["index"] - (record["order"] == "swapped")][record["order"]].append(
            {"verdict": None} | record
        )
    return list(rows.values())


class Unit:
    """Rows that count together, usually one row: for each line of the table a count, and out of how many."""

    def __init__(self, first: dict):
        self.first = first  # one of its records
        self.counts = {}  # line -> (2,)
        self.hits = []  # for each row: which judgements are right

    def add(self, orders: Orders, odd_ties: bool) -> None:
        """Count the judgements on a row, with verdicts turned into the given order; ``odd_ties``: also
        verdicts of a tie in a benchmark that has none."""
        first = orders["given"][0]
        right, row = first["reference"], first["row"]
        sizes = [len(str(answer)) for answer in row.get("responses") or [""]]
        unswapped = [record["verdict"] for record in orders["given"]]
        swapped = [
            MIRRORED.get(record["verdict"], record["verdict"]) for record in orders["swapped"]
        ]
        verdicts, both = unswapped + swapped, list(zip(unswapped, swapped))
        total, hits, unread = len(verdicts), verdicts.count(right), verdicts.count(None)
        sides = verdicts.count("A") + verdicts.count("B")
        longer, differ = "A" if sizes[0] > sizes[-1] else "B", sizes[0] != sizes[-1]
        self.hits.append([verdict == right for verdict in verdicts])
        lines = {
            FIRST: (hits, total),
            "accuracy, unread left out": (hits, total - unread),
            "accuracy, unread is one half": (hits + unread / 2, total),
            "accuracy, unread and ties left out": (odd_ties * hits, odd_ties * sides),
            "could not be read": (unread, total),
            "says a tie, where none is right": (odd_ties * verdicts.count("tie"), odd_ties * total),
            "both orders right": (both.count((right, right)), len(both)),
            "both orders alike": (
                sum(both.count((verdict, verdict)) for verdict in ("A", "B", "tie")),
                len(both),
            ),
            "says A": (unswapped.count("A") + swapped.count("B"), sides),
            "says the longer answer": (differ * verdicts.count(longer), differ * sides),
            "the longer answer is right": (
                differ * (right == longer),
                differ * (right in MIRRORED),
            ),
        }
        for k in range(1, len(both) + 1, 2):
            lines[f"votes@{k}"] = vote(unswapped[:k], right) + vote(swapped[:k], right), 2
        lines[f"votes@{len(both)} of both orders"] = vote(verdicts, right), 1
        self.counts = {
            line: np.add(counts, self.counts.get(line, 0)) for line, counts in lines.items()
        }
        # ACC+, best of 4
        together = np.array([sum(map(all, zip(*self.hits))), total])
        self.counts["all that count together right"] = (row.get("pair") is not None) * together


def read_units(run: Path) -> Units:
    """The units of a run; prints how many rows count. Raises UserError: none does."""
    rows = read_judgements(run)
    pairs = [orders for orders in rows if len(orders) == 2]
    print(len(pairs), "of", len(rows), "rows were judged in two orders and count", file=sys.stderr)
    if not pairs:
        raise UserError(f"{run}: nothing was judged in two orders")
    units, odd = {}, benchmarks_with_odd_ties(pairs)
    for orders in pairs:
        first = orders["given"][0]
        pair = first["row"].get("pair")
        key = first["group"], pair, pair is None and first["index"]
        units.setdefault(key, Unit(first)).add(orders, first["row"].get("benchmark") in odd)
    return units


def benchmarks_with_odd_ties(rows: list[Orders]) -> set:
    """The benchmarks without a tie among their rows, but with one among the verdicts."""
    ties = {"verdict": set(), "reference": set()}  # benchmarks with a tie there
    for record in chain(*(chain(*orders.values()) for orders in rows)):
        for field in ties:
            if record[field] == "tie":
                ties[field].add(record["row"].get("benchmark"))
    return ties["verdict"] - ties["reference"]


# ---- Table


def make_table(units: Units) -> dict[str, Column]:
    """The columns of `columns_of`."""
    return {name: column(groups) for name, groups in columns_of(units).items()}


def compare(runs: list[Path], units: Units, others: Units) -> dict[str, Column]:
    """How far two judges are apart, in the same columns. Raises UserError: they did not judge the same
    rows."""
    rows = [[(key, unit.first["row"]) for key, unit in each.items()] for each in (units, others)]
    if rows[0] != rows[1]:
        raise UserError(
            f"{runs[0]} and {runs[1]} judged different rows: evaluate both on the same --eval_data"
        )
    columns, theirs = columns_of(units), columns_of(others)
    return {name: difference(runs, columns[name], theirs[name]) for name in columns}


def columns_of(by_key: Units) -> dict[str, Groups]:
    """What the columns are means over: all rows, each group, and all groups."""
    units = list(by_key.values())
    columns, groups = {"overall": [units]}, by_group(units)
    decided = [unit for unit in units if unit.first["reference"] != "tie"]
    if 0 < len(decided) < len(units):
        columns["without ties"] = [decided]
    if len(groups) > 1:
        columns |= {group: [members] for group, members in groups.items()}
        columns["macro"] = list(groups.values())
    if {unit.first["row"].get("benchmark") for unit in units} == {"vl_rewardbench"}:
        for script in VL_ELSEWHERE:
            columns[f"macro of {script}"] = list(by_group(units, script).values())
    return columns


def by_group(units: list[Unit], script: str = "") -> dict[str, list[Unit]]:
    """The units by the groups of the rows, or by those of another script for VL-RewardBench."""
    groups = defaultdict(list)
    for unit in units:
        groups[
            vl_group(f"{unit.first['row'].get('id')}", script) if script else unit.first["group"]
        ].append(unit)
    return dict(sorted(groups.items()))


def column(groups: Groups) -> Column:
    """The mean over groups, for every line that all groups have."""
    shares: Any = 0  # (lines,)
    for units in groups:
        counts = np.array([list(unit.counts.values()) for unit in units])  # (units, lines, 2)
        parts, wholes = counts.sum(axis=0).T  # (lines,)
        with np.errstate(invalid="ignore"):
            shares += parts / wholes / len(groups)  # nan: of a line of which the group has nothing
    lines = groups[0][0].counts
    cells = {line: f"{share:.3f}" for line, share in zip(lines, shares) if np.isfinite(share)}
    low, high = middle(bootstrap(groups))
    return rows_of(groups) | cells | {INTERVAL: f"{low:.3f}-{high:.3f}"}


def difference(runs: list[Path], groups: Groups, others: Groups) -> Column:
    """The first accuracies of two judges on the same rows."""
    a, b = (fmean(accuracy(units) for units in each) for each in (groups, others))
    low, high = middle(bootstrap(groups) - bootstrap(others))
    return rows_of(groups) | {
        f"{runs[0]}": f"{a:.3f}",
        f"{runs[1]}": f"{b:.3f}",
        "difference": f"{a - b:+.3f}",
        "95 % of the difference": f"{low:+.3f} to {high:+.3f}",
    }


def accuracy(units: list[Unit]) -> float:
    """The first one."""
    hits, total = np.sum([unit.counts[FIRST] for unit in units], axis=0)
    return float(hits / total)


def rows_of(groups: Groups) -> Column:
    """How many rows each group has."""
    return {"rows": "/".join(str(sum(len(unit.hits) for unit in units)) for units in groups)}


def bootstrap(groups: Groups) -> np.ndarray:
    """(BOOTSTRAPS,) means of the first accuracy, when the units of each group are drawn anew: the same ones
    for every judge."""
    means, rng = np.zeros(BOOTSTRAPS), np.random.default_rng(0)
    for units in groups:
        counts = np.array([unit.counts[FIRST] for unit in units])  # (units, 2)
        drawn = counts[rng.integers(len(units), size=(BOOTSTRAPS, len(units)))].sum(axis=1)
        means += drawn[:, 0] / drawn[:, 1] / len(groups)
    return means


def middle(values: np.ndarray) -> tuple[float, float]:
    """The ends of what 95 % of the values lie in."""
    low, high = np.percentile(values, (2.5, 97.5))
    return low, high


def print_table(table: dict[str, Column]) -> None:
    """In Markdown."""
    lines = [["", *table]]
    for name in table["overall"]:
        lines.append([name, *(cells.get(name, "") for cells in table.values())])
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        say(f"| {' | '.join(map(str.ljust, line, widths))} |")


@tool.one_message()
def main(argv: list[str]) -> None:
    parser = tool.parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("other", type=Path, metavar="OTHER", nargs="?")
    args = parser.parse_args(argv)
    units = read_units(args.run)
    if args.other is None:
        print_table(make_table(units))
        return
    others = read_units(args.other)
    for run, table in (args.run, make_table(units)), (args.other, make_table(others)):
        say(f"{run}\n")
        print_table(table)
        say("")
    say(f"{FIRST}\n")
    print_table(compare([args.run, args.other], units, others))


if __name__ == "__main__":
    main(sys.argv[1:])
