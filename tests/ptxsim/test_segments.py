"""Planned runs of elementwise instructions give what their steps give."""

import numpy as np
import pytest

from ptxsim import segments
from ptxsim.run import Schedule
from tests.ptxsim.ptx_text import run_body

# A loop whose iterations differ between threads: guards, swapped registers, halves of words, carries, narrow floats.
LOOP = """
    ld.param.b64 %rd1, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 16; add.u64 %rd1, %rd1, %rd2;
    .reg .b16 %h<8>; .reg .b8 %b<4>;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd1];
    and.b32 %r2, %r1, 15; mov.b32 %r3, 0; cvt.rn.f32.u32 %f1, %r10;
LOOP:
    add.s32 %r3, %r3, 1; setp.lt.s32 %p1, %r3, %r2; setp.gt.s32 %p2, %r10, %r11;
    mov.b32 %r20, %r10; mov.b32 %r10, %r11; mov.b32 %r11, %r20;
    @%p2 add.s32 %r12, %r12, %r10; @!%p2 xor.b32 %r12, %r12, %r11;
    mad.lo.cc.u32 %r14, %r10, %r12, %r11; madc.hi.u32 %r15, %r10, %r12, %r13;
    mov.b64 %rd3, {%r14, %r15}; shr.u64 %rd3, %rd3, 7; mov.b64 {%r13, %r16}, %rd3;
    mov.b32 {%h1, %h2}, %r16; cvt.s32.s16 %r17, %h1; add.s32 %r13, %r13, %r17;
    cvt.rn.f32.s32 %f2, %r13; fma.rn.f32 %f1, %f2, 0f3F000000, %f1; fma.rn.f32 %f3, %f2, 0f3F000000, %f2;
    min.NaN.f32 %f4, %f1, %f3; cvt.rn.bf16x2.f32 %r18, %f4, %f3; xor.b32 %r11, %r11, %r18;
    cvt.rn.satfinite.e4m3x2.f32 %h3, %f4, %f3; cvt.u32.u16 %r19, %h3; add.s32 %r12, %r12, %r19;
    prmt.b32 %r21, %r11, %r12, 0x6250; lop3.b32 %r10, %r10, %r21, %r12, 0x96; selp.b32 %r13, %r13, %r21, %p2;
    @%p1 bra LOOP;
    mov.b32 %r22, %f1; add.s32 %r13, %r13, %r22;
    st.global.v4.b32 [%rd1], {%r10, %r11, %r12, %r13};
"""


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("threads, joined", [(64, 1024), (64, 0), (96, 1024)])
def test_planned_runs_equal_their_steps(monkeypatch, threads, joined, seed):
    given = np.random.default_rng(0).integers(0, 2**32, (threads, 4), np.uint64).astype(np.uint32)
    monkeypatch.setattr(segments, "_JOINED", joined)
    found = []
    for interpreted in (10**9, 0):
        monkeypatch.setattr(segments, "_INTERPRETED", interpreted)
        found += run_body(LOOP, [given], threads=threads, schedule=Schedule(seed))
    np.testing.assert_array_equal(*found)
    assert (found[0] != given).all(1).mean() > 0.9


def test_registers_that_a_run_alone_has_are_not_written_back(monkeypatch):
    monkeypatch.setattr(segments, "_INTERPRETED", 0)
    kept = []
    real = segments.Segment.run

    def run(self, fragment, executed):
        kept.append(self.kept)
        real(self, fragment, executed)

    monkeypatch.setattr(segments.Segment, "run", run)
    run_body(LOOP, [np.ones((32, 4), np.uint32)], threads=32)
    loop = next(names for names in kept if "%r12" in names and "%p1" in names)
    assert {"%r3", "%r10", "%f1"} <= loop and not {"%r20", "%rd3", "%h3"} & loop
