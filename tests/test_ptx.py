"""PPO-ptx: the next-token loss on --ptx_data beside the policy loss, against Hugging Face's own
`labels=` loss."""

from pathlib import Path

import numpy as np
import pytest
import torch

import train_ppo_vl as ppo
from common.looks.further_losses import PtxLoss
from common.model import packs, vlm
from conftest import (
    ROUNDING,
    Tensors,
    computing,
    hugging_face,
    inputs_of,
    records,
    rounding,
    start,
    table,
    user_error,
    with_flags,
    words,
    write_rows,
)
from helpers import Caught, distance, fresh, gradient, resumed, take_gradients, train

ROWS = """\
{"prompt": "what is it?", "images": ["train-1-0.png"], "response": "a red circle"}
{"prompt": "count to three", "response": "one two three", "source": "text"}
{"prompt": "compare <image> with <image>: which is larger?", \
"images": ["train-2-0.png", "train-2-1.png"], "response": "b"}
{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}, \
{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is this?"}]}], \
"images": ["train-3-0.png"], "response": "it is blue"}
{"messages": [{"role": "user", "content": "say yes"}, {"role": "assistant", "content": "yes"}, \
{"role": "user", "content": "and no"}, {"role": "assistant", "content": "no"}]}
"""


@pytest.fixture(scope="module")
def rows(task) -> Path:
    """ptx.jsonl beside the pictures of the task: 0, 1 and 2 images, conversations with one answer and two."""
    (task / "ptx.jsonl").write_text(ROWS)
    return task / "ptx.jsonl"


def ptx(rows: Path, *more: str) -> list[str]:
    return words("--ptx_data", rows, "--ptx_coef 0.5 --ptx_batch 5", *more)


def start_text(*where, more: tuple[str, ...] = ()):
    """Temperature and banned tokens are set: text that nobody sampled does not feel them."""
    checkpoint, data, rows = where
    env = start(
        checkpoint, data, *ptx(rows), "--advantage grpo --temperature 0.7 --min_new_tokens 2", *more
    )
    env.text = ppo.load_ptx(env.args, env.processor)
    return env


@pytest.fixture(scope="module")
def env(qwen25, picture_rows, rows):
    return start_text(qwen25, picture_rows, rows)


def text_gradient(env, args: ppo.Args, picks: list[int]) -> tuple[float, Tensors]:
    """Loss and gradient of rows by the code under test."""
    drawn = [env.text.rows[k] for k in picks]
    env.text.coef, env.text.labels = args.ptx_coef, args.ptx_labels
    stats = {}
    env.text.batches = [env.text.loader.collect(*env.text.loader.submit(drawn, picks))]
    for loss in env.text.losses(env.actor, 0, args.aux_loss_coef, stats):
        ppo.backward(loss)
    return float(stats["ptx_loss"].total), take_gradients(env.actor)


def labelled(env, pick: int, labels: str) -> dict:
    """Inputs of Hugging Face's own model for a row, unpacked, with its labels; -100 at what the
    policy may never say."""
    row = env.text.rows[pick]
    prompt, target, *_ = row.stream.last if row.stream else row
    inputs = inputs_of(prompt, target, env.processor)
    inputs["labels"] = inputs["input_ids"].clone()
    if labels == "responses":
        size = len(row.prompt.input_ids)
        inputs["labels"][:, :size] = -100
        if row.stream:  # "yes" and "no", each with its end, and what stands between
            end = env.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
            first = inputs["input_ids"][0, size:].tolist().index(end) + 1
            inputs["labels"][:, size + first : -len(target)] = -100
    inputs["labels"][torch.isin(inputs["input_ids"], torch.tensor(env.processor.banned_ids))] = -100
    return inputs


