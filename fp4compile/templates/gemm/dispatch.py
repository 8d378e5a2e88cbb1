"""Multiply quantised CUDA tensors: which kernel, with what tile, on what view of the operands.

`scaled_mm` allocates its output and launches kernels; it runs eagerly and under tracing, on concrete and on symbolic
sizes. The product is that of `reference.scaled_mm`, up to the order of the float32 sums; only that of two
`float8_rowwise` operands is left to the FP8 matrix units, whose sums on Hopper are less exact than float32.
"""

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch

from fp4compile import reference
from fp4compile._compat import statically_true, tracing
from fp4compile.formats import BlockFormat
from fp4compile.layouts import ceil_div
from fp4compile.targets import Target
from fp4compile.templates.device.epilogue import OPERANDS, Epilogue
from fp4compile.templates.gemm.block_scaled_sm100 import gemm_block_scaled_sm100, native, native_arguments
from fp4compile.templates.gemm.dequant_operand import dequant_operand
from fp4compile.templates.gemm.dequant_tiles import gemm_dequant_tiles, split_k_reduction
from fp4compile.templates.gemm.gemv import WIDTH, gemv
from fp4compile.templates.gemm.heuristics import (
    DECODE_ROWS,
    WGMMA_ROWS,
    decode_config,
    few_config,
    tile_of,
    wgmma_config,
    wgmma_shared,
)
from fp4compile.templates.gemm.problem import FLOATS, Operand, Problem, compute_type, problem_of
from fp4compile.templates.gemm.skinny import MOST_IN_GROUP, gemm_skinny
from fp4compile.templates.gemm.swizzled_a_sm90 import swizzle_a_sm90
from fp4compile.templates.gemm.wgmma_sm90 import gemm_wgmma_sm90
from fp4compile.templates.launch import launch, target_of

# Rows of A from which on the library's product of expanded operands is the faster one. On an H200 with N = K = 8192,
# 128 rows take 90 us so and 146 us (codes) to 191 us (plain A) in one kernel, 2048 rows 410 us and 870 us.
LIBRARY_ROWS = 65
# The library's product is made whole where that takes at most WHOLE_BYTES beside operands, output and the operand that
# is expanded first (four times as much for up to FEW_LINES of that one), else in parts of about PART_BYTES. A part has
# at least LEAST_LINES rows or columns and LEAST_RESULTS results: smaller ones do not fill the GPU, and take longer to
# launch than to compute. On an H200 with M = N = K = 8192, NVFP4 weights and bf16 activations, four parts take 1481 us
# and the whole 1578: what is expanded and summed stays in the cache. With M = 2048, N = 14336, K = 4096 seven parts
# take 421 us and the whole 388.
WHOLE_BYTES, FEW_LINES = 2**26, 2048
PART_BYTES, LEAST_LINES, LEAST_RESULTS = 2**24, 2048, 2**22


class ChosenWhenRun(Exception):
    """Raised while tracing: which kernels are launched, or how often, is left to the op when the graph runs."""


def scaled_mm(
    a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype, epilogue: Epilogue | None = None
) -> torch.Tensor:
    """`reference.scaled_mm` on the GPU: [..., M, K] x [..., N, K] (or [N, K] for every batch) -> [..., M, N].

    epilogue: what happens to the product, in out_dtype, before it is stored; only where `takes_epilogue`.
    Raises ValueError or TypeError, naming the argument, for operands, scales, a bias or an epilogue that do not fit.
    """
    arguments = a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype
    if a_fmt is None and b_fmt is None:
        if epilogue is not None:
            raise ValueError("epilogue: the product of two plain operands is the library's, which takes none")
        return reference.scaled_mm(*arguments)
    problem = problem_of(*arguments)
    if epilogue is not None:
        problem = replace(problem, epilogue=_checked(epilogue, problem))
    if statically_true(problem.m * problem.n * problem.batches == 0):
        return a.new_empty(problem.shape, dtype=problem.stored_dtype)
    return _product(problem).view(problem.shape)


def takes_epilogue(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype) -> bool:
    """Whether the kernel that serves these arguments of `scaled_mm` is known, and has an epilogue. Launches nothing."""
    if a_fmt is None and b_fmt is None:
        return False
    problem = problem_of(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype)
    return _settled(problem) and _takes_epilogue(problem)


