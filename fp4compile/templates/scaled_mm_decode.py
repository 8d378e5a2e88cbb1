"""The product of up to eight rows of 16-bit activations and NVFP4 weights, at the speed at which the weights arrive.

A decode step reads every weight once and does little else, so what counts is that enough of them are on their way.
Loads into registers do not do: where one is used, ptxas waits for the newest of them, and only one step is prefetched.
So each warp keeps the operands of its next steps on their way into shared memory, by asynchronous copies into a ring of
its own; no warp waits for another before the sums are added.

A step of a warp is 128 elements of 16 rows of weights and of the rows of activations. As `mma.sync` has it, lane
4 * g + q takes rows g and g + 8 of the weights, and row g of the activations, from the ring into registers. Of the
eight blocks of 16 elements it takes those at q and q + 4; the instruction has other elements there, which does not
matter as both operands are cut among lanes in the same way.

The kernel is written for one lane at a time: tensors have one dimension and one element for each lane, the only layout
that Triton can give them. Inline PTX does the rest. To Inductor, which would take a kernel with side effects to write
all of its arguments, the PTX is pure; a value handed from one piece to the next (`token`) keeps their order.
"""

import triton
import triton.language as tl

from fp4compile.templates.quantize_rows import swizzle
from fp4compile.templates.scaled_mm_tiles import rescale, store_rounded


def expand_word(kind: str, word: str, out: str) -> str:
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


def _step_ptx(compute: str) -> str:
    """16 rows of weights times 8 rows of activations, over 128 elements, added to the sums.

    Operands: 4 sums out; codes of row g (two words of 64 bits), of row g + 8; the scale bytes of both; eight words of
    64 bits of activations (see `_arrange_ptx`); the sums.
    """
    kind = "f16x2" if compute == "fp16" else "bf16x2"
    dtype = kind[:-2]
    text = ["{ .reg .b32 u, v, z, w<8>, a<4>, b<4>, s<2>, t<2>, y<2>; .reg .b16 h, k; .reg .f32 f, g;"]
    text.append("mov.b32 z, 0x80008000;")
    text += [f"mov.f32 ${i}, ${18 + i};" for i in range(4)]
    text += [f"mov.b64 {{w{2 * i}, w{2 * i + 1}}}, ${4 + i};" for i in range(4)]
    text += [scale_registers(kind, "$8", "s"), scale_registers(kind, "$9", "t")]
    for word in range(4):  # of 8 codes in each row
        text += [expand_word(kind, f"w{word}", "a"), expand_word(kind, f"w{4 + word}", "b")]
        for j in range(4):
            for register, scale in (("a", "s"), ("b", "t")):
                product = f"{register}{j}, {register}{j}, {scale}{word // 2}"
                text.append(f"mul.rn.f16x2 {product};" if kind == "f16x2" else f"fma.rn.bf16x2 {product}, z;")
        for j in (0, 2):
            text.append(
                f"mov.b64 {{y0, y1}}, ${10 + 2 * word + j // 2};"
                f" mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{$0, $1, $2, $3}},"
                f" {{a{j}, b{j}, a{j + 1}, b{j + 1}}}, {{y0, y1}}, {{$0, $1, $2, $3}};"
            )
    return " ".join(text) + " }"


def _arrange_ptx() -> str:
    """32 activations in eight words of 64 bits -> the same, elements j and j + 4 of every eight next to each other."""
    text = ["{ .reg .b32 x<4>, y<4>;"]
    for word in range(4):
        text.append(f"mov.b64 {{x0, x1}}, ${8 + 2 * word}; mov.b64 {{x2, x3}}, ${9 + 2 * word};")
        for j in range(4):
            text.append(f"prmt.b32 y{j}, x{j // 2}, x{2 + j // 2}, {'0x7632' if j % 2 else '0x5410'};")
        text.append(f"mov.b64 ${2 * word}, {{y0, y1}}; mov.b64 ${2 * word + 1}, {{y2, y3}};")
    return " ".join(text) + " }"


_STEP_F16 = tl.constexpr(_step_ptx("fp16"))
_STEP_BF16 = tl.constexpr(_step_ptx("bf16"))
_OPERANDS = tl.constexpr(",".join(["=&f"] * 4 + ["l"] * 4 + ["r"] * 2 + ["l"] * 8 + ["f"] * 4))
_ARRANGE = tl.constexpr(_arrange_ptx())
_ARRANGE_OPERANDS = tl.constexpr(",".join(["=&l"] * 8 + ["l"] * 8))

