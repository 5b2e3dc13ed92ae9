"""A teacher: what it says and what the policy learns from it, against Hugging Face's own models in
plain loops; what is refused."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import train_ppo_vl as ppo
from common.buffers import EMPTY
from common.data.processor import Processor
from common.data.rows import load_prompts
from common.looks.teacher import with_hint
from common.model import fsdp, packs
from conftest import (
    assert_same_records,
    hugging_face,
    inputs_of,
    logits_of,
    read_json,
    read_rows,
    records,
    responses_of,
    same_tensors,
    seeded,
    start,
    table,
    take,
    token_logprobs,
    user_error,
    with_flags,
    write_checkpoint,
    write_image,
    write_json,
    write_rows,
)
from helpers import TALKING, Caught, asleep, distance, flags, hand_batch, resumed, tensors, train
from talkers import expected_logprobs, talk

HINT = "{prompt} (The answer is {answer}, said {who}.)"


def smaller_images(folder: Path) -> Path:
    """Pictures are cut into fewer patches than by the toy's own settings."""
    path = folder / "preprocessor_config.json"
    settings = read_json(path)
    settings["size"]["longest_edge"] = settings["max_pixels"] = 56 * 56
    write_json(path, settings)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A model of another size, with more ids, a tower of its own and smaller images."""
    folder = tmp_path_factory.mktemp("other")
    return smaller_images(
        write_checkpoint(folder, "qwen2_5_vl", spare_ids=70, hidden_size=32, layers=2)
    )


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A policy with more ids than any teacher."""
    return write_checkpoint(tmp_path_factory.mktemp("wide"), "qwen2_5_vl", spare_ids=100)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """rows.jsonl, and seen.jsonl: as the teacher of HINT sees them, written by hand."""
    folder, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(2)
    plain, seen = [], []
    for i, sizes in enumerate([[(84, 112)], [], [(56, 56), (112, 112)], [(112, 28)]]):
        images = [f"{i}-{k}.png" for k in range(len(sizes))]
        for name, size in zip(images, sizes):
            write_image(folder / name, size, rng)
        row = {"prompt": "how many " * (i + 1), "images": images, "answer": i, "who": f"<{i}>"}
        plain.append(row)
        seen.append(row | {"prompt": f"{row['prompt']} (The answer is {i}, said <{i}>.)"})
    write_rows(folder / "seen.jsonl", seen)
    return Path(write_rows(folder / "rows.jsonl", plain))


def in_float64(module) -> None:
    module.to(torch.float64)
    module.model.setup = dataclasses.replace(module.model.setup, dtype=torch.float64)


def taught(policy: Path, rows: Path, *more):
    """In float64: models, and hand-made samples that the policy's loss does not move."""
    env = start(policy, rows, "--temperature 0.7 --min_new_tokens 2 --advantage none", *more)
    for module in {env.actor, env.models.teacher.policy}:
        in_float64(module)
    env.batch = hand_batch(env)
    size = env.models.teacher.policy.processor.vocab_size
    # no rollout draws ids beyond
    env.batch.tokens = env.batch.tokens % (size - 9)
    env.batch.kl = EMPTY
    env.batch.advantages = torch.zeros(len(env.batch.tokens))
    env.batch.old_logprobs = env.batch.logprobs
    return env


def oracle(folder: Path):
    """Hugging Face's own model in float64; its norms and its softmax, which it computes in float32, too."""
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(plain_norm, module)
    return model


def gradients_of(student) -> dict[str, torch.Tensor]:
    """Of Hugging Face's model by our names; its tower is not trained."""
    return {
        f"model.{name}": p.grad for name, p in student.named_parameters() if "visual" not in name
    }


def plain_norm(norm, x: torch.Tensor) -> torch.Tensor:
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def distributions(env, model, prompts: list, processor) -> list[torch.Tensor]:
    """(T, V) log-probs of each sample by a model of Hugging Face's, V of the smaller vocabulary,
    under the sampling's rules."""
    size = min(env.processor.vocab_size, env.models.teacher.policy.processor.vocab_size)
    logprobs = []
    for index, tokens in responses_of(env.batch):
        logits = logits_of(model, prompts[index], tokens, processor)[:, :size] / 0.7
        logits[:2, list(env.processor.stop_ids)] = -torch.inf
        logits[:, [i for i in env.processor.banned_ids if i < size]] = -torch.inf
        logprobs.append(logits.log_softmax(-1))
    return logprobs


