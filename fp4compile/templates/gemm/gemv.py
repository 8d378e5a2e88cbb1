"""GEMV: one or two rows of 16-bit A times NVFP4 or MXFP4 weights B, bound by reading B.

A decode step of one token consists of such matmuls. As in `gemm_skinny`, asynchronous copies bring the operands of
each warp's next step to shared memory, and the grid is persistent (`persistent_grid`). Two things differ:

- All of A stays in shared memory. A warp has the same parts of K in every tile. So it stores its parts of A there once,
  in the order of multiplication, and waits for no other warp until the sums of several tiles are added.
- Block scales are applied to sums, of which there are fewer than codes. (Sums are of 16 elements; two of them have one
  scale of MXFP4.) `mma.sync` has 16 rows (of B here), 8 columns (of A) and four lanes that share the elements of a row.
  These four lanes read four different quarters of a row's step, so at any time each lane multiplies a block of its own.
  Two of the eight columns belong to each lane: it passes its elements of A in these columns, and zeros in the others.
  So a column's sum covers one block, in float32.

With two rows of A, the two columns of a lane have one row each. With one row, they have the same row, for two blocks
that are multiplied in sequence. Both blocks use the same registers of A. The first block's sums are read in the even
columns, the second block's in the odd ones.

The instruction assigns other elements of K to a lane than the lane reads. That changes only the order of the sum,
because A and B are permuted in the same way.

Each warp has one buffer, which is refilled as soon as it has been read. Two buffers, or longer steps, were slower: all
copies then arrive later, and the warp idles meanwhile. Starting before the kernel ahead has ended
(`device.dependent_launch`), with B's first tiles on their way to the L2 cache, was slower, too: 7.8 us instead of 6.5
for 6144 x 4096 in a graph of Llama-3-8B (H200), where the gaps between kernels are 0.1 us.

The kernel is written one lane at a time, in inline PTX ordered by tokens: see `async_copy`. `gemv_pipeline` has the
copies and the layout of A; this file has the arithmetic and the kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.apply_epilogue import rescale, store_rounded
from fp4compile.templates.device.async_copy import AWAIT_VALUE, BARRIER, WARP_BARRIER, do_ptx, select_ptx, wait_ptx
from fp4compile.templates.device.fp4_weights import dequantize_word, type_of_scales
from fp4compile.templates.device.persistent_grid import group_tiles, next_step, of_matmul
from fp4compile.templates.device.shared_memory import MEMORY, reserve, reserved, sum_of_warps_ptx
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.gemv_pipeline import (
    A_ROW_BYTES,
    BUFFER_BYTES,
    WIDTH,
    ZEROS_BYTES,
    a_address,
    copy_b,
    read_b,
    store_a,
)
from fp4compile.templates.gemm.horizontal import launch_group
from fp4compile.templates.launch import LaunchConfig
from fp4compile.templates.problem import Problem
from fp4compile.templates.writes import of_several, writes


@triton.constexpr_function
def tiles_at_once(warps, rows):
    """Tiles of a program whose sums are added together: as many as there are lanes for the results, at most 16."""
    return min(2 * warps, 16) // rows


def needed_bytes(warps: int, steps: int, rows: int) -> int:
    """Shared memory of a program: its warps' buffers, elements of A and sums."""
    a_bytes = ZEROS_BYTES.value + A_ROW_BYTES.value * steps * rows
    return warps * (BUFFER_BYTES.value + a_bytes + 64 * rows * tiles_at_once(warps, rows))


@dataclass(frozen=True)
class GemvConfig(LaunchConfig):
    """The launch configuration of `gemv`.

    warps: warps of a program. steps: steps of a warp along K. rows: rows of A that the kernel computes, 1 or 2.
    shared: bytes of shared memory to reserve for a program. grid: the most programs; fewer tiles need fewer.
    """

    host = ("grid",)
    warps: int
    steps: int
    rows: int
    shared: int
    grid: int


def gemv_config(p: Problem) -> GemvConfig | None:
    """The configuration; None for more than two rows of A, or for rows that shared memory cannot hold."""
    width = WIDTH.value  # elements of a warp's step along K
    rows = 1 if statically_true(p.m == 1) else 2
    warps = 8 if statically_true(p.k <= 16 * 8 * width) else 16
    steps = ceil_div(p.k, width * warps)
    # A lane holds its warp's whole part of a row in registers before shared memory, which bounds the steps.
    if not statically_true(p.m <= 2) or not statically_true(steps <= 16):
        return None
    if p.b.scales_text == "e8m0" and not statically_true(p.k % 128 == 0):  # a row's scales begin at no word
        return None
    size = needed_bytes(warps, steps, rows)
    fit = [each for each in (2, 3) if each * warps <= 24 and reserved(size, each, p.target)]
    if not fit and not reserved(size, 1, p.target):
        return None
    # Two or three programs share a multiprocessor, whichever number leaves fewer idle in the last round of tiles.
    each = fit[0] if fit else 1
    if fit and isinstance(p.n, int):
        each = min(fit, key=lambda each: each * ceil_div(ceil_div(p.n, 16), each * p.target.multiprocessors))
    return GemvConfig(warps, steps, rows, reserved(size, each, p.target), each * p.target.multiprocessors)


