"""Other libraries' loaders on a packed model: they give equal bits, or an error that names the call to use."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import fp4compile
from fp4compile.formats import formats
from fp4compile.weights.buffers import PackedWeight
from tests.helpers.tiny_llama import llama

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
torch_files = pytest.importorskip("safetensors.torch")

RECIPES = ("nvfp4", "mxfp8", "float8_rowwise")
TOKENS = torch.arange(16).view(1, 16)
CPU = {"": "cpu"}


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture(scope="module", params=RECIPES)
def saved(request, tmp_path_factory):
    """A packed model, its logits, and the files that libraries write of it."""
    model, root = llama(seed=0), tmp_path_factory.mktemp("saved")
    fp4compile.pack_(model, request.param)
    model.save_pretrained(root / "pretrained")
    fp4compile.save_packed(model, root / "packed.safetensors")
    torch_files.save_model(model, str(root / "model.safetensors"))
    accelerate.Accelerator(cpu=True).save_model(model, str(root / "accelerate"))
    torch.save(model.state_dict(), root / "state.pt")
    dcp.save(get_model_state_dict(model), checkpoint_id=root / "dcp", no_dist=True)
    return SimpleNamespace(model=model, root=root, recipe=request.param, logits=logits(model))


def skeleton(saved, *, meta=False):
    """A packed model with other weights, or with none."""
    with accelerate.init_empty_weights() if meta else torch.no_grad():
        model = llama(seed=1)
    fp4compile.pack_(model, saved.recipe)
    return model


def file_of(saved, name):
    """The tensors of a file; those that `save_model` and `save_packed` left out are tied in the model."""
    return torch_files.load_file(saved.root / name)


def in_model(folder, *, meta, device_map, dispatch=False):
    def load(saved):
        model, path = skeleton(saved, meta=meta), str(saved.root / folder)
        if dispatch:
            return accelerate.load_checkpoint_and_dispatch(model, path, device_map=device_map)
        accelerate.load_checkpoint_in_model(model, path, device_map=device_map)
        return model

    return load


def save_state(saved):
    launcher = accelerate.Accelerator(cpu=True)
    model = launcher.prepare(copy.deepcopy(saved.model))
    launcher.save_state(str(saved.root / "state"))
    model.load_state_dict(skeleton(saved).state_dict())
    assert not torch.equal(logits(model), saved.logits)
    launcher.load_state(str(saved.root / "state"))
    return model


def load_model(saved):
    model = skeleton(saved)
    torch_files.load_model(model, str(saved.root / "model.safetensors"))
    return model


def state_dict(read, **options):
    def load(saved):
        model = skeleton(saved, meta=options.get("assign", False))
        model.load_state_dict(read(saved), **options)
        return model

    return load


def set_state(read, **options):
    def load(saved):
        model = skeleton(saved)
        set_model_state_dict(model, read(saved), options=StateDictOptions(**options))
        return model

    return load


def distributed_checkpoint(saved):
    model = skeleton(saved)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=saved.root / "dcp", no_dist=True)
    set_model_state_dict(model, state)
    return model


def by_value(saved):
    """Copy each tensor of a file into the model's tensor of that name, as many scripts do."""
    model = skeleton(saved)
    mine = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in file_of(saved, "packed.safetensors").items():
        mine[name].data.copy_(tensor)
    return model


def saved_with_torch(saved):
    return torch.load(saved.root / "state.pt", weights_only=True)


def saved_with_packed(saved):
    return file_of(saved, "packed.safetensors")


LOADERS = {
    "load_checkpoint_in_model": in_model("pretrained", meta=False, device_map=None),
    "load_checkpoint_in_model, device_map": in_model("pretrained", meta=False, device_map=CPU),
    "load_checkpoint_in_model, meta, device_map": in_model("pretrained", meta=True, device_map=CPU),
    "load_checkpoint_and_dispatch, meta": in_model("pretrained", meta=True, device_map=CPU, dispatch=True),
    "save_packed, load_checkpoint_in_model, meta, device_map": in_model(
        "packed.safetensors", meta=True, device_map=CPU
    ),
    "Accelerator.save_model": in_model("accelerate", meta=False, device_map=None),
    "Accelerator.save_model, meta, device_map": in_model("accelerate", meta=True, device_map=CPU),
    "Accelerator.save_state": save_state,
    "safetensors save_model, load_model": load_model,
    "load_state_dict of save_packed": state_dict(saved_with_packed),
    "load_state_dict of torch.save": state_dict(saved_with_torch),
    "load_state_dict of torch.save, assign": state_dict(saved_with_torch, assign=True),
    "set_model_state_dict": set_state(saved_with_torch),
    "set_model_state_dict of save_packed": set_state(saved_with_packed),
    "set_model_state_dict of save_packed, full": set_state(saved_with_packed, full_state_dict=True),
    "set_model_state_dict of save_packed, full, not strict": set_state(
        saved_with_packed, full_state_dict=True, strict=False
    ),
    "dcp.load": distributed_checkpoint,
    "copy_": by_value,
    "from_pretrained, device_map": lambda saved: transformers.AutoModelForCausalLM.from_pretrained(
        saved.root / "pretrained", device_map=CPU
    ),
}


