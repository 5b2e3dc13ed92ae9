"""flash-linear-attention's own kernels, on a CPU in Triton's interpreter, against `padded_rule`.

    TRITON_INTERPRET=1 FLA_DISABLE_BACKEND_DISPATCH=1 python tests/fla_interpreter.py

Prints, as JSON, the largest errors of outputs and gradients, relative to the largest entry. The rows share
prompts, and heads of keys are fewer than those of values. Triton and fla-core have to be there; of the
latter a copy that `prepare` has changed."""

import json
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.model import linear_attention
from common.model.linear_attention import PackedDelta

# a prompt of two chunks of 64 tokens, and two responses, each within one
SEGMENTS = [(0, 70, 0, 0), (70, 90, 0, 70), (90, 130, 0, 70)]
KEY_HEADS, HEADS, DIM = 1, 2, 16
NAMES = ("output", "q", "k", "v", "decay", "strength")


def prepare(package: Path, folder: Path) -> None:
    """Copy fla into a folder of its own, where loop variables, which are Python's in the interpreter, are
    not asked for their type."""
    shutil.copytree(package, folder / "fla", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (folder / "fla" / "ops" / "common").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("= i_t.to(tl.int64)", "= i_t"), encoding="utf-8")


def without_autotuning() -> None:
    """Each kernel runs in its first configuration."""
    from triton.runtime.autotuner import Autotuner

    def run(self, *args, **named):
        return self.fn.run(*args, **named | self.configs[0].kwargs)

    Autotuner.run = run


def mixed(rule) -> list[torch.Tensor]:
    """Outputs of a pack, and the gradients of its inputs, by this rule."""
    linear_attention.choose_rule = lambda *_: rule
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(SEGMENTS[-1][1], *shape, generator=generator)

    q, k, v = random(KEY_HEADS, DIM), random(KEY_HEADS, DIM), random(HEADS, DIM)
    decay, strength = -0.1 * random(HEADS).sigmoid(), random(HEADS).sigmoid()
    inputs = [x.requires_grad_() for x in (q, k, v, decay, strength)]
    out = PackedDelta(SEGMENTS, torch.device("cpu")).recur(0, *inputs)
    (out * random(HEADS, DIM)).sum().backward()
    return [out.detach(), *[x.grad for x in inputs]]


def main() -> None:
    without_autotuning()
    expected = mixed(linear_attention.padded_rule)
    actual = mixed(linear_attention.fla_rule)
    errors = {}
    for name, ours, theirs in zip(NAMES, actual, expected, strict=True):
        errors[name] = float((ours - theirs).abs().max() / theirs.abs().max())
    print(json.dumps(errors))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
