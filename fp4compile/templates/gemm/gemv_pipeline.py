"""The pipeline of `gemv`: copies of B to shared memory, and A in shared memory in the order of reading.

A warp's step is WIDTH elements along K of 16 rows of B. Its buffer has the codes as they lie in global memory, 16 lines
of 128 bytes, then 16 lines of scales, 16 bytes each (NVFP4) or 8 (MXFP4). Lane 4 * g + q multiplies rows g and g + 8,
and reads the q-th quarter of their lines: four blocks of 16 elements.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.async_copy import COMMIT, WARP_BARRIER, do_ptx
from fp4compile.templates.device.fp4_weights import is_scales
from fp4compile.templates.device.memory import swizzle
from fp4compile.templates.device.persistent_grid import of_matmul

WIDTH = tl.constexpr(256)  # elements along K of a warp's step
CODES_BYTES = tl.constexpr(2048)  # of a warp's buffer; the scales follow
BUFFER_BYTES = tl.constexpr(2304)  # codes and scales
A_ROW_BYTES = tl.constexpr(512)  # of a step
ZEROS_BYTES = tl.constexpr(256)  # of a warp, before its elements of A


# ---------------------------------------------------------------- B


@triton.constexpr_function
def _copy_rows_ptx(size, lanes, even):
    """PTX for asynchronous copies of `size` bytes a lane, `lanes` lanes to a row, until 16 rows are copied.

    Inputs: the destination; the source; bytes from a lane's row in one copy to its row in the next; then, if even:
    whether to copy; else: the lane's first row, the number of rows, whether the lane's bytes lie inside a row (bytes
    outside become zeros). The last input is a token.
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
def _copy_rows(
    to, source, stride, row, n, inside, wanted, token, SIZE: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr
):
    """Run `_copy_rows_ptx`. wanted: whether to copy at all. Returns a token."""
    text: tl.constexpr = _copy_rows_ptx(SIZE, LANES, EVEN)
    if EVEN:
        return do_ptx(text, "r,l,l,r,r", (to, source, stride, wanted.to(tl.int32), token))
    else:
        return do_ptx(text, "r,l,l,r,r,r,r", (to, source, stride, row, n, (wanted & inside).to(tl.int32), token))


@triton.jit
def _copy_codes(to, tile, k_step, wanted, token, lane, b_ptr, n, k_vectors, EVEN: tl.constexpr):
    """Start to copy the codes of a step, 16 bytes (32 elements) at a time. Returns a token."""
    unit = lane % 8
    row = lane % 32 // 8
    # Every second line has neighbouring units exchanged, so that lanes that read at once read different banks.
    to = to + row * 128 + (unit ^ row % 2) * 16
    row = tile * 16 + row
    at = k_step * 8 + unit
    source = b_ptr + (row.to(tl.int64) * k_vectors + at) * 16
    stride = tl.zeros_like(lane).to(tl.int64) + tl.cast(k_vectors, tl.int64) * 64
    return _copy_rows(to, source, stride, row, n, at < k_vectors, wanted, token, 16, 8, EVEN)


@triton.constexpr_function
def line_of_scales(scales):
    """Bytes of the block scales of a row of a step."""
    return WIDTH.value // (32 if scales.startswith("e8m0") else 16)


