"""Own names through wrappers: analysis, `pack_` and `block_recipe` decide as in the model without the wrapper."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

import fp4compile
from fp4compile.analysis.module_names import ADAPTER, TRAINED_COPY, clean_name, named_tensors, walk


class Model(nn.Module):
    """Blocks, a router beside experts, and a head; every layer is 64 x 64."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": layer(), "down": layer()}) for _ in range(2))
        self.experts = nn.ModuleDict({"a": layer()})
        self.gate, self.lm_head = layer(), layer()

    def forward(self, x):
        for block in self.blocks:
            x = block["down"](block["up"](x).relu())
        return self.lm_head(self.experts["a"](x) * self.gate(x))


def layer() -> nn.Linear:
    return nn.Linear(64, 64, bias=False)


RECIPE = {"recipe": "mxfp8", "skip_first_blocks": 1, "rules": [["blocks.1.up", "skip"]]}
LEFT = {
    "blocks.0.up": "block 0 is among the first 1", "blocks.0.down": "block 0 is among the first 1",
    "blocks.1.up": "rule 'blocks.1.up'", "gate": "router: its outputs choose among experts", "lm_head": "output head",
}  # fmt: skip
DECIDED = LEFT | {"blocks.1.down": None, "experts.a": None}


def each_layer(wrap):
    """A wrapper of the whole model that wraps each of its layers."""

    def wrapped(model):
        for holder in list(model.modules()):
            for name, child in list(holder.named_children()):
                if isinstance(child, nn.Linear):
                    holder._modules[name] = wrap(child)
        return model

    return wrapped


def of_class(module: str, name: str, attribute: str):
    """A wrapper of a library that is not installed: a class of its name, which holds the model by its attribute."""

    def wrapped(model):
        kind = type(name, (nn.Module,), {"__module__": module, "forward": lambda self, x: getattr(self, attribute)(x)})
        wrapper = kind()
        setattr(wrapper, attribute, model)
        return wrapper

    return wrapped


def hooked(model):
    """The model with hooks of accelerate."""
    hooks = pytest.importorskip("accelerate.hooks")
    return hooks.add_hook_to_module(model, hooks.AlignDevicesHook("cpu"))


def lora(**options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=32, target_modules=["up", "down", "gate", "lm_head"], **options)
    return lambda model: peft.get_peft_model(model, config)


def twice(model):
    """The model with adapters of two libraries' wrappers, one around the other."""
    return AveragedModel(lora()(model))


WRAPPERS = {
    "torch.compile": torch.compile,
    "checkpoint_wrapper": each_layer(checkpoint_wrapper),
    "compiled layers in a checkpoint": each_layer(lambda one: checkpoint_wrapper(torch.compile(one))),
    "DataParallel": DataParallel,
    "AveragedModel": AveragedModel,
    "DeepSpeed": of_class("deepspeed.runtime.engine", "DeepSpeedEngine", "module"),
    "Lightning Fabric": of_class("lightning.fabric.wrappers", "_FabricModule", "_forward_module"),
    "accelerate": hooked,
    "peft": lora(),
    "peft, modules_to_save": lambda model: lora(modules_to_save=["a"])(model),
    "peft in AveragedModel": twice,
}  # fmt: skip


def own_names(model: nn.Module) -> list[str]:
    return [named.name for named, _ in named_tensors(model) if named.part is None]


def test_the_model_itself():
    report = fp4compile.explain(Model().eval(), torch.randn(32, 64), recipe=RECIPE)
    assert {row.module: row.reason for row in report.rows if row.product == "fprop"} == DECIDED


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_own_names_and_decisions_are_those_of_the_model(wrapper):
    plain = Model().eval()
    wrapped = WRAPPERS[wrapper](copy.deepcopy(plain)).requires_grad_(False)
    assert sorted(own_names(wrapped)) == sorted(own_names(plain))
    adapters = {named.name.removesuffix(".weight") for named, _ in named_tensors(wrapped) if named.part == ADAPTER}
    report = fp4compile.explain(wrapped, torch.randn(32, 64), recipe=RECIPE)
    found = {row.module: row.reason for row in report.rows if row.product == "fprop" and row.module not in adapters}
    assert found == DECIDED
    report = fp4compile.pack_(wrapped, RECIPE)
    found = {row.name or row.module: row.reason for row in report.rows if row.reason not in (ADAPTER, TRAINED_COPY)}
    assert found == DECIDED


