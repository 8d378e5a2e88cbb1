"""The functional op set: the language between the graph passes and the kernels.

    fp4compile::quantize(x, format, dim, *, outer, layout, seed, hadamard) -> (data, scales, outer)
    fp4compile::quantize_both(x, format, *, outer, layout, seed, hadamard)
        -> (data, scales, outer, columns, column_scales, column_outer)
    fp4compile::quantize_expanded(x, format, *, outer) -> (values, outer)
    fp4compile::dequantize(data, scales, outer, format, cols, dtype) -> values
    fp4compile::scaled_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype) -> product
    fp4compile::scaled_mm_tail(the same, operands, tail, dtype) -> tail(product), on CUDA: see `templates.tail`
    fp4compile::scaled_mm_siblings(..., several b, ...) -> products of the same a: see `sibling_ops`

Ops carry tensors, strings and ints, have no state and never alias or mutate, so that graph passes may merge, move
and recompute them. Of the tensors returned, those that a format does not have are empty ([0]); the column outer scale
is one of them unless a Hadamard transform gives the columns an amax of their own.
`quantize_expanded` is for products that would expand the codes of A to 16 bits first: with its values as a plain A
and its outer scale as that of A, `scaled_mm` gives what it gives of codes and scales.
Random bits come from a seed, which is an input: a product that is recomputed gets the same bits.
The Python functions below them are the eager interface, on `BlockScaled` operands.
"""

from dataclasses import dataclass

import torch

