"""Reading code: loops and ways through blocks, SASS and PTX as they are printed; on code short enough to count."""

import pytest

pytest.importorskip("triton")

from fp4compile.check.control_flow import Block, ControlFlow  # noqa: E402
from fp4compile.check.ptx import Ptx  # noqa: E402
from fp4compile.check.sass import Sass  # noqa: E402


def flow(*blocks):
    """Blocks as (instructions, successors)."""
    return ControlFlow([Block(tuple(instructions.split()), successors) for instructions, successors in blocks])


# entry -> outer header -> inner (a loop of its own) -> latch -> outer header, or the end
NESTED = flow(("a", (1,)), ("b", (2,)), ("c c", (2, 3)), ("d", (1, 4)), ("e", ()), ("unreachable", (1,)))


def test_loops_are_found_from_inside_out():
    assert [(loop.header, loop.blocks) for loop in NESTED.loops] == [(2, {2}), (1, {1, 2, 3})]
    assert NESTED.loop_around(lambda one: one == "c").header == 2
    assert NESTED.loop_around(lambda one: one == "d").header == 1
    assert NESTED.loop_around(lambda one: one == "e") is None


def test_a_block_that_is_printed_at_the_end_belongs_to_its_loop():
    """ptxas moves the polling of a barrier behind the kernel's end; it leads back into the loop."""
    loop = flow(("a", (1,)), ("wait", (2, 4)), ("product", (1, 3)), ("end", ()), ("poll", (4, 2))).loop_around(
        lambda one: one == "product"
    )
    assert loop.blocks == {1, 2, 4}


def test_what_cannot_be_reached_is_no_instruction():
    assert NESTED.instructions() == ["a", "b", "c", "c", "d", "e"]


@pytest.mark.parametrize(("trips", "expected"), [(1, 6), (3, 1 + 3 + 9 * 2 + 3 + 1)])
def test_loops_count_their_trips(trips, expected):
    assert len(NESTED.way(lambda one: False, trips)) == expected


def test_a_loop_that_is_left_at_its_head_counts_too():
    top_tested = flow(("a", (1,)), ("test", (2, 3)), ("body body", (1,)), ("end", ()))
    assert top_tested.way(lambda one: False, 2) == ["a", *["test"] * 2, *["body"] * 4, "end"]


def test_the_way_goes_round_rare_calls_and_takes_the_longer_side_otherwise():
    slow = flow(
        ("check", (1, 2)), ("set_up call", (2,)), ("x", (3, 4)), ("short", (5,)), ("long long", (5,)), ("end", ())
    )
    assert slow.way(lambda one: one == "call") == ["check", "x", "long", "long", "end"]
    # Two sides, one with a division that may call: its check alone makes it the rare one, longer as it is.
    sides = flow(
        ("fork", (1, 2)), ("quick", (5,)), ("check much more", (3, 4)), ("call", (4,)), ("y", (5,)), ("end", ())
    )
    assert sides.way(lambda one: one == "call") == ["fork", "quick", "end"]


def test_a_program_without_work_takes_the_short_side():
    """However rare what the other side has may be; not where sides are nearly as long."""
    sides = flow(
        ("a", (1, 4)), ("work work", (2, 3)), ("call", (3,)), ("work work work work work", (4,)), ("x", (5, 6)),
        ("y", (6,)), ("z", ())
    )  # fmt: skip
    for idle, expected in ((False, "a work work work work work work work x y z"), (True, "a x y z")):
        assert sides.way(lambda one: one == "call", idle=idle) == expected.split()


SASS = """
	.section	.text.kernel,"ax",@progbits
kernel:
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/               @P1 EXIT ;
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_rcp_rn_f32_slowpath) ;
.L_x_1:
        /*0050*/                   FADD R4, R4, R4 ;
        /*0060*/              @!P2 BRA `(.L_x_1) ;
        /*0070*/                   BRX R2 -0x80      (*"BRANCH_TARGETS .L_x_2,.L_x_3"*);
.L_x_2:
        /*0080*/               @P0 STG.E.U16 desc[UR4][R2.64], R4 ;
        /*0090*/                   BRA.U !UP0, `(.L_x_3) ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   STG.E.ENL2.256 desc[UR4][R2.64], R4, R8 ;
        /*00c0*/                   STL [R1], R4 ;
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   BRA `(.L_x_4);
"""


