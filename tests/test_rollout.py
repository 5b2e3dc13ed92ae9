"""The rollout engine against Hugging Face `generate`, the model's own probabilities, and itself
under other batchings."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForImageTextToText

import train_ppo_vl as ppo
from common import logprobs
from common.model import attention, fsdp, graphs, vlm
from common.rollout import RolloutEngine
from conftest import (
    ROUNDING,
    computing,
    hugging_face,
    inputs_of,
    logits_of,
    marked,
    start,
    take,
    token_logprobs,
    user_error,
    write_checkpoint,
)


def generate(env, batch, count: int, **changes):
    """Samples of the prompts, with other settings of sampling; and their tokens as lists."""
    samples = ppo.rollout(env.actor, batch, dataclasses.replace(env.sampling, **changes), count)
    return samples, [tokens.tolist() for tokens in samples.split(samples.tokens)]


def test_greedy_equals_hugging_face_generate(checkpoint, picture_rows):
    env = start(checkpoint, picture_rows)
    samples, ours = generate(env, take(env), 1, greedy=True)
    oracle = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    for prompt, tokens, truncated in zip(env.prompts, ours, samples.truncated, strict=True):
        inputs = inputs_of(prompt, torch.zeros(0, dtype=torch.int64), env.processor)
        expected = oracle.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            max_new_tokens=12,
            suppress_tokens=list(env.processor.banned_ids),
        )
        assert tokens == expected[0, len(prompt.input_ids) :].tolist()
        assert truncated == (tokens[-1] not in env.processor.stop_ids)


@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_sampled_logprobs_equal_training_logprobs(checkpoint, picture_rows, temperature):
    env = start(checkpoint, picture_rows, "--temperature", temperature, "--min_new_tokens 3")
    prompts = take(env)
    samples, _ = generate(env, prompts, 3)
    trained = ppo.logprobs_of(env.actor, samples)
    assert (trained - samples.logprobs).abs().max() < ROUNDING
    assert samples.own_lengths.min() >= 3
    assert not torch.isin(samples.tokens, torch.tensor(env.processor.banned_ids)).any()


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A checkpoint with more embeddings than its tokenizer has tokens, as Qwen's are."""
    return write_checkpoint(tmp_path_factory.mktemp("padded"), "qwen2_5_vl", spare_ids=200)


def test_ids_without_a_token_are_never_sampled(padded, picture_rows, tmp_path):
    """By the engine, with the log-probs of training; by the reward model's evaluation; by a judge
    that writes critiques, which is the engine with its policy and its processor."""
    env = start(padded, picture_rows, "--max_new_tokens 32")
    count, size = len(env.processor.tokenizer), env.actor.model.lm_head.weight.shape[0]
    assert size == count + 200
    for greedy in (False, True):
        samples, _ = generate(env, take(env), 4, greedy=greedy)
        assert samples.tokens.max() < count
        trained = ppo.logprobs_of(env.actor, samples)
        assert (trained - samples.logprobs).abs().max() < ROUNDING
    with torch.no_grad():
        prompt, tokens = env.prompts[0], samples.split(samples.tokens)[0]
        logits = hugging_face(padded)(**inputs_of(prompt, tokens, env.processor)).logits[
            0, len(prompt.input_ids) - 1 : -1
        ]
        logits[:, [*range(count, size), *env.processor.banned_ids]] = -torch.inf
    assert (
        token_logprobs(logits, tokens) - samples.split(samples.logprobs)[0]
    ).abs().max() < 10 * ROUNDING


