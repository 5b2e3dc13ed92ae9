"""launch/chat.py says what the trainers' own rollout says."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import train_ppo_vl as ppo
from common.ground.files import printable
from conftest import read_json, save_weights, start, take, words, write_json
from launch import chat as program
from launch import check_model

LENGTH = 12  # tokens, as in conftest's start


@pytest.fixture(scope="module")
def greedy(qwen25, picture_rows):
    """Prompts with 0, 1, 2 and 1 pictures, and the greedy answers of the rollout engine."""
    env = start(qwen25, picture_rows, "--advantage", "grpo")
    batch = ppo.rollout(env.actor, take(env), replace(env.sampling, greedy=True), 1)
    answers = env.processor.decode(batch.split(batch.tokens))
    return [(prompt, answers[i]) for i, prompt in zip(batch.prompt_index.tolist(), batch.prompts)]


def test_one_question_is_answered_as_in_a_rollout(qwen25, greedy, capsys):
    for prompt, answer in greedy:
        program.main(words(qwen25, *prompt.images, prompt.row["prompt"], "--max_new_tokens 12"))
        assert capsys.readouterr().out == printable(answer.strip(), keep="\n\t") + "\n"
    assert len({answer for _, answer in greedy}) > 1


def test_the_checkpoints_own_sampling_is_not_applied(qwen25, greedy, tmp_path, capsys):
    """Qwen's checkpoints come with a repetition penalty and a top_p."""
    shutil.copytree(qwen25, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    write_json(file, read_json(file) | {"repetition_penalty": 5.0})
    prompt, answer = greedy[1]
    program.main(
        words(tmp_path / "model", *prompt.images, prompt.row["prompt"], "--max_new_tokens 12")
    )
    assert capsys.readouterr().out == printable(answer.strip(), keep="\n\t") + "\n"


def test_a_conversation_knows_what_was_said(qwen25, greedy, monkeypatch, capsys):
    """The second question has the first picture and answer before it: the same ids as those of such a row."""
    picture = greedy[1][0].images[0]
    talk = program.Chat(str(qwen25), torch.device("cpu"), "be brief")
    seen = []
    generate = talk.model.generate
    talk.model.generate = lambda **inputs: seen.append(inputs["input_ids"]) or generate(**inputs)
    first = talk.ask("what is this?", [picture], LENGTH)
    talk.ask("and now?", [], LENGTH)
    turns = [
        ("system", "be brief"),
        ("user", "what is this?"),
        ("assistant", first),
        ("user", "and now?"),
    ]
    chat = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    chat[1]["content"].insert(0, {"type": "image"})
    text = talk.processor.tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    pad = talk.processor.config.image_token_id
    expected = [token for token in talk.processor.tokenizer.encode(text) if token != pad]
    assert [token for token in seen[1][0].tolist() if token != pad] == expected
    assert (seen[1] == pad).sum() > 1

    lines = iter(["how many?", "and now?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    program.main(words(qwen25, picture, "--max_new_tokens 3"))
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.parametrize(
    "line, told",
    [
        (["no such folder", "hello"], "no such folder"),
        (["MODEL", "two", "questions"], "one question"),
        (["MODEL", "pictures/of a cat.PNG"], "pictures/of a cat.PNG: no such picture"),
        (["MODEL", __file__, "what is this?"], "test_chat.py"),
    ],
)
def test_what_is_wrong_is_said(qwen25, line, told, capsys):
    with pytest.raises(SystemExit) as error:
        program.main([str(qwen25) if word == "MODEL" else word for word in line])
    assert error.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("tool", [program, check_model])
def test_weights_that_transformers_would_draw_are_refused(qwen25, tool, tmp_path, capsys):
    """The trainers read this name of the head; transformers 5.24 does not, and warns."""
    folder = shutil.copytree(qwen25, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["language_model.lm_head.weight"] = weights.pop("lm_head.weight")
    save_weights(folder, weights)
    with pytest.raises(SystemExit) as error:
        tool.main(words(folder, "hello") if tool is program else words(folder))
    assert error.value.code == 2
    told = capsys.readouterr().err
    assert "transformers finds no lm_head.weight in the files" in told
    assert "not read of the files: ['language_model.lm_head.weight']. Rename" in told
