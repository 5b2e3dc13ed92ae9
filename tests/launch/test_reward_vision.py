"""launch/reward_vision.py: every reward's values, written by hand, and what guessing earns."""

import json
import random
import re
import time
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from common.data.rows import Prompt
from common.rewards.sources import RewardArgs, RewardMix, Source, load_source
from conftest import ROOT, marked, table, user_error, value_error
from helpers import reward_samples, score_samples
from launch import reward_vision

ANIMALS = {"options": ["cat", "dog", "fox"]}
THOUGHT = "<think>7 B red</think>"


def load(name: str) -> Source:
    """As the trainer does, in a process of its own."""
    return load_source(f"{ROOT / 'launch' / 'reward_vision.py'}:{name}")


def grade(name: str, response: str, truth, row: dict, prompt: str = "") -> float:
    """By the function, in this process."""
    source = Source(name, name, "function", getattr(reward_vision, name), ["rows"])
    samples = reward_samples([response], [truth], [prompt], rows=[row])
    columns = score_samples(source, samples, RewardArgs())
    assert columns["accuracy"] == [float(columns["reward"][0] == 1)]
    return columns["reward"][0]


def graded_here(name: str, response: str, truth, row: dict) -> float:
    """In this process, whose time is measured."""
    function = getattr(reward_vision, name)
    return function([""], [response], [truth], [None], [[]], rows=[row])["reward"][0]


