"""Faults of kinds that `ptx_edits` lacks, written by hand for compiled kernels: what the simulator finds of them.

Kinds: proxies, scopes, commits of other threads, alignment of barriers, retries of waits, predicates, registers,
allocations. Each is an error by the PTX ISA, also where the kernel computes the right values at these sizes.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from unittest import mock

import torch

import ptxsim
from ptxsim.fault import Fault
from ptxsim.run import Schedule
from ptxsim.virtual_gpu import _Driver
from tests.ptxsim.kernels import rows, scatter  # noqa: F401 (their cases)
from tests.ptxsim.kernels.cases import CASES
from tests.ptxsim.subjects import SUBJECTS, Subject

MOST = 10**7  # warp instructions of a launch; none of these kernels has a tenth of it


@dataclass(frozen=True)
class Edit:
    """A replacement in a kernel's PTX. nth: which match of the pattern, from 0 on; None for every one."""

    pattern: str
    new: str
    nth: int | None = 0

    def applied(self, ptx: str) -> str:
        found = list(re.finditer(self.pattern, ptx))
        chosen = found if self.nth is None else found[self.nth : self.nth + 1]
        if not chosen:
            raise ValueError(f"{self.pattern}: {len(found)} times")
        for match in reversed(chosen):
            ptx = ptx[: match.start()] + match.expand(self.new) + ptx[match.end() :]
        return ptx


@dataclass(frozen=True)
class Planted:
    """A fault. kernel: a name of `SUBJECTS` or of `CASES`. missed: why the simulator does not find it."""

    kind: str
    name: str
    kernel: str
    edits: tuple[Edit, ...]
    missed: str = ""

    def schedules(self) -> list[Schedule]:
        strict = {"strict_scopes": True, "most": MOST} if self.kind == "scopes" else {"most": MOST}
        failing = Schedule(2, failing_waits=True, **strict)
        return [failing] if self.kind == "retries" else [Schedule(0, **strict), Schedule(1, **strict), failing]


def wrong(kernel: str, edits: Sequence[Edit], schedule: Schedule) -> str:
    """What is wrong with a kernel after edits, under a schedule; empty for nothing."""
    try:
        return _of_case(kernel, edits, schedule) if kernel in CASES else _of_subject(kernel, edits, schedule)
    except Fault as fault:
        return f"fault: {fault}"


def _of_subject(name: str, edits: Sequence[Edit], schedule: Schedule) -> str:
    kernel, ptx = _code(name)
    for edit in edits:
        ptx = edit.applied(ptx)
    subject = _subject(name)
    return " ".join(subject.check(subject.simulator(schedule, (kernel, ptx)))[:1])


def _subject(name: str) -> Subject:
    (found,) = (one for one in SUBJECTS if one.name == name)
    return found


@cache
def _code(name: str) -> tuple[str, str]:
    """The kernel of a subject that multiplies, and its PTX."""
    subject = _subject(name)
    simulator = subject.simulator(Schedule())
    assert not subject.check(simulator)
    ((kernel, ptx),) = ((kernel, ptx) for kernel, ptx in simulator.code.items() if kernel != "split_k_reduction")
    return kernel, ptx


def _of_case(name: str, edits: Sequence[Edit], schedule: Schedule) -> str:
    case, load, applied = CASES[name], _Driver.load_binary, []

    def load_edited(driver, function, ptx, *rest):
        text = ptx.decode()
        if all(re.search(edit.pattern, text) for edit in edits):
            applied.append(function)
            for edit in edits:
                text = edit.applied(text)
        return load(driver, function, text.encode(), *rest)

    torch.manual_seed(0)
    with warnings.catch_warnings(), mock.patch.object(_Driver, "load_binary", load_edited):
        warnings.simplefilter("ignore")
        with ptxsim.gpu("sm_100a", schedule):
            found, expected = case.run()
    assert applied, f"{edits} in no kernel of {name}"
    try:
        case.check(found, expected)
    except AssertionError:
        return "values differ"
    return ""


# ---------------------------------------------------------------- the faults

