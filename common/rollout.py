"""Rollouts: responses of a policy to the prompts of a batch, for training, evaluation and judges.

    rollout          the samples of all ranks
    RolloutEngine    continuous batching over KV slots: admit, decode, harvest, compact

Shapes: B slots that decode together, b of them in a call; P prompt tokens, H hidden size, V vocabulary.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common import distributed, logging, logprobs
from common.buffers import EMPTY, Batch, Pack, fill_packs
from common.envs import dialogue, environments
from common.memory import memory
from common.model import attention, experts, fsdp, graphs, packs, vlm
from common.model.policy import Policy
from common.sampling import Sampling

# given beginnings of responses: tokens (n,) and their log-probs (n,)
Beginnings = dict[dialogue.SampleKey, tuple[Tensor, Tensor]]
# decoding steps on a GPU between two checks of the host for finished samples; on a CPU 1
POLL = 8
# eager decoding steps at a batch size before its CUDA graph is captured, which takes as long as these
EAGER_TOKENS = 2
# batch sizes that get a CUDA graph, besides the number of slots
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# a rollout's first graph is compared with an eager step in so many slots; the median difference of their
# log-probs may be at most this
CHECKED_SLOTS, GRAPH_GAP = 8, 0.1


def rollout(
    policy: Policy,
    batch: Batch,
    sampling: Sampling,
    samples_per_prompt: int,
    beginnings: Beginnings | None = None,
) -> Batch:
    """Sample responses to every prompt; returns the batch with the samples of all ranks.

    The policy's weights are gathered once. Then only teams run collectives, so ranks may finish at
    different times.

    Args:
        beginnings: at most --max_new_tokens tokens, and their log-probs, NaN for tokens that are
            `Batch.foreign`. The policy continues as if it had drawn them, unless the last one is an end
            token; stop strings in them are ignored. In a conversation they belong to the first turn.
            All ranks of a team pass the same. ValueError: one contains a token that is never sampled.
    """
    policy.eval()
    own_prompts, envs, beginnings = batch.own_prompts(), None, beginnings or {}
    check_beginnings(beginnings, policy, sampling)
    if sampling.environment:
        envs = dialogue.EnvRollout(sampling.environment, policy, sampling)
        batch = envs.open(batch, own_prompts, samples_per_prompt)
    with torch.no_grad(), attention.own_kernels(), fsdp.unsharded(policy):
        vlm.compute_features(policy.model, batch)
        indices = batch.own_prompts(policy.model.setup.team.size)  # of its team
        shared = packs.share_features(policy.model, batch, indices)
        engine = RolloutEngine(
            policy, shared, sampling, indices, samples_per_prompt, envs, beginnings
        )
        unwrapped = fsdp.unwrapped_forward(vlm.decoder(policy.model))
        with torch.inference_mode(), unwrapped:
            results = engine.generate()
    del engine  # frees its slots and graphs
    torch.cuda.empty_cache()  # NCCL and the libraries cannot use torch's cache
    # of a team's results, those of this rank's own prompts
    keys = [(index, number) for index in own_prompts for number in range(samples_per_prompt)]
    local = with_samples(batch, {key: results[key] for key in keys})
    local.sampling = sampling
    if beginnings:
        local.foreign = local.logprobs.isnan()
    if envs:
        envs.fill(local, keys)
    batch = local.gathered()
    if sampling.environment:
        environments.check_failures(sampling.environment, batch.conversations)
    return batch


def check_beginnings(beginnings: Beginnings, policy: Policy, sampling: Sampling) -> None:
    """Raises ValueError: a token that is never sampled, which has no log-prob."""
    for (index, number), (tokens, _) in beginnings.items():
        banned = tokens[sampling.banned.cpu()[tokens]]
        if len(banned):
            name = policy.processor.tokenizer.convert_ids_to_tokens(int(banned[0]))
            raise ValueError(
                f"the beginning of sample {number} of prompt {index} contains {name}, which is never sampled"
            )


def with_samples(batch: Batch, results: dict[dialogue.SampleKey, dialogue.Response]) -> Batch:
    """The batch with these samples, which are in the order of (prompt, sample number)."""
    batch = batch.with_responses((index, each.tokens) for (index, _), each in results.items())
    batch.logprobs = torch.cat([torch.zeros(0), *(each.logprobs for each in results.values())])
    batch.truncated = torch.tensor([each.truncated for each in results.values()]).bool()
    batch.prompt_experts = {}
    for (index, _), response in results.items():
        if len(response.experts):
            of_prompt = batch.prompt_lengths[index]
            batch.prompt_experts.setdefault(index, response.experts[:of_prompt])
            batch.experts.append(response.experts[of_prompt:])
    return batch


def prompts_together(slots: int, shards: int, samples: int) -> int:
    """The number of prompts, with so many ``samples`` each, that fill the slots of all ranks. With fewer,
    more rollouts would each wait for their longest response."""
    teams = distributed.world_size() // shards
    return max(1, teams * (slots or attention.most_slots(shards)) // samples)


@dataclass
class Sample:
    """What the host knows about the sample in a slot."""

    key: dialogue.SampleKey
    stored: int = 0  # upper bound of its cached tokens
    turn_start: int = 0  # response tokens before this turn
    beginning: int = 0  # response tokens that were given
    searched: int = 0  # response tokens already searched for stop strings
    waits: bool = False  # for its environment


@dataclass(eq=False)
class RolloutEngine:
    """Continuous batching over KV slots, with the model's own layers.

    A prompt is prefilled once; its keys and values go into the slots of all its samples
    (`attention.PackedAttention`). Slots 0..B-1 then decode together, and each step adds the key and
    value of one token (`attention.DecodeAttention`). The next prompt is admitted once enough slots
    are free. The state of sampling lives on the device, and the host looks at it every few steps. A
    token depends only on the logits and (seed, stream, draw of the prompt, number of the sample,
    position): not on slots, ranks, or what else is in the batch.
    """

    policy: Policy
    batch: Batch
    sampling: Sampling
    indices: list[int]  # of the prompts of this rank or its team
    count: int  # samples per prompt
    envs: dialogue.EnvRollout | None = None
    beginnings: Beginnings = field(default_factory=dict)

    def __post_init__(self):
        sampling, envs = self.sampling, self.envs
        self.model = self.policy.model
        self.setup = self.model.setup
        device = self.setup.device
        self.poll = POLL if device.type == "cuda" else 1
        longest = max((self.batch.prompt_lengths[g] for g in self.indices), default=1)
        capacity = longest + sampling.max_new_tokens
        if envs:
            capacity += envs.environment.max_reply_tokens
        slots = self.slot_count(capacity, max(1, len(self.indices) * self.count))
        self.cache = attention.SlotCache(
            self.model.config.get_text_config(),
            slots,
            capacity,
            self.setup.dtype,
            device,
            self.setup.backend,
            self.setup.team.size,
        )
        if sampling.keeps_experts and self.setup.routers_hooked and not sampling.greedy:
            self.cache.experts = experts.buffer_of(self.model, slots, capacity, device)
        self.make_slots(slots)
        if envs and self.cache.linear:
            self.cache.linear.done = self.done
            if sampling.stop_strings:
                # the states of linear attention cannot go back to the end of a stop string
                self.poll = 1
        self.graphs: graphs.StepGraphs | None = None
        if device.type == "cuda" and sampling.cuda_graphs != "off":
            eager = EAGER_TOKENS if sampling.cuda_graphs == "auto" else 1
            self.graphs = graphs.StepGraphs(eager)

    def make_slots(self, slots: int) -> None:
        """The state of each slot, on the device and on the host."""
        device, longest = self.setup.device, self.sampling.max_new_tokens
        self.slots: dict[int, Sample] = {}  # the busy ones
        self.slot_ids = torch.arange(slots, device=device)
        self.counters = torch.zeros(3, slots, dtype=torch.int64, device=device)
        # cached tokens, next position, response tokens
        self.length, self.rope, self.response_tokens = self.counters
        # the newest token, and the key of the sample's noise
        self.last, self.noise_keys = torch.zeros(2, slots, dtype=torch.int64, device=device)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        # One spare column: a finished slot keeps writing behind its response.
        self.out_tokens = torch.zeros(slots, longest + 1, dtype=torch.int64, device=device)
        self.out_logprobs = torch.zeros(slots, longest + 1, dtype=torch.float32, device=device)
        # what moves with a sample
        self.state = [
            *self.counters,
            self.last,
            self.noise_keys,
            self.done,
            self.out_tokens,
            self.out_logprobs,
        ]

    def slot_count(self, capacity: int, wanted: int) -> int:
        """--slots, or else as many as fit into memory beside a prefill and a margin, at most
        `attention.most_slots`. A team has the fewest of its ranks."""
        team = self.setup.team
        wanted = min(wanted, self.sampling.slots or attention.most_slots(team.size))
        if self.sampling.slots or self.setup.device.type != "cuda":
            return wanted
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        fitting = memory.fitting_slots(self.policy, capacity, wanted, free, team.size)
        return min(team.gather_objects(fitting))

    def generate(self) -> dict[dialogue.SampleKey, dialogue.Response]:
        """Sample all responses; returns them by (index of the prompt, sample number)."""
        # (prompt, sample numbers), each with at most as many samples as there are slots
        waiting, numbers = deque(), range(self.count)
        for index in self.indices:
            for first in numbers[:: self.cache.slots]:
                waiting.append((index, numbers[first : first + self.cache.slots]))
        self.results = {}
        bar = logging.progress(range(len(self.indices) * self.count), "own samples")
        while waiting or self.slots:
            bar.update(len(self.results) - bar.n)
            self.admit(waiting)
            if self.envs:
                self.collect_replies(self.envs)
            self.harvest()  # the token that a prefill draws may end a turn
            if not waiting:
                self.compact()
            decoding = self.decoding()
            if decoding:
                for _ in range(self.poll):
                    self.decode(decoding[-1] + 1)
                self.harvest()
        bar.close()
        if self.envs:
            self.envs.finish()
        return self.results

    def decoding(self) -> list[int]:
        """The busy slots whose samples are not waiting for an environment."""
        return [slot for slot, sample in sorted(self.slots.items()) if not sample.waits]

    def admit(self, waiting: deque) -> None:
        """Prefill waiting prompts while there are free slots for all their samples."""
        free = deque(slot for slot in range(self.cache.slots) if slot not in self.slots)
        members = []  # (prompt, [(slot, sample number), ...])
        while waiting and len(free) >= len(waiting[0][1]):
            index, numbers = waiting.popleft()
            members.append((index, [(free.popleft(), number) for number in numbers]))
        sizes = [self.batch.prompt_lengths[index] for index, _ in members]
        for part in fill_packs(members, sizes, self.setup.max_tokens_per_pack):
            self.prefill(part)

    def prefill(self, members: list[tuple[int, list[tuple[int, int]]]]) -> None:
        """Run the prompts of (prompt, [(slot, sample number), ...]) in one pack, and sample the
        first token of every response."""
        batch, sampling = self.batch, self.sampling
        started, parts = [], []
        for index, samples in members:
            for slot, number in samples:
                started.append((slot, batch.draws[index], number))
                self.slots[slot] = Sample((index, number))
                if self.envs:
                    self.envs.begin((index, number))
            slots, ids = [slot for slot, _ in samples], batch.prompts[index].input_ids
            parts.append(packs.Prefill(slots, 0, ids, vlm.positions_of(self.model, batch, index)))
        slots, draws, numbers = torch.tensor(started, device=self.setup.device).T  # (b,) each
        self.noise_keys[slots] = logprobs.sequence_keys(
            sampling.seed, sampling.stream, draws, numbers
        )
        features = [batch.features[index] for index, _ in members if index in batch.features]
        self.begin(parts, features)
        self.read_beginnings([slot for slot, *_ in started])

    def begin(self, parts: list[packs.Prefill], features: list[Tensor]) -> None:
        """Prefill ``parts``, with the ``features`` of their images, and sample the next token of each of
        their slots."""
        pack = packs.prefill_pack(self.model, self.cache, parts, features)
        hidden = vlm.hidden_states(self.model, pack)[pack.predict]  # (b, H)
        state = []
        for part in parts:
            length, following = part.cached + len(part.input_ids), int(part.positions.max()) + 1
            for slot in part.slots:
                state.append((slot, length, following, part.spoken))
                self.slots[slot].stored, self.slots[slot].searched = length, part.spoken
        slots, *counters = torch.tensor(state, device=hidden.device).T  # (b,) each
        self.counters[:, slots] = torch.stack(counters)
        self.done[slots] = False
        self.sample(hidden, slots)

    def decode(self, size: int) -> None:
        """One token for each of the slots 0..size-1. Finished slots compute too, but their samples
        do not change."""
        capacity, slots = self.cache.capacity, self.cache.slots
        if self.graphs:
            size = min([slots, *(s for s in GRAPH_SIZES if s >= size)])
        busy = [sample for slot, sample in self.slots.items() if slot < size]
        longest = min(max(sample.stored for sample in busy) + 1, capacity)
        for sample in busy:
            sample.stored = min(sample.stored + 1, capacity - 1)
        if not self.graphs:
            self.decode_on_device(size, longest)
            return
        if self.cache.reads_masked:  # attention also reads the keys that it masks, so keep them few
            capacity = min(1 << (longest - 1).bit_length(), capacity)
        if self.graphs.is_first(size, capacity):
            self.check_first_graph(self.graphs, size, capacity)
        else:
            self.graphs.run(self.decode_on_device, size, capacity)

    def check_first_graph(self, steps: graphs.StepGraphs, size: int, capacity: int) -> None:
        """Run a rollout's first graph, after an eager step of a few slots, which is undone. Raises
        RuntimeError: they differ by more than rounding."""
        few = slice(0, min(size, CHECKED_SLOTS))
        cells = self.slot_ids[few], self.response_tokens[few].clone()
        changing = [part[few] for part in self.state]
        if self.cache.linear:
            changing += [self.cache.linear.inputs[:, few], self.cache.linear.states[:, few]]
        before = [part.clone() for part in changing]
        self.decode_on_device(few.stop, capacity)
        eager = self.out_logprobs[cells]
        for part, value in zip(changing, before):  # the graph writes the same keys and values again
            part.copy_(value)
        steps.run(self.decode_on_device, size, capacity)
        # the median: rounding may change a token here and there
        gap = float((self.out_logprobs[cells] - eager).abs().median())
        if not gap < GRAPH_GAP:
            raise RuntimeError(
                f"log-probs of a CUDA graph are {gap:.2g} off those of an eager step, at most "
                f"{GRAPH_GAP} is rounding; --cuda_graphs off decodes without graphs"
            )

    def decode_on_device(self, size: int, longest: int) -> None:
        """The device's part of `decode`; the host reads nothing back. No slot has more than
        ``longest`` cached tokens, the new one included."""
        attend = attention.DecodeAttention(
            self.cache, self.length[:size], longest, self.setup.backend
        )
        if self.cache.experts is not None:
            attend.experts = experts.Recorder(self.cache.experts, attend.slots, attend.lengths)
        pack = Pack(
            input_ids=self.last[None, :size],
            positions=self.rope[:size].expand(3, 1, -1),
            attention=attend,
        )
        hidden = vlm.hidden_states(self.model, pack)  # (B, H)
        self.counters[:2, :size] += ~self.done[:size]
        self.sample(hidden, slice(0, size))

    def sample(self, hidden: Tensor, slots: Tensor | slice) -> None:
        """Draw the next token of ``slots`` (b,) from their last hidden states (b, H), count it, and
        mark the slots that it finishes."""
        sampling, live = self.sampling, ~self.done[slots]
        step = self.response_tokens[slots]  # (b,) position of the token in its response
        # (b, V)
        logits = logprobs.logits_fp32(
            hidden,
            self.model.lm_head.weight,
            softcap=vlm.softcap(self.model),
            **sampling.logits_options(step),
        )
        if sampling.greedy:
            ids = logits.argmax(dim=-1)
        else:
            candidates = logprobs.truncate(logits, sampling.top_k, sampling.top_p)
            ids = logprobs.gumbel_race(
                candidates, logprobs.token_keys(self.noise_keys[slots], step)
            )
        ids = self.setup.team.agree(ids)
        cells = self.slot_ids[slots], step
        self.out_tokens[cells] = ids
        # under the full distribution, without top-k and top-p, as in training
        self.out_logprobs[cells] = logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
        self.last[slots] = ids
        # not torch.isin, which sorts ten or more ids: a graph cannot capture that
        stopped = (ids[:, None] == sampling.stop_ids).any(dim=1)
        self.done[slots] |= stopped | (step + 1 >= sampling.max_new_tokens)
        self.response_tokens[slots] += live

    def harvest(self) -> None:
        """Take finished responses out of their slots. Only here does the host wait for the
        device."""
        decoding = self.decoding()
        done = self.done.tolist() if decoding else []
        ready = [slot for slot in decoding if done[slot] or self.sampling.stop_strings]
        if not ready:
            return
        counts = self.response_tokens[ready].tolist()
        all_tokens = self.out_tokens[ready, : max(counts)].cpu()
        all_logprobs = self.out_logprobs[ready, : max(counts)].cpu()
        stop_ids = set(self.sampling.stop_ids.tolist())
        for slot, count, tokens, logps in zip(ready, counts, all_tokens, all_logprobs):
            end = self.stop_string_end(self.slots[slot], tokens[:count])
            if end is None and not done[slot]:
                continue
            n = end or count
            truncated = end is None and int(tokens[n - 1]) not in stop_ids
            response = dialogue.Response(tokens[:n].clone(), logps[:n].clone(), truncated)
            self.end_turn(slot, response, by_string=end is not None)

    def end_turn(self, slot: int, response: dialogue.Response, by_string: bool) -> None:
        """Free a slot, unless its environment is going to answer."""
        sample = self.slots[slot]
        self.done[slot] = True
        if self.envs:
            sample.waits = self.envs.on_turn_end(sample.key, response, by_string)
        if not sample.waits:
            self.release(slot, response)

    def release(self, slot: int, response: dialogue.Response) -> None:
        """Take a finished sample out of its slot."""
        response = response._replace(experts=self.experts_of(slot, response))
        self.results[self.slots.pop(slot).key] = response
        # a free slot still decodes; with length 0 it does not read its old sequence
        self.length[slot] = 0

    def experts_of(self, slot: int, response: dialogue.Response) -> Tensor:
        """(P + R, layers, K) ids of the experts that the tokens of a finished sample chose, if they are
        kept."""
        if self.cache.experts is None:
            return EMPTY
        key = self.slots[slot].key
        size = self.batch.prompt_lengths[key[0]] + len(response.tokens)
        if self.envs:
            size += self.envs.episodes[key].reply_tokens
        # a copy, on a CPU too: the slot is used again
        ids = self.cache.experts[:, slot, :size].transpose(0, 1).to("cpu", copy=True)
        ids[-1] = experts.NOT_RECORDED  # a last token is not decoded
        return ids

    def collect_replies(self, envs: dialogue.EnvRollout) -> None:
        """Continue the samples whose environments have answered, and release those whose
        conversations are over. If all samples are waiting, wait for the first answer."""
        all_wait = bool(self.slots) and not self.decoding()
        answered = {episode.key: episode for episode in envs.poll(wait=all_wait)}
        unread, sizes = [], []
        for slot, sample in sorted(self.slots.items()):
            if sample.key not in answered:
                continue
            episode = answered[sample.key]
            if episode.reply:
                unread.append((slot, episode, episode.reply))
                sizes.append(1 + len(episode.reply.input_ids))
            else:
                self.release(slot, episode.response)
        for part in fill_packs(unread, sizes, self.setup.max_tokens_per_pack):
            self.resume(envs, part)

    def resume(
        self,
        envs: dialogue.EnvRollout,
        replies: list[tuple[int, dialogue.Episode, dialogue.Reply]],
    ) -> None:
        """Prefill replies after the cached tokens of their slots, and sample the first token of the
        next turns."""
        features = envs.reply_features([reply for *_, reply in replies])
        parts = []
        for slot, episode, reply in replies:
            index, _ = episode.key
            ids, offsets = episode.read_reply(reply)
            length, spoken = self.batch.prompt_lengths[index] + episode.length, episode.own_tokens
            after = int(vlm.positions_of(self.model, self.batch, index).max()) + 1
            parts.append(packs.Prefill([slot], length - len(ids), ids, after + offsets, spoken))
            self.slots[slot] = Sample(episode.key, turn_start=spoken)
        self.begin(parts, features)

    def read_beginnings(self, slots: list[int]) -> None:
        """Prefill the given beginnings of responses, slot by slot, as if the policy had drawn them: the
        last token is still to be decoded, unless it ends the response."""
        for slot in slots:
            sample = self.slots[slot]
            tokens, logps = self.beginnings.get(sample.key, (EMPTY, EMPTY))
            n = len(tokens)
            if n > 1:
                positions = int(self.rope[slot]) + torch.arange(n - 1).expand(3, -1)
                part = packs.Prefill([slot], sample.stored, tokens[:-1], positions, n - 1)
                self.begin([part], [])
            if n:
                self.out_tokens[slot, :n], self.out_logprobs[slot, :n] = tokens, logps
                self.last[slot] = tokens[-1]
                sample.beginning = sample.searched = n
                is_end = tokens[-1] in self.sampling.stop_ids.cpu()
                self.done[slot] = is_end or n == self.sampling.max_new_tokens

    def stop_string_end(self, sample: Sample, tokens: Tensor) -> int | None:
        """Number of tokens up to and including the one that completes a stop string, but at least
        --min_new_tokens; None if there is no stop string."""
        strings, shortest = self.sampling.stop_strings, self.sampling.min_new_tokens
        if not strings or len(tokens) < shortest:
            return None
        # enough tokens for any stop string, as a token has at least one byte
        window = 8 + 2 * max(len(stop.encode()) for stop in strings)
        first = max(sample.turn_start, sample.searched + 1 - window)
        if self.shows_stop_string(tokens, first, sample.beginning):
            for n in range(sample.searched + 1, len(tokens) + 1):
                if self.shows_stop_string(tokens[:n], max(first, n - window), sample.beginning):
                    return max(n, shortest)
        sample.searched = len(tokens)
        return None

    def shows_stop_string(self, tokens: Tensor, first: int, beginning: int) -> bool:
        """Whether a stop string ends after the ``beginning``, in tokens from the ``first`` on."""
        before, text = self.policy.processor.decode([tokens[first:beginning], tokens[first:]])
        behind = len(before.rstrip("\ufffd"))  # bytes of a character that is not complete
        return any(
            text.find(stop, max(0, behind + 1 - len(stop))) >= 0
            for stop in self.sampling.stop_strings
        )

    def compact(self) -> None:
        """Move busy slots to the front if more than an eighth of the decoding slots are free, so that the
        last responses decode in small batches."""
        busy = sorted(self.slots)
        if len(busy) >= 0.875 * (max(busy, default=-1) + 1):
            return
        target = [slot for slot in range(len(busy)) if slot not in self.slots]
        source = [slot for slot in busy if slot >= len(busy)]
        self.cache.move(source, target, max(self.slots[slot].stored for slot in source))
        for state in self.state:
            state[target] = state[source]
        for old, new in zip(source, target):
            self.slots[new] = self.slots.pop(old)
        self.done[source], self.length[source] = True, 0
