"""Where the time of the toy goes: a step by operators and stages, its share outside model arithmetic, and start-up by phases.

    python tests/benchmarks/host.py [--steps 12]

The step. torch.profiler times the operators of the last two steps, and what the main thread does is divided: inside an
operator of the model's own arithmetic (matrix products, attention, norms, activations and their backward, the optimizer),
inside any other operator (indexing, copies, masks, noise, bookkeeping), inside FSDP and collectives, or in no operator
(python, files, waiting). The profiler inflates small operators and python, so its shares are upper bounds of what lies outside
the arithmetic. Another run, without it, looks 500 times a second at the main thread's stack and clock: CPU seconds by function
and line.

Start-up. A fresh process stamps `main`'s stages: imports, arguments and process group, data, models, optimizers. The
evaluation before training is counted apart.
"""

import argparse
import importlib
import json
import linecache
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds of this process."""
    return time.perf_counter(), time.process_time()


BORN = clocks()[0], 0.0
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
TOY = ["--config", str(ROOT / "toy" / "args.json")]

# Leaf operators that are the model's own arithmetic, forward and backward; whatever they call belongs to them.
ARITHMETIC = re.compile(
    r"aten::(addmm|mm|bmm|matmul|linear|scaled_dot_product|_scaled_dot_product|_softmax|softmax|_log_softmax|logsumexp"
    r"|silu|gelu|rsqrt|embedding|convolution|conv3d|_fused_adamw|_foreach|pow|mean)|"
    r"(Mm|Addmm|Bmm|Linear|ScaledDotProduct\w*|Silu|Gelu|Rsqrt|Embedding|Pow|Mean|Convolution)Backward"
    r"|_ChunkedHead|Optimizer\.step"
)
# For the look at the stack: functions and lines that do nothing but compute the models, their gradients and updates.
MODEL_FUNCTIONS = ("hidden_states", "image_features", "logits_fp32", "linear_logprobs")
MODEL_CALLS = (".backward()", "optimizer.step()", "clip_grad_norm_(")
WAITING = re.compile(r"gloo|c10d::|record_param_comms|all_gather|all_reduce|reduce_scatter|broadcast|FSDP::")


def classify(events) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of the main thread by class, and self time by operator; a child of an arithmetic operator is arithmetic."""
    classes: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    stages = {"rollout", "reward", "score", "advantages", "update_actor", "update_critic", "data", "ProfilerStep*"}

    def visit(event, inherited: str | None) -> None:
        kind = inherited
        if kind is None and event.name not in stages:
            kind = "arithmetic" if ARITHMETIC.search(event.name) else "collectives" if WAITING.search(event.name) else None
        own = event.self_cpu_time_total
        if event.name not in stages:
            classes[kind or "other operators"] += own
            names[("" if kind == "arithmetic" else "* ") + event.name] += own
        for child in event.cpu_children:
            visit(child, kind)

    for event in events:
        if event.cpu_parent is None:
            visit(event, None)
    return classes, names


def profile_steps(steps: int, work: Path) -> None:
    import torch

    import train_ppo_vl as ppo
    from common import logging

    record, ends = logging.RunLogger.step, []
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def record_and_profile(logger, step, metrics, shown):
        record(logger, step, metrics, shown)
        ends.append((time.perf_counter(), metrics))
        if step == steps - 2:
            profiler.__enter__()
        elif step == steps:
            profiler.__exit__(None, None, None)

    logging.RunLogger.step = record_and_profile
    ppo.main(
        [*TOY, "--steps", str(steps), "--eval_every", "0", "--save_every", "0", "--export_every", "0", "--out", str(work / "run")]
    )
    plain = [later[0] - earlier[0] for earlier, later in zip(ends[2:steps - 2], ends[3:steps - 2])]
    step_seconds, profiled = statistics.median(plain), ends[-1][0] - ends[-3][0]
    classes, names = classify(profiler.events())
    inside = sum(classes.values()) / 1e6
    classes["no operator: python, files, waiting"] = max(0.0, profiled - inside) * 1e6
    print(
        f"a step of the toy: {step_seconds:.3f} s (median of {len(plain)} without the profiler; {profiled / 2:.3f} s with it)"
    )
    stages = {
        name: statistics.median(end[1][name] for end in ends[2 : steps - 2])
        for name in ends[-1][1]
        if name.endswith("_seconds")
    }
    print("stages, seconds: " + "  ".join(f"{name[5:-8]} {value:.3f}" for name, value in stages.items() if value >= 0.0005))
    print(f"outside the stages (samples, records, checkpoints): {step_seconds - stages['perf/step_seconds']:.3f} s")
    for name, value in sorted(classes.items(), key=lambda item: -item[1]):
        print(f"  {100 * value / 1e6 / profiled:5.1f} %  {name}")
    print(
        f"outside model arithmetic: {100 - 100 * classes['arithmetic'] / 1e6 / profiled:.1f} % of the profiled time "
        "(the profiler "
        "inflates many small operators and python most)"
    )
    print("operators by self time, two steps (* not the model's arithmetic):")
    for name, value in sorted(names.items(), key=lambda item: -item[1])[:24]:
        print(f"  {value / 1e3:8.1f} ms  {name}")


