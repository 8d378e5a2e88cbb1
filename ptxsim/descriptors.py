"""The descriptors of `tcgen05` instructions, unpacked field by field; a field of unknown meaning must be zero.

Sources: PTX ISA, "Shared memory descriptor", "Instruction descriptor" and "Matrix shape" of `tcgen05`; CUTLASS,
`cute/arch/mma_sm100_desc.hpp`; Triton, `MMAv5.cpp` and `MMAHelpers.cpp`. Confidence high, except:

- Base offset of a matrix without swizzling. The PTX ISA defines the base offset by the pattern of a swizzling mode, so
  that an unswizzled matrix has none. Triton still computes one, and sets it to 4 for every odd copy of scales. It is
  ignored here, as Triton's results on hardware are right. Confidence medium.
- Steps of N. The PTX ISA allows multiples of 8 for `kind::f16` with M = 128, and of 16 for a pair; CUTLASS requires
  twice as much. The larger steps are required here.
- M of block-scaled products. The PTX ISA has M / 128 in bits 27-28 over reserved bits, CUTLASS M / 16 in bits 24-28,
  and Triton M / 32 in bits 25-28: they agree on 128 and 256.

- A transposed operand (PTX ISA, "Canonical layouts", MN-major): its rows lie along M or N. Swizzled, a pattern has 8
  rows, the next one along M or N follows after the leading offset, and the next one along K after the stride. Without
  swizzling, 8 rows of 16 bytes are together, and the two offsets have each other's place. Confidence medium to high.

Not supported, and a fault: sparsity, negation of scaled products, results in fp16, swizzling of 32-byte atoms, and
K = 96.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptxsim import numbers
from ptxsim.fault import Fault

RESERVED = "-"


def _fields(text: str) -> tuple[tuple[str, int], ...]:
    """(name, bits) of each field, the lowest one first, of "name bits, ..."."""
    return tuple((name, int(bits)) for name, bits in (each.split() for each in text.split(",")))


def unpack(bits: int, fields: tuple[tuple[str, int], ...], what: str) -> dict[str, int]:
    """The fields of a descriptor by name. Raises Fault if reserved bits are set."""
    found, at = {}, 0
    for name, width in fields:
        value = bits >> at & (1 << width) - 1
        if name == RESERVED and value:
            raise Fault(f"{what} {bits:#x}: reserved bits {at} to {at + width - 1} are set")
        found[name] = value
        at += width
    if bits >> at:
        raise Fault(f"{what} {bits:#x} has more than {at} bits")
    return found


# ---------------------------------------------------------------- matrices in shared memory

_MATRIX = _fields("start 14, - 2, leading 14, - 2, stride 14, version 3, base_offset 3, absolute 1, - 8, layout 3")
_ROW_BYTES = {0: 16, 2: 128, 4: 64, 6: 32}  # of each layout: the bytes of a row that a pattern of 8 rows swizzles
CHUNK = 16  # bytes that stay together


@dataclass(frozen=True)
class Matrix:
    """A matrix in shared memory whose rows run along K.

    start: offset of its first byte. leading: bytes from one column of 16 bytes to the next, where it is not swizzled.
    stride: bytes from 8 rows to the next 8. row: the bytes of a row of the swizzling pattern; 16 without swizzling.
    """

    start: int
    leading: int
    stride: int
    row: int

    @classmethod
    @lru_cache(4096)
    def of(cls, bits: int) -> "Matrix":
        """Unpack a shared memory descriptor. Raises Fault for an unsupported descriptor."""
        what = "the shared memory descriptor"
        found = unpack(bits, _MATRIX, what)
        if found["version"] != 1:
            raise Fault(f"{what} {bits:#x} has version {found['version']}, and not 1")
        if found["absolute"]:
            raise Fault(f"{what} {bits:#x} has an absolute leading address, which the simulator does not know")
        if found["layout"] not in _ROW_BYTES:
            raise Fault(f"{what} {bits:#x} has layout {found['layout']}, which the simulator does not know")
        start, row = found["start"] << 4, _ROW_BYTES[found["layout"]]
        if row > CHUNK:
            if found["base_offset"]:
                raise Fault(f"{what} {bits:#x} has a base offset, which the simulator does not know with swizzling")
            if start % (8 * row) >= row:
                raise Fault(f"{what} {bits:#x}: the matrix begins in the middle of a pattern of {8 * row} bytes")
        return cls(start, found["leading"] << 4, found["stride"] << 4, row)

    def chunks(self, rows: int, nbytes: int) -> np.ndarray:
        """Offsets of the chunks of 16 bytes of the first bytes of each row: int64 [rows, nbytes / 16]."""
        row, column = np.arange(rows)[:, None], np.arange(nbytes // CHUNK)[None, :]
        inner = row // 8 * self.stride + row % 8 * self.row
        if self.row == CHUNK:
            return self.start + inner + column * self.leading
        if self.start % self.row + nbytes > self.row:
            raise Fault(f"{nbytes} bytes of a row from {self.start % self.row} on, in a pattern of {self.row} bytes")
        # Bits 4 and up of an address are XORed with bits 7 and up: the place of the row in its pattern.
        linear = self.start + inner + column * CHUNK
        return linear ^ (linear >> 7 & self.row // CHUNK - 1) << 4

    def chunks_across(self, rows: int, nbytes: int) -> np.ndarray:
        """Offsets of the chunks of a transposed matrix, of `rows` along K: int64 [rows, nbytes / 16]."""
        row, column = np.arange(rows)[:, None], np.arange(nbytes // CHUNK)[None, :]
        if self.row == CHUNK:
            return self.start + row % 8 * CHUNK + row // 8 * self.leading + column * self.stride
        each = self.row // CHUNK  # chunks of a row of the pattern
        linear = (
            self.start
            + row % 8 * self.row
            + row // 8 * self.stride
            + column % each * CHUNK
            + column // each * self.leading
        )
        return linear ^ (linear >> 7 & each - 1) << 4


# ---------------------------------------------------------------- formats of elements and scales

Decode = Callable[[np.ndarray], np.ndarray]


_PAIRS = numbers.E2M1[np.arange(256)[:, None] >> [0, 4] & 15].view(np.uint64)[:, 0]  # of each byte, both numbers


def _nibbles(codes: np.ndarray) -> np.ndarray:
    return _PAIRS.take(codes).view(np.float32)


def _padded_nibbles(codes: np.ndarray) -> np.ndarray:
    """E2M1 among 8-bit formats: 16 elements in 8 bytes, and 8 bytes of padding (PTX ISA, "b4x16_p64")."""
    return _nibbles(codes.reshape(len(codes), -1, CHUNK)[:, :, : CHUNK // 2].reshape(len(codes), -1))


@dataclass(frozen=True)
class Element:
    """A format of elements.

    decode: bytes uint8 [rows, n] -> numbers [rows, K]. used: the number of bytes with elements in each chunk of 16.
    nbytes: of an element in shared memory, where it may be transposed; 0 where not.
    """

    decode: Decode
    used: int = CHUNK
    nbytes: int = 0


_F16 = Element(lambda raw: numbers.f16_values(raw.view(np.uint16)), nbytes=2)
_BF16 = Element(lambda raw: numbers.bf16_values(raw.view(np.uint16)), nbytes=2)
_TF32 = Element(
    lambda raw: (raw.view(np.uint32) & 0xFFFFE000).view(np.float32), nbytes=4
)  # the lower bits are not read
_S8, _U8 = Element(lambda raw: raw.view(np.int8), nbytes=1), Element(lambda raw: raw, nbytes=1)
_E4M3 = Element(numbers.E4M3.take, nbytes=1)
_E5M2 = Element(numbers.E5M2.take, nbytes=1)
_E2M1 = Element(_nibbles)
_E2M1_PADDED = Element(_padded_nibbles, CHUNK // 2)


def _ue4m3(codes: np.ndarray) -> np.ndarray:
    if (codes & 0x80).any():
        raise Fault("a UE4M3 scale whose highest bit is set")
    return numbers.E4M3[codes]


_UE4M3: Decode = _ue4m3
_UE8M0: Decode = lambda codes: numbers.UE8M0[codes]  # noqa: E731

# ---------------------------------------------------------------- instructions

_OPERANDS = "negate_a 1, negate_b 1, transpose_a 1, transpose_b 1, n 6"
_PLAIN = _fields(f"selector 2, sparse 1, saturate 1, d 2, - 1, a 3, b 3, {_OPERANDS}, - 1, m 5, - 1, shift 2")
_MXF8 = _fields(f"- 2, sparse 1, - 1, b_scale 2, - 1, a 3, b 3, {_OPERANDS}, scale 1, m 5, a_scale 2, - 1")
_MXF4 = _fields(f"- 2, sparse 1, - 1, b_scale 2, - 1, a 3, b 2, - 1, {_OPERANDS}, scale 1, m 5, a_scale 2, k 1")
_MUST_BE = {name: 0 for name in ("selector", "sparse", "saturate", "shift", "k", "negate_a", "negate_b")}
ROW_BYTES = 32  # of an operand, in every instruction


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of products. scales: of a row in an instruction. steps: of N, for one program and for a pair.

    formats, scale_formats: by their code in the instruction descriptor. sums: the code of the format of D. integer:
    whether D is of 32-bit integers.
    """

    fields: tuple[tuple[str, int], ...]
    formats: dict[int, Element]
    steps: tuple[int, int]
    scales: int = 0
    scale_formats: dict[int, Decode] | None = None
    sums: int = 1
    integer: bool = False


