"""The layout of a packed layer's block scales: the device's layout in the buffer, linear in states and files.

On a GPU whose matrix units multiply the layer's formats, the buffer itself is swizzled. It is converted where a layer
is made, moved or loaded, once for the device. There is no swizzled copy beside linear scales: such a copy would take
memory, and would be out of date after an undetected write.

The number of a buffer's dimensions determines its layout. So scales that were assigned to a layer are multiplied in
their own layout. That is right on every device, though not native.
"""

import torch

from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.layouts import from_swizzled, scale_layout, swizzled_numel, to_swizzled
from fp4compile.formats.product_spec import OperandSpec, ProductSpec
from fp4compile.formats.square import scales_of_rows
from fp4compile.hardware import Target
from fp4compile.templates.launch import target_of

_TOKENS = 4096  # stands for every number of tokens: the layout of a weight's scales does not depend on it


def layout_of(scales: torch.Tensor | None, *, matrices: bool = False) -> str:
    """The layout of the block scales of a matrix or of a batch of matrices: "linear" (also for None) or "swizzled".

    Swizzled scales are one flat run for each matrix.
    """
    return "swizzled" if scales is not None and scales.dim() == 1 + matrices else "linear"


def layout_on(
    device: torch.device, activation: str | None, weight: str, out_features: int, in_features: int,
    experts: int | None = None,
) -> str:  # fmt: skip
    """The layout of a weight's block scales on a device.

    activation, weight: names of formats; None leaves the activation unquantised. experts: how many matrices the weight
    has; None for a linear layer's weight.
    """
    fmt = formats.get(weight)
    target = target_on(device)
    native = target is not None and _native(target, activation, weight, out_features, in_features, experts)
    return scale_layout(fmt, native=native)


def target_on(device: torch.device) -> Target | None:
    """The GPU of a CUDA device; None for any other device."""
    return target_of(device) if device.type == "cuda" else None


def _native(target: Target, activation: str | None, weight: str, n: int, k: int, experts: int | None) -> bool:
    """Whether the matrix units would compute the product if the scales of both operands were swizzled."""
    from fp4compile.templates.choose import choose
    from fp4compile.templates.problem import Problem

    if activation is None or formats.get(weight).scale is None:
        return False

    def operand(fmt: BlockFormat) -> OperandSpec:
        outer = "group" if fmt.outer == "tensor" and experts is not None else fmt.outer or "none"
        return OperandSpec(fmt, fmt.data_dtype, True, outer)

    a, b = (operand(formats.get(name)) for name in (activation, weight))
    grouping = Grouping.DENSE if experts is None else Grouping.RAGGED_ROWS
    spec = ProductSpec(a, b, torch.bfloat16, grouping)
    return choose(Problem(spec, _TOKENS, n, k, target, groups=experts or 1)).tier == "native"


def laid_out(
    scales: torch.Tensor, fmt: BlockFormat, rows: int, linear_shape: tuple[int, ...], layout: str
) -> torch.Tensor:
    """The block scales of a matrix or of a batch of matrices in a layout; the same tensor if they already have it.

    rows: the rows of the matrix. linear_shape: the shape of its linear scales. Scales whose shape fits neither layout
    of the matrix are returned as they are.
    """
    step = 1 if fmt.block is None else fmt.block[0]
    *batch, _, blocks = linear_shape
    if layout == "swizzled" and tuple(scales.shape) == linear_shape:
        return to_swizzled(scales_of_rows(scales, fmt, rows))
    if layout == "linear" and tuple(scales.shape) == (*batch, swizzled_numel(rows, blocks)):
        return from_swizzled(scales, rows, blocks)[..., ::step, :].contiguous()
    return scales
