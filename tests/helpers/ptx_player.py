"""Inline PTX played in NumPy on arrays of registers: the few instructions that `templates.device` takes.

Registers are arrays of uint32 or, of the type .b64, of uint64. Where the instruction of a GPU may be inexact
(rcp.approx), the player's is exact unless told otherwise.
"""

import re

import numpy as np

from ptxsim import numbers
from ptxsim.numbers import fma32, lop3, prmt

F32, U32, U64 = np.float32, np.uint32, np.uint64


def f16(words):
    """uint32 [n] of two fp16 numbers -> float64 [n, 2], the lower half first."""
    return numbers.f16_values(numbers.halves(words)).astype(np.float64)


def pack_f16(values):
    """Numbers [n, 2], rounded to fp16 -> uint32 [n]; NaN gives 0x7FFF, as from the instructions."""
    return numbers.joined(numbers.to_f16(values))


def bf16(words):
    """uint32 [n] of two bf16 numbers -> float32 [n, 2], the lower half first."""
    return numbers.bf16_values(numbers.halves(words))


def pack_bf16(values):
    """float64 [n, 2], rounded once to bf16 -> uint32 [n]."""
    return numbers.joined(numbers.to_bf16(values))


def f32x2(words):
    """uint64 [n] -> float64 [n, 2]."""
    return numbers.halves(words).view(F32).astype(np.float64)


def e2m1_stochastic(values, noise):
    """E2M1 codes of numbers that are float32, as `numbers.e2m1_stochastic`."""
    return numbers.e2m1_stochastic(values.astype(F32), noise)


def fp8_values(words):
    """uint32 [n] of two E4M3 codes -> float64 [n, 2], the lower one first."""
    return numbers.E4M3[np.stack([words & U32(255), words >> U32(8) & U32(255)], -1)].astype(np.float64)


