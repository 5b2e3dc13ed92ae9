"""An experiment is a small change of one file: each of tests/experiments/*.diff applies to the
script and then does what it says, in two steps of a toy. A fork that has applied it keeps this
test; where a fork has changed the same lines in another way, it is skipped. (That all of them apply
here is a rule of .ci/rules.py.)"""

import dataclasses
import importlib.util
import math
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
from torch.distributed.tensor import distribute_tensor

import ranks
import train_ppo_vl as ppo
from common import distributed, losses
from common.data.loader import load_pixels
from common.data.processor import Processor
from common.looks import image_changes
from conftest import (
    ROOT,
    ROUNDING,
    hugging_face,
    logits_of,
    marked,
    read_rows,
    readme_reward,
    responses_of,
    rounding,
    seeded,
    start,
    token_logprobs,
    user_error,
    words,
    write_rows,
)
from helpers import assert_same_run, flags, samples_of_every_step

SCRIPT, CHANGES = "train_ppo_vl.py", "common/looks/image_changes.py"
DRAWING, FORMULAS, SAMPLER = "common/sampling.py", "common/losses.py", "common/rollout.py"
DIFFS = sorted((ROOT / "tests" / "experiments").glob("*.diff"))
TESTS = {
    "branch": "branches",
    "estimator": "an_estimator",
    "filter": "a_filter",
    "gigpo": "same_observation",
    "look": "kind_of_look",
    "loss_term": "a_loss_term",
    "luffy": "demonstration",
    "muon": "muon",
    "noisy": "noisy",
    "replay": "replay",
    "sampler": "another_sampler",
    "sampling": "sampling_rule",
    "spo": "its_row",
    "student_images": "a_student",
}
METHODS = ("branch", "gigpo", "luffy", "noisy", "replay", "spo", "student_images")  # of the field
# some of them change the same lines
FORKS = (
    [diff.stem for diff in DIFFS if diff.stem not in METHODS] + ["branch"],
    ["gigpo", "noisy", "replay"],
    ["spo", "student_images", "luffy"],
)


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
    for name in (SCRIPT, CHANGES, DRAWING, FORMULAS, SAMPLER):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    if not (git_apply(diff, folder, "--reverse", "--check") or git_apply(diff, folder)):
        pytest.skip(f"{diff.name} does not apply: this fork has changed the same lines")
    script = imported(folder / SCRIPT, f"experiment_{diff.stem}")
    if CHANGES in files_of(diff):
        script.image_changes = imported(folder / CHANGES, f"experiment_{diff.stem}_image_changes")
    if DRAWING in files_of(diff):
        script.Sampling = imported(folder / DRAWING, f"experiment_{diff.stem}_sampling").Sampling
    if FORMULAS in files_of(diff):
        script.losses = imported(folder / FORMULAS, f"experiment_{diff.stem}_losses")
    if SAMPLER in files_of(diff):
        script.rollout = imported(folder / SAMPLER, f"experiment_{diff.stem}_rollout").rollout
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


def test_there_are_fourteen_and_each_is_small():
    assert [diff.stem for diff in DIFFS] == sorted(TESTS)
    assert len(DIFFS) == 14
    for diff in DIFFS:
        largest = {"sampler": 67, "muon": 40, "noisy": 36}.get(diff.stem, 28)
        assert 0 < len(changed_lines(diff)) <= largest, diff
        others = {
            "gigpo": [FORMULAS],
            "look": [CHANGES],
            "sampler": [SAMPLER, DRAWING],
            "sampling": [SAMPLER, DRAWING],
        }.get(diff.stem, [])
        assert files_of(diff) == [*others, SCRIPT]
        assert f"git apply tests/experiments/{diff.name}" in diff.read_text()


