"""The functional op set: the language between the graph passes and the kernels.

    fp4compile::quantize(x, format, dim, *, outer, layout, seed, hadamard, scale_rule) -> (data, scales, outer)
    fp4compile::quantize_both(x, format, *, outer, layout, seed, hadamard)
        -> (data, scales, outer, columns, column_scales, column_outer)
    fp4compile::fake_quantize(x, format, *, outer) -> (values, outer)
    fp4compile::dequantize(data, scales, outer, format, cols, dtype) -> values
    fp4compile::scaled_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype) -> product
    fp4compile::scaled_mm_epilogue(the same, operands, epilogue, dtype) -> product after the steps of `epilogue`
    fp4compile::scaled_mm_horizontal(..., several b, ...) -> products of the same a; see `passes.fuse_horizontal`
    fp4compile::scaled_mm_library(as scaled_mm) -> product, by one call of cuBLASLt; see `templates.gemm.library`

Ops carry tensors, strings and ints, have no state and never alias or mutate, so that graph passes may merge, move
and recompute them. Of the tensors returned, those that a format does not have are empty ([0]); the column outer scale
is one of them unless a Hadamard transform gives the columns an amax of their own.
`fake_quantize` is for products that would dequantise A to 16 bits first. With its values as a plain A and its outer
scale as that of A, `scaled_mm` gives what it gives of codes and scales.
Random bits come from a seed, which is an input: a product that is recomputed gets the same bits.
`functional` is the eager interface to them, on `BlockScaled` operands.
"""

from functools import partial

import torch

from fp4compile.formats import formats, reference, reference_scales
from fp4compile.formats.epilogue import Epilogue, apply
from fp4compile.formats.formats import BlockFormat, unknown_name
from fp4compile.formats.layouts import LAYOUTS, ceil_div, swizzled_numel
from fp4compile.formats.operand import Operand

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

LIBRARY = torch.library.Library("fp4compile", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define(
    "quantize(Tensor x, str format, int dim=-1, *, Tensor? outer=None, str layout='linear', Tensor? seed=None,"
    " bool hadamard=False, str scale_rule='amax') -> (Tensor data, Tensor scales, Tensor outer_scale)",
    tags=TAGS,
)
LIBRARY.define(
    "quantize_both(Tensor x, str format, *, Tensor? outer=None, str layout='linear', Tensor? seed=None,"
    " bool hadamard=False) -> (Tensor data, Tensor scales, Tensor outer_scale,"
    " Tensor columns, Tensor column_scales, Tensor column_outer_scale)",
    tags=TAGS,
)
LIBRARY.define(
    "fake_quantize(Tensor x, str format, *, Tensor? outer=None) -> (Tensor values, Tensor outer_scale)", tags=TAGS
)
LIBRARY.define(
    "dequantize(Tensor data, Tensor? scales, Tensor? outer, str format, SymInt cols, ScalarType dtype) -> Tensor",
    tags=TAGS,
)
_PRODUCT = (
    "Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_outer, str? b_format, Tensor? bias, ScalarType out_dtype"
)
LIBRARY.define(f"scaled_mm({_PRODUCT}) -> Tensor", tags=TAGS)
LIBRARY.define(
    f"scaled_mm_epilogue({_PRODUCT}, Tensor[] operands, str[] epilogue, ScalarType dtype) -> Tensor", tags=TAGS
)
LIBRARY.define(f"scaled_mm_library({_PRODUCT}) -> Tensor", tags=TAGS)
LIBRARY.define(
    "scaled_mm_horizontal(Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format, Tensor[] b, Tensor[] b_scales,"
    " Tensor[] b_outer, str b_format, Tensor[] bias, ScalarType out_dtype) -> Tensor[]",
    tags=TAGS,
)


# ---------------------------------------------------------------- quantize


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(unknown_name("layout", layout, LAYOUTS))


@torch.library.impl(LIBRARY, "quantize", "CompositeExplicitAutograd")
def _quantize(x, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False, scale_rule="amax"):
    if scale_rule != "amax":
        return _quantize_swept(reference_scales.quantize, x, format, dim, outer, layout, seed, hadamard, scale_rule)
    return _quantize_by(reference.quantize, x, format, dim, outer, layout, seed, hadamard)


@torch.library.impl(LIBRARY, "quantize", "CUDA")
def quantize_cuda(
    x, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False, scale_rule="amax", reading=None
):
    """`quantize` by the Triton kernels; what a graph is lowered to. reading: with a prologue, see `ops.prologue`."""
    if scale_rule != "amax":
        from fp4compile.templates import scale_sweep

        return _quantize_swept(scale_sweep.quantize, x, format, dim, outer, layout, seed, hadamard, scale_rule)
    from fp4compile.templates.quantize import dispatch as kernels  # here, so that the CPU needs no Triton

    if reading is None:
        return _quantize_by(kernels.quantize, x, format, dim, outer, layout, seed, hadamard)
    implementation = partial(kernels.quantize, reading=reading)
    return _quantize_by(implementation, x, format, dim, outer, layout, seed, hadamard, reading.seeds)


def _quantize_by(implementation, x, format, dim, outer, layout, seed, hadamard, seeds=()):
    fmt = formats.get(format)
    check_layout(layout)
    check_training(fmt, seed, hadamard, seeds)
    stream = _stream(x, dim)
    data, scales, computed = implementation(
        x.movedim(dim, -1), fmt, outer, layout, seed=seed, stream=stream, transform=hadamard
    )
    scales = _present(scales, x, fmt)
    # A given outer scale is not handed through: an op may not return its input.
    return data, scales, computed_outer(x, outer, computed)


def _quantize_swept(implementation, x, format, dim, outer, layout, seed, hadamard, scale_rule):
    """`quantize` with block scales of another rule than "amax"."""
    fmt = formats.get(format)
    check_layout(layout)
    check_scale_rule(fmt, scale_rule, seed, hadamard)
    data, scales, computed = implementation(x.movedim(dim, -1), fmt, outer, layout, scale_rule)
    return data, scales, computed_outer(x, outer, computed)


def _present(scales: torch.Tensor | None, x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Block scales, [0] where the format has none."""
    return x.new_empty(0, dtype=fmt.scale_dtype) if scales is None else scales


def _stream(x: torch.Tensor, dim: int) -> int:
    """Which of a seed's streams of random bits: the two directions of one gradient must not round alike."""
    return 0 if dim in (-1, x.dim() - 1) else 1


def computed_outer(x: torch.Tensor, given: torch.Tensor | None, computed: torch.Tensor | None) -> torch.Tensor:
    """An outer scale that was computed, [0] where none was."""
    return computed if given is None and computed is not None else x.new_empty(0, dtype=torch.float32)


def check_scale_rule(fmt: BlockFormat, rule: str, seed: torch.Tensor | None, hadamard: bool) -> None:
    formats.check_scale_rule("scale_rule", rule, fmt)
    if rule != "amax" and (seed is not None or hadamard):
        raise ValueError(f"scale_rule={rule!r}: is for weights, which are rounded to nearest and not transformed")


def check_training(fmt: BlockFormat, seed: torch.Tensor | None, hadamard: bool, seeds: tuple = ()) -> None:
    """Raises ValueError where a format knows no such rounding or transform. seeds: the shape that a seed has."""
    if seed is not None:
        if not fmt.packed:
            raise ValueError(f"seed: stochastic rounding is defined for E2M1 elements, format {fmt.name} has others")
        if seed.dtype != torch.int64 or tuple(seed.shape) != seeds:
            raise ValueError(f"seed: expected int64 of shape {seeds}, got {seed.dtype} of shape {tuple(seed.shape)}")
    if hadamard and (fmt.scale != "e4m3" or fmt.square):
        raise ValueError(f"hadamard: the transform goes with NVFP4 blocks of 1x16, format {fmt.name} has others")


@torch.library.register_fake("fp4compile::quantize", lib=LIBRARY)
def _quantize_fake(x, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False, scale_rule="amax"):
    fmt = formats.get(format)
    check_layout(layout)
    check_training(fmt, seed, hadamard)
    check_scale_rule(fmt, scale_rule, seed, hadamard)
    lead = list(x.shape)
    k = lead.pop(dim)
    blocks = ceil_div(k, fmt.block_cols)
    block_bytes = fmt.block_cols // 2 if fmt.packed else fmt.block_cols
    data = x.new_empty((*lead, blocks * block_bytes), dtype=fmt.data_dtype)
    scales = x.new_empty(scales_shape(lead, blocks, fmt, layout), dtype=fmt.scale_dtype)
    outer_shape: tuple = (0,)
    if outer is None and fmt.outer is not None:
        outer_shape = (*lead, 1) if fmt.outer == "row" else ()
    return data, scales, x.new_empty(outer_shape, dtype=torch.float32)


def scales_shape(lead: list, blocks, fmt: BlockFormat, layout: str) -> tuple:
    if fmt.scale is None:
        return (0,)
    *batch, rows = lead or [1]
    if layout == "swizzled":
        return (*batch, swizzled_numel(rows, blocks))
    if not lead:
        return (blocks,)
    return (*batch, ceil_div(rows, fmt.block[0]), blocks)


# ---------------------------------------------------------------- quantize_both


@torch.library.impl(LIBRARY, "quantize_both", "CompositeExplicitAutograd")
def _quantize_both(x, format, *, outer=None, layout="linear", seed=None, hadamard=False):
    _check_both(format, x, outer, hadamard)
    rows = _quantize(x, format, -1, outer=outer, layout=layout, seed=seed)
    # Columns are quantised by the amax, too: the scale made of it, given as a static one, has another reciprocal.
    *columns, down = _quantize(x, format, -2, outer=outer, layout=layout, seed=seed, hadamard=hadamard)
    return *rows, *columns, down if columns_apart(format, hadamard) else x.new_empty(0, dtype=torch.float32)


@torch.library.impl(LIBRARY, "quantize_both", "CUDA")
def quantize_both_cuda(x, format, *, outer=None, layout="linear", seed=None, hadamard=False, reading=None):
    """`quantize_both` by the Triton kernels: one read of x (and one for the amax of a dynamic two-level format)."""
    from fp4compile.templates.quantize import dispatch as kernels

    _check_both(format, x, outer, hadamard)
    check_layout(layout)
    check_training(formats.get(format), seed, hadamard, () if reading is None else reading.seeds)
    fmt = formats.get(format)
    rows, columns = kernels.quantize_both(x, fmt, outer, layout, seed=seed, transform=hadamard, reading=reading)
    # Where both have the same outer scale, an op may not return it twice.
    return (
        rows[0],
        _present(rows[1], x, fmt),
        computed_outer(x, outer, rows[2]),
        columns[0],
        _present(columns[1], x, fmt),
        computed_outer(x, outer, columns[2] if columns_apart(format, hadamard) else None),
    )


@torch.library.register_fake("fp4compile::quantize_both", lib=LIBRARY)
def _quantize_both_fake(x, format, *, outer=None, layout="linear", seed=None, hadamard=False):
    _check_both(format, x, outer, hadamard)
    rows = _quantize_fake(x, format, -1, outer=outer, layout=layout, seed=seed)
    data, scales, fresh = _quantize_fake(x, format, -2, outer=outer, layout=layout, seed=seed, hadamard=hadamard)
    return *rows, data, scales, fresh if columns_apart(format, hadamard) else x.new_empty(0, dtype=torch.float32)


def _check_both(format: str, x: torch.Tensor, outer: torch.Tensor | None, hadamard: bool) -> None:
    if x.dim() < 2:
        raise ValueError(f"x: expected two dimensions or more, got shape {tuple(x.shape)}")
    check_outer_of_both(format, outer, hadamard)


def check_outer_of_both(format: str, outer: torch.Tensor | None, hadamard: bool) -> None:
    """Raises ValueError for an outer scale that is given where rows and columns each have their own."""
    if outer is not None and columns_apart(format, hadamard):
        which = "with hadamard" if hadamard else f"in format {format}"
        raise ValueError(f"outer: {which}, rows and columns have outer scales of their own; quantise them apart")


def columns_apart(format: str, hadamard: bool) -> bool:
    """Whether columns have other outer scales than rows."""
    return hadamard or formats.get(format).outer == "row"


# ---------------------------------------------------------------- fake_quantize


@torch.library.impl(LIBRARY, "fake_quantize", "CompositeExplicitAutograd")
def _fake_quantize(x, format, *, outer=None):
    fmt = _fake_quantizable_format(format)
    values, computed = reference.fake_quantize(x, fmt, outer)
    return values, computed_outer(x, outer, computed)


@torch.library.impl(LIBRARY, "fake_quantize", "CUDA")
def fake_quantize_cuda(x, format, *, outer=None, reading=None):
    """`fake_quantize` by the Triton kernels that quantise rows; what a graph is lowered to."""
    from fp4compile.templates.quantize import dispatch as kernels

    fmt = _fake_quantizable_format(format)
    values, computed = kernels.fake_quantize(x, fmt, outer, reading=reading)
    return values, computed_outer(x, outer, computed)


@torch.library.register_fake("fp4compile::fake_quantize", lib=LIBRARY)
def _fake_quantize_fake(x, format, *, outer=None):
    fmt = _fake_quantizable_format(format)
    *_, fresh = _quantize_fake(x, format, outer=outer)
    padded = ceil_div(x.shape[-1], fmt.block_cols) * fmt.block_cols
    return x.new_empty((*x.shape[:-1], padded), dtype=torch.float16), fresh


def fake_quantizable(fmt: BlockFormat) -> bool:
    """Whether `fake_quantize` takes the format: float16 holds all E2M1 elements times E4M3 scales."""
    return fmt.scale == "e4m3" and not fmt.square


def _fake_quantizable_format(format: str) -> BlockFormat:
    fmt = formats.get(format)
    if not fake_quantizable(fmt):
        raise ValueError(f"format: fake_quantize takes NVFP4 in blocks of 1x16, format {fmt.name} is another")
    return fmt


# ---------------------------------------------------------------- dequantize


@torch.library.impl(LIBRARY, "dequantize", "CompositeExplicitAutograd")
def _dequantize(data, scales, outer, format, cols, dtype):
    return reference.dequantize(data, scales, outer, formats.get(format), cols, dtype)


@torch.library.impl(LIBRARY, "dequantize", "CUDA")
def dequantize_cuda(data, scales, outer, format, cols, dtype):
    """`dequantize` by the Triton kernel; what a graph is lowered to."""
    from fp4compile.templates.quantize import dispatch as kernels

    return kernels.dequantize(data, scales, outer, formats.get(format), cols, dtype)


@torch.library.register_fake("fp4compile::dequantize", lib=LIBRARY)
def _dequantize_fake(data, scales, outer, format, cols, dtype):
    return data.new_empty((*data.shape[:-1], cols), dtype=dtype)


# ---------------------------------------------------------------- scaled_mm


@torch.library.impl(LIBRARY, "scaled_mm", "CompositeExplicitAutograd")
def _scaled_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    return reference.scaled_mm(
        operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format), bias, out_dtype
    )  # fmt: skip


@torch.library.impl(LIBRARY, "scaled_mm", "CUDA")
def scaled_mm_cuda(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, choice=None):
    """`scaled_mm` by the kernel of a `Choice`; what a graph is lowered to."""
    from fp4compile.templates.gemm.dispatch import scaled_mm  # here, so that the CPU needs no Triton

    a, b = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return scaled_mm(a, b, bias, out_dtype, choice=choice)


@torch.library.register_fake("fp4compile::scaled_mm", lib=LIBRARY)
def _scaled_mm_fake(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    reference.check_bias(bias, b.shape[-2])
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=out_dtype)


def operand(data, scales, outer, format: str | None) -> Operand:
    """An operand of its arguments in the schema."""
    return Operand(data, scales, outer, None if format is None else formats.get(format))


# ---------------------------------------------------------------- scaled_mm_epilogue


@torch.library.impl(LIBRARY, "scaled_mm_epilogue", "CompositeExplicitAutograd")
def _scaled_mm_epilogue(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, operands, epilogue, dtype
):
    product = _scaled_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype)
    return apply(product, Epilogue.parse(epilogue, out_dtype, dtype), operands)


@torch.library.impl(LIBRARY, "scaled_mm_epilogue", "CUDA")
def scaled_mm_epilogue_cuda(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, operands, epilogue, dtype,
    choice=None,
):  # fmt: skip
    """`scaled_mm` and the steps of `epilogue` in one kernel; what a graph is lowered to."""
    from fp4compile.templates.gemm.dispatch import scaled_mm

    a, b = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return scaled_mm(a, b, bias, out_dtype, Epilogue.parse(epilogue, out_dtype, dtype), operands, choice)


@torch.library.register_fake("fp4compile::scaled_mm_epilogue", lib=LIBRARY)
def _scaled_mm_epilogue_fake(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, operands, epilogue, dtype
):
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=dtype)


# ---------------------------------------------------------------- scaled_mm_horizontal


@torch.library.impl(LIBRARY, "scaled_mm_horizontal", "CompositeExplicitAutograd")
def _scaled_mm_horizontal(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    a = operand(a, a_scales, a_outer, a_format)
    group = _group(b, b_scales, b_outer, b_format, bias)
    return [reference.scaled_mm(a, each, each_bias, out_dtype) for each, each_bias in group]


@torch.library.impl(LIBRARY, "scaled_mm_horizontal", "CUDA")
def scaled_mm_horizontal_cuda(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    """`scaled_mm_horizontal` by the Triton kernels; what a graph is lowered to."""
    from fp4compile.templates.gemm.dispatch import scaled_mm_group

    group = _group(b, b_scales, b_outer, b_format, bias)
    return scaled_mm_group(operand(a, a_scales, a_outer, a_format), group, out_dtype)


@torch.library.register_fake("fp4compile::scaled_mm_horizontal", lib=LIBRARY)
def _scaled_mm_horizontal_fake(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    group = _group(b, b_scales, b_outer, b_format, bias)
    return [a.new_empty((*a.shape[:-1], each.data.shape[-2]), dtype=out_dtype) for each, _ in group]


def _group(b, b_scales, b_outer, b_format: str, bias) -> list[tuple[Operand, torch.Tensor | None]]:
    """(B, bias) of each product. Raises ValueError where some products have what others have not."""
    for name, given in (("b_scales", b_scales), ("b_outer", b_outer), ("bias", bias)):
        if given and len(given) != len(b):
            raise ValueError(f"{name}: expected none or one for each of {len(b)} products, got {len(given)}")
    each = zip(b, *(given or [None] * len(b) for given in (b_scales, b_outer, bias)), strict=True)
    return [(operand(data, scales, outer, b_format), own_bias) for data, scales, outer, own_bias in each]


# ---------------------------------------------------------------- scaled_mm_library

# A graph holds this op only after it was lowered: Inductor cannot lower `aten._scaled_mm_v2` with swizzled scales, nor
# time products of views (`_compat.times_products`), and calls an op that it does not know as it stands.
torch.library.impl(LIBRARY, "scaled_mm_library", "CompositeExplicitAutograd")(_scaled_mm)
torch.library.register_fake("fp4compile::scaled_mm_library", lib=LIBRARY)(_scaled_mm_fake)


@torch.library.impl(LIBRARY, "scaled_mm_library", "CUDA")
def scaled_mm_library_cuda(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    """Operands [M, K] x [N, K] by a call of torch: two-level NVFP4 on SM100, or `float8_rowwise`."""
    from fp4compile.templates.gemm.dispatch import scaled_mm_library

    a, b = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return scaled_mm_library(a, b, bias, out_dtype)
