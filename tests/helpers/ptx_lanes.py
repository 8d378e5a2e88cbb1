"""Inline PTX of kernels written one lane at a time, in Triton's interpreter: shared memory, copies, `mma.sync`.

`install()` gives the interpreter's builder what it lacks, `create_inline_asm`. Every instruction is done for all lanes
of a program before the next one, so that copies have arrived at once and barriers have nothing to wait for: what this
shows is which bytes go where and what is computed of them, not that a kernel waits for what it reads.
"""

from types import SimpleNamespace

import numpy as np

from ptxsim.forms import registers_of
from ptxsim.parse import Address, Instruction, Register
from tests.helpers.inline_ptx import Threads

_SHARED = np.zeros(2**16, np.uint8)  # of the program that runs
_BASE = 256  # address of `buffers` there
_WIDTHS = {"h": 16, "r": 32, "f": 32, "l": 64}  # bits of an operand, by its constraint


def install() -> None:
    """Let Triton's interpreter run inline PTX; for a process that does nothing else with it."""
    from triton.language import core
    from triton.runtime import interpreter

    def create_inline_asm(self, text, constraints, values, types, is_pure, pack):
        widths = tuple(_WIDTHS[each.strip("=& ")] for each in constraints.split(","))
        shape = np.broadcast_shapes(*(value.data.shape for value in values))
        found = _Lanes(text, widths, [np.broadcast_to(value.data, shape) for value in values]).run()
        made = [handle(x.reshape(shape), kind.scalar) for x, kind in zip(found, types, strict=True)]
        return SimpleNamespace(get_result=made.__getitem__)

    def handle(bits, kind):
        dtype = np.dtype(interpreter._get_np_dtype(kind))
        return interpreter.TensorHandle(bits.astype(f"u{dtype.itemsize}").view(dtype), kind)

    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
    core.tuple.__add__ = lambda self, other: core.tuple([*self, *other])  # of either kind of tuple
    core.tuple.__radd__ = lambda self, other: core.tuple([*other, *self])


class _Lanes(Threads):
    """The lanes of a program, and its shared memory."""

    def execute(self, one: Instruction, step) -> None:
        if one.opcode.startswith("cp.async.c"):
            if "shared.global" in one.opcode:
                self._copy(*one.operands)
        elif one.opcode.startswith("ld.shared"):
            for at, register in self._places(*one.operands[::-1]):
                found = np.ascontiguousarray(_SHARED[at]).view(f"u{at.shape[1]}")[:, 0]
                self.registers[register.name][self.fragment.running] = found
        elif one.opcode.startswith("st.shared"):
            for at, register in self._places(*one.operands):
                words = np.ascontiguousarray(self.registers[register.name][self.fragment.running])
                _SHARED[at] = words.view(np.uint8).reshape(at.shape)
        elif not one.opcode.startswith(("bar.", "cp.async.wait")):
            super().execute(one, step)

    def special(self, name: str, threads: slice) -> np.ndarray:
        """The address of `buffers`, filled with another program's bytes."""
        assert name == "buffers"
        _SHARED[:] = 0xFF
        return np.full(self.fragment.shape, _BASE)

    def _places(self, address: Address, operand) -> list[tuple[np.ndarray, Register]]:
        """The bytes [threads that run, bytes] of each register of a vector."""
        parts = registers_of(operand)
        nbytes = parts[0].bits // 8
        first = self._address(address)[self.fragment.running, None] + np.arange(nbytes)
        return [(first + nbytes * i, register) for i, register in enumerate(parts)]

    def _address(self, address: Address) -> np.ndarray:
        return self.registers[address.base.name].astype(np.int64) + address.offset

    def _copy(self, to: Address, source: Address, size, there: Register | None = None) -> None:
        """Bytes from global to shared memory; those beyond the `there` first ones are zeros."""
        from triton._C.libtriton import interpreter

        byte, wanted = np.arange(size.bits), self.fragment.running[:, None]
        inside = np.broadcast_to(True if there is None else byte < self.registers[there.name][:, None],
                                 (len(wanted), size.bits))  # fmt: skip
        found = interpreter.load((self._address(source)[:, None] + byte).astype(np.uint64), inside & wanted,
                                 np.zeros(inside.shape, np.uint8), np.dtype(np.uint8))  # fmt: skip
        _SHARED[(self._address(to)[:, None] + byte)[wanted[:, 0]]] = found[wanted[:, 0]]
