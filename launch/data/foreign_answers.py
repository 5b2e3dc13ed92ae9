"""Reference answers of other systems, and the choices of which they name one."""

import re
from collections import Counter
from string import ascii_uppercase, digits
from typing import Any

from common.ground.files import UserError, number_as_text
from common.rewards.rules import boxed_texts, words_of
from launch.data.foreign_messages import Reading, as_text, read_json_text

ANSWER_TAGS = r"(?s)<answer>(.*?)</answer>"
LAST_LINE = r"(?m)^####(.*)\s*\Z"
UNBRACED_BOX = r"\\boxed +([^\s{}$]+)\$"  # MATH has a few
# Columns of choices: one of all, or one for each.
CHOICES = r"(?i:options?|choice|((answer|multiple)_)?choices|candidates)"
EACH_CHOICE = r"(?i:option|choice)[ _]?[A-Ja-j\d]|[A-J]|a\d"


# ---- Answers


def take_answer(reading: Reading) -> str | None:
    """The reference answer as text, without the working of a solution. Solutions, verl's column and the
    list answers, which rewards read, stay in the row."""
    rest = reading.rest
    verl = rest.get("reward_model")
    verl = verl if isinstance(verl, dict) else {}
    if rest.get("answer") is not None:
        answer = rest.pop("answer")
    elif verl.get("ground_truth") is not None:
        answer = verl["ground_truth"]
        further = {key: value for key, value in verl.items() if key != "ground_truth"}
        reading.known["reward_model"] = verl
        rest["reward_model"] = further
    else:
        names = ("final_answer", "solution", "ground_truth", "answers")
        name = next((name for name in names if name in rest), None)
        if name is None:
            return None
        answer = rest.pop(name)
        if name in ("solution", "answers"):
            reading.known[name] = answer
        if name == "answers":
            answer = most_common(answer)
    text = one_truth(answer, reading)
    final = final_answer(text)
    if text != final and not {"solution"} & (rest.keys() | reading.known.keys()):
        reading.known["solution"] = text
    solution = rest.get("solution")
    if isinstance(solution, str) and final_answers(solution) == [final]:
        reading.known["solution"] = rest.pop("solution")
    return final


def most_common(answers: Any) -> Any:
    """The truth among several, any of which is right; anything else than texts as it is."""
    if not isinstance(answers, list) or not all(isinstance(text, str) for text in answers):
        return answers
    return Counter(answers).most_common(1)[0][0] if answers else answers


def one_truth(answer: Any, reading: Reading) -> str:
    """An answer, or a list of one, as text; several parts as "A, C"."""
    if not isinstance(answer, list):
        return as_text(answer)
    truths = list(dict.fromkeys(map(as_text, answer)))
    if not truths:
        raise UserError("an answer that is an empty list")
    if len(truths) > 1:
        reading.account.notes[
            'rows have a list as answer, now in one text: "A, C". If each element alone is right, name the '
            "column by --columns answers=NAME"
        ] += 1
    return ", ".join(truths)


def final_answers(text: str) -> list[str]:
    """The different answers that a text marks as final."""
    boxes = boxed_texts(re.sub(r"\\f?box(?=\s*\{)", r"\\boxed", text))
    for answers in (
        re.findall(ANSWER_TAGS, text),
        re.findall(LAST_LINE, text),
        [box for box in boxes if r"\boxed" not in box],
        re.findall(UNBRACED_BOX, text),
    ):
        if answers:
            return list(dict.fromkeys(answer.strip() for answer in answers))
    return []


def final_answer(solution: str) -> str:
    """The answer that a text marks as final; without a mark the text. Raises UserError: it marks several."""
    answers = final_answers(solution)
    if len(answers) > 1:
        raise UserError(
            f"several final answers in one solution, {', '.join(map(repr, answers)):.200}: name a column that "
            "has the answer alone by --columns answer=NAME, or write it by --map"
        )
    return answers[0] if answers else solution


# ---- Choices


