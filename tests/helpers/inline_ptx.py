"""Inline PTX of `templates.device`, executed by the simulator's steps on arrays with an entry for each thread.

There is no memory. Where the instruction of a GPU may be inexact (rcp.approx), the result is exact unless told
otherwise.
"""

import functools
import re
from types import SimpleNamespace

import numpy as np

from ptxsim.forms import decode
from ptxsim.fragment import LANES, Fragment
from ptxsim.parse import Instruction, Program, operand_registers, parse
from ptxsim.state import register_dtype

U32 = np.uint32


class Threads:
    """Threads that execute a text together, an instruction after the other. registers: [threads] by name.

    widths: bits of the operands $0, $1, ... inputs: of those behind the outputs, of any dtype and one shape.
    """

    def __init__(self, text: str, widths: tuple[int, ...], inputs: list[np.ndarray]) -> None:
        self.program, self.steps = decoded(text, widths)
        self.count = inputs[0].size
        threads = -(-self.count // LANES) * LANES
        bits = {each.name: each.bits for one in self.program.instructions for each in operand_registers(one)}
        bits |= {f"io{i}": width for i, width in enumerate(widths)}
        self.registers = {name: np.zeros(threads, register_dtype(each)) for name, each in bits.items()}
        self.outputs = len(widths) - len(inputs)
        for i, x in enumerate(inputs):
            flat = np.ascontiguousarray(x).ravel()
            self.registers[f"io{self.outputs + i}"][: self.count] = flat.view(f"u{flat.itemsize}")
        machine = SimpleNamespace(
            registers=self.registers, special=self.special, undefined={}, warps_of_cluster=threads // LANES
        )
        self.fragment = Fragment(machine, np.arange(threads // LANES), np.ones(threads, bool))

    def run(self) -> list[np.ndarray]:
        """The outputs, [threads] in unsigned integers of their widths."""
        with np.errstate(all="ignore"):
            for one, step in zip(self.program.instructions, self.steps, strict=True):
                guard = self.fragment.active
                if one.guard is not None:
                    guard = self.registers[one.guard.name] ^ one.guard.negated
                self.fragment.running, self.fragment.whole = guard, bool(guard.all())
                self.execute(one, step)
        return [self.registers[f"io{i}"][: self.count] for i in range(self.outputs)]

    def execute(self, one: Instruction, step) -> None:
        """Execute an instruction for the fragment's running threads."""
        step(self.fragment)

    def special(self, name: str, threads: slice) -> np.ndarray:
        raise NotImplementedError(name)


@functools.lru_cache(maxsize=64)
def decoded(text: str, widths: tuple[int, ...]) -> tuple[Program, list]:
    """The program of an inline text, and its steps."""
    declared = "".join(f".reg .b{bits} io{i}; " for i, bits in enumerate(widths))
    body = re.sub(r"\$(\d+)", r"io\1", text)
    program = parse(f".entry inline() .reqntid 32\n{{\n{declared}\n{body}\n}}")
    return program, decode(program)


class _Inexact(Threads):
    """error: of rcp.approx, in units of the last place."""

    error = 0

    def execute(self, one: Instruction, step) -> None:
        super().execute(one, step)
        if self.error and one.opcode == "rcp.approx.ftz.f32":
            exact = self.registers[one.operands[0].name]
            ordinary = np.isfinite(exact.view(np.float32)) & (exact << U32(1) != 0)
            exact[:] = np.where(ordinary, exact + U32(self.error % 2**32), exact)


def play(ptx: str, outputs: int, inputs: list[np.ndarray], reciprocal_error: int = 0) -> list[np.ndarray]:
    """The outputs $0, $1, ... of an inline PTX text, as uint32 arrays.

    inputs: arrays of 32-bit numbers, all of one shape, for the operands that follow the outputs.
    reciprocal_error: of rcp.approx, in units of the last place.
    """
    threads = _Inexact(ptx, (32,) * (outputs + len(inputs)), inputs)
    threads.error = reciprocal_error
    return [found.reshape(inputs[0].shape) for found in threads.run()]
