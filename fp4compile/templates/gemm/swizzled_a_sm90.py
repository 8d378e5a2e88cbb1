"""Write A to global memory in the layout of `gemm_wgmma_sm90`'s shared memory, so that bulk copies suffice.

Swizzled A is a sequence of matrices [rows, 64]: 64 elements along K of every row of A, each row a line of 128 bytes.
Each of the eight 16-byte units of a line has eight elements: unit 4 * p + j has elements j and j + 4 of half p (eight
elements) of each of the line's four blocks of 16. In that order a lane of the GEMM kernel dequantises its elements of
B. In line r unit u lies at u ^ (r % 8): the 128-byte swizzle in which `wgmma` reads shared memory. Rows and elements
beyond A are zeros.

A tile may begin at any row that is a multiple of 8: its lines of a matrix are contiguous in memory. So the layout does
not depend on the tile, nor on groups of rows. A tile that ends beyond the rows copies lines of the next matrix, whose
results are not stored; further matrices follow the last multiplied one for that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.async_copy import do_ptx, keep, select_ptx
from fp4compile.templates.device.dependent_launch import launch_dependents
from fp4compile.templates.device.fp4_weights import dequantize_word
from fp4compile.templates.device.memory import swizzle
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.wgmma_launches_sm90 import WgmmaConfig
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.writes import writes

aten = torch.ops.aten


LINES = tl.constexpr(16)  # of each of MATRICES matrices: what a program writes
MATRICES = tl.constexpr(4)
LANES = tl.constexpr(8 * LINES.value)


def _ptx(load: Callable[[int], str], words: Callable[[int], str]) -> str:
    """PTX in which a lane loads eight elements of a row of A, and stores one unit, for each of MATRICES matrices.

    load: PTX that loads the elements of matrix i into registers of their own, where the predicate p holds.
    words: PTX that makes w0 to w3 of these registers; wj has elements j and j + 4 of the lane's eight. Inputs $1 to $6:
    the address of a unit of the first matrix; bytes from one matrix to the next; how many matrices there are to write,
    and to read; the lane's block of the line, 0 to 3; a token.

    Lanes of four neighbouring blocks have wj of their own block, and store units of one j of all blocks: they transpose
    4x4 words, first between lanes whose blocks differ by 1, then by 2. So eight lanes load a whole line at once, and
    store a whole line at once.
    """
    text = ["{ .reg .pred p, o, t; .reg .b16 h; .reg .b32 a<16>, s<4>, w<4>, z<4>, x, y, u, v; .reg .b64 d;"]
    text.append("and.b32 x, $5, 1; setp.ne.b32 o, x, 0; and.b32 x, $5, 2; setp.ne.b32 t, x, 0; mov.b64 d, $1;")
    for i in range(MATRICES.value):
        text.append(f"setp.gt.s32 p, $4, {i};" + load(i))
    for i in range(MATRICES.value):
        text.append(words(i))
        text.append("selp.b32 x, w0, w1, o; selp.b32 y, w2, w3, o;" + _exchanged(1))
        text.append("selp.b32 z0, x, w0, o; selp.b32 z1, w1, x, o; selp.b32 z2, y, w2, o; selp.b32 z3, w3, y, o;")
        text.append("selp.b32 x, z0, z2, t; selp.b32 y, z1, z3, t;" + _exchanged(2))
        text.append("selp.b32 w0, x, z0, t; selp.b32 w1, y, z1, t; selp.b32 w2, z2, x, t; selp.b32 w3, z3, y, t;")
        text.append(f"setp.gt.s32 p, $3, {i}; @p st.global.v4.b32 [d], {{w0, w1, w2, w3}}; add.s64 d, d, $2;")
    return " ".join([*text, "mov.b32 $0, 0; }"])


def _exchanged(by: int) -> str:
    return "".join(f"shfl.sync.bfly.b32 {word}, {word}, {by}, 31, 0xffffffff;" for word in "xy")


def _copy_ptx() -> str:
    """`_ptx` of a plain A. Inputs $7, $8: the lane's address in the first matrix; the filler of unread rows."""

    def load(i: int) -> str:
        words = ", ".join(f"a{4 * i + j}" for j in range(4))
        filled = "".join(f"mov.b32 a{4 * i + j}, $8;" for j in range(4))
        return filled + f"@p ld.global.v4.b32 {{{words}}}, [$7 + {128 * i}];"

    def words(i: int) -> str:
        halves = ("0x5410", "0x7632")
        return "".join(f"prmt.b32 w{j}, a{4 * i + j // 2}, a{4 * i + 2 + j // 2}, {halves[j % 2]};" for j in range(4))

    return _ptx(load, words)


