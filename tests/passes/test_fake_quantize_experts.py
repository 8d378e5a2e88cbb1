"""Which quantises of experts return values in the place of codes, what is launched then, and that no value changes."""

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fp4compile
from fp4compile.analysis.gemm import Input
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import quantise_of, scaled_mm_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.fake_quantize import fake_quantize
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.templates.launch import dry_run
from tests.helpers.absent_gpu import rewritten_by, symbolic
from tests.helpers.arguments import times

ops = torch.ops.fp4compile
BF16 = torch.bfloat16
M, G, N, K = 600, 2, 48, 64  # 300 tokens an expert
BACKWARD = ("dgrad", "wgrad")
SHAPES = {"x": (M, K), "w": (G, N, K), "dy": (M, N)}


def scaled(quantised, fmt, first=0):
    """The operand that three of the results are."""
    data, scales, outer = quantised[first : first + 3]
    return data, scales if scales.numel() else None, outer if outer.numel() else None, fmt


def product(a, b, offs, x):
    return times(a, b, offs=offs, rows=x.shape[0])


def forward(fmt="nvfp4", quantize=None, **options):
    """The forward product; quantize: of the weights."""

    def function(x, w, dy, offs):
        weights = ops.quantize(w, fmt, each_matrix=True) if quantize is None else quantize(w, fmt)
        return product(scaled(ops.quantize(x, fmt, offs=offs, **options), fmt), scaled(weights, fmt), offs, x)

    return function


def saved_columns(x, w, dy, offs):
    """A forward graph that saves codes for the weight gradient."""
    both = ops.quantize(x, "nvfp4_te", [-1, -2], offs=offs, hadamard=True)
    weights = ops.quantize(w, "nvfp4_16x16", each_matrix=True)
    return product(scaled(both, "nvfp4_te"), scaled(weights, "nvfp4_16x16"), offs, x), *both[3:]


def backward(fmt="nvfp4", weights=None, **options):
    """Both gradients; the activation's codes are there."""

    def function(x, w, dy, offs):
        saved = ops.quantize(x, fmt, -2, offs=offs, hadamard=options.get("hadamard", False))
        if "seeded" in options:
            seed = torch.ones((), dtype=torch.int64, device=x.device)
            both = ops.quantize(dy, fmt, [-1, -2], offs=offs, seed=seed, hadamard=True)
        else:
            both = ops.quantize(dy, fmt, [-1, -2], offs=offs)
        apart = fmt != "nvfp4" and fmt != "mxfp8"
        down = scaled((*both[3:5], both[5] if apart else both[2]), fmt)
        other = weights or fmt
        dx = product(scaled(both, fmt), scaled(ops.quantize(w, other, -2, each_matrix=True), other), offs, x)
        return dx, product(down, scaled(saved, fmt), offs, x), saved[0]

    return function


def rows_kept(x, w, dy, offs):
    both, saved = ops.quantize(dy, "mxfp8", [-1, -2], offs=offs), ops.quantize(x, "mxfp8", -2, offs=offs)
    return product(scaled(both, "mxfp8", 3), scaled(saved, "mxfp8"), offs, x), both[0], both[1], saved[1]


def given(x, w, dy, offs):
    outer = torch.full((), 0.01, device=x.device)
    a = (*ops.quantize(x, "nvfp4", offs=offs, outer=outer)[:2], outer, "nvfp4")
    return product(a, (*ops.quantize(w, "nvfp4", outer=outer)[:2], outer, "nvfp4"), offs, x)


def outer_kept(x, w, dy, offs):
    a, b = ops.quantize(x, "nvfp4", offs=offs), ops.quantize(w, "nvfp4", each_matrix=True)
    return product(scaled(a, "nvfp4"), scaled(b, "nvfp4"), offs, x), a[2] * 2


def codes_kept(x, w, dy, offs):
    a, b = ops.quantize(x, "nvfp4", offs=offs), ops.quantize(w, "nvfp4", each_matrix=True)
    return product(scaled(a, "nvfp4"), scaled(b, "nvfp4"), offs, x), a[0], b[1]


def others_scales(x, w, dy, offs):
    a, other = ops.quantize(x, "nvfp4", offs=offs), ops.quantize(x + 1, "nvfp4", offs=offs)
    b = ops.quantize(w, "nvfp4", each_matrix=True)
    return product((a[0], other[1], a[2], "nvfp4"), scaled(b, "nvfp4"), offs, x), b[0]