@pytest.mark.slow
def test_forks_are_green(tmp_path):
    """Copies of the project with all changes that fit together; in the one with most of them, and with the
    reward of the README, what protects a fork, and the tests of its changes. The test of one that no
    longer fits is skipped."""
    assert sorted(sum(FORKS, [])) == sorted(TESTS)
    left = shutil.ignore_patterns(".*", "__pycache__", "runs", "real", "toy", "toy_describe")
    for names in FORKS[::-1]:
        fork = tmp_path / "+".join(names)
        shutil.copytree(ROOT, fork, ignore=left)
        assert all(
            git_apply(fork / "tests" / "experiments" / f"{name}.diff", fork) for name in names
        )
    (fork / "my_reward.py").write_text(readme_reward())
    # that of muon is of two ranks, and of nothing that another changes
    chosen = ["architecture", "fourteen", *(TESTS[name] for name in names if name != "muon")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/test_architecture.py", "tests/test_experiments.py"]
        + ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-k"]
        + [" or ".join([*chosen, TESTS["spo"]])],
        cwd=fork,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed, 1 skipped" in done.stdout, done.stdout


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
        earned = (batch.rewards > 0).repeat_interleave(batch.own_lengths)
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
    whole = batches[0].with_responses(
        (index, torch.tensor([k])) for index, n in enumerate((5, 1, 0, 4)) for k in range(n)
    )
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
    for steps in ("1", "2"):
        script.main([*argv, "--out", str(folder / "run"), "--steps", steps])
    args = script.parse_args(
        [
            *argv,
            "--out",
            str(folder / "none"),
            *words("--steps 3 --warmup_steps 1 --weight_decay 0.1"),
        ]
    )
    ranks = distributed.start(args.timeout, args.hsdp)
    models = script.build_models(args, script.load_rows(args).processor, ranks.device)
    script.load_models(args, models.by_role(), ranks)
    trained = script.make_trainables(args, models)["actor"]
    ours = {name: p for name, p in trained.module.named_parameters() if p.requires_grad}
    whole = {name: torch.nn.Parameter(p.full_tensor().clone()) for name, p in ours.items()}
    kinds = {True: [], False: []}
    for name, p in whole.items():
        kinds["layers" in name and p.ndim == 2].append(p)
    muon = torch.optim.Muon(kinds[True], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in kinds[False]]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, args.adam_beta2))
    for step, share in ((1, 0.5), (2, 1.0), (3, 1.0)):
        for number, (name, p) in enumerate(whole.items()):
            p.grad = torch.randn(p.shape, generator=seeded(100 * step + number))
            ours[name].grad = distribute_tensor(
                p.grad, ours[name].device_mesh, ours[name].placements
            )
        script.take_step(trained, step)
        for optimizer, rate in ((muon, 0.02), (adamw, 0.01)):
            for group in optimizer.param_groups:
                group["lr"] = share * rate
            optimizer.step()
    for name, p in ours.items():
        assert torch.allclose(p.full_tensor(), whole[name], atol=1e-5, rtol=1e-4), name


def test_muon_beside_adamw(qwen25, task, tmp_path):
    """On two ranks; torch.optim.Muon itself fails on FSDP's shards."""
    changed_script(ROOT / "tests" / "experiments" / "muon.diff", tmp_path)
    argv = flags(
        qwen25,
        task,
        tmp_path / "run",
        "--advantage grpo --samples_per_prompt 4 --save_every 1 --export_every 0",
    )
    more = words("--muon_lr 0.02 --actor_lr 0.01 --max_grad_norm 0")
    ranks.run(muon_by_torch, tmp_path, [*argv, *more], world=2)
    steps = [
        record
        for record in read_rows(tmp_path / "run" / "metrics.jsonl")
        if "train/actor_lr" in record
    ]
    assert [(step["step"], step["train/actor_lr"]) for step in steps] == [(1, 0.01), (2, 0.01)]


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
        monkeypatch.setitem(script.rollout.__globals__, "load_pixels", lambda *_: None)

    with user_error(
        "train/sampler_gap 0.* is above 0.001: .*If the sampler is your own: did it get the images"
    ):
        run("sampler", "--sampler generate", prepare=blind)


