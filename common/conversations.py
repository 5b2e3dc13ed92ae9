"""What a policy and its environment said to each other in one sample.

    Conversation    turns, replies, rewards and how it ended: the same on every rank
    gather          those of all ranks, on every rank

Pictures, their patches and features stay on the rank that ran the environment.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common import distributed

ROLES = ("user", "tool")  # in whose name an environment may speak
# How a sample ends: by its environment, after --max_turns, by --max_new_tokens or
# --max_reply_tokens, by an environment that failed.
ENDINGS = ("answered", "turn_limit", "token_limit", "error")
# Parts of a message: {"type": "text", "text": ...}, {"type": "image", "width": w, "height": h}
Content = list[dict]
LOCAL = ("pictures", "patches", "features")


@dataclass
class Conversation:
    """One sample's conversation. Own tokens are those of the policy, counted over all turns."""

    role: str = "user"
    opening: Content = field(default_factory=list)  # the first observation
    replies: list[Content] = field(default_factory=list)
    tokens_before: list[int] = field(default_factory=list)  # own tokens before each reply
    ends: list[int] = field(default_factory=list)  # own tokens up to the end of each finished turn
    rewards: list[float] = field(default_factory=list)  # of each finished turn
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

    def shared(self) -> dict[str, Any]:
        """What all ranks know, JSON-ready."""
        return {
            part.name: getattr(self, part.name) for part in fields(self) if part.name not in LOCAL
        }

    def turn_tokens(self, tokens: Tensor) -> list[Tensor]:
        """A sample's own tokens (n,), turn by turn; the last turn may be cut short."""
        bounds = [0, *self.tokens_before, len(tokens)]
        return [tokens[start:end] for start, end in zip(bounds, bounds[1:])]


def gather(own: list[Conversation]) -> list[Conversation]:
    """The conversations of all ranks, rank after rank; this rank's keep what only it has."""
    found: list[Conversation] = []
    for said in own:
        said.owner = dist.get_rank()
    for rank, part in enumerate(distributed.gather_json([said.shared() for said in own])):
        if rank == dist.get_rank():
            found += own
            continue
        for values in part:
            values["grids"] = [tuple(grid) for grid in values["grids"]]
            found.append(Conversation(**values))
    return found
