"""Rewards of launch/real_words.sh. A rule says more about what a model will do than its author
meant: see "Reward hacking" in launch/README.md.

    --reward launch/real_rewards.py:named           pictures: the class's name
                                   :grey, :another  the same, measured where the picture tells nothing
    --reward launch/real_rewards.py:naive_count     words: the number of words, and nothing else
    --reward launch/real_rewards.py:strict_count    words: in one sentence without tricks
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


def naive_count(prompts, responses, references, labels, images):
    """How near the number of words is to the one asked for, and 1 more where it is hit."""
    pairs = [near(WORD.findall(text), int(k)) for text, k in zip(responses, references)]
    return {"near": [part for part, _ in pairs], "accuracy": [hit for _, hit in pairs]}


def strict_count(prompts, responses, references, labels, images):
    """The same, but an answer that counts for itself earns nothing: with digits, in lines, as a
    list, or with a word said twice."""
    pairs = []
    for text, k in zip(responses, references):
        words = WORD.findall(text)
        repeated = len({word.lower() for word in words}) < len(words)
        tricks = repeated or bool(re.search(r"[\n\d*•:]", text.strip()))
        pairs.append((0.0, 0.0) if tricks else near(words, int(k)))
    return {"near": [part for part, _ in pairs], "accuracy": [hit for _, hit in pairs]}


def near(words: list[str], count: int) -> tuple[float, float]:
    return max(0.0, 1 - abs(len(words) - count) / count), float(len(words) == count)