VALUES = table(
    r"""
choice | 1     | animals  | B            | <answer>B</answer>
choice | 1     | animals  | B            | (b)
choice | 1     | animals  | B            | Dog.
choice | 1     | animals  | B            | B. dog
choice | 1     | animals  | dog          | b) dog
choice | 0     | animals  | B            | B. cat
choice | 1     | {"options": ["5 N", "10 N"]} | B            | B. 10 N
choice | 1     | {"options": ["vitamin A", "vitamin C"]} | B            | (B) Vitamin C
choice | 1     | {"options": ["A and C", "B and C"]} | B            | B: B and C
choice | 1     | {"options": ["x", "v"]} | B            | B. v
choice | 0     | {"options": ["5 N", "10 N"]} | B            | B. 5 N
choice | 0     | {"options": ["5 N", "10 N"]} | B            | A. 10 N
choice | 0     | animals  | B            | (A) (B) (C)
choice | 0     | animals  | B            | C. or B.
choice | 0     | animals  | B            | A or B
choice | 0     | animals  | A            | Definitely not A. B
choice | 0     | animals  | A            | A dog is seen
choice | 1     | animals  | A            | I think A is right.
choice | 1     | -        | A            | I think A is right.
choice | 1     | {"options": ["vitamin C", "B12", "iron"]} | A            | Vitamin C
choice | 1     | {"options": [4, 5]} | B            | 5
choice | 1     | {"choices": ["145°", "35°"]} | 35°          | (B)
choice | 1     | {"options": [4.0, 5.0]} | B            | 5
choice | 1     | {"options": ["A. cat", "B. dog"]} | B            | dog
choice | 1     | {"options": ["(A) cat", "(B) dog"]} | (B) dog      | B. dog
choice | 1     | {"options": null} | B            | b
choice | 1     | animals  | B            | So it is \boxed{B}, not A.
choice | 1     | animals  | B            | <answer>It is \boxed{B}, not A.</answer>
choice | 1     | animals  | B            | 答案是B
choice | 1     | animals  | B            | Answer: b
choice | 1     | animals  | B            | **Answer:** b
choice | 1     | animals  | B            | \text{b}
choice | 1     | animals  | B            | “dog”
choice | 1     | animals  | B            | Answer: dog
choice | 1     | animals  | B            | <answer>{B}</answer>
choice | 1     | animals  | B            | b. dog
choice | 0     | animals  | B            | Answer: b or c
choice | 0     | animals  | B            | b. c. a.
choice | 0     | animals  | B            | A and B
choice | 0     | animals  | B            | A rather than B
choice | 0     | animals  | B            | It is not B.
choice | 0     | animals  | B            | Neither A nor B
choice | 0     | animals  | B            | B is wrong.
choice | 0     | animals  | B            | 答案不是B
choice | 1     | {"options": ["red", "not red"]} | B            | B. not red
choice | 1     | animals  | A, C         | <answer>A, C</answer>
choice | 1     | animals  | A, C         | C and A
choice | 1     | animals  | A, C         | AC
choice | 1     | -        | A、C         | (C), (A)
choice | 0     | animals  | A, C         | A
choice | 0     | animals  | A, C         | A, B, C
choice | 0     | animals  | A, C         | A or C
choice | 0     | animals  | A, C         | A and C are wrong
choice | 0     | animals  | A, C         | cat
number | 1     | -        | 100          | 95
number | 0     | -        | 100          | 94.9
number | 1     | -        | 1            | 0.95
number | 1     | -        | 1000         | 1,050
number | 1     | -        | 50           | 47.5 %
number | 0     | -        | 47.5 %       | 50
number | 1     | -        | $1234.5      | It costs $1,234.50.
number | 0     | -        | 0            | 0.01
number | 0     | -        | 100          | 90 95 100 105
number | 0     | -        | 100          | 100 or 200
number | 0     | -        | 5            | -5
number | 1     | -        | -5           | −5
number | 1     | -        | −5           | -5
number | 1     | -        | 500          | 5e2
number | 1     | -        | 0.5          | 1/2
number | 1     | -        | ½            | 0.5
number | 1     | -        | 3            | three
number | 1     | -        | three        | 3
number | 0     | -        | 5            | NaN
number | 1     | -        | 1990         | 2010
number | 0     | {"tolerance": 0} | 1990         | 2010
number | 1     | {"tolerance": 0.1} | 100          | 90
number | 0     | {"tolerance": null} | 100          | 90
number | 1     | -        | blue         | Blue.
number | 0     | -        | 3 g          | 3 kg
number | 1     | -        | 50%          | 0.5
number | 0     | -        | 50           | 0.5
number | 0     | -        | 3 g          | three kg
number | 0     | -        | 50           | 50 million
number | 1     | -        | 50 million   | 50,000,000
number | 1     | -        | 2500         | 2.5 thousand people
number | 1     | -        | -3           | negative 3
number | 0     | -        | 3            | minus three
number | 1     | -        | 50           | 50 cm²
number | 0     | -        | 50           | It isn't 50.
number | 0     | -        | 50           | more than 50
number | 0     | -        | 50           | 50k
number | 1     | -        | 50000        | 50k
number | 1     | -        | 50k          | 50,000
number | 0     | -        | 50k          | 50
number | 1     | -        | 300 K        | 300K
number | 1     | -        | 300K         | 300 K
number | 1     | -        | 2000000000   | It is worth $2B.
number | 0     | -        | 5000000      | 5m
number | 0     | -        | 5M           | 5 m
number | 1     | {"tolerance": 0} | 0            | There are none.
number | 0     | -        | none         | 0
number | 1     | {"tolerance": 0} | 3            | 2 + 1 = 3
number | 0     | {"tolerance": 0} | 3            | 1 = 2 = 3
number | 1     | {"tolerance": 0} | 21           | twenty-one
count  | 1     | -        | 7            | <answer>There are 7 cups.</answer>
count  | 1     | -        | 7            | <answer>seven</answer>
count  | 0     | -        | 7            | <answer>6 or 7</answer>
count  | 1     | -        | 7            | <answer>7, again: 7</answer>
count  | 0     | -        | 7            | <think>7</think>
count  | 1     | -        | 7            | <think>7</think>7
count  | 1     | -        | −7           | -7
count  | 1     | -        | seven        | 7
count  | 1     | -        | 7.0          | 七 (7)
count  | 1     | -        | 7            | 共7个
count  | 1     | -        | 7            | 7 cups, one of them red
count  | 0     | -        | 7            | not 7
count  | 0     | -        | 7            | at least seven
count  | 1     | -        | 20           | Twenty
count  | 0     | -        | 20           | twenty-one
count  | 1     | -        | 12           | About a dozen? No: a dozen.
count  | 1     | -        | 0            | None
count  | 1     | -        | 12           | 图中有十二个杯子
count  | 0     | -        | 3            | 三明治
words  | 1     | -        | yes          | Yes, it is.
words  | 0     | -        | yes          | Yes, it is not.
words  | 1     | -        | blue         | Blue.
words  | 0     | -        | blue         | light  Blue
words  | 0     | -        | 5            | -5
words  | 1     | {"answers": ["blue", "Navy"]} | -            | navy
words  | 1     | {"answers": [3.0]} | -            | 3
words  | 1     | -        | blue         | “Blue”!
words  | 1     | -        | blue         | __Blue__
words  | 1     | -        | blue         | $\text{Blue}$
words  | 1     | -        | blue         | Answer: Blue
words  | 1     | -        | 蓝色         | 答案是「蓝色」。
words  | 1     | -        | ３ｃｍ       | 3 cm
words  | 1     | -        | it’s −5      | It's -5
words  | 1     | -        | ['Paris', 'Paris, France'] | Paris, France
words  | 0     | -        | ['Paris', 'Paris, France'] | France
anls   | 0.8   | -        | ["hello"]    | Helo
anls   | 1     | {"answers": ["help me", "HELL"]} | -            | hell
anls   | 0     | -        | abxy         | abcd
anls   | 1     | -        | it's −5      | it’s -5
anls   | 0     | -        | hello        | hello hello hello
ocr    | 10/11 | -        | Total 12.60  | Total  12.50
ocr    | 0.8   | -        | Total        | total
ocr    | 0     | -        | Total        |
ocr    | 4/7   | -        | sitting      | kitten
ocr    | 1     | -        | it's "−5"    | it’s “-5”
items  | 1     | -        | ["blue", "red"] | red, Blue
items  | 0.5   | -        | ["blue", "red"] | ["red", "green"]
items  | 2/3   | -        | ["blue", "red"] | red, red, red, blue
items  | 1     | -        | blue; red    | - red\n- blue
items  | 1     | -        | blue; red    | 1. red\n2. blue
items  | 1     | -        | blue; red    | (1) red, (2) blue
items  | 1     | -        | blue; red    | 1.red\n2.blue
items  | 1     | -        | blue; red    | - **red**\n- **blue**
items  | 1     | -        | blue; red    | **1. red**\n**2. blue**
items  | 1     | -        | blue; red; tan | red, blue, and tan
items  | 1     | -        | ["sand and sea"] | sand and sea
items  | 1     | -        | ["red", "blue"] | red and blue
items  | 0.5   | -        | ["sand and sea", "sky"] | sand and sea and sky, sky
order  | 1     | -        | [2, 1, 3]    | 2, 1 and 3
items  | 0     | -        | 1.5; 2.5     | 5, 5
items  | 1     | -        | 红; 蓝       | 1、红\n2、蓝
items  | 0     | -        | blue; red    | 2. red\n1. blue
items  | 2/3   | -        | ["a, b", "c"] | ["a, b"]
items  | 1     | -        | []       | []
items  | 0     | -        | []       | red
order  | 0     | -        | [1, 2, 3]    | 2, 1, 3
order  | 1     | -        | [1, 2, 3]    | [1, 2, 3]
order  | 1     | -        | [1, 2, 3]    | ```json\n[1, 2, 3]\n```
order  | 1     | -        | [1, 2, 2]    | 1-2-2
order  | 0     | -        | [1, 5, 2]    | 1.5, 2
order  | 1     | -        | [5, 7]       | 1. 5\n2. 7
order  | 1     | -        | [2, 1, 3]    | 2 -> 1 -> 3
order  | 1     | -        | [2, 1, 3]    | 2、1、3
order  | 1     | -        | B, A, C      | B > A > C
order  | 1     | -        | B, A, C      | (B)→(A)→(C)
order  | 1     | -        | 1. c\n2. a   | c, a
"""
)  # reward, its value, the row, the truth, the response


