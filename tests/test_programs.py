"""Programs of the user, each in a process of its own: what they do there harms nothing, how they end, what they
return, the names of their modules, what is said of them."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common import answers, child, user_code
from common.rewards.sources import RewardArgs, load_source
from common.user_code import load_class, load_function, with_table
from conftest import user_error
from helpers import reward_samples, score_samples
from ranks import python

ROOT = Path(user_code.__file__).parents[1]


def load(file: Path, text: str, name: str = "score"):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return load_function("--reward", f"{file}:{name}", "prompts")[0]


@pytest.mark.parametrize("end", ["KeyboardInterrupt()", "SystemExit(3)", "BaseException()"])
def test_an_end_that_a_program_asks_for_is_its_error(tmp_path, end):
    with user_error(rf"mine.py:score: .*mine.py raised {end[:10]}.* \(mine.py:2"):
        load(tmp_path / "mine.py", f"\nraise {end}")


def test_parameters_in_another_order_are_refused(tmp_path):
    """They are passed by position: it would score prompts as responses."""
    for names, wrong in (
        ("responses, prompts", "prompts would get responses"),
        ("responses, answers", "responses would get prompts"),
        ("answers, prompts=None", "prompts would get responses"),
    ):
        file = tmp_path / f"{names[-10:]}.py"
        file.write_text(f"def score({names}):\n    pass\n")
        with user_error(rf"must take \(prompts, responses\): in this order, {wrong}"):
            load_function("--reward", f"{file}:score", "prompts, responses")


def test_programs_import_what_lies_beside_them(tmp_path):
    """At the start, in a call, of packages with and without __init__.py. What is installed comes first: a
    file that is named after what it uses does not import itself."""

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("a/my_helper.py", "import parts.more\nfrom my_values import worth\nright = worth()\n")
    write("a/my_values.py", "def worth():\n    return 1\n")
    write("a/late.py", "value = 0.25\n")
    write("a/parts/__init__.py", "")
    write("a/parts/more.py", "from . import two\nN = 10 * two.N\n")
    write("a/parts/two.py", "import bare.deep.two as it\nN = it.N\n")
    write("a/bare/deep/two.py", "import torch.nn\nN = 2\n")
    for name in ("math", "common", "torch/nn"):
        write(f"a/{name}.py", "raise RuntimeError('not this one')\n")
    score = load(
        tmp_path / "a" / "PIL.py",
        "from PIL import Image\nfrom parts import two\nfrom my_helper import right\n"
        "def score(prompts):\n    from late import value\n    return right + value + two.N\n",
    )
    assert score([]) == 3.25


def test_a_file_that_two_flags_name_is_one_process(tmp_path):
    """It shares what it has loaded and counted. A program beside it that imports it has its own copy."""
    text = "calls = []\ndef score(prompts):\n    calls.append(1)\n    return len(calls)\n"
    (tmp_path / "mine.py").write_text(text)
    other = load(
        tmp_path / "other.py", "import mine\ndef score(prompts):\n    return mine.score([])\n"
    )
    for name in ("mine", "json"):  # under a name that is taken, too
        first = load(tmp_path / f"{name}.py", text)
        again = load(tmp_path / f"{name}.py", text)
        assert (first([]), again([])) == (1, 2)
    assert other([]) == 1


def test_helpers_of_two_programs_may_have_one_name(tmp_path):
    """Files and packages, at the top and in a call."""
    for folder, worth in (("a", 1), ("b", 2)):
        for name in ("helper.py", "late.py", "parts/two.py"):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(f"N = {worth}\n")
    text = "import helper\nfrom parts.two import N\ndef score(prompts):\n    import late\n    "
    scores = [
        load(tmp_path / name / "mine.py", f"{text}return helper.N, N, late.N\n") for name in "ab"
    ]
    assert [score([]) for score in scores] == [[1, 1, 1], [2, 2, 2]]


def test_two_programs_of_one_name_work(tmp_path):
    texts = ["def score(prompts):\n    return 1\n", "def score(prompts):\n    return 2\n"]
    first, second = [load(tmp_path / folder / "mine.py", text) for folder, text in zip("ab", texts)]
    assert (first([]), second([])) == (1, 2)


def test_the_files_of_a_program_are_what_it_imports_from_its_folder(tmp_path):
    """One by another; not what only lies there, or only another program imports."""
    names = ("of_other", "helper", "parts/__init__", "parts/more", "bare/two", "unused")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("N = 1\n")
    (tmp_path / "helper.py").write_text("import math, bare.two\nfrom parts import more\n")
    # named where no call comes, so Python does not read it
    (tmp_path / "python2.py").write_text("print 'x'\n")
    end = "\ndef score(prompts):\n    return 1\n"
    load(tmp_path / "other.py", f"import of_other{end}")
    load(tmp_path / "mine.py", f"import torch\nfrom helper import math{end}    import python2\n")
    names = ("mine", "helper", "python2", "bare/two", "parts/__init__", "parts/more")
    assert user_code.files_of(tmp_path / "mine.py") == {tmp_path / f"{name}.py" for name in names}


SPAWN = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
def square(x):
    return x * x
def score(prompts):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(square, prompts))
"""


