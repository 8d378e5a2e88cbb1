"""Hooks into transformers for packed models. This package does not import transformers before the user does."""

import sys

from torch import nn

from fp4compile.weights.published.expert_names import PublishedNames, names_of_transformers


def save_as_packed(model: nn.Module) -> None:
    """Make `save_pretrained` of every transformers model in a packed model write its packed form."""
    if _is_imported():  # models of older versions can be packed; `save_packed` writes them
        from fp4compile.weights.transformers import attach

        attach(model)


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
