"""Mixtures choose in training the experts that they chose while sampling: which ids are recorded, that
an update replays them, and what it costs."""

import copy
import dataclasses
import shutil
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import ranks
import train_ppo_vl as ppo
from common import distributed
from common.buffers import Batch, Pack
from common.looks import further_losses
from common.memory import memory
from common.model import attention, build, experts, packs, vlm
from common.model.policy import Policy
from conftest import ROUNDING, inputs_of, responses_of, save_weights, start, take, with_flags
from families import write_family
from helpers import Caught, distance, take_gradients
from talkers import talk
from test_beginnings import beginnings_of, rolled_out

MIXTURES = ("qwen3_5_moe", "glm4v_moe", "gemma4_26b_a4b", "internvl_moe")
FLAGS = "--advantage grpo --kl_coef 0 --max_new_tokens 24 --slots 3"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, picture_rows):
    folder = tmp_path_factory.mktemp("mixture")
    write_family("qwen3_vl_moe", folder, picture_rows)
    return folder


def sampled(env, **changes) -> Batch:
    return rolled_out(env, take(env), 3, keeps_experts=True, **changes)


def used(policy: Policy, pack: Pack, batch: Batch, replay: bool) -> SimpleNamespace:
    """The ids (layers, L, K), in order of size, that a forward of the pack uses, and its log-probs (T,)."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if not replay:
            stack.enter_context(experts.own_choice(pack))
        ids = stack.enter_context(experts.choices(policy.model))
        logp, *_ = policy(pack, batch.sampling)
    return SimpleNamespace(ids=torch.stack(ids).sort().values, logp=logp)


def assert_recorded(policy: Policy, batch: Batch) -> None:
    """In float32 a forward chooses what the sampler chose, of every token but the last of each sample."""
    unknown = 0
    for pack in packs.of_batch(policy.model, batch, replay=True):
        recorded = pack.attention.experts.ids.transpose(0, 1).long().sort().values
        known = recorded[..., 0] != experts.NOT_RECORDED
        unknown += int((~known).sum())
        live = used(policy, pack, batch, replay=False)
        assert torch.equal(recorded[known], live.ids[known])
    unknown = torch.tensor(unknown)
    torch.distributed.all_reduce(unknown)
    layers = len(experts.choosers(policy.model))
    assert unknown == len(batch) * layers


def test_every_token_is_recorded(mixture, picture_rows):
    """Of prompts with pictures and responses in slots that move, behind given beginnings, in conversations
    with pictures; also of some prompts of two batches, as --dynamic_sampling keeps them."""
    env = start(mixture, mixture / "rows.jsonl", FLAGS)
    batch = sampled(env)
    assert_recorded(env.actor, batch)
    begun = beginnings_of(batch, 0.5)
    again = rolled_out(env, take(env), 3, begun, keeps_experts=True)
    assert_recorded(env.actor, again)
    both = Batch.concatenate([batch.select_prompts([1, 3]), again.select_prompts([0, 2])])
    assert_recorded(env.actor, both)
    strings = ["a", "e", "o"]  # which end many turns, some after further tokens were decoded
    env.sampling = dataclasses.replace(
        env.sampling, keeps_experts=True, stop_strings=strings, max_new_tokens=60
    )
    spoken = talk(env, "Talk", 2)
    assert any(one.grids for one in spoken.conversations)
    assert_recorded(env.actor, spoken)
    assert not sampled(env, greedy=True).prompt_experts


def test_bfloat16_flips_no_expert(mixture, tmp_path):
    """The packs of an update and a decoding step round differently. Log-probs behind other experts are further
    apart than others, and than those behind replayed ones."""
    folder = shutil.copytree(mixture, tmp_path / "loud")
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if "experts.down_proj" in name:
            weights[name] *= 4
        if name.endswith("mlp.gate.weight"):  # three experts are nearly as likely, and three others
            weights[name] = weights[name][[0, 0, 0, 3, 3, 3]] + 0.02 * weights[name]
    save_weights(folder, weights)
    env = start(folder, folder / "rows.jsonl", FLAGS, "--dtype bfloat16 --slots 0")
    batch = rolled_out(env, take(env), 16, keeps_experts=True, max_new_tokens=60)
    gaps: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    flipped = []
    for pack in packs.of_batch(env.actor.model, batch, replay=True):
        recorded = pack.attention.experts.ids.transpose(0, 1).long().sort().values
        known = recorded[..., 0] != experts.NOT_RECORDED
        (sampled_logp,) = pack.pick(batch.logprobs)
        live, replayed = used(env.actor, pack, batch, False), used(env.actor, pack, batch, True)
        assert torch.equal(recorded[known], replayed.ids[known])
        gaps[False].append((live.logp - sampled_logp).abs())
        gaps[True].append((replayed.logp - sampled_logp).abs())
        flipped.append(((recorded != live.ids).any(-1) & known).any(0)[pack.predict])
    at, without, replaying = map(torch.cat, (flipped, gaps[False], gaps[True]))
    assert at.sum() > 10
    assert without[at].mean() > 1.6 * without[~at].mean()
    assert replaying[at].mean() < 0.5 * without[at].mean()


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_those_of_forced_experts(mixture, recomputed):
    """Of experts that no router would choose: one forward of Hugging Face per sample, whose routers are
    told these, and weigh them by their own scores."""
    more = "--gradient_checkpointing on" if recomputed else "--gradient_checkpointing off"
    env = start(mixture, mixture / "rows.jsonl", FLAGS, more)
    batch, model = sampled(env), env.actor.model
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(200, 2, 6, generator=generator).argsort(-1)[..., :2].to(torch.int16)
    of_prompt = {g: drawn[: len(p.input_ids)] for g, p in enumerate(batch.prompts)}
    batch.prompt_experts = of_prompt
    batch.experts = [drawn[i : i + int(n)] for i, n in enumerate(batch.own_lengths)]
    env.actor.train()
    for pack in packs.of_batch(model, batch, replay=True):
        logp, *_ = env.actor(pack)
        ppo.backward(logp.sum())
    ours = take_gradients(env.actor)

    oracle = AutoModelForImageTextToText.from_pretrained(mixture, attn_implementation="eager")
    routers = [m for m in oracle.modules() if type(m).__name__.endswith("TopKRouter")]
    told: list[torch.Tensor] = []

    def forced(router, _, out):
        ids = told[routers.index(router)]
        weights = torch.softmax(out[0].float(), -1).gather(1, ids)
        return out[0], weights / weights.sum(-1, keepdim=True), ids

    for router in routers:
        router.register_forward_hook(forced)
    for i, (index, tokens) in enumerate(responses_of(batch)):
        ids = torch.cat([of_prompt[index], batch.experts[i]]).long()
        told[:] = ids.unbind(1)
        inputs = inputs_of(batch.prompts[index], tokens, env.processor)
        logits = oracle(**inputs, use_cache=False).logits[0, -len(tokens) - 1 : -1]
        logits.log_softmax(-1).gather(1, tokens[:, None]).sum().backward()
    expected = {
        f"model.{name}": p.grad for name, p in oracle.named_parameters() if f"model.{name}" in ours
    }
    assert expected.keys() == ours.keys()
    assert distance(ours, expected) < ROUNDING


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_kind_of_router_weighs_what_it_is_told(tmp_path, picture_rows, kind):
    """Told its own choice, it gives it the same weights, bit for bit."""
    write_family(kind, tmp_path, picture_rows)
    env = start(tmp_path, tmp_path / "rows.jsonl", FLAGS)
    pairs = experts.choosers(env.actor.model)
    assert len(pairs) == len(vlm.routers(env.actor.model)) > 0
    size = env.actor.model.config.get_text_config().hidden_size
    for _, chooser in pairs:
        router = whole_router(chooser)
        scores, weights, ids = router(torch.randn(50, size))
        assert torch.equal(experts.weights_of(router, scores, ids), weights)
    assert_recorded(env.actor, sampled(env))


def whole_router(chooser):
    """A copy of a router whose parameters are no shards, which listens to nobody."""
    hooks, chooser._forward_hooks = chooser._forward_hooks, type(chooser._forward_hooks)()
    clone = copy.deepcopy(chooser)
    chooser._forward_hooks = hooks
    for owner in clone.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            owner._parameters[name] = torch.nn.Parameter(parameter.full_tensor())
    return clone


def test_a_decoding_step_records_on_the_device_alone(mixture):
    """No operator of it reads a value back or makes a tensor of another size, so that a CUDA graph can
    hold it; its buffer stays where it is."""
    env = start(mixture, mixture / "rows.jsonl", FLAGS)
    model, meta = env.actor.model, torch.device("meta")
    buffer = experts.buffer_of(model, 4, 32, meta)
    live = torch.empty(3, 2, dtype=torch.int64, device=meta)
    slots = cells = torch.empty(3, dtype=torch.int64, device=meta)
    # on meta, whatever needs a value raises
    assert experts.Recorder(buffer, slots, cells)(1, live) is live
    bytes_of_ids = 2 * 2 * 2  # layers, experts of a token, 16 bits
    assert buffer.nbytes == 4 * 32 * bytes_of_ids
    plain = attention.SlotCache(
        model.config.get_text_config(), 1, 10, torch.float32, meta, "sdpa"
    ).nbytes
    assert memory.slot_bytes(env.actor, 10, 1) == plain + 10 * bytes_of_ids


def sample_in_teams(folder) -> None:
    """On each of two ranks: of a rollout, and of one in a team, every rank has the experts that its packs
    need."""
    env = start(folder, folder / "rows.jsonl", FLAGS)
    assert_recorded(env.actor, sampled(env))
    env.actor.model.setup.team = distributed.join_team(2, 60.0)
    assert_recorded(env.actor, sampled(env))


def test_ranks_and_teams_have_the_experts_of_their_packs(mixture):
    ranks.run(sample_in_teams, mixture, world=2)


def test_a_run_of_before_goes_on_without_it(mixture, capsys):
    """Also a run with CUDA graphs, and one whose flag says so; dense models have nothing to replay."""
    env = start(mixture, mixture / "rows.jsonl", FLAGS)
    for saved, replays in (
        ({}, True),
        ({"fingerprint": {"replay_experts": True}}, True),
        ({"fingerprint": {}}, False),
    ):
        life = SimpleNamespace(saved=saved, fingerprint={"replay_experts": True})
        assert ppo.as_begun(env.args, life).replay_experts == replays
        assert life.fingerprint == {"replay_experts": replays}
    hooked = []
    for changes, device in (({}, "cpu"), ({}, "cuda"), ({"replay_experts": False}, "cpu")):
        actor = SimpleNamespace(model=build.Builder(env.args, torch.device("meta"), 100).actor())
        ppo.enable_replay(with_flags(env.args, **changes), actor, torch.device(device))
        hooked.append(actor.model.setup.routers_hooked)
    assert hooked == [True, False, False]
    assert "--cuda_graphs off replays them" in capsys.readouterr().out


def test_float32_metrics_are_those_without_it(mixture):
    """What rounds alike is trained alike, with the balance of experts, which counts the recorded choices."""
    env = start(mixture, mixture / "rows.jsonl", FLAGS, "--aux_loss_coef 0.1 --epochs 2")
    trained = Caught(env.actor, env.args)  # before any forward, as `main` does
    env.batch = sampled(env)
    env.batch.old_logprobs = env.batch.logprobs
    env.batch.advantages = torch.randn(
        len(env.batch.tokens), generator=torch.Generator().manual_seed(0)
    )
    env.batch.in_policy_loss = torch.ones(len(env.batch.tokens)).bool()
    load, metrics = [], []
    for batch in (env.batch, dataclasses.replace(env.batch, experts=[])):
        load.append(further_losses.count_experts(env.actor, batch, None, replay=True))
        metrics.append(ppo.update_actor(trained, env.models, batch, 1, None, env.args))
    assert torch.equal(*load)
    assert metrics[0] == metrics[1]
