"""The specification of a call to a quantiser, without its tensors.

A `QuantizeSpec` is made and checked once, where arguments enter an op. The reference, the kernels and the shape
functions all read it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fp4compile._compat import statically_true
from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat, unknown_name
from fp4compile.formats.grouping import Grouping, check_offs, padded_rows
from fp4compile.formats.layouts import LAYOUTS, ceil_div, scale_layout, swizzled_numel
from fp4compile.formats.prologue import Prologue

ROWS, COLUMNS = -1, -2
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of plain operands, of biases and of results


@dataclass(frozen=True)
class QuantizeSpec:
    """One call of the op `quantize`.

    format: the format of the codes and scales. dims: the dimensions to quantise along: (-1,), the rows; (-2,), the
        columns; or (-1, -2), both from one read. Each dimension is the last one of its own results.
    layout: layout of the block scales, "linear" or "swizzled"; "linear" in any format without one-byte block scales.
    hadamard: quantise the Hadamard transform of the columns (of the rows, where dims is (-1,)).
    scale_rule: the rule for block scales, see `reference_scales`.
    values: the dims whose results are 16-bit dequantised values without the global or row scale, instead of codes.
    grouping: the parts that are quantised separately: none (DENSE), each matrix of a tensor of three dimensions
        (BATCHED), or each group of rows of a matrix that offsets cut (RAGGED_ROWS). Along the columns, the results of
        groups of rows are operands of a matmul whose groups lie along the contraction.
    static: whether the global or row scale is an argument. seeded: whether elements are rounded stochastically.
    prologue: the steps whose result is quantised; None quantises the tensor itself.
    """

    format: BlockFormat
    dims: tuple[int, ...] = (ROWS,)
    layout: str = "linear"
    hadamard: bool = False
    scale_rule: str = "amax"
    values: tuple[int, ...] = ()
    grouping: Grouping = Grouping.DENSE
    static: bool = False
    seeded: bool = False
    prologue: Prologue | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where the fields do not fit each other."""
        fmt = self.format
        if self.layout not in LAYOUTS:
            raise ValueError(unknown_name("layout", self.layout, LAYOUTS))
        object.__setattr__(self, "layout", scale_layout(fmt, native=self.layout == "swizzled"))
        if self.dims not in ((ROWS,), (COLUMNS,), (ROWS, COLUMNS)):
            raise ValueError(f"dim={list(self.dims)}: expected -1, -2 or [-1, -2]")
        if self.seeded and not fmt.packed:
            raise ValueError(f"seed: stochastic rounding is defined for E2M1 elements, format {fmt.name} has others")
        if self.hadamard and (fmt.scale != "e4m3" or fmt.square):
            raise ValueError(f"hadamard: the transform goes with NVFP4 blocks of 1x16, format {fmt.name} has others")
        if self.both and self.static and self.columns_separate:
            which = "with hadamard" if self.hadamard else f"in format {fmt.name}"
            raise ValueError(
                f"outer: {which}, rows and columns have separate global or row scales; quantise them separately"
            )
        self._check_scale_rule()
        self._check_groups()
        self._check_values()
        self._check_prologue()

    def _check_scale_rule(self) -> None:
        formats.check_scale_rule("scale_rule", self.scale_rule, [self.format])
        if self.scale_rule == "amax":
            return
        if self.seeded or self.hadamard:
            raise ValueError(
                f"scale_rule={self.scale_rule!r}: is for weights, which are rounded to nearest and not transformed"
            )
        if self.ragged:
            raise ValueError(f"scale_rule={self.scale_rule!r}: is for weights, which have no groups of rows")
        if self.both:
            raise ValueError(f"scale_rule={self.scale_rule!r}: goes along one dimension, got {list(self.dims)}")

    def _check_groups(self) -> None:
        fmt = self.format
        if self.grouping not in (Grouping.DENSE, Grouping.BATCHED, Grouping.RAGGED_ROWS):
            raise ValueError(f"grouping: a quantiser's is dense, batched or ragged rows, got {self.grouping}")
        if self.ragged and fmt.square:
            raise ValueError(f"format: {fmt.name} has square blocks, and groups may have any number of rows")
        if self.ragged and self.hadamard and COLUMNS not in self.dims:
            raise ValueError("hadamard: the transform goes along the rows of groups, dim -2")
        if self.each_matrix and self.both and not fmt.square:
            raise ValueError(
                f"format: matrices are quantised in both directions in square blocks, {fmt.name} has others"
            )

    def _check_values(self) -> None:
        if not set(self.values) <= set(self.dims):
            raise ValueError(
                f"values: expected some of {list(self.dims)}, which are quantised, got {list(self.values)}"
            )
        if self.values and (self.layout != "linear" or self.scale_rule != "amax"):
            raise ValueError(
                f"values: go with linear scales by the rule 'amax', got {self.layout!r} and {self.scale_rule!r}"
            )

    def _check_prologue(self) -> None:
        if self.prologue is None:
            return
        if self.each_matrix or self.scale_rule != "amax":
            raise ValueError("prologue: activations have one, not weights (each_matrix, scale_rule)")
        if self.prologue.stored and self.ragged:
            raise ValueError("stored: rows of groups store nothing besides")

    @property
    def ragged(self) -> bool:
        """Whether groups of rows are quantised separately."""
        return self.grouping is Grouping.RAGGED_ROWS

    @property
    def each_matrix(self) -> bool:
        """Whether each matrix is quantised separately."""
        return self.grouping is Grouping.BATCHED

    @property
    def both(self) -> bool:
        """Whether both rows and columns are quantised."""
        return len(self.dims) == 2

    @property
    def swizzled(self) -> bool:
        """Whether there are block scales in the swizzled layout."""
        return self.layout == "swizzled"

    @cached_property
    def columns_separate(self) -> bool:
        """Whether the results along the columns have their own global or row scales instead of those along the rows."""
        return self.hadamard or self.format.outer == "row"

    def transforms(self, dim: int) -> bool:
        """Whether the Hadamard transform is applied along a dimension."""
        return self.hadamard and (dim == COLUMNS or not self.both)

    def computes_outer(self, dim: int) -> bool:
        """Whether the results along a dimension include their own computed global or row scale."""
        shared = self.both and dim == COLUMNS and not self.columns_separate
        return self.format.outer is not None and not self.static and not shared

    # ------------------------------------------------------------ tensors

    def check_tensors(
        self, x: torch.Tensor, offs: torch.Tensor | None, outer: torch.Tensor | None, seed: torch.Tensor | None
    ) -> None:
        """Raise ValueError or TypeError, naming the argument, for tensors that do not fit the spec."""
        if offs is not None:
            check_offs(offs)
            if x.dim() != 2:
                raise ValueError(f"x: expected two dimensions, groups of rows, got shape {tuple(x.shape)}")
            if outer is not None and (outer.dim() or outer.dtype != torch.float32):
                raise ValueError(
                    f"outer: expected float32 of shape (), got {outer.dtype} of shape {tuple(outer.shape)}"
                )
        elif self.each_matrix and x.dim() != 3:
            raise ValueError(f"x: expected three dimensions where each matrix is alone, got shape {tuple(x.shape)}")
        elif (self.dims != (ROWS,) or self.prologue is not None) and x.dim() < 2:
            raise ValueError(f"x: expected two dimensions or more, got shape {tuple(x.shape)}")
        if seed is not None and (seed.dtype != torch.int64 or seed.dim()):
            raise ValueError(f"seed: expected int64 of shape (), got {seed.dtype} of shape {tuple(seed.shape)}")
        dtype = x.dtype if self.prologue is None else self.prologue.dtype  # of the elements that are quantised
        if self.values and not holds_values(self.format, dtype):
            raise ValueError(
                f"format: 16 bits hold the values of NVFP4, and of MX formats made of 16-bit numbers; "
                f"got {self.format.name} of {dtype}"
            )

    def check_amax(self, amax: torch.Tensor, x: torch.Tensor, groups: Any) -> None:
        """Raise ValueError if `amax` does not fit the global or row scales of x. groups: their number, or 0."""
        outer = self.format.outer
        plain = not (self.hadamard or self.both) if outer == "row" else outer == "tensor"
        two = self.hadamard and self.both  # separate scales: one is of transformed elements
        apart = self.ragged and (outer == "row" or self.dims != (ROWS,))
        if not plain or two or self.static or apart or self.scale_rule != "amax":
            raise ValueError(
                "amax: goes with a format whose global scale is computed for the tensor, for each group along its "
                "rows, or for each row where one dimension is quantised without hadamard. Scale rules, columns of "
                "groups, and hadamard along two dimensions go without it; "
                f"got {self.format.name} along {list(self.dims)}"
            )
        if self.prologue is not None:
            raise ValueError("amax: goes without a prologue, which computes what is quantised")
        *_, shape = self.shapes(x, groups, self.dims[0])
        unlike = amax.dim() != len(shape) or any(
            statically_true(a != b) for a, b in zip(amax.shape, shape, strict=True)
        )
        of_tensor = outer == "tensor" and not (self.each_matrix or self.ragged)
        if of_tensor and amax.dim() == 1:  # kernels read a constant number of them, a power of two
            count = amax.shape[0]
            unlike = not isinstance(count, int) or count.bit_count() != 1
        if amax.dtype != torch.float32 or unlike:
            other = " or (P,), P a power of two" if of_tensor else ""
            raise ValueError(f"amax: expected float32 of shape {shape}{other}, got {amax.dtype} of shape "
                             f"{tuple(amax.shape)}")  # fmt: skip

    def check_operands(self, operands: Sequence[torch.Tensor]) -> None:
        """Raise ValueError for tensors that the steps of the prologue cannot read. operands: the first one is x."""
        prologue = self.prologue
        if prologue is None:
            if len(operands) > 1:
                raise ValueError(f"operands: expected none without a prologue, got {len(operands) - 1}")
            return
        if prologue.dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype: expected one of {FLOAT_DTYPES}, got {prologue.dtype}")
        if len(operands) != len(prologue.kinds):
            raise ValueError(
                f"operands: expected {len(prologue.kinds) - 1} besides x for the prologue, got {len(operands) - 1}"
            )
        for i, operand in enumerate(operands):
            if operand.dtype not in FLOAT_DTYPES:
                raise ValueError(f"operands: expected floating-point tensors of {FLOAT_DTYPES}, got {operand.dtype}")
            shape = prologue.shape_of(i, operands[0].shape)
            if statically_true(operand.numel() != math.prod(shape)):
                raise ValueError(
                    f"operands: expected {prologue.kinds[i]}{i} of shape {shape}, got {tuple(operand.shape)}"
                )

    def shapes(self, x: torch.Tensor, groups: int, dim: int) -> tuple[tuple, tuple, tuple]:
        """The shapes of the codes (or values), block scales and global or row scale along a dimension; (0,) for none.

        groups: the number of groups of rows; unused where the spec is not ragged.
        """
        fmt, lead = self.format, list(x.shape)
        k = lead.pop(dim)
        groups = x.shape[0] if self.each_matrix else groups
        along_groups = self.ragged and dim == COLUMNS
        if along_groups:
            k = padded_rows(k, groups)
        blocks = ceil_div(k, fmt.block_cols)
        elements = blocks * fmt.block_cols
        data = (*lead, elements // 2 if fmt.packed and dim not in self.values else elements)
        scales = self._scales_shape(lead, blocks, groups, dim)
        outer: tuple = (0,)
        if self.computes_outer(dim) and fmt.outer == "row":
            outer = (groups, *lead, 1) if along_groups else (*lead, 1)
        elif self.computes_outer(dim):
            outer = (groups,) if self.ragged or self.each_matrix else ()
        return data, scales, outer

    def _scales_shape(self, lead: list, blocks: int, groups: int, dim: int) -> tuple:
        fmt = self.format
        if fmt.scale is None or dim in self.values:
            return (0,)
        *batch, rows = lead or [1]
        if self.layout == "swizzled":
            rows = padded_rows(rows, groups) if self.ragged and dim == ROWS else rows
            return (*batch, swizzled_numel(rows, blocks))
        block_rows = fmt.block[0] if fmt.block else 1
        return (*batch, ceil_div(rows, block_rows), blocks) if lead else (blocks,)


def holds_values(fmt: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether `fmt.values_dtype` holds the dequantised values of elements that were quantised from `dtype` exactly."""
    return fmt.scale == "e4m3" or (fmt.scale == "e8m0" and dtype.itemsize == 2)