@pytest.mark.parametrize(
    "labels, more", [("text", ()), ("responses", ()), ("text", ("--train_vision",))]
)
def test_loss_and_gradient_are_hugging_faces(qwen25, picture_rows, rows, labels, more):
    """One forward per row of the unpacked samples; a row may be drawn twice. A trained tower has
    its gradient too."""
    env = start_text(qwen25, picture_rows, rows, more=more)
    oracle = hugging_face(qwen25)
    picks = [0, 1, 2, 3, 4, 1]
    inputs = [labelled(env, pick, labels) for pick in picks]
    counts = [int((row["labels"][:, 1:] != -100).sum()) for row in inputs]
    expected = 0.0
    for row, count in zip(inputs, counts):
        loss = oracle(**row, use_cache=False).loss * count / sum(counts)
        # --ptx_coef
        (0.5 * loss).backward()
        expected += float(loss.detach())
    reference = {
        f"model.{name}": p.grad
        for name, p in oracle.named_parameters()
        if more or "visual" not in name
    }
    for changes in ({}, {"max_tokens_per_pack": 110}, {"apart": True, "head_chunk": 5}):
        with computing(env.actor, **changes):
            loss, gradients = text_gradient(env, with_flags(env.args, ptx_labels=labels), picks)
        assert (
            loss == pytest.approx(expected, rel=ROUNDING)
            and distance(gradients, reference) < ROUNDING
        ), changes


def test_text_labels_are_all_text(env):
    """The system prompt, both turns and the template's own marks are labels, pictures are not."""
    prompt, target, *_ = env.text.rows[3]
    drawn = env.text.loader.collect(
        *env.text.loader.submit([p for p, *_ in env.text.rows[:4]], [0, 1, 2, 3])
    )
    batch = drawn.with_responses([(3, target)])
    vlm.compute_features(env.actor.model, batch)
    (pack,) = packs.of_batch(env.actor.model, batch)
    pack = pack.label_text(env.processor.banned_mask())
    text = env.processor.tokenizer.decode(pack.targets.tolist())
    whole = env.processor.tokenizer.decode(torch.cat([prompt.input_ids, target]).tolist())
    marks = env.processor.tokenizer.convert_ids_to_tokens(list(env.processor.banned_ids))
    for mark in marks:
        whole = whole.replace(mark, "")
    first = env.processor.tokenizer.decode(prompt.input_ids[:1].tolist())
    assert text == whole.removeprefix(first)
    assert "good day" in text
    assert "it is blue" in text


def test_the_update_is_the_sum_of_both_gradients(qwen25, picture_rows, rows, monkeypatch):
    """One optimizer step; a skipped minibatch has no ptx_loss; --target_kl stops before the text is seen."""
    env = fresh(qwen25, picture_rows, *ptx(rows), "--epochs 1 --minibatches 1 --target_kl 1e9")
    env.text = ppo.load_ptx(env.args, env.processor)
    policy, _ = gradient(env.args, env.actor, env.batch)
    # one pass, in any order
    loss, text = text_gradient(env, env.args, [4, 3, 2, 1, 0])
    trained = Caught(env.actor, env.args)
    ppo.begin_step(env.text, 1, env.args)
    env.text.collect()
    metrics = ppo.update_actor(trained, None, env.batch, 1, env.text, env.args)
    (caught,) = trained.gradients
    assert distance(caught, {name: policy[name] + text[name] for name in policy}) < rounding(
        len(env.batch.tokens)
    )
    assert distance(caught, policy) > 1e-2
    assert metrics["train/ptx_loss"] == pytest.approx(loss, rel=rounding(16))
    with monkeypatch.context() as patches:
        patches.setattr(ppo, "take_step", lambda trained, step: (float("inf"), False))
        assert "train/ptx_loss" not in ppo.update_actor(
            trained, None, env.batch, 1, env.text, env.args
        )
    trained = Caught(env.actor, env.args)
    # far from where it was sampled
    env.batch.old_logprobs = env.batch.logprobs - 1
    metrics = ppo.update_actor(
        trained, None, env.batch, 1, env.text, with_flags(env.args, target_kl=1e-6)
    )
    assert not trained.gradients
    assert "train/ptx_loss" not in metrics


