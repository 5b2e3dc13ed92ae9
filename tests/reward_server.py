"""A reward server that gives 1 to a response that is its reference, up to case and white space, and
0 to any other.

    python tests/reward_server.py --port 8500 &
    torchrun --nproc_per_node 2 train_ppo_vl.py --reward http://127.0.0.1:8500/exact

It is the example to copy: replace `score`. The other paths misbehave, for the tests:

    /slow/S          waits S seconds
    /fail/N          answers 503 to the first N requests
    /status/CODE     answers CODE, always
    /fail/N/CODE     answers CODE to the first N requests
    /move/CODE       sends everybody to /get, where GET earns 1
    /drop            closes the connection without an answer, always
    /lie/KIND        answers something else, see LIES
"""

import argparse
import base64
import io
import json
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image

LIES = dict(
    short=lambda rewards: {"rewards": rewards[:-1]},
    long=lambda rewards: {"rewards": rewards + [0.0]},
    nan=lambda rewards: {"rewards": [float("nan")] * len(rewards)},
    infinite=lambda rewards: {"rewards": [float("inf")] * len(rewards)},
    strings=lambda rewards: {"rewards": [str(reward) for reward in rewards]},
    null=lambda rewards: {"rewards": [None] * len(rewards)},
    number=lambda rewards: {"rewards": 1.0},
    missing=lambda rewards: {"scores": rewards},
    list=lambda rewards: rewards,
    component=lambda rewards: {"rewards": rewards, "style": rewards[:-1]},
    message=lambda rewards: {"rewards": rewards, "comment": "well done"},
    both=lambda rewards: {"rewards": rewards, "reward": rewards},
    text=lambda rewards: "<html>busy</html>",
    empty=lambda rewards: "",
)


def score(batch: dict) -> dict[str, list[float]]:
    """{"rewards": one number per sample}; further lists of that length are components that the
    trainer logs."""
    right, images = [], batch["images"]
    for response, reference in zip(batch["responses"], batch["references"]):
        right.append(float(response.lower().split() == reference.lower().split()))
    return {
        "rewards": right,
        "pictures": [float(len(open_pictures(pictures, images))) for pictures in images],
    }


def open_pictures(pictures: list, images: list[list]) -> list[Image.Image]:
    """Those of one sample of a request, whose ``images`` may hold them at an earlier sample."""
    opened = []
    for picture in pictures:
        if isinstance(picture, dict):
            sample, image = picture["same_as"]
            picture = images[sample][image]
        opened.append(Image.open(io.BytesIO(base64.b64decode(picture, validate=True))))
    return opened


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server, (mode, argument, code) = (
            self.server,
            (self.path.strip("/").split("/") + ["", ""])[:3],
        )
        with server.lock:
            server.requests += 1
            number, server.running = server.requests, server.running + 1
            server.most_running = max(server.most_running, server.running)
        try:
            batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.batches.append(batch)
            if mode == "slow":
                time.sleep(float(argument))
            with server.lock:  # before the answer: who has it may already ask the next question
                server.running -= 1
            if mode == "drop":
                self.close_connection = True
            elif mode == "fail" and number <= int(argument):
                self.answer(int(code or 503), f"busy with request {number}")
            elif mode == "status":
                self.answer(int(argument), "that is how it is")
            elif mode == "move":
                self.answer(int(argument), "it has moved", Location="/get")
            elif mode == "length":  # says more, or less, than it sends
                self.answer(200, json.dumps(score(batch)), Content_Length=argument)
            elif mode == "lie":
                lie = LIES[argument](score(batch)["rewards"])
                self.answer(200, lie if isinstance(lie, str) else json.dumps(lie))
            elif mode in ("exact", "fail", "slow"):
                self.answer(200, json.dumps(score(batch)))
            else:
                self.answer(404, f"no such path: {self.path}")
        # a client whose patience ended is part of the tests
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"rewards": [1.0] * 7}))

    def answer(self, status: int, text: str, **headers: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        if self.server.verbose:
            super().log_message(*_)


class RewardServer(ThreadingHTTPServer):
    """`requests` counts them, `batches` keeps what they asked, `most_running` how many were there
    at the same time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, verbose: bool = False):
        super().__init__(("127.0.0.1", port), Handler)
        self.lock, self.verbose = threading.Lock(), verbose
        self.requests = self.running = self.most_running = 0
        # a server that runs for days keeps none
        self.batches: deque[dict] = deque(maxlen=0 if verbose else None)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8500)
    with RewardServer(parser.parse_args().port, verbose=True) as running:
        print(f"answers at {running.url('exact')}", flush=True)
        running.serve_forever()
