"""Memory that nothing wrote: what depends on it, element by element, and which uses of it are faults."""

from collections import defaultdict

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.fragment import Fragment
from tests.ptxsim import warp_matrix_kernels as matrices
from tests.ptxsim.copy_kernels import BULK, DENSE, LOAD, MAP, MATRIX, START, STORE, noise, run_copy
from tests.ptxsim.product_kernels import IMAGE, KINDS, ROWS, THREADS, in_tensor_memory_case, plain_case, scaled_case
from tests.ptxsim.ptx_text import edited, run_body
from tests.ptxsim.warp_product_kernels import MXF8, PLAIN, body, operands_of, sums_in_registers

UNWRITTEN = "which holds what nothing wrote: line .* reads global memory that nothing wrote"


@pytest.fixture
def undefined(monkeypatch):
    """Collects the threads whose values of a register are undefined where they are stored to global memory."""
    found = defaultdict(set)

    def collect(fragment, names):
        if not fragment.instruction.opcode.startswith("st.global"):
            return checked(fragment, names)
        for name in fragment.machine.undefined.keys() & names:
            of_name = fragment.machine.undefined[name][fragment.threads] & fragment.running
            found[name] |= {*np.arange(fragment.machine.undefined.threads)[fragment.threads][of_name].tolist()}
        return None

    checked = Fragment.check_defined
    monkeypatch.setattr(Fragment, "check_defined", collect)
    return found


# ---------------------------------------------------------------- registers

# Each thread loads a word of parameter 0 to %r5, and stores %r9 to parameter 1.
WORDS = """
    ld.param.b64 %rd1, [p0]; ld.param.b64 %rd2, [p1]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
    add.u64 %rd1, %rd1, %rd3; add.u64 %rd2, %rd2, %rd3; mov.b32 %r2, global_smem; shl.b32 %r3, %r1, 2;
    add.u32 %r4, %r2, %r3; setp.ne.b32 %p1, %r1, 7; setp.eq.b32 %p9, %r1, 0;
    ld.global.b32 %r5, [%rd1];
    {uses}
    st.global.b32 [%rd2], %r9;
"""
SEVENTH = {0: slice(28, 32)}


def run_words(uses: str, **options):
    return run_body(WORDS.replace("{uses}", uses), [np.arange(32, dtype=np.uint32) + 1, np.zeros(32, np.uint32)],
                    threads=32, shared_bytes=256, unwritten=SEVENTH, **options)[1]  # fmt: skip


@pytest.mark.parametrize("uses, threads", [
    ("mov.b32 %r9, %r5;", {7}),
    ("mov.b32 %r9, 1;", set()),
    ("add.u32 %r9, %r5, %r1;", {7}),
    ("mov.b32 %r9, %r5; mov.b32 %r9, 0;", set()),
    ("mov.b32 %r9, 0; @%p1 mov.b32 %r9, %r5;", set()),
    ("selp.b32 %r9, %r5, 0, %p1;", set()),
    ("selp.b32 %r9, 0, %r5, %p1;", {7}),
    ("setp.eq.b32 %p2, %r5, 3; selp.b32 %r9, 1, 2, %p2;", {7}),
    ("setp.eq.b32 %p2, %r5, 3; and.pred %p2, %p2, %p1; selp.b32 %r9, 1, 2, %p2;", set()),
    ("setp.eq.b32 %p2, %r5, 3; setp.eq.b32 %p3, %r5, 4; and.pred %p2, %p2, %p3; selp.b32 %r9, 1, 2, %p2;", {7}),
    ("shfl.sync.bfly.b32 %r9, %r5, 1, 31, 0xffffffff;", {6}),
    ("mov.b64 %rd9, {%r5, %r1}; mov.b64 {%r10, %r11}, %rd9; or.b32 %r9, %r10, %r11;", {7}),
    ("st.shared.b32 [%r4], %r5; ld.shared.b32 %r9, [%r4];", {7}),
    ("st.shared.b32 [%r4], %r5; bar.warp.sync 0xffffffff; xor.b32 %r6, %r4, 4; ld.shared.b32 %r9, [%r6];", {6}),
    ("st.shared.b32 [%r4], %r5; st.shared.b32 [%r4], %r1; ld.shared.b32 %r9, [%r4];", set()),
    ("@%p1 st.shared.b32 [%r4], %r1; ld.shared.b32 %r9, [%r4];", {7}),
    ("cp.async.ca.shared.global [%r4], [%rd1], 4; cp.async.wait_all; ld.shared.b32 %r9, [%r4];", {7}),
    ("mov.b32 %r6, 2; cp.async.ca.shared.global [%r4], [%rd1], 4, %r6; cp.async.wait_all; ld.shared.b32 %r9, [%r4];",
     {7}),
    ("mov.b32 %r6, 0; cp.async.ca.shared.global [%r4], [%rd1], 4, %r6; cp.async.wait_all; ld.shared.b32 %r9, [%r4];",
     set()),
])  # fmt: skip
def test_values_that_depend_on_unwritten_memory(undefined, uses, threads):
    run_words(uses)
    assert undefined["%r9"] == threads