@pytest.mark.slow
def test_a_program_may_spawn_processes(tmp_path):
    """They import it by its name, also if two flags name it; one of a name that is taken cannot be, and is
    told so."""
    run = "from common.user_code import load_function\n"
    for name in ("mine.py", "json.py"):
        (tmp_path / name).write_text(SPAWN)
        spec = f"{tmp_path / name}:score"
        run += f"first, *_ = load_function('--reward', '{spec}', 'prompts')\n"
        run += f"again, *_ = load_function('--reward', '{spec}', 'prompts')\n"
        run += "print(first([1, 2]), again([3]))\n"
    ended = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    printed, again = ended.stdout.splitlines()
    assert printed == "[1, 4] [9]"
    assert again.endswith("it is called once more")
    assert "rename " in ended.stderr


def test_a_misspelled_function_lists_those_of_the_file(tmp_path):
    text = "from math import sqrt\ndef score(prompts):\n    pass\nclass Look:\n    pass\n"
    with user_error(r"mine\.py has no 'scor'; it has score, Look$"):
        load(tmp_path / "mine.py", text, "scor")
    with user_error("it defines no function or class"):
        load(tmp_path / "none.py", "import math\n")


# --------------------------------------------------------------------------------------------------
# What they do
# --------------------------------------------------------------------------------------------------

HEAD = "def score(prompts, responses, references, labels, images):\n"


def reward(file: Path, body: str, timeout: float = 20.0, top: str = "") -> list[float]:
    """What a reward of this body says of two samples, in a call like the trainer's."""
    inside = "".join(f"    {line}\n" for line in body.splitlines())
    file.write_text(f"{top}\n{HEAD}{inside}")
    source = load_source(f"{file}:score")
    args = RewardArgs(reward_timeout=timeout)
    return score_samples(source, reward_samples(["one", "two"]), args)["reward"]


