"""Hooks into transformers for packed models. This package does not import transformers before the user does."""

import sys
import warnings

from torch import nn

from fp4compile.weights.buffers import packed_modules
from fp4compile.weights.published.expert_names import PublishedNames, names_of_transformers

SAVES = (5, 9)  # the oldest version of transformers whose `save_pretrained` and `from_pretrained` take packed layers


def save_as_packed(model: nn.Module) -> bool:
    """Make `save_pretrained` of every transformers model in a packed model write its packed form.

    Returns whether it does. Models of older versions than `SAVES` can be packed, and `save_packed` writes them.
    """
    if _imported() < SAVES:
        return False
    from fp4compile.weights.transformers import attach

    attach(model)
    return True


def warn_of_packed(model: nn.Module) -> None:
    """Warn if a model that a library is about to write has packed layers, of which its `from_pretrained` is unaware."""
    if packed_modules(model):
        warnings.warn(f"from_pretrained of {type(model).__name__} gives packed layers random weights: write the model "
                      "by fp4compile.save_packed, and read it by load_packed", stacklevel=3)  # fmt: skip


def published_names(model: nn.Module) -> PublishedNames:
    """The names of a model's tensors in published checkpoints; its own where transformers has no mapping."""
    # Before version 5, models store experts as checkpoints do.
    if _imported() >= (5,) and isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return names_of_transformers(model)
    return PublishedNames()


def _imported() -> tuple[int, ...]:
    """The first two numbers of the version of transformers; () if it is not imported."""
    transformers = sys.modules.get("transformers")
    return () if transformers is None else tuple(map(int, transformers.__version__.split(".")[:2]))


def check_version() -> None:
    """Raise ImportError if transformers is older than `SAVES`, or is not installed."""
    import transformers

    if _imported() < SAVES:
        oldest = ".".join(map(str, SAVES))
        raise ImportError(f"transformers: expected version {oldest} or later, got {transformers.__version__}")
