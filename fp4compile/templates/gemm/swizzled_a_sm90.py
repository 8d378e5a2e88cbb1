"""Write A to global memory in the layout that `gemm_wgmma_sm90` reads in shared memory, so that bulk copies suffice.

Swizzled A is a sequence of matrices [ROWS, 64] for each tile of ROWS rows of A: 64 elements along K of every row, ROWS
lines of 128 bytes. Each of the eight 16-byte units of a line has eight elements: unit 4 * p + j has elements j and j + 4 of half p (eight elements)
of each of the line's four blocks of 16. In that order a lane of the product dequantises its elements of B. In line r
unit u lies at u ^ (r % 8): the 128-byte swizzle in which `wgmma` reads shared memory. Rows and elements beyond A are
zeros.
"""

import torch
import triton
import triton.language as tl

from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.block_scales import decode_scale
from fp4compile.templates.device.dependent_launch import launch_dependents
from fp4compile.templates.device.dequantize import load_scales, load_units, repeat_scales
from fp4compile.templates.device.elements import decode_pair, pack
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.launch import launch


@triton.jit
def swizzle_a_sm90(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, swizzled_a_ptr, m, blocks, per_row, pairs,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, SQUARE: tl.constexpr, SWIZZLED: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, LINES: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """LINES lines of two matrices of swizzled A [tiles, matrices, ROWS, 64], bf16 or fp16, from a [m, K].

    a: plain or E2M1 codes, which are dequantised, without the outer scale. per_row: units of a row (plain: elements);
    blocks: blocks of 16 elements in a row. SQUARE, SWIZZLED: layout of the scales. pairs: half of the matrices. LINES:
    a power of two that divides ROWS.
    LAUNCH_DEPENDENTS: the product may start early, and then reads B at once (see `device.dependent_launch`). This
    kernel never reads b and b_scales. They are arguments so that Inductor moves no kernel that writes B between the two
    kernels.
    """
    if LAUNCH_DEPENDENTS:
        swizzled_a_ptr = launch_dependents(swizzled_a_ptr)
    pair = tl.program_id(0) % pairs
    start = tl.program_id(0) // pairs * LINES
    row = start + tl.arange(0, LINES)[:, None]
    unit = pair * 64 + tl.arange(0, 64)[None, :]
    words = load_units(a_ptr, row, unit, m, per_row, per_row, ELEMENT, ALIGN)
    if ELEMENT != "plain":
        block = pair * 8 + tl.arange(0, 8)[None, :]
        byte = load_scales(a_scales_ptr, row, block, m, blocks, blocks, SCALE, SQUARE, 16, SWIZZLED, ALIGN)
        scale = repeat_scales(decode_scale(byte, SCALE, ISA), 8)
        first, second = decode_pair(words, ELEMENT, ISA)
        words = pack(first * scale, second * scale, swizzled_a_ptr.dtype.element_ty, ISA)
    # A word has two elements. A line has four blocks, each of two halves, each of two quarters with two words: [row,
    # matrix, block, p, quarter, word]. Words at one position of both quarters of a half have elements j and j + 4,
    # which become one word.
    quarters = tl.permute(tl.reshape(words, (LINES, 2, 4, 2, 2, 2)), (0, 1, 3, 5, 2, 4))
    near, far = tl.split(tl.reshape(quarters, (LINES, 2, 4, 4, 2)))
    units = tl.join(near & 0xFFFF | far << 16, near >> 16 & 0xFFFF | far & -65536)
    units = tl.reshape(tl.permute(units, (0, 1, 2, 4, 3)), (LINES, 2, 8, 4))
    line = tl.arange(0, LINES)[:, None, None, None]
    matrix = (start // ROWS * pairs + pair) * 2 + tl.arange(0, 2)[None, :, None, None]
    unit = tl.arange(0, 8)[None, None, :, None] ^ (start + line) % 8
    # All units of a line are stored at once: the cache takes half a sector of 32 bytes as slowly as a whole one.
    at = (matrix.to(tl.int64) * ROWS + start % ROWS + line) * 32 + unit * 4 + tl.arange(0, 4)[None, None, None, :]
    tl.store(swizzled_a_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at, units)


def swizzled_a(call: Call, rows: int, steps: int) -> torch.Tensor:
    """A for `wgmma_sm90`: [tiles, matrices, rows, 64], padded to whole tiles and pipeline stages of `steps` steps."""
    a, b, p = call.a, call.b, call.problem
    tiles, pairs = ceil_div(p.m, rows), steps * ceil_div(p.k, 128 * steps)
    lines = next(lines for lines in (32, 16) if rows % lines == 0)
    out = a.data.new_empty((tiles, 2 * pairs, rows, 64), dtype=p.compute_dtype)
    launch(swizzle_a_sm90, tiles * (rows // lines) * pairs, a.data, a.data if a.scales is None else a.scales, b.data,
           b.scales, out, p.m, p.k // 16, a.units_per_row, pairs, num_warps=lines // 8, ROWS=rows, LINES=lines,
           LAUNCH_DEPENDENTS=p.target.dependent_launch, ISA=p.target.isa, **a.reading(64 * steps))  # fmt: skip
    return out
