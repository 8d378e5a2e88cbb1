"""The product of a few rows of 16-bit activations and NVFP4 weights, at the speed at which the weights arrive.

A decode step reads every weight once and does little else, so what counts is instructions an element, about three
here, and loads in flight. Each lane loads 16 bytes of codes (32 neighbours of a row) straight from memory into
the registers from which `mma.sync` reads its A operand; nothing goes through shared memory. That the contraction
dimension is then cut among lanes in another order than the instruction's own does not matter, as the activations come
in the same order.

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
        left, right, select, up, keep = 4, 3, "0x0E0E0E0E", 8, "0x8E008E00"
        registers = ((3, 1), (2, 0))
    else:
        left, right, select, up, keep = 8, 6, "0x01DC01DC", 4, "0x81C081C0"
        registers = ((3, 2), (1, 0))
    lines = [f"shl.b32 v, {word}, {left};"]
    for source, (upper, lower) in zip((word, "v"), registers, strict=True):
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


def _step_ptx(compute: str, groups: int) -> str:
    """Groups of 16 rows of weights times 8 rows of activations, over 128 elements, added to the sums.

    Operands: 4 sums a group, out; for each group the codes of row g (two words of 64 bits), those of row g + 8 and
    their scale bytes; eight words of 64 bits of activations; the sums; a number that is never negative.

    The branch on that number is never taken. It ends a basic block: ptxas schedules what nothing waits for last, and
    would issue the loads of the next step's operands when this step's work is done.
    """
    kind = "f16x2" if compute == "fp16" else "bf16x2"
    dtype = kind[:-2]
    sums = 4 * groups
    x = [f"${sums + 6 * groups + i}" for i in range(8)]
    before = [f"${sums + 6 * groups + 8 + i}" for i in range(sums)]
    text = ["{ .reg .pred never; .reg .b32 u, v, z, w<8>, a<4>, b<4>, s<2>, t<2>, x<4>, y<4>; .reg .b16 h, k;"
            " .reg .f32 f, g; mov.b32 z, 0x80008000;"]  # fmt: skip
    text += [f"mov.f32 ${i}, {before[i]};" for i in range(sums)]
    text.append(f"setp.lt.s32 never, ${2 * sums + 6 * groups + 8}, 0; @never bra done;")
    for group in range(groups):
        operands = [f"${sums + 6 * group + i}" for i in range(6)]
        text += [f"mov.b64 {{w{2 * i}, w{2 * i + 1}}}, {operands[i]};" for i in range(4)]
        text += [_scales(kind, operands[4], "s"), _scales(kind, operands[5], "t")]
        c = ", ".join(f"${4 * group + i}" for i in range(4))
        for word in range(4):  # of 8 codes in each row
            text += [_expand_word(kind, f"w{word}", "a"), _expand_word(kind, f"w{4 + word}", "b")]
            for j in range(4):
                for register, scale in (("a", "s"), ("b", "t")):
                    product = f"{register}{j}, {register}{j}, {scale}{word // 2}"
                    text.append(f"mul.rn.f16x2 {product};" if kind == "f16x2" else f"fma.rn.bf16x2 {product}, z;")
            text.append(f"mov.b64 {{x0, x1}}, {x[2 * word]}; mov.b64 {{x2, x3}}, {x[2 * word + 1]};")
            for j in range(4):
                text.append(f"prmt.b32 y{j}, x{j // 2}, x{2 + j // 2}, {'0x7632' if j % 2 else '0x5410'};")
            for j in (0, 2):
                text.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{{c}}},"
                    f" {{a{j}, b{j}, a{j + 1}, b{j + 1}}}, {{y{j}, y{j + 1}}}, {{{c}}};"
                )
    return " ".join(text) + " done: }"


def _operands(groups: int) -> str:
    sums = 4 * groups
    return ",".join(["=&f"] * sums + ["l", "l", "l", "l", "r", "r"] * groups + ["l"] * 8 + ["f"] * sums + ["r"])


_F16_16 = tl.constexpr(_step_ptx("fp16", 1))
_F16_32 = tl.constexpr(_step_ptx("fp16", 2))
_BF16_16 = tl.constexpr(_step_ptx("bf16", 1))
_BF16_32 = tl.constexpr(_step_ptx("bf16", 2))
_OPERANDS_16 = tl.constexpr(_operands(1))
_OPERANDS_32 = tl.constexpr(_operands(2))


@triton.jit
def _step(w, x, c, m, COMPUTE: tl.constexpr, ROWS: tl.constexpr):
    """The sums c of ROWS rows of weights w and 8 rows of activations x, 128 elements further."""
    if ROWS == 16:
        return tl.inline_asm_elementwise(
            _F16_16 if COMPUTE == "fp16" else _BF16_16, _OPERANDS_16, w + x + c + (m,),
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _F16_32 if COMPUTE == "fp16" else _BF16_32, _OPERANDS_32, w + x + c + (m,),
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _load_pair(ptr, mask, EVEN: tl.constexpr):
    """16 bytes as two int64."""
    if EVEN:
        return tl.split(tl.load(ptr))
    else:
        return tl.split(tl.load(ptr, mask=mask[:, None], other=0))


@triton.jit
def _load_group(codes_ptr, p_ptr, q_ptr, mask, q_mask, AT: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr):
    """Codes and scale bytes of the rows AT and AT + 8, as `_step_ptx` takes them."""
    p0, p1 = _load_pair(codes_ptr + AT * CHUNKS * 2, mask, EVEN)
    q0, q1 = _load_pair(codes_ptr + (AT + 8) * CHUNKS * 2, q_mask, EVEN)
    if EVEN:
        ps = tl.load(p_ptr)
        qs = tl.load(q_ptr)
    else:
        ps = tl.load(p_ptr, mask=mask, other=0)
        qs = tl.load(q_ptr, mask=q_mask, other=0)
    return p0, p1, q0, q1, ps.to(tl.int32), qs.to(tl.int32)


@triton.jit
def _load_weights(
    codes_ptr, scales_ptr, row, chunk, n,
    CHUNKS: tl.constexpr, SQUARE: tl.constexpr, SWIZZLED: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes and scales of ROWS rows from `row` on; codes_ptr is that of the lane's own row and chunk."""
    inside = chunk < CHUNKS
    w = _load_group(codes_ptr, scales_ptr + _scales_at(row, chunk, CHUNKS, SQUARE, SWIZZLED),
                    scales_ptr + _scales_at(row + 8, chunk, CHUNKS, SQUARE, SWIZZLED),
                    inside & (row < n), inside & (row + 8 < n), 0, CHUNKS, EVEN)  # fmt: skip
    if ROWS == 32:
        w = w + _load_group(codes_ptr, scales_ptr + _scales_at(row + 16, chunk, CHUNKS, SQUARE, SWIZZLED),
                            scales_ptr + _scales_at(row + 24, chunk, CHUNKS, SQUARE, SWIZZLED),
                            inside & (row + 16 < n), inside & (row + 24 < n), 16, CHUNKS, EVEN)  # fmt: skip
    return w


