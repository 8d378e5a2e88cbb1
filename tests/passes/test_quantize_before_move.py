"""Rows that are moved are quantised before: which moves, and that no bit of codes and scales changes.

Graphs are traced on fake CUDA tensors, and run on a CPU.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed._functional_collectives  # shapes of the collectives
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fp4compile
from fp4compile import hardware
from fp4compile.hardware import Target
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes import quantize_before_index as tested
from fp4compile.passes.fake_quantize import fake_quantize
from fp4compile.passes.quantize_before_gather import quantize_before_gather
from fp4compile.passes.quantize_before_index import quantize_before_index
from fp4compile.templates.launch import dry_run
from tests.helpers.absent_gpu import symbolic
from tests.helpers.arguments import times
from tests.helpers.graphs import summary

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
ROWS, K = 12, 64
FORMATS = ["mxfp8", "mxfp4", "nvfp4_one_level", "nvfp4_rowwise", "float8_rowwise"]


@pytest.fixture(autouse=True)
def launches_cost_nothing(monkeypatch):
    monkeypatch.setattr(tested, "LAUNCH_BYTES", 0)


def quantize(x, fmt, dim=-1, **options):
    """The results that are there."""
    return [each for each in torch.ops.fp4compile.quantize(x, fmt, dim, **options) if each.shape != (0,)]


def inputs(rows=ROWS, k=K):
    """x, an index of more rows than x has, and offsets with rows of no group behind them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, k, generator=generator) * 2.0 ** torch.arange(rows).fmod(7).view(-1, 1)
    index = torch.randint(rows, (2 * rows,), generator=generator)
    return x.bfloat16(), index, torch.tensor([5, 5, 20], dtype=torch.int32)


def on(device, sm=90):
    return dry_run(Target(sm)) if device == "cuda" else nullcontext()


def traced(function, values, device="cuda", any_rows=False):
    """any_rows: whether the first size of the first tensor is symbolic."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, on(device):
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in values]
        if any_rows:
            sizes = symbolic(mode.shape_env, ROWS), *values[0].shape[1:]
            fakes[0] = torch.empty(sizes, dtype=values[0].dtype, device=device)
        return make_fx(function)(*fakes)


def moved(function, values, device="cuda", sm=90, **options):
    """(how many moves the pass changes, the graph); the graph's results must keep their bits."""
    graph_module = traced(function, values, device, **options)
    with on(device, sm):
        count = quantize_before_index(graph_module.graph)
    graph_module.graph.lint()
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


MOVES = {
    "rows": by_index,
    "rows of a matrix": lambda x, index: aten.index.Tensor(x.view(1, -1, K), [None, index]).clone().view(-1, K),
    "sequences": lambda x, index: aten.cat(aten.split(by_index(x, index).view(4, -1, K), 2), 1).view(-1, K),
}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_bits_of_moved_rows(move, fmt):
    assert moved(lambda x, index: quantize(move(x, index), fmt), inputs()[:2])[0] == 1


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_bits_of_swizzled_scales(move):
    """Of rows, of a batch of matrices, of groups of rows: scales are moved linear and laid out behind the move."""

    def function(x, index, offs):
        rows, options = move(x, index), {"layout": "swizzled"}
        found = quantize(rows, "nvfp4_one_level", **options) + quantize(rows.view(1, -1, K), "mxfp8", **options)
        return found + quantize(rows, "nvfp4_rowwise", offs=offs, **options)

    assert moved(function, inputs(), sm=100)[0] == 1


@pytest.mark.parametrize("options", ["static", "hadamard", "grouped", "values"])
def test_bits_of_options(options):
    """A static scale, though it is made behind the move; the transform along rows; groups of rows; 16-bit values."""

    def function(x, index, offs):
        rows = by_index(x, index)
        if options == "static":
            return quantize(rows, "nvfp4", outer=aten.full([], 0.01, dtype=torch.float32, device=x.device))
        given = {"grouped": {"offs": offs}, "hadamard": {"hadamard": True}, "values": {"values": [-1]}}[options]
        return quantize(rows, "nvfp4_one_level", **given)

    assert moved(function, inputs())[0] == 1


def test_chains_and_several_quantisers():
    """From the last move to the first; two quantisers, the second of which the tensor has already."""

    def function(x, index, offs):
        rows = by_index(by_index(x, aten.cat([index, index])).view(8, -1, K), index % 8)
        return *quantize(x, "nvfp4_one_level"), *quantize(rows.view(-1, K), "mxfp4"), *quantize(rows, "nvfp4_one_level")

    count, graph = moved(function, inputs())
    assert count == 2
    assert len(graph.find_nodes(op="call_function", target=QUANTIZE)) == 2, "one for each format"


