"""FP8 operands (E4M3) of `gemm_skinny`: from global to shared memory and to 16-bit registers, and their products.

A warp's step is 16 rows of B (8 upper and 8 lower ones) times 128 elements along K: with block scales, the elements of
one block. Its buffer of FP8_STEP_BYTES in shared memory has the codes of the upper rows, the codes of the lower rows,
and float32 scales: one for each row of B, then one for each row of A.

Lane 4 * g + q of a warp multiplies upper row g and lower row g, and takes elements 16 * q to 16 * q + 15 of each half
of 64 elements, as `skinny_pipeline.read_a` does. So four lanes read 64 bytes of a row at once, and `mma.sync` pairs the
elements of A and B that lie at the same place of a lane.

SCALES is `OperandSpec.scales_text`: "none", "float32" (rows of 128 elements) or "float32 square" (128x128 elements).
"""

import triton
import triton.language as tl

from fp4compile.templates.device.async_copy import COPY_PART, do_ptx, select_ptx

FP8_STEP_BYTES = tl.constexpr(2176)  # bytes of codes and scales of one warp's step
_FP8_ROW = tl.constexpr(128)
_FP8_LOWER = 1024
_FP8_SCALES = tl.constexpr(2048)
_FP8_A_SCALES = tl.constexpr(2048 + 64)
FP8_SQUARE = tl.constexpr(128)  # rows of B with a scale

# Inputs: a lane's destinations of two vectors of 16 bytes, their sources in the upper row and in the lower row; whether
# to copy, or the number of bytes of each of these four vectors (the rest becomes zeros); a token.
_COPY_WHOLE_FP8 = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $7, 0; mov.b32 $0, 0;"
    " @p cp.async.cg.shared.global.L2::128B [$1], [$3], 16; @p cp.async.cg.shared.global.L2::128B [$2], [$4], 16;"
    f" @p cp.async.cg.shared.global.L2::128B [$1 + {_FP8_LOWER}], [$5], 16;"
    f" @p cp.async.cg.shared.global.L2::128B [$2 + {_FP8_LOWER}], [$6], 16; }}"
)
_COPY_PART_OF_FP8 = tl.constexpr(
    "{ mov.b32 $0, 0; cp.async.cg.shared.global [$1], [$3], 16, $7; cp.async.cg.shared.global [$2], [$4], 16, $8;"
    f" cp.async.cg.shared.global [$1 + {_FP8_LOWER}], [$5], 16, $9;"
    f" cp.async.cg.shared.global [$2 + {_FP8_LOWER}], [$6], 16, $10; }}"
)
# Inputs: the destination and the source of a scale, how many of its bytes exist, whether to copy, a token.
_COPY_FP8_SCALE = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0; @p cp.async.ca.shared.global [$1], [$2], 4, $3; }"
)


@triton.constexpr_function
def is_fp8(scales):
    """Whether weights with these SCALES are FP8 codes; else they are FP4 codes, which always have block scales."""
    return scales.split()[0] in ("none", "float32")


