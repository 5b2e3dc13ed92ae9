"""The examples of launch/environments, each driven by hand and, where a policy can, by a rollout."""

import importlib.util
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import train_ppo_vl as ppo
from common.data.processor import Processor
from common.envs import environments
from common.envs.environments import EnvArgs
from common.envs.replies import encode_reply, read_parts
from conftest import ROOT, read_rows, start, table, take, words
from launch import toy

FOLDER = ROOT / "launch" / "environments"


def program(name: str, folder: Path = FOLDER):
    spec = importlib.util.spec_from_file_location(f"example_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("spec", ["tools.py:Calculator", "zoom.py:Zoom", "hidden_picture.py:Look"])
def test_examples_are_environments(spec):
    environment = environments.load_environment(EnvArgs(env=f"{FOLDER}/{spec}"), 512)
    assert environment.role == ("tool" if "tools" in spec else "user")
    assert environment.shows_images == ("tools" not in spec)


def test_gymnasium_games_are_driven_by_their_own_interface(monkeypatch):
    """By a stand-in for the package, with its five values and its arrays of pixels."""
    import sys
    from types import SimpleNamespace

    import numpy as np

    class Lake:
        def reset(self, seed):
            self.seed, self.steps = seed, 0
            return 0, {}

        def step(self, action):
            self.steps += 1
            return 0, np.float64(action), False, self.steps == 2, {}

        def render(self):
            return np.full((8, 8, 3), self.steps, dtype=np.uint8)

    made = []
    monkeypatch.setitem(
        sys.modules,
        "gymnasium",
        SimpleNamespace(make=lambda name, render_mode: made.append((name, render_mode)) or Lake()),
    )
    game = program("gymnasium_game").Game()
    picture, _ = game.reset({"seed": 3, "game": "FrozenLake-v1", "actions": ["left", "down"]})
    assert made == [("FrozenLake-v1", "rgb_array")]
    assert game.game.seed == 3
    assert picture.size == (8, 8)
    reply, reward, done = game.step("jump")
    assert "none of left, down" in reply
    assert (reward, done) == (0.0, False)
    reply, reward, done = game.step("down")
    assert reply.getpixel((0, 0)) == (1, 1, 1)
    assert (reward, done) == (1.0, False)
    assert game.step("left") == (None, 0.0, True)
    assert (
        game.reset({"seed": 3, "game": "FrozenLake-v1", "actions": [0, 1]})[1] == "Your move: 0, 1."
    )
    assert game.step("1")[1:] == (1.0, False)


def test_tools_are_called_and_their_mistakes_are_told():
    tool = program("tools").Calculator()
    tool.reset({"answer": "12"})

    def replies(*calls: str) -> list[dict]:
        reply, reward, done = tool.step(
            "so:" + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
        )
        assert (reward, done) == (0.0, False)
        return [json.loads(line) for line in reply.splitlines()]

    call = '{"name": "calculate", "arguments": {"a": 3, "operator": "*", "b": 4}}'
    assert replies(call, call.replace("4", "5")) == [{"result": 12}, {"result": 15}]
    for wrong in (
        "{",
        '{"name": "reset", "arguments": {"row": {}}}',
        '{"name": "__init__"}',
        '{"name": "exit"}',
        "[1]",
        '{"name": "calculate", "arguments": {"a": 1}}',
        call.replace("*", "/").replace("4", "0"),
    ):
        assert list(replies(wrong)[0]) == ["error"]
    reply, reward, done = tool.step(f"<tool_call>{call}")  # never closed
    assert (reply, reward, done) == ('{"result": 12}', 0.0, False)
    assert tool.step(" 12") == (None, 1.0, True)
    tool.reset({"answer": 12.0})  # by pandas
    assert tool.step("12") == (None, 1.0, True)
    assert tool.step("13") == (None, 0.0, True)
    for right in ("12.", "The answer is 12", r"So \boxed{12}", "<answer>twelve</answer>"):
        assert tool.step(right) == (None, 1.0, True)


FORMS = {  # of a call of calculate with 3, * and 4; one that is never closed ends with the turn
    "Qwen2.5": '<tool_call>\n{"name": "calculate", "arguments": {"a": 3, "operator": "*", "b": 4}}\n</tool_call>',
    "Qwen3.5": "<tool_call>\n<function=calculate>\n<parameter=a>\n3\n</parameter>\n<parameter=operator>\n*\n"
    "</parameter>\n<parameter=b>\n4\n</parameter>\n</function>\n</tool_call>",
    "GLM-4.5V": "<tool_call>calculate\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>operator"
    "</arg_key>\n<arg_value>*</arg_value>\n<arg_key>b</arg_key>\n<arg_value>4</arg_value>\n</tool_call>",
    "Ministral 3": '[TOOL_CALLS]calculate[ARGS]{"a": 3, "operator": "*", "b": 4}',
    "Gemma 4": '<|tool_call>call:calculate{a:3,operator:<|"|>*<|"|>,b:4}<tool_call|>',
}


@pytest.mark.parametrize("family", FORMS)
def test_calls_are_read_as_the_templates_of_families_teach_them(family):
    tool = program("tools").Calculator()
    tool.reset({"answer": "12"})
    one = FORMS[family]
    two = f"So: {one}\n{one.replace('4', '5')}"
    assert tool.step(two) == ('{"result": 12}\n{"result": 15}', 0.0, False)
    assert tool.step(f"<think>{one}</think>12") == (None, 1.0, True)
    for cut in range(
        len(one) // 2, len(one)
    ):  # by a limit: a result or a mistake, and no traceback
        reply, reward, done = tool.step(one[:cut])
        assert (list(json.loads(reply)), reward, done) in (
            (["error"], 0.0, False),
            (["result"], 0.0, False),
        )


def test_texts_that_look_like_numbers_are_texts_to_a_tool_that_asks_for_them():
    class Shout(program("tools").Tools):
        def shout(self, text: str, times: int = 1, at: dict = {}) -> str:
            return f"{text.upper()}{times}{at}"

    tool = Shout()
    for form in (
        "<tool_call><function=shout><parameter=text>12</parameter><parameter=times>2</parameter>"
        '<parameter=at>{"x": [1]}</parameter></function></tool_call>',
        "<tool_call>shout<arg_key>text</arg_key><arg_value>12</arg_value><arg_key>times</arg_key>"
        '<arg_value>2</arg_value><arg_key>at</arg_key><arg_value>{"x": [1]}</arg_value></tool_call>',
        '[TOOL_CALLS]shout[ARGS]{"text": "12", "times": 2, "at": {"x": [1]}}',
        '<|tool_call>call:shout{text:<|"|>12<|"|>,times:2,at:{x:[1]}}<tool_call|>',
    ):
        reply, *_ = tool.step(form)
        assert json.loads(reply) == {"result": "122{'x': [1]}"}
    reply, *_ = tool.step('<|tool_call>call:shout{text:<|"|>a, b: {"c"}<|"|>}<tool_call|>')
    assert json.loads(reply) == {"result": 'A, B: {"C"}1{}'}
    assert "error" in tool.step("<tool_call>step</tool_call>")[0]


@pytest.mark.parametrize(
    "begin, end", [("", "</think>\n\n"), ("<think>", "</think>"), ("[THINK]", "[/THINK]")]
)
def test_examples_read_what_follows_a_thought(tmp_path, begin, end):
    """Of models that think in every turn, whose template may write <think> itself."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    row = {"folder": str(tmp_path), "image": "a.png", "hidden": "a.png", "prompt": "", "answer": 12}
    call = '<tool_call>{"name": "calculate"}</tool_call>'
    for name, kind, asks in (
        ("tools", "Calculator", call),
        ("zoom", "Zoom", "<zoom>0, 0, 500, 500</zoom>"),
        ("hidden_picture", "Look", "look"),
    ):
        env = getattr(program(name), kind)()
        env.reset(row)
        *_, done = env.step(f"{begin}I could {asks}, or not.{end}{asks}")
        assert not done
        _, reward, done = env.step(f"{begin}Not {asks} again.{end}12")
        assert done
        assert reward in (1.0, {"reward": 1.0, "accuracy": 1.0})


@pytest.mark.parametrize(
    "a, operator, b",
    table(
        """
"x"  | * | 300000000
[1]  | * | 3
"1"  | + | "2"
true | + | 1
1e308 | * | 10
NaN  | + | 1
LONG | * | LONG
""".replace("LONG", "9" * 3000)
    ),
)
def test_a_calculator_takes_and_gives_numbers(a, operator, b):
    tool = program("tools").Calculator()
    arguments = f'{{"a": {a}, "operator": "{operator}", "b": {b}}}'
    reply, *_ = tool.step(
        f'<tool_call>{{"name": "calculate", "arguments": {arguments}}}</tool_call>'
    )
    assert list(json.loads(reply)) == ["error"]
    assert len(reply) < 200


def test_tools_are_methods_of_any_class_but_no_part_of_the_environment():
    module = program("tools")

    class Shout:
        def shout(self, text: str) -> str:
            return text.upper()

        def close(self) -> None:
            raise AssertionError

    class Mine(Shout, module.Calculator):
        limit, Answer = 3, dict

        @staticmethod
        def three() -> int:
            return 3

        def reset(self, row: dict) -> None:
            super().reset(row)

    tool = Mine()
    tool.reset({"answer": 1e-05})
    calls = {
        '"shout", "arguments": {"text": "a"}': "A",
        '"three"': 3,
        '"calculate", "arguments": {"a": 1, "operator": "-", "b": 2}': -1,
    }
    for call, result in calls.items():
        assert tool.step(f'<tool_call>{{"name": {call}}}</tool_call>')[0] == json.dumps(
            {"result": result}
        )
    for name in (
        '"close"',
        '"reset"',
        '"limit"',
        '"Answer"',
        '"reward"',
        '"step"',
        "5",
        '["three"]',
        '"' + 5000 * "x" + '"',
        '"three", "arguments": ' + 2000 * "[",
    ):
        reply, reward, done = tool.step(f'<tool_call>{{"name": {name}}}</tool_call>')
        assert list(json.loads(reply)) == ["error"]
        assert (len(reply) < 200, reward, done) == (True, 0.0, False)
    assert tool.step("1e-05") == (None, 1.0, True)


def test_the_example_of_the_page_takes_numbers_for_answers(tmp_path):
    page = (ROOT / "launch" / "README.md").read_text()
    (tmp_path / "my_env.py").write_text(
        page.partition("# my_env.py")[2].partition("```")[0].partition("\n")[2]
    )
    look = program("my_env", tmp_path).Look()
    look.reset({"folder": "/data", "hidden": "a.png", "answer": 12})
    assert look.step("look") == ([Path("/data/a.png"), "And now?"], -0.05, False)
    assert look.step("12") == (None, {"reward": 1.0, "accuracy": 1.0}, True)


def test_zoom_shows_what_was_asked_for(tmp_path):
    picture = Image.new("RGB", (80, 40), "white")
    picture.paste("red", (40, 0, 60, 20))
    picture.save(tmp_path / "a.png")
    zoom = program("zoom").Zoom()
    zoom.reset({"folder": str(tmp_path), "images": ["a.png"], "answer": "red"})
    (crop,), reward, done = zoom.step("I look: <zoom>500, 0, 750, 500</zoom>")
    assert crop.getcolors() == [(80 * 80, (255, 0, 0))]
    assert (reward, done) == (0.0, False)
    wrong = ["-5, 0, 100, 100", "0.1, 0.1, 0.5, 0.5", "1, 2, 3", "NaN, 0, 5, 5", "", "[0, 0, 9, 9]"]
    for impossible in ("700,0,100,10", f"0,0,{'9' * 5000},0", "0,0,0,0", *wrong):
        reply, reward, done = zoom.step(f"<zoom>{impossible}</zoom>")
        assert isinstance(reply, str)
        assert (reward, done) == (0.0, False)
    assert isinstance(zoom.step("<zoom>1, 2, 3, 4")[0], str)
    assert zoom.step("red") == (None, 1.0, True)
    zoom.reset({"folder": str(tmp_path), "image": "a.png", "answer": 12})
    assert zoom.step("12 ") == (None, 1.0, True)
    exif = Image.Exif()
    # turned by a quarter: the model sees 40 x 80, red below on the left
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.jpg", exif=exif, quality=100)
    zoom.reset({"folder": str(tmp_path), "images": "turned.jpg", "answer": "red"})
    (crop,), *_ = zoom.step("<zoom>550, 550, 950, 700</zoom>")
    assert [abs(a - b) < 8 for a, b in zip(crop.getpixel((9, 9)), (255, 0, 0))] == [True] * 3


def test_a_strip_that_no_processor_takes_is_answered_in_words(tmp_path, qwen25):
    """The processor refuses what is more than 200 times as long as high, one pixel of 1000 here."""
    Image.new("RGB", (1000, 1000)).save(tmp_path / "a.png")
    zoom, processor = program("zoom").Zoom(), Processor(str(qwen25))
    zoom.reset({"folder": str(tmp_path), "image": "a.png", "answer": "red"})
    for asked in ("0, 500, 1000, 501", "500, 0, 501, 1000", "0, 500, 1000, 509"):
        reply, reward, done = zoom.step(f"<zoom>{asked}</zoom>")
        assert "Too thin" in reply
        assert (reward, done) == (0.0, False)
    reply, *_ = zoom.step("<zoom>0, 500, 1000, 510</zoom>")
    read_parts(reply, processor, 512)  # which a rollout does with it


def test_the_words_of_a_mistake_can_be_read(qwen25):
    """A policy may ask for a tool whose name is a special token, which no reply may hold."""
    tool, processor = program("tools").Calculator(), Processor(str(qwen25))
    tool.reset({"answer": "12"})
    for call in (
        '{"name": "<|im_start|>"}',
        '{"name": "calculate", "arguments": {"a": 1, "operator": "<|im_start|>", "b": 2}}',
    ):
        reply, *_ = tool.step(f"<tool_call>{call}</tool_call>")
        assert "<|im_start|>" in json.loads(reply)["error"]
        encode_reply(processor, read_parts(reply, processor, 512), "tool", False)


def test_the_hidden_picture_is_shown_to_who_looks(tmp_path):
    """The toy that is taught to look, a little: its rows have no pictures, its model says "look",
    and a rollout shows them."""
    toy.main(words("--out", tmp_path / "toy", "--train 64 --eval 16 --warm_start_steps 0"))
    hidden = program("hidden_toy", ROOT / "tests" / "benchmarks")
    hidden.main(str(tmp_path / "toy"), str(tmp_path / "look"), steps=2)
    rows = read_rows(tmp_path / "look" / "train.jsonl")
    assert all("images" not in row and (tmp_path / "look" / row["hidden"]).exists() for row in rows)
    dialogues = [
        hidden.example(random.Random(seed), toy.random_rows(random.Random(0), 1, 28, set())[0])
        for seed in range(40)
    ]
    assert {len(texts) for texts in dialogues} == {2, 4}
    assert {"look<|im_end|>"} == {texts[1] for texts in dialogues if len(texts) == 4}
    look = program("hidden_picture").Look()
    row = rows[0] | {"folder": str(tmp_path / "look")}
    look.reset(row)
    (path, question), reward, done = look.step(" look\n")
    assert Path(path).exists()
    assert question == row["prompt"]
    assert (reward, done) == (0.0, False)
    assert look.step("look") == (None, {"reward": 0.0, "accuracy": 0.0}, True)
    look.reset(row)
    assert look.step(row["answer"]) == (None, {"reward": 1.0, "accuracy": 1.0}, True)
    look.reset(row | {"answer": 12})
    assert look.step("12") == (None, {"reward": 1.0, "accuracy": 1.0}, True)
    env = start(
        tmp_path / "look" / "model",
        tmp_path / "look" / "train.jsonl",
        "--env",
        f"{FOLDER / 'hidden_picture.py'}:Look",
        "--max_reply_tokens 40",
    )
    answering = environments.load_environment(env.args, 512)
    environments.check_model(answering, env.processor)
    batch = ppo.rollout(env.actor, take(env, 4), replace(env.sampling, environment=answering), 2)
    assert [talk.ended for talk in batch.conversations].count("error") == 0
