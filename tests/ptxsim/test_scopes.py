"""Scopes of arrivals, waits and fences, relaxed operations, and the fences of tensor memory: each rule, and a fault."""

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.global_memory import GlobalMemory
from ptxsim.parse import parse
from ptxsim.run import Kernel, Schedule, run
from tests.ptxsim.product_kernels import SCALES_A, SCHEDULES, in_tensor_memory_case, plain_case, run_product
from tests.ptxsim.ptx_text import edited, module, run_body

OUT = [np.zeros(64, np.uint32)]
STRICT = Schedule(strict_scopes=True)

# ---------------------------------------------------------------- mbarriers of another program

# Thread 0 of each program writes a word of its own; the second one arrives at the first one's mbarrier, whose warp then
# reads the second one's word.
REMOTE = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.b32 %r9, global_smem; mov.b32 %r3, 0; mov.b32 %r4, 1;
    setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r2, 0; setp.eq.and.u32 %p3, %r2, 1, %p1;
    mapa.shared::cluster.u32 %r5, %r9, %r3;
    mapa.shared::cluster.u32 %r6, %r9, %r4;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 1;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p1 st.shared.b32 [%r9+64], %r9;
    // before the arrival
    @%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
    @!%p2 bra END;
AGAIN:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r9], 0;
    @!%p4 bra AGAIN;
    // behind the wait
    ld.shared.b32 %r7, [%r6+64];
END:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""
PAIR = dict(threads=32, shared_bytes=256, grid=2, cluster=2)
LATE = "reads shared memory that warp 1 wrote, without a wait"
ARRIVES, WAITS, BEFORE, BEHIND = (
    "arrive.release.cluster.",
    "acquire.cluster.",
    "// before the arrival",
    "// behind the wait",
)


def notes_of(body: str) -> list[str]:
    """The notes of a launch of a pair under a schedule that is not strict."""
    memory = GlobalMemory()
    address = memory.allocate(256, np.zeros(256, np.uint8))
    return sorted(run(Kernel.of(parse(module(body, 32, 1, 2))), memory, [address], 2, 256).notes)


@pytest.mark.parametrize("edits", [
    [],
    [(ARRIVES, "arrive.relaxed.cluster."), (BEFORE, "fence.acq_rel.cluster;")],
    [(WAITS, "relaxed.cluster."), (BEHIND, "fence.acq_rel.cluster;")],
    [(ARRIVES, "arrive.relaxed.cluster."), (BEFORE, "fence.sc.gpu;"), (WAITS, "relaxed.cluster."),
     (BEHIND, "fence.sc.sys;")],
])  # fmt: skip
def test_what_orders_a_cluster(edits):
    run_body(edited(REMOTE, *edits), OUT, **PAIR, schedule=STRICT)


@pytest.mark.parametrize("edits", [
    [(ARRIVES, "arrive.")],
    [(ARRIVES, "arrive.release.cta.")],
    [(WAITS, "")],
    [(WAITS, "acquire.cta.")],
    [(ARRIVES, "arrive.relaxed.cluster.")],
    [(ARRIVES, "arrive.relaxed.cluster."), (BEFORE, "fence.acq_rel.cta;")],
    [(WAITS, "relaxed.cluster.")],
    [(WAITS, "relaxed.cluster."), (BEHIND, "fence.acq_rel.cta;")],
    [(WAITS, "relaxed.cta."), (BEHIND, "fence.acq_rel.cluster;")],
    [(ARRIVES, "arrive.relaxed.cta."), (BEFORE, "fence.acq_rel.cluster;")],
    [(ARRIVES, "arrive.relaxed.cluster."), ("    @%p1 st.shared.b32 [%r9+64], %r9;\n    " + BEFORE,
                                            "fence.acq_rel.cluster;\n    @%p1 st.shared.b32 [%r9+64], %r9;")],
])  # fmt: skip
def test_what_does_not_order_a_cluster(edits):
    with pytest.raises(Fault, match=LATE):
        run_body(edited(REMOTE, *edits), OUT, **PAIR, schedule=STRICT)


