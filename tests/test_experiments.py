"""An experiment is a small change of one file: each of tests/experiments/*.diff applies to the
script and then does what it says, in two steps of a toy. A fork that has applied it keeps this
test."""

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image, ImageFilter

import ranks
from common import distributed, losses
from common.model import shards
from conftest import (
    ROOT,
    ROUNDING,
    hugging_face,
    inputs_of,
    logits_of,
    read_rows,
    readme_reward,
    responses_of,
    rounding,
    seeded,
    start,
    token_logprobs,
    user_error,
    words,
)
from helpers import flags

SCRIPT, CHANGES = "train_ppo_vl.py", "common/model/image_changes.py"
DRAWING = "common/logprobs.py"
DIFFS = sorted((ROOT / "tests" / "experiments").glob("*.diff"))
TESTS = {
    "estimator": "an_estimator",
    "filter": "a_filter",
    "look": "kind_of_look",
    "loss_term": "a_loss_term",
    "muon": "muon",
    "sampler": "another_sampler",
    "sampling": "sampling_rule",
}


def changed_lines(diff: Path) -> list[str]:
    return [
        line
        for line in diff.read_text().splitlines()
        if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")
    ]


def git_apply(diff: Path, folder: Path, *options: str) -> bool:
    """Whether it applies to a folder that is in no repository."""
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return (
        subprocess.run(["git", "apply", *options, str(diff)], cwd=folder, env=outside).returncode
        == 0
    )


def changed_script(diff: Path, folder: Path) -> ModuleType:
    """A copy of the script with the change applied, unless it was already, imported; it finds
    common/ where the tests find it, but for what of it is changed as well."""
    for name in (SCRIPT, CHANGES, DRAWING):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    assert git_apply(diff, folder, "--reverse", "--check") or git_apply(diff, folder)
    script = imported(folder / SCRIPT, f"experiment_{diff.stem}")
    if CHANGES in files_of(diff):
        script.image_changes = imported(folder / CHANGES, f"experiment_{diff.stem}_image_changes")
    if DRAWING in files_of(diff):
        script.Sampling = imported(folder / DRAWING, f"experiment_{diff.stem}_logprobs").Sampling
    return script


def files_of(diff: Path) -> list[str]:
    return [
        line.removeprefix("+++ b/")
        for line in diff.read_text().splitlines()
        if line.startswith("+++ ")
    ]


