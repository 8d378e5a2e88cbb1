"""Products of a warpgroup: `wgmma`.

Sources and confidence:
- Shapes and registers: PTX ISA, "Register fragments and shared memory matrix layouts" of `wgmma`. Warp w of a
  warpgroup has rows 16 w to 16 w + 15 of A and of the sum; it has the registers of `mma.m16n8k16`, one block of 8
  columns after the other. High.
- Descriptors: PTX ISA, "Matrix-descriptor format". Start >> 4 in bits 0 to 13, leading offset >> 4 in 16 to 29,
  stride offset >> 4 in 32 to 45, base offset in 49 to 51, swizzle in 62 and 63 (0 none, 1 of 128, 2 of 64, 3 of 32
  bytes). The contraction is contiguous; row r is at (r // 8) * stride + (r % 8) * span, and the swizzle goes by
  address. Without a swizzle, rows have 16 bytes and the second half of the contraction lies at the leading offset.
  High with a swizzle, medium-high without. Transposed operands and base offsets are not simulated.
- Shared memory is read by the asynchronous proxy: "Accessing the same memory location across multiple proxies needs a
  cross-proxy fence". High.
- Registers: none that a product reads or writes may be used before `wgmma.wait_group`; other products may add to the
  same registers. A `wgmma.fence` is required between other writes of these registers and a product. High. The
  simulator looks for that fence in the product's own basic block, where compilers put it.

Sums of FP8 products have float32's precision here; the units of Hopper keep fewer bits.

A product is computed when it is issued, which changes no kernel's results: the clocks find every access to shared
memory that does not wait for it, and `Products.check` every use of its registers. Sums are as in `warp_products`.
"""

import numpy as np

from ptxsim.descriptors import CHUNK
from ptxsim.fault import Fault
from ptxsim.forms import (
    Read,
    Step,
    UnknownForm,
    expect,
    form,
    immediate,
    reader,
    registers_of,
)
from ptxsim.fragment import Fragment
from ptxsim.global_memory import in_units
from ptxsim.machine import Machine
from ptxsim.numbers import E4M3, E5M2, matrix_product
from ptxsim.parse import Instruction, Pair, Program, Register, Vector
from ptxsim.shared import START, swizzled
from ptxsim.sums import undefined_sums
from ptxsim.warp_matrix import floats, names_of, stacked, undefined_bits
from ptxsim.warp_products import a_values, bytes_of_a
from ptxsim.warpgroup_products import OPCODE, Places, Touched

_BY_CODE = {"e4m3": E4M3.astype(np.float64), "e5m2": E5M2.astype(np.float64)}
_SPANS = (0, 128, 64, 32)  # of swizzles by number
_ROW = 32  # bytes of the contraction of an instruction


def end(machine: Machine) -> None:
    """Raise Fault for products without a wait."""
    if machine.products.registers:
        raise Fault(f"{machine.program.name}: a program ends without wgmma.wait_group for its last products")


# ---------------------------------------------------------------- operands in shared memory


