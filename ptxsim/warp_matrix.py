"""Matrices in the registers of a warp: `ldmatrix`, `stmatrix` and `mma.sync`.

Sources: PTX ISA, "Warp-level matrix load / store instruction" and "Matrix fragments for mma.m16n8k16 with
floating-point type"; confidence high. With lane = 4 g + t:

- `ldmatrix`, `stmatrix`: lane 8 i + r holds the address of row r of matrix i. A register of lane (g, t) holds
  elements 2 t and 2 t + 1 of row g; with `.trans`, of column g.
- A [16, 16]: register i holds row g + 8 (i % 2), columns 2 t + 8 (i // 2) and the next. B [16, 8]: register i holds
  rows 2 t + 8 i and the next, column g. The sum [16, 8]: registers 2 i and 2 i + 1 hold row g + 8 i, columns 2 t and
  2 t + 1.

Sums: all products of an instruction and the addend are added in float64 and rounded to float32 once. Hardware adds in
an order, and with a number of bits, that NVIDIA does not publish; inputs whose sums are exact do not depend on it. A
result that is no number has the bits 0x7FFFFFFF (PTX ISA, `mma`: "canonical NaN"; confidence medium).
"""

import re

import numpy as np

from ptxsim import numbers
from ptxsim.fault import Fault
from ptxsim.forms import (
    Read,
    Step,
    UnknownForm,
    address_reader,
    expect,
    form,
    reader,
    registers_of,
    writer,
)
from ptxsim.fragment import LANES, Fragment
from ptxsim.lanes import COLLECTIVE
from ptxsim.numbers import matrix_product
from ptxsim.parse import Instruction, Operand, Program

# ---------------------------------------------------------------- fragments


def a_values(registers: np.ndarray, kind: str) -> np.ndarray:
    """The matrices A, float64 [warps, 16, 16], of registers uint32 [4, warps, 32]."""
    halves = registers.view(np.uint16).reshape(2, 2, -1, 8, 4, 2)  # column half, row half, warps, g, t, parity
    return floats(halves.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16), kind)


def _b_values(registers: np.ndarray, kind: str) -> np.ndarray:
    """The transposed matrices B, float64 [warps, 8, 16], of registers uint32 [2, warps, 32]."""
    halves = registers.view(np.uint16).reshape(2, -1, 8, 4, 2)  # row half, warps, g, t, parity
    return floats(halves.transpose(1, 2, 0, 3, 4).reshape(-1, 8, 16), kind)


def sums_of(registers: np.ndarray) -> np.ndarray:
    """The matrices [warps, 16, n] of registers float32 [n / 2, warps, 32]."""
    parts = registers.reshape(len(registers) // 4, 2, 2, -1, 8, 4)  # column block, row half, parity, warps, g, t
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, 2 * len(registers))


def registers_of_sums(sums: np.ndarray) -> np.ndarray:
    """The registers float32 [n / 2, warps * 32] that hold matrices float64 [warps, 16, n]."""
    rounded = sums.astype(np.float32)
    warps, _, n = rounded.shape
    parts = numbers.canonical(rounded).reshape(warps, 2, 8, n // 8, 4, 2)  # row half, g, column block, t, parity
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, warps * LANES)


def floats(bits: np.ndarray, kind: str) -> np.ndarray:
    """uint16 bits of bf16 or f16 numbers -> float64."""
    values = numbers.f16_values(bits) if kind == "f16" else numbers.bf16_values(bits)
    return values.astype(np.float64)


def readers_of(operand: Operand, kind: str, count: int) -> list[Read]:
    """The readers of the `count` registers of a vector."""
    parts = registers_of(operand)
    if len(parts) != count:
        raise UnknownForm(f"{len(parts)} registers, and not {count}")
    return [reader(each, kind) for each in parts]


