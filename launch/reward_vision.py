r"""Rewards of perception, to use or to copy: --reward launch/reward_vision.py:NAME

    choice    one letter, or the text of one of the row's "options" or "choices"; where the truth is
              several letters, "A, C", these in any order
    number    one number, within 5 % of the truth as in ChartQA, or within the row's "tolerance" (0 for
              years: 5 % are a century); if the truth is not a number, as words
    count     one number, exactly
    words     the same words
    anls      1 - edits / length where that is above 1/2, as in DocVQA
    ocr       1 - edits / length, and case counts
    items     F1 of a list, in any order
    order     the same list
    form      one thought, then one <answer>; for a part of a --reward_recipe

The truth is the row's "answer"; for words and anls any of its "answers", or of the elements of an
answer that is a list.

Numbers are in digits or, without digits, in words: twenty-one, a dozen, none. 2.5 million is 2500000, 50k
50000, and the result of "2 + 1 = 3" is 3.

The answer of a response follows its thought: the last <answer>, <|begin_of_box|> or \boxed{}, if there
is one, and in that the last fence. Everything in it counts: several letters or numbers are not an
answer, nor are "not B" and "more than 7", and a repeated item is wrong. An unfinished thought or
<answer> is not an answer. So guessing everything earns no more than one guess."""

import ast
import re
from collections import Counter
from fractions import Fraction
from string import ascii_uppercase

import numpy as np

from common.ground.files import number_as_text
from common.rewards.regions import answer_text
from common.rewards.rules import (
    ALIKE,
    answers_equal,
    format_score,
    listed_letters,
    plain_text,
    read_letter_set,
    read_letters,
    read_number,
    read_numbers,
    spelled,
    with_opened_thought,
    words_of,
)

OUTER = " .,;:!?\"'`()[]{}*•"  # punctuation around a word
LETTERED = re.compile(r"(?s)([a-z])[.:)]+ ?(.+)")  # as `plain` leaves it
NUMBERED = re.compile(r"(?s)\s*[*(]*(\d{1,3})[.:)、](?!\d)(.*)")  # 1. red   (2) blue

# Between the items of a list: red, blue, and green   1-2-3   B -> A > C
SEPARATOR = r"[,;\n](?:\s*and\s)?|(?<!\d)、|、(?=\d)|(?<=\d)-(?=\d)|[-=]{0,3}[>→]"


def per_sample(grade):
    """A reward function from the grade of one answer, given its truth and row, which raises ValueError
    if it cannot use them: before a run starts, every row is tried. No answer earns 0."""

    def score(prompts, responses, references, labels, images, rows):
        texts = map(with_opened_thought, prompts, responses)
        answers = [answer_text(text).strip() for text in texts]
        samples = zip(answers, references, rows)
        grades = [grade(*sample) if sample[0] else 0.0 for sample in samples]
        return {"reward": grades, "accuracy": [float(share == 1) for share in grades]}

    def check(truth, row={}):
        if truth is None and not row.get("answers"):
            raise ValueError("no answer")
        if truth is not None and not truth.strip():
            raise ValueError(f"an empty answer, {truth!r:.80}")
        grade("?", truth, row)

    score.check = check
    return score


def texts_of(row: dict, column: str) -> list[str]:
    """A column of texts or numbers; without it none. Raises ValueError: anything else."""
    values = row.get(column) or []
    texts = list(map(number_as_text, values)) if isinstance(values, list) else []
    if len(texts) < len(values) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{column} must be a list of texts, not {values!r:.80}")
    return texts


def plain(text) -> str:
    """A text or number without case, LaTeX, punctuation around it, and the dash of a list."""
    text = words_of(str(number_as_text(text))).removeprefix("- ")
    word = text.strip(OUTER)
    if word.isascii() and word.isalnum():  # what most items are, in a tenth of the time
        return word if word.isdigit() else spelled(word)
    return spelled(text).strip(OUTER)


@per_sample
def choice(answer, truth, row):
    letters = letters_of(row)
    right = chosen(truth, letters)
    if len(right) == 1:
        return float(chosen(answer, letters) == right)
    right = read_letter_set(truth)
    if not right:
        raise ValueError(
            f"the answer {truth!r} is neither a letter nor one of the row's options, nor several letters"
        )
    return float(listed_letters(answer) == right)


