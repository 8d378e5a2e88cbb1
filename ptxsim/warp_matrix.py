"""Matrices in the registers of a warp: `ldmatrix` and `stmatrix`.

Sources: PTX ISA, "Warp-level matrix load / store instruction"; confidence high. With lane = 4 g + t: lane 8 i + r holds
the address of row r of matrix i. A register of lane (g, t) holds elements 2 t and 2 t + 1 of row g; with `.trans`, of
column g.
"""

import re

import numpy as np

from ptxsim import numbers
from ptxsim.fault import Fault
from ptxsim.forms import Step, UnknownForm, address_reader, expect, form, registers_of
from ptxsim.fragment import LANES, Fragment
from ptxsim.lanes import COLLECTIVE
from ptxsim.parse import Instruction, Operand, Program, Register

# ---------------------------------------------------------------- registers


def floats(bits: np.ndarray, kind: str) -> np.ndarray:
    """uint16 bits of bf16 or f16 numbers -> float64."""
    values = numbers.f16_values(bits) if kind == "f16" else numbers.bf16_values(bits)
    return values.astype(np.float64)


def names_of(operand: Operand, count: int) -> list[str]:
    """The names of the `count` registers of 32 bits of a vector."""
    parts = registers_of(operand)
    if len(parts) != count:
        raise UnknownForm(f"{len(parts)} registers, and not {count}")
    names = [each.name for each in parts if isinstance(each, Register) and each.bits == 32]
    if len(names) != count:
        raise UnknownForm("not registers of 32 bits")
    return names


def stacked(fragment: Fragment, names: list[str]) -> np.ndarray:
    """The values of registers, uint32 [registers, warps, 32]."""
    registers, threads = fragment.machine.registers, fragment.threads
    return np.concatenate([registers[name][threads] for name in names]).reshape(len(names), -1, LANES)


def put_all(fragment: Fragment, names: list[str], values: np.ndarray, undefined: np.ndarray | None) -> None:
    """Write registers of the running threads. values: of 32 bits, [registers, threads]. undefined: which are."""
    for name, row in zip(names, values.view(np.uint32), strict=True):
        fragment.put(name, row)
    if undefined is not None:
        for name, which in zip(names, undefined, strict=True):
            fragment.mark(Register(name, 32), which)


def undefined_bits(fragment: Fragment, names: list[str]) -> np.ndarray | None:
    """`stacked` with all bits set where a value is undefined, and none elsewhere; None if no value is."""
    found = fragment.undefined([Register(name, 32) for name in names])
    return None if found is None else (found.reshape(len(names), -1, LANES) * np.uint32(0xFFFFFFFF)).astype(np.uint32)


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
    names, address = names_of(instruction.operands[0], count), address_reader(instruction.operands[1], 32)

    def step(fragment: Fragment) -> None:
        rows = _rows(fragment, address(fragment), count)
        shared = fragment.machine.shared
        found, undefined = shared.load(rows[0], 16, *rows[1:]), shared.undefined_at(rows[0], rows[1], 16)
        words = in_threads(fragment, found)
        put_all(fragment, names, words, None if undefined is None else in_threads(fragment, undefined) != 0)

    def in_threads(fragment: Fragment, rows: np.ndarray) -> np.ndarray:
        """The registers uint32 [matrices, threads] of rows of matrices, [rows, 16] bytes."""
        found = rows.view(np.uint16).reshape(-1, count, 8, 8)
        if trans:
            found = found.transpose(0, 1, 3, 2)
        words = np.zeros((len(fragment.warps), count, LANES), np.uint32)
        words[fragment.whole_warps()] = np.ascontiguousarray(found).view(np.uint32).reshape(-1, count, LANES)
        return words.transpose(1, 0, 2).reshape(count, -1)

    return step


@form(*[f"stmatrix.sync.aligned.{each}" for each in _MATRICES], moved=(1,))
def _store_matrices(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    count, trans = _matrices(instruction)
    names, address = names_of(instruction.operands[1], count), address_reader(instruction.operands[0], 32)

    def step(fragment: Fragment) -> None:
        addresses, clusters, warps, lanes = _rows(fragment, address(fragment), count)
        values, bits = in_rows(fragment, stacked(fragment, names)), undefined_bits(fragment, names)
        undefined = None if bits is None else in_rows(fragment, bits) != 0
        fragment.machine.shared.store(addresses, values, clusters, warps, lanes, undefined)

    def in_rows(fragment: Fragment, registers: np.ndarray) -> np.ndarray:
        """The rows of matrices, uint8 [rows, 16], of registers as of `stacked`."""
        words = registers[:, fragment.whole_warps()].transpose(1, 0, 2)
        values = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 8)
        if trans:
            values = np.ascontiguousarray(values.transpose(0, 1, 3, 2))
        return values.reshape(-1, 8).view(np.uint8)

    return step


def _matrices(instruction: Instruction) -> tuple[int, bool]:
    """(number of matrices, whether they are transposed) of an instruction."""
    found = re.search(r"\.x(\d)(\.trans)?\.", instruction.opcode)
    assert found is not None
    return int(found[1]), found[2] is not None
