"""Rewards by models: what a judge or a scalar model says of a response is what the model says when
asked alone.

The oracle asks one sample at a time, with Hugging Face's own model and attention, and text rendered
by its own tokenizer."""

import json
import math
import operator
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import train_ppo_vl as ppo
from common import losses
from common.data.processor import Processor
from common.data.rows import Prompt
from common.model import vlm
from common.reports.records import sample_records
from common.rewards import judgements, reward_models, sources
from common.rewards.sources import RewardArgs
from common.user_code import load_function
from conftest import (
    ROOT,
    ROUNDING,
    inputs_of,
    marked,
    read_json,
    rounding,
    save_weights,
    seeded,
    start,
    take,
    user_error,
    words,
    write_json,
    write_rows,
)
from families import write_family
from judging import alone, answered, ask, build, chances, levelled, score, tokens_of

# one twice for its prompt, one that must not become a picture
SAID = [["3", "a circle", "3"], ["<image>"], ["", "no idea"]]


def prepare(qwen25, picture_rows, *flags: str):
    env, reward, batch = answered(qwen25, picture_rows, SAID, *flags)
    return env, reward, batch, sum(SAID, [])


@pytest.mark.parametrize(
    "which, kind", marked([("near", "correct"), ("near", "score"), ("far", "score")], daily=2)
)
def test_the_judges_reward_is_what_it_says_when_asked_alone(
    qwen25, picture_rows, judges, which, kind
):
    env, reward, batch, texts = prepare(
        qwen25, picture_rows, "--reward", f"grm:{judges[which]}", "--grm_question", kind
    )
    judge = reward.sources[0].score
    assert hasattr(judge.module.model.model, "visual") == (which != "near")
    assert not any(p.requires_grad for p in judge.module.parameters())
    scored = score(env, reward, batch)
    expected = []
    for group, text in zip(batch.prompt_index.tolist(), texts):
        prompt = env.prompts[group]
        values = {"correct": {"yes": 1, "no": 0}, "score": {"-4": -4, "1": 1, "2.5": 2.5}}[kind]
        p = chances(judges[which], prompt, ask(prompt, kind, response=text), list(values))
        expected.append(sum(map(operator.mul, p, values.values())))
    assert max(expected) - min(expected) > 1e-4
    reach = max(values.values()) - min(values.values())
    answers = list(zip(batch.prompt_index.tolist(), texts))
    expected = levelled(expected, answers, 5e-4 * reach)
    assert scored.rewards.tolist() == pytest.approx(expected, abs=ROUNDING)
    # the same answer twice
    assert scored.rewards[0] == scored.rewards[2]
    assert len(scored.judgements) == 6
    assert all(text.startswith("grm: ") for text in scored.judgements)
    record = sample_records(scored, env.processor, env.rows.settings)[0]
    assert record["judgement"] == scored.judgements[0]
    assert record["reward"] == pytest.approx(expected[0], abs=ROUNDING)


def win_rate(folder: Path, prompt: Prompt, response: str, reference: str) -> float:
    """How often a judge prefers a response to the reference, as the mean of both orders; a tie is half."""
    shares = []
    for a, b in ((response, reference), (reference, response)):
        question = ask(prompt, "answers", response_a=a, response_b=b)
        first, second, tie = chances(folder, prompt, question, ["A", "B", "tie"])
        shares.append((first if a == response else second) + tie / 2)
    return statistics.fmean(shares)


def test_a_judge_of_pairs_is_a_reward_without_a_flag(qwen25, picture_rows, judges, tmp_path):
    """It is asked what it was trained on: in both orders, beside the reference, as Hugging Face's model
    says it alone. Rows without a reference are refused, with their lines."""
    folder = judge_of_pairs(judges, tmp_path)
    env, reward, batch, texts = prepare(qwen25, picture_rows, "--reward", f"grm:{folder}")
    scored = score(env, reward, batch)
    expected = []
    for group, text in zip(batch.prompt_index.tolist(), texts):
        prompt = env.prompts[group]
        expected.append(win_rate(folder, prompt, text, prompt.reference))
    assert max(expected) - min(expected) > 1e-4
    answers = list(zip(batch.prompt_index.tolist(), texts))
    expected = levelled(expected, answers, 5e-4 / 2**0.5)
    assert scored.rewards.tolist() == pytest.approx(expected, abs=ROUNDING)
    assert all(len(text.split(" | ")) == 2 for text in scored.judgements)
    row = replace(env.prompts[1], reference=None)
    with user_error("grm:.*rows.jsonl:2: no reference answer"):
        build(env, reward, [env.prompts[0], row])


def judge_of_pairs(judges, tmp_path) -> Path:
    """A judge that was trained on nothing else."""
    judge = read_json(judges["near"] / "judge.json")
    judge["verdicts"] = {"answers": judge["verdicts"]["answers"]}
    return judge_folder(judges, tmp_path, judge)


@pytest.mark.parametrize("opponents", marked([1, 3]))
def test_a_judge_compares_the_responses_of_a_group(
    qwen25, picture_rows, judges, tmp_path, opponents
):
    """The share of wins against the others that follow, in both orders, as Hugging Face's model says it
    alone, without reference answers. Two that are compared twice are asked about once, and the only answer
    to its prompt earns a half."""
    texts = [["3", "a circle", "3", "four"], ["<image>", "<image>"]]
    folder = judge_of_pairs(judges, tmp_path)
    flags = words("--reward", f"grm:{folder}", f"--grm_opponents {opponents}")
    env, reward, batch = answered(qwen25, picture_rows, texts, *flags)
    build(env, reward, [replace(row, reference=None) for row in env.prompts])
    scorer, asked = reward.sources[0].score, []
    judge = scorer.judge
    scorer.judge = lambda *parts: asked.append(len(parts[2])) or judge(*parts)
    scored, expected = score(env, reward, batch), []
    answers = list(zip(batch.prompt_index.tolist(), sum(texts, [])))
    for group, text in answers:
        others = list(dict.fromkeys(texts[group]))
        at = others.index(text)
        others = (others[at + 1 :] + others[:at])[:opponents]
        wins = [win_rate(folder, env.prompts[group], text, other) for other in others]
        expected.append(statistics.fmean(wins) if wins else 0.5)
    assert max(expected) - min(expected) > 1e-4
    bound = 5e-4 / (2 * min(opponents, 2)) ** 0.5
    expected = levelled(expected, answers, bound)
    assert scored.rewards.tolist() == pytest.approx(expected, abs=ROUNDING)
    assert asked == [6]


