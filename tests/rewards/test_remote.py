"""Rewards from a server: what it is asked, how it is asked again, and that no broken answer becomes
a reward."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import reward_server
from common.data import images as vlm_images
from common.data.coordinates import Place
from common.data.images import read_image
from common.rewards import remote
from common.rewards.sources import RewardArgs, call_source, load_source
from conftest import ROOT, user_error, words
from helpers import reward_samples, score_samples
from reward_server import LIES, RewardServer, open_pictures


@pytest.fixture
def server():
    with RewardServer() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()


@pytest.fixture
def pauses(monkeypatch):
    """Pauses before retries, noted instead of waited for, by a clock that they advance."""
    noted = []
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + sum(noted), sleep=lambda seconds: noted.append(seconds)
    )
    monkeypatch.setattr(remote, "time", clock)
    return noted


def columns(n, images=None):
    return (
        [f"prompt {i}." for i in range(n)],
        [f"Response  {i}" for i in range(n)],
        [f"response {i if i % 3 else 'x'}" for i in range(n)],
        [None if i % 2 else f"label {i}" for i in range(n)],
        images or [[] for _ in range(n)],
    )


def ask(url, n=7, images=None, seconds=10.0):
    """Rewards and components of n samples, every third of them wrong, as the trainer gets them with a
    --reward_timeout of so many seconds."""
    source = load_source(url, RewardArgs(reward=url, reward_timeout=seconds))
    args = RewardArgs(reward_timeout=20.0)
    prompts, responses, references, labels, images = columns(n, images)
    scored = score_samples(
        source, reward_samples(responses, references, prompts, labels, images), args
    )
    return scored.pop("reward"), scored


# ------------------------------------------------------------------------------------------------
# what is asked
def test_samples_arrive_once_and_in_order(server):
    rewards, components = ask(server.url("exact"))
    assert rewards == [float(i % 3 > 0) for i in range(7)]
    assert components == {"pictures": [0.0] * 7}
    assert server.requests == 1
    names = "queries prompts responses references labels images groups places"
    asked = {name: [] for name in names.split()}
    for part in sorted(server.batches, key=lambda part: part["prompts"][0]):
        assert part.keys() == asked.keys()
        for name, values in part.items():
            asked[name] += values
    prompts, responses, references, labels, images = columns(7)
    assert asked == dict(
        queries=[f"prompt {i}.Response  {i}" for i in range(7)],
        prompts=prompts,
        responses=responses,
        references=references,
        labels=labels,
        images=images,
        groups=list(range(7)),
        places=[[]] * 7,
    )


def test_a_server_may_reward_spans(server, monkeypatch):
    spans = [[[1, 0.5], [2, 0.25]], []]
    answer = {"rewards": [1.0, 0.0], "spans": spans}
    monkeypatch.setattr(reward_server, "score", lambda batch: answer)
    source = load_source(server.url("exact"), RewardArgs())
    columns, read = call_source(source, reward_samples(["ab", "c"], groups=[0, 0]))
    lists = {name: column.tolist() for name, column in columns.items()}
    assert lists == {"reward": [1.75, 0.0], "spans": [0.75, 0.0]}
    assert read == [[(1, 0.5), (2, 0.25)], []]
    answer["spans"] = [[[3, 0.5]], []]
    with user_error(r"spans must be lists of \(end, reward\), with ends in the response"):
        score_samples(source, reward_samples(["ab", "c"], groups=[0, 0]), RewardArgs())


def test_places_arrive_as_objects(server):
    """The sizes of an image and the space of answers about it; null for a clip."""
    place = Place((50, 30), (56, 28), "seen")
    load_source(server.url("exact")).function(
        ["p"], ["r"], ["a"], [None], [[]], groups=[0], places=[[place, None]]
    )
    sizes = {"file": [50, 30], "seen": [56, 28], "space": "seen"}
    assert server.batches[0]["places"] == [[sizes, None]]


def test_pictures_arrive_pixel_identical(server, tmp_path, monkeypatch):
    """Two samples of one prompt share its pictures: each is encoded once per request, and travels once."""
    rng, paths, opened = np.random.default_rng(0), [], []
    for name, mode, size in (
        ("a.png", "RGB", (37, 21)),
        ("b.jpg", "RGB", (40, 64)),
        ("c.png", "RGBA", (9, 9)),
        ("d.png", "L", (5, 8)),
    ):
        channels = {"RGB": (3,), "RGBA": (4,), "L": ()}[mode]
        Image.fromarray(rng.integers(0, 255, (*size, *channels), dtype=np.uint8)).save(
            tmp_path / name
        )
        paths.append(str(tmp_path / name))
    images = [paths[:2], paths[:2], [], paths[2:], [paths[0]], [], []]
    monkeypatch.setattr(
        vlm_images, "read_image", lambda path, **_: opened.append(path) or read_image(path)
    )
    assert ask(server.url("exact"), images=images)[1] == {"pictures": [2.0, 2.0, 0, 2.0, 1.0, 0, 0]}
    arrived = [
        open_pictures(pictures, part["images"])
        for part in server.batches
        for pictures in part["images"]
    ]
    for got, expected in zip(arrived, images, strict=True):
        for picture, path in zip(got, expected, strict=True):
            assert picture.format == "PNG"
            assert picture.mode == "RGB"
            assert np.array_equal(np.asarray(picture), np.asarray(read_image(path)))
    assert sorted(opened) == sorted(paths)
    shared = json.dumps(server.batches[0]["images"][1])
    assert shared == '[{"same_as": [0, 0]}, {"same_as": [0, 1]}]'


def test_a_picture_of_eight_samples_travels_once(tmp_path):
    """Also a clip, and a picture that a sample has twice."""
    Image.effect_noise((50, 50), 50).save(tmp_path / "a.png")
    picture, clip = str(tmp_path / "a.png"), (str(tmp_path / "a.png"),) * 2
    first, *others = json.loads(json.dumps(remote.encode_images([[picture, clip, picture]] * 8)))
    assert first == [first[0], [first[0]] * 2, {"same_as": [0, 0]}]
    assert np.array_equal(
        np.asarray(open_pictures(first[:1], [])[0]), np.asarray(read_image(picture))
    )
    assert others == [[{"same_as": [0, 0]}, {"same_as": [0, 1]}, {"same_as": [0, 0]}]] * 7


@pytest.mark.parametrize("count, sent", [(40, 16), (5, 5)])
def test_a_clip_travels_as_sixteen_frames_at_most(tmp_path, count, sent):
    """Evenly spaced, the first and the last among them."""
    names = [str(tmp_path / f"{k}.png") for k in range(count)]
    for k, name in enumerate(names):
        Image.new("L", (8, 8), 5 * k).save(name)
    ((frames,),) = remote.encode_images([[tuple(names)]])
    shades = [picture.getpixel((0, 0))[0] for picture in open_pictures(frames, [])]
    assert shades == [5 * round(k * (count - 1) / (sent - 1)) for k in range(sent)]


def test_text_survives_json(server):
    """Quotes, other alphabets, control characters, half a surrogate pair: what a policy may well sample."""
    texts = ['"}\\', "Würfel 骰子 🎲", "\x00\u2028\n", "\ud83c"]
    reward = load_source(server.url("exact")).function
    assert (
        reward(texts, texts, texts, [None] * 4, [[]] * 4, groups=[0] * 4, places=[[]] * 4)["reward"]
        == [1.0] * 4
    )
    assert server.batches[0]["queries"] == [2 * text for text in texts[:3]] + ["\ud83c\ud83c"]


# ------------------------------------------------------------------------------------------------
# asking again
@pytest.mark.parametrize("failures, code", [(0, 503), (4, 503), (2, 408), (3, 429)])
def test_a_server_that_is_busy_is_asked_again(server, pauses, capsys, failures, code):
    assert ask(server.url(f"fail/{failures}/{code}"))[0] == [float(i % 3 > 0) for i in range(7)]
    assert server.requests == failures + 1
    assert pauses == [0.5, 1.0, 2.0, 4.0][:failures]
    assert all(batch == server.batches[0] for batch in server.batches)
    assert capsys.readouterr().out.count(f"HTTP {code}: 'busy with request") == failures


def test_a_server_that_restarts_is_waited_for(server, pauses):
    """For 12 seconds, with the default of --reward_timeout."""
    assert ask(server.url("fail/5"), seconds=RewardArgs().reward_timeout)[1]
    assert sum(pauses) > 12


@pytest.mark.parametrize(
    "seconds, expected", [(10, [0.5, 1, 2, 4]), (60, [0.5, 1, 2, 4, *[8] * 5])]
)
def test_retries_are_bounded_by_the_time_of_the_step(server, pauses, seconds, expected):
    tries = len(expected) + 1
    with user_error(
        rf"(?s)no answer in {tries} tries within {0.9 * seconds:g} s \(0.9 of --reward_timeout\), "
        rf"the last problem: HTTP 503: 'busy with request {tries}'.*Response  0"
    ):
        ask(server.url("fail/99"), seconds=seconds)
    assert server.requests == tries
    assert pauses == expected


@pytest.mark.parametrize(
    "path, problem, seconds, tries",
    [
        ("status/500", "HTTP 500: 'that is how it is'", 10, 5),
        ("status/599", "HTTP 599", 10, 5),
        ("drop", "RemoteDisconnected: Remote end", 10, 5),
        ("slow/30", "TimeoutError: timed out", 2, 2),  # each of half of the time, or what is left
        ("length/9000", "IncompleteRead: IncompleteRead(97 bytes read, 8903 more", 10, 5),
    ],
)
def test_what_may_pass_is_tried_to_the_end(server, pauses, path, problem, seconds, tries):
    with user_error(rf"no answer in {tries} tries .*, the last problem: {re.escape(problem)}"):
        ask(server.url(path), seconds=seconds)
    assert server.requests == tries


def test_a_status_line_is_no_line_of_ours(pauses, capsys):
    """It may hold anything, and Python's exception quotes it with the end of the line."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            for _ in range(5):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"\x1b[2J\rerror: all is well\n\n")

        threading.Thread(target=answer, daemon=True).start()
        with user_error("no answer in 5 tries .*, the last problem: BadStatusLine"):
            ask(f"http://127.0.0.1:{listening.getsockname()[1]}/")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8  # two for each of four retries
    assert all(
        line.endswith(r": BadStatusLine: \x1b[2J\rerror: all is well") for line in lines[::2]
    )
    assert all(line.startswith("  ; retry") for line in lines[1::2])


