"""Attention back-ends, waits and whole runs on a GPU, and the same on a CPU with reference kernels,
so that no name, flag or shape rots where there is no GPU; CUDA graphs on a GPU alone."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import one_gpu_ranks
import train_grm_vl as grm
import train_ppo_vl as ppo
from common import distributed, logprobs
from common.flags import ModelArgs
from common.model import build, packs, vlm
from common.model.attention import choose_backend
from common.model.fsdp import unsharded, unwrapped_forward
from common.rollout import RolloutEngine
from conftest import (
    ROOT,
    read_json,
    read_rows,
    responses_of,
    start,
    take,
    user_error,
    words,
)
from helpers import needs_compiler, score
from launch import check_kernels, toy
from ranks import as_program, clean_environment, python
from ranks import run as run_ranks
from reference_kernels import (
    CPU,
    CUDA,
    SEGMENTS,
    attention_bounds,
    decode_error,
    packed_errors,
    usable,
)

pytestmark = pytest.mark.slow  # whole runs, and emulations of what a GPU does

# Text, a picture whose tokens see each other, text behind it and a response; and the one token of
# an empty pack, alone.
PICTURE = [
    (0, 30, 0, 0),
    (30, 286, 0, 30, True),
    (286, 300, 0, 286),
    (300, 380, 0, 300),
    (380, 400, 400, 400),
]
ALONE = [(0, 1, 0, 0)]
layouts = pytest.mark.parametrize(
    "segments, window",
    [(SEGMENTS, None), (SEGMENTS, 33), (PICTURE, None), (PICTURE, 33), (ALONE, None)],
)
kernel_backends = pytest.mark.parametrize("backend", ["varlen", "flash_attn"])


def explained_gap(layers: int) -> float:
    """Mean error of log-probs that bfloat16 explains: some 20 operations of a layer, one behind the
    other, round their results by half an epsilon at most. Errors of either sign add up like the
    steps of a random walk: n operations leave a hidden state off by sqrt(n) halves of an epsilon,
    and the logits and log-probs, whose spread is about 1 here, by as much."""
    return check_kernels.explained(torch.bfloat16, math.sqrt(20 * layers))


def skip_unless_installed(backend: str) -> None:
    if not usable(backend):
        pytest.skip(f"{backend} is not installed")


def assert_attention(
    backend: str, device: torch.device, dtype: torch.dtype, segments, window: int | None
) -> None:
    bounds = attention_bounds(dtype)
    for name, error in packed_errors(backend, device, dtype, segments, window).items():
        assert error < bounds[name], name
    assert decode_error(backend, device, dtype, window) < bounds["forward"]


@layouts
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flash_attn"])
def test_backends_on_a_gpu(device, backend, segments, window):
    skip_unless_installed(backend)
    assert_attention(backend, device, torch.bfloat16, segments, window)


BROKEN = {
    "built for another torch": (
        "raise ImportError('undefined symbol: _ZN3c10')",
        "cannot be used: undefined symbol",
    ),
    "flash-attn-4 alone, a namespace package": (
        None,
        "cannot be used: module 'flash_attn' has no attribute",
    ),
}


@pytest.mark.parametrize("text, why", BROKEN.values(), ids=BROKEN)
def test_a_flash_attn_that_does_not_load(monkeypatch, tmp_path, capsys, text, why):
    """Found out at the start, not at the first picture after all weights are loaded: refused if it
    was asked for, otherwise varlen is taken, which says why."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    if text:
        (tmp_path / "flash_attn" / "__init__.py").write_text(text)
    # a namespace package comes behind a real one of that name, wherever it stands on the path
    others = [folder for folder in sys.path if not (Path(folder) / "flash_attn").is_dir()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    # so that what is imported here is forgotten afterwards
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, "flash_attn")
    with pytest.raises(ValueError, match=f"--attention flash_attn: .*{why}"):
        choose_backend("flash_attn", CUDA)
    assert choose_backend("varlen", CUDA) == "varlen"
    assert choose_backend("auto", CPU) == "sdpa"
    monkeypatch.setattr(
        build, "choose_backend", lambda requested, *_: choose_backend(requested, CUDA)
    )
    assert build.choose_compute(ModelArgs(), CPU, 64).backend == "varlen"
    assert re.search(rf"attention: varlen \(.*{why}", capsys.readouterr().out)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with user_error(
        "2 processes were started on this machine, but torch sees 1 GPUs: use --nproc_per_node 1"
    ):
        distributed.start(60.0, 0)


