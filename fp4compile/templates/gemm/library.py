"""Matmuls of quantised operands by a library: cuBLASLt, through torch's `_scaled_mm`.

`tests/helpers/library_checks.py` has torch's requirements on the arguments (ScaledBlas.cpp); every matmul that these
candidates serve meets them. cuBLASLt computes D = alpha * (A B) + bias, with float32 sums, alpha and bias applied in
float32, and one rounding to the type of D. That is the contract of `reference.scaled_mm`, where alpha is the product of
the two global scales. None of this was run on SM100.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from fp4compile import _compat
from fp4compile._compat import statically_true
from fp4compile.formats.formats import as_integers
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.templates.gemm.call import Call, KernelOperand, aligned
from fp4compile.templates.gemm.candidate import LIBRARY, Candidate, opaque
from fp4compile.templates.problem import Problem


def _serves_block_scaled(p: Problem) -> bool:
    """Whether cuBLASLt serves two NVFP4 or MXFP8 (E4M3) operands: SM100, swizzled scales, rows of whole 16 bytes.

    Either operand or both may have a global scale; row scales are not supported. The library reads square blocks as
    rows of blocks, because swizzled scales are written for each row. A bias must be of the result's type, which then
    has 16 bits. The library applies no epilogue.

    `block_scaled_sm100` serves MXFP4 and operands of mixed widths, which cuBLASLt lacks, and compute capability 12.0.
    On 12.0 torch's users report that the library takes operands in this layout (pytorch/pytorch#198126), but there is
    no report on its speed against a Triton kernel.
    """
    formats = {(x.element, x.scale) for x in (p.a, p.b)} <= {("e2m1", "e4m3"), ("e4m3", "e8m0")}
    outer = {p.a.outer, p.b.outer} <= ({"none", "tensor"} if p.a.scale == "e4m3" else {"none"})
    swizzled = p.a.swizzled and p.b.swizzled and outer
    bias = p.spec.bias is None or (p.spec.bias == p.spec.out_dtype and p.spec.out_dtype != torch.float32)
    filled = all(statically_true(size > 0) for size in (p.m, p.n, p.k))
    here = 100 <= p.target.sm < 120 and not p.ragged and p.batches == 1 and not p.spec.epilogue
    units = p.target.block_scaled_matrix_units and p.a.format is not None and p.b.format is not None
    if not (here and units and formats and swizzled and bias and filled):
        return False
    return statically_true(p.n % 16 == 0) and statically_true(p.row_bytes(p.a) % 16 == 0)


def _run_block_scaled(call: Call, config: None) -> torch.Tensor:
    """Multiply one-level operands by `_scaled_mm`, which Inductor can lower, and two-level operands by an op."""
    p = call.problem
    bias = None if call.bias is None else aligned(call.bias)
    a_data, b_data = _matrix(call.a, p.m), _matrix(call.b, p.n)
    if (p.a.outer, p.b.outer) != ("none", "none"):
        a, b = (Operand(data, _scales(x), x.outer, x.type.format) for data, x in ((a_data, call.a), (b_data, call.b)))
        return opaque(Arguments.of(a, b, bias, p.spec.out_dtype), LIBRARY)[0]
    codes = torch.float4_e2m1fn_x2 if p.a.format.packed else torch.float8_e4m3fn
    a, b = a_data.view(codes), b_data.view(codes).t()
    return torch._scaled_mm(a, b, _scales(call.a), _scales(call.b), bias, out_dtype=p.spec.out_dtype)


def _matrix(x: KernelOperand, rows) -> torch.Tensor:
    return x.data.view(rows, x.data.shape[-1])


def _scales(x: KernelOperand) -> torch.Tensor:
    return x.scales.view(x.type.format.scale_dtype)


def product(
    a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accumulation: bool = False
) -> torch.Tensor:
    """The product of two matrices [M, K] x [N, K] in NVFP4 or FP8.

    FP8 operands without block scales may lack global and row scales. fast_accumulation: whether their sums may have
    fewer bits than float32.
    """
    if a.format.scale == "float32":
        return _blocks_product(a, b, bias, out_dtype)
    if a.format.scale is not None:
        return two_level(a, b, bias, out_dtype)
    one = a.data.new_ones((), dtype=torch.float32)
    a_outer, b_outer = (one if x.outer is None else x.outer for x in (a, b))
    return torch._scaled_mm(
        a.data, b.data.t(), a_outer, b_outer.t(), bias, out_dtype=out_dtype, use_fast_accum=fast_accumulation
    )


def two_level(a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """The matmul of two NVFP4 matrices [M, K] x [N, K] with swizzled scales; one or both have a global scale.

    torch multiplies the global scales on the device, and cuBLASLt reads their product as its alpha. So the host does
    not wait, and a CUDA graph can hold the call. torch takes two global scales or none: an operand without one gets a
    1.
    """
    one = None if a.outer is not None and b.outer is not None else a.data.new_ones((), dtype=torch.float32)
    a_outer, b_outer = (one if x.outer is None else x.outer for x in (a, b))
    a_codes, b_codes = (x.data.view(torch.float4_e2m1fn_x2) for x in (a, b))
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]  # one entry per scale, as newer torch requires
    return F.scaled_mm(
        a_codes, b_codes.t(), [a.scales, a_outer], recipe, [b.scales, b_outer], recipe, swizzle, swizzle, bias,
        out_dtype,
    )  # fmt: skip


def _serves_float8_blocks(p: Problem) -> bool:
    """FP8 with float32 scales on Hopper, to bfloat16: A by 1x128, B by 1x128 or 128x128 elements.

    torch takes these scales on compute capability 9.0 alone, from CUDA 12.9 on. The contraction counts with the padding
    of its last block.
    """
    a, b = p.a.format, p.b.format
    if a is None or b is None or (a.scale, b.scale) != ("float32", "float32") or a.element == b.element == "e5m2":
        return False
    blocks = a.block == (1, 128) and b.block in ((1, 128), (128, 128))
    here = p.target.sm == 90 and p.target.float8_matrix_units and not p.ragged and p.batches == 1
    types = p.spec.out_dtype == torch.bfloat16 and p.spec.bias is None and not p.spec.epilogue
    if not (blocks and here and types):
        return False
    filled = all(statically_true(size > 0) for size in (p.m, p.n, p.k))
    return filled and statically_true(p.n % 16 == 0)


def _run_float8_blocks(call: Call, config: None) -> torch.Tensor:
    """Multiply by `_scaled_mm` where it takes the operands, which Inductor can lower, else by an op."""
    p = call.problem
    a, b = call.a.operand(p.m), call.b.operand(p.n)
    if _without_padding(a, b) and not _compat.times_products():
        return _blocks_product(a, b, None, p.spec.out_dtype)
    return opaque(Arguments.of(a, b, None, p.spec.out_dtype), LIBRARY)[0]


_SCALING = {1: ScalingType.BlockWise1x128, 128: ScalingType.BlockWise128x128}  # by rows of a block


def _blocks_product(a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """The product of FP8 matrices [M, K] x [N, K] with float32 scales for blocks of 128.

    torch wants both operands' scales transposed: scales of 1x128 elements [rows, blocks] where those of a column are
    adjacent, scales of 128x128 elements [blocks, rows of blocks], padded to whole fours of blocks. A gets whole fours
    of rows, because the library reads their scales in 16 bytes.

    `_scaled_mm` finds the blocks by the scales' shapes, and takes no padded ones.
    """
    if _without_padding(a, b):
        a_scales = a.scales.t().contiguous().t()
        b_scales = b.scales.t() if b.format.square else b.scales.t().contiguous()
        return torch._scaled_mm(a.data, b.data.t(), a_scales, b_scales, bias, out_dtype=out_dtype)
    rows, missing = a.data.shape[0], -a.data.shape[0] % 4
    if missing:
        codes = F.pad(as_integers(a.data), (0, 0, 0, missing)).view(a.data.dtype)
        a = replace(a, data=codes, scales=F.pad(a.scales, (0, 0, 0, missing)))
    a_scales, b_scales = (_transposed_scales(x) for x in (a, b))
    a_scaling, b_scaling = (_SCALING[x.format.block[0]] for x in (a, b))
    result = F.scaled_mm(
        a.data, b.data.t(), a_scales, a_scaling, b_scales, b_scaling, bias=bias, output_dtype=out_dtype
    )  # fmt: skip
    return result[:rows]


def _without_padding(a: Operand, b: Operand) -> bool:
    """Whether A has whole fours of rows, and square blocks of B whole fours along K."""
    return statically_true(a.data.shape[0] % 4 == 0) and (
        not b.format.square or statically_true(b.scales.shape[1] % 4 == 0)
    )


def _transposed_scales(x: Operand) -> torch.Tensor:
    """An operand's scales as torch wants them; see `_blocks_product`."""
    if x.format.block[0] == 1:
        return x.scales.t().contiguous().t()
    missing = -x.scales.shape[1] % 4
    return (F.pad(x.scales, (0, missing)) if missing else x.scales.contiguous()).t()