# NVFP4 has every kind of tensor; what another recipe's tensors need of a loader, one of each library shows.
OF_OTHERS = ("load_checkpoint_in_model, meta, device_map", "load_state_dict of torch.save, assign", "dcp.load",
             "safetensors save_model, load_model", "from_pretrained, device_map")  # fmt: skip


@pytest.mark.parametrize(("saved", "loader"), [
    *(("nvfp4", loader) for loader in LOADERS), *((recipe, one) for recipe in RECIPES[1:] for one in OF_OTHERS),
], indirect=["saved"])  # fmt: skip
def test_loaders_give_equal_bits(saved, loader):
    assert torch.equal(logits(LOADERS[loader](saved)), saved.logits)


@pytest.mark.parametrize("meta", (False, True))
def test_layers_that_stay_on_disk(saved, meta, tmp_path):
    """With `offload_buffers=True`: without it, accelerate loads no buffers of modules on disk, of any model."""
    model, places = skeleton(saved, meta=meta), {"model": "disk", "lm_head": "cpu"}
    model = accelerate.load_checkpoint_and_dispatch(
        model, str(saved.root / "pretrained"), device_map=places, offload_folder=tmp_path, offload_buffers=True
    )
    assert torch.equal(logits(model), saved.logits)


# ---------------------------------------------------------------- refused


def old_state(model):
    """The state dict as versions wrote it whose codes and scales had the format's dtype."""
    state = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, PackedWeight):
            fmt = formats.get(layer.layer_format.weight)
            for part, dtype in (("weight_data", fmt.data_dtype), ("weight_scales", fmt.scale_dtype)):
                if f"{name}.{part}" in state:
                    state[f"{name}.{part}"] = state[f"{name}.{part}"].view(dtype)
            text = json.dumps(layer.description, sort_keys=True, separators=(",", ":"))
            state[f"{name}._extra_state"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return state


def test_states_of_earlier_versions(saved, tmp_path):
    state, model = old_state(saved.model), skeleton(saved)
    model.load_state_dict(state)
    assert torch.equal(logits(model), saved.logits)
    torch_files.save_file(
        {name: t.clone() for name, t in state.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    model = skeleton(saved)
    accelerate.load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(logits(model), saved.logits)
    with pytest.raises(ValueError, match="_extra_state"):  # where accelerate would cast
        accelerate.load_checkpoint_in_model(skeleton(saved), tmp_path, device_map=CPU)


def test_scales_that_a_loader_has_cast_are_refused(saved):
    model = skeleton(saved, meta=True)
    accelerate.load_checkpoint_in_model(model, saved.root / "pretrained", device_map=CPU, dtype=torch.float16)
    if saved.recipe == "mxfp8":  # which has bytes alone
        assert logits(model).dtype == torch.float16
        return
    with pytest.raises(TypeError, match=r"weight_outer: expected torch.float32, got torch.float16.*load_packed"):
        logits(model)


def test_weights_in_high_precision_are_refused(saved):
    for strict in (True, False):
        with pytest.raises(
            RuntimeError, match="the state has its weight unpacked; load the state before fp4compile.pack_"
        ):
            skeleton(saved).load_state_dict(llama(seed=1).state_dict(), strict=strict)


def test_a_layer_that_was_not_loaded_is_refused(saved):
    model = skeleton(saved, meta=True)
    accelerate.load_checkpoint_in_model(model, saved.root / "pretrained", device_map=CPU)
    layer = model.model.layers[0].mlp.up_proj.to("meta")
    with pytest.raises(ValueError, match="weight: has no values.*fp4compile.load_packed"):
        layer(torch.ones(2, 64, dtype=torch.bfloat16))
