"""PPO for vision-language models, one process per GPU.

    torchrun --nproc_per_node 8 train_ppo_vl.py --model Qwen/Qwen2.5-VL-7B-Instruct --data a.jsonl
    torchrun --nproc_per_node 2 train_ppo_vl.py  # no flags: the embedded toy (launch/toy.py)
    python train_ppo_vl.py --help                # flags by stage: those that most runs touch

One step, in the order of `main`:

    prompts + images -> rollout -> rewards (meanwhile log-probs of reference and teacher, values)
                     -> advantages -> update critic -> update actor -> report

What happens in common/, in the order in which a step needs it:

    rollout.py             samples responses, with KV slots that are refilled as samples end
    logprobs.py            the distribution of the next token, the same for sampling and training
    rewards/sources.py     calls your reward, and collects the rewards; if a call has raised, ends every
                           rank with a message
    losses.py              formulas: advantages, the clipped ratio, KL
    buffers.py             Batch: the samples of a step; Pack: those of one forward pass
    model/packs.py         gives each rank its packs, and the image features that these need
    model/vlm.py           puts image features into a packed sequence
    model/attention.py     lets each token see its own sample; fills the KV cache
    checkpoint.py          saves in the background; resumes from the newest undamaged checkpoint

Shapes: G prompts and S samples in a step, with N response tokens in all; L tokens in a pack, T of
them response tokens and M image tokens; P prompt tokens, H hidden size, V vocabulary, B slots that
decode together.

Invariants, each with a test:
* Every rank holds the text of all samples, so advantages and their statistics need no all-reduce.
  Images and their features stay on the rank that decoded them, unless another rank trains on them.
* A loss is a sum over response tokens, each with a coefficient that is computed over all ranks. The
  number of ranks and the way samples are packed affect only rounding.
* The model that samples is the model that is trained: same weights, positions and `Sampling`.
* Noise and data order are functions of (seed, counters); there is no generator state.
* Whether a collective runs never depends on what could differ between ranks.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also with PYTHONSAFEPATH

from common.ground import standins, versions

versions.check()
standins.for_help()  # --help does not wait for the imports below

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import checkpoint, distributed, flags, identity, logging, losses, run_folder
from common.buffers import EMPTY, Batch, Pack
from common.data.loader import (
    Drawn,
    PromptLoader,
    batches_in_order,
    draw_batches,
    draw_by_weights,
    repeated_rows,
    shares_of,
)
from common.data.overlap import tell_shared_rows
from common.data.processor import Processor, answer_frame
from common.data.rows import Prompt, RowArgs, count_rows, load_prompts, name_tasks, parse_columns
from common.envs import environments
from common.flags import flag
from common.ground import process, toy
from common.ground.files import UserError, check_form
from common.looks import further_losses, image_changes
from common.looks.further_losses import PtxLoss
from common.looks.teacher import Teacher, TeacherArgs, update_ema_teacher
from common.memory import budget, memory
from common.memory.recompute import explain_memory
from common.model import adapters, build, experts, fsdp, packs, vlm, weights
from common.model.policy import (
    Critic,
    Policy,
    exact_kl_of,
    logprobs_and_entropy_of,
    logprobs_of,
    values_of,
)
from common.reports import records
from common.rewards import judgements, reward_models, sources
from common.rollout import prompts_together, rollout
from common.sampling import Environment, Sampling
from common.user_code import load_function, with_table

Trainables = dict[str, fsdp.Trainable]  # by role
# streams of sampling noise: a prompt that occurs in two of them gets independent samples
TRAIN, EVAL, JUDGE = 0, 1, 2


def main(argv: list[str] | None = None) -> logging.Metrics:
    """Train, or only evaluate (--eval_only). Returns the last metrics."""
    args = parse_args(argv)
    run_folder.leave_if_stopped(args.out)
    programs, problem = distributed.attempt(load_programs, args)  # before a GPU is touched
    ranks = distributed.start(args.timeout, args.hsdp, args.rollout_shards, problem)
    reward, environment, weigh = programs
    rows = load_rows(args)
    fingerprint = identity.fingerprint_of(args)  # equal on all ranks
    identity.compare_rows(rows.all)
    check_rows(args, rows, reward, environment)
    args = run_folder.choose_folder(args, fingerprint)
    state = TrainState(args.kl_coef, history=torch.zeros(2, len(rows.train)))
    checkpoints = checkpoint.Checkpoints(args, state, fingerprint)
    models = build_models(as_begun(args, checkpoints), rows.processor, ranks.device)
    modules = models.by_role() | reward_modules(args, reward, rows, models.actor)  # on meta
    note_thoughts(reward, checkpoints)
    check_teacher_rows(args, rows, models.teacher)
    budget.fit(plan_memory(args, modules, rows, ranks.world), ranks)
    load_models(args, modules, ranks)

    trainables = make_trainables(args, models)
    exports = exported_models(args, trainables)
    checkpoints.resume(saved_roles(args, trainables, models), args.steps, IDENTITY)
    log = open_log(args, rows, state.step)
    sampling = sampling_of(args, rows.processor, ranks.device, models.teacher, environment)
    if not args.eval_only:  # an evaluation has nothing to save
        process.catch_signals()

    last = args.steps
    with checkpoints, open_loader(args, rows, state, weigh) as loader:
        for step in range(state.step, max(state.step, last) + 1):  # the number of finished steps
            # Between two steps: save, evaluate, export, stop. A resumed run starts here and does
            # whatever was left undone.
            checkpoints.save_if_due(step, last)
            if checkpoints.saved_to_stop(step, last):
                break
            update_ema_teacher(models.teacher, trainables["actor"])
            if evaluates_now(state, rows, args) and not log.has_evaluation(step):
                metrics, answers = evaluate(trainables, reward, rows, sampling, state, args)
                metrics |= evaluate_teacher(models.teacher, reward, rows, sampling, state, args)
                report_evaluation(log, metrics, answers, state)
            checkpoints.save_if_best(step, log.best_evaluation(args.keep_best))
            checkpoints.export_if_due(step, last, exports, rows.save_files)
            # a signal may have come meanwhile
            if step == last or args.eval_only or checkpoints.saved_to_stop(step, last):
                break

            # One step.
            begin_step(rows.ptx, step + 1, args)
            # prompts, responses, their rewards, log-probs (old, reference, teacher) and values
            batch, metrics = collect(models, loader, reward, sampling, state, args)
            checkpoints.commit_if_written()
            with logging.timer("advantages"):
                metrics |= compute_advantages(batch, state, args)
            metrics |= update_models(trainables, models, batch, step + 1, rows.ptx, args)
            move_reference(step + 1, models, args)
            advance(state, batch, metrics, rows, args)
            state.metrics |= performance(batch, models, metrics, args)
            report(log, batch, state, rows, checkpoints, args)  # logged before it is saved
            fsdp.check_skipped_updates(trainables)
            check_sampler(log, state, models.actor, args)

    log.close(state.step, last)
    return state.metrics


# -------------------------------------------------------------------------------------------------
# Flags that decide what a step computes. The others are in common/: rows, environments, rewards,
# perception and teachers beside what reads them; models, data, optimizers, checkpoints and runs in flags.py.
# -------------------------------------------------------------------------------------------------


class Estimator(NamedTuple):
    """How advantages are computed."""

    # losses.AdvantageInputs -> (N,) advantages before whitening, (N,) returns
    estimate: Callable
    has_critic: bool = False
    compares: bool = False  # the samples of a prompt with each other, at least two
    whiten: bool = False  # over the step, unless --advantages_norm says otherwise


class PolicyLoss(NamedTuple):
    """What the actor minimises."""

    # (losses.PolicyLossInputs, clip_low, clip_high) -> losses.PolicyLossOutput
    compute: Callable
    clip: tuple[float, float]  # how far the ratio may go below and above 1 (gmpo: in log space)
    aggregation: str = "token-mean"  # unless --loss_aggregation says otherwise


# To add an estimator or a loss, write a function and add an entry here.
ESTIMATORS = {
    "none": Estimator(losses.no_advantages),
    "gae": Estimator(losses.gae_estimate, has_critic=True, whiten=True),
    "bi_level_gae": Estimator(losses.bi_level_gae, has_critic=True, whiten=True),
    "reinforce": Estimator(losses.reinforce),
    "reinforce++": Estimator(losses.reinforce, whiten=True),
    "reinforce_baseline": Estimator(losses.dr_grpo, compares=True, whiten=True),
    "grpo": Estimator(losses.grpo, compares=True),
    "group_norm": Estimator(losses.grpo, compares=True),
    "turn_grpo": Estimator(losses.turn_grpo, compares=True),
    "gdpo": Estimator(losses.gdpo, compares=True),
    "dr_grpo": Estimator(losses.dr_grpo, compares=True),
    "rloo": Estimator(losses.rloo, compares=True),
    "remax": Estimator(losses.remax),
    "opo": Estimator(losses.opo, compares=True),
    "gpg": Estimator(losses.gpg, compares=True),
    "cpgd": Estimator(losses.cpgd),
}
POLICY_LOSSES = {
    "ppo": PolicyLoss(losses.ppo, clip=(0.2, 0.2)),
    "cpgd": PolicyLoss(losses.cpgd_loss, clip=(0.2, 0.2)),
    "gspo": PolicyLoss(losses.gspo, clip=(3e-4, 4e-4), aggregation="seq-mean-token-mean"),
    "gmpo": PolicyLoss(losses.gmpo, clip=(0.4, 0.4), aggregation="seq-mean-token-mean"),
    # low = 1: no lower bound, as a ratio is never negative
    "cispo": PolicyLoss(losses.cispo, clip=(1.0, 4.0)),
    # a soft gate instead of a clip
    "sapo": PolicyLoss(losses.sapo, clip=(0.0, 0.0), aggregation="seq-mean-token-mean"),
}


@dataclass(frozen=True)
class RolloutArgs:
    """rollout"""

    rollouts_per_step: int = flag(
        1,
        "rollouts per step: each takes an equal part of --prompts_per_step, and updates use the samples of "
        "all; must divide --prompts_per_step",
        low=1,
    )
    samples_per_prompt: int = flag(4, "samples per prompt", low=1)
    max_new_tokens: int = flag(512, "longest response, tokens", low=1)
    min_new_tokens: int = flag(
        0,
        "shortest response, tokens: until then, stop tokens are banned and stop strings have to wait",
    )
    temperature: float = flag(
        1.0,
        "sampling temperature; log-probs are taken at the same temperature everywhere",
        low=1e-6,
    )
    top_k: int = flag(
        0,
        "sample from the k likeliest tokens; 0: off. Biases the gradient, which assumes "
        "the full distribution",
    )
    top_p: float = flag(
        1.0,
        "keep the smallest set with this probability; 1: off. Biases the gradient too",
        low=1e-6,
        high=1,
    )
    stop_strings: str = flag(
        "",
        "JSON list of strings that end a response when they appear in it",
        check=flags.parse_stop_strings,
    )
    eval_samples: int = flag(
        1,
        "samples per held-out prompt; 1: greedy; more: drawn at --temperature, for mean rewards "
        "and pass@k",
        low=1,
    )
    replay_experts: bool = flag(
        True,
        "mixtures of experts: updates reuse the experts recorded while sampling, so that the model that is "
        "trained is the one that sampled; the router still learns",
    )


@dataclass(frozen=True)
class AlgorithmArgs:
    """algorithm"""

    advantage: str = flag(
        "auto",
        "advantage estimator. auto: gae, or none with --reward none. gae and bi_level_gae (over turns, "
        "then over their tokens) train a critic; "
        "grpo (alias group_norm), turn_grpo (turn by turn), gdpo, dr_grpo, rloo, opo, "
        "gpg and reinforce_baseline compare the samples of a prompt, at least 2; remax adds one greedy "
        "sample. gdpo compares each source of rewards separately; with a single source, each of its "
        "components except reward and parsed (env: the reward). none: rewards are only measured, "
        "and learning is from a teacher",
        choices=("auto", *ESTIMATORS),
    )
    gamma: float = flag(
        1.0, "discount per token (gae, bi_level_gae, reinforce, reinforce++, remax)", high=1
    )
    turn_gamma: float = flag(1.0, "discount per turn of bi_level_gae", high=1)
    gae_lambda: float = flag(
        0.95,
        "lambda of gae and bi_level_gae: of the critic's targets, and of the advantages",
        high=1,
    )
    gae_lambda_policy: float = flag(
        -1.0,
        "lambda of gae's advantages alone (VAPO); -1: --gae_lambda",
        high=1,
        off=-1,
    )
    gae_alpha: float = flag(
        0.0,
        "above 0: the lambda of gae's advantages is 1 - 1 / (alpha x tokens of the response), at "
        "least 0, so that it grows with the response (VAPO: 0.05); 0: off",
    )
    advantages_norm: str = flag(
        "auto",
        "whiten advantages over the step. auto: on for gae, bi_level_gae, reinforce++ and "
        "reinforce_baseline",
        choices=("auto", "on", "off"),
    )
    advantage_clip: float = flag(0.0, "largest absolute advantage; 0: off")
    reward_norm: bool = flag(
        False, "normalize rewards by their mean and standard deviation since the start of the run"
    )
    reward_clip: float = flag(0.0, "largest absolute reward, after --reward_norm; 0: off")
    overlong_buffer: int = flag(
        0,
        "tokens before --max_new_tokens over which a length penalty grows (DAPO); 0: off",
    )
    overlong_factor: float = flag(1.0, "length penalty at --max_new_tokens, with --overlong_buffer")
    dynamic_sampling: int = flag(
        0,
        "replace prompts whose samples all earn the same reward, in at most this many rollouts per step "
        "(DAPO); 0: off",
    )
    critic_model: str = flag(
        "",
        "model folder of the critic, with its value head if it has one; empty: the actor's",
        paths=True,
    )
    export_critic: bool = flag(
        False, "export the critic as well, to <out>/export_critic: a --critic_model of other runs"
    )
    reference_model: str = flag(
        "",
        "model folder of the frozen reference, loaded only with --kl_coef; empty: the actor's",
        paths=True,
    )
    reference_every: int = flag(
        0,
        "steps between copies of the actor's weights into the reference; 0: never",
    )
    kl_coef: float = flag(0.0, "weight of the KL to the reference; 0: no reference is loaded")
    kl_in: str = flag("reward", "where the KL acts", choices=("reward", "loss"))
    kl_estimator: str = flag(
        "auto",
        "auto: k1 with --kl_in reward, as only k1 gives the gradient of the KL there; k3+ with --kl_in "
        "loss, where k2 and full (exact, over the whole vocabulary, for one more forward pass of the "
        "reference) are right too, and k1 is refused: its gradient averages to zero",
        choices=("auto", "k1", "k2", "k3", "abs", "full", "k1+", "k3+", "abs+"),
    )
    kl_target: float = flag(
        0.0,
        "adapt the weight of the KL to reach this KL per token; 0: the weight is fixed",
    )
    kl_horizon: int = flag(
        10000, "samples over which the adaptive weight changes by at most about a fifth", low=1
    )
    loss_aggregation: str = flag(
        "auto",
        "how token losses are averaged, or summed (token-sum: not divided). auto: seq-mean-token-mean for "
        "gspo, gmpo and sapo, which are losses per sequence, token-mean for the others",
        choices=("auto", *losses.AGGREGATIONS),
    )
    policy_loss: str = flag(
        "ppo",
        "loss of the actor",
        choices=tuple(POLICY_LOSSES),
    )
    clip_low: float = flag(
        -1.0,
        "how far below 1 the ratio is clipped; -1: the loss's default: ppo and cpgd 0.2, gspo 3e-4, "
        "gmpo 0.4 (in log space), cispo 1 (no clip)",
        high=1,
        off=-1,
    )
    clip_high: float = flag(
        -1.0,
        "how far above 1 the ratio is clipped; more than --clip_low is clip-higher; -1: the loss's "
        "default: ppo and cpgd 0.2, gspo 4e-4, gmpo 0.4, cispo 4",
        off=-1,
    )
    dual_clip: float = flag(
        3.0,
        "bound of the ratio where the advantage is negative (ppo); above 1, or 0: off",
        low=1 + 1e-6,
        off=0,
    )
    value_clip: float = flag(0.2, "how far a value may move in a step; 0: any distance")
    entropy_coef: float = flag(
        0.0, "weight of the entropy bonus; below 0 it is a penalty", low=-flags.LARGEST
    )
    high_entropy_ratio: float = flag(
        1.0,
        "use only this fraction of each response's tokens, those of highest entropy, in the policy "
        "loss; below 1 costs one more forward pass",
        low=1e-6,
        high=1,
    )
    mask_truncated: bool = flag(
        False,
        "leave responses that were cut off by a limit (of tokens; with --env also of turns and "
        "replies) out of the policy loss (DAPO's overlong filtering); they stay in the value, KL and "
        "entropy losses and in the statistics of rewards",
    )
    importance_cap: float = flag(
        0.0,
        "above 0: recompute old log-probs in a forward pass instead of taking the sampler's, "
        "and weight each token by its recomputed probability over the sampler's, capped at this value "
        "(2 is usual)",
    )


@dataclass(frozen=True)
class UpdateArgs:
    """update"""

    epochs: int = flag(1, "passes over the samples of a step", low=1)
    minibatches: int = flag(
        1,
        "optimizer updates per pass; must divide --prompts_per_step",
        low=1,
    )
    actor_lr: float = flag(1e-6, "learning rate of the actor")
    critic_lr: float = flag(9e-6, "learning rate of the critic")
    critic_epochs: int = flag(
        0, "passes of the critic over the samples of a step; 0: as many as --epochs"
    )
    critic_warmup_steps: int = flag(0, "first steps that update only the critic")
    target_kl: float = flag(
        0.0,
        "end a step's actor updates at the first whose KL(old, new) per token exceeds this, without "
        "applying it; 0: off",
    )
    aux_loss_coef: float = flag(
        0.0,
        "weight of the load-balancing loss of MoE models, actor and critic; above 0 it "
        "costs one more forward per update",
    )
    sampler_gap_limit: float = flag(
        -1.0,
        "largest train/sampler_gap, the mean difference between the log-probs of sampler and "
        "training: above it, the first step or --eval_only ends the run, and later steps warn; -1: "
        "0.1, in float32 0.001; 0: off",
        low=-1,
    )
    ema_beta: float = flag(
        0.0,
        "decay of a running average of the actor's weights, say 0.992, updated after each applied "
        "update; evaluations use the average, exports have both; 0: no average",
        high=0.999999,
    )
    offload: str = flag(
        "none",
        "what to keep in host memory while it is not used. optimizer: the optimizers' states; all: "
        "reference, teacher and reward models too",
        choices=("none", "optimizer", "all"),
    )


@dataclass(frozen=True)
class Args(
    flags.ModelArgs,
    flags.DataArgs,
    RowArgs,
    RolloutArgs,
    environments.EnvArgs,
    sources.RewardArgs,
    AlgorithmArgs,
    image_changes.PerceptionArgs,
    TeacherArgs,
    UpdateArgs,
    flags.OptimArgs,
    flags.CheckpointArgs,
    flags.RunArgs,
):
    """All flags, and what follows from them."""

    @property
    def prompts_per_rollout(self) -> int:
        return self.prompts_per_step // self.rollouts_per_step

    @property
    def longest_response(self) -> int:
        """The longest response in tokens, with the replies of an environment."""
        return self.max_new_tokens + (self.max_reply_tokens if self.env else 0)

    @property
    def longest(self) -> int:
        """The longest prompt and response together, in tokens."""
        return self.max_prompt_tokens + self.longest_response

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def exact_kl_in_loss(self) -> bool:
        return self.kl_in_loss and self.kl_estimator == "full"

    def automatic(self) -> dict:
        advantage = "none" if self.reward == "none" else "gae"
        estimator = ESTIMATORS[advantage if self.advantage == "auto" else self.advantage]
        policy_loss = POLICY_LOSSES[self.policy_loss]
        clip_low, clip_high = policy_loss.clip
        return {
            "advantage": advantage,
            "advantages_norm": "on" if estimator.whiten else "off",
            "gae_lambda_policy": self.gae_lambda,
            "loss_aggregation": policy_loss.aggregation,
            "clip_low": clip_low,
            "clip_high": clip_high,
            "kl_estimator": "k3+" if self.kl_in == "loss" else "k1",
            "critic_epochs": self.epochs,
        }


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags override --config, which overrides defaults. Without --model and --config the run is
    the toy's.

    Raises:
        UserError: an unknown flag, a bad value, or a combination that cannot work.
    """
    args = flags.parse(Args, __doc__, argv, toy=("describe", "args.json"))
    check_args(args)
    return args


