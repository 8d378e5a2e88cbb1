"""`tcgen05`: allocation of tensor memory, loads and stores of warps, copies, commits and fences.

Sources: PTX ISA, the instructions of `tcgen05`; confidence high, unless a line below or `tensor_memory.py` says less.

- `tcgen05.alloc` writes the address into shared memory as a write of its warp: the PTX ISA calls it a weak memory
  operation, and leaves its proxy open. Triton loads tiles there by TMA after barriers, without a `fence.proxy.async`,
  so it counts as fenced. Confidence medium.
- `32x32b.xN`: thread l of a warp accesses lane 32 * (warp % 4) + l, register i is column i from the address on.
- `16x32bx2.xN`: the first 16 threads access 16 lanes from the address on, the others the same lanes, as many columns
  further on as an operand says. Confidence medium to high: the ISA's figure, and Triton's use for 64 rows.
- `cp.32x128b.warpx4` copies 32 rows of 16 bytes: row r goes to lane r of each quarter, into four columns. Triton writes
  the two qualifiers in the other order. Confidence medium to high for the order of the bytes.
- `tcgen05.commit` arrives at an mbarrier at the end of all earlier operations of the tensor pipe. Triton 3.6 has no
  state space and 64 bits, a shared address with zeros above: ptxas uses the lower 32 (`UTCBAR [UR5]`).
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ptxsim.clocks import FENCED
from ptxsim.descriptors import CHUNK, Matrix
from ptxsim.fault import Fault
from ptxsim.floating import REDUCTIONS
from ptxsim.forms import (
    Step,
    UnknownForm,
    address_reader,
    expect,
    form,
    immediate,
    reader,
    registers_of,
    writer,
)  # fmt: skip
from ptxsim.fragment import LANES, Fragment
from ptxsim.lanes import COLLECTIVE
from ptxsim.parse import Instruction, Program, Register
from ptxsim.tensor_issue import group_of, issue
from ptxsim.tensor_memory import HALF, QUARTER, Region, TensorPipe, split_undefined
from ptxsim.tensor_products import column_of


def _warps(fragment: Fragment) -> Iterator[tuple[int, int]]:
    """(first lane in the fragment, warp of the machine) of each warp that executes an instruction of whole warps."""
    running = fragment.by_warp(fragment.running)
    some = running.any(1)
    if (some != running.all(1)).any():
        raise Fault("executed by part of a warp")
    for i in np.flatnonzero(some).tolist():
        yield LANES * i, int(fragment.warps[i])


def _same(values: np.ndarray, first: int) -> int:
    """The value that all lanes of a warp, from `first` on, have. Raises Fault if they differ."""
    mine = values[first : first + LANES]
    if (mine != mine[0]).any():
        raise Fault("the threads of a warp name several addresses")
    return int(mine[0])


# ---------------------------------------------------------------- allocation


@form(*[f"tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32" for group in (1, 2)])
def _alloc(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    address, count = address_reader(instruction.operands[0], 32), immediate(instruction.operands[1])
    group = group_of(instruction)
    others = {one.opcode for one in program.instructions if f".cta_group::{3 - group}" in one.opcode}
    if any(opcode.startswith("tcgen05.") for opcode in others):
        raise UnknownForm("the instructions of the kernel have several values of cta_group")

    def step(fragment: Fragment) -> Fragment | None:
        machine, addresses, meetings = fragment.machine, address(fragment), []
        for first, warp in _warps(fragment):
            column = machine.tensor_memory.allocate(machine.program_of(warp), count)
            offset = _same(addresses, first) & 0xFFFFFF
            meetings.append((warp, (column, count, offset, warp % machine.warps_of_program)))
            where, cluster = np.array([_same(addresses, first)]), np.array([machine.cluster_of_warp(warp)])
            content = np.array([[column]], np.uint32).view(np.uint8)
            local = machine.local_warp(warp)
            machine.shared.store(where, content, cluster, np.array([local]), np.array([COLLECTIVE]))
            machine.clocks.fence(machine.cluster_of_warp(warp), local, (FENCED,))
        return _together(fragment, meetings, group)

    return step


def _together(
    fragment: Fragment, meetings: Sequence[tuple[int, tuple[int, ...]]], group: int
) -> Fragment | None:  # fmt: skip
    """Let warps wait for warps of the pairs' other programs; returns the fragment that continues, as a `Step` does.

    meetings: the warps, and the operands that the other one has to have.
    """
    if group == 1 or not meetings:
        return None
    fragment.jump(fragment.active, fragment.at + 1)
    for warp, operands in meetings:
        fragment.machine.tensor_memory.meet(warp, fragment.instruction.opcode, operands)
    return fragment.without(np.ones(len(fragment.warps), bool))


@form(*[f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32" for group in (1, 2)])
def _dealloc(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    address, count = reader(instruction.operands[0], "u32"), immediate(instruction.operands[1])

    def step(fragment: Fragment) -> Fragment | None:
        machine, addresses, meetings = fragment.machine, fragment.every(address(fragment)), []
        for first, warp in _warps(fragment):
            rows = machine.clocks.of(machine.cluster_of_warp(warp), machine.local_warp(warp))
            machine.tensor_memory.free(machine.program_of(warp), _same(addresses, first), count, rows)
            meetings.append((warp, (_same(addresses, first), count)))
        return _together(fragment, meetings, group_of(instruction))

    return step


@form(*[f"tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned" for group in (1, 2)])
def _relinquish(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)

    def step(fragment: Fragment) -> Fragment | None:
        warps = [warp for _, warp in _warps(fragment)]
        for warp in warps:
            fragment.machine.tensor_memory.relinquished[fragment.machine.program_of(warp)] = True
        return _together(fragment, [(warp, ()) for warp in warps], group_of(instruction))

    return step


# ---------------------------------------------------------------- loads and stores of warps

_COUNTS = [2**i for i in range(8)]


_SHAPES_OF_WARPS = ("32x32b", "16x32bx2")


def _registers(instruction: Instruction, index: int) -> list[Register]:
    found = [each for each in registers_of(instruction.operands[index]) if isinstance(each, Register)]
    count = int(instruction.opcode.split(".x")[1].split(".")[0])
    if len(found) != count or len(registers_of(instruction.operands[index])) != count:
        raise UnknownForm(f"not {count} registers")
    return found


def _regions(
    instruction: Instruction, split: int | None, columns: int
) -> Callable[[Fragment, np.ndarray, int, int], list[Region]]:
    """A function that returns the words of a warp's threads, of both halves of the warp for `16x32bx2`.

    split: the operand with the distance of the halves in columns.
    """
    if "32x32b" in instruction.opcode:
        return lambda fragment, addresses, first, warp: [
            fragment.machine.tensor_memory.of_warp(warp, _same(addresses, first), columns)]  # fmt: skip
    assert split is not None
    distance = immediate(instruction.operands[split])

    def halves(fragment: Fragment, addresses: np.ndarray, first: int, warp: int) -> list[Region]:
        at, memory = _same(addresses, first), fragment.machine.tensor_memory
        return [memory.of_warp(warp, at + offset, columns, HALF) for offset in (0, distance)]

    return halves


@form(*[f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32" for shape in _SHAPES_OF_WARPS for count in _COUNTS],
      *[f"tcgen05.ld.red.sync.aligned.{shape}.x{count}.{name}"
        for shape in _SHAPES_OF_WARPS for count in _COUNTS[1:] for name in REDUCTIONS])  # fmt: skip
def _load(instruction: Instruction, program: Program) -> Step:
    """The step of a load; `.red` also gives the minimum or maximum of what each thread loads."""
    reduces = ".ld.red." in instruction.opcode
    split = 2 + reduces if "16x32bx2" in instruction.opcode else None
    expect(instruction, 3 + reduces if split else 2 + reduces)
    into, address = _registers(instruction, 0), address_reader(instruction.operands[1 + reduces], 32)
    writes, names = [writer(each, "b32") for each in into], {each.name for each in into}
    regions = _regions(instruction, split, len(into))
    if reduces:
        (result,) = registers_of(instruction.operands[1])
        write_result = writer(result, "f32")
        reduced = REDUCTIONS[instruction.opcode.partition(f".x{len(into)}.")[2]]
        names |= {result.name} if isinstance(result, Register) else set()

    def step(fragment: Fragment) -> None:
        machine, memory, addresses = fragment.machine, fragment.machine.tensor_memory, address(fragment)
        values = np.zeros((len(into), *fragment.shape), np.uint32)
        for first, warp in _warps(fragment):
            words = [memory.load(warp, region) for region in regions(fragment, addresses, first, warp)]
            values[:, first : first + LANES] = np.concatenate(words).T
            machine.unready.setdefault(warp, set()).update(names)
        for write, value in zip(writes, values, strict=True):
            write(fragment, value)
        if reduces:
            write_result(fragment, reduced(np.ascontiguousarray(values.T).view(np.float32)))
        if memory.undefined is not None:
            undefined = np.zeros(values.shape, bool)
            for first, warp in _warps(fragment):
                found = [memory.undefined_at(each) for each in regions(fragment, addresses, first, warp)]
                undefined[:, first : first + LANES] = np.concatenate(found).T
            for register, which in zip(into, undefined, strict=True):
                fragment.mark(register, which)
            if reduces:
                fragment.mark(result, np.any(undefined, 0))

    return step


@form(*[f"tcgen05.st.sync.aligned.32x32b.x{count}.b32" for count in _COUNTS], moved=(1,))
@form(*[f"tcgen05.st.sync.aligned.16x32bx2.x{count}.b32" for count in _COUNTS], moved=(2,))
def _store(instruction: Instruction, program: Program) -> Step:
    split = 1 if "16x32bx2" in instruction.opcode else None
    expect(instruction, 3 if split else 2)
    address, source = address_reader(instruction.operands[0], 32), _registers(instruction, -1)
    reads = [reader(each, "b32") for each in source]
    regions = _regions(instruction, split, len(source))

    def step(fragment: Fragment) -> None:
        memory, addresses = fragment.machine.tensor_memory, address(fragment)
        values, undefined = np.stack([fragment.every(read(fragment)) for read in reads], 1), fragment.undefined(source)
        for first, warp in _warps(fragment):
            found = regions(fragment, addresses, first, warp)
            words = np.split(values[first : first + LANES], len(found))
            which = split_undefined(None if undefined is None else undefined.T[first : first + LANES], len(found))
            for each in zip(found, words, which, strict=True):
                memory.store(warp, *each)

    return step


@form("tcgen05.wait::ld.sync.aligned", "tcgen05.wait::st.sync.aligned")
def _wait(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)
    loads = "::ld" in instruction.opcode

    def step(fragment: Fragment) -> None:
        for _, warp in _warps(fragment):
            fragment.machine.tensor_memory.wait(warp, loads)
            if loads:
                fragment.machine.unready.pop(warp, None)

    return step


@form("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _fence(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)
    before = "before" in instruction.opcode

    def step(fragment: Fragment) -> None:
        machine = fragment.machine
        for each in fragment.running_warps().tolist():
            cluster, warp = divmod(each, machine.warps_of_cluster)
            if before:
                machine.clocks.send_tensor(cluster, warp, machine.tensor_memory.pipes[cluster].issued[warp])
            else:
                machine.clocks.receive_tensor(cluster, warp)

    return step


# ---------------------------------------------------------------- operations of the tensor pipe

_SHAPES = ("warpx4.32x128b", "32x128b.warpx4")


@form(*[f"tcgen05.cp.cta_group::{group}.{shape}" for group in (1, 2) for shape in _SHAPES])
def _copy(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    address, descriptor = address_reader(instruction.operands[0], 32), reader(instruction.operands[1], "u64")
    pair = group_of(instruction) == 2

    def step(fragment: Fragment) -> None:
        addresses, bits = address(fragment), fragment.every(descriptor(fragment))
        for lane, ranks, begin in issue(fragment, pair):
            column, matrix = column_of(int(addresses[lane])), Matrix.of(int(bits[lane]))

            def copy(
                pipe: TensorPipe, column: int = column, matrix: Matrix = matrix, ranks: tuple[int, ...] = ranks
            ) -> None:  # fmt: skip
                for rank in ranks:
                    words, undefined = pipe.read_matrix(rank, matrix, QUARTER, CHUNK).view(np.uint32), None
                    if pipe.has_undefined:
                        parts = pipe.undefined_matrix(rank, matrix, QUARTER, CHUNK)
                        undefined = np.tile(np.any(parts.reshape(*words.shape, -1), 2), (4, 1))
                    pipe.write(rank, column, np.tile(words, (4, 1)), undefined)

            begin(copy)

    return step


_COMMIT = "mbarrier::arrive::one"


@form(f"tcgen05.commit.cta_group::1.{_COMMIT}.b64",
      *[f"tcgen05.commit.cta_group::{group}.{_COMMIT}.shared::cluster{cast}.b64"
        for group in (1, 2) for cast in ("", ".multicast::cluster")])  # fmt: skip
def _commit(instruction: Instruction, program: Program) -> Step:
    cast = ".multicast" in instruction.opcode
    expect(instruction, 2 if cast else 1)
    address = address_reader(instruction.operands[0], 32)
    mask = reader(instruction.operands[1], "u16") if cast else None

    def step(fragment: Fragment) -> None:
        machine, addresses = fragment.machine, address(fragment)
        masks = np.broadcast_to(0 if mask is None else mask(fragment), fragment.shape)
        for lane, _, begin in issue(fragment, pair=False):
            where = addresses[lane : lane + 1]
            warp = int(fragment.warp_of(np.array([lane]))[0])
            cluster = machine.cluster_of_warp(warp)
            issuers = machine.tensor_memory.pipes[cluster].issuers
            if issuers.get(machine.local_warp(warp), lane % LANES) != lane % LANES:
                raise Fault("commits operations that another thread of its warp issued")
            if cast:
                ranks = np.flatnonzero(int(masks[lane]) >> np.arange(16) & 1)
                where = machine.shared.address(ranks, int(where[0]) & 0xFFFFFF)

            places = machine.shared.flat(where, np.full(where.shape, cluster), 8).tolist()
            for at in places:
                machine.mbarriers.will_commit(at)

            def arrive(pipe: TensorPipe, places: list[int] = places) -> None:
                for at in places:
                    machine.mbarriers.committed(at, pipe.rows, pipe.agent, pipe.epoch)

            begin(arrive)

    return step
