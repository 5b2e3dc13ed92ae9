"""Gymnasium environments, seen as pictures: the policy reads the rendered state and names an action.

A row's columns "game" and "actions" name one, say "FrozenLake-v1" and ["left", "down", "right",
"up"]; without them it is a small grid world of our own, which needs no package.
"""

import random

from PIL import Image, ImageDraw


class Grid:
    """Gymnasium's interface: walk the blue square to the green goal on a board of 4 x 4 cells."""

    actions = ("up", "down", "left", "right")
    moves = ((-1, 0), (1, 0), (0, -1), (0, 1))

    def reset(self, seed: int) -> tuple:
        self.at, self.goal = random.Random(seed).sample(
            [(r, c) for r in range(4) for c in range(4)], 2
        )
        return self.at, {}

    def step(self, action: int) -> tuple:
        self.at = tuple(min(3, max(0, x + d)) for x, d in zip(self.at, self.moves[action]))
        return self.at, float(self.at == self.goal), self.at == self.goal, False, {}

    def render(self) -> Image.Image:
        image = Image.new("RGB", (112, 112), "white")
        for (row, column), colour in ((self.goal, "green"), (self.at, "blue")):
            x, y = 28 * column, 28 * row
            ImageDraw.Draw(image).rectangle((x + 2, y + 2, x + 25, y + 25), fill=colour)
        return image


class Game:
    shared = True  # the samples of a prompt have one seed, and so one start

    def look(self) -> Image.Image:
        picture = self.game.render()
        return picture if isinstance(picture, Image.Image) else Image.fromarray(picture)

    def reset(self, row: dict) -> list:
        self.game, self.actions = Grid(), [str(name) for name in row.get("actions", Grid.actions)]
        if "game" in row:
            import gymnasium

            self.game = gymnasium.make(row["game"], render_mode="rgb_array")
        self.game.reset(seed=row["seed"])
        return [self.look(), f"Your move: {', '.join(self.actions)}."]

    def step(self, text: str) -> tuple:
        if text.strip() not in self.actions:
            return f"That is none of {', '.join(self.actions)}.", 0.0, False
        _, reward, ended, cut, _ = self.game.step(self.actions.index(text.strip()))
        return (None if ended or cut else self.look()), float(reward), ended or cut
