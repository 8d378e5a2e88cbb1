"""A packed model that torch.export captured and AOTInductor compiled: loaded, it has the bits of the model itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4compile
from fp4compile.recipe import named
from tests.helpers.old_torch import not_under_torch_2_11

BF16 = torch.bfloat16
RULES = [("weight_only", "nvfp4_weight_only"), ("dynamic", "nvfp4"), ("mx", "mxfp8"), ("experts", "mxfp8")]

# torch 2.11's AOTInductor has neither the dtype of MX scales nor grouped matmuls on CPUs, and allocates NVFP4's scales
# in another dtype.
knows_scales = not_under_torch_2_11("has no such scales in AOTInductor")


class Net(nn.Module):
    """A layer of each kind, a weight that is read, and the weights of two experts."""

    def __init__(self):
        super().__init__()
        self.static, self.dynamic, self.mx, self.weight_only, self.read = (nn.Linear(64, 64) for _ in range(5))
        self.experts = nn.Parameter(torch.randn(2, 64, 64) / 8)

    def forward(self, x, offs):
        y = self.weight_only(self.mx(self.dynamic(self.static(x))))
        return y, x[0] * self.read.weight, F.grouped_mm(y, self.experts.transpose(1, 2), offs=offs)


@pytest.mark.slow
@knows_scales
@pytest.mark.filterwarnings("ignore")
def test_every_op_of_a_packed_model_runs_from_a_package(tmp_path):
    torch.manual_seed(0)
    model = Net().to(BF16).eval().requires_grad_(False)
    recipe = named("nvfp4_static").replace(rules=RULES, static_scales={"static": 0.002, "read": 0.002})
    fp4compile.pack_(model, recipe, contracted={"experts": -1}, progress=False)
    inputs = torch.randn(8, 64, dtype=BF16), torch.tensor([3, 8], dtype=torch.int32)
    program = torch.export.export(model, inputs)
    ops = {str(node.target).split(".")[1] for node in program.graph.nodes if str(node.target).startswith("fp4compile.")}
    assert ops == {"quantize", "scaled_mm", "dequantize"}
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    with torch.no_grad():
        for x in (inputs[0], torch.randn(8, 64, dtype=BF16)):
            assert all(map(torch.equal, loaded(x, inputs[1]), model(x, inputs[1])))