def test_graphs_decode_the_same_tokens(gpu, checkpoint, picture_rows):
    """In float32, where rounding by other batch sizes does not reach a token."""
    tokens = {}
    for graphs in ("off", "on"):
        env = start(checkpoint, picture_rows, "--dtype float32 --cuda_graphs", graphs, "--slots 7")
        tokens[graphs] = ppo.rollout(env.actor, take(env), env.sampling, 5).tokens.tolist()
    assert tokens["on"] == tokens["off"]


@kernel_backends
def test_sampled_logprobs_are_those_of_training_on_a_gpu(device, checkpoint, picture_rows, backend):
    assert_samples_are_scored_alike(checkpoint, picture_rows, backend, "off")


@kernel_backends
def test_sampled_logprobs_are_those_of_training_with_graphs(gpu, checkpoint, picture_rows, backend):
    assert_samples_are_scored_alike(checkpoint, picture_rows, backend, "on")


def assert_samples_are_scored_alike(checkpoint, picture_rows, backend: str, graphs: str) -> None:
    """By the sampler and by a forward of training."""
    skip_unless_installed(backend)
    env = start(
        checkpoint,
        picture_rows,
        "--dtype bfloat16 --attention",
        backend,
        "--cuda_graphs",
        graphs,
        "--slots 7",
    )
    batch = ppo.rollout(env.actor, take(env), env.sampling, 5)
    assert (score(env.actor, batch) - batch.logprobs).abs().mean() < explained_gap(layers_of(env))


@kernel_backends
def test_float32_says_the_same_on_a_gpu(device, checkpoint, picture_rows, backend):
    """Of a rollout in float32, which has its own attention and no varlen call, in the vision tower
    as well."""
    skip_unless_installed(backend)
    assert_float32_says_the_same(checkpoint, picture_rows, backend)


def layers_of(env) -> int:
    return env.processor.config.text_config.num_hidden_layers


def assert_float32_says_the_same(checkpoint, picture_rows, backend: str) -> None:
    """Log-probs in bfloat16 with a back-end, and those sampled in float32 with sdpa."""
    exact = start(checkpoint, picture_rows, "--dtype float32")
    env = start(checkpoint, picture_rows, "--dtype bfloat16 --attention", backend)
    batch = ppo.rollout(exact.actor, take(exact), exact.sampling, 5)
    again = take(env).with_responses(responses_of(batch))
    again.sampling = batch.sampling
    vlm.compute_features(env.actor.model, again)
    assert (score(env.actor, again) - batch.logprobs).abs().mean() < explained_gap(layers_of(env))


def test_float32_says_the_same(checkpoint, picture_rows):
    assert_float32_says_the_same(checkpoint, picture_rows, "sdpa")


def test_the_kernels_compute_what_they_should(device, capsys):
    """Of each back-end that is installed."""
    assert check_kernels.main(["--dtype", "bfloat16"]) == []
    assert f"varlen on {device}" in capsys.readouterr().out


@needs_compiler
def test_the_compiled_draw_is_used(device, qwen25, picture_rows, monkeypatch):
    """It is not given up in a rollout, which draws by it, though on a CPU only because it is told to."""
    if device == CPU:
        monkeypatch.setattr(
            logprobs, "fuse", lambda function, *tensors: logprobs._compiled(function)(*tensors)
        )
    torch._dynamo.reset()
    env = start(qwen25, picture_rows, "--slots 7")
    ppo.rollout(env.actor, take(env), env.sampling, 5)
    assert logprobs._compiles(env.ranks.device)
    assert _debug_get_cache_entry_list(logprobs._race)


