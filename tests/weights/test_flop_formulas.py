"""FLOPs of packed layers in torch's counter, which counts unknown operators as 0."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fp4compile
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.weights.buffers import packed_modules

X = torch.randn(2, 8, 128, dtype=torch.bfloat16)
FLOPS = 2 * 16 * 64 * 128
OFFS = torch.tensor([3, 5, 5, 16], dtype=torch.int32)


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "mxfp8", "float8_block"])
def test_packed_layers(recipe):
    model = nn.Sequential(nn.Linear(128, 64)).bfloat16()
    fp4compile.pack_(model, recipe)
    assert packed_modules(model)
    with torch.no_grad():
        assert counted(lambda: model(X)) == FLOPS
    x = X.clone().requires_grad_()
    assert counted(lambda: model(x).sum().backward()) == 2 * FLOPS  # packed weights have no gradient


@pytest.mark.parametrize("along", ["rows", "contraction"])
def test_groups(along):
    x, y = X.flatten(0, 1), torch.randn(16, 64, dtype=torch.bfloat16)
    if along == "rows":
        a = QUANTIZE(x, "mxfp8", offs=OFFS)
        b, options = QUANTIZE(torch.randn(4, 64, 128), "mxfp8", each_matrix=True), {}
    else:
        a, b = (QUANTIZE(each, "mxfp8", [-2], offs=OFFS) for each in (y, x))
        options = {"rows": 16}
    spec = f"mxfp8 @ mxfp8, ragged {along} -> bfloat16"
    operands = (a[0], a[1], None, b[0], b[1], None, spec)
    assert counted(lambda: torch.ops.fp4compile.scaled_mm(*operands, offs=OFFS, **options)) == FLOPS
