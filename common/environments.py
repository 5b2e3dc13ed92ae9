"""Environments that answer the policy: where they come from, and how they run.

    load        --env -> Environments: a class for every label of a row
    Workers     calls of users' programs in daemon threads, each with a time limit

An environment is a class like Gymnasium's, one object per sample:

    reset(row) -> None or a first observation
    step(text) -> (reply or None, reward, done)
    close()       optional

A reply or observation is a text, a picture of Pillow's, a pathlib.Path of one, or a list of these.
"""

import inspect
import json
import math
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np

from common.conversations import ROLES
from common.flags import absolute
from common.process import UserError
from common.reward_functions import load_object
from common.settings import EnvArgs
from common.vlm.data import Processor
from common.vlm.replies import check_template
from common.vlm.rows import Prompt

# --------------------------------------------------------------------------------------------------
# Classes
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """A class of environments, and what it says of itself."""

    spec: str  # file.py:Class
    make: Callable[[], Any]
    role: str  # of its messages
    shared: bool  # whether the first observation is the same for all samples of a prompt
    pictures: bool  # whether what it says may hold pictures


@dataclass
class Environments:
    """What answers the policy, by the label of the row."""

    by_label: dict[str, Environment]  # "*": every other label
    args: EnvArgs
    max_prompt_tokens: int  # with a first observation

    def of(self, row: Prompt) -> Environment | None:
        """That of a row; None: its label has none, and its samples have one turn."""
        return self.by_label.get(row.label or "", self.by_label.get("*"))

    def check_rows(self, rows: list[Prompt], rewarded: list[Prompt], processor: Processor) -> None:
        """Raises UserError: a row whose environment's messages the checkpoint's template cannot
        express, or one of the ``rewarded`` rows that has no environment."""
        for row in rewarded:
            if self.of(row) is None:
                raise UserError(
                    f"{row.source}: --reward env: label {row.label!r} has no environment in "
                    f"--env {self.args.env}"
                )
        first: dict[Environment | None, Prompt] = {}  # row of each
        for row in rows:
            first.setdefault(self.of(row), row)
        first.pop(None, None)
        for environment, row in first.items():
            try:
                check_template(processor, environment.role, environment.pictures)
            except ValueError as error:
                hint = ""
                if environment.pictures:
                    hint = "; if the class never shows pictures, set pictures = False in it"
                raise UserError(
                    f"{row.source}: --env {environment.spec} does not work with this model: {error}"
                    f"{hint}"
                ) from error


def load(args: EnvArgs, max_prompt_tokens: int) -> Environments | None:
    """The environments of --env; None without. Raises UserError."""
    if not args.env:
        return None
    by_label = {label: load_class(spec) for label, spec in read_specs(args.env).items()}
    return Environments(by_label, args, max_prompt_tokens)


def read_specs(text: str) -> dict[str, str]:
    """label -> file.py:Class, from --env: one spec for every label, JSON, or a file of JSON. Raises
    UserError."""
    is_file = text.endswith(".json") and os.path.isfile(text)
    if not is_file and not text.lstrip().startswith("{"):
        return {"*": text}
    try:
        specs = json.loads(Path(text).read_text("utf-8") if is_file else text)
    except ValueError as error:
        raise UserError(f"--env {text}: invalid JSON: {error}") from error
    are_texts = isinstance(specs, dict) and all(isinstance(spec, str) for spec in specs.values())
    if not are_texts or not specs:
        raise UserError(
            f'--env {text}: expected file.py:Class, or {{label: file.py:Class}}; "*": other labels'
        )
    return specs


def load_class(spec: str) -> Environment:
    """The class ``path.py:Class``. Raises UserError: it is none, or lacks what a class needs."""
    found = load_object("--env", spec, "an existing path.py:Class, or JSON {label: path.py:Class}")
    missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
    if missing:
        raise UserError(
            f"--env {spec}: {found!r:.80} has no method {missing[0]!r}; see launch/README.md"
        )
    try:
        inspect.signature(found).bind()
        inspect.signature(found.reset).bind("self", "row")
        inspect.signature(found.step).bind("self", "text")
    except TypeError as error:
        raise UserError(
            f"--env {spec}: it is made without arguments, and called as reset(row) and step(text): "
            f"{error}"
        ) from error
    role = getattr(found, "role", "user")
    if role not in ROLES:
        raise UserError(f"--env {spec}: role is {role!r}, not one of {', '.join(ROLES)}")
    shared, pictures = getattr(found, "shared", False), getattr(found, "pictures", True)
    return Environment(spec, found, role, bool(shared), bool(pictures))


