"""The gate itself: its rules on kernels that are known to keep them or not, its lines, its command."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

from fp4compile.__main__ import main  # noqa: E402
from fp4compile.check import bounds as lines  # noqa: E402
from fp4compile.check import machine_code as check  # noqa: E402
from fp4compile.check import products, quantisers, resources  # noqa: E402
from fp4compile.check.machine_code import ProductRow, QuantizeRow, Resources  # noqa: E402
from fp4compile.check.products import MatmulCase  # noqa: E402
from fp4compile.check.ptx import Ptx  # noqa: E402
from fp4compile.check.quantisers import Configuration  # noqa: E402
from fp4compile.check.sass import Sass, disassemble  # noqa: E402
from fp4compile.cli.check_sm100 import instruction_name  # noqa: E402
from tests.helpers import sketches_sm100 as sketches  # noqa: E402
from tests.helpers.representatives import representatives  # noqa: E402

# ---------------------------------------------------------------- overlap


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "num_stages", "constants", "expected"), [
    (sketches.by_pointers, 3, {"BY_POINTER": 0, "STAGES": 3}, "each step waits for its own product"),
    (sketches.by_pointers, 3, {"BY_POINTER": 1, "STAGES": 1}, "each step waits for its own product"),
    (sketches.by_pointers, 3, {"BY_POINTER": 1, "STAGES": 2}, "each step waits until no load is under way"),
    (sketches.by_pointers, 3, {"BY_POINTER": 1, "STAGES": 3}, None),
    (sketches.by_descriptors, 1, {"SPECIALIZED": 0}, "each step waits for its own product"),
    (sketches.by_descriptors, 3, {"SPECIALIZED": 0}, None),
    (sketches.by_descriptors, 1, {"SPECIALIZED": 1},
     ("another partition loads, into 1 buffer", "each step waits for its own product")),  # by version of Triton
    (sketches.by_descriptors, 2, {"SPECIALIZED": 1}, None), (sketches.by_descriptors, 3, {"SPECIALIZED": 1}, None),
], ids=str)  # fmt: skip
def test_loops_that_overlap_are_told_from_those_that_do_not(kernel, num_stages, constants, expected):
    """Whatever feeds the loop: pointers or TMA, the same warps or others, with enough stages or without."""
    compiled = sketches.compiled(kernel, num_stages, **constants)
    found = Ptx(compiled.asm["ptx"])
    assert found.overlap.overlapped == (expected is None)
    assert expected is None or found.overlap.why in ([expected] if isinstance(expected, str) else expected)
    by_tma = kernel is sketches.by_descriptors
    assert (found.tma_loads > 0) == by_tma and found.waits > 0
    assert (found.count(r"tcgen05\.cp") > 0) == (constants.get("BY_POINTER") != 0)
    assert check._stores(disassemble(compiled.asm["cubin"]), found) in (("TMA",) if by_tma else (2, 16))


# ---------------------------------------------------------------- resources


def test_the_budgets_of_a_b200():
    """NVFP4 of bf16: 32 bytes read and 9 written for 16 elements; along both directions 18."""
    assert [int(resources.instruction_budget(100, moved)) for moved in (41, 50)] == [184, 224]
    assert resources.instruction_budget(100, 50) == pytest.approx(225, abs=0.1)
    assert resources.instruction_budget(103, 41) == pytest.approx(184.5 * 160 / 148, abs=0.1)


@pytest.mark.parametrize(("used", "expected"), [
    ({"warps": 4, "registers": 32, "shared": 0}, 16),  # of 65536 registers
    ({"warps": 4, "registers": 33, "shared": 0}, 12),  # in units of 256 a warp
    ({"warps": 8, "registers": 16, "shared": 0}, 8),  # of 2048 threads
    ({"warps": 1, "registers": 16, "shared": 0}, 32),
    ({"warps": 4, "registers": 32, "shared": 110608}, 2), ({"warps": 4, "registers": 32, "shared": 116000}, 1),
    ({"warps": 4, "registers": 32, "shared": 0, "tensor_columns": 256}, 2),
    ({"warps": 4, "registers": 32, "shared": 0, "tensor_columns": 576}, 0),
    ({"warps": 4, "registers": 32, "shared": 232449}, 0), ({"warps": 12, "registers": 255, "shared": 0}, 0),
])  # fmt: skip
def test_programs_of_a_multiprocessor(used, expected):
    assert resources.programs(100, **used) == expected


def test_an_old_gpu_has_no_line():
    with pytest.raises(ValueError, match="sm=80: expected a compute capability from 90 on"):
        resources.programs(80, 4, 32, 0)


# ---------------------------------------------------------------- lines

FITS = Resources(registers=168, shared=200000, tensor_columns=512, spills=0, programs=1, occupancy=0.19)
GOOD = ProductRow(
    "gemm", "", "", 100, (), FITS, "block-scaled", ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16",),
    scale_copies=12, tma_loads=4, asynchronous_loads=4, waits=2, overlapped=True, why="", stores="TMA",
)  # fmt: skip
FORMAT = MatmulCase("nvfp4", "nvfp4")


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, []), ({"stores": 16}, []), ({"scale_copies": 0}, ["0 tcgen05.cp"]), ({"tma_loads": 0}, ["0 TMA loads"]),
    ({"overlapped": False, "why": "it waits"}, ["the main loop does not overlap: it waits"]),
    ({"stores": 8}, ["stores of 8 bytes, of 16"]),
    ({"instruction": ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale",)},
     [r"no tcgen05\.mma\S*kind::mxf4nvf4\.block_scale"]),
    ({"resources": replace(FITS, spills=3)}, ["3 local-memory accesses"]),
    ({"resources": replace(FITS, programs=0)}, ["no program fits a multiprocessor"]),
    ({"line": "block-scaled, by pointers", "tma_loads": 0, "stores": 16}, []),
    ({"line": "block-scaled, by pointers", "asynchronous_loads": 0}, ["0 asynchronous loads"]),
    ({"line": "block-scaled, by pointers", "overlapped": False}, ["the main loop does not overlap"]),
    ({"line": "block-scaled, words", "stores": 4}, []),
    ({"line": "block-scaled, words", "stores": 2}, ["stores of 2 bytes, of 4"]),
    ({"line": "block-scaled, words", "tma_loads": 0}, ["0 TMA loads"]),
    ({"sm": 90, "scale_copies": 0, "stores": 2}, []),
])  # fmt: skip
def test_what_keeps_a_product_below_its_line(changes, expected):
    problems = check._product_problems(replace(GOOD, **changes), FORMAT)
    assert len(problems) == len(expected)
    assert all(said in problem for said, problem in zip(expected, problems, strict=True))


def test_rows_that_are_not_whole_16_bytes_are_stored_as_they_can_be():
    narrow = replace(GOOD, stores=2)
    assert check._product_problems(narrow, replace(FORMAT, n=8190)) == ()
    assert check._product_problems(narrow, replace(FORMAT, n=8184)) == ("stores of 2 bytes, of 16",)


@pytest.mark.parametrize(("sm", "instruction", "changes", "expected"), [
    (120, "mma.sync.aligned.kind::mxf4nvf4.block_scale", {"matrix_loads": 8}, 0),
    (120, "mma.sync.aligned.kind::mxf4nvf4.block_scale", {}, 1),
    (120, "tcgen05.mma.kind::mxf4nvf4.block_scale", {"matrix_loads": 8}, 1),
    (120, "mma.sync.aligned.kind::mxf4nvf4.block_scale", {"matrix_loads": 8, "asynchronous_loads": 0}, 1),
])  # fmt: skip
def test_sm120_has_lines_of_its_own(sm, instruction, changes, expected):
    row = replace(GOOD, sm=sm, line="block-scaled, sm_120", instruction=(instruction,), scale_copies=0, tma_loads=0)
    assert len(check._product_problems(replace(row, **changes), FORMAT)) == expected


def test_every_product_has_a_line():
    assert lines.product_line("native", True, 100) == "block-scaled"
    assert lines.product_line("native", False, 103) == "block-scaled, by pointers"
    assert lines.product_line("native", True, 120) == "block-scaled, sm_120"
    assert lines.product_line("native", True, 120, words=True) == "block-scaled, sm_120, words"
    assert lines.product_line("emulated", True, 100) == "dequantised"
    assert lines.product_line("native", True, 100, multiplies=False) == "beside a product"
    assert lines.product_line("native", True, 100, words=True) == "block-scaled, words"
    assert [lines.instruction_kind(a, b, sm) for a, b, sm in (
        ("nvfp4", "nvfp4", 100), ("mxfp4", "mxfp4", 100), ("mxfp4", "mxfp4", 120), ("mxfp8", "mxfp4", 100),
        (None, "nvfp4", 100))] == ["mxf4nvf4", "mxf4", "mxf4nvf4", "mxf8f6f4", ""]  # fmt: skip


QUANTISED = QuantizeRow("k", "rows", "mxfp4", 100, (), FITS, instructions=100, budget=184, line=150,
                        conversions=("E2M1", "E8"), loads=16, stores=16)  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, []), ({"conversions": ("E4M3",)}, ["no conversion to E2M1, E8"]), ({"loads": 8}, ["no 16-byte"]),
    ({"stores": 8}, ["no 16-byte"]), ({"kernel": "quantize_columns", "loads": 4}, []),
    ({"kernel": "tensor_amax", "stores": 0}, []), ({"instructions": 151}, []),
    ({"resources": replace(FITS, spills=3)}, ["3 local-memory accesses"]),
])  # fmt: skip
def test_what_keeps_a_quantiser_below_its_line(changes, expected):
    launched = Configuration("rows", "mxfp4").launches(100)[0]
    problems = check._quantize_problems(replace(QUANTISED, **changes), launched)
    assert len(problems) == len(expected)
    assert all(said in problem for said, problem in zip(expected, problems, strict=True))


@pytest.mark.parametrize(("version", "changes", "judged", "shown"), [
    ("3.9.0", {}, 0, 0), ("3.9.0", {"instructions": 150.5}, 1, 0), ("3.9.0", {"instructions": 151, "sm": 90}, 0, 0),
    ("3.8.0", {}, 0, 0), ("3.8.0", {"instructions": 150.5}, 0, 1), ("3.8.0", {"instructions": 151, "sm": 90}, 0, 0),
    ("3.10.0", {"instructions": 151}, 0, 1), ("3.9.0+git1", {"instructions": 151}, 0, 1),
])  # fmt: skip
def test_counts_of_instructions_are_judged_for_the_compiler_that_set_the_lines(
    version, changes, judged, shown, monkeypatch
):
    monkeypatch.setattr(triton, "__version__", version)
    row = check._with_figures(replace(QUANTISED, problems=("a fact",), **changes))
    said = (f"{row.instructions:.0f} instructions for 16 elements, of 150",)
    assert row.problems == ("a fact", *judged * said) and row.unjudged == shown * said


def test_the_compiler_of_the_lines_is_the_pinned_one():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"^TRITON :?\??= (\S+)$", makefile, re.MULTILINE) == [lines.COMPILER]


def test_goals_and_what_must_not_get_worse_hold_for_sm100_alone():
    where = ("quantize_rows", "rows", "nvfp4")
    assert [lines.instruction_line(*where, sm, 184.5) for sm in (90, 100, 103, 120)] == [184.5, 102, 102, 184.5]
    assert lines.instruction_line("quantize_rows", "rows", "mxfp8", 100, 218.0) == 218.0
    # Every entry belongs to a configuration.
    tables = (
        quantisers.CONFIGURATIONS,
        quantisers.GROUPED_CONFIGURATIONS,
        quantisers.PROLOGUE_CONFIGURATIONS,
    )
    known = {(one.label, one.format) for table in tables for one in table}
    assert {entry[1:] for entry in lines.INSTRUCTION_LINES} <= known


# ---------------------------------------------------------------- what is compiled


def test_long_rows_are_read_by_two_kernels():
    """One finds the amax of each row and one quantises tiles, without steps; the scale sweep alone has steps."""
    by_label = {one.label: one for one in quantisers.CONFIGURATIONS}
    long, sweep = by_label["scaled rows, long"], by_label["scale sweep"]
    amaxes, codes = long.launches(100)
    assert (amaxes.kernel.__name__, codes.kernel.__name__) == ("tensor_amax", "quantize_rows")
    numbers = 4 * 8192  # the rows' amaxes, and their global scales
    elements = 8192 * 2**16
    assert check.bytes_moved(amaxes) == 2 * elements + numbers
    assert check.bytes_moved(codes) == 41 * elements // 16 + 2 * numbers
    assert [long.trips(one) for one in (amaxes, codes)] == [1, 1]
    assert sweep.trips(sweep.launches(100)[-1]) == quantisers.SWEEP_STEPS
    rows = quantisers.CONFIGURATIONS[0]
    assert rows.trips(rows.launches(100)[0]) == 1
    assert check.bytes_moved(rows.launches(100)[0]) == 41 * 8192 * 8192 // 16


def test_instructions_are_those_of_all_threads_for_16_elements(monkeypatch):
    """A program of 4 warps quantises 128 rows of 64 elements with swizzled scales: 4 runs of 16 elements a thread."""
    monkeypatch.setattr(Sass, "executed", lambda self, trips: 400 * trips)
    one = quantisers.CONFIGURATIONS[0]
    row = check.quantize_row(one, one.launches(100)[0], 100)
    assert row.instructions == pytest.approx(400 / 4)
    assert (row.loads, row.stores, row.kernel) == (16, 16, "quantize_rows")


def test_programs_without_rows_count_by_their_own_way(monkeypatch):
    """8192 rows in 64 groups are 64 tiles of 128 rows, and 128 are launched."""
    monkeypatch.setattr(Sass, "executed", lambda self, trips, idle=False: 100 if idle else 400)
    (one,) = (
        each for each in quantisers.GROUPED_CONFIGURATIONS if (each.label, each.format) == ("grouped rows", "mxfp8")
    )
    (launched,) = one.launches(100)
    assert launched.grid == 2 * one.idle_programs(launched)
    assert check.quantize_row(one, launched, 100).instructions == pytest.approx((400 + 100) / 4)
    # Tiles of 16 rows: 8 rows of each group, 64 tiles of 32 + 64.
    few = next(each for each in quantisers.GROUPED_CONFIGURATIONS if each.label == "grouped rows, few")
    assert [3 * few.idle_programs(each) == each.grid for each in few.launches(100)] == [True, True]


def test_the_narrowest_store_counts():
    assert check._stores(SimpleNamespace(widths=lambda opcode: [16, 2]), None) == 2
    assert check._stores(SimpleNamespace(widths=lambda opcode: []), SimpleNamespace(tma_stores=0)) == 0


def test_scales_lie_as_the_products_of_the_gpu_read_them():
    rows = Configuration("rows", "nvfp4")
    assert [rows.layout_on(sm) for sm in (90, 100, 120)] == ["linear", "swizzled", "swizzled"]
    assert replace(rows, layout="linear").layout_on(100) == "linear"
    assert replace(rows, format="float8_rowwise").layout_on(100) == "linear"


def test_products_reach_every_kernel_that_multiplies_quantised_operands():
    """Also where a library is chosen first: autotuning may pick the kernel of this package."""
    kernels = {each.kernel.__name__ for sm in (90, 100, 120) for product in products.PRODUCTS
               for each in product.launches(sm)[1]}  # fmt: skip
    assert kernels >= {"gemm_block_scaled_sm100", "gemv", "gemm_skinny", "gemm_dequant_tiles", "gemm_wgmma_sm90",
                       "gemm_float8_sm90"}  # fmt: skip
    for product in products.PRODUCTS:
        tier, found = product.launches(90 if product.b.startswith("float8") else 100)
        assert found and (product.a is None or product.m <= 64 or tier == "native"), product.label


@pytest.mark.parametrize("sm", [90, 100, 120])
def test_representatives_have_every_kernel(sm):
    """And every number format that a kernel has on SM100, or that any kernel has on another GPU."""

    def met(configurations, products):
        found = {one for each in configurations for one in _kernels_and_formats(each.launches(sm), sm)}
        return found | {one for each in products for one in _kernels_and_formats(each.launches(sm)[1], sm)}

    chosen = representatives(sm)
    assert met(*chosen) == met(quantisers.CONFIGURATIONS, products.PRODUCTS)
    assert len(chosen[0]) < len(quantisers.CONFIGURATIONS) and len(chosen[1]) < len(products.PRODUCTS)


def _kernels_and_formats(launched, sm):
    for one in launched:
        yield one.kernel.__name__
        for key in ("ELEMENT", "A_ELEMENT", "B_ELEMENT", *(["SCALE"] if sm == 100 else [])):
            yield key, one.constants.get(key), one.kernel.__name__ if sm == 100 else ""


def test_a_tool_that_fails_says_why():
    with pytest.raises(RuntimeError, match="nvdisasm"):
        disassemble(b"no cubin")


def test_a_kernel_that_does_not_compile_is_a_row(monkeypatch):
    def fail(launched, sm):
        raise RuntimeError("Internal Triton PTX codegen error\nptxas fatal : Value 'sm_103a' is not defined\n")

    monkeypatch.setattr(check, "compile_launch", fail)
    (row,) = check.check_products(103, (FORMAT,))
    assert row.problems == ("does not compile: RuntimeError: Internal Triton PTX codegen error",)
    (row,) = check.check_quantize(103, quantisers.CONFIGURATIONS[:1])
    assert row.problems and row.to_dict()["problems"]


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("what", ["products", "quantizers"])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_row_below_its_line_fails_the_command(what, wrong, capsys, monkeypatch, tmp_path):
    """Whichever row it is, not the last one alone; the file has all of them."""
    rows = {"products": [replace(GOOD, kernel=f"k{i}") for i in range(3)],
            "quantizers": [replace(QUANTISED, kernel=f"k{i}") for i in range(3)]}  # fmt: skip
    rows[what][wrong] = replace(rows[what][wrong], problems=("a problem",))
    monkeypatch.setattr("fp4compile.cli.check_sm100.check_products", lambda sm: iter(rows["products"]))
    monkeypatch.setattr("fp4compile.cli.check_sm100.check_quantize", lambda sm: iter(rows["quantizers"]))
    assert main(["check-sm100", "--json", str(tmp_path / "found.json")]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [printed[i - 1].split()[0] for i, line in enumerate(printed) if "a problem" in line] == [f"k{wrong}"]
    assert printed[-1] == "1 of 6 launches are below their line"
    found = json.loads((tmp_path / "found.json").read_text())
    assert [bool(row["problems"]) for row in found[what]] == [i == wrong for i in range(3)]
    assert {"torch", "triton", "date", "device"} <= found["environment"].keys()
    assert (
        found["products"][0].items() >= {"scale_copies": 12, "stores": "TMA", "registers": 168, "programs": 1}.items()
    )
    rows[what][wrong] = replace(rows[what][wrong], problems=())
    assert main(["check-sm100"]) == 0


@pytest.mark.parametrize(("version", "status"), [(lines.COMPILER, 1), ("3.8.0", 0)])
def test_figures_of_another_compiler_fail_no_command(version, status, capsys, monkeypatch, tmp_path):
    """A kernel with a few instructions more under another version of Triton: shown, and no failure."""
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(Sass, "executed", lambda self, trips, idle=False: 604 * trips)  # 151 for 16 elements
    rows = tuple(one for one in quantisers.CONFIGURATIONS if (one.label, one.format) == ("rows", "nvfp4"))
    monkeypatch.setattr("fp4compile.cli.check_sm100.check_products", lambda sm: iter([GOOD]))
    monkeypatch.setattr(
        "fp4compile.cli.check_sm100.check_quantize",
        lambda sm: (check.quantize_row(one, one.launches(sm)[-1], sm) for one in rows),
    )
    assert main(["check-sm100", "--json", str(tmp_path / "found.json")]) == status
    printed = capsys.readouterr().out.splitlines()
    beyond, last = "151 instructions for 16 elements, of 102", f"{status} of 2 launches are below their line"
    (row,) = json.loads((tmp_path / "found.json").read_text())["quantizers"]
    assert printed[-1] == last and (row["problems"], row["unjudged"]) == (status * [beyond], (1 - status) * [beyond])
    if status:
        assert f"    below its line: {beyond}" in printed and not any("not judged" in line for line in printed)
    else:
        assert f"    not judged: {beyond}" in printed
        assert "Triton 3.9.0, and this is Triton 3.8.0; 1 launches have more" in printed[-2]


@pytest.mark.slow
def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(quantisers, "ALL_CONFIGURATIONS", quantisers.CONFIGURATIONS[:1])
    monkeypatch.setattr(products, "PRODUCTS", products.PRODUCTS[:1])
    assert main(["check-sm100", "--sm", "100"]) == 0
    out = capsys.readouterr().out
    assert "gemm_block_scaled_sm100" in out and "tcgen05 mxf4nvf4" in out and "quantize_rows" in out and "E2M1" in out


def test_instructions_have_short_names():
    assert instruction_name("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16") == "tcgen05 mxf4nvf4"
    assert instruction_name("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == "mma.sync bf16"
    assert instruction_name("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16") == "wgmma f16"