# -------------------------------------------------------------------------------------------------
# Programs of the user, and data: checked rows
# -------------------------------------------------------------------------------------------------


def load_programs(args: Args) -> tuple[sources.RewardMix, Environment | None, Callable | None]:
    """The sources of rewards, the environment, and the function of --curriculum; runs the user's code.
    Raises UserError, also if a model beside --model is missing: the rows may take minutes to read."""
    reward, weigh = sources.load_rewards(args), None
    environment = environments.load_environment(args, args.max_prompt_tokens)
    if args.curriculum:
        weigh, *_ = load_function("--curriculum", args.curriculum, "rows, samples, rewards")
    models = [
        source.spec.partition(":")[2] for source in reward.sources if source.kind in ("grm", "rm")
    ]
    for name in (*models, args.critic_model, args.reference_model, args.teacher_model):
        if name not in ("", "self", "ema"):
            weights.resolve_folder(name, weights=False)
    return reward, environment, weigh


@dataclass
class Rows:
    """The data of a run, the same on every rank: checked rows, and the processor of the actor's
    checkpoint."""

    processor: Processor
    # an export's judge.json; None: the rows are no judgements
    settings: judgements.JudgeSettings | None
    train_sets: list[list[Prompt]]
    held_out: list[Prompt]
    ptx: PtxLoss | None  # on --ptx_data

    @cached_property
    def train(self) -> list[Prompt]:
        return list(itertools.chain(*self.train_sets))

    @cached_property
    def all(self) -> list[Prompt]:
        return self.train + self.held_out

    def save_files(self, folder: Path) -> None:
        """Write the files of an export beside its weights and config.json."""
        self.processor.save(folder, vars(self.settings) if self.settings else {})


