"""The happens-before order of accesses, by vector clocks of warps and of asynchronous agents, and its races.

Each warp counts epochs; an epoch ends where the warp releases its accesses to others (a barrier, an arrival, a fence).
A warp's clock holds, for every agent, the last epoch that happened before. An access to a byte races with an earlier
one by an agent whose epoch the clock does not hold. So one schedule, with any order of the warps, finds a missing wait.

Every warp has three clocks. `KNOWN` orders all accesses. `FENCED` orders the warp's generic writes to shared memory for
the asynchronous proxy, and `GLOBAL` those to global memory: only `fence.proxy.async` of the space, or of all spaces,
copies epochs of generic writes to them (PTX ISA, "async proxy"; confidence high for the need of a fence on the path
from writer to copy, medium that it may be on either side of a barrier).

A fourth one, `SENT`, exists where a kernel is held to `tcgen05.fence`. It has the operations on tensor memory that a
`tcgen05.fence::before_thread_sync` lies behind, and travels with every synchronisation; `::after_thread_sync` moves it
to `usable`, the operations on tensor memory that the warp's next ones come after (PTX ISA, "tcgen05.fence" and
"Canonical synchronization patterns"; confidence high).
"""

from collections.abc import Callable
from functools import partialmethod
from typing import TypeVar

import numpy as np

from ptxsim.fault import Fault

KNOWN, FENCED, GLOBAL, SENT = range(4)
AnyInt = TypeVar("AnyInt", int, np.ndarray)
Index = np.ndarray | slice | tuple[int | slice, ...]  # of cells of a memory
_KINDS = 8  # of agents that every warp has
_BARRIERS = 96  # agents for mbarriers: the copies that complete on one
NOBODY = -1
MBARRIER = -2  # the writer of cells that are an mbarrier: no clock holds its end


