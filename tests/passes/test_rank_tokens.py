"""Top-ks, sorts and counts of tokens by comparing all pairs: torch's results, and where a graph has them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import compiled_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp4compile
from fp4compile.analysis.gradients import in_training_step
from fp4compile.hardware import Target
from fp4compile.passes import manager
from fp4compile.passes import rank_tokens as file
from fp4compile.passes.rank_tokens import ends_by_counting, largest_by_counting, rank_tokens, sort_by_counting
from fp4compile.templates.launch import dry_run
from tests.helpers.arguments import times
from tests.helpers.kernels import gpu
from tests.helpers.simulated_gpu import simulated

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("values", [1, 4, 200], ids=lambda values: f"{values} values")
def test_is_a_stable_sort(values, dtype):
    keys = torch.randint(0, values, (600,), generator=torch.Generator().manual_seed(values)).to(dtype)
    if dtype.is_signed:
        keys = keys - 2
    wanted = torch.sort(keys, stable=True)
    got = sort_by_counting(keys)
    assert torch.equal(got[0], wanted.values) and torch.equal(got[1], wanted.indices)
    assert torch.equal(got[2], wanted.indices.argsort())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "count"), [((9, 32), 4), ((2, 5, 8), 2), ((7,), 7), ((3, 1), 1)], ids=str)
@pytest.mark.parametrize("kind", ["normal", "few values", "not finite"])
def test_is_a_top_k(kind, shape, count, dtype):
    """The values of torch's top-k, and the places of a stable sort: of equal scores, and of NaNs, the first."""
    generator = torch.Generator().manual_seed(len(shape))
    scores = torch.randn(shape, generator=generator)
    if kind != "normal":
        scores = (2 * scores).round()
    if kind == "not finite":
        scores[scores == 0], scores[scores == 1], scores[scores == -1] = math.nan, math.inf, -math.inf
    scores = scores.to(dtype)
    values, places = largest_by_counting(scores, count)
    wanted = torch.sort(scores, stable=True, descending=True, dim=-1)
    assert torch.equal(places, wanted.indices[..., :count])
    for one in (wanted.values[..., :count], torch.topk(scores, count).values):
        assert torch.equal(values.nan_to_num(nan=12345.0), one.nan_to_num(nan=12345.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("groups", [2, 8, 100])
def test_is_the_running_sum_of_a_histogram(groups, dtype):
    """ATen counts the numbers from 0 to the last group, and no others; for integers it divides as Python does."""
    numbers = torch.randint(-3, groups + 3, (500,), generator=torch.Generator().manual_seed(groups)).clamp(max=120)
    numbers = (numbers.abs() if dtype == torch.uint8 else numbers).to(dtype)
    bins = [min(each * groups // (groups - 1), groups - 1) for each in numbers.tolist() if 0 <= each <= groups - 1]
    counts = torch.tensor([bins.count(each) for each in range(groups)])
    assert torch.equal(ends_by_counting(numbers, groups), counts.cumsum(0).int())
    assert torch.equal(counts.float(), torch.histc(numbers.float(), groups, 0, groups - 1))


def routed(x, scores, codes, scales, outer, choose, sort, bins):
    """The tokens times the matrices of their experts, as transformers chooses and sorts them, in their own order.

    bins: number, first and last of the histogram.
    """
    ids = choose(scores)
    numbers, order = sort(ids)
    offs = torch.cumsum(torch.histc(numbers.int(), *bins), 0, dtype=torch.int32).narrow(0, 0, 8)
    weight = (codes, scales, outer, "nvfp4")
    result = times(
        (aten.index.Tensor(x, [order // 4]), None, None, None), weight, out_dtype=x.dtype, offs=offs, rows=len(ids)
    )
    places = torch.arange(len(order), device=order.device)
    back = aten.index_put.default(torch.empty_like(order), [order], places)
    return aten.index.Tensor(result, [back])


def graph_of(sort=torch.sort, tokens=64, dtype=torch.int64, choose=None, trained=False, bins=(8, 0, 7)):
    """What `rank_tokens` finds in a graph of so many pairs of token and expert, and the graph after it.

    choose: finds the experts in scores [tokens / 4, 8]; by default they are given.
    """
    given = (tokens,), dtype
    if choose is not None:
        given = (tokens // 4, 8), torch.bfloat16
    with FakeTensorMode(), enable_python_dispatcher(), dry_run(Target(90)):

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        made = [empty(tokens // 4, 256), empty(*given[0], dtype=given[1]), empty(8, 256, 128, dtype=torch.uint8),
                empty(8, 256, 16, dtype=torch.float8_e4m3fn), empty(dtype=torch.float32)]  # fmt: skip
        function = lambda *args: routed(*args, choose or (lambda ids: ids), sort, bins)  # noqa: E731
        graph = make_fx(function, decomposition_table=select_decomp_table())(*made).graph
        if trained:
            list(graph.find_nodes(op="placeholder"))[-1].name = "tangents_1"
        graph.eliminate_dead_code()
        found = rank_tokens(graph)
        graph.lint()
    return found, [node.target for node in graph.nodes]


SORTS = {
    "sort": torch.sort, "stable": lambda ids: torch.sort(ids, stable=True),
    "descending": lambda ids: torch.sort(ids, descending=True), "dimension": lambda ids: torch.sort(ids, 0, False),
}  # fmt: skip
ATEN_SORTS = (aten.sort.default, aten.sort.stable)


@pytest.mark.parametrize(("sort", "tokens", "dtype", "trained", "found"), [
    ("sort", 1024, torch.int64, False, True), ("stable", 8192, torch.int32, False, True),
    ("dimension", 516, torch.int64, False, True), ("sort", 64, torch.int64, False, True),
    ("descending", 1024, torch.int64, False, False), ("sort", 60, torch.int64, False, False),
    ("sort", 8196, torch.int64, False, False), ("sort", 1024, torch.float32, False, False),
    ("sort", 516, torch.int64, True, True), ("sort", 512, torch.int64, True, False),
])  # fmt: skip
def test_which_sorts_are_replaced(sort, tokens, dtype, trained, found):
    """Ascending sorts of integers, where comparing takes less; in training, of more numbers than Inductor sorts.

    The inverse of the order is known then, and ends of groups do not wait for the sort.
    """
    count, targets = graph_of(SORTS[sort], tokens, dtype, trained=trained)
    assert found == (not any(each in ATEN_SORTS for each in targets))
    assert targets.count(aten.index_put.default) == 1
    assert aten.histc.default not in targets and aten.cumsum.default not in targets
    assert count == found + 1


def test_a_sort_that_the_histogram_alone_reads_is_erased():
    count, targets = graph_of(lambda ids: (torch.sort(ids).values, torch.arange(len(ids), device=ids.device)))
    assert count == 1 and not any(each in ATEN_SORTS for each in targets)


CHOICES = {
    "top-k": lambda scores: torch.topk(scores, 4, dim=-1).indices.flatten(),
    "not sorted": lambda scores: torch.topk(scores, 4, dim=1, sorted=False).indices.flatten(),
    "with softmax": lambda scores: torch.topk(scores.float().softmax(-1), k=4).indices.flatten(),
    "smallest": lambda scores: torch.topk(scores, 4, largest=False).indices.flatten(),
    "of a column": lambda scores: torch.topk(scores, 2, dim=0).indices.flatten().repeat(len(scores) // 4),
    "of integers": lambda scores: torch.topk(scores.to(torch.int32), 4).indices.flatten(),
}


@pytest.mark.parametrize(("choose", "tokens", "trained", "found"), [
    ("top-k", 16, False, True), ("not sorted", 16, False, True), ("with softmax", 16, False, True),
    ("top-k", 4 * 2**22 // 64, False, True), ("top-k", 4 * 2**22 // 64 + 4, False, False), ("top-k", 16, True, False),
    ("smallest", 16, False, False), ("of a column", 16, False, False), ("of integers", 16, False, False),
])  # fmt: skip
def test_which_top_ks_are_replaced(choose, tokens, trained, found):
    """Those of the largest scores of few experts, up to so many pairs of scores; none in training."""
    count, targets = graph_of(tokens=tokens, choose=CHOICES[choose], trained=trained)
    assert found == (aten.topk.default not in targets)
    assert count == found + (tokens <= file.MOST_COUNTED)


@pytest.mark.parametrize(("bins", "tokens", "found"), [
    ((8, 0, 7), 64, True), ((9, 0, 8), 64, True), ((8, 0, 8), 64, False), ((8, 1, 8), 64, False),
    ((9, 0, 7), 64, False), ((8, 0, 7), 16384, True), ((8, 0, 7), 16388, False),
])  # fmt: skip
def test_which_histograms_are_counted(bins, tokens, found):
    """Those with a bin for each number from 0 on, up to so many numbers."""
    assert found == (aten.histc.default not in graph_of(bins=bins, tokens=tokens)[1])


def test_sorts_that_no_offsets_depend_on_stay():
    with FakeTensorMode(), enable_python_dispatcher(), dry_run(Target(90)):
        graph = make_fx(torch.sort)(torch.empty(1024, dtype=torch.int64, device="cuda")).graph
        assert rank_tokens(graph) == 0


def test_deterministic_algorithms_keep_atens_sort():
    torch.use_deterministic_algorithms(True)
    try:
        assert graph_of(choose=CHOICES["top-k"])[0] == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_graphs_of_a_training_step_are_known(monkeypatch):
    """Inductor's forward graph, which saves values, and its backward graph; not an inference graph."""
    found = []
    monkeypatch.setattr(manager, "fuse", lambda graph, disabled: (found.append(in_training_step(graph)), ({}, {}))[1])
    monkeypatch.setattr(fp4compile.config, "disabled_passes", ("inplace", "lower"))
    model, x = torch.nn.Linear(32, 32), torch.randn(4, 32)
    compiled = torch.compile(model, backend=fp4compile.backend("mxfp8"))
    compiled(x).sum().backward()
    assert found == [True, True]
    with torch.no_grad():
        compiled(x)
    assert found == [True, True, False]
    loss = compiled(x).sum()
    with compiled_autograd._enable(torch.compile(backend=fp4compile.backend("mxfp8"))):
        loss.backward()
    assert len(found) > 3 and all(found[3:])


class Experts(nn.Module):
    """Experts as in transformers: chosen by scores, and with the results of tokens put back in order."""

    def __init__(self, count):
        super().__init__()
        self.count, self.weight = count, nn.Parameter(torch.randn(count, 128, 256))

    def forward(self, x, scores):
        values, ids = torch.topk(scores, 4, dim=-1)
        numbers, order = torch.sort(ids.flatten())
        # As transformers does: CPUs have no histogram of integers, and the pass replaces none of floats.
        numbers = numbers.float() if numbers.device.type == "cpu" else numbers.int()
        counts = torch.histc(numbers, bins=self.count, min=0, max=self.count - 1)
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        y = F.grouped_mm(x[order // 4], self.weight.mT, offs=offs)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return y[back].view(len(x), 4, -1) * values.unsqueeze(-1).to(y.dtype)


def results_with_and_without(model, x, scores, found, monkeypatch):
    """Of the model as it is, and without the pass, which has to replace so many nodes."""
    for disabled in ((), ("rank_tokens",)):
        monkeypatch.setattr(fp4compile.config, "disabled_passes", disabled)
        torch._dynamo.reset()
        backend = fp4compile.backend("nvfp4_weight_only", strict=True)
        yield torch.compile(model, backend=backend)(x, scores)
        assert backend.report.counts.get("rank_tokens") == (None if disabled else found)


def operands(tokens, experts, device="cpu", dtype=torch.float32):
    """Rows, and scores, no two of which are equal in a row."""
    scores = torch.rand(tokens, experts, device=device).argsort(-1) / experts + 0.25
    return torch.randn(tokens, 256, device=device).bfloat16(), scores.to(dtype)


@pytest.mark.slow
def test_bits_in_the_simulator(monkeypatch):
    """What Inductor writes for 64 pairs of token and expert, for compute capability 9.0, and torch's own on a CPU."""
    model, given = Experts(8).bfloat16().requires_grad_(False), operands(16, 8, dtype=torch.bfloat16)
    with simulated(monkeypatch, 90) as gpu:
        results = list(results_with_and_without(model, *given, 2, monkeypatch))
    assert torch.equal(*results) and results[0].isfinite().all()
    assert sum("isnan" in name for name in gpu.counted()["Inductor"]) == 1


@gpu
@pytest.mark.parametrize(("tokens", "experts", "found"), [
    (1, 32, 2), (16, 32, 3), (64, 8, 3), (100, 200, 3), (256, 32, 3), (1024, 8, 3), (2048, 128, 2),
])  # fmt: skip
def test_bits_on_a_gpu(tokens, experts, found, monkeypatch):
    """Each token has the bits that it has with ATen's kernels; no two of its scores are equal."""
    model = Experts(experts).to("cuda", torch.bfloat16).requires_grad_(False)
    assert torch.equal(*results_with_and_without(model, *operands(tokens, experts, "cuda"), found, monkeypatch))