def load_rows(args: Args) -> Rows:
    """Read the checkpoint's processor and all rows; those of the embedded toy may have to be written first.

    Raises:
        UserError: on every rank; bad checkpoint files, or bad rows, with file and line.
    """
    distributed.once_per_machine(toy.write_if_missing, args.model)
    with distributed.raise_on_all_ranks():
        processor = Processor(weights.resolve_folder(args.model, weights=False), args)
        processor.check_options()
        settings = judgements.JudgeSettings.to_train(processor)
        train_sets = load_files(args.data, args, processor, settings)
        held_out = load_files(args.eval_data, args, processor, settings)
        if args.row_kind == "judgements":
            settings.note_training(row for rows in train_sets for row in rows)
        ptx = load_ptx(args, processor)
        position = itertools.count()
        for part in train_sets:
            part[:] = [replace(row, position=next(position)) for row in part]
        judge = settings if args.row_kind == "judgements" else None
        rows = Rows(processor, judge, train_sets, list(itertools.chain(*held_out)), ptx)
        if not args.env:  # which may read any column
            asked = [[(row, row.reference) for row in part] for part in (rows.train, rows.held_out)]
            tell_shared_rows(*asked)
    return rows


def load_files(
    spec: str, args: Args, processor: Processor, settings: judgements.JudgeSettings
) -> list[list[Prompt]]:
    """The rows of each file of --data or --eval_data, numbered across all files, bad ones included; a
    judgement is a question in either order. Raises UserError with file and line."""
    columns, system = parse_columns(args.columns), args.system_prompt
    sets, before = [], 0
    paths = [path for path, _ in flags.parse_datasets(spec)]
    for path in paths:
        if args.row_kind == "prompts":
            rows = load_prompts(path, processor, args, columns, system, args.env)
            questions_per_row = 1
        else:
            examples = judgements.load_judgements(path, processor, settings, args)
            rows = [example.prompt for example in examples]
            questions_per_row = len(judgements.ORDERS)
        sets.append([replace(row, index=before + row.index) for row in rows])
        before += questions_per_row * count_rows(path)
    return name_tasks(sets, paths)


def check_rows(
    args: Args,
    rows: Rows,
    reward: sources.RewardMix,
    environment: Environment | None,
) -> None:
    """Raises UserError if rows cannot be scored or have no images to change, and see `check_environment`."""
    imageless = rows.train and not environment and not any(row.grids for row in rows.train)
    if imageless and args.masks_images:
        raise UserError("--perception_* mask images, and no row of --data has any")
    if args.curriculum and 0 < len(rows.train) < args.prompts_per_rollout:
        raise UserError(
            f"--curriculum draws {args.prompts_per_rollout} different rows for a rollout, and --data has "
            f"{len(rows.train)}: use fewer --prompts_per_step"
        )
    reward.check_rows(rows.all)
    reward.report_constant_answers(rows.train or rows.held_out)
    if [source.spec for source in reward.sources] == ["boxed"]:
        distributed.say_once(
            r"--reward boxed (the default): the last \boxed{...} of a response against its row's answer"
        )
    check_environment(rows, reward, environment)


def check_environment(
    rows: Rows, reward: sources.RewardMix, environment: Environment | None
) -> None:
    """Raises UserError: rewards and the environment do not go together, or the environment does not work
    with this model."""
    kinds = {source.kind for source in reward.sources}
    if environment:
        if "rm" in kinds:
            raise UserError(
                "--reward rm: scalar models do not see conversations; use grm: with --env"
            )
        if "grm" in kinds and environment.shows_images:
            raise UserError(
                "--reward grm: a judge reads conversations, but sees no images of an environment (set "
                "pictures = False in a class that never shows images)"
            )
        environments.check_model(environment, rows.processor)
    elif "env" in kinds:
        raise UserError("--reward env needs an environment that gives rewards: --env file.py:Class")


def load_ptx(args: Args, processor: Processor) -> PtxLoss | None:
    """The next-token loss on --ptx_data, if any: responses to imitate, as train_grm_vl.py reads them. They
    get no system prompt. Raises UserError with file and line."""
    if not args.ptx_data:
        return None
    settings = judgements.JudgeSettings.to_train(processor)
    settings.system_instruction = ""
    limit = "--max_tokens_per_pack"
    bounds = replace(args, max_prompt_tokens=args.max_tokens_per_pack, limit_flag=limit)
    try:
        frame = answer_frame(processor)
        rows = judgements.load_judgements(args.ptx_data, processor, settings, bounds, frame=frame)
    except UserError as error:
        raise UserError(f"--ptx_data {error}") from error
    for row, *_ in rows:
        if row.label != judgements.RESPONSE:
            raise UserError(f"--ptx_data {row.source}: a judgement, not a response to imitate")
    return PtxLoss(
        rows=rows,
        loader=PromptLoader(processor, args),
        batch=args.ptx_batch,
        coef=args.ptx_coef,
        labels=args.ptx_labels,
        seed=args.seed,
    )


def open_loader(
    args: Args, rows: Rows, state: "TrainState", weigh: Callable | None = None
) -> PromptLoader:
    """The training prompts in order, or drawn by ``weigh`` of --curriculum, continuing where the run
    stopped."""
    if rows.ptx:
        rows.ptx.scheduled = state.ptx_rows
    batches = draw_batches(
        rows.train_sets,
        shares_of(args.data, rows.train_sets),
        args.prompts_per_rollout,
        args.seed,
        state.rows_drawn,
    )
    if weigh and rows.train:
        batches = draw_by_history(args, weigh, rows.train, state)
    return PromptLoader(rows.processor, args, batches)


def draw_by_history(
    args: Args, weigh: Callable, rows: list[Prompt], state: "TrainState"
) -> Iterator[Drawn]:
    """Endless batches of rows, by the weights of --curriculum. Each is drawn while the step before it
    runs; ``state.ahead`` keeps it, so that a resumed run begins with the same one. Raises UserError."""
    size = args.prompts_per_rollout
    weigh = with_table(weigh, [row.row for row in rows])

    def draw(start: int) -> list[int]:
        weights = weigh(*state.history.numpy().copy())
        return draw_by_weights(weights, len(rows), size, (args.seed, start))

    for start in itertools.count(state.rows_drawn, size):
        if not state.ahead:
            state.ahead = distributed.run_on_main(f"--curriculum {args.curriculum}", draw, start)
        yield [rows[k] for k in state.ahead], list(range(start, start + size))
        state.ahead = []


# -------------------------------------------------------------------------------------------------
# State: what a checkpoint contains besides models, and what must not change when a run goes on
# -------------------------------------------------------------------------------------------------


@dataclass
class TrainState:
    """What a resumed run needs besides weights and optimizer states. Each checkpoint contains it."""

    kl_coef: float  # weight of the KL
    moments: losses.RunningMoments = field(default_factory=losses.RunningMoments)
    step: int = 0  # finished steps
    rows_drawn: int = 0  # of --data, by all rollouts
    ptx_rows: int = 0  # of --ptx_data, for the updates so far
    passes: float = 0.0  # over the data
    pass_ended: bool = False  # in the last step
    dropped_prompts: int = 0  # because an image did not decode
    evaluations: int = 0
    metrics: logging.Metrics = field(default_factory=dict)  # of the last step
    # (2, rows of --data): the samples of each row, and the sum of their rewards
    history: Tensor = EMPTY
    ahead: list[int] = field(default_factory=list)  # the rows of the next batch, by --curriculum

    def state_dict(self) -> dict:
        history = self.history.numpy().tobytes().hex()  # a list of numbers would take seconds
        return vars(self) | {"moments": vars(self.moments), "history": history}

    def load_state_dict(self, saved: dict, changed: set[str]) -> None:
        """Restore what was saved, except what DEPENDS_ON flags that have ``changed``. Raises UserError:
        it is not what `state_dict` makes."""
        saved["moments"] = losses.RunningMoments(**saved["moments"])
        try:
            history = bytearray.fromhex(saved["history"])
        except ValueError as error:
            raise UserError(f"history: {error}") from error
        if len(history) == self.history.nbytes > 0:
            saved["history"] = torch.frombuffer(history, dtype=torch.float32).view(2, -1)
            check_form(saved["ahead"], [range(self.history.shape[1])], "ahead")
        else:  # other rows are bad now, or there are none
            del saved["history"], saved["ahead"]
        for name, value in saved.items():
            if changed.isdisjoint(DEPENDS_ON.get(name, ())):
                setattr(self, name, value)


def evaluates_now(state: TrainState, rows: Rows, args: Args) -> bool:
    """Whether the held-out rows are evaluated after this step."""
    due = logging.evaluation_due(state.step, args.steps, state.pass_ended, args)
    return due and bool(rows.held_out)


def advance(
    state: TrainState,
    batch: Batch,
    metrics: logging.Metrics,
    rows: Rows,
    args: Args,
) -> None:
    """Count a finished step: update the state, and add its counters to the metrics."""
    if len(batch.kl) and state.step >= args.critic_warmup_steps:
        metrics["train/kl_coef"] = state.kl_coef
        if args.kl_target:
            state.kl_coef = losses.adapt_kl_coef(
                state.kl_coef,
                float(batch.kl.mean()),
                args.kl_target,
                len(batch),
                args.kl_horizon,
            )
    if rows.ptx:
        state.ptx_rows = rows.ptx.scheduled
    state.step += 1
    passes = state.rows_drawn / max(1, len(rows.train))
    state.pass_ended = int(passes) > int(state.passes)
    state.passes = passes
    state.evaluations += evaluates_now(state, rows, args)
    for part in ("rollout", "train"):
        metrics |= {f"{part}/episode": state.passes, f"{part}/global_step": state.step}
    state.metrics = metrics


# The flags that identify a run: if one has changed, --resume auto refuses the checkpoint. A resumed run
# takes all others as they are now.
OF_REWARDS = "reward reward_recipe reward_combiner grm_question grm_opponents grm_mode env".split()
IDENTITY = {
    *flags.SHARED_IDENTITY,
    *OF_REWARDS,
    "thoughts",  # not a flag: judge.json says what reward models are shown
    *RowArgs.__annotations__,
    *AlgorithmArgs.__annotations__,
    *image_changes.PerceptionArgs.__annotations__,
    *TeacherArgs.__annotations__,
} - {"export_critic"}
# The parts of a saved state that depend on flags: if one of these has changed, the part begins anew.
DEPENDS_ON = {
    "kl_coef": ("kl_coef", "kl_target"),
    "moments": OF_REWARDS,
    "history": (*OF_REWARDS, "data"),
    "ahead": ("curriculum", "prompts_per_step", "rollouts_per_step", "data"),
    "rows_drawn": ("data",),
    "passes": ("data",),
    "pass_ended": ("data",),
    "ptx_rows": ("ptx_data",),
}


# -------------------------------------------------------------------------------------------------
# Models: built on meta, sharded here, filled from safetensors
# -------------------------------------------------------------------------------------------------


def sampling_of(
    args: Args,
    processor: Processor,
    device: torch.device,
    teacher: Teacher | None = None,
    environment: Environment | None = None,
) -> Sampling:
    """Sampling as the flags say. Ids that the teacher lacks are banned."""
    banned = processor.banned_mask()  # (V,)
    if teacher:
        banned[teacher.policy.processor.vocab_size :] = True
    return Sampling(
        keeps_experts=args.replay_experts,
        banned=banned.to(device),
        stop_ids=torch.tensor(processor.stop_ids, device=device),
        max_new_tokens=args.max_new_tokens,
        min_new_tokens=args.min_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stop_strings=flags.parse_stop_strings(args.stop_strings),
        seed=args.seed,
        stream=TRAIN,
        environment=environment,
        slots=args.slots,
        cuda_graphs=args.cuda_graphs,
    )


