"""`scale_sweep`: the block maxima that quantise NVFP4 weights with the least error."""

import torch

from fp4compile.formats import formats, reference, reference_scales
from fp4compile.formats.quantize_spec import FLOAT_DTYPES
from fp4compile.formats.reference_grouped import largest_of_matrices
from fp4compile.ops.quantize import best_scales

_FORMATS = {(1, 16): "nvfp4", (16, 16): "nvfp4_16x16"}


@torch.compiler.disable
def scale_sweep(
    w: torch.Tensor,
    global_amax: torch.Tensor | None = None,
    block: tuple[int, int] = (1, 16),
) -> torch.Tensor:
    """The amax of each block that gives a weight's NVFP4 quantisation the least error: c * global_amax.

    c is one of the 126 positive finite E4M3 numbers divided by 448; a block's step is c * global_amax / 6.
    `quantize(w, "nvfp4", scales="mse")` uses the same scales.

    w: bf16, fp16 or fp32, [N, K] or [E, N, K], with any strides; blocks are completed by zeros.
    global_amax: float32 [] or, for three dimensions, [E] or []; None takes the amax of each matrix.
    block: (1, 16) or (16, 16), the elements that share a scale.

    Returns float32 [..., ceil(N / block rows), ceil(K / 16)], NaN where a block is not finite.

    Raises TypeError for other types and dtypes, ValueError for other shapes, devices or blocks.
    """
    _check(w, global_amax, block)
    w, fmt = w.detach(), formats.get(_FORMATS[block])
    if global_amax is None:
        amax = largest_of_matrices(w if w.dim() == 3 else w[None]).flatten().float()
        global_amax = amax if w.dim() == 3 else amax[0]
    scales = best_scales(w, fmt, reference_scales.outer_of(global_amax))
    return reference._divide(scales.float(), reference.E4M3_MAX) * _each(global_amax)


def _each(global_amax: torch.Tensor) -> torch.Tensor:
    """The amax of each matrix, in a shape that broadcasts to blocks."""
    return global_amax.view(-1, 1, 1) if global_amax.dim() else global_amax


def _check(w: object, global_amax: object, block: tuple[int, int]) -> None:
    if not isinstance(w, torch.Tensor):
        raise TypeError(f"w: expected a torch.Tensor, got {type(w).__name__}")
    if w.dtype not in FLOAT_DTYPES:
        raise TypeError(f"w: dtype {w.dtype} cannot be quantised; allowed are bfloat16, float16, float32")
    if w.dim() not in (2, 3):
        raise ValueError(f"w: expected two or three dimensions, got shape {tuple(w.shape)}")
    if block not in _FORMATS:
        raise ValueError(f"block={block}: allowed are (1, 16) and (16, 16)")
    if global_amax is None:
        return
    if not isinstance(global_amax, torch.Tensor):
        raise TypeError(f"global_amax: expected a float32 torch.Tensor, got {type(global_amax).__name__}")
    shapes = [(), *([tuple(w.shape[:1])] if w.dim() == 3 else [])]
    found = global_amax.dtype, global_amax.device, tuple(global_amax.shape)
    if found[:2] != (torch.float32, w.device) or found[2] not in shapes:
        raise ValueError(
            f"global_amax: expected float32 of shape {' or '.join(map(str, shapes))} on {w.device}, "
            f"got {found[0]} of shape {found[2]} on {found[1]}"
        )
