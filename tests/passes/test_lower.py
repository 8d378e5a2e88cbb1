"""Lowering: on a GPU the generated wrapper launches the kernels; elsewhere it calls the ops."""

from unittest.mock import Mock

import pytest
import torch
import triton
import triton.language as tl
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.runtime import driver

import fp4compile
from fp4compile import _inductor_patches
from fp4compile.analysis.find import Input
from fp4compile.analysis.plan import NO_POWERS_OF_TWO
from fp4compile.check.products import PRODUCTS as PRODUCTS_OF_GATE
from fp4compile.check.products import MatmulCase
from fp4compile.check.quantisers import ALL_CONFIGURATIONS, GATE, MORE_CONFIGURATIONS, RMS_NORM, Configuration
from fp4compile.formats import formats
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.ops.define import KERNELS
from fp4compile.passes.lib import traces
from fp4compile.passes.lower import lower
from fp4compile.recipe import named
from fp4compile.templates import scale_sweep
from fp4compile.templates.launch import dry_run
from fp4compile.templates.multiply import multiply_together
from tests.helpers.absent_gpu import NoGpu, launched_on, rewritten_by
from tests.helpers.by_hand import assert_product
from tests.helpers.multiplied import scaled_grouped_mm, scaled_mm
from tests.helpers.quantisers import quantize, quantize_both

PRODUCTS = [("nvfp4", 7, "def gemm_skinny("), ("nvfp4_weight_only", 1, "def gemv("),
            ("nvfp4", 40, "def gemm_wgmma_sm90("), ("nvfp4", 130, "def gemm_wgmma_sm90("),
            ("mxfp8", 130, "def gemm_dequant_tiles("), ("float8_rowwise", 40, "def gemm_float8_tiles("),
            ("float8_rowwise", 130, "_scaled_mm")]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "rows", "launched"), PRODUCTS)
