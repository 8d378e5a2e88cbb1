"""Matrices of warps and warpgroups in the simulator; and that it finds what is wrong with their use."""

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.forms import UnknownForm
from ptxsim.run import Schedule
from tests.ptxsim.ptx_text import edited, run_body
from tests.ptxsim.warp_matrix_kernels import (
    FENCE,
    GROUPS,
    LANES,
    TILE,
    descriptor,
    load_matrices,
    store_matrices,
    wgmma,
    wgmma_case,
)

SCHEDULES = [Schedule(seed) for seed in range(2)]


# ---------------------------------------------------------------- ldmatrix, stmatrix

THREADS = 64


def places(count: int, trans: str) -> list[tuple[int, int, int, int]]:
    """(lane, half of a register, row in shared memory, column) of the elements of a warp's matrices, by register."""
    found = []
    for register in range(count):
        for lane, (g, t) in enumerate(LANES):
            for half in (0, 1):
                row, column = (2 * t + half, g) if trans else (g, 2 * t + half)
                found.append((lane, 2 * register + half, (8 * register + row) ^ 5, column))
    return found


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_loaded_to_the_registers_of_a_warp(count, trans):
    x = np.arange(THREADS * 8, dtype=np.uint16).reshape(2, 32, 8)
    expected = x.copy()
    for lane, half, row, column in places(count, trans):
        expected[:, lane, half] = x[:, row, column]
    for schedule in SCHEDULES:
        got = run_body(load_matrices(count, trans), [x, np.zeros_like(x)], threads=THREADS, shared_bytes=1024,
                       schedule=schedule)[1]  # fmt: skip
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_stored_from_the_registers_of_a_warp(count, trans):
    x = np.arange(THREADS * 8, dtype=np.uint16).reshape(2, 32, 8)
    expected = x.copy()
    for lane, half, row, column in places(count, trans):
        expected[:, row, column] = x[:, lane, half]
    got = run_body(store_matrices(count, trans), [x, np.zeros_like(x)], threads=THREADS, shared_bytes=1024)[1]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("body", [load_matrices(4, ""), store_matrices(4, "")], ids=["ldmatrix", "stmatrix"])
@pytest.mark.parametrize(
    "old, new, what",
    [
        ("add.u32 %r6, %r2, %r5;", "add.u32 %r6, %r2, %r5; add.u32 %r6, %r6, 8;", "no multiple of 16"),
        ("add.u32 %r6, %r2, %r5;", "add.u32 %r6, %r2, %r5; add.u32 %r6, %r6, 1024;", "outside of shared memory"),
        ("    bar.sync 0;\n", "    bar.sync 0;\n    @%p1 ", "a part of a warp"),
    ],
)
def test_finds_what_is_wrong_with_loads_and_stores_of_matrices(body, old, new, what):
    for schedule in SCHEDULES:
        with pytest.raises(Fault, match=what):
            run_body(edited(body, (old, new)), [np.zeros(512, np.uint16)] * 2, threads=THREADS, shared_bytes=1024,
                     schedule=schedule)  # fmt: skip


@pytest.mark.parametrize("body", [load_matrices(4, ""), store_matrices(4, "")], ids=["ldmatrix", "stmatrix"])
def test_matrices_of_another_warp_take_a_barrier(body):
    x = np.arange(512, dtype=np.uint16)
    right = edited(body, ("xor.b32 %r5, %r3, 80;", "xor.b32 %r5, %r3, 592;"))
    for schedule in SCHEDULES:
        run_body(right, [x, x], threads=THREADS, shared_bytes=1024, schedule=schedule)
        with pytest.raises(Fault, match="shared memory that (warp . wrote, without a wait|nothing wrote)"):
            run_body(edited(right, ("    bar.sync 0;\n", "")), [x, x], threads=THREADS, shared_bytes=1024,
                     schedule=schedule)  # fmt: skip


def test_the_registers_of_matrices_are_counted():
    body = edited(load_matrices(4, ""), ("x4", "x2"))
    with pytest.raises(UnknownForm, match="4 registers, and not 2"):
        run_body(body, [np.zeros(512, np.uint16)] * 2, threads=THREADS, shared_bytes=1024)


# ---------------------------------------------------------------- fragments


# ---------------------------------------------------------------- products of a warpgroup


def run_wgmma(body: str, tensors: list[np.ndarray], schedule: Schedule = SCHEDULES[0]) -> np.ndarray:
    return run_body(body, tensors, threads=128 * GROUPS, shared_bytes=2 * TILE, schedule=schedule)[2]


@pytest.mark.parametrize("in_registers", [True, False])
@pytest.mark.parametrize(
    "n, kind, span", [(16, "bf16", 128), (16, "f16", 64), (32, "bf16", 32), (24, "f16", 0), (8, "f16", 128)]
)
def test_products_of_warpgroups(n, kind, span, in_registers):
    tensors, expected = wgmma_case(n, kind, span)
    for schedule in SCHEDULES:
        np.testing.assert_array_equal(run_wgmma(wgmma(n, kind, span, in_registers), tensors, schedule), expected)


def test_sums_begin_at_zero_where_the_predicate_is_false():
    tensors, expected = wgmma_case(16, "bf16", 32)
    body = edited(wgmma(16, "bf16", 32), ("mov.pred %p1, -1;", "mov.pred %p1, 0;"))
    np.testing.assert_array_equal(run_wgmma(body, tensors), expected - tensors[2])