def _multiply_ptx(compute: str, scale: str, half: int, rows: int) -> str:
    """PTX that adds the products of 128 elements (one half of a step) of 16 rows of B to a lane's sums.

    Outputs: four sums. With two rows of A: sums of the upper row of B with both rows of A, then of the lower row of B
    with both. With one row of A: sums of both rows of B over even blocks, then over odd blocks. Inputs: four words of
    codes of the upper row, four words of the lower row; a word with the upper row's scales of these two blocks, a word
    with the lower row's scales, four bytes of E4M3 or two of E8M0; the address of the lane's elements of A; the four
    sums so far.
    """
    kind, dtype = ("f16x2", "f16") if compute == "fp16" else ("bf16x2", "bf16")
    text = ["{ .reg .b32 u, v, x, a<4>, b<4>, y<8>; .reg .b16 h, k; .reg .f32 z, l<4>, c<4>;"]
    text.append("mov.f32 z, 0f00000000;")
    for row in range(2):
        if scale == "e8m0":
            text.append(
                f"bfe.u32 u, ${12 + row}, {8 * half}, 8; shl.b32 u, u, 23; max.u32 u, u, 0x00400000; mov.b32 l{row}, u;"
            )
            text.append(f"fma.rn.f32 l{row}, l{row}, z, l{row}; mov.f32 l{2 + row}, l{row};")
        else:
            text.append(f"mov.b32 {{h, k}}, ${12 + row}; cvt.rn.f16x2.e4m3x2 u, {'k' if half else 'h'};")
            text.append(f"mov.b32 {{h, k}}, u; cvt.f32.f16 l{row}, h; cvt.f32.f16 l{2 + row}, k;")
    for block in range(2):
        if rows == 2 or block == 0:
            for word in range(2):  # eight elements of the block
                words = ", ".join(f"y{4 * word + i}" for i in range(4))
                text.append(f"xor.b32 x, $14, {64 * half + 32 * block + 16 * word}; ld.shared.v4.b32 {{{words}}}, [x];")
        for word in range(2):
            codes = 4 + 2 * block + word
            text += [dequantize_word(kind, f"${codes}", "a"), dequantize_word(kind, f"${codes + 4}", "b")]
            for j in (0, 2):
                start = "c0, c1, c2, c3" if word + j else "z, z, z, z"
                text.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{c0, c1, c2, c3}},"
                    f" {{a{j}, b{j}, a{j + 1}, b{j + 1}}}, {{y{4 * word + j}, y{4 * word + j + 1}}}, {{{start}}};"
                )
        for i in range(4):
            scale = f"l{2 * block + i // 2}"
            if rows == 2:
                text.append(f"fma.rn.f32 ${i}, c{i}, {scale}, ${i if block else 15 + i};")
            elif i % 2 == block:
                to = 2 * block + i // 2
                text.append(f"fma.rn.f32 ${to}, c{i}, {scale}, ${15 + to};")
    return " ".join(text) + " }"


_MULTIPLY = tl.constexpr({
    (compute, scale, half, rows): _multiply_ptx(compute, scale, half, rows)
    for compute, scale in (("fp16", "e4m3"), ("bf16", "e4m3"), ("bf16", "e8m0")) for half in (0, 1) for rows in (1, 2)
})  # fmt: skip
_MULTIPLY_OPERANDS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 11 + ["f"] * 4))