def _rowwise_float8(p: Problem) -> bool:
    """Two FP8 operands with one float32 scale a row or a tensor, of sizes that FP8 matrix units take."""
    if any((x.element, x.scale) != ("e4m3", "none") or x.outer not in ("row", "tensor") for x in (p.a, p.b)):
        return False
    aligned = statically_true(p.n % 16 == 0) and statically_true(p.k % 16 == 0)
    filled = statically_true(p.n > 0) and statically_true(p.k > 0)
    single = not p.ragged and p.batches == 1
    return p.target.float8_matrix_units and aligned and filled and single


def _serves_row_scaled(p: Problem) -> bool:
    """Whether torch's row-scaled matmul serves: `float8_rowwise` to bfloat16, up to compute capability 10.0.

    From 10.0 on, torch computes this matmul by a CUTLASS kernel. On 10.3 torch's grouped kernel of this kind was
    reported to trap, with "Arch conditional MMA instruction used without targeting appropriate compute capability"
    (pytorch/pytorch#187095); on 12.0 the matmul was reported to fail with CUBLAS_STATUS_NOT_SUPPORTED, while the
    matmul with tensor-wise scales works (pytorch/pytorch#192707). A trap ends the process's use of the GPU, so 10.3
    and 12.0 take `_run_rescaled` until the kernel is shown to run there. On 10.0 it is reported to run
    (pytorch/ao#2904).
    """
    types = p.spec.out_dtype == torch.bfloat16 and (p.spec.bias is None or p.spec.bias == p.spec.out_dtype)
    return _rowwise_float8(p) and types and p.target.sm <= 100


