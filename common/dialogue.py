"""The conversations of a rollout, which the rollout engine consults.

    open      environments are reset; first observations become part of the prompts
    end_turn  a turn has ended: its environment is asked in a thread, the slot keeps its cache
    listen    replies are prefilled after what their slots have cached; finished samples leave
    fill      what was said, as a batch has it

While an environment is running, its slot is marked done. Decoding still computes it, but leaves its
tokens as they are and changes only cache entries that the reply will overwrite.
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
from common.vlm import model as vlm
from common.vlm import replies
from common.vlm.data import Processor
from common.vlm.replies import Reply, Resumed

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
    call: Call | None = None  # while it thinks
    opening: Reply | None = None  # a first observation that comes after the prompt
    response: Response | None = None  # the own tokens of all finished turns
    # of each reply: own tokens before it, ids (E,), positions (3, E) from the prompt's end
    pieces: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    given: int = 0  # tokens of the prompt and of all replies
    origin: int = 0  # rotary position after the prompt
    following: int = 0  # rotary position of the turn's first token
    begun: int = 0  # own tokens before the turn

    @property
    def reply_tokens(self) -> int:
        first = len(self.opening.input_ids) if self.opening else 0
        return sum(len(ids) for _, ids, _ in self.pieces) - first


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
        self.shared_patches: dict[int, tuple[Tensor, Tensor]] = {}  # by group, with the prompt's

    # First observations

    def open(self, batch: Batch, groups: list[int], count: int) -> Batch:
        """Reset the environments of this rank's samples. Returns the batch with the first
        observations in its prompts, the same on every rank.

        One that all samples of a prompt share ends the prompt. Of others a prompt keeps what they
        have in common; the rest begins the stream of each sample. Raises UserError on every rank.
        """
        with distributed.raise_on_all_ranks("--env "):
            self.reset_all(batch, groups, count)
            openings = {group: self.open_group(batch, group, count) for group in groups}
        shared: dict[str, Any] = {}
        for part in distributed.gather_json({g: found for g, found in openings.items() if found}):
            shared |= part
        return self.with_openings(batch, shared) if shared else batch

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
                    talk.call = self.workers.submit(functools.partial(self.reset, talk, seen))
        for talk in self.talks.values():
            if talk.call is not None:
                self.workers.wait([talk.call])
                talk.opening = self.take_result(talk)
                if talk.opening is not None:
                    talk.said.opening = talk.opening.parts
                    talk.said.pictures += talk.opening.pictures

    def reset(self, talk: Talk, row: dict) -> Reply | None:
        """In a thread: make and reset an environment."""
        talk.object = talk.environment.make()
        said = talk.object.reset(row)
        return None if said is None else self.read(talk, said)

    def read(self, talk: Talk, said: Any) -> Reply:
        reply = replies.read_parts(said, self.processor)
        if reply.pictures and not talk.environment.pictures:
            raise ValueError("a picture from a class that says pictures = False")
        return reply

    def open_group(self, batch: Batch, group: int, count: int) -> dict[str, Any] | None:
        """How the samples of a prompt begin, JSON-ready: with an observation that they share, or
        after the first ``cut`` tokens of the prompt; None without observations."""
        row, talks = batch.prompts[group], [self.talks[group, k] for k in range(count)]
        seen = [talk for talk in talks if talk.opening is not None]
        if not seen:
            return None
        first = seen[0].opening
        if seen[0].environment.shared:
            self.add_patches(batch, group, first)
            for talk in talks:
                talk.opening = None
            return {"parts": first.parts, "grids": first.grids}
        whole = []  # the prompt of each sample with its own observation
        cut = len(row.input_ids)
        for talk in talks:
            opening = talk.opening or Reply(parts=[])
            _, ids, _ = self.encode_opening(row, opening)
            whole.append(Reply([], grids=row.grids + opening.grids, input_ids=ids))
            cut = min(cut, common_prefix(row.input_ids, ids))
        image_ids = self.model.family.visual_token_ids()
        if int(torch.isin(row.input_ids[:cut], image_ids).sum()) != row.image_tokens:
            raise ValueError(f"{row.source}: the template puts the observation before a picture")
        for talk, begin in zip(talks, whole):
            positions = vlm.prompt_positions(self.model, begin)  # (3, P)
            talk.opening = talk.opening or Reply(parts=[])
            talk.opening.input_ids = begin.input_ids[cut:]
            talk.opening.positions = positions[:, cut:] - (positions[:, :cut].max() + 1)
        return {"cut": cut}

    def encode_opening(self, row, opening: Reply) -> tuple[str, Tensor, int]:
        limit = self.environments.max_prompt_tokens
        try:
            return replies.encode_opening(self.processor, row, opening, limit)
        except ValueError as error:
            raise ValueError(f"{row.source}: {error}") from error

    def add_patches(self, batch: Batch, group: int, opening: Reply) -> None:
        """Add the pictures of a shared observation to those of its prompt."""
        if not opening.grids:
            return
        patches, grids = opening.patches, torch.tensor(opening.grids)
        if group in batch.patches:
            before = batch.patches[group]
            patches, grids = torch.cat([before[0], patches]), torch.cat([before[1], grids])
        self.shared_patches[group] = patches, grids

    def with_openings(self, batch: Batch, openings: dict[str, Any]) -> Batch:
        """The batch with other prompts: ``openings`` are what `open_group` found, of all ranks."""
        prompts, patches, features = list(batch.prompts), dict(batch.patches), dict(batch.features)
        for key, found in openings.items():
            group = int(key)
            row = prompts[group]
            features.pop(group, None)
            if "cut" in found:
                prompts[group] = replace(row, input_ids=row.input_ids[: found["cut"]])
                continue
            opening = Reply(found["parts"], grids=tuple(map(tuple, found["grids"])))
            text, ids, image_tokens = self.encode_opening(row, opening)
            prompts[group] = replace(
                row,
                text=text,
                input_ids=ids,
                grids=row.grids + opening.grids,
                image_tokens=image_tokens,
            )
            if group in self.shared_patches:
                patches[group] = self.shared_patches[group]
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
        slots = {owner: slot for slot, owner in enumerate(engine.owner) if owner}
        waiting = {key: self.talks[key] for key in slots if self.is_waiting(key)}
        all_wait = bool(waiting) and len(waiting) == len(slots)
        text = f"{len(waiting)} wait for their environments" if all_wait else ""
        engine.bar.set_postfix_str(text, refresh=all_wait)
        if all_wait:
            self.workers.wait([talk.call for talk in waiting.values()])
        going_on, freed = [], []
        for key, talk in waiting.items():
            if not self.workers.has_ended(talk.call):
                continue
            reply = self.hear(talk)
            if talk.said.ended:
                is_cut = talk.said.ended.endswith("_limit")
                results[key] = talk.response._replace(truncated=is_cut)
                freed.append(slots[key])
            else:
                going_on.append((slots[key], talk, reply))
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
            or talk.reply_tokens + len(reply.input_ids) > self.args.max_reply_tokens
        ):
            self.end(talk, "token_limit")
        return reply

    def take_result(self, talk: Talk) -> Any:
        """What an environment has returned; None if it failed, which is then recorded, or raised
        with --on_env_error stop."""
        call, talk.call = talk.call, None
        talk.said.seconds += call.seconds
        problem = call.problem(__file__)
        if not problem:
            return call.result
        if call.late:
            talk.object = None  # still at it: it cannot be closed
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
        if callable(close):
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
            size += 1 + len(part[2].input_ids)
            if batch and size > self.model.compute.max_tokens_per_pack:
                self.resume(engine, batch)
                batch, size = [], 1 + len(part[2].input_ids)
            batch.append(part)
        if batch:
            self.resume(engine, batch)

    def resume(self, engine, batch: list[tuple[int, Talk, Reply]]) -> None:
        """Prefill the last token of a turn, which may not be cached, and the reply, behind what the
        slot has cached; then sample the first token of the next turn."""
        features = replies.reply_features(self.model, [reply for *_, reply in batch])
        resumed, state = [], []
        for (slot, talk, reply), shown in zip(batch, features):
            resumed.append(self.add_reply(talk, slot, reply, shown))
            own = talk.begun
            state.append((slot, talk.given + own, talk.following, own))
            engine.stored[slot] = talk.given + own
            engine.searched[slot] = engine.begun[slot] = own
        row = replies.reply_row(self.model, engine.cache, resumed, features)
        hidden = vlm.hidden_states(self.model, row)  # (L, H)
        last = torch.tensor([len(part.input_ids) for part in resumed]).cumsum(0) - 1
        columns = torch.tensor(state, device=hidden.device).T  # (4, b)
        engine.restart(*columns)
        engine.sample(hidden[last.to(hidden.device)], columns[0])

    def add_reply(self, talk: Talk, slot: int, reply: Reply, features: Tensor | None) -> Resumed:
        """Add a reply to a conversation; returns what has to be prefilled."""
        own = len(talk.response.tokens) if talk.response else 0
        start = talk.following + own - talk.begun  # rotary position of the reply
        positions = start + reply.positions  # (3, E)
        ids, cached = reply.input_ids, talk.given + own
        talk.pieces.append((own, ids, positions - talk.origin))
        if own:
            talk.said.replies.append(reply.parts)
            talk.said.behind.append(own)
            talk.said.pictures += reply.pictures
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
        streams = [stream_of(talk.pieces, tokens) for talk, tokens in zip(talks, own)]
        columns = list(zip(*streams)) or [(), (), ()]
        empty = torch.zeros(0, dtype=torch.int64)
        batch.spans = torch.tensor([len(ids) for ids, *_ in streams], dtype=torch.int64)
        batch.stream = torch.cat([empty, *columns[0]])
        batch.is_own = torch.cat([empty.bool(), *columns[1]])
        batch.places = torch.cat([empty.view(0, 3), *columns[2]])
        batch.turn_rewards = torch.zeros(len(batch.tokens), dtype=torch.float64)
        for start, talk in zip(batch.offsets.tolist(), talks):
            for end, reward in zip(talk.said.ends, talk.said.rewards):
                batch.turn_rewards[start + end - 1] = reward
        batch.conversations = [talk.said for talk in talks]


def stream_of(
    pieces: list[tuple[int, Tensor, Tensor]], tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A sample's own ``tokens`` (n,) with the replies between them: token ids (r,), which are own
    (r,) bool, rotary positions from the prompt's end (r, 3)."""
    ids, is_own, places = [], [], []
    begun = following = 0
    last = (len(tokens), torch.zeros(0, dtype=torch.int64), torch.zeros(3, 0, dtype=torch.int64))
    for end, reply, positions in [*pieces, last]:
        turn = tokens[begun:end]
        ids += [turn, reply]
        is_own += [torch.ones(len(turn)).bool(), torch.zeros(len(reply)).bool()]
        places += [following + torch.arange(len(turn))[:, None].expand(-1, 3), positions.T]
        begun = end
        following = int(positions.max()) + 1 if len(reply) else following + len(turn)
    return torch.cat(ids), torch.cat(is_own), torch.cat(places)


def common_prefix(one: Tensor, other: Tensor) -> int:
    """How many tokens two sequences have in common at their beginning, but for the last of
    either."""
    size = min(len(one), len(other)) - 1
    differing = (one[:size] != other[:size]).nonzero()
    return int(differing[0]) if len(differing) else size