def _chunks(descriptor: int, rows: np.ndarray) -> np.ndarray:
    """The addresses of the chunks of 16 bytes of rows of a matrix in shared memory, int64 [rows, 2]."""
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    span = _SPANS[descriptor >> 62 & 3]
    if descriptor >> 49 & 7:
        raise Fault("a descriptor with a base offset, which is not simulated")
    rows, at = rows[:, None], np.arange(_ROW // CHUNK)
    if not span:
        found = start + rows // 8 * stride + rows % 8 * CHUNK + at * leading
    elif start % (8 * span) + _ROW > span:
        raise Fault(f"a descriptor of a matrix at {start}, which is not in the first row of a tile swizzled by {span}")
    else:
        found = swizzled(start + rows // 8 * stride + rows % 8 * span + at * CHUNK, span)
    if (found < START).any():
        raise Fault("a descriptor of a matrix outside of shared memory")
    return found


def _places(machine: Machine, program: int, descriptor: int, parts: tuple[int, ...], count: int) -> Places:
    """Where parts of a matrix of a program are, of `count` rows each. parts: the first row of each."""
    known, key = machine.products.places, (program, descriptor, parts, count)
    if key not in known:
        shared = machine.shared
        cluster, rank = divmod(program, machine.program.cluster)
        rows = (np.array(parts)[:, None] + np.arange(count)).ravel()
        addresses = shared.address(np.array(rank), 0) + _chunks(descriptor, rows)
        units = shared.flat(addresses, np.array(cluster), CHUNK).ravel() // CHUNK
        known[key] = units, shared.cells_of(units, CHUNK).reshape(len(parts), -1)
    return known[key]


def _matrices(
    fragment: Fragment, warps: np.ndarray, descriptors: np.ndarray, count: int, kind: str, by_warp: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(matrices in shared memory that warps read, float64 [matrices, rows, elements of 32 bytes]; each warp's).

    descriptors: [warps]. count: the rows of a matrix. by_warp: whether each warp of a warpgroup reads rows of its own.
    """
    machine = fragment.machine
    clusters, local = np.divmod(warps, machine.warps_of_cluster)
    agents, groups = machine.clocks.products(local), machine.products.committed[warps] + 1
    readers: dict[tuple[int, int], list[int]] = {}  # the warps of each program and descriptor
    for i, key in enumerate(zip(machine.program_of(warps).tolist(), descriptors.tolist(), strict=True)):
        readers.setdefault(key, []).append(i)
    found, index, at = [], np.empty(len(warps), np.int64), 0
    for (program, descriptor), of in readers.items():
        parts = tuple((local[of] % 4 * count).tolist()) if by_warp else (0,)
        units, cells = _places(machine, program, descriptor, parts, count)
        rows = machine.clocks.rows[:, clusters[of[0]], local[of]]
        machine.shared.shadow.reads_of_agents(cells, rows, agents[of].tolist(), groups[of].tolist())
        found.append(in_units(machine.shared.data, CHUNK).take(units).view(np.uint8).reshape(-1, count, _ROW))
        index[of] = np.arange(at, at + len(of)) if by_warp else at
        at += len(parts)
    matrices = np.concatenate(found)
    if kind in _BY_CODE:
        return _BY_CODE[kind].take(matrices), index
    return floats(matrices.view(np.uint16), kind), index


def _undefined_rows(
    machine: Machine, warps: np.ndarray, descriptors: np.ndarray, count: int, by_warp: bool
) -> np.ndarray:
    """Which rows of each warp's matrix in shared memory are undefined, bool [warps, count], after `_matrices`."""
    undefined, found = machine.shared.undefined, np.zeros((len(warps), count), bool)
    if undefined is not None:
        for rows, warp, descriptor in zip(found, warps.tolist(), descriptors.tolist(), strict=True):
            part = machine.local_warp(warp) % 4 * count if by_warp else 0
            _, cells = _places(machine, machine.program_of(warp), descriptor, (part,), count)
            rows[:] = np.any(undefined[cells].reshape(count, -1), 1)
    return found


def _multiplied(a: np.ndarray, b: np.ndarray, of: np.ndarray) -> np.ndarray:
    """The products of warps' matrices a [warps, 16, k] and matrices b [n, k] of the numbers `of` [warps]."""
    by_group = of.reshape(-1, 4) if len(of) % 4 == 0 else of[:, None]
    if (by_group == by_group[:, :1]).all():  # all warps of a warpgroup have the same one
        rows = a.reshape(len(by_group), -1, a.shape[2])
        return matrix_product(rows, b[by_group[:, 0]]).reshape(len(a), 16, -1)
    return matrix_product(a, b[of])


# ---------------------------------------------------------------- instructions


def _one_for_each_warp(fragment: Fragment, read: Read, which: np.ndarray) -> np.ndarray:
    """The values of an operand that all threads of a warp must agree on: [warps]."""
    values = fragment.by_warp(read(fragment))[which]
    if (values != values[:, :1]).any():
        raise Fault("the threads of a warp pass different operands")
    return values[:, 0]


_SHAPES = [f"k16.f32.{kind}.{kind}" for kind in ("bf16", "f16")]
_SHAPES += [f"k32.f32.{a}.{b}" for a in _BY_CODE for b in _BY_CODE]


@form(*[f"{OPCODE}.sync.aligned.m64n{n}{shape}" for n in range(8, 257, 8) for shape in _SHAPES], moved=(1,))
def _product(instruction: Instruction, program: Program) -> Step:
    in_registers = isinstance(instruction.operands[1], Vector)
    a_kind, b_kind = instruction.opcode.split(".")[-2:]
    if in_registers and a_kind in _BY_CODE:
        raise UnknownForm("a product of FP8 codes in registers")
    # Operands of FP8 cannot be transposed: there are no flags that say so.
    expect(instruction, 6 if a_kind in _BY_CODE else 7 if in_registers else 8)
    into, a, b, adds, *flags = instruction.operands
    n = int(instruction.opcode.split(".")[4][4:-3])
    if [immediate(one) for one in flags] != [1, 1, *[0] * (len(flags) - 2)]:
        raise UnknownForm("a product of negated or transposed operands")
    left = names_of(a, 4) if in_registers else []
    right, adding = reader(b, "u64"), reader(adds, "pred")
    left_descriptor = None if in_registers else reader(a, "u64")
    touched = Touched(tuple(names_of(into, n // 2)), frozenset(left))
    unfenced = _unfenced(instruction, program, touched)

    def step(fragment: Fragment) -> None:
        if unfenced:
            raise Fault(unfenced)
        machine, which = fragment.machine, fragment.whole_warps()
        warps = fragment.warps[which]
        of_a = None if left_descriptor is None else _one_for_each_warp(fragment, left_descriptor, which)
        if of_a is None:
            a_matrices = a_values(stacked(fragment, left)[:, which], a_kind)
        else:
            matrices, of = _matrices(fragment, warps, of_a, 16, a_kind, by_warp=True)
            a_matrices = matrices[of]
        of_b = _one_for_each_warp(fragment, right, which)
        found = _multiplied(a_matrices, *_matrices(fragment, warps, of_b, n, b_kind, by_warp=False))
        adds = _one_for_each_warp(fragment, adding, which)
        if adds.any():
            addend = machine.products.sums(warps, touched)
            found += addend if adds.all() else np.where(adds[:, None, None], addend, 0)
        machine.products.issue(warps, touched, found.astype(np.float32))
        if machine.undefined or machine.shared.undefined is not None:
            mark(fragment, of_a, of_b, adds)

    def mark(fragment: Fragment, of_a: np.ndarray | None, of_b: np.ndarray, adds: np.ndarray) -> None:
        """Record which sums are undefined. of_a, of_b, adds: the descriptors and the flag of each warp that runs."""
        machine, which, warps = fragment.machine, fragment.whole_warps(), fragment.warps[fragment.whole_warps()]
        if of_a is None:
            bits = undefined_bits(fragment, left)
            a = np.zeros((len(warps), 16), bool) if bits is None else np.any(bytes_of_a(bits[:, which]), 2)
        else:
            a = _undefined_rows(machine, warps, of_a, 16, by_warp=True)
        sums = undefined_bits(fragment, list(touched.sums))
        if sums is not None:
            sums = np.where(adds[:, None], sums[:, which], np.uint32(0))
        found = undefined_sums(a, _undefined_rows(machine, warps, of_b, n, by_warp=False), sums)
        for name, values in zip(touched.sums, found, strict=True):
            fragment.mark_running(Register(name, 32), values)

    return step


def _unfenced(instruction: Instruction, program: Program, touched: Touched) -> str:
    """The defect of the `wgmma.fence` before a product; empty without one."""
    index = program.instructions.index(instruction)
    while index not in program.leaders:
        index -= 1
        before = program.instructions[index]
        if before.opcode == "wgmma.fence.sync.aligned":
            return ""
        if not before.opcode.startswith(OPCODE):
            written = touched.every.intersection(_written(before))
            if written:
                return f"no wgmma.fence after {min(written)} was written"
    return "a product without wgmma.fence in its basic block"


def _written(instruction: Instruction) -> list[str]:
    """The registers that an instruction writes: its first operand's."""
    first = instruction.operands[0] if instruction.operands else None
    parts = (first.first, first.second) if isinstance(first, Pair) else registers_of(first) if first else ()
    return [one.name for one in parts if isinstance(one, Register)]


@form("wgmma.fence.sync.aligned")
def _fence(instruction: Instruction, program: Program) -> Step:
    """The step of `wgmma.fence`, without effect: `_unfenced` checks its place."""
    expect(instruction, 0)
    return lambda fragment: None


@form("wgmma.commit_group.sync.aligned")
def _commit(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)

    def step(fragment: Fragment) -> None:
        fragment.machine.products.committed[fragment.warps[fragment.whole_warps()]] += 1

    return step


@form("wgmma.wait_group.sync.aligned")
def _wait(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 1)
    left = immediate(instruction.operands[0])
    return lambda fragment: fragment.machine.products.wait(fragment.warps[fragment.whole_warps()], left)
