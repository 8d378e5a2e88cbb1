"""`pack_`: replace the parameters of a model by packed weights, so that it needs less memory.

The results of a packed layer, eager or compiled, have the bits of the compiled original layer.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from fp4compile.analysis.module_names import check_module
from fp4compile.recipe import Recipe, resolve
from fp4compile.report.progress import with_bar
from fp4compile.report.report import Report
from fp4compile.weights.buffers import PackedWeight
from fp4compile.weights.decide import decisions
from fp4compile.weights.fused_groups import with_shared_scales
from fp4compile.weights.integration import save_as_packed
from fp4compile.weights.linear import leave_fast_paths


def pack_(
    model: nn.Module,
    recipe: str | dict | Recipe | Path | None = None,
    *,
    contracted: Mapping[str, int] | None = None,
    shared_scales: bool = False,
    progress: bool = True,
) -> Report:
    """Replace the linear layers and the weights of experts that a recipe quantises by packed ones, in place.

    recipe: as for `fp4compile.backend`; its settings for the forward matmul are used.
    contracted: for parameters of experts, by pattern of their full names, the dimension along which they are
        contracted: -1 where they are [experts, out, in], -2 where they are [experts, in, out]. Most experts of
        transformers declare it themselves (`is_transposed`).
    shared_scales: whether q, k and v, and gate and up, get one global scale of their weights and one of their
        activations, which engines need that multiply them as one weight (`export_packed`). It costs some accuracy.
    progress: whether a terminal shows a progress bar, if the package tqdm is installed.

    Linear layers are modules of type `nn.Linear`, and the Conv1D of transformers. Not packed, with a reason in the
    report: subclasses, parametrised layers, layers with other hooks than forward hooks or with a shared weight, and
    trained weights, such as adapters. Rules match layers' own names, without parts that wrappers insert.

    Weights of experts are parameters [experts, ..., ...] of modules that are not torch's own. Their module stays, and
    reads dequantised weights; a module compiled by `fp4compile.backend` multiplies the codes.

    Each weight is freed as it is packed. Packed layers are for inference, and keep forward hooks and attributes. For a
    model that runs under autocast, call `pack_` under autocast, so that weights are cast before they are quantised.

    Returns a report of the packed weights, and the reasons for all others. Warns of rules that decide about no layer,
    and of trained weights in a model without adapters. Raises TypeError if `model` is no module, ValueError if it is a
    linear layer itself, TypeError or ValueError for a bad `contracted`, and the errors of `backend` for a bad recipe.
    """
    check_module(model)
    report = Report(
        resolve(recipe).name, packed_before=sum(isinstance(module, PackedWeight) for module in model.modules())
    )
    decided = decisions(model, recipe, contracted)
    weights = [weight for weight, _ in decided if weight is not None]
    shared = with_shared_scales(model, weights) if shared_scales else {}
    for weight, row in with_bar(decided, "pack" if progress else None):
        if weight is not None:
            shared_weight, amax = shared.get(weight.names, (weight, None))
            shared_weight.pack(model, amax)
        report.add([] if row is None else [row], {})
    leave_fast_paths(model)
    save_as_packed(model)
    return report
