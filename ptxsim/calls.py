"""Calls of functions: the device assert, which ends the launch with its text.

Source: PTX ISA, "Parameter state space", `call`; CUDA, `__assertfail(message, file, line, function, size)`;
confidence high. Functions of the module itself are not supported.
"""

import numpy as np

from ptxsim.fault import Fault
from ptxsim.forms import Step, UnknownForm, expect, form, reader
from ptxsim.fragment import Fragment
from ptxsim.global_memory import GlobalMemory
from ptxsim.parse import Address, Instruction, Label, Program, Symbol, Vector


@form(*[f"st.param.b{bits}" for bits in (8, 16, 32, 64)])
def _store_parameter(instruction: Instruction, program: Program) -> Step:
    """The step that stores a parameter of a call, as 64 bits of each thread."""
    expect(instruction, 2)
    place, value = instruction.operands
    if not isinstance(place, Address) or not isinstance(place.base, Symbol) or place.offset:
        raise UnknownForm(f"not a parameter of a call: {place}")
    name, read = place.base.name, reader(value, instruction.opcode.split(".")[-1])

    def step(fragment: Fragment) -> None:
        machine = fragment.machine
        values = machine.passed.setdefault(name, np.zeros(len(machine.pc), np.uint64))
        values[fragment.running_threads()] = fragment.every(read(fragment))[fragment.running]

    return step


@form("call", "call.uni")
def _call(instruction: Instruction, program: Program) -> Step:
    function, *parameters = instruction.operands
    if function != Label("__assertfail") or len(parameters) != 1 or not isinstance(parameters[0], Vector):
        raise UnknownForm(f"a call of {getattr(function, 'name', function)}")
    names = [each.name for each in parameters[0].parts if isinstance(each, Symbol)]

    def step(fragment: Fragment) -> None:
        machine, thread = fragment.machine, int(fragment.running_threads()[0])
        message, file, line, name, _ = (int(machine.passed[each][thread]) for each in names)
        where = f"{_text(machine.memory, file)}:{line}, in {_text(machine.memory, name)}"
        raise Fault(f"device assert: {_text(machine.memory, message)} ({where})")

    return step


@form("trap")
def _trap(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 0)

    def step(fragment: Fragment) -> None:
        raise Fault("the kernel ends the launch by trap")

    return step


def _text(memory: GlobalMemory, address: int) -> str:
    """The text in global memory that ends with a zero."""
    return memory.read(address, 4096).tobytes().partition(b"\0")[0].decode()