def test_another_kind_of_look(run, qwen25, task):
    """PAPO's second look is at images that Pillow blurs: their log-probs, by Hugging Face's model."""
    script, steps, batches = run(
        "look", "--perception_coef 0.01 --perception_blur 0.1 --actor_lr 0 --steps 2"
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
            images = [Image.open(path).convert("RGB") for path in prompt.images]
            blurred = [
                image.filter(ImageFilter.GaussianBlur(0.1 * max(image.size))) for image in images
            ]
            pixels = torch.cat([env.processor.family.patches(image)[0] for image in blurred])
            with torch.no_grad():
                logits = logits_of(model, prompt, tokens, env.processor, pixels)
            assert torch.allclose(actual[i], token_logprobs(logits, tokens), atol=1e-4)
        assert step["train/perception_kl"] > 0


def lists_by_prompt(batch, values: torch.Tensor) -> list[list[torch.Tensor]]:
    """A tensor (N,) as one list of samples for each prompt, in the order of their numbers."""
    lists = [[] for _ in batch.prompts]
    for index, part in zip(batch.prompt_index.tolist(), batch.split(values)):
        lists[index].append(part)
    return lists


def with_demonstrations(task: Path, folder: Path) -> str:
    """The task's rows, all but the third with a demonstration."""
    rows = read_rows(task / "train.jsonl")
    for k, row in enumerate(rows):
        row["images"] = [str(task / image) for image in row["images"]]
        if k != 2:
            row["demonstration"] = f"there are {k} circles, as one sees"
    return write_rows(folder / "demonstrations.jsonl", rows)


def test_a_demonstration_is_one_more_sample(run, qwen25, task, tmp_path):
    """Of those that its row has; its term of the loss is that of the paper."""
    data = with_demonstrations(task, tmp_path)
    _, steps, batches = run("luffy", "--data", data, "--prompts_per_step 8 --minibatches 1")
    processor = start(qwen25, data).processor
    for step, batch in zip(steps, batches):
        foreign = lists_by_prompt(batch, batch.foreign)
        for prompt, group, are_foreign in zip(
            batch.prompts, lists_by_prompt(batch, batch.tokens), foreign
        ):
            text = prompt.row.get("demonstration")
            assert [bool(part.any()) for part in are_foreign] == [False] * 4 + [True] * bool(text)
            assert all(part.all() == part.any() for part in are_foreign)
            if text:
                assert processor.decode([group[4]]) == [text]
        # before the first update of a step the ratio of the others is 1
        p = batch.logprobs.exp()
        terms = torch.where(batch.foreign, p / (p + 0.1), torch.ones_like(p))
        expected = -(batch.advantages * terms).mean()
        assert step["train/policy_loss"] == pytest.approx(float(expected), abs=1e-5)
        assert step["train/sampler_gap"] < ROUNDING
    assert len(batches[0]) == 4 * 8 + 7
    assert float(batches[0].advantages[batches[0].foreign].abs().max()) > 0
    actor = start(qwen25, data).actor
    assert (ppo.logprobs_of(actor, batches[0]) - batches[0].old_logprobs).abs().max() < ROUNDING


def test_samples_of_noisy_images_are_trained_on_the_clean_ones(run, qwen25, task):
    """Drawn from images whose noise fades, and scored after the clean ones."""
    script, steps, batches = run("noisy", "--noisy 2")
    batch, env = batches[0], start(qwen25, task / "train.jsonl", "--max_new_tokens 6")
    number = batch.sample_number.repeat_interleave(batch.own_lengths)
    assert torch.equal(batch.foreign, number >= 2)
    assert batch.in_policy_loss.all()
    clean = dataclasses.replace(batch.with_responses([]))
    images = image_changes.reread_images(
        clean,
        env.actor.model,
        env.processor,
        image_changes.at_random(
            script.add_noise, 0.5 * (1 - 1 / (1 + math.exp(20))), env.args.seed
        ),
    )
    for prompts, stream, first in ((clean, ppo.TRAIN, 0), (images, ppo.JUDGE + 1, 2)):
        sampling = dataclasses.replace(env.sampling, stream=stream)
        wanted = ppo.rollout(env.actor, prompts, sampling, 2)
        groups = [group[first : first + 2] for group in lists_by_prompt(batch, batch.tokens)]
        for ours, theirs in zip(groups, lists_by_prompt(wanted, wanted.tokens)):
            assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]
    assert (ppo.logprobs_of(env.actor, batch) - batch.old_logprobs).abs().max() < ROUNDING
    assert all(step["train/sampler_gap"] < ROUNDING for step in steps)


