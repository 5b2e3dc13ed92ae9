"""The reward of the toy's descriptions: --reward launch/toy_reward.py:score

An answer such as "red circle, blue cross, 2" names each object of the picture in reading order, and
then their number. Each colour, each shape and the number is a part.
"""


def score(prompts, responses, references, labels, images):
    """reward: right parts / parts of the reference or of the answer, whichever are more; accuracy: 1 if
    all parts are right."""
    shares = [share_right(*pair) for pair in zip(responses, references)]
    return {"reward": shares, "accuracy": [float(share == 1) for share in shares]}


def share_right(response: str, reference: str) -> float:
    words, number = parts(response)
    expected, right_number = parts(reference)
    right = sum(word == wanted for word, wanted in zip(words, expected)) + (number == right_number)
    return right / (1 + max(len(words), len(expected)))


def parts(text: str) -> tuple[list[str], str]:
    """Colour and shape of each object, one after the other, and the number, which comes last."""
    *objects, number = text.split(", ")
    words = []
    for name in objects:
        colour, _, shape = name.partition(" ")
        words += [colour, shape]
    return words, number
