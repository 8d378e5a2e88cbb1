"""Asynchronous copies between global and shared memory: `cp.async`, `cp.async.bulk` and `cp.async.bulk.tensor`.

Sources and confidence:
- `cp.async`: PTX ISA, "Non-bulk copy". Copies of 4, 8 or 16 bytes per thread, of which the last ones may be zeros. It
  is no operation of the asynchronous proxy: "The cp{.reduce}.async.bulk operations are performed in the asynchronous
  proxy" holds only for bulk copies, and CUTLASS puts `fence.proxy.async` between `cp.async` and the matrix units.
  So it needs no fence after threads' writes, and matrix units and bulk copies need a fence after it. Medium-high.
- Bulk copies to shared memory: PTX ISA, `cp.async.bulk` and `cp.async.bulk.tensor`. They write by the asynchronous
  proxy and then complete as many bytes on an mbarrier as were written, zeros outside of the tensor included. Waiting
  there suffices to read them: "The completion ... is followed by an implicit generic-async proxy fence". They order no
  other accesses of the issuing thread. High.
- Bulk copies from shared memory: threads wait for them by groups. `wait_group.read` waits until shared memory was
  read, `wait_group` also until global memory was written. High.
- Addresses in shared memory are multiples of 16, or of 128 for tensors (PTX ISA, table of `cp.async.bulk.tensor`).
  High.
- `.multicast::cluster`: each program in the mask gets the data, and completes the bytes, at the same offsets. High.
  `.cta_group::2`: the mbarrier may be the other program's of a pair. Medium-high. With both, the mbarrier's address
  selects the even or the odd program of each pair to be signalled (PTX ISA, `cp.async.bulk.tensor`). Medium-high.
  Triton writes `.cta_group::2` in front of the state spaces.
- A program must not end while a bulk copy reads its shared memory (CUDA programming guide, "Asynchronous data copies
  using TMA": shared memory must not be deallocated before). High.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ptxsim.async_groups import Operation
from ptxsim.clocks import KNOWN, Index
from ptxsim.control import one_lane
from ptxsim.fault import Fault
from ptxsim.forms import Read, Step, UnknownForm, address_reader, expect, form, immediate, reader
from ptxsim.fragment import LANES, Fragment
from ptxsim.global_memory import Loaded, in_units, stamp_of
from ptxsim.machine import Machine
from ptxsim.parse import Address, Instruction, Operand, Program
from ptxsim.tensor_maps import Published, TensorMap

# ---------------------------------------------------------------- cp.async


@form(*[f"cp.async.{cache}.{space}.global{prefetch}" for cache in ("ca", "cg") for space in ("shared", "shared::cta")
        for prefetch in ("", ".L2::128B")])  # fmt: skip
def _copy(instruction: Instruction, program: Program) -> Step:
    """The step of `cp.async`: the copies of all threads of a fragment are one operation."""
    expect(instruction, 3, 4)
    into, source = address_reader(instruction.operands[0], 32), address_reader(instruction.operands[1], 64)
    size = immediate(instruction.operands[2])
    if size not in ((16,) if ".cg." in instruction.opcode else (4, 8, 16)):
        raise UnknownForm(f"a copy of {size} bytes")
    count = reader(instruction.operands[3] if len(instruction.operands) > 3 else instruction.operands[2], "u32")

    def step(fragment: Fragment) -> None:
        machine, running, threads = fragment.machine, fragment.running, fragment.running_threads()
        clusters, warps = machine.cluster_of[threads], machine.warp_of[threads]
        sources = source(fragment)[running]
        counts = fragment.every(count(fragment))[running]
        there = machine.shared.flat(into(fragment)[running], clusters, size)
        if (there % size).any() or (sources[counts > 0] % size).any():
            raise Fault(f"copies {size} bytes from or to an address that is no multiple of {size}")
        if (counts > size).any():
            raise Fault(f"copies {int(counts.max())} bytes, more than {size}")
        every, index = np.unique(threads // LANES, return_inverse=True)
        of_warps = np.divmod(every, machine.warps_of_cluster)
        rows = machine.clocks.rows[KNOWN, of_warps[0], of_warps[1]]
        machine.clocks.rows[KNOWN, of_warps[0], of_warps[1], of_warps[1]] += 1
        epochs = machine.copy_groups.open(threads)
        issued, lanes = machine.shared.lanes.meetings[clusters, warps], machine.lane_of[threads]

        def act() -> None:
            values, undefined = _sources(machine, sources, counts, size, clusters + machine.first_cluster)
            shared = machine.shared
            data, places = in_units(shared.data, size), there // size
            cells, granules = shared.cells_of(places, size), f"u{shared.granule}"
            raw = values.view(granules)
            changes = data.take(places).view(granules).reshape(raw.shape) != raw
            shared.shadow.generic_writes(cells, rows, index, machine.clocks.copies(warps), epochs, changes)
            shared.lanes.copies(cells, warps, lanes, issued)
            data[places] = in_units(values, size)
            if (data.take(places).view(granules).reshape(raw.shape) != raw).any():
                raise Fault("several threads copy different values to one address of shared memory")
            shared.define(cells, undefined)

        machine.copy_groups.issue(threads, Operation(machine, fragment.instruction, int(clusters[0]), act))

    return step


def _sources(machine: Machine, addresses: np.ndarray, counts: np.ndarray, size: int, clusters: np.ndarray) -> Loaded:
    """The bytes that threads copy, uint8 [threads, size]: the first `counts` from global memory, then zeros."""
    memory, whole = machine.memory, counts == size
    if whole.all():
        return _noted(machine, memory.load(addresses, size, clusters))
    values, undefined = np.zeros((len(addresses), size), np.uint8), np.zeros((len(addresses), size), bool)
    parts = [(whole, slice(0, size))] + [(~whole & (counts > at), slice(at, at + 1)) for at in range(size)]
    for some, part in parts:
        if some.any():
            found = _noted(machine, memory.load(addresses[some] + part.start, part.stop - part.start, clusters[some]))
            values[some, part] = found[0]
            undefined[some, part] = False if found[1] is None else found[1]
    return values, undefined


def _noted(machine: Machine, loaded: Loaded) -> Loaded:
    """What a copy has loaded, after a note of what nothing wrote."""
    if loaded[1] is not None:
        machine.undefined.found("global memory")
    return loaded


@form("cp.async.commit_group")
def _commit(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)
    return lambda fragment: fragment.machine.copy_groups.commit(fragment.running_threads())


@form("cp.async.wait_group")
def _wait(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 1)
    left = immediate(instruction.operands[0])
    return lambda fragment: fragment.machine.copy_groups.wait(fragment.running_threads(), left)


@form("cp.async.wait_all")
def _wait_all(instruction: Instruction, program: Program) -> Step:
    """The step that commits the open group and waits for all groups."""
    expect(instruction, 0)

    def step(fragment: Fragment) -> None:
        fragment.machine.copy_groups.commit(fragment.running_threads())
        fragment.machine.copy_groups.wait(fragment.running_threads(), 0)

    return step


# ---------------------------------------------------------------- bulk copies to shared memory


@dataclass(frozen=True)
class _Place:
    """Where a copy reads or writes shared memory. units: indices, in units of `size` bytes. cells: those of all bytes.

    barrier: the index of the mbarrier on which the copy completes; 0 where it reads shared memory.
    """

    units: np.ndarray
    size: int
    cells: Index
    barrier: int


def _load(
    fragment: Fragment, cluster: int, rows: np.ndarray, targets: list[_Place],
    read: Callable[[], Loaded], note: Callable[[int, int], None] = lambda agent, epoch: None,
) -> None:  # fmt: skip
    """Issue a copy that writes bytes to shared memory at some time, and completes them on mbarriers.

    rows: the clocks of its issue. targets: of each program that gets the data. read: returns the bytes [units, size].
    note: called with the copy's agent and epoch.
    """
    machine = fragment.machine
    barriers = [machine.mbarriers.seen(target.barrier, rows) for target in targets]

    def act() -> None:
        values, undefined = _noted(machine, read())
        for target, barrier in zip(targets, barriers, strict=True):
            if machine.mbarriers.found.get(target.barrier) is not barrier:
                raise Fault(f"the mbarrier at {barrier.where} ended before the copy that completes on it")
            epoch = barrier.copy()
            machine.shared.shadow.writes_of_agent(target.cells, rows, barrier.agent, epoch)
            in_units(machine.shared.data, target.size)[target.units] = in_units(values, target.size)
            machine.shared.define_units(target.units, target.size, undefined)
            note(barrier.agent, epoch)
            complete = np.zeros_like(rows)
            complete[:, barrier.agent] = epoch
            machine.mbarriers.bytes_arrived(target.barrier, values.size, complete)

    machine.later(fragment.instruction, cluster, act)


def _targets(
    machine: Machine, cluster: int, into: int, barrier: int, nbytes: int, ranks: list[int] | None, pairs: bool
) -> list[tuple[int, int]]:
    """The first byte in shared memory and the mbarrier of each program that gets a copy, as indices.

    ranks: the programs of a multicast; None for the program of the addresses. pairs: whether the mbarrier may be that
    of the other program of a pair.
    """
    shared, found = machine.shared, []
    for rank in [into >> 24] if ranks is None else ranks:
        signalled = barrier >> 24 if ranks is None else rank & ~1 | barrier >> 24 & 1 if pairs else rank
        first = shared.index(rank << 24 | into & 0xFFFFFF, cluster, nbytes)
        at = shared.index(signalled << 24 | barrier & 0xFFFFFF, cluster, 8)
        programs = first // shared.stride, at // shared.stride
        if programs[0] != programs[1] and not (pairs and programs[0] // 2 == programs[1] // 2):
            raise Fault("copies to the shared memory of one program, and completes on the mbarrier of another one")
        found.append((first, at))
    return found


def _own(machine: Machine, warp: int, address: int) -> None:
    """Raise Fault unless an address is in the program of a warp."""
    if address >> 24 != machine.program_of(warp) % machine.program.cluster:
        raise Fault("an address of another program as shared::cta")


@form(*[f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes" for space in ("shared::cta", "shared::cluster")])
def _bulk_load(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 4)
    into, source = address_reader(instruction.operands[0], 32), address_reader(instruction.operands[1], 64)
    count, barrier = reader(instruction.operands[2], "u32"), address_reader(instruction.operands[3], 32)
    own = "shared::cta" in instruction.opcode

    def step(fragment: Fragment) -> None:
        machine = fragment.machine
        everything = [fragment.every(read(fragment)) for read in (into, source, count, barrier)]
        for lane, warp, cluster in one_lane(fragment):
            at, first, nbytes, bar = (int(each[lane]) for each in everything)
            if nbytes < 1 or nbytes % 16 or first % 16 or at % 16:
                raise Fault(f"a bulk copy of {nbytes} bytes from {first:#x} to {at:#x}, not all multiples of 16")
            if own:
                _own(machine, warp, at)
            ((place, bar),) = _targets(machine, cluster, at, bar, nbytes, None, False)
            rows = machine.clocks.release(cluster, machine.local_warp(warp))
            addresses = np.arange(first, first + nbytes, 16)
            read = partial(machine.memory.copied, addresses, 16, cluster + machine.first_cluster, rows)
            units = np.arange(place // 16, (place + nbytes) // 16)
            _load(fragment, cluster, rows, [_Place(units, 16, machine.shared.span(place, nbytes), bar)], read)

    return step


# ---------------------------------------------------------------- tensors

_RANKS = "12345"
_LOADS = (("shared::cta", ""), ("shared::cluster", ""), ("shared::cluster", ".multicast::cluster"),
          ("shared::cluster", ".cta_group::2"), ("cta_group::2.shared::cluster", ""),
          ("cta_group::2.shared::cluster", ".multicast::cluster"))  # fmt: skip


_FOUR_ROWS = ("tile::gather4", "tile::scatter4")  # modes whose coordinates are a column and four rows


def _box(operand: Operand, opcode: str) -> tuple[Read, list[Read]]:
    """The readers of the map's address and of the coordinates of `[map, {x, y}]`."""
    if not isinstance(operand, Address) or operand.coordinates is None or operand.offset:
        raise UnknownForm(f"not a box of a tensor: {operand}")
    coordinates = [reader(each, "s32") for each in operand.coordinates.parts]
    if len(coordinates) != (5 if opcode.split(".")[5] in _FOUR_ROWS else int(opcode.split(".tensor.")[1][0])):
        raise UnknownForm(f"{len(coordinates)} coordinates")
    return reader(operand.base, "u64"), coordinates


