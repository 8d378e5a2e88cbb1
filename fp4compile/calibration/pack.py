"""`pack_`: replace the parameters of a model by packed weights, so that it needs less memory.

The results of a packed layer, eager or compiled, have the bits of the compiled original layer, unless batches decide
about its codes.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4compile.analysis.module_names import check_module
from fp4compile.calibration.batches import over
from fp4compile.recipe import Recipe, resolve
from fp4compile.report.progress import with_bar
from fp4compile.report.report import Report, Row
from fp4compile.weights.buffers import PackedWeight
from fp4compile.weights.decide import decisions
from fp4compile.weights.fused_groups import with_shared_scales
from fp4compile.weights.gptq import FEWEST_TOKENS
from fp4compile.weights.integration import save_as_packed
from fp4compile.weights.linear import leave_fast_paths
from fp4compile.weights.replacements import Weight


def pack_(
    model: nn.Module,
    recipe: str | dict | Recipe | Path | None = None,
    *,
    batches: Iterable[Any] | None = None,
    contracted: Mapping[str, int] | None = None,
    shared_scales: bool = False,
    progress: bool = True,
) -> Report:
    """Replace the linear layers and the weights of experts that a recipe quantises by packed ones, in place.

    recipe: as for `fp4compile.backend`; its settings for the forward matmul are used.
    batches: for `weight_method` "gptq" alone: an iterable of sample batches, as for `calibrate`. The model runs over
        them uncompiled, without gradients and in eval mode.
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

    Each weight is freed as it is packed; with batches, all are freed at the end. Packed layers are for inference, and
    keep forward hooks and attributes. For a model that runs under autocast, call `pack_` under autocast, so that
    weights are cast before they are quantised.

    Returns a report of the packed weights, and the reasons for all others. Warns of rules that decide about no layer,
    of trained weights in a model without adapters, of weights and experts that fewer than 16 tokens of the batches
    reach, which are rounded to nearest, and of layers that also run outside of the captured graphs. Raises TypeError if
    `model` is no module, ValueError if it is a linear layer itself, and for batches and a model on the meta device,
    TypeError or ValueError for a bad `contracted` and for `batches` that are missing, superfluous, empty or not finite,
    and the errors of `backend` for a bad recipe.
    """
    check_module(model)
    chosen = resolve(recipe)
    if chosen.needs_batches and batches is None:
        raise ValueError(f"batches: recipe {chosen.name!r} needs batches")
    if batches is not None and not chosen.needs_batches:
        raise ValueError(f"batches: recipe {chosen.name!r} uses no batches; weight_method 'gptq' does")
    report = Report(
        chosen.name, packed_before=sum(isinstance(module, PackedWeight) for module in model.modules())
    )  # fmt: skip
    with torch.inference_mode(False):  # a tensor that inference mode makes takes no part in training
        decided = decisions(model, chosen, contracted)
        weights = [weight for weight, _ in decided if weight is not None]
        shared = with_shared_scales(model, weights) if shared_scales else {}
        fitted: dict[tuple[str, ...], _Fitted] = {}
        if batches is not None:
            fitted = _fitted(model, weights, shared, list(over(batches)), progress)
        for weight, row in with_bar(decided, "pack" if progress else None):
            found = None if weight is None else fitted.get(weight.names)
            if weight is not None and found is not None:
                weight.put(model, found.packed)
                row = None if row is None else found.described(row)
            elif weight is not None:
                shared_weight, amax = shared.get(weight.names, (weight, None))
                shared_weight.pack(model, amax)
            report.add([] if row is None else [row], {})
        leave_fast_paths(model)
        save_as_packed(model)
    return report


# ---------------------------------------------------------------- with batches


@dataclass(frozen=True)
class _Fitted:
    """A packed weight whose codes batches decide. few: the matrices with too few tokens, rounded to nearest."""

    packed: PackedWeight
    few: tuple[int, ...]

    def described(self, row: Row) -> Row:
        """The weight's row in the report."""
        row = replace(row, weight_scales=f"{self.packed.layer_format.scale_rule}, gptq")
        if not self.few:
            return row
        which = f"experts {', '.join(map(str, self.few))}" if self.packed.experts else "the layer"
        note = f"rounded to nearest, for lack of tokens: {which}"
        return replace(row, note="; ".join(filter(None, (row.note, note))))


def _fitted(
    model: nn.Module, weights: list[Weight], shared: dict[tuple[str, ...], tuple[Weight, torch.Tensor]],
    batches: list[Any], progress: bool,
) -> dict[tuple[str, ...], _Fitted]:  # fmt: skip
    """The packed weights by their names."""
    from fp4compile.calibration.hessians import moments_of  # imports Dynamo

    wanted = [shared.get(one.names, (one, None)) for one in weights]
    amaxes = {weight.names: amax for weight, amax in wanted}
    measured = moments_of(model, [weight for weight, _ in wanted], batches, progress)
    found: dict[tuple[str, ...], _Fitted] = {}
    missed: list[str] = []
    for weight, moments, outside in with_bar(measured, "fit" if progress else None):
        packed = weight.empty(model)
        packed.fit(weight.parameter(model), moments, amaxes[weight.names])
        found[weight.names] = _Fitted(packed, moments.few)
        missed += [weight.names[0]] if outside else []
    if missed:
        warnings.warn(
            "batches: tokens do not count where layers run outside of the captured graphs, for example in functions "
            f"with a graph break inside a loop: {', '.join(missed)}",
            stacklevel=3,
        )
    _warn_of_few(found)
    return found


def _warn_of_few(found: Mapping[tuple[str, ...], _Fitted]) -> None:
    lacking = [f"{names[0]}[{i}]" if one.packed.experts else names[0] for names, one in found.items() for i in one.few]
    if lacking:
        warnings.warn(
            f"batches: fewer than {FEWEST_TOKENS} tokens reached {len(lacking)} weights, such as {lacking[0]!r}; "
            "they are rounded to nearest",
            stacklevel=4,
        )
