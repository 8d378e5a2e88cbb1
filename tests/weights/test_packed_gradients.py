"""Gradients through packed layers, compiled for Hopper: the product of a gradient reads the codes of the weight."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

import fp4compile
from fp4compile import config
from fp4compile.hardware import Target
from fp4compile.templates.launch import dry_run
from tests.helpers import without_codegen
from tests.helpers.kernels import INTERPRETING, no_gpu

WGMMA, LEFT = "wgmma_transposed_sm90", "gradient x packed weight: the weight is dequantised"


class Adapted(nn.Module):
    """A frozen layer and an adapter of rank 16, behind a trained scale: the layer's input has a gradient."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.scale, self.a = nn.Parameter(torch.ones(inputs)), nn.Parameter(torch.randn(16, inputs) / 8)
        self.b = nn.Parameter(torch.randn(outputs, 16) / 8)

    def forward(self, x):
        x = x * self.scale
        return self.base(x) + x @ self.a.t() @ self.b.t()


def adapted(recipe, inputs=64, outputs=128, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        model = Adapted(inputs, outputs).bfloat16()
    fp4compile.pack_(model, recipe)
    return model


def gradients(model, run, rows):
    """The gradients of the trained parameters of one step."""
    x = torch.randn(rows, model.scale.shape[0], generator=torch.Generator().manual_seed(1))
    run(x.to(model.scale)).float().square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("recipe", "sm", "rows", "dynamic", "served"), [
    ("nvfp4_weight_only", 90, 65, False, True), ("nvfp4_weight_only", 90, 64, False, False),
    ("nvfp4_weight_only", 90, 65, True, True), ("nvfp4_weight_only", 86, 65, False, False),
    ("mxfp8", 90, 65, False, False),
])  # fmt: skip
def test_a_compiled_step_multiplies_the_codes_where_a_kernel_does(recipe, sm, rows, dynamic, served, monkeypatch):
    """Then the backward graph has no dequantised weight; the kernel adds the adapter's part where it is known."""
    monkeypatch.setattr(config, "disabled_passes", ("inplace", "lower"))  # so that the reference runs the graphs
    without_codegen.install(monkeypatch, deciding=partial(dry_run, Target(sm)))
    torch._dynamo.reset()
    model, backend = adapted(recipe), fp4compile.backend(recipe)
    found = gradients(model, torch.compile(model, backend=backend, dynamic=dynamic), rows)
    expected = gradients(model, model, rows)
    assert found.keys() == expected.keys() == {"scale", "a", "b"}
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0, atol=0.02 * float(one.abs().max()))
    (row,) = (row for row in backend.report.rows if (row.module, row.product) == ("base", "dgrad"))
    assert (row.right, row.tier, row.reason) == (("nvfp4", "emulated", None) if served else ("bfloat16", None, LEFT))
    assert backend.report.counts["recompute"] == (not served)
    assert backend.report.counts["fuse_epilogue"] == (0 if dynamic else 1 + served)


def test_the_backward_graph_launches_the_kernel(monkeypatch):
    """With an epilogue, after which there is no other launch of the layer's own product."""
    found = []

    @contextmanager
    def deciding():
        with dry_run(Target(90)) as launches:
            yield
        found.extend(launches)

    without_codegen.install(monkeypatch, deciding=deciding)
    torch._dynamo.reset()
    model = adapted("nvfp4_weight_only")
    gradients(model, torch.compile(model, backend=fp4compile.backend("nvfp4_weight_only")), 65)
    launched = [
        (each.kernel.__name__, each.constants["B_TRANSPOSED"], bool(each.constants["EPILOGUE"])) for each in found
    ]
    assert launched == [("gemm_wgmma_sm90", 0, True), ("gemm_wgmma_sm90", 1, True)]


def test_the_predicted_time_of_a_packed_gradient():
    """As it is captured, a pass over memory dequantises the weight, which is the layer's time as well."""

    def explained(gpu):
        model, x = adapted("nvfp4_weight_only", 4096, 4096, "meta"), torch.empty(2048, 4096, device="meta")
        report = fp4compile.explain(model, x.bfloat16(), recipe="nvfp4_weight_only", gpu=gpu)
        return next(row for row in report.rows if (row.module, row.product) == ("base", "dgrad"))

    hopper, blackwell = explained("H100"), explained("B200")
    assert hopper.launches == WGMMA and hopper.seconds != hopper.plain_seconds
    assert blackwell.launches == "dequantise; bf16 product" and blackwell.seconds == blackwell.plain_seconds


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="inline PTX")
@no_gpu
def test_a_step_on_hopper_keeps_no_dequantised_weight():
    """A compiled step has the gradients of the eager one, and its peak of memory is lower by most of a weight."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's kernel")
    peaks, found = [], []
    model = adapted("nvfp4_weight_only", 8192, 8192, "cuda")
    for run in (model, torch.compile(model, backend=fp4compile.backend("nvfp4_weight_only"))):
        gradients(model, run, 128)  # compiles
        torch.cuda.reset_peak_memory_stats()
        found.append(gradients(model, run, 128))
        peaks.append(torch.cuda.max_memory_allocated())
    for name, one in found[0].items():
        torch.testing.assert_close(found[1][name], one, rtol=0, atol=0.02 * float(one.abs().max()))
    assert peaks[0] - peaks[1] > 100e6  # the weight has 134 MB, and partial sums have 17 MB
