"""Tensor memory: its allocation, and the accesses of warps and of the tensor pipe to it and to shared memory.

Sources: PTX ISA, "Tensor memory", `tcgen05.alloc`, `tcgen05.ld`, and "Memory consistency model for 5th generation of
TensorCore operations"; confidence high, unless a line below says less.

- A program that allocates gets its highest free columns, so that a kernel that assumes column 0 is found. An allocation
  that would wait for columns is a fault.
- An allocation for a pair is one for each of its programs, by a warp of that program. So are a deallocation and the
  end of allocations: the first warp waits for the other one (PTX ISA, "Issue granularity"). That both name the same
  columns, the same place in shared memory and are the same warp of their programs is inferred from "collectively".
- Operations of the tensor pipe that one thread issues are in order. The PTX ISA guarantees it for copies before
  products, and for products of the same sums and shape. Only newer versions (9.7.18.6.2) guarantee that a copy does
  not overtake a product whose scales it overwrites; kernels of Triton and CUTLASS depend on it. Confidence medium.
- A commit includes all operations before it of its own thread (PTX ISA, `tcgen05.commit`), and none of others.
- `tcgen05.fence`: the PTX ISA requires one on each side of a synchronisation between an operation on tensor memory and
  one that depends on it; a commit contains the first one. They also order operations of the tensor pipe of two threads,
  which need not be complete. A kernel without any `tcgen05.fence` is not held to it, as Triton emits none.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ptxsim.clocks import NOBODY, Index, Shadow
from ptxsim.descriptors import CHUNK, Matrix
from ptxsim.fault import Fault
from ptxsim.global_memory import in_units
from ptxsim.state import State

LANES, COLUMNS = 128, 512
_UNIT = 32  # columns are allocated in multiples of it
QUARTER = 32  # lanes that a warp can access
HALF = 16  # lanes of a cell of the shadow, and of a quarter that a product with 64 rows uses
Region = tuple[int, slice, slice]  # a program, lanes and columns


class TensorMemory:
    """The tensor memory of all programs: words uint32 [programs, 128 lanes, 512 columns].

    loads, stores: the numbers of `tcgen05.ld` and `tcgen05.st` that each warp of the machine has executed; they are the
    epochs of the clock agents of these operations. undefined: bool of each word, whether it holds what nothing wrote;
    None if no word that was read does.
    """

    def __init__(self, machine: State) -> None:
        programs, warps = machine.clusters * machine.program.cluster, machine.clusters * machine.warps_of_cluster
        self.machine = machine
        self.allocated: list[dict[int, int]] = [{} for _ in range(programs)]  # columns from each first column on
        self.smallest = np.full(programs, COLUMNS)  # the smallest allocation of each program so far
        self.relinquished = np.zeros(programs, bool)
        self.loads, self.stores = np.zeros(warps, np.int32), np.zeros(warps, np.int32)
        self.pipes = [TensorPipe(machine, self, cluster) for cluster in range(machine.clusters)]
        self._words: np.ndarray | None = None  # None until a program allocates
        self._shadow: Shadow | None = None
        self._waiting: dict[tuple[int, str], tuple[int, tuple[int, ...]]] = {}  # of pairs: a warp and its operands
        self.undefined: np.ndarray | None = None

    # ------------------------------------------------------------ allocation

    def allocate(self, program: int, columns: int) -> int:
        """The first column of new memory."""
        if columns not in (32, 64, 128, 256, 512):
            raise Fault(f"allocates {columns} columns, and not a power of two from 32 to 512")
        if self.relinquished[program]:
            raise Fault("allocates tensor memory after the program gave up the right to")
        if columns > self.smallest[program]:
            raise Fault(f"allocates {columns} columns after an allocation of {self.smallest[program]}")
        if self._shadow is None:
            self._words = np.zeros((len(self.allocated), LANES, COLUMNS), np.uint32)
            cells = (len(self.allocated), LANES // HALF, COLUMNS)  # every access has whole ones
            self._shadow = Shadow(cells, self.machine.clocks, "tensor memory", self._lose)
        mine = self.allocated[program]
        for first in range(COLUMNS - columns, -1, -_UNIT):
            if all(first + columns <= other or other + count <= first for other, count in mine.items()):
                mine[first] = columns
                self.smallest[program] = columns
                return first
        raise Fault(f"allocates {columns} columns, and {COLUMNS - sum(mine.values())} are free")

    def free(self, program: int, address: int, columns: int, rows: np.ndarray) -> None:
        """Free an allocation. rows: the clocks of the freeing warp, which must contain the end of all accesses."""
        if self.allocated[program].get(address) != columns:
            raise Fault(f"frees {columns} columns from {address:#x} on, which are no allocation")
        region, shadow = self.region(program, slice(0, LANES), address, columns), self._shadow
        assert shadow is not None
        try:
            shadow.writes_of_agent(_cells(region), rows, NOBODY, 0)  # then nobody has written it
        except Fault as fault:
            raise Fault(f"frees tensor memory in use: {fault}") from None
        del self.allocated[program][address]

    def meet(self, warp: int, instruction: str, operands: tuple[int, ...]) -> None:
        """Let a warp of the machine wait until a warp of the pair's other program executes the same instruction."""
        machine, program = self.machine, self.machine.program_of(warp)
        if machine.program.cluster % 2:
            raise Fault("an instruction for a pair of programs, which the cluster does not have")
        other, theirs = self._waiting.pop((program // 2, instruction), (-1, ()))
        if other < 0:
            self._waiting[program // 2, instruction] = warp, operands
            machine.block(warp)
            return
        if machine.program_of(other) == program:
            raise Fault("executed twice by a program before the other one of the pair")
        if theirs != operands:
            raise Fault(f"the programs of a pair disagree: {operands} here, and {theirs} there")
        machine.wake(other)

    def end(self) -> None:
        """Check that all programs have freed their memory."""
        left = [program for program, mine in enumerate(self.allocated) if mine]
        if left:
            raise Fault(f"{self.machine.program.name}: programs {left} did not free their tensor memory")

    @property
    def is_used(self) -> bool:
        """Whether any program has allocated."""
        return self._words is not None

    # ------------------------------------------------------------ accesses

    def region(self, program: int, lanes: slice, column: int, columns: int) -> Region:
        """Words of a program. Raises Fault for columns that are not allocated."""
        if not any(first <= column and column + columns <= first + count
                   for first, count in self.allocated[program].items()):  # fmt: skip
            raise Fault(f"columns {column} to {column + columns - 1} of tensor memory are not allocated")
        return program, lanes, slice(column, column + columns)

    def read(self, region: Region, rows: np.ndarray, agent: int, epoch: int) -> np.ndarray:
        """Words [lanes, columns], for an operation of a clock agent. rows: the clocks of its issue."""
        assert self._shadow is not None and self._words is not None
        self._shadow.reads_of_agent(_cells(region), rows, agent, epoch)
        return self._words[region]

    def write(
        self, region: Region, words: np.ndarray, undefined: np.ndarray | None, rows: np.ndarray, agent: int, epoch: int
    ) -> None:
        """Write words [lanes, columns]. undefined: which of them are; None for none. The others as of `read`."""
        assert self._shadow is not None and self._words is not None
        self._shadow.writes_of_agent(_cells(region), rows, agent, epoch)
        self._words[region] = words
        if undefined is not None:
            self._undefined()[region] = undefined
        elif self.undefined is not None:
            self.undefined[region] = False

    def undefined_at(self, region: Region) -> np.ndarray:
        """Which words of a region are undefined, [lanes, columns]."""
        return self._undefined()[region]

    def _undefined(self) -> np.ndarray:
        if self.undefined is None:
            self.undefined = np.zeros((len(self.allocated), LANES, COLUMNS), bool)
        return self.undefined

    def _lose(self, cells: Index, which: np.ndarray) -> None:
        """Record that cells are read, of which nothing wrote some."""
        self.machine.undefined.found("tensor memory")
        assert isinstance(cells, tuple)
        program, halves, columns = cells
        assert isinstance(halves, slice)
        lanes = slice(halves.start * HALF, halves.stop * HALF)
        self._undefined()[program, lanes, columns] |= np.repeat(which, HALF, axis=0)

    # ------------------------------------------------------------ warps

    def of_warp(self, warp: int, address: int, columns: int, lanes: int = QUARTER) -> Region:
        """The words of a warp of the machine at an address: 32 lanes of some columns, or 16 of them."""
        machine = self.machine
        lane, mine = address >> 16, QUARTER * (warp % machine.warps_of_program % 4)
        if lane not in range(mine, mine + QUARTER, lanes):
            raise Fault(f"a warp accesses tensor memory from lane {lane} on, and its lanes begin at {mine}")
        return self.region(machine.program_of(warp), slice(lane, lane + lanes), address & 0xFFFF, columns)

    def load(self, warp: int, region: Region) -> np.ndarray:
        """Words that a warp loads, [lanes, columns]. The warp's clock holds the load after `wait`."""
        machine, local = self.machine, self.machine.local_warp(warp)
        self.loads[warp] += 1
        rows = machine.clocks.of_tensor(machine.cluster_of_warp(warp), local, in_pipe=False)
        return self.read(region, rows, machine.clocks.tensor_loads(local), int(self.loads[warp]))

    def store(self, warp: int, region: Region, words: np.ndarray, undefined: np.ndarray | None) -> None:
        """Store a warp's words [lanes, columns], of which some are undefined, as of `write`.

        The warp's clock holds the store after `wait`.
        """
        machine, local = self.machine, self.machine.local_warp(warp)
        self.stores[warp] += 1
        rows = machine.clocks.of_tensor(machine.cluster_of_warp(warp), local, in_pipe=False)
        self.write(region, words, undefined, rows, machine.clocks.tensor_stores(local), int(self.stores[warp]))

    def wait(self, warp: int, loads: bool) -> None:
        """Record in a warp's clock that its accesses are complete: its loads if `loads`, otherwise its stores."""
        clocks, (cluster, local) = self.machine.clocks, divmod(warp, self.machine.warps_of_cluster)
        agent = clocks.tensor_loads(local) if loads else clocks.tensor_stores(local)
        clocks.know_tensor(cluster, local, agent, int((self.loads if loads else self.stores)[warp]))


def split_undefined(undefined: np.ndarray | None, parts: int) -> Sequence[np.ndarray | None]:
    """Parts of which words are undefined, all of them None for none."""
    return [None] * parts if undefined is None else np.split(undefined, parts)


def _cells(region: Region) -> Index:
    """The cells of the shadow: a column of half a quarter of the lanes each."""
    program, lanes, columns = region
    return program, slice(lanes.start // HALF, lanes.stop // HALF, (lanes.step or HALF) // HALF), columns


class TensorPipe:
    """The unit that executes the asynchronous `tcgen05` operations of a cluster, in order.

    Only operations that one thread issues are ordered: each warp that issues is an agent of its own. (Of several
    threads of a warp only commits are told apart.) agent, rows, epoch: of the operation that is executed, the warp's
    agent, the maximum of the clocks of the warp's issues so far, and the number of the operation.
    """

    def __init__(self, machine: State, memory: TensorMemory, cluster: int) -> None:
        self.machine, self.memory, self.cluster = machine, memory, cluster
        self.issued: Counter[int] = Counter()  # the number of each warp's operations
        self.issuers: dict[int, int] = {}  # and the lane of the latest one
        self._of_warp: dict[int, tuple[np.ndarray, int]] = {}  # rows and epoch
        # Of matrices in shared memory: the units of 16 bytes, and the cells.
        self._places: dict[tuple[int, Matrix, int, int, int, bool], tuple[np.ndarray, np.ndarray]] = {}
        self.agent, self.epoch, self.rows = NOBODY, 0, machine.clocks.of(cluster, 0)

    def begin(self, warp: int, rows: np.ndarray) -> None:
        """Begin an operation of a warp, after all that it issued before. rows: the clocks of its issue."""
        before, epoch = self._of_warp.get(warp, (rows, 0))
        self.agent, self.epoch, self.rows = self.machine.clocks.tensor_pipe(warp), epoch + 1, np.maximum(before, rows)
        self.rows[:, self.agent] = epoch
        self._of_warp[warp] = self.rows, self.epoch

    def program(self, rank: int) -> int:
        """The machine's index of a program of this cluster."""
        return self.cluster * self.machine.program.cluster + rank

    def read_matrix(
        self, rank: int, matrix: Matrix, rows: int, nbytes: int, used: int = CHUNK, across: bool = False
    ) -> np.ndarray:  # fmt: skip
        """The first bytes of each row of a matrix in shared memory, uint8 [rows, nbytes].

        used: the number of bytes of each chunk that the operation reads. across: whether K runs across the rows of
        bytes, as in a matrix that is transposed.
        """
        shared, key = self.machine.shared, (rank, matrix, rows, nbytes, used, across)
        if key not in self._places:
            chunks = matrix.chunks_across(rows, nbytes) if across else matrix.chunks(rows, nbytes)
            addresses = shared.address(np.array(rank), 0) + chunks
            flat = shared.flat(addresses, np.array(self.cluster), CHUNK).ravel()
            cells = flat[:, None] // shared.granule + np.arange(used // shared.granule)
            self._places[key] = flat // CHUNK, cells.ravel()
        units, cells = self._places[key]
        shared.shadow.reads_of_agent(cells, self.rows, self.agent, self.epoch)
        return in_units(shared.data, CHUNK).take(units).view(np.uint8).reshape(rows, nbytes)

    def read(self, rank: int, rows: int, address: int, columns: int) -> np.ndarray:
        """The words of the first rows of a matrix at an address in tensor memory, uint32 [rows, columns]."""
        return np.concatenate([self.memory.read(region, self.rows, self.agent, self.epoch)
                               for region in self._regions(rank, rows, address, columns)])  # fmt: skip

    def write(self, rank: int, address: int, words: np.ndarray, undefined: np.ndarray | None) -> None:
        """Write words uint32 [rows, columns] of a matrix at an address in tensor memory. undefined: of each word."""
        regions = self._regions(rank, len(words), address, words.shape[1])
        for region, part, which in zip(
            regions, np.split(words, len(regions)), split_undefined(undefined, len(regions)), strict=True
        ):
            self.memory.write(region, part, which, self.rows, self.agent, self.epoch)

    # ------------------------------------------------------------ what nothing wrote

    @property
    def has_undefined(self) -> bool:
        """Whether an operand may be undefined."""
        return self.machine.shared.undefined is not None or self.memory.undefined is not None

    def undefined_matrix(
        self, rank: int, matrix: Matrix, rows: int, nbytes: int, used: int = CHUNK, across: bool = False
    ) -> np.ndarray:  # fmt: skip
        """Which parts of each row are undefined, bool [rows, parts]: after `read_matrix`, whose arguments these are."""
        undefined = self.machine.shared.undefined
        _, cells = self._places[rank, matrix, rows, nbytes, used, across]
        found = np.zeros(len(cells), bool) if undefined is None else undefined[cells]
        return found.reshape(rows, -1)

    def undefined_words(self, rank: int, rows: int, address: int, columns: int) -> np.ndarray:
        """Which words of a matrix in tensor memory are undefined, bool [rows, columns]: after `read`."""
        regions = self._regions(rank, rows, address, columns)
        return np.concatenate([self.memory.undefined_at(region) for region in regions])

    def _regions(self, rank: int, rows: int, address: int, columns: int) -> list[Region]:
        """The lanes of a matrix's rows: 128 rows in all lanes, 64 rows in half of each quarter."""
        lane, column = address >> 16, address & 0xFFFF
        if lane not in (0, HALF) or (lane and rows != LANES // 2):
            raise Fault(f"a product or copy of {rows} rows in tensor memory from lane {lane} on")
        lanes = [slice(0, rows)] if rows != LANES // 2 else [
            slice(lane + first, lane + first + HALF) for first in range(0, LANES, QUARTER)]  # fmt: skip
        return [self.memory.region(self.program(rank), each, column, columns) for each in lanes]
