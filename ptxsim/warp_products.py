"""Products of matrices in the registers of a warp: `mma.sync`, with and without block scales.

Sources: PTX ISA, "Matrix fragments" for mma.m16n8k8, m16n8k16, m16n8k32 and m16n8k64, and "Block scaling for mma.sync"
(9.7.14.3); confidence high. All shapes have the same fragments of bytes. With lane = 4 g + t:

- A, 16 rows of 32 bytes: register i holds row g + 8 (i % 2), bytes 4 t + 16 (i // 2) and the next three. B, 8 columns
  of 32 bytes along K: register i holds column g, bytes 4 t + 16 i and the next three. The first element of a register
  has the lowest K. Of FP4, the lower half of a byte comes first.
- The sum [16, 8]: registers 2 i and 2 i + 1 hold row g + 8 i, columns 2 t and 2 t + 1.
- `kind::f8f6f4` and `mxf8f6f4`: every element has a byte. FP4 has bits 2 to 5 of it, FP6 bits 0 to 5; other bits are
  zero, which is checked here. Confidence medium to high: CUTLASS shifts FP4 by two bits and FP6 not at all.
- Scales: the scale of row g + 8 h of A is in lane 4 g + 2 thread-id + h, that of column g of B in lane 4 g + thread-id.
  Its chunks along K, 1, 2 or 4 of them, are the register's bytes from byte-id on. Other lanes and bytes are not read.
  A public probe of an RTX 50 found the same lanes and bytes for `scale_vec::1X`.

Sums: all products of an instruction and the addend are added in float64 and rounded to float32 once. Hardware adds in
an order, and with a number of bits, that NVIDIA does not publish; inputs whose sums are exact do not depend on it. A
result that is no number has the bits 0x7FFFFFFF (PTX ISA, `mma`: "canonical NaN"; confidence medium).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from ptxsim import numbers
from ptxsim.descriptors import Decode
from ptxsim.fault import Fault
from ptxsim.forms import Read, Step, UnknownForm, expect, form, reader, registers_of
from ptxsim.fragment import LANES, Fragment
from ptxsim.numbers import matrix_product
from ptxsim.parse import Instruction, Operand, Program
from ptxsim.sums import in_registers, registers_of_sums, sums_of, undefined_sums
from ptxsim.warp_matrix import floats, names_of, put_all, stacked, undefined_bits

# ---------------------------------------------------------------- fragments


def bytes_of_a(registers: np.ndarray) -> np.ndarray:
    """The bytes uint8 [warps, 16, n] of the rows of A, of registers uint32 [n / 8, warps, 32]."""
    warps = registers.shape[1]
    parts = registers.reshape(-1, 2, warps, 8, 4)  # halves of columns and rows, warps, g, t
    return np.ascontiguousarray(parts.transpose(2, 1, 3, 0, 4)).view(np.uint8).reshape(warps, 16, -1)


def bytes_of_b(registers: np.ndarray) -> np.ndarray:
    """The bytes uint8 [warps, 8, n] of the columns of B, of registers uint32 [n / 16, warps, 32]."""
    warps = registers.shape[1]
    parts = registers.reshape(-1, warps, 8, 4)  # row half, warps, g, t
    return np.ascontiguousarray(parts.transpose(1, 2, 0, 3)).view(np.uint8).reshape(warps, 8, -1)


def a_values(registers: np.ndarray, kind: str) -> np.ndarray:
    """The matrices A, float64 [warps, 16, 16], of registers uint32 [4, warps, 32] of bf16 or f16 numbers."""
    return floats(bytes_of_a(registers).view(np.uint16), kind)


# ---------------------------------------------------------------- elements


def _of_16_bits(kind: str) -> Decode:
    return lambda raw: floats(raw.view(np.uint16), kind)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Bytes [..., n] -> E2M1 numbers [..., 2 n]."""
    return numbers.E2M1.take(np.stack([raw & 15, raw >> 4], -1)).reshape(*raw.shape[:-1], -1)


def _tf32(raw: np.ndarray) -> np.ndarray:
    """The lower 13 bits are not read."""
    return (raw.view(np.uint32) & 0xFFFFE000).view(np.float32)


def _in_a_byte(table: np.ndarray, lowest: int) -> Decode:
    """The decoder of elements that have the bits of a byte from `lowest` on."""
    unused = 0xFF ^ len(table) - 1 << lowest

    def decode(raw: np.ndarray) -> np.ndarray:
        if (raw & unused).any():
            raise Fault("an element of FP4 or FP6 whose byte has other bits set")
        return table.take(raw >> lowest)

    return decode