def test_samples_do_not_depend_on_batching(checkpoint, picture_rows, monkeypatch, poll):
    """Slots, prefill size and polling change what is computed together; a sample is a function of
    its number alone."""
    engines, prefills, prefill = [], [], RolloutEngine.prefill

    def watched(engine, members):
        engines.append(engine)
        prefills.append([engine.batch.prompt_lengths[group] for group, _ in members])
        prefill(engine, members)

    monkeypatch.setattr(RolloutEngine, "prefill", watched)
    env = start(checkpoint, picture_rows)
    _, expected = generate(env, take(env), 5)
    assert engines[-1].cache.slots == 20
    assert list(map(len, prefills)) == [4]
    assert len({tuple(t) for t in expected}) == len(expected)
    batch = take(env)
    assert batch.prompt_lengths is batch.prompt_lengths  # not counted anew for each of thousands
    for slots, every, tokens in ((1, 1, 600), (3, 1, 600), (7, 4, 600), (0, 1, 64), (0, 8, 600)):
        prefills.clear()
        poll[0] = every
        with computing(env.actor, max_tokens_per_pack=tokens):
            assert generate(env, take(env), 5, slots=slots)[1] == expected, (slots, every, tokens)
        assert engines[-1].cache.slots == (slots or 20)
        assert all(len(batch) == 1 or sum(batch) <= tokens for batch in prefills)
    poll[0] = 1
    alone = take(env)  # each prompt in a rollout of its own, with the same draw number
    for group in range(4):
        part = alone.select_prompts([group])
        assert part.draws == [group]
        assert generate(env, part, 5)[1] == expected[5 * group : 5 * group + 5]


def test_prompts_and_pictures_are_computed_once(qwen25, picture_rows, monkeypatch):
    """A prompt for all its samples, its pictures for the whole step."""
    env, pictures, prefilled = start(qwen25, picture_rows), [], []
    features, hidden = vlm.image_features, vlm.hidden_states

    def watched_features(model, patches, grids):
        pictures.append(len(grids))
        return features(model, patches, grids)

    def watched_hidden(model, pack):
        if isinstance(pack.attention, attention.PackedAttention):
            prefilled.append(pack.input_ids.shape[1])
        return hidden(model, pack)

    monkeypatch.setattr(vlm, "image_features", watched_features)
    monkeypatch.setattr(vlm, "hidden_states", watched_hidden)
    step = take(env)
    samples, _ = generate(env, step, 5)
    assert sum(prefilled) == sum(step.prompt_lengths)
    generate(env, step, 1, greedy=True)
    ppo.logprobs_of(env.actor, samples)
    assert sum(pictures) == 4


def test_streams_draws_and_seeds_give_other_samples(qwen25, picture_rows):
    env = start(qwen25, picture_rows)
    base = generate(env, take(env), 2)[1]
    assert generate(env, take(env), 2)[1] == base
    assert generate(env, take(env), 2, stream=ppo.EVAL)[1] != base
    later = take(env)
    later.draws = [draw + 4 for draw in later.draws]
    assert generate(env, later, 2)[1] != base
    assert generate(env, take(env), 2, seed=1)[1] != base


def test_first_token_frequencies_match_the_model(qwen25, picture_rows):
    """Chi-square of 6,000 sampled first tokens against the model's own distribution, per prompt."""
    env = start(qwen25, picture_rows, "--max_new_tokens 1 --temperature 0.7")
    samples, _ = generate(env, take(env, 2), 6000)
    oracle = AutoModelForImageTextToText.from_pretrained(qwen25).eval()
    for index, prompt in enumerate(env.prompts[:2]):
        with torch.no_grad():
            logits = logits_of(oracle, prompt, torch.zeros(1, dtype=torch.int64), env.processor)[0]
        expected = (logits / 0.7).softmax(-1) * 6000
        observed = torch.bincount(
            samples.tokens[samples.prompt_index == index], minlength=len(expected)
        ).float()
        common = expected >= 5
        terms = (observed - expected)[common] ** 2 / expected[common]
        rare = (observed - expected)[~common].sum() ** 2 / expected[~common].sum().clamp(min=1e-9)
        freedom = len(terms)
        assert terms.sum() + rare < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.slow
