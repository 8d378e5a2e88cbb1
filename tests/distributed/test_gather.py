"""Which weights `gather_quantized_` makes FSDP2 gather as codes, decided among ranks that do not exist."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import fp4compile
from fp4compile.distributed import gather_quantized_
from fp4compile.distributed.shard import QuantizedShard
from fp4compile.distributed.whole import GatheredWeight

RANKS = 4


@pytest.fixture(autouse=True)
def four_ranks():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 128, 64))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.served = nn.Linear(64, 128)
        self.uneven = nn.Linear(64, 130)
        self.cut = nn.Linear(64, 192)  # 48 rows a rank, blocks of 32
        self.across = nn.Linear(64, 128)
        self.skipped = nn.Linear(64, 128)
        self.again = nn.Linear(64, 128)
        self.twin = nn.Linear(64, 128)
        self.twin.weight = self.again.weight
        self.experts = Experts()
        self.odd = nn.Linear(64, 128, dtype=torch.float64)
        self.embed = nn.Embedding(128, 64)
        self.lm_head = nn.Linear(64, 128)


def sharded(model, mesh=None):
    def placement(parameter):
        return Shard(1) if parameter is getattr(getattr(model, "across", None), "weight", None) else Shard(0)

    if isinstance(model, Model):  # FSDP2 gathers one dtype in one group
        fully_shard(model.odd)
    return fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def test_every_weight_that_keeps_its_gather_has_a_reason():
    model = sharded(Model())
    report = gather_quantized_(model, {"recipe": "mxfp8", "rules": [("skip*", "skip")]})
    reasons = {(row.module, row.product): row.reason for row in report.rows}
    assert reasons == {
        ("served", "fprop"): None, ("served", "dgrad"): None,
        ("uneven", "fprop"): "its 130 rows do not divide evenly among 4 ranks",
        ("cut", "fprop"): "the 48 rows of a rank cut blocks of 32 rows (mxfp8)",
        ("across", "fprop"): "it is sharded along dimension 1",
        ("skipped", "fprop"): "rule 'skip*'",
        ("again", "fprop"): "another module has the same parameter",
        ("experts.up", "fprop"): "weights of experts are gathered in high precision",
        ("odd", "fprop"): "dtype float64",
        ("lm_head", "fprop"): "output head",
    }  # fmt: skip
    quantised = [name for name, one in model.named_parameters() if isinstance(one._local_tensor, QuantizedShard)]
    assert quantised == ["served.weight"]


def test_files_and_copies_hold_plain_tensors():
    """They are read without this package."""
    model = sharded(nn.Sequential(nn.Linear(64, 128)))
    gather_quantized_(model, "mxfp8")
    shard, file = model[0].weight.to_local(), io.BytesIO()
    torch.save({"shard": shard}, file)
    file.seek(0)
    for copied in (torch.load(file, weights_only=True)["shard"], copy.deepcopy(model.state_dict())["0.weight"]):
        assert type(getattr(copied, "_local_tensor", copied)) is torch.Tensor
    assert type(shard) is QuantizedShard and torch.equal(copied.to_local(), shard)


def test_asynchronous_checkpoints_have_the_values():
    """`async_save` stages a copy of the state dict, and writes it while the training goes on."""
    model = sharded(nn.Sequential(nn.Linear(64, 128)))
    gather_quantized_(model, "mxfp8")
    shard, file = model[0].weight.to_local(), io.BytesIO()
    before, staged = shard.values.clone(), StateDictStager().stage(model.state_dict())["0.weight"]
    with torch.no_grad():
        shard.add_(1)
    torch.save(staged.to_local(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), before)


def test_compiled_optimisers_take_shards():
    model = sharded(nn.Sequential(nn.Linear(64, 128)))
    gather_quantized_(model, "mxfp8")
    shard = model[0].weight.to_local()
    found = torch.compile(lambda weight: weight * 2, backend="aot_eager")(shard)
    assert type(found) is torch.Tensor and torch.equal(found, copy.deepcopy(shard) * 2)


@pytest.mark.parametrize(("recipe", "forward", "backward"), [
    ("nvfp4_train", [2], []), ("nvfp4", [2], []), ("float8_rowwise", [], [64 + 128]), ("mxfp8", [], []),
])  # fmt: skip
def test_the_scales_of_a_module_take_one_collective(recipe, forward, backward, monkeypatch):
    """A global scale is made of one number of a weight; scales of columns, which a forward pass lacks, of many.

    A backward pass has the numbers of its forward pass, and the next forward pass has new ones.
    """
    numbers = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_, **__: numbers.append(tensor.numel()))
    model = fully_shard(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128)), reshard_after_forward=True)
    assert len(gather_quantized_(model, recipe).quantised) == 4
    for _ in range(2):
        found = model(torch.ones(4, 64))
        assert numbers == forward
        found.sum().backward()
        assert numbers == forward + backward
        numbers.clear()


def test_magnitudes_are_reduced_as_bits_on_the_device(monkeypatch):
    """NaN, of either sign, is above all others. FSDP2 copies one weight at a time from the host to the device."""
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_, **__: reduced.append(tensor.clone()))
    for policy, sizes in ((OffloadPolicy(), [2]), (CPUOffloadPolicy(pin_memory=False), [1, 1])):
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        with torch.no_grad():
            model[0].weight[3, 5] = -torch.tensor(torch.nan)
        gather_quantized_(fully_shard(model, offload_policy=policy), "nvfp4_train")
        model.unshard()
        assert [one.numel() for one in reduced] == sizes
        nan, other = torch.cat(reduced).tolist()
        assert nan > torch.tensor(torch.inf).view(torch.int32) > other > 0
        reduced.clear()


class Counting(TorchDispatchMode):
    """Names of the operators that launch something, not of views and of what allocates memory alone.

    copied: how many tensors each `_foreach_copy_` copies.
    """

    def __enter__(self):
        self.names, self.copied = [], []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._foreach_copy_.default:
            self.copied.append(len(args[0]))
        if not (function.is_view or "empty" in function.name() or "record_function" in function.name()):
            self.names.append(function.name().partition("::")[2].partition(".")[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["nvfp4_train", "mxfp8", "float8_rowwise"])
def test_weights_of_one_size_are_quantised_by_the_launches_of_one(recipe, monkeypatch):
    """Each launch before a gather would have to wait for a place among the products that run meanwhile."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    found = []
    for count in (1, 5):
        model = sharded(nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(count)]))
        gather_quantized_(model, recipe)
        model.unshard()
        model.reshard()
        with torch.no_grad(), Counting() as counting:
            waiting = model.unshard(async_op=True)
        found.append(counting.names)
        with torch.no_grad(), Counting() as counting:
            waiting.wait()
        # Nothing of the codes along the rows is copied, and one call copies the codes along the columns of all weights
        # to where they belong. Square blocks are transposed, in one compiled function on a GPU.
        assert counting.copied == {"nvfp4_train": [], "mxfp8": [2 * count], "float8_rowwise": [count]}[recipe]
        assert counting.names.count("copy_") == 3 * (recipe == "nvfp4_train") * count
        assert counting.names.count("clone") == (recipe == "nvfp4_train") * count
    assert found[0] == found[1] and "quantize" in found[0]


