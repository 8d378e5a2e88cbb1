"""Asynchronous copies and tensor maps of the simulator; and that it finds what is wrong with their use."""

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.forms import UnknownForm
from tests.ptxsim.copy_kernels import (
    BF16,
    BUILT,
    BULK,
    DENSE,
    GAPS,
    LOAD,
    MAP,
    MATRIX,
    OUT,
    PUBLISH,
    READ,
    SCHEDULES,
    STEP,
    STORE,
    WAIT,
    built,
    finds,
    image,
    loaded,
    noise,
    replaced,
    run_copy,
)
from tests.ptxsim.ptx_text import edited

# ---------------------------------------------------------------- cp.async

# Every thread copies 16 bytes to shared memory, and reads those of the other warp.
COPY = """
    ld.param.b64 %rd1, [p0];
    ld.param.b64 %rd2, [p1];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, global_smem;
    shl.b32 %r3, %r1, 4;
    add.u32 %r4, %r2, %r3;
    cvt.u64.u32 %rd3, %r3;
    add.u64 %rd4, %rd1, %rd3;
    add.u64 %rd5, %rd2, %rd3;
    xor.b32 %r5, %r3, 512;
    add.u32 %r6, %r2, %r5;
    mov.b32 %r7, 16;
    cp.async.cg.shared.global [%r4], [%rd4], 16, %r7;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r6];
    st.global.v4.b32 [%rd5], {%r20, %r21, %r22, %r23};
"""
AGAIN = """
    bar.sync 1;
    cp.async.cg.shared.global.L2::128B [%r4], [%rd4+1024], 16;
    cp.async.wait_all;
    bar.sync 2;
    ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r6];
    st.global.v4.b32 [%rd5+1024], {%r20, %r21, %r22, %r23};
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_of_threads_are_read_after_their_wait_and_a_barrier(schedule):
    x = noise(2 * STEP)
    _, got = run_copy(COPY + AGAIN, [x, np.zeros_like(x)], schedule)
    np.testing.assert_array_equal(got.reshape(2, 2, 512)[:, ::-1], x.reshape(2, 2, 512))


@pytest.mark.parametrize("count", [0, 3, 8, 15])
def test_bytes_past_the_source_size_are_zeros(count):
    x = noise(STEP)
    _, got = run_copy(edited(COPY, ("mov.b32 %r7, 16;", f"mov.b32 %r7, {count};")), [x, np.zeros_like(x)])
    expected = np.where(np.arange(16) < count, x.reshape(2, 32, 16), 0)
    np.testing.assert_array_equal(got.reshape(2, 32, 16)[::-1], expected)


def test_a_copy_without_a_source_does_not_access_global_memory():
    body = edited(COPY, ("mov.b32 %r7, 16;", "mov.b32 %r7, 0; mov.b64 %rd4, 8;"))
    assert not run_copy(body, [noise(STEP), noise(STEP)])[1].any()


@pytest.mark.parametrize(
    "old, new, what",
    [
        ("cp.async.wait_group 0;", "", "reads shared memory that (cp.async of warp|nothing wrote)"),
        ("cp.async.commit_group;", "", "reads shared memory that (cp.async of warp|nothing wrote)"),
        (
            "cp.async.wait_group 0;",
            "and.b32 %r9, %r1, 31; setp.eq.u32 %p1, %r9, 0; @%p1 cp.async.wait_group 0;",
            "reads shared memory that cp.async of warp",
        ),
        ("bar.sync 0;", "", "reads shared memory that (cp.async of warp|nothing wrote)"),
        (
            "cp.async.wait_all;",
            "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r4]; cp.async.wait_all;",
            "reads shared memory that cp.async of|overwrites .* may be reading",
        ),
        ("bar.sync 1;", "", "overwrites shared memory that warp . may be reading"),
        ("cp.async.wait_all;", "", "reads shared memory that cp.async of|overwrites .* may be reading"),
        ("mov.b32 %r7, 16;", "mov.b32 %r7, 17;", "copies 17 bytes, more than 16"),
        ("shl.b32 %r3, %r1, 4;", "shl.b32 %r3, %r1, 3;", "no multiple of 16"),
        ("[%rd4], 16, %r7", "[%rd4+2048], 16, %r7", "outside of all tensors"),
        ("[%r4], [%rd4], 16", "[%r4+16000], [%rd4], 16", "outside of shared memory"),
        ("[%r4], [%rd4], 16", "[%r2], [%rd4], 16", "different values to one address"),
    ],
)
def test_finds_what_is_wrong_with_copies_of_threads(old, new, what):
    x = noise(2 * STEP)
    finds(edited(COPY + AGAIN, (old, new)), [x, np.zeros_like(x)], what)


def test_a_wait_for_all_groups_but_one_leaves_the_last():
    body = edited(
        COPY,
        ("    cp.async.wait_group 0;\n", """
    cp.async.cg.shared.global [%r4+1024], [%rd4+1024], 16;
    cp.async.commit_group;
    cp.async.wait_group 1;
