"""Environments for tests: the samples of some prompts see something first, by the seed; replies have
no, one or two pictures, by the seed and the number."""

import ctypes
import dataclasses
import os
import random
import time

import torch
from PIL import Image

import train_ppo_vl as ppo
from common.envs import environments
from conftest import ROOT, take


def picture(rng):
    return Image.new(
        "RGB", (28 * rng.randint(1, 3), 56), tuple(rng.randint(0, 255) for _ in range(3))
    )


class Talk:
    pictures = True

    def reset(self, row):
        self.rng, self.turn, self.row = random.Random(100 * row["seed"] + row["number"]), 0, row
        first = random.Random(row["seed"])
        pictures = [picture(first)] if self.pictures and first.random() < 0.5 else []
        return ["seen first", *pictures, "and now?"] if first.random() < 0.7 else None

    def draw(self, most):
        return [picture(self.rng) for _ in range(self.rng.randint(0, most) if self.pictures else 0)]

    def step(self, text):
        self.turn += 1
        if self.turn == 4:
            return None, 1.0, True
        return (
            ["red " * self.turn, *self.draw(2), f"turn {self.turn}?"],
            0.01 * len(text) * self.turn,
            False,
        )


class Words(Talk):
    pictures = False


class Waiting(Words):
    """Says nothing before the policy does."""

    def reset(self, row):
        super().reset(row)


class Tool(Talk):
    role = "tool"


class Same(Talk):
    def reset(self, row):
        super().reset(row)
        return ["the board", picture(random.Random(row["seed"]))]


class Noise(Same):
    """Pictures of many colours."""

    def noise(self, rng):
        return Image.frombytes("RGB", (56, 28), rng.randbytes(56 * 28 * 3))

    def reset(self, row):
        super().reset(row)
        return ["the board", self.noise(random.Random(row["seed"]))]

    def draw(self, most):
        return [self.noise(self.rng) for _ in range(self.rng.randint(0, most))]


class Bad(Words):
    """Sample 0 is well; the others fail, each in another way."""

    def reset(self, row):
        self.number = row["number"]
        if self.number == 1:
            raise KeyError("no board")
        return super().reset(row)

    def step(self, text):
        if self.turn == 0:
            return super().step(text)
        if self.number == 2:
            raise ZeroDivisionError("no rule for this")
        if self.number == 3:
            return "a text", "much", False
        if self.number == 4:
            time.sleep(4)
        if self.number == 5:
            return 3.5, 0.0, False
        if self.number == 6:
            return None, 0.0, False
        if self.number == 7:
            return "<|im_end|>", 0.0, False
        return super().step(text)


class Grading(Words):
    """Rewards every turn by its length."""

    def step(self, text):
        reply, _, done = super().step(text)
        return reply, float(len(text)), done


class GradingCutTurns(Grading):
    cut_turns = True


def note(*words):
    """In a file that all processes of a test append to, if there is one."""
    if "TALKERS_LOG" in os.environ:
        with open(os.environ["TALKERS_LOG"], "a") as file:
            print(*words, file=file)


class Slow(Talk):
    def step(self, text):
        began = time.monotonic()
        time.sleep(0.02 * self.rng.random())
        note("step", os.getpid(), began, time.monotonic())
        return super().step(text)


class Closing(Words):
    def reset(self, row):
        note("reset", row["number"], os.getpid())
        return super().reset(row)

    def close(self):
        note("close", self.turn, os.getpid())


class Stuck(Words):
    """Sample 1 cannot be made, sample 2 cannot be closed: both hang."""

    def reset(self, row):
        self.number = row["number"]
        if self.number == 1:
            time.sleep(60)
        return super().reset(row)

    def close(self):
        note("close", self.number)
        if self.number == 2:
            time.sleep(60)


class Shared(Words):
    """A class whose objects live together."""

    shared = True
    made = 0

    def reset(self, row):
        Shared.made += 1
        note("shared", Shared.made, os.getpid())
        return super().reset(row)


