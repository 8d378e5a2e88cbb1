"""The life of an mbarrier: what its bytes are while it is one, and who must be done with it at its end."""

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.run import Schedule
from tests.ptxsim.copy_kernels import ONE_WAITS, WRITTEN
from tests.ptxsim.ptx_text import edited, run_body

# A commit of the tensor pipe arrives at the mbarrier, and the thread that ends it has waited.
COMMIT = """
    mov.u32 %r1, %tid.x; mov.b32 %r9, global_smem; setp.eq.b32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 1;
    bar.sync 0;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9];
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r9], 0;
    bar.sync 0;
    @%p1 mbarrier.inval.shared::cta.b64 [%r9];
"""
# As Triton up to 3.7 writes it: without a state space, the address in the lower half of 64 bits.
COMMIT_OF_64_BITS = edited(COMMIT, (
    "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9];",
    "cvt.u64.u32 %rd9, %r9;\n    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd9];",
))  # fmt: skip
# Words of shared memory are read, then they become an mbarrier and end as one, then they are written and read again.
USED_TWICE = """
    mov.u32 %r1, %tid.x; mov.b32 %r9, global_smem; setp.eq.b32 %p1, %r1, 0; shl.b32 %r2, %r1, 2;
    add.s32 %r2, %r9, %r2;
    st.shared.b32 [%r2], %r1;
    bar.sync 0;
    ld.shared.b32 %r3, [%r9];
    bar.sync 0; // after the reads
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 1;
    bar.sync 0; // after the init
    @%p1 mbarrier.inval.shared::cta.b64 [%r9];
    bar.sync 0; // after the end
    st.shared.b32 [%r2], %r1;
    bar.sync 0; // after the writes
    ld.shared.b32 %r3, [%r9]; ld.param.b64 %rd1, [p0];
    st.global.b32 [%rd1], %r3;
"""
# As Triton writes it for a loop that is no specialised warps': of each tile, a copy with an mbarrier of its own.
MANY = """
    mov.u32 %r1, %tid.x; mov.b32 %r9, global_smem; setp.eq.b32 %p1, %r1, 0; ld.param.b64 %rd1, [p0]; mov.b32 %r3, 0;
AGAIN:
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 16;
    @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r9+16], [%rd1], 16, [%r9];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r9], 0;
    @!%p3 bra WAIT;
    ld.shared.b32 %r4, [%r9+16];
    bar.sync 0; // after the reads
    @%p1 mbarrier.inval.shared::cta.b64 [%r9];
    add.s32 %r3, %r3, 1;
    setp.lt.s32 %p4, %r3, 100;
    @%p4 bra AGAIN;
"""


def run(body: str, seed: int) -> None:
    run_body(body, [np.zeros(4, np.uint32)], threads=64, shared_bytes=256, schedule=Schedule(seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("body", [ONE_WAITS, WRITTEN, COMMIT, COMMIT_OF_64_BITS, USED_TWICE, MANY])
def test_as_it_should_be(body, seed):
    run(body, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "body, old, new, what",
    [
        (ONE_WAITS, "bar.sync 0; // of all", "", "ends while something may arrive or wait there|there is no mbarrier"),
        (MANY, "bar.sync 0; // after the reads", "", "may be reading|ends while something|there is no mbarrier"),
        (ONE_WAITS, "[%r9], 0;", "[%r9], %r1;", "the threads of a warp wait for several mbarriers or phases"),
        (ONE_WAITS, "_, [%r9];", "_, [%r9], 2;", "more arrivals at the mbarrier at .* than its 1"),
        (COMMIT, "    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r9], 0;\n", "",
         "may arrive or wait there"),
        (WRITTEN, "    @%p1 st.shared.b32 [%r9+64], %r9;\n    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r9];\n",
         "    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r9];\n    @%p1 st.shared.b32 [%r9+64], %r9;\n",
         "reads shared memory that warp 0 wrote, without a wait|overwrites shared memory that warp 1 may be reading"),
        (USED_TWICE, "bar.sync 0; // after the reads", "", "overwrites shared memory that warp . may be reading"),
        (USED_TWICE, "@%p1 mbarrier.inval.shared::cta.b64 [%r9];", "", "overwrites shared memory that mbarrier.init"),
        (USED_TWICE, "bar.sync 0; // after the init", "ld.shared.b32 %r3, [%r9]; bar.sync 0;",
         "reads shared memory that mbarrier.init wrote"),
        (USED_TWICE, "    bar.sync 0; // after the end\n    st.shared.b32 [%r2], %r1;\n", "", "that nothing wrote"),
    ],
)  # fmt: skip
def test_what_is_wrong(body, old, new, what, seed):
    with pytest.raises(Fault, match=what):
        run(edited(body, (old, new)), seed)
