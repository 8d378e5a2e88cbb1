"""The main loop of a dequant GEMM: operands dequantised in registers, on 16-bit matrix units, summed in float32.

A program computes a tile of the transposed product [BN, BM]: B is the first operand of the matrix instruction, A the
second. So few rows of A fill the narrow side of the instruction, and B goes from its codes straight to registers, in
which the first operand may lie.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.dequantize import TINY, dequantize, load_scales, load_units, repeat_scales, shift_of


@triton.jit
def _dot(b, a, acc, COMPUTE: tl.constexpr):
    """acc + b @ a^T, over the last axis of both; the first axis is a batch if there are three."""
    a = tl.trans(a) if len(b.shape) == 2 else tl.permute(a, (0, 2, 1))
    if COMPUTE == "fp32":
        return tl.dot(b, a, acc, input_precision="ieee")
    else:
        return tl.dot(b, a, acc)


@triton.jit
def _load(
    ptr, scales_ptr, row, unit, block, rows, cols, per_row, block_cols, blocks,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
    SWIZZLED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """(Units, scale bytes) of a tile of one operand; bytes of 0 for an operand without block scales."""
    units = load_units(ptr, row, unit, rows, cols, per_row, ELEMENT, ALIGN)
    byte = 0
    if SCALE != "none":
        byte = load_scales(scales_ptr, row, block, rows, block_cols, blocks, SCALE, SQUARE, BLOCK, SWIZZLED, ALIGN)
    return units, byte


@triton.jit
def _any_tiny(units, byte, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Whether the tile has a nonzero block that `dequantize` replaces by zeros."""
    if SCALE == "e8m0":
        found = (repeat_scales(byte.to(tl.int32), BLOCK // 2) < TINY) & (units != 0)
        return tl.max(tl.reshape(found.to(tl.int32), (found.numel,)), 0) > 0
    else:
        return False


@triton.jit
def _watched(byte, block, used, RAGGED: tl.constexpr):
    """Scale bytes, 255 from block number `used` on if RAGGED."""
    return tl.where(block < used, byte, 255) if RAGGED else byte


@triton.constexpr_function
def block_shape(warps, rows, blocks):
    """Shape of a tile's block scales."""
    return (rows, blocks) if warps == 1 else (warps, rows, blocks)


@triton.jit
def multiply_dequantized(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, row_m, row_n, m, n, start, stop,
    a_cols, a_per_row, b_cols, b_per_row, block_cols, blocks, used_blocks,
    A_ELEMENT: tl.constexpr, A_SCALE: tl.constexpr, A_SQUARE: tl.constexpr, A_SWIZZLED: tl.constexpr,
    A_ALIGN: tl.constexpr,
    B_ELEMENT: tl.constexpr, B_SCALE: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    B_ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, COMPUTE: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    RAGGED: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """The product of the rows row_m [BM] of A [m, K] and row_n [BN] of B [n, K] in float32, [BM, BN], not rescaled.

    It covers the steps `start` to `stop` of K, each of WARPS shares of UNITS units (see `device.dequantize`).
    a_cols, b_cols: units of K (plain: elements); block_cols: blocks of K. a_per_row, b_per_row: stride of rows of
    units (plain: elements). blocks: stride of rows of scales. *_ALIGN: see `load_units`.
    RAGGED: block scales from number used_blocks on belong to no element, and may be zero.
    """
    half: tl.constexpr = BLOCK // 2
    BM: tl.constexpr = row_m.shape[0]
    BN: tl.constexpr = row_n.shape[0]
    if WARPS == 1:
        m_row = row_m[:, None]
        n_row = row_n[:, None]
        unit = tl.arange(0, UNITS)[None, :]
        block = tl.arange(0, UNITS // half)[None, :]
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        warp = tl.arange(0, WARPS)[:, None, None]
        m_row = row_m[None, :, None]
        n_row = row_n[None, :, None]
        unit = warp * UNITS + tl.arange(0, UNITS)[None, None, :]
        block = warp * (UNITS // half) + tl.arange(0, UNITS // half)[None, None, :]
        acc = tl.zeros((WARPS, BN, BM), tl.float32)
    step_units: tl.constexpr = UNITS * WARPS
    step_blocks: tl.constexpr = UNITS * WARPS // half

    # The main loop treats blocks with scales below 2^(TINY - 127) as zeros, and keeps the smallest scales that it has
    # read. If there are such blocks, a second loop adds their products.
    a_watch: tl.constexpr = COMPUTE != "fp32" and A_SCALE == "e8m0"
    b_watch: tl.constexpr = COMPUTE != "fp32" and B_SCALE == "e8m0"
    smallest_a = tl.full(((1,) if not a_watch else block_shape(WARPS, BM, UNITS // half)), 255, tl.int32)
    smallest_b = tl.full(((1,) if not b_watch else block_shape(WARPS, BN, UNITS // half)), 255, tl.int32)
    a_type: tl.constexpr = a_ptr.dtype.element_ty
    b_type: tl.constexpr = b_ptr.dtype.element_ty
    for step in tl.range(start, stop, num_stages=STAGES):
        at = step * step_units + unit
        block_at = step * step_blocks + block
        b_units, b_byte = _load(b_ptr, b_scales_ptr, n_row, at, block_at, n, b_cols, b_per_row, block_cols, blocks,
                                B_ELEMENT, B_SCALE, B_SQUARE, BLOCK, B_SWIZZLED, B_ALIGN)  # fmt: skip
        a_units, a_byte = _load(a_ptr, a_scales_ptr, m_row, at, block_at, m, a_cols, a_per_row, block_cols, blocks,
                                A_ELEMENT, A_SCALE, A_SQUARE, BLOCK, A_SWIZZLED, A_ALIGN)  # fmt: skip
        b_first, b_second = dequantize(b_units, b_byte, b_type, B_ELEMENT, B_SCALE, BLOCK, COMPUTE, False, ISA)
        a_first, a_second = dequantize(a_units, a_byte, a_type, A_ELEMENT, A_SCALE, BLOCK, COMPUTE, False, ISA)
        acc = _dot(b_first, a_first, acc, COMPUTE)
        acc = _dot(b_second, a_second, acc, COMPUTE)
        if a_watch:
            smallest_a = tl.minimum(smallest_a, _watched(a_byte.to(tl.int32), block_at, used_blocks, RAGGED))
        if b_watch:
            smallest_b = tl.minimum(smallest_b, _watched(b_byte.to(tl.int32), block_at, used_blocks, RAGGED))

    if a_watch or b_watch:
        smallest = tl.minimum(tl.min(tl.reshape(smallest_a, (smallest_a.numel,)), 0),
                              tl.min(tl.reshape(smallest_b, (smallest_b.numel,)), 0))  # fmt: skip
        if smallest < TINY:
            tiny = tl.zeros_like(acc)
            for step in tl.range(start, stop, num_stages=1):
                at = step * step_units + unit
                block_at = step * step_blocks + block
                b_units, b_byte = _load(b_ptr, b_scales_ptr, n_row, at, block_at, n, b_cols, b_per_row, block_cols,
                                        blocks, B_ELEMENT, B_SCALE, B_SQUARE, BLOCK, B_SWIZZLED, B_ALIGN)  # fmt: skip
                a_units, a_byte = _load(a_ptr, a_scales_ptr, m_row, at, block_at, m, a_cols, a_per_row, block_cols,
                                        blocks, A_ELEMENT, A_SCALE, A_SQUARE, BLOCK, A_SWIZZLED, A_ALIGN)  # fmt: skip
                if _any_tiny(a_units, a_byte, A_SCALE, BLOCK):
                    b_first, b_second = dequantize(
                        b_units, b_byte, b_type, B_ELEMENT, B_SCALE, BLOCK, COMPUTE, False, ISA
                    )
                    a_first, a_second = dequantize(
                        a_units, a_byte, a_type, A_ELEMENT, A_SCALE, BLOCK, COMPUTE, True, ISA
                    )
                    tiny = _dot(b_second, a_second, _dot(b_first, a_first, tiny, COMPUTE), COMPUTE)
                if _any_tiny(b_units, b_byte, B_SCALE, BLOCK):
                    b_first, b_second = dequantize(
                        b_units, b_byte, b_type, B_ELEMENT, B_SCALE, BLOCK, COMPUTE, True, ISA
                    )
                    a_first, a_second = dequantize(
                        a_units, a_byte, a_type, A_ELEMENT, A_SCALE, BLOCK, COMPUTE, False, ISA
                    )
                    tiny = _dot(b_second, a_second, _dot(b_first, a_first, tiny, COMPUTE), COMPUTE)
            # Products of two such blocks are left out: they lie below the smallest float32.
            acc = acc + tiny * 2.0**-TINY.value

    if WARPS > 1:
        acc = tl.sum(acc, 0)
    shift: tl.constexpr = shift_of(A_ELEMENT, A_SCALE, COMPUTE) + shift_of(B_ELEMENT, B_SCALE, COMPUTE)
    return tl.trans(acc * 2.0**shift)
