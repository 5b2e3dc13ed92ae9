"""Conversations with environments: tokens, log-probs and gradients against one Hugging Face forward
of each whole conversation, rewards of turns against loops, threads, time limits and errors, records
and metrics."""

import dataclasses
import itertools
import json
import math
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import train_ppo_vl as ppo
from common import losses, user_code
from common.data.coordinates import Place
from common.data.processor import Processor
from common.data.rows import Prompt
from common.data.transcripts import finished_text
from common.envs import dialogue, environments
from common.envs.environments import EnvArgs
from common.looks import image_changes
from common.model import packs
from common.rewards import sources
from conftest import (
    ROUNDING,
    computing,
    hugging_face,
    marked,
    read_json,
    read_rows,
    records,
    reproducible,
    rounding,
    seeded,
    start,
    take,
    user_error,
    words,
    write_checkpoint,
    write_rows,
)
from families import DAILY, GEMMA4, TEXT_ONLY, write_family
from helpers import cut_back, samples_of
from launch import toy
from talkers import PROGRAMS, expected_logprobs, talk, whole

pytestmark = pytest.mark.usefixtures("write_samples")


def end_often(env) -> None:
    """Random weights hardly ever draw the end token: let a fifth of all others end a turn as well."""
    more = tuple(i for i in range(len(env.processor.tokenizer) - 20) if i % 5 == 0)
    env.processor.stop_ids = tuple(sorted({*env.processor.stop_ids, *more}))
    env.sampling = dataclasses.replace(env.sampling, stop_ids=torch.tensor(env.processor.stop_ids))


def check_exact(env, oracle, batch) -> None:
    """Recorded and packed log-probs, of whole groups in one row and of single samples, = the oracle's."""
    expected = expected_logprobs(env, oracle, batch)
    bound = ROUNDING * expected.abs().max()
    assert (batch.logprobs - expected).abs().max() < bound
    for apart in (False, True):
        with computing(env.actor, apart=apart, max_tokens_per_pack=10**6 if not apart else 300):
            trained = ppo.logprobs_of(env.actor, batch)
        assert (trained - expected).abs().max() < bound
    assert torch.equal(batch.stream[batch.is_own], batch.tokens)


def as_told(env, batch, i: int) -> str:
    """The text of a conversation's tokens, a picture as one token and each turn of the policy as a sign."""
    prompt = batch.prompts[int(batch.prompt_index[i])].input_ids
    owns = [False] * len(prompt) + batch.is_own.split(batch.stream_lengths.tolist())[i].tolist()
    text = ""
    for is_own, part in itertools.groupby(
        zip(owns, whole(batch, i).tolist()), key=lambda pair: pair[0]
    ):
        ids = [token for _, token in part]
        pictures = [
            k
            for k in range(1, len(ids))
            if ids[k] == ids[k - 1] == env.processor.config.image_token_id
        ]
        text += (
            "#"
            if is_own
            else env.processor.tokenizer.decode(
                [ids[k] for k in range(len(ids)) if k not in pictures]
            )
        )
    return text


def turns_of(row: dict) -> list[str]:
    """What the policy says in the conversation of a row."""
    return [message["content"] for message in row["conversation"] if message["role"] == "assistant"]


def as_rendered(env, batch, i: int) -> str:
    """The chat template's own text of a whole conversation up to the last turn of the policy, each a sign."""
    conversation, prompt = batch.conversations[i], env.prompts[int(batch.prompt_index[i])]
    *before, last = prompt.messages
    messages = [*before, {**last, "content": last["content"] + conversation.opening}]
    for reply in conversation.replies:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "#"}]})
        messages.append({"role": conversation.role, "content": reply})
    return (
        env.processor.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        + "#"
    )


# ------------------------------------------------------------------------------------------------ exactness
@pytest.mark.parametrize(
    "checkpoint, name, stop",
    marked(
        [
            ("qwen2_5_vl", "Talk", ""),
            ("qwen2_5_vl", "Tool", '["a", "e", "r"]'),
            ("qwen2_5_vl", "Same", '["a", "e", "r"]'),
            ("qwen3_vl", "Same", '["a", "e", "r"]'),
        ],
        daily=3,
    ),
    indirect=["checkpoint"],
)
def test_packed_logprobs_equal_one_forward_of_the_whole_conversation(
    checkpoint, picture_rows, name, stop
):
    """Qwen2.5-VL and Qwen3-VL, pictures in prompts, first observations and replies; turns
    that end by a token or a string; and the text of the tokens is what the template writes of the
    whole conversation."""
    env = start(checkpoint, picture_rows, "--max_new_tokens 48 --stop_strings", stop)
    if not stop:
        end_often(env)
    batch = talk(env, name, 3)
    assert max(len(conversation.replies) for conversation in batch.conversations) == 3
    assert sum(len(conversation.grids) for conversation in batch.conversations) > 5
    oracle = hugging_face(checkpoint)
    check_exact(env, oracle, batch)
    for i, conversation in enumerate(batch.conversations):
        # the last turn ends by a string, not by an end token of its own
        if stop and conversation.ended != "answered":
            assert as_told(env, batch, i) == as_rendered(env, batch, i)


