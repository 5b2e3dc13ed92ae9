r"""Mathematical answers, graded by math-verify: roots, fractions, pi, units, sets, expressions.

    pip install math-verify
    torchrun --nproc_per_node 8 train_ppo_vl.py --reward launch/reward_math.py:score ...

The answer is the last \boxed{...} of the response, and is right if the library or the rule boxed says so. The reward
is 0.9 for a right answer and 0.1 for the format of the rule: thoughts in <think>...</think>, which the chat template
may open, and then the answer. An answer that cannot be parsed is wrong.

The library runs in PROCESSES of its own. Its time limit works only in the main thread, where rewards are not
computed, and no thread could stop sympy from writing out an answer such as 9^{9^{9}}. Such an answer costs
SECONDS of --reward_timeout.
"""

import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from math_verify import LatexExtractionConfig, parse, verify

SECONDS = 5  # of CPU time, for one answer
PROCESSES = 8
DIGITS = 6  # to which a decimal fraction must agree with a root or another expression
BOXED = LatexExtractionConfig(boxed_match_priority=0)
# of length, mass, time and volume, behind a number: the library drops them
UNITS = {*"mm cm dm m km mg g kg t ms s min h ml l".split()}
LATEX = str.maketrans({"√": r"\sqrt ", "°": r"^\circ "})  # what the library does not read


def score(prompts, responses, references, labels, images):
    # Not at the top: this file is also the worker, which needs nothing of the project and starts fast.
    from common.rewards import rules

    texts = list(map(rules.with_opened_thought, prompts, responses))
    answers = [rules.plain_text(rules.extract_answer(text, "boxed") or "") for text in texts]
    references = list(map(rules.plain_text, references))
    size = -(-len(answers) // PROCESSES)
    parts = [slice(k, k + size) for k in range(0, len(answers), size)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        grades = pool.map(
            grade_all, [answers[part] for part in parts], [references[part] for part in parts]
        )
    accuracy = sum(grades, [])
    for i, (answer, reference) in enumerate(zip(answers, references)):
        units = {re.sub(r"^[\d.,]+|\^\d$", "", rules.spelled(text)) for text in (answer, reference)}
        if len(units & UNITS) == 2:  # 12 m is not 12 cm
            accuracy[i] = 0.0
        accuracy[i] = max(accuracy[i], float(rules.answers_equal(answer, reference)))
    formats = [rules.format_score(text, "boxed") for text in texts]
    rewards = [0.9 * right + 0.1 * formatted for right, formatted in zip(accuracy, formats)]
    return {"reward": rewards, "accuracy": accuracy, "format": formats}


def check(reference):
    from common.rewards import rules

    if reference is None:
        raise ValueError("no answer")
    rules.check_reference("boxed", reference)


score.check = check


def grade(answer: str, reference: str) -> float:
    """1.0 where the answer equals the reference, else 0.0."""
    if not answer:
        return 0.0
    expected = parse(in_box(reference), [BOXED], parsing_timeout=None)
    answered = parse(in_box(answer), [BOXED], fallback_mode="no_fallback", parsing_timeout=None)
    # to as many digits as the answers have: 1.0000001 is not 1
    digits = max(map(len, re.findall(r"\.(\d+)", answer + " " + reference)), default=0)
    digits = max(DIGITS, digits)
    return float(verify(expected, answered, float_rounding=digits, timeout_seconds=None))


def in_box(answer: str) -> str:
    return rf"\boxed{{{answer.translate(LATEX)}}}"


def grade_all(answers: list[str], references: list[str]) -> list[float]:
    """Grades of answers, in a process of their own, or in several if some take too long."""
    grades = []
    while len(grades) < len(answers):
        done = len(grades)
        grades += grade_in_process(answers[done:], references[done:])
    return grades


def grade_in_process(answers: list[str], references: list[str]) -> list[float]:
    """Grades of the answers up to the last, or up to one that takes too long, which is wrong."""
    rows = "".join(json.dumps(row) + "\n" for row in zip(answers, references))
    worker = subprocess.run([sys.executable, __file__], input=rows, capture_output=True, text=True)
    grades = [float(line) for line in worker.stdout.split()]
    if worker.returncode == -signal.SIGPROF:
        return [*grades, 0.0]
    if worker.returncode or len(grades) != len(answers):
        raise RuntimeError(f"{__file__} failed: {worker.stderr.strip()[-500:]}")
    return grades


if __name__ == "__main__":
    for row in sys.stdin:
        # The signal is not caught: it ends this process even in the middle of a multiplication.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        print(grade(*json.loads(row)), flush=True)
