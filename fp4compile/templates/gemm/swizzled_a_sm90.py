"""Write A to global memory in the layout that `gemm_wgmma_sm90` reads in shared memory, so that bulk copies suffice.

Swizzled A is a sequence of matrices [lines, 64]: 64 elements along K of every row of A, each in a line of 128 bytes.
Each of the eight 16-byte units of a line has eight elements: unit 4 * p + j has elements j and j + 4 of half p (eight
elements) of each of the line's four blocks of 16. In that order a lane of the product dequantises its elements of B. In
line r unit u lies at u ^ (r % 8): the 128-byte swizzle in which `wgmma` reads shared memory. Lines and elements beyond
A are zeros.

Products of one A can share it, whatever tiles each of them has: see `passes.prepare`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.block_scales import decode_scale
from fp4compile.templates.device.dependent_launch import launch_dependents
from fp4compile.templates.device.dequantize import load_scales
from fp4compile.templates.device.elements import decode_pair, pack
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem

# Rows of a tile that has lines of its own where it holds all rows of A.
_FEW_ROWS = 64
# The most lines of a tile. The last tile of a matrix reads on in the next matrix, and behind the last one,
# where there are zeros.
_MOST_LINES = 256


@triton.jit
def swizzle_a_sm90(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, swizzled_a_ptr, m, blocks, per_row, matrices, lines,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, SQUARE: tl.constexpr, SWIZZLED: tl.constexpr,
    LINES: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """LINES lines of a matrix of swizzled A [matrices, lines, 64], bf16 or fp16, from a [m, K]; or zeros behind it.

    a: plain or E2M1 codes, which are dequantised, without the outer scale. per_row: units of a row (plain: elements);
    blocks: blocks of 16 elements in a row. SQUARE, SWIZZLED: layout of the scales.
    LAUNCH_DEPENDENTS: the product may start early, and then reads B at once (see `device.dependent_launch`). This
    kernel never reads b and b_scales. They are arguments so that Inductor moves no kernel that writes B between the two
    kernels.

    Tensors have one axis, the words of the lines, so that neighbouring lanes read from one line and write to one line
    in every version of Triton: of several axes, Triton takes any one where it cannot follow the exchange of units.
    """
    if LAUNCH_DEPENDENTS:
        swizzled_a_ptr = launch_dependents(swizzled_a_ptr)
    matrix = tl.program_id(0) % matrices
    start = tl.program_id(0) // matrices * LINES
    line = matrix.to(tl.int64) * lines + start
    behind = tl.program_id(0) - tl.cdiv(lines, LINES) * matrices
    if behind >= 0:
        line = matrices.to(tl.int64) * lines + behind * LINES
        m = 0
        lines = start + LINES
    word = tl.arange(0, LINES * 32)
    row = start + word // 32
    unit = word // 4 % 8 ^ row % 8
    block = matrix * 4 + word % 4
    # The first of the word's two elements. The other one is four elements on.
    column = block * 16 + unit // 4 * 8 + unit % 4
    inside = (row < m) & (block < blocks)
    if ELEMENT == "plain":
        at = a_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + row.to(tl.int64) * per_row + column
        near = tl.load(at, mask=inside, other=0).to(tl.int32)
        far = tl.load(at + 4, mask=inside, other=0).to(tl.int32)
        content = near & 0xFFFF | far << 16
    else:
        byte = load_scales(a_scales_ptr, row, block, m, blocks, blocks, SCALE, SQUARE, 16, SWIZZLED, 0)
        scale = decode_scale(byte, SCALE, ISA)
        at = a_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + row.to(tl.int64) * per_row + column // 2
        even, odd = decode_pair(tl.load(at, mask=inside, other=0), ELEMENT, ISA)
        near = tl.where(column % 2 == 0, even, odd) * scale
        even, odd = decode_pair(tl.load(at + 2, mask=inside, other=0), ELEMENT, ISA)
        far = tl.where(column % 2 == 0, even, odd) * scale
        content = pack(near, far, swizzled_a_ptr.dtype.element_ty, ISA)
    swizzled_a_ptr += line * 64
    tl.store(swizzled_a_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, content, mask=row < lines)


@dataclass(frozen=True)
class SwizzledSize:
    """The size of swizzled A: matrices of `lines` lines. Either number may be symbolic.

    one_tile: whether a tile of the product has all lines of a matrix.
    """

    matrices: int | torch.SymInt
    lines: int | torch.SymInt
    one_tile: bool

    @property
    def shape(self) -> tuple:
        """The shape of the tensor: [lines of all matrices, and lines that a last tile may read, 64]."""
        return self.matrices * self.lines + (0 if self.one_tile else _MOST_LINES), 64


def swizzled_size(p: Problem, rows: int, steps: int) -> SwizzledSize:
    """The size for tiles of `rows` rows of A and pipeline stages of `steps` steps.

    A has whole stages. A matrix has whole eights of lines, whatever the tiles are, so that products with other tiles
    can read it. With few rows of A it has the lines of the one tile, so that one copy brings a stage.
    """
    one_tile = rows <= _FEW_ROWS and statically_true(p.m <= rows)
    return SwizzledSize(2 * steps * ceil_div(p.k, 128 * steps), rows if one_tile else 8 * ceil_div(p.m, 8), one_tile)


def swizzled_a(call: Call, size: SwizzledSize) -> torch.Tensor:
    """A for `wgmma_sm90`, of this size and shape."""
    a, b, p = call.a, call.b, call.problem
    out = a.data.new_empty(size.shape, dtype=p.compute_dtype)
    lines = 16 if statically_true(size.lines == 16) else 32
    reading = a.reading(64)
    del reading["ALIGN"]  # lanes read single elements
    programs = ceil_div(size.lines, lines) * size.matrices + (0 if size.one_tile else _MOST_LINES // lines)
    launch(swizzle_a_sm90, programs, a.data, a.data if a.scales is None else a.scales, b.data, b.scales, out, p.m,
           p.k // 16, a.units_per_row, size.matrices, size.lines, num_warps=lines // 8, LINES=lines,
           LAUNCH_DEPENDENTS=p.target.dependent_launch, ISA=p.target.isa, **reading)  # fmt: skip
    return out