_FP8: dict[str, Decode] = {"e4m3": numbers.E4M3.take, "e5m2": numbers.E5M2.take}
_IN_BYTES: dict[str, Decode] = {
    **_FP8, "e2m1": _in_a_byte(numbers.E2M1, 2), "e2m3": _in_a_byte(numbers.E2M3, 0),
    "e3m2": _in_a_byte(numbers.E3M2, 0),
}  # fmt: skip


@dataclass(frozen=True)
class _Format:
    """The formats of a product's operands. count: scales of a row; 0 for none. scale: decodes bytes of scales."""

    a: Decode
    b: Decode
    count: int = 0
    scale: Decode = numbers.UE8M0.take


def _ue4m3(codes: np.ndarray) -> np.ndarray:
    if (codes & 0x80).any():
        raise Fault("a UE4M3 scale whose highest bit is set")
    return numbers.E4M3.take(codes)


def _plain_formats() -> dict[str, _Format]:
    """The formats of products without scales, by opcode."""
    found = {"m16n8k8.row.col.f32.tf32.tf32.f32": _Format(_tf32, _tf32)}
    for kind in ("bf16", "f16"):
        found[f"m16n8k16.row.col.f32.{kind}.{kind}.f32"] = _Format(_of_16_bits(kind), _of_16_bits(kind))
    for a, b in product(_FP8, _FP8):
        found[f"m16n8k32.row.col.f32.{a}.{b}.f32"] = _Format(_FP8[a], _FP8[b])
    for a, b in product(_IN_BYTES, _IN_BYTES):
        for front, back in (("kind::f8f6f4.", ""), ("", "kind::f8f6f4.")):
            found[f"{front}m16n8k32.row.col.{back}f32.{a}.{b}.f32"] = _Format(_IN_BYTES[a], _IN_BYTES[b])
    return {f"mma.sync.aligned.{name}": formats for name, formats in found.items()}


def _scaled_formats() -> dict[str, _Format]:
    """The formats of block-scaled products, by opcode: assemblers take the kind at either of two places."""
    kinds = {f"mxf8f6f4 {size} m16n8k32 {a} {b} ue8m0": _Format(_IN_BYTES[a], _IN_BYTES[b], 1)
             for a, b in product(_IN_BYTES, _IN_BYTES) for size in (".scale_vec::1X", "")}  # fmt: skip
    for kind, size, count, stype in (
        ("mxf4", ".scale_vec::2X", 2, "ue8m0"), ("mxf4", "", 2, "ue8m0"), ("mxf4nvf4", ".scale_vec::2X", 2, "ue8m0"),
        ("mxf4nvf4", ".scale_vec::4X", 4, "ue8m0"), ("mxf4nvf4", ".scale_vec::4X", 4, "ue4m3"),
    ):  # fmt: skip
        scale = _ue4m3 if stype == "ue4m3" else numbers.UE8M0.take
        kinds[f"{kind} {size} m16n8k64 e2m1 e2m1 {stype}"] = _Format(_nibbles, _nibbles, count, scale)
    found = {}
    for name, formats in kinds.items():
        kind, size, shape, a, b, stype = name.split(" ")
        scaled, types = f"kind::{kind}.block_scale{size}", f"f32.{a}.{b}.f32.{stype}"
        found[f"mma.sync.aligned.{shape}.row.col.{scaled}.{types}"] = formats
        found[f"mma.sync.aligned.{scaled}.{shape}.row.col.{types}"] = formats
    return found


# ---------------------------------------------------------------- products

_PLAIN, _SCALED = _plain_formats(), _scaled_formats()


@form(*_PLAIN, moved=(1, 2, 3))
def _product(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 4)
    return _step(instruction.operands[:4], _PLAIN[instruction.opcode], None, None)


@form(*(f"mma.sync.aligned.m16n8k32.row.col{sat}.s32.s8.s8.s32" for sat in ("", ".satfinite")), moved=(1, 2, 3))
def _integer_product(instruction: Instruction, program: Program) -> Step:
    """float64 holds the sums exactly; without `.satfinite` they wrap around."""
    expect(instruction, 4)
    names = [names_of(*each) for each in zip(instruction.operands, (4, 4, 2, 4), strict=True)]
    saturates = "satfinite" in instruction.opcode

    def step(fragment: Fragment) -> None:
        fragment.whole_warps()
        a, b, sums = (stacked(fragment, each) for each in names[1:])
        left, right = (each.view(np.int8).astype(np.float64) for each in (bytes_of_a(a), bytes_of_b(b)))
        total = matrix_product(left, right).astype(np.int64) + sums_of(sums).view(np.int32)
        if saturates:
            total = total.clip(-(2**31), 2**31 - 1)
        put_all(fragment, names[0], in_registers(total.astype(np.int32)), _undefined(fragment, names[1:], ()))

    return step


