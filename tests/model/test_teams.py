"""Ranks that decode together, each with its piece of every layer: samples, memory and judgements are
those of whole models."""

import dataclasses
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common import distributed
from common.data.loader import PromptLoader
from common.envs import environments
from common.memory import memory
from common.model import attention, teams, vlm
from common.rollout import GRAPH_SIZES, RolloutEngine
from conftest import ROUNDING, marked, start, user_error, write_checkpoint
from families import write_family
from helpers import judge_flags
from lives import assert_close_records, flags_of, live, records, stop_at, write_task

TALKERS = Path(__file__).parents[1] / "talkers.py"


def dealt(env):
    """All prompts of the file, dealt to the ranks."""
    with PromptLoader(env.processor, env.args) as loader:
        return loader.collect(*loader.submit(env.prompts, list(range(len(env.prompts)))))


def whole_bytes(module) -> int:
    """Of the parameters that are no shards now, once each, without the vision tower."""
    tower = set(vlm.tower_parameters(module.model))
    parts = {p for p in module.parameters() if not isinstance(p, DTensor) and p not in tower}
    return sum(p.nbytes for p in parts)


def sample_alike(folder, rows, size: int, *flags: str, talker: str = "") -> None:
    """On every rank: a rollout in teams draws what every rank would draw by itself, with a share of
    the weights."""
    env = start(folder, rows, *flags)
    setup, results, held = env.actor.model.setup, [], []
    world = torch.distributed.get_world_size()
    planned = memory.decoding_bytes(env.actor, world, 1)
    if talker:
        args = dataclasses.replace(
            env.args,
            env=f"{TALKERS}:{talker}",
            env_workers=2,
            max_turns=3,
            max_reply_tokens=400,
        )
        environment = environments.load_environment(args, 512)
        env.sampling = dataclasses.replace(env.sampling, environment=environment)
    generate = RolloutEngine.generate

    def watched(engine):
        heads = engine.cache.keys[0].shape[2]
        held.append((whole_bytes(env.actor), heads))
        return generate(engine)

    RolloutEngine.generate = watched
    for setup.team in (distributed.ALONE, distributed.join_team(size, 60.0)):
        results.append(ppo.rollout(env.actor, dealt(env), env.sampling, 4))
    RolloutEngine.generate = generate
    alone, together = results
    assert torch.equal(alone.tokens, together.tokens)
    assert (alone.logprobs - together.logprobs).abs().max() < ROUNDING
    trained = ppo.logprobs_of(env.actor, together)
    assert (trained - together.logprobs).abs().max() < ROUNDING
    if talker:
        assert torch.equal(alone.stream, together.stream)
        spoken = [[talk.rewards for talk in batch.conversations] for batch in results]
        assert spoken[0] == spoken[1]
    (whole, heads), (pieces, fewer) = held
    assert whole == planned
    root, _, layers = memory.gathered_bytes(env.actor, world)
    pieces -= root
    assert pieces == teams.piece_bytes(env.actor.model, size) < layers
    text = env.actor.model.config.get_text_config()
    if not text.to_dict().get("linear_num_key_heads"):  # whose layers are whole
        assert pieces < 1.5 * layers / size
    assert fewer == -(-heads // size)
    layers = vlm.layers(env.actor.model)
    assert all(isinstance(p, DTensor) for layer in layers for p in layer.parameters())


@pytest.mark.parametrize(
    "checkpoint, world, size",
    marked([("qwen2_5_vl", 2, 2), ("qwen3_5", 2, 2), ("qwen2_5_vl", 4, 4)], daily=2),
    indirect=["checkpoint"],
)
def test_teams_sample_what_whole_models_do(checkpoint, picture_rows, world, size):
    """With four ranks, two of them have the same key head."""
    flags = ("--lora_rank", "4") if size == 2 else ()
    ranks.run(sample_alike, checkpoint, picture_rows, size, *flags, world=world)


# experts, windows, gates and what they open in one product
DECODERS = ("qwen3_5_moe", "glm4v", "gemma4_e2b", "gemma4_26b_a4b")


@pytest.mark.slow
def test_teams_of_every_decoder(tmp_path, picture_rows):
    """In two teams, tied heads."""
    calls = []
    for kind in DECODERS:
        folder = tmp_path / kind
        folder.mkdir()
        write_family(kind, folder, picture_rows)
        lora = ("--lora_rank", "4") if kind == "glm4v" else ()
        calls.append((sample_alike, folder, folder / "rows.jsonl", 2, *lora))
    ranks.run(ranks.in_turn, *calls, world=2)
    # 5 spare ids: two do not divide them
    tied = write_checkpoint(tmp_path / "tied", "qwen2_5_vl", tie=True, spare_ids=5)
    ranks.run(sample_alike, tied, picture_rows, 2, "--train_vision", world=4)


def talk_alike(folder, rows) -> None:
    for talker in ("Slow", "Bad", "Absent"):
        sample_alike(folder, rows, 2, talker=talker)


@pytest.mark.slow
def test_environments_answer_teams_as_single_ranks(qwen25, picture_rows):
    ranks.run(talk_alike, qwen25, picture_rows, world=2)


def start_with_a_team() -> None:
    ranks = distributed.start(77.0, 0, 2)
    assert ranks.team.rank == torch.distributed.get_rank() % 2
    assert ranks.team.group.size() == 2
    backend = ranks.team.group._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == 77
    distributed.gather_objects(None)  # a rank that ended now would leave others connecting to it


def test_a_team_has_the_time_limit_of_the_run_and_graphs_for_its_slots():
    ranks.run(start_with_a_team, world=4)
    assert GRAPH_SIZES[-1] == attention.most_slots(2) == 2 * attention.most_slots(1) == 512
    (slots,) = (field for field in dataclasses.fields(grm.Args) if field.name == "slots")
    assert "at most 256, in a team 512" in slots.metadata["help"]


def judge_alike(folder, task, out) -> None:
    args = grm.parse_args(judge_flags(folder, task, out))
    loaded = distributed.start(args.timeout, args.hsdp)
    rows = grm.load_rows(args)
    judge, texts = grm.load_judge(args, rows, loaded), []
    for size in (1, 2, 4):
        judge.model.setup.team = distributed.join_team(size, 60.0)
        records, _ = grm.judge_all(judge, rows, args)
        texts.append([record["response"] for record in records])
    assert len(texts[0]) == len(rows.held_out)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_judges_write_in_teams_what_they_write_alone(qwen25, judgements, tmp_path):
    ranks.run(judge_alike, qwen25, judgements, tmp_path, world=4)


ADVANTAGES = "--steps 4 --advantage grpo --kl_coef 0.1 --on_bad_row skip --data damaged.jsonl "
ADVANTAGES += "--lora_rank 4 --save_every 2 --eval_every 2"


@pytest.mark.slow
def test_a_run_in_teams_is_the_run_of_single_ranks(qwen25, tmp_path):
    """All its metrics, a dropped prompt in them; after SIGKILL of all ranks; and from a checkpoint of
    teams, which does not know of them, by single ranks."""
    task = tmp_path / "task"
    task.mkdir()
    flags, folders = flags_of(qwen25, write_task(task)), {}
    for name in ("alone", "together", "after"):
        folders[name] = tmp_path / name
    alone, together, after = folders.values()
    argv = flags(together, ADVANTAGES + " --rollout_shards 2")
    kill = stop_at, "update_actor", 3, -1, signal.SIGKILL
    live([*argv, "--save_blocking"], 2, [kill], codes=[-signal.SIGKILL] * 2)
    single = [
        (ppo.main, flags(alone, ADVANTAGES)),
        (ppo.main, flags(after, ADVANTAGES + f" --resume {together}/checkpoints/step-2")),
    ]
    assert "resuming from" in ranks.run(ranks.in_turn, (ppo.main, argv), *single, world=2)
    assert_close_records(records(together), records(alone))
    assert records(together)[-1]["rollout/dropped_prompts"] > 0
    assert_close_records(records(after)[-2:], records(alone)[-2:])  # the first only evaluates
    weights = [
        load_file(out / "export" / "step-4" / "model.safetensors") for out in folders.values()
    ]
    for part in weights[1:]:
        assert part.keys() == weights[0].keys()
        for key in part:
            assert torch.allclose(part[key], weights[0][key], atol=1e-4)


@pytest.mark.slow
def test_a_rank_that_fails_ends_its_team_with_its_message(qwen25, tmp_path):
    """In its reward, in all of its environments, or at a picture."""
    task = tmp_path / "task"
    task.mkdir()
    flags = flags_of(qwen25, write_task(task))
    (task / "fails.py").write_text(
        "import os\n"
        "def score(prompts, responses, references, labels, images):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('rank 1 cannot score this')\n"
        "    return [0.0] * len(responses)\n"
        "class Lost:\n"
        "    def reset(self, row):\n"
        "        raise ValueError('no such game')\n"
        "    def step(self, text):\n"
        "        return None, 0.0, True\n"
    )
    for name, more, message in (
        ("reward", f"--reward {task}/fails.py:score", "rank 1 cannot score this"),
        (
            "env",
            f"--env {task}/fails.py:Lost --reward env --max_tokens_per_pack 1300",
            "no such game",
        ),
        ("image", "--data damaged.jsonl --on_bad_row error", "damaged.jsonl"),
    ):
        argv = flags(tmp_path / name, f"--advantage grpo --rollout_shards 2 {more}")
        output = live(argv, 2, codes=[2, 2])
        assert message in output.partition("error: ")[2]


def test_pieces_of_a_product_add_up():
    """Also where a bias is added on every rank: of two heads, or of six numbers."""
    product, x = torch.nn.Linear(6, 4), torch.randn(3, 6)
    for size, unit in ((2, 3), (3, 1)):
        sums = torch.zeros(3, 4)
        for rank in range(size):
            team = distributed.Team(size, rank)
            weight, bias = (
                teams.piece_of(value, "o_proj", unit, kind, team)
                for kind, value in product.named_parameters()
            )
            inputs = x.chunk(size, dim=1)[rank]
            sums += torch.nn.functional.linear(inputs, weight, bias)
        assert torch.allclose(sums, product(x), atol=1e-6)


def test_what_cannot_be_shared_is_refused(qwen25, picture_rows, monkeypatch):
    env = start(qwen25, picture_rows)
    with user_error("--rollout_shards 8 must divide the 4 parts of q_proj, of 16 numbers each"):
        teams.piece_bytes(env.actor.model, 8)
    experts = torch.zeros(
        4, 2 * 24, 16, device="meta"
    )  # whose kernel reads eight numbers at a time
    teams.piece_of(experts, "experts", 8, "gate_up_proj", distributed.Team(3))
    with user_error("--rollout_shards 2 must divide the 3 parts of experts, of 8 numbers each"):
        teams.piece_of(experts, "experts", 8, "gate_up_proj", distributed.Team(2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with user_error("--rollout_shards 3 must divide the ranks of a machine, 8"):
        distributed.start(60.0, 0, 3)