def expands_first(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype) -> bool:
    """Whether these arguments of `scaled_mm` are two quantised operands of which A is expanded in memory first.

    Of a symbolic number of rows: whatever kernel serves. Launches nothing.
    """
    if a_fmt is None or b_fmt is None:
        return False
    p = problem_of(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype)
    rows = (p.m,) if _settled(p) else (1, WGMMA_ROWS, LIBRARY_ROWS)
    return {_server(replace(p, m=m), False) for m in rows} <= {_decode, _wgmma, _library}


def _checked(epilogue: Epilogue, p: Problem) -> Epilogue:
    """The epilogue with operands as the kernels read them. Raises ValueError where it does not go with the problem."""
    if not _takes_epilogue(p):
        raise ValueError("epilogue: the kernel that serves this product takes none")
    if len(epilogue.operands) > OPERANDS:
        raise ValueError(f"epilogue: at most {OPERANDS} operands, got {len(epilogue.operands)}")
    for x in epilogue.operands:
        whole = statically_true(x.numel() == p.batches * p.m * p.n)
        if not (whole or statically_true(x.numel() == p.n)) or x.dtype not in FLOATS or x.device != p.left.data.device:
            raise ValueError(f"epilogue: expected floating-point operands of the product's size or of {p.n} elements on "
                             f"{p.left.data.device}, got {x.dtype} of {tuple(x.shape)} on {x.device}")  # fmt: skip
    if epilogue.dtype not in FLOATS:
        raise ValueError(f"epilogue: dtype {epilogue.dtype}; allowed are bfloat16, float16, float32")
    return replace(epilogue, operands=tuple(x.contiguous() for x in epilogue.operands))


def _product(p: Problem) -> torch.Tensor:
    """[batches, m, n] by the kernel that serves the problem."""
    return _server(p, p.epilogue is not None)(p)


_preferred: ContextVar[str] = ContextVar("preferred", default="library")


@contextmanager
def preferring(contender: str):
    """Let one of the `contenders` for a product compute it."""
    token = _preferred.set(contender)
    try:
        yield
    finally:
        _preferred.reset(token)


def contenders(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype) -> tuple[str, ...]:
    """Those that could compute the product of these arguments of `scaled_mm`, if there are several.

    "library", which does if nothing else is preferred, and "kernel", on GPUs with block-scaled matrix units.
    """
    if a_fmt is None and b_fmt is None:
        return ()
    p = problem_of(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype)
    return ("library", "kernel") if _on_block_scaled_units(p) and _library_scales(p) else ()


def _on_block_scaled_units(p: Problem) -> bool:
    return native(p.left.fmt, p.right.fmt, p.left.swizzled and p.right.swizzled, p.target)


def _server(p: Problem, epilogue: bool) -> Callable[[Problem], torch.Tensor]:
    """Who computes the product, with an epilogue or without.

    Raises `ChosenWhenRun` while tracing, where a symbolic number of rows leaves that open.
    """
    if _on_block_scaled_units(p):
        by_library = _preferred.get() == "library" and not epilogue and _library_scales(p)
        return _scaled_by_block if by_library else _native
    if _float8(p):
        return _scaled_by_row
    if tracing() and not _settled(p):
        raise ChosenWhenRun
    if _streams(p):
        return _decode
    if _shares(p):
        return _wgmma
    if _use_library(p):
        return _library
    return _tiles


def _settled(p: Problem) -> bool:
    """Whether it is known which kernel serves so many rows of A: not for every symbolic number."""
    return statically_true(p.m < LIBRARY_ROWS) or statically_true(p.m >= LIBRARY_ROWS)


def _takes_epilogue(p: Problem) -> bool:
    """Whether a kernel of ours writes the result, and does not write it again where the first one was inexact."""
    server = _server(p, True)
    return server in (_native, _tiles, _wgmma) or (server is _library and not _plain(p) and not _watched(p))


