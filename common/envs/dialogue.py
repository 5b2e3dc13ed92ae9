"""The conversations of a rollout: one episode with an environment for each sample.

    open         resets the environments, and adds their first observations to the prompts
    begin        a sample has a slot, and so may have a process
    on_turn_end  a turn of the policy has ended: asks its environment in a thread
    poll         returns the episodes whose environments have answered
    fill         adds the conversations to the batch

Meanwhile the rollout engine decodes the other samples. It marks the slot of a waiting sample as done.
Such a slot still decodes, but nothing that it writes survives the reply: its tokens and states of
linear attention do not change, and its cache entries are overwritten.

There are never more processes of environments than --slots (without --slots: than `attention.most_slots`,
since how many slots memory leaves is known only when the first observations are). The environment of a
sample without a slot is reset for its first observation alone, and again once the sample has a slot.
"""

import itertools
import threading
import time
from collections import ChainMap
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import distributed
from common.buffers import EMPTY, Batch, Conversation
from common.data.rows import Prompt
from common.envs import replies
from common.envs.environments import Step, env_row, read_step
from common.envs.replies import Reply
from common.ground.files import UserError
from common.model import attention, vlm
from common.model.policy import Policy
from common.sampling import Environment, Sampling
from common.user_code import LateError, UserObject

SampleKey = tuple[int, int]  # (index of the prompt, sample number)


class Response(NamedTuple):
    """The policy's own tokens of one sample."""

    tokens: Tensor  # (n,)
    logprobs: Tensor  # (n,)
    truncated: bool  # ended by a limit
    # (P + R, layers, K) ids of the experts that prompt and stream chose, if they are kept
    experts: Tensor = EMPTY


@dataclass(eq=False)
class Episode:
    """The conversation of one sample, in progress."""

    key: SampleKey
    prompt: Prompt  # with the first observation, if there is one
    conversation: Conversation
    row: dict | None = None  # what its environment is reset with; None for a teammate's sample
    env: UserObject | None = None  # while the sample has a slot
    ready: futures.Future | None = None  # the reset of this object
    call: futures.Future = field(init=False)  # the latest of all calls
    response: Response = Response(EMPTY, EMPTY, False)  # the own tokens of all finished turns
    reply: Reply | None = None  # what the policy reads next
    reply_tokens: int = 0  # of all replies, first observation not included
    # What follows the prompt, turn by turn and reply by reply: token ids (n,), whether they are the
    # policy's own (n,), rotary positions counted from the prompt's end (n, 3).
    stream: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    length: int = 0  # tokens of the stream
    position: int = 0  # rotary position after its last token
    own_tokens: int = 0  # how many of them are the policy's own

    def extend(self, ids: Tensor, positions: Tensor, is_own: bool) -> None:
        """Add a turn or a reply (n,); its rotary positions (3, n) begin at 0."""
        following = (self.position + positions).T
        self.stream.append((ids, torch.full((len(ids),), is_own), following))
        self.length += len(ids)
        self.position += int(positions.max()) + 1

    def add_turn(self, tokens: Tensor) -> None:
        """Add the latest turn, given the own tokens (n,) of all turns."""
        turn = tokens[self.own_tokens :]
        self.extend(turn, torch.arange(len(turn)).expand(3, -1), is_own=True)
        self.own_tokens = len(tokens)

    def read_reply(self, reply: Reply) -> tuple[Tensor, Tensor]:
        """Add the finished turn and the reply to it. Returns what the model has not read yet: the
        turn's last token, which decoding has not cached, and the reply, as token ids (n,) and
        rotary positions counted from the prompt's end (3, n)."""
        conversation, new = self.conversation, len(reply.input_ids)
        self.add_turn(self.response.tokens)
        conversation.replies.append(reply.content)
        conversation.tokens_before.append(self.own_tokens)
        conversation.images += reply.images
        self.reply_tokens += new
        self.extend(reply.input_ids, reply.positions, is_own=False)
        if reply.grids:
            conversation.add_images(reply.grids, reply.features)
        self.reply = None
        ids, _, positions = map(torch.cat, zip(*self.stream[-2:]))
        return ids[-new - 1 :], positions[-new - 1 :].T


