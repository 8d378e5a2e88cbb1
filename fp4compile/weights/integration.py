"""Hooks into transformers for packed models. This package does not import transformers before the user does."""

import sys
import warnings

from torch import nn

from fp4compile.weights.buffers import packed_modules
from fp4compile.weights.published.expert_names import PublishedNames, names_of_transformers


def save_as_packed(model: nn.Module) -> None:
    """Make `save_pretrained` of every transformers model in a packed model write its packed form."""
    if _is_imported():  # models of older versions can be packed; `save_packed` writes them
        from fp4compile.weights.transformers import attach

        attach(model)


def warn_of_packed(model: nn.Module) -> None:
    """Warn if a model that a library is about to write has packed layers, of which its `from_pretrained` is unaware."""
    if packed_modules(model):
        warnings.warn(f"from_pretrained of {type(model).__name__} gives packed layers random weights: write the model "
                      "by fp4compile.save_packed, and read it by load_packed", stacklevel=3)  # fmt: skip


def published_names(model: nn.Module) -> PublishedNames:
    """The names of a model's tensors in published checkpoints; its own where transformers has no mapping."""
    # Before version 5, models store experts as checkpoints do.
    if _is_imported() and isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return names_of_transformers(model)
    return PublishedNames()


def _is_imported() -> bool:
    """Whether transformers is imported, in version 5 or later."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and int(transformers.__version__.partition(".")[0]) >= 5


def check_version() -> None:
    """Raise ImportError if transformers 5 or later is not installed."""
    import transformers

    if not _is_imported():
        raise ImportError(f"transformers: expected version 5 or later, got {transformers.__version__}")