# whose pictures are seen both ways, are tiles, have rows with breaks
FURTHER = ("gemma4_31b", "internvl", "mistral3")


@pytest.mark.parametrize(
    "kind", marked((kind for kind in (*DAILY, *FURTHER) if kind != "qwen2_vl"), DAILY)
)
def test_every_family_talks_exactly(kind, tmp_path, picture_rows):
    try:
        model = write_family(kind, tmp_path, picture_rows)
    except ImportError:
        pytest.skip(f"transformers wants torchvision for {kind}")
    env = start(tmp_path, tmp_path / "rows.jsonl", '--max_new_tokens 24 --stop_strings ["e","a"]')
    if kind == "llava":
        end_often(env)
    name = "Words" if kind in (*TEXT_ONLY, *GEMMA4) else "Talk"
    batch = talk(env, name, 2)
    assert sum(len(conversation.replies) for conversation in batch.conversations) >= 4
    check_exact(env, model.from_pretrained(tmp_path, attn_implementation="eager").eval(), batch)


@pytest.mark.parametrize("flags", marked(["--train_vision", "--lora_rank 2"]))
def test_gradients_equal_one_backward_of_each_conversation(qwen25, picture_rows, flags):
    """Of the sum of all own tokens' log-probs; a trained tower sees the pictures of replies."""
    env = start(qwen25, picture_rows, '--max_new_tokens 16 --stop_strings ["a","e"]', flags)
    batch = talk(env, "Same", 2)
    oracle = hugging_face(qwen25)
    oracle.get_input_embeddings().padding_idx = None  # the policy may say its padding token, too
    check_exact(env, oracle, batch)
    if "lora" in flags:
        return
    env.actor.train()
    for row in packs.of_batch(env.actor.model, batch):
        logp, *_ = env.actor(row, batch.sampling)
        logp.sum().backward()
    expected_logprobs(env, oracle, batch, gradient=True).sum().backward()
    theirs = dict(oracle.named_parameters())
    compared = 0
    for name, parameter in env.actor.model.named_parameters():
        if parameter.grad is None:
            continue
        compared += "visual" in name
        grad = (
            parameter.grad.full_tensor()
            if hasattr(parameter.grad, "full_tensor")
            else parameter.grad
        )
        assert (grad - theirs[name].grad).norm() <= 2e-4 * theirs[name].grad.norm() + rounding(1), (
            name
        )
    assert bool(compared) == ("vision" in flags)