@triton.jit
def _copy_scales(
    to, tile, k_step, wanted, token, lane, b_scales_ptr, n, k_vectors,
    SCALES: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Start to copy the scales of a step, a line at a time if WIDE, else four bytes. Returns a token."""
    line: tl.constexpr = line_of_scales(SCALES)
    size: tl.constexpr = line if WIDE else 4
    pieces: tl.constexpr = line // size
    row_bytes = k_vectors * line // 8  # of scales
    place = lane % (16 * pieces) % 32
    row = tile * 16 + place // pieces
    at = k_step * pieces + place % pieces
    if is_scales(SCALES, "swizzled"):  # rows of the same 16 lie 16 bytes apart
        source = swizzle(row, 0, tl.cdiv(row_bytes, 4)) + at * 512
        step = 16
    elif is_scales(SCALES, "square"):
        source = row // 16 * row_bytes + at * size
        step = 0
    else:
        source = row * row_bytes + at * size
        step = row_bytes
    stride = (tl.zeros_like(lane) + step * (32 // pieces)).to(tl.int64)
    inside = at * size < row_bytes
    to = to + place * size
    return _copy_rows(to, b_scales_ptr + source, stride, row, n, inside, wanted, token, size, pieces, EVEN)


@triton.jit
def copy_b(
    buffer, tile, step, token, lane, b_ptr, b_scales_ptr, b_1_ptr, b_scales_1_ptr, b_2_ptr, b_scales_2_ptr,
    n, n_1, n_2, k_vectors, tiles, tiles_1, total,
    B_SCALES: tl.constexpr, WARPS: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Start to copy a warp's step of a tile into its buffer, and commit the copies as one group. Returns a token.

    Past the last tile nothing is copied. tiles, tiles_1, total: see `group_tiles`.
    """
    wanted = (tile < total) & (lane >= 0)
    b_ptr, b_scales_ptr, before, n = of_matmul(
        tile, tiles, tiles_1, (b_ptr, b_scales_ptr, 0, n), (b_1_ptr, b_scales_1_ptr, tiles, n_1),
        (b_2_ptr, b_scales_2_ptr, tiles_1, n_2), GROUP_SIZE,
    )  # fmt: skip
    tile -= before
    k_step = step * WARPS + lane // 32
    token = _copy_codes(buffer, tile, k_step, wanted, token, lane, b_ptr, n, k_vectors, EVEN)
    token = _copy_scales(buffer + CODES_BYTES, tile, k_step, wanted, token, lane, b_scales_ptr, n, k_vectors,
                         B_SCALES, WIDE, EVEN)  # fmt: skip
    return do_ptx(COMMIT, "r", (token,))


@triton.constexpr_function
def _read_b_ptx(line):
    """PTX that reads a lane's codes and scales. line: see `line_of_scales`.

    Outputs: for each half of the lane's quarter (32 elements), four words of codes of the upper row, then four words of
    the lower row; the scales of the upper row, the scales of the lower row; a token. Inputs: addresses of the lane's
    codes and scales; a token.
    """
    load = "ld.shared.b32" if line == 16 else "ld.shared.u16"
    lower = 8 * 128  # bytes from the codes of the upper eight rows to the codes of the lower eight rows
    return (
        "{ .reg .b32 a; mov.b32 $18, 0; xor.b32 a, $19, 16;"
        f" ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$19]; ld.shared.v4.b32 {{$4, $5, $6, $7}}, [$19 + {lower}];"
        f" ld.shared.v4.b32 {{$8, $9, $10, $11}}, [a]; ld.shared.v4.b32 {{$12, $13, $14, $15}}, [a + {lower}];"
        f" {load} $16, [$20]; {load} $17, [$20 + {8 * line}]; }}"
    )


_READ_B_OPERANDS = tl.constexpr(",".join(["=&r"] * 19 + ["r"] * 3))


@triton.jit
def read_b(buffer, token, lane, B_SCALES: tl.constexpr):
    """A lane's codes and scales of a step that has arrived: (the outputs of `_read_b_ptx` without its token, token)."""
    g = lane % 32 // 4
    q = lane % 4
    line: tl.constexpr = line_of_scales(B_SCALES)
    codes = buffer + g * 128 + q * 32 + g % 2 * 16
    scales = buffer + CODES_BYTES + g * line + q * (line // 4)
    found = tl.inline_asm_elementwise(
        _read_b_ptx(line), _READ_B_OPERANDS, (codes, scales, token), dtype=(tl.int32,) * 19, is_pure=True, pack=1
    )
    return found[:18], found[18]


# ---------------------------------------------------------------- A

# Outputs: 16 bytes of A (two words of 64 bits), zeros if they do not exist. Inputs: the source; whether the bytes
# exist; a token.
_LOAD_A = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b64 $0, 0; mov.b64 $1, 0; @p ld.global.v2.b64 {$0, $1}, [$2]; }"
)
# Output: the largest magnitudes so far, of even and of odd elements, as a bf16x2. Inputs: two words of 64 bits of bf16;
# the largest magnitudes of the elements before.
_LARGEST = tl.constexpr(
    "{ .reg .b32 x, y; mov.b32 $0, $3; "
    + " ".join(
        f"mov.b64 {{x, y}}, ${i}; abs.bf16x2 x, x; abs.bf16x2 y, y; max.bf16x2 $0, $0, x; max.bf16x2 $0, $0, y;"
        for i in (1, 2)
    )
    + " }"
)
# Outputs: a power of two that scales the warp's largest magnitude to about 2^125, in both halves of a bf16x2; a float32
# factor for the sums that inverts it, and turns the 2^-126 of `dequantize_word`'s codes into 2^-7. Input: each lane's
# result of `_LARGEST`.
_POWER_OF_TWO = tl.constexpr(
    "{ .reg .b32 x, y; and.b32 x, $2, 0x7F80; shr.u32 y, $2, 16; and.b32 y, y, 0x7F80; max.u32 x, x, y;"
    " redux.sync.max.u32 x, x, 0xffffffff; shr.u32 x, x, 7; sub.s32 x, 379, x; min.s32 x, x, 254;"
    " shl.b32 y, x, 7; prmt.b32 $0, y, y, 0x1010; sub.s32 y, 373, x; shl.b32 y, y, 23; mov.b32 $1, y; }"
)