from fp4compile import formats, reference
from fp4compile.formats import BlockFormat, unknown_name
from fp4compile.layouts import LAYOUTS, ceil_div, swizzled_numel

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_lib = torch.library.Library("fp4compile", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_lib.define(
    "quantize(Tensor x, str format, int dim=-1, *, Tensor? outer=None, str layout='linear', Tensor? seed=None,"
    " bool hadamard=False) -> (Tensor data, Tensor scales, Tensor outer_scale)",
    tags=_tags,
)
_lib.define(
    "quantize_both(Tensor x, str format, *, Tensor? outer=None, str layout='linear', Tensor? seed=None,"
    " bool hadamard=False) -> (Tensor data, Tensor scales, Tensor outer_scale,"
    " Tensor columns, Tensor column_scales, Tensor column_outer_scale)",
    tags=_tags,
)
_lib.define(
    "quantize_expanded(Tensor x, str format, *, Tensor? outer=None) -> (Tensor values, Tensor outer_scale)", tags=_tags
)
_lib.define(
    "dequantize(Tensor data, Tensor? scales, Tensor? outer, str format, SymInt cols, ScalarType dtype) -> Tensor",
    tags=_tags,
)
_lib.define(
    "scaled_mm(Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_outer, str? b_format, Tensor? bias, ScalarType out_dtype) -> Tensor",
    tags=_tags,
)
_lib.define(
    "scaled_mm_tail(Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_outer, str? b_format, Tensor? bias, ScalarType out_dtype,"
    " Tensor[] operands, str tail, ScalarType dtype) -> Tensor",
    tags=_tags,
)


# ---------------------------------------------------------------- quantize


@torch.library.impl(_lib, "quantize", "CompositeExplicitAutograd")
def _quantize(x, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False):
    return _quantize_by(reference.quantize, x, format, dim, outer, layout, seed, hadamard)


@torch.library.impl(_lib, "quantize", "CUDA")
def quantize_cuda(x, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False):
    """`quantize` by the Triton kernels; what a graph is lowered to."""
    from fp4compile.templates.quantize import dispatch as kernels  # here, so that the CPU needs no Triton

    return _quantize_by(kernels.quantize, x, format, dim, outer, layout, seed, hadamard)


def _quantize_by(implementation, x, format, dim, outer, layout, seed, hadamard):
    fmt = formats.get(format)
    _check_layout(layout)
    _check_training(fmt, seed, hadamard)
    stream = _stream(x, dim)
    data, scales, computed = implementation(
        x.movedim(dim, -1), fmt, outer, layout, seed=seed, stream=stream, transform=hadamard
    )
    scales = x.new_empty(0, dtype=fmt.scale_dtype) if scales is None else scales
    # A given outer scale is not handed through: an op may not return its input.
    return data, scales, _fresh(x, outer, computed)


def _stream(x: torch.Tensor, dim: int) -> int:
    """Which of a seed's streams of random bits: the two directions of one gradient must not round alike."""
    return 0 if dim in (-1, x.dim() - 1) else 1


def _fresh(x: torch.Tensor, given: torch.Tensor | None, computed: torch.Tensor | None) -> torch.Tensor:
    """An outer scale that was computed, [0] where none was."""
    return computed if given is None and computed is not None else x.new_empty(0, dtype=torch.float32)


def _check_training(fmt: BlockFormat, seed: torch.Tensor | None, hadamard: bool) -> None:
    if seed is not None:
        if not fmt.packed:
            raise ValueError(f"seed: stochastic rounding is defined for E2M1 elements, format {fmt.name} has others")
        if seed.dtype != torch.int64 or seed.dim():
            raise ValueError(f"seed: expected int64 of shape (), got {seed.dtype} of shape {tuple(seed.shape)}")
    if hadamard and (fmt.scale != "e4m3" or fmt.square):
        raise ValueError(f"hadamard: the transform goes with NVFP4 blocks of 1x16, format {fmt.name} has others")


@torch.library.register_fake("fp4compile::quantize", lib=_lib)
def _quantize_fake(x, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False):
    fmt = formats.get(format)
    _check_layout(layout)
    _check_training(fmt, seed, hadamard)
    lead = list(x.shape)
    k = lead.pop(dim)
    blocks = ceil_div(k, fmt.block_cols)
    block_bytes = fmt.block_cols // 2 if fmt.packed else fmt.block_cols
    data = x.new_empty((*lead, blocks * block_bytes), dtype=fmt.data_dtype)
    scales = x.new_empty(_scales_shape(lead, blocks, fmt, layout), dtype=fmt.scale_dtype)
    outer_shape: tuple = (0,)
    if outer is None and fmt.outer is not None:
        outer_shape = (*lead, 1) if fmt.outer == "row" else ()
    return data, scales, x.new_empty(outer_shape, dtype=torch.float32)


def _scales_shape(lead: list, blocks, fmt: BlockFormat, layout: str) -> tuple:
    if fmt.scale is None:
        return (0,)
    *batch, rows = lead or [1]
    if layout == "swizzled":
        return (*batch, swizzled_numel(rows, blocks))
    if not lead:
        return (blocks,)
    return (*batch, ceil_div(rows, fmt.block[0]), blocks)


# ---------------------------------------------------------------- quantize_both


@torch.library.impl(_lib, "quantize_both", "CompositeExplicitAutograd")
def _quantize_both(x, format, *, outer=None, layout="linear", seed=None, hadamard=False):
    _check_both(format, x, outer, hadamard)
    data, scales, fresh = _quantize(x, format, -1, outer=outer, layout=layout, seed=seed)
    # Of the values as they are, rows and columns have the same amax, unless each has one of its own.
    shared = outer is None and not hadamard and formats.get(format).outer == "tensor"
    given = fresh if shared else outer
    return data, scales, fresh, *_quantize(x, format, -2, outer=given, layout=layout, seed=seed, hadamard=hadamard)


@torch.library.impl(_lib, "quantize_both", "CUDA")
def quantize_both_cuda(x, format, *, outer=None, layout="linear", seed=None, hadamard=False):
    """`quantize_both` by the Triton kernels: one read of x (and one for the amax of a dynamic two-level format)."""
    from fp4compile.templates.quantize import dispatch as kernels

    _check_both(format, x, outer, hadamard)
    _check_layout(layout)
    _check_training(formats.get(format), seed, hadamard)
    rows, columns = kernels.quantize_both(x, formats.get(format), outer, layout, seed=seed, transform=hadamard)
    # Where both have the same outer scale, an op may not return it twice.
    apart = hadamard or formats.get(format).outer == "row"
    return *rows[:2], _fresh(x, outer, rows[2]), *columns[:2], _fresh(x, outer, columns[2] if apart else None)


@torch.library.register_fake("fp4compile::quantize_both", lib=_lib)
def _quantize_both_fake(x, format, *, outer=None, layout="linear", seed=None, hadamard=False):
    _check_both(format, x, outer, hadamard)
    rows = _quantize_fake(x, format, -1, outer=outer, layout=layout, seed=seed)
    data, scales, fresh = _quantize_fake(x, format, -2, outer=outer, layout=layout, seed=seed, hadamard=hadamard)
    apart = hadamard or formats.get(format).outer == "row"
    return *rows, data, scales, fresh if apart else x.new_empty(0, dtype=torch.float32)


def _check_both(format: str, x: torch.Tensor, outer: torch.Tensor | None, hadamard: bool) -> None:
    if x.dim() < 2:
        raise ValueError(f"x: expected two dimensions or more, got shape {tuple(x.shape)}")
    if outer is not None and (hadamard or formats.get(format).outer == "row"):
        which = "with hadamard" if hadamard else f"in format {format}"
        raise ValueError(f"outer: {which}, rows and columns have outer scales of their own; quantise them apart")


# ---------------------------------------------------------------- quantize_expanded


@torch.library.impl(_lib, "quantize_expanded", "CompositeExplicitAutograd")
def _quantize_expanded(x, format, *, outer=None):
    fmt = _expandable(format)
    values, computed = reference.quantize_expanded(x, fmt, outer)
    return values, _fresh(x, outer, computed)


@torch.library.impl(_lib, "quantize_expanded", "CUDA")
def quantize_expanded_cuda(x, format, *, outer=None):
    """`quantize_expanded` by the Triton kernels that quantise rows; what a graph is lowered to."""
    from fp4compile.templates.quantize import dispatch as kernels

    fmt = _expandable(format)
    values, computed = kernels.quantize_expanded(x, fmt, outer)
    return values, _fresh(x, outer, computed)


@torch.library.register_fake("fp4compile::quantize_expanded", lib=_lib)
def _quantize_expanded_fake(x, format, *, outer=None):
    fmt = _expandable(format)
    *_, fresh = _quantize_fake(x, format, outer=outer)
    padded = ceil_div(x.shape[-1], fmt.block_cols) * fmt.block_cols
    return x.new_empty((*x.shape[:-1], padded), dtype=torch.float16), fresh


def expands(fmt: BlockFormat) -> bool:
    """Whether `quantize_expanded` takes the format: float16 holds all E2M1 elements times E4M3 scales."""
    return fmt.scale == "e4m3" and not fmt.square


def _expandable(format: str) -> BlockFormat:
    fmt = formats.get(format)
    if not expands(fmt):
        raise ValueError(f"format: quantize_expanded takes NVFP4 in blocks of 1x16, format {fmt.name} is another")
    return fmt


# ---------------------------------------------------------------- dequantize


@torch.library.impl(_lib, "dequantize", "CompositeExplicitAutograd")
def _dequantize(data, scales, outer, format, cols, dtype):
    return reference.dequantize(data, scales, outer, formats.get(format), cols, dtype)


@torch.library.impl(_lib, "dequantize", "CUDA")
def dequantize_cuda(data, scales, outer, format, cols, dtype):
    """`dequantize` by the Triton kernel; what a graph is lowered to."""
    from fp4compile.templates.quantize import dispatch as kernels

    return kernels.dequantize(data, scales, outer, formats.get(format), cols, dtype)


@torch.library.register_fake("fp4compile::dequantize", lib=_lib)
def _dequantize_fake(data, scales, outer, format, cols, dtype):
    return data.new_empty((*data.shape[:-1], cols), dtype=dtype)


# ---------------------------------------------------------------- scaled_mm


@torch.library.impl(_lib, "scaled_mm", "CompositeExplicitAutograd")
def _scaled_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    a_fmt = None if a_format is None else formats.get(a_format)
    b_fmt = None if b_format is None else formats.get(b_format)
    return reference.scaled_mm(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype)


@torch.library.impl(_lib, "scaled_mm", "CUDA")
def scaled_mm_cuda(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    """`scaled_mm` by the Triton kernels; what a graph is lowered to."""
    from fp4compile.templates.gemm import dispatch as kernels

    a_fmt = None if a_format is None else formats.get(a_format)
    b_fmt = None if b_format is None else formats.get(b_format)
    return kernels.scaled_mm(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype)


@torch.library.impl(_lib, "scaled_mm_tail", "CUDA")
def scaled_mm_tail_cuda(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, operands, tail, dtype
):
    """`scaled_mm` and the pointwise operations of `tail`, in dtype; what a graph is lowered to."""
    from fp4compile.templates.device.epilogue import Tail
    from fp4compile.templates.gemm import dispatch as kernels

    a_fmt = None if a_format is None else formats.get(a_format)
    b_fmt = None if b_format is None else formats.get(b_format)
    tail = Tail(tail, tuple(operands), dtype)
    return kernels.scaled_mm(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype, tail)


@torch.library.register_fake("fp4compile::scaled_mm", lib=_lib)
def _scaled_mm_fake(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    reference.check_bias(bias, b.shape[-2])
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=out_dtype)


@torch.library.register_fake("fp4compile::scaled_mm_tail", lib=_lib)
def _scaled_mm_tail_fake(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, operands, tail, dtype
):
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=dtype)


# ---------------------------------------------------------------- the eager interface


@dataclass(frozen=True, eq=False)  # tensors have no truth value: comparing fields would raise
class BlockScaled:
    """A quantised tensor: codes, scales and what they mean. value = element * block scale * outer.

    data: codes, the quantised dimension last and padded to whole blocks; uint8 with two codes a byte (E2M1),
        float8_e4m3fn or float8_e5m2.
    scales: block scales, float8_e4m3fn or float8_e8m0fnu, in `layout`; None for a format without block scales.
        linear: [..., rows, blocks] (square blocks: [..., rows / block, blocks]); swizzled: one flat run a matrix.
    outer: float32 decode factor, [] or [..., rows, 1]; None means 1.
    format, layout: see `formats` and `layouts`.
    shape: logical shape of the represented values, the quantised dimension last and without padding.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    outer: torch.Tensor | None
    format: BlockFormat
    shape: tuple[int, ...]
    layout: str = "linear"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The represented values: `shape`, in dtype (bf16, fp16 or fp32). ValueError for another dtype."""
        _check_float("dtype", dtype)
        return torch.ops.fp4compile.dequantize(
            self.data, self.scales, self.outer, self.format.name, self.shape[-1], dtype
        )


def quantize(
    x: torch.Tensor,
    format: str | BlockFormat,
    *,
    dim: int = -1,
    outer: torch.Tensor | None = None,
    layout: str = "linear",
    seed: torch.Tensor | None = None,
    hadamard: bool = False,
) -> BlockScaled:
    """Quantise a tensor to a block format.

    x: bf16, fp16 or fp32, one dimension or more, any strides, any size (padded with zeros to whole blocks).
    format: a name of `formats.NAMED`, a spec string or a `BlockFormat`.
    dim: the dimension to quantise along; it is the last one of the result (dim=0 of a matrix gives 32x1 blocks,
        the data transposed).
    outer: a static decode factor, float32, [] (or [..., rows, 1] where the format scales rows); None computes it.
    layout: "linear" or "swizzled".
    seed: int64 []; rounds E2M1 elements stochastically, the same seed giving the same codes. None rounds to nearest.
    hadamard: quantise the random Hadamard transform of x along dim, in groups of 16 (NVFP4 blocks of 1x16); the
        values of the result are the transformed ones, and its shape has whole groups.

    Returns a `BlockScaled`. Not differentiable. Raises TypeError for what is no tensor or no floating point of 16
    or 32 bits, ValueError for an unknown format or layout, a dim out of range, an outer scale or a seed of wrong
    shape, dtype or device, and for a seed or a transform that the format does not go with.
    """
    fmt = formats.get(format)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x: dtype {x.dtype} cannot be quantised; allowed are bfloat16, float16, float32")
    if not isinstance(dim, int):
        raise TypeError(f"dim: expected an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: x has {x.dim()} dimensions")
    _check_layout(layout)
    lead = list(x.shape)
    k = lead.pop(dim)
    if outer is not None:
        _check_outer(outer, fmt, lead, x.device)
    if seed is not None and (not isinstance(seed, torch.Tensor) or seed.device != x.device):
        raise TypeError(f"seed: expected an int64 torch.Tensor on {x.device}, got {seed!r}")
    data, scales, computed = torch.ops.fp4compile.quantize(
        x.detach(), fmt.name, dim, outer=outer, layout=layout, seed=seed, hadamard=hadamard
    )
    if hadamard:
        k = ceil_div(k, fmt.block_cols) * fmt.block_cols
    if outer is None and fmt.outer is not None:
        outer = computed
    return BlockScaled(data, scales if fmt.scale else None, outer, fmt, (*lead, k), layout)


def scaled_mm(
    a: BlockScaled, b: BlockScaled, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A @ B^T of two quantised operands, rescaled: [..., M, K] x [..., N, K] -> [..., M, N] in out_dtype.

    The float32 product is multiplied once by outer_a * outer_b, bias [N] is added, the result is cast. Operands of
    different formats multiply if scale type and block length agree (MXFP8 x MXFP4, NVFP4 1x16 x 16x16).

    Raises TypeError for an operand that is no `BlockScaled` or a bias that is no floating-point tensor, ValueError
    for shapes, formats, devices, a bias or an out_dtype that do not fit.
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, BlockScaled):
            raise TypeError(f"{name}: expected a BlockScaled, got {type(operand).__name__}")
        if len(operand.shape) < 2:
            raise ValueError(f"{name}: expected two dimensions or more, got shape {operand.shape}")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"contraction dimensions differ: a has {a.shape[-1]}, b has {b.shape[-1]}")
    if a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"batch dimensions differ: a has {a.shape[:-2]}, b has {b.shape[:-2]}")
    if not formats.compatible(a.format, b.format):
        raise ValueError(
            f"formats {a.format.name} and {b.format.name} cannot be multiplied: scale types or block lengths differ"
        )
    if a.data.device != b.data.device:
        raise ValueError(f"devices differ: a is on {a.data.device}, b on {b.data.device}")
    if bias is not None:
        _check_bias(bias, b.shape[-2], a.data.device)
    _check_float("out_dtype", out_dtype)
    return torch.ops.fp4compile.scaled_mm(
        a.data, a.scales, a.outer, a.format.name, b.data, b.scales, b.outer, b.format.name, bias, out_dtype
    )


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(unknown_name("layout", layout, LAYOUTS))