_EIGHT_BITS = {0: _E4M3, 1: _E5M2, 5: _E2M1_PADDED}
_FP4 = {1: _E2M1}
F16 = Kind(_PLAIN, {0: _F16, 1: _BF16}, (16, 32))
TF32 = Kind(_PLAIN, {2: _TF32}, (8, 16))
F8F6F4 = Kind(_PLAIN, _EIGHT_BITS, (8, 16))
I8 = Kind(_PLAIN, {0: _U8, 1: _S8}, (8, 16), sums=2, integer=True)
MXF8F6F4 = Kind(_MXF8, _EIGHT_BITS, (8, 16), 1, {1: _UE8M0})
MXF4 = Kind(_MXF4, _FP4, (8, 16), 2, {1: _UE8M0})
MXF4NVF4_16 = Kind(_MXF4, _FP4, (8, 16), 4, {0: _UE4M3, 1: _UE8M0})

# The kind of each opcode, after "tcgen05.mma.cta_group::1.kind::".
KINDS = {
    "f16": F16,
    "tf32": TF32,
    "f8f6f4": F8F6F4,
    "i8": I8,
    **{f"mxf8f6f4.block_scale{size}": MXF8F6F4 for size in ("", ".block32", ".scale_vec::1X")},
    **{f"mxf4.block_scale{size}": MXF4 for size in ("", ".block32", ".scale_vec::2X")},
    **{f"mxf4nvf4.block_scale{size}": MXF4 for size in (".block32", ".scale_vec::2X")},
    **{f"mxf4nvf4.block_scale{size}": MXF4NVF4_16 for size in (".block16", ".scale_vec::4X")},
}