DENSE, PAIRS, TILES, FEW = "dense NVFP4", "pairs of CTAs", "dequantised tiles", "few rows, split K"
LAST, LOCK = "sum by the last program, behind a semaphore", "layer norm, backward, sums behind a lock"
FENCE = r"fence\.proxy\.async\.shared::cta;"
RETRY = r"@!complete bra\.uni waitLoop;"
COMMIT = r"@%p\d+ (tcgen05\.commit[^;]*;)"
SECOND_LANE = r"{ .reg .b32 lane; .reg .pred second; mov.u32 lane, %laneid; setp.eq.u32 second, lane, 1; @second \1 }"
SECOND_WARP = r"{ .reg .b32 tid; .reg .pred second; mov.u32 tid, %tid.x; setp.eq.u32 second, tid, 32; @second \1 }"
# The kernel of pairs with the scopes that the PTX ISA asks for; Triton writes none.
SCOPED = (
    Edit(
        r"mbarrier\.arrive(\.expect_tx)?\.shared::cluster", r"mbarrier.arrive\1.release.cluster.shared::cluster", None
    ),
    Edit(r"try_wait\.parity\.shared::cta", "try_wait.parity.acquire.cluster.shared::cta", None),
)
ARRIVES, WAITS = r"mbarrier\.arrive\.release\.cluster", r"parity\.acquire\.cluster"
ALLOC = r"@%p1 (tcgen05\.alloc\.[^;]*;)"
# Predicates of the first program of a pair, and of another warp in the second one.
FIRST = (
    r"{ .reg .b32 rank; .reg .pred one; mov.u32 rank, %cluster_ctarank; setp.eq.and.u32 one, rank, 0, %p1; @one \1 }"
)
APART = r"""{ .reg .b32 rank, warp; .reg .pred one; mov.u32 rank, %cluster_ctarank; mov.u32 warp, %tid.x;
    shr.u32 warp, warp, 5; setp.eq.u32 one, rank, warp; @one \1 }"""


def _of(kind: str, kernel: str, name: str, *edits: Edit, missed: str = "") -> Planted:
    return Planted(kind, name, kernel, edits, missed)


