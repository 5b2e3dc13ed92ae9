"""How responses are drawn: the same settings for the rollout, for scoring and for training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Environment:
    """The class of --env, its attributes, and the limits of its conversations."""

    spec: str  # as in --env
    of: Any  # user_code.Class
    role: str  # of its messages
    shows_images: bool  # whether its replies may contain images
    max_turns: int
    max_reply_tokens: int  # of all replies in a sample
    timeout: float  # of a call, seconds
    workers: int  # calls at a time; 0: one, for which decoding waits
    max_prompt_tokens: int  # with a first observation
    sees_cut_turns: bool  # whether `step` is called for a turn that a token limit has cut


@dataclass(frozen=True, eq=False, kw_only=True)
class Sampling:
    """How tokens are drawn. A batch keeps the `Sampling` it was drawn with, so that scoring and
    training use the distribution that was sampled from."""

    banned: Tensor  # (V,) bool: ids that are never drawn, such as image tokens
    stop_ids: Tensor  # (k,) ids that end a response
    max_new_tokens: int
    keeps_experts: bool = (
        False  # whether a batch of samples, unless greedy, gets the experts that its tokens chose
    )
    min_new_tokens: int = 0  # before that, stop ids are banned
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    greedy: bool = False
    stop_strings: Sequence[str] = ()
    seed: int = 0
    stream: int = 0  # of the noise: samples of another stream are independent
    slots: int = 0  # sequences that decode together; 0: as many as fit into memory
    cuda_graphs: str = "auto"  # as the flag says
    environment: Environment | None = None  # answers the policy's turns; None: there is one turn

    def logits_options(self, position: Tensor) -> dict:
        """The arguments of `logprobs.logits_fp32` for tokens at ``position`` (n,) of their responses."""
        options = {"temperature": self.temperature, "banned": self.banned}
        if self.min_new_tokens:
            options |= {"early": position < self.min_new_tokens, "early_banned": self.stop_ids}
        return options
