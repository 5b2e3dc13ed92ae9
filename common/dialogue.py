"""The conversations of a rollout, which the rollout engine consults.

    open      environments are reset; first observations become part of the prompts
    end_turn  a turn has ended: its environment is asked in a thread, the slot keeps its cache
    listen    replies are prefilled after what their slots have cached; finished samples leave
    fill      what was said, as a batch has it

While an environment is running, its slot is marked done. Decoding still computes it, but leaves its
tokens, and the states of linear attention, as they are, and changes only cache entries that the
reply will overwrite.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, Iterable, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from common import distributed
from common.buffers import Batch
from common.conversations import Conversation
from common.environments import Call, Environment, Environments, Workers, env_row, read_step
from common.process import describe
from common.vlm import model as vlm
from common.vlm import replies
from common.vlm.data import Processor
from common.vlm.replies import Pixels, Reply, Resumed
from common.vlm.rows import Prompt

Key = tuple[int, int]  # (group, sample number)


class Response(NamedTuple):
    """One finished sample."""

    tokens: Tensor  # (n,)
    logprobs: Tensor  # (n,)
    truncated: bool  # ended by a limit


@dataclass
class Talk:
    """A conversation in progress."""

    source: str  # of its row, for messages
    environment: Environment | None
    said: Conversation
    object: Any = None  # the environment, once it is made
    is_busy: bool = False  # for good: a call of it was given up
    call: Call | None = None  # while it is running
    opening: Reply | None = None  # a first observation that comes after the prompt
    response: Response | None = None  # the own tokens of all finished turns
    # turns and replies after the prompt: ids (n,), which are own (n,), rotary positions from the
    # prompt's end (n, 3)
    stream: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    given: int = 0  # tokens of the prompt and of all replies
    replied: int = 0  # tokens of all replies, without a first observation
    origin: int = 0  # rotary position after the prompt
    following: int = 0  # rotary position of the turn's first token
    begun: int = 0  # own tokens before the turn

    def add(self, ids: Tensor, positions: Tensor, is_own: bool) -> None:
        """Add a turn or a reply (n,) with its rotary positions (n,) or (3, n) to the stream."""
        places = (positions - self.origin).expand(3, -1).T
        self.stream.append((ids, torch.full((len(ids),), is_own), places))

    def add_turn(self, tokens: Tensor) -> None:
        """Add what is new of all own tokens (n,)."""
        new = tokens[self.begun :]
        self.add(new, self.following + torch.arange(len(new)), is_own=True)


class Dialogue:
    """Conversations of this rank's samples, by (group, sample number)."""

    def __init__(
        self,
        environments: Environments,
        model: nn.Module,
        processor: Processor,
        max_new_tokens: int,
        seed: tuple[int, ...],
    ):
        self.environments, self.args = environments, environments.args
        self.model, self.processor = model, processor
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.workers = Workers(self.args.env_workers, self.args.env_timeout)
        self.talks: dict[Key, Talk] = {}
        self.shared_pixels: dict[int, Pixels] = {}  # by group, with the prompt's own

    # First observations

    def open(self, batch: Batch, groups: list[int], count: int) -> Batch:
        """Reset the environments of this rank's samples. Returns the batch with the first
        observations in its prompts, the same on every rank.

        One that all samples of a prompt share ends the prompt. Of others a prompt keeps what they
        have in common; the rest begins the stream of each sample. Raises UserError on every rank.
        """
        changes: dict[int, dict] = {}
        with distributed.raise_on_all_ranks("--env "):
            self.reset_all(batch, groups, count)
            for group in groups:
                if any(self.talks[group, k].opening for k in range(count)):
                    changes[group] = self.open_group(batch, group, count)
        found = sum(distributed.gather_json(list(changes.items())), [])  # of all ranks
        return self.with_prompts(batch, dict(found)) if found else batch

    def reset_all(self, batch: Batch, groups: list[int], count: int) -> None:
        for group in groups:
            row = batch.prompts[group]
            environment = self.environments.of(row)
            for number in range(count):
                talk = Talk(row.source, environment, Conversation())
                self.talks[group, number] = talk
                if environment is not None:
                    talk.said.role = environment.role
                    seen = env_row(row, (*self.seed, batch.draws[group]), number)
                    work = functools.partial(self.reset, talk, row, seen)
                    talk.call = self.workers.submit(work)
        for talk in self.talks.values():
            if talk.call is not None:
                self.workers.wait([talk.call])
                talk.opening = self.take_result(talk)
                if talk.opening is not None:
                    talk.said.opening = talk.opening.content
                    talk.said.pictures += talk.opening.pictures

    def reset(self, talk: Talk, prompt: Prompt, row: dict) -> Reply | None:
        """In a thread: make and reset an environment."""
        talk.object = talk.environment.make()
        said = talk.object.reset(row)
        if said is None:
            return None
        opening = self.read(talk, said)
        limit = self.environments.max_prompt_tokens
        replies.encode_opening(self.processor, prompt, opening, limit)  # or this sample fails
        return opening

    def read(self, talk: Talk, said: Any) -> Reply:
        reply = replies.read_parts(said, self.processor)
        if reply.pictures and not talk.environment.pictures:
            raise ValueError("a picture from a class that says pictures = False")
        return reply

    def open_group(self, batch: Batch, group: int, count: int) -> dict[str, Any]:
        """What changes in a prompt, JSON-ready: it ends with an observation that its samples share,
        or where what they see differs."""
        row, talks = batch.prompts[group], [self.talks[group, k] for k in range(count)]
        if talks[0].environment.shared:
            opening = next(talk.opening for talk in talks if talk.opening)
            if opening.grids:
                parts = [batch.patches[group]] if group in batch.patches else []
                parts.append((opening.patches, torch.tensor(opening.grids)))
                self.shared_pixels[group] = replies.join_pixels(parts)
            for talk in talks:  # one whose reset failed sees it too: it is in its prompt
                talk.opening = None
                talk.said.opening, talk.said.pictures = opening.content, list(opening.pictures)
            text, ids, image_tokens = self.encode_opening(row, opening)
            return {
                "text": text,
                "input_ids": ids.tolist(),
                "image_tokens": image_tokens,
                "grids": opening.grids,
            }
        whole = []  # the prompt of each sample with its own observation
        cut = len(row.input_ids)
        for talk in talks:
            talk.opening = talk.opening or Reply()
            _, ids, _ = self.encode_opening(row, talk.opening)
            whole.append(Reply(grids=row.grids + talk.opening.grids, input_ids=ids))
            cut = min(cut, common_prefix(row.input_ids, ids))
        image_ids = self.model.family.visual_token_ids()
        if int(torch.isin(row.input_ids[:cut], image_ids).sum()) != row.image_tokens:
            raise ValueError(f"{row.source}: the template puts the observation before a picture")
        for talk, begin in zip(talks, whole):
            positions = vlm.prompt_positions(self.model, begin)  # (3, P)
            talk.opening.input_ids = begin.input_ids[cut:]
            talk.opening.positions = positions[:, cut:] - (positions[:, :cut].max() + 1)
        return {"input_ids": row.input_ids[:cut].tolist(), "grids": ()}

    def encode_opening(self, row, opening: Reply) -> tuple[str, Tensor, int]:
        limit = self.environments.max_prompt_tokens
        try:
            return replies.encode_opening(self.processor, row, opening, limit)
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error

    def with_prompts(self, batch: Batch, changes: dict[int, dict]) -> Batch:
        """The batch with prompts as `open_group` has changed them, on all ranks."""
        prompts, features = list(batch.prompts), dict(batch.features)
        for group, changed in changes.items():
            ids = torch.tensor(changed["input_ids"], dtype=torch.int64)
            grids = prompts[group].grids + tuple(map(tuple, changed["grids"]))
            known = changed | {"input_ids": ids, "grids": grids}
            prompts[group] = replace(prompts[group], **known)
            features.pop(group, None)
        patches = batch.patches | self.shared_pixels
        return replace(batch, prompts=prompts, patches=patches, features=features, positions={})

    @property
    def extra_tokens(self) -> int:
        """Most tokens of a sample that are neither the prompt's nor its own."""
        openings = [len(talk.opening.input_ids) for talk in self.talks.values() if talk.opening]
        return self.args.max_reply_tokens + max(openings, default=0)

    # What the engine asks

    def begin(self, engine, state: Iterable[tuple[int, ...]]) -> None:
        """Prompts were prefilled: (slot, their length, the following position, ...) of samples."""
        waiting = []
        for slot, length, following, *_ in state:
            talk = self.talks[engine.owner[slot]]
            talk.given, talk.origin, talk.following = length, following, following
            if talk.opening is not None:
                waiting.append((slot, talk, talk.opening))
        self.resume_all(engine, waiting)

    def is_waiting(self, key: Key) -> bool:
        """Whether a sample waits for its environment."""
        return self.talks[key].call is not None

    def end_turn(self, key: Key, response: Response, by_string: bool) -> bool:
        """A turn has ended: by a token limit, a stop string or an end token. Returns whether the
        sample waits for its environment; else it is finished."""
        talk = self.talks[key]
        if talk.said.error or talk.environment is None or response.truncated:
            ended = "token_limit" if response.truncated else "answered"
            self.end(talk, "error" if talk.said.error else ended)
            return False
        talk.response = response
        text = self.processor.decode([response.tokens[talk.begun :]])[0]
        talk.call = self.workers.submit(functools.partial(self.step, talk, text, by_string))
        return True

    def step(self, talk: Talk, text: str, by_string: bool) -> tuple[Reply | None, float]:
        """In a thread: what an environment says to a turn; None: it is done."""
        said, reward, done = read_step(talk.object.step(text))
        if done:
            return None, reward
        reply = self.read(talk, said)
        reply.input_ids = replies.encode_reply(self.processor, reply, talk.said.role, by_string)
        reply.positions = vlm.prompt_positions(self.model, reply)
        return reply, reward

    def listen(self, engine, results: dict[Key, Response]) -> None:
        """Take what environments have answered. If all samples wait, so does this."""
        taken = {slot: self.talks[owner] for slot, owner in enumerate(engine.owner) if owner}
        waiting = {slot: talk for slot, talk in taken.items() if talk.call}
        all_wait = bool(waiting) and len(waiting) == len(taken)
        engine.bar.set_postfix_str(f"{len(waiting)} wait for environments", refresh=all_wait)
        if all_wait:
            self.workers.wait([talk.call for talk in waiting.values()])
        going_on, freed = [], []
        for slot, talk in waiting.items():
            if not self.workers.has_ended(talk.call):
                continue
            reply = self.hear(talk)
            if talk.said.ended:
                is_cut = talk.said.ended.endswith("_limit")
                results[engine.owner[slot]] = talk.response._replace(truncated=is_cut)
                freed.append(slot)
            else:
                going_on.append((slot, talk, reply))
        engine.release(freed)
        self.resume_all(engine, going_on)

    def hear(self, talk: Talk) -> Reply | None:
        """The reply to the last turn. Sets how the sample ended, if it did."""
        said, own = talk.said, len(talk.response.tokens)
        result = self.take_result(talk)
        if said.error:
            self.end(talk, "error")
            return None
        reply, reward = result
        said.rewards.append(reward)
        said.ends.append(own)
        if reply is None:
            self.end(talk, "answered")
        elif len(said.ends) >= self.args.max_turns:
            self.end(talk, "turn_limit")
        elif (
            own >= self.max_new_tokens
            or talk.replied + len(reply.input_ids) > self.args.max_reply_tokens
        ):
            self.end(talk, "token_limit")
        return reply

    def take_result(self, talk: Talk) -> Any:
        """What an environment has returned; None if it failed, which is then recorded, or raised
        with --on_env_error stop."""
        call, talk.call = talk.call, None
        talk.said.seconds += call.seconds
        if call.error is None:
            return call.result
        problem = describe(call.error)
        if call.late:
            talk.is_busy, problem = True, str(call.error)
        problem = f"{talk.environment.spec}: {talk.source}: {problem}"
        if self.args.on_env_error == "stop":
            raise ValueError(problem)
        talk.said.error = problem
        talk.said.rewards = [0.0] * len(talk.said.rewards)
        return None

    def end(self, talk: Talk, ended: str) -> None:
        """A sample is over: let its environment go."""
        talk.said.ended = ended
        close = getattr(talk.object, "close", None)
        if callable(close) and not talk.is_busy:
            talk.call = self.workers.submit(close)

    def finish(self) -> None:
        """Wait until all environments are closed."""
        for talk in self.talks.values():
            if talk.call is not None:
                self.workers.wait([talk.call])
                self.take_result(talk)
            if talk.said.error:
                talk.said.ended = "error"
        self.workers.close()

    # Prefill of replies

    def resume_all(self, engine, waiting: list[tuple[int, Talk, Reply]]) -> None:
        """Continue samples with replies, as many at once as a packed row holds."""
        batch: list[tuple[int, Talk, Reply]] = []
        size = 0
        for part in waiting:
            tokens = 1 + len(part[2].input_ids)
            if batch and size + tokens > self.model.compute.max_tokens_per_pack:
                self.resume(engine, batch)
                batch, size = [], 0
            batch.append(part)
            size += tokens
        if batch:
            self.resume(engine, batch)

    def resume(self, engine, batch: list[tuple[int, Talk, Reply]]) -> None:
        """Prefill the last token of a turn, which may not be cached, and the reply, after what the
        slot has cached; then sample the first token of the next turn."""
        features = replies.reply_features(self.model, [reply for *_, reply in batch])
        resumed, state = [], []
        for (slot, talk, reply), shown in zip(batch, features):
            resumed.append(self.add_reply(talk, slot, reply, shown))
            engine.stored[slot] = talk.given + talk.begun
            engine.searched[slot] = engine.begun[slot] = talk.begun
            state.append((slot, engine.stored[slot], talk.following, talk.begun))
        row = replies.reply_row(self.model, engine.cache, resumed, features)
        hidden = vlm.hidden_states(self.model, row)[row.predict]  # (b, H)
        columns = torch.tensor(state, device=hidden.device).T  # (4, b)
        engine.restart(*columns)
        engine.sample(hidden, columns[0])

    def add_reply(self, talk: Talk, slot: int, reply: Reply, features: Tensor | None) -> Resumed:
        """Add a reply to a conversation; returns what has to be prefilled."""
        own = len(talk.response.tokens) if talk.response else 0
        start = talk.following + own - talk.begun  # rotary position of the reply
        positions = start + reply.positions  # (3, E)
        ids, cached = reply.input_ids, talk.given + own
        if own:
            talk.add_turn(talk.response.tokens)
            talk.said.replies.append(reply.content)
            talk.said.tokens_before.append(own)
            talk.said.pictures += reply.pictures
            talk.replied += len(ids)
        talk.add(ids, positions, is_own=False)
        if reply.grids:
            said = talk.said
            said.grids += reply.grids
            if self.model.trains_vision:
                said.patches.append(reply.patches)
            else:
                joined = [features] if said.features is None else [said.features, features]
                said.features = torch.cat(joined, dim=1)
        talk.given += len(ids)
        talk.begun, talk.following = own, int(positions.max()) + 1
        if not own:
            return Resumed(slot, cached, ids, positions)
        return Resumed(
            slot,
            cached - 1,
            torch.cat([talk.response.tokens[-1:], ids]),
            torch.cat([torch.full((3, 1), start - 1), positions], dim=1),
        )

    # What was said

    def fill(self, batch: Batch, keys: list[Key]) -> None:
        """Add the conversations of the samples ``keys``, in the order of the batch."""
        own = batch.split(batch.tokens)
        talks = [self.talks[key] for key in keys]
        empty = torch.zeros(0, dtype=torch.int64)
        parts = [(empty, empty.bool(), empty.view(0, 3))]  # a rank may have no samples
        for talk, tokens in zip(talks, own):
            talk.add_turn(tokens)
            parts += talk.stream
        batch.stream, batch.is_own, batch.places = map(torch.cat, zip(*parts))
        sizes = [sum(len(ids) for ids, *_ in talk.stream) for talk in talks]
        batch.spans = torch.tensor(sizes, dtype=torch.int64)
        batch.turn_rewards = torch.zeros(len(batch.tokens), dtype=torch.float64)
        for start, talk in zip(batch.offsets.tolist(), talks):
            for end, reward in zip(talk.said.ends, talk.said.rewards):
                batch.turn_rewards[start + end - 1] = reward
        batch.conversations = [talk.said for talk in talks]


def common_prefix(one: Tensor, other: Tensor) -> int:
    """How many tokens two sequences have in common at their beginning, but for the last of
    either."""
    size = min(len(one), len(other)) - 1
    differing = (one[:size] != other[:size]).nonzero()
    return int(differing[0]) if len(differing) else size
