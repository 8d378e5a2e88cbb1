"""Prologues in training, end to end on the CPU: the pass runs as if tensors lay on a GPU, the op is its reference."""

import torch
from torch._inductor import config

import fp4compile
from tests.helpers import prologues_on_cpu
from tests.helpers.graphs import summary


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


def trained(fused, monkeypatch):
    """(result and gradients, report, lines of the quantisers in each graph) of one step."""
    graphs = []
    torch.manual_seed(0)
    prologues_on_cpu.fuse(monkeypatch, fused, lambda one: graphs.append(graph_lines(one)))
    torch._dynamo.reset()
    model = torch.nn.Sequential(GatedMLP(), FusedGateUp()).bfloat16()
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    backend = fp4compile.backend("mxfp8")
    with config.patch(force_disable_caches=True):
        y = torch.compile(model, backend=backend)(x)
        y.backward(torch.randn(32, 64).bfloat16())
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())], backend.report, graphs


def graph_lines(one):
    lines = summary(one).splitlines()
    found = [line.split("fp4compile.")[1] for line in lines if "fp4compile.quantize" in line]
    return [line for line in found if "[-1, -2]" in line]  # weights are quantised along one dimension


def test_a_step_is_what_it_is_without(monkeypatch):
    """To the last bit, the report says what was fused, and both gradients are quantised where they are computed."""
    expected, *_ = trained(False, monkeypatch)
    found, report, graphs = trained(True, monkeypatch)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
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
