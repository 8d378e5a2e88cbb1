"""What is added to a product: a bias of one element a column in the kernel's epilogue, everything else after it."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile import formats, reference
from fp4compile.passes.find import Input, find
from fp4compile.passes.plan import plan
from fp4compile.passes.rewrite import rewrite
from fp4compile.targets import Target
from fp4compile.templates.gemm import dispatch as kernels
from fp4compile.templates.gemm.problem import problem_of
from fp4compile.templates.launch import dry_run
from tests.helpers.absent_gpu import launched_on, recipe_of

SCALED_MM = torch.ops.fp4compile.scaled_mm.default
M, N, K = 6, 48, 64
SHAPES = [(N,), (1,), (), (1, N), (M, 1), (M, N), (1, 1)]


def rewritten(x, w, bias, recipe):
    """The graph of addmm, quantised."""
    inputs = (Input(), Input("weight"), Input())
    graph_module = make_fx(lambda x, w, b: torch.addmm(b, x, w.t()), tracing_mode="fake")(x, w, bias)
    for index, placeholder in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        placeholder.meta["desc"] = SimpleNamespace(idx=index)  # as AOTAutograd has it
    rewrite(graph_module.graph, plan(find(graph_module.graph, inputs), recipe_of(recipe), inputs))
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", ["nvfp4", "mixed", "nvfp4_rowwise"])
def test_what_is_broadcast_is_added_after_the_product(recipe, shape, dtype):
    """In float32, rounded once: the same numbers as in the epilogue."""
    x, w, bias = (torch.randn(shape).to(dtype) for shape in ((M, K), (N, K), shape))
    graph_module = rewritten(x, w, bias, recipe)
    (product,) = graph_module.graph.find_nodes(op="call_function", target=SCALED_MM)
    added = product.args[8]
    assert (added is not None) == (shape == (N,)) and (added is None or added.meta["val"].shape == (N,))
    a, b = map(formats.get, (recipe_of(recipe).fprop_x, recipe_of(recipe).fprop_w))
    operands = (*reference.quantize(x, a), a, *reference.quantize(w, b), b)
    expected = (reference.scaled_mm(*operands, None, torch.float32) + bias.float()).to(dtype)
    assert torch.equal(graph_module(x, w, bias), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sm", [90, 100])
def test_every_bias_is_lowered_for_a_gpu(sm, shape):
    _, launches = launched_on(sm, "nvfp4", (M, N, K), lambda x, w: torch.addmm(x.new_zeros(shape), x, w.t()))
    products = [name for name, _ in launches if name.startswith("gem")]
    assert products == ["gemm_block_scaled_sm100" if sm == 100 else "gemm_skinny"]


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("bias", [
    *(torch.ones(shape) for shape in (*SHAPES[1:], (N + 1,))),
    torch.ones(N, dtype=torch.int64), torch.ones(N, dtype=torch.float64),
], ids=lambda b: f"{tuple(b.shape)} {b.dtype}")  # fmt: skip
def test_the_op_broadcasts_nothing(bias, fake):
    """On the CPU and while tracing, as on CUDA."""
    fmt = formats.get("nvfp4")
    a, b = (reference.quantize(torch.randn(rows, K), fmt) for rows in (M, N))
    args = (*a, "nvfp4", *b, "nvfp4", bias, torch.float32)
    if fake:
        mode = FakeTensorMode()
        args = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    with pytest.raises(ValueError, match=rf"bias: expected floating point of shape \({N},\), got {bias.dtype}"):
        torch.ops.fp4compile.scaled_mm(*args)


# ---------------------------------------------------------------- which kernels, on paper


def operands(a, b, m, n, k, device="meta"):
    """Arguments of `scaled_mm` but bias and dtype, as the reference quantises random numbers (on meta: none)."""
    with dry_run(Target(0)):
        made = []
        for name, rows in ((a, m), (b, n)):
            x, fmt = torch.randn(rows, k), formats.get(name)
            made += [*(t if t is None else t.to(device) for t in reference.quantize(x, fmt)), fmt]
    return made


@pytest.mark.parametrize(("sm", "bias", "out_dtype", "by_library"), [
    (90, torch.bfloat16, torch.bfloat16, True), (90, None, torch.bfloat16, True),
    (90, torch.float32, torch.bfloat16, False), (90, torch.float16, torch.bfloat16, False),
    (90, torch.float32, torch.float32, False), (89, torch.bfloat16, torch.bfloat16, True),
    (89, torch.float32, torch.bfloat16, False), (86, torch.bfloat16, torch.bfloat16, False),
])  # fmt: skip
def test_the_fp8_units_take_a_bias_of_the_results_type(sm, bias, out_dtype, by_library):
    """The library's product of rows of FP8 has no other; the units are there from 8.9 on."""
    bias = None if bias is None else torch.empty(N, dtype=bias, device="meta")
    with dry_run(Target(sm)):
        problem = problem_of(*operands("float8_rowwise", "float8_rowwise", M, N, K), bias, out_dtype)
        assert (kernels._server(problem, False) is kernels._scaled_by_row) == by_library


def test_fp8_units_and_conversions_by_compute_capability():
    assert [sm for sm in (75, 80, 86, 87, 89, 90, 100, 120) if Target(sm).float8_matrix_units] == [89, 90, 100, 120]
    assert [Target(sm).isa for sm in (0, 80, 86, 89, 90, 100, 103, 120)] == [0, 0, 0, 90, 90, 100, 100, 120]


@pytest.mark.parametrize(("a", "b"), [("nvfp4", "nvfp4"), ("nvfp4_rowwise", "nvfp4_16x16"), ("nvfp4_one_level",) * 2])
def test_a_bias_is_cut_where_the_product_is(a, b):
    """A part of the columns has that part of the bias; a part of the rows has all of it."""
    bias = torch.arange(320.0)
    with dry_run(Target(90)):
        problem = problem_of(*operands(a, b, 256, 320, 32, "cpu"), bias, torch.float32)
        for start, count in ((0, 128), (128, 128), (256, 64)):
            part = problem.columns(start, count)
            assert part.n == count and part.bias.tolist() == list(range(start, start + count))
        assert problem.rows(128, 128).bias.tolist() == bias.tolist()


def test_each_launch_of_a_product_in_parts_has_its_part_of_the_bias():
    """Of activations that are expanded already, the columns are cut."""
    n = 8192
    values, bias = torch.empty(n, 512, dtype=torch.float16, device="meta"), torch.empty(n, device="meta")
    *weights, fmt = operands("nvfp4", "nvfp4", 16, n, 512)[4:]
    with dry_run(Target(90)) as launches:
        kernels.scaled_mm(values, None, None, None, *weights, fmt, bias, torch.float32)
    cut = [one.args["bias_ptr"] for one in launches if one.kernel.__name__ == "split_k_reduction"]
    assert len(cut) > 1 and sum(part.numel() for part in cut) == n
    starts = [sum(part.numel() for part in cut[:i]) for i in range(len(cut))]
    assert [part.storage_offset() for part in cut] == starts
