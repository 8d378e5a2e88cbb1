"""Rows that are moved are quantised before: which moves, and that no bit of codes and scales changes.

Graphs are traced on fake CUDA tensors, and run on a CPU.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import fp4compile
from fp4compile.formats import formats
from fp4compile.hardware import Target
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes import quantize_before_move as tested
from fp4compile.passes.fake_quantize import fake_quantize
from fp4compile.passes.quantize_before_move import quantize_before_move
from fp4compile.templates.launch import dry_run

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
ROWS, K = 12, 64
FORMATS = ["mxfp8", "mxfp4", "nvfp4_one_level", "nvfp4_rowwise", "float8_rowwise", "nvfp4", "nvfp4_te"]


@pytest.fixture(autouse=True)
def launches_cost_nothing(monkeypatch):
    monkeypatch.setattr(tested, "LAUNCH_BYTES", 0)
    monkeypatch.setattr(fp4compile.config, "enabled_passes", ("quantize_before_move",))


def quantize(x, fmt, dim=-1, **options):
    """The results that are there."""
    return [each for each in torch.ops.fp4compile.quantize(x, fmt, dim, **options) if each.shape != (0,)]


def inputs(rows=ROWS, k=K):
    """x, an index of more rows than x has, offsets with rows of no group behind them, and an outer scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, k, generator=generator) * 2.0 ** torch.arange(rows).fmod(7).view(-1, 1)
    index = torch.randint(rows, (2 * rows,), generator=generator)
    return x.bfloat16(), index, torch.tensor([5, 5, 20], dtype=torch.int32), torch.tensor(0.01)


def on(device, sm=90):
    return dry_run(Target(sm)) if device == "cuda" else nullcontext()


def traced(function, values, device="cuda", any_rows=False):
    """any_rows: whether the first size of the first tensor is symbolic."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, on(device):
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in values]
        if any_rows:
            symbol = mode.shape_env.create_symbol(ROWS, ConstantSource("s"), DimDynamic.DYNAMIC)
            size = mode.shape_env.create_symintnode(symbol, hint=ROWS)
            fakes[0] = torch.empty(size, *values[0].shape[1:], dtype=values[0].dtype, device=device)
        return make_fx(function)(*fakes)


def moved(function, values, device="cuda", sm=90, **options):
    """(how many moves the pass changes, the graph); the graph's results must keep their bits."""
    graph_module = traced(function, values, device, **options)
    with on(device, sm):
        count = quantize_before_move(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    for node in graph_module.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cpu"))
    graph_module.recompile()
    results = [torch.utils._pytree.tree_leaves(each(*values)) for each in (graph_module, function)]
    for got, expected in zip(*results, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (got, expected)))
    return count, graph_module.graph


def by_index(x, index):
    return aten.index.Tensor(x, [index])


def gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0"))


def zeroed(mask, x, index, zero=0.0, width=1):
    """Rows, some of them zeros, as transformers masks the tokens of other ranks' experts."""
    zero = aten.scalar_tensor(zero, dtype=x.dtype, device=x.device)
    return aten.where(mask.view(-1, 1).expand(-1, width), zero, by_index(x, index))


def zeroed_twice(x, index):
    rows, zero = zeroed(index > 4, x, index).view(2, -1, K), aten.full([], 0.0, dtype=x.dtype, device=x.device)
    return aten.where((index == 2).view(2, -1, 1), zero, rows).view(-1, K)


