"""Which products of experts quantise their results, and what the graphs are then."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.check.products import MatmulCase
from fp4compile.formats.epilogue import Epilogue
from fp4compile.hardware import GPUS, Target
from fp4compile.ops.matmul import SCALED_MM, SCALED_MM_RESULTS
from fp4compile.passes.fuse_quantize import fuse_quantize, partner_of
from fp4compile.roofline.graph_steps import steps_of
from fp4compile.templates.choose import Choice, quantized
from fp4compile.templates.gemm import cost
from fp4compile.templates.launch import dry_run
from fp4compile.templates.problem import problem_of
from tests.helpers.absent_gpu import ANY, fused_graph
from tests.helpers.absent_gpu_model import DEVICE, compiled_for, pretended
from tests.helpers.arguments import times
from tests.helpers.quantising_products import graph_of

BF16, INT32 = torch.bfloat16, torch.int32
W, V, OFFS = (8, 2048, 512), (8, 512, 1024), (8,)


def grouped(x, w, offs):
    return F.grouped_mm(x, w.transpose(1, 2), offs=offs)


def mixtral(x, w, v, offs):
    """Experts as transformers computes them: gate and up are one product."""
    gate, up = grouped(x, w, offs).chunk(2, -1)
    return grouped(F.silu(gate) * up, v, offs)


def torchtitan(x, w_1, w_3, v, offs):
    """Gate and up are two products of one input."""
    return grouped(F.silu(grouped(x, w_1, offs)) * grouped(x, w_3, offs), v, offs)


def fused(function, *shapes, **options):
    names = function.__code__.co_varnames[: len(shapes)]
    dtypes = [INT32 if name.startswith("offs") else BF16 for name in names]
    return graph_of(function, *shapes, dtypes=dtypes, **options)


def of_products(found):
    return [line.split("fp4compile.")[1] for line in found.splitlines() if "fp4compile.scaled" in line]


SILU = "neg product | exp s0 | add s1 1.0 | div product s2"
QUANTISER = ["quantize_rows"]
KERNELS = ["gemm_block_scaled_sm100"] * 2


@pytest.mark.parametrize("rows", [2048, ANY], ids=["2048 rows", "any number of rows"])
def test_snapshot_of_experts_of_transformers(rows):
    """One launch for gate, up and the activation; the tokens' quantiser is the only one that is left."""
    found, names, count, launches = fused(mixtral, (rows, 512), W, V, OFFS, recipe="nvfp4_one_level")
    m, m_1 = ("sym_size_int", "sym_size_int_1") if rows is ANY else ("2048", "2048")
    fmt = "nvfp4_one_level"
    spec = f"{fmt} @ {fmt}, ragged rows -> bfloat16"
    assert of_products(found) == [
        f"scaled_mm_results(getitem_2, getitem_3, [getitem_5], [getitem_6], {spec} | {SILU} | mul s3 pair |"
        f" to bfloat16 | quantize {fmt}, offs=offs_1, rows={m})",
        f"scaled_mm(getitem_8, getitem_9, getitem_11, getitem_12, {spec}, offs=offs_1, rows={m_1})",
    ]
    assert count == 1 and list(names.values()) == ["neg, exp, add, div, mul, quantize"]
    assert launches == [*QUANTISER, "quantize_rows", KERNELS[0], "quantize_rows", KERNELS[1]]  # weights: each matrix


class Experts(torch.nn.Module):
    """Experts as torchtitan has them, with fake parameters of the current fake mode."""

    def __init__(self, inner):
        super().__init__()
        for name, shape in {"w1": (inner, 512), "w3": (inner, 512), "w2": (512, inner)}.items():
            weight = torch.empty(8, *shape, device=DEVICE, dtype=BF16)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        self.offs = torch.empty(8, device=DEVICE, dtype=INT32)

    def forward(self, x):
        return torchtitan(x, self.w1, self.w3, self.w2, self.offs)


def compiled(monkeypatch, inner, recipe):
    with pretended(monkeypatch, 100) as launches:
        model, x = Experts(inner), torch.empty(2048, 512, device=DEVICE, dtype=BF16)
        return compiled_for(monkeypatch, model, x, recipe, launches)


