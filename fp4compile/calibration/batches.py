"""Batches that a model is run over: what they may be, and a progress bar."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch


def over(batches: Iterable[Any], bar: str | None = None) -> Iterator[Any]:
    """The batches, one after the other; bar: as in `with_bar`.

    Raises TypeError for `batches` that are a single batch, ValueError where there are none.
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
    """The items under a progress bar: tqdm's, on a terminal, where that package is there. Nothing else needs it.

    bar: what stands beside the bar; None for no bar.
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