def test_an_adapter_without_lora_in_its_name_is_no_layer():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Model(), peft.LilyConfig(r=32, target_modules=["down"]))
    report = fp4compile.explain(model, torch.randn(32, 64), recipe="mxfp8")
    adapters = {row.reason for row in report.rows if ".lily_" in row.module and row.product == "fprop"}
    assert adapters == {"adapter"}


def test_static_scales_and_sensitivity_have_own_names():
    recipe, batches = {"recipe": "nvfp4_static", "rules": [["*gate", "skip"]]}, [torch.randn(32, 64)]
    found = []
    for model in (Model(), lora()(Model())):
        scales = fp4compile.calibrate(model.eval(), batches, recipe, progress=False)
        ranking = fp4compile.sensitivity(model, batches, "nvfp4", progress=False)
        found.append((scales.static_scales, {one.layer for one in ranking.layers}))
    names = {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "experts.a"}
    assert all({name for name, _ in scales} == names == layers for scales, layers in found)
    report = fp4compile.pack_(model, scales)
    assert [row.note for row in report.rows if row.reason is None] == [None] * 5


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


@pytest.mark.parametrize("wrap", (DistributedDataParallel, fsdp1, fully_shard), ids=("DDP", "FSDP1", "FSDP2"))
def test_own_names_in_a_process_group(group, wrap):
    plain = Model()
    assert sorted(own_names(wrap(copy.deepcopy(plain)))) == sorted(own_names(plain))


def test_a_block_of_a_wrapped_model_has_its_own_recipe():
    model = AveragedModel(Model())
    decided = [fp4compile.block_recipe(RECIPE, model, block) for block in model.module.blocks]
    assert [one.rule_for("up") is not None for one in decided] == [True, True]
    assert [one.rule_for("down") is not None for one in decided] == [True, False]


def test_a_parametrised_weight_has_its_layers_name():
    model = nn.Sequential(layer())
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    assert own_names(model) == ["0.weight"]
    assert clean_name("0.parametrizations.weight.original") == "0.weight"
    assert clean_name("original") == "original"


def test_a_name_that_models_use_too_stays():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.base_model, self.model = layer(), layer(), layer()

    assert [named.path for named, _ in walk(Own())] == ["", "module", "base_model", "model"]
    assert own_names(Own()) == ["module.weight", "base_model.weight", "model.weight"]
    assert clean_name("L['self'].module.base_model.model") == "module.base_model.model"
    assert clean_name("getattr(getattr(G['model'].layers, '0').experts, '3').up") == "layers.0.experts.3.up"
    assert clean_name("L['fn'].__closure__[2].cell_contents.__closure__[0].cell_contents.layers.0") == "layers.0"


def test_names_in_texts():
    assert clean_name("a.q_proj.base_layer.base_layer.weight") == "a.q_proj.weight"
    assert clean_name("lm_head.modules_to_save.default.weight") == "lm_head.weight"
    assert clean_name("lm_head.original_module.weight") == "lm_head.weight"
    assert clean_name("_forward_module.a._fsdp_wrapped_module._orig_mod.b") == "a.b"


class Chosen(nn.Module):
    """A layer of a dictionary, by its key."""

    def __init__(self, key):
        super().__init__()
        self.layers = nn.ModuleDict({key: layer()})

    def forward(self, x):
        for one in self.layers.values():
            x = one(x)
        return x


@pytest.mark.parametrize("key", ("it's", 'a"b', "b\"'c", "back\\slash", "two words", "x[0]"))
def test_rules_match_layers_by_any_key_of_a_dictionary(key):
    model, recipe = Chosen(key), {"recipe": "mxfp8", "rules": [["layers.*", "nvfp4"]]}
    backend = fp4compile.backend(recipe)
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(32, 64))
    packed = fp4compile.pack_(model, recipe)
    for report in (backend.report, packed):
        assert [(row.module, row.right) for row in report.rows] == [(f"layers.{key}", "nvfp4")]


def test_parts_of_peft():
    peft = pytest.importorskip("peft")
    config = peft.VeraConfig(r=4, target_modules=["up"], modules_to_save=["gate"])
    named = {each.path: each for each, _ in walk(peft.get_peft_model(Model(), config))}
    up, gate = "base_model.model.blocks.0.up", "base_model.model.gate"
    assert named[f"{up}.base_layer"].part is None and named[f"{up}.vera_lambda_b"].part == ADAPTER
    assert named[f"{gate}.original_module"].part is None and named[f"{gate}.original_module"].name == "gate"
    assert named[f"{gate}.modules_to_save.default"].part == TRAINED_COPY
    assert named[f"{gate}.modules_to_save.default"].below("modules_to_save.default") == ""