def _library_scales(p: Problem) -> bool:
    """Whether the library's block-scaled product (cuBLASLt by `aten._scaled_mm`) computes all of the problem on SM100.

    It takes two NVFP4 or two MXFP8 (E4M3) operands with swizzled scales, in rows of whole 16 bytes, and a bias of the
    result's type if that has 16 bits. It has no outer scale: its `scale_result` is for FP8 results alone, and the one
    that has a factor (`aten._scaled_mm_v2`) does not compile with swizzled scales. Two-level operands would need the
    sums in float32 and another pass over them, which costs more than the library can win; an epilogue likewise is a pass of
    its own there. Both are the epilogue of `gemm_block_scaled_sm100`. Nothing of this was timed on such a GPU.
    """
    formats = {(x.element, x.scale) for x in (p.left, p.right)} <= {("e2m1", "e4m3"), ("e4m3", "e8m0")}
    plain = p.left.outer is None and p.right.outer is None
    bias = p.bias is None or (p.bias.dtype == p.out_dtype and p.out_dtype != torch.float32)
    aligned = statically_true(p.n % 16 == 0) and statically_true(p.left.data.shape[-1] % 16 == 0)
    filled = statically_true(p.m > 0) and statically_true(p.n > 0) and statically_true(p.k > 0)
    here = 100 <= p.target.sm < 120 and p.batches == 1
    return here and formats and plain and bias and aligned and filled


def _scaled_by_block(p: Problem) -> torch.Tensor:
    """The product of block-scaled operands, by the library."""
    codes = torch.float4_e2m1fn_x2 if p.left.fmt.packed else torch.float8_e4m3fn
    a, b = (x.data.view(rows, x.data.shape[-1]).view(codes) for x, rows in ((p.left, p.m), (p.right, p.n)))
    a_scales, b_scales = (x.scales.view(x.fmt.scale_dtype) for x in (p.left, p.right))
    return torch._scaled_mm(a, b.t(), a_scales, b_scales, p.bias, out_dtype=p.out_dtype)


def _native(p: Problem) -> torch.Tensor:
    """The product by the matrix units' own block-scaled instruction."""
    integers, constants = native_arguments(p.m, p.n, p.k, p.left.fmt, p.right.fmt, p.target, p.epilogue is not None)
    out = p.empty()
    a_outer, b_outer, bias = p.rescale_pointers(out)
    launch(
        p.with_epilogue(gemm_block_scaled_sm100), ceil_div(p.m, constants["BM"]) * ceil_div(p.n, constants["BN"]) * p.batches,
        p.left.data, p.left.scales, a_outer, p.right.data, p.right.scales, b_outer, bias, out,
        *p.epilogue_pointers(out), *integers, **constants, **p.rescale_constants, ISA=p.target.isa,
    )  # fmt: skip
    return out


def float8_native(a: BlockFormat | None, b: BlockFormat | None, n, k, out_dtype, target: Target) -> bool:
    """Whether the library's row-scaled FP8 product serves float8_rowwise operands of these sizes."""
    if a is None or b is None or a.scale is not None or b.scale is not None:
        return False
    return (target.float8_matrix_units and out_dtype == torch.bfloat16 and statically_true(n % 16 == 0) and statically_true(k % 16 == 0)
            and statically_true(n > 0) and statically_true(k > 0))  # fmt: skip


def on_matrix_units(a, b, n, k, out_dtype, device: torch.device) -> bool:
    """Whether the matrix units of the device multiply the operands as they are quantised.

    a, b: (format, whether the scales are swizzled) of each.
    """
    target = target_of(device)
    formats = a[0], b[0]
    return native(*formats, a[1] and b[1], target) or float8_native(*formats, n, k, out_dtype, target)


def _float8(p: Problem) -> bool:
    outer = (p.left.outer_kind, p.right.outer_kind) == ("row", "row")
    bias = p.bias is None or p.bias.dtype == p.out_dtype
    fits = float8_native(p.left.fmt, p.right.fmt, p.n, p.k, p.out_dtype, p.target)
    return fits and outer and bias and p.batches == 1


def _scaled_by_row(p: Problem) -> torch.Tensor:
    """The product of FP8 operands with a scale for each row, by the library."""
    a, b = (x.data.view(rows, p.k).view(torch.float8_e4m3fn) for x, rows in ((p.left, p.m), (p.right, p.n)))
    a_outer, b_outer = p.left.outer.view(p.m, 1), p.right.outer.view(1, p.n)
    return torch._scaled_mm(a, b.t(), a_outer, b_outer, p.bias, out_dtype=p.out_dtype, use_fast_accum=False)


def _streams(p: Problem) -> bool:
    """Whether the kernel for a few rows and NVFP4 weights serves the problem."""
    return statically_true(p.m <= DECODE_ROWS) and p.target.isa > 0 and _streamed(p)


def _shares(p: Problem) -> bool:
    """Whether the kernel for a few dozen rows and NVFP4 weights serves the problem."""
    return statically_true(p.m <= WGMMA_ROWS) and 90 <= p.target.sm < 100 and _streamed(p)


