"""AsyncGroups of asynchronous operations, which `commit_group` closes and for which `wait_group` waits.

Sources: PTX ISA, "async-group mechanism", `cp.async.commit_group`, `cp.async.wait_group`,
`cp.async.bulk.commit_group`, `cp.async.bulk.wait_group`; confidence high. Each thread has its own groups.
`wait_group N` waits for all groups of the executing thread but the latest N, empty ones counted.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from ptxsim.clocks import KNOWN
from ptxsim.parse import Instruction
from ptxsim.state import LANES, State

Agent = Callable[[np.ndarray], np.ndarray]  # the clock agents of warps


class Operation:
    """An asynchronous operation, which happens at some time, at the latest at a wait for it."""

    def __init__(self, machine: State, instruction: Instruction, cluster: int, action: Callable[[], None]) -> None:
        self.machine, self.instruction, self.cluster, self.action = machine, instruction, cluster, action
        self.done = False
        self._entry = self.machine.later(instruction, cluster, self._act)

    def _act(self) -> None:
        self.done = True
        self.action()

    def finish(self) -> None:
        """Execute the operation now, unless it has happened."""
        if not self.done:
            self.machine.copies[self.cluster].remove(self._entry)
            self._entry()


class AsyncGroups:
    """The groups of one kind of operation, of all threads of a machine.

    agent: the clock agent of a warp's operations; their epoch is the number of the group, from 1 on. writes: the agent
    of their writes to global memory, for which not all waits wait; None if there are none. fences: whether a wait also
    orders the operations before later accesses of the asynchronous proxy.

    A wait executes the operations that have not happened, so that it never blocks: the clocks find a missing wait at
    any time of an operation. Waits count for warps: it is not checked that a thread that waits for another thread's
    operations executes a `bar.warp.sync`.
    """

    def __init__(
        self, machine: State, agent: Agent, writes: Agent | None = None, *, fences: bool
    ) -> None:  # fmt: skip
        self.machine, self.agent, self.writes = machine, agent, writes
        self.clocks = machine.clocks.rows if fences else machine.clocks.rows[KNOWN : KNOWN + 1]
        threads = len(machine.pc)
        self.committed = np.zeros(threads, np.int32)
        self.issued = np.zeros(threads, np.int32)  # the group of a thread's latest operation; 0 for none
        self.waited = np.zeros(threads, np.int32)
        self.written = np.zeros(threads, np.int32)  # the groups whose writes were waited for
        self.operations: dict[int, deque[tuple[int, Operation]]] = {}  # of each warp: (group, operation)
        self.latest: dict[int, Operation] = {}  # of each warp

    def issue(self, threads: np.ndarray, operation: Operation) -> None:
        """Add an operation to the open groups of some threads."""
        groups = self.open(threads)
        self.issued[threads] = groups
        warps, first = np.unique(threads // LANES, return_index=True)
        for warp, group in zip(warps.tolist(), groups[first].tolist(), strict=True):
            self.operations.setdefault(warp, deque()).append((group, operation))
            self.latest[warp] = operation

    def open(self, threads: np.ndarray) -> np.ndarray:
        """The numbers of the open groups of some threads."""
        return self.committed[threads] + 1

    def commit(self, threads: np.ndarray) -> None:
        """Close the open groups of some threads."""
        self.committed[threads] += 1

    def wait(self, threads: np.ndarray, left: int, *, reads: bool = False) -> None:
        """Let some threads wait for all groups except the latest `left`. reads: whether only for their reads."""
        reached = self.committed[threads] - left
        self.waited[threads] = np.maximum(self.waited[threads], reached)
        warps = np.unique(threads // LANES)
        waited = self.waited.reshape(-1, LANES)[warps]
        for warp, latest in zip(warps.tolist(), waited.max(1).tolist(), strict=True):
            waiting = self.operations.get(warp, _NOTHING)
            while waiting and waiting[0][0] <= latest:
                waiting.popleft()[1].finish()
        self._know(warps, self.waited, self.agent)
        if self.writes is not None and not reads:
            self.written[threads] = np.maximum(self.written[threads], reached)
            self._know(warps, self.written, self.writes)

    def _know(self, warps: np.ndarray, waited: np.ndarray, agent: Agent) -> None:
        """Raise warps' clocks of an agent to the groups for which all of their threads with operations have waited."""
        issued = self.issued.reshape(-1, LANES)[warps]
        known = np.where(issued > 0, waited.reshape(-1, LANES)[warps], _EVER).min(1)[issued.any(1)]
        clusters, local = np.divmod(warps[issued.any(1)], self.machine.warps_of_cluster)
        for clocks in self.clocks:
            clocks[clusters, local, agent(local)] = np.maximum(clocks[clusters, local, agent(local)], known)

    def unfinished(self) -> Operation | None:
        """An operation for which its thread has not waited; None if there is none."""
        late = np.flatnonzero(self.issued > self.waited)
        return self.latest[int(late[0]) // LANES] if len(late) else None


_NOTHING: deque[tuple[int, Operation]] = deque()
_EVER = np.iinfo(np.int32).max
