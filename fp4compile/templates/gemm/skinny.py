"""The product of up to eight rows of 16-bit activations and NVFP4 weights, at the speed at which the weights arrive.

For those that `gemv` cannot keep in shared memory: three to eight, or longer ones.

A decode step reads every weight once and does little else, so what counts is that enough of them are on their way.
Loads into registers do not do: where one is used, ptxas waits for the newest of them, and only one step is prefetched.
So each warp keeps the operands of its next steps on their way into shared memory, by asynchronous copies into a ring of
its own; no warp waits for another before the sums are added. A program that is done with some rows of weights goes on
with others, of the next weight, too, where several are multiplied by the same activations: the ring does not run dry.

A step of a warp is 128 elements of 16 or 32 rows of weights and of the rows of activations. With 32, activations are
taken once for all of them, and more of the weights are on their way; with 16 there are twice as many programs, which
small weights need. `skinny_pipeline` has the copies, and what is taken from them into registers.

The kernel is written for one lane at a time: tensors have one dimension and one element for each lane, the only layout
that Triton can give them. Inline PTX does the rest.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.templates.device.async_copy import BARRIER, WARP_BARRIER, do_ptx, wait_ptx
from fp4compile.templates.device.epilogue import rescale, store_rounded
from fp4compile.templates.device.nvfp4_weights import (
    TILE,
    add_ptx,
    after,
    dequantize_word,
    read_weights,
    scale_registers,
)
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import SKINNY_ROWS, SkinnyConfig, skinny_config
from fp4compile.templates.gemm.problem import Problem
from fp4compile.templates.gemm.skinny_pipeline import arranged, buffer_ptx, copy_step, read_activations, stage_bytes
from fp4compile.templates.gemm.streaming import in_common, launch_group, streams


def _step_ptx(compute: str, chains: int) -> str:
    """16 rows of weights times 8 rows of activations, over 128 elements, added to the sums.

    Operands: 4 sums out; codes of row g (two words of 64 bits), of row g + 8; the scale bytes of both; eight words of
    64 bits of activations (see `skinny_pipeline`); the sums.
    chains: 1 or 2 sums that are made at a time, each product waiting for the one before it in its own.
    """
    kind = "f16x2" if compute == "fp16" else "bf16x2"
    dtype = kind[:-2]
    text = ["{ .reg .b32 u, v, z, w<8>, a<4>, b<4>, s<2>, t<2>, y<2>; .reg .b16 h, k; .reg .f32 f, g, o<4>;"]
    text.append("mov.b32 z, 0x80008000;")
    text += [f"mov.f32 ${i}, ${18 + i};" for i in range(4)]
    text += [f"mov.f32 o{i}, 0f00000000;" for i in range(4 if chains == 2 else 0)]
    text += [f"mov.b64 {{w{2 * i}, w{2 * i + 1}}}, ${4 + i};" for i in range(4)]
    text += [scale_registers(kind, "$8", "s"), scale_registers(kind, "$9", "t")]
    for word in (0, 2, 1, 3) if chains == 2 else range(4):  # of 8 codes in each row
        text += [dequantize_word(kind, f"w{word}", "a"), dequantize_word(kind, f"w{4 + word}", "b")]
        for j in range(4):
            for register, scale in (("a", "s"), ("b", "t")):
                product = f"{register}{j}, {register}{j}, {scale}{word // 2}"
                text.append(f"mul.rn.f16x2 {product};" if kind == "f16x2" else f"fma.rn.bf16x2 {product}, z;")
        sums = "{o0, o1, o2, o3}" if chains == 2 and word > 1 else "{$0, $1, $2, $3}"
        for j in (0, 2):
            text.append(
                f"mov.b64 {{y0, y1}}, ${10 + 2 * word + j // 2};"
                f" mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {sums},"
                f" {{a{j}, b{j}, a{j + 1}, b{j + 1}}}, {{y0, y1}}, {sums};"
            )
    text += [f"add.f32 ${i}, ${i}, o{i};" for i in range(4 if chains == 2 else 0)]
    return " ".join(text) + " }"


_STEPS = tl.constexpr({
    (compute, chains): _step_ptx(compute, chains) for compute in ("fp16", "bf16") for chains in (1, 2)
})  # fmt: skip
_OPERANDS = tl.constexpr(",".join(["=&f"] * 4 + ["l"] * 4 + ["r"] * 2 + ["l"] * 8 + ["f"] * 4))


@triton.constexpr_function
def _chosen(texts, compute, chains):
    return texts[compute, chains]


@triton.jit
def _step(w, x, c, COMPUTE: tl.constexpr, CHAINS: tl.constexpr):
    """The sums c of 16 rows of weights w and 8 rows of activations x, 128 elements further."""
    ptx: tl.constexpr = _chosen(_STEPS, COMPUTE, CHAINS)
    return tl.inline_asm_elementwise(
        ptx, _OPERANDS, w + x + c,
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


# In: where to, two sums, whether they are wanted. The second is of the next row of activations.
_PUT_TWO = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0; @p st.shared.v2.f32 [$1], {$2, $3}; }")


@triton.jit
def _put_sums(at, c, token, lane, TILES: tl.constexpr, ROWS: tl.constexpr):
    """A warp's sums to shared memory, those of a row of weights side by side; all warps meet. Returns a token."""
    row_m = lane % 4 * 2
    wanted = (row_m < ROWS).to(tl.int32)
    for i in tl.static_range(2 * TILES):
        to = at + ((lane % 32 // 4 + i * 8) * ROWS + row_m) * 4
        token = do_ptx(_PUT_TWO, "r,f,f,r,r", (to, c[2 * i], c[2 * i + 1], wanted, token))
    return do_ptx(BARRIER, "r", (token,))


@triton.jit
def gemm_skinny(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_1_ptr, b_scales_1_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr,
    b_2_ptr, b_scales_2_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    m, n, n_1, n_2, chunks,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, CHAINS: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """out [m, n] of a [m, 32 * chunks] (bf16 or fp16, m <= ROWS <= 8) and b [n, 16 * chunks] (bytes of codes).

    GROUP_SIZE: how many weights there are; out_1 [m, n_1] is of b_1, out_2 [m, n_2] of b_2. Those of a member that there
    is not are not read.
    chunks: even. A program takes 16 * TILES rows of b at a time, and goes on with those that lie as many programs on;
    its WARPS warps (as many as the launch has) cut the contraction dimension among themselves. STAGES: steps of a warp
    that are on their way, of the next rows, too. ROWS: 2, 4 or 8. CHAINS: see `_step_ptx`. EVEN: no program and no warp
    has a row or a step beyond the end.
    """
    slot_size: tl.constexpr = stage_bytes(TILES, ROWS)
    stage: tl.constexpr = WARPS * slot_size
    sums_size: tl.constexpr = 16 * TILES * ROWS * 4  # of a warp; those of the last rows are read beside the next ones
    size: tl.constexpr = STAGES * stage + WARPS * 2 * sums_size
    tl.static_assert(size <= 48 * 1024)  # what a program can have of static shared memory
    lane = tl.arange(0, 32 * WARPS)
    steps = tl.cdiv(chunks, 4 * WARPS)
    tiles = tl.cdiv(n, 16 * TILES)
    tiles_1 = tiles
    if GROUP_SIZE > 1:
        tiles_1 = tiles + tl.cdiv(n_1, 16 * TILES)
    total = tiles_1
    if GROUP_SIZE > 2:
        total = tiles_1 + tl.cdiv(n_2, 16 * TILES)
    memory = do_ptx(buffer_ptx(size), "r", (lane,))
    ring = memory + lane // 32 * slot_size
    sums_there = memory + STAGES * stage
    token = lane
    next_tile = tl.program_id(0)
    next_step = 0
    for early in tl.static_range(STAGES):
        token = copy_step(ring + early * stage, next_tile, next_step, token, lane, a_ptr, b_ptr, b_scales_ptr,
                           b_1_ptr, b_scales_1_ptr, b_2_ptr, b_scales_2_ptr, m, n, n_1, n_2, chunks, tiles, tiles_1,
                           total, B_SQUARE, B_SWIZZLED, WARPS, TILES, ROWS, EVEN, GROUP_SIZE)  # fmt: skip
        next_tile, next_step = after(next_tile, next_step, steps)
    if B_OUTER == "tensor":
        token = do_ptx("mov.b32 $0, 0;", "f,r", (tl.load(b_outer_ptr), token))  # it then is in the cache

    slot = ring
    sums_at = sums_there
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        c = ()
        for _ in tl.static_range(4 * TILES):
            c = c + (tl.zeros((32 * WARPS,), tl.float32),)
        for _ in tl.range(steps):
            token = do_ptx(wait_ptx(STAGES - 1), "r", (token,))
            x, token = read_activations(slot + TILES * TILE, token, lane, m)
            sums = ()
            for part in tl.static_range(TILES):
                w, token = read_weights(slot, part, token, lane)
                if part == TILES - 1:  # every lane has what it needs of the slot, which is now filled again
                    token = do_ptx(WARP_BARRIER, "r", (token,))
                    token = copy_step(slot, next_tile, next_step, token, lane, a_ptr, b_ptr, b_scales_ptr, b_1_ptr,
                                       b_scales_1_ptr, b_2_ptr, b_scales_2_ptr, m, n, n_1, n_2, chunks, tiles, tiles_1,
                                       total, B_SQUARE, B_SWIZZLED, WARPS, TILES, ROWS, EVEN, GROUP_SIZE)  # fmt: skip
                    next_tile, next_step = after(next_tile, next_step, steps)
                if part == 0:
                    x = arranged(x)
                sums = sums + _step(w, x, c[4 * part : 4 * part + 4], COMPUTE, CHAINS)
            c = sums
            slot = tl.where(slot == ring + (STAGES - 1) * stage, ring, slot + stage)
        token = _put_sums(sums_at + lane // 32 * sums_size, c, token, lane, TILES, ROWS)
        token = _finish(sums_at, tile, token, lane, m, n, n_1, n_2, tiles, tiles_1, a_outer_ptr, b_outer_ptr, bias_ptr,
                        out_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
                        A_OUTER, B_OUTER, BIAS, COMPUTE, WARPS, TILES, ROWS, ISA, GROUP_SIZE)  # fmt: skip
        sums_at = tl.where(sums_at == sums_there, sums_there + WARPS * sums_size, sums_there)


@triton.jit
def _finish(
    sums_at, tile, token, lane, m, n, n_1, n_2, tiles, tiles_1, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_outer_1_ptr, bias_1_ptr, out_1_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, ISA: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Add the warps' sums of a tile, rescale and store. Returns a token."""
    # Selects, not branches: where torch finds out what a kernel writes, a size is a constant, which none may change.
    # Here and in `copy_step`: it takes a pointer that goes through a function's result for written.
    if GROUP_SIZE > 2:
        last = tile >= tiles_1
        tiles = tl.where(last, tiles_1, tiles)
        b_outer_1_ptr = tl.where(last, b_outer_2_ptr, b_outer_1_ptr)
        bias_1_ptr = tl.where(last, bias_2_ptr, bias_1_ptr)
        out_1_ptr = tl.where(last, out_2_ptr, out_1_ptr)
        n_1 = tl.where(last, n_2, n_1)
    if GROUP_SIZE > 1:
        later = tile >= tiles
        tile = tl.where(later, tile - tiles, tile)
        b_outer_ptr = tl.where(later, b_outer_1_ptr, b_outer_ptr)
        bias_ptr = tl.where(later, bias_1_ptr, bias_ptr)
        out_ptr = tl.where(later, out_1_ptr, out_ptr)
        n = tl.where(later, n_1, n)
    count: tl.constexpr = 16 * TILES * ROWS
    for first in tl.static_range(0, count, 32 * WARPS):
        place = first + lane
        at_m = place % ROWS
        at_n = tile * (16 * TILES) + place // ROWS
        acc = tl.inline_asm_elementwise(
            add_ptx(WARPS, count * 4), "=&f,r,r", (sums_at + place % count * 4, token), dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
        token = do_ptx("mov.b32 $0, 0;", "f,r", (acc, token))  # what is read before the warps meet again
        acc = acc * (2.0**14 if COMPUTE == "fp16" else 2.0**7)  # see `dequantize_word`, `scale_registers`
        acc = rescale(acc, at_m, at_n, m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr, A_OUTER, B_OUTER, BIAS, 0)
        here = (at_m < m) & (at_n < n) & (place < count)
        store_rounded(out_ptr, at_m.to(tl.int64) * n + at_n, acc, here, ISA)
    return token


def _serves(p: Problem) -> bool:
    return statically_true(p.m <= SKINNY_ROWS) and p.target.isa > 0 and streams(p)


def _run_group(calls: Sequence[Call], config: SkinnyConfig) -> list[torch.Tensor]:
    return launch_group(gemm_skinny, calls, config, 16 * config.tiles, 128)


CANDIDATE = Candidate(
    "skinny", "emulated", _serves, skinny_config, lambda call, config: _run_group([call], config)[0],
    dequantizes_a=True, group_with=in_common, run_group=_run_group,
)  # fmt: skip