def test_sass_is_read():
    sass = Sass(SASS, "REG:42 STACK:0")
    assert (sass.registers, sass.local_accesses) == (42, 0)  # what is stored is never read back
    assert Sass(SASS.replace("LDG.E.128.CONSTANT R4, desc[UR4][R2.64]", "LDL R4, [R1]"), "").local_accesses == 2
    assert (sass.widths("LDG"), sass.widths("STG")) == ([16], [2, 32])
    assert [len(loop.blocks) for loop in sass.flow.loops] == [1]
    # LDC, EXIT, LDG, BRA; FADD, BRA; BRX; STG, BRA; STG, STL, EXIT: without the call, and with all of the branches
    assert sass.executed() == 12
    assert sass.executed(trips=3) == 12 + 2 * 2
    assert sass.executed(idle=True) == 2  # LDC, EXIT


@pytest.mark.parametrize(("instruction", "lost"), [
    ("F2FP.F16.E4M3.UNPACK_B R7, R1.reuse ;", True), ("LOP3.LUT R14, R1, 0xffff, RZ, 0xc0, !PT ;", True),
    ("FADD R4, R5, |R1| ;", True), ("FADD R1, R4, R10 ;", False), ("STS [R1+UR4], R11 ;", False),
    ("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R72, R1, R2, RZ ;", False), ("PRMT R5, R48, 0x7610, R1 ;", False),
])  # fmt: skip
def test_values_that_ptxas_lost(instruction, lost):
    """As they stood in a kernel whose scales were wrong, and what is read by nobody or is an address."""
    text = SASS.replace("FADD R4, R4, R4 ;", instruction)
    assert Sass(text, "REG:42 STACK:0").lost_values == [instruction.rstrip(" ;")] * lost
    assert not Sass(text, "REG:42 STACK:8").lost_values


HEAD = """
.visible .entry kernel(
	.param .u64 p
)
.reqntid 128
{
	.reg .pred %p<9>;
	.reg .b32 %r<60>;
	.reg .b64 %rd<30>;
"""
PTX = (
    HEAD
    + """
JTI0_0:
	.branchtargets
		$L__BB0_2,
		$L__BB0_4;
	add.s32 	%r9, %r1, 16384;
	mbarrier.init.shared::cta.b64 [%r9], 1;
	brx.idx 	%r5, JTI0_0;
$L__BB0_2:                              // =>This Inner Loop Header: Depth=1
	add.s32 	%r10, %r1, 16384;
	// begin inline asm
{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r10], %r3;
	@!complete bra.uni waitLoop;
}
	// end inline asm
	@%p1 tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [ %r2 + 0 ], %rd1, %rd2, %r4, [ %r5 ], [ %r6 ], %p2;
	{ .reg .f32 z; mov.f32 z, 0f00000000; @%p2 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {a, b}, {c}, {d}; }
	cvt.u64.u32 	%rd3, %r9;
	@%p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd3];
	@%p4 bra 	$L__BB0_2;
$L__BB0_4:
	ret;
}
"""
)


def test_ptx_is_read():
    """Instructions of one line, tables of branches, and one barrier under two names and in 64 bits."""
    ptx = Ptx(PTX)
    assert [one.split(".")[0] for one in ptx.products] == ["mma", "tcgen05"]
    assert (ptx.waits, ptx.tma_loads, ptx.count("mbarrier")) == (1, 0, 2)
    inside = ptx.flow.instructions(ptx.main_loop.blocks)
    inside = [one.opcode.split(".")[0] for one in inside]
    assert " ".join(inside) == "add mbarrier bra tcgen05 mov mma cvt tcgen05 bra"
    assert (ptx.overlap.overlapped, ptx.overlap.why) == (False, "each step waits for its own product")
    other = Ptx(PTX.replace("add.s32 	%r10, %r1, 16384;", "add.s32 	%r10, %r1, 16392;"))
    assert other.overlap.why == "no asynchronous loads in a loop"
    assert (
        Ptx(PTX.replace("@%p4 bra 	$L__BB0_2", "@%p4 bra 	$L__BB0_4")).overlap.why == "no loop around the product"
    )


SPECIALIZED = (
    HEAD
    + """
	.reg .pred complete;
	add.s32 	%r9, %r1, 16384;
	mbarrier.init.shared::cta.b64 [%r9], 1;
	add.s32 	%r10, %r1, 16392;
	mbarrier.init.shared::cta.b64 [%r10], 1;
	add.s32 	%r11, %r1, 16408;
	mbarrier.init.shared::cta.b64 [%r11], 1;
	@%p1 bra 	$L__BB0_4;
$L__BB0_2:
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r12], %r3;
	tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [ %r2 + 0 ], %rd1, %rd2, %r4, [ %r5 ], [ %r6 ], %p2;
	@%p4 bra 	$L__BB0_2;
	ret;
$L__BB0_4:
	shl.b32 	%r20, %r19, 3;
	add.s32 	%r21, %r1, %r20;
	add.s32 	%r22, %r21, 16384;
	cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r44], [%rd23, {%r45, %r46}], [%r22];
	@%p5 bra 	$L__BB0_4;
	ret;
}
"""
)


