"""Packages that the tests or a user may lack, installed by pip into a folder of their own."""

import importlib.util
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def installed(package: str, module: str, folder: Path):
    """Put a package on the path, in `folder` unless it is installed. Skips the test where pip
    cannot get it."""
    if importlib.util.find_spec(module):
        yield
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # a tenth of its files is imported
    command += ["--no-compile", "--target", str(folder), package]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{package} is not installed, and pip took more than 300 s to get it")
    if result.returncode != 0:
        pytest.skip(
            f"{package} is not installed, and pip cannot get it: {result.stderr.strip()[-300:]}"
        )

    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))
    for name, loaded in list(sys.modules.items()):  # as if it had never been there
        if (getattr(loaded, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
