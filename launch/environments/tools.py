"""Tool calls: JSON between markers, answered by Python methods, until the policy calls none.

`Tools` is what others inherit from; `Calculator` shows how: a public method is a tool.
"""

import json
import operator
import re


class Tools:
    """Every method that is no part of an environment is a tool; its result is the reply."""

    role = "tool"
    pictures = False
    markers = ("<tool_call>", "</tool_call>")  # those of Qwen and its relatives

    def reset(self, row: dict) -> None:
        self.row = row

    def reward(self, text: str) -> float:
        """What the last turn earns."""
        return float(text.strip() == self.row["answer"])

    def step(self, text: str) -> tuple:
        start, end = map(re.escape, self.markers)
        calls = re.findall(f"{start}(.*?){end}", text, re.DOTALL)
        if not calls:
            return None, self.reward(text), True
        return "\n".join(map(self.call, calls)), 0.0, False

    def call(self, text: str) -> str:
        """The result of one call as JSON, or what is wrong with it: the policy's mistake to mend."""
        try:
            asked = json.loads(text)
            name, arguments = asked["name"], asked.get("arguments") or {}
            if name.startswith("_") or name in vars(Tools) or name not in vars(type(self)):
                return json.dumps({"error": f"no tool {name!r}"})
            return json.dumps({"result": getattr(self, name)(**arguments)})
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            return json.dumps({"error": f"{type(error).__name__}: {error}"})


class Calculator(Tools):
    """{"name": "calculate", "arguments": {"a": 3, "operator": "*", "b": 4}}"""

    def calculate(self, a: float, operator: str, b: float) -> float:
        return OPERATORS[operator](a, b)


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
