"""Write A to global memory in the layout that `gemm_wgmma_sm90` reads in shared memory, so that bulk copies suffice.

Swizzled A is a sequence of matrices [rows, 64]: 64 elements along K of every row of A, each row a line of 128 bytes.
Each of the eight 16-byte units of a line has eight elements: unit 4 * p + j has elements j and j + 4 of half p (eight
elements) of each of the line's four blocks of 16. In that order a lane of the product dequantises its elements of B. In
line r unit u lies at u ^ (r % 8): the 128-byte swizzle in which `wgmma` reads shared memory. Rows and elements beyond A
are zeros.

A tile of the product may begin at any row that is a multiple of 8: its lines of a matrix follow each other in memory.
So the layout does not depend on the product's tile, nor on groups of rows. A tile that ends beyond the rows copies
lines of the next matrix, whose products are not stored; behind the last matrix that is multiplied lie others for that.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.async_copy import do_ptx, keep
from fp4compile.templates.device.block_scales import decode_scale
from fp4compile.templates.device.dependent_launch import launch_dependents
from fp4compile.templates.device.dequantize import load_scales
from fp4compile.templates.device.elements import decode_pair, pack
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.heuristics import WgmmaConfig
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem

aten = torch.ops.aten


MATRICES = tl.constexpr(2)  # of which a program of `swizzle_a_sm90` writes lines


def _half_line_ptx() -> str:
    """PTX that loads half of each of a line's four blocks of 16 elements, and stores them as four units of 16 bytes.

    Inputs: the address of the first half; whether it is in memory, else it is zeros; the line's address; the bytes that
    unit 0 lies beyond that (with those that others lie beyond unit 0, combined by XOR); whether the line exists; a
    token. Registers 4 * b + i have elements 2 * i and 2 * i + 1 of block b's half, a unit elements j and j + 4 of all.
    """
    text = ["{ .reg .pred p, q; .reg .b32 a<16>, u<4>, o; .reg .b64 d; setp.ne.b32 p, $2, 0; setp.ne.b32 q, $5, 0;"]
    text += [f"mov.b32 a{i}, 0;" for i in range(16)]
    for b in range(4):
        loaded = ", ".join(f"a{4 * b + i}" for i in range(4))
        text.append(f"@p ld.global.v4.b32 {{{loaded}}}, [$1 + {32 * b}];")
    for j in range(4):
        halves = "0x7632" if j % 2 else "0x5410"
        text += [f"prmt.b32 u{b}, a{4 * b + j // 2}, a{4 * b + 2 + j // 2}, {halves};" for b in range(4)]
        text.append(f"xor.b32 o, $4, {16 * j}; cvt.u64.u32 d, o; add.s64 d, d, $3;")
        text.append("@q st.global.v4.b32 [d], {u0, u1, u2, u3};")
    return " ".join([*text, "mov.b32 $0, 0; }"])


_HALF_LINE = tl.constexpr(_half_line_ptx())


@triton.constexpr_function
def _power_of_2(number):
    """The least power of 2 that is not less."""
    return 1 << (number - 1).bit_length()


@triton.jit
def swizzle_a_sm90(
    a_ptr, b_ptr, b_scales_ptr, offs_ptr, swizzled_a_ptr, m, rows, a_matrices, matrices,
    LINES: tl.constexpr, GROUPS: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr,
):  # fmt: skip
    """LINES lines of MATRICES matrices of swizzled A [matrices, rows, 64] from a [m, 64 * a_matrices], bf16 or fp16.

    LINES divides rows. A lane has half of a line: see `_half_line_ptx`.
    GROUPS: 0, or the number of groups of rows of a, which end at offs, int32. Rows of no group may be unwritten memory,
    and are not read.
    LAUNCH_DEPENDENTS: the product may start early, and then reads B and offs at once (see `device.dependent_launch`).
    This kernel never reads B, which is an argument so that Inductor moves no kernel that writes it between the two.
    """
    if LAUNCH_DEPENDENTS:
        swizzled_a_ptr = launch_dependents(swizzled_a_ptr)
    some = tl.cdiv(matrices, MATRICES)
    lane = tl.arange(0, LINES * MATRICES * 2)
    half = lane % 2
    if GROUPS > 0:
        group = tl.arange(0, _power_of_2(GROUPS))
        m = tl.minimum(m, tl.max(tl.load(offs_ptr + group, mask=group < GROUPS, other=0), 0))
    matrix = tl.program_id(0) % some * MATRICES + lane // 2 % MATRICES
    row = tl.program_id(0) // some * LINES + lane // (2 * MATRICES)
    source = a_ptr + (row.to(tl.int64) * a_matrices + matrix) * 64 + half * 8
    inside = ((row < m) & (matrix < a_matrices)).to(tl.int32)
    line = swizzled_a_ptr + (matrix.to(tl.int64) * rows + row) * 64
    exists = (matrix < matrices).to(tl.int32)
    token = do_ptx(_HALF_LINE, "l,r,l,r,r,r", (source, inside, line, (half * 4 ^ row % 8) * 16, exists, lane))
    keep(token, swizzled_a_ptr, m)


@triton.jit
def swizzle_codes_sm90(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, offs_ptr, swizzled_a_ptr, m, rows, blocks, per_row, matrices,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, SQUARE: tl.constexpr, SWIZZLED: tl.constexpr,
    LINES: tl.constexpr, GROUPS: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """LINES lines of a matrix of swizzled A [matrices, rows, 64], bf16 or fp16, from E2M1 codes a [m, K].

    The codes are dequantised, without the outer scale. per_row: units of a row; blocks: blocks of 16 elements in a row.
    SQUARE, SWIZZLED: layout of the scales. The other arguments: see `swizzle_a_sm90`.

    Tensors have one axis, the words of the lines, so that neighbouring lanes read from one line and write to one line
    in every version of Triton: of several axes, Triton takes any one where it cannot follow the exchange of units.
    """
    if LAUNCH_DEPENDENTS:
        swizzled_a_ptr = launch_dependents(swizzled_a_ptr)
    if GROUPS > 0:
        group = tl.arange(0, _power_of_2(GROUPS))
        m = tl.minimum(m, tl.max(tl.load(offs_ptr + group, mask=group < GROUPS, other=0), 0))
    matrix = tl.program_id(0) % matrices
    start = tl.program_id(0) // matrices * LINES
    word = tl.arange(0, LINES * 32)
    row = start + word // 32
    unit = word // 4 % 8 ^ row % 8
    block = matrix * 4 + word % 4
    # The first of the word's two elements. The other one is four elements on.
    column = block * 16 + unit // 4 * 8 + unit % 4
    inside = (row < m) & (block < blocks)
    byte = load_scales(a_scales_ptr, row, block, m, blocks, blocks, SCALE, SQUARE, 16, SWIZZLED, 0)
    scale = decode_scale(byte, SCALE, ISA)
    at = a_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + row.to(tl.int64) * per_row + column // 2
    even, odd = decode_pair(tl.load(at, mask=inside, other=0), ELEMENT, ISA)
    near = tl.where(column % 2 == 0, even, odd) * scale
    even, odd = decode_pair(tl.load(at + 2, mask=inside, other=0), ELEMENT, ISA)
    far = tl.where(column % 2 == 0, even, odd) * scale
    content = pack(near, far, swizzled_a_ptr.dtype.element_ty, ISA)
    swizzled_a_ptr += (matrix.to(tl.int64) * rows + start) * 64
    tl.store(swizzled_a_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + word, content)


@dataclass(frozen=True)
class SwizzledA:
    """The shape of swizzled A, [matrices, rows, 64], for a product by `gemm_wgmma_sm90`."""

    matrices: int
    rows: int

    @classmethod
    def of(cls, p: Problem, config: WgmmaConfig) -> "SwizzledA":
        """The matrices of whole pipeline stages, and those that the lines of the last tile reach."""
        lines = _lines(p.m)
        rows = ceil_div(p.m, lines) * lines
        end = p.m + config.rows if p.ragged else ceil_div(p.m, config.rows) * config.rows
        steps = config.steps_per_stage
        return cls(2 * steps * ceil_div(p.k, 128 * steps) + ceil_div(end - rows, rows), rows)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.matrices, self.rows, 64

    def of_call(self, call: Call) -> torch.Tensor:
        """Swizzled A of a call: the one that the call has, or else by `swizzle_a_sm90`.

        Raises RuntimeError where the call has one of another shape.
        """
        if call.arranged_a is not None:
            if not statically_true(call.arranged_a.shape == self.shape):
                raise RuntimeError(f"arranged_a: expected shape {self.shape}, got {tuple(call.arranged_a.shape)}")
            return call.arranged_a
        a, b, p, lines = call.a, call.b, call.problem, _lines(call.problem.m)
        out = a.data.new_empty(self.shape, dtype=p.compute_dtype)
        groups, offs = (p.groups, call.offs) if p.ragged else (0, b.data)
        options = {"LINES": lines, "GROUPS": groups, "LAUNCH_DEPENDENTS": p.target.dependent_launch}
        if a.type.format is None:
            launch(
                swizzle_a_sm90, self.rows // lines * ceil_div(self.matrices, MATRICES.value),
                a.data, b.data, b.scales, offs, out, p.m, self.rows, ceil_div(p.k, 64), self.matrices,
                num_warps=lines // 8, **options,
            )  # fmt: skip
            return out
        reading = a.reading(self.matrices * 32)
        del reading["ALIGN"]  # lanes read single elements
        launch(
            swizzle_codes_sm90, self.rows // lines * self.matrices,
            a.data, a.scales, b.data, b.scales, offs, out, p.m, self.rows, p.k // 16, a.units_per_row, self.matrices,
            num_warps=lines // 8, ISA=p.target.isa, **options, **reading,
        )  # fmt: skip
        return out

    def by_operations(self, a: torch.Tensor) -> torch.Tensor:
        """Swizzled A of a plain A [..., K], by PyTorch operations.

        Inductor computes them in the kernel that computes A, and A itself is never in memory.
        """
        a = a.reshape(-1, a.shape[-1])
        rows, columns = self.rows - a.shape[0], self.matrices * 64 - a.shape[1]
        if rows or columns:
            a = aten.constant_pad_nd(a, [0, columns, 0, rows])
        # The axes: rows, matrices, blocks, halves, quarters, elements of a quarter.
        blocks = a.view(self.rows, self.matrices, 4, 2, 2, 4)
        units = blocks.permute(1, 0, 3, 5, 2, 4).reshape(self.matrices, self.rows, 8, 8)
        line = torch.arange(self.rows, device=a.device).view(self.rows, 1)
        unit = aten.bitwise_xor(aten.remainder(line, 8), torch.arange(8, device=a.device))
        return aten._unsafe_index(units, [None, line, unit]).view(self.shape)


def _lines(m) -> int:
    """How many rows of A a program of `swizzle_a_sm90` writes, and divide the rows of swizzled A."""
    return 16 if statically_true(m <= 16) else 32
