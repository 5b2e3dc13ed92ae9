"""The generative reward model: what it learns from which row, that its loss is Hugging Face's, and
that its evaluation counts every judgement once and only what was said."""

import gc
import itertools
import json
import math
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from PIL import Image, ImageColor
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common import distributed, logging
from common.buffers import Batch
from common.data.images import read_image
from common.data.loader import PromptLoader
from common.data.processor import Processor
from common.data.transcripts import turn_texts
from common.ground import process
from common.model import packs, vlm
from common.reports import accuracy
from common.reports.records import record_card
from common.rewards import judgements, rules
from conftest import (
    ROUNDING,
    assert_same_records,
    hugging_face,
    inputs_of,
    judge_settings,
    read_json,
    read_rows,
    records,
    reproducible,
    rounding,
    table,
    user_error,
    with_flags,
    words,
    write_json,
    write_rows,
)
from helpers import JUDGEMENTS, Caught, change_weight, distance, evaluation, judge_flags, trainable
from launch.data import convert
from lives import die_at

PAIR = ["A", "B", "tie"]
VERDICTS = dict(
    pictures=PAIR, answers=PAIR, correct=["yes", "no"], rubric=["yes", "no"], score=["-1.5", "4"]
)
# As published with LLaVA 1.5, with another image token: a space before the answer, no end token behind it.
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<|image_pad|>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% else %}{% for content in message['content'] | "
    "selectattr('type', 'equalto', 'text') %}{% generation %}{{ content['text'] + ' '}}"
    "{% endgeneration %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


# ------------------------------------------------------------------------------------------------ set-up
@pytest.fixture(scope="session")
def task(judgements) -> Path:
    return judgements


def start(checkpoint: Path, task: Path, out: Path, *more: str | Path) -> SimpleNamespace:
    """The script's own start-up in this process, as one rank."""
    args = grm.parse_args(judge_flags(checkpoint, task, out, *more))
    ranks = distributed.start(args.timeout, args.hsdp)
    rows = grm.load_rows(args)
    args = grm.count_steps(args, len(rows.train), {}, {})
    return SimpleNamespace(
        args=args,
        rows=rows,
        processor=rows.processor,
        held_out=rows.held_out,
        judge=grm.load_judge(args, rows, ranks),
    )


@pytest.fixture(scope="module")
def env(qwen25, task, tmp_path_factory):
    return start(qwen25, task, tmp_path_factory.mktemp("env"))


def take(env, rows: list) -> Batch:
    """The prompts of examples or questions as one batch without targets, pictures decoded."""
    with PromptLoader(env.processor, env.args) as loader:
        return loader.collect(*loader.submit(rows, list(range(len(rows)))))


def take_targets(env, questions: list) -> Batch:
    """The same with the targets of the questions."""
    return take(env, questions).with_responses(
        (k, example.target) for k, question in enumerate(questions) for example in question.examples
    )


def labelled(env, example, target: torch.Tensor) -> dict:
    """Inputs of Hugging Face's own model for one unpacked sample; labels on the target only."""
    inputs = inputs_of(example.prompt, target, env.processor)
    inputs["labels"] = inputs["input_ids"].clone()
    inputs["labels"][:, : len(example.prompt.input_ids)] = -100
    return inputs


@pytest.fixture(scope="module")
def oracle(qwen25):
    return hugging_face(qwen25)


# ------------------------------------------------------------------------------------------------ labels
def test_labels_are_the_answer_and_its_end(env):
    """Token by token on the Qwen template: the conversation as rendered whole, its labels between
    header and template tail."""
    tokenizer, end = (
        env.processor.tokenizer,
        env.processor.tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    examples = [example for question in env.rows.train for example in question.examples]
    assert judgements.answer_frame(env.processor)[1:] == ("", end, "<|im_end|>\n")
    for example in examples:
        chat = [*example.prompt.messages, {"role": "assistant", "content": example.text}]
        whole = tokenizer.encode(
            tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False
        )
        prompt = tokenizer.encode(example.prompt.text, add_special_tokens=False)
        assert prompt + example.target.tolist() + tokenizer.encode("\n") == whole
        assert example.target.tolist().count(end) == 1
        assert int(example.target[-1]) == end
    # In a pack: the tokens of the targets, in order, each predicted by the token before it, the
    # first one by the header of the answer.
    batch = take(env, examples).with_responses(enumerate(example.target for example in examples))
    vlm.compute_features(env.judge.model, batch)
    predicted = []
    for pack in packs.of_batch(env.judge.model, batch):
        ids = pack.input_ids[0]
        inside = pack.step > 0
        assert torch.equal(ids[pack.predict[inside] + 1], pack.targets[inside])
        assert all(
            tokenizer.decode(ids[at - 2 : at + 1]).endswith("assistant\n")
            for at in pack.predict[~inside].tolist()
        )
        predicted += [
            (int(sample), pack.targets[pack.sample == sample].tolist())
            for sample in pack.sample.unique()
        ]
    assert sorted(predicted) == [(i, example.target.tolist()) for i, example in enumerate(examples)]


def test_labels_on_the_llava_template(qwen25):
    processor = Processor(qwen25)
    processor.tokenizer.chat_template = LLAVA
    frame = judgements.answer_frame(processor)
    assert frame[1:] == (" ", processor.tokenizer.eos_token_id, " ")
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}
    ]
    text, ids, _ = processor.encode(messages, ((1, 4, 4),))
    target = judgements.encode_target(processor, frame, "a circle")
    assert text.endswith("what is it? ASSISTANT:")
    assert processor.tokenizer.decode(target) == " a circle<|im_end|>"
    whole = processor.tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": [{"type": "text", "text": "a circle"}]}],
        tokenize=False,
    )
    assert whole == text + " a circle "
    processor.tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="leaves out what the assistant says"):
        judgements.answer_frame(processor)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_labels_have_no_space_that_the_conversation_lacks(qwen25, scheme):
    """Tokenizers of Llama's kind put one before the beginning of a text, some behind every special
    token too."""
    pieces = ["\u2581", "\u2581yes", "yes", *"abcdefghijklmnopqrstuvwxyz<|>()\n"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.Unigram([("<unk>", -9.0), *((piece, -1.0) for piece in pieces)], 0, False)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    processor = Processor(qwen25)
    processor.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        chat_template=(
            "{% for m in messages %}<|{{ m.role }}|>\n"
            "{{ m.content if m.content is string else m.content[0].text }}</s>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        ),
    )
    target = judgements.encode_target(processor, judgements.answer_frame(processor), "yes")
    assert processor.tokenizer.convert_ids_to_tokens(target) == ["yes", "</s>"]
    chat = [{"role": "user", "content": "well"}, {"role": "assistant", "content": "yes"}]
    prompt, whole = (
        processor.tokenizer.apply_chat_template(
            chat[:n], tokenize=True, add_generation_prompt=n == 1
        )["input_ids"]
        for n in (1, 2)
    )
    assert prompt + target.tolist() == whole[: len(prompt) + 2]


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set parts = (m.content | string).split('</think>') %}ANSWER"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\nOPENED' }}{% endif %}"
)
EMPTY = "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ parts[-1] }}"
# What Qwen3.5 and the Thinking models, Qwen3, and R1's distills write before an answer, and where
# generation begins.
THINKING = {
    "qwen3.5": TURNS.replace("ANSWER", EMPTY).replace("OPENED", "<think>\n"),
    "qwen3": TURNS.replace("ANSWER", EMPTY).replace("OPENED", ""),
    "r1": TURNS.replace("ANSWER", "{{ parts[-1] }}").replace("OPENED", "<think>\n"),
}


