"""How good a judge's judgements are, from the records of an evaluation of train_grm_vl.py.

records  -> loss, accuracy, exact match, calibration, confusion    summarise
summary  -> what judge.json keeps of it                            held_out_record
settings -> whether that is above chance                           doubtful_accuracy
"""

import math
from collections import Counter
from statistics import fmean
from typing import Any

import numpy as np

from common.rewards.judge import JudgeSettings, PAIRS, SWAPPED
from common.rewards.rules import same_words

SHORT_ANSWER = 16  # tokens; a longer response without a verdict is not compared word by word


def summarise(records: list[dict]) -> dict[str, Any]:
    """Loss over all records, exact match over short responses without a verdict, and accuracy and
    related metrics over records with one."""
    loss = sum(record["loss"] for record in records)
    summary: dict[str, Any] = {"loss": loss / sum(record["tokens"] for record in records)}
    graded, exact = [], []
    for record in records:
        if record["gt_answer"] is not None:
            graded.append(record)
        elif record["tokens"] <= SHORT_ANSWER:
            exact.append(same_words(record["generated_text"], record["response_text"]))
    if exact:
        summary["exact_match"] = fmean(exact)
    if graded:
        summary |= grades(graded)
    for key in ("source", "kind"):
        named = [(record["info"][key], record) for record in graded]
        summary[f"accuracy_per_{key}"] = accuracies(named)
    ordered = [(record["order"], record) for record in pairs_of(graded)]
    summary["accuracy_per_order"] = accuracies(ordered)
    summary["confusion"] = confusion(graded)
    return summary


def grades(graded: list[dict]) -> dict[str, float]:
    """Rates of the records with a right verdict; an unparsable verdict counts as wrong."""
    rates = {
        "accuracy": fmean(is_right(record) for record in graded),
        "parse_rate": fmean(record["predicted_answer"] is not None for record in graded),
    }
    both = in_both_orders(graded)
    if both:
        rates["position_consistency"] = fmean(a is not None and a == b for a, b in both)
    likely = [record for record in graded if record["probabilities"]]
    if likely:
        rates |= calibration(likely)
    return rates


def is_right(record: dict) -> bool:
    return record["predicted_answer"] == record["gt_answer"]


def pairs_of(records: list[dict]) -> list[dict]:
    return [record for record in records if record["info"]["kind"] in PAIRS]


def accuracies(named: list[tuple[str, dict]]) -> dict[str, float]:
    """The accuracy of the records of each name."""
    hits: dict[str, list[bool]] = {}
    for name, record in named:
        hits.setdefault(name, []).append(is_right(record))
    return {name: fmean(hits[name]) for name in sorted(hits)}


def confusion(graded: list[dict]) -> dict[str, dict]:
    """Kind -> right verdict -> verdict -> how often."""
    table: dict[str, dict] = {}
    for record in graded:
        by_answer = table.setdefault(record["info"]["kind"], {})
        counts = by_answer.setdefault(record["gt_answer"], Counter())
        counts[record["predicted_answer"] or "unparsable"] += 1
    return table


def in_both_orders(graded: list[dict]) -> list[list[str | None]]:
    """The two verdicts on each pair that was shown in both orders, by the names of the given
    order."""
    verdicts: dict[tuple, list[str | None]] = {}
    for record in pairs_of(graded):
        info, verdict = record["info"], record["predicted_answer"]
        if record["order"] == "swapped":
            verdict = SWAPPED.get(verdict, verdict)
        verdicts.setdefault((info["dataset"], info["row"]), []).append(verdict)
    return [both for both in verdicts.values() if len(both) == 2]


def calibration(likely: list[dict]) -> dict[str, float]:
    """Accuracy of the likeliest verdicts, and the expected calibration error of their probabilities
    in ten bins (Guo et al. 2017)."""
    hits = np.zeros(len(likely))
    sure = np.zeros(len(likely))
    for i, record in enumerate(likely):
        chances = record["probabilities"]
        best = max(chances, key=chances.get)
        hits[i] = best == record["gt_answer"]
        sure[i] = chances[best]
    bins = np.minimum((sure * 10).astype(int), 9)
    gaps = [abs(float((hits - sure)[bins == b].sum())) for b in range(10)]
    return {"likelihood_accuracy": float(hits.mean()), "likelihood_ece": sum(gaps) / len(likely)}


def held_out_record(summary: dict) -> dict:
    """What judge.json says of an evaluation: its step, and by kind accuracy, number of judgements
    and chance: the share of the most frequent right verdict, which always saying it scores."""
    kinds = {}
    for kind, rows in summary["confusion"].items():
        right = [sum(counts.values()) for counts in rows.values()]
        kinds[kind] = {
            "accuracy": summary["accuracy_per_kind"][kind],
            "chance": max(right) / sum(right),
            "count": sum(right),
        }
    return {"step": summary["step"], "kinds": kinds}


def doubtful_accuracy(settings: JudgeSettings, kind: str) -> str:
    """Describe a recorded held-out accuracy on questions of this kind that is not above chance by
    more than two standard errors, or return ""."""
    held_out = settings.held_out or {"kinds": {}}
    if kind not in held_out["kinds"]:
        return ""
    accuracy, chance, count = held_out["kinds"][kind].values()
    if accuracy > chance + 2 * math.sqrt(chance * (1 - chance) / count):
        return ""
    return (
        f"the judge's held-out accuracy on {kind} ({accuracy:.3f} of {count}, step"
        f" {held_out['step']}) is not above chance ({chance:.3f})"
    )