def seen_by(teacher: Path, env, rows: Path, name: str = "seen.jsonl") -> tuple:
    """Hugging Face's teacher, its prompts as written by hand, and its processor."""
    processor = Processor(teacher)
    return (
        oracle(teacher),
        load_prompts(str(rows.with_name(name)), processor, env.args),
        processor,
    )


TEACHERS = ["self", "other", "narrow"]


@pytest.fixture(params=TEACHERS)
def case(request, qwen25, wide, other, rows):
    """The policy's folder, the teacher's, and --teacher_model."""
    policy, teacher = {
        "self": (qwen25, qwen25),
        "other": (qwen25, other),
        "narrow": (wide, qwen25),
    }[request.param]
    return policy, teacher, "self" if request.param == "self" else teacher


def test_ids_that_it_lacks_are_not_sampled(qwen25, wide, rows):
    """Which changes nothing of the policy's processor."""
    env = start(wide, rows, "--teacher_model", qwen25)
    count, banned = Processor(qwen25).vocab_size, Processor(wide).banned_ids
    assert env.processor.banned_ids == banned
    wanted = {*banned, *range(count, env.processor.vocab_size)}
    assert set(env.sampling.banned.nonzero()[:, 0].tolist()) == wanted
    assert count < env.processor.vocab_size


# ------------------------------------------------------------------------------------------------
# what it says
def test_its_log_probs_are_those_of_a_forward_of_its_own(case, rows):
    """Of its prompts and images, at the policy's temperature and bans, to 1e-10."""
    policy, teacher, name = case
    env = taught(policy, rows, "--teacher_prompt", HINT, "--teacher_model", name)
    look = env.models.teacher.view(env.batch)
    asked = env.models.teacher.policy
    with torch.no_grad():
        ours = torch.zeros(len(env.batch.tokens), dtype=torch.float64)
        for pack in packs.of_batch(asked.model, look):
            ours[pack.flat] = asked(pack, env.sampling)[0]
        fsdp.reshard_root(asked)
        by_sample = distributions(env, *seen_by(teacher, env, rows))
    expected = torch.cat(
        [
            token_logprobs(logp, tokens)
            for logp, (_, tokens) in zip(by_sample, responses_of(env.batch))
        ]
    )
    finite = expected.isfinite()
    assert finite.sum() > 0.8 * len(finite)
    assert torch.equal(ours.isfinite(), finite)
    assert (ours - expected)[finite].abs().max() < 1e-10
    of_policy = torch.cat(
        [
            token_logprobs(logp, tokens)
            for logp, (_, tokens) in zip(
                distributions(env, oracle(policy), env.prompts, env.processor),
                responses_of(env.batch),
            )
        ]
    )
    assert (of_policy - expected)[finite].abs().max() > 0.1


def test_the_loss_is_the_exact_kl(case, rows):
    """Over the whole vocabulary, with its gradient, packed in several ways, against autograd of
    Hugging Face's models."""
    policy, teacher, name = case
    env = taught(
        policy,
        rows,
        "--teacher_in loss --teacher_coef 0.3 --teacher_prompt",
        HINT,
        "--teacher_model",
        name,
    )
    student = oracle(policy)
    with torch.no_grad():
        theirs = distributions(env, *seen_by(teacher, env, rows))
    total = torch.zeros(())
    for logp, logq in zip(distributions(env, student, env.prompts, env.processor), theirs):
        possible = logp.isfinite()
        total = (
            total
            + (logp.exp() * (logp - logq).masked_fill(~possible, 0.0))
            .masked_fill(~possible, 0.0)
            .sum()
        )
    (0.3 * total / len(env.batch.tokens)).backward()
    kl = float(total.detach()) / len(env.batch.tokens)
    expected = gradients_of(student)
    for most in (600, 130):
        for module in {env.actor, env.models.teacher.policy}:
            module.model.setup = dataclasses.replace(module.model.setup, max_tokens_per_pack=most)
        trained = Caught(env.actor, env.args)
        env.batch.teacher_view = env.models.teacher.view(env.batch)
        metrics = ppo.update_actor(trained, env.models, env.batch, 1, None, env.args)
        assert distance(trained.gradients[0], expected) < 1e-7
        assert metrics["train/teacher_kl"] == pytest.approx(kl, rel=1e-6)
    assert kl > 0.1