def test_graphs_are_freed_with_their_rollout(gpu, checkpoint, picture_rows):
    """The first leaves workspaces behind, later ones nothing."""
    env, reserved = start(checkpoint, picture_rows, "--cuda_graphs on --slots 7"), []
    for _ in range(3):
        ppo.rollout(env.actor, take(env), env.sampling, 5)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2] <= reserved[1]


def test_a_decoding_step_never_waits_for_the_device(device, checkpoint, picture_rows):
    env = start(checkpoint, picture_rows, "--dtype bfloat16")
    batch = take(env)
    with torch.no_grad(), unsharded(env.actor), unwrapped_forward(vlm.decoder(env.actor.model)):
        vlm.compute_features(env.actor.model, batch)
        engine = RolloutEngine(env.actor, batch, env.sampling, [0, 1], 2)
        engine.prefill([(0, [(0, 0), (1, 1)]), (1, [(2, 0), (3, 1)])])
        # the first makes tables and workspaces
        engine.decode_on_device(4, engine.cache.capacity)
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.decode_on_device(4, engine.cache.capacity)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_pack_of_an_update_never_waits_for_the_device(device, checkpoint, picture_rows):
    """Forward and backward, with images: the host prepares the next pack meanwhile."""
    env = start(checkpoint, picture_rows, "--advantage grpo --dtype bfloat16")
    batch = ppo.rollout(env.actor, take(env), env.sampling, 3)
    batch.old_logprobs, batch.advantages = batch.logprobs, torch.randn(len(batch.tokens))
    weights = torch.ones(len(batch.tokens))
    batch.in_policy_loss = weights > 0
    part = ppo.Minibatch(range(4), weights, weights, None)
    env.actor.train()
    # the first time makes tables and workspaces
    for mode in ("default", "error"):
        for pack in packs.of_batch(env.actor.model, batch):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                loss, _ = ppo.actor_loss(env.actor, None, pack, batch, part, env.args)
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def run(device: torch.device, script, out: Path, *flags: str | Path) -> list[dict]:
    """The records of a script's run: on all GPUs, or in this process with the reference kernels."""
    line = words("--dtype bfloat16 --log_samples 0 --out", out, *flags)
    if device == CPU:
        script.main([*line, "--attention", "varlen"])
        return read_rows(out / "metrics.jsonl")
    launcher = words(
        "-m", "torch.distributed.run", "--standalone --nproc_per_node", torch.cuda.device_count()
    )
    command = [sys.executable, *launcher, script.__file__, *line]
    program = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=300
    )
    assert program.returncode == 0, program.stdout[-3000:] + program.stderr[-6000:]
    return read_rows(out / "metrics.jsonl")


@pytest.fixture(scope="module")
def toy_task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task") / "toy"
    toy.main(words("--out", folder, "--warm_start_steps 0 --train 128 --eval 8"))
    return folder


# of a CPU, whose products in bfloat16 are slow
SMALL = "--prompts_per_step 4 --samples_per_prompt 2 --max_new_tokens 6"
WHOLE = {
    "everything": "--kl_coef 0.05 --ema_beta 0.9 --offload all --gradient_checkpointing --save_every 1",
    "train_vision": "--train_vision --advantage grpo --save_every 0",
    "lora": "--lora_rank 4 --advantage grpo --kl_coef 0.05 --kl_in loss --kl_estimator full --save_every 0",
}


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_run_on_all_gpus(device, toy_task, tmp_path, kind):
    """Two steps, and a third in another life if there is a checkpoint; evaluation and export at the
    end of each."""
    flags = (
        "--config",
        toy_task / "args.json",
        "--cuda_graphs",
        "auto" if device == CPU else "on",
        SMALL if device == CPU else "--max_new_tokens 24",
        "--eval_every 1",
        WHOLE[kind],
    )
    for steps in (2, 3) if kind == "everything" else (2,):
        records = run(device, ppo, tmp_path, *flags, "--steps", steps)
    done = {record["step"]: record for record in records if "train/actor_updates" in record}
    assert sorted(done) == list(range(1, steps + 1))
    assert (tmp_path / "export" / f"step-{steps}").is_dir()
    layers = read_json(tmp_path / "export" / f"step-{steps}" / "config.json")["text_config"][
        "num_hidden_layers"
    ]
    for record in done.values():
        assert record["train/actor_skipped"] == 0
        assert record["train/sampler_gap"] < explained_gap(layers)
    assert done.keys() <= {record["step"] for record in records if "eval/reward_mean" in record}


