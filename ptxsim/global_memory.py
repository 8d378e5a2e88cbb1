"""Global memory: tensors between guards, a record of the written bytes, and races.

Bytes that another program of a launch wrote may be accessed after its release by an atomic operation and an acquisition
of that by another one, else not. Bytes that another warp of the same program wrote may
be accessed after a wait for it, and by bulk copies after a `fence.proxy.async` of global memory, too. Bytes that a bulk
copy wrote may be accessed after a `wait_group` without `.read`. Not checked: that a warp overwrites bytes that another
one of its program may be reading, the order of threads within a warp, and reads by `cp.async`.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache

import numpy as np

from ptxsim.clocks import GLOBAL, KNOWN, NOBODY, AnyInt, Clocks
from ptxsim.fault import Fault

BASE = 1 << 33  # the first address: no 32-bit number is one
Loaded = tuple[np.ndarray, np.ndarray | None]  # bytes, and which of them nothing wrote; None for none
_GUARD = 4096  # bytes between tensors
_FAR = 1 << 44  # the first address of what lies apart


@dataclass(frozen=True)
class Threads:
    """The threads of an access: their clusters in the machine, their warps in the cluster, and the clocks."""

    clocks: Clocks
    clusters: np.ndarray
    warps: np.ndarray

    def known(self, agents: np.ndarray) -> np.ndarray:
        """The epochs of agents [threads, n] in each thread's clock."""
        return self.clocks.rows[KNOWN][self.clusters[:, None], self.warps[:, None], agents]

    @property
    def epochs(self) -> np.ndarray:
        """The present epoch of each thread's warp, [threads]."""
        return self.clocks.rows[KNOWN][self.clusters, self.warps, self.warps]


@dataclass(frozen=True)
class Update:
    """The thread of an atomic operation: its cluster in the machine and in the launch, from 0 on, and its warp.

    is_wide: whether the operation's scope has the threads of other programs.
    """

    clocks: Clocks
    machine_cluster: int
    warp: int
    cluster: int
    is_wide: bool
    acquires: bool
    releases: bool


@dataclass
class _Tensor:
    """An allocation, as indices into memory. is_complete: whether every byte was written before the launch.

    is_stored: whether the running launch has written any of its bytes. Else no access to it needs a clock.
    """

    start: int
    end: int
    is_complete: bool
    is_stored: bool = False


