"""What goes to cuBLASLt, that torch and cuBLASLt take it, and what comes out where a CPU can tell."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fp4compile
from fp4compile.formats import formats, reference
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM_OPAQUE
from fp4compile.recipe import named
from fp4compile.templates import choose
from fp4compile.templates.gemm import library
from fp4compile.templates.launch import cuda_target, dry_run
from fp4compile.templates.multiply import call_of, multiply
from tests.helpers.choices import only, without
from tests.helpers.graphs import Recorder
from tests.helpers.library_checks import V1, V2, Calls, Refused, calls_of, check
from tests.helpers.multiplied import scaled_mm

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def empty_operand(name, rows, k, outer=None):
    """An operand as SM100 quantises it, without values, on `torch.get_default_device()`.

    outer: of which shape the global scale is, where not the format's own.
    """
    fmt = formats.get(name)
    blocks = ceil_div(k, fmt.block_cols)
    elements = blocks * fmt.block_cols
    data = torch.empty(rows, elements // 2 if fmt.packed else elements, dtype=fmt.data_dtype)
    scales = None
    if fmt.scale is not None:
        scales = torch.empty(swizzled_numel(rows, blocks), dtype=fmt.scale_dtype)
    shapes = {None: None, "tensor": (), "row": (rows, 1)}
    shape = shapes[fmt.outer if outer is None else outer if outer != "none" else None]
    return Operand(data, scales, None if shape is None else torch.empty(shape), fmt)


def product(m, n, k, a, b=None, bias=None, outers=(None, None)):
    """Operands and bias of a product."""
    operands = empty_operand(a, m, k, outers[0]), empty_operand(b or a, n, k, outers[1])
    return *operands, None if bias is None else torch.empty(n, dtype=bias)


def sent(m, n, k, a, b=None, bias=None, outers=(None, None), out_dtype=BF16, sm=100):
    """The names of the library's ops that compute the product; their arguments have passed all checks."""
    found = calls_of(*product(m, n, k, a, b, bias, outers), out_dtype, sm)
    for op, arguments in found:
        check(op, arguments, sm)
    return [op for op, _ in found]


FORMATS = [
    ("nvfp4", None, V2), ("nvfp4_one_level", None, V1), ("mxfp8", None, V1), ("mxfp8", "mxfp8_32x32", V1),
    ("nvfp4_te", "nvfp4_16x16", V2), ("nvfp4", "nvfp4_one_level", V2), ("nvfp4_one_level", "nvfp4", V2),
]  # fmt: skip
RESULTS = [(None, BF16), (None, F16), (None, F32), (BF16, BF16), (F16, F16)]
SIZES = [(16, 32), (512, 1024), (1040, 96), (4096, 14336), (14336, 4096)]


@pytest.mark.parametrize(("a", "b", "op"), FORMATS, ids=lambda value: str(value))
def test_what_the_router_sends_is_taken(a, b, op, monkeypatch):
    """For numbers of rows of A next to those of whole tiles; each size, bias and dtype. (Mixed formats: a size each.)

    The kernel for few rows ranks before the library; `max-autotune` may prefer the library nevertheless.
    """
    without(monkeypatch, "skinny_block_scaled_sm100")
    with torch.device("meta"):
        for m in (*range(1, 35), 63, 64, 65, *range(126, 131), *range(255, 301, 9)):
            for n, k in SIZES if b is None else [SIZES[m % len(SIZES)]]:
                assert sent(m, n, k, a, b) == [op]
        for m, (n, k), (bias, out_dtype) in itertools.product((1, 127, 300), SIZES, RESULTS):
            assert sent(m, n, k, a, b, bias, out_dtype=out_dtype) == [op]