# ---------------------------------------------------------------- what stays


def read_elsewhere(x, index, *_):
    rows = by_index(x, index)
    return *quantize(rows, "nvfp4_one_level"), rows + 1


def returned(x, index, *_):
    rows = by_index(x, index)
    return *quantize(rows, "nvfp4_one_level"), rows.view(2, -1, K)


def given_each(name, **options):
    def function(x, index, *_):
        given = x.new_full((2 * ROWS, 1), 0.01, dtype=torch.float32)
        return quantize(by_index(x, index), "nvfp4_rowwise", **{name: given})

    return function


def outer_of_rows(x, index, *_):
    """The scale is computed behind the move."""
    rows = by_index(x, index)
    return quantize(rows, "nvfp4", outer=index.sum() * 0.01)


def asked(fmt="nvfp4_one_level", dim=-1, **options):
    return lambda x, index, *_: quantize(by_index(x, index), fmt, dim, **options)


STAYS = {
    "amax": asked("nvfp4"), "amax of a group": lambda x, index, offs: quantize(by_index(x, index), "nvfp4", offs=offs),
    "columns": asked(dim=-2),
    "both": asked(dim=[-1, -2]),
    "square": asked("mxfp8_32x32"),
    "stochastic": lambda x, index, *_: quantize(by_index(x, index), "mxfp4", seed=aten.select(index, 0, 0)),
    "swept": asked(scale_rule="mse"),
    "matrices": lambda x, index, *_: quantize(by_index(x.view(2, -1, K), index % 2), "mxfp8", each_matrix=True),
    "prologue": lambda x, index, *_: quantize(by_index(x, index), "mxfp8", operands=[by_index(x + 1, index)],
                                              prologue=["mul aux0 aux1"], dtype=torch.bfloat16),
    "few rows": lambda x, index, *_: quantize(by_index(x, aten.slice(index, 0, 1, ROWS)), "nvfp4_one_level"),
    "elements": lambda x, index, *_: quantize(aten.index.Tensor(x, [None, index]), "nvfp4_one_level"),
    "reshaped": lambda x, index, *_: quantize(by_index(x, index).view(-1, 2 * K), "nvfp4_one_level"),
    "pieces in another order": lambda x, index, *_: quantize(
        aten.cat(list(reversed(aten.split(by_index(x, index), ROWS)))), "nvfp4_one_level"
    ),
    "computed while they are moved": lambda x, index, *_: quantize(by_index(x * 2, index), "nvfp4_one_level"),
    "read elsewhere": read_elsewhere, "returned": returned, "outer of each": given_each("outer"),
    "amax of each": given_each("amax"), "outer of rows": outer_of_rows,
}  # fmt: skip


@pytest.mark.parametrize("function", STAYS.values(), ids=STAYS)
def test_what_stays(function):
    assert moved(function, inputs())[0] == 0


def test_rows_of_a_pointwise_result_that_is_in_memory():
    def function(x, index):
        doubled = x * 2
        return *quantize(by_index(doubled, index), "nvfp4_one_level"), doubled

    assert moved(function, inputs()[:2])[0] == 1


