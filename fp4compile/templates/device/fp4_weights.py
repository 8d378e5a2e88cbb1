"""NVFP4 and MXFP4 weights of `gemm_skinny` and `gemm_wgmma_sm90`: from global to shared memory and to 16-bit registers.

A warp's step is 16 rows of B (8 upper and 8 lower ones) times 128 elements along K. It has a buffer of `STEP_BYTES` in
shared memory: the codes of the upper rows, the codes of the lower rows, then the scales of both in the same order.

Lane 4 * g + q of a warp multiplies upper row g and lower row g, as `mma.sync` and `wgmma` define it. The lower rows are
the eight rows after the upper ones, or (PAIRED) every second row, so that a lane has neighbouring rows of B, which are
neighbouring columns of the result. A lane takes blocks q and q + 4 of the eight blocks of 16 elements. The instructions
assign other elements of K to a lane; that changes only the order of the sum over K, because A is assigned to the lanes
in the same order.

SCALES is `OperandSpec.scales_text`: "e4m3" (NVFP4, a scale for 16 elements) or "e8m0" (MXFP4, for 32), then " swizzled"
or " square" where the scales are not linear. With MXFP4, two blocks of 16 have one scale, and a row's four scales of a
step are one aligned word of memory; or, where linear rows have an odd number of pairs of scales, they are the halves of
two words in each odd row. Then both words are copied.
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


SCALE_REGISTERS = ".reg .b32 s<2>, t<2>, u, v, c, z; .reg .b16 h, k; .reg .f32 f, g; .reg .pred q, large;"


def scale_registers(kind: str, scale: str, upper: str, lower: str) -> str:
    """PTX that turns two scale bytes of each of two rows into s0 and s1, t0 and t1, each with a scale in both halves.

    kind: f16x2 or bf16x2. scale: "e4m3" or "e8m0"; the latter needs bf16x2. Needs `SCALE_REGISTERS`, for `scaled_word`,
    too. Sums of products have `sums_factor`'s inverse as a factor.
    """
    text = "mov.b32 z, 0x80008000;"  # -0 twice, which changes no sum
    if scale == "e8m0":
        return text + _powers_of_two(upper, lower)
    return text + _e4m3_registers(kind, upper, "s") + _e4m3_registers(kind, lower, "t")


def _powers_of_two(upper: str, lower: str) -> str:
    """PTX of `scale_registers` for E8M0: 2^126 times the scale, which makes the code's 2^-126 exact for every scale.

    Where a scale of the warp is above 1, bf16 has not room for all of them: then `large` is true, the codes are
    multiplied by 2^126 first (`scaled_word`), and the registers are the scales, of which 255 is NaN.
    """
    bytes_of = [
        (out, pair, 8 * i)
        for pair, name in ((upper, "s"), (lower, "t"))
        for i, out in enumerate((f"{name}0", f"{name}1"))
    ]
    text = [f"mov.b32 c, 0x7E807E80; lop3.b32 u, {upper}, {lower}, 0x8080, 0xA8; setp.ne.b32 q, u, 0;"]
    text.append("vote.sync.any.pred large, q, 0xffffffff;")
    text += [f"bfe.u32 u, {pair}, {at}, 8; mad.lo.u32 {out}, u, 0x800080, 0x3F003F00;" for out, pair, at in bytes_of]
    text.append("@!large bra.uni SMALL;")
    for out, pair, at in bytes_of:
        text.append(f"bfe.u32 u, {pair}, {at}, 8; mul.lo.u32 {out}, u, 0x800080; setp.eq.u32 q, u, 0;")
        text.append(f"selp.b32 {out}, 0x400040, {out}, q; setp.eq.u32 q, u, 255; selp.b32 {out}, 0x7FC07FC0, {out}, q;")
    return " ".join([*text, "SMALL:"])


def scaled_word(kind: str, scale: str, word: int, upper: str, lower: str) -> str:
    """PTX: w{word} to the registers {upper}0 to 3, and w{4 + word} to {lower}0 to 3, dequantised, times their scales.

    word: eight codes, 0 and 1 of a row's first block, 2 and 3 of its second. Needs `scale_registers`.
    """
    text = [dequantize_word(kind, f"w{word}", upper), dequantize_word(kind, f"w{4 + word}", lower)]
    registers = [
        (f"{row}{j}", f"{of_row}{word // 2}") for j in range(4) for row, of_row in ((upper, "s"), (lower, "t"))
    ]
    if scale == "e8m0":
        text.append(f"@!large bra.uni SMALL{word};")
        text += [f"fma.rn.bf16x2 {register}, {register}, c, z;" for register, _ in registers]
        text.append(f"SMALL{word}:")
    times = "mul.rn.f16x2 {0}, {0}, {1};" if kind == "f16x2" else "fma.rn.bf16x2 {0}, {0}, {1}, z;"
    return " ".join([*text, *(times.format(*each) for each in registers)])


@triton.constexpr_function
def sums_factor(compute, scales):
    """The factor of sums of products of weights from `scaled_word`."""
    if scales.startswith("e8m0"):
        return 1.0
    return 2.0**14 if compute == "fp16" else 2.0**7


def _e4m3_registers(kind: str, pair: str, out: str) -> str:
    """PTX that turns two E4M3 bytes into two registers, {out}0 and {out}1, each with one scale in both halves.

    kind: f16x2, or bf16x2, which multiplies the scales by 2^119; products with `dequantize_word` then carry 2^-7.
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
# Inputs: addresses of the upper row's two words and of its scales; a `prmt` selector of two of eight scale bytes of the
# upper row, and of the lower row; a token.
_READ_STEP = tl.constexpr(
    "{ .reg .b32 e, f; mov.b32 $6, 0;"
    f" ld.shared.b64 $0, [$7]; ld.shared.b64 $1, [$8]; ld.shared.b64 $2, [$7 + {_CODES_LOWER}];"
    f" ld.shared.b64 $3, [$8 + {_CODES_LOWER}];"
    " ld.shared.v2.b32 {e, f}, [$9]; prmt.b32 $4, e, f, $10;"
    f" ld.shared.v2.b32 {{e, f}}, [$9 + {_SCALES_LOWER}]; prmt.b32 $5, e, f, $11; }}"
)


