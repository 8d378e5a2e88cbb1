"""One PTX instruction, executed by the simulator's step for it, on a stand-in for the machine."""

from types import SimpleNamespace

import numpy as np

from ptxsim.forms import decode
from ptxsim.fragment import LANES, Fragment
from ptxsim.parse import parse
from ptxsim.state import CARRY

_BITS = {"%p": 1, "%b": 8, "%h": 16, "%r": 32, "%d": 64}
_DECLARED = " ".join(f".reg .{'pred' if bits == 1 else f'b{bits}'} {name}<16>;" for name, bits in _BITS.items())


def register(bits: int, index: int) -> str:
    """The name of a register of a width; 1 bit for a predicate."""
    return {bits: name for name, bits in _BITS.items()}[bits] + str(index)


def step_of(text: str):
    """The step of an instruction in PTX. Raises UnknownForm."""
    (step,) = decode(parse(f".entry kernel() .reqntid 32\n{{\n{_DECLARED}\n{text};\n}}"))
    return step


def execute(text: str, inputs: dict[str, np.ndarray], running: np.ndarray | None = None, lanes: int | None = None):
    """The registers after an instruction, unsigned or bool [lanes] by name.

    inputs: registers before it; all others are zero. running: bool [lanes], which threads execute it.
    """
    count = lanes or len(next(iter(inputs.values())))
    registers = {
        f"{name}{i}": np.zeros(count, bool if bits == 1 else f"u{bits // 8}")
        for name, bits in _BITS.items() for i in range(16)
    }  # fmt: skip
    registers[CARRY] = np.zeros(count, bool)
    for name, values in inputs.items():
        registers[name] = np.asarray(values).astype(registers[name].dtype)

    def special(name: str, threads: slice | np.ndarray) -> np.ndarray:
        return {"%tid.x": np.arange(count, dtype=np.uint64), "%laneid": np.arange(count, dtype=np.uint64) % LANES}[name]

    machine = SimpleNamespace(registers=registers, special=special, undefined={}, warps_of_cluster=count // LANES,
                              meet=lambda clusters, warps: None)  # fmt: skip
    fragment = Fragment(machine, np.arange(count // LANES), np.ones(count, bool))
    if running is not None:
        fragment.running, fragment.whole = running, bool(running.all())
    with np.errstate(all="ignore"):
        assert step_of(text)(fragment) is None
    return registers
