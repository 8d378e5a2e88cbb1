"""Products in the simulator, and that it finds what is wrong with them."""

import re

import numpy as np
import pytest

from ptxsim.descriptors import F16
from ptxsim.forms import UnknownForm
from tests.ptxsim.product_kernels import (
    CLUSTER_SYNC,
    IMAGE,
    KINDS,
    SCALES_A,
    SCHEDULES,
    SUMS,
    THREADS,
    descriptor,
    found,
    in_tensor_memory_case,
    instruction,
    plain_case,
    product,
    run_product,
    scaled_case,
)
from tests.ptxsim.ptx_text import edited


@pytest.mark.parametrize("wide", [True, False])
def test_products_do_not_read_the_padding_of_fp4_codes_beside_fp8(wide):
    body, content, expected = scaled_case("mxf8f6f4.block_scale.block32", "e4m3", "e2m1", "e8m0", 32, 1, 64)
    for at in range(16384, 16384 + 64 * 128, 16 * THREADS):
        stored = f"    st.shared.v4.b32 [%r4+{at + IMAGE}], {{%r20, %r21, %r22, %r23}};"
        eight_bytes = f"    st.shared.v2.b32 [%r4+{at + IMAGE}], {{%r20, %r21}};"
        body = edited(body, (stored, eight_bytes if wide else f"    st.shared.b32 [%r4+{at + IMAGE}], {{%r20}};"))
    if wide:
        np.testing.assert_array_equal(run_product(body, content, 64), expected)
    else:
        found(body, content, "reads shared memory that nothing wrote")


@pytest.mark.parametrize("kind, a, b, scale, block, count", KINDS, ids=lambda value: str(value))
def test_products_with_block_scales_equal_the_reference(kind, a, b, scale, block, count):
    body, content, expected = scaled_case(kind, a, b, scale, block, count, 96)
    np.testing.assert_array_equal(run_product(body, content, 96), expected)


@pytest.mark.parametrize("a, b", [("bf16", "bf16"), ("f16", "f16"), ("f16", "bf16")])
@pytest.mark.parametrize("columns", [16, 128])
def test_products_of_16_bits(a, b, columns):
    body, content, expected = plain_case(a, b, columns)
    np.testing.assert_array_equal(run_product(body, content, columns), expected)


