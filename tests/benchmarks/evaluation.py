"""The evaluation of train_grm_vl.py on the toy, in this checkout and in an older one, in turn: CPU seconds
of one thread, and whether both write the same texts.

    python tests/benchmarks/evaluation.py ../older

256 questions of the toy, with answers of some 25 tokens that a few steps have taught."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOY = "--train 232 --eval 24 --warm_start_steps 100".split()
FLAGS = "--max_prompt_tokens 256 --max_tokens_per_pack 4096 --eval_max_new_tokens 40".split()
TRAIN = "--steps 60 --prompts_per_step 16 --lr 2e-3 --save_every 0 --export_every -1".split()
TIMED = """
import sys, time
import train_grm_vl as grm

evaluate = grm.evaluate

def timed(*arguments):
    begun = time.process_time()
    metrics = evaluate(*arguments)
    print(f"CPU seconds: {time.process_time() - begun:.2f}")
    return metrics

grm.evaluate = timed
grm.main(sys.argv[1:])
"""


def run(checkout: Path, *command) -> str:
    """What a program prints that runs in a checkout, on one thread."""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    line = [sys.executable, *map(str, command)]
    done = subprocess.run(line, cwd=checkout, env=one_thread, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def write_rows(toy: Path) -> Path:
    """The toy's questions, with responses to imitate."""
    lines = []
    for name in ("train", "eval"):
        for row in map(json.loads, (toy / f"{name}.jsonl").read_text().splitlines()):
            text = f"Asked: {row['prompt']} I see it. <answer>{row['answer']}</answer>"
            images = [str(toy / image) for image in row.get("images", [])]
            lines.append(json.dumps({"prompt": row["prompt"], "images": images, "response": text}))
    path = toy / "responses.jsonl"
    path.write_text("\n".join(lines[:256]))
    return path


def main(older: Path, folder: Path) -> None:
    toy, trained = folder / "toy", folder / "trained"
    run(ROOT, "launch/toy.py", "--out", toy, *TOY)
    data = ["--data", write_rows(toy), *FLAGS]
    run(ROOT, "train_grm_vl.py", "--model", toy / "model", *data, *TRAIN, "--out", trained)
    data += ["--model", trained / "export" / "latest", "--eval_data", data[1], "--eval_only"]
    for turn in range(3):
        texts = []
        for name, checkout in (("older", older), ("this", ROOT)):
            out = folder / f"{name}-{turn}"
            printed = run(checkout, "-c", TIMED, *data, "--out", out)
            (result,) = out.rglob("eval_result_0.json")
            records = json.loads(result.read_text())["records"]
            texts.append([record["generated_text"] for record in records])
            (seconds,) = (line for line in printed.splitlines() if line.startswith("CPU seconds"))
            print(name, seconds, flush=True)
        print("the same texts" if texts[0] == texts[1] else "OTHER TEXTS", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        main(Path(sys.argv[1]).resolve(), Path(work))