def test_tokens_outside_of_the_policy_loss_are_taught_too(qwen25, rows):
    """As by --mask_truncated, where every response of a minibatch is cut off."""
    env = taught(qwen25, rows, "--teacher_in loss --teacher_model self --teacher_prompt", HINT)
    gradients = []
    for mask in (torch.ones, torch.zeros):
        env.batch.in_policy_loss = mask(len(env.batch.tokens)).bool()
        trained = Caught(env.actor, env.args)
        env.batch.teacher_view = env.models.teacher.view(env.batch)
        metrics = ppo.update_actor(trained, env.models, env.batch, 1, None, env.args)
        gradients.append(trained.gradients[0])
        assert distance(gradients[-1], gradients[0]) < 1e-10
        assert metrics["train/teacher_kl"] > 0.1


def test_the_advantage_is_the_difference_of_log_probs(qwen25, other, rows):
    """Added to what rewards say, which alone is discounted and whitened; --advantage_clip bounds the sum."""
    env = start(
        qwen25,
        rows,
        "--advantage reinforce++ --gamma 0.5 --teacher_coef 0.3 --teacher_model",
        other,
    )
    env.batch = hand_batch(env)
    env.batch.rewards = torch.arange(16.0)
    ppo.fill_logprobs_and_values(env.batch, env.models, env.args)
    state = ppo.TrainState(0.0)
    metrics = ppo.compute_advantages(env.batch, state, env.args)
    together = env.batch.advantages
    alone = with_flags(env.args, teacher_coef=0.0)
    ppo.compute_advantages(env.batch, state, alone)
    rewarded = env.batch.advantages
    assert float(rewarded.std()) == pytest.approx(1, abs=1e-4)
    model, prompts, processor = seen_by(other, env, rows, "rows.jsonl")
    expected = []
    with torch.no_grad():
        for (index, tokens), old in zip(
            responses_of(env.batch), env.batch.split(env.batch.old_logprobs)
        ):
            logits = logits_of(model, prompts[index], tokens, processor)
            logits[:, env.processor.vocab_size :] = -torch.inf
            expected.append(0.3 * (token_logprobs(logits, tokens) - old))
    expected = torch.cat(expected).float()
    assert torch.allclose(together - rewarded, expected, atol=2e-5)
    assert metrics["train/teacher_kl"] == pytest.approx(-float((expected / 0.3).mean()), abs=1e-4)
    ppo.compute_advantages(env.batch, state, with_flags(env.args, advantage_clip=0.5))
    bounded = (rewarded + expected).clamp(-0.5, 0.5)
    assert torch.allclose(env.batch.advantages, bounded, atol=2e-5)
    assert bounded.abs().min() < 0.4


# ------------------------------------------------------------------------------------------------ whole runs
QUIET = "--save_every 0 --export_every 0 --steps 2 --reward none"


def test_an_empty_hint_gives_the_reference(qwen25, task, tmp_path):
    """The same weights after two steps, in every bit."""
    line = "--steps 2 --save_every 0 --actor_lr 1e-2 --advantage grpo"
    kl = train(
        qwen25, task, tmp_path / "kl", line, "--kl_coef 0.5 --kl_in loss --kl_estimator full"
    )
    hint = train(
        qwen25,
        task,
        tmp_path / "hint",
        line,
        "--teacher_model self --teacher_in loss --teacher_coef 0.5 --teacher_prompt {prompt}",
    )
    folders = [tmp_path / name / "export" / "step-2" for name in ("kl", "hint")]
    assert same_tensors(*map(tensors, folders))
    assert [step["train/kl_loss"] for step in kl] == [step["train/teacher_kl"] for step in hint]
    assert hint[1]["train/teacher_kl"] > 1e-4


def test_a_hint_before_the_question_follows_the_images():
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    row = SimpleNamespace(
        reference="a cat", row={}, messages=[{"role": "user", "content": content}]
    )
    (message,) = with_hint(row, "It is {answer}. {prompt}")
    assert [part.get("text") for part in message["content"]] == [
        None,
        "It is a cat. ",
        "What is this?",
    ]
    # a value's braces are text
    row.reference = "{prompt}"
    (message,) = with_hint(row, "{{{answer}}} {prompt}!")
    assert [part.get("text") for part in message["content"]] == [
        None,
        "{{prompt}} ",
        "What is this?",
        "!",
    ]


