"""What transformers is told of packed models. It is imported by those who use it, never by this package alone."""

import sys

from torch import nn

from fp4compile.weights.published.expert_names import PublishedNames, names_of_transformers


def register_with_transformers() -> None:
    """Make `from_pretrained` of transformers read packed models that `save_pretrained` wrote.

    `save_pretrained` of a packed model needs no call.

    Raises ImportError where transformers 5 or later is not installed.
    """
    _check_version()
    from fp4compile.weights.transformers import register

    register()


def save_as_packed(model: nn.Module) -> None:
    """Let `save_pretrained` of a packed model of transformers write it as one."""
    if "transformers" not in sys.modules:
        return
    try:
        _check_version()
    except ImportError:  # its models are packed all the same; `save_packed` writes them
        return
    from fp4compile.weights.transformers import attach

    attach(model)


def published_names(model: nn.Module) -> PublishedNames:
    """The names that the tensors of a model have in published checkpoints; its own where transformers knows none."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return PublishedNames()
    try:
        _check_version()
    except ImportError:  # before version 5, models have experts as checkpoints have them
        return PublishedNames()
    return names_of_transformers(model)


def _check_version() -> None:
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ImportError(f"transformers: expected version 5 or later, got {transformers.__version__}")
