"""Rewards from a server over HTTP; common/README.md has the contract."""

import base64
import io
import itertools
import json
import re
import time
from http.client import HTTPException
from urllib import request
from urllib.error import HTTPError
from urllib.parse import urljoin

from common.data.images import read_frames
from common.ground.files import UserError, parse_json, say
from common.rewards.rules import Columns

URL = re.compile(r"https?://([\w.-]+|\[[\da-f:.]+\])(:\d+)?(/[^\s#]*)?", re.ASCII | re.IGNORECASE)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0  # seconds before a retry; each is twice the one before
FRAMES = 16  # most that a server gets of a video
MAY_PASS = (408, 429)  # too slow, too many requests: retried, as every 5xx is


class StayHere(request.HTTPRedirectHandler):
    """Follows no redirect: the samples would not be sent along, and the answer to some other
    request would be taken for their rewards."""

    def redirect_request(self, *_) -> None:
        return None


class Server:
    """A reward server as a reward function.

    Time-outs, lost connections and the statuses 408, 429 and 5xx may pass, as when a server restarts: it
    is asked again as long as --reward_timeout allows. Any other invalid answer is an error at once. No
    proxy is used, and no redirect followed.
    """

    def __init__(self, url: str, patience: float):
        """``patience``: for all tries, seconds. Raises UserError: the URL is malformed."""
        self.url = url
        self.patience = patience
        if not URL.fullmatch(url):
            raise UserError(
                f"--reward {url}: expected http://host:port/path or https://..., without spaces,"
                " user name or #"
            )
        self.opener = request.build_opener(request.ProxyHandler({}), StayHere)

    def __call__(self, prompts, responses, references, labels, images, **more) -> Columns:
        question = {
            "queries": [prompt + response for prompt, response in zip(prompts, responses)],
            "prompts": prompts,
            "responses": responses,
            "references": references,
            "labels": labels,
            "images": encode_images(images),
            "groups": more["groups"],
            # the size of each image in its file and as the model saw it, and the space of its answers
            "places": [[place and vars(place) for place in row] for row in more["places"]],
        }
        return read_answer(self.ask(json.dumps(question).encode()))

    def ask(self, body: bytes) -> bytes:
        """The server's answer, which is waited for. Raises UserError."""
        post = request.Request(self.url, body, {"Content-Type": "application/json"})
        ends, pause, problem = time.monotonic() + self.patience, FIRST_PAUSE, ""
        for tries in itertools.count(1):
            # one try may take half of the time, so that there is time for another one
            left = max(0.01, ends - time.monotonic())
            answer, problem = self.try_once(post, min(self.patience / 2, left))
            if answer is not None:
                return answer
            left = ends - time.monotonic()
            if left <= pause:
                break
            say(
                f"--reward {self.url}: {problem}; retry {tries} in {pause:g} s, of {left:.0f} s left"
            )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        if request.getproxies().keys() & {"http", "https", "all"}:
            problem += (
                "; the proxy of the environment is not used: the server must be reached directly"
            )
        within = f"{tries} tries within {self.patience:g} s (0.9 of --reward_timeout)"
        raise UserError(f"no answer in {within}, the last problem: {problem}")

    def try_once(self, post: request.Request, timeout: float) -> tuple[bytes | None, str]:
        """The server's answer; or None, and a problem that may pass. Raises UserError: one that does not."""
        try:
            with self.opener.open(post, timeout=timeout) as response:
                return response.read(), ""
        except HTTPError as error:
            problem = f"HTTP {error.code}: {error.read(500).decode(errors='replace')!r}"
            if "Location" in error.headers:
                target = urljoin(self.url, error.headers["Location"])
                problem = f"HTTP {error.code}, a redirect; is this the address: {target:.200}"
            if error.code < 500 and error.code not in MAY_PASS:
                raise UserError(f"the server answered {problem}") from error
        except (OSError, HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
        return None, problem


def encode_images(images: list[list]) -> list[list]:
    """The images of each sample as JSON. One that has come before, say in a sample of the same prompt,
    is not sent again: {"same_as": [sample, image]} says where it is, counting from 0."""
    seen, encoded = {}, []
    for i, items in enumerate(images):
        encoded.append([])
        for k, item in enumerate(items):
            first = seen.setdefault(item, (i, k))
            encoded[i].append(encode_image(item) if first == (i, k) else {"same_as": first})
    return encoded


def encode_image(item: str | tuple[str, ...]) -> str | list[str]:
    """An image, upright and RGB, as PNG in base64; a video as a list of up to FRAMES such frames."""
    encoded = []
    for image in read_frames(item, FRAMES):
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        encoded.append(base64.b64encode(file.getvalue()).decode())
    return encoded[0] if isinstance(item, str) else encoded


def read_answer(answer: bytes) -> Columns:
    """The columns of an answer, {"rewards": [...], further components}, as a reward function returns
    them; the lists themselves are not checked here. Raises UserError."""
    try:
        columns = parse_json(answer, "the server's answer")
    except UserError as error:
        begins = answer[:500].decode(errors="replace")
        raise UserError(f"{error}: {begins!r}") from error
    if not isinstance(columns, dict) or "rewards" not in columns or "reward" in columns:
        raise UserError(
            'the server must answer {"rewards": [...]}, with or without components, not'
            f" {columns!r:.500}"
        )
    return {"reward": columns.pop("rewards")} | columns