class Models(NamedTuple):
    """The models of the algorithm."""

    actor: Policy
    critic: Critic | None  # with gae
    reference: Policy | None  # with a KL; with adapters, by default, the actor itself
    teacher: Teacher | None = None  # its policy may be the actor itself

    def by_role(self) -> vlm.Modules:
        """Those that have weights of their own."""
        modules: vlm.Modules = {"actor": self.actor}
        teacher = self.teacher and self.teacher.policy
        others = {"critic": self.critic, "reference": self.reference, "teacher": teacher}
        for role, module in others.items():
            if module and module is not self.actor:
                modules[role] = module
        return modules


def build_models(args: Args, processor: Processor, device: torch.device) -> Models:
    """Actor, critic (with gae), reference (with a KL) and teacher, on meta; they will compute on
    ``device``.

    Raises:
        UserError: on every rank; a checkpoint is missing, or cannot serve in its role.
    """
    if args.cuda_graphs == "on" and device.type == "cpu":
        raise UserError("--cuda_graphs on needs a GPU, and torch sees none; leave it at auto")
    with distributed.raise_on_all_ranks():
        builder = build.Builder(args, device, args.longest)
        actor = Policy(builder.actor(), processor)
        if args.aux_loss_coef and not vlm.balances_by_loss(actor.model):
            raise UserError(
                f"--aux_loss_coef {args.aux_loss_coef}: {builder.folder} has no experts "
                "to balance, or balances them by a bias"
            )
        enable_replay(args, actor, device)
        critic = None
        if ESTIMATORS[args.advantage].has_critic:
            critic = Critic(builder.role(args.critic_model, head=False))
        reference = actor if args.kl_coef else None  # without its adapters
        if reference and (args.reference_model or not args.lora_rank):
            body = builder.role(args.reference_model, frozen=True)
            reference = Policy(body, processor).eval()
        return Models(actor, critic, reference, build_teacher(args, builder, actor))


def enable_replay(args: Args, actor: Policy, device: torch.device) -> None:
    """Let the actor replay its experts if the flags say so; the main rank prints why not."""
    if not args.replay_experts or not vlm.routers(actor.model):
        return
    if device.type != "cpu" and args.cuda_graphs != "off":
        distributed.say_once(
            "--replay_experts: updates choose their own experts, as recording them in CUDA graphs has not "
            "been tried on a GPU; --cuda_graphs off replays them"
        )
        return
    experts.hook_routers(actor.model)


def as_begun(args: Args, checkpoints: checkpoint.Checkpoints) -> Args:
    """The arguments as the run began: one from before there was --replay_experts goes on without it."""
    saved = checkpoints.saved
    if not saved or "replay_experts" in saved["fingerprint"]:
        return args
    checkpoints.fingerprint["replay_experts"] = False
    return replace(args, replay_experts=False)


def build_teacher(args: Args, builder: build.Builder, actor: Policy) -> Teacher | None:
    """The teacher of --teacher_model, if any, on meta. With adapters, `self` is the actor without
    them."""
    name, policy = args.teacher_model, actor
    if not name:
        return None
    if name not in ("self", "ema"):
        policy = Policy(*build.build_reader(name, actor.model, actor.processor, args)).eval()
    elif not args.lora_rank:
        policy = Policy(builder.role("", frozen=True), actor.processor).eval()
    return Teacher(policy, actor, args, args.offload)


def reward_modules(args: Args, reward: sources.RewardMix, rows: Rows, actor: Policy) -> vlm.Modules:
    """The reward models by the name of their source, on meta. Raises UserError: see
    `reward_models.build`."""
    return reward_models.build(
        reward,
        rows.all,
        actor,
        write=partial(write_critiques, args=args),
        offload=args.offload,
    )


def note_thoughts(reward: sources.RewardMix, checkpoints: checkpoint.Checkpoints) -> None:
    """Note which reward models are shown the thoughts of responses: in a run that began before there was a
    choice, all are."""
    saved = checkpoints.saved
    began_before = bool(saved) and "thoughts" not in saved["fingerprint"]
    noted = checkpoints.fingerprint["thoughts"] = {}
    for source in reward.sources:
        if isinstance(source.score, reward_models.RewardModel):
            settings = source.score.settings
            if began_before:
                settings.thoughts = True
            noted[source.name] = settings.reads_thoughts


def check_teacher_rows(args: Args, rows: Rows, teacher: Teacher | None) -> None:
    """Raises UserError: see `Teacher.check_rows`."""
    if teacher:
        teacher.check_rows(rows.all, with_env=bool(args.env))


def plan_memory(args: Args, modules: vlm.Modules, rows: Rows, ranks: int) -> budget.MemoryPlan:
    """The memory of a step on so many ranks. A rollout is planned with --slots or with a single slot;
    it uses more if memory is free."""
    prompt = budget.longest_prompt(rows.all)
    if args.env:  # a first observation may fill the prompt
        prompt = args.max_prompt_tokens
    longest = prompt + args.longest_response
    plan = budget.MemoryPlan(
        modules,
        shards=args.hsdp or ranks,
        args=args,
        offload=args.offload,
        longest=longest,
        group=prompt + args.samples_per_prompt * args.longest_response,
        updates=not args.eval_only,
    )
    if rows.ptx:
        plan.longest_target = budget.longest_example(rows.ptx.rows)
        plan.group = max(plan.group, plan.longest_target)
    # keys per token of a prompt and its n responses of L tokens: (P + n (P + L)) / (P + n L)
    if args.samples_per_prompt > 1:
        plan.keys = 1 + prompt / (prompt / args.samples_per_prompt + args.longest_response)
    if args.ema_beta:
        plan.held["actor", "average"] = plan.held["actor", "Adam"] // 2
    if args.exact_kl_in_loss:
        plan.in_use.append("reference")
    if args.teacher_in_loss:
        plan.in_use.append("teacher")
    slots = args.slots or 1
    plan.fixed["rollout"] = partial(plan.decoding, "actor", longest, slots)
    for role in modules:
        if role.startswith("grm") and args.grm_mode == "critique":
            length = longest + args.grm_max_new_tokens
            plan.fixed[f"{role} writes"] = partial(plan.decoding, role, length, slots, role)
        elif role == "teacher" and args.eval_only:
            plan.fixed["teacher answers"] = partial(plan.decoding, role, longest, slots, role)
        elif role not in plan.trained:
            plan.fixed[f"{role} scores"] = partial(plan.scoring, role)
    return plan


def load_models(args: Args, modules: vlm.Modules, ranks: distributed.Ranks) -> None:
    """Shard and load all modules, including reward models."""
    with distributed.raise_on_all_ranks():
        for module in modules.values():
            module.model.setup.team = ranks.team
            shard(module, ranks.mesh)
            weights.fill(module, ranks.device, args.seed)
            fsdp.offload(module, args.offload)


def make_trainables(args: Args, models: Models) -> Trainables:
    """The models that are trained, with their optimizers."""
    trainables = {}
    trainables["actor"] = fsdp.Trainable(
        models.actor,
        adamw(models.actor, args.actor_lr, args),
        args,
        delay=args.critic_warmup_steps,
        ema_beta=args.ema_beta,
    )
    if models.critic:
        optimizer = adamw(models.critic, args.critic_lr, args)
        trainables["critic"] = fsdp.Trainable(models.critic, optimizer, args)
    for part in trainables.values():
        fsdp.offload(part, args.offload)
    return trainables


def saved_roles(args: Args, trainables: Trainables, models: Models) -> checkpoint.Roles:
    """What a checkpoint contains, by role: also the reference, if --reference_every changes it."""
    if not (models.reference and args.reference_every):
        return trainables
    return {**trainables, "reference": models.reference}


def exported_models(args: Args, trainables: Trainables) -> Trainables:
    """The models to export, by their folders in --out."""
    exports = {"export": trainables["actor"]}
    if args.export_critic and "critic" in trainables:
        exports["export_critic"] = trainables["critic"]
    return exports


# -------------------------------------------------------------------------------------------------
# FSDP2 and AdamW, for a fork that wraps a model or takes its steps in another way. Weights gathered
# for a rollout, offloading and schedules are in common/model/fsdp.py.
# -------------------------------------------------------------------------------------------------


def shard(module: vlm.Wrapper, mesh: DeviceMesh) -> None:
    """ZeRO-3: every decoder layer, then the root. A frozen vision tower stays outside of FSDP, and on one
    rank all that is frozen; a value head is always float32."""
    model = module.model
    dtype = model.setup.dtype
    full = dtype == torch.float32  # then nothing is cast: tests compute in float64
    mixed = MixedPrecisionPolicy(
        param_dtype=None if full else dtype,
        reduce_dtype=None if full else torch.float32,
        # keeps the tower's rotary angles float32; torch 2.11 would cast them, but only when
        # recomputing
        cast_forward_inputs=False,
    )
    whole = vlm.whole_parameters(module, shards=mesh.shape[-1])
    for part in vlm.float32_parts(model):  # before the layers, which would take them along
        fully_shard(part, mesh=mesh, ignored_params=whole)
    for layer in vlm.layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=mixed, ignored_params=whole)
    if isinstance(module, Critic):
        fully_shard(module.value_head, mesh=mesh, ignored_params=whole)
    fully_shard(module, mesh=mesh, mp_policy=mixed, ignored_params=whole)


def adamw(module: nn.Module, lr: float, args: flags.OptimArgs) -> torch.optim.Optimizer:
    """AdamW on the trained parameters; matrices decay, biases and norms (one dimension) do not. A
    group may have a learning rate of its own."""
    # Other optimizers work on FSDP's shards, too: NAdam and SGD as they are, Muon beside AdamW as in
    # tests/experiments. Adafactor does not: its statistics of rows and columns need full matrices.
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return fsdp.AdamW(groups, lr=lr, fused=True, betas=(0.9, args.adam_beta2))


def backward(loss: Tensor) -> None:
    """Add the gradient of a pack's share of a loss. Shares sum over the ranks, but FSDP averages."""
    (loss * dist.get_world_size()).backward()


def take_step(trained: fsdp.Trainable, step: int) -> tuple[float, bool]:
    """Clip by the model's global norm and update, at the learning rates of ``step`` (from 1). Returns the
    norm before clipping and whether the update was applied: it is skipped if the norm, which is the
    same on all ranks, is not finite."""
    norm = trained.clip_gradients()
    applied = math.isfinite(norm)
    if applied:
        trained.set_rates(step)
        trained.optimizer.step()
    trained.end_update(step, applied)
    return norm, applied


# -------------------------------------------------------------------------------------------------
# Rollout
# -------------------------------------------------------------------------------------------------


def begin_step(ptx: PtxLoss | None, step: int, args: Args) -> None:
    """Begin to measure ``step`` (from 1), and to decode what the actor's updates will read of --ptx_data."""
    logging.timer.reset()
    if ptx and step > args.critic_warmup_steps:
        ptx.start(args.epochs * args.minibatches)


