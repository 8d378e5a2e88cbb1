"""The arithmetic of matmuls with few rows of A, written one lane at a time: a warp's step, and its sums."""

import triton
import triton.language as tl

from fp4compile.templates.device.async_copy import BARRIER, do_ptx, select_ptx
from fp4compile.templates.device.fp4_weights import SCALE_REGISTERS, scale_registers, scaled_word, type_of_scales


def _multiply_step_ptx(compute: str, chains: int, scale: str) -> str:
    """PTX that adds the product of 16 rows of B and 8 rows of A over 128 elements to a lane's sums.

    Outputs: four sums. Inputs: codes of row g (two words of 64 bits), codes of row g + 8; the scale bytes of both rows;
    eight words of 64 bits of A (see `interleave_a`); the four sums so far.
    chains: 1 or 2 independent accumulators. `mma.sync` waits for the previous one on the same accumulator.
    """
    kind = "f16x2" if compute == "fp16" else "bf16x2"
    dtype = kind[:-2]
    text = ["{ .reg .b32 w<8>, a<4>, b<4>, y<2>; .reg .f32 o<4>;", SCALE_REGISTERS]
    text += [f"mov.f32 ${i}, ${18 + i};" for i in range(4)]
    text += [f"mov.f32 o{i}, 0f00000000;" for i in range(4 if chains == 2 else 0)]
    text += [f"mov.b64 {{w{2 * i}, w{2 * i + 1}}}, ${4 + i};" for i in range(4)]
    text.append(scale_registers(kind, scale, "$8", "$9"))
    for word in (0, 2, 1, 3) if chains == 2 else range(4):  # of 8 codes in each row
        text.append(scaled_word(kind, scale, word, "a", "b"))
        sums = "{o0, o1, o2, o3}" if chains == 2 and word > 1 else "{$0, $1, $2, $3}"
        for j in (0, 2):
            text.append(
                f"mov.b64 {{y0, y1}}, ${10 + 2 * word + j // 2};"
                f" mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {sums},"
                f" {{a{j}, b{j}, a{j + 1}, b{j + 1}}}, {{y0, y1}}, {sums};"
            )
    text += [f"add.f32 ${i}, ${i}, o{i};" for i in range(4 if chains == 2 else 0)]
    return " ".join(text) + " }"


_MULTIPLY_STEP = tl.constexpr({
    (compute, scale, chains): _multiply_step_ptx(compute, chains, scale)
    for compute, scale in (("fp16", "e4m3"), ("bf16", "e4m3"), ("bf16", "e8m0")) for chains in (1, 2)
})  # fmt: skip
_MULTIPLY_STEP_OPERANDS = tl.constexpr(",".join(["=&f"] * 4 + ["l"] * 4 + ["r"] * 2 + ["l"] * 8 + ["f"] * 4))


@triton.jit
def multiply_step(w, x, c, COMPUTE: tl.constexpr, SCALES: tl.constexpr, CHAINS: tl.constexpr):
    """A lane's four sums c plus the products of a step's B (w) and A (x)."""
    ptx: tl.constexpr = select_ptx(_MULTIPLY_STEP, COMPUTE, type_of_scales(SCALES), CHAINS)
    return tl.inline_asm_elementwise(
        ptx, _MULTIPLY_STEP_OPERANDS, w + x + c,
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


# Inputs: the destination, two sums, whether their rows of A exist, a token. The second sum is for the next row of A.
_STORE_TWO_SUMS = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0; @p st.shared.v2.f32 [$1], {$2, $3}; }"
)


@triton.jit
def store_sums(at, c, token, lane, TILES: tl.constexpr, ROWS: tl.constexpr):
    """Store a warp's sums to shared memory as [16 * TILES, ROWS], then wait for all warps. Returns a token."""
    row_m = lane % 4 * 2
    wanted = (row_m < ROWS).to(tl.int32)
    for i in tl.static_range(2 * TILES):
        to = at + ((lane % 32 // 4 + i * 8) * ROWS + row_m) * 4
        token = do_ptx(_STORE_TWO_SUMS, "r,f,f,r,r", (to, c[2 * i], c[2 * i + 1], wanted, token))
    return do_ptx(BARRIER, "r", (token,))
