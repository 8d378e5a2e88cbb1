"""2-CTA block-scaled GEMM: the matmuls of `gemm.block_scaled_sm100`, where each CTA loads half of B (SM100).

Two CTAs of a cluster compute a tile of 256x256, and each stores half of its rows. A 2-CTA matrix instruction reads the
two halves of B from the shared memory of both. So a CTA loads 256 rows of operands for 128x256 results, where the 1-CTA
kernel loads 384 (`heuristics.TwoCtaConfig`).

An epilogue may quantise its result, or find its amax, as in the 1-CTA kernel (`device.quantized_epilogue`). TMA stores
the block scales of a tile as well, from shared memory. Of gate and up (`Problem.pair`), each CTA loads one.

With groups of rows, the tile of a CTA pair begins at a row of its group. Rows beyond the group's end are multiplied and
not stored.

The kernel is in `two_cta_kernel_sm100`. It is written in Gluon: `tl.dot_scaled` does not compile for clusters. An
Inductor wrapper cannot call it, so a graph has the op `scaled_mm_opaque`.

It has not run on a GPU yet. So only `max-autotune` chooses it, by timing.
"""

import torch

from fp4compile import _compat
from fp4compile._compat import statically_true
from fp4compile.formats.epilogue import PARTIAL_MAXIMA
from fp4compile.formats.grouping import padded_rows
from fp4compile.formats.layouts import TILE_ROWS, ceil_div
from fp4compile.formats.operand import Arguments
from fp4compile.templates.gemm import block_scaled_sm100, cost
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import TWO_CTAS, Candidate, opaque
from fp4compile.templates.gemm.heuristics import TwoCtaConfig, tma_copies, two_cta_config
from fp4compile.templates.launch import Launch
from fp4compile.templates.problem import Problem

NAME = "block_scaled_two_ctas_sm100"
PART_COLS = 64  # columns that are quantised at a time: a thread has half of them, a block of MX or two of NVFP4
MOST_GROUPS = 512  # whose offsets fit the registers of the warp that loads


def _serves(p: Problem) -> bool:
    """Whether the 1-CTA kernel serves the matmul, dense or of groups, by TMA, and this one stores the result."""
    if not p.ragged:
        fits = statically_true(p.batches == 1)
    else:
        fits = p.by_rows and p.groups <= MOST_GROUPS and _compat.two_cta_products_of_groups()
    return fits and _one_cta(p).takes(p) and _stores(p)


def _one_cta(p: Problem) -> Candidate:
    return block_scaled_sm100.CANDIDATE if not p.ragged else block_scaled_sm100.GROUPED


def _stores(p: Problem) -> bool:
    """Whether rows of the result are multiples of 16 bytes, on a GPU whose code was simulated.

    Offsets within a tile of 256 rows are 32-bit numbers. Code that the simulator cannot run is excluded: on compute
    capability 10.3, Gluon multiplies two FP4 operands by an instruction of 96 elements along K.
    """
    if not (p.target.sm in (100, 103) and _compat.two_cta_products()):
        return False
    if p.target.sm == 103 and p.a.format.packed and p.b.format.packed:
        return False
    rows = statically_true(p.k > 0) and tma_copies((p.a.format, p.row_bytes(p.a)), (p.b.format, p.row_bytes(p.b)))
    stored = 2 * p.n
    if p.spec.result is not None:
        stored = (
            ceil_div(p.n, p.spec.result.block_cols) * p.spec.result.block_cols // (2 if p.spec.result.packed else 1)
        )
    return rows and statically_true(stored % 16 == 0) and not statically_true(p.n >= 2**23)


def _quantizes(p: Problem) -> bool:
    """Whether the epilogue can quantise: without groups, and with up to 4 bytes of operands per element: no spills."""
    return not p.ragged and p.operand_bytes <= 4


def _finds_amax(p: Problem) -> bool:
    """Whether the epilogue can find the amax: n is a multiple of a part's columns, so none are out of bounds."""
    return _quantizes(p) and statically_true(p.n % PART_COLS == 0)


def _to_time(p: Problem) -> tuple[TwoCtaConfig, ...]:
    """Empty where larger tiles are not expected to pay: they may be half empty, or fill fewer multiprocessors."""
    config = two_cta_config(p)
    return (config,) if cost.two_ctas_pay(p, config, _one_cta(p).configure(p)) else ()


def _run(call: Call, config: TwoCtaConfig) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    p = call.problem
    if _compat.tracing():
        b_rows = (p.b_rows,) if not p.ragged else (p.groups, p.n)
        auxiliaries = [each.view(-1) if statically_true(each.numel() == p.n) else each.view(p.m, p.n)
                       for each in call.auxiliaries]  # fmt: skip
        x = Arguments.of(call.a.operand(p.m), call.b.operand(*b_rows), call.bias, p.spec.out_dtype, call.epilogue,
                         auxiliaries, call.result_outer, call.offs)  # fmt: skip
        first, *more = opaque(x, TWO_CTAS)
        return (first, *more) if more else first
    # Gluon of an old Triton lacks imports of the kernel's file.
    from fp4compile.templates.gemm.two_cta_kernel_sm100 import gemm_block_scaled_two_ctas_sm100

    out, scales = call.empty_results()
    part_cols = PART_COLS if p.spec.result is not None else 128 // out.element_size()
    a_outer, b_outer, bias = call.rescale_pointers(out)
    rescale = {name: value for name, value in call.rescale_constants.items() if name != "B_BATCHED"}
    groups = 0 if not p.ragged else p.groups
    columns = config.bn // 2 if p.spec.pair else config.bn  # of a tile
    tiles = (ceil_div(p.m, config.bm) + groups) * ceil_div(p.n, columns)  # with groups, at most
    pairs = max(min(p.target.multiprocessors, PARTIAL_MAXIMA) // 2, 1)
    a_scale_rows = padded_rows(p.m, groups) if groups else p.m
    outer_step = call.b.outer.stride(0) if p.outer_of_each_matrix else 1
    Launch(
        gemm_block_scaled_two_ctas_sm100, torch.sym_min(tiles, pairs),
        (call.a.data, call.a.scales, a_outer, call.b.data, call.b.scales, b_outer, bias, out, scales,
         out if call.result_outer is None else call.result_outer, *call.epilogue_pointers(out),
         outer_step, p.m, p.n, p.row_bytes(p.a), p.row_bytes(p.b), ceil_div(p.k, config.bk),
         ceil_div(a_scale_rows, TILE_ROWS), ceil_div(p.n, TILE_ROWS), ceil_div(ceil_div(p.k, p.a.format.block_cols), 4),
         call.offs),
        {"A_ELEMENT": p.a.element, "B_ELEMENT": p.b.element, "SCALE": p.a.scale, "BLOCK": p.a.format.block_cols,
         **rescale, "PAIR": int(p.spec.pair), "EPILOGUE": call.epilogue_text, **config.constants,
         "PART_COLS": part_cols, "EVEN_BLOCKS": int(call.even_blocks), "MAXIMA": PARTIAL_MAXIMA, "ISA": p.target.isa,
         "GROUPS": groups},
        config.num_warps, num_ctas=2,
    ).run()  # fmt: skip
    return out if out is scales else (out, scales)


CANDIDATE = Candidate(NAME, "native", _serves, two_cta_config, _run, _to_time,
                      takes_epilogue=lambda p: not p.ragged, quantizes=_quantizes, finds_amax=_finds_amax,
                      any_rows=True)  # fmt: skip
