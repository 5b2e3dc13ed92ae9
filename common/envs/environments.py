"""An environment that answers the policy: --env, a class like Gymnasium's, one object per sample.

    reset(row) -> None or a first observation
    step(text) -> (reply or None, reward, done)
    close()       optional

A reply or observation is a text, a picture of Pillow's, a pathlib.Path of one, or a list of these.
A reward is a number, or {"reward": number, "accuracy": number}.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy as np

from common.buffers import ROLES
from common.data.processor import Processor
from common.data.rows import Prompt
from common.distributed import UserError
from common.envs.replies import check_template
from common.flags import EnvArgs, absolute, load_object


@dataclass(frozen=True)
class Environment:
    """The class of --env, what it says of itself, and the limits of its conversations."""

    make: Callable[[], Any]
    role: str  # of its messages
    shared: bool  # whether the first observation is the same for all samples of a prompt
    pictures: bool  # whether what it says may hold pictures
    args: EnvArgs
    max_prompt_tokens: int  # with a first observation

    def check_model(self, processor: Processor) -> None:
        """Raises UserError: the checkpoint's template cannot express its messages."""
        try:
            check_template(processor, self.role, self.pictures)
        except ValueError as error:
            hint = ""
            if self.pictures:
                hint = "; if the class never shows pictures, set pictures = False in it"
            raise UserError(
                f"--env {self.args.env} does not work with this model: {error}{hint}"
            ) from error


class Step(NamedTuple):
    """What `step` has returned."""

    reply: Any  # None: nothing
    reward: float
    accuracy: float | None  # None: it says none
    done: bool


def load(args: EnvArgs, max_prompt_tokens: int) -> Environment | None:
    """The environment of --env; None without. Raises UserError: no class, or one that lacks what it
    needs."""
    if not args.env:
        return None
    made = load_object("--env", args.env, "an existing path.py:Class")
    missing = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
    if missing:
        raise UserError(
            f"--env {args.env}: {made!r:.80} has no method {missing[0]!r}; see launch/README.md"
        )
    try:
        inspect.signature(made).bind()
        inspect.signature(made.reset).bind("self", "row")
        inspect.signature(made.step).bind("self", "text")
    except TypeError as error:
        raise UserError(
            f"--env {args.env}: it is made without arguments, and called as reset(row) and "
            f"step(text): {error}"
        ) from error
    role = getattr(made, "role", "user")
    if role not in ROLES:
        raise UserError(f"--env {args.env}: role is {role!r}, not one of {', '.join(ROLES)}")
    shared, pictures = getattr(made, "shared", False), getattr(made, "pictures", True)
    return Environment(made, role, bool(shared), bool(pictures), args, max_prompt_tokens)


def absolute_env(spec: str) -> str:
    """--env as it can be read from any folder."""
    path, _, name = spec.rpartition(":")
    return f"{absolute(path)}:{name}" if spec else ""


def env_row(row: Prompt, seed: tuple[int, ...], number: int) -> dict[str, Any]:
    """What `reset` gets: all columns of the row, its folder, a seed that the samples of a prompt
    share, and the sample's number among them."""
    (word,) = np.random.SeedSequence(seed).generate_state(1)
    return dict(row.row) | {"folder": row.folder, "seed": int(word), "number": number}


def read_step(returned: Any) -> Step:
    """Raises ValueError: `step` returned anything else than it may."""
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise ValueError(f"step must return (reply or None, reward, done), not {returned!r:.200}")
    reply, reward, done = returned
    earned = reward if isinstance(reward, dict) else {"reward": reward}
    if "reward" not in earned or earned.keys() - {"reward", "accuracy"}:
        raise ValueError(
            'step must return a number as the reward, or {"reward": number, "accuracy": number}, '
            f"not {reward!r:.200}"
        )
    numbers = {name: read_number(name, value) for name, value in earned.items()}
    if reply is None and not done:
        raise ValueError("step returned no reply, and is not done")
    return Step(reply, numbers["reward"], numbers.get("accuracy"), bool(done))


def read_number(name: str, value: Any) -> float:
    """Raises ValueError: not a finite number."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"step returned the {name} {value!r:.80}, not a finite number")
    return float(value)
