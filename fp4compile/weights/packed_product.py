"""The product of an activation with a packed weight, and its gradients."""

from typing import Any

import torch

from fp4compile.formats import formats
from fp4compile.weights.buffers import LayerFormat


def packed_product(
    x: torch.Tensor, bias: torch.Tensor | None, data: torch.Tensor, scales: torch.Tensor | None,
    outer: torch.Tensor | None, layer_format: LayerFormat, scale_layout: str,
) -> torch.Tensor:  # fmt: skip
    """x [..., in] times the packed weight [out, in], plus bias [out]: [..., out] in the dtype of x.

    data, scales, outer: the buffers of `PackedLinear`. scale_layout: the layout of scales. The result is
    differentiable in x, where the quantising of x counts as the identity, and in bias.
    """
    if not (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))):
        return _product(x, bias, data, scales, outer, layer_format, scale_layout)
    return _PackedProduct.apply(x, bias, data, scales, outer, layer_format, scale_layout)


class _PackedProduct(torch.autograd.Function):
    """Saves only the buffers of the layer, no activation: the weight has no gradient."""

    @staticmethod
    def forward(*inputs: Any) -> torch.Tensor:
        return _product(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        x, _, data, scales, outer, layer_format, _ = inputs
        ctx.save_for_backward(data, scales, outer)
        ctx.format, ctx.in_features = layer_format.weight, x.shape[-1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        of_x, of_bias = None, None
        if ctx.needs_input_grad[0]:
            data, scales, outer = ctx.saved_tensors
            weight = torch.ops.fp4compile.dequantize(
                data, scales, outer, ctx.format, ctx.in_features, gradient.dtype
            )  # fmt: skip
            of_x = gradient @ weight
        if ctx.needs_input_grad[1]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_x, of_bias, None, None, None, None, None


def _product(
    x: torch.Tensor, bias: torch.Tensor | None, data: torch.Tensor, scales: torch.Tensor | None,
    outer: torch.Tensor | None, layer_format: LayerFormat, scale_layout: str,
) -> torch.Tensor:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    return torch.ops.fp4compile.scaled_mm(
        *_activation(rows, layer_format, scale_layout), layer_format.activation,
        data, scales, outer, layer_format.weight, bias, x.dtype,
    ).view(*x.shape[:-1], data.shape[-2])  # fmt: skip


def _activation(x: torch.Tensor, layer_format: LayerFormat, layout: str) -> tuple:
    """(data, scales, outer scale) of the rows of x in the layer's activation format; (x, None, None) without one."""
    if layer_format.activation is None:
        return x, None, None
    fmt, outer = formats.get(layer_format.activation), None
    if layer_format.activation_outer is not None:
        outer = torch.full((), layer_format.activation_outer, device=x.device)
    # Both operands have one layout: the matrix units read swizzled scales of both.
    data, scales, computed = torch.ops.fp4compile.quantize(x, fmt.name, outer=outer, layout=layout)
    return data, scales if fmt.scale else None, outer if outer is not None else computed if fmt.outer else None
