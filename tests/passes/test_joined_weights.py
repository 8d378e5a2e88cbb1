"""Gate and up in one launch: what lies one below the other are the two weights that the model multiplies."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from fp4compile.analysis.gemm import Input
from fp4compile.ops.matmul import SCALED_MM_AMAX, SCALED_MM_QUANTIZED
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


ONE, TWO = (INNER, OUTER), (2 * INNER, OUTER)
# Whether the two are joined: they need one form, the same piece of two parameters.
JOINED = {
    two_parameters: ((ONE, ONE), True), the_same_half_of_two: ((TWO, TWO), True), halves_of_one: ((TWO,), False),
    other_halves_of_one: ((TWO,), False), every_other_row_of_one: ((TWO,), False),
    other_halves_of_two: ((TWO, TWO), False), one_in_two_layouts: ((ONE, ONE), False),
}  # fmt: skip


CASES = [*((function, "mxfp4") for function in JOINED), (two_parameters, "nvfp4"), (halves_of_one, "nvfp4")]


@pytest.mark.parametrize(("function", "recipe"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_results_with_hoisted_weights_are_those_of_the_graph(function, recipe):
    """Planned for a GPU and computed by the reference: as the graph that quantises its weights itself, bit for bit."""
    weights, joined = JOINED[function]
    shapes = (ROWS, OUTER), *weights, (OUTER, INNER)
    inputs = Input(), *(Input(f"weight{place}") for place in range(len(shapes) - 1))
    compiled = []

    def inner_compile(module, example_inputs, **kwargs):
        fuse_quantize(module.graph)
        module.recompile()
        compiled.append(module)
        return lambda values: module(*values)

    def then(graph):
        module = GraphModule({}, graph)
        values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        compiled.append(hoisting(inner_compile, inputs)(module, values, is_inference=True, static_input_idxs=[]))

    plain = fused_graph(function, *shapes, recipe=recipe, fuse=False).graph
    fused_graph(function, *shapes, recipe=recipe, fuse=False, then=then)
    module, call = compiled
    torch.manual_seed(0)
    values = [torch.randn(shape).to(BF16) for shape in shapes]
    expected = GraphModule({}, plain)(*values)
    for _ in range(2):
        assert torch.equal(call([*values]), expected)
    products = [node for op in (SCALED_MM_QUANTIZED, SCALED_MM_AMAX)
                for node in module.graph.find_nodes(op="call_function", target=op)]  # fmt: skip
    assert any("pair" in str(node.args[11]) for node in products) == joined
