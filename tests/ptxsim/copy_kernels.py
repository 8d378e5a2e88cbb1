"""Texts of kernels that copy and wait, for several files of tests: boxes by tensor maps, bulk copies, mbarriers."""

import numpy as np
import pytest

from ptxsim.fault import Fault
from ptxsim.run import Schedule
from tests.ptxsim.ptx_text import edited, run_body

SCHEDULES = [Schedule(seed) for seed in range(2)]
THREADS = 64
STEP = 16 * THREADS  # bytes that all threads copy at once


def run_copy(body: str, tensors: list[np.ndarray], schedule: Schedule = SCHEDULES[0], **options) -> list[np.ndarray]:
    return run_body(body, tensors, threads=THREADS, shared_bytes=16384, schedule=schedule, **options)


def finds(body: str, tensors: list[np.ndarray], what: str, **options) -> None:
    """That a broken kernel is a fault under every schedule."""
    for schedule in SCHEDULES:
        with pytest.raises(Fault, match=what):
            run_copy(body, tensors, schedule, **options)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


# ---------------------------------------------------------------- boxes

# Thread 0 builds a map at %rd10; thread 32 makes an mbarrier at %r12 and issues copies of a box at %r13. %r14 and %rd5:
# the 16 bytes of each thread in the box, and in the output.
START = """
    ld.param.b64 %rd1, [p0];
    ld.param.b64 %rd2, [p1];
    ld.param.b64 %rd10, [p2];
    mov.u32 %r1, %tid.x;
    mov.u32 %r8, %cluster_ctarank;
    mov.b32 %r2, global_smem;
    add.u32 %r12, %r2, 128;
    add.u32 %r13, %r2, 1024;
    shl.b32 %r3, %r1, 4;
    add.u32 %r14, %r13, %r3;
    mul.lo.u32 %r9, %r8, 2048;
    add.u32 %r9, %r9, %r3;
    cvt.u64.u32 %rd3, %r9;
    add.u64 %rd5, %rd2, %rd3;
    mul.wide.u32 %rd3, %r8, 128;
    add.u64 %rd10, %rd10, %rd3;
    setp.lt.u32 %p1, %r1, 32;
    setp.eq.u32 %p2, %r1, 0;
    setp.eq.u32 %p4, %r1, 32;
    @%p4 mbarrier.init.shared::cta.b64 [%r12], 1;
    @!%p1 bra BUILT;
    shl.b32 %r10, %r1, 2;
    add.u32 %r10, %r2, %r10;
    mov.b32 %r11, 0;
    st.shared.b32 [%r10], %r11;
    bar.warp.sync 0xffffffff;
"""
PUBLISH = """
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd10], [%r2], 128;
    fence.proxy.tensormap::generic.acquire.gpu [%rd10], 128;
"""
BUILT = """
    bar.warp.sync 0xffffffff;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd10], [%r2], 128;
    fence.proxy.tensormap::generic.acquire.gpu [%rd10], 128;
BUILT:
    bar.sync 1;
"""
WAIT = """
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r12], 0;
    @!%p3 bra WAIT;
"""
READ = """
    ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r14];
    ld.shared.v4.b32 {%r24, %r25, %r26, %r27}, [%r14+1024];
    st.global.v4.b32 [%rd5], {%r20, %r21, %r22, %r23};
    st.global.v4.b32 [%rd5+1024], {%r24, %r25, %r26, %r27};
"""
BF16, GAPS = 10, 14


def replaced(field: str, value: int | str, ordinal: int | None = None) -> str:
    bits = "b64" if field in ("global_address", "global_stride") else "b32"
    which = "" if ordinal is None else f"{ordinal}, "
    setting = f"mov.{bits} %rd11, {value};" if bits == "b64" else f"mov.b32 %r11, {value};"
    register = "%rd11" if bits == "b64" else "%r11"
    return f"    {setting} @%p2 tensormap.replace.tile.{field}.shared::cta.b1024.{bits} [%r2], {which}{register};\n"


def built(dims: list[int], strides: list[int], box: list[int], element: int, mode: int) -> str:
    """Text that builds a map of the tensor at %rd1, innermost dimension first, and lets all threads know of it."""
    fields = [replaced("global_address", "%rd1"), replaced("rank", len(dims) - 1)]
    for i in range(len(dims)):
        fields += [replaced("box_dim", box[i], i), replaced("global_dim", dims[i], i), replaced("element_stride", 1, i)]
    fields += [replaced("global_stride", stride, i) for i, stride in enumerate(strides)]
    fields += [replaced("elemtype", element), replaced("swizzle_mode", mode)]
    return START + "".join(fields) + BUILT


