"""Packed layers under FSDP2: each rank keeps its rows of the codes and scales."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp4compile
from fp4compile import _compat

pytestmark = pytest.mark.skipif(not _compat.SHARDS_INTEGERS, reason="FSDP2 shards no integers in this torch")
pytest.importorskip("peft")
from tests.helpers import process_groups, sharded_adapters  # noqa: E402


def test_adapters_train_on_shards_as_on_whole_codes(tmp_path):
    statuses, said = process_groups.run_ranks(sharded_adapters.main, [f"{tmp_path}/found.pt"], tmp_path)
    assert statuses == [0] * sharded_adapters.RANKS, said
    found = torch.load(tmp_path / "found.pt")
    assert found["losses"][0] == found["losses"][1] and len(set(found["losses"][0])) == 3
    assert found["mine"] == found["whole"] / 2
    saved = found["saved"]
    assert saved["one"] == saved["two"] == saved["again"], "a checkpoint is resumed by one rank, and by two again"
    assert torch.equal(found["loaded"], found["result"]), "a gathered state gives a sharded model its bits"
    assert torch.equal(found["compiled"], found["alone"]), "a compiled block multiplies the whole model's codes"
    assert found["quantised"] == [(f"blocks.0.{name}", "nvfp4") for name in ("down", "up")]


@pytest.mark.parametrize("recipe", ("nvfp4", "mxfp8", "float8_rowwise"))
def test_whole_and_shardable_layers_exchange_states(recipe, tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(96, 64)), torch.randn(5, 96)
    fp4compile.pack_(model, recipe)
    state = model.state_dict()
    other = nn.Sequential(nn.Linear(96, 64))
    fp4compile.pack_(other, recipe)
    fp4compile.make_shardable_(other)
    other.load_state_dict(state)
    assert torch.equal(other.bfloat16().float()(x), model.bfloat16().float()(x)), "casts leave the codes alone"
    model.load_state_dict(copy.deepcopy(other).state_dict())
    assert torch.equal(model[0].weight, other[0].weight)
    fp4compile.save_packed(other, tmp_path / "packed.safetensors")
    loaded = nn.Sequential(nn.Linear(96, 64))
    fp4compile.load_packed(loaded, tmp_path / "packed.safetensors")
    assert torch.equal(loaded(x), other(x))
    with pytest.raises(RuntimeError, match="takes no other weight; merge adapters before"):
        other[0].weight.data = torch.zeros(64, 96)


@pytest.mark.parametrize("style", (ColwiseParallel, RowwiseParallel))
def test_packed_layers_under_tensor_parallelism_are_refused(style):
    model = nn.Sequential(nn.Linear(96, 64))
    fp4compile.pack_(model, "mxfp8")
    plan = {"0": style(input_layouts=Replicate())}
    with process_groups.alone(), pytest.raises((AttributeError, RuntimeError), match="takes unpacked layers"):
        parallelize_module(model, init_device_mesh("cpu", (1,)), plan)(torch.ones(1, 96))


@pytest.mark.parametrize("shardable", (False, True))
@pytest.mark.parametrize("write", (fp4compile.save_packed, fp4compile.export_packed))
def test_a_part_of_a_model_is_not_written(write, shardable, tmp_path):
    model = nn.Sequential(nn.Linear(96, 64))
    fp4compile.pack_(model, "mxfp8")
    if shardable:
        fp4compile.make_shardable_(model)
    with process_groups.alone():
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"model: '0\.\w+' is sharded, .*load the gathered state"):
            write(model, tmp_path / "written")


class Experts(nn.Module):
    """A module that is none of torch's own."""


def test_experts_are_shardable():
    model = Experts()
    model.weights = nn.Parameter(torch.randn(3, 64, 96))
    fp4compile.pack_(model, "nvfp4", contracted={"weights": -1})
    expected = model.weights.clone()
    fp4compile.make_shardable_(model)
    assert [(name, p.dtype) for name, p in model.named_parameters()] == [
        (f"weights_packed.{name}", torch.uint8) for name in ("weight_data", "weight_scales")
    ]
    assert torch.equal(model.weights, expected)


def test_a_model_without_packed_layers_is_refused():
    with pytest.raises(ValueError, match="has no packed layer"):
        fp4compile.make_shardable_(nn.Sequential(nn.Linear(8, 8)))


def test_an_older_torch_is_told(monkeypatch):
    monkeypatch.setattr(_compat, "SHARDS_INTEGERS", False)
    model = nn.Sequential(nn.Linear(96, 64))
    fp4compile.pack_(model, "nvfp4")
    with pytest.raises(RuntimeError, match=r"its fully_shard takes no parameters of integers; 2\.13 does"):
        fp4compile.make_shardable_(model)
    assert [name for name, _ in model.named_parameters()] == ["0.bias"]