class Dying(Words):
    """Sample 1 ends its process."""

    def step(self, text):
        if self.row["number"] == 1:
            ctypes.string_at(0)
        return super().step(text)


class Chance(Words):
    """Draws from what all of Python draws from."""

    def step(self, text):
        note(random.random(), float(torch.rand(())))
        return super().step(text)


class Absent(Same):
    """A shared board that the first sample does not get."""

    def reset(self, row):
        if row["number"] == 0:
            raise ConnectionError("no server yet")
        return super().reset(row)


class Apart(Talk):
    """The samples of a prompt see different pictures first."""

    def reset(self, row):
        super().reset(row)
        return ["seen first", picture(self.rng)]


class Endless(Words):
    """A first observation that fits into no prompt."""

    def reset(self, row):
        super().reset(row)
        return "a very long board " * 300


class Flood(Words):
    """Replies of megabytes, which only follow a first turn."""

    def reset(self, row):
        return None

    def step(self, text):
        return ["red " * 1_000_000], 0.25, False


class Costly(Words):
    """Every turn but the last costs something."""

    def step(self, text):
        reply, _, done = super().step(text)
        return reply, 1.2 if done else -0.1, done


class Right(Costly):
    """Says its accuracy beside the reward."""

    def step(self, text):
        reply, reward, done = super().step(text)
        return reply, {"reward": reward, "accuracy": 1.0} if done else reward, done


PROGRAMS = ROOT / "tests" / "talkers.py"


def talk(env, name: str, count: int, batch=None, **changes):
    """``count`` samples of each prompt, in conversation with an environment; ``changes`` of its
    flags, and slots."""
    flags = (
        dict(env=f"{PROGRAMS}:{name}", env_workers=0, max_turns=4, max_reply_tokens=400) | changes
    )
    slots = flags.pop("slots", env.sampling.slots)
    answering = environments.load_environment(dataclasses.replace(env.args, **flags), 512)
    sampling = dataclasses.replace(env.sampling, environment=answering, slots=slots)
    return ppo.rollout(env.actor, take(env) if batch is None else batch, sampling, count)


def whole(batch, i: int) -> torch.Tensor:
    """The tokens of a sample's conversation, from the prompt on."""
    streams = batch.stream.split(batch.stream_lengths.tolist())
    return torch.cat([batch.prompts[int(batch.prompt_index[i])].input_ids, streams[i]])


def expected_logprobs(env, oracle, batch, gradient: bool = False) -> torch.Tensor:
    """(N,) of the policy's own tokens, by one forward of each conversation with all its pictures."""
    family, logprobs = env.processor.family, []
    for i, is_own in enumerate(batch.is_own.split(batch.stream_lengths.tolist())):
        ids, group, conversation = (
            whole(batch, i)[None],
            int(batch.prompt_index[i]),
            batch.conversations[i],
        )
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | family.token_types(
            ids
        )
        row = env.prompts[group]
        shared = conversation.images[: len(batch.prompts[group].grids) - len(row.grids)]
        pictures = (
            [Image.open(path).convert("RGB") for path in row.images]
            + shared
            + conversation.images[len(shared) :]
        )
        if pictures:
            patches, grids = zip(*map(family.among(len(pictures)).patches, pictures))
            inputs |= family.vision_inputs(torch.cat(patches), torch.tensor(grids))
        with torch.set_grad_enabled(gradient):
            logits = oracle(**inputs, use_cache=False).logits[0, :-1].float()
        logits = logits.index_fill(
            1, torch.tensor(env.processor.banned_ids, dtype=torch.int64), -torch.inf
        )
        targets = torch.cat([torch.zeros(ids.shape[1] - len(is_own), dtype=torch.bool), is_own])[1:]
        logprobs.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0][targets])
    return torch.cat(logprobs)
