"""The threads that execute one instruction together."""

from collections.abc import Iterable, Sequence

import numpy as np

from ptxsim.fault import Fault
from ptxsim.machine import Machine
from ptxsim.parse import Instruction, Operand, Register
from ptxsim.state import LANES


class Fragment:
    """Some warps at the same instruction, and those of their threads that are at it.

    warps: their indices in the machine, in order. threads: the threads of these warps, as an index into registers.
    active: bool [threads], whether they are at the instruction. running: whether they are active and execute it; the
    machine sets `running` from the instruction's predicate. whole: whether all threads are running.
    """

    def __init__(self, machine: Machine, warps: np.ndarray, active: np.ndarray) -> None:
        self.machine = machine
        self.warps = warps
        first, count = int(warps[0]) if len(warps) else 0, len(warps)
        self.threads: slice | np.ndarray
        if count == 0 or int(warps[-1]) - first == count - 1:
            self.threads = slice(first * LANES, (first + count) * LANES)
        else:
            self.threads = (warps[:, None] * LANES + np.arange(LANES)).ravel()
        self.active = active
        self.running = active
        self.all_active = bool(active.all())
        self.whole = self.all_active
        self.at = 0  # the index of the instruction

    @property
    def shape(self) -> tuple[int]:
        return self.active.shape

    @property
    def instruction(self) -> Instruction:
        return self.machine.program.instructions[self.at]

    def get(self, name: str) -> np.ndarray:
        """A register's values, with an entry for each thread of the fragment; read-only."""
        return self.machine.registers[name][self.threads]

    def put(self, name: str, values: np.ndarray) -> None:
        """Write a register of the running threads."""
        register = self.machine.registers[name]
        if name in self.machine.undefined:
            self._mark(name, np.zeros(self.shape, bool))
        if self.whole:
            register[self.threads] = values
        elif isinstance(self.threads, slice):
            np.copyto(register[self.threads], values, where=self.running)
        else:
            register[self.threads] = np.where(self.running, values, register[self.threads])

    # ------------------------------------------------------------ values that nothing wrote

    def undefined(self, operands: Sequence[Operand]) -> np.ndarray | None:
        """Whether the running threads' values of operands are undefined: bool [operands, threads]; None if none are."""
        undefined = self.machine.undefined
        if not undefined:
            return None
        found = np.zeros((len(operands), *self.shape), bool)
        for row, operand in zip(found, operands, strict=True):
            if isinstance(operand, Register) and operand.name in undefined:
                row[:] = undefined[operand.name][self.threads] & self.running
        return found if found.any() else None

    def mark(self, operand: Operand, undefined: np.ndarray) -> None:
        """Record whether the running threads' values of a result are undefined: bool [threads]."""
        if isinstance(operand, Register) and (undefined.any() or operand.name in self.machine.undefined):
            self._mark(operand.name, undefined)

    def mark_running(self, operand: Operand, undefined: np.ndarray) -> None:
        """`mark` with entries for the running threads only."""
        every = np.zeros(self.shape, bool)
        every[self.running] = undefined
        self.mark(operand, every)

    def _mark(self, name: str, undefined: np.ndarray) -> None:
        every = self.machine.undefined
        values = every.setdefault(name, np.zeros(every.threads, bool))
        values[self.threads] = np.where(self.running, undefined, values[self.threads])
        if not values.any():
            del every[name]

    def check_defined(self, names: Iterable[str]) -> None:
        """Raise Fault if a running thread's value of a register is undefined."""
        undefined = self.machine.undefined
        for name in sorted(undefined.keys() & names):
            if (undefined[name][self.threads] & self.running).any():
                raise undefined.fault(f"uses {name}, which holds what nothing wrote")

    def jump(self, lanes: np.ndarray, index: int) -> None:
        """Set the program counter of some threads. lanes: bool, with an entry for each thread of the fragment."""
        if isinstance(self.threads, slice):
            self.machine.pc[self.threads][lanes] = index
        else:
            self.machine.pc[self.threads[lanes]] = index

    def lanes(self) -> np.ndarray:
        """The indices of the running threads within the fragment."""
        return np.flatnonzero(self.running)

    def running_threads(self) -> np.ndarray:
        """The machine's indices of the running threads."""
        return (self.warps[:, None] * LANES + np.arange(LANES)).ravel()[self.running]

    def running_warps(self) -> np.ndarray:
        """The machine's indices of the warps of the running threads."""
        return self.warps[self.by_warp(self.running).any(1)]

    def whole_warps(self) -> np.ndarray:
        """Whether each warp runs, bool [warps]. Raises Fault if only a part of a warp does."""
        running = self.by_warp(self.running)
        if (running.any(1) != running.all(1)).any():
            raise Fault("executed by a part of a warp, and all of its threads have to")
        return np.asarray(running.any(1))

    def warp_of(self, lanes: np.ndarray) -> np.ndarray:
        """The machine's indices of the warps of these threads of the fragment."""
        return self.warps[lanes // LANES]

    def by_warp(self, values: np.ndarray) -> np.ndarray:
        """Values of all threads as an array [warps, 32]."""
        return self.every(values).reshape(-1, LANES)

    def every(self, values: np.ndarray) -> np.ndarray:
        """Values of all threads, or one value for all of them, as an array with an entry for each thread."""
        return values if values.shape == self.active.shape else np.broadcast_to(values, self.active.shape)

    def without(self, leaving: np.ndarray) -> "Fragment":
        """The fragment of the other warps. leaving: bool [warps]."""
        staying = ~leaving
        return Fragment(self.machine, self.warps[staying], self.active.reshape(-1, LANES)[staying].ravel())
