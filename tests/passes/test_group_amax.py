"""Which tensors the pass group_amax proves to be shards, in graphs of one rank of a group that does not exist."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp4compile
from fp4compile.analysis.gemm import Input, Shard
from fp4compile.analysis.graph import Quantise, quantise_of
from fp4compile.formats import formats, reference, reference_scales
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes import group_amax as tested
from fp4compile.passes.merge_quantize import merge_quantize
from tests.helpers import without_codegen

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
SCALE = "outer scale of 4 ranks"


@pytest.fixture
def mesh(monkeypatch):
    """Process groups of four ranks that are not there; captured graphs run as they are."""
    without_codegen.install(monkeypatch)
    monkeypatch.setattr(fp4compile.config, "enabled_passes", ("group_amax",))
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


class Mlp(nn.Module):
    def __init__(self, hidden=256):
        super().__init__()
        self.up, self.down = nn.Linear(64, hidden, bias=False), nn.Linear(hidden, 64)

    def forward(self, x):
        return self.down(self.up(x).relu())


def told(model, plan, mesh, recipe="nvfp4", x_needs_gradient=True, **fields):
    """What became of the outer scales of each product of a training step."""
    parallelize_module(model, mesh, plan)
    backend = fp4compile.backend(recipe, **fields)
    y = torch.compile(model, backend=backend)(torch.randn(32, 64, requires_grad=x_needs_gradient))
    getattr(y, "to_local", lambda: y)().sum().backward()
    return {f"{row.module} {row.product}": row.fused for row in backend.report.rows}


def test_every_product_of_a_layer_that_is_cut(mesh):
    found = told(Mlp(), {"up": ColwiseParallel(), "down": RowwiseParallel()}, mesh)
    assert found == {f"{layer} {product}": SCALE for layer in ("up", "down") for product in ("fprop", "dgrad", "wgrad")}


def test_limits_see_whole_layers(mesh):
    """The first layer is the widest, so that the last is no output head, though its shard has fewer features."""
    found = told(Mlp(128), {"up": ColwiseParallel(), "down": RowwiseParallel()}, mesh, min_n=64, min_k=64)
    assert set(found.values()) == {SCALE}


def test_what_no_product_proves(mesh):
    """Without an input gradient nothing shows that the output gradient is a part of a larger one."""
    found = told(Mlp(), {"up": ColwiseParallel(), "down": RowwiseParallel()}, mesh, x_needs_gradient=False)
    assert found.pop("up wgrad") is None and set(found.values()) == {SCALE}


def test_results_that_are_not_summed(mesh):
    reason = "outer scale of a shard: no sum over the ranks of what it is multiplied to is in the graph"
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Partial(), use_local_output=False)}
    found = told(Mlp(), plan, mesh)
    assert found["down fprop"] == f"{reason}; {SCALE}" and found["down wgrad"] == reason


RESULTS = {
    "sum": (lambda y: of_ranks(y, "sum"), True), "half of the sum": (lambda y: of_ranks(y[:16], "sum"), True),
    "avg": (lambda y: of_ranks(y, "avg"), False), "max": (lambda y: of_ranks(y, "max"), False),
    "used before": (lambda y: (of_ranks(y, "sum"), y.exp()), False),
    "activation before": (lambda y: of_ranks(y.relu(), "sum"), False),
}  # fmt: skip


def of_ranks(y, operation):
    return c10d.wait_tensor(c10d.all_reduce(y, operation, "0"))


@pytest.mark.parametrize("case", RESULTS)
def test_only_a_sum_over_the_ranks_proves_shards(case):
    """The largest, say, of all ranks' products is no product of tensors side by side."""
    made_of, proven = RESULTS[case]

    def function(x, w):
        a, b = (torch.ops.fp4compile.quantize(t, "nvfp4") for t in (x, w))
        return made_of(SCALED_MM(*a, *b, "nvfp4 @ nvfp4 -> float32"))

    inputs = Input(), Input("down.weight", shards=(Shard(1, 128, "0", 2),))
    graph = make_fx(function, tracing_mode="fake")(torch.randn(32, 64), torch.randn(48, 64)).graph
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        node.meta["desc"] = Index(i)
    assert tested.group_amax(graph, inputs) == 1 + proven, "the parameter is known to be a shard; and x"


def test_shards_that_are_left_alone(mesh):
    """Shards of unequal sizes keep scales of their own, with a reason."""
    uneven = told(Mlp(250), {"up": ColwiseParallel(output_layouts=Replicate())}, mesh)
    assert uneven["up fprop"] == "outer scale of a shard: 250 elements do not divide evenly among 4 ranks"


def test_transformed_operands_have_magnitudes_of_their_own(mesh):
    found = told(Mlp(), {"up": ColwiseParallel(), "down": RowwiseParallel()}, mesh, "nvfp4_train")
    assert found == {f"{layer} {product}": SCALE for layer in ("up", "down") for product in ("fprop", "dgrad", "wgrad")}


