"""Products of matrices in the registers of a warp, with and without block scales: every form, element by element."""

import re

import numpy as np
import pytest

from ptxsim.catalogue import known_forms
from ptxsim.fault import Fault
from tests.ptxsim.ptx_text import edited, run_body

FORMS = sorted(opcode for opcode in known_forms() if opcode.startswith("mma."))
PLAIN = [one for one in FORMS if "block_scale" not in one and "s8" not in one]
SCALED = [one for one in FORMS if "block_scale" in one]
MXF8 = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
NVF4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
FIELDS = {"e2m1": (2, 1), "e2m3": (2, 3), "e3m2": (3, 2), "e4m3": (4, 3), "e5m2": (5, 2), "f16": (5, 10),
          "bf16": (8, 7), "tf32": (8, 23), "ue4m3": (4, 3)}  # fmt: skip


def test_the_forms():
    """Two orders of the qualifiers for each kind; five formats of 8-bit containers, with and without scales."""
    assert len(PLAIN) == 1 + 2 + 4 + 2 * 25 and len(SCALED) == 2 * (2 * 25 + 2 + 3)
    assert {*FORMS} - {*PLAIN, *SCALED} == {f"mma.sync.aligned.m16n8k32.row.col{sat}.s32.s8.s8.s32"
                                            for sat in ("", ".satfinite")}  # fmt: skip


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


@pytest.mark.parametrize("opcode", PLAIN)
def test_products(opcode):
    generator = np.random.default_rng(1)
    (a, b), registers = operands_of(opcode, generator)
    c = generator.integers(-8, 9, (16, 8)).astype(np.float32)
    given = np.hstack([*registers, sums_in_registers(c).view(np.uint32), np.zeros((32, 2), np.uint32)])
    if "tf32" in opcode:
        given[:, :6] |= 0x1FFF  # not read
    got = run_body(body(opcode), [given, np.zeros((32, 4), np.float32)], threads=32)[1]
    np.testing.assert_array_equal(got, sums_in_registers((a @ b.T + c).astype(np.float32)))


