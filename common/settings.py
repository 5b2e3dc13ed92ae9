"""The flags that both scripts share, one class per module that reads them. Imports no torch, so
that --help is fast.

A script adds the classes of its own stages and lists all of them in its class Args; see `flags`.
"""

from dataclasses import dataclass
from pathlib import Path

from common.flags import LONGEST_WAIT, flag


@dataclass(frozen=True)
class ModelArgs:
    """model"""

    model: str = flag("", "checkpoint to train: folder in Hugging Face format, or hub name")
    dtype: str = flag(
        "auto",
        "compute type; weights and optimizer stay float32. auto: bfloat16 on GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    attention: str = flag(
        "auto",
        "attention back-end. auto: flash_attn if installed, else torch's varlen; sdpa on CPU",
        choices=("auto", "flash_attn", "varlen", "sdpa"),
        neutral=True,
    )
    gradient_checkpointing: str = flag(
        "auto",
        "recompute layers in the backward pass: less memory, about 30 % more time. auto: on a GPU "
        "if the run would not fit otherwise, never on a CPU",
        choices=("auto", "on", "off"),
        neutral=True,
    )
    compile: str = flag(
        "off",
        "layers: torch.compile fuses norms, rotary positions, gates and sums of the decoder's "
        "layers in updates and scoring, which takes a while in the first step",
        choices=("off", "layers"),
        neutral=True,
    )
    train_vision: bool = flag(
        False,
        "train the vision tower and its projector too (Qwen-VL); every model then has one of its "
        "own and computes image features in every forward pass",
    )
    lora_rank: int = flag(
        0,
        "rank of LoRA adapters on attention and MLP: only they (and a value head) are trained, the "
        "other weights are kept in the compute type; 0: off, all weights are trained",
        low=0,
    )
    lora_alpha: int = flag(16, "adapters are scaled by this / --lora_rank", low=1)
    max_tokens_per_pack: int = flag(
        16384,
        "tokens per pack and per prefill; determines the memory of an update",
        low=1,
        neutral=True,
    )
    head_chunk: int = flag(
        0,
        "tokens whose logits exist at the same time; 0: 4096 on a GPU, 256 on a CPU",
        low=0,
        neutral=True,
    )


@dataclass(frozen=True)
class DataArgs:
    """data"""

    data: str = flag(
        "",
        "training rows: JSONL files, as a.jsonl,b.jsonl or with probabilities: "
        "a.jsonl:0.7,b.jsonl:0.3",
    )
    eval_data: str = flag("", "held-out rows: JSONL files; empty: no evaluation", neutral=True)
    prompts_per_step: int = flag(128, "prompts per step, over all ranks", low=1)
    max_prompt_tokens: int = flag(
        4096,
        "longest prompt (of the reward model: with its target), tokens with image tokens; longer "
        "ones are bad rows",
        low=1,
    )
    min_pixels: int = flag(
        0, "smallest image after resizing, pixels; 0: the checkpoint's own", low=0
    )
    max_pixels: int = flag(
        0, "largest image or video frame after resizing, pixels; 0: the checkpoint's own", low=0
    )
    video_frames: int = flag(16, "largest number of frames per video, evenly spaced", low=2)
    video_fps: float = flag(
        2.0, "frames per second of videos that do not state it: lists of pictures", low=1e-3
    )
    image_root: str = flag(
        "",
        "refuse pictures and videos outside of this folder, links resolved; empty: any file",
        neutral=True,
    )
    on_bad_row: str = flag(
        "error",
        "what a bad row does: error stops the run, skip counts and reports it",
        choices=("error", "skip"),
    )
    max_rows: int = flag(0, "use the first rows of each file only; 0: all", low=0)
    data_threads: int = flag(
        2, "threads that decode images while the model works", low=1, neutral=True
    )


@dataclass(frozen=True)
class RewardArgs:
    """reward"""

    reward: str = flag(
        "boxed",
        "source of rewards, or several separated by commas: a rule (exact, boxed, answer, "
        "verdict), env (what --env gives), file.py:function, grm:FOLDER (generative judge), "
        "rm:FOLDER (scalar reward model), or a server: http://host:port/path",
    )
    reward_recipe: str = flag(
        "",
        'JSON, or a .json file, in place of --reward: {label: [[source, weight], ...]}, "*" for '
        "every other label; weight 0: only measured",
    )
    reward_combiner: str = flag(
        "", "file.py:function of {source: rewards} to rewards, for several sources without a recipe"
    )
    grm_question: str = flag(
        "auto",
        "what a judge is asked; answers: which is better, the response or the reference; auto: "
        "what it was trained on more, correct or score",
        choices=("auto", "correct", "score", "answers"),
    )
    grm_mode: str = flag(
        "probability",
        "what a judge's reward is: its expected verdict (by probability), its likeliest verdict, "
        "or the verdict of a critique that it writes",
        choices=("probability", "verdict", "critique"),
    )
    grm_max_new_tokens: int = flag(512, "longest critique of a judge, tokens", low=1)
    reward_timeout: float = flag(
        60.0,
        "longest time for the rewards of a step, with all retries, seconds",
        low=1e-6,
        high=LONGEST_WAIT,
        neutral=True,
    )
    reward_workers: int = flag(
        1,
        "threads per rank that score in parallel: requests at a time to a reward server",
        low=1,
        neutral=True,
    )
    remote_batch: int = flag(32, "samples per request to a reward server", low=1, neutral=True)
    remote_retries: int = flag(
        4,
        "retries of a request to a reward server after a time-out (half of --reward_timeout), a "
        "lost connection or a 5xx answer; the pauses before them grow from 0.5 s to at most 8 s",
        low=0,
        neutral=True,
    )


