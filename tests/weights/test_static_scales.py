"""Static global scales of packed layers: inputs of graphs, which blocks share, and the same object for equal scales."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp4compile
from fp4compile.recipe import named
from fp4compile.weights.linear import PackedLinear
from tests.helpers.absent_gpu_model import DEVICE, compiled_for, pretended
from tests.helpers.graphs import compile_recorded

BLOCKS = 10  # more than Dynamo compiles of one function
BF16 = torch.bfloat16


class Block(nn.Module):
    """Gate and up read the same tensor, and so have one scale; down has another."""

    def __init__(self, width=64):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def packed_blocks(count, width=64):
    """Packed blocks, and their recipe: each block has scales of its own."""
    torch.manual_seed(0)
    scales = {}
    for block in range(count):
        scales |= {f"{block}.gate": 0.01 + block / 512, f"{block}.up": 0.01 + block / 512, f"{block}.down": 2.0**-block}
    model = nn.Sequential(*(Block(width) for _ in range(count))).to(BF16).eval().requires_grad_(False)
    recipe = named("nvfp4_static").replace(static_scales=scales)
    fp4compile.pack_(model, recipe, progress=False)
    return model, recipe


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.mark.usefixtures("without_kernels")
def test_blocks_of_different_scales_share_a_graph():
    model, recipe = packed_blocks(BLOCKS)
    backend = fp4compile.backend(recipe, strict=True)  # raises where a block would run uncompiled
    for block in model:
        block.compile(backend=backend)
    with torch.no_grad():
        model(torch.randn(4, 64, dtype=BF16))
    assert backend.report.graphs == 1
    assert [row.module.split(".")[-1] for row in backend.report.rows] == ["gate", "up", "down"]


@pytest.mark.parametrize("training", [False, True])
def test_a_shared_graph_multiplies_by_the_scales_of_its_block(training):
    model, _ = packed_blocks(3)
    x = torch.randn(4, 64, dtype=BF16, requires_grad=training)
    compiled = torch.compile(model[0].forward.__func__, backend="aot_eager")
    for block in model:
        expected, found = block(x), compiled(block, x)
        assert torch.equal(found, expected)
        if training:
            assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)))
    scales = [layer._static.item() for layer in layers_of(model)]
    assert scales == [torch.tensor(layer.layer_format.activation_outer).item() for layer in layers_of(model)]
    assert len(set(scales)) == 6


@pytest.mark.usefixtures("without_kernels")
def test_layers_of_one_scale_quantise_alike():
    """So that `merge_quantize` makes their quantisers one."""
    model, recipe = packed_blocks(1)
    with torch.no_grad():
        compiled, recorder = compile_recorded(model, fp4compile.backend(recipe))
        compiled(torch.randn(4, 64, dtype=BF16))
    calls = [line.split(" = ")[1] for graph in recorder.graphs for line in graph.splitlines() if " = " in line]
    of_gate, of_up, of_down = (call for call in calls if call.startswith("fp4compile.quantize("))
    assert of_gate == of_up and of_down != of_gate


def test_blackwell_fuses_a_quantiser_of_a_static_scale(monkeypatch):
    """Gate and up are one launch, which quantises its result by the static scale of down."""
    model, recipe = packed_blocks(1, 512)
    with pretended(monkeypatch, 100) as launches:
        model.to(DEVICE)
        x = torch.empty(256, 512, device=DEVICE, dtype=BF16)
        found = compiled_for(monkeypatch, model, x, recipe, launches)
    assert [one.kernel.__name__ for one in found.launches] == ["quantize_rows", "gemm_block_scaled_sm100"]
    assert found.launches[1].constants["PAIR"] == 1  # down is multiplied by the library
    assert found.launches[1].constants["EPILOGUE"].endswith("| e2m1 e4m3 torchao 16 tensor bfloat16")
    assert [row.fused for row in found.report.rows] == ["silu, mul, quantize", None, None]


# ---------------------------------------------------------------- copies, moves, files


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_a_file_of_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def of_an_older_version(model):
    """A pickle without the tensor."""
    state = model.__reduce_ex__(2)
    assert all(layer.__getstate__().pop("_static") is None for layer in layers_of(model)) and state
    for layer in layers_of(model):
        del layer._static
    return through_pickle(model)


ROADS = {
    "deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_a_file_of_torch,
    "older": of_an_older_version, "half": lambda model: model.half().to(BF16), "double": lambda model: model.to(BF16),
    "through meta": lambda model: model.to("meta").to_empty(device="cpu"),
}  # fmt: skip


@pytest.mark.parametrize("road", ROADS)
def test_the_scale_is_kept(road):
    model, _ = packed_blocks(2)
    before, values = model.state_dict(), [layer._static.clone() for layer in layers_of(model)]
    model = ROADS[road](model)
    model.load_state_dict(before)
    assert not [name for name in before if "static" in name]
    for block in model:
        assert block.gate._static is block.up._static and block.gate._static is not block.down._static
    for layer, value in zip(layers_of(model), values, strict=True):
        assert torch.equal(layer._static, value) and layer._static.device == layer.weight_data.device
        assert layer._static.dtype == torch.float32 and not layer._static.is_inference()


def test_a_weight_that_was_moved_by_itself(monkeypatch):
    """As accelerate moves buffers one by one: the scale still is where the input is."""
    model, _ = packed_blocks(1)
    layer = model[0].down
    for name in ("weight_data", "weight_scales", "weight_outer"):
        layer._buffers[name] = layer._buffers[name].to("meta")
    x = torch.empty(2, 64, dtype=BF16, device="meta")
    assert layer._static.device.type == "cpu"
    assert layer(x).device.type == "meta"
    assert torch.compile(layer, backend="aot_eager", fullgraph=True)(x).device.type == "meta"


def test_under_modes_and_in_exported_programs():
    model, _ = packed_blocks(1)
    x = torch.randn(4, 64, dtype=BF16)
    with torch.inference_mode():
        expected = model(x)
    fake, mode = copy.deepcopy(model), FakeTensorMode()
    for layer in layers_of(fake):
        layer._buffers = {
            name: each if each is None else mode.from_tensor(each) for name, each in layer._buffers.items()
        }
    with mode:
        assert fake(torch.empty(4, 64, dtype=BF16)).fake_mode is mode
    assert torch.equal(make_fx(model)(x)(x), expected)
    for strict in (True, False):
        assert torch.equal(torch.export.export(model, (x,), strict=strict).module()(x), expected)
    assert torch.equal(model(x), expected)