def test_every_row_is_drawn_once_per_pass(env, monkeypatch):
    """By the number of the update alone. Five rows, two per update."""
    monkeypatch.setattr(env.text, "batch", 2)
    monkeypatch.setattr(env.text, "scheduled", 0)
    drawn = []
    for updates in (8, 2):
        env.text.start(updates)
        env.text.collect()
        drawn += [batch.draws for batch in env.text.batches]
    assert [len(picks) for picks in drawn] == [2] * 10
    flat = sum(drawn, [])
    assert all(sorted(flat[k : k + 5]) == [0, 1, 2, 3, 4] for k in range(0, 20, 5))
    assert flat[:5] != flat[5:10]


@pytest.mark.slow
def test_resumed_as_if_undisturbed_and_not_while_frozen(qwen25, rows, task, tmp_path):
    more = ptx(rows, "--ptx_batch 2 --minibatches 2 --critic_warmup_steps 1 --critic_lr 1e-3")
    first, *others = records(resumed(qwen25, task, tmp_path, *more))
    assert "train/ptx_loss" not in first
    assert len({step["train/ptx_loss"] for step in others}) == 3
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:4]))
    with user_error("is of another run: --ptx_data '.*' .*ptx.jsonl. -> '"):
        train(qwen25, task, tmp_path / "parts", *more, "--steps 4")


@pytest.mark.slow
def test_another_number_of_updates_goes_on_at_the_next_row(
    qwen25, rows, task, tmp_path, monkeypatch
):
    """Two steps of two updates, then two of one: the rows of one sequence, two per update."""
    picked, collect = [], PtxLoss.collect
    rows.write_text(ROWS)  # another test may have left a row out

    def noted(self):
        collect(self)
        for batch in self.batches:
            picked.extend(batch.draws)

    monkeypatch.setattr(PtxLoss, "collect", noted)
    more = ptx(rows, "--ptx_batch 2 --save_every 2 --export_every 0")
    train(qwen25, task, tmp_path, *more, "--steps 2 --minibatches 2")
    train(qwen25, task, tmp_path, *more, "--steps 4 --minibatches 1")
    passes = [
        row for k in range(3) for row in np.random.default_rng([0, k]).permutation(5).tolist()
    ]
    assert picked == passes[:12]


@pytest.mark.parametrize(
    "row, message",
    table("""
{"prompt": "a", "responses": ["b", "c"], "preferred": "A"} | a judgement, not a response to imitate
{"prompt": "a", "response": "b", "correct": false} | a judgement, not a response
{"prompt": "a"}                     | a row needs the columns of one kind
{"prompt": "a", "response": " "}    | a response to imitate must not be empty
{"prompt": "a", "response": "LONG"} | example too long: [0-9]+ tokens, [0-9]+ of them target; the limit is 600 [(]--max_tokens_per_pack
{"prompt": "a", "images": ["no.png"], "response": "b"} | .*no.png
"""),
)
def test_bad_rows_are_refused_at_the_start(qwen25, task, tmp_path, row, message):
    (tmp_path / "ptx.jsonl").write_text(row.replace("LONG", "b " * 700))
    with user_error(f"(?s)--ptx_data .*ptx.jsonl:1: {message}"):
        train(qwen25, task, tmp_path / "run", *ptx(tmp_path / "ptx.jsonl"))


@pytest.mark.slow
def test_a_damaged_picture_is_dropped(qwen25, task, tmp_path):
    """Also where it is the only row of an update: nothing is added then."""
    for extra, loss in (([{"prompt": "b", "response": "c"}], True), ([], False)):
        lines = [{"prompt": "a", "images": [str(task / "damaged.png")], "response": "b"}, *extra]
        write_rows(tmp_path / "ptx.jsonl", lines)
        (step,) = train(
            qwen25,
            task,
            tmp_path / f"run-{loss}",
            *ptx(tmp_path / "ptx.jsonl", "--ptx_batch", len(lines)),
            "--on_bad_row skip",
        )
        assert step["train/ptx_dropped"] == 1
        assert (step["train/ptx_loss"] > 0) == loss
    with user_error("ptx.jsonl:1: .*damaged.png"):
        train(qwen25, task, tmp_path / "error", *ptx(tmp_path / "ptx.jsonl"))
