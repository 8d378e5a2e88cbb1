"""The text of a kernel that multiplies matrices in the registers of a warp, and their operands."""

import re

import numpy as np

from ptxsim.catalogue import known_forms

FORMS = sorted(opcode for opcode in known_forms() if opcode.startswith("mma."))


PLAIN = [one for one in FORMS if "block_scale" not in one and "s8" not in one]


SCALED = [one for one in FORMS if "block_scale" in one]


MXF8 = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"


FIELDS = {"e2m1": (2, 1), "e2m3": (2, 3), "e3m2": (3, 2), "e4m3": (4, 3), "e5m2": (5, 2), "f16": (5, 10),
          "bf16": (8, 7), "tf32": (8, 23), "ue4m3": (4, 3)}  # fmt: skip


def value(code: int, kind: str) -> float:
    """The number of a code, without infinities and NaN."""
    exponent, mantissa = FIELDS[kind]
    field, rest = divmod(code & 2 ** (exponent + mantissa) - 1, 2**mantissa)
    sign = -1 if code >> exponent + mantissa else 1
    return sign * (rest + 2**mantissa * (field > 0)) * 2.0 ** (max(field, 1) - 2 ** (exponent - 1) + 1 - mantissa)


def codes_of(kind: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Codes of numbers whose magnitude is below 8, none of them tiny."""
    exponent, mantissa = FIELDS[kind]
    every = np.arange(2 ** (exponent + min(mantissa, 3))) << max(mantissa - 3, 0)
    found = [code for code in every.tolist() if code == 0 or 0.125 <= value(code, kind) < 8]
    signs = generator.integers(0, 2, shape) << exponent + mantissa if kind[0] != "u" else 0
    return generator.choice(np.array(found, np.int64), shape) | signs


def packed(codes: np.ndarray, lanes_of: str, width: int, shift: int) -> np.ndarray:
    """The registers [32, 4] of A [16, K], or [32, 2] of B [8, K]. width: bits of an element's place."""
    per = 32 // width
    found = np.zeros((32, 4 if lanes_of == "a" else 2), np.int64)
    for (row, k), code in np.ndenumerate(codes):
        half = k // (4 * per)
        register = row // 8 + 2 * half if lanes_of == "a" else half
        found[4 * (row % 8) + k % (4 * per) // per, register] |= code << (k % per * width + shift)
    return found.astype(np.uint32)


def body(opcode: str, selectors: str = "") -> str:
    loads = "".join(f"    ld.global.b32 %r{20 + i}, [%rd1+{4 * i}];\n" for i in range(12))
    return f"""
    ld.param.b64 %rd1, [p0];
    ld.param.b64 %rd2, [p1];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 20;
    mul.wide.u32 %rd3, %r1, 48;
    add.u64 %rd1, %rd1, %rd3;
    mul.wide.u32 %rd3, %r1, 16;
    add.u64 %rd2, %rd2, %rd3;
{loads}    {opcode} {{%r40, %r41, %r42, %r43}}, {{%r20, %r21, %r22, %r23}}, {{%r24, %r25}}, {{%r26, %r27, %r28, %r29}}
        {selectors};
    st.global.v4.b32 [%rd2], {{%r40, %r41, %r42, %r43}};
"""


def sums_in_registers(sums: np.ndarray) -> np.ndarray:
    """The registers [32, 4] of sums [16, 8]."""
    found = np.zeros((32, 4), sums.dtype)
    for (row, column), each in np.ndenumerate(sums):
        found[4 * (row % 8) + column // 2, 2 * (row // 8) + column % 2] = each
    return found


def kinds_of(opcode: str) -> tuple[str, str]:
    found = re.search(r"\.f32\.(\w+)\.(\w+)\.f32", opcode)
    assert found
    return found[1], found[2]


def operands_of(opcode: str, generator: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(numbers of A [16, K] and B [8, K], registers of both and of the addend)."""
    k = int(re.search(r"m16n8k(\d+)", opcode)[1])
    width = 4 if k == 64 else 256 // k
    numbers, registers = [], []
    for which, rows, kind in zip("ab", (16, 8), kinds_of(opcode), strict=True):
        codes = codes_of(kind, (rows, k), generator)
        numbers.append(np.vectorize(value)(codes, kind))
        registers.append(packed(codes, which, width, 2 if kind == "e2m1" and width == 8 else 0))
    return numbers, registers
