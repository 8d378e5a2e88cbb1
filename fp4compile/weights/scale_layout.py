"""Where the block scales of a packed layer lie: as the layer's device reads them, and linear in states and files.

On a GPU whose matrix units multiply the layer's formats, the buffer itself is swizzled. It is converted where a layer
is made, moved or loaded, once for the device. There is no swizzled copy beside linear scales: such a copy would be out
of date after a write that nothing tells of, and would take memory.

The number of its dimensions tells how a buffer lies. So scales that come into a layer by another way, such as an
assignment, are multiplied as they lie. That is right on every device, though not native.
"""

from dataclasses import replace

import torch

from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import from_swizzled, scale_layout, swizzled_numel, to_swizzled
from fp4compile.hardware import Target

_TOKENS = 4096  # stands for every number of tokens: the scales of a weight lie the same for all


def layout_of(scales: torch.Tensor | None, *, matrices: bool = False) -> str:
    """How the block scales of a matrix lie, or of a batch of them: "linear" or "swizzled". Linear where there are none.

    Swizzled scales are one flat run for each matrix.
    """
    return "swizzled" if scales is not None and scales.dim() == 1 + matrices else "linear"


def layout_on(
    device: torch.device, activation: str | None, weight: str, out_features: int, in_features: int,
    experts: int | None = None,
) -> str:  # fmt: skip
    """The layout that a device wants of the block scales of a weight.

    activation, weight: names of formats; None leaves the activation as it comes. experts: how many matrices the weight
    has; None for a linear layer's.
    """
    fmt = formats.get(weight)
    target = target_on(device)
    native = target is not None and _native(target, activation, weight, out_features, in_features, experts)
    return scale_layout(fmt, native=native)


def target_on(device: torch.device) -> Target | None:
    """What multiplies on a device: a GPU; None elsewhere."""
    if device.type != "cuda":
        return None
    from fp4compile.templates.launch import target_of  # here, so that the CPU needs no Triton

    return target_of(device)


def _native(target: Target, activation: str | None, weight: str, n: int, k: int, experts: int | None) -> bool:
    """Whether the matrix units would compute the product if the scales of both operands were swizzled."""
    from fp4compile.templates.gemm.choose import choose
    from fp4compile.templates.gemm.problem import OperandType, Problem
    from fp4compile.templates.grouped.choose import choose as choose_grouped
    from fp4compile.templates.grouped.problem import GroupedProblem

    if activation is None or formats.get(weight).scale is None:
        return False
    a, b = (
        OperandType(fmt, fmt.data_dtype, True, fmt.outer or "none") for fmt in map(formats.get, (activation, weight))
    )
    if experts is None:
        return choose(Problem(a, b, _TOKENS, n, k, torch.bfloat16, target)).tier == "native"
    a, b = (replace(x, outer="group") if x.outer == "tensor" else x for x in (a, b))
    grouped = GroupedProblem(a, b, _TOKENS, _TOKENS, n, k, experts, False, torch.bfloat16, target)
    return choose_grouped(grouped).tier == "native"


def laid_out(
    scales: torch.Tensor, fmt: BlockFormat, rows: int, linear_shape: tuple[int, ...], layout: str
) -> torch.Tensor:
    """The block scales of a matrix, or of a batch of them, in a layout: the same tensor where they lie so already.

    rows: of the matrix. linear_shape: that of its linear scales. Scales of another shape than the matrix has in either
    layout are returned as they are.
    """
    step = 1 if fmt.block is None else fmt.block[0]
    *batch, _, blocks = linear_shape
    if layout == "swizzled" and tuple(scales.shape) == linear_shape:
        # The matrix units read a scale for each row, of square blocks too.
        each_row = scales.view(torch.uint8).repeat_interleave(step, -2).narrow(-2, 0, rows)
        return to_swizzled(each_row.view(scales.dtype))
    if layout == "linear" and tuple(scales.shape) == (*batch, swizzled_numel(rows, blocks)):
        return from_swizzled(scales, rows, blocks)[..., ::step, :].contiguous()
    return scales
