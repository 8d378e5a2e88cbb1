"""Threads of a warp that diverged meet where the control flow lets them, wherever the compiler laid out that block."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fp4compile.check.comparison import BF16, same_bits
from fp4compile.check.products import MatmulCase, exact_arguments
from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats import epilogue, reference
from fp4compile.formats.epilogue import Epilogue
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.multiply import multiply
from fp4compile.templates.problem import problem_of
from ptxsim.parse import parse
from ptxsim.run import Kernel, Schedule
from tests.ptxsim.ptx_text import module, run_body

# %r1: the thread; %rd1: its word in global memory, which gets %r2. `bar.sync` is a fault where threads are missing.
BEGIN = """
    mov.u32 %r1, %tid.x; mov.b32 %r2, 0; mov.b32 %r3, 0; mov.b32 %r4, 0;
    ld.param.b64 %rd9, [p0]; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd1, %rd9, %rd1;
    setp.lt.u32 %p1, %r1, 5; setp.eq.u32 %p2, %r1, 9;
"""
MEET = "bar.sync 0; st.global.b32 [%rd1], %r2; ret;"
THREADS = np.arange(64, dtype=np.uint32)

# The join lies before the branch. Some threads skip what others execute, and one of those ends.
BRANCH = f"""
    bra.uni FORK;
JOIN: add.u32 %r2, %r2, 1; {MEET}
FORK: @%p1 bra JOIN;
    @%p2 ret;
    add.u32 %r2, %r2, %r1;
    bra.uni JOIN;
"""
# The exit lies before the loop, which each thread leaves at another iteration.
EXIT = f"""
    bra.uni LOOP;
OUT: {MEET}
LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, %r1;
    @!%p3 bra OUT;
    bra.uni LOOP;
"""
# So does this one, by a table.
TABLE = f"""
    bra.uni LOOP;
OUT: {MEET}
WAYS: .branchtargets LOOP, OUT;
LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, %r1; selp.b32 %r4, 0, 1, %p3;
    brx.idx %r4, WAYS;
"""
# Two ways back to the head of a loop, where all threads meet in each iteration.
TWO_WAYS = f"""
LOOP: bar.sync 0; add.u32 %r2, %r2, 1; add.u32 %r3, %r3, 1; setp.eq.u32 %p3, %r3, 4;
    @%p3 bra OUT;
    @%p1 bra SHORT;
    add.u32 %r2, %r2, 10;
    bra.uni LOOP;
SHORT: bra.uni LOOP;
OUT: {MEET}
"""
# The block that ends an inner loop leads back to the outer one. It lies before both heads.
NEST = f"""
    bra.uni OUTER;
AGAIN: setp.lt.u32 %p4, %r4, %r1;
    @%p4 bra INNER;
OUTER: bar.sync 0; add.u32 %r3, %r3, 1; mov.b32 %r4, 0; setp.eq.u32 %p3, %r3, 3;
    @%p3 bra OUT;
INNER: add.u32 %r2, %r2, 1; add.u32 %r4, %r4, 1;
    bra.uni AGAIN;
OUT: {MEET}
"""
# Two loops have one head, and the inner one ends at another iteration in each thread.
ONE_HEAD = f"""
LOOP: add.u32 %r2, %r2, 1; add.u32 %r4, %r4, 1; setp.lt.u32 %p4, %r4, %r1;
    @%p4 bra LOOP;
    bar.sync 0; add.u32 %r3, %r3, 1; mov.b32 %r4, 0; setp.lt.u32 %p3, %r3, 2;
    @%p3 bra LOOP;
    {MEET}
"""
# One of two ways back leads to the block before the one where all meet.
DETOUR = f"""
LONG: add.u32 %r2, %r2, 100;
LOOP: bar.sync 0; add.u32 %r3, %r3, 1; setp.eq.u32 %p3, %r3, 4;
    @%p3 bra OUT;
    @%p1 bra LONG;
    add.u32 %r2, %r2, 10;
    bra.uni LOOP;
OUT: {MEET}
"""


@pytest.mark.parametrize(("body", "expected"), [
    (BRANCH, np.where(THREADS < 5, 1, 1 + THREADS) * (THREADS != 9)), (EXIT, np.maximum(THREADS, 1)),
    (TABLE, np.maximum(THREADS, 1)), (TWO_WAYS, np.where(THREADS < 5, 4, 34)), (NEST, 2 * np.maximum(THREADS, 1)),
    (ONE_HEAD, 2 * np.maximum(THREADS, 1)), (DETOUR, np.where(THREADS < 5, 400, 130)),
], ids=["branch", "exit", "table", "two ways", "nest", "one head", "detour"])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1])
def test_threads_meet(body, expected, seed):
    (found,) = run_body(BEGIN + body, [0 * THREADS], threads=64, schedule=Schedule(seed))
    np.testing.assert_array_equal(found, expected)


# The first program repeats a loop until the second one has executed a block behind it.
WAITED_FOR = """
    ld.param.b64 %rd1, [p0];
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1;
    @%p1 bra SET;
AGAIN: ld.volatile.global.b32 %r2, [%rd1]; setp.eq.u32 %p2, %r2, 0;
    @%p2 bra AGAIN;
    bra.uni OUT;
SET: red.global.gpu.relaxed.max.s32 [%rd1], 7;
OUT: ret;
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_a_loop_that_waits_for_another_program_ends(seed):
    (found,) = run_body(WAITED_FOR, [np.zeros(1, np.int32)], threads=32, grid=2, schedule=Schedule(seed, most=10_000))
    assert found == 7


def test_the_layout_is_kept_where_it_is_an_order():
    """Two branches side by side would also be in order the other way round; the loop's head lies first."""
    body = f"""
LOOP: add.u32 %r3, %r3, 1; setp.eq.u32 %p3, %r3, 4;
    @%p3 bra OUT;
    @%p1 bra LEFT;
    @%p2 bra RIGHT;
    bra.uni JOIN;
LEFT: mov.b32 %r2, 2;
    bra.uni JOIN;
RIGHT: mov.b32 %r2, 3;
JOIN: bra.uni LOOP;
OUT: {MEET}
"""
    assert Kernel.of(parse(module(BEGIN + body, 64, 1))).order is None
    assert Kernel.of(parse(module(BEGIN + EXIT, 64, 1))).order is not None


def test_gelu_in_a_warp_specialised_product():
    """Threads skip the long branch of `erf`, whose join LLVM lays out before it: the loop over tiles begins there."""
    x = exact_arguments(MatmulCase("mxfp8", "mxfp8", 144, 256, 256))
    scales = x.a.scales.view(torch.uint8) - 6  # products of about 1
    steps = ["mul product 0.5", "mul product 0.7071067811865476", "erf s1", "add s2 1.0", "mul s0 s3"]
    x = x.but(a=replace(x.a, scales=scales.view(x.a.scales.dtype)), epilogue=Epilogue.parse(steps, BF16, BF16))
    simulator = LaunchSimulator(Target(100, 2), Schedule(1))
    with simulator.running():
        got = multiply(x, choose(problem_of(x, simulator.target), "block_scaled_sm100"))
    assert simulator.launches[0].constants["WARP_SPECIALIZE"]
    assert simulator.compiled(simulator.launches[0]).kernel.order is not None
    product = reference.scaled_mm(x.a, x.b, None, BF16)
    expected = epilogue.apply(product, x.spec.epilogue, [])
    positive = product > 0  # in 1 + erf of others the last bit of erf becomes a larger one
    assert same_bits(got[positive], expected[positive]) == [] and positive.any() and not positive.all()
    torch.testing.assert_close(got, expected)
