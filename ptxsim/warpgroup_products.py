"""The pending products of warpgroups: the registers that they use, and the waits for them.

Sources: those of `warpgroup`, which simulates `wgmma`.
"""

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from ptxsim.clocks import FENCED, KNOWN
from ptxsim.fault import Fault
from ptxsim.parse import Instruction
from ptxsim.state import State

OPCODE = "wgmma.mma_async"
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Touched:
    """The registers of a product. sums: of the result, in order. operands: of A."""

    sums: tuple[str, ...]
    operands: frozenset[str]

    @property
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
        self._count: Counter[Touched] = Counter()

    def issue(self, warps: np.ndarray, touched: Touched) -> None:
        """Record that some warps issue a product."""
        for warp, group in zip(warps.tolist(), (self.committed[warps] + 1).tolist(), strict=True):
            waiting = self.under_way.setdefault(warp, deque())
            for _, other in waiting:
                if other is not touched and not touched.follows(other):
                    raise Fault("registers of a product under way, without wgmma.wait_group")
            waiting.append((group, touched))
        self._count[touched] += len(warps)
        self.registers |= touched.every

    def wait(self, warps: np.ndarray, left: int) -> None:
        """Let some warps wait for all groups except the latest `left`."""
        machine, waited = self.machine, self.committed[warps] - left
        for warp, group in zip(warps.tolist(), waited.tolist(), strict=True):
            waiting = self.under_way.get(warp)
            while waiting and waiting[0][0] <= group:
                self._count[waiting.popleft()[1]] -= 1
        self._count = +self._count
        self.registers = _NONE.union(*(touched.every for touched in self._count))
        clusters, local = np.divmod(warps, machine.warps_of_cluster)
        agents = machine.clocks.products(local)
        for row in (KNOWN, FENCED):
            clocks = machine.clocks.rows[row]
            clocks[clusters, local, agents] = np.maximum(clocks[clusters, local, agents], waited)

    def check(self, warps: np.ndarray, instruction: Instruction, names: frozenset[str]) -> None:
        """Raise Fault if an instruction of some warps, other than a product, has registers of a pending product."""
        if self.registers.isdisjoint(names) or instruction.opcode.startswith(OPCODE):
            return
        for warp in warps.tolist():
            for _, touched in self.under_way.get(warp, ()):
                if not touched.every.isdisjoint(names):
                    raise Fault(f"{self.machine.program.name}, {instruction}: uses {min(touched.every & names)} before "
                                "wgmma.wait_group")  # fmt: skip