def test_stop_strings_end_a_response(qwen25, picture_rows, poll):
    """Across two tokens; also at a look of the host behind the end, and in few slots, where the
    last ones move."""
    env = start(qwen25, picture_rows, "--max_new_tokens 64")
    tokenizer = env.processor.tokenizer
    silent = {*env.processor.stop_ids, tokenizer.pad_token_id}

    def text(tokens):
        return tokenizer.decode([token for token in tokens if token not in silent])

    def cut(tokens: list[list[int]], ends: tuple[str, ...], least: int = 1) -> list[list[int]]:
        """Each up to the first token behind which one of the strings stands in the text, but
        ``least`` tokens."""
        results = []
        for response in tokens:
            n = 1
            while n < len(response) and not any(end in text(response[:n]) for end in ends):
                n += 1
            results.append(response[: max(n, least)])
        return results

    samples, tokens = generate(env, take(env), 4)
    joints = [text([x])[-1:] + text([y])[:1] for t in tokens for x, y in zip(t, t[1:])]
    stop = max((joint for joint in joints if joint.isascii() and len(joint) == 2), key=joints.count)
    again = start(qwen25, picture_rows, "--max_new_tokens 64 --stop_strings", f'["{stop}"]')
    for poll[0], slots in ((1, 0), (8, 0), (1, 6)):
        samples, shorter = generate(again, take(again), 4, slots=slots)
        assert shorter == cut(tokens, (stop,))
        assert not any(
            stop in text(short) and truncated
            for short, truncated in zip(shorter, samples.truncated)
        )
    # a special token's text, which is no end of a turn
    start_id = tokenizer.convert_tokens_to_ids("<|im_start|>")
    _, shorter = generate(env, take(env), 4, stop_strings=("<|im_start|>",))
    assert shorter == [
        response[: response.index(start_id) + 1] if start_id in response else response
        for response in tokens
    ]
    assert shorter != tokens
    # the text of one token, in whatever tokens it stands
    ends = tuple(end for end in (text([tokens[0][2]]), text([tokens[5][1]])) if end)
    samples, shorter = generate(env, take(env), 4, stop_strings=ends)
    assert ends
    assert shorter == cut(tokens, ends)
    assert not samples.truncated[0]
    # a stop string waits for that
    env = start(qwen25, picture_rows, "--max_new_tokens 64 --min_new_tokens 3")
    poll[0] = 1
    _, tokens = generate(env, take(env), 4)
    poll[0] = 8
    starts = (text(response[:2]) for response in tokens)
    stop = next(start for start in starts if start and start.isascii())
    _, shorter = generate(env, take(env), 4, stop_strings=(stop,))
    assert shorter == cut(tokens, (stop,), least=3)
    assert 3 in map(len, shorter)


def test_top_k_and_top_p_truncate_but_logprobs_do_not(qwen25, picture_rows):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 0.0, 0.0]])
    assert logprobs.truncate(logits, 2, 1.0).isfinite()[0].tolist() == [True, True, False, False]
    assert logprobs.truncate(logits, 0, 0.7).isfinite().tolist() == [
        [True, True, False, False],
        [False, True, False, False],
    ]
    # the smallest set: one half is enough
    equal = torch.tensor([[0.0, -torch.inf, 0.0]])
    assert logprobs.truncate(equal, 0, 0.5).isfinite().sum() == 1
    assert logprobs.gumbel_race(logprobs.truncate(logits, 1, 1.0), torch.arange(2)).tolist() == [
        0,
        1,
    ]
    env = start(qwen25, picture_rows)
    greedy, expected = generate(env, take(env), 1, greedy=True)
    # the likeliest alone is left to draw
    for changes in ({"top_k": 1}, {"top_p": 1e-6}):
        samples, drawn = generate(env, take(env), 1, **changes)
        assert drawn == expected
        assert torch.equal(samples.logprobs, greedy.logprobs)


@pytest.mark.parametrize("dtype", marked(["float32", "bfloat16"]))
def test_unwrapped_forwards_change_nothing_but_the_time(
    checkpoint, picture_rows, dtype, monkeypatch
):
    """The hooks and wrappers left out during generation neither gather nor cast anything that is
    not gathered and cast."""
    env = start(checkpoint, picture_rows, "--dtype", dtype)
    called = []
    layers = env.actor.model.model.language_model.layers
    # a user's hook stays
    handle = layers[0].register_forward_hook(lambda *_: called.append(1))
    bare, tokens = generate(env, take(env), 4)
    assert called
    assert "forward" not in vars(env.actor.model.model.language_model)
    handle.remove()
    assert all(len(layer._forward_hooks) == len(layer._forward_pre_hooks) == 1 for layer in layers)
    for name in ("without_hooks", "unwrapped_forward"):
        monkeypatch.setattr(fsdp, name, lambda _: nullcontext())
    usual, expected = generate(env, take(env), 4)
    assert tokens == expected
    assert torch.equal(bare.logprobs, usual.logprobs)