def _streamed(p: Problem) -> bool:
    """Whether the weights are as `copy_weights` reads them, and the activations can be given in 16 bits."""
    weights = p.right.element == "e2m1" and p.right.scale == "e4m3"
    whole = statically_true(p.k % 64 == 0) and statically_true(p.k > 0) and p.batches == 1
    return weights and whole and compute_type(p.left, p.right) != "fp32"


def streamed(p: Problem) -> bool:
    """Whether it is known that `decode` serves the problem."""
    return _settled(p) and _server(p, False) is _decode


def _decode(p: Problem) -> torch.Tensor:
    """The product of a few rows, expanded to 16 bits if they are quantised, at the speed of the weights."""
    return decode([p])[0]


def decode(problems: list[Problem]) -> list[torch.Tensor]:
    """`_decode` of up to MOST_IN_GROUP problems that have all but the weights in common, in one launch."""
    p = problems[0]
    a = dequantized(p.left, p.left.data, p, torch.float16)
    outs = [each.empty() for each in problems]
    pointers = [pointer for each, out in zip(problems, outs, strict=True) for pointer in _decoded(each, out)]
    unused = MOST_IN_GROUP - len(problems)
    sizes = [each.n for each in problems]
    kernel, config, rows, width = _decoder(p, sum(sizes))
    programs = config.pop("GRID")
    whole = all(statically_true(n % rows == 0) for n in sizes) and statically_true(p.k % (width * config["WARPS"]) == 0)
    launch(
        kernel, torch.sym_min(sum(ceil_div(n, rows) for n in sizes), programs),
        a, a if p.left.outer is None else p.left.outer, *pointers, *[p.right.data] * 5 * unused,
        p.m, *sizes, *[1] * unused, p.k // 32, num_warps=config["WARPS"], GROUP_SIZE=len(problems),
        A_OUTER=p.left.outer_kind, B_OUTER=p.right.outer_kind, BIAS=int(p.bias is not None),
        B_SQUARE=int(p.right.fmt.square), B_SWIZZLED=int(p.right.swizzled), EVEN=int(whole),
        COMPUTE=compute_type(p.left, p.right), ISA=p.target.isa, **config,
    )  # fmt: skip
    return outs


def _decoder(p: Problem, n) -> tuple:
    """What streams `n` rows of weights in all: kernel, launch, rows of a tile, elements of a step."""
    config = few_config(p.m, n, p.k, p.target)
    if config is not None:
        config["WIDE"] = int(statically_true(p.k % 256 == 0) and not p.right.swizzled)
        return gemv, config, 16, WIDTH.value
    config = decode_config(p.m, n, p.k)
    return gemm_skinny, config, 16 * config["TILES"], 128


def _decoded(p: Problem, out: torch.Tensor) -> tuple:
    """One weight's arguments of either kernel; for what it has not, something that is not read."""
    unused = p.right.data
    outer, bias = (unused if x is None else x for x in (p.right.outer, p.bias))
    return p.right.data, p.right.scales, outer, bias, out


def _wgmma(p: Problem) -> torch.Tensor:
    """The product of a few dozen rows, expanded to 16 bits if they are quantised."""
    config = wgmma_config(p.m, p.n, p.k, p.epilogue is not None)
    warps, split = config["WARPS"], config.pop("SPLIT")
    image = _image(p, config["ROWS"], config["STEPS_PER_STAGE"])
    out = p.empty() if split == 1 else p.empty_sums(split)
    fused = p if split == 1 else replace(p, epilogue=None)
    a_outer, b_outer, bias = p.rescale_pointers(out)
    rows = 16 * warps
    programs = ceil_div(p.n, rows) * split
    even = statically_true(p.n % rows == 0 and p.k % (128 * config["STEPS_PER_STAGE"]) == 0)
    launch(
        fused.with_epilogue(gemm_wgmma_sm90), programs,
        image, a_outer, p.right.data, p.right.scales, b_outer, bias, out, *fused.epilogue_pointers(out),
        p.m, p.n, p.k // 32, split, A_OUTER=p.left.outer_kind, B_OUTER=p.right.outer_kind,
        BIAS=int(p.bias is not None), PARTIAL=int(split > 1),
        B_SQUARE=int(p.right.fmt.square), B_SWIZZLED=int(p.right.swizzled), COMPUTE=compute_type(p.left, p.right),
        EVEN=int(even), PDL=p.target.dependent_launch, ISA=p.target.isa, num_warps=warps, **config,
        SHARED=wgmma_shared(config, programs, p.target),
    )  # fmt: skip
    return out if split == 1 else _rescale(p, out, split, dependent=1)


