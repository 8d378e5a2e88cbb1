"""What hardware does not order or allow by the PTX ISA: each rule of the table in docs/ptxsim.md, and a fault."""

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.forms import UnknownForm
from ptxsim.parse import parse
from ptxsim.run import Kernel, Schedule
from tests.ptxsim.copy_kernels import BULK, MAP, MATRIX, STORE, WRITTEN, finds, noise, run_copy
from tests.ptxsim.product_kernels import KINDS as PRODUCTS
from tests.ptxsim.product_kernels import SCALES_A, found, plain_case, run_product, scaled_case
from tests.ptxsim.ptx_text import edited, module, run_body, run_text

OUT = [np.zeros(4, np.uint32)]

# ---------------------------------------------------------------- mbarriers

RETRIED = edited(WRITTEN, ("    mbarrier.try_wait", "AGAIN:\n    mbarrier.try_wait"),
                 ("%p3, [%r9], 0;\n", "%p3, [%r9], 0;\n    @!%p3 bra AGAIN;\n"))  # fmt: skip


def test_a_wait_that_returns_false_is_tried_again():
    seeds = [Schedule(seed, failing_waits=True) for seed in range(40)]
    for schedule in seeds:
        run_body(RETRIED, OUT, threads=64, shared_bytes=256, schedule=schedule)
    with pytest.raises(Fault, match="wrote, without a wait|may be reading"):
        for schedule in seeds:
            run_body(WRITTEN, OUT, threads=64, shared_bytes=256, schedule=schedule)


def test_mbarriers_are_aligned():
    with pytest.raises(Fault, match="no multiple of 8"):
        run_body(RETRIED.replace("[%r9]", "[%r9+4]"), OUT, threads=64, shared_bytes=256)


# ---------------------------------------------------------------- proxies


def test_a_fence_of_global_memory_is_none_of_shared_memory():
    body, content, expected = plain_case()
    fence = "fence.proxy.async.shared::cta;"
    np.testing.assert_array_equal(run_product(edited(body, (fence, "fence.proxy.async;")), content, 64), expected)
    found(edited(body, (fence, "fence.proxy.async.global;")), content, "without a fence.proxy.async")


FENCE = "    fence.proxy.async.global;\n"
# Threads write what a bulk copy then reads.
WRITTEN_BEFORE = edited(
    BULK, ("    @%p4 mbarrier.arrive", "    add.u64 %rd9, %rd1, %rd3;\n    st.global.b32 [%rd9+16], %r1;\n"
           + FENCE + "    bar.sync 1;\n    @%p4 mbarrier.arrive"),
)  # fmt: skip


@pytest.mark.parametrize("edit, what", [
    ((FENCE, ""), "a copy reads global memory that its program wrote, without a fence.proxy.async"),
    ((FENCE, "    fence.proxy.async.shared::cta;\n"), "global memory that its program wrote, without a fence"),
    (("    bar.sync 1;\n", ""), "global memory that its program wrote, without a wait"),
])  # fmt: skip
def test_what_threads_wrote_is_copied_after_a_fence_of_global_memory(edit, what):
    tensors = [noise(4096), np.zeros(2048, np.uint8), *MAP]
    run_copy(WRITTEN_BEFORE, tensors)
    finds(edited(WRITTEN_BEFORE, edit), tensors, what)


def test_a_bulk_store_is_read_after_a_wait_for_its_writes():
    first = 30 * MATRIX.strides[0] + 40 * MATRIX.itemsize
    read = edited(STORE, ("    bar.sync 2;\n", f"    bar.sync 2;\n    ld.global.b32 %r40, [%rd1+{first}];\n"))
    tensors = [MATRIX, noise(2048), *MAP]
    run_copy(edited(read, ("wait_group.read 0;", "wait_group 0;")), tensors)
    finds(read, tensors, "reads global memory that a bulk store of its program wrote, without a wait")


# ---------------------------------------------------------------- the tensor pipe


@pytest.mark.parametrize("thread, what", [
    (32, "that the tensor pipe wrote, without a wait"),
    (1, "commits operations that another thread of its warp issued"),
])  # fmt: skip
def test_a_commit_covers_the_operations_of_its_own_thread(thread, what):
    body, content, _ = plain_case()
    commit = "    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];\nDONE:\n"
    other = (
        f"DONE:\n    bar.sync 1;\n    setp.eq.u32 %p7, %r1, {thread};\n    @%p7 "
        + commit.removesuffix("DONE:\n").strip()
    )
    found(edited(body, (commit, other + "\n")), content, what)


def test_a_copy_of_scales_by_another_thread_is_unordered():
    body, content, _ = scaled_case(*PRODUCTS[0], 64)
    copies = f"tcgen05.cp.cta_group::1.warpx4.32x128b [ %r10 + {SCALES_A} ], %rd12;"
    before = body[: body.index(copies)].rpartition("mov.b64 %rd12")[2]
    moved = f"    setp.eq.u32 %p7, %r1, 32;\n    mov.b64 %rd12{before}@%p7 {copies}\n    bar.sync 1;\n"
    apart = edited(body, (copies, ""), ("    @!%p2 bra DONE;", moved + "    @!%p2 bra DONE;"))
    found(apart, content, "that the tensor pipe wrote, without a wait|nothing wrote")


# ---------------------------------------------------------------- registers


def test_predicates_begin_undefined():
    body = "ld.param.b64 %rd1, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;\n"
    (got,) = run_body(body + "@%p7 st.global.b32 [%rd1], 1;", [np.zeros(32, np.uint32)], threads=32)
    assert 0 < got.sum() < 32


POOL = """
    mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 128;
    @%p1 bra SMALL;
    setmaxnreg.inc.sync.aligned.u32 232;
    bra.uni END;
SMALL:
    setmaxnreg.dec.sync.aligned.u32 104;
END:
"""


@pytest.mark.parametrize("old, new, what", [
    ("u32 232;", "u32 240;", "nothing can go on"), ("u32 104;", "u32 112;", "nothing can go on"),
    ("dec.sync.aligned.u32 104", "dec.sync.aligned.u32 176", "sets 176 registers a thread, and the warp has 168"),
])  # fmt: skip
def test_registers_come_from_the_program_s_pool(old, new, what):
    def run(body: str) -> None:
        text = module(body, 256, 1).replace(".reqntid 256", ".reqntid 256\n.maxnreg 168")
        run_text(text, OUT)

    run(POOL)
    with pytest.raises(Fault, match=what):
        run(edited(POOL, (old, new)))


# ---------------------------------------------------------------- unknown forms


def test_every_unknown_form_is_named():
    body = "add.f32 %f1, %f2, %f3; foo.f32 %f1, %f2; bar.baz 1; foo.f32 %f3, %f2;"
    with pytest.raises(UnknownForm) as error:
        Kernel.of(parse(module(body, 32, 0)))
    assert [line.split(": ")[-1] for line in str(error.value).splitlines()] == [
        "the form foo.f32 is unknown", "the form bar.baz is unknown"
    ]  # fmt: skip