# ------------------------------------------------------------------------------------------------ engine
def same(one, other, bits: bool = False) -> None:
    """Two batches of the same conversations; ``bits``: log-probs too."""
    assert [
        dataclasses.replace(conversation, seconds=0, images=[], features=None)
        for conversation in one.conversations
    ] == [
        dataclasses.replace(conversation, seconds=0, images=[], features=None)
        for conversation in other.conversations
    ]
    for name in ("tokens", "own_lengths", "stream", "is_own", "stream_positions", "truncated"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (
        torch.equal(one.logprobs, other.logprobs)
        if bits
        else (one.logprobs - other.logprobs).abs().max() < ROUNDING
    )


@pytest.mark.slow
def test_conversations_do_not_depend_on_slots_threads_or_polling(
    qwen25, picture_rows, poll, graphs_of
):
    """Few slots, which are refilled and compacted; a host that looks late, so that turns are wound
    back; threads that answer in any order, several at once; small prefills; graphs of a batch size,
    which decode over waiting slots."""
    env = start(qwen25, picture_rows, '--max_new_tokens 24 --stop_strings ["a","e","r"]')
    expected = talk(env, "Slow", 4)
    assert {conversation.ended for conversation in expected.conversations} >= {
        "answered",
        "token_limit",
    }
    same(talk(env, "Slow", 4), expected, bits=True)
    for slots, workers, poll[0], tokens in ((0, 6, 8, 600), (3, 4, 1, 90)):
        with computing(env.actor, max_tokens_per_pack=tokens):
            same(talk(env, "Slow", 4, slots=slots, env_workers=workers), expected)
    batch = take(env)
    for group in range(4):
        part = talk(env, "Slow", 4, batch=batch.select_prompts([group]))
        assert torch.equal(part.tokens, expected.select_prompts([group]).tokens)
    captured = graphs_of()
    same(talk(env, "Slow", 4, slots=7, env_workers=2), expected)
    assert len(captured) > 1


@pytest.fixture
def hybrid(tmp_path, picture_rows):
    """Qwen3.5, whose slots hold states."""
    env = start(
        write_checkpoint(tmp_path / "hybrid", "qwen3_5"), picture_rows, "--max_new_tokens 32"
    )
    end_often(env)
    return env


@pytest.mark.slow
def test_states_of_linear_attention_wait(hybrid, poll):
    """Slots are refilled and moved, and decoded over while their samples wait."""
    expected = talk(hybrid, "Slow", 4)
    assert sum(len(conversation.replies) for conversation in expected.conversations) > 20
    poll[0] = 8
    for slots, workers, tokens in ((0, 6, 600), (3, 4, 90)):
        with computing(hybrid.actor, max_tokens_per_pack=tokens):
            same(talk(hybrid, "Slow", 4, slots=slots, env_workers=workers), expected)


def test_what_a_waiting_slot_must_hold(hybrid):
    """The sampler's log-probs are those of the packed rows."""
    batch = talk(hybrid, "Words", 3)
    assert (ppo.logprobs_of(hybrid.actor, batch) - batch.logprobs).abs().max() < ROUNDING


def test_environments_run_side_by_side(qwen25, picture_rows, monkeypatch, tmp_path):
    env = start(qwen25, picture_rows, '--max_new_tokens 24 --stop_strings ["a","e","r"]')
    for workers in (5, 0):
        log = tmp_path / f"{workers}.txt"
        monkeypatch.setenv("TALKERS_LOG", str(log))
        monkeypatch.setattr(user_code, "programs", {})  # a process that knows the variable
        talk(env, "Slow", 3, env_workers=workers)
        steps = [tuple(map(float, line.split()[2:])) for line in log.read_text().splitlines()]
        most = max(sum(start <= began < end for start, end in steps) for began, _ in steps)
        assert 1 < most <= 5 if workers else most == 1


def test_a_sample_has_a_process_while_it_has_a_slot(qwen25, picture_rows, monkeypatch, tmp_path):
    """Each its own, of which no more live than there are slots. Samples beyond them are reset twice: before
    decoding for the observation in their prompt, and when they have a slot."""
    env = start(qwen25, picture_rows, '--max_new_tokens 24 --stop_strings ["a","e","r"]')
    for slots in (12, 3):
        log = tmp_path / f"{slots}.txt"
        monkeypatch.setenv("TALKERS_LOG", str(log))
        monkeypatch.setattr(user_code, "programs", {})
        batch = talk(env, "Closing", 3, slots=slots, env_workers=4)
        assert len(batch) == 12
        alive, most = set(), 0
        lines = [line.split() for line in log.read_text().splitlines()]
        for what, _, process in lines:
            alive = alive | {process} if what == "reset" else alive - {process}
            most = max(most, len(alive))
        assert most <= slots
        assert not alive
        twice = 12 - slots
        assert len({process for *_, process in lines}) == 12 + twice
        closed = sorted(int(turn) for what, turn, _ in lines if what == "close")
        turns = sorted(len(conversation.ends) for conversation in batch.conversations)
        assert closed == [0] * twice + turns


def test_an_object_that_dies_or_hangs_fails_alone(qwen25, picture_rows, monkeypatch, tmp_path):
    env = start(qwen25, picture_rows, '--max_new_tokens 24 --stop_strings ["a","e","r"]')
    monkeypatch.setenv("TALKERS_LOG", str(tmp_path / "log.txt"))
    prompts = take(env).select_prompts([0])
    batch = talk(env, "Dying", 3, batch=prompts, env_workers=2)
    errors = [conversation.error for conversation in batch.conversations]
    assert "its process ended by SIGSEGV" in errors[1]
    assert "rows.jsonl:1" in errors[1]
    assert errors[0] == errors[2] == ""
    batch = talk(env, "Stuck", 4, batch=prompts, env_workers=4, env_timeout=1.0)
    errors = [conversation.error for conversation in batch.conversations]
    assert ["took longer than 1 s (--env_timeout)" in error for error in errors] == [0, 1, 1, 0]
    closed = (tmp_path / "log.txt").read_text().split()[1::2]
    assert sorted(closed) == ["0", "2", "3"]  # what is late in reset is ended, not closed


def test_objects_of_a_shared_class_live_together(qwen25, picture_rows, monkeypatch, tmp_path):
    env = start(qwen25, picture_rows, '--max_new_tokens 24 --stop_strings ["a","e","r"]')
    monkeypatch.setenv("TALKERS_LOG", str(tmp_path / "log.txt"))
    batch = talk(env, "Shared", 3, env_workers=4)
    same(batch, talk(env, "Words", 3))
    lines = [line.split() for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert sorted(int(count) for _, count, _ in lines) == [*range(1, 13)]
    assert len({process for *_, process in lines}) == 1


def test_samples_draw_different_noise_that_a_run_repeats(
    qwen25, picture_rows, monkeypatch, tmp_path
):
    """Copies of one process would all draw the same."""
    env = start(qwen25, picture_rows, '--max_new_tokens 24 --stop_strings ["a","e","r"]')
    drawn = []
    for name in ("first.txt", "again.txt"):
        monkeypatch.setenv("TALKERS_LOG", str(tmp_path / name))
        monkeypatch.setattr(user_code, "programs", {})
        talk(env, "Chance", 2)
        drawn.append((tmp_path / name).read_text().splitlines())
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == len(drawn[0]) >= 8


def test_limits_of_turns_tokens_and_replies(qwen25, picture_rows):
    env = start(qwen25, picture_rows, '--max_new_tokens 60 --stop_strings ["a","e","r","o"]')
    free = talk(env, "Words", 2)
    short = talk(env, "Words", 2, max_turns=2)
    assert {conversation.ended for conversation in short.conversations} <= {
        "turn_limit",
        "token_limit",
    }
    for i, (long, cut) in enumerate(zip(free.conversations, short.conversations)):
        assert cut.replies == long.replies[:1]
        assert len(cut.turn_tokens(short.split(short.tokens)[i])) <= 2
        assert bool(short.truncated[i])
    few = talk(env, "Words", 2, max_reply_tokens=30)
    whole, stops = [], [env.processor.tokenizer.decode(i) for i in env.processor.stop_ids]
    cut = talk(start(qwen25, picture_rows, "--max_new_tokens 3"), "Words", 2)
    # a limit ends a conversation after a turn that has an end, or in a turn
    for batch, ends in (
        (free, [*"aero", *stops]),
        (short, [*"aero", *stops]),
        (few, [*"aero", *stops]),
        (cut, stops),
    ):
        for i, (conversation, tokens) in enumerate(
            zip(batch.conversations, batch.split(batch.tokens))
        ):
            last = env.processor.tokenizer.decode(conversation.turn_tokens(tokens)[-1])
            whole.append(any(end in last for end in ends))
            assert finished_text(batch, i, last) == (last if whole[-1] else "")
    assert {True, False} == set(whole)
    replied = [int((~is_own).sum()) for is_own in few.is_own.split(few.stream_lengths.tolist())]
    openings = [
        replied[i] for i, conversation in enumerate(few.conversations) if not conversation.replies
    ]
    assert few.stream_lengths.max() <= 60 + 30 + max(openings, default=0) + 12
    assert all(conversation.ended != "answered" for conversation in few.conversations)
    assert {conversation.ended for conversation in free.conversations} == {"answered"}
    assert not free.truncated.any()


WRONG = {
    1: "KeyError: 'no board'",
    2: "ZeroDivisionError: no rule for this (talkers.py:",
    3: "not 'much'",
    4: "took longer than 1.5 s",
    5: "expected a text, a Pillow image",
    6: "no reply, and is not done",
    7: "special token",
}


@pytest.mark.slow
def test_an_environment_that_fails_ends_its_sample(qwen25, picture_rows, monkeypatch):
    """It raises, returns rubbish, or takes too long; the others go on, and nothing hangs."""
    env = start(qwen25, picture_rows, '--max_new_tokens 60 --stop_strings ["a","e","r","o"]')
    for workers in (0, 1):
        began = time.monotonic()
        batch = talk(
            env,
            "Bad",
            8,
            batch=take(env).select_prompts([0, 1]),
            env_workers=workers,
            env_timeout=1.5,
        )
        assert time.monotonic() - began < 60
        for number, conversation in zip(batch.sample_number.tolist(), batch.conversations):
            assert (conversation.ended, bool(conversation.error)) == (
                ("error", True) if number else ("answered", False)
            )
            if number:
                assert WRONG[number] in conversation.error
                assert "rows.jsonl:" in conversation.error
                assert "Bad" in conversation.error
        earned = torch.tensor([sum(conversation.rewards) for conversation in batch.conversations])
        assert (earned[batch.sample_number > 0] == 0).all()
        assert (earned[batch.sample_number == 0] > 1).all()
        assert (batch.own_lengths > 0).all()
        assert not batch.truncated.any()
    check_exact(env, hugging_face(qwen25), batch)
    env_row = dialogue.env_row
    monkeypatch.setattr(dialogue, "env_row", lambda row, seed, number: env_row(row, seed, number=2))
    with user_error("samples failed, the first: .*Bad: rows.jsonl:1: ZeroDivisionError"):
        talk(env, "Bad", 2)


def test_an_environment_may_ask_for_turns_that_are_cut(qwen25, picture_rows):
    """It rewards them, and the sample ends by the limit all the same; all else is as without: rules get
    no text of such a turn."""
    env = start(qwen25, picture_rows, "--max_new_tokens 16 --stop_strings", '["a","e"]')
    without, batch = (talk(env, name, 4) for name in ("Grading", "GradingCutTurns"))
    assert torch.equal(batch.tokens, without.tokens)
    assert torch.equal(batch.truncated, without.truncated)
    cut = 0
    for i, tokens, one, other in zip(
        range(len(batch)), batch.split(batch.tokens), without.conversations, batch.conversations
    ):
        assert finished_text(batch, i, "said") == finished_text(without, i, "said")
        assert one.ended == other.ended
        turns = env.processor.decode(other.turn_tokens(tokens))
        rewarded = len(turns) if one.ended != "token_limit" else len(one.rewards)
        assert one.rewards == [float(len(text)) for text in turns[:rewarded]]
        assert other.rewards == [float(len(text)) for text in turns]
        assert other.ends[-1] == len(tokens)
        cut += len(turns) > rewarded
    assert 0 < cut < len(batch)


def test_a_sample_without_its_own_reset_knows_what_its_prompt_shows(qwen25, picture_rows):
    """A shared observation stands in the prompt of all samples, of those too whose environment failed."""
    env = start(qwen25, picture_rows, '--max_new_tokens 16 --stop_strings ["a","e","r"]')
    prompts = take(env).select_prompts([1, 2])
    batch = talk(env, "Absent", 2, batch=prompts)
    for group, number, conversation in zip(
        batch.prompt_index.tolist(), batch.sample_number.tolist(), batch.conversations
    ):
        assert (conversation.ended == "error") == (number == 0)
        assert conversation.opening[0]["text"] == "the board"
        assert conversation.images[0].size[1] == 56
        assert len(batch.prompts[group].grids) == len(prompts.prompts[group].grids) + 1
    assert len(image_changes.vision_gaps(env.actor, batch)) == 4


def test_samples_of_a_prompt_that_see_different_pictures_first_are_refused(qwen25, picture_rows):
    env = start(qwen25, picture_rows, '--max_new_tokens 16 --stop_strings ["a","e","r"]')
    with user_error(
        "Apart: rows.jsonl:1: reset shows different first observations to samples of one prompt"
    ):
        talk(env, "Apart", 2)


def test_a_first_observation_that_does_not_fit_fails_its_samples(qwen25, picture_rows):
    env = start(qwen25, picture_rows, '--max_new_tokens 16 --stop_strings ["a","e","r"]')
    with user_error(
        "8 of 8 samples failed, the first: .*Endless: rows.jsonl:1: .*too long with the first observation"
    ):
        talk(env, "Endless", 2)


def test_a_reply_of_megabytes_ends_its_sample_and_is_not_tokenized(
    qwen25, picture_rows, monkeypatch
):
    sizes, token_ids = [0], Processor.token_ids
    monkeypatch.setattr(
        Processor,
        "token_ids",
        lambda self, text, *more: sizes.append(len(text)) or token_ids(self, text, *more),
    )
    env = start(qwen25, picture_rows, '--max_new_tokens 16 --stop_strings ["a","e","r"]')
    batch = talk(env, "Flood", 2)
    conversations = [conversation for conversation in batch.conversations if conversation.rewards]
    assert conversations
    assert {conversation.ended for conversation in conversations} == {"token_limit"}
    assert {tuple(conversation.rewards) for conversation in conversations} == {(0.25,)}
    # 400 tokens fill no more
    assert 1600 < max(sizes) < 100_000


@pytest.mark.parametrize("names", [True, False])
def test_an_environment_says_its_accuracy_by_name(qwen25, picture_rows, names):
    """A right answer after a look that costs something: its reward is below 1, its accuracy is not.
    Without a name the rule holds: 1 where it gave 1 or more."""
    env = start(
        qwen25, picture_rows, '--max_new_tokens 32 --stop_strings ["a","e","r"]', "--reward env"
    )
    batch = talk(env, "Right" if names else "Costly", 2)
    sources.load_rewards(env.args).score(batch, env.processor, 0)
    answered = torch.tensor(
        [conversation.ended == "answered" for conversation in batch.conversations]
    )
    assert answered.any()
    assert torch.allclose(batch.rewards[answered], torch.tensor(0.9))
    assert torch.equal(
        batch.components["accuracy"], answered.float() if names else torch.zeros(len(batch))
    )


@pytest.mark.parametrize(
    "accuracies, expected",
    [([None, None, None], [1.0, 0.0, 1.0]), ([None, 0.5, None], [0.0, 0.5, 0.0])],
)
def test_without_any_accuracy_a_reward_of_1_is_right(accuracies, expected):
    """The sum of a sample's turns."""
    rewards = [0.5, 0.5], [0.9], [2.0]
    conversations = [
        SimpleNamespace(rewards=earned, accuracy=accuracy, ends=range(len(earned)))
        for earned, accuracy in zip(rewards, accuracies)
    ]
    batch = SimpleNamespace(conversations=conversations, offsets=torch.tensor([0, 4, 8, 12]))
    columns = sources.score_turns(batch, [0, 1, 2], None).columns
    columns = sources.score_turns(batch, [0, 1, 2], None).columns
    assert columns["reward"].tolist() == [1.0, 0.9, 2.0]
    assert columns["accuracy"].tolist() == expected


def test_an_environment_may_change_its_row():
    """... and gets the sizes of its images, and None of a clip."""
    places = (Place((50, 30), (56, 28), "seen"), None)
    row = Prompt(
        [],
        "",
        (),
        (),
        torch.empty(0, dtype=torch.int64),
        0,
        row={"board": [[0, 0]]},
        folder="/data",
        places=places,
    )
    for number in range(2):
        taken = environments.env_row(row, (0,), number)
        assert (taken["board"], taken["number"], taken["folder"]) == ([[0, 0]], number, "/data")
        assert taken["places"] == [*places]
        taken["board"][0][0] = 1
    assert row.row == {"board": [[0, 0]]}


@pytest.mark.parametrize("name", ["reset", "step", "close"])
def test_an_environment_whose_methods_must_be_awaited_is_refused(tmp_path, name):
    methods = "".join(
        f"    {'async ' * (each == name)}def {each}(self, *_):\n        pass\n"
        for each in ("reset", "step", "close")
    )
    (tmp_path / "mine.py").write_text(f"class Mine:\n{methods}")
    with user_error(f"{name} is async, and nothing awaits it"):
        environments.load_environment(EnvArgs(env=f"{tmp_path}/mine.py:Mine"), 512)


@pytest.mark.parametrize(
    "reward", [{"accuracy": 1.0}, {"reward": 1.0, "style": 0.5}, {"reward": math.nan}, "much", None]
)
def test_what_is_no_reward_is_an_error(reward):
    with pytest.raises((ValueError, TypeError), match="the reward of a step must be|float"):
        environments.read_step((None, reward, True))
    assert environments.read_step((None, {"reward": 1, "accuracy": 0}, True)) == (
        None,
        1.0,
        0.0,
        True,
    )


# ------------------------------------------------------------------------------------------------ rewards
def test_rollouts_with_and_without_rows_of_the_environment_are_one_batch(qwen25, picture_rows):
    """Where no row of a rollout asks the environment, nothing was earned early; rewards at turns of
    the others stay."""
    recipe = json.dumps({"game": [["env", 1]], "*": [["exact", 1]]})
    env = start(
        qwen25,
        picture_rows,
        '--max_new_tokens 24 --stop_strings ["a","e","r"]',
        "--reward_recipe",
        recipe,
    )
    reward, prompts = sources.load_rewards(env.args), take(env)
    labels = ("game", "quiz", "quiz", "quiz")
    prompts.prompts = [
        dataclasses.replace(p, label=label, reference="1")
        for p, label in zip(prompts.prompts, labels)
    ]
    parts = [talk(env, "Words", 2, batch=prompts.select_prompts([prompt])) for prompt in (1, 0)]
    for part in parts:
        reward.score(part, env.processor, 0)
    assert not parts[0].turn_rewards.any()
    assert parts[1].turn_rewards.any()
    joined = ppo.Batch.concatenate(parts)
    assert torch.equal(joined.turn_rewards, torch.cat([part.turn_rewards for part in parts]))
    earned = losses.sum_per_sample(parts[1].turn_rewards, parts[1].own_lengths)
    assert torch.equal(earned.float(), parts[1].rewards)


def test_a_batch_knows_where_turns_end(qwen25, picture_rows):
    env = start(qwen25, picture_rows, '--max_new_tokens 24 --stop_strings ["a","e","r"]')
    batch = talk(env, "Words", 2)
    ends = []
    for conversation, tokens in zip(batch.conversations, batch.split(batch.tokens)):
        for turn in conversation.turn_tokens(tokens):
            ends += [False] * (len(turn) - 1) + [True] * bool(len(turn))
    assert batch.turn_ends.tolist() == ends
    assert sum(ends) > len(batch)
    assert torch.equal(take(env).turn_ends, torch.zeros(0, dtype=torch.bool))


def test_a_run_that_knows_of_turns(qwen25, labelled, tmp_path):
    more = "--steps 2 --kl_coef 0.1 --advantage bi_level_gae --turn_gamma 0.9"
    ppo.main(run_flags(qwen25, labelled, tmp_path, more))
    for record in (record for record in records(tmp_path) if "train/actor_updates" in record):
        assert record["train/actor_skipped"] == 0
        assert record["train/advantages_std"] > 0
    samples = samples_of(tmp_path, "step-000002")
    assert max(len(row["per_token"]["turns"]) for row in samples) >= 3
    for row in samples:
        tokens, turns = row["per_token"], turns_of(row)
        assert sum(tokens["turns"]) == len(tokens["text"]) == row["response_length"]
        pieces = iter(tokens["text"])
        for turn, count in zip(turns, tokens["turns"], strict=True):
            assert turn in "".join(itertools.islice(pieces, count))
        parts = [part for one in row["conversation"] for part in one["content"]]
        for part in parts:
            if isinstance(part, dict) and part["type"] == "image":
                size = Image.open(tmp_path / "samples" / part["file"]).size
                assert size == (part["width"], part["height"])
    assert list(tmp_path.glob("samples/step-000002/*.png"))


def test_rewards_of_turns_stand_at_their_last_own_token():
    """GAE is over the policy's tokens alone, as replies take no time. Groups compare sums."""
    generator = seeded(2)
    lengths, ends = torch.tensor([7, 4, 1]), [[2, 5], [4], [1]]
    early, kl, values = (
        torch.zeros(12, dtype=torch.float64),
        *torch.randn(2, 12, generator=generator),
    )
    scores, starts = torch.randn(3, generator=generator), [0, 7, 11]
    for start_of, turns in zip(starts, ends):
        early[[start_of + end - 1 for end in turns]] = torch.randn(
            len(turns), generator=generator, dtype=torch.float64
        )
    earned = losses.AdvantageInputs(
        scores,
        kl,
        0.3,
        lengths,
        torch.tensor([0, 0, 1]),
        turn_rewards=early,
        values=values,
        gamma=0.9,
        gae_lambda=0.8,
        gae_lambda_policy=0.8,
    )
    rewards = []
    for start_of, size, score in zip(starts, lengths.tolist(), scores.tolist()):
        rewards += [
            -0.3 * float(kl[start_of + t]) + float(early[start_of + t]) for t in range(size)
        ]
        rewards[-1] += score - float(early[start_of : start_of + size].sum())
    assert torch.allclose(earned.token_rewards, torch.tensor(rewards), atol=rounding(16))
    expected, _ = losses.gae(torch.tensor(rewards), values, lengths, 0.9, 0.8)
    assert torch.allclose(losses.gae_estimate(earned)[0], expected, atol=ROUNDING)
    assert float(earned.rewards_after_kl[0]) == pytest.approx(sum(rewards[:7]), abs=ROUNDING)
    group = dataclasses.replace(earned, prompt_index=torch.zeros(3, dtype=torch.int64))
    late = dataclasses.replace(group, turn_rewards=None)
    assert torch.equal(losses.dr_grpo(group)[0], losses.dr_grpo(late)[0])


# ------------------------------------------------------------------------------------------------ whole runs
def run_flags(folder: Path, rows: Path, out: Path, *more: str) -> list[str]:
    return words(
        "--model",
        folder,
        "--data",
        rows,
        "--out",
        out,
        "--env",
        f"{PROGRAMS}:Talk",
        "--reward env --max_prompt_tokens 512 --max_new_tokens 20 --max_reply_tokens 200 "
        "--max_tokens_per_pack 900 "
        "--prompts_per_step 3 --samples_per_prompt 3 --steps 4 --actor_lr 1e-3 --env_workers 0 "
        "--eval_every 0 "
        '--save_every 0 --export_every 0 --stop_strings ["a","e","r","o"]',
        "--",
        *more,
    )


@pytest.fixture
def labelled(picture_rows, tmp_path) -> Path:
    """Rows of two labels."""
    rows = read_rows(Path(picture_rows))
    for i, row in enumerate(rows):
        row |= {
            "label": ("game", "quiz")[i % 2],
            "images": [str(Path(picture_rows).parent / name) for name in row["images"]],
        }
    return Path(write_rows(tmp_path / "rows.jsonl", rows))


def test_a_held_out_rollout_whose_only_picture_is_damaged(qwen25, labelled, tmp_path):
    """It has no conversations, and the others count."""
    rows = read_rows(labelled)[:2]
    picture = next(Path(row["images"][0]) for row in read_rows(labelled) if row["images"])
    # its size, but none of its pixels
    (tmp_path / "damaged.png").write_bytes(picture.read_bytes()[:60])
    write_rows(tmp_path / "held.jsonl", [*rows, rows[0] | {"images": ["damaged.png"]}])
    more = f"--eval_data {tmp_path / 'held.jsonl'} --eval_only --on_bad_row skip --slots 1"
    metrics = ppo.main(run_flags(qwen25, labelled, tmp_path / "out", more))
    assert (metrics["eval/num_samples"], metrics["eval/dropped_prompts"]) == (2, 1)


@pytest.mark.slow
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(qwen25, labelled, tmp_path):
    """With a critic and a KL; and what a run leaves of its conversations."""
    more = f"--kl_coef 0.1 --prompts_per_step 2 --eval_data {labelled} --eval_every 1 --save_every 1 --steps"
    ppo.main(run_flags(qwen25, labelled, tmp_path / "whole", more, "2"))
    half = cut_back(tmp_path / "whole", tmp_path / "half", 1)
    ppo.main(run_flags(qwen25, labelled, half, more, "2"))
    whole_run, half = (
        list(map(reproducible, records(tmp_path / name))) for name in ("whole", "half")
    )
    assert whole_run == half
    samples = samples_of(tmp_path / "whole", "step-000002")
    assert samples == samples_of(tmp_path / "half", "step-000002")
    *_, step, evaluated = whole_run
    assert step["rollout/turns"] == pytest.approx(
        sum(len(turns_of(row)) for row in samples) / len(samples)
    )
    for ending in ("answered", "turn_limit", "token_limit", "error"):
        endings = [row["ended"] for row in samples]
        assert step[f"rollout/ended_{ending}"] == pytest.approx(
            endings.count(ending) / len(endings)
        )
    opening = {"type": "text", "text": "seen first"}
    openings = {(row["index"], row["conversation"][0]["content"][0] == opening) for row in samples}
    # the same for the samples of a prompt
    assert len(openings) == len({row["index"] for row in samples})
    assert any(is_shown for _, is_shown in openings)
    for row in samples:
        assert sum(row["turn_rewards"]) == pytest.approx(row["reward"], abs=rounding(16))
        assert turns_of(row)[-1] == row["response"]
    assert {"eval/turns", "eval/ended_answered"} <= evaluated.keys()
    assert list(tmp_path.glob("whole/samples/eval-000002/*.png"))


def test_what_cannot_speak_is_refused_at_load(qwen25, labelled, tmp_path):
    def refused(message: str, *more: str, template: str | None = None) -> None:
        folder = qwen25
        if template is not None:
            folder = tmp_path / "other"
            shutil.copytree(qwen25, folder, dirs_exist_ok=True)
            settings = read_json(folder / "tokenizer_config.json")
            (folder / "chat_template.jinja").unlink(missing_ok=True)
            (folder / "tokenizer_config.json").write_text(
                json.dumps(settings | {"chat_template": template})
            )
        with user_error(message):
            # its error holds a lock
            ppo.main(
                run_flags(folder, labelled, tmp_path / f"refused-{time.monotonic_ns()}", *more)
            )

    text = toy.CHAT_TEMPLATE
    refused(
        r"--env .*Tool does not work .*placeholders \[\] .* for 1 images .*pictures = False",
        "--env",
        f"{PROGRAMS}:Tool",
        template=text.replace(
            "{%- if part.type == 'image' -%}",
            "{%- if part.type == 'image' and message.role == 'tool' -%}{%- elif part.type == 'image' -%}",
        ),
    )
    refused(
        "--env .*Tool does not work .*no tools",
        "--env",
        f"{PROGRAMS}:Tool",
        template=text.replace(
            "{%- for message in messages -%}",
            "{%- for message in messages -%}{%- if message.role == 'tool' -%}"
            "{{ raise_exception('no tools') }}{%- endif -%}",
        ),
    )
    refused("--reward env needs an environment", "--env", "")
    refused("rm: scalar models", f"--reward rm:{qwen25}")
    refused("talkers.py has no 'Nobody'; it has picture, Talk,", "--env", f"{PROGRAMS}:Nobody")
    refused("no method .reset.", "--env", f"{PROGRAMS}:picture")
    refused("--max_tokens_per_pack 100 must hold .*--max_reply_tokens", "--max_tokens_per_pack 100")