STOPPING = '--slots 7 --max_new_tokens 32 --stop_strings ["a","e"]'


def test_graphs_of_a_batch_size_give_the_same_samples(checkpoint, picture_rows, graphs_of):
    """What surrounds a captured graph: batches are padded to few sizes, the cached tokens to powers
    of two and no further than the cache goes, the state that a graph has seen never moves."""
    env = start(checkpoint, picture_rows, STOPPING)
    expected = generate(env, take(env), 5)
    captured = graphs_of()
    samples, tokens = generate(env, take(env), 5)
    assert tokens == expected[1]
    assert (samples.logprobs - expected[0].logprobs).abs().max() < ROUNDING
    assert len(captured) == len(set(captured)) > 1
    assert {size for size, _ in captured} <= {1, 2, 4, 7}
    *lengths, _ = sorted({capacity for _, capacity in captured})
    assert lengths and all(length.bit_count() == 1 for length in lengths)


def test_the_first_graph_is_compared_with_an_eager_step(checkpoint, picture_rows, graphs_of):
    """Here one that reads other weights than the model has; the eager step leaves no trace in what
    is drawn."""
    env = start(checkpoint, picture_rows, STOPPING)
    head = env.actor.model.lm_head

    def replay(step, size, capacity):
        head.weight.mul_(1000)
        step(size, capacity)
        head.weight.div_(1000)

    captured = graphs_of(replay)
    with pytest.raises(
        RuntimeError,
        match="log-probs of a CUDA graph are .* off those of an eager step, at most 0.1 .*--cuda_graphs off",
    ):
        generate(env, take(env), 5)
    assert len(captured) == 1


def test_a_graph_decodes_over_a_longer_sample_that_waits(qwen25, picture_rows, monkeypatch):
    """Three slots decode as four: in the fourth a sample waits for its environment. What it sees is
    not used, but if it saw none of its keys, NaN would stay in its slot for the next sample
    there."""
    env = start(qwen25, picture_rows, "--slots 4 --max_new_tokens 256")
    batch = take(env)
    with (
        torch.no_grad(),
        fsdp.unsharded(env.actor),
        fsdp.unwrapped_forward(vlm.decoder(env.actor.model)),
    ):
        vlm.compute_features(env.actor.model, batch)
        engine = RolloutEngine(env.actor, batch, env.sampling, [0], 4)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        engine.graphs = graphs.StepGraphs(1)
        engine.prefill([(0, [(slot, slot) for slot in range(4)])])
        stored = engine.slots[3].stored
        engine.slots[3].stored = engine.length[3] = stored + 200
        engine.slots[3].waits = engine.done[3] = True
        engine.decode(3)
    assert all(part.isfinite().all() for part in engine.cache.values)
    assert engine.length.tolist() == [stored + 1] * 3 + [stored + 200]


def test_a_capture_that_fails_ends_the_run(qwen25, picture_rows, graphs_of, monkeypatch):
    """At once, with the cause: up to torch 2.12 the allocator stays in a capture that has failed,
    and emptying its cache would raise an internal assert later."""
    env, capture = start(qwen25, picture_rows, STOPPING), graphs.capture
    capturing, step = [], RolloutEngine.decode_on_device

    class Binding:
        def capture_begin(self, *_, **__):
            capturing.append(self)

        def capture_end(self):
            raise RuntimeError("operation failed due to a previous error during capture")

    def empty_cache():
        assert not capturing, "captures_underway.empty()"

    def failing_step(engine, *sizes):
        if capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        step(engine, *sizes)

    graphs_of()
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(RolloutEngine, "decode_on_device", failing_step)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Binding)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch._C, "_host_emptyCache", empty_cache, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", object())
    with pytest.raises(
        RuntimeError, match="could not be captured: operation not permitted .*--cuda_graphs off"
    ):
        generate(env, take(env), 5)
    assert len(capturing) == 1


def test_graphs_are_refused_without_a_gpu(qwen25, picture_rows):
    if not torch.cuda.is_available():
        with user_error("needs a GPU"):
            start(qwen25, picture_rows, "--cuda_graphs on")