# Bytes in a slot of the ring, which holds a warp's step: codes of the upper eight rows of weights, of the lower ones,
# scales of both in the same way, then rows of activations.
_CODES_ROW = tl.constexpr(64)
_CODES_LOWER = 512
_SCALES = tl.constexpr(1024)
_SCALES_ROW = tl.constexpr(8)
_SCALES_LOWER = 64
_ACTIVATIONS = tl.constexpr(1152)
_ACTIVATIONS_ROW = tl.constexpr(256)

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
# In: where to, where from; what of it to copy, the rest being zeros; whether to copy at all.
_COPY_X_EVEN = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; @p cp.async.ca.shared.global [$1], [$2], 16; }"
)
_COPY_X = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0; @p cp.async.ca.shared.global [$1], [$2], 16, $3; }"
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
# Out: activations of a lane's two blocks, eight words of 64 bits, zeros where there is no row; a token. In: their
# address, whether there is a row, a token. Without the zeros ptxas keeps what was there in registers of its own.
_TAKE_X = tl.constexpr(
    "{ .reg .pred p; .reg .b32 b; setp.ne.b32 p, $10, 0; xor.b32 b, $9, 16; mov.b32 $8, 0; "
    + " ".join(f"mov.b64 ${i}, 0;" for i in range(8))
    + " @p ld.shared.v2.b64 {$0, $1}, [$9]; @p ld.shared.v2.b64 {$2, $3}, [b];"
    " @p ld.shared.v2.b64 {$4, $5}, [$9 + 128]; @p ld.shared.v2.b64 {$6, $7}, [b + 128]; }"
)
COMMIT = tl.constexpr("cp.async.commit_group; mov.b32 $0, 0;")
SYNC_WARP = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, 0;")


@triton.constexpr_function
def _ring_ptx(size):
    return f"{{ .shared .align 128 .b8 ring[{size}]; mov.u32 $0, ring; }}"


@triton.constexpr_function
def wait_ptx(groups):
    return f"cp.async.wait_group {groups}; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"