MOVES = {
    "index": by_index,
    "index_select": lambda x, index: aten.index_select(x, 0, index),
    "embedding": lambda x, index: aten.embedding(x, index.view(2, -1)).view(-1, K),
    "gather": lambda x, index: aten.gather(x, 0, index.view(-1, 1).expand(-1, K)),
    "gather of matrices": lambda x, index: aten.gather(
        x.view(2, -1, K), 1, (index % (len(x) // 2)).view(1, -1, 1).expand(2, -1, K)
    ).view(-1, K),
    "cat": lambda x, index: aten.cat([x, aten.slice(x, 0, 3, 7)]),
    "matrices": lambda x, index: aten.cat([x.view(2, -1, K), x.view(2, -1, K)], 1).reshape(-1, K).clone(),
    "second dimension": lambda x, index: aten.index.Tensor(x.view(1, -1, K), [None, index]),
}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_bits_of_moved_rows(move, fmt):
    assert moved(lambda x, index: quantize(move(x, index), fmt), inputs()[:2])[0] == 1


@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_of_masked_rows(fmt):
    """An outer scale of the tensor is made of the rows that are left."""
    moves = 0 if formats.get(fmt).outer == "tensor" else 1
    assert moved(lambda x, index: quantize(zeroed_twice(x, index), fmt), inputs()[:2])[0] == moves


@pytest.mark.parametrize("move", ["index", "cat", "matrices"])
def test_bits_of_swizzled_scales(move):
    """Of rows, of groups of rows, of a batch of matrices: scales are moved linear and laid out behind the move."""
    by, whole = MOVES[move], (1, 2 * ROWS) if move == "index" else (3, -1)

    def function(x, index, offs):
        rows, options = by(x, index), {"layout": "swizzled"}
        found = [*quantize(rows, "nvfp4", **options), *quantize(rows.view(*whole, K), "mxfp8", **options)]
        return found + (quantize(rows, "nvfp4_one_level", offs=offs, **options) if move == "index" else [])

    rows = 12 if move == "index" else 24 if move == "matrices" else 14
    assert moved(function, inputs(rows)[:3], sm=100)[0] == 1


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_te"])
@pytest.mark.parametrize("largest", [torch.nan, -torch.inf, 0.0, 2.0**-130])
def test_bits_of_outer_scales(fmt, largest):
    """Of the moved rows' largest magnitude, not of a row's that the index leaves out."""
    x, index, *_ = inputs()
    x[1], x[2, 3] = 1e3, largest
    index = torch.tensor([2, 3, 2] * 8) if largest else torch.full_like(index, 4)
    x[4] = 0
    assert moved(lambda x, index: quantize(by_index(x, index), fmt), (x, index))[0] == 1


@pytest.mark.parametrize("options", ["static", "hadamard", "grouped"])
def test_bits_of_options(options):
    """A static scale, though it is made behind the move; the transform along rows; groups of rows."""

    def function(x, index, offs):
        rows = by_index(x, index)
        if options == "static":
            return quantize(rows, "nvfp4", outer=aten.full([], 0.01, dtype=torch.float32, device=x.device))
        given = {"offs": offs} if options == "grouped" else {"hadamard": True}
        return quantize(rows, "nvfp4_one_level", **given)

    assert moved(function, inputs()[:3])[0] == 1


def test_chains_and_several_quantisers():
    """From the last move to the first; two quantisers, the second of which the tensor has already."""

    def function(x, index, offs):
        rows = aten.index_select(aten.cat([x, x]).view(4, -1, K), 0, index % 4)
        return *quantize(x, "nvfp4_one_level"), *quantize(rows.view(-1, K), "mxfp4"), *quantize(rows, "nvfp4_one_level")

    x, index, offs, _ = inputs()
    count, graph = moved(function, (x, index, offs))
    assert count == 2
    largest_of_chain = lambda x, index: quantize(by_index(aten.cat([x, x]), index), "nvfp4")  # noqa: E731
    assert moved(largest_of_chain, (x, index))[0] == 1, "the second move's rows are read for the first one's scale"
    assert len(graph.find_nodes(op="call_function", target=QUANTIZE)) == 2, "one for each format"


# ---------------------------------------------------------------- what stays


def pointwise(x, index, *_):
    return quantize(by_index(x * 2, index), "nvfp4_one_level")


def read_elsewhere(x, index, *_):
    rows = by_index(x, index)
    return *quantize(rows, "nvfp4_one_level"), rows + 1


def returned(x, index, *_):
    rows = by_index(x, index)
    return *quantize(rows, "nvfp4_one_level"), rows.view(2, -1, K)


def given_each(x, index, *_):
    outer = x.new_full((2 * ROWS, 1), 0.01, dtype=torch.float32)
    return quantize(by_index(x, index), "nvfp4_rowwise", outer=outer)


def amax_of_each(x, index, *_):
    amax = x.new_full((2 * ROWS, 1), 3.0, dtype=torch.float32)
    return quantize(by_index(x, index), "nvfp4_rowwise", amax=amax)


def outer_of_rows(x, index, *_):
    """The scale is computed behind the move."""
    rows = by_index(x, index)
    return quantize(rows, "nvfp4", outer=index.sum() * 0.01)


def asked(fmt="nvfp4_one_level", dim=-1, **options):
    return lambda x, index, *_: quantize(by_index(x, index), fmt, dim, **options)


STAYS = {
    "amax of a group": lambda x, index, offs, _: quantize(by_index(x, index), "nvfp4", offs=offs),
    "columns": asked(dim=-2),
    "both": asked(dim=[-1, -2]),
    "amax of transformed rows": asked("nvfp4", hadamard=True),
    "square": asked("mxfp8_32x32"),
    "stochastic": lambda x, index, *_: quantize(by_index(x, index), "mxfp4", seed=aten.select(index, 0, 0)),
    "swept": asked(scale_rule="mse"),
    "matrices": lambda x, index, *_: quantize(by_index(x.view(2, -1, K), index % 2), "mxfp8", each_matrix=True),
    "prologue": lambda x, index, *_: quantize(by_index(x, index), "mxfp8", operands=[by_index(x + 1, index)],
                                              prologue=["mul aux0 aux1"], dtype=torch.bfloat16),
    "few rows": lambda x, index, *_: quantize(by_index(x, aten.slice(index, 0, 1, ROWS)), "nvfp4_one_level"),
    "elements": lambda x, index, *_: quantize(aten.index.Tensor(x, [None, index]), "nvfp4_one_level"),
    "elements gathered": lambda x, index, *_: quantize(
        aten.gather(x, 0, aten.maximum(index.view(-1, 1), by_index(x, index).long().abs() % ROWS)), "nvfp4_one_level"
    ),
    "halves of rows": lambda x, index, *_: quantize(
        aten.gather(x, 0, index.view(-1, 1).expand(-1, K // 2)), "nvfp4_one_level"
    ),
    "along rows": lambda x, index, *_: quantize(
        aten.gather(x, 1, aten.slice(index, 0, 0, ROWS).view(-1, 1).expand(-1, K)), "nvfp4_one_level"
    ),
    "negative zeros put in": lambda x, index, *_: quantize(zeroed(index > 4, x, index, -0.0), "nvfp4_one_level"),
    "elements zeroed": lambda x, index, *_: quantize(zeroed(index > 4, x, index, width=K), "nvfp4_one_level"),
    "columns side by side": lambda x, *_: quantize(aten.cat([x, x], 1), "nvfp4_one_level"),
    "columns selected": lambda x, index, *_: quantize(aten.index_select(x, -1, index), "nvfp4_one_level"),
    "reshaped": lambda x, index, *_: quantize(by_index(x, index).view(-1, 2 * K), "nvfp4_one_level"),
    "pointwise": pointwise, "read elsewhere": read_elsewhere, "returned": returned, "given each": given_each,
    "amax of each": amax_of_each, "outer of rows": outer_of_rows,
}  # fmt: skip


@pytest.mark.parametrize("function", STAYS.values(), ids=STAYS)
def test_what_stays(function):
    assert moved(function, inputs())[0] == 0


def test_rows_of_a_pointwise_result_that_is_in_memory():
    def function(x, index):
        doubled = x * 2
        return *quantize(by_index(doubled, index), "nvfp4_one_level"), doubled

    assert moved(function, inputs()[:2])[0] == 1


def test_unknown_sizes_and_short_rows():
    """A block of 32 elements and its scale are 33 bytes, a row of 16 bf16 numbers is 32."""
    assert moved(asked(), inputs()[:2], any_rows=True)[0] == 0
    for k, count in ((16, 0), (32, 1)):
        graph = traced(lambda x: torch.ops.fp4compile.quantize(gathered(x), "mxfp8")[:2], inputs(k=k)[:1]).graph
        assert quantize_before_move(graph) == count


def exchanged(x):
    return c10d.wait_tensor(c10d.all_to_all_single(x, [x.shape[0]], [x.shape[0]], "0"))


@pytest.mark.parametrize(("fmt", "device", "also", "count"), [
    ("nvfp4_rowwise", "cuda", False, 3),
    ("mxfp8", "cpu", False, 0),  # C++ has no such scales
    ("nvfp4", "cuda", False, 0),  # the rows that arrive make its outer scale
    ("nvfp4_rowwise", "cuda", True, 0),
])  # fmt: skip
def test_exchanged_rows_that_are_sorted(fmt, device, also, count):
    """How many tokens arrive is unknown. They are quantised before they are sorted if before the exchange, too."""

    def function(x, index):
        rows = exchanged(x)
        ordered = by_index(
            aten.cat([rows, aten.full_like(aten.slice(x, 0, 0, 1), 0)]).view(1, -1, K).view(-1, K), index
        )
        return *torch.ops.fp4compile.quantize(ordered, fmt)[:2], ordered.shape[0], *((rows + 1,) if also else ())

    graph = traced(function, inputs()[:2], device, any_rows=True).graph
    with on(device):
        assert quantize_before_move(graph) == count
    graph.lint()


@pytest.mark.parametrize(("fmt", "count"), [("nvfp4", 0), ("nvfp4_one_level", 2)])
@pytest.mark.parametrize("rows", [2, 24])
def test_all_processes_gather_the_same(fmt, count, rows):
    """However many of the gathered rows each of them takes, which would not pay for few."""

    def function(x, index):
        return torch.ops.fp4compile.quantize(by_index(gathered(x), aten.slice(index, 0, 0, rows)), fmt)[:2]

    graph = traced(function, inputs()[:2]).graph
    with on("cuda"):
        assert quantize_before_move(graph) == count


@pytest.mark.parametrize("fmt", ["nvfp4_one_level", "nvfp4", "nvfp4_rowwise"])
def test_values_are_moved(fmt):
    """As many bytes as before, of fewer rows that are quantised."""
    assert moved(asked(fmt, values=[-1]), inputs()[:2])[0] == 1


@pytest.mark.parametrize("fmt", ["nvfp4_one_level", "mxfp8"])
def test_values_are_moved_of_what_others_read_as_codes(fmt):
    def function(x, index):
        return quantize(x, fmt), quantize(by_index(x, index), fmt, values=[-1])

    count, graph = moved(function, inputs()[:2])
    assert (count, len(graph.find_nodes(op="call_function", target=QUANTIZE))) == (1, 2)


def test_sizes_that_are_computed_late():
    """Of a reshape behind a collective, whose number of rows is unknown."""

    def quantised(x):
        return torch.ops.fp4compile.quantize(gathered(x).view(x.shape[0], 2, K), "mxfp8")[:2]

    graph = traced(quantised, inputs()[:1], any_rows=True).graph
    assert quantize_before_move(graph) == 1
    graph.lint()


@pytest.mark.parametrize(("fmt", "layout", "more", "launches"), [
    ("nvfp4_one_level", "linear", 0, 1),
    ("nvfp4_one_level", "swizzled", -2 * 2 * ROWS * 4, 2),  # scales are read and written once more
    ("nvfp4", "linear", ROWS * 2 * K, 2),  # the amax of half of the rows
])  # fmt: skip
def test_launches_have_a_price(fmt, layout, more, launches, monkeypatch):
    """Codes and scales, 36 bytes a row, take a launch more than rows of 2 K bytes; a second one lays scales out, or
    finds the largest of the moved rows."""
    saved = 2 * ROWS * (3 * 2 * K - 36) - ROWS * (2 * K + 36) + more
    for price, count in ((saved // launches, 1), (saved // launches + 1, 0)):
        monkeypatch.setattr(tested, "LAUNCH_BYTES", price)
        assert moved(asked(fmt, layout=layout), inputs()[:2], sm=100)[0] == count
        assert moved(asked(fmt, layout=layout), inputs()[:2], device="cpu")[0] == 1


def test_what_stays_on_old_gpus():
    """Triton has no FP8 there, neither of codes nor of block scales."""
    for sm, count in ((80, 0), (89, 1)):
        assert moved(asked(), inputs()[:2], sm=sm)[0] == count


def test_what_stays_on_a_cpu():
    """E8M0 scales, which Inductor's C++ kernels cannot move; rows that a mask selects, of which there may be few."""
    x, index, *_ = inputs()
    assert moved(asked(), (x, index), device="cpu")[0] == 1
    masked = lambda x, mask: torch.ops.fp4compile.quantize(by_index(x, mask), "nvfp4_one_level")[:2]  # noqa: E731
    assert moved(masked, (x, index[:ROWS] > 1), device="cpu")[0] == 0
    assert moved(asked("mxfp8"), (x, index), device="cpu")[0] == 0


def test_operands_that_become_values_wait():
    """On Hopper the product reads 16-bit values, which `fake_quantize` lets the quantiser write before they move."""
    fmt = "nvfp4_one_level"

    def product(x, index, w, scales):
        a = quantize(by_index(x, index), fmt)
        return torch.ops.fp4compile.scaled_mm(*a, None, w, scales, None, f"{fmt} @ {fmt} -> bfloat16")

    x, index, *_ = inputs()
    x = x.repeat(16, 1)
    count, graph = moved(product, (x, index.repeat(16), *quantize(x, fmt)))
    assert count == 0
    with on("cuda"):
        assert fake_quantize(graph) == 1 and quantize_before_move(graph) == 1
    (values,) = graph.find_nodes(op="call_function", target=QUANTIZE)
    assert values.args[0].op == "placeholder" and values.meta["val"][0].dtype == torch.float16


# ---------------------------------------------------------------- compiled models


class Experts(nn.Module):
    """Two of four experts for each token, and an expert for all tokens."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, K))
        self.shared = nn.Linear(K, 32)

    def forward(self, x, token, offs):
        return F.grouped_mm(x[token], self.up.transpose(1, 2), offs=offs), self.shared(x)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.linear = nn.Embedding(16, K), nn.Linear(K, 32)

    def forward(self, tokens):
        return self.linear(self.embed(tokens))


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(K, 32)

    def forward(self, x, y):
        return self.linear(torch.cat([x, y]))


MODELS = {
    "experts": (
        Experts,
        (inputs()[0], torch.randperm(2 * ROWS) // 2, torch.tensor([3, 3, 14, 20], dtype=torch.int32)),
        "nvfp4_one_level",
    ),
    "table": (Table, (torch.randint(16, (2, 20)),), "float8_rowwise"),
    "joined": (Joined, (torch.randn(8, K).bfloat16(), torch.randn(5, K).bfloat16()), "nvfp4_one_level"),
}


@pytest.mark.parametrize("name", MODELS)
def test_bits_of_compiled_models(name, monkeypatch):
    torch.manual_seed(0)
    model, args, recipe = MODELS[name]
    model, found = model().bfloat16(), []
    for disabled in ((), ("quantize_before_move",)):
        torch._dynamo.reset()
        monkeypatch.setattr(fp4compile.config, "disabled_passes", disabled)
        backend = fp4compile.backend(recipe, min_m=1, min_n=1, min_k=1)
        with torch.no_grad():
            found.append(torch.compile(model, backend=backend)(*args))
        assert backend.report.counts.get("quantize_before_move") == (None if disabled else 1)
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, found), strict=True):
        assert torch.equal(one, other) and one.isfinite().all() and one.count_nonzero()