def sample_python(steps: int, work: Path) -> None:
    """The lines of the project in which the main thread spends its CPU seconds: 500 looks a second, no profiler."""
    import threading

    import train_ppo_vl as ppo
    from common import logging

    found: dict[str, float] = defaultdict(float)
    lines: dict[str, float] = defaultdict(float)
    main_thread, running, total, inside = threading.main_thread().ident, [False], [0.0], [0.0]
    clock = time.pthread_getcpuclockid(main_thread)
    own = (str(ROOT / "train_ppo_vl.py"), str(ROOT / "common"))

    def watch():
        last = time.clock_gettime(clock)
        while not over.wait(0.002):
            frame = sys._current_frames().get(main_thread)
            now = time.clock_gettime(clock)
            used, last = now - last, now
            if not running[0] or frame is None:
                continue
            total[0] += used
            seen = set()
            leaf, in_model = True, False
            while frame is not None:
                if frame.f_code.co_filename.startswith(own):
                    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                    in_model |= frame.f_code.co_name in MODEL_FUNCTIONS or any(call in line for call in MODEL_CALLS)
                    name = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
                    seen.add(name)
                    if leaf:
                        lines[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_qualname}"] += used
                    leaf = False
                frame = frame.f_back
            inside[0] += used * in_model
            for name in seen:
                found[name] += used

    over, flags = threading.Event(), ["--eval_every", "0", "--save_every", "0", "--export_every", "0"]
    watcher = threading.Thread(target=watch)       # not a daemon: one that still looks while python ends aborts the process
    watcher.start()
    record = logging.RunLogger.step

    def record_and_watch(logger, step, metrics, shown):
        record(logger, step, metrics, shown)
        running[0] = 2 <= step < steps

    logging.RunLogger.step = record_and_watch
    try:
        ppo.main([*TOY, "--steps", str(steps), *flags, "--out", str(work / "looks")])
    finally:
        over.set()
        watcher.join()
    print(f"CPU seconds of the main thread by function, callees included (of {total[0] / (steps - 2):.3f} a step):")
    print(f"  {100 * inside[0] / total[0]:5.1f} %  inside forward and backward passes and the optimizer, with FSDP's hooks there")
    for name, count in sorted(found.items(), key=lambda item: -item[1])[:30]:
        print(f"  {100 * count / total[0]:5.1f} %  {name}")
    print("innermost lines of the project:")
    for name, count in sorted(lines.items(), key=lambda item: -item[1])[:20]:
        print(f"  {100 * count / total[0]:5.1f} %  {name}")


def time_startup(work: Path) -> None:
    """Phases of one start in this fresh process: imports, then the stages that `main` calls."""
    sys.argv = ["train_ppo_vl.py"]
    importlib.import_module("torch")
    torch_done = clocks()
    for name in ("torch.distributed.checkpoint", "torch.distributed.fsdp", "transformers.models.auto.modeling_auto"):
        importlib.import_module(name)
    others_done = clocks()
    import train_ppo_vl as ppo
    from common import distributed
    from common.model import checkpoint
    stamps = []

    def stamp(name, began):
        stamps.append((name, *(now - then for now, then in zip(clocks(), began))))

    stamp("the project's modules and what they import", others_done)
    stamps[:0] = [("python and torch", *(b - a for a, b in zip(BORN, torch_done))),
                  ("FSDP, checkpoint and transformers", *(b - a for a, b in zip(torch_done, others_done)))]

    def timed(name, owner=ppo):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            began = clocks()
            result = function(*args, **kwargs)
            stamp(name, began)
            return result
        setattr(owner, name, call)

    for name in ("parse_args", "load_rows", "build_models", "load_models", "make_trainables", "open_log", "evaluate"):
        timed(name)
    timed("start", distributed)
    timed("resume", checkpoint.Checkpoints)
    ppo.main([*TOY, "--steps", "1", "--save_every", "0", "--export_every", "0", "--out", str(work / "start")])
    evaluation = next(i for i, entry in enumerate(stamps) if entry[0] == "evaluate")  # the first; all before it is start-up
    print(json.dumps(stamps[:evaluation + 1]))


def main() -> None:
    from common.flags import embedded_toy

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--startup", action="store_true", help=argparse.SUPPRESS)          # the child process
    parser.add_argument("--looks", action="store_true", help=argparse.SUPPRESS)            # another
    flags = parser.parse_args()
    embedded_toy("questions", "args.json")  # written where it is absent
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if flags.startup:
            time_startup(work)
            return
        if flags.looks:
            sample_python(flags.steps, work)
            return
        found = subprocess.run([sys.executable, __file__, "--startup"], capture_output=True, text=True, check=True).stdout
        *stamps, evaluation = json.loads(found.splitlines()[-1])
        totals = [[sum(entry[clock] for entry in part) for clock in (1, 2)] for part in (stamps[:3], stamps[3:])]
        print(
            "start-up, wall (CPU) seconds: imports {:.2f} ({:.2f}), ours {:.2f} ({:.2f}); then the evaluation before training "
            "{:.2f} ({:.2f})".format(*totals[0], *totals[1], *evaluation[1:])
        )
        for name, wall, cpu in stamps:
            print(f"  {wall:6.2f} ({cpu:5.2f})  {name}")
        profile_steps(flags.steps, work)
        subprocess.run(
            [sys.executable, __file__, "--looks", "--steps", str(flags.steps)], check=True, stderr=subprocess.DEVNULL
        )


if __name__ == "__main__":
    main()
