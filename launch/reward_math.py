r"""Mathematical answers, graded by math-verify: roots, fractions, pi, units, sets, expressions.

    pip install math-verify
    torchrun --nproc_per_node 8 train_ppo_vl.py --reward launch/reward_math.py:score ...

The answer is the last \boxed{...} of the response, and is right if the library or the rule boxed says so. The reward
is 0.9 for a right answer and 0.1 for the format of the rule: thoughts in <think>...</think>, which the chat template
may open, and then the answer. An answer that cannot be parsed is wrong, and so is one that takes the library longer
than SECONDS, such as 9^{9^{9}}, which sympy would write out.
"""

import re
from functools import partial

try:
    from math_verify import LatexExtractionConfig, parse, verify
except ModuleNotFoundError as error:
    error.msg += "; to install it: pip install math-verify"
    raise

from common.rewards import rules

SECONDS = 5  # to read an answer, and again to compare it
DIGITS = 6  # to which a decimal fraction must agree with a root or another expression
BOXED = LatexExtractionConfig(boxed_match_priority=0)
# of length, mass, time and volume, behind a number: the library drops them
UNITS = {*"mm cm dm m km mg g kg t ms s min h ml l".split()}
LATEX = str.maketrans({"√": r"\sqrt ", "°": r"^\circ "})  # what the library does not read


def score(prompts, responses, references, labels, images):
    texts = list(map(rules.with_opened_thought, prompts, responses))
    answers = [rules.plain_text(rules.extract_answer(text, "boxed") or "") for text in texts]
    accuracy = list(map(grade, answers, map(rules.plain_text, references)))
    formats = [rules.format_score(text, "boxed") for text in texts]
    rewards = [0.9 * right + 0.1 * formatted for right, formatted in zip(accuracy, formats)]
    return {"reward": rewards, "accuracy": accuracy, "format": formats}


score.check = partial(rules.check_reference, "boxed")


def grade(answer: str, reference: str) -> float:
    """1.0 where the answer equals the reference, else 0.0."""
    if rules.answers_equal(answer, reference):
        return 1.0
    units = {re.sub(r"^[\d.,]+|\^\d$", "", rules.spelled(text)) for text in (answer, reference)}
    if not answer or len(units & UNITS) == 2:  # 12 m is not 12 cm
        return 0.0
    expected = parse(in_box(reference), [BOXED], parsing_timeout=SECONDS)
    answered = parse(in_box(answer), [BOXED], fallback_mode="no_fallback", parsing_timeout=SECONDS)
    # to as many digits as the answers have: 1.0000001 is not 1
    digits = max(map(len, re.findall(r"\.(\d+)", answer + " " + reference)), default=0)
    digits = max(DIGITS, digits)
    return float(verify(expected, answered, float_rounding=digits, timeout_seconds=SECONDS))


def in_box(answer: str) -> str:
    return rf"\boxed{{{answer.translate(LATEX)}}}"
