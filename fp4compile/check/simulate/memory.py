"""Global memory: tensors between guards, what of them was written, and races between programs."""

import numpy as np

from fp4compile.check.simulate.fault import Fault

BASE = 1 << 33  # the first address: no 32-bit number is one
_GUARD = 4096  # bytes between tensors
ATOMIC = -1


class GlobalMemory:
    """Bytes of global memory. Addresses are int64.

    data: uint8. allocated, written: which bytes belong to a tensor, and which of those hold a value. writer: the
    cluster that wrote a byte in the launch that runs, from 1 on; `ATOMIC` for atomic operations; 0 for none.
    """

    def __init__(self, size: int = 1 << 22) -> None:
        self.data = np.zeros(size, np.uint8)
        self.allocated = np.zeros(size, bool)
        self.written = np.zeros(size, bool)
        self.writer = np.zeros(size, np.int32)
        self._top = _GUARD
        self._constants: dict[bytes, int] = {}

    def allocate(self, nbytes: int, content: np.ndarray | None = None, offset: int = 0) -> int:
        """The address of new memory, aligned to 256 bytes plus `offset`. content: uint8; None leaves it unwritten."""
        start = -(-self._top // 256) * 256 + offset
        self._top = start + nbytes + _GUARD
        while self._top > len(self.data):
            for name in ("data", "allocated", "written", "writer"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        self.allocated[start : start + nbytes] = True
        self.data[start : start + nbytes] = 0xEE
        if content is not None:
            self.data[start : start + nbytes] = content
            self.written[start : start + nbytes] = True
        return BASE + start

    def constant(self, content: bytes) -> int:
        """The address of bytes that a kernel brings along."""
        if content not in self._constants:
            self._constants[content] = self.allocate(len(content), np.frombuffer(content, np.uint8))
        return self._constants[content]

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """A copy of bytes, uint8, written or not."""
        start = address - BASE
        return self.data[start : start + nbytes].copy()

    def written_at(self, address: int, nbytes: int) -> np.ndarray:
        """Which of some bytes hold a value, as bool."""
        return self.written[address - BASE : address - BASE + nbytes].copy()

    def set_written(self, address: int, written: np.ndarray) -> None:
        """Say which of some bytes hold a value."""
        self.written[address - BASE : address - BASE + len(written)] = written

    def begin_launch(self) -> None:
        """Forget which programs wrote what: launches of a stream are in order."""
        self.writer[:] = 0

    # ------------------------------------------------------------ accesses of threads

    def load(self, addresses: np.ndarray, size: int, clusters: np.ndarray) -> np.ndarray:
        """The bytes at aligned addresses [threads]: uint8 [threads, size]. clusters: [threads], from 0 on."""
        rows = self._rows(addresses, size)
        if not self.written.reshape(-1, size)[rows].all():
            raise Fault("reads global memory that nothing wrote")
        self._in_order(self.writer.reshape(-1, size)[rows], clusters[:, None] + 1, "reads")
        return self.data.reshape(-1, size)[rows]

    def store(self, addresses: np.ndarray, values: np.ndarray, clusters: np.ndarray) -> None:
        """Write bytes uint8 [threads, size] at aligned addresses [threads]."""
        size = values.shape[1]
        rows = self._rows(addresses, size)
        mine = clusters[:, None] + 1
        self._in_order(self.writer.reshape(-1, size)[rows], mine, "overwrites")
        data = self.data.reshape(-1, size)
        data[rows] = values
        if (data[rows] != values).any():
            raise Fault("several threads write different values to one address of global memory")
        self.written.reshape(-1, size)[rows] = True
        self.writer.reshape(-1, size)[rows] = mine

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
            self.writer[at] = cluster + 1
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