@pytest.mark.parametrize(("inner", "pairs"), [(1024, [2, 0]), (1040, [0, 0, 0])], ids=["joined", "no whole tiles"])
def test_compiled_models(inner, pairs, monkeypatch):
    """Through the backend: where the cache joins the weights of gate and up, one launch of both remains."""
    found = compiled(monkeypatch, inner, "mxfp4")
    rows = {row.module: row.fused for row in found.report.rows}
    assert rows == {"w1": "silu, mul, quantize", "w3": None, "w2": None}
    kernels = [one for one in found.launches if "gemm" in one.kernel.__name__]
    assert {one.kernel.__name__ for one in kernels} == {*KERNELS}
    assert [one.constants["PAIR"] for one in kernels] == pairs
    quantising = ["| e2m1 " in one.constants["EPILOGUE"] for one in kernels]
    assert quantising == [*[False] * (len(pairs) - 2), True, False]
    packed = [node for node in found.graphs[0].graph.find_nodes(op="placeholder") if node.name.startswith("packed")]
    assert len(packed) == (9 + 2 if pairs[0] else 9)
    assert [name for one in found.launches if "gemm" not in (name := one.kernel.__name__)] == QUANTISER


def test_a_compiled_model_with_dynamic_outer_scales(monkeypatch):
    """Gate and up are one launch, which finds the amax of each expert's tokens; one quantiser reads the result."""
    found = compiled(monkeypatch, 1024, "nvfp4")
    assert {row.module: row.fused for row in found.report.rows} == {"w1": "silu, mul, amax", "w3": None, "w2": None}
    names = [one.kernel.__name__ for one in found.launches]
    assert names == ["tensor_amax", *QUANTISER, KERNELS[0], *QUANTISER, KERNELS[1]]
    product, quantiser = found.launches[2:4]
    assert product.constants["PAIR"] == 2 and product.constants["EPILOGUE"].endswith("| amax bfloat16")
    assert (quantiser.constants["OUTER"], quantiser.constants["GROUPS"]) == ("matrix amax", 8)


def test_snapshot_of_dynamic_outer_scales():
    """The first product's kernel stores the activation and finds each group's amax, of which global scales are made."""
    found, names, count, launches = fused(mixtral, (2048, 512), W, V, OFFS, recipe="nvfp4")
    first, second = of_products(found)
    assert first == (
        "scaled_mm_results(getitem_2, getitem_3, getitem_4, [getitem_5], [getitem_6], [getitem_7], nvfp4 @ nvfp4,"
        f" ragged rows -> bfloat16 | {SILU} | mul s3 pair | to bfloat16 | amax, offs=offs_1, rows=2048)"
    )
    (reader,) = [line.split(" = ")[1] for line in found.splitlines() if "amax=" in line]
    assert reader == "fp4compile.quantize(getitem_14, nvfp4, [-1], offs=offs_1, layout=swizzled, amax=getitem_15)"
    assert second.startswith("scaled_mm(getitem_8, getitem_9, getitem_10, getitem_11,")
    assert count == 1 and list(names.values()) == ["neg, exp, add, div, mul, amax"]
    after = launches[launches.index(KERNELS[0]) + 1 :]
    assert after == [*QUANTISER, "tensor_amax", "quantize_rows", KERNELS[1]]  # two launches for each matrix of weights


def test_a_static_outer_scale():
    """One for all groups: an operand of the product that quantises."""

    def function(x, w, outer, offs):
        y = F.relu(grouped(x, w, offs))
        return torch.ops.fp4compile.quantize(y, "nvfp4", [-1], offs=offs, outer=outer, layout="swizzled")[:2]

    def both(graph):
        assert fuse_quantize(graph) == 1
        (node,) = graph.find_nodes(op="call_function", target=SCALED_MM_RESULTS)
        assert {name: str(value) for name, value in node.kwargs.items()} == {
            "outer": "outer_1", "offs": "offs_1", "rows": "2048"
        }  # fmt: skip
        assert [tuple(value.shape) for value in node.meta["val"]] == [(2048, 1024), (128 * 24 * 128,)]

    dtypes = [BF16, BF16, torch.float32, INT32]
    fused_graph(function, (2048, 512), W, (), OFFS, recipe="mxfp8", dtypes=dtypes, fuse=False, then=both)