@pytest.mark.parametrize("reshard", [True, False])
def test_codes_that_a_forward_pass_does_not_read_are_invalid(reshard):
    """Where the weight stays gathered after it, the backward pass reads what the forward pass gathered."""
    model = fully_shard(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128)), reshard_after_forward=reshard)
    gather_quantized_(model, "mxfp8")
    seen = []

    def look(layer, _):
        weight = layer.weight.data
        invalid = weight.column_scales.view(torch.uint8).eq(255).all().item()
        seen.append((weight.dequantised().isfinite().all().item(), invalid))

    for layer in model:
        layer.register_forward_pre_hook(look)
    model(torch.ones(4, 64))
    assert seen == [(True, reshard)] * 2


def test_a_loaded_or_cast_weight_is_still_gathered_as_codes():
    model = sharded(nn.Sequential(nn.Linear(64, 128)))
    gather_quantized_(model, "mxfp8")
    state = {
        name: value.clone().detach() for name, value in sharded(nn.Sequential(nn.Linear(64, 128))).state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    assert isinstance(model[0].weight.to_local(), QuantizedShard)
    model.to(torch.bfloat16).unshard()
    assert (type(model[0].weight.data), model[0].weight.dtype) == (GatheredWeight, torch.bfloat16)
    model.reshard()
    with pytest.raises(RuntimeError, match="before the first forward pass"):
        gather_quantized_(_opened(), "mxfp8")


def test_the_first_forward_pass_may_be_an_evaluation():
    """The memory that is made for it is that of training, too."""
    model, x = sharded(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))), torch.ones(4, 64)
    gather_quantized_(model, "nvfp4_train")
    with torch.inference_mode():
        assert model(x).shape == x.shape
    model(x).sum().backward()
    assert all(one.grad is not None for one in model.parameters())


def test_a_model_is_freed():
    model = sharded(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)))
    gather_quantized_(model, "mxfp8")
    model(torch.ones(4, 64)).sum().backward()
    freed = [weakref.ref(each) for each in (model, model[0].weight, model[0].weight.to_local())]
    del model
    gc.collect()
    assert [each() for each in freed] == 3 * [None]


def _opened():
    model = sharded(nn.Sequential(nn.Linear(64, 128)))
    model.unshard()
    model.reshard()
    return model


@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "nvfp4_one_level"])
def test_a_weight_that_a_product_reads_in_high_precision_keeps_its_gather(recipe):
    (row,) = gather_quantized_(sharded(nn.Sequential(nn.Linear(64, 128))), recipe).rows
    assert row.reason == f"recipe {recipe} leaves its weight in high precision in dgrad"


def test_replicated_shards_keep_their_gather():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    (row,) = gather_quantized_(sharded(nn.Sequential(nn.Linear(64, 128)), mesh), "mxfp8").rows
    assert row.reason == "its shards are replicated (HSDP)"


def test_bad_arguments_are_named():
    model = nn.Sequential(nn.Linear(64, 128))
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got list"):
        gather_quantized_([model])
    with pytest.raises(ValueError, match="call torch.distributed.fsdp.fully_shard first"):
        gather_quantized_(model)
    fully_shard(model)
    with pytest.raises(TypeError, match="recompute: expected a bool, got int"):
        gather_quantized_(model, recompute=1)
    with pytest.raises(TypeError, match="over_nvlink: expected a bool, got str"):
        gather_quantized_(model, over_nvlink="yes")
    with pytest.raises(ValueError, match="unknown recipe 'mxpf8'"):
        gather_quantized_(model, "mxpf8")
    gather_quantized_(model, fp4compile.Recipe.from_dict({"recipe": "mxfp8"}))
    with pytest.raises(ValueError, match="gathered quantised already"):
        gather_quantized_(model, "mxfp8")