@pytest.mark.parametrize("teacher_in", marked(["advantage", "loss"]))
def test_a_student_sees_less_than_its_teacher(run, qwen25, teacher_in):
    """Log-probs of the policy after masked images and of the teacher after whole ones, by Hugging
    Face's model."""
    teacher = f"--teacher_model self --teacher_in {teacher_in} --student_images 0.5"
    _, (step, _), (batch, _) = run("student_images", teacher)
    model = hugging_face(qwen25)
    mask = image_changes.at_random(image_changes.mask, 0.5, 0)
    processor = Processor(qwen25)
    gaps = []
    for i, (index, tokens) in enumerate(responses_of(batch)):
        prompt, seen = batch.prompts[index], []
        for change in (mask, image_changes.unchanged):
            pixels = load_pixels(prompt, processor, change, (batch.draws[index], 0))
            with torch.no_grad():
                logits = logits_of(model, prompt, tokens, processor, pixels)
            seen.append(token_logprobs(logits, tokens))
        masked, whole = seen
        assert torch.allclose(batch.split(batch.logprobs)[i], masked, atol=1e-4)
        assert bool(prompt.images) == bool((masked - whole).abs().max() > 1e-4)
        if teacher_in == "advantage":
            actual = batch.split(batch.teacher_logprobs)[i]
            assert torch.allclose(actual, whole, atol=1e-4)
            gaps.append(masked - whole)
    if gaps:
        assert step["train/teacher_kl"] == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-4)
    assert step["train/teacher_kl"] ** 2 > 1e-8


@pytest.mark.parametrize("in_turns", marked([False, True]))
def test_branches_begin_like_the_first_sample(run, in_turns):
    """Up to its most surprising token, in conversations that of the first turn."""
    more = [OBSERVING.replace("Costly", "Waiting").replace("gigpo", "grpo"), '["a","e","r"]']
    _, steps, batches = run("branch", "--branches 2", *(more if in_turns else []))
    differ = False
    for batch in batches:
        texts = lists_by_prompt(batch, batch.tokens)
        turns = [parts[0] for parts, k in zip(batch.turns, batch.sample_number) if k == 0]
        for tokens, logps, turn in zip(texts, lists_by_prompt(batch, batch.logprobs), turns):
            assert len(tokens) == 6
            cut = int(logps[0][: len(turn)].argmin())
            for branch, its_logps in zip(tokens[4:], logps[4:]):
                assert branch[:cut].tolist() == tokens[0][:cut].tolist()
                assert torch.equal(its_logps[:cut], logps[0][:cut])
                differ = differ or branch.tolist() != tokens[0].tolist()
        assert not batch.foreign.any()
    assert differ
    assert all(step["train/sampler_gap"] < ROUNDING for step in steps)


EARNS_BY_PICTURES = """
def score(prompts, responses, references, labels, images):
    return [len(set(text)) / 10 if files else 0.0 for text, files in zip(responses, images)]
"""


def test_replay_takes_the_places_of_samples_without_an_advantage(run, tmp_path):
    (tmp_path / "reward.py").write_text(EARNS_BY_PICTURES)
    reward = f"--reward {tmp_path / 'reward.py'}:score --prompts_per_step 8 --minibatches 4"
    _, _, (first, second) = run("replay", "--replay 2", reward)

    def texts(batch, wanted: torch.Tensor) -> set[tuple]:
        parts = zip(batch.prompt_index.tolist(), batch.split(batch.tokens), batch.split(wanted))
        return {
            (batch.prompts[index].text, *tokens.tolist())
            for index, tokens, are_wanted in parts
            if are_wanted.all()
        }

    assert not first.foreign.any()
    # two rows show no picture, and their samples earn nothing
    assert 0 < len(first) <= 6 * 4
    assert all(prompt.images for prompt in first.prompts)
    replayed = texts(second, second.foreign)
    fresh = int(sum(part.logical_not().all() for part in second.split(second.foreign)))
    assert len(second) == fresh + min(8 * 4 - fresh, len(first))
    assert replayed and replayed <= texts(first, ~first.foreign)
    assert second.in_policy_loss.all()


