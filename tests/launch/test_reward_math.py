"""launch/reward_math.py: math-verify judges answers, by its own limits of time and whatever a model writes."""

import time

import pytest

import extra_packages
from common.rewards.sources import RewardArgs, load_source
from conftest import ROOT, table
from helpers import reward_samples, score_samples

pytestmark = pytest.mark.slow  # fetches math-verify

PATH = ROOT / "launch" / "reward_math.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The function as the trainer loads it; it waits two seconds for an answer."""
    folder = tmp_path_factory.mktemp("math_verify")
    hasty = folder / PATH.name
    hasty.write_text(PATH.read_text().replace("SECONDS = 5 ", "SECONDS = 2 "))
    assert hasty.read_text() != PATH.read_text()
    with extra_packages.installed("math-verify", "math_verify", folder / "packages"):
        source = load_source(f"{hasty}:score")
        yield source
        source.function.program.end()


@pytest.fixture
def score(source):
    """The accuracy of (response, reference), as in training."""
    args = RewardArgs(reward_timeout=300)

    def accuracy(pairs: list[tuple[str, str]]) -> list[float]:
        responses, references = zip(*pairs)
        columns = score_samples(source, reward_samples(list(responses), list(references)), args)
        assert columns["reward"] == pytest.approx(
            [
                0.9 * right + 0.1 * form
                for right, form in zip(columns["accuracy"], columns["format"])
            ]
        )
        return columns["accuracy"]

    return accuracy


EQUAL = table(r"""
\sqrt{12}      | 2 \sqrt { 3 }
2√3            | 2\sqrt{3}
1/2            | \frac{1}{2}
\dfrac{3}{5}   | 0.6
2π             | 2\pi
\frac{4\pi}{3} | \frac{4}{3}\pi
5 \text{ cm}   | 5
60°            | 60
2\frac{1}{2}   | \frac{5}{2}
x = 3          | 3
1{,}234        | 1234
50\%           | 0.5
x + 1          | 1 + x
B              | B
−4             | -4
-4             | −4
{12}           | 12
1.41421356     | \sqrt{2}
1.414214       | \sqrt{2}
0.3333333      | \frac{1}{3}
12 \text{ cm}^2 | 12 cm^2
60 degrees     | 60^\circ
\text{B. dog}  | B
""")
DIFFERENT = table(r"""
4           | 5
\sqrt{12}   | 2\sqrt{2}
-4          | 4
\frac{1}{3} | 0.5
2\pi        | 2
A           | B
5           | 5\pi
1.0000001   | 1
1.41421357  | \sqrt{2}
12 m        | 12 cm
5\text{ kg} | 5 \mathrm{g}
12 \text{ m}^2 | 12 cm^2
""")


def test_what_is_equal(score):
    grades = score([(rf"so it is \boxed{{{answer}}}.", reference) for answer, reference in EQUAL])
    assert [pair for pair, grade in zip(EQUAL, grades) if grade != 1.0] == []


def test_what_is_not_equal(score):
    grades = score([(rf"\boxed{{{answer}}}", reference) for answer, reference in DIFFERENT])
    assert [pair for pair, grade in zip(DIFFERENT, grades) if grade != 0.0] == []


def test_only_the_last_box_counts(score):
    responses = [
        r"\boxed{3}, no, \boxed{4} and not 5",
        r"\boxed{4}, no, \boxed{3}",
        "the answer is 4",
        "$4$",
        r"\boxed{4} as the \boxed asks",
        r"\boxed{} $4$",
        r"<think>\boxed{4}",
    ]
    lettered = [r"\boxed{(B)}", r"\boxed{B.}", r"\boxed{\text{(C)}}"]
    pairs = [(response, "4") for response in responses] + [(letter, "B") for letter in lettered]
    assert score(pairs) == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def test_a_long_response_is_read_in_linear_time(score):
    start = time.process_time()
    pieces = ("<think></think>", r"<think></think>\boxed", r"\boxed{")
    assert score([(piece * 20_000, "4") for piece in pieces]) == [0.0] * 3
    assert time.process_time() - start < 20


def test_text_that_cannot_be_parsed_earns_nothing(score):
    responses = [
        "",
        "rubbish",
        r"\boxed",
        r"\boxed{",
        r"\boxed{}",
        r"\boxed{\frac{1}{}}",
        r"\boxed{\left(}",
        "\0\ud800",
        r"\boxed{" * 50,
        r"\boxed{\text{a line" + "\n" + "break}}",
    ]
    assert score([(response, "5") for response in responses]) == [0.0] * len(responses)


def test_an_answer_without_end_is_wrong_and_stops_nothing(score):
    """sympy would write out a number of 369 million digits; the answers around it get their grades."""
    pairs = [(r"\boxed{1}", "1"), (r"\boxed{9^{9^{9}}}", "1"), (r"\boxed{2}", "2")]
    assert score(pairs) == [1.0, 0.0, 1.0]


def test_the_format_is_thoughts_and_then_a_box(source):
    responses = [
        r"<think>1 + 1</think> \boxed{2}",
        r"<think>1 + 1 \boxed{2}",
        r"\boxed{2}",
        "<think>1 + 1</think> 2",
        r"1 + 1</think> \boxed{2}",
        r"1 + 1</think> \boxed{2}",
    ]
    # the template has opened the last one's
    prompts = [""] * 5 + ["assistant\n<think>\n"]
    columns = source.function(prompts, responses, ["2"] * 6, [None] * 6, [[]] * 6)
    # open: no answer
    assert columns["reward"] == [1.0, 0.0, 0.9, 0.0, 0.9, 1.0]
    assert columns["format"] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_an_empty_reference_is_refused(source):
    fine, empty = source.check(["5", " "], {"row": [{}, {}]})
    assert fine == ""
    assert "an empty answer" in empty
