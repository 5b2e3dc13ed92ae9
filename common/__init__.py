"""What both scripts share; README.md beside this file draws the rooms."""

import platform

import torch
import transformers

# Before imports of what older ones do not have.
LEAST = {
    "Python": (platform.python_version(), (3, 11)),
    "torch": (torch.__version__, (2, 11)),
    "transformers": (transformers.__version__, (5, 17)),
}
for name, (version, least) in LEAST.items():
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < least:
        raise ImportError(
            f"{name} {version}: too old; Python 3.11, torch 2.11 and transformers 5.17 are needed"
        )
