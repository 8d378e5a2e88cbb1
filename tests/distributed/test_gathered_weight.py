"""Graphs of models whose weights are codes, as FSDP2 gathers them: what is multiplied, and what is refused."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4compile
from fp4compile.analysis.plan import BEFORE_CAST
from fp4compile.capture import run_captured
from fp4compile.distributed.arrival import Arrival, Finish
from fp4compile.distributed.codes import Direction, magnitudes_of
from fp4compile.distributed.whole import GatheredFormat
from fp4compile.hardware import Target
from fp4compile.passes.manager import analyse
from fp4compile.recipe import resolve
from fp4compile.report import stored_rows
from fp4compile.templates.launch import dry_run
from tests.helpers import without_codegen


def gathered(weight: torch.Tensor, format: str, recompute=False, directions=2, layout="linear") -> nn.Parameter:
    """A weight as it is on one rank after a gather. directions: 1 gathers the codes along the columns alone."""
    both = tuple(Direction(format, dim, tuple(weight.shape), layout) for dim in (-1, -2))
    arrival = Arrival(GatheredFormat(*both, weight.dtype, recompute), weight.device, 1)
    gathering, shards = arrival.gathering(rows=directions == 2, columns=True), weight.unsqueeze(0)
    encoded = []
    for one in gathering.sent:
        parts = one.encode(shards, magnitudes_of([(one, shards)])[0] if one.scale_over_ranks else None)
        encoded += [part[0] for part in parts]
    gathering.allocate()
    gathering.write(encoded)
    made = arrival.weight()
    made.without_rows = directions == 1
    Finish([gathering])()
    return nn.Parameter(made)


class Layers(nn.Module):
    """again: one layer is checkpointed. part: a part of a weight is multiplied, which is checkpointed."""

    def __init__(self, again=False, part=False):
        super().__init__()
        self.again, self.part = again, part
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)

    def forward(self, x):
        if self.part:
            return checkpoint(self.of_part, self.up(x).tanh(), use_reentrant=False)
        hidden = checkpoint(self.up, x, use_reentrant=False) if self.again else self.up(x)
        return self.down(hidden.tanh())

    def of_part(self, hidden):
        return hidden[:, :64] @ self.down.weight[:, :64].t()


def step(model: nn.Module, recipe, between=lambda: None) -> tuple[list[torch.Tensor], list[tuple]]:
    """(output and gradients; the products of the report) of one training step. between: called before the backward."""
    torch._dynamo.reset()
    backend = fp4compile.backend(recipe)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(model.up.bias.device).requires_grad_()
    torch.manual_seed(2)
    y = torch.compile(model, backend=backend)(x)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend)(x), y)
    between()
    y.square().sum().backward()
    rows = [(row.module, row.product, row.left, row.right, row.reason) for row in backend.report.rows]
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())], rows


def with_codes(model: Layers, format: str, **options) -> Layers:
    for layer in (model.up, model.down):
        layer.weight = gathered(layer.weight.detach(), format, **options)
    return model


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_of_codes_have_the_bits_of_a_whole_weight(device):
    expected, rows = step(Layers(again=True).to(device), "nvfp4_train")
    found, products = step(with_codes(Layers(again=True).to(device), "nvfp4_16x16", recompute=True), "nvfp4_train")
    assert products == rows and [reason for *_, reason in rows] == 6 * [None]
    assert all(map(torch.equal, found, expected))


def test_products_that_are_left_alone_say_what_was_gathered(monkeypatch):
    without_codegen.install(monkeypatch)
    model = with_codes(Layers(part=True), "mxfp8")

    def only_columns():
        """As the gather for a backward pass leaves a weight: what was dequantised before must have been saved."""
        weight = gathered(Layers().down.weight.detach(), "mxfp8", directions=1)
        model.down.weight.row_scales.data.copy_(weight.row_scales)

    found, rows = step(model, {"recipe": "mxfp8", "dgrad_w": "mxfp8_floor"}, only_columns)
    assert all(tensor.isfinite().all() for tensor in found)
    reasons = {(module, product): reason for module, product, *_, reason in rows}
    assert reasons["up", "fprop"] is None
    assert reasons["up", "dgrad"] == "recipe mxfp8 says mxfp8_floor; its weight was gathered in mxfp8"
    assert reasons["down", "other"] == (
        "a part of a weight that was gathered quantised, or its transpose: it is dequantised"
    )


@pytest.mark.parametrize(("layout", "tier"), [("swizzled", "native"), ("linear", "emulated")])
def test_scales_are_read_as_they_lie(layout, tier):
    """A B200's matrix units read swizzled scales."""
    found = []

    def decide(module, known, forward_outputs):
        with dry_run(Target(100)):
            found.extend(analyse(module.graph, resolve("nvfp4_train"), known.inputs))
        return module.forward

    model = with_codes(Layers(), "nvfp4_16x16", layout=layout)
    run_captured(model, decide)(torch.randn(64, 64, requires_grad=True))
    tiers = {(one.gemm.module, one.gemm.product): one.tier for one in found}
    weights = [(layer, product) for layer in ("up", "down") for product in ("fprop", "dgrad")]
    assert [tiers.pop(one) for one in weights] == 4 * [tier] and set(tiers.values()) == {"native"}


def test_a_cast_after_the_gather_is_reported(monkeypatch):
    without_codegen.install(monkeypatch)
    backend, model = fp4compile.backend("mxfp8"), with_codes(Layers(), "mxfp8")
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend=backend)(torch.randn(32, 64)).sum().backward()
    notes = {(row.product, row.reason): row.note for row in backend.report.rows}
    assert notes == {("fprop", None): BEFORE_CAST, ("dgrad", None): BEFORE_CAST, ("wgrad", None): None}


def test_stored_rows_tell_codes_from_a_whole_weight():
    """The reasons of a cached graph's products differ."""
    whole = torch.randn(64, 96)
    weights = nn.Parameter(whole), gathered(whole, "mxfp8"), gathered(whole, "mxfp4")
    assert len({stored_rows._describe(weight, weight) for weight in weights}) == 3


@torch.no_grad()
def test_a_view_of_another_shape_is_dequantised():
    weight = gathered(torch.randn(32, 64), "mxfp8").data
    values = weight.dequantised()
    assert type(weight.view(32, 64)) is type(weight.as_strided((32, 64), (64, 1))) is type(weight)
    views = (
        (lambda w: w.view(-1)),
        (lambda w: w.as_strided((32, 32), (64, 1))),
        (lambda w: w.as_strided((2, 64), (64, 1), 64)),
    )
    for view in views:
        assert type(view(weight)) is torch.Tensor and torch.equal(view(weight), view(values))


def test_codes_that_were_not_gathered_are_not_multiplied():
    with pytest.raises(Exception, match=r"up.weight: activation checkpointing .*recompute=True"):
        step(with_codes(Layers(again=True), "mxfp8"), "mxfp8")
    weight = gathered(torch.randn(32, 32), "mxfp8", directions=1)
    with pytest.raises(RuntimeError, match=r"computed again in the backward pass.*recompute=True"):
        weight.t()
    assert not weight.row_scales.float().isfinite().any(), "what compiled code reads without asking is no old number"
    with torch.no_grad(), pytest.raises(RuntimeError, match="write to its shards"):
        weight.mul_(2)
