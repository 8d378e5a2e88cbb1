"""Which products quantise their results, and what the graphs are then."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config

from fp4compile.check.products import MatmulCase
from fp4compile.formats.epilogue import Epilogue
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM_RESULTS
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.fuse_quantize import fuse_quantize
from fp4compile.passes.lower import lower
from fp4compile.recipe.named_recipes import FIELDS
from fp4compile.templates.choose import Choice, quantized
from fp4compile.templates.problem import problem_of
from tests.helpers.absent_gpu import ANY, fused_graph
from tests.helpers.absent_gpu_model import DEVICE, compiled_for, pretended
from tests.helpers.quantising_products import graph_of

ONE_LEVEL = "nvfp4_one_level @ nvfp4_one_level -> bfloat16"
X, W, V = (256, 512), (1024, 512), (512, 1024)


def mlp(x, w, v):
    return F.linear(F.relu(F.linear(x, w)), v)


def phi_mlp(x, w, w_down):
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.linear(up * F.silu(gate), w_down)


def test_snapshot_of_a_phi_mlp():
    """Gate and up are one product, of whose two halves its kernel makes one result."""
    shapes = (2, 128, 512), (2048, 512), (512, 1024)
    found, names, count, launches = graph_of(phi_mlp, *shapes, recipe="nvfp4_one_level")
    assert count == 1 and "slice" not in found
    (line,) = (line for line in found.splitlines() if "scaled_mm_results" in line)
    assert line.endswith(
        f", {ONE_LEVEL} | neg product | exp s0 | add s1 1.0 | div product s2 | mul pair s3 | to bfloat16 |"
        " quantize nvfp4_one_level)"
    )
    assert list(names.values()) == ["neg, exp, add, div, mul, quantize"]
    assert launches == ["quantize_rows"] * 2 + ["gemm_block_scaled_sm100", "quantize_rows"]


class Mlp(torch.nn.Module):
    """An MLP with fake parameters of the current fake mode."""

    def __init__(self, inner):
        super().__init__()
        sizes = {"gate": (512, inner), "up": (512, inner), "down": (inner, 512)}
        for name, (columns, rows) in sizes.items():
            layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
            weight = torch.empty(rows, columns, device=DEVICE, dtype=torch.bfloat16)
            layer._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)
            setattr(self, name, layer)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(("recipe", "inner", "inputs", "fused", "up"), [
    ("mxfp4", 1024, 9 + 2, "quantize", False), ("mxfp4", 1000, 9, "quantize", True),
    ("nvfp4", 1024, 9 + 3, "amax", False),
], ids=["joined", "no whole tiles", "dynamic"])  # fmt: skip
def test_compiled_models(recipe, inner, inputs, fused, up, monkeypatch):
    """Through the backend: where the cache joins the weights of gate and up, one launch of both remains."""
    with pretended(monkeypatch, 100) as launches:
        model, x = Mlp(inner), torch.empty(256, 512, device=DEVICE, dtype=torch.bfloat16)
        found = compiled_for(monkeypatch, model, x, recipe, launches)
    rows = {row.module: row.fused for row in found.report.rows}
    assert rows["gate"] == f"silu, mul, {fused}"
    packed = [node for node in found.graphs[0].graph.find_nodes(op="placeholder") if node.name.startswith("packed")]
    assert len(packed) == inputs
    kernels = [one for one in found.launches if one.kernel.__name__ == "gemm_block_scaled_sm100"]
    last = "e2m1 " if fused == "quantize" else "| amax "
    assert [one.constants["PAIR"] for one in kernels if last in one.constants["EPILOGUE"]] == [int(not up)]
    # The input's quantiser, then the quantiser of a result whose amax the product's kernel has found.
    others = [name for one in found.launches if "gemm" not in (name := one.kernel.__name__)]
    assert others == {"quantize": ["quantize_rows"], "amax": ["tensor_amax", "quantize_rows", "quantize_rows"]}[fused]


@pytest.mark.parametrize(("recipe", "sm"), [*((recipe, 100) for recipe in FIELDS), ("nvfp4", 120)])
def test_every_recipe_compiles_an_mlp(recipe, sm, monkeypatch):
    """Weights of gate and up are joined, or left apart, in every format of the rows that both read."""
    with pretended(monkeypatch, sm) as launches:
        model, x = Mlp(1024), torch.empty(256, 512, device=DEVICE, dtype=torch.bfloat16)
        found = compiled_for(monkeypatch, model, x, recipe, launches)
    assert {row.module: row.reason for row in found.report.rows} == dict.fromkeys(("gate", "up", "down"))


def kept_and_viewed(x, w, v):
    y = F.relu(F.linear(x, w))
    return F.linear(y, v), y, F.linear(y.view(512, 512), v.view(1024, 512))


def test_snapshot_of_a_dynamic_outer_scale():
    """The product's kernel stores the activation and finds its amax, from which quantisers make the global scale."""
    found, names, count, launches = graph_of(kept_and_viewed, (2, 128, 512), W, V, recipe="nvfp4")
    assert count == 1
    of_result = [line.split(" = ")[1] for line in found.splitlines() if "amax" in line]
    assert of_result == [
        "fp4compile.scaled_mm_results(getitem, getitem_1, getitem_2, [getitem_3], [getitem_4], [getitem_5],"
        " nvfp4 @ nvfp4 -> bfloat16 | relu product | to bfloat16 | amax)",
        "fp4compile.quantize(view_2, nvfp4, [-1], layout=swizzled, amax=getitem_19)",
        "fp4compile.quantize(view_4, nvfp4, [-1], layout=swizzled, amax=getitem_19)",
    ]
    assert "reshape_default: bfloat16[2, 128, 1024]" in found.splitlines()[-1]
    assert list(names.values()) == ["relu, amax"]
    assert launches[launches.index("gemm_block_scaled_sm100") + 1] == "quantize_rows"