def test_a_gathered_product_is_no_partner():
    """Of an expert for all tokens and those of each token: their weights cannot be one matrix."""

    def function(x, w, v, index):
        a, b, c = ((*torch.ops.fp4compile.quantize(each, "mxfp8")[:2], None, "mxfp8") for each in (x, w, v))
        return F.relu(times(a, b)) * times(a, c, index=index)

    with FakeTensorMode(), dry_run(Target(100)):
        x, w, v = (torch.empty(shape, device="cuda", dtype=BF16) for shape in ((8, 16, 512), W[1:], W))
        graph = make_fx(function)(x, w, v, torch.empty(8, device="cuda", dtype=torch.int64)).graph
    dense, gathered = graph.find_nodes(op="call_function", target=SCALED_MM)
    assert dense.meta["val"].shape == gathered.meta["val"].shape
    assert (partner_of(dense), partner_of(gathered)) == (None, None)


def other_groups(x, w, v, offs, offs_2):
    return grouped(F.relu(grouped(x, w, offs)), v, offs_2)


def as_one_matrix(x, w, v, offs):
    return F.linear(F.relu(grouped(x, w, offs)), v)


def kept(x, w, v, offs):
    y = F.relu(grouped(x, w, offs))
    return grouped(y, v, offs), y


def product_kept(x, w, v, offs):
    y = grouped(x, w, offs)
    gate, up = y.chunk(2, -1)
    return grouped(F.silu(gate) * up, v, offs), y


N = (8, 1024, 512)
# function, shapes after the rows', options
LEFT = {
    "other groups": (other_groups, (N, V, OFFS, OFFS), {}),
    "the next product has no groups": (as_one_matrix, (N, (512, 1024), OFFS), {}),
    "materialised": (kept, (N, V, OFFS), {}),
    "the product is kept": (product_kept, (W, V, OFFS), {}),
    "halves of partly filled tiles": (mixtral, ((8, 2080, 512), (8, 512, 1040), OFFS), {}),
    "dynamic global scales, other groups": (other_groups, (N, V, OFFS, OFFS), {"recipe": "nvfp4"}),
    "dynamic global scales, materialised": (kept, (N, V, OFFS), {"recipe": "nvfp4"}),
    "a dynamic global scale of the tensor": (as_one_matrix, (N, (512, 1024), OFFS), {"recipe": "nvfp4"}),
    "row scales": (mixtral, (W, V, OFFS), {"recipe": "nvfp4_rowwise"}),
    "Hopper": (mixtral, (W, V, OFFS), {"sm": 90}),
    "SM120": (mixtral, (W, V, OFFS), {"sm": 120}),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name):
    function, shapes, options = LEFT[name]
    found, names, count, _ = fused(function, (2048, 512), *shapes, **options)
    assert count == 0 and "scaled_mm_results" not in found
    assert not any("quantize" in operations for operations in names.values())


def test_the_log_says_why_not(caplog):
    caplog.set_level("INFO", "fp4compile")
    fused(mixtral, (2048, 512), (8, 2080, 512), (8, 512, 1040), OFFS)
    (said,) = {record.getMessage() for record in caplog.records if "another kernel" in record.getMessage()}
    assert "no kernel of compute capability 100 quantises its result" in said


# Experts, rows of gate and up, and columns of them.
EXPERTS = {"Mixtral": (8, 28672, 4096), "Qwen3": (128, 1536, 2048), "DeepSeek-V3": (256, 4096, 7168)}


