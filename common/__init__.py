"""What both scripts share; README.md beside this file draws the rooms."""

import platform

import torch
import transformers
from packaging.version import Version

# Before imports of what older ones do not have.
LEAST = {
    "Python": (platform.python_version(), "3.11"),
    "torch": (torch.__version__, "2.11"),
    "transformers": (transformers.__version__, "5.17"),
}
for name, (version, least) in LEAST.items():
    if Version(version).release < Version(least).release:  # 2.11.0a0 of a container is 2.11
        raise ImportError(f"{name} {version}: too old; {least} or newer is needed")
