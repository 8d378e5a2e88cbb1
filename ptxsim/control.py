"""Branches, barriers, mbarriers and fences.

Sources: PTX ISA, "Control flow instructions", "Parallel synchronization and communication instructions"; confidence
high. A warp whose threads are at different instructions executes first those that come first in `order`, until they
meet.
"""

from functools import partial

import numpy as np

from ptxsim.barriers import Mbarrier
from ptxsim.clocks import FENCED, GLOBAL, KNOWN
from ptxsim.fault import Fault
from ptxsim.fences import SCOPES
from ptxsim.forms import (
    Step,
    UnknownForm,
    address_reader,
    expect,
    form,
    immediate,
    reader,
    writer,
)  # fmt: skip
from ptxsim.fragment import LANES, Fragment
from ptxsim.machine import Machine
from ptxsim.parse import Instruction, Label, Program, Register
from ptxsim.state import DONE

# The instructions that a fragment executes even if no thread's predicate holds.
BRANCHES = frozenset({"bra", "bra.uni", "brx.idx", "ret", "exit"})


def _nobody(fragment: Fragment) -> Fragment:
    return Fragment(fragment.machine, fragment.warps[:0], fragment.active[:0])


def _label(instruction: Instruction, index: int) -> str:
    operand = instruction.operands[index]
    if not isinstance(operand, Label):
        raise UnknownForm(f"not a label: {operand}")
    return operand.name


@form("bra", "bra.uni")
def _bra(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 1)
    target = program.labels[_label(instruction, 0)]

    def step(fragment: Fragment) -> Fragment:
        fragment.jump(fragment.running, target)
        fragment.jump(fragment.active & ~fragment.running, fragment.at + 1)
        return _nobody(fragment)

    return step