def test_products_are_launched_from_the_wrapper(recipe, rows, launched):
    layer = torch.nn.Linear(512, 528, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        compiled = torch.compile(layer, backend=fp4compile.backend(recipe, strict=True))
        got, (code,) = run_and_get_code(compiled, x.cuda())
    assert launched in code
    assert ".scaled_mm.default(" not in code
    assert_product(got, x, layer, named(recipe))


@pytest.mark.gpu
def test_weights_changed_between_replays_of_a_cuda_graph():
    layer = torch.nn.Linear(64, 64, device="cuda")
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4"), mode="reduce-overhead")
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        for factor in (1.0, -2.0, 0.5):
            layer.weight.mul_(factor)
            for _ in range(3):
                y = compiled(x).clone()
            w, xq = (fp4compile.quantize(t.cpu(), "nvfp4").dequantize() for t in (layer.weight, x))
            torch.testing.assert_close(y.cpu(), xq @ w.t() + layer.bias.cpu(), rtol=1e-5, atol=1e-5)


def test_the_cpu_keeps_the_ops():
    layer = torch.nn.Linear(64, 48)
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4", strict=True))
    _, (code,) = run_and_get_code(compiled, torch.randn(8, 64, requires_grad=True))
    assert "fp4compile.quantize.default" in code and "fp4compile.scaled_mm.default" in code


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_rowwise", "nvfp4_train", "mxfp8", "mxfp8_32x32", "mxfp4"])
def test_block_scaled_matrix_units_get_swizzled_scales(recipe):
    """On SM100 every operand is quantised with swizzled scales, for the block-scaled kernel or the library's."""
    tier, launches = launched_on(100, recipe)
    assert tier == "native"
    assert launches[-1][0] in ("gemm_block_scaled_sm100", "_scaled_mm", "library")
    quantised = [swizzled for kernel, swizzled in launches if kernel.startswith("quantize")]
    assert len(quantised) == 2 and all(quantised)


POWERS, SQUARES = "e4m3:1x128:float32:-:te_pow2", "e4m3:128x128:float32:-:te_pow2"


def test_blocks_whose_scales_are_powers_of_two():
    """Two launches convert their scales before the library's matmul; others are emulated, and a note says why."""
    recipe = named("float8_block").replace(fprop_x=POWERS, fprop_w=SQUARES)
    tier, launches = launched_on(100, recipe)
    assert tier == "native" and [name for name, _ in launches if not name.startswith("quantize")] == [
        "lay_out_scales", "lay_out_scales", "_scaled_mm"
    ]  # fmt: skip
    for sm, other, note in ((100, "float8_block", True), (100, "mxfp8", False), (90, "float8_block", False)):
        with FakeTensorMode(), dry_run(Target(sm)):
            x, w = (torch.empty(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            graph = make_fx(lambda x, w: x @ w.t())(x, w).graph
            (decision,) = rewritten_by(other, graph, (Input(), Input("weight")))
        assert decision.note == (NO_POWERS_OF_TWO if note else None)


def with_bias(dtype, bias_dtype=None):
    return lambda x, w: torch.addmm(x.new_zeros(w.shape[0], dtype=bias_dtype or dtype), x, w.t())


WHOLE = (256, 512, 1024)
BLOCK_SCALED = [
    ("nvfp4_one_level", WHOLE, {}, "_scaled_mm"), ("nvfp4_one_level", (1, 512, 256), {}, "_scaled_mm"),
    ("mxfp8", WHOLE, {}, "_scaled_mm"), ("mxfp8", (7, 512, 96), {}, "_scaled_mm"),
    ("mxfp8_32x32", WHOLE, {}, "_scaled_mm"), ("mxfp8_floor", WHOLE, {}, "_scaled_mm"),
    ("mxfp8", WHOLE, {"function": with_bias(torch.bfloat16)}, "_scaled_mm"),
    ("mxfp8", WHOLE, {"dtype": torch.float32}, "_scaled_mm"), ("mxfp8", WHOLE, {"dtype": torch.float16}, "_scaled_mm"),
    # Outer scales of whole tensors are the library's, those of rows are not.
    ("nvfp4", WHOLE, {}, "library"), ("nvfp4", (65, 512, 1024), {}, "library"), ("nvfp4_train", WHOLE, {}, "library"),
    ("nvfp4", WHOLE, {"function": with_bias(torch.bfloat16)}, "library"),
    ("nvfp4_rowwise", WHOLE, {}, "gemm_block_scaled_sm100"),
    # What the library does not take: formats, rows that are no whole 16 bytes (an odd K is padded), bias in float32.
    ("mxfp4", WHOLE, {}, "gemm_block_scaled_sm100"), ("mixed", WHOLE, {}, "gemm_block_scaled_sm100"),
    ("e5m2", WHOLE, {}, "gemm_block_scaled_sm100"),
    ("nvfp4_one_level", (256, 520, 1024), {}, "gemm_block_scaled_sm100"),
    ("mxfp8", (256, 520, 1024), {}, "gemm_block_scaled_sm100"),
    ("nvfp4_one_level", (256, 512, 1040), {}, "gemm_block_scaled_sm100"),
    ("nvfp4", (256, 520, 1024), {}, "gemm_block_scaled_sm100"),
    ("nvfp4", (256, 512, 1040), {}, "gemm_block_scaled_sm100"),
    ("nvfp4", WHOLE, {"function": with_bias(torch.float32), "dtype": torch.float32}, "gemm_block_scaled_sm100"),
    ("nvfp4_one_level", (256, 512, 1017), {}, "_scaled_mm"), ("mxfp8", (256, 512, 1001), {}, "_scaled_mm"),
    ("mxfp8", WHOLE, {"function": with_bias(torch.float32), "dtype": torch.float32}, "gemm_block_scaled_sm100"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "shape", "options", "expected"), BLOCK_SCALED)
def test_library_or_kernel_on_sm100(recipe, shape, options, expected):
    """The library where it does all of the product in one call, and what torch checks of its arguments holds."""
    _, launches = launched_on(100, recipe, shape, **options)
    assert launches[-1][0] == expected
    kernels = "gemm_block_scaled_sm100", "_scaled_mm", "library", "gemm_dequant_tiles"
    assert [name for name, _ in launches if name in kernels] == [expected]


@pytest.mark.parametrize(("sm", "recipe", "expected"), [
    (90, "nvfp4", "emulated"), (100, "nvfp4_weight_only", "emulated"), (90, "float8_rowwise", "native"),
    (80, "float8_rowwise", "emulated")])  # fmt: skip
def test_who_computes_other_products(sm, recipe, expected):
    tier, launches = launched_on(sm, recipe)
    assert tier == expected
    assert "gemm_block_scaled_sm100" not in dict(launches)
    assert not any(swizzled for _, swizzled in launches)


def quantizes(x):
    data, scales, outer = torch.ops.fp4compile.quantize(x, "nvfp4")
    values = torch.ops.fp4compile.dequantize(data, scales, outer, "nvfp4", x.shape[-1], torch.bfloat16)
    columns = torch.ops.fp4compile.quantize(x, "mxfp8", 0, layout="swizzled")
    rows = torch.ops.fp4compile.quantize(x, "nvfp4_rowwise")
    return data, scales, outer, values, *columns[:2], *rows, *torch.ops.fp4compile.quantize(x, "mxfp4", [-1, -2])[:4]


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_every_kernel_gives_the_bits_of_the_op(dynamic):
    counts = []

    def backend(graph_module, inputs):
        patches = {"post_grad_custom_pre_pass": lambda graph: counts.append(lower(graph)), "fx_graph_cache": False}
        return compile_fx(graph_module, inputs, config_patches=patches)

    compiled = torch.compile(quantizes, backend=backend, dynamic=dynamic)
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    got, (code,) = run_and_get_code(compiled, x)
    for y, results in [(x, got), *([(x[:37], compiled(x[:37]))] if dynamic else [])]:
        for one, other in zip(results, quantizes(y), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    assert counts == [5]
    on_chip = ["quantize_whole_rows"] * (not dynamic)  # rows of any length are read twice
    for kernel in ("quantize_rows", "tensor_amax", *on_chip, "quantize_columns", "dequantize_rows"):
        assert f"def {kernel}(" in code


def launches():
    """One of every kernel, in each of the ways that change what it writes: which tensors of which dtypes it has, and
    which of its constants are zero, none or empty."""
    x = torch.empty(256, 512, dtype=torch.bfloat16, device="meta")
    seed = torch.empty((), dtype=torch.int64, device="meta")
    with dry_run(Target(90)) as found:
        for name in ("nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16", "mxfp8", "float8_rowwise"):
            fmt = formats.get(name)
            quantize(x, fmt)
            quantize(x.mT, fmt)
            if fmt.outer != "row":
                quantize_both(x, fmt)
            if fmt.scale == "e4m3" and not fmt.square:
                quantize(x, fmt, values=True)
        for name, steps in (("nvfp4_one_level", GATE), ("nvfp4_rowwise", GATE), ("float8_rowwise", RMS_NORM)):
            found += Configuration("", name, shape=(256, 512), steps=steps).launches(90)
        found += Configuration("", "mxfp8", (-1, -2), shape=(256, 512), steps=GATE).launches(90)
        offs, weights = torch.empty(3, dtype=torch.int32, device="meta"), x.new_empty(3, 128, 512)
        for name in ("nvfp4_te", "nvfp4_rowwise"):
            fmt = formats.get(name)

            def operand(x, offs, dim=-1, fmt=fmt):
                groups = {"each_matrix": True} if offs is None else {"offs": offs}
                return Operand(*quantize(x, fmt, dim=dim, hadamard=dim == -2, **groups), fmt)

            columns = operand(x, offs, -2)
            quantize_both(x, fmt, seed=seed, hadamard=name == "nvfp4_te", offs=offs)
            for rows in (256, 48):
                scaled_grouped_mm(operand(x[:rows], offs), operand(weights, None), offs, rows, torch.bfloat16)
            scaled_grouped_mm(columns, columns, offs, 256, torch.bfloat16)
        mxfp8 = formats.get("mxfp8")
        scaled_grouped_mm(Operand(x), Operand(*quantize(weights, mxfp8), mxfp8), offs, 256, torch.bfloat16)
        te = formats.get("nvfp4_te")
        quantize_both(x.new_empty(256, 1), te)  # rows a stride of one apart
        quantize_both(x, te, seed=seed, hadamard=True)
        for m in (1, 4, 40, 256):
            for name in ("nvfp4", "mxfp8"):
                fmt = formats.get(name)
                operands = []
                for rows in (m, 128):
                    data, scales, outer = torch.ops.fp4compile.quantize(x[:1].expand(rows, -1), name)
                    operands.append(Operand(data, scales, outer if fmt.outer else None, fmt))
                scaled_mm(*operands, None, torch.bfloat16)
        data, scales, outer = torch.ops.fp4compile.quantize(x.new_empty(256, 4096), "nvfp4")
        weight = Operand(data, scales, outer, formats.get("nvfp4"))
        scaled_mm(Operand(x.new_empty(40, 4096)), weight, None, torch.bfloat16)
        for weights in (2, 3):
            data, scales, outer = torch.ops.fp4compile.quantize(x, "nvfp4_te")
            one = Arguments.of(Operand(x[:1]), Operand(data, scales, outer, te), x[0, :256])
            multiply_together([one] * weights)
        for fmt in (te, formats.get("nvfp4_16x16")):
            scale_sweep.quantize(x, fmt, None, "swizzled", "mse")
    ways = [tuple(bool(value) for value in one.constants.values()) for one in found]
    return {(one.kernel.__name__, way, str(dtypes_of(one))): one for one, way in zip(found, ways, strict=True)}.values()


def dtypes_of(launch):
    return {name: value.dtype for name, value in launch.args.items() if isinstance(value, torch.Tensor)}


def lowered(function, *shapes, sm=90):
    """(launches, graph) of a function of fake bfloat16 tensors, lowered for a GPU that need not be there."""
    with FakeTensorMode(), dry_run(Target(sm)) as launches:
        values = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        graph = make_fx(function)(*values).graph
        lower(graph)
    return launches, graph


def test_slices_that_begin_elsewhere_have_traces_of_their_own():
    """A kernel loads as many bytes at once as divide the address: slices of one shape and one stride may differ."""

    def slices(x):
        pieces = [torch.ops.aten.slice.Tensor(x, 1, start, start + 64) for start in (0, 2, 64, 4)]
        return [torch.ops.fp4compile.quantize(piece, "mxfp8")[0] for piece in pieces]

    launches, _ = lowered(slices, (32, 256))
    assert [one.constants["ALIGN"] for one in launches] == [4, 1, 2]  # those that begin at 0 and 64 share one


def test_tensors_that_lie_otherwise_have_traces_of_their_own():
    def rows_and_columns(x, y):
        return [torch.ops.fp4compile.quantize(t, "mxfp8")[0] for t in (x, torch.ops.aten.t.default(y))]

    launches, _ = lowered(rows_and_columns, (64, 64), (64, 64))
    assert [one.kernel.__name__ for one in launches] == ["quantize_rows", "quantize_columns"]


def test_a_trace_of_one_tensor_twice_is_none_of_two():
    """A product of a tensor with itself has one tensor in both places; one with another has two, of the same looks."""

    def products(x, y, z):
        quantised = {t: (*torch.ops.fp4compile.quantize(t, "mxfp8")[:2], None) for t in (x, y, z)}
        pairs = ((x, x), (x, y), (y, z), (z, z))
        scaled_mm, spec = torch.ops.fp4compile.scaled_mm, "mxfp8 @ mxfp8 -> bfloat16"
        return [scaled_mm(*quantised[a], *quantised[b], spec) for a, b in pairs]

    launches, _ = lowered(products, (64, 128), (64, 128), (64, 128))
    assert [one.kernel.__name__ for one in launches].count("gemm_dequant_tiles") == 2


@pytest.mark.parametrize("layers", [16, 48])
def test_layers_share_traces_whatever_their_places_among_the_seeds(layers, monkeypatch):
    """One tensor has the seeds of all layers. Places of one alignment share a trace, and there are five alignments."""
    fwd_only = Mock(side_effect=traces.fwd_only)
    monkeypatch.setattr(traces, "fwd_only", fwd_only)

    def seeded(x):
        seeds = torch.ops.aten.new_zeros.default(x, (layers,), dtype=torch.int64)
        each = [torch.ops.aten.select.int(seeds, 0, layer) for layer in range(layers)]
        return [torch.ops.fp4compile.quantize(x, "nvfp4", seed=seed)[0] for seed in each]

    lowered(seeded, (64, 256))
    assert fwd_only.call_count == 5


def test_swept_weights_are_lowered_to_the_sweep():
    """Where a weight is quantised at every call; its scales lie as the product reads them."""
    for sm, tier, swizzled in ((90, "emulated", False), (100, "native", True)):
        found, launches = launched_on(sm, "swept")
        assert found == tier and ("sweep_scales", swizzled) in launches


def analysed(kernel, arguments, constants):
    """What torch finds that a kernel writes, whatever the kernel says; names of arguments."""
    for name in ("identify_mutated_tensors", "identify_accessed_tensors"):
        identify = getattr(triton_kernel_wrap, name, None)
        if identify is not None:
            found = getattr(identify, "__wrapped__", identify)(kernel, arguments | constants, {})
    return set(found) if isinstance(found, list) else {dependency.name for dependency in found.read_writes.writes}


# Constants that may decide what a kernel writes.
TRAITS = ("EPILOGUE", "GROUP_SIZE", "COUNT", "GROUPS", "A_CODES", "SCALE", "OUTER", "AMAX", "OF", "PARTIAL", "SWIZZLED",
          "ALONG_ROWS", "ALONG_COLUMNS", "ALONG_K", "TRANSFORM", "SQUARE", "CODES", "PAIR")  # fmt: skip


def test_kernels_write_what_they_say(monkeypatch):
    """By launches of the tables of `check`, and values in the place of codes; of each trait."""
    said = set()
    few = [MatmulCase(a, "float8_128x128", 32, kernel="float8_" + kind) for a, kind in (
        ("float8_1x128", "tiles"), (None, "weight_tiles"),
    )]  # fmt: skip
    for sm in (80, 90, 100, 120):
        monkeypatch.setattr(driver, "_active", NoGpu(sm))
        made = [launch for product in (*PRODUCTS_OF_GATE, *few) for launch in product.launches(sm)[1]]
        if sm in (90, 100):
            made += [launch for one in (*ALL_CONFIGURATIONS, *MORE_CONFIGURATIONS) for launch in one.launches(sm)]
        for launch in [*made, *(launches() if sm == 90 else ())]:
            kernel, dtypes = launch.kernel, dtypes_of(launch)
            traits = [str(launch.constants.get(name)) for name in TRAITS]
            absent = tuple(name for name, value in launch.args.items() if value is None)
            gpu = sm if kernel.__name__.startswith("gem") else kernel.__name__ == "quantize_columns" and sm >= 100
            key = kernel.__name__, str(traits), absent, str(dtypes.get("data_ptr")), str(dtypes.get("columns_ptr"))
            if (gpu, *key) not in said and not kernel.is_gluon():  # Gluon's kernels run behind an op
                arguments = {k: torch.empty(16, dtype=dtypes[k]) if k in dtypes else v for k, v in launch.args.items()}
                found = analysed(kernel, arguments, launch.constants)
                assert kernel.written(arguments | launch.constants) == found, key
                said.add((gpu, *key))
    assert {name for _, name, *_ in said} == {
        "gemv", "gemm_skinny", "gemm_skinny_block_scaled_sm100", "gemm_wgmma_sm90", "split_k_reduction", "gemm_grouped",
        "gemm_dequant_tiles", "gemm_float8_tiles", "gemm_block_scaled_sm100", "dequant_operand", "write_table",
        "swizzle_a_sm90", "swizzle_codes_sm90", "lay_out_scales", "tensor_amax", "columns_amax", "row_statistics",
        "quantize_rows", "quantize_whole_rows", "quantize_columns", "quantize_squares", "quantize_both",
        "dequantize_rows", "sweep_scales",
    }  # fmt: skip


def test_inductor_knows_what_every_kernel_writes(monkeypatch, caplog):
    """Where its analysis of a kernel fails it takes all arguments for written, copies them, and may not order them."""
    monkeypatch.setattr(driver, "_active", NoGpu(90))
    kernels, fake_quantised = set(), 0
    for launch in launches():
        dtypes = dtypes_of(launch)
        arguments = {k: torch.empty(16, dtype=dtypes[k]) if k in dtypes else v for k, v in launch.args.items()}
        constants = kernel_side_table.add_constant_args(launch.constants)
        kernel = kernel_side_table.add_kernel(launch.kernel)
        written = set(get_mutated_tensors(kernel, constants, arguments, {}))
        if launch.kernel.__name__ not in kernels:  # and no number changes it
            ones = {name: 1 if isinstance(value, int) else value for name, value in arguments.items()}
            assert set(get_mutated_tensors(kernel, constants, ones, {})) == written, launch.kernel.__name__
        read = {"x_ptr", "operand_1_ptr", "a_ptr", "b_ptr", "seed_ptr", "sums_ptr", "offs_ptr"}
        assert written and not written & read, launch.kernel.__name__
        if launch.kernel.__name__ in ("swizzle_a_sm90", "swizzle_codes_sm90", "gemm_wgmma_sm90"):
            assert written == {"out_ptr" if launch.kernel.__name__ == "gemm_wgmma_sm90" else "swizzled_a_ptr"}
        if launch.kernel.__name__ in ("gemv", "gemm_skinny"):
            outs = ["out_ptr", "out_1_ptr", "out_2_ptr"]
            table = {"table_ptr"} if launch.constants.get("COUNT") else set()  # of experts
            assert written == table | set(outs[: launch.constants["GROUP_SIZE"]])
        if launch.kernel.__name__ == "sweep_scales":
            assert written == {"data_ptr", "scales_ptr"}
        if dtypes.get("data_ptr") == torch.float16:
            fake_quantised += 1
            assert written == {"data_ptr", "outer_ptr"}
        kernels.add(launch.kernel.__name__)
    assert kernels >= {"sweep_scales", "columns_amax", "quantize_columns", "quantize_rows", "quantize_squares", "gemv",
                       "gemm_skinny", "swizzle_a_sm90", "swizzle_codes_sm90", "gemm_wgmma_sm90", "split_k_reduction",
                       "gemm_dequant_tiles", "tensor_amax", "gemm_grouped"}  # fmt: skip
    assert fake_quantised == 2
    assert "assuming every input is mutated" not in caplog.text


def test_inductor_knows_what_products_of_sm100_write(monkeypatch, caplog):
    """Results, amaxes, sums of parts, and tables of tiles; for each kernel and each end of its epilogue."""
    monkeypatch.setattr(driver, "_active", NoGpu(100))
    found = {}
    for product in PRODUCTS_OF_GATE:
        for launch in product.launches(100)[1]:
            name, text = launch.kernel.__name__, launch.constants.get("EPILOGUE", "")
            of_groups = launch.constants.get("GROUPS", 0) > 0
            of_skinny = launch.constants.get("GROUP_SIZE", 1), launch.constants.get("COUNT", 0) > 0
            key = name, of_groups, of_skinny, launch.constants.get("PAIR"), "amax" in text, text.count(" | ")
            if key not in found and launch.num_ctas == 1:
                kernel = kernel_side_table.add_kernel(launch.kernel)
                constants, arguments = kernel_side_table.add_constant_args(launch.constants), dict(launch.args)
                found[key] = set(get_mutated_tensors(kernel, constants, arguments, {}))
    native = {("gemm_block_scaled_sm100", False), ("gemm_block_scaled_sm100", True)}
    assert {key[:2] for key in found} >= native | {("gemm_skinny_block_scaled_sm100", False)}
    for key, written in found.items():
        name, of_groups, (products, of_experts), _, amax, parts = key
        results = {*("out_ptr", "out_1_ptr", "out_2_ptr")[:products]}
        results |= {"out_scales_ptr"} if amax or parts == 3 else set()
        table = {"table_ptr"} if of_experts or (of_groups and name.endswith("_sm100")) else set()
        assert written == results | table, key
    assert "assuming every input is mutated" not in caplog.text


@triton.jit
def loaded(x_ptr):
    return tl.load(x_ptr)


@triton.jit
def store_at_what_is_read(x_ptr, y_ptr):
    """Torch counts x as written: the address in y depends on what a function returns for it."""
    tl.store(y_ptr + loaded(x_ptr), 1)


def test_an_op_stays_where_an_input_counts_as_written(monkeypatch):
    """It is computed outside of Inductor's code, and a warning says why. Inputs may be views."""
    monkeypatch.setattr(driver, "_active", NoGpu(90))
    op = torch.ops.fp4compile.lay_out_scales

    def kernels(scales, offs=None):
        found = scales.new_empty(512)
        torch.library.wrap_triton(store_at_what_is_read)[(1,)](scales.view(torch.int32), found)
        return found

    monkeypatch.setitem(KERNELS, op.default, kernels)
    with pytest.warns(UserWarning, match="torch counts x_ptr of store_at_what_is_read as written"):
        _, graph = lowered(lambda x: op(x.view(torch.uint8)), (128, 4))
    assert [node.target for node in graph.nodes if node.op == "call_function"][-1] is op.default


def test_torch_asks_kernels_what_they_write(monkeypatch):
    """It compiles none to find it out."""
    made = []
    to_functions = triton_kernel_wrap.ttir_to_functions
    monkeypatch.setattr(triton_kernel_wrap, "ttir_to_functions", lambda ttir: made.append(ttir) or to_functions(ttir))
    monkeypatch.setattr(driver, "_active", NoGpu(90))
    _inductor_patches.declare_writes()

    def written(dtype, dim):
        x = torch.empty(1024, 512, dtype=dtype, device="meta")
        with dry_run(Target(90)) as found:
            quantize(x, formats.get("mxfp8"), dim=dim, layout="swizzled")
        (launch,) = found
        arguments = {k: torch.empty(2, dtype=v.dtype) if isinstance(v, torch.Tensor) else v
                     for k, v in launch.args.items()}  # fmt: skip
        constants = kernel_side_table.add_constant_args(launch.constants)
        tuned = triton.autotune([triton.Config({}, num_warps=4)], key=[])(launch.kernel)  # as torch does
        return sorted(get_mutated_tensors(kernel_side_table.add_kernel(tuned), constants, arguments, {}))

    for dtype in (torch.bfloat16, torch.float32):
        assert written(dtype, -2) == ["column_scales_ptr", "columns_ptr"]
        assert written(dtype, -1) == ["data_ptr", "scales_ptr"]
    assert not made