def _image(p: Problem, rows: int, steps: int) -> torch.Tensor:
    """A for `gemm_wgmma_sm90` of so many rows, in whole phases of so many steps."""
    a = p.left
    matrices = 2 * steps * ceil_div(p.k, 128 * steps)
    image = a.data.new_empty((matrices, rows, 64), dtype=_dequantized_dtype(p))
    launch(swizzle_a_sm90, matrices, a.data, a.data if a.scales is None else a.scales, p.right.data, p.right.scales,
           image, p.m, p.k // 16, a.per_row, num_warps=rows // 16, ROWS=rows, LAUNCH_DEPENDENTS=p.target.dependent_launch,
           ISA=p.target.isa, **_read_as(a, 64 * steps))  # fmt: skip
    return image


def _use_library(p: Problem) -> bool:
    """Whether both operands are expanded to 16 bits first: of large matrices the library's product is faster."""
    large = statically_true(p.m >= LIBRARY_ROWS) and statically_true(p.n >= 512)
    return p.target.sm > 0 and compute_type(p.left, p.right) != "fp32" and p.batches == 1 and large


def _library(p: Problem) -> torch.Tensor:
    """The product by the library, of operands expanded to 16 bits: the smaller one whole, the other part by part.

    Where values may be too small for bf16 the expansion notes it on the device; the tiles are then computed again.
    """
    by_columns = _dequantized_bytes(p.left, p) < _dequantized_bytes(p.right, p)
    count, others, cut = (p.n, p.m, p.right) if by_columns else (p.m, p.n, p.left)
    each = (0 if cut.fmt is None else 2 * p.k) + (0 if _plain(p) else 4 * others)
    at_once = statically_true(
        count * each <= (4 * WHOLE_BYTES if statically_true(others <= FEW_LINES) else WHOLE_BYTES)
    )
    if tracing() and not at_once:
        raise ChosenWhenRun  # a loop that would fill the graph with launches
    watch = _watched(p)
    inexact = p.left.data.new_zeros((), dtype=torch.int32) if watch else p.left.data  # or not read
    whole = dequantized(p.left if by_columns else p.right, inexact, p)
    if at_once:
        out = _library_part(p, whole, by_columns, inexact)
    else:
        out = p.empty().view(p.m, p.n)
        for start, size in _parts(count, max(PART_BYTES // each, LEAST_RESULTS // others, LEAST_LINES)):
            part = p.columns(start, size) if by_columns else p.rows(start, size)
            _library_part(part, whole, by_columns, inexact, out.narrow(int(by_columns), start, size))
    return _tiles(p, out, wanted=inexact) if watch else out


def _dequantized_bytes(x: Operand, p: Problem):
    """What expanding an operand takes, as far as it is known: a symbolic number of rows counts as few."""
    rows = p.m if x is p.left else p.n
    return 0 if x.fmt is None else 2 * p.k * (rows if isinstance(rows, int) else LIBRARY_ROWS)


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """Starts and sizes of parts of about `most`, alike: a small last part would cost what a large one does."""
    size = 128 * ceil_div(count, 128 * max(round(count / most), 1))
    return [(start, min(size, count - start)) for start in range(0, count, size)]


def _library_part(
    p: Problem, whole: torch.Tensor, by_columns: bool, inexact, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[m, n] of A and B, of which one is given expanded, into `out` if it is given."""
    part = dequantized(p.right if by_columns else p.left, inexact, p)
    left, right = (whole, part.t()) if by_columns else (part, whole.t())
    with torch.autocast("cuda", enabled=False):  # it would cast fp16 operands to bf16
        if not _plain(p):
            return _rescale(p, torch.mm(left, right, out_dtype=torch.float32), 1, out)
        if p.bias is None:
            return torch.mm(left, right, out=out)
        return torch.addmm(p.bias, left, right, out=out)


def _dequantized_dtype(p: Problem) -> torch.dtype:
    return torch.float16 if compute_type(p.left, p.right) == "fp16" else torch.bfloat16


def _watched(p: Problem) -> bool:
    """Whether there may be values that are too small for the expanded dtype."""
    return "e8m0" in (p.left.scale, p.right.scale)


def _plain(p: Problem) -> bool:
    """Whether the library's product of expanded operands needs no rescale."""
    dtype = _dequantized_dtype(p)
    unscaled = p.left.outer is None and p.right.outer is None and dtype == p.out_dtype
    return unscaled and (p.bias is None or p.bias.dtype == dtype)


def dequantized(x: Operand, inexact, p: Problem, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[rows, k] in dtype (`_dequantized_dtype` where not given), without the outer scale."""
    dtype = dtype or _dequantized_dtype(p)
    rows = p.m if x is p.left else p.n
    data = x.data.view(rows, -1)
    if x.fmt is None:
        return data
    tiles = ceil_div(x.per_row, 2048)
    out = data.new_empty((rows, 2 * x.per_row), dtype=dtype)
    block = x.fmt.block_cols if x.fmt.block else 32
    launch(dequant_operand, rows * tiles, data, out if x.scales is None else x.scales, out, inexact, rows,
           ceil_div(x.k, block), x.per_row, tiles, num_warps=4, BLOCK=block, ROWS=1, UNITS=2048,
           ISA=p.target.isa, **_read_as(x, 2048))  # fmt: skip
    return out.narrow(1, 0, p.k)


def _read_as(x: Operand, step: int) -> dict:
    """Constants of a kernel that reads one operand, in steps of so many units, and not its outer scale."""
    constants = {key.removeprefix("A_"): value for key, value in x.constants("A", step).items()}
    del constants["OUTER"]
    return constants


def _tiles(p: Problem, out: torch.Tensor | None = None, wanted: torch.Tensor | None = None) -> torch.Tensor:
    """The product in one kernel (two with `SPLIT`); into `out`, and only if the int32 at `wanted` is set."""
    compute = compute_type(p.left, p.right)
    unit_bytes = [{"e2m1": 1, "plain": 2 * x.data.element_size()}.get(x.element, 2) for x in (p.left, p.right)]
    tile = tile_of(p.m, p.n, p.k, compute, *unit_bytes, p.target.sm)
    split = tile.pop("SPLIT")
    num_warps = tile.pop("num_warps")
    step = tile["UNITS"] * tile["WARPS"]
    constants = {**p.left.constants("A", step), **p.right.constants("B", step), **p.rescale_constants, **tile, "SPLIT": split,
                 "BLOCK": p.block, "COMPUTE": compute, "GUARD": int(wanted is not None),
                 "ISA": p.target.isa}  # fmt: skip
    if out is None:
        out = p.empty() if split == 1 else p.empty_sums(split)
    a_outer, b_outer, bias = p.rescale_pointers(out)
    a_scales, b_scales = (out if x.scales is None else x.scales for x in (p.left, p.right))  # `out`: not read
    fused = p if split == 1 else replace(p, epilogue=None)
    launch(
        fused.with_epilogue(gemm_dequant_tiles), ceil_div(p.m, tile["BM"]) * ceil_div(p.n, tile["BN"]) * p.batches * split,
        p.left.data, a_scales, a_outer, p.right.data, b_scales, b_outer, bias, out,
        *fused.epilogue_pointers(out), out if wanted is None else wanted,
        p.m, p.n, ceil_div(p.k, 2), ceil_div(p.k, p.block), p.left.per_row, p.right.per_row,
        p.left.scales_batch, p.right.scales_batch,
        num_warps=num_warps, **constants,
    )  # fmt: skip
    return out if split == 1 else _rescale(p, out, split)


def _rescale(
    p: Problem, sums: torch.Tensor, split: int, out: torch.Tensor | None = None, dependent: int = 0
) -> torch.Tensor:
    """[batches, m, n] from float32 sums [split, batches, m, n]; in `out` if it is given.

    dependent: whether the kernel that makes the sums starts the next one early, as `device.dependent_launch` says.
    """
    cols = 512
    out_row = p.n if out is None else out.stride(0)
    out = p.empty() if out is None else out
    launch(p.with_epilogue(split_k_reduction), p.batches * p.m * ceil_div(p.n, cols), sums, *p.rescale_pointers(out), out,
           *p.epilogue_pointers(out), p.batches, p.m, p.n, out_row, num_warps=4, SPLIT=split, COLS=cols, ISA=p.target.isa,
           PDL=dependent, **p.rescale_constants)  # fmt: skip
    return out