@pytest.mark.parametrize(("change", "expected"), [
    (("", ""), "another partition loads, into several buffers"),
    (("add.s32 	%r10, %r1, 16392", "add.s32 	%r10, %r1, 16400"), "another partition loads, into 1 buffer"),
    (("%r21, 16384", "%r21, 16408"), "another partition loads, into 1 buffer"),
    (("%r21, 16384", "%r21, 16500"), "another partition loads, into 0 buffer"),
    (("@%p5 bra 	$L__BB0_4", "@%p5 bra 	$L__BB0_2"), "no asynchronous loads in a loop"),
], ids=str)  # fmt: skip
def test_buffers_of_another_partition_are_counted(change, expected):
    """By the barriers that follow each other in memory from the one that the loads signal."""
    overlap = Ptx(SPECIALIZED.replace(*change)).overlap
    assert overlap.why == expected and overlap.overlapped == ("several" in expected)


OF_A_PAIR = SPECIALIZED.replace(
    "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r44], [%rd23, {%r45, %r46}], [%r22];",
    """and.b32 	%r23, %r22, -16777224;
	cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes [%r44], """
    "[%rd23, {%r45, %r46}], [%r23];",
)


@pytest.mark.parametrize(("change", "expected"), [
    (("", ""), "another partition loads, into several buffers"),
    (("-16777224", "-16777232"), "another partition loads, into several buffers"),  # more bits are known to be 0
    (("%r21, 16384", "%r21, 16408"), "another partition loads, into 1 buffer"),
    (("-16777224", "-8"), "another partition loads, into 0 buffer"),  # another mask is another address
    (("-16777224", "-16777480"), "another partition loads, into 0 buffer"),
], ids=str)  # fmt: skip
def test_buffers_of_a_pair_of_programs_are_counted(change, expected):
    """Loads of `cta_group::2` signal the first program's barrier: they clear its rank, bit 24, in the address."""
    assert OF_A_PAIR != SPECIALIZED
    overlap = Ptx(OF_A_PAIR.replace(*change)).overlap
    assert overlap.why == expected and overlap.overlapped == ("several" in expected)


def test_a_step_that_meets_the_other_cta_does_not_overlap():
    """Triton 3.9 puts this in front of a product whose operands share memory with something that threads wrote."""
    arrival = "	mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r30];\n	tcgen05.mma"
    assert Ptx(SPECIALIZED.replace("	tcgen05.mma", arrival)).overlap.why == "each step meets the other CTA"


def test_loads_around_the_loop_are_of_the_same_partition():
    """One load for each tile, before the loop over K: nothing feeds that loop."""
    around = SPECIALIZED.replace(
        "	@%p1 bra 	$L__BB0_4;",
        """$L__BB0_1:
	add.s32 	%r22, %r1, 16384;
	cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r44], [%rd23, {%r45, %r46}], [%r22];""",
    )
    around = around[: around.index("	ret;")] + "	@%p6 bra 	$L__BB0_1;\n	ret;\n}\n"
    assert len(Ptx(around).flow.loops) == 2
    assert Ptx(around).overlap.why == "no asynchronous loads in a loop"


LOADING = PTX.replace("	cvt.u64.u32 	%rd3, %r9;", """
	cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r44], [%rd23, {%r45, %r46}], [%r50];
	cp.async.cg.shared.global [ %r7 + 0 ], [ %rd4 + 0 ], 0x10, %r8;
	cp.async.wait_group 	2;
	cvt.u64.u32 	%rd3, %r51;""")  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), [
    (("", ""), "loads and products of several steps are under way"),
    (("[%r50]", "[%r10]"), "each step waits for its own loads"),
    (("	cp.async.bulk", "	and.b32 	%r50, %r10, -16777224;\n	cp.async.bulk"),
     "each step waits for its own loads"),
    (("wait_group 	2", "wait_group 	0"), "each step waits until no load is under way"),
    (("	cp.async.wait_group 	2;", ""), "each step waits until no load is under way"),
    (("%rd3, %r51", "%rd3, %r10"), "each step waits for its own product"),
], ids=str)  # fmt: skip
def test_what_a_step_waits_for(change, expected):
    assert Ptx(LOADING.replace(*change)).overlap.why == expected
    assert Ptx(LOADING).asynchronous_loads == 2 and Ptx(LOADING).tma_loads == 1