def test_written_verdicts_on_a_group_are_shares_of_wins(
    qwen25, picture_rows, judges, tmp_path, monkeypatch
):
    """One verdict for both of two rivals; one that is not read is a loss for both."""
    flags = words("--reward", f"grm:{judge_of_pairs(judges, tmp_path)}", "--grm_opponents 1")
    flags += words("--grm_mode critique --grm_max_new_tokens 2")
    texts = [["3", "a circle"], ["3", "no idea", "four"]]
    env, reward, batch = answered(qwen25, picture_rows, texts, *flags)
    # of the first prompt; then "3" and "no idea", "no idea" and "four", "four" and "3", in both orders
    verdicts = iter(["A", "B", "A", "A", None, "tie", "B", "B"])
    monkeypatch.setattr(reward_models, "parse_verdict", lambda *_: next(verdicts))
    scored = score(env, reward, batch)
    assert scored.rewards.tolist() == [1.0, 0.0, 0.5, 0.25, 0.5]
    assert scored.components["parsed"].tolist() == [1.0, 1.0, 1.0, 0.5, 1.0]
    assert not list(verdicts)


def test_opponents_need_a_judge_of_pairs_and_other_samples(qwen25, picture_rows, judges):
    env = start(qwen25, picture_rows, "--advantage grpo --reward", f"grm:{judges['near']}")
    for changes in ({"grm_question": "correct"}, {"reward": "exact"}):
        args = replace(env.args, grm_opponents=2, **changes)
        with user_error("--grm_opponents 2 needs a judge of pairs: a grm:FOLDER among the rewards"):
            build(env, sources.load_rewards(args))
    build(env, sources.load_rewards(replace(env.args, grm_opponents=2)))
    flags = "--model m --data d.jsonl --advantage gae --samples_per_prompt"
    with user_error("--grm_opponents 2 compares the samples of a prompt: --samples_per_prompt 1"):
        ppo.parse_args(words(f"{flags} 1 --reward grm:x --grm_opponents 2"))


SURE = [math.log(share) for share in (0.7, 0.2, 0.1)]  # log-probs of A, B and tie


def test_a_judge_that_always_says_the_same_gives_no_advantages(
    qwen25, picture_rows, judges, tmp_path, monkeypatch, capsys
):
    """It prefers A, whatever A says; what tells answers apart is rounding. A group earns one reward, to the
    last bit, so no estimator makes advantages of it. The first rollout tells."""
    flags = words("--reward", f"grm:{judge_of_pairs(judges, tmp_path)}", "--grm_opponents 2")
    texts = [["3", "a circle", "four"], ["<image>", "no", "yes", "no"], ["", "no idea"]]
    env, reward, batch = answered(qwen25, picture_rows, texts, *flags)

    def log_probs(_, questions):
        shape = len(questions.prompts), 3
        noise = torch.randn(shape, dtype=torch.float64, generator=seeded(3))
        return torch.tensor(SURE, dtype=torch.float64) + size * noise

    monkeypatch.setattr(reward_models.JudgeModel, "verdict_logprobs", log_probs)
    size = 2e-4
    scored = score(env, reward, batch)
    assert len(scored.rewards.unique()) == 1
    assert scored.rewards.tolist() == pytest.approx([0.5] * 9, abs=1e-4)
    told = "in the first rollout the judge had the same verdict in both orders for 0% of the pairs"
    assert told in capsys.readouterr().out
    score(env, reward, batch)
    assert told not in capsys.readouterr().out
    assert sources.prompts_with_spread(scored) == []
    inputs = losses.AdvantageInputs(
        scored.rewards,
        torch.zeros(len(batch.tokens)),
        0.0,
        batch.own_lengths,
        batch.prompt_index,
        turn_ends=batch.turn_ends,
    )
    compared = [name for name, each in ppo.ESTIMATORS.items() if each.compares] + ["cpgd"]
    for name in compared:
        assert not ppo.ESTIMATORS[name].estimate(inputs)[0].any(), name
    size = 0.1  # more than rounding
    assert sources.prompts_with_spread(score(env, reward, batch)) == [0, 1, 2]


@pytest.mark.parametrize("dtype, apart", [(torch.float32, True), (torch.bfloat16, False)])
def test_rewards_are_levelled_by_what_the_type_rounds(dtype, apart):
    """Rewards of a scalar model that differ by 0.4 %: bfloat16 has 8 bits. A group without a value, and
    one of a single sample, stay as they are."""
    rewards = torch.tensor([5.0, 5.02, math.nan, -3.0], dtype=torch.float64)
    noise = 2 * reward_models.LOGIT_ERROR[dtype] * rewards.abs()
    levelled = losses.level(rewards, torch.tensor([0, 0, 0, 1]), noise)
    expected = [5.0, 5.02] if apart else [5.01, 5.01]
    assert levelled[:2].tolist() == pytest.approx(expected, abs=1e-12)
    assert levelled[2:].isnan().tolist() == [True, False]
    assert levelled[3] == -3.0


@pytest.mark.parametrize("dtype, share", [(torch.float32, 0.0005), (torch.bfloat16, 0.02)])
def test_how_much_of_a_judges_rewards_is_rounding(dtype, share):
    """Of the distance between the best and the worst verdict; with n questions, 1 / √n of that."""
    scores = torch.tensor([1.0, 5.0, 3.0])
    error = reward_models.LOGIT_ERROR[dtype]
    scorer = SimpleNamespace(worth=scores, logit_error=error, args=RewardArgs())
    by_questions = torch.tensor([1.0, 1 / 2])  # of one question, and of four
    noise = reward_models.JudgeModel.noise_of(scorer, {"reward": by_questions}, by_questions)
    assert noise["reward"].tolist() == pytest.approx([4 * share, 2 * share], rel=0.03)


@pytest.mark.parametrize("opponents, count", [(7, 56), (3, 48)])
def test_how_many_questions_eight_samples_take(opponents, count):
    scorer = SimpleNamespace(
        kind="answers",
        opponents=opponents,
        worth=torch.zeros(3),
        without_markup=str,
    )
    batch = SimpleNamespace(prompts=[SimpleNamespace(reference=None)])
    answers = [(0, text) for text in "abcdefgh"]
    questions = reward_models.JudgeModel.questions(scorer, batch, answers)
    assert len(questions) == 8 * opponents * 2
    assert len({question.subject for question in questions}) == count


