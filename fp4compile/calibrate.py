"""Static activation scales: run a model over sample batches, and record each layer's largest activation."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fp4compile.explain import observe
from fp4compile.passes.plan import Decision
from fp4compile.recipe import Recipe, resolve
from fp4compile.reference import NVFP4_MAX


def calibrate(model: Callable, batches: Iterable[Any], recipe: str | dict | Recipe | Path = "nvfp4_static") -> Recipe:
    """The recipe, with static activation scales that are measured on the batches.

    The scale of a layer is the decode factor amax / 2688 of all its activations. Layers that the recipe leaves alone,
    or whose activations it does not scale so, are not measured.

    model: a module or another callable, compiled or not; it runs uncompiled, and without gradients.
    batches: an iterable of batches. A batch is a tensor, a tuple or list of positional arguments for the model, or a
        mapping of keyword arguments (such as a dict, or a tokenizer's output).
    recipe: one whose activations (fprop_x) are NVFP4 with one outer scale a tensor, static or dynamic.

    Raises ValueError for another recipe, for no batches, if the recipe gives no layer a static scale, and if an
    activation is not finite; TypeError for `batches` that are a single batch.
    """
    chosen = resolve(recipe).replace(activation_scale="static")
    _check_batches(batches)
    amax: dict[str, torch.Tensor] = {}

    def see(decision: Decision, activation: torch.Tensor) -> None:
        name = decision.gemm.module
        seen = activation.detach().float().abs().amax() if activation.numel() else activation.new_zeros(())
        amax[name] = torch.maximum(amax[name], seen) if name in amax else seen

    watched = observe(model, chosen, see)
    count = 0
    with torch.no_grad():
        for batch in batches:
            _call(watched, batch)
            count += 1
    if count == 0:
        raise ValueError("batches: got none; calibration needs at least one")
    if not amax:
        raise ValueError(
            f"model: recipe {chosen.name!r} quantises no layer of it with a static scale, or no graph of it was "
            "captured; fp4compile.explain shows which"
        )
    return chosen.replace(static_scales={name: _decode_factor(name, value) for name, value in amax.items()})


def _check_batches(batches: Any) -> None:
    if isinstance(batches, torch.Tensor | Mapping | str):
        raise TypeError(
            f"batches: expected an iterable of batches, got {type(batches).__name__}; for one batch, pass [batch]"
        )


def _call(model: Callable, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


def _decode_factor(name: str, amax: torch.Tensor) -> float:
    if not torch.isfinite(amax):
        raise ValueError(f"batches: the activation of layer {name!r} is not finite")
    # A recipe takes normal float32 numbers only, because the inverse of a smaller one overflows. Raising the factor to
    # the smallest of them clips nothing.
    return max((amax / NVFP4_MAX).item(), torch.finfo(torch.float32).tiny) if amax > 0 else 1.0
