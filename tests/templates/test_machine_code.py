"""The kernels' machine code for GPUs that are not here: a claim about code, not about speed."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from fp4compile.__main__ import main  # noqa: E402
from fp4compile.cli import check_sm100  # noqa: E402
from tests.helpers.kernels import NEW_PTXAS  # noqa: E402

TARGETS = [90, 100, *([103, 120] if NEW_PTXAS else [])]


KERNELS = {
    "quantize_rows", "quantize_scaled_rows", "quantize_both", "quantize_columns", "quantize_squares",
    "dequantize_rows", "tensor_amax", "columns_amax",
}  # fmt: skip


@pytest.mark.parametrize("sm", TARGETS)
def test_every_shipped_configuration(sm, monkeypatch):
    """Assembles; converts by the instructions of SM100; spills nothing; accesses global memory 16 bytes at a time."""
    if sm == 103:  # launches what SM100 does, so one of each kernel and of each conversion tells as much
        assert launched_on(103) == launched_on(100)
        monkeypatch.setattr(check_sm100, "CONFIGURATIONS", representative(103))
    problems = {}
    kernels = set()
    for found, wrong in check_sm100.check(sm):
        kernels.add(found.kernel)
        if wrong:
            problems[found.kernel, found.configuration, found.format] = wrong
    assert not problems
    assert kernels == KERNELS


def launched_on(sm):
    """Every launch of every configuration: kernel, arguments, constants, warps."""
    found = (one for configuration in check_sm100.CONFIGURATIONS for one in configuration.launches(sm))
    return [(one.kernel.__name__, str(one.args), one.constants, one.num_warps) for one in found]


def representative(sm):
    """Configurations that have every kernel and every conversion, the later ones only for what those before lack."""
    chosen, seen = [], set()
    for configuration in check_sm100.CONFIGURATIONS:
        launches = configuration.launches(sm)
        found = {one.kernel.__name__ for one in launches}
        found |= {conversion for one in launches for conversion in check_sm100.expected_conversions(one, sm)}
        if not found <= seen:
            chosen.append(configuration)
            seen |= found
    return chosen


@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_equal_fp8_conversions_stay_whole(format, sm):
    """Of one column most elements are provably 0; ptxas merges equal FP8 conversions with an undefined register."""
    one = check_sm100.Configuration("rows", format, check_sm100._rows, shape=(1, 1))
    launched = one.launches(sm)[-1]
    compiled = check_sm100._compat.compile_ahead(
        launched.kernel, launched.args, launched.constants, launched.num_warps, sm
    )
    sass, _ = check_sm100._disassemble(compiled.asm["cubin"])
    merged = re.findall(r"F2FP\.SATFINITE\.E[45]M[23]\.F32\.PACK_AB_MERGE_C R\d+, \w+, \w+, (\w+)", sass)
    assert set(merged) == {"RZ"}


@pytest.mark.parametrize("sm", [90, 100])
def test_quarters_are_not_fused_into_the_sums_of_a_transform(sm):
    """A float32 number below 2^-123 may have no quarter: a sum with a product that is not rounded would differ.

    Of sixteen values there are sixteen quarters, and four times as many sums.
    """
    one = check_sm100.Configuration("", "nvfp4_te", check_sm100._transformed, dtype=torch.float32)
    launched = one.launches(sm)[0]
    ptx = check_sm100._compat.compile_ahead(
        launched.kernel, launched.args, launched.constants, launched.num_warps, sm
    ).asm["ptx"]
    counts = [len(re.findall(pattern, ptx)) for pattern in (r"\bfma\.rn\.f32", r"\b(?:add|sub)(?:\.rn)?\.f32")]
    assert launched.kernel.__name__ == "columns_amax" and counts[0] and counts[1] == 4 * counts[0]


@pytest.mark.parametrize("format", ["nvfp4_one_level", "nvfp4", "mxfp8", "mxfp4"])
def test_rows_and_columns_at_once_leave_registers_for_other_programs(format):
    """Warps that a multiprocessor holds, by its 65536 registers: while some wait for memory, others work."""
    both = check_sm100.Configuration("both", format, check_sm100._both)
    (launched,) = (one for one in both.launches(90) if one.kernel.__name__ == "quantize_both")
    _, found = check_sm100._check(launched, both.label, format, 90)
    per_warp = 32 * -(-found.registers // 8) * 8
    warps = 65536 // (per_warp * launched.num_warps) * launched.num_warps
    assert warps >= (12 if NEW_PTXAS and launched.num_warps == 4 else 16)


@pytest.mark.parametrize("sm", TARGETS)
def test_a_small_tensor_is_read_before_its_amax_is_awaited(sm):
    """The kernel of the amax lets the next one start at once; that one waits only when it has begun to read."""
    small = check_sm100.Configuration("rows", "nvfp4", check_sm100._rows, shape=(16, 4096))
    amax, quantise = (
        check_sm100._disassemble(
            check_sm100._compat.compile_ahead(one.kernel, one.args, one.constants, one.num_warps, sm).asm["cubin"]
        )[0]
        for one in small.launches(sm)
    )
    assert amax.index("PREEXIT") < amax.index("LDG")
    before, after = quantise.split("ACQBULK")
    assert "LDG" in before and "STG" not in before
    assert "LDG" in after  # the maxima


def test_every_shipped_product_on_sm90(monkeypatch):
    """Of NVFP4 weights and up to 64 rows, by kernels of their own: nothing spills, shared memory suffices."""
    products = [one for one in check_sm100.PRODUCTS if one.b == "nvfp4" and not one.gated]
    monkeypatch.setattr(check_sm100, "PRODUCTS", products)
    found = {(row.format, row.configuration): (row.kernel, wrong) for row, wrong in check_sm100.check_products(90)}
    assert not [wrong for _, wrong in found.values() if wrong]
    for (_, configuration), (kernel, _) in found.items():
        rows = int(re.search(r"(\d+)x", configuration)[1])
        expected = "gemv" if rows <= 2 else "gemm_skinny" if rows <= 8 else "gemm_wgmma_sm90"
        assert kernel == expected, configuration
    assert {kernel for kernel, _ in found.values()} == {"gemv", "gemm_skinny", "gemm_wgmma_sm90"}


@pytest.mark.parametrize("sm", [sm for sm in TARGETS if sm in (100, 120)])
def test_every_shipped_product(sm):
    """The block-scaled matrix instruction where there is one; nothing spills, shared and tensor memory suffice."""
    found = {(row.format, row.configuration): (row.kernel, wrong) for row, wrong in check_sm100.check_products(sm)}
    assert not [wrong for _, wrong in found.values() if wrong]
    native = [formats for (formats, _), (kernel, _) in found.items() if kernel == "gemm_block_scaled_sm100"]
    mixed = ["mxfp8 x mxfp4"] if sm < 120 else []  # Triton has no mixed block-scaled product on SM120
    assert set(native) == {"nvfp4 x nvfp4", "mxfp4 x mxfp4", "mxfp8 x mxfp8", *mixed}


def test_a_missing_conversion_is_a_problem():
    found = check_sm100.Checked("k", "rows", "mxfp4", 100, 32, 0, 0, ("E4M3",), 1, 1)
    assert found.problems({"E2M1", "E8"}) == ["no conversion to E2M1, E8"]
    spilled = check_sm100.Checked("k", "rows", "mxfp4", 100, 255, 0, 3, ("E2M1",), 0, 0)
    assert spilled.problems({"E2M1"}) == ["3 local-memory accesses", "no 16-byte global accesses"]


@pytest.mark.parametrize("what", ["check", "check_products"])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_problem_among_others_fails_the_command(what, wrong, capsys, monkeypatch):
    """Whichever kernel, or product, has it: not the last one's verdict alone."""
    rows = [check_sm100.Checked(f"k{i}", "c", "f", 90, 32, 0, 0, (), 1, 1) for i in range(3)]
    found = {name: [(row, []) for row in rows] for name in ("check", "check_products")}
    found[what][wrong] = (rows[wrong], ["a problem"])
    for name in found:
        monkeypatch.setattr(check_sm100, name, lambda sm, name=name: iter(found[name]))
    with pytest.raises(SystemExit) as stopped:
        main(["check-sm100", "--sm", "90"])
    assert stopped.value.code == 1
    printed = capsys.readouterr().out.splitlines()[1:]
    assert [line.endswith("; a problem") for line in printed] == [
        (name, i) == (what, wrong) for name in ("check", "check_products") for i in range(3)
    ]


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, []), ({"local_accesses": 7}, ["7 local-memory accesses"]),
    ({"shared": 232449}, ["232449 bytes of shared memory"]),
])  # fmt: skip
def test_what_is_wrong_with_a_product_is_reported(changes, expected, monkeypatch):
    compiled = SimpleNamespace(asm={"ptx": "mma.sync.aligned.m16n8k16.row.col.f32.f16"}, metadata=SimpleNamespace())
    checked = check_sm100.Checked("k", "c", "f", 90, 255, 0, 0, (), 0, 0)
    monkeypatch.setattr(check_sm100, "PRODUCTS", check_sm100.PRODUCTS[4:5])
    monkeypatch.setattr(check_sm100, "_check", lambda *_: (compiled, replace(checked, **changes)))
    assert [problems for _, problems in check_sm100.check_products(90)] == [expected]


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(check_sm100, "CONFIGURATIONS", check_sm100.CONFIGURATIONS[:1])
    monkeypatch.setattr(check_sm100, "PRODUCTS", check_sm100.PRODUCTS[:1])
    with pytest.raises(SystemExit) as stopped:
        main(["check-sm100", "--sm", "100"])
    assert stopped.value.code == 0
    header, row, product = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["kernel", "configuration", "format", "sm"]
    assert "quantize_rows" in row and "E2M1" in row
    assert "gemm_block_scaled_sm100" in product and "kind::mxf4nvf4" in product
