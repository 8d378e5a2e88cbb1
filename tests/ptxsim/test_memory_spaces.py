"""Local memory, constants that a module brings along, loads with hints: what Inductor's own kernels use."""

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.global_memory import GlobalMemory
from ptxsim.parse import parse
from ptxsim.run import Kernel, Schedule, run
from tests.ptxsim.ptx_text import module, run_body

# Each thread writes its number and twice its number, and reads one of the two, by a computed address.
LOCAL = """
\t.local .align 4 .b8 depot[8];
\t.reg .b32 %SPL;
\tld.param.b64 %rd1, [p0];
\tmov.u32 %r1, %tid.x;
\tmov.b32 %SPL, depot;
\tst.local.b32 [%SPL], %r1;
\tadd.s32 %r2, %r1, %r1;
\tst.local.b32 [%SPL+4], %r2;
\tand.b32 %r3, %r1, 1;
\tshl.b32 %r3, %r3, 2;
\tadd.s32 %r4, %SPL, %r3;
\tld.local.b32 %r5, [%r4];
\tmul.wide.u32 %rd2, %r1, 4;
\tadd.s64 %rd3, %rd1, %rd2;
\tst.global.b32 [%rd3], %r5;
"""


def test_local_memory_is_each_threads_own():
    (found,) = run_body(LOCAL, [np.zeros(64, np.int32)], threads=64)
    thread = np.arange(64)
    np.testing.assert_array_equal(found, np.where(thread % 2, 2 * thread, thread))


@pytest.mark.parametrize(("edit", "says"), [
    (("st.local.b32 [%SPL+4], %r2;", ""), "reads local memory that nothing wrote"),
    (("[%SPL+4], %r2", "[%SPL+8], %r2"), "outside"),
    (("[%SPL+4], %r2", "[%SPL+2], %r2"), "not aligned"),
])  # fmt: skip
def test_faults_of_local_memory(edit, says):
    with pytest.raises(Fault, match=says):
        run_body(LOCAL.replace(*edit), [np.zeros(64, np.int32)], threads=64)


def test_prefetched_lines_exist():
    """A prefetch changes nothing; one of an address beyond all tensors is a fault, unless its predicate is off."""
    body = """
\tld.param.b64 %rd1, [p0];
\tmov.u32 %r1, %tid.x;
\tmul.wide.u32 %rd2, %r1, 128;
\tadd.s64 %rd3, %rd1, %rd2;
\tsetp.lt.u32 %p1, %r1, 2;
\t@%p1 prefetch.global.L2 [%rd3];
"""
    lines = np.arange(64, dtype=np.int32)
    (found,) = run_body(body, [lines], threads=32)
    np.testing.assert_array_equal(found, np.arange(64))
    with pytest.raises(Fault, match="outside of all tensors"):
        run_body(body.replace("%r1, 2;", "%r1, 3;"), [lines], threads=32)


def test_constants_of_the_module():
    """Bytes beyond the listed ones are zero."""
    body = """
\tld.param.b64 %rd1, [p0];
\tmov.b64 %rd2, _$_table;
\tld.global.nc.b32 %r1, [%rd2];
\tld.global.nc.b32 %r2, [%rd2+4];
\tst.global.v2.b32 [%rd1], {%r1, %r2};
"""
    table = ".global .align 4 .b8 _$_table[8] = {1, 2, 0, 128, 7};\n"
    memory = GlobalMemory()
    address = memory.allocate(8)
    kernel = Kernel.of(parse(module(body, 32, 1).replace(".visible", f"{table}.visible")))
    run(kernel, memory, [address], 1, 0)
    assert memory.read(address, 8).tolist() == [1, 2, 0, 128, 7, 0, 0, 0]


@pytest.mark.parametrize("eviction", ["evict_first", "evict_last"])
def test_hints_change_nothing(eviction):
    body = f"""
\tld.param.b64 %rd1, [p0];
\tcreatepolicy.fractional.L2::{eviction}.b64 %rd2, 1.0;
\tld.global.L1::{eviction}.L2::cache_hint.v2.b32 {{%r1, %r2}}, [%rd1+8], %rd2;
\tst.global.v2.b32 [%rd1], {{%r2, %r1}};
"""
    (found,) = run_body(body, [np.array([0, 0, 5, 9], np.int32)], threads=32)
    assert found.tolist() == [9, 5, 5, 9]


