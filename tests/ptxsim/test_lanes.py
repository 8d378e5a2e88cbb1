"""Threads of one warp need not run in step: what one of them writes, another one reads after both have met."""

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.run import Schedule
from tests.ptxsim.ptx_text import run_body

SYNC = "bar.warp.sync -1;"
NUMBERS = np.arange(32, dtype=np.uint32)
# %r1: the thread; %r2: its word in shared memory; %r3: the word of its neighbour; %rd1: its word in global memory.
BEGIN = """
    mov.u32 %r1, %tid.x; mov.b32 %r9, global_smem;
    shl.b32 %r4, %r1, 2; add.s32 %r2, %r9, %r4; xor.b32 %r3, %r4, 4; add.s32 %r3, %r9, %r3;
    ld.param.b64 %rd9, [p0]; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd1, %rd9, %rd1; ld.global.b32 %r5, [%rd1];
"""
END = "st.global.b32 [%rd1], %r6;"
WRITE, READ, READ_OWN = "st.shared.b32 [%r2], %r5;", "ld.shared.b32 %r6, [%r3];", "ld.shared.b32 %r6, [%r2];"
COPY, WAIT = "cp.async.ca.shared.global [%r2], [%rd1], 4; cp.async.commit_group;", "cp.async.wait_group 0;"
SAME = "mov.b32 %r5, 7; st.shared.b32 [%r9], %r5; ld.shared.b32 %r6, [%r9];"
BARRIER = "bar.sync 0;"
NEIGHBOUR = NUMBERS ^ 1


def result(body: str, seed: int = 0) -> list[int]:
    (found,) = run_body(BEGIN + body + END, [NUMBERS], threads=32, shared_bytes=256, schedule=Schedule(seed))
    return found.tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "body, expected",
    [
        (WRITE + SYNC + READ, NEIGHBOUR), (WRITE + BARRIER + READ, NEIGHBOUR), (WRITE + READ_OWN, NUMBERS),
        (COPY + WAIT + SYNC + READ, NEIGHBOUR), (COPY + WAIT + BARRIER + READ, NEIGHBOUR),
        (COPY + WAIT + READ_OWN, NUMBERS), (SAME, 0 * NUMBERS + 7),
        (WRITE + SYNC + READ + SYNC + "st.shared.b32 [%r2], %r1;", NEIGHBOUR),
        (COPY + WAIT + SYNC + READ + SYNC + COPY + WAIT, NEIGHBOUR), (COPY + WAIT + READ_OWN + COPY + WAIT, NUMBERS),
    ],
)  # fmt: skip
def test_threads_of_a_warp_that_met(body, expected, seed):
    assert result(body, seed) == expected.tolist()


@pytest.mark.parametrize(
    "body, what",
    [
        (WRITE + READ, "reads shared memory that another thread of its warp wrote"),
        (SYNC + WRITE + READ + SYNC, "reads shared memory that another thread of its warp wrote"),
        (COPY + WAIT + READ, "reads shared memory that cp.async of another thread of its warp wrote"),
        (COPY + SYNC + WAIT + READ, "reads shared memory that cp.async of another thread of its warp wrote"),
        (WRITE + SYNC + READ + "add.s32 %r1, %r1, 1;" + "st.shared.b32 [%r2], %r1;",
         "overwrites shared memory that another thread of its warp may be reading"),
        (COPY + WAIT + SYNC + READ + COPY + WAIT, "overwrites shared memory that another thread of its warp may be r"),
        # Two threads read each word, and one of them writes it.
        (WRITE + SYNC + "ld.shared.b32 %r6, [%r9]; setp.eq.b32 %p1, %r1, 0;" + "@%p1 st.shared.b32 [%r9], 9;",
         "overwrites shared memory that another thread of its warp may be reading"),
        (WRITE + "st.shared.b32 [%r3], 9;", "overwrites shared memory that another thread of its warp wrote"),
    ],
)  # fmt: skip
def test_threads_of_a_warp_that_did_not_meet(body, what):
    with pytest.raises(Fault, match=what):
        result(body)