def _numbers(fragment: Fragment, reads: list[Read]) -> np.ndarray:
    """The values of operands, [threads, operands]."""
    return np.stack([fragment.every(read(fragment)) for read in reads], 1)


def _place(machine: Machine, first: int, address: int, box: TensorMap, unit: int, barrier: int = 0) -> _Place:
    """The place of a box at an address in shared memory. first: the index of the address."""
    if address % 128:
        raise Fault(f"a tensor in shared memory at {address & 0xFFFFFF}, no multiple of 128")
    units = (box.places(address, unit) - address + first) // unit
    # Swizzling only changes the order of the bytes of a box.
    cells = machine.shared.cells_of(units, unit).ravel() if box.gaps else machine.shared.span(first, box.footprint)
    return _Place(units, unit, cells, barrier)


def _moved_box(published: Published, opcode: str) -> TensorMap:
    """The map whose box a copy moves: of four rows, if it names each of them."""
    if not any(mode in opcode for mode in _FOUR_ROWS):
        return published.map
    if len(published.map.box) != 2 or published.map.box[1] != 1:
        raise Fault(f"four rows of a tensor map of box {published.map.box}, and not of one row")
    return replace(published.map, box=(published.map.box[0], 4))


def _units(published: Published, corner: list[int], unit: int) -> tuple[np.ndarray, np.ndarray]:
    """(addresses, whether they lie in the tensor) of the units of bytes that a copy moves."""
    if len(corner) == len(published.map.box):
        return published.map.units_of_box(corner, unit)
    rows = [published.map.units_of_box([corner[0], row], unit) for row in corner[1:]]
    addresses, inside = zip(*rows, strict=True)
    return np.concatenate(addresses), np.concatenate(inside)