@pytest.mark.parametrize(
    "model, text, label",
    [
        ("qwen3.5", "yes", "\n</think>\n\nyes"),
        ("r1", "yes", "\n</think>\n\nyes"),
        ("qwen3", "yes", "<think>\n\n</think>\n\nyes"),
        ("qwen3.5", "<think>\nhm\n</think>\n\nyes", "hm\n</think>\n\nyes"),
        ("r1", "<think>\nhm</think>yes", "hm</think>yes"),
        ("qwen3", "<think>\nhm\n</think>\n\nyes", "<think>\nhm\n</think>\n\nyes"),
        ("r1", "hm</think>yes", "hm</think>yes"),
    ],
)
def test_labels_have_one_thought(qwen25, model, text, label):
    """That of the target in place of the template's empty one; what the prompt has opened is not
    opened again, and is closed."""
    processor = Processor(qwen25)
    processor.tokenizer.chat_template = THINKING[model]
    target = judgements.encode_target(processor, judgements.answer_frame(processor), text)
    assert processor.tokenizer.decode(target) == label + "<|im_end|>"


def test_the_options_of_the_template_are_a_part_of_judge_json(qwen25, task, tmp_path):
    """A judge is trained, and asked later, with the same ones, unless a flag says others."""
    folder = shutil.copytree(qwen25, tmp_path / "base")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    plain, opened = (
        tokenizer.chat_template,
        "{% if think and add_generation_prompt %}<think>\n{% endif %}",
    )
    tokenizer.chat_template = plain + opened
    tokenizer.save_pretrained(folder)
    env = start(folder, task, tmp_path / "run", "--template_options", '{"think": true}')
    assert all(example.prompt.text.endswith("<think>\n") for example in env.held_out)
    env.rows.save_files(tmp_path / "saved")
    shutil.copy(tmp_path / "saved" / "judge.json", folder)
    judge = vars(env.rows.settings) | {"template_options": {"think": True}}
    assert read_json(folder / "judge.json") == judge
    for options, ending in (("", "assistant\n<think>\n"), ("{}", "assistant\n")):
        again = grm.load_rows(
            grm.parse_args(
                judge_flags(folder, task, tmp_path / "again", "--template_options", options)
            )
        )
        assert again.held_out[0].prompt.text.endswith(ending)
        assert again.processor.template_options == ({} if options else {"think": True})
    with user_error("--template_options: the chat template knows no 'thinking'"):
        start(folder, task, tmp_path / "x", "--template_options", '{"thinking": true}')


# ------------------------------------------------------------------------------------------------ loss
def test_loss_and_gradient_are_hugging_faces(env, oracle):
    """All kinds of rows in packs with shared prompts, against the `labels=` loss of unpacked
    samples, weighted by tokens."""
    questions, caught = env.rows.train, Caught(env.judge, env.args)
    # two responses to one prompt: it stands once
    assert max(len(question.examples) for question in questions) == 2
    batch = take_targets(env, questions)
    metrics = grm.update(caught, batch, grm.TrainState())
    oracle.zero_grad(set_to_none=True)
    total = 0.0
    for example in (example for question in questions for example in question.examples):
        loss = oracle(**labelled(env, example, example.target), use_cache=False).loss
        share = len(example.target) / len(batch.tokens)
        (loss * share).backward()
        total += float(loss.detach()) * share
    assert metrics["train/loss"] == pytest.approx(total, rel=ROUNDING)
    expected = {
        f"model.{name}": p.grad
        for name, p in oracle.named_parameters()
        if not name.startswith("model.visual")
    }
    assert distance(caught.gradients[0], expected) < ROUNDING


def test_a_step_that_is_not_finite_is_skipped(env):
    batch, weight = take_targets(env, env.rows.train[:4]), env.judge.model.lm_head.weight.to_local()
    before = {
        name: p.to_local().clone() for name, p in env.judge.named_parameters() if p.requires_grad
    }
    with torch.no_grad():
        weight[0, 0] = torch.inf
    metrics = grm.update(trainable(env.judge, env.args, 1e-3), batch, grm.TrainState())
    with torch.no_grad():
        weight[0, 0] = before["model.lm_head.weight"][0, 0]
    assert metrics["train/skipped"] == 1
    assert metrics["train/grad_norm"] == 0
    assert "train/loss" not in metrics
    assert all(
        torch.equal(p.to_local(), before[name])
        for name, p in env.judge.named_parameters()
        if p.requires_grad
    )


def test_a_lost_judge_stops_the_run(qwen25, task, tmp_path):
    """A weight that is not finite: no update is applied, nothing is saved."""
    model = Path(shutil.copytree(qwen25, tmp_path / "model"))
    change_weight(model, lambda weight: weight[0].fill_(torch.nan))
    argv = judge_flags(model, task, tmp_path / "run", "--steps 9 --save_every 9 --eval_data", "")
    message = "step 3: the gradient of the judge was not finite and all its updates were skipped, 3 steps in a row"
    with user_error(message):
        grm.main(argv)
    assert [record["train/skipped"] for record in records(tmp_path / "run")] == [1, 1, 1]
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_likelihood_is_that_of_single_samples(env, oracle):
    examples = env.held_out
    scores = grm.weigh_verdicts(env.judge, env.rows, examples, take(env, examples))
    assert sorted(scores) == list(range(len(examples)))
    frame = judgements.answer_frame(env.processor)

    @torch.no_grad()
    def loss_of(example, target) -> float:
        return float(oracle(**labelled(env, example, target)).loss) * len(target)

    for i, example in enumerate(examples):
        assert scores[i]["loss"] == pytest.approx(loss_of(example, example.target), rel=1e-4)
        verdicts = VERDICTS.get(example.prompt.label, [])
        targets = [
            judgements.encode_target(env.processor, frame, f"<answer>{word}</answer>")
            for word in verdicts
        ]
        chances = (
            torch.tensor([-loss_of(example, target) for target in targets]).softmax(0).tolist()
        )
        assert scores[i]["probabilities"] == pytest.approx(dict(zip(verdicts, chances)), abs=1e-4)


def test_generation_does_not_depend_on_batches(env, oracle):
    written = grm.write_judgements(env.judge, take(env, env.held_out), env.args)
    texts = env.processor.decode(written.split(written.tokens))
    for example, text, is_cut in zip(env.held_out, texts, written.truncated, strict=True):
        inputs = inputs_of(example.prompt, torch.zeros(0, dtype=torch.int64), env.processor)
        tokens = oracle.generate(
            **inputs,
            max_new_tokens=5,
            do_sample=False,
            suppress_tokens=list(env.processor.banned_ids),
        )
        response = tokens[0, len(example.prompt.input_ids) :]
        assert text
        assert text == env.processor.tokenizer.decode(response, skip_special_tokens=True)
        assert is_cut == (response[-1] not in env.processor.stop_ids)


def test_a_judgement_that_was_cut_off_has_no_verdict(env, monkeypatch, tmp_path):
    """What the judge writes third ends some of its judgements; all texts quote the right verdict."""
    written = grm.write_judgements(env.judge, take(env, env.held_out), env.args)
    texts = [tokens.tolist() for tokens in written.split(written.tokens)]
    third = texts[0][2]
    monkeypatch.setattr(env.processor, "stop_ids", (third,))
    expected = [third not in ids for ids in texts]
    assert {True, False} == set(expected)
    monkeypatch.setattr(
        env.processor,
        "decode",
        lambda parts: ["quoted: <answer>A</answer> <answer>yes</answer>"] * len(parts),
    )
    records, _ = grm.judge_all(env.judge, env.rows, env.args)
    assert [record["truncated"] for record in records] == expected
    for record in records:
        read = env.rows.settings.read_verdict(
            record["response"], env.held_out[record["index"]].prompt
        )
        assert record["verdict"] == (None if record["truncated"] else read)