@dataclass(eq=False)
class EnvRollout:
    """The episodes of this rank's samples."""

    environment: Environment
    policy: Policy
    sampling: Sampling

    def __post_init__(self):
        self.model, self.processor = self.policy.model, self.policy.processor
        self.team = self.model.setup.team
        self.workers = futures.ThreadPoolExecutor(max(1, self.environment.workers))
        self.slots = self.sampling.slots or attention.most_slots(self.team.size)
        self.places = threading.Semaphore(self.slots)  # for processes
        self.episodes: dict[SampleKey, Episode] = {}
        self.waiting: list[Episode] = []  # for environments that run on this rank

    def submit(self, episode: Episode, function: Callable, *args: Any) -> futures.Future:
        """Wait for user code in a thread; with --env_workers 0 here, so that nothing depends on which of
        several is the first to answer."""
        episode.call = self.workers.submit(self.timed, episode, function, *args)
        if self.environment.workers == 0:
            futures.wait([episode.call])
        return episode.call

    def timed(self, episode: Episode, function: Callable, *args: Any) -> Any:
        """In a thread: call a method of this class about an episode."""
        began = time.monotonic()
        try:
            return function(episode, *args)
        finally:
            episode.conversation.seconds += time.monotonic() - began

    def reply_features(self, all_replies: list[Reply]) -> list[Tensor]:
        """Image features (K, M, H) of each reply that shows images, by one call of the vision
        tower. The replies keep them for training, or their patches if the tower itself is
        trained."""
        unseen = [reply for reply in all_replies if reply.grids]
        if not unseen:
            return []
        setup = self.model.setup
        patches = torch.cat([reply.patches for reply in unseen])
        grids = torch.tensor([grid for reply in unseen for grid in reply.grids])
        with torch.inference_mode(False), torch.no_grad():  # training reads them later
            features = vlm.image_features(self.model, patches, grids).cpu()
        image_ids = setup.family.visual_token_ids()
        counts = [int(torch.isin(reply.input_ids, image_ids).sum()) for reply in unseen]
        parts = features.split(counts, dim=1)
        for reply, part in zip(unseen, parts):
            reply.features = reply.patches[None] if setup.trains_vision else part
        return list(parts)

    # First observations

    def open(self, batch: Batch, indices: list[int], count: int) -> Batch:
        """Reset the environments of this rank's samples. Returns the batch with the first
        observations in its prompts, the same on every rank. Raises UserError on every rank: samples of a
        prompt, whose environments have the same row and seed, begin with different observations."""
        changed, patches = {}, dict(batch.patches)
        self.reset_all(batch, indices, count)
        with distributed.raise_on_all_ranks(f"--env {self.environment.spec}: "):
            for index in indices:
                episodes = [self.episodes[index, number] for number in range(count)]
                if any(episode.reply for episode in episodes):
                    changed[index] = self.share_opening(episodes, patches)
        changed = ChainMap(*distributed.gather_objects(changed))
        prompts = [changed.get(index, prompt) for index, prompt in enumerate(batch.prompts)]
        self.copy_teammates()
        return replace(batch, prompts=prompts, patches=patches, features={}, positions={})

    def reset_all(self, batch: Batch, indices: list[int], count: int) -> None:
        for index in indices:
            row = batch.prompts[index]
            for number in range(count):
                seed = self.sampling.seed, self.sampling.stream, batch.draws[index]
                columns = env_row(row, seed, number)
                conversation = Conversation(self.environment.role)
                episode = Episode((index, number), row, conversation, columns)
                self.episodes[episode.key] = episode
        episodes = [*self.episodes.values()]
        first, later = episodes[: self.slots], episodes[self.slots :]
        # before the others, whose processes stay
        futures.wait([self.submit(episode, self.look_first) for episode in later])
        for episode in first:
            episode.ready = self.submit(episode, self.reset)
        for episode in episodes:
            seen = self.wait_for(episode)
            if seen is not None:
                opening, episode.prompt = seen
                episode.reply = opening
                episode.conversation.opening = opening.content
                episode.conversation.images += opening.images

    def look_first(self, episode: Episode) -> tuple[Reply, Prompt] | None:
        """In a thread: `reset` for the first observation alone."""
        try:
            return self.reset(episode)
        finally:
            self.close(episode)

    def reset(self, episode: Episode) -> tuple[Reply, Prompt] | None:
        """In a thread: make and reset an environment. Returns its first observation, and the prompt
        with the observation appended to its last message."""
        opening, prompt = self.observe(episode), episode.prompt
        if opening is None:
            return None
        limit = self.environment.max_prompt_tokens
        *before, last = prompt.messages
        messages = [*before, {**last, "content": last["content"] + opening.content}]
        grids = prompt.grids + opening.grids
        text, ids, image_tokens = self.processor.encode(messages, grids)
        if len(ids) > limit:
            raise UserError(
                f"prompt too long with the first observation: {len(ids)} tokens; the limit is {limit} "
                "(--max_prompt_tokens)"
            )
        encoded = replace(prompt, text=text, input_ids=ids, image_tokens=image_tokens, grids=grids)
        return opening, encoded

    def observe(self, episode: Episode) -> Reply | None:
        """In a thread: make and reset an environment. Returns its first observation."""
        self.places.acquire()  # the sample that had the slot before may still be closing
        try:
            episode.env = env = self.environment.of.make()
        except BaseException:
            self.places.release()
            raise
        observation = env.reset(episode.row or {}, self.environment.timeout)
        if observation is None:
            return None
        return replies.read_parts(observation, self.processor, self.environment.max_prompt_tokens)

    def begin(self, key: SampleKey) -> None:
        """A sample has a slot: make its environment, if it has none yet and can have one."""
        episode = self.episodes[key]
        if episode.row is not None and episode.env is None and not episode.conversation.error:
            episode.ready = self.submit(episode, self.reset_again)

    def reset_again(self, episode: Episode) -> None:
        """In a thread: `reset`, when the prompt shows its first observation already. Raises UserError: it
        is another one now."""
        opening, conversation = self.observe(episode), episode.conversation
        seen = (opening.content, opening.images) if opening else ([], [])
        if seen != (conversation.opening, conversation.images):
            raise UserError(
                'reset, called again, shows another first observation: draw it from row["seed"]'
            )

    def copy_teammates(self) -> None:
        """Add the episodes of the team's other ranks, which decode the same samples."""
        copies = {
            key: replace(each, env=None, row=None, ready=None)  # which are of this process
            for key, each in self.episodes.items()
        }
        self.episodes = dict(ChainMap(self.episodes, *self.team.gather_objects(copies)))

    def share_opening(self, episodes: list[Episode], patches: dict[int, Tensor]) -> Prompt:
        """The prompt with the first observation that all its samples share, whose pixels follow its own in
        ``patches``. Raises UserError: they have different ones."""
        opening, prompt = next((each.reply, each.prompt) for each in episodes if each.reply)
        for episode in episodes:
            seen = episode.reply and (episode.reply.content, episode.reply.images)
            if not episode.conversation.error and seen != (opening.content, opening.images):
                raise UserError(
                    f"{prompt.source}: reset shows different first observations to samples of one prompt; "
                    'draw them from row["seed"], which the samples share, or show what differs in a reply'
                )
        if opening.grids:
            index, _ = episodes[0].key
            parts = [patches[index]] if index in patches else []
            patches[index] = torch.cat([*parts, opening.patches])
        for episode in episodes:  # also one whose reset failed, as it has the same prompt
            episode.reply = None
            episode.conversation.opening = opening.content
            episode.conversation.images = list(opening.images)
        return prompt

    # Turns

    def on_turn_end(self, key: SampleKey, response: Response, by_string: bool) -> bool:
        """Hand the environment the turn that ends ``response``. False: the sample is over, as a
        token limit cut the turn or its environment has failed before.

        Args:
            by_string: a stop string, not an end token, has ended the turn.
        """
        episode = self.episodes[key]
        episode.response = response
        is_cut = response.truncated and not self.environment.sees_cut_turns
        if episode.conversation.error or is_cut:
            self.end(episode, "error" if episode.conversation.error else "token_limit")
            return False
        (text,) = self.processor.decode([response.tokens[episode.own_tokens :]])
        if episode.row is not None:
            self.submit(episode, self.step, text, by_string)
            self.waiting.append(episode)
        return True

    def step(self, episode: Episode, text: str, by_string: bool) -> tuple[Step, Reply | None]:
        """In a thread: what an environment returns for a turn, and its reply as the policy reads it."""
        assert episode.ready is not None
        episode.ready.result()
        assert episode.env is not None
        step = read_step(episode.env.step(text, self.environment.timeout))
        if step.done:
            return step, None
        reply = replies.read_parts(step.reply, self.processor, self.environment.max_reply_tokens)
        role = episode.conversation.role
        reply.input_ids = replies.encode_reply(self.processor, reply, role, by_string)
        reply.positions = vlm.prompt_positions(self.model, reply)
        return step, reply

    def poll(self, wait: bool) -> list[Episode]:
        """The episodes whose environments have answered since the last call: with a reply for the
        policy to read, or ended without one. With ``wait``, waits a moment if none has. All ranks of
        a team get the same episodes."""
        if wait:
            calls = [episode.call for episode in self.waiting]
            futures.wait(calls, 0.1, futures.FIRST_COMPLETED)
        results, waiting = [], []
        for episode in self.waiting:
            if episode.call.done():
                self.take_reply(episode)
                results.append((episode.key, episode.reply, episode.response))
            else:
                waiting.append(episode)
        self.waiting, answered = waiting, []
        for key, reply, response in itertools.chain(*self.team.gather_objects(results)):
            episode = self.episodes[key]
            episode.reply, episode.response = reply, response
            answered.append(episode)
        return answered

    def take_reply(self, episode: Episode) -> None:
        """Set the reply to the latest turn, or end the sample."""
        conversation, own_tokens = episode.conversation, len(episode.response.tokens)
        result = self.wait_for(episode)
        if result is None:
            self.end(episode, "error")
            return
        step, reply = result
        conversation.rewards.append(step.reward)
        conversation.ends.append(own_tokens)
        conversation.is_cut = episode.response.truncated
        if step.accuracy is not None:
            conversation.accuracy = step.accuracy
        if conversation.is_cut:
            self.end(episode, "token_limit")
        elif reply is None:
            self.end(episode, "answered")
        elif len(conversation.ends) >= self.environment.max_turns:
            self.end(episode, "turn_limit")
        elif (
            own_tokens >= self.sampling.max_new_tokens
            or episode.reply_tokens + len(reply.input_ids) > self.environment.max_reply_tokens
        ):
            self.end(episode, "token_limit")
        else:
            episode.reply = reply

    def wait_for(self, episode: Episode) -> Any:
        """Wait for an environment's call. Returns its result; None if it failed, which is recorded. What
        is no UserError is a mistake of ours, or of a fork, and is raised."""
        call, conversation = episode.call, episode.conversation
        error = call.exception()
        if error is None:
            return call.result()
        if not isinstance(error, UserError):
            error.add_note(f"in {episode.prompt.source}")
            raise error
        problem = str(error)
        if isinstance(error, LateError):
            problem += " (--env_timeout)"
        conversation.error = f"{self.environment.spec}: {episode.prompt.source}: {problem}"
        conversation.rewards = [0.0] * len(conversation.rewards)
        conversation.accuracy = None
        return None

    def end(self, episode: Episode, ended: str) -> None:
        """End a sample, and its environment."""
        episode.conversation.ended = ended
        episode.response = episode.response._replace(truncated=ended.endswith("_limit"))
        if episode.row is not None:
            self.submit(episode, self.close)

    def close(self, episode: Episode) -> None:
        """In a thread: close an environment, and end its process."""
        try:
            if episode.ready is not None:
                episode.ready.result()
        finally:
            env, episode.env = episode.env, None
            if env is not None:
                try:
                    env.close(self.environment.timeout)
                finally:
                    self.places.release()

    def finish(self) -> None:
        """Wait until all environments are closed."""
        for episode in self.episodes.values():
            if episode.row is not None:
                self.wait_for(episode)
                if episode.conversation.error:
                    episode.conversation.ended = "error"
        self.workers.shutdown(wait=False)

    # Conversations

    def fill(self, batch: Batch, keys: list[SampleKey]) -> None:
        """Add to the batch the conversations of its samples, whose ``keys`` are in its order."""
        episodes = [self.episodes[key] for key in keys]
        parts = [(EMPTY, EMPTY.bool(), EMPTY.view(0, 3))]  # a rank may have no samples
        for episode, tokens in zip(episodes, batch.split(batch.tokens)):
            episode.add_turn(tokens)
            parts += episode.stream
        batch.stream, batch.is_own, batch.stream_positions = map(torch.cat, zip(*parts))
        batch.stream_lengths = torch.tensor(
            [episode.length for episode in episodes], dtype=torch.int64
        )
        batch.conversations = [episode.conversation for episode in episodes]