def collect(
    models: Models,
    loader: PromptLoader,
    reward: sources.RewardMix,
    sampling: Sampling,
    state: TrainState,
    args: Args,
) -> tuple[Batch, logging.Metrics]:
    """Roll out the prompts of a step and fill in rewards, log-probs and values; also returns
    metrics. With --dynamic_sampling, roll out more prompts until --prompts_per_step of them have
    samples that earn different rewards (DAPO, Yu et al. 2025, section 3.2).

    If the limit of rollouts is reached first, prompts without spread fill the step. The moments of
    --reward_norm include all rewards, even those of prompts that are not used.
    """
    size, dynamic = args.prompts_per_step, args.dynamic_sampling
    parts: list[Batch] = []
    useful = generated = 0  # prompts with spread; tokens
    for _ in range(dynamic or args.rollouts_per_step):
        part, tokens = sample_and_score(models, loader, reward, sampling, state.step, args)
        parts.append(part)
        generated += tokens
        useful += len(sources.prompts_with_spread(part))
        if dynamic and useful >= size:
            break

    batch = Batch.concatenate(parts)
    state.rows_drawn += len(parts) * args.prompts_per_rollout
    state.dropped_prompts += len(batch.dropped)
    metrics: logging.Metrics = {
        "rollout/rollouts": len(parts),
        "rollout/dropped_prompts": state.dropped_prompts,
        "rollout/generated_tokens": generated,
    }
    note_rewards(batch, state, args)
    with_spread = sources.prompts_with_spread(batch)
    metrics["rollout/groups_without_spread"] = len(batch.prompt_index.unique()) - len(with_spread)
    if dynamic:
        metrics["rollout/groups_not_replaced"] = max(0, size - len(with_spread))
        without_spread = set(range(len(batch.prompts))).difference(with_spread, batch.dropped)
        # best first: with spread, the newest without, those without samples
        ranked = with_spread + sorted(without_spread, reverse=True) + batch.dropped
        batch = batch.select_prompts(sorted(ranked[:size]))
        fill_logprobs_and_values(batch, models, args)
    prompt_lengths = torch.tensor(batch.prompt_lengths)[batch.prompt_index]  # (S,)
    metrics["rollout/total_length"] = float((prompt_lengths + batch.pack_lengths).double().mean())
    return batch, metrics


def note_rewards(batch: Batch, state: TrainState, args: Args) -> None:
    """Fill the batch's history, then add its rewards to what the state knows of earlier ones."""
    if args.reward_norm:
        state.moments.update(batch.rewards)
    rows = torch.tensor([prompt.position for prompt in batch.prompts])[batch.prompt_index]  # (S,)
    batch.history = state.history[:, rows].T
    state.history.index_add_(1, rows, torch.stack([torch.ones_like(batch.rewards), batch.rewards]))


def sample_and_score(
    models: Models,
    loader: PromptLoader,
    reward: sources.RewardMix,
    sampling: Sampling,
    step: int,
    args: Args,
) -> tuple[Batch, int]:
    """One rollout of the next prompts, with its rewards, log-probs and values; for remax also the
    rewards of one greedy response to each prompt. Also returns the number of generated tokens."""
    actor, remax = models.actor, args.advantage == "remax"
    with logging.timer("data"):
        _, prompts = loader.take()
    with logging.timer("rollout"):
        batch = rollout(actor, prompts, sampling, args.samples_per_prompt)
        if remax:
            greedy = rollout(actor, prompts, replace(sampling, greedy=True), 1)
    generated = len(batch.tokens)
    # functions and servers compute rewards in threads; reward.score waits for them
    call = reward.begin(batch, actor.processor, step)
    if not args.dynamic_sampling:  # else `collect` does it, for the prompts that it keeps
        fill_logprobs_and_values(batch, models, args)
    with logging.timer("reward"):
        reward.score(batch, actor.processor, step, call)
        if remax:
            reward.score(greedy, actor.processor, step)
            # the greedy response to each sample's prompt: one per prompt, in prompt order
            greedy_of = torch.searchsorted(greedy.prompt_index, batch.prompt_index)
            batch.greedy_rewards = greedy.rewards[greedy_of]
            batch.greedy_lengths = greedy.own_lengths[greedy_of]
            generated += len(greedy.tokens)
    return batch, generated


def write_critiques(judge: Policy, questions: Batch, args: Args) -> Batch:
    """The judge's critique of every question, sampled greedily."""
    sampling = replace(
        sampling_of(args, judge.processor, judge.model.setup.device),
        max_new_tokens=args.grm_max_new_tokens,
        min_new_tokens=0,
        stop_strings=(),
        stream=JUDGE,
        greedy=True,
    )
    return rollout(judge, questions, sampling, samples_per_prompt=1)


# -------------------------------------------------------------------------------------------------
# Scoring and advantages
# -------------------------------------------------------------------------------------------------


@logging.timer("score")
def fill_logprobs_and_values(batch: Batch, models: Models, args: Args) -> None:
    """Fill old_logprobs and, if the flags need them, entropy, masked_logprobs, ref_logprobs, kl,
    values and teacher_logprobs."""
    actor, reference = models.actor, models.reference
    # As recorded by the sampler: the policy has not changed since, so no forward pass is needed.
    batch.old_logprobs = batch.logprobs
    if args.importance_cap or args.high_entropy_ratio < 1 or batch.foreign.any():
        logp, batch.entropy = logprobs_and_entropy_of(actor, batch)
        batch.logprobs = torch.where(batch.foreign, logp, batch.logprobs)
        batch.old_logprobs = logp if args.importance_cap else batch.logprobs
    if args.masks_images:
        share = args.perception_mask
        change = image_changes.at_random(image_changes.mask, share, args.seed)
        batch.masked_logprobs = image_changes.changed_logprobs(actor, batch, change)
    if reference:
        with fsdp.on_device(args.offload, reference):
            fill_reference_kl(batch, actor, reference, args.kl_estimator)
    if models.critic:
        batch.values = values_of(models.critic, batch)
    if models.teacher and not args.teacher_in_loss:
        with models.teacher.in_use() as policy:
            batch.teacher_logprobs = logprobs_of(policy, models.teacher.view(batch))


def fill_reference_kl(batch: Batch, actor: Policy, reference: Policy, estimator: str) -> None:
    """Fill kl and, unless it is exact, ref_logprobs."""
    if estimator == "full":
        batch.kl = exact_kl_of(actor, reference, batch)
        return
    with adapters.without_adapters(reference.model):
        batch.ref_logprobs = logprobs_of(reference, batch)
    batch.kl = losses.kl_penalty(estimator, batch.old_logprobs, batch.ref_logprobs)


def shape_rewards(reward: Tensor, lengths: Tensor, state: TrainState, args: Args) -> Tensor:
    """(S,) rewards as the estimator sees them: normalized, clipped, with the length penalty."""
    if args.reward_norm:
        reward = state.moments.normalize(reward)
    if args.reward_clip:
        reward = reward.clamp(-args.reward_clip, args.reward_clip)
    if args.overlong_buffer:
        reward = reward + losses.overlong_penalty(
            lengths,
            args.max_new_tokens,
            args.overlong_buffer,
            args.overlong_factor,
        )
    return reward


def advantage_inputs(batch: Batch, state: TrainState, args: Args) -> losses.AdvantageInputs:
    """What the estimator needs: shaped rewards, the KL, and the critic's values."""
    kl = batch.kl if len(batch.kl) else torch.zeros(len(batch.tokens))  # (N,)
    inputs = losses.AdvantageInputs(
        rewards=shape_rewards(batch.rewards, batch.own_lengths, state, args),
        kl=kl,
        kl_coef=state.kl_coef if args.kl_in == "reward" else 0.0,
        lengths=batch.own_lengths,
        prompt_index=batch.prompt_index,
        components={name: batch.components[name] for name in batch.compared},
        weights=batch.weights,
        history=batch.history,
        turn_ends=batch.turn_ends,
        turn_rewards=batch.turn_rewards,
        values=batch.values,
        gamma=args.gamma,
        turn_gamma=args.turn_gamma,
        gae_lambda=args.gae_lambda,
        gae_lambda_policy=args.gae_lambda_policy,
        gae_alpha=args.gae_alpha,
    )
    if args.reward_norm:
        inputs.turn_rewards = batch.turn_rewards / state.moments.std
    if len(batch.greedy_rewards):
        inputs.greedy_rewards = shape_rewards(
            batch.greedy_rewards, batch.greedy_lengths, state, args
        )
    return inputs


def rewards_that_follow(inputs: losses.AdvantageInputs, args: Args) -> Tensor:
    """(N,) the discounted rewards from each token on: the returns with values of 0 and lambda 1."""
    nothing = torch.zeros_like(inputs.kl)
    estimator = ESTIMATORS[args.advantage]
    return estimator.estimate(replace(inputs, values=nothing, gae_lambda=1.0))[1]


def compute_advantages(batch: Batch, state: TrainState, args: Args) -> logging.Metrics:
    """Fill advantages, returns and in_policy_loss: for the whole step at once, the same on every
    rank. Returns the rollout's metrics."""
    batch.kl_coef = state.kl_coef  # for a KL in the loss
    inputs = advantage_inputs(batch, state, args)
    advantages, batch.returns = ESTIMATORS[args.advantage].estimate(inputs)
    if args.advantages_norm == "on":
        advantages = losses.whiten(advantages)
    batch.in_policy_loss = policy_loss_mask(batch, args)
    if args.masks_images:
        # VPPO weighs responses by how much they depend on their images, and trains the tokens that
        # depend most
        perception = losses.perception(batch.old_logprobs, batch.masked_logprobs)  # (N,)
        factors = losses.perception_factors(
            perception, batch.own_lengths, args.perception_scale
        )  # (S,)
        advantages = advantages * factors.repeat_interleave(batch.own_lengths)
        batch.in_policy_loss &= losses.perception_mask(
            perception, batch.own_lengths, args.perception_ratio
        )
    if len(batch.teacher_logprobs):
        log_ratio = batch.teacher_logprobs - batch.old_logprobs
        advantages = advantages + args.teacher_coef * log_ratio
    if args.advantage_clip:
        advantages = advantages.clamp(-args.advantage_clip, args.advantage_clip)
    batch.advantages = advantages
    metrics = batch_metrics(batch) | {"rollout/return": float(inputs.rewards_after_kl.mean())}
    if len(batch.values):
        # not the critic's targets: with lambda below 1 they contain the values themselves
        explained = losses.explained_variance(batch.values, rewards_that_follow(inputs, args))
        metrics["train/explained_variance"] = float(explained)
    return metrics


def policy_loss_mask(batch: Batch, args: Args) -> Tensor:
    """(N,) bool: which tokens take part in the policy loss."""
    mask = ~batch.foreign
    if args.high_entropy_ratio < 1:
        mask &= losses.high_entropy_mask(batch.entropy, batch.own_lengths, args.high_entropy_ratio)
    if args.mask_truncated:
        mask &= ~batch.truncated.repeat_interleave(batch.own_lengths)
    return mask