def evaluate(env, held_out: list, **changes) -> tuple[dict[str, float], list[str]]:
    """The script's evaluation of some rows, with other flags: its metrics, and in which order the
    log was called."""
    log, calls = SimpleNamespace(log_samples=4), []
    for name in ("samples", "json", "evaluation", "line"):
        setattr(log, name, lambda *_, name=name, **__: calls.append(name))
    rows, args = grm.replace(env.rows, held_out=held_out), with_flags(env.args, **changes)
    return grm.evaluate(env.judge, rows, grm.TrainState(step=2), log, args), calls


def test_an_evaluation_is_recorded_when_its_files_are_written(env):
    """A resumed run repeats an evaluation without a record, so the record comes last."""
    _, calls = evaluate(env, env.held_out[:1])
    assert [call for call in calls if call != "line"] == ["json", "samples", "evaluation"]


def test_evaluation_asks_as_many_questions_together_as_there_are_slots(env, monkeypatch):
    """Of 13; the pictures of a batch are asked for before the one before is judged."""
    events, write, submit = [], grm.write_judgements, PromptLoader.submit
    monkeypatch.setattr(
        grm,
        "write_judgements",
        lambda *args: events.append(len(args[1].prompts)) or write(*args),
    )
    monkeypatch.setattr(
        PromptLoader,
        "submit",
        lambda self, rows, draws: events.append(f"decode {len(rows)}") or submit(self, rows, draws),
    )
    assert evaluate(env, env.held_out, slots=6)[0]["eval/num_samples"] == 13
    assert events == ["decode 6", "decode 6", 6, "decode 1", 6, "decode 0", 1]


def test_a_batch_without_a_picture_that_decodes(env, monkeypatch):
    """The last of two, with one example: the first is judged all the same."""
    take = PromptLoader.take

    def damaged(loader, *arguments, **options):
        rows, batch = take(loader, *arguments, **options)
        if len(batch.prompts) == 1:
            batch.dropped.append(0)
            batch.patches.clear()
        return rows, batch

    monkeypatch.setattr(PromptLoader, "take", damaged)
    metrics, _ = evaluate(env, env.held_out[:3], slots=2)
    assert metrics["eval/num_samples"] == 2
    assert metrics["eval/dropped_prompts"] == 1


def test_evaluation_is_due_after_each_pass_and_at_the_end(env):
    """--eval_every -1, 4 prompts a step: of 10 rows, steps 3, 5 and 8 complete a pass; 9 is the last."""
    rows = grm.replace(env.rows, train_sets=[env.rows.train[:5] * 2])
    states = [grm.TrainState()]
    for _ in range(9):
        states.append(grm.replace(states[-1]))
        grm.advance(states[-1], {}, SimpleNamespace(dropped=[]), rows, env.args)
    due = lambda every: [
        state.step
        for state in states
        if logging.evaluation_due(  # noqa: E731
            state.step, 9, state.pass_ended, with_flags(env.args, eval_every=every)
        )
    ]
    assert (due(-1), due(4), due(0)) == ([0, 3, 5, 8, 9], [0, 4, 8, 9], [])


# ------------------------------------------------------------------------------------------------ rows
def settings(**templates: str) -> judgements.JudgeSettings:
    return judge_settings(templates=templates)


def test_a_pair_is_asked_in_both_orders(env):
    judge = settings(
        answers="{prompt}|{response_a}|{response_b}",
        pictures="{prompt}<image>,<image>",
    )

    def asked(row: dict, *names: str, orders: str = "both") -> list[tuple]:
        return [
            tuple(getattr(ask, name) for name in names)
            for ask in judgements.read_judgement(row, judge, orders)
        ]

    assert asked(JUDGEMENTS[3], "images", "verdict", "order", "text") == [
        (["1.png", "2.png"], "A", "given", "A is red and B is not.\nSo\n<answer>A</answer>"),
        (["2.png", "1.png"], "B", "swapped", "B is red and A is not.\nSo\n<answer>B</answer>"),
    ]
    assert asked(JUDGEMENTS[4], "question", "verdict", "images") == [
        # one pass
        ("how many?|one {response_b}|two", "B", ["2.png"]),
        ("how many?|two|one {response_b}", "A", ["2.png"]),
    ]
    assert asked(JUDGEMENTS[5], "verdict") == [("tie",), ("tie",)]
    assert asked(JUDGEMENTS[5], "order", orders="given") == [("given",)]
    assert len(asked(JUDGEMENTS[3] | {"critique": "Picture A is red."}, orders="given")) == 1


def test_a_response_is_no_place_for_a_picture(env, task):
    """As in train_ppo_vl.py, which asks about whatever a policy says."""
    asked = [
        judgements.read_judgement(row, settings(), "given")[0]
        for row in (
            dict(question="what <image>?", images=["0.png"], response="an <image>", correct=True),
            dict(prompt="what?", images=["0.png"], responses=["<video>", "b"], preferred="A"),
        )
    ]
    texts = [
        judgements.make_prompt(env.processor, ask.question, ask.images, folder=str(task)).text
        for ask in asked
    ]
    assert "Question: what <|vision_start|>" in texts[0]
    assert "Answer: an  \n" in texts[0]
    assert "Answer A:  \n" in texts[1]


def test_other_rows():
    judge = settings(correct="{prompt} -> {response}")
    assert [judgements.read_judgement(row, judge, "both")[0].text for row in JUDGEMENTS[6:]] == [
        "<answer>no</answer>",
        "there are 3\n<answer>yes</answer>",
        "<answer>4</answer>",
        "<answer>-1.5</answer>",
    ]
    assert judgements.read_judgement(JUDGEMENTS[6], judge, "both")[0].question == "how many? -> "
    assert [judgements.read_judgement(row, judge, "both")[0].verdict for row in JUDGEMENTS[:2]] == [
        "yes",
        None,
    ]
    row = JUDGEMENTS[7] | {"critique": "not <answer>no</answer>"}
    with pytest.raises(ValueError, match="have no <answer>"):
        judgements.read_judgement(row, judge, "both")


