"""A checkpoint in and out: seconds, and the memory of rank 0.

    python tests/benchmarks/loading.py /tmp/3b --write 3b       random weights in bfloat16, files of 2 GB
    torchrun --standalone --nproc_per_node 2 tests/benchmarks/loading.py /tmp/3b -- --lora_rank 16

After -- come flags of train_ppo_vl.py. Run it twice: the first time, files may not be in memory.

Memory is what the kernel counts as resident: anonymous, and with the pages of files, which it takes back
when others need them.
"""

import argparse
import json
import sys
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from safetensors.torch import save_file

from common import distributed
from common.model import weights
from conftest import start

FILE_BYTES = 2 << 30


def status(field: str) -> float:
    """A line of /proc/self/status in GiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 2**20


def write(folder: Path, size: str) -> None:
    """A checkpoint of random weights, with an index."""
    import gpu
    from helpers import load_model

    folder = gpu.write_checkpoint(folder, size)
    noise, files, places, taken = torch.randn(2**28).bfloat16() / 50, [{}], {}, 0
    for name, weight in load_model(folder, loaded=False).named_parameters():  # tied ones once
        key = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        if taken > FILE_BYTES:
            files.append({})
            taken = 0
        count = weight.numel()
        value = (
            noise.repeat(1 + count // len(noise))[:count]
            if count > len(noise)
            else noise[:count].clone()
        )
        files[-1][key] = value.view(weight.shape)
        taken += 2 * count
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Measured:
    """Inside, seconds and peaks of memory are measured, which ``what`` has taken is printed."""

    def __init__(self, what: str):
        self.what = what

    def watch(self) -> None:
        while not self.over.wait(0.02):
            self.peak = max(self.peak, status("RssAnon"))

    def __enter__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.before, self.peak, self.over = status("RssAnon"), 0.0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        torch.distributed.barrier()
        self.begun, self.used = time.perf_counter(), time.process_time()

    def __exit__(self, *_) -> None:
        used = torch.tensor(time.process_time() - self.used)
        torch.distributed.all_reduce(used)
        seconds = time.perf_counter() - self.begun
        self.over.set()
        self.thread.join()
        after, whole = status("RssAnon"), status("VmHWM")
        if distributed.is_main():
            print(
                f"{self.what}: {seconds:.1f} s, {float(used):.1f} CPU seconds of all ranks; anonymous "
                f"{self.before:.1f} GiB before, {self.peak:.1f} at most, {after:.1f} after; with pages "
                f"of files {whole:.1f} at most",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", metavar="SIZE", help="of tests/benchmarks/gpu.py: tiny, 3b, 7b")
    parser.add_argument("--load", action="store_true", help="no export")
    parser.add_argument("flags", nargs="*")
    settings = parser.parse_args()
    if settings.write:
        write(settings.folder, settings.write)
        return
    fill = weights.fill

    def measured_fill(*arguments) -> None:
        with Measured("load"):
            fill(*arguments)

    weights.fill = measured_fill
    env = start(
        settings.folder, settings.folder / "rows.jsonl", "--advantage grpo", *settings.flags
    )
    if not settings.load:
        with Measured("export"):
            problem = weights.export(env.actor, env.processor.save, settings.folder / "export")
        assert problem is None, problem


if __name__ == "__main__":
    main()
