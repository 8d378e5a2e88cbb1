"""NVFP4 weights of `gemm_skinny` and `gemm_wgmma_sm90`: from global to shared memory and to 16-bit registers.

A warp's step is 16 rows of B (8 upper and 8 lower ones) times 128 elements along K. It has a buffer of `STEP_BYTES` in
shared memory: the codes of the upper rows, the codes of the lower rows, then the scales of both in the same order.

Lane 4 * g + q of a warp multiplies upper row g and lower row g, as `mma.sync` and `wgmma` define it. The lower rows are
the eight rows after the upper ones, or (PAIRED) every second row, so that a lane has neighbouring rows of B, which are
neighbouring columns of the result. A lane takes blocks q and q + 4 of the eight blocks of 16 elements. The instructions
assign other elements of K to a lane; that changes only the order of the sum over K, because A is assigned to the lanes
in the same order.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.async_copy import do_ptx
from fp4compile.templates.device.memory import swizzle


def dequantize_word(kind: str, word: str, out: str) -> str:
    """PTX that turns eight E2M1 codes into four registers, {out}0 to {out}3; register j has codes j and j + 4.

    kind: f16x2 or bf16x2. Needs registers u and v; leaves `word` unchanged. The results are the codes' numbers times a
    power of two: with its magnitude at bit 9 and its sign at bit 15 of an fp16, a code is its number times 2^-14; with
    its magnitude at bit 6 of a bf16, it is times 2^-126. One shift moves the magnitudes of several codes, and one
    select joins them with the signs, which are at their bits already. One mask per register drops all other bits.
    """
    if kind == "f16x2":
        right, select, up, keep = 3, "0x0E0E0E0E", 8, "0x8E008E00"
        upper, lower, left = (3, 1), (2, 0), 4
    else:
        right, select, up, keep = 6, "0x01DC01DC", 4, "0x81C081C0"
        upper, lower, left = (3, 2), (1, 0), 8
    # A shift left by `left` and then right by `right` is one shift left by the difference, which another unit does.
    moves = (upper, word, f"shr.b32 u, {word}, {right};"), (lower, "v", f"shl.b32 u, {word}, {left - right};")
    lines = [f"shl.b32 v, {word}, {left};"]
    for (first, second), signs, move in moves:
        lines.append(
            f"{move} lop3.b32 u, u, {signs}, {select}, 0xE4;"
            f" and.b32 {out}{first}, u, {keep}; shl.b32 u, u, {up}; and.b32 {out}{second}, u, {keep};"
        )
    return " ".join(lines)


def scale_registers(kind: str, pair: str, out: str) -> str:
    """PTX that turns two E4M3 bytes into two registers, {out}0 and {out}1, each with one scale in both halves.

    kind: f16x2, or bf16x2, which multiplies the scales by 2^119; products with `dequantize_word` then carry 2^-7.
    Needs the registers u, h, k, f and g.
    """
    lines = f"cvt.u16.u32 h, {pair}; cvt.rn.f16x2.e4m3x2 u, h;"
    if kind == "f16x2":
        return lines + f" prmt.b32 {out}0, u, u, 0x1010; prmt.b32 {out}1, u, u, 0x3232;"
    lines += " mov.b32 {h, k}, u; cvt.f32.f16 f, h; cvt.f32.f16 g, k;"
    lines += " mul.f32 f, f, 0f7B000000; mul.f32 g, g, 0f7B000000;"
    return lines + f" cvt.rn.bf16x2.f32 {out}0, f, f; cvt.rn.bf16x2.f32 {out}1, g, g;"


STEP_BYTES = tl.constexpr(1152)  # bytes of codes and scales of one warp's step
_CODES_ROW = tl.constexpr(64)
_CODES_LOWER = 512
_SCALES = tl.constexpr(1024)
_SCALES_ROW = tl.constexpr(8)
_SCALES_LOWER = 64
# Inputs: a lane's destinations (codes, scales) and sources (codes of an upper row, codes of the lower row, scales of
# one row); whether to copy, or the number of bytes of each source (the rest becomes zeros); a token.
_COPY_WHOLE_STEP = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $6, 0; mov.b32 $0, 0;"
    " @p cp.async.cg.shared.global.L2::128B [$1], [$3], 16;"
    f" @p cp.async.cg.shared.global.L2::128B [$1 + {_CODES_LOWER}], [$4], 16;"
    " @p cp.async.ca.shared.global [$2], [$5], 4; }"
)
_COPY_PART_OF_STEP = tl.constexpr(
    "{ mov.b32 $0, 0; cp.async.cg.shared.global [$1], [$3], 16, $6;"
    f" cp.async.cg.shared.global [$1 + {_CODES_LOWER}], [$4], 16, $7; cp.async.ca.shared.global [$2], [$5], 4, $8; }}"
)
# Outputs: codes of the upper row (two words of 64 bits), codes of the lower row; two scale bytes of each; a token.
# Inputs: addresses of the upper row's two words and of its scales; a `prmt` selector of two of eight scale bytes; a
# token.
_READ_STEP = tl.constexpr(
    "{ .reg .b32 e, f; mov.b32 $6, 0;"
    f" ld.shared.b64 $0, [$7]; ld.shared.b64 $1, [$8]; ld.shared.b64 $2, [$7 + {_CODES_LOWER}];"
    f" ld.shared.b64 $3, [$8 + {_CODES_LOWER}];"
    " ld.shared.v2.b32 {e, f}, [$9]; prmt.b32 $4, e, f, $10;"
    f" ld.shared.v2.b32 {{e, f}}, [$9 + {_SCALES_LOWER}]; prmt.b32 $5, e, f, $10; }}"
)


@triton.jit
def copy_weights(
    buffer, step, wanted, token, lane, row, codes_ptr, scales_ptr, n, k_vectors,
    SQUARE: tl.constexpr, SWIZZLED: tl.constexpr, EVEN: tl.constexpr, PAIRED: tl.constexpr = False,
):  # fmt: skip
    """Start to copy the codes and scales of a warp's step into a buffer. Returns a token.

    step: number of the 128 elements of K. wanted: whether to copy. row: first row of the warp's 16 rows of B [n, K].
    k_vectors: 16-byte vectors of codes in a row, K / 32. EVEN: all rows and elements of the step exist. PAIRED: each
    upper row is followed by its lower row.
    """
    apart: tl.constexpr = 1 if PAIRED else 8  # rows from an upper row to its lower row
    g = lane % 32 // 4
    q = lane % 4
    codes_vector = step * 4 + q  # of 16 bytes
    scales_word = step * 2 + q % 2  # of 4 bytes
    upper = row + (2 * g if PAIRED else g)
    scales_row = upper + q // 2 * apart  # half of the lanes copy the upper rows' scales, half the lower rows'
    if SWIZZLED:
        scales = swizzle(scales_row, 0, tl.cdiv(k_vectors, 2)) + scales_word * 512
    elif SQUARE:
        scales = (scales_row // 16 * (k_vectors // 2) + scales_word) * 4
    else:
        scales = (scales_row * (k_vectors // 2) + scales_word) * 4
    # In every second pair of rows the halves are exchanged, so that simultaneous reads of lanes are of different banks.
    to_codes = buffer + g * _CODES_ROW + (q ^ (g // 2 % 2 * 2)) * 16
    to_scales = buffer + _SCALES + (g + q // 2 * 8) * _SCALES_ROW + q % 2 * 4
    codes = codes_ptr + (upper * k_vectors + codes_vector).to(tl.int64) * 16
    lower = codes + tl.cast(k_vectors, tl.int64) * (16 * apart)
    places = (to_codes, to_scales, codes, lower, scales_ptr + scales)
    if EVEN:
        ok = wanted & (lane >= 0)
        token = do_ptx(_COPY_WHOLE_STEP, "r,r,l,l,l,r,r", places + (ok.to(tl.int32), token))
    else:
        in_row = wanted & (codes_vector < k_vectors)
        scales_ok = wanted & (scales_word * 2 < k_vectors) & (scales_row < n)
        upper_bytes = (in_row & (upper < n)).to(tl.int32) * 16
        lower_bytes = (in_row & (upper + apart < n)).to(tl.int32) * 16
        sizes = (upper_bytes, lower_bytes, scales_ok.to(tl.int32) * 4)
        token = do_ptx(_COPY_PART_OF_STEP, "r,r,l,l,l,r,r,r,r", places + sizes + (token,))
    return token


@triton.jit
def read_weights(buffer, part: tl.constexpr, token, lane):
    """A lane's codes and scales of a copied step: (the six outputs of `_READ_STEP` without its token, token).

    part: number of the 16 rows in the buffer.
    """
    g = lane % 32 // 4
    q = lane % 4
    buffer = buffer + part * STEP_BYTES
    first = buffer + g * _CODES_ROW + (q // 2 ^ (g // 2 % 2 * 2)) * 16 + q % 2 * 8
    scale_bytes = q | (q + 4) << 4
    second = buffer + g * _CODES_ROW + (q // 2 ^ 2 ^ (g // 2 % 2 * 2)) * 16 + q % 2 * 8
    found = tl.inline_asm_elementwise(
        _READ_STEP, "=&l,=&l,=&l,=&l,=&r,=&r,=&r,r,r,r,r,r",
        (first, second, buffer + _SCALES + g * _SCALES_ROW, scale_bytes, token),
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return found[0:6], found[6]
