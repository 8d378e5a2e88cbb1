"""FP8 with float32 scales in models: among them blocks of 1x64, a format that only its spec string names.

Its scale type is in formats.py, reference.py and device/block_scales.py alone; test_float32_scale_kernels.py has the
kernels.
"""

import copy
import dataclasses
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp4compile
from fp4compile import _compat
from fp4compile.distributed.codes import Direction
from fp4compile.formats import formats, reference
from fp4compile.weights.buffers import buffer_shapes
from tests.helpers import without_codegen
from tests.helpers.gathered_codes import K, N, gathered, weight

FORMAT = "e4m3:1x64:float32:-:torchao"
FMT = formats.get(FORMAT)
ANY_SIZE = {"min_m": 0, "min_n": 0, "min_k": 0}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 80)).bfloat16()


def dequantised(x, fmt):
    return reference.dequantize(*reference.quantize(x, fmt), fmt, x.shape[-1], torch.float32)


def by_hand(x, layer):
    a, w = (reference.dequantize_blocks(*reference.quantize(each, FMT)[:2], FMT) for each in (x, layer.weight))
    return (a @ w.t() + layer.bias.float()).to(x.dtype)


def test_values_are_as_near_as_elements_are():
    x = torch.randn(5, 200)
    found = fp4compile.quantize(x, FORMAT)
    assert found.scales.dtype == torch.float32 and found.scales.shape == (5, 4) and found.data.shape == (5, 256)
    assert (found.dequantize() - x).abs().max() <= x.abs().max() / 16
    amax = torch.nn.functional.pad(x, (0, 56)).view(5, 4, 64).abs().amax(-1)
    assert torch.equal(found.scales, 1 / (448 / amax.double()).float())
    down = fp4compile.quantize(x, FORMAT, dim=0)
    assert torch.equal(down.dequantize(), fp4compile.quantize(x.t(), FORMAT).dequantize())
    assert fp4compile.quantize(x, FORMAT, layout="swizzled").layout == "linear"
    flat = dataclasses.replace(found, scales=torch.ones(512))
    with pytest.raises(ValueError, match=r"a_scales: expected torch.float32 of shape \(5, 4\)"):
        fp4compile.scaled_mm(flat, found)


def test_a_compiled_model_multiplies_it():
    model, x = net(), torch.randn(7, 96).bfloat16()
    backend = fp4compile.backend({"fprop_x": FORMAT, "fprop_w": FORMAT} | ANY_SIZE)
    with torch.no_grad():
        found = torch.compile(model, backend=backend)(x)
        expected = by_hand(by_hand(x, model[0]).relu(), model[2])
    assert torch.equal(found, expected)
    assert [(row.left, row.right, row.reason) for row in backend.report.rows] == [(FORMAT, FORMAT, None)] * 2


def test_training_quantises_all_three_products(monkeypatch):
    without_codegen.install(monkeypatch)  # `test_a_compiled_model_multiplies_it` has Inductor's code
    roles = [f"{product}_{side}" for product, sides in
             (("fprop", "xw"), ("dgrad", ("dy", "w")), ("wgrad", ("dy", "x"))) for side in sides]  # fmt: skip
    backend = fp4compile.backend(dict.fromkeys(roles, FORMAT) | ANY_SIZE)
    model, x = net(), torch.randn(70, 96).bfloat16()
    torch.compile(model, backend=backend)(x).sum().backward()
    expected = copy.deepcopy(model)
    expected.zero_grad()
    expected(x).sum().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.nn.functional.cosine_similarity(one.grad.flatten(), other.grad.flatten(), 0) > 0.99
    assert {row.product for row in backend.report.rows if row.reason is None} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize(("activation", "format"), [
    (FORMAT, FORMAT), (None, FORMAT), (None, "float8_128x128"), (None, "float8_rowwise"), (None, "float8_tensor"),
    ("float8_1x128", "float8_128x128"), ("float8_tensor", "float8_tensor"), ("float8_rowwise", "float8_tensor"),
])  # fmt: skip
def test_packed_layers_are_cast_saved_and_loaded(activation, format, tmp_path):
    model, x, path = net(), torch.randn(7, 96).bfloat16(), tmp_path / "packed.safetensors"
    recipe, fmt = {"fprop_x": activation, "fprop_w": format} | ANY_SIZE, formats.get(format)
    compiled = torch.compile(copy.deepcopy(model), backend=fp4compile.backend(recipe))
    report = fp4compile.pack_(model, recipe)
    assert [row.weight for row in report.rows] == [fmt.nbytes(64, 96), fmt.nbytes(80, 64)]
    with torch.no_grad():
        expected = model(x)
        if activation is None:
            values = (dequantised(layer.weight, fmt) for layer in (net()[0], net()[2]))
            by_values = torch.func.functional_call(
                net(), {f"{i}.weight": value.bfloat16() for i, value in zip((0, 2), values, strict=True)}, (x,)
            )
            assert (expected - by_values).abs().max() < 0.02
        assert torch.equal(expected, compiled(x))
        assert torch.equal(expected, torch.compile(copy.deepcopy(model), backend=fp4compile.backend(recipe))(x))
    fp4compile.save_packed(model, path)
    fresh = net()
    fp4compile.load_packed(fresh, path)
    other = net()
    fp4compile.pack_(other, recipe)
    other.load_state_dict(torch.load(_saved(model.state_dict())))
    for loaded in (fresh, other, copy.deepcopy(model).half().bfloat16()):
        with torch.no_grad():
            assert torch.equal(loaded(x), expected)


def test_scales_that_no_weight_has_are_not_saved(tmp_path):
    model = net()
    fp4compile.pack_(model, {"fprop_w": FORMAT} | ANY_SIZE)
    assert buffer_shapes(model[0])["weight_scales"] == ((64, 2), torch.float32)
    for wrong in (-1.0, torch.nan):
        model[0].weight_scales.view(torch.float32)[3, 1] = wrong
        with pytest.raises(ValueError, match=r"tensor '0.weight_scales': has scales that are NaN, neg"):
            fp4compile.save_packed(model, tmp_path / "packed.safetensors")


def _saved(state) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("format", [FORMAT, "e4m3:64x64:float32:-:te"])
def test_ranks_gather_its_codes(format):
    parts = {}
    for dim in (-1, -2):
        direction = Direction(format, dim, (N, K))
        parts[dim] = gathered(direction, weight())
        for found, wanted in zip(parts[dim], torch.ops.fp4compile.quantize(weight(), format, dim), strict=True):
            assert found is None or torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    if formats.get(format).square:
        turned = tuple(None if part is None else torch.empty_like(part) for part in parts[-2])
        Direction(format, -2, (N, K)).transpose(tuple(parts[-1]), turned)
        assert all(one is None or torch.equal(one, other) for one, other in zip(turned, parts[-2], strict=True))


@pytest.mark.skipif(not _compat.SHARDS_INTEGERS, reason="FSDP2 shards no integers in this torch")
def test_a_sharded_packed_layer_keeps_its_scales():
    """FSDP2 casts parameters of floats to the policy's dtype."""
    model, x = net(), torch.randn(7, 96).bfloat16()
    fp4compile.pack_(model, {"fprop_w": FORMAT} | ANY_SIZE)
    with torch.no_grad():
        expected = model(x)
        fp4compile.make_shardable_(model)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
            assert torch.equal(model(x), expected)
        finally:
            dist.destroy_process_group()
