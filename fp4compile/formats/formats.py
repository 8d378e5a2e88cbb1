"""Block formats: the meaning of the stored numbers of a quantised tensor.

A format is an element type, the block of elements that shares one scale, the type of that
scale, an optional float32 scale of the tensor (global scale) or of each row (row scale), and
the published contract whose bits it follows. `reference.py` has the arithmetic.

    value = element * block scale * global or row scale
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

ELEMENT_MAX = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}
ELEMENT_DTYPE = {"e2m1": torch.uint8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALE_DTYPE = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu, "float32": torch.float32}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes

NVFP4_CONTRACTS = ("torchao", "te")
MX_CONTRACTS = ("floor", "ceil", "even", "rceil")
FLOAT8_CONTRACTS = ("torchao", "te", "te_pow2")
_FLOAT8_BLOCKS = tuple((rows, n) for n in (32, 64, 128) for rows in (1, n))

# The rules for the block scales of a weight; see `reference_scales`.
SCALE_RULES = ("amax", "mse")


def unknown_name(what: str, name: object, allowed: Iterable[str]) -> str:
    """The error message for a name that is not in `allowed`: the name, the nearest match, and the allowed names.

    The nearest match is found without regard to upper and lower case.
    """
    allowed = sorted(allowed)
    lower = {one.casefold(): one for one in allowed}
    near = difflib.get_close_matches(str(name).casefold(), lower, n=1)
    hint = f" Did you mean {lower[near[0]]!r}?" if near else ""
    return f"unknown {what} {name!r}.{hint} Allowed: {', '.join(allowed)}"


def integer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype of the same size, of up to four bytes."""
    return _INTEGERS[dtype.itemsize]


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """x viewed as integers of the same size: torch cannot pad, repeat and index all one-byte floats."""
    dtype = integer_dtype(x.dtype)
    return x if x.dtype == dtype else x.view(dtype)


