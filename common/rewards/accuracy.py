"""How good a judge's judgements are, from the records of an evaluation of train_grm_vl.py.

records  -> loss, accuracy, exact match, calibration, confusion    summarise
summary  -> what judge.json keeps of it                            held_out_record
kept     -> whether that is above chance                           doubtful_accuracy
"""

import math
from typing import Any

import numpy as np

from common.rewards.judge import PAIRS, SWAPPED
from common.rewards.rules import same_words

SHORT_ANSWER = 16  # tokens; a longer response without a verdict is not compared word by word


def summarise(records: list[dict]) -> dict[str, Any]:
    """Loss over all records, accuracy and related metrics over those with a verdict, exact match
    over short responses without one."""
    loss = sum(record["loss"] for record in records)
    summary: dict[str, Any] = {"loss": loss / sum(record["tokens"] for record in records)}
    short = [record for record in records if _is_short_answer(record)]
    if short:
        summary["exact_match"] = _share(list(map(_is_exact, short)))
    graded = [record for record in records if record["gt_answer"] is not None]
    both = _in_both_orders(graded)
    if graded:
        summary |= _grades(graded, both)
    for name, hits in _hits_by_part(graded).items():
        accuracies = {key: _share(own) for key, own in sorted(hits.items())}
        summary[f"accuracy_per_{name}"] = accuracies
    summary["confusion"] = _confusion(graded)
    summary["counts"] = {
        "examples": len(records),
        "graded": len(graded),
        "pairs_in_both_orders": len(both),
    }
    return summary


def _grades(graded: list[dict], both: list[list[str | None]]) -> dict[str, float]:
    """Rates of the records with a right verdict; an unparsable verdict counts as wrong."""
    said = [record["predicted_answer"] for record in graded]
    right = [record["gt_answer"] for record in graded]
    grades = {
        "accuracy": _share([a == b for a, b in zip(said, right)]),
        "parse_rate": _share([verdict is not None for verdict in said]),
    }
    if both:
        grades["position_consistency"] = _share([a is not None and a == b for a, b in both])
    likely = [record for record in graded if record["probabilities"]]
    if likely:
        grades |= _calibration(likely)
    return grades


def _is_short_answer(record: dict) -> bool:
    return record["gt_answer"] is None and record["tokens"] <= SHORT_ANSWER


def _is_exact(record: dict) -> bool:
    return same_words(record["generated_text"], record["response_text"])


def _hits_by_part(graded: list[dict]) -> dict[str, dict]:
    """Whether each verdict is right, by source, kind and, of pairs, order."""
    hits = {"source": {}, "kind": {}, "order": {}}
    for record in graded:
        info, hit = record["info"], record["predicted_answer"] == record["gt_answer"]
        keys = {"source": info["source"], "kind": info["kind"]}
        if info["kind"] in PAIRS:
            keys["order"] = record["order"]
        for name, key in keys.items():
            hits[name].setdefault(key, []).append(hit)
    return hits


def _confusion(graded: list[dict]) -> dict[str, dict]:
    """Kind -> right verdict -> verdict -> how often."""
    table = {}
    for record in graded:
        rows = table.setdefault(record["info"]["kind"], {})
        row = rows.setdefault(record["gt_answer"], {})
        said = record["predicted_answer"] or "unparsable"
        row[said] = row.get(said, 0) + 1
    return table


def _share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def _in_both_orders(graded: list[dict]) -> list[list[str | None]]:
    """The two verdicts on each pair that was shown in both orders, by the names of the given
    order."""
    pairs: dict[tuple, list[str | None]] = {}
    for record in graded:
        info, said = record["info"], record["predicted_answer"]
        if info["kind"] in PAIRS:
            if record["order"] == "swapped":
                said = SWAPPED.get(said, said)
            pairs.setdefault((info["dataset"], info["row"]), []).append(said)
    return [verdicts for verdicts in pairs.values() if len(verdicts) == 2]


def _calibration(likely: list[dict]) -> dict[str, float]:
    """Accuracy of the likeliest verdicts, and the expected calibration error of their probabilities
    in ten bins (Guo et al. 2017)."""
    hits, sure = [], []
    for record in likely:
        chances = record["probabilities"]
        best = max(chances, key=chances.get)
        hits.append(float(best == record["gt_answer"]))
        sure.append(chances[best])
    hits, sure = np.array(hits), np.array(sure)
    bins = np.minimum((sure * 10).astype(int), 9)
    gaps = [abs(float((hits - sure)[bins == b].sum())) for b in range(10)]
    return {"likelihood_accuracy": float(hits.mean()), "likelihood_ece": sum(gaps) / len(likely)}


def held_out_record(summary: dict) -> dict:
    """What judge.json says of an evaluation: its step, and by kind accuracy, number of judgements
    and chance: the share of the most frequent right verdict, which always saying it scores."""
    kinds = {}
    for kind, rows in summary["confusion"].items():
        right = [sum(said.values()) for said in rows.values()]
        kinds[kind] = {
            "accuracy": summary["accuracy_per_kind"][kind],
            "chance": max(right) / sum(right),
            "count": sum(right),
        }
    return {"step": summary["step"], "kinds": kinds}


def doubtful_accuracy(judge: dict, kind: str) -> str:
    """Describe a recorded held-out accuracy on questions of this kind that is not above chance by
    more than two standard errors, or return ""."""
    held_out = judge.get("held_out") or {"kinds": {}}
    if kind not in held_out["kinds"]:
        return ""
    accuracy, chance, count = held_out["kinds"][kind].values()
    if accuracy > chance + 2 * math.sqrt(chance * (1 - chance) / count):
        return ""
    return (
        f"the judge's held-out accuracy on {kind} ({accuracy:.3f} of {count}, step"
        f" {held_out['step']}) is not above chance ({chance:.3f})"
    )


def chance_warnings(judge: dict, last: int) -> list[str]:
    """Of judge.json's recorded evaluation, if at least a tenth of the run's ``last`` steps were done
    by then: one for each kind of question that is answered at chance. Where all right verdicts are
    the same, no learning rate helps, and only who asks such a judge for rewards is warned."""
    if 10 * judge["held_out"]["step"] < last:
        return []
    kinds = judge["held_out"]["kinds"].items()
    doubts = [doubtful_accuracy(judge, kind) for kind, own in kinds if own["chance"] < 1]
    advice = (
        "Pairs are learned after a plateau; otherwise try another --lr, lower ones too, or look for "
        "rows whose verdict cannot be seen in them"
    )
    return [f"warning: {doubt}. {advice}" for doubt in doubts if doubt]
