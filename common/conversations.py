"""What a policy and its environment said to each other in one sample.

    Conversation    turns, replies, rewards and how it ended: the same on every rank
    gather          those of all ranks, on every rank
    check_failures  stops a run whose environment has failed in every sample

Pictures, their patches and features stay on the rank that ran the environment.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from common import distributed
from common.process import UserError

ROLES = ("user", "tool")  # in whose name an environment may speak
# How a sample ends: by its environment, after --max_turns, by --max_new_tokens or
# --max_reply_tokens, by an environment that failed.
ENDINGS = ("answered", "turn_limit", "token_limit", "error")
# Parts of a message: {"type": "text", "text": ...}, {"type": "image", "width": w, "height": h}
Content = list[dict]


@dataclass
class Conversation:
    """One sample's conversation. Own tokens are those of the policy, counted over all turns."""

    role: str = "user"
    opening: Content = field(default_factory=list)  # the first observation
    replies: list[Content] = field(default_factory=list)
    tokens_before: list[int] = field(default_factory=list)  # own tokens before each reply
    ends: list[int] = field(default_factory=list)  # own tokens up to the end of each finished turn
    rewards: list[float] = field(default_factory=list)  # of each finished turn
    accuracy: float | None = None  # as the environment said it last; None: it did not
    ended: str = ""  # one of ENDINGS
    error: str = ""  # what went wrong with the environment
    seconds: float = 0.0  # that its environment took
    # of the pictures that stand between the policy's tokens; not of those in the prompt
    grids: list[tuple] = field(default_factory=list)
    owner: int = 0  # the rank that ran the environment
    # Only on that rank:
    pictures: list = field(default_factory=list)  # Pillow's, those of the opening first
    patches: list[Tensor] = field(default_factory=list)  # of `grids`, until they have features
    features: Tensor | None = None  # (K, M, H) of `grids`, on the CPU

    def add_images(self, grids: tuple, patches: Tensor | None, features: Tensor | None) -> None:
        """Images of a reply, by their features (K, M, H), or by patches that are trained on."""
        self.grids += grids
        if patches is not None:
            self.patches.append(patches)
        elif features is not None:
            parts = [features] if self.features is None else [self.features, features]
            self.features = torch.cat(parts, dim=1)

    def turn_tokens(self, tokens: Tensor) -> list[Tensor]:
        """A sample's own tokens (n,), turn by turn; the last turn may be cut short."""
        bounds = [0, *self.tokens_before, len(tokens)]
        return [tokens[start:end] for start, end in zip(bounds, bounds[1:])]


def gather(own: list[Conversation]) -> list[Conversation]:
    """The conversations of all ranks, rank after rank; this rank's keep what only it has."""
    for conversation in own:
        conversation.owner = dist.get_rank()
    shared = [replace(conversation, pictures=[], patches=[], features=None) for conversation in own]
    by_rank = distributed.gather_objects(shared)
    by_rank[dist.get_rank()] = own
    return [conversation for part in by_rank for conversation in part]


def describe_failures(conversations: list[Conversation]) -> str:
    """In how many samples the environment has failed, and how it did in the first; "": in none."""
    errors = [conversation.error for conversation in conversations if conversation.error]
    if not errors:
        return ""
    return f"--env: {len(errors)} of {len(conversations)} samples failed, the first: {errors[0]}"


def check_failures(conversations: list[Conversation]) -> None:
    """Raises UserError: the environment has failed in every sample, so there is nothing to learn."""
    if conversations and all(conversation.error for conversation in conversations):
        raise UserError(describe_failures(conversations))