def batch_metrics(batch: Batch) -> logging.Metrics:
    """Metrics of responses, rewards and advantages."""
    lengths = batch.own_lengths.float()
    metrics = {
        "rollout/reward": batch.rewards.mean(),
        "rollout/reward_std": batch.rewards.std(correction=0),
        "rollout/response_length": lengths.mean(),
        "rollout/response_length_max": lengths.max(),
        "rollout/truncated": batch.truncated.float().mean(),
        "rollout/samples": len(batch),
        "train/returns": batch.returns.mean(),
        "train/advantages_mean": batch.advantages.mean(),
        "train/advantages_std": batch.advantages.std(correction=0),
        "train/advantages_min": batch.advantages.min(),
        "train/advantages_max": batch.advantages.max(),
    }
    components = {
        records.component_metric(name, "_reward"): values
        for name, values in batch.components.items()
    }
    for name, values in components.items():
        if not values.isnan().all():
            metrics[f"rollout/{name}"] = values.nanmean()
    metrics |= records.task_metrics(batch, {"reward": batch.rewards} | components)
    if len(batch.kl):
        metrics["train/kl"] = batch.kl.mean()
    if len(batch.teacher_logprobs):
        metrics["train/teacher_kl"] = (batch.old_logprobs - batch.teacher_logprobs).mean()  # k1
    if len(batch.values):
        metrics["train/values"] = batch.values.mean()
    metrics |= records.conversation_metrics(batch.conversations, "rollout")
    return {name: float(value) for name, value in metrics.items()}


# -------------------------------------------------------------------------------------------------
# Updates
# -------------------------------------------------------------------------------------------------


class Minibatch(NamedTuple):
    """Prompts that share an optimizer update, and the global weights of their tokens."""

    indices: np.ndarray  # of prompts
    weights: Tensor  # (N,) in the value, entropy and KL terms; 0 outside of the minibatch
    policy_weights: Tensor  # (N,) in the policy term, which may leave tokens out
    expert_load: Tensor | None  # (E,) how often each expert is chosen; with --aux_loss_coef only

    def teaches(self, args: Args) -> bool:
        """Whether the actor can learn from it. Tokens outside the policy loss may have other terms."""
        other_terms = (
            args.kl_in_loss,
            args.entropy_coef,
            args.perception_coef,
            args.teacher_in_loss,
            args.aux_loss_coef,
            args.ptx_coef,
        )
        weights = self.weights if any(other_terms) else self.policy_weights
        return bool(weights.any())


def minibatches_of(
    module: vlm.Wrapper, batch: Batch, step: int, epochs: int, args: Args, replay: bool = False
) -> Iterator[Minibatch]:
    """The minibatches of ``epochs`` passes over the samples of ``step``, counted from 1. ``replay``: see
    `packs.of_batch`."""
    all_tokens = torch.ones_like(batch.in_policy_loss)
    balanced = args.aux_loss_coef > 0
    for epoch in range(epochs):
        seed = (args.seed, step, epoch)
        for indices in batch.minibatches(args.minibatches, seed):
            load = None
            if balanced:
                load = further_losses.count_experts(module, batch, indices, replay)
            yield Minibatch(
                indices,
                weights=minibatch_weights(batch, indices, all_tokens, args),
                policy_weights=minibatch_weights(batch, indices, batch.in_policy_loss, args),
                expert_load=load,
            )


def minibatch_weights(batch: Batch, indices: np.ndarray, mask: Tensor, args: Args) -> Tensor:
    """(N,) weight of every token in the loss of the minibatch of the prompts ``indices``, from the
    token counts of all ranks; 0 outside of the minibatch and where ``mask`` (N,) is false."""
    in_minibatch = torch.isin(batch.prompt_index, torch.as_tensor(indices))  # (S,)
    lengths = losses.sum_per_sample(mask, batch.own_lengths) * in_minibatch
    per_sample = losses.token_weights(lengths, args.loss_aggregation, args.max_new_tokens)
    return per_sample.float().repeat_interleave(batch.own_lengths) * mask  # (N,)


def update_models(
    trainables: Trainables,
    models: Models,
    batch: Batch,
    step: int,
    ptx: PtxLoss | None,
    args: Args,
) -> logging.Metrics:
    """Update the critic and, after --critic_warmup_steps, the actor. Steps count from 1. Returns the
    metrics of both."""
    metrics, actor_learns = {}, step > args.critic_warmup_steps
    with explain_memory(models.actor.model):
        with logging.timer("data"):
            # Before the first update, so that a file that cannot be read costs no finished step.
            if ptx:
                ptx.collect()
            if models.teacher and args.teacher_in_loss and actor_learns:
                with models.teacher.in_use():
                    batch.teacher_view = models.teacher.view(batch)
        if "critic" in trainables:
            with logging.timer("update_critic"):
                metrics |= update_critic(trainables["critic"], batch, step, args)
        if actor_learns:
            with logging.timer("update_actor"):
                metrics |= update_actor(trainables["actor"], models, batch, step, ptx, args)
    return metrics


def update_critic(
    trained: fsdp.Trainable[Critic], batch: Batch, step: int, args: Args
) -> logging.Metrics:
    """Fit the values to the returns, in all epochs and minibatches of ``step`` (from 1)."""
    critic, sums = trained.module, logging.MetricSums()
    critic.train()
    with fsdp.on_device(args.offload, trained):
        for minibatch in minibatches_of(critic, batch, step, args.critic_epochs, args):
            if not minibatch.weights.any():
                continue
            stats = []
            for pack in packs.of_batch(critic.model, batch, minibatch.indices):
                loss, pack_stats = critic_loss(critic, pack, batch, minibatch, args)
                backward(loss)
                stats.append(pack_stats)
            norm, applied = take_step(trained, step)
            sums.record_update("critic", norm, applied, stats)
    return sums.reduce() | {"train/critic_lr": trained.rates_at(step)[0]}


def critic_loss(
    critic: Critic, pack: Pack, batch: Batch, minibatch: Minibatch, args: Args
) -> tuple[Tensor, dict]:
    """This pack's share of the minibatch's loss, and its statistics."""
    with vlm.router_logits(critic.model) as routed:
        values = critic(pack)  # (T,)
    old, returns, weight = pack.pick(batch.values, batch.returns, minibatch.weights)  # (T,) each
    loss = (weight * losses.value_loss(values, old, returns, args.value_clip)).sum()
    balance = further_losses.pack_balance_loss(critic.model, pack, routed, minibatch.expert_load)
    return loss + args.aux_loss_coef * balance, {"critic_loss": logging.Share(loss.detach())}


def update_actor(
    trained: fsdp.Trainable[Policy],
    models: Models,
    batch: Batch,
    step: int,
    ptx: PtxLoss | None,
    args: Args,
) -> logging.Metrics:
    """Policy-gradient updates in all epochs and minibatches of ``step`` (from 1), or until
    --target_kl is exceeded."""
    actor, sums = trained.module, logging.MetricSums()
    frozen = frozen_in_loss(models, args)
    teacher = None  # the model, and the samples as it sees them
    if batch.teacher_view and models.teacher:
        teacher = models.teacher.policy.model, batch.teacher_view
    updates = 0
    actor.train()
    with fsdp.on_device(args.offload, trained, *frozen):
        minibatches = minibatches_of(actor, batch, step, args.epochs, args, replay=True)
        for number, minibatch in enumerate(minibatches):
            if not minibatch.teaches(args):
                continue
            stats = []
            parts = packs.of_batch(actor.model, batch, minibatch.indices, teacher, replay=True)
            for pack in parts:
                loss, pack_stats = actor_loss(actor, models, pack, batch, minibatch, args)
                backward(loss)
                stats.append(pack_stats)
            for policy in frozen:
                fsdp.reshard_root(policy)
            if args.target_kl and exceeds(stats, args.target_kl):
                trained.optimizer.zero_grad()
                break
            if ptx:
                stats.append(add_ptx_gradient(ptx, actor, number, args))
            if updates:
                forget_sampler(stats)
            norm, applied = take_step(trained, step)
            sums.record_update("actor", norm, applied, stats)
            updates += applied
    metrics = {"train/actor_lr": trained.rates_at(step)[0], "train/actor_updates": updates}
    return metrics | sums.reduce()


def frozen_in_loss(models: Models, args: Args) -> list[Policy]:
    """The frozen models to which the actor's loss contains the exact KL."""
    frozen = []
    if args.exact_kl_in_loss and models.reference:
        frozen.append(models.reference)
    if args.teacher_in_loss and models.teacher:
        frozen.append(models.teacher.policy)
    return frozen


def add_ptx_gradient(ptx: PtxLoss, actor: Policy, update: int, args: Args) -> dict:
    """Add the gradient of the next-token loss on the rows of this ``update`` of the step, from 0. Returns
    its statistics."""
    stats = {}
    for loss in ptx.losses(actor, update, args.aux_loss_coef, stats):
        backward(loss)
    return stats


def actor_loss(
    actor: Policy, models: Models, pack: Pack, batch: Batch, minibatch: Minibatch, args: Args
) -> tuple[Tensor, dict]:
    """This pack's share of the minibatch's loss, and statistics, logged below ``train/`` by default.

    A statistic is a `Mean` (a sum over the pack's tokens, and their number), a `Largest`, or the
    pack's `Share` of a loss.
    """
    # before the actor's own forward: a reference may be the actor without its adapters
    references = exact_kl_references(models, pack, args)
    with vlm.router_logits(actor.model) as routed:
        # (T,) each
        logp, entropy, exact_kls = actor(pack, batch.sampling, entropy=True, references=references)
    # (T,) each
    old, sampled, advantages = pack.pick(batch.old_logprobs, batch.logprobs, batch.advantages)
    weight, policy_weight, in_loss = pack.pick(
        minibatch.weights, minibatch.policy_weights, batch.in_policy_loss
    )
    inputs = losses.PolicyLossInputs(logp, old, advantages, pack.sample, len(batch), in_loss)
    clips = [args.clip_low, args.clip_high]
    if args.policy_loss == "ppo":
        clips.append(args.dual_clip)
    out = POLICY_LOSSES[args.policy_loss].compute(inputs, *clips)
    terms = out.per_token
    if args.importance_cap:
        terms = terms * (old - sampled).exp().clamp(max=args.importance_cap)
    loss = (policy_weight * terms).sum()
    stats = ratio_stats(inputs, out, pack, batch)
    stats |= sampler_stats(logp.detach() - sampled, entropy.detach(), pack, batch)
    stats["policy_loss"] = logging.Share(loss.detach())

    if args.entropy_coef:
        loss = loss - args.entropy_coef * (weight * entropy).sum()
    for name, (coef, term) in kl_terms(logp, exact_kls, pack, batch, args).items():
        term = (weight * term).sum()
        loss = loss + coef * term
        stats[name] = logging.Share(term.detach())
    if minibatch.expert_load is not None:
        balance = further_losses.pack_balance_loss(actor.model, pack, routed, minibatch.expert_load)
        balance = args.aux_loss_coef * balance
        loss = loss + balance
        stats["aux_loss"] = logging.Share(balance.detach())
    return loss, stats


def exact_kl_references(models: Models, pack: Pack, args: Args) -> dict:
    """The frozen models of the exact KLs in the actor's loss, as `Policy.as_reference` has them, by the
    names of the terms."""
    references = {}
    if args.exact_kl_in_loss and models.reference:
        references["kl_loss"] = models.reference.as_reference(pack)
    if pack.teacher and models.teacher:
        references["teacher_kl"] = models.teacher.policy.as_reference(pack.teacher)
    return references


