"""Instructions by which the threads of a warp exchange values, against the ISA's text, thread by thread."""

from functools import reduce
from math import copysign, isnan
from operator import and_, or_, xor

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.forms import UnknownForm, known_forms
from tests.helpers.one_instruction import execute, step_of

WARPS = 3
THREADS = np.arange(32 * WARPS)
VALUES = np.random.default_rng(0).integers(0, 2**32, 32 * WARPS, dtype=np.uint32)
HALF = THREADS % 32 < 16
REDUCTIONS = {
    "add.s32": sum, "add.u32": sum, "min.s32": min, "min.u32": min, "max.s32": max, "max.u32": max,
    "and.b32": lambda some: reduce(and_, some), "or.b32": lambda some: reduce(or_, some),
    "xor.b32": lambda some: reduce(xor, some),
}  # fmt: skip


def largest(values: list[float], nan: bool, least: bool) -> float:
    """The maximum or minimum, -0 below +0; of NaN alone, or by `nan` of any NaN, NaN."""
    some = [x for x in values if not isnan(x)]
    if not some or (nan and len(some) < len(values)):
        return float("nan")
    return (min if least else max)(some, key=lambda x: (x, copysign(1, x)))


OF_FLOATS = [f"{name}{magnitude}{nan}.f32"
             for name in ("min", "max") for magnitude in ("", ".abs") for nan in ("", ".NaN")]  # fmt: skip


