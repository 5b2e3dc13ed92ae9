"""Tool calls: JSON between markers, answered by Python methods, until the policy calls none.

Inherit from `Tools`, perhaps beside other classes with tools, as `Calculator` does: every public
method is a tool. Its arguments may be anything that JSON can express.
"""

import inspect
import json
import operator
import re

from common.ground.files import number_as_text
from common.rewards.rules import after_thought

MISTAKES = ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError


class Tools:
    """Every public method, except those of an environment, is a tool; its result is the reply."""

    role = "tool"
    pictures = False
    markers = ("<tool_call>", "</tool_call>")  # those of Qwen and its relatives

    def reset(self, row: dict) -> None:
        self.row = row

    def reward(self, text: str) -> float:
        """What the last turn earns, without its thought."""
        return float(text == str(number_as_text(self.row["answer"])))

    def step(self, text: str) -> tuple:
        start, end = map(re.escape, self.markers)
        answer = after_thought(text)
        # one that is never closed ends with the turn
        calls = re.findall(rf"{start}(.*?)(?:{end}|\Z)", answer, re.DOTALL)
        if not calls:
            return None, self.reward(answer), True
        return "\n".join(map(self.call, calls)), 0.0, False

    def call(self, text: str) -> str:
        """The result of one call as JSON, or an error, from which the policy may recover."""
        try:
            request = json.loads(text)
            name, arguments = request["name"], request.get("arguments") or {}
            is_tool = inspect.isroutine(getattr(type(self), name, None))  # of any class
            if name.startswith("_") or name in {*vars(Tools), "close"} or not is_tool:
                return mistake(f"no tool {name!r:.80}")
            return json.dumps({"result": getattr(self, name)(**arguments)}, allow_nan=False)
        except MISTAKES as error:
            return mistake(f"{type(error).__name__}: {error!s:.120}")


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