# What multiplies, and the number of its programs.
CASES = {
    "plain": (plain_case, 1), "A in tensor memory": (in_tensor_memory_case, 1),
    "scaled": (lambda: scaled_case(*KINDS[0], 64), 1), "pair": (lambda: scaled_case(*KINDS[0], 64, programs=2), 2),
    "pair of FP8": (lambda: scaled_case(*KINDS[4], 64, programs=2), 2),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_right_kernels_pass_under_every_schedule(case, schedule):
    make, programs = CASES[case]
    body, content, expected = make()
    np.testing.assert_array_equal(run_product(body, content, 64, schedule, programs), expected)


NO_WAIT = "the tensor pipe wrote, without a wait|nothing wrote"
STORED = "tcgen05.wait::st.sync.aligned;"
BROKEN = [
    ("plain", "fence.proxy.async.shared::cta;", "", "without a fence.proxy.async"),
    ("plain", "tcgen05.wait::ld.sync.aligned;", "", r"uses %r\d+ before tcgen05.wait::ld"),
    ("plain", "    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 512;", "",
     "did not free their tensor memory"),
    ("plain", "b32 %r10, 512;", "b32 %r10, 256;", "which are no allocation"),
    ("plain", "b32 [%r2], 512;", "b32 [%r2], 300;", "not a power of two"),
    ("plain", "b32 [%r2], 512;", "b32 [%r2], 32;", "columns 480 to 543 of tensor memory are not allocated"),
    ("plain", "shl.b32 %r7, %r3, 21;", "shl.b32 %r7, %r3, 20;", "from lane .* on, and its lanes begin at"),
    ("plain", "shl.b32 %r7, %r3, 21;", "shl.b32 %r7, %r1, 16;", "name several addresses"),
    ("plain", f"[ %r11 + {SUMS} ]", "[ %r11 + 64 ]", "reads tensor memory that nothing wrote"),
    ("plain", "@%p1 tcgen05.alloc", "@%p2 tcgen05.alloc", "executed by part of a warp"),
    ("plain", "@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
     "@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
     "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;", "gave up the right"),
    # An epilogue that waits for no commit, or for a phase that is over: the pipe has written the sums, or not.
    ("plain", "WAIT:\n    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r5], 0;\n    @!%p3 bra WAIT;", "", NO_WAIT),
    ("plain", "%p3, [%r5], 0;", "%p3, [%r5], 1;", NO_WAIT),
    ("plain", ", %p5;", ", %p4;", "reads tensor memory that nothing wrote"),
    ("plain", descriptor("%rd11", 16384), descriptor("%rd11", 16384 + 8192), "outside of shared memory"),
    ("A in tensor memory", STORED, "", "tcgen05.st of warp . wrote, without a wait"),
    ("A in tensor memory", STORED, "tcgen05.wait::ld.sync.aligned;", "tcgen05.st of warp . wrote, without a wait"),
    ("A in tensor memory", STORED + "\n    bar.sync 0;", STORED, "nothing wrote|without a wait"),
    ("pair", CLUSTER_SYNC + "\n    mov.pred", "bar.sync 0;\n    mov.pred",
     "nothing wrote|without a wait|not allocated"),
    ("pair", "or.b32 %r9, %r1, %r8;", "xor.b32 %r9, %r8, 1;\n    or.b32 %r9, %r1, %r9;", "not the first of a pair"),
    ("pair", "[%r5], 3;", "[%r5], 1;", "nothing can go on"),  # a commit that reaches one program
]  # fmt: skip


@pytest.mark.parametrize("case, old, new, what", BROKEN)
def test_a_broken_kernel_is_found(case, old, new, what):
    make, programs = CASES[case]
    body, content, _ = make()
    found(edited(body, (old, new)), content, what, programs)


def test_a_transposed_operand_in_tensor_memory_is_found():
    body, content, _ = in_tensor_memory_case()
    (bits,) = set(re.findall(r"mov\.b32 %r12, (\d+);", body))
    transposed = f"%r12, {int(bits) | 1 << 15};"
    found(edited(body, (f"%r12, {bits};", transposed)), content, "matrix a is transposed, in tensor memory")


def test_products_that_overwrite_sums_that_are_read_are_found():
    """After the loads thread 0 issues one more product, and all wait for it."""
    again = f"""
    @!%p2 bra AGAIN;
{product("f16", instruction(F16, 1, 1, 64), descriptor("%rd10", 0), descriptor("%rd11", 16384), None, False)}
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];
AGAIN:
WAIT_AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r5], 1;
    @!%p3 bra WAIT_AGAIN;
    """
    body, content, expected = plain_case()
    waited = "tcgen05.wait::ld.sync.aligned;\n"
    ordered = edited(body, (waited, waited + "    bar.sync 0;" + again))
    for schedule in SCHEDULES:
        np.testing.assert_array_equal(run_product(ordered, content, 64, schedule), expected)
    races = "the tensor pipe overwrites tensor memory that tcgen05.ld of warp . may be reading"
    found(edited(body, (waited, waited + again)), content, races + "|tcgen05.ld of warp . reads .* without a wait")
    found(edited(body, (waited, "bar.sync 0;" + again + waited)), content, races)


def test_a_product_after_the_commit_is_not_waited_for():
    body, content, _ = plain_case()
    commit = "    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];\n"
    before, last, rest = edited(body, (commit, "")).rpartition("    mov.b32 %r12")
    found(before + commit + last + rest, content,
          "tcgen05.ld of warp . reads .* without a wait|tensor pipe overwrites .* may be reading")  # fmt: skip


def test_shared_memory_that_a_product_still_reads_is_found():
    body, content, _ = plain_case()
    overwritten = f"    st.shared.b32 [%r4+{IMAGE}], {{%r1}};\nWAIT:"
    found(edited(body, ("WAIT:", "bar.sync 0;\n" + overwritten)), content,
          "may be reading|without a fence.proxy.async|without a wait")  # fmt: skip
    after = f"    st.shared.b32 [%r4+{IMAGE}], {{%r1}};"
    run_product(plain_case(after=after)[0], content, 64)


def test_operands_that_nothing_wrote_are_found():
    body, content, _ = plain_case()
    stored = re.findall(r"    st.shared.v4.b32 \[%r4\+\d+\], .*?;", body)
    found(edited(body, (stored[-1], "")), content, "reads shared memory that nothing wrote")


def test_scales_must_be_copied_and_the_same_in_all_quarters():
    body, content, _ = scaled_case(*KINDS[0], 64)
    copy = f"tcgen05.cp.cta_group::1.warpx4.32x128b [ %r10 + {SCALES_A + 4} ], %rd12;"
    found(edited(body, (copy, "")), content, "reads tensor memory that nothing wrote")
    stored = f"""
    tcgen05.st.sync.aligned.32x32b.x1.b32 [ %r11 + {SCALES_A} ], {{%r3}};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
    mov.pred %p4, -1;"""
    copy = f"tcgen05.cp.cta_group::1.warpx4.32x128b [ %r10 + {SCALES_A} ], %rd12;"
    other = copy.replace(str(SCALES_A), str(SCALES_A + 16))
    body = edited(body, (copy, other), ("    mov.pred %p4, -1;", stored))
    body = body.replace(f"[ %r10 + {SCALES_A} ]", f"[ %r10 + {SCALES_A - 3} ]")
    found(body, content, "nothing wrote|the quarters of tensor memory hold different scales")
    body = body.replace("x1.b32", "x4.b32").replace("{%r3}", "{%r3, %r3, %r3, %r3}")
    body = body.replace(f"[ %r10 + {SCALES_A - 3} ]", f"[ %r10 + {SCALES_A} ]")
    found(body, content, "the quarters of tensor memory hold different scales")


def test_scales_that_are_copied_after_the_product_are_found():
    body, content, _ = scaled_case(*KINDS[0], 64)
    copies = re.findall(r"mov.b64 %rd12, \d+;\ntcgen05.cp[^;]*;", body)
    late = edited(edited(body, (copies[-1], "")), ("    tcgen05.commit", copies[-1] + "\n    tcgen05.commit"))
    found(late, content, "reads tensor memory that nothing wrote")


def test_one_kernel_has_one_cta_group():
    body, content, _ = plain_case()
    with pytest.raises(UnknownForm, match="several values of cta_group"):
        run_product(
            edited(body, ("@%p1 tcgen05.dealloc.cta_group::1", "@%p1 tcgen05.dealloc.cta_group::2")), content, 64
        )
