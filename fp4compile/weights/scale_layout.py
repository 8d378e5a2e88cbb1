"""The layout of a packed layer's block scales: the device's layout in the buffer, linear in states and files.

Where matrix units multiply the layer's formats, the buffer itself is swizzled when a layer is packed, moved or loaded;
a copy would take memory and could be out of date. A buffer's layout follows from its number of dimensions, so scales of
either layout can be assigned to a layer.
"""

import torch

from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.layouts import from_swizzled, scale_layout, swizzled_numel, to_swizzled
from fp4compile.formats.product_spec import OperandSpec, ProductSpec
from fp4compile.formats.reference import scales_of_rows
from fp4compile.hardware import Target
from fp4compile.templates.launch import target_of

_TOKENS = 4096  # any number of tokens: the layout of a weight's scales does not depend on it


def layout_on(
    device: torch.device, activation: str | None, weight: str, out_features: int, in_features: int,
    experts: int | None = None,
) -> str:  # fmt: skip
    """The layout of a weight's block scales on a device. experts: the number of matrices; None for one."""
    fmt, target = formats.get(weight), target_on(device)
    if target is None or activation is None or not fmt.swizzles:
        return "linear"
    from fp4compile.templates.choose import choose
    from fp4compile.templates.problem import Problem

    # A matmul is native if the matrix units compute it with swizzled scales of both operands.
    grouping, of_tensor = (Grouping.DENSE, "tensor") if experts is None else (Grouping.RAGGED_ROWS, "group")
    outers = {"tensor": of_tensor, "row": "row", None: "none"}
    a, b = (OperandSpec(one, one.data_dtype, True, outers[one.outer]) for one in (formats.get(activation), fmt))
    spec = ProductSpec(a, b, torch.bfloat16, grouping)
    problem = Problem(spec, _TOKENS, out_features, in_features, target, groups=experts or 1)
    return scale_layout(fmt, native=choose(problem).tier == "native")


def target_on(device: torch.device) -> Target | None:
    """The GPU of a CUDA device; None for any other device."""
    return target_of(device) if device.type == "cuda" else None


def laid_out(
    scales: torch.Tensor, fmt: BlockFormat, rows: int, linear_shape: tuple[int, ...], layout: str
) -> torch.Tensor:
    """Convert the block scales of matrices of `rows` rows to a layout; unchanged if their shape fits neither."""
    step = 1 if fmt.block is None else fmt.block[0]
    *batch, _, blocks = linear_shape
    if layout == "swizzled" and tuple(scales.shape) == linear_shape:
        return to_swizzled(scales_of_rows(scales, fmt, rows))
    if layout == "linear" and tuple(scales.shape) == (*batch, swizzled_numel(rows, blocks)):
        return from_swizzled(scales, rows, blocks)[..., ::step, :].contiguous()
    return scales