def _codes_ptx(scales_step: int) -> str:
    """`_ptx` of E2M1 codes with E4M3 scales, as fp16. Inputs $7, $8: the addresses of the lane's codes and scale byte.

    scales_step: bytes from a scale to the next matrix's scale. A code times 2^-14 (from `dequantize_word`) times a
    scale is a multiple of 2^-24 with at most six significant bits, which fp16 represents.
    """

    def load(i: int) -> str:
        zeros = f"mov.b32 a{i}, 0; mov.b32 s{i}, 0;"
        return zeros + f"@p ld.global.b32 a{i}, [$7 + {32 * i}]; @p ld.global.u8 s{i}, [$8 + {scales_step * i}];"

    def words(i: int) -> str:
        scale = f"prmt.b32 x, s{i}, s{i}, 0; cvt.u16.u32 h, x; cvt.rn.f16x2.e4m3x2 x, h; mov.b32 y, 0x74007400;"
        scaled = "".join(f"mul.rn.f16x2 w{j}, w{j}, x; mul.rn.f16x2 w{j}, w{j}, y;" for j in range(4))
        return dequantize_word("f16x2", f"a{i}", "w") + scale + scaled

    return _ptx(load, words)


_COPY = tl.constexpr(_copy_ptx())
_CODES = tl.constexpr({(0,): _codes_ptx(4), (1,): _codes_ptx(512)})  # by SWIZZLED


@triton.constexpr_function
def _power_of_2(number):
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


@triton.jit
def _place(swizzled_a_ptr, m, rows, a_matrices, matrices):
    """(Each lane's row of A, block of 16 elements and half of that block in the first matrix; the inputs $1 to $6)."""
    lane = tl.arange(0, LANES)
    some = tl.cdiv(matrices, MATRICES)
    row = tl.program_id(0) // some * LINES + lane // 8
    matrix = tl.program_id(0) % some * MATRICES
    block = lane % 4
    line = swizzled_a_ptr + (matrix * tl.cast(rows, tl.int64) + row) * 64
    reads = tl.where(row < m, a_matrices - matrix, 0)
    step = lane * 0 + tl.cast(rows, tl.int64) * 128
    stores = (line + (lane % 8 ^ row % 8) * 8, step, lane * 0 + matrices - matrix, reads, block, lane)
    return row, matrix * 4 + block, lane // 4 % 2, stores


@writes("swizzled_a_ptr")
@triton.jit
def swizzle_a_sm90(
    a_ptr, index_ptr, b_ptr, b_scales_ptr, offs_ptr, swizzled_a_ptr, a_rows, m, rows, a_matrices, matrices,
    INDEXED: tl.constexpr, GROUPS: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr,
):  # fmt: skip
    """Lines of swizzled A [matrices, rows, 64] from a [a_rows, 64 * a_matrices], bf16 or fp16; see `_ptx`.

    LINES divides rows. m: rows of A.
    INDEXED: A is a[index], index [m] int32 or int64; negative indices count from the end of a. A row with an index out
    of range is NaN, and reads nothing. Otherwise A is a.
    GROUPS: 0, or the number of groups of rows of a, which end at offs, int32. Rows of no group may be unwritten memory,
    and are not read.
    LAUNCH_DEPENDENTS: the GEMM kernel may start early, and then reads B and offs at once (see
        `device.dependent_launch`). This kernel never reads B, which is an argument so that Inductor moves no writer of
        B between the two.
    """
    if LAUNCH_DEPENDENTS:
        swizzled_a_ptr = launch_dependents(swizzled_a_ptr)
    if GROUPS > 0:
        group = tl.arange(0, _power_of_2(GROUPS))
        m = tl.minimum(m, tl.max(tl.load(offs_ptr + group, mask=group < GROUPS, other=0), 0))
    row, block, half, stores = _place(swizzled_a_ptr, m, rows, a_matrices, matrices)
    fill = row * 0
    source = row.to(tl.int64)
    if INDEXED:
        number = tl.load(index_ptr + row, mask=row < m, other=0).to(tl.int64)
        source = tl.where(number < 0, number + a_rows, number)
        there = (source >= 0) & (source < a_rows)
        fill = tl.where(there | (row >= m), 0, 0x7FFF7FFF)
        stores = stores[0:3] + (tl.where(there, stores[3], 0),) + stores[4:6]
    elements = a_ptr + source * a_matrices * 64 + block * 16 + half * 8
    token = do_ptx(_COPY, "l,l,r,r,r,r,l,r", stores + (elements, fill))
    keep(token, swizzled_a_ptr, m)