@pytest.mark.parametrize(
    "body, message",
    [
        ("import ctypes\nctypes.string_at(0)", "its process ended by SIGSEGV"),
        ("import os\nos._exit(7)", "its process ended with code 7"),
        ("import os\nos.kill(os.getpid(), 9)", "its process ended by SIGKILL"),
        ("import sys\nsys.exit(3)", r"it raised SystemExit: 3 \(mine.py:4\)"),
        ("return 1 / 0", r"it raised ZeroDivisionError: division by zero \(mine.py:3\)"),
        (
            "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
            r"took longer than 1 s \(--reward_timeout\)",
        ),
        ("while True:\n    pass", r"took longer than 1 s \(--reward_timeout\)"),
        ("return (x for x in responses)", "reward must be a list of 2 numbers, got generator"),
        ("return lambda: 1", "reward must be a list of 2 numbers, got function"),
        (
            "return [print, 1.0]",
            r"reward must be a list of 2 numbers, got list of 2 \(builtin_function_or_method, float\)",
        ),
        ("return {(1, 2): 3}", "it returned something that is not plain data: keys must be"),
        (
            "it = []\nit.append(it)\nreturn it",
            "it returned something that is not plain data: Circular",
        ),
        ("return [10**400, 1]", "reward holds too large a number: int too large"),
        (
            "return {'reward': [1, 2], 'spans': [[(1, 10**400)], []]}",
            "spans must be lists .* int too large",
        ),
        ("import os\nos.closerange(3, 1024)", "its process ended with code 0"),
        (
            "class E(Exception):\n    def __str__(self):\n        return 3\nraise E",
            r"it raised E: <its str\(\) raises TypeError> \(mine.py:6\);",
        ),
        (
            "def again():\n    again()\nagain()",
            r"it raised RecursionError: \D+ \(mine.py:4 < mine.py:5\);",
        ),
        ("raise ValueError('x' * 10**7)", r"it raised ValueError: x{2000} \(mine.py:3\);"),
        (
            "raise ExceptionGroup('two', [KeyError(1), KeyError(2)])",
            r"it raised ExceptionGroup: two \(2 sub-exceptions\) \(mine.py:3\): KeyError: 1;",
        ),
    ],
)
def test_what_ends_a_call_is_a_message_with_the_sample(tmp_path, body, message, monkeypatch):
    """It holds no lock of Python's, which a regular expression does not let go of."""
    began = time.monotonic()
    with user_error(rf"(?s)--reward \S*mine.py:score: {message}.*response: 'one'"):
        reward(tmp_path / "mine.py", body, timeout=1.0)
    assert time.monotonic() - began < 30


def test_a_late_call_ends_all_that_it_has_started(tmp_path):
    note = tmp_path / "note.txt"
    started = (
        f"import subprocess\nslept = subprocess.Popen(['sleep', '300'])\nopen({str(note)!r}, 'w')"
    )
    with user_error("took longer than 1 s"):
        body = f"{started}.write(str(slept.pid))\nslept.wait()"
        reward(tmp_path / "mine.py", body, timeout=1.0)
    wait_until_ended([int(note.read_text())])


def wait_until_ended(numbers: list[int]) -> None:
    """Nothing is left of these processes but a zombie that nobody has waited for."""
    deadline = time.monotonic() + 20
    for number in numbers:
        state = Path(f"/proc/{number}/stat")
        while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, number
            time.sleep(0.02)


ALARM = """
import signal
def ring(*_):
    raise TimeoutError
before = signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    while True:
        pass
except TimeoutError:
    return [1.0, 2.0]
"""
ASYNC = """
import asyncio
async def one(text):
    await asyncio.sleep(0)
    return float(len(text))
async def every():
    return await asyncio.gather(*map(one, responses))
return asyncio.run(every())
"""
POOL = """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    return [float(n) for n in pool.map(len, ["a", "bc"])]
"""
ENDED = """
import multiprocessing, os, signal, subprocess, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
    os.kill(os.getpid(), number)
slept = subprocess.Popen(["sleep", "60"])
slept.terminate()
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
forked.start()
os.kill(forked.pid, signal.SIGINT)
forked.terminate()
forked.join(20)
return [float(slept.wait()), float(forked.exitcode)]
"""
FORKED = """
import os
if os.fork() == 0:
    return [5.0, 5.0]
os.wait()
return [1.0, 2.0]
"""
TABLES = "return __import__('pandas').Series([1.0, 2.0]) if 0 else range(1, 3)"


@pytest.mark.parametrize(
    "body, expected",
    [
        (ALARM, [1, 2]),
        (ASYNC, [3, 3]),
        (POOL, [1, 2]),
        (ENDED, [-15, -15]),  # it hears no signal of the trainer's; what it starts does
        (FORKED, [1, 2]),  # the answer of its child is none
        ("import numpy\nreturn numpy.float32([1, 2])", [1, 2]),
        ("import torch\nreturn torch.tensor([1, 2], dtype=torch.bfloat16)", [1, 2]),
        ("import torch\nreturn [torch.tensor(1.0, requires_grad=True), torch.tensor(2)]", [1, 2]),
        ("import numpy\nreturn tuple(numpy.arange(1, 3))", [1, 2]),
        ("import numpy\nreturn numpy.array([1, 2], '>f8')", [1, 2]),  # as of a file
        ("import numpy\nreturn [*numpy.array([1, 2], numpy.longdouble)]", [1, 2]),
        ("return range(1, 3)", [1, 2]),
        ("return {'a': [1, 2], 3: (True, False)}", [2, 2]),
    ],
)
def test_what_works_in_a_call(tmp_path, body, expected):
    assert reward(tmp_path / "mine.py", body) == expected