def test_atomic_operations_return_what_was_there():
    """Two warps of two programs add their threads' numbers, less 8, to one word, and store the sum before."""
    body = """
\tld.param.b64 %rd1, [p0];
\tld.param.b64 %rd2, [p1];
\tmov.u32 %r1, %tid.x;
\tmov.u32 %r2, %ctaid.x;
\tsub.s32 %r3, %r1, 8;
\tatom.global.gpu.relaxed.add.s32 %r4, [%rd1], %r3;
\tred.global.gpu.relaxed.min.s32 [%rd1+4], %r3;
\tmad.lo.s32 %r5, %r2, 64, %r1;
\tmul.wide.u32 %rd3, %r5, 4;
\tadd.s64 %rd3, %rd2, %rd3;
\tst.global.b32 [%rd3], %r4;
"""
    words, before = run_body(body, [np.zeros(2, np.int32), np.zeros(128, np.int32)], threads=64, grid=2)
    added = np.tile(np.arange(64) - 8, 2)
    assert words.tolist() == [added.sum(), -8]
    assert sorted((before + added).tolist()) == sorted([*before.tolist()[1:], int(added.sum())])


def test_grids_of_three_dimensions():
    body = """
\tld.param.b64 %rd1, [p0];
\tmov.u32 %r1, %ctaid.x;
\tmov.u32 %r2, %ctaid.y;
\tmov.u32 %r3, %ctaid.z;
\tmov.u32 %r4, %nctaid.x;
\tmov.u32 %r5, %nctaid.y;
\tmad.lo.s32 %r6, %r3, %r5, %r2;
\tmad.lo.s32 %r6, %r6, %r4, %r1;
\tshl.b32 %r7, %r3, 16;
\tshl.b32 %r8, %r2, 8;
\tor.b32 %r7, %r7, %r8;
\tor.b32 %r7, %r7, %r1;
\tmul.wide.u32 %rd2, %r6, 4;
\tadd.s64 %rd3, %rd1, %rd2;
\tst.global.b32 [%rd3], %r7;
"""
    memory = GlobalMemory()
    address = memory.allocate(4 * 30)
    run(Kernel.of(parse(module(body, 32, 1))), memory, [address], (5, 3, 2), 0)
    expected = [z << 16 | y << 8 | x for z in range(2) for y in range(3) for x in range(5)]
    assert memory.read(address, 120).view(np.int32).tolist() == expected


# Every thread writes its number; then it reads the number of the same lane of the next warp, or overwrites it.
HANDED_OVER = """
\tld.param.b64 %rd1, [p0];
\tmov.u32 %r1, %tid.x;
\tmul.wide.u32 %rd2, %r1, 4;
\tadd.s64 %rd3, %rd1, %rd2;
\tst.global.b32 [%rd3], %r1;
\tbar.sync 0;
\tadd.s32 %r2, %r1, 32;
\tand.b32 %r2, %r2, 63;
\tmul.wide.u32 %rd4, %r2, 4;
\tadd.s64 %rd5, %rd1, %rd4;
\tld.global.b32 %r3, [%rd5];
\tbar.sync 0;
\tst.global.b32 [%rd5], %r1;
"""


def test_warps_that_wait_hand_global_memory_over():
    (found,) = run_body(HANDED_OVER, [np.zeros(64, np.int32)], threads=64)
    np.testing.assert_array_equal(found, (np.arange(64) + 32) % 64)


@pytest.mark.parametrize(("load", "says"), [("ld.global.b32 %r3, [%rd5];", "reads"), ("", "overwrites")])
@pytest.mark.parametrize("seed", [0, 1])
def test_warps_that_do_not_wait_for_global_memory(load, says, seed):
    body = HANDED_OVER.replace("ld.global.b32 %r3, [%rd5];", load).replace("bar.sync 0;", "")
    with pytest.raises(Fault, match=f"{says} global memory that warp [01] of its program wrote, without a wait"):
        run_body(body, [np.zeros(64, np.int32)], threads=64, schedule=Schedule(seed))
