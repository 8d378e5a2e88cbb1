"""Norms with their statistics in training, end to end on the CPU: the pass runs as if tensors lay on a GPU."""

import torch
from torch._inductor import config
from torch.utils.checkpoint import checkpoint

import fp4compile
from fp4compile.ops.nodes import quantise_of
from fp4compile.ops.quantize import QUANTIZE
from tests.helpers import prologues_on_cpu
from tests.helpers.llama import llama_norm


class Block(torch.nn.Module):
    """A residual sum, a norm, a layer."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = torch.nn.Parameter(torch.rand(64) + 0.5), torch.nn.Linear(64, 64, bias=False)

    def forward(self, x, y):
        x = x + y
        return x + self.linear(llama_norm(x, self.scale))


def trained(fused, monkeypatch):
    """(result and gradients, steps, dimensions and stored of each quantiser with a prologue) of one step."""
    found = []
    torch.manual_seed(0)
    prologues_on_cpu.fuse(monkeypatch, fused, lambda one: found.extend(_prologues(one)))
    torch._dynamo.reset()
    block = Block().bfloat16()
    x, y = (torch.randint(-4, 5, (32, 64)).bfloat16().requires_grad_() for _ in range(2))

    def run(x, y):
        return checkpoint(block, x, y, use_reentrant=False)

    with config.patch(force_disable_caches=True):
        out = torch.compile(run, backend=fp4compile.backend("mxfp8"))(x, y)
        out.backward(torch.ones(32, 64).bfloat16())
    return [out.detach(), x.grad, y.grad, *(p.grad for p in block.parameters())], found


def _prologues(one):
    quantisers = map(quantise_of, one.find_nodes(op="call_function", target=QUANTIZE))
    return [(list(each.prologue), each.dims, each.stored) for each in quantisers if each.prologue]


def test_a_checkpointed_step(monkeypatch):
    """To the last bit what it is without: the sums of small integers are exact, in whatever order."""
    with monkeypatch.context() as patches:
        apart, none = trained(False, patches)
    fused, found = trained(True, monkeypatch)
    steps = ["add aux0 aux2", "square s0", "mean s1", "add s2 1e-05", "rsqrt s3", "mul s0 s4", "mul row1 s5"]
    assert none == [] and found == [(steps, (-1,), ("s0 bfloat16",))]
    for one, other in zip(apart, fused, strict=True):
        assert torch.equal(one, other)
