"""Allocations, loads and stores of tensor memory, and that the simulator finds what is wrong with them."""

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.run import Schedule
from tests.ptxsim.product_kernels import KINDS, SCHEDULES, found, run_product, scaled_case
from tests.ptxsim.ptx_text import edited, run_body

ROUND_TRIP = """
    ld.param.b64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, global_smem;
    shr.u32 %r3, %r1, 5;
    setp.eq.u32 %p1, %r3, 0;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64;
    bar.sync 0;
    ld.shared.b32 %r10, [%r2];
    and.b32 %r4, %r3, 3;
    shl.b32 %r5, %r4, 21;
    add.u32 %r11, %r10, %r5;
    add.u32 %r6, %r1, 1000;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [ %r11 + 5 ], {%r1, %r6};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r7, %r8}, [ %r11 + 5 ];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd2, %r1, 8;
    add.u64 %rd3, %rd1, %rd2;
    st.global.v2.b32 [%rd3], {%r7, %r8};
    bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;
"""


def round_trip(body: str, schedule: Schedule = SCHEDULES[0], threads: int = 128, grid: int = 1) -> np.ndarray:
    return run_body(body, [np.zeros((threads, 2), np.uint32)], threads=threads, shared_bytes=64, grid=grid,
                    schedule=schedule)[0]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_stores_and_loads_of_a_warp(schedule):
    rows = np.arange(128)
    np.testing.assert_array_equal(round_trip(ROUND_TRIP, schedule), np.stack([rows, rows + 1000], 1))


@pytest.mark.parametrize(
    "old, new, what",
    [
        ("    tcgen05.wait::st.sync.aligned;\n", "", "tcgen05.ld of warp . reads .* tcgen05.st of warp . wrote"),
        ("[ %r11 + 5 ], {%r1", "[ %r11 + 63 ], {%r1", "columns 511 to 512 of tensor memory are not allocated"),
        ("[%r2], 64;\n", "[%r2], 64;\n@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 128;\n",
         "allocates 128 columns after an allocation of 64"),
        ("    tcgen05.wait::ld.sync.aligned;\n", "    bar.sync 0;\n    tcgen05.wait::st.sync.aligned;\n",
         "uses %r. before tcgen05.wait::ld"),
        ("    tcgen05.wait::ld.sync.aligned;\n",
         "    tcgen05.st.sync.aligned.32x32b.x1.b32 [ %r11 + 5 ], {%r6};\n    tcgen05.wait::ld.sync.aligned;\n",
         "overwrites tensor memory that tcgen05.ld of warp . may be reading"),
        ("    bar.sync 0;\n    @%p1 tcgen05.dealloc", "    @%p1 tcgen05.dealloc",
         "frees tensor memory in use|not allocated"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_loads_and_stores_is_found(old, new, what):
    for schedule in SCHEDULES:
        with pytest.raises(Fault, match=what):
            round_trip(edited(ROUND_TRIP, (old, new)), schedule)


def test_an_allocation_may_follow_one_that_was_freed():
    body = ROUND_TRIP + ROUND_TRIP.replace("ld.param.b64 %rd1, [p0];", "bar.sync 0;")
    rows = np.arange(128)
    np.testing.assert_array_equal(round_trip(body), np.stack([rows, rows + 1000], 1))


def test_memory_of_a_freed_allocation_holds_nothing():
    """The second allocation has the columns of the first one, and reads them."""
    again = ROUND_TRIP.replace("ld.param.b64 %rd1, [p0];", "bar.sync 0;")
    again = edited(again, ("    tcgen05.st.sync.aligned.32x32b.x2.b32 [ %r11 + 5 ], {%r1, %r6};\n", ""))
    with pytest.raises(Fault, match="reads tensor memory that nothing wrote"):
        round_trip(ROUND_TRIP + again)


def test_every_column_is_allocated_once():
    more = "\n".join(
        f"@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+{4 * i}], 64;" for i in range(9)
    )
    with pytest.raises(Fault, match="allocates 64 columns, and 0 are free"):
        round_trip(
            edited(ROUND_TRIP, ("@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64;", more))
        )


# ---------------------------------------------------------------- pairs

PAIR, PAIR_CONTENT, PAIR_SUMS = scaled_case(*KINDS[0], 64, programs=2)
ALLOC = "@%p1 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r2], 512;"
FREE = "@%p1 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r10, 512;"
SECOND = "setp.eq.u32 %p8, %r8, 1; "


@pytest.mark.parametrize("edits, what", [
    ([(ALLOC, f"shl.b32 %r90, %r8, 2; add.u32 %r90, %r2, %r90; {ALLOC.replace('[%r2]', '[%r90]')}")],
     "the programs of a pair disagree"),
    ([(ALLOC, f"setp.eq.u32 %p9, %r3, %r8; {ALLOC.replace('%p1', '%p9')}")], "the programs of a pair disagree"),
    ([(ALLOC, SECOND + "and.pred %p9, %p1, %p8; " + ALLOC.replace("%p1", "%p9"))], "nothing can go on"),
    ([(FREE, SECOND + "and.pred %p9, %p1, %p8; " + FREE.replace("%p1", "%p9"))], "nothing can go on"),
    ([(ALLOC, SECOND + "and.pred %p9, %p1, %p8; setp.ne.u32 %p7, %r8, 1; and.pred %p7, %p1, %p7;"
       + ALLOC.replace("%p1", "%p9") + ALLOC.replace("%p1", "%p7").replace("512", "256"))],
     "the programs of a pair disagree"),
])  # fmt: skip
def test_pairs_allocate_together(edits, what):
    np.testing.assert_array_equal(run_product(PAIR, PAIR_CONTENT, 64, programs=2), PAIR_SUMS)
    found(edited(PAIR, *edits), PAIR_CONTENT, what, programs=2)
