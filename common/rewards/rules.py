r"""Rules that score a response by its text.

    with_opened_thought   the response, with a thought that its prompt opens
    after_thought         what the response says after its thoughts
    extract_answer        the last `\boxed{...}`, or <answer>...</answer>
    boxed_texts           all `\boxed{...}`
    answers_equal         text, choice letters, numbers, fractions, ordered lists
    read_letter_set       a reference that is several letters
    plain_text, words_of  a text without differences that nobody sees; also without case and spaces
    read_letters          the letters of options that a text names
    read_numbers          the numbers in a text
    read_places           the numbers of the boxes and points in a text
    rule_reward           a rule as a reward function
    check_reference       refuses a reference answer that no response can match

For roots, units and expressions there is launch/reward_math.py. launch/judges/judge_table.py and
launch/data/convert.py read this file without the rest of common/, which needs torch.
"""

import re
import unicodedata
from collections.abc import Collection
from fractions import Fraction
from statistics import multimode

from common.ground.files import UserError
from common.rewards.numerals import in_digits

Columns = dict[str, list[float]]  # a number for each sample: "reward" and its components
# not the possessive *+, which finds nothing here before Python 3.11.5
ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
RULES = ("exact", "boxed", "answer", "verdict")
# How models that have tokens of their own for it write a thought: Ministral 3, Gemma 4.
BEGINS_THOUGHT, ENDS_THOUGHT = r"\[THINK\]|<\|channel>thought", r"\[/THINK\]|<channel\|>"
ACCURACY_WEIGHT, FORM_WEIGHT = 0.9, 0.1  # weights in rules that also reward the form
RAISED, LOWERED = "[²³¹⁰-ⁿ]+", "[₀-ₜ]+"  # 3² is 3^2, not 32
BRACES = re.compile(r"\\boxed\s*\{|\\(?:[{}]|\\(?!boxed))|[{}]")
MAX_ANSWER = 512  # characters; longer answers compare as text, which bounds the work of patterns
# What only looks different: dashes and the minus, quotes, the stroke of a fraction, the full stop.
ALIKE = str.maketrans("‐‑‒–—―−“”„«»「」『』《》‘’⁄。", "-------" + 11 * '"' + "''/.")
# A letter, digit or _ of a script that sets words apart: Chinese, Japanese and Korean write 答案是B.
IN_WORD = r"[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
# What stands before an answer: "The answer is", "Answer:", "答案是".
LEAD = (
    r"(?:(?:the |my )?(?:final |correct |right |best )?(?:answer|ans|option|choice)(?: is\b:?|:)"
    r"|(?:option|choice)\b|[故应]?(?:正确|最终)?(?:答案[是为选]?|选[项择]?[是为]?):?) ?"
)
# b)   B, but neither "I" nor the article of "A dog"
BEHIND_LETTERS = "is|was|and|n?or|but|not|vs|versus|with|then|plus|as|rather|instead|because|since"
BEHIND_LETTERS += "|may|maybe|perhaps|und|oder|et|ou"
ARTICLE = rf"(?! (?!(?i:{BEHIND_LETTERS})\b)[A-Za-z]{{2}})"  # behind what is none
LETTER = re.compile(
    rf"(?<!')(?<!{IN_WORD})"
    rf"(?:[A-Za-z](?=\))|(?:A{ARTICLE}|[B-HJ-Z]|I(?=[.:]?\s*\Z))(?!')(?!{IN_WORD}))"
)
# Texts in which small letters are as good: b   (b)   b. dog   Answer: b or c
SMALL_LETTER = re.compile(
    rf"(?i)^\W*[a-z]\W*\Z|^\s*[a-z](?=[.:]\s)|{LEAD}\(?[a-z]{ARTICLE}(?!')(?!{IN_WORD})"
)
# What makes a letter in brackets a variable: (a)+b   (x)(x+1)   (n)!
OPERATOR = r"[+*/^=<>!×·÷±]|-[a-z(]|\\(?:cdot|times|div|pm|[lgn]eq)(?![a-z])|\(\1\b"
CHOICE = re.compile(rf"(?s)\(?([a-z])(?:[.:]|\)(?!{OPERATOR})).+")  # spelled: b.dog   (b)-3
# What takes back the letter, number or region behind it: not B   isn't 7   more than 7   不是B
NOT = (
    r"(?i:(?:\b(?:not|never|neither|nor|cannot|than|over|under|at (?:least|most)|up to|nicht|pas|no es)\b"
    r"|n't\b|[≤≥不非]|至少|超过)"
    r"(?:\W|[是选止足项]|\b(?:the|an?|be|it|is|at|equal|to|option|choice|answer|letter)\b){0,9})"
)
# ... or the letter before it: B is wrong   B不对
WRONG = r"(?i:\)?\s+(?:is|was)(?:n't\b|\s+(?:not|wrong|incorrect|false)\b)|选?项?(?:不对|不正确|不是|错|ではない|[가이] 아))"
DENIED = re.compile(rf"{NOT}{LETTER.pattern}|{LETTER.pattern}{WRONG}")
NUMBER = r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
EXPONENT = r"(?:e[+-]?\d{1,3})?"  # as JSON writes 1e-05; a larger one would fill the memory
QUOTIENT = re.compile(
    rf"([+-]?)(?:(\d+) (?=\d+/))?({NUMBER}{EXPONENT})(?:/({NUMBER}{EXPONENT}))?", re.ASCII
)
# in a text, but not the power of a unit: 50 cm^2
IN_TEXT = re.compile(rf"(?<![\w.])(?<![a-z}}]\^)[+-]?{NUMBER}{EXPONENT}", re.ASCII)
NONE = re.compile(r"\bnone\b")
LONGEST = 32  # characters of a number in a text; what is longer is none
ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12, "万": 4, "亿": 8}
MIXED = (  # numbers that are partly words: minus 3   2.5 million
    (r"(?:\b(?:minus|negative) |负)(?=[\d.])", "-"),
    (
        rf"(?<![\w./,])({NUMBER}) ?({'|'.join(ZEROS)})s?(?![a-z])",  # not 5 millionaires
        lambda match: _in_full(match[1], ZEROS[match[2]]),
    ),
)
# 50k   $2B   1.5bn: letters that touch a number are its scale, and those apart a unit: 300 K   300\text{K}
LETTER_SCALES = {"k": 3, "M": 6, "B": 9, "bn": 9}
TOUCHING = re.compile(rf"(?<![\w.,])({NUMBER})([kKMB]|(?i:bn))(?!\w)", re.ASCII)
APART = re.compile(r"\d(?:[\s~{}]|\\[a-z]+|\\[,;: !])+([kKMB])(?!\w)", re.ASCII)
SMALL_B = re.compile(r"\db(?!\w)", re.ASCII)  # no scale, so 12B beside it is a seat, too: 12b
# A calculation before its result: 2 + 1 = 3
SUM = re.compile(
    rf"(?<![\w.)+*/-])[+-]?{NUMBER}(?:\s*(?:[-+*/×÷·x]|\\times|\\cdot|\\div)\s*{NUMBER})+"
    r"(\s*=\s*(?=[+-]?[\d.]))?",
    re.ASCII,
)
# Several choices, each a letter of its own: A, C   (A) and (C)   A、C
ONE_LETTER = r"(?:[A-J]|\([A-J]\))"
LETTER_SET = re.compile(
    rf"{ONE_LETTER}(?:(?:\s*[,;、&]\s*(?:and\s+)?|\s+and\s+|\s*[和与]\s*){ONE_LETTER})+"
)
# Two or four numbers in brackets. As Qwen2-VL writes the corners of a box, each has its own.
# Axes may be named: click(x=10, y=20)   {"x": 10, "y": 20}
DECIMAL = r"[-+]?(?:\d{1,25}\.?\d{0,25}|\.\d{1,25})(?:[eE][-+]?\d{1,2})?"
COORDINATE = rf"""\s*(?:["']?[xy][12]?["']?\s*[=:]\s*)?{DECIMAL}\s*"""
NAMED_NUMBER = re.compile(rf"""([xy])[12]?["']?\s*[=:]\s*({DECIMAL})""")
PLACE = rf"{COORDINATE},{COORDINATE}(?:(?:,|\)\s*,\s*\(){COORDINATE},{COORDINATE})?"
REGION = rf"[\[({{<]({PLACE})[\])}}>]"
Y_FIRST = r"""["']box_2d["']\s*:\s*"""  # Gemini's
# Inside tags of these names, numbers need neither brackets nor commas: <point>170 103</point>
# <points x1="170" y1="103" x2="20" y2="30" alt="cups">   <box>10 20 30 40</box>
TAG = re.compile(r"<(points?|b?box)\b([^<>]*)>([^<]*)")
AXIS = re.compile(rf"""\b([xy])(\d*)\s*=\s*["']?({DECIMAL})(?![\d.])""")
NAMED = re.compile(r"""\b(?:alt|label|name)\s*=\s*(?:"([^"{}]*)"|'([^'{}]*)')""")
BARE = re.compile(rf"\s*{DECIMAL}(?:(?:\s*[,;]\s*|\s+){DECIMAL})*\s*")
# {"bbox_2d": [1, 2, 3, 4], "label": "cup"}; <ref>cup</ref><box>[[1, 2, 3, 4]]; or a region alone
ITEM = re.compile(
    rf"\{{[^{{}}]*\}}|<(?:ref|\|object_ref_start\|)>[^<]*<[^<]*<[^<]*|(?:{Y_FIRST})?{REGION}"
)
LABEL = re.compile(
    r"""["'](?:label|name|ref|category)["']\s*:\s*(?:"([^"]*)"|'([^']*)')"""
    r"|<(?:ref|\|object_ref_start\|)>([^<]*)"
)
SYMBOLS = {"π": r"\pi", "∞": r"\infty", "≤": r"\leq", "≥": r"\geq", "≠": r"\neq"}
IT = "(?:it|there|this|that|he|she|they|these|those|you|we|i)"
IS = "(?:is|are|am|was|were|do|does|did|has|have|had|can|could|will|would|should|must)"
WITHOUT_LEAD = (rf"^ ?{LEAD}(?=.)", "")
OF_WORDS = (  # the spellings of a text without LaTeX, emphasis and brackets
    (r"(?<=\d) ?per ?cents?\b", "%"),
    (r"(?<=\d) ?degrees?\b", "°"),
    *MIXED,
    (rf"^ ?(yes)[,.;]? {IT} {IS}[.!]?$", r"\1"),  # yes, it is
    (rf"^ ?(no)[,.;]? {IT} (?:{IS}(?:n't| not)|can't|cannot|won't)[.!]?$", r"\1"),
    (r"(?<=\d) (?=[a-z°])", ""),  # 3 cm is 3cm
    (r" (?!\w)|(?<![\w,]) ", ""),  # the other spaces have a meaning: "1 2" is not "12"
)
SPELLINGS = [  # applied in this order to lower-case text
    (re.compile(pattern, re.ASCII), new)
    for pattern, new in (
        (r"(?<!\w)\*\*([^*]+)\*\*(?!\w)", r"\1"),  # **Answer:** b
        (r"(?<=\{) ?([+-]?) | (?=[{}])", r"\1"),  # \frac { -1 } { 2 }, as Geometry3K writes
        (r"\\(?:text[a-z]*|math[a-z]+|mbox) ?\{([^{}]*)\}", r" \1 "),
        WITHOUT_LEAD,
        (r"(?<!\\)\\[()[\]]|(?<=\d)\\,(?=\d{3})|\\!|\\?[$€£¥]", ""),  # \(12\)   12\,345   $5
        (r" ?\^ ?\{([+-]?\w+)\}", r"^\1"),
        (r"(?<=\d) ?(?:\\times|\\cdot|[×x·*]) ?10 ?\^ ?([+-]?\d+)", r"e\1"),
        (r"(?<![\w.,^])10 ?\^ ?([+-]?\d+)", r"1e\1"),
        (r"\\(?:left|right)(?![a-z])|\\[,;: ]|~", " "),
        (r"\{,\}", ","),
        (r"^ ?\\boxed ?\{(.*)\} ?$", r"\1"),
        (r"^ ?([*_`'\"]+)([^*_`'\"]+)\1([.:]?) ?$", r"\2\3"),  # **b**
        (r"^ ?\{([^{},]+)\}([.:]?) ?$", r"\1\2"),  # {12}, but not a set
        (r"\\([{}%])", r"\1"),
        (r"(\d)? ?\\[dt]?frac", r"\1 \\frac"),  # 2\frac{1}{2} is 2 1/2
        (r"\\frac ?(?:\{([+-]?[\d.]+)\}|(\d)) ?(?:\{([\d.]+)\}|(\d))", r"\1\2/\3\4"),
        (r"\^ ?\{?\\circ\}?|\\degree", "°"),
        (f"[{''.join(SYMBOLS)}]", lambda match: f"{SYMBOLS[match[0]]} "),
        (r"\\([lgn])e(?![a-z])", r"\\\1eq"),
        ("、", ","),
        (" +", " "),
        *OF_WORDS,
        (r"^[(\[]*([a-z]+)[)\]]*[.:]?$|\.+$", r"\1"),  # a choice is its letter: (b)   b.   [b]
    )
]
# Most texts need few of these: red   sky-blue   12.5   the answer is 3 cm
WORDS = re.compile("[a-z0-9]+(?:[ .'-][a-z0-9]+)*")
SPELLINGS_OF_WORDS = [
    (re.compile(pattern, re.ASCII), new) for pattern, new in (WITHOUT_LEAD, *OF_WORDS)
]


