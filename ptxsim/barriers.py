"""mbarriers, the barriers of a program's warps, and of a cluster.

Sources: PTX ISA, "mbarrier" and "barrier"; confidence high.
"""

from dataclasses import dataclass, field

import numpy as np

from ptxsim.clocks import KNOWN
from ptxsim.fault import Fault
from ptxsim.state import State

_NBYTES = 8
_OPAQUE = 0xBD  # contents of a barrier's bytes, which no kernel may use


@dataclass
class Mbarrier:
    """An mbarrier object. count: arrivals of a phase; pending: missing arrivals; tx: missing bytes.

    agent: the clock agent of the copies that complete here. before: the agent's last epoch before this mbarrier.
    copied: the epoch of the latest copy. rows: the clocks of the own program's threads, copies and commits that have
    arrived. beyond: the clocks of other programs' threads that have arrived. done, done_beyond: both clocks at the end
    of the last completed phase. is_beyond: whether `done_beyond` holds what `done` does not. created: (warp, epoch) of
    the initialisation. used: the last epoch of each clock agent that arrived or waited. commits: the number of
    `tcgen05.commit` that will still arrive.
    """

    where: str
    count: int
    agent: int
    before: int
    rows: np.ndarray
    created: tuple[int, int]
    phase: int = 0
    pending: int = field(init=False)
    tx: int = 0
    copied: int = 0
    commits: int = 0
    used: dict[int, int] = field(default_factory=dict)
    beyond: np.ndarray = field(init=False)
    done: np.ndarray = field(init=False)
    done_beyond: np.ndarray = field(init=False)
    is_beyond: bool = False

    def __post_init__(self) -> None:
        self.pending = self.count
        self.beyond, self.done, self.done_beyond = (self.rows.copy() for _ in range(3))

    def copy(self) -> int:
        """The epoch of a copy that will complete in the present phase."""
        self.copied = self.before + self.phase + 1
        return self.copied

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is complete, as `try_wait.parity` returns it."""
        return (self.phase & 1) != parity


class Mbarriers:
    """The mbarriers of all programs, by index into shared memory."""

    def __init__(self, machine: State) -> None:
        self.machine = machine
        self.found: dict[int, Mbarrier] = {}

    def create(self, at: int, count: int, cluster: int, warp: int) -> None:
        """Initialise an mbarrier at an index into shared memory."""
        if at % _NBYTES:
            raise Fault(f"an mbarrier at an address that is no multiple of {_NBYTES}")
        if at in self.found:
            raise Fault("initialises an mbarrier that is in use")
        if count < 1:
            raise Fault(f"an mbarrier of {count} arrivals")
        clocks = self.machine.clocks
        rows = np.zeros_like(clocks.of(cluster, warp))
        created = (warp, int(clocks.rows[KNOWN, cluster, warp, warp]))
        self.machine.shared.shadow.begin_mbarrier(self._cells(at), cluster, warp)
        self.machine.shared.define(self._cells(at), None)
        self.machine.shared.data[at : at + _NBYTES] = _OPAQUE
        self.found[at] = Mbarrier(f"{at % self.machine.shared.stride}", count, *clocks.new_barrier(cluster), rows,
                                  created)  # fmt: skip

    def remove(self, at: int, cluster: int, rows: np.ndarray) -> None:
        """Invalidate an mbarrier. rows: the clocks of the invalidating warp, which must contain the end of all uses."""
        barrier = self.seen(at, rows)
        if barrier.tx:
            raise Fault(f"the mbarrier at {barrier.where} ends with {barrier.tx} bytes missing")
        if barrier.commits or any(rows[KNOWN][agent] < epoch for agent, epoch in barrier.used.items()):
            raise Fault(f"the mbarrier at {barrier.where} ends while something may arrive or wait there")
        self.machine.shared.shadow.end_mbarrier(self._cells(at))
        del self.found[at]
        if rows[KNOWN][barrier.agent] >= barrier.copied:
            self.machine.clocks.end_barrier(cluster, barrier.agent, max(barrier.before, barrier.copied))

    def _cells(self, at: int) -> np.ndarray:
        return self.machine.shared.cells(at + np.arange(_NBYTES))

    def waited(self, barrier: Mbarrier, cluster: int, warp: int) -> None:
        """Record that a warp waits at an mbarrier, or has found a phase complete."""
        barrier.used[warp] = int(self.machine.clocks.rows[KNOWN, cluster, warp, warp])

    def will_commit(self, at: int) -> None:
        """Record that a `tcgen05.commit` was issued that will arrive at an mbarrier."""
        self._at(at).commits += 1

    def committed(self, at: int, rows: np.ndarray, agent: int, epoch: int) -> None:
        """Let the tensor pipe's `tcgen05.commit` of an epoch arrive; rows: the clocks with all operations before it."""
        barrier = self.seen(at, rows)
        barrier.commits -= 1
        rows = rows.copy()
        rows[:, agent] = epoch
        self.arrive(barrier, rows, agent)

    def seen(self, at: int, rows: np.ndarray) -> Mbarrier:
        """The mbarrier at an index, for an access with these clocks."""
        barrier = self._at(at)
        warp, epoch = barrier.created
        if rows[KNOWN, warp] < epoch:
            raise Fault(f"uses the mbarrier at {barrier.where} without a wait for its initialisation")
        return barrier

    def _at(self, at: int) -> Mbarrier:
        if at not in self.found:
            raise Fault(f"there is no mbarrier at {at % self.machine.shared.stride}")
        return self.found[at]

    def arrive(
        self, barrier: Mbarrier, rows: np.ndarray, agent: int, count: int = 1, expected: int = 0,
        passed_on: np.ndarray | None = None, remote: bool = False,
    ) -> None:  # fmt: skip
        """Add arrivals of an agent with its clocks to this phase, and `expected` bytes to the missing ones.

        passed_on: the clocks for those who wait; None for `rows`. remote: whether another program's thread arrives.
        """
        barrier.used[agent] = int(rows[KNOWN][agent])
        into = barrier.beyond if remote else barrier.rows
        np.maximum(into, rows if passed_on is None else passed_on, out=into)
        barrier.pending -= count
        barrier.tx += expected
        if barrier.pending < 0:
            raise Fault(f"more arrivals at the mbarrier at {barrier.where} than its {barrier.count}")
        self._complete(barrier)

    def bytes_arrived(self, at: int, nbytes: int, rows: np.ndarray) -> None:
        """Count the written bytes of a copy that completes on an mbarrier."""
        barrier = self._at(at)
        np.maximum(barrier.rows, rows, out=barrier.rows)
        barrier.tx -= nbytes
        self._complete(barrier)

    def _complete(self, barrier: Mbarrier) -> None:
        if barrier.pending == 0 and barrier.tx == 0:
            barrier.phase += 1
            barrier.pending = barrier.count
            barrier.done, barrier.done_beyond = barrier.rows.copy(), barrier.beyond.copy()
            barrier.is_beyond = bool((barrier.beyond > barrier.rows).any())
            self.machine.changed = True


