"""End to end against TRL's GRPOTrainer: samples per process CPU second of whole steps, one thread,
alternated.

    # speed, responses of --response_tokens
    python tests/benchmarks/trl.py [--size tiny|5m|20m] [--image_tokens 16|144]
    python tests/benchmarks/trl.py --ragged      # lengths from the table of rollout.py
    python tests/benchmarks/trl.py --learning    # mean reward on the toy after equal samples

Both train the same Qwen2.5-VL checkpoint by GRPO on the same rows with the same number of samples,
response length, learning rate, clip, one epoch and frozen vision tower; TRL's gradient
checkpointing is off, its dataloader in the process, its log-prob head its own. The peer runs in an
environment of its own that sees this one's packages; the script makes it once, in --env, by the
commands it prints:

    python -m venv ENV; <site-packages of this python> into ENV/.../shared.pth
    ENV/bin/python -m pip install trl==1.16.0

TRL loads Qwen2.5-VL's processor through torchvision, for videos; here the processor is the family's
own class without its video part. CPU seconds are those of a step: rollout, rewards, update and
logging, without start-up and the first step."""

import argparse
import json
import os
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ratios of CPU seconds hold on one thread only

ROOT = Path(__file__).resolve().parents[2]
TRL = "trl==1.16.0"
SAMPLES = 8  # per prompt
PROMPT_WORDS = {16: 58, 144: 50}  # more than the question has: prompts of 90 and 210 tokens


def make_environment(folder: Path) -> Path:
    """The peer's interpreter; made once, with this environment's torch and transformers."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        packages = (
            folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        )
        install = [str(python), "-m", "pip", "install", "--quiet", TRL]
        print(
            f"{sys.executable} -m venv {folder}",
            f"echo {site.getsitepackages()[0]} > {packages / 'shared.pth'}",
            " ".join(install),
            sep="\n",
        )
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (packages / "shared.pth").write_text(site.getsitepackages()[0] + "\n")
        # Pinned, or the peer would be given another torch than ours.
        versions = subprocess.run(
            [sys.executable, "-m", "pip", "freeze"], capture_output=True, text=True, check=True
        ).stdout
        pins = folder / "constraints.txt"
        pins.write_text(
            "".join(
                f"{line}\n"
                for line in versions.splitlines()
                if line.startswith(("torch==", "transformers=="))
            )
        )
        subprocess.run([*install, "--constraint", str(pins)], check=True)
        (folder / "complete").touch()
    return python


# ------------------------------------------------------------------------------------------------
# The two trainers, each in a process of its own; CPU seconds per step go to a file
# ------------------------------------------------------------------------------------------------


def run_ours(task: dict, out: Path) -> None:
    """The script's `main` on the task; its own record of a step is where the clock is read."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "benchmarks")]
    import torch

    import rollout
    import train_ppo_vl as ppo
    from common import logging

    if task.get("lengths"):
        rollout.give_lengths(torch.tensor(task["lengths"]))
    steps, record = [], logging.RunLogger.step

    def record_and_stamp(logger, step, metrics, columns):
        record(logger, step, metrics, columns)
        steps.append(
            {
                "cpu": time.process_time(),
                "reward": metrics["rollout/reward"],
                "length": metrics["rollout/response_length"],
            }
            | {name: value for name, value in metrics.items() if name.endswith("_seconds")}
        )

    logging.RunLogger.step = record_and_stamp
    began = time.process_time()
    ppo.main(
        [
            "--model",
            task["model"],
            "--data",
            task["data"],
            "--reward",
            "exact",
            "--advantage",
            "grpo",
            "--prompts_per_step",
            str(task["prompts"]),
            "--samples_per_prompt",
            str(SAMPLES),
            "--minibatches",
            str(task["minibatches"]),
            "--steps",
            str(task["steps"]),
            "--actor_lr",
            str(task["lr"]),
            "--adam_beta2",
            "0.999",
            "--max_prompt_tokens",
            "512",
            "--max_new_tokens",
            str(task["longest"]),
            "--min_new_tokens",
            str(task["shortest"]),
            "--max_tokens_per_pack",
            str(task["pack"]),
            "--save_every",
            "0",
            "--export_every",
            "0",
            "--eval_every",
            "0",
            "--out",
            task["out"],
            "--seed",
            str(task["seed"]),
        ]
    )
    out.write_text(json.dumps({"began": began, "steps": steps}))