@triton.jit
def _scales_at(row, chunk, CHUNKS: tl.constexpr, SQUARE: tl.constexpr, SWIZZLED: tl.constexpr):
    """Where the two scale bytes of a chunk lie, in units of two bytes."""
    if SWIZZLED:
        return swizzle(row, chunk * 2, tl.cdiv(CHUNKS, 2)) // 2
    elif SQUARE:
        return row // 16 * CHUNKS + chunk
    else:
        return row * CHUNKS + chunk


@triton.jit
def _load_activations(ptr, mask):
    """32 elements, as eight int64."""
    x0, x1 = _load_pair(ptr, mask, False)
    x2, x3 = _load_pair(ptr + 2, mask, False)
    x4, x5 = _load_pair(ptr + 4, mask, False)
    x6, x7 = _load_pair(ptr + 6, mask, False)
    return x0, x1, x2, x3, x4, x5, x6, x7


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
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, m, n,
    CHUNKS: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr,
    B_SWIZZLED: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
    EVEN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """out [m, n] of a [m, 32 * CHUNKS] (bf16 or fp16, m <= 8) and b [n, 16 * CHUNKS] (bytes of codes).

    One program: ROWS (16 or 32) rows of b; its WARPS warps (as many as the launch has) cut the contraction dimension
    among themselves. EVEN: no program and no warp has a row or a step beyond the end. CHUNKS is a constant so that
    the distances between rows are immediate offsets of the loads.
    """
    lane = tl.arange(0, 32 * WARPS)
    chunk = lane // 32 * 4 + lane % 4
    row_m = lane % 32 // 4
    row_n = tl.program_id(0) * ROWS + row_m
    half = tl.arange(0, 2)[None, :]
    codes_ptr = b_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + (row_n * CHUNKS + chunk)[:, None] * 2 + half
    scales_ptr = b_scales_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    x_ptr = a_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + (row_m * CHUNKS + chunk)[:, None] * 8 + half

    zero = tl.zeros((32 * WARPS,), tl.float32)
    c = (zero, zero, zero, zero) if ROWS == 16 else (zero, zero, zero, zero, zero, zero, zero, zero)
    steps: tl.constexpr = (CHUNKS + 4 * WARPS - 1) // (4 * WARPS)
    w = _load_weights(codes_ptr, scales_ptr, row_n, chunk, n, CHUNKS, B_SQUARE, B_SWIZZLED, ROWS, EVEN)
    x = _load_activations(x_ptr, (row_m < m) & (chunk < CHUNKS))
    for step in range(steps):
        # The next step's operands; after the last one the same again, from the cache.
        ahead = tl.where(step + 1 < steps, 4 * WARPS, 0)
        chunk += ahead
        codes_ptr += ahead * 2
        x_ptr += ahead * 8
        next_w = _load_weights(codes_ptr, scales_ptr, row_n, chunk, n, CHUNKS, B_SQUARE, B_SWIZZLED, ROWS, EVEN)
        next_x = _load_activations(x_ptr, (row_m < m) & (chunk < CHUNKS))
        c = _step(w, x, c, m, COMPUTE, ROWS)
        w = next_w
        x = next_x

    lane = tl.arange(0, 32)
    row_m = lane % 4 * 2
    row_n = tl.program_id(0) * ROWS + lane // 4
    for group in tl.static_range(ROWS // 16):
        _finish(c[4 * group], c[4 * group + 1], c[4 * group + 2], c[4 * group + 3], row_m, row_n + 16 * group, m, n,
                a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, A_OUTER, B_OUTER, BIAS, COMPUTE, WARPS, ISA)  # fmt: skip