@triton.jit
def do(text: tl.constexpr, operands: tl.constexpr, values):
    """PTX for its effect, or what it leaves in $0; the last of the values is the token of what must come before."""
    return tl.inline_asm_elementwise(text, "=&r," + operands, values, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def start_weights(
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
        token = do(_COPY_EVEN, "r,r,l,l,l,r,r", places + (ok.to(tl.int32), token))
    else:
        here = there & (chunk < chunks)
        ok_scales = there & (unit * 2 < chunks) & (of_scales < n)
        of_upper = (here & (upper < n)).to(tl.int32) * 16
        of_lower = (here & (upper + 8 < n)).to(tl.int32) * 16
        sizes = (of_upper, of_lower, ok_scales.to(tl.int32) * 4)
        token = do(_COPY, "r,r,l,l,l,r,r,r,r", places + sizes + (token,))
    return token


@triton.jit
def _start_activations(
    at, step, token, lane, a_ptr, m, chunks, steps, WARPS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr
):
    """Start to copy the activations of a warp's step into the ring: of the rows that there are, 16 lanes a row."""
    unit = lane % 16
    block = (step * WARPS + lane // 32) * 8 + unit // 2
    for i in tl.static_range((ROWS + 1) // 2):
        row = lane % 32 // 16 + i * 2
        source = a_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + row * chunks * 64 + block * 32 + unit % 2 * 16
        # Halves of blocks are exchanged in every second row: lanes then read from banks of their own.
        to = at + row * _ACTIVATIONS_ROW + (unit ^ row % 2) * 16
        ok = row < m
        if EVEN:
            ok = ok & (step < steps)
            token = do(_COPY_X_EVEN, "r,l,r,r", (to, source, ok.to(tl.int32), token))
        else:
            size = tl.where(block < chunks * 2, 16, 0)
            token = do(_COPY_X, "r,l,r,r,r", (to, source, size, ok.to(tl.int32), token))
    return token


@triton.jit
def _start(
    slot, step, token, lane, row, a_ptr, b_ptr, b_scales_ptr, m, n, chunks, steps,
    B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Start the copies of a warp's step into a slot of the ring; there is a group of them also past the last step."""
    token = start_weights(slot, step * WARPS + lane // 32, step < steps, token, lane, row, b_ptr, b_scales_ptr,
                          n, chunks, B_SQUARE, B_SWIZZLED, EVEN)  # fmt: skip
    token = _start_activations(slot + _ACTIVATIONS, step, token, lane, a_ptr, m, chunks, steps, WARPS, ROWS, EVEN)
    return do(COMMIT, "r", (token,))


@triton.jit
def take_weights(slot, token, lane):
    """A step's weights as the step's PTX takes them, from the slot where they have arrived; and a token."""
    g = lane % 32 // 4
    q = lane % 4
    first = slot + g * _CODES_ROW + (q // 2 ^ (g // 2 % 2 * 2)) * 16 + q % 2 * 8
    second = slot + g * _CODES_ROW + (q // 2 ^ 2 ^ (g // 2 % 2 * 2)) * 16 + q % 2 * 8
    taken = tl.inline_asm_elementwise(
        _TAKE, "=&l,=&l,=&l,=&l,=&r,=&r,=&r,r,r,r,r,r",
        (first, second, slot + _SCALES + g * _SCALES_ROW, q | (q + 4) << 4, token),
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return taken[0:6], taken[6]


@triton.jit
def _take_activations(at, token, lane, m):
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
def _arrange(x):
    """Activations as they were copied -> as the step's PTX takes them."""
    return tl.inline_asm_elementwise(
        _ARRANGE, _ARRANGE_OPERANDS, x,
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64), is_pure=True, pack=1,
    )  # fmt: skip


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
    c, row, m, n, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Add the warps' sums, rescale and store: all loads first, as none may pass a store. row: the program's first."""
    shape: tl.constexpr = (WARPS, 32)
    c0, c1, c2, c3 = c
    c0, c1, c2, c3 = tl.reshape(c0, shape), tl.reshape(c1, shape), tl.reshape(c2, shape), tl.reshape(c3, shape)
    sums = tl.reduce((c0, c1, c2, c3), 0, _add4)
    lane = tl.arange(0, 32)
    row_m = lane % 4 * 2
    row_n = row + lane // 4
    values = ()
    for i in tl.static_range(4):
        acc = sums[i] * (2.0**14 if COMPUTE == "fp16" else 2.0**7)  # see `expand_word`, `scale_registers`
        acc = rescale(acc, row_m + i % 2, row_n + i // 2 * 8, m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr,
                      A_OUTER, B_OUTER, BIAS, 0)  # fmt: skip
        values = values + (acc,)
    for i in tl.static_range(4):
        at_m = row_m + i % 2
        at_n = row_n + i // 2 * 8
        store_rounded(out_ptr, at_m.to(tl.int64) * n + at_n, values[i], (at_m < m) & (at_n < n), ISA)


@triton.jit
def decode_rows(
    row, a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, m, n, chunks,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """The product with 16 rows of b, from `row` on: what a program of `scaled_mm_decode` does."""
    slot_bytes: tl.constexpr = _ACTIVATIONS + ROWS * _ACTIVATIONS_ROW
    stage: tl.constexpr = WARPS * slot_bytes
    # A program with static shared memory has 48 KiB in all, of which Triton takes 16 bytes a lane for the sums.
    tl.static_assert(STAGES * stage + WARPS * 512 <= 48 * 1024)
    lane = tl.arange(0, 32 * WARPS)
    steps = tl.cdiv(chunks, 4 * WARPS)
    ring = do(_ring_ptx(STAGES * stage), "r", (lane,)) + lane // 32 * slot_bytes
    token = lane
    for early in tl.static_range(STAGES):
        token = _start(ring + early * stage, early, token, lane, row, a_ptr, b_ptr, b_scales_ptr, m, n, chunks, steps,
                       B_SQUARE, B_SWIZZLED, WARPS, ROWS, EVEN)  # fmt: skip
    if B_OUTER == "tensor":
        token = do("mov.b32 $0, 0;", "f,r", (tl.load(b_outer_ptr), token))  # `_finish` then need not wait for it

    zero = tl.zeros((32 * WARPS,), tl.float32)
    c = (zero, zero, zero, zero)
    slot = ring
    for step in tl.range(steps):
        token = do(wait_ptx(STAGES - 1), "r", (token,))
        x, token = _take_activations(slot + _ACTIVATIONS, token, lane, m)
        w, token = take_weights(slot, token, lane)
        token = do(SYNC_WARP, "r", (token,))  # every lane has what it needs of the slot, which is now filled again
        token = _start(slot, step + STAGES, token, lane, row, a_ptr, b_ptr, b_scales_ptr, m, n, chunks, steps,
                       B_SQUARE, B_SWIZZLED, WARPS, ROWS, EVEN)  # fmt: skip
        c = _step(w, _arrange(x), c, COMPUTE)
        slot = tl.where(slot == ring + (STAGES - 1) * stage, ring, slot + stage)
    _finish(c, row, m, n, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, A_OUTER, B_OUTER, BIAS, COMPUTE, WARPS, ISA)


@triton.jit
def scaled_mm_decode(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, m, n, chunks,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """out [m, n] of a [m, 32 * chunks] (bf16 or fp16, m <= ROWS <= 8) and b [n, 16 * chunks] (bytes of codes).

    chunks: even. One program: 16 rows of b; its WARPS warps (as many as the launch has) cut the contraction dimension
    among themselves. STAGES: steps of a warp that are on their way. EVEN: no program and no warp has a row or a step
    beyond the end.
    """
    decode_rows(tl.program_id(0) * 16, a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
                m, n, chunks, A_OUTER, B_OUTER, B_SQUARE, B_SWIZZLED, BIAS, COMPUTE, WARPS, STAGES, ROWS,
                EVEN, ISA)  # fmt: skip