@form("brx.idx")
def _brx(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    table = program.tables[_label(instruction, 1)]
    targets = [program.labels[name] for name in table]
    index = reader(instruction.operands[0], "u32")

    def step(fragment: Fragment) -> Fragment:
        chosen = fragment.every(index(fragment))
        if (chosen[fragment.running] >= len(targets)).any():
            raise Fault(f"an index beyond the {len(targets)} labels of the table")
        for i, target in enumerate(targets):
            fragment.jump(fragment.running & (chosen == i), target)
        fragment.jump(fragment.active & ~fragment.running, fragment.at + 1)
        return _nobody(fragment)

    return step


@form("ret", "exit")
def _ret(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)

    def step(fragment: Fragment) -> Fragment:
        fragment.jump(fragment.running, DONE)
        fragment.jump(fragment.active & ~fragment.running, fragment.at + 1)
        return _nobody(fragment)

    return step


@form("setmaxnreg.inc.sync.aligned.u32", "setmaxnreg.dec.sync.aligned.u32")
def _registers(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 1)
    count = immediate(instruction.operands[0])
    if count % 8 or not 24 <= count <= 256:
        raise UnknownForm(f"{count} registers, of a multiple of 8 from 24 to 256")
    grows = ".inc." in instruction.opcode

    def step(fragment: Fragment) -> Fragment | None:
        machine, pools = fragment.machine, fragment.machine.register_pools
        which = fragment.whole_warps()
        if not program.registers:
            return None
        fragment.jump(fragment.active, fragment.at + 1)
        for warp in fragment.warps[which].tolist():
            has = int(pools.of_thread[warp])
            if has > count if grows else has < count:
                raise Fault(f"sets {count} registers a thread, and the warp has {has}")
            if not pools.set(warp, count):
                machine.block(warp, partial(pools.set, warp, count))
        return _nobody(fragment)

    return step


@form("griddepcontrol.wait", "griddepcontrol.launch_dependents")
def _dependent_launch(instruction: Instruction, program: Program) -> Step:
    """The step of dependent launches, without effect: launches are executed in order here."""
    expect(instruction, 0)
    return lambda fragment: None


# ---------------------------------------------------------------- barriers of a program and of a cluster


def _arrive(fragment: Fragment, name: int, threads: int) -> Fragment:
    """Let all warps of a fragment arrive at a barrier, and move them to the next instruction."""
    machine = fragment.machine
    fragment.jump(fragment.active, fragment.at + 1)
    ended = machine.pc[fragment.threads] == DONE
    if not (fragment.running | ended).all():
        raise Fault(f"barrier {name} reached by part of a warp")
    machine.barriers.arrive(fragment.warps, name, threads)
    return _nobody(fragment)


@form("bar.sync", "barrier.sync", "barrier.sync.aligned")
def _bar(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 1, 2)
    name = immediate(instruction.operands[0])
    threads = immediate(instruction.operands[1]) if len(instruction.operands) > 1 else program.threads
    if name > 15 or threads % LANES:
        raise UnknownForm(f"barrier {name} of {threads} threads")
    return lambda fragment: _arrive(fragment, name, threads)


@form("bar.red.or.pred", "bar.red.and.pred")
def _bar_reduce(instruction: Instruction, program: Program) -> Step:
    """The step of a barrier with a reduction: the last warp that arrives writes the result for all warps."""
    expect(instruction, 3)
    write, name = writer(instruction.operands[0], "pred"), immediate(instruction.operands[1])
    read = reader(instruction.operands[2], "pred")
    into = instruction.operands[0]
    assert isinstance(into, Register)
    every = instruction.opcode == "bar.red.and.pred"

    def step(fragment: Fragment) -> Fragment:
        machine = fragment.machine
        write(fragment, read(fragment))
        register = machine.registers[into.name].reshape(-1, machine.program.threads)
        left = _arrive(fragment, name, machine.program.threads)
        for program_index in {machine.program_of(int(warp)) for warp in fragment.warps}:
            if (program_index, name) not in machine.barriers.arrived:  # the last warp has arrived
                values = register[program_index]
                values[:] = values.all() if every else values.any()
        return left

    return step


@form(*[f"barrier.cluster.arrive{order}{aligned}" for order in ("", ".release", ".relaxed")
        for aligned in ("", ".aligned")])  # fmt: skip
def _cluster_arrive(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)
    relaxed = ".relaxed" in instruction.opcode

    def step(fragment: Fragment) -> None:
        machine = fragment.machine
        for warp in map(int, fragment.warps):
            cluster, local = machine.cluster_of_warp(warp), machine.local_warp(warp)
            passed_on = machine.fences.released(cluster, local, SCOPES["cluster"]) if relaxed else None
            machine.cluster_tickets[warp] = machine.cluster_barrier.arrive(cluster, warp, passed_on)

    return step


@form("barrier.cluster.wait.aligned", "barrier.cluster.wait.acquire.aligned", "barrier.cluster.wait")
def _cluster_wait(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)

    def step(fragment: Fragment) -> Fragment:
        machine, barrier = fragment.machine, fragment.machine.cluster_barrier
        fragment.jump(fragment.active, fragment.at + 1)
        for warp in map(int, fragment.warps):
            if warp not in machine.cluster_tickets:
                raise Fault("waits at the cluster's barrier without an arrival")
            cluster, phase = machine.cluster_of_warp(warp), machine.cluster_tickets.pop(warp)

            def passed(cluster: int = cluster, phase: int = phase, warp: int = warp) -> bool:
                rows = barrier.done[cluster]
                if rows is None or not barrier.passed(cluster, phase):
                    return False
                machine.clocks.acquire(cluster, machine.local_warp(warp), rows)
                machine.meet(cluster, [machine.local_warp(warp)])
                return True

            if not passed():
                machine.block(warp, passed)
        return _nobody(fragment)

    return step


# ---------------------------------------------------------------- mbarriers


def one_lane(fragment: Fragment) -> list[tuple[int, int, int]]:
    """(lane in the fragment, warp of the machine, cluster) of every running thread."""
    machine = fragment.machine
    return [(int(lane), int(warp), machine.cluster_of_warp(int(warp)))
            for lane, warp in zip(fragment.lanes(), fragment.warp_of(fragment.lanes()), strict=True)]  # fmt: skip


@form("mbarrier.init.shared::cta.b64", "mbarrier.init.shared.b64")
def _init(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    address, count = address_reader(instruction.operands[0], 32), reader(instruction.operands[1], "u32")

    def step(fragment: Fragment) -> None:
        machine = fragment.machine
        addresses, counts = address(fragment), fragment.every(count(fragment))
        for lane, warp, cluster in one_lane(fragment):
            at = machine.shared.index(int(addresses[lane]), cluster, 8)
            machine.mbarriers.create(at, int(counts[lane]), cluster, machine.local_warp(warp))

    return step


@form("mbarrier.inval.shared::cta.b64", "mbarrier.inval.shared.b64")
def _inval(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 1)
    address = address_reader(instruction.operands[0], 32)

    def step(fragment: Fragment) -> None:
        machine, addresses = fragment.machine, address(fragment)
        for lane, warp, cluster in one_lane(fragment):
            rows = machine.clocks.of(cluster, machine.local_warp(warp))
            machine.mbarriers.remove(machine.shared.index(int(addresses[lane]), cluster, 8), cluster, rows)

    return step


_ORDERS = ("", *(f".{order}.{scope}" for order in ("release", "relaxed") for scope in ("cta", "cluster")))


@form(*[f"mbarrier.arrive{expects}{order}.{space}.b64" for expects in ("", ".expect_tx") for order in _ORDERS
        for space in ("shared", "shared::cta", "shared::cluster")])  # fmt: skip
def _mbarrier_arrive(instruction: Instruction, program: Program) -> Step:
    expects, of_cluster = ".expect_tx" in instruction.opcode, ".cluster." in instruction.opcode
    relaxed = ".relaxed." in instruction.opcode
    expect(instruction, *((3,) if expects else (2, 3)))
    address = address_reader(instruction.operands[1], 32)
    number = reader(instruction.operands[2], "u32") if len(instruction.operands) > 2 else None

    def step(fragment: Fragment) -> None:
        machine, addresses = fragment.machine, address(fragment)
        numbers = np.broadcast_to(1 if number is None else number(fragment), fragment.shape)
        for lane, warp, cluster in one_lane(fragment):
            at = machine.shared.index(int(addresses[lane]), cluster, 8)
            local, remote = machine.local_warp(warp), at // machine.shared.stride != machine.program_of(warp)
            rows = machine.clocks.release(cluster, local)
            barrier, passed_on = machine.mbarriers.seen(at, rows), rows
            if remote and not of_cluster and not _is_enough(machine, "arrivals at another program's mbarrier with"):
                passed_on = np.zeros_like(rows)
            elif relaxed:
                passed_on = machine.fences.released(cluster, local, SCOPES["cluster" if remote else "cta"])
            count, expected = (1, int(numbers[lane])) if expects else (int(numbers[lane]), 0)
            machine.mbarriers.arrive(barrier, rows, local, count, expected, passed_on, remote)

    return step


def _is_enough(machine: Machine, what: str) -> bool:
    """Whether the scope `.cta` counts for the threads of another program, which is noted.

    It is that of an arrival or a wait that names none. By the PTX ISA it orders nothing for them, and Triton emits no
    other form.
    """
    if not machine.strict_scopes:
        machine.notes[f"{what} the scope of the own one"] += 1
    return not machine.strict_scopes


@form(*[f"mbarrier.try_wait.parity{order.replace('release', 'acquire')}.{space}.b64" for order in _ORDERS
        for space in ("shared", "shared::cta")])  # fmt: skip
def _try_wait(instruction: Instruction, program: Program) -> Step:
    """The step of a wait for a phase: the warp is blocked until the phase is complete.

    Under `Schedule.failing_waits` it returns false instead at every second time.
    """
    expect(instruction, 3)
    of_cluster, relaxed = ".cluster." in instruction.opcode, ".relaxed." in instruction.opcode
    write = writer(instruction.operands[0], "pred")
    address, parity = address_reader(instruction.operands[1], 32), reader(instruction.operands[2], "u32")

    def step(fragment: Fragment) -> Fragment | None:
        machine, running = fragment.machine, fragment.by_warp(fragment.running)
        lanes = np.arange(len(running)), running.argmax(1)  # the first one of each warp that runs
        addresses, phases = fragment.by_warp(address(fragment)), fragment.by_warp(parity(fragment) & 1)
        at, phase = addresses[lanes], phases[lanes]
        if (running & ((addresses != at[:, None]) | (phases != phase[:, None]))).any():
            raise Fault("the threads of a warp wait for several mbarriers or phases")
        waiting, complete, passing = np.zeros(len(running), bool), np.ones(len(running), bool), []
        for i in np.flatnonzero(running.any(1)).tolist():
            warp = int(fragment.warps[i])
            cluster, local = divmod(warp, machine.warps_of_cluster)
            where = machine.shared.index(int(at[i]), cluster, 8)
            barrier = machine.mbarriers.seen(where, machine.clocks.rows[:, cluster, local])
            machine.mbarriers.waited(barrier, cluster, local)
            if barrier.passed(int(phase[i])):
                acquire(machine, barrier, cluster, local)
                passing.append(warp)
            elif machine.failing_waits is not None and machine.failing_waits.random() < 0.5:
                complete[i] = False
            else:
                waiting[i] = True
                machine.block(warp, partial(barrier.passed, int(phase[i])))
        if passing:
            machine.meet(*np.divmod(passing, machine.warps_of_cluster))
        if waiting.any():
            fragment.jump(fragment.active & np.repeat(waiting, LANES), fragment.at)
            left = fragment.without(waiting)
            left.at = fragment.at
            left.running = fragment.running.reshape(-1, LANES)[~waiting].ravel()
            left.whole = bool(left.running.all())
            write(left, np.repeat(complete[~waiting], LANES))
            return left
        write(fragment, np.repeat(complete, LANES))
        return None

    def acquire(machine: Machine, barrier: Mbarrier, cluster: int, warp: int) -> None:
        """Let a warp of a cluster acquire what the arrivals of the completed phases released for it."""
        seen = [(SCOPES["cta"], barrier.done)]
        what = "waits for arrivals of another program's threads with"
        if barrier.is_beyond and (of_cluster or _is_enough(machine, what)):
            seen.append((SCOPES["cluster"], barrier.done_beyond))
        for scope, rows in seen:
            if relaxed:
                machine.fences.observe(cluster, warp, scope, rows)
            else:
                machine.clocks.acquire(cluster, warp, rows)

    return step


# ---------------------------------------------------------------- fences


@form("fence.proxy.async.shared::cta", "fence.proxy.async.shared::cluster", "fence.proxy.async",
      "fence.proxy.async.global")  # fmt: skip
def _fence_async(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)
    _, _, space = instruction.opcode.partition("async.")
    spaces = (GLOBAL,) if space == "global" else (FENCED,) if space else (FENCED, GLOBAL)

    def step(fragment: Fragment) -> None:
        machine, warps = fragment.machine, fragment.running_warps()
        machine.clocks.fence(*np.divmod(warps, machine.warps_of_cluster), spaces)

    return step


@form("fence.mbarrier_init.release.cluster",
      *[f"fence.{kind}.{scope}" for kind in ("acq_rel", "sc") for scope in SCOPES])  # fmt: skip
def _fence(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)
    scope = SCOPES[instruction.opcode.split(".")[-1]]

    def step(fragment: Fragment) -> None:
        machine = fragment.machine
        for each in fragment.running_warps().tolist():
            cluster, warp = divmod(each, machine.warps_of_cluster)
            rows = machine.fences.fence(cluster, warp, scope)
            if scope == SCOPES["gpu"]:
                machine.memory.fence(cluster + machine.first_cluster, warp, rows[KNOWN])

    return step


@form("mapa.shared::cluster.u32")
def _mapa(instruction: Instruction, program: Program) -> Step:
    """The step that maps an address of this program to the same offset in the program of another rank."""
    expect(instruction, 3)
    write = writer(instruction.operands[0], "u32")
    address, rank = (reader(each, "u32") for each in instruction.operands[1:])

    def step(fragment: Fragment) -> None:
        write(fragment, (address(fragment) & np.uint32(0xFFFFFF)) | rank(fragment) << np.uint32(24))

    return step