@pytest.mark.parametrize("uses", [
    "mov.b32 %r9, %r5;",
    "mov.b32 %r9, 0; add.u32 %r6, %r4, %r5; st.shared.b32 [%r6], %r1;",
    "mov.b32 %r9, 0; add.u32 %r6, %r4, %r5; ld.shared.b32 %r6, [%r6];",
    "mov.b32 %r9, 0; setp.eq.b32 %p2, %r5, 0; @%p2 bra NEXT;\nNEXT:",
    "mov.b32 %r9, 0; setp.eq.b32 %p2, %r5, 0; @%p2 mov.b32 %r9, 1;",
    "mov.b32 %r9, 0; setp.eq.b32 %p2, %r5, 0; vote.sync.any.pred %p3, %p2, 0xffffffff;",
    "redux.sync.max.u32 %r9, %r5, 0xffffffff;",
    "mov.b32 %r9, 0; red.global.add.u32 [%rd1], %r5;",
    "mov.b32 %r9, 0; mbarrier.init.shared::cta.b64 [%r2], %r5;",
])  # fmt: skip
def test_uses_of_unwritten_memory(uses):
    with pytest.raises(Fault, match=UNWRITTEN):
        run_words(uses)


@pytest.mark.parametrize("uses, what", [
    ("mov.b32 %r9, 0; red.global.add.u32 [%rd1], %r1;", "an atomic operation on global memory that nothing wrote"),
    ("atom.shared.add.u32 %r9, [%r4], 1;", "uses what nothing wrote: line .* reads shared memory that nothing wrote"),
    ("ld.global.acquire.gpu.b32 %r9, [%rd1];", "reads global memory that nothing wrote"),
])  # fmt: skip
def test_atomic_operations_take_memory_that_was_written(uses, what):
    with pytest.raises(Fault, match=what):
        run_words(uses)


def test_runs_of_elementwise_instructions(undefined):
    """A run that has been planned is executed one by one where it has an undefined register."""
    loop = """
    mov.b32 %r9, 0; mov.b32 %r6, 0;
NEXT:
    ld.global.b32 %r5, [%rd1];
    add.u32 %r7, %r5, %r6; mul.lo.u32 %r7, %r7, 3; selp.b32 %r8, %r7, 0, %p1; add.u32 %r9, %r9, %r8;
    add.u32 %r6, %r6, 1; setp.lt.u32 %p2, %r6, 20;
    @%p2 bra NEXT;"""
    got = run_words(loop)
    assert got[3] == 3 * sum(4 + i for i in range(20)) and not undefined["%r9"]
    run_words(loop.replace("selp.b32 %r8, %r7, 0, %p1;", "mov.b32 %r8, %r7;"))
    assert undefined["%r9"] == {7}


# ---------------------------------------------------------------- copies


def test_bulk_copies(undefined):
    tensors = [noise(4096), np.zeros(2048, np.uint8)]
    run_copy(BULK, tensors, unwritten={0: slice(16 + 164, 16 + 165)})  # a byte of the third word of thread 10
    assert {name: threads for name, threads in undefined.items() if threads} == {"%r21": {10}}


def test_boxes(undefined):
    """A box whose swizzled rows of 128 bytes are read 16 bytes a thread; a box that nothing else reads."""
    run_copy(LOAD, [MATRIX, np.zeros(2048, np.uint8), *MAP], unwritten={0: slice(192 * 6 + 16, 192 * 6 + 18)})
    chunk = 8 * 2 + (0 ^ 2)  # row 2 of the box, whose first chunk of 16 bytes the swizzle moves
    assert {name: threads for name, threads in undefined.items() if threads} == {"%r20": {chunk}}