def kl_terms(
    logp: Tensor, exact_kls: dict[str, Tensor], pack: Pack, batch: Batch, args: Args
) -> dict[str, tuple[float, Tensor]]:
    """Metric name -> (coefficient, term (T,)) of the KLs that the actor's loss adds to the
    policy loss."""
    terms = {}
    if "teacher_kl" in exact_kls:
        terms["teacher_kl"] = args.teacher_coef, exact_kls["teacher_kl"]
    if args.kl_in_loss:
        if "kl_loss" in exact_kls:
            kl = exact_kls["kl_loss"]
        else:
            kl = losses.kl_penalty(args.kl_estimator, logp, *pack.pick(batch.ref_logprobs))
        terms["kl_loss"] = batch.kl_coef, kl
    if len(batch.masked_logprobs):
        masked_kl = losses.perception_kl(logp, *pack.pick(batch.masked_logprobs))
        terms["perception_kl"] = -args.perception_coef, masked_kl
    return terms


def ratio_stats(
    inputs: losses.PolicyLossInputs, out: losses.PolicyLossOutput, pack: Pack, batch: Batch
) -> dict:
    """Of the tokens in the policy loss: the ratio, the KL(old, new), and how many were clipped."""
    # counted on the host: inputs.in_loss.sum() would wait for the device
    count = int(batch.in_policy_loss[pack.flat].sum())
    sums = losses.ratio_sums(inputs, out)
    stats: dict = {name: logging.Mean(total, count) for name, total in sums.items()}
    stats["ratio_max"] = logging.Largest(losses.largest_ratio(inputs, out))
    return stats


def sampler_stats(log_ratio: Tensor, entropy: Tensor, pack: Pack, batch: Batch) -> dict:
    """Of the tokens that the policy drew: their entropy (T,), and the ``log_ratio`` (T,) between training
    and sampler, which is rounding until the first update of a step."""
    is_drawn = ~batch.foreign
    (drawn,) = pack.pick(is_drawn)
    count = int(is_drawn[pack.flat].sum())
    log_ratio = log_ratio * drawn
    return {
        "sampler_gap": logging.Mean(log_ratio.abs().sum(), count),
        "entropy": logging.Mean((entropy * drawn).sum(), count),
    }


def forget_sampler(stats: list[dict]) -> None:
    """Drop the comparison with the sampler: after an update, the policy is no longer the one that
    sampled."""
    for part in stats:
        part.pop("sampler_gap", None)


def exceeds(stats: list[dict], target_kl: float) -> bool:
    """Whether KL(old, new) per token of a minibatch, over all ranks, is above the target."""
    sums = logging.MetricSums()
    sums.record([{"approx_kl": part["approx_kl"]} for part in stats])
    # absent if no token of the minibatch takes part in the policy loss
    return sums.reduce().get("train/approx_kl", 0.0) > target_kl


def move_reference(step: int, models: Models, args: Args) -> None:
    """Copy the actor's weights into the reference every --reference_every steps."""
    every = args.reference_every
    if models.reference and every and step % every == 0:
        fsdp.copy_weights(models.actor, models.reference)


# -------------------------------------------------------------------------------------------------
# Evaluation and records
# -------------------------------------------------------------------------------------------------


def evaluate(
    trainables: Trainables,
    reward: sources.RewardMix,
    rows: Rows,
    sampling: Sampling,
    state: TrainState,
    args: Args,
) -> tuple[logging.Metrics, list[dict]]:
    """Answer every held-out prompt, spread over the ranks; with --ema_beta, with the averaged
    weights. Returns metrics and a record of each answer."""
    actor = trainables["actor"].module
    started = time.perf_counter()
    count = args.eval_samples
    sampling = replace(sampling, stream=EVAL, greedy=count == 1, keeps_experts=False)
    together = prompts_together(args.slots, args.rollout_shards, count)
    batches = batches_in_order(rows.held_out, together)
    answers, conversations, dropped = [], [], 0
    gaps: list[Tensor] = []  # (k,) each, see `image_changes.vision_gaps`
    loader = PromptLoader(rows.processor, args, batches)
    with trainables["actor"].averaged(), loader:
        for _ in batches:
            _, prompts = loader.take(least=0)
            dropped += len(prompts.dropped)
            if len(prompts.dropped) == len(prompts.prompts):
                continue
            batch = rollout(actor, prompts, sampling, count)
            if args.eval_only and not answers:  # no update will compare them
                require_same_policy(actor, batch, args)
            reward.score(batch, actor.processor, state.step)
            gaps.append(image_changes.vision_gaps(actor, batch))
            part = records.sample_records(batch, rows.processor, rows.settings)
            picks = range(len(batch))[: max(0, args.log_samples * count - len(answers))]
            records.show_images(batch, part, picks)
            answers += part
            conversations += batch.conversations
    if not answers:
        raise UserError("evaluation: no held-out prompt is left, as none of their images decodes")
    metrics = records.summarise_samples(answers, count)
    metrics |= records.conversation_metrics(conversations, "eval")
    gap = torch.cat(gaps)
    if len(gap):
        metrics["eval/vision_gap_logprob"] = float(gap.mean())
    metrics |= {"eval/num_samples": len(answers), "eval/dropped_prompts": dropped}
    return metrics | {"eval/seconds": time.perf_counter() - started}, answers


def evaluate_teacher(
    teacher: Teacher | None,
    reward: sources.RewardMix,
    rows: Rows,
    sampling: Sampling,
    state: TrainState,
    args: Args,
) -> logging.Metrics:
    """With --eval_only: the teacher's own accuracy and reward on one rollout of held-out prompts, the first
    of which images decode; it reads them with its hint and its images. It cannot teach what it cannot
    answer. Skipped with an environment, whose images it might not see."""
    if not (teacher and args.eval_only) or args.env or args.reward == "none":
        return {}
    together = prompts_together(args.slots, args.rollout_shards, 1)
    batches = batches_in_order(rows.held_out, together)
    with (
        teacher.in_use() as policy,
        PromptLoader(rows.processor, args, batches) as loader,
    ):
        for left in reversed(range(len(batches))):
            _, batch = loader.take(least=0 if left else 1)
            if len(batch.dropped) < len(batch.prompts):
                break
        answered = rollout(
            policy, teacher.view(batch), replace(sampling, stream=EVAL, greedy=True), 1
        )
    seen = replace(answered, prompts=batch.prompts, features=batch.features, positions={})
    reward.score(seen, rows.processor, state.step)
    answers = records.sample_records(seen, rows.processor, rows.settings)
    metrics = records.summarise_samples(answers, 1)
    columns = records.accuracy_columns(metrics) | {"reward": "eval/reward_mean"}
    return {f"eval/teacher_{word}": metrics[name] for word, name in columns.items()}


# what the console shows of an evaluation, after the accuracies: word -> metric
EVALUATION_COLUMNS = {
    "reward": "eval/reward_mean",
    "length": "eval/response_length_mean",
    "truncated": "eval/truncated_mean",
    "vision_gap": "eval/vision_gap_logprob",
    "teacher_accuracy": "eval/teacher_accuracy",
    "teacher_reward": "eval/teacher_reward",
}
# ... and of a step
STEP_COLUMNS = {
    "reward": "rollout/reward",
    "length": "rollout/response_length",
    "kl": "train/kl",
    "teacher_kl": "train/teacher_kl",
    "entropy": "train/entropy",
    "clip": "train/clipped_high",
    "ev": "train/explained_variance",
    "s": "perf/step_seconds",
}
# nats per answer: a smaller vision gap is rounding, so the model ignores its images
BLIND = 1e-3


def report_evaluation(
    log: logging.RunLogger,
    metrics: logging.Metrics,
    answers: list[dict],
    state: TrainState,
) -> None:
    """Log an evaluation: metrics, a line on the console, and the answers."""
    metrics |= {
        "eval/index": state.evaluations,
        "eval/episode": state.passes,
        "eval/train_step": state.step,
    }
    state.metrics |= metrics
    cards = records.sample_cards(answers[: log.log_samples])
    log.samples(state.step, answers, cards, stem="eval")
    accuracies = records.accuracy_columns(metrics)
    for name in accuracies.values():
        # before the first step, none need be right
        never_right = metrics[name] == 0 and state.step > 0
        log.warn(
            name,
            never_right,
            f"no held-out answer is right ({name} is 0); see {log.out}/samples",
        )
    gap = metrics.get("eval/vision_gap_logprob", math.inf)
    if gap < BLIND:
        log.line(
            "warning: the model does not use what it sees: with blank images its answers are at least "
            f"as likely; log-probs differ by {gap:.1e} nats (eval/vision_gap_logprob)"
        )
    # written last: if this record is missing, a resumed run evaluates again
    log.evaluation(state.step, metrics, accuracies | EVALUATION_COLUMNS)


def open_log(args: Args, rows: Rows, first_step: int) -> logging.RunLogger:
    """Write args.json and the first record, and print what the run will do."""
    log = logging.RunLogger(args, args.steps, first_step)
    if any(row.regions for row in rows.all):
        log.line(
            f"boxes and points of answers are read in the coordinates {rows.processor.space!r}"
        )
    if args.eval_only:
        log.line(f"{len(rows.held_out)} held-out rows; output: {log.out}")
        return log
    prompts, count = args.prompts_per_step, args.samples_per_prompt
    updates = args.epochs * args.minibatches
    passes = args.steps * prompts / max(1, len(rows.train))
    seeing = sum(bool(row.grids) for row in rows.train)
    log.line(
        f"{len(rows.train)} training prompts, {seeing or 'none'} with images, "
        f"{len(rows.held_out)} held out; "
        f"a step: {prompts} prompts x {count} samples, {updates} updates; "
        f"{args.steps} steps = {passes:.1f} passes over the data; output: {args.out}"
    )
    for line in [*repeated_rows(args, rows.train_sets), *idle_steps(args)]:
        log.line(line)
    return log


def idle_steps(args: Args) -> list[str]:
    """A warning about flags with which the actor never learns, or not at its rate."""
    frozen, warmup, steps = args.critic_warmup_steps, args.warmup_steps, args.steps
    if frozen >= steps:
        return [
            f"warning: --critic_warmup_steps {frozen} of --steps {steps}: the actor never learns"
        ]
    if frozen + warmup >= steps:
        return [f"warning: --warmup_steps {warmup} of --steps {steps}: --actor_lr is never reached"]
    return []


def report(
    log: logging.RunLogger,
    batch: Batch,
    state: TrainState,
    rows: Rows,
    checkpoints: checkpoint.Checkpoints,
    args: Args,
) -> None:
    """Log a step: metrics, a line on the console, the progress bar, warnings and, after some steps,
    samples."""
    step, metrics = state.step, state.metrics
    samples: list[dict] = []
    if log.shows_samples(step, args.steps):
        samples = report_samples(log, batch, step, rows, args)
    columns = records.accuracy_columns(metrics, batch.prompts) | STEP_COLUMNS
    log.step(step, metrics | checkpoints.metrics(), columns)
    if samples:
        first = samples[0]
        log.line(
            f"  {first['question'][-200:]!r} -> {first['response'][:500]!r}  reward {first['reward']:.3f}"
        )
    failed = environments.describe_failures(batch.conversations)
    if failed:
        log.line(f"warning: step {step}: {failed}")
    log.warn(
        "updates",
        metrics.get("train/actor_updates") == 0,
        f"step {step}: the actor was not updated: every token is masked, or a gradient is not finite",
    )
    if args.advantage in ("none", "gdpo"):
        return  # which do not compare total rewards
    flat = metrics["rollout/groups_without_spread"]
    prompts = metrics["rollout/rollouts"] * args.prompts_per_rollout
    log.warn(
        "spread",
        flat > 0.9 * prompts,
        f"step {step}: {flat} of {prompts} prompts have samples that all earned the same (mean "
        f"reward {metrics['rollout/reward']:.3f}), so nothing tells better answers from worse; see "
        f"{log.out}/samples",
    )
    all_zero = metrics["train/advantages_min"] == metrics["train/advantages_max"] == 0
    log.warn(
        "advantages",
        all_zero and len(sources.prompts_with_spread(batch)) > 0,
        f"step {step}: all advantages are 0, though rewards differ: the estimator sees no difference",
    )


