"""Frozen weights of training graphs: quantised once, as in inference graphs, and never out of date."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4compile


class Net(nn.Module):
    """Two frozen layers behind a trained one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
        for layer in (self.up, self.down):
            layer.requires_grad_(False)

    def forward(self, x):
        return self.block(self.trained(x))

    def block(self, x):
        return self.down(torch.relu(self.up(x)))


class Checkpointed(Net):
    def forward(self, x):
        return checkpoint(self.block, self.trained(x), use_reentrant=False)


def quantisers(step):
    """(what a step returns, how many times it quantises)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = step()
    return result, sum(event.count for event in profile.key_averages() if event.key == "fp4compile::quantize")


def gradient(model, run, x):
    model.zero_grad()
    run(x).square().sum().backward()
    return model.trained.weight.grad.clone()


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


# Of 3 layers: 3 x, 3 W; 3 dY for 2 dgrads and 1 wgrad, 2 W and 1 x along the other dimension.
@pytest.mark.parametrize(("kind", "recipe", "before", "after"), [
    (Net, "mxfp8", 11, 7), (Net, "nvfp4_train", 11, 7), (Checkpointed, "mxfp8", 12, 8),
])  # fmt: skip
def test_quantised_once_and_again_when_it_changes(kind, recipe, before, after, monkeypatch):
    results, counts = [], []
    for disabled in ((), ("hoist",)):
        monkeypatch.setattr(fp4compile.config, "disabled_passes", disabled)
        torch._dynamo.reset()
        model = kind()
        run = torch.compile(model, backend=fp4compile.backend(recipe, stochastic_rounding=()))
        found = [gradient(model, run, X)]
        again, count = quantisers(lambda model=model, run=run: gradient(model, run, X))
        found.append(again)
        with torch.no_grad():
            model.up.weight.mul_(-1.5)
        found.append(gradient(model, run, X))
        results.append(found)
        counts.append(count)
    assert all(map(torch.equal, *results))
    assert torch.equal(results[0][0], results[0][1]) and not torch.equal(results[0][1], results[0][2])
    assert counts == [after, before]


def test_a_step_after_inference_mode_and_inference_after_a_change():
    model = Net()
    run = torch.compile(model, backend=fp4compile.backend("mxfp8_32x32"))
    with torch.inference_mode():
        run(X)
    first = gradient(model, run, X)
    with torch.no_grad():
        model.up.weight.mul_(2)
        changed = run(X)
    assert not torch.equal(first, gradient(model, run, X))
    with torch.inference_mode():
        assert torch.equal(run(X), changed)


def test_a_weight_that_changes_before_the_backward_pass_is_told():
    model = Net()
    run = torch.compile(model, backend=fp4compile.backend("mxfp8"))
    y = run(X)
    with torch.no_grad():
        model.up.weight.mul_(2)
        model.down.weight.mul_(2)
    run(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("fused", (False, True))
def test_a_layer_that_thaws_is_trained(fused):
    model = Net()
    run = torch.compile(model, backend=fp4compile.backend("mxfp8"))
    gradient(model, run, X)
    model.up.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    losses = []
    for _ in range(3):
        loss = run(X).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    model.up.requires_grad_(False)
    frozen = gradient(model, run, X)
    torch._dynamo.reset()
    assert torch.equal(frozen, gradient(model, torch.compile(model, backend=fp4compile.backend("mxfp8")), X))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", (None, "reduce-overhead"))
@pytest.mark.parametrize("recipe", ("mxfp8", "nvfp4_train", "float8_rowwise"))
def test_on_a_gpu(recipe, mode, monkeypatch):
    """The bits of steps that quantise each time, in CUDA graphs too, before and after the weight changes."""
    x = X.to("cuda", torch.bfloat16)
    results = []
    for disabled in ((), ("hoist",)):
        monkeypatch.setattr(fp4compile.config, "disabled_passes", disabled)
        torch._dynamo.reset()
        model = Net().to("cuda", torch.bfloat16)
        run = torch.compile(model, backend=fp4compile.backend(recipe, stochastic_rounding=()), mode=mode)
        found = []
        for step in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            found.append(gradient(model, run, x))
            if step == 3:
                with torch.no_grad():
                    model.up.weight.mul_(-1.5)
        results.append(found)
    assert all(map(torch.equal, *results))
    assert torch.equal(results[0][2], results[0][3]) and not torch.equal(results[0][3], results[0][4])
