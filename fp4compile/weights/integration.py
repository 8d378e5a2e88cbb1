"""Hooks into transformers for packed models. This package never imports transformers before the user has."""

import sys

from torch import nn

from fp4compile.weights.published.expert_names import PublishedNames, names_of_transformers


def save_as_packed(model: nn.Module) -> None:
    """Let `save_pretrained` write the packed form of a packed transformers model."""
    if "transformers" not in sys.modules:
        return
    try:
        check_version()
    except ImportError:  # models of older versions can be packed; `save_packed` writes them
        return
    from fp4compile.weights.transformers import attach

    attach(model)


def published_names(model: nn.Module) -> PublishedNames:
    """The names of a model's tensors in published checkpoints; its own where transformers has no mapping."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return PublishedNames()
    try:
        check_version()
    except ImportError:  # before version 5, models store experts as checkpoints do
        return PublishedNames()
    return names_of_transformers(model)


def check_version() -> None:
    """Raises ImportError where transformers 5 or later is not installed."""
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ImportError(f"transformers: expected version 5 or later, got {transformers.__version__}")
