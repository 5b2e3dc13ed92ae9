"""Memory: the peak of the chunked log-prob head against the naive one, and resident memory over
many steps of the toy.

    python tests/benchmarks/memory.py                     # both; about 3 minutes on one core
    python tests/benchmarks/memory.py --steps 0           # the head only
    python tests/benchmarks/memory.py --tokens 0          # the toy only
    python tests/benchmarks/memory.py --live --steps 200 -- --config toy/args.json     # what the memory of a run holds

Each head runs in a process of its own, in which the peak of resident memory (VmHWM of the kernel,
reset just before) less what was resident before is what the head needs: forward and backward, for
gradients of the hidden states and, in the second part, of the weight, whose gradient both ways must
hold. The naive head is log_softmax of all logits.

--live runs train_ppo_vl.py in this process, with the flags behind --, and counts after each step: tensors that python
can reach and their bytes (each storage once), bytes that the program has asked for and not given
back (glibc's mallinfo2: heaps and mappings), bytes that glibc keeps although nobody uses them, and
resident memory. A leak raises the first or the second; fragmentation only the others."""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from common import logprobs
from common.ground.toy import TOY_FOLDERS, write_if_missing


def status(field: str) -> float:
    """A line of /proc/self/status in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def measure_head(
    kind: str, tokens: int, vocabulary: int, hidden_size: int, chunk: int, train_head: bool
) -> dict[str, float]:
    """Peak MiB above what was resident, forward and backward, and the results for comparison."""
    generator = torch.Generator().manual_seed(0)
    weight = (
        torch.randn(vocabulary, hidden_size, generator=generator)
        .mul_(hidden_size**-0.5)
        .requires_grad_(train_head)
    )
    hidden = torch.randn(tokens, hidden_size, generator=generator).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    # libraries and buffers are loaded here
    logprobs.linear_logprobs(hidden[:2], weight, targets[:2], chunk=2)[0].sum().backward()
    hidden.grad = weight.grad = None
    before = status("VmRSS")
    # resets VmHWM
    Path("/proc/self/clear_refs").write_text("5")
    if kind == "chunked":
        logp = logprobs.linear_logprobs(hidden, weight, targets, chunk=chunk)[0]
    else:
        logp = (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logp.mean().backward()
    return {
        "peak": status("VmHWM") - before,
        "logp": float(logp.mean()),
        "gradient": float(hidden.grad.norm()),
    }


def compare_heads(flags) -> None:
    for train_head in (False, True):
        results = {}
        for name, chunk in [("naive", 0)] + [("chunked", chunk) for chunk in flags.chunk]:
            command = [
                sys.executable,
                __file__,
                "--head",
                name,
                "--tokens",
                str(flags.tokens),
                "--vocabulary",
                str(flags.vocabulary),
                "--hidden",
                str(flags.hidden),
                "--chunk",
                str(chunk),
            ] + ["--train_head"] * train_head
            results[name, chunk] = json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
        naive = results.pop(("naive", 0))
        weight_gradient = flags.vocabulary * flags.hidden * 4 / 2**20 if train_head else 0.0
        print(
            f"{flags.tokens} tokens, vocabulary {flags.vocabulary}, hidden {flags.hidden}, "
            f"head {'trained' if train_head else 'fixed'}: "
            f"naive {naive['peak']:.0f} MiB"
            + (f", of which the weight's gradient {weight_gradient:.0f}" if weight_gradient else "")
        )
        for (_, chunk), chunked in results.items():
            assert (
                abs(chunked["logp"] - naive["logp"]) < 1e-4
                and abs(chunked["gradient"] / naive["gradient"] - 1) < 1e-4
            )
            beyond = (naive["peak"] - weight_gradient) / max(
                chunked["peak"] - weight_gradient, 1e-9
            )
            print(
                f"  chunks of {chunk:5d}: {chunked['peak']:6.0f} MiB, "
                f"1/{naive['peak'] / chunked['peak']:.1f} of naive"
                + (f"; without the gradient 1/{beyond:.1f}" if weight_gradient else ""),
                flush=True,
            )


def toy_growth(steps: int, work: Path) -> None:
    """Peak of the resident memory of the embedded toy along a run without evaluations but with
    records and checkpoints."""
    folder = ROOT / TOY_FOLDERS["questions"]
    write_if_missing(f"{folder}/model")
    flags = [
        "--config",
        str(folder / "args.json"),
        "--steps",
        str(steps),
        "--eval_every",
        "0",
        "--save_every",
        "50",
        "--out",
        str(work / "run"),
    ]
    subprocess.run(
        [sys.executable, str(ROOT / "train_ppo_vl.py"), *flags],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lines = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    resident = {
        line["step"]: line["perf/peak_memory_gib"] * 1024
        for line in lines
        if "perf/peak_memory_gib" in line
    }
    at_steps = sorted({s for s in (1, 5, 10, 20, 50, 100, 150, steps) if s <= steps})
    print(
        "toy, peak resident MiB up to step: "
        + "  ".join(f"{s}: {resident[s]:.1f}" for s in at_steps)
    )
    first = min(20, steps)
    middle = (steps + first) // 2
    print(
        f"growth from step {first} to {steps}: {100 * (resident[steps] / resident[first] - 1):.2f} %, "
        f"from {middle} to {steps}: {100 * (resident[steps] / resident[middle] - 1):.2f} %"
    )


class Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def live_memory() -> dict[str, float]:
    """Tensors, and MiB by who holds them."""
    gc.collect()
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = Mallinfo2
    storages, count = {}, 0
    for thing in gc.get_objects():
        if (
            issubclass(type(thing), torch.Tensor)
            and type(thing).__name__ != "DTensor"
            and not thing.is_meta
        ):
            count += 1
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    heap = mallinfo2()
    unit = 2**20
    return {
        "tensors": count,
        "tensor MiB": sum(storages.values()) / unit,
        "in use": (heap.uordblks + heap.hblkhd) / unit,
        "kept free": heap.fordblks / unit,
        "resident": status("VmRSS"),
        "peak": status("VmHWM"),
    }


def watch_run(steps: int, arguments: list[str]) -> None:
    """Run the script with these flags, and print what is live after its steps 1, 2, 5, 10, 20, 50, ..."""
    import train_ppo_vl as ppo

    report, terminal = ppo.report, sys.stdout
    names = ("tensors", "tensor MiB", "in use", "kept free", "resident", "peak")
    print("  ".join(f"{name:>10}" for name in ("step", *names)), flush=True)

    def counted(log, batch, state, *rest) -> None:
        report(log, batch, state, *rest)
        if state.step in (1, 2, 5, 10, 20, 50, 100, 150, 200, steps):
            counts = live_memory()
            line = [f"{state.step:10d}", *(f"{counts[name]:10.1f}" for name in names)]
            print("  ".join(line), file=terminal, flush=True)

    ppo.report = counted
    with tempfile.TemporaryDirectory() as work, open(Path(work) / "told", "w") as told:
        without = [
            "--eval_every",
            "0",
            "--save_every",
            "0",
            "--export_every",
            "0",
            "--out",
            str(Path(work) / "run"),
        ]
        with contextlib.redirect_stdout(told):
            ppo.main([*arguments, "--steps", str(steps), *without])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=1024, help="response tokens; 0: leave the head out"
    )
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument(
        "--chunk",
        type=int,
        nargs="+",
        default=[64, 128, 256, 1024],
        help="tokens whose logits exist together",
    )
    parser.add_argument("--steps", type=int, default=200, help="of the toy; 0: leave it out")
    # the child processes
    parser.add_argument("--head", choices=("naive", "chunked"), help=argparse.SUPPRESS)
    parser.add_argument("--train_head", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--live", action="store_true", help="count what is live in a run with the flags behind --"
    )
    parser.add_argument("run", nargs="*", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.live:
        torch.set_num_threads(1)
        watch_run(flags.steps, flags.run)
        return
    if flags.head:
        torch.set_num_threads(1)
        print(
            json.dumps(
                measure_head(
                    flags.head,
                    flags.tokens,
                    flags.vocabulary,
                    flags.hidden,
                    flags.chunk[0],
                    flags.train_head,
                )
            )
        )
        return
    if flags.tokens:
        compare_heads(flags)
    if flags.steps:
        with tempfile.TemporaryDirectory() as work:
            toy_growth(flags.steps, Path(work))


if __name__ == "__main__":
    main()
