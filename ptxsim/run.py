"""Run the programs of a launch, in an order of turns of warps and asynchronous agents."""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ptxsim import catalogue, control, copies, forms, warpgroup
from ptxsim.fault import Fault
from ptxsim.fragment import Fragment
from ptxsim.global_memory import GlobalMemory
from ptxsim.machine import Machine
from ptxsim.order import Order
from ptxsim.parse import Program, operand_registers
from ptxsim.segments import Segment, segments_of
from ptxsim.state import DONE, LANES

_THREADS = 8192  # the most threads that run at the same time, in whole clusters
_SHARED = 1 << 22  # and the most bytes of their shared memory, at least one cluster's
_STRAY = 1 / 16  # of the turns in step are any warp's or the agents': a loop of another warp may wait for them
_Pending = MutableSequence[Callable[[], None]]  # operations of an asynchronous agent


@dataclass(frozen=True)
class Kernel:
    """A program and its decoded instructions."""

    program: Program
    steps: list[forms.Step]
    reads: list[frozenset[str]] = field(repr=False)  # the registers of each instruction
    uses: list[frozenset[str]] = field(repr=False)  # those whose values must not be undefined, as of `registers_used`
    granule: int  # the smallest access to shared memory, in bytes
    order: Order | None = field(repr=False)  # of the basic blocks; None for the layout's
    segments: list[Segment | None] = field(repr=False)  # for each instruction, the compiled run that begins there

    @classmethod
    def of(cls, program: Program) -> "Kernel":
        """Decode a program. Raises UnknownForm for an instruction that the simulator does not support."""
        sizes = [int(one.opcode[-2:].lstrip("bfsu")) // 8 for one in program.instructions
                 if one.opcode.startswith(("ld.shared", "st.shared"))]  # fmt: skip
        reads = [frozenset(each.name for each in operand_registers(one)) for one in program.instructions]
        steps = catalogue.decode(program)
        uses = [forms.registers_used(*each) for each in zip(program.instructions, steps, strict=True)]
        return cls(program, steps, reads, uses, min([4, *sizes]), Order.of(program), segments_of(program, steps))


@dataclass(frozen=True)
class Schedule:
    """The order in which warps and asynchronous agents take turns.

    seed: of the random choices. With seed 0, all warps at the same instruction execute it together, those that are
    behind come first, and agents wait until all warps do, which is the fastest; with other seeds the order is random,
    and sometimes only one warp executes an instruction. strict_loads: whether the use of registers that
    `tcgen05.ld` loads is a fault before `tcgen05.wait::ld`. failing_waits: whether `mbarrier.try_wait` sometimes
    returns false before its phase is complete, as hardware may; else it waits. strict_scopes: whether an arrival of the
    scope `.cta` at an mbarrier of another program, and a wait of that scope for it, order nothing; else they do, and
    are a note. strict_fences: whether `tcgen05.fence` is needed in a kernel that has none. strict_stores: whether
    threads that store several roundings of one number to one address of shared memory are a fault; else a note. most: a
    launch that executes more warp instructions is a fault, because it probably does not end.
    """

    seed: int = 0
    strict_loads: bool = False
    failing_waits: bool = False
    strict_scopes: bool = False
    strict_fences: bool = False
    strict_stores: bool = False
    most: int = 10**10


LOCKSTEP = Schedule()


@dataclass
class Tally:
    """The counts of a run. instructions: executed by warps. opcodes: the number of executions of each.

    executed: the indices of the instructions that at least one thread executed. notes: remarks that are no faults, and
    the number of times that each occurred.
    """

    instructions: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)
    executed: set[int] = field(default_factory=set)
    notes: Counter[str] = field(default_factory=Counter)