def test_stores_of_boxes():
    """A box of 16 rows is stored, of which 10 lie in the tensor; the content of the other six does not matter."""
    tensors = [MATRIX, noise(2048), *MAP]
    run_copy(STORE, tensors, unwritten={1: slice(128 * 10, 128 * 16)})
    with pytest.raises(Fault, match="copies to global memory what nothing wrote: line .* reads global memory"):
        run_copy(STORE, tensors, unwritten={1: slice(128 * 9, 128 * 10)})


def test_tensor_maps_take_memory_that_was_written():
    zeroed = START[START.index("    st.shared.b32 [%r10]") :].split("\n")[0]
    with pytest.raises(Fault, match="uses what nothing wrote: line .* reads shared memory that nothing wrote"):
        run_copy(edited(LOAD, (zeroed, "")), [MATRIX, np.zeros(2048, np.uint8), *MAP])
    assert DENSE["mode"]  # the map that is made


# ---------------------------------------------------------------- matrices of warps


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("make", [matrices.load_matrices, matrices.store_matrices])
def test_matrices_in_registers(undefined, make, trans):
    """The registers that differ if the content of the unwritten bytes does."""
    x = np.zeros((64, 8), np.uint16)
    x[5, 2:4] = 0xFFFF  # a word of the row of 16 bytes
    got = run_body(make(4, trans), [x, np.zeros_like(x)], threads=64, shared_bytes=1024,
                   unwritten={0: slice(16 * 5 + 4, 16 * 5 + 8)})[1]  # fmt: skip
    changed = run_body(make(4, trans), [x, np.zeros_like(x)], threads=64, shared_bytes=1024)[1] != got
    threads = [np.flatnonzero(changed[:, 2 * i : 2 * i + 2].any(1)).tolist() for i in range(4)]
    expected = {f"%r{20 + i}": {*found} for i, found in enumerate(threads) if found}
    assert {name: threads for name, threads in undefined.items() if threads} == expected


# (lane, word of its operands; rows and columns of the sums that depend on it)
OPERANDS = [(5, 0, [1], []), (5, 3, [9], []), (6, 4, [], [1]), (31, 5, [], [7])]
SCALES = [(12, 10, [3, 11], []), (12, 11, [], [3])]


@pytest.mark.parametrize("opcode, selectors, lane, word, rows, columns", [
    *((PLAIN[0], "", *each) for each in OPERANDS),
    *((MXF8, ", %r30, {0, 0}, %r31, {0, 0}", *each) for each in OPERANDS + SCALES),
])  # fmt: skip
def test_products_of_warps(undefined, opcode, selectors, lane, word, rows, columns):
    _, registers = operands_of(opcode, np.random.default_rng(1))
    scales = np.full((32, 2), 0x7F7F7F7F, np.uint32)
    given = np.hstack([*registers, np.zeros((32, 4), np.uint32), scales])
    text = body(opcode, selectors)
    run_body(
        text,
        [given, np.zeros((32, 4), np.float32)],
        threads=32,
        unwritten={0: slice(at := 48 * lane + 4 * word, at + 4)},
    )
    sums = np.zeros((16, 8), bool)
    sums[rows], sums[:, columns] = True, True
    for i, threads in enumerate(sums_in_registers(sums).T):
        assert undefined[f"%r{40 + i}"] == {*np.flatnonzero(threads).tolist()}


