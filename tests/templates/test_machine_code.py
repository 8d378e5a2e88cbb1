"""The kernels' machine code for GPUs that are not here: a claim about code, not about speed."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from fp4compile import _compat  # noqa: E402
from fp4compile.check import machine_code as check  # noqa: E402
from fp4compile.check.products import PRODUCTS, MatmulCase  # noqa: E402
from fp4compile.check.quantisers import (  # noqa: E402
    BOTH,
    COLUMNS,
    CONFIGURATIONS,
    GATE,
    NORM,
    Configuration,
)
from fp4compile.check.sass import disassemble  # noqa: E402
from fp4compile.formats.operand import Arguments  # noqa: E402
from fp4compile.hardware import Target  # noqa: E402
from fp4compile.ops.quantize import quantize_kernels  # noqa: E402
from fp4compile.templates.choose import choose  # noqa: E402
from fp4compile.templates.device import block_scales  # noqa: E402
from fp4compile.templates.gemm.heuristics import block_scaled_configs  # noqa: E402
from fp4compile.templates.launch import dry_run  # noqa: E402
from fp4compile.templates.multiply import multiply  # noqa: E402
from fp4compile.templates.problem import problem_of  # noqa: E402
from tests.helpers.kernels import NEW_PTXAS, spilled_bytes  # noqa: E402
from tests.helpers.representatives import representatives  # noqa: E402

TARGETS = [90, 100, *([103, 120] if NEW_PTXAS else [])]


KERNELS = {
    "quantize_rows", "quantize_whole_rows", "quantize_both", "quantize_columns", "quantize_squares",
    "dequantize_rows", "tensor_amax", "columns_amax", "sweep_scales", "lay_out_scales",
}  # fmt: skip


@pytest.mark.parametrize("sm", [sm for sm in TARGETS if sm != 103])
def test_every_shipped_configuration(sm):
    """Assembles; converts by the instructions of SM100; spills nothing; accesses global memory 16 bytes at a time; has
    no more instructions than its line allows. The representatives are compiled."""
    rows = list(check.check_quantize(sm, representatives(sm)[0]))
    assert not {(row.kernel, row.configuration, row.format): row.problems for row in rows if row.problems}
    assert {row.kernel for row in rows} == KERNELS


def one_of_each_kernel(configurations, sm):
    seen, found = set(), []
    for configuration in configurations:
        kernels = {one.kernel for one in configuration.launches(sm)}
        if not kernels <= seen:
            seen |= kernels
            found.append(configuration)
    return found


def launched_on(sm):
    """Every launch of every configuration: kernel, arguments, constants, warps."""
    found = (one for configuration in CONFIGURATIONS for one in configuration.launches(sm))
    return [(one.kernel.__name__, str(one.args), one.constants, one.num_warps) for one in found]


@pytest.mark.skipif(103 not in TARGETS, reason="this ptxas does not know sm_103")
def test_sm103_runs_the_code_of_sm100():
    """Launches, tiers, and the PTX of a launch of each kernel equal the ones for 10.0; ptxas spills nothing."""
    assert launched_on(103) == launched_on(100)
    # A product that one kernel must compute is none of every GPU.
    tiers = [[one.launches(sm)[0] for one in PRODUCTS if not one.kernel] for sm in (100, 103)]
    assert tiers[0] == tiers[1]
    configurations, products = representatives(103)
    launches = [one for each in one_of_each_kernel(configurations, 103) for one in each.launches(103)]
    launches += [one for each in products if each.launches(103)[0] == "native" for one in each.launches(103)[1]]
    assert {one.kernel.__name__ for one in launches} > KERNELS
    for one in launches:
        options = one.args, one.constants, one.num_warps
        codes = [_compat.compile_ahead(one.kernel, *options, sm, one.num_stages, one.num_ctas) for sm in (100, 103)]
        texts = [each.asm["ptx"].partition("\t.file")[0] for each in codes]  # without the lines for debuggers
        assert texts[0].replace("sm_100a", "sm_103a") == texts[1]
        assert spilled_bytes(codes[1].asm["cubin"]) == 0, one.kernel


@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_equal_fp8_conversions_stay_whole(format, sm):
    """Of one column most elements are provably 0; ptxas merges equal FP8 conversions with an undefined register."""
    one = Configuration("rows", format, shape=(1, 1), layout="linear")
    sass = check.compile_launch(one.launches(sm)[-1], sm).sass
    merged = re.findall(r"F2FP\.SATFINITE\.E[45]M[23]\.\w+\.\w+_MERGE_C (R\d+), [^;]*?(\w+)(?:\.reuse)? ;", sass.text)
    # Those of two bf16 numbers are merged one with the other. (Of scales, and of float32 numbers, none is.)
    made = {"RZ"} if "BF16.UNPACK_B_MERGE_C" not in sass.text else {"RZ", *(into for into, _ in merged)}
    assert merged and {other for _, other in merged} <= made


TRANSFORMED = {"dim": (COLUMNS,), "hadamard": True}
TRAINED = {"dim": BOTH, "hadamard": True, "seeded": True}


def compiled(format, sm, kernel="quantize", **options):
    """(PTX, machine code) of a configuration's kernel of this name, and how many elements a thread has."""
    one = Configuration("", format, layout="linear", **options)
    (launched,) = (launch for launch in one.launches(sm) if launch.kernel.__name__.startswith(kernel))
    made = check.compile_launch(launched, sm)
    elements = launched.args["x_ptr"].numel() // (launched.grid * launched.num_warps * 32)
    return made.compiled.asm["ptx"], made.sass.text, elements


