"""Run the programs of a launch: registers, program counters, and the order in which warps and agents take turns."""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from fp4compile.check.simulate import catalogue, control, copies, forms, warpgroup
from fp4compile.check.simulate.barriers import ClusterBarrier, Mbarriers, ProgramBarriers
from fp4compile.check.simulate.clocks import AnyInt, Clocks
from fp4compile.check.simulate.fault import Fault
from fp4compile.check.simulate.fragment import LANES, Fragment
from fp4compile.check.simulate.groups import Groups
from fp4compile.check.simulate.memory import GlobalMemory
from fp4compile.check.simulate.parse import Address, Instruction, Operand, Pair, Program, Register, Vector
from fp4compile.check.simulate.shared import START, SharedMemory
from fp4compile.check.simulate.tensor_maps import TensorMaps
from fp4compile.check.simulate.tensor_memory import TensorMemory

DONE = np.iinfo(np.int32).max  # the program counter of a thread that has ended
_THREADS = 8192  # how many threads run at the same time, in whole clusters
_SHARED = 1 << 22  # and how many bytes of shared memory they have, at least one cluster's
Ready = Callable[[], bool]


@dataclass(frozen=True)
class Kernel:
    """A program and its decoded instructions."""

    program: Program
    steps: list[forms.Step]
    reads: list[frozenset[str]] = field(repr=False)  # the registers of each instruction
    granule: int  # the smallest access to shared memory, in bytes

    @classmethod
    def of(cls, program: Program) -> "Kernel":
        """Raises UnknownForm for an instruction that the simulator does not know."""
        sizes = [int(one.opcode[-2:].lstrip("bfsu")) // 8 for one in program.instructions
                 if one.opcode.startswith(("ld.shared", "st.shared"))]  # fmt: skip
        reads = [frozenset(each.name for each in _operand_registers(one)) for one in program.instructions]
        return cls(program, catalogue.decode(program), reads, min([4, *sizes]))


@dataclass(frozen=True)
class Schedule:
    """The order in which warps and asynchronous agents take turns.

    seed: of the random choices. Under seed 0, all warps that stand at the same instruction execute it together, which
    is the quickest; under other seeds sometimes only one of them does. strict_loads: whether a use of what `tcgen05.ld`
    loads is a fault before `tcgen05.wait::ld`. most: a launch that executes more warp instructions is a fault; it will
    hardly ever end.
    """

    seed: int = 0
    strict_loads: bool = False
    most: int = 10**10


LOCKSTEP = Schedule()


@dataclass
class Tally:
    """What a run took. instructions: executed by warps. opcodes: the number of executions of each.

    executed: the indices of the instructions that at least one thread executed. notes: what is no fault, but worth
    knowing, and how often it happened.
    """

    instructions: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)
    executed: set[int] = field(default_factory=set)
    notes: Counter[str] = field(default_factory=Counter)