def with_think_tags(text: str) -> str:
    """A text with <think> and </think> around its thoughts."""
    return re.sub(ENDS_THOUGHT, "</think>", re.sub(BEGINS_THOUGHT, "<think>", text))


def with_opened_thought(prompt: str, response: str) -> str:
    """A response with the thought that its prompt opens at its end, in this spelling, as the templates of
    some models do; also one that the prompt closes there, if the response has no other."""
    response, prompt = with_think_tags(response), with_think_tags(prompt.rstrip())
    if prompt.endswith("<think>"):
        return f"<think>{response}"
    closes = prompt.endswith("</think>") and not re.search("</?think>", response)
    return f"<think></think>{response}" if closes else response


def after_thought(response: str) -> str:
    """What a response says after its last thought; "" if it ends inside one."""
    rest = with_think_tags(response).rpartition("</think>")[2]
    return "" if "<think>" in rest else rest.strip()


def without_thoughts(response: str) -> str:
    """What follows the last thought of a response; one without a thought unchanged."""
    rest = after_thought(response)
    return response if rest == response.strip() else rest


def extract_answer(response: str, rule: str) -> str | None:
    r"""Content of the last `\boxed{...}` or GLM's box (rule "boxed"), or of the last `<answer>...</answer>`
    or the last box in that (rule "answer"); None without one, or if the response ends inside a thought."""
    if response.rfind("<think>") > response.rfind("</think>"):
        return None
    response = response.replace("<|begin_of_box|>", r"\boxed{").replace("<|end_of_box|>", "}")
    if rule == "answer":
        answer = next(iter(ANSWER.findall(response)[-1:]), None)
        boxed = extract_answer(answer or "", "boxed")
        return answer and answer.strip() if boxed is None else boxed
    return next(iter(boxed_texts(response)[-1:]), None)