@pytest.mark.parametrize("opcode", SCALED)
def test_scaled_products(opcode):
    """Scales of every byte and thread that may hold them; all other bytes are no numbers."""
    generator = np.random.default_rng(2)
    (a, b), registers = operands_of(opcode, generator)
    c = generator.integers(-8, 9, (16, 8)).astype(np.float32)
    size = re.search(r"scale_vec::(\d)X", opcode)
    count = int(size[1]) if size else 2 if "mxf4" in opcode else 1
    byte, thread_a, thread_b = generator.integers(0, 4 // count) * count, generator.integers(2), generator.integers(4)
    words, scaled = np.full((2, 32, 4), 0xFF, np.uint8), []
    for which, (numbers, rows) in enumerate(((a, 16), (b, 8))):
        scales = generator.integers(125, 130, (rows, count))
        factors = 2.0 ** (scales - 127)
        if opcode.endswith("ue4m3"):
            scales = codes_of("ue4m3", (rows, count), generator)
            factors = np.vectorize(value)(scales, "ue4m3")
        for row in range(rows):
            lane = 4 * (row % 8) + (2 * thread_a + row // 8 if which == 0 else thread_b)
            words[which, lane, byte : byte + count] = scales[row]
        scaled.append(numbers * np.repeat(factors, numbers.shape[1] // count, 1))
    given = np.hstack([*registers, sums_in_registers(c).view(np.uint32), *(each.view(np.uint32) for each in words)])
    text = body(opcode, f", %r30, {{ {byte}, {thread_a} }}, %r31, {{{byte}, {thread_b}}}")
    got = run_body(text, [given, np.zeros((32, 4), np.float32)], threads=32)[1]
    np.testing.assert_array_equal(got, sums_in_registers((scaled[0] @ scaled[1].T + c).astype(np.float32)))


@pytest.mark.parametrize("saturates", [False, True])
def test_products_of_integers(saturates):
    generator = np.random.default_rng(3)
    a, b = (generator.integers(-128, 128, (rows, 32)) for rows in (16, 8))
    c = generator.choice([-(2**31), 2**31 - 1, 5], (16, 8))
    registers = [packed(each & 255, which, 8, 0) for each, which in ((a, "a"), (b, "b"))]
    given = np.hstack([*registers, sums_in_registers(c.astype(np.int32)).view(np.uint32), np.zeros((32, 2), np.uint32)])
    opcode = f"mma.sync.aligned.m16n8k32.row.col{'.satfinite' * saturates}.s32.s8.s8.s32"
    got = run_body(body(opcode), [given, np.zeros((32, 4), np.int32)], threads=32)[1]
    total = a @ b.T + c
    total = total.clip(-(2**31), 2**31 - 1) if saturates else (total + 2**31) % 2**32 - 2**31
    np.testing.assert_array_equal(got, sums_in_registers(total))


OUT = np.zeros((32, 4), np.float32)


def test_a_scale_that_is_no_number():
    """255 is NaN as UE8M0; the scale of row 9 is in lane 5."""
    given = np.zeros((32, 12), np.uint32)
    given[:, 10:] = 127
    given[5, 10] = 255
    got = run_body(body(MXF8, ", %r30, {0, 0}, %r31, {0, 0}"), [given, OUT], threads=32)[1]
    rows = np.isnan(got).reshape(8, 4, 2, 2)  # g, t, row half, parity
    assert rows[1, :, 1].all() and rows.sum() == 8 and (got[np.isnan(got)].view(np.uint32) == 0x7FFFFFFF).all()


@pytest.mark.parametrize(("opcode", "selectors", "what"), [
    (MXF8, ", %r30, {4, 0}, %r31, {0, 0}", "byte 4 and thread 0"),
    (MXF8, ", %r30, {0, 2}, %r31, {0, 0}", "byte 0 and thread 2"),
    (MXF8, ", %r30, {0, 0}, %r31, {0, 4}", "byte 0 and thread 4"),
    (MXF8, ", %r30, {%r1, 0}, %r31, {0, 0}", "differs between threads"),
    (MXF8.replace("e4m3.e4m3", "e2m1.e4m3"), ", %r30, {0, 0}, %r31, {0, 0}", "whose byte has other bits set"),
    (MXF8.replace("e4m3.e4m3", "e4m3.e3m2"), ", %r30, {0, 0}, %r31, {0, 0}", "whose byte has other bits set"),
    (NVF4.replace("4X", "2X").replace("ue4m3", "ue8m0"), ", %r30, {1, 0}, %r31, {0, 0}", "byte 1 and thread 0"),
    (NVF4, ", %r30, {1, 0}, %r31, {0, 0}", "byte 1 and thread 0"),
    (NVF4, ", %r30, {0, 0}, %r31, {0, 0}", "UE4M3 scale whose highest bit"),
])  # fmt: skip
def test_finds_what_is_wrong_with_scaled_products(opcode, selectors, what):
    with pytest.raises(Fault, match=what):
        run_body(body(opcode, selectors), [np.full((32, 12), 0xFFFFFFFF, np.uint32), OUT], threads=32)


def test_a_sum_is_rounded_once():
    given = np.zeros((32, 12), np.uint32)
    given[:4, 0] = 0x3F803F80  # row 0 of A: eight ones
    given[:4, 4] = 0x33803380  # column 0 of B: 2**-24
    given[:, 6] = 0x3F800000
    got = run_body(body("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"), [given, OUT], threads=32)[1]
    assert got[0, 0] == 1 + 8 * 2.0**-24 and got[1, 0] == 1


def test_a_result_that_is_no_number_has_one_form():
    given = np.zeros((32, 12), np.uint32)
    given[:, 6] = 0xFFC00001
    got = run_body(body("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"), [given, OUT], threads=32)[1]
    assert (got[:, 0].view(np.uint32) == 0x7FFFFFFF).all()


def test_a_product_takes_a_whole_warp():
    text = body("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
    with pytest.raises(Fault, match="a part of a warp"):
        run_body(edited(text, ("    mma", "    @%p1 mma")), [np.zeros((32, 12), np.uint32), OUT], threads=32)
