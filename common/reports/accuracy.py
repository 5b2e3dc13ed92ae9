"""How good a judge's judgements are, from the records of an evaluation.

records  -> loss, accuracy, exact match, calibration, confusion    summarise_judgements
         -> accuracy of the majority of k judgements               vote_rates
"""

from collections import Counter
from itertools import groupby
from operator import itemgetter
from statistics import fmean

from common.rewards.judgements import in_order
from common.rewards.rules import same_words, vote

SHORT_ANSWER = 16  # tokens; a longer response without a verdict is not compared word by word


def summarise_judgements(records: list[dict]) -> dict:
    """Loss over all records, exact match over short responses without a verdict, and accuracy and
    related metrics over records with one; the second order of a pair follows the first."""
    loss = sum(record["loss"] for record in records)
    summary: dict = {"loss": loss / sum(record["tokens"] for record in records)}
    graded, exact = [], []
    for record in records:
        if record["reference"] is not None:
            graded.append(record)
        elif record["tokens"] <= SHORT_ANSWER:
            exact.append(same_words(record["response"], record["target"]))
    if exact:
        summary["exact_match"] = fmean(exact)
    if graded:
        summary |= grades(graded)
    for key, field in (("source", "group"), ("kind", "label")):
        hits = {}
        for record in graded:
            hits.setdefault(record[field], []).append(is_right(record))
        summary[f"accuracy_per_{key}"] = {name: fmean(hits[name]) for name in sorted(hits)}
    summary["confusion"] = confusion(graded)
    return summary


def grades(graded: list[dict]) -> dict[str, float]:
    """Rates of the records with a right verdict; an unparsable verdict counts as wrong."""
    rates = {
        "accuracy": fmean(map(is_right, graded)),
        "parse_rate": fmean(record["verdict"] is not None for record in graded),
    }
    consistent = []
    for first, second in zip(graded, graded[1:]):
        if second["order"] == "swapped":
            verdict, other = first["verdict"], second["verdict"]
            consistent.append(verdict is not None and verdict == in_order(other, "swapped"))
    if consistent:
        rates["position_consistency"] = fmean(consistent)
    likely = [record for record in graded if record["probabilities"]]
    if likely:
        rates |= calibration(likely)
    return rates


def is_right(record: dict) -> bool:
    return record["verdict"] == record["reference"]


def confusion(graded: list[dict]) -> dict[str, dict]:
    """Kind -> right verdict -> verdict -> how often."""
    table = {}
    for record in graded:
        by_answer = table.setdefault(record["label"], {})
        counts = by_answer.setdefault(record["reference"], Counter())
        counts[record["verdict"] or "unparsable"] += 1
    return table


def calibration(likely: list[dict]) -> dict[str, float]:
    """Accuracy of the likeliest verdicts, and the expected calibration error of their probabilities
    in ten bins (Guo et al. 2017)."""
    right, gaps = 0, [0.0] * 10
    for record in likely:
        chances = record["probabilities"]
        best = max(chances, key=chances.get)
        is_hit = best == record["reference"]
        right += is_hit
        gaps[min(int(chances[best] * 10), 9)] += is_hit - chances[best]
    error = sum(map(abs, gaps)) / len(likely)
    return {"likelihood_accuracy": right / len(likely), "likelihood_ece": error}


def vote_rates(records: list[dict]) -> dict[int, float]:
    """k = 1, 3, ... -> how often the majority of the first k judgements on a question is right,
    among those that could be read; a tie with another verdict counts one half. Records of
    train_ppo_vl.py, by sample; those without a right verdict are left out."""
    judged = [one for one in records if "verdict" in one and one["reference"] is not None]
    questions = [list(part) for _, part in groupby(judged, key=itemgetter("index"))]
    rates = {}
    for k in range(1, max(map(len, questions), default=0) + 1, 2):
        votes = []
        for samples in questions:
            verdicts = [record["verdict"] for record in samples[:k]]
            votes.append(vote(verdicts, samples[0]["reference"]))
        rates[k] = fmean(votes)
    return rates
