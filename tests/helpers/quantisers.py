"""Quantising by kernels or by the reference, without the op: what tests of kernels call."""

import dataclasses

import torch

from fp4compile.formats import reference
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import grouping_of
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.quantize_spec import QuantizeSpec, holds_values
from fp4compile.templates.quantize import dequantize, launches, row_on_chip
from tests.helpers.kernels import DEVICE, assert_same_bits

Quantized = launches.Quantized


def quantize(
    x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None = None, layout: str = "linear", *, dim: int = -1,
    seed: torch.Tensor | None = None, hadamard: bool = False, values: bool = False, offs: torch.Tensor | None = None,
    each_matrix: bool = False, scale_rule: str = "amax", prologue: Prologue | None = None, operands: tuple = (),
) -> Quantized:  # fmt: skip
    """(codes or values, block scales, global scale) along one dimension, by the kernels."""
    spec = QuantizeSpec(
        fmt, (dim,), layout, hadamard, scale_rule, (dim,) if values else (), grouping_of(offs, each_matrix),
        outer is not None, seed is not None, prologue,
    )  # fmt: skip
    (found,), _ = launches.quantize(spec, x, operands, offs, outer, seed)
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
    (rows, columns), _ = launches.quantize(spec, x, operands, offs, outer, seed)
    return rows, columns


def check_rows(x, fmt, outer=None, layout="linear"):
    """Quantise x, on the CPU, by the reference and by the kernels; dequantise as well, and do both at once."""
    expected = reference.quantize(x, fmt, outer, layout)
    on_device = x.to(DEVICE) if x.is_contiguous() else _move_view(x)
    given = None if outer is None else outer.to(DEVICE)
    got = quantize(on_device, fmt, given, layout)
    assert_same_bits(got, expected)
    if holds_values(fmt, x.dtype) and layout == "linear":
        at_once = quantize(on_device, fmt, given, values=True)
        assert_same_bits(at_once, [reference.values_of(*expected[:2], fmt), None, expected[2]])
    values = dequantize.dequantize(*got, fmt, x.shape[-1], x.dtype)
    assert_same_bits([values], [reference.dequantize(*expected, fmt, x.shape[-1], x.dtype)])


def _move_view(x):
    """x on the device with its strides."""
    base = torch.as_strided(x, (x.untyped_storage().size() // x.element_size(),), (1,), 0).to(DEVICE)
    return torch.as_strided(base, x.shape, x.stride(), x.storage_offset())


def make_tiles_tall(monkeypatch):
    """Give a program 16 rows where the kernels have one; rows that several programs share stay as they are."""

    def tall(config):
        return dataclasses.replace(config, rows=16) if getattr(config, "parts", 1) == 1 else config

    scaled_row_config, dequantize_config = row_on_chip.scaled_row_config, dequantize.dequantize_config
    monkeypatch.setattr(row_on_chip, "scaled_row_config", lambda *args: tall(scaled_row_config(*args)))
    monkeypatch.setattr(dequantize, "dequantize_config", lambda block: tall(dequantize_config(block)))
