"""Gate and up in one launch: what lies one below the other are the two weights that the model multiplies."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from fp4compile.analysis.gemm import Input
from fp4compile.ops.matmul import SCALED_MM, SCALED_MM_RESULTS
from fp4compile.ops.nodes import scaled_mm_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.fuse_quantize import fuse_quantize
from fp4compile.passes.hoist import hoisting
from tests.helpers.absent_gpu import fused_graph

BF16 = torch.bfloat16
ROWS, INNER, OUTER = 64, 128, 128


def gated(x, gate, up, down):
    return F.linear(F.relu(F.linear(x, gate)) * F.linear(x, up), down)


def two_parameters(x, w_gate, w_up, w_down):
    return gated(x, w_gate, w_up, w_down)


def halves_of_one(x, w, w_down):
    return gated(x, *w.chunk(2), w_down)


def other_halves_of_one(x, w, w_down):
    return gated(x, *w.chunk(2)[::-1], w_down)


def every_other_row_of_one(x, w, w_down):
    return gated(x, *w.unflatten(0, (INNER, 2)).unbind(1), w_down)


def the_same_half_of_two(x, w_gate, w_up, w_down):
    return gated(x, w_gate.chunk(2)[1], w_up.chunk(2)[1], w_down)


def other_halves_of_two(x, w_gate, w_up, w_down):
    return gated(x, w_gate.chunk(2)[1], w_up.chunk(2)[0], w_down)


def one_in_two_layouts(x, w_gate, w_up, w_down):
    return gated(x, w_gate, w_up.t(), w_down)


def codes_of(x):
    return QUANTIZE(x, "mxfp4", layout="swizzled")[:2]


def product(x, data, scales):
    return SCALED_MM(*codes_of(x), None, data, scales, None, "mxfp4 @ mxfp4 -> bfloat16")


def packed_before_others(x, gate_data, gate_scales, up_data, up_scales, w_gate, w_up, w_down):
    """A block of packed layers, then one of parameters."""
    y = F.relu(product(x, gate_data, gate_scales)) * product(x, up_data, up_scales)
    return gated(y, w_gate, w_up, w_down)


def one_of_two_packed(x, gate_data, gate_scales, w_up, w_down):
    return F.linear(F.relu(product(x, gate_data, gate_scales)) * F.linear(x, w_up), w_down)


ONE, TWO, PACKED = (INNER, OUTER), (2 * INNER, OUTER), "packed"
# Whether the two are joined: they need one form, the same piece of two parameters.
JOINED = {
    two_parameters: ((ONE, ONE), True), the_same_half_of_two: ((TWO, TWO), True), halves_of_one: ((TWO,), False),
    other_halves_of_one: ((TWO,), False), every_other_row_of_one: ((TWO,), False),
    other_halves_of_two: ((TWO, TWO), False), one_in_two_layouts: ((ONE, ONE), False),
    packed_before_others: ((PACKED, PACKED, ONE, ONE), True), one_of_two_packed: ((PACKED, ONE), False),
}  # fmt: skip


CASES = [*((function, "mxfp4") for function in JOINED), (two_parameters, "nvfp4"), (halves_of_one, "nvfp4")]


@pytest.mark.parametrize(("function", "recipe"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_results_with_hoisted_weights_are_those_of_the_graph(function, recipe):
    """Planned for a GPU and computed by the reference: as the graph that quantises its weights itself, bit for bit."""
    weights, joined = JOINED[function]
    torch.manual_seed(0)
    values = [torch.randn(ROWS, OUTER).to(BF16)]
    for shape in (*weights, (OUTER, INNER)):
        made = torch.randn(ONE if shape == PACKED else shape).to(BF16)
        values += codes_of(made) if shape == PACKED else [made]
    shapes, dtypes = [value.shape for value in values], [value.dtype for value in values]
    names = function.__code__.co_varnames[: len(values)]
    inputs = tuple(Input(name if name.startswith("w") else None) for name in names)
    packed = [place for place, name in enumerate(names) if name.endswith(("data", "scales"))]
    compiled = []

    def inner_compile(module, example_inputs, **kwargs):
        fuse_quantize(module.graph)
        module.recompile()
        compiled.append(module)
        return lambda values: module(*values)

    def then(graph):
        module = GraphModule({}, graph)
        fakes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        compiled.append(hoisting(inner_compile, inputs)(module, fakes, is_inference=True, static_input_idxs=packed))

    options = {"recipe": recipe, "dtypes": dtypes, "fuse": False}
    plain = fused_graph(function, *shapes, **options).graph
    fused_graph(function, *shapes, **options, then=then)
    module, call = compiled
    expected = GraphModule({}, plain)(*values)
    for _ in range(2):
        assert torch.equal(call([*values]), expected)
    products = module.graph.find_nodes(op="call_function", target=SCALED_MM_RESULTS)
    assert len(products) == 1 + (function is packed_before_others)
    assert {scaled_mm_of(node).spec.pair for node in products} == {joined}
