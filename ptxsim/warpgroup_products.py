"""The pending products of warpgroups: the registers that they use, and the waits for them.

Sources: those of `warpgroup`, which simulates `wgmma`.
"""

from collections import Counter, deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ptxsim.fault import Fault
from ptxsim.parse import Instruction
from ptxsim.state import LANES, State
from ptxsim.sums import registers_of_sums, sums_of

OPCODE = "wgmma.mma_async"
Places = tuple[np.ndarray, np.ndarray]  # units of 16 bytes of shared memory, and cells [parts, n] of parts of them
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Touched:
    """The registers of a product. sums: of the result, in order. operands: of A."""

    sums: tuple[str, ...]
    operands: frozenset[str]

    @cached_property
    def every(self) -> frozenset[str]:
        return self.operands.union(self.sums)

    def follows(self, other: "Touched") -> bool:
        """Whether this product may be issued while another one is pending."""
        if self.operands & set(other.sums) or other.operands & set(self.sums):
            return False
        return self.sums == other.sums or not set(self.sums) & set(other.sums)


class Products:
    """The pending products of all warps of a machine.

    committed: the groups that each warp has committed; a product's epoch is the number of its group, from 1 on.
    registers: of all pending products.
    """

    def __init__(self, machine: State) -> None:
        self.machine = machine
        self.committed = np.zeros(len(machine.blocked), np.int32)
        self.under_way: dict[int, deque[tuple[int, Touched]]] = {}  # of each warp: (group, registers)
        self.registers: frozenset[str] = frozenset()
        self.places: dict[tuple[int, int, tuple[int, ...], int], Places] = {}  # by program, descriptor and rows
        # Of the latest product of some registers: its warps, and their sums float32 [warps, 16, n]. No instruction may
        # use the registers before a wait, which writes them.
        self._unwritten: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}
        self._count: Counter[Touched] = Counter()

    def sums(self, warps: np.ndarray, touched: Touched) -> np.ndarray:
        """The present sums of some warps in a product's registers, float32 [warps, 16, n]."""
        latest = self._unwritten.get(touched.sums)
        if latest is not None and np.array_equal(latest[0], warps):
            return latest[1]
        self._write()
        registers = [self.machine.registers[name].reshape(-1, LANES)[warps] for name in touched.sums]
        return sums_of(np.stack(registers))

    def _write(self) -> None:
        """Write the sums of products to their registers."""
        for names, (warps, sums) in self._unwritten.items():
            rows = registers_of_sums(sums).view(np.uint32).reshape(len(names), -1, LANES)
            for name, row in zip(names, rows, strict=True):
                self.machine.registers[name].reshape(-1, LANES)[warps] = row
        self._unwritten.clear()

    def issue(self, warps: np.ndarray, touched: Touched, sums: np.ndarray) -> None:
        """Record that some warps issue a product. sums: its results, as of `sums`."""
        for warp, group in zip(warps.tolist(), (self.committed[warps] + 1).tolist(), strict=True):
            waiting = self.under_way.setdefault(warp, deque())
            for _, other in waiting:
                if other is not touched and not touched.follows(other):
                    raise Fault("registers of a product under way, without wgmma.wait_group")
            waiting.append((group, touched))
        if touched.sums in self._unwritten and not np.array_equal(self._unwritten[touched.sums][0], warps):
            self._write()
        self._unwritten[touched.sums] = warps, sums
        self._count[touched] += len(warps)
        self.registers |= touched.every

    def wait(self, warps: np.ndarray, left: int) -> None:
        """Let some warps wait for all groups except the latest `left`."""
        self._write()
        machine, waited = self.machine, self.committed[warps] - left
        for warp, group in zip(warps.tolist(), waited.tolist(), strict=True):
            waiting = self.under_way.get(warp)
            while waiting and waiting[0][0] <= group:
                self._count[waiting.popleft()[1]] -= 1
        self._count = +self._count
        self.registers = _NONE.union(*(touched.every for touched in self._count))
        clusters, local = np.divmod(warps, machine.warps_of_cluster)
        agents = machine.clocks.products(local)
        for clocks in machine.clocks.rows:
            clocks[clusters, local, agents] = np.maximum(clocks[clusters, local, agents], waited)

    def used_by(self, warps: np.ndarray, names: frozenset[str]) -> str:
        """A register of a pending product of some warps that is among `names`; empty if there is none."""
        if not self.registers.isdisjoint(names):
            for warp in warps.tolist():
                for _, touched in self.under_way.get(warp, ()):
                    if not touched.every.isdisjoint(names):
                        return min(touched.every & names)
        return ""

    def check(self, warps: np.ndarray, instruction: Instruction, names: frozenset[str]) -> None:
        """Raise Fault if an instruction of some warps, other than a product, has registers of a pending product."""
        used = "" if instruction.opcode.startswith(OPCODE) else self.used_by(warps, names)
        if used:
            raise Fault(f"{self.machine.program.name}, {instruction}: uses {used} before wgmma.wait_group")