def both_operands(x, w, dy, offs):
    a = scaled(ops.quantize(x, "nvfp4", -2, offs=offs), "nvfp4")
    return product(a, a, offs, x)


def weight_only(x, w, dy, offs):
    return product((x, None, None, None), scaled(ops.quantize(w, "nvfp4", each_matrix=True), "nvfp4"), offs, x)


def swept(w, fmt):
    return ops.quantize(w, fmt, each_matrix=True, scale_rule="mse")


CASES = {  # (function, how many become values of one dimension, of both)
    "forward": (forward(), 1, 0), "te": (forward("nvfp4_te"), 1, 0), "rowwise": (forward("nvfp4_rowwise"), 1, 0),
    "mx": (forward("mxfp8", ops.quantize), 2, 0), "mxfp4": (forward("mxfp4"), 2, 0), "given": (given, 1, 0),
    "outer kept": (outer_kept, 1, 0), "saved columns": (saved_columns, 0, 1), "backward": (backward(), 1, 1),
    "backward mx": (backward("mxfp8"), 1, 1),
    "trained": (backward("nvfp4_te", "nvfp4_16x16", hadamard=True, seeded=True), 1, 1), "rows kept": (rows_kept, 0, 1),
    "swept": (forward(quantize=swept), 1, 0), "swizzled": (forward(layout="swizzled"), 0, 0),
    "codes kept": (codes_kept, 0, 0), "others' scales": (others_scales, 0, 0), "both operands": (both_operands, 0, 0),
    "weight-only": (weight_only, 0, 0), "float8": (forward("float8_rowwise", ops.quantize), 0, 0),
}  # fmt: skip


