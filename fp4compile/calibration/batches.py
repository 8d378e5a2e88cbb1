"""Run a model over batches, in each of their possible forms."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from fp4compile.report.progress import with_bar


def over(batches: Iterable[Any], bar: str | None = None) -> Iterator[Any]:
    """The batches. bar: see `with_bar`. Raises TypeError for a single batch, ValueError for none."""
    if isinstance(batches, torch.Tensor | Mapping | str):
        raise TypeError(
            f"batches: expected an iterable of batches, got {type(batches).__name__}; for one batch, pass [batch]"
        )
    count = 0
    for count, batch in enumerate(with_bar(batches, bar), 1):  # noqa: B007
        yield batch
    if count == 0:
        raise ValueError("batches: got none; at least one is needed")


def call(model: Callable, batch: Any) -> Any:
    """The model's output. A batch is a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