def test_the_cost_model():
    """Fusing pays for the experts of Mixtral, Qwen3 and DeepSeek-V3, with few tokens and with many.

    It does not where few tokens of many experts leave the epilogue longer than the launch that it saves.
    """
    for groups, *sizes in EXPERTS.values():
        for name in ("mxfp4", "mxfp8", "nvfp4_one_level"):
            for rows in (16, 1024, 65536):
                assert isinstance(choice(name, rows, *sizes, groups), Choice)
    few = choice("mxfp8", 128, 4096, 7168, 256)
    assert few == "grouped_block_scaled_sm100 and a quantiser are expected to be faster"


def test_the_cost_model_of_amaxes(monkeypatch):
    """An epilogue that finds amaxes pays for these experts, with few tokens and with many, by its instructions."""
    for groups, *sizes in EXPERTS.values():
        for rows in (16, 1024, 65536):
            assert isinstance(choice("nvfp4", rows, *sizes, groups, amax=True), Choice)
    monkeypatch.setattr(cost, "GROUP_AMAX_INSTRUCTIONS", 500)
    slow = choice("nvfp4", 65536, 1536, 2048, 128, amax=True)
    assert slow == "grouped_block_scaled_sm100 and a quantiser are expected to be faster"


def choice(name, rows, columns, k, groups, amax=False):
    problem = problem_of(MatmulCase(name, name, rows, columns, k, groups=groups).arguments(), Target(100))
    end = "amax" if amax else f"quantize {name}"
    return quantized(problem, Epilogue.parse(["mul product pair", end], BF16, BF16))


@pytest.mark.parametrize("weights", [1, 2])
def test_predicted_steps(weights):
    """One launch, of the FLOPs and bytes of both products; codes are what it writes."""

    def product(a, a_scales, b, b_scales, offs):
        spec = "mxfp8 @ mxfp8, ragged rows -> bfloat16 | relu product | mul s0 pair | to bfloat16 | quantize mxfp8"
        return torch.ops.fp4compile.scaled_mm_results(a, a_scales, None, [b], [b_scales], [], spec, offs=offs)

    def read(graph):
        found.extend(step for _, step in steps_of(graph, GPUS["B200"]))

    m, n, k, groups, found = 4096, 1024, 512, 8, []
    b = weights * groups, 2 * n // weights, k
    shapes = (m, k), ((m + 128 * groups) * k // 32,), b, (b[0], b[1] * k // 32), (groups,)
    e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
    fused_graph(product, *shapes, dtypes=[e4m3, e8m0, e4m3, e8m0, INT32], then=read)
    (step,) = found
    assert step.launches == 1 and step.flops >= 2 * m * 2 * n * k
    codes, scales = m * k + groups * 2 * n * k + m * n, (m + groups * 2 * n) * k // 32 + (m + 128 * groups) * n // 32
    assert step.bytes == codes + scales


def one_product(x, w, v, offs):
    gate, up = grouped(x, w, offs).chunk(2, -1)
    return grouped(F.relu(gate) * up, v, offs)


def two_products(x, w_1, w_3, v, offs):
    return grouped(F.relu(grouped(x, w_1, offs)) * grouped(x, w_3, offs), v, offs)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("function", [one_product, two_products])
def test_the_fused_graph_computes_the_same_on_the_cpu(function, recipe):
    """Codes and scales of the graph with the op, which rounds where the graph before the pass does."""
    results = []
    weights = [(3, 256, 64)] if function is one_product else [(3, 128, 64)] * 2
    shapes = [(96, 64), *weights, (3, 64, 128), (3,)]
    for fuse in (False, True):

        def passes(graph, fuse=fuse):
            assert not fuse or fuse_quantize(graph) == 1

        dtypes = [*[BF16] * (len(shapes) - 1), INT32]
        graph = fused_graph(function, *shapes, recipe=recipe, dtypes=dtypes, fuse=False, then=passes).graph
        torch.manual_seed(0)
        values = [torch.randn(shape).bfloat16() for shape in shapes[:-1]]
        offs = torch.tensor([40, 40, 90], dtype=INT32)
        results.append(torch.fx.GraphModule({}, graph)(*values, offs))
    assert torch.equal(*results) and results[0][:90].abs().amin(-1).gt(0).all()
