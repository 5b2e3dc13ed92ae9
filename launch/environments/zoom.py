"""Crop and zoom on the row's own picture: <zoom>left, top, right, bottom</zoom>, in thousandths of
its width and height; any other turn is the answer.

    python train_ppo_vl.py ... --env launch/environments/zoom.py:Zoom --reward env --max_turns 4
"""

import re
from pathlib import Path

from PIL import Image, ImageOps

CALL = re.compile(r"<zoom>\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*</zoom>")


class Zoom:
    """What is asked for, enlarged to the size of the picture's longer side."""

    def reset(self, row: dict) -> None:
        images = row.get("images") or row["image"]
        first = images[0] if isinstance(images, list) else images
        self.row = row
        with Image.open(Path(row["folder"], first)) as picture:
            self.picture = picture.convert("RGB")

    def step(self, text: str) -> tuple:
        asked = CALL.search(text)
        if not asked:
            return None, float(text.strip() == self.row["answer"]), True
        corners = zip(asked.groups(), 2 * self.picture.size)
        left, top, right, bottom = (round(min(int(at), 1000) / 1000 * side) for at, side in corners)
        if left >= right or top >= bottom:
            return "An empty region: left < right and top < bottom, please.", 0.0, False
        crop = self.picture.crop((left, top, right, bottom))
        longer = max(self.picture.size)
        return [ImageOps.contain(crop, (longer, longer))], 0.0, False
