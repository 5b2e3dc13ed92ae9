"""What both scripts share; README.md beside this file lists the modules."""

import os
import platform
from importlib import metadata

from packaging.version import Version

from common.files import say

# By name the version that is here, and the oldest and the newest that were tried.
TRIED = {
    "Python": (platform.python_version(), "3.11", "3.12"),
    "torch": (metadata.version("torch"), "2.11", "2.15"),
    "transformers": (metadata.version("transformers"), "5.17", "5.24"),
}
# Before imports of what others do not have.
for name, (version, oldest, newest) in TRIED.items():
    release = Version(version).release  # 2.11.0a0 of a container is 2.11
    if release < Version(oldest).release:
        raise ImportError(f"{name} {version}: too old; {oldest} or newer is needed")
    if release[:2] > Version(newest).release and os.environ.get("RANK", "0") == "0":
        say(f"{name} {version} is newer than {newest}, the newest that was tried")