@form(*_SCALED, moved=(1, 2, 3, 4, 6))
def _scaled_product(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 8)
    formats, operands = _SCALED[instruction.opcode], instruction.operands
    of_a = _scales(operands[4], operands[5], formats, 2)
    of_b = _scales(operands[6], operands[7], formats, 1)
    return _step(operands[:4], formats, of_a, of_b, (operands[4], operands[6]))


_ReadScales = Callable[[Fragment], np.ndarray]  # float64 [warps, rows, chunks, 1]


def _step(
    operands: tuple[Operand, ...], formats: _Format, scales_a: _ReadScales | None, scales_b: _ReadScales | None,
    scales: tuple[Operand, ...] = (),
) -> Step:  # fmt: skip
    into, *others = operands
    results, counts = names_of(into, 4), (4, 2, 4)
    names = [names_of(each, count) for each, count in zip(others, counts, strict=True)]

    def step(fragment: Fragment) -> None:
        fragment.whole_warps()
        a, b, sums = (stacked(fragment, each) for each in names)
        left = _scaled(formats.a(bytes_of_a(a)), scales_a, fragment)
        right = _scaled(formats.b(bytes_of_b(b)), scales_b, fragment)
        undefined = _undefined(fragment, names, scales)
        put_all(fragment, results, registers_of_sums(matrix_product(left, right) + sums_of(sums)), undefined)

    return step


def _undefined(fragment: Fragment, names: list[list[str]], scales: tuple[Operand, ...]) -> np.ndarray | None:
    """Which sums are undefined, of the registers of A, B and the addend; None if none are.

    scales: the operands with the scales of A and of B. One that is undefined counts for both rows of A, or the column
    of B, of its quad.
    """
    if not fragment.machine.undefined:
        return None
    zeros = [np.zeros((len(each), len(fragment.warps), LANES), np.uint32) for each in names]
    bits = [undefined_bits(fragment, each) for each in names]
    a, b, sums = (zero if found is None else found for zero, found in zip(zeros, bits, strict=True))
    rows, columns = np.any(bytes_of_a(a), 2), np.any(bytes_of_b(b), 2)
    of_scales = fragment.undefined(scales)
    if of_scales is not None:
        quads = np.any(of_scales.reshape(2, len(fragment.warps), LANES // 4, 4), 3)
        rows, columns = rows | np.tile(quads[0], 2), columns | quads[1]
    return undefined_sums(rows, columns, sums)


def _scaled(values: np.ndarray, read: _ReadScales | None, fragment: Fragment) -> np.ndarray:
    """Numbers [warps, rows, K] times their scales, in float64."""
    values = values.astype(np.float64)
    if read is None:
        return values
    scales = read(fragment)
    return (values.reshape(*scales.shape[:3], -1) * scales).reshape(values.shape)


def _scales(data: Operand, selector: Operand, formats: _Format, threads: int) -> _ReadScales:
    """A reader of the scales of A's rows or B's columns. threads: how many lanes of four hold them, 2 for A."""
    word, parts = reader(data, "b32"), registers_of(selector)
    if len(parts) != 2:
        raise UnknownForm(f"not a selector of a byte and a thread: {selector}")
    byte, thread = (reader(each, "u16") for each in parts)

    def read(fragment: Fragment) -> np.ndarray:
        first, at = _chosen(byte, fragment), _chosen(thread, fragment)
        if first % formats.count or first > 4 - formats.count or at >= 4 // threads:
            raise Fault(f"byte {first} and thread {at} of a quad hold no scales of {formats.count} chunks")
        lanes = fragment.by_warp(word(fragment)).reshape(-1, LANES // 4, 4)
        words = lanes[:, :, threads * at : threads * (at + 1)].transpose(0, 2, 1)  # warps, row half, g
        raw = np.ascontiguousarray(words).view(np.uint8).reshape(len(lanes), -1, 4)
        return formats.scale(raw[:, :, first : first + formats.count]).astype(np.float64)[..., None]

    return read


def _chosen(read: Read, fragment: Fragment) -> int:
    """The value of a selector, which all threads have to share."""
    values = np.unique(read(fragment))
    if len(values) > 1:
        raise Fault("a selector of scales that differs between threads")
    return int(values[0])
