"""Rule rewards, user reward functions and their failures."""

import math
import random
import threading
import time
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_ppo_vl as ppo
from common.data.coordinates import Place, Regions
from common.data.rows import Prompt, name_tasks
from common.ground.files import UserError
from common.reports.records import accuracy_columns, summarise_samples, task_metrics
from common.rewards import sources
from common.rewards.rules import (
    answers_equal,
    extract_answer,
    format_score,
    read_letters,
    read_numbers,
    rule_reward,
    same_words,
)
from common.rewards.sources import RewardArgs, Source, load_source
from conftest import ROOT, readme_reward, table, user_error, words
from helpers import reward_samples, score_samples


def score(fn, n=4, timeout=60.0, keywords=(), **more):
    """Rewards and components of n samples."""
    names = ("prompts", "responses", "references", "labels")
    samples = reward_samples(
        **{name: [f"{name[:-1]} {i}" for i in range(n)] for name in names}, **more
    )
    source = Source("my.py:f", "f", "function", fn, list(keywords))
    args = RewardArgs(reward_timeout=timeout)
    scored = score_samples(source, samples, args)
    return scored.pop("reward"), scored


def one_sample(prompt="p", response="r", reference="a"):
    return reward_samples([response], [reference], [prompt])


# ------------------------------------------------------------------------------------------------ extraction
@pytest.mark.parametrize(
    "response, answer",
    [
        ("\\boxed{a\nb}", "a\nb"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("so <|begin_of_box|>{1}<|end_of_box|>.", "{1}"),
        ("<answer>so <|begin_of_box|>B<|end_of_box|></answer>", "B"),
        *table(r"""
\boxed{1} then \boxed{2}     | 2
\boxed {3}                   | 3
\fbox{3}                     | None
\boxed{\frac{1}{2}}          | \frac{1}{2}
\boxed{\boxed{7}}            | 7
\boxed{\{1,2\}}              | \{1,2\}
\boxed{4} and \boxed{5       | 4
} \boxed{6} }                | 6
\boxed{a\}b}                 | a\}b
\boxed{                      | None
\boxed{}                     |
<answer> x </answer>         | x
<answer>1</answer> <answer>2 | 1
</answer><answer>            | None
<answer>1<answer>2</answer>  | 2
<answer>so \boxed{3}.</answer> | 3
<answer></answer>            |
<think>\boxed{1}             | None
<think>\boxed{1}</think>     | 1
<think> <answer>1</answer>   | None
</think>\boxed{1}<think>     | None
"""),
    ],
)
def test_last_answer(response, answer):
    assert str(extract_answer(response, "answer" if "answer" in response else "boxed")) == answer


@pytest.mark.parametrize(
    "expected, response",
    table(r"""
1 | <think>a</think> \boxed{1}
0 | \boxed{1}
0 | <think>a</think>
0 | <think>\boxed{1}</think>
0 | <think>a</think><think>b</think>\boxed{1}
0 | </think>a<think> \boxed{1}
0 |
0 | <think><think>a</think> \boxed{1}
0 | <think>a</think> \boxed{}
0 | <think>a</think></think> \boxed{1}
0 | <think>a \boxed{1}
0 | <think>a</think><answer>1</answer>
"""),
)
def test_format_score(expected, response):
    assert format_score(response, "boxed") == int(expected)


@pytest.mark.parametrize(
    "prompt_end, formed",
    [
        ("assistant\n<think>\n", [1, 0, 0]),
        ("<think>", [1, 0, 0]),
        ("assistant\n", [0, 1, 0]),
        ("<think>\n\n</think>\n\n", [0, 1, 1]),
        ("<｜Assistant｜></think>", [0, 1, 1]),
        ("<think>Okay, I have finished thinking.</think>", [0, 1, 1]),
    ],
)
@pytest.mark.parametrize(
    "rule, answer", [("boxed", r"\boxed{3}"), ("answer", "<answer>3</answer>")]
)
def test_a_thought_that_the_template_opens_is_part_of_the_form(prompt_end, formed, rule, answer):
    """As those of Qwen3.5, the Thinking models and R1's distills do; also one that it closes, as where
    thinking is switched off, unless the response has its own."""
    responses = [f"1 + 2\n</think>\n\n{answer}", f"<think>1 + 2</think>{answer}", answer]
    columns = rule_reward(
        rule,
        [f"<|im_start|>user\n<think>?<|im_end|>{prompt_end}"] * 3,
        responses,
        ["3"] * 3,
        [None] * 3,
        [[]] * 3,
    )
    # the last thought is still open
    right = [1, 1, int(not prompt_end.strip().endswith("<think>"))]
    assert columns["accuracy"] == columns["parsed"] == right
    assert columns["format"] == formed
    assert columns["reward"] == pytest.approx(
        [0.9 * accuracy + 0.1 * form for accuracy, form in zip(right, formed)]
    )
    exact = rule_reward("exact", ["<think>"], ["a b"], ["A  b"], [None], [[]])
    assert exact["reward"] == [1]


@pytest.mark.parametrize(
    "begin, end", [("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>")]
)
def test_thoughts_in_tokens_of_a_models_own(begin, end):
    """As Ministral 3 and Gemma 4 write them; in the last one the template has begun it."""
    prompts = ["?", "?", f"? {begin}"]
    responses = [
        f"{begin}1 + 2{end}\\boxed{{3}}",
        f"{begin}\\boxed{{3}}",
        f"1 + 2{end}\\boxed{{3}}",
    ]
    columns = rule_reward("boxed", prompts, responses, ["3"] * 3, [None] * 3, [[]] * 3)
    assert columns["accuracy"] == columns["format"] == [1, 0, 1]


# ------------------------------------------------------------------------------------------------ equality
EQUAL = table(r"""
42.0                | 42
42.                 | 42
+42                 | 42
007                 | 7
-3                  | −3
.5                  | 0.5
1,234               | 1234
1{,}234             | 1234
12\,345             | 12345
10,\!000            | 10000
1/2                 | 0.5
\frac{1}{2}         | 0.5
\dfrac12            | 1/2
\tfrac{3}{4}        | .75
\frac{-1}{2}        | -1/2
\frac1{2}           | 1/2
(\frac12, 3]        | (0.5, 3]
0.3333333           | 1/3
50%                 | 0.5
50\%                | 50
50%                 | 50.0 %
\$1,000             | 1000
$\frac{1}{2}$       | 0.5
\left(1, 2\right)   | (1,2)
5 cm.               | 5 cm
b                   | (B)
B.                  | B
\text{(B)}          | B
\textbf{C}          | c
[0, 1/2)            | [0,0.5)
(1,234)             | (1, 234)
((1,2),3)           | ((1, 2), 3.0)
\{1, 2\}            | \{1,2\}
new  york           | New York
x + 1               | x+1
\dfrac{x}{2}        | \frac{x}{2}
\boxed{\frac{1}{2}} | 0.5
0.00001             | 1e-05
20000000000000000   | 2e+16
2 \times 10^{16}    | 2e+16
3*10^-5             | 3e-05
5 x 10^3            | 5000
\(12\)              | 12
\[ \boxed{12} \]    | 12
（１２，３４５）    | (12,345)
Ｂ                  | B
–3                  | -3
－3                 | -3
½                   | 0.5
-⅔                  | -2/3
5％                 | 5%
1½                  | 1.5
-2 1/2              | -2.5
2\frac{1}{2}        | 5/2
-2 \dfrac12         | -2.5
10^5                | 100,000
10^{-2}             | 0.01
10⁵                 | 1e5
x²                  | x^{2}
**42**              | 42
**(B).**            | B
5\text{ cm}         | 5 cm
5\,\text{cm}        | 5 cm
B。                 | B
it’s red            | it's red
答案是B             | B
答案：12            | 12
选 B。              | B
Answer: b           | B
The answer is (b).  | B
Option B            | b
B. dog              | B
b) dog              | B
b. a dog            | B
Answer: B. dog      | B
Final answer: 12    | 12
{12}                | 12
"12"                | 12
€5                  | 5
50 percent          | 50%
3 cm                | 3cm
60^{\circ}          | 60°
2π                  | 2\pi
A、C                | A, C
“yes”               | yes
《红楼梦》          | 红楼梦
[C]                 | C
**Answer:** b       | B
choice C            | C
正确答案：C         | C
答案选C             | C
故选C               | C
答案是：B           | B
故答案为12          | 12
正确选项是B         | B
The best answer is B | B
Ans: 12             | 12
three               | 3
Three               | three
−1/2                | -0.5
1.0                 | 1.00000001
\text{B. dog}       | B
\textbf{(B)}~dog    | B
\textbf{(B)}\ 12    | B
\text{Option B}     | B
\text{Answer: B}    | B
B．12               | B
2.5 million         | 2,500,000
2\text{ billion}    | 2e9
3万                 | 30000
negative 3          | -3
负3                 | -3
\frac{32}{3}        | \frac { 32 } { 3 }
-1/2                | \frac { - 1 } { 2 }
60°                 | 60 ^ { \circ }
60 degrees          | 60°
x^2+1               | x ^ { 2 } + 1
(-∞, 3]             | (-\infty,3]
x≤3                 | x \leq 3
x \le 3             | x ≤ 3
B. \sqrt{3}         | B
(B) √3              | B
(B) -3              | B
B: -\sqrt{3}        | B
B. (2, 3)           | B
(B) (x+1)(x-2)      | B
B. "dog"            | B
""")
EQUAL.append(["9" * 400, "9" * 400])
# In both directions. Letters that touch a number are scales, those apart units.
SCALED = table("""
50k          | 50000
50K          | 50,000
$2B          | 2 billion
2B           | 2,000,000,000
1.5M         | 1500000
1.5M         | 1.5 million
3bn          | 3e9
3Bn          | 3 billion
-4k          | -4000
€1.2bn       | 1.2 billion
10k          | ten thousand
1,200k       | 1.2M
300K         | 300 K
300K         | 300\\,\\text{K}
5 M          | 5M
2 B          | 2B
5m           | 5 m
7K           | 7k
0.5k         | five hundred
50 k         | 50K
2b           | 2B
seat 12b     | Seat 12B
""")
NOT_SCALED = table("""
50k          | 50
5m           | 5000000
5m           | 5M
3 m          | 3M
300 K        | 300000
5 M          | 5000000
50kg         | 50000
2b           | 2000000000
5k           | 5M
1e3k         | 1000000
4K           | 4
""")
WORDED = table(r"""
twenty-one            | 21
21                    | twenty-one
two hundred and five  | 205
a dozen               | 12
twenty-five percent   | 25%
two million dollars   | 2 million dollars
2.5 million people    | 2500000 people
$2.5M a year          | 2.5 million a year
three cm              | 3 cm
十二                  | 12
minus three           | -3
none                  | 0
2 + 1 = 3             | 3
3 \times 4 = 12       | 12
1/2 + 1/4 = 3/4       | 0.75
yes, it is            | yes
Yes it does.          | Yes
No, they aren't       | no
No, it is not.        | no
""")
NOT_WORDED = table("""
0                     | none
yes, it is not        | yes
no, it is             | no
yes, it is a dog      | yes
yes, no, maybe        | yes
3+2 = 5               | 4+1 = 5
2 + 1 = 3 = 4         | 3
one                   | someone
two-thirds            | 2
1 2                   | twelve
""")
LETTER_SETS = table(r"""
A, C           | A, C
C and A        | A, C
AC             | A, C
ca             | A, C
(A) and (C)    | A, C
A C            | A, C
Answer: C, A.  | A and C
[A, C]         | A、C
\text{C, A}    | A & C
A、B和D        | A, B, and D
DBA            | (A), (B), (D)
""")
NO_LETTER_SETS = table("""
A              | A, C
A, B, C        | A, C
A or C         | A, C
A, not C       | A, C
A, A, C        | A, C
A and C are wrong | A, C
A-C            | A, C
CA             | AC
A, C           | AC
C, A           | (A, C)
y, x           | x, y
A, A           | A
B              | A, A
K, L           | L, K
A, B, C        | C, A, B
AC             | C, A
""")
EQUAL += SCALED + [pair[::-1] for pair in SCALED] + WORDED + LETTER_SETS
UNEQUAL = NOT_SCALED + [pair[::-1] for pair in NOT_SCALED] + NOT_WORDED + NO_LETTER_SETS
UNEQUAL += table(r"""
42                   | 43
$$                   | $$
1 2                  | 12
1.2.3                | 1.2
3                    | -3
12345678901234567890 | 12345678901234567891
1/3                  | 0.33
1/3                  | 333333333/1000000000
2+2                  | 4
2^2                  | 4
(4)                  | 4
8/4/2                | 1
0.5%                 | 50
0.1%                 | 0.01
x=3                  | y=3
2x                   | 2
5                    | 5 cm
5 million            | 5
1/2 million          | 500000
B.C                  | B
minus three          | 3
A                    | B
A dog                | A
A, B                 | B
[1]                  | 1
2**3**4              | 234
(1,2)                | (2,1)
(1,2)                | [1,2]
(1,2,3)              | (1,2)
(                    | [
nan                  | 0
1e999                | 2e999
٤٢                   | 42
1/0                  | 0
3²                   | 32
\frac{x+1}{2}        | x+1/2
1½                   | 11/2
2\frac{1}{2}         | 21/2
10^5                 | 105
x10^2                | x100
log₂3                | log23
1 2                  | 3
1e9999               | 2e9999
20250101             | 20250102
20250101             | 20250102.0
1_000                | 1000
0x10                 | 16
1,23                 | 123
\frac{1}{            | 1
1.0000001            | 1
1                    | 1.0000001
0.3333               | 1/3
3.14159              | 3.14
0.5000001            | 1/2
0.5000001            | 50%
B. C. A.             | B
b. c. a.             | B
Answer: b or c       | B
Answer: a dog        | A
C + 1                | C
(a)+b                | a
(a)-b                | a
(n)!                 | n
(x)(x+1)             | x
(x) \cdot y          | x
(x) × y              | x
(x) \leq 3           | x
x \left 3            | x \leq 3
thirteen             | 3
-                    | +
""")
UNEQUAL += [["", ""], ["", "0"], ["9" * 308, "50.5%"]]


@pytest.mark.parametrize("pair", EQUAL + UNEQUAL)
def test_answers_equal(pair):
    assert answers_equal(*pair) == (pair in EQUAL)


LETTERS = table("""
B                              | B
b                              | B
(b)                            | B
Ｂ                             | B
B. dog                         | B
b) dog                         | B
b. a dog                       | B
Answer: b                      | B
The correct answer is: (b)     | B
answer is b or d               | BD
Answer: b, c                   | BC
答案是B                        | B
答案：b                        | B
选项B正确                      | B
正确答案是b                    | B
故选b                          | B
Answer: **b**                  | B
**Answer:** b                  | B
\\text{b}                       | B
choice b                       | B
I think A is right.            | A
A dog is seen                  |
Answer: a dog                  |
e.g. it's Bär                  |
B. C. A.                       | ABC
b. c. a.                       | ABC
A and B                        | AB
A rather than B                |
Answer: a and b                | AB
B is not a dog                 |
B. not a dog                   | B
not B                          |
I think it cannot be option B  |
B isn't right                  |
不选B                          |
B不对                          |
Es ist nicht B                 |
Bではない                      |
B가 아닙니다                   |
A oder B                       | AB
A ou B                         | AB
정답은 B입니다                 | B
""")


@pytest.mark.parametrize("text, letters", LETTERS)
def test_letters_that_a_text_names(text, letters):
    assert read_letters(text)[0] == set(letters)


NUMBERS = table("""
7 cups                         | 7
−5                             | -5
–5                             | -5
1,234.5                        | 1234.5
$1,234.50                      | 1234.5
47.5 %                         | 47.5
５                             | 5
½                              | 0.5
1 1/2                          | 1.5
5e2                            | 500
2 \\times 10^{3}              | 2000
{12}                           | 12
答案是12                       | 12
共7个杯子                      | 7
Answer: 12                     | 12
12345,678                      | 12345 678
1,234,567.5 or 1,2345          | 1234567.5 1 2345
-$5, or so                     | -5
111111111111111111111111111111111 x |
seven                          | 7
Seven.                         | 7
There are seven cups           | 7
7, not one                     | 7
6 or 7                         | 6 7
twenty-one                     | 21
x12                            |
1/0                            | 1 0
2.5 million people             | 2500000
3 millions                     | 3000000
5 millionaires                 | 5
7 thousandths                  | 7
1,234 thousand or 5            | 1234000 5
negative 3                     | -3
minus three                    | -3
50 m²                          | 50
50 cm^2                        | 50
not 7                          |
more than 7                    |
不是7                          |
7, at least                    | 7
twenty one                     | 21
two hundred and five people    | 205
two hundred five               | 205
A hundred and one dalmatians   | 101
one thousand, two hundred and thirty-four | 1234
two million three hundred thousand and one | 2300001
fourteen million               | 14000000
a dozen                        | 12
Half a dozen eggs.             | 6
two dozen                      | 24
two and a half                 | 2.5
two and a half million         | 2500000
half a million                 | 500000
None.                          | 0
There are none.                | 0
none or seven                  | 0 7
six or seven                   | 6 7
one two three                  | 1 2 3
nineteen ninety-five           | 19 95
one thousand, two              | 1000 2
twenty-odd                     |
one-way                        |
two-thirds                     |
a thousandth                   |
not twenty-one                 |
more than a dozen              |
7 of a dozen                   | 7
十二                           | 12
共有二十一个。                 | 21
一百零五                       | 105
三万五千                       | 35000
一亿两千万                     | 120000000
二〇二五                       | 2025
一百五                         |
一万五                         |
一亿二千                       | 100002000
两只狗                         | 2
第一                           |
统一                           |
三明治                         |
2 + 1 = 3                      | 3
There are 2 + 1 + 4 = 7 cups   | 7
12 / 4 = 3.0                   | 3
5 - 7 = -2                     | -2
two + one = three              | 3
2 + 1 = 3 or 3 + 4 = 7         | 3 7
2 + 1                          | 2 1
1 = 2 = 3                      | 1 2 3
not 2 + 1 = 3                  |
50k                            | 50000
50K people                     | 50000
$2B                            | 2000000000
5M                             | 5000000
5m                             | 5
1.5bn or 3 BN                  | 1500000000 3
300 K                          | 300
50kg, 5MB and 4KB              | 50 5 4
""")


@pytest.mark.parametrize("text, numbers", NUMBERS)
def test_numbers_in_a_text(text, numbers):
    assert read_numbers(text) == set(map(Fraction, numbers.split()))


@pytest.mark.parametrize("rule", ["exact", "boxed", "answer", "verdict"])
def test_an_empty_reference_is_refused(rule):
    """No response could match it. The door is that of a function's attribute `check`."""
    check = load_source(rule).check
    empty = ["", " ", "\u3000"] + ["$$"] * (rule != "exact")
    problems = check(empty, {})
    assert ["an empty answer" in problem for problem in problems] == [True] * len(empty)
    assert check(["0", "{}", "x" * 600], {}) == [""] * 3


def test_exact_match_is_text_only():
    assert same_words("  Two\n Words ", "two words")
    assert same_words("−5 it’s", "-5 it's")
    assert not same_words("2.0", "2")
    assert answers_equal("x" * 600, "X" * 600)
    # beyond the cap
    assert not answers_equal("1" * 600 + ".0", "1" * 600)


@pytest.mark.slow
def test_fuzz_never_raises_and_stays_fast():
    pieces = list("0123456789.,+-*/^(){}[]\\%$=_ e\n٤²π√½°٫－\ud800\x00")
    pieces += (
        r"\frac|\sqrt|\boxed{|\text{|<answer>|</answer>|<think>|</think>|\left|\pi|\{|\}".split("|")
    )
    pieces += ["9" * 299, *"nan|inf|10**| cm|(B)|x=|1 1/2|million|*10^".split("|")]
    rng = random.Random(0)
    start = time.process_time()
    for _ in range(4000):
        left, right = ("".join(rng.choices(pieces, k=rng.randrange(30))) for _ in range(2))
        for rule in ("boxed", "answer"):
            extract_answer(left, rule), format_score(right, rule)
        answers_equal(left, right)
        assert answers_equal("7" + left, "7" + left)
    assert time.process_time() - start < 60


REPEATED = r"(|{|((1,|9^(9^|\frac|\frac{1}{2}|1, 2, |\boxed{|\boxed |<answer>|<think>|\text{|1 1/2 |\| |(1,2),|9|x=|}|1/"
REPEATED += r"|{\pi}|\boxed{{}|1,000|**a|[["


@pytest.mark.parametrize("unit", REPEATED.split("|"))
def test_repeated_pieces_take_bounded_time(unit):
    start = time.process_time()
    # the longest answer that is parsed, and a response that is only scanned
    for length in (500, 200_000):
        text = (unit * length)[:length]
        answers_equal(text, text + "1")
        answers_equal(text[:500] + "1", text[:500] + "2")
        for rule in ("boxed", "answer"):
            extract_answer(text, rule), format_score("<think></think>" + text, rule)
    assert time.process_time() - start < 20


# ------------------------------------------------------------------------------------------------ rules
def test_rules_score_the_response_only():
    prompts = [r"Answer as \boxed{4}. <think></think> <answer>4</answer>"] * 3
    responses = [r"<think>2 + 2</think> \boxed{4}", "four", r"\boxed{5}"]
    arguments = (prompts, responses, ["4"] * 3, [None] * 3, [[]] * 3)
    assert load_source("boxed").function(*arguments) == dict(
        reward=[1, 0, 0], accuracy=[1, 0, 0], format=[1, 0, 0], parsed=[1, 0, 1]
    )
    assert load_source("answer").function(*arguments)["reward"] == [0, 0, 0]
    assert load_source("exact").function(
        prompts, ["4", " 4\n", "4.0"], ["4"] * 3, [None] * 3, [[]] * 3
    )["reward"] == [1, 1, 0]


# ------------------------------------------------------------------------------------------------
# user functions
def test_load_user_function(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    x: int = 1\n"
        "three = 3\ndef length(prompts, responses, *rest):\n    return [len(r) for r in responses]\n"
        "def another(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    assert score(load_source(f"{path}:length").function) == ([10.0] * 4, {})
    with user_error(r"must take \(prompts, .*, images\), and .*: too many positional arguments"):
        # before a model is loaded
        load_source(f"{path}:another")
    with user_error(r"no.py:f: the file /.*/no.py is missing"):
        load_source(f"{tmp_path}/no.py:f")
    with user_error("missing a required argument: 'other'"):
        (path := tmp_path / "of_six.py").write_text(
            "def six(prompts, responses, references, labels, images, other):\n    return []\n"
        )
        load_source(f"{path}:six")
    (tmp_path / "text.txt").write_text("")
    (path := tmp_path / "asynchronous.py").write_text(
        "async def waits(prompts, responses, *rest):\n    return [1.0] * len(prompts)\n"
        "async def yields(prompts, responses, *rest):\n    yield 1.0\n"
        "class Called:\n    __call__ = waits\ncalled = Called()\n"
        "import functools\npart = functools.partial(waits)\n"
        "def checked(prompts, responses, *rest):\n    return [1.0] * len(prompts)\n"
        "checked.check = waits\n"  # which would find nothing wrong in any row
    )
    for name in ("waits", "yields", "called", "part", "checked"):
        with user_error("is async, and nothing awaits it: use def"):
            load_source(f"{path}:{name}")
    for spec in (
        f"{path}:nothing",
        f"{path}:three",
        str(path),
        f"{tmp_path}/no.py:f",
        "unknown",
        "",
        ":f",
        "grm",
        "rm:",
        f"{tmp_path}/text.txt:f",
    ):
        with user_error("--reward"):
            load_source(spec)
    for source, message in (  # what has failed is read again
        ("import no_such_module", "ModuleNotFoundError: No"),
        ("f(", "Syntax"),
        ("1 / 0", "Zero"),
        ("import sys\nsys.exit(0)", r"SystemExit: .*\(broken.py:2\b"),
    ):
        (tmp_path / "broken.py").write_text(source)
        with user_error(f"broken.py raised {message}") as info:
            load_source(f"{tmp_path}/broken.py:f")
        assert info.value.__cause__ is not None


THEIRS = {
    "TRL": "def ours(completions, prompts, answer, **_):\n"
    "    return [float(a == b) + len(p) for p, a, b in zip(prompts, completions, answer)]\n",
    "verl": "def ours(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return float(solution_str == ground_truth) + len(data_source) + extra_info['more']\n",
}


@pytest.mark.parametrize("system, earned", [("TRL", [3.0, 2.0]), ("verl", [11.0, 10.0])])
def test_a_function_for_another_system_gets_three_lines_that_call_it(tmp_path, system, earned):
    (file := tmp_path / "theirs.py").write_text(THEIRS[system])
    with user_error(f"too many positional arguments\nIt is written for {system}; in ") as info:
        load_source(f"{file}:ours")
    hint = str(info.value).partition(" add and name\n")[2]
    assert len(hint.splitlines()) == 3
    (wrapped := tmp_path / "wrapped.py").write_text(f"{THEIRS[system]}\n{hint}\n")
    samples = reward_samples(
        ["a", "b"], ["a", "a"], ["??", "??"], ["l"] * 2, rows=[{"answer": "a", "more": 9}] * 2
    )
    columns = score_samples(load_source(f"{wrapped}:ours_here"), samples, RewardArgs())
    assert columns["reward"] == earned


def test_the_lines_of_a_failing_function_are_told(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def parse(text):\n    return int(text)\n\n\ndef f(prompts, responses, *_):\n"
        "    return [parse(r) for r in responses]\n"
    )
    with user_error(r"it raised ValueError: .* \(mine.py:2 < mine.py:6"):
        score(load_source(f"{tmp_path}/mine.py:f").function)


def test_the_readme_reward_pays_no_wrong_answer(tmp_path):
    """Whatever its length: the empty answer earns nothing, and a right one more than any wrong one."""
    program = tmp_path / "my_reward.py"
    program.write_text(readme_reward())
    source = load_source(f"{program}:score")
    right, wrong = ["3", "There are 3.", "x" * 5000 + " 3"], ["", "4", "13", "3 or 4", "no"]
    answers = right + wrong
    earned = score_samples(source, reward_samples(answers, ["3"] * 8), RewardArgs())
    assert earned["accuracy"] == [1.0] * 3 + [0.0] * 5
    assert earned["reward"][3:] == [0.0] * 5
    assert 1.11 > earned["reward"][0] > earned["reward"][1] > earned["reward"][2] > 1.0


@pytest.mark.parametrize(
    "convert", [tuple, np.array, torch.tensor, lambda v: [np.float32(x) for x in v]]
)
def test_result_types(convert):
    rewards, components = score(lambda p, r, *_: convert([float(x[-1]) for x in r]))
    assert rewards == [0, 1, 2, 3]
    assert components == {}
    assert all(type(r) is float for r in rewards)


@pytest.mark.parametrize(
    "parameters, takes",
    [
        ("prompts, responses, references, labels, images, rows", True),
        ("a, b, c, d, e, rows=None", True),
        ("prompts, responses, *rest, rows", True),
        ("prompts, responses, *rest, **more", False),
    ],
)
def test_a_function_that_wants_rows_gets_them(tmp_path, parameters, takes):
    """Every sample its own, whatever chunk it is scored in; other functions are called with five
    arguments."""
    path = tmp_path / "mine.py"
    path.write_text(
        f"def f({parameters}):\n    first, got = next(iter(locals().values())), locals().get('rows')\n"
        "    if isinstance(got, list) and got and isinstance(got[0], dict):\n"
        "        return [float(row['worth']) for row in got]\n"
        "    return [-1.0] * len(first)\n"
    )
    source = load_source(f"{path}:f")
    assert source.keywords == (["rows"] if takes else [])
    rows = [{"worth": i, "more": [i]} for i in range(7)]
    expected = [float(i) for i in range(7)] if takes else [-1.0] * 7
    assert score(source.function, n=7, rows=rows, keywords=source.keywords)[0] == expected


def test_what_a_function_may_ask_for(tmp_path):
    """By the names of its parameters, in any order; its own parameters have defaults."""
    (tmp_path / "mine.py").write_text(
        "def f(prompts, responses, references, labels, images,\n"
        "      step, truncated, lengths, groups, weight=2.0):\n"
        "    reward = [weight * step] * len(responses)\n"
        "    return {'reward': reward, 'length': lengths, 'cut': truncated, 'group': groups}\n"
        "def unknown(prompts, responses, references, labels, images, entropy, step):\n    return []\n"
    )
    source = load_source(f"{tmp_path}/mine.py:f")
    columns = score_samples(
        source, reward_samples(["a", "bcd"], groups=[5, 5], step=7), RewardArgs()
    )
    assert columns == {
        "reward": [14.0, 14.0],
        "length": [1.0, 3.0],
        "cut": [0.0, 0.0],
        "group": [5.0, 5.0],
    }
    with user_error(
        r"must take \(prompts, responses, references, labels, images\), and may ask for rows, "
        r"lengths, truncated, groups, "
        r"places, regions, "
        "step: .*'entropy'"
    ):
        load_source(f"{tmp_path}/mine.py:unknown")


@pytest.mark.parametrize(
    "spans, message",
    [
        ([[], []], r"spans must be lists of \(end, reward\)"),
        ([[], [], [], []], r"spans must be lists of \(end, reward\)"),
        ([[1.0], [], []], r"spans must be lists of \(end, reward\)"),
        (1.0, r"spans must be lists of \(end, reward\)"),
        ([[("a", 1.0)], [], []], r"spans must be lists of \(end, reward\)"),
        *(
            ([[(end, 1.0)], [], []], "spans .* with ends in the response")
            for end in (0, -1, 99, float("inf"), float("nan"))
        ),
    ],
)
def test_spans_of_another_form_are_refused(spans, message):
    with user_error(message):
        score(lambda *_: {"spans": spans}, 3)


def test_a_function_may_empty_its_lists(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def empty(prompts, responses, references, labels, images, rows):\n"
        "    answer = [1.0] * (4 * bool(responses[0][-1] == '0'))\n"
        "    for column in (prompts, responses, references, labels, images, rows):\n"
        "        column.clear()\n"
        "    return answer\n"
    )
    source = load_source(f"{tmp_path}/mine.py:empty")
    assert score_samples(source, reward_samples(["0"] * 4), RewardArgs())["reward"] == [1.0] * 4
    with user_error("(?s)list of 4 numbers, got list of 0.*response: '1'"):
        score_samples(source, reward_samples(["1"] * 4), RewardArgs())


def test_order_and_components():
    def f(prompts, responses, references, labels, images):
        index = [int(p[-1]) for p in prompts]
        assert all(
            [int(text[-1]) for text in column] == index
            for column in (responses, references, labels)
        )
        return {"a": index, "b": [i * 10 for i in index]}

    rewards, components = score(f, n=7)
    assert rewards == [11.0 * i for i in range(7)]  # no "reward": the sum of all components
    assert components == {"a": [float(i) for i in range(7)], "b": [10.0 * i for i in range(7)]}
    assert score(lambda p, *_: {"reward": [5] * len(p), "a": [1] * len(p), 2: [0] * len(p)}) == (
        [5.0] * 4,
        {"a": [1.0] * 4, "2": [0.0] * 4},
    )


@pytest.mark.parametrize("nothing", [None, float("nan")])
def test_a_component_that_does_not_apply_to_a_sample_is_left_out(nothing):
    """Of its mean and of the sum; with a reward of its own, it changes nothing."""
    boxes, words = [1.0, nothing, 0.5, nothing], [2.0, 3.0, nothing, 4.0]
    rewards, components = score(lambda *_: {"box": boxes, "words": words})
    assert rewards == [3.0, 3.0, 0.5, 4.0]
    assert components["box"] == pytest.approx([1.0, math.nan, 0.5, math.nan], nan_ok=True)
    rewards, _ = score(lambda *_: {"reward": [1.0] * 4, "box": np.array(boxes, dtype=float)})
    assert rewards == [1.0] * 4
    with user_error("(?s)no component applies, so there is no reward.*response 1"):
        score(lambda *_: {"box": boxes})
    with user_error("(?s)box is inf, not a finite number.*response 0"):
        score(lambda *_: {"reward": [1.0] * 4, "box": [math.inf] * 4})


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_number_that_is_not_finite_shows_its_sample(bad):
    with user_error(f"(?s)my.py:f.*reward is {bad}, not a finite number.*response 3"):
        score(lambda p, *_: [bad if x[-1] == "3" else 1.0 for x in p])


NOT_NUMBERS = "must be a list of 4 numbers, got list of 4"


@pytest.mark.parametrize(
    "bad, problem",
    [(None, NOT_NUMBERS), ([1.0, 2.0], NOT_NUMBERS), (10**400, "holds too large a number")],
    ids=["none", "list", "large"],
)
def test_what_is_no_number_shows_a_sample_of_its_call(bad, problem):
    with user_error(f"(?s)my.py:f: reward {problem}.*response 0"):
        score(lambda p, *_: [bad if x[-1] == "3" else 1.0 for x in p])


def test_a_function_of_ours_that_raises_keeps_its_traceback_and_names_its_first_sample():
    """One that is called in the trainer, of a fork say; it is not called again."""
    calls = []

    def f(prompts, *_):
        calls.append(len(prompts))
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone") as error:
        score(f)
    (note,) = error.value.__notes__
    assert "my.py:f: it raised this" in note
    assert "response 0" in note
    assert calls == [4]


def test_timeout_leaves_only_daemon_threads():
    release, before = threading.Event(), set(threading.enumerate())

    def f(prompts, *_):
        release.wait(20)
        return [0.0] * len(prompts)

    start = time.monotonic()
    with user_error(r"(?s)took longer than 0.2 s \(--reward_timeout\).*response 0"):
        score(f, timeout=0.2)
    assert time.monotonic() - start < 5
    # the process can exit
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    release.set()


def calls_of(*functions) -> tuple[sources.RewardMix, list]:
    """Sources f0, f1, ... under a limit of a second, and their calls about four samples."""
    mix = sources.RewardMix([], {}, RewardArgs(reward_timeout=1.0))
    calls = []
    for k, function in enumerate(functions):
        source = Source(f"my.py:f{k}", f"f{k}", "function", function=function)
        samples = reward_samples(["a"] * 4)
        call = sources.in_thread(sources.call_source, source, samples)
        calls.append(sources.CallOfSource(source, [0, 1, 2, 3], samples, call))
        mix.sources.append(source)
    return mix, calls


def test_all_sources_are_waited_for_at_once():
    """Under one limit: three of 0.7 s each end within it, and of two that hang the wait is not twice as
    long."""

    def slow(prompts, *_):
        time.sleep(0.7)
        return [1.0] * len(prompts)

    mix, calls = calls_of(slow, slow, slow)
    scored = mix.finish(calls, None, None).values()
    assert [scores.columns["reward"].tolist() for scores in scored] == [[1.0] * 4] * 3

    release = threading.Event()

    def hangs(*_):
        release.wait(20)

    mix, calls = calls_of(hangs, hangs)
    start = time.monotonic()
    with user_error("my.py:f0: took longer than 1 s"):
        mix.finish(calls, None, None)
    assert time.monotonic() - start < 1.9
    release.set()


def test_what_a_source_raises_is_told_though_one_before_it_still_runs():
    release = threading.Event()

    def hangs(*_):
        release.wait(20)

    mix, calls = calls_of(hangs, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as info:  # ours, with its traceback
        mix.finish(calls, None, None)
    assert "my.py:f1: it raised this" in info.value.__notes__[0]
    release.set()


def test_long_texts_are_cut_in_the_message():
    long = "x" * 100_000 + "the end"
    source = Source("f", "f", "function", function=lambda *_: [])
    with pytest.raises(UserError) as info:
        score_samples(source, one_sample(long, long, long), RewardArgs())
    assert len(str(info.value)) < 2000
    assert str(info.value).count("the end") == 3


@pytest.mark.parametrize(
    "result, message",
    [
        ([1.0] * 5, r"numbers, got list of 5 \(float\);"),
        ([1, None, [2.0], 3], r"got list of 4 \(NoneType, int, list\);"),
        (torch.zeros(4, 2), r"got Tensor of shape \(4, 2\);"),
        (np.zeros(()), r"got ndarray of shape \(\);"),
        (np.array([1.0, None, 2, 3], dtype=object), r"got ndarray of 4 \(NoneType, float, int\);"),
        (torch.zeros(5), r"got Tensor of 5 \(float\);"),
        (None, "got NoneType;"),
        (1.0, "got float;"),
        ((x for x in range(4)), "got generator;"),
        ({}, "got dict;"),
        ({"a": [1.0] * 4, "b": [1.0]}, "b must be"),
    ],
)
def test_wrong_shape(result, message):
    """In one line, whatever it holds."""
    with user_error(f"{message}.*(?s:.*response 0)"):
        score(lambda *_: result)


@pytest.mark.parametrize(
    "components, rate",
    [
        ([{}] * 4, None),
        ([{"parsed": 1.0}] * 4, None),
        ([{"accuracy": value} for value in (0, 1, 0.9, 0)], 0.5),
        ([{"mine/accuracy": value} for value in (1, 1, 0, 1)], 1.0),
    ],
)
def test_where_nobody_says_what_is_right_a_line_says_how(capsys, components, rate):
    """Two samples of each of two prompts; a list of rewards has no components."""
    records = [
        {
            "index": i // 2,
            "reward": 2.0,
            "response_length": 3,
            "truncated": False,
            "components": parts,
        }
        for i, parts in enumerate(components)
    ]
    metrics = summarise_samples(records, 2)
    assert [value for name, value in metrics.items() if "pass@2" in name] == (
        [] if rate is None else [rate]
    )
    text = capsys.readouterr().out
    assert ('{"reward": [...], "accuracy": [...]}' in text) == (rate is None)
    summarise_samples(records, 1)
    assert capsys.readouterr().out == ""


def test_metrics_of_each_task():
    """By hand: a task has its own means and its own pass@k, beside those of all."""
    values = {"charts": [[1, 0], [0, 0]], "maps": [[1, 1]]}
    records = []
    for task, prompts in values.items():
        for rewards in prompts:
            index = len(records) // 2
            records += [
                {
                    "index": index,
                    "task": task,
                    "reward": reward + 0.5,
                    "response_length": 4,
                    "truncated": False,
                    "components": {"accuracy": float(reward)},
                }
                for reward in rewards
            ]
    metrics = summarise_samples(records, 2)
    expected = {"": (0.5, 1.0, 2 / 3), "charts/": (0.25, 0.75, 0.5), "maps/": (1.0, 1.5, 1.0)}
    for task, means in expected.items():
        names = ("accuracy_reward_mean", "reward_mean", "pass@2")
        assert tuple(metrics[f"eval/{task}{name}"] for name in names) == pytest.approx(means)
    words = accuracy_columns(metrics)
    assert words.keys() == {"accuracy", "charts/accuracy", "maps/accuracy"}
    rows = [SimpleNamespace(task=task) for task in ("charts", "maps", "")]
    assert accuracy_columns(metrics, rows).keys() == {"accuracy"}


@pytest.mark.parametrize(
    "labels, tasks",
    [
        ([["a", "b"], ["a"]], [["a", "b"], ["a"]]),  # labels tell it
        ([["a", "a"], ["a"]], [["x", "x"], ["y"]]),  # files do
        ([[None, None], ["a"]], [["x", "x"], ["a"]]),  # both
        ([["a", "a"]], [["", ""]]),  # nothing does
        ([[f"{k}" for k in range(50)]], [[f"{k}" for k in range(50)]]),
        ([[f"{k}" for k in range(51)]], [[""] * 51]),  # each row is its own
        ([[f"{k}" for k in range(51)], ["a"]], [["x"] * 51, ["y"]]),
    ],
)
def test_tasks_are_told_apart_by_labels_or_files(labels, tasks):
    sets = [[replace(row_of("1"), label=label) for label in part] for part in labels]
    named = name_tasks(sets, ["d/x.jsonl", "d/y.jsonl"][: len(sets)])
    assert [[row.task for row in part] for part in named] == tasks
    if len(sets) == 2 and labels[0][0] == labels[1][0]:
        named = name_tasks(sets, ["d/x.jsonl", "e/x.jsonl"])
        assert {row.task for part in named for row in part} in ({"d/x", "e/x"}, {"a", "b"})


def test_metrics_of_a_steps_tasks():
    """NaN where a sample's source has no such component."""
    prompts = [SimpleNamespace(task=task) for task in ("a", "b")]
    batch = SimpleNamespace(prompts=prompts, prompt_index=torch.tensor([0, 0, 1, 1]))
    columns = {
        "reward": torch.tensor([1.0, 0, 1, 1]),
        "x_reward": torch.tensor([0.5, 1] + [math.nan] * 2),
    }
    metrics = task_metrics(batch, columns)
    assert {name: float(value) for name, value in metrics.items()} == {
        "rollout/a/reward": 0.5,
        "rollout/a/x_reward": 0.75,
        "rollout/b/reward": 1.0,
    }


# ------------------------------------------------------------------------------------------------ truths
def row_of(reference: str | None, source: str = "x.jsonl:7") -> Prompt:
    empty = torch.zeros(0, dtype=torch.int64)
    return Prompt([], "", (), (), empty, 0, reference=reference, source=source)


CHECKED = """
def score(prompts, responses, references, labels, images):
    return [0.0] * len(responses)

def check(reference):
    if reference is None:
        return
    if reference == "bug":
        raise KeyError("bug")
    if not reference.isdigit():
        raise ValueError(f"{reference!r} is no number")

score.check = check

class Score:
    def __call__(self, *samples):
        return score(*samples)
    def check(self, reference, row):
        row["sizes"].append(1)
        check(reference)

by_object = Score()

def clicks(prompts, responses, references, labels, images, regions):
    return [0.0] * len(responses)

def check_clicks(reference, places, regions):
    if regions is None or places[regions.image].file[0] < 100:
        raise ValueError(f"no points in a wide image: {places}")

clicks.check = check_clicks
"""


def test_truths_pass_the_check_of_their_reward_before_a_run(tmp_path):
    """Of every row, by the source that will score it; a row may have none for a function."""
    path = tmp_path / "mine.py"
    path.write_text(CHECKED)
    good, none, bad = row_of("7"), row_of(None), row_of("seven", "x.jsonl:9")
    reward = sources.load_rewards(RewardArgs(reward=f"{path}:score"))
    reward.check_rows([good, none])
    with user_error(
        r"1 of 3 rows are bad\n  x.jsonl:9: 'seven' is no number, which score compares"
    ):
        reward.check_rows([good, none, bad])
    with user_error(
        r"x.jsonl:9: the answer 'bug' raises KeyError: 'bug' \(mine.py:9\), which score"
    ):
        reward.check_rows([row_of("bug", "x.jsonl:9")])
    sources.load_rewards(RewardArgs(reward="boxed")).check_rows([bad])
    with user_error("x.jsonl:7: an empty answer, ' ', which boxed compares with"):
        sources.load_rewards(RewardArgs(reward="boxed")).check_rows([good, row_of(" ")])


def test_the_check_of_an_object_gets_a_row_of_its_own(tmp_path):
    (tmp_path / "mine.py").write_text(CHECKED)
    source = load_source(f"{tmp_path / 'mine.py'}:by_object")
    good, bad = (replace(row_of(text), row={"sizes": [2]}) for text in ("7", "seven"))
    assert sources.lacks_of(source, [good, bad]) == ["", "'seven' is no number"]
    assert good.row == bad.row == {"sizes": [2]}


def test_a_check_may_ask_for_regions_and_places(tmp_path):
    (tmp_path / "mine.py").write_text(CHECKED)
    source = load_source(f"{tmp_path / 'mine.py'}:clicks")
    wide, narrow = Place((200, 50), None, "1"), Place((20, 50), None, "1")
    good, bad = (
        replace(row_of(None), places=(None, place), regions=Regions((), ((1, 2),), (), place, 1))
        for place in (wide, narrow)
    )
    lacks = sources.lacks_of(source, [good, bad, row_of("7")])
    assert lacks == [
        "",
        f"no points in a wide image: [None, {narrow}]",
        "no points in a wide image: []",
    ]


def test_truths_of_held_out_rows_are_checked_too():
    args = ppo.parse_args(
        words(f"--model m --data d.jsonl --reward {ROOT}/launch/reward_vision.py:count")
    )
    held_out = [row_of("7"), row_of("several", "eval.jsonl:2")]
    rows = ppo.Rows(None, None, [[row_of("seven")]], held_out, None)
    with user_error(r"1 of 3 rows are bad\n  eval.jsonl:2: the answer 'several', no number"):
        ppo.check_rows(args, rows, sources.load_rewards(args), None)


def test_rows_without_an_answer_are_told_and_named(tmp_path, capsys):
    """At the start how many there are, for a function; and which one, where it fails."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(prompts, responses, references, *_):\n    return [len(r) for r in references]\n"
    )
    reward = sources.load_rewards(RewardArgs(reward=f"{path}:score"))
    reward.check_rows([row_of("7"), row_of("8")])
    assert "no answer" not in capsys.readouterr().out
    reward.check_rows([row_of("7"), row_of(None)])
    assert "1 of 2 rows have no answer; the function gets None" in capsys.readouterr().out
    (source,) = reward.sources
    with user_error(r"it raised TypeError: .*\n  row: rows.jsonl:2\n"):
        score_samples(source, reward_samples(["a", "b"], ["7", None]), RewardArgs())


def test_a_default_reward_is_said(capsys):
    rows = SimpleNamespace(train=[], held_out=[], all=[])
    for flags, is_told in (("", True), ("--reward answer", False)):
        args = ppo.parse_args(words(f"--model m --data d.jsonl {flags}"))
        ppo.check_rows(args, rows, sources.load_rewards(args), None)
        assert ("--reward boxed (the default)" in capsys.readouterr().out) == is_told


def test_a_check_that_cannot_take_none_names_the_rows_without_an_answer(tmp_path):
    (path := tmp_path / "mine.py").write_text(
        "def score(prompts, responses, references, *_):\n    return [float(r) for r in references]\n"
        "score.check = float\n"
    )
    reward = sources.load_rewards(RewardArgs(reward=f"{path}:score"))
    reward.check_rows([row_of("7"), row_of("8")])
    with user_error("1 of 2 rows are bad\n  .*: no reference answer: None raises TypeError: float"):
        reward.check_rows([row_of("7"), row_of(None)])