@writes("swizzled_a_ptr")
@triton.jit
def swizzle_codes_sm90(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, offs_ptr, swizzled_a_ptr, m, rows, blocks, per_row, matrices,
    SQUARE: tl.constexpr, SWIZZLED: tl.constexpr, GROUPS: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr,
):  # fmt: skip
    """Lines of swizzled A [matrices, rows, 64], fp16, from E2M1 codes a [m, K] with E4M3 scales; see `_ptx`.

    The codes are dequantised, without the global or row scale. per_row: bytes of a row; blocks: blocks of 16 elements
    in a row.
    SQUARE, SWIZZLED: layout of the scales. The other arguments: see `swizzle_a_sm90`.
    """
    if LAUNCH_DEPENDENTS:
        swizzled_a_ptr = launch_dependents(swizzled_a_ptr)
    if GROUPS > 0:
        group = tl.arange(0, _power_of_2(GROUPS))
        m = tl.minimum(m, tl.max(tl.load(offs_ptr + group, mask=group < GROUPS, other=0), 0))
    row, block, half, stores = _place(swizzled_a_ptr, m, rows, blocks // 4, matrices)
    if SWIZZLED:
        scale = swizzle(row.to(tl.int64), block, tl.cdiv(blocks, 4))
    else:
        scale = (row // (16 if SQUARE else 1)).to(tl.int64) * blocks + block
    codes = a_ptr + row.to(tl.int64) * per_row + block * 8 + half * 4
    scales = a_scales_ptr + scale
    # Triton up to 3.7 supports only pointers of one type.
    same: tl.constexpr = swizzled_a_ptr.dtype
    addresses = codes.to(same, bitcast=True), scales.to(same, bitcast=True)
    token = do_ptx(select_ptx(_CODES, SWIZZLED), "l,l,r,r,r,r,l,l", stores + addresses)
    keep(token, swizzled_a_ptr, m)


@dataclass(frozen=True)
class SwizzledA:
    """The shape of swizzled A, [matrices, rows, 64], for a matmul by `gemm_wgmma_sm90`."""

    matrices: int
    rows: int

    @classmethod
    def of(cls, p: Problem, config: WgmmaConfig) -> "SwizzledA":
        """The matrices of whole pipeline stages, and those into which the lines of the last tile extend."""
        lines = _lines(p.m)
        rows = ceil_div(p.m, lines) * lines
        end = p.m + config.rows if p.ragged else ceil_div(p.m, config.rows) * config.rows
        steps = config.steps_per_stage
        return cls(2 * steps * ceil_div(p.k, 128 * steps) + ceil_div(end - rows, rows), rows)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.matrices, self.rows, 64

    def of_call(self, call: Call, gathered: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """Swizzled A of a call: `Call.arranged_a`, or else computed by `swizzle_a_sm90`.

        gathered: x [rows, K] and index [m], int32 or int64, where the call's plain A is x[index]. Then A is not read.
        Raises RuntimeError where the call has a swizzled A of another shape.
        """
        if call.arranged_a is not None:
            if not statically_true(call.arranged_a.shape == self.shape):
                raise RuntimeError(f"arranged_a: expected shape {self.shape}, got {tuple(call.arranged_a.shape)}")
            return call.arranged_a
        a, b, p = call.a, call.b, call.problem
        out = a.data.new_empty(self.shape, dtype=p.compute_dtype)
        groups, offs = (p.groups, call.offs) if p.ragged else (0, b.data)
        grid = self.rows // LINES.value * ceil_div(self.matrices, MATRICES.value)
        options = {"GROUPS": groups, "LAUNCH_DEPENDENTS": p.target.dependent_launch}
        if a.type.format is None:
            x, index = (a.data, b.data) if gathered is None else gathered
            launch(
                swizzle_a_sm90, grid,
                x, index, b.data, b.scales, offs, out, x.shape[-2], p.m, self.rows, ceil_div(p.k, 64), self.matrices,
                INDEXED=gathered is not None, num_warps=LANES.value // 32, **options,
            )  # fmt: skip
            return out
        launch(
            swizzle_codes_sm90, grid,
            a.data, a.scales, b.data, b.scales, offs, out, p.m, self.rows, p.k // 16, a.units_per_row, self.matrices,
            SQUARE=int(a.type.format.square), SWIZZLED=int(a.type.swizzled), num_warps=LANES.value // 32, **options,
        )  # fmt: skip
        return out

    def by_operations(self, a: torch.Tensor) -> torch.Tensor:
        """Swizzled A of a plain A [..., K], by PyTorch operations.

        Inductor fuses them into the kernel that computes A, and plain A is never in memory.
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
    """The divisor of the rows of swizzled A: `LINES` or twice as many."""
    return 16 if statically_true(m <= 16) else 32