"""),
    )  # fmt: skip
    x = noise(2 * STEP)
    for schedule in SCHEDULES:
        _, got = run_copy(body, [x, np.zeros_like(x)], schedule)
        np.testing.assert_array_equal(got[:STEP].reshape(2, 512)[::-1].ravel(), x[:STEP])
    what = "reads shared memory that (cp.async of warp|nothing wrote)"
    finds(edited(body, ("[%r6];", "[%r6+1024];")), [x, np.zeros_like(x)], what)
    finds(edited(body, ("wait_group 1;", "wait_group 2;")), [x, np.zeros_like(x)], what)


def test_a_copy_that_nobody_waits_for_is_no_fault():
    body = COPY[: COPY.index("    cp.async.wait_group")]
    run_copy(body, [noise(STEP), noise(STEP)])


@pytest.mark.parametrize("size", ["4", "8", "32"])
def test_copies_past_the_first_cache_have_16_bytes(size):
    with pytest.raises(UnknownForm, match=f"a copy of {size} bytes"):
        run_copy(edited(COPY, ("[%rd4], 16, %r7", f"[%rd4], {size}, %r7")), [noise(STEP), noise(STEP)])


# ---------------------------------------------------------------- tensor maps


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_box_is_read_after_its_mbarrier(schedule):
    _, got, _ = run_copy(LOAD, [MATRIX, *OUT, *MAP], schedule)
    np.testing.assert_array_equal(got, image(MATRIX[:, :90], [64, 16], [8, 4], 3))


def test_a_warp_meets_where_it_copies_a_map():
    """`.sync.aligned` stands for the barrier behind what one thread wrote; not for the one before it."""
    behind = edited(LOAD, (BUILT, BUILT.replace("    bar.warp.sync 0xffffffff;\n", "")))
    _, got, _ = run_copy(behind, [MATRIX, *OUT, *MAP])
    np.testing.assert_array_equal(got, image(MATRIX[:, :90], [64, 16], [8, 4], 3))
    with pytest.raises(Fault, match="reads shared memory that another thread of its warp wrote, without bar.warp.sync"):
        run_copy(behind.replace("    bar.warp.sync 0xffffffff;\n", ""), [MATRIX, *OUT, *MAP])


@pytest.mark.parametrize(
    "shape, element, box, mode, corner",
    [
        ((4096,), 0, [256], 0, [1000]), ((4096,), 0, [256], 0, [4000]), ((4096,), 0, [256], 0, [-100]),
        ((70, 96), 0, [32, 64], 1, [16, 5]), ((40, 96), 0, [64, 32], 2, [48, 20]), ((40, 96), 0, [128, 16], 3, [0, 30]),
        ((40, 96), 0, [64, 32], 0, [48, 20]), ((40, 96), BF16, [32, 32], 2, [-8, -3]),
        ((9, 80), 7, [32, 16], 3, [70, 1]), ((5, 9, 96), BF16, [64, 4, 4], 3, [-5, 6, 3]),
        ((3, 4, 5, 64), 0, [64, 4, 2, 4], 0, [0, 3, -1, 1]),
        ((2, 3, 4, 5, 32), 6, [16, 4, 2, 2, 4], 1, [16, 2, 3, 2, -1]),
    ],
)  # fmt: skip
def test_boxes_of_every_rank_and_swizzle(shape, element, box, mode, corner):
    dtype = {0: np.uint8, BF16: np.uint16, 6: np.uint16, 7: np.uint32}[element]
    x = np.random.default_rng(1).integers(0, 255, shape).astype(dtype)
    strides = [stride for stride in x.strides[-2::-1]] if x.ndim > 1 else []
    nbytes = int(np.prod(box)) * x.itemsize
    body = built(list(shape[::-1]), strides, box, element, mode) + loaded(corner, nbytes) + WAIT
    body += READ if nbytes == 2048 else "".join(line + "\n" for line in READ.splitlines() if "1024" not in line)
    if nbytes == 256:
        body = body.replace("    ld.shared.v4", "    setp.lt.u32 %p5, %r1, 16;\n    @%p5 ld.shared.v4")
        body = body.replace("    st.global.v4", "    @%p5 st.global.v4")
    _, got, _ = run_copy(body, [x, *OUT, *MAP])
    np.testing.assert_array_equal(got[:nbytes], image(x, box, corner, mode))


def test_4_bit_elements_get_gaps_in_shared_memory():
    x = noise(40, 128)  # [40, 256] elements
    body = built([256, 40], [128], [128, 16], GAPS, 3) + loaded([128, 30], 16 * 64) + WAIT + READ
    with pytest.raises(Fault, match="reads shared memory that nothing wrote"):
        run_copy(body, [x, *OUT, *MAP])
    for names in ("%r20, %r21", "%r24, %r25"):
        rest = names.replace("0", "2").replace("1", "3") if "20" in names else "%r26, %r27"
        body = edited(body, (f"ld.shared.v4.b32 {{{names}, {rest}}}", f"ld.shared.v2.b32 {{{names}}}"))
    _, got, _ = run_copy(body, [x, *OUT, *MAP])
    expected = np.zeros((16, 8, 16), np.uint8)
    expected[:10, :, :8] = x[30:, 64:].reshape(10, 8, 8)
    expected = image(expected.reshape(16, 128), [128, 16], [0, 0], 3).reshape(128, 16)
    np.testing.assert_array_equal(got.reshape(128, 16)[:, :8], expected[:, :8])


ACQUIRE = "    fence.proxy.tensormap::generic.acquire.gpu [%rd10], 128;\n"
ADDRESS = "@%p2 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r2], %rd11;"


@pytest.mark.parametrize(
    "edits, what",
    [
        ([(ACQUIRE, "")], "no fence.proxy.tensormap acquired"),
        ([(ACQUIRE, ""), ("    bar.sync 1;\n", "    bar.sync 1;\n    @%p1 " + ACQUIRE.strip() + "\n")],
         "no fence.proxy.tensormap acquired"),
        ([("release.gpu.sync.aligned [%rd10], [%r2]", "release.gpu.sync.aligned [%rd10+128], [%r2]")],
         "no tensor map was released"),
        ([("release.gpu.sync.aligned [%rd10], [%r2]", "release.gpu.sync.aligned [%rd10+64], [%r2]")], "no multiple of"),
        ([("[%rd10], 128;\nBUILT", "[%rd10], 128; st.global.b32 [%rd10+16], %r11;\nBUILT")],
         "overwritten after its release"),
        ([("    st.shared.b32 [%r10], %r11;\n", "")], "reads shared memory that nothing wrote"),
        ([("mov.b32 %r11, 0;\n    st", "mov.b32 %r11, 7;\n    st")], "not cleared"),
        ([("    bar.sync 1;", "")], "tensor map|mbarrier"),
        ([("[%r12], 2048;", "[%r12], 2064;")], "nothing can go on"),
        ([("[%r12], 2048;", "[%r12], 2032;")], "nothing can go on"),
        ([(WAIT, "")], "reads shared memory that (a copy|nothing) wrote"),
        ([("add.u32 %r13, %r2, 1024;", "add.u32 %r13, %r2, 1088;")], "no multiple of 128"),
        ([("add.u32 %r13, %r2, 1024;", "add.u32 %r13, %r2, 15360;")], "outside of shared memory"),
        ([("@%p4 cp.async.bulk.tensor", "cp.async.bulk.tensor")], "a copy overwrites shared memory|nothing can go on"),
        ([(replaced("global_dim", 40, 1), replaced("global_dim", 4000, 1)), ("{8, 4}", "{8, 100}")],
         "outside of all tensors"),
        ([(replaced("rank", 1), replaced("rank", 2))], r"element strides \[1, 1, 0\]"),
        ([(replaced("rank", 1), replaced("rank", 5))], "rank 6"),
        ([(replaced("rank", 1), replaced("rank", 0))], "rank 1 with fields .* beyond it"),
        ([(BUILT, replaced("box_dim", 1, 2) + BUILT)], "rank 2 with fields .* beyond it"),
        ([(replaced("rank", 1), replaced("rank", 0)), (replaced("box_dim", 16, 1), ""),
          (replaced("global_dim", 40, 1), ""), (replaced("element_stride", 1, 1), ""),
          (replaced("global_stride", 192, 0), "")], "2 coordinates for a tensor map of rank 1"),
        ([(replaced("elemtype", 10), replaced("elemtype", 11))], "element type 11"),
        ([(replaced("swizzle_mode", 3), replaced("swizzle_mode", 2))], "rows of 128 bytes, with a swizzle of 64"),
        ([(replaced("swizzle_mode", 3), replaced("swizzle_mode", 4))], "swizzle mode 4"),
        ([(replaced("swizzle_mode", 3), replaced("swizzle_mode", 256))], "a value of 256 for swizzle_mode"),
        ([(replaced("box_dim", 64, 0), replaced("box_dim", 257, 0))], "1 to 256 elements"),
        ([(replaced("box_dim", 64, 0), replaced("box_dim", 60, 0))], "no multiple of 16"),
        ([(replaced("box_dim", 64, 0), replaced("box_dim", 32, 0))], "not simulated"),
        ([(replaced("global_dim", 40, 1), replaced("global_dim", 0, 1))], r"dimensions \(90, 0\)"),
        ([(replaced("global_stride", 192, 0), replaced("global_stride", 200, 0))], "no multiples of 16"),
        ([(ADDRESS, "add.u64 %rd11, %rd11, 8; " + ADDRESS)], "no multiples of 16"),
        ([(replaced("element_stride", 1, 1), replaced("element_stride", 2, 1))], "element strides"),
        ([(BUILT, replaced("interleave_layout", 1) + BUILT)], "interleaved"),
        ([(BUILT, replaced("fill_mode", 1) + BUILT)], "fill mode"),
    ],
)  # fmt: skip
def test_finds_what_is_wrong_with_loads_of_boxes(edits, what):
    finds(edited(LOAD, *edits), [MATRIX, *OUT, *MAP], what)


def test_coordinates_are_as_many_as_the_opcode_says():
    with pytest.raises(UnknownForm, match="3 coordinates"):
        run_copy(edited(LOAD, ("{8, 4}", "{8, 4, 0}")), [MATRIX, *OUT, *MAP])


def test_a_box_is_loaded_where_another_one_was_read():
    body = (
        LOAD + "    bar.sync 2;" + loaded([0, 0], 2048) + WAIT.replace("WAIT", "MORE").replace("], 0;", "], 1;") + READ
    )
    for schedule in SCHEDULES:
        _, got, _ = run_copy(body, [MATRIX, *OUT, *MAP], schedule)
        np.testing.assert_array_equal(got, image(MATRIX[:, :90], [64, 16], [0, 0], 3))
    finds(edited(body, ("    bar.sync 2;", "")), [MATRIX, *OUT, *MAP], "a copy overwrites .* warp 0 may be reading")


def test_a_map_is_rebuilt_after_its_last_use():
    body = (
        built(**DENSE)
        + loaded([8, 4], 2048)
        + WAIT
        + "    bar.sync 2;\n    @!%p1 bra REBUILT;\n"
        + PUBLISH
        + "REBUILT:\n"
    )
    for schedule in SCHEDULES:
        run_copy(body, [MATRIX, *OUT, *MAP], schedule)
    finds(edited(body, (WAIT, "")), [MATRIX, *OUT, *MAP], "overwrites a tensor map that a copy may be reading")


# ---------------------------------------------------------------- stores of boxes


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_store_writes_what_lies_in_the_tensor(schedule):
    values = noise(16, 128)[::-1].copy().view(np.uint16)  # the box, [16, 64]
    got, _, _ = run_copy(STORE, [MATRIX, image(values, [64, 16], [0, 0], 3), *MAP], schedule)
    expected = MATRIX.copy()
    expected[30:, 40:90] = values[:10, :50]
    np.testing.assert_array_equal(got, expected)


FENCE = "    fence.proxy.async.shared::cta;\n"
HALF = "    st.shared.v4.b32 [%r14+1024], {%r24, %r25, %r26, %r27};\n"
LAST = "    st.shared.v4.b32 [%r14], {%r20, %r21, %r22, %r23};\n"
OVERWRITTEN = "    bar.sync 2;\n" + LAST
READING = "may be reading|reads shared memory that warp . wrote, without a wait"


@pytest.mark.parametrize(
    "edits, what",
    [
        ([(FENCE, "")], "wrote, without a fence.proxy.async"),
        ([(HALF + FENCE, FENCE + HALF)], "wrote, without a fence.proxy.async"),  # of what was written before it alone
        ([("    bar.sync 1;\n", "")], "tensor map|shared memory that (nothing|warp 0) wrote"),
        ([("    cp.async.bulk.wait_group.read 0;\n", "")], READING),
        ([("    cp.async.bulk.commit_group;\n", "")], READING),
        ([("    bar.sync 2;\n", "")], READING),
        ([("    cp.async.bulk.wait_group.read 0;\n", ""), (OVERWRITTEN, "")], "ends without a wait for the copy"),
        ([("    cp.async.bulk.commit_group;\n", ""), (OVERWRITTEN, "")], "ends without a wait for the copy"),
        ([("wait_group.read 0;", "wait_group.read 1;"), (OVERWRITTEN, "")], "ends without a wait for the copy"),
        ([("    cp.async.bulk.wait", "    @!%p4 cp.async.bulk.wait"), (OVERWRITTEN, "")], "ends without a wait"),
        ([("{40, 30}], [%r13]", "{40, 30}], [%r13+64]")], "no multiple of 128"),
        ([(replaced("global_dim", 40, 1), replaced("global_dim", 4000, 1)), ("{40, 30}", "{40, 300}")],
         "outside of all tensors"),
        ([(replaced("elemtype", 10), replaced("elemtype", 14)),
          (replaced("box_dim", 64, 0), replaced("box_dim", 128, 0)),
          (replaced("global_dim", 90, 0), replaced("global_dim", 128, 0)), ("{40, 30}", "{0, 30}")], "not simulated"),
    ],
)  # fmt: skip
def test_finds_what_is_wrong_with_stores_of_boxes(edits, what):
    finds(edited(STORE, *edits), [MATRIX, noise(2048), *MAP], what)


# ---------------------------------------------------------------- bulk copies without a map


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_bulk_copy_is_read_after_its_mbarrier(schedule):
    x = noise(4096)
    _, got = run_copy(BULK, [x, *OUT], schedule)
    np.testing.assert_array_equal(got, x[16 : 2048 + 16])


@pytest.mark.parametrize(
    "old, new, what",
    [
        ("mov.b32 %r15, 2048;", "mov.b32 %r15, 2040;", "not all multiples of 16"),
        ("[%rd1+16]", "[%rd1+8]", "not all multiples of 16"),
        ("[%r13], [%rd1+16]", "[%r13+8], [%rd1+16]", "not all multiples of 16"),
        ("[%rd1+16]", "[%rd1+2064]", "outside of all tensors"),
        ("mov.b32 %r15, 2048;", "mov.b32 %r15, 1024;", "nothing can go on"),
        (WAIT, "", "reads shared memory that (a copy|nothing) wrote"),
        ("    bar.sync 0;\n", "", "mbarrier"),
        ("%r15, [%r12];", "%r15, [%r12+8];", "there is no mbarrier"),
    ],
)
def test_finds_what_is_wrong_with_bulk_copies(old, new, what):
    finds(edited(BULK, (old, new)), [noise(4096), *OUT], what)


def test_an_mbarrier_is_not_ended_before_the_copy():
    ended = edited(BULK, (WAIT, "    @%p4 mbarrier.inval.shared::cta.b64 [%r12];\n"), (READ, ""))
    finds(ended, [noise(4096), *OUT], "bytes missing")
    expects = "    @%p4 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], 2048;\n"
    finds(edited(ended, (expects, "")), [noise(4096), *OUT], "bytes missing|ended before the copy")


# ---------------------------------------------------------------- clusters

TOGETHER = """
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""
TWO = edited(
    LOAD,
    ("    bar.sync 1;\n", TOGETHER + "    setp.eq.and.u32 %p6, %r8, 0, %p4;\n"),
    ("    @%p4 cp.async", "    @%p6 cp.async"),
    ("2d.shared::cta.global.mbarrier::complete_tx::bytes ", "2d.shared::cluster.global.mbarrier::complete_tx::bytes"
     ".multicast::cluster "),
    ("{8, 4}], [%r12];", "{8, 4}], [%r12], %rs1;"),
    ("    mov.u32 %r1, %tid.x;", "    .reg .b16 %rs<4>;\n    mov.b16 %rs1, 3;\n    mov.u32 %r1, %tid.x;"),
) + TOGETHER  # fmt: skip
PAIR = dict(grid=2, cluster=2)