def test_a_sample_is_compared_with_what_its_row_earned(run):
    _, _, batches = run("spo", "--advantage spo --samples_per_prompt 1 --prompts_per_step 8")
    known = {}
    for batch in batches:
        centred = []
        for prompt, reward, length in zip(
            batch.prompts, batch.rewards.tolist(), batch.own_lengths.tolist()
        ):
            earlier = known.setdefault(prompt.source, [])
            centred += [reward - (sum(earlier) + 0.5) / (len(earlier) + 1)] * length
            earlier.append(reward)
        mean, deviation = statistics.fmean(centred), statistics.stdev(centred)
        wanted = [(value - mean) / deviation for value in centred]
        assert batch.advantages.tolist() == pytest.approx(wanted, abs=1e-4)
    assert {len(rewards) for rewards in known.values()} == {2}


OBSERVING = (
    f"--env {ROOT / 'tests' / 'talkers.py'}:Costly --reward env --advantage gigpo --max_new_tokens 24 "
    "--max_reply_tokens 200 --max_tokens_per_pack 900 --env_workers 0 --stop_strings"
)


def test_turns_behind_the_same_observation_are_compared(run):
    """By a loop over the turns; beside the whole samples."""
    _, _, batches = run("gigpo", OBSERVING, '["a","e","r"]')
    for batch in batches:
        turns, samples = {}, {}
        for i, talk in enumerate(batch.conversations):
            index, rewards = int(batch.prompt_index[i]), list(talk.rewards)
            bounds = [0, *talk.tokens_before, int(batch.own_lengths[i])]
            rewards += [0.0] * (len(bounds) - 1 - len(rewards))  # of a turn that was cut
            samples.setdefault(index, []).append((i, sum(rewards)))
            for k, content in enumerate([talk.opening, *talk.replies]):
                seen = turns.setdefault((index, str(content)), [])
                seen.append(((i, bounds[k], bounds[k + 1]), sum(rewards[k:])))
        wanted = [torch.zeros(n, dtype=torch.float64) for n in batch.own_lengths.tolist()]
        compared = [
            [((i, 0, len(wanted[i])), reward) for i, reward in group] for group in samples.values()
        ]
        for group in [*compared, *turns.values()]:
            values = [value for _, value in group]
            if len(group) > 1 and max(values) - min(values) > 1e-6:
                for (i, begin, end), value in group:
                    standard = (value - statistics.fmean(values)) / (
                        statistics.stdev(values) + 1e-6
                    )
                    wanted[i][begin:end] += standard
        assert torch.allclose(batch.advantages.double(), torch.cat(wanted), atol=1e-4)
        assert any(len({i for (i, *_), _ in group}) > 1 for group in turns.values())


def live(folder: Path, name: str, argv: list[str]) -> None:
    """In every rank: a run of a changed script."""
    samples_of_every_step()
    script = imported(folder / SCRIPT, f"experiment_{name}")
    if name == "gigpo":
        script.losses = imported(folder / FORMULAS, "experiment_gigpo_losses")
    script.main(argv)


@pytest.mark.slow
def test_methods_of_the_field_are_the_same_on_two_ranks(qwen25, task, tmp_path):
    more = {
        "branch": ["--branches 2"],
        "gigpo": [OBSERVING, '["a","e","r"]'],
        "luffy": ["--data", with_demonstrations(task, tmp_path)],
        "noisy": ["--noisy 2"],
        "replay": ["--replay 2 --prompts_per_step 8 --steps 2"],
        "spo": ["--advantage spo --steps 2"],
        "student_images": ["--student_images 0.5 --teacher_model self"],
    }
    assert more.keys() == set(METHODS)
    common = "--steps 1 --save_every 0 --export_every 0 --advantage grpo --samples_per_prompt 4 --log_samples 99"
    for name in METHODS:
        changed_script(ROOT / "tests" / "experiments" / f"{name}.diff", tmp_path / name)
    for world in (1, 2):
        runs = [
            (
                live,
                tmp_path / name,
                name,
                flags(qwen25, task, tmp_path / name / str(world), common, *words),
            )
            for name, words in more.items()
        ]
        ranks.run(ranks.in_turn, *runs, world=world)
    for name in METHODS:
        assert_same_run(tmp_path / name / "1", tmp_path / name / "2")