def test_with_adapters_it_is_the_base_model(qwen25, task, tmp_path):
    """As a second copy of the base in a folder of its own."""
    shutil.copytree(qwen25, tmp_path / "base")
    line = f"{QUIET} --lora_rank 4 --actor_lr 1e-2 --teacher_in loss --teacher_prompt"
    runs = [
        train(qwen25, task, tmp_path / str(i), line, "{prompt} {answer}", "--teacher_model", name)
        for i, name in enumerate(["self", tmp_path / "base"])
    ]
    assert_same_records(*runs)
    assert runs[0][1]["train/teacher_kl"] > 0


@pytest.mark.slow
def test_it_follows_the_average_and_is_resumed(qwen25, task, tmp_path):
    """A teacher `ema` is in no checkpoint, and a resumed run has it again, in every bit; also from
    host memory."""
    line = (
        "--teacher_model ema --ema_beta 0.6 --actor_lr 1e-2 --teacher_in loss --advantage grpo --offload all "
        "--teacher_prompt"
    )
    whole = resumed(qwen25, task, tmp_path, line, "{prompt} {answer}")
    assert not any("teacher" in name for name in tensors(whole / "checkpoints" / "step-4"))
    still = train(
        qwen25,
        task,
        tmp_path / "still",
        line,
        "{prompt} {answer}",
        "--teacher_model self --steps 4",
    )
    moving = [step["train/teacher_kl"] for step in records(whole)]
    assert moving[0] == still[0]["train/teacher_kl"]
    assert moving[3] != still[3]["train/teacher_kl"]


def test_offloading_changes_nothing(qwen25, other, task, tmp_path, monkeypatch):
    """Also where host and device are two memories, and the weights of a teacher that rests are of no use."""
    line = f"{QUIET} --teacher_in loss --teacher_model {other}"
    plain = train(qwen25, task, tmp_path / "none", line)
    monkeypatch.setattr(fsdp, "moved_to", asleep)
    assert_same_records(plain, train(qwen25, task, tmp_path / "all", line, "--offload all"))


# ------------------------------------------------------------------------------------------------
# how good it is
ECHO = """
def score(prompts, responses, references, labels, images):
    # what is scored is an answer to the row's own prompt
    assert not any("answer is" in prompt for prompt in prompts)
    right = [float(response[:2] == reference) for response, reference in zip(responses, references)]
    return {"accuracy": right, "reward": right}
"""


@pytest.mark.slow
def test_its_own_accuracy_is_measured_without_training(qwen25, other, task, tmp_path):
    """Greedily, with its hint and its tower: as Hugging Face's `generate` answers the rows that are
    written by hand."""
    rows = read_rows(task / "eval.jsonl")
    hinted = [row | {"prompt": f"{row['prompt']} (The answer is {row['answer']}.)"} for row in rows]
    write_rows(task / "hinted.jsonl", hinted)
    processor, model, answers = Processor(other), hugging_face(other), []
    args = ppo.parse_args(flags(qwen25, task, tmp_path / "x"))
    for prompt in load_prompts(str(task / "hinted.jsonl"), processor, args):
        inputs = inputs_of(prompt, torch.zeros(0, dtype=torch.int64), processor)
        ids = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=6,
            suppress_tokens=[
                *processor.banned_ids,
                *range(len(processor.tokenizer), processor.vocab_size),
            ],
        )
        answers.append(processor.decode([ids[0, len(prompt.input_ids) :]])[0])
    # every second one is right
    expected = [answers[i][:2] if i % 2 else "?" for i in range(len(answers))]
    write_rows(task / "echo.jsonl", [row | {"answer": text} for row, text in zip(rows, expected)])
    (tmp_path / "echo.py").write_text(ECHO)
    line = flags(
        qwen25,
        task,
        tmp_path / "out",
        "--eval_data",
        task / "echo.jsonl",
        "--teacher_model",
        other,
        "--teacher_prompt",
        "{prompt} (The answer is 1.)",
        "--eval_only --advantage none --reward",
        f"{tmp_path / 'echo.py'}:score",
    )
    metrics = ppo.main(line)
    right = [text[:2] == wanted for text, wanted in zip(answers, expected)]
    assert metrics["eval/teacher_accuracy"] == pytest.approx(sum(right) / len(right))
    assert 0 < sum(right) < len(right)