def play(ptx: str, outputs: int, inputs: list[np.ndarray], reciprocal_error: int = 0) -> list[np.ndarray]:
    """The outputs $0, $1, ... of an inline PTX text, as uint32 arrays.

    inputs: arrays of 32-bit numbers, all of one shape, for the operands that follow the outputs.
    reciprocal_error: of rcp.approx, in units of the last place.
    """
    registers = {f"${outputs + i}": np.ascontiguousarray(x).view(U32) for i, x in enumerate(inputs)}
    shape = registers[f"${outputs}"].shape

    def get(name):
        if name.startswith("0f"):
            name = "0x" + name[2:]
        if not name[0].isdigit():
            return registers[name]
        return np.full(shape, int(name, 0), U32 if int(name, 0) < 2**32 else U64)

    def single(name):
        return get(name).view(F32).astype(np.float64)

    # Operands in braces are vectors, all other braces are scopes.
    ptx = re.sub(r"\{([^{};]*)\}", lambda found: "<" + found[1].replace(",", "|") + ">", ptx)
    for line in re.sub(r"[{}]|\.reg[^;]*;", "", ptx).split(";"):
        if not line.strip():
            continue
        op, rest = line.strip().split(" ", 1)
        wanted = None
        if op[0] == "@":
            wanted = registers[op[1:]]
            op, rest = rest.split(" ", 1)
        into, *args = [word.strip() for word in rest.split(",")]
        before = registers.get(into)
        with np.errstate(all="ignore"):
            if op in ("mov.b32", "mov.b64") and into[0] == "<":
                size = {"mov.b64": 64, "mov.b32": 32}[op] // len(_parts(into))
                for i, part in enumerate(_parts(into)):
                    registers[part] = (get(args[0]) >> type(get(args[0])[0])(size * i)).astype(U32) & U32(2**size - 1)
            elif op in ("mov.b32", "mov.b64") and args[0][0] == "<":
                parts = [get(part) for part in _parts(args[0])]
                size, dtype = (32, U64) if op == "mov.b64" else (32 // len(parts), U32)
                joined = (part.astype(dtype) << dtype(size * i) for i, part in enumerate(parts))
                registers[into] = np.bitwise_or.reduce(list(joined))
            elif op == "mov.b64":
                registers[into] = get(args[0]).astype(U64)
            elif op == "rcp.approx.ftz.f32":
                registers[into] = _reciprocal(single(args[0]), reciprocal_error)
            else:
                registers[into] = _step(op, args, get, single)
            if wanted is not None:
                registers[into] = np.where(wanted, registers[into], before)
    return [registers[f"${i}"] for i in range(outputs)]


def _parts(vector):
    return [part.strip() for part in vector.strip("<>").split("|")]


def _reciprocal(value, error):
    exact = (1 / value).astype(F32)
    exact = np.where(np.abs(exact) < np.finfo(F32).tiny, np.copysign(F32(0), exact), exact)
    bits = exact.view(U32)
    ordinary = np.isfinite(exact) & (exact != 0)
    return np.where(ordinary, bits + U32(error % 2**32), bits).astype(U32)


def _rounded_down(a, b, c):
    """float32 a * b + c of a c above 2^23 and smaller products, given in float64, rounded towards minus infinity."""
    return np.floor(a * b + c).astype(F32)


def _convert(op, args, get, single):
    """The conversions. (Of two, the upper one comes first.)"""
    if op in ("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32"):
        return (pack_f16 if ".f16x2" in op else pack_bf16)(np.stack([single(args[1]), single(args[0])], -1))
    if op == "cvt.u32.u16":
        return get(args[0]) & U32(0xFFFF)
    if op == "cvt.f32.f16":
        return f16(get(args[0]))[:, 0].astype(F32).view(U32)
    if op == "cvt.rn.f16x2.e4m3x2":
        return pack_f16(fp8_values(get(args[0])))
    if op == "cvt.rn.f16x2.e2m1x2":
        return pack_f16(numbers.E2M1[np.stack([get(args[0]) & U32(15), get(args[0]) >> U32(4)], -1)])
    if op == "cvt.rs.satfinite.e2m1x4.f32":
        word = get(args[1])
        codes = (
            e2m1_stochastic(single(part), word >> U32(8 * i) & U32(255)).astype(U32) << U32(4 * i)
            for i, part in enumerate(reversed(_parts(args[0])))
        )
        return np.bitwise_or.reduce(list(codes))
    if op == "cvt.rp.satfinite.ue8m0x2.f32":
        return numbers.ue8m0(get(args[1]).view(F32)).astype(U32)
    _, mode, _, into, source = op.split(".")
    assert mode == "rn"
    values = bf16(get(args[0])) if source == "bf16x2" else np.stack([single(args[1]), single(args[0])], -1)
    encode, bits = {"e2m1x2": (numbers.e2m1, 4), "e4m3x2": (numbers.e4m3, 8), "e5m2x2": (numbers.e5m2, 8)}[into]
    codes = encode(values.astype(F32)).astype(U32)
    return codes[..., 0] | codes[..., 1] << U32(bits)


def _step(op, args, get, single):
    """The result of one instruction. get, single: an operand's register as uint32, and as a float32 in float64."""
    base = op.split(".")[0]
    if base == "mov":
        return get(args[0])
    if op == "rcp.rn.f32":
        return (1 / single(args[0])).astype(F32).view(U32)
    if op == "setp.gt.f32":
        return single(args[0]) > single(args[1])
    if op == "cvt.ftz.sat.f32.f32":
        return np.where(single(args[0]) > 0, np.minimum(single(args[0]), 1), 0).astype(F32).view(U32)
    if base == "cvt":
        return _convert(op, args, get, single)
    if base == "shl":
        return get(args[0]) << U32(int(args[1], 0))
    if base == "shr":
        return get(args[0]) >> U32(int(args[1], 0))
    if base == "and":
        return get(args[0]) & get(args[1])
    if op == "add.u32":
        return get(args[0]) + get(args[1])
    if op == "mul.wide.u32":
        return get(args[0]).astype(U64) * get(args[1]).astype(U64)
    if base == "prmt":
        return prmt(get(args[0]), get(args[1]), int(args[2], 0))
    if base == "lop3":
        return lop3(*map(get, args[:3]), int(args[3], 0))
    if op in ("mul.rn.f32", "mul.ftz.f32", "neg.f32"):
        return (np.prod([single(arg) for arg in args], 0) * (-1 if base == "neg" else 1)).astype(F32).view(U32)
    if op == "abs.f32":
        return get(args[0]) & U32(0x7FFFFFFF)
    if op in ("max.NaN.f32", "min.NaN.f32"):
        return (np.maximum if base == "max" else np.minimum)(*map(single, args)).astype(F32).view(U32)
    if ".NaN.xorsign.abs." in op:
        unpack, pack = (bf16, pack_bf16) if op.endswith("bf16x2") else (f16, pack_f16)
        a, b = (unpack(get(arg)).astype(np.float64) for arg in args)
        magnitude = (np.maximum if base == "max" else np.minimum)(np.abs(a), np.abs(b))
        return pack(np.where(np.signbit(a) ^ np.signbit(b), -1.0, 1.0) * magnitude)
    if op == "max.xorsign.abs.f32":
        a, b = single(args[0]), single(args[1])
        sign = np.signbit(a) ^ np.signbit(b)
        return (np.where(sign, -1.0, 1.0) * np.fmax(np.abs(a), np.abs(b))).astype(F32).view(U32)
    if op in ("fma.rn.f32", "fma.rn.ftz.f32", "fma.rn.ftz.sat.f32"):
        total = fma32(*map(single, args))
        return (np.where(total > 0, np.minimum(total, F32(1)), F32(0)) if ".sat" in op else total).view(U32)
    if op in ("sub.f32", "add.f32"):
        a, b = map(single, args)
        return fma32(np.ones_like(a), a, b if base == "add" else -b).view(U32)
    if op == "fma.rm.ftz.f32":
        return _rounded_down(*map(single, args)).view(U32)
    if op in ("ex2.approx.f32", "ex2.approx.ftz.f32"):
        power = np.exp2(single(args[0])).astype(F32)
        return np.where((power < np.finfo(F32).tiny) & (".ftz" in op), F32(0), power).view(U32)
    if op.endswith(".f32x2"):
        a, b, *c = (f32x2(get(arg).astype(U64)) for arg in args)
        if base == "mul":
            pairs = (a * b).astype(F32)
        elif ".rm." in op:
            pairs = _rounded_down(a, b, *c)
        else:
            pairs = fma32(a, b, *c) if c else fma32(np.ones_like(a), a, b if base == "add" else -b)
        return np.ascontiguousarray(pairs).view(U64)[..., 0]
    if op in ("fma.rn.bf16x2", "mul.rn.bf16x2"):
        a, b, *c = (bf16(get(arg)).astype(np.float64) for arg in args)
        return pack_bf16(a * b + c[0] if c else a * b)  # exact, because the product or what is added is always 0
    values = [f16(get(arg)) for arg in args]
    calls = {
        "abs.f16x2": np.abs, "max.f16x2": np.fmax, "min.f16x2": np.fmin,
        "mul.rn.f16x2": np.multiply, "fma.rn.f16x2": lambda a, b, c: a * b + c,
    }  # fmt: skip
    return pack_f16(calls[op](*values))
