"""FP8 GEMM on Hopper (SM90): codes with a float32 scale for a block of 128 elements along K, a row or a matrix.

The matrix units (`wgmma`) read the codes of both operands from shared memory, and add the products of 128 elements
along K; the kernel scales these sums and adds them up in float32. It serves what the libraries do not:
- groups of rows: A by 1x128, B by 128x128 elements, as in a forward matmul and an input gradient of experts; or no
  block scales. torch's `_scaled_grouped_mm` takes row scales: 2497 microseconds for 131072 rows of 128 experts, 1536 x
  2048, 3961 for 16384 rows of eight, 28672 x 4096; this kernel 882 and 3364, bf16 1424 and 5869 (H200).
- groups along the contraction, as in a weight gradient of experts: both by 1x128, or no block scales.
- without groups, with the same scales: a result in float32 or float16, a number of columns that is no multiple of 16,
  or FP8 blocks with a bias.

8192 rows, 8192 x 8192, on an H200: 981 microseconds, the library 995 without the launch that transposes its scales,
DeepGEMM 868, bf16 1708. 1024 rows: 141, 116, 104, 188. So the library keeps what it serves.

The kernel is in `float8_kernel_sm90`. It is written in Gluon: its warps have roles, which Triton assigns on
Blackwell alone. An Inductor wrapper cannot call it, so a graph has the op `scaled_mm_opaque`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fp4compile import _compat
from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Arguments
from fp4compile.templates.device.group_tiles import ends_of, of_group, store_entry
from fp4compile.templates.gemm.call import Call, KernelOperand
from fp4compile.templates.gemm.candidate import FLOAT8, Candidate, opaque
from fp4compile.templates.launch import Launch, LaunchConfig, launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.writes import writes

NAME = "float8_sm90"
LEAST_ROWS = 64  # of a dense matmul; not timed below
_BLOCK = 128
_ENTRIES = 32  # of the table, which a program writes: each is compared with all groups
_MOST_GROUPS = 1023


@dataclass(frozen=True)
class Float8Config(LaunchConfig):
    """The launch configuration of `float8_sm90`.

    parts: warpgroups that multiply, 64 rows of A each. steps: blocks along K of a pipeline stage. stages:
    pipeline stages. group_m: row tiles that are scheduled together, so that they share the L2 cache.
    """

    parts: int
    steps: int
    stages: int
    group_m: int = 8

    @property
    def bm(self) -> int:
        """Rows of A in a tile."""
        return 64 * self.parts

    @property
    def bn(self) -> int:
        """Rows of B in a tile."""
        return _BLOCK


# 8192 x 8192 x 8192 on an H200, TFLOP/s: 1219 with three warpgroups and two blocks a stage, 1190 with one block. 128
# experts, 1536 x 2048, microseconds with one, two and three warpgroups: 82, 101 and 132 for 64 rows in all, 138, 148
# and 184 for 4096, 153, 152 and 190 for 8192, and 176 with two and 195 with three for 16384. Groups along K: the block
# scales of B's rows take 32 registers, which three warpgroups do not have.
_THREE = Float8Config(parts=3, steps=2, stages=2)
_ONE = Float8Config(parts=1, steps=2, stages=4)
_TWO = Float8Config(parts=2, steps=2, stages=3)
_ALONG_K = Float8Config(parts=2, steps=2, stages=2)  # shared memory has the scales of B's rows as well
# 8 experts of 4096 x 14336, 16384 tokens: 1632 to 1914 microseconds, `_THREE` 1748 to 2039.
_ALONG_K_OF_ROWS = Float8Config(parts=3, steps=1, stages=3)


def _config(p: Problem) -> Float8Config:
    if p.along_k:
        return _ALONG_K if _has_block_scales(p) else _ALONG_K_OF_ROWS
    if p.ragged and statically_true(p.m <= 128 * p.groups):
        return _ONE if statically_true(p.m <= 32 * p.groups) else _TWO
    return _THREE


def _has_block_scales(p: Problem) -> bool:
    return p.a.scale != "none"


def _serves(p: Problem) -> bool:
    """Whether the operands have the scales of the module's text, on compute capability 9.0, without an epilogue."""
    if p.target.sm != 90 or p.spec.epilogue is not None or not (_blocks_fit(p) or _rows_fit(p)):
        return False
    filled = all(statically_true(size > 0) for size in (p.rows, p.m, p.n, p.k))
    if p.ragged:
        return filled and p.groups <= _MOST_GROUPS
    return filled and p.batches == 1 and statically_true(p.m >= LEAST_ROWS)


def _blocks_fit(p: Problem) -> bool:
    """Whether both operands have float32 scales of the blocks that the kernel takes.

    The kernel computes offsets of block scales in 32 bits.
    """
    a, b = p.a.format, p.b.format
    if a is None or b is None or (a.scale, b.scale) != ("float32", "float32"):
        return False
    blocks = (a.block, b.block) == ((1, _BLOCK), (1, _BLOCK) if p.along_k else (_BLOCK, _BLOCK))
    return blocks and not statically_true(p.m * ceil_div(p.padded_k, _BLOCK) >= 2**31)


def _rows_fit(p: Problem) -> bool:
    """Whether both operands are FP8 codes without block scales, in rows of whole 16 bytes, which TMA copies."""
    codes = all(x.element in ("e4m3", "e5m2") and x.scale == "none" for x in (p.a, p.b))
    return codes and statically_true(p.padded_k % 16 == 0)