@pytest.mark.parametrize("options", [{"seeded": True}, TRAINED], ids=["rows", "both"])
def test_a_call_of_philox_rounds_sixteen_elements(options):
    """Each of its seven rounds has two products. In both directions there are twice as many elements."""
    ptx, sass, elements = compiled("nvfp4_te", 100, **options)
    calls = elements // 16 * (2 if options is TRAINED else 1)
    assert len(re.findall(r"mul\.wide\.u32 [^;]*, 0x(?:D2511F53|CD9E8D57)", ptx)) == 14 * calls
    assert len(re.findall(r"F2FP\.SATFINITE\.E2M1\.F32\.\S*RS ", sass)) == 8 * calls  # two for four elements


@pytest.mark.parametrize("sm", [90, 100])
def test_two_products_an_instruction_on_sm100(sm):
    """Of the elements of NVFP4."""
    _, sass, elements = compiled("nvfp4", sm)
    assert len(re.findall(r"\bFFMA2\b", sass)) == (elements // 2 if sm == 100 else 0)


@triton.jit
def _reciprocal(x_ptr):
    tl.store(x_ptr, block_scales.reciprocal(tl.load(x_ptr), 100))


@pytest.mark.parametrize("sm", TARGETS)
def test_the_reciprocal_that_ptxas_makes(sm):
    """`quick_scales` has its steps without its test of the range: an estimate, its error, a correction."""
    made = _compat.compile_ahead(_reciprocal, {"x_ptr": torch.empty(1, device="meta")}, {}, 1, sm)
    sass = disassemble(made.asm["cubin"]).text
    steps = re.search(
        r"MUFU\.RCP (?P<y>R\d+), (?P<x>R\d+).*?FFMA (?P<e>R\d+), (?:(?P=x)|(?P=y)).*?, (?:(?P=x)|(?P=y)).*?, -1 .*?"
        r"FADD\.FTZ (?P<f>R\d+), -(?P=e)\S*, -RZ .*?FFMA \S+ (?P=y)\S*, (?P=f)\S*, (?P=y)", sass, re.DOTALL,
    )  # fmt: skip
    assert steps and len(re.findall(r"\bFFMA\b", sass[: steps.end()])) == 2


@pytest.mark.parametrize("sm", [90, 100])
def test_quarters_are_not_fused_into_the_sums_of_a_transform(sm):
    """A float32 number below 2^-123 may have no quarter: a sum with a product that is not rounded would differ.

    Of sixteen values there are sixteen quarters, and four times as many sums.
    """
    one = Configuration("", "nvfp4_te", dtype=torch.float32, **TRANSFORMED)
    launched = one.launches(sm)[0]
    ptx = check.compile_launch(launched, sm).compiled.asm["ptx"]
    counts = [len(re.findall(pattern, ptx)) for pattern in (r"\bfma\.rn\.f32", r"\b(?:add|sub)(?:\.rn)?\.f32")]
    assert launched.kernel.__name__ == "columns_amax" and counts[0] and counts[1] == 4 * counts[0]


@cache
def rows_and_columns(format, steps=()):
    """The launch of `quantize_both` for compute capability 9.0, with the steps of a prologue, compiled."""
    both = Configuration("both", format, dim=BOTH, steps=steps)
    (launched,) = (one for one in both.launches(90) if one.kernel.__name__ == "quantize_both")
    return check.compile_launch(launched, 90)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_rows_and_columns_at_once_leave_registers_for_other_programs(format):
    """Warps that a multiprocessor holds, by its 65536 registers: while some wait for memory, others work."""
    made = rows_and_columns(format)
    warps = made.resources.programs * made.launched.num_warps
    assert warps >= (12 if NEW_PTXAS and made.launched.num_warps == 4 else 16)


@pytest.mark.parametrize(("format", "steps", "operations", "accesses"), [
    ("mxfp4", (), 1713, 8), ("mxfp8", (), 1906, 10), ("mxfp8", GATE, 2027, 11), ("mxfp8", NORM, 2089, 12),
])  # fmt: skip
def test_rows_and_columns_at_once_compile_from_few_operations(format, steps, operations, accesses):
    """This quantiser takes the longest to compile: for each load and store, Triton's coalescing pass follows all
    operations from all operations."""
    code = rows_and_columns(format, steps).compiled.asm["ttir"]
    assert len(re.findall(r"(?m)^ .*\b(?:tt|arith|scf|math)\.\w+", code)) <= operations
    assert len(re.findall(r"\btt\.(?:load|store)\b", code)) <= accesses


@pytest.mark.parametrize("sm", [90, 100])
def test_a_small_tensor_is_read_before_its_amax_is_awaited(sm):
    """The kernel of the amax lets the next one start at once; that one waits only when it has begun to read."""
    small = Configuration("rows", "nvfp4", shape=(16, 4096), layout="linear")
    amax, quantise = (check.compile_launch(one, sm).sass.text for one in small.launches(sm))
    assert amax.index("PREEXIT") < amax.index("LDG")
    before, after = quantise.split("ACQBULK")
    assert "LDG" in before and "STG" not in before
    assert "LDG" in after  # the maxima


def test_every_shipped_product_on_sm90():
    """Of NVFP4 weights and up to 64 rows, by kernels of their own: nothing spills, shared memory suffices. Of the
    representatives."""
    products = [one for one in representatives(90)[1] if one.b == "nvfp4" and one.m <= 64 and not one.epilogue]
    rows = list(check.check_products(90, products))
    assert not [row.problems for row in rows if row.problems]
    kernels = set()
    for product in products:
        (kernel,) = {
            row.kernel
            for row in rows
            if row.configuration == product.label and row.format == product.formats and row.line != BESIDE
        }
        expected = "gemv" if product.m <= 2 else "gemm_skinny" if product.m <= 8 else "gemm_wgmma_sm90"
        assert kernel == expected, product.label
        kernels.add(kernel)
    assert kernels == {"gemv", "gemm_skinny", "gemm_wgmma_sm90"}


BESIDE = "beside a product"


@pytest.mark.parametrize("sm", [sm for sm in TARGETS if sm in (100, 120)])
def test_every_shipped_product(sm):
    """Scales by tcgen05.cp, operands by TMA, loops that overlap, 16-byte stores; nothing spills, everything fits. Of
    the representatives."""
    rows = list(check.check_products(sm, representatives(sm)[1]))
    assert rows and not {(row.kernel, row.configuration, row.format): row.problems for row in rows if row.problems}
    # FP8 blocks are MXFP8 for these kernels.
    native = {"mxfp8 x mxfp8" if "te_pow2" in row.format else row.format for row in rows
              if row.line.startswith("block-scaled")}  # fmt: skip
    assert native >= {"nvfp4 x nvfp4", "mxfp4 x mxfp4", "mxfp8 x mxfp8", "mxfp8 x mxfp4"}


@pytest.mark.parametrize(("product", "width"), [
    # Threads store them: TMA stores only rows of multiples of 16 bytes, here 4088, and only a single matrix.
    (MatmulCase("nvfp4", "nvfp4", n=8176, result="nvfp4_one_level"), 8),
    (MatmulCase("nvfp4", "nvfp4", n=8184, batches=4), 16),
], ids=lambda value: getattr(value, "label", value))  # fmt: skip
def test_threads_store_as_many_bytes_at_once_as_divide_a_row(product, width):
    """Triton only knows of an argument whether it is a multiple of 16; 4088 bytes and 8184 results are multiples of 8.

    The kernel shows that to Triton; else a thread would store one byte, or one result, at a time.
    """
    (row,) = check.check_products(100, (product,))
    assert (row.kernel, row.stores, row.problems) == ("gemm_block_scaled_sm100", width, ())


@pytest.mark.skipif(not NEW_PTXAS, reason="this ptxas does not know all conversions of sm_120")
@pytest.mark.parametrize(("format", "count"), [("nvfp4", 2), ("mxfp8", 1)])
def test_every_configuration_of_sm120_fits(format, count):
    """Also where the result has four bytes an element: no spills, and a program in 99 KB of shared memory."""
    product = MatmulCase(format, format)
    x = product.arguments()
    x = Arguments.of(x.a, x.b, None, torch.float32)
    problem = problem_of(x, Target(120))
    configs = block_scaled_configs(problem)
    assert len(configs) == count
    for config in configs:
        with dry_run(Target(120)) as launches:
            multiply(x, replace(choose(problem), config=config))
        row = check.product_row(product, "native", launches[0], 120)
        assert not row.problems and row.resources.shared <= 99 * 1024
        assert row.resources.programs == (2 if config.num_warps == 4 else 1)


@pytest.mark.parametrize("sm", (90, 100))
def test_tensors_of_one_element_compile(sm):
    """Triton makes a Python int of a size that is 1."""
    with dry_run(Target(sm)) as launches:
        quantize_kernels(torch.empty(1, 1, device="meta", dtype=torch.bfloat16), "nvfp4")
    assert len(launches) == 2
    for launch in launches:
        check.compile_launch(launch, sm)