def find_choices(reading: Reading) -> tuple[list[str], list[str]]:
    """The columns of a row that hold its choices, and the choices without their letters; none if they are
    not texts, or are to be kept unread. Raises UserError: see `in_order`."""
    rest = {name: part for name, part in reading.rest.items() if name not in reading.how.keep}
    whole = [name for name in rest if re.fullmatch(CHOICES, name)]
    columns = sorted(whole, key=lambda name: name != "choices")[:1]
    # MMBench writes nan for a choice that a row lacks
    each = [name for name in rest if re.fullmatch(EACH_CHOICE, name) and rest[name] != "nan"]
    values: Any = {name: rest[name] for name in each}
    if columns:
        values = read_json_text(rest[columns[0]]) or rest[columns[0]]
    elif len(each) > 1:
        columns = each
    if isinstance(values, dict) and columns:
        values = in_order(values)
    if not isinstance(values, list):
        return [], []
    texts = [number_as_text(value) for value in values]
    is_choice = texts and all(isinstance(text, str) for text in texts)
    return (columns, without_letters(texts)) if is_choice else ([], [])


def in_order(choices: dict) -> list:
    """Choices by their letters or numbers, with which their names end; by other names as they are. Raises
    UserError: one is missing."""
    if not all(re.fullmatch(EACH_CHOICE, name) for name in choices):
        return list(choices.values())
    names = sorted(choices, key=lambda name: name[-1].upper())
    ends = "".join(name[-1].upper() for name in names)
    if not ascii_uppercase.startswith(ends) and ends not in digits:
        raise UserError(f"{', '.join(names)}: a choice between them is missing")
    return [choices[name] for name in names]


def without_letters(choices: list[str]) -> list[str]:
    """Choices without their letters, if each begins with its own: A. cat, B. dog, but not E. coli."""
    choices = [choice.strip() for choice in choices]
    patterns = [rf"(?i)\(?{letter}[.:)]\s*" for letter in ascii_uppercase]
    if all(map(re.match, patterns, choices)):
        return [re.sub(pattern, "", text, count=1) for pattern, text in zip(patterns, choices)]
    return choices


def take_choices(reading: Reading, prompt: str, answer: str | None) -> tuple[list[str], str | None]:
    """The lines of choices to append to a prompt, and the answer, whose number becomes its letter.
    Choices that the prompt shows, or will show, stay in the row as a list, which rewards read. Raises
    UserError: see `letter_of`."""
    columns, choices = find_choices(reading)
    is_shown = all(
        words_of(text) in words_of(prompt) for text in choices if not re.fullmatch("[A-J]", text)
    )
    if not choices or not is_shown and not reading.how.choices:
        return [], answer
    for name in columns:
        del reading.rest[name]
    reading.known["choices"] = choices
    if answer is not None:
        answer = letter_of(answer, choices, reading.how.choices)
    if is_shown:
        return [], answer
    return [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, choices)], answer


def letter_of(answer: str, choices: list[str], how: str) -> str:
    """The letter of the choice that an answer is, by its number or by its text; other answers as they are.

    how: --choices. Raises UserError: a number, and nothing says where numbers begin; or the letter of one
    choice, and the text of another.
    """
    texts = [words_of(choice) for choice in choices]
    begins = re.search(r"\d", how)
    is_number = bool(re.fullmatch(r"\d{1,2}", answer))
    if is_number and begins:
        place = int(answer) - int(begins[0])
        if not 0 <= place < len(choices):
            raise UserError(f"the answer {answer} is the number of none of {len(choices)} choices")
        return ascii_uppercase[place]
    if is_number and (how or words_of(answer) not in texts):
        raise UserError(
            f"the answer {answer} is the number of one of {len(choices)} choices: --choices letters0 if the "
            "first has number 0, --choices letters1 if it has number 1"
        )
    if not how or texts.count(words_of(answer)) != 1:
        return answer
    letter = ascii_uppercase[texts.index(words_of(answer))]
    if answer in set(ascii_uppercase[: len(choices)]) - {letter}:
        raise UserError(
            f"the answer {answer} is the letter of one choice and the text of another: write it by --map"
        )
    return letter