@pytest.mark.parametrize("proxy", [False, True])
def test_no_server_there(pauses, monkeypatch, proxy):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    if proxy:
        monkeypatch.setenv("https_proxy", "http://10.0.0.1:3128")
    advice = "; the proxy of the environment is not used: the server must be reached directly"
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        with user_error("no answer in 5 tries .* Connection refused") as error:
            ask(f"http://127.0.0.1:{taken.getsockname()[1]}/exact")
    assert (advice in str(error.value)) == proxy
    assert pauses == [0.5, 1.0, 2.0, 4.0]


# ------------------------------------------------------------------------------------------------
# errors at once
@pytest.mark.parametrize("kind", LIES)
def test_a_broken_answer_is_one_clear_error(server, pauses, kind):
    messages = dict(
        short="reward must be a list of 7 numbers",
        long="reward must be a list of 7 numbers",
        nan="reward is nan, not a finite number",
        infinite="reward is inf, not a finite number",
        strings=r"must be a list of 7 numbers, got list of 7 \(str\)",
        null=r"must be a list of 7 numbers, got list of 7 \(NoneType\)",
        number="reward must be a list of 7 numbers, got float",
        missing=r'must answer {"rewards": \[...\]}',
        list=r'must answer {"rewards": \[...\]}',
        component="style must be a list of 7 numbers",
        message="comment must be a list .*, got str",
        both=r'must answer {"rewards"',
        text=r"not JSON: .*: '<html>busy</html>'",
        empty="not JSON",
    )
    with user_error(f"(?s)--reward {server.url('lie')}.*{messages[kind]}.*Response  0"):
        ask(server.url(f"lie/{kind}"))
    assert server.requests == 1
    assert pauses == []


