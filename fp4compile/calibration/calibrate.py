"""Static activation scales: run a model over sample batches, and record each layer's amax."""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from fp4compile.analysis.find import find
from fp4compile.analysis.gemm import Gemm, Input
from fp4compile.analysis.plan import plan
from fp4compile.calibration import batches as sample
from fp4compile.calibration.observers import Observation, in_groups
from fp4compile.formats import formats
from fp4compile.formats.reference import outer_of
from fp4compile.recipe import Recipe, resolve


def calibrate(
    model: Callable,
    batches: Iterable[Any],
    recipe: str | dict | Recipe | Path = "nvfp4_static",
    *,
    progress: bool = True,
) -> Recipe:
    """The recipe, with static activation scales that are measured on the batches. `Recipe.save` writes it to a file.

    A layer's scale is made of amax, the largest magnitude of its activations, including those of all its experts:
    amax / 2688 for NVFP4, amax / 448 for FP8. Larger values saturate. A layer gets no scale if its activations were all
    zero or, with a warning, if it also ran outside of the captured graphs: it computes the scale at run time, and the
    report notes it.

    model: a module, its method `generate` or another callable; it runs uncompiled, without gradients, and a module in
        eval mode.
    batches: an iterable of batches: tensors, tuples or lists of arguments, or mappings of keyword arguments.
    recipe: as for `fp4compile.backend`, with activations (fprop_x) in a format with a global scale, static or dynamic:
        NVFP4 or float8_tensor.
    progress: whether a terminal shows a progress bar, if the package tqdm is installed.

    Raises ValueError for another recipe, for no batches, if the recipe gives no layer a static scale, for a module on
    the meta device, and if an activation is not finite; TypeError for a single batch and a model that cannot be called;
    the errors of `backend` for a bad recipe.
    """
    chosen = resolve(recipe).replace(activation_scale="static")
    kept: dict[str, tuple[torch.Tensor, str]] = {}  # amax and format of each layer's activations
    formats_of: dict[Node, str] = {}

    def choose(graph: Graph, inputs: tuple[Input, ...]) -> list[Gemm]:
        found = _with_static_scale(graph, chosen, inputs)
        formats_of.update({gemm.node: format for gemm, format in found})
        return [gemm for gemm, _ in found]

    def see(gemm: Gemm, names: set[str], _: Any, x: torch.Tensor, groups: torch.Tensor | None) -> None:
        x = x if gemm.offs is None or groups is None else in_groups(x, groups)
        amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        for name in names:
            before, format = kept.get(name, (amax, formats_of[gemm.node]))
            kept[name] = torch.maximum(before, amax.to(before.device)), format

    watched = Observation(model, choose, see)
    with sample.in_inference(model):
        for batch in sample.over(batches, "calibrate" if progress else None):
            sample.call(watched, batch)
    if not kept:
        raise ValueError(
            f"model: recipe {chosen.name!r} quantises no layer of it with a static scale, or no graph of it was "
            "captured; fp4compile.explain shows which"
        )
    unseen = watched.unseen()
    if unseen:
        warnings.warn(
            f"layers that also run outside of the captured graphs get no static scale: {', '.join(sorted(unseen))}",
            stacklevel=2,
        )
    factors = {name: _decode_factor(name, *of_layer) for name, of_layer in kept.items() if name not in unseen}
    return chosen.replace(static_scales={name: factor for name, factor in factors.items() if factor is not None})


def _with_static_scale(graph: Graph, recipe: Recipe, inputs: tuple[Input, ...]) -> list[tuple[Gemm, str]]:
    """The matmuls whose activation has a static scale, and the activation's format."""
    gemms = find(graph, inputs)
    # Every layer has a scale here, so a layer that is quantised without one reads no static scale.
    scales = {gemm.module: 1.0 for gemm in gemms if gemm.product == "fprop"}
    decisions = plan(gemms, recipe.replace(static_scales=scales), inputs)
    return [
        (one.gemm, treatment.format)
        for one in decisions for treatment in (one.a, one.b) if treatment is not None and treatment.outer is not None
    ]  # fmt: skip


def _decode_factor(name: str, amax: torch.Tensor, format: str) -> float | None:
    """The decode factor of a layer's activations; None where all were zero."""
    if not torch.isfinite(amax):
        raise ValueError(f"batches: the activation of layer {name!r} is not finite")
    # A recipe takes only normal float32 numbers, because the inverse of a smaller number overflows. Raising the factor
    # to the smallest normal number clips nothing.
    factor = max(outer_of(amax, formats.get(format)).item(), torch.finfo(torch.float32).tiny)
    return factor if amax > 0 else None
