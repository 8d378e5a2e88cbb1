"""The shared memory of all programs that run at the same time."""

from collections import Counter

import numpy as np

from ptxsim.clocks import KNOWN, Clocks, Index, Shadow
from ptxsim.fault import Fault
from ptxsim.global_memory import in_units
from ptxsim.lanes import Lanes
from ptxsim.undefined import Undefined

START = 1024  # the first byte that a program may use; the system has those before it
_ROUNDINGS = "stores of several roundings of one number to one address, of which any may stay"
_RANK = 24  # addresses of programs in a cluster differ in the bits from here on


def swizzled(addresses: np.ndarray, span: int) -> np.ndarray:
    """The addresses of the bytes of a swizzled tile: chunks of 16 bytes are permuted within `span` bytes.

    span: 32, 64 or 128; 0 for no swizzle. The number of the 128-byte line is added, bit by bit, to the number of the
    chunk. Sources: CUDA driver API, `CUtensorMapSwizzle`; CUTLASS, `cute/swizzle.hpp` (`Swizzle<B, 4, 3>` with B of 1,
    2 or 3); confidence high, also that it depends on the address and not on the place in the tile.
    """
    return addresses ^ ((addresses >> 7 & (span // 16 - 1)) << 4) if span else addresses


class SharedMemory:
    """Bytes of shared memory of `programs` programs, one after the other, each in clusters of `cluster`.

    An address of a kernel is an offset from `START` on, plus the program's rank in its cluster times 2**24.
    granule: the bytes of a cell of the shadow; accesses are multiples of it. undefined: whether each cell holds what
    nothing wrote; None if no cell that was read does.
    """

    def __init__(
        self, programs: int, nbytes: int, cluster: int, clocks: Clocks, granule: int, registers: Undefined
    ) -> None:
        self.stride = -(-(START + nbytes) // 1024) * 1024
        self.end = START + nbytes
        self.cluster, self.granule = cluster, granule
        self.data = np.full(programs * self.stride, 0xEE, np.uint8)
        self.clocks = clocks
        self.shadow = Shadow(len(self.data) // granule, clocks, "shared memory", self._lose)
        self.undefined: np.ndarray | None = None
        self._registers = registers
        self.notes: Counter[str] = Counter()
        self.strict = False  # whether stores of several roundings of one number to one address are a fault
        self._atomics: dict[int, tuple[int, int]] = {}  # the warp and epoch of the last atomic operation, by index
        self.lanes = Lanes(len(self.data) // granule, clocks.clusters, clocks.warps)

    def address(self, rank: np.ndarray, offset: int | np.ndarray) -> np.ndarray:
        """The address of an offset in the program of a rank."""
        return (rank << _RANK) + offset

    def flat(self, addresses: np.ndarray, clusters: np.ndarray, size: int) -> np.ndarray:
        """Indices into `data` for accesses of `size` bytes. clusters: the cluster of each access."""
        first = self.cluster * self.stride * clusters
        if self.cluster > 1:
            rank, addresses = addresses >> _RANK, addresses & (1 << _RANK) - 1
            if (rank >= self.cluster).any():
                raise Fault("an access to shared memory of a program that the cluster does not have")
            first = first + rank * self.stride
        lowest, highest = int(addresses.min()), int(addresses.max()) + size
        if lowest < START or highest > self.end:
            if highest >= 1 << _RANK:
                raise Fault("an access to shared memory of a program that the cluster does not have")
            raise Fault(f"an access outside of shared memory, at {lowest} to {highest} of {self.end}")
        return first + addresses

    def index(self, address: int, cluster: int, nbytes: int) -> int:
        """The index into `data` of the first of some bytes at an address."""
        rank, offset = address >> _RANK, address & (1 << _RANK) - 1
        if not 0 <= rank < self.cluster or offset < START or offset + nbytes > self.end:
            self.flat(np.array(address), np.array(cluster), nbytes)  # raises Fault
        return (cluster * self.cluster + rank) * self.stride + offset

    def load(
        self, addresses: np.ndarray, size: int, clusters: np.ndarray, warps: np.ndarray, lanes: np.ndarray
    ) -> np.ndarray:  # fmt: skip
        """The bytes at aligned addresses [threads] that threads read: uint8 [threads, size]."""
        rows = self._rows(addresses, clusters, size)
        cells = self.cells_of(rows, size)
        writer, own = self.shadow.reads_of_warps(cells, clusters, warps), warps[:, None]
        self.lanes.reads(cells, clusters, warps, lanes, lambda: (writer == own) | (writer == self.clocks.copies(own)),
                         self.shadow.written)  # fmt: skip
        return in_units(self.data, size).take(rows).view(np.uint8).reshape(-1, size)

    def store(
        self, addresses: np.ndarray, values: np.ndarray, clusters: np.ndarray, warps: np.ndarray, lanes: np.ndarray,
        undefined: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Write bytes uint8 [threads, size] at aligned addresses [threads]. undefined: of each byte; None for none."""
        size = values.shape[1]
        rows = self._rows(addresses, clusters, size)
        data, cells = in_units(self.data, size), self.cells_of(rows, size)
        granules = f"u{self.granule}"
        raw = np.ascontiguousarray(values).view(granules)
        before = data.take(rows).view(granules).reshape(raw.shape)
        changes = before != raw
        try:
            writer = self.shadow.writes_of_warps(cells, clusters, warps, changes)
        except Fault:
            changes &= ~self._are_roundings(before, raw)
            writer = self.shadow.writes_of_warps(cells, clusters, warps, changes)
            self.notes[_ROUNDINGS] += 1
        self.lanes.writes(cells, clusters, warps, lanes, lambda: writer == warps[:, None], changes)
        data[rows] = in_units(raw, size)
        stored = data.take(rows).view(granules).reshape(raw.shape)
        if (stored != raw).any():
            if not self._are_roundings(stored, raw).all():
                raise Fault("several threads write different values to one address of shared memory")
            self.notes[_ROUNDINGS] += 1
        self.define(cells, undefined)

    # ------------------------------------------------------------ what nothing wrote

    def _lose(self, cells: Index, which: np.ndarray) -> None:
        """Record that cells are read, of which nothing wrote some. They become zeros, which are valid scales."""
        self._registers.found("shared memory")
        unwritten = np.arange(len(self.shadow.writer))[cells][which]
        self._undefined()[unwritten] = True
        self.data.reshape(-1, self.granule)[unwritten] = 0

    def _undefined(self) -> np.ndarray:
        if self.undefined is None:
            self.undefined = np.zeros(len(self.shadow.writer), bool)
        return self.undefined

    def define(self, cells: Index, undefined: np.ndarray | None) -> None:
        """Record that cells were written. undefined: of each byte of `cells` [..., n], in order; None for none."""
        if undefined is not None and undefined.any():
            self._undefined()[cells] = False
            assert isinstance(cells, np.ndarray)
            of_cells = undefined.reshape(*cells.shape, -1).any(-1)
            self._undefined()[cells[of_cells]] = True  # also where another thread writes what is defined
        elif self.undefined is not None:
            self.undefined[cells] = False

    def define_units(self, units: np.ndarray, size: int, undefined: np.ndarray | None) -> None:
        """`define` of units of `size` bytes, which together are whole cells. undefined: [units, size]."""
        if undefined is None and self.undefined is None:
            return
        cells = self.cells_of(units, size)
        if undefined is None or size >= self.granule:
            self.define(cells, undefined)
        else:
            self._undefined()[cells] = False
            self._undefined()[cells[undefined.any(1)]] = True

    def load_defined(
        self, addresses: np.ndarray, size: int, clusters: np.ndarray, warps: np.ndarray, lanes: np.ndarray
    ) -> np.ndarray:  # fmt: skip
        """`load` of bytes that must not be undefined."""
        found = self.load(addresses, size, clusters, warps, lanes)
        if self.undefined_at(addresses, clusters, size) is not None:
            raise self._registers.fault("uses what nothing wrote")
        return found

    def undefined_at(self, addresses: np.ndarray, clusters: np.ndarray, size: int) -> np.ndarray | None:
        """Which bytes at aligned addresses [threads] are undefined: bool [threads, size]; None if none are."""
        if self.undefined is None:
            return None
        found = self.undefined[self.cells_of(self._rows(addresses, clusters, size), size)]
        return np.repeat(found, self.granule, axis=1) if found.any() else None

    def _are_roundings(self, stored: np.ndarray, raw: np.ndarray) -> np.ndarray:
        """Whether two values of a cell are equal, or count as float32 roundings of one number.

        The CUDA programming guide leaves open which thread of a warp writes last. Triton lets all threads store what
        each has summed: with fused products and sums, these are float32 roundings of one number.
        """
        if self.strict or stored.dtype.itemsize != 4:
            return np.asarray(stored == raw)
        a, b = (each.view(np.float32).astype(np.float64) for each in (stored, raw))
        return np.asarray(np.abs(a - b) <= 2.0**-14 * np.maximum(np.abs(a), np.abs(b)))

    def update(self, address: int, size: int, cluster: int, warp: int, lane: int) -> np.ndarray:
        """The bytes at an address that a thread updates atomically, which share the memory.

        Atomic operations need no order among each other. The first one that follows another access does.
        """
        at = self.index(address, cluster, size)
        if at % size:
            raise Fault(f"an atomic operation of {size} bytes at an address that is no multiple of {size}")
        there, cells = self.data[at : at + size], self.span(at, size)
        shadow, writes = self.shadow, (int(self.shadow.writer[cells][0]), int(self.shadow.written[cells][0]))
        if self._atomics.get(at) != writes:
            where = np.array([address]), np.array([cluster]), np.array([warp]), np.array([lane])
            before = self.load_defined(where[0], size, *where[1:])
            self.store(where[0], before ^ 1, *where[1:])
            self.store(where[0], before, *where[1:])
        epoch = int(self.clocks.rows[KNOWN, cluster, warp, warp])
        shadow.writer[cells], shadow.written[cells] = warp, epoch
        self._atomics[at] = warp, epoch
        return there

    def _rows(self, addresses: np.ndarray, clusters: np.ndarray, size: int) -> np.ndarray:
        flat = self.flat(addresses, clusters, size)
        if (flat % size).any():
            raise Fault(f"an access of {size} bytes at an address that is no multiple of {size}")
        return flat // size

    def cells_of(self, rows: np.ndarray, size: int) -> np.ndarray:
        """The cells of units of `size` bytes, [units, cells of a unit]; of smaller units, the cell of each."""
        each = size // self.granule
        if not each:
            return rows[:, None] * size // self.granule
        return rows[:, None] * each + np.arange(each) if each > 1 else rows[:, None]

    def span(self, first: int, nbytes: int) -> slice:
        """The cells of bytes that follow each other. first: an index into `data`."""
        return slice(first // self.granule, (first + nbytes) // self.granule)

    def cells(self, flat: np.ndarray) -> np.ndarray:
        """The cells of bytes, given in runs of whole cells as indices into `data`."""
        return flat.reshape(-1)[:: self.granule] // self.granule
