"""The pipeline of `gemm_skinny`: copies of a step's operands to shared memory, and a lane's reads from there.

A step of a warp is 128 elements along K of TILES times 16 rows of B and of ROWS rows of A. Its buffer has the codes and
scales of B first (`fp4_weights` or `fp8_weights`), then the rows of A. Lane 4 * g + q multiplies rows g and g + 8 of 16
rows of B with row g of A, and takes blocks q and q + 4 of each.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.async_copy import COMMIT, COPY_PART, do_ptx
from fp4compile.templates.device.fp4_weights import STEP_BYTES, copy_weights, weight_sources
from fp4compile.templates.device.fp8_weights import FP8_STEP_BYTES, copy_a_codes, copy_a_scales, copy_fp8, is_fp8
from fp4compile.templates.device.persistent_grid import of_matmul


def _interleave_ptx() -> str:
    """PTX: reorder 32 elements of A in eight words of 64 bits: elements j and j + 4 of every eight side by side.

    `dequantize_word` pairs the codes of B in this order.
    """
    text = ["{ .reg .b32 x<4>, y<4>;"]
    for word in range(4):
        text.append(f"mov.b64 {{x0, x1}}, ${8 + 2 * word}; mov.b64 {{x2, x3}}, ${9 + 2 * word};")
        for j in range(4):
            text.append(f"prmt.b32 y{j}, x{j // 2}, x{2 + j // 2}, {'0x7632' if j % 2 else '0x5410'};")
        text.append(f"mov.b64 ${2 * word}, {{y0, y1}}; mov.b64 ${2 * word + 1}, {{y2, y3}};")
    return " ".join(text) + " }"


_INTERLEAVE = tl.constexpr(_interleave_ptx())
_INTERLEAVE_OPERANDS = tl.constexpr(",".join(["=&l"] * 8 + ["l"] * 8))

_A_ROW = tl.constexpr(256)  # bytes of a step of one row of A
_STEP_BYTES = tl.constexpr({False: STEP_BYTES.value, True: FP8_STEP_BYTES.value})  # by `is_fp8`

# Inputs: destination, source, whether to copy, a token.
_COPY_WHOLE_A = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; @p cp.async.ca.shared.global [$1], [$2], 16; }"
)
# Outputs: A's elements of a lane's two blocks, eight words of 64 bits, zeros where the row does not exist; a token.
# Inputs: the elements' address, whether the row exists, a token. Without the zeros ptxas would keep the registers'
# former contents for the case that nothing is loaded.
_ZEROS = " ".join(f"mov.b64 ${i}, 0;" for i in range(8))
_READ_A = tl.constexpr(
    "{ .reg .pred p; .reg .b32 b; setp.ne.b32 p, $10, 0; xor.b32 b, $9, 16; mov.b32 $8, 0; "
    + _ZEROS
    + " @p ld.shared.v2.b64 {$0, $1}, [$9]; @p ld.shared.v2.b64 {$2, $3}, [b];"
    " @p ld.shared.v2.b64 {$4, $5}, [$9 + 128]; @p ld.shared.v2.b64 {$6, $7}, [b + 128]; }"
)


@triton.constexpr_function
def shared_buffer_ptx(size):
    """PTX for the address of `size` bytes of shared memory of the program's own, at most 48 KB."""
    return f"{{ .shared .align 128 .b8 buffers[{size}]; mov.u32 $0, buffers; }}"


@triton.constexpr_function
def step_bytes(scales):
    """Bytes of the codes and scales of a warp's step."""
    return _STEP_BYTES.value[is_fp8(scales)]


@triton.constexpr_function
def stage_bytes(tiles, rows, scales, a_codes):
    """Bytes of a warp's buffer for one step. a_codes: whether A is FP8 codes."""
    return step_bytes(scales) * tiles + (128 if a_codes else 256) * rows


