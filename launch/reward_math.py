r"""Mathematical answers, judged by the field's own library: roots, fractions, pi, units, sets, expressions.

    pip install math-verify
    torchrun --nproc_per_node 8 train_ppo_vl.py --reward launch/reward_math.py:score ...

The answer is the last \boxed{...} of the response. The reward is 0.9 for a right answer and 0.1 for the format,
thoughts in <think>...</think>, which the chat template may open, and then the answer. Text that cannot
be parsed is a wrong answer.

The library runs in a process of its own, with --reward_workers 8 in eight of them. Its own time limit works only in the main thread, where rewards are not computed,
and no thread could stop an answer such as 9^{9^{9}}, which sympy starts to write out. Such an answer costs
SECONDS of --reward_timeout.
"""

import json
import re
import signal
import subprocess
import sys

from math_verify import LatexExtractionConfig, parse, verify

SECONDS = 5  # of CPU time, for one answer
BOXED = LatexExtractionConfig(boxed_match_priority=0)
LATEX = str.maketrans({"√": r"\sqrt ", "°": r"^\circ "})  # what the library does not read
FORMAT = re.compile(r"\s*<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def score(prompts, responses, references, labels, images):
    accuracy = []
    while len(accuracy) < len(responses):
        done = len(accuracy)
        accuracy += grade_in_process(responses[done:], references[done:])
    # Not at the top: this file is the worker, too, which needs nothing of the project and starts fast.
    from common.rewards.rules import with_opened_thought

    texts = map(with_opened_thought, prompts, responses)
    formats = [float(bool(FORMAT.fullmatch(text))) for text in texts]
    rewards = [0.9 * right + 0.1 * formatted for right, formatted in zip(accuracy, formats)]
    return {"reward": rewards, "accuracy": accuracy, "format": formats}


def grade(response: str, reference: str) -> float:
    """1.0 where the last box of the response equals the reference, else 0.0."""
    _, boxed, answer = response.translate(LATEX).rpartition(r"\boxed")
    if not boxed:
        return 0.0
    boxed_answer = parse(boxed + answer, [BOXED], fallback_mode="no_fallback", parsing_timeout=None)
    expected = parse(rf"\boxed{{{reference.translate(LATEX)}}}", [BOXED], parsing_timeout=None)
    return float(verify(expected, boxed_answer, timeout_seconds=None))


def grade_in_process(responses: list[str], references: list[str]) -> list[float]:
    """Grades from the first response up to one that takes too long, which is wrong, or to the last."""
    rows = "".join(json.dumps(row) + "\n" for row in zip(responses, references))
    worker = subprocess.run([sys.executable, __file__], input=rows, capture_output=True, text=True)
    grades = [float(line) for line in worker.stdout.split()]
    if worker.returncode == -signal.SIGPROF:
        return [*grades, 0.0]
    if worker.returncode or len(grades) != len(responses):
        raise RuntimeError(f"{__file__} failed: {worker.stderr.strip()[-500:]}")
    return grades


if __name__ == "__main__":
    for row in sys.stdin:
        # The signal is not caught: it ends this process even in the middle of a multiplication.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        print(grade(*json.loads(row)), flush=True)
