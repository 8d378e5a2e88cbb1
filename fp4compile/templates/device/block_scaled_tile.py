"""Tiles of block-scaled operands for matrix units that read codes and scales themselves.

Triton copies scales from shared to tensor memory (`tcgen05.cp`), and issues a matmul while the next operands arrive,
only for scales that are loaded in whole tiles of 512 bytes and permuted afterwards, through a pointer to the scales'
own type. A cast after the load would move scales (and FP8 codes) through registers, and the loop would wait for each
matmul.

A tile is loaded by TMA, from a descriptor, or by each thread, from a pointer. TMA needs rows of whole 16 bytes; it
fills elements outside of a matrix with zeros.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.dequantized_tile import INTERPRETING, dequantize


@triton.constexpr_function
def codes_in(elements, ELEMENT):
    """The number of bytes of the codes of `elements` elements."""
    return elements // 2 if ELEMENT == "e2m1" else elements


@triton.constexpr_function
def loaded_type(name):
    """The Triton type in which codes or scales are loaded, so that no cast follows.

    The interpreter loads bytes: its matmuls read bytes of any type as the format.
    """
    types = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}
    return tl.uint8 if INTERPRETING else types.get(name, tl.uint8)


@triton.jit
def code_source(ptr, rows, per_row, ELEMENT: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr, TMA: tl.constexpr,
                MATRICES: tl.constexpr = 1, matrices=None):  # fmt: skip
    """The source of `load_codes` for tiles [ROWS, BYTES] of a matrix [rows, per_row]: a descriptor or a pointer.

    MATRICES: matrices of a tile. matrices: their total number; None for MATRICES.
    """
    ptr = ptr.to(tl.pointer_type(loaded_type(ELEMENT)), bitcast=True)
    if TMA and MATRICES > 1:
        size = tl.cast(rows, tl.int64) * per_row
        count = MATRICES if matrices is None else matrices
        return tl.make_tensor_descriptor(ptr, [count, rows, per_row], [size, per_row, 1], [MATRICES, ROWS, BYTES])
    elif TMA:
        return tl.make_tensor_descriptor(ptr, [rows, per_row], [per_row, 1], [ROWS, BYTES])
    else:
        return ptr


@triton.jit
def load_codes(
    source, row0, col0, end, per_row, ROWS: tl.constexpr, BYTES: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    MATRICES: tl.constexpr = 1, matrix=0,
):  # fmt: skip
    """Codes [ROWS, BYTES] from (row0, col0) on; zeros beyond a row, arbitrary from row `end` on.

    EVEN_K: a row is whole steps of the loop. matrix: the first of the tile's MATRICES.
    """
    if TMA and MATRICES > 1:
        return tl.reshape(source.load([matrix, row0, col0]), (MATRICES * ROWS, BYTES))
    elif TMA:
        return source.load([row0, col0])
    else:
        row = (row0 + tl.arange(0, ROWS))[:, None]
        col = (col0 + tl.arange(0, BYTES))[None, :]
        per_row = per_row // 8 * 8  # unchanged, but the compiler derives the width of loads from it
        mask = row < end
        if not EVEN_K:
            mask = mask & (col < per_row)
        return tl.load(source + row.to(tl.int64) * per_row + col, mask=mask, other=0.0)


@triton.jit
def scale_source(
    ptr, row_tiles, col_tiles, SCALE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr,
    MATRICES: tl.constexpr = 1, matrices=None,
):  # fmt: skip
    """The source of `load_scales` for [ROWS, COLS] swizzled scales: a descriptor or a pointer.

    row_tiles, col_tiles: numbers of tiles of 512 bytes. A row of TMA has at most 256 elements. MATRICES, matrices: as
    in `code_source`.
    """
    ptr = ptr.to(tl.pointer_type(loaded_type(SCALE)), bitcast=True)
    if TMA and MATRICES > 1:
        size = tl.cast(row_tiles, tl.int64) * col_tiles * 512
        shape = [MATRICES if matrices is None else matrices, row_tiles, col_tiles * 2, 256]
        return tl.make_tensor_descriptor(ptr, shape, [size, col_tiles * 512, 256, 1],
                                         [MATRICES, ROWS // 128, COLS // 4 * 2, 256])  # fmt: skip
    elif TMA:
        shape = [row_tiles, col_tiles, 2, 256]
        return tl.make_tensor_descriptor(ptr, shape, [col_tiles * 512, 512, 256, 1], [ROWS // 128, COLS // 4, 2, 256])
    else:
        return ptr


@triton.jit
def load_scales(source, row_tile, col_tile, end, col_tiles, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr,
                MATRICES: tl.constexpr = 1, matrix=0):  # fmt: skip
    """Scales [ROWS, COLS] of the swizzled layout from a tile on; arbitrary outside of the matrix.

    matrix: the first of the tile's MATRICES.
    """
    if TMA and MATRICES > 1:
        tiles = source.load([matrix, row_tile, col_tile * 2, 0])
    elif TMA:
        tiles = source.load([row_tile, col_tile, 0, 0])
    else:
        r = (row_tile + tl.arange(0, ROWS // 128))[:, None]
        byte = tl.arange(0, COLS // 4 * 512)[None, :]
        at = (r.to(tl.int64) * col_tiles + col_tile) * 512 + byte
        tiles = tl.load(source + at, mask=(r < end) & (byte < (col_tiles - col_tile) * 512), other=0.0)
    tiles = tl.reshape(tiles, (MATRICES * ROWS // 128, COLS // 4, 32, 4, 4))
    return tl.reshape(tl.permute(tiles, (0, 3, 2, 1, 4)), (MATRICES * ROWS, COLS))


@triton.jit
def _values(units, byte, BLOCK: tl.constexpr):
    """The dequantised float32 values [rows, elements] of a tile of NVFP4 codes and scales; for the interpreter."""
    first, second = dequantize(units, byte, tl.float32, "e2m1", "e4m3", BLOCK, "fp32", False, 0)
    return tl.reshape(tl.join(first, second), (units.shape[0], 2 * units.shape[1]))


@triton.constexpr_function
def widens(ELEMENT, OTHER, ISA):
    """Whether E2M1 codes are multiplied as E4M3: SM120's matrix units take both, Triton only operands of one width."""
    return ISA == 120 and ELEMENT == "e2m1" and OTHER != "e2m1"