CHANGES = """
import os, socket, sys, torch
os.environ["OMP_NUM_THREADS"] = os.environ["MASTER_PORT"] = "99"
os.environ["CUDA_VISIBLE_DEVICES"] = "none"
os.environ.pop("RANK", None)
import common.rewards.rules
common.rewards.rules.answers_equal = None
os.chdir("/")
sys.stdout = sys.stderr = None
sys.path.clear()
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.autocast("cpu", torch.bfloat16).__enter__()
torch.backends.cuda.matmul.allow_tf32 = True
torch.use_deterministic_algorithms(True)
socket.setdefaulttimeout(1.5)
kept = bytearray(10**8)
"""


def process_state() -> list:
    from common.rewards import rules

    return [
        dict(os.environ),
        rules.answers_equal,
        os.getcwd(),
        sys.stdout,
        [*sys.path],
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_float32_matmul_precision(),
        torch.get_deterministic_debug_mode(),
        signal.getsignal(signal.SIGTERM),
    ]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("is_top", [True, False])
def test_what_a_program_changes_is_its_own(tmp_path, monkeypatch, is_top):
    """At the top of the file or in a call; it stays there, and so does what it keeps in memory."""
    monkeypatch.setenv("RANK", "0")
    before, size = process_state(), resident_bytes()
    body = "import socket\nreturn [socket.getdefaulttimeout()] * 2"
    top, body = (CHANGES, body) if is_top else ("", f"global kept\n{CHANGES}{body}")
    assert reward(tmp_path / "mine.py", body, top=top) == [1.5, 1.5]
    assert process_state() == before
    assert resident_bytes() - size < 5 * 10**7


def test_state_of_the_file_is_kept_over_calls(tmp_path):
    score = load(
        tmp_path / "mine.py", "n = 0\ndef score(prompts):\n    global n\n    n += 1\n    return n\n"
    )
    assert [score([]), score([])] == [1, 2]


def test_what_a_program_prints_goes_where_it_went(tmp_path, capfd):
    text = "import os\nprint('top')\ndef score(prompts):\n    print('call')\n    os.system('echo child')\n"
    load(tmp_path / "mine.py", text)([])
    assert capfd.readouterr().out.split() == ["top", "call", "child"]


def test_a_call_that_raised_is_made_once_more(tmp_path, capsys):
    """In the same process: a service that was away for a moment ends no run."""
    text = "n = 0\ndef score(prompts):\n    global n\n    n += 1\n    return 1 / (n - prompts[0])\n"
    score = load(tmp_path / "mine.py", text)
    assert score([1]) == 1.0
    assert capsys.readouterr().out == (
        f"warning: {tmp_path}/mine.py:score raised ZeroDivisionError: division by zero (mine.py:5); it is "
        "called once more\n"
    )
    with pytest.raises(user_code.RaisedError, match="KeyError"):
        load(tmp_path / "always.py", "def score(prompts):\n    raise KeyError\n")([])


def test_a_program_that_has_ended_stays_so(tmp_path):
    """No call of it is made again, nor of another function of the file."""
    score = load(tmp_path / "mine.py", "import os\ndef score(prompts):\n    os._exit(7)\n")
    for _ in range(2):
        with user_error("its process ended with code 7"):
            score([])


def test_a_file_that_ends_its_process_at_its_top_is_told(tmp_path):
    with user_error("--reward .*mine.py:score: its process ended with code 5"):
        load(tmp_path / "mine.py", "import os\nos._exit(5)\n")


