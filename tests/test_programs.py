"""Programs of the user in the trainer's process: what they share with it, the names of their modules, what is
said of them."""

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import user_code
from common.buffers import Conversation
from common.envs import environments
from common.envs.dialogue import EnvRollout
from common.rewards.sources import load_source
from common.threads import Workers
from common.user_code import load_function
from conftest import user_error

ROOT = Path(user_code.__file__).parents[1]


@pytest.fixture(autouse=True)
def no_program_yet(monkeypatch):
    monkeypatch.setattr(user_code, "programs", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})


def load(file: Path, text: str, name: str = "score"):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return load_function("--reward", f"{file}:{name}", "prompts")[0]


def process_state() -> list:
    return [
        sys.stdout,
        sys.stderr,
        os.getcwd(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_float32_matmul_precision(),
        torch.get_deterministic_debug_mode(),
        socket.getdefaulttimeout(),
    ]


CHANGES = """
import io, os, socket, sys, torch
sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
os.chdir("/")
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.autocast("cpu", torch.bfloat16).__enter__()
torch.backends.cuda.matmul.allow_tf32 = True
torch.use_deterministic_algorithms(True)
socket.setdefaulttimeout(1.5)
"""


@pytest.mark.parametrize("where", ["at the top", "in a call", "in a call that fails"])
def test_what_a_program_changes_is_put_back(tmp_path, where):
    before, inside = process_state(), CHANGES.replace("\n", "\n    ")
    if where == "at the top":
        load(tmp_path / "mine.py", f"{CHANGES}\ndef score(prompts):\n    return 1\n")
    else:
        end = "raise ValueError" if "fails" in where else "return 1"
        score = load(tmp_path / "mine.py", f"def score(prompts):{inside}{end}\n")
        try:
            score([])
        except ValueError:
            assert "fails" in where
    assert process_state() == before


def test_what_a_check_or_an_environment_changes_is_put_back(tmp_path):
    """Each of their methods, as the trainer calls it."""
    before, inside = process_state(), CHANGES.replace("\n", "\n    ")
    (tmp_path / "mine.py").write_text(
        f"def change(*_):{inside}return None\n"
        "def score(prompts, responses, references, labels, images):\n    return 1\n"
        "score.check = change\n"
        "class Look:\n    reset = change\n    def step(self, text):\n        return change(), 1.0, True\n"
    )
    load_source(f"{tmp_path / 'mine.py'}:score").check("7")
    assert process_state() == before
    made = user_code.load_object("--env", f"{tmp_path / 'mine.py'}:Look", "")
    rollout = SimpleNamespace(environment=SimpleNamespace(spec="mine.py:Look", make=made))
    episode = SimpleNamespace(prompt=None)
    assert EnvRollout.reset(rollout, episode, {}) is None
    assert process_state() == before
    step, _ = EnvRollout.step(rollout, episode, "a", by_string=False)
    assert step.done
    assert process_state() == before


@pytest.mark.parametrize("change", ['environ["CUDA_VISIBLE_DEVICES"] = ""', 'environ.pop("RANK")'])
def test_a_program_that_hides_gpus_or_ranks_is_refused(tmp_path, monkeypatch, change):
    """Programs are loaded before the trainer looks for its GPU: it would train on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("RANK", "1")
    name = change.split('"')[1]
    with user_error(rf"mine\.py:score: .*mine\.py sets {name}, by which .* subprocess"):
        load(tmp_path / "mine.py", f"import os\nos.{change}\ndef score(prompts):\n    return 1\n")


def test_cuda_is_the_ranks_own_gpu_in_a_call(tmp_path, monkeypatch):
    """Calls run in threads, which begin with the first GPU."""
    devices = threading.local()
    score = load(tmp_path / "mine.py", "def score(devices):\n    return devices.current\n")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda number: setattr(devices, "current", number)
    )
    workers = Workers(1)
    assert workers.submit(score, devices).result(10) == 3
    workers.close()


@pytest.mark.parametrize("end", ["KeyboardInterrupt()", "SystemExit(3)", "BaseException()"])
def test_an_end_that_a_program_asks_for_is_its_error(tmp_path, end):
    with user_error(rf"mine.py:score: .*mine.py raised {end[:10]}.* \(mine.py:2"):
        load(tmp_path / "mine.py", f"\nraise {end}")


def test_calls_that_overlap_while_one_changes_what_they_share_are_refused(tmp_path):
    """The usual tool is exec with redirected output. Several threads would get each other's output."""
    score = load(
        tmp_path / "mine.py",
        "import contextlib, io\n"
        "def score(events):\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out):\n"
        "        events[0].set()\n"
        "        assert events[1].wait(10)\n"
        "    return out.getvalue()\n",
    )
    before, inside, leave = process_state(), threading.Event(), threading.Event()
    workers = Workers(2)
    first = workers.submit(score, [inside, leave])
    assert inside.wait(10)
    with user_error(
        r"mine\.py:score: sys\.stdout is changed while another call runs .* subprocess"
    ):
        score([inside, leave])
    leave.set()
    assert first.result(10) == ""
    workers.close()
    assert process_state() == before


def test_a_call_that_leaves_a_change_to_another_is_refused(tmp_path):
    score = load(tmp_path / "mine.py", "import os\ndef score(wait):\n    wait() or os.chdir('/')\n")
    before, inside, leave = process_state(), threading.Event(), threading.Event()
    workers = Workers(1)
    other = workers.submit(score, lambda: inside.set() or leave.wait(10))
    assert inside.wait(10)
    with user_error("the working folder is changed while another call runs"):
        score(lambda: False)
    leave.set()
    other.result(10)
    workers.close()
    assert process_state() == before


def test_overlapping_calls_that_change_nothing_are_fine(tmp_path):
    score = load(tmp_path / "mine.py", "def score(barrier):\n    return barrier.wait(5) >= 0\n")
    workers, barrier = Workers(2), threading.Barrier(2)
    assert all([call.result(10) for call in [workers.submit(score, barrier) for _ in range(2)]])
    workers.close()


def test_a_time_limit_by_a_signal_is_told(tmp_path, capsys):
    """It fails in a thread. Who catches that, as verl's reward around math-verify does, pays 0 for every
    answer."""
    score = load(
        tmp_path / "mine.py",
        "import signal\n"
        "def score(prompts):\n"
        "    try:\n"
        "        signal.signal(signal.SIGALRM, print)\n"
        "        return 1\n"
        "    except ValueError:\n"
        "        return 0\n",
    )
    workers = Workers(1)
    assert [workers.submit(score, []).result(10) for _ in range(2)] == [0, 0]
    workers.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"warning: .*mine\.py:score: signals, .* parsing_timeout=None", line)


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


