"""launch/reward_vision.py: every reward's values, written by hand, and what guessing earns."""

import random
import time

import pytest

import reward_vision
from common.ppo_flags import RewardArgs
from common.rewards.functions import load_source, score_samples
from conftest import ROOT
from helpers import reward_samples

ANIMALS = {"options": ["cat", "dog", "fox"]}
THOUGHT = "<think>7 B red</think>"


def grade(name: str, response: str, truth, row: dict, prompt: str = "") -> float:
    """As the trainer calls it."""
    source = load_source(f"{ROOT / 'launch' / 'reward_vision.py'}:{name}")
    samples = reward_samples([response], [truth], [prompt], rows=[row])
    columns = score_samples(source, samples, RewardArgs())
    assert columns["accuracy"] == [float(columns["reward"][0] == 1)]
    return columns["reward"][0]


@pytest.mark.parametrize(
    "name, response, truth, row, value",
    [
        ("choice", "<answer>B</answer>", "B", ANIMALS, 1),
        ("choice", "(b)", "B", ANIMALS, 1),
        ("choice", "Dog.", "B", ANIMALS, 1),
        ("choice", "B. dog", "B", ANIMALS, 1),
        ("choice", "b) dog", "dog", ANIMALS, 1),
        ("choice", "B. cat", "B", ANIMALS, 0),
        ("choice", "(A) (B) (C)", "B", ANIMALS, 0),
        ("choice", "C. or B.", "B", ANIMALS, 0),
        ("choice", "A or B", "B", ANIMALS, 0),
        ("choice", "Definitely not A. B", "A", ANIMALS, 0),
        ("choice", "A dog is seen", "A", ANIMALS, 0),
        ("choice", "I think A is right.", "A", ANIMALS, 1),
        ("choice", "I think A is right.", "A", {}, 1),
        ("choice", "Vitamin C", "A", {"options": ["vitamin C", "B12", "iron"]}, 1),
        ("choice", "5", "B", {"options": [4, 5]}, 1),
        ("choice", r"So it is \boxed{B}, not A.", "B", ANIMALS, 1),
        ("choice", r"<answer>It is \boxed{B}, not A.</answer>", "B", ANIMALS, 1),
        ("number", "95", "100", {}, 1),
        ("number", "94.9", "100", {}, 0),
        ("number", "0.95", "1", {}, 1),
        ("number", "1,050", "1000", {}, 1),
        ("number", "47.5 %", "50", {}, 1),
        ("number", "50", "47.5 %", {}, 0),
        ("number", "It costs $1,234.50.", "$1234.5", {}, 1),
        ("number", "0.01", "0", {}, 0),
        ("number", "90 95 100 105", "100", {}, 0),
        ("number", "100 or 200", "100", {}, 0),
        ("number", "-5", "5", {}, 0),
        ("number", "−5", "-5", {}, 1),
        ("number", "5e2", "500", {}, 1),
        ("number", "NaN", "5", {}, 0),
        ("number", "2010", "1990", {}, 1),
        ("number", "2010", "1990", {"tolerance": 0}, 0),
        ("number", "90", "100", {"tolerance": 0.1}, 1),
        ("number", "Blue.", "blue", {}, 1),
        ("number", "3 kg", "3 g", {}, 0),
        ("count", "<answer>There are 7 cups.</answer>", "7", {}, 1),
        ("count", "<answer>seven</answer>", "7", {}, 1),
        ("count", "<answer>6 or 7</answer>", "7", {}, 0),
        ("count", "<answer>7, again: 7</answer>", "7", {}, 1),
        ("count", "<think>7</think>", "7", {}, 0),
        ("count", "<think>7</think>7", "7", {}, 1),
        ("count", "Twenty", "20", {}, 1),
        ("count", "twenty-one", "20", {}, 0),
        ("words", "Blue.", "blue", {}, 1),
        ("words", "light  Blue", "blue", {}, 0),
        ("words", "-5", "5", {}, 0),
        ("words", "navy", None, {"answers": ["blue", "Navy"]}, 1),
        ("words", "Paris, France", "['Paris', 'Paris, France']", {}, 1),
        ("words", "France", "['Paris', 'Paris, France']", {}, 0),
        ("anls", "Helo", '["hello"]', {}, 0.8),
        ("anls", "hell", None, {"answers": ["help me", "HELL"]}, 1),
        ("anls", "abcd", "abxy", {}, 0),
        ("anls", "hello hello hello", "hello", {}, 0),
        ("ocr", "Total  12.50", "Total 12.60", {}, 10 / 11),
        ("ocr", "total", "Total", {}, 0.8),
        ("ocr", "", "Total", {}, 0),
        ("ocr", "kitten", "sitting", {}, 4 / 7),
        ("items", "red, Blue", '["blue", "red"]', {}, 1),
        ("items", '["red", "green"]', '["blue", "red"]', {}, 0.5),
        ("items", "red, red, red, blue", '["blue", "red"]', {}, 2 / 3),
        ("items", "- red\n- blue", "blue; red", {}, 1),
        ("items", '["a, b"]', '["a, b", "c"]', {}, 2 / 3),
        ("order", "2, 1, 3", "[1, 2, 3]", {}, 0),
        ("order", "[1, 2, 3]", "[1, 2, 3]", {}, 1),
        ("order", "```json\n[1, 2, 3]\n```", "[1, 2, 3]", {}, 1),
        ("order", "1-2-2", "[1, 2, 2]", {}, 1),
        ("order", "1.5, 2", "[1, 5, 2]", {}, 0),
    ],
)
def test_values(name, response, truth, row, value):
    """Most are those of a survey of public recipes, with their failing inputs."""
    assert grade(name, response, truth, row) == pytest.approx(value, abs=1e-12)