def test_the_accuracy_of_an_average_is_that_of_the_average(qwen25, task, tmp_path):
    """Without a hint it answers as the average does, which evaluations take, and not as --model."""
    line = "--ema_beta 0.5 --actor_lr 3e-2 --advantage grpo --eval_every 0 --export_every 0"
    held_out = ["--teacher_model ema --eval_data", task / "eval.jsonl"]
    train(qwen25, task, tmp_path, line, *held_out, "--steps 2 --save_every -1")
    metrics = ppo.main(flags(qwen25, task, tmp_path, line, *held_out, "--steps 2 --eval_only"))
    base = ppo.main(flags(qwen25, task, tmp_path / "base", line, *held_out, "--eval_only"))
    assert metrics["eval/teacher_reward"] == metrics["eval/reward_mean"]
    assert metrics["eval/teacher_reward"] != base["eval/teacher_reward"]


# ------------------------------------------------------------------------------------------------
# what is refused
@pytest.mark.parametrize(
    "line, message",
    table("""
--reward none
    | --advantage none, which --reward none implies, needs --teacher_model: all learning is from a teacher
--reward none --advantage grpo                       | --reward none excludes --advantage grpo
--advantage none --teacher_model self --kl_coef 0.1  | needs --kl_in loss for its --kl_coef
--teacher_model ema                                  | --teacher_model ema needs --ema_beta
--teacher_model ema --ema_beta 0.9 --lora_rank 4 --advantage grpo
    | --teacher_model ema needs --ema_beta, and excludes --lora_rank: adapters have no average
--teacher_prompt {prompt}{answer}                    | --teacher_prompt and --teacher_in loss need --teacher_model
--teacher_in loss                                    | --teacher_prompt and --teacher_in loss need --teacher_model
--teacher_model self --teacher_prompt {answer}       | must contain {prompt}, the place of the row's prompt
--teacher_model self --teacher_prompt {prompt}{answer.x} | braces hold the name of a column and nothing else
--teacher_model self --teacher_prompt {prompt}{answer[0]} | braces hold the name of a column and nothing else
--teacher_model self --teacher_prompt {prompt}{answer:>2000000000}
    | braces hold the name of a column and nothing else
--teacher_model self --teacher_prompt {prompt}{answer!r} | braces hold the name of a column and nothing else
--teacher_model self --teacher_prompt {prompt}{}     | braces hold the name of a column and nothing else
--teacher_model self --teacher_prompt {prompt}{0}    | braces hold the name of a column and nothing else
--teacher_model self --teacher_prompt {prompt}{answer:{label}}
    | braces hold the name of a column and nothing else
--teacher_model self --teacher_prompt {prompt}{      | a brace of the text is written twice
--teacher_model self --teacher_prompt {prompt}}      | a brace of the text is written twice
--teacher_model self --teacher_prompt {prompt}{answer | a brace of the text is written twice
--teacher_model self --teacher_prompt {prompt}{answer!} | a brace of the text is written twice
--teacher_model self --teacher_prompt {{prompt}}     | must contain {prompt}, .* once
--teacher_model self --teacher_prompt {prompt}{prompt} | must contain {prompt}, .* once
--teacher_model self --teacher_prompt {{prompt}}{prompt} | must contain {prompt}, .* once
--teacher_model self --advantage none --dynamic_sampling 2
    | --advantage none excludes --dynamic_sampling, which chooses prompts by their rewards
--teacher_model self --teacher_prompt {prompt}{answer} --env x.py:Y | conversations are scored unchanged
"""),
)
def test_bad_flags(qwen25, task, tmp_path, line, message):
    with user_error(message):
        ppo.parse_args(flags(qwen25, task, tmp_path, line))


def refused(policy: Path, task: Path, message: str, *more) -> None:
    with user_error(message):
        held_out = "--eval_data", task / "eval.jsonl", "--"
        ppo.main(flags(policy, task, task / "refused", *held_out, *more))