LAST = "    wgmma.wait_group.sync.aligned 0;\n"
STORES = "".join(f"    st.global.b32 [%rd6+{4 * i}], %r{200 + i};\n" for i in range(8))
OVERWRITE = "    st.shared.b32 [%r4], %r3;\n"
A = "{%r20, %r21, %r22, %r23}"


def test_operands_may_be_overwritten_after_the_wait_and_a_barrier():
    tensors, expected = wgmma_case(16, "bf16", 64)
    body = edited(wgmma(16, "bf16", 64), (LAST, LAST + "    bar.sync 1;\n" + OVERWRITE + "    mov.b32 %r20, 0;\n"))
    for schedule in SCHEDULES:
        np.testing.assert_array_equal(run_wgmma(body, tensors, schedule), expected)


@pytest.mark.parametrize(
    "edits, what",
    [
        ([(FENCE, "")], "wgmma of warp . reads shared memory that warp . wrote, without a fence.proxy.async"),
        ([("    bar.sync 0;\n", "")], "reads shared memory that (nothing|warp . wrote, without a wait)"),
        ([("    wgmma.fence.sync.aligned;\n", "")], "no wgmma.fence after %r.* was written"),
        ([("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.b32 %r20, %r21;")],
         "no wgmma.fence after %r20 was written"),
        ([("    wgmma.fence.sync.aligned;", "    wgmma.fence.sync.aligned;\n    bar.sync 1;")],
         "without wgmma.fence in its basic block"),
        ([(LAST, "")], "uses %r200 before wgmma.wait_group"),
        ([("    wgmma.commit_group.sync.aligned;\n", "")], "uses %r200 before wgmma.wait_group"),
        ([(LAST, LAST.replace("0;", "1;"))], "uses %r200 before wgmma.wait_group"),
        ([(LAST, ""), (STORES, "")], "ends without wgmma.wait_group"),
        ([(LAST, "    mov.b32 %r20, 0;\n" + LAST)], "uses %r20 before wgmma.wait_group"),
        ([(LAST, OVERWRITE + LAST)], "overwrites shared memory that wgmma of warp . may be reading"),
        ([(LAST, LAST + OVERWRITE)], "that (wgmma of warp . may be reading|warp . wrote, without a wait)"),
        ([("{%r24, %r25, %r26, %r27}, %rd10", "{%r24, %r25, %r26, %r200}, %rd10")], "registers of a product under way"),
        ([(descriptor("%rd10", 0, 16, 64), descriptor("%rd10", 2 * TILE - 512, 16, 64))], "outside of shared memory"),
        ([("    wgmma.commit", "    @%p2 wgmma.commit")], "a part of a warp"),
        ([(f"{A}, %rd10", f"{A}, %rd7")], "different operands"),
        ([(descriptor("%rd10", 0, 16, 64), descriptor("%rd10", 0, 16, 64, 1))], "base offset"),
        ([(descriptor("%rd10", 0, 16, 64), descriptor("%rd10", 128, 16, 64))], "not in the first row"),
        ([(descriptor("%rd10", 0, 16, 64), descriptor("%rd10", 48, 16, 64))], "not in the first row"),
        ([(descriptor("%rd10", 0, 16, 64), descriptor("%rd10", -1024, 16, 64))], "outside of shared memory"),
    ],
)  # fmt: skip
def test_finds_what_is_wrong_with_products_of_warpgroups(edits, what):
    tensors, _ = wgmma_case(16, "bf16", 64)
    body = edited(wgmma(16, "bf16", 64), *edits)
    for schedule in SCHEDULES:
        with pytest.raises(Fault, match=what):
            run_wgmma(body, tensors, schedule)


@pytest.mark.parametrize("old, new", [("%p1, 1, 1, 0;", "%p1, -1, 1, 0;"), ("%p1, 1, 1, 0;", "%p1, 1, 1, 1;")])
def test_negated_and_transposed_operands_are_unknown(old, new):
    tensors, _ = wgmma_case(16, "bf16", 32)
    with pytest.raises(UnknownForm, match="negated or transposed"):
        run_wgmma(edited(wgmma(16, "bf16", 32), (old, new)), tensors)


def test_copies_of_threads_need_a_fence_before_a_product():
    tensors, expected = wgmma_case(16, "bf16", 64)
    body = wgmma(16, "bf16", 64)
    for at in range(0, 2 * TILE, 16 * 128 * GROUPS):
        body = edited(
            body,
            (f"    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd4+{at}];\n", ""),
            (f"    st.shared.v4.b32 [%r4+{at}], {{%r10, %r11, %r12, %r13}};",
             f"    cp.async.cg.shared.global [%r4+{at}], [%rd4+{at}], 16;"),
        )  # fmt: skip
    body = edited(body, (FENCE, "    cp.async.wait_all;\n" + FENCE))
    for schedule in SCHEDULES:
        np.testing.assert_array_equal(run_wgmma(body, tensors, schedule), expected)
        with pytest.raises(Fault, match="that cp.async of warp . wrote, without a fence.proxy.async"):
            run_wgmma(edited(body, (FENCE, "")), tensors, schedule)