@pytest.mark.slow
def test_a_judge_whose_logprobs_are_not_finite(qwen25, picture_rows, judges):
    flags = words("--reward", f"grm:{judges['near']}", "--grm_question score")
    env, reward, batch, texts = prepare(qwen25, picture_rows, *flags)
    judge = reward.sources[0].score
    judge.module.model.model.language_model.norm.weight.data[0] = torch.nan
    for mode in ("probability", "critique"):
        judge.args = replace(judge.args, grm_mode=mode)
        with user_error("the judge's log-probs are not finite"):
            score(env, reward, batch)


def test_questions_are_those_it_was_trained_on(qwen25, picture_rows, judges, tmp_path, monkeypatch):
    """A row says where its pictures stand, in the text, before it, or not at all: its judge reads
    what it read in training."""
    pictures = sorted(map(str, Path(picture_rows).parent.glob("*.png")))
    rows = [
        {"prompt": prompt, "images": pictures[:count]}
        for prompt, count in (
            ("is <image> larger than <image>?", 2),
            ("<image>what?", 1),
            ("<image><image>\nwhat?", 2),
            ("what?", 1),
            ("what?", 0),
            ("what is <image>", 1),
        )
    ]
    parts = [{"type": "text", "text": "wh"}, {"type": "text", "text": "at?"}]
    rows[4]["prompt"] = [{"role": "user", "content": parts}]
    write_rows(tmp_path / "rows.jsonl", [row | {"answer": "1"} for row in rows])
    env = start(
        qwen25,
        tmp_path / "rows.jsonl",
        "--advantage grpo --reward",
        f"grm:{judges['near']}",
        "--grm_question correct",
    )
    reward = sources.load_rewards(env.args)
    build(env, reward)
    rows[4]["prompt"] = "what?"
    model = reward.sources[0].score
    batch, processor, settings, asked = take(env), model.processor, model.settings, []
    vlm.compute_features(env.actor.model, batch)
    with_images = reward_models.JudgeModel.with_their_images
    monkeypatch.setattr(
        reward_models.JudgeModel,
        "with_their_images",
        lambda *arguments: asked.extend(arguments[-1]) or with_images(*arguments),
    )
    scored = score(
        env, reward, batch.with_responses((k, torch.tensor([40, 41])) for k in range(len(rows)))
    )
    response = env.processor.tokenizer.decode([40, 41])
    for row, prompt in zip(rows, asked, strict=True):
        (example,) = judgements.read_judgement(
            dict(question=row["prompt"], images=row["images"], response=response, correct=True),
            settings,
            "both",
        )
        trained = judgements.make_prompt(
            processor, example.question, example.images, system_prompt=example.instruction
        )
        assert prompt.text == trained.text
        assert prompt.images == trained.images
        assert torch.equal(prompt.input_ids, trained.input_ids)
    assert "Question: is <|vision_start|>" in asked[0].text
    assert "<|vision_end|>Question: what?" in asked[1].text
    assert scored.rewards.isfinite().all()