def run(
    kernel: Kernel,
    memory: GlobalMemory,
    arguments: list[int],
    grid: int,
    shared_bytes: int,
    schedule: Schedule = LOCKSTEP,
) -> Tally:
    """Run all programs of a launch. Raises Fault where the kernel does what it must not do.

    arguments: the parameters in order, as unsigned numbers. grid: how many programs run. shared_bytes: dynamic shared
    memory of a program.
    """
    program = kernel.program
    if len(arguments) != len(program.parameters):
        raise ValueError(f"{program.name} has {len(program.parameters)} parameters, and {len(arguments)} came")
    if grid % program.cluster:
        raise ValueError(f"a grid of {grid} programs in clusters of {program.cluster}")
    nbytes = shared_bytes + sum(program.static_shared.values())
    most = max(min(_THREADS // (program.threads * program.cluster), _SHARED // (nbytes * program.cluster + 1)), 1)
    memory.begin_launch()
    tally, chosen = Tally(), random.Random(schedule.seed)
    clusters = grid // program.cluster
    for first in range(0, clusters, most):
        machine = Machine(kernel, memory, arguments, grid, nbytes, first, min(most, clusters - first), chosen,
                          schedule, tally)  # fmt: skip
        with np.errstate(all="ignore"), _one_thread():
            machine.run()
    return tally


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch multiply small matrices in this thread: others would take longer to wake."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Machine:
    """Some clusters of a launch that run at the same time.

    registers: by name, an array with an entry for each thread. pc: the index of the instruction that each thread is to
    execute next.
    """

    def __init__(
        self, kernel: Kernel, memory: GlobalMemory, arguments: list[int], grid: int, shared_bytes: int,
        first_cluster: int, clusters: int, chosen: random.Random, schedule: Schedule, tally: Tally,
    ) -> None:  # fmt: skip
        program = kernel.program
        self.kernel, self.program, self.memory = kernel, program, memory
        self.random, self.schedule, self.tally = chosen, schedule, tally
        self.clusters, self.first_cluster = clusters, first_cluster
        self.warps_of_program = program.threads // LANES
        self.warps_of_cluster = self.warps_of_program * program.cluster
        warps = clusters * self.warps_of_cluster
        threads = warps * LANES
        self.registers = self._new_registers(threads)
        self.pc = np.zeros(threads, np.int32)
        self.warp_pc = np.zeros(warps, np.int32)
        self.blocked = np.zeros(warps, bool)
        self.conditions: dict[int, Ready] = {}  # of blocked warps that nobody wakes
        self.clocks = Clocks(clusters, self.warps_of_cluster)
        self.shared = SharedMemory(clusters * program.cluster, shared_bytes, program.cluster, self.clocks,
                                   kernel.granule)  # fmt: skip
        self.mbarriers = Mbarriers(self)
        self.barriers = ProgramBarriers(self)
        self.cluster_barrier = ClusterBarrier(self)
        self.cluster_tickets: dict[int, int] = {}  # the phase of the cluster's barrier that a warp is to wait for
        self.tensor_memory = TensorMemory(self)
        self.tensor_maps = TensorMaps(self)
        self.copy_groups = Groups(self, self.clocks.copies, fences=False)
        self.bulk_groups = Groups(self, self.clocks.bulk_stores, fences=True)
        self.products = warpgroup.Products(self)
        # Of each cluster: operations in any order, and those of the tensor pipe, which are in order.
        self.copies: list[list[Callable[[], None]]] = [[] for _ in range(clusters)]
        self.tensor_pipe: list[deque[Callable[[], None]]] = [deque() for _ in range(clusters)]
        # Registers of each warp that `tcgen05.ld` writes until the warp waits for it.
        self.unready: dict[int, set[str]] = {}
        self.cluster_of = np.arange(threads) // (self.warps_of_cluster * LANES)
        self.warp_of = np.arange(threads) // LANES % self.warps_of_cluster  # within the cluster
        self._specials = self._special_registers(arguments, grid, threads)

    def _new_registers(self, threads: int) -> dict[str, np.ndarray]:
        """Registers with contents that no kernel means."""
        made: dict[str, np.ndarray] = {}
        widths = {r.name: r.bits for one in self.program.instructions for r in _operand_registers(one)}
        for name, bits in widths.items():
            dtype = forms.register_dtype(bits)
            made[name] = np.zeros(threads, bool) if bits == 1 else np.full(threads, 0xBADBADBADBADBAD % 2**bits, dtype)
        return made

    def _special_registers(self, arguments: list[int], grid: int, threads: int) -> dict[str, np.ndarray]:
        program = self.program
        thread = np.arange(threads)
        index = thread // program.threads  # of the program in the machine
        cta = self.first_cluster * program.cluster + index
        rank = index % program.cluster
        found = {
            "%tid.x": thread % program.threads, "%ctaid.x": cta, "%nctaid.x": np.full(threads, grid),
            "%ntid.x": np.full(threads, program.threads), "%laneid": thread % LANES,
            "%cluster_ctarank": rank, "%cluster_ctaid.x": rank, "%clusterid.x": cta // program.cluster,
            "%warpid": thread % program.threads // LANES,
        }  # fmt: skip
        for name in ("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z"):
            found[name] = np.zeros(threads, np.int64)
        for name in ("%nctaid.y", "%nctaid.z", "%ntid.y", "%ntid.z"):
            found[name] = np.ones(threads, np.int64)
        offset = START
        for name, nbytes in program.static_shared.items():
            found[name] = self.shared.address(rank, offset)
            offset += -(-nbytes // 16) * 16
        found["global_smem"] = self.shared.address(rank, offset)
        for (name, size), value in zip(program.parameters, arguments, strict=True):
            found[name] = np.full(threads, value % 2 ** (8 * size), np.uint64)
        return {name: values.astype(np.uint64) for name, values in found.items()}

    def special(self, name: str, fragment: Fragment) -> np.ndarray:
        """A special register, a parameter or the address of an array in shared memory, as uint64."""
        if name not in self._specials:
            raise Fault(f"the special register {name} is unknown")
        return self._specials[name][fragment.threads]

    def program_of(self, warp: AnyInt) -> AnyInt:
        """The index in the machine of a warp's program; of an array of warps, of theirs."""
        return warp // self.warps_of_program

    def local_warp(self, warp: AnyInt) -> AnyInt:
        """The index of a warp within its cluster; of an array of warps, theirs."""
        return warp % self.warps_of_cluster

    def cluster_of_warp(self, warp: int) -> int:
        """The index in the machine of a warp's cluster."""
        return warp // self.warps_of_cluster

    # ------------------------------------------------------------ waiting

    def block(self, warp: int, ready: Ready | None = None) -> None:
        """Let a warp wait until a condition holds or, without one, until `wake`."""
        self.blocked[warp] = True
        if ready is not None:
            self.conditions[warp] = ready

    def wake(self, warp: int) -> None:
        """Let a warp go on."""
        self.blocked[warp] = False
        self.conditions.pop(warp, None)

    def jump(self, fragment: Fragment, lanes: np.ndarray, index: int) -> None:
        """Set the program counter of some threads. lanes: bool, with an entry for each thread of the fragment."""
        if isinstance(fragment.threads, slice):
            self.pc[fragment.threads][lanes] = index
        else:
            self.pc[fragment.threads[lanes]] = index

    # ------------------------------------------------------------ asynchronous operations

    def later(self, fragment: Fragment, cluster: int, action: Callable[[], None]) -> Callable[[], None]:
        """Let a cluster's copy engine do something at some time, in any order; returns the entry of `copies`."""
        located = self._located(fragment, action)
        self.copies[cluster].append(located)
        return located

    def in_pipe(self, fragment: Fragment, cluster: int, action: Callable[[], None]) -> None:
        """Let a cluster's tensor pipe do something after all that it was told before."""
        self.tensor_pipe[cluster].append(self._located(fragment, action))

    def _located(self, fragment: Fragment, action: Callable[[], None]) -> Callable[[], None]:
        one = self.program.instructions[fragment.at]

        def run() -> None:
            try:
                action()
            except Fault as fault:
                raise Fault(f"{self.program.name}, {one}: {fault}") from None

        return run

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Run until all threads have ended and nothing is left to do."""
        while True:
            if self.conditions and self.mbarriers.changed:
                self.mbarriers.changed = False
                for warp in [warp for warp, ready in self.conditions.items() if ready()]:
                    self.wake(warp)
            ready = np.flatnonzero(~self.blocked & (self.warp_pc != DONE))
            agents = self._agents()
            if agents and (not len(ready) or self.random.random() < 0.3):
                self._run_agent(self.random.choice(agents))
            elif len(ready):
                self._run_warps(ready)
            elif (self.warp_pc != DONE).any():
                raise Fault(self._deadlock())
            else:
                break
        self._end()

    def _agents(self) -> list[tuple[int, bool]]:
        """(cluster, whether it is the tensor pipe) of what has something to do."""
        found = [(cluster, False) for cluster, waiting in enumerate(self.copies) if waiting]
        return found + [(cluster, True) for cluster, waiting in enumerate(self.tensor_pipe) if waiting]

    def _run_agent(self, agent: tuple[int, bool]) -> None:
        cluster, is_pipe = agent
        if is_pipe:
            self.tensor_pipe[cluster].popleft()()
        else:
            waiting = self.copies[cluster]
            waiting.pop(self.random.randrange(len(waiting)))()

    def _run_warps(self, ready: np.ndarray) -> None:
        """Run one warp, or all that stand where it stands, to the end of a basic block."""
        first = int(ready[self.random.randrange(len(ready))])
        index = int(self.warp_pc[first])
        together = ready[self.warp_pc[ready] == index]
        if self.schedule.seed:
            kind = self.random.randrange(3)
            if kind == 0:
                together = np.array([first])
            elif kind == 1:
                together = together[self.program_of(together) == self.program_of(first)]
        counters = self.pc.reshape(-1, LANES)
        self._run_block(Fragment(self, together, (counters[together] == index).ravel()), index)
        if self.tally.instructions > self.schedule.most:
            raise Fault(f"{self.program.name}: does not end within {self.schedule.most} warp instructions")
        self.warp_pc[together] = counters[together].min(1)

    def _run_block(self, fragment: Fragment, index: int) -> None:
        kernel, program, tally = self.kernel, self.program, self.tally
        while True:
            one = program.instructions[index]
            if self.unready:
                self._check_unready(fragment, index)
            if self.products.registers:
                self.products.check(fragment, one, kernel.reads[index])
            if one.guard is None:
                fragment.running, fragment.whole = fragment.active, fragment.all_active
            else:
                guard = fragment.get(one.guard.name)
                fragment.running = fragment.active & (~guard if one.guard.negated else guard)
                fragment.whole = fragment.all_active and bool(fragment.running.all())
            fragment.at = index
            tally.instructions += len(fragment.warps)
            tally.opcodes[one.opcode] += len(fragment.warps)
            runs = one.guard is None or fragment.whole or bool(fragment.running.any())
            if runs:
                tally.executed.add(index)
            if runs or one.opcode in control.BRANCHES:
                try:
                    left = kernel.steps[index](fragment)
                except Fault as fault:
                    raise Fault(f"{program.name}, {one}: {fault} (warps {self._name(fragment)})") from None
                if left is not None:
                    fragment = left
                    if not len(fragment.warps):
                        return
            index += 1
            if index in program.leaders:
                self.jump(fragment, fragment.active, index)
                return

    def _check_unready(self, fragment: Fragment, index: int) -> None:
        """Find uses of registers before the warp waited for the `tcgen05.ld` that writes them.

        The PTX ISA leaves such a value undefined. Triton puts its waits late, before the next access to memory, and
        leaves the registers to ptxas, whose code waits for them (`scoreboards.unwaited_loads`). So this is a fault for
        hand-written PTX (`Schedule.strict_loads`), and a note for Triton's.
        """
        reads = self.kernel.reads[index]
        for warp in fragment.warps:
            late = self.unready.get(int(warp), _NOTHING) & reads
            if late and self.schedule.strict_loads:
                raise Fault(f"{self.program.name}, {self.program.instructions[index]}: uses {min(late)} before "
                            "tcgen05.wait::ld")  # fmt: skip
            if late:
                self.tally.notes["uses of tcgen05.ld before its wait"] += 1

    def _name(self, fragment: Fragment) -> str:
        first = fragment.warps[: 1 if len(fragment.warps) > 8 else 8]
        names = [f"{warp % self.warps_of_program} of program {self.program_of(warp)}" for warp in map(int, first)]
        return ", ".join(names) + (", ..." if len(first) < len(fragment.warps) else "")

    def _deadlock(self) -> str:
        waiting: dict[int, list[int]] = {}
        for warp in np.flatnonzero(self.warp_pc != DONE):
            waiting.setdefault(int(self.warp_pc[warp]), []).append(int(warp))
        at = "; ".join(f"warps {warps} before {self.program.instructions[index]}" for index, warps in waiting.items())
        return f"{self.program.name}: nothing can go on: {at}"

    def _end(self) -> None:
        """Check what programs left behind."""
        for barrier in self.mbarriers.found.values():
            if barrier.tx:
                raise Fault(f"{self.program.name}: {barrier.tx} bytes never came to the mbarrier at {barrier.where}")
        self.tensor_memory.end()
        copies.end(self)
        warpgroup.end(self)


_NOTHING: frozenset[str] = frozenset()


def _operand_registers(one: Instruction) -> list[Register]:
    found: list[Register] = []
    waiting: list[Operand] = [*one.operands, *([one.guard] if one.guard else [])]
    while waiting:
        match waiting.pop():
            case Register() as register:
                found.append(register)
            case Vector(parts=parts):
                waiting += parts
            case Address(base=base, coordinates=coordinates):
                waiting += [base, *([coordinates] if coordinates else [])]
            case Pair(first=first, second=second):
                waiting += [first, second]
    return found
