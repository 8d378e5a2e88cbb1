"""Run a model over batches, in each of their possible forms, as it runs in inference."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fp4compile.analysis.module_names import module_of
from fp4compile.report.progress import with_bar


def over(batches: Iterable[Any], bar: str | None = None) -> Iterator[Any]:
    """The batches. bar: see `with_bar`. Raises TypeError for a single batch, ValueError for none."""
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")  # the second one of datasets
    if isinstance(batches, torch.Tensor | Mapping | str) or not is_iterable:
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


@contextmanager
def in_inference(model: Callable) -> Iterator[None]:
    """A context in which a module, or the module of a method, runs without gradients, as its packed layers will.

    All of its modules are in eval mode: dropout would change activations, and batch norms would count the batches.
    Torch's transformer encoders call their linear layers, instead of an operator that reads the weights. Raises
    ValueError for a module on the meta device.
    """
    root = module_of(model)
    modules = [] if root is None else list(root.modules())
    if root is not None:
        _check_values(root)
    modes = [module.training for module in modules]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for module in modules:
            module.training = False  # `eval()` may be overridden, and do more
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _check_values(model: nn.Module) -> None:
    """Raise ValueError for a model on the meta device, unless its modules load values when they run.

    accelerate replaces the `forward` of such modules.
    """
    if any("forward" in vars(module) for module in model.modules()):
        return
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"model: {name!r} is on the meta device, and has no values to run batches with")
