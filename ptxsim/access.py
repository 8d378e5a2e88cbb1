"""Loads and stores of threads.

Source: PTX ISA, "Data movement and conversion instructions"; confidence high.
"""

import re

import numpy as np

from ptxsim import forms
from ptxsim.fault import Fault
from ptxsim.forms import (
    Step,
    UnknownForm,
    address_reader,
    expect,
    form,
    reader,
    registers_of,
    writer,
)
from ptxsim.fragment import Fragment
from ptxsim.global_memory import Threads
from ptxsim.parse import Instruction, Program

_WIDTHS = ("b8", "u8", "s8", "b16", "u16", "b32", "u32", "s32", "f32", "b64", "u64", "f64")
_VECTORS = ("", ".v2", ".v4")
_SPACES = ("global", "shared", "shared::cta")
_EVICTIONS = ("evict_first", "evict_last")
_HINTED = tuple(f"global.L1::{eviction}.L2::cache_hint" for eviction in _EVICTIONS)


def _opcodes(base: str, spaces: tuple[str, ...] = _SPACES) -> list[str]:
    return [f"{base}.{space}{vector}.{width}" for space in spaces for vector in _VECTORS for width in _WIDTHS]


def _shape(opcode: str) -> tuple[bool, str, int, int]:
    """(whether in shared memory, type of an element, bytes of an element, number of elements) of an opcode."""
    found = re.fullmatch(r"\w+\.(?:volatile\.)?(\S+?)(?:\.v(\d))?\.([bfsu])(\d+)", opcode)
    assert found is not None
    nbytes = int(found[4]) // 8
    return found[1].startswith("shared"), found[3] + found[4], nbytes, int(found[2] or 1)


@form("ld.param.b32", "ld.param.b64", "ld.param.s32", "ld.param.u32", "ld.param.u64", "ld.param.b8",
      "ld.param.b16", "ld.param.f32", "ld.param.f64")  # fmt: skip