def boxed_texts(text: str) -> list[str]:
    r"""The contents of all complete `\boxed{...}`, in the order in which they begin."""
    opened = []  # where the content of each brace begins; whether of a box
    boxes = []
    for match in BRACES.finditer(text):
        if match[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box:
                boxes.append((start, match.start()))
        elif match[0] == "{" or match[0].startswith(r"\boxed"):
            opened.append((match.end(), match[0] != "{"))
    return [text[start:end].strip() for start, end in sorted(boxes)]


def format_score(response: str, rule: str) -> float:
    """1.0 for exactly one `<think>...</think>` with an answer, not an empty one, after it; else
    0.0."""
    tags = re.findall("</?think>", response)
    answer = extract_answer(after_thought(response), rule)
    return float(tags == ["<think>", "</think>"] and bool(answer))


def answers_equal(response: str, reference: str) -> bool:
    """Whether two answers agree as text, choice letters, number or ordered list; never raises.

    Case, spaces, LaTeX spelling, emphasis, full-width characters and words before it ("Answer:") do not
    count. A percentage equals its hundredth and its bare number. A decimal fraction may be off by a
    millionth of the reference, or by less where it is rounded to fewer digits: 0.3333333 is 1/3, and
    3.14159 is not 3.14. A reference of several letters, "A, C", is a set, but "C, A" an order. An
    empty answer equals nothing.
    """
    response, reference = plain_text(response), plain_text(reference)
    if max(len(response), len(reference)) > MAX_ANSWER:
        return same_words(response, reference)
    letters, named = read_letter_set(reference), re.findall("[A-J]", reference)
    is_order = named != sorted(named)  # the pictures of a story, say
    if letters and not is_order and listed_letters(response) == letters:
        return True
    units = units_of(response) | units_of(reference)
    a, b = (spelled(with_scales(text, units)) for text in (response, reference))
    if not a or not b:
        return False
    if _equal(a, b):
        return True
    if _value(b) is not None and _equal(NONE.sub("0", without_sum(a)), b):
        return True
    if re.fullmatch("[a-z]", b) and CHOICE.fullmatch(a):
        return read_letters(response)[0] == {b.upper()}
    # Elements of a list, its brackets and commas.
    left, right = (re.split(r"([()\[\],]) ?", text) for text in (a, b))
    return len(left) == len(right) and all(map(_equal, left, right))


def plain_text(text: str) -> str:
    """A text with plain characters for those that only look different, as full-width ones do, and
    1/2 for ½. Of long texts only dashes and quotes change: the time of the rest can grow with their
    square."""
    if text.isascii():
        return text
    if len(text) <= MAX_ANSWER:
        text = re.sub("(?<=\\d)(?=[¼-¾⅐-⅞])", " ", text)  # 1½ is not 11/2
        text = re.sub(LOWERED, r"_\g<0>", re.sub(RAISED, r"^\g<0>", text))
        text = unicodedata.normalize("NFKC", text)
    return text.translate(ALIKE)


def read_letters(text: str) -> tuple[set[str], str]:
    """The letters of options that a text names, in capitals, none if it takes one back; and the text without
    them."""
    text = plain_text(text)
    if re.fullmatch("[a-z]", spelled(text)) or SMALL_LETTER.search(text):
        text = text.upper()
    named = set() if DENIED.search(text) else set(map(str.upper, LETTER.findall(text)))
    return named, LETTER.sub("", text)


def read_letter_set(reference: str) -> set[str]:
    """The letters of a reference that is several of them, A to J, with separators; none of any other: AC is
    a word."""
    is_set = LETTER_SET.fullmatch(plain_text(reference).strip(" ."))
    return listed_letters(reference) if is_set else set()


def listed_letters(text: str) -> set[str]:
    """The letters of a text that only lists some of A to J, each once: A, C   C and A   AC; none of any
    other."""
    text = spelled(re.sub(r"\(([A-Ja-j])\)", r"\1", text)).strip("[]{}")
    letters = re.sub(r"\band\b|[,;、&\s和与]", "", text)
    is_list = re.fullmatch("[a-j]+", letters) and len({*letters}) == len(letters)
    return {*letters.upper()} if is_list else set()


def units_of(text: str) -> set[str]:
    """The letters behind numbers that are no scales, in this text and in one that it is compared with."""
    small = {"B"} if SMALL_B.search(text) else set()
    return small | {_letter_scale(letter) for letter in APART.findall(text)}


def with_scales(text: str, units: Collection[str] = ()) -> str:
    """A plain text with 50000 for 50k, except where the letter is one of ``units``."""

    def scaled(match: re.Match) -> str:
        letter = _letter_scale(match[2])
        return match[0] if letter in units else _in_full(match[1], LETTER_SCALES[letter])

    return TOUCHING.sub(scaled, text)


def _in_full(number: str, zeros: int) -> str:
    """2.5 and six zeros are 2500000."""
    whole, _, behind = number.replace(",", "").partition(".")
    behind = behind.ljust(zeros, "0")
    digits = (whole + behind[:zeros]).lstrip("0") or "0"
    return f"{digits}.{behind[zeros:]}".removesuffix(".")


def _letter_scale(letter: str) -> str:
    """M and B are capitals: m is a metre."""
    return letter if letter in ("M", "B") else letter.lower()


def without_sum(text: str) -> str:
    """A text with the result alone of a calculation: 2 + 1 = 3 is 3."""
    return SUM.sub(lambda match: "" if match[1] else match[0], text)


def read_number(text: str) -> Fraction | None:
    """The value of a text that is a number, also in words; None of any other."""
    return _value(spelled(with_scales(plain_text(text)))) if len(text) <= MAX_ANSWER else None


def read_numbers(text: str) -> set[Fraction]:
    """The value of a text that is a number; of any other those in it, in digits or, if there are none, in
    words, of which "none" is 0. None if it takes one of them back."""
    whole = read_number(text)
    if whole is not None:
        return {whole}
    text = re.sub("[$€£¥]", "", with_scales(plain_text(text)).lower())
    for in_words in (text, NONE.sub("0", in_digits(text))):
        text = in_words
        for pattern, new in MIXED:
            text = re.sub(pattern, new, text, flags=re.ASCII)
        text = without_sum(text)
        # each spelling once: values take a hundred times as long as texts
        numbers = {number for number in IN_TEXT.findall(text) if len(number) <= LONGEST}
        if numbers:
            break
    if re.search(rf"{NOT}[+-]?{NUMBER}", text):
        return set()
    return {value for value in map(_value, numbers) if value is not None}


def with_brackets(text: str) -> str:
    """A text in which the numbers of `TAG`s stand in brackets: those of their attributes or content."""
    return TAG.sub(_in_brackets, text)


def _in_brackets(tag: re.Match) -> str:
    name, attributes, content = tag.groups()
    numbers = _axis_numbers(NAMED.sub("", attributes))
    are_attributes = bool(numbers)
    if not are_attributes and BARE.fullmatch(content):
        numbers = re.findall(DECIMAL, content)
    is_point = name.startswith("point") or (len(numbers) == 2 and not are_attributes)
    size = 2 if is_point else 4
    if not numbers or len(numbers) % size:
        return tag[0]
    regions = [f"[{', '.join(numbers[k : k + size])}]" for k in range(0, len(numbers), size)]
    label = NAMED.search(attributes)
    if label:
        word = next(filter(None, label.groups()), "").replace('"', "'")
        regions = [f'{{{region} "label": "{word}"}}' for region in regions]
    return " ".join(regions) + (content if are_attributes else "")


def _axis_numbers(attributes: str) -> list[str]:
    """The numbers of x1="170" y1="103" and the like, x before its y."""
    axes = {f"{axis}{k}": value for axis, k, value in AXIS.findall(attributes)}
    numbers = []
    for axis, value in axes.items():
        y_axis = axis.replace("x", "y")
        if y_axis != axis and y_axis in axes:
            numbers += [value, axes[y_axis]]
    return numbers


def read_places(text: str) -> list[tuple[list[float], str]]:
    """The two or four numbers, x first, of each point and box that a text writes, and its label or ""."""
    text = f"[{text}]" if re.fullmatch(PLACE, text) else with_brackets(text)
    places = []
    for item in ITEM.finditer(text):
        label = LABEL.search(item[0])
        name = next(filter(None, label.groups()), "") if label else ""
        for match in re.finditer(f"({Y_FIRST})?{REGION}", LABEL.sub("", item[0])):
            numbers = [float(number) for number in re.findall(rf"(?<![xy]){DECIMAL}", match[2])]
            if match[1]:  # y1, x1, y2, x2; the corners are sorted
                numbers.reverse()
            places.append((_x_first(match[2], numbers), name.strip()))
    return places


def _x_first(place: str, numbers: list[float]) -> list[float]:
    """The numbers of a place; where axes are named, as in {"y": 20, "x": 10}, each x before its y."""
    axes = {"x": [], "y": []}
    for axis, number in NAMED_NUMBER.findall(place):
        axes[axis].append(float(number))
    named = [number for pair in zip(axes["x"], axes["y"]) for number in pair]
    return named if len(named) == len(numbers) else numbers


def _value(text: str) -> Fraction | None:
    """The value of -1,234.5, 3/4, 2 1/2, 50% and the like; None of any other text."""
    match = QUOTIENT.fullmatch(text.removesuffix("%"))
    if not match:
        return None
    sign, whole, over, under = match.groups()
    value = Fraction(over.replace(",", ""))
    if under:
        divisor = Fraction(under.replace(",", ""))
        if not divisor:
            return None
        value = int(whole or 0) + value / divisor
    return -value if sign == "-" else value


def _equal(a: str, b: str) -> bool:
    if a == b:
        return True
    x, y = _value(a), _value(b)
    if x is None or y is None:
        return False
    scale = Fraction(100) ** (b.endswith("%") - a.endswith("%"))
    # a millionth, or half of the last digit of the one with fewer; integers and quotients are exact
    digits = [len(behind) for behind in re.findall(r"\.(\d*)", f"{a} {b}")]
    tolerance = min(abs(y) / 10**6, Fraction(1, 2 * 10 ** min(digits))) if digits else 0
    return any(abs(value - y) <= tolerance for value in (x, x * scale))


def check_reference(rule: str, reference: str | None) -> None:
    """Raises UserError: there is no reference, or no response can match it, not even its own text."""
    if reference is None:
        raise UserError("no reference answer")
    matches = words_of(reference) if rule == "exact" else answers_equal(reference, reference)
    if not matches:
        raise UserError(f"an empty answer, {reference!r:.80}")


def rule_reward(rule: str, prompts, responses, references, *_) -> Columns:
    """A rule as a reward function."""
    columns = {}
    for prompt, response, reference in zip(prompts, responses, references):
        if rule != "exact":
            response = with_opened_thought(prompt, response)
        for name, value in rule_scores(rule, response, reference).items():
            columns.setdefault(name, []).append(float(value))
    return columns


def rule_scores(rule: str, response: str, reference: str) -> dict[str, float]:
    """`exact`: 1 where the whole response is the reference; `verdict`: 1 where its last <answer>
    is, as judgements end; `boxed` and `answer`: 0.9 accuracy of the extracted answer + 0.1 format;
    parsed: whether there is one."""
    if rule == "exact":
        right = same_words(response, reference)
        return {"reward": right, "accuracy": right}
    if rule == "verdict":
        right = parse_verdict(response, [reference]) is not None
        return {"reward": right, "accuracy": right, "format": parse_verdict(response) is not None}
    answer = extract_answer(response, rule)
    right, formed = answers_equal(answer or "", reference), format_score(response, rule)
    scores = {"accuracy": right, "format": formed, "parsed": answer is not None}
    return {"reward": ACCURACY_WEIGHT * right + FORM_WEIGHT * formed} | scores


def parse_verdict(text: str, verdicts: list[str] | None = None, prompt: str = "") -> str | None:
    """The verdict of a judgement, its last answer: one of ``verdicts`` (None: any text), spelled as
    answers may be; None if there is none. The ``prompt`` may open the judgement's thought."""
    word = extract_answer(with_opened_thought(prompt, text), "answer") or None
    if word is None or verdicts is None:
        return word
    return next((verdict for verdict in verdicts if answers_equal(word, verdict)), None)


def vote(verdicts: list[str | None], right: str) -> float:
    """1 if most of the verdicts that could be read are right, 1/2 if as many say another, else 0."""
    winners = multimode(filter(None, verdicts))
    if right not in winners:
        return 0.0
    return 1.0 if len(winners) == 1 else 0.5


def same_words(response: str, reference: str) -> bool:
    """Equality up to case, white space and what only looks different."""
    return words_of(response) == words_of(reference)


def words_of(text: str) -> str:
    """A plain text in lower case, with single spaces."""
    return " ".join(plain_text(text).lower().split())


def spelled(text: str) -> str:
    """The words of a text without LaTeX, emphasis and what stands before an answer; of a long text its
    words."""
    text = words_of(text)
    if len(text) <= MAX_ANSWER:
        text = in_digits(text)
        for pattern, new in SPELLINGS_OF_WORDS if WORDS.fullmatch(text) else SPELLINGS:
            text = pattern.sub(new, text)
    return text
