"""Which quantisers of gradients become one, and which do not."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp4compile.analysis.graph import QUANTIZE_PROLOGUE
from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue
from fp4compile.hardware import Target
from fp4compile.passes.fuse_prologue import fuse_prologue
from fp4compile.passes.fused import fused, name_product
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.passes.pair_prologues import pair_prologues
from fp4compile.templates.launch import dry_run
from fp4compile.templates.quantize import prologue_cost

BF16 = torch.bfloat16
quantize, quantize_both = torch.ops.fp4compile.quantize, torch.ops.fp4compile.quantize_both
cast = torch.ops.prims.convert_element_type


def gradients(first, other=None):
    """A function of the gradient of a gate's result, the gate and the other input; these quantise what it makes."""

    def function(d, gate, up, *seeds):
        return first(d * (gate + 1), *seeds[:1]), (other or first)(d * up * gate, *seeds[1:])

    return function


def by(op, *arguments, **options):
    return lambda x, *seeds: op(x, *arguments, **options, **({"seed": seeds[0]} if seeds else {}))


BOTH = by(quantize_both, "mxfp8")


def of_a_product(product):
    """Of a gate whose second gradient is made of a product, which is no tensor of a quantiser."""

    def function(d, gate, up):
        one = BOTH(d * (gate + 1))
        return one, BOTH(product(d, one) * gate)

    return function


def of_one_value(d, gate, up):
    """Quantised twice, as two nodes."""
    return BOTH(d * (gate + 1)), BOTH(d * (gate + 1))


def of_a_given_scale(d, gate, up):
    outer = d.new_ones((), dtype=torch.float32)
    return gradients(lambda x: quantize_both(x, "nvfp4", outer=outer))(d, gate, up)


def of_one_row(d, gate, up, row):
    """The two have nothing but a row in common."""
    return BOTH(d * row), BOTH(up * row)


def paired_graph(function, shape=(64, 128), dtype=BF16, seeds=0, pair=True, lowered=False, row=False):
    """(pairs, nodes with a prologue, launches, graph) of a function on fake tensors of SM100, after the passes.

    seeds, row: how many seeds the function takes besides, and whether it takes a row.
    """
    with FakeTensorMode(shape_env=ShapeEnv()), dry_run(Target(100)) as launches:
        values = [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(3)]
        values += [torch.empty((), dtype=torch.int64, device="cuda") for _ in range(seeds)]
        values += [torch.empty(shape[-1:], dtype=dtype, device="cuda")] * row
        graph = make_fx(function)(*values).graph
        graph.eliminate_dead_code()
        merge_quantize(graph)
        fuse_prologue(graph)
        pairs = pair_prologues(graph) if pair else 0
        graph.lint()
        nodes = graph.find_nodes(op="call_function", target=QUANTIZE_PROLOGUE)
        if lowered:
            lower(graph)
    return pairs, nodes, [launch.kernel.__name__ for launch in launches], graph


def test_one_launch_in_the_place_of_two():
    for pair, expected in ((False, ["quantize_both"] * 2), (True, ["quantize_both"])):
        pairs, _, launches, _ = paired_graph(gradients(BOTH), pair=pair, lowered=True)
        assert (pairs, launches) == (int(pair), expected)
    _, (node,), *_ = paired_graph(gradients(BOTH))
    assert node.args[1] == ["add aux1 1.0", "mul aux0 s0", "mul aux0 aux2", "mul s2 aux1"]
    assert node.kwargs["results"] == [1, 3] and [one.name for one in node.args[0]] == ["arg0_1", "arg1_1", "arg2_1"]


def test_what_is_quantised_of_each_keeps_its_name():
    """Its products read the outputs that were the quantiser's own, and the report says what was fused for each."""

    def products(d, gate, up):
        one, other = gradients(BOTH)(d, gate, up)
        return one[3], other[0]

    _, (node,), _, graph = paired_graph(products)
    assert sorted(user.args[1] for user in node.users) == [3, 6]
    node.meta["fp4compile_operations"] = ("add, mul", "mul")  # as if they were of unlike operations
    for user in node.users:
        with graph.inserting_after(user):
            product = graph.call_function(torch.ops.fp4compile.dequantize.default, (user,))
        product.name = f"of_{user.args[1]}"
        name_product(product)
    assert fused(graph) == {"of_3": "add, mul", "of_6": "mul"}