@pytest.mark.parametrize(("a", "b", "op"), FORMATS, ids=lambda value: str(value))
def test_torchs_own_fakes_take_it(a, b, op, monkeypatch):
    """They check the arguments of CUDA tensors, too."""
    without(monkeypatch, "skinny_block_scaled_sm100")
    with FakeTensorMode(), torch.device("cuda"):
        for m, (n, k) in zip((1, 15, 128, 129, 300), SIZES, strict=True):
            assert sent(m, n, k, a, b) == [op]


NOT_SENT = {
    "a float32 bias": {"bias": F32}, "a bias of another type": {"bias": F16},
    "a float32 result with a bias": {"bias": F32, "out_dtype": F32},
    "N of no whole 16 columns": {"n": 520}, "rows of no whole 16 bytes": {"k": 1040},
    "row scales of A": {"outers": ("row", None)}, "row scales of B": {"outers": (None, "row")},
    "no rows": {"m": 0}, "consumer GPUs": {"sm": 120},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SENT)
def test_what_is_not_sent(name):
    given = {"m": 256, "n": 512, "k": 1024, "a": "nvfp4", **NOT_SENT[name]}
    with torch.device("meta"):
        assert sent(**given) == []


@pytest.mark.parametrize(("a", "b"), [("mxfp4", "mxfp4"), ("mxfp8", "mxfp4"), ("mxfp8_e5m2", "mxfp8"),
                                      ("nvfp4_rowwise", "nvfp4_rowwise"), ("nvfp4_rowwise", "nvfp4")])  # fmt: skip
def test_formats_that_are_not_sent(a, b):
    with torch.device("meta"):
        assert sent(256, 512, 1024, a, b) == []


def test_an_outer_scale_of_mxfp8_is_not_sent():
    """The library has a factor for NVFP4 alone."""
    with torch.device("meta"):
        assert sent(256, 512, 1024, "mxfp8", outers=("tensor", "none")) == []


def test_batches_are_not_sent():
    with torch.device("meta"):
        a, b, _ = product(256, 512, 1024, "nvfp4")
        both = [replace(x, data=x.data.expand(2, -1, -1), scales=x.scales.expand(2, -1)) for x in (a, b)]
        assert calls_of(*both, None, BF16) == []


