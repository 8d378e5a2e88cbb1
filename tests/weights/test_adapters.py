"""Adapters on packed weights: gradients, peft, the Trainer, and merging."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4compile
from fp4compile.recipe import named
from fp4compile.weights.linear import PackedLinear
from tests.helpers import without_codegen

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
FORMATS = ("nvfp4", "nvfp4_weight_only", "mxfp8", "float8_rowwise")


def packed(recipe: str, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> PackedLinear:
    model = nn.Sequential(nn.Linear(96, 64, bias=bias)).to(dtype)
    fp4compile.pack_(model, recipe)
    return model[0].requires_grad_(True)


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", ((7, 96), (2, 3, 96), (96,), (0, 96)), ids=str)
def test_gradients_are_products_with_the_dequantised_weight(recipe, dtype, shape):
    layer = packed(recipe, dtype=dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    gradient = torch.randn(*shape[:-1], 64, dtype=dtype)
    y = layer(x)
    y.backward(gradient)
    assert torch.equal(x.grad, gradient @ layer.weight)
    assert torch.equal(layer.bias.grad, gradient.reshape(-1, 64).sum(0))
    with torch.no_grad():
        assert torch.equal(y, layer(x))  # the product's bits do not depend on gradients


def test_only_the_bias_needs_a_gradient():
    layer = packed("nvfp4")
    layer(torch.randn(5, 96)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((64,), 5.0))


@pytest.mark.parametrize("recipe", ("nvfp4", "mxfp8"))
def test_a_compiled_step_is_the_eager_one_and_keeps_no_weight(recipe, monkeypatch):
    if recipe == "mxfp8":
        without_codegen.install(monkeypatch)  # the other one has Inductor's code
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))
    fp4compile.pack_(model, recipe)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    backend = fp4compile.backend(recipe)
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    inputs = [torch.randn(32, 96, requires_grad=True) for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = compiled(inputs[1])
    y.square().sum().backward()
    expected = model(inputs[0])
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    assert not {(128, 96), (64, 128)} & {tuple(t.shape) for t in saved if t.dtype == torch.float32}
    assert backend.report.counts["recompute"] == 2
    reasons = [row.reason for row in backend.report.rows if not row.quantised]
    assert reasons == ["gradient x packed weight: the weight is dequantised"] * 2


def test_a_weight_that_is_read_through_a_cast_is_not_kept(monkeypatch):
    without_codegen.install(monkeypatch)
    layer = packed("mxfp8", bias=False)
    run = torch.compile(lambda x: x @ layer.weight.bfloat16().t(), backend=fp4compile.backend("mxfp8"))
    saved: list[torch.Tensor] = []
    x = torch.randn(32, 96, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run(x)
    y.backward(gradient := torch.randn_like(y))
    assert torch.equal(x.grad, gradient @ layer.weight.bfloat16())
    assert saved and all(t.itemsize == 1 for t in saved)  # codes and scales


def test_checkpointed(monkeypatch):
    without_codegen.install(monkeypatch)
    layer, x = packed("nvfp4"), torch.randn(4, 96)

    def step(x):
        return checkpoint(lambda x: layer(x).relu(), x, use_reentrant=False)

    inputs = [x.clone().requires_grad_(True) for _ in range(3)]
    compiled = torch.compile(step, backend=fp4compile.backend("nvfp4"))
    for run, each in zip((lambda x: layer(x).relu(), step, compiled), inputs, strict=True):
        run(each).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(inputs[2].grad, inputs[0].grad)


# ---------------------------------------------------------------- writes


def test_assigned_data_is_packed_by_the_layers_own_rule():
    model = nn.Sequential(nn.Linear(96, 64))
    other = torch.randn(64, 96)
    recipe = named("nvfp4_weight_only").replace(weight_scales="mse")
    fp4compile.pack_(model, recipe)
    layer, expected = model[0], nn.Sequential(nn.Linear(96, 64))
    expected[0].weight.data.copy_(other)
    fp4compile.pack_(expected, recipe)
    with pytest.warns(UserWarning, match=r"packed them again in nvfp4\S*: SQNR 2\d dB"):
        layer.weight.data = other
    assert torch.equal(layer.weight_data, expected[0].weight_data)
    assert torch.equal(layer.weight_scales.view(torch.uint8), expected[0].weight_scales.view(torch.uint8))


def written_views(weight: torch.Tensor) -> None:
    weight[:, :32].t()[3].add_(1)
    weight.chunk(2)[1].mul_(2)
    weight.detach().unbind(0)[5].zero_()


WRITES = {
    "add_": lambda weight: weight.add_(1),
    "in place": lambda weight: weight.__imul__(2),
    "data in place": lambda weight: weight.data.sub_(1),
    "setitem": lambda weight: weight.__setitem__((slice(3), 5), 4.0),
    "views": written_views,
    "T": lambda weight: weight.T.fill_(3),
    "out": lambda weight: torch.add(torch.ones(64, 96), 1, out=weight),
    "foreach": lambda weight: torch._foreach_mul_([weight], 2.0),
    "index_copy_": lambda weight: weight.index_copy_(0, torch.tensor([2]), torch.ones(1, 96)),
    "init": lambda weight: nn.init.uniform_(weight, generator=torch.Generator().manual_seed(0)),
    "with a gradient": lambda weight: weight.data.add_(torch.ones(96, requires_grad=True)),
}


@pytest.mark.parametrize("context", (torch.enable_grad, torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_place_is_packed(write, context):
    model = nn.Sequential(nn.Linear(96, 64))
    fp4compile.pack_(model, "mxfp8")
    plain = copy.deepcopy(model[0].weight).requires_grad_(False)
    with context(), pytest.warns(UserWarning, match="packed them again in mxfp8"):
        weight = model[0].weight
        WRITES[write](weight)
    with torch.no_grad():
        WRITES[write](plain)
    assert torch.equal(weight, plain) and not weight.requires_grad, "the tensor holds what was written"
    expected = nn.Sequential(nn.Linear(96, 64))
    expected[0].weight.data = plain
    fp4compile.pack_(expected, "mxfp8")
    assert torch.equal(model[0].weight_data.view(torch.uint8), expected[0].weight_data.view(torch.uint8))
    assert torch.equal(model[0].weight_scales.view(torch.uint8), expected[0].weight_scales.view(torch.uint8))


def test_a_weight_that_was_written_to_holds_what_was_written():
    """As OLoRA does: it takes its adapter out of a weight that it has read, and assigns that to another reading."""
    layer = packed("nvfp4")
    weight, before = layer.weight, layer.weight.clone()
    with pytest.warns(UserWarning, match="packed them again"):
        weight.data -= 0.1
        assert torch.equal(weight, before - 0.1)
        codes = layer.weight_data.clone()
        layer.weight.data = weight
    assert torch.equal(layer.weight_data, codes)
    layer.weight = weight  # has these codes
    assert torch.equal(layer.weight_data, codes)
    older = layer.weight
    with pytest.warns(UserWarning, match="packed them again"):
        layer.weight.zero_()
        layer.weight = older
    assert float((layer.weight - older).square().mean()) < 0.01 * float(older.square().mean())


def test_a_write_that_cannot_be_packed_raises():
    layer = packed("mxfp8")
    with pytest.raises(ValueError, match=r"expected shape \(64, 96\), got \(96, 64\)"):
        layer.weight.data = torch.ones(96, 64)
    with pytest.raises(RuntimeError, match="a view of a packed layer's weight takes no other data"):
        layer.weight[0].data = torch.ones(96)
    with pytest.raises(ValueError, match="read-only"):
        layer.weight.numpy()[0] = 1


def test_a_compiled_function_packs_what_it_writes():
    layer = packed("mxfp8")
    weight = layer.weight
    with pytest.warns(UserWarning, match="packed them again"):
        torch.compile(lambda: weight.zero_(), backend="eager")()
    assert not layer.weight.any()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda: weight.zero_(), backend="eager", fullgraph=True)()


def test_a_weight_is_freed_with_its_last_reference():
    layer = packed("mxfp8")
    found = weakref.ref(layer.weight)
    assert found() is None


def test_the_result_of_a_product_may_be_written_to():
    layer, x = packed("nvfp4"), torch.randn(3, 96, requires_grad=True)
    y = layer(x)
    y += 1
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 64) @ layer.weight)


# ---------------------------------------------------------------- peft


def llama(recipe: str | None = "nvfp4", layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if recipe:
        fp4compile.pack_(model, recipe)
    return model


def adapted(model: nn.Module, **options) -> nn.Module:
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", **options))


def steps(model: nn.Module) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, 1e-2), []
    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_compiled_step_of_adapters_is_the_eager_one(monkeypatch):
    without_codegen.install(monkeypatch)
    models = [adapted(llama(layers=1)) for _ in range(2)]
    runs = models[0], torch.compile(models[1], backend=fp4compile.backend("nvfp4"))
    for name, parameter in (*models[0].named_parameters(), *models[1].named_parameters()):
        if "lora_B" in name:  # zeros would hide the gradients of A
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    tokens, gradients = torch.arange(32).view(2, 16), []
    for model, run in zip(models, runs, strict=True):
        run(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == 14  # A and B of 7 layers
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(16).view(1, 16)).logits


def weights_of(model: nn.Module, adapter: str) -> list[torch.Tensor]:
    return [parameter.detach().clone() for name, parameter in model.named_parameters() if f".{adapter}." in name]


def test_several_adapters_are_trained_saved_and_trained_on(tmp_path):
    """A LoRA adapter and a DoRA adapter on one packed model; training goes on after loading, with the same bits."""
    base = llama()
    plain, model = logits(base), adapted(base)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True))
    first = steps(model), weights_of(model, "default")
    model.set_adapter("second")
    second = steps(model), weights_of(model, "second")
    assert all(map(torch.equal, weights_of(model, "default"), first[1])) and second[0][-1] < second[0][0]
    with model.disable_adapter():
        assert torch.equal(logits(model), plain), "the codes are as they were"
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    loaded.load_adapter(tmp_path / "second", "second", is_trainable=True)
    for name in ("default", "second"):
        loaded.set_adapter(name), model.set_adapter(name)
        assert torch.equal(logits(loaded), logits(model))
        assert steps(loaded) == steps(model)


def test_adapters_by_transformers_own_interface():
    model = llama()
    plain = logits(model)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"]))
    losses = steps(model)
    assert losses[-1] < losses[0] and not torch.equal(logits(model), plain)
    model.disable_adapters()
    assert torch.equal(logits(model), plain)


def test_the_trainer_takes_adapters_on_a_packed_model(tmp_path):
    folder = tmp_path / "packed"
    llama().save_pretrained(folder)
    fp4compile.register_with_transformers()
    base = type(llama(None)).from_pretrained(folder)
    model = adapted(base)
    tokens = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    arguments = transformers.TrainingArguments(
        tmp_path / "out", max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    assert transformers.Trainer(model, arguments, train_dataset=tokens).train().global_step == 2