def letters_of(row: dict) -> dict:
    """The letters of a row's options by their texts, before which they may stand: A. cat"""
    lettered = zip(ascii_uppercase, texts_of(row, "options") or texts_of(row, "choices"))
    return {plain(re.sub(rf"^\(?{letter}[.:)]", "", text)): letter for letter, text in lettered}


def chosen(text: str, letters: dict) -> set:
    """The letters of all options that a text names: by their full text, by letters, or by both."""
    whole = plain(text)
    if whole in letters:
        return {letters[whole]}
    lettered = LETTERED.fullmatch(whole)
    if lettered and letters.get(plain(lettered[2])) == lettered[1].upper():
        return {lettered[1].upper()}  # B. 10 N, whose N is no letter of an option
    named, rest = read_letters(text)
    return {letters.get(plain(rest))} - {None} | named


@per_sample
def number(answer, truth, row):
    values, right = read_numbers(answer), read_number(truth)
    if answers_equal(answer, truth):  # 50% and 0.5
        return 1.0
    if right is None:
        return float(plain(answer) == plain(truth))
    tolerance = row.get("tolerance")
    tolerance = Fraction("0.05" if tolerance is None else str(tolerance))
    return float(len(values) == 1 and abs(values.pop() - right) <= tolerance * abs(right))


@per_sample
def count(answer, truth, row):
    right = read_number(truth)
    if right is None:
        raise ValueError(f"the answer {truth!r:.80}, no number in digits or words")
    return float(read_numbers(answer) == {right})


@per_sample
def words(answer, truth, row):
    return float(plain(answer) in map(plain, truths(truth, row)))


def truths(truth: str, row: dict) -> list:
    known = texts_of(row, "answers") or read_list(truth) or [truth]
    return [str(number_as_text(text)) for text in known]


@per_sample
def anls(answer, truth, row):
    best = max(likeness(words_of(answer), words_of(text)) for text in truths(truth, row))
    return best if best > 0.5 else 0.0


@per_sample
def ocr(answer, truth, row):
    return likeness(answer.translate(ALIKE), truth.translate(ALIKE))


def likeness(a: str, b: str) -> float:
    """1 - edits / the longer length. An edit inserts, deletes or replaces a character; white space
    is single spaces."""
    shorter, longer = sorted((" ".join(text.split()) for text in (a, b)), key=len)
    letters = np.array([*longer])
    # edits from what was read of the shorter text to the first k letters of the longer, minus k
    costs = np.zeros(len(longer) + 1)
    for letter in shorter:
        replaced = costs[:-1] - (letters == letter)
        costs += 1
        costs[1:] = np.minimum(costs[1:], replaced)
        costs = np.minimum.accumulate(costs)
    return -float(costs[-1]) / len(longer)


@per_sample
def items(answer, truth, row):
    answered, expected = map(Counter, both_items(answer, truth))
    if answered == expected:  # both may be empty
        return 1.0
    return 2 * (answered & expected).total() / (answered + expected).total()


@per_sample
def order(answer, truth, row):
    answered, expected = both_items(answer, truth)
    return float(answered == expected)


def both_items(answer: str, truth: str) -> tuple[list[str], list[str]]:
    """The items of an answer and of the truth. An "and" is between items, unless one of the truth has it."""
    expected = read_items(truth)
    has_and = any(" and " in item for item in expected)
    return read_items(answer, SEPARATOR if has_and else rf"{SEPARATOR}|\sand\s"), expected


def read_items(text: str, separator: str = SEPARATOR) -> list[str]:
    """The elements of a list, or the parts of a text between commas, semicolons, arrows, line ends or, among
    digits, dashes; numbers such as 1., 2., 3. before them are dropped."""
    values = read_list(text)
    if values is None:
        pieces = re.split(separator, plain_text(text))
        values = [piece for piece in pieces if piece.strip()]
        numbered = [match for piece in values if (match := NUMBERED.fullmatch(piece))]
        if [int(match[1]) for match in numbered] == [*range(1, len(values) + 1)]:
            values = [match[2] for match in numbered]
    texts = [str(number_as_text(value)) for value in values]
    spellings = {
        text: plain(text) for text in {*texts}
    }  # each once: some responses repeat an item without end
    return [spellings[text] for text in texts if spellings[text]]


def read_list(text: str) -> list | None:
    """A list in JSON or Python, if the text is one."""
    try:
        return ast.literal_eval(text) if text.startswith("[") else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def form(prompts, responses, references, labels, images):
    texts = map(with_opened_thought, prompts, responses)
    return [format_score(text, "answer") for text in texts]
