"""Inline PTX played in NumPy on arrays of registers: the few instructions that rounding in `templates.device` takes."""

import re

import numpy as np

F32, F16, U32 = np.float32, np.float16, np.uint32


def f16(words):
    """uint32 [n] of two fp16 numbers -> float64 [n, 2], the lower half first."""
    return np.ascontiguousarray(words).view(F16).reshape(-1, 2).astype(np.float64)


def pack_f16(values):
    """Numbers [n, 2], rounded to fp16 -> uint32 [n]; NaN gives 0x7FFF, as from the instructions."""
    halves = np.where(np.isnan(values), F16("nan"), values.astype(F16)).view(np.uint16)
    halves = np.where(np.isnan(values), np.uint16(0x7FFF), halves).astype(U32)
    return halves[..., 0] | halves[..., 1] << U32(16)


def prmt(a, b, selector):
    """As the instruction: bytes of a and b; the top bit of a nibble asks for the byte's sign in all its bits."""
    source = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = (source >> np.uint64(8 * (nibble & 7)) & np.uint64(255)).astype(U32)
        if nibble & 8:
            byte = np.where(byte & U32(0x80), U32(255), U32(0))
        result |= byte << U32(8 * i)
    return result


def lop3(a, b, c, table):
    """As the instruction: each bit of the result is the bit of `table` that the bits of a, b and c number."""
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            term = [x if i >> k & 1 else ~x for x, k in ((a, 2), (b, 1), (c, 0))]
            result |= term[0] & term[1] & term[2]
    return result


def play(ptx: str, outputs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs $0, $1, ... of an inline PTX text, as uint32 arrays.

    inputs: arrays of 32-bit numbers, all of one shape, for the operands that follow the outputs.
    """
    registers = {f"${outputs + i}": np.ascontiguousarray(x).view(U32) for i, x in enumerate(inputs)}
    shape = registers[f"${outputs}"].shape

    def get(name):
        if name.startswith("0f"):
            name = "0x" + name[2:]
        return np.full(shape, int(name, 0), U32) if name[0].isdigit() else registers[name]

    def single(name):
        return get(name).view(F32).astype(np.float64)

    for line in re.sub(r"[{}]|\.reg[^;]*;", "", ptx).split(";"):
        if not line.strip():
            continue
        op, rest = line.strip().split(" ", 1)
        into, *args = [word.strip() for word in rest.split(",")]
        with np.errstate(all="ignore"):
            registers[into] = _step(op, args, get, single)
    return [registers[f"${i}"] for i in range(outputs)]


def _step(op, args, get, single):
    """The result of one instruction. get, single: an operand's register as uint32, and as a float32 in float64."""
    base = op.split(".")[0]
    if base == "mov":
        return get(args[0])
    if base == "shl":
        return get(args[0]) << U32(int(args[1], 0))
    if base == "shr":
        return get(args[0]) >> U32(int(args[1], 0))
    if base == "and":
        return get(args[0]) & get(args[1])
    if base == "prmt":
        return prmt(get(args[0]), get(args[1]), int(args[2], 0))
    if base == "lop3":
        return lop3(*map(get, args[:3]), int(args[3], 0))
    if op in ("mul.rn.f32", "neg.f32"):
        return (np.prod([single(arg) for arg in args], 0) * (-1 if base == "neg" else 1)).astype(F32).view(U32)
    if op == "cvt.rn.f16x2.f32":  # the upper half comes first
        return pack_f16(np.stack([single(args[1]), single(args[0])], -1))
    if op == "max.xorsign.abs.f32":
        a, b = single(args[0]), single(args[1])
        sign = np.signbit(a) ^ np.signbit(b)
        return (np.where(sign, -1.0, 1.0) * np.fmax(np.abs(a), np.abs(b))).astype(F32).view(U32)
    if op == "fma.rn.f32":
        a, b, c = map(single, args)
        exact = a * b
        rounded = (exact + c).astype(F32)
        # What underflows keeps its sign; float64 has no product of two float32 underflow.
        return np.where((rounded == 0) & (exact != 0), np.copysign(F32(0), exact), rounded).astype(F32).view(U32)
    values = [f16(get(arg)) for arg in args]
    calls = {
        "abs.f16x2": np.abs, "max.f16x2": np.fmax, "min.f16x2": np.fmin,
        "mul.rn.f16x2": np.multiply, "fma.rn.f16x2": lambda a, b, c: a * b + c,
    }  # fmt: skip
    return pack_f16(calls[op](*values))
