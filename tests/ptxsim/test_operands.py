"""Operands of an instruction: packed registers, wider ones, predicates, running threads, and what is refused."""

import numpy as np
import pytest

from ptxsim.forms import UnknownForm
from tests.helpers.one_instruction import execute, register, step_of


def test_packing():
    random = np.random.default_rng(0)
    for kind, bits, count in (("b32", 16, 2), ("b32", 8, 4), ("b64", 32, 2), ("b64", 16, 4), ("b16", 8, 2)):
        names = [register(bits, i + 1) for i in range(count)]
        parts = random.integers(0, 2**bits, (count, 64), dtype=np.uint64)
        whole = register(bits * count, 0)
        inputs = dict(zip(names, parts, strict=True))
        expected = [sum(int(part) << bits * i for i, part in enumerate(lane)) for lane in parts.T]
        packed = execute(f"mov.{kind} {whole}, {{{', '.join(names)}}}", inputs)[whole]
        assert [int(x) for x in packed] == expected
        constant = execute(f"mov.{kind} {whole}, {{{', '.join(['7', *names[1:]])}}}", inputs)[whole]
        assert [int(x) for x in constant] == [x - x % 2**bits + 7 for x in expected]
        back = execute(f"mov.{kind} {{{', '.join(names)}}}, {whole}", {whole: packed})
        for name, part in inputs.items():
            np.testing.assert_array_equal(back[name], part)
        last = execute(f"mov.{kind} {{{', '.join(['_'] * (count - 1) + names[-1:])}}}, {whole}", {whole: packed})
        np.testing.assert_array_equal(last[names[-1]], parts[-1])
        assert not last[names[0]].any()


def test_registers_that_are_wider_than_the_type():
    """A result is extended by the type's sign; an operand's upper bits are not read."""
    values = np.array([0x0180, 0x017F, 0xFFFF, 0x0000] * 8, np.uint64)
    for into, extended in (("s8", [-128, 127, -1, 0]), ("u8", [128, 127, 255, 0])):
        for wide, source in ((16, "s32"), (32, "s64"), (64, "u16")):
            into_name, from_name = register(wide, 0), register(64, 1)
            found = execute(f"cvt.{into}.{source} {into_name}, {from_name}", {from_name: values})[into_name]
            assert [int(x) for x in found[:4]] == [x % 2**wide for x in extended]
    found = execute("cvt.s64.s32 %d0, %d1", {"%d1": values[:32] | np.uint64(0x7780000000)})["%d0"]
    assert [int(x) for x in found[:2]] == [0xFFFFFFFF80000180, 0xFFFFFFFF8000017F]


def test_special_registers_and_symbols():
    found = execute("mov.u32 %r0, %tid.x", {}, lanes=64)["%r0"]
    np.testing.assert_array_equal(found, np.arange(64))


def test_only_running_threads_are_written():
    running = np.arange(64) % 3 == 0
    inputs = {"%r0": np.full(64, 9), "%r1": np.arange(64), "%d0": np.full(64, 9), "%p0": np.ones(64, bool)}
    for text, name, values in (
        ("add.s32 %r0, %r1, 1", "%r0", np.arange(64) + 1),
        ("cvt.u64.u32 %d0, %r1", "%d0", np.arange(64)),
        ("setp.lt.s32 %p0, %r1, 0", "%p0", np.zeros(64, bool)),
        ("mov.b64 %d0, {%r1, 0}", "%d0", np.arange(64)),
    ):
        found = execute(text, inputs, running)[name]
        np.testing.assert_array_equal(found, np.where(running, values, inputs[name]))


def test_negated_predicates():
    inputs = {"%p1": np.arange(32) < 9, "%p2": np.arange(32) % 2 == 0, "%r1": np.arange(32)}
    found = execute("setp.lt.and.s32 %p0, %r1, 20, !%p1", inputs)["%p0"]
    np.testing.assert_array_equal(found, (np.arange(32) < 20) & (np.arange(32) >= 9))


@pytest.mark.parametrize("text", [
    "add.s33 %r0, %r1, %r2", "add.cc.s32 %r0, %r1, %r2", "add.sat.s32 %r0, %r1, %r2", "max.ftz.f32 %r0, %r1, %r2",
    "cvt.rz.f16.f32 %h0, %r1", "setp.lt.b32 %p0, %r1, %r2", "setp.ge.s16x2 %p0, %r1, %r2", "nothing", "mov.b128 %d0, 0",
])  # fmt: skip
def test_unknown_opcode(text):
    with pytest.raises(UnknownForm, match=f"line 4: {text}.*is unknown"):
        step_of(text)


@pytest.mark.parametrize("text", [
    "add.s32 %r0, %r1, %p2", "add.s32 %p0, %r1, %r2", "add.s32 %h0, %r1, %r2", "add.s32 %r0, %h1, %r2",
    "add.s64 %d0, %d1, %r2", "add.s32 %r0, %r1", "add.s32 %r0, %r1, %r2, %r3", "add.s32 %r0, %r1, [%r2]",
    "add.s32 %r0, %r1, {%r2, %r3}", "add.s32 %r0, %r1, somewhere", "add.s32 7, %r1, %r2", "add.s32 %r0|%p0, %r1, %r2",
    "and.pred %p0, %p1, %r2", "selp.b32 %r0, %r1, %r2, %r3", "mov.b32 %r0, {%h1, %h2, %h3}", "mov.b32 {%h0, %b1}, %r0",
    "lop3.b32 %r0, %r1, %r2, %r3, %r4", "setp.lt.s32 !%p0, %r1, 0",
    "cvt.rs.satfinite.e2m1x4.f32 %h0, {%r1, %r2}, %r3", "cvt.rs.satfinite.e2m1x4.f32 %h0, %r1, %r3",
    "prmt.b32 %r0, %r1, %r2", "cvt.rn.satfinite.e2m1x2.f32 %b0, %r1",
])  # fmt: skip
def test_operand_of_another_kind(text):
    with pytest.raises(UnknownForm, match="line 4: "):
        step_of(text)
