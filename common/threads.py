"""User code in threads, each call with a time limit.

Workers           runs calls in parallel, in the order of submission
describe_error    what user code raised, and where
"""

import math
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIVEN_UP: list[Future] = []  # calls whose threads may still be running


def describe_error(error: BaseException) -> str:
    """What user code raised, and its lines that led there, the innermost first."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in frames
        if not frame.filename.startswith(("<", os.path.dirname(__file__)))
    ]
    where = f" ({' < '.join(lines)})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


class LateError(TimeoutError):
    """A call was given up, and may still be running."""


class Call(Future):
    """A call in a thread: its result, or what it raised."""

    seconds: float = 0.0  # that it took


@dataclass
class Workers:
    """Threads that run calls in the order of submission.

    A call that outlasts ``limit`` seconds ends with a LateError that names the flag ``limit_name``.
    Its thread runs on, its result is ignored, and another thread takes its place.
    """

    threads: int
    limit: float = math.inf
    limit_name: str = ""

    def __post_init__(self):
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        self.running: dict[Call, float] = {}  # start times; whoever removes a call sets its result
        for _ in range(self.threads):
            self.add_thread()

    def submit(self, function: Callable, *args: Any) -> Call:
        call = Call()
        self.waiting.put((call, function, args))
        return call

    def add_thread(self) -> None:
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        """In a thread: run calls until `close`."""
        while (submitted := self.waiting.get()) is not None:
            call, function, args = submitted
            self.running[call] = time.monotonic()
            result = error = None
            try:
                result = function(*args)
            except (
                BaseException
            ) as problem:  # raised by whoever waits; a SystemExit would vanish in a thread
                error = problem
            if not self.take(call):
                return  # it was given up, and another thread has taken this one's place
            call.set_exception(error) if error else call.set_result(result)

    def take(self, call: Call) -> bool:
        """Remove a call from the running ones; False: it is no longer among them."""
        began = self.running.pop(call, None)
        if began is not None:
            call.seconds = time.monotonic() - began
        return began is not None

    def give_up_late(self) -> None:
        """End the calls that have outlasted the limit."""
        for call, began in list(self.running.items()):
            if time.monotonic() - began > self.limit and self.take(call):
                problem = f"took longer than {self.limit:g} s ({self.limit_name})"
                call.set_exception(LateError(problem))
                GIVEN_UP.append(call)
                self.add_thread()

    def wait_for_any(self, calls: Iterable[Call]) -> None:
        """Wait until one of the calls has ended. All late calls are given up, as these may wait for their
        threads."""
        while not wait(calls, 0.1, FIRST_COMPLETED).done:
            self.give_up_late()

    def close(self) -> None:
        """Let the threads end once they are done."""
        for _ in range(self.threads):
            self.waiting.put(None)