# The first program loads for both, and waits for the bytes of both.
FOR_BOTH = edited(
    TWO,
    ("2d.shared::cluster.global", "2d.cta_group::2.shared::cluster.global"),
    ("    @%p4 mbarrier.arrive", "    @%p6 mbarrier.arrive"), ("_, [%r12], 2048;", "_, [%r12], 4096;"),
    (WAIT, "    setp.ne.u32 %p8, %r8, 0;\n    @%p8 bra SKIP;" + WAIT + "SKIP:" + TOGETHER),
)  # fmt: skip


# The second program loads, and the first one waits for it.
OTHER = edited(
    LOAD,
    ("    bar.sync 1;\n", TOGETHER + """
    setp.eq.and.u32 %p6, %r8, 0, %p4;
    setp.eq.and.u32 %p7, %r8, 1, %p4;
    mov.b32 %r16, 0;
    mapa.shared::cluster.u32 %r17, %r12, %r16;
"""),
    ("    @%p4 mbarrier.arrive", "    @%p6 mbarrier.arrive"),
    ("    @%p4 cp.async", "    setp.ne.u32 %p8, %r8, 0;\n    @%p7 cp.async"),
    ("2d.shared::cta.global.mbarrier::complete_tx::bytes ", "2d.shared::cluster.global.mbarrier::complete_tx::bytes"
     ".cta_group::2 "),
    ("{8, 4}], [%r12];", "{8, 4}], [%r17];"),
    (WAIT, "    @%p8 bra SKIP;" + WAIT + "SKIP:" + TOGETHER + "    setp.eq.u32 %p9, %r8, 0;\n    @%p9 bra END;\n"),
) + "END:" + TOGETHER  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("body", "programs"), [(TWO, (0, 1)), (FOR_BOTH, (0, 1)), (OTHER, (1,))],
                         ids=["multicast", "a pair's", "the other one's"])  # fmt: skip