@pytest.mark.parametrize("name, value, row, truth, response", VALUES)
def test_values(name, value, row, truth, response):
    """Most are those of a survey of public recipes, with their failing inputs."""
    row = {"animals": ANIMALS, "-": {}}.get(row) if row in ("animals", "-") else json.loads(row)
    truth = None if truth == "-" else truth.replace(r"\n", "\n")
    earned = grade(name, response.replace(r"\n", "\n"), truth, row)
    assert earned == pytest.approx(float(Fraction(value)), abs=1e-12)


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


@pytest.mark.parametrize("name", marked(RIGHT))
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
@pytest.mark.parametrize("name", [name for name in RIGHT if name not in ("count", "ocr")])
def test_hostile_answers_take_no_time(name):
    """Those two read answers as number and anls do."""
    truth, row = RIGHT[name]
    texts = [" ".join(map(str, range(20_000)))]
    for piece in HOSTILE:
        texts += [piece * (100_000 // len(piece)), f"{piece} " * (100_000 // len(f"{piece} "))]
    for text in texts:
        start = time.process_time()
        assert 0 <= graded_here(name, text, truth, row) <= 1, text[:20]
        assert time.process_time() - start < 20, text[:20]


@pytest.mark.slow
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
    alone = [grade(name, guess, truth, row) for guess in guesses]
    for joint in (" ", ", ", "\n", " or ", " and ", ") (", "</answer> <answer>"):
        assert grade(name, joint.join(guesses), truth, row) <= max(alone)
    average = sum(alone) / len(alone)
    assert grade(name, " and ".join(guesses), truth, row) <= max(average, 0.5)


@pytest.mark.parametrize("name", RIGHT)
def test_truths_are_checked_before_a_run(name):
    """By the reader that grades answers."""
    check = getattr(reward_vision, name).check
    check(RIGHT[name][0])
    with value_error("an empty answer|no number"):
        check(" ")
    if name == "count":
        for truth in ("three", "−3", "3.0", "１２", "twenty-one", "50k"):
            check(truth)
        with value_error("the answer 'several', no number"):
            check("several")


@pytest.mark.parametrize("name", RIGHT)
def test_a_row_without_an_answer_is_told_before_a_run(name):
    """And not at the step that draws it; the answers of some are in a column of their own."""
    source = load(name)
    mix = RewardMix([source], {"*": {source.spec: 1.0}}, RewardArgs())
    truth, row = RIGHT[name]
    rows = [
        Prompt([], "", (), (), torch.empty(0), 0, reference=answer, row=row, source=f"x.jsonl:{k}")
        for k, answer in enumerate([truth, None])
    ]
    with user_error(rf"1 of 2 rows are bad\n  x.jsonl:1: no answer, which {name} compares with"):
        mix.check_rows(rows)
    if name in ("words", "anls"):
        mix.check_rows([rows[0], replace(rows[1], row={"answers": ["red"]})])


@pytest.mark.parametrize(
    "name, truth, row, message",
    [
        ("choice", "1", ANIMALS, "the answer '1' is neither a letter nor one of the row's options"),
        ("choice", "B", {"options": "['cat', 'dog']"}, "options must be a list of texts"),
        ("choice", "B", {"options": {"A": "cat", "B": "dog"}}, "options must be a list of texts"),
        ("number", "3", {"tolerance": "5%"}, "Fraction: '5%'"),
        ("words", "red", {"answers": "red"}, "answers must be a list of texts, not 'red'"),
        ("anls", "net", {"answers": [{"answer": "net"}]}, "answers must be a list of texts"),
    ],
)
def test_a_row_that_cannot_be_graded_is_told_before_a_run(name, truth, row, message):
    prompt = Prompt([], "", (), (), torch.empty(0), 0, reference=truth, row=row, source="x.jsonl:9")
    source = load(name)
    mix = RewardMix([source], {"*": {source.spec: 1.0}}, RewardArgs())
    with user_error(rf"x.jsonl:9: .*{re.escape(message)}.*, which {name} compares with"):
        mix.check_rows([prompt])
    nulls = dict.fromkeys(("options", "answers", "tolerance"))  # as tables have them
    mix.check_rows([replace(prompt, reference=RIGHT[name][0], row=nulls)])
    assert grade(name, RIGHT[name][0], RIGHT[name][0], nulls) == 1
    samples = reward_samples([RIGHT[name][0]], [RIGHT[name][0]], rows=[nulls])
    assert score_samples(source, samples, RewardArgs())["reward"] == [1]


def test_a_truth_that_is_no_choice_is_named():
    with pytest.raises(Exception, match="the answer '1' is neither a letter nor one of"):
        grade("choice", "B", "1", ANIMALS)


def test_a_truth_without_separators_is_a_word():
    with pytest.raises(Exception, match="the answer 'AC' is neither .* nor several letters"):
        grade("choice", "A, C", "AC", ANIMALS)


@pytest.mark.parametrize("name", ["items", "order"])
def test_collapsed_lists_are_read_in_little_time(name):
    """4,000 items each: some take a tenth of a second, where every item alone took one."""
    texts = [
        "red, " * 4000,
        ", ".join(map(str, range(4000))),
        "(A), **B**, " * 2000,
        "a cup\n" * 4000,
    ]
    start = time.process_time()
    for text in texts:
        graded_here(name, text, "red, blue", {})
    assert time.process_time() - start < 0.5


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