@dataclass(frozen=True)
class Shape:
    """The contents of an instruction descriptor. rows: of D in each program. columns: N.

    scale: the format of scales. a_byte, b_byte: the byte of the first scale in a word of tensor memory.
    a_across, b_across: whether an operand is transposed.
    """

    a: Element
    b: Element
    rows: int
    columns: int
    scale: Decode | None
    a_byte: int
    b_byte: int
    a_across: bool
    b_across: bool

    @classmethod
    @lru_cache(1024)
    def of(cls, bits: int, kind: Kind, programs: int) -> "Shape":
        """Unpack an instruction descriptor. programs: 1, or 2 for a pair. Raises Fault for unsupported fields."""
        what = "the instruction descriptor"
        found = unpack(bits, kind.fields, what)
        for name, value in _MUST_BE.items():
            if found.get(name, value) != value:
                raise Fault(f"{what} {bits:#x}: field {name} is {found[name]}, and only {value} is supported")
        for name in ("a", "b"):
            if found[name] not in kind.formats:
                raise Fault(f"{what} {bits:#x}: matrix {name} has format {found[name]}, which the simulator does not "
                            "know for this kind")  # fmt: skip
            if found[f"transpose_{name}"] and not kind.formats[found[name]].nbytes:
                raise Fault(f"{what} {bits:#x}: matrix {name} is transposed, and its format has no such layout")
        if found.get("d", kind.sums) != kind.sums:
            raise Fault(f"{what} {bits:#x}: D has format {found['d']}, and only {kind.sums} is supported")
        rows, columns, step = found["m"] << 4, found["n"] << 3, kind.steps[programs - 1]
        several = (64, 128) if programs == 1 and not kind.scales else (128 * programs,)
        if rows not in several:
            raise Fault(f"{what} {bits:#x}: M is {rows}, and only {several} is supported")
        if columns % step or not step <= columns <= 256:
            raise Fault(f"{what} {bits:#x}: N is {columns}, and no multiple of {step} up to 256")
        scale, a_byte, b_byte = None, found.get("a_scale", 0), found.get("b_scale", 0)
        if kind.scale_formats is not None:
            if found["scale"] not in kind.scale_formats:
                raise Fault(f"{what} {bits:#x}: scales have type {found['scale']}, which this kind does not have")
            if a_byte % kind.scales or b_byte % kind.scales:
                raise Fault(f"{what} {bits:#x}: {kind.scales} scales from byte {a_byte} of a word for A, and {b_byte} "
                            "for B")  # fmt: skip
            scale = kind.scale_formats[found["scale"]]
        return cls(kind.formats[found["a"]], kind.formats[found["b"]], rows // programs, columns, scale, a_byte, b_byte,
                   bool(found["transpose_a"]), bool(found["transpose_b"]))  # fmt: skip