@form(*[f"cp.async.bulk.tensor.{mode}.{space}.global.mbarrier::complete_tx::bytes{more}"
        for mode in [*(f"{rank}d" for rank in _RANKS), "2d.tile::gather4"] for space, more in _LOADS])  # fmt: skip
def _tensor_load(instruction: Instruction, program: Program) -> Step:
    multicast, pairs = "multicast" in instruction.opcode, "cta_group::2" in instruction.opcode
    own = "shared::cta" in instruction.opcode
    expect(instruction, 4 if multicast else 3)
    into, barrier = address_reader(instruction.operands[0], 32), address_reader(instruction.operands[2], 32)
    tensor, coordinates = _box(instruction.operands[1], instruction.opcode)
    mask = reader(instruction.operands[3], "u16") if multicast else None

    def step(fragment: Fragment) -> None:
        machine = fragment.machine
        at, barriers = into(fragment), barrier(fragment)
        tensors, corners = _numbers(fragment, [tensor])[:, 0], _numbers(fragment, coordinates)
        masks = None if mask is None else _numbers(fragment, [mask])[:, 0]
        for lane, warp, cluster in one_lane(fragment):
            if own:
                _own(machine, warp, int(at[lane]))
            rows = machine.clocks.release(cluster, machine.local_warp(warp))
            published = machine.tensor_maps.used(int(tensors[lane]), cluster, rows)
            box = _moved_box(published, instruction.opcode)
            ranks = None if masks is None else [rank for rank in range(16) if int(masks[lane]) >> rank & 1]
            found = _targets(machine, cluster, int(at[lane]), int(barriers[lane]), box.footprint, ranks, pairs)
            corner = corners[lane].tolist()
            unit = box.unit(corner[0])
            targets = [_place(machine, first, int(at[lane]), box, unit, bar) for first, bar in found]
            read = partial(_bytes_of_box, machine, cluster, published, corner, unit, rows)
            _load(fragment, cluster, rows, targets, read, published.was_read)

    return step