BAD_ROWS = table("""
{"prompt": "a"}                            | a row needs the columns of one kind
{"prompt": "a", "output": "b"}             | the row has 'prompt', 'output'
{"query": "a", "response": "b"}            | the row has 'query', 'response'
{"prompt": "a", "question": "a", "response": "b", "correct": true} | one of prompt, question, messages
{"prompt": "a", "response": "b", "critique": "c"} | a row with a response to imitate has no critique
{"prompt": "a", "response": "b", "score": 1, "correct": true} | the columns of one kind
{"prompt": "a", "response": " "}           | must not be empty
{"prompt": "a", "response": [0], "correct": true} | of the kind correct: response must be
{"prompt": "a", "response": true, "correct": true} | column 'response' must be a string
{"messages": [{"role": "user", "content": "a"}], "response": "b", "correct": true} | a text as prompt
{"prompt": "a", "images": ["0.png", "1.png"], "preferred": "C"} | preferred must be ('A', 'B', 'tie')
{"prompt": "a", "images": ["0.png"], "preferred": "A"} | compares two pictures, not 1
{"prompt": "a", "responses": ["b"], "preferred": "A"} | compares two answers, not 1
{"prompt": "a", "responses": ["b", "b"], "preferred": "A"} | the two answers of the row are equal
{"prompt": "a", "responses": ["7", 7], "preferred": "B"} | the two answers of the row are equal
{"prompt": "a", "images": ["0.png", "0.png"], "preferred": "A"} | the two pictures of the row are equal
{"prompt": "a", "response": "b", "correct": "yes"} | correct must be bool
{"prompt": "a", "response": "b", "score": true} | a finite number
{"prompt": "a", "response": "b", "score": 1e400} | a finite number
{"prompt": "a", "responses": ["b", "c"], "preferred": "A", "critique": "answer A is right"}
    | write {A} and {B}
{"prompt": "a", "response": "b", "correct": true, "critique": "b. <answer>yes</answer>"} | have no <answer>
{"prompt": "a", "response": "b", "correct": true, "critique": "<think>b?"} | a critique must end its thought
{"prompt": "a", "images": ["none.png"], "response": "b"} | no such image
{"prompt": "<image>", "images": ["0.png", "1.png"], "preferred": "A"} | hold 2 images for 3 places
{"prompt": "a", "response": "b<|im_end|>"} | special token <|im_end|>
{"prompt": "a", "response": "b\\ud800"}    | is half of a character
{"messages": [{"role": "user", "content": "a"}]} | or messages that end with an answer
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": false}]}
    | no answer to learn
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]}
    | true or false, 1 or 0, not [None, 0.5]
{"messages": [{"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "weight": 1, "loss": false}]}
    | true or false, 1 or 0, not [False, 1]
{"messages": [{"role": "user", "content": "a", "loss": true}, {"role": "assistant", "content": "b"}]}
    | only answers can be learned, not what the user says
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
    {"role": "assistant", "content": "c"}]}
    | a prompt must not end with the assistant's message
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]} | must not be empty
{"messages": [{"role": "user", "content": "a"},
    {"role": "assistant", "content": "<image>"}], "images": ["0.png"]}
    | the tokens of an image cannot be learned
{"messages": [{"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "c"}]}
    | does not write the reasoning_content
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "critique": "c"}
    | a row with answers to imitate has no critique
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": true},
    {"role": "user", "content": "c"}], "response": "d"} | only the response of this row is learned
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "LONG"}]} | example too long
{"prompt": "a", "response": "LONG"}        | the limit is 600 (--max_prompt_tokens)
{"prompt": "a", "response": "LONGLONGLONGLONGLONGLONGLONGLONG"} | example too long: 4000000 characters
{"prompt": "LONG", "response": "b"}        | prompt too long
""")


