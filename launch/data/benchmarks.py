"""Published benchmarks of judges: their files, and which of their rows count together.

name                     a row, as published
vl_rewardbench           {id, query, response, image, human_ranking}, or {id, prompt, chosen, rejected, image}
mm_rlhf                  {id, image or video, prompt, chosen, rejected}; all pairs of an id make ACC+
multimodal_rewardbench   {ID, Text, Image, Output1, Output2, Better, Category}
rewardbench2             {id, prompt, chosen, rejected, subset}, lists of answers: pairs, which make best of 4
genai_bench              {prompt, left_image, right_image, vote_type}
"""

import re

from common.ground.files import UserError

FILE_COLUMNS = {
    "vl_rewardbench": "id",
    "mm_rlhf": "id prompt chosen rejected",
    "multimodal_rewardbench": "ID Text Output1 Output2 Better Category",
    "rewardbench2": "id prompt chosen rejected subset",
    "genai_bench": "vote_type",
}

# VL-RewardBench: groups by the beginnings of ids, as in its cal.py since May 2025.
VL_TABLE = """\
reasoning       mmmu mathverse
hallucination   hallucination rlhf rlaif
general         wildvision jailbreak politics svit lrvinstruction
"""
VL_GROUPS = {
    prefix: group
    for group, *prefixes in map(str.split, VL_TABLE.splitlines())
    for prefix in prefixes
}
# Ids that other scripts call general. R1-Reward's get_acc.py looks for "rlhf" where ids say RLHF;
# UnifiedReward's test_*vl*reward*bench.py, like cal.py before, have no group for ids that begin
# with hallucination.
VL_ELSEWHERE = {"R1-Reward": "rlhf rlaif", "UnifiedReward": "hallucination"}

MM_RLHF_GROUPS = ("mcq", "long", "short", "safety")  # folders of its images
PREFERRED = {
    "Output1": "A",
    "Output2": "B",
    "leftvote": "A",
    "rightvote": "B",
    "tievote": "tie",
    "bothbad_vote": "tie",
}

Rows = list[dict]


class LeftOut(Exception):
    """A row that our judges cannot read; the text says of which kind."""


def rows_of(benchmark: str, row: dict) -> Rows:
    """The rows for `convert` from a published row: pairs with "benchmark", "source" (the official
    group) and, if several pairs count together, "pair".

    Raises LeftOut, FileNotFoundError (no image), and UserError: a row without an answer, or of
    another benchmark."""
    require_columns(row, FILE_COLUMNS[benchmark])
    return [pair | {"benchmark": benchmark} for pair in READERS[benchmark](dict(row))]


def require_columns(row: dict, columns: str) -> None:
    """Raises UserError: one of the columns is missing or empty, or an entry of its list is
    missing. A model may have answered nothing, which is an answer."""
    for column in columns.split():
        value = row.get(column)
        if value in (None, "", []) or isinstance(value, list) and None in value:
            raise UserError(
                f"no {column} in a row with {', '.join(row)}: a pair without an answer, or a file of another benchmark "
                "or version"
            )


def vl_rewardbench(row: dict) -> Rows:
    require_columns(row, "chosen rejected" if "chosen" in row else "response human_ranking")
    return [row | {"image": take_file(row, "image"), "source": vl_group(row["id"])}]


def vl_group(name: str, script: str = "") -> str:
    """The group of an id of VL-RewardBench, officially or in another script."""
    prefix = re.split("[_-]", name)[0].lower()
    if prefix not in VL_GROUPS:
        raise UserError(f"no id of VL-RewardBench begins as {name!r:.60} does")
    return "general" if prefix in VL_ELSEWHERE.get(script, "").split() else VL_GROUPS[prefix]


def mm_rlhf(row: dict) -> Rows:
    column = "video" if row.get("video") else "image"
    path = take_file(row, column)
    group = column
    if column == "image":
        # the last one: folders further up are the user's
        named = [folder for folder in path.split("/") if folder in MM_RLHF_GROUPS]
        if not named:
            raise UserError(f"{path:.60} is in none of the folders {', '.join(MM_RLHF_GROUPS)}")
        group = named[-1]
    return [row | {column: path, "source": group, "pair": row["id"]}]


def multimodal_rewardbench(row: dict) -> Rows:
    responses = [row["Output1"], row["Output2"]]
    group, name = row["Category"], row["ID"].lower()
    if group == "safety":
        group += "/bias" if name.startswith("pairs") else "/toxicity"
    elif group == "reasoning":
        group += "/math" if name.startswith("math") else "/coding"
    pair = {
        "prompt": row["Text"],
        "image": take_file(row, "Image"),
        "id": row["ID"],
        "source": group,
    }
    return [pair | {"responses": responses, "preferred": PREFERRED[row["Better"]]}]


def rewardbench2(row: dict) -> Rows:
    if row["subset"] == "Ties":
        raise LeftOut("subset Ties")  # its metric needs scores
    if isinstance(row["chosen"], str):
        raise UserError("one answer as chosen: the first RewardBench?")
    group = {"source": row["subset"], "pair": row["id"]}
    return [
        row | group | {"chosen": row["chosen"][0], "rejected": answer} for answer in row["rejected"]
    ]


def genai_bench(row: dict) -> Rows:
    if any("video" in column for column in row):
        raise LeftOut("two videos")
    if "source_image" in row:
        raise LeftOut("an image beside those of both sides")
    images = [take_file(row, "left_image"), take_file(row, "right_image")]
    return [
        row
        | {"images": images, "preferred": PREFERRED[row["vote_type"]], "source": "image_generation"}
    ]


def take_file(row: dict, column: str):
    """Take an image or video out of a row. Raises FileNotFoundError: there is none."""
    if not row.get(column):
        raise FileNotFoundError(f"no {column}")
    return row.pop(column)


READERS = {
    "vl_rewardbench": vl_rewardbench,
    "mm_rlhf": mm_rlhf,
    "multimodal_rewardbench": multimodal_rewardbench,
    "rewardbench2": rewardbench2,
    "genai_bench": genai_bench,
}
