"""The state that the parts of a machine share: programs, memory, registers, waiting warps, pending operations."""

from collections import Counter, deque
from collections.abc import Callable
from random import Random

import numpy as np

from ptxsim.clocks import KNOWN, AnyInt, Clocks
from ptxsim.fault import Fault
from ptxsim.global_memory import GlobalMemory
from ptxsim.local import LocalMemory
from ptxsim.parse import Instruction, Program
from ptxsim.shared import START, SharedMemory
from ptxsim.undefined import Undefined

LANES = 32
CARRY = "CC.CF"  # the register that holds the carry of extended arithmetic
PARAMETERS = 1 << 42  # the generic address of the first parameter of the kernel
DONE = np.iinfo(np.int32).max  # the program counter of a thread that has ended
Ready = Callable[[], bool]


def register_dtype(bits: int) -> np.dtype:
    """The dtype of a register's values in the register file."""
    return np.dtype(bool) if bits == 1 else np.dtype(f"u{bits // 8}")


class Registers(dict[str, np.ndarray]):
    """The register file: an array for each register, with an entry for each thread, made at the first use.

    widths: bits by name. Contents that nothing wrote are numbers that no kernel may use.
    """

    def __init__(self, widths: dict[str, int], threads: int) -> None:
        super().__init__()
        self._widths, self._threads = widths | {CARRY: 1}, threads
        self._contents: dict[int, np.ndarray] = {}  # of a register that nothing wrote, by its bits

    def __missing__(self, name: str) -> np.ndarray:
        bits = self._widths[name]
        if bits not in self._contents:  # no bit is right for a whole warp
            number = 0xBADBADBADBADBAD % 2**bits
            both = np.array([number, number ^ 2**bits - 1], register_dtype(bits))
            self._contents[bits] = np.tile(both, self._threads // 2)
        made = self[name] = self._contents[bits].copy()
        return made


class State:
    """Some clusters of a launch that run at the same time, without barriers and other parts that work on them.

    registers: by name, an array with an entry for each thread. pc: the index of the next instruction of each thread.
    parameters: the bytes of the kernel's parameters. granule: the smallest access to shared memory, in bytes.
    has_fences: whether operations on tensor memory are ordered by `tcgen05.fence`.
    """

    def __init__(
        self, program: Program, memory: GlobalMemory, arguments: list[int], grid: tuple[int, int, int],
        shared_bytes: int, granule: int, first_cluster: int, clusters: int, has_fences: bool,
    ) -> None:  # fmt: skip
        self.program, self.memory = program, memory
        self.clusters, self.first_cluster = clusters, first_cluster
        self.warps_of_program = program.threads // LANES
        self.warps_of_cluster = self.warps_of_program * program.cluster
        warps = clusters * self.warps_of_cluster
        threads = warps * LANES
        self.registers = Registers(program.widths, threads)
        self.undefined = Undefined(threads)
        self.pc = np.zeros(threads, np.int32)
        self.blocked = np.zeros(warps, bool)
        self.conditions: dict[int, Ready] = {}  # of blocked warps that `wake` does not unblock
        self.failing_waits: Random | None = None  # chooses the `try_wait` that return false
        self.strict_scopes = False  # whether arrivals of too small a scope order nothing
        self.notes: Counter[str] = Counter()
        self.changed = False  # whether a phase of a barrier, for which conditions wait, has been completed
        self.clocks = Clocks(clusters, self.warps_of_cluster, has_fences)
        programs = clusters * program.cluster
        self.shared = SharedMemory(programs, shared_bytes, program.cluster, self.clocks, granule, self.undefined)
        self.local = LocalMemory(threads, program.local)
        # For each cluster: its copies, in any order, and its operations of the tensor pipe, which are in order.
        self.copies: list[list[Callable[[], None]]] = [[] for _ in range(clusters)]
        self.tensor_pipe: list[deque[Callable[[], None]]] = [deque() for _ in range(clusters)]
        self.cluster_of = np.arange(threads) // (self.warps_of_cluster * LANES)
        self.warp_of = np.arange(threads) // LANES % self.warps_of_cluster  # within the cluster
        self.lane_of = np.arange(threads) % LANES
        self.parameters = np.zeros(sum(2 * each.nbytes for each in program.parameters), np.uint8)  # with gaps
        self.passed: dict[str, np.ndarray] = {}  # of each parameter of a call, what every thread stored there last
        self._specials = self._special_registers(arguments, grid, threads)

    def _special_registers(
        self, arguments: list[int], grid: tuple[int, int, int], threads: int
    ) -> dict[str, np.ndarray]:
        program = self.program
        thread = np.arange(threads)
        index = thread // program.threads  # of the program in the machine
        cta = self.first_cluster * program.cluster + index
        rank = index % program.cluster
        found = {
            "%tid.x": thread % program.threads, "%ctaid.x": cta % grid[0], "%ctaid.y": cta // grid[0] % grid[1],
            "%ctaid.z": cta // grid[0] // grid[1], "%ntid.x": np.full(threads, program.threads),
            "%laneid": thread % LANES, "%cluster_ctarank": rank, "%cluster_ctaid.x": rank,
            "%clusterid.x": cta % grid[0] // program.cluster, "%warpid": thread % program.threads // LANES,
        }  # fmt: skip
        for along, count in zip("xyz", grid, strict=True):
            found[f"%nctaid.{along}"] = np.full(threads, count)
            clusters = count // program.cluster if along == "x" else count  # a cluster is a row of CTAs
            found[f"%nclusterid.{along}"] = np.full(threads, clusters)
            if along != "x":
                found[f"%clusterid.{along}"] = found[f"%ctaid.{along}"]
        for name in ("%tid.y", "%tid.z"):
            found[name] = np.zeros(threads, np.int64)
        for name in ("%ntid.y", "%ntid.z"):
            found[name] = np.ones(threads, np.int64)
        offset = START
        for name, nbytes in program.static_shared.items():
            found[name] = self.shared.address(rank, offset)
            offset += -(-nbytes // 16) * 16
        found["global_smem"] = self.shared.address(rank, offset)
        constants = {name: self.memory.constant(content) for name, content in program.constants.items()}
        for name, at in (self._place_parameters(arguments) | self.local.addresses | constants).items():
            found[name] = np.full(threads, at)
        return {name: values.astype(np.uint64) for name, values in found.items()}

    def _place_parameters(self, arguments: list[int]) -> dict[str, int]:
        """The offset of each parameter, after its bytes were written to `parameters`."""
        found, at = {}, 0
        for parameter, value in zip(self.program.parameters, arguments, strict=True):
            size = parameter.nbytes
            at = -(-at // size) * size
            found[parameter.name] = at
            raw = (value % 2 ** (8 * size)).to_bytes(size, "little")
            self.parameters[at : at + size] = np.frombuffer(raw, np.uint8)
            at += size
        return found

    def special(self, name: str, threads: slice | np.ndarray) -> np.ndarray:
        """A special register, or the address of a parameter or of an array, of some threads, as uint64."""
        if name not in self._specials:
            raise Fault(f"the special register {name} is unknown")
        return self._specials[name][threads]

    def program_of(self, warp: AnyInt) -> AnyInt:
        """The index in the machine of a warp's program; of an array of warps, of theirs."""
        return warp // self.warps_of_program

    def local_warp(self, warp: AnyInt) -> AnyInt:
        """The index of a warp within its cluster; of an array of warps, theirs."""
        return warp % self.warps_of_cluster

    def cluster_of_warp(self, warp: int) -> int:
        """The index in the machine of a warp's cluster."""
        return warp // self.warps_of_cluster

    def meet(self, cluster: np.ndarray | int, warps: np.ndarray | list[int]) -> None:
        """Order the accesses of the threads of each warp, as at `bar.warp.sync`. warps: within the cluster."""
        own = self.clocks.rows[KNOWN, cluster, warps, self.clocks.copies(np.asarray(warps))]
        self.shared.lanes.meet(cluster, warps, own)

    # ------------------------------------------------------------ waiting

    def block(self, warp: int, ready: Ready | None = None) -> None:
        """Block a warp until a condition holds or, without one, until `wake`."""
        self.blocked[warp] = True
        if ready is not None:
            self.conditions[warp] = ready

    def wake(self, warp: int) -> None:
        """Unblock a warp."""
        self.blocked[warp] = False
        self.conditions.pop(warp, None)

    # ------------------------------------------------------------ asynchronous operations

    def later(self, one: Instruction, cluster: int, action: Callable[[], None]) -> Callable[[], None]:
        """Add an instruction's action to a cluster's copies, to run at some time; returns the entry of `copies`."""
        located = self._located(one, action)
        self.copies[cluster].append(located)
        return located

    def in_pipe(self, one: Instruction, cluster: int, action: Callable[[], None]) -> None:
        """Add an instruction's action to a cluster's tensor pipe, after all actions before it."""
        self.tensor_pipe[cluster].append(self._located(one, action))

    def _located(self, one: Instruction, action: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self.undefined.executing = one
            try:
                action()
            except Fault as fault:
                raise Fault(f"{self.program.name}, {one}: {fault}") from None

        return run
