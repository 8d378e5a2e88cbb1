"""`pack_`: replace the parameters of a model by packed weights. `weights.files` writes and reads packed models.

The backend keeps packed weights beside the parameters (`weights.cache`). `pack_` removes the parameters, so that a
model needs less memory. A packed layer computes the compiled layer's results, with equal bits, eagerly and compiled.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from fp4compile.recipe import Recipe, resolve
from fp4compile.report.progress import with_bar
from fp4compile.report.report import Report
from fp4compile.weights.buffers import PackedWeight, check_module
from fp4compile.weights.decide import decisions
from fp4compile.weights.integration import save_as_packed
from fp4compile.weights.linear import leave_fast_paths


def pack_(
    model: nn.Module,
    recipe: str | dict | Recipe | Path | None = None,
    *,
    contracted: Mapping[str, int] | None = None,
    progress: bool = True,
) -> Report:
    """Replace the linear layers and the weights of experts that a recipe quantises by packed ones, in place.

    recipe: as for `fp4compile.backend`; its settings for the forward product decide.
    contracted: for parameters of experts, by pattern of their full names, the dimension along which they are
        contracted: -1 where they are [experts, out, in], -2 where they are [experts, in, out]. Most experts of
        transformers declare it themselves (`is_transposed`).
    progress: whether a terminal shows a progress bar, if the package tqdm is installed.

    Linear layers are modules of type `nn.Linear`, and the Conv1D of transformers. A layer with several names in the
    model is packed once. `pack_` leaves alone, with a reason in the report: layers of a subclass, parametrised layers,
    layers with other hooks than forward hooks, and layers that share their weight with another linear layer. A weight
    that is also an embedding's stays with the embedding. What is trained stays too: adapters, the copies of peft's
    `modules_to_save`, and, with a warning, weights that require a gradient where others are frozen. Rules match the own
    names of layers, without what peft and other wrappers insert.

    Weights of experts are parameters [experts, ..., ...] of other modules than torch's own. Their module stays, and
    reads them dequantised; a module compiled by `fp4compile.backend` multiplies the codes. A parameter whose contracted
    dimension is unknown is left alone.

    Each weight is freed as it is packed. Packed layers are for inference. They keep the forward hooks and the
    attributes of the layers. For a model that runs under autocast, call `pack_` under autocast, so that the weights are
    cast before they are quantised, as in a run.

    Returns a report of the packed weights, and the reasons for all others; weights that were packed before are counted
    as `Report.packed_before`. Warns of rules that decide about no layer, and of trained weights in a model without
    adapters.

    Raises TypeError if `model` is no module, ValueError for a model that is itself a linear layer, TypeError or
    ValueError for a bad `contracted`, and the errors of `backend` for a bad recipe.
    """
    check_module(model)
    report = Report(
        resolve(recipe).name, packed_before=sum(isinstance(module, PackedWeight) for module in model.modules())
    )
    for weight, row in with_bar(decisions(model, recipe, contracted), "pack" if progress else None):
        if weight is not None:
            weight.pack(model)
        report.add([] if row is None else [row], {})
    leave_fast_paths(model)
    save_as_packed(model)
    return report