def _run_row_scaled(call: Call, config: None) -> torch.Tensor:
    a, b = _rowwise_operands(call)
    return _float8_product(a, b, call.bias, call.problem.spec.out_dtype, call.problem.spec.fast_accumulation)


def _rowwise_operands(call: Call) -> tuple[Operand, Operand]:
    """A [m, k] and B [n, k], and their row or global scales: [m, 1] and [n, 1], or two []."""
    p = call.problem
    one = (p.a.outer, p.b.outer) == ("tensor", "tensor")
    a, b = (
        Operand(x.data.view(rows, p.k).view(torch.float8_e4m3fn), None, _outer(x, rows, one), x.type.format)
        for x, rows in ((call.a, p.m), (call.b, p.n))
    )
    return a, b


def _outer(x: KernelOperand, rows, one: bool) -> torch.Tensor:
    """An operand's row scales, [rows, 1]; [] if `one`, where both operands have one of the tensor."""
    if one or x.type.outer == "row":
        return x.outer if one else x.outer.view(rows, 1)
    return x.outer.expand(rows, 1).contiguous()


def _float8_product(
    a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, fast_accumulation: bool
) -> torch.Tensor:
    """`product`, as an op where Inductor would time its own templates for `_scaled_mm`."""
    if not _compat.times_products():
        return product(a, b, bias, out_dtype, fast_accumulation)
    return opaque(Arguments.of(a, b, bias, out_dtype, fast_accumulation=fast_accumulation), LIBRARY)[0]


def _serves_rescaled(p: Problem) -> bool:
    """Whether the problem is `float8_rowwise` on a GPU where `library_row_scaled` may trap or fail."""
    return _rowwise_float8(p) and p.target.sm > 100


def _run_rescaled(call: Call, config: None) -> torch.Tensor:
    """Multiply by cuBLASLt with scales of 1, to float32; PyTorch operations apply row scales and bias."""
    a, b = _rowwise_operands(call)
    fast = call.problem.spec.fast_accumulation
    sums = _float8_product(replace(a, outer=None), replace(b, outer=None), None, torch.float32, fast)
    result = sums * (a.outer * b.outer.t())
    if call.bias is not None:
        result = result + call.bias.float()
    return result.to(call.problem.spec.out_dtype)


def _library(name: str, serves: Callable[[Problem], bool], run: Callable[[Call, None], torch.Tensor]) -> Candidate:
    return Candidate(name, "native", serves, lambda p: None, run, any_rows=True)


BLOCK_SCALED = _library("library_block_scaled", _serves_block_scaled, _run_block_scaled)
FLOAT8_BLOCKS = _library("library_float8_blocks", _serves_float8_blocks, _run_float8_blocks)
ROW_SCALED = _library("library_row_scaled", _serves_row_scaled, _run_row_scaled)
RESCALED = _library("library_rescaled", _serves_rescaled, _run_rescaled)