def test_copies_within_a_cluster(body, programs, schedule):
    """Into both programs, with an mbarrier in each; with one mbarrier of a pair; with the other program's mbarrier."""
    _, got, _ = run_copy(body, [MATRIX, np.zeros(4096, np.uint8), *MAP], schedule, **PAIR)
    for program in programs:
        np.testing.assert_array_equal(got.reshape(2, 2048)[program], image(MATRIX[:, :90], [64, 16], [8, 4], 3))


OWN = ("complete_tx::bytes.cta_group::2 ", "complete_tx::bytes ")


@pytest.mark.parametrize(("body", "edits", "what"), [
    (TWO, [("mov.b16 %rs1, 3;", "mov.b16 %rs1, 1;")], "nothing can go on"),
    (TWO, [("mov.b16 %rs1, 3;", "mov.b16 %rs1, 5;")], "of a program that the cluster does not have"),
    (FOR_BOTH, [("cta_group::2.", "")], "nothing can go on"),
    (OTHER, [OWN], "completes on the mbarrier of another one"),
    (OTHER, [OWN, ("shared::cluster.global", "shared::cta.global"), ("[%r13], [%rd10", "[%r18], [%rd10"),
             ("    mov.b32 %r16, 0;", "    mov.b32 %r16, 0;\n    mapa.shared::cluster.u32 %r18, %r13, %r16;")],
     "an address of another program"),
])  # fmt: skip
def test_finds_what_is_wrong_with_copies_within_a_cluster(body, edits, what):
    finds(edited(body, *edits), [MATRIX, np.zeros(4096, np.uint8), *MAP], what, **PAIR)