@pytest.mark.parametrize("in_registers", [True, False])
@pytest.mark.parametrize("of", ["a", "b", "sums"])
def test_products_of_warpgroups(undefined, of, in_registers):
    """Row 37 of A, column 5 of B, or element (37, 5) of the addend, of the first of several warpgroups."""
    tensors, _ = matrices.wgmma_case(16, "bf16", 64)
    sums = np.zeros((64, 16))
    lane, register = next(iter(np.argwhere(matrices.registers_of_sums(_marked(sums, 5, 5)[:16])[:32])))
    thread = 32 * 2 + int(lane)  # row 37 is row 5 of warp 2
    if of == "a" and in_registers:
        which, expected = {1: slice(at := tensors[1].strides[0] * thread, at + 4)}, _marked(sums, 37, slice(None))
    elif of == "a":
        which, expected = {0: slice(at := matrices.TILE + 64 * 37, at + 4)}, _marked(sums, 37, slice(None))
    elif of == "b":
        which, expected = {0: slice(64 * 5, 64 * 5 + 4)}, _marked(sums, slice(None), 5)
    else:
        at = tensors[2].strides[0] * thread + 4 * int(register)
        which, expected = {2: slice(at, at + 4)}, _marked(sums, 37, 5)
    text = matrices.wgmma(16, "bf16", 64, in_registers)
    run_body(text, tensors, threads=128 * matrices.GROUPS, shared_bytes=2 * matrices.TILE, unwritten=which)
    of_threads = np.vstack([matrices.registers_of_sums(expected[row : row + 16]) for row in range(0, 64, 16)])
    every = np.vstack([of_threads] * matrices.GROUPS) if which.keys() == {0} else of_threads
    for i, threads in enumerate(every.T):
        assert undefined[f"%r{200 + i}"] == {*np.flatnonzero(threads).tolist()}


def _marked(sums: np.ndarray, row, column) -> np.ndarray:
    found = sums.copy()
    found[row, column] = 1
    return found


# ---------------------------------------------------------------- the tensor cores of SM100


def rows_and_columns(undefined) -> tuple[set[int], set[int]]:
    """(rows, columns) of the undefined elements of sums, which are whole rows and whole columns."""
    every = np.zeros((ROWS, 64), bool)
    for name, threads in undefined.items():
        every[sorted(threads), int(name[2:]) - 100] = True
    rows, columns = np.flatnonzero(every.all(1)), np.flatnonzero(every.all(0))
    assert (every == (np.isin(np.arange(ROWS), rows)[:, None] | np.isin(np.arange(64), columns))).all()
    return {*rows.tolist()}, {*columns.tolist()}


def run_tensor(text: str, content: np.ndarray, unwritten: slice):
    return run_body(text, [content, np.zeros((ROWS, 64), np.float32)], threads=THREADS,
                    shared_bytes=IMAGE + content.size, unwritten={0: unwritten})[1]  # fmt: skip


A, B, SCALES = 0, 128 * ROWS, 128 * (ROWS + 64)  # where they are in the images of the cases


@pytest.mark.parametrize("case, at, rows, columns", [
    (plain_case, A + 128 * 77 + 64, {77}, set()),
    (plain_case, B + 128 * 20, set(), {20}),
    (in_tensor_memory_case, A + 128 * 77 + 16, {77}, set()),
    (in_tensor_memory_case, B + 128 * 20 + (1 ^ 20 % 8) * 16, set(), {20}),
    (lambda: scaled_case(*KINDS[0], 64), A + 128 * 77, {77}, set()),
    (lambda: scaled_case(*KINDS[0], 64), SCALES + 16 * 7 + 4, {32 + 7}, set()),
    (lambda: scaled_case(*KINDS[4], 64), SCALES + 1024 + 16 * 9, set(), {9}),
])  # fmt: skip
def test_products_on_tensor_cores(undefined, case, at, rows, columns):
    text, content, expected = case()
    got = run_tensor(text, content, slice(at, at + 4))
    assert rows_and_columns(undefined) == (rows, columns)
    defined = np.ones((ROWS, 64), bool)
    defined[sorted(rows)], defined[:, sorted(columns)] = False, False
    np.testing.assert_array_equal(got[defined], expected[defined])


def test_sums_that_are_scaled_before_the_first_product():
    """As in attention: unwritten sums are loaded, multiplied and stored, and the first product overwrites them."""
    text, content, expected = plain_case()
    scaled = """
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r90}, [ %r11 + 3 ];
    tcgen05.wait::ld.sync.aligned;
    add.u32 %r90, %r90, %r1;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [ %r11 + 3 ], {%r90};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
    mov.pred %p4, -1;"""
    whole = slice(0, 0)
    np.testing.assert_array_equal(run_tensor(edited(text, ("    mov.pred %p4, -1;", scaled)), content, whole), expected)
    adds = edited(text, ("    mov.pred %p4, -1;", scaled)).replace(", %p5;", ", %p4;")
    with pytest.raises(Fault, match="which holds what nothing wrote: line .* reads tensor memory that nothing wrote"):
        run_tensor(adds, content, whole)