@triton.jit
def copy_fp8(
    buffer, step, wanted, token, lane, row, codes_ptr, scales_ptr, n, k_vectors, SCALES: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Start to copy the codes and scales of a warp's step into a buffer. Returns a token.

    step: number of the 128 elements of K. wanted: whether to copy. row: first row of the warp's 16 rows of B [n, K].
    k_vectors: K / 32. EVEN: all rows and elements of the step exist.
    """
    g = lane % 32 // 4
    q = lane % 4
    vector = step * 8 + q  # of 16 bytes; the lane's second one is four vectors later
    upper = row + g
    # In every second row the halves are exchanged, so that simultaneous reads of lanes are of different banks.
    to = buffer + g * _FP8_ROW + (q ^ (g % 2 * 4)) * 16
    to_second = buffer + g * _FP8_ROW + (q ^ 4 ^ (g % 2 * 4)) * 16
    codes = codes_ptr + (upper.to(tl.int64) * k_vectors * 2 + vector) * 16
    lower = codes + tl.cast(k_vectors, tl.int64) * (32 * 8)
    places = (to, to_second, codes, codes + 64, lower, lower + 64)
    if EVEN:
        ok = wanted & (lane >= 0)
        token = do_ptx(_COPY_WHOLE_FP8, "r,r,l,l,l,l,r,r", places + (ok.to(tl.int32), token))
    else:
        first = wanted & (vector < k_vectors * 2)
        second = wanted & (vector + 4 < k_vectors * 2)
        sizes = ((first & (upper < n)).to(tl.int32) * 16, (second & (upper < n)).to(tl.int32) * 16,
                 (first & (upper + 8 < n)).to(tl.int32) * 16, (second & (upper + 8 < n)).to(tl.int32) * 16)  # fmt: skip
        token = do_ptx(_COPY_PART_OF_FP8, "r,r,l,l,l,l,r,r,r,r,r", places + sizes + (token,))
    if SCALES != "none":
        of_row = row + lane % 32
        scales_row = of_row // FP8_SQUARE if SCALES == "float32 square" else of_row
        to_scale = buffer + _FP8_SCALES + lane % 32 * 4
        first_lanes = wanted & (lane % 32 < 16)
        token = _copy_fp8_scale(to_scale, scales_ptr, scales_row, first_lanes, of_row < n, step, k_vectors, token)
    return token


@triton.jit
def copy_a_codes(buffer, step, wanted, token, lane, a_ptr, m, k_vectors, ROWS: tl.constexpr):
    """Start to copy the codes of the existing rows of A of a warp's step, eight lanes a row. Returns a token."""
    unit = lane % 8  # of 16 bytes
    vector = step * 8 + unit
    for i in tl.static_range((ROWS + 3) // 4):
        row = lane % 32 // 8 + i * 4
        source = a_ptr + (row.to(tl.int64) * k_vectors * 2 + vector) * 16
        size = tl.where(vector < k_vectors * 2, 16, 0)
        to = buffer + row * _FP8_ROW + (unit ^ (row % 2 * 4)) * 16
        ok = (row < tl.minimum(m, ROWS)) & wanted
        token = do_ptx(COPY_PART, "r,l,r,r,r", (to, source, size, ok.to(tl.int32), token))
    return token


@triton.jit
def copy_a_scales(buffer, step, wanted, token, lane, scales_ptr, m, k_vectors, ROWS: tl.constexpr):
    """Start to copy the scales of A's rows of a warp's step, [m, K / 128] in memory. Returns a token."""
    row = lane % 32
    to = buffer + _FP8_A_SCALES + row * 4
    return _copy_fp8_scale(to, scales_ptr, row, wanted & (row < ROWS), row < m, step, k_vectors, token)


@triton.jit
def _copy_fp8_scale(to, scales_ptr, row, wanted, row_exists, step, k_vectors, token):
    """Start to copy the scale of a step in a row of scales, or zeros where it does not exist. Returns a token."""
    blocks = tl.cdiv(k_vectors, 4)
    exists = row_exists & (step < blocks)
    at = tl.where(exists, row.to(tl.int64) * blocks + step, 0)
    source = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at
    size = exists.to(tl.int32) * 4
    return do_ptx(_COPY_FP8_SCALE, "r,l,r,r,r", (to, source, size, wanted.to(tl.int32), token))


def _read_fp8_ptx(scaled: bool, a_scaled: bool) -> str:
    """PTX that reads a lane's operands of a copied step.

    Outputs: eight words of 64 bits, four of the upper row and four of the lower row; the factors of the sums of both
    rows with two rows of A; a token. Inputs: addresses of the upper row's two vectors, of the upper row's scale, of the
    scales of the two rows of A; a token.
    """
    text = ["{ .reg .f32 f, g, x, y; mov.b32 $12, 0;"]
    for i, at in enumerate(("$13", "$14", f"$13 + {_FP8_LOWER}", f"$14 + {_FP8_LOWER}")):
        text.append(f"ld.shared.v2.b64 {{${2 * i}, ${2 * i + 1}}}, [{at}];")
    text.append(
        "ld.shared.f32 f, [$15]; ld.shared.f32 g, [$15 + 32];"
        if scaled
        else "mov.f32 f, 0f3F800000; mov.f32 g, 0f3F800000;"
    )
    text.append("ld.shared.v2.f32 {x, y}, [$16];" if a_scaled else "mov.f32 x, 0f3F800000; mov.f32 y, 0f3F800000;")
    text.append("mul.f32 $8, f, x; mul.f32 $9, f, y; mul.f32 $10, g, x; mul.f32 $11, g, y; }")
    return " ".join(text)


_READ_FP8 = tl.constexpr({(b, a): _read_fp8_ptx(b, a) for b in (False, True) for a in (False, True)})
_READ_FP8_OPERANDS = tl.constexpr(",".join(["=&l"] * 8 + ["=&f"] * 4 + ["=&r"] + ["r"] * 5))


@triton.jit
def read_fp8(
    buffer, a_scales_at, token, lane, SCALES: tl.constexpr, A_SCALED: tl.constexpr
):  # fmt: skip
    """A lane's codes of a copied step and the factors of its sums: (the first 12 outputs of `_read_fp8_ptx`, token).

    a_scales_at: the buffer whose scales of A are read.
    """
    g = lane % 32 // 4
    q = lane % 4
    first = buffer + g * _FP8_ROW + (q ^ (g % 2 * 4)) * 16
    second = buffer + g * _FP8_ROW + (q ^ 4 ^ (g % 2 * 4)) * 16
    found = tl.inline_asm_elementwise(
        select_ptx(_READ_FP8, SCALES != "none", A_SCALED), _READ_FP8_OPERANDS,
        (first, second, buffer + _FP8_SCALES + g * 4, a_scales_at + _FP8_A_SCALES + q * 8, token),
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.float32, tl.float32,
               tl.float32, tl.float32, tl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return found[0:12], found[12]


def _decoded(compute: str, word: str, out: str) -> str:
    """PTX that turns four E4M3 codes into two registers {out}0 and {out}1 of two numbers each, in the codes' order."""
    text = f"mov.b32 {{h, k}}, {word}; cvt.rn.f16x2.e4m3x2 {out}0, h; cvt.rn.f16x2.e4m3x2 {out}1, k;"
    if compute == "bf16":  # through float32: bf16 has the numbers of E4M3, and no conversion from fp16
        for register in (f"{out}0", f"{out}1"):
            text += f" mov.b32 {{h, k}}, {register}; cvt.f32.f16 f, h; cvt.f32.f16 g, k;"
            text += f" cvt.rn.bf16x2.f32 {register}, g, f;"
    return text


def _read_a_codes_ptx() -> str:
    """PTX that reads a lane's codes of A of a copied step, as fp16; zeros where the row does not exist.

    Outputs: eight words of 64 bits; a token. Inputs: addresses of two vectors, whether the row exists, a token.
    """
    text = ["{ .reg .pred p; .reg .b32 w<8>, a<2>; .reg .b16 h, k; setp.ne.b32 p, $11, 0; mov.b32 $8, 0;"]
    text += [f"mov.b32 w{i}, 0;" for i in range(8)]
    text += [f"@p ld.shared.v4.b32 {{{', '.join(f'w{4 * i + j}' for j in range(4))}}}, [${9 + i}];" for i in range(2)]
    text += [f"{_decoded('fp16', f'w{i}', 'a')} mov.b64 ${i}, {{a0, a1}};" for i in range(8)]
    return " ".join(text) + " }"


_READ_A_CODES = tl.constexpr(_read_a_codes_ptx())
_READ_A_CODES_OPERANDS = tl.constexpr(",".join(["=&l"] * 8 + ["=&r"] + ["r"] * 4))


@triton.jit
def read_a_codes(at, token, lane, m):
    """A lane's elements of A of a copied step, whose codes are at `at`: (eight words of 64 bits, token)."""
    g = lane % 32 // 4
    q = lane % 4
    first = at + g * _FP8_ROW + (q ^ (g % 2 * 4)) * 16
    second = at + g * _FP8_ROW + (q ^ 4 ^ (g % 2 * 4)) * 16
    found = tl.inline_asm_elementwise(
        _READ_A_CODES, _READ_A_CODES_OPERANDS, (first, second, (g < m).to(tl.int32), token),
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return found[0:8], found[8]


def _multiply_fp8_ptx(compute: str) -> str:
    """PTX that adds the product of 16 rows of B and 8 rows of A over 128 elements, times factors, to a lane's sums.

    Outputs: four sums, of the upper row with two rows of A, then of the lower row. Inputs: from `_read_fp8_ptx`, the
    codes and the factors; eight words of 64 bits of A; the four sums so far. `mma.sync` waits for the previous one on
    the same accumulator, so there are two.
    """
    dtype = "f16" if compute == "fp16" else "bf16"
    text = ["{ .reg .b32 w<16>, a<2>, b<2>, y<2>; .reg .b16 h, k; .reg .f32 f, g, o<8>;"]
    text += [f"mov.f32 o{i}, 0f00000000;" for i in range(8)]
    text += [f"mov.b64 {{w{2 * i}, w{2 * i + 1}}}, ${4 + i};" for i in range(8)]
    for i in range(8):  # four codes of each row
        sums = "{o0, o1, o2, o3}" if i % 2 else "{o4, o5, o6, o7}"
        text += [
            _decoded(compute, f"w{i}", "a"),
            _decoded(compute, f"w{8 + i}", "b"),
            f"mov.b64 {{y0, y1}}, ${16 + i};",
        ]
        text.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {sums}, {{a0, b0, a1, b1}}, {{y0, y1}}, {sums};"
        )
    text += [f"add.f32 o{i}, o{i}, o{4 + i}; fma.rn.f32 ${i}, o{i}, ${12 + i}, ${24 + i};" for i in range(4)]
    return " ".join(text) + " }"


_MULTIPLY_FP8 = tl.constexpr({(compute,): _multiply_fp8_ptx(compute) for compute in ("fp16", "bf16")})
_MULTIPLY_FP8_OPERANDS = tl.constexpr(",".join(["=&f"] * 4 + ["l"] * 8 + ["f"] * 4 + ["l"] * 8 + ["f"] * 4))


@triton.jit
def multiply_fp8(w, x, c, COMPUTE: tl.constexpr):
    """A lane's four sums c plus the products of a step's B (w, from `read_fp8`) and A (x, from `read_a`)."""
    return tl.inline_asm_elementwise(
        select_ptx(_MULTIPLY_FP8, COMPUTE), _MULTIPLY_FP8_OPERANDS, w + x + c,
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip
