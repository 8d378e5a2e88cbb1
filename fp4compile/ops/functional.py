"""The eager interface: quantise, multiply and dequantise tensors outside of compiled graphs."""

from dataclasses import dataclass
from typing import Any

import torch

from fp4compile.formats import formats
from fp4compile.formats.checks import check_float
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import Grouping, Groups, padded_rows
from fp4compile.formats.layouts import LAYOUTS, ceil_div, scale_layout
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.quantize_spec import FLOAT_DTYPES
from fp4compile.formats.reference_grouped import with_linear_scales
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.quantize import DEQUANTIZE, QUANTIZE


@dataclass(frozen=True, eq=False)  # no `==`: the comparison of two tensors has no truth value
class BlockScaled:
    """A quantised tensor: codes, scales and their format. value = element * block scale * outer.

    data: the codes, with the quantised dimension last and padded to whole blocks: uint8 with two codes a byte (E2M1),
        float8_e4m3fn or float8_e5m2.
    scales: the block scales, of the format's `scale_dtype`; None for a format without block scales. In the layout
        "linear": [..., rows, blocks] (square blocks: [..., rows / block, blocks]); "swizzled": one flat run for each
        matrix.
    outer: the float32 global scale [] or row scales [..., rows, 1], which decode; None means 1. With groups, one scale
        per group, [G], or per column of a group, [G, columns, 1], where the groups lie along the quantised dimension.
    format: the `BlockFormat`, see `formats`.
    shape: the shape of the represented values, with the quantised dimension last and without padding.
    layout: the layout of the block scales, "linear" or "swizzled", see `layouts`.
    grouping: `Grouping.BATCHED` if each matrix was quantised separately; RAGGED_ROWS, or RAGGED_CONTRACTION (with each
        group padded to a multiple of 128), if groups of rows were; otherwise DENSE.
    offs, rows: with ragged groups, their offsets and the tensor's number of rows; see `formats.grouping`.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    outer: torch.Tensor | None
    format: BlockFormat
    shape: tuple[int, ...]
    layout: str = "linear"
    grouping: Grouping = Grouping.DENSE
    offs: torch.Tensor | None = None
    rows: int | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The represented values, of shape `shape`.

        dtype: bf16, fp16 or fp32.

        Raises ValueError for another dtype.
        """
        check_float("dtype", dtype)
        dense = self.grouping is Grouping.DENSE
        if dense:
            outer, made = self.outer, dtype
        else:
            outer, made = None, torch.float32
        values = DEQUANTIZE(self.data, self._linear_scales(), outer, self.format.name, self.shape[-1], made)
        if dense or self.outer is None:
            return values.to(dtype)
        return (values * self._outer_of_values(self.outer)).to(dtype)

    def _linear_scales(self) -> torch.Tensor | None:
        """The block scales without the padding between groups of rows, for `reference.dequantize`."""
        if self.grouping is not Grouping.RAGGED_ROWS or self.layout != "swizzled" or self.scales is None:
            return self.scales
        return with_linear_scales(Operand(self.data, self.scales, None, self.format), self._cut()).scales

    def _cut(self) -> Groups:
        if self.offs is None or self.rows is None:
            raise ValueError(f"offs, rows: {self.grouping} need both, got {self.offs} and {self.rows}")
        return Groups.of(self.offs, self.rows)

    def _outer_of_values(self, outer: torch.Tensor) -> torch.Tensor:
        """The global or row scale of each element, in a shape that broadcasts to `shape`."""
        if self.grouping is Grouping.BATCHED:
            return outer.view(-1, 1, 1) if outer.dim() == 1 else outer
        by_rows = self.grouping is Grouping.RAGGED_ROWS
        if outer.dim() == 0 or (by_rows and outer.dim() == 2):
            return outer
        groups = self._cut()
        if by_rows:
            return torch.cat((outer, outer.new_ones(1)))[groups.of_rows].unsqueeze(-1)
        of_columns, _ = groups.of_padded()
        return outer[of_columns] if outer.dim() == 1 else outer[of_columns].squeeze(-1).t()


def quantize(
    x: torch.Tensor,
    format: str | BlockFormat,
    *,
    dim: int = -1,
    outer: torch.Tensor | None = None,
    layout: str = "linear",
    seed: torch.Tensor | None = None,
    hadamard: bool = False,
    offs: torch.Tensor | None = None,
    per_matrix: bool = False,
    scales: str = "amax",
) -> BlockScaled:
    """Quantise a tensor to a block format.

    x: bf16, fp16 or fp32, of one dimension or more, any strides and any size; it is padded with zeros to whole blocks.
    format: a name of `formats.NAMED`, a spec string or a `BlockFormat`.
    dim: the dimension to quantise along. It is the last dimension of the result: dim=0 of a matrix gives the codes of
        the transposed matrix, whose blocks are columns of x (32x1).
    outer: a static global scale, float32 [] (row scales [..., rows, 1] if the format has them); None computes it.
    layout: "linear" or "swizzled", the layout of the result's block scales; "linear" if they are no bytes.
    seed: int64 [], to round E2M1 elements stochastically; the same seed gives the same codes. None rounds to nearest.
    hadamard: quantise the random Hadamard transform of x along dim, in groups of 16 (NVFP4 blocks of 1x16). The
        result represents the transformed values, and its shape has whole groups.
    offs: int32 [G], on the device of x: the end of each group of rows of a matrix x, to quantise each group
        separately for `scaled_grouped_mm`. With dim=0, the result has each group padded to a multiple of 128.
    per_matrix: quantise each matrix of x [G, R, C] separately, for `scaled_grouped_mm`. Not with offs.
    scales: the rule for block scales. "amax" makes them of each block's largest element. For weights in NVFP4 formats
        without row scales, and in MXFP4, "mse" takes the scale of least squared error, with the bits of
        `reference_scales`. Not with a seed, hadamard or offs.

    Returns a `BlockScaled`, which is not differentiable.

    Raises TypeError for an argument of the wrong type, an x that is not dense, or not bf16, fp16 or fp32, offs that
    are not int32 and a seed on another device; ValueError for an unknown format, layout or rule of scales, a dim out of
    range, an outer of wrong shape, dtype or device, a seed of wrong shape or dtype, groups or matrices that do not fit
    x, and for an outer, a seed, a transform or scales that the format does not support.
    """
    fmt = formats.get(format)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        kind = "a nested one" if x.is_nested else f"one of the layout {str(x.layout).removeprefix('torch.')}"
        raise TypeError(f"x: expected a dense tensor, got {kind}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x: dtype {x.dtype} cannot be quantised; allowed are bfloat16, float16, float32")
    if not isinstance(dim, int):
        raise TypeError(f"dim: expected an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: x has {x.dim()} dimensions")
    if layout not in LAYOUTS:
        raise ValueError(formats.unknown_name("layout", layout, LAYOUTS))
    layout = scale_layout(fmt, native=layout == "swizzled")
    formats.check_scale_rule("scales", scales, [fmt])
    if scales != "amax" and (seed is not None or hadamard or offs is not None):
        raise ValueError(f"scales={scales!r}: is for weights, and goes without seed, hadamard and offs")
    if offs is not None and not isinstance(offs, torch.Tensor):
        raise TypeError(f"offs: expected an int32 torch.Tensor, got {type(offs).__name__}")
    lead = list(x.shape)
    k = lead.pop(dim)
    grouped = offs is not None or per_matrix
    if offs is not None and (x.dim() != 2 or per_matrix):
        raise ValueError(f"offs: they go with a matrix x and without per_matrix, x has shape {tuple(x.shape)}")
    if outer is not None and grouped and fmt.outer == "row":
        raise ValueError(f"outer: format {fmt.name} scales rows, whose scales are computed where there are groups")
    if outer is not None:
        _check_outer(outer, fmt, lead, x.device)
    if seed is not None and (not isinstance(seed, torch.Tensor) or seed.device != x.device):
        raise TypeError(f"seed: expected an int64 torch.Tensor on {x.device}, got {seed!r}")
    options: dict[str, Any] = {
        "outer": outer, "layout": layout, "seed": seed, "hadamard": hadamard, "scale_rule": scales
    }  # fmt: skip
    dim = dim if dim < 0 else dim - x.dim()
    if grouped and dim not in (-1, -2):
        raise ValueError(f"dim={dim}: a grouped tensor is quantised along dimension -1 or -2")
    data, block_scales, computed = QUANTIZE(
        x.detach(), fmt.name, dim, offs=offs, each_matrix=per_matrix, **options
    )  # fmt: skip
    k = padded_rows(k, offs.shape[0]) if offs is not None and dim == -2 else k
    if hadamard:
        k = ceil_div(k, fmt.block_cols) * fmt.block_cols
    if outer is None and fmt.outer is not None:
        outer = computed
    block_scales = block_scales if fmt.scale else None
    if not grouped:
        return BlockScaled(data, block_scales, outer, fmt, (*lead, k), layout)
    ragged = Grouping.RAGGED_ROWS if dim == -1 else Grouping.RAGGED_CONTRACTION
    kind = Grouping.BATCHED if offs is None else ragged
    rows = None if offs is None else x.shape[0]
    return BlockScaled(data, block_scales, outer, fmt, (*lead, k), layout, kind, offs, rows)


def scaled_mm(
    a: BlockScaled, b: BlockScaled, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A @ B^T of two quantised operands: [..., M, K] x [..., N, K] (or [N, K]) -> [..., M, N] in out_dtype.

    The float32 product is multiplied once by a.outer * b.outer, bias is added, and the result is cast.

    a, b: both quantised along K. Their formats may differ if their scale types and block lengths are equal (such as
        MXFP8 with MXFP4, or NVFP4 blocks of 1x16 with blocks of 16x16).
    bias: [N], bf16, fp16 or fp32; None adds nothing.
    out_dtype: bf16, fp16 or fp32.

    Raises TypeError for an operand that is no `BlockScaled` or a bias that is no tensor, ValueError for shapes,
    formats, devices, a bias or an out_dtype that do not fit.
    """
    if bias is not None and not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias: expected a torch.Tensor, got {type(bias).__name__}")
    x = Arguments.of(_operand("a", a), _operand("b", b), bias, out_dtype)
    _check_contraction(a, b)
    args, options = x.call
    return SCALED_MM(*args, **options)


def scaled_grouped_mm(
    a: BlockScaled, b: BlockScaled, offs: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The matmuls of groups, such as experts with their tokens sorted; each is computed as by `scaled_mm`.

    a, b: A [M, K], whose rows `offs` cuts in groups, and B [G, N, K], one matrix per group: out [M, N], zero in rows of
        no group. Or both quantised with offs along the rows (dim=0), [P, rows] and [Q, rows]: out [G, P, Q]. See the
        arguments `offs` and `per_matrix` of `quantize`. The formats must fit as in `scaled_mm`.
    offs: int32 [G], the row after the last one of each group, on the operands' device. The host never reads its values:
        an offset that decreases makes an empty group, and an offset beyond M counts as M.
    out_dtype: bf16, fp16 or fp32.

    Raises TypeError for an operand that is no `BlockScaled` and for offs that are not int32, ValueError for shapes,
    formats, groups, devices or an out_dtype that do not fit.
    """
    left, right = _operand("a", a), _operand("b", b)
    if not isinstance(offs, torch.Tensor):
        raise TypeError(f"offs: expected an int32 torch.Tensor, got {type(offs).__name__}")
    along = a.grouping is b.grouping is Grouping.RAGGED_CONTRACTION
    if not along and (len(a.shape), len(b.shape)) != (2, 3):
        raise ValueError("a, b: expected [M, K] and [G, N, K], or two that were quantised with offs and dim=0; "
                         f"got shapes {a.shape} and {b.shape}, {a.grouping} and {b.grouping}")  # fmt: skip
    if along and a.rows != b.rows:
        raise ValueError(f"numbers of rows differ: a was made of {a.rows}, b of {b.rows}")
    for operand in (a, b):
        if operand.offs is not None and operand.offs.shape != offs.shape:
            raise ValueError(f"offs: expected the {operand.offs.shape[0]} groups of an operand, got {offs.shape[0]}")
    rows = a.rows if along else a.shape[0]
    if not along:
        _check_contraction(a, b)
    args, options = Arguments.of(left, right, None, out_dtype, offs=offs, rows=rows).call
    return SCALED_MM(*args, **options)


def _operand(name: str, x: BlockScaled) -> Operand:
    if not isinstance(x, BlockScaled):
        raise TypeError(f"{name}: expected a BlockScaled, got {type(x).__name__}")
    return Operand(x.data, x.scales, x.outer, x.format)


def _check_contraction(a: BlockScaled, b: BlockScaled) -> None:
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"contraction dimensions differ: a has {a.shape[-1]}, b has {b.shape[-1]}")


def _check_outer(outer: torch.Tensor, fmt: BlockFormat, lead: list[int], device: torch.device) -> None:
    if not isinstance(outer, torch.Tensor):
        raise TypeError(f"outer: expected a float32 torch.Tensor, got {type(outer).__name__}")
    if fmt.outer is None:
        raise ValueError(f"outer: format {fmt.name} has no global or row scale")
    allowed = (*lead, 1) if fmt.outer == "row" else ()
    if outer.dtype != torch.float32 or outer.device != device or tuple(outer.shape) != allowed:
        raise ValueError(
            f"outer: expected float32 of shape {allowed} on {device}, "
            f"got {outer.dtype} of shape {tuple(outer.shape)} on {outer.device}"
        )