def run_peer(task: dict, out: Path) -> None:
    """GRPOTrainer on the task."""
    import inspect

    import datasets
    import torch
    from PIL import Image
    from transformers import (
        AutoModelForImageTextToText,
        AutoTokenizer,
        LogitsProcessor,
        LogitsProcessorList,
        TrainerCallback,
    )
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from trl import GRPOConfig, GRPOTrainer

    class PictureProcessor(Qwen2_5_VLProcessor):
        """Its attributes are what `__init__` names: without the video processor, which needs torchvision."""

        def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
                [self.image_token, self.video_token]
            )
            super(Qwen2_5_VLProcessor, self).__init__(
                image_processor, tokenizer, chat_template=chat_template
            )

    def exact(completions, answer, **_):
        texts = [c[0]["content"] for c in completions]
        return [
            float(" ".join(text.lower().split()) == " ".join(a.lower().split()))
            for text, a in zip(texts, answer)
        ]

    torch.set_num_threads(1)
    folder = Path(task["data"]).parent
    rows = [json.loads(line) for line in Path(task["data"]).read_text().splitlines()]
    # The pictures of the same rows; TRL puts the image in front of the text, as our loader does.
    data = datasets.Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "answer": row.get("answer") or "",
                "images": [Image.open(folder / name).convert("RGB") for name in row["images"]],
            }
            for row in rows
        ]
    )
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    processor = PictureProcessor(
        Qwen2VLImageProcessorPil.from_pretrained(task["model"]),
        tokenizer,
        chat_template=tokenizer.chat_template,
    )
    model = AutoModelForImageTextToText.from_pretrained(task["model"])
    model.model.visual.requires_grad_(False)
    steps = []

    class EndAt(LogitsProcessor):
        """Responses of the given lengths: the end token there and not before."""

        def __init__(self, lengths: list[list[int]]):
            self.lengths, self.start = torch.tensor(lengths).flatten(), None

        def __call__(self, input_ids, scores):
            if self.start is None:
                self.start = input_ids.shape[1]
            end, last = tokenizer.eos_token_id, input_ids.shape[1] - self.start + 1 >= self.lengths
            forced = torch.full_like(scores, -torch.inf)
            forced[:, end] = 0.0
            scores[:, end] = -torch.inf
            return torch.where(last[:, None], forced, scores)

    if task.get("lengths"):
        generate = model.generate
        model.generate = lambda *args, **options: generate(
            *args, **options, logits_processor=LogitsProcessorList([EndAt(task["lengths"])])
        )

    class Stamp(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "reward" in logs:
                steps.append(
                    {
                        "cpu": time.process_time(),
                        "reward": logs["reward"],
                        "length": logs["completions/mean_length"],
                    }
                )

    size = task["prompts"] * SAMPLES // task["minibatches"]
    options = dict(
        output_dir=task["out"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=1,
        steps_per_generation=task["minibatches"],
        num_generations=SAMPLES,
        max_completion_length=task["longest"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        optim="adamw_torch",
        seed=task["seed"],
        max_steps=task["steps"] * task["minibatches"],
        logging_steps=task["minibatches"],
        save_strategy="no",
        report_to="none",
        generation_kwargs={"min_new_tokens": task["shortest"]} if task["shortest"] else {},
        log_completions=False,
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    known = inspect.signature(GRPOConfig).parameters
    if unknown := sorted(set(options) - set(known)):
        raise SystemExit(
            f"this TRL has no {', '.join(unknown)}; the benchmark is written for {TRL}"
        )
    began = time.process_time()
    GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=GRPOConfig(**options),
        train_dataset=data,
        processing_class=processor,
        callbacks=[Stamp()],
    ).train()
    out.write_text(json.dumps({"began": began, "steps": steps}))


# ------------------------------------------------------------------------------------------------
# Comparison
# ------------------------------------------------------------------------------------------------


def launch(who: str, python: Path | str, task: dict, work: Path) -> dict:
    """One run of a side in a process of its own. -P: this file's folder must not stand in for the
    package of its name."""
    out = work / f"{who}-{time.time_ns()}"
    file = out.with_suffix(".json")
    flags = ["--side", who, "--task", json.dumps(task | {"out": str(out)}), "--result", str(file)]
    done = subprocess.run([str(python), "-P", __file__, *flags], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{who}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return json.loads(file.read_text())


def speed(flags, python: Path, work: Path) -> None:
    """Steps on random weights and random pictures; the responses of both sides have the same lengths."""
    sys.path[:0] = [str(ROOT / "tests" / "benchmarks")]
    import rollout

    rollout.write_task(
        work, flags.size, flags.image_tokens, flags.prompts, words=flags.prompt_words
    )
    lengths = rollout.length_table(flags.prompts).tolist() if flags.ragged else []
    longest = max(map(max, lengths), default=flags.response_tokens)
    mean = sum(map(sum, lengths)) / (flags.prompts * SAMPLES) if lengths else longest
    rows = [json.loads(line) for line in (work / "rows.jsonl").read_text().splitlines()]
    (work / "rows.jsonl").write_text("\n".join(json.dumps(row | {"answer": "2"}) for row in rows))
    task = {
        "model": str(work / "model"),
        "data": str(work / "rows.jsonl"),
        "prompts": flags.prompts,
        "minibatches": 1,
        "steps": flags.steps,
        "lr": 1e-5,
        "longest": longest,
        "shortest": 0 if lengths else longest,
        "lengths": lengths,
        "pack": 4096,
        "seed": 0,
    }
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    stages: dict[str, float] = {}
    for _ in range(flags.repeats):
        for who, interpreter in (("ours", sys.executable), ("trl", python)):
            steps = launch(who, interpreter, task, work)["steps"]
            assert len(steps) == flags.steps and all(
                abs(step["length"] - mean) < 1e-3 for step in steps
            ), steps
            seconds[who] += [
                later["cpu"] - earlier["cpu"] for earlier, later in zip(steps, steps[1:])
            ]
            if who == "ours":
                stages = {
                    name: min(step[name] for step in steps[1:])
                    for name in steps[-1]
                    if name.startswith("perf/")
                }
    count = flags.prompts * SAMPLES
    best = {who: min(values) for who, values in seconds.items()}
    for who, values in seconds.items():
        print(
            f"{who:5s} {count / best[who]:8.2f} samples per CPU second   "
            f"(CPU seconds of steps: {', '.join(f'{v:.2f}' for v in values)})"
        )
    print(
        f"ratio {best['trl'] / best['ours']:8.2f}   {flags.size}, "
        f"{flags.image_tokens} image tokens, {count} samples of "
        f"{mean:.0f} tokens{f', the longest {longest},' if lengths else ''} a step"
    )
    print(
        "ours, wall seconds of stages: "
        + "  ".join(f"{name[5:-8]} {value:.2f}" for name, value in stages.items() if value >= 0.005)
    )


def learning(flags, python: Path, work: Path) -> None:
    """The embedded toy with its own flags but for a critic: 32 prompts x 8 samples in 4 updates a step."""
    toy = ROOT / "toy"
    if not (toy / "args.json").exists():
        subprocess.run(
            [sys.executable, str(ROOT / "launch" / "toy.py"), "--out", str(toy)], check=True
        )
    task = {
        "model": str(toy / "model"),
        "data": str(toy / "train.jsonl"),
        "prompts": 32,
        "minibatches": 4,
        "steps": flags.steps,
        "lr": 3e-4,
        "longest": 4,
        "shortest": 0,
        "pack": 4096,
    }
    curves: dict[str, list] = {"ours": [], "trl": []}
    for seed in range(flags.repeats):
        for who, interpreter in (("ours", sys.executable), ("trl", python)):
            curves[who].append(launch(who, interpreter, task | {"seed": seed}, work)["steps"])
    print(
        f"mean reward of the step's samples, mean of {flags.repeats} seeds; {32 * SAMPLES} samples a step"
    )
    for at in sorted({0, *range(4, flags.steps, 5), flags.steps - 1}):
        means = {
            who: sum(curve[at]["reward"] for curve in runs) / len(runs)
            for who, runs in curves.items()
        }
        print(
            f"  step {at + 1:3d}  "
            + "  ".join(f"{who} {value:.3f}" for who, value in means.items())
        )
    for who, runs in curves.items():
        cpu = min((curve[-1]["cpu"] - curve[0]["cpu"]) / (flags.steps - 1) for curve in runs)
        print(f"{who:5s} {32 * SAMPLES / cpu:8.1f} samples per CPU second")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("tiny", "5m", "20m"), default="5m")
    parser.add_argument("--image_tokens", type=int, choices=(16, 144), default=144)
    parser.add_argument(
        "--prompt_words",
        type=int,
        help="besides the question; default: prompts of 90 or 210 tokens",
    )
    parser.add_argument("--response_tokens", type=int, default=64)
    parser.add_argument(
        "--ragged",
        action="store_true",
        help="lengths of the log-normal table of rollout.py instead",
    )
    parser.add_argument("--prompts", type=int, default=8, help="per step, with 8 samples each")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs of each side (--learning: seeds)"
    )
    parser.add_argument(
        "--learning", action="store_true", help="compare rewards on the toy instead"
    )
    parser.add_argument(
        "--env",
        type=Path,
        default=Path.home() / ".cache" / "ppo-vl-benchmarks" / "trl",
        help="the peer's environment",
    )
    # the two child processes
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.side:
        (run_ours if flags.side == "ours" else run_peer)(flags.task, flags.result)
        return
    if flags.prompt_words is None:
        flags.prompt_words = PROMPT_WORDS[flags.image_tokens]
    python = make_environment(flags.env)
    from machine import machine  # not in the children, which are started with -P

    print(machine())
    with tempfile.TemporaryDirectory() as work:
        (learning if flags.learning else speed)(flags, python, Path(work))


if __name__ == "__main__":
    main()