def test_rows_of_a_table_travel_once(tmp_path, monkeypatch):
    text = "def score(prompts, more):\n    prompts[0]['n'] += more\n    return prompts[0]['n']\n"
    (tmp_path / "mine.py").write_text(text)
    score, *_ = load_function("--curriculum", f"{tmp_path}/mine.py:score", "prompts, more")
    sent, ask = [], score.program.ask
    monkeypatch.setattr(
        score.program, "ask", lambda *request: sent.append(request) or ask(*request)
    )
    rows = [{"n": 1}]
    weigh = with_table(score, rows)
    assert [weigh(1), weigh(5)] == [2, 6]  # each call gets them unchanged
    assert rows == [{"n": 1}]
    assert sum("'n'" in str(request) for request in sent) == 1
    ours = with_table(lambda rows, more: rows[0].update(n=0) or more, rows)
    assert (ours(3), rows) == (3, [{"n": 1}])


# --------------------------------------------------------------------------------------------------
# What they return
# --------------------------------------------------------------------------------------------------


def returned(value):
    return answers.decode(answers.encode(value))


def test_answers_are_plain_data():
    """Nothing of a user's class comes back; a class of numbers or texts is what it is a class of."""

    class Number(float):
        pass

    class Text(str):
        def __reduce__(self):
            return os.system, ("false",)

    values = [
        None,
        True,
        3,
        10**400,
        -0.5,
        "\u4e2d\ud800",
        {"a": [1, (2, 3)]},
        Number(0.1),
        Text("t"),
    ]
    got = returned(values)
    assert got == [None, True, 3, 10**400, -0.5, "\u4e2d\ud800", {"a": [1, [2, 3]]}, 0.1, "t"]
    assert [type(value) for value in got[-2:]] == [float, str]
    assert str(returned([float("nan"), float("-inf")])) == "[nan, -inf]"
    array = returned(np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::2])
    assert (array.dtype, array.tolist()) == (np.uint8, [[0, 2], [3, 5]])
    assert torch.equal(returned(torch.tensor([[True], [False]])), torch.tensor([[True], [False]]))
    assert returned(Path("a/b")) == Path("a/b")
    assert returned([b"\0\xff", bytearray(b"ab")]) == [b"\0\xff", b"ab"]
    for value, name in (
        (Text, "type"),
        (np.array([None]), "ndarray"),
        ({1}, "set"),
    ):
        other = returned(value)
        assert type(other).__name__ == name
        assert repr(other) == repr(value)[:200]
    with user_error("not plain data: keys must be str, int"):
        answers.encode({(1, 2): 3})


def test_an_answer_has_a_largest_size(tmp_path, monkeypatch):
    assert answers.MOST_BYTES == 512 * 2**20
    monkeypatch.setattr(answers, "MOST_BYTES", 1000)
    score = load(tmp_path / "mine.py", "def score(prompts):\n    return 'x' * prompts[0]\n")
    assert len(score([900])) == 900
    with user_error("it returned 10,0.. bytes, more than 1,000"):
        score([10_000])


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "PA"]
)
def test_pictures_come_back_as_they_were(mode):
    """As the policy would see them: upright, on white."""
    from common.data.images import upright_rgb

    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 4), np.uint8)
    picture = Image.fromarray(noise, "RGBA")
    if mode in ("I", "I;16"):
        picture = Image.fromarray(noise.view(np.uint32)[..., 0].astype(np.uint16)).convert(mode)
    elif mode != "RGBA":
        picture = picture.convert(
            "RGB" if mode in ("CMYK", "YCbCr") else "LA" if "A" in mode else "L"
        )
        picture = picture.convert(mode)
    picture.getexif()[0x0112] = 6  # to be turned
    assert returned([picture])[0].size == picture.size
    assert upright_rgb(returned(picture)).size == (5, 7)
    assert upright_rgb(returned(picture)).tobytes() == upright_rgb(picture).tobytes()


def test_grey_of_unknown_range_is_refused():
    with user_error("mode F, values 0.0 to 0.0: not 16-bit grey"):
        answers.encode(Image.new("F", (2, 2)))


def test_a_picture_of_far_too_many_pixels_is_refused():
    """By the trainer, whatever limit the program has set for itself."""
    content = answers.encode(Image.new("1", (20_000, 20_000)))
    with user_error("a picture that is too large: Image size .400000000 pixels. exceeds"):
        answers.decode(content)


