"""The inner loop of GPTQ: round a strip of a weight's columns one after the other, each making up for those before it.

`weights.gptq.compensate_by_torch` is the reference, to the bit. A thread holds one row of the strip in registers: rows
depend on each other by nothing. PyTorch would need a dozen kernels a column, each for a few microseconds of work: the
layers of a block of Llama-3-8B take 1.0 s on an H200, and 11 s by the reference.
"""

import torch
import triton
import triton.language as tl

from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.elements import fp8_code, fp8_value, rounded_e2m1
from fp4compile.templates.launch import launch
from fp4compile.templates.view import View

ROWS = 32  # of a program, which is one warp: a weight of 4096 rows has a program for nearly each multiprocessor


def compensate(
    strip: torch.Tensor, follow: torch.Tensor, steps: torch.Tensor, fmt: BlockFormat, scaled: torch.Tensor,
    errors: torch.Tensor,
) -> None:  # fmt: skip
    """Fill `scaled` and `errors`; arguments as in `weights.gptq.compensate_by_torch`.

    strip, scaled and errors are slices along the columns of contiguous tensors; follow has any strides.
    The kernel has a correction for each pair of columns: it is made for strips of 16.
    """
    matrices, columns, rows = strip.shape
    views = (_view(one, rows) for one in (strip, scaled, errors))
    launch(
        compensate_strip, matrices * ceil_div(rows, ROWS), *views,
        View(follow, tuple(follow.shape), follow.stride()), View.flat(steps.contiguous(), matrices * rows),
        rows, strip.stride(0), scaled.stride(0), errors.stride(0), *follow.stride(),
        num_warps=1, ELEMENT=fmt.element, COLUMNS=columns, ROWS=ROWS,
    )  # fmt: skip


def _view(tensor: torch.Tensor, rows: int) -> View:
    return View(tensor, tuple(tensor.shape), (tensor.stride(0), rows, 1))


@triton.jit
def nearest_element(y, ELEMENT: tl.constexpr):
    """float32 -> the nearest element, in float32, saturating, ties to the even code."""
    if ELEMENT == "e2m1":
        magnitude = rounded_e2m1(tl.minimum(tl.abs(y), 6.0), 0)
        return tl.where(y < 0, -magnitude, magnitude)
    else:
        return fp8_value(fp8_code(y, ELEMENT), ELEMENT)


@triton.jit
def compensate_strip(
    strip_ptr, scaled_ptr, errors_ptr, follow_ptr, steps_ptr, rows, strip_batch, scaled_batch, errors_batch,
    follow_batch, follow_row, follow_column, ELEMENT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Round ROWS rows of a matrix. strip, scaled, errors: [batch, COLUMNS, rows]; follow: [batch, COLUMNS, COLUMNS].

    The reference rounds each product before it subtracts it. No compiler can fuse a product into the difference where
    it is a fused operation already: its sum with 0, which changes the sign of zeros alone.
    """
    tiles = tl.cdiv(rows, ROWS)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    step = tl.load(steps_ptr + matrix * rows + row, inside, 1.0)
    divisor = tl.where(step == 0, float("inf"), step)
    strip_ptr += matrix * strip_batch
    scaled_ptr += matrix * scaled_batch
    errors_ptr += matrix * errors_batch
    follow_ptr += matrix * follow_batch
    left = ()
    for j in tl.static_range(COLUMNS):
        left = left + (tl.load(strip_ptr + j * rows + row, inside, 0.0),)
    for i in tl.static_range(COLUMNS):
        y = tl.div_rn(left[i], divisor)
        error = left[i] - tl.fma(nearest_element(y, ELEMENT), step, 0.0)
        tl.store(scaled_ptr + i * rows + row, y, inside)
        tl.store(errors_ptr + i * rows + row, error, inside)
        corrected = ()
        for j in tl.static_range(COLUMNS):
            if j > i:
                share = tl.load(follow_ptr + i * follow_row + j * follow_column)
                corrected = corrected + (left[j] - tl.fma(share, error, 0.0),)
            else:
                corrected = corrected + (left[j],)
        left = corrected
