"""Numbers in words, read by adding up: twenty-one, two hundred and five, half a dozen, 十二.

    in_digits   a text with digits in the place of its number words

launch/data/convert.py and launch/judges/judge_table.py read this file without torch.
"""

import re

ONES = "one two three four five six seven eight nine".split()
TEENS = """ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen""".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
LARGE = {"trillion": 10**12, "billion": 10**9, "million": 10**6, "thousand": 1000}
CHINESE_ONES = "零一二三四五六七八九"

# What a word adds; what multiplies the words before it, up to the next of these; and what multiplies
# all before it, up to the next of these.
ADDED = {word: number for number, word in enumerate(["zero", *ONES, *TEENS])}
ADDED |= {word: 20 + 10 * k for k, word in enumerate(TENS)}
ADDED |= {digit: number for number, digit in enumerate(CHINESE_ONES)}
ADDED |= {"half": 0.5, "两": 2, "〇": 0}
TIMES = {"dozen": 12, "hundred": 100, "十": 10, "百": 100, "千": 1000}
SCALES = LARGE | {"亿": 10**8, "万": 10**4}

# to ninety-nine; to nine hundred and ninety-nine; the larger ones, in this order
SMALL = rf"(?:(?:{'|'.join(TENS)})(?:[ -](?:{'|'.join(ONES)}))?|{'|'.join((*TEENS, *ONES))})\b"
HUNDREDS = rf"(?:(?:{SMALL}|a) hundred\b(?: (?:and )?{SMALL})?|{SMALL})"
JOINT = rf"(?:,(?= (?:{SMALL}|a) hundred\b))? (?:and )?"
LARGER = "".join(rf"(?:(?:{HUNDREDS}|a) {scale}\b(?:{JOINT})?)?" for scale in LARGE)
BEGINNINGS = sorted({word[:3] for word in ("a ", "half", "zero", *ONES, *TEENS, *TENS)})
ENGLISH = (
    rf"(?<![\w-])(?={'|'.join(BEGINNINGS)})(?:(?:{SMALL}|(?:half )?a) dozen|zero"
    rf"|(?:half a|{SMALL} and a half)(?: (?:{'|'.join(LARGE)})\b|(?<=half))"
    rf"|{LARGER}(?:{HUNDREDS})?(?<=[a-z]))(?![\w-])"
)
# 三千零五, 十二, 二〇二五; but not those in 第一 (the first), 统一 or 三明治 (a sandwich): a word begins before
# them and something that is counted, or nothing, follows
DIGIT = "[一二两三四五六七八九]"
# 一百五 is 150 in Chinese, and 105 in Japanese: neither is read
LAST_DIGIT = f"(?:(?<![百千万亿]){DIGIT})?"
THOUSANDS = rf"(?:{DIGIT}千)?零?(?:{DIGIT}百)?零?(?:{DIGIT}?十)?零?{LAST_DIGIT}"
COUNTED = "个個只隻条條张張本位名辆輛头頭棵朵块塊支把杯件双雙人台枚匹つ"
CHINESE = (
    rf"(?<![^\W是有共为為约約])(?:零|(?=[十{DIGIT[1:]})(?:{THOUSANDS}亿)?(?:{THOUSANDS}万)?{THOUSANDS}"
    rf"|[〇{CHINESE_ONES}]{{2,}})(?=[{COUNTED}]|\W*\Z)"
)
IN_ASCII, NUMERAL = re.compile(ENGLISH), re.compile(f"{ENGLISH}|{CHINESE}")
WORD = re.compile(
    rf"[a-z]+|[{''.join(word for word in (*ADDED, *TIMES, *SCALES) if len(word) == 1)}]"
)


def in_digits(text: str) -> str:
    """A text in lower case with digits in the place of its number words: 205 cups   2.5 million"""
    pattern = IN_ASCII if text.isascii() else NUMERAL  # twice as fast
    return pattern.sub(lambda match: value_of(match[0]), text)


def value_of(numeral: str) -> str:
    if re.fullmatch(rf"[〇{CHINESE_ONES}]{{2,}}", numeral):  # digit by digit, as years are
        return "".join(str(ADDED[digit]) for digit in numeral)
    total = below_scale = last = 0
    for word in WORD.findall(numeral):
        if word in TIMES:
            below_scale += (last or 1) * TIMES[word]
            last = 0
        elif word in SCALES:
            total += (below_scale + last or 1) * SCALES[word]
            below_scale = last = 0
        else:
            last += ADDED.get(word, 0)  # not "a" and "and"
    value = total + below_scale + last
    return str(int(value)) if value == int(value) else str(value)