@triton.constexpr_function
def _store_a_ptx(compute):
    """PTX that stores eight elements of A to shared memory, elements j and j + 4 side by side, as the codes are paired.

    Inputs: the destination; the elements, two words of 64 bits; the power of two that bf16 is multiplied by; a token.
    """
    text = ["{ .reg .b32 x<4>, y<4>, z; mov.b32 $0, 0; mov.b32 z, 0x80008000; mov.b64 {x0, x1}, $2;"]
    text.append("mov.b64 {x2, x3}, $3;")
    if compute == "bf16":
        text += [f"fma.rn.bf16x2 x{i}, x{i}, $4, z;" for i in range(4)]
    text += [f"prmt.b32 y{j}, x{j // 2}, x{2 + j // 2}, {'0x7632' if j % 2 else '0x5410'};" for j in range(4)]
    return " ".join(text) + " st.shared.v4.b32 [$1], {y0, y1, y2, y3}; }"


_STORE_ZEROS = tl.constexpr("mov.b32 $0, 0; st.shared.b64 [$1], 0;")


@triton.jit
def store_a(
    at, token, lane, a_ptr, m, k_vectors,
    COMPUTE: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store A for all of a warp's steps to shared memory at `at`: zeros, then [STEPS, ROWS, WIDTH] elements.

    Codes in bf16 have the factor 2^-126, so A in bf16 is multiplied by a power of two that keeps the products in range.
    Returns a float32 factor for the sums of each row of A, after which they have the factor 2^-14 (fp16) or 2^-7
    (bf16); and a token.
    """
    text: tl.constexpr = _store_a_ptx(COMPUTE)
    start = token  # for every row's loads: they need not wait until the row before is stored
    unit = lane % 32  # of eight elements
    quarter = unit // 8  # of a step: which lanes will read it
    factors = ()
    for row in tl.static_range(ROWS):
        x = ()
        for step in tl.static_range(STEPS):
            at_unit = (step * WARPS + lane // 32) * 32 + unit
            ok = (row < m) & (unit >= 0) if EVEN else (row < m) & (at_unit < k_vectors * 4)
            source = (
                a_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + (row * (k_vectors * 4) + at_unit).to(tl.int64) * 16
            )
            x = x + tl.inline_asm_elementwise(
                _LOAD_A, "=&l,=&l,l,r,r", (source, ok.to(tl.int32), start), dtype=(tl.int64, tl.int64), is_pure=True,
                pack=1,
            )  # fmt: skip
        power = tl.zeros_like(lane)
        factor = tl.full((32 * WARPS,), 1.0, tl.float32)
        if COMPUTE == "bf16":
            # Exact for all elements above 2^-148 of the largest one; a float32 sum loses smaller elements anyway.
            for step in tl.static_range(STEPS):
                power = do_ptx(_LARGEST, "l,l,r", (x[2 * step], x[2 * step + 1], power))
            power, factor = tl.inline_asm_elementwise(
                _POWER_OF_TWO, "=&r,=&f,r", (power,), dtype=(tl.int32, tl.float32), is_pure=True, pack=1
            )
        factors = factors + (factor,)
        # Units are exchanged so that lanes that read at once read different banks.
        to = at + ZEROS_BYTES + row * A_ROW_BYTES + (unit ^ quarter % 2 ^ quarter // 2 * 4 ^ row * 2) * 16
        for step in tl.static_range(STEPS):
            words = (x[2 * step], x[2 * step + 1], power, token)
            token = do_ptx(text, "r,l,l,r,r", (to + step * (ROWS * A_ROW_BYTES),) + words)
    token = do_ptx(_STORE_ZEROS, "r,r", (at + unit * 8, token))
    return factors, do_ptx(WARP_BARRIER, "r", (token,))


@triton.jit
def a_address(at, lane, ROWS: tl.constexpr):
    """(address of a lane's elements of A of the first step, bytes from a step's elements to the next step's).

    Lane 4 * g + q has elements of A for column g of the instruction only if the column belongs to quarter q: columns 2
    * q and 2 * q + 1 do. Otherwise it reads the zeros, at each step. With two rows of A the even columns have the first
    row, the odd columns the second. With one row all columns have it, even and odd ones for one block each: see `gemv`.
    """
    g = lane % 32 // 4
    q = lane % 4
    own = g // 2 == q
    place = (q * 8 ^ q % 2 ^ q // 2 * 4 ^ g % 2 * 2) * 16
    if ROWS == 2:
        place = place + g % 2 * A_ROW_BYTES
    return tl.where(own, at + ZEROS_BYTES + place, at), tl.where(own, ROWS * A_ROW_BYTES, 0)
