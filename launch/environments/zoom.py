"""Crop and zoom on the row's own picture: <zoom>left, top, right, bottom</zoom>, in thousandths of
its width and height; any other turn is the answer. What cannot be shown is answered in words: other
numbers, an empty region, a strip that no image processor takes.

    python train_ppo_vl.py ... --env launch/environments/zoom.py:Zoom --reward env --max_turns 4
"""

import re
from pathlib import Path

from PIL import ImageOps

from common.data.images import read_image
from common.data.rows import media_list
from common.ground.files import number_as_text
from common.rewards.rules import after_thought

THINNEST = 100  # times the shorter side; Qwen's processors take up to 200
CALL = re.compile(r"<zoom>\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*</zoom>")


class Zoom:
    """The region, enlarged to the size of the picture's longer side."""

    def reset(self, row: dict) -> None:
        self.row = row
        first = media_list(row)[0]
        self.picture = read_image(str(Path(row["folder"], str(first))))  # as the model sees it

    def step(self, text: str) -> tuple:
        answer = after_thought(text)
        call = CALL.search(answer)
        if not call and "<zoom>" in answer:
            return "<zoom>left, top, right, bottom</zoom>: whole numbers, please.", 0.0, False
        if not call:
            return None, float(answer == str(number_as_text(self.row["answer"]))), True
        corners = zip(call.groups(), 2 * self.picture.size)
        left, top, right, bottom = (
            round(min(float(at), 1000) / 1000 * side) for at, side in corners
        )
        if left >= right or top >= bottom:
            return "An empty region: left < right and top < bottom, please.", 0.0, False
        crop = self.picture.crop((left, top, right, bottom))
        if max(crop.size) > THINNEST * min(crop.size):
            return "Too thin a strip: a wider or higher region, please.", 0.0, False
        longer = max(self.picture.size)
        return [ImageOps.contain(crop, (longer, longer))], 0.0, False