class ProgramBarriers:
    """The barriers of `bar.sync` and similar instructions: for each program and name, the warps that have arrived."""

    def __init__(self, machine: State) -> None:
        self.machine = machine
        self.arrived: dict[tuple[int, int], list[int]] = {}

    def arrive(self, warps: np.ndarray, name: int, threads: int) -> None:
        """Let warps of the machine arrive, each of which waits for the others of its program.

        threads: the number of threads for which the barrier waits.
        """
        machine, complete = self.machine, []
        machine.blocked[warps] = True
        for warp, program in zip(warps.tolist(), machine.program_of(warps).tolist(), strict=True):
            waiting = self.arrived.setdefault((program, name), [])
            if warp in waiting:
                raise Fault(f"a warp arrives twice at barrier {name}")
            waiting.append(warp)
            if 32 * len(waiting) >= threads:
                complete.append(self.arrived.pop((program, name)))
        for count in {len(each) for each in complete}:
            met = np.array([each for each in complete if len(each) == count])
            clusters, local = np.divmod(met, machine.warps_of_cluster)
            machine.clocks.meet(clusters[:, 0], local)
            machine.meet(clusters, local)
            machine.blocked[met] = False


class ClusterBarrier:
    """`barrier.cluster`: the warps of each cluster that have arrived in the current phase."""

    def __init__(self, machine: State) -> None:
        self.machine = machine
        clusters = machine.clusters
        self.phase = [0] * clusters
        self.arrived: list[set[int]] = [set() for _ in range(clusters)]
        self.rows: list[np.ndarray | None] = [None] * clusters
        self.done: list[np.ndarray | None] = [None] * clusters

    def arrive(self, cluster: int, warp: int, passed_on: np.ndarray | None) -> int:
        """Let a warp arrive; returns the phase for which it waits. passed_on: clocks for the others, or its own."""
        machine, phase = self.machine, self.phase[cluster]
        if warp in self.arrived[cluster]:
            raise Fault("a warp arrives twice at the cluster's barrier")
        rows = machine.clocks.release(cluster, machine.local_warp(warp)) if passed_on is None else passed_on
        before = self.rows[cluster]
        self.rows[cluster] = rows if before is None else np.maximum(before, rows)
        self.arrived[cluster].add(warp)
        if len(self.arrived[cluster]) == machine.warps_of_cluster:
            self.phase[cluster] += 1
            self.arrived[cluster] = set()
            self.done[cluster] = self.rows[cluster]
            machine.changed = True
        return phase

    def passed(self, cluster: int, phase: int) -> bool:
        """Whether a phase is complete."""
        return self.phase[cluster] > phase


class RegisterPools:
    """The registers that `setmaxnreg` moves between the warps of a program, by way of the program's pool.

    Source: PTX ISA, "setmaxnreg"; confidence high. Without `.maxnreg` the PTX does not say how many a warp begins with,
    and nothing is counted.
    """

    def __init__(self, machine: State) -> None:
        self.machine = machine
        self.of_thread = np.full(len(machine.blocked), machine.program.registers)  # for each warp
        self.free = np.zeros(len(machine.blocked) // machine.warps_of_program, int)  # for the threads of one warp each

    def set(self, warp: int, count: int) -> bool:
        """Whether a warp of the machine now has `count` registers a thread: not if the pool has too few."""
        program, more = self.machine.program_of(warp), count - int(self.of_thread[warp])
        if more > self.free[program]:
            return False
        self.free[program] -= more
        self.of_thread[warp] = count
        self.machine.changed = True
        return True
