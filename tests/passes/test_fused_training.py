"""Prologues in training, end to end on the CPU: the pass runs as if tensors lay on a GPU, the op is its reference."""

import torch
from torch._inductor import config
from torch.utils.checkpoint import checkpoint

import fp4compile
from tests.helpers import prologues_on_cpu
from tests.helpers.graphs import summary
from tests.helpers.llama import llama_norm


class GatedMLP(torch.nn.Module):
    """A gate of operations that all libraries compute alike."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        gate = self.gate(x)
        return x + self.down((gate * gate + 1) * self.up(x))


class FusedGateUp(torch.nn.Module):
    """The same, with gate and up as one product: halves of its columns."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = torch.nn.Linear(64, 192, bias=False), torch.nn.Linear(96, 64, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x.view(2, 16, 64)).chunk(2, -1)
        return self.down((gate * gate + 1) * up).view(32, 64)


class NormedSum(torch.nn.Module):
    """A residual sum, a norm, a layer; computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = torch.nn.Parameter(torch.rand(64) + 0.5), torch.nn.Linear(64, 64, bias=False)

    def forward(self, x, y):
        return checkpoint(self.block, x, y, use_reentrant=False)

    def block(self, x, y):
        x = x + y
        return x + self.linear(llama_norm(x, self.scale))


def trained(make_model, inputs, monkeypatch):
    """(report, lines of the quantisers of activations and gradients in each graph) of a step with prologues, whose
    result and gradients are those of a step without, to the last bit."""
    steps = []
    for fused in (False, True):
        graphs = []
        torch.manual_seed(0)
        prologues_on_cpu.fuse(monkeypatch, fused, lambda one, graphs=graphs: graphs.append(lines_of(one)))
        torch._dynamo.reset()
        model, backend = make_model().bfloat16(), fp4compile.backend("mxfp8")
        given = [x.clone().requires_grad_() for x in inputs]
        with config.patch(force_disable_caches=True):
            y = torch.compile(model, backend=backend)(*given)
            y.backward(torch.randint(-2, 3, y.shape).bfloat16())
        steps.append([y.detach(), *(x.grad for x in (*given, *model.parameters()))])
    assert all(map(torch.equal, *steps))
    return backend.report, graphs


def lines_of(graph):
    lines = [line.split("fp4compile.")[1] for line in summary(graph).splitlines() if "fp4compile.quantize" in line]
    return [line for line in lines if "[-1, -2]" in line or "prologue=" in line]  # weights have one dimension


def test_gates(monkeypatch):
    """The report says what was fused, and both gradients are quantised where they are computed."""
    x = torch.randn(32, 64).bfloat16()
    report, graphs = trained(lambda: torch.nn.Sequential(GatedMLP(), FusedGateUp()), [x], monkeypatch)
    told = {f"{row.module} {row.product}": row.fused for row in report.rows if row.fused}
    gated = ("0.down fprop", "0.up dgrad", "0.up wgrad", "0.gate dgrad", "0.gate wgrad", "1.down fprop")
    assert told == {**dict.fromkeys(gated, "mul, add"), "1.gate_up fprop": "add"}
    assert "fused: mul, add" in str(report)
    both, gate = "mxfp8, [-1, -2]", "prologue=['mul aux0 aux0', 'add s0 1.0', 'mul s1 aux1'], dtype=torch.bfloat16)"
    assert graphs == [
        [f"quantize(primals_2, {both})",
         f"quantize(scaled_mm_default, {both}, operands=[scaled_mm_default_1], {gate}",
         f"quantize(primals_2, {both}, operands=[scaled_mm_default_2], prologue=['add aux0 aux1'], "
         "dtype=torch.bfloat16)",
         f"quantize(slice_tensor, {both}, operands=[slice_tensor_1], {gate}"],
        [f"quantize(tangents_1, {both})", f"quantize(view_9, {both})",  # of both halves: Inductor writes it
         f"quantize(scaled_mm_default_8, {both})",
         f"quantize(scaled_mm_default_10, {both}, operands=[scaled_mm_default], "
         "prologue=['mul aux1 aux1', 'add s0 1.0', 'mul aux0 s1'], dtype=torch.bfloat16)",
         f"quantize(scaled_mm_default_10, {both}, operands=[scaled_mm_default_1, scaled_mm_default], "
         "prologue=['mul aux0 aux1', 'mul s0 aux2', 'add s1 s1'], dtype=torch.bfloat16)"],
    ]  # fmt: skip


def test_a_checkpointed_norm(monkeypatch):
    """With its statistics: the sums of small integers are exact, in whatever order."""
    inputs = [torch.randint(-4, 5, (32, 64)).bfloat16() for _ in range(2)]
    _, ((forward,), backward) = trained(NormedSum, inputs, monkeypatch)
    steps = ["add aux0 aux2", "square s0", "mean s1", "add s2 1e-05", "rsqrt s3", "mul s0 s4", "mul row1 s5"]
    assert f"mxfp8, [-1], operands=[primals_3, primals_2], prologue={steps}" in forward
    assert forward.endswith("stored=['s0 bfloat16'])") and "prologue" not in "".join(backward)