def test_a_static_outer_scale():
    """It is an operand of the product that quantises, in the graph and in the launch."""

    def function(x, w, outer):
        y = F.relu(F.linear(x, w))
        return torch.ops.fp4compile.quantize(y, "nvfp4", [-1], outer=outer, layout="swizzled")[:2]

    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32]
    result = fused_graph(function, X, W, (), recipe="nvfp4_one_level", dtypes=dtypes, fuse=False, then=both)
    launch = result.launches[-1]
    assert launch.constants["EPILOGUE"].endswith("| e2m1 e4m3 torchao 16 tensor bfloat16")
    assert launch.args["out_outer_ptr"].shape == () and launch.args["out_scales_ptr"].shape == (256 * 64,)


def both(graph):
    assert fuse_quantize(graph) == 1
    lower(graph)


FUSED = {
    "no activation": (lambda x, w, v: F.linear(F.linear(x, w), v), (X, W, V)),
    "activation": (mlp, (X, W, V)),
    "gelu": (lambda x, w, v: F.linear(F.gelu(F.linear(x, w)), v), (X, W, V)),
    "three dimensions": (mlp, ((2, 128, 512), W, V)),
    "partly filled blocks": (mlp, (X, (1000, 512), (512, 1000))),
    "any number of rows": (mlp, ((ANY, 512), W, V)),
    "few rows": (mlp, ((16, 512), W, V)),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    function, shapes = FUSED[name]
    recipe = "mxfp4" if name == "any number of rows" else "mxfp8"
    found, _, count, launches = graph_of(function, *shapes, recipe=recipe)
    assert count == 1 and found.count("fp4compile.quantize(") == 3
    assert launches.count("gemm_block_scaled_sm100") == (2 if recipe == "mxfp4" else 1)


def kept(x, w, v):
    y = F.relu(F.linear(x, w))
    return F.linear(y, v), y


def both_directions(x, w, v):
    y = F.relu(F.linear(x, w))
    return F.linear(y, v), y.t() @ y


def halves(x, w, v):
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.linear(F.relu(gate) * up, v)


def other_halves(x, w, v):
    y = F.linear(x, w)
    return F.linear(F.relu(y.narrow(-1, 0, 1024)) * y.narrow(-1, 512, 1024), v)


def both_sizes(x, w, v):
    gate, up = F.relu(F.linear(x, w)).chunk(2, -1)
    return F.linear(gate * up, v)


def half_kept(x, w, v):
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.linear(F.relu(gate) * up, v), up


def thirds(x, w, v):
    gate, up, _ = F.linear(x, w).chunk(3, -1)
    return F.linear(F.relu(gate) * up, v)


MX4 = {"recipe": "mxfp4"}
LONG = ((16, 14336), (4096, 14336), (1024, 4096))
LARGE = ((8192, 4096), (14336, 4096), (4096, 14336))
LEFT = {
    "a half used elsewhere": (half_kept, (X, (2048, 512), V), MX4),
    "other halves": (other_halves, (X, (2048, 512), V), MX4),
    "halves of no whole tiles": (halves, (X, (2016, 512), (512, 1008)), MX4),
    "thirds": (thirds, (X, (3072, 512), V), MX4),
    "halves of an activation": (both_sizes, (X, (2048, 512), V), MX4),
    "half of a product": (lambda x, w, v: F.linear(F.linear(x, w).chunk(2, -1)[1], v), (X, (2048, 512), V), MX4),
    "used elsewhere": (kept, (X, W, V), {}),
    "quantised twice": (both_directions, (X, W, V), {}),
    "global scale of a large tensor": (mlp, LARGE, {"recipe": "nvfp4"}),
    "row scales": (mlp, (X, W, V), {"recipe": "nvfp4_rowwise"}),
    "other rows": (lambda x, w, v: F.linear(F.relu(F.linear(x, w)).view(512, 512), v), (X, W, (256, 512)), {}),
    "unknown operation": (lambda x, w, v: F.linear(F.linear(x, w).sin(), v), (X, W, V), {}),
    "few rows of a weight with few columns": (mlp, LONG, {}),
    "Hopper": (mlp, (X, W, V), {"sm": 90}),
    "SM120": (mlp, (X, W, V), {"sm": 120}),
    "a large product of the library's": (mlp, LARGE, {}),
    "any number of rows of the library's": (mlp, ((ANY, 4096), (14336, 4096), (4096, 14336)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name):
    function, shapes, options = LEFT[name]
    found, names, count, _ = graph_of(function, *shapes, **options)
    assert count == 0 and "scaled_mm_results" not in found
    assert not any("quantize" in operations for operations in names.values())


def test_other_arithmetic_is_left_to_inductor():
    with config.patch({"emulate_precision_casts": True}):
        assert graph_of(mlp, X, W, V)[2] == 0


def test_the_log_says_why_not(caplog):
    caplog.set_level("INFO", "fp4compile")
    graph_of(mlp, *LONG)
    graph_of(mlp, *LARGE)
    said = [record.getMessage() for record in caplog.records if "quantised by another kernel" in record.getMessage()]
    assert "skinny_block_scaled_sm100 and a quantiser are expected to be faster" in said[0]
    assert "library_block_scaled and a quantiser are expected to be faster" in said[1]


def test_the_cost_model():
    """Fusing pays where the library does not serve, and where memory limits; not where the library's tiles win.

    With few rows it pays if the columns alone give enough programs, as those of gate and up of a Llama-3-8B do.
    """

    def pays(name, *sizes, step="relu product", products=1):
        problem = problem_of(MatmulCase(name, name, *sizes).arguments(), Target(100))
        epilogue = Epilogue.parse([step, f"quantize {name}"], torch.bfloat16, torch.bfloat16)
        return isinstance(quantized(problem, epilogue, products), Choice)

    two = {"step": "mul product pair", "products": 2}
    assert [pays(name, 16, 14336, 4096, **two) for name in ("mxfp4", "mxfp8", "nvfp4_one_level")] == [True] * 3
    assert [pays("mxfp8", 16, n, 4096) for n in (1024, 14336)] == [False, True]

    assert [pays(name, 8192, 14336, 4096) for name in ("mxfp4", "mxfp8", "nvfp4_one_level")] == [True, False, False]
    assert [pays(name, 8192, 4096, 1024) for name in ("mxfp4", "mxfp8", "nvfp4_one_level")] == [True, True, True]


def test_the_fused_graph_computes_the_same_on_the_cpu():
    """Codes and scales of the graph with the op, which rounds where the graph before the pass does."""
    results = []
    for fuse in (False, True):

        def passes(graph, fuse=fuse):
            assert not fuse or fuse_quantize(graph) == 1

        graph = fused_graph(mlp, X, W, V, recipe="mxfp8", fuse=False, then=passes).graph
        torch.manual_seed(0)
        values = [torch.randn(shape).bfloat16() for shape in (X, W, V)]
        results.append(torch.fx.GraphModule({}, graph)(*values))
    assert torch.equal(*results)
    (node,) = graph.find_nodes(op="call_function", target=SCALED_MM_RESULTS)
    assert sorted(user.args[1] for user in node.users if user.target is operator.getitem) == [0, 1]
    assert len(graph.find_nodes(op="call_function", target=QUANTIZE)) == 3
