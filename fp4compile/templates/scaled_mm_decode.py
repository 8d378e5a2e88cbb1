"""The product of a few rows of 16-bit activations and NVFP4 weights, at the speed at which the weights arrive.

A decode step reads every weight once and does little else, so what counts is instructions an element: about three and a
half here. Each lane loads 16 bytes of codes (32 neighbours of a row) straight from memory into the registers from
which `mma.sync` reads its A operand; nothing goes through shared memory. That the contraction dimension is then cut
among lanes in another order than the instruction's own does not matter, as the activations come in the same order.

The kernel is written for one lane at a time: tensors have one dimension and one element for each lane, the only layout
that Triton can give them. Inline PTX does the rest.
"""

import triton
import triton.language as tl

from fp4compile.templates.quantize_rows import swizzle
from fp4compile.templates.scaled_mm_tiles import rescale, store_rounded


def _expand_word(kind: str, word: str, out: str) -> str:
    """Eight E2M1 codes -> four registers of two 16-bit floats, {out}0 to {out}3: register j has codes j and j + 4.

    A code is its value times 2^-14 where its magnitude lies at bit 9 and its sign at bit 15 of an fp16, times 2^-126
    with the magnitude at bit 6 of a bf16. Signs and magnitudes of several codes move in one shift each, a select puts
    them together, and one mask a register drops the rest.
    """
    if kind == "f16x2":
        right, select, up, keep = 3, "0x0E0E0E0E", 8, "0x8E008E00"
        steps = ((3, 1, word), (2, 0, "v"))
        left = 4
    else:
        right, select, up, keep = 6, "0x01DC01DC", 4, "0x81C081C0"
        steps = ((3, 2, word), (1, 0, "v"))
        left = 8
    lines = [f"shl.b32 v, {word}, {left};"]
    for upper, lower, source in steps:
        lines.append(
            f"shr.u32 u, {source}, {right}; lop3.b32 u, u, {source}, {select}, 0xE4;"
            f" and.b32 {out}{upper}, u, {keep}; shl.b32 u, u, {up}; and.b32 {out}{lower}, u, {keep};"
        )
    return " ".join(lines)


def _scales(kind: str, pair: str, out: str) -> str:
    """Two E4M3 bytes -> two registers, {out}0 and {out}1, of a scale in both halves (bf16: times 2^119)."""
    lines = f"cvt.u16.u32 h, {pair}; cvt.rn.f16x2.e4m3x2 u, h;"
    if kind == "f16x2":
        return lines + f" prmt.b32 {out}0, u, u, 0x1010; prmt.b32 {out}1, u, u, 0x3232;"
    lines += " mov.b32 {h, k}, u; cvt.f32.f16 f, h; cvt.f32.f16 g, k;"
    lines += " mul.f32 f, f, 0f7B000000; mul.f32 g, g, 0f7B000000;"
    return lines + f" cvt.rn.bf16x2.f32 {out}0, f, f; cvt.rn.bf16x2.f32 {out}1, g, g;"


def _step_ptx(compute: str) -> str:
    """16 rows of weights times 8 rows of activations, over 128 elements, added to the sums.

    Operands: 4 sums out; codes of row g (two words of 64 bits), of row g + 8; the scale bytes of both; eight words of
    64 bits of activations; the sums.
    """
    kind = "f16x2" if compute == "fp16" else "bf16x2"
    dtype = kind[:-2]
    text = ["{ .reg .b32 u, v, z, w<8>, a<4>, b<4>, s<2>, t<2>, x<4>, y<4>; .reg .b16 h, k; .reg .f32 f, g;"]
    text.append("mov.b32 z, 0x80008000;")
    text += [f"mov.f32 ${i}, ${18 + i};" for i in range(4)]
    text += [f"mov.b64 {{w{2 * i}, w{2 * i + 1}}}, ${4 + i};" for i in range(4)]
    text += [_scales(kind, "$8", "s"), _scales(kind, "$9", "t")]
    for word in range(4):  # of 8 codes in each row
        text += [_expand_word(kind, f"w{word}", "a"), _expand_word(kind, f"w{4 + word}", "b")]
        for j in range(4):
            for register, scale in (("a", "s"), ("b", "t")):
                product = f"{register}{j}, {register}{j}, {scale}{word // 2}"
                text.append(f"mul.rn.f16x2 {product};" if kind == "f16x2" else f"fma.rn.bf16x2 {product}, z;")
        text.append(f"mov.b64 {{x0, x1}}, ${10 + 2 * word}; mov.b64 {{x2, x3}}, ${11 + 2 * word};")
        for j in range(4):
            text.append(f"prmt.b32 y{j}, x{j // 2}, x{2 + j // 2}, {'0x7632' if j % 2 else '0x5410'};")
        for j in (0, 2):
            text.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{$0, $1, $2, $3}},"
                f" {{a{j}, b{j}, a{j + 1}, b{j + 1}}}, {{y{j}, y{j + 1}}}, {{$0, $1, $2, $3}};"
            )
    return " ".join(text) + " }"


_STEP_F16 = tl.constexpr(_step_ptx("fp16"))
_STEP_BF16 = tl.constexpr(_step_ptx("bf16"))
_OPERANDS = tl.constexpr(",".join(["=&f"] * 4 + ["l"] * 4 + ["r"] * 2 + ["l"] * 8 + ["f"] * 4))


