"""What records say of tokens: texts that join to the decoded ones, and the numbers of the step."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from common.buffers import Batch, Conversation
from common.data.transcripts import token_texts
from common.reports import records
from helpers import random_batch
from launch import toy

TEXTS = ["red circle, 2", "红色的圆 и 🙂🏽 مرحبا", " é\u0301\n\n\ttail \ufffd end", "🙂", ""]


def bytes_and_words() -> PreTrainedTokenizerFast:
    """As SentencePiece's: words with their space in front, which a text's first one loses, and single
    bytes for all else."""
    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁red", "▁circle", "s"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    backend = Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def texts_of(ids: list[int], tokenizer) -> list[str]:
    return token_texts(ids, SimpleNamespace(tokenizer=tokenizer))


def test_a_character_of_several_tokens_stands_at_its_last_one():
    tokenizer = bytes_and_words()
    by_name = tokenizer.get_vocab()
    ids = [by_name[name] for name in "▁red ▁circle s <0xE7> <0xBA> <0xA2> ▁red </s>".split()]
    assert texts_of(ids, tokenizer) == ["red", " circle", "s", "", "", "红", " red", "</s>"]
    # what never becomes a character stands where it ends
    assert "".join(texts_of(ids[:5], tokenizer)) == tokenizer.decode(ids[:5])
    tokenizer = toy.make_tokenizer("describe")
    ids = tokenizer("red circle 红")["input_ids"]
    assert texts_of(ids, tokenizer) == ["red", " circle", " ", "", "", "红"]


@pytest.mark.parametrize("tokenizer", [toy.make_tokenizer(), bytes_and_words()], ids=["bpe", "sp"])
def test_pieces_join_to_the_decoded_text(tokenizer):
    """Of texts in several scripts, and of random tokens, which are often no text."""
    rng, draws = np.random.default_rng(0), []
    by_name = tokenizer.get_vocab()
    for text in TEXTS:
        if "<0x00>" in by_name:
            draws.append([by_name[f"<0x{byte:02X}>"] for byte in text.encode()])
        else:
            draws.append(tokenizer(text)["input_ids"])
    draws += [rng.integers(0, len(tokenizer), 40).tolist() for _ in range(50)]
    for ids in draws:
        pieces = texts_of(ids, tokenizer)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert sum(len(ids) for ids in draws) > 2000


def told(batch: Batch, tokenizer) -> list[dict]:
    rows: list[dict] = [{} for _ in range(len(batch))]
    picks = range(len(batch))
    records.add_tokens(batch, rows, picks, SimpleNamespace(tokenizer=tokenizer))
    return [row["per_token"] for row in rows]


def test_every_token_has_the_numbers_of_the_step():
    """One number where all are equal; nothing of what the step has not computed; no number that JSON
    has not."""
    tokenizer = toy.make_tokenizer()
    batch = random_batch(np.random.default_rng(0), shortest=2)
    batch.tokens = torch.randint(0, len(tokenizer), batch.tokens.shape)
    batch.entropy = torch.zeros(0)
    batch.advantages = batch.rewards.repeat_interleave(batch.own_lengths)  # as in GRPO
    batch.logprobs[0] = -math.inf
    rows = told(batch, tokenizer)
    assert rows[0]["logprobs"][0] is None
    for i, row in enumerate(rows):
        start, end = batch.offsets[i : i + 2].tolist()
        assert row.keys() == {"text", "advantages", "values", "logprobs", "kl"}
        assert row["advantages"] == pytest.approx(float(batch.rewards[i]), rel=5e-3)
        assert row["values"] == pytest.approx(batch.values[start:end].tolist(), rel=5e-3)
        assert len(row["text"]) == len(row["kl"]) == end - start


def test_turns_are_told_apart():
    """Three turns, the first of which ends within a character: no piece is of two turns."""
    tokenizer = bytes_and_words()
    by_name = tokenizer.get_vocab()
    ids = [by_name[name] for name in "▁red <0xE7> ▁circle s ▁red </s>".split()]
    batch = dataclasses.replace(
        Batch([], [], []),
        own_lengths=torch.tensor([6]),
        prompt_index=torch.tensor([0]),
        tokens=torch.tensor(ids),
        values=torch.arange(6) / 4,
        conversations=[Conversation(tokens_before=[2, 4])],
    )
    (row,) = told(batch, tokenizer)
    assert row == {
        "text": ["red", "\ufffd", "circle", "s", "red", "</s>"],
        "values": [0.0, 0.25, 0.5, 0.75, 1.0, 1.25],
        "turns": [2, 2, 2],
    }


def test_the_samples_of_the_first_prompts():
    """Though some were left out of the step."""
    batch = Batch([], [], [], prompt_index=torch.tensor([0, 2, 2, 2, 5, 5, 7]))
    assert records.first_samples(batch, 2) == [0, 1, 2, 3]
    assert records.first_samples(batch, 0) == []
    assert records.first_samples(batch, 9) == list(range(7))


def test_images_of_environments_stand_in_their_conversation():
    red, blue = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")
    part = {"type": "image", "width": 2, "height": 2}
    text = {"type": "text", "text": "see"}
    chat = [
        {"role": "user", "content": [text, part]},
        {"role": "assistant", "content": "look"},
        {"role": "user", "content": [part]},
    ]
    shown_to = records.with_images(chat, [red, blue])
    assert records.images_of(shown_to) == [red, blue]
    assert shown_to[0]["content"] == [text, part | {"file": red}]
    assert "file" not in part  # which the batch goes on using