def test_seeds_are_one_tensor():
    """Where a step has drawn them one after the other, a part of what was drawn."""
    trained = by(quantize_both, "nvfp4_te", hadamard=True)
    pairs, (node,), _, graph = paired_graph(gradients(trained), seeds=2)
    assert pairs == 1 and node.kwargs["seed"].target is torch.ops.aten.cat.default
    assert node.kwargs["seed"].meta["val"].shape == (2,) and node.kwargs["hadamard"]

    def drawn(first, second):
        def function(d, gate, up, seed):
            seeds = torch.stack([seed] * 4)
            return gradients(trained)(d, gate, up, seeds.select(0, first), seeds.select(0, second))

        return function

    pairs, (node,), *_ = paired_graph(drawn(1, 2), seeds=1)
    assert pairs == 1 and node.kwargs["seed"].target is torch.ops.aten.slice.Tensor
    assert node.kwargs["seed"].args[1:] == (0, 1, 3)
    for apart in ((1, 3), (2, 1), (1, 1)):
        pairs, (node,), *_ = paired_graph(drawn(*apart), seeds=1)
        assert pairs == 1 and node.kwargs["seed"].target is torch.ops.aten.cat.default
        assert [row.args[0].args[2] for row in node.kwargs["seed"].args[0]] == list(apart)


@pytest.mark.parametrize(("function", "options"), [
    (gradients(BOTH, by(quantize_both, "mxfp8_e5m2")), {}), (gradients(BOTH, by(quantize, "mxfp8")), {}),
    (gradients(by(quantize, "mxfp8"), by(quantize, "mxfp8", -2)), {}),
    (gradients(BOTH, by(quantize_both, "mxfp8", layout="swizzled")), {}),
    (of_a_product(lambda d, one: torch.ops.aten.mm(d, d)), {"shape": (128, 128)}),
    (of_a_product(lambda d, one: torch.ops.aten.mm(d, cast(one[0], BF16))), {"shape": (128, 128)}),
    (of_one_value, {}), (of_a_given_scale, {}), (of_one_row, {"row": True}),
    (gradients(BOTH), {"shape": (2, 64, 128)}), (gradients(BOTH), {"shape": (37, 136)}),  # where a half begins
], ids=["format", "op", "direction", "layout", "later", "dependent", "same", "given", "row", "batch",
        "alignment"])  # fmt: skip
def test_unlike_ones_stay_two(function, options):
    """Each case has one reason."""
    pairs, nodes, *_ = paired_graph(function, **options)
    assert (pairs, len(nodes)) == (0, 2)


def test_a_product_that_is_there_is_read():
    def function(d, gate, up):
        product = torch.ops.aten.mm(d, d)
        return of_a_product(lambda *_: product)(d, gate, up)

    assert paired_graph(function, shape=(128, 128))[0] == 1


def test_nothing_is_moved_past_what_changes_memory():
    pairs, (one, other), _, graph = paired_graph(gradients(BOTH), pair=False)
    with graph.inserting_after(one):
        graph.call_function(torch.ops.aten.add_.Tensor, (one.args[0][1], 1.0))
    assert pairs == pair_prologues(graph) == 0 and len(graph.find_nodes(op="call_function", target=other.target)) == 2


def test_the_model_reads_common_operands_once(monkeypatch):
    """Where bytes bound a pair; where instructions do, it takes as long as two. What is slower stays two."""
    one, other = ["add aux1 1.0", "mul aux0 s0"], ["mul aux0 aux1", "mul s0 aux2"]
    both = Prologue.parse([*one, "mul aux0 aux2", "mul s2 aux1"], BF16, (), [1, 3])
    work = prologue_cost.Work("quantize", formats.get("mxfp8"), False, False, False, False, 128)
    time = prologue_cost.fused_time
    apart = time(Prologue.parse(one, BF16), [BF16] * 2, work, 100)
    apart += time(Prologue.parse(other, BF16), [BF16] * 3, work, 100)
    assert (time(both, [BF16] * 3, work, 100), apart) == (6 + 2, 4 + 1 + 6 + 1)
    monkeypatch.setattr("fp4compile.passes.pair_prologues.fused_time", lambda prologue, *_: len(prologue.results) - 1.5)
    assert paired_graph(gradients(BOTH))[0] == 0