@triton.jit
def _load_pair(ptr, at, mask, EVEN: tl.constexpr):
    """16 bytes at `at` (in units of 16 bytes), as two int64."""
    at = at[:, None] * 2 + tl.arange(0, 2)[None, :]
    if EVEN:
        return tl.split(tl.load(ptr + at))
    else:
        return tl.split(tl.load(ptr + at, mask=mask[:, None], other=0))


@triton.jit
def _load_row(
    codes_ptr, scales_ptr, row, chunk, n, chunks,
    SQUARE: tl.constexpr, SWIZZLED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Of one row of weights: 32 codes (two int64) and their two scale bytes (int32)."""
    mask = (row < n) & (chunk < chunks)
    first, second = _load_pair(codes_ptr, row * chunks + chunk, mask, EVEN)
    if SWIZZLED:
        at = swizzle(row, chunk * 2, tl.cdiv(chunks, 2)) // 2
    elif SQUARE:
        at = (row // 16) * chunks + chunk
    else:
        at = row * chunks + chunk
    if EVEN:
        scales = tl.load(scales_ptr + at)
    else:
        scales = tl.load(scales_ptr + at, mask=mask, other=0)
    return first, second, scales.to(tl.int32)


@triton.jit
def _load_weights(
    codes_ptr, scales_ptr, row, chunk, n, chunks,
    SQUARE: tl.constexpr, SWIZZLED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The operands of the step's PTX for 16 rows of weights: of a row, and of the one eight below."""
    p0, p1, ps = _load_row(codes_ptr, scales_ptr, row, chunk, n, chunks, SQUARE, SWIZZLED, EVEN)
    q0, q1, qs = _load_row(codes_ptr, scales_ptr, row + 8, chunk, n, chunks, SQUARE, SWIZZLED, EVEN)
    return p0, p1, q0, q1, ps, qs


@triton.jit
def _load_activations(ptr, row, chunk, m, chunks):
    """32 elements of one row, as eight int64."""
    mask = (row < m) & (chunk < chunks)
    at = (row * chunks + chunk) * 4
    x0, x1 = _load_pair(ptr, at, mask, False)
    x2, x3 = _load_pair(ptr, at + 1, mask, False)
    x4, x5 = _load_pair(ptr, at + 2, mask, False)
    x6, x7 = _load_pair(ptr, at + 3, mask, False)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _step(w, x, c, COMPUTE: tl.constexpr):
    """The sums c of 16 rows of weights w and 8 rows of activations x, 128 elements further."""
    return tl.inline_asm_elementwise(
        _STEP_F16 if COMPUTE == "fp16" else _STEP_BF16, _OPERANDS, w + x + c,
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _finish(
    c0, c1, c2, c3, row_m, row_n, m, n, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Add the warps' sums, rescale and store. Of a lane: two rows of activations by two rows of weights."""
    shape: tl.constexpr = (WARPS, 32)
    c0, c1, c2, c3 = tl.reduce(
        (tl.reshape(c0, shape), tl.reshape(c1, shape), tl.reshape(c2, shape), tl.reshape(c3, shape)), 0, _add4
    )
    for i in tl.static_range(4):
        acc = c0 if i == 0 else c1 if i == 1 else c2 if i == 2 else c3
        row = row_m + i % 2
        col = row_n + i // 2 * 8
        acc = acc * (2.0**14 if COMPUTE == "fp16" else 2.0**7)  # see `_expand_word`, `_scales`
        acc = rescale(acc, row, col, m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr, A_OUTER, B_OUTER, BIAS, 0)
        store_rounded(out_ptr, row.to(tl.int64) * n + col, acc, (row < m) & (col < n), ISA)


@triton.jit
def scaled_mm_decode(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, m, n, chunks,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """out [m, n] of a [m, 32 * chunks] (bf16 or fp16, m <= 8) and b [n, 16 * chunks] (bytes of codes).

    One program: 16 rows of b; its WARPS warps (as many as the launch has) cut the contraction dimension among
    themselves. EVEN: no program and no warp has a row or a step beyond the end.
    """
    codes_ptr = b_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    scales_ptr = b_scales_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    x_ptr = a_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    lane = tl.arange(0, 32 * WARPS)
    at = lane // 32 * 4 + lane % 4
    row_m = lane % 32 // 4
    row_n = tl.program_id(0) * 16 + row_m

    zero = tl.zeros((32 * WARPS,), tl.float32)
    c = (zero, zero, zero, zero)
    steps = tl.cdiv(chunks, 4 * WARPS)
    w = _load_weights(codes_ptr, scales_ptr, row_n, at, n, chunks, B_SQUARE, B_SWIZZLED, EVEN)
    for step in tl.range(steps, loop_unroll_factor=2):
        x = _load_activations(x_ptr, row_m, step * (4 * WARPS) + at, m, chunks)
        # The next step's weights; after the last one the same again, from the cache.
        ahead = tl.minimum(step + 1, steps - 1) * (4 * WARPS) + at
        next_w = _load_weights(codes_ptr, scales_ptr, row_n, ahead, n, chunks, B_SQUARE, B_SWIZZLED, EVEN)
        c = _step(w, x, c, COMPUTE)
        w = next_w

    lane = tl.arange(0, 32)
    _finish(c[0], c[1], c[2], c[3], lane % 4 * 2, tl.program_id(0) * 16 + lane // 4, m, n,
            a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, A_OUTER, B_OUTER, BIAS, COMPUTE, WARPS, ISA)  # fmt: skip