@dataclass(frozen=True)
class BlockFormat:
    """A block-scaled number format.

    element: "e2m1" (FP4, two codes a byte), "e4m3" or "e5m2" (FP8).
    block: (rows, columns) that share one block scale; None where a format has no block scales.
    scale: type of the block scale, "e4m3" (NVFP4), "e8m0" (MX) or "float32" (FP8); None without block scales (FP8).
    outer: None, "tensor" for a float32 global scale, or "row" for float32 row scales.
    contract: the implementation or rounding mode whose bits it has: NVFP4 "torchao" or "te"; MX "floor", "ceil", "even"
        or "rceil"; FP8 "torchao", "te" or "te_pow2", whose scales are powers of two.

    Raises ValueError for a combination that no contract defines.
    """

    element: str
    block: tuple[int, int] | None
    scale: str | None
    outer: str | None
    contract: str

    def __post_init__(self) -> None:
        if self.element not in ELEMENT_MAX:
            raise ValueError(unknown_name("element", self.element, ELEMENT_MAX))
        if self.outer not in (None, "tensor", "row"):
            raise ValueError(f"outer={self.outer!r}: allowed are None, 'tensor', 'row'")
        if self.scale == "e4m3":
            self._check_nvfp4()
        elif self.scale == "e8m0":
            self._check_mx()
        elif self.scale in ("float32", None):
            self._check_float8()
        else:
            raise ValueError(f"scale={self.scale!r}: allowed are 'e4m3' (NVFP4), 'e8m0' (MX), 'float32' (FP8), None")

    def _check_nvfp4(self) -> None:
        if self.element != "e2m1":
            raise ValueError(f"element={self.element!r}: E4M3 block scales go with 'e2m1' elements")
        if self.block not in ((1, 16), (16, 16)):
            raise ValueError(f"block={self.block}: E4M3 block scales serve blocks (1, 16) and (16, 16)")
        if self.contract not in NVFP4_CONTRACTS:
            raise ValueError(unknown_name("contract for E4M3 scales", self.contract, NVFP4_CONTRACTS))
        if self.outer == "row" and self.block == (16, 16):
            raise ValueError("outer='row' contradicts block=(16, 16): a square block spans rows with different scales")
        if self.contract == "torchao" and (self.outer == "row" or self.block == (16, 16)):
            raise ValueError("contract='torchao' defines blocks (1, 16) with outer None or 'tensor'; use contract='te'")

    def _check_mx(self) -> None:
        if self.block not in ((1, 32), (32, 32)):
            raise ValueError(f"block={self.block}: E8M0 block scales serve blocks (1, 32) and (32, 32)")
        if self.outer is not None:
            raise ValueError(f"outer={self.outer!r}: MX formats have no global or row scale")
        if self.contract not in MX_CONTRACTS:
            raise ValueError(unknown_name("contract for E8M0 scales", self.contract, MX_CONTRACTS))

    def _check_float8(self) -> None:
        if self.packed:
            raise ValueError(f"element={self.element!r}: FP4 goes with block scales 'e4m3' or 'e8m0'")
        if self.scale and self.block not in _FLOAT8_BLOCKS:
            raise ValueError(f"block={self.block}: float32 block scales serve blocks 1xN and NxN, N of 32, 64 or 128")
        if not self.scale and self.block is not None:
            raise ValueError(f"block={self.block}: a format without block scales has no block")
        if (self.scale is None) != (self.outer is not None):
            raise ValueError(f"outer={self.outer!r}: FP8 has float32 scales of blocks, of rows or of the tensor")
        if self.contract not in FLOAT8_CONTRACTS:
            raise ValueError(unknown_name("contract for float32 scales", self.contract, FLOAT8_CONTRACTS))

    @property
    def values_dtype(self) -> torch.dtype:
        """The 16-bit dtype that holds element * block scale exactly, for elements quantised from 16-bit numbers.

        A rounded element has at most four significant bits, and no bit below the last bit of the number it was rounded
        from. E4M3 scales reach from 2^-9 to 448, so float16 holds all dequantised NVFP4 values, even of a float32 x.
        """
        return torch.bfloat16 if self.scale == "e8m0" else torch.float16

    @property
    def spec(self) -> str:
        """The format as a spec string, e.g. "e2m1:1x16:e4m3:tensor:torchao"; `get` parses it."""
        block = "-" if self.block is None else f"{self.block[0]}x{self.block[1]}"
        return ":".join((self.element, block, self.scale or "-", self.outer or "-", self.contract))

    @property
    def name(self) -> str:
        """The format's string among the arguments of ops: its registered name, or its spec if it has no name."""
        return _NAME_OF.get(self, self.spec)

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.element == "e2m1"

    @property
    def square(self) -> bool:
        """Whether blocks are square tiles, so that a matrix and its transpose have the same codes."""
        return self.block is not None and self.block[0] > 1

    @property
    def block_cols(self) -> int:
        """Elements along the quantised dimension that share a scale; 1 without block scales (no padding)."""
        return 1 if self.block is None else self.block[1]

    @property
    def swizzles(self) -> bool:
        """Whether its block scales can have the layout "swizzled", which matrix units read: scales of one byte can."""
        return self.scale is not None and self.scale_dtype.itemsize == 1

    @property
    def exact(self) -> bool:
        """Whether `values_dtype` holds every element * block scale exactly: not with float32 block scales."""
        return self.scale is None or self.swizzles

    @property
    def as_mx(self) -> "BlockFormat | None":
        """The MX format whose block scales can hold these: of FP8 elements, with powers of two; None for others.

        A float32 scale becomes one E8M0 scale for each 32 elements and each row of its block. E8M0 has the powers from
        2^-127 to 2^127, and contract te_pow2 makes those from 2^-127 to 2^120.
        """
        powers_of_two = self.scale == "float32" and self.contract == "te_pow2"
        return BlockFormat(self.element, (1, 32), "e8m0", None, "rceil") if powers_of_two else None

    def nbytes(self, rows: int, cols: int, matrices: int = 1) -> int:
        """Bytes of codes and linear scales of matrices [rows, cols] that are quantised along cols."""
        block_rows, blocks = (1, 0) if self.block is None else (self.block[0], -(-cols // self.block_cols))
        codes = rows * (blocks * self.block_cols or cols) // (2 if self.packed else 1)
        outer = {None: 0, "tensor": 4, "row": 4 * rows}[self.outer]
        return matrices * (codes + -(-rows // block_rows) * blocks * self.scale_dtype.itemsize + outer)

    @property
    def element_max(self) -> float:
        return ELEMENT_MAX[self.element]

    @property
    def data_dtype(self) -> torch.dtype:
        return ELEMENT_DTYPE[self.element]

    @property
    def scale_dtype(self) -> torch.dtype:
        return SCALE_DTYPE[self.scale] if self.scale else torch.float32


def _nvfp4(outer: str | None, contract: str, block: tuple[int, int] = (1, 16)) -> BlockFormat:
    return BlockFormat("e2m1", block, "e4m3", outer, contract)


def _mx(element: str, mode: str, block: tuple[int, int] = (1, 32)) -> BlockFormat:
    return BlockFormat(element, block, "e8m0", None, mode)


def _float8(block: tuple[int, int] | None, outer: str | None = None) -> BlockFormat:
    return BlockFormat("e4m3", block, "float32" if block else None, outer, "torchao")


NAMED: dict[str, BlockFormat] = {
    "nvfp4": _nvfp4("tensor", "torchao"),
    "nvfp4_one_level": _nvfp4(None, "torchao"),
    "nvfp4_te": _nvfp4("tensor", "te"),
    "nvfp4_rowwise": _nvfp4("row", "te"),
    "nvfp4_16x16": _nvfp4("tensor", "te", (16, 16)),
    "mxfp8": _mx("e4m3", "rceil"),
    "mxfp8_floor": _mx("e4m3", "floor"),
    "mxfp8_ceil": _mx("e4m3", "ceil"),
    "mxfp8_even": _mx("e4m3", "even"),
    "mxfp8_e5m2": _mx("e5m2", "rceil"),
    "mxfp8_32x32": _mx("e4m3", "rceil", (32, 32)),
    "mxfp4": _mx("e2m1", "rceil"),
    "mxfp4_even": _mx("e2m1", "even"),
    "float8_1x128": _float8((1, 128)),
    "float8_128x128": _float8((128, 128)),
    "float8_rowwise": _float8(None, "row"),
    "float8_tensor": _float8(None, "tensor"),
}
_NAME_OF = {fmt: name for name, fmt in NAMED.items()}
_SPEC = re.compile(r"(\w+):(?:(\d+)x(\d+)|-):(\w+|-):(\w+|-):(\w+)")


def get(format: "str | BlockFormat") -> BlockFormat:
    """The format of a name or a spec string; a `BlockFormat` is returned unchanged.

    Raises ValueError for an unknown name, TypeError for anything but a string or a BlockFormat.
    """
    if isinstance(format, BlockFormat):
        return format
    if not isinstance(format, str):
        raise TypeError(f"format: expected a name or a BlockFormat, got {type(format).__name__}")
    if format in NAMED:
        return NAMED[format]
    match = _SPEC.fullmatch(format)
    if match is None:
        raise ValueError(unknown_name("format", format, NAMED))
    element, rows, cols, scale, outer, contract = match.groups()
    block = (int(rows), int(cols)) if rows else None
    return BlockFormat(element, block, None if scale == "-" else scale, None if outer == "-" else outer, contract)


def takes_scale_rule(fmt: BlockFormat, rule: str) -> bool:
    """Whether a rule can choose the block scales: "amax" always, others in NVFP4 without row scales and in MXFP4."""
    mxfp4 = fmt.packed and fmt.scale == "e8m0" and not fmt.square
    return rule == "amax" or (fmt.scale == "e4m3" and fmt.outer != "row") or mxfp4


def check_scale_rule(name: str, rule: object, fmts: Sequence["BlockFormat | None"]) -> None:
    """Raise ValueError for an unknown rule, or one that goes with none of the formats (None: no format).

    name: the name of the argument or field, for the message.
    """
    if rule not in SCALE_RULES:
        raise ValueError(f"{name}: {unknown_name('rule', rule, SCALE_RULES)}")
    known = [fmt for fmt in fmts if fmt is not None]
    if rule != "amax" and not any(takes_scale_rule(fmt, str(rule)) for fmt in known):
        raise ValueError(f"{name}={rule!r}: needs an NVFP4 format without row scales or MXFP4, got "
                         f"{known[0].name if known else None}")  # fmt: skip


def compatible(a: BlockFormat, b: BlockFormat) -> bool:
    """Whether the matrix units multiply operands of these formats: same scale type and same block length along K.

    SM100's instruction has the kinds mxf4nvf4 (NVFP4 x NVFP4), mxf8f6f4 and mxf4 (any two MX formats), and f8f6f4
    (FP8).
    """
    return (a.scale, a.block_cols) == (b.scale, b.block_cols)