def stacked(fragment: Fragment, reads: list[Read]) -> np.ndarray:
    """The values of registers, [registers, warps, 32]."""
    return np.concatenate([fragment.every(read(fragment)) for read in reads]).reshape(len(reads), -1, LANES)


# ---------------------------------------------------------------- loads and stores of matrices

_MATRICES = [f"m8n8.x{count}{trans}.{space}.b16" for count in (1, 2, 4) for trans in ("", ".trans")
             for space in ("shared", "shared::cta")]  # fmt: skip


def _rows(fragment: Fragment, addresses: np.ndarray, count: int) -> tuple[np.ndarray, ...]:
    """(addresses, clusters, warps, lanes) of the rows of `count` matrices, for each warp that runs."""
    which = fragment.whole_warps()
    rows = fragment.by_warp(addresses)[which, : 8 * count].ravel()
    if (rows % 16).any():
        raise Fault("a row of a matrix at an address that is no multiple of 16")
    clusters, warps = np.divmod(np.repeat(fragment.warps[which], 8 * count), fragment.machine.warps_of_cluster)
    return rows, clusters, warps, np.full(len(rows), COLLECTIVE)


@form(*[f"ldmatrix.sync.aligned.{each}" for each in _MATRICES])
def _load_matrices(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    count, trans = _matrices(instruction)
    parts = registers_of(instruction.operands[0])
    if len(parts) != count:
        raise UnknownForm(f"{len(parts)} registers, and not {count}")
    writes, address = [writer(each, "b32") for each in parts], address_reader(instruction.operands[1], 32)

    def step(fragment: Fragment) -> None:
        rows = _rows(fragment, address(fragment), count)
        found = fragment.machine.shared.load(rows[0], 16, *rows[1:]).view(np.uint16).reshape(-1, count, 8, 8)
        if trans:
            found = found.transpose(0, 1, 3, 2)
        words = np.zeros((len(fragment.warps), count, LANES), np.uint32)
        words[fragment.whole_warps()] = np.ascontiguousarray(found).view(np.uint32).reshape(-1, count, LANES)
        for i, write in enumerate(writes):
            write(fragment, words[:, i].ravel())

    return step


@form(*[f"stmatrix.sync.aligned.{each}" for each in _MATRICES])
def _store_matrices(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    count, trans = _matrices(instruction)
    reads, address = readers_of(instruction.operands[1], "b32", count), address_reader(instruction.operands[0], 32)

    def step(fragment: Fragment) -> None:
        rows = _rows(fragment, address(fragment), count)
        words = stacked(fragment, reads)[:, fragment.whole_warps()].transpose(1, 0, 2)
        values = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 8)
        if trans:
            values = np.ascontiguousarray(values.transpose(0, 1, 3, 2))
        fragment.machine.shared.store(rows[0], values.reshape(-1, 8).view(np.uint8), *rows[1:])

    return step


def _matrices(instruction: Instruction) -> tuple[int, bool]:
    """(number of matrices, whether they are transposed) of an instruction."""
    found = re.search(r"\.x(\d)(\.trans)?\.", instruction.opcode)
    assert found is not None
    return int(found[1]), found[2] is not None


# ---------------------------------------------------------------- products


@form(*[f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" for kind in ("bf16", "f16")])
def _product(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 4)
    into, a, b, addend = instruction.operands
    kind = instruction.opcode.split(".")[-2]
    parts = registers_of(into)
    if len(parts) != 4:
        raise UnknownForm(f"{len(parts)} registers, and not 4")
    writes = [writer(each, "f32") for each in parts]
    reads = [readers_of(a, "b32", 4), readers_of(b, "b32", 2), readers_of(addend, "f32", 4)]

    def step(fragment: Fragment) -> None:
        fragment.whole_warps()
        left, right, sums = (stacked(fragment, each) for each in reads)
        found = matrix_product(a_values(left, kind), _b_values(right, kind)) + sums_of(sums)
        for write, values in zip(writes, registers_of_sums(found), strict=True):
            write(fragment, values)

    return step