def traced(function, rows=M, dtype=BF16):
    """The graph on fake CUDA tensors. rows: None for any number."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, dry_run(Target(90)):
        if rows is None:
            rows = symbolic(mode.shape_env, M)
        shapes = {name: (rows, *shape[1:]) if shape[0] == M else shape for name, shape in SHAPES.items()}
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes.values()]
        return make_fx(function)(*tensors, torch.empty(G, dtype=torch.int32, device="cuda"))


def replaced(module, sm=90):
    """How many quantises have become values of one dimension, and of two."""
    with dry_run(Target(sm)):
        count = fake_quantize(module.graph)
    module.graph.lint()
    module.recompile()
    quantisers = map(quantise_of, module.graph.find_nodes(op="call_function", target=QUANTIZE))
    directions = [len(each.dims) for each in quantisers if each.values]
    assert len(directions) == count
    return directions.count(1), directions.count(2)


def kernels(module):
    """The kernels of the products."""
    with dry_run(Target(90)):
        products = map(scaled_mm_of, module.graph.find_nodes(op="call_function", target=SCALED_MM))
        return [product.choice.kernel for product in products]


def on_the_cpu(module):
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cpu"))
    module.recompile()
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(BF16) for shape in SHAPES.values()]
    return torch.utils._pytree.tree_leaves(module(*tensors, torch.tensor([170, 590], dtype=torch.int32)))


@pytest.mark.parametrize("name", CASES)
def test_which_ones(name):
    """By the reference, the graph computes the bits that it did before; the kernels are those of before as well."""
    function, *counts = CASES[name]
    module = traced(function)
    expected, before = on_the_cpu(module), kernels(module)
    assert replaced(module) == tuple(counts) and kernels(module) == before
    for got, right in zip(on_the_cpu(module), expected, strict=True):
        assert got.dtype == right.dtype and torch.equal(got.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize(("rows", "sm", "dtype", "mx", "nvfp4"), [
    (M, 80, BF16, 2, 2), (M, 100, BF16, 0, 0), (M, 120, BF16, 0, 0), (4, 90, BF16, 0, 1), (256, 90, BF16, 0, 1),
    (257, 90, BF16, 2, 1), (None, 90, BF16, 0, 1), (M, 90, torch.float16, 2, 1), (M, 90, torch.float32, 0, 1),
    (2**20, 90, BF16, 2, 1),
])  # fmt: skip
def test_where(rows, sm, dtype, mx, nvfp4):
    """What kernels dequantise in memory, for every number of rows; 16 bits hold no MX values of float32."""
    assert replaced(traced(forward("mxfp8", ops.quantize), rows, dtype), sm) == (mx, 0)
    assert replaced(traced(forward("nvfp4"), rows, dtype), sm) == (nvfp4, 0)


def launches_of(function):
    """The launches that a graph is lowered to."""
    module = traced(function)
    replaced(module)
    mode = next(iter(module.graph.nodes)).meta["val"].fake_mode
    with mode, enable_python_dispatcher(), dry_run(Target(90)) as found:
        lower(module.graph)
    return found


def launched(function):
    """Names of the launches that a graph is lowered to."""
    return [one.kernel.__name__ for one in launches_of(function)]


def test_launches_of_gradients():
    """Of the operands, codes that were saved alone are dequantised."""
    found = launches_of(backward("mxfp8"))
    launches = [one.kernel.__name__ for one in found]
    assert launches.count("dequant_operand") == 1 and launches.count("gemm_grouped") == 2
    assert launches.count("gemm_dequant_tiles") == 1  # of the saved codes, should their scales be too small
    groups = [one.constants["GROUPS"] for one in found if one.kernel.__name__ == "quantize_columns"]
    assert groups == [G, G, 0]  # tokens, their gradients, and each matrix of the weight


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "nvfp4_train"])
def test_launches_of_a_recipe(recipe):
    inputs = (Input(), Input("w"), Input())
    with FakeTensorMode(), dry_run(Target(90)) as launches:
        x, w = (torch.empty(shape, device="cuda", dtype=BF16) for shape in ((4096, 512), (4, 1024, 512)))
        offs = torch.empty(4, device="cuda", dtype=torch.int32)
        graph = make_fx(lambda x, w, offs: F.grouped_mm(x, w.mT, offs=offs))(x, w, offs).graph
        rewritten_by(recipe, graph, inputs)
        merge_quantize(graph)
        both = recipe == "mxfp8"  # the kernel for NVFP4 weights reads their codes
        assert fake_quantize(graph) == 1 + both
        lower(graph)
    names = [one.kernel.__name__ for one in launches]
    assert names[-1] == ("gemm_grouped" if both else "gemm_wgmma_sm90") and "dequant_operand" not in names
    stored = [one.args["data_ptr"].dtype for one in launches if one.kernel.__name__.startswith("quantize")]
    assert set(stored) == ({torch.bfloat16} if both else {torch.float16, torch.uint8})


def test_errors():
    x, offs = torch.randn(8, 32), torch.tensor([8], dtype=torch.int32)
    with pytest.raises(ValueError, match="format: 16 bits hold"):
        ops.quantize(x, "mxfp8", offs=offs, values=[-1])
    with pytest.raises(ValueError, match="format: 16 bits hold"):
        ops.quantize(x.bfloat16(), "float8_rowwise", [-1, -2], offs=offs, values=[-1, -2])
    with pytest.raises(ValueError, match="values: expected some of"):
        ops.quantize(x.bfloat16(), "mxfp8", [-1, -2], offs=offs, values=[0])


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "nvfp4_train"])
def test_compiled(recipe, monkeypatch):
    """The bits of quantise, dequantise and multiply one after the other, forward and backward; uneven groups."""
    weight = torch.nn.Parameter(torch.randn(4, 256, 512, device="cuda", dtype=BF16))
    x, dy = (torch.randn(1200, n, device="cuda", dtype=BF16) for n in (512, 256))
    offs = torch.tensor([0, 700, 711, 1190], device="cuda", dtype=torch.int32)

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x, offs):
            return F.grouped_mm(x, self.weight.mT, offs=offs)

    def run():
        torch._dynamo.reset()
        backend = fp4compile.backend(recipe, strict=True)
        tokens = x.clone().requires_grad_()
        torch.manual_seed(0)  # of stochastic rounding
        y = torch.compile(Experts(), backend=backend)(tokens, offs)
        found = y, *torch.autograd.grad(y, (tokens, weight), dy)
        return found, backend.report.counts.get("fake_quantize")

    got, count = run()
    assert count == (4 if recipe == "mxfp8" else 2)  # weights of NVFP4 stay codes
    monkeypatch.setattr(fp4compile.config, "disabled_passes", ("fake_quantize",))
    with torch._inductor.config.patch(force_disable_caches=True):
        expected, count = run()
    assert count is None, "a pass that is switched off has no count"
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
