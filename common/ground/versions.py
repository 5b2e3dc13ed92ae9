"""The packages that this project needs, and the versions that were tried."""

import os
import platform
import sys
from importlib import metadata
from importlib.util import find_spec

from common.ground.files import say

PACKAGES = ("torch", "transformers", "safetensors", "PIL", "numpy", "tqdm", "tensorboard")
# The oldest and the newest that were tried.
TRIED = {"Python": ("3.11", "3.12"), "torch": ("2.11", "2.15"), "transformers": ("5.17", "5.24")}


def require(*packages: str) -> None:
    """End the process with a message, exit code 2, if one of these cannot be imported."""
    missing = [package for package in packages if find_spec(package) is None]
    if not missing:
        return
    if is_first_of_machine():
        names = ", ".join(missing).replace("PIL", "PIL (pillow)")
        say(
            f"error: {sys.executable} has no {names}. In the project's folder, `source launch/setup.sh` "
            "chooses or makes an environment with all packages",
            file=sys.stderr,
        )
    sys.exit(2)


def check() -> None:
    """Before imports of what older versions do not have: all packages are there, none is older than what
    was tried; a newer one gets a line. Ends the process as `require` does."""
    require(*PACKAGES)
    from packaging.version import Version  # comes with transformers

    for name, (oldest, newest) in TRIED.items():
        version = platform.python_version() if name == "Python" else metadata.version(name)
        release = Version(version).release  # 2.11.0a0 of a container is 2.11
        if release < Version(oldest).release:
            if is_first_of_machine():
                say(
                    f"error: {name} {version} is too old; {oldest} or newer is needed",
                    file=sys.stderr,
                )
            sys.exit(2)
        if release[:2] > Version(newest).release and os.environ.get("RANK", "0") == "0":
            say(f"{name} {version} is newer than {newest}, the newest that was tried")


def is_first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
