"""How the operands of `gemm_skinny` come: copies into a warp's shared memory, and what a lane takes from there.

A step of a warp is 128 elements of TILES times 16 rows of weights and of the rows of activations. As `mma.sync` has it,
lane 4 * g + q takes rows g and g + 8 of 16 rows of weights, and row g of the activations. Of the eight blocks of 16
elements it takes those at q and q + 4; the instruction has other elements there, which does not matter as both operands
are cut among lanes in the same way.

To Inductor, which would take a kernel with side effects to write all of its arguments, the PTX is pure; a value handed
from one piece to the next (`token`) keeps their order.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.async_copy import COMMIT, do_ptx
from fp4compile.templates.device.nvfp4_weights import TILE, copy_weights


def _arrange_ptx() -> str:
    """32 activations in eight words of 64 bits -> the same, elements j and j + 4 of every eight next to each other."""
    text = ["{ .reg .b32 x<4>, y<4>;"]
    for word in range(4):
        text.append(f"mov.b64 {{x0, x1}}, ${8 + 2 * word}; mov.b64 {{x2, x3}}, ${9 + 2 * word};")
        for j in range(4):
            text.append(f"prmt.b32 y{j}, x{j // 2}, x{2 + j // 2}, {'0x7632' if j % 2 else '0x5410'};")
        text.append(f"mov.b64 ${2 * word}, {{y0, y1}}; mov.b64 ${2 * word + 1}, {{y2, y3}};")
    return " ".join(text) + " }"


_ARRANGE = tl.constexpr(_arrange_ptx())
_ARRANGE_OPERANDS = tl.constexpr(",".join(["=&l"] * 8 + ["l"] * 8))

_ACTIVATIONS_ROW = tl.constexpr(256)

# In: where to, where from; what of it to copy, the rest being zeros; whether to copy at all.
_COPY_X_EVEN = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; @p cp.async.ca.shared.global [$1], [$2], 16; }"
)
_COPY_X = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0; @p cp.async.ca.shared.global [$1], [$2], 16, $3; }"
)
# Out: activations of a lane's two blocks, eight words of 64 bits, zeros where there is no row; a token. In: their
# address, whether there is a row, a token. Without the zeros ptxas keeps what was there in registers of its own.
_ZEROS = " ".join(f"mov.b64 ${i}, 0;" for i in range(8))
_TAKE_X = tl.constexpr(
    "{ .reg .pred p; .reg .b32 b; setp.ne.b32 p, $10, 0; xor.b32 b, $9, 16; mov.b32 $8, 0; "
    + _ZEROS
    + " @p ld.shared.v2.b64 {$0, $1}, [$9]; @p ld.shared.v2.b64 {$2, $3}, [b];"
    " @p ld.shared.v2.b64 {$4, $5}, [$9 + 128]; @p ld.shared.v2.b64 {$6, $7}, [b + 128]; }"
)


@triton.constexpr_function
def buffer_ptx(size):
    return f"{{ .shared .align 128 .b8 ring[{size}]; mov.u32 $0, ring; }}"


@triton.constexpr_function
def stage_bytes(tiles, rows):
    return 1152 * tiles + 256 * rows


@triton.jit
def _start_activations(
    at, step, there, token, lane, a_ptr, m, chunks, WARPS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr
):
    """Start to copy the activations of a warp's step into the ring: of the rows that there are, 16 lanes a row."""
    unit = lane % 16
    block = (step * WARPS + lane // 32) * 8 + unit // 2
    for i in tl.static_range((ROWS + 1) // 2):
        row = lane % 32 // 16 + i * 2
        source = a_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + row * chunks * 64 + block * 32 + unit % 2 * 16
        # Halves of blocks are exchanged in every second row: lanes then read from banks of their own.
        to = at + row * _ACTIVATIONS_ROW + (unit ^ row % 2) * 16
        ok = (row < m) & there
        if EVEN:
            token = do_ptx(_COPY_X_EVEN, "r,l,r,r", (to, source, ok.to(tl.int32), token))
        else:
            size = tl.where(block < chunks * 2, 16, 0)
            token = do_ptx(_COPY_X, "r,l,r,r,r", (to, source, size, ok.to(tl.int32), token))
    return token


@triton.jit
def copy_step(
    slot, tile, step, token, lane, a_ptr, b_ptr, b_scales_ptr, b_1_ptr, b_scales_1_ptr, b_2_ptr, b_scales_2_ptr,
    m, n, n_1, n_2, chunks, tiles, tiles_1, total,
    B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, EVEN: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Start the copies of a warp's step of a tile into a slot of the ring; of none where there is no such tile.

    tiles, tiles_1, total: how many there are up to the end of each weight.
    """
    there = tile < total
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
    for part in tl.static_range(TILES):
        token = copy_weights(slot + part * TILE, step * WARPS + lane // 32, there, token, lane,
                              tile * (16 * TILES) + part * 16, b_ptr, b_scales_ptr, n, chunks,
                              B_SQUARE, B_SWIZZLED, EVEN)  # fmt: skip
    token = _start_activations(slot + TILES * TILE, step, there, token, lane, a_ptr, m, chunks,
                               WARPS, ROWS, EVEN)  # fmt: skip
    return do_ptx(COMMIT, "r", (token,))


@triton.jit
def read_activations(at, token, lane, m):
    """A step's activations, from where they have arrived; and a token."""
    g = lane % 32 // 4
    at = at + g * _ACTIVATIONS_ROW + lane % 4 * 32 + g % 2 * 16
    taken = tl.inline_asm_elementwise(
        _TAKE_X, "=&l,=&l,=&l,=&l,=&l,=&l,=&l,=&l,=&r,r,r,r", (at, (g < m).to(tl.int32), token),
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return taken[0:8], taken[8]


@triton.jit
def arranged(x):
    """Activations as they were copied -> as the step's PTX takes them."""
    return tl.inline_asm_elementwise(
        _ARRANGE, _ARRANGE_OPERANDS, x,
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64), is_pure=True, pack=1,
    )  # fmt: skip