@pytest.mark.parametrize(("layout", "more", "launches"), [
    ("linear", 0, 1),
    ("swizzled", -2 * 2 * ROWS * 4, 2),  # scales are read and written once more
])  # fmt: skip
def test_launches_have_a_price(layout, more, launches, monkeypatch):
    """Codes and scales, 36 bytes a row, take a launch more than rows of 2 K bytes; a second one lays scales out."""
    saved = 2 * ROWS * (3 * 2 * K - 36) - ROWS * (2 * K + 36) + more
    for price, count in ((saved // launches, 1), (saved // launches + 1, 0)):
        monkeypatch.setattr(tested, "LAUNCH_BYTES", price)
        assert moved(asked(layout=layout), inputs()[:2], sm=100)[0] == count
        assert moved(asked(layout=layout), inputs()[:2], device="cpu")[0] == 1


def test_what_stays_on_old_gpus():
    """Triton has no FP8 there, neither of codes nor of block scales."""
    for sm, count in ((80, 0), (89, 1)):
        assert moved(asked(), inputs()[:2], sm=sm)[0] == count


def test_what_stays_on_a_cpu():
    """E8M0 scales, which Inductor's C++ kernels cannot move; rows that a mask selects, of which there may be few."""
    x, index, _ = inputs()
    assert moved(asked(), (x, index), device="cpu")[0] == 1
    masked = lambda x, mask: torch.ops.fp4compile.quantize(by_index(x, mask), "nvfp4_one_level")[:2]  # noqa: E731
    assert moved(masked, (x, index[:ROWS] > 1), device="cpu")[0] == 0
    assert moved(asked("mxfp8"), (x, index), device="cpu")[0] == 0
    assert moved(asked(), (x, index), any_rows=True)[0] == 0


def test_values_are_moved():
    """On Hopper the product reads 16-bit values, which `fake_quantize` lets the quantiser write before they move."""
    fmt = "nvfp4_one_level"

    def product(x, index, w, scales):
        return times((*quantize(by_index(x, index), fmt), None, fmt), (w, scales, None, fmt))

    x, index, _ = inputs()
    x = x.repeat(16, 1)
    graph = traced(product, (x, index.repeat(16), *quantize(x, fmt))).graph
    with on("cuda"):
        assert fake_quantize(graph) == 1 and quantize_before_index(graph) == 1
    (values,) = graph.find_nodes(op="call_function", target=QUANTIZE)
    assert values.args[0].op == "placeholder" and values.meta["val"][0].dtype == torch.float16


@pytest.mark.parametrize("fmt", ["nvfp4_one_level", "mxfp8"])
def test_values_are_moved_of_what_others_read_as_codes(fmt):
    def function(x, index):
        return quantize(x, fmt), quantize(by_index(x, index), fmt, values=[-1])

    count, graph = moved(function, inputs()[:2])
    assert (count, len(graph.find_nodes(op="call_function", target=QUANTIZE))) == (1, 2)


# ---------------------------------------------------------------- gathers


def gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0"))


def counted(function, k=K, device="cpu", **options):
    """How many gathers of codes there are; a graph without one is as it was."""
    graph, before = traced(function, inputs(k=k)[:1], device, **options).graph, None
    before = summary(graph, everything=True)
    with on(device):
        count = quantize_before_gather(graph)
    graph.lint()
    assert (summary(graph, everything=True) == before) == (count == 0)
    return count


def of_gathered(fmt="mxfp8", dim=-1):
    return lambda x: torch.ops.fp4compile.quantize(gathered(x), fmt, dim)[:2]


def gathered_and_read(x):
    rows = gathered(x)
    return *quantize(rows, "mxfp8")[:2], rows.sum()


def gathered_twice(x):
    started = c10d.all_gather_into_tensor(x, 2, "0")
    return *quantize(c10d.wait_tensor(started), "mxfp8")[:2], c10d.wait_tensor(started).sum()


def gathered_flat(x):
    return quantize(gathered(x.view(-1)), "mxfp8")[:2]


def test_codes_are_gathered_where_they_are_fewer_bytes():
    """A block of 32 elements and its scale are 33 bytes, a row of 16 bf16 numbers is 32. Rows may be unknown."""
    assert [counted(of_gathered(), k) for k in (16, 32)] == [0, 1]
    late = lambda x: torch.ops.fp4compile.quantize(gathered(x).view(x.shape[0], 2, K), "mxfp8")[:2]  # noqa: E731
    assert counted(late, any_rows=True) == 1, "the sizes of a reshape are computed behind the gather"
    for function in (of_gathered("nvfp4"), of_gathered(dim=-2), gathered_and_read, gathered_twice, gathered_flat):
        assert counted(function) == 0


def test_only_a_slow_link_is_worth_a_second_collective(monkeypatch):
    """Not known to be slow: GPUs one of which reads another one's memory, or of which the process has one."""
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, reading, slow in ((1, None, False), (2, None, True), (3, (0, 2), False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b, reading=reading: (a, b) == reading)
        hardware._reads_other_memory.cache_clear()
        assert (hardware.gathers_through_host(), counted(of_gathered(), device="cuda")) == (slow, slow)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert counted(of_gathered(), device="cuda") == 1
    hardware._reads_other_memory.cache_clear()


# ---------------------------------------------------------------- compiled models


class Experts(nn.Module):
    """Two of four experts for each token, and an expert for all tokens."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, K))
        self.shared = nn.Linear(K, 32)

    def forward(self, x, token, offs):
        return F.grouped_mm(x[token], self.up.transpose(1, 2), offs=offs), self.shared(x)


def test_bits_of_a_compiled_model(monkeypatch):
    torch.manual_seed(0)
    model, found = Experts().bfloat16(), []
    args = inputs()[0], torch.randperm(2 * ROWS) // 2, torch.tensor([3, 3, 14, 20], dtype=torch.int32)
    for disabled in ((), ("quantize_before_index",)):
        torch._dynamo.reset()
        monkeypatch.setattr(fp4compile.config, "disabled_passes", disabled)
        backend = fp4compile.backend("nvfp4_one_level", min_m=1, min_n=1, min_k=1)
        with torch.no_grad():
            found.append(torch.compile(model, backend=backend)(*args))
        assert backend.report.counts.get("quantize_before_index") == (None if disabled else 1)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.isfinite().all() and one.count_nonzero()