def test_every_form_has_a_check():
    first = {"shfl", "redux", "elect", "vote", "match"}
    found = {opcode for opcode in known_forms() if opcode.split(".")[0] in first or opcode == "bar.warp.sync"}
    shuffles = {f"shfl.sync.{mode}.b32" for mode in ("up", "down", "bfly", "idx")}
    votes = {"vote.sync.any.pred", "vote.sync.all.pred", "vote.sync.ballot.b32"}
    others = {"elect.sync", "bar.warp.sync"}
    assert found == {*shuffles, *(f"redux.sync.{name}" for name in [*REDUCTIONS, *OF_FLOATS]), *votes, *others}


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """(the lane that is read, the predicate), as the ISA writes it."""
    clamp, mask = c & 31, c >> 8 & 31
    first, last = lane & mask, (lane & mask) | (clamp & ~mask)
    source, inside = {
        "up": (lane - b, lane - b >= last), "down": (lane + b, lane + b <= last),
        "bfly": (lane ^ b, (lane ^ b) <= last), "idx": (first | (b & ~mask), (first | (b & ~mask)) <= last),
    }[mode]  # fmt: skip
    return (source, True) if inside else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle(mode):
    for b in (0, 1, 2, 3, 7, 16, 31):
        for c in (0, 31, 5, 0x181F, 0x1C07, 0x1000, 0x100F):
            found = execute(f"shfl.sync.{mode}.b32 %r0|%p0, %r1, {b}, {c}, -1", {"%r1": VALUES})
            expected = [shuffled(mode, int(thread % 32), b, c) for thread in THREADS]
            sources = [thread // 32 * 32 + lane for thread, (lane, _) in zip(THREADS, expected, strict=True)]
            np.testing.assert_array_equal(found["%r0"], VALUES[sources])
            np.testing.assert_array_equal(found["%p0"], [inside for _, inside in expected])


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle_with_operands_of_each_thread(mode):
    """The shift or lane, the clamp and the mask of threads are registers."""
    by_thread = np.random.default_rng(1).integers(0, 32, len(THREADS))
    clamp = np.random.default_rng(2).choice([0, 31, 0x181F, 0x1C07], len(THREADS))
    inputs = {"%r1": VALUES, "%r2": by_thread + 32 * (THREADS % 3), "%r3": clamp, "%r4": np.full(96, 2**32 - 1)}
    found = execute(f"shfl.sync.{mode}.b32 %r0, %r1, %r2, %r3, %r4", inputs)["%r0"]
    for thread in THREADS:
        lane, _ = shuffled(mode, int(thread % 32), int(by_thread[thread]), int(clamp[thread]))
        assert found[thread] == VALUES[thread // 32 * 32 + lane]


def test_shuffle_into_its_own_operand():
    found = execute("shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1", {"%r1": VALUES})["%r1"]
    np.testing.assert_array_equal(found, VALUES[THREADS ^ 1])


def test_shuffle_by_half_of_a_warp():
    inputs = {"%r1": VALUES, "%r0": np.full(96, 7)}
    found = execute("shfl.sync.bfly.b32 %r0, %r1, 1, 31, 0xFFFF", inputs, HALF)["%r0"]
    np.testing.assert_array_equal(found, np.where(HALF, VALUES[THREADS ^ 1], 7))
    with pytest.raises(Fault, match="reads from a thread that is not there"):
        execute("shfl.sync.bfly.b32 %r0, %r1, 16, 31, 0xFFFF", inputs, HALF)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name):
    for running, mask in ((np.ones(96, bool), -1), (HALF, 0xFFFF), (THREADS // 32 == 1, -1)):
        inputs = {"%r0": np.full(96, 7), "%r1": VALUES}
        found = execute(f"redux.sync.{name} %r0, %r1, {mask}", inputs, running)["%r0"]
        for thread in THREADS:
            some = VALUES[(thread // 32 == THREADS // 32) & running]
            some = some.view(np.int32) if name.endswith("s32") else some
            expected = REDUCTIONS[name]([int(x) for x in some]) % 2**32 if running[thread] else 7
            assert found[thread] == expected


@pytest.mark.parametrize("name", OF_FLOATS)
def test_reduction_of_floats(name):
    random = np.random.default_rng(1)
    for hard in ([], [np.nan], [np.nan, -0.0, 0.0, np.inf, -np.inf], [0.0, -0.0]):
        some = [*hard, *(random.standard_normal(4) if len(hard) != 1 else [])]
        values = random.choice(np.array(some, np.float32), 96)
        for running, mask in ((np.ones(96, bool), -1), (HALF, 0xFFFF)):
            found = execute(f"redux.sync.{name} %r0, %r1, {mask}", {"%r1": values.view(np.uint32)}, running)["%r0"]
            for thread in THREADS[running]:
                some = [float(x) for x in values[(thread // 32 == THREADS // 32) & running]]
                some = list(map(abs, some)) if ".abs" in name else some
                expected = np.float32(largest(some, ".NaN" in name, name.startswith("min"))).view(np.uint32)
                expected = 0x7FFFFFFF if np.isnan(expected.view(np.float32)) else expected
                assert found[thread] == expected


def test_masks_in_registers():
    """Half of the threads name themselves, in a register that other threads have other values in."""
    inputs = {"%r1": VALUES, "%r2": np.where(HALF, 0xFFFF, 3)}
    found = execute("redux.sync.max.u32 %r0, %r1, %r2", inputs, HALF)["%r0"]
    assert [found[32 * i] for i in range(WARPS)] == [VALUES[32 * i : 32 * i + 16].max() for i in range(WARPS)]
    with pytest.raises(Fault, match="names the threads 0x0000ffff of its warp, and 0xffffffff are there"):
        execute("redux.sync.max.u32 %r0, %r1, %r2", inputs)


def test_vote():
    """Of any thread of the warp that the mask names; the others keep what they have."""
    ones = np.isin(THREADS, (5, 70))  # of the first and the third warp
    np.testing.assert_array_equal(
        execute("vote.sync.any.pred %p0, %p1, -1", {"%p1": ones})["%p0"], np.isin(THREADS // 32, (0, 2))
    )
    ones = np.isin(THREADS, (5, 40, 95))  # thread 95 is beyond the half
    found = execute("vote.sync.any.pred %p0, %p1, 0xFFFF", {"%p1": ones, "%p0": ~HALF}, HALF)["%p0"]
    np.testing.assert_array_equal(found, np.where(HALF, np.isin(THREADS // 32, (0, 1)), True))


def test_vote_of_all_and_ballot():
    ones = THREADS % 32 != 17
    ones[64:] = True
    found = execute("vote.sync.all.pred %p0, %p1, -1", {"%p1": ones})["%p0"]
    np.testing.assert_array_equal(found, THREADS >= 64)
    assert execute("vote.sync.all.pred %p0, %p1, 0xFFFF", {"%p1": ones}, HALF)["%p0"][HALF].all()
    ballot = execute("vote.sync.ballot.b32 %r0, %p1, 0xFFFF", {"%p1": ~ones | (THREADS % 32 == 3)}, HALF)["%r0"]
    np.testing.assert_array_equal(ballot[HALF], 8)


def test_election():
    found = execute("elect.sync %r0|%p0, -1", {"%r0": np.full(96, 7)})
    np.testing.assert_array_equal(found["%p0"], THREADS % 32 == 0)
    assert not found["%r0"].any()
    running = (THREADS % 32 >= 5) & (THREADS < 64)
    found = execute("elect.sync %r0|%p0, 0xFFFFFFE0", {"%r0": np.full(96, 7)}, running)
    np.testing.assert_array_equal(found["%p0"], (THREADS % 32 == 5) & (THREADS < 64))
    np.testing.assert_array_equal(found["%r0"], np.where(running, 5, 7))
    found = execute("elect.sync _|%p0, -1", {"%r0": np.full(96, 7)})
    np.testing.assert_array_equal(found["%p0"], THREADS % 32 == 0)


@pytest.mark.parametrize("text", [
    "bar.warp.sync {mask}", "elect.sync %r0|%p0, {mask}", "redux.sync.add.s32 %r0, %r1, {mask}",
    "vote.sync.any.pred %p0, %p1, {mask}",
    "shfl.sync.idx.b32 %r0, %r1, 0, 31, {mask}",
])  # fmt: skip
def test_threads_that_the_mask_names_are_there(text):
    inputs = {"%r1": VALUES}
    execute(text.format(mask=-1), inputs)
    execute(text.format(mask="0xFFFF"), inputs, HALF)
    execute(text.format(mask=-1), inputs, THREADS // 32 == 1)  # the other warps do not take part at all
    with pytest.raises(Fault, match="names the threads 0xffffffff of its warp, and 0x0000ffff are there"):
        execute(text.format(mask=-1), inputs, HALF)
    with pytest.raises(Fault, match="thread 0 of warp 2 .* and 0x7fffffff are there"):
        execute(text.format(mask=-1), inputs, THREADS < 95)
    with pytest.raises(Fault, match="names the threads 0x0000ffff"):
        execute(text.format(mask="0xFFFF"), inputs)


@pytest.mark.parametrize("text", [
    "elect.sync %p0, -1", "elect.sync %r0|%r1, -1", "shfl.sync.bfly.b32 %r0, %r1, 1, 31", "bar.warp.sync",
    "shfl.sync.bfly.b32 %d0, %p1, 1, 31, -1", "redux.sync.add.s32 %h0, %r1, -1", "shfl.bfly.b32 %r0, %r1, 1, 31",
    "redux.sync.add.s32 %r0, %h1, -1", "redux.sync.add.f32 %r0, %r1, -1", "shfl.sync.bfly.b32 %r0|%r2, %r1, 1, 31, -1",
])  # fmt: skip
def test_unknown_form(text):
    with pytest.raises(UnknownForm, match="line 4: "):
        step_of(text)