# --------------------------------------------------------------------------------------------------
# GPUs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rank, visible, seen",
    [
        (None, None, "0"),
        ("3", None, "3"),
        ("1", "4,GPU-b7", "GPU-b7"),
        ("0", "", ""),
        ("2", "", ""),
    ],
)
def test_a_program_sees_the_gpu_of_its_rank_as_the_first(
    tmp_path, monkeypatch, rank, visible, seen
):
    for name, value in (("LOCAL_RANK", rank), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    names = "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "RANK"
    monkeypatch.setenv("RANK", "11")
    text = f"import os\ndef score(prompts):\n    return [os.environ[name] for name in {names}]\n"
    assert load(tmp_path / "mine.py", text)([]) == [seen, "0", "11"]


@pytest.mark.parametrize("answer, used", [(3, False), (0, True), (100, True)])
def test_the_driver_says_whether_cuda_is_initialised(monkeypatch, answer, used):
    class Driver:
        def __init__(self, name, mode):
            assert (name, mode) == ("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)

        def cuDeviceGetCount(self, count):
            return answer

    assert not child.uses_cuda()
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    assert child.uses_cuda() == used


def test_where_cuda_is_initialised_a_new_interpreter_starts(tmp_path, monkeypatch, capsys):
    """What is forked could not use it."""
    text = "import sys\ndef score(prompts):\n    return prompts + ['torch' in sys.modules]\n"
    monkeypatch.setattr(child, "uses_cuda", lambda: True)
    score = load(tmp_path / "mine.py", text)
    assert capsys.readouterr().out == (
        "CUDA is initialised here, so a program of yours starts in a new interpreter, slowly\n"
    )
    assert score([1]) == [1, False]


LOOK = """
import common.child
common.child.uses_cuda = lambda: True
class Look:
    shared = {shared}
    def reset(self, row):
        return "seen"
    def step(self, text):
        return None, 1.0, True
"""


def test_a_class_in_a_process_that_uses_cuda_must_be_shared(tmp_path):
    row = {"seed": 1, "number": 0}
    for shared in (True, False):
        (tmp_path / f"{shared}.py").write_text(LOOK.format(shared=shared))
        look = load_class("--env", f"{tmp_path}/{shared}.py:Look")
        if shared:
            assert look.make().reset(row, 20) == "seen"
        else:
            with user_error("CUDA is initialised in the program's process, .* say shared = True"):
                look.make()


# --------------------------------------------------------------------------------------------------
# Ends of a rank
# --------------------------------------------------------------------------------------------------

LEAVES = """
import os, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
def score(prompts):
    if os.fork() == 0:
        time.sleep(300)
    slept = subprocess.Popen(["sleep", "300"])
    pool = ThreadPoolExecutor(1)
    pool.submit(time.sleep, 300)
    threading.Thread(target=time.sleep, args=(300,)).start()
    forked = os.popen(f"pgrep -P {os.getpid()}").read().split()
    print(os.getpid(), *forked, flush=True)
    open("{told}", "w").close()
    time.sleep(prompts)
    return 1.0
"""
RUN = """
import os, signal, sys, threading, time
from common.ground import process
from common.user_code import load_function
def send(number):
    while not os.path.exists("{told}"):
        time.sleep(0.05)
    os.kill(os.getpid(), number)
def ask_and_get(number):
    threading.Thread(target=send, args=(number,)).start()
    score(60)
def main():
    global score
    score, *_ = load_function("--reward", "{path}:score", "prompts")
    {main}
process.run_main(main)
"""


@pytest.mark.parametrize(
    "main, code",
    [
        ("score(0)", 0),
        ("score(0); raise process.UserError('a typo')", 2),
        ("score(0); sys.exit(1)", 1),
        ("ask_and_get(9)", -9),
        ("ask_and_get(15)", 75),
        ("ask_and_get(2)", 75),
    ],
)
def test_nothing_is_left_of_a_program_when_its_rank_ends(tmp_path, main, code):
    """Nor does it keep the rank from ending: processes, a thread and a pool that never end."""
    told = tmp_path / "told"
    (tmp_path / "mine.py").write_text(LEAVES.replace("{told}", f"{told}"))
    result = python(RUN.format(path=tmp_path / "mine.py", told=told, main=main))
    assert result.returncode == code, result.stderr
    numbers = [int(word) for word in result.stdout.split()]
    assert len(numbers) >= 3
    wait_until_ended(numbers)


HANGS = """
import os, time
def hang(*_):
    print(os.getpid(), flush=True)
    time.sleep(300)
def score(prompts, responses, references, labels, images):
    return 1.0
score.check = hang
"""


@pytest.mark.parametrize("where", ["import", "check"])
def test_ctrl_c_ends_a_run_whose_program_hangs_at_the_start(tmp_path, where):
    (tmp_path / "mine.py").write_text(HANGS + ("hang()\n" if where == "import" else ""))
    result = python(
        "import os, signal, threading\n"
        "from common.ground import process\n"
        "from common.rewards.sources import load_source\n"
        "def main():\n"
        "    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        f"    load_source('{tmp_path}/mine.py:score').check(['7'], dict(row=[dict()]))\n"
        "process.run_main(main)\n"
    )
    assert (result.returncode, result.stderr.count("stopped by a signal")) == (75, 1)
    wait_until_ended([int(result.stdout)])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_in_the_middle_of_a_call_lets_it_finish(tmp_path, name):
    """Then the step does, and the run saves. A second Ctrl-C ends both at once."""
    (tmp_path / "mine.py").write_text(
        "import os, time\ndef score(prompts):\n    print(os.getpid(), flush=True)\n"
        "    time.sleep(prompts)\n    return 1.0\n"
    )
    tell = f"threading.Timer({{}}, os.kill, (os.getpid(), signal.{name})).start()"
    main = f"process.catch_signals(); {tell.format(0.3)}; print(score(1), process.STOP_SIGNALS)"
    result = python(RUN.format(path=tmp_path / "mine.py", told="", main=main))
    number, *told = result.stdout.split()
    assert (result.returncode, told) == (0, ["1.0", f"[{int(getattr(signal, name))}]"])
    wait_until_ended([int(number)])
    if name == "SIGINT":
        main = f"process.catch_signals(); {tell.format(0.3)}; {tell.format(0.6)}; score(60)"
        result = python(RUN.format(path=tmp_path / "mine.py", told="", main=main))
        assert result.returncode == -signal.SIGINT
        wait_until_ended([int(result.stdout)])


AT_TERMINAL = """
import os, sys, threading, time, types
from common.rewards.sources import RewardArgs, load_source
from helpers import reward_samples, score_samples
master, slave = os.openpty()
os.dup2(slave, 0)
sys.stdin = open(0)
source = load_source("{path}:score")
threading.Timer(2, os.write, (master, b"p 6 * 7\\nc\\n")).start()
print(score_samples(source, reward_samples(["a"]), RewardArgs(reward_timeout=0.5))["reward"])
"""


@pytest.mark.parametrize("stop", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_debugger_at_a_terminal_has_no_limit_of_time(tmp_path, stop):
    (tmp_path / "mine.py").write_text(f"{HEAD}    {stop}\n    return [3.0]\n")
    result = python(AT_TERMINAL.format(path=tmp_path / "mine.py"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith("[3.0]")
    assert "42" in result.stdout


AT_START = """
import os, sys, torch
asked = []
torch.cuda.is_available = torch.cuda.device_count = lambda: asked.append(1) or 0
torch._C._cuda_getDeviceCount = lambda: asked.append(2) or 0
import train_ppo_vl as ppo
flags = "--model m --data d.jsonl --reward {path}:score --env {path}:Look --curriculum {path}:weigh"
args = ppo.parse_args(flags.split())
threads = len(os.listdir("/proc/self/task"))
reward, environment, weigh = ppo.load_programs(args)
print(threads, asked, torch.cuda.is_initialized())
"""


def test_programs_start_before_threads_and_gpus(tmp_path):
    """A thread would be missing in them, and CUDA would fail."""
    text = f"{HEAD}    return 1\ndef weigh(rows, samples, rewards):\n    return 1\n"
    (tmp_path / "mine.py").write_text(text + LOOK.partition("lambda: True")[2].format(shared=True))
    result = python(AT_START.format(path=tmp_path / "mine.py"))
    assert (result.returncode, result.stdout) == (0, "1 [] False\n"), result.stderr
