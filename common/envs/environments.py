"""An environment that answers the policy: --env, a class like Gymnasium's, one object per sample.

    reset(row) -> None or a first observation
    step(text) -> (reply or None, reward, done)
    close()       optional

A reply or observation is a text, a Pillow image, a pathlib.Path of an image, or a list of these.
A reward is a number, or {"reward": number, "accuracy": number}.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from common import distributed
from common.buffers import REPLY_ROLES, Conversation
from common.data.processor import Processor
from common.data.rows import Prompt
from common.envs.replies import encode_reply, read_parts
from common.flags import LONGEST_WAIT, flag
from common.ground.files import UserError
from common.sampling import Environment
from common.user_code import load_class


@dataclass(frozen=True)
class EnvArgs:
    """environment"""

    env: str = flag(
        "",
        "file.py:Class of an environment that answers the policy's turns (launch/README.md); empty: "
        "responses have one turn",
        paths=True,
    )
    max_turns: int = flag(8, "turns of the policy in a sample with an environment", low=1)
    max_reply_tokens: int = flag(
        1024,
        "tokens of all replies of an environment in a sample; --max_new_tokens counts the policy's "
        "own over all turns",
        low=1,
    )
    env_timeout: float = flag(
        60.0,
        "longest time of one call of an environment (reset, step or close), seconds",
        low=1e-6,
        high=LONGEST_WAIT,
    )
    env_workers: int = flag(
        8,
        "environments of a rank that compute at the same time, while other samples go on; 0: one after the "
        "other, so that runs repeat bit for bit",
    )


class Step(NamedTuple):
    """What a call of `step` returned."""

    reply: Any  # None: no reply
    reward: float
    accuracy: float | None  # None: not reported
    done: bool


def load_environment(args: EnvArgs, max_prompt_tokens: int) -> Environment | None:
    """The environment of --env; None without the flag. Raises UserError: there is no such class, or
    it cannot serve as an environment."""
    if not args.env:
        return None
    of = load_class("--env", args.env)
    role = of.says["role"]
    if role not in REPLY_ROLES:
        raise UserError(f"--env {args.env}: role is {role!r}, not one of {', '.join(REPLY_ROLES)}")
    return Environment(
        args.env,
        of,
        role,
        shows_images=bool(of.says["pictures"]),
        max_turns=args.max_turns,
        max_reply_tokens=args.max_reply_tokens,
        timeout=args.env_timeout,
        workers=args.env_workers,
        max_prompt_tokens=max_prompt_tokens,
        sees_cut_turns=bool(of.says["cut_turns"]),
    )


def check_model(env: Environment, processor: Processor) -> None:
    """Raises UserError: this model cannot read what the environment may say."""
    parts = [Image.new("RGB", (64, 64), "white"), "seen"] if env.shows_images else "seen"
    try:
        reply = read_parts(parts, processor, env.max_reply_tokens)
        encode_reply(processor, reply, env.role, by_string=False)
    except UserError as error:
        raise UserError(
            f"--env {env.spec} does not work with this model: {error} (set pictures = False in a "
            "class that never shows images)"
        ) from error


def env_row(row: Prompt, seed: tuple[int, ...], number: int) -> dict:
    """The dict that `reset` gets, and may change: all columns of the row, the folder of its file, the
    places of its images (see `coordinates.Place`), a seed that all samples of the prompt share, and
    the number of this sample among them."""
    (word,) = np.random.SeedSequence(seed).generate_state(1)
    further = {"folder": row.folder, "places": [*row.places], "seed": int(word), "number": number}
    return copy.deepcopy(row.row) | further


def read_step(returned: Any) -> Step:
    """Read what `step` returned. Raises UserError: it is malformed."""
    if not isinstance(returned, list | tuple) or len(returned) != 3:
        raise UserError(f"step must return (reply or None, reward, done), not {returned!r:.200}")
    reply, reward, done = returned
    entries = reward if isinstance(reward, dict) else {"reward": reward}
    try:
        numbers = {name: float(value) for name, value in entries.items()}
    except (TypeError, ValueError, OverflowError):  # of another kind
        numbers = {}
    is_known = "reward" in numbers and numbers.keys() <= {"reward", "accuracy"}
    if not is_known or not all(map(math.isfinite, numbers.values())):
        raise UserError(
            'the reward of a step must be a finite number, or {"reward": number, "accuracy": '
            f"number}}, not {reward!r:.200}"
        )
    if reply is None and not done:
        raise UserError("step returned no reply, and is not done")
    return Step(reply, numbers["reward"], numbers.get("accuracy"), bool(done))


def describe_failures(conversations: list[Conversation]) -> str:
    """In how many samples the environment failed, and the first failure; "" if in none."""
    errors = [conversation.error for conversation in conversations if conversation.error]
    if not errors:
        return ""
    return f"--env: {len(errors)} of {len(conversations)} samples failed, the first: {errors[0]}"


def check_failures(environment: Environment, conversations: list[Conversation]) -> None:
    """Raises UserError on every rank: the environment failed in every sample, so there is nothing to learn
    from; or the process of its program has ended on a rank, so that there will be no more objects."""
    if conversations and all(conversation.error for conversation in conversations):
        raise UserError(describe_failures(conversations))
    with distributed.raise_on_all_ranks():
        ended = environment.of.program.ended
        if ended:
            raise UserError(f"{describe_failures(conversations)}; the program's process {ended}")
