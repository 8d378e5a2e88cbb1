"""The second kernel of a split-K matmul: it adds the programs' partial sums, in a fixed order.

On an H200 `gemm_wgmma_sm90` was slower where the last program of a tile added the tile's sums, without this kernel: 64
rows of 8192 x 8192 took 24.7 us instead of 23.7, 128 rows of 4096 x 4096 18.2 instead of 14.4. Few programs add then.
"""

import torch
import triton
import triton.language as tl

from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.apply_epilogue import epilogue, rescale, store_rounded
from fp4compile.templates.device.dependent_launch import wait
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.launch import launch
from fp4compile.templates.writes import writes


@writes("out_ptr")
@triton.jit
def split_k_reduction(
    sums_ptr, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, epilogue_0_ptr, epilogue_1_ptr, batches, m, n,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, B_BATCHED: tl.constexpr,
    EPILOGUE: tl.constexpr, SPLIT: tl.constexpr, COLS: tl.constexpr, ISA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out: the sum over the first axis of float32 sums [SPLIT, batches, m, n], rescaled, through the epilogue.

    A program computes COLS columns of one row. PDL: the kernel that makes the sums starts this one early (see
    `device.dependent_launch`).
    """
    tiles = tl.cdiv(n, COLS)
    program = tl.program_id(0)
    flat_row = program // tiles
    batch = flat_row // m
    row = flat_row % m
    col = (program % tiles) * COLS + tl.arange(0, COLS)
    mask = col < tl.where(flat_row < batches * m, n, 0)
    at = flat_row.to(tl.int64) * n + col
    stride = tl.cast(batches, tl.int64) * m * n
    acc = tl.zeros((COLS,), tl.float32)
    if PDL:
        sums_ptr = wait(sums_ptr)
    for split in tl.static_range(SPLIT):
        acc += tl.load(sums_ptr + split * stride + at, mask=mask, other=0.0)
    acc = rescale(acc, row, col, m, n, batch, a_outer_ptr, b_outer_ptr, bias_ptr, A_OUTER, B_OUTER, BIAS, B_BATCHED)
    acc = epilogue(acc, at, col, mask, n, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE, ISA)
    store_rounded(out_ptr, at, acc, mask, ISA)


def reduce_split_k(call: Call, sums: torch.Tensor, split_k: int, pdl: bool = False) -> torch.Tensor:
    """[batches, m, n] from float32 sums [split_k, batches, m, n], with rescale, bias and epilogue.

    pdl: whether the kernel that makes the sums lets this one start early; see `device.dependent_launch`.
    """
    p, cols, out = call.problem, 512, call.empty()
    launch(split_k_reduction, p.batches * p.m * ceil_div(p.n, cols), sums,
           *call.rescale_pointers(out), out, *call.epilogue_pointers(out), p.batches, p.m, p.n,
           num_warps=4, SPLIT=split_k, COLS=cols, ISA=p.target.isa, PDL=int(pdl), EPILOGUE=call.epilogue_text,
           **call.rescale_constants)  # fmt: skip
    return out
