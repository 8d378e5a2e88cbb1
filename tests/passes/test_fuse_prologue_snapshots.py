"""Snapshots of what quantises in inference graphs of MLPs and of a BERT block, after the passes before this one."""

import pytest
import torch.nn.functional as F

from fp4compile.passes import fuse_prologue
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.templates.quantize import prologue_cost
from tests.helpers.absent_gpu import fused_graph
from tests.helpers.graphs import summary
from tests.helpers.norms import RMS, rms_norm


@pytest.fixture(autouse=True)
def on_any_gpu(monkeypatch):
    """What the model says, also of GPUs on which the pass does nothing yet."""
    monkeypatch.setattr(prologue_cost, "SINCE", dict.fromkeys(prologue_cost.SINCE, 0))


def quantisers(function, *shapes, **options):
    """The lines of the snapshot of a graph that quantise activations or gradients, after the passes before this one."""

    def fuse(graph):
        merge_quantize(graph)
        fuse_prologue.fuse_prologue(graph)

    lines = summary(fused_graph(function, *shapes, recipe="mxfp8", then=fuse, **options).graph).splitlines()
    found = [line.split(" = fp4compile.")[1] for line in lines if "fp4compile.quantize" in line]
    return [line for line in found if not line.startswith(("quantize(w", "quantize(v"))]


def llama_mlp(x, norm, w, v, w_down):
    y = rms_norm(x, norm)
    return x + F.linear(F.silu(F.linear(y, w)) * F.linear(y, v), w_down)


def test_snapshot_of_a_llama_mlp():
    """The norm goes into its quantiser; the gate into the product where that writes it, else into its quantiser."""
    norm = f"operands=[norm_1], prologue={RMS}, dtype=torch.bfloat16)"
    shapes = (512, 1024), (1024,), (2048, 1024), (2048, 1024), (1024, 2048)
    assert quantisers(llama_mlp, *shapes, sm=100) == [
        f"quantize(x_1, mxfp8, [-1], layout=swizzled, {norm}", "quantize(scaled_mm_default_3, mxfp8, [-1], layout=swizzled)",
    ]  # fmt: skip
    assert quantisers(llama_mlp, *shapes, sm=90) == [
        f"quantize(x_1, mxfp8, [-1], {norm}",
        "quantize(scaled_mm_default, mxfp8, [-1], operands=[scaled_mm_default_1], prologue=['neg aux0', 'exp s0', "
        "'add s1 1.0', 'div aux0 s2', 'mul s3 aux1'], dtype=torch.bfloat16)",
    ]  # fmt: skip


def phi_mlp(x, norm, w, w_down):
    """Gate and up are one product, as in Phi-3."""
    gate, up = F.linear(rms_norm(x, norm), w).chunk(2, -1)
    return x + F.linear(up * F.silu(gate), w_down)


def test_snapshot_of_a_phi_mlp():
    """No product writes the gate of two halves of its own columns: the quantiser reads both where they lie."""
    shapes = (2, 256, 1024), (1024,), (4096, 1024), (1024, 2048)
    for sm, layout in ((100, "layout=swizzled, "), (90, "")):
        assert quantisers(phi_mlp, *shapes, sm=sm) == [
            f"quantize(reshape_default, mxfp8, [-1], {layout}operands=[norm_1], prologue={RMS}, dtype=torch.bfloat16)",
            f"quantize(slice_tensor, mxfp8, [-1], {layout}operands=[slice_tensor_1], prologue=['neg aux1', 'exp s0', "
            "'add s1 1.0', 'div aux1 s2', 'mul aux0 s3'], dtype=torch.bfloat16)",
        ]  # fmt: skip


def bert_block(x, w, norm, bias, v_in, v_out):
    """The norm of a sum, and GELU between two products."""
    x = F.layer_norm(x + F.linear(x, w), (256,), norm, bias)
    return F.layer_norm(x + F.linear(F.gelu(F.linear(x, v_in)), v_out), (256,), norm, bias)


def test_snapshot_of_a_bert_block():
    """GELU goes into the product where that writes it. The norm's kernel writes it for the next sum, too."""
    shapes = (512, 256), (256, 256), (256,), (256,), (1024, 256), (256, 1024)
    steps = ["mean aux0", "sub aux0 s0", "variance aux0 s0", "add s2 1e-05", "rsqrt s3", "mul s1 s4", "mul s5 row1",
             "add s6 row2"]  # fmt: skip
    norm = f"operands=[norm_1, bias_1], prologue={steps}, dtype=torch.bfloat16, stored=['s7 bfloat16'])"
    assert quantisers(bert_block, *shapes, sm=100) == [
        "quantize(x_1, mxfp8, [-1], layout=swizzled)",
        f"quantize(scaled_mm_default_3, mxfp8, [-1], layout=swizzled, {norm}",
        "quantize(scaled_mm_default_4, mxfp8, [-1], layout=swizzled)",
    ]  # fmt: skip
    assert quantisers(bert_block, *shapes, sm=90) == [
        "quantize(x_1, mxfp8, [-1])", f"quantize(scaled_mm_default_3, mxfp8, [-1], {norm}",
        "quantize(scaled_mm_default_1, mxfp8, [-1], prologue=['mul aux0 0.5', 'mul aux0 0.7071067811865476', 'erf s1', "
        "'add s2 1.0', 'mul s0 s3'], dtype=torch.bfloat16)",
    ]  # fmt: skip
