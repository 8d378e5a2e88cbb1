"""The layout of a packed layer's block scales: the device's layout in the buffer, linear in states and files.

Where matrix units multiply the layer's formats, the buffer itself is swizzled, when a layer is made, moved or loaded; a
copy would take memory and could be out of date. The number of a buffer's dimensions tells its layout, so scales of any
layout that are assigned to a layer are multiplied correctly.
"""

from dataclasses import replace

import torch

from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import from_swizzled, scale_layout, swizzled_numel, to_swizzled
from fp4compile.formats.square import scales_of_rows
from fp4compile.hardware import Target
from fp4compile.templates.launch import target_of

_TOKENS = 4096  # stands for every number of tokens: the layout of a weight's scales does not depend on it


def layout_on(
    device: torch.device, activation: str | None, weight: str, out_features: int, in_features: int,
    experts: int | None = None,
) -> str:  # fmt: skip
    """The layout of a weight's block scales on a device.

    activation, weight: names of formats; None leaves the activation unquantised. experts: how many matrices the weight
    has; None for a linear layer's weight.
    """
    fmt, target = formats.get(weight), target_on(device)
    if target is None or activation is None or fmt.scale is None:
        return "linear"
    from fp4compile.templates.choose import choose
    from fp4compile.templates.problem import OperandType, Problem

    # Native is what the matrix units would compute if the scales of both operands were swizzled.
    a, b = (OperandType(one, one.data_dtype, True, one.outer or "none") for one in (formats.get(activation), fmt))
    problem = Problem(a, b, _TOKENS, out_features, in_features, torch.bfloat16, target)
    if experts is not None:
        a, b = (replace(x, outer="group") if x.outer == "tensor" else x for x in (a, b))
        problem = replace(problem, a=a, b=b, ragged="rows", groups=experts)
    return scale_layout(fmt, native=choose(problem).tier == "native")


def target_on(device: torch.device) -> Target | None:
    """The GPU of a CUDA device; None for any other device."""
    return target_of(device) if device.type == "cuda" else None


def laid_out(
    scales: torch.Tensor, fmt: BlockFormat, rows: int, linear_shape: tuple[int, ...], layout: str
) -> torch.Tensor:
    """The block scales of matrices in a layout; the same tensor if they have it, or where their shape fits no layout.

    rows: the rows of the matrix. linear_shape: the shape of its linear scales.
    """
    step = 1 if fmt.block is None else fmt.block[0]
    *batch, _, blocks = linear_shape
    if layout == "swizzled" and tuple(scales.shape) == linear_shape:
        return to_swizzled(scales_of_rows(scales, fmt, rows))
    if layout == "linear" and tuple(scales.shape) == (*batch, swizzled_numel(rows, blocks)):
        return from_swizzled(scales, rows, blocks)[..., ::step, :].contiguous()
    return scales