@triton.jit
def _a_sources(lane, first, stop, a_ptr, k_vectors, WARPS: tl.constexpr, EVEN: tl.constexpr):
    """What a lane copies of A, for `_copy_a`: (address of 16 bytes of row 0 or 1 of step 0, first step not to copy).

    first: the step of the tile that is step 0. stop: the first step that no lane copies.
    """
    unit = lane % 16  # of 16 bytes
    block = (first * WARPS + lane // 32) * 8 + unit // 2
    source = a_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + lane % 32 // 16 * k_vectors * 64
    if not EVEN:
        stop = tl.minimum(stop, (k_vectors * 2 - block + 8 * WARPS - 1) // (8 * WARPS))
    return source + block * 32 + unit % 2 * 16, stop


@triton.jit
def _copy_a(
    buffer, step, sources, m, token, lane, k_vectors, WARPS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr
):
    """Start to copy the existing rows of A of a warp's step, 16 lanes a row. Returns a token."""
    source, stop = sources
    unit = lane % 16  # of 16 bytes
    source += tl.cast(step, tl.int64) * (256 * WARPS)
    for i in tl.static_range((ROWS + 1) // 2):
        row = lane % 32 // 16 + i * 2
        # Every second row has the halves of blocks exchanged, so that lanes that read at once read different banks.
        to = buffer + row * _A_ROW + (unit ^ row % 2) * 16
        if EVEN:
            ok = (row < m) & (step < stop)
            token = do_ptx(_COPY_WHOLE_A, "r,l,r,r", (to, source, ok.to(tl.int32), token))
        else:
            size = tl.where(step < stop, 16, 0)
            token = do_ptx(COPY_PART, "r,l,r,r,r", (to, source, size, (row < m).to(tl.int32), token))
        source += tl.cast(k_vectors, tl.int64) * 128
    return token


@triton.jit
def tile_sources(
    tile, first, lane, a_ptr, b_ptr, b_scales_ptr, b_1_ptr, b_scales_1_ptr, b_2_ptr, b_scales_2_ptr, m, n, n_1, n_2,
    k_vectors, steps, tiles, tiles_1, total,
    B_SCALES: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """What a lane copies of a tile, for `copy_step`; past the last tile, nothing.

    first: the step of the tile that is step 0 of `copy_step`. steps: of each warp. tiles, tiles_1, total: see
    `group_tiles`.
    Returns (what it copies of A, and of each 16 rows of B; a_ptr, m, `first`, and the first step not to copy).
    """
    b_ptr, b_scales_ptr, before, n = of_matmul(
        tile, tiles, tiles_1, (b_ptr, b_scales_ptr, 0, n), (b_1_ptr, b_scales_1_ptr, tiles, n_1),
        (b_2_ptr, b_scales_2_ptr, tiles_1, n_2), GROUP_SIZE,
    )  # fmt: skip
    stop = tl.where(tile < total, steps, 0)
    own_first = first * WARPS + lane // 32
    row = (tile - before) * (16 * TILES)
    of_b = ()
    for part in tl.static_range(TILES):
        if is_fp8(B_SCALES):
            of_b = of_b + ((row + part * 16, b_ptr, b_scales_ptr, n),)
        else:
            of_b = of_b + (weight_sources(lane, row + part * 16, own_first, stop * WARPS, b_ptr, b_scales_ptr, n,
                                          k_vectors, B_SCALES, EVEN),)  # fmt: skip
    return _a_sources(lane, first, stop, a_ptr, k_vectors, WARPS, EVEN), of_b, a_ptr, m, first, stop


@triton.jit
def copy_step(
    buffer, step, sources, token, lane, a_scales_ptr, k_vectors,
    B_SCALES: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    A_CODES: tl.constexpr,
):  # fmt: skip
    """Start the copies of a warp's step of a tile into a buffer, and commit them as one group. Returns a token.

    sources: from `tile_sources`. a_scales_ptr: scales of A's blocks of 128 elements, for FP8 weights with such scales;
    None without. Past the last tile nothing is copied, but an empty group is committed, so that `wait_ptx` counts
    right.
    """
    of_a, of_b, a_ptr, m, first, stop = sources
    wanted = step < stop
    own_step = (first + step) * WARPS + lane // 32
    for part in tl.static_range(TILES):
        to = buffer + part * step_bytes(B_SCALES)
        if is_fp8(B_SCALES):
            row, b_ptr, b_scales_ptr, n = of_b[part]
            token = copy_fp8(to, own_step, wanted, token, lane, row, b_ptr, b_scales_ptr, n, k_vectors, B_SCALES, EVEN)
        else:
            token = copy_weights(to, step * WARPS, of_b[part], token, lane, k_vectors, B_SCALES, EVEN)
    if a_scales_ptr is not None:
        token = copy_a_scales(buffer, own_step, wanted, token, lane, a_scales_ptr, m, k_vectors, ROWS)
    to = buffer + TILES * step_bytes(B_SCALES)
    if A_CODES:
        token = copy_a_codes(to, own_step, wanted, token, lane, a_ptr, m, k_vectors, ROWS)
    else:
        token = _copy_a(to, step, of_a, m, token, lane, k_vectors, WARPS, ROWS, EVEN)
    return do_ptx(COMMIT, "r", (token,))


@triton.jit
def read_a(at, token, lane, m):
    """A lane's elements of A of a step that has arrived at `at`: (eight words of 64 bits, token)."""
    g = lane % 32 // 4
    at = at + g * _A_ROW + lane % 4 * 32 + g % 2 * 16
    found = tl.inline_asm_elementwise(
        _READ_A, "=&l,=&l,=&l,=&l,=&l,=&l,=&l,=&l,=&r,r,r,r", (at, (g < m).to(tl.int32), token),
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return found[0:8], found[8]


@triton.jit
def interleave_a(x):
    """A's elements in the order of `read_a` -> in the order of `dequantize_word`."""
    return tl.inline_asm_elementwise(
        _INTERLEAVE, _INTERLEAVE_OPERANDS, x,
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64), is_pure=True, pack=1,
    )  # fmt: skip
