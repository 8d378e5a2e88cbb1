"""Which results are written over the product that they are computed from. The numbers never change."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import fp4compile
from fp4compile.cli.demo import MLP, ModelSizes
from fp4compile.passes import inplace as module
from fp4compile.passes.inplace import inplace
from tests.helpers.arguments import times

aten = torch.ops.aten


def gated(dy, w, gate, up):
    """The gradients of silu(gate) * up; a product reads each of them."""
    d = dy @ w
    s = torch.sigmoid(gate)
    return (d * F.silu(gate)) @ w.t(), (d * up * s * (1 + gate * (1 - s))).t() @ gate


def experts(dy, w, gate, up):
    """The gradients of gate and up of an expert, by a product of groups."""
    offs = torch.full((1,), 12, dtype=torch.int32, device=dy.device)
    d = times((dy, None, None, None), (w.t().unsqueeze(0), None, None, None), offs=offs, rows=dy.shape[0])
    return (d * F.silu(gate)) @ w.t(), (d * up * torch.sigmoid(gate)).t() @ gate


def two_products(dy, w, gate, up):
    """As with an adapter: both results depend on both products, and each result is written over one of them."""
    d = dy @ w + (dy * dy) @ w
    return (d * gate).t() @ dy, (d * up * gate + up).t() @ dy, up


def late(dy, w, gate, up):
    """As in a backward graph, one result is used before the other is computed. Both read the product reshaped."""
    d = (dy @ w).view(2, -1, w.shape[1])
    first = d * gate.view(d.shape)
    used = first.view(-1, w.shape[1]) @ w.t()
    return used, ((d * up.view(d.shape)).exp() + gate.view(d.shape)).sum(0)


def one_result(dy, w, gate, up):
    return ((dy @ w) * gate * up).t() @ gate


def own_operands(dy, w, gate, up):
    """Inductor writes each result over the operand that no other result reads."""
    d = dy @ w
    return (d * gate).t() @ dy, (d * up).t() @ dy


def product_read_elsewhere(dy, w, gate, up):
    d = dy @ w
    return gated(dy, w, gate, up)[0], d * gate, (d * gate * gate).sum(0), d.sum(0)


def other_type(dy, w, gate, up):
    d = dy @ w
    return (d * gate).float() @ w.t().float(), (d * gate + gate).float() @ w.t().float()


def waits_for_a_product(dy, w, gate, up):
    """The second result depends on a product of the first one."""
    d = dy @ w
    first = d * gate
    return first @ w.t(), (first.t() @ gate).sum() + gate * d * (first @ w.t() @ w)


def traced(function, monkeypatch):
    monkeypatch.setattr(module, "_contiguous_on_gpu", lambda product: product.meta["val"].is_contiguous())
    torch.manual_seed(0)
    args = [torch.randn(shape).bfloat16() for shape in ((12, 8), (8, 24), (12, 24), (12, 24))]
    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args), args


@pytest.mark.parametrize(("function", "count"), [
    (gated, 1), (experts, 1), (two_products, 2), (late, 1), (one_result, 0), (own_operands, 0),
    (product_read_elsewhere, 1), (other_type, 0), (waits_for_a_product, 0)])  # fmt: skip
def test_results(function, count, monkeypatch):
    """The graph computes the same after the pass. (Inductor may write over an operand that is an input of the graph, or
    not; the pass assumes that it may.)"""
    graph_module, args = traced(function, monkeypatch)
    expected = graph_module(*args)
    found = inplace(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    assert found == len(graph_module.graph.find_nodes(op="call_function", target=aten.copy_.default))
    got = graph_module(*args)
    copies = graph_module.graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert len({node.args[1] for node in copies}) == len(copies) and aten.copy_.default not in {
        node.args[1].target for node in copies
    }
    for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected), strict=True):
        assert torch.equal(a, b)
    assert found == count


def residual_stream(layers):
    """A function of blocks of a norm and a product, each of which adds its result to the sum of those before it."""

    def run(x, w, *_):
        for _ in range(layers):
            norm = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True))
            x = x + (x * norm.to(x.dtype)) @ w @ w.t()
        return x

    return run


def test_a_residual_stream_is_read_in_linear_time(monkeypatch):
    """All later blocks depend on each product of a block. Of these, the pass reads no more than the next ones."""
    read = Mock(side_effect=module.is_pointwise)
    monkeypatch.setattr(module, "is_pointwise", read)
    counted = []
    for layers in (4, 8, 12):
        graph = traced(residual_stream(layers), monkeypatch)[0].graph
        read.reset_mock()
        assert inplace(graph) == 0
        counted.append(read.call_count)
    assert counted[2] - counted[1] == counted[1] - counted[0] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["float8_rowwise", "nvfp4_train"])
def test_same_bits_in_less_memory(recipe, monkeypatch):
    """A training step of a gated MLP on a batch, with and without the pass."""
    tokens, inner = (2, 2048), 8192
    torch.manual_seed(0)
    block = MLP(ModelSizes(hidden=1024, inner=inner)).to("cuda", torch.bfloat16)
    x = torch.randn(*tokens, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)

    def step():
        torch._dynamo.reset()
        compiled = torch.compile(block, backend=fp4compile.backend(recipe, strict=True))
        for _ in range(2):  # the first step autotunes launches
            for tensor in (x, *block.parameters()):
                tensor.grad = None
            torch.manual_seed(1)
            torch.cuda.reset_peak_memory_stats()
            compiled(x).backward(gradient)
        return [tensor.grad for tensor in (x, *block.parameters())], torch.cuda.max_memory_allocated()

    got, peak = step()
    monkeypatch.setattr(fp4compile.config, "disabled_passes", ("inplace",))
    with config.patch(force_disable_caches=True):
        expected, before = step()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    del got, expected
    assert before - peak > 0.9 * 2 * inner * tokens[0] * tokens[1]