def test_bad_rows_and_folders(qwen25, other, task, tmp_path, monkeypatch):
    """One message each, before weights are read."""
    from common.model import weights

    rows = read_rows(task / "train.jsonl")
    write_rows(
        task / "unanswered.jsonl",
        [
            {key: x for key, x in row.items() if key != "answer" or i != 3}
            for i, row in enumerate(rows)
        ],
    )
    write_rows(
        task / "null.jsonl",
        [row | ({"answer": None} if i == 3 else {}) for i, row in enumerate(rows)],
    )
    write_rows(task / "text.jsonl", [row | {"images": []} for row in rows])
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(qwen25, tokenizer)
    content = read_json(tokenizer / "tokenizer.json")
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    write_json(tokenizer / "tokenizer.json", content)
    large = tmp_path / "large"
    shutil.copytree(other, large)
    settings = read_json(large / "preprocessor_config.json")
    settings["size"] = {"shortest_edge": 448 * 448, "longest_edge": 448 * 448}
    (large / "preprocessor_config.json").write_text(
        json.dumps(settings | {"min_pixels": 448 * 448, "max_pixels": 448 * 448})
    )
    monkeypatch.setattr(weights, "fill", None)
    for name in ("unanswered", "null"):
        refused(
            qwen25,
            task,
            f"{name}.jsonl:4: --teacher_prompt: no 'answer'; the row has 'prompt', 'images'",
            "--teacher_model self --teacher_prompt {prompt}{answer} --data",
            task / f"{name}.jsonl",
        )
    refused(
        qwen25,
        task,
        r"text.jsonl:1: prompt too long: \d+ tokens, 0 of them of images; the limit is 80",
        "--teacher_model self --max_prompt_tokens 80 --teacher_prompt",
        "{prompt}" + " word" * 80,
        "--data",
        task / "text.jsonl",
    )
    refused(
        qwen25,
        task,
        "another tokenizer, which lacks 2 of the policy's 395 tokens .*'a'",
        "--teacher_model",
        tokenizer,
    )
    refused(
        qwen25,
        task,
        r"train.jsonl:\d: prompt too long: .* of them of images; the limit is 128",
        "--teacher_model",
        large,
        "--max_prompt_tokens 128",
    )
    refused(qwen25, task, "no config.json", "--teacher_model", task)


def test_with_an_environment_it_sees_as_the_policy_does(qwen25, other, task, tmp_path):
    """Neither a tower of its own nor none will do, even if no row has an image: the environment may
    show one."""
    write_rows(
        task / "text.jsonl", [row | {"images": []} for row in read_rows(task / "train.jsonl")]
    )
    blind = tmp_path / "blind"
    shutil.copytree(qwen25, blind)
    (blind / "preprocessor_config.json").unlink()
    text = {
        name: value
        for name, value in read_json(qwen25 / "config.json")["text_config"].items()
        if name not in ("model_type", "rope_parameters")
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **text)).save_pretrained(blind)
    talker = Path(__file__).parents[1] / "talkers.py"
    for folder in (other, blind):
        refused(
            qwen25,
            task,
            "with --env it must have the vision tower of the policy",
            f"--env {talker}:Noise --max_reply_tokens 40 --teacher_model",
            folder,
            "--data",
            task / "text.jsonl",
            "--eval_data",
            task / "text.jsonl",
        )


# ------------------------------------------------------------------------------------------------
# conversations
def test_conversations_are_scored_as_they_were_held(qwen25, rows):
    """With an environment's pictures between the policy's turns: by Hugging Face's model, one
    forward per conversation."""
    env = start(
        qwen25, rows, "--max_new_tokens 16 --teacher_model self --stop_strings", '["a", "e", "r"]'
    )
    generator = seeded(3)
    # the policy is no longer its teacher
    with torch.no_grad():
        for parameter in env.actor.parameters():
            if parameter.requires_grad:
                parameter.to_local().add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    batch = talk(env, "Noise", 2, batch=take(env))
    with env.models.teacher.in_use() as asked:
        actual = ppo.logprobs_of(asked, env.models.teacher.view(batch))
    expected = expected_logprobs(env, hugging_face(qwen25), batch)
    assert batch.is_own.sum() < len(batch.is_own)
    assert (actual - expected).abs().max() < 1e-4 < 1e-2 < (batch.logprobs - expected).abs().max()


def test_a_run_of_conversations_with_a_teacher(qwen25, task, tmp_path):
    """Which is not measured at the start: its tower would have to see what environments show."""
    talkers = Path(__file__).parents[1] / "talkers.py"
    line = flags(
        qwen25,
        task,
        tmp_path,
        TALKING,
        "--steps 2 --actor_lr 1e-2 --advantage grpo --teacher_model self --reward env",
        "--eval_data",
        task / "eval.jsonl",
        "--env",
        f"{talkers}:Talk",
    )
    ppo.main(line)
    steps = [record for record in records(tmp_path) if "train/teacher_kl" in record]
    assert abs(steps[0]["train/teacher_kl"]) < 1e-4 < abs(steps[1]["train/teacher_kl"])
    assert not any("eval/teacher_accuracy" in record for record in records(tmp_path))
