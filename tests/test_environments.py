"""Conversations with environments: tokens, log-probs and gradients against one Hugging Face forward of each whole
conversation, rewards of turns against loops, threads, time limits and errors, records and metrics."""

import dataclasses
import itertools
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, computing, start, take, with_flags
from PIL import Image
from test_families import KINDS, TEXT_ONLY, write_family
from transformers import AutoModelForImageTextToText

import train_ppo_vl as ppo
from common import environments, losses, process
from common.environments import Workers
from common.vlm import replies
from common.vlm.model import image_features

PROGRAMS = ROOT / "tests" / "talkers.py"


def talk(env, name: str, count: int, batch=None, **changes):
    """``count`` samples of each prompt, in conversation with an environment; ``changes`` of flags and of sampling."""
    own = {part.name for part in dataclasses.fields(environments.EnvArgs)}
    args = dataclasses.replace(
        env.args.env, **{"env": f"{PROGRAMS}:{name}", "env_workers": 0, "max_turns": 4, "max_reply_tokens": 400}
        | {key: value for key, value in changes.items() if key in own})
    answering = environments.load(args, 512)
    sampling = dataclasses.replace(
        env.sampling, environments=answering, **{key: value for key, value in changes.items() if key not in own})
    return ppo.rollout(env.actor, take(env) if batch is None else batch, sampling, count)


def end_often(env) -> None:
    """Random weights hardly ever draw the end token: let a fifth of all others end a turn as well."""
    more = tuple(i for i in range(len(env.processor.tokenizer) - 20) if i % 5 == 0)
    env.processor.stop_ids = tuple(sorted({*env.processor.stop_ids, *more}))
    env.sampling = dataclasses.replace(env.sampling, stop_ids=torch.tensor(env.processor.stop_ids))


def whole(batch, i: int) -> torch.Tensor:
    """The tokens of a sample's conversation, from the prompt on."""
    streams = batch.stream.split(batch.spans.tolist())
    return torch.cat([batch.prompts[int(batch.group[i])].input_ids, streams[i]])


def expected_logprobs(env, oracle, batch) -> torch.Tensor:
    """(N,) of the policy's own tokens, by one forward of each conversation with all its pictures."""
    family, found = env.processor.family, []
    for i, own in enumerate(batch.is_own.split(batch.spans.tolist())):
        ids, group, said = whole(batch, i)[None], int(batch.group[i]), batch.conversations[i]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | family.token_types(ids)
        row = env.prompts[group]
        shared = said.pictures[:len(batch.prompts[group].grids) - len(row.grids)]
        pictures = [Image.open(path).convert("RGB") for path in row.images] + shared + said.pictures[len(shared):]
        if pictures:
            patches, grids = zip(*map(family.patches, pictures))
            inputs |= family.vision_inputs(torch.cat(patches), torch.tensor(grids))
        with torch.no_grad():
            logits = oracle(**inputs, use_cache=False).logits[0, :-1].float()
        logits[:, list(env.processor.banned_ids)] = -torch.inf
        targets = torch.cat([torch.zeros(ids.shape[1] - len(own), dtype=torch.bool), own])[1:]
        found.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0][targets])
    return torch.cat(found)


def check_exact(env, oracle, batch) -> None:
    """Recorded and packed log-probs, of whole groups in one row and of single samples, = the oracle's."""
    expected = expected_logprobs(env, oracle, batch)
    bound = 1e-5 * expected.abs().max()
    assert (batch.logprobs - expected).abs().max() < bound
    for apart in (False, True):
        with computing(env.actor, apart=apart, max_tokens_per_pack=10**6 if not apart else 300):
            trained = ppo.score_tokens(env.actor, batch, lambda row: env.actor(row, batch.sampling))
        assert (trained - expected).abs().max() < bound
    for tokens, stream, own in zip(batch.split(batch.tokens), batch.stream.split(batch.spans.tolist()),
                                   batch.is_own.split(batch.spans.tolist())):
        assert torch.equal(stream[own], tokens)


def as_told(env, batch, i: int) -> str:
    """The text of a conversation's tokens, a picture as one token and each turn of the policy as a sign."""
    own = torch.cat([torch.zeros(len(batch.prompts[int(batch.group[i])].input_ids)).bool(),
                     batch.is_own.split(batch.spans.tolist())[i]])
    text = ""
    for is_own, part in itertools.groupby(zip(own.tolist(), whole(batch, i).tolist()), key=lambda pair: pair[0]):
        ids = [token for _, token in part]
        pictures = [k for k in range(1, len(ids)) if ids[k] == ids[k - 1] == env.processor.config.image_token_id]
        text += "#" if is_own else env.processor.tokenizer.decode([ids[k] for k in range(len(ids)) if k not in pictures])
    return text


def as_rendered(env, batch, i: int) -> str:
    """The chat template's own text of a whole conversation up to the last turn of the policy, each a sign."""
    said, prompt = batch.conversations[i], env.prompts[int(batch.group[i])]
    *before, last = prompt.messages
    messages = [*before, {**last, "content": last["content"] + replies.as_content(said.opening)}]
    for reply in said.replies:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "#"}]})
        messages.append({"role": said.role, "content": replies.as_content(reply)})
    return env.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + "#"


# ------------------------------------------------------------------------------------------------ exactness
@pytest.mark.parametrize("name, stop", [("Talk", ""), ("Tool", '["a", "e", "r"]'), ("Same", '["a", "e", "r"]')])
def test_packed_logprobs_equal_one_forward_of_the_whole_conversation(checkpoint, picture_rows, name, stop):
    """Qwen2.5-VL and Qwen3-VL, pictures in prompts, first observations and replies; turns that end by a token or a string;
    and the text of the tokens is what the template writes of the whole conversation."""
    env = start(checkpoint, picture_rows, "--max_new_tokens", "48", "--stop_strings", stop)
    if not stop:
        end_often(env)
    batch = talk(env, name, 3)
    assert max(len(said.replies) for said in batch.conversations) == 3
    assert sum(len(said.grids) for said in batch.conversations) > 5
    oracle = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="eager").eval()
    check_exact(env, oracle, batch)
    for i, said in enumerate(batch.conversations):
        if stop and said.ended != "answered":         # the last turn ends by a string, not by an end token of its own
            assert as_told(env, batch, i) == as_rendered(env, batch, i)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("qwen2_vl")])
def test_every_family_talks_exactly(kind, tmp_path, picture_rows):
    try:
        model = write_family(kind, tmp_path, picture_rows)
    except ImportError:
        pytest.skip(f"transformers wants torchvision for {kind}")
    env = start(tmp_path, tmp_path / "rows.jsonl", "--max_new_tokens", "24", "--stop_strings", '["e", "a"]')
    if kind in ("llava", "qwen2"):
        end_often(env)
    name = "Words" if kind in (*TEXT_ONLY, "gemma3") else "Talk"
    batch = talk(env, name, 2)
    assert sum(len(said.replies) for said in batch.conversations) >= 4
    check_exact(env, model.from_pretrained(tmp_path, attn_implementation="eager").eval(), batch)