BREAKS = {
    "N": ({"n": 520}, "% 16"), "K": ({"k": 1040}, "% 16"), "bias": ({"bias": F32}, "a bias of torch.float32"),
    "result": ({"bias": F32, "out_dtype": F32}, "a bias with a float32 result"),
    "formats": ({"a": "mxfp4"}, "no recipe"),
    "mixed": ({"a": "mxfp8", "b": "mxfp4"}, "shapes"), "outer": ({"outers": ("row", None)}, "global scale of a"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_router_that_sends_everything_is_found_out(name, monkeypatch):
    """The checks refuse what the router keeps back: they can fail."""
    changes, message = BREAKS[name]
    only(monkeypatch, "library_block_scaled")
    given = {"m": 256, "n": 512, "k": 1024, "a": "nvfp4", "bias": None, "out_dtype": BF16, **changes}
    out_dtype = given.pop("out_dtype")
    with torch.device("meta"), pytest.raises(Refused, match=message):
        for op, arguments in calls_of(*product(**given), out_dtype, torchs_fakes=False):
            check(op, arguments)


def test_a_bias_that_is_not_aligned_is_copied():
    with torch.device("meta"):
        a, b, _ = product(256, 512, 1024, "nvfp4")
        for op, arguments in calls_of(a, b, torch.empty(520, dtype=BF16)[1:513], BF16):
            check(op, arguments)


def test_one_outer_scale_of_two():
    """torch takes two or none; both stay on the device."""
    with torch.device("meta"):
        for a, b in (("nvfp4", "nvfp4_one_level"), ("nvfp4_one_level", "nvfp4")):
            ((_, arguments),) = calls_of(*product(256, 512, 1024, a, b), BF16)
            assert all(arguments[f"scale_{side}"][1].device.type == "meta" for side in "ab")


# ---------------------------------------------------------------- float8_rowwise

ROWWISE = [(89, "library_row_scaled"), (90, "library_row_scaled"), (100, "library_row_scaled"),
           (103, "library_rescaled"), (120, "library_rescaled"), (80, "dequant_operand")]  # fmt: skip


@pytest.mark.parametrize(("sm", "kernel"), ROWWISE)
def test_who_computes_float8_rowwise(sm, kernel):
    """On 10.3 and 12.0 nothing reaches the CUTLASS kernel: tensor-wise scales go to cuBLASLt."""
    with torch.device("meta"):
        operands = product(72, 512, 1024, "float8_rowwise", bias=BF16)
        with dry_run(Target(sm)):
            assert choose.choose(call_of(Arguments.of(*operands, BF16)).problem).kernel == kernel
        for op, arguments in calls_of(*operands, BF16, sm):
            check(op, arguments, sm)
            assert (op, arguments["scale_a"].numel() == 1) == (V1, kernel == "library_rescaled")


def test_a_router_that_sends_row_scales_to_sm103_is_found_out(monkeypatch):
    only(monkeypatch, "library_row_scaled")
    with torch.device("meta"):
        ((op, arguments),) = calls_of(*product(40, 512, 1024, "float8_rowwise"), BF16, 103)
        with pytest.raises(Refused, match="CUTLASS"):
            check(op, arguments, 103)


@pytest.mark.parametrize("bias", [None, BF16, F32])
@pytest.mark.parametrize("out_dtype", [BF16, F16, F32])
def test_the_sums_rescaled(bias, out_dtype, monkeypatch):
    """`library_rescaled` is the reference, up to the order of its sums; a CPU has the same op."""
    torch.manual_seed(0)
    fmt = formats.get("float8_rowwise")
    a, b = (Operand(*reference.quantize(torch.randn(rows, 256), fmt), fmt) for rows in (24, 48))
    bias = None if bias is None else torch.randn(48).to(bias)
    only(monkeypatch, "library_rescaled")
    with dry_run(Target(103)):
        got = scaled_mm(a, b, bias, out_dtype)
    expected = reference.scaled_mm(a, b, bias, out_dtype)
    assert got.dtype == out_dtype
    torch.testing.assert_close(got, expected, rtol=torch.finfo(out_dtype).eps, atol=2.0**-16)


# ---------------------------------------------------------------- the op


@pytest.mark.parametrize("name", ["nvfp4", "float8_rowwise"])
def test_the_op_on_a_cpu_is_the_reference(name):
    fmt = formats.get(name)
    a, b = (Operand(*reference.quantize(torch.randn(rows, 64), fmt, None, "swizzled"), fmt) for rows in (5, 16))
    arguments, bias = Arguments.of(a, b, torch.randn(16, dtype=BF16)).call
    (got,) = SCALED_MM_OPAQUE(*arguments, "library", **bias)
    assert torch.equal(got, torch.ops.fp4compile.scaled_mm(*arguments, **bias))
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(SCALED_MM_OPAQUE, (*arguments, "library"), bias, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0), reason="needs Hopper")
def test_torch_takes_the_arguments_and_cublaslt_refuses_the_gpu():
    """On a GPU without block-scaled matrix units: what fails is cuBLASLt, behind all of torch's checks."""
    fmt = formats.get("nvfp4")
    a, b = (Operand(*(t.cuda() for t in reference.quantize(torch.randn(rows, 256), fmt, None, "swizzled")), fmt)
            for rows in (40, 64))  # fmt: skip
    for bias in (None, torch.randn(64, device="cuda", dtype=BF16)):
        with pytest.raises(RuntimeError, match="CUBLAS_STATUS"):
            library.two_level(a, b, bias, BF16)
    with pytest.raises(ValueError, match="scale_a should have"):
        library.two_level(replace(a, scales=a.scales[:-1]), b, None, BF16)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (10, 0), reason="needs SM100")
