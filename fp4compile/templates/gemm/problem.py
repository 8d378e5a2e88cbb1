"""What a product is, tensors apart: sizes, formats, scale layouts, epilogue and GPU. `choose` decides by nothing else.

A `Problem` is frozen. Its sizes may be symbolic; with concrete ones it can be a key of a dictionary.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fp4compile._compat import statically_true
from fp4compile.formats import reference
from fp4compile.formats.formats import BlockFormat, compatible
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Operand
from fp4compile.formats.reference import FLOATS
from fp4compile.hardware import Target

_COMPUTE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class OperandType:
    """What a kernel is specialised for in an operand, sizes apart.

    format: None for a plain operand. dtype: of the data. swizzled: whether the scales are. outer: "none", "tensor",
    "row" or, of grouped products, "group": whatever the outer scale belongs to.
    """

    format: BlockFormat | None
    dtype: torch.dtype
    swizzled: bool = False
    outer: str = "none"

    @property
    def element(self) -> str:
        return "plain" if self.format is None else self.format.element

    @property
    def scale(self) -> str:
        return "none" if self.format is None or self.format.scale is None else self.format.scale

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit, which is two elements."""
        if self.format is None:
            return 2 * self.dtype.itemsize
        return 1 if self.format.packed else 2


def block_of(a: OperandType, b: OperandType) -> int:
    """Elements of a block of either operand; without block scales, of a unit of work."""
    block = max((x.format.block_cols for x in (a, b) if x.format is not None), default=1)
    return block if block > 1 else 32


def compute_of(a: OperandType, b: OperandType) -> str:
    """The type that holds every value of both operands: "bf16", "fp16" or "fp32"; see `device.dequantize`."""
    plain = [x.dtype for x in (a, b) if x.format is None]
    if "e8m0" in (a.scale, b.scale):
        return "fp32" if any(dtype != torch.bfloat16 for dtype in plain) else "bf16"
    if len(set(plain)) > 1:
        return "fp32"
    return _COMPUTE[plain[0]] if plain else "fp16"


@dataclass(frozen=True)
class Problem:
    """A product [batches, m, k] x [batches or 1, n, k] -> [batches, m, n].

    b_batched: whether each matrix of A has its own B. bias: its dtype, None without one. epilogue: whether pointwise
    operations follow in the same kernel; out_dtype is what the product is rounded to before them.
    """

    a: OperandType
    b: OperandType
    m: int
    n: int
    k: int
    out_dtype: torch.dtype
    target: Target
    bias: torch.dtype | None = None
    batches: int = 1
    b_batched: bool = False
    epilogue: bool = False

    @property
    def empty(self) -> bool:
        """Whether the result has no element."""
        return statically_true(self.m * self.n * self.batches == 0)

    @property
    def block(self) -> int:
        """See `block_of`."""
        return block_of(self.a, self.b)

    @cached_property
    def compute(self) -> str:
        """See `compute_of`."""
        return compute_of(self.a, self.b)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What a library product of dequantised operands multiplies: 16 bits."""
        return torch.float16 if self.compute == "fp16" else torch.bfloat16

    def row_bytes(self, x: OperandType) -> int:
        """Bytes of a row of an operand's data, padding included."""
        if x.format is None:
            return self.k * x.dtype.itemsize
        elements = ceil_div(self.k, x.format.block_cols) * x.format.block_cols
        return elements // 2 if x.format.packed else elements


def problem_of(
    a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, target: Target, epilogue: bool = False
) -> Problem:
    """The problem of the arguments of `scaled_mm`, which may be fake tensors. Reads no data, makes no tensor.

    Raises ValueError or TypeError, naming the argument, for operands, scales, a bias or a dtype that do not fit.
    """
    check_formats(a, b, out_dtype)
    (a_type, a_batch, a_rows, a_k), (b_type, b_batch, n, b_k) = checked_operand("a", a), checked_operand("b", b)
    shared = not b_batch and bool(a_batch)
    if not shared and a_batch != b_batch:
        raise ValueError(f"batch dimensions differ: a has {a_batch}, b has {b_batch}")
    k = reference.contraction(a_k, a.format, b_k, b.format)
    reference.check_bias(bias, n)
    check_devices(a, b, bias=bias)
    batches, m = 1, a_rows
    for size in a_batch:
        batches = batches * size
    linear_rows = not (a_type.swizzled or (a.format is not None and a.format.square))
    if shared and (linear_rows or statically_true(batches == 1)):  # one product of all rows
        batches, m = 1, batches * m
    return Problem(a_type, b_type, m, n, k, out_dtype, target, None if bias is None else bias.dtype, batches,
                   not shared, epilogue)  # fmt: skip


