"""What programs of the user cost a rank: their start, a call, an object of an environment, memory.

    python tests/benchmarks/programs.py

Seconds are those of the clock, and of CPU in all processes. Memory is what a process has for itself."""

import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import train_ppo_vl  # noqa: E402, F401  what a rank has imported
from common.user_code import load_class, load_function  # noqa: E402

PROGRAM = """
{imports}
def score(prompts, responses, references, labels, images):
    return [float(len(text)) for text in responses]
class Talk:
    def reset(self, row):
        self.row = row
    def step(self, text):
        return "seen", 0.5, False
"""
TAKES = "prompts, responses, references, labels, images"


@contextmanager
def measured(what: str, count: int = 1):
    clock, cpu = time.perf_counter(), sum(os.times()[:4])
    yield
    clock, cpu = time.perf_counter() - clock, sum(os.times()[:4]) - cpu
    print(f"{what}: {1000 * clock / count:.2f} ms, of CPU here {1000 * cpu / count:.2f} ms")


def own_megabytes(number: int) -> float:
    rows = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("Private_")) / 1024


def samples(count: int, images: int) -> list[list]:
    paths = [f"/data/images/{k:08}.jpg" for k in range(images)]
    return [
        ["p" * 2000] * count,
        ["r" * 4000] * count,
        ["7"] * count,
        [None] * count,
        [paths] * count,
    ]


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    for name, imports in (
        ("plain", ""),
        ("torch", "import torch"),
        ("boxes", "from common.rewards import regions"),
    ):
        (folder / f"{name}.py").write_text(PROGRAM.format(imports=imports))
        with measured(f"{name}: load"):
            score, *_ = load_function("--reward", f"{folder}/{name}.py:score", TAKES)
        print(f"{name}: {own_megabytes(score.program.number):.1f} MB")
    for count, images in ((64, 1), (64, 8), (1024, 8)):
        inputs = samples(count, images)
        score(*inputs)
        with measured(f"{count} samples with {images} image paths, a call", 20):
            for _ in range(20):
                score(*inputs)
    talk, row = load_class("--env", f"{folder}/plain.py:Talk"), {"seed": 1, "number": 0}
    for count in (64, 1000):
        objects = []
        with measured(f"{count} objects, fork and reset of each", count):
            for _ in range(count):
                objects.append(talk.make())
                objects[-1].reset(row, 60)
        with measured(f"{count} objects, a step of each", count):
            for each in objects:
                each.step("text", 60)
        megabytes = [own_megabytes(each.process.number) for each in objects]
        print(f"{count} objects: {sum(megabytes) / count:.1f} MB each")
        with measured(f"{count} objects, the end of each", count):
            for each in objects:
                each.close(60)


if __name__ == "__main__":
    main()
