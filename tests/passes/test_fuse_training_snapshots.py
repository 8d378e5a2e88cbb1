"""Prologues in training graphs, as on SM100: what quantises in the forward and the backward, what is left, launches.

The graphs are those of the CPU, on which the passes run as if there were an SM100 GPU. Launches are counted on paper:
those of a quantiser of such tensors there.

Regenerate with EXPECTTEST_ACCEPT=1 and read the difference.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch._inductor import config

import fp4compile
from fp4compile.hardware import Target
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from fp4compile.templates.launch import dry_run
from tests.helpers import prologues_on_cpu
from tests.helpers.graphs import for_inductor, summary
from tests.helpers.llama import llama_norm

pytestmark = pytest.mark.usefixtures("without_kernels")


class Llama(nn.Module):
    """A block without rotary embeddings, of 64 columns and 2 heads."""

    def __init__(self):
        super().__init__()
        self.norm, self.post_norm = (nn.Parameter(torch.ones(64)) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in ((64, 128), (64, 128), (128, 64)))

    def forward(self, x):
        y = llama_norm(x, self.norm)
        q, k, v = (layer(y).view(2, 32, 2, 32).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = llama_norm(x, self.post_norm)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Bert(nn.Module):
    """The second half of a block: the norm of a sum, and GELU between two layers."""

    def __init__(self):
        super().__init__()
        self.out, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.first, self.second = nn.LayerNorm(64), nn.LayerNorm(64)

    def forward(self, x):
        x = self.first(x + self.out(x))
        return self.second(x + self.down(F.gelu(self.up(x))))


class GeluMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def graphs(model, recipe, fused, monkeypatch):
    """(lines of quantisers with a prologue, names of what Inductor computes, launches of all quantisers) of each graph:
    forward, backward; of 2 x 32 tokens."""
    found = []
    prologues_on_cpu.fuse(monkeypatch, fused, lambda graph: found.append(read(graph)))
    torch._dynamo.reset()
    x = torch.randn(2, 32, 64).bfloat16().requires_grad_()
    with config.patch(force_disable_caches=True):
        torch.compile(model.bfloat16(), backend=fp4compile.backend(recipe, strict=True))(x).sum().backward()
    return found


def read(graph):
    lines = [line.split(" = fp4compile.")[1] for line in summary(graph).splitlines() if "prologue=" in line]
    return lines, [node.name for node in graph.nodes if for_inductor(node)], launches(graph)


def launches(graph):
    with dry_run(Target(100)) as found:
        for node in graph.nodes:
            if node.target is QUANTIZE:
                arguments, options = torch.utils._pytree.tree_map_only(
                    torch.fx.Node, on_paper, (node.args, node.kwargs)
                )
                quantize_kernels(*arguments, **options)
    return len(found)


def on_paper(node):
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def snapshot(model, recipe):
    """What is fused, and what is left, of both graphs; counts without prologues and with them."""
    found = []
    for fused in (False, True):
        with pytest.MonkeyPatch.context() as monkeypatch:
            found.append(graphs(model, recipe, fused, monkeypatch))
    text = []
    for name, (_, before, apart), (lines, left, together) in zip(("forward", "backward"), *found, strict=True):
        text += [f"{name}: launches of quantisers {apart} -> {together}, operations for Inductor "
                 f"{len(before)} -> {len(left)}", *lines, f"left: {', '.join(left)}"]  # fmt: skip
    return "\n".join(text)


# Up to torch 2.11 the gradient of SiLU has a reciprocal in the place of a sigmoid, and is not fused.
with_sigmoid = pytest.mark.skipif(
    "torch.sigmoid" not in inspect.getsource(torch._decomp.decompositions.silu_backward),
    reason="the snapshot is of another decomposition of SiLU's gradient",
)


class Snapshots(TestCase):
    maxDiff = None

    @with_sigmoid
    def test_llama_block(self):
        """Inductor writes statistics, the stream and gradients of norms; each gradient of the gate is computed by its quantiser."""
        self.assertExpectedInline(
            snapshot(Llama(), "mxfp8"),
            """\
forward: launches of quantisers 11 -> 11, operations for Inductor 25 -> 12
quantize(reshape_default, mxfp8, [-1, -2], operands=[primals_1, rsqrt], prologue=['mul aux0 col2', 'mul row1 s0'], dtype=torch.bfloat16)
quantize(reshape_default_1, mxfp8, [-1, -2], operands=[primals_7, rsqrt_1], prologue=['mul aux0 col2', 'mul row1 s0'], dtype=torch.bfloat16)
quantize(scaled_mm_default_4, mxfp8, [-1, -2], operands=[scaled_mm_default_5], prologue=['neg aux0', 'exp s0', 'add s1 1.0', 'div aux0 s2', 'mul s3 aux1'], dtype=torch.bfloat16)
left: convert_element_type, pow_1, mean, add, rsqrt, add_1, convert_element_type_10, pow_2, mean_1, add_2, rsqrt_1, add_4
backward: launches of quantisers 15 -> 15, operations for Inductor 60 -> 44
quantize(scaled_mm_default_8, mxfp8, [-1, -2], operands=[scaled_mm_default_4], prologue=['neg aux1', 'exp s0', 'add s1 1.0', 'div aux1 s2', 'mul aux0 s3'], dtype=torch.bfloat16)
quantize(scaled_mm_default_8, mxfp8, [-1, -2], operands=[scaled_mm_default_5, scaled_mm_default_4], prologue=['mul aux0 aux1', 'sigmoid aux2', 'mul s0 s1', 'sub 1.0 s1', 'mul aux2 s3', 'add s4 1.0', 'mul s2 s5'], dtype=torch.bfloat16)
left: add_6, mul_10, add_1, convert_element_type_10, mul_2, convert_element_type_11, mul_11, sum_1, convert_element_type_35, mul_12, mul_13, sum_2, pow_3, mul_14, mul_15, div_1, pow_4, mul_16, mul_17, add_7, convert_element_type_36, add_8, add_9, add_10, mul_18, convert_element_type, mul, convert_element_type_1, mul_19, sum_3, convert_element_type_53, mul_20, mul_21, sum_4, pow_5, mul_22, mul_23, div_2, pow_6, mul_24, mul_25, add_11, convert_element_type_54, add_12""",
        )


@pytest.mark.parametrize(("model", "recipe"), [(Llama, "nvfp4_train"), (Bert, "mxfp8"), (GeluMLP, "mxfp8")], ids=str)
def test_nothing_is_fused(model, recipe, monkeypatch):
    """Kernels of both directions compute a prologue in formats without an outer scale alone. By the model the quantiser
    is short of instructions after a layer norm, by erf or by tanh."""
    assert [lines for lines, *_ in graphs(model(), recipe, True, monkeypatch)] == [[], []]