def test_two_programs_of_one_name_work(tmp_path):
    texts = ["def score(prompts):\n    return 1\n", "def score(prompts):\n    return 2\n"]
    first, second = [load(tmp_path / folder / "mine.py", text) for folder, text in zip("ab", texts)]
    assert (first([]), second([])) == (1, 2)


def test_a_file_that_two_flags_name_is_one_module(tmp_path):
    """It shares what it has loaded and counted, also with a program beside it that imports it."""
    text = "calls = []\ndef score(prompts):\n    calls.append(1)\n    return len(calls)\n"
    (tmp_path / "mine.py").write_text(text)
    other = load(
        tmp_path / "other.py", "import mine\ndef score(prompts):\n    return mine.score([])\n"
    )
    for name in ("mine", "json"):  # under a name that is taken, too
        first = load(tmp_path / f"{name}.py", text)
        again = load(tmp_path / f"{name}.py", text)
        assert (first([]), again([])) == (1, 2)
    assert other([]) == 3


@pytest.mark.parametrize(
    "shared, text",
    [
        ("helper.py", "import helper"),
        ("parts/__init__.py", "from parts import two"),
        ("bare/two.py", "from bare.two import N"),
        ("helper.py", "def late():\n    import helper.more"),
        ("mine.py", "import mine"),  # another program
        ("more.py", "import of_b"),  # which imports it
    ],
)
def test_helpers_of_two_programs_are_told_apart(tmp_path, shared, text):
    """Python has one module of a name; a file that nothing imports does not matter."""
    end = "\ndef score(prompts):\n    return 1\n"
    for folder in "ab":
        for name in (shared, "parts/two.py", "unused.py"):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text("N = 1\n")
    (tmp_path / "b" / "of_b.py").write_text("import more\n")
    load(tmp_path / "a" / "mine.py", f"import unused{end}")
    load(tmp_path / "b" / "fine.py", f"import math{end}")
    name = shared.removesuffix(".py").partition("/")[0]
    with user_error(f"{name} is in {tmp_path}/a and in {tmp_path}/b: rename one of them"):
        load(tmp_path / "b" / "other.py", text + end)


def test_the_files_of_a_program_are_what_it_imports_from_its_folder(tmp_path):
    """One by another; not what only lies there, or only another program imports."""
    names = ("of_other", "helper", "parts/__init__", "parts/more", "bare/two", "unused")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("N = 1\n")
    (tmp_path / "helper.py").write_text("import math, bare.two\nfrom parts import more\n")
    end = "\ndef score(prompts):\n    return 1\n"
    load(tmp_path / "other.py", f"import of_other{end}")
    load(tmp_path / "mine.py", f"import torch\nfrom helper import math{end}")
    names = ("mine", "helper", "bare/two", "parts/__init__", "parts/more")
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
        run += f"first, _ = load_function('--reward', '{spec}', 'prompts')\n"
        run += f"again, _ = load_function('--reward', '{spec}', 'prompts')\n"
        run += "print(first([1, 2]), again([3]))\n"
    ended = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "[1, 4] [9]\n"
    assert "rename " in ended.stderr


def test_a_misspelled_function_lists_those_of_the_file(tmp_path):
    text = "from math import sqrt\ndef score(prompts):\n    pass\nclass Look:\n    pass\n"
    with user_error(r"mine\.py has no 'scor'; it has score, Look$"):
        load(tmp_path / "mine.py", text, "scor")
    with user_error("it defines no function or class"):
        load(tmp_path / "none.py", "import math\n")


def test_a_sample_that_may_have_the_output_of_another_ends_the_run():
    """All others of an environment's errors end their sample alone."""
    failed, fine = (Conversation("user") for _ in range(2))
    failed.error = "tools.py:Tool: rows.jsonl:1: ZeroDivisionError"
    environments.check_failures([failed, fine])
    failed.error = f"tools.py:Tool: rows.jsonl:1: sys.stdout {user_code.OVERLAP}"
    with user_error("tools.py:Tool: rows.jsonl:1: sys.stdout is changed"):
        environments.check_failures([fine, failed])