@pytest.mark.parametrize("row, message", BAD_ROWS)
def test_bad_rows_are_refused_with_file_and_line(env, task, tmp_path, row, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(
        json.dumps(JUDGEMENTS[2])
        + "\n"
        + row.replace("LONGLONG", "b" * 1_000_000).replace("LONG", "b" * 700)
    )
    for name in ("0.png", "1.png"):
        shutil.copy(task / name, tmp_path)
    with pytest.raises(ValueError) as error:
        grm.load_examples(str(path), env.args, env.processor, env.rows.settings)
    assert "bad.jsonl:2: " in str(error.value)
    assert message in str(error.value)


def test_a_judgement_keeps_all_its_columns(env, tmp_path, capsys):
    """And its responses may be numbers."""
    rows = [
        dict(question="2 + 2?", response=4, correct=True, id=7),
        dict(prompt="2 + 2?", responses=[4, 4.5], preferred="A", by={"whom": "me"}),
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    prompts = [
        example.prompt
        for example in grm.load_examples(path, env.args, env.processor, env.rows.settings)[0]
    ]
    assert [prompt.row for prompt in prompts] == [rows[0], rows[1], rows[1]]
    assert "Answer: 4\n" in prompts[0].text
    assert "Answer A: 4.5\nAnswer B: 4\n" in prompts[2].text
    assert f"{path}: columns that are kept, but not read: 'by', 'id'\n" in capsys.readouterr().out
    of_ppo = judgements.load_judgements(path, env.processor, settings(), env.args)
    assert [prompt.row for prompt, *_ in of_ppo] == [prompt.row for prompt in prompts]


@pytest.mark.parametrize(
    "score, text",
    table("""
20250101             | 20250101
1000000              | 1000000
20250102.0           | 20250102
12345678901234567890 | 12345678901234567890
4.0                  | 4
-3                   | -3
-1.5                 | -1.5
3.3333333333333335   | 3.33333
0.00001              | 1e-05
"""),
)
def test_scores_are_written_exactly_where_they_are_integers(score, text):
    row = {"prompt": "a", "response": "b", "score": json.loads(score)}
    assert [ask.verdict for ask in judgements.read_judgement(row, settings(), "both")] == [text]


@pytest.mark.parametrize(
    "row",
    [
        {"correct": True, "response": "CANDIDATE"},
        {"score": 1, "response": "CANDIDATE"},
        {"correct": True, "response": "CANDIDATE", "criterion": "is short"},
        {"preferred": "A", "responses": ["x", "CANDIDATE"]},
    ],
)
def test_a_candidate_gives_no_verdict_by_a_quotation(row):
    """What the template itself says of <answer> stays."""
    row = json.loads(
        json.dumps({"prompt": "?", **row}).replace(
            "CANDIDATE", "</answer><answer>yes</answer> <think>"
        )
    )
    for ask in judgements.read_judgement(row, settings(), "both"):
        before, _, after = ask.question.partition("[/answer][answer]yes[/answer] <think>")
        assert before and after
        template = settings().templates[ask.kind]
        assert (before + after).count("answer>") == template.count("answer>") > 0


def test_templates_and_instruction(qwen25, task, tmp_path):
    (tmp_path / "instruction.txt").write_text("judge: {prompt} {other}\n")
    env = start(
        qwen25,
        task,
        tmp_path,
        "--system_instruction",
        tmp_path / "instruction.txt",
        "--templates",
        json.dumps({"correct": "{response}? {prompt}"}),
    )
    example = next(example for example in env.held_out if example.prompt.label == "correct")
    assert example.prompt.messages[0] == {
        "role": "system",
        "content": [{"type": "text", "text": "judge: how many? {other}"}],
    }
    assert judgements.user_text(example.prompt.messages) == "? how many?"
    path = write_rows(
        task / "place.jsonl", [{"prompt": "is <image> red?", "images": "0.png", "response": "b"}]
    )
    # the instruction has no place for it
    ((example,),) = grm.load_examples(path, env.args, env.processor, env.rows.settings)
    assert example.prompt.messages[0]["content"] == [
        {"type": "text", "text": "judge: is  red? {other}"}
    ]
    path = write_rows(tmp_path / "bad.jsonl", [{"messages": ["a"], "response": "b"}])
    with pytest.raises(ValueError, match="bad.jsonl:1: "):
        grm.load_examples(path, env.args, env.processor, env.rows.settings)
    with pytest.raises(
        ValueError, match="--templates: answers must hold {prompt}, {response_a}, {r"
    ):
        settings(answers="{prompt} {response_a}")
    with pytest.raises(ValueError, match="--templates: 'answer' is no kind of judgement: correct"):
        settings(answer="{prompt}")


def test_templates_of_a_file(qwen25, task, tmp_path):
    """As launch/toy.py writes them. What is no file's name is the JSON itself."""
    templates = {"correct": "{prompt} {response}", "answers": "{response_b} {response_a} {prompt}"}
    write_json(tmp_path / "templates.json", templates)
    env = start(qwen25, task, tmp_path, "--templates", tmp_path / "templates.json")
    asked = env.rows.settings.templates
    assert {kind: asked[kind] for kind in templates} == templates
    assert asked["score"] == judgements.KINDS["score"].template
    in_one_word = '{"correct":"{prompt}.{response}"}'  # no name of a file
    assert grm.parse_args(judge_flags(qwen25, task, tmp_path, "--templates", in_one_word))
    for value, message in (
        ("none.json", "none.json: no such file"),
        ("{", "--templates: not JSON"),
        ('{"correct": 3}', "--templates: correct must be str"),
    ):
        with user_error(message):
            start(qwen25, task, tmp_path, "--templates", value)


def test_a_pass_has_every_prompt_once(qwen25, task, tmp_path):
    env = start(
        qwen25,
        task,
        tmp_path,
        "--data",
        f"{task / 'rows.jsonl'},{task / 'more.jsonl'}",
        "--max_epochs 1",
    )
    total, steps = len(env.rows.train), env.args.steps
    assert steps == -(-total // 4)
    with grm.open_loader(env.args, env.rows, grm.TrainState()) as loader:
        groups = [loader.ahead[0], *(rows for rows, _ in itertools.islice(loader.later, steps - 1))]
    assert all(len(part) == 4 for part in groups)
    taken = [id(question) for part in groups for question in part][:total]
    assert sorted(taken) == sorted(map(id, env.rows.train))


# ------------------------------------------------------------------------------------------------ verdicts
def test_verdicts():
    assert rules.parse_verdict("x <answer>A</answer> y <answer> b </answer>", PAIR) == "B"
    for text in (
        "A",
        "<answer>C</answer>",
        "<answer>A or B</answer>",
        "<answer>A",
        "<answer></answer>",
        "",
        "<answer>A</answer> <answer>C</answer>",
    ):
        assert rules.parse_verdict(text, PAIR) is None, text
    assert rules.parse_verdict("<answer>4.0</answer>", ["4", "5"]) == "4"
    assert rules.parse_verdict("<answer>any\nthing</answer>") == "any\nthing"
    # not in six digits
    assert rules.parse_verdict("<answer>20250101</answer>", ["20250102"]) is None
    for text in ("(A)", "**A**", "A.", "a", "**A.**", r"\text{A}", "Ａ", "A. It is short."):
        assert rules.parse_verdict(f"<answer>{text}</answer>", PAIR) == "A", text
    for text in ("Yes.", "**yes**", "(Yes)", "yes"):
        assert rules.parse_verdict(f"<answer>{text}</answer>", ["no", "yes"]) == "yes", text
    assert rules.parse_verdict("<think>not <answer>A</answer>", PAIR) is None
    assert rules.parse_verdict("<think>x</think><answer>A</answer>", PAIR) == "A"


def test_a_response_says_the_verdict_however_it_is_spelled():
    """As the rule `verdict` compares it in train_ppo_vl.py; a score is read where no scores are
    known, too."""

    def read(text: str, kind: str, verdict: str | None) -> str | None:
        row = SimpleNamespace(label=kind, reference=verdict, text="")
        return settings().read_verdict(text, row)

    answers = [f"<answer>{word}</answer>" for word in ("yes", "no", "")] + ["yes"]
    assert [read(answer, "response", "Yes") for answer in answers] == ["Yes", "no", None, None]
    assert read("<answer>No</answer>", "response", None) == "No"
    assert read("No", "response", None) is None
    assert read("<answer>4.0</answer>", "score", "4") == "4"
    assert read("<answer>5</answer>", "score", "4") is None


def record(line: str) -> dict:
    """Of a line: row, kind, order, right answer, predicted answer ("-": none), and the
    probabilities of answers."""
    row, kind, order, right, predicted, *chances = line.split()
    probabilities = {
        word: float(chance) for word, _, chance in (pair.partition("=") for pair in chances)
    }
    return dict(
        group=row[0],
        label=kind,
        order=order,
        reference=None if right == "-" else right,
        verdict=None if predicted == "-" else predicted,
        probabilities=probabilities,
        loss=6.0,
        tokens=3,
        response="a  Cat",
        target="a cat",
    )


JUDGED = """\
a:1 pictures given   A   A   A=0.9 B=0.1
a:1 pictures swapped B   B   A=0.2 B=0.8
a:2 pictures given   A   A
a:2 pictures swapped B   A
a:3 pictures given   A   -
a:3 pictures swapped B   -
b:1 answers  given   tie tie
b:1 answers  swapped tie tie
b:2 correct  given   yes no  yes=0.35 no=0.65
b:3 response given   -   -
"""


def test_summary_by_hand():
    """Unparsable is wrong, never equal to another unparsable one; a pair is consistent if both
    orders name the same thing."""
    summary = accuracy.summarise_judgements(list(map(record, JUDGED.splitlines())))
    assert summary["accuracy"] == pytest.approx(5 / 9)
    assert summary["parse_rate"] == pytest.approx(7 / 9)
    assert summary["position_consistency"] == pytest.approx(2 / 4)
    assert summary["loss"] == 2.0
    assert summary["confusion"]["pictures"] == {
        "A": {"A": 2, "unparsable": 1},
        "B": {"B": 1, "A": 1, "unparsable": 1},
    }
    assert summary["accuracy_per_source"] == {"a": pytest.approx(3 / 6), "b": pytest.approx(2 / 3)}
    assert summary["likelihood_accuracy"] == pytest.approx(2 / 3)
    assert summary["likelihood_ece"] == pytest.approx((0.1 + 0.2 + 0.65) / 3)
    # of the one response without a verdict
    assert summary["exact_match"] == 1


def test_short_responses_are_compared_word_by_word():
    """Those without a verdict, of at most 16 tokens: a long one is hardly ever met exactly, however
    good the answer."""
    rows = [
        record(f"a:{i} response given {right} -") for i, right in enumerate(["-", "-", "-", "yes"])
    ]
    rows[1] |= {"response": "a dog", "tokens": accuracy.SHORT_ANSWER}
    rows[2] |= {"response": "a dog", "tokens": accuracy.SHORT_ANSWER + 1}
    rows[3] |= {"response": "a dog"}
    assert accuracy.summarise_judgements(rows)["exact_match"] == 1 / 2
    alone = accuracy.summarise_judgements(rows[2:3])
    assert "exact_match" not in alone
    assert "accuracy" not in alone
    assert alone["loss"] == 6 / (accuracy.SHORT_ANSWER + 1)


# ------------------------------------------------------------------------------------------------ whole runs
@pytest.fixture(scope="module")
def one_rank(qwen25, task, tmp_path_factory) -> Path:
    """A run of four steps with an evaluation at start, after step 2 and at the end."""
    out = tmp_path_factory.mktemp("one") / "run"
    more = "--steps 4 --eval_every 2 --save_every 2 --keep_best min:eval/loss"
    grm.main(judge_flags(qwen25, task, out, more))
    return out


def test_the_best_evaluation_of_a_judge_is_kept(one_rank):
    """Not that before the first step."""
    losses = {
        entry["step"]: entry["eval/loss"] for entry in records(one_rank) if "eval/loss" in entry
    }
    best = min((2, 4), key=losses.get)
    for folder in ("checkpoints", "export"):
        assert os.readlink(one_rank / folder / "best") == f"step-{best}"


def test_evaluation_has_every_example_once(one_rank, env):
    """13 examples in batches of 2."""
    expected = [
        (i, example.text, example.prompt.reference, example.prompt.source, example.prompt.order)
        for i, example in enumerate(env.held_out)
    ]
    assert len(expected) % 2
    for step in (0, 2, 4):
        result = evaluation(one_rank, step)
        assert expected == [
            (
                entry["index"],
                entry["response_text"],
                entry["gt_answer"],
                entry["info"]["row"],
                entry["order"],
            )
            for entry in result["records"]
        ]
    assert [entry["step"] for entry in records(one_rank)] == [0, 1, 2, 2, 3, 4, 4]
    losses = {
        entry["step"]: entry["eval/loss"] for entry in records(one_rank) if "eval/loss" in entry
    }
    assert list(losses) == [0, 2, 4]
    assert losses[4] < losses[0]
    steps = [entry for entry in records(one_rank) if "train/loss" in entry]
    mean = steps[0]["train/loss"]
    for step in steps:
        mean = 0.9 * mean + 0.1 * step["train/loss"]
        assert step["train/loss_mean"] == pytest.approx(mean, rel=rounding(16))
    assert len(steps) == 4
    assert steps[-1]["train/loss"] > 0


def test_responses_with_boxes(qwen25, tmp_path, capsys):
    """The marks of a response become numbers in the model's coordinates; held-out answers are shown beside
    the true boxes."""
    Image.new("RGB", (50, 30), "white").save(tmp_path / "a.png")
    regions = {"boxes": [[0, 0, 25, 30]], "labels": ["cup"]}
    row = {"prompt": "where?", "images": ["a.png"], "response": "At <box>.", "regions": regions}
    write_rows(tmp_path / "rows.jsonl", [row] * 4)
    write_rows(tmp_path / "eval.jsonl", [row])
    out = tmp_path / "run"
    grm.main(judge_flags(qwen25, tmp_path, out, "--steps 1 --max_pixels 4704"))
    assert "responses are in the coordinates 'seen'" in capsys.readouterr().out
    (record,) = evaluation(out, 1)["records"]
    assert record["response_text"] == "At [0, 0, 28, 28]."
    assert record["regions"]["true"] == [[0, 0, 25, 30]]
    (held_out,) = read_rows(out / "samples" / "eval-000001.jsonl")
    card = record_card(held_out)
    assert ImageColor.getrgb("#16a34a") in {colour for _, colour in card.getcolors(1 << 20)}


def test_rows_of_prompt_and_response_are_all_it_takes(qwen25, tmp_path, capsys):
    """Supervised fine-tuning: no verdict anywhere, held-out loss and exact match, and no talk of
    chance. Who learned no judgements is no judge."""
    shapes = "circles squares stars rings"
    rows = [
        {"prompt": f"how many {shape}?", "response": str(n)}
        for n, shape in enumerate(shapes.split())
    ]
    path, out = write_rows(tmp_path / "sft.jsonl", rows), tmp_path / "run"
    grm.main(
        words(
            "--model",
            qwen25,
            "--data",
            path,
            "--eval_data",
            path,
            "--out",
            out,
            "--steps 40 --lr 3e-3 --max_prompt_tokens 128 --prompts_per_step 4 --eval_max_new_tokens 4 "
            "--eval_every 20 --save_every 20",
        )
    )
    evaluations = [record for record in records(out) if "eval/loss" in record]
    assert evaluations[0]["eval/exact_match"] == 0
    assert evaluations[-1]["eval/exact_match"] == 1
    assert not any("eval/accuracy" in record for record in evaluations)
    printed = capsys.readouterr().out
    assert "exact_match 1.000" in printed
    assert "chance" not in printed
    assert (out / "export" / "step-40" / "model.safetensors").exists()
    assert not (out / "export" / "step-40" / "judge.json").exists()
    with user_error("no reference answer, which verdict compares with"):
        ppo.main(
            words(
                "--model",
                qwen25,
                "--data",
                path,
                "--out",
                tmp_path / "rl",
                "--row_kind judgements --reward verdict",
            )
        )


@pytest.fixture(scope="module")
def two_ranks(qwen25, task, tmp_path_factory) -> Path:
    """The run of ``one_rank`` on two."""
    out = tmp_path_factory.mktemp("two") / "run"
    ranks.run(
        grm.main, judge_flags(qwen25, task, out, "--steps 4 --eval_every 2 --save_every 0"), world=2
    )
    return out


def test_two_ranks_are_one_rank(one_rank, two_ranks):
    for one, two in zip(records(one_rank), records(two_ranks), strict=True):
        assert reproducible(two) == pytest.approx(reproducible(one), rel=2e-4, abs=ROUNDING), one[
            "step"
        ]
    for step in (0, 4):
        one, two = evaluation(one_rank, step)["records"], evaluation(two_ranks, step)["records"]
        assert [(a["index"], a["generated_text"]) for a in one] == [
            (b["index"], b["generated_text"]) for b in two
        ]


@pytest.mark.slow
def test_sigkill_and_resume_are_bitwise(two_ranks, qwen25, task, tmp_path):
    """Rank 0 is killed right after the commit of step 2 while step 3 runs; the rest is that of an
    undisturbed run."""
    argv = judge_flags(
        qwen25, task, tmp_path, "--steps 4 --eval_every 2 --save_every 2 --save_blocking"
    )
    life = ranks.start(grm.main, argv, world=2, patches=[(die_at, "before-rotation", 0)])
    assert life.wait()[0] == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-2"]
    ranks.run(grm.main, argv, world=2)
    assert_same_records(records(tmp_path), records(two_ranks))
    ours, theirs = (
        folder / "export" / "step-4" / "model.safetensors" for folder in (tmp_path, two_ranks)
    )
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_a_signal_stops_and_the_same_command_goes_on(one_rank, qwen25, task, tmp_path, monkeypatch):
    argv, update = judge_flags(qwen25, task, tmp_path, "--steps 4 --eval_every 2"), grm.update

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGUSR1)
        return update(*args)

    # this process has more tests to run
    monkeypatch.setattr(grm.dist, "destroy_process_group", lambda: None)
    process.STOP_SIGNALS.clear()
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(grm, "update", interrupted)
        grm.main(argv)
    assert stop.value.code == process.EXIT_PREEMPTED
    assert records(tmp_path)[-1]["step"] == 1
    del stop
    gc.collect()
    process.STOP_SIGNALS.clear()
    grm.main(argv)
    assert_same_records(records(tmp_path), records(one_rank))


def test_an_evaluation_leaves_the_run_as_it_is(one_rank, qwen25, task, tmp_path):
    """Of an earlier checkpoint, by other rows: records, flags, exports and judgements of the run
    are those of before."""
    out = Path(shutil.copytree(one_rank, tmp_path / "run"))
    argv = judge_flags(
        qwen25, task, out, "--steps 4 --eval_every 2 --save_every 2 --export_every 1"
    )
    grm.main(
        words(
            *argv,
            "--eval_data",
            task / "more.jsonl",
            "--eval_only --resume",
            out / "checkpoints" / "step-2",
        )
    )
    assert len(evaluation(out / "evaluation-step-2", 2)["records"]) < len(
        evaluation(out, 2)["records"]
    )
    files = [
        path.relative_to(one_rank)
        for path in one_rank.rglob("*")
        if path.is_file() and path.name != ".lock"
    ]
    assert len(files) > 20
    assert all((out / name).read_bytes() == (one_rank / name).read_bytes() for name in files)
    exports = {path.name for path in (out / "export").iterdir()}
    assert exports == {"latest", "best", "step-4", os.readlink(one_rank / "export" / "best")}


def test_export_is_a_judge_of_its_own(one_rank, qwen25, task, tmp_path):
    """judge.json says how to ask; from_pretrained loads the weights; the exported judge evaluates
    as the trained one did."""
    folder = one_rank / "export" / "step-4"
    judge = read_json(folder / "judge.json")
    assert Processor(folder).files["judge"] == judge
    kinds = ("answers", "correct", "pictures", "score")
    assert judge["verdicts"] == {kind: VERDICTS[kind] for kind in kinds}
    summary = evaluation(one_rank, 4)["summary"]
    assert judge["thoughts"] is False
    assert judge["position_consistency"] == summary["position_consistency"]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert (
        load_file(folder / "model.safetensors").keys()
        == load_file(qwen25 / "model.safetensors").keys()
    )
    assert not torch.equal(
        model.lm_head.weight, AutoModelForImageTextToText.from_pretrained(qwen25).lm_head.weight
    )
    metrics = grm.main(judge_flags(folder, task, tmp_path, "--eval_only"))
    assert metrics["eval/accuracy"] == summary["accuracy"]
    again, before = (
        evaluation(tmp_path / "evaluation-step-0", 0)["records"],
        evaluation(one_rank, 4)["records"],
    )
    assert [entry["generated_text"] for entry in again] == [
        entry["generated_text"] for entry in before
    ]


def test_a_judges_checkpoint_is_no_policys(one_rank, qwen25, picture_rows, tmp_path):
    with user_error(
        "step-4 was saved by the other script, or .* state.json has no .*an export of its run as --model"
    ):
        ppo.main(
            words(
                "--model",
                qwen25,
                "--data",
                picture_rows,
                "--out",
                tmp_path,
                "--resume",
                one_rank / "checkpoints" / "step-4",
                "--advantage grpo --max_prompt_tokens 512 --steps 9 --prompts_per_step 4",
            )
        )


def test_the_toy_brings_judgements(tmp_path):
    """Answers and pictures of the boards: right is right, every answer has its opposite, no row of
    eval is one of train."""
    from launch import toy

    out = tmp_path / "toy"
    toy.main(words("--out", out, "--warm_start_steps 0 --train 128 --eval 64 --mixed"))
    answers = {
        (row["prompt"], *row["images"]): row["answer"] for row in read_rows(out / "train.jsonl")
    }
    rows, held_out = read_rows(out / "judge_train.jsonl"), read_rows(out / "judge_eval.jsonl")
    graded = [row for row in rows if "correct" in row]
    for row in graded:
        assert (row["response"] == answers[row["question"], *row["images"]]) == row["correct"]
    assert Counter(row["correct"] for row in graded) == {True: 128, False: 128}
    assert {row["preferred"] for row in rows if "preferred" in row} == {"A", "B"}
    train, evaluated = (
        {image for row in part for image in row["images"]} for part in (rows, held_out)
    )
    assert not train & evaluated
    args = grm.parse_args(words("--config", out / "grm_args.json"))
    distributed.start(args.timeout, args.hsdp)
    loaded = grm.load_rows(args)
    assert len(loaded.train) > 256
    assert len(loaded.held_out) > 128


def test_passes_asked_for_are_not_the_steps_of_a_config(tmp_path):
    """args.json has the steps counted out, the toy's own a number of its own."""
    path = tmp_path / "args.json"
    write_json(path, {"model": "m", "data": "d.jsonl", "steps": 2500})

    def steps(*more: str) -> int:
        args = grm.parse_args(words("--config", path, *more))
        return grm.count_steps(args, 128, {}, {}).steps

    assert (steps(), steps("--max_epochs 1"), steps("--steps 7")) == (2500, 4, 7)
    write_json(path, {"model": "m", "data": "d.jsonl", "prompts_per_step": 64})
    assert (steps(), steps("--max_epochs 1"), steps("--steps 7")) == (4, 2, 7)


@pytest.mark.parametrize(
    "line, message",
    table("""
--model= --data d.jsonl                      | --model and --data are needed together
--model m --eval_only                        | --eval_only needs --eval_data
--model m --data d --max_prompt_tokens 99999 | --max_prompt_tokens 99999 exceeds --max_tokens_per_pack 16384
--model m --data d --eval_data a:0.5,b:0.5   | evaluation files take no weights
--model m --data d --system_instruction none.txt | none.txt: no such file
--model m --data d --lr -1                   | --lr -1.0 must be at least 0
"""),
)
def test_flags_are_refused(line, message):
    with user_error(message):
        grm.parse_args(line.split())


def test_a_prompt_that_makes_one_step_larger_than_all_others_is_told():
    """320 rows of which 300 share a prompt: "4 prompts a step" are 4, 4, 303, 4 ... rows."""

    def questions(*counts):
        return [grm.ExampleGroup(SimpleNamespace(source="a:1"), [None] * count) for count in counts]

    (line,) = grm.uneven_prompts(questions(*[1] * 20, 300))
    assert line.startswith("warning: 300 of 320 examples share one prompt (a:1)")
    for counts in ([1] * 300, [30] * 10, [320], [2, 1, 1]):
        assert grm.uneven_prompts(questions(*counts)) == []


# ------------------------------------------------------------------------------------- conversations
def turn(role: str, content: str | None, **more) -> dict:
    return {"role": role, "content": content} | more


# Two that begin alike, one of which leaves an answer out; one that shows its images turn by turn; one
# that shares its prompt with a plain response.
CONVERSATIONS = [
    {
        "messages": [
            turn("user", "<image>what is it?"),
            turn("assistant", "a ring"),
            turn("user", "which colour?"),
            turn("assistant", "it is red, I think"),
            turn("user", "sure?"),
            turn("assistant", "yes. <answer>red</answer>"),
        ],
        "images": ["0.png"],
    },
    {
        "messages": [
            turn("user", "<image>what is it?"),
            turn("assistant", "a circle", loss=True),
            turn("user", "say nothing"),
            turn("assistant", "well", weight=0),
            turn("user", "how many?"),
            turn("assistant", "one", weight=1),
        ],
        "images": ["0.png"],
    },
    {
        "messages": [
            turn("system", "be brief"),
            turn("user", "<image>what is it?"),
            turn("assistant", "a star"),
            turn("user", "and these? <image> <image>"),
            turn("assistant", "two rings"),
        ],
        "images": ["1.png", "2.png", "0.png"],
    },
    {"messages": [turn("user", "count"), turn("assistant", "one"), turn("user", "go on")]
     + [turn("assistant", "two three")]},
    {"prompt": "count", "response": "one two"},
]  # fmt: skip
# the answers that are learned, row by row
LEARNED = [
    ["a ring", "it is red, I think", "yes. <answer>red</answer>"],
    ["a circle", "one"],
    ["a star", "two rings"],
    ["one", "two three"],
    ["one two"],
]


def masked(tokenizer, row: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of a whole conversation as the template renders it, and its labels: -100 wherever no answer
    that is learned stands, by its characters in the text."""
    chat = row.get("messages") or [turn("user", row["prompt"]), turn("assistant", row["response"])]
    chat = [
        {**m, "content": [{"type": "image"} if part == "<image>" else {"type": "text", "text": part}
         for part in re.split("(<image>)", m["content"]) if part]}
        for m in chat
    ]  # fmt: skip
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answers = re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)
    weights = [m.get("weight", 1) for m in chat if m["role"] == "assistant"]
    spans = [answer.span(1) for answer, weight in zip(answers, weights, strict=True) if weight]
    ids, labels = encoded["input_ids"], []
    for token, (start, end) in zip(ids, encoded["offset_mapping"]):
        inside = any(first <= start and end <= last for first, last in spans)
        labels.append(token if inside else -100)
    return torch.tensor(ids), torch.tensor(labels)


def hugging_faces_sum(oracle, env, row: dict, folder: Path) -> tuple[torch.Tensor, int]:
    """The sum of Hugging Face's loss over the labels of a whole conversation, and how many these are."""
    ids, labels = masked(env.processor.tokenizer, row)
    image = env.processor.config.image_token_id
    parts = [
        env.processor.family.patches(read_image(str(folder / name)))
        for name in row.get("images", [])
    ]
    counts = [math.prod(grid) // 4 for _, grid in parts]
    repeats = torch.ones_like(ids)
    repeats[ids == image] = torch.tensor(counts, dtype=torch.int64)
    ids, labels = (x.repeat_interleave(repeats)[None] for x in (ids, labels))
    inputs = {"input_ids": ids, "labels": labels, "mm_token_type_ids": (ids == image).int()}
    if parts:
        patches, grids = zip(*parts)
        inputs |= {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    count = int((labels != -100).sum())
    return oracle(**inputs, use_cache=False).loss * count, count


@pytest.fixture
def conversations(task, tmp_path) -> Path:
    """A folder with these rows as rows.jsonl and eval.jsonl, beside their pictures."""
    for name in ("0.png", "1.png", "2.png"):
        shutil.copy(task / name, tmp_path)
    for name in ("rows.jsonl", "eval.jsonl"):
        write_rows(tmp_path / name, CONVERSATIONS)
    return tmp_path


def batch_of(env, questions: list) -> Batch:
    examples = [question.examples for question in questions]
    return packs.with_examples(env.judge.model, take(env, questions), examples)


@pytest.mark.parametrize("flag", ["--seed 0", "--train_vision"])
def test_every_answer_of_a_conversation_is_learned(qwen25, conversations, oracle, flag):
    """Loss and gradient of one step are those of Hugging Face on whole conversations, with a mask over what
    is no answer; every token of a conversation stands in a pack once."""
    out = conversations / "run"
    env = start(qwen25, conversations, out, "--prompts_per_step 5 --max_tokens_per_pack 4000", flag)
    questions, caught = env.rows.train, Caught(env.judge, env.args)
    assert [len(question.examples) for question in questions] == [2, 1, 2]
    batch = batch_of(env, questions)
    texts = turn_texts(batch, range(5), env.processor)
    assert sorted(texts) == sorted(LEARNED)
    (pack,) = packs.of_batch(env.judge.model, batch_of(env, questions))
    assert pack.input_ids.shape[1] == batch.total_tokens
    metrics = grm.update(caught, batch, grm.TrainState())
    oracle.zero_grad(set_to_none=True)
    sums = [hugging_faces_sum(oracle, env, row, conversations) for row in CONVERSATIONS]
    total = sum(loss for loss, _ in sums) / sum(count for _, count in sums)
    total.backward()
    assert metrics["train/tokens"] == sum(count for _, count in sums)
    assert metrics["train/loss"] == pytest.approx(float(total.detach()), rel=ROUNDING)
    expected = {
        f"model.{name}": p.grad
        for name, p in oracle.named_parameters()
        if flag == "--train_vision" or not name.startswith("model.visual")
    }
    assert distance(caught.gradients[0], expected) < ROUNDING


def as_llava(row: dict) -> dict:
    """A conversation as LLaVA-Instruct writes it, which knows no weights."""
    if any("weight" in message for message in row.get("messages", [{"weight": 1}])):
        return row
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[one["role"]], "value": one["content"]} for one in row["messages"]]
    return {"conversations": turns, "image": row.get("images")}


def test_conversations_on_two_ranks_and_in_evaluations(qwen25, conversations):
    """Of another system, as launch/data/convert.py writes them: every answer is learned. An evaluation
    generates the last answer behind the others; records of a step show all turns."""
    foreign, folder = conversations / "eval.jsonl", conversations / "converted"
    write_rows(foreign, map(as_llava, CONVERSATIONS))
    convert.main(words(foreign, "--turns all --out", folder))
    shutil.copy(folder / "eval.jsonl", folder / "rows.jsonl")
    line = "--prompts_per_step 3 --steps 1 --log_samples 5"
    outs = [conversations / name for name in ("one", "two")]
    grm.main(judge_flags(qwen25, folder, outs[0], line))
    ranks.run(grm.main, judge_flags(qwen25, folder, outs[1], line), world=2)
    one, two = map(records, outs)
    for first, second in zip(one, two, strict=True):
        bound = pytest.approx(reproducible(first), rel=2e-4, abs=ROUNDING)
        assert reproducible(second) == bound
    assert one[1]["train/examples"] == 5
    tokenizer = Processor(qwen25).tokenizer
    learned = [int((masked(tokenizer, row)[1] != -100).sum()) for row in CONVERSATIONS]
    assert one[1]["train/tokens"] == sum(learned)
    evaluated = evaluation(outs[0], 1)["records"]
    assert [record["response_text"] for record in evaluated] == [turns[-1] for turns in LEARNED]
    assert evaluated[0]["info"]["question"] == "what is it?\nwhich colour?\nsure?"
    logged = read_rows(outs[0] / "samples" / "step-000001.jsonl")
    (whole,) = [one for one in logged if one["response"] == "two three"]
    assert whole["conversation"] == [
        turn("assistant", "one"),
        turn("user", [{"type": "text", "text": "go on"}]),
        turn("assistant", "two three"),
    ]


# As Qwen3's: thoughts stand behind the last user's message only. Tools are called as JSON.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endif %}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOK = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
THOUGHTS = [
    {
        "messages": [
            turn("user", "what is it?"),
            turn("assistant", "a ring", reasoning_content="it is round"),
            turn("user", "which colour?"),
            turn("assistant", None, reasoning_content="let me see", tool_calls=[LOOK]),
            turn("tool", "red"),
            turn("assistant", "red", reasoning_content="so it is"),
        ]
    },
    {
        "messages": [
            turn("user", "count"),
            turn("assistant", "one"),
            turn("user", "go on"),
            turn("assistant", "two", reasoning_content=None),
        ]
    },
]
# what is learned of them, behind which prompts
WRITTEN = [
    (1, ["<think>\nit is round\n</think>\n\na ring"]),
    (
        3,
        [
            '<think>\nlet me see\n</think>\n\n<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>',
            "<think>\nso it is\n</think>\n\nred",
        ],
    ),
    (1, ["<think>\n\n</think>\n\none"]),
    (3, ["<think>\n\n</think>\n\ntwo"]),
]


def test_answers_stand_behind_what_the_model_reads_when_it_gives_them(
    qwen25, tmp_path, oracle, capsys
):
    """A template that rewrites earlier turns: rows as many as it takes, in each what the template makes of
    the messages up to its last answer; the turns of one task, between which nothing is rewritten, are one
    row. The loss is Hugging Face's on these."""
    folder = shutil.copytree(qwen25, tmp_path / "qwen3")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = QWEN3
    tokenizer.save_pretrained(folder)
    for name in ("rows.jsonl", "eval.jsonl"):
        write_rows(tmp_path / name, THOUGHTS)
    env = start(folder, tmp_path, tmp_path / "run", "--prompts_per_step 4")
    batch = batch_of(env, env.rows.train)
    assert turn_texts(batch, range(4), env.processor) == [texts for _, texts in WRITTEN]
    total, count = 0.0, 0
    for (first, texts), chat in zip(
        WRITTEN, [row["messages"] for row in THOUGHTS for _ in range(2)]
    ):
        # the last answer of a row, and with it what the row has before
        last = first + 2 * len(texts) - 1
        chat = [m | {"content": m["content"] or ""} for m in chat]
        prompt = tokenizer.apply_chat_template(
            chat[:first], add_generation_prompt=True, tokenize=False
        )
        whole = tokenizer.apply_chat_template(chat[:last], tokenize=False)
        assert whole.startswith(prompt)
        ids = tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"]
        labels, at = (
            torch.full_like(ids, -100),
            len(tokenizer.encode(prompt, add_special_tokens=False)),
        )
        for text in texts:
            target = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
            at = next(
                k for k in range(at, ids.shape[1]) if ids[0, k : k + len(target)].tolist() == target
            )
            labels[0, at : at + len(target)] = ids[0, at : at + len(target)]
        number = int((labels != -100).sum())
        inputs = {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)}
        with torch.no_grad():
            loss = oracle(**inputs, labels=labels, use_cache=False).loss
        total += float(loss) * number
        count += number
    metrics = grm.update(Caught(env.judge, env.args), batch, grm.TrainState())
    assert metrics["train/tokens"] == count
    assert metrics["train/loss"] == pytest.approx(total / count, rel=ROUNDING)
    assert [example.text for example in env.held_out] == [WRITTEN[1][1][-1], "two"]
    (note,) = grm.split_conversations(env.rows.train)
    assert "2 conversations are 4 examples" in note
