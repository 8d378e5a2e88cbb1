"""Arguments that several commands take."""

import argparse
from pathlib import Path

from fp4compile.recipe import Recipe, resolve


def recipe(name: str | Path | None) -> Recipe:
    """The recipe of a name or a path, as `resolve` takes them. Raises ArgumentTypeError for an unknown one."""
    try:
        return resolve(name)
    except (ValueError, TypeError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def new_file(value: str) -> Path:
    """A path to write to. Raises ArgumentTypeError, before a command computes for long, if its folder is not there."""
    if not Path(value).parent.is_dir() or Path(value).is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {value!r}")
    return Path(value)


def positive(value: str) -> int:
    """A positive whole number. Raises ArgumentTypeError for any other text."""
    if not value.isdecimal() or int(value) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {value!r}")
    return int(value)
