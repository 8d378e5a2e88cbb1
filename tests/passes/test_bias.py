"""The term added to a product: a bias with one element a column; a product with any other term is not quantised."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.analysis.gemm import Input
from fp4compile.formats import formats, reference
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.launch import dry_run
from fp4compile.templates.problem import problem_of
from tests.helpers.absent_gpu import rewritten_by

SCALED_MM = torch.ops.fp4compile.scaled_mm.default
M, N, K = 6, 48, 64
SHAPES = [(N,), (1,), (), (1, N), (M, 1), (M, N), (1, 1)]


def rewritten(x, w, bias, recipe):
    """The rewritten graph of an addmm."""
    inputs = (Input(), Input("weight"), Input())
    graph_module = make_fx(lambda x, w, b: torch.addmm(b, x, w.t()), tracing_mode="fake")(x, w, bias)
    rewritten_by(recipe, graph_module.graph, inputs)
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_a_bias_is_added_by_the_quantised_product(shape):
    x, w, term = (torch.randn(shape) for shape in ((M, K), (N, K), shape))
    graph_module = rewritten(x, w, term, "nvfp4")
    products = graph_module.graph.find_nodes(op="call_function", target=SCALED_MM)
    assert [product.kwargs["bias"].meta["val"].shape for product in products] == ([(N,)] if shape == (N,) else [])
    assert shape == (N,) or torch.equal(graph_module(x, w, term), torch.addmm(term, x, w.t()))


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("bias", [
    *(torch.ones(shape) for shape in (*SHAPES[1:], (N + 1,))),
    torch.ones(N, dtype=torch.int64), torch.ones(N, dtype=torch.float64),
], ids=lambda b: f"{tuple(b.shape)} {b.dtype}")  # fmt: skip
def test_the_op_broadcasts_nothing(bias, fake):
    """The CPU and the fake implementation refuse a bias that CUDA refuses."""
    fmt = formats.get("nvfp4")
    a, b = (reference.quantize(torch.randn(rows, K), fmt) for rows in (M, N))
    args = (*a, *b, bias)
    if fake:
        args = map(FakeTensorMode().from_tensor, args)
    *operands, bias = args
    with pytest.raises(ValueError, match=rf"bias: expected floating point of shape \({N},\), got {bias.dtype}"):
        torch.ops.fp4compile.scaled_mm(*operands, "nvfp4 @ nvfp4 -> float32", bias=bias)


# ---------------------------------------------------------------- the kernels chosen for a GPU that need not be there


def operands(a, b, m, n, k, device="meta"):
    """Arguments of `scaled_mm` up to the bias: random numbers, quantised by the reference and moved to `device`."""
    with dry_run(Target(0)):
        made = []
        for name, rows in ((a, m), (b, n)):
            x, fmt = torch.randn(rows, k), formats.get(name)
            made.append(Operand(*(t if t is None else t.to(device) for t in reference.quantize(x, fmt)), fmt))
    return made


@pytest.mark.parametrize(("sm", "bias", "out_dtype", "by_library"), [
    (90, torch.bfloat16, torch.bfloat16, True), (90, None, torch.bfloat16, True),
    (90, torch.float32, torch.bfloat16, False), (90, torch.float16, torch.bfloat16, False),
    (90, torch.float32, torch.float32, False), (89, torch.bfloat16, torch.bfloat16, True),
    (89, torch.float32, torch.bfloat16, False), (86, torch.bfloat16, torch.bfloat16, False),
])  # fmt: skip
def test_the_fp8_units_take_a_bias_of_the_results_type(sm, bias, out_dtype, by_library):
    """The library takes only a bias of the result's dtype. FP8 matrix units exist from compute capability 8.9 on."""
    bias = None if bias is None else torch.empty(N, dtype=bias, device="meta")
    with dry_run(Target(sm)):
        problem = problem_of(
            Arguments.of(*operands("float8_rowwise", "float8_rowwise", 512, N, K), bias, out_dtype), Target(sm)
        )
        assert (choose(problem).kernel == "library_row_scaled") == by_library


def test_fp8_units_and_conversions_by_compute_capability():
    assert [sm for sm in (75, 80, 86, 87, 89, 90, 100, 120) if Target(sm).float8_matrix_units] == [89, 90, 100, 120]
    assert [Target(sm).isa for sm in (0, 80, 86, 89, 90, 100, 103, 120)] == [0, 0, 0, 90, 90, 100, 100, 120]
