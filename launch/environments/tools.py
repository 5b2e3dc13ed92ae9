"""Tool calls, answered by Python methods, until the policy calls none.

Inherit from `Tools`, perhaps beside other classes with tools, as `Calculator` does: every public
method is a tool. Its arguments may be anything that JSON can express. Calls are read in the forms that
the chat templates of these families teach:

    Qwen2.5-VL, Qwen3-VL   <tool_call>{"name": "f", "arguments": {"a": 3}}</tool_call>
    Qwen3.5                <tool_call><function=f><parameter=a>3</parameter></function></tool_call>
    GLM-4.5V               <tool_call>f<arg_key>a</arg_key><arg_value>3</arg_value></tool_call>
    Ministral 3            [TOOL_CALLS]f[ARGS]{"a": 3}
    Gemma 4                <|tool_call>call:f{a:3}<tool_call|>

Rows tell the policy which tools there are, in a system message.
"""

import inspect
import json
import operator
import re
from collections.abc import Callable
from typing import Any

from common.ground.files import number_as_text
from common.rewards.regions import answer_text
from common.rewards.rules import after_thought, answers_equal

MISTAKES = ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError
# One that is never closed ends with the turn.
CALLS = re.compile(
    r"<tool_call>(.*?)(?:</tool_call>|\Z)|<\|tool_call>(.*?)(?:<tool_call\|>|\Z)"
    r"|\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|\Z)",
    re.DOTALL,
)
GEMMA_QUOTE = '<|"|>'


class Tools:
    """Every public method, except those of an environment, is a tool; its result is the reply."""

    role = "tool"
    pictures = False

    def reset(self, row: dict) -> None:
        self.row = row

    def reward(self, text: str) -> float:
        """What the last turn earns, without its thought: 1 for the row's answer, spelled as the rules
        allow."""
        return float(answers_equal(answer_text(text), str(number_as_text(self.row["answer"]))))

    def step(self, text: str) -> tuple:
        answer = after_thought(text)
        calls = [match[match.lastindex or 0] for match in CALLS.finditer(answer)]
        if not calls:
            return None, self.reward(answer), True
        return "\n".join(map(self.call, calls)), 0.0, False

    def call(self, text: str) -> str:
        """The result of one call as JSON, or an error, from which the policy may recover."""
        try:
            name, arguments = read_call(text.strip())
            is_tool = inspect.isroutine(getattr(type(self), name, None))  # of any class
            if name.startswith("_") or name in {*vars(Tools), "close"} or not is_tool:
                return mistake(f"no tool {name!r:.80}")
            tool = getattr(self, name)
            arguments = typed(tool, arguments) if isinstance(arguments, Texts) else arguments
            return json.dumps({"result": tool(**arguments)}, allow_nan=False)
        except MISTAKES as error:
            return mistake(f"{type(error).__name__}: {error!s:.120}")


class Texts(dict):
    """Arguments of which the form does not say whether they are texts or other values."""


def read_call(text: str) -> tuple[str, dict]:
    """The name and the arguments of a call. Raises one of MISTAKES: it has none of the forms above."""
    if text.startswith("{"):
        request = json.loads(text)
        return request["name"], request.get("arguments") or {}
    if text.startswith("call:"):
        name, _, body = text.removeprefix("call:").partition("{")
        return name.strip(), json.loads(gemma_as_json("{" + body))
    if "[ARGS]" in text:
        name, _, body = text.partition("[ARGS]")
        return name.strip(), json.loads(body)
    arguments = Texts()
    for begin, middle, end in (
        ("<parameter=", ">", "</parameter>"),
        ("<arg_key>", "</arg_key>", "</arg_value>"),
    ):
        for part in text.split(begin)[1:]:
            name, _, value = part.partition(end)[0].partition(middle)
            arguments[name.strip()] = value.strip().removeprefix("<arg_value>").strip()
    name = re.match(r"(?:<function=)?\s*([^\s<>]*)", text)
    return name[1] if name else "", arguments


def gemma_as_json(text: str) -> str:
    """Gemma's arguments, whose keys have no quotation marks, and whose texts have a token for them."""
    pieces = text.split(GEMMA_QUOTE)
    for k, piece in enumerate(pieces):
        is_text = k % 2
        pieces[k] = (
            json.dumps(piece) if is_text else re.sub(r"([{,])\s*(\w+)\s*:", r'\1"\2":', piece)
        )
    return "".join(pieces)


def typed(tool: Callable, texts: Texts) -> dict[str, Any]:
    """The arguments as values of JSON, except where the tool asks for a text or JSON cannot read one."""
    asked = inspect.signature(tool).parameters
    arguments = {}
    for name, text in texts.items():
        arguments[name] = text
        if name not in asked or asked[name].annotation not in (str, "str"):
            try:
                arguments[name] = json.loads(text)
            except ValueError:
                pass  # a text
    return arguments


def mistake(text: str) -> str:
    """As JSON that contains no special token, such as <|im_start|>, which the policy may have written
    but a reply must not contain."""
    return json.dumps({"error": text}).replace("<", r"\u003c")


class Calculator(Tools):
    """{"name": "calculate", "arguments": {"a": 3, "operator": "*", "b": 4}}"""

    def calculate(self, a: float, operator: str, b: float) -> float:
        if not {type(a), type(b)} <= {
            int,
            float,
        }:  # a text times a large number would fill the memory
            raise TypeError("a and b must be numbers")
        return OPERATORS[operator](a, b)


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
