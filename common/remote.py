"""Rewards from a server over HTTP; the README of common has the contract."""

import base64
import http.client
import io
import json
import re
import time
from contextlib import closing
from urllib.parse import urlsplit

from common.process import UserError
from common.settings import RewardArgs
from common.vlm.images import read_frames

MAX_REPLY = 2**26  # bytes that are read of an answer
FRAMES = 16  # of a video, that a server gets


class RewardError(ValueError):
    """A source of rewards failed; ``sample`` is the number of the sample at fault, if it is
    known."""

    def __init__(self, problem: str, sample: int = 0):
        super().__init__(problem)
        self.sample = sample


class Server:
    """A reward server as a reward function.

    What may pass (time-outs, lost connections, answers 5xx) is tried again; any other answer but a
    valid one is a RewardError at once. No proxy, redirect or password is used.
    """

    def __init__(self, url: str, args: RewardArgs):
        """Raises UserError: a URL that cannot be asked."""
        self.url, self.retries = url, args.remote_retries
        self.timeout = args.reward_timeout / 2  # of one try, seconds
        try:
            parts = urlsplit(url)
            self.host, self.port = parts.hostname, parts.port
            valid = self.host and "@" not in parts.netloc and not parts.fragment
        except ValueError:  # a port that is no number
            valid = False
        if not valid or not re.fullmatch("[!-~]+", url):
            raise UserError(
                f"--reward {url}: expected http://host:port/path or https://..., without spaces,"
                " user name or #"
            )
        self.connection = http.client.HTTPConnection
        if parts.scheme == "https":
            self.connection = http.client.HTTPSConnection
        self.target = parts.path or "/"
        if parts.query:
            self.target += f"?{parts.query}"

    def __call__(self, prompts, responses, references, labels, images) -> dict[str, list[float]]:
        pictures = {item: encode_picture(item) for item in set().union(*images)}
        question = {
            "queries": [prompt + response for prompt, response in zip(prompts, responses)],
            "prompts": prompts,
            "responses": responses,
            "references": references,
            "labels": labels,
            "images": [[pictures[item] for item in items] for items in images],
        }
        return read_reply(self.ask(json.dumps(question).encode()))

    def ask(self, body: bytes) -> bytes:
        """The server's answer with status 200, after as many tries as --remote_retries allow."""
        for attempt in range(self.retries + 1):
            try:
                status, said = self.post(body)
                if status == 200:
                    return said
                problem = f"HTTP {status}: {said[:500].decode(errors='replace')!r}"
                if status < 500:
                    raise RewardError(f"the server answered {problem}")
            except (OSError, http.client.IncompleteRead) as error:
                problem = f"{type(error).__name__}: {error}"
            except http.client.HTTPException as error:
                raise RewardError(
                    f"the server does not speak HTTP: {type(error).__name__}: {error}"
                ) from error
            if attempt < self.retries:
                pause = 0.5 * 2 ** min(attempt, 4)
                print(
                    f"--reward {self.url}: {problem}; retry {attempt + 1} of {self.retries} in"
                    f" {pause:g} s",
                    flush=True,
                )
                time.sleep(pause)
        raise RewardError(
            f"no answer in {self.retries + 1} tries (--remote_retries), at last {problem}"
        )

    def post(self, body: bytes) -> tuple[int, bytes]:
        """One try: the status and what the server said."""
        deadline, said = time.monotonic() + self.timeout, b""
        with closing(self.connection(self.host, self.port, timeout=self.timeout)) as connection:
            connection.request("POST", self.target, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            while chunk := response.read1(2**16):
                said += chunk
                if len(said) > MAX_REPLY:
                    raise RewardError(f"the server's answer is longer than {MAX_REPLY} bytes")
                if time.monotonic() > deadline:  # the socket's time-out starts anew at every byte
                    raise TimeoutError("timed out in the middle of the answer")
            if response.length:  # read1 at the end of the stream does not look
                raise http.client.IncompleteRead(said, response.length)
            return response.status, said


def encode_picture(item: str | tuple[str, ...]) -> str | list[str]:
    """A picture, upright and RGB, as PNG in base64; of a video a list of up to FRAMES frames."""
    coded = []
    for image in read_frames([item], FRAMES):
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        coded.append(base64.b64encode(file.getvalue()).decode())
    return coded[0] if isinstance(item, str) else coded


def read_reply(said: bytes) -> dict[str, list[float]]:
    """{"rewards": [...], further components} of an answer, as a reward function returns them; the
    lists are not looked at. Raises RewardError."""
    try:
        reply = json.loads(said)
    except (ValueError, RecursionError) as error:
        begins = said[:500].decode(errors="replace")
        raise RewardError(f"the server's answer is not JSON ({error}): {begins!r}") from error
    if not isinstance(reply, dict) or "rewards" not in reply or "reward" in reply:
        raise RewardError(
            'the server must answer {"rewards": [...]}, with components beside it or not:'
            f" {reply!r:.500}"
        )
    return {"reward": reply.pop("rewards")} | reply