def check_formats(a: Operand, b: Operand, out_dtype: torch.dtype) -> None:
    """Raises ValueError for formats that cannot be multiplied, and for an out_dtype that is none of a product."""
    if a.format is not None and b.format is not None and not compatible(a.format, b.format):
        raise ValueError(f"formats {a.format.name} and {b.format.name} cannot be multiplied: "
                         "scale types or blocks differ")  # fmt: skip
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype={out_dtype}: allowed are bfloat16, float16, float32")


def check_devices(a: Operand, b: Operand, **others: torch.Tensor | None) -> None:
    """Raises ValueError for a tensor that is not where A is. others: by the names of their arguments."""
    tensors = {"b": b.data, "a_scales": a.scales, "b_scales": b.scales, "a_outer": a.outer, "b_outer": b.outer}
    for name, tensor in {**tensors, **others}.items():
        if tensor is not None and tensor.device != a.data.device:
            raise ValueError(f"{name}: is on {tensor.device}, a on {a.data.device}")


def checked_operand(
    name: str, x: Operand, outers: tuple[tuple, ...] | None = None, swizzled_rows: Any = None
) -> tuple[OperandType, tuple, int, int]:
    """(type, batch dimensions, rows, elements of a row with padding) of an operand.

    outers: the shapes that its outer scale may have; None stands for () and [*batch, rows, 1]. swizzled_rows: rows that
    swizzled scales are of, where these are not the operand's.
    Raises ValueError or TypeError where its tensors do not go together.
    """
    fmt = x.format
    if x.data.dim() < 2:
        raise ValueError(f"{name}: expected two dimensions or more, got shape {tuple(x.data.shape)}")
    *batch, rows, width = x.data.shape
    if fmt is None:
        if x.data.dtype not in FLOATS:
            raise TypeError(f"{name}: a plain operand is bfloat16, float16 or float32, got {x.data.dtype}")
        if x.scales is not None:
            raise ValueError(f"{name}_scales: a plain operand has no block scales")
    elif x.data.dtype != fmt.data_dtype:
        raise TypeError(f"{name}: data of format {fmt.name} are {fmt.data_dtype}, got {x.data.dtype}")
    k = 2 * width if fmt is not None and fmt.packed else width
    swizzled = (
        fmt is not None
        and fmt.scale is not None
        and _swizzled(name, x, batch, rows, k, rows if swizzled_rows is None else swizzled_rows)
    )
    outers = ((), (*batch, rows, 1)) if outers is None else outers
    outer = "none"
    if x.outer is not None:
        outer = {0: "tensor", 1: "group"}.get(x.outer.dim(), "row")
        if x.outer.dtype != torch.float32 or tuple(x.outer.shape) not in outers:
            raise ValueError(f"{name}_outer: expected float32 of shape {' or '.join(map(str, outers))}, "
                             f"got {x.outer.dtype} of shape {tuple(x.outer.shape)}")  # fmt: skip
    return OperandType(fmt, x.data.dtype, swizzled, outer), tuple(batch), rows, k


def _swizzled(name: str, x: Operand, batch: list, rows: int, k: int, swizzled_rows: Any) -> bool:
    """Whether the block scales are swizzled, and then of swizzled_rows rows.

    Raises ValueError if they are missing or do not fit the data.
    """
    fmt, scales = x.format, x.scales
    if scales is None:
        raise ValueError(f"{name}_scales: format {fmt.name} needs block scales")
    blocks = ceil_div(k, fmt.block_cols)
    swizzled = scales.dim() == len(batch) + 1
    linear = (*batch, ceil_div(rows, fmt.block[0]), blocks)
    flat = (*batch, swizzled_numel(swizzled_rows, blocks))
    expected = flat if swizzled else linear
    if scales.dtype != fmt.scale_dtype or tuple(scales.shape) != expected:
        raise ValueError(f"{name}_scales: expected {fmt.scale_dtype} of shape {linear} (linear) or {flat} (swizzled), "
                         f"got {scales.dtype} of shape {tuple(scales.shape)}")  # fmt: skip
    return swizzled
