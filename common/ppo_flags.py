"""Flags of train_ppo_vl.py alone that libraries read, too; those of both scripts are in flags.py."""

import re
import string
from dataclasses import dataclass

from common.flags import LONGEST_WAIT, flag
from common.ground.files import UserError

# of --teacher_prompt: text, in which a brace is written twice, and names of columns
HINT = re.compile(r"(?:[^{}]|\{\{|\}\}|\{[^\W\d][^{}.\[\]:!]*\})*")


def check_teacher_prompt(template: str) -> None:
    """Raises UserError: not a template of --teacher_prompt. That is a Python format string of plain
    names: a format specification could take gigabytes, and an attribute could read more than the row."""
    if not HINT.fullmatch(template):
        raise UserError(
            f"{template}: braces hold the name of a column and nothing else, as in {{answer}} (a brace "
            "of the text is written twice)"
        )
    names = [name for _, name, *_ in string.Formatter().parse(template)]
    if template and not names.count("prompt") == template.count("{prompt}") == 1:
        raise UserError(f"{template} has no {{prompt}}, the place of the row's prompt, or several")


@dataclass(frozen=True)
class RowArgs:
    """rows"""

    row_kind: str = flag(
        "prompts",
        "kind of rows: prompts; or judgements (see train_grm_vl.py --help judge), to train a judge by RL: "
        "--reward verdict compares the judge's answers with the rows' verdicts",
        choices=("prompts", "judgements"),
    )
    columns: str = flag(
        "",
        "columns of your files, as in prompt=question,images=pictures,answer=solution,label=source",
    )
    system_prompt: str = flag(
        "",
        "system message put before every prompt; empty: none",
    )
    curriculum: str = flag(
        "",
        "file.py:function from (rows, samples, rewards) to weights, by which the rows of a batch are drawn: "
        "for each row of --data its columns, its number of samples so far, and the sum of their "
        "rewards; empty: every row once in a pass",
        paths=True,
    )
    ptx_data: str = flag(
        "",
        "JSONL with prompt, images, response for a next-token loss besides the RL loss; empty: none",
        paths=True,
    )
    ptx_coef: float = flag(
        0.0,
        "weight of the --ptx_data loss in the actor's loss (PPO-ptx); 0: off",
    )
    ptx_batch: int = flag(64, "rows of --ptx_data per update of the actor, over all ranks", low=1)
    ptx_labels: str = flag(
        "text",
        "tokens of --ptx_data that carry the loss: all text, or responses",
        choices=("text", "responses"),
    )


@dataclass(frozen=True)
class PerceptionArgs:
    """perception: what masked images change, by one more forward pass"""

    perception_coef: float = flag(
        0.0,
        "above 0: subtract this times the KL between the policy with its images and with masked ones "
        "from the actor's loss (PAPO: 0.01 or 0.02, with an --entropy_coef below 0)",
    )
    perception_ratio: float = flag(
        1.0,
        "below 1: use only this fraction of each response's tokens, those that depend most on its "
        "images, in the policy loss (VPPO: 0.4)",
        low=1e-6,
        high=1,
    )
    perception_scale: float = flag(
        1.0,
        "below 1: multiply advantages by a factor that grows with how much the response depends on "
        "its images; this is the smallest factor, and their mean is 1 (VPPO: 0.9)",
        high=1,
    )
    perception_mask: float = flag(
        0.6, "share of an image's squares of 14 pixels that are masked black", low=1e-6, high=1
    )

    @property
    def masks_images(self) -> bool:
        return self.perception_coef > 0 or min(self.perception_ratio, self.perception_scale) < 1


@dataclass(frozen=True)
class RewardArgs:
    """reward"""

    reward: str = flag(
        "boxed",
        "source of rewards, or several separated by commas: a rule (exact, boxed, answer, box, boxes, "
        "point, verdict), env (what --env gives), "
        "file.py:function, grm:FOLDER (generative judge), "
        "rm:FOLDER (scalar reward model), a server: http://host:port/path; none: only a teacher",
        paths=True,
    )
    reward_recipe: str = flag(
        "",
        'JSON, or a .json file, in place of --reward: {label: [[source, weight], ...]}, "*" for '
        "every other label; weight 0: only measured",
        paths=True,
    )
    reward_combiner: str = flag(
        "",
        "file.py:function of {source: rewards} to rewards, for several sources without a recipe",
        paths=True,
    )
    grm_question: str = flag(
        "auto",
        "what a judge is asked; answers: whether the response or the reference answer is better; rubric: "
        "whether the response meets each criterion of the row's rubric; auto: the first of correct, score, "
        "answers and rubric that it was trained on",
        choices=("auto", "correct", "score", "answers", "rubric"),
    )
    grm_opponents: int = flag(
        0,
        "above 0: a judge of pairs compares a response with so many others to its prompt, in both orders, "
        "not with the reference answer; the reward is the expected share of wins (Pref-GRPO)",
    )
    grm_mode: str = flag(
        "probability",
        "what a judge's reward is: its expected verdict (by probability), or the verdict of a critique "
        "that it writes",
        choices=("probability", "critique"),
    )
    grm_max_new_tokens: int = flag(512, "longest critique of a judge, tokens", low=1)
    reward_timeout: float = flag(
        60.0,
        "longest time for the rewards of functions and servers, all together, with retries, seconds",
        low=1e-6,
        high=LONGEST_WAIT,
    )


@dataclass(frozen=True)
class TeacherArgs:
    """teacher"""

    teacher_model: str = flag(
        "",
        "frozen model that also scores the sampled tokens, and from which the policy learns: a checkpoint "
        "of any size that has the policy's tokens and reads rows by its own processor; self: the "
        "initial weights (with adapters, the base model); ema: the average of --ema_beta; empty: none",
        paths=True,
    )
    teacher_in: str = flag(
        "advantage",
        "advantage: add --teacher_coef * (the teacher's log-prob - the policy's) to each token's advantage; "
        "loss: add --teacher_coef * the exact KL(policy | teacher) over the vocabulary, which costs a "
        "forward pass of the teacher per update",
        choices=("advantage", "loss"),
    )
    teacher_coef: float = flag(1.0, "weight of the teacher")
    teacher_prompt: str = flag(
        "",
        "template of what the teacher reads in place of a prompt; braces take columns of the row: "
        "'{prompt} (The answer is {answer}.)'; empty: the prompt",
        check=check_teacher_prompt,
    )

    @property
    def teacher_in_loss(self) -> bool:
        return self.teacher_model != "" and self.teacher_in == "loss"


@dataclass(frozen=True)
class EnvArgs:
    """environment"""

    env: str = flag(
        "",
        "file.py:Class of an environment that answers the policy's turns (launch/README.md); empty: "
        "responses have one turn",
        paths=True,
    )
    max_turns: int = flag(8, "turns of the policy in a sample with an environment", low=1)
    max_reply_tokens: int = flag(
        1024,
        "tokens of all replies of an environment in a sample; --max_new_tokens counts the policy's "
        "own over all turns",
        low=1,
    )
    env_timeout: float = flag(
        60.0,
        "longest time of one call of an environment (reset, step or close), seconds",
        low=1e-6,
        high=LONGEST_WAIT,
    )
    env_workers: int = flag(
        8,
        "environments of a rank that compute at a time while other samples go on; 0: one after the other, "
        "so that runs repeat bit for bit",
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