@pytest.mark.parametrize("which", ["near", "far"])
def test_a_critique_is_what_hugging_face_generates(qwen25, picture_rows, judges, which):
    flags = words(
        "--reward",
        f"grm:{judges[which]}",
        "--grm_question correct --grm_mode critique --grm_max_new_tokens 7",
    )
    env, reward, batch, texts = prepare(qwen25, picture_rows, *flags)
    scored = score(env, reward, batch)
    banned = list(reward.sources[0].score.processor.banned_ids)
    for group, text, judgement in zip(batch.prompt_index.tolist(), texts, scored.judgements):
        prompt = env.prompts[group]
        question = ask(prompt, "correct", response=text)
        model, inputs, tokenizer = alone(judges[which], prompt, question, None)
        with torch.no_grad():
            tokens = model.generate(
                **inputs, max_new_tokens=7, do_sample=False, suppress_tokens=banned
            )
        written = tokenizer.decode(
            tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert judgement == f"grm: {written}".strip()
    assert len(set(scored.judgements)) > 2
    assert scored.rewards.tolist() == [0.0] * 6
    # random words
    assert scored.components["parsed"].tolist() == [0.0] * 6


def test_a_critique_that_parses_earns_its_verdict(qwen25, picture_rows, judges, monkeypatch):
    flags = words("--reward", f"grm:{judges['near']}", "--grm_question answers --grm_mode critique")
    env, reward, batch, _ = prepare(qwen25, picture_rows, *flags, "--grm_max_new_tokens 2")
    # given, swapped of 5 questions
    verdicts = iter(["A", "B", "A", "A", "tie", "tie", None, "B", None, None])
    monkeypatch.setattr(reward_models, "parse_verdict", lambda *_: next(verdicts))
    scored = score(env, reward, batch)
    # won twice, won and lost, -, tied, lost+won, none
    assert scored.rewards.tolist() == [1.0, 0.5, 1.0, 0.5, 0.5, 0.0]
    assert scored.components["parsed"].tolist() == [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("opened, expected", [(False, [1, 0, 1, 1, 0, 1]), (True, [0] * 6)])
def test_a_critique_without_an_end_has_no_verdict(
    qwen25, picture_rows, judges, monkeypatch, opened, expected
):
    """Every other one is cut off; in the second case, the judge's template opens a thought that
    none of them closes."""
    flags = words(
        "--reward",
        f"grm:{judges['near']}",
        "--grm_question correct --grm_mode critique --grm_max_new_tokens 2",
    )
    env, reward, batch, _ = prepare(qwen25, picture_rows, *flags)
    model = reward.sources[0].score
    write, question = model.write, model.question

    def write_alternately(*arguments):
        written = write(*arguments)
        written.truncated = torch.arange(len(written)) % 2 == 1
        return written

    monkeypatch.setattr(model, "write", write_alternately)
    monkeypatch.setattr(
        model.processor, "decode", lambda parts: ["it says <answer>yes</answer>"] * len(parts)
    )
    if opened:
        monkeypatch.setattr(
            model, "question", lambda *a, **named: replace(question(*a, **named), text="<think>\n")
        )
    scored = score(env, reward, batch)
    # the first and the third are one answer
    assert scored.rewards.tolist() == scored.components["parsed"].tolist() == expected


@pytest.mark.parametrize("key", marked(["score.weight", "value_head.weight"]))
def test_a_scalar_reward_model(qwen25, picture_rows, tmp_path, monkeypatch, key):
    """The head on the last hidden state at the end of the chat, as
    AutoModelForSequenceClassification pools. Equal responses to a prompt are asked about once: by
    rounding alone, dynamic sampling took a dull prompt for a useful one."""
    folder = tmp_path / "rm"
    model = AutoModelForImageTextToText.from_pretrained(qwen25)
    model.save_pretrained(folder)
    Processor(qwen25).save(str(folder))
    head = torch.randn(1, model.config.text_config.hidden_size, generator=seeded(7))
    tensors = {
        name: value
        for name, value in load_file(folder / "model.safetensors").items()
        if "lm_head" not in name
    }
    bias = torch.tensor([3.5]) if key == "score.weight" else torch.zeros(1)
    save_weights(folder, tensors | {key: head} | ({"score.bias": bias} if bias.any() else {}))
    env, reward, batch, texts = prepare(qwen25, picture_rows, "--reward", f"rm:{folder}")
    asked = []
    values = reward_models.values_of
    monkeypatch.setattr(
        reward_models,
        "values_of",
        lambda critic, samples: asked.append(len(samples)) or values(critic, samples),
    )
    scored = score(env, reward, batch)
    assert asked == [len(texts) - 1]
    expected = []
    for group, text in zip(batch.prompt_index.tolist(), texts):
        prompt = env.prompts[group]
        tail = env.processor.tokenizer.encode(
            text.replace("<image>", " ") + "<|im_end|>\n", add_special_tokens=False
        )
        inputs = inputs_of(prompt, torch.tensor(tail), env.processor)
        with torch.no_grad():
            hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
        expected.append(float(hidden[0, -1] @ head[0] + bias))
    assert scored.rewards.tolist() == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.01
    opinions = reward.sources[0].score.ask(batch, [(0, texts[0])])
    value, noise = opinions.columns["reward"], opinions.noise["reward"]
    assert noise.tolist() == pytest.approx((2e-4 * value.abs()).tolist())
    assert reward_models.LOGIT_ERROR[torch.bfloat16] == pytest.approx(0.008 / 2, rel=0.03)
    save_weights(folder, tensors)
    with user_error("1 weights do not fit config.json, the first: score.weight is in no file"):
        build(env, sources.load_rewards(env.args))
    for other in ("v_head.summary.weight", "v_head.weight", "reward_head.weight", "score.0.weight"):
        save_weights(folder, tensors | {other: head})
        with user_error(
            rf"score.weight is in no file; {other} is no part of the model \(a value head is"
        ):
            build(env, sources.load_rewards(env.args))
    # not silently begun at zero
    with user_error(r"score.0.weight is no part of the model \(a value head is"):
        start(qwen25, picture_rows, "--critic_model", folder)


# ------------------------------------------------------------------------------------------------ recipes
def test_sources_whose_numbered_names_could_collide_keep_their_rewards(
    qwen25, picture_rows, tmp_path
):
    earns = {"a.py:score": 1, "b.py:score": 10, "c.py:score2": 100}
    for spec, reward in earns.items():
        file, name = spec.split(":")
        text = f"def {name}(prompts, *_):\n    return [{reward}] * len(prompts)\n"
        (tmp_path / file).write_text(text)
    recipe = json.dumps({"*": [[f"{tmp_path}/{spec}", 1] for spec in earns]})
    env, reward, batch, texts = prepare(qwen25, picture_rows, "--reward_recipe", recipe)
    assert score(env, reward, batch).rewards.tolist() == [111.0] * len(texts)


def test_a_recipe_weighs_sources_by_label(qwen25, picture_rows, judges, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def length(prompts, responses, *_):\n    return {'reward': [len(r) for r in responses], "
        "'chars': [len(r) for r in responses]}\n"
    )
    recipe = {
        "math": [["exact", 2.0], [f"{tmp_path}/mine.py:length", 0.5]],
        "*": [[f"grm:{judges['near']}", 1], ["exact", 0]],
    }
    env, reward, batch, texts = prepare(
        qwen25, picture_rows, "--reward_recipe", json.dumps(recipe), "--grm_question correct"
    )
    object.__setattr__(batch.prompts[0], "label", "math")
    object.__setattr__(batch.prompts[0], "reference", "a circle")
    scored = score(env, reward, batch)
    alone_reward = sources.load_rewards(
        replace(env.args, reward_recipe="", reward=f"grm:{judges['near']}")
    )
    build(env, alone_reward)
    judged = score(env, alone_reward, batch).rewards
    object.__setattr__(batch.prompts[0], "label", None)
    object.__setattr__(batch.prompts[0], "reference", "1")
    assert scored.rewards[:3].tolist() == [0.5, 2 + 4.0, 0.5]
    assert scored.rewards[3:].tolist() == pytest.approx(judged[3:].tolist(), abs=rounding(16))
    assert scored.components.keys() == {"exact", "exact/accuracy", "length", "length/chars", "grm"}
    nan = scored.components["grm"].isnan().tolist()
    assert nan == [True] * 3 + [False] * 3
    assert scored.components["length"].isnan().tolist() == [False] * 3 + [True] * 3
    assert list(scored.components)[:3] == ["exact", "length", "grm"]
    assert scored.weights.nan_to_num(0).tolist() == [[2.0, 0.5, 0.0]] * 3 + [[0.0, 0.0, 1.0]] * 3
    assert scored.components["exact/accuracy"].nan_to_num(9).tolist() == [0, 1, 0, 0, 0, 0]
    records = sample_records(scored, env.processor, env.rows.settings)
    assert records[0]["components"].keys() == {"exact", "exact/accuracy", "length", "length/chars"}
    assert records[5]["components"].keys() == {"exact", "exact/accuracy", "grm"}
    assert json.dumps(records, allow_nan=False)
    scored.advantages = scored.returns = torch.zeros(len(scored.tokens))
    metrics = ppo.batch_metrics(scored)
    # of those that have one
    assert metrics["rollout/length/chars_reward"] == pytest.approx(10 / 3)
    assert metrics["rollout/grm_reward"] == pytest.approx(float(judged[3:].mean()))


@pytest.mark.parametrize(
    "numbers, at_end", [("'reward': [1.0] * len(responses), ", 1.0), ("", 0.0)]
)
def test_spans_fall_on_the_tokens_that_end_them(qwen25, picture_rows, tmp_path, numbers, at_end):
    """Each sample earns k / 8 at the end of its k-th character, and what else it earns at its end.
    By all prefixes of its tokens, one after the other: the first whose text is long enough."""
    (tmp_path / "mine.py").write_text(
        "def f(prompts, responses, *_):\n"
        "    spans = [[(k, k / 8) for k in range(1, len(text) + 1)] for text in responses]\n"
        f"    return {{{numbers}'spans': spans}}\n"
        "def beyond(prompts, responses, *_):\n"
        "    return {'spans': [[(len(text) + 1, 1.0)] for text in responses]}\n"
    )
    env, reward, batch, texts = prepare(qwen25, picture_rows, f"--reward {tmp_path}/mine.py:f")
    scored, earned = score(env, reward, batch), []
    for tokens in batch.split(batch.tokens):
        lengths = [len(env.processor.decode([tokens[:n]])[0]) for n in range(1, len(tokens) + 1)]
        assert lengths == sorted(lengths)
        before = [0, *lengths[:-1]]
        earned += [
            sum(k / 8 for k in range(first + 1, last + 1)) for first, last in zip(before, lengths)
        ]
    assert scored.turn_rewards.tolist() == earned
    assert any(earned)
    assert scored.rewards.tolist() == [at_end + sum(range(len(text) + 1)) / 8 for text in texts]
    inputs = losses.AdvantageInputs(
        scored.rewards,
        torch.zeros(len(earned)),
        0.0,
        batch.own_lengths,
        batch.prompt_index,
        turn_rewards=scored.turn_rewards,
    )
    at_ends = torch.zeros(len(earned)).index_fill(0, batch.own_lengths.cumsum(0) - 1, at_end)
    assert torch.allclose(inputs.token_rewards, torch.tensor(earned) + at_ends)
    assert torch.equal(score(env, reward, scored).turn_rewards, scored.turn_rewards)
    reward = sources.load_rewards(replace(env.args, reward=f"{tmp_path}/mine.py:beyond"))
    with user_error(
        r"beyond: spans must be lists of \(end, reward\), with ends in the response: .* not in range"
    ):
        score(env, reward, batch)


@pytest.mark.parametrize(
    "numbers, compared",
    [
        (("accuracy", "style"), ("accuracy", "style", "spans")),
        (("accuracy", "reward"), ("accuracy", "spans")),
        (("reward",), ()),
        ((), ()),
    ],
)
def test_gdpo_compares_what_spans_earn_as_it_does_components(
    qwen25, picture_rows, tmp_path, numbers, compared
):
    """Once: as a component beside others, else as a part of the reward."""
    worth = {"accuracy": "len(set(text))", "style": "text.count('e')", "reward": "len(text) / 7"}
    columns = [f"'{name}': [{worth[name]} for text in responses], " for name in numbers]
    (tmp_path / "mine.py").write_text(
        "def f(prompts, responses, *_):\n"
        "    spans = [[(k, ord(text[k - 1]) / 8) for k in range(1, len(text) + 1, 2)] for text in responses]\n"
        f"    return {{{''.join(columns)}'spans': spans}}\n"
    )
    env, reward, batch, texts = prepare(
        qwen25, picture_rows, f"--reward {tmp_path}/mine.py:f --advantage gdpo"
    )
    scored = score(env, reward, batch)
    values = {
        "spans": [sum(ord(letter) / 8 for letter in text[::2]) for text in texts],
        "accuracy": [len(set(text)) for text in texts],
        "style": [text.count("e") for text in texts],
        "reward": [len(text) / 7 for text in texts],
    }
    earning = ("reward", "spans") if "reward" in numbers else (*numbers, "spans")
    rewards = [sum(values[name][i] for name in earning) for i in range(len(texts))]
    assert scored.rewards.tolist() == pytest.approx(rewards)
    assert scored.components["spans"].tolist() == values["spans"]
    assert sorted(scored.compared) == sorted(compared)


@pytest.mark.parametrize("each_is_replaced", [False, True])
def test_a_span_ends_with_the_last_token_of_its_last_character(each_is_replaced):
    """A token is a byte. What is left of a character is shown as one mark, or (byte fallback) as a mark for
    each of its bytes: then a text has fewer characters with its last byte than before."""

    def shown(raw):
        whole = raw.decode(errors="ignore")
        left = len(raw) - len(whole.encode())
        return whole + "\ufffd" * (left if each_is_replaced else left > 0)

    text = "a😀bé"
    processor = SimpleNamespace(
        silent_ids=set(), decode=lambda parts: [shown(bytes(p.tolist())) for p in parts]
    )
    tokens = torch.tensor(list(text.encode()))
    ends = [sources.token_that_ends(processor, tokens, end) for end in (1, 2, 3, 4)]
    assert ends == [0, 4, 5, 7]


def test_a_span_may_end_with_a_replacement_mark():
    """Of the response itself (three bytes, each a token), or of bytes that are no character."""
    processor = SimpleNamespace(
        silent_ids=set(),
        decode=lambda parts: [bytes(p.tolist()).decode(errors="replace") for p in parts],
    )
    tokens = torch.tensor(list(b"a\xef\xbf\xbd\xff\xffb"))
    assert processor.decode([tokens]) == ["a\ufffd\ufffd\ufffdb"]
    ends = [sources.token_that_ends(processor, tokens, end) for end in range(1, 6)]
    assert ends == [0, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "written, ends",
    [
        (b"a\xe4\0", [0, 1]),
        (b"\xe4\0b\0", [0, 2]),
        (b"\xe4\0\xbd\xa0", [3]),
        (b"\0a\xff\xff\0", [1, 2, 3]),
    ],
)
def test_a_token_that_is_not_shown_ends_no_span(written, ends):
    """As the end of a turn, here a zero, behind bytes that are no character."""
    processor = SimpleNamespace(
        silent_ids={0},
        decode=lambda parts: [
            bytes(p.tolist()).replace(b"\0", b"").decode(errors="replace") for p in parts
        ],
    )
    tokens = torch.tensor(list(written))
    (text,) = processor.decode([tokens])
    places = [sources.token_that_ends(processor, tokens, end) for end in range(1, len(text) + 1)]
    assert places == ends


def test_rollouts_with_and_without_spans_are_one_batch(qwen25, picture_rows, tmp_path):
    """As where a function of a recipe scores no row of one of them."""
    (tmp_path / "mine.py").write_text(
        "def f(prompts, responses, *_):\n    return {'spans': [[(1, 0.5)] for _ in responses]}\n"
    )
    recipe = json.dumps({"spans": [[f"{tmp_path}/mine.py:f", 1.0]], "*": [["none", 1.0]]})
    env, reward, batch, _ = prepare(qwen25, picture_rows, "--reward_recipe", recipe)
    batch.prompts = [
        replace(prompt, label="spans" if k == 1 else "other")
        for k, prompt in enumerate(batch.prompts)
    ]
    parts = [score(env, reward, batch.select_prompts([k])) for k in range(3)]
    joined = ppo.Batch.concatenate(parts)
    assert torch.equal(joined.turn_rewards, score(env, reward, batch).turn_rewards)
    assert losses.sum_per_sample(joined.turn_rewards, joined.own_lengths).tolist() == [
        0.5 * (k == 1) for k in batch.prompt_index.tolist()
    ]


def test_rewards_that_float32_cannot_hold_are_refused(qwen25, picture_rows, tmp_path):
    """Too large, a sum that overflows, and NaN of a model with broken weights."""
    (tmp_path / "mine.py").write_text(
        "def huge(prompts, *_):\n    return [1e39] * len(prompts)\n"
        "def sums(prompts, *_):\n"
        "    return {'a': [1e308] * len(prompts), 'b': [1e308] * len(prompts)}\n"
    )
    for name in ("huge", "sums"):
        env, reward, batch, _ = prepare(
            qwen25, picture_rows, "--reward", f"{tmp_path}/mine.py:{name}"
        )
        with user_error("must be finite float32 numbers: 6 of 6 are not"):
            score(env, reward, batch)
    model = AutoModelForImageTextToText.from_pretrained(qwen25)
    model.model.language_model.norm.weight.data.fill_(math.nan)
    model.save_pretrained(tmp_path / "rm")
    Processor(qwen25).save(str(tmp_path / "rm"))
    tensors = load_file(tmp_path / "rm" / "model.safetensors")
    save_weights(
        tmp_path / "rm",
        tensors | {"score.weight": torch.ones(1, model.config.text_config.hidden_size)},
    )
    env, reward, batch, _ = prepare(qwen25, picture_rows, "--reward", f"rm:{tmp_path / 'rm'}")
    with user_error("must be finite .* the sources say {'rm': nan}"):
        score(env, reward, batch)


def test_a_combiner(qwen25, picture_rows, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def length(prompts, responses, *_):\n    return [len(r) for r in responses]\n"
        "def best(scores):\n    return [max(pair) for pair in zip(*scores.values())]\n"
        "def short(scores):\n    return [1.0]\ndef broken(scores):\n    return 1 / 0\n"
        "def nan(scores):\n    return [float('nan')] * 6\n"
        "def huge(scores):\n    return [10**400] * 6\n"
    )
    flags = words("--reward", f"exact,{tmp_path}/mine.py:length", "--reward_combiner")
    env, reward, batch, texts = prepare(qwen25, picture_rows, *flags, f"{tmp_path}/mine.py:best")
    scored = score(env, reward, batch)
    assert scored.rewards.tolist() == [max(float(text == "1"), len(text)) for text in texts]
    for name, message in (
        ("short", "1 values for 6 samples"),
        ("broken", "ZeroDivisionError"),
        ("nan", "must be finite"),
        ("huge", "OverflowError: int too large"),
    ):
        reward.combiner, *_ = load_function(
            "--reward_combiner", f"{tmp_path}/mine.py:{name}", "rewards"
        )
        with user_error(message):
            score(env, reward, batch)
    env, reward, batch, texts = prepare(
        qwen25, picture_rows, "--reward exact", *flags[2:], f"{tmp_path}/mine.py:best"
    )
    assert score(env, reward, batch).rewards.tolist() == [float(text == "1") for text in texts]
    # of held-out rows whose pictures all fail
    nothing = batch.select(torch.arange(0))
    assert score(env, reward, nothing).rewards.tolist() == []


def test_what_a_function_does_to_its_rows_stays_with_it(qwen25, picture_rows, tmp_path):
    """Not with the samples of the same prompt, nor with the next step."""
    (tmp_path / "mine.py").write_text(
        "def count(prompts, responses, references, labels, images, rows):\n"
        "    for row, paths in zip(rows, images):\n"
        "        row['tags'][0].append(1)\n        row['new'] = paths.append('more')\n"
        "    return [len(row['tags'][0]) + len(paths) for row, paths in zip(rows, images)]\n"
    )
    env, reward, batch, _ = prepare(qwen25, picture_rows, "--reward", f"{tmp_path}/mine.py:count")
    for prompt in batch.prompts:
        prompt.row["tags"] = [[]]
    for _ in range(2):
        assert score(env, reward, batch).rewards.tolist() == [
            2 + len(batch.prompts[i].images) for i in batch.prompt_index
        ]
    assert all(prompt.row["tags"] == [[]] and "new" not in prompt.row for prompt in batch.prompts)


def rewards_of(*flags: str) -> sources.RewardMix:
    return sources.load_rewards(ppo.parse_args(words("--model m --data d.jsonl", *flags)))


BAD_RECIPES = """\
[]
{}
{"a": []}
{"a": [["exact"]]}
{"a": [["exact", "x"]]}
{"a": "exact"}
{
no.json
{"a": [[]]}
{"a": [["exact", 1], ["exact", 2]]}
"""


def test_bad_recipes_are_refused(tmp_path):
    for recipe in BAD_RECIPES.splitlines():
        with user_error("--reward_recipe"):
            rewards_of("--reward_recipe", recipe)
    with user_error("2 sources need a --reward_recipe with their weights, or a --reward_combiner"):
        rewards_of("--reward exact,boxed")
    (tmp_path / "a,b").mkdir()
    (tmp_path / "a,b" / "r.py").write_text("def f(*_): return []")
    with user_error(
        "/a,b/r.py:f: a comma separates sources, and 2 .* a path with a comma needs a rec"
    ):
        rewards_of("--reward", f"{tmp_path}/a,b/r.py:f")
    rewards_of("--reward_recipe", json.dumps({"*": [[f"{tmp_path}/a,b/r.py:f", 1]]}))
    with user_error("--reward 3: expected one of exact, "):
        rewards_of("--reward_recipe", '{"*": [[3, 1]]}')
    with user_error("--reward or --reward_recipe is empty"):
        rewards_of("--reward", "")
    path = tmp_path / "recipe.json"
    path.write_text('{"*": [["exact", 0.5], ["grm:a", 1], ["grm:b", 1]]}')
    reward = rewards_of("--reward_recipe", str(path))
    assert [source.name for source in reward.sources] == ["exact", "grm", "grm2"]
    assert reward.recipe == {"*": {"exact": 0.5, "grm:a": 1, "grm:b": 1}}


def test_rows_that_cannot_be_scored_are_named(qwen25, picture_rows):
    env = start(
        qwen25, picture_rows, "--advantage grpo --reward_recipe", '{"math": [["exact", 1]]}'
    )
    reward = sources.load_rewards(env.args)
    with user_error(r"4 of 4 rows.*\n  rows.jsonl:1: label None is not in --reward_recipe: math"):
        reward.check_rows(env.prompts)
    row = Prompt([], "", (), (), torch.zeros(0), 0, source="x.jsonl:7")
    with user_error("x.jsonl:7: no reference answer, which boxed compares with"):
        rewards_of("--reward boxed").check_rows([row])
    rewards_of("--reward grm:x").check_rows([row])


def test_a_judge_is_not_asked_what_it_never_learned():
    for trained, asked in (
        (["score", "correct"], "correct"),
        (["pictures", "answers", "score"], "score"),
        (["rubric", "answers"], "answers"),
        (["rubric"], "rubric"),
    ):
        judge = judgements.JudgeSettings(verdicts=dict.fromkeys(trained, ["1"]))
        assert judge.kind_to_ask("auto") == asked
    for trained, asked in (("score", "answers"), ("pictures", "auto")):
        with user_error(f"--grm_question {asked}: the judge was trained on {trained}, says"):
            judgements.JudgeSettings(verdicts={trained: ["1"]}).kind_to_ask(asked)


def test_a_model_that_was_never_trained_to_judge_is_asked_by_the_built_in_templates(
    qwen25, picture_rows
):
    """As Hugging Face's model says it alone; what it is asked has to be said, and what scores there are."""
    env, reward, batch, texts = prepare(
        qwen25, picture_rows, "--reward", f"grm:{qwen25}", "--grm_question correct"
    )
    scored, expected = score(env, reward, batch), []
    for group, text in zip(batch.prompt_index.tolist(), texts):
        prompt = env.prompts[group]
        yes, _ = chances(
            qwen25, prompt, ask(prompt, "correct", response=text), ["yes", "no"], judge=""
        )
        expected.append(yes)
    assert max(expected) - min(expected) > 1e-4
    expected = levelled(expected, list(zip(batch.prompt_index.tolist(), texts)), 5e-4)
    assert scored.rewards.tolist() == pytest.approx(expected, abs=ROUNDING)
    for question, message in (
        ("auto", r"no judge.json with verdicts.*--grm_question: correct, score, answers, rubric$"),
        ("score", r'score: its verdicts are missing.*\{"verdicts": \{"score": \["1", "2"'),
    ):
        with user_error(f"grm:{qwen25}: .*{message}"):
            build(env, sources.load_rewards(replace(env.args, grm_question=question)))


def test_a_judge_json_by_hand(judges, picture_rows, qwen25, tmp_path):
    """Any part of it, as the page shows: what it leaves out is built in."""
    page = (ROOT / "common" / "README.md").read_text(encoding="utf-8")
    section = page.partition("### A judge from anywhere")[2].partition("\n### ")[0]
    written = json.loads(section.partition("```json")[2].partition("```")[0])
    folder = judge_folder(judges, tmp_path, written)
    env, reward, batch, texts = prepare(qwen25, picture_rows, "--reward", f"grm:{folder}")
    judge = reward.sources[0].score
    assert (judge.kind, judge.verdicts) == ("score", ["1", "2", "3", "4", "5"])
    assert judge.settings.templates["rubric"] == judgements.KINDS["rubric"].template
    scored, expected = score(env, reward, batch), []
    for group, text in zip(batch.prompt_index.tolist(), texts):
        columns = {
            "prompt": judgements.user_text(env.prompts[group].messages),
            "response": text.replace("<image>", " "),
        }
        question = written["templates"]["score"].format(**columns)
        shares = chances(
            folder,
            env.prompts[group],
            question,
            judge.verdicts,
            judge=written["system_instruction"],
        )
        expected.append(sum(share * value for value, share in enumerate(shares, start=1)))
    expected = levelled(expected, list(zip(batch.prompt_index.tolist(), texts)), 4 * 5e-4)
    assert scored.rewards.tolist() == pytest.approx(expected, abs=ROUNDING)


THOUGHTS = [["<think>3?</think> 4", "4"], ["3</think>\n\n4", "[THINK]so[/THINK]four"], ["<think>4"]]
BARE = [["4", "4"], ["4", "four"], [""]]


def test_thoughts_of_responses_are_not_judged(qwen25, picture_rows, judges, tmp_path):
    """A judge is shown what follows them, unless it was trained with them: the rewards are those of bare
    answers. A judge.json that says nothing is of a version that showed them all."""
    saved = read_json(judges["near"] / "judge.json")
    assert saved["thoughts"] is False
    earned = {}
    for thoughts in (False, True, None):
        folder = judge_folder(judges, tmp_path, saved | {"thoughts": thoughts})
        for texts in (THOUGHTS, BARE):
            flags = words("--reward", f"grm:{folder}", "--grm_question score")
            env, reward, batch = answered(qwen25, picture_rows, texts, *flags)
            earned[thoughts, texts is BARE] = score(env, reward, batch).rewards.tolist()
    assert earned[False, False] == earned[False, True] == earned[True, True] == earned[None, True]
    assert earned[True, False] == earned[None, False]
    assert earned[True, False][:2] != earned[True, True][:2]


def test_what_follows_a_thought_that_the_prompt_opens(qwen25, picture_rows):
    """In each turn of a conversation; one that was not ended is all thought."""
    env, _, batch = answered(qwen25, picture_rows, [["so</think>4"], ["4"]], "--reward exact")
    batch.prompts = [replace(row, text=row.text + "<think>\n") for row in batch.prompts]
    model = SimpleNamespace(settings=judgements.JudgeSettings(thoughts=False))
    whole_texts = reward_models.RewardModel.whole_texts
    assert whole_texts(model, batch, [0, 1], env.processor) == ["4", ""]
    model.settings.thoughts = True
    assert whole_texts(model, batch, [1, 0], env.processor) == ["4", "so</think>4"]


@pytest.mark.parametrize(
    "saved, responses, reads",
    [
        ({}, ["a", "b"], False),
        ({}, ["a", "<think>b</think>c"], True),
        ({"thoughts": False}, ["a", "<think>b</think>c"], False),
        ({"verdicts": {"correct": ["yes", "no"]}}, ["a", "b"], True),
    ],
)
def test_a_judge_reads_thoughts_if_it_was_trained_with_them(saved, responses, reads):
    settings = judgements.JudgeSettings.to_train(SimpleNamespace(files={"judge": saved}))
    row = {"prompt": "what?", "responses": responses, "preferred": "A"}
    (asked, _) = judgements.read_judgement(row, settings, "both")
    second = "c" if settings.thoughts is False else responses[1]
    assert f"Answer B: {second}\n" in asked.question
    settings.note_training([SimpleNamespace(label="answers", reference="A", row=row)])
    assert settings.thoughts is reads


@pytest.mark.parametrize("before, reads", [(None, False), ({}, True), ({"thoughts": {}}, False)])
def test_runs_that_began_before_judges_were_asked_without_thoughts_go_on(before, reads):
    """What reward models are shown is a part of a run's identity."""
    model = object.__new__(reward_models.RewardModel)
    model.settings = judgements.JudgeSettings()
    listed = [SimpleNamespace(name="rm", score=model), SimpleNamespace(name="exact", score=None)]
    life = SimpleNamespace(saved={} if before is None else {"fingerprint": before}, fingerprint={})
    ppo.note_thoughts(SimpleNamespace(sources=listed), life)
    assert model.settings.reads_thoughts is reads
    assert life.fingerprint == {"thoughts": {"rm": reads}}
    assert "thoughts" in ppo.IDENTITY


def test_the_share_of_pairs_with_one_verdict_in_both_orders():
    """Won, lost and tied twice; once A, and then A again; a verdict that was not read."""
    first = torch.tensor([1.0, 0.0, 0.5])
    letters = "AB BA tt AA -t -- A- BA".split()
    chances = torch.zeros(len(letters), 2, 3)
    for pair, verdicts in zip(chances, letters):
        for row, letter in zip(pair, verdicts):
            row["ABt-".index(letter) :][:1] = 0.9
    worth = torch.stack([first, 1 - first]).expand(len(letters), 2, 3)
    share = reward_models.same_in_both_orders(chances.view(-1, 3), worth.reshape(-1, 3))
    assert share == 4 / 8


def test_a_judge_that_goes_by_position_is_told(qwen25, picture_rows, judges, tmp_path, capsys):
    """By the newest evaluation before its export; where its rewards compare."""
    saved = read_json(judge_of_pairs(judges, tmp_path) / "judge.json")
    env = start(qwen25, picture_rows, "--advantage grpo --reward", f"grm:{tmp_path / 'judge'}")
    for share, told in ((None, False), (0.19, True), (0.2, False)):
        judge_folder(judges, tmp_path, saved | {"position_consistency": share})
        build(env, sources.load_rewards(env.args))
        assert (
            "same verdict in both orders for 19% of the pairs" in capsys.readouterr().out
        ) is told


def test_a_judge_is_asked_with_its_own_template_options(qwen25, judges, picture_rows, tmp_path):
    """Those of the flag are the policy's; without any, a scalar model and a judge have none."""
    folder = judge_folder(
        judges,
        tmp_path,
        read_json(judges["near"] / "judge.json") | {"template_options": {"content": 1}},
    )
    env, reward, *_ = prepare(
        qwen25,
        picture_rows,
        "--grm_question correct --reward_recipe",
        json.dumps({"*": [[f"grm:{folder}", 1], [f"grm:{judges['far']}", 1]]}),
        "--template_options",
        '{"role": "x"}',
        "--coordinates file",
    )
    # ... and its own space, unless it is of the policy's family
    assert [source.score.processor.space for source in reward.sources] == ["file", "1000"]
    assert env.processor.template_options == {"role": "x"}
    assert [source.score.processor.template_options for source in reward.sources] == [
        {"content": 1},
        {},
    ]


def judge_folder(judges, tmp_path, judge: dict) -> Path:
    folder = tmp_path / "judge"
    shutil.copytree(judges["near"], folder, dirs_exist_ok=True)
    write_json(folder / "judge.json", judge)
    return folder


def test_rows_that_a_model_cannot_see_are_refused_at_the_start(
    qwen25, picture_rows, judges, tmp_path
):
    """A judge of text only takes the row without pictures; where a recipe asks it of others, they
    are named."""
    write_family("qwen2", tmp_path / "text", picture_rows)
    shutil.copy(judges["near"] / "judge.json", tmp_path / "text")
    env, _, batch, _ = prepare(qwen25, picture_rows, "--reward exact")
    specs = {kind: f"{kind}:{tmp_path / 'text'}" for kind in ("grm", "rm")}
    for kind, spec in specs.items():
        with user_error(f"{kind}:.*rows.jsonl:2: qwen2 takes no images"):
            build(env, sources.load_rewards(RewardArgs(reward=spec)), env.prompts)
    reward = sources.load_rewards(RewardArgs(reward=specs["grm"]))
    build(env, reward, env.prompts[:1])
    few = batch.select(torch.arange(3))
    assert score(env, reward, few).rewards.isfinite().all()


ENDING = "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}"


@pytest.mark.parametrize(
    "newline, padding", [(True, None), (True, "<|endoftext|>"), (False, "<|im_end|>"), (True, "\n")]
)
def test_a_sequence_classification_model(qwen25, picture_rows, tmp_path, newline, padding):
    """A folder as AutoModelForSequenceClassification writes it: the score is the one that class
    computes from the rendered chat. That is read at the newline of Qwen's templates, and elsewhere
    where the template ends in padding."""
    write_family("qwen2", tmp_path / "base", picture_rows)
    template = Path(tmp_path / "base" / "chat_template.jinja")
    text = template.read_text().replace("<|im_start|>assistant{{ '\\n' }}", ENDING)
    text = text if newline else text.replace("<|im_end|>{{ '\\n' }}", "<|im_end|>")
    assert ENDING in text
    template.write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    padding = tokenizer.encode(padding, add_special_tokens=False)[0] if padding else None
    config = AutoConfig.from_pretrained(tmp_path / "base", num_labels=1, pad_token_id=padding)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager"
    ).eval()
    model.save_pretrained(tmp_path / "rm")
    for path in [*(tmp_path / "base").glob("*token*"), template]:
        shutil.copy(path, tmp_path / "rm")
    env = start(
        tmp_path / "base",
        tmp_path / "base" / "rows.jsonl",
        "--advantage grpo --reward",
        f"rm:{tmp_path / 'rm'}",
    )
    reward = sources.load_rewards(env.args)
    build(env, reward)
    answers = ["a circle", "3"], ["no idea"]
    responses = [(k, tokens_of(env, text)) for k, texts in enumerate(answers) for text in texts]
    batch = take(env, 2).with_responses(responses)
    scored = score(env, reward, batch)
    expected = []
    for prompt, texts in zip(env.prompts, answers):
        for text in texts:
            question = judgements.user_text(prompt.messages)
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            with torch.no_grad():
                inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
                expected.append(float(model(**inputs).logits))
    assert scored.rewards.tolist() == pytest.approx(expected, abs=ROUNDING)
    assert len(set(expected)) == 3