def _bytes_of_box(
    machine: Machine, cluster: int, published: Published, corner: list[int], unit: int, rows: np.ndarray
) -> Loaded:
    """The bytes of a box of global memory, with zeros outside of the tensor: [units, bytes of a unit]."""
    published.under_way -= 1
    addresses, inside = _units(published, corner, unit)
    if inside.all():
        return machine.memory.copied(addresses, unit, cluster + machine.first_cluster, rows)
    values, every = np.zeros((len(addresses), unit), np.uint8), None
    values[inside], undefined = machine.memory.copied(addresses[inside], unit, cluster + machine.first_cluster, rows)
    if undefined is not None:
        every = np.zeros(values.shape, bool)
        every[inside] = undefined
    return values, every


@form(*[f"cp.async.bulk.tensor.{mode}.global.shared::cta.bulk_group"
        for mode in [*(f"{rank}d" for rank in _RANKS), "2d.tile::scatter4"]])  # fmt: skip
def _tensor_store(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    tensor, coordinates = _box(instruction.operands[0], instruction.opcode)
    source = address_reader(instruction.operands[1], 32)

    def step(fragment: Fragment) -> None:
        machine, sources = fragment.machine, source(fragment)
        tensors, corners = _numbers(fragment, [tensor])[:, 0], _numbers(fragment, coordinates)
        lanes = one_lane(fragment)
        for (lane, warp, cluster), thread in zip(lanes, fragment.running_threads(), strict=True):
            address, threads = int(sources[lane]), np.array([thread])
            _own(machine, warp, address)
            rows = machine.clocks.release(cluster, machine.local_warp(warp))
            published = machine.tensor_maps.used(int(tensors[lane]), cluster, rows)
            if published.map.gaps:
                raise Fault("stores 4-bit elements with gaps, which is not simulated")
            box, corner = _moved_box(published, instruction.opcode), corners[lane].tolist()
            first = machine.shared.index(address, cluster, box.footprint)
            place = _place(machine, first, address, box, box.unit(corner[0]))
            epoch = int(machine.bulk_groups.open(threads)[0])
            store = _Store(machine, cluster, published, corner, place, rows, machine.local_warp(warp), epoch)
            machine.bulk_groups.issue(threads, Operation(machine, fragment.instruction, cluster, store))

    return step


@dataclass(frozen=True)
class _Store:
    """An issued copy of a box to global memory. place: of the box. rows: the clocks of the warp of a cluster."""

    machine: Machine
    cluster: int
    published: Published
    corner: list[int]
    place: _Place
    rows: np.ndarray
    warp: int
    epoch: int

    def __call__(self) -> None:
        """Copy the bytes inside of the tensor."""
        machine, memory, shared = self.machine, self.machine.memory, self.machine.shared
        reads = machine.clocks.bulk_stores(self.warp)
        self.published.under_way -= 1
        place = self.place
        addresses, inside = _units(self.published, self.corner, place.size)
        cells = place.cells
        if not inside.all():
            cells = np.unique(shared.cells_of(place.units[inside], place.size))
        shared.shadow.reads_of_agent(cells, self.rows, reads, self.epoch)
        self.published.was_read(reads, self.epoch)
        if shared.undefined is not None and shared.undefined[cells].any():
            raise machine.undefined.fault("copies to global memory what nothing wrote")
        values = in_units(shared.data, place.size).take(place.units[inside])
        writer, writes = self.cluster + machine.first_cluster, machine.clocks.bulk_writes(self.warp)
        memory.copy(addresses[inside], values.view(np.uint8).reshape(-1, place.size), writer, self.rows,
                    stamp_of(writer + 1, writes, self.epoch))  # fmt: skip


@form("cp.async.bulk.commit_group")
def _bulk_commit(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)
    return lambda fragment: fragment.machine.bulk_groups.commit(fragment.running_threads())


@form("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read")
def _bulk_wait(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 1)
    left, reads = immediate(instruction.operands[0]), instruction.opcode.endswith(".read")
    return lambda fragment: fragment.machine.bulk_groups.wait(fragment.running_threads(), left, reads=reads)


def end(machine: Machine) -> None:
    """Raise Fault for bulk copies from shared memory that their threads did not wait for."""
    late = machine.bulk_groups.unfinished()
    if late is not None:
        raise Fault(f"{machine.program.name}, {late.instruction}: the program ends without a wait for the copy, which "
                    "may be reading its shared memory")  # fmt: skip
