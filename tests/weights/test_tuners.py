"""Every tuner of peft on packed layers: a fresh adapter, a merge, and copies that are trained."""

import pytest
import torch
from torch import nn

import fp4compile

peft = pytest.importorskip("peft")
RECIPE = {"recipe": "nvfp4_weight_only", "skip_lm_head": False}
LAYERS = ("up", "down")
# The configurations of tuners that adapt linear layers, by a name, where peft 0.21 has them.
OPTIONS = {
    "LoraConfig": {"r": 4}, "AdaLoraConfig": {"total_step": 10, "init_r": 4}, "AdamssConfig": {}, "BOFTConfig": {},
    "C3AConfig": {"block_size": 16}, "DeftConfig": {}, "DeloraConfig": {"r": 4}, "FourierFTConfig": {"n_frequency": 50},
    "FrodConfig": {}, "GraloraConfig": {"r": 4}, "HiraConfig": {"r": 4}, "HRAConfig": {"r": 4}, "IA3Config": {},
    "LoHaConfig": {"r": 4}, "LoKrConfig": {"r": 4}, "MissConfig": {"r": 4}, "OFTConfig": {"oft_block_size": 4, "r": 0},
    "OSFConfig": {}, "PeanutConfig": {}, "PsoftConfig": {"r": 4}, "PveraConfig": {"r": 4}, "RandLoraConfig": {"r": 4},
    "RoadConfig": {}, "ShiraConfig": {"r": 4}, "TinyLoraConfig": {}, "UniLoraConfig": {},
    "VBLoRAConfig": {"num_vectors": 16, "vector_length": 16}, "VeraConfig": {"r": 4},
    "WaveFTConfig": {"n_frequency": 50},
}  # fmt: skip
CASES = {f"{name}": (name, options) for name, options in OPTIONS.items()} | {
    f"LoRA {key} {value}": ("LoraConfig", {"r": 4, key: value})
    for key, value in (
        ("use_dora", True), ("use_rslora", True), ("lora_bias", True), ("init_lora_weights", "olora"),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", "orthogonal"),
    )
}  # fmt: skip


@pytest.fixture(autouse=True)
def extensions_of_its_own(tmp_path, monkeypatch):
    """BOFT builds an extension. Where that fails, a torch for CUDA leaves a lock, for which the next process waits."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.down(self.up(x).relu())


def models() -> tuple[Model, Model]:
    """(a packed model, a model with the same values in high precision)."""
    torch.manual_seed(0)
    base = Model()
    fp4compile.pack_(base, RECIPE)
    plain = Model()
    for layer, other in zip(LAYERS, LAYERS, strict=True):
        plain.get_submodule(layer).weight.data = base.get_submodule(other).weight.clone()
        plain.get_submodule(layer).bias.data = base.get_submodule(other).bias.clone()
    return base, plain


def adapted(model: nn.Module, name: str, options: dict) -> nn.Module:
    kind = getattr(peft, name, None)
    if kind is None:
        pytest.skip(f"this peft has no {name}")
    more = {"feedforward_modules": []} if name == "IA3Config" else {}
    torch.manual_seed(1)
    return peft.get_peft_model(model, kind(target_modules=list(LAYERS), **options, **more)).eval()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Some adapters, such as RandLoRA's, make outputs of thousands from their sums of much larger terms."""
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def base_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: model.base_model.model.get_submodule(name).get_base_layer().weight for name in LAYERS}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:a packed layer was given other weights")
def test_a_merged_adapter_is_the_packed_sum(case):
    """The codes of a merge are those of the same merge in high precision, packed by the same recipe."""
    base, plain = models()
    x = torch.randn(8, 64)
    model, other = (adapted(one, *CASES[case]) for one in (base, plain))
    if "init_lora_weights" not in CASES[case][1]:  # those write to the base weight, which is rounded again
        assert_close(model(x), other(x))
    with torch.no_grad():
        for name, weight in base_weights(other).items():
            weight.copy_(base_weights(model)[name])
    trained, same = (
        {name: parameter for name, parameter in one.named_parameters() if parameter.requires_grad}
        for one in (model, other)
    )
    assert trained.keys() == same.keys()
    for name, parameter in trained.items():
        parameter.data += 0.05 * torch.randn_like(parameter)
        same[name].data.copy_(parameter.data)
    assert_close(model(x), other(x))
    safe = {"safe_merge": True} if "LoRA" in case else {}
    merged, summed = model.merge_and_unload(**safe), other.merge_and_unload()
    fp4compile.pack_(summed, RECIPE)
    for name in LAYERS:
        layers = merged.get_submodule(name), summed.get_submodule(name)
        assert all(type(layer).__name__ == "PackedLinear" for layer in layers)
        assert torch.equal(layers[0].weight_data, layers[1].weight_data)


def step(model: nn.Module) -> set[str]:
    """The names of the parameters that a training step changes."""
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.train()(torch.randn(8, 64)).square().sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01).step()
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


@pytest.mark.parametrize(("name", "options", "copied"), [
    ("LNTuningConfig", {}, "ln_tuning_layers"), ("LoraConfig", {"modules_to_save": ["down"]}, "modules_to_save"),
])  # fmt: skip
def test_a_copy_that_peft_trains_has_a_weight(name, options, copied):
    base, _ = models()
    torch.manual_seed(1)
    expected = base.down.weight.clone()
    layers = ["down"] if name == "LNTuningConfig" else ["up"]
    model = peft.get_peft_model(base, getattr(peft, name)(target_modules=layers, **options))
    path = f"base_model.model.down.{copied}.default"
    copy = model.get_submodule(path)
    assert type(copy) is nn.Linear and torch.equal(copy.weight, expected)
    assert {f"{path}.weight", f"{path}.bias"} <= step(model)


def test_a_copy_of_a_module_of_packed_layers_has_weights():
    """The copy keeps one layer with two names, and the original stays packed."""
    base = nn.ModuleDict({"model": Model(), "other": Model()})
    base["other"].up = base["other"].down
    fp4compile.pack_(base, RECIPE)
    base.forward = lambda x: base["other"](base["model"](x))
    config = peft.LoraConfig(target_modules=["model.up"], modules_to_save=["other"])
    model = peft.get_peft_model(base, config)
    wrapper = model.base_model.model["other"]
    copy = wrapper.modules_to_save["default"]
    assert type(copy.up) is nn.Linear and copy.up is copy.down
    assert type(wrapper.original_module.up).__name__ == "PackedLinear"