def run(
    kernel: Kernel,
    memory: GlobalMemory,
    arguments: list[int],
    grid: int | tuple[int, int, int],
    shared_bytes: int,
    schedule: Schedule = LOCKSTEP,
) -> Tally:
    """Run all programs of a launch. Raises Fault for a defect of the kernel.

    arguments: the parameters in order, as unsigned numbers. grid: the number of programs, or their numbers in x, y and
    z. shared_bytes: dynamic shared memory of a program.
    """
    program = kernel.program
    shape = (grid, 1, 1) if isinstance(grid, int) else grid
    if len(arguments) != len(program.parameters):
        raise ValueError(f"{program.name} has {len(program.parameters)} parameters, and {len(arguments)} came")
    if shape[0] % program.cluster:
        raise ValueError(f"a grid of {shape[0]} programs in clusters of {program.cluster}")
    nbytes = shared_bytes + sum(program.static_shared.values())
    most = max(min(_THREADS // (program.threads * program.cluster), _SHARED // (nbytes * program.cluster + 1)), 1)
    memory.begin_launch()
    tally, chosen = Tally(), random.Random(schedule.seed)
    clusters = math.prod(shape) // program.cluster
    for first in range(0, clusters, most):
        machine = Machine(program, memory, arguments, shape, nbytes, kernel.granule, first, min(most, clusters - first),
                          schedule.strict_fences or program.has_tensor_fences)  # fmt: skip
        machine.failing_waits = chosen if schedule.failing_waits else None
        machine.strict_scopes, machine.shared.strict = schedule.strict_scopes, schedule.strict_stores
        machine.notes = machine.shared.notes = tally.notes
        with np.errstate(all="ignore"), _one_thread(), _disable_current_modes():
            _Turns(machine, kernel, schedule, chosen, tally).run()
    return tally


@contextmanager
def _one_thread() -> Iterator[None]:
    """A context in which torch multiplies in this thread only: for small matrices, waking others takes longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Turns:
    """The turns that the warps and the asynchronous agents of a machine take.

    warp_pc: of the program counters of each warp's threads, the first one in the order of blocks, where the warp
    continues.
    """

    def __init__(
        self, machine: Machine, kernel: Kernel, schedule: Schedule, chosen: random.Random, tally: Tally
    ) -> None:  # fmt: skip
        self.machine, self.kernel, self.program = machine, kernel, kernel.program
        self.schedule, self.random, self.tally = schedule, chosen, tally
        self.warp_pc = np.zeros(len(machine.blocked), np.int32)
        self.counts: dict[tuple[int, int], int] = {}  # executions by warps of instructions from one to another

    def run(self) -> None:
        """Run until all threads have ended and no asynchronous operations are left, and count."""
        machine = self.machine
        while True:
            if machine.conditions and machine.changed:
                machine.changed = False
                for warp in [warp for warp, ready in machine.conditions.items() if ready()]:
                    machine.wake(warp)
            ready = np.flatnonzero(~machine.blocked & (self.warp_pc != DONE))
            pending = [each for each in (*machine.copies, *machine.tensor_pipe) if each]
            if pending and (not len(ready) or self.random.random() < (0.3 if self.schedule.seed else _STRAY)):
                self._run_agents(pending)
            elif len(ready):
                self._run_warps(ready)
            elif (self.warp_pc != DONE).any():
                raise Fault(self._deadlock())
            else:
                break
        self._end()
        for (first, end), count in self.counts.items():
            for one in self.program.instructions[first:end]:
                self.tally.opcodes[one.opcode] += count

    def _run_agents(self, pending: list[_Pending]) -> None:
        """Run one pending operation; under seed 0 all, so that warps of several programs that wait go on together."""
        for operations in [self.random.choice(pending)] if self.schedule.seed else pending:
            for _ in range(1 if self.schedule.seed else len(operations)):
                self._run_operation(operations)

    def _run_operation(self, operations: _Pending) -> None:
        """Run an operation of a cluster's copies, which are in any order, or of its tensor pipe."""
        if isinstance(operations, deque):
            operations.popleft()()
        else:
            operations.pop(self.random.randrange(len(operations)))()

    def _run_warps(self, ready: np.ndarray) -> None:
        """Run one warp, or all at the same instruction, to the end of a basic block."""
        first = self._chosen(ready)
        index = int(self.warp_pc[first])
        together = ready[self.warp_pc[ready] == index]
        if self.schedule.seed:
            kind = self.random.randrange(3)
            if kind == 0:
                together = np.array([first])
            elif kind == 1:
                together = together[self.machine.program_of(together) == self.machine.program_of(first)]
        counters = self.machine.pc.reshape(-1, LANES)
        self._run_block(Fragment(self.machine, together, (counters[together] == index).ravel()), index)
        if self.tally.instructions > self.schedule.most:
            raise Fault(f"{self.program.name}: does not end within {self.schedule.most} warp instructions")
        left = counters[together]
        self.warp_pc[together] = left.min(1) if self.kernel.order is None else self.kernel.order.first(left)

    def _chosen(self, ready: np.ndarray) -> int:
        """A warp that continues: under seed 0 mostly the first one in the order of blocks, so that others catch up."""
        if self.schedule.seed or self.random.random() < _STRAY:
            return int(ready[self.random.randrange(len(ready))])
        counters = self.warp_pc[ready]
        return int(ready[np.argmin(counters if self.kernel.order is None else self.kernel.order.places[counters])])

    def _run_block(self, fragment: Fragment, index: int) -> None:
        leaders, segments = self.program.leaders, self.kernel.segments
        while True:
            segment = segments[index]
            if segment is not None and self._is_free(segment, fragment):
                fragment.running, fragment.whole = fragment.active, fragment.all_active
                segment.run(fragment, self.tally.executed)
                self._count(index, segment.end, len(fragment.warps))
                index = segment.end
            else:
                self._count(index, index + 1, len(fragment.warps))
                left = self._run_step(fragment, index)
                if left is not None:
                    fragment = left
                    if not len(fragment.warps):
                        return
                index += 1
            if index in leaders:
                fragment.jump(fragment.active, index)
                return

    def _count(self, first: int, end: int, warps: int) -> None:
        self.counts[first, end] = self.counts.get((first, end), 0) + warps
        self.tally.instructions += warps * (end - first)

    def _is_free(self, segment: Segment, fragment: Fragment) -> bool:
        """Whether a run may be executed as one: it has been before, and no operation under way has its registers."""
        segment.executions += 1
        machine = self.machine
        if not segment.is_worthwhile or machine.unready or not machine.undefined.keys().isdisjoint(segment.names):
            return False
        return not machine.products.used_by(fragment.warps, segment.names)

    def _run_step(self, fragment: Fragment, index: int) -> Fragment | None:
        """Execute an instruction; returns what its step does."""
        machine, kernel, program = self.machine, self.kernel, self.program
        one = program.instructions[index]
        if machine.unready:
            self._check_unready(fragment, index)
        if machine.products.registers:
            machine.products.check(fragment.warps, one, kernel.reads[index])
        fragment.at = index
        fragment.running, fragment.whole = fragment.active, fragment.all_active
        machine.undefined.executing = one
        try:
            if one.guard is not None:
                if machine.undefined:
                    fragment.check_defined([one.guard.name])
                guard = fragment.get(one.guard.name)
                fragment.running = fragment.active & (~guard if one.guard.negated else guard)
                fragment.whole = fragment.all_active and bool(fragment.running.all())
                if not fragment.whole and not fragment.running.any():
                    return kernel.steps[index](fragment) if one.opcode in control.BRANCHES else None
            self.tally.executed.add(index)
            if machine.undefined:
                fragment.check_defined(kernel.uses[index])
            return kernel.steps[index](fragment)
        except Fault as fault:
            raise Fault(f"{program.name}, {one}: {fault} (warps {self._name(fragment)})") from None

    def _check_unready(self, fragment: Fragment, index: int) -> None:
        """Find uses of registers before the warp waited for the `tcgen05.ld` that writes them.

        The PTX ISA leaves such a value undefined. Triton puts its waits late, before the next access to memory, and
        leaves the registers to ptxas, whose code waits for them (`sass.hazards`). So this is a fault for
        hand-written PTX (`Schedule.strict_loads`), and a note for Triton's.
        """
        reads = self.kernel.reads[index]
        for warp in fragment.warps:
            late = self.machine.unready.get(int(warp), _NOTHING) & reads
            if late and self.schedule.strict_loads:
                raise Fault(f"{self.program.name}, {self.program.instructions[index]}: uses {min(late)} before "
                            "tcgen05.wait::ld")  # fmt: skip
            if late:
                self.tally.notes["uses of tcgen05.ld before its wait"] += 1

    def _name(self, fragment: Fragment) -> str:
        machine, first = self.machine, fragment.warps[: 1 if len(fragment.warps) > 8 else 8]
        names = [f"{warp % machine.warps_of_program} of program {machine.program_of(warp)}" for warp in map(int, first)]
        return ", ".join(names) + (", ..." if len(first) < len(fragment.warps) else "")

    def _deadlock(self) -> str:
        waiting: dict[int, list[int]] = {}
        for warp in np.flatnonzero(self.warp_pc != DONE):
            waiting.setdefault(int(self.warp_pc[warp]), []).append(int(warp))
        at = "; ".join(f"warps {warps} before {self.program.instructions[index]}" for index, warps in waiting.items())
        return f"{self.program.name}: nothing can go on: {at}"

    def _end(self) -> None:
        """Raise Fault for bytes missing at mbarriers, tensor memory not freed, and copies and products not awaited."""
        machine = self.machine
        for barrier in machine.mbarriers.found.values():
            if barrier.tx:
                raise Fault(f"{self.program.name}: {barrier.tx} bytes never came to the mbarrier at {barrier.where}")
        machine.tensor_memory.end()
        if machine.tensor_memory.is_used and not machine.clocks.has_fences:
            machine.notes["uses of tensor memory in a kernel without tcgen05.fence"] += 1
        copies.end(machine)
        warpgroup.end(machine)


_NOTHING: frozenset[str] = frozenset()
