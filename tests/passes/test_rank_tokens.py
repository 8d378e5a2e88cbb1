"""The sort of tokens by expert, by counting: the result of a stable sort, and where the graph has it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp4compile
from fp4compile.hardware import Target
from fp4compile.passes.rank_tokens import rank_tokens, sort_by_counting
from fp4compile.templates.launch import dry_run
from tests.helpers.arguments import times
from tests.helpers.kernels import gpu

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


def routed(x, ids, codes, scales, outer, sort):
    """The tokens times the matrices of their experts, as transformers sorts them."""
    numbers, order = sort(ids)
    offs = torch.cumsum(torch.histc(numbers.int(), bins=8, min=0, max=7), 0, dtype=torch.int32)
    weight = (codes, scales, outer, "nvfp4")
    return times(
        (aten.index.Tensor(x, [order // 4]), None, None, None), weight, out_dtype=x.dtype, offs=offs, rows=len(ids)
    ), order


def graph_of(sort, tokens=1024, dtype=torch.int64):
    with FakeTensorMode(), enable_python_dispatcher(), dry_run(Target(90)):

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        made = [empty(tokens // 4, 256), empty(tokens, dtype=dtype), empty(8, 256, 128, dtype=torch.uint8),
                empty(8, 256, 16, dtype=torch.float8_e4m3fn), empty(dtype=torch.float32)]  # fmt: skip
        graph = make_fx(lambda *args: routed(*args, sort))(*made).graph
        found = rank_tokens(graph)
        graph.lint()
    return found, graph


SORTS = {
    "sort": torch.sort, "stable": lambda ids: torch.sort(ids, stable=True),
    "descending": lambda ids: torch.sort(ids, descending=True), "dimension": lambda ids: torch.sort(ids, 0, False),
}  # fmt: skip


@pytest.mark.parametrize(("sort", "tokens", "dtype", "found"), [
    ("sort", 1024, torch.int64, 1), ("stable", 4096, torch.int32, 1), ("dimension", 516, torch.int64, 1),
    ("descending", 1024, torch.int64, 0), ("sort", 512, torch.int64, 0), ("sort", 4100, torch.int64, 0),
    ("sort", 1024, torch.float32, 0),
])  # fmt: skip
def test_what_is_replaced(sort, tokens, dtype, found):
    """Ascending sorts of integers, more than Inductor sorts itself, up to the number from which ATen takes less."""
    count, graph = graph_of(SORTS[sort], tokens, dtype)
    targets = [node.target for node in graph.nodes]
    assert count == found == 1 - sum(each in (aten.sort.default, aten.sort.stable) for each in targets)


def test_sorts_that_no_offsets_depend_on_stay():
    with FakeTensorMode(), enable_python_dispatcher(), dry_run(Target(90)):
        graph = make_fx(torch.sort)(torch.empty(1024, dtype=torch.int64, device="cuda")).graph
        assert rank_tokens(graph) == 0


def test_deterministic_algorithms_keep_atens_sort():
    torch.use_deterministic_algorithms(True)
    try:
        assert graph_of(torch.sort)[0] == 0
    finally:
        torch.use_deterministic_algorithms(False)


class Experts(nn.Module):
    """Experts as in transformers, with the tokens put back in order."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 128, 256))

    def forward(self, x, ids):
        numbers, order = torch.sort(ids)
        offs = torch.cumsum(torch.histc(numbers.int(), bins=8, min=0, max=7), 0, dtype=torch.int32)
        y = F.grouped_mm(x[order // 4], self.weight.mT, offs=offs)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return y[back]


@gpu
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_bits_on_a_gpu(tokens, monkeypatch):
    """Each token has the bits that it has with ATen's sort."""
    model = Experts().to("cuda", torch.bfloat16).requires_grad_(False)
    x, ids = torch.randn(tokens // 4, 256, device="cuda").bfloat16(), torch.randint(0, 8, (tokens,), device="cuda")
    results = []
    for disabled in ((), ("rank_tokens",)):
        monkeypatch.setattr(fp4compile.config, "disabled_passes", disabled)
        torch._dynamo.reset()
        backend = fp4compile.backend("nvfp4_weight_only", strict=True)
        results.append(torch.compile(model, backend=backend)(x, ids))
        assert backend.report.counts.get("rank_tokens") == (None if disabled else 1)
    assert torch.equal(*results)
