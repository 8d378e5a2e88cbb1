"""The product of an input and a packed weight, as an op that Dynamo does not look into, with gradients."""

from typing import Any

import torch

from fp4compile.formats import formats
from fp4compile.formats.product_spec import text_of
from fp4compile.ops.define import LIBRARY
from fp4compile.weights.buffers import layout_of, typed


def packed_linear(
    input: torch.Tensor, bias: torch.Tensor | None, data: torch.Tensor, scales: torch.Tensor | None,
    outer: torch.Tensor | None, static: torch.Tensor | None, activation: str | None, weight: str,
) -> torch.Tensor:  # fmt: skip
    """input [..., in] times a packed weight [out, in], plus bias [out]: [..., out] in the dtype of the input.

    data, scales, outer: the buffers of a `PackedWeight`. static: the global scale of the input, float32 []; None
    computes it. activation, weight: names of formats; activation None leaves the input unquantised.

    Raises RuntimeError if a buffer is a rank's shard, TypeError if a loader has cast it.
    """
    bias = None if bias is None else bias.to(input.dtype)
    # The buffers have one layout, which is also that of the input's scales: matrix units read swizzled scales.
    layout = layout_of(scales, experts=False)
    rows = input.reshape(-1, input.shape[-1])
    product = rows, bias, *typed(weight, data, scales, outer), static, activation, weight, layout
    # `view` follows the function, because a result of it that is a view may not be written to.
    y = (_Product.apply if torch.is_grad_enabled() and trains(rows, bias) else _product)(*product)
    return y.view(*input.shape[:-1], y.shape[-1])


# Dynamo puts one node into its graph instead of tracing the function's lines for each layer, which takes longer. The
# dispatcher calls the function wherever it meets the op, so that no later graph has it.
LIBRARY.define("packed_linear(Tensor input, Tensor? bias, Tensor data, Tensor? scales, Tensor? outer, Tensor? static, "
               "str? activation, str weight) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))  # fmt: skip
LIBRARY.impl("packed_linear", packed_linear, "CompositeImplicitAutograd")


def trains(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the input or the bias of a product has a gradient."""
    return x.requires_grad or (bias is not None and bias.requires_grad)


def _product(
    x: torch.Tensor, bias: torch.Tensor | None, data: torch.Tensor, scales: torch.Tensor | None,
    outer: torch.Tensor | None, static: torch.Tensor | None, activation: str | None, weight: str, scale_layout: str,
) -> torch.Tensor:  # fmt: skip
    """x [rows, in] times a packed weight [out, in], plus bias [out]: [rows, out] in the dtype of x."""
    a: tuple = x, None, None
    if activation is not None:
        fmt = formats.get(activation)
        codes, of_blocks, computed = torch.ops.fp4compile.quantize(x, fmt.name, outer=static, layout=scale_layout)
        of_tensor = static if static is not None else computed if fmt.outer else None
        a = codes, of_blocks if fmt.scale else None, of_tensor
    spec = text_of(activation, weight, x.dtype)
    return torch.ops.fp4compile.scaled_mm(*a, data, scales, outer, spec, bias=bias)


class _Product(torch.autograd.Function):
    """`_product` with gradients of x and bias. It saves only the buffers of the layer, no activation."""

    forward = staticmethod(_product)
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        x, _, data, scales, outer, _, _, weight, _ = inputs
        ctx.save_for_backward(data, scales, outer)
        ctx.format, ctx.in_features = weight, x.shape[-1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        of_x, of_bias = None, None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ torch.ops.fp4compile.dequantize(
                *ctx.saved_tensors, ctx.format, ctx.in_features, gradient.dtype
            )
        if ctx.needs_input_grad[1]:
            of_bias = gradient.sum(0)
        return of_x, of_bias, *[None] * 7
