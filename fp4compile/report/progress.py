"""Progress bars for a terminal."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any


def with_bar(items: Iterable[Any], bar: str | None) -> Iterable[Any]:
    """The items, with a progress bar on a terminal if the package tqdm is installed.

    bar: the text beside the bar; None for no bar.
    """
    if bar is None or find_spec("tqdm") is None:
        return items
    from tqdm.auto import tqdm

    return tqdm(items, desc=bar, disable=None)  # None: not where the output is no terminal
