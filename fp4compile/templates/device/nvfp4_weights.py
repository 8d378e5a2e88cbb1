"""NVFP4 weights that are streamed: from global memory to shared memory, and from there to 16-bit registers."""

import triton
import triton.language as tl

from fp4compile.templates.device.async_copy import do_ptx
from fp4compile.templates.device.memory import swizzle


def dequantize_word(kind: str, word: str, out: str) -> str:
    """Eight E2M1 codes -> four registers of two 16-bit floats, {out}0 to {out}3: register j has codes j and j + 4.

    A code is its value times 2^-14 where its magnitude lies at bit 9 and its sign at bit 15 of an fp16, times 2^-126
    with the magnitude at bit 6 of a bf16. Signs and magnitudes of several codes move in one shift each, a select puts
    them together, and one mask a register drops the rest.
    """
    if kind == "f16x2":
        right, select, up, keep = 3, "0x0E0E0E0E", 8, "0x8E008E00"
        upper, lower, left = (3, 1), (2, 0), 4
    else:
        right, select, up, keep = 6, "0x01DC01DC", 4, "0x81C081C0"
        upper, lower, left = (3, 2), (1, 0), 8
    # What is shifted left by `left`, then right by `right`, need only be shifted left by the rest: in another unit.
    moves = (upper, word, f"shr.b32 u, {word}, {right};"), (lower, "v", f"shl.b32 u, {word}, {left - right};")
    lines = [f"shl.b32 v, {word}, {left};"]
    for (first, second), signs, move in moves:
        lines.append(
            f"{move} lop3.b32 u, u, {signs}, {select}, 0xE4;"
            f" and.b32 {out}{first}, u, {keep}; shl.b32 u, u, {up}; and.b32 {out}{second}, u, {keep};"
        )
    return " ".join(lines)


def scale_registers(kind: str, pair: str, out: str) -> str:
    """Two E4M3 bytes -> two registers, {out}0 and {out}1, of a scale in both halves (bf16: times 2^119)."""
    lines = f"cvt.u16.u32 h, {pair}; cvt.rn.f16x2.e4m3x2 u, h;"
    if kind == "f16x2":
        return lines + f" prmt.b32 {out}0, u, u, 0x1010; prmt.b32 {out}1, u, u, 0x3232;"
    lines += " mov.b32 {h, k}, u; cvt.f32.f16 f, h; cvt.f32.f16 g, k;"
    lines += " mul.f32 f, f, 0f7B000000; mul.f32 g, g, 0f7B000000;"
    return lines + f" cvt.rn.bf16x2.f32 {out}0, f, f; cvt.rn.bf16x2.f32 {out}1, g, g;"


@triton.constexpr_function
def add_ptx(warps, size):
    """In: where one of the first warp's sums lies, those of the next warp `size` bytes on. Out: the sum of them all."""
    adds = " ".join(f"ld.shared.f32 f, [$1 + {warp * size}]; add.f32 $0, $0, f;" for warp in range(1, warps))
    return f"{{ .reg .f32 f; ld.shared.f32 $0, [$1]; {adds} }}"


@triton.jit
def after(tile, step, steps):
    """The program's step after a step of a tile, of the same tile or of its next one: (tile, step)."""
    last = step + 1 == steps
    return tl.where(last, tile + tl.num_programs(0), tile), tl.where(last, 0, step + 1)