def _widen_ptx() -> str:
    """PTX that turns four bytes of E2M1 codes into the E4M3 codes of their lower ($0) and upper ($1) halves.

    A byte is selected from the E4M3 magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6. Its sign is selected separately.
    """
    numbers = ".reg .b32 m, n, s, t, u, v; mov.b32 m, 0x3C383000; mov.b32 n, 0x4C484440; mov.b32 s, 0x80808080;"
    four = (
        "and.b32 {0}, {1}, 0x7777; prmt.b32 {0}, m, n, {0};"
        " shr.b32 t, {1}, 1; and.b32 t, t, 0x4444; prmt.b32 t, 0, s, t; or.b32 {0}, {0}, t;"
    )
    both = f"{four.format('u', '$2')} shr.b32 $1, $2, 16; {four.format('v', '$1')}"
    return f"{{ {numbers} {both} prmt.b32 $0, u, v, 0x6420; prmt.b32 $1, u, v, 0x7531; }}"


_WIDEN = tl.constexpr(_widen_ptx())


@triton.jit
def _widened(codes):
    """The E4M3 codes [rows, elements] of bytes of E2M1 codes: their numbers are the same."""
    first, second = tl.inline_asm_elementwise(_WIDEN, "=&r,=&r,r", [codes], dtype=(tl.uint8, tl.uint8), is_pure=True,
                                              pack=4)  # fmt: skip
    joined = tl.reshape(tl.join(first, second), (codes.shape[0], 2 * codes.shape[1]))
    return joined.to(tl.float8e4nv, bitcast=True)


@triton.jit
def multiply(a, a_scale, b, b_scale, acc, A_ELEMENT: tl.constexpr, B_ELEMENT: tl.constexpr, SCALE: tl.constexpr,
             BLOCK: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """acc [BM, BN] plus the product of two tiles of codes, a [BM, bytes] and b [BN, bytes], with their block scales."""
    if SCALE == "e4m3" and INTERPRETING:  # the interpreter's dot_scaled reads every scale as E8M0
        return tl.dot(_values(a, a_scale, BLOCK), tl.trans(_values(b, b_scale, BLOCK)), acc)
    elif widens(A_ELEMENT, B_ELEMENT, ISA):
        return tl.dot_scaled(_widened(a), a_scale, "e4m3", tl.trans(b), b_scale, B_ELEMENT, acc)
    elif widens(B_ELEMENT, A_ELEMENT, ISA):
        return tl.dot_scaled(a, a_scale, A_ELEMENT, tl.trans(_widened(b)), b_scale, "e4m3", acc)
    else:
        return tl.dot_scaled(a, a_scale, A_ELEMENT, tl.trans(b), b_scale, B_ELEMENT, acc)