def _check_bias(bias: torch.Tensor, n: int, device: torch.device) -> None:
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias: expected a torch.Tensor, got {type(bias).__name__}")
    if bias.dtype not in FLOAT_DTYPES:
        raise TypeError(f"bias: dtype {bias.dtype}; allowed are bfloat16, float16, float32")
    if bias.shape != (n,) or bias.device != device:
        raise ValueError(f"bias: expected shape ({n},) on {device}, got {tuple(bias.shape)} on {bias.device}")


def _check_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}={dtype}: allowed are bfloat16, float16, float32")


def _check_outer(outer: torch.Tensor, fmt: BlockFormat, lead: list[int], device: torch.device) -> None:
    if not isinstance(outer, torch.Tensor):
        raise TypeError(f"outer: expected a float32 torch.Tensor, got {type(outer).__name__}")
    if fmt.outer is None:
        raise ValueError(f"outer: format {fmt.name} has no outer scale")
    allowed = (*lead, 1) if fmt.outer == "row" else ()
    if outer.dtype != torch.float32 or outer.device != device or tuple(outer.shape) != allowed:
        raise ValueError(
            f"outer: expected float32 of shape {allowed} on {device}, "
            f"got {outer.dtype} of shape {tuple(outer.shape)} on {outer.device}"
        )