@dataclass(frozen=True)
class EnvArgs:
    """environment"""

    env: str = flag(
        "",
        "file.py:Class of an environment that answers the policy's turns (launch/README.md); empty: "
        "responses have one turn",
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
        neutral=True,
    )
    env_workers: int = flag(
        8,
        "threads per rank that run environments while other samples go on; 0: one after the other, "
        "so that runs repeat bit for bit",
        low=0,
        neutral=True,
    )
    on_env_error: str = flag(
        "zero",
        "an environment that raises, returns what is no reply or takes too long: zero ends its "
        "sample, which then earns nothing from it; stop ends the run",
        choices=("zero", "stop"),
    )


@dataclass(frozen=True)
class OptimArgs:
    """optimizer"""

    steps: int = flag(1000, "steps of the run", low=1)
    lr_schedule: str = flag(
        "constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_steps: int = flag(0, "steps of linear warm-up", low=0)
    min_lr_ratio: float = flag(
        0.1, "final learning rate of linear and cosine, as a fraction", low=0, high=1
    )
    weight_decay: float = flag(0.0, "decoupled weight decay; never on biases and norms", low=0)
    adam_beta1: float = flag(0.9, "beta 1 of AdamW", low=0, high=1)
    adam_beta2: float = flag(0.95, "beta 2 of AdamW", low=0, high=1)
    max_grad_norm: float = flag(1.0, "bound on each model's global gradient norm; 0: off", low=0)
    max_skipped_steps: int = flag(
        3,
        "stop the run after this many steps in a row in which every update of a model was skipped "
        "because its gradient was not finite; 0: never",
        low=0,
        neutral=True,
    )


@dataclass(frozen=True)
class CheckpointArgs:
    """checkpoints"""

    save_every: int = flag(
        50,
        "steps between checkpoints, and after the last step; -1: only after the last step, 0: "
        "never",
        low=-1,
        neutral=True,
    )
    keep_last: int = flag(2, "complete checkpoints kept", low=1, neutral=True)
    keep_gb: float = flag(
        0.0,
        "disk space of complete checkpoints, 10^9 bytes: beyond it the oldest are deleted, never "
        "the newest; 0: no limit",
        low=0,
        neutral=True,
    )
    save_strategy: str = flag(
        "unrestricted",
        "who writes at the same time: all ranks, those of one node, or one rank",
        choices=("unrestricted", "single_node", "single_process", "single_thread"),
        neutral=True,
    )
    save_blocking: bool = flag(
        False, "wait for each checkpoint instead of writing it in the background", neutral=True
    )
    max_failed_saves: int = flag(
        3,
        "stop the run after this many failed saves in a row, of checkpoints or of records",
        low=1,
        neutral=True,
    )
    export_every: int = flag(
        -1,
        "steps between exports of the weights; -1: only the last step, 0: never",
        low=-1,
        neutral=True,
    )
    resume: str = flag(
        "auto",
        "auto: go on from the newest checkpoint in --out if there is one; must: there has to be "
        "one; never: --out must be new; force: as auto, whatever flags have changed; or the path "
        "of a checkpoint (or its latest), from which an --out without checkpoints starts; with "
        "--export_only also the step of one in --out",
        neutral=True,
    )


@dataclass(frozen=True)
class RunArgs:
    """run"""

    out: Path = flag(Path("runs/latest"), "output folder", neutral=True)
    seed: int = flag(0, "seed of sampling and data order", low=0, high=2**32 - 1)
    eval_every: int = flag(
        -1,
        "steps between evaluations, besides start and end; -1: once per pass over the data, 0: "
        "never",
        low=-1,
        neutral=True,
    )
    eval_only: bool = flag(False, "evaluate the model and stop", neutral=True)
    export_only: bool = flag(
        False,
        "export the weights of the run in --out, from its newest checkpoint or --resume PATH, and "
        "stop; the other flags are those of the run",
        neutral=True,
    )
    log_samples: int = flag(
        4,
        "samples shown as pictures and text, with every evaluation and some steps; 0: none",
        low=0,
        neutral=True,
    )
    log_samples_every: int = flag(
        5,
        "steps between samples of training; the first and the last step are always shown",
        low=1,
        neutral=True,
    )
    timeout: float = flag(
        1800.0,
        "longest wait of a rank for the others, seconds",
        low=1e-6,
        high=LONGEST_WAIT,
        neutral=True,
    )
    hsdp: int = flag(
        0,
        "ranks that share one copy of weights and optimizer, such as the GPUs of a node; only "
        "gradients travel between the copies (HSDP). 0: all ranks share one",
        low=0,
        neutral=True,
    )