@triton.jit
def _multiply(b, a_at, c, COMPUTE: tl.constexpr, B_SCALES: tl.constexpr, ROWS: tl.constexpr):
    """A lane's four sums c plus the products of a step of 128 elements along K.

    b: a lane's codes and scales of B in that step, from `read_b`. a_at: where in shared memory its elements of A are,
    from `a_address`.
    """
    for half in tl.static_range(2):
        c = tl.inline_asm_elementwise(
            select_ptx(_MULTIPLY, COMPUTE, type_of_scales(B_SCALES), half, ROWS), _MULTIPLY_OPERANDS,
            b[8 * half : 8 * half + 8] + b[16:18] + (a_at,) + c,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return c


@triton.constexpr_function
def _store_sums_ptx(rows):
    """PTX that adds up the sums of the four lanes of a row and stores them to shared memory.

    Inputs: four sums of a lane, in the order of `_multiply_ptx`; the factor of each row of A; the destination of the
    first sum; the number of the lane among the four; a token. With two rows of A each of the four lanes stores one sum;
    with one row two lanes do.
    """
    text = ["{ .reg .b32 x; .reg .f32 f, s<4>; .reg .pred p; mov.b32 $0, 0;"]
    if rows == 1:
        text.append("add.f32 s0, $1, $3; add.f32 s1, $2, $4; mul.f32 s0, s0, $5; mul.f32 s1, s1, $5;")
    else:
        text += [f"mul.f32 s{i}, ${1 + i}, ${5 + i % 2};" for i in range(4)]
    for i in range(2 if rows == 1 else 4):
        text += [f"mov.b32 x, s{i}; shfl.sync.bfly.b32 x, x, {by}, 31, 0xffffffff; mov.b32 f, x; add.f32 s{i}, s{i}, f;"
                 for by in (1, 2)]  # fmt: skip
        to = 32 * i if rows == 1 else i // 2 * 32 * rows + i % 2 * 4
        text.append(f"setp.eq.b32 p, $8, {i}; @p st.shared.f32 [$7 + {to}], s{i};")
    return " ".join(text) + " }"


@triton.jit
def _store_sums(at, c, factors, token, lane, ROWS: tl.constexpr):
    """Store a warp's sums of a tile to shared memory as [16, ROWS]. Returns a token."""
    at = at + lane % 32 // 4 * (4 * ROWS)
    return do_ptx(_store_sums_ptx(ROWS), "f,f,f,f,f,f,r,r,r", c + (factors[0], factors[ROWS - 1], at, lane % 4, token))


@writes("out_ptr", **of_several())
@triton.jit
def gemv(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_1_ptr, b_scales_1_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr,
    b_2_ptr, b_scales_2_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    m, n, n_1, n_2, k_vectors,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SCALES: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr, GROUP_SIZE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """out [m, n] = a [m, K] x b [n, K]^T, rescaled, plus a bias; for a group, also the matmuls with b_1 and b_2.

    a: bf16 or fp16, m <= ROWS. b: K / 2 bytes of codes a row. k_vectors: K / 32, even. out: any floating-point type.
    GROUP_SIZE: matmuls of the launch, 1 to 3; out_1 is [m, n_1], out_2 [m, n_2]. Pointers of absent matmuls are
    never read.
    WARPS: of a program; the launch must have as many. They share a tile (16 rows of b) along K, in STEPS steps of WIDTH
    elements each. ROWS: 1 or 2. WIDE: rows of scales are whole lines of a step, and not swizzled. EVEN: no tile has a
    row, and no step an element, past the end. SHARED: bytes of shared memory to reserve (`reserved`), at least for
    `needed_bytes`.
    """
    at_once: tl.constexpr = tiles_at_once(WARPS, ROWS)
    a_bytes: tl.constexpr = ZEROS_BYTES + STEPS * ROWS * A_ROW_BYTES  # of a warp
    sums_size: tl.constexpr = 64 * ROWS  # of a warp and a tile
    reserve(a_ptr, out_ptr, k_vectors, SHARED)
    lane = tl.arange(0, 32 * WARPS)
    steps = tl.cdiv(k_vectors, WARPS * 8)  # equals STEPS; the compiler would unroll a loop of constant length
    tiles, tiles_1, total = group_tiles(n, n_1, n_2, 16, GROUP_SIZE)
    memory = do_ptx(MEMORY, "r", (lane,))
    own_a = memory + lane // 32 * a_bytes  # a multiple of 256 bytes, where the zeros lie: see `_multiply_ptx`
    sums = memory + WARPS * a_bytes
    buffer = sums + WARPS * (at_once * sums_size) + lane // 32 * BUFFER_BYTES
    token = copy_b(buffer, tl.program_id(0), 0, lane, lane, b_ptr, b_scales_ptr, b_1_ptr, b_scales_1_ptr, b_2_ptr,
                   b_scales_2_ptr, n, n_1, n_2, k_vectors, tiles, tiles_1, total,
                   B_SCALES, WARPS, WIDE, EVEN, GROUP_SIZE)  # fmt: skip
    factors, token = store_a(own_a, token, lane, a_ptr, m, k_vectors, COMPUTE, WARPS, STEPS, ROWS, EVEN)
    a_at, a_stride = a_address(own_a, lane, ROWS)

    for first in tl.range(tl.program_id(0), total, tl.num_programs(0) * at_once):
        count = tl.minimum(tl.cdiv(total - first, tl.num_programs(0)), at_once)
        for i in tl.range(count):
            tile = first + i * tl.num_programs(0)
            c = ()
            for _ in tl.static_range(4):
                c = c + (tl.zeros((32 * WARPS,), tl.float32),)
            for step in tl.range(steps):
                token = do_ptx(wait_ptx(0), "r", (token,))
                b, token = read_b(buffer, token, lane, B_SCALES)
                token = do_ptx(WARP_BARRIER, "r", (token,))  # every lane has read its part: the buffer may be filled
                next_tile, step_of_next = next_step(tile, step, steps)
                token = copy_b(buffer, next_tile, step_of_next, token, lane, b_ptr, b_scales_ptr, b_1_ptr,
                               b_scales_1_ptr, b_2_ptr, b_scales_2_ptr, n, n_1, n_2, k_vectors, tiles, tiles_1, total,
                               B_SCALES, WARPS, WIDE, EVEN, GROUP_SIZE)  # fmt: skip
                c = _multiply(b, a_at + step * a_stride, c, COMPUTE, B_SCALES, ROWS)
            token = _store_sums(sums + (i * WARPS + lane // 32) * sums_size, c, factors, token, lane, ROWS)
        token = do_ptx(BARRIER, "r", (token,))
        token = _store_results(sums, first, count, token, lane, m, n, n_1, n_2, tiles, tiles_1,
                               a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr,
                               b_outer_2_ptr, bias_2_ptr, out_2_ptr,
                               A_OUTER, B_OUTER, BIAS, COMPUTE, WARPS, ROWS, ISA, GROUP_SIZE)  # fmt: skip
        token = do_ptx(BARRIER, "r", (token,))  # the sums have been read and may be overwritten


@triton.jit
def _store_results(
    sums, first, count, token, lane, m, n, n_1, n_2, tiles, tiles_1, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_outer_1_ptr, bias_1_ptr, out_1_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr,
    ROWS: tl.constexpr, ISA: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Add up the warps' sums of the program's `count` tiles from `first` on, rescale and store them. Returns a token.

    One lane computes one result.
    """
    place = lane // (16 * ROWS)
    of_tile = lane % (16 * ROWS)
    at_m = of_tile % ROWS
    ok = place < count
    acc = tl.inline_asm_elementwise(
        sum_of_warps_ptx(WARPS, 64 * ROWS), "=&f,r,r",
        (sums + tl.where(ok, place, 0) * (WARPS * 64 * ROWS) + of_tile * 4, token),
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    token = do_ptx(AWAIT_VALUE, "f,r", (acc, token))  # the sums are read before the next barrier
    tile = first + place * tl.num_programs(0)
    b_outer_ptr, bias_ptr = of_matmul(tile, tiles, tiles_1, (b_outer_ptr, bias_ptr), (b_outer_1_ptr, bias_1_ptr),
                                      (b_outer_2_ptr, bias_2_ptr), GROUP_SIZE)  # fmt: skip
    if GROUP_SIZE > 2:
        out_1_ptr = tl.where(tile >= tiles_1, out_2_ptr, out_1_ptr)
    if GROUP_SIZE > 1:
        out_ptr = tl.where(tile >= tiles, out_1_ptr, out_ptr)
    before, n = of_matmul(tile, tiles, tiles_1, (0, n), (tiles, n_1), (tiles_1, n_2), GROUP_SIZE)
    tile -= before
    col = tile * 16 + of_tile // ROWS
    ok = ok & (at_m < m) & (col < n)
    acc = acc * (2.0**14 if COMPUTE == "fp16" else 2.0**7)  # see `dequantize_word`, `_POWER_OF_TWO`
    acc = rescale(acc, at_m, tl.where(ok, col, 0), m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr,
                  A_OUTER, B_OUTER, BIAS, 0)  # fmt: skip
    store_rounded(out_ptr, at_m.to(tl.int64) * n + col, acc, ok, ISA)
    return token


def multiply_group(calls: Sequence[Call], config: GemvConfig) -> list[torch.Tensor]:
    """[1, m, n] of each of up to three matmuls of one A, in one launch."""
    p = calls[0].problem
    wide = statically_true(p.k % 256 == 0) and not p.b.swizzled
    return launch_group(gemv, calls, config, 16, WIDTH.value, WIDE=int(wide))
