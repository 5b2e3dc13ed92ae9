"""Environments of Gymnasium as pictures: the policy sees the rendered state and names an action.

The columns "game" and "actions" of a row choose one, say "FrozenLake-v1" and ["left", "down", "right",
"up"].
"""

import gymnasium
from PIL import Image

from common.rewards.rules import after_thought


class Game:
    def look(self) -> Image.Image:
        return Image.fromarray(self.game.render())

    def reset(self, row: dict) -> list:
        self.game = gymnasium.make(row["game"], render_mode="rgb_array")
        self.actions = [str(name) for name in row["actions"]]
        self.game.reset(seed=row["seed"])
        return [self.look(), f"Your move: {', '.join(self.actions)}."]

    def step(self, text: str) -> tuple:
        move = after_thought(text)
        if move not in self.actions:
            return f"That is none of {', '.join(self.actions)}.", 0.0, False
        _, reward, ended, cut, _ = self.game.step(self.actions.index(move))
        return (None if ended or cut else self.look()), float(reward), ended or cut