def _load_parameter(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    kind = instruction.opcode.split(".")[-1]
    address, write = address_reader(instruction.operands[1], 64), writer(instruction.operands[0], kind)
    dtype = forms.constant(0, kind).dtype

    def step(fragment: Fragment) -> None:
        parameters, at = fragment.machine.parameters, np.where(fragment.running, address(fragment), 0)
        if (at % dtype.itemsize).any() or at.max() + dtype.itemsize > len(parameters):
            raise Fault(f"a parameter at {int(at.max())}, of {len(parameters)} bytes")
        write(fragment, parameters.view(dtype)[at // dtype.itemsize])

    return step


@form(*[f"createpolicy.fractional.L2::{eviction}.b64" for eviction in _EVICTIONS])
def _create_policy(instruction: Instruction, program: Program) -> Step:
    """The step that creates a cache policy, which is opaque and changes no value; the fraction is not read."""
    expect(instruction, 2)
    write = writer(instruction.operands[0], "b64")
    return lambda fragment: write(fragment, np.full(fragment.shape, _POLICY))


_POLICY = np.uint64(0xCACE)


@form(*_opcodes("ld"), *_opcodes("ld", ("global.nc", *_HINTED)), *_opcodes("ld.volatile"))
def _load(instruction: Instruction, program: Program) -> Step:
    """The step of a load. Not checked: that the own program writes memory that `.nc` loads read.

    A volatile load is a relaxed one, which may read what atomic operations of others write.
    """
    expect(instruction, 3 if "cache_hint" in instruction.opcode else 2)
    shared, kind, nbytes, count = _shape(instruction.opcode)
    relaxed = ".volatile." in instruction.opcode
    into = registers_of(instruction.operands[0])
    if len(into) != count:
        raise UnknownForm(f"{len(into)} registers, and not {count}")
    writes = [writer(each, kind) for each in into]
    address = address_reader(instruction.operands[1], 32 if shared else 64)
    dtype = forms.constant(0, kind).dtype

    def step(fragment: Fragment) -> None:
        machine, running = fragment.machine, fragment.running
        clusters = machine.cluster_of[fragment.threads]
        addresses = address(fragment)
        if not fragment.whole:
            addresses, clusters = addresses[running], clusters[running]
        if shared:
            found = machine.shared.load(addresses, nbytes * count, clusters, *_threads(fragment))
            undefined = machine.shared.undefined_at(addresses, clusters, nbytes * count)
        else:
            threads = Threads(machine.clocks, clusters, _threads(fragment)[0])
            cluster = clusters + machine.first_cluster
            found, undefined = machine.memory.load(addresses, nbytes * count, cluster, threads, relaxed)
            if undefined is not None:
                machine.undefined.found("global memory")
        values = found.view(dtype)  # [threads, count]
        for i, write in enumerate(writes):
            column = values[:, i]
            if not fragment.whole:
                column = np.zeros(fragment.shape, dtype)
                column[running] = values[:, i]
            write(fragment, column)
            if undefined is not None:
                fragment.mark_running(into[i], np.any(undefined.reshape(len(found), count, -1)[:, i], 1))

    return step


@form(*_opcodes("st", _SPACES[:1]), *_opcodes("st.volatile", _SPACES[:1]))
@form(*_opcodes("st", _SPACES[1:]), *_opcodes("st.volatile", _SPACES[1:]), moved=(1,))
def _store(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    shared, kind, nbytes, count = _shape(instruction.opcode)
    values = registers_of(instruction.operands[1])
    if len(values) != count:
        raise UnknownForm(f"{len(values)} registers, and not {count}")
    unsigned = f"u{8 * nbytes}"
    reads = [reader(each, unsigned) for each in values]
    address = address_reader(instruction.operands[0], 32 if shared else 64)

    def step(fragment: Fragment) -> None:
        machine, running = fragment.machine, fragment.running
        clusters = machine.cluster_of[fragment.threads]
        addresses = address(fragment)
        columns = np.stack([fragment.every(read(fragment)) for read in reads], 1)
        if not fragment.whole:
            addresses, clusters, columns = addresses[running], clusters[running], columns[running]
        rows = np.ascontiguousarray(columns).view(np.uint8)
        if shared:
            undefined = fragment.undefined(values)
            if undefined is not None:
                undefined = np.repeat(undefined.T[running], nbytes, axis=1)
            machine.shared.store(addresses, rows, clusters, *_threads(fragment), undefined)
        else:
            threads = Threads(machine.clocks, clusters, _threads(fragment)[0])
            machine.memory.store(addresses, rows, clusters + machine.first_cluster, threads)

    return step


def _threads(fragment: Fragment) -> tuple[np.ndarray, np.ndarray]:
    """(warps, lanes) of the running threads."""
    machine, threads = fragment.machine, fragment.threads
    if fragment.whole:
        return machine.warp_of[threads], machine.lane_of[threads]
    return machine.warp_of[threads][fragment.running], machine.lane_of[threads][fragment.running]


@form("cp.async.bulk.prefetch.L2.global")
def _prefetch(instruction: Instruction, program: Program) -> Step:
    """The step of a prefetch of a range: it only checks that the range lies in a tensor."""
    expect(instruction, 2)
    address, count = address_reader(instruction.operands[0], 64), reader(instruction.operands[1], "u32")

    def step(fragment: Fragment) -> None:
        memory, addresses = fragment.machine.memory, address(fragment)
        counts = fragment.every(count(fragment))
        for lane in fragment.lanes():
            if int(addresses[lane]) % 16 or int(counts[lane]) % 16:
                raise Fault("a prefetch that is not aligned to 16 bytes")
            memory.copied(addresses[lane] + np.arange(int(counts[lane])), 1, fragment.machine.first_cluster)

    return step


@form("prefetch.global.L2")
def _prefetch_line(instruction: Instruction, program: Program) -> Step:
    """The step of a prefetch of a line: it only checks that the address lies in a tensor."""
    expect(instruction, 1)
    address = address_reader(instruction.operands[0], 64)

    def step(fragment: Fragment) -> None:
        memory, addresses = fragment.machine.memory, address(fragment)
        for lane in fragment.lanes():
            memory.copied(addresses[lane : lane + 1], 1, fragment.machine.first_cluster)

    return step


# ---------------------------------------------------------------- local memory


@form(*[f"ld.local.{kind}" for kind in ("b32", "b64")])
def _load_local(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    kind = instruction.opcode.split(".")[-1]
    (into,) = registers_of(instruction.operands[0])
    write, address = writer(into, kind), address_reader(instruction.operands[1], 32)
    dtype = forms.constant(0, kind).dtype

    def step(fragment: Fragment) -> None:
        local, addresses = fragment.machine.local, address(fragment)[fragment.running]
        found, written = local.load(fragment.running_threads(), addresses, dtype.itemsize)
        values = np.zeros(fragment.shape, dtype)
        values[fragment.running] = found.view(dtype)[:, 0]
        write(fragment, values)
        if not written.all():
            fragment.machine.undefined.found("local memory")
            fragment.mark_running(into, ~written)

    return step


@form(*[f"st.local.{kind}" for kind in ("b32", "b64")], moved=(1,))
def _store_local(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    kind = instruction.opcode.split(".")[-1]
    (value,) = registers_of(instruction.operands[1])
    read, address = reader(value, kind), address_reader(instruction.operands[0], 32)

    def step(fragment: Fragment) -> None:
        values = np.ascontiguousarray(fragment.every(read(fragment))[fragment.running])
        rows = values.reshape(-1, 1).view(np.uint8)
        undefined, threads = fragment.undefined([value]), fragment.running_threads()
        written = np.ones(len(threads), bool) if undefined is None else ~undefined[0][fragment.running]
        fragment.machine.local.store(threads, address(fragment)[fragment.running], rows, written)

    return step
