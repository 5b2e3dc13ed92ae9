"""What programs of the user cost a rank: their start, a call, an object of an environment, memory.

    python tests/benchmarks/programs.py
    python tests/benchmarks/programs.py --toy toy_describe

Seconds are those of the clock, and of CPU in all processes. Memory is what a process has for itself. With
--toy: CPU seconds of its run with 16 programs less those without, least of three, divided by 16."""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import train_ppo_vl as ppo  # noqa: E402  what a rank has imported
from common.user_code import load_class, load_function  # noqa: E402
from machine import machine  # noqa: E402

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
    """Texts of 2,000 and 4,000 characters, no two of which are one object, or pickle would write them once."""
    return [
        [f"{k:08}" + "p" * 1992 for k in range(count)],
        [f"{k:08}" + "r" * 3992 for k in range(count)],
        [str(k) for k in range(count)],
        [None] * count,
        [[f"/data/images/{k:08}-{i}.jpg" for i in range(images)] for k in range(count)],
    ]


def run_quietly(argv: list[str], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    ppo.main(argv)


def cpu_of_run(toy: Path, count: int, steps: int, folder: Path) -> float:
    """CPU seconds of so many steps of the toy, measured by so many programs; the imports are done."""
    sources = [["exact", 1]]
    for number in range(count):
        path = folder / f"program{number}.py"
        path.write_text(PROGRAM.format(imports=""))
        sources.append([f"{path}:score", 0])
    flags = json.loads((toy / "args.json").read_text())
    flags = {name: value for name, value in flags.items() if name != "reward"}
    (folder / "args.json").write_text(
        json.dumps(flags | {"reward_recipe": json.dumps({"*": sources})})
    )
    argv = ["--config", str(folder / "args.json"), "--out", str(folder / "out")]
    argv += ["--steps", str(steps)]
    argv += ["--eval_every", "0", "--save_every", "0", "--export_every", "0", "--log_samples", "0"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=run_quietly, args=(argv, folder / "printed"))
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit((folder / "printed").read_text()[-4000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_toy(toy: Path, many: int = 16, later: int = 6) -> None:
    seconds: dict[tuple[int, int], list[float]] = {}
    for _ in range(3):
        for run in ((0, 1), (many, 1), (0, later), (many, later)):
            with tempfile.TemporaryDirectory() as folder:
                seconds.setdefault(run, []).append(cpu_of_run(toy, *run, Path(folder)))
            print(*run, f"{seconds[run][-1]:.2f} s", file=sys.stderr, flush=True)
    least = {run: min(each) for run, each in seconds.items()}
    first = (least[many, 1] - least[0, 1]) / many
    step = (least[many, later] - least[0, later]) / many - first
    print(f"start and a step: {least[0, 1]:.2f} s, and {1000 * first:.0f} ms for each program")
    print(
        f"a further step: {(least[0, later] - least[0, 1]) / (later - 1):.2f} s, and "
        f"{1000 * step / (later - 1):.1f} ms for each program"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", type=Path, help="measure its run")
    toy = parser.parse_args().toy
    print(machine())
    if toy:
        measure_toy(toy)
    else:
        measure_calls()


def measure_calls() -> None:
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
        seconds = []
        for _ in range(100):
            started = time.perf_counter()
            score(*inputs)
            seconds.append(time.perf_counter() - started)
        best, median = 1000 * min(seconds), 1000 * statistics.median(seconds)
        print(
            f"{count} samples with {images} image paths, a call of 100: least {best:.2f} ms, "
            f"median {median:.2f} ms"
        )
        with measured("the same, mean", 20):
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
