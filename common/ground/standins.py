"""Mocks in place of the packages that take seconds to import, for --help, which calls none of them."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

SLOW = (
    "transformers",
    "huggingface_hub",
    "safetensors",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
)


class StandIns(MetaPathFinder, Loader):
    """Finds the slow modules before Python does, and makes each a mock."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(SLOW) else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock()

    def exec_module(self, module: ModuleType) -> None:
        """A mock has every name already."""


def for_help() -> None:
    """Let what is imported from now on be mocks, where it is slow, if the command line has --help."""
    if {"-h", "--help"}.intersection(sys.argv):
        sys.meta_path.insert(0, StandIns())