def loaded(corner: list[int], nbytes: int) -> str:
    """Text that lets thread 32 load a box."""
    coordinates = ", ".join(map(str, corner))
    return f"""
    @%p4 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], {nbytes};
    @%p4 cp.async.bulk.tensor.{len(corner)}d.shared::cta.global.mbarrier::complete_tx::bytes [%r13], """ \
        f"[%rd10, {{{coordinates}}}], [%r12];\n"  # fmt: skip


def image(x: np.ndarray, box: list[int], corner: list[int], mode: int) -> np.ndarray:
    """The bytes in shared memory of a box of a tensor, whose outermost dimension is first."""
    shape = box[::-1]
    found = np.zeros(shape, x.dtype)
    for index in np.ndindex(*shape):
        at = tuple(i + first for i, first in zip(index, corner[::-1], strict=True))
        if all(0 <= i < size for i, size in zip(at, x.shape, strict=True)):
            found[index] = x[at]
    chunks = found.reshape(-1).view(np.uint8).reshape(-1, 8, 16)
    swizzled = np.zeros_like(chunks)
    for line in range(len(chunks)):
        for chunk in range(8):
            swizzled[line, chunk ^ (line % (1 << mode))] = chunks[line, chunk]
    return swizzled.ravel()


MAP = [np.zeros(256, np.uint8)]
OUT = [np.zeros(2048, np.uint8)]
MATRIX = noise(40, 192).view(np.uint16)  # [40, 96], of which 90 columns belong to the tensor
DENSE = dict(dims=[90, 40], strides=[192], box=[64, 16], element=BF16, mode=3)
LOAD = built(**DENSE) + loaded([8, 4], 2048) + WAIT + READ
# A box is stored, and its place in shared memory is written again once the copy has read it.
STORE = built(**DENSE).replace("    bar.sync 1;\n", """
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd5];
    ld.global.v4.b32 {%r24, %r25, %r26, %r27}, [%rd5+1024];
    st.shared.v4.b32 [%r14], {%r20, %r21, %r22, %r23};
    st.shared.v4.b32 [%r14+1024], {%r24, %r25, %r26, %r27};
    fence.proxy.async.shared::cta;
    bar.sync 1;
    @%p4 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd10, {40, 30}], [%r13];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    bar.sync 2;
    st.shared.v4.b32 [%r14], {%r20, %r21, %r22, %r23};
""")  # fmt: skip

# ---------------------------------------------------------------- bulk copies without a map, and mbarriers

BULK = """
    ld.param.b64 %rd1, [p0];
    ld.param.b64 %rd2, [p1];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, global_smem;
    add.u32 %r12, %r2, 128;
    add.u32 %r13, %r2, 1024;
    shl.b32 %r3, %r1, 4;
    add.u32 %r14, %r13, %r3;
    cvt.u64.u32 %rd3, %r3;
    add.u64 %rd5, %rd2, %rd3;
    setp.eq.u32 %p4, %r1, 0;
    mov.b32 %r15, 2048;
    @%p4 mbarrier.init.shared::cta.b64 [%r12], 1;
    bar.sync 0;
    @%p4 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], 2048;
    @%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r13], [%rd1+16], %r15, [%r12];
""" + WAIT + READ  # fmt: skip
# Warp 1 waits for thread 0, which ends the mbarrier once warp 1 has waited.
ONE_WAITS = """
    mov.u32 %r1, %tid.x; mov.b32 %r9, global_smem; setp.eq.b32 %p1, %r1, 0; setp.ge.u32 %p2, %r1, 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r9];
    @%p2 bra WAIT;
    bra.uni MEET;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r9], 0;
MEET:
    bar.sync 0; // of all
    @%p1 mbarrier.inval.shared::cta.b64 [%r9];
"""
# Thread 0 writes a word before it arrives, and warp 1 reads it after its wait.
WRITTEN = edited(ONE_WAITS, (
    "    bar.sync 0;\n    @%p1 mbarrier.arrive",
    "    @%p1 st.shared.b32 [%r9+64], %r1;\n    bar.sync 0;\n"
    "    @%p1 st.shared.b32 [%r9+64], %r9;\n    @%p1 mbarrier.arrive",
), ("%p3, [%r9], 0;\n", "%p3, [%r9], 0;\n    ld.shared.b32 %r3, [%r9+64];\n"))  # fmt: skip