def test_scopes_that_compilers_leave_out_are_notes():
    assert notes_of(REMOTE) == []
    assert notes_of(edited(REMOTE, (ARRIVES, "arrive."), (WAITS, ""))) == [
        "arrivals at another program's mbarrier with the scope of the own one",
        "waits for arrivals of another program's threads with the scope of the own one",
    ]


def test_a_wait_of_the_own_scope_acquires_what_the_own_program_released():
    """Also where another program arrives at the same mbarrier."""
    arrival = """setp.eq.and.u32 %p5, %r2, 0, %p1;
    @%p5 mbarrier.arrive.shared::cta.b64 _, [%r9];"""
    both = edited(REMOTE, ("[%r9], 1;", "[%r9], 2;"), (BEFORE, arrival), (WAITS, ""), ("[%r6+64]", "[%r9+64]"))
    run_body(both, OUT, **PAIR, schedule=STRICT)


# ---------------------------------------------------------------- the barrier of a cluster

# Thread 0 of each program writes a word, and reads the other one's behind the cluster's barrier.
CLUSTER = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.b32 %r9, global_smem; xor.b32 %r3, %r2, 1;
    setp.eq.u32 %p1, %r1, 0;
    mapa.shared::cluster.u32 %r6, %r9, %r3;
    @%p1 st.shared.b32 [%r9+64], %r9;
    // fence
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    ld.shared.b32 %r7, [%r6+64];
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""


def test_a_relaxed_arrival_at_the_barrier_of_a_cluster():
    relaxed = edited(CLUSTER, ("arrive.release.aligned", "arrive.relaxed.aligned"))
    for body in (CLUSTER, edited(relaxed, ("// fence", "fence.acq_rel.cluster;"))):
        run_body(body, OUT, **PAIR)
    for body in (relaxed, edited(relaxed, ("// fence", "fence.acq_rel.cta;"))):
        with pytest.raises(Fault, match="shared memory that warp . wrote, without a wait"):
            run_body(body, OUT, **PAIR)


# ---------------------------------------------------------------- fences and relaxed atomic operations

# Program 0 writes a word and counts up; the others wait for the count, and read the word.
COUNTED = """
    ld.param.b64 %rd1, [p0]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0;
    @!%p1 bra AGAIN;
    st.global.b32 [%rd1+128], 7;
    fence.acq_rel.gpu; // release
    red.relaxed.gpu.global.add.u32 [%rd1], 1;
    bra.uni END;
AGAIN:
    ld.relaxed.gpu.global.b32 %r2, [%rd1];
    setp.eq.b32 %p2, %r2, 0;
    @%p2 bra AGAIN;
    fence.acq_rel.gpu; // acquire
    ld.global.b32 %r3, [%rd1+128];
END:
"""


def test_fences_order_relaxed_atomic_operations():
    one = dict(threads=32, grid=3)
    run_body(COUNTED, OUT, **one)
    for edit in (("fence.acq_rel.gpu; // release", ""), ("fence.acq_rel.gpu; // acquire", ""),
                 ("fence.acq_rel.gpu; // release", "fence.acq_rel.cluster;"),
                 ("fence.acq_rel.gpu; // acquire", "fence.acq_rel.cta;"), ("red.relaxed.gpu", "red.relaxed.cta"),
                 ("ld.relaxed.gpu", "ld.relaxed.cluster"),
                 ("    st.global.b32 [%rd1+128], 7;\n    fence.acq_rel.gpu; // release\n",
                  "    fence.acq_rel.gpu;\n    st.global.b32 [%rd1+128], 7;\n")):  # fmt: skip
        with pytest.raises(Fault, match="reads global memory that another program of the launch wrote"):
            run_body(edited(COUNTED, edit), OUT, **one)


