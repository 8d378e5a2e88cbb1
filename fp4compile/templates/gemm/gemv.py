"""The product of one or two rows of 16-bit activations and NVFP4 weights, at the speed at which the weights arrive.

What decode steps are made of. As in `gemm_skinny`, each warp has the weights that are next on their way into
shared memory of its own, by asynchronous copies, and goes on from one tile of 16 rows to the next, of the next weight,
too, where several are multiplied by the same activations. But here all of the activations stay in shared memory:

- A warp has the same parts of the contraction dimension in every tile. So it puts those of the activations there once,
  in the order in which they are multiplied, and waits for no other warp until the sums of several tiles are added.
- `mma.sync` has eight columns, and four lanes with other elements of a row of weights each. A lane's elements are of a
  block of their own, and the columns are cut among the four blocks: each takes the activations of one row and one
  block, and zeros elsewhere. So every sum is that of one block, and scales are applied to sums, of which there are
  fewer than codes. Two columns a block serve two rows.
- Of one row, two blocks that are multiplied one after the other share the registers of their activations: either has
  columns, even or odd, in which the other's sums are not read.

A chunk is 256 elements of 16 rows: in shared memory, lines of codes as they lie in global memory, 128 bytes, then lines
of scales. Lane 4 * g + q takes the q-th part of rows g and g + 8. Of its part, two blocks (16 bytes) at a time:
`mma.sync` has other elements there, which does not matter as both operands are cut among lanes in the same way. What is
taken is replaced at once by the warp's next chunk. Two of them on their way at once, or longer ones, were slower: all
then arrives later, and there is nothing to multiply meanwhile.

The kernel is written for one lane at a time: tensors have one dimension and one element for each lane. Inline PTX does
the rest; it is pure, and its order is kept by a token (see `skinny_pipeline`).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.templates.device.async_copy import BARRIER, COMMIT, WARP_BARRIER, do_ptx, wait_ptx
from fp4compile.templates.device.epilogue import rescale, store_rounded
from fp4compile.templates.device.memory import swizzle
from fp4compile.templates.device.nvfp4_weights import add_ptx, after, dequantize_word
from fp4compile.templates.device.shared_memory import MEMORY, reserve
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import GemvConfig, gemv_config
from fp4compile.templates.gemm.problem import Problem
from fp4compile.templates.gemm.streaming import in_common, launch_group, streams

WIDTH = tl.constexpr(256)  # elements of a chunk's rows
_CODES = tl.constexpr(2048)  # bytes of a chunk's codes, which its scales follow
_CHUNK = tl.constexpr(2304)  # bytes of both
_ROW = tl.constexpr(512)  # bytes of a row of activations of a chunk
_ZEROS = tl.constexpr(256)  # bytes of them, of each warp: what is read in place of activations


@triton.constexpr_function
def batch_of(warps, rows):
    """Tiles of a program whose sums are added at once: no more than there are lanes for their results."""
    return min(2 * warps, 16) // rows


def needed_bytes(warps: int, steps: int, rows: int) -> int:
    """Shared memory of a program: chunks, activations, sums."""
    beside = _ZEROS.value + _ROW.value * steps * rows
    return warps * (_CHUNK.value + beside + 64 * rows * batch_of(warps, rows))


# What is copied: a chunk.


@triton.constexpr_function
def _copy_ptx(size, lanes, even):
    """Copies of `size` bytes a lane, until 16 rows have come; `lanes` have a row's. The next copy's rows lie behind.

    In: where to and from; bytes from a row to the one that the next copy has; even: whether to copy; else: the lane's
    first row, how many rows there are, whether its bytes are in a row (what is not there becomes zeros). And a token.
    """
    rows = max(32 // lanes, 1)  # of one copy
    copy = "cp.async.cg.shared.global.L2::128B" if size == 16 else "cp.async.ca.shared.global"
    text = ["{ .reg .pred p, q; .reg .b64 a; .reg .b32 r, z; mov.b32 $0, 0; mov.b64 a, $2;"]
    text.append("setp.ne.b32 p, $4, 0;" if even else "setp.ne.b32 p, $6, 0; mov.b32 r, $4;")
    for i in range(max(16 // rows, 1)):
        to = f"[$1 + {32 * size * i}]"
        if even:
            text.append(f"@p {copy} {to}, [a], {size};")
        else:
            text.append(f"setp.lt.and.s32 q, r, $5, p; selp.b32 z, {size}, 0, q; add.s32 r, r, {rows};"
                        f" {copy} {to}, [a], {size}, z;")  # fmt: skip
        text.append("add.s64 a, a, $3;")
    return " ".join(text) + " }"


@triton.jit
def _copy(
    to, source, stride, row, n, inside, there, token, SIZE: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr
):
    """`_copy_ptx`; there: whether to copy at all."""
    text: tl.constexpr = _copy_ptx(SIZE, LANES, EVEN)
    if EVEN:
        return do_ptx(text, "r,l,l,r,r", (to, source, stride, there.to(tl.int32), token))
    else:
        return do_ptx(text, "r,l,l,r,r,r,r", (to, source, stride, row, n, (there & inside).to(tl.int32), token))


@triton.jit
def _start_codes(to, tile, chunk, there, token, lane, b_ptr, n, chunks, EVEN: tl.constexpr):
    """Start to copy the codes of a chunk, by units of 16 bytes (32 elements)."""
    unit = lane % 8
    row = lane % 32 // 8
    # Units of every second line are exchanged: lanes that read at a time then read from banks of their own.
    to = to + row * 128 + (unit ^ row % 2) * 16
    row = tile * 16 + row
    at = chunk * 8 + unit
    source = b_ptr + (row.to(tl.int64) * chunks + at) * 16
    stride = tl.zeros_like(lane).to(tl.int64) + tl.cast(chunks, tl.int64) * 64
    return _copy(to, source, stride, row, n, at < chunks, there, token, 16, 8, EVEN)


@triton.jit
def _start_scales(
    to, tile, chunk, there, token, lane, b_scales_ptr, n, chunks,
    SQUARE: tl.constexpr, SWIZZLED: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Start to copy the scales of a chunk; WIDE: 16 bytes at a time, as far as a line goes; else four."""
    size: tl.constexpr = 16 if WIDE else 4
    pieces: tl.constexpr = 1 if WIDE else 4  # of a line
    place = lane % (16 * pieces) % 32
    row = tile * 16 + place // pieces
    at = chunk * pieces + place % pieces
    if SWIZZLED:  # rows of the same 16 lie 16 bytes apart
        source = swizzle(row, 0, tl.cdiv(chunks, 2)) + at * 512
        step = 16
    elif SQUARE:
        source = row // 16 * (chunks * 2) + at * size
        step = 0
    else:
        source = row * (chunks * 2) + at * size
        step = chunks * 2
    stride = (tl.zeros_like(lane) + step * (32 // pieces)).to(tl.int64)
    inside = at * size < chunks * 2
    to = to + place * size
    return _copy(to, b_scales_ptr + source, stride, row, n, inside, there, token, size, pieces, EVEN)


@triton.jit
def _start(
    to, tile, step, token, lane, b_ptr, b_scales_ptr, b_1_ptr, b_scales_1_ptr, b_2_ptr, b_scales_2_ptr,
    n, n_1, n_2, chunks, tiles, tiles_1, total,
    B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr, WARPS: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Start to copy the chunk of a warp's step of a tile; nothing where there is no such tile.

    tiles, tiles_1, total: how many there are up to the end of each weight.
    """
    there = (tile < total) & (lane >= 0)
    # Selects here and in `_finish`: torch takes a pointer that goes through a function's result for written.
    if GROUP_SIZE > 2:
        last = tile >= tiles_1
        tiles = tl.where(last, tiles_1, tiles)
        b_1_ptr = tl.where(last, b_2_ptr, b_1_ptr)
        b_scales_1_ptr = tl.where(last, b_scales_2_ptr, b_scales_1_ptr)
        n_1 = tl.where(last, n_2, n_1)
    if GROUP_SIZE > 1:
        later = tile >= tiles
        tile = tl.where(later, tile - tiles, tile)
        b_ptr = tl.where(later, b_1_ptr, b_ptr)
        b_scales_ptr = tl.where(later, b_scales_1_ptr, b_scales_ptr)
        n = tl.where(later, n_1, n)
    chunk = step * WARPS + lane // 32
    token = _start_codes(to, tile, chunk, there, token, lane, b_ptr, n, chunks, EVEN)
    token = _start_scales(to + _CODES, tile, chunk, there, token, lane, b_scales_ptr, n, chunks,
                          B_SQUARE, B_SWIZZLED, WIDE, EVEN)  # fmt: skip
    return do_ptx(COMMIT, "r", (token,))


# Activations.

# Out: 16 bytes of activations (two words of 64 bits), zeros where there are none. In: where from; whether there are
# any; a token.
_LOAD = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b64 $0, 0; mov.b64 $1, 0; @p ld.global.v2.b64 {$0, $1}, [$2]; }"
)
# The larger one of a bf16x2 and of two words of bf16, halves apart, by magnitude.
_LARGEST = tl.constexpr(
    "{ .reg .b32 x, y; mov.b32 $0, $3; "
    + " ".join(
        f"mov.b64 {{x, y}}, ${i}; abs.bf16x2 x, x; abs.bf16x2 y, y; max.bf16x2 $0, $0, x; max.bf16x2 $0, $0, y;"
        for i in (1, 2)
    )
    + " }"
)
# From the largest of each lane: the power of two, in both halves, that brings the largest of the warp to about 2^125,
# and what makes the sums of products with `dequantize_word`'s codes the same as without it, but times 2^-7.
_POWERS = tl.constexpr(
    "{ .reg .b32 x, y; and.b32 x, $2, 0x7F80; shr.u32 y, $2, 16; and.b32 y, y, 0x7F80; max.u32 x, x, y;"
    " redux.sync.max.u32 x, x, 0xffffffff; shr.u32 x, x, 7; sub.s32 x, 379, x; min.s32 x, x, 254;"
    " shl.b32 y, x, 7; prmt.b32 $0, y, y, 0x1010; sub.s32 y, 373, x; shl.b32 y, y, 23; mov.b32 $1, y; }"
)
_TIMES = " ".join(f"fma.rn.bf16x2 x{i}, x{i}, $4, z;" for i in range(4))


@triton.constexpr_function
def _put_ptx(compute):
    """Eight activations to shared memory, elements j and j + 4 next to each other.

    In: where to, two words of 64 bits, a power of two to multiply bf16 by; a token.
    """
    text = ["{ .reg .b32 x<4>, y<4>, z; mov.b32 $0, 0; mov.b32 z, 0x80008000; mov.b64 {x0, x1}, $2;"]
    text.append(f"mov.b64 {{x2, x3}}, $3; {_TIMES if compute == 'bf16' else ''}")
    text += [f"prmt.b32 y{j}, x{j // 2}, x{2 + j // 2}, {'0x7632' if j % 2 else '0x5410'};" for j in range(4)]
    return " ".join(text) + " st.shared.v4.b32 [$1], {y0, y1, y2, y3}; }"


_PUT_ZERO = tl.constexpr("mov.b32 $0, 0; st.shared.b64 [$1], 0;")


@triton.jit
def _put_activations(
    at, token, lane, a_ptr, m, chunks,
    COMPUTE: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The activations of all of a warp's steps into shared memory, behind zeros: of a step, row by row.

    Returns, for each row, what makes the sums of products with it what they are without the power of two; and a token.
    """
    text: tl.constexpr = _put_ptx(COMPUTE)
    start = token  # so that a row's loads need not wait for what is put of another one
    unit = lane % 32  # of eight elements
    part = unit // 8  # of a chunk: whose lanes read it
    factors = ()
    for row in tl.static_range(ROWS):
        x = ()
        for step in tl.static_range(STEPS):
            at_unit = (step * WARPS + lane // 32) * 32 + unit
            ok = (row < m) & (unit >= 0) if EVEN else (row < m) & (at_unit < chunks * 4)
            source = a_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + (row * (chunks * 4) + at_unit).to(tl.int64) * 16
            x = x + tl.inline_asm_elementwise(
                _LOAD, "=&l,=&l,l,r,r", (source, ok.to(tl.int32), start), dtype=(tl.int64, tl.int64), is_pure=True,
                pack=1,
            )  # fmt: skip
        power = tl.zeros_like(lane)
        factor = tl.full((32 * WARPS,), 1.0, tl.float32)
        if COMPUTE == "bf16":
            # Exact but for what is 2^-148 of the largest, or less: that is lost among float32 sums of small codes.
            for step in tl.static_range(STEPS):
                power = do_ptx(_LARGEST, "l,l,r", (x[2 * step], x[2 * step + 1], power))
            power, factor = tl.inline_asm_elementwise(
                _POWERS, "=&r,=&f,r", (power,), dtype=(tl.int32, tl.float32), is_pure=True, pack=1
            )
        factors = factors + (factor,)
        to = at + _ZEROS + row * _ROW + (unit ^ part % 2 ^ part // 2 * 4 ^ row * 2) * 16
        for step in tl.static_range(STEPS):
            words = (x[2 * step], x[2 * step + 1], power, token)
            token = do_ptx(text, "r,l,l,r,r", (to + step * (ROWS * _ROW),) + words)
    token = do_ptx(_PUT_ZERO, "r,r", (at + unit * 8, token))
    return factors, do_ptx(WARP_BARRIER, "r", (token,))


@triton.jit
def _lane_activations(at, lane, ROWS: tl.constexpr):
    """Where a lane reads its activations of the first step, and how far it is to those of the next one.

    Only the lanes of a block's columns have its activations, the others zeros. Of two rows the even lanes have the
    first one, the odd lanes the second one; of one row, either have one of the two blocks.
    """
    g = lane % 32 // 4
    q = lane % 4
    own = g // 2 == q
    place = (q * 8 ^ q % 2 ^ q // 2 * 4 ^ g % 2 * 2) * 16
    if ROWS == 2:
        place = place + g % 2 * _ROW
    return tl.where(own, at + _ZEROS + place, at), tl.where(own, ROWS * _ROW, 0)


# The arithmetic of a step.


_LOWER = 8 * 128  # bytes from the codes of the upper eight rows to those of the lower ones
# A lane's part of a chunk. Out: for each 128 elements four words of codes of its upper row, four of the lower one; the
# upper row's scales, the lower one's; a token. In: where its codes and its scales are; a token.
_TAKE = tl.constexpr(
    "{ .reg .b32 a; mov.b32 $18, 0; xor.b32 a, $19, 16;"
    f" ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$19]; ld.shared.v4.b32 {{$4, $5, $6, $7}}, [$19 + {_LOWER}];"
    f" ld.shared.v4.b32 {{$8, $9, $10, $11}}, [a]; ld.shared.v4.b32 {{$12, $13, $14, $15}}, [a + {_LOWER}];"
    " ld.shared.b32 $16, [$20]; ld.shared.b32 $17, [$20 + 128]; }"
)
_TAKE_OPERANDS = tl.constexpr(",".join(["=&r"] * 19 + ["r"] * 3))


@triton.jit
def _take(at, token, lane):
    """What `_TAKE` says, of the chunk that has arrived; and a token."""
    g = lane % 32 // 4
    q = lane % 4
    codes = at + g * 128 + q * 32 + g % 2 * 16
    taken = tl.inline_asm_elementwise(
        _TAKE, _TAKE_OPERANDS, (codes, at + _CODES + g * 16 + q * 4, token), dtype=(tl.int32,) * 19, is_pure=True,
        pack=1,
    )  # fmt: skip
    return taken[:18], taken[18]


def _multiply_ptx(compute: str, half: int, rows: int) -> str:
    """128 elements of 16 rows of weights, the first half of a chunk or the second, added to a lane's sums.

    Operands: four sums out: of its upper row of weights and both rows of activations, then of its lower one; of one row
    of activations, of both rows of weights and even blocks, then of odd ones. Four words of codes of the upper row,
    four of the lower one; a word that has the upper row's scales of these two blocks, one that has the lower row's;
    where the step's activations are; the sums.
    """
    kind, dtype = ("f16x2", "f16") if compute == "fp16" else ("bf16x2", "bf16")
    text = ["{ .reg .b32 u, v, x, a<4>, b<4>, y<8>; .reg .b16 h, k; .reg .f32 z, l<4>, c<4>;"]
    text.append("mov.f32 z, 0f00000000;")
    for row in range(2):
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
    (compute, half, rows): _multiply_ptx(compute, half, rows)
    for compute in ("fp16", "bf16") for half in (0, 1) for rows in (1, 2)
})  # fmt: skip
_MULTIPLY_OPERANDS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 11 + ["f"] * 4))


@triton.constexpr_function
def _chosen(texts, *key):
    return texts[key]


@triton.jit
def _multiply(taken, at, c, COMPUTE: tl.constexpr, ROWS: tl.constexpr):
    """The sums c, a chunk further: of what `_take` took, and activations in shared memory at `at`."""
    for half in tl.static_range(2):
        c = tl.inline_asm_elementwise(
            _chosen(_MULTIPLY, COMPUTE, half, ROWS), _MULTIPLY_OPERANDS,
            taken[8 * half : 8 * half + 8] + taken[16:18] + (at,) + c,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return c


@triton.constexpr_function
def _put_sums_ptx(rows):
    """In: four sums of a lane, in the order of `_multiply_ptx`; what to multiply those of either row of activations by;
    where the sum of the first goes to; which of four lanes it is; a token. Each of the four lanes writes one sum, or of
    one row of activations each of two.
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
def _put_sums(at, c, factors, token, lane, ROWS: tl.constexpr):
    """A warp's sums of a tile to shared memory: 16 rows of weights, of each the rows of activations. -> a token."""
    at = at + lane % 32 // 4 * (4 * ROWS)
    return do_ptx(_put_sums_ptx(ROWS), "f,f,f,f,f,f,r,r,r", c + (factors[0], factors[ROWS - 1], at, lane % 4, token))


@triton.jit
def gemv(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_1_ptr, b_scales_1_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr,
    b_2_ptr, b_scales_2_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    m, n, n_1, n_2, chunks,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr, GROUP_SIZE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """out [m, n] of a [m, 32 * chunks] (bf16 or fp16, m <= ROWS) and b [n, 16 * chunks] (bytes of codes).

    GROUP_SIZE: how many weights there are; out_1 [m, n_1] is of b_1, out_2 [m, n_2] of b_2. Those of a member that there
    is not are not read.
    chunks: even. A program takes 16 rows of b at a time, and goes on with those that lie as many programs on; its WARPS
    warps (as many as the launch has) cut the contraction dimension among themselves, by WIDTH elements, STEPS times.
    ROWS: 1 or 2. WIDE: lines of scales are whole 16 bytes, and not swizzled. EVEN: no tile has a row, and no step an
    element, beyond the end.
    SHARED: bytes of shared memory to reserve, at least for `needed_bytes`.
    """
    batch: tl.constexpr = batch_of(WARPS, ROWS)
    beside_size: tl.constexpr = _ZEROS + STEPS * ROWS * _ROW
    sums_size: tl.constexpr = 64 * ROWS  # of a warp and a tile
    reserve(a_ptr, out_ptr, chunks, SHARED)
    lane = tl.arange(0, 32 * WARPS)
    steps = tl.cdiv(chunks, WARPS * 8)  # STEPS; as a constant it would have the loop unrolled
    tiles = tl.cdiv(n, 16)
    tiles_1 = tiles
    if GROUP_SIZE > 1:
        tiles_1 = tiles + tl.cdiv(n_1, 16)
    total = tiles_1
    if GROUP_SIZE > 2:
        total = tiles_1 + tl.cdiv(n_2, 16)
    memory = do_ptx(MEMORY, "r", (lane,))
    beside = memory + lane // 32 * beside_size  # zeros first: where they lie, 256 bytes begin
    sums = memory + WARPS * beside_size
    here = sums + WARPS * (batch * sums_size) + lane // 32 * _CHUNK
    token = _start(here, tl.program_id(0), 0, lane, lane, b_ptr, b_scales_ptr, b_1_ptr, b_scales_1_ptr, b_2_ptr,
                   b_scales_2_ptr, n, n_1, n_2, chunks, tiles, tiles_1, total,
                   B_SQUARE, B_SWIZZLED, WARPS, WIDE, EVEN, GROUP_SIZE)  # fmt: skip
    factors, token = _put_activations(beside, token, lane, a_ptr, m, chunks, COMPUTE, WARPS, STEPS, ROWS, EVEN)
    activations, further = _lane_activations(beside, lane, ROWS)

    for first in tl.range(tl.program_id(0), total, tl.num_programs(0) * batch):
        count = tl.minimum(tl.cdiv(total - first, tl.num_programs(0)), batch)
        for i in tl.range(count):
            tile = first + i * tl.num_programs(0)
            c = ()
            for _ in tl.static_range(4):
                c = c + (tl.zeros((32 * WARPS,), tl.float32),)
            for step in tl.range(steps):
                token = do_ptx(wait_ptx(0), "r", (token,))
                taken, token = _take(here, token, lane)
                token = do_ptx(WARP_BARRIER, "r", (token,))  # every lane has its part: the next chunk may come
                next_tile, next_step = after(tile, step, steps)
                token = _start(here, next_tile, next_step, token, lane, b_ptr, b_scales_ptr, b_1_ptr, b_scales_1_ptr,
                               b_2_ptr, b_scales_2_ptr, n, n_1, n_2, chunks, tiles, tiles_1, total,
                               B_SQUARE, B_SWIZZLED, WARPS, WIDE, EVEN, GROUP_SIZE)  # fmt: skip
                c = _multiply(taken, activations + step * further, c, COMPUTE, ROWS)
            token = _put_sums(sums + (i * WARPS + lane // 32) * sums_size, c, factors, token, lane, ROWS)
        token = do_ptx(BARRIER, "r", (token,))
        token = _finish(sums, first, count, token, lane, m, n, n_1, n_2, tiles, tiles_1,
                        a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr,
                        b_outer_2_ptr, bias_2_ptr, out_2_ptr,
                        A_OUTER, B_OUTER, BIAS, COMPUTE, WARPS, ROWS, ISA, GROUP_SIZE)  # fmt: skip
        token = do_ptx(BARRIER, "r", (token,))  # sums may be written over


@triton.jit
def _finish(
    sums, first, count, token, lane, m, n, n_1, n_2, tiles, tiles_1, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_outer_1_ptr, bias_1_ptr, out_1_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr,
    ROWS: tl.constexpr, ISA: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Add the warps' sums of the program's tiles from `first` on, a lane for each; rescale; store. -> a token."""
    place = lane // (16 * ROWS)
    of_tile = lane % (16 * ROWS)
    at_m = of_tile % ROWS
    ok = place < count
    acc = tl.inline_asm_elementwise(
        add_ptx(WARPS, 64 * ROWS), "=&f,r,r",
        (sums + tl.where(ok, place, 0) * (WARPS * 64 * ROWS) + of_tile * 4, token),
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    token = do_ptx("mov.b32 $0, 0;", "f,r", (acc, token))  # what is read before the warps meet again
    tile = first + place * tl.num_programs(0)
    if GROUP_SIZE > 2:
        last = tile >= tiles_1
        tiles = tl.where(last, tiles_1, tiles)
        b_outer_1_ptr = tl.where(last, b_outer_2_ptr, b_outer_1_ptr)
        bias_1_ptr = tl.where(last, bias_2_ptr, bias_1_ptr)
        out_1_ptr = tl.where(last, out_2_ptr, out_1_ptr)
        n_1 = tl.where(last, n_2, n_1)
    if GROUP_SIZE > 1:
        later = tile >= tiles
        tile = tl.where(later, tile - tiles, tile)
        b_outer_ptr = tl.where(later, b_outer_1_ptr, b_outer_ptr)
        bias_ptr = tl.where(later, bias_1_ptr, bias_ptr)
        out_ptr = tl.where(later, out_1_ptr, out_ptr)
        n = tl.where(later, n_1, n)
    col = tile * 16 + of_tile // ROWS
    ok = ok & (at_m < m) & (col < n)
    acc = acc * (2.0**14 if COMPUTE == "fp16" else 2.0**7)  # see `dequantize_word`, `_POWERS`
    acc = rescale(acc, at_m, tl.where(ok, col, 0), m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr,
                  A_OUTER, B_OUTER, BIAS, 0)  # fmt: skip
    store_rounded(out_ptr, at_m.to(tl.int64) * n + col, acc, ok, ISA)
    return token


def _configure(p: Problem) -> GemvConfig | None:
    return gemv_config(p, WIDTH.value, needed_bytes)


def _serves(p: Problem) -> bool:
    return p.target.isa > 0 and streams(p) and _configure(p) is not None


def _run_group(calls: Sequence[Call], config: GemvConfig) -> list[torch.Tensor]:
    p = calls[0].problem
    wide = statically_true(p.k % 256 == 0) and not p.b.swizzled
    return launch_group(gemv, calls, config, 16, WIDTH.value, WIDE=int(wide))


CANDIDATE = Candidate(
    "gemv", "emulated", _serves, _configure, lambda call, config: _run_group([call], config)[0],
    dequantizes_a=True, group_with=in_common, run_group=_run_group,
)  # fmt: skip