def absolute_env(text: str) -> str:
    """--env as it can be read from any folder."""
    if not text:
        return ""
    specs = {}
    for label, spec in read_specs(text).items():
        path, _, name = spec.rpartition(":")
        specs[label] = f"{absolute(path)}:{name}"
    return specs["*"] if specs.keys() == {"*"} else json.dumps(specs)


def env_row(row: Prompt, seed: tuple[int, ...], number: int) -> dict[str, Any]:
    """What `reset` gets: all columns of the row, its folder, a seed that the samples of a prompt
    share, and the sample's number among them."""
    (word,) = np.random.SeedSequence(seed).generate_state(1)
    return dict(row.row) | {"folder": row.folder, "seed": int(word), "number": number}


def read_step(said: Any) -> tuple[Any, float, bool]:
    """(reply or None, reward, done) of what `step` returns. Raises ValueError: anything else."""
    if not isinstance(said, tuple) or len(said) != 3:
        raise ValueError(f"step must return (reply or None, reward, done), not {said!r:.200}")
    reply, reward, done = said
    reward = reward.item() if hasattr(reward, "item") else reward
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"step returned the reward {reward!r:.80}, not a finite number")
    if reply is None and not done:
        raise ValueError("step returned no reply, and is not done")
    return reply, float(reward), bool(done)


# --------------------------------------------------------------------------------------------------
# Threads
# --------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """A call of a user's program: what it returned, or what it raised."""

    work: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None
    ended: bool = False
    late: bool = False  # given up while it was running
    started: float = math.inf  # when a thread took it
    seconds: float = 0.0


@dataclass
class Workers:
    """Threads that run calls in the order of submission.

    A call that outlasts its time is given up: its thread goes on for itself, and another takes its
    place. All are daemons, which no exit waits for.

    Args:
        count: threads; 0: one, and `submit` waits for it, so that calls never overlap.
    """

    count: int
    limit: float  # seconds of a call
    waiting: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    news: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: list[Call] = field(default_factory=list)  # that were not seen to end
    threads: int = 0

    def submit(self, work: Callable[[], Any]) -> Call:
        call = Call(work)
        if self.threads < max(1, self.count):
            self.add_thread()
        self.calls.append(call)
        self.waiting.put(call)
        if self.count == 0:
            self.wait([call])
        return call

    def add_thread(self) -> None:
        self.threads += 1
        threading.Thread(target=self.run, name="environment", daemon=True).start()

    def run(self) -> None:
        while True:
            call = self.waiting.get()
            if call is None:
                return
            call.started = time.monotonic()
            result = error = None
            try:
                result = call.work()
            except BaseException as problem:  # whoever waits reports it; a thread would swallow it
                error = problem
            with self.lock:
                if call.ended:  # given up; another thread has taken this one's place
                    return
                self.end(call, result, error)
            self.news.set()

    def end(self, call: Call, result: Any, error: BaseException | None) -> None:
        call.result, call.error, call.ended = result, error, True
        call.seconds = time.monotonic() - call.started

    def has_ended(self, call: Call) -> bool:
        """Whether a call has returned or raised, or is given up now because it is late."""
        if call.ended or time.monotonic() - call.started <= self.limit:
            return call.ended
        with self.lock:
            if not call.ended:
                late = TimeoutError(f"took longer than {self.limit:g} s (--env_timeout)")
                call.late = True
                self.end(call, None, late)
                self.add_thread()
        return True

    def wait(self, calls: list[Call]) -> None:
        """Until one of the calls has ended. Late ones are given up, whoever submitted them: they
        would keep their threads from the calls that wait here."""
        while True:
            self.news.clear()
            self.calls = [call for call in self.calls if not self.has_ended(call)]
            if any(call.ended for call in calls):
                return
            self.news.wait(0.1)  # of a late call there is no news

    def close(self) -> None:
        """Let the threads end once they are done."""
        for _ in range(self.threads):
            self.waiting.put(None)
