"""The FLOPs of packed layers, for `torch.utils.flop_counter.FlopCounterMode`, which counts unknown operators as 0."""

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fp4compile.formats.product_spec import formats_of

_SCALED_MM = torch.ops.fp4compile.scaled_mm


def _flops(
    a: torch.Size, a_scales: Any, a_outer: Any, b: torch.Size, b_scales: Any, b_outer: Any, spec: str, *,
    rows: int | None = None, out_shape: torch.Size, **options: Any,
) -> int:  # fmt: skip
    """FLOPs of `scaled_mm`, by the shapes of its tensors: two for each product of elements, padding of blocks included.

    rows: the contraction of all groups together, where groups lie along it.
    """
    elements = math.prod(out_shape if rows is None or len(b) == 3 else out_shape[1:])
    if rows is not None and len(b) == 2:
        return 2 * elements * rows
    widths = ((2 if fmt is not None and fmt.packed else 1) * x[-1]
              for x, fmt in zip((a, b), formats_of(spec), strict=True))  # fmt: skip
    return 2 * elements * min(widths)


if _SCALED_MM not in flop_registry:
    register_flop_formula(_SCALED_MM)(_flops)