# ---------------------------------------------------------------- tcgen05.fence

AFTER, SENT = "    tcgen05.fence::after_thread_sync;\n", "    tcgen05.fence::before_thread_sync;\n"
BEHIND_COMMIT = ("    @!%p3 bra WAIT;\n", "    @!%p3 bra WAIT;\n" + AFTER)
MISSING = "tensor memory that .* wrote, without a wait|tensor memory that .* may be reading"


def finds(body: str, content: np.ndarray, **schedule) -> None:
    for seed in range(2):
        with pytest.raises(Fault, match=MISSING):
            run_product(body, content, 64, Schedule(seed, strict_loads=True, **schedule))


def test_loads_behind_a_commit_take_a_fence():
    """A kernel without any fence is held to them under `strict_fences` alone."""
    body, content, expected = plain_case()
    strict = Schedule(strict_fences=True)
    for schedule in (strict, *SCHEDULES):
        np.testing.assert_array_equal(run_product(edited(body, BEHIND_COMMIT), content, 64, schedule), expected)
    np.testing.assert_array_equal(run_product(body, content, 64), expected)
    finds(body, content, strict_fences=True)
    finds(edited(body, ("WAIT:\n", AFTER + "WAIT:\n")), content)  # too early


def test_a_kernel_without_fences_is_noted():
    body, content, _ = plain_case()
    for text, noted in ((body, True), (edited(body, BEHIND_COMMIT), False)):
        memory = GlobalMemory()
        addresses = [memory.allocate(content.size, content), memory.allocate(4 * 128 * 64)]
        notes = run(Kernel.of(parse(module(text, 128, 2))), memory, addresses, 1, 1024 + content.size).notes
        assert ("uses of tensor memory in a kernel without tcgen05.fence" in notes) == noted


def test_stores_before_a_barrier_take_both_fences():
    body, content, expected = in_tensor_memory_case()
    stored = "    tcgen05.wait::st.sync.aligned;\n    bar.sync 0;\n    mov.pred %p4, -1;"
    fenced = f"    tcgen05.wait::st.sync.aligned;\n{SENT}    bar.sync 0;\n{AFTER}    mov.pred %p4, -1;"
    right = edited(body, (stored, fenced), BEHIND_COMMIT)
    np.testing.assert_array_equal(run_product(right, content, 64), expected)
    for fence in (SENT, AFTER + "    mov.pred"):
        finds(edited(right, (fence, "    mov.pred" if "pred" in fence else "")), content)
    finds(edited(right, ("    tcgen05.wait::st.sync.aligned;\n", "")), content)
    assert f"+ {SCALES_A} ], {{" in body  # where A is


def test_products_of_two_threads_are_in_order_behind_both_fences():
    """The second thread adds to the first one's sums, whose products need not be complete."""
    body, content, expected = plain_case()
    products = body[body.index("    @!%p2 bra DONE;") : body.index("    tcgen05.commit")]
    steps = products.split("    mov.b32 %r12,")
    first, second = "    mov.b32 %r12,".join(steps[:3]), "    mov.b32 %r12,".join(["", *steps[3:]])
    begins = "    setp.eq.u32 %p7, %r1, 32;\n    @!%p7 bra LAST;"
    moved = first + "DONE:\n" + SENT + "    bar.sync 0;\n" + AFTER + begins + second
    split = edited(body, (products, moved), ("b64 [%r5];\nDONE:\n", "b64 [%r5];\nLAST:\n"), BEHIND_COMMIT)
    for schedule in SCHEDULES:
        np.testing.assert_array_equal(run_product(split, content, 64, schedule), expected)
    for fence in (SENT, AFTER + "    setp"):
        finds(edited(split, (fence, "    setp" if "setp" in fence else "")), content)
    finds(edited(split, (SENT, ""), ("bar.sync 0;\n" + AFTER + "    setp", "bar.sync 0;\n    setp")), content)