class GlobalMemory:
    """Bytes of global memory. Addresses are int64.

    data: uint8. allocated, written: whether a byte belongs to a tensor, and whether it was written. stamps: of each
    byte, what the running launch wrote last, as of `stamp_of`; 0 for nothing.
    """

    def __init__(self, size: int = 1 << 22) -> None:
        self.data = np.zeros(size, np.uint8)
        self.allocated = np.zeros(size, bool)
        self.written = np.zeros(size, bool)
        self.stamps = np.zeros(size, np.int64)
        self._top = _GUARD
        self._tensors: list[_Tensor] = []
        self._starts: list[int] = []
        self._constants: dict[bytes, int] = {}
        # Parts that lie apart: the first address and the bytes of each, and where it is in `data`.
        self._apart = np.zeros((3, 0), np.int64)
        # Clocks of clusters, from 1 on: those released at an address, those acquired by a cluster, those that a fence
        # of a cluster will acquire, and those that a fence of a cluster's warp has released.
        self._released: dict[int, dict[int, np.ndarray]] = {}
        self._acquired: dict[int, dict[int, np.ndarray]] = {}
        self._observed: dict[int, dict[int, np.ndarray]] = {}
        self._fenced: dict[tuple[int, int], dict[int, np.ndarray]] = {}

    def allocate(self, nbytes: int, content: np.ndarray | None = None, offset: int = 0) -> int:
        """The address of new memory, aligned to 256 bytes plus `offset`. content: uint8; None leaves it unwritten."""
        start = -(-self._top // 256) * 256 + offset
        self._top = start + nbytes + _GUARD
        while self._top > len(self.data):
            for name in ("data", "allocated", "written", "stamps"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        self.allocated[start : start + nbytes] = True
        self.data[start : start + nbytes] = 0xEE
        if content is not None:
            self.data[start : start + nbytes] = content
            self.written[start : start + nbytes] = True
        self._tensors.append(_Tensor(start, start + nbytes, content is not None))
        self._starts.append(start)
        return BASE + start

    def constant(self, content: bytes) -> int:
        """The address of a new copy of bytes that a kernel contains."""
        if content not in self._constants:
            self._constants[content] = self.allocate(len(content), np.frombuffer(content, np.uint8))
        return self._constants[content]

    def apart(self, addresses: list[int], nbytes: int, stride: int) -> int:
        """The first of new addresses `stride` bytes apart, at which the `nbytes` bytes at each of some addresses lie.

        They are for tensors of which a simulation has only parts: offsets between these do not fit into 32 bits.
        """
        first = _FAR if not self._apart.size else int(self._apart[0, -1]) + _FAR
        parts = [(first + i * stride, nbytes, address - BASE) for i, address in enumerate(addresses)]
        self._apart = np.hstack([self._apart, np.array(parts, np.int64).T])
        return first

    def _indices(self, addresses: np.ndarray) -> np.ndarray:
        """The indices into `data` of addresses."""
        far = addresses >= _FAR
        if not self._apart.size or not far.any():
            return addresses - BASE
        part = np.searchsorted(self._apart[0], addresses[far], "right") - 1
        starts, sizes, homes = self._apart[:, part]
        offsets = addresses[far] - starts
        if (offsets >= sizes).any():
            raise Fault(f"an access outside of all tensors, at {int(addresses[far][offsets >= sizes][0]):#x}")
        found = addresses - BASE
        found[far] = homes + offsets
        return found

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """A copy of bytes, uint8, written or not."""
        start = address - BASE
        return self.data[start : start + nbytes].copy()

    def written_at(self, address: int, nbytes: int) -> np.ndarray:
        """Whether each of some bytes was written, as bool."""
        return self.written[address - BASE : address - BASE + nbytes].copy()

    def set_written(self, address: int, written: np.ndarray) -> None:
        """Set whether each of some bytes counts as written."""
        start = address - BASE
        self.written[start : start + len(written)] = written
        for tensor in self._tensors_of(np.array([start])):
            tensor.is_complete = tensor.is_complete and bool(written.all())

    def begin_launch(self) -> None:
        """Forget the writers of all bytes: launches of a stream are in order."""
        for clocks in (self._released, self._acquired, self._observed, self._fenced):
            clocks.clear()
        for tensor in self._tensors:
            if tensor.is_stored:
                self.stamps[tensor.start : tensor.end] = 0
                tensor.is_stored = False

    def _tensors_of(self, starts: np.ndarray) -> list[_Tensor]:
        """The tensors in which bytes lie."""
        places = np.searchsorted(self._starts, starts, "right") - 1
        return [self._tensors[place] for place in np.unique(places).tolist()]

    def _tensor(self, starts: np.ndarray, size: int) -> _Tensor | None:
        """The tensor in which all accesses of `size` bytes lie; None for several, after a check that they lie in any.

        Raises Fault for an access outside of all tensors.
        """
        first, last = int(starts.min()), int(starts.max())
        tensor = self._tensors[bisect_right(self._starts, first) - 1] if self._tensors else None
        if tensor is not None and tensor.start <= first and last + size <= tensor.end:
            return tensor
        inside = (starts >= 0) & (starts + size <= len(self.data))
        inside[inside] = self.allocated[starts[inside]] & self.allocated[starts[inside] + size - 1]
        if not inside.all():
            raise Fault(f"an access outside of all tensors, at {int(starts[~inside][0]) + BASE:#x}")
        return None

    # ------------------------------------------------------------ accesses of threads

    def load(
        self, addresses: np.ndarray, size: int, clusters: np.ndarray, threads: Threads | None = None,
        relaxed: bool = False,
    ) -> Loaded:  # fmt: skip
        """The bytes at aligned addresses [threads], uint8 [threads, size]. clusters: [threads], from 0 on.

        threads: of the access; None for copies. relaxed: whether results of atomic operations need no order.
        """
        tensor, rows = self._rows(addresses, size)
        if tensor is None or tensor.is_stored:
            stamps = self._stamps_at(rows, size)
            if relaxed:
                stamps = np.where(stamps & ATOMIC, 0, stamps)
            stamps = self._in_order(stamps, clusters[:, None] + 1, "reads")
            self._check_clocks(stamps, threads, "reads", None)
        return self._taken(tensor, rows, size)

    def _taken(self, tensor: _Tensor | None, rows: np.ndarray, size: int) -> Loaded:
        """The bytes of accesses, which are zero where nothing wrote them. Arguments as of `_rows`."""
        values = _bytes(in_units(self.data, size).take(rows))
        if tensor is not None and tensor.is_complete:
            return values, None
        undefined = ~self.written.reshape(-1, size)[rows]
        if not undefined.any():
            return values, None
        values[undefined] = 0  # matrix units read scales of it, which must be valid codes
        return values, undefined

    def store(
        self, addresses: np.ndarray, values: np.ndarray, clusters: np.ndarray, threads: Threads | None = None
    ) -> None:  # fmt: skip
        """Write bytes uint8 [threads, size] at aligned addresses [threads]; the other arguments as of `load`."""
        size = values.shape[1]
        tensor, rows = self._rows(addresses, size)
        data, mine, raw = in_units(self.data, size), clusters + 1, in_units(values, size)
        if tensor is None or tensor.is_stored:
            stamps = self._stamps_at(rows, size)
            stamps = self._in_order(stamps, mine[:, None], "overwrites")
            self._check_clocks(stamps, threads, "overwrites", _bytes(data.take(rows)) != values)
        data[rows] = raw
        if (_bytes(data.take(rows)) != values).any():
            raise Fault("several threads write different values to one address of global memory")
        for each in [tensor] if tensor is not None else self._tensors_of(rows * size):
            each.is_stored = True
        if tensor is None or not tensor.is_complete:
            in_units(self.written, size)[rows] = _ones(size)
        nobody = np.full_like(mine, NOBODY), np.zeros_like(mine)
        new = stamp_of(mine, *(nobody if threads is None else (threads.warps, threads.epochs)))
        in_units(self.stamps, 8 * size)[rows] = in_units(np.repeat(new, size), 8 * size)

    def _stamps_at(self, rows: np.ndarray, size: int) -> np.ndarray:
        return in_units(self.stamps, 8 * size).take(rows).view(np.int64).reshape(-1, size)

    @staticmethod
    def _check_clocks(
        stamps: np.ndarray, threads: Threads | None, what: str, changes: np.ndarray | None
    ) -> None:  # fmt: skip
        """Raise Fault for bytes that another warp of the threads' cluster wrote, whose write is not in their clocks.

        stamps: [threads, bytes]. changes: whether each byte changes; None for reads.
        """
        if threads is None or not (stamps > 0).any():
            return
        agents = _agent_of(stamps)
        late = (stamps > 0) & ((stamps & _EPOCHS) > threads.known(agents))
        if changes is not None:
            late &= changes
        if late.any():
            agent = int(agents[late][0])
            by = f"warp {agent}" if agent < threads.clocks.warps else "a bulk store"
            raise Fault(f"{what} global memory that {by} of its program wrote, without a wait for it")

    def _rows(self, addresses: np.ndarray, size: int) -> tuple[_Tensor | None, np.ndarray]:
        """(the tensor of aligned accesses, as of `_tensor`; their indices in units of `size` bytes)."""
        start = self._indices(addresses)
        rows, left = np.divmod(start, size)
        if left.any():
            raise Fault(f"an access of {size} bytes at an address that is no multiple of {size}")
        return self._tensor(start, size), rows

    def _in_order(self, stamps: np.ndarray, mine: np.ndarray | int, what: str) -> np.ndarray:
        """The stamps of the accessing clusters themselves, others zero.

        mine: the clusters, from 1 on. Raises Fault for bytes of others whose writes they have not acquired.
        """
        writers = (stamps >> _WRITER) & _WRITERS
        others = (writers != 0) & (writers != mine)
        if not others.any():
            return stamps
        for reader, writer in {*zip((mine + 0 * writers)[others].tolist(), writers[others].tolist(), strict=True)}:
            known = self._acquired.get(reader, {}).get(writer)
            there = stamps[others & (writers == writer) & (mine == reader)]
            if known is None or ((there & _EPOCHS) > known[_agent_of(there)]).any():
                raise Fault(f"{what} global memory that another program of the launch wrote")
        return np.where(others, 0, stamps)

    # ------------------------------------------------------------ copies and atomic operations

    def copied(self, addresses: np.ndarray, size: int, cluster: int, rows: np.ndarray | None = None) -> Loaded:
        """What a bulk copy of a cluster reads: `size` bytes from each address, uint8 [addresses, size].

        addresses: multiples of `size`. rows: the vector clocks of the threads that issued the copy, by which races with
        stores are found; None for a prefetch, which races with none.
        """
        if not addresses.size:
            return np.zeros((0, size), np.uint8), None
        tensor, places = self._rows(addresses, size)
        if tensor is None or tensor.is_stored:
            self._check_copy(self._stamps_at(places, size), cluster, rows, "a copy reads")
        return self._taken(tensor, places, size)

    def copy(self, addresses: np.ndarray, values: np.ndarray, cluster: int, rows: np.ndarray, stamp: int) -> None:
        """Write bytes uint8 [addresses, size] by a cluster's copy at addresses, multiples of `size`.

        rows: the clocks of the copy's issue. stamp: of the bytes, as of `stamp_of`.
        """
        if not addresses.size:
            return
        size = values.shape[1]
        tensor, places = self._rows(addresses, size)
        if tensor is None or tensor.is_stored:
            self._check_copy(self._stamps_at(places, size), cluster, rows, "a copy overwrites")
        for each in [tensor] if tensor is not None else self._tensors_of(places * size):
            each.is_stored = True
        in_units(self.written, size)[places] = _ones(size)
        in_units(self.stamps, 8 * size)[places] = in_units(np.full(size, stamp), 8 * size)
        in_units(self.data, size)[places] = in_units(values, size)

    def _check_copy(self, stamps: np.ndarray, cluster: int, rows: np.ndarray | None, what: str) -> None:
        """Raise Fault for bytes that another program wrote, or the copy's own one without a wait and a fence."""
        stamps = self._in_order(stamps, cluster + 1, what)
        if rows is None:
            return
        mine, agents = stamps > 0, _agent_of(stamps)
        late = mine & ((stamps & _EPOCHS) > rows[GLOBAL][agents])
        if late.any():
            unknown = (mine & ((stamps & _EPOCHS) > rows[KNOWN][agents])).any()
            raise Fault(f"{what} global memory that its program wrote, without a "
                        + ("wait for it" if unknown else "fence.proxy.async"))  # fmt: skip

    def update(self, address: int, size: int, thread: Update) -> slice:
        """The bytes of an aligned atomic operation at an address, after it acquired and released what it orders."""
        tensor, rows = self._rows(np.array([address]), size)
        assert tensor is not None
        there = slice(int(rows[0]) * size, int(rows[0]) * size + size)
        if not self.written[there].all():
            raise Fault("an atomic operation on global memory that nothing wrote")
        mine, clocks = thread.cluster + 1, thread.clocks
        if thread.is_wide:
            self.see(address, thread.cluster, thread.acquires)
        stamps = self.stamps[there][None]
        if tensor.is_stored and (plain := (stamps & ATOMIC) == 0).any():
            stamps = self._in_order(np.where(plain, stamps, 0), mine, "an atomic operation on")
            threads = Threads(clocks, np.array([thread.machine_cluster]), np.array([thread.warp]))
            self._check_clocks(stamps, threads, "an atomic operation on", None)
        epoch = int(clocks.rows[KNOWN, thread.machine_cluster, thread.warp, thread.warp])
        if thread.releases:
            released = clocks.release(thread.machine_cluster, thread.warp)[KNOWN]
            found = self._released.setdefault(address, {})
            _raise_to(found, self._acquired.get(mine, {}))
            _raise_to(found, {mine: released})
        elif thread.is_wide and (mine, thread.warp) in self._fenced:
            _raise_to(self._released.setdefault(address, {}), self._fenced[mine, thread.warp])
        tensor.is_stored = True
        self.stamps[there] = ATOMIC | stamp_of(mine, thread.warp, epoch)
        return there

    def see(self, address: int, cluster: int, acquires: bool) -> None:
        """Order what was released at an address before the later accesses of a cluster of the launch.

        acquires: whether at once; else after a fence of the cluster.
        """
        if address in self._released:
            into = self._acquired if acquires else self._observed
            _raise_to(into.setdefault(cluster + 1, {}), self._released[address])

    def fence(self, cluster: int, warp: int, released: np.ndarray) -> None:
        """Execute a fence of a warp, of the scope of the GPU. released: the warp's clock `KNOWN` before it."""
        mine = cluster + 1
        _raise_to(self._acquired.setdefault(mine, {}), self._observed.pop(mine, {}))
        self._fenced[mine, warp] = self._acquired[mine] | {mine: released.copy()}


def _raise_to(clocks: dict[int, np.ndarray], others: dict[int, np.ndarray]) -> None:
    """Raise the clocks of clusters to other ones."""
    for cluster, rows in others.items():
        clocks[cluster] = np.maximum(clocks[cluster], rows) if cluster in clocks else rows


def in_units(values: np.ndarray, size: int) -> np.ndarray:
    """A contiguous array as units of `size` bytes: NumPy moves them ten times as fast as rows of an array."""
    return values.reshape(-1).view(f"V{size}")


def _bytes(units: np.ndarray) -> np.ndarray:
    """Units [n] as uint8 [n, bytes]."""
    return units.view(np.uint8).reshape(len(units), -1)


@cache
def _ones(size: int) -> np.ndarray:
    return in_units(np.ones(size, bool), size)


# ---------------------------------------------------------------- stamps

_WRITER, _AGENT = 44, 32  # the first bits of the fields of a stamp; the epoch is below
_EPOCHS = (1 << _AGENT) - 1
_WRITERS = (1 << 18) - 1  # of the field of the writer
ATOMIC = 1 << 62  # the flag of an atomic operation


def stamp_of(clusters: AnyInt, agents: AnyInt, epochs: AnyInt) -> AnyInt:
    """The record of writes. clusters: the writers', from 1 on. agents: of their clocks, or `NOBODY`."""
    return clusters << _WRITER | agents + 1 << _AGENT | epochs


def _agent_of(stamps: np.ndarray) -> np.ndarray:
    """The clock agents of stamps."""
    return (stamps >> _AGENT & 4095) - 1
