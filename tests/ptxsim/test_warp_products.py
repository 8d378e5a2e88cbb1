"""Products of matrices in the registers of a warp, with and without block scales: every form, element by element."""

import re

import numpy as np
import pytest

from ptxsim.fault import Fault
from tests.ptxsim.ptx_text import edited, run_body
from tests.ptxsim.warp_product_kernels import (
    FORMS,
    MXF8,
    PLAIN,
    SCALED,
    body,
    codes_of,
    operands_of,
    packed,
    sums_in_registers,
    value,
)

NVF4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"


def test_the_forms():
    """Two orders of the qualifiers for each kind; five formats of 8-bit containers, with and without scales."""
    assert len(PLAIN) == 1 + 2 + 4 + 2 * 25 and len(SCALED) == 2 * (2 * 25 + 2 + 3)
    assert {*FORMS} - {*PLAIN, *SCALED} == {f"mma.sync.aligned.m16n8k32.row.col{sat}.s32.s8.s8.s32"
                                            for sat in ("", ".satfinite")}  # fmt: skip


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
