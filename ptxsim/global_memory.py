"""Global memory: tensors between guards, a record of the written bytes, and races.

Bytes that another program of a launch wrote must not be accessed. Bytes that another warp of the same program wrote may
be accessed after a wait for it. Not checked: that a warp overwrites bytes that another one of its program may be
reading, the order of threads within a warp, and accesses by copies within a program.
"""

from dataclasses import dataclass

import numpy as np

from ptxsim.clocks import KNOWN, NOBODY, Clocks
from ptxsim.fault import Fault

BASE = 1 << 33  # the first address: no 32-bit number is one
_GUARD = 4096  # bytes between tensors
ATOMIC = -1


@dataclass(frozen=True)
class Threads:
    """The threads of an access: their clusters in the machine, their warps in the cluster, and the clocks."""

    clocks: Clocks
    clusters: np.ndarray
    warps: np.ndarray

    def known(self, warps: np.ndarray) -> np.ndarray:
        """The epochs of warps [threads, n] in each thread's clock."""
        return self.clocks.rows[KNOWN][self.clusters[:, None], self.warps[:, None], warps]

    @property
    def epochs(self) -> np.ndarray:
        """The present epoch of each thread's warp, [threads, 1]."""
        return self.known(self.warps[:, None])


class GlobalMemory:
    """Bytes of global memory. Addresses are int64.

    data: uint8. allocated, written: whether a byte belongs to a tensor, and whether it was written. writer: the cluster
    that wrote a byte in the running launch, from 1 on; `ATOMIC` for atomic operations; 0 for none. warp, epoch: the
    cluster's warp that did, and its epoch then.
    """

    def __init__(self, size: int = 1 << 22) -> None:
        self.data = np.zeros(size, np.uint8)
        self.allocated = np.zeros(size, bool)
        self.written = np.zeros(size, bool)
        self.writer = np.zeros(size, np.int32)
        self.warp = np.zeros(size, np.int16)
        self.epoch = np.zeros(size, np.int32)
        self._top = _GUARD
        self._constants: dict[bytes, int] = {}

    def allocate(self, nbytes: int, content: np.ndarray | None = None, offset: int = 0) -> int:
        """The address of new memory, aligned to 256 bytes plus `offset`. content: uint8; None leaves it unwritten."""
        start = -(-self._top // 256) * 256 + offset
        self._top = start + nbytes + _GUARD
        while self._top > len(self.data):
            for name in ("data", "allocated", "written", "writer", "warp", "epoch"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        self.allocated[start : start + nbytes] = True
        self.data[start : start + nbytes] = 0xEE
        if content is not None:
            self.data[start : start + nbytes] = content
            self.written[start : start + nbytes] = True
        return BASE + start

    def constant(self, content: bytes) -> int:
        """The address of a new copy of bytes that a kernel contains."""
        if content not in self._constants:
            self._constants[content] = self.allocate(len(content), np.frombuffer(content, np.uint8))
        return self._constants[content]

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """A copy of bytes, uint8, written or not."""
        start = address - BASE
        return self.data[start : start + nbytes].copy()

    def written_at(self, address: int, nbytes: int) -> np.ndarray:
        """Whether each of some bytes was written, as bool."""
        return self.written[address - BASE : address - BASE + nbytes].copy()

    def set_written(self, address: int, written: np.ndarray) -> None:
        """Set whether each of some bytes counts as written."""
        self.written[address - BASE : address - BASE + len(written)] = written

    def begin_launch(self) -> None:
        """Forget the writers of all bytes: launches of a stream are in order."""
        self.writer[:] = 0

    # ------------------------------------------------------------ accesses of threads

    def load(
        self, addresses: np.ndarray, size: int, clusters: np.ndarray, threads: Threads | None = None
    ) -> np.ndarray:  # fmt: skip
        """The bytes at aligned addresses [threads]: uint8 [threads, size]. clusters: [threads], from 0 on.

        threads: of the access; None for copies.
        """
        rows = self._rows(addresses, size)
        if not self.written.reshape(-1, size)[rows].all():
            raise Fault("reads global memory that nothing wrote")
        writer = self.writer.reshape(-1, size)[rows]
        self._in_order(writer, clusters[:, None] + 1, "reads")
        if threads is not None and writer.any() and (late := self._late(rows, size, threads) & (writer > 0)).any():
            raise Fault(f"reads global memory that warp {self._warp_at(rows, size, late)} of its program wrote, "
                        "without a wait for it")  # fmt: skip
        return self.data.reshape(-1, size)[rows]

    def store(
        self, addresses: np.ndarray, values: np.ndarray, clusters: np.ndarray, threads: Threads | None = None
    ) -> None:  # fmt: skip
        """Write bytes uint8 [threads, size] at aligned addresses [threads]; the other arguments as of `load`."""
        size = values.shape[1]
        rows = self._rows(addresses, size)
        mine, writer = clusters[:, None] + 1, self.writer.reshape(-1, size)[rows]
        self._in_order(writer, mine, "overwrites")
        data = self.data.reshape(-1, size)
        if threads is not None and writer.any():
            late = self._late(rows, size, threads) & (writer > 0) & (data[rows] != values)
            if late.any():
                raise Fault(f"overwrites global memory that warp {self._warp_at(rows, size, late)} of its program "
                            "wrote, without a wait for it")  # fmt: skip
        data[rows] = values
        if (data[rows] != values).any():
            raise Fault("several threads write different values to one address of global memory")
        self.written.reshape(-1, size)[rows] = True
        self.writer.reshape(-1, size)[rows] = mine
        self.warp.reshape(-1, size)[rows] = NOBODY if threads is None else threads.warps[:, None]
        self.epoch.reshape(-1, size)[rows] = 0 if threads is None else threads.epochs

    def _late(self, rows: np.ndarray, size: int, threads: Threads) -> np.ndarray:
        """Whether the last write, by a warp of their cluster, is not in the threads' clocks: bool [threads, size]."""
        return self.epoch.reshape(-1, size)[rows] > threads.known(self.warp.reshape(-1, size)[rows])

    def _warp_at(self, rows: np.ndarray, size: int, which: np.ndarray) -> int:
        return int(self.warp.reshape(-1, size)[rows][which][0])

    def _rows(self, addresses: np.ndarray, size: int) -> np.ndarray:
        start = addresses - BASE
        if (start % size).any():
            raise Fault(f"an access of {size} bytes at an address that is no multiple of {size}")
        if start.min() < 0 or start.max() + size > len(self.data):
            raise Fault(f"an access outside of all tensors, at {int(addresses[0]):#x}")
        if not (self.allocated[start].all() and self.allocated[start + size - 1].all()):
            bad = addresses[~(self.allocated[start] & self.allocated[start + size - 1])]
            raise Fault(f"an access outside of all tensors, at {int(bad[0]):#x}")
        return start // size

    @staticmethod
    def _in_order(writer: np.ndarray, mine: np.ndarray | np.int32, what: str) -> None:
        if ((writer != 0) & (writer != mine)).any():
            raise Fault(f"{what} global memory that another program of the launch wrote")

    # ------------------------------------------------------------ single bytes, for copies and atomic operations

    def bytes_at(self, addresses: np.ndarray, writes: bool, cluster: int) -> np.ndarray:
        """Indices into `data` of bytes at addresses of any shape, after the checks of an access by a cluster."""
        at = addresses - BASE
        if at.size and (at.min() < 0 or at.max() >= len(self.data) or not self.allocated[at].all()):
            raise Fault("a copy accesses memory outside of all tensors")
        if not writes and not self.written[at].all():
            raise Fault("a copy reads global memory that nothing wrote")
        self._in_order(self.writer[at], np.int32(cluster + 1), "a copy overwrites" if writes else "a copy reads")
        if writes:
            self.written[at] = True
            self.writer[at], self.warp[at], self.epoch[at] = cluster + 1, NOBODY, 0
        return at

    def update(self, address: int, size: int) -> slice:
        """The bytes of an aligned atomic operation at an address."""
        start = int(self._rows(np.array([address]), size)[0]) * size
        there = slice(start, start + size)
        if not self.written[there].all():
            raise Fault("an atomic operation on global memory that nothing wrote")
        if ((self.writer[there] != 0) & (self.writer[there] != ATOMIC)).any():
            raise Fault("an atomic operation on global memory that a program of the launch wrote otherwise")
        self.writer[there] = ATOMIC
        return there