def test_whole_run_of_the_judge_on_all_gpus(device, toy_task, tmp_path):
    records = run(
        device, grm, tmp_path, "--config", toy_task / "grm_args.json", "--steps 2 --save_every 1"
    )
    (last,) = (
        record for record in records if record.get("step") == 2 and "train/skipped" in record
    )
    assert last["train/skipped"] == 0
    assert any(
        record.get("step") == 2 and record.get("eval/parse_rate", -1) >= 0 for record in records
    )


def start_together(ranks: int, script, out: Path, *flags: str | Path) -> subprocess.Popen:
    """Ranks of a script that share one GPU; over gloo where there is none."""
    starter = ROOT / "tests" / "one_gpu_ranks.py"
    launcher = words("-m", "torch.distributed.run", "--standalone --nproc_per_node", ranks)
    line = words("--log_samples 0 --timeout 120 --out", out, *flags)
    return subprocess.Popen(
        words(sys.executable, *launcher, starter, script.__file__, *line),
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def run_together(ranks: int, script, out: Path, *flags: str | Path, code: int = 0) -> list[dict]:
    """Their records, once they have ended."""
    program = start_together(ranks, script, out, *flags)
    told, _ = program.communicate(timeout=400)
    assert program.returncode == code, told[-6000:]
    return read_rows(out / "metrics.jsonl")


def steps_of(records: list[dict]) -> dict[int, dict]:
    return {record["step"]: record for record in records if "train/actor_updates" in record}


SHORT = (
    "--max_new_tokens 8 --prompts_per_step 8 --samples_per_prompt 2 --eval_every 0 --save_every 0"
)


def start_here(script: Path, line: list[str]) -> None:
    """What the starter does in a rank that torchrun has started."""
    sys.argv = [one_gpu_ranks.__file__, str(script), *line]
    one_gpu_ranks.main()


def test_the_starter_of_ranks_that_share_a_gpu(toy_task, tmp_path):
    """Over gloo, as where there is no GPU; a message of the script and its exit code get through."""
    out, script = tmp_path / "out", Path(ppo.__file__)
    flags = "--config", toy_task / "args.json", SHORT, SMALL, "--advantage grpo --steps 1"
    line = words("--log_samples 0 --timeout 120 --out", out, *flags)
    run_ranks(start_here, script, line, world=2, CUDA_VISIBLE_DEVICES="")
    (step,) = steps_of(read_rows(out / "metrics.jsonl")).values()
    assert step["train/actor_skipped"] == 0
    told = run_ranks(start_here, script, [*line, "--no_such_flag"], codes=[2])
    assert "error: unrecognized arguments: --no_such_flag" in told


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu_learn_what_one_does(gpu, toy_task, tmp_path, ranks):
    """The same samples in float32, and losses and gradients but for the order of additions."""
    flags = "--config", toy_task / "args.json", SHORT, "--dtype float32 --steps 2"
    runs = [
        steps_of(run_together(n, ppo, tmp_path / f"{n}", *flags, "--resume never"))
        for n in (1, ranks)
    ]
    for name in (
        "rollout/reward",
        "rollout/response_length",
        "train/actor_grad_norm",
        "train/values",
    ):
        alone, together = (run[1][name] for run in runs)
        assert together == pytest.approx(alone, rel=1e-3, abs=1e-6), name


TOGETHER = {
    "copies": "--advantage grpo --hsdp 1 --steps 2",
    "teams": "--advantage grpo --rollout_shards 2 --cuda_graphs on --prompts_per_step 4 --steps 1",
    "everything": "--advantage gae --offload all --kl_coef 0.05 --kl_in loss --kl_estimator full --train_vision "
    "--steps 2",
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", TOGETHER)
def test_whole_runs_of_ranks_that_share_a_gpu(gpu, toy_task, tmp_path, kind, ranks):
    """Copies of the weights; all-reduces in a CUDA graph; all that moves to the host and back."""
    flags = "--config", toy_task / "args.json", SHORT, "--dtype bfloat16", TOGETHER[kind]
    for step in steps_of(run_together(ranks, ppo, tmp_path / "out", *flags)).values():
        assert step["train/actor_skipped"] == 0
        assert step["train/sampler_gap"] < explained_gap(2)


@pytest.mark.parametrize("before, after", [(2, 1), (2, 4), (4, 2)])
def test_ranks_that_share_a_gpu_are_killed_and_resumed(gpu, toy_task, tmp_path, before, after):
    """On another number of ranks."""
    flags = "--config", toy_task / "args.json", SHORT, "--advantage grpo --save_every 1 --steps"
    program = start_together(before, ppo, tmp_path / "out", *flags, "1000")
    deadline = time.monotonic() + 200
    while not (tmp_path / "out" / "checkpoints" / "latest").exists():
        assert program.poll() is None and time.monotonic() < deadline, program.stdout.read()
        time.sleep(0.1)
    os.killpg(program.pid, signal.SIGKILL)
    program.communicate()
    last = max(steps_of(read_rows(tmp_path / "out" / "metrics.jsonl"))) + 2
    steps = steps_of(run_together(after, ppo, tmp_path / "out", *flags, last))
    assert max(steps) == last
    assert steps[last]["train/actor_skipped"] == 0


def test_a_rank_that_fails_ends_those_it_shares_a_gpu_with(gpu, toy_task, tmp_path):
    """In its reward, of which all ranks hear."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\n"
        "def fails(prompts, responses, references, labels, images):\n"
        "    assert os.environ['RANK'] != '1', 'no reward today'\n"
        "    return [0.0 for _ in responses]\n"
    )
    flags = "--config", toy_task / "args.json", SHORT, "--steps 1 --reward", f"{reward}:fails"
    program = start_together(2, ppo, tmp_path / "out", *flags)
    told, _ = program.communicate(timeout=200)
    assert program.returncode
    assert "no reward today" in told


@pytest.mark.parametrize("ranks", [2, 4])
def test_judges_that_share_a_gpu(gpu, toy_task, tmp_path, ranks):
    flags = "--config", toy_task / "grm_args.json", "--steps 2 --eval_every 2 --save_every 0"
    records = run_together(ranks, grm, tmp_path / "out", *flags)
    assert any(record.get("train/skipped") == 0 for record in records)


def test_the_gpu_benchmark_runs():
    """Its tiny mode, in a process of its own since it replaces the loading of weights."""
    program = ROOT / "tests" / "benchmarks" / "gpu.py"
    told = run_ranks(as_program, program, ["--tiny"])
    for cell in (
        "| sdpa | float32 |",
        "| 4 x 32 |",
        "| 256 |",
        "| 2056 | shared |",
        "| rollout_seconds |",
    ):
        assert cell in told, told
    assert told.count("| 2056 | shared |") == 2  # of all weights, and of adapters


ON_GPU = """
import torch
def uuid():
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
top = {top}
def score(prompts):
    return float(torch.ones(3, device="cuda").sum()), uuid()
"""
RANK = """
import torch
from common.user_code import load_function
score, *_ = load_function("--reward", "{path}:score", "prompts")
before = torch.cuda.is_initialized()
own = torch.cuda.get_device_properties({rank}).uuid
print(before, score([]) == [3.0, str(own)])
"""


@pytest.mark.parametrize("top", ["torch.ones(1, device='cuda')", "None"])
def test_programs_compute_on_the_gpu_of_their_rank(gpu, tmp_path, top):
    """At the top of a file and in a call, forked from ranks that have not touched a GPU."""
    (tmp_path / "mine.py").write_text(ON_GPU.format(top=top))
    for rank in range(min(2, torch.cuda.device_count())):
        code = RANK.format(path=tmp_path / "mine.py", rank=rank)
        ended = python(code, LOCAL_RANK=str(rank), WORLD_SIZE="2")
        assert (ended.returncode, ended.stdout) == (0, "False True\n"), ended.stderr
