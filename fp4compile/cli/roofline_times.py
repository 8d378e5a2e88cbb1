"""The measurements of `roofline --measure`: a layer in bf16 and under a recipe, on this machine's GPU.

Every time is the median of replays of a CUDA graph (`run_times.graph_time`). At most MOST_LAYERS copies of the layer,
with separate weights, run in turn, so that the L2 cache holds none of them if together they exceed it.

Rows are divided equally among the experts, to within one row.
"""

from collections.abc import Callable
from typing import Any

import torch

from fp4compile.check.run_times import CALLS, NOT_CACHED, graph_time
from fp4compile.cli.roofline_shapes import LayerShape
from fp4compile.dynamo_backend import backend
from fp4compile.formats.layouts import ceil_div
from fp4compile.recipe import Recipe, resolve

MOST_LAYERS = 8  # each is compiled


class ExpertsLayer(torch.nn.Module):
    """The product of equal groups of rows with the experts' weights."""

    def __init__(self, shape: LayerShape, count: int) -> None:
        super().__init__()
        weight = torch.randn(count, shape.n, shape.k, device="cuda", dtype=torch.bfloat16) / shape.k**0.5
        self.weight = torch.nn.Parameter(weight)
        ends = [shape.m * (i + 1) // count for i in range(count)]
        self.register_buffer("offs", torch.tensor(ends, device="cuda", dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x, self.weight.transpose(-2, -1), offs=self.offs)


def measured(recipe: Recipe, shape: LayerShape, train: bool) -> dict[str, float]:
    """Microseconds of a layer in bf16 and under the recipe, and their quotient."""
    m, n, k = shape.sizes
    copies = min(max(1, NOT_CACHED // (2 * n * k * (shape.experts or 1))), MOST_LAYERS)
    layers = [_layer(shape) for _ in range(copies)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=train)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    if recipe.activation_scale == "static":  # the value of the scale does not affect the time
        recipe = resolve(recipe, static_scales={"": 1.0})
    torch._dynamo.reset()  # each shape is compiled separately
    compiled = [torch.compile(layer, backend=backend(recipe, strict=True), dynamic=False) for layer in layers]
    with torch.set_grad_enabled(train):
        plain, quantised = (
            _time([_call(layer, weights.weight, x, dy, train) for layer, weights in zip(each, layers, strict=True)])
            for each in (layers, compiled)
        )
    return {"measured_bf16_us": plain, "measured_recipe_us": quantised, "measured_gain": plain / quantised}


def _layer(shape: LayerShape) -> torch.nn.Module:
    if shape.experts is not None:
        return ExpertsLayer(shape, shape.experts)
    return torch.nn.Linear(shape.k, shape.n, bias=False, device="cuda", dtype=torch.bfloat16)


def _time(calls: list[Callable[[], Any]]) -> float:
    """Microseconds for each call.

    Each call runs once before the capture: compilation is forbidden during a capture, and a weight that is packed
    during a capture would be packed again in every replay.
    """
    for call in calls:
        call()
    return graph_time(calls * ceil_div(CALLS, len(calls)))


def _call(
    layer: Callable, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, train: bool
) -> Callable[[], Any]:  # fmt: skip
    """One run of a layer; with its gradients, in training."""
    if not train:
        return lambda: layer(x)
    return lambda: torch.autograd.grad(layer(x), (x, weight), dy)