@writes("table_ptr")
@triton.jit
def write_table(offs_ptr, table_ptr, rows, groups, BM: tl.constexpr, ALONG_K: tl.constexpr, GROUPS: tl.constexpr,
                ENTRIES: tl.constexpr):  # fmt: skip
    """Write int32 [1 + entries, 4] to table: the number of entries, then (group, first, end) of each.

    Groups of rows: a tile of BM rows each, from row `first` on; rows from `end` on are not the group's. Rows of no
    group are group number `groups`. Groups along K: a group each, whose blocks of 128 elements are `first` to `end`.
    A program writes up to ENTRIES entries. GROUPS: a power of two above `groups`.
    """
    g = tl.arange(0, GROUPS)
    # The groups beyond the last one begin and end at the last row.
    starts = ends_of(tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= groups), other=0), rows)
    starts = tl.where(g > groups, rows, starts)
    ends = tl.where(g < groups, ends_of(tl.load(offs_ptr + g, mask=g < groups, other=0), rows), rows)
    tiles = tl.cdiv(ends - starts, BM)
    after = tl.cumsum(tiles, 0)
    if ALONG_K:
        store_entry(table_ptr + 4, g, g, after - tiles, after, g < groups)
    else:
        total = tl.max(after, 0)
        tile = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
        group = tl.sum((after[None, :] <= tile[:, None]).to(tl.int32), 1)
        first = of_group(starts, group) + (tile - of_group(after - tiles, group)) * BM
        store_entry(table_ptr + 4, tile, group, first, of_group(ends, group), tile < total)
        tl.store(table_ptr, total, mask=tl.program_id(0) == 0)


def _table(call: Call, config: Float8Config) -> torch.Tensor:
    """The table of `write_table`; without groups, a tensor that is not read."""
    p = call.problem
    if call.offs is None:
        return call.a.data
    entries = p.groups if p.along_k else ceil_div(p.m, config.bm) + p.groups
    table = call.offs.new_empty((1 + entries, 4))
    programs = 1 if p.along_k else ceil_div(entries, _ENTRIES)
    launch(write_table, programs, call.offs, table, p.rows, p.groups, num_warps=4,
           BM=_BLOCK if p.along_k else config.bm, ALONG_K=int(p.along_k), ENTRIES=_ENTRIES,
           GROUPS=triton.next_power_of_2(p.groups + 1))  # fmt: skip
    return table


def _tiles(p: Problem, config: Float8Config) -> int | torch.SymInt:
    """The most tiles that the matmul has."""
    rows = ceil_div(p.m, config.bm)
    if p.ragged:
        rows = p.groups * rows if p.along_k else rows + p.groups
    return rows * ceil_div(p.n, _BLOCK)


def _transposed(x: KernelOperand, rows) -> torch.Tensor:
    """The scales of an operand's rows of blocks, [blocks, rows], with rows padded to whole 16 bytes, for TMA."""
    blocks = ceil_div(x.k, _BLOCK)
    found = x.scales.new_empty((blocks, ceil_div(rows, 4) * 4))
    found[:, :rows] = x.scales.view(rows, blocks).t()
    return found


def _run(call: Call, config: Float8Config) -> torch.Tensor:
    p = call.problem
    if _compat.tracing():
        matrices = p.groups if p.along_k else None
        a = call.a.operand(p.m, matrices=matrices)
        b = call.b.operand(*((p.groups, p.n) if p.by_rows else (p.n,)), matrices=matrices)
        x = Arguments.of(a, b, call.bias, p.spec.out_dtype, offs=call.offs, rows=p.rows if p.along_k else None)
        return opaque(x, FLOAT8)[0]
    # Gluon has imports that a machine without Triton's NVIDIA backend lacks.
    from fp4compile.templates.gemm.float8_kernel_sm90 import gemm_float8_sm90

    out, table = call.empty(), _table(call, config)
    a_scales = b_scales = out  # or never read
    if _has_block_scales(p):
        a_scales = _transposed(call.a, p.m)
        b_scales = _transposed(call.b, p.n) if p.along_k else call.b.scales
    a_outer, b_outer = (out if x.outer is None else x.outer for x in (call.a, call.b))
    tma = out.element_size() == 2 and statically_true(p.n % 8 == 0)
    Launch(
        gemm_float8_sm90, torch.sym_min(_tiles(p, config), p.target.multiprocessors),
        (call.a.data, a_scales, a_outer, call.b.data, b_scales, b_outer, out if call.bias is None else call.bias, out,
         table, p.m, p.n, p.padded_k, p.row_bytes(p.a), p.row_bytes(p.b), p.b_matrices,
         a_scales.shape[-1], b_scales.shape[-1]),
        {"A_ELEMENT": p.a.element, "B_ELEMENT": p.b.element, "SCALES": int(_has_block_scales(p)),
         "A_OUTER": p.a.outer, "B_OUTER": p.b.outer, **config.constants,
         "GROUPS": p.groups if p.ragged else 0, "ALONG_K": int(p.along_k), "BIAS": int(call.bias is not None),
         "TMA": int(tma)},
        num_warps=4,
    ).run()  # fmt: skip
    return out


CANDIDATE = Candidate(NAME, "native", _serves, _config, _run, any_rows=True)
