"""Rewards of launch/real_words.sh.

--reward launch/real_rewards.py:named           the class's name
                               :grey, :another  the same, measured on pictures that do not help
"""

import re

WORD = re.compile(r"[A-Za-z'’-]+")


def named(prompts, responses, references, labels, images):
    """1 for the right name alone (case and a full stop do not matter). Naming it among n words earns
    0.2 / n: for 0.2, "boot, boot, boot" would do as well as "boot"."""
    mentioned = []
    for text, name in zip(responses, references):
        mentioned.append(0.2 * mentions(text, name) / max(1, len(WORD.findall(text))))
    return {"accuracy": exact(responses, references), "mentioned": mentioned}


def grey(prompts, responses, references, labels, images):
    """Accuracy of answers to questions that came with a grey picture."""
    return exact(responses, references)


def another(prompts, responses, references, labels, images):
    """Accuracy of answers to questions that came with another row's picture."""
    return exact(responses, references)


def exact(responses: list[str], names: list[str]) -> list[float]:
    answers = [response.strip().rstrip(".").lower() for response in responses]
    return [float(text == name.lower()) for text, name in zip(answers, names)]


def mentions(text: str, name: str) -> bool:
    return bool(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text, re.IGNORECASE))
