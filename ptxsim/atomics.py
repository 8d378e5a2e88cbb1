"""Atomic operations of threads on global and shared memory: `atom` and `red`.

Source: PTX ISA, "Parallel synchronization and communication instructions", `atom`, `red`; "Memory consistency model",
"Release and acquire patterns"; confidence high. Additions of floats are rounded to nearest even, those of float32 in
global memory without a flush of subnormal numbers; threads add in the order of their lanes, which hardware does not
promise. A release of the scope of the GPU or of the system orders its program for the programs that acquire it.
Not checked: that the threads of the acquiring program wait for the one that acquires.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.fault import Fault
from ptxsim.forms import Step, UnknownForm, address_reader, expect, form, reader, registers_of, type_of, writer
from ptxsim.fragment import Fragment
from ptxsim.global_memory import Threads, Update
from ptxsim.numbers import bf16_values, f16_values, halves, joined, to_bf16, to_f16
from ptxsim.parse import Instruction, Program

_Operation = Callable[..., Any]  # of the value in memory and the operands, arrays of one element


def _of_bits(decode: Callable, encode: Callable) -> _Operation:
    return lambda a, b: encode(decode(a).astype(np.float64) + decode(b))


def _of_pairs(add: _Operation) -> _Operation:
    return lambda a, b: joined(add(halves(a), halves(b)))


_ADD_F16, _ADD_BF16 = _of_bits(f16_values, to_f16), _of_bits(bf16_values, to_bf16)
_OPERATIONS: dict[str, _Operation] = {
    **{f"add.{kind}": np.add for kind in ("u32", "s32", "u64", "f32", "f64")},
    **{f"{name}.{kind}": ufunc for name, ufunc in (("min", np.minimum), ("max", np.maximum))
       for kind in ("s32", "u32", "s64", "u64")},
    **{f"{name}.{kind}": ufunc for kind in ("b32", "b64")
       for name, ufunc in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor))},
    "add.noftz.f16": _ADD_F16, "add.noftz.bf16": _ADD_BF16,
    "add.noftz.f16x2": _of_pairs(_ADD_F16), "add.noftz.bf16x2": _of_pairs(_ADD_BF16),
    **{f"exch.{kind}": lambda a, b: b for kind in ("b32", "b64")},
    **{f"cas.{kind}": lambda a, b, c: np.where(a == b, c, a) for kind in ("b32", "b64")},
}  # fmt: skip
_VECTORS = [f"add{noftz}.{vector}.{kind}" for noftz, vector, kind in (
    ("", "v2", "f32"), ("", "v4", "f32"), *((".noftz", vector, kind) for vector in ("v2", "v4", "v8")
                                            for kind in ("f16", "bf16")),
    *((".noftz", vector, kind) for vector in ("v2", "v4") for kind in ("f16x2", "bf16x2")),
)]  # fmt: skip
_ORDERS = ("relaxed", "acquire", "release", "acq_rel")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_SPACES = ("global", "shared", "shared::cta")
# The ISA's order of the words, and those that compilers write.
_WORDS = ("{sem}.{scope}.{space}", "{space}.{scope}.{sem}", "{space}.{sem}.{scope}")
_RELAXED = ("{sem}.{space}", "{space}")  # and of an atomic operation that says less


def _opcodes(instruction: str, operations: list[str], spaces: tuple[str, ...], every: tuple[str, ...]) -> list[str]:
    """The opcodes of operations, with all orders and scopes. every: the sequences of words."""
    prefixes = {words.format(sem=sem, scope=scope, space=space)
                for words in every for sem in _ORDERS for scope in _SCOPES for space in spaces}  # fmt: skip
    return [f"{instruction}.{prefix}.{operation}" for prefix in sorted(prefixes) for operation in operations]


def _orders(words: list[str]) -> tuple[bool, bool, bool]:
    """Whether an operation with these words has other programs in its scope, acquires, and releases for them."""
    wide = not {"cta", "cluster"} & set(words)
    return wide, wide and bool({"acquire", "acq_rel"} & set(words)), wide and bool({"release", "acq_rel"} & set(words))


@form(*_opcodes("ld", [f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)], ("global",), _WORDS))
def _load_in_order(instruction: Instruction, program: Program) -> Step:
    """The step of a relaxed load, or of one that acquires: it may read what atomic operations of others write."""
    expect(instruction, 2)
    words = instruction.opcode.split(".")
    address, (into,) = address_reader(instruction.operands[1], 64), registers_of(instruction.operands[0])
    write, dtype, (wide, acquires, _) = writer(into, words[-1]), type_of(words[-1])[1], _orders(words)

    def step(fragment: Fragment) -> None:
        machine, lanes = fragment.machine, fragment.lanes()
        threads, addresses = fragment.running_threads(), address(fragment)[lanes]
        clusters, warps = machine.cluster_of[threads], machine.warp_of[threads]
        for at, cluster in zip(addresses.tolist(), clusters.tolist(), strict=True) if wide else ():
            machine.memory.see(at, cluster + machine.first_cluster, acquires)
        found, undefined = machine.memory.load(addresses, dtype.itemsize, clusters + machine.first_cluster,
                                               Threads(machine.clocks, clusters, warps), relaxed=True)  # fmt: skip
        if undefined is not None:
            raise Fault("reads global memory that nothing wrote")
        values = np.zeros(fragment.shape, dtype)
        values[lanes] = found.view(dtype)[:, 0]
        write(fragment, values)

    return step


_WITHOUT_RESULT = [name for name in _OPERATIONS if not name.startswith(("exch", "cas"))]


@form(*_opcodes("atom", [*_OPERATIONS, *_VECTORS], _SPACES, _WORDS + _RELAXED),
      *_opcodes("red", [*_WITHOUT_RESULT, *_VECTORS], _SPACES, _WORDS + _RELAXED))  # fmt: skip
def _atomic(instruction: Instruction, program: Program) -> Step:
    """The step of an atomic operation: `atom` returns the previous values, `red` returns nothing."""
    words = instruction.opcode.split(".")
    kind = words[-1]
    count = int(words[-2][1:]) if words[-2].startswith("v") else 1
    name = f"{words[-3 if count > 1 else -2]}.{kind}"
    if "noftz" in words:
        name = f"add.noftz.{kind}"
    operation, returns, compares = _OPERATIONS[name], words[0] == "atom", name.startswith("cas")
    expect(instruction, 2 + returns + compares)
    *into, place, first = instruction.operands[: 2 + returns]
    results = [writer(each, kind) for each in registers_of(into[0])] if returns else []
    reads = [reader(each, kind) for each in registers_of(first)]
    reads += [reader(each, kind) for each in instruction.operands[2 + returns :]]
    if len(reads) != count + compares or (returns and len(results) != count):
        raise UnknownForm(f"not {count} registers")
    dtype, in_shared = type_of(kind)[1], any(word.startswith("shared") for word in words)
    address = address_reader(place, 32 if in_shared else 64)
    orders = _orders(words)

    def step(fragment: Fragment) -> None:
        machine, addresses = fragment.machine, address(fragment)
        values = [fragment.every(read(fragment)) for read in reads]
        before = np.zeros((count, *fragment.shape), dtype)
        for lane, warp in zip(map(int, fragment.lanes()), map(int, fragment.warp_of(fragment.lanes())), strict=True):
            at, size = int(addresses[lane]), dtype.itemsize * count
            cluster, local = machine.cluster_of_warp(warp), machine.local_warp(warp)
            if in_shared:
                there = machine.shared.update(at, size, cluster, local, lane % 32)
            else:
                update = Update(machine.clocks, cluster, local, cluster + machine.first_cluster, *orders)
                there = machine.memory.data[machine.memory.update(at, size, update)]
            content = there.view(dtype)
            before[:, lane] = content
            for i in range(count):
                operands = values[i : i + 1] if not compares else values
                content[i : i + 1] = operation(content[i : i + 1], *(each[lane : lane + 1] for each in operands))
        if returns:
            for write, column in zip(results, before, strict=True):
                write(fragment, column)

    return step