FAULTS = (
    _of("proxies", DENSE, "a store's fence is one of global memory", Edit(FENCE, "fence.proxy.async.global;", 2)),
    _of("proxies", DENSE, "a store's fence is none of proxies", Edit(FENCE, "fence.acq_rel.cta;", 3)),
    _of("proxies", DENSE, "one warp fences for all", Edit(FENCE, f"@%p1 {FENCE}".replace("\\", ""), 4)),
    _of("proxies", DENSE, "the fence follows the copy",
        Edit(FENCE + r"([\s\S]*?cp\.async\.bulk\.commit_group;)", r"\1 fence.proxy.async.shared::cta;", 5)),
    _of("proxies", DENSE, "another map is acquired",
        Edit(r"(fence\.proxy\.tensormap\S* \[ )%rd\d+([^;]*;[\s\S]*?fence\.proxy\.tensormap\S* \[ )(%rd\d+)",
             r"\1\3\2\3")),
    _of("proxies", DENSE, "a map is acquired before its release",
        Edit(r"(@%p\d+ tensormap\.cp_fenceproxy[^;]*;)([\s\S]*?)(@%p\d+ fence\.proxy\.tensormap[^;]*;)", r"\3\2\1")),
    _of("proxies", TILES, "a product's fence is one of global memory", Edit(FENCE, "fence.proxy.async.global;", None)),
    _of("proxies", TILES, "the fence precedes the wait for the copies",
        Edit(FENCE, "", None),
        Edit(r"(cp\.async\.wait_group)", r"fence.proxy.async.shared::cta; \1", None)),
    _of("proxies", FEW, "a product's fence is none of proxies", Edit(FENCE, "fence.acq_rel.gpu;", None)),
    _of("scopes", PAIRS, "the sums' arrival has the own program's scope",
        *SCOPED, Edit(ARRIVES, "mbarrier.arrive.release.cta")),
    _of("scopes", PAIRS, "the sums' arrival names no scope", *SCOPED, Edit(ARRIVES, "mbarrier.arrive")),
    _of("scopes", PAIRS, "the sums' arrival is relaxed", *SCOPED, Edit(ARRIVES, "mbarrier.arrive.relaxed.cluster")),
    _of("scopes", PAIRS, "the wait for sums has the own program's scope",
        *SCOPED, Edit(WAITS, "parity.acquire.cta", 2)),
    _of("scopes", PAIRS, "the wait for sums is relaxed", *SCOPED, Edit(WAITS, "parity.relaxed.cluster", 2)),
    _of("scopes", PAIRS, "all arrivals at the cluster's barrier are relaxed",
        *SCOPED, Edit(r"cluster\.arrive\.aligned", "cluster.arrive.relaxed.aligned", None)),
    _of("scopes", LAST, "the semaphore has the program's scope", Edit(r"gpu\.acq_rel", "cta.acq_rel")),
    _of("scopes", LAST, "the semaphore only acquires", Edit(r"gpu\.acq_rel", "gpu.acquire")),
    _of("scopes", LAST, "the semaphore only releases", Edit(r"gpu\.acq_rel", "gpu.release")),
    _of("scopes", LAST, "a fence of the cluster stands for the order",
        Edit(r"(@%p\d+ atom\.global\.gpu)\.acq_rel([^;]*;)",
             r"fence.acq_rel.cluster; \1.relaxed\2 fence.acq_rel.cluster;")),
    _of("scopes", LOCK, "the lock is given back relaxed", Edit(r"gpu\.acq_rel\.exch", "gpu.relaxed.exch", None)),
    _of("scopes", LOCK, "the lock is taken relaxed", Edit(r"acq_rel\.gpu\.cas", "relaxed.gpu.cas")),
    _of("commits", DENSE, "another lane commits a step", Edit(COMMIT, SECOND_LANE)),
    _of("commits", DENSE, "another lane commits the sums", Edit(COMMIT, SECOND_LANE, 1)),
    _of("commits", TILES, "another warp commits",
        Edit(r"@%p\d+ (tcgen05\.commit[^;]*;)([\s\S]*?\$L__BB0_2:)", r"\2 " + SECOND_WARP)),
    _of("commits", PAIRS, "a commit is shown to its own program alone",
        Edit(r"(tcgen05\.commit[^;]*), %rs\d+;", r"\1, 1;")),
    _of("commits", DENSE, "a commit precedes the last product",
        Edit(r"(@%p\d+ tcgen05\.mma[^;]*;)((?:(?!tcgen05)[\s\S])*)(@%p\d+ tcgen05\.commit[^;]*;)", r"\3\2\1")),
    _of("commits", DENSE, "another lane commits a store", Edit(r"(cp\.async\.bulk\.commit_group;)", SECOND_LANE, 5)),
    _of("commits", DENSE, "another warp waits for the stores",
        Edit(r"\n\s*(cp\.async\.bulk\.wait_group\.read\s+0;)", SECOND_WARP, None)),
    _of("order", DENSE, "sums are given back before the wait for their loads",
        Edit(r"(tcgen05\.wait::ld[^;]*;)(\s*bar\.sync[^;]*;[\s\S]*?mbarrier\.arrive[^;]*;)", r"\2\1")),
    _of("order", TILES, "the wait for stores follows the barrier",
        Edit(r"(tcgen05\.wait::st[^;]*;)(\s*fence\.proxy[^;]*;(?:[\s\S]*?bar\.sync[^;]*;){2})", r"\2\1")),
    _of("order", LOCK, "the lock is given back without a barrier",
        Edit(r"bar\.sync \t0;\s*\.loc[^\n]*\s*bar\.sync \t0;(\s*mov\.b32[^@]*@%p\d+ atom\.global\.gpu\.acq_rel\.exch)",
             r"\1")),
    _of("order", FEW, "one warp waits for the copies",
        Edit(r"\n\s*(cp\.async\.wait_group[^;]*;)", SECOND_WARP.replace("setp.eq.u32 second, tid, 32",
                                                                        "setp.lt.u32 second, tid, 32"), None)),
    _of("alignment", DENSE, "an mbarrier at a multiple of 4", Edit(r"\b229440\b", "229444", None)),
    _of("alignment", PAIRS, "an mbarrier at a multiple of 4",
        Edit(r"(@%p\d+ mbarrier\.init\S* \[%r\d+)\]", r"\1+4]", 0)),
    _of("alignment", DENSE, "a box at a multiple of 64", Edit(r"\b131072;", "131136;", None)),
    _of("alignment", DENSE, "an mbarrier within a tile", Edit(r"\b229440\b", "212992", None)),
    _of("alignment", FEW, "two mbarriers overlap",
        Edit(r"(@%p\d+ mbarrier\.init\S* \[%r\d+)\]", r"\1+4]", 1)),
    _of("retries", DENSE, "the products' wait is not retried", Edit(RETRY, "", 1)),
    _of("retries", DENSE, "the wait for free sums is not retried", Edit(RETRY, "", 2)),
    _of("retries", DENSE, "the copies' wait is not retried", Edit(RETRY, "", 3)),
    _of("retries", DENSE, "the wait for sums is not retried", Edit(RETRY, "", 4)),
    _of("retries", PAIRS, "the wait for sums is not retried", Edit(RETRY, "", 0)),
    _of("retries", PAIRS, "the products' wait is not retried", Edit(RETRY, "", 3)),
    _of("retries", TILES, "the wait for products is not retried", Edit(RETRY, "", None)),
    _of("retries", DENSE, "the wrong result is retried", Edit(RETRY, "@complete bra.uni waitLoop;", 1)),
    _of("predicates", DENSE, "all lanes multiply", Edit(r"@%p\d+ tcgen05\.mma", "tcgen05.mma")),
    _of("predicates", DENSE, "all lanes commit", Edit(r"@%p\d+ tcgen05\.commit", "tcgen05.commit")),
    _of("predicates", DENSE, "both warps copy",
        Edit(r"(elect\.sync\s+%r\d+\|)(%p\d+)(, -1;\s*and\.pred[^;]*;(?:\s*mov[^;]*;)?\s*// begin inline asm\s*)"
             r"@%p\d+ (cp\.async\.bulk\.tensor\.2d\.shared)", r"\1\2\3@\2 \4")),
    _of("predicates", DENSE, "a guard of initialisations is never set",
        Edit(r"and\.pred\s+%p\d+, %p\d+, %p\d+;(\s*add\.s32\s+%r\d+, %r\d+, 229440;)", r"\1")),
    _of("predicates", DENSE, "the parity of a wait is never set",
        Edit(r"mov\.b32 \t%r\d+, 1;(\s*// begin inline asm\s*{\s*.reg .pred complete)", r"\1")),
    _of("predicates", DENSE, "the flag that adds is never set",
        Edit(r"(tcgen05\.mma[^;]*, (%p\d+);[\s\S]*?)setp\.ne\.b32 \t\2, [^;]*;", r"\1", None)),
    _of("predicates", DENSE, "an arrival's guard is negated", Edit(r"@(%p\d+ mbarrier\.arrive\.shared)", r"@!\1"),
        missed="Each of the 255 arrivals completes a phase, as the mbarrier counts one; no wait falls between them, "
               "and after an odd number the parity is right."),
    _of("registers", DENSE, "too few registers are given back", Edit(r"(setmaxnreg\.dec\S*\s+)24", r"\g<1>32")),
    _of("registers", DENSE, "too many registers are taken", Edit(r"(setmaxnreg\.inc\S*\s+)240", r"\g<1>248")),
    _of("registers", DENSE, "no registers are given back", Edit(r"setmaxnreg\.dec[^;]*;", "")),
    _of("registers", DENSE, "registers are given back that no warp has",
        Edit(r"(setmaxnreg\.dec\S*\s+)24", r"\g<1>176")),
    _of("registers", PAIRS, "more registers are taken than fewer", Edit(r"(setmaxnreg\.inc\S*\s+)240", r"\g<1>160")),
    _of("registers", PAIRS, "one lane sets the registers",
        Edit(r"(setmaxnreg\.inc\S*\s+240;)",
             r"{ .reg .b32 lane; .reg .pred one; mov.u32 lane, %laneid; setp.eq.u32 one, lane, 0; @one \1 }")),
    _of("registers", PAIRS, "the kernel begins with fewer", Edit(r"\.maxnreg 168", ".maxnreg 160")),
    _of("allocations", TILES, "sums begin at column 0",
        Edit(r"ld\.shared\.b32 \t(%r\d+), \[global_smem\];", r"mov.b32 \1, 0;")),
    _of("allocations", DENSE, "half as many columns", Edit(r"(tcgen05\.(?:de)?alloc[^;]*), 512;", r"\1, 256;", None)),
    _of("allocations", DENSE, "nothing is freed", Edit(r"@%p\d+ tcgen05\.dealloc[^;]*;", "", None)),
    _of("allocations", TILES, "less is freed", Edit(r"(tcgen05\.dealloc[^;]*), 128;", r"\1, 64;")),
    _of("allocations", TILES, "memory is freed twice", Edit(r"(@%p\d+ tcgen05\.dealloc[^;]*;)", r"\1 \1")),
    _of("allocations", TILES, "the permit is given up first",
        Edit(r"(@%p\d+ tcgen05\.alloc[^;]*;)([\s\S]*?)(@%p\d+ tcgen05\.relinquish[^;]*;)", r"\3\2\1")),
    _of("allocations", DENSE, "two warps allocate",
        Edit(r"(setp\.lt\.u32 \t%p1, %r1), 32;", r"\1, 64;")),
    _of("allocations", TILES, "memory is freed before it is read",
        Edit(r"@%p\d+ tcgen05\.dealloc[^;]*;", ""),
        Edit(r"(tcgen05\.ld\.sync)", r"@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r461, 128; \1")),
    _of("allocations", PAIRS, "one program of a pair allocates", Edit(ALLOC, FIRST)),
    _of("allocations", PAIRS, "another warp allocates in the second program", Edit(ALLOC, APART)),
    _of("allocations", PAIRS, "the second program's address goes elsewhere",
        Edit(r"@%p1 (tcgen05\.alloc\.\S* )\[(%r\d+)\]",
             r"{ .reg .b32 at; mov.u32 at, %cluster_ctarank; shl.b32 at, at, 4; add.u32 at, at, \2; @%p1 \1[at]"),
        Edit(r"(@%p1 tcgen05\.alloc[^;]*;)", r"\1 }")),
    _of("allocations", PAIRS, "one program of a pair frees",
        Edit(r"@%p1 (tcgen05\.dealloc\.[^;]*;)", FIRST, None)),
)  # fmt: skip
