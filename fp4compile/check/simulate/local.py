"""Local memory: arrays of each thread's own.

Source: PTX ISA, "Local state space"; confidence high. Compilers put arrays there that are indexed at run time, as the
reduction of large arguments of sine and cosine does.
"""

import numpy as np

from fp4compile.check.simulate import forms
from fp4compile.check.simulate.fault import Fault
from fp4compile.check.simulate.forms import Step, address_reader, expect, form, reader, registers_of, writer
from fp4compile.check.simulate.fragment import Fragment
from fp4compile.check.simulate.parse import Instruction, Program

_START = 1024  # the address of the first array: no array begins at 0
_KINDS = ("b32", "b64")


class LocalMemory:
    """The arrays of all threads. addresses: of each array, by its name; the same for every thread.

    data: uint8 [threads, bytes]. written: which bytes hold a value.
    """

    def __init__(self, threads: int, arrays: dict[str, int]) -> None:
        self.addresses: dict[str, int] = {}
        end = 0
        for name, nbytes in arrays.items():
            self.addresses[name] = _START + end
            end += -(-nbytes // 16) * 16
        self.data = np.full((threads, end), 0xEE, np.uint8)
        self.written = np.zeros((threads, end), bool)

    def load(self, threads: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """The bytes at aligned addresses [threads]: uint8 [threads, size]."""
        rows, columns = self._at(threads, addresses, size)
        if not self.written[rows, columns].all():
            raise Fault("reads local memory that the thread has not written")
        return self.data[rows, columns]

    def store(self, threads: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
        """Write bytes uint8 [threads, size] at aligned addresses [threads]."""
        rows, columns = self._at(threads, addresses, values.shape[1])
        self.data[rows, columns] = values
        self.written[rows, columns] = True

    def _at(self, threads: np.ndarray, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        start = addresses - _START
        if (start % size).any() or start.min() < 0 or start.max() + size > self.data.shape[1]:
            raise Fault(f"an access outside of all arrays in local memory, or not aligned to {size} bytes")
        return threads[:, None], start[:, None] + np.arange(size)


def _threads(fragment: Fragment) -> np.ndarray:
    """The machine's indices of the running threads."""
    return np.arange(len(fragment.machine.pc))[fragment.threads][fragment.running]


@form(*[f"ld.local.{kind}" for kind in _KINDS])
def _load(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    kind = instruction.opcode.split(".")[-1]
    (into,) = registers_of(instruction.operands[0])
    write, address = writer(into, kind), address_reader(instruction.operands[1], 32)
    dtype = forms.constant(0, kind).dtype

    def step(fragment: Fragment) -> None:
        found = fragment.machine.local.load(_threads(fragment), address(fragment)[fragment.running], dtype.itemsize)
        values = np.zeros(fragment.shape, dtype)
        values[fragment.running] = found.view(dtype)[:, 0]
        write(fragment, values)

    return step


@form(*[f"st.local.{kind}" for kind in _KINDS])
def _store(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    kind = instruction.opcode.split(".")[-1]
    (value,) = registers_of(instruction.operands[1])
    read, address = reader(value, kind), address_reader(instruction.operands[0], 32)

    def step(fragment: Fragment) -> None:
        values = np.ascontiguousarray(np.broadcast_to(read(fragment), fragment.shape)[fragment.running])
        rows = values.reshape(-1, 1).view(np.uint8)
        fragment.machine.local.store(_threads(fragment), address(fragment)[fragment.running], rows)

    return step
