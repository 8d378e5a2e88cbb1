"""Run a model over batches: their possible forms, and a progress bar."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch


def over(batches: Iterable[Any], bar: str | None = None) -> Iterator[Any]:
    """Iterate over the batches. bar: see `with_bar`.

    Raises TypeError if `batches` is a single batch, ValueError if there are none.
    """
    if isinstance(batches, torch.Tensor | Mapping | str):
        raise TypeError(
            f"batches: expected an iterable of batches, got {type(batches).__name__}; for one batch, pass [batch]"
        )
    count = 0
    for count, batch in enumerate(with_bar(batches, bar), 1):  # noqa: B007
        yield batch
    if count == 0:
        raise ValueError("batches: got none; at least one is needed")


def with_bar(items: Iterable[Any], bar: str | None) -> Iterable[Any]:
    """The items, with a progress bar on a terminal if the package tqdm is installed.

    bar: the text beside the bar; None for no bar.
    """
    if bar is None or find_spec("tqdm") is None:
        return items
    from tqdm.auto import tqdm

    return tqdm(items, desc=bar, disable=None)  # None: not where the output is no terminal


def call(model: Callable, batch: Any) -> Any:
    """The model's output. A batch is a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