@triton.constexpr_function
def type_of_scales(scales):
    """The type of SCALES: "e4m3" or "e8m0"."""
    return scales.split()[0]


@triton.constexpr_function
def is_scales(scales, name):
    """Whether SCALES names this type or layout."""
    return name in scales.split()


@triton.constexpr_function
def _scale_bytes_of_step(scales):
    """Bytes of a row's scales of a step."""
    return 4 if is_scales(scales, "e8m0") else 8


@triton.constexpr_function
def _scale_bytes_to_next(scales):
    """Bytes from a row's scales of a step to those of its next step."""
    return _scale_bytes_of_step(scales) * (128 if is_scales(scales, "swizzled") else 1)


@triton.jit
def _scales_of_row(row, half, n, k_vectors, SCALES: tl.constexpr, EVEN: tl.constexpr):
    """(Offset of one of two words of a row's scales of step 0, bytes of the row's scales from there on).

    half: which word, 0 or 1. A row's scales of a step may be one word; then both words are that one, or (not EVEN) the
    second one is not needed.
    """
    if is_scales(SCALES, "e4m3"):
        words = k_vectors // 2  # of a row
        if is_scales(SCALES, "swizzled"):
            at = swizzle(row, 0, words) + half * 512
        elif is_scales(SCALES, "square"):
            at = (row // 16 * words + half) * 4
        else:
            at = (row * words + half) * 4
        left = (words - half) * 4
    elif is_scales(SCALES, "swizzled"):
        at = swizzle(row, 0, tl.cdiv(k_vectors, 4))
        left = k_vectors
    else:
        at = row * k_vectors
        if not EVEN:
            at = at // 4 * 4 + half * 4
        left = (row + 1) * k_vectors - at
    return at, tl.where(row < n, left, 0)


@triton.jit
def weight_sources(
    lane, row, first, stop, codes_ptr, scales_ptr, n, k_vectors,
    SCALES: tl.constexpr, EVEN: tl.constexpr, PAIRED: tl.constexpr = False,
):  # fmt: skip
    """What a lane copies of a warp's rows `row` to `row + 15` of B [n, K], for `copy_weights`.

    first: the number of the 128 elements of K that is the copies' step 0. stop: the first step that is not copied.
    k_vectors: 16-byte vectors of codes in a row, K / 32. EVEN: all rows and elements of each copied step exist. PAIRED:
    each upper row is followed by its lower row.

    Returns (address of the upper row's codes, address of a word of scales, both of step 0; the first step that has no
    codes of the upper row, of the lower row; bytes of scales from their address on). If EVEN, only `stop` ends copies.
    """
    apart: tl.constexpr = 1 if PAIRED else 8  # rows from an upper row to its lower row
    g = lane % 32 // 4
    q = lane % 4
    upper = row + (2 * g if PAIRED else g)
    # Half of the lanes copy the upper rows' scales, half the lower rows'.
    scales, left = _scales_of_row(upper + q // 2 * apart, q % 2, n, k_vectors, SCALES, EVEN)
    codes = codes_ptr + (upper * k_vectors + (first * 4 + q)).to(tl.int64) * 16
    scales += first * _scale_bytes_to_next(SCALES)
    if EVEN:
        upper_stop, lower_stop = stop, stop
    else:
        steps = tl.minimum((k_vectors + 3 - q) // 4 - first, stop)
        upper_stop = tl.where(upper < n, steps, 0)
        lower_stop = tl.where(upper + apart < n, steps, 0)
        left = tl.minimum(left - first * _scale_bytes_of_step(SCALES), stop * _scale_bytes_of_step(SCALES))
    return codes, scales_ptr + scales, upper_stop, lower_stop, left


@triton.jit
def copy_weights(
    buffer, step, sources, token, lane, k_vectors,
    SCALES: tl.constexpr, EVEN: tl.constexpr, PAIRED: tl.constexpr = False,
):  # fmt: skip
    """Start to copy the codes and scales of a warp's step into a buffer. Returns a token.

    sources: from `weight_sources`, which says what a step is; the other arguments: as for it.
    """
    codes, scales, upper_stop, lower_stop, left = sources
    g = lane % 32 // 4
    q = lane % 4
    # In every second pair of rows the halves are exchanged, so that simultaneous reads of lanes are of different banks.
    to_codes = buffer + g * _CODES_ROW + (q ^ (g // 2 % 2 * 2)) * 16
    to_scales = buffer + _SCALES + (g + q // 2 * 8) * _SCALES_ROW + q % 2 * 4
    codes += tl.cast(step, tl.int64) * 64
    lower = codes + tl.cast(k_vectors, tl.int64) * (16 if PAIRED else 128)
    places = (to_codes, to_scales, codes, lower, scales + tl.cast(step, tl.int64) * _scale_bytes_to_next(SCALES))
    if EVEN:
        ok = (step < upper_stop) & (lane >= 0)
        token = do_ptx(_COPY_WHOLE_STEP, "r,r,l,l,l,r,r", places + (ok.to(tl.int32), token))
    else:
        scale_bytes = tl.minimum(tl.maximum(left - step * _scale_bytes_of_step(SCALES), 0), 4)
        sizes = (tl.where(step < upper_stop, 16, 0), tl.where(step < lower_stop, 16, 0), scale_bytes)
        token = do_ptx(_COPY_PART_OF_STEP, "r,r,l,l,l,r,r,r,r", places + sizes + (token,))
    return token


@triton.jit
def _scale_bytes(q, odd_row, k_vectors, SCALES: tl.constexpr, EVEN: tl.constexpr):
    """The `prmt` selector of a lane's two scale bytes of a row among the eight bytes of two copied words."""
    if is_scales(SCALES, "e4m3"):
        return q | (q + 4) << 4
    else:
        first = q // 2
        if not EVEN and not is_scales(SCALES, "swizzled"):
            first += odd_row * (k_vectors % 4)
        return first | (first + 2) << 4


@triton.jit
def read_weights(
    buffer, part: tl.constexpr, token, lane, k_vectors, SCALES: tl.constexpr, EVEN: tl.constexpr,
    PAIRED: tl.constexpr = False,
):  # fmt: skip
    """A lane's codes and scales of a copied step: (the six outputs of `_READ_STEP` without its token, token).

    part: number of the 16 rows in the buffer. The other arguments: as for `copy_weights`.
    """
    g = lane % 32 // 4
    q = lane % 4
    buffer = buffer + part * STEP_BYTES
    first = buffer + g * _CODES_ROW + (q // 2 ^ (g // 2 % 2 * 2)) * 16 + q % 2 * 8
    of_upper = _scale_bytes(q, 0 if PAIRED else g % 2, k_vectors, SCALES, EVEN)
    of_lower = _scale_bytes(q, 1 if PAIRED else g % 2, k_vectors, SCALES, EVEN)
    second = buffer + g * _CODES_ROW + (q // 2 ^ 2 ^ (g // 2 % 2 * 2)) * 16 + q % 2 * 8
    found = tl.inline_asm_elementwise(
        _READ_STEP, "=&l,=&l,=&l,=&l,=&r,=&r,=&r,r,r,r,r,r,r",
        (first, second, buffer + _SCALES + g * _SCALES_ROW, of_upper, of_lower, token),
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return found[0:6], found[6]
