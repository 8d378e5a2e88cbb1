"""Batches that a model is run over: what they may be, and a progress bar."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch


def over(batches: Iterable[Any], what: str, progress: bool) -> Iterator[Any]:
    """The batches, one after the other, under a progress bar.

    The bar is tqdm's, on a terminal, where that package is there; nothing else needs it.

    Raises TypeError for `batches` that are a single batch, ValueError where there are none.
    """
    if isinstance(batches, torch.Tensor | Mapping | str):
        raise TypeError(
            f"batches: expected an iterable of batches, got {type(batches).__name__}; for one batch, pass [batch]"
        )
    count = 0
    for count, batch in enumerate(_with_bar(batches, what) if progress else batches, 1):  # noqa: B007
        yield batch
    if count == 0:
        raise ValueError("batches: got none; at least one is needed")


def _with_bar(batches: Iterable[Any], what: str) -> Iterable[Any]:
    if find_spec("tqdm") is None:
        return batches
    from tqdm.auto import tqdm

    return tqdm(batches, desc=what, disable=None)  # None: not where the output is no terminal


def call(model: Callable, batch: Any) -> Any:
    """The model's output. A batch is a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