def imported(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # where dataclasses look
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(qwen25, task, tmp_path):
    """A function that runs the script of a diff for two steps: the script, its records, and the
    batch of each step."""

    def run_two_steps(
        name: str, *more: str, prepare: Callable = lambda script: None
    ) -> tuple[ModuleType, list[dict], list]:
        script, batches = (
            changed_script(ROOT / "tests" / "experiments" / f"{name}.diff", tmp_path),
            [],
        )
        prepare(script)
        advance = script.advance

        def see(state, batch, *others):
            batches.append(batch)
            return advance(state, batch, *others)

        script.advance = see
        script.main(
            flags(
                qwen25,
                task,
                tmp_path / "run",
                "--steps 2 --save_every 0 --export_every 0 --advantage grpo --samples_per_prompt 4",
                *more,
            )
        )
        steps = [
            record
            for record in read_rows(tmp_path / "run" / "metrics.jsonl")
            if "rollout/reward" in record
        ]
        assert len(steps) == len(batches) == 2
        return script, steps, batches

    yield run_two_steps
    for name in [name for name in sys.modules if name.startswith("experiment_")]:
        del sys.modules[name]


def test_there_are_seven_and_each_is_small():
    assert [diff.stem for diff in DIFFS] == [
        "estimator",
        "filter",
        "look",
        "loss_term",
        "muon",
        "sampler",
        "sampling",
    ]
    for diff in DIFFS:
        assert 0 < len(changed_lines(diff)) <= {"sampler": 67, "muon": 40}.get(diff.stem, 25), diff
        others = {"look": [CHANGES], "sampler": [DRAWING], "sampling": [DRAWING]}.get(diff.stem, [])
        assert files_of(diff) == [*others, SCRIPT]
        assert f"git apply tests/experiments/{diff.name}" in diff.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [*([diff.stem] for diff in DIFFS), [diff.stem for diff in DIFFS]], ids="+".join
)
def test_a_fork_is_green(names, tmp_path):
    """A copy of the project with one change, and one with all and the reward of the README: what
    protects a fork, and the tests of what it has changed."""
    fork = tmp_path / "fork"
    left = shutil.ignore_patterns(".*", "__pycache__", "runs", "real", "toy", "toy_describe")
    shutil.copytree(ROOT, fork, ignore=left)
    assert all(git_apply(fork / "tests" / "experiments" / f"{name}.diff", fork) for name in names)
    if len(names) > 1:
        (fork / "my_reward.py").write_text(readme_reward())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_architecture.py",
    ]
    command += [
        "tests/test_experiments.py",
        "-m",
        "not slow",
        "-k",
        " or ".join(("architecture", "seven", *map(TESTS.get, names))),
    ]
    done = subprocess.run(command, cwd=fork, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_estimator_of_ones_own(run):
    """Of every sample the score less the median of its prompt's."""
    script, steps, batches = run("estimator", "--advantage median")
    for batch in batches:
        for i, advantages in enumerate(batch.split(batch.advantages)):
            rewards = [
                float(score)
                for score, group in zip(batch.rewards, batch.prompt_index)
                if group == batch.prompt_index[i]
            ]
            wanted = float(batch.rewards[i]) - statistics.median(rewards)
            assert advantages.tolist() == pytest.approx(
                [wanted] * len(advantages), abs=rounding(16)
            )
    assert any(step["train/advantages_std"] > 0 for step in steps)
    two = losses.AdvantageInputs(
        torch.tensor([1.0, 2, 9, 5]),
        torch.full((4,), 0.5),
        0.2,
        torch.ones(4, dtype=torch.int64),
        torch.tensor([3, 3, 3, 8]),
    )
    assert script.ESTIMATORS["median"].estimate(two)[0].tolist() == pytest.approx([-1, 0, 7, 0])


def test_a_loss_term_with_a_metric_of_its_own(run):
    """Before the first update of a step the term is the mean surprise of the tokens of responses
    that earned something."""
    _, steps, batches = run("loss_term", "--imitation_coef 0.1")
    for step, batch in zip(steps, batches):
        earned = (batch.rewards > 0).repeat_interleave(batch.lengths)
        assert step["train/imitation_loss"] == pytest.approx(
            float(-(earned * batch.logprobs).mean()), rel=1e-4
        )
        assert step["train/imitation_loss"] > 0


def test_a_filter_of_samples_after_the_reward(run):
    """All are scored, and half of them are learned from: of each prompt the best and the worst."""
    script, steps, batches = run("filter", "--keep_samples 2")
    assert [step["rollout/samples"] for step in steps] == [8, 8]
    for step, batch in zip(steps, batches):
        assert batch.prompt_index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(batch.tokens) < step["rollout/generated_tokens"]
    whole = batches[0].with_targets([[torch.tensor([k]) for k in range(n)] for n in (5, 1, 0, 4)])
    whole.rewards = torch.tensor([3.0, 1, 4, 1.5, 9, 7, 0, 0, 0, 1])
    extremes = script.extremes(whole, 1)
    assert list(zip(extremes.prompt_index.tolist(), extremes.sample_number.tolist())) == [
        (0, 1),
        (0, 4),
        (1, 0),
        (3, 0),
        (3, 3),
    ]


def test_a_changed_sampling_rule(run):
    """With --min_p 1 only the likeliest token is left: all samples of a prompt are alike."""
    _, steps, batches = run("sampling", "--min_p 1")
    assert [step["rollout/groups_without_spread"] for step in steps] == [4, 4]
    for batch in batches:
        responses = [tuple(tokens.tolist()) for tokens in batch.split(batch.tokens)]
        assert [len(set(responses[k : k + 4])) for k in range(0, 16, 4)] == [1] * 4
        assert len(set(responses)) > 1


def muon_by_torch(folder: Path, argv: list[str]) -> None:
    """In every rank: a run and its resumption, and updates as torch's own optimizers take them on
    whole tensors."""
    script = imported(folder / SCRIPT, "experiment_muon")
    for steps in ("2", "3"):
        script.main([*argv, "--out", str(folder / "run"), "--steps", steps])
    args = script.parse_args(
        [
            *argv,
            "--out",
            str(folder / "none"),
            *words("--steps 3 --warmup_steps 1 --weight_decay 0.1"),
        ]
    )
    ranks = distributed.start(args.run.timeout, args.run.hsdp)
    models = script.build_models(args, script.load_rows(args).processor, ranks.device)
    script.load_models(args, models.by_role(), ranks)
    trained = script.make_trainables(args, models)["actor"]
    ours = {name: p for name, p in trained.module.named_parameters() if p.requires_grad}
    whole = {name: torch.nn.Parameter(p.full_tensor()) for name, p in ours.items()}
    kinds = {True: [], False: []}
    for name, p in whole.items():
        kinds["layers" in name and p.ndim == 2].append(p)
    muon = torch.optim.Muon(kinds[True], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in kinds[False]]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, args.optim.adam_beta2))
    for step, share in ((1, 0.5), (2, 1.0), (3, 1.0)):
        for number, (name, p) in enumerate(whole.items()):
            p.grad = torch.randn(p.shape, generator=seeded(100 * step + number))
            ours[name].grad = torch.zeros_like(ours[name])
            shards.copy_shard(ours[name].grad, p.grad)
        script.take_step(trained, step)
        for optimizer, rate in ((muon, 0.02), (adamw, 0.01)):
            for group in optimizer.param_groups:
                group["lr"] = share * rate
            optimizer.step()
    for name, p in ours.items():
        assert torch.allclose(p.full_tensor(), whole[name], atol=1e-5, rtol=1e-4), name


