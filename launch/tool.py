"""Shared by the tools: errors end in one message, as in the scripts; flags with bounds."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import contextmanager

from common.ground.files import UserError, say, show_anything

show_anything()


@contextmanager
def one_message():
    """Around a main: what is wrong with files or flags becomes one message and exit code 2; any
    other exception is a bug, and keeps its traceback."""
    try:
        yield
    except (OSError, UserError) as error:
        say(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def parser(text: str | None) -> ArgumentParser:
    """Shows the docstring of the tool unchanged."""
    return ArgumentParser(
        description=text, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )


def between(low: int | float, high: int | float) -> Callable[[str], int | float]:
    """An argparse type: a number of the type of ``low``, within these bounds."""

    def number(text: str) -> int | float:
        value = type(low)(text)
        if not low <= value <= high:  # NaN is not
            raise ArgumentTypeError(f"{text} must be {low} to {high}")
        return value

    return number