def quantised(x, first, second, both):
    """Codes of parameters, of a part of one, and of no parameter."""
    found = []
    for source in (first, second, both, first[:16]):
        found += torch.ops.fp4compile.quantize(source, "nvfp4", -1)[:1]
    return *found, *torch.ops.fp4compile.quantize(x, "nvfp4", -1)[:1]


class Index:
    """AOTAutograd's descriptor of an input, as far as it is read."""

    def __init__(self, idx):
        self.idx = idx


def test_the_numbers_of_all_parameters_take_one_collective():
    """Each group reduces its magnitudes once; a parameter that two groups cut takes the largest of both."""
    rows, columns = Shard(0, 64, "0", 2), Shard(1, 128, "1", 2)
    cuts = {"first.weight": (rows,), "second.weight": (rows,), "both.weight": (rows, columns)}
    inputs = (Input(), *(Input(name, shards=shards) for name, shards in cuts.items()))
    graph = make_fx(quantised, tracing_mode="fake")(torch.randn(32, 64), *torch.randn(3, 32, 64)).graph
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        node.meta["desc"] = Index(i)
    assert tested.group_amax(graph, inputs) == 3, "neither x nor a part of a parameter"
    graph.lint()
    collectives = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    found = [(each.args[0].meta["val"].numel(), *each.args[1:]) for each in collectives]
    assert found == [(2, "max", "0"), (1, "max", "0"), (1, "max", "1")]
    outers = [quantise_of(node).outer for node in graph.find_nodes(op="call_function", target=QUANTIZE)]
    assert [outer is None for outer in outers] == [False] * 3 + [True] * 2 and len(set(outers[:3])) == 3


@pytest.mark.parametrize("rule", ["amax", "four_over_six"])
def test_bits_of_outer_scales(rule, fmt="nvfp4"):
    """Random magnitudes, subnormal ones among them, and all special ones."""
    bits = torch.randint(0, 0x7F800000, (20000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    special = torch.tensor([0.0, 2.0**-149, 2.0**-139, torch.finfo(torch.float32).max, torch.inf, torch.nan])
    amax = torch.cat([bits.view(torch.float32), bits.remainder(1 << 23).view(torch.float32), special])
    graph_module = make_fx(lambda amax: amax.clone())(amax)
    (node,) = graph_module.graph.find_nodes(op="placeholder")
    output = graph_module.graph.output_node()
    with graph_module.graph.inserting_before(output):
        output.args = (tested._Outers(graph_module.graph)._outer(Quantise(node, node, fmt, scale_rule=rule), node),)
    graph_module.recompile()
    made = reference.outer_of(amax, formats.get(fmt)) if rule == "amax" else reference_scales.outer_of(amax, rule)
    assert torch.equal(graph_module(amax).view(torch.int32), made.view(torch.int32))


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_te", "nvfp4_16x16"])
def test_codes_of_a_shard_are_those_of_the_whole(fmt):
    """A group of one process, in which the largest element is another rank's: the collective is replaced.

    Both directions are quantised by one launch, as without a group.
    """

    def both(x):
        return [part for dim in (-1, -2) for part in torch.ops.fp4compile.quantize(x, fmt, dim)]

    whole = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    whole[40, 3] = 50
    inputs = (Input("first.weight", shards=(Shard(0, 64, "0", 2),)),)
    graph_module = make_fx(both, tracing_mode="fake")(whole[:32])
    graph = graph_module.graph
    (placeholder,) = graph.find_nodes(op="placeholder")
    placeholder.meta["desc"] = Index(0)
    assert tested.group_amax(graph, inputs) == 2 and merge_quantize(graph) == 1
    (node,) = graph.find_nodes(op="call_function", target=QUANTIZE)
    assert (quantise_of(node).amax is not None) == (quantise_of(node).outer is None) == (fmt != "nvfp4")
    (collective,) = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    with graph.inserting_before(collective):
        bits = torch.tensor([50.0]).view(torch.int32).item()
        (wait,) = collective.users
        wait.replace_all_uses_with(graph.call_function(aten.clamp_min.default, (collective.args[0], bits)))
    graph.erase_node(wait)
    graph.erase_node(collective)
    graph_module.recompile()
    found, expected = graph_module(whole[:32]), both(whole)
    for dim in (-1, -2):
        data, scales, outer = found[:3] if dim == -1 else found[3:]
        data_of_all, scales_of_all, outer_of_all = expected[:3] if dim == -1 else expected[3:]
        first = (slice(32),) if dim == -1 else (slice(None), slice(16))
        assert torch.equal(data, data_of_all[first]) and outer == outer_of_all
        of_scales = slice(scales.shape[0]), slice(scales.shape[1])
        assert torch.equal(scales.view(torch.uint8), scales_of_all[of_scales].view(torch.uint8))
