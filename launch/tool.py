"""The frame around the main of a tool, which ends as the scripts do, its flags and the bounds of these.

Importing it first puts the project's folder on the path, and common/ behind all others."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Behind all other folders: common/ has a logging.py. As a package, it needs torch.
sys.path[:] = [str(ROOT), *sys.path, str(ROOT / "common")]
from files import say, show_anything

show_anything()


@contextmanager
def one_message():
    """Around a main: what is wrong with files or flags becomes one message and exit code 2."""
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:  # an integer of JSON may have any size
        say(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def parser(text: str) -> ArgumentParser:
    """With the docstring of the tool, as it is written."""
    return ArgumentParser(
        description=text, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )


def between(low: int | float, high: int | float) -> Callable[[str], int | float]:
    """The argparse type of a number of the type of ``low`` and in these bounds."""

    def number(text: str) -> int | float:
        value = type(low)(text)
        if not low <= value <= high:  # NaN is not
            raise ArgumentTypeError(f"{text} must be {low} to {high}")
        return value

    return number