@pytest.mark.parametrize("world", [1, 2])
def test_muon_beside_adamw(qwen25, task, tmp_path, world):
    """torch.optim.Muon itself fails on FSDP's shards."""
    changed_script(ROOT / "tests" / "experiments" / "muon.diff", tmp_path)
    argv = flags(
        qwen25,
        task,
        tmp_path / "run",
        "--advantage grpo --samples_per_prompt 4 --save_every 2 --export_every 0",
    )
    more = words("--muon_lr 0.02 --actor_lr 0.01 --max_grad_norm 0")
    ranks.run(muon_by_torch, tmp_path, [*argv, *more], world=world)
    steps = [
        record
        for record in read_rows(tmp_path / "run" / "metrics.jsonl")
        if "train/actor_lr" in record
    ]
    assert [(step["step"], step["train/actor_lr"]) for step in steps] == [
        (1, 0.01),
        (2, 0.01),
        (3, 0.01),
    ]


def test_another_sampler(run, qwen25, task):
    """Its tokens are drawn at the temperature asked for, and its log-probs are those of Hugging
    Face's model and of ours."""
    script, steps, batches = run("sampler", "--sampler generate --temperature 0.8")
    env, model, batch = start(qwen25, task / "train.jsonl"), hugging_face(qwen25), batches[0]
    actual = batch.split(batch.logprobs)
    for i, (index, tokens) in enumerate(responses_of(batch)):
        with torch.no_grad():
            logits = logits_of(model, batch.prompts[index], tokens, env.processor)
        assert torch.allclose(actual[i], token_logprobs(logits / 0.8, tokens), atol=1e-4)
    assert len({tuple(tokens.tolist()) for _, tokens in responses_of(batch)}) > len(batch.prompts)
    assert all(0 < step["train/sampler_gap"] < ROUNDING for step in steps)


def test_another_sampler_that_sees_no_images_is_stopped_with_the_question(run, monkeypatch):
    def blind(script: ModuleType) -> None:
        script.load_pixels = lambda *_: None

    with user_error(
        "train/sampler_gap 0.* is above 0.001: .*A sampler of your own: did it see the images"
    ):
        run("sampler", "--sampler generate", prepare=blind)


def test_another_kind_of_look(run, qwen25, task):
    """PAPO's second look is at images that Pillow blurs: their log-probs, by Hugging Face's model."""
    script, steps, batches = run(
        "look", "--perception_coef 0.01 --perception_change blur:0.1 --actor_lr 0 --steps 2"
    )
    env = start(qwen25, task / "train.jsonl")
    model = hugging_face(qwen25)
    for step, batch in zip(steps, batches):
        actual = batch.split(batch.masked_logprobs)
        for i, (index, tokens) in enumerate(responses_of(batch)):
            prompt = batch.prompts[index]
            if not prompt.images:
                assert actual[i].isnan().all()
                continue
            patches = []
            for path in prompt.images:
                image = Image.open(path).convert("RGB")
                blurred = image.filter(ImageFilter.GaussianBlur(0.1 * max(image.size)))
                patches.append(env.processor.family.patches(blurred)[0])
            inputs = inputs_of(prompt, tokens, env.processor) | {"pixel_values": torch.cat(patches)}
            with torch.no_grad():
                logits = model(**inputs).logits[0, len(prompt.input_ids) - 1 : -1]
            logits[:, list(env.processor.banned_ids)] = -torch.inf
            assert torch.allclose(actual[i], token_logprobs(logits, tokens), atol=1e-4)
        assert step["train/perception_kl"] > 0