@pytest.mark.parametrize(
    "path, problem",
    [
        ("status/400", "answered HTTP 400: 'that is how it is'"),
        ("status/307", "HTTP 307"),
        ("status/204", "not JSON"),
        ("nowhere", "HTTP 404: 'no such path: /nowhere'"),
        ("length/20", "not JSON: .*: '{\"rewards\": \\[0.0, 1.'"),
    ],
)
def test_refusals_are_not_repeated(server, pauses, path, problem):
    with user_error(problem):
        ask(server.url(path))
    assert server.requests == 1
    assert pauses == []


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(server, pauses, code):
    """A GET of another page would earn 1 here."""
    with user_error(f"HTTP {code}, a redirect; is this the address: {server.url('get')}"):
        ask(server.url(f"move/{code}"))
    assert server.requests == 1
    assert pauses == []


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://host:port/",
        "https://me:secret@host/",
        "http://host/a b",
        "http://host/#part",
    ],
)
def test_bad_address(url):
    with user_error("expected http://host:port/path"):
        load_source(url)


def test_the_server_runs_from_the_command_line():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = subprocess.Popen(
        words(sys.executable, ROOT / "tests" / "reward_server.py", "--port", port),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ,
    )
    try:
        assert running.stdout.readline() == f"answers at http://127.0.0.1:{port}/exact\n"
        assert ask(f"http://127.0.0.1:{port}/exact", n=2)[0] == [0.0, 1.0]
    finally:
        running.terminate()
        running.wait()