class Clocks:
    """The clocks of the warps of all clusters; agents are numbered within a cluster.

    The agents of a cluster: its warps; for each warp its loads from tensor memory, its `cp.async` copies, its bulk
    stores' reads, its stores to tensor memory, its `wgmma` products, its bulk stores' writes, and its operations of the
    tensor pipe; and the copies that complete on each mbarrier.
    """

    def __init__(self, clusters: int, warps: int, has_fences: bool = False) -> None:
        self.clusters, self.warps, self.has_fences = clusters, warps, has_fences
        self.rows = np.zeros((3 + has_fences, clusters, warps, _KINDS * warps + _BARRIERS + 2), np.int32)
        self.usable = np.zeros_like(self.rows[KNOWN])
        own = np.arange(warps)
        self.rows[KNOWN, :, own, own] = 1
        self.rows[..., NOBODY] = np.iinfo(np.int32).max
        self._barriers = np.full(clusters, _KINDS * warps)
        self._ended: list[list[tuple[int, int]]] = [[] for _ in range(clusters)]

    def _agent(self, kind: int, warp: AnyInt) -> AnyInt:
        """The agent of a warp's operations of a kind; of an array of warps, theirs."""
        return kind * self.warps + warp

    tensor_loads = partialmethod(_agent, 1)  # its accesses by `tcgen05.ld`
    copies = partialmethod(_agent, 2)  # its `cp.async`
    bulk_stores = partialmethod(_agent, 3)  # its bulk copies from shared memory
    tensor_stores = partialmethod(_agent, 4)  # its accesses by `tcgen05.st`
    products = partialmethod(_agent, 5)  # its `wgmma`
    bulk_writes = partialmethod(_agent, 6)  # its bulk copies to global memory
    tensor_pipe = partialmethod(_agent, 7)  # the operations of the tensor pipe that it issues

    # ------------------------------------------------------------ tensor memory

    def know_tensor(self, cluster: int, warp: int, agent: int, epoch: int) -> None:
        """Record that a warp has waited for its own loads from tensor memory, or for its stores."""
        self.rows[:SENT, cluster, warp, agent] = self.usable[cluster, warp, agent] = epoch

    def send_tensor(self, cluster: int, warp: int, issued: int) -> None:
        """Execute `tcgen05.fence::before_thread_sync`. issued: the warp's operations of the tensor pipe so far."""
        if self.has_fences:
            sent = self.rows[SENT, cluster, warp]
            np.maximum(sent, self.usable[cluster, warp], out=sent)
            sent[self.tensor_pipe(warp)] = issued

    def receive_tensor(self, cluster: int, warp: int) -> None:
        """Execute `tcgen05.fence::after_thread_sync`."""
        if self.has_fences:
            np.maximum(self.usable[cluster, warp], self.rows[SENT, cluster, warp], out=self.usable[cluster, warp])

    def of_tensor(self, cluster: int, warp: int, in_pipe: bool) -> np.ndarray:
        """A copy of a warp's clocks for its operation on tensor memory.

        Where `tcgen05.fence` counts, only `usable` operations on tensor memory come before it. For one of the tensor
        pipe these include others of the pipe that may not be complete.
        """
        rows = self.of(cluster, warp)
        if self.has_fences:
            usable = self.usable[cluster, warp]
            for kind in (1, 4, 7):  # loads, stores, operations of the pipe
                agents = slice(kind * self.warps, (kind + 1) * self.warps)
                least = usable[agents] if kind == 7 and in_pipe else np.minimum(rows[KNOWN, agents], usable[agents])
                rows[: FENCED + 1, agents] = least
        return rows

    # ------------------------------------------------------------ mbarriers

    def new_barrier(self, cluster: int) -> tuple[int, int]:
        """The agent of the copies that complete on an mbarrier that was just initialised, and its last epoch so far."""
        if self._ended[cluster]:
            return self._ended[cluster].pop()
        agent = int(self._barriers[cluster])
        if agent >= self.rows.shape[-1] - 2:
            raise Fault(f"more than {_BARRIERS} initialisations of mbarriers, which the simulator does not tell apart")
        self._barriers[cluster] += 1
        return agent, 0

    def end_barrier(self, cluster: int, agent: int, epoch: int) -> None:
        """Let the agent of an mbarrier that was invalidated after all of its copies be another one's."""
        self._ended[cluster].append((agent, epoch))

    # ------------------------------------------------------------ orders

    def of(self, cluster: int, warp: int) -> np.ndarray:
        """A copy of a warp's clocks, int32 [clocks, agents]."""
        return self.rows[:, cluster, warp].copy()

    def release(self, cluster: int, warp: int) -> np.ndarray:
        """The warp's clocks, to be acquired by those that wait for it; begins a new epoch of the warp."""
        rows = self.of(cluster, warp)
        self.rows[KNOWN, cluster, warp, warp] += 1
        return rows

    def acquire(self, cluster: int, warp: int, rows: np.ndarray) -> None:
        """Raise a warp's clocks to other clocks."""
        np.maximum(self.rows[:, cluster, warp], rows, out=self.rows[:, cluster, warp])

    def meet(self, clusters: np.ndarray, warps: np.ndarray) -> None:
        """Raise the clocks of the warps of each row to their common maximum, as at a barrier; new epochs begin.

        clusters: [rows]. warps: [rows, n].
        """
        clusters = clusters[:, None]
        self.rows[:, clusters, warps] = self.rows[:, clusters, warps].max(2, keepdims=True)
        self.rows[KNOWN, clusters, warps, warps] += 1

    def fence(self, clusters: AnyInt, warps: AnyInt, spaces: tuple[int, ...]) -> None:
        """Order all generic writes in warps' clocks before later asynchronous accesses to `FENCED` or `GLOBAL`."""
        for space in spaces:
            self.rows[space, clusters, warps] = self.rows[KNOWN, clusters, warps]
        self.rows[KNOWN, clusters, warps, warps] += 1