RIGHT = {
    "choice": ("B", ANIMALS),
    "number": ("7", {}),
    "count": ("7", {}),
    "words": ("red", {}),
    "anls": ("red", {}),
    "ocr": ("red", {}),
    "items": ("red, blue", {}),
    "order": ("3, 2, 1", {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_only_what_is_answered_counts(name):
    """The last finished answer; a prompt may open the thought."""
    truth, row = RIGHT[name]
    for form in ("{}", "<answer>{}</answer>", "<|begin_of_box|>{}<|end_of_box|>"):
        right = form.format(truth)
        assert grade(name, THOUGHT + right, truth, row) == 1
        assert grade(name, f"<think>{right}", truth, row) == 0
        assert grade(name, f"so</think>{right}", truth, row, prompt="<think>") == 1
        assert grade(name, right, truth, row, prompt="<think>") == 0
    assert grade(name, f"<answer>9</answer> no: <answer>{truth}</answer>", truth, row) == 1
    assert grade(name, f"<answer>{truth}", truth, row) == 0
    assert grade(name, "", truth, row) == 0
    assert grade(name, "<answer>...</answer>", truth, row) == 0


HOSTILE = """B b) A 7 seven 1,111 red red, <think></think> <answer></answer> <answer>7 \\boxed{ [ [[7],
{"a": ``` ```json <|begin_of_box|> <|begin_of_box|>7<|end_of_box|> - .5 5. 1e9 İ ½ (A) '""".split()


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_hostile_answers_take_no_time(name):
    truth, row = RIGHT[name]
    for piece in HOSTILE:
        for text in (piece, piece + " "):
            start = time.process_time()
            assert 0 <= grade(name, text * (100_000 // len(text)), truth, row) <= 1, text
            assert time.process_time() - start < 1, text


@pytest.mark.parametrize("name", RIGHT)
def test_guessing_everything_pays_no_more_than_one_guess(name):
    truth, row = RIGHT[name]
    guesses = {
        "choice": ["A", "B", "C"],
        "number": list(map(str, range(20))),
        "count": list(map(str, range(20))),
        "words": ["red", "blue", "green"],
        "anls": ["red", "blue", "green"],
        "ocr": ["red", "blue", "green"],
        "items": ["red, blue", "green, grey", "black, pink"],
        "order": ["3, 2, 1", "1, 2, 3", "2, 1, 3"],
    }[name]
    best = max(grade(name, guess, truth, row) for guess in guesses)
    for joint in (" ", ", ", "\n", " or ", " and ", ") (", "</answer> <answer>"):
        assert grade(name, joint.join(guesses), truth, row) <= best
    average = sum(grade(name, guess, truth, row) for guess in guesses) / len(guesses)
    assert grade(name, " and ".join(guesses), truth, row) <= max(average, 0.5)


def test_a_truth_that_is_no_choice_is_named():
    with pytest.raises(Exception, match="the answer '1' is neither a letter nor one of"):
        grade("choice", "B", "1", ANIMALS)


def plain_edits(a: str, b: str) -> int:
    """The recursion of the definition."""
    costs = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, costs = costs, [i]
        for j, y in enumerate(b, 1):
            costs.append(min(before[j] + 1, costs[-1] + 1, before[j - 1] + (x != y)))
    return costs[-1]


def test_likeness_is_that_of_the_definition():
    rng = random.Random(0)
    for _ in range(300):
        a, b = ("".join(rng.choices("abA", k=rng.randint(1, 9))) for _ in "ab")
        expected = 1 - plain_edits(a, b) / max(len(a), len(b))
        assert reward_vision.likeness(a, b) == pytest.approx(expected, abs=1e-12)


def test_the_form_is_a_thought_and_then_an_answer():
    responses = [
        "<think>a</think><answer>b</answer>",
        "<think>a</think> so <answer>b</answer>",
        "<answer>b</answer>",
        "<think>a</think> b",
        "a</think><answer>b</answer>",
    ]
    prompts = [""] * 4 + ["<think>"]
    assert reward_vision.form(prompts, responses, *[[]] * 3) == [1, 1, 0, 0, 1]
