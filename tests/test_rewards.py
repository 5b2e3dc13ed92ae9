"""Rule rewards, user reward functions and their failures."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from train_ppo_vl import (RewardError, answers_equal, exact_match, extract_answer, extract_boxed, extract_tag,
                          format_score, load_reward, parse_number, score_samples)


def score(fn, n=4, **kwargs):
    columns = ([f"prompt {i}" for i in range(n)], [f"response {i}" for i in range(n)],
               [f"reference {i}" for i in range(n)], [f"label {i}" for i in range(n)], [[] for _ in range(n)])
    return score_samples(fn, *columns, spec="my.py:f", **kwargs)


# ------------------------------------------------------------------------------------------------ extraction
@pytest.mark.parametrize("response, answer", [
    (r"so \boxed{42}.", "42"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed {3}", "3"), (r"\fbox{3}", None),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{\boxed{7}}", "7"), (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{4} and \boxed{5", "4"), (r"{ \boxed{6}", "6"), (r"} \boxed{6} }", "6"), (r"\boxed{ \boxed{8}", "8"),
    (r"\boxed{", None), (r"\boxed", None), ("", None), ("\\", None), (r"\boxed{}", ""), (r"\boxed{a\}b}", r"a\}b"),
    ("<answer> x </answer>", "x"), ("<answer>1</answer> <answer>2</answer>", "2"), ("<answer>1", None),
    ("</answer><answer>", None), ("<answer>3</answer> </answer>", "3"), ("<answer>1</answer> <answer>2", "1"),
    (r"<answer>\boxed{9}</answer>", "9"), (r"\boxed{1} <answer>2</answer>", "1"),
])
def test_extract_answer(response, answer):
    assert extract_answer(response) == answer


def test_rule_specific_extraction():
    both = r"\boxed{1} <answer>2</answer>"
    assert extract_boxed(both) == "1" and extract_tag(both) == "2"


@pytest.mark.parametrize("response, expected", [
    (r"<think>a</think> \boxed{1}", 1), ("<think>a</think><answer>1</answer>", 1), (r"\boxed{1}", 0),
    (r"<think>a</think>", 0), (r"<think>\boxed{1}</think>", 0), (r"<think>a</think><think>b</think>\boxed{1}", 0),
    (r"</think>a<think> \boxed{1}", 0), (r"<think><think>a</think> \boxed{1}", 0), (r"<think>a</think> \boxed{}", 0),
    (r"<think>a</think></think> \boxed{1}", 0), ("", 0), (r"<think>a \boxed{1}", 0),
])
def test_format_score(response, expected):
    assert format_score(response) == expected


# ------------------------------------------------------------------------------------------------ equality
EQUAL = [
    ("42", "42"), ("42.0", "42"), ("42.", "42"), ("+42", "42"), ("007", "7"), ("-3", "−3"), ("1e3", "1000"),
    (".5", "0.5"), ("1,234", "1234"), ("1{,}234", "1234"), (r"1,234,567.5", "1234567.5"), (r"12\,345", "12345"),
    (r"10,\!000", "10000"), ("１", "１"), ("1/2", "0.5"), (r"\frac{1}{2}", "0.5"), (r"\dfrac12", "1/2"),
    (r"\tfrac{3}{4}", ".75"), (r"-\frac{1}{2}", "-.5"), (r"\frac{-1}{2}", "-1/2"), (r"\frac1{2}", "1/2"),
    ("0.3333333", "1/3"), ("½", "0.5"), ("1½", "3/2"), ("1 1/2", "1.5"), (r"1\frac{1}{2}", "3/2"),
    (r"-1\frac12", "-1.5"), (r"2\frac{6}{2}", "6"), (r"\sqrt{4}", "2"), (r"\sqrt2", "1.414213562"),
    ("√2", r"\sqrt{2}"), (r"2\sqrt{3}", r"\sqrt{12}"), ("sqrt(9)", "3"), (r"\sqrt[3]{8}", "2"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"), (r"\sqrt{8}-2\sqrt{2}", "0"), (r"2\pi", "6.283185307"),
    ("2π", r"2 \pi"), ("pi/2", r"\frac{\pi}{2}"), ("2pi", r"2\pi"), (r"3 \times 10^{5}", "300000"),
    ("3×10^5", "300000"), (r"6 \div 2", "3"), (r"2 \cdot 3", "6"), ("2^10", "1024"), ("2**-1", "0.5"), ("-2^2", "-4"),
    ("--5", "5"), ("2^3^2", "512"), ("(2)(3)", "6"), ("10²", "100"), ("50%", "0.5"), (r"50\%", "50"), ("50", "50%"),
    ("50%", "50.0 %"), ("$5", "5"), (r"\$1,000", "1000"), ("$x+1$", "x + 1"), (r"$\frac{1}{2}$", "0.5"),
    (r"90^\circ", "90"), (r"90^{\circ}", "90°"), (r"\left(1, 2\right)", "(1,2)"), ("5 cm", "5"), ("5cm", "5"),
    (r"5\text{ cm}", "5"), (r"12 \mathrm{cm}^2", "12"), ("5 square meters", "5"), ("3 apples", "3"),
    ("60 miles per hour", "60"), ("9.8 m/s^2", "9.8"), ("5.0 cm", "5 cm"), ("5 Meters", "5 meter"),
    (r"\frac{1}{2} kg", ".5"), ("(B)", "B"), ("b", "(B)"), ("B.", "B"), (r"\text{(B)}", "B"), ("B)", "(B)"),
    (r"\textbf{C}", "c"), ("x=3", "3"), ("3", "x = 3"), ("x=3", "x=3.0"), (r"x_1 = 3", "3"), ("f(x) = 2", "2"),
    (r"\theta=30^\circ", "30"), ("(1, 2)", "(1.0,2)"), ("[0, 1/2)", "[0,0.5)"), (r"\{1,2\}", r"\{2, 1\}"),
    ("1, 2", "2,1"), ("1,2", r"\{1,2\}"), ("100,200,300", "100, 300, 200"), ("(1,2),(3,4)", "(3,4), (1,2)"),
    (r"(\frac{1}{2}, \sqrt{4})", "(0.5, 2)"), ("red", "Red"), ("Red.", "red"), (r"\text{red}", "red"),
    ("new  york", "New York"), ("nan", "NaN"), ("x + 1", "x+1"), (r"\infty", r"\infty"),
    ("12345678901234567890", "12345678901234567890"), ("(3)", "3"), ("{5}", "5"),
]
UNEQUAL = [
    ("42", "43"), ("", ""), ("", "0"), ("$$", "$$"), ("12345678", "12345679"), ("1 2", "12"), ("1.2.3", "1.2"),
    ("3", "-3"), ("12345678901234567890", "12345678901234567891"), ("1/3", "0.33"), ("0.5%", "50"), ("0.1%", "0.01"),
    ("x=3", "y=3"), ("2x", "2"), ("5", "5 cm"), ("5 m", "5 cm"), ("5 million", "5"), ("2 dozen", "2"),
    ("2 or more", "2"), ("A", "B"), ("3 am", "3 pm"), ("5 s", "5 m"), ("5", "5 s"), ("A dog", "A"), ("(A)(B)", "B"),
    ("A, B", "B"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("(1,2,3)", "(1,2)"), ("1,1,2", "1,2,2"), ("nan", "0"),
    ("inf", "1e999"), ("1e999", "2e999"), ("٤٢", "42"), ("四", "4"), ("10**10**10", "1"), ("1/0", "0"),
    ("(-1)^0.5", "1"), ("0^-1", "0"), ("3²", "32"), ("", "A"), ("True", "1"), ("None", "0"), ("__import__", "1"),
    ("1_000", "1000"), ("0x10", "16"), ("1,23", "123"), ("(1,234)", "1234"), (r"\frac{1}{", "1"), (r"\sqrt", "1"),
    ("^", "1"),
]


@pytest.mark.parametrize("given, reference", EQUAL)
def test_equal(given, reference):
    assert answers_equal(given, reference)


@pytest.mark.parametrize("given, reference", UNEQUAL)
def test_unequal(given, reference):
    assert not answers_equal(given, reference)


def test_exact_match_is_text_only():
    assert exact_match("  Two\n Words ", "two words") and not exact_match("2.0", "2")


def test_parse_number_keeps_integers_exact():
    assert parse_number("2^64") == 2**64 and isinstance(parse_number("2^64"), int)
    assert parse_number("12345678901234567890 + 1") == 12345678901234567891
    assert parse_number("9" * 600) is None and parse_number("9" * 500) is None  # too long; no finite float


def test_fuzz_never_raises_and_stays_fast():
    pieces = list("0123456789.,+-*/^(){}[]\\%$=_ e\n٤²π√½°٫－") + [
        "\\frac", "\\sqrt", "\\boxed{", "\\text{", "<answer>", "</answer>", "<think>", "</think>", "nan", "inf", "10**",
        "\\left", "\\pi", " cm", "\ud800", "\x00", "(B)", "x=", "1 1/2", "\\{", "\\}", "million"]
    rng = random.Random(0)
    start = time.process_time()
    for _ in range(4000):
        left, right = ("".join(rng.choices(pieces, k=rng.randrange(30))) for _ in range(2))
        for text in (left, right):
            extract_answer(text), format_score(text), parse_number(text)
        answers_equal(left, right)
        assert answers_equal("7" + left, "7" + left)
    assert time.process_time() - start < 6


@pytest.mark.parametrize("unit", [
    "(", "-", "{", "((1,", "2^", "9^(9^", "\\sqrt", "\\frac", "1,", "1, 2, ", "\\boxed{", "\\boxed ", "<answer>",
    "</answer>",
    "<think>", "\\text{", "½", "1 ", "1 1/2 ", "cm ", "a", "\\", " ", "{}", "10**10**", "(1,2),", "9", "$", "=",
    "x=", "}", "square "])
def test_repeated_pieces_take_bounded_time(unit):
    start = time.process_time()
    for length in (500, 200_000):  # the longest answer that is parsed, and a response that is only scanned
        text = (unit * length)[:length]
        answers_equal(text, text + "1")
        answers_equal(text[:500] + "1", text[:500] + "2")
        extract_answer(text), format_score(text), extract_tag(text)
        parse_number(text[:400] + ")" * 100)
    assert time.process_time() - start < 1


# ------------------------------------------------------------------------------------------------ rules
def test_rules_score_the_response_only():
    prompts = [r"Answer as \boxed{4}. <think></think> <answer>4</answer>"] * 3
    responses = [r"<think>2 + 2</think> \boxed{4}", "four", r"\boxed{5}"]
    arguments = (prompts, responses, ["4"] * 3, [None] * 3, [[]] * 3)
    assert load_reward("boxed")(*arguments) == {"reward": [1, 0, 0], "accuracy": [1, 0, 0], "format": [1, 0, 0]}
    assert load_reward("answer")(*arguments)["reward"] == [0, 0, 0]
    assert load_reward("exact")(prompts, ["4", " 4\n", "4.0"], ["4"] * 3, [None] * 3, [[]] * 3)["reward"] == [1, 1, 0]


def test_rule_weights():
    responses = ["<answer>4</answer>", "<think>so</think><answer>5</answer>", "<think>so</think><answer>4</answer>"]
    result = load_reward("answer")([""] * 3, responses, ["4"] * 3, [None] * 3, [[]] * 3)
    assert result["reward"] == pytest.approx([.9, .1, 1]) and result["accuracy"] == [1, 0, 1]
    assert result["format"] == [0, 1, 1]


def test_rule_rewards_and_components_are_separate_lists():
    result = load_reward("exact")([""], ["a"], ["a"], [None], [[]])
    result["reward"][0] = 7.0
    assert result["accuracy"] == [1.0]


# ------------------------------------------------------------------------------------------------ user functions
def test_load_user_function(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from dataclasses import dataclass\n@dataclass\nclass C:\n    x: int = 1\n"
                    "constant = 3\ndef length(prompts, responses, *rest):\n    return [len(r) for r in responses]\n")
    assert score(load_reward(f"{path}:length")) == ([10.0] * 4, {})
    for spec in (f"{path}:nothing", f"{path}:constant", str(path), f"{tmp_path}/no.py:f", "unknown", "",
    ":f", f"{tmp_path}:f"):
        with pytest.raises(ValueError, match="--reward"):
            load_reward(spec)
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(ValueError, match="not a .py file"):
        load_reward(f"{tmp_path}/text.txt:f")
    (tmp_path / "broken.py").write_text("import no_such_module_at_all")
    with pytest.raises(ModuleNotFoundError):  # the user's own error keeps its own traceback
        load_reward(f"{tmp_path}/broken.py:f")


@pytest.mark.parametrize("convert", [list, tuple, np.array, torch.tensor, lambda v: np.array(v, dtype=np.float32)])
def test_result_types(convert):
    rewards, components = score(lambda p, r, *_: convert([float(x[-1]) for x in r]), workers=3)
    assert rewards == [0, 1, 2, 3] and components == {} and all(type(r) is float for r in rewards)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 9])
def test_order_and_components_over_workers(workers):
    def f(prompts, responses, references, labels, images):
        index = [int(p[-1]) for p in prompts]
        assert all([int(text[-1]) for text in column] == index for column in (responses, references, labels))
        time.sleep(0.01 * (9 - index[0]))  # later chunks finish first
        return {"a": index, "b": [i * 10 for i in index]}

    rewards, components = score(f, n=7, workers=workers)
    assert rewards == [11.0 * i for i in range(7)]  # no "reward": the sum of all components
    assert components == {"a": [float(i) for i in range(7)], "b": [10.0 * i for i in range(7)]}


def test_reward_key_is_the_reward():
    assert score(lambda p, *_: {"reward": [5] * len(p), "a": [1] * len(p)}) == ([5.0] * 4, {"a": [1.0] * 4})


def test_no_samples():
    assert score(lambda *_: pytest.fail("called"), n=0) == ([], {})


@pytest.mark.parametrize("bad", [
    float("nan"), float("inf"), None, "1.0", [1.0, 2.0], 10**400, torch.zeros(2), object()])
def test_bad_value_shows_its_sample(bad):
    with pytest.raises(RewardError, match="(?s)my.py:f.*not a finite number; sample 2 of 4.*response 2.*reference 2"):
        score(lambda p, *_: [bad if x[-1] == "2" else 1.0 for x in p], workers=2)


@pytest.mark.parametrize("result, message", [
    ([1.0], "list of 1 for 4"), ([1.0] * 5, "list of 5 for 4"), (None, "NoneType of no length for 4"),
    (1.0, "float of no length"),
    ("abcd", "str of 4"), ((x for x in range(4)), "generator of no length"), ({}, "expected at least one"),
    ({"a": [1.0] * 4, "b": [1.0]}, "b is a list of 1 for 4"), ({"a": 1.0}, "a is a float"),
    (np.zeros(0), "ndarray of 0")])
def test_wrong_shape(result, message):
    with pytest.raises(RewardError, match=f"(?s){message}.*response 0"):
        score(lambda *_: result)


def test_components_must_agree_between_chunks():
    with pytest.raises(RewardError, match=r"(?s)components \['b'\], expected \['a'\].*response 2"):
        score(lambda p, *_: {"a" if p[0][-1] == "0" else "b": [0.0] * len(p)}, workers=2)


@pytest.mark.parametrize("error", [KeyError("gone"), SystemExit(3), ZeroDivisionError("by zero")])
def test_raising_function_shows_the_sample_and_keeps_the_cause(error):
    def f(prompts, *_):
        if any(p[-1] == "3" for p in prompts):
            raise error
        return [0.0] * len(prompts)

    with pytest.raises(RewardError, match=f"(?s)raised {type(error).__name__}.*sample 3 of 4.*response 3") as info:
        score(f)
    assert info.value.__cause__ is error


def test_raising_only_in_a_batch_shows_the_first_sample():
    def f(prompts, *_):
        if len(prompts) > 1:
            raise RuntimeError("too many")
        return [0.0]

    with pytest.raises(RewardError, match="(?s)samples 0 to 3 raised RuntimeError: too many; sample 0 of 4"):
        score(f)


def test_timeout_names_the_chunk_and_leaves_only_daemon_threads():
    release, before = threading.Event(), set(threading.enumerate())

    def f(prompts, *_):
        if prompts[0][-1] == "2":
            release.wait(20)
        return [0.0] * len(prompts)

    start = time.monotonic()
    with pytest.raises(RewardError, match=r"(?s)samples 2 to 3 took longer than 0.2 s.*response 2"):
        score(f, workers=2, timeout_s=0.2)
    assert time.monotonic() - start < 5
    left = set(threading.enumerate()) - before
    assert left and all(thread.daemon for thread in left)  # the process can exit
    release.set()


def test_long_texts_are_cut_in_the_message():
    long = "x" * 100_000 + "the end"
    with pytest.raises(RewardError) as info:
        score_samples(lambda *_: [], [long], [long], [long], [None], [[]], spec="f")
    message = str(info.value)
    assert len(message) < 2000 and message.count("the end") == 3 and "100007 characters" in message


def test_workers_run_side_by_side():
    barrier = threading.Barrier(4, timeout=10)
    assert score(lambda p, *_: [float(barrier.wait() >= 0)] * len(p), workers=4, timeout_s=20)[0] == [1.0] * 4