@pytest.mark.parametrize("bias", [None, BF16])
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_two_level_on_sm100(rows, bias):
    """Against the reference, and in a CUDA graph that is replayed with other global scales."""
    fmt = formats.get("nvfp4")
    cpu = [Operand(*reference.quantize(torch.randn(size, 256), fmt, None, "swizzled"), fmt) for size in (rows, 64)]
    a, b = (Operand(*(t.cuda() for t in (x.data, x.scales, x.outer)), fmt) for x in cpu)
    bias = None if bias is None else torch.randn(64, dtype=bias)
    on_gpu = None if bias is None else bias.cuda()
    torch.testing.assert_close(
        library.two_level(a, b, on_gpu, BF16).cpu(), reference.scaled_mm(*cpu, bias, BF16), rtol=2.0**-8, atol=1e-2
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = library.two_level(a, b, on_gpu, BF16)
    a.outer.mul_(2)
    graph.replay()
    doubled = replace(cpu[0], outer=2 * cpu[0].outer)
    expected = reference.scaled_mm(doubled, cpu[1], bias, BF16)
    torch.testing.assert_close(out.cpu(), expected, rtol=2.0**-8, atol=1e-2)


@pytest.mark.gpu
def test_the_sums_rescaled_on_a_gpu(monkeypatch):
    """The kernel of 10.3 on the GPU that is here, against the row-wise one; both sum as the FP8 matrix units do."""
    fmt = formats.get("float8_rowwise")
    x, w = torch.randn(300, 512, device="cuda"), torch.randn(256, 512, device="cuda")
    made = (torch.ops.fp4compile.quantize(t, fmt.name) for t in (x, w))
    a, b = (Operand(data, None, outer, fmt) for data, _, outer in made)
    bias = torch.randn(256, device="cuda", dtype=BF16)
    expected = scaled_mm(a, b, bias, BF16)
    only(monkeypatch, "library_rescaled")
    torch.testing.assert_close(scaled_mm(a, b, bias, BF16), expected, rtol=2.0**-7, atol=2e-3)


@pytest.mark.parametrize("sm", [90, 103])
def test_sums_of_fewer_bits_only_where_the_recipe_allows_them(sm):
    """By the products whose operands are float8_rowwise, and of these by the recipe's alone; with a bias, too."""
    recipe = named("float8_rowwise").replace(fast_accumulation=("fprop", "wgrad"))
    layer = torch.nn.Linear(64, 96)
    recorder = Recorder()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=recorder):
        torch.compile(layer, backend=fp4compile.backend(recipe))(
            torch.randn(32, 64, requires_grad=True)
        ).sum().backward()
    assert [graph.count(", fast accumulation ->") for graph in recorder.graphs] == [1, 1]  # of 1, and of 2
    with FakeTensorMode(), torch.device("cuda"):
        a, b, bias = product(256, 512, 1024, "float8_rowwise")
        for fast in (False, True):
            with dry_run(Target(sm)), Calls(False) as calls:
                multiply(Arguments.of(a, b, bias, BF16, fast_accumulation=fast))
            assert [arguments["use_fast_accum"] for _, arguments in calls.found] == [fast]


@pytest.mark.gpu
def test_sums_of_fewer_bits_are_close():
    if not 90 <= cuda_target(0).sm <= 100:
        pytest.skip("needs SM90 or SM100")
    fmt = formats.get("float8_rowwise")
    a, b = (Operand(*reference.quantize(torch.randn(rows, 4096, dtype=BF16), fmt), fmt) for rows in (256, 512))
    exact = reference.scaled_mm(a, b, None, F32)
    a, b = (Operand(x.data.cuda(), None, x.outer.cuda(), fmt) for x in (a, b))
    products = (multiply(Arguments.of(a, b, None, BF16, fast_accumulation=fast)) for fast in (False, True))
    errors = [(got.cpu().float() - exact).norm() / exact.norm() for got in products]
    assert errors[0] < 3e-3 and errors[1] < 1e-2  # rounding to bf16 alone: 1.7e-3
