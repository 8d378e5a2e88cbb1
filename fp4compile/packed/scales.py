"""Where the block scales of a packed layer lie: as the layer's device reads them, and linear in states and files.

On a GPU whose matrix units multiply the layer's formats, the buffer itself is swizzled. It is converted where a layer
is made, moved or loaded, once for the device. There is no swizzled copy beside linear scales: such a copy would be out
of date after a write that nothing tells of, and would take memory.

The number of its dimensions tells how a buffer lies. So scales that come into a layer by another way, such as an
assignment, are multiplied as they lie. That is right on every device, though not native.
"""

import torch

from fp4compile import formats
from fp4compile.formats import BlockFormat
from fp4compile.layouts import from_swizzled, scale_layout, swizzled_numel, to_swizzled
from fp4compile.targets import Target

_TOKENS = 4096  # stands for every number of tokens: the scales of a weight lie the same for all


def layout_of(scales: torch.Tensor | None) -> str:
    """How the block scales of a matrix lie: "linear" or "swizzled". Linear where there are none."""
    return "swizzled" if scales is not None and scales.dim() == 1 else "linear"


def layout_on(device: torch.device, activation: str | None, weight: str, out_features: int, in_features: int) -> str:
    """The layout that a device wants of the block scales of a weight.

    activation, weight: names of formats; None leaves the activation as it comes.
    """
    fmt = formats.get(weight)
    target = target_on(device)
    native = target is not None and _native(target, activation, weight, out_features, in_features)
    return scale_layout(fmt, native=native)


def target_on(device: torch.device) -> Target | None:
    """What multiplies on a device: a GPU; None elsewhere."""
    if device.type != "cuda":
        return None
    from fp4compile.templates.launch import target_of  # here, so that the CPU needs no Triton

    return target_of(device)


def _native(target: Target, activation: str | None, weight: str, n: int, k: int) -> bool:
    """Whether the matrix units would compute the product if the scales of both operands were swizzled."""
    from fp4compile.templates.gemm.choose import choose
    from fp4compile.templates.gemm.problem import OperandType, Problem

    if activation is None or formats.get(weight).scale is None:
        return False
    a, b = (
        OperandType(fmt, fmt.data_dtype, True, fmt.outer or "none") for fmt in map(formats.get, (activation, weight))
    )
    return choose(Problem(a, b, _TOKENS, n, k, torch.bfloat16, target)).tier == "native"


def laid_out(
    scales: torch.Tensor, fmt: BlockFormat, rows: int, linear_shape: tuple[int, ...], layout: str
) -> torch.Tensor:
    """The block scales of a matrix in a layout: the same tensor where they lie so already.

    rows: of the matrix. linear_shape: that of its linear scales. Scales of another shape than the matrix has in either
    layout are returned as they are.
    """
    step = 1 if fmt.block is None else fmt.block[0]
    if layout == "swizzled" and tuple(scales.shape) == linear_shape:
        # The matrix units read a scale for each row, of square blocks too.
        each_row = scales.unsqueeze(1).expand(-1, step, -1).reshape(-1, linear_shape[1]).narrow(0, 0, rows)
        return to_swizzled(each_row)
    if layout == "linear" and tuple(scales.shape) == (swizzled_numel(rows, linear_shape[1]),):
        return from_swizzled(scales, rows, linear_shape[1])[::step].contiguous()
    return scales
