"""The specification of a matmul, without its tensors and sizes.

A `ProductSpec` is made and checked once, where arguments enter an op. The reference, the shape functions, the choice of
a kernel and the kernels all read it. An op carries it as one string, `str(spec)`, without the properties that the
tensors have themselves:

    mxfp8 @ mxfp8 -> bfloat16
    plain @ nvfp4, ragged rows -> bfloat16
    nvfp4 @ nvfp4 -> bfloat16 | relu product | mul s0 aux0 | to float16 | quantize nvfp4
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from fp4compile.formats import formats
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.formats import BlockFormat, compatible
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.quantize_spec import FLOAT_DTYPES

_PLAIN, _FAST, _TO = "plain", "fast accumulation", "to "


@dataclass(frozen=True)
class OperandSpec:
    """The properties of an operand, without its sizes, for which a kernel is specialised.

    format: None for a plain operand. dtype: dtype of the data. swizzled: whether the block scales are swizzled. outer:
    "none", "tensor" (a global scale), "row" (row scales) or, with ragged groups and for B of two matrices, "group" (a
    global scale for each).
    """

    format: BlockFormat | None
    dtype: torch.dtype
    swizzled: bool = False
    outer: str = "none"

    def __str__(self) -> str:
        return _PLAIN if self.format is None else self.format.name

    @property
    def element(self) -> str:
        return _PLAIN if self.format is None else self.format.element

    @property
    def scale(self) -> str:
        return "none" if self.format is None or self.format.scale is None else self.format.scale

    @property
    def scales_text(self) -> str:
        """The type of the block scales, then " swizzled" or " square" where they are not linear."""
        if self.swizzled:
            return f"{self.scale} swizzled"
        return f"{self.scale} square" if self.format is not None and self.format.square else self.scale

    @property
    def unit_bytes(self) -> int:
        """The number of bytes of a unit, which is two elements."""
        if self.format is None:
            return 2 * self.dtype.itemsize
        return 1 if self.format.packed else 2


@dataclass(frozen=True)
class ProductSpec:
    """A matmul of two operands, or of groups of them.

    a, b: the operands. out_dtype: the dtype to which the float32 product is rounded, before an epilogue.
    grouping: the assignment of rows of A to matrices of B.
    epilogue: the steps that follow in the same kernel, and whether it quantises the result or finds its amax; None
        stores the rounded product.
    bias: its dtype; None without one.
    fast_accumulation: whether FP8 matrix units may keep sums in fewer bits than float32; the reference never does.
    """

    a: OperandSpec
    b: OperandSpec
    out_dtype: torch.dtype
    grouping: Grouping = Grouping.DENSE
    epilogue: Epilogue | None = None
    bias: torch.dtype | None = None
    fast_accumulation: bool = False
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        """Raise ValueError where the fields do not fit each other."""
        a, b = self.a.format, self.b.format
        if a is not None and b is not None and not compatible(a, b):
            raise ValueError(f"formats {a.name} and {b.name} cannot be multiplied: scale types or blocks differ")
        if self.out_dtype not in FLOAT_DTYPES:
            raise ValueError(f"out_dtype={self.out_dtype}: allowed are bfloat16, float16, float32")
        if self.epilogue is not None and self.epilogue.dtype not in FLOAT_DTYPES:
            raise ValueError(f"epilogue: dtype {self.epilogue.dtype}; allowed are bfloat16, float16, float32")
        if self.bias is not None and self.grouping not in (Grouping.DENSE, Grouping.BATCHED):
            raise ValueError(f"bias: products of groups have none, got one with {self.grouping}")
        if self.epilogue is not None and self.grouping in (Grouping.RAGGED_CONTRACTION, Grouping.GATHERED):
            raise ValueError(f"epilogue: products of {self.grouping} have none, got {self.epilogue.strings()}")
        key = (self.a, self.b, self.out_dtype, self.grouping, self.epilogue, self.bias, self.fast_accumulation)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:  # computed once, because eager calls look up their kernel by it
        return self._hash

    def __str__(self) -> str:
        """The string among an op's arguments; `parse` reads it."""
        how = [str(self.grouping)] * (self.grouping not in (Grouping.DENSE, Grouping.BATCHED))
        head = ", ".join([f"{self.a} @ {self.b}", *how, *[_FAST] * self.fast_accumulation])
        head = f"{head} -> {_name(self.out_dtype)}"
        if self.epilogue is None:
            return head
        steps, end = self.epilogue.step_strings(), filter(None, [self.epilogue.end])
        return " | ".join([head, *steps, f"{_TO}{_name(self.epilogue.dtype)}", *end])

    @property
    def plain(self) -> bool:
        """Whether neither operand is quantised and there are no groups, so that torch computes the matmul."""
        whole = self.grouping in (Grouping.DENSE, Grouping.BATCHED)
        return whole and self.a.format is None and self.b.format is None

    @property
    def pair(self) -> bool:
        """Whether B has two matrices, and the epilogue makes one result of both matmuls."""
        return self.epilogue is not None and self.epilogue.pair

    @property
    def amax(self) -> bool:
        """Whether the kernel also finds the amax of the stored result."""
        return self.epilogue is not None and self.epilogue.amax

    @property
    def result(self) -> BlockFormat | None:
        """The format to which the result is quantised; None where it is stored in 16 or 32 bits."""
        return None if self.epilogue is None or self.epilogue.quantize is None else self.epilogue.quantize.format

    @property
    def results(self) -> int:
        """The number of result tensors: 2 for codes and scales or for a result and magnitudes, otherwise 1."""
        return 2 if self.amax or self.result is not None else 1

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the result before it is quantised."""
        return self.out_dtype if self.epilogue is None else self.epilogue.dtype


_Formats = tuple[BlockFormat | None, BlockFormat | None]


@cache
def _parsed(text: str) -> tuple[_Formats, dict[str, Any]]:
    """The formats in the text of a spec, and the other fields of its `ProductSpec`."""
    head, *rest = text.split(" | ")
    how, arrow, dtype = head.partition(" -> ")
    operands, *clauses = how.split(", ")
    names = operands.split(" @ ")
    if not arrow or len(names) != 2:
        raise ValueError(f"spec {text!r}: expected 'format @ format -> dtype', with {_PLAIN!r} for a plain operand")
    out_dtype = _dtype(text, dtype)
    grouping, fast = Grouping.DENSE, False
    for clause in clauses:
        if clause == _FAST:
            fast = True
        elif clause in tuple(Grouping):
            grouping = Grouping(clause)
        else:
            raise ValueError(f"spec {text!r}: {clause!r} is none of {', '.join([*Grouping, _FAST])}")
    places = [i for i, each in enumerate(rest) if each.startswith(_TO)]
    if rest and len(places) != 1:
        raise ValueError(f"spec {text!r}: expected one '{_TO}dtype' after the steps of an epilogue")
    epilogue = None
    if rest:
        steps = [*rest[: places[0]], *rest[places[0] + 1 :]]
        epilogue = Epilogue.parse(steps, out_dtype, _dtype(text, rest[places[0]].removeprefix(_TO)))
    a, b = (None if name == _PLAIN else formats.get(name) for name in names)
    fields = {"out_dtype": out_dtype, "grouping": grouping, "epilogue": epilogue, "fast_accumulation": fast}
    return (a, b), fields


def text_of(a: str | None, b: str | None, out_dtype: torch.dtype) -> str:
    """The spec, as text, of a matmul without an epilogue. a, b: names of formats; None for a plain operand."""
    return f"{a or _PLAIN} @ {b or _PLAIN} -> {_name(out_dtype)}"


def formats_of(text: str) -> _Formats:
    """The formats of both operands in the text of a spec; None for a plain operand."""
    return _parsed(text)[0]


@cache
def parse(text: str, a: tuple, b: tuple, batched: bool, bias: torch.dtype | None) -> ProductSpec:
    """The spec of a text and of properties of the tensors.

    a, b: the fields dtype, swizzled and outer of an `OperandSpec`. batched: whether B has batch dimensions. bias: its
    dtype. Raises ValueError for a text that `str(spec)` does not write.
    """
    formats_of_both, fields = _parsed(text)
    if batched and fields["grouping"] is Grouping.DENSE:
        fields = fields | {"grouping": Grouping.BATCHED}
    left, right = (OperandSpec(fmt, *each) for fmt, each in zip(formats_of_both, (a, b), strict=True))
    return ProductSpec(left, right, bias=bias, **fields)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(text: str, name: str) -> torch.dtype:
    found = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"spec {text!r}: {name!r} is no dtype")
    return found
