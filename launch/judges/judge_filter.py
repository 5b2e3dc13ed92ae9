"""Judgements as rows to train on, between a cold start and RL.

    python launch/judges/judge_filter.py RUN --right sft.jsonl --wrong rl.jsonl

RUN is the folder of `train_ppo_vl.py --eval_only --row_kind judgements --eval_samples K` over
training rows (its --eval_data). For every question (a row in one order), the first right judgement
becomes a row of prompt and response: the question, and what the judge wrote. A row with a wrong
judgement, in either order, goes to RL unchanged; so does one with a judgement that was cut off, as it
has no verdict. Paths become absolute."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project's folder


import json

from common.ground.files import UserError
from launch import tool
from launch.judges.judge_table import JUDGEMENT, Orders, read_judgements

RECORD_FORM = JUDGEMENT | {"messages": list, "images": list, "response": str, "truncated": bool}


def filter_rows(rows: list[Orders]) -> tuple[list, list]:
    """Rows to imitate, and rows for RL."""
    right, wrong = [], []
    for orders in rows:
        misses = 0
        for records in orders.values():
            hits = [record for record in records if record["verdict"] == record["reference"]]
            misses += len(records) - len(hits)
            if hits:
                first = hits[0]
                right.append(
                    {"messages": first["messages"], "response": first["response"]} | media_of(first)
                )
        if misses:
            judgement = next(iter(orders.values()))[0]
            wrong.append(judgement["row"] | media_of(judgement))
    return right, wrong


def media_of(record: dict) -> dict:
    """The columns of images and of videos, as lists."""
    columns = {"images": [], "videos": []}
    for item in record["images"]:
        columns["images" if isinstance(item, str) else "videos"].append(item)
    return {name: items for name, items in columns.items() if items}


@tool.one_message()
def main(argv: list[str] | None = None) -> None:
    parser = tool.parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument(
        "--right", type=Path, required=True, help="file to write: judgements to imitate"
    )
    parser.add_argument("--wrong", type=Path, required=True, help="file to write: rows for RL")
    args = parser.parse_args(argv)
    right, wrong = filter_rows(read_judgements(args.run, RECORD_FORM))
    print(len(right), "right judgements,", len(wrong), "rows with a wrong one", flush=True)
    if not right or not wrong:
        raise UserError("one of the two files would be empty")
    for path, rows in ((args.right, right), (args.wrong, wrong)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
