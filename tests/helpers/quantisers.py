"""Quantising by kernels or by the reference, without the op: what tests of kernels call."""

import torch

from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import grouping_of
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.quantize_spec import QuantizeSpec
from fp4compile.templates.quantize import plan

Quantized = plan.Quantized


def quantize(
    x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None = None, layout: str = "linear", *, dim: int = -1,
    seed: torch.Tensor | None = None, hadamard: bool = False, values: bool = False, offs: torch.Tensor | None = None,
    each_matrix: bool = False, scale_rule: str = "amax", prologue: Prologue | None = None, operands: tuple = (),
) -> Quantized:  # fmt: skip
    """(codes or values, block scales, outer scale) along one dimension, by the kernels."""
    spec = QuantizeSpec(
        fmt, (dim,), layout, hadamard, scale_rule, (dim,) if values else (), grouping_of(offs, each_matrix),
        outer is not None, seed is not None, prologue,
    )  # fmt: skip
    (found,), _ = plan.quantize(spec, x, operands, offs, outer, seed)
    return found


def quantize_both(
    x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None = None, layout: str = "linear", *,
    seed: torch.Tensor | None = None, hadamard: bool = False, values: tuple[int, ...] = (),
    offs: torch.Tensor | None = None, each_matrix: bool = False, prologue: Prologue | None = None,
    operands: tuple = (),
) -> tuple[Quantized, Quantized]:  # fmt: skip
    """What `quantize` gives along the rows and down the columns, by the kernels."""
    spec = QuantizeSpec(
        fmt, (-1, -2), layout, hadamard, "amax", values, grouping_of(offs, each_matrix), outer is not None,
        seed is not None, prologue,
    )  # fmt: skip
    (rows, columns), _ = plan.quantize(spec, x, operands, offs, outer, seed)
    return rows, columns
