"""The picture is hidden until the policy says "look": a row's column "hidden" names it.

    python tests/benchmarks/hidden_toy.py TOY OUT       # rows and a model for it, from a toy of launch/toy.py
    python train_ppo_vl.py --config TOY/args.json --model OUT/model --data OUT/train.jsonl \\
        --eval_data OUT/eval.jsonl --env launch/environments/hidden_picture.py:Look --reward env \\
        --max_new_tokens 12 --max_turns 3 --max_reply_tokens 40 --entropy_coef 0.05 --steps 60 --out OUT/run
"""

from pathlib import Path

from common.ground.files import number_as_text
from common.rewards.rules import after_thought


class Look:
    """One look, then the answer."""

    def reset(self, row: dict) -> None:
        self.row, self.looked = row, False

    def step(self, text: str) -> tuple:
        answer = after_thought(text)
        if answer == "look" and not self.looked:
            self.looked = True
            return [Path(self.row["folder"], self.row["hidden"]), self.row["prompt"]], 0.0, False
        right = float(answer == str(number_as_text(self.row["answer"])))
        return None, {"reward": right, "accuracy": right}, True