class Shadow:
    """The last write and the reads of each cell of a memory.

    Accesses are whole cells. cells: the number of cells, or the shape of an array of them; accesses of asynchronous
    agents name cells by any index into it. read: the last epochs in which warps read a cell, [cells, warps]. Readers
    that are no warps get an array each when they first read. unwritten: called when cells are read, of which some were
    not written: with the cells, and which of them.
    """

    def __init__(
        self, cells: int | tuple[int, ...], clocks: Clocks, what: str, unwritten: Callable[[Index, np.ndarray], None]
    ) -> None:
        self.clocks, self.what, self.unwritten = clocks, what, unwritten
        shape = cells if isinstance(cells, tuple) else (cells,)
        self.writer = np.full(shape, NOBODY, np.int16)
        self.written = np.zeros(shape, np.int32)
        self.read = np.zeros((*shape, clocks.warps), np.int32)
        self.read_by_agent: dict[int, np.ndarray] = {}
        # The last epochs in which warps [clusters, warps] and agents read any cell: who knows these, knows all reads.
        self.latest = np.zeros((clocks.clusters, clocks.warps), np.int32)
        self.latest_by_agent: dict[int, int] = {}

    # ------------------------------------------------------------ warps

    def reads_of_warps(self, cells: np.ndarray, clusters: np.ndarray, warps: np.ndarray) -> np.ndarray:
        """Record that threads read cells [threads, n]; returns their writers.

        clusters, warps: [threads], of the threads.
        """
        writer, written, known = self.writer.take(cells), self.written.take(cells), self.clocks.rows[KNOWN]
        if (nobody := writer == NOBODY).any():
            self.unwritten(cells, nobody)
        late = written > _known_of(writer, known, clusters * self.clocks.warps + warps)
        if late.any():
            raise Fault(f"reads {self.what} that {self._agent(writer[late][0])} wrote, without a wait for it")
        epochs = known[clusters, warps, warps]
        self.latest[clusters, warps] = epochs
        self.read.reshape(-1)[cells * self.clocks.warps + warps[:, None]] = epochs[:, None]
        return writer

    def writes_of_warps(
        self, cells: np.ndarray, clusters: np.ndarray, warps: np.ndarray, changes: np.ndarray
    ) -> np.ndarray:  # fmt: skip
        """Record that threads write cells [threads, n]; returns the agents that wrote them before, [threads, n].

        clusters, warps: [threads], of the threads. changes: bool [threads, n], whether a cell's value changes. Several
        warps may write the same value without a wait: Triton's layouts hold some elements several times.
        """
        rows = self.clocks.rows[KNOWN].reshape(-1, self.clocks.rows.shape[-1])
        of_rows = clusters * self.clocks.warps + warps
        return self.generic_writes(cells, rows, of_rows, warps, rows[of_rows, warps], changes)

    def generic_writes(
        self, cells: np.ndarray, rows: np.ndarray, of_rows: np.ndarray, agents: np.ndarray, epochs: np.ndarray,
        changes: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Record that agents write cells [accesses, n] by the generic proxy; returns who wrote them before.

        rows: clocks `KNOWN` [warps, agents]. of_rows: [accesses], the row of each access. agents, epochs: [accesses],
        of the writers. changes: bool [accesses, n], whether a cell's value changes.
        """
        writer, written = self.writer.take(cells), self.written.take(cells)
        late = written > _known_of(writer, rows, of_rows)
        if (late & changes).any():
            late &= changes
            raise Fault(f"overwrites {self.what} that {self._agent(writer[late][0])} wrote, without a wait")
        warps = self.clocks.warps
        some = np.zeros(len(rows), bool)
        some[of_rows] = True
        known = rows[some].min(0)
        if (self.latest > known[:warps]).any():
            unseen = self._reads_at(cells) > rows[of_rows, None, :warps]
            if unseen.any():
                raise Fault(f"overwrites {self.what} that warp {np.nonzero(unseen)[2].min()} may be reading")
        for agent, read in self.read_by_agent.items():
            if self.latest_by_agent[agent] > known[agent] and (read.take(cells) > rows[of_rows, agent][:, None]).any():
                raise Fault(f"overwrites {self.what} that {self._agent(agent)} may be reading")
        if late.any():  # the first writer's record stays: waiting for it suffices to read the value
            again = np.nonzero(~late)
            self.writer[cells[again]] = agents[again[0]]
            self.written[cells[again]] = epochs[again[0]]
        else:
            self.writer[cells] = agents[:, None]
            self.written[cells] = epochs[:, None]
        return writer

    def _reads_at(self, cells: np.ndarray) -> np.ndarray:
        """The last epochs in which warps read cells [..., n]: [..., n, warps]."""
        nbytes = 4 * self.clocks.warps
        return self.read.reshape(-1).view(f"V{nbytes}").take(cells).view(np.int32).reshape(*cells.shape, -1)

    # ------------------------------------------------------------ asynchronous agents

    def reads_of_agent(self, cells: Index, rows: np.ndarray, agent: int, epoch: int) -> None:
        """Record that an asynchronous operation reads cells. rows: the clocks [clocks, agents] of its issue."""
        writer, written = self.writer[cells], self.written[cells]
        if not writer.size:
            return
        late = written > rows[FENCED].take(writer)
        if (nobody := writer == NOBODY).any():
            self.unwritten(cells, nobody)
        if late.any():
            first = writer[late][0]
            fence = (written <= rows[KNOWN][writer]).all()
            raise Fault(f"{self._agent(agent)} reads {self.what} that {self._agent(first)} wrote, without a "
                        + ("fence.proxy.async" if fence else "wait"))  # fmt: skip
        self._record(cells, rows, agent, epoch)

    def _record(self, cells: Index, rows: np.ndarray, agent: int, epoch: int) -> None:
        if agent not in self.read_by_agent:
            self.read_by_agent[agent] = np.zeros(self.writer.shape, np.int32)
        self.read_by_agent[agent][cells] = epoch
        self.latest_by_agent[agent] = max(self.latest_by_agent.get(agent, 0), epoch)

    def reads_of_agents(self, cells: np.ndarray, rows: np.ndarray, agents: list[int], epochs: list[int]) -> None:
        """Record that asynchronous operations read cells [operations, n], or the same cells [1, n].

        rows: the clocks [clocks, operations, agents] of their issue. agents, epochs: of the readers.
        """
        writer = self.writer.take(cells)
        one = int(writer.flat[0])
        known = one != NOBODY and (writer == one).all() and rows[FENCED, :, one] >= self.written.take(cells).max(1)
        record = self._record if np.all(known) else self.reads_of_agent
        for i, (agent, epoch) in enumerate(zip(agents, epochs, strict=True)):
            record(cells[i % len(cells)], rows[:, i], agent, epoch)

    def writes_of_agent(self, cells: Index, rows: np.ndarray, agent: int, epoch: int) -> None:
        """Record that an asynchronous operation writes cells; arguments as of `reads_of_agent`."""
        writer, written = self.writer[cells], self.written[cells]
        if not writer.size:
            return
        late = written > rows[FENCED].take(writer)
        if late.any():
            raise Fault(f"{self._agent(agent)} overwrites {self.what} that {self._agent(writer[late][0])} wrote, "
                        "without a wait or a fence.proxy.async")  # fmt: skip
        known = rows[KNOWN]
        if (self.latest > known[: self.clocks.warps]).any():
            read = self._reads_at(cells) if isinstance(cells, np.ndarray) else self.read[cells]
            unseen = read.reshape(-1, self.clocks.warps).max(0) > known[: self.clocks.warps]
            if unseen.any():
                raise Fault(f"{self._agent(agent)} overwrites {self.what} that warp {np.argmax(unseen)} may be reading")
        for other, read in self.read_by_agent.items():
            if other != agent and self.latest_by_agent[other] > known[other] and read[cells].max() > known[other]:
                raise Fault(f"{self._agent(agent)} overwrites {self.what} that {self._agent(other)} may be reading")
        self.writer[cells] = agent
        self.written[cells] = epoch

    def begin_mbarrier(self, cells: np.ndarray, cluster: int, warp: int) -> None:
        """Record that a warp makes an mbarrier of cells [n], as a generic write."""
        row = cells[None, :]
        self.writes_of_warps(row, np.array([cluster]), np.array([warp]), np.ones(row.shape, bool))
        self.writer[cells], self.written[cells] = MBARRIER, 1

    def end_mbarrier(self, cells: np.ndarray) -> None:
        """Record that cells are no longer an mbarrier, and unwritten."""
        self.writer[cells], self.written[cells] = NOBODY, 0

    def _agent(self, agent: int) -> str:
        if agent == MBARRIER:
            return "mbarrier.init"
        warps = self.clocks.warps
        if agent < warps:
            return f"warp {agent}"
        kinds = ("tcgen05.ld", "cp.async", "a bulk store", "tcgen05.st", "wgmma", "a bulk store")
        if self.clocks.tensor_pipe(0) <= agent < _KINDS * warps:
            return "the tensor pipe"
        return f"{kinds[agent // warps - 1]} of warp {agent % warps}" if agent < _KINDS * warps else "a copy"


def _known_of(agents: np.ndarray, rows: np.ndarray, of_rows: np.ndarray) -> np.ndarray:
    """The epochs of agents [accesses, n] in the clocks of each access. of_rows: its index among all `rows`.

    Agents below 0 are the last ones of the row before, which every row has.
    """
    return rows.reshape(-1).take((of_rows * rows.shape[-1])[:, None] + agents)