# Bytes of 16 rows of weights in a slot of the ring, which holds a warp's step: codes of the upper eight rows, of the
# lower ones, scales of both in the same way. Behind the last 16 rows follow rows of activations.
TILE = tl.constexpr(1152)
_CODES_ROW = tl.constexpr(64)
_CODES_LOWER = 512
_SCALES = tl.constexpr(1024)
_SCALES_ROW = tl.constexpr(8)
_SCALES_LOWER = 64
# In: where a lane copies to (codes, scales) and from (codes of a row, of the one eight below, scales); what to copy.
_COPY_EVEN = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $6, 0; mov.b32 $0, 0;"
    " @p cp.async.cg.shared.global.L2::128B [$1], [$3], 16;"
    f" @p cp.async.cg.shared.global.L2::128B [$1 + {_CODES_LOWER}], [$4], 16;"
    " @p cp.async.ca.shared.global [$2], [$5], 4; }"
)
_COPY = tl.constexpr(
    "{ mov.b32 $0, 0; cp.async.cg.shared.global [$1], [$3], 16, $6;"
    f" cp.async.cg.shared.global [$1 + {_CODES_LOWER}], [$4], 16, $7; cp.async.ca.shared.global [$2], [$5], 4, $8; }}"
)
# Out: codes of a row (two words of 64 bits), of the one eight below; two scale bytes of each; a token. In: addresses of
# the two words and of the row's scales, which bytes of eight, a token.
_TAKE = tl.constexpr(
    "{ .reg .b32 e, f; mov.b32 $6, 0;"
    f" ld.shared.b64 $0, [$7]; ld.shared.b64 $1, [$8]; ld.shared.b64 $2, [$7 + {_CODES_LOWER}];"
    f" ld.shared.b64 $3, [$8 + {_CODES_LOWER}];"
    " ld.shared.v2.b32 {e, f}, [$9]; prmt.b32 $4, e, f, $10;"
    f" ld.shared.v2.b32 {{e, f}}, [$9 + {_SCALES_LOWER}]; prmt.b32 $5, e, f, $10; }}"
)


@triton.jit
def copy_weights(
    slot, part, there, token, lane, row, codes_ptr, scales_ptr, n, chunks,
    SQUARE: tl.constexpr, SWIZZLED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Start to copy a warp's weights, 16 rows from `row` on, into a slot of its ring.

    part: which 128 elements of the rows. there: whether they are the warp's to take.
    """
    g = lane % 32 // 4
    q = lane % 4
    chunk = part * 4 + q  # of 16 bytes of codes
    unit = part * 2 + q % 2  # of 4 bytes of scales
    upper = row + g
    of_scales = upper + q // 2 * 8
    if SWIZZLED:
        scales = swizzle(of_scales, 0, tl.cdiv(chunks, 2)) + unit * 512
    elif SQUARE:
        scales = (of_scales // 16 * (chunks // 2) + unit) * 4
    else:
        scales = (of_scales * (chunks // 2) + unit) * 4
    # Units of 16 bytes are exchanged in every second pair of rows: lanes then read from banks of their own.
    to_codes = slot + g * _CODES_ROW + (q ^ (g // 2 % 2 * 2)) * 16
    to_scales = slot + _SCALES + (g + q // 2 * 8) * _SCALES_ROW + q % 2 * 4
    codes = codes_ptr + (upper * chunks + chunk).to(tl.int64) * 16
    lower = codes + tl.cast(chunks, tl.int64) * 128
    places = (to_codes, to_scales, codes, lower, scales_ptr + scales)
    if EVEN:
        ok = there & (lane >= 0)
        token = do_ptx(_COPY_EVEN, "r,r,l,l,l,r,r", places + (ok.to(tl.int32), token))
    else:
        here = there & (chunk < chunks)
        ok_scales = there & (unit * 2 < chunks) & (of_scales < n)
        of_upper = (here & (upper < n)).to(tl.int32) * 16
        of_lower = (here & (upper + 8 < n)).to(tl.int32) * 16
        sizes = (of_upper, of_lower, ok_scales.to(tl.int32) * 4)
        token = do_ptx(_COPY, "r,r,l,l,l,r,r,r,r", places + sizes + (token,))
    return token


@triton.jit
def read_weights(slot, tile: tl.constexpr, token, lane):
    """A step's weights of 16 rows as the step's PTX takes them, from the slot where they have arrived; and a token."""
    g = lane % 32 // 4
    q = lane % 4
    slot = slot + tile * TILE
    first = slot + g * _CODES_ROW + (q // 2 ^ (g // 2 % 2 * 2)) * 16 + q % 2 * 8
    which = q | (q + 4) << 4
    second = slot + g * _CODES_ROW + (q // 2 ^ 2 ^ (g // 2 % 2 * 2)) * 16 + q % 2 * 8
    taken = tl.inline_asm_elementwise(
        _TAKE, "=&l,=&l,=&l,=&l,=&r,=&r,=&r,r,r,r,r,r",
        (first, second, slot + _SCALES + g * _SCALES_ROW, which, token),
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return taken[0:6], taken[6]