def report_samples(
    log: logging.RunLogger, batch: Batch, step: int, rows: Rows, args: Args
) -> list[dict]:
    """Write the samples of a step; those of the first --log_samples prompts with the numbers of their
    tokens and the images that environments have shown. Returns their records, on rank 0."""
    samples: list[dict] = []
    picks = records.first_samples(batch, args.log_samples)
    if distributed.is_main():
        samples = records.sample_records(batch, rows.processor, rows.settings)
        records.add_tokens(batch, samples, picks, rows.processor)
    records.show_images(batch, samples, picks)
    # of each prompt one sample
    carded = [samples[i] for i in picks[:: args.samples_per_prompt] if samples]
    log.samples(step, samples, records.sample_cards(carded))
    return samples


def check_sampler(log: logging.RunLogger, state: TrainState, actor: Policy, args: Args) -> None:
    """Compare the sampler's log-probs with those of training. A gap beyond rounding raises a
    UserError on every rank after the first update of this process, and is only warned about later."""
    problem = sampler_problem(state.metrics.get("train/sampler_gap", 0.0), actor, args)
    if not problem:
        return
    problem = f"step {state.step}: train/sampler_gap {problem}"
    if state.step == 1 + max(log.first_step, args.critic_warmup_steps):
        raise UserError(problem)
    log.line(f"warning: {problem}")


def require_same_policy(actor: Policy, batch: Batch, args: Args) -> None:
    """Raises UserError on every rank: the sampler's log-probs are not those of a forward pass."""
    gap = (logprobs_of(actor, batch) - batch.logprobs).abs().mean()
    problem = sampler_problem(float(gap), actor, args)
    if problem:
        raise UserError(f"evaluation: the sampler gap {problem}")


def sampler_problem(gap: float, actor: Policy, args: Args) -> str:
    """Why a ``gap`` between the log-probs of sampler and forward pass is too large; "" if it is
    rounding."""
    limit = args.sampler_gap_limit
    if limit < 0:
        # Rounding makes 1e-7 to 1e-5 nats in float32 and 0.01 to 0.03 in bfloat16; a kernel that
        # reads one wrong key makes 0.5 or more.
        limit = 1e-3 if actor.model.setup.dtype == torch.float32 else 0.1
    if not limit or gap <= limit:
        return ""
    return (
        f"{gap:.3g} is above {limit:g}: the log-probs that the sampler recorded differ from those "
        "that a forward pass computes for the same tokens, so it does not sample from this model. If the "
        "sampler is your own: did it get the images, and this step's weights? Otherwise try "
        "--attention sdpa or --cuda_graphs off; --sampler_gap_limit changes the limit (0: none)"
    )


def performance(
    batch: Batch, models: Models, metrics: logging.Metrics, args: Args
) -> logging.Metrics:
    """Seconds per stage, throughput, memory and, on a known GPU, MFU of the updates counted in
    ``metrics``."""
    perf = logging.timer.metrics()
    # fewer than --epochs if --target_kl stopped them
    actor_passes = metrics.get("train/actor_updates", 0) / args.minibatches
    passes = actor_passes + (args.critic_epochs if models.critic else 0)
    update = perf.get("perf/update_actor_seconds", 0.0)
    update += perf.get("perf/update_critic_seconds", 0.0)
    generated = metrics["rollout/generated_tokens"]
    perf["perf/rollout_tokens_per_second"] = generated / perf["perf/rollout_seconds"]
    if update:
        tokens = passes * batch.total_tokens
        perf["perf/update_tokens_per_second"] = tokens / update
        responses = actor_passes * len(batch.tokens)
        perf |= memory.utilisation(models.actor, tokens, responses, update)
    return perf | memory.peak()


# -------------------------------------------------------------------------------------------------
# Checks of several flags together; those of single flags are declared with them
# -------------------------------------------------------------------------------------------------


def check_args(args: Args) -> None:
    """Refuse combinations that cannot work, before any process group or GPU is touched. Raises
    UserError."""
    refuse = flags.Refusals()
    flags.check_shared(refuse, args)
    check_sizes(refuse, args)
    check_advantages(refuse, args)
    check_kl(refuse, args)
    check_rewards(refuse, args)
    check_teacher(refuse, args)
    refuse.raise_any()


def check_sizes(refuse: flags.Refusals, args: Args) -> None:
    """Refuse numbers of tokens, samples and seconds that do not fit each other."""
    refuse(
        args.max_tokens_per_pack < args.longest,
        f"--max_tokens_per_pack {args.max_tokens_per_pack} must hold one prompt and one response: "
        f"--max_prompt_tokens + --max_new_tokens{' + --max_reply_tokens' if args.env else ''} = "
        f"{args.longest}",
    )
    for name in ("rollouts_per_step", "minibatches"):
        refuse(
            args.prompts_per_step % getattr(args, name),
            f"--{name} {getattr(args, name)} must divide --prompts_per_step {args.prompts_per_step}",
        )
    for name in ("min_new_tokens", "overlong_buffer"):
        refuse(
            getattr(args, name) > args.max_new_tokens,
            f"--{name} {getattr(args, name)} exceeds --max_new_tokens {args.max_new_tokens}",
        )
    refuse(
        0 < args.dynamic_sampling < args.rollouts_per_step,
        f"--rollouts_per_step {args.rollouts_per_step} exceeds --dynamic_sampling "
        f"{args.dynamic_sampling}",
    )
    refuse(
        args.reward_timeout >= args.timeout,
        f"--reward_timeout {args.reward_timeout:g} must be below --timeout {args.timeout:g}: a rank "
        "that waits so long would be given up by the others",
    )


def check_advantages(refuse: flags.Refusals, args: Args) -> None:
    """Refuse flags that --advantage or --policy_loss would not use, or could not."""
    estimator, alone = ESTIMATORS[args.advantage], args.samples_per_prompt < 2
    compares = {
        "advantage": estimator.compares,
        "dynamic_sampling": args.dynamic_sampling,
        "grm_opponents": args.grm_opponents,
    }
    for name, does in compares.items():
        refuse(
            does and alone,
            f"--{name} {getattr(args, name)} compares the samples of a prompt: "
            f"--samples_per_prompt {args.samples_per_prompt} must be at least 2",
        )
    for name in ("critic_model", "export_critic", "critic_warmup_steps"):
        refuse(
            getattr(args, name) and not estimator.has_critic,
            f"--{name} {getattr(args, name)} needs a critic, and --advantage {args.advantage} has none",
        )
    refuse(
        args.turn_gamma < 1 and args.advantage != "bi_level_gae",
        f"--turn_gamma {args.turn_gamma} needs --advantage bi_level_gae",
    )
    own_lambda = args.gae_lambda_policy != args.gae_lambda
    refuse(
        (own_lambda or args.gae_alpha) and args.advantage != "gae",
        "--gae_lambda_policy and --gae_alpha need --advantage gae",
    )
    refuse(
        own_lambda and args.gae_alpha,
        f"--gae_lambda_policy {args.gae_lambda_policy} excludes --gae_alpha: both set the lambda of "
        "the advantages",
    )
    if args.advantage == "gdpo":
        shaping = "reward_combiner reward_norm reward_clip overlong_buffer dynamic_sampling"
        for name in shaping.split():
            refuse(
                getattr(args, name),
                f"--advantage gdpo excludes --{name}: gdpo compares the sources of rewards before they "
                "become one number",
            )
    refuse(
        args.policy_loss == "sapo" and (args.clip_low or args.clip_high),
        "--policy_loss sapo excludes --clip_low and --clip_high: sapo has a soft gate in place of a clip",
    )
    refuse(
        args.policy_loss in ("gspo", "gmpo") and args.perception_ratio < 1,
        f"--policy_loss {args.policy_loss} excludes --perception_ratio: it takes whole responses, not "
        "tokens",
    )


def check_kl(refuse: flags.Refusals, args: Args) -> None:
    """Refuse a KL that would constrain nothing, and flags of a reference that is not loaded."""
    for name in ("reference_model", "reference_every", "kl_target"):
        refuse(
            getattr(args, name) and not args.kl_coef,
            f"--{name} {getattr(args, name)} needs --kl_coef: without it no reference is loaded",
        )
    refuse(
        args.kl_in_loss and args.kl_estimator == "k1",
        "--kl_estimator k1 with --kl_in loss constrains nothing, as the gradient of k1 averages to "
        "zero: use k2, k3+ or full",
    )
    samples = args.prompts_per_step * args.samples_per_prompt
    refuse(
        args.kl_target and 5 * args.kl_horizon <= samples,
        f"--kl_horizon {args.kl_horizon} must exceed a fifth of the {samples} samples per step",
    )
    refuse(
        args.reference_every and (args.lora_rank or args.reference_model),
        f"--reference_every {args.reference_every} excludes --lora_rank and --reference_model: the "
        "reference is the actor's own model, without adapters",
    )


def check_rewards(refuse: flags.Refusals, args: Args) -> None:
    """Refuse sources of rewards that would not be used, or do not fit the rows."""
    refuse(
        args.reward_recipe and args.reward != Args.reward,
        f"--reward_recipe replaces --reward {args.reward}: give one of them",
    )
    refuse(
        args.reward_recipe and args.reward_combiner,
        "--reward_recipe excludes --reward_combiner: a recipe has weights",
    )
    refuse(
        args.system_prompt and args.row_kind != "prompts",
        "--system_prompt needs --row_kind prompts: judgements have a judge's system_instruction",
    )
    refuse(bool(args.ptx_data) != bool(args.ptx_coef), "--ptx_data and --ptx_coef need each other")


def check_teacher(refuse: flags.Refusals, args: Args) -> None:
    """Refuse learning without rewards and without a teacher, and flags of a teacher that is not there."""
    refuse(
        args.reward == "none" and args.advantage != "none",
        f"--reward none excludes --advantage {args.advantage}: there is nothing to compute it from",
    )
    only_teacher = args.advantage == "none"
    refuse(
        only_teacher and not args.teacher_model,
        "--advantage none, which --reward none implies, needs --teacher_model: all learning is from a "
        "teacher",
    )
    refuse(
        only_teacher and args.dynamic_sampling,
        "--advantage none excludes --dynamic_sampling, which chooses prompts by their rewards",
    )
    refuse(
        only_teacher and args.kl_coef and args.kl_in == "reward",
        "--advantage none, which --reward none implies, needs --kl_in loss for its --kl_coef",
    )
    refuse(
        (args.teacher_prompt or args.teacher_in != "advantage") and not args.teacher_model,
        "--teacher_prompt and --teacher_in loss need --teacher_model",
    )
    refuse(
        args.teacher_model == "ema" and (args.lora_rank or not args.ema_beta),
        "--teacher_model ema needs --ema_beta, and excludes --lora_rank: adapters have no average; use "
        "self",
    )
    refuse(
        args.env and args.teacher_prompt,
        "--env excludes --teacher_prompt: conversations are scored unchanged",
    )


if __name__ == "__main__":
    process.run_main(main)
